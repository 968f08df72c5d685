"""Quantised attention: every implementation against the reference, masks, gradients, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from solspark.errors import UnsupportedError
from solspark.ops import _dispatch
from solspark.ops.quantize import quantize
from solspark.ops.quantized_attention import quantized_attention
from solspark.reference import quantize as reference_quantize
from solspark.reference import quantized_attention as reference_attention
from solspark.testing import assert_close_to_oracle

OPTIONS = [
    {"matmul": "none"},
    {"matmul": "none", "pv": "int8"},
    {},
    {"smooth_k": False},
    {"granularity": "tile"},
    {"hadamard": 16},
    {"hadamard": 256, "smooth_k": False},
    {"pv": "int8"},
    {"pv": "int8", "hadamard": 64, "granularity": "tile"},
    {"matmul": "fp8", "pv": "fp8"},
    {"matmul": "fp16", "pv": "fp16"},
]


def named(options):
    return " ".join(f"{key}={value}" for key, value in options.items()) or "int8"


def tensors(tokens=150, key_tokens=170, heads=4, kv_heads=2, dim=32, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens + key_tokens + dim)
    shapes = [(batch, tokens, heads, dim), *[(batch, key_tokens, kv_heads, dim)] * 2]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    # Keys of real models share a bias a channel.
    key = key + 2 * torch.randn(dim, generator=generator)
    return [x.to(dtype) for x in (query, key, value)]


def oracle(query, key, value, **options):
    """The reference in float64, and in the inputs' own type."""
    doubles = [x.double() for x in (query, key, value)]
    mask = options.get("attn_mask")
    widened = dict(options)
    if mask is not None and mask.is_floating_point():
        widened["attn_mask"] = mask.double()
    return (
        reference_attention.quantized_attention(*doubles, return_lse=True, **widened),
        reference_attention.quantized_attention(query, key, value, return_lse=True, **options),
    )


ROUNDING = {"none": 0.0, "int8": 1 / 127, "fp8": 1 / 8, "fp16": 1 / 1024}
"""Largest step between neighbouring values of a quantised P, relative to its tile's largest."""


def assert_close_with_steps(actual, want, same, step):
    """As the oracle's rule; a rounded P may also land on the other neighbour, and seldom does.

    FP32 and FP64 disagree about a rounding only within their difference of a tie, so an output may
    be off by one step of one weight, and a thousandth of a step on average.
    """
    if step == 0.0:
        assert_close_to_oracle(actual, want, same)
        return
    error = (actual.double() - want).abs()
    peer = (same.double() - want).abs()
    eps = torch.finfo(actual.dtype).eps * float(want.abs().max())
    assert actual.isfinite().all()
    assert error.max() <= 2 * peer.max() + step + eps
    assert error.mean() <= 2 * peer.mean() + 1e-3 * step + eps


def check(query, key, value, impl="eager", **options):
    """Compare an implementation with the oracle; return what it gave."""
    (want, want_lse), (same, same_lse) = oracle(query, key, value, **options)
    out, lse = quantized_attention(query, key, value, return_lse=True, impl=impl, **options)
    assert out.dtype == query.dtype and lse.dtype == torch.float32
    step = ROUNDING[options.get("pv", "none")] * float(value.abs().max())
    assert_close_with_steps(out, want, same, step)
    alive = want_lse > -math.inf
    assert torch.equal(lse > -math.inf, alive)
    assert not out[~alive].any()
    assert_close_to_oracle(lse[alive], want_lse[alive], same_lse[alive], name="lse")
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_quantisation_options(options):
    check(*tensors(), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [40, 96, 128])
def test_head_dims_and_types(dtype, dim):
    check(*tensors(dim=dim, dtype=dtype), hadamard=256)


