"""The kernels of reweight and anchors: close to the oracle, and compiled for every target."""

from __future__ import annotations

import pytest
import torch

from solspark.reference.anchors import anchors as anchors_reference
from solspark.reference.reweight import reweight as reference
from solspark.testing import assert_close_to_oracle, make_qkv

pytest.importorskip("triton")

from solspark.kernels.anchors import anchors_kernel, launch_anchors
from solspark.kernels.reweight import launch_reweight, reweight_kernel

COMPONENTS = ("full", "weights_only", "bias_only", "none")


def test_in_the_interpreter(interpret):
    interpret(__file__)


def check(anchor, key, value, block_tokens=64, **options):
    given = {
        "summary_math": "tensorcore",
        "logmass_key": "stored",
        "reweight_components": "full",
        **options,
    }
    scale = key.shape[-1] ** -0.5
    result = launch_reweight(anchor, key, value, scale=scale, block_tokens=block_tokens, **given)
    given["block_tokens"] = block_tokens
    oracle = reference(anchor.double(), key.double(), value.double(), **given)
    peer = reference(anchor, key, value, **given)
    # The log mass is a small difference of sums over the channels: their terms' size judges it.
    terms = torch.einsum("bphd,bphnd->bphn", anchor.double().abs(), oracle[0].abs()) * scale
    assert_close_to_oracle(result[0], oracle[0], peer[0], name="keys")
    assert_close_to_oracle(result[1], oracle[1], peer[1], name="values")
    mass = (result[2].double() + terms).float()
    assert_close_to_oracle(mass, oracle[2] + terms, peer[2].double() + terms, name="log_mass")


def make(dtype, parents, tokens, heads=2, dim=32, anchor_dtype=None):
    _, key, value = make_qkv(1, tokens, heads, dim, dtype=dtype)
    anchor, _, _ = make_qkv(1, 2 * parents, heads, dim, dtype=anchor_dtype or dtype, seed=1)
    return anchor[:, ::2], key, value


@pytest.mark.interpreted
@pytest.mark.parametrize("parents", [1, 3, 8, 17])
@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_components(dtype, components, parents):
    for logmass_key in ("stored", "pre_round"):
        tensors = make(dtype, parents, 137)
        check(*tensors, reweight_components=components, logmass_key=logmass_key)


@pytest.mark.interpreted
@pytest.mark.parametrize("parents", [2, 9])
def test_wide_anchors_and_unrounded_weights(parents):
    tensors = make(torch.float16, parents, 100, anchor_dtype=torch.float32)
    check(*tensors)
    check(*tensors, summary_math="comfy_fp32")


@pytest.mark.interpreted
@pytest.mark.parametrize("parents", [2, 9])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 63, 64, 65, 130])
def test_ragged_lengths(tokens, parents):
    tensors = make(torch.float16, parents, tokens)
    check(*tensors)
    check(*tensors, block_tokens=8)


@pytest.mark.interpreted
def test_strides_change_nothing():
    def run(layout):
        query, key, value = make_qkv(2, 100, 3, 32, dtype=torch.float16, layout=layout)
        return launch_reweight(
            query[:, 3:9:2],
            key,
            value,
            summary_math="tensorcore",
            logmass_key="stored",
            reweight_components="full",
            scale=0.2,
            block_tokens=64,
        )

    plain = run("contiguous")
    for layout in ("fused", "interleaved", "heads_first", "guarded"):
        for one, other in zip(run(layout), plain, strict=True):
            assert torch.equal(one, other), layout


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_anchors(dtype):
    means = torch.randn(2, 3, 75, 32, generator=torch.Generator().manual_seed(1)) + 0.5
    ranges = [(0, 40), (40, 41), (41, 75)]
    tokens = [(64 * start, 64 * stop) for start, stop in ranges]
    result = launch_anchors(means, torch.tensor(ranges, dtype=torch.int32), dtype)
    oracle = anchors_reference(means.double(), tokens, dtype=torch.float64)
    assert_close_to_oracle(result, oracle, anchors_reference(means, tokens, dtype=dtype))


def reweight_types(dtype, anchor_dtype):
    types = {name: "i64" for name in reweight_kernel.arg_names if name.startswith("s")}
    types.update(dict.fromkeys(("batch_heads", "heads", "tokens", "blocks", "parents"), "i32"))
    types["scale"] = "fp32"
    types.update(dict.fromkeys(("k_ptr", "v_ptr", "ak_ptr", "av_ptr"), "*" + dtype))
    return {**types, "a_ptr": "*" + anchor_dtype, "lm_ptr": "*fp32"}


@pytest.mark.parametrize(
    ("dtype", "anchor_dtype", "tile", "span", "weighted"),
    [
        ("bf16", "bf16", 1, 64, True),
        ("bf16", "bf16", 16, 64, True),
        ("fp16", "fp32", 16, 8, True),
        ("fp32", "fp32", 1, 64, False),
    ],
)
def test_reweight_compiles(compile_ahead, dtype, anchor_dtype, tile, span, weighted):
    constants = {
        "D": 128,
        "SPAN": span,
        "ROWS": max(span, 16),
        "ANCHORS": tile,
        "WEIGHTED": weighted,
        "BIASED": True,
        "ROUND": True,
        "STORED": True,
    }
    compiled = compile_ahead(
        reweight_kernel, reweight_types(dtype, anchor_dtype), constants, num_warps=4
    )
    # 99 KiB is what the smallest of the NVIDIA targets gives a program, 64 KiB what AMD's do.
    assert compiled.metadata.shared <= (64 if "hip" in str(compiled.metadata.target) else 99) * 1024
    if "ptx" in compiled.asm and tile == 1:
        # K and V come in whole 16-byte vectors: this kernel is bound by reading them.
        assert compiled.asm["ptx"].count("ld.global.v4") >= (16 if dtype == "bf16" else 32)


def test_anchors_compile(compile_ahead):
    types = {"heads": "i32", "parents": "i32", "sqb": "i64", "sqh": "i64", "sqn": "i64"}
    types.update(qm_ptr="*fp32", range_ptr="*i32", a_ptr="*bf16")
    compile_ahead(anchors_kernel, types, {"D": 128, "BLOCK_T": 64, "ROWS": 32}, num_warps=4)
