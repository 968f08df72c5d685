"""The reference of scores and thresholds against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.reference.score_blocks import score_blocks, thresholds


def means(rows: int = 5, columns: int = 7, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, rows, dim, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 3, columns, dim, generator=generator, dtype=torch.float64)
    return query, key


def test_a_score_is_a_base_two_logit() -> None:
    query, key = means()
    scores = score_blocks(query, key, scale=0.25)
    expected = 0.25 * math.log2(math.e) * (query[1, 2, 3] @ key[1, 2, 4])
    torch.testing.assert_close(scores[1, 2, 3, 4], expected)
    assert scores.shape == (2, 3, 5, 7)


def test_a_score_equals_the_mean_of_its_token_scores() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    centre = torch.randn(16, generator=generator, dtype=torch.float64)
    score = score_blocks(rows.mean(0)[None, None, None], centre[None, None, None], scale=0.125)
    expected = 0.125 * math.log2(math.e) * (rows @ centre).mean()
    torch.testing.assert_close(score[0, 0, 0, 0], expected)


def test_no_score_is_a_negative_zero() -> None:
    query = torch.tensor([0.0, -1.0]).view(1, 1, 1, 2)
    key = torch.tensor([[-1.0, 0.0], [0.0, 0.0]]).view(1, 1, 2, 2)
    assert not score_blocks(query, key, scale=1.0).signbit().any()


@pytest.mark.parametrize("tau", [-2.0, 0.0, 1.0])
def test_exact_threshold_is_mean_plus_standard_deviations(tau: float) -> None:
    query, key = means()
    scores = score_blocks(query, key, scale=0.25)
    limit = thresholds(query, None, key, scale=0.25, tau=tau, kind="exact")
    deviation = (scores.var(-1, correction=0) + 1e-6).sqrt()
    torch.testing.assert_close(limit, scores.mean(-1) + tau * deviation)


def test_diag_threshold_drops_covariances() -> None:
    query, key = means()
    limit = thresholds(query, key.mean(2), key.var(2, correction=0), scale=0.25, tau=1.5)
    a = 0.25 * math.log2(math.e)
    for index in (0, 4):
        row = query[1, 2, index]
        variance = (row**2 * key[1, 2].var(0, correction=0)).sum()
        expected = a * (row @ key[1, 2].mean(0)) + 1.5 * math.sqrt(a * a * variance + 1e-6)
        torch.testing.assert_close(limit[1, 2, index], expected)


def test_both_kinds_agree_where_channels_do_not_covary() -> None:
    key = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    query = torch.tensor([[0.3, 2.0]], dtype=torch.float64)[None, None]
    key = key[None, None]
    diag = thresholds(query, key.mean(2), key.var(2, correction=0), scale=1.0, tau=1.0)
    exact = thresholds(query, None, key, scale=1.0, tau=1.0, kind="exact")
    torch.testing.assert_close(diag, exact)


@pytest.mark.parametrize("kind", ["diag", "exact"])
def test_constant_keys_leave_the_floor_of_the_variance(kind: str) -> None:
    query, _ = means()
    key = torch.ones(2, 3, 7, 16, dtype=torch.float64)
    spread = key if kind == "exact" else torch.zeros(2, 3, 16, dtype=torch.float64)
    limit = thresholds(query, key.mean(2), spread, scale=0.25, tau=1.0, kind=kind)
    scores = score_blocks(query, key, scale=0.25)
    torch.testing.assert_close(limit, scores[..., 0] + 1e-3)


def test_exact_moments_are_taken_over_live_blocks() -> None:
    query, key = means()
    live = torch.ones(2, 1, 7, dtype=torch.bool)
    live[1, 0, 2:4] = False
    limit = thresholds(query, None, key, scale=0.25, tau=1.0, kind="exact", live=live)
    short = thresholds(query, None, key[:, :, [0, 1, 4, 5, 6]], scale=0.25, tau=1.0, kind="exact")
    whole = thresholds(query, None, key, scale=0.25, tau=1.0, kind="exact")
    torch.testing.assert_close(limit[0], whole[0])
    torch.testing.assert_close(limit[1], short[1])
