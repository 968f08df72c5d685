"""INT8 Sol-Attn on a GPU: bfloat16, tensor cores, production lengths."""

from __future__ import annotations

import pytest
import torch

from solspark import last_call
from solspark.int8 import sol_attn, sol_attn_chunked, sol_attn_is_available
from solspark.ops.qkv_producer import quantize_qkv
from solspark.ops.sol_int8 import sol_int8
from solspark.testing import poison_free_memory

pytestmark = pytest.mark.gpu


def served() -> list[str]:
    capability = torch.cuda.get_device_capability()
    return ["triton", "hopper"] if capability == (9, 0) and not torch.version.hip else ["triton"]


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


def dense(q, k, v) -> torch.Tensor:
    q, k, v = (item.transpose(1, 2).float() for item in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 40, 1000, 3137])
@pytest.mark.parametrize(
    "options",
    [
        dict(tau=1.0),
        dict(topk_ratio=0.2, sinks=(1, 3), dense_rows=(0, 1)),
        dict(tau=1.4, tail=False),
    ],
    ids=["tau", "top-k", "no-tail"],
)
def test_kernels_do_the_integer_arithmetic(tokens: int, options: dict):
    tensors = inputs(tokens, batch=2)
    poison_free_memory("cuda")
    served = quantize_qkv(*tensors, impl="triton")
    wanted = quantize_qkv(*tensors, impl="eager")
    for name in ("query", "key", "value", "pooled", "centroid"):
        difference = (getattr(served, name).int() - getattr(wanted, name).int()).abs()
        assert difference.max() <= 1 and difference.float().mean() < 1e-3, name
    eager = sol_int8(wanted, dtype=torch.float32, impl="eager", **options)
    for impl in served():
        out = sol_int8(wanted, dtype=torch.float32, impl=impl, **options)
        # A GPU's exp2 is off by two units: about one byte of P in ten thousand turns over.
        assert relative(out, eager) < 5e-4, impl


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
    for impl in served():
        assert relative(sol_int8(qkv, impl=impl, **options), eager) < 5e-4, impl


def test_everything_exact_is_dense():
    q, k, v = inputs(4096, heads=8)
    for impl in served():
        assert relative(sol_attn(q, k, v, -1e9, impl=impl), dense(q, k, v)) < 0.016, impl
        assert last_call().implementation == impl
    assert sol_attn_is_available()


@pytest.mark.parametrize("options", [dict(tau=1.0), dict(topk_ratio=0.1)], ids=["tau", "top-k"])
def test_repeats_and_views_give_the_same_bits(options: dict):
    q, k, v = inputs(3137, heads=3)
    out = sol_attn(q, k, v, **options)
    assert all(torch.equal(sol_attn(q, k, v, **options), out) for _ in range(5))
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
    assert (
        torch.nn.functional.cosine_similarity(
            cold.double().flatten(), eager[0].double().flatten(), 0
        )
        > 0.995
    )


def test_memory_stays_below_the_operands_and_a_slab():
    tokens, heads = 38_222, 8
    q, k, v = inputs(tokens, heads=heads)
    sol_attn(q, k, v, topk_ratio=0.1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sol_attn(q, k, v, topk_ratio=0.1)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < tokens * heads * (396 + 256) * 1.5 + 512 * 2**20
