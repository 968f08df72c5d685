"""One node of the landmark tree: landmarks, a fitted direction for every binary split, routing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from solspark.reference.hierarchy import ProxyNode, proxy_topology
from solspark.reference.reblock_options import ReblockOptions, landmark_count
from solspark.reference.tree_numerics import (
    inverse_norms,
    order_key,
    snap,
    squared_norms,
    squared_scale,
    unit,
)


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

    Source: spec/spark.md sections 1.6 (d) and 1.7; `tree_numerics` says how it is rounded.
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
