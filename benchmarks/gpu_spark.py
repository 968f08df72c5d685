"""Check and time the parts of Spark on one GPU, and the whole packed attention.

    python benchmarks/gpu_spark.py [--problem 10s|5s|both] [--heads 56] [--skip-checks] [--json F]
    python benchmarks/gpu_spark.py --all --json F       all that Spark on a GPU must show: 5 minutes

Correctness first: reweight and anchors against the float64 oracle on a short clip, Triton against
eager; then the median of CUDA events for every stage, with the bytes it must move, and for whole
calls of every preset at 10 s and 5 s, with their peak memory. `--all` puts `gpu_reblock.py` before
that: the trees' checks, the plan of both shapes, and the variants of its settings. Rows are written
as they are taken. `--device cpu --problem tiny` runs the same on a tiny problem, so that the script
itself can be tried anywhere.

Targets on an H200: reweight 1.0 ms; whole call 56 ms at 10 s and 20 ms at 5 s, 4 GiB above the
inputs at 10 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from solspark.methods import aside
from solspark.methods.sol import sol_attn
from solspark.methods.spark import PRESETS, PackedConfig, ReblockConfig, packed_attention
from solspark.methods.spark_order import plan_orders
from solspark.ops.anchors import anchors
from solspark.ops.block_sparse_attention import block_sparse_attention
from solspark.ops.gather_means import gather_means
from solspark.ops.gather_reweight import gather_reweight
from solspark.ops.permute import permute, unpermute
from solspark.ops.pool import pool
from solspark.ops.reweight import reweight
from solspark.ops.second_moments import reblock_features
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import plan_top_k
from solspark.plan.select import budget
from solspark.reference.anchors import anchors as anchors_reference
from solspark.reference.reweight import reweight as reweight_reference
from solspark.testing import assert_close_to_oracle
from solspark.types import BlockSummaries, TokenGrid

PROBLEMS = {
    "10s": (TokenGrid(72, 24, 42), 1008),
    "5s": (TokenGrid(37, 24, 42), 926),
    "short": (TokenGrid(9, 24, 42), 200),
    "tiny": (TokenGrid(5, 12, 21), 90),
}


class Bench:
    """Times calls on one device and writes the rows."""

    def __init__(self, device: torch.device, path: str | None):
        self.device = device
        self.path = path
        self.problem = ""
        self.failed = False

    def attempt(self, stage: str, call: Callable[[], Any]) -> None:
        """Run a part; should it fail, say so and go on: the other figures are worth having."""
        begin = time.perf_counter()
        try:
            passed = call() is not False
            words = "" if passed else "said no"
        except Exception as error:
            traceback.print_exc()
            passed, words = False, f"{type(error).__name__}: {str(error)[:500]}"
        self.failed |= not passed
        seconds = round(time.perf_counter() - begin, 1)
        row = {"problem": self.problem, "part": stage, "passed": passed, "seconds": seconds}
        self.write(row | ({"why": words} if words else {}))
        print(f"{'ok  ' if passed else 'FAIL'} {stage}, {seconds} s {words}", flush=True)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to the file, if there is one."""
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(
        self, stage: str, call: Callable[[], Any], *, gib: float | None = None, repeat: int = 10
    ) -> float:
        """Return the median of `repeat` timed calls in ms, and print a row."""
        for _ in range(2):
            call()
        self.wait()
        peak = None
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            self.wait()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        samples = []
        for _ in range(repeat):
            if self.device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # Two busy milliseconds: the host gets ahead, and its time is not in the figure.
                torch.cuda._sleep(4_000_000)
                start.record()
                call()
                stop.record()
                stop.synchronize()
                samples.append(start.elapsed_time(stop))
            else:
                begin = time.perf_counter()
                call()
                samples.append((time.perf_counter() - begin) * 1e3)
        ms = statistics.median(samples)
        row = {"problem": self.problem, "stage": stage, "ms": round(ms, 3)}
        words = f"{self.problem:4} {stage:44} {ms:9.3f} ms"
        if gib is not None:
            row["tb_s"] = round(gib * 2**30 / ms / 1e9, 2)
            words += f" {row['tb_s']:6.2f} TB/s"
        if peak is not None:
            row["peak_gib"] = round(peak, 2)
            words += f" {peak:6.2f} GiB peak"
        print(words, flush=True)
        self.write(row)
        return ms


