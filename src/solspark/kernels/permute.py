"""Move the first V rows of every head: a gather by a permutation, or its inverse as a scatter.

    gather:   y[b, i, h] = x[b, p[b, h, i], h]      scatter:   y[b, p[b, h, i], h] = x[b, i, h]

and rows from V on are copied; the rows of y that nothing is moved to stay as they are. One program
= ROWS rows of one (batch, head): whole rows are read and written, 256 bytes each at D = 128 in
bf16, each once; the permutation is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 64


@triton.jit(do_not_specialize=["heads", "tokens", "video", "tiles"])
def permute_kernel(
    x_ptr, permutation_ptr, y_ptr, heads, tokens, video, tiles,
    sxb: tl.int64, sxt: tl.int64, sxh: tl.int64, spb: tl.int64, sph: tl.int64,
    syb: tl.int64, syt: tl.int64, syh: tl.int64,
    D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SCATTER: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    # Heads run fastest: programs in flight together touch neighbouring rows of the same tokens.
    h = pid % heads
    tile = (pid // heads) % tiles
    b = pid // (heads * tiles)
    i = tile * TILE + tl.arange(0, TILE)
    offs_d = tl.arange(0, WIDTH)
    live = i < tokens
    moved = tl.load(permutation_ptr + b * spb + h * sph + i, mask=i < video, other=0).to(tl.int64)
    moved = tl.where(i < video, moved, i)
    if SCATTER:
        source = i
        target = moved
    else:
        source = moved
        target = i
    inside = live[:, None] & (offs_d < D)[None, :]
    rows = x_ptr + b * sxb + h * sxh + source[:, None] * sxt + offs_d[None, :]
    value = tl.load(rows, mask=inside)
    out = y_ptr + b * syb + h * syh + target[:, None] * syt + offs_d[None, :]
    tl.store(out, value, mask=inside)


def launch_permute(x: Tensor, permutation: Tensor, y: Tensor, inverse: bool) -> None:
    """Enqueue the gather, or with `inverse` the scatter, into y.

    x: [B, L, H, D], last stride 1. permutation: int32 or int64 [B, H, V], last stride 1, V <= L.
    y: [B, L', H, D], last stride 1; it has every row that is moved or copied.
    """
    batch, tokens, heads, dim = x.shape
    tiles = triton.cdiv(tokens, ROWS)
    permute_kernel[(batch * tiles * heads,)](
        x, permutation, y, heads, tokens, permutation.shape[2], tiles,
        x.stride(0), x.stride(1), x.stride(2), permutation.stride(0), permutation.stride(1),
        y.stride(0), y.stride(1), y.stride(2),
        D=dim, WIDTH=triton.next_power_of_2(dim), TILE=ROWS, SCATTER=inverse, num_warps=4,
    )
