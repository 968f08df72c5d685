"""INT8 Sol-Attn before quantisation: what the integers approximate, over the whole T x T."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark._checks import accumulation_dtype, resolve_scale
from solspark.types import BLOCK, block_count

LOG2E = math.log2(math.e)

SCORE_BYTES = 4 * 2**30
"""Largest score matrix that the float reference makes."""


def live_lengths(block_len: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """Return the live rows at the front of each block, int64 [N]: at least 1, at most those there.

    Args:
        block_len: integers [N], or None for all rows that exist.
        tokens: T.
        device: of the result.
    """
    blocks = block_count(tokens)
    present = (tokens - torch.arange(blocks, device=device) * BLOCK).clamp(max=BLOCK)
    if block_len is None:
        return present
    return torch.minimum(block_len.to(device=device, dtype=torch.int64).clamp(min=1), present)


def live_rows(lengths: Tensor) -> Tensor:
    """Return which of the 64 N padded rows are live, bool [64 N]."""
    return (torch.arange(BLOCK, device=lengths.device) < lengths[:, None]).flatten()


def budget(topk_ratio: float, blocks: int, sinks: tuple[int, int]) -> int:
    """Return how many blocks a row keeps, of those in no sink; never all of them.

        n = blocks - sink blocks,  k = max(0, min(n - 1, max(1, round(ratio * n))))

    Args:
        topk_ratio: share in (0, 1).
        blocks: N.
        sinks: half-open range of blocks; what lies past N does not count.
    """
    free = blocks - max(0, min(sinks[1], blocks) - min(sinks[0], blocks))
    return max(0, min(free - 1, max(1, round(topk_ratio * free))))


def route(
    scores: Tensor,
    query_means: Tensor,
    key_var: Tensor,
    *,
    scale: float,
    tau: float,
    topk_ratio: float,
    sinks: tuple[int, int],
    dense_rows: tuple[int, int],
) -> Tensor:
    """Say which key blocks each query block reads exactly.

        thr_m = tau sqrt((scale log2 e)^2 sum_c qbar_mc^2 kvar_c + 1e-6),  exact where S > thr
        or S >= the k-th largest score of the row among the blocks in no sink, equal scores kept;
        and always |m - n| <= 1, the sinks, and all blocks of the dense rows

    Args:
        scores: S [..., NQ, N] in log2 units.
        query_means: [..., NQ, D].
        key_var: [..., D].
        scale: factor of the logits.
        tau: standard deviations; unused with a budget.
        topk_ratio: above 0 a budget, see `budget`.
        sinks, dense_rows: half-open ranges of key blocks and of query blocks.

    Returns:
        bool [..., NQ, N].

    Source: INT8 specification 2.4.
    """
    rows, blocks = scores.shape[-2:]
    column = torch.arange(blocks, device=scores.device)
    row = torch.arange(rows, device=scores.device)
    sink = (column >= sinks[0]) & (column < sinks[1])
    if topk_ratio > 0:
        keep = budget(topk_ratio, blocks, sinks)
        if keep:
            ranked = scores.masked_fill(sink, -math.inf)
            exact = ranked >= ranked.topk(keep, -1).values[..., -1:]
        else:
            exact = torch.zeros_like(scores, dtype=torch.bool)
    else:
        spread = query_means.square() @ key_var[..., None]
        exact = scores > tau * ((scale * LOG2E) ** 2 * spread + 1e-6).sqrt()
    dense = (row >= dense_rows[0]) & (row < dense_rows[1])
    local = (row[:, None] - column).abs() <= 1
    return exact | sink | local | dense[:, None]


def coarse(query_means: Tensor, key_means: Tensor, value_means: Tensor, scale: float) -> Tensor:
    """Attend from block mean to block mean, uncentred, every block weighing the same.

        oc_m = sum_n softmax_n(scale qbar_m . kbar_n) vbar_n

    Args: [..., N, D] each. Returns [..., N, D].

    Source: INT8 specification 2.9.
    """
    logits = (query_means @ key_means.mT) * scale
    return logits.softmax(-1) @ value_means


def sol_int8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tau: float = 1.0,
    scale: float | None = None,
    sinks: tuple[int, int] = (0, 0),
    dense_rows: tuple[int, int] = (0, 0),
    key_bias: Tensor | None = None,
    topk_ratio: float = 0.0,
    tail: bool = True,
    block_len: Tensor | None = None,
    coarse_gate: Tensor | None = None,
) -> Tensor:
    """Attend exactly to the routed blocks and, at the query block's mean, to the means of others.

        S_mn = a qbar_m . (kbar_n - mu),  a = scale log2 e,  mu = mean_n kbar_n
        out_i = (sum_{j exact} 2^(a q_i.(k_j - mu) + bias_j) v_j + sum_{n not} 2^S_mn vsum_n)
                / (sum_{j exact} 2^(...) + sum_{n not} 2^S_mn L_n)  [+ gate_i oc_m]

    Args:
        query, key, value: [B, T, H, D], any float type.
        tau, topk_ratio, sinks, dense_rows: as `route`.
        scale: None means D ** -0.5.
        key_bias: natural log, [B, T]; weighs the keys of exact blocks and nothing else.
        tail: whether blocks that are not exact enter by their means.
        block_len: integers [N], live rows at the front of each block; output rows that are not
            live are zero.
        coarse_gate: [B, T, H, D], weighs the block-to-block attention that is added, see `coarse`.

    Returns:
        [B, T, H, D] in the input type.

    Raises:
        RuntimeError: the scores would take more than 4 GiB.

    Numerics: float32, float64 for float64.

    Source: INT8 specification 2.2, 2.4, 2.5, 2.8, 2.9.
    """
    batch, tokens, heads, head_dim = query.shape
    size = batch * heads * tokens * tokens * 4
    if size > SCORE_BYTES:
        raise RuntimeError(
            f"query: this reference needs O(T^2) memory, {size / 2**30:.1f} GiB of scores for "
            f"T = {tokens}, more than {SCORE_BYTES / 2**30:.0f} GiB"
        )
    scale = resolve_scale(scale, head_dim)
    dtype = accumulation_dtype(query.dtype)
    lengths = live_lengths(block_len, tokens, query.device)
    blocks = lengths.numel()
    live = live_rows(lengths)

    def padded(x: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(
            x.to(dtype).transpose(1, 2), (0, 0, 0, blocks * BLOCK - tokens)
        )
        return rows.masked_fill(~live[:, None], 0.0)

    q, k, v = padded(query), padded(key), padded(value)
    count = lengths.to(dtype)[:, None]
    query_means, key_means, value_means = (
        x.unflatten(2, (blocks, BLOCK)).sum(3) / count for x in (q, k, v)
    )
    mu = key_means.mean(2, keepdim=True)
    centred = key_means - mu
    key_var = (key_means.square().mean(2) - mu[:, :, 0].square()).clamp_min(0.0)

    scores = (query_means @ centred.mT) * (scale * LOG2E)
    exact = route(
        scores,
        query_means,
        key_var,
        scale=scale,
        tau=tau,
        topk_ratio=topk_ratio,
        sinks=sinks,
        dense_rows=dense_rows,
    )
    logits = (q @ (k - mu).mT) * scale
    if key_bias is not None:
        bias = torch.nn.functional.pad(key_bias.to(dtype), (0, blocks * BLOCK - tokens))
        logits = logits + bias[:, None, None]
    wide = exact.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    logits = logits.masked_fill(~(wide & live), -math.inf)
    pooled = (scores / LOG2E + count[:, 0].log()).masked_fill(exact, -math.inf)
    if not tail:
        pooled = torch.full_like(pooled, -math.inf)
    everything = torch.cat([logits, pooled.repeat_interleave(BLOCK, 2)], -1)
    # A row without any key has no softmax: it is zero.
    weights = everything.softmax(-1).nan_to_num(0.0)
    out = weights @ torch.cat([v, value_means], 2)
    if coarse_gate is not None:
        means = coarse(query_means, key_means, value_means, scale)
        out = out + padded(coarse_gate) * means.repeat_interleave(BLOCK, 2)
    out = out.masked_fill(~live[:, None], 0.0)[:, :, :tokens]
    return out.transpose(1, 2).contiguous().to(query.dtype)
