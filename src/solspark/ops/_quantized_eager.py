"""Quantised attention in PyTorch: one (sample, head) and one block row at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops.quantize import Operand, quantize_operands
from solspark.reference.quantize import FLOOR, LARGEST, per_token, rotate, rotation_size
from solspark.reference.quantized_attention import Options
from solspark.types import BLOCK

LOGIT_BYTES = 32 * 2**20
"""One slab of logits; a call works on a few at a time."""


def attend(
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
    """Recompute P row chunk by row chunk and accumulate the gradients in FP32 (FP64).

    Without keys those of K and V are empty.
    """
    dtype = _checks.accumulation_dtype(query.dtype)
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    grad_query, grad_key, grad_value = (
        torch.zeros(shape, dtype=dtype, device=query.device)
        for shape in (query.shape, *(x.shape if with_keys else 0 for x in (key, value)))
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
                if not with_keys:
                    continue
                # Lists hold each key once, so plain indexed addition is exact and ordered.
                grad_key[b, at, kv] += slope.T @ query[b, rows, h].to(dtype)
                grad_value[b, at, kv] += weights.T @ g
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


class _Head(NamedTuple):
    """The operands of one query head, in the accumulation type."""

    q: Tensor
    q_scale: Tensor | None
    k: Tensor
    k_scale: Tensor | None
    v: Tensor | None
    v_scale: Tensor | None


def _head(
    operands: tuple[Operand, Operand, Operand | None], b: int, h: int, kv: int, dtype: torch.dtype
) -> _Head:
    """Return the operands of query head h, whose key head is kv."""
    q, k, v = operands
    mixed = _rows_of(v, b, kv, dtype) if v is not None else (None, None)
    return _Head(*_rows_of(q, b, h, dtype), *_rows_of(k, b, kv, dtype), *mixed)


def _rows_of(pair: Operand, b: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
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
