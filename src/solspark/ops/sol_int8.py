"""Attend with INT8 operands: route, refine tokens, read exact blocks, summarise the others."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _sol_int8_triton, _triton
from solspark.ops.qkv_producer import quantize_qkv
from solspark.reference.qkv_producer import NEG
from solspark.reference.sol_int8 import LOG2E, live_rows, route
from solspark.reference.sol_int8_quantized import (
    BELOW,
    GROUP,
    LEVELS,
    MASKED,
    MOST,
    OCTAVES,
    admission,
    biased_blocks,
    candidates,
    levels,
    listed_tokens,
    merge_states,
    pair_centroids,
)
from solspark.types import BLOCK, AttentionCall, QuantizedQKV

__all__ = ["TOKEN_BUDGETS", "sol_int8"]

TOKEN_BUDGETS = (0, 64, 128, 192, 256)
SLAB_BYTES = 32 * 2**20
"""Scores of tokens, or of block means, in flight."""

State = tuple[Tensor, Tensor, Tensor]


def sol_int8(
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
    dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor:
    """Attend exactly to the routed blocks and, at the query block's mean, to the sums of others.

        s_ij = a q_i.k_j + bias_j over the keys of exact blocks and of the token list
        S_mn = a qbar_m.(kbar_n - mu) over the blocks that are left, weighing L_n and vsum_n
        out_i = their common softmax, in INT8 products  [+ gate_i oc_m]

    Args:
        qkv: operands of `quantize_qkv` or `qkv_producer`.
        tau: a block is exact when its score exceeds tau standard deviations.
        scale: factor of the logits; None means D ** -0.5.
        sinks: half-open range of key blocks that every query block reads exactly.
        dense_rows: range of query blocks that read every block exactly.
        topk_ratio: above 0, the share of the blocks in no sink that each row reads, instead of tau.
        tail: whether blocks that are not exact enter at all.
        coarse_gate: [B, T, H, D], weighs an attention from block mean to block mean that is added.
        token_aug: tokens that a pair of query blocks reads exactly beyond its blocks: 0, 64, 128,
            192 or 256.
        dtype: of the result.
        impl: "eager", "triton", "hopper" or None for the best that can serve.

    Returns:
        [B, T, H, D] contiguous; rows that are not live are zero.

    Raises:
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: integer products are exact; scores, softmax and sums float32; probabilities are 8 bits
        of each tile's maximum; one rounding to `dtype`. `key_center` may differ from this call's
        mean without effect: the tail is brought to the exact keys' origin, row by row.

    Source: INT8 specification 2.4-2.7, 2.9.
    """
    batch, heads, _, head_dim = qkv.query.shape
    scale = _checks.resolve_scale(scale, head_dim)
    call = AttentionCall(
        batch=batch,
        query_tokens=qkv.tokens,
        key_tokens=qkv.tokens,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        device_type=qkv.query.device.type,
        capability=_dispatch.capability(qkv.query.device),
        key_heads=heads,
        tail="block" if tail else "none",
        requires_grad=_dispatch.needs_grad(coarse_gate),
        variant="tokens" if token_aug else "",
    )
    choice = _dispatch.pick("sol_int8", call, impl)
    out, counts = choice.run(
        qkv, tau, scale, sinks, dense_rows, topk_ratio, tail, coarse_gate, token_aug, dtype
    )
    choice.record(counts, counts.numel() * qkv.lengths.numel())
    return out


def _eager(
    qkv: QuantizedQKV,
    tau: float,
    scale: float,
    sinks: tuple[int, int],
    dense_rows: tuple[int, int],
    topk_ratio: float,
    tail: bool,
    coarse_gate: Tensor | None,
    token_aug: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Attend head by head; return the output and the exact blocks of each row, int64 [B, H, N]."""
    batch, heads, _, head_dim = qkv.query.shape
    device = qkv.query.device
    out = torch.empty(batch, qkv.tokens, heads, head_dim, dtype=dtype, device=device)
    counts = torch.empty(batch, heads, qkv.lengths.numel(), dtype=torch.int64, device=device)
    biased = biased_blocks(qkv)
    live = live_rows(qkv.lengths)[: qkv.tokens, None]
    for b in range(batch):
        for h in range(heads):
            head = _Head(qkv, b, h, scale)
            exact = route(
                head.scores,
                qkv.query_means[b, h],
                qkv.key_var[b, h],
                scale=scale,
                tau=tau,
                topk_ratio=topk_ratio,
                sinks=sinks,
                dense_rows=dense_rows,
            )
            counts[b, h] = exact.sum(-1)
            taken, lists, rest = exact, {}, None
            if token_aug:
                refined = candidates(exact, sinks, biased[b])
                taken = exact | refined
                lists, rest = _refine_tokens(head, refined, token_aug, tail)
            state = _pooled_tail(head, taken, tail)
            if rest is not None:
                state = merge_states(state, rest)
            rows = _exact_rows(head, exact, lists, state)
            if coarse_gate is not None:
                rows = rows + coarse_gate[b, :, h].float() * _coarse_rows(head)
            out[b, :, h] = rows.masked_fill(~live, 0.0).to(dtype)
    return out, counts


