"""Block means, log-masses and the statistics of the key means, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.reference.pool import Pooled
from solspark.types import BLOCK, AttentionCall, block_count

__all__ = ["Pooled", "pool"]

CHUNK_BYTES = 64 * 2**20
"""Accumulation-type copy of the tokens in flight."""


def pool(
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    *,
    key_bias: Tensor | None = None,
    block: int = BLOCK,
    impl: str | None = None,
) -> Pooled:
    """Summarise every block of tokens by its mean.

        qbar_i = mean of the block's query rows
        KC_j = sum_u e^(bias_u) k_u / sum_u e^(bias_u),  VC_j likewise,  log_mass_j = ln sum_u
        e^(bias_u)

    Args:
        query: [B, Lq, H, D] or None.
        key: [B, Lk, H, D], float16, bfloat16, float32 or float64, any strides.
        value: [B, Lk, H, D] or None; planning needs none.
        key_bias: natural log, one value a key: [Lk], [B, Lk], [B, 1 or H, Lk] or [B, 1 or H, 1,
            Lk]; a bool tensor keeps where true. A key with bias -inf has no effect, whatever it
            holds.
        block: tokens a block: 64, or 8 for the "block8x8" tail.
        impl: "eager", "triton", "hopper" or None for the best that can serve.

    Returns:
        Pooled: query_means float32 [B, H, NQ, D], key_means and value_means in the input type [B,
            H, NK, D],
        log_mass float32 [B, 1 or H, NK], key_mean and key_var float32 [B, H, D] (float64 for
        float64 inputs), live bool [B, 1 or H, NK] with a key bias, else None.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics:
        Sums in float32 (float64 for float64); key and value means are rounded once to the input
        type, and the statistics are taken over the rounded means.

    Source: Sol-Attn section 1.2; the sums of values there are our means times the mass.
    """
    layout = "[B, L, H, D]"
    _checks.check_tensor("key", key, 4, layout)
    _checks.check_dtype("key", key)
    batch, tokens, heads, _ = key.shape
    if tokens < 1:
        raise ValueError(f"key: expected at least one token, got shape {tuple(key.shape)}")
    if query is not None:
        _checks.check_tensor("query", query, 4, layout)
        _checks.check_same("query", query, "key", key, shape=False)
        if query.shape[0] != batch or query.shape[3] != key.shape[3] or query.shape[1] < 1:
            raise ValueError(
                f"query: expected [{batch}, Lq >= 1, H, {key.shape[3]}], got {tuple(query.shape)}"
            )
    if value is not None:
        _checks.check_tensor("value", value, 4, layout)
        _checks.check_same("value", value, "key", key, shape=True)
    _checks.check_int("block", block, 1)
    bias = _checks.normalise_key_bias(key_bias, batch, heads, tokens, key)

    call = _dispatch.describe(
        query,
        key,
        key_bias=bias is not None,
        tail="query" if block == BLOCK else "block8x8",
        requires_grad=_dispatch.needs_grad(query, key, value),
    )
    choice = _dispatch.pick("pool", call, impl)
    pooled = choice.run(query, key, value, bias, block)
    choice.record()
    return pooled


def _eager(
    query: Tensor | None, key: Tensor, value: Tensor | None, key_bias: Tensor | None, block: int
) -> Pooled:
    """Pool chunk by chunk of tokens."""
    dtype = _checks.accumulation_dtype(key.dtype)
    batch, tokens = key.shape[:2]
    blocks = block_count(tokens, block)
    if key_bias is None:
        weights = None
        lengths = tokens - torch.arange(blocks, device=key.device) * block
        log_mass = lengths.clamp(max=block).to(dtype).log().expand(batch, 1, blocks)
    else:
        padding = (0, blocks * block - tokens)
        padded = torch.nn.functional.pad(key_bias, padding, value=-math.inf)
        padded = padded.unflatten(-1, (blocks, block))
        log_mass = padded.logsumexp(-1)
        shift = log_mass.masked_fill(log_mass == -math.inf, 0.0)[..., None]
        weights = (padded - shift).exp().flatten(-2)[..., :tokens]

    key_means = _block_means(key, weights, block).to(key.dtype)
    live = log_mass > -math.inf
    live_blocks = live[..., None].sum(2).clamp(min=1)
    wide = key_means.to(dtype)
    key_mean = wide.sum(2) / live_blocks  # a block that is not live has mean zero
    key_var = ((wide - key_mean[:, :, None]) * live[..., None]).square().sum(2) / live_blocks
    return Pooled(
        _block_means(query, None, block) if query is not None else None,
        key_means,
        _block_means(value, weights, block).to(value.dtype) if value is not None else None,
        log_mass,
        key_mean,
        key_var,
        live if key_bias is not None else None,
    )


@torch.library.custom_op("solspark::block_means_eager", mutates_args=())
def _opaque(rows: Tensor, weights: Tensor | None, block: int) -> Tensor:
    """Take block means as one node of a compiled graph, which then serves any length."""
    return _mean_chunks(rows, weights, block)


@_opaque.register_fake
def _(rows, weights, block):
    batch, tokens, heads, head_dim = rows.shape
    shape = (batch, heads, block_count(tokens, block), head_dim)
    return rows.new_empty(shape, dtype=_checks.accumulation_dtype(rows.dtype))


def _block_means(rows: Tensor, weights: Tensor | None, block: int) -> Tensor:
    """Return the (weighted) mean of each block of rows [B, L, H, D] as [B, H, N, D].

    Weights are [B, 1 or H, L], summing to 1 over a block, or all zero. Accumulation type.
    """
    means = _opaque if torch.compiler.is_compiling() else _mean_chunks
    return means(rows, weights, block)


def _mean_chunks(rows: Tensor, weights: Tensor | None, block: int) -> Tensor:
    """Take block means, some blocks at a time."""
    dtype = _checks.accumulation_dtype(rows.dtype)
    batch, tokens, heads, head_dim = rows.shape
    blocks = block_count(tokens, block)
    means = rows.new_empty((batch, heads, blocks, head_dim), dtype=dtype)
    row_bytes = batch * heads * head_dim * dtype.itemsize
    step = max(1, CHUNK_BYTES // (row_bytes * block))
    for first in range(0, blocks, step):
        stop = min(first + step, blocks)
        part = rows[:, first * block : stop * block].to(dtype)
        if weights is not None:
            weight = weights[:, :, first * block : stop * block].transpose(1, 2)[..., None]
            # A weight of zero hides its row even if that is not finite.
            part = part.masked_fill(weight == 0, 0.0) * weight
        whole = part.shape[1] // block
        sums = part[:, : whole * block].unflatten(1, (whole, block)).sum(2)
        if weights is None:
            sums = sums / block
        means[:, :, first : first + whole] = sums.transpose(1, 2)
        if first + whole < stop:
            rest = part[:, whole * block :]
            means[:, :, stop - 1] = rest.mean(1) if weights is None else rest.sum(1)
    return means


def _launch(
    query: Tensor | None, key: Tensor, value: Tensor | None, key_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the Triton kernels; means that were not asked for come back empty."""
    from solspark.kernels.pool import launch_pool

    with torch.cuda.device_of(key):
        return launch_pool(query, key, value, key_bias)


