"""Planning and planned attention on a device, each implementation against the float64 oracle.

Small shapes are judged on every row, long ones on sampled query blocks: the reference then runs on
those rows alone, in float64, on the same device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from solspark import (
    BLOCK,
    BlockPlan,
    BlockSummaries,
    UnsupportedError,
    last_call,
    mask_from_plan,
    plan_from_mask,
    reasons,
    sol_attn,
)
from solspark._checks import normalise_key_bias
from solspark.diagnose import estimate
from solspark.methods.sol import mean_summaries
from solspark.ops import _block_sparse_triton as attention_ops
from solspark.ops import _dispatch
from solspark.ops import pool as pool_ops
from solspark.ops import score_blocks as score_ops
from solspark.ops import select_blocks as select_ops
from solspark.ops.block_sparse_attention import PRECISIONS, block_sparse_attention
from solspark.ops.pool import pool
from solspark.ops.score_blocks import score_blocks, thresholds
from solspark.ops.select_blocks import select_blocks
from solspark.plan.select import plan_sol
from solspark.reference.block_sparse_attention import block_sparse_attention as reference
from solspark.reference.pool import pool as reference_pool
from solspark.reference.quantize_fp8 import fp8_attention_inputs
from solspark.testing import (
    assert_close_to_oracle,
    make_qkv,
    nan_filled_allocations,
    poison_free_memory,
    random_mask,
    video_activations,
)
from solspark.types import AttentionCall, block_count

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
IMPLEMENTATIONS = ("triton", "hopper")
PRODUCTION = (38_222, 56, 128)  # tokens, heads, head dim: five seconds of MiniMax-H3
GIB = 2**30

Tensors = tuple[Tensor, Tensor, Tensor]


def why_not(impl: str, **options: Any) -> list[str]:
    """Return why an implementation serves no plain call on this device."""
    call = AttentionCall(
        batch=1,
        query_tokens=256,
        key_tokens=256,
        heads=2,
        head_dim=128,
        dtype=torch.bfloat16,
        device_type=DEVICE,
        capability=_dispatch.capability(torch.device(DEVICE)),
        key_heads=2,
        **options,
    )
    return reasons("block_sparse_attention", impl, call)


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request: pytest.FixtureRequest) -> str:
    obstacles = why_not(request.param)
    if obstacles:
        pytest.skip("; ".join(obstacles))
    return request.param


def served() -> list[str]:
    return [name for name in IMPLEMENTATIONS if not why_not(name)]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw on the device; large tensors would take seconds on the host."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return (
        normal(*shape, seed=0, dtype=dtype),
        normal(*shape, seed=1, dtype=dtype),
        normal(*shape, seed=2, dtype=dtype),
    )


def qkv(batch: int, tokens: int, heads: int, dim: int, **options: Any) -> Tensors:
    return make_qkv(batch, tokens, heads, dim, device=DEVICE, **options)


def summaries_of(
    tensors: Tensors, tail: str = "query", bias: Tensor | None = None
) -> BlockSummaries | None:
    if tail == "none":
        return None
    return mean_summaries(reference_pool(None, tensors[1], tensors[2], key_bias=bias))


def plan_of(mask: Tensor, tensors: Tensors) -> BlockPlan:
    tokens = {"query_tokens": tensors[0].shape[1], "key_tokens": tensors[1].shape[1]}
    return plan_from_mask(mask.to(DEVICE), **tokens)


def random_plan(tensors: Tensors, density: float = 0.3, seed: int = 0) -> BlockPlan:
    query, key, _ = tensors
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    return plan_of(random_mask(*shape, density=density, seed=seed), tensors)


def attend(
    impl: str, tensors: Tensors, plan: BlockPlan, summaries: BlockSummaries | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend on free memory full of NaN; return out and LSE."""
    with nan_filled_allocations():
        result = block_sparse_attention(
            *tensors, plan, summaries=summaries, impl=impl, return_lse=True, **options
        )
    assert isinstance(result, tuple)
    return result


