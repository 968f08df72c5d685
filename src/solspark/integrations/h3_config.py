"""Options of sparse attention in MiniMax-H3: one frozen record, validated when it is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from ..methods.spark_config import PRESETS, PackedConfig, ReblockConfig
from ..ops import _dispatch
from ..ops.block_sparse_attention import PRECISIONS
from ..ops.sol_int8 import TOKEN_BUDGETS
from ..types import BLOCK

DEFAULT_EVALUATIONS = 19
"""Transformer evaluations when the caller names no count: the 20-point grid of the reference."""

DenseBackend = str | Callable[..., Any]

ROUTING_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "sol_route_topk_ratio": "topk_ratio",
        "sol_tau": "tau",
        "sol_thresh_type": "thresh_type",
        "sol_kv_splits": "kv_splits",
        "sol_force_local_blocks": "force_local_blocks",
        "sol_exact_block_radius": "exact_block_radius",
        "sol_video_tail_mode": "video_tail_mode",
        "sol_tail_granularity": "tail_granularity",
        "sol_route_topk_cutoff_mode": "topk_cutoff_mode",
        "sol_route_topk_execution": "topk_execution",
        "sol_global_anchor_dtype": "anchor_dtype",
        "sol_reweight_summary_math": "summary_math",
        "sol_reweight_logmass_key": "logmass_key",
        "sol_reweight_components": "reweight_components",
        "sol_virtual_query_levels_up": "virtual_query_levels_up",
        "sol_virtual_query_target_blocks": "virtual_query_target_blocks",
        "sol_virtual_query_min_blocks": "virtual_query_min_blocks",
        "sol_virtual_query_max_blocks": "virtual_query_max_blocks",
        "sol_virtual_query_route_score": "route_score",
        "sol_route_global_weighted_mean": "global_weighted_mean",
        "sol_route_global_weighted_mean_side": "global_weighted_mean_side",
    }
)
"""Public option -> field of PackedConfig."""

REBLOCK_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "landmark_tree_v2_children": "max_children",
        "landmark_tree_v2_root_fanout": "root_fanout",
        "landmark_tree_v2_final_fanout": "final_fanout",
        "landmark_tree_v2_fanout_mode": "fanout_mode",
        "landmark_tree_v2_landmark_mode": "landmark_mode",
        "landmark_tree_v2_landmark_count": "landmark_count",
        "landmark_tree_v2_midpoint_direction_mode": "midpoint_direction_mode",
        "landmark_tree_v2_distance": "distance",
        "landmark_tree_v2_aggregation": "aggregation",
        "landmark_tree_v2_mean_mode": "mean_mode",
        "landmark_tree_v2_moment_mode": "moment_mode",
        "landmark_tree_v2_order_mode": "order_mode",
        "landmark_tree_v2_initial_order": "initial_order",
        "landmark_tree_v2_group_size": "group_size",
        "landmark_tree_v2_m2_side": "m2_side",
        "landmark_tree_v2_m2_estimator": "m2_estimator",
        "landmark_tree_v2_proxy_iterations": "proxy_iterations",
        "landmark_tree_v2_proxy_seed_rule": "proxy_seed_rule",
        "landmark_tree_v2_proxy_update_rule": "proxy_update_rule",
        "landmark_tree_v2_layout_reuse": "layout_reuse",
        "rope_sol_key_ridge_epsilon": "ridge",
    }
)
"""Public option -> field of ReblockConfig."""

INT8_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "sol_landmark_preprocess": (False,),
        "sol_thresh_type": ("diag",),
        "sol_kv_splits": (1,),
        "sol_force_local_blocks": (None, True),
        "sol_exact_block_radius": (None, 1),
        "sol_video_tail_mode": ("dense",),
        "sol_tail_granularity": ("block", "none"),
        "sol_route_topk_cutoff_mode": ("gemm_radix",),
        "sol_route_global_weighted_mean": (False,),
    }
)
"""Options that INT8 has one way of serving -> the values that say so."""


def check_int(name: str, value: object, minimum: int) -> None:
    """Raise ValueError unless `value` is an exact int (no bool, no numpy int) >= minimum."""
    if type(value) is not int or value < minimum:
        raise ValueError(f"{name}: expected an int >= {minimum}, got {value!r}")


def _check_number(name: str, value: object, low: float, high: float) -> float:
    """Return `value` as a float in [low, high], or raise ValueError."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[operator,arg-type]
        raise ValueError(f"{name}: expected a finite number in [{low}, {high}], got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _share(total: int, ratio: float) -> int:
    """Return ceil(total * ratio) of the ratio as it is written: 0.55 of 100 is 55, not 56."""
    return math.ceil(total * Fraction(repr(float(ratio))))


def _check_ratio(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not 0 < value <= 1
    ):
        raise ValueError(f"{name}: expected a number in (0, 1], got {value!r}")


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")


def _check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool."""
    if type(value) is not bool:
        raise TypeError(f"{name}: expected a bool, got {value!r}")


def _index_tuple(name: str, value: object, stop: int | None) -> tuple[int, ...]:
    """Return sorted distinct indices in [0, stop), or raise ValueError."""
    limit = "" if stop is None else f" below {stop}"
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset, range)):
        raise ValueError(f"{name}: expected a tuple of ints{limit}, got {value!r}")
    for index in value:
        if type(index) is not int or index < 0 or (stop is not None and index >= stop):
            raise ValueError(f"{name}: expected ints >= 0{limit}, got {index!r}")
    return tuple(sorted(set(value)))


@dataclass(frozen=True, kw_only=True)
class H3SparseAttentionConfig:
    """Say when H3's attention is sparse, and how. The defaults are plain Sol (tau routing).

    Stored values are the resolved ones: the evaluation count is in `num_denoise_steps`, a warm-up
    percentage becomes `warmup_ratio`, and `landmark_tree_v2_children` holds the fan-out, so
    `dataclasses.replace` works on any config.

    Args:
        num_denoise_steps: transformer evaluations E of one run; 19 when neither count is given.
        num_inference_steps: points of the scheduler's grid, E + 1; not together with the former.
        warmup_mode: "warmup_ratio" or "warmup_steps"; says which of the two next values counts.
            Left out, it is "warmup_steps" when only `warmup_steps` is given, else "warmup_ratio".
        warmup_ratio: dense prefix = min(E, ceil(E * ratio)); 0.2 by default.
        warmup_steps: dense prefix = min(E, steps); 4 by default.
        warmup_percent: old spelling of the ratio, 0 to 100; not together with the three above.
        trailing_dense_evaluations, trailing_dense_ratio: dense suffix = the larger of the count
            and ceil(E * ratio); none by default. Few-step runs want at least one.
        extra_dense_evaluations, extra_dense_layers: further indices that stay dense.
        evaluations_per_step: transformer forwards that one step makes (2 under a two-pass CFG).
        sol_dense_layers: leading layers that stay dense; the first one by default.
        sol_min_tokens: packed sequences shorter than this stay dense; 0 disables.
        mixed_timesteps: "error" refuses a target video whose rows are at several timesteps,
            "dense" runs it densely with one warning.
        sol_route_topk_ratio: share of the video key blocks that each query block reads exactly,
            max(1, round(ratio * candidates)); None routes by `sol_tau`.
        sol_route_topk_schedule: ratio of every evaluation, the last repeats; needs top-k.
        sol_tau: standard deviations above the mean score from which a block is read exactly. Any
            finite number: a very negative one reads everything.
        sol_thresh_type ... sol_route_global_weighted_mean_side: see `PackedConfig`, by the names
            of `ROUTING_NAMES`.
        sol_landmark_preprocess: reorder the video tokens with the landmark tree first.
        sol_landmark_preprocess_version: "v2" when reordering; "v1" is accepted only while unused.
        landmark_tree_v2_children, landmark_tree_v2_fanout: fan-out of the tree, two names of one
            option; 16 by default (the standalone `spark_reblock` defaults to 8).
        landmark_tree_v2_*: see `ReblockConfig`, by the names of `REBLOCK_NAMES`.
        rope_sol_key_ridge_epsilon: ridge of the second moments.
        precision: "native", the model's type, or of the sparse calls "fp8": e4m3 operands of the
            sparse rows, half the bytes (kernels from compute capability 8.9 on); or "int8"
            (Sol without reordering, H3's head dim of 128): Q and K with one INT8 scale a token, V
            with one a channel; context rows are exact, in INT8 as well. Skipped blocks enter once a
            query block, so that `sol_tail_granularity` is "block" (or "none").
        chunk_tokens: with "int8", stream the QKV projection so many rows at a time, a multiple of
            64, instead of holding Q, K and V. The first sparse call of a layer projects twice to
            measure; later ones use the statistics of the call before. None holds them whole.
        int8_rotate, int8_balance: rotate, and balance, the channels of Q and K before they are
            quantised; both lower the error where few channels are loud. None: where the best
            implementation does it.
        int8_token_aug: tokens that each pair of query blocks reads exactly beyond its blocks, with
            "int8": 64, 128, 192 or 256; 0 or None for none.
        sol_log_density: report the share of blocks read exactly (waits for the device when
            `summary()` is called).
        dense_backend: attention of the dense calls and of the dense suffix: a backend name of
            diffusers' dispatcher, or a callable (query, key, value) -> out on [B, L, H, D]. None
            leaves both to the user's own processor and backend.
        impl: implementation of the sparse operations; None takes the best that can serve.

    Raises:
        ValueError, TypeError: naming the option, what was expected and what came.

    Source: spec/h3.md sections 5 and 6.
    """

    num_inference_steps: int | None = None
    num_denoise_steps: int | None = None
    warmup_mode: str | None = None
    warmup_ratio: float | None = None
    warmup_steps: int | None = None
    warmup_percent: float | None = None
    trailing_dense_evaluations: int = 0
    trailing_dense_ratio: float = 0.0
    extra_dense_evaluations: tuple[int, ...] = ()
    extra_dense_layers: tuple[int, ...] = ()
    evaluations_per_step: int = 1
    sol_dense_layers: int = 1
    sol_min_tokens: int = 0
    mixed_timesteps: str = "error"

    sol_route_topk_ratio: float | None = None
    sol_route_topk_schedule: tuple[float, ...] | None = None
    sol_tau: float = 1.0
    sol_thresh_type: str = "diag"
    sol_kv_splits: int = 1
    sol_force_local_blocks: bool | None = None
    sol_exact_block_radius: int | None = None
    sol_video_tail_mode: str = "dense"
    sol_tail_granularity: str = "query"
    sol_route_topk_cutoff_mode: str = "gemm_radix"
    sol_route_topk_execution: str = "packed_external_no_route_qk"
    sol_global_anchor_dtype: str = "float32"
    sol_reweight_summary_math: str = "tensorcore"
    sol_reweight_logmass_key: str = "stored"
    sol_reweight_components: str = "full"
    sol_virtual_query_levels_up: int | None = None
    sol_virtual_query_target_blocks: int | None = None
    sol_virtual_query_min_blocks: int = 4
    sol_virtual_query_max_blocks: int = 12
    sol_virtual_query_route_score: str = "native_mean"
    sol_route_global_weighted_mean: bool = False
    sol_route_global_weighted_mean_side: str = "both"

    sol_landmark_preprocess: bool = False
    sol_landmark_preprocess_version: str = "v1"
    landmark_tree_v2_children: int | tuple[int, ...] | None = None
    landmark_tree_v2_fanout: int | tuple[int, ...] | None = None
    landmark_tree_v2_root_fanout: int | None = None
    landmark_tree_v2_final_fanout: int | tuple[int, ...] | None = None
    landmark_tree_v2_fanout_mode: str = "power_of_two_fanout"
    landmark_tree_v2_landmark_mode: str = "midpoint"
    landmark_tree_v2_landmark_count: int = 32
    landmark_tree_v2_midpoint_direction_mode: str = "legacy"
    landmark_tree_v2_distance: str = "cosine"
    landmark_tree_v2_aggregation: str = "linear"
    landmark_tree_v2_mean_mode: str = "raw"
    landmark_tree_v2_moment_mode: str = "raw"
    landmark_tree_v2_order_mode: str = "parent_order"
    landmark_tree_v2_initial_order: str = "flat"
    landmark_tree_v2_group_size: int | tuple[int, ...] = 1
    landmark_tree_v2_m2_side: str = "both"
    landmark_tree_v2_m2_estimator: str = "hilbert_midpoint"
    landmark_tree_v2_proxy_iterations: int = 2
    landmark_tree_v2_proxy_seed_rule: str = "farthest_pair"
    landmark_tree_v2_proxy_update_rule: str = "mean"
    landmark_tree_v2_layout_reuse: str = "independent"
    rope_sol_key_ridge_epsilon: float = 1e-3

    precision: str = "native"
    chunk_tokens: int | None = None
    int8_rotate: bool | None = None
    int8_balance: bool | None = None
    int8_token_aug: int | None = None

    sol_log_density: bool = True
    dense_backend: DenseBackend | None = None
    impl: str | None = None

    def __post_init__(self) -> None:
        self._resolve_evaluations()
        self._resolve_warmup()
        self._check_schedule()
        self._check_routing()
        self._resolve_fanout()
        self._check_precision()
        _check_bool("sol_log_density", self.sol_log_density)
        backend = self.dense_backend
        if backend is not None and not isinstance(backend, str) and not callable(backend):
            raise ValueError(
                f"dense_backend: expected None, a backend name or a callable, got {backend!r}"
            )
        if self.impl is not None and self.impl not in _dispatch.PREFERENCE:
            raise ValueError(
                f"impl: expected None or one of {', '.join(_dispatch.PREFERENCE)}; "
                f"got {self.impl!r}"
            )
        self.packed()

    @property
    def total_evaluations(self) -> int:
        """Evaluations E of one run."""
        assert self.num_denoise_steps is not None
        return self.num_denoise_steps

    @property
    def dense_evaluations(self) -> int:
        """Evaluations of the dense prefix."""
        total = self.total_evaluations
        if self.warmup_mode == "warmup_steps":
            assert self.warmup_steps is not None
            return min(total, self.warmup_steps)
        assert self.warmup_ratio is not None
        return min(total, _share(total, self.warmup_ratio))

    @property
    def trailing_dense(self) -> int:
        """Evaluations of the dense suffix."""
        total = self.total_evaluations
        share = _share(total, self.trailing_dense_ratio)
        return min(total, max(self.trailing_dense_evaluations, share))

    @property
    def uses_summaries(self) -> bool:
        """Whether skipped blocks are summarised around anchors rather than by plain means."""
        levels, target = self.sol_virtual_query_levels_up, self.sol_virtual_query_target_blocks
        return levels is not None or target is not None

    def dense_reason(self, evaluation: int, layer: int, tokens: int) -> str | None:
        """Say why this call is dense, in the order of the contract; None: it is sparse.

        Args:
            evaluation: index of the evaluation, -1 before the first forward.
            layer: index of the transformer block.
            tokens: rows of the packed sequence.
        """
        if evaluation < self.dense_evaluations:
            return "warmup"
        if evaluation >= self.total_evaluations - self.trailing_dense:
            return "trailing"
        if evaluation in self.extra_dense_evaluations:
            return "extra_dense_evaluation"
        if layer < self.sol_dense_layers:
            return "dense_layer"
        if layer in self.extra_dense_layers:
            return "extra_dense_layer"
        if tokens < self.sol_min_tokens:
            return "short_sequence"
        return None

    def topk_ratio_at(self, evaluation: int) -> float | None:
        """Return the top-k ratio of one evaluation."""
        schedule = self.sol_route_topk_schedule
        if schedule is None:
            return self.sol_route_topk_ratio
        return schedule[min(evaluation, len(schedule) - 1)]

    def packed(self, topk_ratio: float | None = None) -> PackedConfig:
        """Translate the public options into those of packed attention.

        Args:
            topk_ratio: replaces `sol_route_topk_ratio` when given (per-evaluation schedule).

        Raises:
            ValueError, TypeError: naming the option by its public name.
        """
        reblock = None
        if self.sol_landmark_preprocess:
            reblock = self._translate(ReblockConfig, REBLOCK_NAMES)
        precision = "fp8" if self.precision == "fp8" else "native"
        packed = self._translate(PackedConfig, ROUTING_NAMES, reblock=reblock, precision=precision)
        if topk_ratio is not None:
            packed = replace(packed, topk_ratio=topk_ratio)
        return packed

    def _translate(self, target: type, names: Mapping[str, str], **more: Any) -> Any:
        """Build `target`; its complaints name our field, so put the public name back."""
        values = {ours: getattr(self, public) for public, ours in names.items()}
        try:
            return target(**values, **more)
        except (ValueError, TypeError) as error:
            message = str(error)
            for public, ours in sorted(names.items(), key=lambda item: -len(item[1])):
                if message.startswith(f"{ours}:"):
                    raise type(error)(public + message[len(ours) :]) from None
            raise

    def _set(self, name: str, value: object) -> None:
        """Store a resolved value in this frozen record."""
        object.__setattr__(self, name, value)

    def _resolve_evaluations(self) -> None:
        """Turn either count into `num_denoise_steps`."""
        denoise, grid = self.num_denoise_steps, self.num_inference_steps
        if denoise is not None:
            check_int("num_denoise_steps", denoise, 1)
        if grid is not None:
            check_int("num_inference_steps", grid, 2)
        if denoise is not None and grid is not None:
            raise ValueError(
                "num_denoise_steps: cannot be combined with num_inference_steps "
                f"(grid points = evaluations + 1), got {denoise} and {grid}"
            )
        if denoise is None:
            self._set("num_denoise_steps", DEFAULT_EVALUATIONS if grid is None else grid - 1)
        self._set("num_inference_steps", None)
        check_int("evaluations_per_step", self.evaluations_per_step, 1)

    def _resolve_warmup(self) -> None:
        """Validate both warm-up values, infer the mode, translate the old percentage."""
        mode, ratio, steps = self.warmup_mode, self.warmup_ratio, self.warmup_steps
        if self.warmup_percent is not None:
            percent = _check_number("warmup_percent", self.warmup_percent, 0, 100)
            if any(value is not None for value in (mode, ratio, steps)):
                raise ValueError(
                    "warmup_percent: cannot be combined with warmup_mode, warmup_ratio or "
                    "warmup_steps"
                )
            ratio = percent / 100
            self._set("warmup_percent", None)
        if mode is None:
            mode = "warmup_steps" if ratio is None and steps is not None else "warmup_ratio"
        _check_choice("warmup_mode", mode, ("warmup_ratio", "warmup_steps"))
        ratio = 0.2 if ratio is None else _check_number("warmup_ratio", ratio, 0, 1)
        steps = 4 if steps is None else steps
        check_int("warmup_steps", steps, 0)
        self._set("warmup_mode", mode)
        self._set("warmup_ratio", ratio)
        self._set("warmup_steps", steps)

    def _check_schedule(self) -> None:
        """Check what is dense besides the warm-up."""
        check_int("trailing_dense_evaluations", self.trailing_dense_evaluations, 0)
        _check_number("trailing_dense_ratio", self.trailing_dense_ratio, 0, 1)
        total = self.total_evaluations
        for name, stop in (("extra_dense_evaluations", total), ("extra_dense_layers", None)):
            self._set(name, _index_tuple(name, getattr(self, name), stop))
        check_int("dense_layers", self.sol_dense_layers, 0)
        check_int("min_tokens", self.sol_min_tokens, 0)
        _check_choice("mixed_timesteps", self.mixed_timesteps, ("error", "dense"))

    def _check_routing(self) -> None:
        """Check the rules that only the public options have; `PackedConfig` checks the rest."""
        if self.sol_route_topk_ratio is not None:
            _check_ratio("sol_route_topk_ratio", self.sol_route_topk_ratio)
        if self.sol_route_topk_schedule is not None:
            schedule = tuple(self.sol_route_topk_schedule)
            if not schedule or self.sol_route_topk_ratio is None:
                raise ValueError(
                    "sol_route_topk_schedule: expected a non-empty tuple together with "
                    f"sol_route_topk_ratio, got {schedule!r} and {self.sol_route_topk_ratio!r}"
                )
            for ratio in schedule:
                _check_ratio("sol_route_topk_schedule", ratio)
            self._set("sol_route_topk_schedule", schedule)
        if not isinstance(self.sol_tau, (int, float)) or isinstance(self.sol_tau, bool):
            raise ValueError(f"sol_tau: expected a finite number, got {self.sol_tau!r}")
        _check_bool("sol_landmark_preprocess", self.sol_landmark_preprocess)
        version = self.sol_landmark_preprocess_version
        _check_choice("sol_landmark_preprocess_version", version, ("v1", "v2"))
        if self.sol_landmark_preprocess and version != "v2":
            raise ValueError(
                "sol_landmark_preprocess_version: expected 'v2', the only one implemented, "
                f"got {version!r}"
            )
        check_int("sol_virtual_query_min_blocks", self.sol_virtual_query_min_blocks, 1)
        check_int("sol_virtual_query_max_blocks", self.sol_virtual_query_max_blocks, 1)
        if self.uses_summaries and not self.sol_landmark_preprocess:
            raise ValueError(
                "sol_virtual_query_levels_up, sol_virtual_query_target_blocks: need "
                "sol_landmark_preprocess=True, got False"
            )
        coarse = self.sol_tail_granularity in ("block", "block8x8")
        if coarse and not self.uses_summaries and self.precision != "int8":
            raise ValueError(
                f"sol_tail_granularity: {self.sol_tail_granularity!r} needs "
                "sol_virtual_query_levels_up or sol_virtual_query_target_blocks, got neither"
            )

    def _check_precision(self) -> None:
        """Check what goes with INT8, and what INT8 does not go with."""
        _check_choice("precision", self.precision, (*PRECISIONS, "int8"))
        for name in ("int8_rotate", "int8_balance"):
            if getattr(self, name) is not None:
                _check_bool(name, getattr(self, name))
        tokens = self.int8_token_aug
        if tokens is not None and (type(tokens) is not int or tokens not in TOKEN_BUDGETS):
            words = ", ".join(map(str, TOKEN_BUDGETS))
            raise ValueError(f"int8_token_aug: expected None or one of {words}; got {tokens!r}")
        if self.precision != "int8":
            for name in ("chunk_tokens", "int8_rotate", "int8_balance", "int8_token_aug"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}: {getattr(self, name)!r} needs precision='int8', "
                        f"got {self.precision!r}"
                    )
            return
        if self.chunk_tokens is not None:
            size = self.chunk_tokens
            if type(size) is not int or size < BLOCK or size % BLOCK:
                raise ValueError(
                    f"chunk_tokens: expected None or a multiple of {BLOCK}, got {size!r}"
                )
        if self.sol_tail_granularity == "query":
            self._set("sol_tail_granularity", "block")
        for name, allowed in INT8_VALUES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"precision: 'int8' cannot be combined with {name}={value!r}, only with "
                    f"{' or '.join(map(repr, allowed))}"
                )
        known = _dispatch.implementations("sol_int8")
        if self.impl is not None and self.impl not in known:
            raise ValueError(
                f"impl: {self.impl!r} does not serve precision='int8', expected one of "
                f"{', '.join(known)} or None"
            )

    def _resolve_fanout(self) -> None:
        """Make one value of the fan-out's two names, and tuples of its lists."""
        for name in (
            "landmark_tree_v2_children",
            "landmark_tree_v2_fanout",
            "landmark_tree_v2_final_fanout",
            "landmark_tree_v2_group_size",
        ):
            value = getattr(self, name)
            self._set(name, tuple(value) if isinstance(value, list) else value)
        children, fanout = self.landmark_tree_v2_children, self.landmark_tree_v2_fanout
        if children is not None and fanout is not None and children != fanout:
            raise ValueError(
                "landmark_tree_v2_fanout: conflicting with landmark_tree_v2_children, "
                f"got {fanout!r} and {children!r}"
            )
        resolved = fanout if children is None else children
        self._set("landmark_tree_v2_children", 16 if resolved is None else resolved)
        self._set("landmark_tree_v2_fanout", None)


SPARK_PRESET: Mapping[str, Any] = MappingProxyType(
    {
        "sol_min_tokens": 8192,
        "sol_route_topk_ratio": 0.1,
        "sol_global_anchor_dtype": "bfloat16",
        "sol_virtual_query_levels_up": 99,
        "sol_virtual_query_min_blocks": 94,
        "sol_virtual_query_max_blocks": 284,
        "sol_landmark_preprocess": True,
        "sol_landmark_preprocess_version": "v2",
    }
)
"""What `install_h3_spark_attn` sets unless told otherwise."""


def sol_config(**options: Any) -> H3SparseAttentionConfig:
    """Make the config of `install_h3_sol_attn` from its short and `sol_*` options."""
    return H3SparseAttentionConfig(**_full_names(options))


def spark_config(*, preset: str = "default", **options: Any) -> H3SparseAttentionConfig:
    """Make the config of `install_h3_spark_attn` from its short and `sol_*` options.

    Args:
        preset: a name of `methods.spark_config.PRESETS`.
        options: override the preset. Naming `sol_virtual_query_target_blocks` clears the global
            anchor.
    """
    values = {**SPARK_PRESET, **_preset_difference(preset)}
    given = _full_names(options, topk="sol_route_topk_ratio")
    if given.get("sol_virtual_query_target_blocks") is not None:
        values["sol_virtual_query_levels_up"] = None
    return H3SparseAttentionConfig(**{**values, **given})


def _full_names(options: Mapping[str, Any], topk: str | None = None) -> dict[str, Any]:
    """Replace short names by stored ones; a short name beside its twin is an error.

    A short name that is None is "not given". A `sol_*` name is passed on even when it is None:
    that is how tau routing is asked for under a preset with top-k.
    """
    twins = {"dense_layers": "sol_dense_layers", "min_tokens": "sol_min_tokens"}
    if topk is not None:
        twins["topk_ratio"] = topk
    schedule = ("num_inference_steps", "num_denoise_steps", "warmup_mode")
    values = dict(options)
    for short, stored in twins.items():
        value = values.pop(short, None)
        if value is None:
            continue
        if stored in values:
            raise ValueError(f"{short}: cannot be combined with legacy {stored}")
        values[stored] = value
    for name in (*schedule, "warmup_ratio", "warmup_steps"):
        if values.get(name, 0) is None:
            del values[name]
    known = {field.name for field in fields(H3SparseAttentionConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        words = []
        for name in unknown:
            close = [each for each in sorted(known) if name in each]
            close = close or difflib.get_close_matches(name, sorted(known), n=3)
            words.append(f"{name} (did you mean {' or '.join(close)}?)" if close else name)
        raise TypeError(
            f"unexpected option {', '.join(words)}; H3SparseAttentionConfig has all there are"
        )
    return values


def _preset_difference(preset: str) -> dict[str, Any]:
    """Express a named preset of packed attention as public options beside the default one."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}; got {preset!r}")
    base, chosen = PRESETS["default"], PRESETS[preset]
    values = {
        public: getattr(chosen, ours)
        for public, ours in ROUTING_NAMES.items()
        if getattr(chosen, ours) != getattr(base, ours)
    }
    for public, ours in REBLOCK_NAMES.items():
        if getattr(chosen.reblock, ours) != getattr(base.reblock, ours):
            values[public] = getattr(chosen.reblock, ours)
    return values
