"""The attention kernel: close to the oracle in the interpreter, compiled for every target."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from solspark._checks import normalise_key_bias
from solspark.ops._block_sparse_triton import operator, run_kernel
from solspark.reference.block_sparse_attention import block_sparse_attention as reference
from solspark.reference.pool import pool
from solspark.reference.quantize_fp8 import fp8_attention_inputs
from solspark.reference.select_blocks import plan_from_mask
from solspark.testing import (
    assert_close_to_oracle,
    make_qkv,
    nan_filled_allocations,
    random_mask,
)
from solspark.types import BlockSummaries

pytest.importorskip("triton")

from solspark.kernels.block_sparse_attention import launch_block_sparse_attention

TAILS = ("none", "query", "block")
HALF = torch.float16
Tensors = tuple[Tensor, Tensor, Tensor]

# The interpreter computes with numpy, which warns of log 0 even where it is meant.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in:RuntimeWarning")


def test_in_the_interpreter(interpret):
    interpret(__file__)


def summaries_of(tensors: Tensors, tail: str = "query", bias: Tensor | None = None):
    if tail == "none":
        return None
    pooled = pool(None, tensors[1], tensors[2], key_bias=bias)
    assert pooled.value_means is not None
    mass = pooled.log_mass.float().expand(pooled.key_means.shape[:3])
    return BlockSummaries(pooled.key_means[:, None], pooled.value_means[:, None], mass[:, None])


def run(
    tensors: Tensors,
    mask: Tensor,
    summaries: BlockSummaries | None,
    *,
    tail: str = "query",
    key_bias: Tensor | None = None,
    scale: float | None = None,
    kv_splits: int = 1,
    precision: str = "native",
    return_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend with the kernel, on free memory full of NaN."""
    query, key, _ = tensors
    plan = plan_from_mask(mask, query_tokens=query.shape[1], key_tokens=key.shape[1])
    scale = query.shape[3] ** -0.5 if scale is None else scale
    bias = normalise_key_bias(key_bias, query.shape[0], query.shape[2], key.shape[1], key)
    with nan_filled_allocations():
        return run_kernel(
            *tensors, plan, summaries, scale, bias, tail, kv_splits, precision, return_lse
        )


def check(
    tensors: Tensors, mask: Tensor, summaries: BlockSummaries | None, **options: Any
) -> tuple[Tensor, Tensor]:
    result = run(tensors, mask, summaries, **options)
    options.pop("kv_splits", None)
    tokens = {"query_tokens": tensors[0].shape[1], "key_tokens": tensors[1].shape[1]}
    given = {"plan": plan_from_mask(mask, **tokens), "return_lse": True, **options}
    peer = reference(*tensors, summaries=summaries, **given)
    if summaries is not None:
        wide = (summaries.keys.double(), summaries.values.double())
        summaries = replace(summaries, keys=wide[0], values=wide[1])
    oracle = reference(*(item.double() for item in tensors), summaries=summaries, **given)
    for name, actual, best, same in zip(("out", "lse"), result, oracle, peer, strict=True):
        assert actual.dtype == same.dtype, name
        assert_close_to_oracle(actual, best, same, name=name)
    return result


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_close_to_the_oracle(tokens: int, tail: str):
    for dtype in (HALF, torch.float32) if tokens == 130 else (HALF,):
        tensors = make_qkv(2, tokens, 2, 64, dtype=dtype)
        mask = random_mask(2, 2, tokens, tokens, density=0.5)
        check(tensors, mask, summaries_of(tensors, tail), tail=tail)


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("lengths", [(1, 200), (200, 1), (65, 331), (331, 63)])
def test_lengths_of_query_and_key_are_free(lengths: tuple[int, int], tail: str):
    tensors = make_qkv(1, lengths[0], 2, 64, key_tokens=lengths[1], dtype=HALF)
    mask = random_mask(1, 2, *lengths)
    check(tensors, mask, summaries_of(tensors, tail), tail=tail)


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", TAILS)
def test_head_dim_128(tail: str):
    tensors = make_qkv(1, 200, 3, 128, dtype=HALF)
    check(tensors, random_mask(1, 3, 200, 200), summaries_of(tensors, tail), tail=tail)


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", ["query", "block"])
def test_more_key_blocks_than_one_tile_of_summaries(tail: str):
    tensors = make_qkv(1, 70, 1, 64, key_tokens=64 * 66 + 5, dtype=HALF)
    mask = random_mask(1, 1, 70, 64 * 66 + 5, density=0.05)
    for kv_splits in (1, 2, 3):
        check(tensors, mask, summaries_of(tensors), tail=tail, kv_splits=kv_splits)


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kv_splits", [2, 3, 5])
def test_splits_even_empty_ones_stay_within_rounding(tail: str, kv_splits: int):
    tensors = make_qkv(1, 200, 2, 64, dtype=HALF)
    summaries = summaries_of(tensors, tail)
    check(tensors, random_mask(1, 2, 200, 200), summaries, tail=tail, kv_splits=kv_splits)


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("heads", "kv_splits"), [(1, 2), (2, 1)])
def test_key_bias(tail: str, heads: int, kv_splits: int):
    """Also -inf: single keys, a whole block, the ragged one's end, and every key of a sample."""
    tensors = make_qkv(2, 200, 2, 64, dtype=HALF)
    bias = torch.randn(2, heads, 200)
    bias[0, :, 64:128] = bias[0, 0, 5:9] = bias[0, :, 195:] = -math.inf
    bias[1] = -math.inf
    summaries = summaries_of(tensors, tail, bias)
    mask = random_mask(2, 2, 200, 200, density=0.6)
    out, lse = check(tensors, mask, summaries, key_bias=bias, tail=tail, kv_splits=kv_splits)
    assert not out[1].any() and (lse[1] == -math.inf).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")
