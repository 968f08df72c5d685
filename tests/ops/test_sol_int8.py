"""Hold the eager INT8 attention to the integer arithmetic, and both to the float reference."""

from __future__ import annotations

import math

import pytest
import torch

from solspark import reasons
from solspark.errors import UnsupportedError
from solspark.ops import _dispatch
from solspark.ops.qkv_producer import quantize_qkv
from solspark.ops.sol_int8 import sol_int8
from solspark.reference.qkv_producer import balance_factors
from solspark.reference.qkv_producer import quantize_qkv as reference_quantize
from solspark.reference.sol_int8 import budget, live_lengths, route
from solspark.reference.sol_int8 import sol_int8 as float_reference
from solspark.reference.sol_int8_quantized import (
    BELOW,
    BEYOND,
    MASKED,
    NEG,
    admission,
    attend_tile,
    candidates,
    levels,
    listed_tokens,
    sol_int8_quantized,
)
from solspark.testing import assert_close_to_oracle, make_qkv, nan_filled_allocations

CASES = {
    "one-block": dict(tokens=64),
    "short": dict(tokens=40),
    "ragged": dict(tokens=331),
    "tau-high": dict(tokens=331, tau=6.0),
    "all-exact": dict(tokens=331, tau=-1e9),
    "no-tail": dict(tokens=517, tau=1.5, tail=False),
    "sinks": dict(tokens=517, tau=1.5, sinks=(2, 4), dense_rows=(0, 2)),
    "sinks-past-the-end": dict(tokens=331, tau=1.5, sinks=(5, 99), dense_rows=(5, 99)),
    "top-k": dict(tokens=517, topk_ratio=0.3),
    "tokens": dict(tokens=709, tau=1.4, token_aug=64),
    "tokens-odd-pairs": dict(tokens=837, topk_ratio=0.1, token_aug=256, sinks=(0, 1)),
    "tokens-no-tail": dict(tokens=709, tau=1.4, token_aug=192, tail=False),
    "tokens-dense-rows": dict(tokens=709, tau=1.4, token_aug=64, dense_rows=(4, 7)),
}


def inputs(tokens: int, *, batch: int = 1, heads: int = 2, seed: int = 0):
    query, key, value = make_qkv(batch, tokens, heads, 128, seed=seed)
    return query * 0.5, key * 0.5 + 0.3, value


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("name", CASES)
def test_eager_does_the_integer_arithmetic(name: str, rotate: bool):
    options = dict(CASES[name])
    tokens = options.pop("tokens")
    query, key, value = inputs(tokens)
    bias = None
    if "sinks" in options:
        bias = torch.zeros(1, tokens)
        first = options["sinks"][0] * 64
        bias[:, first : first + 20] = math.log(3.0)
        bias[:, first + 20 : first + 25] = -math.inf
    with nan_filled_allocations():
        qkv = quantize_qkv(query, key, value, key_bias=bias, rotate=rotate)
        served = sol_int8(qkv, dtype=torch.float32, **options)
    integers = sol_int8_quantized(qkv, **options)
    # Sums of float32 differ in order, and an exp2 that is off by its last bit turns a byte of P in
    # some 30,000 over: far below INT8's own error, about 1e-2, which other integers would show.
    assert relative(served, integers) < 1e-4
    if "token_aug" in options:
        return  # the float reference has no token lists
    oracle = float_reference(query.double(), key.double(), value.double(), key_bias=bias, **options)
    assert_close_to_oracle(served, oracle, integers, name=name)


