"""Options of packed attention: defaults, refusals, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from solspark.methods.spark_config import PackedConfig, ReblockConfig

SPARK = PackedConfig()
SHARED = ReblockConfig(layout_reuse="q_from_k")


def test_defaults_are_the_spark_preset():
    assert (SPARK.topk_ratio, SPARK.topk_cutoff_mode) == (0.1, "gemm_radix")
    assert SPARK.topk_execution == "packed_external_no_route_qk"
    assert (SPARK.anchor_dtype, SPARK.virtual_query_levels_up) == ("bfloat16", 99)
    assert SPARK.virtual_query_target_blocks is None and SPARK.uses_virtual_queries
    assert (SPARK.summary_math, SPARK.logmass_key) == ("tensorcore", "stored")
    assert (SPARK.reweight_components, SPARK.tail_granularity) == ("full", "query")
    assert SPARK.video_tail_mode == "dense" and SPARK.local_radius == -1
    tree = SPARK.reblock
    assert tree is not None
    assert (tree.max_children, tree.fanout_mode) == (16, "power_of_two_fanout")
    assert (tree.landmark_mode, tree.landmark_count, tree.distance) == ("midpoint", 32, "cosine")
    assert (tree.ridge, tree.group_size, tree.initial_order) == (1e-3, 1, "flat")
    assert (tree.m2_side, tree.m2_estimator, tree.layout_reuse) == (
        "both",
        "hilbert_midpoint",
        "independent",
    )


@pytest.mark.parametrize(
    ("options", "radius"),
    [
        ({}, -1),
        ({"reblock": None}, 1),
        ({"reblock": None, "force_local_blocks": False}, -1),
        ({"force_local_blocks": True}, 1),
        ({"reblock": None, "exact_block_radius": 0}, 0),
        ({"reblock": SHARED, "exact_block_radius": 3}, 3),
    ],
)
def test_local_radius(options, radius):
    assert replace(SPARK, **options).local_radius == radius


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk_ratio": 0}, r"topk_ratio: expected None or a number in \(0, 1\], got 0"),
        ({"topk_ratio": 1.1}, "topk_ratio"),
        ({"topk_ratio": True}, "topk_ratio"),
        ({"topk_ratio": "0.1"}, "topk_ratio"),
        ({"topk_ratio": math.nan}, "topk_ratio"),
        ({"tau": math.inf}, "tau: expected a finite number, got inf"),
        ({"thresh_type": "full"}, "thresh_type: expected one of diag, exact; got 'full'"),
        ({"topk_cutoff_mode": "x"}, "topk_cutoff_mode"),
        ({"topk_execution": "x"}, "topk_execution"),
        ({"route_score": "x"}, "route_score"),
        ({"global_weighted_mean_side": "x"}, "global_weighted_mean_side"),
        ({"force_local_blocks": 1}, "force_local_blocks: expected None or a bool, got 1"),
        ({"kv_splits": 0}, "kv_splits: expected an int >= 1, got 0"),
        ({"video_tail_mode": "x"}, "video_tail_mode"),
        ({"tail_granularity": "x"}, "tail_granularity"),
        ({"anchor_dtype": "float16"}, "anchor_dtype"),
        ({"summary_math": "x"}, "summary_math"),
        ({"logmass_key": "x"}, "logmass_key"),
        ({"reweight_components": "x"}, "reweight_components"),
        ({"virtual_query_levels_up": -1}, "virtual_query_levels_up: expected an int >= 0"),
        ({"virtual_query_levels_up": True}, "virtual_query_levels_up"),
        ({"virtual_query_target_blocks": 189}, "exclusive with virtual_query_levels_up"),
        (
            {"virtual_query_levels_up": None, "virtual_query_target_blocks": 90},
            "virtual_query_target_blocks: expected an int >= 94, got 90",
        ),
        (
            {"virtual_query_levels_up": None, "virtual_query_target_blocks": 300},
            "virtual_query_max_blocks: expected an int >= 300, got 284",
        ),
        (
            {"virtual_query_levels_up": None, "reweight_components": "none"},
            "reweight_components: 'none' needs virtual queries",
        ),
        ({"tail_granularity": "block8x8", "summary_math": "comfy_fp32"}, "block8x8 needs"),
        ({"tail_granularity": "block", "topk_execution": "fused"}, "'fused' needs"),
        (
            {"topk_ratio": None, "virtual_query_levels_up": None, "video_tail_mode": "pad"},
            "'pad' needs topk_ratio or virtual queries",
        ),
        ({"exact_block_radius": 1}, "blocks of independent layouts are not neighbours"),
        ({"exact_block_radius": -1, "reblock": None}, "exact_block_radius: expected an int >= 0"),
        ({"exact_block_radius": True, "reblock": None}, "exact_block_radius"),
        (
            {"exact_block_radius": 1, "reblock": SHARED, "force_local_blocks": False},
            "exclusive with force_local_blocks",
        ),
        ({"exact_block_radius": 1, "reblock": SHARED, "topk_ratio": None}, "needs topk_ratio"),
        ({"topk_ratio": None, "global_weighted_mean": True}, "global_weighted_mean: True needs"),
        (
            {"topk_ratio": None, "route_score": "mean", "force_local_blocks": True},
            "route_score: 'mean' needs topk_ratio",
        ),
        ({"topk_ratio": None, "head_budgets": (1,)}, "head_budgets"),
        ({"route_score": "mean"}, "route_score: 'mean' needs local blocks"),
        (
            {
                "route_score": "mean",
                "virtual_query_levels_up": None,
                "force_local_blocks": True,
            },
            "route_score: 'mean' needs virtual queries",
        ),
        (
            {
                "route_score": "mean",
                "force_local_blocks": True,
                "tail_granularity": "block8x8",
            },
            "needs 64-token summaries",
        ),
        (
            {"global_weighted_mean": True, "topk_cutoff_mode": "gaussian_moments"},
            "global_weighted_mean: cannot be combined with",
        ),
        ({"head_budgets": (1, -1)}, "head_budgets: expected an int >= 0, got -1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replace(SPARK, **options)


def test_flags_must_be_bools():
    with pytest.raises(TypeError, match="global_weighted_mean: expected a bool, got 1"):
        replace(SPARK, global_weighted_mean=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_children": 3}, "max_children"),
        ({"max_children": True}, "max_children"),
        ({"final_fanout": 4}, "final_fanout"),
        ({"landmark_count": 16}, "landmark_count"),
        ({"distance": "l1"}, "distance"),
        ({"distance": "euclidean", "aggregation": "max"}, "aggregation"),
        ({"distance": "euclidean", "mean_mode": "metric_unit"}, "mean_mode"),
        ({"proxy_seed_rule": "x"}, "proxy_seed_rule"),
        ({"proxy_update_rule": "x"}, "proxy_update_rule"),
        ({"proxy_iterations": 3}, "proxy_iterations"),
        ({"m2_side": "x"}, "m2_side"),
        ({"m2_estimator": "x"}, "m2_estimator"),
        ({"m2_factor": "x"}, "m2_factor"),
        ({"moment_mode": "x"}, "moment_mode"),
        ({"layout_reuse": "x"}, "layout_reuse"),
        ({"ridge": -1.0}, "ridge"),
        ({"ridge": math.nan}, "ridge"),
        ({"frozen_remainder": 1}, "frozen_remainder"),
        ({"cuda_graph": 1}, "cuda_graph"),
    ],
)
def test_bad_tree_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        ReblockConfig(**options)


def test_schedules_become_tuples_so_that_configs_can_be_keys():
    config = ReblockConfig(max_children=[16, 8], group_size=[2, 1])  # type: ignore[arg-type]
    assert config.max_children == (16, 8)
    assert {PackedConfig(reblock=config): 1}[PackedConfig(reblock=config)] == 1


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({}, False),
        ({"m2_side": "query"}, True),
        ({"m2_estimator": "full"}, True),
        ({"m2_estimator": "full", "frozen_remainder": False}, False),
        ({"frozen_remainder": True}, True),
        ({"layout_reuse": "q_from_k"}, False),
    ],
)
def test_ablations_freeze_the_remainder(options, frozen):
    assert ReblockConfig(**options).freezes_remainder == frozen
