"""Token layouts: which tokens of a packed sequence may go sparse, and what that pins or drops in
tiles.

A layout is a list of spans. Video and image tokens may go sparse, padding is dropped as a key, and
every other kind, known or not, is pinned: its rows read everything and everything reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SPARSIFIABLE = frozenset({"video", "image"})
PADDING = "pad"
UNKNOWN = "unknown"

TEXT_FIRST_MODELS = frozenset(
    {
        "FluxTransformer2DModel",
        "Flux2Transformer2DModel",
        "ChromaTransformer2DModel",
        "BriaTransformer2DModel",
        "BriaFiboTransformer2DModel",
        "LongCatImageTransformer2DModel",
        "OvisImageTransformer2DModel",
    }
)
"""Denoisers known to pack [text, image]. With others a guess might pin the wrong half."""


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of one kind."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class TokenLayout:
    """Spans that cover [0, length) in order. Hashable: it is the key of every geometry cache.

    Args:
        spans: the spans.
        length: tokens in the sequence.
        source: where the layout came from: "indices", "stream ids" or "segments".
    """

    spans: tuple[Span, ...]
    length: int
    source: str

    def __post_init__(self) -> None:
        position = 0
        for span in self.spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(
                    f"layout.spans: expected a start of {position} and an end after it, got {span}"
                )
            position = span.end
        if position != self.length:
            raise ValueError(f"layout.length: the spans cover {position} tokens, got {self.length}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the spans, in order."""
        return tuple(span.kind for span in self.spans)


def layout_from_segments(segments: Iterable[tuple[str, int]]) -> TokenLayout:
    """Build a layout from (kind, token count) pairs in packing order.

    Empty segments vanish, equal neighbours join.

    Raises:
        ValueError: a count below 0, or no token at all.
    """
    spans: list[Span] = []
    position = 0
    for kind, count in segments:
        if count < 0:
            raise ValueError(f"segments: expected counts of at least 0, got {count} for {kind!r}")
        if count == 0:
            continue
        if spans and spans[-1].kind == kind:
            spans[-1] = Span(kind, spans[-1].start, position + count)
        else:
            spans.append(Span(kind, position, position + count))
        position += count
    if not spans:
        raise ValueError("segments: expected at least one token, got none")
    return TokenLayout(tuple(spans), position, "segments")


def live_segments(kind: str, live: Tensor) -> list[tuple[str, int]]:
    """Run-length encode a live mask: live tokens are `kind`, the others padding.

    Args:
        kind: kind of the live tokens.
        live: bool [L]. Reading it waits for the device.
    """
    if live.ndim != 1:
        raise ValueError(f"live: expected one dimension, got shape {tuple(live.shape)}")
    flags = live.bool().cpu()
    values, counts = torch.unique_consecutive(flags, return_counts=True)
    names = [kind if value else PADDING for value in values.tolist()]
    return list(zip(names, counts.tolist(), strict=True))


def _positions(tensor: Tensor) -> list[int] | None:
    """Return ascending distinct positions, or None when this indexes something else."""
    values = sorted(tensor.tolist())
    if not values or values[0] < 0:
        return None
    if len(set(values)) < len(values):
        return None
    return values


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return the contiguous runs of ascending integers as half-open pairs."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0], value + 1)
        else:
            runs.append((value, value + 1))
    return runs


def layout_from_indices(kwargs: Mapping[str, Any]) -> TokenLayout | None:
    """Build a layout from index tensors such as `video_indices`, `audio_indices`, `text_indices`.

    Every 1-D integer tensor whose name ends in `_indices` names the positions of one kind. Of the
    runs of "video" all but the last are keyframe conditioning and become "cond". A tensor with
    repeated entries (H3's `timestep_indices`, one timestep a token) indexes something else and is
    left out; positions that nobody names become "unknown".

    Returns:
        The layout, or None without such tensors or when two kinds claim one token.
    """
    spans: list[Span] = []
    for name, tensor in kwargs.items():
        if not (name.endswith("_indices") and isinstance(tensor, Tensor)):
            continue
        if tensor.ndim != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
            continue
        positions = _positions(tensor)
        if positions is None:
            continue
        kind = name.removesuffix("_indices")
        runs = _runs(positions)
        for number, (start, end) in enumerate(runs):
            conditioning = kind == "video" and number < len(runs) - 1
            spans.append(Span("cond" if conditioning else kind, start, end))
    if not spans:
        return None
    spans.sort(key=lambda span: span.start)
    covered: list[Span] = []
    position = 0
    for span in spans:
        if span.start < position:
            return None
        if span.start > position:
            covered.append(Span(UNKNOWN, position, span.start))
        covered.append(span)
        position = span.end
    return TokenLayout(tuple(covered), position, "indices")


