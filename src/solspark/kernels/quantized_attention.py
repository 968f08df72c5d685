"""Attention on quantised operands under block lists, a token mask, causality, or all of them.

    out_t = sum_u 2^(c_tu - m_t) v_u / sum_u 2^(c_tu - m_t),  c_tu = scale log2(e) sq_t sk_u
    q8_t.k8_u

One program = one (query tile, head, sample), query tile fastest: programs in flight share a head's
K and V in L2. Reads Q once and, for each query tile, every listed K and V tile once; writes out and
LSE once. Running state (m, l, acc) in float32; INT8 products are exact in int32.

Keys come in two runs: tiles that need no mask, then those that do (the ragged last one, the
diagonal of a causal call, or all where there is a token mask). Both do the same arithmetic, so a
mask that hides nothing changes no bit, and hidden tiles leave the state as it is: m starts finite,
2^(-inf - m) is 0 and the correction factor 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK
from .quantize import FLOOR, LARGEST, round_even

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)
# Scales multiply to less than float32 holds; a factor of exactly zero would turn -inf into NaN.
LEAST = tl.constexpr(1.0e-37)
SCALE_ROWS = tl.constexpr(64)


class Operands(NamedTuple):
    """Q, K and V as the kernels read them: [B, L, H, D or Dp], and float32 scales or None.

    Scales are [B, H, L] or, for tiles, [B, H, ceil(L / 64)].
    """

    q: Tensor
    q_scales: Tensor | None
    k: Tensor
    k_scales: Tensor | None
    v: Tensor
    v_scales: Tensor | None


class Lists(NamedTuple):
    """Kept blocks of each block row: int32 [B or 1, H or 1, R] and [.., R, C], and block sizes."""

    counts: Tensor
    indices: Tensor
    row_block: int
    column_block: int


@triton.jit
def load_rows(base, offs_t, tokens, stride, offs_d, D: tl.constexpr, DP: tl.constexpr):
    # Rows past the end and channels past D are zero, whatever memory holds.
    at = base + offs_t.to(tl.int64)[:, None] * stride + offs_d[None, :]
    inside = (offs_t < tokens)[:, None]
    if D != DP:
        inside = inside & (offs_d < D)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_tile(base, start, offs_n, stride, offs_d, D: tl.constexpr, DP: tl.constexpr):
    # As `load_rows` where every row exists.
    at = base + (start + offs_n).to(tl.int64)[:, None] * stride + offs_d[None, :]
    if D != DP:
        return tl.load(at, mask=(offs_d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def row_scales(scale_row, offs, tokens, TILE: tl.constexpr):
    if TILE:
        return tl.load(scale_row + offs // SCALE_ROWS, mask=offs < tokens, other=0.0)
    return tl.load(scale_row + offs, mask=offs < tokens, other=0.0)


@triton.jit
def product(a, b_t):
    # INT8 sums exactly in int32, the rest in float32, without TF32's ten bits.
    return tl.dot(a, b_t, input_precision="ieee").to(tl.float32)


@triton.jit
def hidden_or(
    t,
    mask_row,
    offs_m,
    offs_n,
    query_tokens,
    key_tokens,
    smm,
    smn,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    # -inf where the end, causality or a token mask (1: bool) hides a key.
    seen = (offs_n < key_tokens)[None, :]
    if CAUSAL:
        seen = seen & (offs_n[None, :] <= offs_m[:, None])
    if MASK == 1:
        if MASK_ROWS:
            at = mask_row + offs_m.to(tl.int64)[:, None] * smm + offs_n[None, :] * smn
            inside = (offs_m < query_tokens)[:, None] & (offs_n < key_tokens)[None, :]
            seen = seen & (tl.load(at, mask=inside, other=0) != 0)
        else:
            shown = tl.load(mask_row + offs_n * smn, mask=offs_n < key_tokens, other=0) != 0
            seen = seen & shown[None, :]
    return tl.where(seen, t, float("-inf"))


@triton.jit
def token_bias(
    mask_row, offs_m, offs_n, query_tokens, key_tokens, smm, smn, MASK_ROWS: tl.constexpr
):
    # A float mask in log2 units, [BM or 1, BN].
    if MASK_ROWS:
        at = mask_row + offs_m.to(tl.int64)[:, None] * smm + offs_n[None, :] * smn
        inside = (offs_m < query_tokens)[:, None] & (offs_n < key_tokens)[None, :]
        bias = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        bias = tl.load(mask_row + offs_n * smn, mask=offs_n < key_tokens, other=0.0)
        bias = bias.to(tl.float32)[None, :]
    return bias * LOG2E


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
    smn,
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
    CAUSAL: tl.constexpr,
    CHECK: tl.constexpr,
):
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, DP)
    offs_v = tl.arange(0, DVP)
    keys = start + offs_n
    if CHECK:
        k = load_rows(k_base, keys, key_tokens, skt, offs_d, D, DP)
        v = load_rows(v_base, keys, key_tokens, svt, offs_v, DV, DVP)
    else:
        k = load_tile(k_base, start, offs_n, skt, offs_d, D, DP)
        v = load_tile(v_base, start, offs_n, svt, offs_v, DV, DVP)

    # Logits as t * factor: a scale a row of K enters t, one a tile only the factor.
    t = product(q, tl.trans(k))
    if QK:
        if TILE:
            factor = tl.maximum(factor * tl.load(ks_row + start // SCALE_ROWS), LEAST)
        else:
            t *= row_scales(ks_row, keys, key_tokens, False)[None, :]
    if CHECK:
        if MASK == 2:
            t = t * factor[:, None] + token_bias(
                mask_row, offs_m, keys, query_tokens, key_tokens, smm, smn, MASK_ROWS
            )
            factor = factor * 0.0 + 1.0
        t = hidden_or(
            t, mask_row, offs_m, keys, query_tokens, key_tokens, smm, smn, MASK, MASK_ROWS, CAUSAL
        )

    # Online softmax; the denominator sums what the product below may round.
    m_next = tl.maximum(m, tl.max(t, 1) * factor)
    p = tl.exp2(t * factor[:, None] - m_next[:, None])
    alpha = tl.exp2(m - m_next)
    total = total * alpha + tl.sum(p, 1)

    if PV:
        # Each row of the tile is scaled to its own largest, which no running maximum changes.
        if TILE:
            w = p * tl.load(vs_row + start // SCALE_ROWS)
        else:
            w = p * row_scales(vs_row, keys, key_tokens, False)[None, :]
        top = tl.maximum(tl.max(w, 1), FLOOR)
        w = w * (largest / top)[:, None]
        if v.dtype == tl.int8:
            w = round_even(w)
        else:
            w = tl.minimum(w, largest)
        acc = acc * alpha[:, None] + product(w.to(v.dtype), v) * (top / largest)[:, None]
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_next, total, acc


_FREE = (
    "heads group query_tokens key_tokens query_tiles q_scales k_scales width scale largest "
    "smm smn smb smh slb slh"
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
    q_scales,
    k_scales,
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
    smn: tl.int64,
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
    CAUSAL: tl.constexpr,
    LISTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    if LISTS:
        tl.static_assert(BLOCK_M % BM == 0, "query tiles must nest in blocks")
        tl.static_assert(BLOCK_N % BN == 0, "key tiles must nest in blocks")
    if QK and TILE:
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
    ks_row = ks_ptr + (b * key_heads + kv) * k_scales
    vs_row = vs_ptr + (b * key_heads + kv) * k_scales
    mask_row = mask_ptr + b * smb + h * smh

    # Q and the factor of each of its rows, in log2 units.
    q = load_rows(q_ptr + b * sqb + h * sqh, offs_m, query_tokens, sqt, offs_d, D, DP)
    factor = tl.zeros([BM], dtype=tl.float32) + scale * LOG2E
    if QK:
        factor *= row_scales(qs_ptr + bh * q_scales, offs_m, query_tokens, TILE)
    factor = tl.maximum(factor, LEAST)
    m = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, DVP], dtype=tl.float32)

    # How many key tiles there are, and how many of them come before the first that needs a mask.
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
    if MASK:
        clean = 0

    # One ragged tile is not worth a pipeline; a run of masked ones is.
    LATE_STAGES: tl.constexpr = STAGES if MASK + CAUSAL > 0 else 1

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
            smn,
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
            smn,
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
            CAUSAL,
            True,
        )

    # A row that saw no key gives zero and LSE -inf.
    safe = tl.where(total > 0.0, total, 1.0)
    acc = acc / safe[:, None]
    live = offs_m < query_tokens
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
    config: tuple[int, int, int, int],
) -> tuple[Tensor, Tensor]:
    """Enqueue the forward; return out [B, Lq, H, D'] and LSE float32 [B, Lq, H], natural log.

    head_dim, value_dim: channels that the operands hold (padded ones for what is quantised); D' is
    value_dim. attn_mask: bool, int8 or float [B or 1, H or 1, Lq or 1, Lk], any strides. scale is
    not negative. pv: as in the operation, "none" for unquantised V. config: query tile, key tile,
    warps, stages; tiles nest in the lists' blocks, and key tiles in 64 rows for tile scales.
    """
    q, k, v = operands.q, operands.k, operands.v
    batch, query_tokens, heads = q.shape[:3]
    key_tokens, key_heads = k.shape[1], k.shape[2]
    block_m, block_n, warps, stages = config
    out = torch.empty(batch, query_tokens, heads, value_dim, device=q.device, dtype=out_dtype)
    lse = torch.empty(batch, query_tokens, heads, device=q.device, dtype=torch.float32)
    mask, mode, mask_strides = mask_arguments(attn_mask)
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
        operands.q_scales.shape[2] if operands.q_scales is not None else 0,
        scale_count(operands),
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
        MASK=mode,
        MASK_ROWS=attn_mask is not None and attn_mask.shape[2] > 1,
        CAUSAL=is_causal,
        LISTS=lists is not None,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )
    return out, lse


def mask_arguments(
    attn_mask: Tensor | None,
) -> tuple[Tensor | None, int, tuple[int, int, int, int]]:
    """Return a mask as bytes or floats, its mode (0 none, 1 bool, 2 float) and its strides."""
    if attn_mask is None:
        return None, 0, (0, 0, 0, 0)
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(attn_mask.shape, attn_mask.stride(), strict=True)
    )
    if attn_mask.is_floating_point():
        return attn_mask, 2, strides  # type: ignore[return-value]
    return attn_mask.view(torch.int8), 1, strides  # type: ignore[return-value]


def list_strides(lists: Lists | None) -> tuple[int, int]:
    """Return how many rows of lists one sample and one head advance, 0 where one serves all."""
    if lists is None:
        return 0, 0
    batch, heads, rows = lists.counts.shape
    return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)


def scale_count(operands: Operands) -> int:
    """Return the scales of one key head; K's and V's are equally many."""
    for scales in (operands.k_scales, operands.v_scales):
        if scales is not None:
            return scales.shape[2]
    return 0


def choose_config(
    device: torch.device | None,
    head_dim: int,
    dtype: torch.dtype,
    quantized_pv: bool,
    lists: tuple[int, int] | None,
) -> tuple[int, int, int, int]:
    """Return (query tile, key tile, warps, stages) for a device; None stands for the interpreter.

    dtype: of V, whose product decides. lists: the blocks of a block mask, which tiles nest in. A
    quantised P takes key tiles of 64, which are part of what it means.
    """
    block_m, block_n, warps, stages = _table(device, head_dim)
    if dtype == torch.float32:
        # Full-precision products go through ordinary multipliers: small tiles, few registers.
        block_m, block_n, warps, stages = 64, 32, 4, 1
    if quantized_pv:
        block_n = BLOCK
    if lists is not None:
        block_m, block_n = min(block_m, lists[0]), min(block_n, lists[1])
    return block_m, block_n, warps, stages


def _table(device: torch.device | None, head_dim: int) -> tuple[int, int, int, int]:
    """Return the row for a chip. Reasons stand beside the rows; benchmarks measure them."""
    if device is None:
        return 32, 32, 4, 1
    if torch.version.hip:
        chip = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        # RDNA has half the lanes a warp. Two stages crash triton's compiler on gfx12
        # (SageAttention issue 365).
        if chip.startswith("gfx9"):
            return 128, 64, 4, 2
        return 128, 64, 8, 1 if chip.startswith("gfx12") else 2
    major, _ = torch.cuda.get_device_capability(device)
    if major == 9 and head_dim <= 128:
        # Four warps of one warpgroup: 8 were slower on an H200 (128 x 64, 10 % lists: 482 TOP/s).
        return 128, 64, 4, 3
    if head_dim <= 128:
        # mma.sync keeps operands in registers: twice the warps halve them.
        return 128, 64, 8, 3
    return 64, 64, 8, 2
