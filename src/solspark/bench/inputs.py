"""Makes the tensors of a problem, and keeps what several measurements of it share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solspark.bench.activations import video_activations
from solspark.bench.gate import RowSample, dense_rows, sample_rows
from solspark.bench.problems import Problem
from solspark.errors import MissingDependencyError
from solspark.integrations.capture import FORMAT
from solspark.types import TokenGrid

CHUNK_TOKENS = 4096
KINDS = ("gaussian", "video", "file")
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(eq=False)
class Inputs:
    """Hold Q, K, V [B, T, H, D] of a problem.

    Args:
        problem: its shape (heads may be fewer when only some were made).
        query, key, value: the tensors.
        kind: "gaussian", "video", or "file".
    """

    problem: Problem
    query: Tensor
    key: Tensor
    value: Tensor
    kind: str
    _cache: dict = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def precision(self) -> str:
        return PRECISIONS.get(self.query.dtype, str(self.query.dtype))

    @property
    def heads(self) -> int:
        return self.query.shape[2]

    @cached_property
    def sample(self) -> RowSample:
        """Rows and heads that the gate looks at."""
        return sample_rows(self.query.shape[1], self.heads, self.device)

    @cached_property
    def dense(self) -> Tensor:
        """Dense attention of the sampled rows, float64 [B, heads, R, D]."""
        return dense_rows(self.query, self.key, self.value, self.sample)

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views [B, H, T, D], the layout of torch's attention."""
        query, key, value = (x.transpose(1, 2) for x in (self.query, self.key, self.value))
        return query, key, value


def make_inputs(
    problem: Problem,
    kind: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    file: Path | None = None,
) -> Inputs:
    """Make or load the tensors of a problem.

    Args:
        problem: shape.
        kind: "gaussian" for standard normal values, "video" for `video_activations`, "file" to
            load.
        device: where they go.
        dtype: of the tensors.
        seed: of the values.
        file: safetensors with query, key and value [1, T, H, D] (kind "file"); as many heads are
            taken as the problem has.

    Raises:
        ValueError: an unknown kind, or a file whose shape is not the problem's.
    """
    if kind == "gaussian":
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (problem.batch, problem.tokens, problem.heads, problem.head_dim)
        tensors = [
            torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3)
        ]
    elif kind == "video":
        tensors = list(video_activations(problem, seed=seed, dtype=dtype, device=device))
    elif kind == "file" and file is not None:
        tensors = _load(file, problem, device, dtype)
    else:
        raise ValueError(f"inputs: expected one of {', '.join(KINDS)}, got {kind!r}")
    query, key, value = tensors
    return Inputs(problem, query, key, value, kind)


def chunked_projection(inputs: Inputs) -> tuple[Any, ...]:
    """Make what a chunked INT8 call reads, on Gaussian data; the same for ours and for a peer's.

    Args:
        inputs: says tokens, heads and device.

    Returns:
        (chunks, T, H, rotation, norms): a callable that yields bfloat16 [4096, 3 H 128] of the
        fused projection, float32 [T, 1, 48, 2, 2], and two RMSNorm weights [128] of one.
    """
    tokens, heads, device = inputs.query.shape[1], inputs.heads, inputs.device
    generator = torch.Generator(device=device).manual_seed(0)
    projection = torch.randn(
        tokens, 3 * heads * 128, generator=generator, device=device, dtype=torch.bfloat16
    )
    angle = torch.rand(tokens, 1, 48, generator=generator, device=device) * 6.2832
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    norms = tuple(torch.ones(128, device=device, dtype=torch.bfloat16) for _ in range(2))

    def chunks() -> Iterator[Tensor]:
        return (projection[i : i + CHUNK_TOKENS] for i in range(0, tokens, CHUNK_TOKENS))

    return chunks, tokens, heads, rotation, norms


def recorded_problem(file: Path) -> Problem | None:
    """Return the problem that a file of `solspark capture` is one call of.

    Args:
        file: safetensors.

    Returns:
        Its grid, context, heads and source under a name of its own; None when the file does not
        say, so that the caller has to.

    Raises:
        ValueError: no safetensors, or no tensor called query.
        OSError: no such file.
        MissingDependencyError: safetensors is not installed.
    """
    with _opened(file) as stored:
        facts = stored.metadata() or {}
        if facts.get("solspark") != FORMAT:
            return None
        _, tokens, heads, head_dim = stored.get_slice(_known("query", stored, file)).get_shape()
    grid = TokenGrid(*json.loads(facts["grid"]))
    text = int(facts["text_tokens"])
    wanted = ("model", "layer", "evaluation", "steps", "seed", "created")
    source = ", ".join(f"{name} {facts[name]}" for name in wanted if name in facts)
    return Problem(
        facts["problem"],
        grid,
        text,
        tokens - grid.tokens - text,
        heads,
        head_dim,
        f"captured: {source}",
    )


def _load(file: Path, problem: Problem, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Read query, key and value, the first heads of the problem, and check them against it."""
    recorded = recorded_problem(file)
    if recorded is not None and recorded.grid != problem.grid:
        raise ValueError(
            f"{file}: expected the grid {problem.grid.as_tuple()} of {problem.name}, got "
            f"{recorded.grid.as_tuple()}; without --problem the file says what it is"
        )
    tensors = []
    with _opened(file) as stored:
        for name in ("query", "key", "value"):
            tensor = stored.get_tensor(_known(name, stored, file))
            if tensor.ndim != 4 or tensor.shape[1] != problem.tokens:
                raise ValueError(
                    f"{file}: {name}: expected [B, {problem.tokens}, H, D] for {problem.name}, "
                    f"got {tuple(tensor.shape)}"
                )
            tensors.append(tensor[:, :, : problem.heads].to(device=device, dtype=dtype))
    return tensors


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file for reading, or say why it cannot be."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError(
            "--activations needs safetensors: pip install safetensors"
        ) from error
    try:
        stored = safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: expected safetensors, got something else: {error}") from error
    with stored:
        yield stored


def _known(name: str, stored: Any, file: Path) -> str:
    """Return the name of a tensor that the file has to hold."""
    names = list(stored.keys())
    if name not in names:
        raise ValueError(f"{file}: expected tensors query, key and value, got {names}")
    return name
