"""Block-sparse attention for compute capability 9.0: TMA, mbarriers, wgmma, five warp partitions.

    out_t = (   sum_{skipped j}          2^(a q_t.ks_j + lm_j - m) vs_j
              + sum_{u in exact blocks}  2^(a q_t.k_u + b_u - m)   v_u ) / (the same with 1 for v)

Same operation and same plan as `kernels/block_sparse_attention.py`. One program per (three
neighbouring query blocks, head), query blocks fastest: one warp streams K, another V, first of the
summaries and then of the union of the three exact lists, each through its own ring of tiles; each
of three warpgroups owns one query block and skips the tiles that its flag does not ask for. A tile
that two query blocks read crosses L2 once, and the softmax of one warpgroup runs under the matrix
products of the others. Inside a warpgroup the product with V of one tile and the score product of
its next tile are issued back to back, so that the tensor cores do not wait between them. Read: Q
once, each K and V block of a union once, every summary once per program (once per query block where
parents differ).

With FP8 the operands are those of `kernels/quantize_fp8.py`, half the bytes: the scales of Q and K
go into the exponent and that of V into the output; the probabilities are rounded to e4m3 in the
registers in which the scores lie, since V's tiles have their keys in that order.

Every warpgroup waits for and releases every ring position, also those it skips: phases would
otherwise run apart.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...types import BLOCK, BlockPlan, BlockSummaries
from ..quantize_fp8 import Fp8Operands
from .ring import describe, fill, pass_over, release, slot, tma_load
from .union_lists import launch_union_lists

GROUP = 3
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1.0e30)

# fmt: off


@gluon.jit
def _producer(
    desc, summary_desc, bufs, full, empty, entry_row, parent_ptr, block0, last_block, heads, head,
    kv_head, passes, tiles, count,
    STAGES: gl.constexpr, BYTES: gl.constexpr, ROWS: gl.constexpr,
    HAS_PARENTS: gl.constexpr, TAIL: gl.constexpr,
):
    position = 0
    if TAIL:
        for p in range(passes):
            row = head
            if HAS_PARENTS:
                row = gl.load(parent_ptr + gl.minimum(block0 + p, last_block)) * heads + head
            for t in range(tiles):
                fill(summary_desc, row, t * ROWS, position, bufs, full, empty, STAGES, BYTES)
                position += 1
    for e in range(count):
        start = (gl.load(entry_row + e) >> 4) * ROWS
        fill(desc, kv_head, start, position, bufs, full, empty, STAGES, BYTES)
        position += 1


@gluon.jit
def _scores(
    q_buf, k_bufs, position, k_full,
    BLOCK_T: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SL: gl.constexpr,
):
    st, phase = slot(position, STAGES)
    mbarrier.wait(k_full.index(st), phase)
    k = k_bufs.index(st).reshape([BLOCK_T, D])
    zero = gl.zeros([BLOCK_T, BLOCK_T], gl.float32, SL)
    return warpgroup_mma(q_buf, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _probabilities(
    s, m, denominator, acc, scale_log2, SL: gl.constexpr, OL: gl.constexpr, SCALED: gl.constexpr,
    FP8: gl.constexpr,
):
    # Raw scores are scaled inside the exponent, one fused multiply-add an element.
    top = gl.max(s, 1)
    if not SCALED:
        top = top * scale_log2
    if FP8:
        # Probabilities up to 256 use the eight bits' range; the denominator carries the factor.
        top = top - 8.0
    m_next = gl.maximum(m, top)
    if SCALED:
        p = gl.exp2(s - m_next[:, None])
    else:
        p = gl.exp2(s * scale_log2 - m_next[:, None])
    alpha = gl.exp2(m - m_next)
    denominator = denominator * alpha + gl.sum(p, 1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
    return p, m_next, denominator, acc


@gluon.jit
def _weigh(
    p, v_bufs, position, v_full, acc,
    BLOCK_T: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PL: gl.constexpr,
    FP8: gl.constexpr,
):
    st, phase = slot(position, STAGES)
    if FP8:
        # The keys of V's tiles are stored in the order in which a thread holds its scores.
        pb = p.to(v_bufs.dtype).reshape([BLOCK_T, BLOCK_T // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
        pb = gl.convert_layout(pb.reshape([BLOCK_T, BLOCK_T]), PL, assert_trivial=True)
        v = v_bufs.index(st).reshape([D, BLOCK_T]).permute((1, 0))
    else:
        pb = gl.convert_layout(p.to(v_bufs.dtype), PL)
        v = v_bufs.index(st).reshape([BLOCK_T, D])
    mbarrier.wait(v_full.index(st), phase)
    return warpgroup_mma(pb, v, acc, is_async=True)


@gluon.jit
def _summary_columns(t, bits_row, lm_row, key_blocks, BLOCK_T: gl.constexpr, SL: gl.constexpr):
    # What is added to a column of summary scores: its log mass, or -inf where the block is exact.
    offs = gl.arange(0, BLOCK_T, gl.SliceLayout(0, SL))
    j = t * BLOCK_T + offs
    mass = gl.load(lm_row + j, mask=j < key_blocks, other=float("-inf")) * LOG2E
    low = gl.load(bits_row + 2 * t)
    high = gl.load(bits_row + 2 * t + 1, mask=2 * t * 32 + 32 < key_blocks, other=-1)
    word = gl.where(offs < 32, low, high)
    return gl.where(((word >> (offs & 31)) & 1) == 0, mass, float("-inf"))


@gluon.jit
def _exact_columns(
    s, start, bias_row, key_tokens, scale_log2,
    BLOCK_T: gl.constexpr, SL: gl.constexpr, HAS_BIAS: gl.constexpr,
):
    j = start + gl.arange(0, BLOCK_T, gl.SliceLayout(0, SL))
    if HAS_BIAS:
        # Zero times what a key of bias -inf may hold need not be zero.
        bias = gl.load(bias_row + j, mask=j < key_tokens, other=float("-inf")) * LOG2E
        alive = (bias > float("-inf"))[None, :]
        s = gl.where(alive, s * scale_log2 + bias[None, :], float("-inf"))
    else:
        if start + BLOCK_T > key_tokens:
            s = gl.where((j < key_tokens)[None, :], s, float("-inf"))
    return s


@gluon.jit
def _consumer(
    W: gl.constexpr, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full, v_empty,
    entry_row, count_row, bits_base, lm_base, bias_row, parent_ptr, o_base, lse_base,
    block0, query_blocks, query_tokens, key_tokens, key_blocks, words, passes, tiles, count,
    smp, sot, slt, scale_log2, q_scale_row, k_scale, v_scale_row,
    STAGES: gl.constexpr, BLOCK_T: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_LSE: gl.constexpr, HAS_PARENTS: gl.constexpr, FP8: gl.constexpr,
):
    STEP: gl.constexpr = 32 if FP8 else 16
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, STEP])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, STEP])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, STEP // 8)
    block = block0 + W
    row = gl.minimum(block, query_blocks - 1)
    m = gl.full([BLOCK_T], LOWEST, gl.float32, gl.SliceLayout(1, SL))
    denominator = gl.full([BLOCK_T], 0.0, gl.float32, gl.SliceLayout(1, SL))
    acc = gl.zeros([BLOCK_T, D], gl.float32, OL)
    own = gl.load(count_row + row)
    if block >= query_blocks:
        own = 0
    if FP8:
        scale_log2 = scale_log2 * gl.load(q_scale_row + row) * gl.load(k_scale)
    mbarrier.wait(q_full, 0)
    q = q_bufs.index(W).reshape([BLOCK_T, D])
    base = 0

    # The tail: every tile is wanted by everyone, except in a pass made for another query block's
    # parent.
    if TAIL:
        bits_row = bits_base + row.to(gl.int64) * words
        lm_row = lm_base
        if HAS_PARENTS:
            lm_row = lm_base + gl.load(parent_ptr + row).to(gl.int64) * smp
        for p in range(passes):
            if (passes > 1) & (p != W):
                for t in range(tiles):
                    pass_over(base + t, k_full, k_empty, v_full, v_empty, STAGES)
            else:
                s_next = _scores(q, k_bufs, base, k_full, BLOCK_T, D, STAGES, SL)
                for t in range(tiles - 1):
                    column = _summary_columns(t, bits_row, lm_row, key_blocks, BLOCK_T, SL)
                    s = warpgroup_mma_wait(0, deps=(s_next,))
                    release(base + t, k_empty, STAGES)
                    s = s * scale_log2 + column[None, :]
                    prob, m, denominator, acc = _probabilities(
                        s, m, denominator, acc, scale_log2, SL, OL, True, FP8
                    )
                    acc_next = _weigh(
                        prob, v_bufs, base + t, v_full, acc, BLOCK_T, D, STAGES, PL, FP8
                    )
                    s_next = _scores(q, k_bufs, base + t + 1, k_full, BLOCK_T, D, STAGES, SL)
                    acc = warpgroup_mma_wait(1, deps=(acc_next,))
                    release(base + t, v_empty, STAGES)
                column = _summary_columns(tiles - 1, bits_row, lm_row, key_blocks, BLOCK_T, SL)
                s = warpgroup_mma_wait(0, deps=(s_next,))
                release(base + tiles - 1, k_empty, STAGES)
                s = s * scale_log2 + column[None, :]
                prob, m, denominator, acc = _probabilities(
                    s, m, denominator, acc, scale_log2, SL, OL, True, FP8
                )
                acc_next = _weigh(
                    prob, v_bufs, base + tiles - 1, v_full, acc, BLOCK_T, D, STAGES, PL, FP8
                )
                acc = warpgroup_mma_wait(0, deps=(acc_next,))
                release(base + tiles - 1, v_empty, STAGES)
            base += tiles

    # The exact tiles of this query block, in the order of the union.
    e = 0
    if own > 0:
        entry = gl.load(entry_row + e)
        while ((entry >> W) & 1) == 0:
            pass_over(base + e, k_full, k_empty, v_full, v_empty, STAGES)
            e += 1
            entry = gl.load(entry_row + e)
        s_next = _scores(q, k_bufs, base + e, k_full, BLOCK_T, D, STAGES, SL)
        for _job in range(own - 1):
            here = e
            start = (entry >> 4) * BLOCK_T
            e += 1
            entry = gl.load(entry_row + e)
            s = warpgroup_mma_wait(0, deps=(s_next,))
            release(base + here, k_empty, STAGES)
            if HAS_BIAS:
                s = _exact_columns(
                    s, start, bias_row, key_tokens, scale_log2, BLOCK_T, SL, HAS_BIAS
                )
            prob, m, denominator, acc = _probabilities(
                s, m, denominator, acc, scale_log2, SL, OL, HAS_BIAS, FP8
            )
            acc_next = _weigh(
                prob, v_bufs, base + here, v_full, acc, BLOCK_T, D, STAGES, PL, FP8
            )
            while ((entry >> W) & 1) == 0:
                e += 1
                entry = gl.load(entry_row + e)
            # The ring cannot reach a tile STAGES ahead before this one's V slot is free.
            far = e - here >= STAGES
            if far:
                acc_next = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(acc_next,)))
                release(base + here, v_empty, STAGES)
            for skipped in range(here + 1, e):
                pass_over(base + skipped, k_full, k_empty, v_full, v_empty, STAGES)
            s_next = _scores(q, k_bufs, base + e, k_full, BLOCK_T, D, STAGES, SL)
            acc = warpgroup_mma_wait(1, deps=(acc_next,))
            if not far:
                release(base + here, v_empty, STAGES)
        # Only the last tile can be ragged: lists ascend.
        s = warpgroup_mma_wait(0, deps=(s_next,))
        release(base + e, k_empty, STAGES)
        s = _exact_columns(
            s, (entry >> 4) * BLOCK_T, bias_row, key_tokens, scale_log2, BLOCK_T, SL, HAS_BIAS
        )
        prob, m, denominator, acc = _probabilities(
            s, m, denominator, acc, scale_log2, SL, OL, HAS_BIAS, FP8
        )
        acc_next = _weigh(prob, v_bufs, base + e, v_full, acc, BLOCK_T, D, STAGES, PL, FP8)
        acc = warpgroup_mma_wait(0, deps=(acc_next,))
        release(base + e, v_empty, STAGES)
        e += 1
    while e < count:
        pass_over(base + e, k_full, k_empty, v_full, v_empty, STAGES)
        e += 1

    # A row without any key gives zero and LSE -inf.
    safe = gl.where(denominator > 0.0, denominator, 1.0)
    acc = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OL))[:, None]
    offs_m = block * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, OL))
    offs_d = gl.arange(0, D, gl.SliceLayout(0, OL))
    if FP8:
        acc = acc * gl.load(v_scale_row + offs_d)[None, :]
    where = o_base + offs_m.to(gl.int64)[:, None] * sot + offs_d[None, :]
    gl.store(where, acc.to(o_base.dtype.element_ty), mask=(offs_m < query_tokens)[:, None])
    if HAS_LSE:
        offs_l = block * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, SL))
        # Add, then scale: the other way round the compiler fuses in one variant and not in another.
        lse = gl.where(denominator > 0.0, (m + gl.log2(safe)) * LN2, float("-inf"))
        gl.store(lse_base + offs_l.to(gl.int64) * slt, lse, mask=offs_l < query_tokens)


_FREE = [
    "groups", "heads", "group", "query_tokens", "key_tokens", "query_blocks", "key_blocks", "words",
    "width", "tiles", "scale_log2", "soh", "slt", "slh", "sbh", "smp", "smh", "sph", "sch",
]


# The alignment of what is read a value at a time changes from sample to sample.
_UNALIGNED = [
    "lse_ptr", "bias_ptr", "bits_ptr", "count_ptr", "lm_ptr", "parent_ptr", "entry_ptr",
    "union_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr",
]


@gluon.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_UNALIGNED)
def block_sparse_attention_kernel(
    q_desc, k_desc, v_desc, ks_desc, vs_desc, o_ptr, lse_ptr, bias_ptr, bits_ptr, count_ptr, lm_ptr,
    parent_ptr, entry_ptr, union_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    groups, heads, group, query_tokens, key_tokens, query_blocks, key_blocks, words, width, tiles,
    scale_log2,
    sot: gl.int64, soh: gl.int64, slt: gl.int64, slh: gl.int64, sbh: gl.int64,
    smp: gl.int64, smh: gl.int64, sph: gl.int64, sch: gl.int64,
    D: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_LSE: gl.constexpr, HAS_PARENTS: gl.constexpr, FP8: gl.constexpr,
):
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    W2: gl.constexpr = 2
    pid = gl.program_id(0)
    g = pid % groups
    head = pid // groups
    block0 = g * 3
    last_block = query_blocks - 1
    head64 = head.to(gl.int64)

    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [3, 1, BLOCK_T, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_T, D], k_desc.layout)
    V_ROWS: gl.constexpr = D if FP8 else BLOCK_T
    V_WIDTH: gl.constexpr = BLOCK_T if FP8 else D
    v_bufs = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES, 1, V_ROWS, V_WIDTH], v_desc.layout
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=3)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=3)
    fence_async_shared()
    BYTES: gl.constexpr = BLOCK_T * D * (q_desc.dtype.primitive_bitwidth // 8)
    mbarrier.expect(q_full, 3 * BYTES)
    for i in gl.static_range(3):
        tma_load(q_desc, [head, (block0 + i) * BLOCK_T, 0], q_full, q_bufs.index(i))

    count = gl.load(union_ptr + head * groups + g)
    entry_row = entry_ptr + (head64 * groups + g) * width
    count_row = count_ptr + head64 * sch
    # A pass over the summaries for each parent; one, when the three query blocks share it.
    passes = 1
    if HAS_PARENTS:
        p0 = gl.load(parent_ptr + block0)
        p1 = gl.load(parent_ptr + gl.minimum(block0 + 1, last_block))
        p2 = gl.load(parent_ptr + gl.minimum(block0 + 2, last_block))
        if (p0 != p1) | (p0 != p2):
            passes = 3
    # Nothing is skipped where every list is full.
    if TAIL:
        c0 = gl.load(count_row + block0)
        c1 = gl.load(count_row + gl.minimum(block0 + 1, last_block))
        c2 = gl.load(count_row + gl.minimum(block0 + 2, last_block))
        if gl.minimum(c0, gl.minimum(c1, c2)) == key_blocks:
            tiles = 0
            passes = 0
    bits_base = bits_ptr + head64 * sph
    lm_base = lm_ptr + head64 * smh
    bias_row = bias_ptr + head64 * sbh
    o_base = o_ptr + head64 * soh
    lse_base = lse_ptr + head64 * slh
    kv_head = head // group
    q_scale_row = q_scale_ptr + head * query_blocks
    k_scale = k_scale_ptr + kv_head
    v_scale_row = v_scale_ptr + kv_head * D
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    W0, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full, v_empty, entry_row,
                    count_row, bits_base, lm_base, bias_row, parent_ptr, o_base, lse_base, block0,
                    query_blocks, query_tokens, key_tokens, key_blocks, words, passes, tiles, count,
                    smp, sot, slt, scale_log2, q_scale_row, k_scale, v_scale_row, STAGES, BLOCK_T,
                    D, TAIL, HAS_BIAS, HAS_LSE, HAS_PARENTS, FP8,
                ),
            ),
            (
                _consumer,
                (
                    W1, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full, v_empty, entry_row,
                    count_row, bits_base, lm_base, bias_row, parent_ptr, o_base, lse_base, block0,
                    query_blocks, query_tokens, key_tokens, key_blocks, words, passes, tiles, count,
                    smp, sot, slt, scale_log2, q_scale_row, k_scale, v_scale_row, STAGES, BLOCK_T,
                    D, TAIL, HAS_BIAS, HAS_LSE, HAS_PARENTS, FP8,
                ),
            ),
            (
                _consumer,
                (
                    W2, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full, v_empty, entry_row,
                    count_row, bits_base, lm_base, bias_row, parent_ptr, o_base, lse_base, block0,
                    query_blocks, query_tokens, key_tokens, key_blocks, words, passes, tiles, count,
                    smp, sot, slt, scale_log2, q_scale_row, k_scale, v_scale_row, STAGES, BLOCK_T,
                    D, TAIL, HAS_BIAS, HAS_LSE, HAS_PARENTS, FP8,
                ),
            ),
            (
                _producer,
                (
                    k_desc, ks_desc, k_bufs, k_full, k_empty, entry_row, parent_ptr, block0,
                    last_block, heads, head, kv_head, passes, tiles, count, STAGES, BYTES,
                    BLOCK_T, HAS_PARENTS, TAIL,
                ),
            ),
            (
                _producer,
                (
                    v_desc, vs_desc, v_bufs, v_full, v_empty, entry_row, parent_ptr, block0,
                    last_block, heads, head, kv_head, passes, tiles, count, STAGES, BYTES,
                    V_ROWS, HAS_PARENTS, TAIL,
                ),
            ),
        ],
        [4, 4, 1, 1],
        [160, 160, 24, 24],
    )


Descriptors = tuple[TensorDescriptor, ...]


def _half_descriptors(
    query: Tensor, key: Tensor, value: Tensor, summaries: BlockSummaries | None, sample: int
) -> Descriptors:
    """Describe Q, K, V and the summaries' keys and values of a sample, in the input type."""
    q_desc, k_desc, v_desc = (describe(x[sample], True) for x in (query, key, value))
    if summaries is None:
        return q_desc, k_desc, v_desc, k_desc, v_desc
    stored = (x[sample].flatten(0, 1) for x in (summaries.keys, summaries.values))
    return q_desc, k_desc, v_desc, *(describe(x, False) for x in stored)


