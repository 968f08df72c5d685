"""Sol-Attn: exact attention where block means say it matters, block means elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch
from solspark.ops.block_sparse_attention import PRECISIONS, TAILS, block_sparse_attention
from solspark.ops.pool import Pooled, pool
from solspark.plan.select import budget, count_candidates, plan_sol
from solspark.types import BLOCK, AttentionCall, BlockSummaries, CallRecord, block_count

HEAD_DIMS = (64, 128)


@dataclass(frozen=True, eq=False)
class SolStats:
    """What a call of `sol_attn` delivered.

    Args:
        exact_blocks: int64 scalar on the device, block pairs read exactly, over batch, heads and
            query blocks.
        total_blocks: block pairs there are.
        top_k: blocks a row of the budget, None with a threshold.
        implementations: operation -> the implementation that served it.
    """

    exact_blocks: Tensor
    total_blocks: int
    top_k: int | None
    implementations: dict[str, str]

    @property
    def density(self) -> float:
        """Return the share of block pairs read exactly; reading it waits for the device."""
        return float(self.exact_blocks) / self.total_blocks


def sol_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    topk_ratio: float | None = None,
    sink_start: int | None = None,
    sink_tokens: int = 0,
    sinks: Sequence[tuple[int, int]] | None = None,
    dense_queries: Sequence[tuple[int, int]] | None = None,
    key_bias: Tensor | None = None,
    tail: str = "query",
    local_radius: int = 1,
    force_local_blocks: bool | int | None = None,
    kv_splits: int = 1,
    precision: str = "native",
    return_lse: bool = False,
    return_stats: bool = False,
    impl: str | None = None,
) -> Any:
    """Attend exactly to the key blocks that matter to a query block and to the means of the others.

        r_ij = a * qbar_i . KC_j,  a = scale * log2(e)
        exact(i, j) = r_ij > thr_i(tau), or r_ij among the largest of its row; and the local band,
        sinks, dense rows out_t = (sum_u e^(s q_t.k_u + bias_u) v_u + sum_j M_j e^(s q_t.KC_j) VC_j)
                / (sum_u e^(s q_t.k_u + bias_u) + sum_j M_j e^(s q_t.KC_j))

    with u over the keys of exact blocks, j over the other blocks, and M_j the tokens (or the bias
    mass) of block j. Blocks have 64 tokens; every key is represented exactly once unless the tail
    is "none".

    Args:
        query, key, value: [B, T, H, D] of one shape, type and device; float16, bfloat16, float32 or
            float64; D 64 or 128; any strides.
        scale: factor of the logits; None means D ** -0.5.
        tau: a block is exact when its score exceeds its row's mean by more than `tau` standard
            deviations.
        thresh_type: "diag" takes the standard deviation from the variances of the key means'
            channels, "exact" from the scores themselves.
        topk_ratio: share in (0, 1] of the candidate blocks (those in no sink) that each row reads,
            instead of `tau`: max(1, round(ratio * candidates)), of equal scores the lower block.
        sink_start, sink_tokens: one range of keys that every query reads; a start of None means the
            last ones.
        sinks: any number of such ranges (start, stop) in tokens; blocks that a range touches are
            exact in full.
        dense_queries: ranges (start, stop) of queries, in tokens, whose blocks read every key.
        key_bias: added to the logits, natural log, one value a key: [T], [B, T], [B, 1 or H, T] or
            [B, 1 or H, 1, T]; a bool tensor keeps where true. It weighs the means and masses of the
            tail too.
        tail: "query" (the means enter per row), "block" (once per query block), "block8x8" (per 8
            rows, means of 8 keys) or "none" (other blocks are dropped).
        local_radius: r >= 0 makes the blocks |i - j| <= r exact; -1 none.
        force_local_blocks: the older spelling: True is radius 1, False is -1; an int is the radius.
        kv_splits: attend in that many contiguous ranges of key blocks and merge.
        precision: "native", or "fp8": after planning in the input type, queries, keys, values and
            means are rounded to e4m3, half the bytes. Kernels serve it from compute capability 8.9
            on; elsewhere it is exact arithmetic on the rounded numbers, and no faster.
        return_lse: also return the log of the denominator.
        return_stats: also return SolStats.
        impl: "eager", "triton" or "hopper" for the attention, and for planning where it has one of
            that name; None takes the best that can serve.

    Returns:
        out [B, T, H, D] in the input type; followed, as asked, by lse float32 (float64) [B, T, H]
        in natural log and by SolStats.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been launched.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics:
        Means are summed in float32 (float64 for float64) and rounded once to the input type, query
        means not at all. Logits, softmax and sums are float32 (float64), the output is rounded
        once.

    Source: Sol-Attn sections 1 and 2.
    """
    batch, tokens, heads, head_dim = _check_inputs(query, key, value)
    _checks.check_choice("thresh_type", thresh_type, ("diag", "exact"))
    sink_ranges = _sink_ranges(tokens, sink_start, sink_tokens, sinks)
    dense_ranges = _checks.check_ranges("dense_queries", dense_queries or (), tokens)
    _checks.check_int("kv_splits", kv_splits, 1)
    _checks.check_choice("precision", precision, PRECISIONS)
    scale = _checks.resolve_scale(scale, head_dim)
    tau = _checks.check_float("tau", tau, finite=False)
    if topk_ratio is not None:
        topk_ratio = _checks.check_float("topk_ratio", topk_ratio)
        if not 0 < topk_ratio <= 1:
            raise ValueError(f"topk_ratio: expected a share in (0, 1], got {topk_ratio}")
    bias = _checks.normalise_key_bias(key_bias, batch, heads, tokens, key)
    _checks.check_choice("tail", tail, TAILS)
    radius = _radius(local_radius, force_local_blocks)
    _checks.check_bool("return_lse", return_lse)
    _checks.check_bool("return_stats", return_stats)
    if impl is not None:
        _checks.check_choice("impl", impl, _dispatch.PREFERENCE)

    blocks = block_count(tokens)
    sink_blocks = [_block_range(*item) for item in sink_ranges]
    top_k = None
    if topk_ratio is not None:
        top_k = budget(topk_ratio, count_candidates(blocks, sink_blocks))
    query, key, value = (_checks.last_dim_contiguous(item) for item in (query, key, value))
    call = _dispatch.describe(
        query,
        key,
        tail=tail,
        key_bias=bias is not None,
        return_lse=return_lse,
        kv_splits=kv_splits,
        precision=precision,
        requires_grad=_dispatch.needs_grad(query, key, value),
    )
    # Ask before planning, so that a refusal comes before any work.
    _dispatch.pick("block_sparse_attention", call, impl)

    options = _Options(
        scale=scale,
        tau=tau,
        thresh_type=thresh_type,
        top_k=top_k,
        sinks=sink_blocks,
        dense_rows=[_block_range(*item) for item in dense_ranges],
        local_radius=radius,
        tail=tail,
        kv_splits=kv_splits,
        precision=precision,
        return_lse=return_lse,
        impl=impl,
    )
    if torch.compiler.is_compiling():
        records: list[CallRecord] = []
        out, lse, counts = _attend(query, key, value, bias, options)
    else:
        with _dispatch.collect_records() as records:
            out, lse, counts = _attend(query, key, value, bias, options)
    total_blocks = counts.numel() * blocks
    _record(call, records, counts, total_blocks)
    result: list[Any] = [out]
    if return_lse:
        result.append(lse)
    if return_stats:
        served = {record.operation: record.implementation for record in records}
        result.append(SolStats(counts.sum(), total_blocks, top_k, served))
    return result[0] if len(result) == 1 else tuple(result)


def get_sol_attn_backend(device: torch.device | str | int | None = None) -> str:
    """Return the implementation that would serve a bfloat16 call with D = 128 on a device.

    Args:
        device: anything that `torch.device` takes; None means the current accelerator, or the CPU
            without one.

    Returns:
        "hopper", "triton" or "eager". Nothing is compiled.

    Raises:
        TypeError, ValueError: `device` names none, or one that is not here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = _checks.as_device("device", device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that is here, got {device!r} without a GPU")
    call = AttentionCall(
        batch=1,
        query_tokens=2**14,
        key_tokens=2**14,
        heads=16,
        head_dim=128,
        dtype=torch.bfloat16,
        device_type=place.type,
        capability=_dispatch.capability(place),
        key_heads=16,
    )
    return _dispatch.choose("block_sparse_attention", call)


@dataclass(frozen=True)
class _Options:
    """Checked options, ranges in blocks."""

    scale: float
    tau: float
    thresh_type: str
    top_k: int | None
    sinks: list[tuple[int, int]]
    dense_rows: list[tuple[int, int]]
    local_radius: int
    tail: str
    kv_splits: int
    precision: str
    return_lse: bool
    impl: str | None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Pool, plan and attend; return out, lse if asked for, and the plan's counts."""
    pooled = pool(
        query,
        key,
        value if options.tail in ("query", "block") else None,
        key_bias=key_bias,
        impl=_dispatch.where_available("pool", options.impl),
    )
    plan = plan_sol(
        query,
        key,
        pooled=pooled,
        scale=options.scale,
        tau=options.tau,
        thresh_type=options.thresh_type,
        top_k=options.top_k,
        sinks=options.sinks,
        dense_rows=options.dense_rows,
        local_radius=options.local_radius,
        impl=options.impl,
    )
    if options.tail == "block8x8":
        pooled = pool(None, key, value, key_bias=key_bias, block=8)
    result = block_sparse_attention(
        query,
        key,
        value,
        plan,
        summaries=None if options.tail == "none" else mean_summaries(pooled),
        scale=options.scale,
        key_bias=key_bias,
        tail=options.tail,
        kv_splits=options.kv_splits,
        precision=options.precision,
        return_lse=options.return_lse,
        impl=options.impl,
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out, lse, plan.counts


def mean_summaries(pooled: Pooled) -> BlockSummaries:
    """Return the block means as every query block's summaries, with the log of their masses."""
    if pooled.value_means is None:
        raise ValueError("pooled.value_means: expected a tensor [B, H, NK, D], got None")
    log_mass = pooled.log_mass.float().expand(pooled.key_means.shape[:3])
    return BlockSummaries(pooled.key_means[:, None], pooled.value_means[:, None], log_mass[:, None])


def _record(
    call: AttentionCall, records: list[CallRecord], counts: Tensor, total_blocks: int
) -> None:
    """Record the whole call as its attention's, with what each operation declined."""
    if not records:
        return
    served = {record.operation: record for record in records}
    declined = tuple(
        (f"{operation}:{name}", why)
        for operation, record in served.items()
        for name, why in record.declined
    )
    attention = served["block_sparse_attention"].implementation
    _dispatch.record(CallRecord("sol_attn", attention, call, declined, counts, total_blocks))


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int, int]:
    """Return (B, T, H, D), or raise in the order shape, sizes, types, devices."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        _checks.check_tensor(name, tensor, 4, "[B, T, H, D]")
    for name in ("key", "value"):
        if tensors[name].shape != query.shape:
            raise ValueError(
                f"{name}: expected the shape of query, {tuple(query.shape)}, "
                f"got {tuple(tensors[name].shape)}"
            )
    batch, tokens, heads, head_dim = query.shape
    if min(batch, tokens, heads) < 1:
        raise ValueError(
            f"query: expected at least one sample, token and head, got shape {tuple(query.shape)}"
        )
    _checks.check_head_dim("query", query, HEAD_DIMS)
    for name, tensor in tensors.items():
        _checks.check_dtype(name, tensor)
    for name in ("key", "value"):
        _checks.check_same(name, tensors[name], "query", query, shape=False)
    return batch, tokens, heads, head_dim


def _sink_ranges(
    tokens: int,
    sink_start: int | None,
    sink_tokens: int,
    sinks: Sequence[tuple[int, int]] | None,
) -> tuple[tuple[int, int], ...]:
    """Return the sinks as token ranges, from either spelling."""
    _checks.check_int("sink_tokens", sink_tokens, 0, tokens)
    if sink_start is not None:
        _checks.check_int("sink_start", sink_start, 0, tokens)
        if sink_start + sink_tokens > tokens:
            raise ValueError(
                f"sink_start: expected sink_start + sink_tokens <= {tokens}, "
                f"got {sink_start} + {sink_tokens}"
            )
    if sinks is not None:
        if sink_tokens or sink_start is not None:
            raise ValueError("sinks: expected either sinks or sink_start and sink_tokens, got both")
        return _checks.check_ranges("sinks", sinks, tokens)
    if sink_tokens == 0:
        return ()
    start = tokens - sink_tokens if sink_start is None else sink_start
    return ((start, start + sink_tokens),)


def _block_range(start: int, stop: int) -> tuple[int, int]:
    """Return the blocks that a token range touches."""
    return start // BLOCK, block_count(stop)


def _radius(local_radius: int, force_local_blocks: bool | int | None) -> int:
    """Return the radius of the local band from either spelling."""
    _checks.check_int("local_radius", local_radius, -1)
    if force_local_blocks is None:
        return local_radius
    if local_radius != 1:
        raise ValueError(
            "force_local_blocks: expected either local_radius or force_local_blocks, got both"
        )
    if isinstance(force_local_blocks, bool):
        return 1 if force_local_blocks else -1
    return _checks.check_int("force_local_blocks", force_local_blocks, -1)
