"""The reference of selection against loops over rows, and the format of plans."""

from __future__ import annotations

import math
import random

import pytest
import torch

from solspark.reference.select_blocks import (
    mask_from_plan,
    plan_from_mask,
    select_blocks,
    unpack_bits,
)
from solspark.types import BlockPlan


def by_hand(scores: list[float], limit: float | None, top_k: int | None, allowed: set[int]) -> set:
    """Pick blocks of one row the long way."""
    if limit is not None:
        return {j for j in allowed if scores[j] > limit}
    ranked = sorted(
        allowed, key=lambda j: (-(-math.inf if math.isnan(scores[j]) else scores[j]), j)
    )
    return set(ranked[:top_k])


@pytest.mark.parametrize("seed", range(12))
def test_every_option_against_loops(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, rows, columns = 2, 3, rng.randint(1, 9), rng.randint(1, 40)
    # Few distinct values, so that most rows have ties at the boundary; a few that do not compare.
    values = [-1.5, -0.0, 0.0, 0.25, 0.5, 2.0, -math.inf, math.inf, math.nan]
    flat = [rng.choice(values) for _ in range(batch * heads * rows * columns)]
    scores = torch.tensor(flat).view(batch, heads, rows, columns)
    by_rank = rng.random() < 0.6
    top_k = rng.randint(0, columns + 2) if by_rank else None
    limits = None if by_rank else torch.randn(batch, heads, rows).mul(2).round() / 4
    candidates = rng.choice([None, rng.randint(0, columns)])
    sinks = [(0, 1), (columns // 2, columns // 2 + 1)][: rng.randint(0, 2)]
    dense_rows = [(rows // 2, rows)] if rng.random() < 0.3 else []
    radius = rng.choice([-1, 0, 1, 3])
    live = torch.rand(batch, rng.choice([1, heads]), columns) < 0.8 if rng.random() < 0.5 else None
    plan = select_blocks(
        scores,
        thresholds=limits,
        top_k=top_k,
        candidates=candidates,
        sinks=sinks,
        dense_rows=dense_rows,
        local_radius=radius,
        live=live,
        query_tokens=rows * 64 - 3,
        key_tokens=columns * 64 - 63,
    )
    mask = mask_from_plan(plan)
    for sample in range(batch):
        for head in range(heads):
            alive = set(range(columns))
            if live is not None:
                mine = live[sample, head if live.shape[1] > 1 else 0]
                alive = {j for j in range(columns) if mine[j]}
            sink = {j for first, stop in sinks for j in range(first, stop)}
            limit = columns if candidates is None else candidates
            allowed = {j for j in alive if j < limit and j not in sink}
            for row in range(rows):
                cut = None if limits is None else float(limits[sample, head, row])
                picked = by_hand(scores[sample, head, row].tolist(), cut, top_k, allowed)
                expected = picked | sink | {j for j in range(columns) if abs(row - j) <= radius}
                if any(first <= row < stop for first, stop in dense_rows):
                    expected = set(range(columns))
                expected &= alive
                got = {j for j in range(columns) if mask[sample, head, row, j]}
                assert got == expected, (sample, head, row)
                if top_k is not None:
                    assert len(picked) == min(top_k, len(allowed))


def test_a_score_equal_to_its_threshold_is_not_exact() -> None:
    scores = torch.tensor([0.5, 0.5 + 2**-20, 0.0]).view(1, 1, 1, 3)
    limits = torch.full((1, 1, 1), 0.5)
    plan = select_blocks(scores, thresholds=limits, query_tokens=64, key_tokens=192)
    assert mask_from_plan(plan).flatten().tolist() == [False, True, False]


def test_negative_zero_ties_with_zero() -> None:
    scores = torch.tensor([-0.0, 0.0, -0.0]).view(1, 1, 1, 3)
    plan = select_blocks(scores, top_k=2, query_tokens=64, key_tokens=192)
    assert mask_from_plan(plan).flatten().tolist() == [True, True, False]


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 100])
def test_plan_format(columns: int) -> None:
    mask = torch.rand(2, 3, 4, columns, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[0, 0, 0], mask[0, 0, 1] = False, True
    plan = plan_from_mask(mask, query_tokens=4 * 64 - 5, key_tokens=columns * 64 - 63)
    assert plan.bits.dtype == plan.counts.dtype == torch.int32
    assert plan.indices.dtype == torch.int16
    for sample, head, row in [(0, 0, 0), (0, 0, 1), (0, 2, 3), (1, 1, 2)]:
        blocks = mask[sample, head, row].nonzero().flatten().tolist()
        assert int(plan.counts[sample, head, row]) == len(blocks)
        assert plan.indices[sample, head, row, : len(blocks)].tolist() == blocks
        words = [int(word) & 0xFFFFFFFF for word in plan.bits[sample, head, row]]
        assert sum(word << (32 * place) for place, word in enumerate(words)) == sum(
            1 << block for block in blocks
        )
    assert torch.equal(mask_from_plan(plan), mask)
    assert torch.equal(unpack_bits(plan.bits, columns), mask)


def test_lists_may_be_as_wide_as_the_longest_row() -> None:
    mask = torch.zeros(1, 1, 2, 50, dtype=torch.bool)
    mask[..., 0, [3, 49]] = True
    plan = plan_from_mask(mask, query_tokens=128, key_tokens=3200, most=2)
    assert plan.indices.shape[-1] == 2
    assert plan.indices[0, 0, 0].tolist() == [3, 49]


def test_many_blocks_need_wider_indices() -> None:
    mask = torch.zeros(1, 1, 1, 2**15, dtype=torch.bool)
    mask[..., -1] = True
    plan = plan_from_mask(mask, query_tokens=1, key_tokens=2**15 * 64)
    assert plan.indices.dtype == torch.int32
    assert int(plan.indices[0, 0, 0, 0]) == 2**15 - 1
    assert isinstance(plan, BlockPlan)


def test_a_mask_must_fit_the_tokens() -> None:
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask: expected 3 x 3 blocks .* got 2 x 3"):
        plan_from_mask(mask, query_tokens=129, key_tokens=129)
    with pytest.raises(ValueError, match=r"mask: expected bool"):
        plan_from_mask(mask.int(), query_tokens=128, key_tokens=129)
    with pytest.raises(TypeError, match=r"plan: expected a BlockPlan, got Tensor"):
        mask_from_plan(mask)  # type: ignore[arg-type]
