"""Every implementation of scores and thresholds against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from solspark.ops.pool import pool
from solspark.ops.score_blocks import score_blocks, thresholds
from solspark.reference.score_blocks import score_blocks as reference_scores
from solspark.reference.score_blocks import thresholds as reference_thresholds
from solspark.testing import assert_close_to_oracle, make_qkv

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def check(actual: Tensor, oracle: Tensor, peer: Tensor) -> None:
    assert actual.dtype == peer.dtype
    if actual.dtype == torch.float64:
        torch.testing.assert_close(actual, oracle, rtol=1e-12, atol=1e-14)
    else:
        assert_close_to_oracle(actual, oracle, peer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores(dtype: torch.dtype) -> None:
    query, key, _ = make_qkv(2, 331, 3, 64, key_tokens=700, dtype=dtype)
    pooled = pool(query, key, None)
    assert pooled.query_means is not None
    scores = score_blocks(pooled.query_means, pooled.key_means, scale=0.125)
    assert scores.dtype == pooled.query_means.dtype and scores.shape == (2, 3, 6, 11)
    oracle = reference_scores(pooled.query_means.double(), pooled.key_means.double(), scale=0.125)
    peer = reference_scores(pooled.query_means, pooled.key_means, scale=0.125)
    check(scores, oracle, peer)


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thresholds(kind: str, masked: bool, dtype: torch.dtype) -> None:
    query, key, _ = make_qkv(2, 331, 3, 64, key_tokens=700, dtype=dtype)
    # An offset common to all keys: squaring before centring would lose the variance in float32.
    key = key + 3
    keep = None
    if masked:
        keep = torch.ones(2, 700, dtype=torch.bool)
        keep[1, 100:400] = False
    pooled = pool(query, key, None, key_bias=keep)
    assert pooled.query_means is not None
    spread = pooled.key_means if kind == "exact" else pooled.key_var
    limits = thresholds(
        pooled.query_means,
        pooled.key_mean,
        spread,
        scale=0.125,
        tau=1.3,
        kind=kind,
        live=pooled.live,
    )
    assert limits.dtype == pooled.query_means.dtype and limits.shape == (2, 3, 6)
    oracle = reference_thresholds(
        pooled.query_means.double(),
        pooled.key_mean.double(),
        spread.double(),
        scale=0.125,
        tau=1.3,
        kind=kind,
        live=pooled.live,
    )
    peer = reference_thresholds(
        pooled.query_means,
        pooled.key_mean,
        spread,
        scale=0.125,
        tau=1.3,
        kind=kind,
        live=pooled.live,
    )
    check(limits, oracle, peer)
    again = thresholds(
        pooled.query_means,
        None if kind == "exact" else pooled.key_mean,
        spread,
        scale=0.125,
        tau=1.3,
        kind=kind,
        live=pooled.live,
    )
    torch.testing.assert_close(again, limits)


def test_infinite_tau() -> None:
    query, key, _ = make_qkv(1, 100, 1, 64)
    pooled = pool(query, key, None)
    assert pooled.query_means is not None
    for tau in (float("inf"), float("-inf")):
        limits = thresholds(
            pooled.query_means, pooled.key_mean, pooled.key_var, scale=0.125, tau=tau
        )
        assert (limits == tau).all()


def test_bad_arguments_are_named() -> None:
    means = torch.zeros(1, 2, 3, 64)
    with pytest.raises(ValueError, match=r"key_means: expected \[1, 2, NK, 64\], got \(1, 3"):
        score_blocks(means, torch.zeros(1, 3, 3, 64), scale=1.0)
    with pytest.raises(TypeError, match=r"query_means: expected torch.float32 or .* got torch.b"):
        score_blocks(means.bfloat16(), means.bfloat16(), scale=1.0)
    with pytest.raises(ValueError, match=r"scale: expected a finite number, got nan"):
        score_blocks(means, means, scale=float("nan"))
    with pytest.raises(ValueError, match=r"kind: expected one of 'diag', 'exact', got 'full'"):
        thresholds(means, None, means, scale=1.0, tau=1.0, kind="full")
    with pytest.raises(ValueError, match=r"key_mean: expected a tensor .* got None"):
        thresholds(means, None, torch.zeros(1, 2, 64), scale=1.0, tau=1.0)
    with pytest.raises(ValueError, match=r"tau: expected a number, got nan"):
        thresholds(means, None, means, scale=1.0, tau=float("nan"), kind="exact")
