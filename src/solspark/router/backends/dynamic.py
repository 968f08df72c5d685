"""Sliced attention: the terminal that trades time for memory where torch has no memory-efficient
kernel.

The size of a call is heads · Lq · Lk · element size a sample. Above a trigger batch, then heads,
then query rows are split into equal slices until one is small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from solspark.router.backend import Platform

GIB = 2**30


@lru_cache(maxsize=1024)
def slice_sizes(
    batch: int,
    heads: int,
    query_tokens: int,
    key_tokens: int,
    element_bytes: int,
    slice_gib: float,
    trigger_gib: float,
) -> tuple[int, int, int] | None:
    """Return how much of (batch, heads, query rows) one slice takes, or None when the call needs no
    slicing.

    Each size divides its extent; the largest that brings a slice to `slice_gib` is taken, and the
    next dimension is split only when 1 is still too much.
    """
    row = key_tokens * element_bytes / GIB
    sample = heads * query_tokens * row
    if batch * sample < trigger_gib:
        return None
    batch_size = _largest_divisor(batch, sample, slice_gib)
    if batch_size * sample <= slice_gib:
        return batch_size, heads, query_tokens
    head = query_tokens * row
    head_size = _largest_divisor(heads, head, slice_gib)
    if head_size * head <= slice_gib:
        return 1, head_size, query_tokens
    return 1, 1, _largest_divisor(query_tokens, row, slice_gib)


def _largest_divisor(extent: int, unit: float, limit: float) -> int:
    """Return the largest divisor d of extent with d · unit <= limit, or 1."""
    best = 1
    for small in range(1, math.isqrt(extent) + 1):
        if extent % small == 0:
            for divisor in (small, extent // small):
                if divisor * unit <= limit:
                    best = max(best, divisor)
    return best


def prepare_dynamic(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return the sliced attention over `original`."""
    slice_gib = float(settings["dynamic_slice_gib"])
    trigger_gib = float(settings["dynamic_trigger_gib"])

    def dynamic_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **extra: Any,
    ) -> Tensor:
        flat = query.ndim == 3
        if flat:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        if enable_gqa and query.shape[-3] != key.shape[-3]:
            repeats = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(repeats, -3)
            value = value.repeat_interleave(repeats, -3)
        sizes = None
        if query.ndim == 4:
            batch, heads, tokens, _ = query.shape
            sizes = slice_sizes(
                batch,
                heads,
                tokens,
                key.shape[-2],
                query.element_size(),
                slice_gib,
                trigger_gib,
            )
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, **extra}
        if sizes is None:
            out = original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)
        else:
            out = _sliced(original, query, key, value, attn_mask, is_causal, sizes, options)
        return out.squeeze(0) if flat else out

    return dynamic_attention


def _sliced(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    sizes: tuple[int, int, int],
    options: Mapping[str, Any],
) -> Tensor:
    """Run one call in slices of `sizes`."""
    batch, heads, tokens, _ = query.shape
    key_tokens = key.shape[-2]
    out = query.new_empty(batch, heads, tokens, value.shape[-1])
    mask = attn_mask.expand(batch, heads, tokens, key_tokens) if attn_mask is not None else None
    for b in range(0, batch, sizes[0]):
        for h in range(0, heads, sizes[1]):
            for row in range(0, tokens, sizes[2]):
                part = (slice(b, b + sizes[0]), slice(h, h + sizes[1]))
                rows = slice(row, row + sizes[2])
                shown = mask[(*part, rows)] if mask is not None else None
                causal = is_causal
                if is_causal and sizes[2] < tokens:
                    # `is_causal` counts rows from the slice's own top, so a slice below the first
                    # needs its mask spelled out.
                    shown = _causal_rows(row, row + sizes[2], key_tokens, query.device)
                    causal = False
                out[(*part, rows)] = original(
                    query[(*part, rows)],
                    key[part],
                    value[part],
                    attn_mask=shown,
                    is_causal=causal,
                    **options,
                )
    return out


def _causal_rows(start: int, stop: int, key_tokens: int, device: torch.device) -> Tensor:
    """Return bool [stop - start, Lk]: row r sees keys 0..r, from the top left as in torch."""
    rows = torch.arange(start, stop, device=device)
    return torch.arange(key_tokens, device=device)[None, :] <= rows[:, None]
