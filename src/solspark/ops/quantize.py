"""Quantise rows of Q, K or V on any device."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.reference import quantize as reference
from solspark.reference.quantized_attention import Options, key_mean
from solspark.types import AttentionCall

__all__ = ["GRANULARITIES", "quantize", "quantize_operands"]

GRANULARITIES = ("row", "tile")
"""One scale a token, or one for each 64 tokens."""


def quantize(
    x: Tensor,
    *,
    dtype: str = "int8",
    granularity: str = "row",
    mean: Tensor | None = None,
    hadamard: int = 0,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise the rows of each head symmetrically.

        y = rotate(x) - rotate(mean)
        values = round(y * (largest / m)),  scales = m / largest,  m = max |y| of the row or tile

    Args:
        x: [B, L, H, D], float16, bfloat16 or float32 (float64 is taken as float32).
        dtype: "int8" (largest 127), "fp8" (e4m3, 448) or "fp16" (65,504).
        granularity: "row", one scale a token, or "tile", one for each 64 tokens.
        mean: float32 [B, H, D], subtracted first; None subtracts nothing.
        hadamard: channels that one rotation spans, a power of two from 4 to 1,024; 0 does not
            rotate. The rotation never spans more than the padded head dim.
        impl: "triton" or "eager"; None takes the best that can serve.

    Returns:
        values [B, L, H, Dp] of the storage type, Dp = D padded with zeros to a power of two (at
        least 16), and scales float32 [B, H, L] or [B, H, ceil(L / 64)].

    Raises:
        ValueError, TypeError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: FP32; round half to even, never beyond the largest. m is at least 1e-30, so that
    zeros stay zeros.

    Source: router specification 3.2.
    """
    _checks.check_tensor("x", x, 4, "[B, L, H, D]")
    _checks.check_dtype("x", x)
    _checks.check_choice("dtype", dtype, tuple(reference.LARGEST))
    _checks.check_choice("granularity", granularity, GRANULARITIES)
    check_hadamard(hadamard)
    batch, _, heads, head_dim = x.shape
    if mean is not None:
        _checks.check_tensor("mean", mean, 3, "[B, H, D]")
        _checks.check_dtype("mean", mean, (torch.float32,))
        if tuple(mean.shape) != (batch, heads, head_dim):
            raise ValueError(
                f"mean: expected [{batch}, {heads}, {head_dim}], got {tuple(mean.shape)}"
            )
    choice = _dispatch.pick("quantize", _dispatch.describe(None, x), impl)
    with torch.cuda.device_of(x):
        result = choice.run(_checks.last_dim_contiguous(x), dtype, granularity, mean, hadamard)
    choice.record()
    return result


def check_hadamard(hadamard: int, name: str = "hadamard") -> int:
    """Return the rotation's group size, or raise unless it is 0 or a power of two in 4..1024."""
    _checks.check_int(name, hadamard, 0, 1024)
    if hadamard and (hadamard < 4 or hadamard & (hadamard - 1)):
        raise ValueError(f"{name}: expected 0 or a power of two in [4, 1024], got {hadamard}")
    return hadamard


Operand = tuple[Tensor, Tensor | None]
"""Values and their scales, None where nothing was quantised."""


def quantize_operands(
    query: Tensor, key: Tensor, value: Tensor | None, options: Options, impl: str | None
) -> tuple[Operand, Operand, Operand | None]:
    """Quantise what the options ask for with one implementation; V only for a quantised P V."""
    granularity, group = options.granularity, options.hadamard
    q: Operand = (query, None)
    k: Operand = (key, None)
    v: Operand | None = None if value is None else (value, None)
    if options.matmul != "none":
        mean = _mean(key, impl) if options.smooth_k else None
        kind = options.matmul
        q = quantize(query, dtype=kind, granularity="row", hadamard=group, impl=impl)
        k = quantize(key, dtype=kind, granularity=granularity, mean=mean, hadamard=group, impl=impl)
    if value is not None and options.pv != "none":
        v = quantize(value, dtype=options.pv, granularity=granularity, hadamard=group, impl=impl)
    return q, k, v


def _mean(key: Tensor, impl: str | None) -> Tensor:
    """Return K's mean over tokens, float32 [B, Hk, D], in an order that strides do not change."""
    if impl != "triton":
        return key_mean(key)
    from solspark.kernels.quantize import launch_mean

    return launch_mean(key)


def _eager(
    x: Tensor, dtype: str, granularity: str, mean: Tensor | None, hadamard: int
) -> tuple[Tensor, Tensor]:
    """Run the reference head by head, so that its float32 copies are those of one head."""
    parts = []
    for head in range(x.shape[2]):
        part = slice(head, head + 1)
        shift = mean[:, part] if mean is not None else None
        parts.append(
            reference.quantize(
                x[:, :, part],
                dtype=dtype,
                granularity=granularity,
                mean=shift,
                hadamard=hadamard,
            )
        )
    values, scales = zip(*parts, strict=True)
    return torch.cat(values, 2), torch.cat(scales, 1)


def _run_triton(
    x: Tensor, dtype: str, granularity: str, mean: Tensor | None, hadamard: int
) -> tuple[Tensor, Tensor]:
    """Hand the kernel a rotation matrix and the rotated mean."""
    from solspark.kernels.quantize import launch_quantize

    head_dim = x.shape[-1]
    padded = reference.padded_dim(head_dim)
    size = reference.rotation_size(head_dim, hadamard) if hadamard else 0
    shift = rotation = None
    if mean is not None:
        shift = torch.nn.functional.pad(mean, (0, padded - head_dim))
        shift = (reference.rotate(shift, size) if hadamard else shift).contiguous()
    if hadamard:
        rotation = rotation_matrix(size, padded // size, x.dtype, x.device)
    return launch_quantize(
        x,
        dtype=dtype,
        granularity=granularity,
        shift=shift,
        rotation=rotation,
        rotation_group=size,
    )


@functools.lru_cache(maxsize=32)
def rotation_matrix(size: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the block-diagonal +-1 matrix; kept, because a captured graph cannot copy it over."""
    return torch.block_diag(*[reference.hadamard(size)] * groups).to(device, dtype)


def _triton_reasons(call: AttentionCall) -> list[str]:
    """Decline what no kernel can take; the head dim may be any up to 256."""
    widths = tuple(range(8, 257, 8))
    return _triton.obstacles(replace(call, requires_grad=False), head_dims=widths)


_dispatch.register("quantize", "triton", _triton_reasons, _run_triton)
_dispatch.register("quantize", "eager", _dispatch.never_declines, _eager)
