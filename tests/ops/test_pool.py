"""Every implementation of pooling against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import solspark
from solspark.ops import pool as pool_module
from solspark.ops.pool import pool
from solspark.reference.pool import Pooled
from solspark.reference.pool import pool as reference
from solspark.testing import LAYOUTS, assert_close_to_oracle, make_qkv, nan_filled_allocations

FIELDS = ("query_means", "key_means", "value_means", "log_mass", "key_mean", "key_var")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def check(result: Pooled, tensors: tuple[Tensor, Tensor, Tensor], key_bias: Tensor | None) -> None:
    oracle = reference(*(item.double() for item in tensors), key_bias=key_bias)
    peer = reference(*tensors, key_bias=key_bias)
    for name in FIELDS:
        actual, expected = getattr(result, name), getattr(peer, name)
        assert actual.dtype == expected.dtype, name
        if actual.dtype == torch.float64:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
        else:
            assert_close_to_oracle(actual, getattr(oracle, name), expected, name=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 331])
def test_close_to_the_oracle(dtype: torch.dtype, tokens: int) -> None:
    tensors = make_qkv(2, tokens, 3, 64, dtype=dtype)
    check(pool(*tensors), tensors, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout: str) -> None:
    with nan_filled_allocations():
        result = pool(*make_qkv(2, 150, 3, 64, layout=layout))
    plain = pool(*make_qkv(2, 150, 3, 64))
    for name in FIELDS:
        assert torch.equal(getattr(result, name), getattr(plain, name)), name


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_qkv(2, 700, 3, 64)
    bias = torch.randn(2, 3, 700)
    whole = pool(*tensors), pool(*tensors, key_bias=bias)
    monkeypatch.setattr(pool_module, "CHUNK_BYTES", 3 * 64 * 2 * 3 * 64 * 4)
    parts = pool(*tensors), pool(*tensors, key_bias=bias)
    for one, other in zip(whole, parts, strict=True):
        for name in FIELDS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_key_bias(dtype: torch.dtype, heads: int) -> None:
    tensors = make_qkv(2, 331, 3, 64, dtype=dtype)
    bias = torch.randn(2, heads, 331)
    bias[0, :, 64:128] = -math.inf
    result = pool(*tensors, key_bias=bias)
    check(result, tensors, bias)
    assert result.live is not None and result.live.shape == (2, heads, 6)
    assert not result.live[0, :, 1].any() and result.live.sum() == heads * 11


def test_masked_keys_have_no_effect_whatever_they_hold() -> None:
    query, key, value = make_qkv(2, 200, 3, 64)
    keep = torch.arange(200) < torch.tensor([[150], [63]])
    clean = pool(query, key, value, key_bias=keep)
    key[~keep], value[~keep] = math.nan, math.inf
    dirty = pool(query, key, value, key_bias=keep)
    for name in FIELDS:
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name


def test_query_and_value_are_optional_and_lengths_free() -> None:
    query, key, value = make_qkv(1, 70, 4, 64, key_tokens=200, key_heads=2)
    pooled = pool(query, key, None)
    assert pooled.value_means is None and pooled.query_means is not None
    assert pooled.query_means.shape == (1, 4, 2, 64)
    pooled = pool(None, key, value, block=8)
    assert pooled.query_means is None and pooled.key_means.shape == (1, 2, 25, 64)
    record = solspark.last_call()
    assert record is not None and (record.operation, record.call.tail) == ("pool", "block8x8")


def test_bad_arguments_are_named() -> None:
    query, key, value = make_qkv(2, 70, 3, 64)
    with pytest.raises(ValueError, match=r"value: expected the shape of key, .* got \(2, 60"):
        pool(query, key, value[:, :60])
    with pytest.raises(TypeError, match=r"query: expected the dtype of key, torch.float32, got"):
        pool(query.half(), key, value)
    with pytest.raises(ValueError, match=r"key: expected \[B, L, H, D\], got shape \(70"):
        pool(query, key[0], value)
    with pytest.raises(ValueError, match=r"key: expected at least one token"):
        pool(query, key[:, :0], value[:, :0])
    with pytest.raises(TypeError, match=r"key: expected .*float16 or .* got torch.int32"):
        pool(None, key.int(), None)
    with pytest.raises(ValueError, match=r"key_bias: expected one value a key, .* got \(70, 70\)"):
        pool(query, key, value, key_bias=torch.zeros(70, 70))
    with pytest.raises(TypeError, match=r"key_bias: expected torch.bool or .* got torch.int64"):
        pool(query, key, value, key_bias=torch.zeros(70, dtype=torch.int64))