def judge(
    result: tuple[Tensor, Tensor],
    tensors: Tensors,
    plan: BlockPlan,
    summaries: BlockSummaries | None,
    *,
    heads: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    key_bias: Tensor | None = None,
    **options: Any,
) -> None:
    """Judge out and LSE by the oracle, on given heads and query blocks (ascending) or on all."""
    query, key, value = tensors
    bias = normalise_key_bias(key_bias, query.shape[0], query.shape[2], key.shape[1], key)
    if heads is not None:
        own = list(heads)
        query, key, value = query[:, :, own], key[:, :, own], value[:, :, own]
        result = (result[0][:, :, own], result[1][:, :, own])
        plan = replace(
            plan, bits=plan.bits[:, own], indices=plan.indices[:, own], counts=plan.counts[:, own]
        )
        if summaries is not None:
            fields = (summaries.keys, summaries.values, summaries.log_mass)
            summaries = BlockSummaries(*(item[:, :, own] for item in fields), summaries.parents)
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, own]
    if blocks is not None:
        chosen = list(blocks)
        rows = torch.cat(
            [
                torch.arange(BLOCK * block, min(BLOCK * block + BLOCK, query.shape[1]))
                for block in chosen
            ]
        ).to(query.device)
        query = query[:, rows]
        result = (result[0][:, rows], result[1][:, rows])
        plan = BlockPlan(
            plan.bits[:, :, chosen],
            plan.indices[:, :, chosen],
            plan.counts[:, :, chosen],
            len(rows),
            plan.key_tokens,
        )
        if summaries is not None and summaries.parents is not None:
            summaries = replace(summaries, parents=summaries.parents[chosen])
    given = {"plan": plan, "key_bias": bias, "return_lse": True, **options}
    peer = reference(query, key, value, summaries=summaries, **given)
    if summaries is not None:
        summaries = replace(
            summaries, keys=summaries.keys.double(), values=summaries.values.double()
        )
    doubles = (query.double(), key.double(), value.double())
    oracle = reference(*doubles, summaries=summaries, **given)
    for name, actual, best, same in zip(("out", "lse"), result, oracle, peer, strict=True):
        assert actual.dtype == same.dtype, name
        assert_close_to_oracle(actual, best, same, name=name)


def check(
    impl: str, tensors: Tensors, plan: BlockPlan, summaries: BlockSummaries | None, **options: Any
) -> tuple[Tensor, Tensor]:
    result = attend(impl, tensors, plan, summaries, **options)
    options.pop("kv_splits", None)
    judge(result, tensors, plan, summaries, **options)
    return result


def tails_of(impl: str) -> tuple[str, ...]:
    return ("none", "query") if impl == "hopper" else ("none", "query", "block")


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return one[0].equal(other[0]) and one[1].equal(other[1])


# Small shapes, every row


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 64)], ids=str)
def test_tails_and_lengths(impl: str, dtype: torch.dtype, dim: int):
    lengths = [(1, 1), (63, 63), (64, 64), (65, 65), (331, 331), (1, 200), (200, 1), (1001, 503)]
    for tail in tails_of(impl):
        for query_tokens, key_tokens in lengths:
            tensors = qkv(2, query_tokens, 3, dim, key_tokens=key_tokens, dtype=dtype)
            summaries = summaries_of(tensors, tail)
            check(impl, tensors, random_plan(tensors), summaries, tail=tail)


def test_key_bias_and_what_masked_keys_hold(impl: str):
    """Single keys at -inf, a whole block, a whole sample; then NaN and infinities behind them."""
    tensors = qkv(2, 331, 3, 128, dtype=torch.bfloat16)
    plan = random_plan(tensors, 0.6)
    for heads in (1, 3):
        bias = torch.randn(2, heads, 331, device=DEVICE)
        bias[0, :, 64:128] = bias[0, :, 5:9] = bias[0, :, 320:] = -math.inf
        bias[1] = -math.inf
        for tail in tails_of(impl):
            summaries = summaries_of(tensors, tail, bias)
            clean = check(impl, tensors, plan, summaries, key_bias=bias, tail=tail)
            assert not clean[0][1].any() and (clean[1][1] == -math.inf).all()
            for junk in (math.nan, math.inf):
                dead = (bias == -math.inf).transpose(1, 2)[..., None]
                dirty = tuple(item.masked_fill(dead, junk) for item in tensors[1:])
                found = attend(
                    impl, (tensors[0], *dirty), plan, summaries, key_bias=bias, tail=tail
                )
                assert same(found, clean)


def test_samples_are_independent(impl: str):
    """Samples with different valid lengths give the bits of calls of their own."""
    tensors = qkv(3, 331, 2, 128, dtype=torch.bfloat16)
    keep = torch.arange(331, device=DEVICE) < torch.tensor([331, 200, 64], device=DEVICE)[:, None]
    together = sol_attn(*tensors, topk_ratio=0.4, key_bias=keep, return_lse=True, impl=impl)
    for sample in range(3):
        one = slice(sample, sample + 1)
        alone = sol_attn(
            *(item[one] for item in tensors),
            topk_ratio=0.4,
            key_bias=keep[one],
            return_lse=True,
            impl=impl,
        )
        assert alone[0].equal(together[0][one]) and alone[1].equal(together[1][one])


