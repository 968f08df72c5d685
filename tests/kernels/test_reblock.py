"""The landmark tree's kernels: the reference's permutation, and compiled for every target."""

from __future__ import annotations

import math
import re

import pytest
import torch

from solspark.ops._reblock_triton import heap_of, option_reasons, run_triton
from solspark.reference import reblock as reference
from solspark.reference import tree_numerics as numerics
from solspark.reference.hierarchy import FANOUT_MODES
from solspark.reference.initial_order import initial_order
from solspark.reference.reblock_options import ReblockOptions
from solspark.types import TokenGrid

pytest.importorskip("triton")

from solspark.kernels import reblock as kernels
from solspark.kernels import tree_fit, tree_route, tree_score, tree_spread

GRID = TokenGrid(4, 10, 11)  # 440 tokens: 6 leaves and 56 excluded
TOKENS = GRID.tokens


def test_in_the_interpreter(interpret):
    interpret(__file__)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equals_the_reference(x: torch.Tensor, grid: TokenGrid = GRID, norms=None, **options):
    chosen = ReblockOptions(**options)
    assert not option_reasons(chosen)
    got = run_triton(x, None, None, norms, None, grid, chosen)
    expected = reference.reblock(x, grid=grid, options=chosen, input_inverse_norms=norms)
    assert got.dtype == torch.int32
    assert got.long().equal(expected.permutation)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_children": 16},
        {"max_children": 2, "initial_order": "hilbert_hwt"},
        {"max_children": 32, "initial_order": "tile_t4h4w4", "fanout_mode": FANOUT_MODES[2]},
        {"max_children": 16, "fanout_mode": "arbitrary_fanout", "proxy_iterations": 1},
        {"landmark_mode": "mean", "max_children": 4},
        {"landmark_mode": "mean", "mean_mode": "metric_unit", "max_children": 4},
        {"landmark_count": 64, "proxy_iterations": 4},
        {"landmark_count": 128, "seed_rule": "endpoint_order"},
        {"proxy_iterations": 0, "mean_mode": "metric_unit"},
        {"distance": "euclidean", "max_children": 4},
        {"score_precision": "fp32"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "defaults",
)
def test_every_option_gives_the_reference_permutation(options: dict):
    assert_equals_the_reference(gaussian(1, TOKENS, 32), **options)


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["midpoint", "mean"])
def test_float32_features(mode: str):
    assert_equals_the_reference(gaussian(2, TOKENS, 32, dtype=torch.float32), landmark_mode=mode)


@pytest.mark.interpreted
def test_input_unit_means():
    norms = gaussian(2, TOKENS, seed=1, dtype=torch.float32).exp()
    assert_equals_the_reference(gaussian(2, TOKENS, 32), norms=norms, mean_mode="input_unit")


@pytest.mark.interpreted
@pytest.mark.parametrize("order", ["flat", "hilbert_wht"])
def test_zeros_give_the_initial_order(order: str):
    assert_equals_the_reference(torch.zeros(1, TOKENS, 16).half(), initial_order=order)
    x, grid = torch.zeros(1, 320, 16).half(), TokenGrid(4, 8, 10)
    got = run_triton(x, None, None, None, None, grid, ReblockOptions())
    assert got[0].tolist() == list(range(320))


def tied_and_broken() -> torch.Tensor:
    """Return features with many equal rows, zeros of both signs, and rows without a norm."""
    x = gaussian(3, TOKENS, 16).round()
    x[:, 50:200] = x[:, :1]
    x[0, 100] = math.nan
    x[0, 101, 3] = math.inf
    x[1] = 0.0
    x[1, ::3] = -0.0
    x[2, 7] = math.nan
    return x


@pytest.mark.interpreted
def test_spread_nodes_ties_and_broken_rows(monkeypatch):
    """Nodes above the register limit."""
    monkeypatch.setattr(kernels, "REGISTER_TOKENS", 0)
    monkeypatch.setattr(tree_spread, "CHUNK", 256)
    # Six leaves in one level: splits of three depths, some of them holes.
    holes = {"max_children": 8, "fanout_mode": "arbitrary_fanout"}
    assert_equals_the_reference(tied_and_broken(), initial_order="hilbert_wht", **holes)
    x = gaussian(1, TOKENS, 16)
    assert_equals_the_reference(x, max_children=2)
    assert_equals_the_reference(x, distance="euclidean", max_children=4)


@pytest.mark.interpreted
def test_spread_nodes_without_room_for_their_ties(monkeypatch):
    monkeypatch.setattr(kernels, "REGISTER_TOKENS", 0)
    monkeypatch.setattr(tree_spread, "CHUNK", 512)
    monkeypatch.setattr(tree_spread, "CANDIDATES", 4)
    assert_equals_the_reference(tied_and_broken()[1:], max_children=4)


@pytest.mark.interpreted
def test_ties_and_broken_rows_in_registers():
    assert_equals_the_reference(tied_and_broken(), initial_order="hilbert_wht", max_children=4)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in a guess
