"""Attention on quantised operands under a token mask, a block mask, or both; differentiable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solspark import _checks
from solspark.errors import UnsupportedError
from solspark.ops import _dispatch, _quantized_eager, _quantized_triton, _triton
from solspark.ops.quantize import GRANULARITIES, check_hadamard
from solspark.reference.quantized_attention import OPERANDS, Options
from solspark.types import AttentionCall

__all__ = ["quantized_attention"]


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
    run = _forward_op
    if not _dispatch.needs_grad(query, key, value):
        # The operator carries the backward; without one it only costs host time.
        run = _triton.entry(_forward_op, _forward)
    out, lse = run(query, key, value, attn_mask, block_mask, *options, impl or "")
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


def _forward(
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
    with torch.cuda.device_of(query):
        out, lse = choice.run(query, key, value, attn_mask, block_mask, options)
    kept = total = None
    if block_mask is not None:
        kept, total = (block_mask != 0).sum(), block_mask.numel()
    choice.record(kept, total)
    return out, lse


_forward_op = torch.library.custom_op("solspark::quantized_attention", _forward, mutates_args=())


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
    with_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(
        block_m, block_n, is_causal, scale, matmul, pv, smooth_k, hadamard, granularity
    )
    call = _describe(query, key, options)
    choice = _dispatch.pick("quantized_attention_backward", call, impl or None)
    with torch.cuda.device_of(query):
        gradients = choice.run(
            query, key, value, out, lse, grad_out, attn_mask, block_mask, options, with_keys
        )
    choice.record()
    return gradients


@_backward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    keys = [x.new_empty(x.shape if rest[-1] else 0) for x in (key, value)]
    return query.new_empty(query.shape), keys[0], keys[1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, block_mask, *rest = inputs
    ctx.save_for_backward(query, key, value, *output, attn_mask, block_mask)
    ctx.rest = rest
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, attn_mask, block_mask = ctx.saved_tensors
    with_keys = any(ctx.needs_input_grad[1:3])
    grad_query, *grad_keys = _backward_op(
        query, key, value, out, lse, grad_out, attn_mask, block_mask, *ctx.rest, with_keys
    )
    if not with_keys:
        grad_keys = [None, None]
    return (grad_query, *grad_keys, None, None, *[None] * len(ctx.rest))


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


def _triton_reasons(call: AttentionCall) -> list[str]:
    """Decline what no kernel can take; the head dim may be any multiple of 8 up to 256."""
    widths = tuple(range(8, 257, 8))
    return _triton.obstacles(replace(call, requires_grad=False), head_dims=widths)


_dispatch.register("quantized_attention", "triton", _triton_reasons, _quantized_triton.attend)
_dispatch.register(
    "quantized_attention_backward", "triton", _triton_reasons, _quantized_triton.attend_backward
)
_dispatch.register(
    "quantized_attention", "eager", _dispatch.never_declines, _quantized_eager.attend
)
_dispatch.register(
    "quantized_attention_backward",
    "eager",
    _dispatch.never_declines,
    _quantized_eager.attend_backward,
)
