"""The kernels of quantised attention: in the interpreter against the oracle, and compiled ahead."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from solspark.errors import UnsupportedError
from solspark.ops import _dispatch, _quantized_triton
from solspark.ops import quantize as quantize_module
from solspark.ops import quantized_attention as attention_module
from solspark.reference import quantize as reference_quantize
from solspark.reference import quantized_attention as reference
from solspark.testing import assert_close_to_oracle

pytest.importorskip("triton")

from solspark.kernels.block_lists import block_lists_kernel, launch_block_lists
from solspark.kernels.pack_mask import launch_pack_mask, pack_mask_kernel
from solspark.kernels.quantize import launch_mean, mean_kernel, quantize_kernel
from solspark.kernels.quantized_attention import choose_config, quantized_attention_kernel
from solspark.kernels.quantized_attention_backward import (
    quantized_attention_grad_key_value_kernel,
    quantized_attention_grad_query_kernel,
)

quantized_attention = attention_module.quantized_attention


def test_in_the_interpreter(interpret):
    interpret(__file__)


@pytest.fixture(autouse=True)
def kernels_take_cpu_tensors(monkeypatch):
    """In the interpreter a CPU is device enough."""
    runs = {
        "quantize": quantize_module._run_triton,
        "quantized_attention": _quantized_triton.attend,
        "quantized_attention_backward": _quantized_triton.attend_backward,
    }
    for operation, run in runs.items():
        table = dict(_dispatch._registry[operation])
        table["triton"] = _dispatch.Implementation("triton", _dispatch.never_declines, run)
        monkeypatch.setitem(_dispatch._registry, operation, table)


def tensors(tokens=50, key_tokens=70, heads=2, kv_heads=1, dim=32, batch=1, dtype=torch.float16):
    generator = torch.Generator().manual_seed(tokens + key_tokens + dim)
    shapes = [(batch, tokens, heads, dim), *[(batch, key_tokens, kv_heads, dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# Steps of a quantised P: FP32 and FP64 may round a tie either way.
STEP = {"none": 0.0, "int8": 1 / 127, "fp16": 1 / 1024}


def check(query, key, value, gradients=False, **options):
    """Compare forward (and backward) with the reference in float64; return the output.

    The mean of K is left in, because a difference of its last bit would move integers.
    """
    options = {"smooth_k": False, **options}
    doubles = [x.double() for x in (query, key, value)]
    mask = options.get("attn_mask")
    wide = dict(options)
    if mask is not None and mask.is_floating_point():
        wide["attn_mask"] = mask.double()
    want, want_lse = reference.quantized_attention(*doubles, return_lse=True, **wide)
    same, same_lse = reference.quantized_attention(query, key, value, return_lse=True, **options)
    leaves = [x.detach().clone().requires_grad_(gradients) for x in (query, key, value)]
    out, lse = quantized_attention(*leaves, return_lse=True, impl="triton", **options)
    step = STEP[options.get("pv", "none")] * float(value.abs().max())
    # Kernels round P to V's type, an eps a weight, which the reference does not.
    eps = torch.finfo(value.dtype).eps * float(value.abs().max())
    error = (out.detach().double() - want).abs()
    peer = (same.double() - want).abs()
    assert out.isfinite().all() and out.dtype == query.dtype
    assert error.max() <= 2 * peer.max() + step + eps
    assert error.mean() <= 2 * peer.mean() + 1e-3 * step + eps / 4
    alive = want_lse > -math.inf
    assert torch.equal(lse > -math.inf, alive)
    assert not out[~alive].any()
    assert_close_to_oracle(lse[alive].detach(), want_lse[alive], same_lse[alive], name="lse")
    if gradients:
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        out.backward(grad_out)
        targets = reference.quantized_attention_backward(
            *doubles, want, want_lse, grad_out.double(), **wide
        )
        for name, leaf, target in zip("qkv", leaves, targets, strict=True):
            difference = (leaf.grad.double() - target).abs().max()
            # P, dS and the result are each rounded once to the inputs' type; sums of rounded terms.
            bound = 4 * torch.finfo(leaf.dtype).eps + 1e-5
            assert difference <= bound * target.abs().max() + step, (name, float(difference))
    return out.detach()


OPTIONS = [
    {},
    {"granularity": "tile"},
    {"matmul": "none"},
    {"matmul": "fp16"},
    {"hadamard": 16},
    {"pv": "int8"},
    {"pv": "int8", "hadamard": 32, "granularity": "tile"},
    {"pv": "fp16", "matmul": "none"},
    {"scale": -0.3},
    {"scale": 0.0},
    {"is_causal": True},
]


def named(options):
    return " ".join(f"{key}={value}" for key, value in options.items()) or "int8"


@pytest.mark.interpreted
@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_options(options):
    check(*tensors(), gradients=True, **options)


@pytest.mark.interpreted
@pytest.mark.parametrize("dim", [40, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_head_dims_and_types(dim, dtype):
    check(*tensors(40, 50, dim=dim, dtype=dtype), gradients=True)


def key_mask(batch=1):
    return torch.rand(batch, 1, 1, 70, generator=torch.Generator().manual_seed(2)) > 0.4


def full_mask():
    mask = torch.rand(1, 2, 50, 70, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[0, 0, 7] = False
    return mask


def float_mask():
    bias = torch.randn(1, 1, 50, 70, generator=torch.Generator().manual_seed(2))
    bias[..., 9, :] = -math.inf
    return bias


def blocks(rows, columns, batch=1, heads=2):
    mask = torch.rand(batch, heads, rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, 0, 0] = False
    mask[0, -1, -1] = True
    return mask


MASKS = {"none": lambda: None, "key": key_mask, "full": full_mask, "float": float_mask}


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("key", None),
        ("full", None),
        ("float", None),
        ("none", (32, 64)),
        ("key", (32, 16)),
        ("full", (16, 32)),
        ("float", (16, 128)),
    ],
)
def test_token_and_block_masks(kind, sizes):
    options = {"attn_mask": MASKS[kind]()}
    if sizes is not None:
        block_m, block_n = sizes
        mask = blocks(-(-50 // block_m), -(-70 // block_n))
        options.update(block_mask=mask, block_m=block_m, block_n=block_n)
    out = check(*tensors(), gradients=True, **options)
    if sizes is not None:
        assert not out[0, : sizes[0], 0].any()


@pytest.mark.interpreted
@pytest.mark.parametrize("tokens", [(1, 1), (33, 64), (65, 31)])
def test_lengths_and_causal_blocks(tokens):
    query, key, value = tensors(*tokens)
    mask = blocks(-(-tokens[0] // 32), -(-tokens[1] // 32))
    for causal in (False, True):
        check(query, key, value, is_causal=causal)
        check(query, key, value, is_causal=causal, block_mask=mask, block_m=32, block_n=32)


@pytest.mark.interpreted
def test_a_mask_and_blocks_equal_the_joined_mask_bit_for_bit():
    query, key, value = tensors()
    shown = blocks(2, 3)
    expanded = shown.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :50, :70]
    for mask in (key_mask(), full_mask()):
        both = quantized_attention(
            query,
            key,
            value,
            attn_mask=mask,
            block_mask=shown,
            block_m=32,
            block_n=32,
            impl="triton",
        )
        joined = quantized_attention(query, key, value, attn_mask=mask & expanded, impl="triton")
        assert torch.equal(both, joined)
    alone = quantized_attention(
        query, key, value, block_mask=shown, block_m=32, block_n=32, impl="triton"
    )
    expanded_only = quantized_attention(query, key, value, attn_mask=expanded, impl="triton")
    assert torch.equal(alone, expanded_only)
    every = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    dense = quantized_attention(query, key, value, impl="triton")
    sparse = quantized_attention(
        query, key, value, block_mask=every, block_m=32, block_n=32, impl="triton"
    )
    assert torch.equal(dense, sparse) and not torch.equal(dense, alone)


@pytest.mark.interpreted
@pytest.mark.parametrize("columns", [1, 64, 130, 2100])
def test_packed_masks(columns):
    generator = torch.Generator().manual_seed(columns)
    mask = torch.rand(2, 3, 5, columns, generator=generator) > 0.5
    for given in (mask, mask[:1, :1], mask.transpose(1, 2), mask[..., :1].expand(mask.shape)):
        words = launch_pack_mask(given.view(torch.int8))
        bits = words[..., None] >> torch.arange(64) & 1
        assert torch.equal(bits.flatten(3)[..., :columns].bool(), given)
        assert not bits.flatten(3)[..., columns:].any()


@pytest.mark.interpreted
def test_masks_of_any_stride():
    query, key, value = tensors()
    full = full_mask()
    for mask in (full, full[..., :1], torch.randn(50, 70), torch.randn(50, 1)):
        kept = mask.expand(1, 2, 50, 70).contiguous()
        turned = kept.transpose(2, 3).contiguous().transpose(2, 3)
        outs = [
            quantized_attention(query, key, value, attn_mask=given, impl="triton")
            for given in (mask, kept, turned)
        ]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.interpreted
def test_batches_broadcasts_and_groups():
    query, key, value = tensors(40, 70, heads=4, kv_heads=2, batch=2)
    full = blocks(2, 3, batch=2, heads=4)
    mask = key_mask(2)
    for shown in (full, full[:1, :1]):
        check(
            query,
            key,
            value,
            gradients=True,
            block_mask=shown,
            block_m=32,
            block_n=32,
            attn_mask=mask,
        )


@pytest.mark.interpreted
def test_strides_and_poison_change_nothing():
    query, key, value = tensors()
    strided = []
    for x in (query, key, value):
        buffer = torch.full((1, 75, 3, 40), math.nan, dtype=x.dtype)
        view = buffer[:, 2 : 2 + x.shape[1], 1 : 1 + x.shape[2], 3 : 3 + x.shape[3]]
        view.copy_(x)
        strided.append(view)
    for options in ({}, {"pv": "int8"}, {"matmul": "none"}):
        out = quantized_attention(*strided, impl="triton", **options)
        assert torch.equal(out, quantized_attention(query, key, value, impl="triton", **options))


@pytest.mark.interpreted
def test_the_gradient_of_queries_alone():
    query, key, value = tensors()
    shown = blocks(2, 3)
    found = []
    for keys_too in (False, True):
        leaves = [query.clone().requires_grad_()]
        leaves += [x.clone().requires_grad_(keys_too) for x in (key, value)]
        options = {"block_mask": shown, "block_m": 32, "block_n": 32, "impl": "triton"}
        quantized_attention(*leaves, **options).sum().backward()
        found.append(leaves[0].grad)
        assert (leaves[1].grad is not None) == keys_too
    assert torch.equal(*found) and found[0].any()


@pytest.mark.interpreted
def test_rows_further_apart_than_32_bits_count():
    apart = 2**30
    # Addresses only: pages that nobody touches take no memory.
    buffer = torch.empty(2 * apart + 4096, dtype=torch.float16)
    views = []
    for number, x in enumerate(tensors(3, 3, heads=2, kv_heads=2)):
        view = buffer.as_strided(x.shape, (3 * apart, apart, 32, 1), 512 * number)
        views.append(view.copy_(x))
    plain = [x.contiguous() for x in views]
    for options in ({}, {"matmul": "none"}):
        out = quantized_attention(*views, impl="triton", **options)
        assert torch.equal(out, quantized_attention(*plain, impl="triton", **options))


@pytest.mark.interpreted
def test_extreme_values_stay_finite():
    query, key, value = tensors()
    for factor, options in itertools.product((0.0, 1e3), ({}, {"pv": "int8"}, {"matmul": "none"})):
        out = quantized_attention(query * factor, key * factor, value, impl="triton", **options)
        assert out.isfinite().all()
    # All logits far below zero: a key past the end must not outweigh them in the backward.
    low = query.abs() * 3
    leaves = [x.requires_grad_() for x in (low, -key.abs() * 30, value.clone())]
    quantized_attention(*leaves, smooth_k=False, impl="triton").sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.interpreted
def test_eight_bit_products_need_32_keys():
    query, key, value = tensors()
    with pytest.raises(UnsupportedError, match="32 keys, blocks have 16"):
        quantized_attention(
            query,
            key,
            value,
            block_mask=torch.ones(1, 1, 1, 5, dtype=torch.bool),
            block_n=16,
            pv="int8",
            impl="triton",
        )


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", ["int8", "fp16"])
@pytest.mark.parametrize("granularity", ["row", "tile"])
def test_quantize(dtype, granularity):
    for hadamard, dim in itertools.product((0, 16, 64), (40, 64)):
        x = tensors(70, 90, dim=dim)[1]
        mean = reference.key_mean(x)
        options = {"dtype": dtype, "granularity": granularity, "mean": mean, "hadamard": hadamard}
        values, scales = quantize_module.quantize(x, impl="triton", **options)
        want, want_scales = reference_quantize.quantize(x, **options)
        torch.testing.assert_close(scales, want_scales, rtol=1e-6, atol=0)
        difference = (values.float() - want.float()).abs()
        if hadamard == 0 and dtype == "int8":
            assert not difference.any()
        # A rotation sums in another order: seldom another neighbour, never another.
        step = 1.0 if dtype == "int8" else 32.0
        assert difference.max() <= step and (difference > 0).float().mean() < 1e-3


@pytest.mark.interpreted
def test_mean_and_lists():
    x = tensors(70, 300, dim=40, batch=2, kv_heads=3)[1]
    torch.testing.assert_close(launch_mean(x), reference.key_mean(x), rtol=0, atol=1e-6)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(launch_mean(strided), launch_mean(x))
    mask = blocks(3, 1500, batch=2, heads=3).to(torch.int8)
    for given in (mask, mask.transpose(2, 3)[:, :, :9], mask[:1, :1]):
        counts, indices = launch_block_lists(given)
        assert torch.equal(counts.long(), given.long().sum(-1))
        for place in itertools.product(*map(range, given.shape[:3])):
            kept = given[place].nonzero().flatten()
            assert torch.equal(indices[place][: counts[place]].long(), kept)


def test_a_bias_a_pair_takes_fewer_rows_where_four_warps_hold_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper = torch.device("cuda")
    plain = choose_config(hopper, 128, torch.bfloat16, False, None)
    assert choose_config(hopper, 128, torch.bfloat16, False, None, True).query_tile == 64
    assert (plain.query_tile, plain.key_tile) == (128, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    ampere = choose_config(hopper, 128, torch.bfloat16, False, None)
    assert choose_config(hopper, 128, torch.bfloat16, False, None, True) == ampere


def test_tiles_nest_in_blocks():
    for dtype, pv in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        for block_m, block_n in itertools.product((16, 64, 128, 256), (16, 32, 64, 128)):
            tile_m, tile_n, *_ = choose_config(None, 128, dtype, pv, (block_m, block_n))
            assert block_m % tile_m == 0 and block_n % tile_n == 0 and 64 % tile_n == 0
            assert not pv or tile_n == min(64, block_n)


TYPES = {"q_ptr": "*i8", "k_ptr": "*i8", "v_ptr": "*bf16", "o_ptr": "*bf16", "g_ptr": "*bf16"}
FLOATS = ("scale", "largest", "norm")
COUNTS = ("scale_stride", "shares", "share_tokens")


def types_of(kernel, **changes):
    """Name the type of each argument: strides are 64-bit, counts 32."""
    found = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            found[name] = "*i32" if name in ("index_ptr", "count_ptr") else "*fp32"
        elif name in FLOATS:
            found[name] = "fp32"
        else:
            found[name] = "i64" if name[0] == "s" and name not in COUNTS else "i32"
    return {**found, **TYPES, "mask_ptr": "*i8", **changes}


# Small tiles compile quickly; the production ones are read for their instructions below.
SIZES = {"D": 64, "DP": 64, "DV": 64, "DVP": 64, "BM": 32, "BN": 32}
FORWARD = {
    **SIZES,
    "OUT_D": 64,
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "QK": True,
    "PV": False,
    "TILE": False,
    "MASK": 0,
    "MASK_ROWS": False,
    "MASK_STEP": 0,
    "CAUSAL": False,
    "LISTS": True,
    "STAGES": 2,
}
BACKWARD = {**{k: v for k, v in FORWARD.items() if k not in ("OUT_D", "PV")}, "D8": 64}


MASKED_OPTIONS = {
    "row": {},
    "tile": {"granularity": "tile", "pv": "int8"},
    "float": {},
}


@pytest.mark.parametrize("name", MASKED_OPTIONS)
def test_masked_variants_do_the_same_arithmetic(name, record_launches, compile_launch):
    """Both masks equal the joined mask bit for bit only where each variant sums in one order.

    The interpreter has one order for all, so this reads what a GPU would run: the layout in which
    rows are summed (that of the product, whatever is loaded), and how often each arithmetic
    instruction occurs (a multiply-add fused here and not there rounds differently).
    """
    query, key, value = tensors(256, 256, heads=1, dim=64, dtype=torch.bfloat16)
    shown = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    one, many = torch.ones(1, 1, 1, 256), torch.ones(1, 1, 256, 256)
    if name != "float":
        one, many = one.bool(), many.bool()
    seen = {}
    for mask, block_mask in ((one, shown), (many, shown), (many, None)):
        launches = record_launches(
            lambda mask=mask, block_mask=block_mask: quantized_attention(
                query,
                key,
                value,
                attn_mask=mask,
                block_mask=block_mask,
                impl="triton",
                smooth_k=False,
                **MASKED_OPTIONS[name],
            )
        )
        built = compile_launch(launches[-1], "sm_90")
        text = built.asm["ttgir"]
        reduced = re.findall(r"tt.reduce.*?\}\) : \(tensor<[^,]*, #(\w+)>", text, re.S)
        assert reduced and all(layout.startswith("mma") for layout in reduced), reduced
        instructions = ["fma.rn.f32", "add.f32", "sub.f32", "max.f32", "ex2.approx"]
        # A float mask turns to log2 once a key, or once a pair: that product feeds no plain sum.
        instructions += [] if name == "float" else ["mul.f32"]
        counts = {word: built.asm["ptx"].count(f"\t{word}") for word in instructions}
        seen.setdefault(str(counts), []).append((tuple(mask.shape), block_mask is not None))
        assert counts["fma.rn.f32"] > 0 and counts["ex2.approx"] > 0
    assert len(seen) == 1, seen


def test_nothing_compiles_again(record_launches):
    """A new length, batch, head count, scale or budget runs what is compiled already."""

    def run(batch, tokens, heads, keep, scale):
        query, key, value = tensors(tokens, tokens, heads, heads, 64, batch, torch.bfloat16)
        lead = (batch, heads) if batch > 1 else (1, 1)
        grid = (*lead, -(-tokens // 128), -(-tokens // 64))
        shown = torch.rand(grid, generator=torch.Generator().manual_seed(0)) < keep
        for mask in (None, torch.ones(batch, 1, 1, tokens, dtype=torch.bool)):
            for given in (
                {},
                {"granularity": "tile", "pv": "int8"},
                {"attn_mask": mask, "block_mask": shown, "scale": scale},
                {"attn_mask": mask if mask is None else mask.expand(-1, -1, tokens, -1)},
            ):
                quantized_attention(query, key, value, impl="triton", **given)

    variants = None
    for case in ((1, 1000, 2, 0.3, 0.1), (2, 1024, 3, 0.9, 0.3), (1, 64, 16, 0.5, 1.0)):
        launches = record_launches(lambda case=case: run(*case))
        found = {(launch.kernel.__name__, launch.key) for launch in launches}
        assert variants is None or found == variants, found ^ variants
        variants = found
    assert {name for name, _ in variants} >= {"quantize_kernel", "pack_mask_kernel"}


def test_the_forward_compiles_for_every_target(compile_ahead):
    kernel = quantized_attention_kernel
    compile_ahead(kernel, types_of(kernel), FORWARD, num_warps=4, num_stages=2)
    masked = {**FORWARD, "MASK": 1, "MASK_ROWS": True, "PV": True, "TILE": True}
    types = types_of(kernel, v_ptr="*i8", mask_ptr="*i64")
    compile_ahead(kernel, types, masked, num_warps=4, num_stages=2)


def test_the_backward_compiles_for_every_target(compile_ahead):
    half = {"q8_ptr": "*i8", "k8_ptr": "*i8", "q_ptr": "*bf16", "k_ptr": "*bf16"}
    for kernel, outputs in (
        (quantized_attention_grad_query_kernel, ("dq_ptr",)),
        (quantized_attention_grad_key_value_kernel, ("dk_ptr", "dv_ptr")),
    ):
        types = types_of(kernel, **half, **dict.fromkeys(outputs, "*bf16"))
        compile_ahead(kernel, types, BACKWARD, num_warps=4, num_stages=2)


def test_the_rest_compiles_for_every_target(compile_ahead):
    types = types_of(quantize_kernel, x_ptr="*bf16", rotation_ptr="*bf16", values_ptr="*i8")
    constants = {"D": 128, "DP": 128, "ROWS": 64, "TILE": True}
    constants.update(ROTATE=True, SHIFT=True, ROUND=True)
    compile_ahead(quantize_kernel, types, constants)
    types = types_of(mean_kernel, x_ptr="*bf16")
    compile_ahead(mean_kernel, types, {"D": 128, "DP": 128, "ROWS": 32})
    compile_ahead(block_lists_kernel, types_of(block_lists_kernel), {"CHUNK": 1024})
    types = types_of(pack_mask_kernel, word_ptr="*i64")
    compile_ahead(pack_mask_kernel, types, {"STEP": 1, "CHUNK": 32})


def test_production_tiles_multiply_eight_bits_on_tensor_cores(compile_ahead, request):
    if request.node.callspec.params["compile_ahead"] != "sm_90":
        pytest.skip("one target suffices: the instructions are read from its assembly")
    sizes = {**dict.fromkeys(("D", "DP", "DV", "DVP", "OUT_D", "BM"), 128), "BN": 64, "STAGES": 3}
    kernel = quantized_attention_kernel
    built = compile_ahead(kernel, types_of(kernel), {**FORWARD, **sizes}, num_warps=4, num_stages=3)
    text = built.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8" in text
    assert "cp.async.cg" in text
