"""The public INT8 calls: order, errors, and every case of the specification's table on the CPU."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from solspark import int8, last_call
from solspark.errors import UnsupportedError
from solspark.int8 import sol_attn
from solspark.reference.qkv_producer import balance_factors
from solspark.reference.sol_int8 import sol_int8 as reference
from solspark.testing import PeakMemory

everywhere = pytest.mark.usefixtures("place")


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Draw the same numbers for every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


def inputs(tokens: int, *, batch: int = 1, heads: int = 2, seed: int = 0, dtype=torch.bfloat16):
    shape = (batch, tokens, heads, 128)
    amplitudes = (0.5, 0.5, 1.0)
    return tuple(
        (normal(*shape, seed=3 * seed + index) * amplitude).to(dtype)
        for index, amplitude in enumerate(amplitudes)
    )


def cosine(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    assert torch.isfinite(actual).all()
    return float(
        torch.nn.functional.cosine_similarity(
            actual.double().flatten(), wanted.double().flatten(), 0
        )
    )


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((actual.double() - wanted).norm() / wanted.norm())


def dense(q, k, v, mask=None) -> torch.Tensor:
    q, k, v = (item.transpose(1, 2).double() for item in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def test_the_call_order_is_frozen():
    def split(function):
        parameters = inspect.signature(function).parameters.values()
        positional = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
        return positional, [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]

    direct = (
        "q k v tau scale sink_blocks sink_q key_bias topk_ratio tail block_len coarse_gate "
        "token_aug"
    )
    switches = ["rotate", "balance", "check_bias", "impl"]
    assert split(int8.sol_attn) == (direct.split(), switches)
    chunked = (
        "qkv_chunks t h rope_freqs qk_norm_weights kmean vscale tau topk_ratio scale sink_blocks "
        "sink_q rope_eps tail block_len coarse_gate token_aug"
    )
    assert split(int8.sol_attn_chunked) == (chunked.split(), ["key_bias", *switches])
    defaults = {
        item.name: item.default
        for function in (int8.sol_attn, int8.sol_attn_chunked)
        for item in inspect.signature(function).parameters.values()
        if item.default is not item.empty
    }
    assert defaults == dict(
        tau=1.0,
        scale=None,
        sink_blocks=None,
        sink_q=None,
        key_bias=None,
        topk_ratio=0.0,
        tail=True,
        block_len=None,
        coarse_gate=None,
        token_aug=0,
        kmean=None,
        vscale=None,
        rope_eps=1e-6,
        rotate=False,
        balance=False,
        check_bias=False,
        impl=None,
    )


def test_no_kernel_is_promised_where_there_is_none():
    assert int8.sol_attn_is_available("cpu") is False
    if not torch.cuda.is_available():
        assert int8.sol_attn_is_available() is False
        assert int8.sol_attn_is_available("cuda:0") is False
    with pytest.raises(ValueError, match="device: expected what"):
        int8.sol_attn_is_available("gpu")


@everywhere
@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("tokens", [256, 1000, 1024, 1088, 2048])
def test_thresholds(tokens: int, tau: float):
    q, k, v = inputs(tokens)
    out = sol_attn(q, k, v, tau)
    assert out.dtype == q.dtype and out.is_contiguous() and out.shape == q.shape
    assert cosine(out, reference(q, k, v, tau=tau)) > 0.998


@everywhere
@pytest.mark.parametrize("ragged", [1, 4, 32])
def test_a_ragged_tail(ragged: int):
    q, k, v = inputs(2048 + ragged, heads=1)
    wanted = reference(q, k, v, tau=1.4)
    assert cosine(sol_attn(q, k, v, 1.4)[:, -ragged:], wanted[:, -ragged:]) > 0.999


@everywhere
@pytest.mark.parametrize("batch", [2, 3])
def test_samples_do_not_meet(batch: int):
    q, k, v = inputs(517, batch=batch)
    together = sol_attn(q, k, v, 1.2, token_aug=64)
    for index in range(batch):
        one = slice(index, index + 1)
        assert torch.equal(sol_attn(q[one], k[one], v[one], 1.2, token_aug=64), together[one])


@everywhere
@pytest.mark.parametrize("sink_blocks", [None, [0, 2], (0, 2)])
@pytest.mark.parametrize("sink_q", [None, [0, 2]])
def test_sinks(sink_blocks, sink_q):
    q, k, v = inputs(1000)
    out = sol_attn(q, k, v, 1.4, sink_blocks=sink_blocks, sink_q=sink_q)
    wanted = reference(
        q, k, v, tau=1.4, sinks=tuple(sink_blocks or (0, 0)), dense_rows=tuple(sink_q or (0, 0))
    )
    assert cosine(out, wanted) > 0.998
    if sink_blocks or sink_q:
        assert not torch.equal(out, sol_attn(q, k, v, 1.4))


@everywhere
def test_dense_rows_are_dense():
    q, k, v = inputs(1000)
    out = sol_attn(q, k, v, 6.0, sink_q=[3, 5])
    assert cosine(out[:, 192:320], dense(q, k, v)[:, 192:320]) > 0.999


@everywhere
@pytest.mark.parametrize("options", [dict(tau=1.0), dict(topk_ratio=0.2)], ids=["tau", "top-k"])
@pytest.mark.parametrize("layout", ["heads_first", "fused", "odd_last_stride", "guarded"])
def test_any_layout_gives_the_same_bits(layout: str, options: dict):
    q, k, v = inputs(331, batch=2)
    if layout == "heads_first":
        views = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in (q, k, v)]
    elif layout == "fused":
        views = list(torch.stack([q, k, v], 2).unbind(2))
    elif layout == "odd_last_stride":
        views = [torch.stack([item, item], -1)[..., 0] for item in (q, k, v)]
    else:
        # An odd offset, and NaN all round: neither aligned nor safe to read past.
        views = []
        for item in (q, k, v):
            buffer = item.new_full((2, 333, 3, 130), math.nan).flatten()
            view = torch.cat([buffer[:1], buffer])[1:].view(2, 333, 3, 130)[:, 1:-1, :2, 1:-1]
            views.append(view.copy_(item))
    assert all(view.stride() != item.stride() for view, item in zip(views, (q, k, v), strict=True))
    assert torch.equal(sol_attn(*views, **options), sol_attn(q, k, v, **options))


@everywhere
def test_a_lower_threshold_is_nearer_to_dense():
    q, k, v = inputs(2048)
    wanted = dense(q, k, v)
    assert cosine(sol_attn(q, k, v, 0.5), wanted) > cosine(sol_attn(q, k, v, 6.0), wanted) + 5e-3


@everywhere
@pytest.mark.parametrize("log_weight", [0.3, math.log(2.0)])
def test_a_key_bias_weighs_keys(log_weight: float):
    q, k, v = inputs(1000)
    bias = torch.zeros(1000)
    bias[14 * 64 :] = log_weight
    sinks = [14, 16]
    out = sol_attn(q, k, v, 1.4, sink_blocks=sinks, key_bias=bias)
    plain = sol_attn(q, k, v, 1.4, sink_blocks=sinks)
    wanted = reference(q, k, v, tau=1.4, sinks=(14, 16), key_bias=bias[None])
    assert cosine(out, wanted) > 0.998 and not torch.equal(out, plain)
    # It must be nearer to the weighted reference than what has no bias is.
    assert relative(out, wanted) < 0.5 * relative(plain, wanted)


@everywhere
def test_the_forms_of_a_key_bias_agree():
    q, k, v = inputs(200, batch=2)
    bias = torch.where(torch.arange(200) < 40, 0.7, 0.0)
    forms = [bias, bias[None], bias.expand(2, 200), bias[None, None, None]]
    forms += [bias.expand(2, 1, 1, 200), bias.double()]
    outs = [sol_attn(q, k, v, 6.0, None, [0, 1], None, form) for form in forms]
    assert all(torch.equal(out, outs[0]) for out in outs)
    keep = torch.arange(200) >= 10
    dropped = torch.zeros(200).masked_fill(~keep, -math.inf)
    out = sol_attn(q, k, v, sink_blocks=[0, 1], key_bias=keep)
    assert torch.equal(out, sol_attn(q, k, v, sink_blocks=[0, 1], key_bias=dropped))


@everywhere
def test_a_bias_of_its_own_for_each_sample():
    q, k, v = inputs(331, batch=2)
    bias = torch.zeros(2, 331)
    bias[0, :64], bias[1, 10:30] = 1.0, -math.inf
    out = sol_attn(q, k, v, sink_blocks=[0, 1], key_bias=bias)
    for index in range(2):
        one = slice(index, index + 1)
        alone = sol_attn(q[one], k[one], v[one], sink_blocks=[0, 1], key_bias=bias[one])
        assert torch.equal(out[one], alone)


@everywhere
def test_minus_infinity_removes_keys():
    q, k, v = inputs(1000)
    bias = torch.zeros(1000)
    bias[-32:] = -math.inf
    out = sol_attn(q, k, v, 1.4, sink_blocks=[15, 16], key_bias=bias)
    assert cosine(out, reference(q, k, v, tau=1.4, sinks=(15, 16), key_bias=bias[None])) > 0.998
    other = v.clone()
    other[:, -32:] = 0  # a removed key's value cannot matter; V's scale may
    same = sol_attn(q, k, other, 1.4, sink_blocks=[15, 16], key_bias=bias)
    assert relative(same, out) < 0.02


@everywhere
@pytest.mark.parametrize("tail", [True, False])
def test_rows_without_any_key_are_zero(tail: bool):
    q, k, v = inputs(130)
    out = sol_attn(q, k, v, sink_blocks=[0, 3], key_bias=torch.zeros(130).bool(), tail=tail)
    assert torch.equal(out, torch.zeros_like(out))


@everywhere
def test_everything_exact_is_dense():
    q, k, v = inputs(2048)
    out = sol_attn(q, k, v, -1e9)
    assert last_call().density == 1.0
    assert relative(out, dense(q, k, v)) < 0.016


@everywhere
@pytest.mark.parametrize("tokens", [1024, 1111])
def test_float16_and_bfloat16_agree(tokens: int):
    q, k, v = (item.half() for item in inputs(tokens))  # bfloat16 values are float16 values here
    half = sol_attn(q, k, v)
    brain = sol_attn(*(item.bfloat16() for item in (q, k, v)))
    assert half.dtype == torch.float16 and relative(brain, half) < 4e-3
    assert cosine(half, reference(q, k, v)) > 0.998


@everywhere
@pytest.mark.parametrize("tokens", [1000, 2048])
def test_a_budget(tokens: int):
    q, k, v = inputs(tokens)
    out = sol_attn(q, k, v, topk_ratio=0.2)
    assert cosine(out, reference(q, k, v, topk_ratio=0.2)) > 0.995
    assert not torch.equal(out, sol_attn(q, k, v, topk_ratio=0.5))
    with_sinks = sol_attn(q, k, v, topk_ratio=0.2, sink_blocks=[1, 3])
    assert cosine(with_sinks, reference(q, k, v, topk_ratio=0.2, sinks=(1, 3))) > 0.995


@everywhere
@pytest.mark.parametrize("tokens", [64, 40])
def test_a_budget_of_one_block(tokens: int):
    q, k, v = inputs(tokens)
    assert cosine(sol_attn(q, k, v, topk_ratio=0.3), dense(q, k, v)) > 0.999
    assert cosine(reference(q, k, v, topk_ratio=0.3), dense(q, k, v)) > 0.9999


@everywhere
def test_a_budget_of_zero_blocks():
    q, k, v = inputs(5 * 64)
    out = sol_attn(q, k, v, topk_ratio=0.5, sink_blocks=[0, 4], tail=False)[:, :192]
    assert cosine(out, dense(q[:, :192], k[:, :256], v[:, :256])) > 0.999


@everywhere
def test_equal_scores_are_all_kept():
    q, k, v = inputs(1024)
    k[:, 256:768] = k[:, 256:320].repeat(1, 8, 1, 1)
    assert cosine(sol_attn(q, k, v, topk_ratio=0.2), reference(q, k, v, topk_ratio=0.2)) > 0.99


@everywhere
def test_without_a_tail():
    q, k, v = inputs(1000)
    out = sol_attn(q, k, v, topk_ratio=0.3, tail=False)
    assert cosine(out, reference(q, k, v, topk_ratio=0.3, tail=False)) > 0.99
    lengths = torch.tensor([64, 10, 64, 30], dtype=torch.int32)
    live = (torch.arange(64) < lengths[:, None]).flatten()
    q, k, v = inputs(256)
    out = sol_attn(q, k, v, -1e9, tail=False, block_len=lengths)
    assert cosine(out[:, live], dense(q[:, live], k[:, live], v[:, live])) > 0.9999


@everywhere
@pytest.mark.parametrize(
    ("options", "bar"), [(dict(tau=1.2), 0.998), (dict(topk_ratio=0.2), 0.995)], ids=["tau", "top"]
)
def test_block_lengths(options: dict, bar: float):
    tokens = 1000
    q, k, v = inputs(tokens)
    lengths = torch.randint(1, 65, (16,), dtype=torch.int32)
    live = (torch.arange(64) < lengths[:, None]).flatten()[:tokens]
    out = sol_attn(q, k, v, block_len=lengths, **options)[:, live]
    assert cosine(out, reference(q, k, v, block_len=lengths, **options)[:, live]) > bar
    for item in (q, k, v):
        item[:, ~live] = math.nan
    for extra in (dict(), dict(token_aug=64)):
        dirty = sol_attn(q, k, v, block_len=lengths, **options, **extra)
        clean = [item.nan_to_num(3.0) for item in (q, k, v)]
        again = sol_attn(*clean, block_len=lengths, **options, **extra)
        assert torch.equal(dirty[:, live], again[:, live])


@everywhere
def test_block_lengths_below_one_are_one():
    q, k, v = inputs(517)
    given = torch.tensor([0, -7, 5, 64, 0, 1, 20, -1, 0], dtype=torch.int32)
    assert torch.equal(
        sol_attn(q, k, v, block_len=given), sol_attn(q, k, v, block_len=given.clamp(min=1))
    )


@everywhere
@pytest.mark.parametrize("batch", [1, 2])
def test_a_coarse_gate(batch: int):
    q, k, v = inputs(517, batch=batch)
    gate = normal(batch, 517, 2, 128, seed=9).bfloat16()
    out = sol_attn(q, k, v, -1e9, coarse_gate=gate)
    plain = sol_attn(q, k, v, -1e9)
    assert cosine(out, reference(q, k, v, tau=-1e9, coarse_gate=gate)) > 0.9999
    assert cosine(out, plain) < 0.999
    wanted = dense(q, k, v)
    for b in range(batch):
        for h in range(2):
            means = [
                torch.stack([part.double().mean(0) for part in item[b, :, h].split(64)])
                for item in (q, k, v)
            ]
            for block in range(9):
                weights = (means[0][block] @ means[1].T / math.sqrt(128)).softmax(0)
                rows = slice(block * 64, (block + 1) * 64)
                wanted[b, rows, h] += gate[b, rows, h].double() * (weights @ means[2])
    assert cosine(out, wanted) > 0.9999


def test_the_coarse_gate_does_not_depend_on_the_slice(monkeypatch):
    from solspark.ops import sol_int8 as module

    q, k, v = inputs(517, dtype=torch.float32)
    gate = normal(1, 517, 2, 128, seed=9)
    whole = sol_attn(q, k, v, coarse_gate=gate)
    monkeypatch.setattr(module, "SLAB_BYTES", 1)
    torch.testing.assert_close(sol_attn(q, k, v, coarse_gate=gate), whole, rtol=2e-4, atol=5e-5)


def planted(tokens: int, heads: int):
    """Return inputs where single keys far from each query block carry much of its attention."""
    q, k, v = inputs(tokens, heads=heads, dtype=torch.float32)
    direction = normal(heads, 128, seed=77)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    q = q + 3.0 * direction
    places = torch.arange(5, tokens, 9)
    strength = torch.linspace(16.0, 20.0, len(places))[torch.randperm(len(places))]
    k[:, places] += strength[:, None, None] * direction
    v[:, places] += 2.0
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@everywhere
@pytest.mark.parametrize("options", [dict(tau=1.4), dict(topk_ratio=0.1)], ids=["tau", "top-k"])
def test_token_lists_catch_planted_keys(options: dict):
    q, k, v = planted(1601, 2)
    wanted = dense(q, k, v)
    outs = [sol_attn(q, k, v, token_aug=budget, **options) for budget in (0, 64, 256)]
    none, few, many = (relative(out, wanted) for out in outs)
    assert many < few < 0.5 * none
    bias = [float((out.double() - wanted).mean().abs()) for out in outs]
    assert bias[2] < bias[0]
    views = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in (q, k, v)]
    assert torch.equal(sol_attn(*views, token_aug=256, **options), outs[2])


@everywhere
def test_tokens_beyond_the_list_stay_in_the_tail():
    """Keys of alternating sign have means of zero, so every second one outgrows the histogram."""
    tokens = 1024
    direction = torch.zeros(128)
    direction[0] = 1.0
    q, k, v = (item.float() for item in inputs(tokens, heads=1))
    q = 0.05 * q + 25.0 * direction
    sign = torch.where(torch.arange(tokens) % 2 == 0, 1.0, -1.0)
    k = 0.05 * k + 30.0 * sign[:, None, None] * direction
    v = v + 5.0 * normal(16, 128, seed=8).repeat_interleave(64, 0)[None, :, None]
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    wanted = dense(q, k, v)
    without = relative(sol_attn(q, k, v, 4.0), wanted)
    with_list = relative(sol_attn(q, k, v, 4.0, token_aug=64), wanted)
    assert with_list < 0.15 * without


@everywhere
def test_token_lists_of_no_use_change_nothing():
    q, k, v = inputs(709)
    same = k[:, :1].expand_as(k)
    plain = sol_attn(q, same, v, 1.4, tail=False)
    flat = sol_attn(q, same, v, 1.4, tail=False, token_aug=64)
    # A flat profile fills one bin beyond the budget: none is admitted.
    assert torch.equal(flat, plain)
    rows = dict(tau=1.4, sink_q=[0, 99])
    assert torch.equal(sol_attn(q, k, v, token_aug=64, **rows), sol_attn(q, k, v, **rows))
    odd = sol_attn(q, k, v, 1.4, token_aug=192)
    assert torch.isfinite(odd).all() and torch.equal(odd, sol_attn(q, k, v, 1.4, token_aug=192))
    assert not torch.equal(odd, sol_attn(q, k, v, 1.4))


CHANNELS = [3, 40, 77, 100]
OUTLIERS = {
    "K": lambda gain: (1.0, gain),
    "K, and Q as much quieter": lambda gain: (1.0 / gain, gain),
    "Q": lambda gain: (gain, 1.0),
    "K and Q": lambda gain: (gain, gain),
    "neither": lambda gain: (1.0, 1.0),
}


@everywhere
@pytest.mark.parametrize("gain", [10.0, 50.0])
@pytest.mark.parametrize("where", OUTLIERS)
def test_outlier_channels_cost_at_most_twice_the_gaussian_error(where: str, gain: float):
    """Few loud channels take the bits of all others; measured.md has the table.

    Rotated, all channels of a row share the cost; balanced, Q and K share it first.
    """
    q, k, v = inputs(1024, dtype=torch.float32)
    gaussian = relative(sol_attn(q, k, v, -1e9), dense(q, k, v))
    for item, factor in zip((q, k), OUTLIERS[where](gain), strict=True):
        item[..., CHANNELS] *= factor
    wanted = dense(q, k, v)
    plain, rotated, balanced, both = (
        relative(sol_attn(q, k, v, -1e9, rotate=rotate, balance=balance), wanted)
        for balance in (False, True)
        for rotate in (False, True)
    )
    assert both < 2 * gaussian
    assert both < 1.05 * min(plain, rotated, balanced)
    if gain == 50.0 and where != "neither":
        assert plain > 5 * gaussian and rotated < 0.5 * plain


@everywhere
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_loud_channels_of_v_cost_nothing(rotate: bool):
    """V has a scale of its own for each channel."""
    q, k, v = inputs(1024, dtype=torch.float32)
    gaussian = relative(sol_attn(q, k, v, -1e9), dense(q, k, v))
    v[..., CHANNELS] *= 50.0
    error = relative(sol_attn(q, k, v, -1e9, rotate=rotate, balance=rotate), dense(q, k, v))
    assert error < 1.05 * gaussian


@everywhere
@pytest.mark.parametrize("options", [{}, {"topk_ratio": 0.2}, {"tau": 1.2, "token_aug": 64}])
def test_balanced_is_what_balanced_tensors_give(options: dict):
    """q f and k / f have the same products: everything after them knows nothing of f."""
    q, k, v = inputs(709, dtype=torch.float32)
    k[..., CHANNELS] *= 20.0
    k += 3.0
    energies = q.square().mean(1), k.var(1, correction=0)
    factor = balance_factors(*energies)[:, None]
    assert factor.log().mean(-1).abs().max() < 1e-5
    assert factor[..., CHANNELS].min() > 2 and factor.min() > 0.1
    ratio = (q * factor).square().mean(1) / (k / factor).var(1, correction=0)
    torch.testing.assert_close(ratio, ratio.mean(-1, keepdim=True).expand_as(ratio))
    served = sol_attn(q, k, v, balance=True, **options)
    given = sol_attn(q * factor, k / factor, v, **options)
    # Sums in another order move an integer across a rounding boundary once in a while.
    assert relative(served, given) < 1e-3


@everywhere
def test_a_rotation_does_not_change_the_routing_statistics():
    q, k, v = inputs(1000)
    sol_attn(q, k, v, 1.2)
    plain = last_call().density
    sol_attn(q, k, v, 1.2, rotate=True)
    # Scores carry other rounding errors, so a block at the threshold may move.
    assert last_call().density == pytest.approx(plain, abs=0.01)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_magnitudes_stay_finite(dtype):
    q, k, v = (item * 1e3 for item in inputs(331, dtype=torch.float32))
    out = sol_attn(q.to(dtype), k.to(dtype), (v + 200).clamp(-6e4, 6e4).to(dtype), token_aug=64)
    assert torch.isfinite(out).all()


@everywhere
@pytest.mark.parametrize("zero", range(3))
def test_zeros_stay_finite(zero: int):
    items = list(inputs(331))
    items[zero] = torch.zeros_like(items[zero])
    out = sol_attn(*items, token_aug=64)
    assert cosine(out + 1, reference(*items) + 1) > 0.998


def test_every_length_is_served():
    q, k, v = inputs(131, heads=1)
    for tokens in range(1, 131):
        items = [item[:, :tokens] for item in (q, k, v)]
        assert cosine(sol_attn(*items, 9.0), reference(*items, tau=9.0)) > 0.998


def test_memory_grows_with_the_tokens_not_with_their_square():
    tokens = 8192
    q, k, v = inputs(tokens, heads=1)
    with PeakMemory() as peak:
        sol_attn(q, k, v, 1.0, token_aug=64)
    if peak.bytes is not None:
        # One head's scores alone would be 256 MiB.
        assert peak.bytes < 192 * 2**20


WRONG = {
    "head_dim must be 128": dict(head_dim=64),
    "k: expected dtype|k: expected the dtype": dict(k=lambda x: x.half()),
    "q: expected dtype": dict(q=lambda x: x.double()),
    "v: expected the shape of q": dict(v=lambda x: x[:, 1:]),
    r"q: expected \[B, T, H, 128\]": dict(q=lambda x: x[0]),
    "sink_blocks: expected two": dict(sink_blocks=[1]),
    "sink_blocks start": dict(sink_blocks=[-1, 2]),
    "sink_q end": dict(sink_q=[3, 2]),
    "topk_ratio": dict(topk_ratio=1.0),
    "topk_ratio: expected 0": dict(topk_ratio=-0.1),
    "token_aug: expected one of .* 100": dict(token_aug=100),
    "token_aug: expected one of .* 512": dict(token_aug=512),
    "token_aug: expected one of .* -64": dict(token_aug=-64),
    "block_len: expected": dict(block_len=torch.ones(9, dtype=torch.int32)),
    "block_len: expected torch.int32": dict(block_len=torch.ones(4)),
    "coarse_gate: expected floats": dict(coarse_gate=torch.zeros(1, 200, 1, 128)),
    r"key_bias: expected .*\(199,\)": dict(key_bias=torch.zeros(199)),
    r"key_bias: expected .*\(1, 2, 1, 200\)": dict(key_bias=torch.zeros(1, 2, 1, 200)),
    r"key_bias: expected .*\(1, 1, 200, 200\)": dict(key_bias=torch.zeros(1, 1, 200, 200)),
    r"key_bias: expected .*\(1, 1, 200\)": dict(key_bias=torch.zeros(1, 1, 200)),
    "key_bias: expected the device cpu": dict(key_bias=torch.zeros(200, device="meta")),
    "tau: expected a number": dict(tau=math.nan),
    "scale": dict(scale=math.inf),
    "impl": dict(impl="quick"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_named(words: str):
    options = dict(WRONG[words])
    tensors = dict(zip("qkv", inputs(200), strict=True))
    if options.pop("head_dim", None):
        tensors = {name: item[..., :64] for name, item in tensors.items()}
    for name in "qkv":
        if name in options:
            tensors[name] = options.pop(name)(tensors[name])
    with pytest.raises(ValueError, match=words):
        sol_attn(**tensors, **options)


def test_a_wrong_type_is_named():
    q, k, v = inputs(64)
    with pytest.raises(TypeError, match="k: expected a tensor"):
        sol_attn(q, None, v)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tail: expected a bool"):
        sol_attn(q, k, v, tail=1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="hopper"):
        sol_attn(q, k, v, impl="hopper")
    with pytest.raises(UnsupportedError, match="no backward pass"):
        sol_attn(q.requires_grad_(), k, v)


@everywhere
def test_a_bias_outside_the_sinks_is_found_when_asked():
    q, k, v = inputs(331)
    bias = torch.zeros(331)
    bias[70] = 0.5
    sol_attn(q, k, v, key_bias=bias, sink_blocks=[1, 2], check_bias=True)
    with pytest.raises(ValueError, match=r"key_bias: expected zero outside .* key 70, in block 1"):
        sol_attn(q, k, v, key_bias=bias, sink_blocks=[2, 3], check_bias=True)
    bias[70] = math.nan
    with pytest.raises(ValueError, match="key_bias: expected numbers or -inf, got nan at key 70"):
        sol_attn(q, k, v, key_bias=bias, sink_blocks=[1, 2], check_bias=True)
