"""Tile means by one reading of the tokens, and each row's best tiles by a search for its cutoff.

    mean_j = sum_u x_u / n_j
    keep_ij = must_ij or (candidate_ij and rank of s_ij among row i's candidates < count_i)

Means: one program = one (tile, head, sample). Reads the tile once, sums in float32.

Selection: one program = one row of one head. Reads its scores and flags once and writes its flags
once. The count-th largest score is found bit by bit: a float32 turned into an unsigned number of
the same order, 32 comparisons of a whole row. Of those that equal it, the first few fill the
budget.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit(do_not_specialize=["tokens", "heads"])
def tile_means_kernel(
    x_ptr,
    mean_ptr,
    tokens,
    heads,
    sxb: tl.int64,
    sxt: tl.int64,
    sxh: tl.int64,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, TILE)
    tile = pid % tiles
    bh = (pid // tiles).to(tl.int64)
    base = x_ptr + (bh // heads) * sxb + (bh % heads) * sxh
    offs_d = tl.arange(0, DP)
    total = tl.zeros([ROWS, DP], dtype=tl.float32)
    for start in tl.static_range(0, TILE, ROWS):
        offs_t = tile * TILE + start + tl.arange(0, ROWS)
        x = tl.load(
            base + offs_t.to(tl.int64)[:, None] * sxt + offs_d[None, :],
            mask=(offs_t < tokens)[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        total += x.to(tl.float32)
    live = tl.minimum(TILE, tokens - tile * TILE).to(tl.float32)
    mean = tl.sum(total, 0) / live
    tl.store(mean_ptr + (bh * tiles + tile) * D + offs_d, mean, mask=offs_d < D)


@triton.jit(
    do_not_specialize=["heads", "rows", "columns", "smb", "smh", "scb", "sch", "snb", "snh"]
)
def select_tiles_kernel(
    score_ptr,
    must_ptr,
    candidate_ptr,
    count_ptr,
    keep_ptr,
    heads,
    rows,
    columns,
    smb: tl.int64,
    smh: tl.int64,
    scb: tl.int64,
    sch: tl.int64,
    snb: tl.int64,
    snh: tl.int64,
    WIDTH: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    b = pid // rows // heads
    h = (pid // rows) % heads
    offs = tl.arange(0, WIDTH)
    inside = offs < columns
    must = tl.load(must_ptr + b * smb + h * smh + row * columns + offs, mask=inside, other=0) != 0
    at = candidate_ptr + b * scb + h * sch + row * columns + offs
    candidate = tl.load(at, mask=inside, other=0) != 0
    count = tl.load(count_ptr + b * snb + h * snh + row).to(tl.int32)

    # A number of the same order as the score; what is no candidate is below every candidate.
    score = tl.load(score_ptr + pid * columns + offs, mask=inside, other=0.0)
    score = tl.where(score >= LOWEST, score, LOWEST)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    number = ordered.to(tl.uint32, bitcast=True) ^ 0x80000000
    number = tl.where(candidate, number, 0)

    cutoff = tl.zeros([], dtype=tl.uint32)
    for step in range(32):
        trial = cutoff | (tl.full([], 1, dtype=tl.uint32) << (31 - step))
        enough = tl.sum((number >= trial).to(tl.int32), 0) >= count
        cutoff = tl.where(enough, trial, cutoff)
    above = number > cutoff
    level = candidate & (number == cutoff)
    room = count - tl.sum(above.to(tl.int32), 0)
    first = tl.cumsum(level.to(tl.int32), 0) <= room
    keep = must | ((count > 0) & (above | (level & first)))
    tl.store(keep_ptr + pid * columns + offs, keep.to(tl.int8), mask=inside)


def launch_tile_means(x: Tensor, *, tile: int) -> Tensor:
    """Return float32 [B, H, ceil(L / tile), D] of x [B, L, H, D] with last stride 1.

    tile: a multiple of 32.
    """
    batch, tokens, heads, dim = x.shape
    tiles = triton.cdiv(tokens, tile)
    means = torch.empty(batch, heads, tiles, dim, device=x.device, dtype=torch.float32)
    tile_means_kernel[(batch * heads * tiles,)](
        x,
        means,
        tokens,
        heads,
        *x.stride()[:3],
        D=dim,
        DP=triton.next_power_of_2(dim),
        TILE=tile,
        ROWS=32,
        num_warps=4,
    )
    return means


def launch_select_tiles(scores: Tensor, must: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """Return int8 [B, H, NQ, NK], all arguments contiguous.

    scores float32 [B, H, NQ, NK]; must and candidates bytes [B or 1, H or 1, NQ, NK]; counts int64
    [B or 1, H or 1, NQ, 1]. One variant a power of two of NK.
    """
    batch, heads, rows, columns = scores.shape
    keep = torch.empty(scores.shape, device=scores.device, dtype=torch.int8)
    width = triton.next_power_of_2(columns)
    select_tiles_kernel[(batch * heads * rows,)](
        scores,
        must,
        candidates,
        counts,
        keep,
        heads,
        rows,
        columns,
        *_lead(must),
        *_lead(candidates),
        *_lead(counts),
        WIDTH=width,
        num_warps=4 if width <= 2048 else 8,
    )
    return keep


def _lead(x: Tensor) -> tuple[int, int]:
    """Return the strides of sample and head, 0 where one serves all."""
    batch, head = x.stride()[:2]
    return (batch if x.shape[0] > 1 else 0), (head if x.shape[1] > 1 else 0)
