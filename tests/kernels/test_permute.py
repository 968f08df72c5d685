"""The permuted gather in the interpreter, bit for bit, and compiled for every target."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from solspark.kernels.permute import launch_permute, permute_kernel
from solspark.ops.permute import permute, unpermute


def test_in_the_interpreter(interpret):
    interpret(__file__)


def moved(x: torch.Tensor, order: torch.Tensor, inverse: bool) -> torch.Tensor:
    y = torch.full(x.shape, torch.nan, dtype=x.dtype)
    launch_permute(x, order, y, inverse)
    return y


def permutations(batch: int, heads: int, video: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(video, generator=generator) for _ in range(batch * heads)]
    return torch.stack(rows).view(batch, heads, video)


@pytest.mark.interpreted
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("video", "tokens"), [(64, 64), (130, 137), (1, 7), (63, 131)])
def test_equals_the_eager_copy(video: int, tokens: int, dtype: torch.dtype, index: torch.dtype):
    x = torch.randn(2, tokens, 3, 24).to(dtype)
    order = permutations(2, 3, video).to(index)
    assert moved(x, order, False).equal(permute(x, order, impl="eager"))
    assert moved(x, order, True).equal(unpermute(x, order, impl="eager"))


@pytest.mark.interpreted
def test_strided_views():
    fused = torch.randn(2, 70, 3, 5, 16)
    order = permutations(2, 10, 66)[:, ::2]
    for part in range(3):
        view = fused[:, :, part]
        assert moved(view, order, False).equal(permute(view, order, impl="eager"))
        assert moved(view, order, True).equal(unpermute(view, order, impl="eager"))


@pytest.mark.interpreted
def test_parts_land_in_a_strided_tensor():
    out, order = torch.full((2, 75, 6, 16), -1.0), permutations(2, 3, 70)
    x = torch.randn(2, 70, 3, 16)
    view = out[:, :70, 1:4]
    launch_permute(x[:, :64], order[..., :64], view, True)
    launch_permute(x[:, 64:], order[..., 64:], view, True)
    assert view.equal(unpermute(x, order, impl="eager"))
    view.fill_(-1.0)
    assert (out == -1.0).all()


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("scatter", [False, True])
def test_compiles(compile_ahead, kind: str, scatter: bool):
    types = dict.fromkeys(("heads", "tokens", "video", "tiles"), "i32")
    types.update(dict.fromkeys(("sxb", "sxt", "sxh", "spb", "sph"), "i64"))
    types.update(dict.fromkeys(("syb", "syt", "syh"), "i64"))
    types.update(x_ptr=f"*{kind}", y_ptr=f"*{kind}", permutation_ptr="*i32")
    constants = {"D": 128, "WIDTH": 128, "TILE": 64, "SCATTER": scatter}
    compiled = compile_ahead(permute_kernel, types, constants, num_warps=4)
    if "ptx" in compiled.asm:
        # Rows are moved in whole 16-byte vectors: this kernel does nothing but that.
        assert compiled.asm["ptx"].count("ld.global.v4") >= 8
        assert compiled.asm["ptx"].count("st.global.v4") >= 8
