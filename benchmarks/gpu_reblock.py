"""Check the landmark tree's kernels on a GPU against the CPU, and time every stage.

    python benchmarks/gpu_reblock.py [--check-only | --time-only] [--iterations 20]

Checks: permutations equal to the reference at small shapes; at the 5 s shape every split equal to
the one that the CPU makes of the same node (the tokens that differ are counted: their scores agree
to float32 rounding); replay, repeats and `validate` bit for bit. Times: medians of CUDA events for
Q and K, 56 heads, D = 128, bf16, at the 10 s (72 x 24 x 42) and 5 s (37 x 24 x 42) shapes.

Targets on an H200: whole plan 7 ms at 10 s and 4 ms at 5 s, 4 ms with q_from_k at 10 s. Floor by
bytes at 10 s about 2.6 ms: read Q and K, write and read the features, read them once a level.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from solspark.kernels import reblock as kernels
from solspark.methods.reblock import (
    PreparedLandmarkTreeV2Permutation,
    recursive_landmark_tree_v2_reference,
    spark_reblock,
)
from solspark.ops import second_moments as moments_ops
from solspark.ops._reblock_eager import _Tree
from solspark.ops.permute import permute, unpermute
from solspark.ops.reblock import ReblockOptions, squared_norms
from solspark.types import BLOCK, TokenGrid

SHAPES = {"10 s": TokenGrid(72, 24, 42), "5 s": TokenGrid(37, 24, 42)}
HEADS, DIM = 56, 128
OPTIONS = {"max_children": 16}

SMALL = [
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
    (TokenGrid(15, 30, 31), {"max_children": 16}),
    # No kernel: the eager implementation on the device.
    (TokenGrid(7, 23, 29), {"aggregation": "max"}),
    (TokenGrid(7, 23, 29), {"order_mode": "scalar_order", "group_size": (8, 4)}),
    (TokenGrid(7, 23, 29), {"update_rule": "medoid"}),
]


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


def check_small() -> bool:
    """Compare small trees with the reference; print one line each."""
    passed = True
    for grid, options in SMALL:
        for dtype in (torch.bfloat16, torch.float16):
            x = video_rows(grid, 3, dtype)[0].transpose(0, 1)
            got = spark_reblock(x, grid_shape=grid, **options).permutation.cpu()
            expected = recursive_landmark_tree_v2_reference(x.cpu(), grid_shape=grid, **options)
            differ = float((got != expected.permutation).float().mean())
            again = spark_reblock(x, grid_shape=grid, validate=False, **options).permutation.cpu()
            ok = differ == 0 and again.equal(got)
            passed &= ok
            print(
                f"{'ok  ' if ok else 'DIFF'} {grid.as_tuple()} {str(dtype)[6:]} {options}: "
                f"{differ:.2%} of positions differ, repeat equal: {again.equal(got)}",
                flush=True,
            )
    for value in (0.0, 1.0):
        x = torch.full((2, 9280, DIM), value, dtype=torch.bfloat16, device="cuda")
        result = spark_reblock(x, grid_shape=(10, 29, 32), **OPTIONS)
        same = bool((result.permutation == torch.arange(9280, device="cuda")).all())
        passed &= same
        print(f"{'ok  ' if same else 'DIFF'} all rows {value}: identity", flush=True)
    return passed


def check_splits(grid: TokenGrid, trees: int = 2) -> bool:
    """Let the CPU split every node that the GPU's tree has, and count the tokens that differ.

    With the flat order a node's tokens stand in ascending order, so a final permutation tells all
    nodes of all levels.
    """
    x = video_rows(grid, trees)[0].transpose(0, 1).contiguous()
    options = ReblockOptions(**OPTIONS)
    result = spark_reblock(x, grid_shape=grid, **OPTIONS)
    features = x.cpu()
    tree = _Tree(features, squared_norms(features), None, options)
    order = result.permutation.cpu()[:, : result.active_tokens]
    worst = 0.0
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
        share = moved / max(total, 1)
        worst = max(worst, share)
        print(f"     level {depth}: {moved} of {total} tokens split differently", flush=True)
    ok = worst < 1e-3
    print(f"{'ok  ' if ok else 'DIFF'} splits at {grid.as_tuple()}, {trees} trees: {worst:.1e}")
    return ok


def median_ms(function: Callable[[], object], iterations: int) -> float:
    """Return the median time of a call in ms."""
    for _ in range(3):
        function()
    times = []
    for _ in range(iterations):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


@contextmanager
def stage_times(rows: dict[str, float]) -> Iterator[None]:
    """Time every launch of the tree, synchronised, into `rows`."""
    names = ["launch_tree_fit", "launch_tree_score", "launch_tree_route", "launch_landmark_means"]
    kept = {name: getattr(kernels, name) for name in names}
    count: dict[str, int] = defaultdict(int)

    def timed(name: str) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            result = kept[name](*args, **kwargs)
            stop.record()
            stop.synchronize()
            rows[f"{count[name]}. {name.removeprefix('launch_')}"] = start.elapsed_time(stop)
            count[name] += 1
            return result

        return run

    try:
        for name in names:
            setattr(kernels, name, timed(name))
        yield
    finally:
        for name in names:
            setattr(kernels, name, kept[name])


def time_shape(name: str, grid: TokenGrid, iterations: int) -> None:
    """Print the stages of one shape."""
    query, key = (video_rows(grid, HEADS, seed=seed) for seed in (0, 1))
    tokens = grid.tokens
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def plan_of(sides: int) -> tuple[PreparedLandmarkTreeV2Permutation, Callable[[], object]]:
        plan = PreparedLandmarkTreeV2Permutation(
            sides * HEADS,
            tokens,
            DIM,
            grid,
            "cuda",
            return_inverse=False,
            compact_indices=True,
            **OPTIONS,
        )
        out = plan.acquire_graph_input(torch.bfloat16).view(sides, 1, HEADS, tokens, DIM)
        squares = plan.graph_squares.view(sides, 1, HEADS, tokens)
        layout = "independent" if sides == 2 else "q_from_k"

        def run() -> object:
            moments_ops.reblock_features(
                query, key, grid=grid, layout_reuse=layout, out=out, squares=squares
            )
            assert plan.graph_input is not None
            return plan.run(plan.graph_input, squares=plan.graph_squares)

        return plan, run

    plan, run = plan_of(2)
    samples = plan.graph_input
    assert samples is not None
    run()
    first = plan.run(samples, squares=plan.graph_squares)
    assert plan.graph_active, plan.capture_error
    eager = plan.run(samples, squares=plan.graph_squares, allow_cuda_graph=False)
    same = first.permutation.equal(eager.permutation)
    rows: dict[str, float] = {}
    moments = moments_ops.second_moments(query, grid=grid)
    factor = moments_ops.metric_factor(moments)
    out = samples.view(2, 1, HEADS, tokens, DIM)
    squares = plan.graph_squares.view(2, 1, HEADS, tokens)
    rows["moments, one side"] = median_ms(
        lambda: moments_ops.second_moments(query, grid=grid), iterations
    )
    rows["cholesky, one side"] = median_ms(lambda: moments_ops.metric_factor(moments), iterations)
    rows["cholesky of torch, one side"] = median_ms(
        lambda: moments_ops.metric_factor(moments, impl="eager"), iterations
    )
    rows["features and norms, one side"] = median_ms(
        lambda: moments_ops.features(key, factor, out=out[0], squares=squares[0]), iterations
    )
    rows["norms alone, both sides"] = median_ms(lambda: squared_norms(samples), iterations)
    moments_ops.reblock_features(query, key, grid=grid, out=out, squares=squares)
    rows["trees, eager launches"] = median_ms(
        lambda: plan.run(samples, squares=plan.graph_squares, allow_cuda_graph=False), iterations
    )
    rows["trees, replayed"] = median_ms(
        lambda: plan.run(samples, squares=plan.graph_squares), iterations
    )
    rows["WHOLE PLAN (moments, features, trees)"] = median_ms(run, iterations)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    stages: dict[str, float] = {}
    with stage_times(stages):
        plan.run(samples, squares=plan.graph_squares, allow_cuda_graph=False)
    single, run_single = plan_of(1)
    run_single()
    rows["WHOLE PLAN with q_from_k"] = median_ms(run_single, iterations)
    assert single.graph_active, single.capture_error
    permutation = first.permutation[:HEADS].view(1, HEADS, tokens)
    rows["permute one tensor"] = median_ms(lambda: permute(key, permutation), iterations)
    rows["unpermute one tensor"] = median_ms(lambda: unpermute(key, permutation), iterations)
    print(
        f"\n{name}: {grid.as_tuple()}, V = {tokens}, H = {HEADS}; replay equals eager: {same}; "
        f"peak above the inputs {peak:.2f} GiB"
    )
    for label, value in rows.items():
        print(f"  {label:<42} {value:8.3f} ms")
    for label, value in stages.items():
        print(f"    {label:<40} {value:8.3f} ms")


def main() -> None:
    """Check and time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--time-only", action="store_true")
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    passed = True
    if not arguments.time_only:
        passed = check_small() and check_splits(SHAPES["5 s"])
    if not arguments.check_only:
        for name, grid in SHAPES.items():
            time_shape(name, grid, arguments.iterations)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
