"""The methods of this project at every level: attend, call, layer, plan, reweight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solspark import int8, last_call
from solspark.bench.baselines import best_dense, judge_lists, listed_flops, sized_lists
from solspark.bench.case import (
    Case,
    error_against_dense,
    judge_near,
    method,
)
from solspark.bench.cost import attend_cost
from solspark.bench.gate import Verdict, compare, gate_output, judge_plan, sample_rows
from solspark.bench.inputs import Inputs, chunked_projection
from solspark.bench.lists import block_lists, executed_pairs, plan_density, plan_from_lists
from solspark.bench.packed_gate import judge_packed
from solspark.methods.sol import mean_summaries, sol_attn
from solspark.methods.spark import packed_attention
from solspark.methods.spark_config import PRESETS, PackedConfig, ReblockConfig
from solspark.methods.spark_order import plan_orders
from solspark.ops.block_sparse_attention import block_sparse_attention
from solspark.ops.pool import Pooled, pool
from solspark.ops.quantized_attention import quantized_attention
from solspark.ops.reweight import reweight
from solspark.ops.score_blocks import score_blocks, thresholds
from solspark.ops.select_blocks import select_blocks
from solspark.plan.select import budget, plan_sol
from solspark.reference.reweight import reweight as reweight_reference
from solspark.types import BLOCK, BlockPlan, BlockSummaries, block_count

PLAN_OPTIONS = ("tau", "thresh_type", "local_radius", "impl")
HARNESS_OPTIONS = ("inputs", "lists", "heads", "seed", "preset")
"""Options that say what was fed, not how the method was called."""


def call_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that go to the method itself."""
    return {
        name: value
        for name, value in options.items()
        if name not in HARNESS_OPTIONS and value is not None
    }


def _plan_as(inputs: Inputs, options: dict[str, Any]) -> BlockPlan:
    """Return the plan that `sol_attn` makes under these options."""
    known = {name: options[name] for name in PLAN_OPTIONS if options.get(name) is not None}
    ratio = options.get("topk_ratio")
    if ratio is not None:
        known["top_k"] = budget(ratio, block_count(inputs.key.shape[1]))
    return plan_sol(inputs.query, inputs.key, **known)


def _sparse_flops(inputs: Inputs, plan: BlockPlan, tail: str) -> float:
    """Return the operations of the exact pairs and of the tail."""
    problem = replace(inputs.problem, heads=inputs.heads)
    summaries = attend_cost(problem, 0.0, tail=tail if tail != "block8x8" else "query").flops
    return 4.0 * inputs.query.shape[3] * executed_pairs(plan) + summaries


