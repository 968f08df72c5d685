"""The judge of closeness and the input factories: they must be able to fail."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from solspark.testing import (
    LAYOUTS,
    PeakMemory,
    assert_close_to_oracle,
    make_qkv,
    nan_filled_allocations,
    random_mask,
)

EPS = torch.finfo(torch.float16).eps


def oracle() -> torch.Tensor:
    return torch.linspace(-1, 1, 101, dtype=torch.float64)


def test_an_error_within_twice_the_peers_passes_and_one_beyond_fails() -> None:
    best = oracle()
    peer = best + 0.01
    assert_close_to_oracle((best - 0.02).float(), best, peer.float())
    with pytest.raises(AssertionError, match=r"lse: max error 2.1.*e-02 \(bound 2.0.*e-02\)"):
        assert_close_to_oracle((best + 0.021).float(), best, peer.float(), name="lse")


def test_an_exact_peer_leaves_one_rounding() -> None:
    best = oracle()
    same = best.half()
    assert_close_to_oracle(same, same.double(), same)
    near = same.clone()
    near[-1] = 1 - EPS / 2
    assert_close_to_oracle(near, same.double(), same)
    near[-1] = 1 + 2 * EPS
    with pytest.raises(AssertionError, match=r"max error"):
        assert_close_to_oracle(near, same.double(), same)
    assert_close_to_oracle(near, same.double(), same, scale=2.0)


def test_the_mean_catches_what_the_maximum_lets_pass() -> None:
    best = oracle()
    peer = best.clone()
    peer[0] += 0.5  # one bad value of the peer must not excuse a bias everywhere
    with pytest.raises(AssertionError, match=r"mean error 1.0.*e-01"):
        assert_close_to_oracle((best + 0.1).float(), best, peer.float())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_fail(bad: float) -> None:
    best = oracle()
    result = best.float()
    result[7] = bad
    with pytest.raises(AssertionError, match=r"1 of 101 values are not finite.*\(7,\)"):
        assert_close_to_oracle(result, best, best.float())


def test_infinities_of_the_oracle_must_be_met() -> None:
    best = oracle()
    best[3] = -math.inf
    assert_close_to_oracle(best.float(), best, best.float())
    for wrong in (-1e30, math.inf, math.nan):
        result = best.float()
        result[3] = wrong
        with pytest.raises(AssertionError, match=r"the first at \(3,\)"):
            assert_close_to_oracle(result, best, best.float())
    empty = torch.full((3,), -math.inf, dtype=torch.float64)
    assert_close_to_oracle(empty.float(), empty, empty.float())


def test_what_cannot_be_judged_is_refused() -> None:
    best = oracle()
    with pytest.raises(AssertionError, match=r"expected shape \(101,\), got \(100,\)"):
        assert_close_to_oracle(best[1:].float(), best, best.float())
    with pytest.raises(AssertionError, match=r"a float64 result has no better oracle"):
        assert_close_to_oracle(best, best, best)
    with pytest.raises(AssertionError, match=r"the oracle itself holds NaN"):
        assert_close_to_oracle(best.float(), best * math.nan, best.float())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout: str) -> None:
    plain = make_qkv(2, 5, 3, 8, dtype=torch.bfloat16)
    other = make_qkv(2, 5, 3, 8, dtype=torch.bfloat16, layout=layout)
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one, two) and two.dtype == torch.bfloat16
        assert two.is_contiguous() == (layout == "contiguous")
    assert not torch.equal(*plain[:2])


def test_guarded_tensors_lie_among_nan_at_an_odd_offset() -> None:
    query, _, _ = make_qkv(1, 5, 3, 8, layout="guarded")
    assert query.storage_offset() % 2 == 1
    buffer = torch.as_strided(query, (query.untyped_storage().nbytes() // 4,), (1,), 0)
    assert int(buffer.isfinite().sum()) == query.numel()


def test_lengths_of_keys_and_unknown_layouts() -> None:
    query, key, value = make_qkv(1, 5, 4, 8, key_tokens=7, key_heads=2)
    assert query.shape == (1, 5, 4, 8) and key.shape == value.shape == (1, 7, 2, 8)
    with pytest.raises(ValueError, match=r"layout: 'fused' needs equal shapes"):
        make_qkv(1, 5, 4, 8, key_tokens=7, layout="fused")
    with pytest.raises(ValueError, match=r"layout: expected one of .* got 'tiled'"):
        make_qkv(1, 5, 4, 8, layout="tiled")


def test_allocations_are_nan_inside_the_block_only() -> None:
    with nan_filled_allocations():
        assert torch.empty(100).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_random_masks_have_the_rows_that_tests_need() -> None:
    mask = random_mask(2, 3, 200, 300)
    assert mask.shape == (2, 3, 4, 5)
    assert not mask[:, 0, 0].any() and mask[:, 0, -1].all()
    assert mask[0, 0, 1].tolist() == [False] * 4 + [True]


def test_peak_memory_is_what_a_block_adds() -> None:
    with PeakMemory() as peak:
        torch.ones(2**24)
    if peak.bytes is None:
        pytest.skip("this system does not tell a process its peak memory")
    assert 0.9 * 2**26 < peak.bytes < 1.5 * 2**26


def test_peak_memory_counts_a_block_that_would_fit_in_freed_pages() -> None:
    code = """
import torch
from solspark.testing import PeakMemory
freed = [torch.ones(2**22) for _ in range(20)]
above = torch.ones(2**18)
del freed
with PeakMemory() as peak:
    torch.ones(2**24)
print(peak.bytes)
"""
    keep = {"MALLOC_MMAP_THRESHOLD_": "100000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | keep, check=True, capture_output=True
    ).stdout.decode()
    if printed.strip() == "None":
        pytest.skip("this system does not tell a process its peak memory")
    assert int(printed) > 0.9 * 2**26
