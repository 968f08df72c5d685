"""How far sparse attention is from dense on video activations: curves, ablations, mass recall.

Every figure is taken on sampled query rows against dense attention in float64. A GPU runs whole
calls for it; a CPU evaluates the definition on the sampled rows alone where it can (`--impl eager`
runs whole calls there too). The route figures stand beside what is published for real activations
of MiniMax-H3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solspark._checks import resolve_scale
from solspark.bench import ours, sampled
from solspark.bench.activations import head_kind, video_activations
from solspark.bench.case import DENSE_ORACLE, Case, error_against_dense, judge_near, method
from solspark.bench.gate import (
    RowSample,
    Verdict,
    exact_blocks_of_rows,
    mean_tail,
    sample_rows,
)
from solspark.bench.inputs import Inputs
from solspark.bench.problems import Problem
from solspark.bench.quality_tables import calibration_table
from solspark.bench.rows import Row
from solspark.errors import SolsparkError
from solspark.methods.sol import sol_attn
from solspark.methods.sol_int8 import sol_attn as sol_int8_attn
from solspark.methods.spark_config import ReblockConfig
from solspark.methods.spark_order import plan_orders
from solspark.ops._dispatch import collect_records
from solspark.ops.permute import permute
from solspark.ops.pool import pool
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import plan_tau, plan_top_k
from solspark.plan.select import budget
from solspark.types import BLOCK, BlockPlan, block_count

ROWS = 192
MASS = "dense attention mass of sampled rows inside the exact blocks"


def wide_sample(inputs: Inputs) -> RowSample:
    """Return a sample over all heads, for figures rather than for a gate."""
    if "wide" not in inputs._cache:
        inputs._cache["wide"] = sample_rows(
            inputs.query.shape[1], inputs.heads, inputs.device, rows=ROWS, most_heads=inputs.heads
        )
    return inputs._cache["wide"]


def _widened(inputs: Inputs) -> Inputs:
    """Return the same inputs judged on the wide sample; what that costs is paid once."""
    if "widened" not in inputs._cache:
        other = Inputs(inputs.problem, inputs.query, inputs.key, inputs.value, inputs.kind)
        other.sample = wide_sample(inputs)
        inputs._cache["widened"] = other
    return inputs._cache["widened"]


def _figure_case(inputs: Inputs, run: Callable[[], Any], density: Callable[[Any], Any]) -> Case:
    """Return an untimed case whose row tells error and density; run gives the output first."""
    wide = _widened(inputs)
    return Case(
        run=run,
        judge=lambda result: judge_near(wide, result[0], 1.0),
        density=density,
        error=lambda result: error_against_dense(wide, result[0]),
        timed=False,
    )


def _sampled_case(inputs: Inputs, run: Callable[[], sampled.Sampled]) -> Case:
    """Return an untimed case whose result is the sampled rows alone."""
    wide = _widened(inputs)

    def relative(result: sampled.Sampled) -> float:
        dense = wide.dense[0]
        return float((result.rows - dense).norm() / dense.norm())

    def judge(result: sampled.Sampled) -> Verdict:
        error = relative(result)
        return Verdict("pass" if error <= 1.0 else f"relative L2 {error:.3g}", error)

    return Case(
        run=run,
        judge=judge,
        density=lambda result: result.density,
        error=lambda result: {"relative_l2": relative(result), "against": DENSE_ORACLE},
        timed=False,
        implementation=sampled.WORDS,
    )


@method("quality", "sol", "topk_ratio", "tau", "tail", "impl")
def _sol(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build Sol with the context as an exact sink."""
    problem = inputs.problem
    known = ours.call_options(options)
    start = problem.sink_start
    if inputs.device.type == "cpu" and sampled.knows_sol(known):
        wide = wide_sample(inputs)
        return _sampled_case(inputs, lambda: sampled.sampled_sol(inputs, wide, known))
    known.update(sink_start=start, sink_tokens=inputs.query.shape[1] - start)
    case = _figure_case(
        inputs,
        lambda: sol_attn(inputs.query, inputs.key, inputs.value, return_stats=True, **known),
        lambda result: result[1].density,
    )
    return replace(case, precision=options.get("precision"))


