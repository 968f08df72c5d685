"""Routes of packed attention: which video blocks each query block reads exactly.

All of them obey one budget rule: exactly t candidate blocks a row, `plan.select.budget` of the
ratio, ties to the lower index; sinks and the local band come on top.

Source: spec/spark.md section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from solspark.ops.score_blocks import score_blocks, thresholds
from solspark.ops.select_blocks import plan_from_mask, select_blocks
from solspark.plan.layout import PackedLayout
from solspark.types import BLOCK, BlockPlan

LOG2_E = 1.4426950408889634

CHUNK_BYTES = 64 * 2**20
"""FP32 copy of the rows whose means are being tilted."""


@dataclass(frozen=True, eq=False)
class PackedRoute:
    """A plan for the sparse prefix, and how it came about.

    Args:
        plan: BlockPlan of the sparse query rows against all keys.
        mode: what decided: "top_k", "gaussian_moments", "tau_diag", "tau_exact",
            "global_weighted_top_k", "reweighted_top_k", "head_budgets", "explicit" or "hybrid".
        top_k: the budget t of a row, None where the row's own scores decide.
    """

    plan: BlockPlan
    mode: str
    top_k: int | None


def plan_top_k(
    query_means: Tensor,
    key_means: Tensor,
    layout: PackedLayout,
    *,
    top_k: int,
    scale: float,
    local_radius: int = -1,
    mode: str = "top_k",
    impl: str | None = None,
) -> PackedRoute:
    """Read the `top_k` candidates with the largest mean scores a log2(e) qbar . kbar.

    Args:
        query_means: FP32 [B, H, NQ, D] of the sparse prefix.
        key_means: [B, H, NK, D] of all keys.
        layout: the packed layout.
        top_k: t; at least the candidates reads everything.
        scale: softmax scale.
        local_radius: |i - j| <= r is read as well, outside the budget; -1 for none.
        mode: name of the route in the record.
        impl: implementation of score_blocks and select_blocks.
    """
    scores = score_blocks(query_means, key_means, scale=scale, impl=impl)
    plan = _select(scores, layout, top_k=top_k, local_radius=local_radius, impl=impl)
    return PackedRoute(plan, mode, min(top_k, layout.candidates))


def plan_gaussian_moments(
    query_means: Tensor,
    key_means: Tensor,
    layout: PackedLayout,
    *,
    top_k: int,
    scale: float,
    local_radius: int = -1,
    impl: str | None = None,
) -> PackedRoute:
    """Cut at the quantile 1 - t / C of a normal distribution with the candidates' moments.

    cutoff = s qbar . mu + z sqrt(s^2 sum qbar^2 var + 1e-6), s = scale log2(e), mu and var the
    mean and population variance of the candidates' key means; about t blocks a row.

    Args: as `plan_top_k`.
    """
    candidates = layout.candidates
    centroids = key_means[:, :, :candidates].to(query_means.dtype)
    mean = centroids.mean(2)
    variance = centroids.var(2, correction=0)
    slope = scale * LOG2_E
    if top_k >= candidates:
        cutoff = torch.full_like(query_means[..., 0], -math.inf)
    else:
        level = min(max(1.0 - top_k / candidates, 1e-6), 1.0 - 1e-6)
        deviations = NormalDist().inv_cdf(level)
        location = slope * torch.einsum("bhnd,bhd->bhn", query_means, mean)
        spread = torch.einsum("bhnd,bhd->bhn", query_means.square(), variance)
        cutoff = location + deviations * torch.sqrt(slope * slope * spread + 1e-6)
    scores = score_blocks(query_means, key_means, scale=scale, impl=impl)
    plan = _select(scores, layout, cutoff=cutoff, local_radius=local_radius, impl=impl)
    return PackedRoute(plan, "gaussian_moments", min(top_k, candidates))


def plan_tau(
    query_means: Tensor,
    key_means: Tensor,
    key_mean: Tensor,
    key_var: Tensor,
    layout: PackedLayout,
    *,
    tau: float,
    kind: str,
    scale: float,
    local_radius: int = -1,
    impl: str | None = None,
) -> PackedRoute:
    """Read what scores more than mean + tau standard deviations of its row's scores.

    Args:
        query_means, key_means, layout, scale, local_radius, impl: as `plan_top_k`.
        key_mean: FP32 [B, H, D] over all key blocks, each with weight 1.
        key_var: FP32 [B, H, D] population variance.
        tau: standard deviations.
        kind: "diag" drops the covariance between channels, "exact" keeps it.

    Source: spec/sol-bf16.md 1.2.
    """
    statistic = key_var if kind == "diag" else key_means
    cutoff = thresholds(query_means, key_mean, statistic, scale=scale, tau=tau, kind=kind)
    scores = score_blocks(query_means, key_means, scale=scale, impl=impl)
    plan = _select(scores, layout, cutoff=cutoff, local_radius=local_radius, impl=impl)
    return PackedRoute(plan, f"tau_{kind}", None)


def plan_summary_top_k(
    query_means: Tensor,
    keys: Tensor,
    log_mass: Tensor | None,
    parents: Sequence[int],
    layout: PackedLayout,
    *,
    top_k: int,
    scale: float,
    local_radius: int,
    impl: str | None = None,
) -> PackedRoute:
    """Score each query block against its anchor's summaries; the band is outside the budget.

    S = log2(e) (c qbar . ak + lm), qbar rounded to the summaries' dtype.

    Args:
        query_means, layout, top_k, scale, local_radius, impl: as `plan_top_k`.
        keys: [B, P, H, NK, D] summary keys.
        log_mass: FP32 [B, P, H, NK] to add, or None.
        parents: query block -> P.
    """
    rounded = query_means.to(keys.dtype).to(query_means.dtype)
    scores = torch.empty(
        (*query_means.shape[:3], layout.key_blocks),
        dtype=query_means.dtype,
        device=query_means.device,
    )
    first = 0
    for row in range(1, layout.query_blocks + 1):
        if row < layout.query_blocks and parents[row] == parents[first]:
            continue
        parent = parents[first]
        part = score_blocks(rounded[:, :, first:row], keys[:, parent], scale=scale, impl=impl)
        if log_mass is not None:
            part = part + LOG2_E * log_mass[:, parent, :, None]
        scores[:, :, first:row] = part
        first = row
    scores.masked_fill_(_band(layout, local_radius, scores.device), -math.inf)
    plan = _select(scores, layout, top_k=top_k, local_radius=local_radius, impl=impl)
    return PackedRoute(plan, "reweighted_top_k", min(top_k, layout.candidates))


def plan_head_budgets(
    query_means: Tensor,
    key_means: Tensor,
    layout: PackedLayout,
    *,
    budgets: Sequence[int],
    scale: float,
    local_radius: int = -1,
    impl: str | None = None,
) -> PackedRoute:
    """Give every head its own budget of exact candidates.

    Args:
        query_means, key_means, layout, scale, local_radius, impl: as `plan_top_k`.
        budgets: exact candidates a row, one number a head.

    Raises:
        ValueError: when there is not one budget a head.
    """
    heads = query_means.shape[1]
    if len(budgets) != heads:
        raise ValueError(f"head_budgets: expected {heads} numbers, got {len(budgets)}")
    scores = score_blocks(query_means, key_means, scale=scale, impl=impl)
    shape = (*query_means.shape[:3], layout.key_blocks)
    mask = torch.zeros(shape, dtype=torch.bool, device=scores.device)
    for head, budget in enumerate(budgets):
        ranked = scores[:, head, :, : layout.candidates]
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        mask[:, head].scatter_(-1, order[..., :budget], True)
    return plan_explicit(mask, layout, local_radius=local_radius, mode="head_budgets")


def plan_explicit(
    route: Tensor,
    layout: PackedLayout,
    *,
    local_radius: int = -1,
    mode: str = "explicit",
) -> PackedRoute:
    """Follow a given route; sinks and the local band are added.

    Args:
        route: bool or uint8 [B, H, NQ, NK], nonzero where a block is read exactly.
        layout, local_radius: as `plan_top_k`.
        mode: name of the route in the record.

    Raises:
        ValueError: when the shape does not fit the layout.
    """
    expected = (layout.query_blocks, layout.key_blocks)
    if route.ndim != 4 or tuple(route.shape[2:]) != expected:
        raise ValueError(
            f"route: expected [B, H, {expected[0]}, {expected[1]}], got {tuple(route.shape)}"
        )
    if route.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"route: expected bool or uint8, got {route.dtype}")
    mask = route.bool() | _band(layout, local_radius, route.device)
    for first, stop in layout.sinks:
        mask[..., first:stop] = True
    plan = plan_from_mask(mask, query_tokens=layout.sparse_tokens, key_tokens=layout.tokens)
    return PackedRoute(plan, mode, None)


def plan_hybrid(
    query_means: Tensor,
    key_means: Tensor,
    cutoff: Tensor,
    route: Tensor,
    layout: PackedLayout,
    *,
    scale: float,
    local_radius: int = -1,
    impl: str | None = None,
) -> PackedRoute:
    """Cut each row at its own threshold; a row whose threshold is NaN follows the given route.

    Args:
        query_means, key_means, layout, scale, local_radius, impl: as `plan_top_k`.
        cutoff: FP32 [B, H, NQ] in log2 units, NaN where `route` decides.
        route: bool [B, H, NQ, NK].
    """
    scores = score_blocks(query_means, key_means, scale=scale, impl=impl)
    mask = torch.where(cutoff.isnan()[..., None], route.bool(), scores > cutoff[..., None])
    return plan_explicit(mask, layout, local_radius=local_radius, mode="hybrid")


def tilted_means(
    rows: Tensor, anchor: Tensor, *, blocks: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Average each block's rows with the weights of a softmax against one anchor a head.

    w_i = softmax over the block of scale x_i . anchor; mean = sum w_i x_i. A zero anchor gives the
    plain means.

    Args:
        rows: [B, L, H, D]; the first `blocks` complete blocks are averaged.
        anchor: FP32 [B, H, D].
        blocks: blocks to average.
        scale: softmax scale.
        dtype: dtype of the result.

    Returns:
        [B, H, blocks, D].

    Numerics: FP32 (FP64 for float64), rounded once to `dtype`.
    """
    batch, _, heads, dim = rows.shape
    means = torch.empty((batch, heads, blocks, dim), dtype=dtype, device=rows.device)
    step = max(1, CHUNK_BYTES // (batch * BLOCK * heads * dim * anchor.element_size()))
    for first in range(0, blocks, step):
        stop = min(first + step, blocks)
        part = rows[:, first * BLOCK : stop * BLOCK].to(anchor.dtype)
        part = part.unflatten(1, (stop - first, BLOCK))
        logits = scale * torch.einsum("bnihd,bhd->bnih", part, anchor)
        weights = torch.exp(logits - logits.amax(2, keepdim=True))[..., None]
        mean = (part * weights).sum(2) / weights.sum(2)
        means[:, :, first:stop] = mean.transpose(1, 2).to(dtype)
    return means


def global_mean(rows: Tensor, tokens: int) -> Tensor:
    """Average the first `tokens` rows of [B, L, H, D] into FP32 (FP64 for float64) [B, H, D]."""
    work = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return rows[:, :tokens].mean(1, dtype=work)


def _select(
    scores: Tensor,
    layout: PackedLayout,
    *,
    top_k: int | None = None,
    cutoff: Tensor | None = None,
    local_radius: int = -1,
    impl: str | None = None,
) -> BlockPlan:
    """Select from the candidates; sinks and the band come on top."""
    return select_blocks(
        scores,
        thresholds=cutoff,
        top_k=top_k,
        candidates=layout.candidates,
        sinks=layout.sinks,
        local_radius=local_radius,
        query_tokens=layout.sparse_tokens,
        key_tokens=layout.tokens,
        impl=impl,
    )


def _band(layout: PackedLayout, radius: int, device: torch.device) -> Tensor:
    """Return bool [NQ, NK], true where |i - j| <= radius."""
    rows = torch.arange(layout.query_blocks, device=device)
    columns = torch.arange(layout.key_blocks, device=device)
    return (rows[:, None] - columns[None]).abs() <= radius


def density(mode: str, top_k: int | None, layout: PackedLayout) -> dict[str, Any]:
    """Return the geometry and the densities that a budget implies, without the device."""
    sinks = layout.key_blocks - layout.candidates
    return {
        "mode": mode,
        "block": BLOCK,
        "key_blocks": layout.key_blocks,
        "candidate_blocks": layout.candidates,
        "query_blocks": layout.query_blocks,
        "sink_blocks": sinks,
        "target_top_k": top_k,
        "video_density": None if top_k is None else top_k / layout.candidates,
        "packed_density": None if top_k is None else (top_k + sinks) / layout.key_blocks,
    }
