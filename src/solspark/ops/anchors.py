"""Anchors: the mean query of a range of blocks, on any device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _triton
from solspark.ops._dispatch import describe, never_declines, pick, register
from solspark.types import BLOCK, AttentionCall

Ranges = tuple[tuple[int, int], ...]


def anchors(
    query_means: Tensor,
    ranges: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    impl: str | None = None,
) -> Tensor:
    """Average the query rows of every range, given the means of its blocks.

    a_p = (sum over the range's blocks of 64 qbar_i) / (stop - start)

    Args:
        query_means: float32 (float64) [B, H, NQ, D], means of complete blocks in serving order.
        ranges: P adjoining token ranges (start, stop) on multiples of 64, ascending.
        dtype: dtype of the result.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        [B, P, H, D].

    Raises:
        ValueError: for ranges that are empty, unaligned, not adjoining or outside the query.
        UnsupportedError: when `impl` cannot serve the call.

    Numerics: 64 qbar_i is the FP32 sum of the block's rows exactly; the sums of a range are added
    in a fixed order, divided once and rounded once to `dtype`.

    Source: spec/spark.md section 3.1.
    """
    _check(query_means, ranges)
    query_means = _checks.last_dim_contiguous(query_means)
    call = describe(None, query_means.transpose(1, 2), parents=len(ranges))
    choice = pick("anchors", call, impl)
    out = choice.run(query_means, tuple(ranges), dtype)
    choice.record()
    return out


def _check(query_means: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    if query_means.ndim != 4 or query_means.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"query_means: expected float32 or float64 [B, H, NQ, D], got {query_means.dtype} "
            f"{tuple(query_means.shape)}"
        )
    if not ranges:
        raise ValueError("ranges: expected at least one (start, stop), got none")
    limit, expected = query_means.shape[2] * BLOCK, ranges[0][0]
    for number, (start, stop) in enumerate(ranges):
        if start % BLOCK or stop % BLOCK or start != expected or not 0 <= start < stop <= limit:
            raise ValueError(
                f"ranges[{number}]: expected a non-empty range from {expected} within 0..{limit} "
                f"on multiples of {BLOCK}, got ({start}, {stop})"
            )
        expected = stop


def _run_eager(query_means: Tensor, ranges: Ranges, dtype: torch.dtype) -> Tensor:
    """Add the block sums of each range in order; a range of one block is the block's mean."""
    if all(stop - start == BLOCK for start, stop in ranges):
        first = ranges[0][0] // BLOCK
        return query_means[:, :, first : first + len(ranges)].transpose(1, 2).to(dtype)
    batch, heads, _, dim = query_means.shape
    out = torch.empty((batch, len(ranges), heads, dim), dtype=dtype, device=query_means.device)
    for number, (start, stop) in enumerate(ranges):
        total = torch.zeros_like(query_means[:, :, 0])
        for block in range(start // BLOCK, stop // BLOCK):
            total.add_(query_means[:, :, block], alpha=BLOCK)
        out[:, number] = (total / (stop - start)).to(dtype)
    return out


@functools.lru_cache(maxsize=256)
def _block_ranges(ranges: Ranges, device: torch.device) -> Tensor:
    """Return int32 [P, 2] ranges in blocks; cached, since a copy to the device waits for it."""
    blocks = [(start // BLOCK, stop // BLOCK) for start, stop in ranges]
    return torch.tensor(blocks, dtype=torch.int32, device=device)


def _run_triton(query_means: Tensor, ranges: Ranges, dtype: torch.dtype) -> Tensor:
    """Launch; inside a compiled graph through the operator."""
    launch = _triton.entry(_operator, _launch)
    return launch(query_means, _block_ranges(ranges, query_means.device), dtype)


def _launch(query_means: Tensor, ranges: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch the Triton kernel."""
    from solspark.kernels.anchors import launch_anchors

    with torch.cuda.device_of(query_means):
        return launch_anchors(query_means, ranges, dtype)


_operator = torch.library.custom_op("solspark::anchors", _launch, mutates_args=())


@_operator.register_fake
def _(query_means, ranges, dtype):
    batch, heads, _, dim = query_means.shape
    return query_means.new_empty((batch, ranges.shape[0], heads, dim), dtype=dtype)


def _triton_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call, dtypes=(torch.float32,))


register("anchors", "eager", never_declines, _run_eager)
register("anchors", "triton", _triton_reasons, _run_triton)
