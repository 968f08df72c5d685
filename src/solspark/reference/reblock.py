"""The landmark tree: group video tokens with alike features into blocks of exactly 64.

Written token by token and node by node, to be read beside spec/spark.md section 1. What is
computed:

    node -> K landmarks -> a binary topology over its m children -> a direction d for every split
    score s = x / |x| . d;  the `capacity` lowest (s, token id) go left, the others right

and the children keep the order that their tokens had in the parent.

Numerics, for every implementation:
- Squared norms are summed in float64 and rounded once to float32; 1 / max(sqrt(norm), 1e-12) is
  taken in float32.
- Directions are fitted in float64. What is compared on the way (distances, landmark scores) and
  the directions themselves are rounded to multiples of 2^-40 of their scale: far above the noise of
  float64 sums, so that the order of summation decides nothing and what is equal ties, and far below
  anything that matters.
- score_precision "fp16" (the default): x / |x| is formed in float32 and rounded to float16, d is
  rounded to float16, and their dot product is exact (its terms are multiples of 2^-48 below 2),
  rounded once to float32. "fp32": float64 throughout, rounded to multiples of 2^-40 and then to
  float32. The euclidean distance always scores like "fp32".
- -0.0 counts as +0.0. A row whose float32 squared norm is not finite scores NaN, which sorts after
  everything, and as a landmark it counts as the zero vector.
- Ties go to the lower token id, landmark or pair, whichever is compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark.reference.hierarchy import (
    CapacityHierarchy,
    ProxyNode,
    as_schedule,
    capacity_hierarchy,
    proxy_topology,
    resolve_fanouts,
)
from solspark.reference.initial_order import INITIAL_ORDERS, initial_order
from solspark.types import BLOCK, TokenGrid

GROUP_SIZES = (1, 2, 4, 8)
LANDMARK_COUNTS = (32, 64, 128, 256)
MEAN_MODES = ("raw", "input_unit", "metric_unit")
SMALLEST_NORM = 1e-12
GRAIN = 2.0**-40


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
        score_precision: "fp16" or "fp32", see the module.
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


def squared_norms(rows: Tensor) -> Tensor:
    """Return the squared L2 norm of rows [..., D] in float32 [...], summed in float64."""
    return rows.double().square().sum(-1).float()


def inverse_norms(rows: Tensor) -> Tensor:
    """Return 1 / max(|x|, 1e-12) of rows [..., D] in float32; NaN if |x|^2 is not finite."""
    return norms_to_inverse(squared_norms(rows))


def norms_to_inverse(squares: Tensor) -> Tensor:
    """Return 1 / max(sqrt(square), 1e-12) of float32 squared norms; NaN where not finite."""
    inverse = squares.sqrt().clamp(min=SMALLEST_NORM).reciprocal()
    return inverse.masked_fill(~squares.isfinite(), math.nan)


def snap(values: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Round to multiples of 2^-40 of `scale`, a power of two."""
    return (values / scale / GRAIN).round() * GRAIN * scale