_operator = torch.library.custom_op("solspark::pool", _launch, mutates_args=())


@_operator.register_fake
def _(query, key, value, key_bias):
    batch, tokens, heads, head_dim = key.shape
    blocks = block_count(tokens)
    query_blocks = 0 if query is None else block_count(query.shape[1])
    statistics = key.new_empty((batch, heads, head_dim), dtype=torch.float32)
    mass_shape = (1, 1, blocks) if key_bias is None else (batch, heads, blocks)
    return (
        key.new_empty((batch, heads, query_blocks, head_dim), dtype=torch.float32),
        key.new_empty((batch, heads, blocks, head_dim)),
        key.new_empty((batch, heads, blocks if value is not None else 0, head_dim)),
        key.new_empty(mass_shape, dtype=torch.float32),
        statistics,
        torch.empty_like(statistics),
    )


def _run_triton(
    query: Tensor | None, key: Tensor, value: Tensor | None, key_bias: Tensor | None, block: int
) -> Pooled:
    """Pool in two launches; every input element is read once."""
    query_means, key_means, value_means, log_mass, key_mean, key_var = _triton.entry(
        _operator, _launch
    )(query, key, value, key_bias)
    return Pooled(
        query_means if query is not None else None,
        key_means,
        value_means if value is not None else None,
        log_mass.expand(key.shape[0], -1, -1),
        key_mean,
        key_var,
        log_mass > -math.inf if key_bias is not None else None,
    )


def _triton_reasons(call: AttentionCall) -> list[str]:
    found = _triton.obstacles(call)
    if call.tail == "block8x8":
        found.append("it pools blocks of 64 tokens, not of 8")
    return found


_dispatch.register("pool", "eager", _dispatch.never_declines, _eager)
_dispatch.register("pool", "triton", _triton_reasons, _run_triton)
