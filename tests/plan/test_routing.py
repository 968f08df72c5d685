"""Routes of packed attention against brute force on the same scores."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.ops.pool import pool
from solspark.ops.score_blocks import score_blocks, thresholds
from solspark.ops.select_blocks import mask_from_plan
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import (
    density,
    global_mean,
    plan_explicit,
    plan_gaussian_moments,
    plan_head_budgets,
    plan_hybrid,
    plan_summary_top_k,
    plan_tau,
    plan_top_k,
    tilted_means,
)

BATCH, HEADS, DIM, SCALE = 2, 3, 16, 0.25
LAYOUT = PackedLayout(tokens=11 * 64 + 30 + 100, video_tokens=11 * 64 + 30)


def means(levels=None, seed=0):
    """Query and key means; with `levels` few distinct values, so that scores tie."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, HEADS, LAYOUT.key_blocks, DIM)
    query, key = (torch.randn(shape, generator=generator) for _ in range(2))
    if levels is not None:
        query, key = (x[..., :2] * levels for x in (query, key))
        query, key = query.round() / levels, key.round() / levels
        query, key = (torch.nn.functional.pad(x, (0, DIM - 2)) for x in (query, key))
    return query[:, :, : LAYOUT.query_blocks], key


def exact(route):
    return mask_from_plan(route.plan)


def split(mask):
    """Return the candidates' part, after checking that every later block is exact."""
    assert mask[..., LAYOUT.candidates :].all()
    return mask[..., : LAYOUT.candidates]


