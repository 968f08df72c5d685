"""Decide which key blocks each query block reads exactly, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.reference.select_blocks import mask_from_plan, plan_from_mask
from solspark.types import AttentionCall, BlockPlan, block_count

__all__ = ["mask_from_plan", "plan_from_mask", "select_blocks"]

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
    impl: str | None = None,
) -> BlockPlan:
    """Select blocks by threshold or by rank, then add what is read in any case.

        candidate(j) = j < candidates and j in no sink and live_j
        picked(i, j) = candidate(j) and (r_ij > thr_i, or r_ij among the top_k of row i's
        candidates) exact(i, j)  = live_j and (picked(i, j) or |i - j| <= local_radius or j in a
        sink or i in dense_rows)

    Args:
        scores: float32 (float64) [B, H, NQ, NK]. NaN ranks last and exceeds no threshold.
        thresholds: same type [B, H, NQ], compared strictly. Exactly one of this and `top_k`.
        top_k: candidates a row; a row with fewer live ones takes them all. Equal scores: the lower
            block index.
        candidates: only key blocks [0, candidates) compete; None means all.
        sinks: key-block ranges (first, stop) that every query block reads, outside the budget.
        dense_rows: query-block ranges (first, stop) that read every key block.
        local_radius: r >= 0 adds the band |i - j| <= r outside the budget; -1 adds none.
        live: bool [B, 1 or H, NK]; a block that is not live is never selected. None means all are.
        query_tokens: Lq.
        key_tokens: Lk.
        impl: "eager", "triton", "hopper" or None for the best that can serve.

    Returns:
        BlockPlan: bits int32 [B, H, NQ, ceil(NK / 32)], ascending lists int16 or int32 [B, H, NQ,
            M], counts int32.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: comparisons only; nothing is rounded.

    Source: Sol-Attn sections 1.3 and 1.11 a.
    """
    _checks.check_tensor("scores", scores, 4, "[B, H, NQ, NK]")
    _checks.check_dtype("scores", scores, (torch.float32, torch.float64))
    batch, heads, rows, columns = scores.shape
    _checks.check_int("query_tokens", query_tokens, 1)
    _checks.check_int("key_tokens", key_tokens, 1)
    if (rows, columns) != (block_count(query_tokens), block_count(key_tokens)):
        raise ValueError(
            f"scores: expected {block_count(query_tokens)} x {block_count(key_tokens)} blocks for "
            f"{query_tokens} query and {key_tokens} key tokens, got {rows} x {columns}"
        )
    if (thresholds is None) == (top_k is None):
        raise ValueError(
            "thresholds, top_k: expected exactly one of them, got "
            + ("neither" if top_k is None else "both")
        )
    if thresholds is not None:
        _checks.check_tensor("thresholds", thresholds, 3, "[B, H, NQ]")
        if thresholds.shape != scores.shape[:3]:
            raise ValueError(
                f"thresholds: expected {tuple(scores.shape[:3])}, got {tuple(thresholds.shape)}"
            )
    if top_k is not None:
        _checks.check_int("top_k", top_k, 0)
    if candidates is not None:
        _checks.check_int("candidates", candidates, 0, columns)
    sink_ranges = _checks.check_ranges("sinks", sinks, columns)
    row_ranges = _checks.check_ranges("dense_rows", dense_rows, rows)
    _checks.check_int("local_radius", local_radius, -1)
    if live is not None:
        _checks.check_tensor("live", live, 3, "[B, 1 or H, NK]")
        _checks.check_dtype("live", live, (torch.bool,))
        if tuple(live.shape) not in ((batch, 1, columns), (batch, heads, columns)):
            raise ValueError(
                f"live: expected [{batch}, 1 or {heads}, {columns}], got {tuple(live.shape)}"
            )

    call = AttentionCall(
        batch=batch,
        query_tokens=query_tokens,
        key_tokens=key_tokens,
        heads=heads,
        head_dim=0,
        dtype=scores.dtype,
        device_type=scores.device.type,
        capability=_dispatch.capability(scores.device),
    )
    choice = _dispatch.pick("select_blocks", call, impl)
    plan = choice.run(
        scores,
        thresholds,
        top_k,
        columns if candidates is None else candidates,
        sink_ranges,
        row_ranges,
        local_radius,
        live,
        query_tokens,
        key_tokens,
    )
    choice.record()
    return plan


def list_width(
    columns: int,
    top_k: int | None,
    sinks: Sequence[Range],
    dense_rows: Sequence[Range],
    local_radius: int,
) -> int:
    """Return the most key blocks that a row can read, known without looking at the scores."""
    if top_k is None or dense_rows:
        return columns
    most = top_k + sum(stop - first for first, stop in sinks) + max(0, 2 * local_radius + 1)
    return max(1, min(most, columns))


@torch.library.custom_op("solspark::select_blocks_eager", mutates_args=())
def _opaque(
    scores: Tensor,
    thresholds: Tensor | None,
    top_k: int | None,
    candidates: int,
    sinks: Sequence[int],
    dense_rows: Sequence[int],
    local_radius: int,
    live: Tensor | None,
    query_tokens: int,
    key_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select eagerly as one node of a compiled graph, rather than one for each head."""
    plan = _select(
        scores,
        thresholds,
        top_k,
        candidates,
        _pairs(sinks),
        _pairs(dense_rows),
        local_radius,
        live,
        query_tokens,
        key_tokens,
    )
    return plan.bits, plan.indices, plan.counts