def test_grouped_heads(impl: str):
    tensors = qkv(1, 331, 8, 128, key_heads=2, dtype=torch.bfloat16)
    plan = random_plan(tensors)
    check(impl, tensors, plan, None, tail="none")
    key, value = (item.repeat_interleave(4, 2) for item in tensors[1:])
    summaries = summaries_of((tensors[0], key, value))
    found = attend(impl, tensors, plan, summaries)
    assert same(found, attend(impl, (tensors[0], key, value), plan, summaries))


def test_parents(impl: str):
    """Also where neighbouring query blocks, which one program may share, differ in theirs."""
    tensors = qkv(2, 700, 3, 128, dtype=torch.bfloat16)
    shape = (2, 4, 3, 11, 128)
    keys, values = normal(*shape, seed=3), normal(*shape, seed=4)
    mass = normal(*shape[:4], seed=5, dtype=torch.float32)
    mass[:, 1, :, 2] = -math.inf
    for parents in ([0, 0, 0, 3, 3, 3, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 3, 0, 2, 1, 3]):
        rows = torch.tensor(parents, dtype=torch.int32, device=DEVICE)
        summaries = BlockSummaries(keys, values, mass, rows)
        check(impl, tensors, random_plan(tensors), summaries)


@pytest.mark.parametrize("tail", ["none", "query", "block"])
def test_splits(tail: str):
    tensors = qkv(1, 331, 2, 128, dtype=torch.bfloat16)
    for kv_splits in (2, 3, 7):
        summaries = summaries_of(tensors, tail)
        check("triton", tensors, random_plan(tensors), summaries, tail=tail, kv_splits=kv_splits)


def test_full_lists_are_dense_attention(impl: str):
    """Every block exact: the tail has nothing left, and list order must not matter."""
    tensors = qkv(1, 1031, 2, 128, dtype=torch.bfloat16)
    everything = torch.ones(1, 2, 17, 17, dtype=torch.bool)
    plan = plan_of(everything, tensors)
    found = check(impl, tensors, plan, summaries_of(tensors))
    assert same(found, attend(impl, tensors, plan, None))
    out = sol_attn(*tensors, tau=-1e9, impl=impl)
    assert out.equal(found[0])
    nothing = attend(impl, tensors, plan_of(~everything, tensors), None)
    assert not nothing[0].any() and (nothing[1] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_extreme_inputs(impl: str, dtype: torch.dtype):
    """Logits of 1e7; zeros; scales of any sign; values off by 200, whose sum float16 overflows."""
    dim = 128 if dtype == torch.bfloat16 else 64
    query, key, value = qkv(1, 331, 2, dim, dtype=dtype)
    tensors = (query * 1000.0, key * 1000.0, value)
    plan = random_plan(tensors)
    check(impl, tensors, plan, summaries_of(tensors))
    zeros = (torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value))
    assert not check(impl, zeros, plan, summaries_of(zeros))[0].any()
    for scale in (-0.2, 0.0, 5.0):
        for tail in tails_of(impl):
            summaries = summaries_of((query, key, value), tail)
            check(impl, (query, key, value), plan, summaries, tail=tail, scale=scale)
    query, key, value = drawn(1, 32_768, 2, dim, dtype=dtype)
    offsets = torch.tensor([200.0, -200.0], dtype=dtype, device=DEVICE)[:, None]
    tensors = (query[:, :200], key, value + offsets)
    everything = plan_of(torch.ones(1, 2, 4, 512, dtype=torch.bool), tensors)
    check(impl, tensors, everything, None, tail="none")


# FP8


