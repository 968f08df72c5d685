"""The landmark tree's specification: invariants and hand-computed splits (spec/spark.md 1)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solspark.reference import tree_numerics as numerics
from solspark.reference import tree_split as split
from solspark.reference.hierarchy import FANOUT_MODES, proxy_topology
from solspark.reference.initial_order import INITIAL_ORDERS, initial_order
from solspark.reference.reblock import reblock
from solspark.reference.reblock_options import ReblockOptions, ReblockResult, landmark_count
from solspark.types import TokenGrid


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_well_formed(result: ReblockResult, tokens: int) -> None:
    """Hold the invariants of spec/spark.md 1.2."""
    permutation, inverse = result.permutation, result.inverse_permutation
    assert inverse is not None
    everyone = torch.arange(tokens).expand_as(permutation)
    assert permutation.sort(-1).values.equal(everyone)
    assert permutation.gather(-1, inverse).equal(everyone)
    assert inverse.gather(-1, permutation).equal(everyone)
    leaves = tokens // 64
    assert result.active_tokens == 64 * leaves
    assert result.num_excluded == tokens % 64
    assert result.block_indices.shape == (*permutation.shape[:-1], leaves, 64)
    assert result.block_indices.data_ptr() == permutation.data_ptr()
    assert result.block_indices.flatten(-2).equal(permutation[..., : 64 * leaves])
    assert result.excluded_indices.equal(permutation[..., 64 * leaves :])


@pytest.mark.parametrize("order", INITIAL_ORDERS)
@pytest.mark.parametrize("mode", FANOUT_MODES)
def test_zeros_give_the_initial_order(mode: str, order: str):
    """With all scores equal only token ids decide, and flat ids are the order itself."""
    grid = TokenGrid(5, 4, 33)
    options = ReblockOptions(fanout_mode=mode, initial_order=order)
    result = reblock(torch.zeros(grid.tokens, 16), grid=grid, options=options)
    assert_well_formed(result, grid.tokens)
    if order == "flat":
        # The remainder of equal norms is the lowest ids, so all others move up.
        excluded = grid.tokens % 64
        expected = [*range(excluded, grid.tokens), *range(excluded)]
        assert result.permutation.tolist() == expected


@pytest.mark.parametrize("value", [0.0, -0.0, 3.0])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("extra", [{}, {"group_size": (8, 4)}, {"max_children": 2}])
def test_equal_tokens_give_the_identity(value: float, distance: str, extra: dict):
    grid = TokenGrid(4, 8, 20)
    options = ReblockOptions(distance=distance, **extra)
    result = reblock(torch.full((640, 8), value), grid=grid, options=options)
    assert result.permutation.tolist() == list(range(640))


def test_the_sign_of_zero_decides_nothing():
    x = gaussian(320, 16)
    x[::3] = 0.0
    negative = x.clone()
    negative[::6] = -0.0
    grid = TokenGrid(5, 8, 8)
    assert reblock(x, grid=grid).permutation.equal(reblock(negative, grid=grid).permutation)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "initial_order": st.sampled_from(INITIAL_ORDERS),
        "order_mode": st.sampled_from(["parent_order", "scalar_order"]),
        "group_size": st.sampled_from([1, 2, 4, 8, (8, 4), (4, 1)]),
        "max_children": st.sampled_from([2, 4, 8, 16, (4, 8)]),
        "fanout_mode": st.sampled_from(FANOUT_MODES),
        "landmark_mode": st.sampled_from(["midpoint", "mean"]),
        "landmark_count": st.sampled_from([32, 64]),
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


def make_options(drawn: dict) -> ReblockOptions:
    drawn = dict(drawn)
    return ReblockOptions(**drawn.pop("geometry", {}), **drawn)


@settings(max_examples=25, deadline=None)
@given(
    drawn=OPTIONS,
    grid=st.builds(TokenGrid, st.integers(1, 5), st.integers(8, 11), st.integers(8, 11)),
    seed=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_every_option_gives_a_well_formed_tree(drawn, grid, seed, dtype):
    options = make_options(drawn)
    x = gaussian(grid.tokens, 8, seed=seed, dtype=dtype)
    norms = numerics.inverse_norms(gaussian(grid.tokens, 8, seed=seed + 1))
    result = reblock(x, grid=grid, options=options, input_inverse_norms=norms)
    assert_well_formed(result, grid.tokens)
    order = initial_order(grid, options.initial_order).tolist()
    tail = result.excluded_indices.tolist()
    assert [token for token in order if token in set(tail)] == tail
    if result.hierarchy.leaves == 1:
        assert result.block_indices[0].tolist() == [t for t in order if t not in set(tail)]


def test_leading_indices_are_independent():
    grid = TokenGrid(3, 8, 11)
    x = gaussian(2, 3, grid.tokens, 16)
    whole = reblock(x, grid=grid)
    assert_well_formed(whole, grid.tokens)
    for b in range(2):
        for h in range(3):
            alone = reblock(x[b, h], grid=grid)
            assert whole.permutation[b, h].equal(alone.permutation)


# Remainder (1.3)


def test_the_largest_norms_are_excluded_in_root_order():
    x = torch.ones(67, 8)
    x[40], x[3], x[50] = 9.0, 7.0, 8.0
    result = reblock(x, grid=TokenGrid(1, 1, 67))
    assert result.excluded_indices.tolist() == [3, 40, 50]
    assert result.block_indices[0].tolist() == [t for t in range(67) if t not in (3, 40, 50)]


def test_equal_norms_exclude_the_lower_id_whatever_the_initial_order():
    grid = TokenGrid(3, 5, 5)
    options = ReblockOptions(initial_order="hilbert_wth")
    x = torch.ones(75, 8)
    x[60] = 2.0
    tail = reblock(x, grid=grid, options=options).excluded_indices.tolist()
    assert set(tail) == {*range(10), 60}
    order = initial_order(grid, "hilbert_wth").tolist()
    assert tail == sorted(tail, key=order.index)


def test_given_excluded_tokens_replace_the_norms_but_keep_root_order():
    x = gaussian(130, 8)
    result = reblock(x, grid=TokenGrid(1, 10, 13), excluded_indices=torch.tensor([77, 3]))
    assert result.excluded_indices.tolist() == [3, 77]


def test_fitting_samples_do_not_choose_the_remainder():
    grid, x, other = TokenGrid(1, 10, 20), gaussian(200, 8), gaussian(200, 8, seed=1)
    plain = reblock(x, grid=grid)
    fitted = reblock(x, grid=grid, fitting_samples=other)
    assert fitted.excluded_indices.equal(plain.excluded_indices)
    alone = reblock(other, grid=grid, excluded_indices=plain.excluded_indices)
    assert fitted.permutation.equal(alone.permutation)


# Splits


def two_clusters(tokens: int, dim: int = 8) -> tuple[torch.Tensor, list[int]]:
    """Return tokens near the first or the second axis, half of them each, and which axis it is."""
    labels = torch.randperm(tokens, generator=torch.manual_seed(3)) % 2
    x = 0.01 * gaussian(tokens, dim)
    x[torch.arange(tokens), labels] += 1
    return x, labels.tolist()


@pytest.mark.parametrize(
    ("distance", "aggregation"), [("cosine", "linear"), ("cosine", "max"), ("euclidean", "linear")]
)
@pytest.mark.parametrize("update", ["mean", "medoid"])
@pytest.mark.parametrize("seeds", ["farthest_pair", "endpoint_order"])
def test_two_clusters_are_told_apart(distance, aggregation, update, seeds):
    options = ReblockOptions(
        distance=distance, aggregation=aggregation, update_rule=update, seed_rule=seeds
    )
    x, labels = two_clusters(128)
    result = reblock(x, grid=TokenGrid(1, 1, 128), options=options)
    found = [{labels[token] for token in block.tolist()} for block in result.block_indices]
    assert found in ([{0}, {1}], [{1}, {0}])


def test_scalar_order_sorts_a_leaf_by_score():
    angle = torch.linspace(0.1, 1.4, 128)[torch.randperm(128, generator=torch.manual_seed(0))]
    x = torch.stack([angle.cos(), angle.sin()], -1).double()
    options = ReblockOptions(order_mode="scalar_order", score_precision="fp32")
    order = reblock(x, grid=TokenGrid(1, 1, 128), options=options).permutation
    turned = angle[order].diff()
    assert (turned > 0).all() or (turned < 0).all()


def test_parent_order_keeps_ids_ascending_in_every_leaf():
    result = reblock(gaussian(512, 16), grid=TokenGrid(8, 8, 8))
    assert (result.block_indices.diff(dim=-1) > 0).all()


def test_groups_move_together():
    result = reblock(
        gaussian(512, 16), grid=TokenGrid(8, 8, 8), options=ReblockOptions(group_size=4)
    )
    atoms = result.permutation.view(-1, 4)
    assert (atoms % 4).equal(torch.arange(4).expand_as(atoms))
    assert (atoms.diff(dim=-1) == 1).all()


def test_fit_by_hand():
    """Four landmarks on a line through angle space: seeds, one divided landmark, weighted means."""
    centres = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [4.0, 3.0]], dtype=torch.float64)
    options = ReblockOptions(proxy_iterations=1)
    fit = split.fit_proxy(centres, [2, 2, 2, 2], 5, options)
    # Farthest pair: 0 and 2. Order by angle: 0, 3, 1, 2; five units: all of 0 and 3, half of 1.
    assert fit.left_weights == [2, 1, 0, 2]
    assert fit.right_weights == [0, 1, 2, 0]
    assert torch.allclose(fit.left, torch.tensor([13.0, 10.0], dtype=torch.float64) / 5)
    assert torch.allclose(fit.right, torch.tensor([3.0, 8.0], dtype=torch.float64) / 3)


def test_no_iteration_keeps_the_seeds_but_divides_the_weights():
    centres = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [4.0, 3.0]], dtype=torch.float64)
    fit = split.fit_proxy(centres, [2, 2, 2, 2], 4, ReblockOptions(proxy_iterations=0))
    assert fit.left_weights == [2, 0, 0, 2]
    assert fit.left.equal(centres[0]) and fit.right.equal(centres[2])


def test_seeds_break_ties_by_the_first_pair_and_skip_weightless_landmarks():
    assert split._seeds([[0.0] * 4] * 4, [1, 2, 3], "farthest_pair") == (1, 2)
    assert split._seeds([[0.0] * 4] * 4, [1, 2, 3], "endpoint_order") == (1, 3)
    assert split._seeds([[0.0] * 4] * 4, [2], "farthest_pair") == (2, 2)


def test_medoid_is_the_cheapest_landmark_with_weight():
    centres = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0]], dtype=torch.float64)
    distances = split._landmark_distances(centres, "cosine")
    options = ReblockOptions(update_rule="medoid")
    assert split._update(centres, distances, [1, 1, 1, 0], options).equal(centres[1])
    assert split._update(centres, distances, [1, 0, 1, 0], options).equal(centres[0])


def test_landmarks_stand_in_the_middle_of_their_intervals():
    rows = torch.arange(10.0, dtype=torch.float64)[:, None]
    centres, lengths = split.landmarks(rows, 4, "midpoint", torch.float32)
    assert lengths == [2, 3, 2, 3]
    assert centres[:, 0].tolist() == [1, 3, 6, 8]
    means, _ = split.landmarks(rows, 4, "mean", torch.float32)
    assert means[:, 0].tolist() == [0.5, 3, 5.5, 8]


def test_landmark_count_of_groups():
    assert [landmark_count(n, 32, 1) for n in (128, 16)] == [32, 16]
    assert [landmark_count(n, 32, 8) for n in (16, 24, 32, 64)] == [16, 16, 32, 32]
    assert landmark_count(48, 64, 4) == 32
    assert landmark_count(192, 256, 1) == 192


def test_routing_meets_capacities_and_breaks_ties_by_token_id():
    (node,) = proxy_topology([2, 3])
    atoms = [[40], [10], [30], [20], [50]]
    left, right = split._route([0, 1, 2, 3, 4], [0.0, -0.0, 0.0, math.nan, -1.0], atoms, node)
    assert left == [4, 1]
    assert right == [2, 0, 3]


def test_order_of_keys():
    values = [math.nan, math.inf, 1.0, 0.0, -1.0, -math.inf]
    ranked = sorted(values, key=numerics.order_key)
    assert ranked[:5] == [-math.inf, -1.0, 0.0, 1.0, math.inf] and math.isnan(ranked[5])
    assert numerics.order_key(-0.0) == numerics.order_key(0.0)


# Numerics (1.7, 1.8)


@pytest.mark.parametrize("power", [-20, 20])
@pytest.mark.parametrize("extra", [{}, {"aggregation": "max"}, {"landmark_mode": "mean"}])
def test_cosine_ignores_the_scale_of_its_input(power: int, extra: dict):
    x = gaussian(512, 32, dtype=torch.bfloat16)
    grid, options = TokenGrid(8, 8, 8), ReblockOptions(**extra)
    scaled = reblock(x * 2.0**power, grid=grid, options=options)
    assert scaled.permutation.equal(reblock(x, grid=grid, options=options).permutation)


def test_unit_means_ignore_the_scale_of_every_single_token():
    x = gaussian(512, 32)
    scale = torch.randint(-10, 10, (512, 1), generator=torch.manual_seed(1)).float().exp2()
    grid, options = TokenGrid(8, 8, 8), ReblockOptions(mean_mode="metric_unit")
    plain = reblock(x, grid=grid, options=options)
    assert reblock(x * scale, grid=grid, options=options).permutation.equal(plain.permutation)
    # and the raw means do not, or the test above shows nothing
    raw = reblock(x, grid=grid).permutation
    assert not reblock(x * scale, grid=grid).permutation.equal(raw)


def test_input_unit_means_with_the_own_norms_are_metric_unit_means():
    x = gaussian(512, 32)
    grid = TokenGrid(8, 8, 8)
    metric = reblock(x, grid=grid, options=ReblockOptions(mean_mode="metric_unit"))
    own = reblock(
        x,
        grid=grid,
        options=ReblockOptions(mean_mode="input_unit"),
        input_inverse_norms=numerics.inverse_norms(x),
    )
    assert own.permutation.equal(metric.permutation)


def test_tokens_without_a_norm_sort_last_and_disturb_no_direction():
    x, labels = two_clusters(256)
    # Token 37 is no midpoint of the root's intervals (4, 12, ...), token 36 is one.
    for token in (37, 36):
        spoilt = x.clone()
        spoilt[token] = math.nan
        result = reblock(spoilt, grid=TokenGrid(1, 1, 256))
        assert_well_formed(result, 256)
        assert token in result.block_indices[-1].tolist()
        odd_ones = 0
        for block in result.block_indices.tolist():
            ones = sum(labels[t] for t in block if t != token)
            odd_ones += min(ones, 64 - ones)
        assert odd_ones <= 2
    assert_well_formed(reblock(torch.full((300, 8), math.nan), grid=TokenGrid(1, 15, 20)), 300)


def test_a_norm_beyond_float32_counts_as_none():
    x = torch.tensor([[1e30, 0.0], [3.0, 4.0], [0.0, 0.0]])
    inverse = numerics.inverse_norms(x)
    assert math.isnan(inverse[0]) and inverse[1] == torch.tensor(0.2)
    assert inverse[2] == torch.tensor(1e-12).reciprocal()


def test_float64_copies_of_rounded_inputs_give_the_same_tree():
    x = gaussian(3, 512, 32, dtype=torch.bfloat16)
    grid = TokenGrid(8, 8, 8)
    assert reblock(x.double(), grid=grid).permutation.equal(reblock(x, grid=grid).permutation)


def test_score_precisions_differ_by_the_rounding_of_float16():
    rows, direction = gaussian(500, 128), gaussian(1, 128, seed=1).double()
    direction /= direction.norm()
    narrow = split._cosines(rows, direction, "fp16")
    exact = torch.nn.functional.cosine_similarity(rows.double(), direction)[:, None]
    wide = split._cosines(rows, direction, "fp32")
    assert (wide - exact).abs().max() <= 2**-24
    assert 2**-24 < (narrow - exact).abs().max() < 2**-11


def test_float16_products_are_summed_exactly():
    rows, direction = gaussian(200, 128), gaussian(1, 128, seed=1).double()
    turned = torch.randperm(128, generator=torch.manual_seed(2))
    straight = split._cosines(rows, direction, "fp16")
    assert split._cosines(rows[:, turned], direction[:, turned], "fp16").equal(straight)


# Options and records


def test_split_statistics():
    grid = TokenGrid(4, 8, 9)
    result = reblock(gaussian(288, 8), grid=grid, options=ReblockOptions(group_size=(8, 4)))
    assert result.hierarchy.level_sizes == (1, 4)
    assert result.split_stats == (
        {
            "level": 0,
            "node_tokens": 256,
            "node_count": 1,
            "target_leaves": (1, 1, 1, 1),
            "group_size": 8,
            "representatives": 32,
            "children": 4,
            "landmarks": 32,
            "proxy_iterations": 2,
            "seed_rule": "farthest_pair",
            "update_rule": "mean",
        },
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance": "manhattan"}, "distance: expected one of cosine, euclidean; got 'manhattan'"),
        ({"order_mode": "none"}, "order_mode: "),
        ({"group_size": 3}, "group_size: expected an int of \\[1, 2, 4, 8\\]"),
        ({"group_size": ()}, "group_size: .* non-empty"),
        ({"landmark_count": 16}, "landmark_count: expected one of 32, 64, 128, 256; got 16"),
        ({"proxy_iterations": True}, "proxy_iterations: .* got True"),
        ({"proxy_iterations": 3}, "proxy_iterations: "),
        ({"distance": "euclidean", "aggregation": "max"}, "aggregation: max needs distance"),
        ({"distance": "euclidean", "mean_mode": "metric_unit"}, "mean_mode: metric_unit needs"),
        ({"initial_order": "spiral"}, "initial_order: "),
        ({"max_children": 7}, "max_children: "),
        ({"midpoint_direction_mode": "x"}, "midpoint_direction_mode: "),
    ],
)
def test_bad_options_name_themselves(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ReblockOptions(**options)


def test_the_default_fanout_is_eight_and_old_names_are_understood():
    assert ReblockOptions().max_children == 8
    assert ReblockOptions(order_mode="preserve_parent_order") == ReblockOptions()
    assert ReblockOptions(group_size=[8, 4]).group_at(5) == 4
    names = {field.name for field in dataclasses.fields(ReblockOptions)}
    assert {"proxy_iterations", "seed_rule", "update_rule", "score_precision"} <= names


@pytest.mark.parametrize("mode", ["legacy", "fused"])
def test_midpoint_direction_modes_are_one(mode: str):
    x, grid = gaussian(512, 16), TokenGrid(8, 8, 8)
    options = ReblockOptions(midpoint_direction_mode=mode)
    assert reblock(x, grid=grid, options=options).permutation.equal(
        reblock(x, grid=grid).permutation
    )