@pytest.mark.interpreted
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_masked_key_has_no_effect_whatever_it_holds(junk: float, tail: str):
    tensors = make_qkv(1, 200, 2, 64, dtype=HALF)
    keep = torch.rand(1, 2, 200, generator=torch.Generator().manual_seed(2)) < 0.6
    keep[:, :, 64:128] = False
    mask = random_mask(1, 2, 200, 200, density=0.7)
    clean = run(tensors, mask, summaries_of(tensors, tail, keep), key_bias=keep, tail=tail)
    dirty = tuple(item.masked_fill(~keep.transpose(1, 2)[..., None], junk) for item in tensors[1:])
    tensors = (tensors[0], *dirty)
    found = check(tensors, mask, summaries_of(tensors, tail, keep), key_bias=keep, tail=tail)
    assert found[0].equal(clean[0]) and found[1].equal(clean[1])


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", ["query", "block"])
@pytest.mark.parametrize("layout", ["fused", "interleaved", "heads_first", "guarded"])
def test_layouts_change_no_bit(layout: str, tail: str):
    """Guarded tensors have NaN behind the last token and between rows: none of it leaks."""
    plain = make_qkv(2, 70, 3, 64, dtype=HALF)
    views = make_qkv(2, 70, 3, 64, dtype=HALF, layout=layout)
    mask = random_mask(2, 3, 70, 70, density=0.5)
    summaries = summaries_of(plain)
    expected = run(plain, mask, summaries, tail=tail)
    found = run(views, mask, summaries, tail=tail)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])


@pytest.mark.interpreted
def test_grouped_heads_read_their_key_head():
    tensors = make_qkv(1, 130, 4, 64, key_heads=2, dtype=HALF)
    bias = torch.randn(1, 4, 130)
    mask = random_mask(1, 4, 130, 130, density=0.5)
    check(tensors, mask, None, tail="none")
    check(tensors, mask, None, tail="none", key_bias=bias)
    every = [item.repeat_interleave(2, 2) for item in tensors[1:]]
    summaries = summaries_of((tensors[0], every[0], every[1]))
    found = run(tensors, mask, summaries)
    expected = run((tensors[0], every[0], every[1]), mask, summaries)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", ["query", "block"])
@pytest.mark.parametrize("kv_splits", [1, 2])
def test_parents(tail: str, kv_splits: int):
    tensors = make_qkv(2, 200, 3, 64, dtype=HALF)
    generator = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, 2, 3, 3, 4, 64, generator=generator).to(HALF)
    mass = torch.randn(2, 3, 3, 4, generator=generator)
    mass[:, 1, :, 2] = -math.inf
    parents = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    summaries = BlockSummaries(keys, values, mass, parents)
    mask = random_mask(2, 3, 200, 200)
    check(tensors, mask, summaries, tail=tail, kv_splits=kv_splits)


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", ["query", "block"])
def test_every_token_is_represented_once(tail: str):
    """With keys of zero every token weighs one, whether exact or in a summary."""
    query, key, value = make_qkv(1, 331, 2, 64, dtype=HALF)
    tensors = (query, torch.zeros_like(key), value)
    lse = run(tensors, random_mask(1, 2, 331, 331), summaries_of(tensors), tail=tail)[1]
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(331)), rtol=1e-6, atol=0)


@pytest.mark.interpreted
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 5.0])
@pytest.mark.parametrize("tail", TAILS)
def test_any_scale(tail: str, scale: float):
    tensors = make_qkv(1, 130, 2, 64, dtype=HALF)
    mask = random_mask(1, 2, 130, 130, density=0.6)
    check(tensors, mask, summaries_of(tensors, tail), tail=tail, scale=scale)


