"""Queries, keys and values with the structure of video attention, made from a seed on any device.

Gaussian inputs time a fixed budget honestly and say nothing about quality. These inputs are built
the way a video transformer builds its own: shared content fields that vary smoothly over (t, h, w)
with several correlation lengths, per-head position kernels expressed through the rotary embedding
of MiniMax-H3, an RMS norm, a few outlier channels, and heads of five kinds (local, spatial,
temporal, global, text-driven). The strengths are calibrated to the figures that are published for
real activations; `docs/measured.md` holds targets and results.

Everything random comes from a counter-based hash, so a value depends on (seed, head, tensor, token,
channel) alone: the same problem gives the same tensors on a CPU and on a GPU up to float32
rounding, and any subset of heads can be made by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from solspark.bench.problems import Problem, get_problem
from solspark.bench.rotary import (
    ROTARY_FREQUENCIES,
    ROTARY_THETA,
    apply_rotary,
    axis_positions,
    position_ids,
    rotary_table,
)

_CONTENT_CHANNELS = 8
_WORD = 0xFFFFFFFF

VALUE_MEAN = 0.1
VALUE_FINE = 1.9
VALUE_NOISE = 0.8
"""Strengths of a value's constant, finer field and noise beside its content of strength one."""


@dataclass(frozen=True)
class Archetype:
    """Describe one kind of attention head.

    A share says what part of a query's and a key's energy a component takes.

    Args:
        name: label in reports.
        sharpness: logit that a query gives to a key with identical components.
        position: shares of the (t, h, w) position kernels.
        reach: their Gaussian widths, in rotary units (24 x 42 rows span about 24 x 42 units, a
            latent frame 5.7).
        content: share of the content field that queries and keys have in common.
        lengths: (temporal, spatial) correlation lengths of the content, in rotary units, equally
            weighted.
        text: share of the component that draws every query to the text rows.
        private: share of a smooth field that queries and keys do not have in common.
        noise: share of white noise.
    """

    name: str
    sharpness: float
    position: tuple[float, float, float]
    reach: tuple[float, float, float]
    content: float
    lengths: tuple[tuple[float, float], ...]
    text: float
    private: float = 0.2
    noise: float = 0.12


ARCHETYPES: dict[str, Archetype] = {
    kind.name: kind
    for kind in (
        Archetype(
            name="local",
            sharpness=21.0,
            position=(0.12, 0.16, 0.16),
            reach=(10.0, 2.5, 2.5),
            content=0.45,
            lengths=((20.0, 2.6), (50.0, 6.3)),
            text=0.05,
        ),
        Archetype(
            name="spatial",
            sharpness=21.0,
            position=(0.16, 0.04, 0.04),
            reach=(10.0, 5.0, 5.0),
            content=0.55,
            lengths=((20.0, 2.6), (50.0, 6.3)),
            text=0.05,
        ),
        Archetype(
            name="temporal",
            sharpness=21.0,
            position=(0.01, 0.2, 0.2),
            reach=(60.0, 2.0, 2.0),
            content=0.45,
            lengths=((40.0, 2.6), (80.0, 6.3)),
            text=0.05,
        ),
        Archetype(
            name="global",
            sharpness=23.0,
            position=(0.02, 0.02, 0.02),
            reach=(30.0, 10.0, 10.0),
            content=0.7,
            lengths=((25.0, 2.6), (60.0, 5.3)),
            text=0.05,
        ),
        Archetype(
            name="text",
            sharpness=20.0,
            position=(0.05, 0.05, 0.05),
            reach=(15.0, 5.0, 5.0),
            content=0.55,
            lengths=((25.0, 2.6), (60.0, 6.3)),
            text=0.2,
        ),
    )
}
"""Calibrated together with the strengths of the values below; docs/measured.md has the table."""

HEAD_PATTERN = (
    "local",
    "global",
    "spatial",
    "temporal",
    "text",
    "local",
    "global",
    "spatial",
    "global",
    "temporal",
)
"""Kinds of ten consecutive heads; any five from a multiple of five hold four kinds or all."""


