"""Sol-Attn from end to end, composed of the reference operations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from solspark._checks import resolve_scale
from solspark.reference.block_sparse_attention import block_sparse_attention
from solspark.reference.pool import pool
from solspark.reference.score_blocks import score_blocks, thresholds
from solspark.reference.select_blocks import select_blocks
from solspark.types import BLOCK, BlockPlan, BlockSummaries, block_count


def sol_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    topk_ratio: float | None = None,
    sinks: Sequence[tuple[int, int]] = (),
    dense_queries: Sequence[tuple[int, int]] = (),
    key_bias: Tensor | None = None,
    tail: str = "query",
    local_radius: int = 1,
) -> tuple[Tensor, Tensor, BlockPlan]:
    """Attend exactly to the key blocks that matter and to the means of the others.

    Args: as `solspark.sol_attn`; sinks and dense_queries are ranges (start, stop) of tokens.

    Returns:
        out [B, T, H, D], lse float32 (float64) [B, T, H] in natural log, and the plan.

    Numerics: those of the operations; work space is T x T for every head, so keep T small.

    Source: Sol-Attn section 1.
    """
    tokens, head_dim = query.shape[1], query.shape[3]
    scale = resolve_scale(scale, head_dim)
    blocks = block_count(tokens)
    sink_blocks = [(start // BLOCK, block_count(stop)) for start, stop in sinks if stop > start]
    dense_rows = [
        (start // BLOCK, block_count(stop)) for start, stop in dense_queries if stop > start
    ]

    pooled = pool(query, key, value, key_bias=key_bias)
    assert pooled.query_means is not None
    scores = score_blocks(pooled.query_means, pooled.key_means, scale=scale)
    limits, top_k = None, None
    if topk_ratio is None:
        limits = thresholds(
            pooled.query_means,
            pooled.key_mean,
            pooled.key_means if thresh_type == "exact" else pooled.key_var,
            scale=scale,
            tau=tau,
            kind=thresh_type,
            live=pooled.live,
        )
    else:
        in_sink = {block for first, stop in sink_blocks for block in range(first, stop)}
        top_k = max(1, round(topk_ratio * (blocks - len(in_sink))))
    plan = select_blocks(
        scores,
        thresholds=limits,
        top_k=top_k,
        sinks=sink_blocks,
        dense_rows=dense_rows,
        local_radius=local_radius,
        live=pooled.live,
        query_tokens=tokens,
        key_tokens=tokens,
    )

    if tail == "block8x8":
        pooled = pool(None, key, value, key_bias=key_bias, block=8)
    summaries = None
    if tail != "none":
        assert pooled.value_means is not None
        log_mass = pooled.log_mass.float().expand(pooled.key_means.shape[:3])
        summaries = BlockSummaries(
            pooled.key_means[:, None], pooled.value_means[:, None], log_mass[:, None]
        )
    result = block_sparse_attention(
        query,
        key,
        value,
        plan,
        summaries=summaries,
        scale=scale,
        key_bias=key_bias,
        tail=tail,
        return_lse=True,
    )
    return result[0], result[1], plan
