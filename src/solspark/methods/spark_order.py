"""The order of the video tokens: features, trees, and which side follows which."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark.methods.reblock import PreparedLandmarkTreeV2Permutation
from solspark.methods.spark_config import TREE_OPTIONS, ReblockConfig
from solspark.ops.reblock import inverse_norms, squared_norms
from solspark.ops.second_moments import reblock_features
from solspark.types import BLOCK, TokenGrid

SIDES = {"independent": ("key", "query"), "q_from_k": ("key",), "k_from_q": ("query",)}
"""Layout reuse -> the sides whose trees are grown, keys first."""


@dataclass(frozen=True, eq=False)
class Orders:
    """Say which video token stands at each position.

    Args:
        query: int [B, H, V], gather form: position i holds token query[..., i].
        key: int [B, H, V], for K and V; the same storage as `query` under layout reuse.
        facts: what a report says about the trees.
    """

    query: Tensor
    key: Tensor
    facts: dict[str, Any]


def plan_orders(
    query: Tensor,
    key: Tensor,
    grid: TokenGrid,
    config: ReblockConfig,
    cache: MutableMapping[Any, Any],
    *,
    impl: str | None = None,
) -> Orders:
    """Grow a landmark tree over the features of each side that needs one.

    X_K = K L_Q and X_Q = Q L_K, with L the factor of the other side's second moment: tokens stand
    together that the other side cannot tell apart.

    Args:
        query, key: [B, T, H, D]; only the first V = grid.tokens rows are read.
        grid: the video's raster.
        config: all options.
        cache: keeps the prepared plan between calls.
        impl: implementation of the trees.

    Returns:
        Orders, valid until the next call that uses the same cached plan.

    Source: spec/spark.md section 2.
    """
    video = grid.tokens
    rows = (query[:, :video], key[:, :video])
    sides = SIDES[config.layout_reuse]
    plan = _prepared(query, grid, config, cache, impl)
    shape = (len(sides), query.shape[0], query.shape[2], video, query.shape[3])
    buffer = plan.acquire_graph_input(query.dtype).view(shape) if config.cuda_graph else None
    frozen = config.freezes_remainder and bool(video % BLOCK)
    squares = None
    if not frozen and all(config.m2_side in ("both", side) for side in sides):
        # The transform has the finished rows at hand, so their norms cost no pass of their own.
        squares = plan.graph_squares
    features = _features(rows, grid, config, config.m2_side, config.m2_estimator, buffer, squares)
    excluded = norms = None
    if frozen:
        baseline = _features(rows, grid, config, "both", "hilbert_midpoint", None, None)
        excluded = _largest(baseline, video % BLOCK)
        del baseline
    if config.mean_mode == "input_unit":
        both = {"query": rows[0], "key": rows[1]}
        norms = torch.cat(
            [inverse_norms(both[side].transpose(1, 2)).flatten(0, 1) for side in sides]
        )
    result = plan.run(
        features,
        excluded_indices=excluded,
        input_inverse_norms=norms,
        squares=squares,
        allow_cuda_graph=config.cuda_graph,
    )
    found = result.permutation.view(shape[:4])
    facts = {
        "layout_reuse": config.layout_reuse,
        "excluded_tokens": video % BLOCK,
        "cuda_graph": plan.graph_active,
        **result.hierarchy.metadata,
    }
    return Orders(found[-1], found[0], facts)


def _features(
    rows: tuple[Tensor, Tensor],
    grid: TokenGrid,
    config: ReblockConfig,
    m2_side: str,
    estimator: str,
    buffer: Tensor | None,
    squares: Tensor | None,
) -> Tensor:
    """Return the features [sides * B * H, V, D], keys before queries, in one piece of memory.

    squares: float32 [sides * B * H, V] that takes their squared norms.
    """
    query, key = rows
    batch, video, heads, dim = query.shape
    sides = len(SIDES[config.layout_reuse])
    if buffer is None:
        buffer = query.new_empty((sides, batch, heads, video, dim))
    reblock_features(
        query,
        key,
        grid=grid,
        m2_side=m2_side,
        layout_reuse=config.layout_reuse,
        estimator=estimator,
        mode=config.moment_mode,
        ridge=config.ridge,
        factor=config.m2_factor,
        out=buffer,
        squares=None if squares is None else squares.view(buffer.shape[:-1]),
    )
    return buffer.view(sides * batch * heads, video, dim)


def _largest(features: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` rows with the largest norms; equal ones: the lower id."""
    order = squared_norms(features).argsort(dim=-1, descending=True, stable=True)
    return order[:, :count]


def _prepared(
    like: Tensor,
    grid: TokenGrid,
    config: ReblockConfig,
    cache: MutableMapping[Any, Any],
    impl: str | None,
) -> PreparedLandmarkTreeV2Permutation:
    """Return the prepared plan for these shapes and options, from the cache if it is there."""
    batch, _, heads, dim = like.shape
    name = ("reblock", config, batch, heads, dim, grid, like.device, like.dtype, impl)
    if name not in cache:
        options = {option: getattr(config, option) for option in TREE_OPTIONS}
        cache[name] = PreparedLandmarkTreeV2Permutation(
            batch=len(SIDES[config.layout_reuse]) * batch * heads,
            tokens=grid.tokens,
            dim=dim,
            grid_shape=grid,
            device=like.device,
            dtype=like.dtype,
            seed_rule=config.proxy_seed_rule,
            update_rule=config.proxy_update_rule,
            return_inverse=False,
            compact_indices=True,
            static_outputs=True,
            impl=impl,
            **options,
        )
    return cache[name]
