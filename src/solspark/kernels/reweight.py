"""Reweighted summaries of every key block for every anchor.

    z_i = c a . k_i,  m = max z,  e_i = exp(z_i - m),  Z = sum e_i
    ak = sum e_i k_i / Z,  av = sum e_i v_i / Z,  lm = m + log Z - c a . ak

One program per (batch·head, key block), head fastest so that neighbours read neighbouring rows. It
reads its tile of K and of V once and loops over the anchors (read from L2), so K and V are read
once whatever P is. Written: P summaries a block.

Few anchors are matrix-vector products and stay in registers as FP32 multiply-adds: the pass is
bound by the bytes of K and V. From `MATRIX_PARENTS` anchors on, 16 at a time go through the tensor
cores. Both sum in FP32; "tensorcore" numerics round e_i to the inputs' dtype before the two
weighted sums, and Z sums it unrounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, block_count

MATRIX_PARENTS = 2
"""Anchors from which matrix tiles beat multiply-adds: a tile costs the same for 1 and for 16. On an
H200 at the 10 s shape 2 anchors one by one take 2.0 ms, 8 in a tile 1.0 ms."""


WARPS, MATRIX_WARPS = 2, 4
"""Of a program with 64 rows. One anchor there: 0.81 ms with 2 warps, 1.31 with 4, 1.74 with 8."""


# fmt: off
@triton.jit
def weigh_block(k, live, a, scale):
    # Weights e^(z - m) of the rows of a block around one anchor a [D] in FP32, their sum, and the
    # log of its mass there.
    z = tl.sum(k.to(tl.float32) * a[None, :], axis=1) * scale
    z = tl.where(live, z, float("-inf"))
    m = tl.max(z, axis=0)
    e = tl.exp(z - m)
    total = tl.sum(e, axis=0)
    return e, total, m + tl.log(total)


@triton.jit
def weighted_mean(x, e, total, ROUND: tl.constexpr):
    # Mean of the rows by their weights, which "tensorcore" numerics round first.
    if ROUND:
        e = e.to(x.dtype).to(tl.float32)
    return tl.sum(x.to(tl.float32) * e[:, None], axis=0) / total


@triton.jit
def store_key(
    ak_ptr, lm_ptr, row, key_mean, lse, count, a, scale,
    D: tl.constexpr, BIASED: tl.constexpr, STORED: tl.constexpr,
):
    offs_d = tl.arange(0, D)
    stored_key = key_mean.to(ak_ptr.dtype.element_ty)
    tl.store(ak_ptr + row * D + offs_d, stored_key)
    if BIASED:
        origin = stored_key.to(tl.float32) if STORED else key_mean
        tl.store(lm_ptr + row, lse - scale * tl.sum(a * origin, axis=0))
    else:
        tl.store(lm_ptr + row, tl.log(count))


# Strides are specialised for alignment: without it the loads of K and V are not vectors.
@triton.jit(do_not_specialize=["batch_heads", "heads", "tokens", "blocks", "parents", "scale"])
def reweight_kernel(
    a_ptr, k_ptr, v_ptr, ak_ptr, av_ptr, lm_ptr,
    batch_heads, heads, tokens, blocks, parents, scale,
    sab: tl.int64, sap: tl.int64, sah: tl.int64,
    skb: tl.int64, skt: tl.int64, skh: tl.int64,
    svb: tl.int64, svt: tl.int64, svh: tl.int64,
    D: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, ANCHORS: tl.constexpr,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, ROUND: tl.constexpr, STORED: tl.constexpr,
):
    pid = tl.program_id(0)
    bh = (pid % batch_heads).to(tl.int64)
    block = pid // batch_heads
    b = bh // heads
    h = bh % heads
    offs_i = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    offs_t = block.to(tl.int64) * SPAN + offs_i
    live = (offs_i < SPAN) & (offs_t < tokens)
    count = tl.sum(live.to(tl.float32))

    k_row = k_ptr + b * skb + h * skh + offs_t[:, None] * skt
    v_row = v_ptr + b * svb + h * svh + offs_t[:, None] * svt
    k = tl.load(k_row + offs_d[None, :], mask=live[:, None], other=0.0)
    v = tl.load(v_row + offs_d[None, :], mask=live[:, None], other=0.0)

    # Plain means do not depend on the anchor.
    if WEIGHTED:
        key_mean = tl.zeros([D], tl.float32)
        value_mean = tl.zeros([D], tl.float32)
    else:
        key_mean = tl.sum(k.to(tl.float32), axis=0) / count
        value_mean = tl.sum(v.to(tl.float32), axis=0) / count

    for first in range(0, parents, ANCHORS):
        if ANCHORS == 1:
            a = tl.load(a_ptr + b * sab + first * sap + h * sah + offs_d).to(tl.float32)
            row = ((b * parents + first) * heads + h) * blocks + block
            own_key, own_value = key_mean, value_mean
            lse = tl.full([], 0.0, tl.float32)
            if WEIGHTED or BIASED:
                e, total, lse = weigh_block(k, live, a, scale)
                if WEIGHTED:
                    own_key = weighted_mean(k, e, total, ROUND)
                    own_value = weighted_mean(v, e, total, ROUND)
            store_key(ak_ptr, lm_ptr, row, own_key, lse, count, a, scale, D, BIASED, STORED)
            tl.store(av_ptr + row * D + offs_d, own_value.to(av_ptr.dtype.element_ty))
        else:
            offs_p = first + tl.arange(0, ANCHORS)
            inside = offs_p < parents
            p = offs_p.to(tl.int64)
            a_row = a_ptr + b * sab + p[:, None] * sap + h * sah
            a = tl.load(a_row + offs_d[None, :], mask=inside[:, None], other=0.0)
            rows = ((b * parents + p) * heads + h) * blocks + block
            if WEIGHTED or BIASED:
                # FP32 anchors keep their precision; 16-bit operands are exact in the tensor cores.
                if a.dtype == k.dtype:
                    z = tl.dot(a, tl.trans(k), input_precision="ieee") * scale
                else:
                    z = tl.dot(a, tl.trans(k.to(tl.float32)), input_precision="ieee") * scale
                z = tl.where(live[None, :], z, float("-inf"))
                m = tl.max(z, axis=1)
                e = tl.exp(z - m[:, None])
                total = tl.sum(e, axis=1)
            if WEIGHTED:
                if ROUND:
                    e16 = e.to(k.dtype)
                    key_sum = tl.dot(e16, k, input_precision="ieee")
                    value_sum = tl.dot(e16, v, input_precision="ieee")
                else:
                    key_sum = tl.dot(e, k.to(tl.float32), input_precision="ieee")
                    value_sum = tl.dot(e, v.to(tl.float32), input_precision="ieee")
                key_means = key_sum / total[:, None]
                stored_keys = key_means.to(k.dtype)
                stored_values = (value_sum / total[:, None]).to(v.dtype)
            else:
                zeros = tl.zeros([ANCHORS, D], tl.float32)
                key_means = zeros + key_mean[None, :]
                stored_keys = key_means.to(k.dtype)
                stored_values = (zeros + value_mean[None, :]).to(v.dtype)
            out = rows[:, None] * D + offs_d[None, :]
            tl.store(ak_ptr + out, stored_keys, mask=inside[:, None])
            tl.store(av_ptr + out, stored_values, mask=inside[:, None])
            if BIASED:
                origins = stored_keys.to(tl.float32) if STORED else key_means
                shift = scale * tl.sum(a.to(tl.float32) * origins, axis=1)
                tl.store(lm_ptr + rows, m + tl.log(total) - shift, mask=inside)
            else:
                mass = tl.zeros([ANCHORS], tl.float32) + tl.log(count)
                tl.store(lm_ptr + rows, mass, mask=inside)


def launch_reweight(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    summary_math: str,
    logmass_key: str,
    reweight_components: str,
    scale: float,
    block_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Enqueue the summaries; return keys, values [B, P, H, N, D], log mass float32 [B, P, H, N].

    anchors [B, P, H, D], key and value [B, T, H, D], last strides 1.
    """
    batch, tokens, heads, dim = key.shape
    parents = anchors.shape[1]
    blocks = block_count(tokens, block_tokens)
    keys = torch.empty(batch, parents, heads, blocks, dim, device=key.device, dtype=key.dtype)
    values = torch.empty_like(keys)
    mass = torch.empty(keys.shape[:4], device=key.device, dtype=torch.float32)
    reweight_kernel[(batch * heads * blocks,)](
        anchors, key, value, keys, values, mass,
        batch * heads, heads, tokens, blocks, parents, scale,
        anchors.stride(0), anchors.stride(1), anchors.stride(2),
        key.stride(0), key.stride(1), key.stride(2),
        value.stride(0), value.stride(1), value.stride(2),
        D=dim, SPAN=block_tokens, ROWS=max(block_tokens, 16),
        ANCHORS=1 if parents < MATRIX_PARENTS else 16,
        WEIGHTED=reweight_components in ("full", "weights_only"),
        BIASED=reweight_components in ("full", "bias_only"),
        ROUND=summary_math == "tensorcore", STORED=logmass_key == "stored",
        num_warps=MATRIX_WARPS if parents >= MATRIX_PARENTS and block_tokens == BLOCK else WARPS,
    )
    return keys, values, mass
