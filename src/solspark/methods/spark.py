"""Spark: packed attention over reordered video tokens, with summaries reweighted around anchors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from solspark import _checks
from solspark.errors import UnsupportedError
from solspark.methods.spark_call import Cache, Dense, PackedCall
from solspark.methods.spark_config import (
    PRESETS,
    RESOLVED_EXECUTIONS,
    PackedConfig,
    ReblockConfig,
)
from solspark.ops import _dispatch
from solspark.ops.reweight import check_reweight_tensors, reweight
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import density
from solspark.types import BLOCK, TokenGrid

__all__ = [
    "PRESETS",
    "RESOLVED_EXECUTIONS",
    "PackedConfig",
    "PackedRecord",
    "ReblockConfig",
    "packed_attention",
    "spark_reweight",
]


DENSE_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Backends of torch for the dense rows, best first."""


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
        TypeError: an argument is no tensor.
        ValueError: for tensors that do not fit each other, empty ones, or unknown switches.

    Numerics: scores, weights and sums in FP32, ak and av rounded once.

    Source: spec/spark.md section 3.
    """
    check_reweight_tensors(a, k, v, ("a", "k", "v"))
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
            scaled_dot_product_attention, by cuDNN where it can.
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

    calls = PackedCall(query, layout, config, dense, cache, impl)
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


def _default_dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend densely through torch; cuDNN, where it can, is 1.5 times as fast on Hopper."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if query.device.type != "cuda" or torch.version.hip is not None:
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    with sdpa_kernel(DENSE_BACKENDS, set_priority=True):
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
    if grid is not None and not isinstance(grid, TokenGrid):
        raise TypeError(f"grid: expected a TokenGrid or None, got {type(grid).__name__}")
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
