"""Quantised attention by Triton kernels: operands, lists and tiles of a launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solspark import _checks
from solspark.errors import UnsupportedError
from solspark.ops.quantize import quantize_operands
from solspark.reference.quantize import rotate, rotation_size
from solspark.reference.quantized_attention import Options


def attend(
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
    operands = kernel_operands(query, key, value, options)
    rotated = options.pv != "none" and options.hadamard > 0
    head_dim = query.shape[3] if options.matmul == "none" else operands.q.shape[3]
    out, lse = kernels.launch_quantized_attention(
        operands,
        head_dim=head_dim,
        value_dim=operands.v.shape[3] if rotated else value.shape[3],
        lists=block_lists(block_mask, options),
        attn_mask=attn_mask,
        is_causal=options.is_causal,
        scale=options.scale,
        pv=options.pv,
        tile_scales=options.granularity == "tile",
        # A rotated output is turned back before it is rounded.
        out_dtype=torch.float32 if rotated else query.dtype,
        config=tiles_for(value, attn_mask, block_mask, options),
    )
    if rotated:
        out = rotate(out, rotation_size(value.shape[3], options.hadamard))
        out = out[..., : value.shape[3]].to(query.dtype)
    return out, lse


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    options: Options,
    with_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise Q and K again (cheaper than keeping them) and run the kernels, the second if asked.

    Without keys the gradients of K and V are empty.
    """
    from solspark.kernels.quantized_attention_backward import (
        launch_quantized_attention_backward,
    )

    negative = options.scale < 0
    query, options = _with_positive_scale(query, options)
    operands = kernel_operands(query, key, value, options._replace(pv="none"))
    transposed = None
    if block_mask is not None and with_keys:
        turned = options._replace(block_m=options.block_n, block_n=options.block_m)
        transposed = block_lists(block_mask.transpose(2, 3), turned)
    config = tiles_for(value, attn_mask, block_mask, options)
    grad_query, grad_key, grad_value = launch_quantized_attention_backward(
        query,
        key,
        value,
        operands,
        out.contiguous(),
        lse.contiguous(),
        _checks.last_dim_contiguous(grad_out),
        lists=block_lists(block_mask, options),
        transposed=transposed,
        attn_mask=attn_mask,
        is_causal=options.is_causal,
        scale=options.scale,
        tile_scales=options.granularity == "tile",
        with_keys=with_keys,
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


def kernel_operands(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Any:
    """Return the kernels' operands."""
    from solspark.kernels.quantized_tile import Operands

    (q, q_scales), (k, k_scales), mixed = quantize_operands(query, key, value, options, "triton")
    assert mixed is not None
    return Operands(q, q_scales, k, k_scales, *mixed)


def block_lists(block_mask: Tensor | None, options: Options) -> Any:
    """Return the kept key blocks of each query block as lists, or None."""
    if block_mask is None:
        return None
    from solspark.kernels.block_lists import launch_block_lists
    from solspark.kernels.quantized_tile import Lists

    counts, indices = launch_block_lists(block_mask.view(torch.int8))
    return Lists(counts, indices, options.block_m, options.block_n)


def tiles_for(
    value: Tensor, attn_mask: Tensor | None, block_mask: Tensor | None, options: Options
) -> Any:
    """Choose tiles; refuse those that an 8-bit product of P and V cannot have."""
    from solspark.kernels.quantized_attention import choose_config

    config = choose_config(
        value.device if value.device.type == "cuda" else None,
        value.shape[3],
        value.dtype,
        options.pv != "none",
        None if block_mask is None else (options.block_m, options.block_n),
        attn_mask is not None and attn_mask.is_floating_point() and attn_mask.shape[2] > 1,
    )
    if options.pv in ("int8", "fp8") and config.key_tile < 32:
        raise UnsupportedError(
            f"quantized_attention with pv={options.pv!r}",
            [f"an 8-bit product needs 32 keys, blocks have {options.block_n}"],
        )
    return config