class Activations(NamedTuple):
    """Query, key and value [B, T, H, D] of one layer, after the norms and the rotary embedding."""

    query: Tensor
    key: Tensor
    value: Tensor


def head_kind(head: int) -> str:
    """Return the archetype name of a head index."""
    return HEAD_PATTERN[head % len(HEAD_PATTERN)]


def _mix(value: int) -> int:
    """Hash one 32-bit word (multiply and shift rounds)."""
    value &= _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value = ((value ^ (value >> shift)) * factor) & _WORD
    return value ^ (value >> 16)


def _key(*parts: int) -> int:
    """Fold a few integers into one 32-bit stream key."""
    state = 0x9E3779B9
    for part in parts:
        state = _mix(state ^ _mix(part + 0x632BE5AB))
    return state


def _normal(shape: Sequence[int], key: int, device: torch.device) -> Tensor:
    """Return float32 values of nearly normal law (four uniform bytes added), unit variance, from
    counter and key.
    """
    count = math.prod(shape)
    state = torch.arange(count, device=device, dtype=torch.int64).mul_(0x9E3779B1).add_(key)
    state.bitwise_and_(_WORD)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        state.bitwise_xor_(state >> shift).mul_(factor).bitwise_and_(_WORD)
    state.bitwise_xor_(state >> 16)
    total = (state & 0xFF) + ((state >> 8) & 0xFF) + ((state >> 16) & 0xFF) + (state >> 24)
    deviation = math.sqrt(4 * (256**2 - 1) / 12)
    return total.to(torch.float32).sub_(510.0).div_(deviation).view(*shape)


def _uniform(*parts: int) -> float:
    """Return one number in [0, 1) from a key."""
    return _key(*parts) / 2.0**32


def _smooth_axis(positions: Tensor, length: float, device: torch.device) -> Tensor:
    """Return the [points, lattice] weights that turn unit lattice noise into a unit-variance smooth
    field.
    """
    low, high = float(positions[0]), float(positions[-1])
    lattice = low - length + torch.arange(int((high - low) / length) + 4).double() * length
    weights = torch.exp(-(((positions[:, None] - lattice) / (0.7 * length)) ** 2) / 2)
    weights /= weights.square().sum(1, keepdim=True).sqrt()
    return weights.to(device=device, dtype=torch.float32)


class _Scene:
    """Positions of a problem and the smooth fields over them."""

    def __init__(self, problem: Problem, device: torch.device, seed: int):
        self.problem, self.device, self.seed = problem, device, seed
        self.axes = axis_positions(problem)
        self.cos, self.sin = rotary_table(position_ids(problem), device)

    def field(self, channels: int, temporal: float, spatial: float, *key: int) -> Tensor:
        """Return float32 [T, channels]: smooth over the video, along time for audio, free for text
        rows.
        """
        problem = self.problem
        maps = [
            _smooth_axis(axis, length, self.device)
            for axis, length in zip(self.axes, (temporal, spatial, spatial), strict=True)
        ]
        lattice = [channels, *(weights.shape[1] for weights in maps)]
        noise = _normal(lattice, _key(self.seed, *key, 1), self.device)
        video = torch.einsum("cthw,Ww->cthW", noise, maps[2])
        video = torch.einsum("cthW,Hh->ctHW", video, maps[1])
        video = torch.einsum("ctHW,Tt->THWc", video, maps[0]).reshape(-1, channels)
        parts = [video]
        if problem.text_tokens:
            parts.append(
                _normal([problem.text_tokens, channels], _key(self.seed, *key, 2), self.device)
            )
        if problem.audio_tokens:
            along = torch.arange(problem.audio_tokens).double()
            weights = _smooth_axis(along, temporal, self.device)
            noise = _normal([weights.shape[1], channels], _key(self.seed, *key, 3), self.device)
            parts.append(weights @ noise)
        return torch.cat(parts)

    def white(self, channels: int, *key: int) -> Tensor:
        return _normal([self.problem.tokens, channels], _key(self.seed, *key, 4), self.device)


