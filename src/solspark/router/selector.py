"""Choose which key tiles each query tile keeps: by content (adaptive), or as a static band
(radial).

keep = must ∪ top(score, ceil(budget · candidates)), minus drops
    must        tiles on the diagonal (overlapping token ranges), and those that the layout pins
    candidates  neither must nor dropped nor wholly hidden by a token mask
    score       mean query of the tile · mean key of the tile, FP32; only the order matters, so it
        has no scale

The budget is a share of the candidates, so the real density is pins + diagonal + budget · rest.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from solspark.ops.select_blocks import plan_from_mask
from solspark.ops.select_tiles import select_tiles, tile_means
from solspark.router.layout import TokenLayout, tile_pins
from solspark.types import BLOCK, BlockPlan, block_count

_BUDGET_UNITS = 1_000_000


@dataclass(frozen=True, eq=False)
class Selection:
    """Say which key tiles each query tile keeps.

    Args:
        keep: int8 [B or 1, H or 1, NQ, NK], 1 = kept.
        query_tile: tokens in a query tile.
        key_tile: tokens in a key tile.
        query_tokens, key_tokens: real lengths; the last tiles may be ragged.
        tail: tiles left out are to be stood in for by their means, those of padding aside.
        dropped: bool [NK], key tiles that are padding throughout; None without any layout.
    """

    keep: Tensor = field(repr=False)
    query_tile: int
    key_tile: int
    query_tokens: int
    key_tokens: int
    tail: bool = False
    dropped: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        grid = (
            block_count(self.query_tokens, self.query_tile),
            block_count(self.key_tokens, self.key_tile),
        )
        if self.keep.ndim != 4 or tuple(self.keep.shape[2:]) != grid:
            raise ValueError(
                f"selection.keep: expected [B, H, {grid[0]}, {grid[1]}], "
                f"got {tuple(self.keep.shape)}"
            )
        if self.keep.dtype != torch.int8:
            raise ValueError(f"selection.keep: expected int8, got {self.keep.dtype}")

    def density(self) -> float:
        """Return the share of tiles kept. Waits for the device: reports and tests only."""
        return float(self.keep.float().mean())

    def token_mask(self) -> Tensor:
        """Return bool [B or 1, H or 1, Lq, Lk]. Quadratic in the tokens: tests only."""
        mask = self.keep.bool().repeat_interleave(self.query_tile, 2)
        mask = mask.repeat_interleave(self.key_tile, 3)
        return mask[:, :, : self.query_tokens, : self.key_tokens]

    def block_mask(self) -> Tensor:
        """Return bool [B or 1, H or 1, NQ, NK] on the 64 x 64 grid of `BlockPlan`."""
        mask = self.keep.bool()
        mask = mask.repeat_interleave(self.query_tile // BLOCK, 2)[
            :, :, : block_count(self.query_tokens)
        ]
        return mask.repeat_interleave(self.key_tile // BLOCK, 3)[
            ..., : block_count(self.key_tokens)
        ]

    def dropped_blocks(self) -> Tensor | None:
        """Return `dropped` on the grid of 64 keys."""
        if self.dropped is None:
            return None
        blocks = self.dropped.repeat_interleave(self.key_tile // BLOCK)
        return blocks[: block_count(self.key_tokens)]

    def block_plan(self, batch: int, heads: int) -> BlockPlan:
        """Return the selection as a plan for `batch` samples of `heads` query heads."""
        mask = self.block_mask().expand(batch, heads, -1, -1)
        return plan_from_mask(mask, query_tokens=self.query_tokens, key_tokens=self.key_tokens)


@dataclass(frozen=True)
class SelectorSpec:
    """What the selector needs to know.

    Args:
        budget: share of candidates kept, in (0, 1].
        query_tile, key_tile: tile sizes in tokens.
        head_shared: score the mean over heads and return one map.
        force: keep everything as a map where the budget covers all, instead of None (measures the
            overhead).
        score_chunk_bytes: bound of one float32 score slab; heads are taken in chunks that fit.
    """

    budget: float = 0.30
    query_tile: int = 128
    key_tile: int = 64
    head_shared: bool = False
    force: bool = False
    score_chunk_bytes: int = 256 * 2**20


@dataclass(frozen=True, eq=False)
class TileGeometry:
    """The part of a selection that content does not change.

    Args:
        must: bool [NQ, NK], kept whatever the scores (drops already removed).
        candidates: bool [NQ, NK], may be chosen.
        counts: int64 [NQ, 1], how many of the candidates each row keeps.
        covers_all: every row keeps every candidate, and nothing is dropped.
        dropped: bool [NK], key tiles of nothing but padding; None without a layout.
    """

    must: Tensor
    candidates: Tensor
    counts: Tensor
    covers_all: bool
    dropped: Tensor | None = None

    def density(self) -> float:
        """Return the share of tiles that the adaptive selector keeps on this geometry."""
        kept = (
            self.must.sum() + torch.minimum(self.counts, self.candidates.sum(1, keepdim=True)).sum()
        )
        return float(kept) / self.must.numel()


class GeometryCache:
    """A small dictionary, emptied when full: geometries are few, and a rebuild is cheap."""

    def __init__(self, limit: int = 32):
        self._limit = limit
        self._items: dict[Hashable, object] = {}

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> object | None:
        """Return what is stored under `key`, or None."""
        return self._items.get(key)

    def put(self, key: Hashable, value: object) -> None:
        """Store a value, emptying the cache first when it is full."""
        if len(self._items) >= self._limit:
            self._items.clear()
        self._items[key] = value


def kept_of(candidates: Tensor, budget: float) -> Tensor:
    """Return ceil(candidates · budget) in integers: 10 candidates at 0.3 are 3 on every device."""
    units = round(min(budget, 1.0) * _BUDGET_UNITS)
    return (candidates.long() * units + (_BUDGET_UNITS - 1)) // _BUDGET_UNITS


def diagonal_tiles(tokens: int, query_tile: int, key_tile: int) -> Tensor:
    """Return bool [NQ, NK]: tiles whose token ranges overlap, so that no row is empty."""
    query_start = torch.arange(0, tokens, query_tile)
    key_start = torch.arange(0, tokens, key_tile)
    starts_before_end = key_start[None, :] < query_start[:, None] + query_tile
    return starts_before_end & (query_start[:, None] < key_start[None, :] + key_tile)


def tile_geometry(
    tokens: int,
    spec: SelectorSpec,
    layout: TokenLayout | None,
    device: torch.device,
    cache: GeometryCache | None = None,
) -> TileGeometry:
    """Return the geometry of a sequence, computed on the CPU and moved once.

    Args:
        tokens: L.
        spec: tile sizes and budget.
        layout: pins and drops, or None for a sequence that may go sparse throughout. Its length
            must be `tokens`.
        device: where the selection will be made.
        cache: where equal requests find the same object again.
    """
    key = ("geometry", layout, tokens, spec.query_tile, spec.key_tile, spec.budget, str(device))
    if cache is not None and (found := cache.get(key)) is not None:
        assert isinstance(found, TileGeometry)
        return found
    must = diagonal_tiles(tokens, spec.query_tile, spec.key_tile)
    drops = None
    if layout is not None:
        pins, drops = tile_pins(layout, spec.query_tile, spec.key_tile)
        must = (must | pins) & ~drops[None, :]
        candidates = ~must & ~drops[None, :]
        dropped = bool(drops.any())
    else:
        candidates, dropped = ~must, False
    available = candidates.sum(1, keepdim=True)
    counts = kept_of(available, spec.budget)
    covers = not dropped and bool((counts >= available).all())
    geometry = TileGeometry(
        must.to(device),
        candidates.to(device),
        counts.to(device),
        covers,
        None if drops is None else drops.to(device),
    )
    if cache is not None:
        cache.put(key, geometry)
    return geometry


def visible_tiles(attn_mask: Tensor, tokens: int, query_tile: int, key_tile: int) -> Tensor:
    """Return which tiles hold at least one (query, key) pair that a token mask shows.

    Args:
        attn_mask: bool or float, broadcastable to [B, H, L, L]; a float entry hides from half its
            dtype's lowest value downwards (models write -inf or the lowest finite number).

    Returns:
        bool [B or 1, H or 1, NQ or 1, NK or 1].
    """
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    if mask.dtype == torch.bool:
        shown = mask
    elif mask.is_floating_point():
        shown = mask > torch.finfo(mask.dtype).min / 2
    else:
        shown = mask != 0
    if shown.shape[-1] not in (1, tokens) or shown.shape[-2] not in (1, tokens):
        raise ValueError(
            f"attn_mask: expected a mask broadcastable to {tokens} x {tokens} tokens, "
            f"got {tuple(mask.shape)}"
        )
    if shown.shape[-1] > 1:
        shown = _any_tile(shown, key_tile)
    if shown.shape[-2] > 1:
        shown = _any_tile(shown.transpose(-1, -2), query_tile).transpose(-1, -2)
    return shown


def _any_tile(flags: Tensor, tile: int) -> Tensor:
    """OR the last dimension within tiles."""
    missing = -flags.shape[-1] % tile
    if missing:
        flags = torch.nn.functional.pad(flags, (0, missing), value=False)
    return flags.unflatten(-1, (-1, tile)).any(-1)


def select_adaptive(
    query: Tensor,
    key: Tensor,
    spec: SelectorSpec,
    *,
    layout: TokenLayout | None = None,
    visible: Tensor | None = None,
    cache: GeometryCache | None = None,
) -> Selection | None:
    """Keep the tiles whose mean query and mean key agree most, within the budget.

    Args:
        query: [B, H, L, D].
        key: [B, Hk, L, D]; Hk divides H.
        spec: budget and tiles.
        layout: pins and drops.
        visible: bool [B or 1, H or 1, NQ or 1, NK or 1] from `visible_tiles`; a hidden tile is
            never kept.
        cache: geometry cache.

    Returns:
        The selection, [B, H or 1, NQ, NK]; None when the budget covers everything (dense is then
        the same and quicker).

    Numerics: means and scores in FP32; ties go to the lower key tile (a stable sort), so equal
    inputs give equal maps. Source: spec/router.md 2.3.
    """
    tokens = query.shape[2]
    geometry = tile_geometry(tokens, spec, layout, query.device, cache)
    if geometry.covers_all and not spec.force:
        return None
    query_means = tile_means(query.transpose(1, 2), tile=spec.query_tile)
    key_means = tile_means(key.transpose(1, 2), tile=spec.key_tile)
    if spec.head_shared:
        query_means = query_means.mean(1, keepdim=True)
        key_means = key_means.mean(1, keepdim=True)
        if visible is not None and visible.shape[1] > 1:
            visible = visible.any(1, keepdim=True)
    elif key_means.shape[1] != query_means.shape[1]:
        key_means = key_means.repeat_interleave(query_means.shape[1] // key_means.shape[1], 1)
    batch, heads, rows, _ = query_means.shape
    columns = key_means.shape[2]
    keep = torch.empty(batch, heads, rows, columns, dtype=torch.int8, device=query.device)
    chunk = max(1, spec.score_chunk_bytes // (4 * batch * rows * columns))
    for start in range(0, heads, chunk):
        part = slice(start, min(start + chunk, heads))
        scores = query_means[:, part] @ key_means[:, part].transpose(-1, -2)
        must, candidates, counts = (
            x[None, None] for x in (geometry.must, geometry.candidates, geometry.counts)
        )
        if visible is not None:
            shown = visible[:, part] if visible.shape[1] > 1 else visible
            must, candidates = must & shown, candidates & shown
            counts = kept_of(candidates.sum(-1, keepdim=True), spec.budget)
        found = select_tiles(scores, must, candidates, counts)
        if found.shape == keep.shape:
            keep = found
        else:
            keep[:, part] = found
    return Selection(keep, spec.query_tile, spec.key_tile, tokens, tokens, dropped=geometry.dropped)


def radial_band(tokens: int, query_tile: int, key_tile: int, target: float) -> Tensor:
    """Return a static band around the diagonal of a wanted density.

    Tile centres lie at (i + 0.5) · tile; a tile is kept where the centres are at most w apart, and
    w is bisected.

    Returns:
        bool [NQ, NK] on the CPU.
    """
    return _bisected_band(tokens, query_tile, key_tile, target, None, None)


def _bisected_band(
    tokens: int,
    query_tile: int,
    key_tile: int,
    target: float,
    always: Tensor | None,
    never: Tensor | None,
) -> Tensor:
    """Bisect the band's half-width so that band ∪ always, minus never, has density `target`."""
    query_centre = (torch.arange(block_count(tokens, query_tile)) + 0.5) * query_tile
    key_centre = (torch.arange(block_count(tokens, key_tile)) + 0.5) * key_tile
    distance = (query_centre[:, None] - key_centre[None, :]).abs()

    def kept(width: float) -> Tensor:
        band = distance <= width
        if always is not None:
            band = band | always
        return band & ~never if never is not None else band

    low, high = 0.0, float(tokens + max(query_tile, key_tile))
    for _ in range(40):
        middle = (low + high) / 2
        if float(kept(middle).float().mean()) < target:
            low = middle
        else:
            high = middle
    return kept(high)


