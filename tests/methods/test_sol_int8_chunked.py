"""The chunked INT8 call: one stream of chunks gives what whole tensors give."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.int8 import sol_attn, sol_attn_chunked
from solspark.ops import qkv_producer as producer
from solspark.reference.qkv_producer import norm_rope
from solspark.testing import PeakMemory

TOKENS, HEADS = 1024 + 100, 2
everywhere = pytest.mark.usefixtures("place")


class Problem:
    """A fused projection with its norm weights and rotations, and Q, K, V made from it apart."""

    def __init__(self, rot: int = 96, *, tokens: int = TOKENS, seed: int = 0, value: float = 1.0):
        generator = torch.Generator().manual_seed(seed)
        here = {"generator": generator, "device": "cpu"}  # the same numbers for every device
        home = torch.get_default_device()
        fused = (torch.randn(tokens, 3 * HEADS * 128, **here) * 0.5).to(home)
        fused[:, 2 * HEADS * 128 :] *= value
        self.tokens = tokens
        self.fused = fused.bfloat16()
        angle = (torch.rand(tokens, rot // 2, **here) * 6.3).to(home)
        cos, sin = angle.cos(), angle.sin()
        rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        self.freqs = rotation[None, :, None]
        self.weights = tuple(1.0 + 0.2 * torch.randn(128, **here).to(home) for _ in range(2))
        q, k, v = self.fused.view(tokens, 3, HEADS, 128).unbind(1)
        q, k = (
            norm_rope(x, weight, self.freqs[0, :, 0], 1e-6)
            for x, weight in zip((q, k), self.weights, strict=True)
        )
        self.qkv = q[None], k[None], v[None]

    def chunks(self, size: int = 256):
        return list(self.fused.split(size))

    def run(self, *statistics, size: int = 256, **options):
        return sol_attn_chunked(
            self.chunks(size),
            self.tokens,
            HEADS,
            self.freqs,
            self.weights,
            *statistics,
            **options,
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


@pytest.mark.parametrize("rot", [8, 64, 96, 128])
def test_norm_and_rope_follow_the_formula(rot: int):
    tokens = 5
    x = torch.randn(tokens, 1, 128).bfloat16()
    problem = Problem(rot, tokens=tokens)
    freqs, weight = problem.freqs[0, :, 0], problem.weights[0]
    got = norm_rope(x, weight, freqs, 1e-3)
    for t in range(tokens):
        row = x[t, 0].float()
        norm = row * torch.rsqrt((row**2).mean() + 1e-3) * weight.bfloat16().float()
        norm = norm.bfloat16().float()
        wanted = norm.clone()
        for c in range(rot // 2):
            pair = torch.stack([norm[c], norm[c + rot // 2]])
            wanted[c], wanted[c + rot // 2] = freqs[t, c] @ pair
        assert torch.equal(got[t, 0, rot:], wanted[rot:].bfloat16())
        torch.testing.assert_close(
            got[t, 0].float(), wanted, rtol=2**-8, atol=torch.finfo(torch.float32).eps
        )


@everywhere
@pytest.mark.parametrize("rot", [64, 96])
def test_cold_and_primed_equal_the_direct_call(rot: int):
    problem = Problem(rot, value=0.02)
    wanted = sol_attn(*problem.qkv, 1.4)
    cold, kmean, vscale = problem.run(tau=1.4)
    assert cold.shape == (1, TOKENS, HEADS, 128) and cold.dtype == torch.bfloat16
    assert kmean.shape == vscale.shape == (HEADS, 128) and kmean.dtype == torch.float32
    assert cosine(cold, wanted) > 0.995
    primed, again, scale = problem.run(kmean, vscale, tau=1.4)
    assert torch.equal(primed, cold)
    assert torch.equal(again, kmean) and torch.equal(scale, vscale)
    with torch.inference_mode():
        assert torch.equal(problem.run(kmean, vscale, tau=1.4)[0], cold)
    # One of the two alone is measured anew with the other.
    assert torch.equal(problem.run(kmean * 9, None, tau=1.4)[0], cold)


@everywhere
def test_the_statistics_are_those_of_the_tokens():
    problem = Problem()
    lengths = torch.full((18,), 64, dtype=torch.int32)
    lengths[3] = 10
    live = (torch.arange(64) < lengths[:, None]).flatten()[:TOKENS]
    _, kmean, vscale = problem.run(block_len=lengths)
    _, k, v = (item[0, live].float() for item in problem.qkv)
    torch.testing.assert_close(kmean, k.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vscale, v.abs().amax(0) / 127 * 1.1)


@everywhere
@pytest.mark.parametrize("size", [64, 128, 4096])
def test_the_size_of_the_chunks_has_no_effect(size: int):
    problem = Problem()
    wanted = problem.run(size=256)
    assert all(map(torch.equal, problem.run(size=size), wanted))


def test_rows_are_widened_a_few_at_a_time(monkeypatch):
    problem = Problem()
    wanted = problem.run()
    monkeypatch.setattr(producer, "STEP_BYTES", 1)
    assert all(map(torch.equal, problem.run(), wanted))


@everywhere
def test_chunks_come_as_an_iterator_or_from_a_callable():
    problem = Problem()
    arguments = (problem.tokens, HEADS, problem.freqs, problem.weights)
    wanted, kmean, vscale = problem.run()
    calls = []

    def source():
        calls.append(None)
        return iter(problem.chunks())

    assert torch.equal(sol_attn_chunked(source, *arguments)[0], wanted)
    assert len(calls) == 2  # cold
    assert torch.equal(sol_attn_chunked(source, *arguments, kmean, vscale)[0], wanted)
    assert len(calls) == 3  # primed
    assert torch.equal(sol_attn_chunked(source(), *arguments)[0], wanted)
    chunks = [chunk[None] for chunk in problem.chunks()]
    chunks.insert(2, chunks[0][:, :0])  # an empty chunk is none
    assert torch.equal(sol_attn_chunked(chunks, *arguments, kmean, vscale)[0], wanted)


@everywhere
@pytest.mark.parametrize(
    "options",
    [
        dict(topk_ratio=0.2),
        dict(tau=1.4, sink_blocks=[0, 2], sink_q=[1, 2]),
        dict(tau=1.4, scale=0.05),
        dict(topk_ratio=0.3, tail=False, vsa=True),
        dict(tau=1.4, rotate=True),
    ],
    ids=["top-k", "sinks", "scale", "vsa", "rotated"],
)
def test_options_mean_what_they_mean_in_the_direct_call(options: dict):
    options = dict(options)
    problem = Problem()
    live = torch.ones(TOKENS, dtype=torch.bool)
    if options.pop("vsa", False):
        lengths = torch.randint(1, 65, (18,), dtype=torch.int32)
        live = (torch.arange(64) < lengths[:, None]).flatten()[:TOKENS]
        options["block_len"] = lengths
        options["coarse_gate"] = torch.randn(1, TOKENS, HEADS, 128).bfloat16()
    wanted = sol_attn(*problem.qkv, **options)[:, live]
    out, kmean, vscale = problem.run(**options)
    assert cosine(out[:, live], wanted) > 0.995
    assert torch.equal(problem.run(kmean, vscale, **options)[0], out)


def loud_problem() -> Problem:
    """A problem whose keys have four channels fifty times as loud, after norm and RoPE."""
    problem = Problem()
    for weight, gain in zip(problem.weights, (1.0, 50.0), strict=True):
        weight[[3, 51, 100, 101]] *= gain
    q, k, v = problem.fused.view(TOKENS, 3, HEADS, 128).unbind(1)
    q, k = (
        norm_rope(x, weight, problem.freqs[0, :, 0], 1e-6)[None]
        for x, weight in zip((q, k), problem.weights, strict=True)
    )
    problem.qkv = q, k, v[None]
    return problem


@everywhere
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_balanced_cold_and_primed(rotate: bool):
    problem = loud_problem()
    options = dict(tau=1.4, rotate=rotate)
    wanted = sol_attn(*problem.qkv, balance=True, **options)
    calls = []

    def source():
        calls.append(None)
        return problem.chunks()

    def run(*statistics, balance):
        arguments = (source, TOKENS, HEADS, problem.freqs, problem.weights, *statistics)
        return sol_attn_chunked(*arguments, balance=balance, **options)

    cold, kmean, vscale, factors = run(balance=True)
    assert len(calls) == 2 and factors.shape == (HEADS, 128) and factors.dtype == torch.float32
    assert cosine(cold, wanted) > 0.995
    # A mean key is one of the given keys: it serves a call that does not balance.
    torch.testing.assert_close(kmean, problem.run()[1])
    primed, *following = run(kmean, vscale, balance=factors)
    assert len(calls) == 3 and torch.equal(primed, cold)
    assert all(map(torch.equal, following, (kmean, vscale, factors)))
    assert torch.equal(run(kmean, vscale, balance=True)[0], cold) and len(calls) == 5
    assert torch.equal(run(balance=factors * 3)[0], cold) and len(calls) == 7
    # Factors of another step cost bits, no more: the products stay those of Q and K.
    other = factors.flip(0) * 1.3
    stale, *following = run(kmean, vscale, balance=other)
    assert cosine(stale, wanted) > 0.995
    assert all(map(torch.equal, following, (kmean, vscale, other)))
    for size in (64, 4096):
        again = problem.run(size=size, balance=True, **options)
        assert all(map(torch.equal, again, (cold, kmean, vscale, factors)))


@everywhere
def test_balanced_chunks_are_nearer_to_dense():
    problem = loud_problem()
    wanted = problem_dense(problem)
    plain, both = (
        relative(problem.run(tau=-1e9, rotate=on, balance=on)[0], wanted) for on in (False, True)
    )
    assert both < 0.3 * plain


@everywhere
def test_block_lengths_below_one_are_one():
    problem = Problem()
    given = torch.full((18,), 64, dtype=torch.int32)
    given[2], given[5] = 0, -3
    results = (problem.run(block_len=item) for item in (given, given.clamp(min=1)))
    assert all(map(torch.equal, *results))


@everywhere
def test_token_lists():
    problem = Problem()
    problem.fused[::97, HEADS * 128 : 2 * HEADS * 128] *= 6
    wanted = problem_dense(problem)
    plain, listed = (problem.run(tau=1.4, token_aug=budget)[0] for budget in (0, 256))
    direct = sol_attn(*problem.qkv, 1.4, token_aug=256)
    assert cosine(listed, direct) > 0.95
    assert relative(listed, wanted) < relative(plain, wanted)


def problem_dense(problem: Problem) -> torch.Tensor:
    q, k, v = (item.transpose(1, 2).double() for item in problem.qkv)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@everywhere
@pytest.mark.parametrize("token_aug", [0, 64])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_a_stale_key_mean_has_no_effect(token_aug: int, rotate: bool):
    """The tail follows the exact keys' origin: 2^(a q.(mu - kmean)) never gets between them."""
    problem = Problem(value=1.0)
    options = dict(tau=1.4, token_aug=token_aug, rotate=rotate)
    wanted, kmean, vscale = problem.run(**options)
    spread = problem.qkv[1][0].float().std()
    stale = kmean + spread * torch.randn(kmean.shape)
    # A wrong sign or a missing shift would move each row's tail by several octaves.
    q = problem.qkv[0][0].float()
    octaves = torch.einsum("thd,hd->th", q, stale - kmean) * 128**-0.5 * math.log2(math.e)
    assert octaves.abs().mean() > 1.0
    out = problem.run(stale, vscale, **options)[0]
    quantised = relative(wanted, sol_attn(*problem.qkv, **options))
    # INT8 error of keys whose range has grown by about sqrt(2), twice over for two results.
    assert relative(out, wanted) < max(4 * quantised, 0.03)


