"""Attention under a given plan: exact blocks and the summaries of the others in one softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark._checks import accumulation_dtype, normalise_key_bias, resolve_scale
from solspark.reference.merge import log_of_sum, merge
from solspark.reference.select_blocks import mask_from_plan
from solspark.types import BLOCK, BlockPlan, BlockSummaries, block_count

TAIL_BLOCK = {"query": BLOCK, "block": BLOCK, "block8x8": 8}
"""Keys that one summary stands for, by tail."""


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
    return_lse: bool = False,
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
        query: [B, Lq, H, D].
        key, value: [B, Lk, Hk, D]; Hk divides H, query head h reads key head h // (H / Hk).
        plan: for these Lq and Lk and H heads.
        summaries: of Hs in {H, Hk} heads; None drops the skipped blocks. With "block8x8": ceil(Lk /
            8) of them.
        scale: None means D ** -0.5.
        key_bias: natural log, as in `pool`, added to the exact keys' logits; summaries already
            carry it. A key with bias -inf has no effect, whatever it holds.
        tail: "query", "block", "block8x8" or "none" (as without summaries).
        kv_splits: contiguous ranges of key blocks attended one by one and merged; an empty range is
            fine.
        return_lse: also return the log of the denominator.

    Returns:
        out [B, Lq, H, D] in the query's type, and if asked lse float32 (float64) [B, Lq, H],
        natural log. A row that represents no key is zero, with lse -inf.

    Numerics: float32 (float64) throughout, one rounding of the output.

    Source: Sol-Attn sections 1.4, 1.7 and 1.8; Spark section 5.
    """
    dtype = accumulation_dtype(query.dtype)
    batch, query_tokens, heads, head_dim = query.shape
    key_tokens = key.shape[1]
    scale = resolve_scale(scale, head_dim)
    bias = normalise_key_bias(key_bias, batch, heads, key_tokens, key)
    if bias is None:
        bias = torch.zeros(batch, 1, key_tokens, dtype=dtype, device=key.device)

    q = query.transpose(1, 2).to(dtype)
    k = key.transpose(1, 2).to(dtype).repeat_interleave(heads // key.shape[2], 1)
    v = value.transpose(1, 2).to(dtype).repeat_interleave(heads // key.shape[2], 1)
    dead = (bias == -math.inf)[..., None]
    k, v = k.masked_fill(dead, 0.0), v.masked_fill(dead, 0.0)

    exact = mask_from_plan(plan)
    row_block = torch.arange(query_tokens, device=key.device) // BLOCK
    key_block = torch.arange(key_tokens, device=key.device) // BLOCK
    logits = scale * q @ k.transpose(2, 3) + bias[:, :, None]
    logits = logits.masked_fill(~exact[:, :, row_block][..., key_block], -math.inf)

    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -math.inf)
    per_split = -(-block_count(key_tokens) // kv_splits)
    for split in range(kv_splits):
        inside = torch.arange(plan.key_blocks, device=key.device) // per_split == split
        split_logits = logits.masked_fill(~inside[key_block], -math.inf)
        if summaries is None or tail == "none":
            state = _softmax(split_logits, v)
        elif tail == "query":
            tail_logits, tail_values = _tail(q, ~exact & inside, BLOCK, summaries, scale)
            state = _softmax(
                torch.cat([split_logits, tail_logits], -1), torch.cat([v, tail_values], 2)
            )
        else:
            span = TAIL_BLOCK[tail]
            means = [part.mean(2).to(query.dtype).to(dtype) for part in q.split(span, dim=2)]
            shared_out, shared_lse = _softmax(
                *_tail(torch.stack(means, 2), ~exact & inside, span, summaries, scale, span)
            )
            mine = torch.arange(query_tokens, device=key.device) // span
            state = merge(
                *_softmax(split_logits, v), shared_out[:, :, mine], shared_lse[:, :, mine]
            )
        out, lse = merge(out, lse, *state)
    out = out.transpose(1, 2).to(query.dtype)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _tail(
    rows: Tensor,
    skipped: Tensor,
    key_span: int,
    summaries: BlockSummaries,
    scale: float,
    row_span: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return logits [B, H, n, P * N] of rows [B, H, n, D], and the values [B, H, P * N, D].

    A logit is -inf unless the summary is of the row's own parent and of a skipped block. A row
    stands for `row_span` query tokens, a summary for `key_span` key tokens.
    """
    batch, parents, _, count, head_dim = summaries.keys.shape
    heads = rows.shape[1]
    repeat = heads // summaries.keys.shape[2]
    keys, values, log_mass = (
        item.transpose(1, 2).to(rows.dtype).repeat_interleave(repeat, 1)
        for item in (summaries.keys, summaries.values, summaries.log_mass)
    )
    logits = scale * torch.einsum("bhtd,bhpjd->bhtpj", rows, keys) + log_mass[:, :, None]

    row_block = torch.arange(rows.shape[2], device=rows.device) * row_span // BLOCK
    key_block = torch.arange(count, device=rows.device) * key_span // BLOCK
    wanted = skipped[:, :, row_block][..., key_block][:, :, :, None]
    if summaries.parents is not None:
        parent = summaries.parents.long()[row_block]
        wanted = wanted & (parent[:, None] == torch.arange(parents, device=rows.device))[..., None]
    logits = logits.masked_fill(~wanted, -math.inf)
    return logits.flatten(3), values.reshape(batch, heads, parents * count, head_dim)


def _softmax(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted values and the log of the denominator; an empty row is zero, -inf."""
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    out = weights @ values / total.masked_fill(total == 0, 1.0)
    return out, (top + log_of_sum(total)).squeeze(-1)