def test_the_cut_of_scores_that_are_hard_to_guess():
    """Gaps, far outliers, one value, subnormals, infinities and NaN; the cut at both ends too."""
    tokens = 700
    x = gaussian(9, tokens, dtype=torch.float32)
    x[1] = x[1].sign() + x[1] * 1e-4
    x[2, 5], x[2, 6] = 1e30, -1e30
    x[3] = 0.25
    x[4] *= 1e-42
    x[5, :60], x[5, 60:90], x[5, 90:130] = math.inf, -math.inf, math.nan
    x[6] = math.nan
    x[7] = (x[7] * 20).round() / 20
    x[8] = x[8].sign() * 10.0 ** (x[8] * 12)
    nodes = torch.tensor([[0, tokens]], dtype=torch.int32)
    order = torch.stack([torch.randperm(tokens) for _ in x]).int()
    keys = [[reference.order_key(value) for value in row] for row in x.tolist()]
    for capacity in (1, 64, 320, 349, 699):
        splits = torch.tensor([[[0, tokens, capacity], [0, 0, 0]]], dtype=torch.int32)
        got = order.clone()
        tree_route.launch_tree_route(got, x[..., None].contiguous(), nodes, splits, (tokens,))
        for key, before, after in zip(keys, order.tolist(), got.tolist(), strict=True):
            ranked = sorted(range(tokens), key=lambda token, key=key: (*key[token], token))
            left = set(ranked[:capacity])
            expected = [t for t in before if t in left] + [t for t in before if t not in left]
            assert after == expected


@pytest.mark.interpreted
def test_fits_in_one_launch_equal_fits_by_depth(monkeypatch):
    monkeypatch.setattr(kernels, "SPREAD_BELOW", 0)
    assert_equals_the_reference(gaussian(2, TOKENS, 32), max_children=16)


@pytest.mark.interpreted
def test_the_scale_of_the_input_changes_nothing():
    x = gaussian(1, TOKENS, 32, dtype=torch.float32)
    both = torch.cat([x * 2.0**-20, x * 2.0**20])
    got = run_triton(both, None, None, None, None, GRID, ReblockOptions())
    assert got[0].equal(got[1])


@pytest.mark.interpreted
def test_strides_excluded_tokens_and_fitting_samples():
    wide = gaussian(2, TOKENS, 2, 16)
    x, other = wide[:, :, 0], wide[:, :, 1]
    assert not x.is_contiguous()
    excluded = torch.randperm(TOKENS, generator=torch.manual_seed(0))[:56].repeat(2, 1)
    chosen = ReblockOptions(initial_order="hilbert_htw")
    for given in ({}, {"excluded": excluded}, {"fitting": other}):
        got = run_triton(x, given.get("fitting"), given.get("excluded"), None, None, GRID, chosen)
        expected = reference.reblock(
            x,
            grid=GRID,
            options=chosen,
            fitting_samples=given.get("fitting"),
            excluded_indices=given.get("excluded"),
        )
        assert got.long().equal(expected.permutation)
    # Norms that are given are used: with all of them equal the lowest ids are excluded.
    given_norms = run_triton(x, None, None, None, torch.ones(2, TOKENS), GRID, ReblockOptions())
    assert given_norms[:, -56:].tolist() == [list(range(56))] * 2


@pytest.mark.interpreted
def test_norms_are_the_reference_bit_for_bit():
    x = gaussian(2, 70, 128, dtype=torch.float32) * gaussian(2, 70, 1, seed=1).float().exp()
    x[0, 3], x[0, 4], x[1, 5] = 0.0, math.nan, math.inf
    squares = tree_score.launch_tree_norms(x)
    expected = numerics.squared_norms(x)
    assert squares.isnan().equal(expected.isnan())
    assert squares.nan_to_num(-1.0, posinf=-2.0).equal(expected.nan_to_num(-1.0, posinf=-2.0))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_inverse_permutation(dtype: torch.dtype):
    order = torch.stack([torch.randperm(1030) for _ in range(2)]).int()
    permutation, inverse = kernels.launch_finish(order, dtype, True)
    assert permutation.equal(order.to(dtype)) and inverse is not None
    assert inverse.equal(order.argsort(-1).to(dtype))
    assert kernels.launch_finish(order, dtype, False)[1] is None


def test_heaps():
    assert heap_of((1, 1)) == [[0, 128, 64], [0, 0, 0]]
    three = heap_of((2, 1, 1))
    assert three == [[0, 256, 192], [0, 192, 128], [0, 0, 0], [0, 0, 0]]
    assert heap_of((1,) * 4)[2] == [128, 128, 64]


def test_options_without_a_kernel_are_named():
    assert option_reasons(ReblockOptions()) == []
    for options in (
        {"aggregation": "max"},
        {"order_mode": "scalar_order"},
        {"update_rule": "medoid"},
        {"landmark_count": 256},
        {"group_size": (8, 1)},
    ):
        (reason,) = option_reasons(ReblockOptions(**options))
        assert next(iter(options)) in reason
    assert initial_order(GRID).shape == (TOKENS,)


