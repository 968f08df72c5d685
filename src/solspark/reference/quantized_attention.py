"""Attention on quantised operands under a token mask, a block mask, or both, with its backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from solspark._checks import accumulation_dtype, resolve_scale
from solspark.reference.quantize import (
    FLOOR,
    LARGEST,
    per_token,
    quantize,
    rotate,
    rotation_size,
)
from solspark.types import BLOCK

OPERANDS = ("int8", "fp8", "fp16", "none")
"""Operand types of the two products; "none" leaves the input type."""


class Options(NamedTuple):
    """What `quantized_attention` is asked for, beyond tensors."""

    block_m: int
    block_n: int
    is_causal: bool
    scale: float
    matmul: str
    pv: str
    smooth_k: bool
    hadamard: int
    granularity: str


def quantized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 64,
    is_causal: bool = False,
    scale: float | None = None,
    matmul: str = "int8",
    pv: str = "none",
    smooth_k: bool = True,
    hadamard: int = 0,
    granularity: str = "row",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with low-precision products.

        z_tu = scale * sq_t * sk_u * (q8_t . k8_u) + bias_tu     (q8, k8, sq, sk from `quantize`)
        out_t = sum_u e^(z_tu - lse_t) v_u,  lse_t = log sum_u e^z_tu, over the u that t may see

    K may lose its mean over tokens first (`smooth_k`), which a softmax does not notice. With a
    quantised P V each tile of 64 keys (block_n, if that is less and there is a block mask) of a
    row of P is quantised on its own: w = P * sv, round(w * largest / max w) against v8.

    Args:
        query: [B, Lq, H, D].
        key: [B, Lk, Hk, D]; Hk divides H, query head h reads key head h // (H / Hk).
        value: [B, Lk, Hk, Dv].
        attn_mask: bool (True may be seen) or float (added), broadcastable to [B, H, Lq, Lk].
        block_mask: bool or int8 [B or 1, H or 1, ceil(Lq / block_m), ceil(Lk / block_n)].
        block_m, block_n: rows and keys of a block.
        is_causal: row t sees keys 0..t, counted from the top left.
        scale: None means D ** -0.5.
        matmul: type of Q and K: "int8", "fp8", "fp16" or "none".
        pv: type of P and V.
        smooth_k: subtract K's mean over tokens before it is quantised.
        hadamard: channels that one rotation of Q and K (and of a quantised V) spans; 0 none.
        granularity: scales of K and V: a "row" or a "tile" of 64 tokens; Q has one a row.
        return_lse: also return lse.

    Returns:
        out [B, Lq, H, Dv] in the query's type, and if asked lse float32 (float64) [B, Lq, H]. A
        row that sees no key is zero, with lse -inf.

    Numerics: quantisation in FP32, everything after it in float32 (float64 for float64 inputs),
    one rounding of the output.

    Source: router specification section 3.
    """
    options = Options(
        block_m,
        block_n,
        is_causal,
        resolve_scale(scale, query.shape[-1]),
        matmul,
        pv,
        smooth_k,
        hadamard,
        granularity,
    )
    logits = masked_logits(query, key, attn_mask, block_mask, options)
    lse = torch.logsumexp(logits, -1)
    probabilities = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    tile = BLOCK if block_mask is None else min(BLOCK, block_n)
    out = _mix(probabilities, value, query.shape[2], options, tile)
    out = out.transpose(1, 2).to(query.dtype)
    return (out, lse.transpose(1, 2)) if return_lse else out


