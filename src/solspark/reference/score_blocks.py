"""Scores between query blocks and key blocks, and the thresholds that they are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark._checks import accumulation_dtype

LOG2_E = math.log2(math.e)
VARIANCE_FLOOR = 1e-6
"""Added to the variance of a row's scores, in log2 units squared, under the square root."""


def score_blocks(query_means: Tensor, key_means: Tensor, *, scale: float) -> Tensor:
    """Score every key block for every query block.

        r_ij = a * qbar_i . KC_j,  a = scale * log2(e)

    Args:
        query_means: float32 (float64) [B, H, NQ, D].
        key_means: any float type [B, H, NK, D].
        scale: factor of the logits.

    Returns:
        float32 (float64) [B, H, NQ, NK], in log2 units, no -0.0.

    Numerics: products and sums in float32 (float64).

    Source: Sol-Attn section 1.3.
    """
    dtype = accumulation_dtype(query_means.dtype)
    scores = torch.einsum("bhid,bhjd->bhij", query_means.to(dtype), key_means.to(dtype))
    return scores * (scale * LOG2_E) + 0.0


def thresholds(
    query_means: Tensor,
    key_mean: Tensor | None,
    spread: Tensor,
    *,
    scale: float,
    tau: float,
    kind: str = "diag",
    live: Tensor | None = None,
) -> Tensor:
    """Return the score above which a query block reads a key block exactly.

        thr_i = mean_j(r_ij) + tau * sqrt(var_j(r_ij) + 1e-6)

    The mean is a * qbar_i . mu. With kind "exact" the variance is that of the scores themselves;
    with "diag" the
    covariance of the key means between channels is dropped: var = a^2 * sum_d qbar_id^2 var_d.

    Args:
        query_means: float32 (float64) [B, H, NQ, D].
        key_mean: float32 (float64) [B, H, D], mean of the live blocks' key means; "exact" does not
            need it.
        spread: with "diag" the key means' population variance, float32 (float64) [B, H, D]; with
            "exact" the key means themselves, [B, H, NK, D].
        scale: factor of the logits.
        tau: standard deviations above the mean; any sign, infinities allowed.
        kind: "diag" or "exact".
        live: bool [B, 1 or H, NK], the blocks over which "exact" takes its moments; None means all.

    Returns:
        float32 (float64) [B, H, NQ], in log2 units.

    Source: Sol-Attn section 1.2.
    """
    if kind == "exact":
        scores = score_blocks(query_means, spread, scale=scale)
        weight = torch.ones_like(scores[:, :1, 0]) if live is None else live.to(scores.dtype)
        weight = weight[:, :, None] / weight.sum(-1).clamp(min=1)[:, :, None, None]
        mean = (scores * weight).sum(-1)
        variance = ((scores - mean[..., None]) ** 2 * weight).sum(-1)
    else:
        if key_mean is None:
            raise ValueError('key_mean: expected a tensor [B, H, D] with kind "diag", got None')
        a = scale * LOG2_E
        mean = a * torch.einsum("bhid,bhd->bhi", query_means, key_mean)
        variance = a**2 * torch.einsum("bhid,bhd->bhi", query_means**2, spread)
    return mean + tau * torch.sqrt(variance + VARIANCE_FLOOR)
