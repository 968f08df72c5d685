"""Quantise rows of Q, K or V: one scale a token or a tile of tokens, after an optional rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark.types import BLOCK, block_count

LARGEST = {"int8": 127.0, "fp8": 448.0, "fp16": 65504.0}
"""Largest magnitude that an operand type is scaled to."""

STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp16": torch.float16}
"""Element type of an operand type."""

FLOOR = 1e-30
"""Smallest magnitude that a scale stands for: rows of zeros stay zeros instead of 0 / 0."""


def padded_dim(head_dim: int) -> int:
    """Return the power of two, at least 16, that a head dim is padded to."""
    return max(16, 1 << (head_dim - 1).bit_length())


def rotation_size(head_dim: int, group: int) -> int:
    """Return how many channels one rotation spans: at most `group`, and the padded head dim."""
    return min(group, padded_dim(head_dim))


def rotate(x: Tensor, group: int) -> Tensor:
    """Rotate channels by an orthonormal Hadamard matrix in groups; rotating again undoes it.

        y[g] = H x[g] / sqrt(size),  H[i, j] = (-1)^popcount(i & j)

    Args:
        x: [..., D], D a multiple of `group`.
        group: a power of two.
    """
    return (x.unflatten(-1, (-1, group)) @ hadamard(group).to(x)).flatten(-2) / math.sqrt(group)


def hadamard(size: int) -> Tensor:
    """Return the +-1 Hadamard matrix in natural order, float32 [size, size]."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def quantize(
    x: Tensor,
    *,
    dtype: str = "int8",
    granularity: str = "row",
    mean: Tensor | None = None,
    hadamard: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantise the rows of each head symmetrically.

        y = rotate(x) - rotate(mean)
        values = round(y * (largest / m)),  scales = m / largest,  m = max |y| of the row or tile

    Args:
        x: [B, L, H, D], any float type.
        dtype: "int8" (largest 127), "fp8" (e4m3, 448) or "fp16" (65,504).
        granularity: "row", one scale a token, or "tile", one for each 64 tokens.
        mean: float32 [B, H, D], subtracted first; None subtracts nothing.
        hadamard: channels that one rotation spans, a power of two; 0 does not rotate.

    Returns:
        values [B, L, H, Dp] of the storage type, Dp = D padded with zeros to a power of two, and
        scales float32 [B, H, L] or [B, H, ceil(L / 64)].

    Numerics: FP32 whatever the input type (float64 included, so that an oracle sees the same
    integers); round half to even, never beyond the largest. m is at least 1e-30.

    Source: router specification 3.2.
    """
    y = torch.nn.functional.pad(x.float(), (0, padded_dim(x.shape[-1]) - x.shape[-1]))
    shift = None
    if mean is not None:
        shift = torch.nn.functional.pad(mean.float(), (0, y.shape[-1] - mean.shape[-1]))[:, None]
    if hadamard:
        size = rotation_size(x.shape[-1], hadamard)
        y = rotate(y, size)
        shift = rotate(shift, size) if shift is not None else None
    if shift is not None:
        y = y - shift
    magnitude = y.abs().amax(-1).transpose(1, 2)
    tokens = x.shape[1]
    if granularity == "tile":
        missing = -tokens % BLOCK
        magnitude = torch.nn.functional.pad(magnitude, (0, missing))
        magnitude = magnitude.unflatten(-1, (block_count(tokens), BLOCK)).amax(-1)
    magnitude = magnitude.clamp_min(FLOOR)
    largest = LARGEST[dtype]
    # A true division: torch turns number / tensor into a reciprocal and a product, rounded twice.
    inverse = torch.full_like(magnitude, largest) / magnitude
    inverse = per_token(inverse, tokens).transpose(1, 2)[..., None]
    values = (y * inverse).clamp(-largest, largest)
    if dtype == "int8":
        values = values.round()
    return values.to(STORAGE[dtype]), magnitude / largest


def per_token(scales: Tensor, tokens: int) -> Tensor:
    """Return scales [B, H, L] from either granularity; `tokens` is L."""
    if scales.shape[-1] == tokens:
        return scales
    return scales.repeat_interleave(BLOCK, -1)[..., :tokens]


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Return float32 [B, L, H, Dp] from `quantize`, still rotated and without the mean."""
    return values.float() * per_token(scales, values.shape[1]).transpose(1, 2)[..., None]
