"""torch's flex attention, always compiled.

Eager flex materialises every score and looks at `mask_mod` only, so that a selection given as lists
would silently be dense. One compiled entry therefore serves every path: plain, causal, token masks
and selections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from solspark.errors import UnsupportedError
from solspark.router.backend import Platform
from solspark.router.selector import Selection

_lock = threading.Lock()
_compiled: Callable[..., Any] | None = None
_compiled_mask: Callable[..., Any] | None = None


def compiled_flex() -> Callable[..., Any]:
    """Return the one compiled flex_attention of this process, made at the first call."""
    global _compiled
    with _lock:
        if _compiled is None:
            from torch._dynamo import config as dynamo_config
            from torch.nn.attention.flex_attention import flex_attention

            # One graph a shape (dynamic shapes cost more than they save here); a model with several
            # resolutions would otherwise run into the limit and fall back to eager.
            dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 64)
            _compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return _compiled


def _mask_builder() -> Callable[..., Any]:
    """Return create_block_mask, compiled: the eager one materialises Lq x Lk."""
    global _compiled_mask
    with _lock:
        if _compiled_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            _compiled_mask = torch.compile(create_block_mask, dynamic=False)
        return _compiled_mask


def ordered_lists(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts int32 [.., NQ] and indices int32 [.., NQ, NK], kept tiles first, ascending."""
    flags = keep.to(torch.int8)
    counts = flags.sum(-1, dtype=torch.int32)
    indices = flags.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.contiguous(), indices.contiguous()


def selection_mask(selection: Selection, device: torch.device, *, backward: bool = False) -> Any:
    """Return a BlockMask that computes exactly the kept tiles, without a mask function.

    Every kept tile goes to the full lists; the partial lists stay empty. `backward` adds the lists
    by key tile that a gradient needs.
    """
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = ordered_lists(selection.keep.to(device))
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        torch.zeros_like(indices),
        counts,
        indices,
        BLOCK_SIZE=(selection.query_tile, selection.key_tile),
        seq_lengths=(selection.query_tokens, selection.key_tokens),
        compute_q_blocks=backward,
    )


def prepare_flex(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return flex attention behind the signature of scaled_dot_product_attention."""

    def flex(
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
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if selection is not None:
            if attn_mask is not None or is_causal:
                raise ValueError("selection: flex cannot combine it with attn_mask or is_causal")
            return _run_selection(query, key, value, selection, options)
        if attn_mask is not None or is_causal:
            _attach_masks(query, key, attn_mask, is_causal, options)
        return compiled_flex()(query, key, value, **options)

    return flex


def _run_selection(
    query: Tensor, key: Tensor, value: Tensor, selection: Selection, options: dict[str, Any]
) -> Tensor:
    """Run the compiled entry on the kept tiles, with kernel tiles that nest in them."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    options["block_mask"] = selection_mask(selection, query.device, backward=backward)
    if query.device.type != "cpu":
        # Left alone, inductor picks tiles by head_dim (128 x 128 on a Hopper) and refuses lists
        # they do not divide.
        options["kernel_options"] = {
            "BLOCK_M": min(128, selection.query_tile),
            "BLOCK_N": min(64, selection.key_tile),
        }
    try:
        return compiled_flex()(query, key, value, **options)
    except (TorchDynamoException, InductorError) as error:
        if "BLOCK_M" in str(error) or "block size" in str(error).lower():
            raise UnsupportedError(
                "flex attention on a selection",
                [
                    f"this torch ({torch.__version__}) has no kernel whose tile divides "
                    f"{selection.query_tile} x {selection.key_tile}: {error}"
                ],
            ) from error
        raise


def _attach_masks(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    options: dict[str, Any],
) -> None:
    """Turn a token mask and causality into a block mask or a score function."""
    batch, heads, query_tokens = query.shape[0], query.shape[1], query.shape[2]
    key_tokens = key.shape[2]
    if attn_mask is not None:
        lead = (1,) * (4 - attn_mask.ndim)
        attn_mask = attn_mask.reshape(lead + tuple(attn_mask.shape))
    if attn_mask is not None and attn_mask.is_floating_point():
        bias = attn_mask.expand(batch, heads, query_tokens, key_tokens)

        def add_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            score = score + bias[b, h, q, k]
            return torch.where(q >= k, score, float("-inf")) if is_causal else score

        options["score_mod"] = add_bias
        return
    # A mask that does not differ between heads or samples needs only one list for all of them.
    mask_batch = attn_mask.shape[0] if attn_mask is not None and attn_mask.shape[0] > 1 else None
    mask_heads = attn_mask.shape[1] if attn_mask is not None and attn_mask.shape[1] > 1 else None
    shown = None
    if attn_mask is not None:
        shown = attn_mask.bool().expand(mask_batch or 1, mask_heads or 1, query_tokens, key_tokens)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k if is_causal else k >= 0
        if shown is None:
            return seen
        row = b if mask_batch is not None else b * 0
        head = h if mask_heads is not None else h * 0
        return seen & shown[row, head, q, k]

    options["block_mask"] = _mask_builder()(
        visible, mask_batch, mask_heads, query_tokens, key_tokens, device=query.device
    )
