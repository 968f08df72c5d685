"""Attention under a given plan: exact blocks and summaries in one softmax, on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch
from solspark.ops._block_sparse_triton import hopper_reasons, run_kernel, triton_reasons
from solspark.reference.merge import log_of_sum, merge
from solspark.reference.quantize_fp8 import fp8_attention_inputs
from solspark.reference.select_blocks import unpack_bits
from solspark.types import BLOCK, BlockPlan, BlockSummaries, block_count

__all__ = ["PRECISIONS", "TAILS", "block_sparse_attention"]

TAILS = ("query", "block", "block8x8", "none")
"""How skipped blocks enter: per query row, per query block, per 8 rows and keys, or not."""

PRECISIONS = ("native", "fp8")
"""What the products are made of: numbers of the input type, or of e4m3."""

HEAD_BYTES = 64 * 2**20
"""Accumulation-type copy of K and V of the heads in flight (one head at least)."""

LIST_BLOCKS = 64
"""Exact key blocks of one query block that are attended in one step of the online softmax."""

STEP_BLOCKS = 128
"""Gathered key blocks in flight: 4 MiB of float32 keys at D = 128, near a CPU cache's size."""

TAIL_LOGITS = 2**22
"""Logits against summaries in flight."""


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    *,
    summaries: BlockSummaries | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    tail: str = "query",
    kv_splits: int = 1,
    precision: str = "native",
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend exactly to the planned blocks and through one summary to each of the others.

        x_tu = scale * q_t . k_u + bias_u            for every key u of an exact block
        y_tj = scale * q_t . keys_pj + log_mass_pj   for every skipped block j, p the parent of t's
        block out_t = (sum_u e^x_tu v_u + sum_j e^y_tj values_pj) / (sum_u e^x_tu + sum_j e^y_tj)

    With tail "block" the logits y use the mean of the query block's rows, rounded to the input
    type, so that the 64 rows share one state of the skipped blocks; with "block8x8" the same holds
    for 8-row query means and summaries of 8 keys each. Each row still merges that state with its
    own exact one.

    Args:
        query: [B, Lq, H, D], float16, bfloat16, float32 or float64, any strides; D a multiple of 8.
        key, value: [B, Lk, Hk, D], same type; Hk divides H, query head h reads key head h // (H /
            Hk).
        plan: for these Lq and Lk and H heads.
        summaries: keys and values [B, P, Hs, NK, D] with Hs in {H, Hk}; None drops the skipped
            blocks. With "block8x8" there are ceil(Lk / 8) of them.
        scale: factor of the logits; None means D ** -0.5.
        key_bias: natural log, one value a key, as in `pool`, added to the exact keys' logits;
            summaries already carry it. A key with bias -inf has no effect, whatever it holds. A
            bool tensor keeps where true.
        tail: "query", "block", "block8x8" or "none" (as without summaries).
        kv_splits: contiguous ranges of key blocks attended one by one and merged; an empty range is
            fine.
        precision: "native", or "fp8": queries, keys, values and summaries are rounded to e4m3, with
            one scale a query block, key head and value channel. Inputs are finite then, but for
            keys of bias -inf, and summaries lie within the hulls of keys and values.
        return_lse: also return the log of the denominator.
        impl: "eager", "triton", "hopper" or None for the best that can serve.

    Returns:
        out [B, Lq, H, D] in the query's type, and if asked lse float32 (float64) [B, Lq, H],
        natural log. A row that represents no key is zero, with lse -inf.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics:
        Products, softmax and sums in float32 (float64 for float64), one rounding of the output. An
        implementation for a GPU may round the probabilities to the input type, with "fp8" to e4m3,
        before the product with the values.

    Source: Sol-Attn sections 1.4, 1.7 and 1.8; Spark section 5.
    """
    _checks.check_tensor("query", query, 4, "[B, Lq, H, D]")
    _checks.check_tensor("key", key, 4, "[B, Lk, Hk, D]")
    _checks.check_tensor("value", value, 4, "[B, Lk, Hk, D]")
    batch, query_tokens, heads, head_dim = query.shape
    key_tokens, key_heads = key.shape[1], key.shape[2]
    if key.shape[0] != batch or key.shape[3] != head_dim or not key_heads or heads % key_heads:
        raise ValueError(
            f"key: expected [{batch}, Lk, Hk dividing {heads}, {head_dim}], got {tuple(key.shape)}"
        )
    if query_tokens < 1 or key_tokens < 1:
        raise ValueError(
            f"query and key: expected at least one token, got {query_tokens} and {key_tokens}"
        )
    _checks.check_head_dim("query", query)
    _checks.check_dtype("query", query)
    _checks.check_same("key", key, "query", query, shape=False)
    _checks.check_same("value", value, "key", key, shape=True)
    _check_plan(plan, query, key_tokens)
    _checks.check_choice("tail", tail, TAILS)
    if tail == "none":
        summaries = None
    if summaries is None:
        tail = "none"
    else:
        summaries = _check_summaries(summaries, query, key_tokens, key_heads, tail)
    scale = _checks.resolve_scale(scale, head_dim)
    bias = _checks.normalise_key_bias(key_bias, batch, heads, key_tokens, key)
    _checks.check_int("kv_splits", kv_splits, 1)
    _checks.check_choice("precision", precision, PRECISIONS)
    _checks.check_bool("return_lse", return_lse)
    query, key, value = (_checks.last_dim_contiguous(item) for item in (query, key, value))

    call = _dispatch.describe(
        query,
        key,
        parents=1 if summaries is None else summaries.keys.shape[1],
        tail=tail,
        key_bias=bias is not None,
        return_lse=return_lse,
        kv_splits=kv_splits,
        precision=precision,
        aligned=_aligned(query, key, value),
        requires_grad=_dispatch.needs_grad(query, key, value)
        or (summaries is not None and _dispatch.needs_grad(summaries.keys, summaries.values)),
    )
    choice = _dispatch.pick("block_sparse_attention", call, impl)
    out, lse = choice.run(
        query, key, value, plan, summaries, scale, bias, tail, kv_splits, precision, return_lse
    )
    choice.record(plan.counts, plan.counts.numel() * plan.key_blocks)  # summed when read
    return (out, lse) if return_lse else out


def _check_plan(plan: BlockPlan, query: Tensor, key_tokens: int) -> None:
    """Raise unless the plan is one for this query and this many keys."""
    if not isinstance(plan, BlockPlan):
        raise TypeError(f"plan: expected a BlockPlan, got {type(plan).__name__}")
    batch, query_tokens, heads, _ = query.shape
    if (plan.query_tokens, plan.key_tokens) != (query_tokens, key_tokens):
        raise ValueError(
            f"plan: expected one for {query_tokens} query and {key_tokens} key tokens, got "
            f"{plan.query_tokens} and {plan.key_tokens}"
        )
    if tuple(plan.counts.shape[:2]) != (batch, heads):
        raise ValueError(
            f"plan: expected batch {batch} and {heads} heads, got {tuple(plan.counts.shape[:2])}"
        )
    if plan.counts.device != query.device:
        raise ValueError(f"plan: expected the device {query.device}, got {plan.counts.device}")


def _check_summaries(
    summaries: BlockSummaries, query: Tensor, key_tokens: int, key_heads: int, tail: str
) -> BlockSummaries:
    """Return summaries of H heads, or raise unless they are ones for this call."""
    if not isinstance(summaries, BlockSummaries):
        raise TypeError(f"summaries: expected BlockSummaries, got {type(summaries).__name__}")
    batch, query_tokens, heads, head_dim = query.shape
    count = block_count(key_tokens, 8 if tail == "block8x8" else BLOCK)
    shape = tuple(summaries.keys.shape)
    fits = shape[0] == batch and shape[2] in (heads, key_heads) and shape[3:] == (count, head_dim)
    if not fits:
        raise ValueError(
            f"summaries.keys: expected [{batch}, P, {heads} or {key_heads}, {count}, {head_dim}] "
            f'with tail "{tail}", got {shape}'
        )
    _checks.check_same("summaries.keys", summaries.keys, "query", query, shape=False)
    _checks.check_same("summaries.values", summaries.values, "query", query, shape=False)
    parents = summaries.parents
    if parents is not None and tuple(parents.shape) != (block_count(query_tokens),):
        raise ValueError(
            f"summaries.parents: expected [{block_count(query_tokens)}], got {tuple(parents.shape)}"
        )
    for name, item in (("log_mass", summaries.log_mass), ("parents", parents)):
        if item is not None and item.device != query.device:
            raise ValueError(
                f"summaries.{name}: expected the device {query.device}, got {item.device}"
            )
    if shape[2] == heads:
        return summaries
    repeat = heads // shape[2]
    return replace(
        summaries,
        keys=summaries.keys.repeat_interleave(repeat, 2),
        values=summaries.values.repeat_interleave(repeat, 2),
        log_mass=summaries.log_mass.repeat_interleave(repeat, 2),
    )


@dataclass(frozen=True)
class _Heads:
    """A sample's heads in flight, in accumulation type and padded to whole blocks.

    query [G, NQ, 64, D], key and value [Gk * NK, 64 * D], bias [G, NK, 64] (0, the key bias, or
    -inf for padding), key_row [G], where a head's blocks begin in `key` and `value`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    key_row: Tensor