def _unit(rows: Tensor) -> Tensor:
    """Scale every row to unit length."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def _jittered(kind: Archetype, seed: int, head: int) -> Archetype:
    """Vary sharpness and reaches from head to head by a few tens of percent."""

    def factor(slot: int, spread: float) -> float:
        return math.exp(spread * (2 * _uniform(seed, head, slot, 71) - 1))

    return replace(
        kind,
        sharpness=kind.sharpness * factor(0, 0.25),
        reach=tuple(reach * factor(1 + i, 0.3) for i, reach in enumerate(kind.reach)),
    )


def _position_components(kind: Archetype, dim: int, device: torch.device) -> Tensor:
    """Return [D]: the same vector added to queries and keys, whose rotated product is the position
    kernel.

    A product of amplitude w_i at frequency f_i contributes w_i cos(f_i * distance); amplitudes
    follow the spectrum of a Gaussian of the wanted width on log-spaced frequencies.
    """
    frequencies = ROTARY_THETA ** -(torch.arange(ROTARY_FREQUENCIES) / ROTARY_FREQUENCIES)
    vector = torch.zeros(dim)
    for axis, (share, reach) in enumerate(zip(kind.position, kind.reach, strict=True)):
        spectrum = frequencies * reach * torch.exp(-((frequencies * reach) ** 2) / 2)
        vector[axis * ROTARY_FREQUENCIES : (axis + 1) * ROTARY_FREQUENCIES] = (
            share * spectrum / spectrum.sum()
        ).sqrt()
    return vector.to(device)


def _content_map(scene: _Scene, dim: int, *key: int) -> Tensor:
    """Return [C, D] with unit rows, mostly in the channels that hardly rotate."""
    half = 3 * ROTARY_FREQUENCIES
    profile = torch.full((dim,), 0.25)
    profile[2 * half :] = 1.0
    for axis in range(3):
        start = axis * ROTARY_FREQUENCIES
        for base in (start, half + start):
            profile[base + 9 : base + ROTARY_FREQUENCIES] = 0.7
    noise = _normal([_CONTENT_CHANNELS, dim], _key(scene.seed, *key), torch.device("cpu"))
    # On the CPU everywhere: another library may choose other signs.
    return torch.linalg.qr((noise * profile).T).Q.T.contiguous().to(scene.device)


def _head(scene: _Scene, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 query, key, value [T, D] of one head."""
    problem, device, dim = scene.problem, scene.device, scene.problem.head_dim
    kind = _jittered(ARCHETYPES[head_kind(head)], scene.seed, head)
    content = torch.zeros(problem.tokens, _CONTENT_CHANNELS, device=device)
    for octave, (temporal, spatial) in enumerate(kind.lengths):
        content += scene.field(_CONTENT_CHANNELS, temporal, spatial, head, 10 + octave)
    content = _unit(content)
    shared = content @ _content_map(scene, dim, head, 20)
    position = _position_components(kind, dim, device)
    text_axis = torch.zeros(dim, device=device)
    text_axis[-1] = 1.0

    def compose(side: int) -> Tensor:
        rows = math.sqrt(kind.content) * shared + position
        temporal, spatial = kind.lengths[0]
        own = scene.field(_CONTENT_CHANNELS, temporal, spatial, head, 30 + side)
        rows += math.sqrt(kind.private) * (_unit(own) @ _content_map(scene, dim, head, 40 + side))
        rows += math.sqrt(kind.noise / dim) * scene.white(dim, head, 50 + side)
        if side == 0:
            rows += math.sqrt(kind.text) * text_axis
        elif problem.text_tokens:
            text = slice(problem.video_tokens, problem.video_tokens + problem.text_tokens)
            rows[text] += math.sqrt(kind.text) * text_axis
        return rows * torch.rsqrt(rows.square().sum(1, keepdim=True))

    query, key = compose(0), compose(1)
    gain = math.sqrt(kind.sharpness) * dim**0.25
    query, key = query * gain, key * gain
    _add_outliers(query, key, scene.seed, head)
    return (
        apply_rotary(query, scene.cos, scene.sin),
        apply_rotary(key, scene.cos, scene.sin),
        _value(scene, content, head),
    )


