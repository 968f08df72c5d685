"""Quantised attention on a GPU: what the interpreter cannot show (bf16, tensor cores, FP8)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from solspark.ops.quantize import quantize
from solspark.ops.quantized_attention import fp8_obstacle, quantized_attention
from solspark.reference import quantize as reference_quantize
from solspark.reference import quantized_attention as reference
from solspark.testing import poison_free_memory

pytestmark = pytest.mark.gpu


def tensors(tokens=1000, heads=4, kv_heads=None, dim=128, dtype=torch.bfloat16, batch=1, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(batch, tokens, heads, dim), *[(batch, tokens, kv_heads or heads, dim)] * 2]
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def selection(tokens, batch=1, heads=4, block_m=128, block_n=64, keep=0.3, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    grid = (batch, heads, -(-tokens // block_m), -(-tokens // block_n))
    mask = torch.rand(grid, generator=generator, device="cuda") < keep
    mask[..., 0] = True
    return mask


def expanded(mask, tokens, block_m=128, block_n=64):
    return mask.repeat_interleave(block_m, 2).repeat_interleave(block_n, 3)[:, :, :tokens, :tokens]


def dense(query, key, value, mask=None, **options):
    return F.scaled_dot_product_attention(
        *[x.transpose(1, 2).float() for x in (query, key, value)],
        attn_mask=mask,
        enable_gqa=True,
        **options,
    ).transpose(1, 2)


def assert_one_ulp(got, want):
    eps = torch.finfo(want.dtype).eps
    atol = 2**-10 * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=eps, atol=atol)


@pytest.mark.parametrize("tokens", [1000, 970])
@pytest.mark.parametrize("options", [{}, {"granularity": "tile"}, {"matmul": "none"}], ids=str)
def test_a_block_mask_is_its_expanded_token_mask(tokens, options):
    query, key, value = tensors(tokens)
    mask = selection(tokens)
    got = quantized_attention(query, key, value, block_mask=mask, impl="triton", **options)
    want = quantized_attention(
        query, key, value, attn_mask=expanded(mask, tokens), impl="triton", **options
    )
    assert_one_ulp(got, want)
    assert not torch.equal(got, quantized_attention(query, key, value, impl="triton", **options))


@pytest.mark.parametrize("lead", [(1, 8), (1, 1), (3, 8), (3, 1)])
def test_grouped_heads_and_broadcasts(lead):
    query, key, value = tensors(1000, heads=8, kv_heads=2, batch=3)
    mask = selection(1000, *lead)
    got = quantized_attention(query, key, value, block_mask=mask, impl="triton")
    want = quantized_attention(query, key, value, attn_mask=expanded(mask, 1000), impl="triton")
    assert_one_ulp(got, want)


@pytest.mark.parametrize("tokens", [1000, 992])
def test_every_block_is_dense_bit_for_bit(tokens):
    query, key, value = tensors(tokens)
    ones = torch.ones_like(selection(tokens))
    got = quantized_attention(query, key, value, block_mask=ones, impl="triton")
    assert torch.equal(got, quantized_attention(query, key, value, impl="triton"))


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"granularity": "tile"}, {"matmul": "none"}, {"pv": "int8"}, {"matmul": "fp8"}],
    ids=str,
)
def test_a_mask_and_blocks_equal_the_joined_mask_bit_for_bit(options, floats):
    if "fp8" in options.values() and fp8_obstacle(torch.device("cuda")):
        pytest.skip(fp8_obstacle(torch.device("cuda")))
    query, key, value = tensors(1000)
    blocks = selection(1000)
    shown = expanded(blocks, 1000)
    for shape in ((1, 1, 1, 1000), (1, 4, 1000, 1000), (1000, 1000)):
        if floats:
            mask = torch.randn(shape, device="cuda")
            joined_mask = mask.expand(1, 4, 1000, 1000).masked_fill(~shown, float("-inf"))
        else:
            mask = torch.rand(shape, device="cuda") > 0.3
            joined_mask = mask & shown
        run = {"impl": "triton", "return_lse": True, **options}
        both = quantized_attention(query, key, value, attn_mask=mask, block_mask=blocks, **run)
        joined = quantized_attention(query, key, value, attn_mask=joined_mask, **run)
        assert torch.equal(both[0], joined[0]) and torch.equal(both[1], joined[1])


def test_empty_rows_are_zero():
    query, key, value = tensors(1000)
    mask = selection(1000)
    mask[:, :, 3] = False
    poison_free_memory("cuda")
    out, lse = quantized_attention(
        query, key, value, block_mask=mask, return_lse=True, impl="triton"
    )
    assert not out[:, 384:512].any() and out.isfinite().all()
    assert torch.isneginf(lse[:, 384:512]).all() and lse[:, :384].isfinite().all()


OPTIONS = [
    ({"matmul": "none"}, 0.005),
    ({}, 0.02),
    ({"granularity": "tile"}, 0.03),
    ({"hadamard": 128}, 0.02),
    ({"pv": "int8"}, 0.03),
    ({"pv": "fp16"}, 0.02),
    ({"matmul": "fp16"}, 0.006),
    ({"matmul": "fp8"}, 0.06),
    ({"matmul": "fp8", "pv": "fp8"}, 0.08),
]


@pytest.mark.parametrize(("options", "bound"), OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [40, 64, 96, 128])
def test_error_against_full_precision(options, bound, dim):
    if "fp8" in options.values() and fp8_obstacle(torch.device("cuda")):
        pytest.skip(fp8_obstacle(torch.device("cuda")))
    query, key, value = tensors(1000, dim=dim)
    out = quantized_attention(query, key, value, impl="triton", **options)
    want = dense(query, key, value)
    assert out.isfinite().all()
    assert float((out.float() - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"pv": "int8"}, {"is_causal": True}], ids=str)
def test_the_reference_on_the_same_device(dtype, options):
    query, key, value = tensors(700, kv_heads=2, dim=64, dtype=dtype)
    mask = selection(700)
    given = {"block_mask": mask, "smooth_k": False, **options}
    out, lse = quantized_attention(query, key, value, return_lse=True, impl="triton", **given)
    want, want_lse = reference.quantized_attention(
        *[x.double() for x in (query, key, value)], return_lse=True, **given
    )
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    step = float(value.abs().max()) / 127 if options.get("pv") else 0.0
    error = (out.double() - want).abs()
    assert error.max() <= 2 * eps * float(value.abs().max()) + step
    assert error.mean() <= eps * float(want.abs().mean()) + 1e-3 * step
    alive = ~torch.isneginf(want_lse)
    assert (lse[alive] - want_lse[alive]).abs().max() < 1e-4


@pytest.mark.parametrize("tokens", [*range(1, 131, 3), 4096 + 77, 18_200])
def test_every_length_with_poisoned_memory(tokens):
    query, key, value = tensors(tokens, heads=2, dim=64)
    poison_free_memory("cuda")
    out = quantized_attention(query, key, value, impl="triton")
    want = dense(query, key, value)
    assert out.isfinite().all()
    assert float((out.float() - want).norm() / want.norm()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [167_000, 200_000, 300_000])
@pytest.mark.parametrize("options", [{}, {"pv": "int8"}], ids=str)
def test_sampled_rows_of_very_long_calls(tokens, options):
    """Views of a fused projection whose offsets pass 2^32, every key read: no noise, no grey tail.

    Finite and the same again is no proof: rows are compared with float32 attention on copies.
    """
    heads = 56
    fused = torch.empty(1, tokens, 3, heads, 128, device="cuda", dtype=torch.bfloat16).normal_()
    query, key, value = fused.unbind(2)
    out = quantized_attention(query, key, value, impl="triton", **options)
    rows = torch.tensor([0, 1, 63, 64, tokens // 2, 149_796, tokens - 65, tokens - 1])
    for head in (0, 27, 55):
        q, k, v = (x[0, :, head].float() for x in (query[:, rows], key, value))
        want = (q @ k.T * 128**-0.5).softmax(-1) @ v
        assert float((out[0, rows, head].float() - want).norm() / want.norm()) < 0.03


def test_fewer_keys_than_queries_with_poisoned_memory():
    query, key, value = tensors(1001, heads=2, dim=64)
    key, value = key[:, :503].clone(), value[:, :503].clone()
    poison_free_memory("cuda")
    out = quantized_attention(query, key, value, impl="triton")
    want = dense(query, key, value)
    assert out.isfinite().all()
    assert float((out.float() - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("options", [{}, {"pv": "int8"}, {"matmul": "none"}], ids=str)
def test_values_far_from_zero_do_not_overflow_in_half_precision(options):
    query, key, value = tensors(32_768, heads=1, dtype=torch.float16)
    value = value + torch.where(torch.arange(128, device="cuda") % 2 == 0, 200.0, -200.0).half()
    out = quantized_attention(query, key, value, impl="triton", **options)
    rows = slice(0, None, 997)
    want = dense(query[:, rows], key, value)
    assert out.isfinite().all()
    assert float((out[:, rows].float() - want).norm() / want.norm()) < 0.02


def test_rows_further_apart_than_32_bits_count():
    apart = 2**30
    buffer = torch.empty(2 * apart + 4096, dtype=torch.bfloat16, device="cuda")
    views = []
    for number, x in enumerate(tensors(3, heads=2, dim=64)):
        view = buffer.as_strided(x.shape, (3 * apart, apart, 64, 1), 512 * number)
        views.append(view.copy_(x))
    grad_out = torch.randn(1, 3, 2, 64, device="cuda").bfloat16()
    for options in ({}, {"pv": "int8", "granularity": "tile"}, {"matmul": "none"}):
        plain = [x.contiguous() for x in views]

        def run(*x, options=options):
            return quantized_attention(*x, impl="triton", **options)

        assert torch.equal(run(*views), run(*plain))
        leaves = [x.detach().requires_grad_() for x in views]
        run(*leaves).backward(grad_out)
        for leaf, want in zip(leaves, gradients(plain, grad_out, run), strict=True):
            assert torch.equal(leaf.grad, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second device")
def test_a_device_that_is_not_the_current_one():
    inputs = tensors(300)
    want = quantized_attention(*inputs, impl="triton")
    moved = [x.to("cuda:1").requires_grad_() for x in inputs]
    got = quantized_attention(*moved, impl="triton")
    got.sum().backward()
    assert torch.equal(got.cpu(), want.cpu())
    assert all(x.grad.isfinite().all() for x in moved)


def test_more_samples_than_an_axis_of_a_grid_holds():
    query, key, value = tensors(20, heads=1, dim=16, batch=70_000)
    mask = torch.ones(70_000, 1, 1, 1, dtype=torch.bool, device="cuda")
    out = quantized_attention(query, key, value, block_mask=mask, impl="triton")
    want = dense(query, key, value)
    assert float((out.float() - want).norm() / want.norm()) < 0.02


def test_strided_views_change_no_bit():
    query, key, value = tensors(1000)
    fused = torch.stack([query, key, value], 2)
    parts = [fused[:, :, i] for i in range(3)]
    for options in ({}, {"matmul": "none"}, {"pv": "int8"}):
        got = quantized_attention(*parts, impl="triton", **options)
        assert torch.equal(got, quantized_attention(query, key, value, impl="triton", **options))


def test_repeats_are_equal_bit_for_bit():
    query, key, value = tensors(3000)
    mask = selection(3000)
    first = quantized_attention(query, key, value, block_mask=mask, impl="triton")
    for _ in range(20):
        again = quantized_attention(query, key, value, block_mask=mask, impl="triton")
        assert torch.equal(first, again)


def gradients(inputs, grad_out, function):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    function(*leaves).backward(grad_out)
    return [x.grad for x in leaves]


def test_the_backward_of_blocks_is_that_of_their_token_mask():
    inputs = tensors(992, heads=8, kv_heads=2)
    mask = selection(992, heads=8)
    grad_out = torch.randn_like(inputs[0])
    by_blocks = gradients(
        inputs, grad_out, lambda *x: quantized_attention(*x, block_mask=mask, impl="triton")
    )
    by_tokens = gradients(
        inputs,
        grad_out,
        lambda *x: quantized_attention(*x, attn_mask=expanded(mask, 992), impl="triton"),
    )
    for got, want in zip(by_blocks, by_tokens, strict=True):
        assert_one_ulp(got, want)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_backward_is_that_of_autograd(masked, dim):
    inputs = tensors(700, dim=dim, dtype=torch.float32)
    grad_out = torch.randn_like(inputs[0])
    mask = selection(700) if masked else None
    shown = expanded(mask, 700) if masked else None
    got = gradients(
        inputs,
        grad_out,
        lambda *x: quantized_attention(*x, block_mask=mask, matmul="none", impl="triton"),
    )
    want = gradients(inputs, grad_out, lambda *x: dense(*x, mask=shown))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() < 0.005 * theirs.abs().max()


def test_dropped_blocks_have_zero_gradients():
    inputs = tensors(512)
    mask = torch.ones(1, 1, 4, 8, dtype=torch.bool, device="cuda")
    mask[:, :, 1] = False
    mask[..., 5] = False
    got = gradients(
        inputs,
        torch.randn_like(inputs[0]),
        lambda *x: quantized_attention(*x, block_mask=mask, impl="triton"),
    )
    assert not got[0][:, 128:256].any() and got[0][:, :128].any()
    for grad in got[1:]:
        assert not grad[:, 320:384].any() and grad[:, :320].any()


def test_the_kernel_and_flex_agree_on_a_selection():
    from solspark.router import Platform, SelectorSpec, select_adaptive
    from solspark.router.backends.flex import prepare_flex

    query, key, value = tensors(2048)
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    chosen = select_adaptive(*heads_first[:2], SelectorSpec(budget=0.25))
    want = dense(query, key, value, mask=chosen.token_mask())
    ours = quantized_attention(
        query, key, value, block_mask=chosen.keep, matmul="none", impl="triton"
    )
    theirs = prepare_flex(Platform("cuda"), F.scaled_dot_product_attention, {})(
        *heads_first, selection=chosen
    ).transpose(1, 2)
    for out in (ours, theirs):
        assert (out.float() - want).abs().max() < 1e-2


@pytest.mark.parametrize("tiles", list(itertools.product((32, 64, 128), (16, 32, 64))), ids=str)
def test_every_tile_that_nests_in_a_block(tiles, monkeypatch):
    from solspark.kernels import quantized_attention as kernels
    from solspark.kernels.quantized_tile import Config

    query, key, value = tensors(970)
    mask = selection(970)
    want = quantized_attention(query, key, value, attn_mask=expanded(mask, 970), impl="triton")
    monkeypatch.setattr(kernels, "choose_config", lambda *args: Config(*tiles, 4, 2))
    got = quantized_attention(query, key, value, block_mask=mask, impl="triton")
    assert_one_ulp(got, want)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp16"])
@pytest.mark.parametrize("granularity", ["row", "tile"])
def test_quantize_equals_the_reference(dtype, granularity):
    if dtype == "fp8" and fp8_obstacle(torch.device("cuda")):
        pytest.skip(fp8_obstacle(torch.device("cuda")))
    for hadamard, dim in itertools.product((0, 16, 128), (40, 128)):
        key = tensors(1000, dim=dim)[1]
        options = {
            "dtype": dtype,
            "granularity": granularity,
            "mean": reference.key_mean(key),
            "hadamard": hadamard,
        }
        values, scales = quantize(key, impl="triton", **options)
        want, want_scales = reference_quantize.quantize(key.cpu().cuda(), **options)
        torch.testing.assert_close(scales, want_scales, rtol=1e-5, atol=0)
        differ = (values.float() != want.float()).float().mean()
        assert differ < (1e-3 if dtype == "int8" else 2e-2)


def test_peak_memory_is_that_of_the_operands():
    query, key, value = tensors(16_384, heads=8)
    mask = selection(16_384, heads=8)
    quantized_attention(query, key, value, block_mask=mask, impl="triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantized_attention(query, key, value, block_mask=mask, impl="triton")
    extra = torch.cuda.max_memory_allocated() - before
    operands = 2 * query.numel() + query.numel() * 2
    assert extra < 1.5 * operands + 8 * mask.numel()


def test_capture_replays_to_the_same_bits():
    query, key, value = tensors(2000)
    mask = selection(2000)

    def run():
        return quantized_attention(query, key, value, block_mask=mask, impl="triton")

    want = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)
