"""The selector: pooling, budgets, pins, drops, determinism, visibility, the radial control."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solspark.router import Selection, SelectorSpec, select_adaptive, select_radial
from solspark.router.layout import TokenLayout, layout_from_segments, tile_pins
from solspark.router.selector import (
    GeometryCache,
    diagonal_tiles,
    kept_of,
    radial_band,
    tile_geometry,
    visible_tiles,
)


def tokens_of(length, heads=2, batch=1, dim=16, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, length, dim, generator=generator).to(dtype)


def test_the_diagonal_is_two_key_tiles_a_query_tile():
    diagonal = diagonal_tiles(1024, 128, 64)
    assert diagonal.shape == (8, 16) and diagonal.sum(1).tolist() == [2] * 8
    for row in range(8):
        assert diagonal[row].nonzero().flatten().tolist() == [2 * row, 2 * row + 1]
    ragged = diagonal_tiles(130, 128, 64)
    assert ragged.tolist() == [[True, True, False], [False, False, True]]


@pytest.mark.parametrize("budget", [0.15, 0.30, 0.50])
@pytest.mark.parametrize("length", [4096, 3001])
def test_the_budget_is_exact_and_the_diagonal_stays(budget, length):
    query, key = tokens_of(length), tokens_of(length, seed=1)
    selection = select_adaptive(query, key, SelectorSpec(budget=budget))
    keep = selection.keep.bool()
    rows, columns = math.ceil(length / 128), math.ceil(length / 64)
    assert selection.keep.shape == (1, 2, rows, columns)
    diagonal = diagonal_tiles(length, 128, 64)
    assert keep[:, :, diagonal].all()
    candidates = columns - diagonal.sum(1)
    want = torch.tensor([math.ceil(round(c * budget, 6)) for c in candidates.tolist()])
    assert torch.equal((keep & ~diagonal).sum(-1), want.expand(1, 2, -1))


def test_the_best_candidates_are_kept():
    length = 1500
    query, key = tokens_of(length, seed=2), tokens_of(length, seed=3)
    selection = select_adaptive(query, key, SelectorSpec(budget=0.2))
    tiles = [slice(i, min(i + 64, length)) for i in range(0, length, 64)]
    rows = [slice(i, min(i + 128, length)) for i in range(0, length, 128)]
    diagonal = diagonal_tiles(length, 128, 64)
    for head in range(2):
        for i, row in enumerate(rows):
            mean = query[0, head, row].double().mean(0)
            score = [float(mean @ key[0, head, t].double().mean(0)) for t in tiles]
            choosable = [j for j in range(len(tiles)) if not diagonal[i, j]]
            best = sorted(choosable, key=lambda j: -score[j])[: math.ceil(0.2 * len(choosable))]
            kept = set(selection.keep[0, head, i].nonzero().flatten().tolist())
            assert kept == set(best) | set(diagonal[i].nonzero().flatten().tolist())


def test_ties_go_to_the_lower_tile():
    query = torch.ones(1, 1, 1024, 8)
    selection = select_adaptive(query, query, SelectorSpec(budget=0.25))
    kept = selection.keep[0, 0]
    # 14 candidates, 4 kept: the first four that are not the diagonal.
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert kept[7].nonzero().flatten().tolist() == [0, 1, 2, 3, 14, 15]


def test_a_budget_of_all_is_none_and_force_keeps_everything():
    query = tokens_of(1000)
    assert select_adaptive(query, query, SelectorSpec(budget=1.0)) is None
    assert select_adaptive(query, query, SelectorSpec(budget=3.0)) is None
    forced = select_adaptive(query, query, SelectorSpec(budget=1.0, force=True))
    assert forced.keep.all() and forced.density() == 1.0
    # One tile of each kind: the diagonal is all there is.
    short = tokens_of(60)
    assert select_adaptive(short, short, SelectorSpec(budget=0.3)) is None


def test_equal_inputs_give_equal_maps_whatever_the_chunks():
    query, key = tokens_of(2000, heads=5), tokens_of(2000, heads=5, seed=1)
    first = select_adaptive(query, key, SelectorSpec())
    again = select_adaptive(query.clone(), key.clone(), SelectorSpec(), cache=GeometryCache())
    small = select_adaptive(query, key, SelectorSpec(score_chunk_bytes=1))
    assert torch.equal(first.keep, again.keep) and torch.equal(first.keep, small.keep)


def test_head_shared_and_grouped_heads():
    query, key = tokens_of(1500, heads=6), tokens_of(1500, heads=2, seed=1)
    shared = select_adaptive(query, key, SelectorSpec(head_shared=True))
    assert shared.keep.shape[1] == 1
    grouped = select_adaptive(query, key, SelectorSpec())
    assert grouped.keep.shape[1] == 6
    expanded = select_adaptive(query, key.repeat_interleave(3, 1), SelectorSpec())
    assert torch.equal(grouped.keep, expanded.keep)
    assert not torch.equal(grouped.keep[:, 0], grouped.keep[:, 1])


def test_samples_choose_for_themselves():
    query, key = tokens_of(1500, batch=2), tokens_of(1500, batch=2, seed=1)
    both = select_adaptive(query, key, SelectorSpec())
    assert not torch.equal(both.keep[0], both.keep[1])
    for sample in range(2):
        part = slice(sample, sample + 1)
        alone = select_adaptive(query[part], key[part], SelectorSpec())
        assert torch.equal(both.keep[part], alone.keep)


LAYOUT = layout_from_segments([("text", 128), ("video", 1024), ("pad", 128)])


def test_pins_survive_and_drops_never():
    query, key = tokens_of(1280), tokens_of(1280, seed=1)
    pins, drops = tile_pins(LAYOUT, 128, 64)
    previous = 0.0
    for budget in (0.1, 0.5, 1.0):
        selection = select_adaptive(query, key, SelectorSpec(budget=budget), layout=LAYOUT)
        keep = selection.keep.bool()
        assert keep[:, :, pins].all()
        assert not keep[..., drops].any()
        assert selection.density() > previous
        previous = selection.density()
        assert tile_geometry(
            1280, SelectorSpec(budget=budget), LAYOUT, query.device
        ).density() == pytest.approx(selection.density())
    # Dropped tiles make the full budget sparse, too: it is not the dense answer.
    assert previous == pytest.approx(180 / 200)


def test_geometry_is_cached_by_identity_and_the_cache_is_bounded():
    cache = GeometryCache(limit=4)
    spec = SelectorSpec()
    device = torch.device("cpu")
    first = tile_geometry(1280, spec, LAYOUT, device, cache)
    same = TokenLayout(LAYOUT.spans, LAYOUT.length, LAYOUT.source)
    assert tile_geometry(1280, spec, same, device, cache) is first
    assert tile_geometry(1280, SelectorSpec(budget=0.5), LAYOUT, device, cache) is not first
    assert tile_geometry(1280, spec, None, device, cache) is not first
    for length in range(1000, 1010):
        tile_geometry(length, spec, None, device, cache)
        assert len(cache) <= 4


def test_kept_of_rounds_up_exactly():
    counts = torch.arange(2000)
    for percent in (1, 7, 15, 30, 55, 70, 99, 100):
        want = -(-counts * percent // 100)
        assert torch.equal(kept_of(counts, percent / 100), want)
    assert kept_of(torch.tensor([5]), 7.5).tolist() == [5]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 1500),
    budget=st.floats(0.01, 0.99),
    text=st.integers(0, 300),
    pad=st.integers(0, 300),
    shared=st.booleans(),
)
def test_every_selection_obeys_its_geometry(length, budget, text, pad, shared):
    text, pad = min(text, length - 1), min(pad, max(0, length - text - 1))
    layout = layout_from_segments([("text", text), ("video", length - text - pad), ("pad", pad)])
    spec = SelectorSpec(budget=budget, head_shared=shared)
    query, key = tokens_of(length, dim=4), tokens_of(length, dim=4, seed=1)
    selection = select_adaptive(query, key, spec, layout=layout)
    geometry = tile_geometry(length, spec, layout, query.device)
    if selection is None:
        assert geometry.covers_all
        return
    keep = selection.keep.bool()
    _, drops = tile_pins(layout, 128, 64)
    assert keep[..., geometry.must].all() and not keep[..., drops].any()
    chosen = (keep & geometry.candidates).sum(-1)
    assert torch.equal(chosen, geometry.counts.squeeze(1).expand_as(chosen))


def test_hidden_tiles_leave_the_candidates():
    length = 1024
    query, key = tokens_of(length, batch=2), tokens_of(length, batch=2, seed=1)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[0, ..., 700:] = False
    mask[1, ..., 100:200] = False
    visible = visible_tiles(mask, length, 128, 64)
    assert visible.shape == (2, 1, 1, 16)
    assert visible[0, 0, 0].tolist() == [True] * 11 + [False] * 5
    # Tile 1 (64..127) and tile 3 (192..255) still show a token; tile 2 does not.
    assert visible[1, 0, 0].tolist() == [True, True, False] + [True] * 13
    selection = select_adaptive(query, key, SelectorSpec(budget=0.3), visible=visible)
    keep = selection.keep.bool()
    assert not (keep & ~visible).any()
    diagonal = diagonal_tiles(length, 128, 64)
    chosen = (keep & ~diagonal).sum(-1)
    shown_candidates = (visible & ~diagonal).sum(-1)
    assert torch.equal(chosen, kept_of(shown_candidates, 0.3).expand_as(chosen))
    # The budget went to tiles that count: a row has as many as it may choose among what it sees.
    assert chosen[0].max() == 4


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float16).min, -40000.0])
def test_float_masks_hide_with_infinity_or_the_lowest_number(hidden):
    mask = torch.zeros(200, dtype=torch.float16)
    mask[64:128] = hidden
    mask[150] = -5.0
    assert visible_tiles(mask, 200, 128, 64).flatten().tolist() == [True, False, True, True]


def test_query_dependent_masks_pool_both_ways():
    length = 300
    mask = torch.ones(length, length).tril().bool()
    visible = visible_tiles(mask, length, 128, 64)
    assert visible.shape == (1, 1, 3, 5)
    for i in range(3):
        for j in range(5):
            part = mask[i * 128 : (i + 1) * 128, j * 64 : (j + 1) * 64]
            assert bool(visible[0, 0, i, j]) == bool(part.any())
    column = torch.ones(1, 1, length, 1, dtype=torch.bool)
    column[:, :, 128:256] = False
    assert visible_tiles(column, length, 128, 64).flatten().tolist() == [True, False, True]
    with pytest.raises(ValueError, match=r"attn_mask.*300"):
        visible_tiles(torch.ones(7, dtype=torch.bool), length, 128, 64)


@pytest.mark.parametrize("target", [0.15, 0.30])
def test_the_radial_band_has_the_density_and_is_a_band(target):
    band = radial_band(4096, 128, 64, target)
    assert band.shape == (32, 64)
    assert abs(float(band.float().mean()) - target) < 0.05
    assert band[diagonal_tiles(4096, 128, 64)].all()
    for row in band:
        kept = row.nonzero().flatten()
        assert kept.tolist() == list(range(int(kept[0]), int(kept[-1]) + 1))


@pytest.mark.parametrize("layout", [None, layout_from_segments([("text", 700), ("video", 3396)])])
def test_the_radial_control_matches_the_adaptive_density(layout):
    query, key = tokens_of(4096), tokens_of(4096, seed=1)
    spec = SelectorSpec(budget=0.3)
    adaptive = select_adaptive(query, key, spec, layout=layout)
    cache = GeometryCache()
    radial = select_radial(4096, spec, query.device, layout=layout, cache=cache)
    assert radial.keep.shape == (1, 1, 32, 64)
    assert abs(radial.density() - adaptive.density()) < 0.05
    if layout is not None:
        pins, _ = tile_pins(layout, 128, 64)
        assert radial.keep.bool()[:, :, pins].all()
    again = select_radial(4096, spec, query.device, layout=layout, cache=cache)
    assert again.keep is radial.keep
    assert select_radial(4096, SelectorSpec(budget=1.0), query.device) is None


def test_a_selection_knows_its_other_forms():
    length = 700
    query, key = tokens_of(length), tokens_of(length, seed=1)
    selection = select_adaptive(query, key, SelectorSpec())
    token_mask = selection.token_mask()
    assert token_mask.shape == (1, 2, length, length)
    for row, column in ((0, 0), (127, 650), (128, 64), (699, 699), (640, 5)):
        kept = selection.keep[:, :, row // 128, column // 64].bool()
        assert torch.equal(token_mask[:, :, row, column], kept)
    blocks = selection.block_mask()
    assert blocks.shape == (1, 2, 11, 11)
    expanded = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :length, :length]
    assert torch.equal(expanded, token_mask)
    plan = selection.block_plan(1, 2)
    assert torch.equal(plan.counts.long(), blocks.sum(-1))
    assert "keep=" not in repr(selection)


def test_a_selection_refuses_another_grid():
    with pytest.raises(ValueError, match=r"selection\.keep.*\[B, H, 6, 11\]"):
        Selection(torch.ones(1, 1, 6, 10, dtype=torch.int8), 128, 64, 700, 700)
    with pytest.raises(ValueError, match="int8"):
        Selection(torch.ones(1, 1, 6, 11), 128, 64, 700, 700)
