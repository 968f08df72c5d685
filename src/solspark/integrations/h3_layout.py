"""Where the generated video lies in MiniMax-H3's packed sequence, read from forward's arguments.

Nothing hands the grid over: the target is the last run of video rows, and its grid follows from the
rotary coordinates. The adapter works on the sequence with the target first and everything else, in
its own order, behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..types import TokenGrid

FORWARD_POSITIONS: Mapping[str, int] = {
    "timestep": 3,
    "timestep_indices": 4,
    "token_tags": 5,
    "position_ids": 6,
    "video_indices": 7,
    "text_indices": 9,
}
"""Positional index of the structural arguments in `MiniMaxH3Transformer3DModel.forward`."""

VIDEO_TAG = 0
TEXT_TAG = 1


@dataclass(frozen=True, eq=False)
class H3Layout:
    """Say how to move the target video to the front of the packed sequence and back.

    Args:
        grid: (frames, height, width) of the target.
        tokens: S, rows of the packed sequence.
        start: first target row; the target is rows [start, S).
        order: int64 [V] on the CPU, raster position -> target row, counted from `start`; None when
            the rows are in raster order already, so that packing is a rotation.
        condition_tokens: video rows outside the target (keyframes, references).
        mixed_timesteps: target rows are at several timesteps, or not at the text's.
    """

    grid: TokenGrid
    tokens: int
    start: int
    order: Tensor | None = None
    condition_tokens: int = 0
    mixed_timesteps: bool = False
    _indices: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def video_tokens(self) -> int:
        """V, rows of the target video."""
        return self.tokens - self.start

    def pack(self, rows: Tensor) -> Tensor:
        """Return `rows` [B, S, ...] with the target first, in raster order."""
        if self.order is None:
            return torch.cat((rows[:, self.start :], rows[:, : self.start]), dim=1)
        return rows.index_select(1, self._on(rows.device)[0])

    def packed_rows(self, rows: Tensor, first: int, stop: int) -> Tensor:
        """Return rows [first, stop) of what `pack` would make, as far as there are, no others."""
        stop = min(stop, self.tokens)
        if self.order is not None:
            return rows.index_select(1, self._on(rows.device)[0][first:stop])
        video = self.video_tokens
        parts = (
            rows[:, self.start + first : self.start + min(stop, video)],
            rows[:, max(0, first - video) : max(0, stop - video)],
        )
        held = [part for part in parts if part.shape[1]]
        return held[0] if len(held) == 1 else torch.cat(held, dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        """Undo `pack`."""
        if self.order is None:
            video = self.video_tokens
            return torch.cat((rows[:, video:], rows[:, :video]), dim=1)
        return rows.index_select(1, self._on(rows.device)[1])

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the permutation and its inverse on a device; moved there once."""
        if device not in self._indices:
            assert self.order is not None
            packed = torch.cat((self.order + self.start, torch.arange(self.start)))
            inverse = torch.empty_like(packed)
            inverse[packed] = torch.arange(self.tokens)
            self._indices[device] = (packed.to(device), inverse.to(device))
        return self._indices[device]


def forward_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the structural arguments of a transformer call, by keyword or by position."""
    found = {}
    for name, position in FORWARD_POSITIONS.items():
        value = kwargs.get(name)
        if value is None and position < len(args):
            value = args[position]
        found[name] = value
    return found


def structure_key(arguments: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Identify the tensors that a layout was derived from: identity, and version where tracked."""
    tensors = (arguments.get(name) for name in ("token_tags", "position_ids", "video_indices"))
    return tuple((id(value), version(value)) for value in tensors)


def version(value: Any) -> int:
    """Return the in-place version of a tensor; inference tensors keep none."""
    if not isinstance(value, Tensor) or value.is_inference():
        return -1
    return value._version


def video_timestep(arguments: Mapping[str, Any]) -> float | None:
    """Return the timestep of the last row, which is target video; waits for the device."""
    timestep, indices = arguments.get("timestep"), arguments.get("timestep_indices")
    if not isinstance(timestep, Tensor) or not isinstance(indices, Tensor) or not indices.numel():
        return None
    return float(timestep[indices[-1]])


