"""What tests and benchmarks share: input factories, and closeness judged by a float64 oracle."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "fused", "interleaved", "heads_first", "odd_last_stride", "guarded")
"""Memory layouts that `make_qkv` knows."""


def assert_close_to_oracle(
    actual: Tensor,
    oracle: Tensor,
    same_dtype_reference: Tensor,
    *,
    name: str = "output",
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Assert that a result is as near to the oracle as its type allows.

        e_k = |actual - oracle|,  e_r = |same_dtype_reference - oracle|
        max e_k <= 2 max e_r + eps * scale   and   mean e_k <= 2 mean e_r + eps * mean|oracle|

    A float64 result is outside this rule: the oracle is no better. Compare those directly.

    Args:
        actual: the result to judge, any float type but float64.
        oracle: the reference on float64 copies of the already rounded inputs, same shape.
        same_dtype_reference: the reference on the inputs themselves, same shape.
        name: how messages call the result.
        scale: magnitude of the values; None takes max |oracle|. The mean's bound takes the smaller
            of it and mean |oracle|.
        dtype: type whose eps counts; None takes that of `actual`.

    Raises:
        AssertionError: shapes differ, a value is not finite where the oracle's is (or another
            infinity), or an error exceeds its bound; the message has both errors and both bounds.
    """
    if actual.dtype == torch.float64:
        raise AssertionError(f"{name}: a float64 result has no better oracle")
    if actual.shape != oracle.shape:
        raise AssertionError(
            f"{name}: expected shape {tuple(oracle.shape)}, got {tuple(actual.shape)}"
        )
    result, wanted = actual.detach().double().cpu(), oracle.detach().double().cpu()
    peer = same_dtype_reference.detach().double().cpu()
    finite = wanted.isfinite()
    if wanted.isnan().any():
        raise AssertionError(f"{name}: the oracle itself holds NaN")
    wrong = torch.where(finite, ~result.isfinite(), result != wanted)
    if wrong.any():
        place = tuple(int(item) for item in wrong.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values are not finite, or not the "
            f"oracle's infinity; the first at {place}: {float(result[place])}, "
            f"oracle {float(wanted[place])}"
        )
    if not finite.any():
        return
    result, wanted, peer = result[finite], wanted[finite], peer[finite]
    error, peer_error = (result - wanted).abs(), (peer - wanted).abs()
    eps = torch.finfo(actual.dtype if dtype is None else dtype).eps
    magnitude = float(wanted.abs().max()) if scale is None else scale
    bounds = {
        "max": (error.max(), 2 * peer_error.max() + eps * magnitude),
        "mean": (
            error.mean(),
            2 * peer_error.mean() + eps * min(magnitude, float(wanted.abs().mean())),
        ),
    }
    if any(not float(value) <= float(bound) for value, bound in bounds.values()):
        words = ", ".join(
            f"{kind} error {float(value):.3e} (bound {float(bound):.3e})"
            for kind, (value, bound) in bounds.items()
        )
        raise AssertionError(f"{name}: {words}")


def make_qkv(
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    key_tokens: int | None = None,
    key_heads: int | None = None,
    layout: str = "contiguous",
    seed: int = 0,
    amplitude: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Gaussian query [B, L, H, D] and key, value [B, Lk, Hk, D], the same for every layout.

    Args:
        batch, tokens, heads, head_dim: B, L, H, D.
        dtype, device: of the tensors; values are drawn on the CPU in float32 and rounded once.
        key_tokens, key_heads: Lk and Hk; None means L and H.
        layout: how the values lie in memory, none of them a copy of another's strides:
            "contiguous": three tensors;
            "fused": views of one [B, L, 3 H D] projection (needs Lk = L, Hk = H);
            "interleaved": views of [B, L, H, 3, D] (needs the same);
            "heads_first": transposed views of [B, H, L, D];
            "odd_last_stride": last stride 2;
            "guarded": inside larger buffers of NaN, at an odd storage offset.
        seed: of the generator.
        amplitude: standard deviation.

    Returns:
        (query, key, value).
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    key_tokens = tokens if key_tokens is None else key_tokens
    key_heads = heads if key_heads is None else key_heads
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, heads, head_dim)] + 2 * [(batch, key_tokens, key_heads, head_dim)]
    tensors = [
        (torch.randn(shape, generator=generator) * amplitude).to(dtype).to(device)
        for shape in shapes
    ]
    if layout == "fused" or layout == "interleaved":
        if (key_tokens, key_heads) != (tokens, heads):
            raise ValueError(f"layout: {layout!r} needs equal shapes of query, key and value")
        axis = 2 if layout == "fused" else 3
        tensors = list(torch.stack(tensors, axis).unbind(axis))
    elif layout == "heads_first":
        tensors = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in tensors]
    elif layout == "odd_last_stride":
        tensors = [torch.stack([item, item], -1)[..., 0] for item in tensors]
    elif layout == "guarded":
        tensors = [_guarded(item) for item in tensors]
    return tensors[0], tensors[1], tensors[2]


def _guarded(tensor: Tensor) -> Tensor:
    """Return the tensor as a view into a buffer that is NaN before, after and between its rows."""
    batch, tokens, heads, head_dim = tensor.shape
    shape = (batch, tokens + 2, heads + 1, head_dim + 8)
    buffer = tensor.new_full((math.prod(shape) + 1,), math.nan)
    view = buffer[1:].view(shape)[:, 1 : tokens + 1, :heads, :head_dim]
    view.copy_(tensor)
    return view


def poison_free_memory(device: torch.device | str, size: int = 2**28) -> None:
    """Fill `size` bytes with NaN and free them, so that the allocator hands out NaN next.

    For devices with a caching allocator; on a CPU use `nan_filled_allocations`.
    """
    poison = torch.full((size // 4,), math.nan, dtype=torch.float32, device=device)
    del poison


@contextmanager
def nan_filled_allocations() -> Iterator[None]:
    """Inside the block, torch.empty and its kin return NaN (integers: their largest value)."""
    switches: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        switches.fill_uninitialized_memory = before[1]


class PeakMemory:
    """Measure the most resident memory that a block of code adds to this process, on Linux.

    Attributes:
        bytes: after the block, the peak above the start; None where the system cannot tell.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        _trim_heap()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        except OSError:
            self._start = None
        else:
            self._start = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is not None:
            self.bytes = max(0, _resident("VmHWM") - self._start)


def _trim_heap() -> None:
    """Give the pages of freed allocations back, so that a new one cannot hide in them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl and macOS do not
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    """Return a size in bytes from the system's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no field {field}")


def random_mask(
    batch: int,
    heads: int,
    query_tokens: int,
    key_tokens: int,
    *,
    density: float = 0.3,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a random block mask bool [B, H, NQ, NK] with an empty, a full and a one-block row.

    The first head has the empty row first, the full row last and, with three rows or more, a row
    that reads only the last key block second.
    """
    rows, columns = -(-query_tokens // 64), -(-key_tokens // 64)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand((batch, heads, rows, columns), generator=generator) < density
    mask[:, 0, 0] = False
    mask[:, 0, -1] = True
    if rows > 2:
        mask[:, 0, 1] = False
        mask[:, 0, 1, -1] = True
    return mask.to(device)


def __getattr__(name: str) -> Any:
    """Offer `video_activations` without importing the benchmarks before it is asked for."""
    if name == "video_activations":
        from solspark.bench.activations import video_activations

        return video_activations
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
