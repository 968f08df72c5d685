"""Block lists for the attend level: what a kernel is given when no plan is made."""

from __future__ import annotations

import torch
from torch import Tensor

from solspark.types import BLOCK, BlockPlan, block_count

LISTS = ("random", "clustered", "equal")
SHARED = 0.7
"""Part of a clustered list that the next query block's list repeats."""


def block_lists(
    kind: str,
    heads: int,
    rows: int,
    columns: int,
    kept: int,
    device: torch.device,
    *,
    seed: int = 0,
) -> Tensor:
    """Return int64 [H, rows, kept]: ascending, distinct key blocks for every query block.

    Args:
        kind: "random"; "clustered", each list repeating 70 % of the one before it; "equal", one
            list a head.
        heads: H.
        rows: query blocks.
        columns: key blocks.
        kept: key blocks a row.
        device: where to make them.
        seed: of the generator.

    Raises:
        ValueError: an unknown kind, or kept outside 1..columns.
    """
    if kind not in LISTS:
        raise ValueError(f"lists: expected one of {', '.join(LISTS)}, got {kind!r}")
    if not 1 <= kept <= columns:
        raise ValueError(f"kept: expected 1..{columns}, got {kept}")
    generator = torch.Generator(device=device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    if kind == "random":
        lists = torch.stack(
            [uniform(rows, columns).topk(kept, dim=1).indices for _ in range(heads)]
        )
    elif kind == "equal":
        lists = uniform(heads, 1, columns).topk(kept, dim=2).indices.expand(-1, rows, -1)
    else:
        lists = _clustered(uniform, heads, rows, columns, kept)
    return lists.sort(dim=2).values


def _clustered(uniform, heads: int, rows: int, columns: int, kept: int) -> Tensor:
    """Walk down the rows: keep a random 70 % of each list, draw the rest among the others."""
    stay = min(kept, max(round(SHARED * kept), 2 * kept - columns))
    current = uniform(heads, columns).topk(kept, dim=1).indices
    lists = [current]
    for _ in range(rows - 1):
        chosen = torch.zeros(heads, columns, device=current.device)
        chosen.scatter_(1, current, 1.0)
        draw = uniform(heads, columns)
        old = (draw * chosen).topk(stay, dim=1).indices
        parts = [old]
        if kept > stay:
            parts.append((draw * (1 - chosen)).topk(kept - stay, dim=1).indices)
        current = torch.cat(parts, dim=1)
        lists.append(current)
    return torch.stack(lists, dim=1)


def plan_from_lists(lists: Tensor, query_tokens: int, key_tokens: int) -> BlockPlan:
    """Return a BlockPlan [1, H, NQ, NK] that reads the given lists.

    Args:
        lists: int64 [H, NQ, kept], ascending.
        query_tokens: L_q.
        key_tokens: L_k.
    """
    heads, rows, kept = lists.shape
    columns = block_count(key_tokens)
    words = -(-columns // 32)
    bits = torch.zeros(1, heads, rows, words, dtype=torch.int64, device=lists.device)
    bits[0].scatter_add_(2, lists // 32, torch.ones_like(lists) << (lists % 32))
    bits = torch.where(bits >= 2**31, bits - 2**32, bits)
    index = torch.int16 if columns < 2**15 else torch.int32
    return BlockPlan(
        bits.to(torch.int32),
        lists[None].to(index).contiguous(),
        torch.full((1, heads, rows), kept, dtype=torch.int32, device=lists.device),
        query_tokens,
        key_tokens,
    )


def executed_pairs(plan: BlockPlan) -> int:
    """Return the (query token, key token) pairs that a plan reads exactly; waits for the device."""
    tokens = torch.full((plan.query_blocks,), BLOCK, dtype=torch.float64, device=plan.counts.device)
    tokens[-1] = plan.query_tokens - BLOCK * (plan.query_blocks - 1)
    keys = plan.counts.double() * BLOCK
    last = plan.key_blocks - 1
    ragged = (plan.bits[..., last // 32] >> (last % 32)) & 1
    keys -= ragged * (plan.key_blocks * BLOCK - plan.key_tokens)
    return int((keys * tokens).sum())


def plan_density(plan: BlockPlan) -> float:
    """Return the share of (query block, key block) pairs read exactly; waits for the device."""
    return float(plan.counts.double().mean()) / plan.key_blocks
