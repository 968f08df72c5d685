"""Decide which key blocks each query block reads exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solspark.types import BlockPlan, block_count

Range = tuple[int, int]


def select_blocks(
    scores: Tensor,
    *,
    thresholds: Tensor | None = None,
    top_k: int | None = None,
    candidates: int | None = None,
    sinks: Sequence[Range] = (),
    dense_rows: Sequence[Range] = (),
    local_radius: int = -1,
    live: Tensor | None = None,
    query_tokens: int,
    key_tokens: int,
) -> BlockPlan:
    """Select blocks by threshold or by rank, then add what is read in any case.

        candidate(j) = j < candidates and j in no sink and live_j
        picked(i, j) = candidate(j) and (r_ij > thr_i, or r_ij among the top_k of row i's
        candidates) exact(i, j)  = live_j and (picked(i, j) or |i - j| <= local_radius or j in a
        sink or i in dense_rows)

    Args:
        scores: float32 (float64) [B, H, NQ, NK]. NaN ranks last and exceeds no threshold.
        thresholds: float32 (float64) [B, H, NQ], compared strictly. Exactly one of this and
            `top_k`.
        top_k: candidates a row; a row with fewer live ones takes them all. Equal scores: the lower
            block index.
        candidates: only key blocks [0, candidates) compete; None means all.
        sinks: key-block ranges (first, stop) that every query block reads, outside the budget.
        dense_rows: query-block ranges (first, stop) that read every key block.
        local_radius: r >= 0 adds the band |i - j| <= r outside the budget; -1 adds none.
        live: bool [B, 1 or H, NK]; a block that is not live is never selected. None means all are.
        query_tokens: Lq.
        key_tokens: Lk.

    Returns:
        BlockPlan.

    Source: Sol-Attn sections 1.3 and 1.11 a.
    """
    rows, columns = scores.shape[2:]
    query_index = torch.arange(rows, device=scores.device)[:, None]
    key_index = torch.arange(columns, device=scores.device)

    always = (query_index - key_index).abs() <= local_radius
    sink = torch.zeros(columns, dtype=torch.bool, device=scores.device)
    for first, stop in sinks:
        sink |= (key_index >= first) & (key_index < stop)
    always = always | sink
    for first, stop in dense_rows:
        always = always | ((query_index >= first) & (query_index < stop))

    alive = torch.ones(1, 1, 1, columns, dtype=torch.bool, device=scores.device)
    if live is not None:
        alive = live[:, :, None]
    limit = columns if candidates is None else candidates
    candidate = ((key_index < limit) & ~sink & alive).expand(scores.shape)

    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if thresholds is not None:
        picked = candidate & (scores > thresholds[..., None])
    else:
        # Stable sorts: by score first, then candidates before the rest, each keeping the lower
        # index first.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        order = order.gather(
            -1, (~candidate).gather(-1, order).int().sort(dim=-1, stable=True).indices
        )
        rank = order.argsort(-1)
        picked = candidate & (rank < (top_k or 0))
    mask = (picked | always) & alive
    return plan_from_mask(mask, query_tokens=query_tokens, key_tokens=key_tokens)


def plan_from_mask(
    mask: Tensor, *, query_tokens: int, key_tokens: int, most: int | None = None
) -> BlockPlan:
    """Return the plan that reads exactly the block pairs set in a mask.

    Args:
        mask: bool [B, H, NQ, NK].
        query_tokens: Lq, with NQ = ceil(Lq / 64).
        key_tokens: Lk, with NK = ceil(Lk / 64).
        most: a bound on the blocks of any row, the width of `indices`; None takes NK.

    Returns:
        BlockPlan. Work space is one head's lists at a time.

    Raises:
        ValueError: the mask is not bool [B, H, NQ, NK], or has not the blocks of the tokens.
    """
    if mask.dtype != torch.bool or mask.ndim != 4:
        raise ValueError(
            f"mask: expected bool [B, H, NQ, NK], got {mask.dtype} {tuple(mask.shape)}"
        )
    batch, heads, rows, columns = mask.shape
    if rows != block_count(query_tokens) or columns != block_count(key_tokens):
        raise ValueError(
            f"mask: expected {block_count(query_tokens)} x {block_count(key_tokens)} blocks for "
            f"{query_tokens} query and {key_tokens} key tokens, got {rows} x {columns}"
        )
    width = columns if most is None else min(most, columns)
    words = -(-columns // 32)
    index_type = torch.int16 if columns < 2**15 else torch.int32
    bits = mask.new_zeros((batch, heads, rows, words), dtype=torch.int32)
    indices = mask.new_zeros((batch, heads, rows, width), dtype=index_type)
    powers = torch.tensor(
        [1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int32, device=mask.device
    )
    number = torch.arange(columns, device=mask.device).to(index_type)
    for sample in range(batch):
        for head in range(heads):
            here = mask[sample, head]
            padded = here.new_zeros((rows, words * 32))
            padded[:, :columns] = here
            weighted = padded.view(rows, words, 32) * powers
            bits[sample, head] = weighted.sum(-1, dtype=torch.int32)
            # A set block's place in the list is the number of set blocks before it; the rest go to
            # a spare column.
            place = torch.where(here, here.cumsum(-1) - 1, width).clamp(max=width)
            lists = indices.new_zeros((rows, width + 1))
            lists.scatter_(-1, place, number.expand(rows, columns))
            indices[sample, head] = lists[:, :width]
    counts = mask.sum(-1, dtype=torch.int32)
    return BlockPlan(bits, indices, counts, query_tokens, key_tokens)


def mask_from_plan(plan: BlockPlan) -> Tensor:
    """Return the block pairs that a plan reads exactly.

    Args:
        plan: any plan.

    Returns:
        bool [B, H, NQ, NK] on the plan's device.

    Raises:
        TypeError: `plan` is no BlockPlan.
    """
    if not isinstance(plan, BlockPlan):
        raise TypeError(f"plan: expected a BlockPlan, got {type(plan).__name__}")
    return unpack_bits(plan.bits, plan.key_blocks)


def unpack_bits(bits: Tensor, columns: int) -> Tensor:
    """Return bool [..., columns] from int32 words [..., ceil(columns / 32)], lowest bit first."""
    place = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> place) & 1).flatten(-2)[..., :columns].bool()
