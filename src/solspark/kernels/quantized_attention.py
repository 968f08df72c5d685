"""Attention on quantised operands under block lists, a token mask, causality, or all of them.

    out_t = sum_u 2^(c_tu - m_t) v_u / sum_u 2^(c_tu - m_t),  c_tu = scale log2(e) sq_t sk_u
    q8_t.k8_u

One program = one (query tile, head, sample), query tile fastest: programs in flight share a head's
K and V in L2. Reads Q once and, for each query tile, every listed K and V tile once; writes out and
LSE once. Running state (m, l, acc) in float32; INT8 products are exact in int32.

Keys come in two runs: whole tiles that every row may see but for a token mask, then those to check
(the ragged last one, and the diagonal of a causal call). Both do the same arithmetic in the same
order (see quantized_tile), so a mask that hides nothing changes no bit, and hidden tiles leave
the state as it is: m starts finite, 2^(-inf - m) is 0 and the correction factor 1. A token mask and
blocks together thus equal the joined token mask bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK
from .quantize import FLOOR, LARGEST, ROUNDER
from .quantized_tile import (
    LEAST,
    LOG2E,
    SCALE_ROWS,
    Config,
    Lists,
    Operands,
    list_strides,
    load_mask,
    load_rows,
    load_tile,
    mask_arguments,
    scale_groups,
    tile_logits,
    weights,
)

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _attend_tile(
    q,
    factor,
    start,
    m,
    total,
    acc,
    k_base,
    skt,
    v_base,
    svt,
    ks_row,
    vs_row,
    mask_row,
    smm,
    offs_m,
    query_tokens,
    key_tokens,
    largest,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BN: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
    TILE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHECK: tl.constexpr,
):
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, DP)
    offs_v = tl.arange(0, DVP)
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
        CHECK,
    )
    if CHECK:
        k = load_rows(k_base, keys, key_tokens, skt, offs_d, D, DP)
        v = load_rows(v_base, keys, key_tokens, svt, offs_v, DV, DVP)
    else:
        k = load_tile(k_base, start, offs_n, skt, offs_d, D, DP)
        v = load_tile(v_base, start, offs_n, svt, offs_v, DV, DVP)

    # Logits are t * factor: a scale a row of K enters t, one a tile only the factor.
    t, factor = tile_logits(
        q,
        k,
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
        CHECK,
    )

    # Online softmax; the denominator sums what the product below may round.
    m_next = tl.maximum(m, tl.max(t, 1) * factor)
    p = weights(t, factor, m_next)
    alpha = tl.exp2(m - m_next)
    total = tl.fma(total, alpha, tl.sum(p, 1))

    if PV:
        # Each row of the tile is scaled to its own largest, which no running maximum changes.
        if TILE:
            w = p * tl.load(vs_row + start // SCALE_ROWS)
        else:
            w = p * tl.load(vs_row + keys)[None, :]
        top = tl.maximum(tl.max(w, 1), FLOOR)
        stretch = (largest / top)[:, None]
        if v.dtype == tl.int8:
            # As `round_even`, the product fused with the sum.
            w = tl.fma(w, stretch, ROUNDER) - ROUNDER
        else:
            w = tl.minimum(w * stretch, largest)
        mixed = tl.dot(w.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        acc = tl.fma(mixed, (top / largest)[:, None], acc * alpha[:, None])
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_next, total, acc


_FREE = (
    "heads group query_tokens key_tokens query_tiles q_groups k_groups width scale largest "
    "smm smb smh slb slh"
)


@triton.jit(do_not_specialize=_FREE.split())
def quantized_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    qs_ptr,
    ks_ptr,
    vs_ptr,
    mask_ptr,
    index_ptr,
    count_ptr,
    heads,
    group,
    query_tokens,
    key_tokens,
    query_tiles,
    q_groups,
    k_groups,
    width,
    scale,
    largest,
    sqb: tl.int64,
    sqt: tl.int64,
    sqh: tl.int64,
    skb: tl.int64,
    skt: tl.int64,
    skh: tl.int64,
    svb: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    smb: tl.int64,
    smh: tl.int64,
    smm: tl.int64,
    slb: tl.int64,
    slh: tl.int64,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    OUT_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
    TILE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    LISTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    if LISTS:
        tl.static_assert(BLOCK_M % BM == 0, "query tiles must nest in blocks")
        tl.static_assert(BLOCK_N % BN == 0, "key tiles must nest in blocks")
    if QK or PV:
        tl.static_assert(SCALE_ROWS % BN == 0, "key tiles must nest in tiles of scales")
    pid = tl.program_id(0)
    i = pid % query_tiles
    bh = (pid // query_tiles).to(tl.int64)
    b = bh // heads
    h = bh % heads
    kv = h // group
    key_heads = heads // group
    offs_m = i * BM + tl.arange(0, BM)
    offs_d = tl.arange(0, DP)
    offs_v = tl.arange(0, DVP)
    k_base = k_ptr + b * skb + kv * skh
    v_base = v_ptr + b * svb + kv * svh
    ks_row = ks_ptr + (b * key_heads + kv) * k_groups * 16
    vs_row = vs_ptr + (b * key_heads + kv) * k_groups * 16
    mask_row = mask_ptr + b * smb + h * smh
    live = offs_m < query_tokens

    # Q and the factor of each of its rows, in log2 units.
    q = load_rows(q_ptr + b * sqb + h * sqh, offs_m, query_tokens, sqt, offs_d, D, DP)
    factor = tl.zeros([BM], dtype=tl.float32) + scale * LOG2E
    if QK:
        factor *= tl.load(qs_ptr + bh * q_groups * 16 + offs_m, mask=live, other=0.0)
    factor = tl.maximum(factor, LEAST)
    m = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, DVP], dtype=tl.float32)

    # How many key tiles there are, and how many of them come before the first to check.
    SUB: tl.constexpr = BLOCK_N // BN if LISTS else 1
    row = i * BM // BLOCK_M
    list_row = index_ptr + b * slb * width + h * slh * width + row.to(tl.int64) * width
    if LISTS:
        count = tl.load(count_ptr + b * slb + h * slh + row)
        tiles = count * SUB
        clean = tiles
        if count > 0:
            # Only the last block can be short; its tiles past the end are left out.
            left = key_tokens - tl.load(list_row + count - 1) * BLOCK_N
            tiles = (count - 1) * SUB + tl.minimum(SUB, tl.cdiv(left, BN))
            clean = (count - 1) * SUB + tl.minimum(SUB, left // BN)
        if CAUSAL:
            clean = 0
    else:
        tiles = tl.cdiv(key_tokens, BN)
        clean = key_tokens // BN
        if CAUSAL:
            tiles = tl.minimum(tiles, tl.cdiv((i + 1) * BM, BN))
            clean = tl.minimum(clean, i * BM // BN)

    # One ragged tile is not worth a pipeline; a run of causal ones is.
    LATE_STAGES: tl.constexpr = STAGES if CAUSAL else 1

    # The next block's number is fetched a tile ahead, so that K and V can be copied asynchronously.
    block = 0
    if LISTS:
        block = tl.load(list_row, mask=tiles > 0, other=0)
    for tile in tl.range(0, clean, num_stages=STAGES):
        if LISTS:
            start = block * BLOCK_N + (tile % SUB) * BN
            block = tl.load(list_row + (tile + 1) // SUB, mask=tile + 1 < tiles, other=0)
        else:
            start = tile * BN
        m, total, acc = _attend_tile(
            q,
            factor,
            start,
            m,
            total,
            acc,
            k_base,
            skt,
            v_base,
            svt,
            ks_row,
            vs_row,
            mask_row,
            smm,
            offs_m,
            query_tokens,
            key_tokens,
            largest,
            D,
            DP,
            DV,
            DVP,
            BN,
            QK,
            PV,
            TILE,
            MASK,
            MASK_ROWS,
            MASK_STEP,
            CAUSAL,
            False,
        )
    for tile in tl.range(clean, tiles, num_stages=LATE_STAGES):
        if LISTS:
            start = block * BLOCK_N + (tile % SUB) * BN
            block = tl.load(list_row + (tile + 1) // SUB, mask=tile + 1 < tiles, other=0)
        else:
            start = tile * BN
        m, total, acc = _attend_tile(
            q,
            factor,
            start,
            m,
            total,
            acc,
            k_base,
            skt,
            v_base,
            svt,
            ks_row,
            vs_row,
            mask_row,
            smm,
            offs_m,
            query_tokens,
            key_tokens,
            largest,
            D,
            DP,
            DV,
            DVP,
            BN,
            QK,
            PV,
            TILE,
            MASK,
            MASK_ROWS,
            MASK_STEP,
            CAUSAL,
            True,
        )

    # A row that saw no key gives zero and LSE -inf.
    safe = tl.where(total > 0.0, total, 1.0)
    acc = acc / safe[:, None]
    rows = (b * query_tokens + offs_m) * heads + h
    tl.store(
        o_ptr + rows[:, None] * OUT_D + offs_v[None, :],
        acc.to(o_ptr.dtype.element_ty),
        mask=live[:, None] & (offs_v < OUT_D)[None, :],
    )
    lse = tl.where(total > 0.0, (m + tl.log2(safe)) * LN2, float("-inf"))
    tl.store(lse_ptr + rows, lse, mask=live)


def launch_quantized_attention(
    operands: Operands,
    *,
    head_dim: int,
    value_dim: int,
    lists: Lists | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    pv: str,
    tile_scales: bool,
    out_dtype: torch.dtype,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """Enqueue the forward; return out [B, Lq, H, D'] and LSE float32 [B, Lq, H], natural log.

    head_dim, value_dim: channels that the operands hold (padded ones for what is quantised); D' is
    value_dim. attn_mask: bool, int8 or float [B or 1, H or 1, Lq or 1, Lk], any strides. scale is
    not negative. pv: as in the operation, "none" for unquantised V. config: its tiles nest in
    the lists' blocks, and key tiles in 64 rows where there are scales.
    """
    q, k, v = operands.q, operands.k, operands.v
    batch, query_tokens, heads = q.shape[:3]
    key_tokens, key_heads = k.shape[1], k.shape[2]
    block_m, block_n = config.query_tile, config.key_tile
    out = torch.empty(batch, query_tokens, heads, value_dim, device=q.device, dtype=out_dtype)
    lse = torch.empty(batch, query_tokens, heads, device=q.device, dtype=torch.float32)
    mask, mask_strides, mask_constants = mask_arguments(attn_mask)
    tiles = triton.cdiv(query_tokens, block_m)
    quantized_attention_kernel[(tiles * batch * heads,)](
        q,
        k,
        v,
        out,
        lse,
        *[lse if x is None else x for x in (operands.q_scales, operands.k_scales)],
        lse if operands.v_scales is None else operands.v_scales,
        lse if mask is None else mask,
        lists.indices if lists else lse,
        lists.counts if lists else lse,
        heads,
        heads // key_heads,
        query_tokens,
        key_tokens,
        tiles,
        scale_groups(operands.q_scales),
        scale_groups(operands.k_scales, operands.v_scales),
        lists.indices.shape[3] if lists else 0,
        scale,
        LARGEST.get(pv, 1.0),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *mask_strides,
        *list_strides(lists),
        D=head_dim,
        DP=max(16, triton.next_power_of_2(head_dim)),
        DV=value_dim,
        DVP=max(16, triton.next_power_of_2(value_dim)),
        OUT_D=value_dim,
        BM=block_m,
        BN=block_n,
        BLOCK_M=lists.row_block if lists else block_m,
        BLOCK_N=lists.column_block if lists else block_n,
        QK=operands.q_scales is not None,
        PV=operands.v_scales is not None,
        TILE=tile_scales,
        **mask_constants,
        CAUSAL=is_causal,
        LISTS=lists is not None,
        STAGES=config.stages,
        **config.options,
    )
    return out, lse


def choose_config(
    device: torch.device | None,
    head_dim: int,
    dtype: torch.dtype,
    quantized_pv: bool,
    lists: tuple[int, int] | None,
    biases: bool = False,
) -> Config:
    """Return the tiles for a device; None stands for the interpreter.

    dtype: of V, whose product decides. lists: the blocks of a block mask, which tiles nest in.
    biases: the token mask is a float for each query and key. A quantised P takes key tiles of 64,
    which are part of what it means.
    """
    config = _table(device, head_dim)
    if biases and config.warps < 8:
        # A thread holds as many biases as logits: 300 spill moves a tile at 128 rows on sm_90.
        config = config._replace(
            query_tile=min(config.query_tile, 64), stages=min(config.stages, 2)
        )
    if dtype == torch.float32:
        # Full-precision products go through ordinary multipliers: small tiles, few registers.
        config = Config(64, 32, 4, 1)
    if quantized_pv:
        config = config._replace(key_tile=BLOCK)
    if lists is not None:
        config = config._replace(
            query_tile=min(config.query_tile, lists[0]), key_tile=min(config.key_tile, lists[1])
        )
    return config


def _table(device: torch.device | None, head_dim: int) -> Config:
    """Return the row for a chip. Reasons stand beside the rows; benchmarks measure them."""
    if device is None:
        return Config(32, 32, 4, 1)
    if torch.version.hip:
        chip = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        # RDNA has half the lanes a warp. Two stages crash triton's compiler on gfx12
        # (SageAttention issue 365).
        if chip.startswith("gfx9"):
            return Config(128, 64, 4, 2)
        return Config(128, 64, 8, 1 if chip.startswith("gfx12") else 2)
    major, _ = torch.cuda.get_device_capability(device)
    if major == 9 and head_dim <= 128:
        # Four warps of one warpgroup: 8 were slower on an H200 (128 x 64, 10 % lists: 482 TOP/s)
        # where a thread took 144 to 194 registers, and one program filled a multiprocessor.
        return Config(128, 64, 4, 3)
    if head_dim <= 128:
        # mma.sync keeps operands in registers: twice the warps halve them.
        return Config(128, 64, 8, 3)
    return Config(64, 64, 8, 2)
