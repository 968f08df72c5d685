"""Block means, log-masses and the statistics of the key means, as the paper writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from solspark._checks import accumulation_dtype, normalise_key_bias
from solspark.types import BLOCK


@dataclass(frozen=True, eq=False)
class Pooled:
    """What pooling says about the blocks of a query, a key and a value.

    Args:
        query_means: float32 (float64 for float64 inputs) [B, H, NQ, D], or None without a query.
        key_means: dtype of the key, [B, H, NK, D]; zero for a block without a live key.
        value_means: dtype of the value, [B, H, NK, D], or None without a value.
        log_mass: float32 (float64) [B, 1 or H, NK], natural log: ln(len), or logsumexp of the key
            bias.
        key_mean: float32 (float64) [B, H, D], the mean of the live blocks' key means, each block
            with weight 1.
        key_var: float32 (float64) [B, H, D], their population variance.
        live: bool [B, 1 or H, NK], the blocks that hold a live key; None when all do, as without a
            key bias.
    """

    query_means: Tensor | None
    key_means: Tensor
    value_means: Tensor | None
    log_mass: Tensor
    key_mean: Tensor
    key_var: Tensor
    live: Tensor | None = None


def pool(
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    *,
    key_bias: Tensor | None = None,
    block: int = BLOCK,
) -> Pooled:
    """Summarise every block of tokens by its mean.

        qbar_i = mean of the block's query rows
        KC_j = sum_u e^(bias_u) k_u / sum_u e^(bias_u),  VC_j likewise,  log_mass_j = ln sum_u
        e^(bias_u)

    Args:
        query: [B, Lq, H, D] or None.
        key: [B, Lk, H, D], any float type.
        value: [B, Lk, H, D] or None; planning needs none.
        key_bias: natural log, one value a key: [Lk], [B, Lk], [B, 1 or H, Lk] or [B, 1 or H, 1,
            Lk]; a bool tensor keeps where true. A key with bias -inf has no effect, whatever it
            holds.
        block: tokens a block.

    Returns:
        Pooled.

    Numerics:
        Sums in float32 (float64 for float64); key and value means are rounded once to the input
        type, and the statistics are taken over the rounded means.

    Source: Sol-Attn section 1.2; the sums of values there are our means times the mass.
    """
    dtype = accumulation_dtype(key.dtype)
    batch, tokens, heads, _ = key.shape
    bias = normalise_key_bias(key_bias, batch, heads, tokens, key)
    if bias is None:
        bias = torch.zeros(batch, 1, tokens, dtype=dtype, device=key.device)

    masses, key_means, value_means = [], [], []
    for start in range(0, tokens, block):
        here = slice(start, min(start + block, tokens))
        mass = bias[:, :, here].logsumexp(-1)
        shift = mass.masked_fill(mass == -math.inf, 0.0)  # a block without a live key has weights 0
        weight = torch.exp(bias[:, :, here] - shift[..., None])
        masses.append(mass)
        key_means.append(_weighted_sum(weight, key[:, here].to(dtype)).to(key.dtype))
        if value is not None:
            value_means.append(_weighted_sum(weight, value[:, here].to(dtype)).to(value.dtype))
    log_mass = torch.stack(masses, -1)
    means = torch.stack(key_means, 2)

    live = (log_mass > -math.inf).to(dtype)[..., None]
    live_blocks = live.sum(2).clamp(min=1)
    key_mean = (means.to(dtype) * live).sum(2) / live_blocks
    centred = (means.to(dtype) - key_mean[:, :, None]) * live
    key_var = (centred * centred).sum(2) / live_blocks

    query_means = None
    if query is not None:
        rows = [part.to(dtype).mean(1) for part in query.split(block, dim=1)]
        query_means = torch.stack(rows, 2)
    return Pooled(
        query_means,
        means,
        torch.stack(value_means, 2) if value is not None else None,
        log_mass,
        key_mean,
        key_var,
        log_mass > -math.inf if key_bias is not None else None,
    )


def _weighted_sum(weight: Tensor, rows: Tensor) -> Tensor:
    """Sum weighted rows [B, n, H, D] into [B, H, D]; a weight of 0 hides its row."""
    weight = weight.transpose(1, 2)[..., None]
    return (torch.where(weight > 0, rows, 0.0) * weight).sum(1)
