"""Attention on quantised operands under a token mask, a block mask, or both; differentiable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solspark import _checks
from solspark.errors import UnsupportedError
from solspark.ops import _dispatch, _triton
from solspark.ops.quantize import GRANULARITIES, check_hadamard, quantize
from solspark.reference.quantize import FLOOR, LARGEST, per_token, rotate, rotation_size
from solspark.reference.quantized_attention import OPERANDS, Options, key_mean
from solspark.types import BLOCK, AttentionCall

__all__ = ["quantized_attention"]

LOGIT_BYTES = 32 * 2**20
"""One slab of logits of the eager implementation; a call works on a few at a time."""


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
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with low-precision products.

        z_tu = scale * sq_t * sk_u * (q8_t . k8_u) + bias_tu     (q8, k8, sq, sk from `quantize`)
        out_t = sum_u e^(z_tu - lse_t) v_u,  lse_t = log sum_u e^z_tu, over the u that t may see

    K may lose its mean over tokens first (`smooth_k`), which a softmax does not notice. With a
    quantised P V each 64-key tile of a row of P is quantised on its own. Gradients take the
    quantisation as the identity.

    Args:
        query: [B, Lq, H, D], float16, bfloat16, float32 (or float64, quantised from float32).
        key: [B, Lk, Hk, D]; Hk divides H, query head h reads key head h // (H / Hk).
        value: [B, Lk, Hk, Dv].
        attn_mask: bool or int8 (true may be seen) or float (added), broadcastable to
            [B, H, Lq, Lk]; gets no gradient.
        block_mask: bool or int8 [B or 1, H or 1, ceil(Lq / block_m), ceil(Lk / block_n)] (leading
            dimensions may be missing); a pair is seen where both masks show it.
        block_m, block_n: rows and keys of a block of `block_mask`, powers of two from 16.
        is_causal: row t sees keys 0..t, counted from the top left.
        scale: None means D ** -0.5.
        matmul: type of Q and K: "int8", "fp8", "fp16" or "none" (that of the inputs).
        pv: type of P and V, the same names.
        smooth_k: subtract K's mean over tokens before it is quantised.
        hadamard: channels that one rotation of Q and K (and of a quantised V) spans, a power of
            two from 4 to 1,024; 0 does not rotate.
        granularity: scales of K and V: one a "row", or one for a "tile" of 64 tokens, which costs
            kernels less; Q has one a row, which is free.
        return_lse: also return lse.
        impl: "triton" or "eager"; None takes the best that can serve.

    Returns:
        out [B, Lq, H, Dv] in the query's type, and if asked lse float32 (float64) [B, Lq, H],
        natural log. A row that sees no key is zero, with lse -inf.

    Raises:
        ValueError, TypeError: an argument is not as described.
        UnsupportedError: no implementation, or not the one asked for, can serve.

    Numerics: quantisation and softmax in FP32, INT8 products exact in INT32; P is rounded to V's
    type by kernels where `pv` is "none"; the denominator sums the unrounded ones. One rounding of
    the output. LSE stays FP32 for the backward.

    Source: router specification section 3.
    """
    options = _check(
        query,
        key,
        value,
        block_m,
        block_n,
        is_causal,
        scale,
        matmul,
        pv,
        smooth_k,
        hadamard,
        granularity,
    )
    attn_mask = _check_attn_mask(attn_mask, query, key)
    block_mask = _check_block_mask(block_mask, query, key, options)
    _checks.check_bool("return_lse", return_lse)
    if impl is not None:
        _checks.check_choice("impl", impl, _dispatch.PREFERENCE)
    query, key, value = (_checks.last_dim_contiguous(item) for item in (query, key, value))
    out, lse = _forward_op(query, key, value, attn_mask, block_mask, *options, impl or "")
    return (out, lse) if return_lse else out


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_m: int,
    block_n: int,
    is_causal: bool,
    scale: float | None,
    matmul: str,
    pv: str,
    smooth_k: bool,
    hadamard: int,
    granularity: str,
) -> Options:
    """Return the checked options, or raise."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _checks.check_tensor(name, tensor, 4, "[B, L, H, D]")
    batch, query_tokens, heads, head_dim = query.shape
    key_heads = key.shape[2]
    if key.shape[0] != batch or key.shape[3] != head_dim or not key_heads or heads % key_heads:
        raise ValueError(
            f"key: expected [{batch}, Lk, Hk dividing {heads}, {head_dim}], got {tuple(key.shape)}"
        )
    if tuple(value.shape[:3]) != tuple(key.shape[:3]):
        raise ValueError(
            f"value: expected {tuple(key.shape[:3])} + (Dv,), got {tuple(value.shape)}"
        )
    if query_tokens < 1 or key.shape[1] < 1:
        raise ValueError(
            f"query and key: expected at least one token, got {query_tokens} and {key.shape[1]}"
        )
    _checks.check_dtype("query", query)
    _checks.check_same("key", key, "query", query, shape=False)
    _checks.check_same("value", value, "query", query, shape=False)
    _checks.check_head_dim("query", query)
    _checks.check_head_dim("value", value)
    for name, size in (("block_m", block_m), ("block_n", block_n)):
        _checks.check_int(name, size, 16)
        if size & (size - 1):
            raise ValueError(f"{name}: expected a power of two, got {size}")
    _checks.check_bool("is_causal", is_causal)
    _checks.check_choice("matmul", matmul, OPERANDS)
    _checks.check_choice("pv", pv, OPERANDS)
    _checks.check_bool("smooth_k", smooth_k)
    check_hadamard(hadamard)
    _checks.check_choice("granularity", granularity, GRANULARITIES)
    return Options(
        block_m,
        block_n,
        is_causal,
        _checks.resolve_scale(scale, head_dim),
        matmul,
        pv,
        smooth_k,
        hadamard,
        granularity,
    )


def _check_attn_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask with four dimensions and keys spelled out, or raise."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask: expected a tensor, got {type(attn_mask).__name__}")
    _checks.check_dtype("attn_mask", attn_mask, (torch.bool, torch.int8, *_checks.FLOAT_TYPES))
    if _dispatch.needs_grad(attn_mask):
        raise UnsupportedError("quantized_attention", ["attn_mask cannot get a gradient"])
    if attn_mask.device != query.device:
        raise ValueError(f"attn_mask: expected the device {query.device}, got {attn_mask.device}")
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    if mask.ndim != 4 or any(
        have not in (1, want) for have, want in zip(mask.shape, full, strict=True)
    ):
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {full}, got {tuple(attn_mask.shape)}"
        )
    return mask.expand(*mask.shape[:3], full[3])


def _check_block_mask(
    block_mask: Tensor | None, query: Tensor, key: Tensor, options: Options
) -> Tensor | None:
    """Return the block mask with four dimensions, or raise."""
    if block_mask is None:
        return None
    if not isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask: expected a tensor, got {type(block_mask).__name__}")
    _checks.check_dtype("block_mask", block_mask, (torch.bool, torch.int8))
    if block_mask.device != query.device:
        raise ValueError(f"block_mask: expected the device {query.device}, got {block_mask.device}")
    grid = (-(-query.shape[1] // options.block_m), -(-key.shape[1] // options.block_n))
    shape = tuple(block_mask.shape)
    full = (1,) * (4 - len(shape)) + shape
    lead_fits = len(full) == 4 and full[0] in (1, query.shape[0]) and full[1] in (1, query.shape[2])
    if not lead_fits or full[2:] != grid:
        raise ValueError(
            f"block_mask: expected [1 or {query.shape[0]}, 1 or {query.shape[2]}, {grid[0]}, "
            f"{grid[1]}] for blocks of {options.block_m} x {options.block_n}, got {shape}"
        )
    return block_mask.reshape(full)


@torch.library.custom_op("solspark::quantized_attention", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    block_m: int,
    block_n: int,
    is_causal: bool,
    scale: float,
    matmul: str,
    pv: str,
    smooth_k: bool,
    hadamard: int,
    granularity: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    options = Options(
        block_m, block_n, is_causal, scale, matmul, pv, smooth_k, hadamard, granularity
    )
    call = _describe(query, key, options)
    choice = _dispatch.pick("quantized_attention", call, impl or None)
    out, lse = choice.run(query, key, value, attn_mask, block_mask, options)
    kept = total = None
    if block_mask is not None:
        kept, total = (block_mask != 0).sum(), block_mask.numel()
    choice.record(kept, total)
    return out, lse


@_forward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:3], value.shape[3])
    lse_type = _checks.accumulation_dtype(query.dtype)
    return query.new_empty(shape), query.new_empty(query.shape[:3], dtype=lse_type)


@torch.library.custom_op("solspark::quantized_attention_backward", mutates_args=())
def _backward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    block_m: int,
    block_n: int,
    is_causal: bool,
    scale: float,
    matmul: str,
    pv: str,
    smooth_k: bool,
    hadamard: int,
    granularity: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(
        block_m, block_n, is_causal, scale, matmul, pv, smooth_k, hadamard, granularity
    )
    call = _describe(query, key, options)
    choice = _dispatch.pick("quantized_attention_backward", call, impl or None)
    gradients = choice.run(query, key, value, out, lse, grad_out, attn_mask, block_mask, options)
    choice.record()
    return gradients


@_backward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, block_mask, *rest = inputs
    ctx.save_for_backward(query, key, value, *output, attn_mask, block_mask)
    ctx.rest = rest
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, attn_mask, block_mask = ctx.saved_tensors
    gradients = _backward_op(
        query, key, value, out, lse, grad_out, attn_mask, block_mask, *ctx.rest
    )
    return (*gradients, None, None, *[None] * len(ctx.rest))


_forward_op.register_autograd(_gradients, setup_context=_save)


def _describe(query: Tensor, key: Tensor, options: Options) -> AttentionCall:
    """Return the call for dispatch, refusing an FP8 product where the chip has none."""
    call = _dispatch.describe(query, key)
    if "fp8" in (options.matmul, options.pv) and query.device.type == "cuda":
        missing = fp8_obstacle(query.device)
        if missing:
            raise UnsupportedError("quantized_attention with fp8", [missing])
    return call


def fp8_obstacle(device: torch.device) -> str | None:
    """Return why a CUDA or ROCm device has no e4m3 product, or None."""
    if torch.version.hip:
        chip = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        # gfx94x multiplies another 8-bit format (e4m3fnuz).
        has = chip.startswith(("gfx95", "gfx12"))
        return None if has else f"needs gfx95x or gfx12xx, this is {chip}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"needs SM89, this is SM{major}{minor}"


# Eager


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attend one (sample, head) and one block row at a time, to the keys that the row keeps."""
    dtype = _checks.accumulation_dtype(query.dtype)
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = query.new_full(query.shape[:3], -math.inf, dtype=dtype)
    operands = quantize_operands(query, key, value, options, "eager")
    for b in range(query.shape[0]):
        for h in range(heads):
            head = _head(operands, b, h, h // group, dtype)
            for rows, keys in _row_chunks(query, key, block_mask, b, h, options):
                if keys is not None and not keys.numel():
                    continue
                logits = _logits(head, rows, keys, _part(attn_mask, b, h, rows, keys), options)
                top = logits.amax(-1, keepdim=True)
                weights = torch.exp(logits - top.masked_fill(top == -math.inf, 0.0))
                total = weights.sum(-1, keepdim=True)
                mixed = _mix(weights, head, keys, value.shape[3], options)
                alive = total > 0
                safe = torch.where(alive, total, torch.ones_like(total))
                out[b, rows, h] = torch.where(alive, mixed / safe, 0.0).to(out.dtype)
                lse[b, rows, h] = (top + total.log()).squeeze(-1)
    return out, lse


def _eager_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute P row chunk by row chunk and accumulate the three gradients in FP32 (FP64)."""
    dtype = _checks.accumulation_dtype(query.dtype)
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    grad_query, grad_key, grad_value = (
        torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value)
    )
    operands = quantize_operands(query, key, None, options, "eager")
    for b in range(query.shape[0]):
        for h in range(heads):
            kv = h // group
            head = _head(operands, b, h, kv, dtype)
            k, v = key[b, :, kv].to(dtype), value[b, :, kv].to(dtype)
            for rows, keys in _row_chunks(query, key, block_mask, b, h, options):
                if keys is not None and not keys.numel():
                    continue
                at = slice(None) if keys is None else keys
                logits = _logits(head, rows, keys, _part(attn_mask, b, h, rows, keys), options)
                row_lse = lse[b, rows, h].to(dtype)[:, None]
                weights = torch.exp(logits - row_lse.masked_fill(row_lse == -math.inf, 0.0))
                g = grad_out[b, rows, h].to(dtype)
                delta = (g * out[b, rows, h].to(dtype)).sum(-1, keepdim=True)
                slope = weights * (g @ v[at].T - delta) * options.scale
                grad_query[b, rows, h] = slope @ k[at]
                # Lists hold each key once, so plain indexed addition is exact and ordered.
                grad_key[b, at, kv] += slope.T @ query[b, rows, h].to(dtype)
                grad_value[b, at, kv] += weights.T @ g
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


_Pair = tuple[Tensor, Tensor | None]


def quantize_operands(
    query: Tensor, key: Tensor, value: Tensor | None, options: Options, impl: str | None
) -> tuple[_Pair, _Pair, _Pair | None]:
    """Quantise what the options ask for with one implementation; V only for a quantised P V."""
    granularity, group = options.granularity, options.hadamard
    q: _Pair = (query, None)
    k: _Pair = (key, None)
    v: _Pair | None = None if value is None else (value, None)
    if options.matmul != "none":
        mean = _mean(key, impl) if options.smooth_k else None
        kind = options.matmul
        q = quantize(query, dtype=kind, granularity="row", hadamard=group, impl=impl)
        k = quantize(key, dtype=kind, granularity=granularity, mean=mean, hadamard=group, impl=impl)
    if value is not None and options.pv != "none":
        v = quantize(value, dtype=options.pv, granularity=granularity, hadamard=group, impl=impl)
    return q, k, v


def _mean(key: Tensor, impl: str | None) -> Tensor:
    """Return K's mean over tokens, float32 [B, Hk, D], in an order that strides do not change."""
    if impl != "triton":
        return key_mean(key)
    from solspark.kernels.quantize import launch_mean

    return launch_mean(key)


class _Head(NamedTuple):
    """The operands of one query head, in the accumulation type."""

    q: Tensor
    q_scale: Tensor | None
    k: Tensor
    k_scale: Tensor | None
    v: Tensor | None
    v_scale: Tensor | None


def _head(
    operands: tuple[_Pair, _Pair, _Pair | None], b: int, h: int, kv: int, dtype: torch.dtype
) -> _Head:
    """Return the operands of query head h, whose key head is kv."""
    q, k, v = operands
    mixed = _rows_of(v, b, kv, dtype) if v is not None else (None, None)
    return _Head(*_rows_of(q, b, h, dtype), *_rows_of(k, b, kv, dtype), *mixed)


def _rows_of(pair: _Pair, b: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return one head's values [L, D] and scales [L]."""
    values, scales = pair
    rows = values[b, :, h].to(dtype)
    if scales is None:
        return rows, None
    return rows, per_token(scales[b, h], values.shape[1]).to(dtype)


def _row_chunks(
    query: Tensor, key: Tensor, block_mask: Tensor | None, b: int, h: int, options: Options
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield (rows, keys) of one head: a slice of rows, and the keys they may see (None: all)."""
    tokens, key_tokens = query.shape[1], key.shape[1]
    if block_mask is None:
        step = max(1, LOGIT_BYTES // (8 * key_tokens))
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens)), None
        return
    mask = block_mask[b if block_mask.shape[0] > 1 else 0, h if block_mask.shape[1] > 1 else 0]
    offsets = torch.arange(options.block_n, device=key.device)
    for number, start in enumerate(range(0, tokens, options.block_m)):
        blocks = mask[number].nonzero()
        keys = (blocks * options.block_n + offsets).flatten()
        keys = keys[keys < key_tokens]
        yield slice(start, min(start + options.block_m, tokens)), keys


def _part(mask: Tensor | None, b: int, h: int, rows: slice, keys: Tensor | None) -> Tensor | None:
    """Return the mask of some rows and keys, [rows or 1, keys]."""
    if mask is None:
        return None
    part = mask[b if mask.shape[0] > 1 else 0, h if mask.shape[1] > 1 else 0]
    part = part[rows] if part.shape[0] > 1 else part
    return part if keys is None else part[:, keys]


def _logits(
    head: _Head, rows: slice, keys: Tensor | None, mask: Tensor | None, options: Options
) -> Tensor:
    """Return masked logits of some rows against some keys, natural log."""
    at = slice(None) if keys is None else keys
    logits = head.q[rows] @ head.k[at].T
    if head.q_scale is not None and head.k_scale is not None:
        logits = logits * head.q_scale[rows][:, None] * head.k_scale[at]
    logits = logits * options.scale
    if mask is not None:
        if mask.is_floating_point():
            logits = logits + mask.to(logits.dtype)
        else:
            logits = logits.masked_fill(mask == 0, -math.inf)
    if options.is_causal:
        row = torch.arange(rows.start, rows.stop, device=logits.device)[:, None]
        column = torch.arange(head.k.shape[0], device=logits.device)[at]
        logits = logits.masked_fill(column > row, -math.inf)
    return logits


def _mix(
    weights: Tensor, head: _Head, keys: Tensor | None, value_dim: int, options: Options
) -> Tensor:
    """Return weights times V, both quantised if so asked: each 64-key tile of a row on its own."""
    at = slice(None) if keys is None else keys
    assert head.v is not None
    if head.v_scale is None:
        return weights @ head.v[at]
    weights = weights * head.v_scale[at]
    values, largest = head.v[at], LARGEST[options.pv]
    # Lists keep whole blocks in order, so tiles of the gathered keys are tiles of the sequence.
    tile = min(BLOCK, options.block_n) if keys is not None else BLOCK
    out = weights.new_zeros(weights.shape[0], values.shape[1])
    for start in range(0, weights.shape[1], tile):
        part = weights[:, start : start + tile]
        top = part.amax(-1, keepdim=True).clamp_min(FLOOR)
        part = part * (largest / top)
        if options.pv == "int8":
            part = part.round()
        else:
            storage = torch.float8_e4m3fn if options.pv == "fp8" else torch.float16
            part = part.clamp_max(largest).to(storage).to(weights.dtype)
        out += (part @ values[start : start + tile]) * (top / largest)
    if options.hadamard:
        out = rotate(out, rotation_size(value_dim, options.hadamard))
    return out[:, :value_dim]


# Triton


def _run_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Quantise, build lists, attend."""
    from solspark.kernels import quantized_attention as kernels

    query, options = _with_positive_scale(query, options)
    operands = _kernel_operands(query, key, value, options)
    rotated = options.pv != "none" and options.hadamard > 0
    head_dim = query.shape[3] if options.matmul == "none" else operands.q.shape[3]
    out, lse = kernels.launch_quantized_attention(
        operands,
        head_dim=head_dim,
        value_dim=operands.v.shape[3] if rotated else value.shape[3],
        lists=_lists(block_mask, options),
        attn_mask=attn_mask,
        is_causal=options.is_causal,
        scale=options.scale,
        pv=options.pv,
        tile_scales=options.granularity == "tile",
        # A rotated output is turned back before it is rounded.
        out_dtype=torch.float32 if rotated else query.dtype,
        config=_config(value, block_mask, options),
    )
    if rotated:
        out = rotate(out, rotation_size(value.shape[3], options.hadamard))
        out = out[..., : value.shape[3]].to(query.dtype)
    return out, lse


def _run_triton_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise Q and K again (cheaper than keeping them) and run the two kernels."""
    from solspark.kernels.quantized_attention_backward import (
        launch_quantized_attention_backward,
    )

    negative = options.scale < 0
    query, options = _with_positive_scale(query, options)
    operands = _kernel_operands(query, key, value, options._replace(pv="none"))
    transposed = None
    if block_mask is not None:
        turned = options._replace(block_m=options.block_n, block_n=options.block_m)
        transposed = _lists(block_mask.transpose(2, 3), turned)
    config = _config(value, block_mask, options)
    grad_query, grad_key, grad_value = launch_quantized_attention_backward(
        query,
        key,
        value,
        operands,
        out.contiguous(),
        lse.contiguous(),
        _checks.last_dim_contiguous(grad_out),
        lists=_lists(block_mask, options),
        transposed=transposed,
        attn_mask=attn_mask,
        is_causal=options.is_causal,
        scale=options.scale,
        tile_scales=options.granularity == "tile",
        # Five products a tile instead of two: half the rows, or registers spill.
        config=config._replace(
            query_tile=min(config.query_tile, 64), stages=min(config.stages, 2), registers=0
        ),
    )
    return (-grad_query if negative else grad_query), grad_key, grad_value


def _with_positive_scale(query: Tensor, options: Options) -> tuple[Tensor, Options]:
    """Move a negative scale's sign into Q: kernels take the largest logit before scaling it."""
    if options.scale >= 0:
        return query, options
    return -query, options._replace(scale=-options.scale)


def _kernel_operands(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Any:
    """Return the kernels' operands."""
    from solspark.kernels.quantized_attention import Operands

    (q, q_scales), (k, k_scales), mixed = quantize_operands(query, key, value, options, "triton")
    assert mixed is not None
    return Operands(q, q_scales, k, k_scales, *mixed)


def _lists(block_mask: Tensor | None, options: Options) -> Any:
    """Return the kept key blocks of each query block as lists, or None."""
    if block_mask is None:
        return None
    from solspark.kernels.block_lists import launch_block_lists
    from solspark.kernels.quantized_attention import Lists

    counts, indices = launch_block_lists(block_mask.view(torch.int8))
    return Lists(counts, indices, options.block_m, options.block_n)


def _config(value: Tensor, block_mask: Tensor | None, options: Options) -> Any:
    """Choose tiles; refuse those that an 8-bit product of P and V cannot have."""
    from solspark.kernels.quantized_attention import choose_config

    config = choose_config(
        value.device if value.device.type == "cuda" else None,
        value.shape[3],
        value.dtype,
        options.pv != "none",
        None if block_mask is None else (options.block_m, options.block_n),
    )
    if options.pv in ("int8", "fp8") and config.key_tile < 32:
        raise UnsupportedError(
            f"quantized_attention with pv={options.pv!r}",
            [f"an 8-bit product needs 32 keys, blocks have {options.block_n}"],
        )
    return config


def _triton_reasons(call: AttentionCall) -> list[str]:
    """Decline what no kernel can take; the head dim may be any multiple of 8 up to 256."""
    widths = tuple(range(8, 257, 8))
    return _triton.obstacles(replace(call, requires_grad=False), head_dims=widths)


_dispatch.register("quantized_attention", "triton", _triton_reasons, _run_triton)
_dispatch.register("quantized_attention_backward", "triton", _triton_reasons, _run_triton_backward)
_dispatch.register("quantized_attention", "eager", _dispatch.never_declines, _eager)
_dispatch.register(
    "quantized_attention_backward", "eager", _dispatch.never_declines, _eager_backward
)
