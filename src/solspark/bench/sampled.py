"""Evaluates sparse attention on a sample of query rows alone: its definition, in float64.

The plan is made of all rows by the operations themselves; what a row then reads is computed from
the definition, so a figure costs a few rows and not T of them. It differs from the implementation's
by rounding alone, which a test holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark._checks import resolve_scale
from solspark.bench.gate import RowSample, attend_rows, exact_blocks_of_rows, mean_tail
from solspark.bench.inputs import Inputs
from solspark.bench.packed_gate import can_follow, definition_rows, route_plan
from solspark.methods.spark_config import PackedConfig
from solspark.methods.spark_order import Orders, plan_orders
from solspark.ops.permute import permute
from solspark.plan.layout import PackedLayout
from solspark.plan.select import budget, plan_sol
from solspark.types import BLOCK, block_count

SOL_OPTIONS = frozenset({"tau", "topk_ratio", "thresh_type", "local_radius", "tail"})
WORDS = "the definition, on sampled rows in float64"


@dataclass(frozen=True)
class Sampled:
    """Hold what a method gives for the rows of a sample.

    Args:
        rows: float64 [heads of the sample, R, D].
        density: share of block pairs that the sparse rows read exactly.
    """

    rows: Tensor
    density: float


def knows_sol(options: dict[str, Any]) -> bool:
    """Say whether `sampled_sol` knows all of a call's options."""
    return SOL_OPTIONS.issuperset(options) and options.get("tail") != "block8x8"


def sampled_sol(inputs: Inputs, sample: RowSample, options: dict[str, Any]) -> Sampled:
    """Return what `sol_attn` gives for sampled rows, the context being a sink.

    Args:
        inputs: of the call.
        sample: rows and heads.
        options: of `sol_attn`, those that `knows_sol` knows.
    """
    blocks = block_count(inputs.key.shape[1])
    first = inputs.problem.sink_start // BLOCK
    known = {name: value for name, value in options.items() if name not in ("tail", "topk_ratio")}
    if options.get("topk_ratio") is not None:
        known["top_k"] = budget(options["topk_ratio"], first)
    plan = plan_sol(inputs.query, inputs.key, sinks=[(first, blocks)], **known)
    tail = options.get("tail", "query")
    rows = []
    for head in sample.heads:
        query, key, value = (x[0, :, head] for x in (inputs.query, inputs.key, inputs.value))
        means = None
        if tail != "none":
            per_block = tail == "block"
            means = mean_tail(query, key, value, sample.rows, per_block=per_block, rounded=True)
        exact = exact_blocks_of_rows(plan, sample.rows, 0, head)
        scale = resolve_scale(None, query.shape[1])
        rows.append(
            attend_rows(query[sample.rows], key, value, scale=scale, exact=exact, tail=means)
        )
    return Sampled(torch.stack(rows), float(plan.counts.double().mean()) / blocks)


def knows_packed(config: PackedConfig) -> bool:
    """Say whether `sampled_packed` knows a configuration."""
    return can_follow(config)


def sampled_packed(inputs: Inputs, sample: RowSample, config: PackedConfig) -> Sampled:
    """Return what `packed_attention` gives for sampled rows, in the order of the inputs.

    Args:
        inputs: of the call.
        sample: rows and heads; rows are those of the inputs, wherever an order puts them.
        config: options that `knows_packed` knows.
    """
    layout = PackedLayout(inputs.query.shape[1], inputs.problem.video_tokens)
    orders = _orders(inputs, config)
    rows, density = [], []
    for head in sample.heads:
        here = slice(head, head + 1)
        query, key, value = (x[:, :, here] for x in (inputs.query, inputs.key, inputs.value))
        places = sample.rows
        if orders is not None:
            by_query, by_key = orders.query[:, here], orders.key[:, here]
            query, key, value = (
                permute(query, by_query),
                permute(key, by_key),
                permute(value, by_key),
            )
            inside = sample.rows < layout.video_tokens
            served = by_query[0, 0].long().argsort()
            places = torch.where(
                inside, served[sample.rows.clamp(max=layout.video_tokens - 1)], sample.rows
            )
        plan = route_plan(query, key, layout, config, None)
        density.append(float(plan.counts.double().mean()) / layout.key_blocks)
        rows.append(definition_rows(query, key, value, places, plan, layout, config, False))
    return Sampled(torch.stack(rows), sum(density) / len(density))


def _orders(inputs: Inputs, config: PackedConfig) -> Orders | None:
    """Return the orders of queries and keys, planned once for each way of reblocking."""
    if config.reblock is None:
        return None
    key = ("orders", config.reblock)
    if key not in inputs._cache:
        grid = inputs.problem.grid
        inputs._cache[key] = plan_orders(inputs.query, inputs.key, grid, config.reblock, {})
    return inputs._cache[key]
