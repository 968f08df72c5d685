"""Check the landmark tree's kernels on a GPU against the CPU, and time every launch of the plan.

    python benchmarks/gpu_reblock.py [--check-only | --time-only] [--json F] [--workers 12]

Checks, a minute in all: permutations equal to the CPU's (whose equality with the reference the
tests hold) for every option, both types, in `--workers` processes that also compile in parallel;
at the 5 s shape every split equal to the one that the CPU makes of the same node (the tokens that
differ are counted: their scores agree to float32 rounding); replay, repeats and `validate` bit for
bit. Times: medians of CUDA events, the host kept ahead, for Q and K, 56 heads, D = 128, bf16, at
the 10 s (72 x 24 x 42) and 5 s (37 x 24 x 42) shapes: the whole plan and its parts, every launch of
the trees, and the sums by kernel for each variant of the settings that a measurement must decide
(their launches are in the JSON).

Targets on an H200: whole plan 7 ms at 10 s and 4 ms at 5 s, 4 ms with q_from_k at 10 s. Floor by
bytes at 10 s about 2.6 ms: read Q and K, write and read the features, read them once a level.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch

from solspark.kernels import reblock as kernels
from solspark.kernels import second_moments, tree_fit, tree_route, tree_score, tree_spread
from solspark.methods.reblock import PreparedLandmarkTreeV2Permutation, spark_reblock
from solspark.ops import second_moments as moments_ops
from solspark.ops._reblock_eager import _Tree
from solspark.ops.permute import permute, unpermute
from solspark.ops.reblock import ReblockOptions, squared_norms
from solspark.types import BLOCK, TokenGrid

SHAPES = {"10s": TokenGrid(72, 24, 42), "5s": TokenGrid(37, 24, 42)}
HEADS, DIM = 56, 128
OPTIONS = {"max_children": 16}

SMALL: list[tuple[TokenGrid, dict[str, Any]]] = [
    (TokenGrid(1, 8, 16), {}),
    (TokenGrid(3, 10, 11), {}),
    (TokenGrid(4, 10, 17), {"max_children": 16}),
    (TokenGrid(7, 23, 29), {"max_children": 16, "initial_order": "hilbert_thw"}),
    (TokenGrid(7, 23, 29), {"fanout_mode": "arbitrary_fanout", "max_children": 16}),
    (TokenGrid(7, 23, 29), {"landmark_mode": "mean"}),
    (TokenGrid(7, 23, 29), {"landmark_count": 64}),
    (TokenGrid(7, 23, 29), {"landmark_count": 128, "seed_rule": "endpoint_order"}),
    (TokenGrid(7, 23, 29), {"mean_mode": "metric_unit", "proxy_iterations": 4}),
    (TokenGrid(7, 23, 29), {"distance": "euclidean"}),
    (TokenGrid(7, 23, 29), {"score_precision": "fp32"}),
    (TokenGrid(7, 23, 29), {"max_children": 32, "fanout_mode": "power_of_two_arbitrary_final"}),
    # Long nodes: many programs each.
    (TokenGrid(15, 30, 31), {"max_children": 16}),
    (TokenGrid(15, 30, 31), {"max_children": 16, "fanout_mode": "arbitrary_fanout"}),
    (TokenGrid(15, 30, 31), {"distance": "euclidean"}),
    # No kernel: the eager implementation on the device.
    (TokenGrid(7, 23, 29), {"aggregation": "max"}),
    (TokenGrid(7, 23, 29), {"order_mode": "scalar_order", "group_size": (8, 4)}),
    (TokenGrid(7, 23, 29), {"update_rule": "medoid"}),
]

VARIANTS: dict[str, dict[tuple[Any, str], Any]] = {
    "as set": {},
    "fit: 2 warps": {(tree_fit, "WARPS"): {**tree_fit.WARPS, 32: 2}, (tree_fit, "REGISTERS"): {}},
    "fit: 168 registers": {(tree_fit, "REGISTERS"): {32: 168}},
    "fit: level 1 by depths": {(kernels, "SPREAD_BELOW"): 4096},
    "score: no pipeline": {(tree_score, "STAGES"): 1, (tree_score, "REGISTERS"): 80},
    "score: 3 stages": {(tree_score, "STAGES"): 3, (tree_score, "REGISTERS"): 80},
    "score: 4 tiles": {(tree_score, "TILES"): 4},
    "route: 128 registers": {(tree_route, "REGISTERS"): 128},
    "route: level 1 spread": {(kernels, "REGISTER_TOKENS"): 4096},
    "spread: chunks of 1024": {(tree_spread, "CHUNK"): 1024, (tree_spread, "WARPS"): 4},
    "spread: chunks of 4096": {(tree_spread, "CHUNK"): 4096, (tree_spread, "WARPS"): 16},
}
"""Settings to measure against the ones in force. All are exact; those of the fit sum in another
order, so tokens may move whose scores, or landmarks, agree to float32 rounding: that is counted."""


def video_rows(
    grid: TokenGrid, heads: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> torch.Tensor:
    """Return [1, V, heads, D]: smooth fields over the video, an offset, and noise."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    axes = [torch.linspace(0, 1, size, device="cuda") for size in grid.as_tuple()]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)
    waves = (place @ normal(3, 24) * 9 + normal(24)).cos()
    rows = torch.empty(1, grid.tokens, heads, DIM, dtype=dtype, device="cuda")
    for head in range(heads):
        rows[0, :, head] = waves @ normal(24, DIM) * 0.4 + normal(DIM) + normal(grid.tokens, DIM)
    return rows


