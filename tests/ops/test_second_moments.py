"""Second moments and features on any device against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from solspark.errors import UnsupportedError
from solspark.ops import _dispatch
from solspark.ops import second_moments as ops
from solspark.reference import second_moments as reference
from solspark.reference.tree_numerics import squared_norms
from solspark.testing import nan_filled_allocations
from solspark.types import TokenGrid

GRID = TokenGrid(5, 7, 11)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def rows(seed: int = 0, dtype: torch.dtype = torch.float32, dim: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, GRID.tokens, 3, dim, generator=generator)
    return (x + torch.randn(3, dim, generator=generator)).to(dtype)


def assert_close(got: torch.Tensor, same: torch.Tensor, oracle: torch.Tensor) -> None:
    """Pass iff the error is at most twice the reference's plus a rounding of the largest value."""
    assert got.dtype == same.dtype and got.isfinite().all()
    scale = float(oracle.abs().max())
    bound = torch.finfo(got.dtype).eps * scale
    if got.dtype == torch.float64:
        # Here the reference is the oracle: allow for another order of summing all rows.
        bound *= GRID.tokens**0.5
    for reduce in (torch.max, torch.mean):
        error = reduce((got.double() - oracle).abs())
        assert error <= 2 * reduce((same.double() - oracle).abs()) + bound


@pytest.mark.parametrize("estimator", reference.ESTIMATORS)
@pytest.mark.parametrize("mode", ["raw", "unit"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_moments(estimator: str, mode: str, dtype: torch.dtype):
    x = rows(dtype=dtype)
    options = {"grid": GRID, "mode": mode, "estimator": estimator}
    oracle = reference.second_moments(x.double(), **options)
    same = reference.second_moments(x, **options)
    assert_close(ops.second_moments(x, **options), same, oracle)


@pytest.mark.parametrize("estimator", ["full", "flat64_block_mean", "flat64_mean_diag"])
def test_chunks_do_not_show(estimator: str, monkeypatch: pytest.MonkeyPatch):
    x = rows(dtype=torch.float64)
    whole = ops.second_moments(x, grid=GRID, estimator=estimator)
    monkeypatch.setattr(ops, "CHUNK_TOKENS", 64)
    assert (ops.second_moments(x, grid=GRID, estimator=estimator) - whole).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", DTYPES)
def test_features(dtype: torch.dtype):
    x = rows(dtype=dtype)
    factor = reference.metric_factor(reference.second_moments(rows(1), grid=GRID))
    # The scale of float16 features depends on the factor alone, so the oracle takes it over.
    rounded = factor * reference.half_range_scale(factor) if dtype == torch.float16 else factor
    oracle = reference.features(x.double(), rounded.to(dtype).double())
    assert_close(ops.features(x, factor), reference.features(x, factor), oracle)


@pytest.mark.parametrize("magnitude", [1.0, 1e3])
def test_float16_features_of_large_activations_stay_finite(magnitude: float):
    q, k = (rows(seed, torch.float32) * magnitude for seed in (0, 1))
    for side in ops.reblock_features(q.half(), k.half(), grid=GRID):
        assert side is not None and side.isfinite().all()
        assert side.float().square().mean() > 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_singular_moment_falls_back_to_its_diagonal(dtype: torch.dtype):
    moments = torch.tensor([[4.0, 6.0], [6.0, 1.0]])[None, None]  # indefinite
    expected = torch.diag(torch.tensor([2.0, 1.0]))[None, None]
    assert ops.metric_factor(moments).equal(expected)
    queries = torch.zeros(1, GRID.tokens, 1, 8, dtype=dtype)
    queries[..., 0] = 1.0
    _, keys = ops.reblock_features(queries, queries, grid=GRID, ridge=0.0)
    assert keys is not None and keys.isfinite().all()


def test_strided_rows_are_read():
    fused = rows(dtype=torch.bfloat16, dim=192).unflatten(-1, (3, 64))
    q, k = fused[..., 0, :], fused[..., 1, :]
    got = ops.reblock_features(q, k, grid=GRID)
    expected = ops.reblock_features(q.contiguous(), k.contiguous(), grid=GRID)
    for one, other in zip(got, expected, strict=True):
        assert one is not None and other is not None and one.equal(other)


@pytest.mark.parametrize("layout", ["independent", "q_from_k", "k_from_q"])
@pytest.mark.parametrize("m2_side", ["both", "query", "key", "none"])
def test_sides_equal_the_reference_and_land_in_one_buffer(layout: str, m2_side: str):
    q, k = rows(0, torch.float64), rows(1, torch.float64)
    options = {"grid": GRID, "m2_side": m2_side, "layout_reuse": layout, "estimator": "full"}
    expected = reference.reblock_features(q, k, **options)
    sides = 2 if layout == "independent" else 1
    out = torch.full((sides, 2, 3, GRID.tokens, 64), torch.nan, dtype=torch.float64)
    got = ops.reblock_features(q, k, out=out, **options)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one - other).abs().max() <= 1e-10
    if got[1] is not None:
        assert got[1].data_ptr() == out.data_ptr()
    if got[0] is not None:
        assert got[0].data_ptr() == out[-1].data_ptr()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 5, 3)}, ValueError, "x: expected"),
        ({"x": torch.zeros(1, 384, 3, 8)}, ValueError, "x: expected V = 385 rows"),
        ({"x": torch.zeros(1, 385, 3, 8).int()}, TypeError, "x: expected"),
        ({"grid": (5, 7, 11)}, TypeError, "grid: expected a TokenGrid"),
        ({"mode": "cubic"}, ValueError, "mode: expected"),
        ({"estimator": "all"}, ValueError, "estimator: expected"),
        ({"ridge": -1.0}, ValueError, "ridge: expected"),
        ({"ridge": float("nan")}, ValueError, "ridge: expected"),
    ],
)
def test_errors_name_the_argument(change: dict, error: type[Exception], message: str):
    call = {"x": rows(), "grid": GRID, **change}
    with pytest.raises(error, match=message):
        ops.second_moments(call.pop("x"), **call)


