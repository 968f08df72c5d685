"""List the tokens that a pair of query blocks reads exactly: whole bins, the highest that fit.

    c(l) = tokens of level l or more;  listed: the levels from the lowest l > 1 with c(l) <= A
    where more than A lie beyond the last bin: the A highest, of equal levels the lower token

One program = one (head, pair). It reads the levels of at most A + 1 blocks, those with the highest
levels, which hold every token that can be listed, counts them, reads them again and writes their
tokens in ascending order. The level of a listed token becomes 0: what is left is the tail.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK

# Levels up to this one belong to the histogram's bins.
LAST_BIN = tl.constexpr(129)

# Key blocks that a program reads at a time.
CHUNK = 16


@triton.jit
def read_levels(row, list_row, start, count, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the tokens of CHUNK listed blocks, in order, and their levels; 0 past the list."""
    offs = tl.arange(0, CHUNK * ROWS)
    place = start + offs // ROWS
    inside = place < count
    block = tl.load(list_row + place, mask=inside, other=0).to(tl.int32)
    token = block * ROWS + offs % ROWS
    return token, tl.load(row + token, mask=inside, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["blocks", "width", "budget"])
def token_lists_kernel(
    level_ptr,
    index_ptr,
    count_ptr,
    token_ptr,
    token_count_ptr,
    blocks,
    width,
    budget,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row = level_ptr + pair * blocks * ROWS
    list_row = index_ptr + pair * width
    count = tl.load(count_ptr + pair)
    ladder = tl.arange(0, 256)
    histogram = tl.zeros([256], tl.int32)
    for start in range(0, count, CHUNK):
        _, level = read_levels(row, list_row, start, count, ROWS, CHUNK)
        histogram += tl.histogram(level, 256)

    # c falls with the level, so that counting where it fits finds the lowest level that does.
    reach = tl.sum(histogram) - tl.cumsum(histogram, 0) + histogram
    binned = (ladder >= 2) & (ladder <= LAST_BIN + 1)
    fits = tl.sum((binned & (reach <= budget)).to(tl.int32))
    highest = tl.sum((reach >= budget).to(tl.int32)) - 1
    cut = tl.where(fits > 0, LAST_BIN + 1 - fits, highest)
    beyond = tl.sum(tl.where(ladder == cut + 1, reach, 0))
    spare = tl.where(fits > 0, 0, budget - beyond)

    written = tl.full([], 0, tl.int32)
    for start in range(0, count, CHUNK):
        token, level = read_levels(row, list_row, start, count, ROWS, CHUNK)
        tie = (level == cut).to(tl.int32)
        one = (level > cut) | ((tie != 0) & (tl.cumsum(tie, 0) <= spare))
        spare -= tl.sum(tie)
        flag = one.to(tl.int32)
        place = written + tl.cumsum(flag, 0) - 1
        written += tl.sum(flag)
        tl.store(token_ptr + pair * budget + place, token, mask=one)
        tl.store(row + token, tl.zeros_like(token).to(tl.uint8), mask=one)
    tl.store(token_count_ptr + pair, written)


def launch_token_lists(
    levels: Tensor, indices: Tensor, counts: Tensor, tokens: Tensor, token_counts: Tensor
) -> None:
    """Enqueue tokens int32 [G, P, A] and token_counts int32 [G, P]; listed levels become 0.

    levels: uint8 [G, P, Tp]; indices [G, P, M] and counts int32 [G, P]: the A + 1 blocks with the
    highest levels of each pair, ascending. All are contiguous.
    """
    group, pairs, budget = tokens.shape
    token_lists_kernel[(group * pairs,)](
        levels,
        indices,
        counts,
        tokens,
        token_counts,
        levels.shape[2] // BLOCK,
        indices.shape[2],
        budget,
        ROWS=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
    )
