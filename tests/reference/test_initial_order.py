"""Golden values of the initial orders (spec/spark.md 1.4) and what holds for every grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solspark.reference.initial_order import HILBERT_ORDERS, INITIAL_ORDERS, initial_order
from solspark.types import TokenGrid

GRIDS = st.builds(TokenGrid, *(st.integers(1, 11),) * 3)


def test_golden_hilbert_orders():
    assert initial_order(TokenGrid(2, 2, 2), "hilbert_thw").tolist() == [0, 1, 3, 2, 6, 7, 5, 4]
    assert initial_order(TokenGrid(2, 3, 2), "hilbert_thw").tolist() == [
        *(0, 2, 8, 6, 7, 9, 3, 1, 11, 5, 4, 10)
    ]
    assert initial_order(TokenGrid(4, 4, 4), "hilbert_thw")[:16].tolist() == [
        *(0, 4, 20, 16, 17, 21, 5, 1, 2, 3, 19, 18, 22, 23, 7, 6)
    ]


@pytest.mark.parametrize("side", [2, 4, 8])
@pytest.mark.parametrize("name", HILBERT_ORDERS)
def test_hilbert_walks_a_cube_in_unit_steps(side: int, name: str):
    order = initial_order(TokenGrid(side, side, side), name)
    places = torch.stack([order // side**2, order // side % side, order % side])
    assert places.diff(dim=1).abs().sum(0).tolist() == [1] * (side**3 - 1)


def test_hilbert_axis_names_permute_the_walk():
    walk = initial_order(TokenGrid(4, 4, 4), "hilbert_thw").view(4, 4, 4).flatten()
    t, h, w = walk // 16, walk // 4 % 4, walk % 4
    # What t, h, w are to "thw", w, t, h are to "wth".
    assert initial_order(TokenGrid(4, 4, 4), "hilbert_wth").equal((h * 4 + w) * 4 + t)


def test_tiles_come_in_raster_order_and_are_clipped_at_the_edges():
    grid = TokenGrid(5, 4, 6)
    order = initial_order(grid, "tile_t4h4w4")
    t, h, w = order // 24, order // 6 % 4, order % 6
    tiles = (t // 4 * 1 + h // 4) * 2 + w // 4
    assert tiles.equal(tiles.sort().values)
    assert tiles.bincount().tolist() == [64, 32, 16, 8]
    assert order[:9].tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 12]
    assert order[64:68].tolist() == [4, 5, 10, 11]


@settings(max_examples=40, deadline=None)
@given(GRIDS, st.sampled_from(INITIAL_ORDERS))
def test_every_order_is_a_permutation(grid: TokenGrid, name: str):
    assert initial_order(grid, name).sort().values.equal(torch.arange(grid.tokens))


def test_flat_is_the_raster():
    assert initial_order(TokenGrid(2, 3, 5)).equal(torch.arange(30))


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match=r"initial_order: expected one of flat.*'zigzag'"):
        initial_order(TokenGrid(2, 2, 2), "zigzag")
