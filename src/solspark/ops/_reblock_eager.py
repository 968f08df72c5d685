"""The landmark tree in batched torch: all trees of a chunk and all equal nodes of a level at once.

Nothing here waits for the device, and every shape follows from the hierarchy alone. What is
computed is written in `solspark.reference.reblock`, how it is rounded in
`solspark.reference.tree_numerics`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from solspark.reference.hierarchy import CapacityHierarchy, NodeBatch, ProxyNode, proxy_topology
from solspark.reference.initial_order import initial_order
from solspark.reference.reblock_options import ReblockOptions, landmark_count
from solspark.reference.tree_numerics import (
    norms_to_inverse,
    snap,
    squared_norms,
    squared_scale,
    unit,
)
from solspark.types import BLOCK, TokenGrid

CHUNK_BYTES = {"cpu": 128 * 2**20}
"""Wide copies of the features in flight; a GPU wants more of them at once."""
DEVICE_CHUNK_BYTES = 2**30


def fit_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which directions are fitted: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def score_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which scores are summed.

    float64 sums of float16 products are exact, so on the CPU no order of summation shows. Elsewhere
    float32: two tokens may swap where their scores agree to its rounding.
    """
    return torch.float64 if device.type == "cpu" else torch.float32


def ordered_bits(values: Tensor) -> Tensor:
    """Map float32 to int32 that sort alike: -0.0 is +0.0, and NaN comes after +inf."""
    canonical = torch.where(values == 0, 0.0, values)
    canonical = torch.where(values.isnan(), math.nan, canonical)
    bits = canonical.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def unique_key(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys that sort by (value, id)."""
    return (ordered_bits(values).long() << 32) | ids


@functools.lru_cache(maxsize=64)
def initial_order_on(grid: TokenGrid, name: str, device: torch.device) -> Tensor:
    """Return the initial order on a device; moved there once."""
    return initial_order(grid, name).to(device)


@functools.lru_cache(maxsize=256)
def _node_positions(size: int, starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the token positions [N, size * 64] of nodes; moved to the device once."""
    first = torch.tensor(starts, dtype=torch.int64)[:, None] * BLOCK
    return (first + torch.arange(size * BLOCK)).to(device)


def run_eager(
    samples: Tensor,
    fitting: Tensor | None,
    excluded: Tensor | None,
    input_inverse_norms: Tensor | None,
    squares: Tensor | None,
    grid: TokenGrid,
    options: ReblockOptions,
) -> Tensor:
    """Return the permutations [R, T], int64, of R trees.

    Args:
        samples: [R, T, D].
        fitting: [R, T, D] or None for `samples`.
        excluded: int64 [R, T % 64] or None to choose by norm.
        input_inverse_norms: float32 [R, T] for mean_mode "input_unit".
        squares: float32 [R, T], the squared norms of `samples`, or None to compute them.
        grid, options: checked.
    """
    trees, tokens, dim = samples.shape
    hierarchy = options.hierarchy(tokens // BLOCK)
    budget = CHUNK_BYTES.get(samples.device.type, DEVICE_CHUNK_BYTES)
    step = max(1, budget // (tokens * dim * 8))
    result = samples.new_empty((trees, tokens), dtype=torch.int64)
    for first in range(0, trees, step):
        part = slice(first, min(first + step, trees))
        own = squared_norms(samples[part]) if squares is None else squares[part]
        order = root_order(own, None if excluded is None else excluded[part], grid, options)
        active = hierarchy.leaves * BLOCK
        features = samples[part] if fitting is None else fitting[part]
        if fitting is not None:
            own = squared_norms(features)
        scale = None
        if options.mean_mode == "metric_unit":
            scale = norms_to_inverse(own)
        elif options.mean_mode == "input_unit":
            assert input_inverse_norms is not None
            scale = input_inverse_norms[part]
        tree = _Tree(features, own, scale, options)
        result[part, :active] = tree.grow(order[:, :active], hierarchy)
        result[part, active:] = order[:, active:]
    return result


def root_order(
    squares: Tensor, excluded: Tensor | None, grid: TokenGrid, options: ReblockOptions
) -> Tensor:
    """Return the ids in initial order [C, T], the excluded ones moved behind the others.

    squares: float32 [C, T], the squared norms that choose them.
    """
    trees, tokens = squares.shape
    order = initial_order_on(grid, options.initial_order, squares.device).expand(trees, tokens)
    count = tokens % BLOCK
    if count == 0:
        return order
    if excluded is None:
        ids = torch.arange(tokens, device=squares.device)
        descending = ((-1 - ordered_bits(squares)).long() << 32) | ids
        excluded = descending.topk(count, largest=False).indices
    is_excluded = torch.zeros(trees, tokens, dtype=torch.int8, device=squares.device)
    is_excluded.scatter_(1, excluded, 1)
    return order.gather(1, is_excluded.gather(1, order).argsort(dim=1, stable=True))


class _Tree:
    """Features of a chunk of trees, prepared once for all levels."""

    def __init__(
        self, features: Tensor, squares: Tensor, scale: Tensor | None, options: ReblockOptions
    ):
        self.features = features
        self.scale = scale
        self.options = options
        self.bad = ~squares.isfinite()
        self.rows = self._score_rows(features, squares)

    def _score_rows(self, features: Tensor, squares: Tensor) -> Tensor:
        """Return what is multiplied by a direction, rounded as the options say."""
        wide = score_dtype(features.device)
        if self.options.distance == "euclidean":
            return features.to(wide)
        if self.options.score_precision == "fp16":
            return (features.float() * norms_to_inverse(squares)[..., None]).half().to(wide)
        return unit(features.to(wide))

    def grow(self, order: Tensor, hierarchy: CapacityHierarchy) -> Tensor:
        """Return the token ids [C, 64 L] in the order of the leaves."""
        order = order.clone()
        for depth in range(len(hierarchy.splits)):
            group = self.options.group_at(depth)
            for batch in hierarchy.node_batches(depth):
                places = _node_positions(batch.size, batch.starts, order.device)
                order[:, places] = self._split(order[:, places], batch, group)
        return order

    def _split(self, ids: Tensor, batch: NodeBatch, group: int) -> Tensor:
        """Divide equal nodes [C, N, n] among their children; return the ids in the new order."""
        options, tokens = self.options, ids.shape[-1]
        if tokens % group:
            raise RuntimeError(f"group_size: {group} does not divide a node of {tokens} tokens")
        atoms = ids.unflatten(-1, (tokens // group, group))
        rows, fitted, bad = self._atoms(atoms)
        count = landmark_count(atoms.shape[2], options.landmark_count, group)
        centres, lengths = self._landmarks(fitted, count)
        topology = proxy_topology([BLOCK * budget // group for budget in batch.budgets])
        scores = self._scores(rows, bad, centres, lengths, topology)
        places = _route(scores, atoms[..., 0], topology, len(batch.budgets), options.order_mode)
        places = places[..., None].expand(*places.shape, group)
        return atoms.gather(2, places).flatten(-2)

    def _atoms(self, atoms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows to score, rows that centres average, and which rows have no norm."""
        trees = torch.arange(atoms.shape[0], device=atoms.device)[:, None, None]
        if atoms.shape[-1] == 1:
            ids = atoms[..., 0]
            fitted = self.features[trees, ids]
            if self.scale is not None:
                fitted = fitted.to(fit_dtype(atoms.device))
                fitted = fitted * self.scale[trees, ids].to(fitted)[..., None]
            return self.rows[trees, ids], fitted, self.bad[trees, ids]
        fitted = self.features[trees[..., None], atoms].to(fit_dtype(atoms.device))
        if self.scale is not None:
            fitted = fitted * self.scale[trees[..., None], atoms].to(fitted)[..., None]
        mean = fitted.mean(-2).float().to(self.features.dtype)
        squares = squared_norms(mean)
        return self._score_rows(mean, squares), mean, ~squares.isfinite()

    def _landmarks(self, fitted: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the centres [C, N, K, D] in fit_dtype and the lengths [K] of the intervals."""
        atoms, device = fitted.shape[2], fitted.device
        edges = torch.arange(count + 1, device=device) * atoms // count
        starts, lengths = edges[:-1], edges.diff()
        if self.options.landmark_mode == "midpoint":
            centres = fitted[:, :, starts + lengths // 2].to(fit_dtype(device))
        else:
            steps = torch.arange(-(-atoms // count), device=device)
            inside = steps < lengths[:, None]
            members = fitted[:, :, (starts[:, None] + steps).clamp(max=atoms - 1)]
            members = members.to(fit_dtype(device)).masked_fill(~inside[..., None], 0.0)
            means = (members.sum(-2) / lengths[:, None]).float().to(self.features.dtype)
            centres = means.to(fit_dtype(device))
        bad = ~squared_norms(centres).isfinite()
        return centres.masked_fill(bad[..., None], 0.0), lengths

    def _scores(
        self,
        rows: Tensor,
        bad: Tensor,
        centres: Tensor,
        lengths: Tensor,
        topology: Sequence[ProxyNode],
    ) -> Tensor:
        """Return the float32 scores [C, N, n, m - 1] of all atoms for all binary splits."""
        options = self.options
        fitter = _Fitter(centres, options)
        slots = {0: lengths.expand(centres.shape[:-1])}
        lefts, rights, on_left, on_right = [], [], [], []
        for number, node in enumerate(topology):
            left, right, left_weights = fitter.fit(slots[node.slot], node.left_capacity)
            right_weights = slots[node.slot] - left_weights
            slots[2 * number + 1], slots[2 * number + 2] = left_weights, right_weights
            lefts.append(left)
            rights.append(right)
            on_left.append(left_weights > 0)
            on_right.append(right_weights > 0)
        left, right = torch.stack(lefts, 2), torch.stack(rights, 2)
        if options.distance == "euclidean":
            scores = 2 * (rows @ (right - left).to(rows).mT)
            offset = left.square().sum(-1) - right.square().sum(-1)
            scores = (scores + offset.to(rows)[:, :, None]).to(centres)
            scores = snap(scores, squared_scale(centres)[..., None]).float()
        elif options.aggregation == "linear":
            scores = self._cosines(rows, unit(right) - unit(left))
        else:
            cosines = self._cosines(rows, unit(centres))
            scores = torch.stack(
                [
                    _masked_max(cosines, right_side) - _masked_max(cosines, left_side)
                    for left_side, right_side in zip(on_left, on_right, strict=True)
                ],
                -1,
            )
        return scores.masked_fill(bad[..., None], math.nan)

    def _cosines(self, rows: Tensor, directions: Tensor) -> Tensor:
        """Return the float32 dot products [C, N, n, m] of prepared rows and directions."""
        directions = snap(directions)
        if self.options.score_precision == "fp16":
            return (rows @ directions.float().half().to(rows).mT).float()
        return snap(rows @ directions.to(rows).mT).float()


def _masked_max(cosines: Tensor, side: Tensor) -> Tensor:
    """Return the largest cosine [C, N, n] among the landmarks of one side, [C, N, K] bool."""
    return cosines.masked_fill(~side[:, :, None], -math.inf).amax(-1)


class _Fitter:
    """The landmarks of equal nodes, and what every binary split needs of them."""

    def __init__(self, centres: Tensor, options: ReblockOptions):
        self.centres = centres
        self.options = options
        self.euclidean = options.distance == "euclidean"
        self.units = centres if self.euclidean else unit(centres)
        self.scale = (
            squared_scale(centres) if self.euclidean else torch.ones_like(centres[..., 0, :1])
        )
        self.distances = None
        if options.seed_rule == "farthest_pair" or options.update_rule == "medoid":
            if self.euclidean:
                differences = centres[..., :, None, :] - centres[..., None, :, :]
                distances = differences.square().sum(-1)
            else:
                distances = 1 - self.units @ self.units.mT
            self.distances = snap(distances, self.scale[..., None])

    def fit(self, weights: Tensor, left_capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the centres [C, N, D] of both sides and the weights [C, N, K] on the left."""
        first, second = self._seeds(weights > 0)
        left, right = self._pick(first), self._pick(second)
        left_weights = weights
        for _ in range(max(1, self.options.proxy_iterations)):
            deltas = self._deltas(left, right)
            ranked = deltas.sort(dim=-1, stable=True).indices
            waiting = weights.gather(-1, ranked)
            room = (left_capacity - waiting.cumsum(-1) + waiting).clamp(min=0)
            left_weights = torch.empty_like(waiting)
            left_weights.scatter_(-1, ranked, torch.minimum(waiting, room))
            if self.options.proxy_iterations == 0:
                break
            left = self._update(left_weights)
            right = self._update(weights - left_weights)
        return left, right, left_weights

    def _seeds(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and second landmark to start from, [C, N] each."""
        count = active.shape[-1]
        lowest = active.int().argmax(-1)
        if self.options.seed_rule == "endpoint_order":
            return lowest, count - 1 - active.int().flip(-1).argmax(-1)
        assert self.distances is not None
        pairs = (active[..., :, None] & active[..., None, :]).triu(1)
        best = self.distances.masked_fill(~pairs, -math.inf).flatten(-2).argmax(-1)
        lonely = active.sum(-1) < 2
        first = torch.where(lonely, lowest, best // count)
        return first, torch.where(lonely, lowest, best % count)

    def _pick(self, index: Tensor) -> Tensor:
        """Return the centres [C, N, D] of the landmarks [C, N]."""
        wide = index[..., None, None].expand(*index.shape, 1, self.centres.shape[-1])
        return self.centres.gather(-2, wide)[..., 0, :]

    def _deltas(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the score [C, N, K] of every landmark; low is left."""
        if self.euclidean:
            along = 2 * (self.centres @ (right - left)[..., None])[..., 0]
            offset = left.square().sum(-1) - right.square().sum(-1)
            return snap(along + offset[..., None], self.scale)
        return snap((self.units @ (unit(right) - unit(left))[..., None])[..., 0])

    def _update(self, weights: Tensor) -> Tensor:
        """Return the weighted mean or medoid [C, N, D] of the landmarks."""
        wide = weights.to(self.centres)
        if self.options.update_rule == "mean":
            return (wide[..., None, :] @ self.centres)[..., 0, :] / wide.sum(-1, keepdim=True)
        assert self.distances is not None
        costs = (self.distances @ wide[..., None])[..., 0] / wide.sum(-1, keepdim=True)
        costs = snap(costs, self.scale).masked_fill(weights == 0, math.inf)
        return self._pick(costs.argmin(-1))


def _route(
    scores: Tensor,
    first_ids: Tensor,
    topology: Sequence[ProxyNode],
    children: int,
    order_mode: str,
) -> Tensor:
    """Send atoms down the binary splits; return their places [C, N, n], child after child.

    Args:
        scores: float32 [C, N, n, m - 1].
        first_ids: int64 [C, N, n], the first token id of every atom.
    """
    everyone = torch.arange(scores.shape[2], device=scores.device)
    members: dict[int, Tensor] = {0: everyone.expand(scores.shape[:-1])}
    for number, node in enumerate(topology):
        places = members[number]
        keys = unique_key(scores[..., number], first_ids).gather(-1, places)
        ranked = places.gather(-1, keys.argsort(-1))
        members[node.left_tag] = ranked[..., : node.left_capacity]
        members[node.right_tag] = ranked[..., node.left_capacity :]
    leaves = [members[-1 - child] for child in range(children)]
    if order_mode == "parent_order":
        leaves = [leaf.sort(-1).values for leaf in leaves]
    return torch.cat(leaves, -1)
