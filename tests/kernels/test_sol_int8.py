"""INT8 kernels: the reference's integers in the interpreter, and compiled for every target."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

from solspark.ops import _dispatch, _sol_int8_triton
from solspark.ops import qkv_producer as producer_module
from solspark.ops import sol_int8 as attention_module
from solspark.reference.qkv_producer import quantize_qkv as reference_quantize
from solspark.reference.sol_int8_quantized import sol_int8_quantized
from solspark.testing import make_qkv, nan_filled_allocations

pytest.importorskip("triton")

import triton.language as tl

from solspark.kernels.coarse_gate import launch_coarse_gate
from solspark.kernels.int8_tail import launch_int8_tail
from solspark.kernels.sol_int8 import REGISTERS, launch_sol_int8
from solspark.kernels.token_rest import launch_token_rest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

quantize_qkv = producer_module.quantize_qkv
sol_int8 = attention_module.sol_int8
RUNS = {
    "qkv_producer": producer_module._Producer(producer_module._TritonCarriers),
    "sol_int8": _sol_int8_triton.run,
}

# Sums of float32 differ in order, and an exp2 that is off by its last bit turns one byte of P in
# some 30,000 over: far below INT8's own error, about 1e-2, which other integers would show.
SAME_INTEGERS = 1e-4


def test_in_the_interpreter(interpret):
    interpret(__file__)


@pytest.fixture(autouse=True)
def kernels_take_cpu_tensors(monkeypatch):
    """In the interpreter a CPU is device enough; it knows no assembly, and no bfloat16 product."""
    if INTERPRETING:
        for launch in (launch_sol_int8, launch_token_rest):
            monkeypatch.setitem(launch.__kwdefaults__, "ptx", False)
        for launch in (launch_int8_tail, launch_coarse_gate):
            monkeypatch.setitem(launch.__kwdefaults__, "dot", tl.float32)
        monkeypatch.setattr(producer_module, "rotation_terms", lambda *_: (torch.float32, 1))
    for operation, run in RUNS.items():
        table = dict(_dispatch._registry[operation])
        table["triton"] = _dispatch.Implementation("triton", _dispatch.never_declines, run)
        monkeypatch.setitem(_dispatch._registry, operation, table)


def inputs(tokens: int, *, batch: int = 1, heads: int = 2, layout: str = "contiguous", **options):
    query, key, value = make_qkv(
        batch, tokens, heads, 128, layout=layout, dtype=torch.float16, **options
    )
    return query.mul_(0.5), key.add_(0.3), value


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("tokens", "basis"),
    [
        (1, dict()),
        (128, dict()),
        (65, dict(rotate=True)),
        (65, dict(balance=True)),
        (130, dict(rotate=True, balance=True)),
    ],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, dict) else value,
)
def test_operands(tokens: int, basis: dict):
    tensors = inputs(tokens, batch=2, heads=3)
    tensors[1][:, :, 1, ::31] *= 30.0  # a head that is worth balancing
    lengths = torch.full((-(-tokens // 64),), 50, dtype=torch.int32)
    bias = torch.zeros(2, tokens)
    bias[1, 0] = -math.inf
    with nan_filled_allocations():
        served = quantize_qkv(*tensors, key_bias=bias, block_len=lengths, impl="triton", **basis)
    wanted = reference_quantize(*tensors, key_bias=bias, block_len=lengths, **basis)
    for name, item in vars(wanted).items():
        mine = getattr(served, name)
        if not isinstance(item, torch.Tensor):
            assert mine == item, name
        elif item.dtype == torch.int8:
            difference = (mine.int() - item.int()).abs()
            # Sums in another order move a value across a rounding boundary once in a while.
            assert difference.max() <= 1 and difference.float().mean() < 1e-3, name
        else:
            torch.testing.assert_close(mine, item, msg=lambda words, name=name: f"{name}: {words}")


@pytest.mark.interpreted
def test_dead_rows_hold_anything():
    tensors = inputs(130)
    lengths = torch.tensor([64, 20, 2], dtype=torch.int32)
    clean = quantize_qkv(*tensors, block_len=lengths, impl="triton")
    for item in tensors:
        item[:, 84:128] = math.nan
    dirty = quantize_qkv(*tensors, block_len=lengths, impl="triton")
    for name, item in vars(clean).items():
        if isinstance(item, torch.Tensor):
            assert torch.equal(getattr(dirty, name), item), name


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["fused", "guarded", "odd_last_stride"])
def test_layouts_change_no_bit(layout: str):
    plain = quantize_qkv(*inputs(130, batch=2), impl="triton")
    views = quantize_qkv(*inputs(130, batch=2, layout=layout), impl="triton")
    for name, item in vars(plain).items():
        if isinstance(item, torch.Tensor):
            assert torch.equal(getattr(views, name), item), name


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("rot", "primed", "basis"),
    [
        (8, True, dict()),
        (128, False, dict()),
        (96, False, dict(rotate=True)),
        (96, True, dict(rotate=True, balance=torch.rand(2, 128) + 0.5)),
        (96, False, dict(balance=True)),
    ],
    ids=["primed", "cold", "rotated", "rotated-balanced-primed", "balanced"],
)
def test_chunks_with_norm_and_rope(rot: int, primed: bool, basis: dict):
    tokens, heads = 150, 2
    fused = torch.randn(tokens, 3 * heads * 128).bfloat16()
    weights = (1 + 0.2 * torch.randn(128), 1 + 0.2 * torch.randn(128))
    freqs = torch.randn(tokens, rot // 2, 2, 2)
    lengths = torch.tensor([64, 20, 22], dtype=torch.int32)
    statistics = (torch.randn(heads, 128), torch.full((heads, 128), 0.03)) if primed else ()
    center, scale = statistics or (None, None)

    def produce(impl: str):
        return producer_module.qkv_producer(
            lambda: fused.split(64),
            tokens,
            heads,
            freqs,
            weights,
            key_center=center,
            value_scale=scale,
            block_len=lengths,
            impl=impl,
            **basis,
        )

    with nan_filled_allocations():
        served, *following = produce("triton")
    wanted, *expected = produce("eager")
    # A mean of squares in another order turns a bfloat16 over once in a while.
    for mine, item in zip(following, expected, strict=True):
        torch.testing.assert_close(mine, item, rtol=2**-8, atol=2**-8)
    for name in ("query", "key", "value"):
        difference = (getattr(served, name).int() - getattr(wanted, name).int()).abs()
        assert difference.max() <= 1 and difference.float().mean() < 1e-2, name
    for name in ("query_scale", "key_scale", "query_means", "key_means", "value_sums"):
        torch.testing.assert_close(
            getattr(served, name), getattr(wanted, name), rtol=2**-7, atol=2**-8
        )


CASES = {
    "one-block": dict(tokens=40),
    "ragged": dict(tokens=331, tau=1.2),
    "all-exact": dict(tokens=200, tau=-1e9),
    "no-tail": dict(tokens=331, tau=1.5, tail=False),
    "sinks": dict(tokens=331, tau=6.0, sinks=(2, 4), dense_rows=(0, 2), bias=True),
    "sinks-past-the-end": dict(tokens=331, tau=6.0, sinks=(4, 99), bias=True),
    "sinks-beyond": dict(tokens=331, tau=6.0, sinks=(50, 99)),
    "top-k": dict(tokens=331, topk_ratio=0.3),
    "lengths-and-gate": dict(tokens=331, tau=1.2, lengths=True, gate=True),
    "stale": dict(tokens=331, tau=1.2, stale=True),
    "scale-below-zero": dict(tokens=200, tau=0.5, scale=-0.06),
    "tied": dict(tokens=331, topk_ratio=0.4, equal=True, shape=(1, 1)),
    "no-budget": dict(tokens=331, topk_ratio=0.4, sinks=(0, 5), tail=False, shape=(1, 1)),
    "two-parts": dict(tokens=331, tau=1.2, parts=2, gate=True, shape=(1, 1)),
    "tokens": dict(tokens=459, tau=1.6, token_aug=64, parts=2, shape=(1, 1)),
    "tokens-odd-pairs": dict(
        tokens=440, topk_ratio=0.1, token_aug=256, sinks=(2, 3), bias=True, stale=True, shape=(2, 1)
    ),
    "tokens-no-tail": dict(
        tokens=459, tau=1.6, token_aug=192, tail=False, dense_rows=(4, 6), shape=(1, 1)
    ),
    "tokens-beyond-the-last-bin": dict(
        tokens=459, tau=6.0, token_aug=64, loud=True, shape=(1, 1), bound=2e-3
    ),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CASES)
def test_attention_does_the_integer_arithmetic(name: str, monkeypatch):
    options = dict(CASES[name])
    tokens = options.pop("tokens")
    batch, heads = options.pop("shape", (2, 2))
    parts = options.pop("parts", 1)
    monkeypatch.setattr(_sol_int8_triton, "parts_of_values", lambda device: parts)
    # Scores of some hundred octaves have a last bit of 3e-5: more bytes turn over.
    bound = options.pop("bound", SAME_INTEGERS)
    query, key, value = inputs(tokens, batch=batch, heads=heads)
    bias = lengths = center = None
    if options.pop("equal", False):
        key[:, 64:320] = key[:, 64:128].repeat(1, 4, 1, 1)
    if options.pop("loud", False):
        # Keys of either sign: their blocks' means say nothing of scores 100 octaves up.
        signs = torch.where(torch.arange(tokens) % 2 == 0, 1.0, -1.0)
        key += 90 * signs[:, None, None] * query[:, :1].sign()
        query += 0.5 * query[:, :1].sign()
    if options.pop("bias", False):
        bias = torch.zeros(batch, tokens)
        first = options["sinks"][0] * 64
        bias[0, first : first + 20] = math.log(3.0)
        bias[-1, first + 30 : first + 64] = -math.inf
    if options.pop("lengths", False):
        lengths = torch.tensor([64, 3, 50, 64, 1, 9], dtype=torch.int32)
    if options.pop("gate", False):
        options["coarse_gate"] = torch.randn(batch, heads, tokens, 128).transpose(1, 2)
    if options.pop("stale", False):
        center = torch.randn(batch, heads, 128)
    qkv = reference_quantize(query, key, value, key_bias=bias, block_len=lengths, key_center=center)
    with nan_filled_allocations():
        served = sol_int8(qkv, dtype=torch.float32, impl="triton", **options)
    wanted = sol_int8_quantized(qkv, **options)
    assert relative(served, wanted) < bound
    record = _dispatch.last_call()
    assert record is not None and record.implementation == "triton"
    if name != "sinks":
        return
    monkeypatch.setattr(_sol_int8_triton, "ROUTE_BYTES", 1)  # one head at a time
    again = sol_int8(qkv, dtype=torch.float32, impl="triton", **options)
    assert relative(again, wanted) < SAME_INTEGERS


@pytest.mark.interpreted
def test_rows_without_any_key_are_zero():
    qkv = quantize_qkv(*inputs(130), key_bias=torch.full((1, 130), -math.inf), impl="triton")
    out = sol_int8(qkv, sinks=(0, 3), dtype=torch.float16, impl="triton")
    assert torch.equal(out, torch.zeros_like(out))


OURS = {
    "harvest_kernel",
    "quantise_kernel",
    "int8_scores_kernel",
    "token_candidates_kernel",
    "token_levels_kernel",
    "token_lists_kernel",
    "token_rest_kernel",
    "int8_tail_kernel",
    "coarse_gate_kernel",
    "sol_int8_kernel",
}


def all_launches(record_launches, tokens: int, batch: int, heads: int, **options):
    """Return the launches of a direct call, those of other operations' kernels left out."""
    tensors = make_qkv(batch, tokens, heads, 128, dtype=torch.bfloat16)
    qkv = reference_quantize(*tensors)

    def launch():
        quantize_qkv(*tensors, impl="triton")
        sol_int8(qkv, impl="triton", **options)

    launches = record_launches(launch)
    return [item for item in launches if item.kernel.__name__ in OURS]


