"""One call of packed attention: the steps between the order of the tokens and its undoing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from solspark import _checks
from solspark.methods.aside import Aside
from solspark.methods.sol import mean_summaries
from solspark.methods.spark_config import PackedConfig, ReblockConfig
from solspark.methods.spark_order import plan_orders
from solspark.ops import _dispatch
from solspark.ops.anchors import anchors
from solspark.ops.block_sparse_attention import block_sparse_attention
from solspark.ops.gather_means import gather_means
from solspark.ops.gather_reweight import FEW_ANCHORS, gather_reweight
from solspark.ops.permute import permute, unpermute
from solspark.ops.pool import Pooled, pool
from solspark.ops.reweight import reweight
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import (
    PackedRoute,
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

SUMMARY_BYTES = 2**30
"""Summaries of as many virtual queries as fit here exist at one time."""

REORDER_BYTES = 7 * 2**28
"""Reordered copies of Q, K and V (one head at least) exist at one time within this: 56 heads of
MiniMax-H3 at 5 s together, at 10 s in two halves."""

ANY_TREE = ReblockConfig()
"""Stands for the tree that virtual queries follow where nothing is reordered."""

Dense = Callable[[Tensor, Tensor, Tensor], Tensor]
Cache = MutableMapping[Any, Any]


@dataclass(frozen=True, eq=False)
class _Means:
    """Block means: query float32 (float64) [B, H, NQ, D], key in its dtype [B, H, NK, D].

    `pooled` has the statistics and value means too, where somebody needs them.
    """

    query: Tensor
    key: Tensor
    pooled: Pooled | None = None


class PackedCall:
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
        self.dtype = like.dtype
        tree = config.reblock or ANY_TREE
        self.topology_name = ("virtual_queries", layout, tree, config.virtual_query_rule)
        self.topology = self._topology(tree) if config.uses_virtual_queries else None

    def operation(self, name: str) -> str | None:
        """Return the implementation asked for, where the operation has it."""
        return _dispatch.where_available(name, self.impl)

    def attend_reordered(
        self, query: Tensor, key: Tensor, value: Tensor, grid: TokenGrid, route: Tensor | None
    ) -> Tensor:
        """Reorder, attend and undo, a few heads at a time: copies of all heads would cost 4 GiB."""
        reblock = self.config.reblock
        assert reblock is not None
        with _dispatch.stage("plan"):
            orders = plan_orders(
                query, key, grid, reblock, self.cache, impl=self.operation("reblock")
            )
        self.counters["reblock"] += 1
        self.reblock_facts = orders.facts
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        batch, tokens, heads, dim = query.shape
        head_bytes = 3 * batch * tokens * dim * query.element_size()
        groups = -(-heads // max(1, REORDER_BYTES // head_bytes))
        step = -(-heads // groups)
        for first in range(0, heads, step):
            here = slice(first, min(first + step, heads))
            where = (orders.query[:, here], orders.key[:, here])
            own = None if route is None else route[:, here]
            with _dispatch.stage("reorder and summarise"):
                q, k, v, means, summaries = self._reorder(
                    query[:, :, here], key[:, :, here], value[:, :, here], *where
                )
            parts = self.attend(q, k, v, own, head=first, means=means, summaries=summaries)
            del q, k, v, summaries
            with _dispatch.stage("reorder and summarise"):
                self._undo(parts, where[0], out[:, :, here])
            del parts
        return out

    def _undo(self, parts: list[Tensor], order: Tensor, out: Tensor) -> None:
        """Put the sparse rows, and the dense ones if any, straight into their places."""
        layout = self.layout
        video, start = out[:, : layout.video_tokens], layout.dense_start
        unpermute(parts[0], order[..., :start], out=video)
        if len(parts) > 1:
            # The last video rows may be dense ones.
            rest = layout.video_tokens - start
            if rest:
                unpermute(parts[1][:, :rest], order[..., start:], out=video)
            out[:, layout.video_tokens :] = parts[1][:, rest:]

    def _reorder(
        self, query: Tensor, key: Tensor, value: Tensor, query_order: Tensor, key_order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, _Means | None, BlockSummaries | None]:
        """Gather Q, K and V; with few anchors, means and summaries come in the same passes."""
        layout, config, topology = self.layout, self.config, self.topology
        count = 0 if topology is None else topology.parents_within(layout.query_blocks)
        one_pass = (
            1 <= count <= FEW_ANCHORS
            and config.tail_granularity in ("query", "block")
            and config.topk_ratio is not None
            and layout.sparse_tokens <= layout.video_tokens
        )
        if not one_pass:
            orders = (query_order, key_order, key_order)
            q, k, v = (permute(x, p) for x, p in zip((query, key, value), orders, strict=True))
            return q, k, v, None, None
        work = _checks.accumulation_dtype(query.dtype)
        query, query_means = gather_means(
            query,
            query_order,
            blocks=layout.query_blocks,
            dtype=work,
            impl=self.operation("gather_means"),
        )
        key, value, key_means, keys, values, log_mass = gather_reweight(
            self._anchors(query_means, 0, count),
            key,
            value,
            key_order,
            summary_math=config.summary_math,
            logmass_key=config.logmass_key,
            reweight_components=config.reweight_components,
            scale=self.scale,
            impl=self.operation("gather_reweight"),
        )
        self.counters["summaries"] += 1
        parents = self._parents(0, count, key.device)
        summaries = BlockSummaries(keys, values, log_mass, parents)
        return query, key, value, _Means(query_means, key_means), summaries

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        route: Tensor | None,
        head: int = 0,
        means: _Means | None = None,
        summaries: BlockSummaries | None = None,
    ) -> list[Tensor]:
        """Attend in the given order; return rows [0, dense_start) and, if any, the dense rest."""
        layout, config = self.layout, self.config
        prefix = self._prefix(query)
        rest = None
        if layout.dense_start < layout.tokens:
            # Before the sparse rows and beside them: eight programs a head fill two waves badly.
            suffix = query[:, layout.dense_start :]
            rest = Aside(lambda: self.dense(suffix, key, value), query.device)
            self.counters["dense_context"] += 1
        if means is None:
            with _dispatch.stage("plan"):
                means = self._pool(prefix, key, value)
        if config.route_score != "native_mean" and summaries is None:
            # The route reads the summaries of every row, so they cannot be chunked.
            assert self.topology is not None
            count = self.topology.parents_within(layout.query_blocks)
            summaries = self._summaries(means.query, key, value, 0, count)
        with _dispatch.stage("plan"):
            chosen = self._route(prefix, key, means, summaries, route, head)
        self.mode, self.top_k = chosen.mode, chosen.top_k
        self.exact_pairs.append(chosen.plan.counts.sum())

        sparse = []
        for rows, part, plan in self._parts(key, value, means, summaries, chosen.plan):
            result = block_sparse_attention(
                prefix[:, rows],
                key,
                value,
                plan,
                summaries=part,
                scale=self.scale,
                tail=config.tail_granularity,
                kv_splits=config.kv_splits,
                precision=config.precision,
                impl=self.impl,
            )
            assert isinstance(result, Tensor)
            sparse.append(result)
            self.counters["sparse_core"] += 1
        joined = sparse[0] if len(sparse) == 1 else torch.cat(sparse, dim=1)
        found = [joined[:, : layout.dense_start]]
        if rest is not None:
            found.append(rest.join())
        return found

    def _topology(self, tree: ReblockConfig) -> VirtualQueries:
        """Return the virtual queries of this layout; they depend on integers alone."""
        if self.topology_name not in self.cache:
            hierarchy = tree.options.hierarchy(self.layout.candidates)
            levels_up, target, low, high = self.config.virtual_query_rule
            self.cache[self.topology_name] = choose_virtual_queries(
                self.layout.tokens,
                hierarchy.levels,
                levels_up=levels_up,
                target_blocks=target,
                min_blocks=low,
                max_blocks=high,
            )
        return self.cache[self.topology_name]

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

    def _pool(self, prefix: Tensor, key: Tensor, value: Tensor) -> _Means:
        """Pool what the route needs, and the values where plain means are the summaries."""
        config = self.config
        summaries = self.topology is None and config.tail_granularity in ("query", "block")
        pooled = pool(prefix, key, value if summaries else None, impl=self.operation("pool"))
        assert pooled.query_means is not None
        return _Means(pooled.query_means, pooled.key_means, pooled)

    def _route(
        self,
        prefix: Tensor,
        key: Tensor,
        means: _Means,
        summaries: BlockSummaries | None,
        route: Tensor | None,
        head: int,
    ) -> PackedRoute:
        """Decide by the one rule that the options name."""
        config, layout = self.config, self.layout
        radius = config.local_radius
        common: dict[str, Any] = {"scale": self.scale, "local_radius": radius}
        common["impl"] = self.operation("select_blocks")
        if route is not None:
            self.counters["explicit_route"] += 1
            return plan_explicit(route, layout, local_radius=radius)
        if config.topk_ratio is None:
            assert means.pooled is not None
            self.counters["tau_route"] += 1
            return plan_tau(
                means.query,
                means.key,
                means.pooled.key_mean,
                means.pooled.key_var,
                layout,
                tau=config.tau,
                kind=config.thresh_type,
                **common,
            )
        self.counters["topk_route"] += 1
        common["top_k"] = budget(config.topk_ratio, layout.candidates)
        if config.head_budgets is not None:
            del common["top_k"]
            budgets = config.head_budgets[head : head + key.shape[2]]
            return plan_head_budgets(means.query, means.key, layout, budgets=budgets, **common)
        if config.global_weighted_mean:
            tilted = self._tilted(prefix, key, means)
            return plan_top_k(*tilted, layout, mode="global_weighted_top_k", **common)
        if config.route_score != "native_mean":
            assert self.topology is not None and summaries is not None
            mass = summaries.log_mass if config.route_score == "weighted_mass" else None
            keys = summaries.keys
            if config.route_score == "mean":
                keys = means.key[:, None].expand(-1, keys.shape[1], -1, -1, -1)
            parents = self.topology.parents[: layout.query_blocks]
            return plan_summary_top_k(means.query, keys, mass, parents, layout, **common)
        if config.topk_cutoff_mode == "gaussian_moments":
            return plan_gaussian_moments(means.query, means.key, layout, **common)
        return plan_top_k(means.query, means.key, layout, **common)

    def _tilted(self, prefix: Tensor, key: Tensor, means: _Means) -> tuple[Tensor, Tensor]:
        """Tilt the block means of the chosen side towards the global mean of the other."""
        layout, side = self.layout, self.config.global_weighted_mean_side
        query_means, key_means = means.query, means.key
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

    def _anchors(self, query_means: Tensor, first: int, stop: int) -> Tensor:
        """Return the anchors of virtual queries [first, stop)."""
        assert self.topology is not None
        # Only complete blocks are served sparsely, so a last range may end inside the prefix.
        limit = self.layout.sparse_tokens
        ranges = [(start, min(end, limit)) for start, end in self.topology.ranges[first:stop]]
        dtype = self.dtype
        if self.config.anchor_dtype == "float32" and dtype != torch.float64:
            dtype = torch.float32
        return anchors(query_means, ranges, dtype=dtype, impl=self.operation("anchors"))

    def _summaries(
        self, query_means: Tensor, key: Tensor, value: Tensor, first: int, stop: int
    ) -> BlockSummaries:
        """Summarise the key blocks around the anchors of virtual queries [first, stop)."""
        config = self.config
        keys, values, log_mass = reweight(
            self._anchors(query_means, first, stop),
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
        return BlockSummaries(keys, values, log_mass, self._parents(first, stop, key.device))

    def _parents(self, first: int, stop: int, device: torch.device) -> Tensor | None:
        """Return the parents of the blocks that virtual queries [first, stop) serve.

        From the cache if it has them: a copy to the device waits for it.
        """
        if stop - first == 1:
            return None
        assert self.topology is not None
        name = ("parents", self.layout, self.topology_name, first, stop, device)
        if name not in self.cache:
            blocks = self.topology.parents[: self.layout.query_blocks]
            local = [parent - first for parent in blocks if first <= parent < stop]
            self.cache[name] = torch.tensor(local, dtype=torch.int32, device=device)
        return self.cache[name]

    def _parts(
        self,
        key: Tensor,
        value: Tensor,
        means: _Means,
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
            assert means.pooled is not None
            yield whole, mean_summaries(means.pooled), plan
        elif summaries is not None:
            yield whole, summaries, plan
        else:
            batch, _, heads, dim = key.shape
            blocks = block_count(layout.tokens, 8 if tail == "block8x8" else BLOCK)
            size = batch * heads * blocks * (2 * dim * key.element_size() + 4)
            step = max(1, SUMMARY_BYTES // size)
            parents = self.topology.parents_within(layout.query_blocks)
            for first in range(0, parents, step):
                stop = min(first + step, parents)
                part = self._summaries(means.query, key, value, first, stop)
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
