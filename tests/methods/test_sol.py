"""The public entry of Sol-Attn: every option, every refusal, and what a call reports."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sol_attn as compatible
import sol_attn.triton_ref as compatible_reference
import solspark
from solspark import SolStats, UnsupportedError, get_sol_attn_backend, mask_from_plan, sol_attn
from solspark.ops import _dispatch
from solspark.plan.select import plan_sol
from solspark.reference.sol import sol_attn as reference
from solspark.testing import (
    LAYOUTS,
    PeakMemory,
    assert_close_to_oracle,
    make_qkv,
    nan_filled_allocations,
)

TAILS = ["query", "block", "block8x8", "none"]


def dense(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    result = torch.nn.functional.scaled_dot_product_attention(
        *(item.transpose(1, 2) for item in (query, key, value)), **options
    )
    return result.transpose(1, 2)


# Dense attention as a limit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"tau": -1e9},
        {"tau": -math.inf, "thresh_type": "exact", "local_radius": -1},
        {"topk_ratio": 1.0},
        {"sink_tokens": 331},
        {"sinks": [(0, 200), (150, 331)], "tau": 1e9},
        {"dense_queries": [(0, 331)], "topk_ratio": 0.1},
        {"local_radius": 100},
        {"topk_ratio": 1.0, "kv_splits": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("tail", TAILS)
def test_everything_exact_is_dense_attention(options: dict, tail: str) -> None:
    tensors = make_qkv(2, 331, 3, 64)
    out, stats = sol_attn(*tensors, tail=tail, return_stats=True, **options)
    torch.testing.assert_close(out, dense(*tensors))
    assert stats.density == 1.0


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("tail", TAILS)
def test_two_blocks_with_the_local_band_are_dense(tokens: int, tail: str) -> None:
    tensors = make_qkv(1, tokens, 2, 128)
    torch.testing.assert_close(sol_attn(*tensors, tail=tail), dense(*tensors))


def test_scale_reaches_scores_thresholds_and_logits() -> None:
    tensors = make_qkv(1, 331, 2, 64)
    scaled = (tensors[0] * 2, tensors[1], tensors[2])
    for options in ({"topk_ratio": 0.3}, {"tau": 0.5}):
        torch.testing.assert_close(
            sol_attn(*tensors, scale=0.25, **options), sol_attn(*scaled, scale=0.125, **options)
        )
    out = sol_attn(*tensors, scale=0.5, tau=-1e9)
    torch.testing.assert_close(out, dense(*tensors, scale=0.5))


def test_scale_reaches_the_floor_of_the_thresholds() -> None:
    """Scores that differ by less than the floor of their variance select nothing."""
    tensors = make_qkv(1, 331, 2, 64)
    _, usual = sol_attn(*tensors, local_radius=-1, return_stats=True)
    _, tiny = sol_attn(*tensors, local_radius=-1, scale=1e-5, return_stats=True)
    assert int(usual.exact_blocks) > 0 and int(tiny.exact_blocks) == 0


# Every token once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["query", "block", "block8x8"])
@pytest.mark.parametrize("kv_splits", [1, 3])
def test_zero_queries_average_every_value_once(tail: str, kv_splits: int) -> None:
    """With all logits zero each key has weight one: the denominator is T, the output the mean."""
    tokens = 331
    query, key, value = make_qkv(2, tokens, 3, 64, dtype=torch.float64)
    for options in ({"topk_ratio": 0.3}, {"tau": 1e9, "local_radius": -1}, {"sinks": [(70, 90)]}):
        out, lse = sol_attn(
            query * 0, key, value, tail=tail, kv_splits=kv_splits, return_lse=True, **options
        )
        torch.testing.assert_close(out, value.mean(1, keepdim=True).expand_as(out))
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(tokens)))


@pytest.mark.parametrize("tail", ["query", "block", "block8x8"])
def test_zero_queries_weigh_every_value_by_its_bias_once(tail: str) -> None:
    query, key, value = make_qkv(2, 331, 3, 64, dtype=torch.float64)
    bias = torch.randn(2, 3, 331, dtype=torch.float64)
    bias[..., 100:200] = -math.inf
    out, lse = sol_attn(
        query * 0, key, value, key_bias=bias, tail=tail, topk_ratio=0.3, return_lse=True
    )
    weight = bias.softmax(-1).transpose(1, 2)[..., None]
    torch.testing.assert_close(out, (weight * value).sum(1, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, bias.logsumexp(-1)[:, None].expand_as(lse))


def test_without_a_tail_only_exact_blocks_count() -> None:
    query, key, value = make_qkv(1, 331, 2, 64, dtype=torch.float64)
    out, lse = sol_attn(
        query * 0, key, value, tail="none", local_radius=0, tau=1e9, return_lse=True
    )
    torch.testing.assert_close(out[0, 70], value[0, 64:128].mean(0))
    torch.testing.assert_close(lse[0, 330], torch.full((2,), math.log(11), dtype=torch.float64))


# Against the reference ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("options", [{"topk_ratio": 0.3}, {"tau": 0.5}], ids=str)
def test_close_to_the_oracle(dtype: torch.dtype, tail: str, options: dict) -> None:
    """Routes are chosen on clearly separated scores, so that rounding cannot change them."""
    tokens = 331
    query, key, value = make_qkv(2, tokens, 3, 64, dtype=torch.float32)
    centre = torch.randn(2, 6, 3, 64) * 2
    block = torch.arange(tokens) // 64
    key = key + centre[:, block]
    query = query + centre[:, (block + 2) % 6]
    tensors = (query.to(dtype), key.to(dtype), value.to(dtype))
    out, lse, stats = sol_attn(*tensors, tail=tail, return_lse=True, return_stats=True, **options)
    peer = reference(*tensors, tail=tail, **options)
    oracle = reference(*(item.double() for item in tensors), tail=tail, **options)
    assert torch.equal(mask_from_plan(peer[2]), mask_from_plan(oracle[2]))
    assert int(stats.exact_blocks) == int(oracle[2].counts.sum())
    assert_close_to_oracle(out, oracle[0], peer[0])
    assert_close_to_oracle(lse, oracle[1], peer[1], name="lse")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout: str) -> None:
    with nan_filled_allocations():
        out = sol_attn(*make_qkv(2, 331, 3, 64, layout=layout), topk_ratio=0.3)
    assert torch.equal(out, sol_attn(*make_qkv(2, 331, 3, 64), topk_ratio=0.3))


def test_free_memory_full_of_nan_has_no_effect_at_any_length() -> None:
    tensors = make_qkv(1, 130, 2, 64)
    for tokens in range(1, 131):
        short = tuple(item[:, :tokens] for item in tensors)
        with nan_filled_allocations():
            out = sol_attn(*short, topk_ratio=0.5, local_radius=-1)
        assert out.isfinite().all(), tokens
        expected = reference(*short, topk_ratio=0.5, local_radius=-1)[0]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("residue", [1, 63, 65, 100, 127])
def test_lengths_beyond_a_multiple_of_two_tiles(residue: int) -> None:
    tensors = make_qkv(1, 4096 + residue, 1, 64)
    torch.testing.assert_close(sol_attn(*tensors, tau=-1e9), dense(*tensors))


@pytest.mark.parametrize("grid", [(7, 11, 13), (3, 17, 19)], ids=str)
def test_token_counts_of_prime_grids(grid: tuple[int, int, int]) -> None:
    tokens = math.prod(grid)
    tensors = make_qkv(1, tokens, 2, 64, dtype=torch.float64)
    out, stats = sol_attn(*tensors, topk_ratio=0.25, return_stats=True)
    blocks = -(-tokens // 64)
    assert stats.top_k == max(1, round(0.25 * blocks))
    torch.testing.assert_close(out, reference(*tensors, topk_ratio=0.25)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{"topk_ratio": 0.3}, {"tau": 1.0}], ids=str)
def test_extreme_inputs_stay_finite(dtype: torch.dtype, options: dict) -> None:
    """Magnitudes near 1e3, all zeros, and a head of zeros."""
    query, key, value = make_qkv(1, 331, 2, 64, dtype=dtype)
    large = (query * 1000, key * 1000, value * 200)
    zero = tuple(torch.zeros_like(item) for item in large)
    for item in (query, key, value):
        item[:, :, 1] = 0
    for tensors in (large, zero, (query, key, value)):
        out, lse = sol_attn(*tensors, return_lse=True, **options)
        assert out.isfinite().all() and lse.isfinite().all()
    assert not sol_attn(*zero, **options).any()


def test_a_row_stride_of_gigabytes() -> None:
    """Three rows 2^30 elements apart, past int32, in a buffer that is never filled."""
    tensors = make_qkv(1, 3, 2, 64, dtype=torch.float16)
    buffer = torch.empty(2 * 2**30 + 2**12, dtype=torch.float16)
    far = [buffer.as_strided((1, 3, 2, 64), (1, 2**30, 64, 1), place * 256) for place in range(3)]
    for view, tensor in zip(far, tensors, strict=True):
        view.copy_(tensor)
    assert torch.equal(sol_attn(*far), sol_attn(*tensors))


def test_views_of_a_fused_projection_are_not_copied() -> None:
    peaks = []
    for layout in ("contiguous", "fused"):
        tensors = make_qkv(1, 4096, 16, 64, layout=layout)  # 16 MiB each
        sol_attn(*tensors, topk_ratio=0.02)
        with PeakMemory() as peak:
            sol_attn(*tensors, topk_ratio=0.02)
        if peak.bytes is None:
            pytest.skip("this system does not tell a process its peak memory")
        peaks.append(peak.bytes)
    assert peaks[1] < peaks[0] + 12 * 2**20


# Batches and masks --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"topk_ratio": 0.4}, {"tau": 0.5}], ids=str)
@pytest.mark.parametrize("samples", [2, 3])
def test_samples_do_not_mix(options: dict, samples: int) -> None:
    tensors = make_qkv(samples, 331, 3, 64)
    together = sol_attn(*tensors, **options)
    for sample in range(samples):
        alone = sol_attn(*(item[sample : sample + 1] for item in tensors), **options)
        torch.testing.assert_close(together[sample], alone[0])


@pytest.mark.parametrize(
    "options", [{"tau": 0.5}, {"tau": 0.5, "thresh_type": "exact"}, {"topk_ratio": 1.0}], ids=str
)
@pytest.mark.parametrize("tail", TAILS)
def test_padded_samples_equal_their_own_shorter_calls(options: dict, tail: str) -> None:
    """Two samples of 331 and 200 valid keys, padded with garbage, equal two calls of one."""
    tensors = make_qkv(2, 331, 3, 64, dtype=torch.float64)
    keep = torch.arange(331) < torch.tensor([[331], [200]])
    for item in tensors[1:]:
        item[1, 200:] = math.nan
    together = sol_attn(*tensors, key_bias=keep, tail=tail, **options)
    for sample, length in ((0, 331), (1, 200)):
        alone = sol_attn(
            *(item[sample : sample + 1, :length] for item in tensors), tail=tail, **options
        )
        # The last query block of the longer sample has other rows, and so another mean.
        rows = length if length == 331 else length // 64 * 64
        torch.testing.assert_close(together[sample, :rows], alone[0, :rows])


@pytest.mark.parametrize(
    "shape", [(331,), (2, 331), (2, 1, 331), (2, 3, 331), (2, 1, 1, 331), (2, 3, 1, 331)], ids=str
)
@pytest.mark.parametrize("form", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_masks_of_every_form_are_honoured(shape: tuple[int, ...], form: torch.dtype) -> None:
    tensors = make_qkv(2, 331, 3, 64)
    keep = torch.rand(shape) < 0.7
    key_bias = keep if form == torch.bool else torch.where(keep, 0.0, -math.inf).to(form)
    out = sol_attn(*tensors, key_bias=key_bias, tau=-1e9)
    by_sample = keep.reshape(1 if len(shape) == 1 else 2, -1, 1, 331)
    torch.testing.assert_close(out, dense(*tensors, attn_mask=by_sample))
    assert not torch.allclose(out, dense(*tensors))


@pytest.mark.parametrize("shape", [(331, 331), (2, 1, 331, 331), (2, 3, 331, 331), (3, 331)])
def test_masks_that_cannot_be_honoured_are_refused(shape: tuple[int, ...]) -> None:
    tensors = make_qkv(2, 331, 3, 64)
    with pytest.raises(ValueError, match=r"key_bias: expected one value a key"):
        sol_attn(*tensors, key_bias=torch.ones(shape, dtype=torch.bool))


def test_a_sample_without_a_valid_key_is_zero() -> None:
    tensors = make_qkv(2, 200, 3, 64)
    keep = torch.ones(2, 200, dtype=torch.bool)
    keep[1] = False
    out, lse = sol_attn(*tensors, key_bias=keep, return_lse=True)
    assert not out[1].any() and (lse[1] == -math.inf).all()
    assert out.isfinite().all() and lse[0].isfinite().all()


# Options ------------------------------------------------------------------------------------------


def served_mask(tensors: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Return which blocks a zero-tail call reads, told by the weight that each key gets."""
    query, key, _ = tensors
    tokens = query.shape[1]
    blocks = -(-tokens // 64)
    value = torch.nn.functional.one_hot(torch.arange(tokens) // 64, 64).to(query.dtype)
    value = value[None, :, None].expand_as(key)
    out = sol_attn(query, key, value, tail="none", **options)
    return out[:, ::64, :, :blocks].transpose(1, 2) > 0


def test_sinks_in_either_spelling() -> None:
    tensors = make_qkv(1, 400, 2, 64)
    base = {"topk_ratio": 0.2, "local_radius": -1}
    suffix = served_mask(tensors, sink_tokens=30, **base)
    assert suffix[..., 5:7].all()  # 370 lies in block 5, 399 in block 6
    assert (suffix[..., :5].sum(-1) == max(1, round(0.2 * 5))).all()
    assert torch.equal(suffix, served_mask(tensors, sinks=[(370, 400)], **base))
    middle = served_mask(tensors, sink_start=70, sink_tokens=60, **base)
    assert middle[..., 1:3].all()
    assert torch.equal(middle, served_mask(tensors, sinks=[(70, 100), (100, 130)], **base))
    none = served_mask(tensors, **base)
    assert torch.equal(none, served_mask(tensors, sinks=[], **base))
    assert torch.equal(none, served_mask(tensors, sink_start=0, sink_tokens=0, **base))


def test_dense_queries_read_every_key() -> None:
    tensors = make_qkv(1, 400, 2, 64)
    out = sol_attn(*tensors, topk_ratio=0.2, dense_queries=[(0, 10), (130, 200)])
    expected = dense(*tensors)
    torch.testing.assert_close(out[:, :64], expected[:, :64])
    torch.testing.assert_close(out[:, 128:256], expected[:, 128:256])
    assert not torch.allclose(out[:, 64:128], expected[:, 64:128])


def test_local_band_in_either_spelling() -> None:
    tensors = make_qkv(1, 400, 2, 64)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    for radius, alias in ((1, True), (-1, False), (0, 0), (2, 2)):
        mask = served_mask(tensors, tau=1e9, local_radius=radius)
        assert torch.equal(mask, (distance <= radius).expand_as(mask))
        assert torch.equal(mask, served_mask(tensors, tau=1e9, force_local_blocks=alias))
    mask = served_mask(tensors, tau=1e9)
    assert torch.equal(mask, (distance <= 1).expand_as(mask))


def test_the_route_is_the_plans() -> None:
    tensors = make_qkv(2, 400, 2, 64)
    for options in ({"tau": 0.3}, {"tau": 0.3, "thresh_type": "exact"}):
        mask = mask_from_plan(plan_sol(tensors[0], tensors[1], **options))
        assert torch.equal(served_mask(tensors, **options), mask)
    mask = mask_from_plan(plan_sol(tensors[0], tensors[1], top_k=2))
    assert torch.equal(served_mask(tensors, topk_ratio=0.3), mask)


def test_results_come_in_a_fixed_order() -> None:
    tensors = make_qkv(1, 200, 2, 64, dtype=torch.bfloat16)
    out = sol_attn(*tensors)
    assert isinstance(out, Tensor) and out.dtype == torch.bfloat16
    pair = sol_attn(*tensors, return_lse=True)
    assert len(pair) == 2 and pair[1].shape == (1, 200, 2) and pair[1].dtype == torch.float32
    pair = sol_attn(*tensors, return_stats=True)
    assert len(pair) == 2 and isinstance(pair[1], SolStats)
    triple = sol_attn(*tensors, return_lse=True, return_stats=True)
    assert isinstance(triple[1], Tensor) and isinstance(triple[2], SolStats)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kv_splits", [2, 4, 9])
def test_splits_merge_to_the_same(tail: str, kv_splits: int) -> None:
    tensors = make_qkv(1, 331, 2, 64, dtype=torch.float64)
    options: dict = {"topk_ratio": 0.3, "tail": tail, "return_lse": True}
    one = sol_attn(*tensors, **options)
    many = sol_attn(*tensors, kv_splits=kv_splits, **options)
    torch.testing.assert_close(many[0], one[0])
    torch.testing.assert_close(many[1], one[1])


def test_inputs_are_left_alone_and_results_repeat() -> None:
    tensors = make_qkv(1, 331, 3, 64, dtype=torch.float16)
    before = [item.clone() for item in tensors]
    runs = [sol_attn(*tensors, tau=0.5) for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert all(torch.equal(item, old) for item, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("tail", TAILS)
def test_gradients_are_those_of_the_reference(tail: str) -> None:
    options: dict = {"topk_ratio": 0.3, "local_radius": -1, "tail": tail}
    gradients = []
    for function in (sol_attn, lambda *inputs, **kept: reference(*inputs, **kept)[0]):
        leaves = [item.requires_grad_() for item in make_qkv(1, 331, 2, 64, dtype=torch.float64)]
        gradients.append(torch.autograd.grad(function(*leaves, **options).sin().sum(), leaves))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# What a call reports ------------------------------------------------------------------------------


def test_stats_are_what_was_delivered() -> None:
    tensors = make_qkv(2, 700, 3, 64)
    _, stats = sol_attn(*tensors, topk_ratio=0.3, local_radius=-1, return_stats=True)
    assert stats.top_k == 3 and stats.total_blocks == 2 * 3 * 11 * 11
    assert int(stats.exact_blocks) == 2 * 3 * 11 * 3
    assert stats.density == pytest.approx(3 / 11)
    assert set(stats.implementations) == {
        "pool",
        "score_blocks",
        "select_blocks",
        "block_sparse_attention",
    }
    _, stats = sol_attn(*tensors, tau=0.5, return_stats=True)
    mask = mask_from_plan(plan_sol(tensors[0], tensors[1], tau=0.5))
    assert stats.top_k is None and int(stats.exact_blocks) == int(mask.sum())
    assert "thresholds" in stats.implementations


def test_the_last_call_names_implementation_density_and_reasons() -> None:
    tensors = make_qkv(1, 331, 2, 64)
    _, stats = sol_attn(*tensors, tau=0.5, tail="block", kv_splits=2, return_stats=True)
    record = solspark.last_call()
    assert record is not None and record.operation == "sol_attn"
    assert record.implementation == stats.implementations["block_sparse_attention"]
    assert record.density == stats.density
    assert (record.call.tail, record.call.kv_splits, record.call.heads) == ("block", 2, 2)
    first, *rest = str(record).splitlines()
    assert first == (
        f"sol_attn of float32 [1, 331, 2, 64] on cpu: eager, density {stats.density:.1%}"
    )
    assert len(rest) == len(record.declined)
    for name, why in record.declined:
        assert f"  not {name}: {'; '.join(why)}" in rest
        operation, implementation = name.split(":")
        assert implementation in solspark.implementations(operation) and why


def test_an_implementation_asked_for_serves_or_raises() -> None:
    tensors = make_qkv(1, 100, 2, 64)
    assert torch.equal(sol_attn(*tensors, impl="eager"), sol_attn(*tensors, impl="eager"))
    record = solspark.last_call()
    assert record is not None and record.implementation == "eager" and record.declined == ()
    for name in ("triton", "hopper"):
        with pytest.raises(UnsupportedError, match=f"block_sparse_attention with impl='{name}'"):
            sol_attn(*make_qkv(1, 100, 2, 64, dtype=torch.float64), impl=name)
    with pytest.raises(ValueError, match=r"impl: expected one of .* got 'cuda'"):
        sol_attn(*tensors, impl="cuda")


def test_a_failing_kernel_is_an_error_and_no_reason_to_fall_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("device fault")

    operation = "block_sparse_attention"
    _dispatch.implementations(operation)  # has them registered
    known = dict(_dispatch._registry[operation])
    monkeypatch.setitem(_dispatch._registry, operation, known)
    _dispatch.register(operation, "triton", _dispatch.never_declines, fail)
    tensors = make_qkv(1, 100, 2, 64)
    with pytest.raises(RuntimeError, match="device fault"):
        sol_attn(*tensors)
    assert sol_attn(*tensors, impl="eager").isfinite().all()


def test_compatible_names_are_the_same_objects() -> None:
    assert compatible.sol_attn is sol_attn is compatible_reference.sol_attn
    assert compatible.get_sol_attn_backend is get_sol_attn_backend
    assert get_sol_attn_backend("cpu") == get_sol_attn_backend(torch.device("cpu")) == "eager"
    assert get_sol_attn_backend() in ("hopper", "triton", "eager")
    with pytest.raises(ValueError, match=r"device: expected what .* got 'gpu'"):
        get_sol_attn_backend("gpu")
    with pytest.raises(TypeError, match=r"device: .* got Tensor"):
        get_sol_attn_backend(torch.zeros(1))  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device: .* got 'cuda' without a GPU"):
            get_sol_attn_backend("cuda")
    options = inspect.signature(sol_attn).parameters
    assert [item.kind for item in options.values()].count(inspect.Parameter.KEYWORD_ONLY) == (
        len(options) - 3
    )


# Refusals -----------------------------------------------------------------------------------------

REFUSALS: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"thresh_type": "full"}, r"thresh_type: expected one of 'diag', 'exact', got"),
    (TypeError, {"sink_tokens": 1.5}, r"sink_tokens: expected an int, got 1.5"),
    (TypeError, {"sink_tokens": True}, r"sink_tokens: expected an int, got True"),
    (ValueError, {"sink_tokens": 101}, r"sink_tokens: expected an int in \[0, 100\], got 101"),
    (ValueError, {"sink_tokens": -1}, r"sink_tokens: expected an int in \[0, 100\], got -1"),
    (TypeError, {"sink_start": "0", "sink_tokens": 1}, r"sink_start: expected an int, got '0'"),
    (ValueError, {"sink_start": 101}, r"sink_start: expected an int in \[0, 100\], got 101"),
    (
        ValueError,
        {"sink_start": 90, "sink_tokens": 20},
        r"sink_start: expected sink_start \+ sink_tokens <= 100, got 90 \+ 20",
    ),
    (ValueError, {"sinks": [(0, 1)], "sink_tokens": 1}, r"sinks: expected either .* got both"),
    (TypeError, {"sinks": 3}, r"sinks: expected a sequence of \(start, stop\) pairs, got 3"),
    (ValueError, {"sinks": [(0, 101)]}, r"sinks\[0\] stop: expected an int in \[0, 100\]"),
    (ValueError, {"sinks": [(0, 1), (7, 6)]}, r"sinks\[1\] stop: expected an int in \[7, 100\]"),
    (ValueError, {"sinks": [(1, 2, 3)]}, r"sinks\[0\]: expected a pair"),
    (TypeError, {"dense_queries": [(0.5, 1)]}, r"dense_queries\[0\] start: expected an int"),
    (ValueError, {"dense_queries": [(0, 101)]}, r"dense_queries\[0\] stop: expected an int"),
    (TypeError, {"kv_splits": 2.0}, r"kv_splits: expected an int, got 2.0"),
    (ValueError, {"kv_splits": 0}, r"kv_splits: expected an int >= 1, got 0"),
    (ValueError, {"scale": math.nan}, r"scale: expected a finite number, got nan"),
    (TypeError, {"scale": "1"}, r"scale: expected a number, got '1'"),
    (ValueError, {"tau": math.nan}, r"tau: expected a number, got nan"),
    (TypeError, {"tau": None}, r"tau: expected a number, got None"),
    (ValueError, {"topk_ratio": 0.0}, r"topk_ratio: expected a share in \(0, 1\], got 0.0"),
    (ValueError, {"topk_ratio": 1.5}, r"topk_ratio: expected a share in \(0, 1\], got 1.5"),
    (TypeError, {"topk_ratio": True}, r"topk_ratio: expected a number, got True"),
    (TypeError, {"key_bias": [0.0]}, r"key_bias: expected a tensor, got list"),
    (TypeError, {"key_bias": torch.zeros(100, dtype=torch.int32)}, r"key_bias: expected torch.b"),
    (ValueError, {"key_bias": torch.zeros(99)}, r"key_bias: expected one value a key"),
    (ValueError, {"tail": "row"}, r"tail: expected one of 'query', 'block'.* got 'row'"),
    (ValueError, {"local_radius": -2}, r"local_radius: expected an int >= -1, got -2"),
    (TypeError, {"local_radius": True}, r"local_radius: expected an int, got True"),
    (TypeError, {"force_local_blocks": "yes"}, r"force_local_blocks: expected an int, got 'yes'"),
    (
        ValueError,
        {"force_local_blocks": True, "local_radius": 2},
        r"force_local_blocks: expected either .* got both",
    ),
    (TypeError, {"return_lse": 1}, r"return_lse: expected a bool, got 1"),
    (TypeError, {"return_stats": None}, r"return_stats: expected a bool, got None"),
]


@pytest.mark.parametrize(
    ("error", "options", "message"), REFUSALS, ids=[str(list(item[1])) for item in REFUSALS]
)
def test_options_are_refused_by_name(
    error: type[Exception], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_may_run(*_: object, **__: object) -> None:
        raise AssertionError("something ran before the refusal")

    monkeypatch.setattr("solspark.methods.sol.pool", nothing_may_run)
    with pytest.raises(error, match=message):
        sol_attn(*make_qkv(2, 100, 3, 64), **options)


def test_inputs_are_refused_by_name() -> None:
    query, key, value = make_qkv(2, 100, 3, 64)
    with pytest.raises(TypeError, match=r"query: expected a tensor \[B, T, H, D\], got list"):
        sol_attn([1], key, value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"value: expected \[B, T, H, D\], got shape \(100, 3"):
        sol_attn(query, key, value[0])
    with pytest.raises(ValueError, match=r"key: expected the shape of query, .* got \(2, 99"):
        sol_attn(query, key[:, 1:], value)
    with pytest.raises(ValueError, match=r"query: expected at least one .* got shape \(2, 0, 3"):
        sol_attn(query[:, :0], key[:, :0], value[:, :0])
    with pytest.raises(ValueError, match=r"query: expected head dim 64 or 128, got 32"):
        sol_attn(query[..., :32], key[..., :32], value[..., :32])
    with pytest.raises(TypeError, match=r"query: expected torch.float16 or .* got torch.int32"):
        sol_attn(query.int(), key.int(), value.int())
    with pytest.raises(TypeError, match=r"value: expected the dtype of query, .* got torch.float1"):
        sol_attn(query, key, value.half())
    with pytest.raises(ValueError, match=r"key: expected the device of query, cpu, got meta"):
        sol_attn(query, key.to("meta"), value)


def test_refusals_come_in_the_order_shape_size_type_option() -> None:
    query, key, value = make_qkv(1, 100, 2, 32, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"key: expected the shape"):
        sol_attn(query, key[:, 1:].int(), value, thresh_type="full")
    with pytest.raises(ValueError, match=r"query: expected head dim"):
        sol_attn(query.int(), key, value, thresh_type="full")
    query, key, value = make_qkv(1, 100, 2, 64)
    with pytest.raises(TypeError, match=r"key: expected torch.float16 or"):
        sol_attn(query, key.int(), value.to("meta"), thresh_type="full")
    with pytest.raises(ValueError, match=r"value: expected the device"):
        sol_attn(query, key, value.to("meta"), thresh_type="full")
    with pytest.raises(ValueError, match=r"thresh_type"):
        sol_attn(query, key, value, thresh_type="full", sink_tokens=-1)
    with pytest.raises(ValueError, match=r"sink_tokens"):
        sol_attn(query, key, value, sink_tokens=-1, kv_splits=0)
    with pytest.raises(ValueError, match=r"kv_splits"):
        sol_attn(query, key, value, kv_splits=0, impl="cuda")