def test_compiles(record_launches, compile_launch, target: str, monkeypatch):
    nvidia = target.startswith("sm")
    parts = 2 if target in ("sm_80", "sm_86", "sm_89", "sm_120") else 1
    monkeypatch.setattr(_sol_int8_triton, "parts_of_values", lambda device: parts)
    for launch in (launch_sol_int8, launch_token_rest):
        monkeypatch.setitem(launch.__kwdefaults__, "ptx", nvidia)
    gate = torch.zeros(1, 130, 2, 128, dtype=torch.bfloat16)
    launches = all_launches(record_launches, 130, 1, 2, coarse_gate=gate, token_aug=64)
    seen = {launch.kernel.__name__: launch for launch in launches}
    assert set(seen) == OURS

    def produced(balance, statistic) -> dict:
        def produce():
            producer_module.qkv_producer(
                lambda: [torch.zeros(130, 3 * 2 * 128, dtype=torch.bfloat16)],
                130,
                2,
                torch.zeros(130, 48, 2, 2),
                (torch.ones(128), torch.ones(128)),
                key_center=statistic,
                value_scale=statistic,
                rotate=True,
                balance=balance,
                impl="triton",
            )

        return {launch.kernel.__name__: launch for launch in record_launches(produce)}

    ones = torch.ones(2, 128)
    primed, cold = produced(ones, ones), produced(True, None)
    # A primed call reads its chunks once: it keeps the factors and takes sums while it quantises.
    assert set(primed) == {"quantise_kernel"}
    assert set(cold) == {"harvest_kernel", "energy_kernel", "quantise_kernel"}
    if target == "sm_90":
        bare = all_launches(record_launches, 130, 1, 2, tail=False)
        seen["bare"] = next(item for item in bare if item.kernel.__name__ == "sol_int8_kernel")
    else:
        del seen["quantise_kernel"]  # with norm, RoPE and a rotation it does all that and more
    for launch in (*seen.values(), *primed.values(), cold["energy_kernel"]):
        exact = target == "sm_90" and launch.kernel.__name__ == "sol_int8_kernel"
        bound = {"maxnreg": REGISTERS} if exact else {}
        compiled = compile_launch(launch, target, **bound)
        if exact:
            # Scores run on the tensor cores in integers, values in float16.
            assert "wgmma" in compiled.asm["ptx"] and "s32.s8.s8" in compiled.asm["ptx"]
            assert "f32.f16.f16" in compiled.asm["ptx"]


def test_nothing_compiles_again_for_other_lengths(record_launches):
    def variants(*sizes: int, **options) -> set[str]:
        return {
            launch.kernel.__name__ + launch.key
            for launch in all_launches(record_launches, *sizes, token_aug=64, **options)
        }

    first = variants(200, 1, 3, tau=1.0, sinks=(0, 2))
    assert variants(331, 2, 5, tau=3.0, sinks=(1, 2)) == first
    assert variants(1024, 1, 16, topk_ratio=0.2, scale=0.3) == first


def test_what_the_kernels_decline(monkeypatch):
    monkeypatch.undo()
    call = _dispatch.describe(torch.zeros(1, 64, 1, 128), torch.zeros(1, 64, 1, 128))
    assert any("not on cpu" in why for why in _dispatch.reasons("sol_int8", "triton", call))
    half = replace(call, head_dim=64)
    assert any("head dim" in why for why in _dispatch.reasons("qkv_producer", "triton", half))