class _Head:
    """One head's operands as float32, in which products of int8 rows of 128 are exact."""

    def __init__(self, qkv: QuantizedQKV, b: int, h: int, scale: float):
        self.tokens, self.lengths, self.rotated = qkv.tokens, qkv.lengths.float(), qkv.rotated
        self.scale, self.a = scale, scale * LOG2E
        self.query = qkv.query[b, h]
        self.query_scale = qkv.query_scale[b, h] * self.a
        self.key = qkv.key[b, h].float()
        self.key_scale, self.key_bias = qkv.key_scale[b, h], qkv.key_bias[b]
        self.value = qkv.value[b, h].float()
        self.value_scale = qkv.value_scale[b, h]
        self.value_sums = qkv.value_sums[b, h].float()
        self.query_means, self.key_means = qkv.query_means[b, h], qkv.key_means[b, h]
        self.shift = qkv.shift[b, h]
        dot = qkv.centroid[b, h].float() @ qkv.pooled[b, h].float().mT
        factor = (qkv.centroid_scale[b, h] * self.a)[:, None]
        self.scores = dot * factor * qkv.pooled_scale[b, h]
        self.blocks = self.scores.shape[0]


def _pooled_tail(head: _Head, taken: Tensor, tail: bool) -> State:
    """Return, for each query block, the state of the blocks that enter by their sums."""
    if not tail:
        return (
            torch.full_like(head.lengths, NEG),
            torch.zeros_like(head.lengths),
            torch.zeros_like(head.value_sums),
        )
    scores = head.scores.masked_fill(taken, -math.inf)
    high = scores.amax(1).clamp_min(NEG)
    weight = torch.exp2(scores - high[:, None])
    return high, weight @ head.lengths, weight @ (head.value_sums / head.value_scale)


def _fold(state: State, scores: Tensor, values: Tensor) -> State:
    """Add tiles of keys to running states, as if one after another.

    Args: state ([R], [R], [R, D]); scores [R, tiles, 64] in log2 units; values [64 tiles, D].

    The running maximum before each tile is a cumulative one, so the probabilities' bytes are those
    of the sequential loop; only the order of float32 sums differs.
    """
    high, mass, numerator = state
    running = torch.cat([high[:, None], scores.amax(2)], 1).cummax(1).values
    peak = torch.maximum(scores.amax(2), running[:, :-1] - OCTAVES)
    top = running[:, -1]
    p = torch.exp2(scores - peak[..., None]).mul_(LEVELS).round_().clamp_(0, LEVELS)
    p.masked_fill_(scores <= MASKED, 0.0)
    p *= (torch.exp2(peak - top[:, None]) / LEVELS)[..., None]
    keep = torch.exp2(high - top)
    p = p.flatten(1)
    return top, mass * keep + p.sum(1), numerator * keep[:, None] + p @ values