def check_small(number: int) -> tuple[bool, str]:
    """Compare small trees of one option set, both types, with the CPU; return what to print."""
    torch.set_num_threads(1)
    grid, options = SMALL[number]
    passed, lines = True, []
    for dtype in (torch.bfloat16, torch.float16):
        x = video_rows(grid, 3, dtype)[0].transpose(0, 1)
        got = spark_reblock(x, grid_shape=grid, **options).permutation.cpu()
        expected = spark_reblock(x.cpu(), grid_shape=grid, **options).permutation
        differ = float((got != expected).float().mean())
        again = spark_reblock(x, grid_shape=grid, validate=False, **options).permutation.cpu()
        # Landmarks and scores are compared in float32 here, so a near tie may go the other way.
        ok = differ <= 1e-3 and again.equal(got)
        passed &= ok
        word = ("ok  " if differ == 0 else "near") if ok else "DIFF"
        lines.append(
            f"{word} {grid.as_tuple()} {str(dtype)[6:]} {options}: "
            f"{differ:.2%} of positions differ, repeat equal: {again.equal(got)}"
        )
    return passed, "\n".join(lines)


def check_equal_rows(value: float) -> tuple[bool, str]:
    """Equal rows stay where they are."""
    x = torch.full((2, 9280, DIM), value, dtype=torch.bfloat16, device="cuda")
    result = spark_reblock(x, grid_shape=(10, 29, 32), **OPTIONS)
    same = bool((result.permutation == torch.arange(9280, device="cuda")).all())
    return same, f"{'ok  ' if same else 'DIFF'} all rows {value}: identity"


def check_splits(name: str, trees: int = 1) -> tuple[bool, str]:
    """Let the CPU split every node that the GPU's tree has, and count the tokens that differ.

    With the flat order a node's tokens stand in ascending order, so a final permutation tells all
    nodes of all levels.
    """
    torch.set_num_threads(4)
    grid = SHAPES[name]
    x = video_rows(grid, trees)[0].transpose(0, 1).contiguous()
    options = ReblockOptions(**OPTIONS)
    result = spark_reblock(x, grid_shape=grid, **OPTIONS)
    features = x.cpu()
    tree = _Tree(features, squared_norms(features), None, options)
    order = result.permutation.cpu()[:, : result.active_tokens]
    worst, lines = 0.0, []
    for depth in range(len(result.hierarchy.splits)):
        moved = total = 0
        for batch in result.hierarchy.node_batches(depth):
            size = batch.size * BLOCK
            at = torch.tensor(batch.starts)[:, None] * BLOCK + torch.arange(size)
            nodes = order[:, at]
            again = tree._split(nodes.sort(-1).values, batch, 1)
            child = torch.repeat_interleave(torch.tensor(batch.budgets) * BLOCK)
            child = child.expand_as(nodes)
            # The child of every token, in the order of the tokens' ids.
            ours, theirs = (child.gather(-1, part.argsort(-1)) for part in (nodes, again))
            moved += int((ours != theirs).sum())
            total += nodes.numel()
        worst = max(worst, moved / max(total, 1))
        lines.append(f"     level {depth}: {moved} of {total} tokens split differently")
    ok = worst < 1e-3
    lines.append(f"{'ok  ' if ok else 'DIFF'} splits at {grid.as_tuple()}: {worst:.1e}")
    return ok, "\n".join(lines)