@pytest.mark.interpreted
@pytest.mark.parametrize("tail", TAILS)
def test_large_and_zero_inputs(tail: str):
    """Logits of 1e5; values off by 200 over many keys, whose sum float16 cannot hold; zeros."""
    query, key, value = make_qkv(1, 130, 1, 64, dtype=HALF, amplitude=100.0)
    mask = random_mask(1, 1, 130, 130, density=0.6)
    check((query, key, value), mask, summaries_of((query, key, value), tail), tail=tail)
    query, key, value = make_qkv(1, 64, 1, 64, key_tokens=1000, dtype=HALF)
    tensors = (query, key, value + 200.0)
    mask = torch.ones(1, 1, 1, 16, dtype=torch.bool)
    mask[..., 3] = False
    check(tensors, mask, summaries_of(tensors, tail), tail=tail)
    tensors = (torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value))
    out, _ = check(tensors, mask, summaries_of(tensors, tail), tail=tail)
    assert not out.any()


@pytest.fixture
def right_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to e4m3 as hardware does; the interpreter loses the carry."""
    from triton.language import float8e4nv
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data, input_dtype, output_dtype, rounding):
        if output_dtype != float8e4nv:
            return original(data, input_dtype, output_dtype, rounding)
        rounded = torch.from_numpy(data.copy()).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def check_fp8(
    tensors: Tensors, mask: Tensor, summaries: BlockSummaries | None, **options: Any
) -> None:
    """Judge by attention on the rounded inputs: only probabilities may be rounded beyond."""
    out, lse = run(tensors, mask, summaries, precision="fp8", **options)
    options.pop("kv_splits", None)
    *rounded, summaries = fp8_attention_inputs(*tensors, summaries)
    if summaries is not None:
        summaries = replace(
            summaries, keys=summaries.keys.double(), values=summaries.values.double()
        )
    tokens = {"query_tokens": tensors[0].shape[1], "key_tokens": tensors[1].shape[1]}
    wanted = reference(
        *(item.double() for item in rounded),
        plan_from_mask(mask, **tokens),
        summaries=summaries,
        return_lse=True,
        **options,
    )
    assert float((out - wanted[0]).norm()) <= 0.035 * float(wanted[0].norm())
    torch.testing.assert_close(lse, wanted[1].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.usefixtures("right_rounding")
@pytest.mark.parametrize(
    ("tail", "options"),
    [
        ("none", {}),
        ("query", {}),
        ("query", {"kv_splits": 3}),
        ("query", {"scale": -0.2, "key_bias": True}),
    ],
    ids=["lists", "tail", "splits", "bias"],
)
def test_fp8(tail: str, options: dict[str, Any]):
    for tokens, dim in ((1, 64), (331, 128)):
        tensors = make_qkv(2, tokens, 2, dim, dtype=HALF, layout="fused")
        given = dict(options)
        bias = torch.randn(2, tokens) if given.pop("key_bias", False) else None
        summaries = summaries_of(tensors, tail, bias)
        mask = random_mask(2, 2, tokens, tokens, density=0.4)
        check_fp8(tensors, mask, summaries, tail=tail, key_bias=bias, **given)


@pytest.mark.interpreted
@pytest.mark.usefixtures("right_rounding")
def test_fp8_heads_parents_and_places():
    tensors = make_qkv(1, 200, 4, 64, key_heads=2, dtype=HALF)
    mask = random_mask(1, 4, 200, 200, density=0.6)
    check_fp8(tensors, mask, None, tail="none")
    tensors = make_qkv(1, 200, 2, 64, dtype=HALF)
    means = tensors[1][:, :128].view(1, 2, 64, 2, 64)[:, :, :4].transpose(2, 3)
    parents = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    summaries = BlockSummaries(means, means * 0.1, torch.randn(means.shape[:4]), parents)
    check_fp8(tensors, mask[:, :2], summaries)
    # One key takes all of a row's weight; its value names the key.
    key = (30.0 * torch.eye(64)).to(HALF).view(1, 64, 1, 64)
    value = torch.eye(64).flip(0).to(HALF).view(1, 64, 1, 64)
    out, _ = run((key, key, value), torch.ones(1, 1, 1, 1, dtype=torch.bool), None, precision="fp8")
    assert out.equal(value)


@pytest.mark.interpreted
def test_wide_list_entries():
    """Lists of 32-bit block numbers, as of 32,768 key blocks and more."""
    tensors = make_qkv(1, 130, 2, 64, dtype=HALF)
    plan = plan_from_mask(random_mask(1, 2, 130, 130), query_tokens=130, key_tokens=130)
    options = (summaries_of(tensors), 0.125, None, "query", 1, "native", True)
    narrow = run_kernel(*tensors, plan, *options)
    wide = run_kernel(*tensors, replace(plan, indices=plan.indices.int()), *options)
    assert wide[0].equal(narrow[0]) and wide[1].equal(narrow[1])


@pytest.mark.interpreted
@pytest.mark.parametrize(("layout", "return_lse"), [("fused", False), ("guarded", True)])
def test_operator_keeps_its_promises(layout: str, return_lse: bool):
    """Shapes, types and strides of the fake are those of the result; nothing is mutated."""
    tensors = make_qkv(1, 70, 2, 64, dtype=HALF, layout=layout)
    plan = plan_from_mask(random_mask(1, 2, 70, 70), query_tokens=70, key_tokens=70)
    lists = (plan.bits, plan.indices, plan.counts)
    summaries = summaries_of(tensors)
    stored = (summaries.keys, summaries.values, summaries.log_mass, None)
    for rest, bias in (((None,) * 4, None), (stored, torch.randn(1, 1, 70))):
        for kv_splits in (1, 2):
            options = (0.125, "query", kv_splits, False, "native", return_lse)
            arguments = (*tensors, *lists, *rest, bias, *options)
            torch.library.opcheck(
                operator, arguments, test_utils=("test_schema", "test_faketensor")
            )


def launcher(
    tail: str = "query",
    *,
    shape: tuple[int, int, int, int] = (1, 200, 2, 128),
    dtype: torch.dtype = torch.bfloat16,
    biased: bool = False,
    parents: int = 0,
    return_lse: bool = False,
    kv_splits: int = 1,
    scale: float = 0.1,
    precision: str = "native",
):
    tensors = make_qkv(*shape, dtype=dtype)
    batch, tokens, heads, dim = shape
    blocks = -(-tokens // 64)
    summaries = summaries_of(tensors, tail)
    if parents:
        keys = torch.zeros(batch, parents, heads, blocks, dim, dtype=dtype)
        mass = torch.zeros(batch, parents, heads, blocks)
        summaries = BlockSummaries(keys, keys, mass, torch.zeros(blocks, dtype=torch.int32))
    mask = torch.ones(batch, heads, blocks, blocks, dtype=torch.bool)
    return lambda: run(
        tensors,
        mask,
        summaries,
        tail=tail,
        key_bias=torch.zeros(batch, 1, tokens) if biased else None,
        scale=scale,
        kv_splits=kv_splits,
        precision=precision,
        return_lse=return_lse,
    )


def test_compiles(record_launches, compile_launch, target: str, monkeypatch):
    everything: dict[str, Any] = {"biased": True, "parents": 3, "return_lse": True}
    if target.startswith("gfx"):  # 64 KiB hold two tiles of K and V in flight, not three
        monkeypatch.setitem(launch_block_sparse_attention.__kwdefaults__, "num_stages", 2)
    if target == "gfx1100":  # as gfx1201, which takes less time to compile for
        everything["shape"] = (1, 200, 2, 64)
    variants = [everything]
    if target == "sm_90":
        variants += [
            {},
            {"tail": "none", "dtype": HALF, "shape": (1, 200, 2, 64), "kv_splits": 2},
            {"tail": "block", "return_lse": True},
        ]
    for options in variants:
        launches = record_launches(launcher(**options))
        assert len(launches) == (2 if "kv_splits" in options else 1)
        compiled = [compile_launch(launch, target) for launch in launches]
        ptx = compiled[0].asm.get("ptx")
        if ptx is not None:
            # K and V come asynchronously, a key bias or not.
            assert ptx.count("cp.async.cg.shared.global") >= 16
        if target == "sm_90":
            assert "wgmma.mma_async" in ptx


@pytest.mark.parametrize("fp8_target", ["sm_89", "sm_90", "sm_120"])
def test_fp8_compiles(record_launches, compile_launch, fp8_target: str):
    *_, attention = record_launches(launcher(precision="fp8", return_lse=True))
    ptx = compile_launch(attention, fp8_target).asm["ptx"]
    assert ".f32.e4m3.e4m3" in ptx
    assert ptx.count("cp.async.cg.shared.global") >= 8


def test_nothing_compiles_again_for_other_sizes_and_options(record_launches):
    def variants(**options: Any) -> list[str]:
        return [launch.key for launch in record_launches(launcher(**options))]

    kinds: list[dict[str, Any]] = [
        {"tail": "none"},
        {"return_lse": True},
        {"tail": "block"},
        {"biased": True},
        {"parents": 3},
        {"kv_splits": 3},
        {"precision": "fp8"},
    ]
    for kind in kinds:
        first = variants(shape=(1, 64, 1, 64), scale=1.0, **kind)
        for shape in ((1, 1, 1, 64), (2, 65, 3, 64), (3, 130, 16, 64), (1, 1024, 5, 64)):
            for scale in (-1.0, 0.0, 16.0):
                assert variants(shape=shape, scale=scale, **kind) == first, (kind, shape, scale)
    assert variants(parents=1, shape=(1, 64, 1, 64)) == variants(parents=16, shape=(1, 64, 1, 64))
