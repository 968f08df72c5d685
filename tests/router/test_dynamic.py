"""The sliced terminal equals one call, also causal, masked and grouped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from solspark.router import Platform
from solspark.router.backends.dynamic import GIB, prepare_dynamic, slice_sizes


def sliced(slice_gib, trigger_gib=1e-12, calls=None):
    def original(*args, **kwargs):
        if calls is not None:
            calls.append((args[0].shape, kwargs))
        return F.scaled_dot_product_attention(*args, **kwargs)

    settings = {"dynamic_slice_gib": slice_gib, "dynamic_trigger_gib": trigger_gib}
    return prepare_dynamic(Platform("cpu"), original, settings)


def tensors(batch=3, heads=4, kv_heads=None, tokens=30, key_tokens=37, dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, heads, tokens, dim),
        *[(batch, kv_heads or heads, key_tokens, dim)] * 2,
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    ("slice_bytes", "want"),
    [
        (3 * 4 * 30 * 37 * 8, (3, 4, 30)),
        (3 * 4 * 30 * 37 * 8 - 1, (1, 4, 30)),
        (3 * 30 * 37 * 8, (1, 2, 30)),
        (30 * 37 * 8, (1, 1, 30)),
        (14 * 37 * 8, (1, 1, 10)),
        (37 * 8, (1, 1, 1)),
        (1, (1, 1, 1)),
    ],
)
def test_slices_divide_batch_then_heads_then_rows(slice_bytes, want):
    assert slice_sizes(3, 4, 30, 37, 8, slice_bytes / GIB, 1e-12) == want


def test_small_calls_are_not_sliced():
    assert slice_sizes(1, 24, 1024, 1024, 2, 0.5, 1.0) is None
    assert slice_sizes(1, 56, 38222, 38222, 2, 0.5, 1.0) is not None
    calls = []
    q, k, v = tensors()
    out = sliced(0.5, 1.0, calls)(q, k, v)
    assert len(calls) == 1 and torch.equal(out, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("slice_bytes", [4 * 30 * 37 * 8, 2 * 30 * 37 * 8, 10 * 37 * 8, 37 * 8])
@pytest.mark.parametrize(
    "kind", ["plain", "causal", "key mask", "full mask", "float mask", "scale"]
)
def test_slices_equal_one_call(slice_bytes, kind):
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(1)
    options = {}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "key mask":
        options["attn_mask"] = torch.rand(3, 1, 1, 37, generator=generator) > 0.3
    elif kind == "full mask":
        options["attn_mask"] = torch.rand(30, 37, generator=generator) > 0.3
    elif kind == "float mask":
        options["attn_mask"] = torch.randn(1, 4, 30, 37, generator=generator, dtype=q.dtype)
    elif kind == "scale":
        options["scale"] = 0.7
    calls = []
    out = sliced(slice_bytes / GIB, calls=calls)(q, k, v, **options)
    assert len(calls) > 1
    want = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_grouped_heads_and_three_dimensions():
    q, k, v = tensors(heads=4, kv_heads=2)
    out = sliced(10 * 37 * 8 / GIB)(q, k, v, enable_gqa=True)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    flat = [x[:, 0] for x in tensors(heads=1)]
    out = sliced(10 * 37 * 8 / GIB)(*flat)
    want = F.scaled_dot_product_attention(*flat)
    assert out.shape == want.shape
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
