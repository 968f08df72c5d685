"""Judges packed attention on sampled rows under its own order, route and summaries.

Order and route are planned once more by the operations themselves, which are deterministic; what
they lead to is then computed in float64 from the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solspark.bench.case import judge_near
from solspark.bench.gate import (
    Tail,
    Verdict,
    attend_rows,
    block_means,
    compare,
    exact_blocks_of_rows,
    mean_tail,
)
from solspark.bench.inputs import Inputs
from solspark.methods.spark_config import PackedConfig
from solspark.methods.spark_order import plan_orders
from solspark.ops import _dispatch
from solspark.ops.permute import permute
from solspark.ops.pool import pool
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import plan_tau, plan_top_k
from solspark.plan.select import budget
from solspark.reference.reweight import reweight
from solspark.types import BLOCK, BlockPlan

ONE_ANCHOR = 99
"""Levels up that always reach the root: one anchor for the whole sparse prefix."""


def can_follow(config: PackedConfig) -> bool:
    """Say whether the oracle knows a configuration: presets, plain Sol and their ablations do."""
    plain = config.virtual_query_levels_up is None and config.virtual_query_target_blocks is None
    return (
        config.route_score == "native_mean"
        and config.topk_cutoff_mode == "gemm_radix"
        and not config.global_weighted_mean
        and config.head_budgets is None
        and config.tail_granularity in ("query", "none")
        and config.video_tail_mode == "dense"
        and (plain or config.virtual_query_levels_up == ONE_ANCHOR)
    )


def judge_packed(inputs: Inputs, out: Tensor, config: PackedConfig, impl: str | None) -> Verdict:
    """Judge [1, T, H, D] against float64 on the sampled rows.

    Args:
        inputs: what was attended to.
        out: the result.
        config: its options; one that `can_follow` does not know is judged by its distance to dense.
        impl: the implementation that was asked for.

    Returns:
        The verdict over sparse rows and rows of the dense suffix together.
    """
    if not can_follow(config):
        return judge_near(inputs, out, 1.0)
    layout = PackedLayout(inputs.query.shape[1], inputs.problem.video_tokens)
    orders = None
    if config.reblock is not None:
        found = plan_orders(
            inputs.query,
            inputs.key,
            inputs.problem.grid,
            config.reblock,
            {},
            impl=_dispatch.where_available("reblock", impl),
        )
        orders = (found.query, found.key)
    got, oracle, rounding = [], [], []
    rows = inputs.sample.rows
    for head in inputs.sample.heads:
        here = slice(head, head + 1)
        query, key, value = (x[:, :, here] for x in (inputs.query, inputs.key, inputs.value))
        places = rows
        if orders is not None:
            by_query, by_key = orders[0][:, here], orders[1][:, here]
            query, key, value = (
                permute(query, by_query),
                permute(key, by_key),
                permute(value, by_key),
            )
            inside = rows < layout.video_tokens
            places = torch.where(
                inside, by_query[0, 0].long()[rows.clamp(max=layout.video_tokens - 1)], rows
            )
        plan = route_plan(query, key, layout, config, impl)
        for rounded, target in ((False, oracle), (True, rounding)):
            target.append(definition_rows(query, key, value, rows, plan, layout, config, rounded))
        got.append(out[0, places, head])
    return compare(torch.stack(got), torch.stack(oracle), torch.stack(rounding), out.dtype)


def route_plan(
    query: Tensor, key: Tensor, layout: PackedLayout, config: PackedConfig, impl: str | None
) -> BlockPlan:
    """Return the route of one head's sparse prefix."""
    chosen = _dispatch.where_available("select_blocks", impl)
    pooled = pool(
        query[:, : layout.sparse_tokens], key, None, impl=_dispatch.where_available("pool", impl)
    )
    assert pooled.query_means is not None
    common: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5,
        "local_radius": config.local_radius,
        "impl": chosen,
    }
    if config.topk_ratio is None:
        return plan_tau(
            pooled.query_means,
            pooled.key_means,
            pooled.key_mean,
            pooled.key_var,
            layout,
            tau=config.tau,
            kind=config.thresh_type,
            **common,
        ).plan
    top_k = budget(config.topk_ratio, layout.candidates)
    return plan_top_k(pooled.query_means, pooled.key_means, layout, top_k=top_k, **common).plan


def definition_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    plan: BlockPlan,
    layout: PackedLayout,
    config: PackedConfig,
    rounded: bool,
) -> Tensor:
    """Return float64 [R, D]: what packed attention gives for rows of one head [1, T, 1, D], all in
    serving order; rounded: with the arithmetic of a kernel in the inputs' type.
    """
    q, k, v = query[0, :, 0], key[0, :, 0], value[0, :, 0]
    sparse = rows < layout.sparse_tokens
    dtype = q.dtype
    common: dict[str, Any] = {
        "scale": q.shape[-1] ** -0.5,
        "dtype": torch.float32 if rounded and dtype != torch.float64 else torch.float64,
        "round_to": dtype if rounded else None,
    }
    result = torch.empty(len(rows), q.shape[-1], dtype=torch.float64, device=q.device)
    chosen = rows[sparse]
    tail = None
    if config.tail_granularity == "query":
        tail = _tail(query, key, value, chosen, layout, config, rounded)
    exact = exact_blocks_of_rows(plan, chosen, 0, 0)
    result[sparse] = attend_rows(q[chosen], k, v, exact=exact, tail=tail, **common).double()
    result[~sparse] = attend_rows(q[rows[~sparse]], k, v, **common).double()
    return result


def _tail(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    layout: PackedLayout,
    config: PackedConfig,
    rounded: bool,
) -> Tail:
    """Return the summaries of one head: block means, or reweighted around the mean sparse query."""
    q, k, v = query[0, :, 0], key[0, :, 0], value[0, :, 0]
    if config.virtual_query_levels_up is None:
        return mean_tail(q, k, v, rows, per_block=False, rounded=rounded)
    anchor = block_means(q[: layout.candidates * BLOCK]).mean(0)
    work = q.dtype if rounded else torch.float64
    keys, values, mass = reweight(
        anchor.to(work)[None, None, None],
        key.to(work),
        value.to(work),
        summary_math=config.summary_math,
        logmass_key=config.logmass_key,
        reweight_components=config.reweight_components,
    )
    return Tail(keys[0, 0].double(), values[0, 0].double(), mass[0, 0].double())
