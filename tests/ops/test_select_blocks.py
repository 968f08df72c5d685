"""Every implementation of selection against the reference, exactly."""

from __future__ import annotations

import math
import random

import pytest
import torch

from solspark.ops.select_blocks import mask_from_plan, select_blocks
from solspark.reference.select_blocks import select_blocks as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_equal_to_the_reference_with_ties_and_odd_values(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    batch, heads, rows, columns = 2, 3, rng.randint(1, 12), rng.randint(1, 70)
    scores = (torch.randn(batch, heads, rows, columns, dtype=dtype) * 2).round() / 2
    for value in (math.nan, -math.inf, math.inf, -0.0):
        scores[torch.rand(scores.shape) < 0.05] = value
    options: dict = {
        "candidates": rng.choice([None, rng.randint(0, columns)]),
        "sinks": [(0, 1), (columns // 2, columns)][: rng.randint(0, 2)],
        "dense_rows": [(0, 1), (rows // 2, rows)][: rng.randint(0, 2)],
        "local_radius": rng.choice([-1, 0, 1, 5]),
        "live": torch.rand(batch, rng.choice([1, heads]), columns) < 0.8
        if rng.random() < 0.5
        else None,
        "query_tokens": rows * 64 - rng.randint(0, 63),
        "key_tokens": columns * 64 - rng.randint(0, 63),
    }
    if rng.random() < 0.7:
        options["top_k"] = rng.randint(0, columns + 3)
    else:
        options["thresholds"] = (torch.randn(batch, heads, rows, dtype=dtype) * 2).round() / 2
    plan, expected = select_blocks(scores, **options), reference(scores, **options)
    assert torch.equal(plan.bits, expected.bits)
    assert torch.equal(plan.counts, expected.counts)
    for sample, head, row in [(0, 0, 0), (1, 2, rows - 1)]:
        count = int(plan.counts[sample, head, row])
        mine = plan.indices[sample, head, row, :count].tolist()
        assert mine == expected.indices[sample, head, row, :count].tolist() == sorted(set(mine))


def test_exactly_k_even_when_all_scores_tie() -> None:
    plan = select_blocks(torch.zeros(1, 2, 3, 50), top_k=7, query_tokens=192, key_tokens=3200)
    assert (plan.counts == 7).all()
    assert mask_from_plan(plan)[..., :7].all()


def test_lists_of_a_budget_are_no_wider_than_needed() -> None:
    scores = torch.randn(1, 1, 4, 100)
    plan = select_blocks(
        scores, top_k=5, sinks=[(90, 93)], local_radius=1, query_tokens=256, key_tokens=6400
    )
    assert plan.indices.shape[-1] == 5 + 3 + 3
    assert int(plan.counts.max()) <= 11


def test_bad_arguments_are_named() -> None:
    scores = torch.zeros(1, 2, 3, 4)
    tokens = {"query_tokens": 192, "key_tokens": 256}
    with pytest.raises(ValueError, match=r"expected exactly one of them, got neither"):
        select_blocks(scores, **tokens)
    with pytest.raises(ValueError, match=r"expected exactly one of them, got both"):
        select_blocks(scores, top_k=1, thresholds=torch.zeros(1, 2, 3), **tokens)
    with pytest.raises(ValueError, match=r"scores: expected 4 x 4 blocks .* got 3 x 4"):
        select_blocks(scores, top_k=1, query_tokens=193, key_tokens=256)
    with pytest.raises(ValueError, match=r"thresholds: expected \(1, 2, 3\), got \(1, 2, 4\)"):
        select_blocks(scores, thresholds=torch.zeros(1, 2, 4), **tokens)
    with pytest.raises(TypeError, match=r"top_k: expected an int, got 0.5"):
        select_blocks(scores, top_k=0.5, **tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"candidates: expected an int in \[0, 4\], got 5"):
        select_blocks(scores, top_k=1, candidates=5, **tokens)
    with pytest.raises(ValueError, match=r"sinks\[0\] stop: expected an int in \[1, 4\], got 5"):
        select_blocks(scores, top_k=1, sinks=[(1, 5)], **tokens)
    with pytest.raises(TypeError, match=r"dense_rows\[0\]: expected a pair .* got 3"):
        select_blocks(scores, top_k=1, dense_rows=[3], **tokens)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"local_radius: expected an int >= -1, got -2"):
        select_blocks(scores, top_k=1, local_radius=-2, **tokens)
    with pytest.raises(ValueError, match=r"live: expected \[1, 1 or 2, 4\], got \(1, 2, 3\)"):
        select_blocks(scores, top_k=1, live=torch.ones(1, 2, 3, dtype=torch.bool), **tokens)
