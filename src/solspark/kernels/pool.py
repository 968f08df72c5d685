"""Block means of Q, K and V, the mass of each key block, and per-head statistics of the key means.

    query_means[i]  = mean of the block's query rows                          (float32)
    key_means[j]    = sum_t w_t k_t / sum_t w_t,  w_t = exp(key_bias_t) or 1  (type of the inputs)
    value_means[j]  = sum_t w_t v_t / sum_t w_t                               (type of the inputs)
    log_mass[j]     = log sum_t w_t                                           (float32, natural)
    key_mean, key_var = mean and population variance of key_means over live blocks   (float32)

Two launches. The first has one program per (Q or K or V, block, batch·head), head fastest so that
neighbours read neighbouring 256-byte rows; it reads every element of Q, K and V once, accumulates
in float32 and rounds once. The second has one program per (batch·head) and reads the key means,
1/64 of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, block_count

# fmt: off
# Strides of Q, K and V stay specialised: without their divisibility loads would be two bytes wide.
_POOL_FREE = [
    "batch_heads", "heads", "query_tokens", "key_tokens", "query_blocks", "key_blocks",
    "sbb", "sbh",
]


@triton.jit
def _weighted_sum(
    base, stride, bias_row, shift, first, tokens,
    D: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    # A few rows at a time: a whole block in float32 leaves too few registers for loads in flight.
    offs_d = tl.arange(0, D)
    acc = tl.zeros([ROWS, D], dtype=tl.float32)
    for start in tl.static_range(0, BLOCK_T, ROWS):
        t = first + start + tl.arange(0, ROWS)
        live = t < tokens
        x = tl.load(
            base + t.to(tl.int64)[:, None] * stride + offs_d[None, :], mask=live[:, None], other=0.0
        ).to(tl.float32)
        if HAS_BIAS:
            weight = tl.exp(tl.load(bias_row + t, mask=live, other=float("-inf")) - shift)
            # A dead token weighs nothing whatever it holds.
            x = tl.where(weight[:, None] > 0.0, x * weight[:, None], 0.0)
        acc += x
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=_POOL_FREE)
def pool_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, qm_ptr, km_ptr, vm_ptr, mass_ptr,
    batch_heads, heads, query_tokens, key_tokens, query_blocks, key_blocks,
    sqb: tl.int64, sqt: tl.int64, sqh: tl.int64,
    skb: tl.int64, skt: tl.int64, skh: tl.int64,
    svb: tl.int64, svt: tl.int64, svh: tl.int64, sbb: tl.int64, sbh: tl.int64,
    D: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
    HAS_Q: tl.constexpr, HAS_V: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    # One grid axis: the other two end at 65,535 programs.
    pid = tl.program_id(0)
    bh = (pid % batch_heads).to(tl.int64)
    rest = pid // batch_heads
    blocks = tl.maximum(query_blocks, key_blocks)
    block = rest % blocks
    which = rest // blocks
    b = bh // heads
    h = bh % heads
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)

    # Queries: plain mean, kept in float32 because routing compares it with thresholds.
    if HAS_Q:  # noqa: SIM102  (one is known at compile time, the other on the device)
        if (which == 0) & (block < query_blocks):
            acc = tl.zeros([ROWS, D], dtype=tl.float32)
            for start in tl.static_range(0, BLOCK_T, ROWS):
                t = block * BLOCK_T + start + offs_r
                q = tl.load(
                    q_ptr + b * sqb + h * sqh + t.to(tl.int64)[:, None] * sqt + offs_d[None, :],
                    mask=(t < query_tokens)[:, None],
                    other=0.0,
                )
                acc += q.to(tl.float32)
            count = tl.minimum(query_tokens - block * BLOCK_T, BLOCK_T)
            tl.store(qm_ptr + (bh * query_blocks + block) * D + offs_d, tl.sum(acc, axis=0) / count)

    # Keys and values: weights relative to the block's largest bias, so that exp never overflows.
    if (which > 0) & (block < key_blocks):
        live = offs_t < key_tokens
        if HAS_BIAS:
            bias = tl.load(
                bias_ptr + b * sbb + h * sbh + offs_t, mask=live, other=float("-inf")
            )
            top = tl.max(bias, axis=0)
            shift = tl.where(top == float("-inf"), 0.0, top)
            mass = tl.sum(tl.exp(bias - shift))
            tl.store(mass_ptr + bh * key_blocks + block, tl.log(mass) + shift, mask=which == 1)
            mass = tl.where(mass == 0.0, 1.0, mass)
        else:
            shift = 0.0
            mass = tl.sum(live.to(tl.float32))
            tl.store(
                mass_ptr + bh * key_blocks + block, tl.log(mass), mask=(bh == 0) & (which == 1)
            )
        out = (bh * key_blocks + block) * D + offs_d
        bias_row = bias_ptr
        if HAS_BIAS:
            bias_row = bias_ptr + b * sbb + h * sbh
        if which == 1:
            mean = (
                _weighted_sum(
                    k_ptr + b * skb + h * skh, skt, bias_row, shift, block * BLOCK_T,
                    key_tokens, D, BLOCK_T, ROWS, HAS_BIAS,
                )
                / mass
            )
            tl.store(km_ptr + out, mean.to(km_ptr.dtype.element_ty))
        else:
            if HAS_V:
                mean = (
                    _weighted_sum(
                        v_ptr + b * svb + h * svh, svt, bias_row, shift, block * BLOCK_T,
                        key_tokens, D, BLOCK_T, ROWS, HAS_BIAS,
                    )
                    / mass
                )
                tl.store(vm_ptr + out, mean.to(vm_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["key_blocks"])
def statistics_kernel(
    km_ptr, mass_ptr, mean_ptr, var_ptr, key_blocks,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, D)
    first = tl.zeros([ROWS, D], dtype=tl.float32)
    count = tl.zeros([ROWS], dtype=tl.float32)
    # Mean first, then centred squares: E[x^2] - mean^2 loses everything under a large offset.
    for start in range(0, key_blocks, ROWS):
        offs = start + tl.arange(0, ROWS)
        live = offs < key_blocks
        if HAS_BIAS:
            mass = tl.load(mass_ptr + bh * key_blocks + offs, mask=live, other=float("-inf"))
            live = live & (mass > float("-inf"))
        x = tl.load(
            km_ptr + (bh * key_blocks + offs)[:, None] * D + offs_d[None, :],
            mask=live[:, None],
            other=0.0,
        )
        first += x.to(tl.float32)
        count += live.to(tl.float32)
    total = tl.maximum(tl.sum(count), 1.0)
    mean = tl.sum(first, axis=0) / total
    second = tl.zeros([ROWS, D], dtype=tl.float32)
    for start in range(0, key_blocks, ROWS):
        offs = start + tl.arange(0, ROWS)
        live = offs < key_blocks
        if HAS_BIAS:
            mass = tl.load(mass_ptr + bh * key_blocks + offs, mask=live, other=float("-inf"))
            live = live & (mass > float("-inf"))
        x = tl.load(
            km_ptr + (bh * key_blocks + offs)[:, None] * D + offs_d[None, :],
            mask=live[:, None],
            other=0.0,
        )
        centred = tl.where(live[:, None], x.to(tl.float32) - mean[None, :], 0.0)
        second += centred * centred
    tl.store(mean_ptr + bh * D + offs_d, mean)
    tl.store(var_ptr + bh * D + offs_d, tl.sum(second, axis=0) / total)


def launch_pool(
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    *,
    num_warps: int = 1,
    rows: int = 16,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Enqueue pooling; return (query_means, key_means, value_means, log_mass, key_mean, key_var).

    bias: float32 [B, 1 or H, Lk], natural log, or None. log_mass is [B, H, NK], or [1, 1, NK]
    without a bias. The means of a tensor that is None are empty.
    """
    batch, key_tokens, heads, dim = key.shape
    query_tokens = query.shape[1] if query is not None else 0
    nq, nk = block_count(query_tokens), block_count(key_tokens)
    query_means = key.new_empty((batch, heads, nq, dim), dtype=torch.float32)
    key_means = key.new_empty((batch, heads, nk, dim))
    value_means = key.new_empty((batch, heads, nk if value is not None else 0, dim))
    key_mean = key.new_empty((batch, heads, dim), dtype=torch.float32)
    key_var = torch.empty_like(key_mean)
    shape = (batch, heads, nk) if bias is not None else (1, 1, nk)
    log_mass = key.new_empty(shape, dtype=torch.float32)

    def strides(x: Tensor | None) -> tuple[int, int, int]:
        return (x.stride(0), x.stride(1), x.stride(2)) if x is not None else (0, 0, 0)

    bias_strides = (0, 0)
    if bias is not None:
        bias_strides = (bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0)
    pool_kernel[(batch * heads * max(nq, nk) * (3 if value is not None else 2),)](
        query, key, value, bias, query_means, key_means, value_means, log_mass,
        batch * heads, heads, query_tokens, key_tokens, nq, nk,
        *strides(query), *strides(key), *strides(value), *bias_strides,
        D=dim, BLOCK_T=BLOCK, ROWS=rows, HAS_Q=query is not None, HAS_V=value is not None,
        HAS_BIAS=bias is not None, num_warps=num_warps,
    )
    statistics_kernel[(batch * heads,)](
        key_means, log_mass, key_mean, key_var, nk, D=dim, ROWS=64, HAS_BIAS=bias is not None,
        num_warps=8,
    )
    return query_means, key_means, value_means, log_mass, key_mean, key_var
