"""What a landmark tree is asked for, and what comes back: options, statistics, result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from solspark.reference.hierarchy import (
    CapacityHierarchy,
    as_schedule,
    capacity_hierarchy,
    resolve_fanouts,
)
from solspark.reference.initial_order import INITIAL_ORDERS
from solspark.types import BLOCK

GROUP_SIZES = (1, 2, 4, 8)
LANDMARK_COUNTS = (32, 64, 128, 256)
MEAN_MODES = ("raw", "input_unit", "metric_unit")


@dataclass(frozen=True)
class ReblockOptions:
    """Hold every option of the landmark tree, validated.

    Args:
        initial_order: order in which the tokens enter the root; one of `INITIAL_ORDERS`.
        distance: "cosine", or "euclidean" (squared L2).
        order_mode: "parent_order" keeps the parent's order inside a child; "scalar_order" keeps the
            order of the last split's scores. "preserve_parent_order" is accepted for the first.
        group_size: tokens that move together, 1, 2, 4 or 8, or one value for each level, the last
            one repeating.
        max_children, fanout_mode, final_fanout, root_fanout: see `capacity_hierarchy`.
        landmark_mode: "midpoint" or "mean" of each interval of the node.
        landmark_count: 32, 64, 128 or 256.
        midpoint_direction_mode: "legacy" or "fused". Elsewhere these differ in float32 rounding;
            here both name the one way there is.
        aggregation: "linear", or "max" (cosine only): the nearest landmark of each side decides.
        proxy_iterations: 0, 1, 2 or 4 updates of the two centres of a split.
        seed_rule: "farthest_pair" or "endpoint_order".
        update_rule: "mean" or "medoid".
        score_precision: "fp16" or "fp32", see `tree_numerics`.
        mean_mode: what the centres are averages of: "raw" features; "input_unit", features times
            the inverse norms given beside them; "metric_unit", unit features. The last two are for
            cosine only.

    Raises:
        ValueError: naming the option, what was expected and what came.

    Source: spec/spark.md sections 1.1 and 1.7.
    """

    initial_order: str = "flat"
    distance: str = "cosine"
    order_mode: str = "parent_order"
    group_size: int | Sequence[int] = 1
    max_children: int | Sequence[int] = 8
    fanout_mode: str = "power_of_two_fanout"
    final_fanout: int | Sequence[int] | None = None
    root_fanout: int | None = None
    landmark_mode: str = "midpoint"
    landmark_count: int = 32
    midpoint_direction_mode: str = "legacy"
    aggregation: str = "linear"
    proxy_iterations: int = 2
    seed_rule: str = "farthest_pair"
    update_rule: str = "mean"
    score_precision: str = "fp16"
    mean_mode: str = "raw"

    def __post_init__(self) -> None:
        if self.order_mode == "preserve_parent_order":
            object.__setattr__(self, "order_mode", "parent_order")
        for name in ("group_size", "max_children", "final_fanout"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or value not in allowed:
                words = ", ".join(str(choice) for choice in allowed)
                raise ValueError(f"{name}: expected one of {words}; got {value!r}")
        as_schedule("group_size", self.group_size, GROUP_SIZES)
        resolve_fanouts(self.max_children, self.fanout_mode, self.root_fanout, self.final_fanout)
        if self.distance == "euclidean" and self.aggregation == "max":
            raise ValueError("aggregation: max needs distance='cosine', got 'euclidean'")
        if self.distance == "euclidean" and self.mean_mode != "raw":
            raise ValueError(
                f"mean_mode: {self.mean_mode} needs distance='cosine', got 'euclidean'"
            )

    def hierarchy(self, leaves: int) -> CapacityHierarchy:
        """Return the capacities of a tree with `leaves` leaves."""
        return capacity_hierarchy(
            leaves,
            max_children=self.max_children,
            fanout_mode=self.fanout_mode,
            root_fanout=self.root_fanout,
            final_fanout=self.final_fanout,
        )

    def group_at(self, depth: int) -> int:
        """Return the tokens of an atom at a level."""
        schedule = as_schedule("group_size", self.group_size, GROUP_SIZES)
        return schedule[min(depth, len(schedule) - 1)]


_CHOICES: dict[str, tuple[Any, ...]] = {
    "initial_order": INITIAL_ORDERS,
    "distance": ("cosine", "euclidean"),
    "order_mode": ("parent_order", "scalar_order"),
    "landmark_mode": ("midpoint", "mean"),
    "landmark_count": LANDMARK_COUNTS,
    "midpoint_direction_mode": ("legacy", "fused"),
    "aggregation": ("linear", "max"),
    "proxy_iterations": (0, 1, 2, 4),
    "seed_rule": ("farthest_pair", "endpoint_order"),
    "update_rule": ("mean", "medoid"),
    "score_precision": ("fp16", "fp32"),
    "mean_mode": MEAN_MODES,
}


@dataclass(frozen=True, eq=False)
class ReblockResult:
    """Say where every token goes.

    Args:
        block_indices: [..., T // 64, 64], the token ids of every block; a view of `permutation`.
        excluded_indices: [..., T % 64], the token ids that belong to no block; a view of
            `permutation`.
        permutation: [..., T]; permutation[i] is the token that stands at position i: y =
            x[permutation].
        inverse_permutation: [..., T]; inverse_permutation[permutation[i]] = i: x =
            y[inverse_permutation]. None where it was not asked for.
        options: of the tree.

    Source: spec/spark.md section 1.2.
    """

    block_indices: Tensor
    excluded_indices: Tensor
    permutation: Tensor
    inverse_permutation: Tensor | None
    options: ReblockOptions

    @property
    def hierarchy(self) -> CapacityHierarchy:
        """The capacities that were met."""
        return self.options.hierarchy(self.active_tokens // BLOCK)

    @property
    def split_stats(self) -> tuple[dict[str, Any], ...]:
        """One record for every level and size of node.

        Each has level, node_tokens, node_count, target_leaves, group_size, representatives,
        children, landmarks, proxy_iterations, seed_rule and update_rule.
        """
        return split_statistics(self.hierarchy, self.options)

    @property
    def num_excluded(self) -> int:
        """T % 64."""
        return self.excluded_indices.shape[-1]

    @property
    def active_tokens(self) -> int:
        """Tokens that belong to a block: positions [0, active_tokens) of the permutation."""
        return self.permutation.shape[-1] - self.num_excluded


def landmark_count(atoms: int, wanted: int, group: int) -> int:
    """Return how many landmarks a node of `atoms` atoms has.

    Single tokens: min(wanted, atoms). Groups: `wanted`, halved while there are fewer atoms, so 32
    or else 16 of the default.
    """
    if group == 1:
        return min(wanted, atoms)
    while wanted > 16 and wanted > atoms:
        wanted //= 2
    return min(wanted, atoms)


def split_statistics(
    hierarchy: CapacityHierarchy, options: ReblockOptions
) -> tuple[dict[str, Any], ...]:
    """Return one record for every level and size of node that the tree splits."""
    records = []
    for depth in range(len(hierarchy.splits)):
        group = options.group_at(depth)
        for batch in hierarchy.node_batches(depth):
            atoms = batch.size * BLOCK // group
            records.append(
                {
                    "level": depth,
                    "node_tokens": batch.size * BLOCK,
                    "node_count": len(batch.starts),
                    "target_leaves": batch.budgets,
                    "group_size": group,
                    "representatives": atoms,
                    "children": len(batch.budgets),
                    "landmarks": landmark_count(atoms, options.landmark_count, group),
                    "proxy_iterations": options.proxy_iterations,
                    "seed_rule": options.seed_rule,
                    "update_rule": options.update_rule,
                }
            )
    return tuple(records)


def as_result(
    permutation: Tensor, inverse: Tensor | None, options: ReblockOptions
) -> ReblockResult:
    """Wrap a permutation [..., T] whose first 64 * (T // 64) entries are the blocks."""
    leaves = permutation.shape[-1] // BLOCK
    active = leaves * BLOCK
    return ReblockResult(
        permutation[..., :active].unflatten(-1, (leaves, BLOCK)),
        permutation[..., active:],
        permutation,
        inverse,
        options,
    )
