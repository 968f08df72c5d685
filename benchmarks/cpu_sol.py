"""Time Sol-Attn beside torch's dense attention on this CPU, and measure the memory it takes.

    python benchmarks/cpu_sol.py [--tokens 16384] [--heads 4] [--ratio 0.1] [--threads 2]

Prints the median time of each, their ratio, and the peak above the inputs (the output included).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from solspark import sol_attn
from solspark.testing import PeakMemory, make_qkv


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of a few calls after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    tensors = make_qkv(1, options.tokens, options.heads, options.head_dim)
    heads_first = [item.transpose(1, 2).contiguous() for item in tensors]

    def sparse() -> None:
        sol_attn(*tensors, topk_ratio=options.ratio)

    def dense() -> None:
        torch.nn.functional.scaled_dot_product_attention(*heads_first)

    _, stats = sol_attn(*tensors, topk_ratio=options.ratio, return_stats=True)
    print(
        f"T = {options.tokens}, H = {options.heads}, D = {options.head_dim}, float32, "
        f"{options.threads} threads, torch {torch.__version__}"
    )
    sparse_time = median_seconds(sparse, options.repeats)
    dense_time = median_seconds(dense, options.repeats)
    with PeakMemory() as peak:
        sparse()
    memory = "unknown" if peak.bytes is None else f"{peak.bytes / 2**30:.2f} GiB"
    print(f"sol_attn, ratio {options.ratio}, density {stats.density:.3f}: {sparse_time:.2f} s")
    print(f"dense (scaled_dot_product_attention): {dense_time:.2f} s")
    print(f"{dense_time / sparse_time:.1f} times faster; peak above the inputs {memory}")


if __name__ == "__main__":
    main()
