"""Second moments, their factors and the features for reblocking (spec/spark.md 2)."""

from __future__ import annotations

import pytest
import torch

from solspark.reference.initial_order import initial_order
from solspark.reference.second_moments import (
    ESTIMATORS,
    features,
    metric_factor,
    reblock_features,
    sample_tokens,
    second_moments,
)
from solspark.types import TokenGrid

GRID = TokenGrid(5, 6, 7)


def rows(seed: int = 0, dtype: torch.dtype = torch.float64, dim: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, GRID.tokens, 3, dim, generator=generator, dtype=torch.float64).to(dtype)


def test_hilbert_samples_stand_in_the_middle_of_equal_stretches():
    ids, weights = sample_tokens(GRID, "hilbert_midpoint")
    order = initial_order(GRID, "hilbert_thw")
    assert ids.tolist() == [int(order[place]) for place in (35, 105, 175)]
    assert weights.tolist() == [1 / 3] * 3
    assert sample_tokens(TokenGrid(1, 1, 5), "hilbert_midpoint")[0].shape == (1,)


def test_flat_midpoints_of_whole_and_ragged_blocks():
    ids, weights = sample_tokens(GRID, "flat64_midpoint_2")
    assert ids.tolist() == [16, 48, 80, 112, 144, 176, 192 + 4, 192 + 13]
    assert weights.tolist() == pytest.approx([64 / 420] * 6 + [18 / 420] * 2)
    ids, weights = sample_tokens(TokenGrid(1, 5, 13), "flat64_midpoint_4")
    assert ids.tolist() == [8, 24, 40, 56, 64]
    assert weights.tolist() == pytest.approx([16 / 65] * 4 + [1 / 65])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("mode", ["raw", "unit"])
def test_estimators_against_their_definition(estimator: str, mode: str):
    x = rows()
    got = second_moments(x, grid=GRID, mode=mode, estimator=estimator, ridge=0.0)
    own = x[1, :, 2]
    if mode == "unit":
        own = own / own.norm(dim=-1, keepdim=True)
    expected = torch.zeros(16, 16, dtype=torch.float64)
    if estimator in ("flat64_block_mean", "flat64_mean_diag"):
        for block in own.split(64):
            mean = block.mean(0)
            expected += len(block) / GRID.tokens * torch.outer(mean, mean)
        if estimator == "flat64_mean_diag":
            expected.diagonal().copy_(own.square().mean(0))
    else:
        ids, weights = sample_tokens(GRID, estimator)
        for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            expected += weight * torch.outer(own[token], own[token])
    # float32 norms in "unit" mode
    bound = (2e-7 if mode == "unit" else 1e-14) * expected.diagonal().max()
    assert (got[1, 2] - expected).abs().max() <= 4 * bound
    assert got.equal(got.mT)


def test_the_ridge_is_a_share_of_the_mean_diagonal():
    x = rows()
    bare = second_moments(x, grid=GRID, ridge=0.0)
    added = second_moments(x, grid=GRID, ridge=0.25) - bare
    share = 0.25 * bare.diagonal(dim1=-2, dim2=-1).mean(-1)
    expected = share[..., None, None] * torch.eye(16, dtype=torch.float64)
    assert (added - expected).abs().max() <= 1e-14


@pytest.mark.parametrize("kind", ["cholesky", "eigh"])
def test_factors_reproduce_the_moment(kind: str):
    moments = second_moments(rows(), grid=GRID)
    factor = metric_factor(moments, kind=kind)
    assert (factor @ factor.mT - moments).abs().max() <= 1e-13
    if kind == "cholesky":
        assert factor.equal(factor.tril())


def test_eigh_needs_no_ridge():
    factor = metric_factor(second_moments(rows(), grid=GRID, ridge=0.0), kind="eigh")
    assert factor.isfinite().all()


def test_feature_norms_are_the_opposite_metric():
    keys, queries = rows(), rows(1)
    moments = second_moments(queries, grid=GRID)
    transformed = features(keys, metric_factor(moments))
    assert transformed.shape == (2, 3, GRID.tokens, 16)
    x = keys[0, 11, 2]
    assert transformed[0, 2, 11].square().sum() == pytest.approx(float(x @ moments[0, 2] @ x))


@pytest.mark.parametrize("kind", ["cholesky", "eigh"])
def test_nobody_looks_then_all_are_alike(kind: str):
    zeros = torch.zeros(2, GRID.tokens, 3, 16)
    _, keys = reblock_features(zeros, rows(dtype=torch.float32), grid=GRID, factor=kind)
    assert keys is not None and (keys == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sides_and_layouts(dtype: torch.dtype):
    q, k = rows(0, dtype), rows(1, dtype)
    query, key = reblock_features(q, k, grid=GRID)
    assert query is not None and key is not None
    assert query.dtype == key.dtype == dtype
    assert query.equal(features(q, metric_factor(second_moments(k, grid=GRID))))
    assert key.equal(features(k, metric_factor(second_moments(q, grid=GRID))))
    for m2_side, expected in (
        ("query", (query, k.transpose(1, 2))),
        ("key", (q.transpose(1, 2), key)),
        ("none", (q.transpose(1, 2), k.transpose(1, 2))),
    ):
        got = reblock_features(q, k, grid=GRID, m2_side=m2_side)
        assert all(a is not None and a.equal(b) for a, b in zip(got, expected, strict=True))
    only_key = reblock_features(q, k, grid=GRID, layout_reuse="q_from_k")
    assert only_key[0] is None and only_key[1] is not None and only_key[1].equal(key)
    only_query = reblock_features(q, k, grid=GRID, layout_reuse="k_from_q")
    assert only_query[1] is None and only_query[0] is not None and only_query[0].equal(query)
