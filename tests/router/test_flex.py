"""Flex attention: lists, and (where a compiler is there) the compiled entry on every path."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import torch.nn.functional as F

from solspark.router import Platform, Selection, SelectorSpec, select_adaptive
from solspark.router.backends.flex import ordered_lists, prepare_flex, selection_mask

# Inductor itself still touches torch.jit when it is loaded; dynamo instantiates autograd functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
]

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on the CPU")


def flex():
    return prepare_flex(Platform("cpu"), F.scaled_dot_product_attention, {})


def tensors(tokens, heads=2, kv_heads=None, device="cpu", dtype=torch.float32, dim=64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, dim), *[(1, kv_heads or heads, tokens, dim)] * 2]
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def test_lists_hold_kept_tiles_first_and_ascending():
    keep = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.int8)
    counts, indices = ordered_lists(keep[None, None])
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.tolist() == [[[3, 0, 5]]]
    assert indices[0, 0, 0, :3].tolist() == [1, 3, 4]
    assert indices[0, 0, 2].tolist() == [0, 1, 2, 3, 4]


def test_a_selection_goes_to_the_full_lists_with_exact_lengths():
    q, k, _ = tensors(1000)
    selection = select_adaptive(q, k, SelectorSpec(budget=0.25))
    mask = selection_mask(selection, q.device)
    assert mask.seq_lengths == (1000, 1000) and mask.BLOCK_SIZE == (128, 64)
    assert not mask.kv_num_blocks.any() and mask.q_num_blocks is None
    assert torch.equal(mask.full_kv_num_blocks, selection.keep.sum(-1, dtype=torch.int32))
    assert mask.kv_num_blocks.device == q.device
    assert selection_mask(selection, q.device, backward=True).full_q_num_blocks is not None


def test_a_selection_cannot_be_combined_with_a_mask():
    q, k, v = tensors(200)
    selection = Selection(torch.ones(1, 1, 2, 4, dtype=torch.int8), 128, 64, 200, 200)
    with pytest.raises(ValueError, match=r"selection.*attn_mask"):
        flex()(q, k, v, torch.ones(200, 200, dtype=torch.bool), selection=selection)
    with pytest.raises(ValueError, match="selection"):
        flex()(q, k, v, None, 0.0, True, selection=selection)


@COMPILER
@pytest.mark.slow
def test_a_selection_through_the_compiled_entry_on_the_cpu():
    # Ragged, so that the last tiles are partial. One compilation: the other paths are tested on a
    # GPU.
    q, k, v = tensors(700)
    selection = select_adaptive(q, k, SelectorSpec(budget=0.25))
    sparse = flex()(q, k, v, selection=selection)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=selection.token_mask())
    torch.testing.assert_close(sparse, want, rtol=1e-5, atol=1e-5)
    # Were the lists ignored, the result would be this one.
    dense = F.scaled_dot_product_attention(q, k, v)
    assert (sparse - dense).abs().max() > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 1000, 2048])
def test_selection_on_the_gpu(tokens):
    torch.set_float32_matmul_precision("highest")
    run = flex()
    q, k, v = tensors(tokens, heads=4, device="cuda")
    floor = (run(q, k, v) - F.scaled_dot_product_attention(q, k, v)).abs().max().item()
    assert floor < 5e-3
    selection = select_adaptive(q, k, SelectorSpec(budget=0.25))
    sparse = run(q, k, v, selection=selection)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=selection.token_mask())
    assert (sparse - want).abs().max().item() <= max(4 * floor, 2e-3)
    dense = F.scaled_dot_product_attention(q, k, v)
    assert (sparse - dense).abs().max().item() > 20 * max(floor, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths", [(1, 1), (63, 65), (129, 127), (1001, 503), (18_200, 18_200)], ids=str
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "key mask"])
def test_lengths_that_are_no_multiple_of_a_tile(lengths, masked):
    torch._dynamo.reset()
    rows, columns = lengths
    q, k, v = tensors(max(lengths), device="cuda")
    q, k, v = q[:, :, :rows], k[:, :, :columns], v[:, :, :columns]
    mask = None
    if masked:
        mask = torch.rand(1, 1, 1, columns, device="cuda") > 0.3
        mask[..., 0] = True
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (flex()(q, k, v, mask) - want).abs().max() < 5e-3


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_token_mask_with_more_than_2_31_entries(kind):
    """47,000 squared passes an int32: the last rows are looked up where it would have wrapped."""
    torch._dynamo.reset()
    tokens = 47_000
    q, k, v = tensors(tokens, heads=1, device="cuda", dtype=torch.bfloat16)
    place = torch.arange(tokens, device="cuda")
    mask = (place[:, None] * 5 + place) % 7 < 3
    if kind == "float":
        mask = torch.where(mask, 0.0, -1e4).to(torch.bfloat16)
    out = flex()(q, k, v, mask)
    rows = torch.tensor([0, 1, 23_500, 45_691, 46_341, 46_998, 46_999], device="cuda")
    want = F.scaled_dot_product_attention(
        *(x.float() for x in (q[:, :, rows], k, v)),
        attn_mask=mask[rows] if kind == "bool" else mask[rows].float(),
    )
    dense = F.scaled_dot_product_attention(*(x.float() for x in (q[:, :, rows], k, v)))
    error = (out[:, :, rows].float() - want).norm() / want.norm()
    assert error < 0.02 < (dense - want).norm() / want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "key mask", "head mask", "float mask", "gqa", "scale"])
def test_masks_on_the_gpu(kind):
    tokens = 1000
    q, k, v = tensors(tokens, heads=4, kv_heads=2 if kind == "gqa" else None, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(1)
    options = {}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "key mask":
        options["attn_mask"] = torch.rand(1, 1, 1, tokens, generator=generator, device="cuda") > 0.3
    elif kind == "head mask":
        options["attn_mask"] = (
            torch.rand(1, 4, tokens, tokens, generator=generator, device="cuda") > 0.3
        )
    elif kind == "float mask":
        options["attn_mask"] = torch.randn(tokens, tokens, generator=generator, device="cuda")
    elif kind == "gqa":
        options["enable_gqa"] = True
    else:
        options["scale"] = 1 / math.sqrt(7)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    assert (flex()(q, k, v, **options) - want).abs().max() < 5e-3
