"""The package's own attention behind the signature of scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from solspark.router import (
    Platform,
    RouterConfig,
    SelectorSpec,
    builtin_registry,
    layout_from_segments,
    select_adaptive,
)


def prepared(name, **config):
    backend = next(b for b in builtin_registry().ordered() if b.name == name)
    values = RouterConfig(**config)
    settings = {option: values.setting(option) for option in backend.options}
    return backend.prepare(Platform("cpu"), F.scaled_dot_product_attention, settings)


def tensors(tokens=700, heads=4, kv_heads=2, batch=2, dim=64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, tokens, dim), *[(batch, kv_heads, tokens, dim)] * 2]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def relative(out, want):
    return float((out - want).norm() / want.norm())


@pytest.mark.parametrize("kind", [None, "causal", "key", "full", "float", "scale"])
@pytest.mark.parametrize("name", ["quantized", "triton"])
def test_dense_calls(name, kind):
    q, k, v = tensors()
    call = prepared(name)
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    generator = torch.Generator().manual_seed(1)
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "key":
        options["attn_mask"] = torch.rand(2, 1, 1, 700, generator=generator) > 0.3
    elif kind == "full":
        options["attn_mask"] = torch.rand(700, 700, generator=generator) > 0.3
    elif kind == "float":
        options["attn_mask"] = torch.randn(1, 4, 700, 700, generator=generator)
    elif kind == "scale":
        options["scale"] = 0.3
    if name == "triton" and options["attn_mask"] is not None:
        with pytest.raises(ValueError, match="attn_mask"):
            call(q, k, v, *options.values(), True)
        return
    out = call(q, k, v, *options.values(), True)
    want = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)
    assert out.shape == want.shape
    assert relative(out, want) < (0.02 if name == "quantized" else 1e-5)
    dense = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if kind is not None:
        assert relative(out, dense) > 0.05


@pytest.mark.parametrize("name", ["quantized", "block_sparse"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_selections_with_and_without_a_token_mask(name, masked, shared):
    q, k, v = tensors()
    selection = select_adaptive(q, k, SelectorSpec(budget=0.25, head_shared=shared))
    shown = selection.token_mask()
    mask = None
    if masked:
        mask = torch.rand(2, 1, 1, 700, generator=torch.Generator().manual_seed(1)) > 0.3
        shown = shown & mask
    call = prepared(name, quantized_matmul="none")
    out = call(q, k, v, mask, 0.0, False, None, True, selection=selection)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    dense = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert relative(out, dense) > 0.05


def with_tail(q, k, v, selection, mask=None, dropped=None):
    """Attention of the kept tokens and of one mean for each other 64 keys, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    group, tokens = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    exact = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    seen = torch.ones(tokens, dtype=torch.bool) if mask is None else mask[:, 0, 0]
    seen = seen.expand(q.shape[0], tokens)
    exact = exact.masked_fill(~(selection.token_mask() & seen[:, None, None]), float("-inf"))
    keep = selection.block_mask().repeat_interleave(64, 2)[:, :, :tokens]
    logits, values = [exact], [v]
    for j in range(-(-tokens // 64)):
        if dropped is not None and dropped[j]:
            continue
        part = slice(64 * j, min(64 * j + 64, tokens))
        weight = seen[:, None, part, None].double()
        count = weight.sum(2)
        mean = (k[:, :, part] * weight).sum(2) / count
        logit = q @ mean[..., None] * q.shape[-1] ** -0.5 + count[:, :, None].log()
        logits.append(logit.masked_fill(keep[..., j : j + 1], float("-inf")))
        values.append(((v[:, :, part] * weight).sum(2) / count)[:, :, None])
    return torch.cat(logits, -1).softmax(-1) @ torch.cat(values, 2)


@pytest.mark.parametrize("masked", [False, True])
def test_a_tail_stands_in_for_the_tiles_left_out(masked):
    q, k, v = tensors()
    selection = select_adaptive(q, k, SelectorSpec(budget=0.25))
    mask = None
    if masked:
        mask = torch.rand(2, 1, 1, 700, generator=torch.Generator().manual_seed(1)) > 0.3
    call = prepared("block_sparse")
    arguments = (q, k, v, mask, 0.0, False, None, True)
    out = call(*arguments, selection=replace(selection, tail=True))
    torch.testing.assert_close(
        out, with_tail(q, k, v, selection, mask).float(), rtol=1e-4, atol=1e-5
    )
    assert relative(out, call(*arguments, selection=selection)) > 0.05
    # What is left out is nearer with its means than without them.
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert relative(out, dense) < relative(call(*arguments, selection=selection), dense)


def test_padding_has_no_part_in_a_tail():
    q, k, v = tensors()
    layout = layout_from_segments([("text", 40), ("video", 472), ("pad", 188)])
    spec = SelectorSpec(budget=0.25)
    selection = replace(select_adaptive(q, k, spec, layout=layout), tail=True)
    dropped = selection.dropped_blocks()
    assert dropped.tolist() == [False] * 8 + [True] * 3
    out = prepared("block_sparse")(q, k, v, None, 0.0, False, None, True, selection=selection)
    want = with_tail(q, k, v, selection, dropped=dropped)
    torch.testing.assert_close(out[:, :, :512], want[:, :, :512].float(), rtol=1e-4, atol=1e-5)
    louder = k.clone()
    louder[:, :, 512:] *= 100
    again = prepared("block_sparse")(
        q, louder, v, None, 0.0, False, None, True, selection=selection
    )
    assert torch.equal(again[:, :, :512], out[:, :, :512])


def test_options_reach_the_kernel():
    q, k, v = tensors(300)
    outs = [
        prepared("quantized", **config)(q, k, v)
        for config in (
            {},
            {"quantized_smooth_k": False},
            {"quantized_hadamard": 64},
            {"quantized_granularity": "row"},
            {"quantized_pv": "int8"},
            {"quantized_matmul": "none"},
        )
    ]
    for i, first in enumerate(outs):
        for second in outs[i + 1 :]:
            assert not torch.equal(first, second)


def test_block_sparse_refuses_a_call_without_a_selection():
    q, k, v = tensors(100)
    with pytest.raises(ValueError, match="selection"):
        prepared("block_sparse")(q, k, v)
