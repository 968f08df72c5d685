"""Tile means, and the tiles that a budget of each row keeps, for the router's sparse stage."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_means(x: Tensor, *, tile: int) -> Tensor:
    """Return the mean of each tile of tokens, the ragged last one over its real tokens only.

    Args:
        x: [B, L, H, D], any strides; no padded copy is made.
        tile: tokens in a tile.

    Returns:
        float32 (float64 for float64) [B, H, ceil(L / tile), D].

    Source: router specification 2.3.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    full = x.shape[1] // tile
    parts = []
    if full:
        tiles = x[:, : full * tile].unflatten(1, (full, tile))
        parts.append(tiles.mean(2, dtype=dtype))
    if x.shape[1] % tile:
        parts.append(x[:, full * tile :].mean(1, keepdim=True, dtype=dtype))
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).transpose(1, 2)


def select_tiles(scores: Tensor, must: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """Keep what must be kept and, of each row, its best candidates.

        keep_ij = must_ij or (candidate_ij and rank of s_ij among row i's candidates < count_i)

    Args:
        scores: float32 (float64) [B, H, NQ, NK]. NaN ranks with the lowest.
        must, candidates: bool [B or 1, H or 1, NQ, NK], disjoint.
        counts: int64 [B or 1, H or 1, NQ, 1], at most the row's candidates.

    Returns:
        int8 [B, H, NQ, NK]. Of equal scores the lower tile is kept.

    Numerics: comparisons only. Ranks instead of a top-k let each row have its own count without a
    read on the host.

    Source: router specification 2.3.
    """
    lowest = torch.finfo(scores.dtype).min
    ranked = scores.nan_to_num(lowest, posinf=float("inf"), neginf=lowest)
    ranked = ranked.masked_fill(~candidates, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    first = (torch.arange(scores.shape[-1], device=scores.device) < counts).expand_as(order)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, first) & candidates
    return (must | chosen).to(torch.int8)
