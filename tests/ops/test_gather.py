"""Reordering with means and summaries in the same pass is reordering, pooling and reweighting."""

from __future__ import annotations

import pytest
import torch

from solspark.errors import UnsupportedError
from solspark.ops.gather_means import gather_means
from solspark.ops.gather_reweight import gather_reweight
from solspark.reference.gather_means import gather_means as means_reference
from solspark.reference.gather_reweight import gather_reweight as reweight_reference
from solspark.testing import LAYOUTS, assert_close_to_oracle, make_qkv, nan_filled_allocations

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COMPONENTS = ("full", "weights_only", "bias_only", "none")


def random_orders(batch, heads, video, index_dtype=torch.int32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(video, generator=generator) for _ in range(batch * heads)]
    return torch.stack(rows).view(batch, heads, video).to(index_dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "video", "blocks"), [(300, 256, 4), (300, 230, 5), (300, 300, 1), (64, 1, 1)]
)
def test_means(tokens, video, blocks, dtype, device):
    x, _, _ = make_qkv(2, tokens, 3, 64, dtype=dtype)
    orders = random_orders(2, 3, video)
    for stored in (torch.float32, dtype):
        with nan_filled_allocations():
            y, means = gather_means(x.to(device), orders.to(device), blocks=blocks, dtype=stored)
        expected, peer = means_reference(x, orders, blocks=blocks, dtype=stored)
        _, oracle = means_reference(x.double(), orders, blocks=blocks, dtype=torch.float64)
        assert torch.equal(y.cpu(), expected) and y.is_contiguous()
        assert_close_to_oracle(means, oracle, peer, name="means")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parents", [1, 3])
@pytest.mark.parametrize("components", COMPONENTS)
def test_summaries(components, parents, dtype, device):
    query, key, value = make_qkv(2, 300, 3, 64, dtype=dtype)
    anchor, orders = query[:, :parents], random_orders(2, 3, 230, torch.int64)
    options = {"reweight_components": components}
    inputs = [x.to(device) for x in (anchor, key, value, orders)]
    with nan_filled_allocations():
        result = gather_reweight(*inputs, **options)
    peer = reweight_reference(anchor, key, value, orders, **options)
    wide = (anchor.double(), key.double(), value.double(), orders)
    oracle = reweight_reference(*wide, **options)
    for name, one, other in zip(("key", "value"), result, peer, strict=False):
        assert torch.equal(one.cpu(), other), name
    for place, name in ((2, "key_means"), (3, "keys"), (4, "values")):
        assert_close_to_oracle(result[place], oracle[place], peer[place], name=name)
    # The log mass is a small difference of sums over the channels: their terms' size judges it.
    terms = torch.einsum("bphd,bphnd->bphn", anchor.double().abs(), oracle[3].abs()) / 8
    mass = (result[5].double().cpu() + terms).float()
    assert_close_to_oracle(mass, oracle[5] + terms, peer[5].double() + terms, name="log_mass")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout):
    orders = random_orders(2, 3, 130)
    results = []
    for given in ("contiguous", layout):
        query, key, value = make_qkv(2, 150, 3, 64, dtype=torch.float16, layout=given)
        results.append(
            [
                *gather_means(query, orders, blocks=2, dtype=torch.float32),
                *gather_reweight(query[:, :2], key, value, orders),
            ]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_refusals_name_the_argument():
    query, key, value = make_qkv(1, 100, 2, 64)
    orders = random_orders(1, 2, 80)
    options = {"blocks": 1, "dtype": torch.float32}
    for wrong in (orders[:, :1], random_orders(1, 2, 101)):
        with pytest.raises(ValueError, match="permutation: expected"):
            gather_means(query, wrong, **options)
        with pytest.raises(ValueError, match="permutation: expected"):
            gather_reweight(query[:, :1], key, value, wrong)
    with pytest.raises(TypeError, match=r"permutation: expected torch\.int32 or torch\.int64"):
        gather_means(query, orders.float(), **options)
    with pytest.raises(ValueError, match=r"blocks: expected an int in \[1, 2\], got 3"):
        gather_means(query, orders, blocks=3, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="not on cpu"):
        gather_means(query, orders, **options, impl="triton")
    with pytest.raises(UnsupportedError, match="8 anchors are more than 7"):
        gather_reweight(query[:, :8], key, value, orders, impl="triton")
    with pytest.raises(ValueError, match="anchors: expected"):
        gather_reweight(query[:, :1, :1], key, value, orders)
