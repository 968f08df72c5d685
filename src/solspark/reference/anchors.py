"""Anchors: the mean query of a range of blocks, summed in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solspark.types import BLOCK


def anchors(
    query: Tensor, ranges: Sequence[tuple[int, int]], *, dtype: torch.dtype | None = None
) -> Tensor:
    """Average the query rows of every range: a_p = (sum over its blocks of the block's row sum) /
    length.

    Args:
        query: [B, L, H, D] in the order in which its blocks are served.
        ranges: P token ranges (start, stop), each starting on a multiple of 64.
        dtype: dtype of the result; the query's by default.

    Returns:
        [B, P, H, D].

    Numerics: a block's 64 rows are summed in FP32 (FP64 for float64), the partial sums are added in
    ascending block order, and the quotient is rounded once to `dtype`.

    Source: spec/spark.md section 3.1.
    """
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    means = []
    for start, stop in ranges:
        total = torch.zeros_like(query[:, 0], dtype=work)
        for first in range(start, stop, BLOCK):
            total = total + query[:, first : min(first + BLOCK, stop)].to(work).sum(1)
        means.append((total / (stop - start)).to(dtype or query.dtype))
    return torch.stack(means, 1)
