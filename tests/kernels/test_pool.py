"""Pooling kernels: close to the oracle in the interpreter, and compiled for every target."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from solspark.ops.pool import _operator as operator
from solspark.reference.pool import pool as reference
from solspark.testing import assert_close_to_oracle, make_qkv, nan_filled_allocations

pytest.importorskip("triton")

from solspark.kernels.pool import launch_pool

NAMES = ("query_means", "key_means", "value_means", "log_mass", "key_mean", "key_var")

# The interpreter computes with numpy, which warns of 0 * inf and log 0 even where they are meant.
extremes = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def test_in_the_interpreter(interpret):
    interpret(__file__)


def run(query: Tensor | None, key: Tensor, value: Tensor | None, bias: Tensor | None = None):
    with nan_filled_allocations():
        result = launch_pool(query, key, value, bias)
    return dict(zip(NAMES, result, strict=True))


def check(query: Tensor | None, key: Tensor, value: Tensor | None, bias: Tensor | None = None):
    result = run(query, key, value, bias)
    doubles = [None if item is None else item.double() for item in (query, key, value)]
    oracle = reference(*doubles, key_bias=bias)
    peer = reference(query, key, value, key_bias=bias)
    for name in NAMES[:3]:
        expected = getattr(oracle, name)
        if expected is not None:
            assert result[name].dtype == getattr(peer, name).dtype
            assert_close_to_oracle(result[name], expected, getattr(peer, name), name=name)
    mass = result["log_mass"].expand(oracle.key_means.shape[:3])
    heads = oracle.log_mass.expand_as(mass)
    assert_close_to_oracle(mass, heads, peer.log_mass.expand_as(mass), name="log_mass")

    # The statistics are those of the means as they were rounded.
    live = (mass > -math.inf)[..., None]
    moments = []
    for means in (result["key_means"].double(), result["key_means"].float()):
        count = live.sum(2).clamp(min=1)
        mean = (means * live).sum(2) / count
        moments.append((mean, ((means - mean[:, :, None]) * live).square().sum(2) / count))
    for place, name in enumerate(("key_mean", "key_var")):
        assert_close_to_oracle(result[name], moments[0][place], moments[1][place], name=name)
    assert (result["key_var"] >= 0).all()
    return result


@pytest.mark.interpreted
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130, 331])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_close_to_the_oracle(dtype: torch.dtype, tokens: int):
    check(*make_qkv(2 if tokens < 70 else 1, tokens, 3, 64, dtype=dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("lengths", [(70, 200), (200, 1)])
def test_lengths_of_query_and_key_are_free(lengths: tuple[int, int]):
    check(*make_qkv(1, lengths[0], 2, 128, key_tokens=lengths[1], dtype=torch.float16))


@pytest.mark.interpreted
def test_what_was_not_given_has_no_means():
    query, key, value = make_qkv(1, 70, 2, 64, dtype=torch.float16)
    full = run(query, key, value)
    for given in ((None, key, value), (query, key, None), (None, key, None)):
        result = run(*given)
        for name, tensor in zip(NAMES[:3], given, strict=True):
            if tensor is None:
                assert result[name].numel() == 0
            else:
                assert result[name].equal(full[name])
        for name in NAMES[3:]:
            assert result[name].equal(full[name])


@extremes
@pytest.mark.interpreted
@pytest.mark.parametrize("heads", [1, 3])
def test_key_bias(heads: int):
    """Weights of any size, dead keys that hold NaN, and a block without a live key."""
    query, key, value = make_qkv(2, 200, 3, 64, dtype=torch.float16)
    bias = torch.randn(2, heads, 200) * 3 + torch.tensor([80.0, -80.0])[:, None, None]
    bias[0, :, 64:128] = -math.inf
    bias[1, :, 3:7] = bias[1, :, 190:] = -math.inf
    key[0, 70], value[0, 71] = math.nan, math.inf
    key[1, 4], value[1, 5] = -math.inf, math.nan
    result = check(query, key, value, bias)
    assert (result["log_mass"][0, :, 1] == -math.inf).all()
    assert not result["key_means"][0, :, 1].any() and not result["value_means"][0, :, 1].any()


@extremes
@pytest.mark.interpreted
def test_no_key_is_live():
    query, key, value = make_qkv(1, 70, 2, 64, dtype=torch.float16)
    result = check(query, key, value, torch.full((1, 1, 70), -math.inf))
    assert not result["key_mean"].any() and not result["key_var"].any()


@pytest.mark.interpreted
def test_a_large_offset_costs_the_variance_nothing():
    query, key, value = make_qkv(1, 640, 1, 64, dtype=torch.float32)
    result = check(query, key + 200.0, value)
    expected = run(query, key, value)["key_var"]
    torch.testing.assert_close(result["key_var"], expected, rtol=1e-2, atol=0)


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["fused", "interleaved", "heads_first", "guarded"])
def test_layouts_change_no_bit(layout: str):
    bias = torch.randn(2, 1, 70) if layout == "guarded" else None
    plain = run(*make_qkv(2, 70, 3, 64, dtype=torch.float16), bias)
    views = run(*make_qkv(2, 70, 3, 64, dtype=torch.float16, layout=layout), bias)
    for name in NAMES:
        assert views[name].equal(plain[name]), name


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["fused", "guarded"])
def test_operator_keeps_its_promises(layout: str):
    query, key, value = make_qkv(2, 70, 3, 64, dtype=torch.float16, layout=layout)
    for arguments in (
        (query, key, value, None),
        (None, key, None, None),
        (query, key, None, torch.randn(2, 1, 70)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiles(record_launches, compile_launch, target: str):
    for dtype, biased in ((torch.bfloat16, True), (torch.float16, False)):
        if not biased and target != "sm_90":
            continue
        query, key, value = make_qkv(2, 130, 3, 128, dtype=dtype)
        bias = torch.zeros(2, 3, 130) if biased else None
        launches = record_launches(lambda q=query, k=key, v=value, b=bias: launch_pool(q, k, v, b))
        compiled = [compile_launch(launch, target) for launch in launches]
        if "ptx" in compiled[0].asm:
            # Q, K and V come in whole 16-byte vectors: this kernel is bound by reading them.
            # A program pools one block of 64 rows of 256 bytes; the code of K is that of V.
            assert compiled[0].asm["ptx"].count("ld.global.v4") >= 2 * 64 * 256 // (32 * 16)


def test_nothing_compiles_again_for_other_lengths(record_launches):
    def variants(batch: int, tokens: int, heads: int, key_tokens: int) -> set[str]:
        tensors = make_qkv(
            batch, tokens, heads, 64, key_tokens=key_tokens, dtype=torch.bfloat16
        )
        return {launch.key for launch in record_launches(lambda: launch_pool(*tensors, None))}

    first = variants(1, 64, 1, 64)
    assert len(first) == 2
    for shape in ((1, 1, 1, 1), (1, 65, 2, 63), (2, 130, 3, 331), (3, 1024, 16, 64)):
        assert variants(*shape) == first, shape