@everywhere
def test_statistics_of_zero_recover():
    problem = Problem()
    zero = torch.zeros(HEADS, 128)
    wanted = sol_attn(*problem.qkv, 1.4)
    out, kmean, vscale = problem.run(zero, zero, tau=1.4)
    assert torch.isfinite(out).all()
    assert cosine(problem.run(kmean, vscale, tau=1.4)[0], wanted) > 0.995


def biased(tokens: int = TOKENS) -> torch.Tensor:
    bias = torch.zeros(tokens)
    bias[64:192] = 0.37
    return bias


@everywhere
def test_a_key_bias_cold_and_primed():
    problem = Problem(96, seed=23, value=0.02)
    options = dict(tau=1.4, sink_blocks=[1, 3])
    wanted = sol_attn(*problem.qkv, key_bias=biased(), **options)
    plain, kmean, vscale = problem.run(**options)
    cold, *statistics = problem.run(key_bias=biased(), **options)
    primed = problem.run(kmean, vscale, key_bias=biased(), **options)[0]
    for out in (cold, primed):
        assert cosine(out, wanted) > 0.995
        assert not torch.equal(out, plain)
    assert torch.equal(statistics[0], kmean) and torch.equal(statistics[1], vscale)
    forms = [biased()[None], biased()[None, None, None]]
    assert all(torch.equal(problem.run(key_bias=form, **options)[0], cold) for form in forms)
    keep = torch.arange(TOKENS) != 70
    dropped = torch.zeros(TOKENS).masked_fill(~keep, -math.inf)
    outs = [problem.run(key_bias=item, **options)[0] for item in (keep, dropped)]
    assert torch.equal(*outs) and not torch.equal(outs[0], plain)


