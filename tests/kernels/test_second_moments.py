"""Moments, Cholesky factors and features: close to the oracle, and compiled for every target."""

from __future__ import annotations

import pytest
import torch

from solspark.ops import second_moments as ops
from solspark.reference import second_moments as reference
from solspark.reference.tree_numerics import squared_norms
from solspark.testing import assert_close_to_oracle
from solspark.types import TokenGrid

pytest.importorskip("triton")

from solspark.kernels import second_moments as kernels

GRID = TokenGrid(5, 7, 11)
DTYPES = [torch.float16, torch.float32]


def test_in_the_interpreter(interpret):
    interpret(__file__)


def rows(dtype: torch.dtype, seed: int = 0, dim: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, GRID.tokens, 3, dim, generator=generator)
    return (x + torch.randn(3, dim, generator=generator)).to(dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("estimator", ["hilbert_midpoint", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moments(dtype: torch.dtype, estimator: str):
    x = rows(dtype)
    ids = None
    if estimator != "full":
        ids = reference.sample_tokens(GRID, estimator)[0].int()
    count = GRID.tokens if ids is None else len(ids)
    other = rows(dtype, 1).transpose(1, 2).contiguous().transpose(1, 2)
    moments, second = kernels.launch_second_moments([x, other], ids, count, 1e-3)
    assert second.equal(kernels.launch_second_moments([other], ids, count, 1e-3)[0])
    oracle = reference.second_moments(x.double(), grid=GRID, estimator=estimator)
    # The same sum in float32, in another order.
    peer = reference.second_moments(x, grid=GRID, estimator=estimator)
    scale = oracle.abs().max()
    assert (moments.double() - oracle).abs().max() <= 4 * torch.finfo(torch.float32).eps * scale
    assert moments.equal(moments.mT) and peer.dtype == moments.dtype


@pytest.mark.interpreted
def test_strided_rows_change_nothing():
    fused = rows(torch.float16, dim=96)
    view = fused[..., 32:64]
    ids = reference.sample_tokens(GRID, "hilbert_midpoint")[0].int()
    one = kernels.launch_second_moments([view], ids, len(ids), 1e-3)
    assert one.equal(kernels.launch_second_moments([view.contiguous()], ids, len(ids), 1e-3))


@pytest.mark.interpreted
def test_cholesky():
    moments = reference.second_moments(rows(torch.float32), grid=GRID)
    factor = kernels.launch_cholesky(moments)
    assert factor.equal(factor.tril())
    wide = moments.double()
    own = (torch.linalg.cholesky(moments).double() - torch.linalg.cholesky(wide)).abs().max()
    error = (factor.double() - torch.linalg.cholesky(wide)).abs().max()
    assert error <= 2 * own + torch.finfo(torch.float32).eps * wide.abs().max()


@pytest.mark.interpreted
def test_cholesky_of_what_has_none():
    indefinite = torch.eye(16).repeat(3, 1, 1)
    indefinite[0, 0, 1] = indefinite[0, 1, 0] = 2.0
    indefinite[0, 2, 2] = 9.0
    indefinite[1] = 0.0
    factor = kernels.launch_cholesky(indefinite)
    assert factor.equal(reference.metric_factor(indefinite[None])[0])
    assert (factor[1] == 0).all()
    assert factor[0].equal(torch.diag(torch.tensor([1.0, 1.0, 3.0] + [1.0] * 13)))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features_and_their_norms(dtype: torch.dtype):
    x = rows(dtype)
    factor = reference.metric_factor(reference.second_moments(rows(torch.float32, 1), grid=GRID))
    factor = factor.to(dtype)
    got = torch.full((2, 3, GRID.tokens, 32), torch.nan, dtype=dtype)
    squares = torch.full((2, 3, GRID.tokens), torch.nan)
    kernels.launch_features(x, factor, got, squares)
    wide = x.transpose(1, 2)
    oracle = wide.double() @ factor.double()
    peer = (wide.float() @ factor.float()).to(dtype)
    assert_close_to_oracle(got, oracle, peer)
    assert squares.equal(squared_norms(got))
    again = torch.empty_like(got)
    kernels.launch_features(x, factor, again, None)
    assert again.equal(got)


@pytest.mark.interpreted
@pytest.mark.parametrize("strided", [False, True])
def test_operators_keep_their_promises(strided: bool):
    """Shapes, types and strides of the fakes are those of the results; all mutation is declared."""
    checks = ("test_schema", "test_faketensor")
    x = rows(torch.float16, dim=96)[..., 32:64]
    if not strided:
        x = x.contiguous()
    for implementation in ("eager", "triton"):
        arguments = ([x, x], list(GRID.as_tuple()), "raw", "full", 1e-3, implementation)
        torch.library.opcheck(ops._moments_operator, arguments, test_utils=checks)
    moments = reference.second_moments(rows(torch.float32), grid=GRID)
    torch.library.opcheck(ops._cholesky_operator, (moments,), test_utils=checks)
    factor = reference.metric_factor(moments).half()
    out = torch.zeros(2, 3, GRID.tokens, 32, dtype=torch.float16)
    for squares in (torch.zeros(0), torch.zeros(2, 3, GRID.tokens)):
        arguments = (x, factor, out, squares)
        torch.library.opcheck(ops._features_operator, arguments, test_utils=checks)


TYPES = {
    **dict.fromkeys(("heads", "tokens", "count", "chunks"), "i32"),
    **dict.fromkeys(("sxb", "sxt", "sxh"), "i64"),
    **dict.fromkeys(("partial_ptr", "moment_ptr", "square_ptr"), "*fp32"),
    "id_ptr": "*i32",
    "ridge": "fp32",
}


def test_moments_compile(compile_ahead):
    types = {**TYPES, "x_ptr": "*bf16"}
    constants = {"D": 128, "SAMPLES": 256, "TILE": 64, "LISTED": True}
    compile_ahead(kernels.moments_kernel, types, constants, num_warps=8)
    compile_ahead(kernels.finish_moments_kernel, types, {"D": 128, "TILE": 16}, num_warps=4)


def test_cholesky_compiles(compile_ahead):
    types = {**TYPES, "factor_ptr": "*fp32"}
    constants = {"D": 128, "PANEL": kernels.PANEL}
    compile_ahead(kernels.cholesky_kernel, types, constants, num_warps=4)


def test_features_compile(compile_ahead):
    types = {**TYPES, **dict.fromkeys(("x_ptr", "factor_ptr", "y_ptr"), "*bf16")}
    constants = {"D": 128, "TILE": 64, "SPAN": 512, "NORMS": True}
    compiled = compile_ahead(
        kernels.features_kernel, types, constants, num_warps=4, num_stages=kernels.STAGES
    )
    assert compiled.metadata.shared <= (64 if "hip" in str(compiled.metadata.target) else 99) * 1024