def derive_layout(arguments: Mapping[str, Any]) -> H3Layout:
    """Derive the layout of one request. Costs a few copies to the CPU; meant for once a request.

    Args:
        arguments: `token_tags` [S], `position_ids` [S, 3], and, where the model has them,
            `video_indices`, `text_indices` and `timestep_indices` [S].

    Returns:
        The layout. Without `video_indices` the target is the last run of rows tagged as video.

    Raises:
        RuntimeError: tags or positions are missing.
        ValueError: the target is not the suffix, not tagged as video throughout or not a dense
            grid; text or video is empty; a tensor has the wrong rank.

    Source: spec/h3.md section 3.2.
    """
    tags, positions = arguments.get("token_tags"), arguments.get("position_ids")
    if not isinstance(tags, Tensor) or not isinstance(positions, Tensor):
        missing = [
            name
            for name in ("token_tags", "position_ids")
            if not isinstance(arguments.get(name), Tensor)
        ]
        raise RuntimeError(
            f"{' and '.join(missing)}: needed to find the video in the packed sequence, but the "
            "transformer was called without"
        )
    if tags.ndim != 1:
        raise ValueError(f"token_tags: expected [S], got {list(tags.shape)}")
    tokens = tags.shape[0]
    if tuple(positions.shape) != (tokens, 3):
        raise ValueError(f"position_ids: expected [{tokens}, 3], got {list(positions.shape)}")
    tags, positions = tags.cpu(), positions.cpu()

    video = _indices(arguments, "video_indices", tags == VIDEO_TAG)
    text = _indices(arguments, "text_indices", tags == TEXT_TAG)
    for name, rows in (("video_indices", video), ("text_indices", text)):
        if rows.ndim != 1 or not rows.numel():
            raise ValueError(f"{name}: expected at least one row, got {list(rows.shape)}")
    breaks = (video[1:] - video[:-1] != 1).nonzero().flatten()
    first = 0 if not breaks.numel() else int(breaks[-1]) + 1
    start, last = int(video[first]), int(video[-1])
    if last != tokens - 1:
        raise ValueError(
            f"video_indices: expected the generated video to end the packed sequence at row "
            f"{tokens - 1}, got row {last}"
        )

    timesteps = arguments.get("timestep_indices")
    off_schedule = None
    if isinstance(timesteps, Tensor):
        if tuple(timesteps.shape) != (tokens,):
            raise ValueError(f"timestep_indices: expected [{tokens}], got {list(timesteps.shape)}")
        timesteps = timesteps.cpu()
        off_schedule = (timesteps[start:] != timesteps[int(text[0])]).nonzero().flatten()

    ranked = _dense_grid(positions[start:])
    if ranked is None and off_schedule is not None and off_schedule.numel():
        # Without target audio between them, keyframe rows run into the target; they are held at
        # another timestep.
        start += int(off_schedule[-1]) + 1
        off_schedule = off_schedule[:0]
        ranked = _dense_grid(positions[start:])
    if ranked is None:
        raise ValueError(
            f"position_ids: the {tokens - start} rows of the generated video are not a dense grid, "
            f"its axes have {_axis_sizes(positions[start:])} distinct coordinates"
        )
    if bool((tags[start:] != VIDEO_TAG).any()):
        raise ValueError(
            f"token_tags: expected {VIDEO_TAG} (video) in the rows of the generated video, got "
            f"{sorted(set(tags[start:].tolist()))}"
        )
    grid, order = ranked
    return H3Layout(
        grid=grid,
        tokens=tokens,
        start=start,
        order=order,
        condition_tokens=int(video.numel()) - (tokens - start),
        mixed_timesteps=off_schedule is not None and bool(off_schedule.numel()),
    )


def _indices(arguments: Mapping[str, Any], name: str, tagged: Tensor) -> Tensor:
    """Return an index argument on the CPU, or the tagged rows where a model has no such one."""
    value = arguments.get(name)
    if isinstance(value, Tensor):
        return value.cpu()
    return tagged.nonzero().flatten()


def _axis_sizes(positions: Tensor) -> list[int]:
    """Count the distinct coordinates of each axis."""
    return [int(positions[:, axis].unique().numel()) for axis in range(3)]


def _dense_grid(positions: Tensor) -> tuple[TokenGrid, Tensor | None] | None:
    """Return (grid, order) of rows that fill a grid exactly once; None when they do not.

    `order` maps a raster position to its row and is None when the rows are in raster order.
    """
    rows = positions.shape[0]
    if not rows:
        return None
    key = torch.zeros(rows, dtype=torch.int64)
    sizes = []
    for axis in range(3):
        values, ranks = positions[:, axis].unique(return_inverse=True)
        sizes.append(int(values.numel()))
        key = key * sizes[-1] + ranks
    if sizes[0] * sizes[1] * sizes[2] != rows:
        return None
    raster = torch.arange(rows)
    order = key.argsort(stable=True)
    if not torch.equal(key[order], raster):
        return None
    return TokenGrid(*sizes), None if torch.equal(order, raster) else order