@torch.library.custom_op("solspark::block_sparse_attention_eager", mutates_args=())
def _opaque(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    indices: Tensor,
    counts: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    log_mass: Tensor | None,
    parents: Tensor | None,
    scale: float,
    key_bias: Tensor | None,
    tail: str,
    kv_splits: int,
) -> tuple[Tensor, Tensor]:
    """Attend eagerly as one node of a compiled graph; the lists' lengths are not the graph's."""
    plan = BlockPlan(bits, indices, counts, query.shape[1], key.shape[1])
    summaries = None
    if keys is not None and values is not None and log_mass is not None:
        summaries = BlockSummaries(keys, values, log_mass, parents)
    return _attend(query, key, value, plan, summaries, scale, key_bias, tail, kv_splits)


@_opaque.register_fake
def _(query, key, value, bits, indices, counts, keys, values, log_mass, parents, *_):
    lse_type = _checks.accumulation_dtype(query.dtype)
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=lse_type)


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    summaries: BlockSummaries | None,
    scale: float,
    key_bias: Tensor | None,
    tail: str,
    kv_splits: int,
    precision: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend, inside a compiled graph as one node of it (which has no backward)."""
    if precision == "fp8":
        if key_bias is not None:
            if key_bias.shape[1] > 1:
                # Heads that share keys may mask different ones.
                group = query.shape[2] // key.shape[2]
                key, value = (item.repeat_interleave(group, 2) for item in (key, value))
            dead = (key_bias == -math.inf).transpose(1, 2)[..., None]
            key, value = key.masked_fill(dead, 0.0), value.masked_fill(dead, 0.0)
        query, key, value, summaries = fp8_attention_inputs(query, key, value, summaries)
    if not torch.compiler.is_compiling():
        return _attend(query, key, value, plan, summaries, scale, key_bias, tail, kv_splits)
    stored = (None, None, None, None)
    if summaries is not None:
        stored = (summaries.keys, summaries.values, summaries.log_mass, summaries.parents)
    lists = (plan.bits, plan.indices, plan.counts)
    return _opaque(query, key, value, *lists, *stored, scale, key_bias, tail, kv_splits)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    summaries: BlockSummaries | None,
    scale: float,
    key_bias: Tensor | None,
    tail: str,
    kv_splits: int,
) -> tuple[Tensor, Tensor]:
    """Attend a few heads at a time; gather the lists of a few query blocks, multiply at once."""
    dtype = _checks.accumulation_dtype(query.dtype)
    batch, query_tokens, heads, head_dim = query.shape
    key_heads = key.shape[2]
    group = heads // key_heads
    key_blocks = plan.key_blocks
    out = query.new_empty((batch, query_tokens, heads, head_dim))
    lse = query.new_empty((batch, query_tokens, heads), dtype=dtype)
    head_bytes = 2 * key_blocks * BLOCK * head_dim * dtype.itemsize
    step = max(1, HEAD_BYTES // head_bytes)
    per_split = -(-key_blocks // kv_splits)
    for sample in range(batch):
        for first in range(0, key_heads, step):
            stop = min(first + step, key_heads)
            mine = slice(first * group, stop * group)
            part = _take_heads(query, key, value, key_bias, sample, first, stop)
            state = None
            for split in range(kv_splits):
                low, high = split * per_split, min((split + 1) * per_split, key_blocks)
                if low >= high:
                    continue  # an empty range adds nothing
                exact = _attend_lists(
                    part,
                    plan.indices[sample, mine],
                    plan.counts[sample, mine],
                    (low, high),
                    scale,
                )
                state = exact if state is None else merge(*state, *exact)
                if summaries is not None:
                    skipped = ~unpack_bits(plan.bits[sample, mine], key_blocks)
                    skipped[..., :low] = False
                    skipped[..., high:] = False
                    state = merge(
                        *state,
                        *_attend_summaries(
                            part.query,
                            query_tokens,
                            query.dtype,
                            summaries,
                            sample,
                            mine,
                            skipped,
                            scale,
                            tail,
                        ),
                    )
            assert state is not None
            out[sample, :, mine] = state[0].flatten(1, 2)[:, :query_tokens].transpose(0, 1)
            lse[sample, :, mine] = state[1].flatten(1, 2)[:, :query_tokens].transpose(0, 1)
    return out, lse


def _take_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    sample: int,
    first: int,
    stop: int,
) -> _Heads:
    """Copy key heads [first, stop) and their query heads, padded with zeros to whole blocks."""
    group = query.shape[2] // key.shape[2]
    dtype = _checks.accumulation_dtype(query.dtype)
    head_dim, key_tokens = key.shape[3], key.shape[1]
    key_blocks = block_count(key_tokens)
    mine = slice(first * group, stop * group)
    heads = (stop - first) * group

    bias = key.new_zeros((heads, key_blocks * BLOCK), dtype=dtype)
    bias[:, key_tokens:] = -math.inf
    k = _padded(key[sample, :, first:stop], dtype)
    v = _padded(value[sample, :, first:stop], dtype)
    key_row = torch.arange(stop - first, device=key.device).repeat_interleave(group)
    if key_bias is not None:
        own = key_bias[sample]
        own = own[mine] if own.shape[0] > 1 else own
        bias[:, :key_tokens] += own
        if group > 1 and own.shape[0] > 1:
            # Heads that share keys mask different ones: give each its own copy.
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            key_row = torch.arange(heads, device=key.device)
        # A key of weight zero must have no effect even if it is not finite.
        dead = (own == -math.inf)[..., None]
        k[:, :key_tokens].masked_fill_(dead, 0.0)
        v[:, :key_tokens].masked_fill_(dead, 0.0)
    return _Heads(
        _padded(query[sample, :, mine], dtype).view(heads, -1, BLOCK, head_dim),
        k.view(-1, BLOCK * head_dim),
        v.view(-1, BLOCK * head_dim),
        bias.view(heads, key_blocks, BLOCK),
        key_row * key_blocks,
    )


def _padded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [L, H, D] as [H, whole blocks, D], the rest zero."""
    tokens, heads, head_dim = rows.shape
    padded = rows.new_empty((heads, block_count(tokens) * BLOCK, head_dim), dtype=dtype)
    padded[:, :tokens] = rows.transpose(0, 1)
    padded[:, tokens:] = 0
    return padded