# Compiled ahead of time

TYPES = {
    **dict.fromkeys(("nodes", "tokens", "wanted", "first", "splits_each"), "i32"),
    **dict.fromkeys(("tiles", "spans", "slots", "width"), "i32"),
    **dict.fromkeys(("sor", "sxr", "sxt"), "i64"),
    **dict.fromkeys(("order_ptr", "node_ptr", "split_ptr", "weight_ptr", "key_ptr"), "*i32"),
    **dict.fromkeys(("moved_ptr", "histogram_ptr", "candidate_ptr", "state_ptr"), "*i32"),
    "few_ptr": "*i32",
    **dict.fromkeys(("depth", "part", "rounds", "chunks"), "i32"),
    "count_ptr": "*i32",
    "slot_ptr": "*i8",
    **dict.fromkeys(("square_ptr", "gain_ptr", "offset_ptr", "score_ptr"), "*fp32"),
    "place_ptr": "*i64",
    "share_ptr": "*fp64",
    "x_ptr": "*bf16",
    "centre_ptr": "*bf16",
    "direction_ptr": "*fp16",
    "permutation_ptr": "*i64",
    "inverse_ptr": "*i64",
}


@pytest.mark.parametrize(
    ("landmarks", "euclidean", "means"), [(32, False, False), (128, True, True)]
)
def test_fit_compiles(compile_ahead, landmarks: int, euclidean: bool, means: bool):
    constants = {
        "K": landmarks,
        "D": 128,
        "ITERATIONS": 2,
        "ENDPOINTS": False,
        "EUCLIDEAN": euclidean,
        "MEANS": means,
        "GAINED": not means and not euclidean,
    }
    types = {**TYPES, "direction_ptr": "*fp32" if euclidean else "*fp16"}
    warps = tree_fit.WARPS[landmarks]
    compile_ahead(tree_fit.fit_kernel, types, constants, num_warps=warps)


def test_landmark_means_compile(compile_ahead):
    constants = {"K": 32, "D": 128, "ROWS": 32, "GAINED": True}
    compile_ahead(tree_fit.landmark_means_kernel, TYPES, constants, num_warps=4)


@pytest.mark.parametrize("euclidean", [False, True])
def test_scores_compile(compile_ahead, euclidean: bool):
    constants = {"D": 128, "SLOTS": 16, "WIDTH": 16, "TILE": 64, "EUCLIDEAN": euclidean}
    stages = 1 if euclidean else tree_score.STAGES
    constants.update(SPAN=tree_score.ROWS * tree_score.TILES, STAGES=stages)
    types = {**TYPES, "direction_ptr": "*fp32" if euclidean else "*fp16"}
    compiled = compile_ahead(tree_score.score_kernel, types, constants, num_warps=4)
    if "ptx" in compiled.asm and not euclidean:
        # Rows come in whole 16-byte vectors, a tile ahead; scores leave as such too.
        ptx = compiled.asm["ptx"]
        assert len(re.findall(r"cp\.async\.c[ag]\.shared\.global .*, 0x10,", ptx)) >= 8
        assert ptx.count("st.global.v4") >= 2


def test_norms_and_finish_compile(compile_ahead):
    compile_ahead(tree_score.norms_kernel, TYPES, {"D": 128, "TILE": 64}, num_warps=4)
    compile_ahead(kernels.finish_kernel, TYPES, {"TILE": 1024, "INVERSE": True}, num_warps=4)


@pytest.mark.parametrize("tokens", [128, 8192])
def test_routing_in_registers_compiles(compile_ahead, request, tokens: int):
    block, warps = tree_route.register_config(tokens)
    options = {"num_warps": warps}
    if request.node.callspec.params["compile_ahead"].startswith("gfx"):
        options["num_warps"] = min(warps, 16)
    else:
        options["maxnreg"] = tree_route.REGISTERS
    compile_ahead(tree_route.route_kernel, TYPES, {"BLOCK": block}, **options)


def test_spread_routing_compiles(compile_ahead):
    chunk = {"CHUNK": tree_spread.CHUNK}
    even = {**chunk, "LINEAR": True}
    bits = {**chunk, "LINEAR": False, "CANDIDATES": tree_spread.CANDIDATES}
    warps = tree_spread.WARPS
    for kernel, constants, own in (
        (tree_spread.count_kernel, {**even, "REMAINDER": False}, warps),
        (tree_spread.find_kernel, {}, 4),
        (tree_spread.collect_kernel, bits, warps),
        (tree_spread.cut_kernel, bits, 4),
        (tree_spread.leave_kernel, {**chunk, "SLOTS": 16, "REMAINDER": False}, warps),
        (tree_spread.offsets_kernel, {"SLOTS": 16, "TILE": 32}, 4),
        (tree_spread.move_kernel, {**chunk, "SLOTS": 16}, warps),
        (tree_spread.keep_kernel, chunk, warps),
    ):
        compile_ahead(kernel, TYPES, constants, num_warps=own)
