"""The eager landmark tree gives the reference's permutation, whatever the options."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solspark.errors import UnsupportedError
from solspark.ops import _dispatch, _reblock_eager
from solspark.ops import reblock as ops
from solspark.reference import reblock as reference
from solspark.reference import tree_numerics as numerics
from solspark.reference.hierarchy import FANOUT_MODES
from solspark.reference.initial_order import INITIAL_ORDERS
from solspark.reference.reblock_options import ReblockOptions
from solspark.testing import nan_filled_allocations
from solspark.types import TokenGrid


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_same(x: torch.Tensor, grid: TokenGrid, options: ReblockOptions, **extra) -> None:
    expected = reference.reblock(x, grid=grid, options=options, **extra)
    got = ops.reblock(x, grid_shape=grid, options=options, validate=False, **extra)
    assert got.permutation.equal(expected.permutation)
    assert expected.inverse_permutation is not None and got.inverse_permutation is not None
    assert got.inverse_permutation.equal(expected.inverse_permutation)
    assert got.excluded_indices.equal(expected.excluded_indices)
    assert got.block_indices.equal(expected.block_indices)
    assert got.split_stats == expected.split_stats
    assert got.hierarchy == expected.hierarchy


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "initial_order": st.sampled_from(INITIAL_ORDERS),
        "order_mode": st.sampled_from(["parent_order", "scalar_order"]),
        "group_size": st.sampled_from([1, 2, 4, 8, (8, 4), (4, 1)]),
        "max_children": st.sampled_from([2, 4, 8, 16, 32, (4, 8)]),
        "fanout_mode": st.sampled_from(FANOUT_MODES),
        "root_fanout": st.sampled_from([2, 8, 16]),
        "landmark_mode": st.sampled_from(["midpoint", "mean"]),
        "landmark_count": st.sampled_from([32, 64, 128]),
        "proxy_iterations": st.sampled_from([0, 1, 2, 4]),
        "seed_rule": st.sampled_from(["farthest_pair", "endpoint_order"]),
        "update_rule": st.sampled_from(["mean", "medoid"]),
        "score_precision": st.sampled_from(["fp16", "fp32"]),
        "geometry": st.sampled_from(
            [
                {"distance": "euclidean"},
                {"aggregation": "max"},
                {"mean_mode": "metric_unit"},
                {"mean_mode": "input_unit"},
            ]
        ),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    drawn=OPTIONS,
    grid=st.builds(TokenGrid, st.integers(1, 9), st.integers(8, 11), st.integers(8, 11)),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    heads=st.integers(1, 3),
    # Few distinct values make many ties.
    levels=st.sampled_from([None, 2, 1]),
)
def test_equals_the_reference(drawn, grid, seed, dtype, heads, levels):
    drawn = dict(drawn)
    options = ReblockOptions(**drawn.pop("geometry", {}), **drawn)
    x = gaussian(heads, grid.tokens, 8, seed=seed, dtype=dtype)
    if levels is not None:
        x = (x * levels).round() / levels
    extra = {}
    if options.mean_mode == "input_unit":
        extra["input_inverse_norms"] = numerics.inverse_norms(gaussian(heads, grid.tokens, 4))
    assert_same(x, grid, options, **extra)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("tokens", [64, 130, 512])
def test_equals_the_reference_at_the_published_sizes(tokens: int, distance: str):
    grid = {64: TokenGrid(4, 4, 4), 130: TokenGrid(1, 10, 13), 512: TokenGrid(8, 8, 8)}[tokens]
    options = ReblockOptions(distance=distance, initial_order="hilbert_hwt")
    assert_same(gaussian(3, tokens, 128), grid, options)


def test_equals_the_reference_for_a_clip_of_many_levels():
    grid = TokenGrid(7, 23, 29)
    assert_same(gaussian(2, grid.tokens, 128, dtype=torch.bfloat16), grid, ReblockOptions())


def test_chunks_of_trees_do_not_show(monkeypatch: pytest.MonkeyPatch):
    grid, x = TokenGrid(4, 9, 11), gaussian(2, 3, 396, 16)
    whole = ops.reblock(x, grid_shape=grid)
    monkeypatch.setitem(_reblock_eager.CHUNK_BYTES, "cpu", 1)
    assert ops.reblock(x, grid_shape=grid).permutation.equal(whole.permutation)
    assert whole.permutation.shape == (2, 3, 396)


def test_given_excluded_tokens_and_fitting_samples():
    grid, x = TokenGrid(3, 7, 19), gaussian(2, 399, 16)
    excluded = torch.stack([torch.randperm(399, generator=torch.manual_seed(i)) for i in (0, 1)])
    extra = {"excluded_indices": excluded[:, :15], "fitting_samples": gaussian(2, 399, 16, seed=3)}
    assert_same(x, grid, ReblockOptions(initial_order="hilbert_wht"), **extra)
    narrow = ops.reblock(x, grid_shape=grid, excluded_indices=excluded[:, :15].int())
    assert narrow.excluded_indices.sort(-1).values.equal(excluded[:, :15].sort(-1).values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e25])
def test_rows_without_a_norm_raise_when_validated_and_sort_last_otherwise(bad: float):
    grid, x = TokenGrid(3, 10, 11), gaussian(2, 330, 8)
    x[1, 17, 3] = bad
    with pytest.raises(ValueError, match=r"samples: .* norm is finite.* got 1"):
        ops.reblock(x, grid_shape=grid)
    assert_same(x, grid, ReblockOptions())
    # With a remainder such rows go there first: they count as the largest norm.
    assert 17 in ops.reblock(x, grid_shape=grid, validate=False).excluded_indices[1]
    with pytest.raises(ValueError, match="fitting_samples: expected rows"):
        ops.reblock(gaussian(2, 330, 8), fitting_samples=x, grid_shape=grid)
    for mode in ("mean", "midpoint"):
        x[0] = bad
        assert_same(x, grid, ReblockOptions(landmark_mode=mode, group_size=2))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_validation_changes_nothing(seed: int, dtype: torch.dtype):
    grid, x = TokenGrid(3, 10, 11), gaussian(2, 330, 8, seed=seed, dtype=dtype)
    one = ops.reblock(x, grid_shape=grid, validate=True)
    assert one.permutation.equal(ops.reblock(x, grid_shape=grid, validate=False).permutation)


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e3, 3e4])
def test_any_magnitude_gives_a_permutation(magnitude: float):
    grid = TokenGrid(3, 10, 11)
    for dtype in (torch.float16, torch.bfloat16):
        assert_same(gaussian(1, 330, 8, dtype=dtype) * magnitude, grid, ReblockOptions())


def test_views_of_any_stride_are_read():
    grid = TokenGrid(2, 9, 11)
    fused = gaussian(2, 198, 3, 5, 16)  # B, T, q/k/v, H, D
    view = fused[:, :, 1].transpose(1, 2)
    assert not view.is_contiguous()
    got = ops.reblock(view, grid_shape=grid)
    assert got.permutation.equal(ops.reblock(view.contiguous(), grid_shape=grid).permutation)
    every_second = gaussian(198, 32)[:, ::2]
    expected = ops.reblock(every_second.contiguous(), grid_shape=grid)
    assert ops.reblock(every_second, grid_shape=grid).permutation.equal(expected.permutation)


def test_int32_indices_are_the_same_permutation_and_the_inverse_is_optional():
    grid, x = TokenGrid(3, 10, 11), gaussian(330, 8)
    wide = ops.reblock(x, grid_shape=(3, 10, 11))
    narrow = ops.reblock(x, grid_shape=grid, index_dtype=torch.int32, return_inverse=False)
    assert narrow.permutation.dtype == torch.int32
    assert narrow.permutation.long().equal(wide.permutation)
    assert narrow.inverse_permutation is None
    assert wide.permutation.dtype == torch.int64


def test_gradients_are_neither_needed_nor_recorded():
    x = gaussian(128, 8).requires_grad_()
    assert not ops.reblock(x, grid_shape=(1, 8, 16)).permutation.requires_grad


def test_repeats_are_equal():
    grid, x = TokenGrid(6, 10, 11), gaussian(2, 660, 64, dtype=torch.bfloat16)
    first = ops.reblock(x, grid_shape=grid).permutation
    assert all(ops.reblock(x, grid_shape=grid).permutation.equal(first) for _ in range(3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"samples": [1.0]}, TypeError, "samples: expected a tensor"),
        ({"samples": torch.zeros(128, 4).int()}, ValueError, "samples: expected a floating dtype"),
        ({"samples": torch.zeros(128)}, ValueError, "samples: expected .*\\(128,\\)"),
        (
            {"samples": torch.zeros(63, 4), "grid_shape": (1, 7, 9)},
            ValueError,
            "samples: .*T >= 64",
        ),
        ({"samples": torch.zeros(128, 0)}, ValueError, "samples: .*D >= 1"),
        ({"grid_shape": (1, 8, 17)}, ValueError, "grid_shape: expected a product of 128"),
        ({"grid_shape": (1, 128)}, ValueError, "grid_shape: expected three positive ints"),
        ({"grid_shape": (1.0, 8, 16)}, ValueError, "grid_shape: expected three positive ints"),
        ({"grid_shape": (True, 8, 16)}, ValueError, "grid_shape: expected three positive ints"),
        ({"fitting_samples": torch.zeros(128, 5)}, ValueError, "fitting_samples: expected"),
        ({"fitting_samples": torch.zeros(128, 4).half()}, ValueError, "fitting_samples: expected"),
        ({"excluded_indices": torch.zeros(1).long()}, ValueError, "excluded_indices: .*\\(0,\\)"),
        ({"excluded_indices": [3]}, TypeError, "excluded_indices: expected a tensor"),
        ({"index_dtype": torch.int16}, ValueError, "index_dtype: "),
        ({"input_inverse_norms": torch.ones(128)}, ValueError, "input_inverse_norms: needs"),
        ({"options": ReblockOptions(mean_mode="input_unit")}, ValueError, "input_inverse_norms: "),
        ({"impl": "hopper"}, UnsupportedError, "reblock with impl='hopper'"),
        ({"impl": "numpy"}, ValueError, "impl: expected one of"),
    ],
)
def test_errors_name_the_argument(arguments: dict, error: type[Exception], message: str):
    call = {"samples": torch.zeros(128, 4), "grid_shape": (1, 8, 16), **arguments}
    with pytest.raises(error, match=message):
        ops.reblock(call.pop("samples"), **call)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([5, 5], "duplicate"), ([-1, 5], "in \\[0, 130\\)"), ([5, 130], "in \\[0, 130\\)")],
)
def test_bad_excluded_tokens(ids: list[int], message: str):
    with pytest.raises(ValueError, match=f"excluded_indices: .*{message}"):
        ops.reblock(torch.zeros(130, 4), grid_shape=(1, 10, 13), excluded_indices=torch.tensor(ids))


def test_a_broken_permutation_is_reported():
    with pytest.raises(RuntimeError, match="no permutation"):
        ops.check_permutation(torch.tensor([[0, 1, 1]]))


def test_resolving_options():
    assert ops.resolve_options().max_children == 8
    assert ops.resolve_options(fanout=16).max_children == 16
    assert ops.resolve_options(fanout=16, max_children=16).max_children == 16
    assert ops.resolve_options(max_children=None, fanout=[16, 8]).max_children == (16, 8)
    with pytest.raises(ValueError, match="fanout: conflicting"):
        ops.resolve_options(fanout=16, max_children=8)
    with pytest.raises(TypeError, match="fan_out: "):
        ops.resolve_options(fan_out=8)


def test_ordered_bits_sort_like_the_reference_keys():
    values = torch.tensor([math.nan, -math.nan, math.inf, 3e-45, 0.0, -0.0, -1.5, -math.inf])
    bits = _reblock_eager.ordered_bits(values).tolist()
    ranks = [numerics.order_key(float(value)) for value in values]
    for i in range(len(bits)):
        for j in range(len(bits)):
            assert (bits[i] < bits[j]) == (ranks[i] < ranks[j])


def test_known_norms_are_used():
    grid, x = TokenGrid(3, 10, 11), gaussian(2, 330, 16, dtype=torch.bfloat16)
    plain = ops.reblock(x, grid_shape=grid)
    squares = ops.squared_norms(x)
    assert squares.equal(numerics.squared_norms(x))
    assert ops.reblock(x, grid_shape=grid, squares=squares).permutation.equal(plain.permutation)
    # With all of them equal the lowest ids are excluded.
    flat = ops.reblock(x, grid_shape=grid, squares=torch.ones(2, 330))
    assert flat.excluded_indices.tolist() == [list(range(10))] * 2
    with pytest.raises(ValueError, match="squares: expected"):
        ops.reblock(x, grid_shape=grid, squares=squares[0])
    with pytest.raises(ValueError, match="squares: expected"):
        ops.reblock(x, grid_shape=grid, squares=squares.double())


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_squared_norms_of_any_leading_shape(shape: tuple[int, ...]):
    x = gaussian(*shape, 7, dtype=torch.float16)
    assert ops.squared_norms(x).equal(numerics.squared_norms(x))
    assert ops.inverse_norms(x).equal(numerics.inverse_norms(x))


@settings(max_examples=12, deadline=None)
@given(
    grid=st.sampled_from([TokenGrid(7, 11, 13), TokenGrid(5, 9, 17), TokenGrid(1, 7, 11)]),
    mode=st.sampled_from(FANOUT_MODES),
    seed=st.integers(0, 9),
)
def test_grids_of_primes_leave_no_token_out(grid: TokenGrid, mode: str, seed: int):
    x = gaussian(2, grid.tokens, 16, seed=seed)
    result = ops.reblock(x, grid_shape=grid, options=ReblockOptions(fanout_mode=mode))
    assert result.num_excluded == grid.tokens % 64
    assert result.permutation.sort(-1).values.equal(torch.arange(grid.tokens).expand(2, -1))


def test_a_batch_equals_its_samples_alone():
    grid, x = TokenGrid(3, 10, 11), gaussian(3, 2, 330, 16)
    whole = ops.reblock(x, grid_shape=grid).permutation
    for sample, own in zip(x, whole, strict=True):
        assert ops.reblock(sample, grid_shape=grid).permutation.equal(own)


def test_torch_compile_keeps_one_graph():
    grid, x = TokenGrid(3, 10, 11), gaussian(2, 330, 16)

    def both(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = ops.reblock(samples, grid_shape=grid, validate=False)
        return result.permutation, result.inverse_permutation

    permutation, inverse = torch.compile(both, backend="eager", fullgraph=True)(x)
    expected = ops.reblock(x, grid_shape=grid)
    assert permutation.equal(expected.permutation)
    assert inverse is not None and inverse.equal(permutation.argsort(-1))


@pytest.mark.parametrize("inverse", [False, True])
def test_the_custom_op_keeps_its_promises(inverse: bool):
    x = gaussian(2, 330, 16)
    text = ops._text_of(ReblockOptions(group_size=(8, 4), final_fanout=None))
    arguments = (x, None, None, None, None, [3, 10, 11], text, "eager", torch.int32, inverse)
    torch.library.opcheck(ops._operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_has_no_kernel_says_so():
    x = gaussian(130, 16)
    ops.reblock(x, grid_shape=(1, 10, 13), options=ReblockOptions(aggregation="max"))
    call = _dispatch.last_call()
    assert call is not None and (call.operation, call.implementation) == ("reblock", "eager")
    ((name, why),) = call.declined
    assert name == "triton" and "aggregation='max' has no kernel" in why
    assert any("not on cpu" in reason for reason in why)
    with pytest.raises(UnsupportedError, match="aggregation='max' has no kernel"):
        ops.reblock(
            x, grid_shape=(1, 10, 13), options=ReblockOptions(aggregation="max"), impl="triton"
        )


GPU_OPTIONS = [
    {},
    {"max_children": 16, "initial_order": "hilbert_thw"},
    {"landmark_mode": "mean", "landmark_count": 64},
    {"distance": "euclidean"},
    {"fanout_mode": "arbitrary_fanout", "proxy_iterations": 0, "score_precision": "fp32"},
    {"aggregation": "max", "order_mode": "scalar_order", "group_size": (8, 4)},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_the_reference_on_a_gpu(dtype: torch.dtype, options: dict):
    grid, x = TokenGrid(7, 23, 29), gaussian(2, 4669, 128, dtype=dtype)
    chosen = ReblockOptions(**options)
    got = ops.reblock(x.cuda(), grid_shape=grid, options=chosen)
    expected = reference.reblock(x, grid=grid, options=chosen)
    # Scores are summed in float32 there: a tie within its rounding may move a token.
    assert (got.permutation.cpu() != expected.permutation).float().mean() <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"max_children": 16},
        {"max_children": 16, "fanout_mode": "arbitrary_fanout"},
        {"max_children": 64, "landmark_count": 64},
        {"distance": "euclidean"},
    ],
    ids=str,
)
def test_long_nodes_of_a_gpu_are_those_of_the_cpu(options: dict):
    """Nodes that many programs route: few ties, many, and more than have room."""
    grid, x = TokenGrid(15, 30, 31), gaussian(3, 13950, 128, dtype=torch.bfloat16)
    x[1] = (x[1] * 0.6).round()
    x[2, ::3] = x[2, :1]
    chosen = ReblockOptions(**options)
    got = ops.reblock(x.cuda(), grid_shape=grid, options=chosen)
    again = ops.reblock(x.cuda(), grid_shape=grid, options=chosen, validate=False)
    assert again.permutation.equal(got.permutation)
    expected = ops.reblock(x, grid_shape=grid, options=chosen)
    assert (got.permutation.cpu() != expected.permutation).float().mean() <= 1e-3


@pytest.mark.gpu
def test_a_production_shape_on_a_gpu():
    grid = TokenGrid(37, 24, 42)
    x = torch.randn(8, grid.tokens, 128, device="cuda", dtype=torch.bfloat16)
    options = ReblockOptions(max_children=16)
    first = ops.reblock(x, grid_shape=grid, options=options).permutation
    for _ in range(3):
        again = ops.reblock(x, grid_shape=grid, options=options, validate=False)
        assert again.permutation.equal(first)
    spread = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert ops.reblock(spread, grid_shape=grid, options=options).permutation.equal(first)
    zeros = torch.zeros_like(x)
    identity = ops.reblock(zeros, grid_shape=grid, options=options).permutation
    rest = grid.tokens % 64
    assert identity[0].tolist() == [*range(rest, grid.tokens), *range(rest)]


def test_nothing_is_read_before_it_is_written():
    grid, x = TokenGrid(3, 10, 11), gaussian(2, 330, 16)
    plain = ops.reblock(x, grid_shape=grid)
    with nan_filled_allocations():
        again = ops.reblock(x, grid_shape=grid)
    assert again.permutation.equal(plain.permutation)
    assert again.inverse_permutation is not None and plain.inverse_permutation is not None
    assert again.inverse_permutation.equal(plain.inverse_permutation)
