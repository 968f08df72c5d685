"""Anchors: the mean query of a range of blocks, summed in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solspark.types import BLOCK


def anchors(
    query_means: Tensor, ranges: Sequence[tuple[int, int]], *, dtype: torch.dtype
) -> Tensor:
    """Average the query rows of every range, given the means of its blocks.

    a_p = (sum over the range's blocks of 64 qbar_i) / (stop - start)

    Args:
        query_means: float32 (float64) [B, H, NQ, D], means of complete blocks in serving order.
        ranges: P token ranges (start, stop) on multiples of 64.
        dtype: dtype of the result.

    Returns:
        [B, P, H, D].

    Numerics: 64 qbar_i is the FP32 sum of the block's rows exactly, so this is the sequential sum
    of 64-row partial sums, divided once and rounded once to `dtype`.

    Source: spec/spark.md section 3.1.
    """
    means = []
    for start, stop in ranges:
        total = torch.zeros_like(query_means[:, :, 0])
        for block in range(start // BLOCK, stop // BLOCK):
            total = total + BLOCK * query_means[:, :, block]
        means.append((total / (stop - start)).to(dtype))
    return torch.stack(means, 1)
