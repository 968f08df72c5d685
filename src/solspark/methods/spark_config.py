"""Options of packed attention: one frozen, validated record, and the named presets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from solspark.ops.reweight import check_reweight_options

RESOLVED_EXECUTIONS = (
    "threshold",
    "packed_external",
    "packed_external_no_route_qk",
    "fused",
)
"""Execution names that are accepted everywhere; each resolves to the same exact top-k plan."""


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")


def _check_integer(name: str, value: object, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        raise ValueError(f"{name}: expected an int >= {minimum}, got {value!r}")


def _check_schedule(name: str, value: object, allowed: Sequence[int] | range) -> None:
    levels = value if isinstance(value, tuple) else (value,)
    if not levels or any(type(level) is not int or level not in allowed for level in levels):
        raise ValueError(
            f"{name}: expected an int of {list(allowed)} or a non-empty tuple of them, "
            f"got {value!r}"
        )


def _as_schedule(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class ReblockConfig:
    """Say how the video tokens are reordered before they are cut into blocks.

    Args:
        layout_reuse: "independent" builds one tree for Q and one for K; "q_from_k" builds only K's
            and Q follows it; "k_from_q" the other way round.
        m2_side: the sides whose features are transformed by the opposite second moment: "both",
            "query", "key", "none".
        m2_estimator: which rows enter the second moment; see `ops.second_moments`.
        moment_mode: "raw", or "unit" to normalise the sampled rows first.
        mean_mode: features that fit the tree: "raw", "input_unit" (scaled by 1 / |original row|),
            "metric_unit" (unit features).
        ridge: added to the diagonal of a moment, times trace / D.
        frozen_remainder: keep the V mod 64 excluded tokens that the baseline options would choose,
            so that an ablation differs in nothing else.
        max_children ... proxy_update_rule: options of the landmark tree, spec/spark.md 1.1.

    Raises:
        ValueError: naming the option, what was expected and what came.

    Source: spec/spark.md sections 1.1, 1.7, 2.
    """

    max_children: int | tuple[int, ...] = 16
    fanout_mode: str = "power_of_two_fanout"
    final_fanout: int | tuple[int, ...] | None = None
    root_fanout: int | None = None
    landmark_mode: str = "midpoint"
    landmark_count: int = 32
    midpoint_direction_mode: str = "legacy"
    distance: str = "cosine"
    aggregation: str = "linear"
    order_mode: str = "parent_order"
    initial_order: str = "flat"
    group_size: int | tuple[int, ...] = 1
    proxy_iterations: int = 2
    proxy_seed_rule: str = "farthest_pair"
    proxy_update_rule: str = "mean"
    mean_mode: str = "raw"
    moment_mode: str = "raw"
    m2_side: str = "both"
    m2_estimator: str = "hilbert_midpoint"
    ridge: float = 1e-3
    layout_reuse: str = "independent"
    frozen_remainder: bool = False

    def __post_init__(self) -> None:
        for name in ("max_children", "final_fanout", "group_size"):
            object.__setattr__(self, name, _as_schedule(getattr(self, name)))
        _check_schedule("max_children", self.max_children, (2, 4, 8, 16, 32, 64))
        if self.final_fanout is not None:
            _check_schedule("final_fanout", self.final_fanout, range(2, 33))
        if self.root_fanout is not None:
            _check_schedule("root_fanout", self.root_fanout, (2, 4, 8, 16, 32))
        _check_schedule("group_size", self.group_size, (1, 2, 4, 8))
        modes = ("power_of_two_fanout", "arbitrary_fanout", "power_of_two_arbitrary_final")
        _check_choice("fanout_mode", self.fanout_mode, modes)
        if self.fanout_mode == "power_of_two_fanout" and self.final_fanout not in (
            None,
            self.max_children,
        ):
            raise ValueError(
                "final_fanout: expected None or the ordinary fan-out "
                f"{self.max_children} under power_of_two_fanout, got {self.final_fanout!r}"
            )
        _check_choice("landmark_mode", self.landmark_mode, ("midpoint", "mean"))
        if self.landmark_count not in (32, 64, 128, 256) or isinstance(self.landmark_count, bool):
            raise ValueError(
                f"landmark_count: expected 32, 64, 128 or 256; got {self.landmark_count!r}"
            )
        _check_choice("midpoint_direction_mode", self.midpoint_direction_mode, ("legacy", "fused"))
        _check_choice("distance", self.distance, ("cosine", "euclidean"))
        _check_choice("aggregation", self.aggregation, ("linear", "max"))
        if self.order_mode == "preserve_parent_order":
            object.__setattr__(self, "order_mode", "parent_order")
        _check_choice("order_mode", self.order_mode, ("parent_order", "scalar_order"))
        hilbert = tuple(f"hilbert_{axes}" for axes in ("thw", "twh", "htw", "hwt", "wth", "wht"))
        _check_choice("initial_order", self.initial_order, ("flat", "tile_t4h4w4", *hilbert))
        if self.proxy_iterations not in (0, 1, 2, 4) or isinstance(self.proxy_iterations, bool):
            raise ValueError(
                f"proxy_iterations: expected 0, 1, 2 or 4; got {self.proxy_iterations!r}"
            )
        _check_choice("proxy_seed_rule", self.proxy_seed_rule, ("farthest_pair", "endpoint_order"))
        _check_choice("proxy_update_rule", self.proxy_update_rule, ("mean", "medoid"))
        _check_choice("mean_mode", self.mean_mode, ("raw", "input_unit", "metric_unit"))
        _check_choice("moment_mode", self.moment_mode, ("raw", "unit"))
        _check_choice("m2_side", self.m2_side, ("both", "query", "key", "none"))
        _check_choice(
            "m2_estimator",
            self.m2_estimator,
            (
                "hilbert_midpoint",
                "flat64_block_mean",
                "flat64_midpoint_1",
                "flat64_midpoint_2",
                "flat64_midpoint_4",
                "flat64_mean_diag",
                "full",
            ),
        )
        _check_choice("layout_reuse", self.layout_reuse, ("independent", "q_from_k", "k_from_q"))
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise ValueError(f"ridge: expected a finite number >= 0, got {self.ridge!r}")
        if self.distance == "euclidean" and self.aggregation == "max":
            raise ValueError("aggregation: max needs distance='cosine', got 'euclidean'")
        if self.distance == "euclidean" and self.mean_mode != "raw":
            raise ValueError(
                f"mean_mode: {self.mean_mode} needs distance='cosine', got 'euclidean'"
            )


@dataclass(frozen=True)
class PackedConfig:
    """Say how packed attention reorders, routes and summarises. The defaults are the Spark preset.

    Args:
        topk_ratio: share of the candidate blocks that every query block reads exactly,
            t = max(1, round(ratio * candidates)); None routes by `tau`.
        tau: standard deviations above the mean score at which a block is read exactly (topk_ratio
            None).
        thresh_type: "diag" or "exact" statistic of the tau threshold.
        topk_cutoff_mode: "gemm_radix" selects exactly t blocks; "gaussian_moments" cuts at the
            quantile of a normal distribution, about t blocks.
        topk_execution: any of `RESOLVED_EXECUTIONS`; all resolve to one exact plan, and the record
            says so.
        route_score: "native_mean", or scores against the summaries: "mean", "weighted_k",
            "weighted_mass".
        global_weighted_mean: tilt the block means towards the global mean of the other side before
            routing.
        global_weighted_mean_side: "both", "query" or "key".
        force_local_blocks: read blocks i-1, i, i+1 exactly beside the budget; None: yes without
            reblock, no with it.
        exact_block_radius: read |i - j| <= r exactly beside the budget.
        head_budgets: exact blocks of each head, in place of the common t (experiments).
        kv_splits: splits of the key loop (few-block problems).
        video_tail_mode: "dense" or "pad": the mixed block's video rows attend densely, or in a
            padded sparse block.
        tail_granularity: "query", "block", "block8x8", or "none" to drop skipped blocks.
        virtual_query_levels_up: hierarchy levels above the leaves at which anchors are taken; 99 is
            one global anchor, 0 one a block. None (and no target) keeps plain mean summaries.
        virtual_query_target_blocks: choose the level nearest to this many blocks an anchor;
            exclusive with levels_up.
        virtual_query_min_blocks, virtual_query_max_blocks: feasible range of that choice.
        anchor_dtype: "bfloat16" stores anchors in the inputs' dtype (bf16 in production), "float32"
            in FP32.
        summary_math, logmass_key, reweight_components: see `spark_reweight`.
        reblock: options of the reordering; None keeps the given order.

    Raises:
        ValueError: naming the option, what was expected and what came; TypeError for a non-bool
            flag.

    Source: spec/spark.md sections 2-5, spec/h3.md section 6.
    """

    topk_ratio: float | None = 0.1
    tau: float = 1.0
    thresh_type: str = "diag"
    topk_cutoff_mode: str = "gemm_radix"
    topk_execution: str = "packed_external_no_route_qk"
    route_score: str = "native_mean"
    global_weighted_mean: bool = False
    global_weighted_mean_side: str = "both"
    force_local_blocks: bool | None = None
    exact_block_radius: int | None = None
    head_budgets: tuple[int, ...] | None = None
    kv_splits: int = 1
    video_tail_mode: str = "dense"
    tail_granularity: str = "query"
    virtual_query_levels_up: int | None = 99
    virtual_query_target_blocks: int | None = None
    virtual_query_min_blocks: int = 94
    virtual_query_max_blocks: int = 284
    anchor_dtype: str = "bfloat16"
    summary_math: str = "tensorcore"
    logmass_key: str = "stored"
    reweight_components: str = "full"
    reblock: ReblockConfig | None = field(default_factory=ReblockConfig)

    @property
    def uses_virtual_queries(self) -> bool:
        """Whether skipped blocks are summarised around anchors rather than by plain means."""
        levels, target = self.virtual_query_levels_up, self.virtual_query_target_blocks
        return levels is not None or target is not None

    @property
    def local_radius(self) -> int:
        """Radius of the exact band around the diagonal; -1 for none."""
        if self.exact_block_radius is not None:
            return self.exact_block_radius
        forced = (
            self.reblock is None if self.force_local_blocks is None else self.force_local_blocks
        )
        return 1 if forced else -1

    def __post_init__(self) -> None:
        ratio = self.topk_ratio
        if ratio is not None and not (
            isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 < ratio <= 1
        ):
            raise ValueError(f"topk_ratio: expected None or a number in (0, 1], got {ratio!r}")
        if not math.isfinite(self.tau):
            raise ValueError(f"tau: expected a finite number, got {self.tau!r}")
        _check_choice("thresh_type", self.thresh_type, ("diag", "exact"))
        modes = ("gemm_radix", "gaussian_moments")
        _check_choice("topk_cutoff_mode", self.topk_cutoff_mode, modes)
        _check_choice("topk_execution", self.topk_execution, RESOLVED_EXECUTIONS)
        _check_choice(
            "route_score",
            self.route_score,
            ("native_mean", "mean", "weighted_k", "weighted_mass"),
        )
        if type(self.global_weighted_mean) is not bool:
            raise TypeError(
                f"global_weighted_mean: expected a bool, got {self.global_weighted_mean!r}"
            )
        _check_choice(
            "global_weighted_mean_side", self.global_weighted_mean_side, ("both", "query", "key")
        )
        if self.force_local_blocks is not None and type(self.force_local_blocks) is not bool:
            raise ValueError(
                f"force_local_blocks: expected None or a bool, got {self.force_local_blocks!r}"
            )
        _check_integer("kv_splits", self.kv_splits, 1)
        _check_choice("video_tail_mode", self.video_tail_mode, ("dense", "pad"))
        _check_choice(
            "tail_granularity", self.tail_granularity, ("query", "block", "block8x8", "none")
        )
        _check_choice("anchor_dtype", self.anchor_dtype, ("bfloat16", "float32"))
        check_reweight_options(self.summary_math, self.logmass_key, self.reweight_components)
        self._check_summaries()
        self._check_local()
        self._check_routing()

    def _check_summaries(self) -> None:
        levels, target = self.virtual_query_levels_up, self.virtual_query_target_blocks
        if levels is not None:
            _check_integer("virtual_query_levels_up", levels, 0)
        if levels is not None and target is not None:
            raise ValueError(
                "virtual_query_target_blocks: exclusive with virtual_query_levels_up, "
                f"got {target!r} and {levels!r}"
            )
        if target is not None:
            _check_integer("virtual_query_min_blocks", self.virtual_query_min_blocks, 1)
            _check_integer("virtual_query_target_blocks", target, self.virtual_query_min_blocks)
            _check_integer("virtual_query_max_blocks", self.virtual_query_max_blocks, target)
        if not self.uses_virtual_queries:
            for name, default in (
                ("summary_math", "tensorcore"),
                ("logmass_key", "stored"),
                ("reweight_components", "full"),
            ):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name}: {getattr(self, name)!r} needs virtual queries "
                        "(virtual_query_levels_up or virtual_query_target_blocks)"
                    )
        if self.tail_granularity == "block8x8" and self.summary_math != "tensorcore":
            raise ValueError(
                "tail_granularity: block8x8 needs summary_math='tensorcore', "
                f"got {self.summary_math!r}"
            )
        if self.tail_granularity in ("block", "block8x8") and self.topk_execution == "fused":
            raise ValueError(
                f"topk_execution: 'fused' needs tail_granularity='query', "
                f"got {self.tail_granularity!r}"
            )
        routed = self.topk_ratio is not None or self.uses_virtual_queries
        if self.video_tail_mode == "pad" and not routed:
            raise ValueError(
                "video_tail_mode: 'pad' needs topk_ratio or virtual queries, got neither"
            )

    def _check_local(self) -> None:
        radius = self.exact_block_radius
        if radius is None:
            return
        _check_integer("exact_block_radius", radius, 0)
        if self.force_local_blocks is not None:
            raise ValueError(
                "exact_block_radius: exclusive with force_local_blocks, got "
                f"{radius!r} and {self.force_local_blocks!r}"
            )
        if self.topk_ratio is None:
            raise ValueError("exact_block_radius: needs topk_ratio, got None")
        if self.reblock is not None and self.reblock.layout_reuse == "independent":
            raise ValueError(
                "exact_block_radius: needs layout_reuse='q_from_k' or 'k_from_q' when "
                "reblocking: blocks of independent layouts are not neighbours, got 'independent'"
            )

    def _check_routing(self) -> None:
        if self.topk_ratio is None:
            for name, default in (
                ("route_score", "native_mean"),
                ("global_weighted_mean", False),
                ("head_budgets", None),
            ):
                if getattr(self, name) != default:
                    raise ValueError(f"{name}: {getattr(self, name)!r} needs topk_ratio, got None")
        if self.route_score != "native_mean":
            if not self.uses_virtual_queries:
                raise ValueError(f"route_score: {self.route_score!r} needs virtual queries")
            if self.local_radius < 0:
                raise ValueError(
                    f"route_score: {self.route_score!r} needs local blocks "
                    "(force_local_blocks=True or exact_block_radius)"
                )
            if self.tail_granularity == "block8x8":
                raise ValueError(
                    f"route_score: {self.route_score!r} needs 64-token summaries, "
                    "got tail_granularity='block8x8'"
                )
        chosen = [
            name
            for name, active in (
                ("route_score", self.route_score != "native_mean"),
                ("global_weighted_mean", self.global_weighted_mean),
                ("head_budgets", self.head_budgets is not None),
                ("topk_cutoff_mode='gaussian_moments'", self.topk_cutoff_mode != "gemm_radix"),
            )
            if active
        ]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]}: cannot be combined with {', '.join(chosen[1:])}")
        if self.head_budgets is not None:
            object.__setattr__(self, "head_budgets", tuple(self.head_budgets))
            for budget in self.head_budgets:
                _check_integer("head_budgets", budget, 0)


PRESETS = {
    "default": PackedConfig(),
    "quality": PackedConfig(reblock=ReblockConfig(landmark_count=64)),
    "fast": PackedConfig(reblock=ReblockConfig(layout_reuse="q_from_k")),
}
"""Named presets. "quality" fits the trees with 64 landmarks (+0.5 dB at 10 s in the authors'
ablation for 2 % more time), "fast" lets Q follow K's tree (half the plan, +0.3 dB there); "default"
is the README's. Source: spec/spark.md 8.5."""
