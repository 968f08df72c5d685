"""Gradients of quantised attention, quantisation taken as the identity.

    P = 2^(c - lse2),  dP = dO V^T,  dS = P (dP - delta),  delta_t = sum_d out_td dO_td
    dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO

c is recomputed from the quantised operands by the forward's own code, so P is the forward's; the
other products take Q, K, V and dO as they came. Two kernels: one program = one (query tile, head,
sample) over the row's list for dQ (it also writes delta), then one program = one (key tile, key
head, sample) over the transposed list and the query heads of the group for dK and dV. Everything
is read once a program; sums in float32, in a fixed order, without atomics.

Queries past the end need no mask: an infinite log-sum makes their P zero, as for empty rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantized_tile import (
    LEAST,
    LOG2E,
    Config,
    Lists,
    Operands,
    list_strides,
    load_mask,
    load_rows,
    mask_arguments,
    scale_groups,
    tile_logits,
    weights,
)

_FREE = (
    "heads group query_tokens key_tokens tiles q_groups k_groups width scale smm smb smh slb slh"
)


@triton.jit(do_not_specialize=_FREE.split())
def quantized_attention_grad_query_kernel(
    q8_ptr,
    k8_ptr,
    qs_ptr,
    ks_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    g_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    mask_ptr,
    index_ptr,
    count_ptr,
    heads,
    group,
    query_tokens,
    key_tokens,
    tiles,
    q_groups,
    k_groups,
    width,
    scale,
    sqb: tl.int64,
    sqt: tl.int64,
    sqh: tl.int64,
    sk8b: tl.int64,
    sk8t: tl.int64,
    sk8h: tl.int64,
    skb: tl.int64,
    skt: tl.int64,
    skh: tl.int64,
    svb: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    sgb: tl.int64,
    sgt: tl.int64,
    sgh: tl.int64,
    smb: tl.int64,
    smh: tl.int64,
    smm: tl.int64,
    slb: tl.int64,
    slh: tl.int64,
    D8: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK: tl.constexpr,
    TILE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    LISTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    i = pid % tiles
    bh = (pid // tiles).to(tl.int64)
    b = bh // heads
    h = bh % heads
    kv = h // group
    key_heads = heads // group
    offs_m = i * BM + tl.arange(0, BM)
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, DP)
    offs_v = tl.arange(0, DVP)
    live = offs_m < query_tokens
    rows = (b * query_tokens + offs_m) * heads + h
    ks_row = ks_ptr + (b * key_heads + kv) * k_groups * 16
    mask_row = mask_ptr + b * smb + h * smh

    # The row's own terms: its factor, its log-sum (+inf for an empty row: P is zero) and delta.
    q = load_rows(q8_ptr + b * sqb + h * sqh, offs_m, query_tokens, sqt, offs_d, D8, DP)
    factor = tl.zeros([BM], dtype=tl.float32) + scale * LOG2E
    if QK:
        factor *= tl.load(qs_ptr + bh * q_groups * 16 + offs_m, mask=live, other=0.0)
    factor = tl.maximum(factor, LEAST)
    lse = tl.load(lse_ptr + rows, mask=live, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    g = load_rows(g_ptr + b * sgb + h * sgh, offs_m, query_tokens, sgt, offs_v, DV, DVP)
    inside = live[:, None] & (offs_v < DV)[None, :]
    o = tl.load(o_ptr + rows[:, None] * DV + offs_v[None, :], mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta_ptr + rows, delta, mask=live)

    SUB: tl.constexpr = BLOCK_N // BN if LISTS else 1
    row = i * BM // BLOCK_M
    list_row = index_ptr + b * slb * width + h * slh * width + row.to(tl.int64) * width
    if LISTS:
        count = tl.load(count_ptr + b * slb + h * slh + row)
        last = count * SUB
        if count > 0:
            # Only the last block can be short; its tiles past the end are left out.
            left = key_tokens - tl.load(list_row + count - 1) * BLOCK_N
            last = (count - 1) * SUB + tl.minimum(SUB, tl.cdiv(left, BN))
    else:
        last = tl.cdiv(key_tokens, BN)
        if CAUSAL:
            last = tl.minimum(last, tl.cdiv((i + 1) * BM, BN))
    dq = tl.zeros([BM, DP], dtype=tl.float32)
    block = 0
    if LISTS:
        block = tl.load(list_row, mask=last > 0, other=0)
    for tile in tl.range(0, last, num_stages=STAGES):
        if LISTS:
            start = block * BLOCK_N + (tile % SUB) * BN
            block = tl.load(list_row + (tile + 1) // SUB, mask=tile + 1 < last, other=0)
        else:
            start = tile * BN
        keys = start + offs_n
        given = load_mask(
            mask_row,
            start,
            offs_m,
            keys,
            query_tokens,
            key_tokens,
            smm,
            MASK,
            MASK_ROWS,
            MASK_STEP,
            True,
        )
        k8 = load_rows(k8_ptr + b * sk8b + kv * sk8h, keys, key_tokens, sk8t, offs_d, D8, DP)
        k = load_rows(k_ptr + b * skb + kv * skh, keys, key_tokens, skt, offs_d, D, DP)
        v = load_rows(v_ptr + b * svb + kv * svh, keys, key_tokens, svt, offs_v, DV, DVP)
        t, tile_factor = tile_logits(
            q,
            k8,
            factor,
            given,
            ks_row,
            start,
            offs_m,
            keys,
            key_tokens,
            QK,
            TILE,
            MASK,
            CAUSAL,
            True,
        )
        p = weights(t, tile_factor, lse2)
        dp = tl.dot(g, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(
        dq_ptr + rows[:, None] * D + offs_d[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=live[:, None] & (offs_d < D)[None, :],
    )


@triton.jit(do_not_specialize=_FREE.split())
def quantized_attention_grad_key_value_kernel(
    q8_ptr,
    k8_ptr,
    qs_ptr,
    ks_ptr,
    q_ptr,
    v_ptr,
    g_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    mask_ptr,
    index_ptr,
    count_ptr,
    heads,
    group,
    query_tokens,
    key_tokens,
    tiles,
    q_groups,
    k_groups,
    width,
    scale,
    sq8b: tl.int64,
    sq8t: tl.int64,
    sq8h: tl.int64,
    sk8b: tl.int64,
    sk8t: tl.int64,
    sk8h: tl.int64,
    sqb: tl.int64,
    sqt: tl.int64,
    sqh: tl.int64,
    svb: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    sgb: tl.int64,
    sgt: tl.int64,
    sgh: tl.int64,
    smb: tl.int64,
    smh: tl.int64,
    smm: tl.int64,
    slb: tl.int64,
    slh: tl.int64,
    D8: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK: tl.constexpr,
    TILE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    LISTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    j = pid % tiles
    bh = (pid // tiles).to(tl.int64)
    key_heads = heads // group
    b = bh // key_heads
    kv = bh % key_heads
    start = j * BN
    keys = start + tl.arange(0, BN)
    offs_d = tl.arange(0, DP)
    offs_v = tl.arange(0, DVP)
    ks_row = ks_ptr + bh * k_groups * 16
    k8 = load_rows(k8_ptr + b * sk8b + kv * sk8h, keys, key_tokens, sk8t, offs_d, D8, DP)
    v = load_rows(v_ptr + b * svb + kv * svh, keys, key_tokens, svt, offs_v, DV, DVP)
    dk = tl.zeros([BN, DP], dtype=tl.float32)
    dv = tl.zeros([BN, DVP], dtype=tl.float32)

    SUB: tl.constexpr = BLOCK_M // BM if LISTS else 1
    column = start // BLOCK_N
    for member in range(0, group):
        h = kv * group + member
        mask_row = mask_ptr + b * smb + h * smh
        qs_row = qs_ptr + (b * heads + h) * q_groups * 16
        list_row = index_ptr + b * slb * width + h * slh * width + column.to(tl.int64) * width
        first = 0
        if LISTS:
            last = tl.load(count_ptr + b * slb + h * slh + column) * SUB
        else:
            last = tl.cdiv(query_tokens, BM)
            if CAUSAL:
                # Queries before this key tile see none of it.
                first = start // BM
        block = 0
        if LISTS:
            block = tl.load(list_row, mask=last > 0, other=0)
        for tile in tl.range(first, last, num_stages=STAGES):
            if LISTS:
                top = block * BLOCK_M + (tile % SUB) * BM
                block = tl.load(list_row + (tile + 1) // SUB, mask=tile + 1 < last, other=0)
            else:
                top = tile * BM
            offs_m = top + tl.arange(0, BM)
            live = offs_m < query_tokens
            given = load_mask(
                mask_row,
                start,
                offs_m,
                keys,
                query_tokens,
                key_tokens,
                smm,
                MASK,
                MASK_ROWS,
                MASK_STEP,
                True,
            )
            q8 = load_rows(q8_ptr + b * sq8b + h * sq8h, offs_m, query_tokens, sq8t, offs_d, D8, DP)
            q = load_rows(q_ptr + b * sqb + h * sqh, offs_m, query_tokens, sqt, offs_d, D, DP)
            g = load_rows(g_ptr + b * sgb + h * sgh, offs_m, query_tokens, sgt, offs_v, DV, DVP)
            rows = (b * query_tokens + offs_m) * heads + h
            lse = tl.load(lse_ptr + rows, mask=live, other=float("-inf"))
            lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(delta_ptr + rows, mask=live, other=0.0)
            factor = tl.zeros([BM], dtype=tl.float32) + scale * LOG2E
            if QK:
                factor *= tl.load(qs_row + offs_m, mask=live, other=0.0)
            factor = tl.maximum(factor, LEAST)
            t, factor = tile_logits(
                q8,
                k8,
                factor,
                given,
                ks_row,
                start,
                offs_m,
                keys,
                key_tokens,
                QK,
                TILE,
                MASK,
                CAUSAL,
                True,
            )
            p = weights(t, factor, lse2)
            dv = tl.dot(tl.trans(p.to(g.dtype)), g, dv, input_precision="ieee")
            dp = tl.dot(g, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")

    live_k = keys < key_tokens
    out = (b * key_tokens + keys) * key_heads + kv
    tl.store(
        dk_ptr + out[:, None] * D + offs_d[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=live_k[:, None] & (offs_d < D)[None, :],
    )
    tl.store(
        dv_ptr + out[:, None] * DV + offs_v[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=live_k[:, None] & (offs_v < DV)[None, :],
    )


def launch_quantized_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    lists: Lists | None,
    transposed: Lists | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    tile_scales: bool,
    with_keys: bool,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """Enqueue the kernels; return gradients contiguous, shaped and typed as query, key and value.

    with_keys: those of key and value too; else they are empty and their kernel does not run.

    operands: what the forward multiplied (its V is not read). out, lse: the forward's, contiguous.
    transposed: the lists of the key blocks. config: its tiles nest in the blocks.
    """
    batch, query_tokens, heads, dim = query.shape
    key_tokens, key_heads = key.shape[1], key.shape[2]
    value_dim = value.shape[3]
    block_m, block_n = config.query_tile, config.key_tile
    shapes = (query.shape, *(x.shape if with_keys else (0,) for x in (key, value)))
    grad_query, grad_key, grad_value = (
        torch.empty(x, device=query.device, dtype=query.dtype) for x in shapes
    )
    delta = torch.empty_like(lse)
    mask, mask_strides, mask_constants = mask_arguments(attn_mask)
    q8, k8 = operands.q, operands.k
    scales = [lse if x is None else x for x in (operands.q_scales, operands.k_scales)]
    sizes = (
        heads,
        heads // key_heads,
        query_tokens,
        key_tokens,
    )
    groups = (scale_groups(operands.q_scales), scale_groups(operands.k_scales))
    constants = {
        "D8": q8.shape[3],
        "D": dim,
        "DP": max(16, triton.next_power_of_2(dim)),
        "DV": value_dim,
        "DVP": max(16, triton.next_power_of_2(value_dim)),
        "BM": block_m,
        "BN": block_n,
        "BLOCK_M": lists.row_block if lists else block_m,
        "BLOCK_N": lists.column_block if lists else block_n,
        "QK": operands.q_scales is not None,
        "TILE": tile_scales,
        **mask_constants,
        "CAUSAL": is_causal,
        "LISTS": lists is not None,
        "STAGES": config.stages,
        **config.options,
    }
    common = (*q8.stride()[:3], *k8.stride()[:3])
    tiles = triton.cdiv(query_tokens, block_m)
    quantized_attention_grad_query_kernel[(tiles * batch * heads,)](
        q8,
        k8,
        *scales,
        key,
        value,
        out,
        grad_out,
        lse,
        delta,
        grad_query,
        lse if mask is None else mask,
        lists.indices if lists else lse,
        lists.counts if lists else lse,
        *sizes,
        tiles,
        *groups,
        lists.indices.shape[3] if lists else 0,
        scale,
        *common,
        *key.stride()[:3],
        *value.stride()[:3],
        *grad_out.stride()[:3],
        *mask_strides,
        *list_strides(lists),
        **constants,
    )
    if not with_keys:
        return grad_query, grad_key, grad_value
    tiles = triton.cdiv(key_tokens, block_n)
    quantized_attention_grad_key_value_kernel[(tiles * batch * key_heads,)](
        q8,
        k8,
        *scales,
        query,
        value,
        grad_out,
        lse,
        delta,
        grad_key,
        grad_value,
        lse if mask is None else mask,
        transposed.indices if transposed else lse,
        transposed.counts if transposed else lse,
        *sizes,
        tiles,
        *groups,
        transposed.indices.shape[3] if transposed else 0,
        scale,
        *common,
        *query.stride()[:3],
        *value.stride()[:3],
        *grad_out.stride()[:3],
        *mask_strides,
        *list_strides(transposed),
        **constants,
    )
    return grad_query, grad_key, grad_value
