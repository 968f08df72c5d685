"""Plans of Sol-Attn: the composition of pooling, scoring and selecting."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from solspark import mask_from_plan
from solspark.ops.pool import pool
from solspark.ops.score_blocks import score_blocks
from solspark.plan import select
from solspark.plan.select import budget, count_candidates, plan_sol
from solspark.testing import make_qkv


@pytest.mark.parametrize(
    ("ratio", "candidates", "expected"),
    [
        (0.1, 25, 2),
        (0.1, 35, 4),
        (0.1, 582, 58),
        (0.1, 1134, 113),
        (0.2, 1134, 227),
        (0.5, 1, 1),
        (0.001, 10, 1),
        (1.0, 10, 10),
        (0.3, 0, 0),
    ],
)
def test_budget_rounds_half_to_even_and_is_at_least_one(
    ratio: float, candidates: int, expected: int
) -> None:
    assert budget(ratio, candidates) == expected


def test_overlapping_sinks_count_once() -> None:
    assert count_candidates(10, []) == 10
    assert count_candidates(10, [(0, 3), (2, 4), (9, 10)]) == 5


def test_a_budget_takes_the_highest_scores() -> None:
    query, key, _ = make_qkv(2, 700, 3, 64)
    plan = plan_sol(query, key, top_k=3, local_radius=-1)
    assert (plan.counts == 3).all()
    pooled = pool(query, key, None)
    assert pooled.query_means is not None
    scores = score_blocks(pooled.query_means, pooled.key_means, scale=0.125)
    mask = mask_from_plan(plan)
    lowest_in = scores.masked_fill(~mask, torch.inf).amin(-1)
    highest_out = scores.masked_fill(mask, -torch.inf).amax(-1)
    assert (lowest_in >= highest_out).all()


@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
def test_a_higher_tau_selects_a_subset(thresh_type: str) -> None:
    query, key, _ = make_qkv(1, 700, 3, 64)
    masks = [
        mask_from_plan(plan_sol(query, key, tau=tau, thresh_type=thresh_type, local_radius=-1))
        for tau in (-1e9, -1.0, 0.0, 1.0, 2.0, 1e9)
    ]
    assert masks[0].all() and not masks[-1].any()
    assert all((~lower | higher).all() for higher, lower in pairwise(masks))
    assert 0.05 < float(masks[3].double().mean()) < 0.35


def test_a_larger_budget_selects_a_superset() -> None:
    query, key, _ = make_qkv(1, 700, 3, 64)
    masks = [
        mask_from_plan(plan_sol(query, key, top_k=top_k, local_radius=-1)) for top_k in range(12)
    ]
    assert not masks[0].any() and masks[-1].all()
    assert all((~less | more).all() for less, more in pairwise(masks))


def test_head_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, _ = make_qkv(2, 331, 5, 64)
    keep = torch.ones(2, 5, 331, dtype=torch.bool)
    keep[0, 1, 64:192] = False
    options = {"tau": 0.5, "sinks": [(5, 6)], "dense_rows": [(0, 1)], "key_bias": keep}
    whole = plan_sol(query, key, **options)
    monkeypatch.setattr(select, "SCORE_BYTES", 2 * 2 * 6 * 6 * 4)
    parts = plan_sol(query, key, **options)
    assert torch.equal(whole.bits, parts.bits) and torch.equal(whole.counts, parts.counts)
    assert torch.equal(mask_from_plan(whole), mask_from_plan(parts))


def test_blocks_whose_keys_are_all_masked_are_never_read() -> None:
    query, key, _ = make_qkv(2, 331, 3, 64)
    keep = torch.ones(2, 331, dtype=torch.bool)
    keep[1, 64:192] = False
    for options in ({"top_k": 5}, {"tau": -1e9}, {"top_k": 1, "dense_rows": [(0, 6)]}):
        mask = mask_from_plan(plan_sol(query, key, key_bias=keep, sinks=[(1, 2)], **options))
        assert not mask[1, :, :, 1:3].any()
        assert mask[0, :, :, 1].all()


def test_query_and_key_lengths_may_differ() -> None:
    query, key, _ = make_qkv(1, 100, 2, 64, key_tokens=500)
    plan = plan_sol(query, key, top_k=2, candidates=4, sinks=[(7, 8)], local_radius=0)
    mask = mask_from_plan(plan)
    assert mask.shape == (1, 2, 2, 8)
    assert mask[..., 7].all() and not mask[..., 4:7].any()
    assert mask[:, :, 0, 0].all() and mask[:, :, 1, 1].all()


def test_means_pooled_before_are_used() -> None:
    query, key, _ = make_qkv(1, 331, 2, 64)
    pooled = pool(query, key, None)
    assert torch.equal(
        plan_sol(query, key, pooled=pooled, tau=0.3).bits, plan_sol(query, key, tau=0.3).bits
    )
    with pytest.raises(ValueError, match=r"pooled.query_means: expected a tensor .* got None"):
        plan_sol(query, key, pooled=pool(None, key, None))
