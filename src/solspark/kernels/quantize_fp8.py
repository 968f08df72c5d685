"""Round queries, keys and values to FP8 (e4m3), each in the layout in which tensor cores take it.

    s = the least power of two with max|x| / s <= 448,  x8 = e4m3(x / s)

Two steps. `ranges_kernel` finds the largest key of a head and the largest value of each channel:
one program reads 16 blocks of K and V once and joins its maxima with atomics (of non-negative
floats' bits, so the order of programs does not matter). Then rows and values are rounded: one
program = one (64 tokens, head), read once, written once as bytes. Queries find their own largest on
the way, one a block. Values are written as tiles [D, 64], since 8-bit products want both operands
along the sum, their keys in `tile_order`. Past the last token everything is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, BlockSummaries, block_count

CHUNK = 16


class Fp8Operands(NamedTuple):
    """The operands of an FP8 attention; rows are padded to whole blocks.

    query e4m3 [B, H, 64 NQ, D], query_scale float32 [B, H, NQ]; key e4m3 [B, Hk, 64 NK, D],
    key_scale float32 [B, Hk]; value e4m3 [B, Hk, NK, D, 64], value_scale float32 [B, Hk, D];
    summary_keys e4m3 [B, P, H, 64 NS, D] and summary_values e4m3 [B, P, H, NS, D, 64] with
    NS = ceil(NK / 64), or None.
    """

    query: Tensor
    query_scale: Tensor
    key: Tensor
    key_scale: Tensor
    value: Tensor
    value_scale: Tensor
    summary_keys: Tensor | None
    summary_values: Tensor | None


@triton.jit
def _power_of_two(largest):
    # The bits of a float are its exponent and mantissa: 448 = 1.75 * 2^8.
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def key_at_place(place):
    """Place 16c + 4t + 2u + e of a tile holds key 16c + 8u + 2t + e."""
    return (place & 48) | ((place & 2) << 2) | ((place & 12) >> 1) | (place & 1)


@triton.jit(do_not_specialize=["chunks", "tokens", "heads"])
def ranges_kernel(
    k_ptr,
    v_ptr,
    k_top_ptr,
    v_top_ptr,
    chunks,
    tokens,
    heads,
    skb: tl.int64,
    skt: tl.int64,
    skh: tl.int64,
    svb: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    pid = tl.program_id(0)
    chunk = pid % chunks
    bh = (pid // chunks).to(tl.int64)
    b = bh // heads
    h = bh % heads
    offs_d = tl.arange(0, D)
    top_k = tl.zeros([D], tl.float32)
    top_v = tl.zeros([D], tl.float32)
    for step in range(STEPS):
        offs = (chunk * STEPS + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = (offs < tokens)[:, None]
        k = tl.load(
            k_ptr + b * skb + h * skh + offs[:, None] * skt + offs_d[None, :], mask=live, other=0.0
        )
        v = tl.load(
            v_ptr + b * svb + h * svh + offs[:, None] * svt + offs_d[None, :], mask=live, other=0.0
        )
        top_k = tl.maximum(top_k, tl.max(tl.abs(k.to(tl.float32)), 0))
        top_v = tl.maximum(top_v, tl.max(tl.abs(v.to(tl.float32)), 0))
    tl.atomic_max(k_top_ptr + bh, tl.max(top_k, 0).to(tl.int32, bitcast=True))
    tl.atomic_max(v_top_ptr + bh * D + offs_d, top_v.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["tokens", "blocks", "heads", "group", "sections"])
def round_kernel(
    x_ptr,
    y_ptr,
    top_ptr,
    scale_ptr,
    tokens,
    blocks,
    heads,
    group,
    sections,
    sxb: tl.int64,
    sxt: tl.int64,
    sxh: tl.int64,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
    TILES: tl.constexpr,
    STORE: tl.constexpr,
):
    pid = tl.program_id(0)
    n = pid % blocks
    bh = (pid // blocks).to(tl.int64)
    b = bh // heads
    h = bh % heads
    places = tl.arange(0, ROWS)
    rows = places
    if TILES:
        rows = key_at_place(places)
    offs = n.to(tl.int64) * ROWS + rows
    offs_d = tl.arange(0, D)
    x = tl.load(
        x_ptr + b * sxb + h * sxh + offs[:, None] * sxt + offs_d[None, :],
        mask=(offs < tokens)[:, None],
        other=0.0,
    ).to(tl.float32)
    if OWN:
        where = bh * blocks + n
        top = tl.max(tl.max(tl.abs(x), 1), 0)
    else:
        # Heads of a summary go through its parents first: P sections of one sample's heads.
        per_section = heads // sections
        where = b * (per_section // group) + (h % per_section) // group
        if TILES:
            where = where * D + offs_d
        top = tl.load(top_ptr + where).to(tl.float32, bitcast=True)
    scale, inverse = _power_of_two(top)
    if TILES:
        y = tl.trans((x * inverse[None, :]).to(tl.float8e4nv))
        into = (bh * blocks + n) * D * ROWS + offs_d[:, None] * ROWS + places[None, :]
    else:
        y = (x * inverse).to(tl.float8e4nv)
        into = (bh * blocks * ROWS + offs[:, None]) * D + offs_d[None, :]
    tl.store(y_ptr + into, y)
    if STORE:
        tl.store(scale_ptr + where, scale)


def _round(
    x: Tensor,
    top: Tensor,
    scale: Tensor | None,
    *,
    group: int,
    sections: int = 1,
    own: bool = False,
    tiles: bool = False,
) -> Tensor:
    """Enqueue the rounding of x [B, L, H, D] and return it as rows [B, H, 64 N, D] or as tiles."""
    batch, tokens, heads, dim = x.shape
    blocks = block_count(tokens)
    shape = (blocks, dim, BLOCK) if tiles else (blocks * BLOCK, dim)
    y = torch.empty((batch, heads, *shape), device=x.device, dtype=torch.float8_e4m3fn)
    round_kernel[(blocks * batch * heads,)](
        x,
        y,
        top,
        top if scale is None else scale,
        tokens,
        blocks,
        heads,
        group,
        sections,
        *x.stride()[:3],
        D=dim,
        ROWS=BLOCK,
        OWN=own,
        TILES=tiles,
        STORE=scale is not None,
        num_warps=4,
    )
    return y


def launch_quantize_fp8(
    query: Tensor, key: Tensor, value: Tensor, summaries: BlockSummaries | None
) -> Fp8Operands:
    """Enqueue the ranges of K and V, then the roundings of Q, K, V and the summaries.

    query [B, Lq, H, D], key and value [B, Lk, Hk, D], finite, last strides 1; summaries inside the
    hulls of key and value.
    """
    batch, query_tokens, heads, dim = query.shape
    key_tokens, key_heads = key.shape[1], key.shape[2]
    group = heads // key_heads
    device = query.device
    key_top = torch.zeros((batch, key_heads), device=device, dtype=torch.int32)
    value_top = torch.zeros((batch, key_heads, dim), device=device, dtype=torch.int32)
    chunks = triton.cdiv(key_tokens, CHUNK * BLOCK)
    ranges_kernel[(chunks * batch * key_heads,)](
        key,
        value,
        key_top,
        value_top,
        chunks,
        key_tokens,
        key_heads,
        *key.stride()[:3],
        *value.stride()[:3],
        D=dim,
        ROWS=BLOCK,
        STEPS=CHUNK,
        num_warps=4,
    )
    shape = (batch, heads, block_count(query_tokens))
    query_scale = torch.empty(shape, device=device, dtype=torch.float32)
    key_scale = torch.empty(key_top.shape, device=device, dtype=torch.float32)
    value_scale = torch.empty(value_top.shape, device=device, dtype=torch.float32)
    query8 = _round(query, key_top, query_scale, group=1, own=True)
    key8 = _round(key, key_top, key_scale, group=1)
    value8 = _round(value, value_top, value_scale, group=1, tiles=True)
    keys8 = values8 = None
    if summaries is not None:
        sections = summaries.keys.shape[1]
        # [B, P, H, NK, D] -> [B, NK, P H, D]
        keys, values = (
            item.flatten(1, 2).transpose(1, 2) for item in (summaries.keys, summaries.values)
        )
        given = {"group": group, "sections": sections}
        keys8 = _round(keys, key_top, None, **given)
        values8 = _round(values, value_top, None, tiles=True, **given)
        keys8 = keys8.unflatten(1, (sections, heads))
        values8 = values8.unflatten(1, (sections, heads))
    return Fp8Operands(query8, query_scale, key8, key_scale, value8, value_scale, keys8, values8)
