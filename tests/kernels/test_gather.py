"""The kernels that reorder with means and summaries: close to the oracle, compiled everywhere."""

from __future__ import annotations

import re

import pytest
import torch

from solspark.ops import gather_means as means_ops
from solspark.ops import gather_reweight as reweight_ops
from solspark.reference.gather_means import gather_means as means_reference
from solspark.reference.gather_reweight import gather_reweight as reweight_reference
from solspark.testing import assert_close_to_oracle, make_qkv

pytest.importorskip("triton")

from solspark.kernels import gather_means
from solspark.kernels.gather_means import launch_gather_means
from solspark.kernels.gather_reweight import gather_reweight_kernel, launch_gather_reweight


def test_in_the_interpreter(interpret):
    interpret(__file__)


def random_orders(batch, heads, video, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(video, generator=generator) for _ in range(batch * heads)]
    return torch.stack(rows).view(batch, heads, video).int()


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "fused", "guarded"])
def test_means(layout, dtype):
    x, _, _ = make_qkv(2, 150, 3, 32, dtype=dtype, layout=layout)
    orders = random_orders(2, 3, 130)
    for blocks, stored in ((2, torch.float32), (3, dtype)):
        y, means = launch_gather_means(x, orders, blocks, stored)
        expected, peer = means_reference(x, orders, blocks=blocks, dtype=stored)
        _, oracle = means_reference(x.double(), orders, blocks=blocks, dtype=torch.float64)
        assert torch.equal(y, expected)
        assert_close_to_oracle(means, oracle, peer, name="means")


@pytest.mark.interpreted
@pytest.mark.parametrize("components", ["full", "weights_only", "bias_only", "none"])
@pytest.mark.parametrize("parents", [1, 3])
def test_summaries(parents, components):
    query, key, value = make_qkv(2, 150, 3, 32, dtype=torch.float16, layout="fused")
    anchor, orders = query[:, :parents], random_orders(2, 3, 130)
    options = {
        "reweight_components": components,
        "summary_math": "tensorcore",
        "logmass_key": "stored",
        "scale": 0.2,
    }
    result = launch_gather_reweight(anchor, key, value, orders, **options)
    peer = reweight_reference(anchor, key, value, orders, **options)
    oracle = reweight_reference(*(x.double() for x in (anchor, key, value)), orders, **options)
    assert torch.equal(result[0], peer[0]) and torch.equal(result[1], peer[1])
    for place, name in ((2, "key_means"), (3, "keys"), (4, "values")):
        assert_close_to_oracle(result[place], oracle[place], peer[place], name=name)
    terms = torch.einsum("bphd,bphnd->bphn", anchor.double().abs(), oracle[3].abs()) * 0.2
    mass = (result[5].double() + terms).float()
    assert_close_to_oracle(mass, oracle[5] + terms, peer[5].double() + terms, name="log_mass")


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["contiguous", "fused"])
def test_operators_keep_their_promises(layout):
    """Shapes, types and strides of the fakes are those of the results; nothing is mutated."""
    checks = ("test_schema", "test_faketensor")
    query, key, value = make_qkv(2, 150, 3, 32, dtype=torch.float16, layout=layout)
    orders = random_orders(2, 3, 130)
    arguments = (query, orders, 2, torch.float32)
    torch.library.opcheck(means_ops._operator, arguments, test_utils=checks)
    switches = ("tensorcore", "stored", "full", 0.2)
    arguments = (query[:, :3], key, value, orders, *switches)
    torch.library.opcheck(reweight_ops._operator, arguments, test_utils=checks)


def types_of(kernel):
    types = {name: "i64" for name in kernel.arg_names if name.startswith("s")}
    counts = ("batch_heads", "heads", "tokens", "video", "blocks", "all_blocks")
    types.update(dict.fromkeys(counts, "i32"), scale="fp32", permutation_ptr="*i32")
    types.update(mean_ptr="*fp32", lm_ptr="*fp32")
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            types.setdefault(name, "*bf16")
    return types


def test_gathers_compile(compile_ahead):
    constants = {"D": 128, "ROWS": 64}
    loop = {"SPAN": gather_means.SPAN, "STAGES": gather_means.STAGES}
    kernel = gather_means.gather_means_kernel
    means = compile_ahead(kernel, types_of(kernel), {**constants, **loop}, num_warps=4)
    switches = dict.fromkeys(("WEIGHTED", "BIASED", "ROUND", "STORED"), True)
    both = compile_ahead(
        gather_reweight_kernel,
        types_of(gather_reweight_kernel),
        {**constants, **switches, "PARENTS": 1},
        num_warps=4,
    )
    if "ptx" in both.asm:
        # Rows come in whole 16-byte vectors: these kernels are bound by reading them.
        assert both.asm["ptx"].count("ld.global.v4") >= 16
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, 0x10,", means.asm["ptx"])
        assert len(copies) >= 8 and means.asm["ptx"].count("st.global.v4") >= 8
