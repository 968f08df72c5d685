"""What queries, keys, values and summaries are after a rounding to FP8 (e4m3).

    s = the least power of two with max|x| / s <= 448,  x8 = e4m3(x / s),  x ~ s x8

One scale a query block and head, one a key head, one a value channel and key head. A power of two
moves no bit of the mantissa, so the scales cost no rounding of their own, and the rounded numbers
are numbers of the input type again.

Source: Sol-Attn section 4.1 g; the granularity is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from solspark.types import BLOCK, BlockSummaries, block_count

__all__ = ["LARGEST", "fp8_attention_inputs", "power_of_two_scale", "round_to_fp8", "tile_order"]

LARGEST = 448.0
"""The largest number of e4m3."""

EXPONENTS = (-100, 100)
"""Scales stay where both they and their inverses are normal float32 numbers."""


def power_of_two_scale(largest: Tensor) -> Tensor:
    """Return the least power of two s with largest / s <= 448, float32, as far as it is sane."""
    mantissa, exponent = torch.frexp(largest.float())
    exponent = exponent - torch.where(mantissa <= 0.875, 9, 8)  # 448 = 0.875 * 2^9
    return torch.ldexp(torch.ones_like(mantissa), exponent.clamp(*EXPONENTS))


def round_to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Round x, scaled, to e4m3 and return it in its own type and scale."""
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def fp8_attention_inputs(
    query: Tensor, key: Tensor, value: Tensor, summaries: BlockSummaries | None
) -> tuple[Tensor, Tensor, Tensor, BlockSummaries | None]:
    """Round the inputs of an attention as its FP8 kernels do.

    Args:
        query: [B, Lq, H, D]; key, value: [B, Lk, Hk, D]; all finite, D the last dimension.
        summaries: keys and values [B, P, H, NK, D], inside the hulls of `key` and `value`, whose
            scales they take; or None.

    Returns:
        The same, rounded, in the input type.
    """
    batch, tokens, heads = query.shape[:3]
    rows = block_count(tokens) * BLOCK
    largest = query.new_zeros((batch, rows, heads), dtype=torch.float32)
    largest[:, :tokens] = query.abs().amax(-1).float()
    query_scale = power_of_two_scale(largest.view(batch, -1, BLOCK, heads).amax(2))
    query_scale = query_scale.repeat_interleave(BLOCK, 1)[:, :tokens, :, None]
    key_scale = power_of_two_scale(key.abs().amax((1, 3), keepdim=True))
    value_scale = power_of_two_scale(value.abs().amax(1, keepdim=True))
    if summaries is not None:
        group = summaries.keys.shape[2] // key.shape[2]
        # [B, 1, Hk, 1 or D] -> [B, 1, heads of the summaries, 1, 1 or D]
        own_key, own_value = (
            item.repeat_interleave(group, 2)[:, :, :, None] for item in (key_scale, value_scale)
        )
        summaries = BlockSummaries(
            round_to_fp8(summaries.keys, own_key),
            round_to_fp8(summaries.values, own_value),
            summaries.log_mass,
            summaries.parents,
        )
    return (
        round_to_fp8(query, query_scale),
        round_to_fp8(key, key_scale),
        round_to_fp8(value, value_scale),
        summaries,
    )


def tile_order() -> Tensor:
    """Return which key of its block stands at each of the 64 places of a value tile.

    A thread of a warpgroup holds columns 2t, 2t + 1, 8 + 2t and 9 + 2t of sixteen columns of its
    scores; as the left operand of an 8-bit product they have to be the neighbours 4t ... 4t + 3.
    """
    return torch.arange(BLOCK).view(4, 2, 4, 2).permute(0, 2, 1, 3).flatten()