def squared_scale(centres: Tensor) -> Tensor:
    """Return the power of two just above the largest squared norm of centres [..., K, D], or 1.

    It has the shape [..., 1]: the scale of squared distances between them.
    """
    largest = centres.square().sum(-1).amax(-1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    return torch.where(largest > 0, scale, 1.0)


def order_key(value: float) -> tuple[int, float]:
    """Return a key that sorts floats by their canonical bits: -0.0 is +0.0, NaN comes last."""
    return (1, 0.0) if math.isnan(value) else (0, value + 0.0)


def choose_remainder(samples: Tensor, order: Sequence[int], count: int) -> set[int]:
    """Return the `count` tokens of samples [T, D] with the largest norm; ties go to the lower id.

    Source: spec/spark.md section 1.3.
    """
    norms = squared_norms(samples).tolist()

    def rank(token: int) -> tuple[int, float, int]:
        kind, value = order_key(norms[token])
        return (-kind, -value, token)

    return set(sorted(order, key=rank)[:count])


def landmarks(
    features: Tensor, count: int, mode: str, dtype: torch.dtype
) -> tuple[Tensor, list[int]]:
    """Return the centres [K, D] of the K intervals of a node and the atoms of each.

    Interval i covers positions floor(i n / K) .. floor((i + 1) n / K) - 1 of the node's current
    order; its centre is the atom in its middle, or the mean of its atoms rounded to `dtype`.

    Args:
        features: float64 [n, D], one row an atom, in node order.
        count: K <= n.
        mode: "midpoint" or "mean".
        dtype: type that a mean is rounded to.

    Source: spec/spark.md section 1.6 (a).
    """
    atoms = features.shape[0]
    edges = [index * atoms // count for index in range(count + 1)]
    lengths = [stop - start for start, stop in itertools.pairwise(edges)]
    centres = []
    for start, length in zip(edges, lengths, strict=False):
        if mode == "midpoint":
            centre = features[start + length // 2]
        else:
            centre = features[start : start + length].mean(0).float().to(dtype).double()
        # A centre without a finite norm says nothing about directions.
        centres.append(centre if squared_norms(centre).isfinite() else torch.zeros_like(centre))
    return torch.stack(centres), lengths


@dataclass(frozen=True)
class Fit:
    """One fitted binary split: what scores a token and what the children inherit.

    Args:
        left, right: float64 [D], the two centres.
        left_weights, right_weights: atoms of each landmark on either side.
    """

    left: Tensor
    right: Tensor
    left_weights: list[int]
    right_weights: list[int]


def unit(vector: Tensor) -> Tensor:
    """Return vector / max(|vector|, 1e-12)."""
    return vector / vector.norm(dim=-1, keepdim=True).clamp(min=SMALLEST_NORM)


def fit_proxy(
    centres: Tensor, weights: list[int], left_capacity: int, options: ReblockOptions
) -> Fit:
    """Fit one binary split to weighted landmarks: two seeds, then a few constrained updates.

        delta_k = u_k . (unit(r) - unit(l));  l = sum lw_k c_k / left_capacity,  r likewise

    Landmarks go left in the order (delta, index) until left_capacity is used up, and the one at
    the boundary is divided.

    Args:
        centres: float64 [K, D].
        weights: atoms that each landmark stands for at this split.
        left_capacity: atoms that go left, less than sum(weights).
        options: seed_rule, update_rule, proxy_iterations, distance.

    Source: spec/spark.md section 1.6 (c) and 1.7.
    """
    active = [index for index, weight in enumerate(weights) if weight > 0]
    distances = _landmark_distances(centres, options.distance)
    first, second = _seeds(distances, active, options.seed_rule)
    left, right = centres[first], centres[second]
    left_weights = right_weights = weights
    for _ in range(max(1, options.proxy_iterations)):
        deltas = _token_scores(centres, centres, left, right, options.distance).tolist()
        left_weights = [0] * len(weights)
        room = left_capacity
        for index in sorted(active, key=lambda item: (order_key(deltas[item]), item)):
            left_weights[index] = min(weights[index], room)
            room -= left_weights[index]
        right_weights = [w - lw for w, lw in zip(weights, left_weights, strict=True)]
        if options.proxy_iterations == 0:
            break
        left = _update(centres, distances, left_weights, options)
        right = _update(centres, distances, right_weights, options)
    return Fit(left, right, left_weights, right_weights)


def _landmark_distances(centres: Tensor, distance: str) -> list[list[float]]:
    """Return the distance of every pair of landmarks."""
    if distance == "cosine":
        units = unit(centres)
        return snap(1 - units @ units.T).tolist()
    squares = (centres[:, None] - centres[None]).square().sum(-1)
    return snap(squares, squared_scale(centres)).tolist()


def _seeds(distances: list[list[float]], active: list[int], rule: str) -> tuple[int, int]:
    """Return two landmarks to start from; the same one twice if only one is active."""
    if len(active) < 2:
        return active[0], active[0]
    if rule == "endpoint_order":
        return active[0], active[-1]
    pairs = [(i, j) for place, i in enumerate(active) for j in active[place + 1 :]]
    return max(pairs, key=lambda pair: (order_key(distances[pair[0]][pair[1]]), -pair[0], -pair[1]))


def _token_scores(
    rows: Tensor, centres: Tensor, left: Tensor, right: Tensor, distance: str
) -> Tensor:
    """Return the float64 score of rows [n, D] against two sides of the centres; low is left."""
    if distance == "cosine":
        return snap(unit(rows) @ (unit(right) - unit(left)))
    scores = 2 * (rows @ (right - left)) + left.square().sum() - right.square().sum()
    return snap(scores, squared_scale(centres))


def _update(
    centres: Tensor, distances: list[list[float]], weights: list[int], options: ReblockOptions
) -> Tensor:
    """Return the weighted mean or medoid of the landmarks."""
    weight = torch.tensor(weights, dtype=torch.float64)
    if options.update_rule == "mean":
        return weight @ centres / weight.sum()
    scale = squared_scale(centres) if options.distance == "euclidean" else 1.0
    costs = snap(torch.tensor(distances, dtype=torch.float64) @ weight / weight.sum(), scale)
    active = [index for index, weight in enumerate(weights) if weight > 0]
    return centres[min(active, key=lambda index: (float(costs[index]), index))]


def score_atoms(rows: Tensor, centres: Tensor, fit: Fit, options: ReblockOptions) -> list[float]:
    """Return the float32 score of every atom for one binary split; low goes left.

        cosine:     s = x / max(|x|, 1e-12) . (unit(r) - unit(l))
        euclidean:  s = 2 x . (r - l) + |l|^2 - |r|^2
        max:        s = max over right landmarks of cos(x, c) - the same over left landmarks

    Args:
        rows: [n, D] in the feature type, one row an atom.
        centres: float64 [K, D].
        fit: the split.
        options: distance, aggregation, score_precision.

    Source: spec/spark.md sections 1.6 (d) and 1.7; the module says how it is rounded.
    """
    bad = ~squared_norms(rows).isfinite()
    if options.distance == "euclidean":
        scores = _token_scores(rows.double(), centres, fit.left, fit.right, "euclidean").float()
    elif options.aggregation == "linear":
        direction = unit(fit.right) - unit(fit.left)
        scores = _cosines(rows, direction[None], options.score_precision)[:, 0]
    else:
        cosines = _cosines(rows, unit(centres), options.score_precision)
        on_right = torch.tensor([weight > 0 for weight in fit.right_weights])
        on_left = torch.tensor([weight > 0 for weight in fit.left_weights])
        nearest_right = cosines.masked_fill(~on_right, -math.inf).amax(-1)
        nearest_left = cosines.masked_fill(~on_left, -math.inf).amax(-1)
        scores = nearest_right - nearest_left
    return scores.masked_fill(bad, math.nan).tolist()


def _cosines(rows: Tensor, directions: Tensor, precision: str) -> Tensor:
    """Return x / |x| . d in float32 [n, m] for rows [n, D] and directions float64 [m, D]."""
    directions = snap(directions)
    if precision == "fp16":
        units = (rows.float() * inverse_norms(rows)[:, None]).half().double()
        return (units @ directions.float().half().double().T).float()
    return snap(unit(rows.double()) @ directions.T).float()


def split_node(
    atoms: list[list[int]],
    features: Tensor,
    scale: Tensor | None,
    capacities: Sequence[int],
    options: ReblockOptions,
    group: int,
) -> list[list[list[int]]]:
    """Divide the atoms of a node among its children, every capacity met exactly.

    Args:
        atoms: token ids of every atom, in node order.
        features: [T, D] of the tree, in the feature type.
        scale: float32 [T], multiplies the features that centres are averages of; None is one.
        capacities: tokens of each child.
        options: of the tree.
        group: tokens an atom.

    Returns:
        The atoms of each child, in order.

    Source: spec/spark.md section 1.6.
    """
    tokens = torch.tensor(atoms)
    fitted = features[tokens].double()
    if scale is not None:
        fitted = fitted * scale[tokens].double()[..., None]
    if group == 1:
        rows, fitted = features[tokens[:, 0]], fitted[:, 0]
    else:
        rows = fitted.mean(1).float().to(features.dtype)
        fitted = rows.double()
    count = landmark_count(len(atoms), options.landmark_count, group)
    centres, lengths = landmarks(fitted, count, options.landmark_mode, features.dtype)

    topology = proxy_topology([capacity // group for capacity in capacities])
    members: dict[int, list[int]] = {0: list(range(len(atoms)))}
    slots: dict[int, list[int]] = {0: lengths}
    for number, node in enumerate(topology):
        fit = fit_proxy(centres, slots[node.slot], node.left_capacity, options)
        slots[2 * number + 1], slots[2 * number + 2] = fit.left_weights, fit.right_weights
        scores = score_atoms(rows, centres, fit, options)
        members[node.left_tag], members[node.right_tag] = _route(
            members[number], scores, atoms, node
        )
    children = []
    for child in range(len(capacities)):
        places = members[-1 - child]
        # "scalar_order" keeps the (score, id) order of the split that made the child.
        children.append([atoms[i] for i in _in_child_order(places, options.order_mode)])
    return children


def _route(
    members: list[int], scores: list[float], atoms: list[list[int]], node: ProxyNode
) -> tuple[list[int], list[int]]:
    """Send the atoms with the smallest (score, first token id) left, exactly as many as fit."""
    ranked = sorted(members, key=lambda i: (order_key(scores[i]), atoms[i][0]))
    return ranked[: node.left_capacity], ranked[node.left_capacity :]


def _in_child_order(places: list[int], order_mode: str) -> list[int]:
    """Return a child's atoms in the parent's order, or as the last split ranked them."""
    return sorted(places) if order_mode == "parent_order" else places


def grow_tree(
    order: Sequence[int],
    features: Tensor,
    scale: Tensor | None,
    hierarchy: CapacityHierarchy,
    options: ReblockOptions,
    split: Callable[..., list[list[list[int]]]] = split_node,
) -> list[int]:
    """Split level by level; return the token ids in the order of the leaves.

    Args:
        order: token ids that enter the root, in initial order; 64 a leaf.
        features, scale, options: see `split_node`.
        hierarchy: how many leaves every node holds.
        split: replaced by a test that wants to look at every node.

    Source: spec/spark.md section 1.6.
    """
    nodes = [list(order)]
    for depth, divided in enumerate(hierarchy.splits):
        group = options.group_at(depth)
        below: list[list[int]] = []
        for tokens, budgets in zip(nodes, divided, strict=True):
            if len(budgets) == 1:
                below.append(tokens)
                continue
            if len(tokens) % group:
                raise RuntimeError(
                    f"group_size: {group} does not divide a node of {len(tokens)} tokens"
                )
            atoms = [tokens[i : i + group] for i in range(0, len(tokens), group)]
            capacities = [BLOCK * budget for budget in budgets]
            for child in split(atoms, features, scale, capacities, options, group):
                below.append([token for atom in child for token in atom])
        nodes = below
    return [token for node in nodes for token in node]


def reblock(
    samples: Tensor,
    *,
    grid: TokenGrid,
    options: ReblockOptions | None = None,
    fitting_samples: Tensor | None = None,
    excluded_indices: Tensor | None = None,
    input_inverse_norms: Tensor | None = None,
) -> ReblockResult:
    """Group the tokens of every leading index into blocks of 64 by a landmark tree.

    Args:
        samples: [..., T, D], any floating type; T = grid.tokens >= 64. Leading indices are
            independent problems.
        grid: frames, height, width.
        options: of the tree; None takes the defaults.
        fitting_samples: shape and dtype of `samples`; all tree decisions read it, the choice of the
            remainder keeps reading `samples`.
        excluded_indices: int [..., T % 64], replaces the choice of the remainder.
        input_inverse_norms: float32 [..., T], for mean_mode "input_unit": 1 / |row| of the original
            tokens.

    Returns:
        ReblockResult with int64 indices.

    Numerics: see the module.

    Source: spec/spark.md section 1.
    """
    options = options or ReblockOptions()
    tokens, dim = samples.shape[-2:]
    leading = samples.shape[:-2]
    hierarchy = options.hierarchy(tokens // BLOCK)
    order = initial_order(grid, options.initial_order).tolist()
    fitting = samples if fitting_samples is None else fitting_samples
    rows = []
    for index in range(math.prod(leading)):
        own = samples.reshape(-1, tokens, dim)[index]
        features = fitting.reshape(-1, tokens, dim)[index]
        if excluded_indices is None:
            excluded = choose_remainder(own, order, tokens % BLOCK)
        else:
            excluded = set(excluded_indices.reshape(-1, tokens % BLOCK)[index].tolist())
        scale = None
        if options.mean_mode == "metric_unit":
            scale = inverse_norms(features)
        elif options.mean_mode == "input_unit":
            if input_inverse_norms is None:
                raise ValueError("input_inverse_norms: mean_mode 'input_unit' needs it, got None")
            scale = input_inverse_norms.reshape(-1, tokens)[index]
        active = [token for token in order if token not in excluded]
        tail = [token for token in order if token in excluded]
        rows.append(grow_tree(active, features, scale, hierarchy, options) + tail)
    permutation = torch.tensor(rows, dtype=torch.int64).reshape(*leading, tokens)
    return as_result(permutation, permutation.argsort(-1), options)


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