def check_fp8(
    impl: str,
    tensors: Tensors,
    plan: BlockPlan,
    summaries: BlockSummaries | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Judge by attention on the rounded inputs: only probabilities may be rounded beyond."""
    found = attend(impl, tensors, plan, summaries, precision="fp8", **options)
    bias = normalise_key_bias(options.pop("key_bias", None), *key_shape(tensors), tensors[1])
    if bias is not None:
        dead = (bias == -math.inf).transpose(1, 2)[..., None]
        tensors = (tensors[0], *(item.masked_fill(dead, 0.0) for item in tensors[1:]))
    *rounded, summaries = fp8_attention_inputs(*tensors, summaries)
    if summaries is not None:
        summaries = replace(
            summaries, keys=summaries.keys.double(), values=summaries.values.double()
        )
    out, lse = reference(
        *(item.double() for item in rounded), plan, summaries=summaries, key_bias=bias,
        return_lse=True, **options,
    )  # fmt: skip
    # Three bits of mantissa: at most 2^-4 of a probability; sums of 22 bits on the tensor cores.
    assert float((found[0] - out).norm()) <= 0.04 * float(out.norm())
    some = lse > -math.inf
    assert some.equal(found[1] > -math.inf)
    torch.testing.assert_close(found[1][some], lse[some].float(), rtol=1e-5, atol=1e-4)
    return found


def key_shape(tensors: Tensors) -> tuple[int, int, int]:
    return tensors[0].shape[0], tensors[0].shape[2], tensors[1].shape[1]


@pytest.fixture(params=IMPLEMENTATIONS)
def fp8_impl(request: pytest.FixtureRequest) -> str:
    obstacles = why_not(request.param, precision="fp8")
    if obstacles:
        pytest.skip("; ".join(obstacles))
    return request.param


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 64)], ids=str)
def test_fp8_tails_and_lengths(fp8_impl: str, dtype: torch.dtype, dim: int):
    for tail in ("none", "query"):
        for query_tokens, key_tokens in ((1, 1), (63, 64), (65, 331), (331, 65), (1001, 503)):
            tensors = qkv(2, query_tokens, 3, dim, key_tokens=key_tokens, dtype=dtype)
            found = check_fp8(
                fp8_impl, tensors, random_plan(tensors), summaries_of(tensors, tail), tail=tail
            )
            again = attend(
                fp8_impl, tensors, random_plan(tensors), summaries_of(tensors, tail), tail=tail,
                precision="fp8",
            )  # fmt: skip
            assert same(found, again)


def test_fp8_finds_each_value_in_its_place(fp8_impl: str):
    """One key takes all of a row's weight; its value names the key."""
    key = 30.0 * torch.eye(128, device=DEVICE).bfloat16().view(1, 128, 1, 128)
    value = torch.zeros(1, 128, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    places = torch.arange(128, device=DEVICE)
    value[0, places, 0, places.flip(0)] = 1.0
    plan = plan_of(torch.ones(1, 1, 2, 2, dtype=torch.bool), (key, key, value))
    out, _ = attend(fp8_impl, (key, key, value), plan, None, precision="fp8")
    assert out.equal(value)


def test_fp8_options(fp8_impl: str):
    tensors = qkv(2, 700, 4, 128, key_heads=2, dtype=torch.bfloat16)
    scaled = (tensors[0] * 3, tensors[1] * torch.tensor([[1.0], [40.0]], device=DEVICE), tensors[2])
    scaled = (scaled[0], scaled[1].bfloat16(), scaled[2])
    check_fp8(fp8_impl, scaled, random_plan(tensors), None)
    tensors = qkv(2, 700, 3, 128, dtype=torch.bfloat16, layout="fused")
    plan = random_plan(tensors, 0.6)
    bias = torch.randn(2, 3, 700, device=DEVICE)
    bias[0, :, 64:128] = bias[0, :, 5:9] = bias[0, :, 640:] = -math.inf
    for scale in (-0.1, 0.0, 0.3):
        summaries = summaries_of(tensors, bias=bias)
        check_fp8(fp8_impl, tensors, plan, summaries, key_bias=bias, scale=scale)
    first = tensors[1][:, :640].reshape(2, 10, 64, 3, 128)
    keys = torch.stack([first.mean(2), first[:, :, 3]], 1).transpose(2, 3)
    keys = torch.cat([keys, keys[:, :, :, :1]], 3)
    mass = torch.randn(keys.shape[:4], device=DEVICE)
    rows = torch.tensor([0, 1] * 5 + [1], dtype=torch.int32, device=DEVICE)
    check_fp8(fp8_impl, tensors, plan, BlockSummaries(keys, keys * 0.01, mass, rows))


def test_fp8_on_video_activations(fp8_impl: str):
    """The bar of low precision: 3 % of relative L2 against the result in the input type."""
    activations = video_activations("h3-5s", heads=[0, 1, 2, 3, 4], device=DEVICE)
    exact = sol_attn(*activations, topk_ratio=0.1, impl=fp8_impl).double()
    found = sol_attn(*activations, topk_ratio=0.1, impl=fp8_impl, precision="fp8")
    assert float((found - exact).norm() / exact.norm()) < 0.03


# Lengths, memory around the tensors, strides


def before_nan(tensor: Tensor) -> Tensor:
    """Return an aligned view of the same values that NaN follows in memory."""
    batch, tokens, heads, dim = tensor.shape
    buffer = tensor.new_full((batch, tokens + BLOCK, heads, dim), math.nan)
    buffer[:, :tokens] = tensor
    return buffer[:, :tokens]


@pytest.mark.parametrize("base", [1, 4096, 18_200])
def test_every_length_modulo_the_tiles(base: int):
    """S = 1 ... 130, 4096 + r and 18,200 + r, for tiles of up to 128 keys."""
    offsets = {1: range(130), 4096: range(128), 18_200: (0, 1, 63, 64, 127)}[base]
    for offset in offsets:
        tokens = base + offset
        drawn_here = drawn(1, tokens, 1, 64, dtype=torch.float16)
        tensors = tuple(before_nan(item) for item in drawn_here)
        last = block_count(tokens) - 1
        plan = random_plan(tensors, density=0.2, seed=offset)
        summaries = summaries_of(tensors)
        blocks = sorted({0, 1, last - 1, last} & set(range(last + 1)))
        for name in served():
            poison_free_memory(DEVICE, 2**26)
            result = attend(name, tensors, plan, summaries)
            judge(result, tensors, plan, summaries, blocks=blocks)
            assert result[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_strided_inputs_give_the_bits_of_contiguous_ones(impl: str, dtype: torch.dtype):
    dim = 128 if dtype == torch.bfloat16 else 64
    plain = qkv(2, 331, 3, dim, dtype=dtype)
    plan = random_plan(plain)
    for tail in tails_of(impl):
        summaries = summaries_of(plain, tail)
        expected = attend(impl, plain, plan, summaries, tail=tail)
        for layout in ("fused", "interleaved", "heads_first", "odd_last_stride"):
            views = qkv(2, 331, 3, dim, dtype=dtype, layout=layout)
            assert same(attend(impl, views, plan, summaries, tail=tail), expected), layout
    expected = sol_attn(*plain, topk_ratio=0.3, return_lse=True, impl=impl)
    for layout in ("fused", "heads_first"):
        views = qkv(2, 331, 3, dim, dtype=dtype, layout=layout)
        assert same(sol_attn(*views, topk_ratio=0.3, return_lse=True, impl=impl), expected)


def test_an_odd_offset():
    """At an odd storage offset loads are narrow, and TMA must decline or be given a copy."""
    plain = qkv(1, 331, 2, 128, dtype=torch.bfloat16)
    views = qkv(1, 331, 2, 128, dtype=torch.bfloat16, layout="guarded")
    plan = random_plan(plain)
    summaries = summaries_of(plain)
    expected = attend("triton", plain, plan, summaries)
    assert same(attend("triton", views, plan, summaries), expected)
    found = block_sparse_attention(*views, plan, summaries=summaries, return_lse=True)
    judge(found, plain, plan, summaries)


def test_a_row_stride_beyond_32_bits(impl: str):
    """Three rows 2^30 elements apart, in a buffer that is never filled."""
    tensors = qkv(1, 3, 2, 128, dtype=torch.bfloat16)
    buffer = torch.empty(2 * 2**30 + 2**12, dtype=torch.bfloat16, device=DEVICE)
    far = [buffer.as_strided((1, 3, 2, 128), (1, 2**30, 128, 1), place * 512) for place in range(3)]
    for view, tensor in zip(far, tensors, strict=True):
        view.copy_(tensor)
    plan = plan_of(torch.ones(1, 2, 1, 1, dtype=torch.bool), tensors)
    found = attend(impl, (far[0], far[1], far[2]), plan, None)
    assert same(found, attend(impl, tensors, plan, None))
    pooled, expected = pool(*far, impl="triton"), pool(*tensors, impl="triton")
    assert pooled.key_means.equal(expected.key_means)
    assert pooled.query_means.equal(expected.query_means)


def test_more_heads_than_a_grid_axis_has_programs(impl: str):
    """70,000 heads: grids with heads on their second or third axis fail to launch."""
    tensors = drawn(1, 70, 70_000, 64, dtype=torch.float16)
    out = sol_attn(*tensors, tau=0.0, local_radius=-1, impl=impl)
    some = [0, 1, 65_535, 65_536, 69_999]
    alone = sol_attn(
        *(item[:, :, some].contiguous() for item in tensors), tau=0.0, local_radius=-1, impl=impl
    )
    assert out[:, :, some].equal(alone)


def test_more_blocks_than_a_grid_axis_has_programs():
    tokens = 65_537 * 64 + 1
    key = normal(1, tokens, 1, 64, seed=0, dtype=torch.float16)
    pooled = pool(None, key, None, impl="triton")
    assert pooled.key_means[0, 0, -1].equal(key[0, -1, 0])
    expected = key[0, -65:-1, 0].float().mean(0)
    found = pooled.key_means[0, 0, -2].float()  # the sum's order may move the rounding by a unit
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=1e-6)


# Production shape


@pytest.fixture(scope="module")
def production() -> Iterator[tuple[Tensors, BlockPlan, BlockSummaries]]:
    """Fused projection of five seconds of video, planned at 10 %."""
    tokens, heads, dim = PRODUCTION
    fused = normal(1, tokens, 3, heads, dim, seed=0)
    tensors = (fused[:, :, 0], fused[:, :, 1], fused[:, :, 2])
    pooled = pool(*tensors)
    budget = round(0.1 * block_count(tokens))
    plan = plan_sol(*tensors[:2], pooled=pooled, top_k=budget)
    yield tensors, plan, mean_summaries(pooled)
    del tensors, fused, plan, pooled
    torch.cuda.empty_cache()


def test_production_shape(impl: str, production: Any):
    """Sampled rows match the oracle, 20 runs have the same bits, so has the contiguous copy."""
    tensors, plan, summaries = production
    last = plan.query_blocks - 1
    heads = sorted({0, 1, PRODUCTION[1] // 2, PRODUCTION[1] - 1})
    blocks = [0, 1, last // 2, last - 1, last]
    first = attend(impl, tensors, plan, summaries)
    judge(first, tensors, plan, summaries, heads=heads, blocks=blocks)
    listed = attend(impl, tensors, plan, None)
    judge(listed, tensors, plan, None, heads=heads, blocks=blocks)
    copies = (tensors[0].contiguous(), tensors[1].contiguous(), tensors[2].contiguous())
    assert same(attend(impl, copies, plan, summaries), first)
    out = sol_attn(*tensors, topk_ratio=0.1, impl=impl)
    assert out.equal(first[0])
    for _ in range(20):
        assert sol_attn(*tensors, topk_ratio=0.1, impl=impl).equal(out)


def test_memory_peak(impl: str, production: Any):
    tensors = production[0]
    budget = tensors[0].numel() * tensors[0].element_size() + GIB // 2
    for options in ({"topk_ratio": 0.1}, {"tau": 1.0}):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = sol_attn(*tensors, impl=impl, **options)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= budget, f"{peak / GIB:.2f} GiB with {options}"
        call = _dispatch.describe(tensors[0], tensors[1])
        assert peak == pytest.approx(estimate(call, **options).workspace_bytes, rel=0.2)
        del out


def test_planning_at_the_production_shape(production: Any):
    """Kernels plan what the eager operations plan, from the same scores and limits."""
    tensors = production[0]
    pooled = pool(*tensors, impl="triton")
    four = slice(0, 4)
    eager = pool(*(item[:, :, four] for item in tensors), impl="eager")
    assert pooled.query_means is not None and eager.query_means is not None
    # Sums in another order: means of bfloat16 rows, rounded once, differ by a unit at most.
    for name in ("key_means", "value_means"):
        ours, theirs = getattr(pooled, name)[:, four], getattr(eager, name)
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-16)
    tokens = {"query_tokens": PRODUCTION[0], "key_tokens": PRODUCTION[0]}
    means = (pooled.query_means[:, four], pooled.key_means[:, four])
    scale = PRODUCTION[2] ** -0.5
    scores = score_blocks(*means, scale=scale, impl="triton")
    oracle = score_blocks(means[0].double(), means[1].double(), scale=scale, impl="eager")
    terms = scale * math.log2(math.e) * (means[0].abs() @ means[1].abs().float().transpose(2, 3))
    # Two bfloat16 terms keep 16 bits of a query mean.
    assert ((scores - oracle).abs() <= 2.0**-16 * terms).all()
    moments = (pooled.key_mean[:, four], pooled.key_var[:, four])
    limits = thresholds(means[0], *moments, scale=scale, tau=1.0, impl="triton")
    wide = (item.double() for item in (means[0], *moments))
    expected = thresholds(*wide, scale=scale, tau=1.0, impl="eager")
    # Two sums of 128 float32 products each.
    size = scale * math.log2(math.e) * (means[0].abs() @ moments[0].abs()[..., None])[..., 0]
    assert ((limits - expected).abs() <= 2.0**-17 * (size + expected.abs())).all()
    tied = (scores * 8).round() / 8
    for given in (scores, tied):
        for options in (
            {"top_k": 60},
            {"thresholds": limits},
            {"top_k": 60, "sinks": [(590, 598)], "dense_rows": [(3, 5)], "local_radius": 1},
        ):
            plans = [
                select_blocks(given, **options, **tokens, impl=name) for name in ("triton", "eager")
            ]
            assert mask_from_plan(plans[0]).equal(mask_from_plan(plans[1])), options
            assert plans[0].counts.equal(plans[1].counts)


@pytest.mark.slow
def test_more_than_2_31_elements(impl: str):
    tensors = drawn(1, 310_000, 56, 128)
    pooled = pool(*tensors)
    plan = plan_sol(*tensors[:2], pooled=pooled, top_k=48)
    summaries = mean_summaries(pooled)
    result = attend(impl, tensors, plan, summaries)
    last = plan.query_blocks - 1
    judge(result, tensors, plan, summaries, heads=[0, 55], blocks=[0, last // 2, last])
    assert pooled.key_means.shape[2] == 4844  # the last one has 310,000 % 64 = 48 tokens
    expected = tensors[1][0, -48:, 55].float().mean(0).to(torch.bfloat16)
    torch.testing.assert_close(pooled.key_means[0, 55, -1], expected, rtol=2**-7, atol=2**-10)


# Compilers, graphs, the host


def test_a_captured_graph_replays_other_values(impl: str):
    options: dict[str, Any] = {"return_lse": True, "impl": impl, "sinks": [(0, 20)]}
    for choice in ({"topk_ratio": 0.3}, {"tau": 0.5}):
        static = qkv(1, 1031, 3, 128, dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sol_attn(*static, **options, **choice)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sol_attn(*static, **options, **choice)
        fresh = qkv(1, 1031, 3, 128, dtype=torch.bfloat16, seed=7)
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        captured[0].fill_(math.nan)
        graph.replay()
        assert same(captured, sol_attn(*fresh, **options, **choice))


def test_nothing_waits_for_the_device(impl: str):
    tensors = qkv(1, 1031, 3, 128, dtype=torch.bfloat16)
    keep = torch.arange(1031, device=DEVICE) < 900
    calls: list[dict[str, Any]] = [
        {"topk_ratio": 0.3, "sinks": [(0, 70)], "dense_queries": [(0, 3)]},
        {"tau": 1.0, "key_bias": keep, "return_stats": True},
    ]
    for options in calls:
        sol_attn(*tensors, impl=impl, **options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sol_attn(*tensors, impl=impl, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_torch_compile_takes_a_block_whole(impl: str):
    def block(fused: Tensor, tau: float) -> Tensor:
        query, key, value = fused.unbind(2)
        return query + sol_attn(query, key, value, tau=tau, impl=impl)

    torch._dynamo.reset()
    fused = normal(1, 1031, 3, 2, 128, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        compiled = torch.compile(block, fullgraph=True)
        for tau in (0.5, 0.7):
            assert compiled(fused, tau).equal(block(fused, tau))
    torch._dynamo.reset()


def test_operators_keep_their_promises():
    """Shapes, types and strides of the fakes are those of the results; nothing is mutated."""
    checks = ("test_schema", "test_faketensor")

    def holds(operator: Any, *arguments: Any) -> None:
        torch.library.opcheck(operator, arguments, test_utils=checks)

    for layout in ("contiguous", "fused"):
        tensors = qkv(2, 331, 3, 128, dtype=torch.bfloat16, layout=layout)
        bias = torch.randn(2, 3, 331, device=DEVICE)
        holds(pool_ops._operator, *tensors, bias)
        holds(pool_ops._operator, None, tensors[1], None, None)
        plan = random_plan(tensors)
        summaries = summaries_of(tensors)
        assert summaries is not None
        lists = (plan.bits, plan.indices, plan.counts)
        stored = (summaries.keys, summaries.values, summaries.log_mass, None)
        for lse in (False, True):
            holds(
                attention_ops.operator,
                *tensors, *lists, *stored, bias, 0.1, "query", 2, False, "native", lse,
            )  # fmt: skip
            if "hopper" in served():
                for precision in PRECISIONS:
                    holds(
                        attention_ops.operator,
                        *tensors, *lists, *stored, bias, 0.1, "query", 1, True, precision, lse,
                    )  # fmt: skip
    means, keys = normal(1, 2, 5, 128, seed=0, dtype=torch.float32), normal(1, 2, 7, 128, seed=1)
    moments = means[:, :, 0].contiguous()
    holds(score_ops._score_operator, means, keys, 0.1)
    holds(score_ops._threshold_operator, means, moments, moments, 0.1, 1.0)
    scores = normal(1, 2, 5, 7, seed=2, dtype=torch.float32)
    holds(select_ops._operator, scores, None, 3, 7, [0, 1], [2, 3], 1, None, 7)
    holds(select_ops._operator, scores, scores[..., 0].contiguous(), 0, 7, [], [], -1, None, 7)


def compiled_variants() -> int:
    from solspark.kernels import block_sparse_attention as attention
    from solspark.kernels import pool as pooling
    from solspark.kernels import score_blocks as scoring
    from solspark.kernels import select_blocks as selecting

    kernels = [
        attention.block_sparse_attention_kernel,
        attention.merge_splits_kernel,
        pooling.pool_kernel,
        pooling.statistics_kernel,
        scoring.score_blocks_kernel,
        scoring.thresholds_kernel,
        selecting.cut_blocks_kernel,
        selecting.select_blocks_kernel,
    ]
    if "hopper" in served():
        from solspark.kernels.hopper import block_sparse_attention as hopper
        from solspark.kernels.hopper import union_lists

        kernels += [hopper.block_sparse_attention_kernel, union_lists.union_lists_kernel]
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def test_nothing_compiles_again(impl: str):
    """A new length, tau, ratio, scale, sink, head count or batch runs what is compiled already."""

    def run(shape: tuple[int, int, int, int], **options: Any) -> None:
        sol_attn(*drawn(*shape), impl=impl, **options)

    run((1, 300, 2, 128), tau=1.0)
    run((1, 300, 2, 128), topk_ratio=0.2)
    before = compiled_variants()
    assert before > 0
    for tokens in (1, 64, 65, 1000, 1024, 4097, 20_011):
        for batch, heads in ((1, 1), (2, 3), (1, 16)):
            run((batch, tokens, heads, 128), tau=tokens / 1000, scale=0.05 * heads)
            run((batch, tokens, heads, 128), topk_ratio=1 / heads, sinks=[(0, 1)], local_radius=2)
            run((batch, tokens, heads, 128), topk_ratio=0.01, dense_queries=[(0, tokens)])
    assert compiled_variants() == before


# What serves, and why not


def test_reasons_are_told():
    tensors = qkv(1, 331, 2, 128, dtype=torch.bfloat16)
    plan = random_plan(tensors)
    summaries = summaries_of(tensors)

    def serves(*arguments: Tensor, **options: Any) -> tuple[str, str]:
        block_sparse_attention(*arguments, plan, summaries=summaries, **options)
        record = last_call()
        assert record is not None
        return record.implementation, "; ".join(
            f"{name}: {reason}" for name, why in record.declined for reason in why
        )

    best = served()[-1]
    assert serves(*tensors)[0] == best
    found, words = serves(*tensors, tail="block")
    assert found == "triton" and 'hopper: it has no "block" tail' in words
    found, words = serves(*tensors, kv_splits=2)
    assert found == "triton" and "hopper: it does not split the keys" in words
    for options in ({"tail": "block"}, {"kv_splits": 2}):
        with pytest.raises(UnsupportedError, match="block_sparse_attention"):
            serves(*tensors, impl="hopper", **options)
    summaries = None
    found, words = serves(*(item.float() for item in tensors))
    assert found == "eager" and "triton: dtype float32 is none of" in words
    found, words = serves(tensors[0].clone().requires_grad_(), *tensors[1:])
    assert found == "eager" and "triton: it has no backward" in words


def test_tensors_of_another_device_than_the_current(impl: str):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    tensors = qkv(1, 331, 2, 128, dtype=torch.bfloat16)
    away = [item.to("cuda:1") for item in tensors]
    expected = sol_attn(*tensors, tau=0.5, key_bias=None, impl=impl)
    assert sol_attn(*away, tau=0.5, impl=impl).to(DEVICE).equal(expected)