def brute_top_k(scores, budget):
    """Mark the `budget` largest of each row in plain Python, equal ones by their index."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    rows, marks = scores.flatten(0, -2).tolist(), mask.flatten(0, -2)
    for row, values in enumerate(rows):
        for column in sorted(range(len(values)), key=lambda j: (-values[j], j))[:budget]:
            marks[row, column] = True
    return mask


@pytest.mark.parametrize("levels", [None, 1, 2])
@pytest.mark.parametrize("budget", [1, 3, 10])
def test_top_k_reads_exactly_its_budget_and_ties_go_to_the_lower_block(budget, levels):
    query, key = means(levels)
    route = plan_top_k(query, key, LAYOUT, top_k=budget, scale=SCALE)
    mask = split(exact(route))
    assert (mask.sum(-1) == budget).all()
    scores = score_blocks(query, key, scale=SCALE)[..., : LAYOUT.candidates]
    assert torch.equal(mask, brute_top_k(scores, budget))
    if levels is not None:
        ordered = scores.sort(-1, descending=True).values
        assert (ordered[..., budget - 1] == ordered[..., budget]).any(), "no boundary tie here"


@pytest.mark.parametrize("budget", [11, 12, 100])
def test_a_budget_of_all_candidates_reads_everything(budget):
    query, key = means()
    route = plan_top_k(query, key, LAYOUT, top_k=budget, scale=SCALE)
    assert exact(route).all()
    assert route.top_k == 11
    figures = density(route.mode, route.top_k, LAYOUT)
    assert (figures["video_density"], figures["packed_density"]) == (1.0, 1.0)


def test_density_of_a_budget():
    figures = density("top_k", 3, LAYOUT)
    assert figures["video_density"] == 3 / 11
    assert figures["packed_density"] == (3 + 3) / 14
    assert (figures["sink_blocks"], figures["query_blocks"]) == (3, 11)


@pytest.mark.parametrize("radius", [0, 1, 3])
def test_the_band_comes_on_top_of_the_budget(radius):
    query, key = means()
    without = split(exact(plan_top_k(query, key, LAYOUT, top_k=3, scale=SCALE)))
    route = plan_top_k(query, key, LAYOUT, top_k=3, scale=SCALE, local_radius=radius)
    index = torch.arange(11)
    band = (index[:, None] - index).abs() <= radius
    assert torch.equal(split(exact(route)), without | band)


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize("tau", [-1e9, 0.0, 1.0, 1e9])
def test_tau(kind, tau):
    query, key = means()
    mean, variance = key.mean(2), key.var(2, correction=0)
    route = plan_tau(query, key, mean, variance, LAYOUT, tau=tau, kind=kind, scale=SCALE)
    spread = variance if kind == "diag" else key
    cutoff = thresholds(query, mean, spread, scale=SCALE, tau=tau, kind=kind)
    wanted = score_blocks(query, key, scale=SCALE) > cutoff[..., None]
    mask = split(exact(route))
    assert torch.equal(mask, wanted[..., :11])
    assert route.mode == f"tau_{kind}" and route.top_k is None
    if abs(tau) > 1:
        assert mask.all() if tau < 0 else not mask.any()


@pytest.mark.parametrize("radius", [0, 2])
def test_an_infinite_threshold_leaves_the_band(radius):
    query, key = means()
    mean, variance = key.mean(2), key.var(2, correction=0)
    options = {"tau": 1e30, "kind": "diag", "scale": SCALE, "local_radius": radius}
    mask = split(exact(plan_tau(query, key, mean, variance, LAYOUT, **options)))
    index = torch.arange(11)
    assert torch.equal(mask, ((index[:, None] - index).abs() <= radius).expand_as(mask))


def test_gaussian_moments_cut_at_the_quantile():
    generator = torch.Generator().manual_seed(5)
    layout = PackedLayout(400 * 64, 400 * 64)
    query = torch.randn(1, 2, 400, DIM, generator=generator)
    key = torch.randn(1, 2, 400, DIM, generator=generator)
    route = plan_gaussian_moments(query, key, layout, top_k=40, scale=SCALE)
    counts = route.plan.counts.float()
    assert 30 < counts.mean() < 50 and counts.std() > 0
    mu, var = key.double().mean(2, keepdim=True), key.double().var(2, correction=0, keepdim=True)
    slope = SCALE * math.log2(math.e)
    deviations = 1.2815515655446004  # the 0.9 quantile of a normal distribution
    cutoff = slope * (query * mu).sum(-1) + deviations * torch.sqrt(
        slope**2 * (query.double() ** 2 * var).sum(-1) + 1e-6
    )
    scores = slope * query.double() @ key.double().transpose(2, 3)
    clear = (scores - cutoff[..., None]).abs() > 1e-5
    assert ((exact(route) == (scores > cutoff[..., None])) | ~clear).all()
    everything = plan_gaussian_moments(query, key, layout, top_k=400, scale=SCALE)
    assert exact(everything).all()


def test_head_budgets():
    query, key = means(levels=2)
    route = plan_head_budgets(query, key, LAYOUT, budgets=(0, 4, 11), scale=SCALE)
    mask = split(exact(route))
    scores = score_blocks(query, key, scale=SCALE)[..., :11]
    for head, budget in enumerate((0, 4, 11)):
        assert torch.equal(mask[:, head], brute_top_k(scores[:, head], budget))
    with pytest.raises(ValueError, match="head_budgets: expected 3 numbers, got 2"):
        plan_head_budgets(query, key, LAYOUT, budgets=(1, 2), scale=SCALE)


def some_route(seed=7):
    shape = (BATCH, HEADS, LAYOUT.query_blocks, LAYOUT.key_blocks)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_an_explicit_route_is_followed(dtype):
    given = some_route()
    route = plan_explicit(given.to(dtype), LAYOUT)
    assert torch.equal(split(exact(route)), given[..., :11])
    assert route.mode == "explicit"


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (torch.zeros(2, 3, 11, 11, dtype=torch.bool), r"expected \[B, H, 11, 14\]"),
        (torch.zeros(2, 3, 11, 14), "expected bool or uint8"),
    ],
)
def test_a_wrong_route_is_refused(route, message):
    with pytest.raises(ValueError, match=message):
        plan_explicit(route, LAYOUT)


def test_hybrid_rows_without_a_threshold_follow_the_route():
    query, key = means()
    given = some_route()
    cutoff = torch.zeros(BATCH, HEADS, 11)
    cutoff[:, :, ::2] = math.nan
    mask = split(exact(plan_hybrid(query, key, cutoff, given, LAYOUT, scale=SCALE)))
    above = score_blocks(query, key, scale=SCALE)[..., :11] > 0
    assert torch.equal(mask[:, :, ::2], given[:, :, ::2, :11])
    assert torch.equal(mask[:, :, 1::2], above[:, :, 1::2])


@pytest.mark.parametrize("with_mass", [False, True])
@pytest.mark.parametrize("parents", [[0] * 11, [0] * 4 + [1] * 7, list(range(11))])
def test_summary_scores_leave_the_band_out_of_the_budget(parents, with_mass):
    query, _ = means()
    generator = torch.Generator().manual_seed(9)
    shape = (BATCH, parents[-1] + 1, HEADS, LAYOUT.key_blocks)
    keys = torch.randn(*shape, DIM, generator=generator).to(torch.bfloat16)
    mass = torch.rand(shape, generator=generator) * 4
    route = plan_summary_top_k(
        query,
        keys,
        mass if with_mass else None,
        parents,
        LAYOUT,
        top_k=3,
        scale=SCALE,
        local_radius=1,
    )
    rounded = query.to(torch.bfloat16).double()
    own = keys[:, parents].double().transpose(1, 2)
    scores = SCALE * torch.einsum("bhnd,bhnjd->bhnj", rounded, own)
    if with_mass:
        scores = scores + mass[:, parents].double().transpose(1, 2)
    index = torch.arange(11)
    band = (index[:, None] - index).abs() <= 1
    scores = scores[..., :11].masked_fill(band, -math.inf)
    assert torch.equal(split(exact(route)), brute_top_k(scores, 3) | band)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_zero_anchor_gives_the_plain_means_bitwise(dtype):
    rows = torch.randn(2, 300, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    anchor = torch.zeros(2, 3, 16)
    pooled = pool(rows, rows, None)
    for stored, plain in ((torch.float32, pooled.query_means), (dtype, pooled.key_means)):
        tilted = tilted_means(rows, anchor, blocks=4, scale=SCALE, dtype=stored)
        assert torch.equal(tilted, plain[:, :, :4])


def test_tilted_means_are_softmax_averages():
    rows = torch.randn(2, 130, 3, 16, generator=torch.Generator().manual_seed(2)).double()
    anchor = global_mean(rows.flip(1), 128)
    torch.testing.assert_close(anchor, rows.flip(1)[:, :128].mean(1))
    tilted = tilted_means(rows, anchor, blocks=2, scale=3.0, dtype=torch.float64)
    block = rows[:, 64:128]
    weights = (3.0 * torch.einsum("bnhd,bhd->bnh", block, anchor)).softmax(1)
    expected = (weights[..., None] * block).sum(1)
    torch.testing.assert_close(tilted[:, :, 1], expected, atol=1e-12, rtol=0)
