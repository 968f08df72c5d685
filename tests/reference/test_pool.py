"""The reference of pooling against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.reference.pool import pool
from solspark.testing import make_qkv


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 129, 200])
@pytest.mark.parametrize("block", [64, 8])
def test_means_and_masses_of_every_block(tokens: int, block: int) -> None:
    query, key, value = make_qkv(2, tokens, 3, 16, dtype=torch.float64)
    pooled = pool(query, key, value, block=block)
    assert pooled.query_means is not None and pooled.value_means is not None
    for number in range(-(-tokens // block)):
        rows = slice(number * block, min((number + 1) * block, tokens))
        for source, means in (
            (query, pooled.query_means),
            (key, pooled.key_means),
            (value, pooled.value_means),
        ):
            expected = source[:, rows].sum(1) / (rows.stop - rows.start)
            torch.testing.assert_close(means[:, :, number], expected)
        mass = pooled.log_mass[:, :, number]
        torch.testing.assert_close(mass, torch.full_like(mass, math.log(rows.stop - rows.start)))
    assert pooled.live is None


def test_statistics_give_every_block_the_same_weight() -> None:
    _, key, _ = make_qkv(1, 130, 2, 8, dtype=torch.float64)
    pooled = pool(None, key, None)
    means = torch.stack([key[:, :64].mean(1), key[:, 64:128].mean(1), key[:, 128:].mean(1)], 2)
    torch.testing.assert_close(pooled.key_mean, means.mean(2))
    torch.testing.assert_close(pooled.key_var, means.var(2, correction=0))
    assert pooled.query_means is None and pooled.value_means is None


def test_statistics_are_those_of_the_rounded_means() -> None:
    _, key, _ = make_qkv(1, 200, 2, 8, dtype=torch.bfloat16)
    pooled = pool(None, key, None)
    assert pooled.key_means.dtype == torch.bfloat16
    assert pooled.key_mean.dtype == pooled.key_var.dtype == torch.float32
    torch.testing.assert_close(pooled.key_mean, pooled.key_means.float().mean(2))
    torch.testing.assert_close(pooled.key_var, pooled.key_means.float().var(2, correction=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    query, key, value = make_qkv(1, 100, 2, 8, dtype=dtype, amplitude=30.0)
    pooled = pool(query, key, value)
    wide = pool(query.float(), key.float(), value.float())
    assert pooled.query_means is not None and pooled.query_means.dtype == torch.float32
    assert torch.equal(pooled.query_means, wide.query_means)
    assert torch.equal(pooled.key_means, wide.key_means.to(dtype))


def test_key_bias_weighs_means_and_masses() -> None:
    _, key, value = make_qkv(2, 100, 3, 8, dtype=torch.float64)
    bias = torch.randn(2, 3, 100, dtype=torch.float64)
    pooled = pool(None, key, value, key_bias=bias)
    weight = bias.exp().transpose(1, 2)[..., None]
    for number, rows in enumerate((slice(0, 64), slice(64, 100))):
        mass = weight[:, rows].sum(1)
        torch.testing.assert_close(pooled.log_mass[:, :, number], mass.log()[..., 0])
        expected = (weight * key)[:, rows].sum(1) / mass
        torch.testing.assert_close(pooled.key_means[:, :, number], expected)
        expected = (weight * value)[:, rows].sum(1) / mass
        torch.testing.assert_close(pooled.value_means[:, :, number], expected)


def test_masked_keys_have_no_effect_whatever_they_hold() -> None:
    _, key, value = make_qkv(1, 200, 2, 8, dtype=torch.float64)
    keep = torch.ones(200, dtype=torch.bool)
    keep[10:30] = False
    keep[64:128] = False  # a block without a live key
    clean = pool(None, key, value, key_bias=keep)
    key[:, ~keep], value[:, ~keep] = math.nan, math.inf
    dirty = pool(None, key, value, key_bias=keep)
    for name in ("key_means", "value_means", "log_mass", "key_mean", "key_var"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
    assert clean.live is not None
    assert clean.live[0, 0].tolist() == [True, False, True, True]
    assert clean.log_mass[0, 0, 1] == -math.inf
    torch.testing.assert_close(clean.log_mass[0, 0, 0].exp().item(), 44.0)
    assert not clean.key_means[:, :, 1].any()
    torch.testing.assert_close(clean.key_mean, clean.key_means[:, :, [0, 2, 3]].mean(2))
    expected = clean.key_means[:, :, [0, 2, 3]].var(2, correction=0)
    torch.testing.assert_close(clean.key_var, expected)


@pytest.mark.parametrize(
    "shape", [(100,), (2, 100), (2, 1, 100), (2, 3, 100), (2, 1, 1, 100), (1, 3, 1, 100)]
)
def test_key_bias_forms_mean_the_same(shape: tuple[int, ...]) -> None:
    _, key, value = make_qkv(2, 100, 3, 8, dtype=torch.float64)
    full = torch.randn(100, dtype=torch.float64)
    one = pool(None, key, value, key_bias=full)
    other = pool(None, key, value, key_bias=full.expand(shape))
    torch.testing.assert_close(one.key_means, other.key_means)
    torch.testing.assert_close(one.log_mass.expand(2, 3, 2), other.log_mass.expand(2, 3, 2))