@everywhere
def test_a_key_bias_with_token_lists():
    problem = Problem(96, seed=31, value=0.02)
    options = dict(tau=1.4, sink_blocks=[1, 3], token_aug=64)
    plain, *statistics = problem.run(**options)
    out, *following = problem.run(key_bias=biased(), **options)
    assert cosine(out, sol_attn(*problem.qkv, key_bias=biased(), **options)) > 0.995
    assert not torch.equal(out, plain)
    assert all(map(torch.equal, statistics, following))


def untouched():
    """Return a source of chunks that fails when it is asked for one."""
    raise AssertionError("the producer was asked for chunks")


WRONG = {
    r"rot_dim .* got 12": dict(rope_freqs=torch.zeros(1, TOKENS, 1, 6, 2, 2)),
    r"rot_dim .* got 136": dict(rope_freqs=torch.zeros(1, TOKENS, 1, 68, 2, 2)),
    "rope_freqs: expected t": dict(rope_freqs=torch.zeros(1, 7, 1, 4, 2, 2)),
    r"rope_freqs: expected \[\.\.\., T": dict(rope_freqs=torch.zeros(TOKENS, 4)),
    "rope_freqs: expected torch.float32": dict(
        rope_freqs=torch.zeros(1, TOKENS, 1, 4, 2, 2).half()
    ),
    r"qk_norm_weights\[0\]": dict(qk_norm_weights=(torch.ones(64), torch.ones(128))),
    "qk_norm_weights: expected two": dict(qk_norm_weights=(torch.ones(128),)),
    "kmean: expected": dict(kmean=torch.zeros(3, 128)),
    "vscale: expected": dict(vscale=torch.zeros(HEADS, 128).half()),
    r"key_bias: expected .*\(7,\)": dict(key_bias=torch.zeros(7)),
    r"key_bias: expected .*\(2, 1124\)": dict(key_bias=torch.zeros(2, TOKENS)),
    "key_bias: expected zero outside": dict(key_bias=torch.ones(TOKENS), check_bias=True),
    "block_len: expected": dict(block_len=torch.ones(2, dtype=torch.int32)),
    "coarse_gate: expected": dict(coarse_gate=torch.zeros(1, 4, HEADS, 128)),
    "topk_ratio": dict(topk_ratio=1.5),
    "sink_blocks": dict(sink_blocks=[2, 1]),
    "token_aug": dict(token_aug=32),
    "t: expected an int": dict(t=0),
    "balance: expected": dict(balance=torch.zeros(3, 128)),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_named_before_the_first_chunk(words: str):
    problem = Problem()
    arguments: dict = dict(
        qkv_chunks=untouched,
        t=TOKENS,
        h=HEADS,
        rope_freqs=problem.freqs,
        qk_norm_weights=problem.weights,
    )
    with pytest.raises(ValueError, match=words):
        sol_attn_chunked(**(arguments | WRONG[words]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda chunks: chunks[:-1], "chunks cover 1024$"),
        (lambda chunks: [*chunks, chunks[0]], "start of 1124"),
        (lambda chunks: [*chunks[:-1], chunks[0], chunks[0]], "chunks cover 1280 or more"),
        (lambda chunks: [chunks[0][:100], *chunks], "multiple of 64 tokens, got a start of 100"),
        (lambda chunks: [chunks[0][:, :-1]], "chunks must be"),
        (lambda chunks: [chunks[0].half()], "chunks must be"),
        (lambda chunks: [chunks[0].to("meta")], "chunks must be .* meta"),
        (lambda chunks: [None], "chunks must be .* NoneType"),
        (lambda chunks: [chunks[0].clone().requires_grad_()], "without gradients"),
    ],
)
@pytest.mark.parametrize("primed", [False, True], ids=["cold", "primed"])
def test_a_wrong_chunk_is_named(change, words: str, primed: bool):
    problem = Problem()
    statistics = (torch.zeros(HEADS, 128), torch.ones(HEADS, 128)) if primed else ()
    with pytest.raises(ValueError, match=words):
        sol_attn_chunked(
            change(problem.chunks()),
            TOKENS,
            HEADS,
            problem.freqs,
            problem.weights,
            *statistics,
        )