def test_errors_of_features():
    x, factor = rows(), torch.zeros(2, 3, 64, 64)
    with pytest.raises(ValueError, match="factor: expected"):
        ops.features(x, factor[:1])
    with pytest.raises(ValueError, match="out: expected"):
        ops.features(x, factor, out=torch.zeros(2, 3, 384, 64))
    with pytest.raises(ValueError, match="out: expected a contiguous"):
        ops.features(x, factor, out=torch.zeros(2, 385, 3, 64).transpose(1, 2))
    with pytest.raises(ValueError, match="key_video: expected the shape"):
        ops.reblock_features(x, x[:1], grid=GRID)
    for name in ("m2_side", "layout_reuse", "factor"):
        with pytest.raises(ValueError, match=f"{name}: expected one of"):
            ops.reblock_features(x, x, grid=GRID, **{name: "?"})
    with pytest.raises(ValueError, match="out: expected"):
        ops.reblock_features(x, x, grid=GRID, out=torch.zeros(1, 2, 3, 385, 64))


@pytest.mark.parametrize("m2_side", ["both", "none"])
def test_the_norms_come_along(m2_side: str):
    q, k = rows(0, torch.bfloat16), rows(1, torch.bfloat16)
    out = torch.empty(2, 2, 3, GRID.tokens, 64, dtype=torch.bfloat16)
    squares = torch.full((2, 2, 3, GRID.tokens), torch.nan)
    ops.reblock_features(q, k, grid=GRID, m2_side=m2_side, out=out, squares=squares)
    assert squares.equal(squared_norms(out))
    with pytest.raises(ValueError, match="squares: expected"):
        ops.reblock_features(q, k, grid=GRID, squares=squares[0])
    with pytest.raises(ValueError, match="squares: expected a contiguous"):
        ops.features(q, torch.zeros(2, 3, 64, 64), squares=squares[0].double())


def test_torch_compile_keeps_one_graph():
    q, k = rows(0), rows(1)
    compiled = torch.compile(
        lambda a, b: ops.reblock_features(a, b, grid=GRID), backend="eager", fullgraph=True
    )
    for one, other in zip(compiled(q, k), ops.reblock_features(q, k, grid=GRID), strict=True):
        assert one.equal(other)


def test_what_has_no_kernel_says_so():
    with pytest.raises(UnsupportedError, match="not on cpu"):
        ops.second_moments(rows(dtype=torch.float16), grid=GRID, impl="triton")
    ops.second_moments(rows(), grid=GRID, estimator="flat64_midpoint_2", mode="unit")
    call = _dispatch.last_call()
    assert call is not None and call.implementation == "eager"
    ((name, why),) = call.declined
    assert name == "triton"
    assert {"mode='unit' has no kernel", "estimator='flat64_midpoint_2' has no kernel"} <= set(why)


def test_errors_of_the_factor():
    moments = torch.zeros(1, 2, 8, 8)
    with pytest.raises(ValueError, match="kind: expected"):
        ops.metric_factor(moments, kind="qr")
    with pytest.raises(ValueError, match="moments: expected"):
        ops.metric_factor(moments[..., :4])
    with pytest.raises(TypeError, match="moments: expected"):
        ops.metric_factor(moments.half())
    for kind in ("cholesky", "eigh"):
        assert (ops.metric_factor(moments, kind=kind) == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_are_close_on_a_gpu(dtype: torch.dtype):
    x = rows(dtype=dtype, dim=128)
    for estimator in ("hilbert_midpoint", "full"):
        got = ops.second_moments(x.cuda(), grid=GRID, estimator=estimator, impl="triton").cpu()
        oracle = reference.second_moments(x.double(), grid=GRID, estimator=estimator)
        scale = float(oracle.abs().max())
        assert (got.double() - oracle).abs().max() <= 8 * torch.finfo(torch.float32).eps * scale
    moments = reference.second_moments(rows(1, dim=128), grid=GRID)
    factor = ops.metric_factor(moments.cuda(), impl="triton").cpu()
    wide = torch.linalg.cholesky(moments.double())
    own = (torch.linalg.cholesky(moments).double() - wide).abs().max()
    bound = torch.finfo(torch.float32).eps * float(wide.abs().max())
    assert (factor.double() - wide).abs().max() <= 2 * own + 4 * bound
    out = torch.full((2, 3, GRID.tokens, 128), torch.nan, dtype=dtype, device="cuda")
    squares = torch.full((2, 3, GRID.tokens), torch.nan, device="cuda")
    ops.features(x.cuda(), factor.cuda(), out=out, squares=squares, impl="triton")
    rounded = factor * reference.half_range_scale(factor) if dtype == torch.float16 else factor
    oracle = reference.features(x.double(), rounded.to(dtype).double())
    assert_close(out.cpu(), reference.features(x, factor), oracle)
    assert squares.cpu().equal(squared_norms(out.cpu()))


def test_nothing_is_read_before_it_is_written():
    q, k = rows(0, torch.bfloat16), rows(1, torch.bfloat16)
    plain = ops.reblock_features(q, k, grid=GRID)
    with nan_filled_allocations():
        again = ops.reblock_features(q, k, grid=GRID)
    for one, other in zip(again, plain, strict=True):
        assert one is not None and other is not None and one.equal(other)
