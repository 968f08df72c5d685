"""Scores of query blocks and key blocks from their INT8 means, in log2 units.

    S[m, n] = (c8[m].k8[n]) (cs[m] a) ks[n]

One program = one (head, 64 query blocks, 64 key blocks), key blocks fastest: those of a query tile
share it in L2. The integers are read once a tile, every score is written once. The products are in
this order and each is rounded, so that the bits are those of the specification.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["blocks", "a"])
def int8_scores_kernel(
    c_ptr,
    c_scale_ptr,
    k_ptr,
    k_scale_ptr,
    out_ptr,
    blocks,
    a,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    # One grid axis: the other two end at 65,535 programs.
    pid = tl.program_id(0)
    key_tiles = tl.cdiv(blocks, COLS)
    query_tiles = tl.cdiv(blocks, ROWS)
    rest = pid // key_tiles
    head = (rest // query_tiles).to(tl.int64) * blocks
    m = (rest % query_tiles) * ROWS
    n = (pid % key_tiles) * COLS
    offs_m = tl.arange(0, ROWS)
    offs_n = tl.arange(0, COLS)
    offs_d = tl.arange(0, D)[None, :]
    real_m = m + offs_m < blocks
    real_n = n + offs_n < blocks
    c = tl.load(c_ptr + (head + m) * D + offs_m[:, None] * D + offs_d, real_m[:, None], other=0)
    k = tl.load(k_ptr + (head + n) * D + offs_n[:, None] * D + offs_d, real_n[:, None], other=0)
    c_scale = tl.load(c_scale_ptr + head + m + offs_m, mask=real_m, other=0.0)
    k_scale = tl.load(k_scale_ptr + head + n + offs_n, mask=real_n, other=0.0)
    s = tl.dot(c, tl.trans(k), out_dtype=tl.int32).to(tl.float32)
    s = s * (c_scale * a)[:, None] * k_scale[None, :]
    # Offsets inside a tile are 32 bits wide: 64-bit ones would fill the registers.
    tile = out_ptr + (head + m) * blocks + n
    place = offs_m[:, None] * blocks + offs_n[None, :]
    tl.store(tile + place, s, mask=real_m[:, None] & real_n[None, :])


def launch_int8_scores(
    centroid: Tensor,
    centroid_scale: Tensor,
    pooled: Tensor,
    pooled_scale: Tensor,
    *,
    a: float,
    out: Tensor,
) -> None:
    """Enqueue the scores of G heads into float32 [G, N, N].

    centroid and pooled are int8 [G, N, D], their scales float32 [G, N]: all contiguous.
    """
    group, blocks, dim = centroid.shape
    int8_scores_kernel[(triton.cdiv(blocks, 64) ** 2 * group,)](
        centroid,
        centroid_scale,
        pooled,
        pooled_scale,
        out,
        blocks,
        a,
        D=dim,
        ROWS=64,
        COLS=64,
        num_warps=4,
    )
