"""Anchors: the mean query of each range of blocks, from the means of its blocks.

    a_p = 64 * sum_i qbar_i / (64 * blocks of the range)

One program per (batch·head, range), reading its block means once, 32 blocks a step; the steps are
added in order, so the result does not depend on the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK

STEP = 32
"""Block means that one step reads: 16 KiB at D = 128."""


# fmt: off
@triton.jit(do_not_specialize=["heads", "parents"])
def anchors_kernel(
    qm_ptr, range_ptr, a_ptr, heads, parents,
    sqb: tl.int64, sqh: tl.int64, sqn: tl.int64,
    D: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    p = pid % parents
    bh = pid // parents
    b = bh // heads
    h = bh % heads
    offs_d = tl.arange(0, D)
    offs_n = tl.arange(0, ROWS)
    first = tl.load(range_ptr + p * 2)
    stop = tl.load(range_ptr + p * 2 + 1)
    total = tl.zeros([D], dtype=tl.float32)
    for start in range(first, stop, ROWS):
        n = start + offs_n
        row = qm_ptr + b * sqb + h * sqh + n.to(tl.int64)[:, None] * sqn
        x = tl.load(row + offs_d[None, :], mask=(n < stop)[:, None], other=0.0)
        total += tl.sum(x, axis=0) * BLOCK_T
    mean = total / ((stop - first) * BLOCK_T).to(tl.float32)
    tl.store(a_ptr + ((b * parents + p) * heads + h) * D + offs_d, mean.to(a_ptr.dtype.element_ty))


def launch_anchors(query_means: Tensor, ranges: Tensor, dtype: torch.dtype) -> Tensor:
    """Enqueue the means of ranges; return [B, P, H, D].

    query_means: float32 [B, H, NQ, D], last stride 1. ranges: int32 [P, 2] on the device, blocks.
    """
    batch, heads, _, dim = query_means.shape
    parents = ranges.shape[0]
    out = torch.empty(batch, parents, heads, dim, device=query_means.device, dtype=dtype)
    anchors_kernel[(batch * heads * parents,)](
        query_means, ranges, out, heads, parents,
        query_means.stride(0), query_means.stride(1), query_means.stride(2),
        D=dim, BLOCK_T=BLOCK, ROWS=STEP, num_warps=4,
    )
    return out