@_opaque.register_fake
def _(scores, thresholds, top_k, candidates, sinks, dense_rows, local_radius, *_):
    width = list_width(scores.shape[3], top_k, _pairs(sinks), _pairs(dense_rows), local_radius)
    return _empty_plan(scores, width)


def _pairs(flat: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges of a flat list (operators take lists of ints only)."""
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _eager(
    scores: Tensor,
    thresholds: Tensor | None,
    top_k: int | None,
    candidates: int,
    sinks: tuple[Range, ...],
    dense_rows: tuple[Range, ...],
    local_radius: int,
    live: Tensor | None,
    query_tokens: int,
    key_tokens: int,
) -> BlockPlan:
    """Select, inside a compiled graph as one node of it."""
    tokens = (query_tokens, key_tokens)
    if not torch.compiler.is_compiling():
        return _select(
            scores, thresholds, top_k, candidates, sinks, dense_rows, local_radius, live, *tokens
        )
    flat_sinks = [edge for item in sinks for edge in item]
    flat_rows = [edge for item in dense_rows for edge in item]
    bits, indices, counts = _opaque(
        scores, thresholds, top_k, candidates, flat_sinks, flat_rows, local_radius, live, *tokens
    )
    return BlockPlan(bits, indices, counts, *tokens)


def _select(
    scores: Tensor,
    thresholds: Tensor | None,
    top_k: int | None,
    candidates: int,
    sinks: tuple[Range, ...],
    dense_rows: tuple[Range, ...],
    local_radius: int,
    live: Tensor | None,
    query_tokens: int,
    key_tokens: int,
) -> BlockPlan:
    """Select one head at a time, so that work space is one head's block pairs."""
    batch, heads, rows, columns = scores.shape
    device = scores.device
    competes = torch.zeros(columns, dtype=torch.bool, device=device)
    competes[:candidates] = True
    always = torch.zeros((rows, columns), dtype=torch.bool, device=device)
    for first, stop in sinks:
        competes[first:stop] = False
        always[:, first:stop] = True
    for first, stop in dense_rows:
        always[first:stop] = True
    if local_radius >= 0:
        offset = torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)
        always |= offset.abs() <= local_radius

    mask = torch.empty(scores.shape, dtype=torch.bool, device=device)
    for sample in range(batch):
        for head in range(heads):
            alive = None if live is None else live[sample, head if live.shape[1] > 1 else 0]
            candidate = competes if alive is None else competes & alive
            here = scores[sample, head]
            if thresholds is not None:
                picked = here > thresholds[sample, head, :, None]
            else:
                picked = _largest(here, candidate, min(top_k or 0, columns))
            exact = (picked & candidate) | always
            mask[sample, head] = exact if alive is None else exact & alive
    most = list_width(columns, top_k, sinks, dense_rows, local_radius)
    return plan_from_mask(mask, query_tokens=query_tokens, key_tokens=key_tokens, most=most)


