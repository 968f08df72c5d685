"""Anchors: the mean query of a range of blocks, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solspark.ops._dispatch import describe, never_declines, pick, register
from solspark.types import BLOCK


def anchors(
    query: Tensor,
    ranges: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """Average the query rows of every range: a_p = (sum over its blocks of the block's row sum) /
    length.

    Args:
        query: [B, L, H, D] in the order in which its blocks are served, any strides.
        ranges: P adjoining token ranges (start, stop) in ascending order, each starting on a
            multiple of 64.
        dtype: dtype of the result; the query's by default.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        [B, P, H, D].

    Raises:
        ValueError: for ranges that are empty, unaligned, not ascending or outside the query.
        UnsupportedError: when `impl` cannot serve the call.

    Numerics: a block's 64 rows are summed in FP32 (FP64 for float64), the partial sums are added in
    ascending block order, and the quotient is rounded once to `dtype`.

    Source: spec/spark.md section 3.1.
    """
    _check(query, ranges)
    dtype = query.dtype if dtype is None else dtype
    choice = pick("anchors", describe(query, query, parents=len(ranges)), impl)
    out = choice.run(query, tuple(ranges), dtype)
    choice.record()
    return out


def _check(query: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    if query.ndim != 4 or not query.is_floating_point():
        raise ValueError(
            f"query: expected a floating-point [B, L, H, D], got {query.dtype} {tuple(query.shape)}"
        )
    if not ranges:
        raise ValueError("ranges: expected at least one (start, stop), got none")
    previous = 0
    for number, (start, stop) in enumerate(ranges):
        if start % BLOCK or not previous <= start < stop <= query.shape[1]:
            raise ValueError(
                f"ranges[{number}]: expected a non-empty range within {previous}..{query.shape[1]} "
                f"that starts on a multiple of {BLOCK}, got ({start}, {stop})"
            )
        previous = stop


def _run_eager(query: Tensor, ranges: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Tensor:
    """Sum 64-row blocks of a few heads at a time, then the partial sums in order."""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, _, heads, dim = query.shape
    out = torch.empty((batch, len(ranges), heads, dim), dtype=dtype, device=query.device)
    for number, (start, stop) in enumerate(ranges):
        full = (stop - start) // BLOCK
        total = torch.zeros((batch, heads, dim), dtype=work, device=query.device)
        # 64 blocks at a time keep the FP32 copies small.
        for first in range(0, full, 64):
            count = min(64, full - first)
            begin = start + first * BLOCK
            rows = query[:, begin : begin + count * BLOCK].unflatten(1, (count, BLOCK))
            partial = rows.sum(2, dtype=work)
            for block in range(count):
                total += partial[:, block]
        if full * BLOCK < stop - start:
            total += query[:, start + full * BLOCK : stop].sum(1, dtype=work)
        out[:, number] = (total / (stop - start)).to(dtype)
    return out


register("anchors", "eager", never_declines, _run_eager)
