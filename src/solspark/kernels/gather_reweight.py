"""Reorder K and V, take the key means of the new blocks and their reweighted summaries: one pass.

    k'[b, i, h] = k[b, p[b, h, i], h] for i < V, k[b, i, h] from V on;   v' likewise
    means and, for every anchor, ak, av, lm of the blocks of k' and v' as in `reweight`

One program per (batch·head, block of 64 rows), head fastest. Every row of K and V is read and
written once; the anchors, few, come from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, block_count
from .reweight import store_summary, summarise_block

WARPS = 2
"""Of a program. On an H200 at the 10 s shape: 1.50 ms with 2 warps, 1.94 with 4, 2.69 with 8."""


# fmt: off
@triton.jit(do_not_specialize=[
    "batch_heads", "heads", "tokens", "video", "blocks", "parents", "scale", "spb", "sph",
])
def gather_reweight_kernel(
    a_ptr, k_ptr, v_ptr, permutation_ptr, ko_ptr, vo_ptr, km_ptr, ak_ptr, av_ptr, lm_ptr,
    batch_heads, heads, tokens, video, blocks, parents, scale,
    sab: tl.int64, sap: tl.int64, sah: tl.int64,
    skb: tl.int64, skt: tl.int64, skh: tl.int64,
    svb: tl.int64, svt: tl.int64, svh: tl.int64,
    spb: tl.int64, sph: tl.int64,
    D: tl.constexpr, ROWS: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    ROUND: tl.constexpr, STORED: tl.constexpr,
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
    k_row = k_ptr + b * skb + h * skh + source[:, None] * skt
    v_row = v_ptr + b * svb + h * svh + source[:, None] * svt
    k = tl.load(k_row + offs_d[None, :], mask=live[:, None], other=0.0)
    v = tl.load(v_row + offs_d[None, :], mask=live[:, None], other=0.0)
    out = ((b * tokens + i[:, None]) * heads + h) * D + offs_d[None, :]
    tl.store(ko_ptr + out, k, mask=live[:, None])
    tl.store(vo_ptr + out, v, mask=live[:, None])

    # The router compares plain key means, whatever the summaries are.
    count = tl.sum(live.to(tl.float32))
    key_mean = tl.sum(k.to(tl.float32), axis=0) / count
    place = km_ptr + (bh * blocks + block) * D + offs_d
    tl.store(place, key_mean.to(km_ptr.dtype.element_ty))
    if WEIGHTED:
        value_mean = tl.zeros([D], tl.float32)
    else:
        value_mean = tl.sum(v.to(tl.float32), axis=0) / count

    for p in range(0, parents):
        a = tl.load(a_ptr + b * sab + p * sap + h * sah + offs_d).to(tl.float32)
        row = ((b * parents + p) * heads + h) * blocks + block
        own_key, own_value, lse = summarise_block(
            k, v, key_mean, value_mean, live, a, scale, WEIGHTED, BIASED, ROUND
        )
        store_summary(
            ak_ptr, av_ptr, lm_ptr, row, own_key, own_value, lse, count, a, scale,
            D, BIASED, STORED,
        )


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
    gather_reweight_kernel[(batch * heads * blocks,)](
        anchors, key, value, permutation, keys_out, values_out, means, keys, values, mass,
        batch * heads, heads, tokens, permutation.shape[2], blocks, parents, scale,
        anchors.stride(0), anchors.stride(1), anchors.stride(2),
        key.stride(0), key.stride(1), key.stride(2),
        value.stride(0), value.stride(1), value.stride(2),
        permutation.stride(0), permutation.stride(1),
        D=dim, ROWS=BLOCK,
        WEIGHTED=reweight_components in ("full", "weights_only"),
        BIASED=reweight_components in ("full", "bias_only"),
        ROUND=summary_math == "tensorcore", STORED=logmass_key == "stored",
        num_warps=WARPS,
    )
    return keys_out, values_out, means, keys, values, mass