def make(grid: TokenGrid, context: int, heads: int, dtype: torch.dtype, device: torch.device):
    """Return Gaussian query, key and value [1, T, H, 128], drawn on the device."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (1, grid.tokens + context, heads, 128)
    return tuple(
        torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3)
    )


def check_reweight(device: torch.device, dtype: torch.dtype, anchor, key, value) -> None:
    """Judge every switch of reweight by the oracle, on few heads."""
    for components in ("full", "weights_only", "bias_only", "none"):
        for switches in ({}, {"summary_math": "comfy_fp32"}, {"logmass_key": "pre_round"}):
            for given in (anchor, anchor.float()):
                options = {"reweight_components": components, **switches}
                result = reweight(given, key, value, **options)
                oracle = reweight_reference(given.double(), key.double(), value.double(), **options)
                peer = reweight_reference(given, key, value, **options)
                terms = (
                    torch.einsum("bphd,bphnd->bphn", given.double().abs(), oracle[0].abs())
                    / key.shape[-1] ** 0.5
                )
                assert_close_to_oracle(result[0], oracle[0], peer[0], name="keys")
                assert_close_to_oracle(result[1], oracle[1], peer[1], name="values")
                mass = (result[2].double() + terms).float()
                assert_close_to_oracle(
                    mass, oracle[2] + terms, peer[2].double() + terms, name="log_mass"
                )


def check(bench: Bench, query, key, value, layout: PackedLayout) -> None:
    """Run the correctness gates; any failure raises."""
    few = slice(0, min(2, query.shape[2]))
    q, k, v = query[:, :, few], key[:, :, few], value[:, :, few]
    pooled = pool(q[:, : layout.sparse_tokens], k, None)
    ranges = ((0, layout.sparse_tokens),)
    blocks = tuple((64 * i, 64 * i + 64) for i in range(min(17, layout.candidates)))
    for given in (ranges, blocks):
        result = anchors(pooled.query_means, given, dtype=q.dtype)
        oracle = anchors_reference(pooled.query_means.double(), given, dtype=torch.float64)
        peer = anchors_reference(pooled.query_means, given, dtype=q.dtype)
        assert_close_to_oracle(result, oracle, peer, name="anchors")
        check_reweight(bench.device, q.dtype, result, k, v)
    check_gathers(q, k, v, layout)
    whole = reweight(anchors(pooled.query_means, ranges, dtype=q.dtype), k, v)
    again = reweight(anchors(pooled.query_means, ranges, dtype=q.dtype), k, v)
    assert all(torch.equal(x, y) for x, y in zip(whole, again, strict=True))
    print(f"{bench.problem:4} reweight and anchors: close to the oracle, repeatable", flush=True)


def check_gathers(q, k, v, layout: PackedLayout) -> None:
    """Hold that one pass gives what separate passes give."""
    rows = [torch.randperm(layout.video_tokens, device=q.device) for _ in range(q.shape[2])]
    order = torch.stack(rows)[None].int()
    moved, means = gather_means(q, order, blocks=layout.query_blocks, dtype=torch.float32)
    separate = permute(q, order)
    assert torch.equal(moved, separate), "gathered queries differ"
    pooled = pool(separate[:, : layout.sparse_tokens], permute(k, order), None)
    torch.testing.assert_close(means, pooled.query_means, atol=1e-6, rtol=1e-5)
    anchor = anchors(means, ((0, layout.sparse_tokens),), dtype=q.dtype)
    result = gather_reweight(anchor, k, v, order)
    keys, values = permute(k, order), permute(v, order)
    expected = (keys, values, pooled.key_means, *reweight(anchor, keys, values))
    for one, other in zip(result, expected, strict=True):
        # The same FP32 sums in another order: at most one rounding apart.
        bound = torch.finfo(q.dtype).eps if one.dtype == q.dtype else 1e-2
        torch.testing.assert_close(one, other, atol=bound, rtol=bound)


def check_whole(bench: Bench, tensors, grid: TokenGrid, config: PackedConfig) -> None:
    """Hold that nothing waits for the device, repeats are equal, and all exact is dense."""
    options = {"video_tokens": grid.tokens, "grid": grid}
    cache: dict[Any, Any] = {}
    first, record = packed_attention(*tensors, config=config, cache=cache, **options)
    print(f"{bench.problem:4} served by {record.implementations}", flush=True)
    packed_attention(*tensors, config=config, cache=cache, **options)
    if bench.device.type == "cuda":
        bench.wait()
        torch.cuda.set_sync_debug_mode("error")
    try:
        again, _ = packed_attention(*tensors, config=config, cache=cache, **options)
    finally:
        if bench.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again), "a repeated call differs"
    assert config.reblock is not None
    replayed = replace(config, reblock=replace(config.reblock, cuda_graph=True))
    cache = {}
    for _ in range(3):
        graph, _ = packed_attention(*tensors, config=replayed, cache=cache, **options)
    assert torch.equal(first, graph), "a replayed plan differs"
    if bench.device.type == "cuda":
        with mock.patch.object(aside, "OVERLAP", False):
            alone, _ = packed_attention(*tensors, config=config, cache={}, **options)
        assert torch.equal(first, alone), "dense rows on a second stream differ"
        del alone
    del graph, again, cache
    few = [x[:, :, :2] for x in tensors]
    exact, _ = packed_attention(*few, config=replace(config, topk_ratio=1.0), **options)
    rows = torch.arange(0, exact.shape[1], 997, device=bench.device)
    q, k, v = few[0][:, rows].double(), few[1].double(), few[2].double()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 128**0.5
    dense = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    error = float((exact[:, rows].double() - dense).norm() / dense.norm())
    print(f"{bench.problem:4} everything exact against dense, relative L2: {error:.2e}")
    assert error < 4 * torch.finfo(few[0].dtype).eps
    print(f"{bench.problem:4} packed attention: no waits, repeatable, replay equal", flush=True)
    held = ("no waits", "repeats equal", "graph replay equals eager", "second stream equal")
    checks = {"problem": bench.problem, "stage": "checks", "held": held, "all_exact_error": error}
    bench.write(checks | {"implementations": record.implementations})


def run(bench: Bench, name: str, heads: int, dtype: torch.dtype, skip_checks: bool) -> None:
    grid, context = PROBLEMS[name]
    bench.problem = name
    query, key, value = make(grid, context, heads, dtype, bench.device)
    layout = PackedLayout(query.shape[1], grid.tokens)
    gib = query.numel() * query.element_size() / 2**30
    video_gib = gib * grid.tokens / layout.tokens
    config = PRESETS["default"]
    tree = config.reblock
    assert tree is not None
    if not skip_checks:
        bench.attempt("checks", lambda: check_whole(bench, (query, key, value), grid, config))

    video = grid.tokens
    bench.time(
        "features of Q and K",
        lambda: reblock_features(query[:, :video], key[:, :video], grid=grid),
        gib=4 * video_gib,
    )
    for label, options in (
        ("reblock plan, Q and K", tree),
        ("reblock plan, Q and K, CUDA graph", replace(tree, cuda_graph=True)),
        ("reblock plan, q_from_k", ReblockConfig(layout_reuse="q_from_k")),
        ("reblock plan, 64 landmarks", ReblockConfig(landmark_count=64)),
    ):
        cache: dict[Any, Any] = {}
        bench.time(label, lambda o=options, c=cache: plan_orders(query, key, grid, o, c))
    orders = plan_orders(query, key, grid, tree, {})
    bench.time("permute one tensor", lambda: permute(query, orders.query), gib=2 * gib)
    moved = torch.empty_like(query)[:, :video]
    rows = query[:, :video]
    bench.time(
        "unpermute one tensor",
        lambda: unpermute(rows, orders.query, out=moved),
        gib=2 * video_gib,
    )

    prefix = query[:, : layout.sparse_tokens]
    bench.time("pool Q and K", lambda: pool(prefix, key, None), gib=2 * gib)
    pooled = pool(prefix, key, None)
    top_k = budget(0.1, layout.candidates)
    scale = 128**-0.5

    def route():
        means = (pooled.query_means, pooled.key_means)
        return plan_top_k(*means, layout, top_k=top_k, scale=scale)

    bench.time("score and select", route)
    plan = route().plan
    one = ((0, layout.sparse_tokens),)
    bench.time("anchor, global", lambda: anchors(pooled.query_means, one, dtype=dtype))
    anchor = anchors(pooled.query_means, one, dtype=dtype)
    for components in ("full", "weights_only", "bias_only", "none"):
        bench.time(
            f"reweight, global anchor, {components}",
            lambda c=components: reweight(anchor, key, value, reweight_components=c),
            gib=2 * gib,
        )
    for parents in (2, 4, 7, 8, 17):
        ranges = tuple((64 * i, 64 * i + 64) for i in range(min(parents, layout.candidates)))
        several = anchors(pooled.query_means, ranges, dtype=dtype)
        bench.time(
            f"reweight, {len(ranges)} anchors",
            lambda a=several: reweight(a, key, value),
            gib=2 * gib,
        )
    bench.time(
        "gather Q with means",
        lambda: gather_means(query, orders.query, blocks=layout.query_blocks, dtype=torch.float32),
        gib=2 * gib,
    )
    bench.time(
        "gather K and V with means and summaries",
        lambda: gather_reweight(anchor, key, value, orders.key),
        gib=4 * gib,
    )
    if bench.device.type == "cuda":
        from solspark.kernels import gather_reweight as gather_kernel
        from solspark.kernels import reweight as kernel

        for warps in (2, 8):
            with mock.patch.object(kernel, "WARPS", warps):
                bench.time(
                    f"reweight, global anchor, {warps} warps",
                    lambda: reweight(anchor, key, value),
                    gib=2 * gib,
                )
        for warps, registers in ((2, 168), (2, 255), (4, 96), (4, 255)):
            patch = {"WARPS": warps, "REGISTERS": registers}
            with mock.patch.multiple(gather_kernel, **patch):
                bench.time(
                    f"gather K and V, {warps} warps, {registers} registers",
                    lambda: gather_reweight(anchor, key, value, orders.key),
                    gib=4 * gib,
                )
    summaries = BlockSummaries(*reweight(anchor, key, value))
    bench.time(
        "attend, sparse prefix",
        lambda: block_sparse_attention(prefix, key, value, plan, summaries=summaries),
    )

    def dense(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    rest = query[:, layout.dense_start :]
    bench.time("dense suffix, torch's choice", lambda: dense(rest, key, value))
    if bench.device.type == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            bench.time("dense suffix, cuDNN", lambda: dense(rest, key, value))
            bench.time("dense, all rows, cuDNN", lambda: dense(query, key, value), repeat=3)
    bench.time("sol_attn, top-k 10 %", lambda: sol_attn(query, key, value, topk_ratio=0.1))
    options = {"video_tokens": video, "grid": grid}
    plain = replace(config, reblock=None, virtual_query_levels_up=None, force_local_blocks=False)
    replayed = replace(config, reblock=replace(tree, cuda_graph=True))
    for label, chosen, overlap in (
        ("packed, Sol top-k 10 %", plain, True),
        ("packed, reweight without reblock", replace(plain, virtual_query_levels_up=99), True),
        ("packed, Spark default", config, True),
        ("packed, Spark default, CUDA graph", replayed, True),
        ("packed, Spark default, dense rows last", config, False),
        ("packed, Spark fast", PRESETS["fast"], True),
        ("packed, Spark quality", PRESETS["quality"], True),
        ("packed, Spark block tail", replace(config, tail_granularity="block"), True),
        ("packed, Spark 20 %", replace(config, topk_ratio=0.2), True),
    ):
        cache = {}
        with mock.patch.object(aside, "OVERLAP", overlap):
            bench.time(
                label,
                lambda c=chosen, kept=cache: packed_attention(
                    query, key, value, config=c, cache=kept, **options
                ),
                repeat=7,
            )
        del cache


def check_short(bench: Bench, dtype: torch.dtype) -> None:
    """Run the gates of the parts, and of the whole, on a short clip."""
    bench.problem = "short"
    grid, context = PROBLEMS["short"]
    query, key, value = make(grid, context, 4, dtype, bench.device)
    layout = PackedLayout(query.shape[1], grid.tokens)
    check(bench, query, key, value, layout)
    check_whole(bench, (query, key, value), grid, PRESETS["default"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", default="both", choices=[*PROBLEMS, "both"])
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--all", action="store_true", help="the trees' checks and plan first")
    parser.add_argument("--json", help="also append the rows here, one JSON object a line")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(device, arguments.json)
    if device.type == "cuda":
        import triton

        names = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        names["triton"] = triton.__version__
        print(names, flush=True)
        bench.write(names)
    problems = (
        ("10s", "5s") if arguments.all or arguments.problem == "both" else (arguments.problem,)
    )
    with torch.no_grad():
        if arguments.all:
            import gpu_reblock

            bench.attempt("trees against the CPU's", lambda: gpu_reblock.check(workers=12))
            for name in problems:
                bench.attempt(
                    f"plan, {name}",
                    lambda name=name: gpu_reblock.time_shape(name, 20, bench.write),
                )
        if device.type == "cuda" and not arguments.skip_checks:
            bench.attempt("parts on a short clip", lambda: check_short(bench, dtype))
        for name in problems:
            bench.attempt(
                f"stages and calls, {name}",
                lambda name=name: run(bench, name, arguments.heads, dtype, arguments.skip_checks),
            )
    sys.exit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