def select_radial(
    tokens: int,
    spec: SelectorSpec,
    device: torch.device,
    *,
    layout: TokenLayout | None = None,
    visible: Tensor | None = None,
    cache: GeometryCache | None = None,
) -> Selection | None:
    """Keep a static band with the density that `select_adaptive` has on the same geometry.

    The control of an experiment: pins, drops and density are those of the adaptive selection, so
    the only difference is which of the choosable tiles are kept. Built once a geometry.

    Returns:
        The selection [1, 1, NQ, NK], or None when the budget covers everything.
    """
    geometry = tile_geometry(tokens, spec, layout, device, cache)
    if geometry.covers_all and not spec.force:
        return None
    key = ("radial", layout, tokens, spec.query_tile, spec.key_tile, spec.budget, str(device))
    found = cache.get(key) if cache is not None else None
    if isinstance(found, Tensor):
        keep = found
    else:
        must, candidates = geometry.must.cpu(), geometry.candidates.cpu()
        band = _bisected_band(
            tokens,
            spec.query_tile,
            spec.key_tile,
            geometry.density(),
            must,
            ~(must | candidates),
        )
        keep = band.to(torch.int8)[None, None].to(device)
        if cache is not None:
            cache.put(key, keep)
    if visible is not None:
        keep = (keep.bool() & visible).to(torch.int8)
    return Selection(keep, spec.query_tile, spec.key_tile, tokens, tokens, dropped=geometry.dropped)
