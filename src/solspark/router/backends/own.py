"""solspark's own attention as backends: quantised, dense Triton, and BF16 block-sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from solspark.router.backend import BLOCK_MASK, MASKED_BLOCK, Platform
from solspark.router.backends.packages import capability_below, module_missing
from solspark.router.selector import Selection


def triton_obstacles(platform: Platform) -> list[str]:
    """Say why no Triton kernel can run: not installed, or no INT8 product before SM80."""
    return module_missing("triton", "triton") + capability_below(platform, (8, 0))


def prepare_quantized(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return the quantised attention, with the configured operand types."""
    from solspark.ops.quantized_attention import quantized_attention

    options = {
        "matmul": settings["quantized_matmul"],
        "pv": settings["quantized_pv"],
        "smooth_k": settings["quantized_smooth_k"],
        "hadamard": settings["quantized_hadamard"],
        "granularity": settings["quantized_granularity"],
    }

    def quantized(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        selection: Selection | None = None,
    ) -> Tensor:
        tiles: dict[str, Any] = {}
        if selection is not None:
            tiles = {
                "block_mask": selection.keep,
                "block_m": selection.query_tile,
                "block_n": selection.key_tile,
            }
        out = quantized_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            **tiles,
            **options,
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return quantized


def prepare_triton(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return dense Triton attention: the quantised kernel with nothing quantised."""
    from solspark.ops.quantized_attention import quantized_attention

    def triton_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError("attn_mask: the dense Triton attention takes none")
        out = quantized_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=is_causal,
            scale=scale,
            matmul="none",
            pv="none",
            smooth_k=False,
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return triton_attention


def prepare_block_sparse(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return the BF16 block-sparse attention on a selection's 64 x 64 grid, its tail if asked."""
    from solspark.methods.sol import mean_summaries
    from solspark.ops.block_sparse_attention import block_sparse_attention
    from solspark.ops.pool import pool

    def block_sparse(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        selection: Selection | None = None,
    ) -> Tensor:
        if selection is None:
            raise ValueError("selection: block_sparse serves selections only, got None")
        plan = selection.block_plan(query.shape[0], query.shape[1])
        keys, values = key.transpose(1, 2), value.transpose(1, 2)
        key_bias = _key_bias(attn_mask, key.shape[-2])
        summaries = None
        if selection.tail:
            summaries = mean_summaries(pool(None, keys, values, key_bias=key_bias))
            dropped = selection.dropped_blocks()
            if dropped is not None:
                # Padding stands for nothing; where no mask says so, only the layout knows.
                mass = summaries.log_mass.masked_fill(dropped, float("-inf"))
                summaries = replace(summaries, log_mass=mass)
        out = block_sparse_attention(
            query.transpose(1, 2),
            keys,
            values,
            plan,
            summaries=summaries,
            scale=scale,
            key_bias=key_bias,
            tail="query" if selection.tail else "none",
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return block_sparse


def _key_bias(attn_mask: Tensor | None, key_tokens: int) -> Tensor | None:
    """Return a mask without query rows as a key bias [1 or B, 1 or H, 1, Lk]."""
    if attn_mask is None:
        return None
    lead = (1,) * (4 - attn_mask.ndim)
    mask = attn_mask.reshape(lead + tuple(attn_mask.shape))
    return mask.expand(*mask.shape[:3], key_tokens)


OWN_CAPS = frozenset({BLOCK_MASK, MASKED_BLOCK})