@pytest.mark.parametrize("tokens", [1, 63, 65, 130, 517])
@pytest.mark.parametrize("balance", [False, True], ids=["given", "balanced"])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_operands_are_the_reference_s(tokens: int, rotate: bool, balance: bool):
    query, key, value = inputs(tokens, batch=2, heads=3)
    key[..., 5:9] *= 20.0
    lengths = torch.full((-(-tokens // 64),), 50, dtype=torch.int32)
    with nan_filled_allocations():
        served = quantize_qkv(query, key, value, block_len=lengths, rotate=rotate, balance=balance)
    options = dict(block_len=lengths, rotate=rotate, balance=balance)
    wanted = reference_quantize(query, key, value, **options)
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


def test_operands_of_rows_taken_a_few_at_a_time(monkeypatch):
    from solspark.ops import qkv_producer

    query, key, value = inputs(517)
    whole = quantize_qkv(query, key, value)
    monkeypatch.setattr(qkv_producer, "STEP_BYTES", 1)
    parts = quantize_qkv(query, key, value)
    assert all(
        torch.equal(item, getattr(parts, name))
        for name, item in vars(whole).items()
        if isinstance(item, torch.Tensor)
    )


def test_integers_reach_127_and_never_minus_128():
    query, key, value = (item * 7.0 for item in inputs(200))
    qkv = quantize_qkv(query, key, value)
    for item in (qkv.query, qkv.key, qkv.value):
        assert item.min() >= -127 and item.abs().max() == 127


@pytest.mark.parametrize("balance", [False, True])
def test_zeros_have_a_scale(balance: bool):
    zeros = torch.zeros(1, 130, 1, 128)
    qkv = quantize_qkv(zeros, zeros, zeros, balance=balance)
    assert torch.equal(sol_int8(qkv, dtype=torch.float32), zeros)


def test_balancing_is_for_heads_with_loud_channels():
    flat, silent = torch.ones(128), torch.ones(128)
    loud = torch.ones(128)
    # Four channels hold 4 g / (4 g + 124) of the energy: a fifth at g = 7.75.
    loud[:4] = 7.75
    silent[10:] = 0.0
    below = loud * torch.where(torch.arange(128) < 4, 0.999, 1.0)
    for query, key, balanced in (
        (flat, loud, True),
        (loud, flat, True),
        (flat, below, False),
        (below, flat, False),
        (flat, flat, False),
        (loud, loud, False),
    ):
        factor = balance_factors(query, key)
        assert (factor != 1).any() == balanced
        torch.testing.assert_close(factor.log().mean(), torch.tensor(0.0))
        if balanced:
            ratio = query * factor**4 / key
            torch.testing.assert_close(ratio, ratio[:1].expand(128))
    # Channels without any energy have a ratio all the same.
    for pair in ((silent, flat), (flat, silent), (silent * 0, silent * 0), (silent, silent)):
        factor = balance_factors(*pair)
        # A channel counts for a millionth of the mean energy at least, for 128 of it at most.
        assert factor.isfinite().all() and factor.max() / factor.min() <= (128 * 1e6) ** 0.25


def test_a_tile_that_is_masked_leaves_the_state():
    state = (torch.zeros(2), torch.ones(2), torch.full((2, 128), 3.0))
    values = torch.full((64, 128), 100, dtype=torch.int8)
    after = attend_tile(state, torch.full((2, 64), NEG), values)
    assert all(torch.equal(one, other) for one, other in zip(after, state, strict=True))
    nothing = (torch.full((2,), NEG), torch.zeros(2), torch.zeros(2, 128))
    after = attend_tile(nothing, torch.full((2, 64), NEG), values)
    assert torch.equal(after[1], torch.zeros(2)) and torch.isfinite(after[2]).all()


def test_the_denominator_counts_every_key_once():
    """With scores of zero the weights are the counts: each value channel is their mean."""
    tokens = 517
    query = torch.zeros(1, tokens, 1, 128)
    value = torch.randn(1, tokens, 1, 128)
    qkv = quantize_qkv(query, torch.randn(1, tokens, 1, 128), value)
    for options in (dict(tau=9.0), dict(topk_ratio=0.2), dict(tau=9.0, token_aug=64)):
        out = sol_int8(qkv, dtype=torch.float32, **options)
        wanted = value.mean(1, keepdim=True).expand_as(out)
        # V has 8 bits: half a step of its scale is the most that a mean can be off.
        assert (out - wanted).abs().max() < 0.5 * qkv.value_scale.max() + 2**-8


@pytest.mark.parametrize(
    ("ratio", "blocks", "sinks", "kept"),
    [
        (0.2, 10, (0, 0), 2),
        (0.01, 10, (0, 0), 1),
        (0.99, 10, (0, 0), 9),
        (0.25, 10, (0, 0), 2),
        (0.35, 10, (0, 0), 4),
        (0.5, 10, (2, 6), 3),
        (0.5, 10, (8, 99), 4),
        (0.5, 5, (0, 4), 0),
        (0.5, 1, (0, 0), 0),
        (0.5, 4, (0, 4), 0),
    ],
)
def test_budget(ratio, blocks, sinks, kept):
    assert budget(ratio, blocks, sinks) == kept


def test_top_k_ranks_the_blocks_that_are_no_sinks_and_keeps_exactly_k():
    scores = torch.randn(3, 12, 12)
    scores[..., :3] += 100
    sinks = (0, 3)
    exact = route(
        scores,
        torch.zeros(3, 12, 128),
        torch.zeros(3, 128),
        scale=1.0,
        tau=0.0,
        topk_ratio=0.4,
        sinks=sinks,
        dense_rows=(0, 0),
    )
    free = scores[..., 3:]
    wanted = torch.zeros_like(free, dtype=torch.bool).scatter_(-1, free.topk(4, -1).indices, True)
    row, column = torch.arange(12)[:, None], torch.arange(3, 12)
    assert torch.equal(exact[..., 3:], wanted | ((row - column).abs() <= 1))
    assert exact[..., :3].all()


def test_lengths_are_clamped():
    given = torch.tensor([-5, 0, 1, 70, 64], dtype=torch.int32)
    assert live_lengths(given, 4 * 64 + 7, torch.device("cpu")).tolist() == [1, 1, 1, 64, 7]
    assert live_lengths(None, 130, torch.device("cpu")).tolist() == [64, 64, 2]


def test_levels_are_the_histogram_s_bins():
    above = torch.tensor([-0.1, 0.0, 0.24, 0.25, 23.99, 24.0, 25.99, 26.0, 87.0, 88.0, 500.0])
    everything = torch.ones_like(above, dtype=torch.bool)
    assert levels(above, everything).tolist() == [1, 2, 2, 3, 97, 98, 98, 99, 129, 130, 255]
    assert levels(above, ~everything).tolist() == [0] * 11
    assert BEYOND == 130 and BELOW == 8.0 and MASKED < -1e36


def test_whole_bins_are_admitted():
    histogram = torch.zeros(4, 256, dtype=torch.int64)
    histogram[:, 0] = 1000
    histogram[0, [129, 99, 97, 12]] = torch.tensor([10, 20, 30, 40])
    histogram[1, 129] = 65
    histogram[2, 2] = 64
    histogram[3, [250, 140, 130, 50]] = torch.tensor([10, 90, 7, 5])
    cut, spare = admission(histogram, 64)
    # 60 fit down to level 97; a bin that would not fit is left out whole, as is what lies below the
    # histogram. Beyond the last bin the second level is taken in part.
    assert cut.tolist() == [12, 129, 1, 140] and spare.tolist() == [0, 0, 0, 54]


def test_of_equal_levels_the_first_tokens_are_listed():
    level = torch.tensor([140, 150, 150, 2, 150, 145])
    cut, spare = torch.tensor(150), torch.tensor(2)
    assert listed_tokens(level, cut, spare).tolist() == [1, 2]
    assert listed_tokens(level, torch.tensor(145), torch.tensor(0)).tolist() == [1, 2, 4]
    assert listed_tokens(level, torch.tensor(2), torch.tensor(0)).tolist() == [0, 1, 2, 4, 5]


def test_a_block_that_only_the_partner_routes_is_no_candidate():
    exact = torch.eye(5, dtype=torch.bool)
    exact[0, 3] = True
    biased = torch.tensor([False, True, False, False, False])
    assert candidates(exact, (4, 5), biased).int().tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 1, 1, 0],
    ]


def test_token_lists_do_not_depend_on_the_slab(monkeypatch):
    from solspark.ops import sol_int8 as module

    qkv = quantize_qkv(*inputs(837))
    whole = sol_int8(qkv, tau=2.0, token_aug=64, dtype=torch.float32)
    monkeypatch.setattr(module, "SLAB_BYTES", 1)
    parts = sol_int8(qkv, tau=2.0, token_aug=64, dtype=torch.float32)
    assert relative(parts, whole) < 1e-6


def test_the_record_says_what_served_and_how_dense():
    qkv = quantize_qkv(*inputs(64 * 12))
    sol_int8(qkv, tau=99.0)
    record = _dispatch.last_call()
    assert record is not None and record.operation == "sol_int8"
    assert record.implementation == "eager"
    assert record.density == pytest.approx((3 * 12 - 2) / 144)


def test_another_implementation_is_refused():
    qkv = quantize_qkv(*inputs(64))
    with pytest.raises(UnsupportedError, match="hopper"):
        sol_int8(qkv, impl="hopper")
    for option in ("rotate", "balance"):
        with pytest.raises(UnsupportedError, match="not on cpu"):
            quantize_qkv(*inputs(64), impl="triton", **{option: True})
    query = torch.zeros(1, 64, 1, 128, requires_grad=True)
    call = _dispatch.describe(query, query)
    assert reasons("sol_int8", "eager", call) == ["it has no backward pass"]
    with pytest.raises(UnsupportedError, match="backward"):
        quantize_qkv(query, query, query)


def test_the_float_reference_refuses_what_it_cannot_hold():
    big = torch.empty(1, 1, 1, 128).expand(1, 40_000, 1, 128)
    with pytest.raises(RuntimeError, match=r"O\(T\^2\)"):
        float_reference(big, big, big)