def masks(kind, tokens, key_tokens, batch=2, heads=4):
    generator = torch.Generator().manual_seed(3)
    if kind == "key":
        mask = torch.rand(batch, 1, 1, key_tokens, generator=generator) > 0.4
        mask[1, ..., : key_tokens // 2] = False
        return mask
    if kind == "full":
        mask = torch.rand(batch, heads, tokens, key_tokens, generator=generator) > 0.4
        mask[0, 0, 5] = False
        return mask
    if kind == "int8":
        return (torch.rand(tokens, key_tokens, generator=generator) > 0.4).to(torch.int8)
    if kind == "float":
        bias = torch.randn(1, heads, tokens, key_tokens, generator=generator)
        bias[..., 7, 3:90] = -math.inf
        return bias
    if kind == "vector":
        return torch.rand(key_tokens, generator=generator) > 0.4
    return None


@pytest.mark.parametrize("kind", ["key", "full", "int8", "float", "vector"])
@pytest.mark.parametrize("with_blocks", [False, True])
def test_token_masks_alone_and_with_a_block_mask(kind, with_blocks):
    query, key, value = tensors()
    options = {"attn_mask": masks(kind, 150, 170)}
    if with_blocks:
        options["block_mask"] = block_masks(150, 170, 64, 32)
        options.update(block_m=64, block_n=32)
    check(query, key, value, **options)


def block_masks(tokens, key_tokens, block_m, block_n, batch=2, heads=4, keep=0.4):
    generator = torch.Generator().manual_seed(5)
    grid = (batch, heads, -(-tokens // block_m), -(-key_tokens // block_n))
    mask = torch.rand(grid, generator=generator) < keep
    mask[0, 0, 0] = False
    mask[0, 1, -1] = True
    return mask


@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("blocks", [(128, 64), (32, 16), (16, 128)])
def test_block_masks(options, blocks):
    query, key, value = tensors()
    mask = block_masks(150, 170, *blocks)
    out = check(query, key, value, block_mask=mask, block_m=blocks[0], block_n=blocks[1], **options)
    # The head whose first block row keeps nothing.
    assert not out[0, : blocks[0], 0].any()


@pytest.mark.parametrize("lead", [(1, 1), (1, 4), (2, 1), (), (4,)])
def test_block_masks_broadcast(lead):
    query, key, value = tensors()
    full = block_masks(150, 170, 64, 64)
    shown = full[: lead[0] if len(lead) == 2 else 1, : lead[-1] if lead else 1]
    shown = shown.reshape(*lead, *shown.shape[2:])
    out = quantized_attention(query, key, value, block_mask=shown, block_m=64, block_n=64)
    spelled = shown.reshape((1,) * (4 - shown.ndim) + tuple(shown.shape)).expand(2, 4, -1, -1)
    want = quantized_attention(
        query, key, value, block_mask=spelled.to(torch.int8), block_m=64, block_n=64
    )
    assert torch.equal(out, want)


@pytest.mark.parametrize("tokens", [(1, 1), (5, 9), (64, 64), (65, 130), (200, 70), (70, 200)])
def test_causal_and_lengths(tokens):
    query, key, value = tensors(*tokens)
    check(query, key, value)
    check(query, key, value, is_causal=True)
    mask = block_masks(*tokens, 64, 32)
    check(query, key, value, is_causal=True, block_mask=mask, block_m=64, block_n=32)


def test_causal_with_a_block_that_a_row_cannot_see_is_no_nan():
    # Rows 0..31 of the first block row see nothing of block 1, the only one kept.
    query, key, value = tensors(128, 128)
    mask = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    mask[..., 1] = True
    out = check(query, key, value, is_causal=True, block_mask=mask, block_m=128, block_n=32)
    assert not out[:, :32].any() and out[:, 32:].any()


def test_every_block_is_the_dense_result():
    query, key, value = tensors(150, 170)
    ones = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    for options in OPTIONS:
        sparse = quantized_attention(query, key, value, block_mask=ones, **options)
        dense = quantized_attention(query, key, value, **options)
        torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-6)


def test_a_mask_with_a_block_mask_is_both_at_once():
    query, key, value = tensors()
    blocks = block_masks(150, 170, 64, 64)
    mask = masks("full", 150, 170)
    both = quantized_attention(
        query, key, value, attn_mask=mask, block_mask=blocks, block_m=64, block_n=64
    )
    expanded = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :150, :170]
    joined = quantized_attention(query, key, value, attn_mask=mask & expanded)
    torch.testing.assert_close(both, joined, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(both, quantized_attention(query, key, value, attn_mask=mask))


def test_grouped_heads_equal_repeated_ones():
    query, key, value = tensors(heads=8, kv_heads=2)
    grouped = quantized_attention(query, key, value)
    repeated = [x.repeat_interleave(4, 2) for x in (key, value)]
    torch.testing.assert_close(grouped, quantized_attention(query, *repeated), rtol=0, atol=1e-6)


def test_the_error_is_that_of_eight_bits():
    query, key, value = tensors(400, 400, dim=128)
    want = F.scaled_dot_product_attention(
        *[x.transpose(1, 2) for x in (query, key, value)], enable_gqa=True
    ).transpose(1, 2)
    bounds = [
        ({"matmul": "none"}, 1e-5),
        ({}, 0.015),
        ({"pv": "int8"}, 0.025),
        ({"granularity": "tile"}, 0.02),
        ({"matmul": "fp8"}, 0.06),
        ({"matmul": "fp16", "pv": "fp16"}, 1e-3),
    ]
    for options, bound in bounds:
        out = quantized_attention(query, key, value, **options)
        error = float((out - want).norm() / want.norm())
        assert error < bound, (options, error)


def test_smoothing_and_rotation_survive_outlier_channels():
    query, key, value = tensors(400, 400, dim=128)
    plain = key.clone()
    key[..., [3, 40, 77, 120]] *= 50
    query = query.clone()
    query[..., [3, 40, 77, 120]] /= 50

    def error(key, query, **options):
        want = F.scaled_dot_product_attention(
            *[x.transpose(1, 2) for x in (query, key, value)], enable_gqa=True
        ).transpose(1, 2)
        out = quantized_attention(query, key, value, **options)
        return float((out - want).norm() / want.norm())

    gaussian = error(plain, tensors(400, 400, dim=128)[0], hadamard=128)
    assert error(key, query, hadamard=128) < error(key, query, smooth_k=False) / 2
    assert gaussian < 0.015


@pytest.mark.parametrize("which", ["query", "key", "value", "all"])
def test_zeros_and_large_numbers_stay_finite(which):
    for factor, dtype in itertools.product((0.0, 1e3), (torch.float16, torch.bfloat16)):
        inputs = dict(zip(("query", "key", "value"), tensors(dtype=dtype), strict=True))
        for name in inputs if which == "all" else (which,):
            inputs[name] = inputs[name] * factor
        for options in ({}, {"pv": "int8"}, {"matmul": "fp16", "pv": "fp16"}):
            assert quantized_attention(**inputs, **options).isfinite().all()


def test_padding_memory_never_leaks():
    query, key, value = tensors(70, 90)
    wide = torch.full((2, 100, 4, 48), math.nan)
    strided = []
    for x in (query, key, value):
        buffer = wide.clone()[:, :, : x.shape[2]]
        view = buffer[:, 3 : 3 + x.shape[1], :, 5 : 5 + x.shape[3]]
        view.copy_(x)
        strided.append(view)
    for options in ({}, {"pv": "int8"}, {"matmul": "none"}):
        out = quantized_attention(*strided, **options)
        assert torch.equal(out, quantized_attention(query, key, value, **options))


GRADIENT_OPTIONS = [{"matmul": "none"}, {}, {"hadamard": 16}, {"pv": "int8"}]


@pytest.mark.parametrize("options", GRADIENT_OPTIONS, ids=named)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_the_reference(options, blocks, causal):
    query, key, value = tensors(130, 150)
    options = {**options, "is_causal": causal, "attn_mask": masks("key", 130, 150)}
    if blocks:
        options.update(block_mask=block_masks(130, 150, 64, 32), block_m=64, block_n=32)
    grad_out = torch.randn(2, 130, 4, 32, generator=torch.Generator().manual_seed(9))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    quantized_attention(*leaves, **options).backward(grad_out)
    (want_out, want_lse), (same_out, same_lse) = oracle(query, key, value, **options)
    want = reference_attention.quantized_attention_backward(
        *[x.double() for x in (query, key, value)],
        want_out,
        want_lse,
        grad_out.double(),
        **options,
    )
    same = reference_attention.quantized_attention_backward(
        query, key, value, same_out, same_lse, grad_out, **options
    )
    for name, leaf, target, near in zip("qkv", leaves, want, same, strict=True):
        assert_close_to_oracle(leaf.grad, target, near, name=f"gradient of {name}")


def test_unquantised_gradients_equal_autograd():
    query, key, value = tensors(130, 150, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    mask = masks("key", 130, 150)
    mask[1, ..., 0] = True
    out = quantized_attention(*leaves, attn_mask=mask, matmul="none")
    grad_out = torch.randn(out.shape, dtype=out.dtype)
    out.backward(grad_out)
    twins = [x.clone().requires_grad_() for x in (query, key, value)]
    F.scaled_dot_product_attention(
        *[x.transpose(1, 2) for x in twins], attn_mask=mask, enable_gqa=True
    ).transpose(1, 2).backward(grad_out)
    for leaf, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(leaf.grad, twin.grad, rtol=1e-9, atol=1e-9)


def test_dropped_blocks_have_zero_gradients():
    leaves = [x.requires_grad_() for x in tensors(128, 128)]
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[:, :, 1] = False
    mask[..., 2] = False
    out = quantized_attention(*leaves, block_mask=mask, block_m=32, block_n=32)
    out.sum().backward()
    query, key, value = (x.grad for x in leaves)
    assert not query[:, 32:64].any() and query[:, :32].any()
    assert not key[:, 64:96].any() and not value[:, 64:96].any()
    assert key[:, :64].any() and value[:, :64].any()


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 90),
    key_tokens=st.integers(1, 90),
    block_m=st.sampled_from([16, 32, 64]),
    block_n=st.sampled_from([16, 32, 64]),
    pv=st.sampled_from(["none", "int8"]),
    causal=st.booleans(),
    data=st.data(),
)
def test_any_block_mask(tokens, key_tokens, block_m, block_n, pv, causal, data):
    grid = (-(-tokens // block_m), -(-key_tokens // block_n))
    bits = data.draw(
        st.lists(st.booleans(), min_size=grid[0] * grid[1], max_size=grid[0] * grid[1])
    )
    mask = torch.tensor(bits).view(1, 1, *grid)
    query, key, value = tensors(tokens, key_tokens, heads=2, kv_heads=1, dim=16, batch=1)
    check(
        query,
        key,
        value,
        block_mask=mask,
        block_m=block_m,
        block_n=block_n,
        pv=pv,
        is_causal=causal,
    )


def test_the_operator_passes_torchs_own_checks():
    from solspark.ops.quantized_attention import _backward_op, _forward_op

    query, key, value = tensors(70, 90, batch=1)
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    options = (64, 32, False, 0.2, "int8", "none", True, 0, "row", "")
    mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    for q in (query, strided):
        torch.library.opcheck(
            _forward_op,
            (
                q.requires_grad_(),
                key.requires_grad_(),
                value.requires_grad_(),
                None,
                mask,
                *options,
            ),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
    with torch.no_grad():
        out, lse = _forward_op(query, key, value, None, mask, *options)
        for with_keys in (True, False):
            torch.library.opcheck(
                _backward_op,
                (
                    query,
                    key,
                    value,
                    out,
                    lse,
                    torch.ones_like(out),
                    None,
                    mask,
                    *options,
                    with_keys,
                ),
                test_utils=("test_schema", "test_faketensor"),
            )


def test_it_compiles_into_one_graph():
    query, key, value = tensors(70, 90, batch=1)
    mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)

    def block(query, key, value):
        return quantized_attention(query, key, value, block_mask=mask, block_m=64, block_n=32) + 1

    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(compiled(query, key, value), block(query, key, value))
    torch._dynamo.reset()


def test_the_call_is_recorded():
    query, key, value = tensors()
    mask = block_masks(150, 170, 128, 64)
    quantized_attention(query, key, value, block_mask=mask)
    record = _dispatch.last_call()
    assert record.operation == "quantized_attention" and record.implementation == "eager"
    assert record.density == pytest.approx(float(mask.float().mean()))


REFUSALS = [
    ({"key": torch.zeros(2, 170, 3, 32)}, ValueError, r"key: expected \[2, Lk, Hk dividing 4"),
    ({"value": torch.zeros(2, 171, 2, 32)}, ValueError, r"value: expected \(2, 170, 2\)"),
    ({"value": torch.zeros(2, 170, 2, 32).half()}, TypeError, "value: expected the dtype of query"),
    ({"query": torch.zeros(150, 4, 32)}, ValueError, r"query: expected \[B, L, H, D\]"),
    ({"attn_mask": torch.ones(3, 170).bool()}, ValueError, "attn_mask: expected a shape that"),
    ({"attn_mask": torch.ones(170).long()}, TypeError, "attn_mask: expected torch.bool"),
    ({"attn_mask": torch.ones(170, requires_grad=True)}, UnsupportedError, "attn_mask.*gradient"),
    ({"block_mask": torch.ones(1, 1, 3, 3).bool()}, ValueError, r"block_mask.*got \(1, 1, 3, 3\)"),
    ({"block_mask": torch.ones(3, 1, 2, 3).bool()}, ValueError, "block_mask: expected"),
    ({"block_mask": torch.ones(1, 1, 2, 3)}, TypeError, "block_mask: expected torch.bool"),
    ({"block_m": 48}, ValueError, "block_m: expected a power of two, got 48"),
    ({"block_n": 8}, ValueError, "block_n"),
    ({"matmul": "int4"}, ValueError, "matmul: expected one of"),
    ({"pv": "int4"}, ValueError, "pv: expected one of"),
    ({"hadamard": 12}, ValueError, "hadamard: expected 0 or a power of two"),
    ({"granularity": "channel"}, ValueError, "granularity: expected one of"),
    ({"scale": math.nan}, ValueError, "scale"),
    ({"impl": "hopper"}, UnsupportedError, "hopper"),
    ({"impl": "cuda"}, ValueError, "impl: expected one of"),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSALS)
def test_refusals_name_the_argument(change, error, words):
    query, key, value = tensors()
    with pytest.raises(error, match=words):
        quantized_attention(**{"query": query, "key": key, "value": value, **change})


# The quantiser


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp16"])
@pytest.mark.parametrize("granularity", ["row", "tile"])
@pytest.mark.parametrize("hadamard", [0, 16, 128])
def test_quantize_equals_the_reference(dtype, granularity, hadamard):
    x = tensors(150, 170, dim=40)[1]
    mean = reference_attention.key_mean(x)
    options = {"dtype": dtype, "granularity": granularity, "mean": mean, "hadamard": hadamard}
    values, scales = quantize(x, impl="eager", **options)
    want_values, want_scales = reference_quantize.quantize(x, **options)
    assert values.shape == (2, 170, 2, 64) and values.dtype == want_values.dtype
    assert scales.shape == (2, 2, 170 if granularity == "row" else 3)
    assert torch.equal(values.float(), want_values.float()) and torch.equal(scales, want_scales)
    back = reference_quantize.dequantize(values, scales)
    centred = x - mean[:, None]
    if hadamard:
        back = reference_quantize.rotate(back, reference_quantize.rotation_size(40, hadamard))
    # Half a step of the scale at most, or of the value for floating types; less than that on
    # average.
    largest = scales.amax() * reference_quantize.LARGEST[dtype]
    step = largest * {"int8": 1 / 254, "fp8": 1 / 16, "fp16": 1 / 2048}[dtype]
    error = (back[..., :40] - centred).abs()
    assert error.max() <= step * (math.sqrt(64) if hadamard else 1) + 1e-6
    assert error.mean() <= 0.6 * step


def test_hadamard_is_orthonormal_and_its_own_inverse():
    for size in (4, 16, 64):
        matrix = reference_quantize.hadamard(size)
        assert torch.equal(matrix @ matrix.T, size * torch.eye(size))
    x = torch.randn(3, 5, 2, 64, dtype=torch.float64)
    turned = reference_quantize.rotate(x, 16)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(reference_quantize.rotate(turned, 16), x)


def test_quantize_covers_the_range_and_keeps_zero():
    x = torch.tensor([[-3.0, 0.0, 1.5, 3.0], [0.0, 0.0, 0.0, 0.0]]).view(1, 2, 1, 4)
    x = F.pad(x, (0, 12))
    values, scales = quantize(x)
    assert values[0, 0, 0, :4].tolist() == [-127, 0, 64, 127]
    assert not values[0, 1].any() and scales[0, 0, 1] > 0
    assert scales[0, 0, 0] == pytest.approx(3 / 127)


def test_quantize_refuses():
    x = torch.zeros(1, 5, 2, 16)
    with pytest.raises(ValueError, match=r"mean: expected \[1, 2, 16\]"):
        quantize(x, mean=torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="dtype: expected one of"):
        quantize(x, dtype="none")
    with pytest.raises(TypeError, match="x: expected"):
        quantize(x.long())


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_that_nobody_wants_are_not_taken(wanted):
    inputs = [torch.randn(1, 40, 2, 16) for _ in range(3)]
    every = [x.clone().requires_grad_() for x in inputs]
    quantized_attention(*every).sum().backward()
    some = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    quantized_attention(*some).sum().backward()
    for i, (mine, full) in enumerate(zip(some, every, strict=True)):
        assert torch.equal(mine.grad, full.grad) if i in wanted else mine.grad is None


def test_a_mask_that_wants_a_gradient_is_refused():
    query, key, value = (torch.randn(1, 40, 2, 16) for _ in range(3))
    bias = torch.zeros(40, 40, requires_grad=True)
    with pytest.raises(UnsupportedError, match="attn_mask cannot get a gradient"):
        quantized_attention(query, key, value, attn_mask=bias)
    with torch.no_grad():
        quantized_attention(query, key, value, attn_mask=bias)
