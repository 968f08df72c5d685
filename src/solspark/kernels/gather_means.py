"""Reorder the first V rows of every head and take the means of the new blocks in the same pass.

    y[b, i, h] = x[b, p[b, h, i], h] for i < V, x[b, i, h] from V on
    mean[b, h, n] = mean over the rows of y in block n

One program = SPAN blocks of 64 rows of one (batch, head), head fastest. Every row is read and
written once; separate passes would read the reordered rows again. The rows of the next block are on
their way while one is averaged and stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK


# fmt: off
@triton.jit(do_not_specialize=[
    "batch_heads", "heads", "tokens", "video", "blocks", "all_blocks", "spb", "sph",
])
def gather_means_kernel(
    x_ptr, permutation_ptr, y_ptr, mean_ptr, batch_heads, heads, tokens, video, blocks, all_blocks,
    sxb: tl.int64, sxt: tl.int64, sxh: tl.int64, spb: tl.int64, sph: tl.int64,
    D: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    bh = (pid % batch_heads).to(tl.int64)
    begin = pid // batch_heads * SPAN
    b = bh // heads
    h = bh % heads
    offs_d = tl.arange(0, D)
    for block in tl.range(begin, min(begin + SPAN, all_blocks), num_stages=STAGES):
        i = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        live = i < tokens
        source = tl.load(permutation_ptr + b * spb + h * sph + i, mask=i < video, other=0)
        source = tl.where(i < video, source.to(tl.int64), i)
        row = x_ptr + b * sxb + h * sxh + source[:, None] * sxt
        x = tl.load(row + offs_d[None, :], mask=live[:, None], other=0.0)
        out = y_ptr + ((b * tokens + i[:, None]) * heads + h) * D + offs_d[None, :]
        tl.store(out, x, mask=live[:, None])

        # Only as many means as asked for: the router reads those of the sparse rows alone.
        mean = tl.sum(x.to(tl.float32), axis=0) / tl.sum(live.to(tl.float32))
        place = mean_ptr + (bh * blocks + block) * D + offs_d
        wanted = offs_d < tl.where(block < blocks, D, 0)
        tl.store(place, mean.to(mean_ptr.dtype.element_ty), mask=wanted)


SPAN = 4
STAGES = 3
REGISTERS = 96
"""Blocks of a program, the stages of its loop (the rows of one block are fetched ahead), and the
bound on the registers of a thread: five programs an SM, without a spill."""


def launch_gather_means(
    x: Tensor, permutation: Tensor, blocks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Enqueue the gather; return y [B, L, H, D] and means [B, H, blocks, D] in `dtype`.

    x: [B, L, H, D], last stride 1. permutation: int32 or int64 [B, H, V], last stride 1, V <= L.
    """
    batch, tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    means = torch.empty(batch, heads, blocks, dim, dtype=dtype, device=x.device)
    all_blocks = triton.cdiv(tokens, BLOCK)
    bound = {"maxnreg": REGISTERS} if torch.version.hip is None else {}
    gather_means_kernel[(batch * heads * triton.cdiv(all_blocks, SPAN),)](
        x, permutation, y, means,
        batch * heads, heads, tokens, permutation.shape[2], blocks, all_blocks,
        x.stride(0), x.stride(1), x.stride(2), permutation.stride(0), permutation.stride(1),
        D=dim, ROWS=BLOCK, SPAN=SPAN, STAGES=STAGES, num_warps=4, **bound,
    )
    return y, means
