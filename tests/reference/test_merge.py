"""The reference of merging against one softmax over both sets of keys."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.reference.merge import merge


def state(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def test_merging_equals_attending_at_once() -> None:
    logits = torch.randn(2, 3, 5, 11, dtype=torch.float64) * 20
    values = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    out, lse = merge(
        *state(logits[..., :4], values[..., :4, :]), *state(logits[..., 4:], values[..., 4:, :])
    )
    expected_out, expected_lse = state(logits, values)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_a_shared_state_broadcasts() -> None:
    own = torch.randn(4, 64, 8, dtype=torch.float64), torch.randn(4, 64, dtype=torch.float64)
    shared = torch.randn(4, 1, 8, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    out, lse = merge(*own, *shared)
    full = merge(*own, shared[0].expand(4, 64, 8), shared[1].expand(4, 64))
    assert torch.equal(out, full[0]) and torch.equal(lse, full[1])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 7.0])
def test_an_empty_side_never_leaks(garbage: float) -> None:
    out_a = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    lse_a = torch.randn(2, 5, 3, dtype=torch.float64)
    empty = torch.full_like(out_a, garbage), torch.full_like(lse_a, -math.inf)
    for out, lse in (merge(out_a, lse_a, *empty), merge(*empty, out_a, lse_a)):
        assert torch.equal(out, out_a) and torch.equal(lse, lse_a)
    out, lse = merge(*empty, *empty)
    assert not out.any() and (lse == -math.inf).all()


def test_huge_logarithms_do_not_overflow() -> None:
    one = torch.ones(1, 1, 1, 8)
    out, lse = merge(one, torch.full((1, 1, 1), 2e4), 3 * one, torch.full((1, 1, 1), 2e4))
    assert torch.equal(out, 2 * one)
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 2e4 + math.log(2)))