def layout_from_stream_ids(model_name: str, kwargs: Mapping[str, Any]) -> TokenLayout | None:
    """Build [text, image] of a known denoiser from `txt_ids` and `img_ids` [.., tokens, axes]."""
    if model_name not in TEXT_FIRST_MODELS:
        return None
    text, image = kwargs.get("txt_ids"), kwargs.get("img_ids")
    if not isinstance(text, Tensor) or not isinstance(image, Tensor):
        return None
    if text.ndim not in (2, 3) or image.ndim not in (2, 3):
        return None
    segments = layout_from_segments([("text", text.shape[-2]), ("image", image.shape[-2])])
    return TokenLayout(segments.spans, segments.length, "stream ids")


class LayoutReader:
    """Derive layouts from a denoiser's arguments, reading index tensors from the device once."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._layout: TokenLayout | None = None

    def read(self, model_name: str, kwargs: Mapping[str, Any]) -> TokenLayout | None:
        """Return the layout that the arguments of one forward pass imply, or None."""
        tensors = [
            (n, t) for n, t in kwargs.items() if n.endswith("_indices") and isinstance(t, Tensor)
        ]
        if not tensors:
            return layout_from_stream_ids(model_name, kwargs)
        if not self._same(tensors):
            self._layout = layout_from_indices(kwargs)
            self._seen = [
                (n, weakref.ref(t), t._version) for n, t in tensors if not t.is_inference()
            ]
        return (
            self._layout if self._layout is not None else layout_from_stream_ids(model_name, kwargs)
        )

    def _same(self, tensors: list[tuple[str, Tensor]]) -> bool:
        """Return whether these are the very tensors read last time, unchanged."""
        if len(tensors) != len(self._seen):
            return False
        return all(
            name == old_name and old() is tensor and tensor._version == version
            for (name, tensor), (old_name, old, version) in zip(tensors, self._seen, strict=True)
        )


def tile_pins(layout: TokenLayout, query_tile: int, key_tile: int) -> tuple[Tensor, Tensor]:
    """Return what a layout forces on a tile grid.

    A tile is pinned when its query tile or its key tile holds anything that may not go sparse,
    boundary tiles included; query tiles of nothing but padding are not, since nobody reads their
    rows. A key tile of nothing but padding is dropped for every row, which beats any pin.

    Args:
        layout: the layout of a self-attention sequence.
        query_tile: tokens in a query tile.
        key_tile: tokens in a key tile.

    Returns:
        pins bool [NQ, NK] and drops bool [NK], on the CPU.
    """
    sparse = torch.zeros(layout.length, dtype=torch.bool)
    padding = torch.zeros(layout.length, dtype=torch.bool)
    for span in layout.spans:
        sparse[span.start : span.end] = span.kind in SPARSIFIABLE
        padding[span.start : span.end] = span.kind == PADDING
    query_padding = _tile_all(padding, query_tile)
    query_pinned = ~_tile_all(sparse, query_tile) & ~query_padding
    key_dropped = _tile_all(padding, key_tile)
    key_pinned = ~_tile_all(sparse, key_tile) & ~key_dropped
    pins = (query_pinned[:, None] | key_pinned[None, :]) & ~key_dropped[None, :]
    return pins, key_dropped


def _tile_all(flags: Tensor, tile: int) -> Tensor:
    """Return [N] bool: whether every real token of each tile has the flag."""
    missing = -flags.shape[0] % tile
    padded = torch.cat([flags, flags.new_ones(missing)]) if missing else flags
    return padded.view(-1, tile).all(1)
