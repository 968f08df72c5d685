"""The reference of planned attention against a loop over tokens, and against dense attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from solspark.reference.block_sparse_attention import block_sparse_attention
from solspark.reference.pool import pool
from solspark.reference.select_blocks import plan_from_mask
from solspark.testing import make_qkv, random_mask
from solspark.types import BlockSummaries


def summaries_of(key: Tensor, value: Tensor, block: int = 64) -> BlockSummaries:
    pooled = pool(None, key, value, block=block)
    assert pooled.value_means is not None
    log_mass = pooled.log_mass.float().expand(pooled.key_means.shape[:3])
    return BlockSummaries(pooled.key_means[:, None], pooled.value_means[:, None], log_mass[:, None])


def one_row(
    query: Tensor, keys: list[tuple[Tensor, Tensor, float]], scale: float
) -> tuple[Tensor, float]:
    """Attend one query to (key, value, bias) triples one by one."""
    total, out = 0.0, torch.zeros_like(query)
    for key, value, bias in keys:
        weight = math.exp(scale * float(query @ key) + bias)
        total += weight
        out = out + weight * value
    return (out / total, math.log(total)) if total else (out, -math.inf)


@pytest.mark.parametrize("tail", ["query", "block", "block8x8", "none"])
def test_against_a_loop_over_tokens(tail: str) -> None:
    tokens, scale = 150, 0.3
    query, key, value = make_qkv(2, tokens, 2, 8, dtype=torch.float64)
    mask = random_mask(2, 2, tokens, tokens, density=0.5)
    plan = plan_from_mask(mask, query_tokens=tokens, key_tokens=tokens)
    bias = torch.randn(2, 2, tokens, dtype=torch.float64)
    span = 8 if tail == "block8x8" else 64
    summaries = summaries_of(key, value, span)
    out, lse = block_sparse_attention(
        query,
        key,
        value,
        plan,
        summaries=summaries,
        scale=scale,
        key_bias=bias,
        tail=tail,
        return_lse=True,
    )
    for sample, head, row in [(0, 0, 3), (0, 0, 70), (0, 1, 149), (1, 0, 64), (1, 1, 100)]:
        exact = mask[sample, head, row // 64]
        group = {"query": 1, "block": 64, "block8x8": 8, "none": 1}[tail]
        first = row // group * group
        stand_in = query[sample, first : first + group, head].mean(0)
        mine = query[sample, row, head]
        total, expected = 0.0, torch.zeros(8, dtype=torch.float64)
        for token in range(tokens):
            if exact[token // 64]:
                logit = scale * float(mine @ key[sample, token, head])
                weight = math.exp(logit + float(bias[sample, head, token]))
                total, expected = total + weight, expected + weight * value[sample, token, head]
        # A shared state is a softmax of its own over the skipped blocks: same sum, other logits.
        for number in range(0 if tail == "none" else -(-tokens // span)):
            if not exact[number * span // 64]:
                logit = scale * float(stand_in @ summaries.keys[sample, 0, head, number])
                logit += float(summaries.log_mass[sample, 0, head, number])
                total += math.exp(logit)
                expected = expected + math.exp(logit) * summaries.values[sample, 0, head, number]
        expected = expected / total if total else expected
        torch.testing.assert_close(out[sample, row, head], expected)
        torch.testing.assert_close(
            float(lse[sample, row, head]), math.log(total) if total else -math.inf
        )


def test_every_query_block_reads_its_own_parent() -> None:
    tokens = 300
    query, key, value = make_qkv(1, tokens, 2, 8, dtype=torch.float64)
    mask = random_mask(1, 2, tokens, tokens)
    plan = plan_from_mask(mask, query_tokens=tokens, key_tokens=tokens)
    generator = torch.Generator().manual_seed(3)
    keys, values = (
        torch.randn(1, 3, 2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    log_mass = torch.randn(1, 3, 2, 5, generator=generator)
    parents = torch.tensor([2, 0, 0, 1, 2], dtype=torch.int32)
    together = block_sparse_attention(
        query, key, value, plan, summaries=BlockSummaries(keys, values, log_mass, parents)
    )
    assert isinstance(together, Tensor)
    for parent in range(3):
        only = slice(parent, parent + 1)
        alone = block_sparse_attention(
            query,
            key,
            value,
            plan,
            summaries=BlockSummaries(keys[:, only], values[:, only], log_mass[:, only]),
        )
        assert isinstance(alone, Tensor)
        rows = (parents == parent).repeat_interleave(64)[:tokens]
        torch.testing.assert_close(together[:, rows], alone[:, rows])


def test_everything_exact_is_dense_attention() -> None:
    query, key, value = make_qkv(2, 130, 6, 16, key_tokens=200, key_heads=2, dtype=torch.float64)
    mask = torch.ones(2, 6, 3, 4, dtype=torch.bool)
    plan = plan_from_mask(mask, query_tokens=130, key_tokens=200)
    out, lse = block_sparse_attention(query, key, value, plan, return_lse=True)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(item.transpose(1, 2) for item in (query, key, value)), enable_gqa=True
    )
    torch.testing.assert_close(out, dense.transpose(1, 2))
    logits = torch.einsum("bthd,buhd->bthu", query, key.repeat_interleave(3, 2)) / 4
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_a_row_that_represents_no_key_is_zero() -> None:
    query, key, value = make_qkv(1, 100, 2, 8)
    plan = plan_from_mask(
        torch.zeros(1, 2, 2, 2, dtype=torch.bool), query_tokens=100, key_tokens=100
    )
    out, lse = block_sparse_attention(query, key, value, plan, return_lse=True)
    assert not out.any() and (lse == -math.inf).all() and lse.dtype == torch.float32


@pytest.mark.parametrize("tail", ["query", "block", "block8x8", "none"])
@pytest.mark.parametrize("kv_splits", [2, 3, 5, 9])
def test_splits_change_nothing(tail: str, kv_splits: int) -> None:
    query, key, value = make_qkv(1, 300, 2, 8, dtype=torch.float64)
    plan = plan_from_mask(random_mask(1, 2, 300, 300), query_tokens=300, key_tokens=300)
    summaries = summaries_of(key, value, 8 if tail == "block8x8" else 64)
    results = [
        block_sparse_attention(
            query,
            key,
            value,
            plan,
            summaries=summaries,
            tail=tail,
            kv_splits=splits,
            return_lse=True,
        )
        for splits in (1, kv_splits)
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_masked_keys_have_no_effect_whatever_they_hold() -> None:
    query, key, value = make_qkv(1, 150, 4, 8, key_heads=2, dtype=torch.float64)
    plan = plan_from_mask(random_mask(1, 4, 150, 150), query_tokens=150, key_tokens=150)
    keep = torch.rand(1, 4, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[..., 100:] = False
    expected = block_sparse_attention(query, key, value, plan, key_bias=keep)
    key[:, 100:], value[:, 100:] = math.nan, math.inf
    out = block_sparse_attention(query, key, value, plan, key_bias=keep)
    assert isinstance(out, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(out, expected)
