"""Initial orders: which raster token stands at each position before a landmark tree is grown."""

from __future__ import annotations

import functools
from itertools import permutations

import torch
from torch import Tensor

from solspark.types import TokenGrid

HILBERT_ORDERS = tuple(f"hilbert_{''.join(axes)}" for axes in permutations("thw"))
INITIAL_ORDERS = ("flat", "tile_t4h4w4", *HILBERT_ORDERS)
TILE = 4


def initial_order(grid: TokenGrid, name: str = "flat") -> Tensor:
    """Return the raster token ids of a video grid in the order `name`.

        flat:         id = (t * H + h) * W + w, ascending
        tile_t4h4w4:  4x4x4 tiles in raster order, each in its own raster order, edge tiles clipped
        hilbert_abc:  ascending distance along the three-dimensional Hilbert curve through the
                      smallest power-of-two cube that holds the grid, coordinates taken in the axis
                      order a, b, c

    Args:
        grid: frames, height and width in tokens.
        name: one of `INITIAL_ORDERS`.

    Returns:
        int64 [T] on the CPU, a permutation of 0..T-1. The tensor is cached: do not write into it.

    Raises:
        ValueError: unknown name.

    Source: spec/spark.md section 1.4; J. Skilling, "Programming the Hilbert curve" (2004).
    """
    if name not in INITIAL_ORDERS:
        raise ValueError(
            f"initial_order: expected one of {', '.join(INITIAL_ORDERS)}; got {name!r}"
        )
    return _cached_order(grid, name)


@functools.lru_cache(maxsize=64)
def _cached_order(grid: TokenGrid, name: str) -> Tensor:
    """Compute one order; grids and names are few and the result costs 8 bytes a token."""
    if name == "flat":
        return torch.arange(grid.tokens)
    frame, row, column = (axis.flatten() for axis in _coordinates(grid))
    if name == "tile_t4h4w4":
        tile_rows, tile_columns = -(-grid.height // TILE), -(-grid.width // TILE)
        tile = ((frame // TILE) * tile_rows + row // TILE) * tile_columns + column // TILE
        inside = ((frame % TILE) * TILE + row % TILE) * TILE + column % TILE
        return (tile * TILE**3 + inside).argsort(stable=True)
    axes = {"t": frame, "h": row, "w": column}
    bits = max(1, (max(grid.as_tuple()) - 1).bit_length())
    distance = hilbert_distance([axes[axis] for axis in name.removeprefix("hilbert_")], bits)
    return distance.argsort(stable=True)


def _coordinates(grid: TokenGrid) -> tuple[Tensor, ...]:
    """Return the frame, row and column of every token as tensors of the grid's shape."""
    return torch.meshgrid(*(torch.arange(size) for size in grid.as_tuple()), indexing="ij")


def hilbert_distance(coordinates: list[Tensor], bits: int) -> Tensor:
    """Return the distance along the Hilbert curve of points in the cube [0, 2^bits)^3.

    Args:
        coordinates: three int64 tensors of one shape, the first axis the most significant.
        bits: bits a coordinate.

    Returns:
        int64 of the same shape, each in [0, 8^bits).

    Source: J. Skilling, "Programming the Hilbert curve" (2004), axes to transpose.
    """
    x = [axis.clone() for axis in coordinates]
    planes = [1 << bit for bit in range(bits - 1, 0, -1)]
    # Undo the rotations of every scale: a set bit flips the first axis, a clear one exchanges.
    for plane in planes:
        low = plane - 1
        for axis in range(3):
            is_set = (x[axis] & plane) != 0
            exchanged = (x[0] ^ x[axis]) & low
            flipped_first = x[0] ^ low
            other = torch.where(is_set, x[axis], x[axis] ^ exchanged)
            x[0] = torch.where(is_set, flipped_first, x[0] ^ exchanged)
            if axis > 0:
                x[axis] = other
    x[1] = x[1] ^ x[0]
    x[2] = x[2] ^ x[1]
    correction = torch.zeros_like(x[0])
    for plane in planes:
        correction = torch.where((x[2] & plane) != 0, correction ^ (plane - 1), correction)
    x = [axis ^ correction for axis in x]
    distance = torch.zeros_like(x[0])
    for bit in range(bits - 1, -1, -1):
        for axis in x:
            distance = (distance << 1) | ((axis >> bit) & 1)
    return distance
