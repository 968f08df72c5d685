"""Reorder K and V, take the key means of the new blocks and their reweighted summaries: one pass.

    k'[b, i, h] = k[b, p[b, h, i], h] for i < V, k[b, i, h] from V on;   v' likewise
    means and, for every anchor, ak, av, lm of the blocks of k' and v' as in `reweight`

One program per (batch·head, block of 64 rows), head fastest. Every row of K and V is read and
written once; the anchors, few, come from L2. K is done with, for the first anchor, before V is
fetched: with one anchor only one of them is in registers at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, block_count
from .reweight import store_key, weigh_block, weighted_mean

WARPS = 4
REGISTERS = 128
"""Of a program and of its threads: 16 warps and four blocks an SM, without a spill. With K and V in
registers together (198 with 4 warps, 255 with 2: 8 warps an SM) it took 1.94 and 1.50 ms on an H200
at the 10 s shape, where the bytes need 1.0: bound by latency."""


# fmt: off
@triton.jit(do_not_specialize=[
    "batch_heads", "heads", "tokens", "video", "blocks", "scale", "spb", "sph",
])
def gather_reweight_kernel(
    a_ptr, k_ptr, v_ptr, permutation_ptr, ko_ptr, vo_ptr, km_ptr, ak_ptr, av_ptr, lm_ptr,
    batch_heads, heads, tokens, video, blocks, scale,
    sab: tl.int64, sap: tl.int64, sah: tl.int64,
    skb: tl.int64, skt: tl.int64, skh: tl.int64,
    svb: tl.int64, svt: tl.int64, svh: tl.int64,
    spb: tl.int64, sph: tl.int64,
    PARENTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, ROUND: tl.constexpr, STORED: tl.constexpr,
):
    pid = tl.program_id(0)
    bh = (pid % batch_heads).to(tl.int64)
    block = pid // batch_heads
    b = bh // heads
    h = bh % heads
    i = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    live = i < tokens
    source = tl.load(permutation_ptr + b * spb + h * sph + i, mask=i < video, other=0)
    source = tl.where(i < video, source.to(tl.int64), i)
    out = ((b * tokens + i[:, None]) * heads + h) * D + offs_d[None, :]
    k_row = k_ptr + b * skb + h * skh + source[:, None] * skt
    k = tl.load(k_row + offs_d[None, :], mask=live[:, None], other=0.0)
    tl.store(ko_ptr + out, k, mask=live[:, None])

    # The router compares plain key means, whatever the summaries are.
    count = tl.sum(live.to(tl.float32))
    key_mean = tl.sum(k.to(tl.float32), axis=0) / count
    place = km_ptr + (bh * blocks + block) * D + offs_d
    tl.store(place, key_mean.to(km_ptr.dtype.element_ty))
    v_row = v_ptr + b * svb + h * svh + source[:, None] * svt
    for p in tl.static_range(0, PARENTS):
        a = tl.load(a_ptr + b * sab + p * sap + h * sah + offs_d).to(tl.float32)
        row = ((b * PARENTS + p) * heads + h) * blocks + block
        own_key = key_mean
        lse = tl.full([], 0.0, tl.float32)
        if WEIGHTED or BIASED:
            e, total, lse = weigh_block(k, live, a, scale)
            if WEIGHTED:
                own_key = weighted_mean(k, e, total, ROUND)
        store_key(ak_ptr, lm_ptr, row, own_key, lse, count, a, scale, D, BIASED, STORED)
        if p == 0:
            v = tl.load(v_row + offs_d[None, :], mask=live[:, None], other=0.0)
            tl.store(vo_ptr + out, v, mask=live[:, None])
        if WEIGHTED:
            own_value = weighted_mean(v, e, total, ROUND)
        else:
            own_value = tl.sum(v.to(tl.float32), axis=0) / count
        tl.store(av_ptr + row * D + offs_d, own_value.to(av_ptr.dtype.element_ty))


def launch_gather_reweight(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    permutation: Tensor,
    *,
    summary_math: str,
    logmass_key: str,
    reweight_components: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Enqueue the pass; return k', v' [B, T, H, D], key means [B, H, N, D], and ak, av, lm.

    anchors [B, P, H, D], key and value [B, T, H, D], permutation int32 or int64 [B, H, V], last
    strides 1.
    """
    batch, tokens, heads, dim = key.shape
    parents, blocks = anchors.shape[1], block_count(tokens)
    new = {"device": key.device, "dtype": key.dtype}
    keys_out, values_out = torch.empty(key.shape, **new), torch.empty(key.shape, **new)
    means = torch.empty(batch, heads, blocks, dim, **new)
    keys = torch.empty(batch, parents, heads, blocks, dim, **new)
    values = torch.empty_like(keys)
    mass = torch.empty(keys.shape[:4], device=key.device, dtype=torch.float32)
    bound = parents == 1 and torch.version.hip is None
    gather_reweight_kernel[(batch * heads * blocks,)](
        anchors, key, value, permutation, keys_out, values_out, means, keys, values, mass,
        batch * heads, heads, tokens, permutation.shape[2], blocks, scale,
        anchors.stride(0), anchors.stride(1), anchors.stride(2),
        key.stride(0), key.stride(1), key.stride(2),
        value.stride(0), value.stride(1), value.stride(2),
        permutation.stride(0), permutation.stride(1),
        PARENTS=parents, D=dim, ROWS=BLOCK,
        WEIGHTED=reweight_components in ("full", "weights_only"),
        BIASED=reweight_components in ("full", "bias_only"),
        ROUND=summary_math == "tensorcore", STORED=logmass_key == "stored",
        num_warps=WARPS, **({"maxnreg": REGISTERS} if bound else {}),
    )
    return keys_out, values_out, means, keys, values, mass