def check(workers: int) -> bool:
    """Run all checks in processes of their own, print as they end, and say whether all passed."""
    begin = time.perf_counter()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        # The longest first.
        jobs = [pool.submit(check_splits, "5s")]
        jobs += [pool.submit(check_small, number) for number in reversed(range(len(SMALL)))]
        jobs += [pool.submit(check_equal_rows, value) for value in (0.0, 1.0)]
        passed = True
        for job in jobs:
            ok, text = job.result()
            passed &= ok
            print(text, flush=True)
    print(f"{'ALL PASSED' if passed else 'FAILED'} in {time.perf_counter() - begin:.0f} s")
    return passed


def ahead() -> None:
    """Keep the device busy for 2 ms: the host gets ahead, and its time is not in the figure."""
    torch.cuda._sleep(4_000_000)


def median_ms(function: Callable[[], object], iterations: int) -> float:
    """Return the median time of a call in ms."""
    for _ in range(2):
        function()
    times = []
    for _ in range(iterations):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ahead()
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


LAUNCHES = [
    (tree_fit, "fit_kernel"),
    (tree_fit, "landmark_means_kernel"),
    (tree_score, "score_kernel"),
    (tree_route, "route_kernel"),
    (kernels, "finish_kernel"),
    *((tree_spread, f"{part}_kernel") for part in ("count", "find", "collect", "cut", "leave")),
    *((tree_spread, f"{part}_kernel") for part in ("offsets", "move", "keep")),
]
"""Every kernel of the trees."""


class _Timed:
    """A kernel whose launches note their times."""

    def __init__(self, kernel: Any, name: str, rows: list[tuple[str, tuple[int, ...], Any, Any]]):
        self.kernel, self.name, self.rows = kernel, name, rows

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            ahead()
            start.record()
            self.kernel[grid](*args, **kwargs)
            stop.record()
            self.rows.append((self.name, grid, start, stop))

        return launch


@contextmanager
def timed_launches(rows: list[tuple[str, tuple[int, ...], Any, Any]]) -> Iterator[None]:
    """Note every launch of the trees: kernel, grid, and the events around it."""
    with ExitStack() as stack:
        for module, name in LAUNCHES:
            own = _Timed(getattr(module, name), name.removesuffix("_kernel"), rows)
            stack.enter_context(mock.patch.object(module, name, own))
        yield


