"""Time the landmark tree on the CPU and check it against the reference at a small size.

    python benchmarks/cpu_reblock.py [--tokens 18000] [--heads 2] [--threads 2]

The target is under 20 s for 2 heads of 18,000 tokens on two cores.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from solspark.ops.reblock import reblock
from solspark.reference import reblock as reference
from solspark.types import TokenGrid

GRIDS = {18_000: (20, 30, 30), 37_296: (37, 24, 42), 72_576: (72, 24, 42)}


def samples(heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Return features of smooth random fields plus noise, as video has them."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(heads, tokens, dim, generator=generator).cumsum(1)
    walk = walk / walk.std(dim=1, keepdim=True)
    return walk + torch.randn(heads, tokens, dim, generator=generator)


def main() -> None:
    """Check, time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=18_000, choices=sorted(GRIDS))
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--fanout", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    small = samples(2, 1100, 128)
    grid = TokenGrid(10, 10, 11)
    agrees = reblock(small, grid_shape=grid).permutation.equal(
        reference.reblock(small, grid=grid).permutation
    )
    print(f"equal to the reference at T = 1100: {agrees}")
    if not agrees:
        raise SystemExit(1)

    options = reference.ReblockOptions(max_children=arguments.fanout)
    x = samples(arguments.heads, arguments.tokens, 128)
    start = time.perf_counter()
    result = reblock(x, grid_shape=GRIDS[arguments.tokens], options=options)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"spark_reblock T = {arguments.tokens}, D = 128, H = {arguments.heads}, "
        f"fanout {arguments.fanout}, levels {result.hierarchy.level_sizes}: {seconds:.2f} s, "
        f"{arguments.threads} threads, peak {peak:.2f} GiB"
    )


if __name__ == "__main__":
    main()
