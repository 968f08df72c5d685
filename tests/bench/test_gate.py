from __future__ import annotations

import pytest
import torch

from solspark.bench.case import METHODS
from solspark.bench.gate import (
    attend_rows,
    block_means,
    compare,
    dense_rows,
    gate_output,
    judge_plan,
    mean_tail,
    relative_to,
    sample_rows,
)
from solspark.bench.inputs import make_inputs
from solspark.bench.lists import block_lists, executed_pairs, plan_density, plan_from_lists
from solspark.bench.packed_gate import can_follow, judge_packed
from solspark.bench.problems import get_problem
from solspark.bench.settings import load_cases
from solspark.methods.spark_config import PackedConfig, ReblockConfig
from solspark.plan.select import plan_sol
from solspark.reference.block_sparse_attention import block_sparse_attention as reference
from solspark.reference.select_blocks import mask_from_plan
from solspark.testing import video_activations
from solspark.types import BLOCK

load_cases()
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def inputs_of(dtype=torch.float32, kind="gaussian"):
    return make_inputs(get_problem("tiny"), kind, CPU, dtype)


def summaries_of(inputs):
    from solspark.methods.sol import mean_summaries
    from solspark.reference.pool import pool

    return mean_summaries(pool(inputs.query, inputs.key, inputs.value))


@pytest.mark.parametrize("kind", ["random", "clustered", "equal"])
def test_lists_are_distinct_ascending_and_become_a_plan(kind):
    lists = block_lists(kind, 3, 11, 40, 7, CPU)
    assert lists.shape == (3, 11, 7)
    assert bool((lists.diff(dim=2) > 0).all())
    assert int(lists.min()) >= 0 and int(lists.max()) < 40
    plan = plan_from_lists(lists, 11 * BLOCK - 5, 40 * BLOCK - 3)
    mask = torch.zeros(1, 3, 11, 40, dtype=torch.bool).scatter_(3, lists[None], True)
    assert torch.equal(mask_from_plan(plan), mask)
    assert plan_density(plan) == pytest.approx(7 / 40)
    tokens = mask.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    assert executed_pairs(plan) == int(tokens[..., : 11 * BLOCK - 5, : 40 * BLOCK - 3].sum())


def test_clustered_lists_repeat_seven_tenths_of_the_one_before():
    lists = block_lists("clustered", 2, 30, 400, 40, CPU)
    one_hot = torch.zeros(2, 30, 400).scatter_(2, lists, 1.0)
    shared = (one_hot[:, 1:] * one_hot[:, :-1]).sum(2)
    assert bool((shared == 28).all())


@pytest.mark.parametrize("kept", [0, 5])
def test_impossible_lists_are_refused(kept):
    with pytest.raises(ValueError, match=r"kept: expected 1\.\.4"):
        block_lists("random", 1, 2, 4, kept, CPU)
    with pytest.raises(ValueError, match="lists: expected one of"):
        block_lists("sorted", 1, 2, 4, 1, CPU)


@pytest.mark.parametrize("tail", ["query", "block", "none"])
def test_the_row_oracle_is_the_reference(tail):
    inputs = inputs_of(torch.float64)
    lists = block_lists("random", 2, 21, 21, 4, CPU)
    plan = plan_from_lists(lists, 1318, 1318)
    summaries = None if tail == "none" else summaries_of(inputs)
    whole = reference(inputs.query, inputs.key, inputs.value, plan, summaries=summaries, tail=tail)
    verdict = gate_output(
        whole, inputs.query, inputs.key, inputs.value, inputs.sample, plan=plan, tail=tail
    )
    # Both are in float64; summaries hold their log masses in float32.
    assert verdict.relative_l2 < (1e-14 if tail == "none" else 1e-7)


def test_dense_rows_are_softmax_attention():
    inputs = inputs_of(torch.float64)
    query, key, value = inputs.transposed()
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    assert relative_to(inputs.dense, whole, inputs.sample) < 1e-12
    assert torch.equal(
        inputs.dense, dense_rows(inputs.query, inputs.key, inputs.value, inputs.sample)
    )


def test_a_row_that_reads_nothing_is_zero():
    query, key, value = (torch.randn(n, 8) for n in (2, 70, 70))
    exact = torch.zeros(2, 2, dtype=torch.bool)
    exact[0] = True
    out = attend_rows(query, key, value, scale=1.0, exact=exact)
    assert bool((out[1] == 0).all()) and bool((out[0] != 0).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "break_it",
    [
        pytest.param(lambda out: out * 1.03, id="scaled by three percent"),
        pytest.param(lambda out: out.roll(1, 1), id="rows moved by one"),
        pytest.param(lambda out: torch.where(out == out.max(), torch.nan, out), id="one NaN"),
        pytest.param(lambda out: torch.zeros_like(out), id="nothing written"),
    ],
)
def test_the_gate_fails_wrong_outputs(dtype, break_it):
    inputs = inputs_of(dtype)
    plan = plan_sol(inputs.query, inputs.key, top_k=4)
    right = reference(inputs.query, inputs.key, inputs.value, plan, summaries=summaries_of(inputs))
    arguments = (inputs.query, inputs.key, inputs.value, sample_rows(1318, 2, CPU, rows=200))
    assert gate_output(right, *arguments, plan=plan, tail="query").passed
    assert not gate_output(break_it(right), *arguments, plan=plan, tail="query").passed