def test_one_tensor_is_no_iterable_of_chunks():
    problem = Problem()
    with pytest.raises(TypeError, match="qkv_chunks: expected an iterable"):
        sol_attn_chunked(problem.fused, TOKENS, HEADS, problem.freqs, problem.weights)


def test_q_k_and_v_never_exist_whole():
    """A stream of chunks costs the INT8 operands, not the projection it replaces."""
    tokens, heads, size = 32768, 4, 1024
    freqs = torch.eye(2).expand(1, tokens, 1, 4, 2, 2)
    weights = (torch.ones(128), torch.ones(128))
    statistics = (torch.zeros(heads, 128), torch.ones(heads, 128))
    chunk = torch.randn(size, 3 * heads * 128).bfloat16()
    projection = tokens * 3 * heads * 128 * 2
    carriers = tokens * heads * (3 * 128 + 8)
    with PeakMemory() as peak:
        producer.qkv_producer(
            lambda: (chunk for _ in range(tokens // size)),
            tokens,
            heads,
            freqs.reshape(tokens, 4, 2, 2),
            weights,
            key_center=statistics[0],
            value_scale=statistics[1],
        )
    if peak.bytes is not None:
        # Rows in flight are widened to float32, several copies of 16 MiB at a time.
        assert peak.bytes < carriers * 1.25 + 8 * producer.STEP_BYTES
        assert carriers * 1.25 < 0.7 * projection