def _exact_rows(head: _Head, exact: Tensor, lists: dict[int, Tensor], state: State) -> Tensor:
    """Return float32 [T, D]: each query block over its exact blocks, its tokens and its tail."""
    device = exact.device
    inside = torch.arange(BLOCK, device=device)
    out = torch.empty(head.blocks * BLOCK, head.value.shape[1], device=device)
    for m in range(head.blocks):
        rows = slice(m * BLOCK, (m + 1) * BLOCK)
        query, factor = head.query[rows].float(), head.query_scale[rows]
        # Exact keys are centred by key_center, the tail by this call's mean.
        high = torch.where(state[0][m] > MASKED, state[0][m] + (query @ head.shift) * factor, NEG)
        running = (high, state[1][m].expand(BLOCK), state[2][m].expand(BLOCK, -1))
        tiles = exact[m].nonzero()[:, 0]
        chosen = [(tiles[:, None] * BLOCK + inside).flatten()]
        listed = lists.get(m // GROUP)
        if listed is not None and listed.numel():
            chosen.append(listed)
        for index in chosen:
            missing = -index.numel() % BLOCK
            scores = (query @ head.key[index].mT) * factor[:, None]
            scores = scores * head.key_scale[index] + head.key_bias[index]
            scores = torch.nn.functional.pad(scores, (0, missing), value=NEG)
            values = torch.nn.functional.pad(head.value[index], (0, 0, 0, missing))
            running = _fold(running, scores.unflatten(1, (-1, BLOCK)), values)
        out[rows] = running[2] / running[1].clamp_min(1e-30)[:, None] * head.value_scale
    return out[: head.tokens]


def _refine_tokens(
    head: _Head, refined: Tensor, capacity: int, tail: bool
) -> tuple[dict[int, Tensor], State | None]:
    """Score every candidate token at the mean of a pair of query blocks.

    Args:
        head: one head.
        refined: bool [N, N], candidate blocks, the same in both rows of a pair.
        capacity: largest list.
        tail: whether the tokens not listed count.

    Returns:
        pair -> ascending token indices, for pairs with candidates, and for each query block the
        state of its other candidate tokens (None without a tail).
    """
    device = refined.device
    pairs = -(-head.blocks // GROUP)
    pad = pairs * GROUP - head.blocks
    centroid, factor, offset = pair_centroids(head.query_means, head.shift, head.a, head.rotated)
    highest = head.scores.masked_fill(~refined, -math.inf).amax(1)
    highest = torch.nn.functional.pad(highest, (0, pad), value=-math.inf)
    highest = highest.unflatten(0, (-1, GROUP)).amax(1)
    refined = refined[::GROUP]

    lists: dict[int, Tensor] = {}
    states = (
        torch.full((pairs,), NEG, device=device),
        torch.zeros(pairs, device=device),
        torch.zeros(pairs, head.value.shape[1], device=device),
    )
    active = refined.any(1).nonzero()[:, 0]
    # Five arrays of this size are alive at the peak.
    for some in active.split(max(1, SLAB_BYTES // (20 * head.key.shape[0]))):
        scores = (centroid[some].float() @ head.key.mT) * factor[some, None]
        scores = scores * head.key_scale + head.key_bias - offset[some, None]
        candidate = refined[some].repeat_interleave(BLOCK, 1) & (scores > MASKED)
        level = levels(scores - highest[some, None] + BELOW, candidate)
        histogram = torch.zeros(len(some), MOST + 1, dtype=torch.int64, device=device)
        histogram.scatter_add_(1, level, torch.ones_like(level))
        cuts, spares = admission(histogram, capacity)
        for place, pair in enumerate(some.tolist()):
            listed = listed_tokens(level[place], cuts[place], spares[place])
            lists[pair] = listed
            candidate[place, listed] = False
        if tail:
            scores = scores.masked_fill(~candidate, NEG).unflatten(1, (-1, BLOCK))
            part = _fold((states[0][some], states[1][some], states[2][some]), scores, head.value)
            for whole, piece in zip(states, part, strict=True):
                whole[some] = piece
    if not tail:
        return lists, None
    high, mass, numerator = (x.repeat_interleave(GROUP, 0)[: head.blocks] for x in states)
    return lists, (high, mass, numerator)


def _coarse_rows(head: _Head) -> Tensor:
    """Return the attention from block mean to block mean, float32 [T, D], in slices of queries."""
    means = head.value_sums / head.lengths[:, None]
    step = max(1, SLAB_BYTES // (8 * head.blocks))
    parts = [
        ((part @ head.key_means.mT) * head.scale).softmax(-1) @ means
        for part in head.query_means.split(step)
    ]
    return torch.cat(parts).repeat_interleave(BLOCK, 0)[: head.tokens]


@torch.library.custom_op("solspark::sol_int8", mutates_args=())
def whole_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tau: Tensor,
    scale: float,
    sinks: list[int],
    dense_rows: list[int],
    key_bias: Tensor | None,
    topk_ratio: float,
    tail: bool,
    block_len: Tensor | None,
    coarse_gate: Tensor | None,
    token_aug: int,
    rotate: bool,
    balance: bool,
    impl: str | None,
) -> Tensor:
    """Quantise and attend as one node of a compiled graph; arguments are checked by the caller.

    tau is a float64 scalar on the CPU: as a number every new value would need a graph of its own.
    """
    qkv = quantize_qkv(
        query,
        key,
        value,
        key_bias=key_bias,
        block_len=block_len,
        rotate=rotate,
        balance=balance,
        impl=_dispatch.where_available("qkv_producer", impl),
    )
    return sol_int8(
        qkv,
        tau=float(tau),
        scale=scale,
        sinks=(sinks[0], sinks[1]),
        dense_rows=(dense_rows[0], dense_rows[1]),
        topk_ratio=topk_ratio,
        tail=tail,
        coarse_gate=coarse_gate,
        token_aug=token_aug,
        dtype=query.dtype,
        impl=impl,
    )


@whole_call.register_fake
def _(query, key, value, *options):
    return value.new_empty(value.shape)


def _reasons(call: AttentionCall) -> list[str]:
    return ["it has no backward pass"] if call.requires_grad else []


def _triton_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call, head_dims=(128,))


def _hopper_reasons(call: AttentionCall) -> list[str]:
    own = ["it does not gather single tokens"] if call.variant == "tokens" else []
    return _triton.hopper_obstacles(call, own, head_dims=(128,))


_dispatch.register("sol_int8", "eager", _reasons, _eager)
_dispatch.register("sol_int8", "triton", _triton_reasons, _sol_int8_triton.run)
_dispatch.register(
    "sol_int8",
    "hopper",
    _hopper_reasons,
    partial(_sol_int8_triton.run, hopper=True),
    on_request="it has been compiled but not run yet, so it serves only when asked for",
)
