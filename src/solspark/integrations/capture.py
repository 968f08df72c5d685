"""Save what the attention of a MiniMax-H3 pipeline reads: Q, K and V of chosen calls.

This is the work behind `solspark capture`. A processor in front of the model's own projects the
rows once more for itself and then lets the original attend, so that a run with it is the run
without it, bit for bit. Each call becomes one safetensors file, which `solspark bench
--activations` replays.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnose import environment
from ..errors import MissingDependencyError
from .clip import OutputFolder
from .generation import GenerateOptions, Progress, open_pipeline
from .h3_layout import (
    TEXT_TAG,
    H3Layout,
    derive_layout,
    forward_arguments,
    structure_key,
    video_timestep,
)
from .h3_media import open_media
from .h3_pipeline import generate_clip, loaded_transformer
from .h3_processor import H3SparseAttentionProcessor, WrappingProcessor, project_qkv
from .install import ProcessorSwap

FORMAT = "activations-1"
"""Value of the key `solspark` in the metadata of a file: what the other keys mean."""

ORDER = (
    "query, key, value [B, T, H, D] after norm and rotary embedding; the generated video first, in "
    "raster order over grid (frames, height, width), then all other rows in the model's order"
)


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """Hold what one attention call reads.

    Args:
        query, key, value: [B, T, H, D] on the CPU, after norm and rotary embedding, the generated
            video first.
        layer: transformer block.
        evaluation: transformer evaluation, from 0.
        layout: where the video came from in the model's own order.
        text_tokens: rows of text among the T - V rows behind the video.
        timestep: of the video, or None when the model was not told.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layer: int
    evaluation: int
    layout: H3Layout
    text_tokens: int
    timestep: float | None


