"""Every implementation of planned attention against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import solspark
from solspark import BlockSummaries, UnsupportedError, plan_from_mask
from solspark.ops import block_sparse_attention as module
from solspark.ops.block_sparse_attention import TAILS, block_sparse_attention
from solspark.ops.pool import pool
from solspark.reference.block_sparse_attention import block_sparse_attention as reference
from solspark.reference.quantize_fp8 import fp8_attention_inputs
from solspark.testing import (
    LAYOUTS,
    PeakMemory,
    assert_close_to_oracle,
    make_qkv,
    nan_filled_allocations,
    random_mask,
)

HALF_AND_SINGLE = [torch.float32, torch.float16, torch.bfloat16]
Tensors = tuple[Tensor, Tensor, Tensor]


def summaries_of(key: Tensor, value: Tensor, tail: str = "query") -> BlockSummaries:
    pooled = pool(None, key, value, block=8 if tail == "block8x8" else 64)
    assert pooled.value_means is not None
    log_mass = pooled.log_mass.float().expand(pooled.key_means.shape[:3])
    return BlockSummaries(pooled.key_means[:, None], pooled.value_means[:, None], log_mass[:, None])


def double(summaries: BlockSummaries | None) -> BlockSummaries | None:
    if summaries is None:
        return None
    return BlockSummaries(
        summaries.keys.double(), summaries.values.double(), summaries.log_mass, summaries.parents
    )


def check(tensors: Tensors, mask: Tensor, summaries: BlockSummaries | None, **options: Any) -> None:
    """Run on the tensors with free memory full of NaN, and judge output and lse."""
    tokens = {"query_tokens": tensors[0].shape[1], "key_tokens": tensors[1].shape[1]}
    plan = plan_from_mask(mask, **tokens)
    with nan_filled_allocations():
        result = block_sparse_attention(
            *tensors, plan, summaries=summaries, return_lse=True, **options
        )
    options.pop("kv_splits", None)
    options.pop("impl", None)
    peer = reference(*tensors, plan, summaries=summaries, return_lse=True, **options)
    doubles = [item.double() for item in tensors]
    oracle = reference(*doubles, plan, summaries=double(summaries), return_lse=True, **options)
    assert result[0].dtype == tensors[0].dtype and result[0].shape == tensors[0].shape
    assert result[1].shape == tensors[0].shape[:3]
    for name, actual, best, same in zip(("out", "lse"), result, oracle, peer, strict=True):
        assert actual.dtype == same.dtype
        if actual.dtype == torch.float64:
            torch.testing.assert_close(actual, best, rtol=1e-12, atol=1e-13)
        else:
            assert_close_to_oracle(actual, best, same, name=name)


@pytest.mark.parametrize("dtype", [torch.float64, *HALF_AND_SINGLE], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_close_to_the_oracle(dtype: torch.dtype, tail: str) -> None:
    tensors = make_qkv(2, 331, 3, 64, dtype=dtype)
    check(
        tensors,
        random_mask(2, 3, 331, 331),
        summaries_of(tensors[1], tensors[2], tail),
        tail=tail,
    )


@pytest.mark.parametrize("head_dim", [8, 72, 128])
def test_head_dims(head_dim: int) -> None:
    tensors = make_qkv(1, 150, 2, head_dim)
    check(tensors, random_mask(1, 2, 150, 150), summaries_of(*tensors[1:]))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 130), (130, 1), (65, 63), (1001, 503)])
@pytest.mark.parametrize("tail", TAILS)
def test_query_and_key_lengths_are_free(lengths: tuple[int, int], tail: str) -> None:
    tensors = make_qkv(1, lengths[0], 2, 64, key_tokens=lengths[1])
    mask = random_mask(1, 2, *lengths)
    check(tensors, mask, summaries_of(tensors[1], tensors[2], tail), tail=tail)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tail", ["query", "block"])
def test_layouts_change_nothing(layout: str, tail: str) -> None:
    plan = plan_from_mask(random_mask(2, 3, 200, 200), query_tokens=200, key_tokens=200)
    plain = make_qkv(2, 200, 3, 64)
    summaries = summaries_of(plain[1], plain[2])
    with nan_filled_allocations():
        out = block_sparse_attention(
            *make_qkv(2, 200, 3, 64, layout=layout), plan, summaries=summaries, tail=tail
        )
    expected = block_sparse_attention(*plain, plan, summaries=summaries, tail=tail)
    assert isinstance(out, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(out, expected)


def test_a_row_stride_of_gigabytes() -> None:
    """Three rows 2^30 elements apart, past int32, in a buffer that is never filled."""
    tensors = make_qkv(1, 3, 2, 64, dtype=torch.float16)
    buffer = torch.empty(2 * 2**30 + 2**12, dtype=torch.float16)
    far = [buffer.as_strided((1, 3, 2, 64), (1, 2**30, 64, 1), place * 256) for place in range(3)]
    for view, tensor in zip(far, tensors, strict=True):
        view.copy_(tensor)
    plan = plan_from_mask(torch.ones(1, 2, 1, 1, dtype=torch.bool), query_tokens=3, key_tokens=3)
    out = block_sparse_attention(far[0], far[1], far[2], plan)
    expected = block_sparse_attention(*tensors, plan)
    assert isinstance(out, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(out, expected)


def test_size_one_dimensions_may_have_any_stride() -> None:
    query, key, value = make_qkv(1, 100, 1, 64)
    odd = [item.as_strided(item.shape, (7, 64, 13, 1)) for item in (query, key, value)]
    plan = plan_from_mask(random_mask(1, 1, 100, 100), query_tokens=100, key_tokens=100)
    out = block_sparse_attention(odd[0], odd[1], odd[2], plan)
    expected = block_sparse_attention(query, key, value, plan)
    assert isinstance(out, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kv_splits", [2, 4, 7, 40])
def test_splits_even_empty_ones_stay_within_rounding(tail: str, kv_splits: int) -> None:
    tensors = make_qkv(1, 331, 2, 64)
    summaries = summaries_of(tensors[1], tensors[2], tail)
    check(tensors, random_mask(1, 2, 331, 331), summaries, tail=tail, kv_splits=kv_splits)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("form", ["float", "bool", "per_head"])
def test_key_bias(tail: str, form: str) -> None:
    tensors = make_qkv(2, 331, 3, 64)
    bias = torch.randn(2, 3 if form == "per_head" else 1, 331)
    bias[0, :, 64:140] = -math.inf
    key_bias = bias[:, 0] > 0 if form == "bool" else bias
    check(
        tensors,
        random_mask(2, 3, 331, 331),
        summaries_of(tensors[1], tensors[2], tail),
        tail=tail,
        key_bias=key_bias,
    )


@pytest.mark.parametrize("per_head", [False, True])
def test_masked_keys_have_no_effect_whatever_they_hold(per_head: bool) -> None:
    query, key, value = make_qkv(1, 150, 4, 64, key_heads=2)
    plan = plan_from_mask(random_mask(1, 4, 150, 150), query_tokens=150, key_tokens=150)
    keep = torch.rand(1, 4 if per_head else 1, 150) < 0.5
    keep[..., 100:] = False
    expected = block_sparse_attention(query, key, value, plan, key_bias=keep)
    key[:, 100:], value[:, 100:] = math.nan, math.inf
    out = block_sparse_attention(query, key, value, plan, key_bias=keep)
    assert isinstance(out, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("summary_heads", [2, 8])
@pytest.mark.parametrize("tail", ["query", "block"])
def test_grouped_heads_equal_repeated_ones(summary_heads: int, tail: str) -> None:
    query, key, value = make_qkv(2, 200, 8, 64, key_tokens=300, key_heads=2)
    mask = random_mask(2, 8, 200, 300)
    plan = plan_from_mask(mask, query_tokens=200, key_tokens=300)
    wide_key, wide_value = (item.repeat_interleave(4, 2) for item in (key, value))
    wide = summaries_of(wide_key, wide_value)
    summaries = wide if summary_heads == 8 else summaries_of(key, value)
    out = block_sparse_attention(query, key, value, plan, summaries=summaries, tail=tail)
    expected = block_sparse_attention(query, wide_key, wide_value, plan, summaries=wide, tail=tail)
    torch.testing.assert_close(out, expected)
    check((query, key, value), mask, summaries, tail=tail)


@pytest.mark.parametrize("tail", ["query", "block"])
def test_summaries_of_several_parents(tail: str) -> None:
    tensors = make_qkv(2, 500, 3, 64)
    keys, values = (torch.randn(2, 3, 3, 8, 64) for _ in range(2))
    log_mass = torch.randn(2, 3, 3, 8)
    log_mass[0, 1, 2, :3] = -math.inf
    parents = torch.tensor([2, 0, 0, 1, 2, 1, 1, 0], dtype=torch.int32)
    summaries = BlockSummaries(keys, values, log_mass, parents)
    check(tensors, random_mask(2, 3, 500, 500), summaries, tail=tail)


def test_heads_chunks_and_steps_change_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_qkv(2, 1000, 4, 64, key_heads=2)
    mask = random_mask(2, 4, 1000, 1000, density=0.5)
    summaries = summaries_of(*tensors[1:])
    monkeypatch.setattr(module, "HEAD_BYTES", 1)
    monkeypatch.setattr(module, "LIST_BLOCKS", 3)
    monkeypatch.setattr(module, "STEP_BLOCKS", 7)
    monkeypatch.setattr(module, "TAIL_LOGITS", 1)
    check(tensors, mask, summaries)
    check(tensors, mask, summaries, tail="block", kv_splits=3, key_bias=torch.randn(1000))


def test_everything_exact_is_dense_attention() -> None:
    tensors = make_qkv(2, 300, 3, 64)
    mask = torch.ones(2, 3, 5, 5, dtype=torch.bool)
    plan = plan_from_mask(mask, query_tokens=300, key_tokens=300)
    out = block_sparse_attention(*tensors, plan, summaries=summaries_of(*tensors[1:]))
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(item.transpose(1, 2) for item in tensors)
    )
    torch.testing.assert_close(out, dense.transpose(1, 2))


def test_rows_without_a_key_are_zero() -> None:
    """An empty row, a block read exactly whose keys are all masked, and masked first blocks."""
    tensors = make_qkv(1, 192, 2, 64)
    mask = torch.zeros(1, 2, 3, 3, dtype=torch.bool)
    mask[:, :, 1, 0] = True
    mask[:, :, 2, :2] = True
    plan = plan_from_mask(mask, query_tokens=192, key_tokens=192)
    keep = torch.arange(192) >= 64
    with nan_filled_allocations():
        out, lse = block_sparse_attention(*tensors, plan, key_bias=keep, return_lse=True)
    assert not out[:, :128].any() and (lse[:, :128] == -math.inf).all()
    assert out[:, 128:].all() and lse[:, 128:].isfinite().all()
    check(tensors, mask, None, key_bias=keep)


def test_each_sample_and_head_follows_its_own_map() -> None:
    tensors = make_qkv(3, 200, 2, 64)
    mask = random_mask(3, 2, 200, 200)
    summaries = summaries_of(*tensors[1:])
    plan = plan_from_mask(mask, query_tokens=200, key_tokens=200)
    together = block_sparse_attention(*tensors, plan, summaries=summaries)
    assert isinstance(together, Tensor)
    for sample in range(3):
        own = [item[sample : sample + 1] for item in tensors]
        alone = block_sparse_attention(
            own[0],
            own[1],
            own[2],
            plan_from_mask(mask[sample : sample + 1], query_tokens=200, key_tokens=200),
            summaries=summaries_of(own[1], own[2]),
        )
        assert isinstance(alone, Tensor)
        torch.testing.assert_close(together[sample], alone[0])


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_large_magnitudes(dtype: torch.dtype) -> None:
    """Queries and keys near 1e3 make one-hot softmax rows; values with an offset add up."""
    query, key, value = make_qkv(1, 300, 2, 64, dtype=dtype)
    value = value + torch.where(torch.arange(64) % 2 == 0, 200, -200).to(dtype)
    tensors = (query * 1000, key * 1000, value)
    check(tensors, random_mask(1, 2, 300, 300), summaries_of(*tensors[1:]))


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_outlier_channels(dtype: torch.dtype) -> None:
    query, key, value = make_qkv(1, 300, 2, 128, dtype=dtype)
    key[..., [3, 50, 51, 100]] *= 50
    check((query, key, value), random_mask(1, 2, 300, 300), summaries_of(key, value))


@pytest.mark.parametrize("which", ["query", "key", "value", "block", "head"])
def test_zeros(which: str) -> None:
    query, key, value = make_qkv(1, 200, 2, 64)
    if which in ("query", "key", "value"):
        {"query": query, "key": key, "value": value}[which].zero_()
    elif which == "block":
        key[:, 64:128] = 0
        value[:, 64:128] = 0
    else:
        for item in (query, key, value):
            item[:, :, 1] = 0
    check((query, key, value), random_mask(1, 2, 200, 200), summaries_of(key, value))


@pytest.mark.parametrize("tail", TAILS)
def test_gradients_of_partial_blocks(tail: str) -> None:
    """The eager implementation differentiates: its gradients are those of the reference."""
    mask = random_mask(1, 2, 100, 150)
    plan = plan_from_mask(mask, query_tokens=100, key_tokens=150)
    gradients = []
    for function in (block_sparse_attention, reference):
        leaves = [
            item.requires_grad_()
            for item in make_qkv(1, 100, 2, 8, key_tokens=150, dtype=torch.float64)
        ]
        summaries = summaries_of(leaves[1], leaves[2], tail)
        out, lse = function(*leaves, plan, summaries=summaries, tail=tail, return_lse=True)
        total = out.square().sum() + lse[lse.isfinite()].sin().sum()
        gradients.append(torch.autograd.grad(total, leaves))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tail", ["query", "block", "none"])
def test_fp8_is_attention_on_rounded_inputs(tail: str) -> None:
    query, key, value = make_qkv(2, 331, 4, 64, key_heads=2, dtype=torch.bfloat16)
    summaries = None if tail == "none" else summaries_of(key, value)
    plan = plan_from_mask(random_mask(2, 4, 331, 331), query_tokens=331, key_tokens=331)
    options: dict[str, Any] = {"tail": tail, "return_lse": True, "key_bias": torch.randn(2, 331)}
    call = block_sparse_attention
    found = call(query, key, value, plan, summaries=summaries, precision="fp8", **options)
    *rounded, summaries8 = fp8_attention_inputs(query, key, value, summaries)
    expected = call(*rounded, plan, summaries=summaries8, **options)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])
    exact = call(query, key, value, plan, summaries=summaries, **options)[0].double()
    assert 0.005 < float((found[0] - exact).norm() / exact.norm()) < 0.06


def test_fp8_rounds_one_number_as_e4m3_does() -> None:
    """Three bits of mantissa, a power of two as scale, each head and channel its own."""
    ones = torch.ones(1, 2, 1, 8)
    plan = plan_from_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool), query_tokens=2, key_tokens=2)
    value = torch.tensor([1.0, 1.06, 1.07, 17.0, 500.0, 3e-9, 0.0, -0.3]).expand(1, 2, 1, 8)
    out = block_sparse_attention(ones, ones, value, plan, precision="fp8")
    nearest = [1.0, 1.0, 1.125, 16.0, 512.0, 3e-9, 0.0, -0.3125]
    torch.testing.assert_close(out[0, 0, 0], torch.tensor(nearest), rtol=0.05, atol=0)
    assert out[0, 0, 0, [0, 1, 2, 3, 4, 6, 7]].tolist() == nearest[:5] + nearest[6:]


def test_fp8_heads_that_share_keys_may_mask_different_ones() -> None:
    query, key, value = make_qkv(1, 200, 4, 64, key_heads=2)
    plan = plan_from_mask(random_mask(1, 4, 200, 200), query_tokens=200, key_tokens=200)
    bias = torch.zeros(1, 4, 200)
    bias[0, 1::2, :70] = -math.inf
    options: dict[str, Any] = {"key_bias": bias, "precision": "fp8"}
    found = block_sparse_attention(query, key, value, plan, **options)
    wide = (item.repeat_interleave(2, 2) for item in (key, value))
    assert found.equal(block_sparse_attention(query, *wide, plan, **options))


def test_fp8_masked_keys_have_no_effect_whatever_they_hold() -> None:
    query, key, value = make_qkv(1, 200, 2, 64)
    plan = plan_from_mask(random_mask(1, 2, 200, 200), query_tokens=200, key_tokens=200)
    keep = torch.arange(200) % 3 != 0
    options: dict[str, Any] = {"key_bias": keep, "precision": "fp8"}
    clean = [item.masked_fill(~keep[:, None, None], 0.0) for item in (key, value)]
    dirty = [item.masked_fill(~keep[:, None, None], math.nan) for item in (key, value)]
    expected = block_sparse_attention(query, *clean, plan, **options)
    assert block_sparse_attention(query, *dirty, plan, **options).equal(expected)


def test_inputs_are_left_alone_and_results_repeat() -> None:
    tensors = make_qkv(1, 331, 3, 64, dtype=torch.bfloat16)
    before = [item.clone() for item in tensors]
    summaries = summaries_of(*tensors[1:])
    plan = plan_from_mask(random_mask(1, 3, 331, 331), query_tokens=331, key_tokens=331)
    runs = [block_sparse_attention(*tensors, plan, summaries=summaries) for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)  # type: ignore[arg-type]
    assert all(torch.equal(item, old) for item, old in zip(tensors, before, strict=True))


def test_work_space_stays_small() -> None:
    """At T = 8,192 and 8 heads of 64 one head's logits are 256 MiB; all that is used is less."""
    tensors = make_qkv(1, 8192, 8, 64)
    mask = random_mask(1, 8, 8192, 8192, density=0.05)
    plan = plan_from_mask(mask, query_tokens=8192, key_tokens=8192)
    summaries = summaries_of(*tensors[1:])
    with PeakMemory() as peak:
        block_sparse_attention(*tensors, plan, summaries=summaries)
    if peak.bytes is None:
        pytest.skip("this system does not tell a process its peak memory")
    assert peak.bytes < 250 * 2**20


