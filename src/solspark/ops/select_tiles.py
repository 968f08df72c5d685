"""Tile means, and the tiles that a budget of each row keeps, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.reference import select_tiles as reference
from solspark.types import AttentionCall

__all__ = ["select_tiles", "tile_means"]


def tile_means(x: Tensor, *, tile: int, impl: str | None = None) -> Tensor:
    """Return the mean of each tile of tokens, the ragged last one over its real tokens only.

    Args:
        x: [B, L, H, D], any strides; no padded copy is made.
        tile: tokens in a tile, a multiple of 32.
        impl: "triton" or "eager"; None takes the best that can serve.

    Returns:
        float32 (float64 for float64) [B, H, ceil(L / tile), D].

    Raises:
        ValueError, TypeError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: sums in float32, divided once.

    Source: router specification 2.3.
    """
    _checks.check_tensor("x", x, 4, "[B, L, H, D]")
    _checks.check_dtype("x", x)
    _checks.check_int("tile", tile, 32)
    if tile % 32:
        raise ValueError(f"tile: expected a multiple of 32, got {tile}")
    if x.shape[1] < 1:
        raise ValueError(f"x: expected at least one token, got shape {tuple(x.shape)}")
    choice = _dispatch.pick("tile_means", _dispatch.describe(None, x), impl)
    means = choice.run(x, tile)
    choice.record()
    return means


def select_tiles(
    scores: Tensor,
    must: Tensor,
    candidates: Tensor,
    counts: Tensor,
    *,
    impl: str | None = None,
) -> Tensor:
    """Keep what must be kept and, of each row, its best candidates.

        keep_ij = must_ij or (candidate_ij and rank of s_ij among row i's candidates < count_i)

    Args:
        scores: float32 (float64) [B, H, NQ, NK]. NaN ranks with the lowest.
        must, candidates: bool [B or 1, H or 1, NQ, NK], disjoint.
        counts: int64 [B or 1, H or 1, NQ, 1], at most the row's candidates.
        impl: "triton" or "eager"; None takes the best that can serve.

    Returns:
        int8 [B, H, NQ, NK]. Of equal scores the lower tile is kept.

    Raises:
        ValueError, TypeError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: comparisons only; nothing is rounded, nothing is read on the host.

    Source: router specification 2.3.
    """
    _checks.check_tensor("scores", scores, 4, "[B, H, NQ, NK]")
    _checks.check_dtype("scores", scores, (torch.float32, torch.float64))
    batch, heads, rows, columns = scores.shape
    for name, item, width, dtype in (
        ("must", must, columns, torch.bool),
        ("candidates", candidates, columns, torch.bool),
        ("counts", counts, 1, torch.int64),
    ):
        _checks.check_tensor(name, item, 4, f"[B or 1, H or 1, NQ, {width}]")
        _checks.check_dtype(name, item, (dtype,))
        fits = item.shape[0] in (1, batch) and item.shape[1] in (1, heads)
        if not fits or tuple(item.shape[2:]) != (rows, width):
            raise ValueError(
                f"{name}: expected [1 or {batch}, 1 or {heads}, {rows}, {width}], "
                f"got {tuple(item.shape)}"
            )
        if item.device != scores.device:
            raise ValueError(f"{name}: expected the device {scores.device}, got {item.device}")
    call = AttentionCall(
        batch=batch,
        query_tokens=rows,
        key_tokens=columns,
        heads=heads,
        head_dim=0,
        dtype=scores.dtype,
        device_type=scores.device.type,
        capability=_dispatch.capability(scores.device),
    )
    choice = _dispatch.pick("select_tiles", call, impl)
    keep = choice.run(scores, must, candidates, counts)
    choice.record()
    return keep


def _eager_means(x: Tensor, tile: int) -> Tensor:
    return reference.tile_means(x, tile=tile)


def _launch_means(x: Tensor, tile: int) -> Tensor:
    """Launch the Triton kernel."""
    from solspark.kernels.select_tiles import launch_tile_means

    with torch.cuda.device_of(x):
        return launch_tile_means(x, tile=tile)


def _launch_selection(scores: Tensor, must: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """Launch the Triton kernel on flags as bytes."""
    from solspark.kernels.select_tiles import launch_select_tiles

    must, candidates = (x.contiguous().view(torch.uint8) for x in (must, candidates))
    with torch.cuda.device_of(scores):
        return launch_select_tiles(scores.contiguous(), must, candidates, counts.contiguous())


_means_operator = torch.library.custom_op("solspark::tile_means", _launch_means, mutates_args=())
_selection_operator = torch.library.custom_op(
    "solspark::select_tiles", _launch_selection, mutates_args=()
)


@_means_operator.register_fake
def _(x: Tensor, tile: int) -> Tensor:
    batch, tokens, heads, dim = x.shape
    return x.new_empty((batch, heads, -(-tokens // tile), dim), dtype=torch.float32)


@_selection_operator.register_fake
def _(scores: Tensor, must: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    return torch.empty(scores.shape, device=scores.device, dtype=torch.int8)


def _triton_means(x: Tensor, tile: int) -> Tensor:
    return _triton.entry(_means_operator, _launch_means)(_checks.last_dim_contiguous(x), tile)


def _triton_selection(scores: Tensor, must: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    return _triton.entry(_selection_operator, _launch_selection)(scores, must, candidates, counts)


def _means_reasons(call: AttentionCall) -> list[str]:
    """Decline what no kernel can take; the head dim may be any up to 512."""
    return _triton.obstacles(replace(call, requires_grad=False), head_dims=range(1, 513))


def _selection_reasons(call: AttentionCall) -> list[str]:
    found = _triton.obstacles(replace(call, head_dim=64))  # planning has no head dim
    if call.dtype != torch.float32:
        found.append(f"scores are {str(call.dtype).removeprefix('torch.')}, not float32")
    if call.key_tokens > 2**14:
        found.append(f"{call.key_tokens} tiles a row, more than 16,384")
    return found


_dispatch.register("tile_means", "triton", _means_reasons, _triton_means)
_dispatch.register("tile_means", "eager", _dispatch.never_declines, _eager_means)
_dispatch.register("select_tiles", "triton", _selection_reasons, _triton_selection)
_dispatch.register("select_tiles", "eager", _dispatch.never_declines, reference.select_tiles)
