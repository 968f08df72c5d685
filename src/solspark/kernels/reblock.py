"""The landmark tree: level by level, equal-sized nodes of all trees together.

A level takes a fit (tree_fit), a score (tree_score) and one routing launch a depth (tree_route) for
each group of nodes of similar size; long nodes are routed by many programs each (tree_spread).
Features are read once a level; directions and scores, which travel between the launches, are a
sixteenth to a quarter of that. Everything is enqueued from sizes known beforehand: no host sync,
and the whole can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tree_fit import launch_landmark_means, launch_tree_fit
from .tree_route import REGISTER_TOKENS, launch_tree_route
from .tree_score import launch_tree_score
from .tree_spread import launch_tree_spread

SPREAD_BELOW = 512
"""With fewer nodes than this the splits of a depth get a program each: 132 SMs, 4 programs each."""


@dataclass(frozen=True, eq=False)
class NodeGroup:
    """Nodes of one level that are launched together.

    Args:
        nodes: int32 [N, 2] on the device, (start, size) in tokens.
        splits: int32 [N, S, 3], (offset in the node, size, left capacity) in tokens of every split
            of the heap; size 0 is a hole. S is a power of two, the last entry is unused.
        sizes: the longest segment of each depth of the heap, in tokens.
    """

    nodes: Tensor
    splits: Tensor
    sizes: tuple[int, ...]


@triton.jit(do_not_specialize=["tokens", "tiles"])
def finish_kernel(
    order_ptr, permutation_ptr, inverse_ptr, tokens, tiles,
    TILE: tl.constexpr, INVERSE: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    tree = pid // tiles
    i = (pid % tiles) * TILE + tl.arange(0, TILE)
    live = i < tokens
    token = tl.load(order_ptr + tree * tokens + i, mask=live, other=0)
    out = permutation_ptr.dtype.element_ty
    tl.store(permutation_ptr + tree * tokens + i, token.to(out), mask=live)
    if INVERSE:
        tl.store(inverse_ptr + tree * tokens + token, i.to(out), mask=live)


def launch_finish(order: Tensor, dtype: torch.dtype, inverse: bool) -> tuple[Tensor, Tensor | None]:
    """Enqueue the permutation [R, T] in its index type, and its inverse if asked."""
    trees, tokens = order.shape
    permutation = torch.empty(trees, tokens, dtype=dtype, device=order.device)
    other = torch.empty_like(permutation) if inverse else None
    tiles = triton.cdiv(tokens, 1024)
    finish_kernel[(trees * tiles,)](
        order, permutation, other, tokens, tiles, TILE=1024, INVERSE=inverse, num_warps=4
    )
    return permutation, other


def launch_reblock(
    x: Tensor, squares: Tensor, gain: Tensor | None, order: Tensor,
    levels: Sequence[Sequence[NodeGroup]], *, landmarks: int, means: bool, iterations: int,
    endpoints: bool, euclidean: bool, direction_dtype: torch.dtype,
) -> None:
    """Enqueue all levels; `order` is changed in place.

    x: [R, T, D], last stride 1. squares: float32 [R, T], squared norms. gain: float32 [R, T] that
    centres are multiplied by, or None. order: int32 [R, T], the excluded tokens already at the end.
    levels: the groups of every level, root first.
    """
    trees, tokens, _ = x.shape
    groups = [group for level in levels for group in level]
    if not groups:
        return
    widest = max(group.splits.shape[1] for group in groups)
    scratch = torch.empty(trees * tokens * widest, device=x.device)
    for group in groups:
        count, slots = group.splits.shape[:2]
        nodes, splits, largest = group.nodes, group.splits, group.sizes[0]
        scores = scratch[: trees * tokens * slots].view(trees, tokens, slots)
        own = min(landmarks, largest)
        centres = launch_landmark_means(x, gain, order, nodes, own) if means else None
        directions, offsets = launch_tree_fit(
            x, centres, squares, None if means else gain, order, nodes, splits,
            landmarks=own, iterations=iterations, endpoints=endpoints, euclidean=euclidean,
            direction_dtype=direction_dtype, spread=trees * count < SPREAD_BELOW,
        )
        launch_tree_score(x, squares, order, nodes, largest, directions, offsets, scores)
        if largest > REGISTER_TOKENS:
            launch_tree_spread(order, scores, nodes, splits, largest, linear=not euclidean)
        else:
            launch_tree_route(order, scores, nodes, splits, group.sizes)


def launch_remainder(squares: Tensor, order: Tensor, nodes: Tensor, splits: Tensor) -> None:
    """Enqueue the move of the tokens with the largest squared norms to the end of `order`.

    squares: float32 [R, T]. order: int32 [R, T], changed in place, both parts keep their order.
    nodes: int32 [1, 2] = (0, T). splits: int32 [1, 2, 3], whose first is (0, T, tokens to move).
    """
    launch_tree_spread(
        order, squares[..., None], nodes, splits, order.shape[1], linear=False, remainder=True
    )