def _add_outliers(query: Tensor, key: Tensor, seed: int, head: int) -> None:
    """Make a few channels large in keys and small in queries, and shift two of them, without
    changing attention.

    A gain g on a key channel and 1 / g on the query channel leave every product alone (both
    channels of a rotary pair take the same gain); a constant added to a channel that does not
    rotate gives every key of a query the same logit.
    """
    half = 3 * ROTARY_FREQUENCIES
    rest = query.shape[1] - 2 * half
    axis = _key(seed, head, 61) % 3
    lowest = axis * ROTARY_FREQUENCIES + ROTARY_FREQUENCIES - 1
    passing = [2 * half + _key(seed, head, 62, i) % (rest - 1) for i in range(2)]
    for channels, gain in (([lowest, lowest + half], 5.0), (passing[:1], 8.0)):
        key[:, channels] *= gain
        query[:, channels] /= gain
    for i, channel in enumerate(passing):
        key[:, channel] += (6.0, -4.0)[i]


def _value(scene: _Scene, content: Tensor, head: int) -> Tensor:
    """Return [T, D]: a constant, what the content says, a finer field, and noise; two channels are
    large.
    """
    dim = scene.problem.head_dim
    mean = _normal([1, dim], _key(scene.seed, head, 80), scene.device)
    told = content @ _normal([_CONTENT_CHANNELS, dim], _key(scene.seed, head, 81), scene.device)
    fine = scene.field(_CONTENT_CHANNELS, 8.0, 2.5, head, 82)
    fine = _unit(fine) @ _normal([_CONTENT_CHANNELS, dim], _key(scene.seed, head, 83), scene.device)
    value = VALUE_MEAN * mean + told + VALUE_FINE * fine
    value += VALUE_NOISE * scene.white(dim, head, 84)
    value[:, [5, 77 % dim]] *= 4.0
    return value


def video_activations(
    problem: str | Problem,
    *,
    heads: Sequence[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    fused: bool = False,
) -> Activations:
    """Make the query, key and value of one attention layer of a video transformer.

    A key is rmsnorm(content field + position vector + private field + text axis + noise), rotated
    by its (t, h, w); logits of a head peak at the sharpness of its kind. Memory beyond the result
    is one head in float32, a few times.

    Args:
        problem: a `Problem`, or the name of one.
        heads: head indices to make, ascending or not; None for all of the problem's. A head is the
            same whichever others are made with it.
        seed: another seed is another layer.
        dtype: of the result.
        device: where to compute and to return.
        fused: return views of one [B, T, 3, H, D] buffer, as a fused projection would.

    Returns:
        query, key, value [1, T, len(heads), D].

    Raises:
        ValueError: unknown problem, a head index outside it, or head_dim < 128 (the rotary
            embedding takes 96).

    Numerics: float32 throughout, one rounding to dtype; equal between devices up to float32
    rounding.

    Source: spec of MiniMax-H3's rotary embedding; published recall, density and error figures of
    Sol and Spark.
    """
    problem = get_problem(problem) if isinstance(problem, str) else problem
    chosen = list(range(problem.heads)) if heads is None else list(heads)
    if not chosen or min(chosen) < 0 or max(chosen) >= problem.heads:
        raise ValueError(f"heads: expected indices in [0, {problem.heads}), got {chosen}")
    if problem.head_dim < 128:
        raise ValueError(f"problem.head_dim: expected at least 128, got {problem.head_dim}")
    device = torch.device(device)
    shape = (1, problem.tokens, len(chosen), problem.head_dim)
    if fused:
        buffer = torch.empty(
            (1, problem.tokens, 3, len(chosen), problem.head_dim), dtype=dtype, device=device
        )
        result = Activations(*buffer.unbind(2))
    else:
        result = Activations(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(3)))
    with torch.no_grad():
        scene = _Scene(problem, device, seed)
        for column, head in enumerate(chosen):
            for target, rows in zip(result, _head(scene, head), strict=True):
                target[0, :, column] = rows
    return result