def _attend_lists(
    part: _Heads, indices: Tensor, counts: Tensor, key_range: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the listed blocks inside a range; return out [G, NQ, 64, D] and lse [G, NQ, 64].

    Query blocks go in order of their counts, so that those attended together need little padding.
    """
    heads, rows, width = indices.shape
    head_dim = part.query.shape[-1]
    queries = part.query.flatten(0, 1)
    lists = indices.flatten(0, 1)
    listed = torch.arange(width, device=lists.device) < counts.flatten()[:, None]
    begin = (listed & (lists < key_range[0])).sum(-1)
    length = (listed & (lists < key_range[1])).sum(-1) - begin
    length, order = length.sort(stable=True)
    lengths = length.tolist()
    out = torch.zeros_like(queries)
    lse = queries.new_full(queries.shape[:2], -math.inf)
    first = 0
    while first < len(lengths):
        # The longest row that fits: adding rows in ascending order only lengthens the steps.
        stop = first + 1
        while (
            stop < len(lengths)
            and (stop + 1 - first) * min(lengths[stop], LIST_BLOCKS) <= STEP_BLOCKS
        ):
            stop += 1
        if lengths[stop - 1] > 0:
            chosen = order[first:stop]
            out[chosen], lse[chosen] = _attend_rows(
                part,
                queries[chosen],
                lists[chosen],
                begin[chosen],
                length[first:stop],
                lengths[stop - 1],
                chosen // rows,
                scale,
            )
        first = stop
    shape = (heads, rows, BLOCK)
    return out.view(*shape, head_dim), lse.view(shape)


def _attend_rows(
    part: _Heads,
    queries: Tensor,
    lists: Tensor,
    begin: Tensor,
    length: Tensor,
    longest: int,
    head: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend R query blocks [R, 64, D] to their lists, an online softmax step by step."""
    count, _, head_dim = queries.shape
    top = queries.new_full((count, BLOCK, 1), -math.inf)
    total = torch.zeros_like(top)
    out = torch.zeros_like(queries)
    for first in range(0, longest, LIST_BLOCKS):
        column = torch.arange(first, min(first + LIST_BLOCKS, longest), device=lists.device)
        present = column < length[:, None]
        place = torch.where(present, begin[:, None] + column, 0)
        block = torch.where(present, lists.gather(1, place).long(), 0)
        row = (part.key_row[head, None] + block).flatten()
        keys = part.key.index_select(0, row).view(count, -1, head_dim)
        values = part.value.index_select(0, row).view(count, -1, head_dim)
        bias = part.bias[head[:, None], block].masked_fill(~present[..., None], -math.inf)
        logits = torch.baddbmm(bias.view(count, 1, -1), queries, keys.transpose(1, 2), alpha=scale)
        peak = torch.maximum(top, logits.detach().amax(-1, keepdim=True))
        shift = peak.masked_fill(peak == -math.inf, 0.0)
        weights = logits.sub_(shift).exp_()
        decay = (top - shift).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = torch.baddbmm(out * decay, weights, values)
        top = peak
    lse = (top + log_of_sum(total)).squeeze(-1)
    return out / total.masked_fill(total == 0, 1.0), lse


def _attend_summaries(
    queries: Tensor,
    query_tokens: int,
    dtype: torch.dtype,
    summaries: BlockSummaries,
    sample: int,
    mine: slice,
    skipped: Tensor,
    scale: float,
    tail: str,
) -> tuple[Tensor, Tensor]:
    """Attend queries [G, NQ, 64, D] to the summaries of skipped blocks [G, NQ, NK].

    Returns out [G, NQ, 64, D] and lse [G, NQ, 64], shared by the rows of a group for the block
    tails.
    """
    heads, blocks, _, head_dim = queries.shape
    keys = summaries.keys[sample, :, mine].to(queries.dtype)
    values = summaries.values[sample, :, mine].to(queries.dtype)
    log_mass = summaries.log_mass[sample, :, mine].to(queries.dtype)
    if tail == "block8x8":
        skipped = skipped.repeat_interleave(BLOCK // 8, -1)[..., : keys.shape[2]]
    group = {"query": 1, "block": BLOCK, "block8x8": 8}[tail]
    rows = queries
    if group > 1:
        live = torch.arange(blocks * BLOCK // group, device=queries.device) * group
        live = (query_tokens - live).clamp(min=1, max=group)
        means = queries.view(heads, -1, group, head_dim).sum(2) / live[:, None]
        rows = means.to(dtype).to(queries.dtype).view(heads, blocks, -1, head_dim)

    out = torch.zeros_like(rows)
    lse = rows.new_full(rows.shape[:3], -math.inf)
    count = keys.shape[2]
    step = max(1, TAIL_LOGITS // (heads * rows.shape[2] * count))
    for parent in range(keys.shape[0]):
        if summaries.parents is None:
            members = torch.arange(blocks, device=rows.device)
        else:
            members = (summaries.parents == parent).nonzero().squeeze(-1)
        for chosen in members.split(step):
            if len(chosen) == 0:
                continue
            queries_here = rows[:, chosen].flatten(1, 2)
            logits = torch.baddbmm(
                log_mass[parent][:, None],
                queries_here,
                keys[parent].transpose(1, 2),
                alpha=scale,
            )
            hidden = ~skipped[:, chosen].repeat_interleave(rows.shape[2], 1)
            logits = logits.masked_fill_(hidden, -math.inf)
            peak = logits.detach().amax(-1, keepdim=True)
            weights = logits.sub_(peak.masked_fill(peak == -math.inf, 0.0)).exp_()
            total = weights.sum(-1, keepdim=True)
            result = (weights @ values[parent]) / total.masked_fill(total == 0, 1.0)
            out[:, chosen] = result.view(heads, len(chosen), -1, head_dim)
            lse[:, chosen] = (peak + log_of_sum(total)).view(heads, len(chosen), -1)
    if group > 1:
        out = out.repeat_interleave(group, 2)
        lse = lse.repeat_interleave(group, 2)
    return out, lse


def _aligned(*tensors: Tensor) -> bool:
    """Say whether base pointers and strides are multiples of 16 bytes, as TMA asks.

    A compiled graph does not know where a view begins; there the launch sees to it.
    """
    size = tensors[0].element_size()
    steps = [
        stride * size
        for tensor in tensors
        for stride, length in zip(tensor.stride()[:-1], tensor.shape, strict=False)
        if length > 1
    ]
    if not torch.compiler.is_compiling():
        steps += [tensor.storage_offset() * size for tensor in tensors]
    return all(step % 16 == 0 for step in steps)


_dispatch.register("block_sparse_attention", "eager", _dispatch.never_declines, _eager)
_dispatch.register("block_sparse_attention", "triton", triton_reasons, run_kernel)
_dispatch.register(
    "block_sparse_attention", "hopper", hopper_reasons, partial(run_kernel, hopper=True)
)