def test_grouped_heads_are_not_repeated_in_memory() -> None:
    """Sixteen query heads to a key head: repeating K and V would take 30 MiB more."""
    peaks = []
    for key_heads in (16, 1):
        tensors = make_qkv(1, 4096, 16, 64, key_heads=key_heads)
        mask = random_mask(1, 16, 4096, 4096, density=0.05)
        plan = plan_from_mask(mask, query_tokens=4096, key_tokens=4096)
        block_sparse_attention(*tensors, plan)
        with PeakMemory() as peak:
            block_sparse_attention(*tensors, plan)
        if peak.bytes is None:
            pytest.skip("this system does not tell a process its peak memory")
        peaks.append(peak.bytes)
    assert peaks[1] < peaks[0] + 12 * 2**20


def test_the_record_tells_what_served_and_how_dense() -> None:
    tensors = make_qkv(1, 331, 3, 64)
    mask = random_mask(1, 3, 331, 331)
    plan = plan_from_mask(mask, query_tokens=331, key_tokens=331)
    block_sparse_attention(*tensors, plan, impl="eager", kv_splits=2)
    record = solspark.last_call()
    assert record is not None
    assert (record.operation, record.implementation) == ("block_sparse_attention", "eager")
    assert record.call.tail == "none" and record.call.kv_splits == 2
    assert record.density == pytest.approx(float(mask.double().mean()))
    with pytest.raises(UnsupportedError):
        block_sparse_attention(*tensors, plan, impl="hopper")


