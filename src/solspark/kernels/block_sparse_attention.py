"""Block-sparse attention: listed key blocks exactly, the others' summaries, one online softmax.

    out_t = (   sum_{skipped j}          2^(a q_t.ks_j + lm_j - m) vs_j
              + sum_{u in exact blocks}  2^(a q_t.k_u + b_u - m)   v_u ) / (the same with 1 for v)

with a = scale*log2(e), lm and b in log2 units, all running state (m, denominator, acc) in float32
and the probabilities rounded to the inputs' type for the product with V; the denominator sums them
unrounded.

One program per (query block, split, batch·head), query block fastest: programs in flight share a
head's K and V in L2. A split takes a contiguous share of the summaries and of the list. Read: Q
once, each listed K and V block once per query block, every summary once per query block. The last
key block, the only one that can be ragged, is the last entry of an ascending list, so the main loop
masks nothing but keys of bias -inf.

With FP8 the operands are those of `quantize_fp8.py`: the scales of Q and K go into the exponent and
that of V into the output, and keys are read in the order in which V's tiles hold them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, BlockPlan, BlockSummaries
from .quantize_fp8 import Fp8Operands, key_at_place

# Depth of the ring of K and V tiles: three keep the tensor cores fed, AMD's 64 KiB hold two.
NUM_STAGES = 3 if torch.version.hip is None else 2

# fmt: off
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # finite start of the running maximum: (-inf) - (-inf) never occurs


@triton.jit
def _softmax_step(s, v, scale_log2, m, denominator, acc, SCALED: tl.constexpr, FP8: tl.constexpr):
    # One tile of scores; columns at -inf weigh nothing. Raw scores are scaled inside the exponent,
    # one fused multiply-add an element.
    top = tl.max(s, 1)
    if not SCALED:
        top = top * scale_log2
    if FP8:
        # Probabilities up to 256 use the eight bits' range; the denominator carries the factor.
        top = top - 8.0
    m_next = tl.maximum(m, top)
    if SCALED:
        p = tl.exp2(s - m_next[:, None])
    else:
        p = tl.exp2(s * scale_log2 - m_next[:, None])
    alpha = tl.exp2(m - m_next)
    denominator = denominator * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_next, denominator, acc


@triton.jit
def _tile(start, offs_d, D: tl.constexpr, ROWS: tl.constexpr):
    # Where the transposed values of the keys from `start` on lie, seen as [ROWS, D].
    return start * D + offs_d[None, :] * ROWS + tl.arange(0, ROWS)[:, None]


@triton.jit
def _attend_summaries(
    q, ks_ptr, vs_ptr, lm_ptr, bits_row, first, last, key_blocks, scale_log2, m, denominator, acc,
    D: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
):
    offs_d = tl.arange(0, D)
    offs_n = tl.arange(0, COLS)
    if FP8:
        offs_n = key_at_place(tl.arange(0, COLS))
    for start in tl.range(first, last, COLS, num_stages=STAGES):
        j = start + offs_n
        inside = j < key_blocks
        word = tl.load(bits_row + (j >> 5), mask=inside, other=-1)
        skipped = inside & (((word >> (j & 31)) & 1) == 0)
        mass = tl.load(lm_ptr + j, mask=inside, other=float("-inf")) * LOG2E
        # Past the end the last summary is read again; its column is masked.
        rows = tl.minimum(j, key_blocks - 1).to(tl.int64)[:, None] * D + offs_d[None, :]
        ks = tl.load(ks_ptr + rows)
        if FP8:
            vs = tl.load(vs_ptr + _tile(start, offs_d, D, COLS))
        else:
            vs = tl.load(vs_ptr + rows)
        s = tl.dot(q, tl.trans(ks)) * scale_log2 + tl.where(skipped, mass, float("-inf"))[None, :]
        m, denominator, acc = _softmax_step(s, vs, scale_log2, m, denominator, acc, True, FP8)
    return m, denominator, acc


# Strides of Q, K, V and the output stay specialised: without their divisibility the loads would be
# two bytes wide.
_FREE = [
    "heads", "group", "query_tokens", "key_tokens", "query_blocks", "key_blocks", "words", "width",
    "splits", "scale_log2", "parents_count", "summary_rows", "sbb", "sbh", "sib", "sih", "scb",
    "sch", "spb", "sph", "smb", "smp", "smh",
]


@triton.jit(do_not_specialize=_FREE)
def block_sparse_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, bits_ptr, index_ptr, count_ptr,
    ks_ptr, vs_ptr, lm_ptr, parent_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    heads, group, query_tokens, key_tokens, query_blocks, key_blocks, words, width, splits,
    scale_log2, parents_count, summary_rows,
    sqb: tl.int64, sqt: tl.int64, sqh: tl.int64, skb: tl.int64, skt: tl.int64, skh: tl.int64,
    svb: tl.int64, svt: tl.int64, svh: tl.int64, sob: tl.int64, sot: tl.int64, soh: tl.int64,
    sbb: tl.int64, sbh: tl.int64, sib: tl.int64, sih: tl.int64, scb: tl.int64, sch: tl.int64,
    spb: tl.int64, sph: tl.int64, smb: tl.int64, smp: tl.int64, smh: tl.int64,
    D: tl.constexpr, BLOCK_T: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_PARENTS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
):
    pid = tl.program_id(0)
    i = pid % query_blocks
    rest = pid // query_blocks
    split = rest % splits
    bh = (rest // splits).to(tl.int64)
    b = bh // heads
    h = bh % heads
    kv_head = h // group
    offs_m = i * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.arange(0, BLOCK_T)
    if FP8:
        offs_n = key_at_place(tl.arange(0, BLOCK_T))
        scale_q = tl.load(q_scale_ptr + (b * heads + h) * query_blocks + i)
        scale_log2 = scale_log2 * scale_q * tl.load(k_scale_ptr + (b * heads + h) // group)
    offs_d = tl.arange(0, D)
    live_q = offs_m < query_tokens

    q = tl.load(
        q_ptr + b * sqb + h * sqh + offs_m.to(tl.int64)[:, None] * sqt + offs_d[None, :],
        mask=live_q[:, None],
        other=0.0,
    )
    m = tl.full([BLOCK_T], LOWEST, tl.float32)
    denominator = tl.zeros([BLOCK_T], dtype=tl.float32)
    acc = tl.zeros([BLOCK_T, D], dtype=tl.float32)
    bits_row = bits_ptr + b * spb + h * sph + i.to(tl.int64) * words

    # The tail first: it sets a realistic running maximum before the exact tiles.
    if TAIL != 0:
        p = tl.full([], 0, tl.int64)
        if HAS_PARENTS:
            p = tl.load(parent_ptr + i).to(tl.int64)
        base = ((b * parents_count + p) * heads + h) * summary_rows
        tiles = tl.cdiv(tl.cdiv(key_blocks, BLOCK_T), splits)
        first = split * tiles * BLOCK_T
        last = tl.minimum(first + tiles * BLOCK_T, key_blocks)
        lm_row = lm_ptr + b * smb + p * smp + h * smh
        if TAIL == 1:
            m, denominator, acc = _attend_summaries(
                q, ks_ptr + base * D, vs_ptr + base * D, lm_row, bits_row, first, last, key_blocks,
                scale_log2, m, denominator, acc, D, BLOCK_T, 2, FP8,
            )
        else:
            # One tail for the block: 16 equal rows (the smallest matrix tile) hold its mean query.
            rows = tl.sum(live_q.to(tl.float32))
            mean = (tl.sum(q.to(tl.float32), axis=0) / rows).to(q.dtype)
            qb = tl.zeros([16, D], dtype=q.dtype) + mean[None, :]
            mb, lb, ab = _attend_summaries(
                qb, ks_ptr + base * D, vs_ptr + base * D, lm_row, bits_row, first, last, key_blocks,
                scale_log2, tl.full([16], LOWEST, tl.float32), tl.zeros([16], dtype=tl.float32),
                tl.zeros([16, D], dtype=tl.float32), D, BLOCK_T, 2, FP8,
            )
            top = tl.arange(0, 16) == 0
            m = m * 0.0 + tl.max(mb, axis=0)
            denominator += tl.sum(tl.where(top, lb, 0.0), axis=0)
            acc += tl.sum(tl.where(top[:, None], ab, 0.0), axis=0)[None, :]

    # The exact list. Its ragged entry, if any, is peeled off; the rest needs no mask.
    count = tl.load(count_ptr + b * scb + h * sch + i)
    list_row = index_ptr + b * sib + h * sih + i.to(tl.int64) * width
    share = tl.cdiv(count, splits)
    first = split * share
    last = tl.minimum(first + share, count)
    ragged = 0
    if last > first:  # noqa: SIM102  (the load must not run for an empty list)
        if tl.load(list_row + last - 1).to(tl.int32) * BLOCK_T + BLOCK_T > key_tokens:
            ragged = 1
    k_base = k_ptr + b * skb + kv_head * skh
    v_base = v_ptr + b * svb + kv_head * svh
    if HAS_BIAS:
        bias_row = bias_ptr + b * sbb + h * sbh
    # The next block number is fetched one tile ahead: a 2-byte load cannot be an asynchronous copy,
    # and would keep K and V from being one. So is the bias, on which their masks depend.
    j = tl.load(list_row + first, mask=first < last, other=0)
    if HAS_BIAS:
        offs_b = j.to(tl.int64) * BLOCK_T + offs_n
        bias = tl.load(bias_row + offs_b, mask=offs_b < key_tokens, other=float("-inf"))
    for e in tl.range(first, last - ragged, num_stages=STAGES):
        start = j.to(tl.int64) * BLOCK_T
        j = tl.load(list_row + e + 1, mask=e + 1 < last, other=0)
        if HAS_BIAS:
            # A key of bias -inf is not read: zero times what it may hold need not be zero.
            alive = (bias > float("-inf"))[:, None]
            k_rows = k_base + (start + offs_n)[:, None] * skt + offs_d[None, :]
            k = tl.load(k_rows, mask=alive, other=0.0)
            if FP8:
                v = tl.load(v_base + _tile(start, offs_d, D, BLOCK_T))
            else:
                v_rows = v_base + (start + offs_n)[:, None] * svt + offs_d[None, :]
                v = tl.load(v_rows, mask=alive, other=0.0)
            s = tl.dot(q, tl.trans(k)) * scale_log2 + (bias * LOG2E)[None, :]
            offs_b = j.to(tl.int64) * BLOCK_T + offs_n
            bias = tl.load(bias_row + offs_b, mask=offs_b < key_tokens, other=float("-inf"))
        else:
            k = tl.load(k_base + (start + offs_n)[:, None] * skt + offs_d[None, :])
            if FP8:
                v = tl.load(v_base + _tile(start, offs_d, D, BLOCK_T))
            else:
                v = tl.load(v_base + (start + offs_n)[:, None] * svt + offs_d[None, :])
            s = tl.dot(q, tl.trans(k))
        m, denominator, acc = _softmax_step(s, v, scale_log2, m, denominator, acc, HAS_BIAS, FP8)
    if ragged != 0:
        start = j.to(tl.int64) * BLOCK_T
        inside = start + offs_n < key_tokens
        if HAS_BIAS:
            inside = bias > float("-inf")
        k = tl.load(
            k_base + (start + offs_n)[:, None] * skt + offs_d[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        if FP8:
            v = tl.load(v_base + _tile(start, offs_d, D, BLOCK_T))
        else:
            v = tl.load(
                v_base + (start + offs_n)[:, None] * svt + offs_d[None, :],
                mask=inside[:, None],
                other=0.0,
            )
        s = tl.dot(q, tl.trans(k)) * scale_log2
        if HAS_BIAS:
            s += (bias * LOG2E)[None, :]
        s = tl.where(inside[None, :], s, float("-inf"))
        m, denominator, acc = _softmax_step(s, v, scale_log2, m, denominator, acc, True, FP8)

    # A row without any key gives zero and LSE -inf.
    safe = tl.where(denominator > 0.0, denominator, 1.0)
    acc = acc / safe[:, None]
    if FP8:
        acc = acc * tl.load(v_scale_ptr + ((b * heads + h) // group) * D + offs_d)[None, :]
    out = (
        o_ptr
        + b * sob
        + (h * splits + split) * soh
        + offs_m.to(tl.int64)[:, None] * sot
        + offs_d[None, :]
    )
    tl.store(out, acc.to(o_ptr.dtype.element_ty), mask=live_q[:, None])
    if HAS_LSE:
        # Add, then scale: the other way round some variants of the kernel are fused, others not.
        lse = tl.where(denominator > 0.0, (m + tl.log2(safe)) * LN2, float("-inf"))
        row = (b * query_tokens + offs_m) * (heads * splits) + h * splits + split
        tl.store(lse_ptr + row, lse, mask=live_q)


@triton.jit(do_not_specialize=["rows"])
def merge_splits_kernel(
    part_ptr, lse_part_ptr, o_ptr, lse_ptr, rows,
    D: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, HAS_LSE: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = offs < rows
    offs_d = tl.arange(0, D)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        top = tl.maximum(
            top, tl.load(lse_part_ptr + offs * SPLITS + s, mask=live, other=float("-inf"))
        )
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, D], dtype=tl.float32)
    for s in tl.static_range(SPLITS):
        weight = tl.exp(
            tl.load(lse_part_ptr + offs * SPLITS + s, mask=live, other=float("-inf")) - shift
        )
        part = tl.load(
            part_ptr + (offs * SPLITS + s)[:, None] * D + offs_d[None, :],
            mask=live[:, None],
            other=0.0,
        )
        acc += weight[:, None] * part
        total += weight
    safe = tl.where(total > 0.0, total, 1.0)
    tl.store(
        o_ptr + offs[:, None] * D + offs_d[None, :],
        (acc / safe[:, None]).to(o_ptr.dtype.element_ty),
        mask=live[:, None],
    )
    if HAS_LSE:
        tl.store(
            lse_ptr + offs, tl.where(total > 0.0, shift + tl.log(safe), float("-inf")), mask=live
        )


def launch_block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    summaries: BlockSummaries | None,
    bias: Tensor | None,
    *,
    scale: float,
    tail: str,
    kv_splits: int,
    return_lse: bool,
    fp8: Fp8Operands | None = None,
    num_warps: int = 4,
    num_stages: int = NUM_STAGES,
) -> tuple[Tensor, Tensor | None]:
    """Enqueue the attention; return out [B, Lq, H, D] and LSE float32 [B, Lq, H] or None.

    Last strides are 1, scale >= 0. bias: float32 [B, 1 or H, Lk], natural log, or None. Rows of the
    plan's tensors are contiguous. fp8: the rounded query, key, value and summaries, to be read in
    their place; the tail is then per query.
    """
    batch, query_tokens, heads, dim = query.shape
    key_tokens, key_heads = key.shape[1], key.shape[2]
    nq, nk = plan.query_blocks, plan.key_blocks
    device = query.device
    out = torch.empty(batch, query_tokens, heads, dim, device=device, dtype=query.dtype)
    split = kv_splits > 1
    target = out
    if split:
        target = torch.empty(
            batch, query_tokens, heads * kv_splits, dim, device=device, dtype=torch.float32
        )
    lse = lse_target = None
    if return_lse:
        lse = lse_target = torch.empty(
            batch, query_tokens, heads, device=device, dtype=torch.float32
        )
    if split:
        lse_target = torch.empty(
            batch, query_tokens, heads * kv_splits, device=device, dtype=torch.float32
        )
    mode = {"none": 0, "query": 1, "block": 2}["none" if summaries is None else tail]
    ks = vs = lm = parents = None
    mass_strides, parents_count, summary_rows = (0, 0, 0), 1, nk
    if mode:
        assert summaries is not None
        ks, vs, lm, parents = (
            summaries.keys,
            summaries.values,
            summaries.log_mass,
            summaries.parents,
        )
        mass_strides = (lm.stride(0), lm.stride(1), lm.stride(2))
        parents_count = ks.shape[1]
    scales = (None, None, None)
    if fp8 is not None:
        # [B, H, 64 N, D] -> [B, 64 N, H, D]; tiles of V have no stride between tokens.
        query, key = (x.transpose(1, 2) for x in (fp8.query, fp8.key))
        value = fp8.value.flatten(2, 4)[:, None]
        scales = (fp8.query_scale, fp8.key_scale, fp8.value_scale)
        if mode:
            ks, vs = fp8.summary_keys, fp8.summary_values
            summary_rows = triton.cdiv(nk, BLOCK) * BLOCK
    bias_strides = (0, 0)
    if bias is not None:
        bias_strides = (bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0)
    block_sparse_attention_kernel[(nq * kv_splits * batch * heads,)](
        query, key, value, target, lse_target, bias, plan.bits, plan.indices, plan.counts,
        ks, vs, lm, parents, *scales,
        heads, heads // key_heads, query_tokens, key_tokens, nq, nk,
        plan.bits.shape[3], plan.indices.shape[3], kv_splits, scale * LOG2E.value, parents_count,
        summary_rows, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *target.stride()[:3], *bias_strides, *plan.indices.stride()[:2], *plan.counts.stride()[:2],
        *plan.bits.stride()[:2], *mass_strides,
        D=dim, BLOCK_T=BLOCK, TAIL=mode, HAS_BIAS=bias is not None,
        HAS_LSE=lse_target is not None, HAS_PARENTS=parents is not None,
        STAGES=num_stages, FP8=fp8 is not None, num_warps=num_warps,
    )
    if split:
        rows = batch * query_tokens * heads
        merge_splits_kernel[(triton.cdiv(rows, 16),)](
            target, lse_target, out, lse, rows,
            D=dim, SPLITS=kv_splits, ROWS=16, HAS_LSE=return_lse, num_warps=4,
        )
    return out, lse
