"""Plans of Sol-Attn: by threshold or by budget, from query and key alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solspark._checks import resolve_scale
from solspark.ops import _dispatch
from solspark.ops.pool import Pooled, pool
from solspark.ops.score_blocks import score_blocks, thresholds
from solspark.ops.select_blocks import select_blocks
from solspark.types import BlockPlan, block_count

Range = tuple[int, int]

SCORE_BYTES = 256 * 2**20
"""Block scores in flight; longer calls are planned a few heads at a time."""


def budget(ratio: float, candidates: int) -> int:
    """Return max(1, round(ratio * candidates)), the key blocks that a query block may read.

    Python's round, half to even. No more than there are; none of none.
    """
    return min(candidates, max(1, round(ratio * candidates)))


def count_candidates(key_blocks: int, sinks: Sequence[Range]) -> int:
    """Return how many key blocks are in no sink."""
    covered = {block for first, stop in sinks for block in range(first, stop)}
    return key_blocks - len(covered)


def plan_sol(
    query: Tensor,
    key: Tensor,
    *,
    pooled: Pooled | None = None,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    top_k: int | None = None,
    candidates: int | None = None,
    sinks: Sequence[Range] = (),
    dense_rows: Sequence[Range] = (),
    local_radius: int = 1,
    key_bias: Tensor | None = None,
    impl: str | None = None,
) -> BlockPlan:
    """Plan which key blocks each query block reads exactly: pool, score, select.

        exact(i, j) = r_ij > mean_j(r_ij) + tau * std_j(r_ij), or r_ij among the top_k of row i,
                      or |i - j| <= local_radius, or j in a sink, or i in dense_rows

    Args:
        query: [B, Lq, H, D], any float type.
        key: [B, Lk, H, D], same type.
        pooled: what `pool(query, key, ...)` returned, if the caller has it already.
        scale: factor of the logits; None means D ** -0.5.
        tau: standard deviations above a row's mean score; unused with `top_k`.
        thresh_type: "diag" or "exact", how the standard deviation is taken.
        top_k: blocks a row, instead of a threshold.
        candidates: only key blocks [0, candidates) compete; None means all.
        sinks: key-block ranges (first, stop) that every query block reads, outside the budget.
        dense_rows: query-block ranges (first, stop) that read every key block.
        local_radius: r >= 0 adds the band |i - j| <= r outside the budget; -1 adds none.
        key_bias: as in `pool`; a block whose keys are all masked is never read. Unused when
            `pooled` is given.
        impl: implementation of the operations that have it; the others choose for themselves.

    Returns:
        BlockPlan [B, H, NQ, NK].

    Raises:
        TypeError, ValueError: an argument is not as described.

    Numerics: means and scores in float32 (float64); see `pool`, `score_blocks`, `thresholds`.

    Source: Sol-Attn sections 1.2, 1.3 and 1.11 a.
    """
    if pooled is None:
        pooled = pool(
            query, key, None, key_bias=key_bias, impl=_dispatch.where_available("pool", impl)
        )
    if pooled.query_means is None:
        raise ValueError("pooled.query_means: expected a tensor [B, H, NQ, D], got None")
    batch, query_tokens, heads, head_dim = query.shape
    key_tokens = key.shape[1]
    scale = resolve_scale(scale, head_dim)
    live = pooled.live
    pairs = block_count(query_tokens) * block_count(key_tokens)
    head_bytes = batch * pairs * pooled.query_means.element_size()
    # The common case first: torch.compile then guards a bound on T and not a value of `step`.
    step = heads if heads * head_bytes <= SCORE_BYTES else max(1, SCORE_BYTES // head_bytes)
    parts = []
    for first in range(0, heads, step):
        mine = slice(first, first + step)
        query_means, key_means = pooled.query_means[:, mine], pooled.key_means[:, mine]
        live_here = live if live is None or live.shape[1] == 1 else live[:, mine]
        scores = score_blocks(
            query_means,
            key_means,
            scale=scale,
            impl=_dispatch.where_available("score_blocks", impl),
        )
        limits = None
        if top_k is None:
            limits = thresholds(
                query_means,
                pooled.key_mean[:, mine],
                key_means if thresh_type == "exact" else pooled.key_var[:, mine],
                scale=scale,
                tau=tau,
                kind=thresh_type,
                live=live_here,
                # "exact" thresholds are matrix products and have no kernel of their own.
                impl=_dispatch.where_available(
                    "thresholds", impl if thresh_type == "diag" else None
                ),
            )
        parts.append(
            select_blocks(
                scores,
                thresholds=limits,
                top_k=top_k,
                candidates=candidates,
                sinks=sinks,
                dense_rows=dense_rows,
                local_radius=local_radius,
                live=live_here,
                query_tokens=query_tokens,
                key_tokens=key_tokens,
                impl=_dispatch.where_available("select_blocks", impl),
            )
        )
    if len(parts) == 1:
        return parts[0]
    return BlockPlan(
        torch.cat([part.bits for part in parts], 1),
        torch.cat([part.indices for part in parts], 1),
        torch.cat([part.counts for part in parts], 1),
        query_tokens,
        key_tokens,
    )
