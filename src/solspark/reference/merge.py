"""Merge two attention states over disjoint keys into one."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention over two disjoint sets of keys.

        lse = ln(e^lse_a + e^lse_b),  out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b

    Args:
        out_a, out_b: [..., D], normalised outputs; any broadcastable shapes.
        lse_a, lse_b: float32 (float64) [...], natural log. Where one is -inf, that side's output is
            ignored, whatever it holds; where both are, the result is zero with -inf.

    Returns:
        (out, lse) in the types of out_a and lse_a.

    Numerics: in the type of lse_a, one rounding of the output.

    Source: Sol-Attn section 1.8, Spark section 5.
    """
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == -math.inf, 0.0)
    weight_a = torch.exp(lse_a - top)
    weight_b = torch.exp(lse_b - top)
    total = weight_a + weight_b
    side_a = _weighted(out_a, weight_a)
    side_b = _weighted(out_b, weight_b)
    out = (side_a + side_b) / total.masked_fill(total == 0, 1.0)[..., None]
    return out.to(out_a.dtype), top + log_of_sum(total)


def log_of_sum(total: Tensor) -> Tensor:
    """Return ln(total), -inf for zero; the gradient there is zero, where torch.log's is NaN."""
    empty = total == 0
    return total.masked_fill(empty, 1.0).log().masked_fill(empty, -math.inf)


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    """Return weight * out, zero where the weight is zero even if the output is not finite."""
    weight = weight[..., None]
    return torch.where(weight > 0, out.to(weight.dtype), 0.0) * weight