@method("attend", "sol", "lists", "topk_ratio", "tail", "impl")
def _attend(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the attention stage under given lists."""
    tokens = inputs.query.shape[1]
    blocks = block_count(tokens)
    kept = budget(options.get("topk_ratio", 0.1), blocks)
    kind = options.get("lists", "random")
    lists = block_lists(kind, inputs.heads, blocks, blocks, kept, inputs.device)
    plan = plan_from_lists(lists, tokens, tokens)
    tail = options.get("tail", "none")
    summaries = None
    if tail != "none":
        summaries = mean_summaries(pool(inputs.query, inputs.key, inputs.value))
    extra = {k: v for k, v in call_options(options).items() if k not in ("topk_ratio", "tail")}
    return Case(
        run=lambda: block_sparse_attention(
            inputs.query, inputs.key, inputs.value, plan, summaries=summaries, tail=tail, **extra
        ),
        judge=lambda out: _judge_plan(inputs, out, plan, tail, options),
        density=lambda out: plan_density(plan),
        flops=lambda density: _sparse_flops(inputs, plan, tail),
        precision=_low_precision(options),
    )


@method("attend", "spark", "lists", "topk_ratio", "parents", "impl")
def _attend_reweighted(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the attention stage under given lists, with summaries reweighted around P anchors.

    The anchors are means of consecutive query blocks, and each query block reads the summaries of
    its own; beside `sol` with tail "query" this says what anchors cost the attention alone.
    """
    tokens = inputs.query.shape[1]
    blocks = block_count(tokens)
    count = int(options.get("parents", 1))
    kept = budget(options.get("topk_ratio", 0.1), blocks)
    kind = options.get("lists", "random")
    lists = block_lists(kind, inputs.heads, blocks, blocks, kept, inputs.device)
    plan = plan_from_lists(lists, tokens, tokens)
    pooled = pool(inputs.query, inputs.key, None)
    assert pooled.query_means is not None
    parents = torch.arange(blocks, device=inputs.device) * count // blocks
    anchors = torch.stack([pooled.query_means[:, :, parents == i].mean(2) for i in range(count)], 1)
    keys, values, log_mass = reweight(anchors.to(inputs.key.dtype), inputs.key, inputs.value)
    summaries = BlockSummaries(
        keys, values, log_mass, parents.to(torch.int32) if count > 1 else None
    )
    asked = {name: options[name] for name in ("impl", "precision") if options.get(name)}

    def judge(out: Tensor) -> Verdict:
        verdict = gate_output(
            out,
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.sample,
            plan=plan,
            summaries=summaries,
        )
        return _as_precision_allows(verdict, inputs, options)

    return Case(
        run=lambda: block_sparse_attention(
            inputs.query, inputs.key, inputs.value, plan, summaries=summaries, **asked
        ),
        judge=judge,
        density=lambda out: plan_density(plan),
        flops=lambda density: _sparse_flops(inputs, plan, "query"),
        precision=_low_precision(options),
    )


@method("call", "sol", "topk_ratio", "tau", "tail", "impl")
def _call_sol(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the whole public call; the gate plans again and judges the output under that plan."""
    known = call_options(options)
    tail = known.get("tail", "query")

    def judge(out: Tensor) -> Verdict:
        plan = _plan_as(inputs, options)
        chosen = judge_plan(
            plan,
            inputs.query,
            inputs.key,
            inputs.sample,
            top_k=None
            if options.get("topk_ratio") is None
            else budget(options["topk_ratio"], plan.key_blocks),
            tau=options.get("tau", 1.0),
            local_radius=options.get("local_radius", 1),
        )
        if not chosen.passed:
            return chosen
        return _judge_plan(inputs, out, plan, tail, options)

    return Case(
        run=lambda: sol_attn(inputs.query, inputs.key, inputs.value, **known),
        judge=judge,
        density=lambda out: plan_density(_plan_as(inputs, options)),
        flops=lambda density: _sparse_flops(inputs, _plan_as(inputs, options), tail),
        error=lambda out: error_against_dense(inputs, out),
        precision=_low_precision(options),
    )


LOW_PRECISION_ERROR = 0.03
"""Largest relative L2 of FP8 or INT8 operands against the oracle under the same plan."""

UNLIKE_VALUES_ERROR = 0.06
"""The same for FP8 on Gaussian inputs: values that have nothing in common average to little."""


def _low_precision(options: dict[str, Any]) -> str | None:
    """Return the precision of the operands where it is not the inputs'."""
    precision = options.get("precision", "native")
    return None if precision == "native" else precision


def _judge_plan(
    inputs: Inputs, out: Tensor, plan: BlockPlan, tail: str, options: dict[str, Any]
) -> Verdict:
    """Judge an output under its plan; a low-precision one has to be finite and near."""
    verdict = gate_output(
        out, inputs.query, inputs.key, inputs.value, inputs.sample, plan=plan, tail=tail
    )
    return _as_precision_allows(verdict, inputs, options)


def _as_precision_allows(verdict: Verdict, inputs: Inputs, options: dict[str, Any]) -> Verdict:
    """Turn a verdict on rounding into one on the distance where operands were rounded further."""
    precision = _low_precision(options)
    if precision is None:
        return verdict
    unlike = precision == "fp8" and inputs.kind == "gaussian"
    return _within(verdict, UNLIKE_VALUES_ERROR if unlike else LOW_PRECISION_ERROR)


def _within(verdict: Verdict, most: float) -> Verdict:
    """Turn a verdict on rounding into one on the distance alone, for low precision."""
    if verdict.gate == "not finite" or not verdict.relative_l2 <= most:
        return Verdict(f"relative L2 {verdict.relative_l2:.3g} over {most}", verdict.relative_l2)
    return Verdict("pass", verdict.relative_l2)


@method("plan", "pool", "impl")
def _plan_pool(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build pooling of Q, K and V."""
    known = call_options(options)

    def judge(pooled: Pooled) -> Verdict:
        assert pooled.query_means is not None and pooled.value_means is not None
        worst = "pass"
        for name, means, rows in (
            ("query", pooled.query_means, inputs.query),
            ("key", pooled.key_means, inputs.key),
            ("value", pooled.value_means, inputs.value),
        ):
            for head in inputs.sample.heads:
                blocks = block_count(rows.shape[1])
                padded = rows.new_zeros(blocks * BLOCK, rows.shape[3], dtype=torch.float64)
                padded[: rows.shape[1]] = rows[0, :, head]
                lengths = torch.full((blocks, 1), 64.0, dtype=torch.float64, device=rows.device)
                lengths[-1] = rows.shape[1] - BLOCK * (blocks - 1)
                oracle = padded.view(blocks, BLOCK, -1).sum(1) / lengths
                verdict = compare(means[0, head], oracle, oracle.to(means.dtype), means.dtype)
                if not verdict.passed:
                    worst = f"{name} means: {verdict.gate}"
        return Verdict(worst, 0.0)

    return Case(
        run=lambda: pool(inputs.query, inputs.key, inputs.value, **known),
        judge=judge,
    )


@method("plan", "score_blocks", "impl")
def _plan_scores(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the block scores of all heads."""
    pooled = pool(inputs.query, inputs.key, None)
    assert pooled.query_means is not None
    query_means, scale = pooled.query_means, inputs.query.shape[-1] ** -0.5
    known = call_options(options)

    def judge(scores: Tensor) -> Verdict:
        head = inputs.sample.heads[-1]
        factor = scale * 1.4426950408889634
        means = query_means[0, head].double(), pooled.key_means[0, head].double()
        oracle = factor * means[0] @ means[1].T
        rounding = factor * means[0].float() @ means[1].float().T
        return compare(scores[0, head], oracle, rounding, torch.float32)

    return Case(
        run=lambda: score_blocks(query_means, pooled.key_means, scale=scale, **known),
        judge=judge,
        flops=lambda density: (
            2.0 * query_means.shape[1] * query_means.shape[2] ** 2 * query_means.shape[3]
        ),
    )


@method("plan", "select_blocks", "topk_ratio", "tau", "impl")
def _plan_select(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the selection from scores of all heads."""
    pooled = pool(inputs.query, inputs.key, None)
    assert pooled.query_means is not None
    tokens, scale = inputs.query.shape[1], inputs.query.shape[-1] ** -0.5
    scores = score_blocks(pooled.query_means, pooled.key_means, scale=scale)
    known: dict[str, Any] = {}
    if options.get("impl"):
        known["impl"] = options["impl"]
    ratio, tau = options.get("topk_ratio"), options.get("tau", 1.0)
    if ratio is not None:
        known["top_k"] = budget(ratio, block_count(tokens))
    else:
        known["thresholds"] = thresholds(
            pooled.query_means, pooled.key_mean, pooled.key_var, scale=scale, tau=tau
        )
    return Case(
        run=lambda: select_blocks(
            scores, local_radius=1, query_tokens=tokens, key_tokens=tokens, **known
        ),
        judge=lambda plan: judge_plan(
            plan,
            inputs.query,
            inputs.key,
            inputs.sample,
            top_k=known.get("top_k"),
            tau=tau,
            local_radius=1,
        ),
        density=plan_density,
    )


@method("plan", "sol", "topk_ratio", "tau", "impl")
def _plan_sol(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the whole plan of a call: pool, score, select."""
    ratio = options.get("topk_ratio")
    return Case(
        run=lambda: _plan_as(inputs, options),
        judge=lambda plan: judge_plan(
            plan,
            inputs.query,
            inputs.key,
            inputs.sample,
            top_k=None if ratio is None else budget(ratio, plan.key_blocks),
            tau=options.get("tau", 1.0),
            local_radius=options.get("local_radius", 1),
        ),
        density=plan_density,
    )


@method("reweight", "spark_reweight", "parents", "reweight_components", "impl")
def _reweight(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build reweighted summaries for P anchors; the first is the mean query, the others means of
    blocks.
    """
    parents = int(options.get("parents", 1))
    pooled = pool(inputs.query, inputs.key, None)
    assert pooled.query_means is not None
    means = pooled.query_means
    anchors = [means.mean(2)] + [means[:, :, -i] for i in range(parents - 1, 0, -1)]
    stacked = torch.stack(anchors, 1).to(inputs.key.dtype)
    known = {k: v for k, v in call_options(options).items() if k != "parents"}

    def judge(result: tuple[Tensor, Tensor, Tensor]) -> Verdict:
        return _judge_summaries(inputs, stacked, result, known)

    return Case(run=lambda: reweight(stacked, inputs.key, inputs.value, **known), judge=judge)


def _judge_summaries(
    inputs: Inputs, anchors: Tensor, result: tuple[Tensor, Tensor, Tensor], known: dict[str, Any]
) -> Verdict:
    """Judge the summaries of one head against the reference in float64."""
    head = inputs.sample.heads[-1]
    part = slice(head, head + 1)
    known = {k: v for k, v in known.items() if k != "impl"}
    tensors = [x[:, :, part] for x in (anchors, inputs.key, inputs.value)]
    oracle = reweight_reference(*(x.double() for x in tensors), **known)
    rounding = reweight_reference(*tensors, **known)
    for name, got, want, near in zip(("ak", "av", "lm"), result, oracle, rounding, strict=True):
        dtype = got.dtype if name != "lm" else inputs.key.dtype
        verdict = compare(got[:, :, part], want, near, dtype)
        if not verdict.passed:
            return Verdict(f"{name}: {verdict.gate}", verdict.relative_l2)
    return Verdict("pass", 0.0)


@method("plan", "reblock", "layout_reuse", "landmark_count", "impl")
def _plan_reblock(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the order of Q's and K's video rows: moments, features, trees."""
    known = call_options(options)
    impl = known.pop("impl", None)
    config = ReblockConfig(**known)
    state: dict[Any, Any] = {}
    return Case(
        run=lambda: plan_orders(
            inputs.query, inputs.key, inputs.problem.grid, config, state, impl=impl
        ),
        judge=lambda orders: _judge_permutations((orders.query, orders.key)),
        warmup=4,
    )


def _judge_permutations(result: tuple[Tensor, ...]) -> Verdict:
    """Judge that every permutation is a bijection."""
    for permutation in result:
        ordered = permutation.sort(-1).values
        count = torch.arange(permutation.shape[-1], device=permutation.device)
        if not bool((ordered == count).all()):
            return Verdict("a permutation is not a bijection", 0.0)
    return Verdict("pass", 0.0)


def packed_config(method_name: str, options: dict[str, Any]) -> PackedConfig:
    """Return the PackedConfig of a layer: Sol in the given order, or a Spark preset, with
    overrides.

    Options named like a field of the reblock options change the preset's reblock.
    """
    known = call_options(options)
    known.pop("impl", None)
    preset = options.get("preset") or "default"
    if method_name == "sol":
        base = PackedConfig(
            topk_ratio=None, reblock=None, virtual_query_levels_up=None, force_local_blocks=None
        )
    else:
        base = PRESETS[preset]
    if "tau" in known and "topk_ratio" not in known:
        known["topk_ratio"] = None
    inner = {k: known.pop(k) for k in list(known) if k in ReblockConfig.__dataclass_fields__}
    if inner:
        known["reblock"] = replace(base.reblock or ReblockConfig(), **inner)
    return replace(base, **known)


def packed_case(name: str, inputs: Inputs, options: dict[str, Any]) -> Case:
    """Return the case of packed attention, Sol or Spark."""
    config = packed_config(name, options)
    problem = inputs.problem
    dense = best_dense(inputs.device)
    state: dict[Any, Any] = {}
    records: list[Any] = []

    def run(chosen: Any = config) -> Tensor:
        out, record = packed_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            video_tokens=problem.video_tokens,
            grid=problem.grid,
            config=chosen,
            dense=dense,
            cache=state,
            impl=options.get("impl"),
        )
        records[:] = [record]
        return out

    def judge(out: Tensor) -> Verdict:
        """Pass if everything-exact equals dense, and the result equals the oracle of its plan."""
        record = records[0]
        everything = run(replace(config, topk_ratio=1.0))
        records[:] = [record]
        exact = _as_precision_allows(
            gate_output(everything, inputs.query, inputs.key, inputs.value, inputs.sample),
            inputs,
            options,
        )
        if not exact.passed:
            return Verdict(f"everything exact against dense: {exact.gate}", exact.relative_l2)
        followed = judge_packed(inputs, out, config, options.get("impl"))
        return _as_precision_allows(followed, inputs, options)

    return Case(
        run=run,
        judge=judge,
        density=lambda out: _record_density(records[0]),
        error=lambda out: error_against_dense(inputs, out),
        precision=_low_precision(options),
    )


def _record_density(record: Any) -> float:
    """Return the share of block pairs that the sparse rows read exactly."""
    return float(record.density)


def _packed(name: str) -> Callable[[Inputs, dict[str, Any]], Case]:
    """Return the builder of `packed_case` for a method."""
    return lambda inputs, options: packed_case(name, inputs, options)


for _level in ("layer", "call"):
    method(_level, "spark", "topk_ratio", "preset", "impl")(_packed("spark"))
method("layer", "sol", "topk_ratio", "tau", "impl")(_packed("sol"))


@method("call", "sol-int8", "topk_ratio", "tau", "token_aug", "impl")
def _int8(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the direct INT8 call."""
    known = call_options(options)
    return Case(
        run=lambda: int8.sol_attn(inputs.query, inputs.key, inputs.value, **known),
        judge=lambda out: judge_near(inputs, out, 1.0),
        density=lambda out: _int8_density(),
        error=lambda out: error_against_dense(inputs, out),
        precision="int8",
    )


def _int8_density() -> float:
    """Return the share of block pairs that the newest call read exactly."""
    record = last_call()
    assert record is not None and record.density is not None
    return record.density


LOUD = {
    "none": (0, 0, 0),
    "k": (0, 1, 0),
    "k/q": (-1, 1, 0),
    "q": (1, 0, 0),
    "qk": (1, 1, 0),
    "v": (0, 0, 1),
}
"""Operands with loud channels -> powers of the gain on the channels of Q, K and V."""

LOUD_CHANNELS = (3, 40, 77, 100)


@method("quality", "sol-int8-outliers", "loud", "gain", "rotate", "balance", "impl")
def _int8_outliers(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build INT8 with every block exact, so that the error is that of the integers alone.

    Four channels are `gain` times as loud as the others in the operands that `loud` names; Q and K
    are half as large as the inputs, as the INT8 specification has them in its tests.
    """
    known = {"loud": "k", "gain": 50.0, **call_options(options)}
    powers, gain = LOUD.get(known.pop("loud")), float(known.pop("gain"))
    if powers is None:
        raise ValueError(f"loud: expected one of {', '.join(LOUD)}, got {options['loud']!r}")
    query, key, value = inputs.query * 0.5, inputs.key * 0.5, inputs.value.clone()
    for tensor, power in zip((query, key, value), powers, strict=True):
        tensor[..., LOUD_CHANNELS] *= gain**power
    loud = Inputs(inputs.problem, query, key, value, inputs.kind)
    # Loud in both, Q and K make softmax all but one-hot: the error is a few rows whose key changes.
    loud.sample = sample_rows(query.shape[1], inputs.heads, inputs.device, rows=query.shape[1])
    return Case(
        run=lambda: int8.sol_attn(query, key, value, -1e9, **known),
        judge=lambda out: judge_near(loud, out, 1.0),
        error=lambda out: error_against_dense(loud, out),
        timed=False,
        precision="int8",
    )


@method("call", "sol-int8-chunked", "topk_ratio", "tau", "token_aug", "primed", "impl")
def _int8_chunked(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the INT8 call over a fused projection in chunks, cold or primed."""
    known = call_options(options)
    primed = known.pop("primed", False)
    projected = chunked_projection(inputs)
    state: dict[str, Any] = {}

    def call() -> Any:
        return int8.sol_attn_chunked(*projected, **{**known, **state})

    if primed:
        # With `balance` its factors come back too.
        state.update(zip(("kmean", "vscale", "balance"), call()[1:], strict=False))
    return Case(
        run=lambda: call()[0],
        judge=lambda out: Verdict(
            "pass" if bool(out.isfinite().all()) else "not finite", float("nan")
        ),
        density=lambda out: _int8_density(),
        precision="int8",
    )


QUANTIZED_BLOCK = (128, 64)


def _quantized_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that quantised attention understands."""
    return {k: v for k, v in call_options(options).items() if k not in ("topk_ratio", "tail")}


@method("attend", "quantized", "lists", "topk_ratio", "matmul", "pv", "impl")
def _quantized(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build quantised attention under a block mask of 128 rows and 64 keys."""
    lists = sized_lists(inputs, options, QUANTIZED_BLOCK)
    columns = block_count(inputs.key.shape[1], QUANTIZED_BLOCK[1])
    mask = torch.zeros(*lists.shape[:2], columns, dtype=torch.bool, device=inputs.device)
    mask.scatter_(2, lists, True)
    known = _quantized_options(options)

    def judge(out: Tensor) -> Verdict:
        verdict = judge_lists(inputs, out, lists, QUANTIZED_BLOCK)
        return _within(verdict, LOW_PRECISION_ERROR)

    return Case(
        run=lambda: quantized_attention(
            inputs.query, inputs.key, inputs.value, block_mask=mask[None], **known
        ),
        judge=judge,
        density=lambda out: lists.shape[2] / columns,
        flops=lambda density: listed_flops(inputs, lists, QUANTIZED_BLOCK),
        precision=options.get("matmul", "int8"),
    )


@method("call", "dense-int8", "matmul", "pv", "impl")
def _dense_int8(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build quantised attention over all keys."""
    known = _quantized_options(options)
    return Case(
        run=lambda: quantized_attention(inputs.query, inputs.key, inputs.value, **known),
        judge=lambda out: judge_near(inputs, out, LOW_PRECISION_ERROR),
        density=lambda out: 1.0,
        flops=lambda density: float(inputs.problem.dense_flops(inputs.heads)),
        error=lambda out: error_against_dense(inputs, out),
        precision=options.get("matmul", "int8"),
    )