def quantized_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 64,
    is_causal: bool = False,
    scale: float | None = None,
    matmul: str = "int8",
    pv: str = "none",
    smooth_k: bool = True,
    hadamard: int = 0,
    granularity: str = "row",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `quantized_attention`, quantisation taken as the identity.

        P = e^(z - lse),  dV = P^T dO,  dP = dO V^T,  delta_t = sum_d out_td dO_td
        dS = P * (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q

    z is recomputed from the quantised operands, so that P is the forward's; the products around it
    take Q, K, V and dO as they came.

    Args:
        out: [B, Lq, H, Dv], the forward's result.
        lse: float32 (float64) [B, Lq, H], the forward's.
        grad_out: [B, Lq, H, Dv].
        (others): as in `quantized_attention`.

    Returns:
        grad_query, grad_key, grad_value, shaped and typed as the inputs. A query block that keeps
        nothing, and a key block that nobody keeps, have zero gradients.

    Numerics: float32 (float64 for float64 inputs) throughout, one rounding at the end.

    Source: router specification 3.6.
    """
    options = Options(
        block_m,
        block_n,
        is_causal,
        resolve_scale(scale, query.shape[-1]),
        matmul,
        pv,
        smooth_k,
        hadamard,
        granularity,
    )
    dtype = accumulation_dtype(query.dtype)
    heads, key_heads = query.shape[2], key.shape[2]
    logits = masked_logits(query, key, attn_mask, block_mask, options)
    row_lse = lse.transpose(1, 2).to(dtype)
    probabilities = torch.exp(logits - row_lse.masked_fill(row_lse == -math.inf, 0.0)[..., None])
    q = query.transpose(1, 2).to(dtype)
    k, v = (_per_query_head(x, heads).to(dtype) for x in (key, value))
    g = grad_out.transpose(1, 2).to(dtype)
    delta = (out.transpose(1, 2).to(dtype) * g).sum(-1, keepdim=True)
    grad_logits = probabilities * (g @ v.transpose(-1, -2) - delta)
    grad_query = options.scale * (grad_logits @ k)
    grad_key = options.scale * (grad_logits.transpose(-1, -2) @ q)
    grad_value = probabilities.transpose(-1, -2) @ g

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (key_heads, heads // key_heads)).sum(2).transpose(1, 2)

    return (
        grad_query.transpose(1, 2).to(query.dtype),
        grouped(grad_key).to(key.dtype),
        grouped(grad_value).to(value.dtype),
    )


def masked_logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    options: Options,
) -> Tensor:
    """Return z [B, H, Lq, Lk] in natural log, -inf where a mask hides."""
    dtype = accumulation_dtype(query.dtype)
    batch, query_tokens, heads, _ = query.shape
    key_tokens = key.shape[1]
    if options.matmul == "none":
        q = query.transpose(1, 2).to(dtype)
        k = _per_query_head(key, heads).to(dtype)
        logits = (q @ k.transpose(-1, -2)) * options.scale
    else:
        (q8, sq), (k8, sk) = quantized_operands(query, key, options)
        product = q8.transpose(1, 2).to(dtype) @ _per_query_head(k8.to(dtype), heads).mT
        row = per_token(sq, query_tokens).to(dtype)
        column = per_token(sk, key_tokens).to(dtype)
        column = column.repeat_interleave(heads // key.shape[2], 1)
        logits = product * row[..., None] * column[..., None, :] * options.scale
    logits = logits.expand(batch, heads, query_tokens, key_tokens)
    if attn_mask is not None:
        if attn_mask.is_floating_point():
            logits = logits + attn_mask.to(dtype)
        else:
            logits = logits.masked_fill(~attn_mask.bool(), -math.inf)
    if options.is_causal:
        seen = torch.ones(query_tokens, key_tokens, dtype=torch.bool, device=query.device).tril()
        logits = logits.masked_fill(~seen, -math.inf)
    if block_mask is not None:
        shown = block_mask.bool()
        shown = shown.repeat_interleave(options.block_m, 2)[:, :, :query_tokens]
        shown = shown.repeat_interleave(options.block_n, 3)[..., :key_tokens]
        logits = logits.masked_fill(~shown, -math.inf)
    return logits


def quantized_operands(
    query: Tensor, key: Tensor, options: Options
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (values, scales) of Q and of K, K without its mean if so asked."""
    mean = key_mean(key) if options.smooth_k else None
    dtype, group = options.matmul, options.hadamard
    q = quantize(query, dtype=dtype, granularity="row", hadamard=group)
    k = quantize(key, dtype=dtype, granularity=options.granularity, mean=mean, hadamard=group)
    return q, k


def key_mean(key: Tensor) -> Tensor:
    """Return the mean over tokens, float32 [B, Hk, D], of a dense copy: strides do not matter."""
    return key.to(torch.float32, memory_format=torch.contiguous_format).mean(1)


def _mix(probabilities: Tensor, value: Tensor, heads: int, options: Options, width: int) -> Tensor:
    """Return P V [B, H, Lq, Dv], both quantised if so asked, P in tiles of `width` keys."""
    dtype = probabilities.dtype
    if options.pv == "none":
        return probabilities @ _per_query_head(value, heads).to(dtype)
    values, scales = quantize(
        value, dtype=options.pv, granularity=options.granularity, hadamard=options.hadamard
    )
    v8 = _per_query_head(values.to(dtype), heads)
    repeats = heads // value.shape[2]
    column = per_token(scales, value.shape[1]).to(dtype).repeat_interleave(repeats, 1)
    weights = probabilities * column[..., None, :]
    largest = LARGEST[options.pv]
    out = probabilities.new_zeros(*probabilities.shape[:3], v8.shape[-1])
    for start in range(0, weights.shape[-1], width):
        tile = weights[..., start : start + width]
        top = tile.amax(-1, keepdim=True).clamp_min(FLOOR)
        rounded = _round_to(tile * (largest / top), options.pv)
        out = out + (rounded @ v8[..., start : start + width, :]) * (top / largest)
    if options.hadamard:
        out = rotate(out, rotation_size(value.shape[-1], options.hadamard))
    return out[..., : value.shape[-1]]


def _round_to(x: Tensor, operand: str) -> Tensor:
    """Round non-negative numbers to an operand type, staying in the type of x."""
    if operand == "int8":
        return x.round()
    storage = torch.float8_e4m3fn if operand == "fp8" else torch.float16
    return x.clamp_max(LARGEST[operand]).to(storage).to(x.dtype)


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """Return [B, H, L, D] from [B, L, Hk, D], key heads repeated."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)
