"""Read each query block's exact key blocks in INT8 on compute capability 9.0: TMA and int8 wgmma.

    x = (q.k) ks,  s = f x + bias,  f = a qs,  b = max(rowmax s, M - 20)
    p = rne(255 2^(s - b)),  A' = A 2^(b_before - b) + p v,  L' likewise with 1 for v
    M' = max(M, b)
    out = A / L * vscale  [+ gate * coarse]

The operation, lists and states of `kernels/sol_int8.py`, in the arrangement of
`block_sparse_attention.py` beside this file: one program per (two neighbouring query blocks, head),
one warp streams K, another V, over the union of the two lists; each of two warpgroups owns one
query block, passes over the tiles that its flag does not ask for, and issues the scores of its next
tile before it adds the product of the last one, so that conversions run under the tensor cores.

Both products are int8 x int8. That of V wants both operands along the keys: `value_tiles_kernel`
turns V into tiles [D, 64] first, once, with the keys of a tile in the order in which a thread holds
its scores; p - 128 is signed, and the accumulator starts with 128 times the tile's column sums,
which travel with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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

from ...types import BLOCK, BlockPlan, QuantizedQKV
from ..quantize_fp8 import key_at_place
from .ring import describe, fill, pass_over, release, slot, tma_load
from .union_lists import launch_union_lists

GROUP = 2
NEG = gl.constexpr(-3.0e38)
MASKED = gl.constexpr(-1.0e37)
OCTAVES = gl.constexpr(20.0)
LOG2_255 = gl.constexpr(7.994353436858858)
# Adding it leaves a float's rounded integer, less 128, in its lowest byte.
ROUNDER = gl.constexpr(12582912.0 - 128.0)
ROUNDER_BITS = gl.constexpr(0x4B400000)


# fmt: off


@gluon.jit
def _keys(desc, bufs, full, empty, entry_row, head, count, STAGES: gl.constexpr, ROWS: gl.constexpr,
          BYTES: gl.constexpr):
    for e in range(count):
        fill(desc, head, (gl.load(entry_row + e) >> 4) * ROWS, e, bufs, full, empty, STAGES, BYTES)


@gluon.jit
def _values(desc, sum_desc, bufs, sum_bufs, full, empty, entry_row, head, count,
            STAGES: gl.constexpr, D: gl.constexpr, BLOCK_T: gl.constexpr):
    for e in range(count):
        n = gl.load(entry_row + e) >> 4
        st, phase = slot(e, STAGES)
        mbarrier.wait(empty.index(st), phase ^ 1)
        mbarrier.expect(full.index(st), D * BLOCK_T + 4 * D)
        tma_load(desc, [head, n * D, 0], full.index(st), bufs.index(st))
        tma_load(sum_desc, [head, n, 0], full.index(st), sum_bufs.index(st))


@gluon.jit
def _scores(q_buf, k_bufs, e, k_full, BLOCK_T: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            SL: gl.constexpr):
    st, phase = slot(e, STAGES)
    mbarrier.wait(k_full.index(st), phase)
    k = k_bufs.index(st).reshape([BLOCK_T, D])
    zero = gl.zeros([BLOCK_T, BLOCK_T], gl.int32, SL)
    return warpgroup_mma(q_buf, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scale_of_keys(k_scale_row, start, BLOCK_T: gl.constexpr, SL: gl.constexpr):
    return gl.load(k_scale_row + start + gl.arange(0, BLOCK_T, gl.SliceLayout(0, SL)))


@gluon.jit
def _mask(x, factor, bias_row, start, tokens, BLOCK_T: gl.constexpr, SL: gl.constexpr,
          HAS_BIAS: gl.constexpr):
    # Scores in log2 units, with what is added to each key.
    j = start + gl.arange(0, BLOCK_T, gl.SliceLayout(0, SL))
    if HAS_BIAS:
        s = x * factor[:, None] + gl.load(bias_row + j)[None, :]
    else:
        s = gl.where((j < tokens)[None, :], x * factor[:, None], NEG)
    return s


@gluon.jit
def _bytes(x, factor, high, base, mass, SL: gl.constexpr, BLOCK_T: gl.constexpr, PL: gl.constexpr,
           SCALED: gl.constexpr):
    # The probabilities of a tile as signed bytes, and the state that they move to.
    peak = gl.max(x, 1)
    if not SCALED:
        peak = peak * factor
    peak = gl.maximum(gl.maximum(peak, high - OCTAVES), MASKED)
    lift = peak - LOG2_255
    if SCALED:
        p = gl.exp2(x - lift[:, None])
    else:
        p = gl.exp2(x * factor[:, None] - lift[:, None])
    p = (p + ROUNDER).to(gl.int32, bitcast=True)
    keep = gl.exp2(base - peak)
    counted = gl.sum(p - ROUNDER_BITS, 1) + 128 * BLOCK_T
    mass = mass * keep + counted.to(gl.float32)
    pb = p.to(gl.int8).reshape([BLOCK_T, BLOCK_T // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    pb = gl.convert_layout(pb.reshape([BLOCK_T, BLOCK_T]), PL, assert_trivial=True)
    return pb, keep, gl.maximum(high, peak), peak, mass


@gluon.jit
def _weigh(pb, v_bufs, sum_bufs, e, v_full, BLOCK_T: gl.constexpr, D: gl.constexpr,
           STAGES: gl.constexpr, OL: gl.constexpr):
    st, phase = slot(e, STAGES)
    mbarrier.wait(v_full.index(st), phase)
    v = v_bufs.index(st).reshape([D, BLOCK_T]).permute((1, 0))
    columns = sum_bufs.index(st).reshape([D]).load(gl.SliceLayout(0, OL))
    start = gl.zeros([BLOCK_T, D], gl.int32, OL) + columns[None, :]
    return warpgroup_mma(pb, v, start, is_async=True)


@gluon.jit
def _consumer(
    W: gl.constexpr, q_bufs, k_bufs, v_bufs, sum_bufs, q_full, k_full, k_empty, v_full, v_empty,
    entry_row, count_row, q_scale_row, k_scale_row, bias_row, v_scale_row, shift_row,
    high_row, mass_row, tail_row, length_ptr, out_base, gate_base, coarse_row,
    block0, blocks, tokens, count, a, sot, sgt,
    STAGES: gl.constexpr, BLOCK_T: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
):
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 32])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 4)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    block = block0 + W
    m = gl.minimum(block, blocks - 1)
    own = gl.load(count_row + m)
    if block >= blocks:
        own = 0
    offs = gl.arange(0, BLOCK_T, RL)
    offs_d = gl.arange(0, D, gl.SliceLayout(0, OL))
    factor = gl.load(q_scale_row + m * BLOCK_T + offs) * a
    mbarrier.wait(q_full, 0)
    if TAIL:
        # The tail is centred by this call's mean, exact keys by another: move it to their origin.
        q32 = q_bufs.index(W).reshape([BLOCK_T, D]).load(OL).to(gl.float32)
        moved = gl.sum(q32 * gl.load(shift_row + offs_d)[None, :], 1)
        tail_high = gl.load(high_row + m)
        high = tail_high + gl.convert_layout(moved, RL) * factor
        if tail_high <= MASKED:
            high = gl.full([BLOCK_T], NEG, gl.float32, RL)
        mass = gl.full([BLOCK_T], 0.0, gl.float32, RL) + gl.load(mass_row + m) * 255.0
        start = gl.load(tail_row + m * D + offs_d) * 255.0
        acc = gl.zeros([BLOCK_T, D], gl.float32, OL) + start[None, :]
    else:
        high = gl.full([BLOCK_T], NEG, gl.float32, RL)
        mass = gl.full([BLOCK_T], 0.0, gl.float32, RL)
        acc = gl.zeros([BLOCK_T, D], gl.float32, OL)
    base = high
    q = q_bufs.index(W).reshape([BLOCK_T, D])

    e = 0
    if own > 0:
        entry = gl.load(entry_row + e)
        while ((entry >> W) & 1) == 0:
            pass_over(e, k_full, k_empty, v_full, v_empty, STAGES)
            e += 1
            entry = gl.load(entry_row + e)
        s_next = _scores(q, k_bufs, e, k_full, BLOCK_T, D, STAGES, SL)
        k_scale = _scale_of_keys(k_scale_row, (entry >> 4) * BLOCK_T, BLOCK_T, SL)
        for _job in range(own - 1):
            here = e
            start_key = (entry >> 4) * BLOCK_T
            e += 1
            entry = gl.load(entry_row + e)
            s = warpgroup_mma_wait(0, deps=(s_next,))
            release(here, k_empty, STAGES)
            x = s.to(gl.float32) * k_scale[None, :]
            if HAS_BIAS:
                x = _mask(x, factor, bias_row, start_key, tokens, BLOCK_T, SL, True)
            pb, keep, high, base, mass = _bytes(
                x, factor, high, base, mass, SL, BLOCK_T, PL, HAS_BIAS
            )
            o_next = _weigh(pb, v_bufs, sum_bufs, here, v_full, BLOCK_T, D, STAGES, OL)
            while ((entry >> W) & 1) == 0:
                e += 1
                entry = gl.load(entry_row + e)
            k_scale = _scale_of_keys(k_scale_row, (entry >> 4) * BLOCK_T, BLOCK_T, SL)
            # The ring cannot reach a tile STAGES ahead before this one's V slot is free.
            far = e - here >= STAGES
            if far:
                o_next = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(o_next,)))
                release(here, v_empty, STAGES)
            for skipped in range(here + 1, e):
                pass_over(skipped, k_full, k_empty, v_full, v_empty, STAGES)
            s_next = _scores(q, k_bufs, e, k_full, BLOCK_T, D, STAGES, SL)
            o = warpgroup_mma_wait(1, deps=(o_next,))
            if not far:
                release(here, v_empty, STAGES)
            keep_rows = gl.convert_layout(keep, gl.SliceLayout(1, OL))
            acc = acc * keep_rows[:, None] + o.to(gl.float32)
        # Only the last tile can be ragged: lists ascend.
        s = warpgroup_mma_wait(0, deps=(s_next,))
        release(e, k_empty, STAGES)
        x = s.to(gl.float32) * k_scale[None, :]
        x = _mask(x, factor, bias_row, (entry >> 4) * BLOCK_T, tokens, BLOCK_T, SL, HAS_BIAS)
        pb, keep, high, base, mass = _bytes(x, factor, high, base, mass, SL, BLOCK_T, PL, True)
        o_next = _weigh(pb, v_bufs, sum_bufs, e, v_full, BLOCK_T, D, STAGES, OL)
        o = warpgroup_mma_wait(0, deps=(o_next,))
        release(e, v_empty, STAGES)
        keep_rows = gl.convert_layout(keep, gl.SliceLayout(1, OL))
        acc = acc * keep_rows[:, None] + o.to(gl.float32)
        e += 1
    while e < count:
        pass_over(e, k_full, k_empty, v_full, v_empty, STAGES)
        e += 1

    inverse = gl.convert_layout(1.0 / gl.maximum(mass, 1e-30), gl.SliceLayout(1, OL))
    out = acc * inverse[:, None] * gl.load(v_scale_row + offs_d)[None, :]
    offs_m = gl.arange(0, BLOCK_T, gl.SliceLayout(1, OL))
    token = block * BLOCK_T + offs_m
    inside = (token < tokens)[:, None]
    if GATE:
        place = token.to(gl.int64)[:, None] * sgt + offs_d[None, :]
        gate = gl.load(gate_base + place, mask=inside, other=0.0)
        out += gate.to(gl.float32) * gl.load(coarse_row + m * D + offs_d)[None, :]
    out = gl.where((offs_m < gl.load(length_ptr + m))[:, None], out, 0.0)
    where = out_base + token.to(gl.int64)[:, None] * sot + offs_d[None, :]
    gl.store(where, out.to(out_base.dtype.element_ty), mask=inside)


@gluon.jit(
    do_not_specialize=["groups", "heads", "blocks", "tokens", "width", "a", "sgb"],
    do_not_specialize_on_alignment=["entry_ptr", "union_ptr", "count_ptr", "high_ptr", "mass_ptr"],
)
def sol_int8_kernel(
    q_desc, k_desc, v_desc, sum_desc, entry_ptr, union_ptr, count_ptr, q_scale_ptr, k_scale_ptr,
    bias_ptr, v_scale_ptr, shift_ptr, high_ptr, mass_ptr, tail_ptr, length_ptr, out_ptr, gate_ptr,
    coarse_ptr,
    groups, heads, blocks, tokens, width, a,
    sgb: gl.int64, sgt: gl.int64, sgh: gl.int64,
    D: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
):
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    pid = gl.program_id(0)
    g = pid % groups
    row = pid // groups
    b = row // heads
    h = row % heads
    block0 = g * 2
    row64 = row.to(gl.int64)

    q_bufs = gl.allocate_shared_memory(gl.int8, [2, 1, BLOCK_T, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(gl.int8, [STAGES, 1, BLOCK_T, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.int8, [STAGES, 1, D, BLOCK_T], v_desc.layout)
    sum_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 1, D], sum_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    BYTES: gl.constexpr = BLOCK_T * D
    mbarrier.expect(q_full, 2 * BYTES)
    for i in gl.static_range(2):
        tma_load(q_desc, [row, (block0 + i) * BLOCK_T, 0], q_full, q_bufs.index(i))

    count = gl.load(union_ptr + row * groups + g)
    entry_row = entry_ptr + (row64 * groups + g) * width
    count_row = count_ptr + row64 * blocks
    padded = row64 * blocks * BLOCK_T
    q_scale_row = q_scale_ptr + padded
    k_scale_row = k_scale_ptr + padded
    bias_row = bias_ptr + b.to(gl.int64) * blocks * BLOCK_T
    v_scale_row = v_scale_ptr + row64 * D
    shift_row = shift_ptr + row64 * D
    high_row = high_ptr + row64 * blocks
    mass_row = mass_ptr + row64 * blocks
    tail_row = tail_ptr + row64 * blocks * D
    coarse_row = coarse_ptr + row64 * blocks * D
    # out is [B, T, H, D], contiguous.
    out_base = out_ptr + (b.to(gl.int64) * tokens * heads + h) * D
    gate_base = gate_ptr + b.to(gl.int64) * sgb + h.to(gl.int64) * sgh
    gl.warp_specialize(
        [
            (_consumer, (
                W0, q_bufs, k_bufs, v_bufs, sum_bufs, q_full, k_full, k_empty, v_full, v_empty,
                entry_row, count_row, q_scale_row, k_scale_row, bias_row, v_scale_row, shift_row,
                high_row, mass_row, tail_row, length_ptr, out_base, gate_base, coarse_row,
                block0, blocks, tokens, count, a, heads * D, sgt,
                STAGES, BLOCK_T, D, TAIL, HAS_BIAS, GATE,
            )),
            (_consumer, (
                W1, q_bufs, k_bufs, v_bufs, sum_bufs, q_full, k_full, k_empty, v_full, v_empty,
                entry_row, count_row, q_scale_row, k_scale_row, bias_row, v_scale_row, shift_row,
                high_row, mass_row, tail_row, length_ptr, out_base, gate_base, coarse_row,
                block0, blocks, tokens, count, a, heads * D, sgt,
                STAGES, BLOCK_T, D, TAIL, HAS_BIAS, GATE,
            )),
            (_keys, (
                k_desc, k_bufs, k_full, k_empty, entry_row, row, count, STAGES, BLOCK_T, BYTES,
            )),
            (_values, (
                v_desc, sum_desc, v_bufs, sum_bufs, v_full, v_empty, entry_row, row, count, STAGES,
                D, BLOCK_T,
            )),
        ],
        [4, 1, 1],
        [232, 24, 24],
    )


@triton.jit
def value_tiles_kernel(v_ptr, tile_ptr, sum_ptr, D: tl.constexpr, ROWS: tl.constexpr):
    state = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, ROWS)
    key = state * ROWS + key_at_place(places)
    offs_d = tl.arange(0, D)
    v = tl.load(v_ptr + key[:, None] * D + offs_d[None, :])
    tl.store(tile_ptr + state * D * ROWS + offs_d[:, None] * ROWS + places[None, :], tl.trans(v))
    tl.store(sum_ptr + state * D + offs_d, 128 * tl.sum(v.to(tl.int32), 0))

# fmt: on


def launch_value_tiles(value: Tensor) -> tuple[Tensor, Tensor]:
    """Enqueue the turning of int8 values [R, 64 N, D]; return tiles [R, N D, 64] and sums.

    The sums are 128 times those of each tile's columns, int32 [R, N, D].
    """
    rows, padded, dim = value.shape
    blocks = padded // BLOCK
    tiles = torch.empty((rows, blocks * dim, BLOCK), dtype=torch.int8, device=value.device)
    sums = torch.empty((rows, blocks, dim), dtype=torch.int32, device=value.device)
    value_tiles_kernel[(rows * blocks,)](value, tiles, sums, D=dim, ROWS=BLOCK, num_warps=4)
    return tiles, sums


def launch_sol_int8(
    qkv: QuantizedQKV,
    tail: tuple[Tensor, Tensor, Tensor] | None,
    plan: BlockPlan,
    gate: Tensor | None,
    coarse: Tensor | None,
    *,
    a: float,
    dtype: torch.dtype,
    num_stages: int = 6,
) -> Tensor:
    """Enqueue the attention and return [B, T, H, D] of `dtype`; a > 0.

    plan: of [B, H, N]. tail: float32 [B H, N], [B H, N], [B H, N, D], or None; coarse float32
    [B H, N, D], with gate [B, T, H, D]. All are contiguous, but for gate, whose last stride is 1.
    """
    batch, heads, _, dim = qkv.query.shape
    blocks = plan.query_blocks
    out = torch.empty(batch, qkv.tokens, heads, dim, dtype=dtype, device=qkv.query.device)
    tiles, sums = launch_value_tiles(qkv.value.flatten(0, 1))
    entries, union_counts = launch_union_lists(plan, GROUP)
    groups = union_counts.shape[2]
    query, key = (describe(x.flatten(0, 1), False) for x in (qkv.query, qkv.key))
    high, mass, start = (qkv.query_scale,) * 3 if tail is None else tail
    sol_int8_kernel[(groups * heads * batch,)](
        query, key, describe(tiles, False, dim), describe(sums, False, 1, swizzle=False), entries,
        union_counts, plan.counts, qkv.query_scale, qkv.key_scale, qkv.key_bias, qkv.value_scale,
        qkv.shift, high, mass, start, qkv.lengths, out, out if gate is None else gate,
        start if coarse is None else coarse,
        groups, heads, blocks, qkv.tokens, entries.shape[3], a,
        *((0, 0, 0) if gate is None else gate.stride()[:3]),
        D=dim, BLOCK_T=BLOCK, STAGES=num_stages, TAIL=tail is not None, HAS_BIAS=qkv.biased,
        GATE=gate is not None, num_warps=4,
    )  # fmt: skip
    return out
