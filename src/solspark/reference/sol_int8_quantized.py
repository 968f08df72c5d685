"""INT8 Sol-Attn in integer arithmetic, step by step: one head, one query block, one tile a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark._checks import resolve_scale
from solspark.reference.qkv_producer import NEG, basis, quantize_rows
from solspark.reference.sol_int8 import LOG2E, coarse, live_rows, route
from solspark.types import BLOCK, QuantizedQKV

MASKED = -1.0e37
"""Scores at or below this are masked."""
OCTAVES = 20.0
"""A tile's probabilities are scaled to its own maximum, but at most this far below the running
one."""
LEVELS = 255.0
GROUP = 2
"""Consecutive query blocks that share one token list."""
FINE_BINS, COARSE_BINS = 96, 32
FINE_WIDTH, COARSE_WIDTH, BELOW = 0.25, 2.0, 8.0
FINE_SPAN = FINE_BINS * FINE_WIDTH
BEYOND, MOST = 2 + FINE_BINS + COARSE_BINS, 255
"""The first level beyond the histogram's bins, and the last of all."""


def proxy_scores(qkv: QuantizedQKV, scale: float) -> Tensor:
    """Return S float32 [B, H, N, N]: the int8 products of centroids and pooled keys, log2 units."""
    # 128 products of at most 127^2 stay below 2^24: float32 sums them exactly.
    dot = qkv.centroid.float() @ qkv.pooled.float().mT
    return dot * (qkv.centroid_scale * (scale * LOG2E))[..., None] * qkv.pooled_scale[..., None, :]


def biased_blocks(qkv: QuantizedQKV) -> Tensor:
    """Return the blocks with a live key whose bias is not zero, bool [B, N]."""
    biased = (qkv.key_bias != 0) & live_rows(qkv.lengths)
    return biased.unflatten(-1, (-1, BLOCK)).any(-1)


def candidates(exact: Tensor, sinks: tuple[int, int], biased: Tensor) -> Tensor:
    """Return the blocks whose tokens may be refined: routed neither by a row nor by its partner.

    Args: exact bool [..., N, N]; sinks, a range of blocks that are never candidates, no more than
    those that `biased` marks, bool [..., N].
    """
    rows = exact.shape[-2]
    padded = torch.nn.functional.pad(exact, (0, 0, 0, rows % GROUP))
    either = padded.unflatten(-2, (-1, GROUP)).any(-2)
    column = torch.arange(exact.shape[-1], device=exact.device)
    barred = biased | ((column >= sinks[0]) & (column < sinks[1]))
    free = ~either & ~barred[..., None, :]
    return free.repeat_interleave(GROUP, -2)[..., :rows, :]


def levels(above: Tensor, candidate: Tensor) -> Tensor:
    """Return each score's level, int64: 0 no candidate, 1 below the histogram, 2 + bin in it.

    96 bins of 0.25 octaves, then 32 of 2, of which the last takes all that is higher. Levels go on
    in steps of 2, up to 255: those from `BEYOND` on belong to no bin that is admitted in part.

    Args: above, how far a score is above the lowest edge; candidate, bool.
    """
    fine = (above / FINE_WIDTH).floor()
    wide = FINE_BINS + ((above - FINE_SPAN) / COARSE_WIDTH).floor()
    level = 2 + torch.where(above < FINE_SPAN, fine, wide)
    level = torch.where(above >= 0, level.clamp_max(MOST), 1.0)
    return torch.where(candidate, level, 0.0).to(torch.int64)