def test_the_gate_fails_another_plan_and_a_missing_tail():
    inputs = inputs_of(torch.bfloat16)
    plan = plan_sol(inputs.query, inputs.key, top_k=4)
    other = plan_sol(inputs.query, inputs.key, top_k=5)
    out = reference(inputs.query, inputs.key, inputs.value, plan, summaries=summaries_of(inputs))
    arguments = (inputs.query, inputs.key, inputs.value, inputs.sample)
    assert not gate_output(out, *arguments, plan=other, tail="query").passed
    assert not gate_output(out, *arguments, plan=plan, tail="none").passed
    assert not gate_output(out, *arguments, plan=plan, tail="block").passed


def test_compare_asks_for_both_the_largest_and_the_mean_error():
    oracle = torch.linspace(-1, 1, 1000).double()
    rounding = oracle.bfloat16()
    assert compare(rounding, oracle, rounding, torch.bfloat16).passed
    one_off = rounding.double().clone()
    one_off[500] += 0.1
    assert "max error" in compare(one_off, oracle, rounding, torch.bfloat16).gate
    shifted = rounding.double() + 0.01
    assert "mean error" in compare(shifted, oracle, rounding, torch.bfloat16).gate
    # In float32 sums in another order may be as far off again.
    thrice = oracle + 3 * (rounding.double() - oracle)
    assert not compare(thrice, oracle, rounding, torch.float16).passed
    assert compare(thrice, oracle, rounding, torch.float32).passed
    assert not compare(thrice + thrice - oracle, oracle, rounding, torch.float32).passed
    shifted[3] = torch.inf
    assert compare(shifted, oracle, rounding, torch.bfloat16).gate == "not finite"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gaussian", "video"])
def test_plans_are_judged_by_their_scores(dtype, kind):
    inputs = inputs_of(dtype, kind)
    sample = sample_rows(1318, 2, CPU, rows=60)
    by_budget = plan_sol(inputs.query, inputs.key, top_k=5)
    by_threshold = plan_sol(inputs.query, inputs.key, tau=1.0)

    def verdict(plan, **options):
        return judge_plan(plan, inputs.query, inputs.key, sample, local_radius=1, **options)

    assert verdict(by_budget, top_k=5).passed
    assert verdict(by_threshold, tau=1.0).passed
    assert not verdict(by_budget, top_k=6).passed
    assert not verdict(by_threshold, tau=1.5).passed
    backwards = plan_sol(-inputs.query, inputs.key, top_k=5)
    assert not verdict(backwards, top_k=5).passed


def test_block_means_and_tails_cover_a_ragged_last_block():
    rows = torch.randn(150, 4)
    means = block_means(rows)
    torch.testing.assert_close(means[2], rows[128:].double().mean(0))
    tail = mean_tail(rows, rows, rows, torch.tensor([0, 149]), per_block=True, rounded=False)
    assert tail.queries is not None
    torch.testing.assert_close(tail.queries[1], means[2])
    assert float(tail.log_mass[0, 2].exp()) == pytest.approx(22)


SPARK = PackedConfig(topk_ratio=0.2)


@pytest.mark.parametrize(
    "config",
    [
        SPARK,
        PackedConfig(topk_ratio=0.2, reblock=ReblockConfig(layout_reuse="q_from_k")),
        PackedConfig(topk_ratio=0.2, reblock=None, virtual_query_levels_up=None),
        PackedConfig(topk_ratio=None, reblock=None, virtual_query_levels_up=None),
        PackedConfig(topk_ratio=0.2, reweight_components="bias_only"),
        PackedConfig(topk_ratio=0.2, tail_granularity="none"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_attention_is_judged_under_its_own_order_and_summaries(config, dtype):
    from solspark.methods.spark import packed_attention

    assert can_follow(config)
    inputs = inputs_of(dtype, "video")
    problem = inputs.problem
    out, _ = packed_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        video_tokens=problem.video_tokens,
        grid=problem.grid,
        config=config,
    )
    assert judge_packed(inputs, out, config, None).gate == "pass"
    assert not judge_packed(inputs, out.roll(1, 1), config, None).passed
    other = PackedConfig(
        **{**vars(config), "topk_ratio": 0.5, "reweight_components": config.reweight_components}
    )
    assert not judge_packed(inputs, out, other, None).passed


def test_every_method_is_declared_once_for_its_level():
    assert {"attend", "call", "layer", "plan", "reweight", "dit", "checks", "quality"} == {
        level for level, _ in METHODS
    }
    assert {"sol", "spark", "dense-cudnn", "comfy-kitchen-sol"} <= {
        name for level, name in METHODS if level == "call"
    }


def test_testing_offers_the_activations():
    made = video_activations("tiny", heads=[1], dtype=torch.float32)
    kept = inputs_of(kind="video")
    assert torch.equal(made.query[:, :, 0], kept.query[:, :, 1])


@pytest.mark.parametrize("parents", [1, 3])
def test_given_summaries_are_judged_as_they_are(parents):
    inputs = inputs_of()
    options = {"lists": "random", "topk_ratio": 0.2, "parents": parents, "impl": "eager"}
    case = METHODS["attend", "spark"].build(inputs, options)
    out = case.run()
    assert case.judge(out).passed
    # Plain means in their place are another result, and found.
    plain = METHODS["attend", "sol"].build(inputs, {**options, "tail": "query", "parents": None})
    assert not case.judge(plain.run()).passed
