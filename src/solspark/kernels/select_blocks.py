"""Choose the exact key blocks of every query block: packed bits, an ascending list and its length.

    top-k:  the k highest candidate scores, of equal ones the lower block (or all, if asked)
    tau:    scores[i, j] > thresholds[i]  (strict)
    always: sinks, the band |i - j| <= radius, every live block of a dense row; never a dead block

One program per (batch, head, query block) in both kernels. The first, for top-k only, finds the
k-th largest score by bisection over the bits of an order-preserving integer key: at most 32 counts
of a row that is a few KiB, fewer when exactly k keys lie above earlier. The second writes. It is
one warp: a row is handled as [words, 32] tiles, so list positions need a prefix sum over a few
words, and there is no barrier. Nothing waits for the host. Column flags: 1 candidate, 2 forced
(sink).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# fmt: off
# Rows up to this many key blocks (131,072 tokens) stay in registers while the cut is searched;
# longer ones are read again from L1.
CHUNK = 2048

# Key blocks that one warp writes at a time.
WRITE_CHUNK = 512

LOWEST_KEY = tl.constexpr(-2147483648)


@triton.jit
def _ordered_key(x):
    # Map float32 to int32 whose signed order is the numeric one; -0 becomes +0, NaN becomes -inf.
    x = tl.where(x == x, x + 0.0, float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _candidate_keys(score_row, column_ptr, live_row, j, key_blocks, HAS_LIVE: tl.constexpr):
    # What is no candidate gets the lowest key, which no trial reaches.
    inside = j < key_blocks
    ok = inside & ((tl.load(column_ptr + j, mask=inside, other=0) & 1) != 0)
    if HAS_LIVE:
        ok = ok & (tl.load(live_row + j, mask=inside, other=0) != 0)
    key = _ordered_key(tl.load(score_row + j, mask=inside, other=0.0))
    return tl.where(ok, key, LOWEST_KEY)


_CUT_FREE = ["heads", "query_blocks", "key_blocks", "top_k", "ssb", "ssh", "slb", "slh"]


@triton.jit(do_not_specialize=_CUT_FREE)
def cut_blocks_kernel(
    scores_ptr, column_ptr, live_ptr, cut_ptr, spare_ptr, heads, query_blocks, key_blocks, top_k,
    ssb: tl.int64, ssh: tl.int64, slb: tl.int64, slh: tl.int64,
    CHUNK: tl.constexpr, HAS_LIVE: tl.constexpr, SINGLE: tl.constexpr, TIES: tl.constexpr,
):
    pid = tl.program_id(0)
    i = pid % query_blocks
    bh = (pid // query_blocks).to(tl.int64)
    b = bh // heads
    h = bh % heads
    score_row = scores_ptr + b * ssb + h * ssh + i.to(tl.int64) * key_blocks
    live_row = live_ptr + b * slb + h * slh
    offs = tl.arange(0, CHUNK)

    # Build the k-th largest key bit by bit, the sign first.
    cut = tl.full([], LOWEST_KEY, tl.int32)
    weight = tl.full([], 0, tl.int32)
    step = tl.full([], 0, tl.int32)
    above = tl.full([], -1, tl.int32)
    if SINGLE:
        key = _candidate_keys(score_row, column_ptr, live_row, offs, key_blocks, HAS_LIVE)
        k = tl.minimum(top_k, tl.sum((key != LOWEST_KEY).to(tl.int32)))
        highest = tl.max(key)
        while (step < 32) & (above != k):
            trial = tl.where(step == 0, 0, cut | weight)
            above = tl.full([], 0, tl.int32)
            if trial <= highest:
                # The high bits of an exponent rarely need a count.
                above = tl.sum((key >= trial).to(tl.int32))
            cut = tl.where(above >= k, trial, cut)
            weight = tl.where(step == 0, 1073741824, weight >> 1)
            step += 1
        spare = k - tl.sum((key > cut).to(tl.int32))
    else:
        total = tl.zeros([CHUNK], dtype=tl.int32)
        for start in range(0, key_blocks, CHUNK):
            j = start + offs
            key = _candidate_keys(score_row, column_ptr, live_row, j, key_blocks, HAS_LIVE)
            total += (key != LOWEST_KEY).to(tl.int32)
        k = tl.minimum(top_k, tl.sum(total))
        while (step < 32) & (above != k):
            trial = tl.where(step == 0, 0, cut | weight)
            total = tl.zeros([CHUNK], dtype=tl.int32)
            for start in range(0, key_blocks, CHUNK):
                j = start + offs
                key = _candidate_keys(score_row, column_ptr, live_row, j, key_blocks, HAS_LIVE)
                total += (key >= trial).to(tl.int32)
            above = tl.sum(total)
            cut = tl.where(above >= k, trial, cut)
            weight = tl.where(step == 0, 1073741824, weight >> 1)
            step += 1
        total = tl.zeros([CHUNK], dtype=tl.int32)
        for start in range(0, key_blocks, CHUNK):
            j = start + offs
            key = _candidate_keys(score_row, column_ptr, live_row, j, key_blocks, HAS_LIVE)
            total += (key > cut).to(tl.int32)
        spare = k - tl.sum(total)
    tl.store(cut_ptr + pid, cut)
    if TIES:
        spare = key_blocks
    tl.store(spare_ptr + pid, spare)


_FREE = [
    "heads", "query_blocks", "key_blocks", "radius", "words", "width", "ssb", "ssh", "stb", "sth",
    "slb", "slh", "sob", "soh", "sib", "sih", "scb", "sch",
]


@triton.jit(do_not_specialize=_FREE)
def select_blocks_kernel(
    scores_ptr, thr_ptr, cut_ptr, spare_ptr, column_ptr, row_ptr, live_ptr, bits_ptr, index_ptr,
    count_ptr, heads, query_blocks, key_blocks, radius, words, width,
    ssb: tl.int64, ssh: tl.int64, stb: tl.int64, sth: tl.int64, slb: tl.int64, slh: tl.int64,
    sob: tl.int64, soh: tl.int64, sib: tl.int64, sih: tl.int64, scb: tl.int64, sch: tl.int64,
    CHUNK: tl.constexpr, TOP_K: tl.constexpr, HAS_LIVE: tl.constexpr,
):
    pid = tl.program_id(0)
    i = pid % query_blocks
    bh = (pid // query_blocks).to(tl.int64)
    b = bh // heads
    h = bh % heads
    score_row = scores_ptr + b * ssb + h * ssh + i.to(tl.int64) * key_blocks
    live_row = live_ptr + b * slb + h * slh
    offs_w = tl.arange(0, CHUNK // 32)
    lane = tl.arange(0, 32)
    offs = offs_w[:, None] * 32 + lane[None, :]

    # What decides: the cut and how many of the scores that equal it fit, or the row's threshold.
    if TOP_K:
        cut = tl.load(cut_ptr + pid)
        spare = tl.load(spare_ptr + pid)
    else:
        threshold = tl.load(thr_ptr + b * stb + h * sth + i)

    # Output: equal scores are taken in ascending order while any of the budget is left.
    dense = tl.load(row_ptr + i) != 0
    written = tl.full([], 0, tl.int32)
    for start in range(0, key_blocks, CHUNK):
        j = start + offs
        inside = j < key_blocks
        column = tl.load(column_ptr + j, mask=inside, other=0)
        live = inside
        if HAS_LIVE:
            live = live & (tl.load(live_row + j, mask=inside, other=0) != 0)
        candidate = live & ((column & 1) != 0)
        score = tl.load(score_row + j, mask=inside, other=0.0)
        if TOP_K:
            key = _ordered_key(score)
            tie = (candidate & (key == cut)).to(tl.int32)
            ties = tl.sum(tie)
            fits = tie != 0
            if ties > spare:
                # Only where some of them do not fit do they need an order.
                before = tl.cumsum(tl.sum(tie, axis=1), axis=0) - tl.sum(tie, axis=1)
                rank = before[:, None] + tl.cumsum(tie, axis=1)
                fits = fits & (rank <= spare)
            chosen = (candidate & (key > cut)) | fits
            spare -= ties
        else:
            chosen = candidate & (score > threshold)
        near = tl.where(j > i, j - i, i - j) <= radius
        one = ((chosen | ((column & 2) != 0) | near | dense) & live).to(tl.int32)
        in_word = tl.sum(one, axis=1)
        before = written + tl.cumsum(in_word, axis=0) - in_word
        place = before[:, None] + tl.cumsum(one, axis=1) - 1
        written += tl.sum(in_word)
        tl.store(
            index_ptr + b * sib + h * sih + i.to(tl.int64) * width + place,
            j.to(index_ptr.dtype.element_ty),
            mask=(one != 0) & (place < width),
        )
        packed = tl.sum(one << lane[None, :], axis=1)
        word = start // 32 + offs_w
        row_bits = bits_ptr + b * sob + h * soh + i.to(tl.int64) * words
        tl.store(row_bits + word, packed, mask=word < words)
    tl.store(count_ptr + b * scb + h * sch + i, written)


def launch_select_blocks(
    scores: Tensor,
    thresholds: Tensor | None,
    columns: Tensor,
    rows: Tensor,
    live: Tensor | None,
    bits: Tensor,
    indices: Tensor,
    counts: Tensor,
    *,
    top_k: int,
    local_radius: int,
    ties: bool = False,
    chunk: int = CHUNK,
) -> None:
    """Enqueue selection into bits [B, H, NQ, W], indices [B, H, NQ, M] and counts [B, H, NQ].

    scores: float32 [B, H, NQ, NK], rows contiguous; thresholds: float32 [B, H, NQ] or None for
    top-k; columns: int8 [NK] flags; rows: int8 [NQ], non-zero for a dense query block; live: uint8
    [B, 1 or H, NK] or None; ties: whether all scores that equal the last one chosen are.
    """
    batch, heads, nq, nk = scores.shape
    rows_total = batch * heads * nq
    thr = scores if thresholds is None else thresholds
    alive = columns if live is None else live
    live_strides = (0, 0)
    if live is not None:
        live_strides = (live.stride(0), live.stride(1) if live.shape[1] > 1 else 0)
    cut = spare = counts
    if thresholds is None:
        # Two allocations: the second half of one would be aligned for some lengths only.
        cut, spare = counts.new_empty(rows_total), counts.new_empty(rows_total)
        cut_blocks_kernel[(rows_total,)](
            scores, columns, alive, cut, spare, heads, nq, nk, top_k,
            *scores.stride()[:2], *live_strides,
            CHUNK=chunk, HAS_LIVE=live is not None, SINGLE=nk <= chunk, TIES=ties, num_warps=4,
        )
    select_blocks_kernel[(rows_total,)](
        scores, thr, cut, spare, columns, rows, alive, bits, indices, counts,
        heads, nq, nk, local_radius, bits.shape[3], indices.shape[3],
        *scores.stride()[:2], *thr.stride()[:2], *live_strides,
        *bits.stride()[:2], *indices.stride()[:2], *counts.stride()[:2],
        CHUNK=WRITE_CHUNK, TOP_K=thresholds is None, HAS_LIVE=live is not None, num_warps=1,
    )
