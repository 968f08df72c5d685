"""Merge two attention states over disjoint keys into one, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch
from solspark.reference.merge import merge as _elementwise
from solspark.types import AttentionCall

__all__ = ["merge"]


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the attention over two disjoint sets of keys.

        lse = ln(e^lse_a + e^lse_b),  out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b

    Args:
        out_a, out_b: [B, L, H, D], normalised outputs of one type.
        lse_a, lse_b: float32 (float64) [B, L, H], natural log. Where one is -inf, that side's
            output is ignored, whatever it holds; where both are, the result is zero with -inf.
        impl: "eager", "triton", "hopper" or None for the best that can serve.

    Returns:
        (out, lse) in the types of out_a and lse_a.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: in the type of lse_a, one rounding of the output.

    Source: Sol-Attn section 1.8, Spark section 5.
    """
    _checks.check_tensor("out_a", out_a, 4, "[B, L, H, D]")
    _checks.check_dtype("out_a", out_a)
    _checks.check_tensor("out_b", out_b, 4, "[B, L, H, D]")
    _checks.check_same("out_b", out_b, "out_a", out_a, shape=True)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _checks.check_tensor(name, lse, 3, "[B, L, H]")
        _checks.check_dtype(name, lse, (torch.float32, torch.float64))
        if lse.shape != out_a.shape[:3]:
            raise ValueError(f"{name}: expected {tuple(out_a.shape[:3])}, got {tuple(lse.shape)}")
    _checks.check_same("lse_b", lse_b, "lse_a", lse_a, shape=True)
    batch, tokens, heads, head_dim = out_a.shape
    call = AttentionCall(
        batch=batch,
        query_tokens=tokens,
        key_tokens=0,
        heads=heads,
        head_dim=head_dim,
        dtype=out_a.dtype,
        device_type=out_a.device.type,
        capability=_dispatch.capability(out_a.device),
        return_lse=True,
        last_dim_contiguous=out_a.stride(-1) == 1 and out_b.stride(-1) == 1,
        requires_grad=_dispatch.needs_grad(out_a, out_b, lse_a, lse_b),
    )
    choice = _dispatch.pick("merge", call, impl)
    result = choice.run(out_a, lse_a, out_b, lse_b)
    choice.record()
    return result


_dispatch.register("merge", "eager", _dispatch.never_declines, _elementwise)
