"""Options of packed attention: one frozen, validated record, and the named presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from solspark.ops.block_sparse_attention import PRECISIONS
from solspark.ops.reweight import check_reweight_options
from solspark.reference.reblock_options import ReblockOptions
from solspark.reference.second_moments import (
    ESTIMATORS,
    FACTORS,
    LAYOUT_REUSES,
    M2_SIDES,
    MOMENT_MODES,
)

RESOLVED_EXECUTIONS = (
    "threshold",
    "packed_external",
    "packed_external_no_route_qk",
    "fused",
)
"""Execution names that are accepted everywhere; each resolves to the same exact top-k plan."""


TREE_OPTIONS = (
    "max_children",
    "fanout_mode",
    "final_fanout",
    "root_fanout",
    "landmark_mode",
    "landmark_count",
    "midpoint_direction_mode",
    "distance",
    "aggregation",
    "order_mode",
    "initial_order",
    "group_size",
    "proxy_iterations",
    "mean_mode",
    "score_precision",
)
"""Options of `ReblockConfig` that the landmark tree has under the same name."""


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")


def _check_integer(name: str, value: object, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        raise ValueError(f"{name}: expected an int >= {minimum}, got {value!r}")


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
        m2_factor: "cholesky" or "eigh" factor of a moment.
        frozen_remainder: keep the V mod 64 excluded tokens that the baseline's second moments would
            choose, so that an ablation differs in nothing else; None: when m2_side or m2_estimator
            is not the baseline's.
        cuda_graph: replay the trees of one shape from a CUDA graph, from its third call on: less
            host time for the features' memory, which the graph keeps.
        max_children ... proxy_update_rule, score_precision: options of the landmark tree, see
            `ReblockOptions`.

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
    m2_factor: str = "cholesky"
    ridge: float = 1e-3
    layout_reuse: str = "independent"
    frozen_remainder: bool | None = None
    score_precision: str = "fp16"
    cuda_graph: bool = False

    @property
    def freezes_remainder(self) -> bool:
        """Whether the excluded tokens are those of the baseline's features."""
        if self.frozen_remainder is not None:
            return self.frozen_remainder
        return self.m2_side != "both" or self.m2_estimator != "hilbert_midpoint"

    @property
    def options(self) -> ReblockOptions:
        """Return the options of the landmark tree."""
        return ReblockOptions(
            **{name: getattr(self, name) for name in TREE_OPTIONS},
            seed_rule=self.proxy_seed_rule,
            update_rule=self.proxy_update_rule,
        )

    def __post_init__(self) -> None:
        for name in ("max_children", "final_fanout", "group_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        _check_choice("proxy_seed_rule", self.proxy_seed_rule, ("farthest_pair", "endpoint_order"))
        _check_choice("proxy_update_rule", self.proxy_update_rule, ("mean", "medoid"))
        object.__setattr__(self, "order_mode", self.options.order_mode)
        _check_choice("moment_mode", self.moment_mode, MOMENT_MODES)
        _check_choice("m2_side", self.m2_side, M2_SIDES)
        _check_choice("m2_estimator", self.m2_estimator, ESTIMATORS)
        _check_choice("m2_factor", self.m2_factor, FACTORS)
        _check_choice("layout_reuse", self.layout_reuse, LAYOUT_REUSES)
        if isinstance(self.ridge, bool) or not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise ValueError(f"ridge: expected a finite number >= 0, got {self.ridge!r}")
        if type(self.cuda_graph) is not bool:
            raise ValueError(f"cuda_graph: expected a bool, got {self.cuda_graph!r}")
        if self.frozen_remainder is not None and type(self.frozen_remainder) is not bool:
            raise ValueError(
                f"frozen_remainder: expected None or a bool, got {self.frozen_remainder!r}"
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
        precision: "native", or "fp8" for the sparse rows' operands; see `block_sparse_attention`.
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
    precision: str = "native"
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
    def virtual_query_rule(self) -> tuple[int | None, int | None, int, int]:
        """Return what chooses the anchors' level: levels up, target, smallest and largest node."""
        return (
            self.virtual_query_levels_up,
            self.virtual_query_target_blocks,
            self.virtual_query_min_blocks,
            self.virtual_query_max_blocks,
        )

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
        _check_choice("precision", self.precision, PRECISIONS)
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
