"""INT8 Sol-Attn on a GPU: bfloat16, tensor cores, production lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from solspark import last_call
from solspark.int8 import sol_attn, sol_attn_chunked, sol_attn_is_available
from solspark.ops._sol_int8_triton import ROUTE_BYTES
from solspark.ops.qkv_producer import quantize_qkv
from solspark.ops.sol_int8 import sol_int8
from solspark.reference.sol_int8 import sol_int8 as reference
from solspark.testing import poison_free_memory

pytestmark = pytest.mark.gpu


def implementations(**options) -> list[str]:
    """Return the implementations that serve a call with these options here."""
    capability = torch.cuda.get_device_capability()
    hopper = capability == (9, 0) and not torch.version.hip and not options.get("token_aug")
    return ["triton", "hopper"] if hopper else ["triton"]


def inputs(tokens: int, *, batch: int = 1, heads: int = 4, dtype=torch.bfloat16, seed: int = 0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, tokens, heads, 128)
    return [
        (torch.randn(shape, generator=generator, device="cuda") * amplitude).to(dtype)
        for amplitude in (0.5, 0.5, 1.0)
    ]


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def cosine(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    pair = (item.double().flatten() for item in (actual, wanted))
    return float(torch.nn.functional.cosine_similarity(*pair, 0))


def dense(q, k, v) -> torch.Tensor:
    q, k, v = (item.transpose(1, 2).float() for item in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize(
    "basis",
    [dict(), dict(rotate=True), dict(balance=True), dict(rotate=True, balance=True)],
    ids=lambda basis: " ".join(basis) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 40, 3137])
def test_operands_are_the_eager_ones(tokens: int, dtype: torch.dtype, basis: dict):
    tensors = inputs(tokens, batch=2, dtype=dtype)
    tensors[1][:, :, 1, ::31] *= 30.0  # a head that is worth balancing
    poison_free_memory("cuda")
    made = quantize_qkv(*tensors, impl="triton", **basis)
    wanted = quantize_qkv(*tensors, impl="eager", **basis)
    for name in ("query", "key", "value", "pooled", "centroid"):
        difference = (getattr(made, name).int() - getattr(wanted, name).int()).abs()
        assert difference.max() <= 1 and difference.float().mean() < 2e-3, name
    for name in ("query_scale", "key_scale", "value_scale", "query_means", "key_means", "key_var"):
        torch.testing.assert_close(
            getattr(made, name), getattr(wanted, name), rtol=1e-4, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("tokens", [1, 40, 1000, 3137])
@pytest.mark.parametrize(
    "options",
    [
        dict(tau=1.0),
        dict(topk_ratio=0.2, sinks=(1, 3), dense_rows=(0, 1)),
        dict(tau=1.4, tail=False),
        dict(tau=1.4, token_aug=256),
        dict(topk_ratio=0.1, token_aug=64, sinks=(1, 3)),
        dict(tau=1.4, token_aug=192, tail=False),
    ],
    ids=["tau", "top-k", "no-tail", "tokens", "top-k-tokens", "tokens-no-tail"],
)
def test_kernels_do_the_integer_arithmetic(tokens: int, options: dict):
    qkv = quantize_qkv(*inputs(tokens, batch=2), impl="eager")
    eager = sol_int8(qkv, dtype=torch.float32, impl="eager", **options)
    poison_free_memory("cuda")
    for impl in implementations(**options):
        out = sol_int8(qkv, dtype=torch.float32, impl=impl, **options)
        # A GPU's exp2 is off by two units: about one byte of P in ten thousand turns over.
        assert relative(out, eager) < 5e-4, impl


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("tokens", [3137, 4096])
def test_thresholds_against_the_float_reference(tokens: int, tau: float):
    q, k, v = inputs(tokens)
    wanted = reference(q, k, v, tau=tau)
    for impl in implementations():
        assert cosine(sol_attn(q, k, v, tau, impl=impl), wanted) > 0.998, impl


@pytest.mark.parametrize("tokens", [1000, 3137, 4096])
def test_budgets_against_the_float_reference(tokens: int):
    q, k, v = inputs(tokens)
    wanted = reference(q, k, v, topk_ratio=0.2)
    for impl in implementations():
        assert cosine(sol_attn(q, k, v, topk_ratio=0.2, impl=impl), wanted) > 0.995, impl


def test_a_budget_is_kept_exactly():
    """The blocks beyond sinks and neighbours are the budget, but for those it shares with them."""
    q, k, v = inputs(64 * 100)
    qkv = quantize_qkv(q, k, v)
    sol_int8(qkv, topk_ratio=0.2, sinks=(0, 5))
    record = last_call()
    assert record is not None and record.exact_pairs is not None
    counts = record.exact_pairs.view(4, 100)[:, 10:]
    assert ((counts >= 5 + 19) & (counts <= 5 + 19 + 3)).all()


@pytest.mark.parametrize("scale", [-0.05, 0.0])
def test_a_bias_a_gate_short_blocks_and_odd_scales(scale: float):
    q, k, v = inputs(1000, batch=2)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 65, (16,), generator=generator, dtype=torch.int32).cuda()
    bias = torch.randn(2, 1000, generator=generator)
    bias[:, 64:100] = -torch.inf
    gate = torch.randn(2, 1000, 4, 128, generator=generator).to("cuda", torch.bfloat16)
    qkv = quantize_qkv(q, k, v, key_bias=bias.cuda(), block_len=lengths, impl="eager")
    options = dict(tau=0.5, scale=scale, sinks=(0, 4), coarse_gate=gate, dtype=torch.float32)
    eager = sol_int8(qkv, impl="eager", **options)
    for impl in implementations():
        assert relative(sol_int8(qkv, impl=impl, **options), eager) < 5e-4, impl


def test_everything_exact_is_dense():
    q, k, v = inputs(4096, heads=8)
    for impl in implementations():
        assert relative(sol_attn(q, k, v, -1e9, impl=impl), dense(q, k, v)) < 0.016, impl
        assert last_call().implementation == impl
    assert sol_attn_is_available()


def test_everything_exact_at_the_length_of_a_clip():
    """Unit normals: 0.0148 on a CPU (four heads, 1,024 rows); comfy-kitchen 0.2.40 has 0.0150."""
    tokens, heads = 38_222, 8
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, 128, generator=generator, device="cuda").bfloat16()
        for _ in range(3)
    )
    rows = torch.arange(0, tokens, 75, device="cuda")
    query, key, value = (item.transpose(1, 2).float() for item in (q[:, rows], k, v))
    wanted = (query @ key.mT * 128**-0.5).softmax(-1) @ value
    for impl in implementations():
        out = sol_attn(q, k, v, -1e9, impl=impl)[:, rows].transpose(1, 2)
        assert relative(out, wanted) < 0.0150, impl


@pytest.mark.parametrize(
    "options",
    [dict(tau=1.0), dict(topk_ratio=0.1), dict(tau=1.4, token_aug=256, rotate=True)],
    ids=["tau", "top-k", "tokens"],
)
def test_repeats_and_views_give_the_same_bits(options: dict):
    q, k, v = inputs(3137, heads=3)
    out = sol_attn(q, k, v, **options)
    assert all(torch.equal(sol_attn(q, k, v, **options), out) for _ in range(20))
    views = torch.stack([q, k, v], 2).unbind(2)
    assert torch.equal(sol_attn(*views, **options), out)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "heads"), [(167_000, 8), (300_000, 56)])
def test_sampled_rows_of_very_long_calls(tokens: int, heads: int):
    """Everything exact, compared with float32 attention on copies of sampled rows."""
    fused = torch.empty(1, tokens, 3, heads, 128, device="cuda", dtype=torch.bfloat16).normal_()
    q, k, v = fused.unbind(2)
    out = sol_attn(q, k, v, -1e9)
    rows = torch.tensor([0, 1, 63, 64, tokens // 2, tokens - 65, tokens - 1])
    for head in (0, heads - 1):
        query, key, value = (item[0, :, head].float() for item in (q[:, rows], k, v))
        wanted = (query @ key.T * 128**-0.5).softmax(-1) @ value
        assert relative(out[0, rows, head], wanted) < 0.03


def test_chunks_are_the_direct_call():
    tokens, heads = 4096 + 100, 4
    fused = torch.randn(tokens, 3 * heads * 128, device="cuda").bfloat16() * 0.5
    freqs = torch.eye(2, device="cuda").expand(1, tokens, 1, 48, 2, 2).contiguous()
    weights = [torch.ones(128, device="cuda")] * 2
    arguments = (tokens, heads, freqs, weights)
    cold, kmean, vscale = sol_attn_chunked(lambda: fused.split(1024), *arguments, tau=1.4)
    primed = sol_attn_chunked(fused.split(1024), *arguments, kmean, vscale, tau=1.4)[0]
    assert torch.equal(primed, cold)
    eager = sol_attn_chunked(fused.split(1024), *arguments, kmean, vscale, tau=1.4, impl="eager")
    assert cosine(cold, eager[0]) > 0.995


@pytest.mark.parametrize("options", [dict(tau=1.0), dict(topk_ratio=0.1, token_aug=64)])
def test_a_captured_graph_gives_the_same_bits(options: dict):
    """Nothing waits for the host, and nothing is copied from it."""
    q, k, v = inputs(3137)
    wanted = sol_attn(q, k, v, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sol_attn(q, k, v, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sol_attn(q, k, v, **options)
    q.mul_(1.0)
    graph.replay()
    assert torch.equal(out, wanted)


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes above what was allocated before a second call."""
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("token_aug", [0, 256])
def test_memory_stays_below_the_operands_and_a_slab(token_aug: int):
    tokens, heads = 38_222, 8
    q, k, v = inputs(tokens, heads=heads)
    peak = peak_of(lambda: sol_attn(q, k, v, topk_ratio=0.1, token_aug=token_aug))
    # Operands, their block means and the 16-bit lists of all heads, beside the output or the slab.
    blocks = -(-tokens // 64)
    slab = min(ROUTE_BYTES, heads * blocks**2 * (4 + (34 if token_aug else 0)))
    lists = heads * blocks**2 * 2
    assert peak < tokens * heads * 392 * 1.15 + lists + 1.2 * max(slab, tokens * heads * 256)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "bar"), [(73_584, 2.96), (104_050, 4.22)])
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_chunks_take_no_more_memory_than_the_peer(tokens: int, bar: float, impl: str):
    """GiB of comfy-kitchen 0.2.40, top-k 10 %, 56 heads, primed, chunks of 4,096 tokens."""
    if impl not in implementations():
        pytest.skip(f"{impl} does not serve this device")
    heads = 56
    fused = torch.randn(tokens, 3 * heads * 128, device="cuda", dtype=torch.bfloat16)
    freqs = torch.eye(2, device="cuda").expand(1, tokens, 1, 48, 2, 2).contiguous()
    weights = [torch.ones(128, device="cuda")] * 2
    statistics = (torch.zeros(heads, 128, device="cuda"), torch.ones(heads, 128, device="cuda"))

    def call() -> torch.Tensor:
        chunks = (fused[first : first + 4096] for first in range(0, tokens, 4096))
        return sol_attn_chunked(
            chunks, tokens, heads, freqs, weights, *statistics, topk_ratio=0.1, impl=impl
        )[0]

    assert peak_of(call) < bar * 2**30
