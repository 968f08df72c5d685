"""torch.compile takes Sol-Attn whole, and a new tau or length costs at most one more graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from solspark import (
    BlockSummaries,
    PackedConfig,
    TokenGrid,
    block_sparse_attention,
    last_call,
    mask_from_plan,
    merge,
    packed_attention,
    plan_from_mask,
    sol_attn,
    spark_reblock,
    spark_reweight,
)
from solspark.ops.block_sparse_attention import _opaque as attention_operator
from solspark.ops.pool import _opaque as means_operator
from solspark.ops.select_blocks import _opaque as select_operator
from solspark.ops.select_blocks import select_blocks
from solspark.testing import make_qkv, random_mask


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own tracing
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 0.5, "return_lse": True},
        {"tau": 0.5, "thresh_type": "exact", "tail": "block", "kv_splits": 3},
        {"topk_ratio": 0.3, "sinks": [(70, 90)], "dense_queries": [(0, 3)], "local_radius": 0},
        {"topk_ratio": 0.3, "tail": "none", "key_bias": torch.arange(331) < 300},
        {"topk_ratio": 0.3, "tail": "block8x8"},
        {"topk_ratio": 0.3, "precision": "fp8"},
    ],
    ids=str,
)
def test_one_graph_with_the_same_result(options: dict[str, Any]) -> None:
    tensors = make_qkv(1, 331, 2, 64, layout="fused")
    compiled = torch.compile(
        lambda *inputs: sol_attn(*inputs, **options), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(*tensors), sol_attn(*tensors, **options))


def test_a_graph_records_nothing() -> None:
    tensors = make_qkv(1, 100, 2, 64)
    sol_attn(*tensors)
    before = last_call()
    torch.compile(sol_attn, fullgraph=True, backend="eager")(*tensors)
    assert last_call() is before


def test_a_new_tau_or_length_costs_one_more_graph_at_most() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda query, key, value, tau: sol_attn(query, key, value, tau=tau),
        fullgraph=True,
        backend=counter,
    )
    tensors = make_qkv(1, 331, 2, 64)
    for step in range(5):
        tau = 0.5 + 0.1 * step
        torch.testing.assert_close(compiled(*tensors, tau), sol_attn(*tensors, tau=tau))
    assert counter.frame_count == 2
    for tokens in (400, 450, 600, 700):
        tensors = make_qkv(1, tokens, 2, 64)
        torch.testing.assert_close(compiled(*tensors, 0.9), sol_attn(*tensors, tau=0.9))
    assert counter.frame_count == 3


def test_planned_attention_is_one_graph() -> None:
    tensors = make_qkv(1, 331, 2, 64)
    plan = plan_from_mask(random_mask(1, 2, 331, 331), query_tokens=331, key_tokens=331)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return block_sparse_attention(query, key, value, plan, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*tensors), call(*tensors))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_a_block_of_every_public_operation_is_one_graph() -> None:
    """The plan by hand, Sol, and Spark whole, in one function without a graph break."""
    grid = TokenGrid(3, 7, 11)
    video, tokens = grid.tokens, grid.tokens + 20
    config = PackedConfig()

    def block(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        plan = plan_from_mask(mask, query_tokens=tokens, key_tokens=tokens)
        summaries = BlockSummaries(*spark_reweight(query[:, :1], key, value))
        by_hand: Any = block_sparse_attention(
            query, key, value, plan, summaries=summaries, return_lse=True
        )
        sol = sol_attn(query, key, value, topk_ratio=0.3, return_lse=True)
        spark, _ = packed_attention(query, key, value, video_tokens=video, grid=grid, config=config)
        samples = key[:, :video].transpose(1, 2)
        order = spark_reblock(samples, grid_shape=grid.as_tuple(), validate=False)
        return merge(*by_hand, *sol)[0] + spark, order.permutation, mask_from_plan(plan)

    tensors = make_qkv(1, tokens, 2, 64)
    mask = random_mask(1, 2, tokens, tokens)
    with torch.no_grad():
        expected = block(*tensors, mask)
        found = torch.compile(block, fullgraph=True, backend="eager")(*tensors, mask)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", ["contiguous", "fused", "guarded"])
def test_operators_keep_their_promises(layout: str) -> None:
    """Shapes, types and strides of the fakes are those of the results; nothing is mutated."""
    checks = ("test_schema", "test_faketensor")
    query, key, value = make_qkv(1, 200, 2, 16, layout=layout)
    torch.library.opcheck(means_operator, (key, None, 64), test_utils=checks)
    torch.library.opcheck(means_operator, (key, torch.rand(1, 2, 200), 8), test_utils=checks)
    plan = plan_from_mask(random_mask(1, 2, 200, 200), query_tokens=200, key_tokens=200)
    lists = (plan.bits, plan.indices, plan.counts)
    means, mass = torch.randn(1, 1, 2, 4, 16), torch.zeros(1, 1, 2, 4)
    summaries = BlockSummaries(means, means.clone(), mass)
    stored = (summaries.keys, summaries.values, summaries.log_mass, None)
    for rest in ((None,) * 4, stored):
        tail = "none" if rest[0] is None else "query"
        arguments = (query, key, value, *lists, *rest, 0.25, torch.randn(1, 1, 200), tail, 2)
        torch.library.opcheck(attention_operator, arguments, test_utils=checks)
    scores = torch.randn(1, 2, 4, 5)
    for top_k, limits in ((2, None), (None, torch.zeros(1, 2, 4))):
        arguments = (scores, limits, top_k, 5, [4, 5], [], 0, None, 200, 300)
        torch.library.opcheck(select_operator, arguments, test_utils=checks)
    plan = select_blocks(scores, top_k=2, sinks=[(4, 5)], query_tokens=200, key_tokens=300)
    assert plan.indices.shape[-1] == 3