@method("quality", "spark", "topk_ratio", "preset", "reweight_components", "impl")
def _spark(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build packed attention, Spark's preset with overrides; reweight_components is one of them."""
    config = ours.packed_config("spark", options)
    whole = inputs.device.type != "cpu" or "impl" in options
    if not whole and sampled.knows_packed(config):
        wide = wide_sample(inputs)
        return _sampled_case(inputs, lambda: sampled.sampled_packed(inputs, wide, config))
    case = ours.packed_case("spark", inputs, options)
    inner = case.run
    return _figure_case(inputs, lambda: (inner(),), lambda result: case.density(result[0]))


@method("quality", "sol-int8", "topk_ratio", "tau", "token_aug", "impl")
def _sol_int8(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build Sol in INT8 with the blocks of the context as sinks."""
    known = ours.call_options(options)
    blocks = block_count(inputs.query.shape[1])
    known["sink_blocks"] = (inputs.problem.sink_start // BLOCK, blocks)

    def run() -> tuple[Tensor, float | None]:
        with collect_records() as records:
            out = sol_int8_attn(inputs.query, inputs.key, inputs.value, **known)
        return out, records[-1].density

    return replace(
        _figure_case(inputs, run, lambda result: result[1]),
        precision="int8",
    )


def _orders(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the reblocked orders of queries and keys, [B, H, V]."""
    if "orders" not in inputs._cache:
        found = plan_orders(inputs.query, inputs.key, inputs.problem.grid, ReblockConfig(), {})
        inputs._cache["orders"] = (found.query, found.key)
    return inputs._cache["orders"]


def _routed(
    inputs: Inputs, order: str, options: dict[str, Any]
) -> tuple[Tensor, Tensor, BlockPlan, float]:
    """Return query and key in an order, the plan of their sparse rows, and the share of candidates.

    The route is a budget (`topk_ratio`), or Sol's threshold (`tau`) with its local band.
    """
    query, key = inputs.query, inputs.key
    if order == "reblocked":
        by_query, by_key = _orders(inputs)
        query, key = permute(query, by_query), permute(key, by_key)
    layout = PackedLayout(query.shape[1], inputs.problem.video_tokens)
    pooled = pool(query[:, : layout.sparse_tokens], key, None)
    assert pooled.query_means is not None
    means = (pooled.query_means, pooled.key_means)
    scale = query.shape[-1] ** -0.5
    if "tau" in options:
        route = plan_tau(
            *means,
            pooled.key_mean,
            pooled.key_var,
            layout,
            tau=options["tau"],
            kind="diag",
            scale=scale,
            local_radius=1,
        )
    else:
        top_k = budget(options.get("topk_ratio", 0.1), layout.candidates)
        route = plan_top_k(*means, layout, top_k=top_k, scale=scale)
    sinks = layout.key_blocks - layout.candidates
    kept = (float(route.plan.counts.double().mean()) - sinks) / layout.candidates
    return query, key, route.plan, kept


def mass_recall(
    query: Tensor, key: Tensor, plan: BlockPlan, sample: RowSample, *, scale: float | None = None
) -> Tensor:
    """Return float64 [heads]: the share of dense attention mass inside the exact blocks.

    Args:
        query, key: [1, T, H, D] in the order of the plan.
        plan: of the first rows, against all keys.
        sample: rows (in the order of the plan) and heads.
        scale: 1 / sqrt(D) unless given.
    """
    scale = resolve_scale(scale, query.shape[-1])
    rows = sample.rows[sample.rows < plan.query_tokens]
    shares = []
    for head in sample.heads:
        logits = query[0, rows, head].double() @ key[0, :, head].double().T * scale
        exact = exact_blocks_of_rows(plan, rows, 0, head)
        visible = exact.repeat_interleave(BLOCK, dim=1)[:, : key.shape[1]]
        shares.append((logits.softmax(1) * visible).sum(1).mean())
    return torch.stack(shares)


@method("quality", "recall", "topk_ratio", "tau", "order")
def _recall(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build the mass recall of a route in the given order or reblocked.

    The row's density is the share of the candidate blocks, those of the video alone.
    """
    order = options.get("order", "given")
    if order not in ("given", "reblocked"):
        raise ValueError(f"order: expected given or reblocked, got {order!r}")

    def run() -> tuple[float, float]:
        query, key, plan, kept = _routed(inputs, order, options)
        return float(mass_recall(query, key, plan, wide_sample(inputs)).mean()), kept

    return Case(
        run=run,
        judge=lambda result: Verdict("pass" if 0 < result[0] <= 1 + 1e-9 else "no share", 0.0),
        density=lambda result: result[1],
        error=lambda result: {"mass_recall": result[0], "against": MASS},
        timed=False,
    )


@method("quality", "skipped-mass", "topk_ratio", "tau")
def _skipped_mass(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build how far block means underestimate the blocks that Sol skips.

    log sum_u e^(s q.k_u) - (s q.mean k + log n) >= 0 (Jensen), over sampled rows and skipped
    blocks: it grows with the spread of logits inside a block, and is what reweighting has to mend.
    """

    def run() -> float:
        query, key, plan, _ = _routed(inputs, "given", options)
        scale = resolve_scale(None, query.shape[-1])
        sample = wide_sample(inputs)
        rows = sample.rows[sample.rows < plan.query_tokens]
        gaps = []
        for head in sample.heads:
            asking, keys = query[0, rows, head].double(), key[0, :, head].double()
            logits = (asking @ keys.T * scale).exp()
            padding = plan.key_blocks * BLOCK - keys.shape[0]
            mass = torch.nn.functional.pad(logits, (0, padding))
            mass = mass.view(len(rows), plan.key_blocks, BLOCK).sum(2).log()
            tail = mean_tail(keys, keys, keys, rows, per_block=False, rounded=False)
            told = asking @ tail.keys[0].T * scale + tail.log_mass
            gaps.append((mass - told)[~exact_blocks_of_rows(plan, rows, 0, head)])
        return float(torch.cat(gaps).median())

    return Case(
        run=run,
        judge=lambda gap: Verdict("pass" if gap >= 0 else "below zero", 0.0),
        error=lambda gap: {"median_nats": gap, "against": "log mass of skipped blocks"},
        timed=False,
    )


def route_masks(
    problem: Problem, head: int, ratio: float, device: torch.device
) -> dict[str, tuple[Tensor, float]]:
    """Return the exact blocks of one head before and after reblocking, each with its mass recall.

    Args:
        problem: shape; its video activations are made for this head.
        head: index.
        ratio: budget.
        device: where to compute.
    """
    tensors = video_activations(problem, heads=[head], device=device, dtype=torch.float32)
    inputs = Inputs(replace(problem, heads=1), *tensors, "video")
    found = {}
    for order, words in (("given", "given order"), ("reblocked", "reblocked")):
        query, key, plan, _ = _routed(inputs, order, {"topk_ratio": ratio})
        rows = torch.arange(plan.query_blocks, device=device) * BLOCK
        mask = exact_blocks_of_rows(plan, rows, 0, 0).cpu()
        recall = mass_recall(query, key, plan, wide_sample(inputs))
        found[words] = (mask, float(recall.mean()))
    return found


SWEEPS: tuple[tuple[tuple[str, ...], dict[str, list[Any]]], ...] = (
    (("recall",), {"topk_ratio": [0.1, 0.2], "tau": [1.0], "order": ["given", "reblocked"]}),
    (("skipped-mass",), {"tau": [1.0]}),
    (("sol",), {"topk_ratio": [0.1], "tau": [1.0]}),
    (("spark",), {"topk_ratio": [0.1]}),
    (
        ("spark",),
        {"topk_ratio": [0.1], "reweight_components": ["none", "weights_only", "bias_only", "full"]},
    ),
    (("sol",), {"topk_ratio": [0.05, 0.2, 0.3, 0.5], "tau": [0.0, 0.5, 1.5, 2.0]}),
    (("spark",), {"topk_ratio": [0.05, 0.2, 0.3, 0.5]}),
    (("spark",), {"topk_ratio": [0.1], "preset": ["quality", "fast"]}),
    (("sol",), {"topk_ratio": [0.1], "tail": ["block", "none"]}),
    (("sol-int8",), {"topk_ratio": [0.1, 0.2, 0.3], "tau": [1.0]}),
    (("sol-int8",), {"topk_ratio": [0.1], "token_aug": [256]}),
    (("sol",), {"topk_ratio": [0.1], "precision": ["fp8"]}),
)
"""What the report takes, the figures of the calibration first."""


def sweeps_needed(rows: Sequence[Row]) -> int:
    """Return how many of the first sweeps take all of some rows; all, where not even they do."""

    def takes(names: tuple[str, ...], sweeps: dict[str, list[Any]], row: Row) -> bool:
        asked = {name: value for name, value in row.options.items() if name in SWEPT_HERE}
        return row.method in names and all(
            value in sweeps.get(name, []) for name, value in asked.items()
        )

    for count in range(1, len(SWEEPS)):
        if all(any(takes(*sweep, row) for sweep in SWEEPS[:count]) for row in rows):
            return count
    return len(SWEEPS)


SWEPT_HERE = frozenset(name for _, sweeps in SWEEPS for name in sweeps)


def parser(program: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    from solspark.bench import settings

    cuda = torch.cuda.is_available()
    parse = argparse.ArgumentParser(prog=program, description=__doc__)
    add = parse.add_argument
    add("--problem", help="names, comma-separated; tiny, or that of --activations")
    add("--heads", type=int, help="use only the first heads (every kind is among five)")
    add("--only", type=int, default=len(SWEEPS), help="take the first N sweeps; 4 calibrate")
    add("--dtype", default="bf16" if cuda else "fp32", choices=settings.DTYPES)
    add("--device", default="cuda" if cuda else "cpu")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON-lines file to append to")
    add("--impl", help="implementation of every call: eager, triton, hopper")
    add("--run", default="", help="id of the run; give it again to resume")
    add("--commit", default="")
    add("--budget-s", type=float)
    add("--activations", type=Path, help="safetensors with query, key, value to measure on")
    return parse


def main(argv: Sequence[str] | None = None, program: str = "solspark bench quality") -> int:
    """Take the quality rows of problems on video activations and print the calibration.

    Args:
        argv: arguments; None takes the process's own.
        program: name in help texts.

    Returns:
        0; 1 when a result is not finite or farther from dense than the zero vector; 2 for a wrong
        argument.
    """
    from solspark.bench import console, session, settings

    options = parser(program).parse_args(sys.argv[1:] if argv is None else list(argv))
    settings.load_cases()
    from solspark.bench.rows import current_commit, fresh_run_id

    try:
        wanted = settings.Settings(
            problems=settings.wanted_problems(options.problem, options.activations),
            levels=("quality",),
            inputs="file" if options.activations else "video",
            file=options.activations,
            device=torch.device(options.device),
            dtype=settings.DTYPES[options.dtype],
            heads=options.heads,
            seed=options.seed,
            fixed={"impl": options.impl} if options.impl else {},
            budget_s=options.budget_s,
            out=options.out,
            run=options.run or fresh_run_id(),
            commit=options.commit or current_commit(),
        )
    except (ValueError, OSError, SolsparkError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    taken = session.Session(wanted, lambda text: print(text, file=sys.stderr, flush=True))
    taken.say(f"run {wanted.run}, commit {wanted.commit}, {wanted.device}")
    taken.run(
        [replace(wanted, methods=names, sweeps=sweeps) for names, sweeps in SWEEPS[: options.only]]
    )
    console.print_table(console.table(taken.rows, untimed=True))
    print()
    print(calibration_table(taken.rows))
    if not options.activations:
        kinds = ", ".join(head_kind(head) for head in range(min(options.heads or 10, 10)))
        print(f"\nkinds of the first heads: {kinds}")
    return 1 if taken.failed else 0