def admission(histogram: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return which tokens a list takes: those above a level, and so many at that level.

    As many whole bins from the top as hold at most `capacity` tokens. Where more tokens than that
    lie beyond the last bin, the highest, of which the last level may be taken in part.

    Args: histogram of levels, integers [..., MOST + 1].

    Source: INT8 specification 2.6.
    """
    ladder = torch.arange(MOST + 1, device=histogram.device)
    reach = histogram.flip(-1).cumsum(-1).flip(-1)
    fits = ((reach <= capacity) & (ladder >= 2) & (ladder <= BEYOND)).sum(-1)
    highest = (reach >= capacity).sum(-1) - 1
    cut = torch.where(fits > 0, BEYOND - fits, highest)
    more = torch.nn.functional.pad(reach, (0, 1)).gather(-1, cut[..., None] + 1)[..., 0]
    return cut, torch.where(fits > 0, 0, capacity - more)


def listed_tokens(level: Tensor, cut: Tensor, spare: Tensor) -> Tensor:
    """Return the tokens above the cut, and the first `spare` of those at it, ascending.

    Args: level integers [T]; cut and spare, integers [].
    """
    tie = level == cut
    return ((level > cut) | (tie & (tie.cumsum(0) <= spare))).nonzero()[:, 0]


def pair_centroids(
    query_means: Tensor, shift: Tensor, a: float, rotated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what scores tokens for a pair of query blocks: the plain mean of their means, INT8.

    Args: query_means float32 [..., N, D]; shift [..., D]; a = scale log2(e).
    Returns int8 [..., P, D], the factor of its products and what `shift` takes off them, [..., P].
    """
    blocks = query_means.shape[-2]
    missing = blocks % GROUP
    sums = torch.nn.functional.pad(query_means, (0, 0, 0, missing))
    sums = sums.unflatten(-2, (-1, GROUP)).sum(-2)
    size = torch.full(sums.shape[-2:-1], float(GROUP), device=sums.device)
    size[-1] -= missing
    centroid, scale = quantize_rows(basis(sums / size[:, None], rotated))
    factor = scale * a
    return centroid, factor, (centroid.float() @ shift[..., None])[..., 0] * factor


def attend_tile(
    state: tuple[Tensor, Tensor, Tensor], scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a tile of keys to the running (maximum, mass, numerator) of some rows.

        b = max(max_j s_j, M - 20),  p_j = rne(255 2^(s_j - b)),  M' = max(M, b)
        L' = L 2^(M - M') + 2^(b - M') / 255 sum_j p_j,  O' likewise with sum_j p_j v_j

    Args: state ([R], [R], [R, D]); scores float32 [R, 64] in log2 units; values int8 [64, D].

    Source: INT8 specification 2.7.
    """
    high, mass, numerator = state
    peak = torch.maximum(scores.amax(1), high - OCTAVES)
    top = torch.maximum(high, peak)
    p = (torch.exp2(scores - peak[:, None]) * LEVELS).round().clamp(0, LEVELS)
    p = p.masked_fill(scores <= MASKED, 0.0).to(torch.int32)
    weight = torch.exp2(peak - top) / LEVELS
    keep = torch.exp2(high - top)
    product = p @ values.to(torch.int32)
    return (
        top,
        mass * keep + weight * p.sum(1),
        numerator * keep[:, None] + weight[:, None] * product,
    )


def merge_states(
    first: tuple[Tensor, Tensor, Tensor], second: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge two running states over different keys."""
    top = torch.maximum(first[0], second[0])
    a, b = torch.exp2(first[0] - top), torch.exp2(second[0] - top)
    return (
        top,
        first[1] * a + second[1] * b,
        first[2] * a[..., None] + second[2] * b[..., None],
    )


def sol_int8_quantized(
    qkv: QuantizedQKV,
    *,
    tau: float = 1.0,
    scale: float | None = None,
    sinks: tuple[int, int] = (0, 0),
    dense_rows: tuple[int, int] = (0, 0),
    topk_ratio: float = 0.0,
    tail: bool = True,
    coarse_gate: Tensor | None = None,
    token_aug: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attend with the integers, in the order of the specification.

    Args:
        qkv: the operands.
        tau, scale, sinks, dense_rows, topk_ratio, tail, coarse_gate: as `reference.sol_int8`.
        token_aug: tokens that each pair of query blocks may read exactly, beyond its blocks.
        dtype: of the result.

    Returns:
        [B, T, H, D]; rows that are not live are zero.

    Numerics: integer products are exact, all else float32. The tail's value sums are bfloat16; its
    scores are centred by the mean of this call whatever `key_center` is: `shift` brings them to
    the exact keys' origin, row by row.

    Source: INT8 specification 2.4-2.7, 2.9.
    """
    batch, heads, _, head_dim = qkv.query.shape
    scale = resolve_scale(scale, head_dim)
    a = scale * LOG2E
    blocks = qkv.lengths.numel()
    scores = proxy_scores(qkv, scale)
    exact = route(
        scores,
        qkv.query_means,
        qkv.key_var,
        scale=scale,
        tau=tau,
        topk_ratio=topk_ratio,
        sinks=sinks,
        dense_rows=dense_rows,
    )
    refined = torch.zeros_like(exact)
    if token_aug:
        refined = candidates(exact, sinks, biased_blocks(qkv)[:, None])
    out = torch.zeros(batch, heads, blocks * BLOCK, head_dim)
    for b in range(batch):
        for h in range(heads):
            query, key, value = qkv.query[b, h].int(), qkv.key[b, h].int(), qkv.value[b, h]
            value_scale = qkv.value_scale[b, h]
            for m in range(blocks):
                state = _pooled_tail(qkv, scores, exact | refined, b, h, m, tail)
                listed = torch.empty(0, dtype=torch.int64)
                if refined[b, h, m].any():
                    listed, rest = _refine(qkv, scores, refined, b, h, m, a, token_aug)
                    if tail:
                        state = merge_states(state, rest)

                rows = slice(m * BLOCK, (m + 1) * BLOCK)
                factor = qkv.query_scale[b, h, rows] * a
                offset = (query[rows].float() @ qkv.shift[b, h]) * factor
                high = torch.where(state[0] > MASKED, state[0] + offset, NEG)
                state = (high, state[1].expand(BLOCK), state[2].expand(BLOCK, -1))
                blocks_read = exact[b, h, m].nonzero()[:, 0].tolist()
                tiles = [torch.arange(n * BLOCK, (n + 1) * BLOCK) for n in blocks_read]
                for tile in (*tiles, *listed.split(BLOCK)):
                    if tile.numel() == 0:
                        continue
                    s = (query[rows] @ key[tile].mT).float() * factor[:, None]
                    s = s * qkv.key_scale[b, h, tile] + qkv.key_bias[b, tile]
                    state = attend_tile(state, s, value[tile])
                out[b, h, rows] = state[2] / state[1].clamp_min(1e-30)[:, None] * value_scale
    if coarse_gate is not None:
        means = coarse(
            qkv.query_means,
            qkv.key_means,
            qkv.value_sums.float() / qkv.lengths.float()[:, None],
            scale,
        )
        gate = torch.nn.functional.pad(
            coarse_gate.float().transpose(1, 2), (0, 0, 0, blocks * BLOCK - qkv.tokens)
        )
        out = out + gate * means.repeat_interleave(BLOCK, 2)
    out = out.masked_fill(~live_rows(qkv.lengths)[:, None], 0.0)[:, :, : qkv.tokens]
    return out.transpose(1, 2).contiguous().to(dtype)


def _pooled_tail(
    qkv: QuantizedQKV, scores: Tensor, taken: Tensor, b: int, h: int, m: int, tail: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state of the blocks that enter query block m by their sums."""
    s = scores[b, h, m].masked_fill(taken[b, h, m], -math.inf)
    if not tail or bool(taken[b, h, m].all()):
        return torch.tensor(NEG), torch.tensor(0.0), torch.zeros(qkv.query.shape[-1])
    high = s.amax()
    weight = torch.exp2(s - high)
    sums = qkv.value_sums[b, h].float() / qkv.value_scale[b, h]
    return high, (weight * qkv.lengths).sum(), weight @ sums


def _refine(
    qkv: QuantizedQKV,
    scores: Tensor,
    refined: Tensor,
    b: int,
    h: int,
    m: int,
    a: float,
    capacity: int,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the tokens that m's group reads exactly, and the state of its other candidates."""
    first = m - m % GROUP
    members = slice(first, first + GROUP)
    centroid, factor, offset = (
        part[m // GROUP]
        for part in pair_centroids(qkv.query_means[b, h], qkv.shift[b, h], a, qkv.rotated)
    )
    highest = scores[b, h, members].masked_fill(~refined[b, h, members], -math.inf).amax()
    s = (qkv.key[b, h].int() @ centroid.int()).float() * factor * qkv.key_scale[b, h]
    s = s + qkv.key_bias[b] - offset
    candidate = refined[b, h, m].repeat_interleave(BLOCK) & (s > MASKED)
    level = levels(s - highest + BELOW, candidate)
    listed = listed_tokens(level, *admission(level.bincount(minlength=MOST + 1), capacity))
    rest = candidate.clone()
    rest[listed] = False
    s = s.masked_fill(~rest, NEG)
    state = (torch.tensor([NEG]), torch.zeros(1), torch.zeros(1, qkv.query.shape[-1]))
    for n in refined[b, h, m].nonzero()[:, 0].tolist():
        tile = slice(n * BLOCK, (n + 1) * BLOCK)
        state = attend_tile(state, s[None, tile], qkv.value[b, h, tile])
    return listed, (state[0][0], state[1][0], state[2][0])
