"""Attend from block mean to block mean: what a coarse gate weighs.

    oc[m] = sum_n softmax_n(scale qbar[m].kbar[n]) vsum[n] / L[n]

One program = one (head, 32 query blocks), with a running maximum over tiles of 32 key blocks: no
scores are written. It reads its query means once, and the head's key means and value sums, which L2
holds. A float32 mean or weight is multiplied as the sum of two terms of the matrix units' type,
which keeps 16 bits of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MASKED = tl.constexpr(-1.0e37)


@triton.jit(do_not_specialize=["blocks", "a"])
def coarse_gate_kernel(
    q_ptr,
    k_ptr,
    v_sum_ptr,
    length_ptr,
    out_ptr,
    blocks,
    a,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles = tl.cdiv(blocks, ROWS)
    first = (pid // tiles).to(tl.int64) * blocks
    offs_m = (pid % tiles) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    rows = (first + offs_m)[:, None] * D + offs_d[None, :]
    real = (offs_m < blocks)[:, None]
    q = tl.load(q_ptr + rows, mask=real, other=0.0)
    q_high = q.to(DOT)
    q_low = (q - q_high.to(tl.float32)).to(DOT)
    high = tl.full([ROWS], MASKED, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, blocks, ROWS):
        n = start + tl.arange(0, ROWS)
        inside = n < blocks
        columns = (first + n)[:, None] * D + offs_d[None, :]
        k = tl.load(k_ptr + columns, mask=inside[:, None], other=0.0)
        k_high = k.to(DOT)
        k_low = (k - k_high.to(tl.float32)).to(DOT)
        s = tl.dot(q_low, tl.trans(k_high), input_precision="ieee")
        s = tl.dot(q_high, tl.trans(k_low), s, input_precision="ieee")
        s = tl.dot(q_high, tl.trans(k_high), s, input_precision="ieee") * a
        s = tl.where(inside[None, :], s, -3.0e38)
        top = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        keep = tl.exp2(high - top)
        mass = mass * keep + tl.sum(p, 1)
        p /= tl.load(length_ptr + n, mask=inside, other=1).to(tl.float32)[None, :]
        v_sum = tl.load(v_sum_ptr + columns, mask=inside[:, None], other=0.0)
        p_high = p.to(DOT)
        p_low = (p - p_high.to(tl.float32)).to(DOT)
        acc = tl.dot(p_low, v_sum.to(DOT), acc * keep[:, None], input_precision="ieee")
        acc = tl.dot(p_high, v_sum.to(DOT), acc, input_precision="ieee")
        high = top
    tl.store(out_ptr + rows, acc / mass[:, None], mask=real)


def launch_coarse_gate(
    query_means: Tensor,
    key_means: Tensor,
    value_sums: Tensor,
    lengths: Tensor,
    *,
    a: float,
    dot: Any = tl.bfloat16,
) -> Tensor:
    """Enqueue the attention of block means of BH heads and return it, float32 [BH, N, D].

    query_means and key_means float32 [BH, N, D], value_sums bfloat16 [BH, N, D], lengths int64 [N],
    all contiguous; a = scale log2(e); `dot` is the type of the products.
    """
    rows, blocks, dim = query_means.shape
    out = torch.empty_like(query_means)
    coarse_gate_kernel[(triton.cdiv(blocks, 32) * rows,)](
        query_means,
        key_means,
        value_sums,
        lengths,
        out,
        blocks,
        a,
        D=dim,
        ROWS=32,
        DOT=dot,
        num_warps=4,
        num_stages=1,  # AMD's 64 KiB hold no second tile of float32 means
    )
    return out
