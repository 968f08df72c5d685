"""The installers' options: defaults, spellings, conflicts, translation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from solspark.integrations.h3_config import (
    REBLOCK_NAMES,
    ROUTING_NAMES,
    H3SparseAttentionConfig,
    sol_config,
    spark_config,
)
from solspark.integrations.minimax_h3 import install_h3_sparse_attention
from solspark.integrations.tiny_h3 import build_tiny_h3_transformer
from solspark.methods.spark_config import PRESETS


def test_defaults_of_both_installers() -> None:
    sol, spark = sol_config(), spark_config()
    for config in (sol, spark):
        assert config.total_evaluations == 19
        assert config.dense_evaluations == 4
        assert config.trailing_dense == 0
        # The README keeps the first layer dense; a later commit of the original does not.
        assert config.sol_dense_layers == 1
        # The installers' fan-out is 16; the standalone spark_reblock's is 8.
        assert config.landmark_tree_v2_children == 16
        assert config.sol_video_tail_mode == "dense"
    assert (sol.sol_min_tokens, spark.sol_min_tokens) == (0, 8192)
    assert (sol.sol_route_topk_ratio, spark.sol_route_topk_ratio) == (None, 0.1)
    assert (sol.sol_tau, sol.sol_thresh_type) == (1.0, "diag")
    assert (sol.sol_global_anchor_dtype, spark.sol_global_anchor_dtype) == ("float32", "bfloat16")
    assert spark.sol_virtual_query_levels_up == 99 and sol.sol_virtual_query_levels_up is None
    assert not sol.sol_landmark_preprocess and spark.sol_landmark_preprocess


def test_packed_options_of_both_installers() -> None:
    assert spark_config().packed() == PRESETS["default"]
    packed = sol_config().packed()
    assert packed.reblock is None and not packed.uses_virtual_queries
    assert packed.topk_ratio is None and packed.local_radius == 1
    assert PRESETS["default"].local_radius == -1


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_come_from_one_table(preset: str) -> None:
    assert spark_config(preset=preset).packed() == PRESETS[preset]


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match=r"preset: expected one of .*got 'best'"):
        spark_config(preset="best")


@pytest.mark.parametrize(
    ("grid_points", "evaluations", "dense"), [(8, 7, 2), (16, 15, 3), (20, 19, 4), (50, 49, 10)]
)
def test_evaluation_counts(grid_points: int, evaluations: int, dense: int) -> None:
    by_grid = sol_config(num_inference_steps=grid_points)
    by_count = sol_config(num_denoise_steps=evaluations)
    assert by_grid == by_count
    assert (by_grid.total_evaluations, by_grid.dense_evaluations) == (evaluations, dense)
    # The old percentage counts evaluations as well.
    assert sol_config(num_denoise_steps=evaluations, warmup_percent=20) == by_count


def test_both_counts_are_refused_even_when_consistent() -> None:
    with pytest.raises(ValueError, match="num_denoise_steps: cannot be combined"):
        sol_config(num_inference_steps=20, num_denoise_steps=19)


@pytest.mark.parametrize("value", [0, -1, True, 19.0, torch.tensor(19), "19"])
@pytest.mark.parametrize("name", ["num_denoise_steps", "num_inference_steps", "warmup_steps"])
def test_counts_are_exact_ints(name: str, value: object) -> None:
    if name == "warmup_steps" and type(value) is int and value == 0:
        value = -2
    with pytest.raises(ValueError, match=f"{name}: expected an int"):
        sol_config(**{name: value})


def test_one_grid_point_is_refused() -> None:
    with pytest.raises(ValueError, match="num_inference_steps: expected an int >= 2, got 1"):
        sol_config(num_inference_steps=1)


def test_warmup_modes() -> None:
    assert sol_config(warmup_mode="warmup_steps").dense_evaluations == 4
    assert sol_config(warmup_mode="warmup_steps", warmup_steps=40).dense_evaluations == 19
    assert sol_config(warmup_mode="warmup_steps", warmup_steps=0).dense_evaluations == 0
    assert sol_config(warmup_ratio=0.0).dense_evaluations == 0
    assert sol_config(warmup_ratio=1).dense_evaluations == 19
    # Naming only the steps means the steps; naming both keeps the ratio, the default mode.
    assert sol_config(warmup_steps=7).dense_evaluations == 7
    assert sol_config(warmup_steps=7, warmup_ratio=0.5).dense_evaluations == 10
    assert sol_config(warmup_steps=7, warmup_mode="warmup_ratio").dense_evaluations == 4


def test_ceil_of_the_ratio_is_exact() -> None:
    for evaluations in range(1, 101):
        for twentieth in range(21):
            config = sol_config(num_denoise_steps=evaluations, warmup_ratio=twentieth / 20)
            assert config.dense_evaluations == -(-evaluations * twentieth // 20)


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_ratio": 1.1},
        {"warmup_ratio": -0.1},
        {"warmup_ratio": math.nan},
        {"warmup_ratio": True},
        {"warmup_mode": "percent"},
        {"warmup_percent": 101},
        {"warmup_mode": "warmup_steps", "warmup_ratio": 2},
        {"warmup_steps": -1, "warmup_mode": "warmup_ratio"},
    ],
)
def test_warmup_values_are_validated_used_or_not(options: dict) -> None:
    with pytest.raises(ValueError, match="warmup_"):
        sol_config(**options)


@pytest.mark.parametrize("name", ["warmup_mode", "warmup_ratio", "warmup_steps"])
def test_percent_cannot_be_combined(name: str) -> None:
    value = {"warmup_mode": "warmup_ratio", "warmup_ratio": 0.2, "warmup_steps": 4}[name]
    with pytest.raises(ValueError, match=r"warmup_percent: cannot be combined"):
        sol_config(warmup_percent=20, **{name: value})


@pytest.mark.parametrize(
    "options", [{"warmup_percent": 30}, {"num_inference_steps": 9}, {"landmark_tree_v2_fanout": 8}]
)
def test_replace_works_on_resolved_values(options: dict) -> None:
    config = spark_config(**options)
    assert dataclasses.replace(config) == config
    assert dataclasses.replace(config, sol_dense_layers=2).sol_dense_layers == 2


def test_short_names_and_their_twins() -> None:
    assert sol_config(dense_layers=2, min_tokens=5) == sol_config(
        sol_dense_layers=2, sol_min_tokens=5
    )
    for name, value in (("dense_layers", 1), ("min_tokens", 0)):
        with pytest.raises(ValueError, match=f"{name}: cannot be combined with legacy sol_{name}"):
            sol_config(**{name: value, f"sol_{name}": value})
    with pytest.raises(ValueError, match="topk_ratio: cannot be combined with legacy"):
        spark_config(topk_ratio=0.1, sol_route_topk_ratio=0.1)
    # None means "not given": no conflict.
    assert spark_config(topk_ratio=None, sol_route_topk_ratio=None).sol_route_topk_ratio is None
    assert spark_config(topk_ratio=0.3).sol_route_topk_ratio == 0.3


def test_sol_has_no_short_topk_and_unknown_names_are_type_errors() -> None:
    with pytest.raises(TypeError, match=r"topk_ratio \(did you mean sol_route_topk_ratio\?\)"):
        sol_config(topk_ratio=0.1)
    with pytest.raises(TypeError, match="unexpected option zebra; H3SparseAttentionConfig has all"):
        spark_config(zebra=2)
    with pytest.raises(TypeError, match=r"dense_layer \(did you mean .*sol_dense_layers"):
        spark_config(dense_layer=2)


def test_fanout_has_two_names() -> None:
    assert spark_config(landmark_tree_v2_fanout=8).landmark_tree_v2_children == 8
    assert spark_config(landmark_tree_v2_children=[16, 8]).landmark_tree_v2_children == (16, 8)
    same = spark_config(landmark_tree_v2_children=8, landmark_tree_v2_fanout=8)
    assert same.packed().reblock.max_children == 8
    with pytest.raises(ValueError, match="conflicting"):
        spark_config(landmark_tree_v2_children=16, landmark_tree_v2_fanout=8)


def test_target_blocks_replace_the_global_anchor() -> None:
    config = spark_config(sol_virtual_query_target_blocks=189)
    assert config.sol_virtual_query_levels_up is None
    assert (config.sol_virtual_query_min_blocks, config.sol_virtual_query_max_blocks) == (94, 284)
    with pytest.raises(ValueError, match="sol_virtual_query_target_blocks: exclusive"):
        spark_config(sol_virtual_query_target_blocks=189, sol_virtual_query_levels_up=2)
    with pytest.raises(ValueError, match="sol_virtual_query_target_blocks"):
        spark_config(sol_virtual_query_target_blocks=50)


NEGATIVE = [
    ({"sol_dense_layers": -1}, "dense_layers"),
    ({"sol_dense_layers": True}, "dense_layers"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"sol_route_topk_ratio": 0}, "sol_route_topk_ratio"),
    ({"sol_route_topk_ratio": 1.5}, "sol_route_topk_ratio"),
    ({"sol_route_topk_ratio": True}, "sol_route_topk_ratio"),
    ({"sol_tau": math.nan}, "sol_tau"),
    ({"sol_tau": "1"}, "sol_tau"),
    ({"sol_thresh_type": "full"}, "sol_thresh_type"),
    ({"sol_kv_splits": 0}, "sol_kv_splits"),
    ({"sol_force_local_blocks": 1}, "sol_force_local_blocks"),
    ({"sol_exact_block_radius": 1}, "sol_exact_block_radius"),
    ({"sol_exact_block_radius": True, "sol_route_topk_ratio": 0.1}, "sol_exact_block_radius"),
    (
        {
            "sol_exact_block_radius": 1,
            "sol_route_topk_ratio": 0.1,
            "sol_force_local_blocks": True,
        },
        "sol_exact_block_radius",
    ),
    ({"sol_video_tail_mode": "pad"}, "sol_video_tail_mode"),
    ({"sol_video_tail_mode": "sparse"}, "sol_video_tail_mode"),
    ({"sol_tail_granularity": "block"}, "sol_tail_granularity"),
    ({"sol_route_topk_cutoff_mode": "sort"}, "sol_route_topk_cutoff_mode"),
    ({"sol_route_topk_execution": "magic"}, "sol_route_topk_execution"),
    ({"sol_global_anchor_dtype": "float16"}, "sol_global_anchor_dtype"),
    ({"sol_reweight_summary_math": "comfy_fp32"}, "sol_reweight_summary_math"),
    ({"sol_reweight_components": "none"}, "sol_reweight_components"),
    ({"sol_virtual_query_levels_up": 1}, "sol_virtual_query_levels_up"),
    ({"sol_virtual_query_route_score": "mean"}, "sol_virtual_query_route_score"),
    ({"sol_route_global_weighted_mean_side": "left"}, "sol_route_global_weighted_mean_side"),
    ({"sol_route_global_weighted_mean": True}, "sol_route_global_weighted_mean"),
    (
        {"sol_landmark_preprocess": True, "sol_landmark_preprocess_version": "v1"},
        "sol_landmark_preprocess_version",
    ),
    ({"extra_dense_evaluations": (19,)}, "extra_dense_evaluations"),
    ({"extra_dense_evaluations": (1.0,)}, "extra_dense_evaluations"),
    ({"extra_dense_layers": (-1,)}, "extra_dense_layers"),
    ({"trailing_dense_evaluations": -1}, "trailing_dense_evaluations"),
    ({"evaluations_per_step": 0}, "evaluations_per_step"),
    ({"sol_route_topk_schedule": (0.1,)}, "sol_route_topk_schedule"),
    ({"dense_backend": 3}, "dense_backend"),
    ({"mixed_timesteps": "ignore"}, "mixed_timesteps"),
    ({"impl": "cuda"}, "impl"),
]


@pytest.mark.parametrize(("options", "name"), NEGATIVE, ids=lambda value: str(value)[:60])
def test_bad_options_fail_at_construction_under_their_own_name(options: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        sol_config(**options)


SPARK_NEGATIVE = [
    ({"landmark_tree_v2_children": 5}, "landmark_tree_v2_children"),
    ({"landmark_tree_v2_children": True}, "landmark_tree_v2_children"),
    ({"landmark_tree_v2_final_fanout": 8}, "landmark_tree_v2_final_fanout"),
    ({"landmark_tree_v2_landmark_count": 48}, "landmark_tree_v2_landmark_count"),
    ({"landmark_tree_v2_fanout_mode": "binary"}, "landmark_tree_v2_fanout_mode"),
    ({"landmark_tree_v2_distance": "manhattan"}, "landmark_tree_v2_distance"),
    (
        {"landmark_tree_v2_distance": "euclidean", "landmark_tree_v2_aggregation": "max"},
        "landmark_tree_v2_aggregation",
    ),
    ({"landmark_tree_v2_order_mode": "random"}, "landmark_tree_v2_order_mode"),
    ({"landmark_tree_v2_initial_order": "morton"}, "landmark_tree_v2_initial_order"),
    ({"landmark_tree_v2_group_size": 3}, "landmark_tree_v2_group_size"),
    ({"landmark_tree_v2_m2_side": "value"}, "landmark_tree_v2_m2_side"),
    ({"landmark_tree_v2_layout_reuse": "shared"}, "landmark_tree_v2_layout_reuse"),
    ({"rope_sol_key_ridge_epsilon": -1.0}, "rope_sol_key_ridge_epsilon"),
    ({"sol_exact_block_radius": 2}, "sol_exact_block_radius"),
    (
        {"sol_tail_granularity": "block", "sol_route_topk_execution": "fused"},
        "sol_route_topk_execution",
    ),
]


@pytest.mark.parametrize(("options", "name"), SPARK_NEGATIVE, ids=lambda value: str(value)[:60])
def test_bad_spark_options(options: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        spark_config(**options)


def test_bool_options_are_type_errors() -> None:
    for name in (
        "sol_landmark_preprocess",
        "sol_route_global_weighted_mean",
        "sol_log_density",
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected a bool"):
            sol_config(**{name: 1})


CHANGED = {
    "sol_route_topk_ratio": 0.5,
    "sol_tau": -1e9,
    "sol_thresh_type": "exact",
    "sol_kv_splits": 2,
    "sol_force_local_blocks": True,
    "sol_exact_block_radius": 2,
    "sol_video_tail_mode": "pad",
    "sol_tail_granularity": "block",
    "sol_route_topk_cutoff_mode": "gaussian_moments",
    "sol_route_topk_execution": "threshold",
    "sol_global_anchor_dtype": "float32",
    "sol_reweight_summary_math": "comfy_fp32",
    "sol_reweight_logmass_key": "pre_round",
    "sol_reweight_components": "bias_only",
    "sol_virtual_query_levels_up": 1,
    "sol_virtual_query_target_blocks": 4,
    "sol_virtual_query_min_blocks": 2,
    "sol_virtual_query_max_blocks": 17,
    "sol_virtual_query_route_score": "weighted_k",
    "sol_route_global_weighted_mean": True,
    "sol_route_global_weighted_mean_side": "key",
    "landmark_tree_v2_children": (8, 4),
    "landmark_tree_v2_root_fanout": 4,
    "landmark_tree_v2_final_fanout": 4,
    "landmark_tree_v2_fanout_mode": "arbitrary_fanout",
    "landmark_tree_v2_landmark_mode": "mean",
    "landmark_tree_v2_landmark_count": 64,
    "landmark_tree_v2_midpoint_direction_mode": "fused",
    "landmark_tree_v2_distance": "euclidean",
    "landmark_tree_v2_aggregation": "max",
    "landmark_tree_v2_mean_mode": "input_unit",
    "landmark_tree_v2_moment_mode": "unit",
    "landmark_tree_v2_order_mode": "scalar_order",
    "landmark_tree_v2_initial_order": "hilbert_thw",
    "landmark_tree_v2_group_size": (8, 4),
    "landmark_tree_v2_m2_side": "key",
    "landmark_tree_v2_m2_estimator": "full",
    "landmark_tree_v2_proxy_iterations": 4,
    "landmark_tree_v2_proxy_seed_rule": "endpoint_order",
    "landmark_tree_v2_proxy_update_rule": "medoid",
    "landmark_tree_v2_layout_reuse": "q_from_k",
    "rope_sol_key_ridge_epsilon": 1e-2,
}
COMPANIONS = {
    "sol_exact_block_radius": {"landmark_tree_v2_layout_reuse": "q_from_k"},
    # Twenty blocks under fan-out 16 have levels of 1, 16 and 20 nodes. Near 4 blocks a node are
    # the sixteen, which have single blocks among them; near 16 is the one, which is larger than 17.
    "sol_virtual_query_target_blocks": {"sol_virtual_query_min_blocks": 1},
    "sol_virtual_query_min_blocks": {
        "sol_virtual_query_target_blocks": 4,
        "sol_virtual_query_min_blocks": 1,
    },
    "sol_virtual_query_max_blocks": {
        "sol_virtual_query_target_blocks": 16,
        "sol_virtual_query_min_blocks": 1,
    },
    "sol_tau": {"sol_route_topk_ratio": None},
    "sol_thresh_type": {"sol_route_topk_ratio": None},
    "sol_route_global_weighted_mean_side": {"sol_route_global_weighted_mean": True},
    "sol_virtual_query_route_score": {"sol_force_local_blocks": True},
    "landmark_tree_v2_final_fanout": {"landmark_tree_v2_fanout_mode": "arbitrary_fanout"},
}


def test_every_option_is_covered_here() -> None:
    assert set(CHANGED) == set(ROUTING_NAMES) | set(REBLOCK_NAMES)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_every_option_reaches_packed_attention(name: str) -> None:
    config = spark_config(**{**COMPANIONS.get(name, {}), name: CHANGED[name]})
    assert getattr(config, name) == CHANGED[name]
    packed = config.packed()
    if name in ROUTING_NAMES:
        assert getattr(packed, ROUTING_NAMES[name]) == CHANGED[name]
    else:
        assert getattr(packed.reblock, REBLOCK_NAMES[name]) == CHANGED[name]


@pytest.fixture(scope="module")
def spark_output(make_request: Any) -> Callable[..., Tensor]:
    """Output of a forward in bfloat16 whose second layer alone is sparse: 20 blocks and 16 rows."""
    transformer = build_tiny_h3_transformer(layers=2, dtype=torch.bfloat16)
    request = make_request("t2va", (9, 9, 16))

    def run(**options: Any) -> Tensor:
        config = spark_config(
            **{
                "num_denoise_steps": 1,
                "warmup_ratio": 0.0,
                "min_tokens": 0,
                "sol_route_topk_ratio": 0.25,
                **options,
            }
        )
        with install_h3_sparse_attention(transformer, config) as plugin, torch.no_grad():
            video, _ = transformer(**request.inputs(0.4))
            assert plugin.summary()["processor_calls"]["sparse:sol"] == 1
        return video

    return run


UNCHANGED = {
    # Names of one exact plan, reported as what they resolve to.
    "sol_route_topk_execution",
    # Two orders of the same additions on a GPU; one path here.
    "landmark_tree_v2_midpoint_direction_mode",
}


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_every_option_is_effective(spark_output: Callable[..., Tensor], name: str) -> None:
    companions = COMPANIONS.get(name, {})
    changed = spark_output(**{**companions, name: CHANGED[name]})
    assert changed.isfinite().all()
    assert torch.equal(changed, spark_output(**companions)) == (name in UNCHANGED)


def test_schedule_of_ratios() -> None:
    config = spark_config(sol_route_topk_schedule=[0.3, 0.2])
    assert [config.topk_ratio_at(index) for index in range(4)] == [0.3, 0.2, 0.2, 0.2]
    assert config.packed(topk_ratio=0.3).topk_ratio == 0.3


def test_order_of_dense_reasons() -> None:
    config = sol_config(
        num_denoise_steps=10,
        warmup_steps=2,
        trailing_dense_evaluations=1,
        extra_dense_evaluations=[4, 4],
        extra_dense_layers=(3,),
        min_tokens=8192,
    )
    assert config.extra_dense_evaluations == (4,)
    reason = config.dense_reason
    assert [reason(index, 9, 9999) for index in (-1, 0, 1)] == ["warmup"] * 3
    assert reason(9, 0, 1) == "trailing"
    assert reason(4, 0, 1) == "extra_dense_evaluation"
    assert reason(5, 0, 1) == "dense_layer"
    assert reason(5, 3, 1) == "extra_dense_layer"
    assert reason(5, 2, 8191) == "short_sequence"
    assert reason(5, 2, 8192) is None


@pytest.mark.parametrize("evaluations", [4, 8])
def test_few_step_runs_can_keep_both_ends_dense(evaluations: int) -> None:
    for option in ({"trailing_dense_evaluations": 1}, {"trailing_dense_ratio": 0.1}):
        config = spark_config(num_denoise_steps=evaluations, **option)
        reasons = [config.dense_reason(index, 5, 9999) for index in range(evaluations)]
        assert reasons[0] == "warmup" and reasons[-1] == "trailing"
        assert None in reasons


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        H3SparseAttentionConfig().sol_tau = 2.0  # type: ignore[misc]
