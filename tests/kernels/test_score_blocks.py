"""Score and threshold kernels: close to the oracle in the interpreter; all targets compile."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from solspark.ops.score_blocks import _score_operator, _threshold_operator
from solspark.reference.score_blocks import LOG2_E, score_blocks, thresholds
from solspark.testing import assert_close_to_oracle, nan_filled_allocations

pytest.importorskip("triton")

from solspark.kernels.score_blocks import launch_score_blocks, launch_thresholds

SCALE = 64**-0.5


def test_in_the_interpreter(interpret):
    interpret(__file__)


def means(batch: int, heads: int, rows: int, columns: int, dim: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, rows, dim, generator=generator)
    key = torch.randn(batch, heads, columns, dim, generator=generator).to(dtype)
    return query, key


def two_terms(query: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the kernel keeps of a float32 mean, exactly."""
    high = query.to(dtype)
    return high.double() + (query - high.float()).to(dtype).double()


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    with nan_filled_allocations():
        return launch_score_blocks(query, key, scale_log2=SCALE * LOG2_E)


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(2, 3, 1, 1, 64), (1, 2, 65, 129, 64), (1, 1, 3, 130, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_scores(dtype: torch.dtype, shape: tuple[int, ...]):
    query, key = means(*shape, dtype)
    actual = scores_of(query, key)
    # The products are exact: what remains is the order of the sum and the size of its terms.
    kept = two_terms(query, dtype)
    oracle = score_blocks(kept, key.double(), scale=SCALE)
    terms = float(SCALE * LOG2_E * (kept.abs() @ key.double().abs().transpose(2, 3)).max())
    assert_close_to_oracle(
        actual, oracle, score_blocks(kept.float(), key, scale=SCALE), scale=terms
    )
    assert not (actual == 0).logical_and(actual.signbit()).any()


@pytest.mark.interpreted
def test_the_second_term_keeps_what_rounding_would_lose():
    """Query means that differ by less than half a unit of float16 still score in order."""
    query = torch.full((1, 1, 4, 64), 1.0) + torch.arange(4)[:, None] * 2.0**-14
    key = torch.ones(1, 1, 1, 64, dtype=torch.float16)
    assert query.half().eq(1.0).all()
    actual = scores_of(query, key)
    oracle = score_blocks(query.double(), key.double(), scale=SCALE)
    torch.testing.assert_close(actual.double(), oracle, rtol=1e-6, atol=0)
    assert (actual.diff(dim=2) > 0).all()


@pytest.mark.interpreted
def test_slices_of_heads_and_zeros():
    query, key = means(2, 5, 7, 9, 64, torch.float16)
    whole = scores_of(query, key)
    assert scores_of(query[:, 1:4], key[:, 1:4]).equal(whole[:, 1:4])
    for scale_log2 in (1.0, -1.0):
        zero = launch_score_blocks(query, torch.zeros_like(key), scale_log2=scale_log2)
        assert not zero.any() and not zero.signbit().any()


@pytest.mark.interpreted
@pytest.mark.parametrize("tau", [-1e9, -0.5, 0.0, 1.0, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_thresholds(rows: int, tau: float):
    query, key = means(2, 3, rows, 40, 64, torch.float32)
    mean, var = key.mean(2), key.var(2, unbiased=False)
    with nan_filled_allocations():
        actual = launch_thresholds(query, mean, var, scale_log2=SCALE * LOG2_E, tau=tau)
    oracle = thresholds(query.double(), mean.double(), var.double(), scale=SCALE, tau=tau)
    peer = thresholds(query, mean, var, scale=SCALE, tau=tau)
    terms = SCALE * LOG2_E * torch.einsum("bhid,bhd->bhi", query.abs(), mean.abs())
    scale = float(terms.max()) if math.isinf(tau) else float(terms.max() + oracle.abs().max())
    assert_close_to_oracle(actual, oracle, peer, scale=scale)


@pytest.mark.interpreted
def test_equal_keys_have_only_the_floor_of_the_variance():
    query, _ = means(1, 1, 3, 1, 64, torch.float32)
    zero = torch.zeros(1, 1, 64)
    actual = launch_thresholds(query, zero, zero, scale_log2=SCALE * LOG2_E, tau=2.0)
    torch.testing.assert_close(actual, torch.full((1, 1, 3), 2e-3))


@pytest.mark.interpreted
def test_operators_keep_their_promises():
    query, key = means(2, 3, 5, 7, 64, torch.float16)
    moments = torch.zeros(2, 3, 64)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_score_operator, (query, key, 0.125), test_utils=checks)
    arguments = (query, moments, moments, 0.125, 1.0)
    torch.library.opcheck(_threshold_operator, arguments, test_utils=checks)


def test_compiles(record_launches, compile_launch, target: str):
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    for dtype in kinds if target in ("sm_90", "gfx942") else kinds[:1]:
        query, key = means(1, 2, 70, 130, 128, dtype)
        (launch,) = record_launches(lambda q=query, k=key: scores_of(q, k))
        compiled = compile_launch(launch, target)
        if target == "sm_90" and dtype != torch.float32:
            assert "wgmma.mma_async" in compiled.asm["ptx"]
    moments = query.new_zeros(1, 2, 128)
    (launch,) = record_launches(
        lambda: launch_thresholds(query, moments, moments, scale_log2=1.0, tau=1.0)
    )
    compile_launch(launch, target)


def test_nothing_compiles_again_for_other_sizes(record_launches):
    def variants(shape: tuple[int, int, int, int], scale: float, tau: float) -> set[str]:
        query, key = means(*shape, 64, torch.bfloat16)
        moments = query.new_zeros(*shape[:2], 64)

        def launch() -> None:
            launch_score_blocks(query, key, scale_log2=scale)
            launch_thresholds(query, moments, moments, scale_log2=scale, tau=tau)

        return {launch.key for launch in record_launches(launch)}

    first = variants((1, 1, 1, 1), 1.0, 1.0)
    assert len(first) == 2
    for shape in ((1, 2, 3, 5), (2, 3, 64, 16), (1, 16, 17, 600)):
        for value in (0.0, 1.0, 0.125, 16.0):
            assert variants(shape, value, value) == first, (shape, value)