class H3Capture:
    """Hand over Q, K and V of chosen attention calls: a context manager, or `apply()`, `remove()`.

    Dense attention stays with the processors that were there. Only they are replaced, on chosen
    layers, and the same objects are put back.

    Args:
        target: a MiniMax-H3 transformer, or a pipeline that holds exactly one.
        layers: transformer blocks.
        evaluations: transformer evaluations, counted from 0 since `apply()`.
        save: called with each `CapturedCall`, in order; what it raises ends the run.

    Raises:
        TypeError: the target has no transformer blocks.
        ValueError: a layer that the transformer does not have.
    """

    def __init__(
        self,
        target: Any,
        layers: Sequence[int],
        evaluations: Sequence[int],
        save: Callable[[CapturedCall], None],
    ):
        if not hasattr(target, "transformer_blocks"):
            target = loaded_transformer(target)[1]
        blocks = getattr(target, "transformer_blocks", None)
        if blocks is None:
            raise TypeError(
                "target: expected a MiniMax-H3 transformer with transformer_blocks, got "
                f"{type(target).__name__}"
            )
        _check_numbers("layers", layers, len(blocks))
        self.transformer: nn.Module = target
        self.layers = tuple(sorted(set(layers)))
        self.evaluations = frozenset(evaluations)
        self._blocks = blocks
        self._save = save
        self._swap = ProcessorSwap()
        self._hook: Any = None
        self._forget()

    def _forget(self) -> None:
        """Begin to count: no forward seen, nothing captured."""
        self.missing = {
            (evaluation, layer) for evaluation in self.evaluations for layer in self.layers
        }
        self._evaluation = -1
        self._structure: Any = None
        self._arguments: dict[str, Any] = {}
        self._layout: H3Layout | None = None
        self._text_tokens = 0

    @property
    def complete(self) -> bool:
        """Whether every call that was asked for has been handed over."""
        return not self.missing

    def __enter__(self) -> H3Capture:
        return self.apply()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def apply(self) -> H3Capture:
        """Install: a pre-hook on the transformer, a processor on each chosen block.

        Raises:
            RuntimeError: it is installed already, or the blocks attend sparsely or capture already.
        """
        if self._hook is not None:
            raise RuntimeError("this capture is installed already: leave the context or remove()")
        for layer in self.layers:
            processor = self._blocks[layer].attn.get_processor()
            if isinstance(processor, _CapturingProcessor) or (
                isinstance(processor, H3SparseAttentionProcessor) and processor.active
            ):
                raise RuntimeError(
                    f"transformer_blocks.{layer}.attn: expected the model's own processor, got "
                    f"{type(processor).__name__}: remove what is installed there first"
                )
        self._forget()
        try:
            self._hook = self.transformer.register_forward_pre_hook(
                self._pre_hook(), with_kwargs=True
            )
            for layer in self.layers:
                attn = self._blocks[layer].attn
                processor = _CapturingProcessor(self, layer, attn.get_processor())
                self._swap.swap(f"transformer_blocks.{layer}.attn", attn, processor)
        except BaseException:
            self.remove()
            raise
        return self

    def remove(self) -> None:
        """Put the original processors back and take the hook off; a second time does nothing."""
        hook, self._hook = self._hook, None
        try:
            kept = self._swap.restore()
        finally:
            self._arguments, self._layout = {}, None
            if hook is not None:
                hook.remove()
        if kept:
            warnings.warn(
                f"the attention processor of {', '.join(kept)} was replaced inside the context: it "
                "is left as it is, and nothing was captured there",
                RuntimeWarning,
                stacklevel=2,
            )

    def wants(self, layer: int) -> bool:
        """Say whether the coming call of a layer is one to capture."""
        return self._hook is not None and (self._evaluation, layer) in self.missing

    @torch.no_grad()
    def take(
        self,
        layer: int,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Project the rows of one call, pack them and hand them over.

        Args:
            layer: of the call.
            attn: its attention module.
            hidden_states: [B, S, hidden].
            rotary_emb: (cos, sin), each [S, rotary].

        Raises:
            RuntimeError: the sequence is not the one that the layout describes.
        """
        layout = self._layout
        if layout is None or hidden_states.shape[1] != layout.tokens:
            raise RuntimeError(
                f"hidden_states: expected the {layout.tokens if layout else 'missing'} rows of the "
                f"packed layout, got {hidden_states.shape[1]} (context parallelism is not "
                "supported)"
            )

        def pack(rows: Tensor) -> Tensor:
            # To the CPU one by one: three more tensors of 1.4 GiB may not fit beside the model.
            return layout.pack(rows).cpu()

        query, key, value = project_qkv(attn, hidden_states, rotary_emb, pack)
        call = CapturedCall(
            query=query,
            key=key,
            value=value,
            layer=layer,
            evaluation=self._evaluation,
            layout=layout,
            text_tokens=self._text_tokens,
            timestep=video_timestep(self._arguments),
        )
        self._save(call)
        self.missing.discard((self._evaluation, layer))

    def _pre_hook(self) -> Callable[..., Any]:
        """Make the forward pre-hook; it must stay eager, for it counts."""

        @torch.compiler.disable
        def count_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._evaluation += 1
            if self._evaluation not in self.evaluations:
                return
            arguments = forward_arguments(args, kwargs)
            structure = structure_key(arguments)
            if structure != self._structure:
                self._layout = derive_layout(arguments)
                self._text_tokens = _count_text(arguments)
                self._structure = structure
            # Keeping them keeps the identities in `structure` from being given away.
            self._arguments = arguments

        hook: Any = count_forward
        return hook


class _CapturingProcessor(WrappingProcessor):
    """Show the capture what one block reads, then let the original attend."""

    def __init__(self, capture: H3Capture, layer: int, original: Any):
        super().__init__(original)
        self.capture = capture
        self.layer = layer

    @torch.compiler.disable
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        if self.capture.wants(self.layer):
            self.capture.take(self.layer, attn, hidden_states, rotary_emb)
        return self.original(attn, hidden_states, rotary_emb, attention_mask)


class _Complete(BaseException):
    """Ends a run that has nothing more to give; no Exception, which the pipeline would log."""


def capture(
    run: GenerateOptions,
    layers: Sequence[int] = (),
    evaluations: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[Path]:
    """Run a pipeline densely and save Q, K and V of chosen layers and evaluations.

    One file a call, `layer07-evaluation04.safetensors`: `query`, `key` and `value` [1, T, H, D] in
    the dtype of the model, with grid, token counts and provenance as metadata. The run ends after
    the last evaluation that was asked for, and makes no clip. Nothing is written under its real
    name before all of it is complete.

    Args:
        run: what to generate, and the folder `out`; its method is "dense".
        layers: transformer blocks; none takes the middle one.
        evaluations: transformer evaluations, from 0; none takes the middle one.
        progress: told about each finished transformer evaluation.

    Returns:
        The paths written, in the order of the calls.

    Raises:
        ValueError: an option that does not fit the model, or a keyframe or reference that cannot be
            read.
        FileNotFoundError: a keyframe or reference is missing.
        MissingDependencyError: diffusers, safetensors or what reads media is missing.
    """
    if run.method != "dense":
        raise ValueError(f"method: expected 'dense' to capture, got {run.method!r}")
    _check_numbers("layers", layers, None)
    _check_numbers("evaluations", evaluations, run.steps)
    save_file = _require_safetensors()
    with OutputFolder(run.out) as folder:
        media = open_media(run.first_frame, run.last_frame, run.references)
        pipe, call, _, _ = open_pipeline(run)
        component, transformer = loaded_transformer(pipe)
        count, steps = len(transformer.transformer_blocks), call["steps"]  # type: ignore[arg-type]
        _check_numbers("evaluations", evaluations, steps)
        source = {
            "model": run.model,
            "workflow": run.workflow,
            "component": component,
            **call,
            **_versions(),
        }

        def save(item: CapturedCall) -> None:
            name = f"layer{item.layer:02d}-evaluation{item.evaluation:02d}"
            tensors = {"query": item.query, "key": item.key, "value": item.value}
            save_file(
                {label: tensor.contiguous() for label, tensor in tensors.items()},
                folder.path(f"{name}.safetensors"),
                metadata=_metadata(item, name, source),
            )

        chosen = (tuple(layers) or (count // 2,), tuple(evaluations) or (steps // 2,))
        with H3Capture(transformer, *chosen, save) as watch:

            def on_step(done: int, total: int) -> None:
                if progress is not None:
                    progress("capture", done, total)
                if watch.complete:
                    raise _Complete

            with suppress(_Complete):
                generate_clip(pipe, **call, **media, on_step=on_step)
        if not watch.complete:
            evaluation, layer = min(watch.missing)
            raise ValueError(
                f"evaluations: layer {layer} was not called in evaluation {evaluation}; the run "
                "ended before, or something replaced its processor"
            )
        return folder.commit()


def _metadata(item: CapturedCall, name: str, source: dict[str, Any]) -> dict[str, str]:
    """Return what a file says of itself: words as they are, all else as JSON, nothing unknown."""
    grid = item.layout.grid.as_tuple()
    shape = "x".join(str(size) for size in grid)
    facts = {
        "solspark": FORMAT,
        "problem": f"{Path(source['model']).name or 'model'}-{shape}-{name}",
        "order": ORDER,
        "grid": grid,
        "video_tokens": item.layout.video_tokens,
        "text_tokens": item.text_tokens,
        "condition_tokens": item.layout.condition_tokens,
        "layer": item.layer,
        "evaluation": item.evaluation,
        "timestep": item.timestep,
        **source,
    }
    return {
        label: value if isinstance(value, str) else json.dumps(value)
        for label, value in facts.items()
        if value is not None
    }


def _versions() -> dict[str, Any]:
    """Say when and with what a file was made."""
    found = environment()
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "solspark_version": found["solspark"],
        "torch": found["packages"]["torch"],
        "diffusers": found["packages"]["diffusers"],
    }


def _count_text(arguments: dict[str, Any]) -> int:
    """Count the rows of text of a request."""
    rows = arguments.get("text_indices")
    if isinstance(rows, Tensor):
        return rows.numel()
    return int((arguments["token_tags"] == TEXT_TAG).sum())


def _check_numbers(name: str, numbers: Sequence[int], count: int | None) -> None:
    """Refuse what is not an index below `count`, where that is known."""
    for number in numbers:
        if type(number) is not int or number < 0 or (count is not None and number >= count):
            wanted = "ints >= 0" if count is None else f"ints from 0 to {count - 1}"
            raise ValueError(f"{name}: expected {wanted}, got {number!r}")


def _require_safetensors() -> Callable[..., None]:
    """Return safetensors' writer, or say what to install."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependencyError(
            "capturing activations needs safetensors: pip install safetensors"
        ) from error
    return save_file