def _fp8_descriptors(operands: Fp8Operands, sample: int) -> Descriptors:
    """Describe the FP8 operands of a sample in the same order; V in tiles of [D, 64]."""
    dim = operands.query.shape[3]
    q_desc, k_desc = (describe(x[sample], False) for x in (operands.query, operands.key))
    v_desc = describe(operands.value[sample].flatten(1, 2), False, dim)
    if operands.summary_keys is None or operands.summary_values is None:
        return q_desc, k_desc, v_desc, k_desc, v_desc
    ks_desc = describe(operands.summary_keys[sample].flatten(0, 1), False)
    tiles = operands.summary_values[sample].flatten(0, 1).flatten(1, 2)
    return q_desc, k_desc, v_desc, ks_desc, describe(tiles, False, dim)


def launch_block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    summaries: BlockSummaries | None,
    bias: Tensor | None,
    *,
    scale: float,
    return_lse: bool,
    fp8: Fp8Operands | None = None,
    num_stages: int = 5,
) -> tuple[Tensor, Tensor | None]:
    """Enqueue the attention, a launch a sample; return out [B, Lq, H, D], LSE [B, Lq, H] or None.

    Base pointers and strides are 16-byte aligned, last strides 1, scale > 0; the tail, if there are
    summaries, is per query. bias: float32 [B, 1 or H, Lk], natural log, or None; values of keys
    with bias -inf are finite, since the matrix product reads them from memory as they are. fp8: the
    rounded query, key, value and summaries, to be read in their place.
    """
    batch, query_tokens, heads, dim = query.shape
    key_tokens, key_heads = key.shape[1], key.shape[2]
    nk = plan.key_blocks
    out = torch.empty(batch, query_tokens, heads, dim, device=query.device, dtype=query.dtype)
    lse = None
    if return_lse:
        lse = torch.empty(batch, query_tokens, heads, device=query.device, dtype=torch.float32)
    entries, union_counts = launch_union_lists(plan, GROUP)
    groups = union_counts.shape[2]
    for b in range(batch):
        if fp8 is None:
            descriptors = _half_descriptors(query, key, value, summaries, b)
            scales = (out, out, out)
        else:
            descriptors = _fp8_descriptors(fp8, b)
            scales = (fp8.query_scale[b], fp8.key_scale[b], fp8.value_scale[b])
        mass, parents, mass_strides = plan.counts, None, (0, 0)
        if summaries is not None:
            mass, parents = summaries.log_mass[b], summaries.parents
            mass_strides = (mass.stride(0), mass.stride(1))
        bias_b = bias[b] if bias is not None else None
        block_sparse_attention_kernel[(groups * heads,)](
            *descriptors, out[b],
            lse[b] if lse is not None else out, bias_b if bias_b is not None else out,
            plan.bits[b], plan.counts[b], mass, parents if parents is not None else plan.counts,
            entries[b], union_counts[b], *scales,
            groups, heads, heads // key_heads, query_tokens, key_tokens, plan.query_blocks, nk,
            plan.bits.shape[3], entries.shape[3], triton.cdiv(nk, BLOCK), scale * LOG2E.value,
            out.stride(1), out.stride(2), heads, 1,
            bias.stride(1) if bias is not None and bias.shape[1] > 1 else 0, *mass_strides,
            plan.bits.stride(1), plan.counts.stride(1),
            D=dim, BLOCK_T=BLOCK, STAGES=num_stages, TAIL=summaries is not None,
            HAS_BIAS=bias is not None, HAS_LSE=return_lse, HAS_PARENTS=parents is not None,
            FP8=fp8 is not None, num_warps=4,
        )
    return out, lse