def test_bad_arguments_are_named() -> None:
    query, key, value = make_qkv(2, 200, 4, 64, key_heads=2)
    plan = plan_from_mask(random_mask(2, 4, 200, 200), query_tokens=200, key_tokens=200)
    call = block_sparse_attention
    with pytest.raises(ValueError, match=r"key: expected \[2, Lk, Hk dividing 4, 64\], got \(2, 2"):
        call(query, key[:, :, :1].repeat(1, 1, 3, 1), value, plan)
    with pytest.raises(TypeError, match=r"key: expected the dtype of query, torch.float32, got"):
        call(query, key.half(), value.half(), plan)
    with pytest.raises(ValueError, match=r"value: expected the shape of key, .* got \(2, 199"):
        call(query, key, value[:, 1:], plan)
    with pytest.raises(ValueError, match=r"query: expected a head dim that is a multiple of 8"):
        call(query[..., :60], key[..., :60], value[..., :60], plan)
    with pytest.raises(ValueError, match=r"plan: expected one for 199 query and 200 key tokens"):
        call(query[:, 1:], key, value, plan)
    with pytest.raises(ValueError, match=r"plan: expected batch 1 and 4 heads, got \(2, 4\)"):
        call(query[:1], key[:1], value[:1], plan)
    with pytest.raises(TypeError, match=r"plan: expected a BlockPlan, got Tensor"):
        call(query, key, value, plan.bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tail: expected one of 'query', .* got 'row'"):
        call(query, key, value, plan, tail="row")
    summaries = summaries_of(key, value)
    with pytest.raises(ValueError, match=r"summaries.keys: expected \[2, P, 4 or 2, 25, 64\] with"):
        call(query, key, value, plan, summaries=summaries, tail="block8x8")
    with pytest.raises(TypeError, match=r"summaries.keys: expected the dtype of query"):
        call(query, key, value, plan, summaries=double(summaries))
    two = torch.cat([summaries.keys] * 2, 1)
    wrong = BlockSummaries(two, two, torch.zeros(two.shape[:4]), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"summaries.parents: expected \[4\], got \(3,\)"):
        call(query, key, value, plan, summaries=wrong)
    with pytest.raises(ValueError, match=r"kv_splits: expected an int >= 1, got 0"):
        call(query, key, value, plan, kv_splits=0)
    with pytest.raises(ValueError, match=r"precision: expected one of 'native', 'fp8', got 'int8'"):
        call(query, key, value, plan, precision="int8")
    with pytest.raises(ValueError, match=r"scale: expected a finite number, got inf"):
        call(query, key, value, plan, scale=math.inf)
    with pytest.raises(TypeError, match=r"return_lse: expected a bool, got 1"):
        call(query, key, value, plan, return_lse=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"key_bias: expected one value a key, the same for every"):
        call(query, key, value, plan, key_bias=torch.zeros(2, 4, 200, 200))
