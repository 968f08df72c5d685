"""Spark: packed attention over reordered video tokens, with summaries reweighted around anchors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from solspark import _checks
from solspark.errors import UnsupportedError
from solspark.methods.sol import mean_summaries
from solspark.methods.spark_config import (
    PRESETS,
    RESOLVED_EXECUTIONS,
    PackedConfig,
    ReblockConfig,
)
from solspark.methods.spark_order import plan_orders
from solspark.ops import _dispatch
from solspark.ops.anchors import anchors
from solspark.ops.block_sparse_attention import block_sparse_attention
from solspark.ops.permute import permute, unpermute
from solspark.ops.pool import Pooled, pool
from solspark.ops.reweight import reweight
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import (
    PackedRoute,
    density,
    global_mean,
    plan_explicit,
    plan_gaussian_moments,
    plan_head_budgets,
    plan_summary_top_k,
    plan_tau,
    plan_top_k,
    tilted_means,
)
from solspark.plan.select import budget
from solspark.plan.virtual_queries import VirtualQueries, choose_virtual_queries
from solspark.types import BLOCK, BlockPlan, BlockSummaries, TokenGrid, block_count

__all__ = [
    "PRESETS",
    "RESOLVED_EXECUTIONS",
    "PackedConfig",
    "PackedRecord",
    "ReblockConfig",
    "packed_attention",
    "spark_reweight",
]

SUMMARY_BYTES = 2**30
"""Summaries of as many virtual queries as fit here exist at one time."""

REORDER_BYTES = 3 * 2**29
"""Reordered copies of Q, K and V (one head at least) exist at one time within this."""

Dense = Callable[[Tensor, Tensor, Tensor], Tensor]
Cache = MutableMapping[Any, Any]


def spark_reweight(
    a: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    summary_math: str = "tensorcore",
    logmass_key: str = "stored",
    reweight_components: str = "full",
) -> tuple[Tensor, Tensor, Tensor]:
    """Summarise every 64-token key block for every anchor by one key, one value and one log mass.

    With c = 1 / sqrt(D), for the n real tokens of a block::

        z_i = c a . k_i,   w = softmax(z)
        ak = sum w_i k_i,   av = sum w_i v_i,   lm = log sum exp(z_i) - c a . ak

    so that c q . ak + lm is the tangent of log sum exp(c q . k_i) at q = a.

    Args:
        a: anchors [B, P, H, D], dtype of k or float32, any strides.
        k: keys [B, T, H, D], float16 or bfloat16, also float32 and float64; any strides.
        v: values, as k.
        summary_math: "tensorcore" rounds the weights to k's dtype before the weighted sums;
            "comfy_fp32" keeps them in FP32 (not for float16).
        logmass_key: "stored" subtracts the rounded key that is returned, "pre_round" the FP32 one.
        reweight_components: "full"; "weights_only" (lm = log n); "bias_only" (plain means, lm
            around the mean key); "none" (plain means, lm = log n).

    Returns:
        ak, av: [B, P, H, N, D] in k's dtype, N = ceil(T / 64); lm: float32 [B, P, H, N].

    Raises:
        ValueError: for tensors that do not fit each other, empty ones, or unknown switches.

    Numerics: scores, weights and sums in FP32, ak and av rounded once.

    Source: spec/spark.md section 3.
    """
    if summary_math == "comfy_fp32" and k.dtype == torch.float16:
        raise ValueError("k: comfy_fp32 expected bfloat16, got float16")
    return reweight(
        a,
        k,
        v,
        summary_math=summary_math,
        logmass_key=logmass_key,
        reweight_components=reweight_components,
    )


@dataclass(frozen=True, eq=False)
class PackedRecord:
    """Say what one call of `packed_attention` did. Reading a delivered density waits for the
    device.

    Args:
        layout: where candidates, sinks and the dense suffix lie.
        route: "dense" when no block was sparse, else what decided, as in `PackedRoute.mode`.
        requested_execution: the `topk_execution` asked for; None under tau routing.
        resolved_execution: what it resolved to: "exact_top_k" for every top-k name, "dense", or
            the route itself.
        figures: geometry and budgeted densities, known without the device.
        exact_pairs: int64 scalars, block pairs read exactly, one for each group of heads.
        total_pairs: block pairs of the sparse rows against all keys.
        implementations: operation -> implementation that served it.
        counters: inner calls by kind.
        virtual_queries: facts of the anchors' layout; None without virtual queries.
        reblock: facts of the reordering; None without.
    """

    layout: PackedLayout
    route: str
    requested_execution: str | None
    resolved_execution: str
    figures: dict[str, Any] = field(default_factory=dict)
    exact_pairs: tuple[Tensor, ...] = ()
    total_pairs: int = 0
    implementations: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    virtual_queries: dict[str, Any] | None = None
    reblock: dict[str, Any] | None = None

    @property
    def density(self) -> float:
        """Return the delivered share of block pairs that the sparse rows read exactly."""
        if not self.total_pairs:
            return 1.0
        return sum(int(pairs) for pairs in self.exact_pairs) / self.total_pairs

    @property
    def video_density(self) -> float:
        """Return the delivered share of candidate blocks, without the sinks."""
        if not self.total_pairs:
            return 1.0
        blocks, candidates = self.layout.key_blocks, self.layout.candidates
        rows = self.total_pairs // blocks
        exact = sum(int(pairs) for pairs in self.exact_pairs) - rows * (blocks - candidates)
        return exact / (rows * candidates)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    video_tokens: int,
    grid: TokenGrid | None,
    config: PackedConfig,
    dense: Dense | None = None,
    route: Tensor | None = None,
    cache: Cache | None = None,
    impl: str | None = None,
) -> tuple[Tensor, PackedRecord]:
    """Attend sparsely from video to video, and exactly from and to everything else.

    The video rows are reordered (option `reblock`), cut into blocks of 64, and every block reads
    exactly the key blocks of its route, all context blocks, and one summary of each other block;
    rows after the sparse prefix attend densely to all keys; the order is undone.

    Args:
        query, key, value: [B, T, H, D], video rows in raster order first, context rows after;
            float16, bfloat16, float32 or float64, any strides.
        video_tokens: V.
        grid: the video's raster, V = frames * height * width; needed by `reblock` only.
        config: all options.
        dense: attention (q, k, v) -> out on [B, L, H, D] for the dense rows; by default torch's
            scaled_dot_product_attention.
        route: bool or uint8 [B, H, NQ, NK], an explicit route in place of the configured one.
        cache: keeps plans and topologies between calls; the owner clears it.
        impl: implementation of the sparse attention ("eager", "triton", "hopper"); None for the
            best that can serve.

    Returns:
        out [B, T, H, D] and what the call did.

    Raises:
        ValueError, TypeError: for tensors or options that do not fit.
        UnsupportedError: when `impl` cannot serve, or gradients are asked for.

    Numerics: those of `pool`, `score_blocks`, `reweight` and `block_sparse_attention`.

    Source: spec/spark.md sections 2-5, spec/h3.md section 3.3.
    """
    _check_inputs(query, key, value, video_tokens, grid, config)
    layout = PackedLayout(query.shape[1], video_tokens, config.video_tail_mode)
    cache = {} if cache is None else cache
    dense = _default_dense if dense is None else dense
    requested = None if config.topk_ratio is None else config.topk_execution
    if layout.candidates == 0:
        # Not one complete video block: nothing may be skipped.
        record = PackedRecord(
            layout, "dense", requested, "dense", counters={"dense_no_complete_block": 1}
        )
        return dense(query, key, value), record

    calls = _Calls(query, layout, config, dense, cache, impl)
    with torch.no_grad(), _dispatch.collect_records() as records:
        if config.reblock is None:
            parts = calls.attend(query, key, value, route)
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        else:
            assert grid is not None
            out = calls.attend_reordered(query, key, value, grid, route)
    resolved = calls.mode
    if requested is not None and calls.mode in EXACT_TOP_K:
        resolved = "exact_top_k"
    rows = query.shape[0] * query.shape[2] * layout.query_blocks
    return out, PackedRecord(
        layout=layout,
        route=calls.mode,
        requested_execution=requested,
        resolved_execution=resolved,
        figures=density(calls.mode, calls.top_k, layout),
        exact_pairs=tuple(calls.exact_pairs),
        total_pairs=rows * layout.key_blocks,
        implementations={record.operation: record.implementation for record in records},
        counters=dict(calls.counters),
        virtual_queries=None if calls.topology is None else calls.topology.metadata,
        reblock=calls.reblock_facts,
    )


EXACT_TOP_K = ("top_k", "global_weighted_top_k", "reweighted_top_k")
"""Routes that deliver exactly their budget."""


class _Calls:
    """One call of packed attention: its options, and what happened so far."""

    def __init__(
        self,
        like: Tensor,
        layout: PackedLayout,
        config: PackedConfig,
        dense: Dense,
        cache: Cache,
        impl: str | None,
    ):
        self.layout = layout
        self.config = config
        self.dense = dense
        self.cache = cache
        self.impl = impl
        self.scale = 1.0 / math.sqrt(like.shape[-1])
        self.mode = "dense"
        self.top_k: int | None = None
        self.exact_pairs: list[Tensor] = []
        self.counters: Counter[str] = Counter()
        self.reblock_facts: dict[str, Any] | None = None
        self.topology = self._topology() if config.uses_virtual_queries else None

    def operation(self, name: str) -> str | None:
        """Return the implementation asked for, where the operation has it."""
        return _dispatch.where_available(name, self.impl)

    def attend_reordered(
        self, query: Tensor, key: Tensor, value: Tensor, grid: TokenGrid, route: Tensor | None
    ) -> Tensor:
        """Reorder, attend and undo, a few heads at a time: copies of all heads would cost 4 GiB."""
        reblock, layout = self.config.reblock, self.layout
        assert reblock is not None
        orders = plan_orders(query, key, grid, reblock, self.cache, impl=self.operation("reblock"))
        self.counters["reblock"] += 1
        self.reblock_facts = orders.facts
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        batch, tokens, heads, dim = query.shape
        head_bytes = 3 * batch * tokens * dim * query.element_size()
        groups = -(-heads // max(1, REORDER_BYTES // head_bytes))
        step = -(-heads // groups)
        for first in range(0, heads, step):
            here = slice(first, min(first + step, heads))
            q = permute(query[:, :, here], orders.query[:, here])
            k = permute(key[:, :, here], orders.key[:, here])
            v = permute(value[:, :, here], orders.key[:, here])
            parts = self.attend(q, k, v, None if route is None else route[:, here], head=first)
            del q, k, v
            video = parts[0]
            if len(parts) > 1:
                # The last video rows may be dense; in the ten-second shape none are: no copy.
                rest = layout.video_tokens - layout.dense_start
                video = torch.cat([video, parts[1][:, :rest]], dim=1) if rest else video
                out[:, layout.video_tokens :, here] = parts[1][:, rest:]
            out[:, : layout.video_tokens, here] = unpermute(video, orders.query[:, here])
        return out

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, route: Tensor | None, head: int = 0
    ) -> list[Tensor]:
        """Attend in the given order; return rows [0, dense_start) and, if any, the dense rest."""
        layout, config = self.layout, self.config
        prefix = self._prefix(query)
        pooled = self._pool(prefix, key, value)
        summaries = None
        if config.route_score != "native_mean":
            # The route reads the summaries of every row, so they cannot be chunked.
            assert self.topology is not None and pooled.query_means is not None
            every = (0, self.topology.parents_within(layout.query_blocks))
            summaries = self._summaries(pooled.query_means, key, value, *every)
        chosen = self._route(prefix, key, pooled, summaries, route, head)
        self.mode, self.top_k = chosen.mode, chosen.top_k
        self.exact_pairs.append(chosen.plan.counts.sum())

        sparse = []
        for rows, part, plan in self._parts(prefix, key, value, pooled, summaries, chosen.plan):
            result = block_sparse_attention(
                prefix[:, rows],
                key,
                value,
                plan,
                summaries=part,
                scale=self.scale,
                tail=config.tail_granularity,
                kv_splits=config.kv_splits,
                impl=self.impl,
            )
            assert isinstance(result, Tensor)
            sparse.append(result)
            self.counters["sparse_core"] += 1
        joined = sparse[0] if len(sparse) == 1 else torch.cat(sparse, dim=1)
        found = [joined[:, : layout.dense_start]]
        if layout.dense_start < layout.tokens:
            found.append(self.dense(query[:, layout.dense_start :], key, value))
            self.counters["dense_context"] += 1
        return found

    def _topology(self) -> VirtualQueries:
        """Return the virtual queries of this layout; they depend on integers alone."""
        config = self.config
        tree = config.reblock or ReblockConfig()
        rule = config.virtual_query_rule
        name = ("virtual_queries", self.layout, tree, rule)
        if name not in self.cache:
            hierarchy = tree.options.hierarchy(self.layout.candidates)
            levels_up, target, low, high = rule
            self.cache[name] = choose_virtual_queries(
                self.layout.tokens,
                hierarchy.levels,
                levels_up=levels_up,
                target_blocks=target,
                min_blocks=low,
                max_blocks=high,
            )
        return self.cache[name]

    def _prefix(self, query: Tensor) -> Tensor:
        """Return the sparse query rows; "pad" fills the mixed block with the mean of its video."""
        layout = self.layout
        if layout.sparse_tokens <= layout.video_tokens:
            return query[:, : layout.sparse_tokens]
        work = _checks.accumulation_dtype(query.dtype)
        video = query[:, layout.candidates * BLOCK : layout.video_tokens]
        mean = video.mean(1, keepdim=True, dtype=work).to(query.dtype)
        missing = layout.sparse_tokens - layout.video_tokens
        return torch.cat([query[:, : layout.video_tokens], mean.expand(-1, missing, -1, -1)], dim=1)

    def _pool(self, prefix: Tensor, key: Tensor, value: Tensor) -> Pooled:
        """Pool what the route needs, and the values where plain means are the summaries."""
        config = self.config
        means = self.topology is None and config.tail_granularity in ("query", "block")
        return pool(prefix, key, value if means else None, impl=self.operation("pool"))

    def _route(
        self,
        prefix: Tensor,
        key: Tensor,
        pooled: Pooled,
        summaries: BlockSummaries | None,
        route: Tensor | None,
        head: int,
    ) -> PackedRoute:
        """Decide by the one rule that the options name."""
        config, layout = self.config, self.layout
        radius = config.local_radius
        common: dict[str, Any] = {"scale": self.scale, "local_radius": radius}
        common["impl"] = self.operation("select_blocks")
        query_means, key_means = pooled.query_means, pooled.key_means
        assert query_means is not None
        if route is not None:
            self.counters["explicit_route"] += 1
            return plan_explicit(route, layout, local_radius=radius)
        if config.topk_ratio is None:
            self.counters["tau_route"] += 1
            return plan_tau(
                query_means,
                key_means,
                pooled.key_mean,
                pooled.key_var,
                layout,
                tau=config.tau,
                kind=config.thresh_type,
                **common,
            )
        self.counters["topk_route"] += 1
        top_k = budget(config.topk_ratio, layout.candidates)
        if config.head_budgets is not None:
            budgets = config.head_budgets[head : head + query_means.shape[1]]
            return plan_head_budgets(query_means, key_means, layout, budgets=budgets, **common)
        if config.global_weighted_mean:
            query_means, key_means = self._tilted(prefix, key, pooled)
            return plan_top_k(
                query_means,
                key_means,
                layout,
                top_k=top_k,
                mode="global_weighted_top_k",
                **common,
            )
        if summaries is not None:
            assert self.topology is not None
            mass = summaries.log_mass if config.route_score == "weighted_mass" else None
            keys = summaries.keys
            if config.route_score == "mean":
                keys = key_means[:, None].expand(-1, keys.shape[1], -1, -1, -1)
            parents = self.topology.parents[: layout.query_blocks]
            return plan_summary_top_k(
                query_means, keys, mass, parents, layout, top_k=top_k, **common
            )
        if config.topk_cutoff_mode == "gaussian_moments":
            return plan_gaussian_moments(query_means, key_means, layout, top_k=top_k, **common)
        return plan_top_k(query_means, key_means, layout, top_k=top_k, **common)

    def _tilted(self, prefix: Tensor, key: Tensor, pooled: Pooled) -> tuple[Tensor, Tensor]:
        """Tilt the block means of the chosen side towards the global mean of the other."""
        layout, side = self.layout, self.config.global_weighted_mean_side
        query_means, key_means = pooled.query_means, pooled.key_means
        assert query_means is not None
        video = layout.video_tokens
        toward_key, toward_query = global_mean(key, video), global_mean(prefix, video)
        if side in ("both", "query"):
            query_means = tilted_means(
                prefix,
                toward_key,
                blocks=layout.query_blocks,
                scale=self.scale,
                dtype=query_means.dtype,
            )
        if side in ("both", "key"):
            tilted = tilted_means(
                key,
                toward_query,
                blocks=layout.candidates,
                scale=self.scale,
                dtype=key_means.dtype,
            )
            key_means = torch.cat([tilted, key_means[:, :, layout.candidates :]], dim=2)
        return query_means, key_means

    def _summaries(
        self, query_means: Tensor, key: Tensor, value: Tensor, first: int, stop: int
    ) -> BlockSummaries:
        """Summarise the key blocks around the anchors of virtual queries [first, stop)."""
        config, layout = self.config, self.layout
        assert self.topology is not None
        ranges = self.topology.ranges[first:stop]
        # Only complete blocks are served sparsely, so a last range may end inside the prefix.
        ranges = tuple((start, min(end, layout.sparse_tokens)) for start, end in ranges)
        wide = config.anchor_dtype == "float32" and key.dtype != torch.float64
        anchor = anchors(
            query_means,
            ranges,
            dtype=torch.float32 if wide else key.dtype,
            impl=self.operation("anchors"),
        )
        keys, values, log_mass = reweight(
            anchor,
            key,
            value,
            summary_math=config.summary_math,
            logmass_key=config.logmass_key,
            reweight_components=config.reweight_components,
            scale=self.scale,
            block_tokens=8 if config.tail_granularity == "block8x8" else BLOCK,
            impl=self.operation("reweight"),
        )
        self.counters["summaries"] += 1
        parents = None
        if stop - first > 1:
            parents = self._parents(ranges, first, key.device)
        return BlockSummaries(keys, values, log_mass, parents)

    def _parents(
        self, ranges: tuple[tuple[int, int], ...], first: int, device: torch.device
    ) -> Tensor:
        """Return the parents of the ranges' blocks, from the cache if it has them: a copy waits."""
        assert self.topology is not None
        begin, end = ranges[0][0] // BLOCK, ranges[-1][1] // BLOCK
        name = ("parents", self.topology, begin, end, device)
        if name not in self.cache:
            local = [parent - first for parent in self.topology.parents[begin:end]]
            self.cache[name] = torch.tensor(local, dtype=torch.int32, device=device)
        return self.cache[name]

    def _parts(
        self,
        prefix: Tensor,
        key: Tensor,
        value: Tensor,
        pooled: Pooled,
        summaries: BlockSummaries | None,
        plan: BlockPlan,
    ) -> Iterator[tuple[slice, BlockSummaries | None, BlockPlan]]:
        """Yield query rows, their summaries and their part of the plan; all at once if they fit."""
        layout, tail = self.layout, self.config.tail_granularity
        whole = slice(0, layout.sparse_tokens)
        if tail == "none":
            yield whole, None, plan
        elif self.topology is None and tail == "block8x8":
            yield whole, mean_summaries(pool(None, key, value, block=8)), plan
        elif self.topology is None:
            yield whole, mean_summaries(pooled), plan
        elif summaries is not None:
            yield whole, summaries, plan
        else:
            assert pooled.query_means is not None
            batch, _, heads, dim = key.shape
            blocks = block_count(layout.tokens, 8 if tail == "block8x8" else BLOCK)
            size = batch * heads * blocks * (2 * dim * key.element_size() + 4)
            step = max(1, SUMMARY_BYTES // size)
            parents = self.topology.parents_within(layout.query_blocks)
            for first in range(0, parents, step):
                stop = min(first + step, parents)
                part = self._summaries(pooled.query_means, key, value, first, stop)
                begin = self.topology.ranges[first][0]
                end = min(self.topology.ranges[stop - 1][1], layout.sparse_tokens)
                yield slice(begin, end), part, slice_plan(plan, begin, end)


def slice_plan(plan: BlockPlan, begin: int, end: int) -> BlockPlan:
    """Return the plan of query rows [begin, end), begin on a multiple of 64."""
    if (begin, end) == (0, plan.query_tokens):
        return plan
    rows = slice(begin // BLOCK, block_count(end))
    return replace(
        plan,
        bits=plan.bits[:, :, rows],
        indices=plan.indices[:, :, rows],
        counts=plan.counts[:, :, rows],
        query_tokens=end - begin,
    )


def _default_dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend densely through torch."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    video_tokens: int,
    grid: TokenGrid | None,
    config: PackedConfig,
) -> None:
    """Raise unless the tensors, the video and the options fit each other."""
    _checks.check_tensor("query", query, 4, "[B, T, H, D]")
    _checks.check_dtype("query", query)
    for name, tensor in (("key", key), ("value", value)):
        _checks.check_tensor(name, tensor, 4, "[B, T, H, D]")
        _checks.check_same(name, tensor, "query", query, shape=True)
    if query.numel() == 0:
        raise ValueError(f"query: expected no empty dimension, got {tuple(query.shape)}")
    _checks.check_int("video_tokens", video_tokens, 0, query.shape[1])
    if not isinstance(config, PackedConfig):
        raise TypeError(f"config: expected a PackedConfig, got {type(config).__name__}")
    if grid is not None and grid.tokens != video_tokens:
        raise ValueError(
            f"grid: expected {video_tokens} tokens as video_tokens says, got {grid.as_tuple()}"
        )
    if grid is None and config.reblock is not None and video_tokens >= BLOCK:
        raise ValueError("grid: expected a TokenGrid, which reblock needs, got None")
    if config.head_budgets is not None and len(config.head_budgets) != query.shape[2]:
        raise ValueError(
            f"head_budgets: expected {query.shape[2]} numbers, got {len(config.head_budgets)}"
        )
    if _dispatch.needs_grad(query, key, value):
        raise UnsupportedError(
            "packed_attention", ["it is inference only: call it under torch.no_grad()"]
        )
