"""Permuted gathers and their inverse, on strided views, with and without rows that stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solspark.ops.permute import permute, unpermute
from solspark.testing import nan_filled_allocations


def permutations(batch: int, heads: int, video: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(video, generator=generator) for _ in range(batch * heads)]
    if not rows:
        return torch.empty(batch, heads, video, dtype=torch.int64)
    return torch.stack(rows).view(batch, heads, video)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    video=st.integers(0, 97),
    context=st.integers(0, 13),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_gather_and_back(batch, heads, video, context, dtype, index):
    tokens = max(1, video + context)
    x = torch.randn(batch, tokens, heads, 8).to(dtype)
    order = permutations(batch, heads, min(video, tokens)).to(index)
    kept = x.clone()
    y = permute(x, order)
    assert x.equal(kept) and y.is_contiguous()
    for b in range(batch):
        for h in range(heads):
            assert y[b, : order.shape[2], h].equal(x[b, order[b, h].long(), h])
    assert y[:, order.shape[2] :].equal(x[:, order.shape[2] :])
    assert unpermute(y, order).equal(x)


def test_strided_views():
    fused = torch.randn(2, 37, 3, 5, 16)  # B, L, q/k/v, H, D
    order = permutations(2, 5, 30)
    for view in (
        fused[:, :, 1],
        fused[:, :, 2].transpose(1, 2).contiguous().transpose(1, 2),
        fused[:, :, 0, :, ::2],
        fused[:1].expand(2, -1, -1, -1, -1)[:, :, 1],
    ):
        assert not view.is_contiguous()
        assert permute(view, order).equal(permute(view.contiguous(), order))
        assert unpermute(view, order).equal(unpermute(view.contiguous(), order))


def test_values_are_copied_bit_for_bit():
    x = torch.randn(1, 8, 1, 4)
    x[0, 3] = torch.nan
    x[0, 5] = -0.0
    order = torch.arange(8).flip(0).view(1, 1, 8)
    assert permute(x, order).view(torch.int32).equal(x.flip(1).view(torch.int32))


@pytest.mark.parametrize(
    ("x", "order", "error", "message"),
    [
        (torch.zeros(2, 5, 3), torch.zeros(2, 3, 5).long(), ValueError, "x: expected"),
        (torch.zeros(2, 5, 3, 4), torch.zeros(2, 5).long(), ValueError, "permutation: expected"),
        (torch.zeros(2, 5, 3, 4), torch.zeros(2, 3, 5), TypeError, "permutation: expected"),
        (torch.zeros(2, 5, 3, 4), torch.zeros(2, 1, 5).long(), ValueError, "permutation: .*V <= 5"),
        (torch.zeros(2, 5, 3, 4), torch.zeros(2, 3, 6).long(), ValueError, "permutation: .*V <= 5"),
    ],
)
def test_errors_name_the_argument(x, order, error, message):
    for function in (permute, unpermute):
        with pytest.raises(error, match=message):
            function(x, order)


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(0, 30), context=st.integers(0, 5), first=st.integers(0, 2))
def test_parts_of_an_inverse_land_in_one_tensor(cut: int, context: int, first: int):
    x, order = torch.randn(2, 30, 3, 8), permutations(2, 3, 30)
    out = torch.full((2, 30 + context, 5, 8), torch.nan)
    view = out[:, :30, first : first + 3]
    for part in (slice(0, cut), slice(cut, 30)):
        assert unpermute(x[:, part], order[..., part], out=view) is view
    assert view.equal(unpermute(x, order))
    view.fill_(torch.nan)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 5, 3), "out: expected"),
        (torch.zeros(2, 5, 3, 4).double(), "out: expected torch.float32"),
        (torch.zeros(2, 5, 4, 4), "out: expected torch.float32"),
        (torch.zeros(2, 5, 4, 3).mT, "last stride 1"),
        (torch.zeros(2, 4, 3, 4), "as many rows of its own"),
    ],
)
def test_what_cannot_take_the_rows(out: torch.Tensor, message: str):
    x, order = torch.zeros(2, 5, 3, 4), permutations(2, 3, 5)
    with pytest.raises(ValueError, match=message):
        unpermute(x, order, out=out)
    with pytest.raises(ValueError, match="permutation of all 5 rows"):
        unpermute(x, order[..., :4], out=torch.zeros(2, 5, 3, 4))


def test_torch_compile_keeps_one_graph():
    x, order = torch.randn(2, 37, 5, 16), permutations(2, 5, 30)
    compiled = torch.compile(
        lambda a, p: unpermute(permute(a, p), p), backend="eager", fullgraph=True
    )
    assert compiled(x, order).equal(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equals_the_eager_copy_on_a_gpu(dtype: torch.dtype):
    fused = torch.randn(2, 1000, 3, 5, 128, device="cuda").to(dtype)
    order = permutations(2, 5, 962).cuda()
    for index in (torch.int32, torch.int64):
        for part in range(3):
            view, own = fused[:, :, part], order.to(index)
            for function in (permute, unpermute):
                assert function(view, own).equal(function(view, own, impl="eager"))
    torch.library.opcheck(
        torch.ops.solspark.permute.default,
        (fused[:, :, 1], order, torch.empty_like(fused[:, :, 1]), False),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_every_row_is_written():
    x, order = torch.randn(2, 37, 5, 16), permutations(2, 5, 30)
    with nan_filled_allocations():
        moved = permute(x, order)
        back = unpermute(moved, order)
    assert moved.isfinite().all() and back.equal(x)
