"""Properties of Sol-Attn over random problems: eager is the reference, every key counts once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solspark import mask_from_plan, sol_attn
from solspark.ops.pool import pool
from solspark.plan.select import plan_sol
from solspark.reference.sol import sol_attn as reference
from solspark.testing import LAYOUTS, make_qkv

EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Problem:
    """A random call of Sol-Attn in float64, where no two routes are within rounding."""

    tensors: tuple[Tensor, Tensor, Tensor]
    key_bias: Tensor | None
    options: dict[str, Any]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens = draw(st.one_of(st.integers(1, 700), st.sampled_from([1, 63, 64, 65, 128, 448, 449])))
    tensors = make_qkv(
        batch,
        tokens,
        heads,
        draw(st.sampled_from([64, 128])),
        dtype=torch.float64,
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 2**16)),
    )
    ranges = st.lists(
        st.tuples(st.integers(0, tokens), st.integers(0, tokens)).map(
            lambda pair: (min(pair), max(pair))
        ),
        max_size=3,
    )
    options: dict[str, Any] = {
        "tail": draw(st.sampled_from(["query", "block", "block8x8", "none"])),
        "local_radius": draw(st.integers(-1, 2)),
        "sinks": draw(ranges),
        "dense_queries": draw(st.one_of(st.just([]), ranges)),
        "scale": draw(st.sampled_from([None, 0.05, 0.3])),
    }
    if draw(st.booleans()):
        options["topk_ratio"] = draw(st.floats(0.01, 1.0))
    else:
        # Around zero a row of one block ties with its own threshold.
        magnitude = draw(st.floats(0.05, 3.0))
        options["tau"] = magnitude if draw(st.booleans()) else -magnitude
        options["thresh_type"] = draw(st.sampled_from(["diag", "exact"]))
    return Problem(tensors, draw_bias(draw, batch, heads, tokens), options)


def draw_bias(draw: st.DrawFn, batch: int, heads: int, tokens: int) -> Tensor | None:
    form = draw(st.sampled_from(["none", "mask", "sample", "head"]))
    if form == "none":
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shape = {"mask": (tokens,), "sample": (batch, tokens), "head": (batch, heads, tokens)}[form]
    keep = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.9]))
    start = draw(st.integers(0, tokens))
    keep[..., start : start + 200] = False
    if form == "mask":
        return keep
    bias = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    return bias.masked_fill(~keep, -math.inf)


@EXAMPLES
@given(problem=problems(), kv_splits=st.integers(1, 6))
def test_eager_equals_the_reference(problem: Problem, kv_splits: int) -> None:
    out, lse, stats = sol_attn(
        *problem.tensors,
        key_bias=problem.key_bias,
        kv_splits=kv_splits,
        return_lse=True,
        return_stats=True,
        impl="eager",
        **problem.options,
    )
    expected_out, expected_lse, plan = reference(
        *problem.tensors, key_bias=problem.key_bias, **problem.options
    )
    assert int(stats.exact_blocks) == int(plan.counts.sum())
    torch.testing.assert_close(out, expected_out, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-10)


@EXAMPLES
@given(problem=problems(), kv_splits=st.integers(1, 6))
def test_every_key_is_represented_exactly_once(problem: Problem, kv_splits: int) -> None:
    """With zero queries the denominator is the number of keys (their mass), the output their mean.

    That of the summaries is stored in float32, hence the tolerance.
    """
    query, key, value = problem.tensors
    tokens = query.shape[1]
    options = {**problem.options, "tail": problem.options["tail"].replace("none", "query")}
    out, lse = sol_attn(
        torch.zeros_like(query),
        key,
        value,
        key_bias=problem.key_bias,
        kv_splits=kv_splits,
        return_lse=True,
        impl="eager",
        **options,
    )
    bias = torch.zeros(1, 1, tokens, dtype=torch.float64)
    if problem.key_bias is not None:
        bias = problem.key_bias
        bias = torch.where(bias, 0.0, -math.inf).double() if bias.dtype == torch.bool else bias
        bias = bias.reshape(-1 if bias.ndim > 1 else 1, *bias.shape[1:-1] or (1,), tokens)
    mass = bias.logsumexp(-1)[:, None]
    torch.testing.assert_close(lse, mass.expand_as(lse), rtol=1e-6, atol=1e-6)
    weight = torch.exp(bias - bias.logsumexp(-1, keepdim=True)).nan_to_num(0.0)
    mean = (weight.transpose(1, 2)[..., None] * value).sum(1, keepdim=True)
    torch.testing.assert_close(out, mean.expand_as(out), rtol=1e-6, atol=1e-6)


@EXAMPLES
@given(problem=problems(), top_k=st.integers(0, 12))
def test_a_row_reads_exactly_its_budget(problem: Problem, top_k: int) -> None:
    query, key, _ = problem.tensors
    plan = plan_sol(query, key, top_k=top_k, local_radius=-1, key_bias=problem.key_bias)
    pooled = pool(None, key, None, key_bias=problem.key_bias)
    blocks = plan.key_blocks
    live = torch.ones(1, 1, blocks, dtype=torch.bool) if pooled.live is None else pooled.live
    expected = live.sum(-1).clamp(max=top_k)[:, :, None].expand_as(plan.counts)
    assert torch.equal(plan.counts.long(), expected)
    assert not (mask_from_plan(plan) & ~live[:, :, None]).any()