def _largest(scores: Tensor, candidate: Tensor, count: int) -> Tensor:
    """Mark the `count` largest candidates of each row, of equal ones those of lower index.

    Whatever exceeds the count-th value is in; of those that equal it, the first few fill the
    budget.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    ranked = torch.where(candidate & ~scores.isnan(), scores, float("-inf"))
    cutoff = ranked.topk(count, -1).values[..., -1:]
    above = ranked > cutoff
    level = (ranked == cutoff) & candidate
    room = count - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def _launch(
    scores: Tensor,
    thresholds: Tensor | None,
    top_k: int,
    candidates: int,
    sinks: Sequence[int],
    dense_rows: Sequence[int],
    local_radius: int,
    live: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the Triton kernel; ranges become flags on the device, without a copy from the host."""
    from solspark.kernels.select_blocks import launch_select_blocks

    rows, columns = scores.shape[2:]
    column_flags = scores.new_zeros(columns, dtype=torch.int8)
    column_flags[:candidates] = 1
    for first, stop in _pairs(sinks):
        column_flags[first:stop] = 2
    row_flags = scores.new_zeros(rows, dtype=torch.int8)
    for first, stop in _pairs(dense_rows):
        row_flags[first:stop] = 1
    bits, indices, counts = _empty_plan(scores, width)
    alive = None if live is None else live.view(torch.uint8)
    with torch.cuda.device_of(scores):
        launch_select_blocks(
            scores,
            thresholds,
            column_flags,
            row_flags,
            alive,
            bits,
            indices,
            counts,
            top_k=top_k,
            local_radius=local_radius,
        )
    return bits, indices, counts


_operator = torch.library.custom_op("solspark::select_blocks", _launch, mutates_args=())


@_operator.register_fake
def _(scores, thresholds, top_k, candidates, sinks, dense_rows, local_radius, live, width):
    return _empty_plan(scores, width)


def _empty_plan(scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return unwritten bits, lists of `width` and counts for scores [B, H, NQ, NK]."""
    columns = scores.shape[3]
    index_type = torch.int16 if columns < 2**15 else torch.int32
    return (
        scores.new_empty((*scores.shape[:3], -(-columns // 32)), dtype=torch.int32),
        scores.new_empty((*scores.shape[:3], width), dtype=index_type),
        scores.new_empty(scores.shape[:3], dtype=torch.int32),
    )


def _run_triton(
    scores: Tensor,
    thresholds: Tensor | None,
    top_k: int | None,
    candidates: int,
    sinks: tuple[Range, ...],
    dense_rows: tuple[Range, ...],
    local_radius: int,
    live: Tensor | None,
    query_tokens: int,
    key_tokens: int,
) -> BlockPlan:
    """Select in one launch, row by row."""
    width = list_width(scores.shape[3], top_k, sinks, dense_rows, local_radius)
    bits, indices, counts = _triton.entry(_operator, _launch)(
        scores.contiguous(),
        None if thresholds is None else thresholds.contiguous(),
        0 if top_k is None else min(top_k, scores.shape[3]),
        candidates,
        [edge for item in sinks for edge in item],
        [edge for item in dense_rows for edge in item],
        local_radius,
        None if live is None else live.contiguous(),
        width,
    )
    return BlockPlan(bits, indices, counts, query_tokens, key_tokens)


def _triton_reasons(call: AttentionCall) -> list[str]:
    found = _triton.obstacles(replace(call, head_dim=64))  # planning has no head dim
    if call.dtype != torch.float32:
        found.append(f"scores are {str(call.dtype).removeprefix('torch.')}, not float32")
    return found


_dispatch.register("select_blocks", "eager", _dispatch.never_declines, _eager)
_dispatch.register("select_blocks", "triton", _triton_reasons, _run_triton)