def launch_times(run: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Return the median ms of every launch of a run, under its number, kernel and grid."""
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        rows: list[tuple[str, tuple[int, ...], Any, Any]] = []
        with timed_launches(rows):
            run()
        torch.cuda.synchronize()
        for number, (name, grid, start, stop) in enumerate(rows):
            label = f"{number:02d} {name} {'x'.join(map(str, grid))}"
            samples.setdefault(label, []).append(start.elapsed_time(stop))
    return {label: statistics.median(times) for label, times in samples.items()}


@contextmanager
def settings(changes: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Set module attributes for a while."""
    with ExitStack() as stack:
        for (module, name), value in changes.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class PlanBench:
    """Q and K of one shape, and the prepared plan of one side or both."""

    def __init__(self, grid: TokenGrid):
        self.grid = grid
        self.query, self.key = (video_rows(grid, HEADS, seed=seed) for seed in (0, 1))

    def plan(self, sides: int, **options: Any) -> PreparedLandmarkTreeV2Permutation:
        """Return a fresh plan whose features and norms are written."""
        plan = PreparedLandmarkTreeV2Permutation(
            sides * HEADS,
            self.grid.tokens,
            DIM,
            self.grid,
            "cuda",
            return_inverse=False,
            compact_indices=True,
            static_outputs=True,
            **{**OPTIONS, **options},
        )
        self.features(plan)
        return plan

    def features(self, plan: PreparedLandmarkTreeV2Permutation) -> None:
        """Write the features and norms that the plan reads."""
        sides = plan.shape[0] // HEADS
        shape = (sides, 1, HEADS, self.grid.tokens)
        moments_ops.reblock_features(
            self.query,
            self.key,
            grid=self.grid,
            layout_reuse="independent" if sides == 2 else "q_from_k",
            out=plan.acquire_graph_input(torch.bfloat16).view(*shape, DIM),
            squares=plan.graph_squares.view(shape),
        )

    def trees(self, plan: PreparedLandmarkTreeV2Permutation, graph: bool = True) -> torch.Tensor:
        """Grow the trees of what the plan holds."""
        assert plan.graph_input is not None
        result = plan.run(plan.graph_input, squares=plan.graph_squares, allow_cuda_graph=graph)
        return result.permutation

    def whole(self, plan: PreparedLandmarkTreeV2Permutation) -> torch.Tensor:
        """Moments, factors, features and trees."""
        self.features(plan)
        return self.trees(plan)


def time_shape(name: str, iterations: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Print the figures of one shape, and write them as rows."""

    def row(stage: str, ms: float, **more: Any) -> None:
        write({"problem": name, "stage": stage, "ms": round(ms, 4), **more})
        print(f"  {stage:<48} {ms:8.3f} ms {more or ''}", flush=True)

    bench = PlanBench(SHAPES[name])
    grid, key = bench.grid, bench.key
    print(f"\n{name}: {grid.as_tuple()}, V = {grid.tokens}, H = {HEADS}", flush=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = bench.plan(2)
    eager = bench.trees(plan, graph=False).clone()
    for _ in range(2):
        replayed = bench.trees(plan)
    assert plan.graph_active, plan.capture_error
    same = eager.equal(replayed) and eager.equal(bench.whole(plan))
    row(
        "plan of Q and K",
        median_ms(lambda: bench.whole(plan), iterations),
        replay_equals_eager=same,
    )
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    row(
        "trees, replayed", median_ms(lambda: bench.trees(plan), iterations), peak_gib=round(peak, 2)
    )
    row("trees, eager launches", median_ms(lambda: bench.trees(plan, graph=False), iterations))
    moments = moments_ops.second_moments(bench.query, grid=grid)
    both = torch.cat([moments, moments])
    samples = plan.graph_input
    assert samples is not None
    out = samples.view(2, 1, HEADS, grid.tokens, DIM)[0]
    squares = plan.graph_squares.view(2, 1, HEADS, grid.tokens)[0]
    factor = moments_ops.metric_factor(moments)

    def two_stages() -> None:
        # Three programs an SM with one tile ahead, for two programs with two.
        with mock.patch.object(second_moments, "STAGES", 2):
            moments_ops.features(key, factor, out=out, squares=squares)

    for label, call in (
        ("moments, one side", lambda: moments_ops.second_moments(key, grid=grid)),
        ("cholesky, both sides", lambda: moments_ops.metric_factor(both)),
        (
            "features and norms, one side",
            lambda: moments_ops.features(key, factor, out=out, squares=squares),
        ),
        ("features and norms, one side, 2 stages", two_stages),
        ("features alone, one side", lambda: moments_ops.features(key, factor, out=out)),
        ("norms alone, both sides", lambda: squared_norms(samples)),
    ):
        row(label, median_ms(call, iterations))
    permutation = eager[:HEADS].view(1, HEADS, grid.tokens)
    row("permute one tensor", median_ms(lambda: permute(key, permutation), iterations))
    moved = torch.empty_like(key)
    row("unpermute into", median_ms(lambda: unpermute(key, permutation, out=moved), iterations))
    for label, sides, options in (
        ("plan with q_from_k", 1, {}),
        ("plan, 64 landmarks", 2, {"landmark_count": 64}),
    ):
        other = bench.plan(sides, **options)
        row(label, median_ms(lambda p=other: bench.whole(p), iterations))
        assert other.graph_active, other.capture_error
        del other

    for variant, changes in VARIANTS.items():
        with settings(changes):
            own = bench.plan(2)
            moved = float((bench.trees(own, graph=False) != eager).float().mean())
            launches = launch_times(lambda p=own: bench.trees(p, graph=False))
            for _ in range(2):
                bench.trees(own)
            total = median_ms(lambda p=own: bench.trees(p), iterations)
        del own
        more = {"variant": variant, "moved": moved, "launches": launches}
        write({"problem": name, "stage": "trees", "ms": round(total, 4), **more})
        kinds: Counter[str] = Counter()
        for label, ms in launches.items():
            kinds[label.split()[1]] += ms
        parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.most_common())
        print(f"  {variant:<24} trees {total:7.3f} ms, {moved:.1e} moved; {parts}", flush=True)
        if not changes:
            for label, ms in launches.items():
                print(f"    {label:<36} {ms:8.4f}")


def main() -> None:
    """Check and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--time-only", action="store_true")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--workers", type=int, default=12, help="processes that check")
    parser.add_argument("--json", help="also append the figures here, one JSON object a line")
    arguments = parser.parse_args()
    import triton

    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    passed = arguments.time_only or check(arguments.workers)
    if not arguments.check_only:
        with open(arguments.json or os.devnull, "a", encoding="utf-8") as file:
            for name in SHAPES:
                time_shape(
                    name,
                    arguments.iterations,
                    lambda row: print(json.dumps(row), file=file, flush=True),
                )
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
