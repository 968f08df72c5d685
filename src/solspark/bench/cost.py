"""Counts the work of an attention call, and the time that no implementation can beat."""

from __future__ import annotations

from dataclasses import dataclass

from solspark.bench.problems import Problem
from solspark.types import BLOCK


@dataclass(frozen=True)
class Ceilings:
    """Hold what a device does at best, measured on that device.

    Args:
        tflops: matrix product rate for the precision, TFLOP/s.
        tbytes: device copy, TB/s, bytes read plus bytes written.
    """

    tflops: float
    tbytes: float


H200_BF16 = Ceilings(tflops=791.0, tbytes=4.27)
"""bf16 matrix product and copy, measured 2026-11-30 in the run of the peers' table."""


@dataclass(frozen=True)
class Cost:
    """Count floating-point operations and the fewest bytes through device memory."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Return the larger of arithmetic time and memory time, in milliseconds."""
        return max(self.flops / ceilings.tflops / 1e9, self.bytes / ceilings.tbytes / 1e9)


def attend_cost(problem: Problem, density: float, *, tail: str = "query", parents: int = 1) -> Cost:
    """Count the attention stage: exact pairs plus summary keys, both in multiply-adds of two
    products.

    FLOP = 4 B H T^2 D density + 4 B H T N D (tail per query; over 64 for a tail per block; 0
    without one).
    Bytes: Q, K, V read once, the output written once, the summaries read once.

    Args:
        problem: shape.
        density: share of (query block, key block) pairs that are exact.
        tail: "query", "block", or "none".
        parents: P, anchors with their own summaries.
    """
    rows = problem.batch * problem.heads * problem.tokens
    exact = problem.dense_flops() * density
    summary_keys = {"query": problem.blocks, "block": problem.blocks / BLOCK, "none": 0.0}[tail]
    flops = exact + 4.0 * rows * summary_keys * problem.head_dim
    traffic = 4.0 * rows * problem.head_dim * 2
    if tail != "none":
        traffic += 4.0 * problem.batch * problem.heads * parents * problem.blocks * problem.head_dim
    return Cost(flops, traffic)


def plan_cost(problem: Problem) -> Cost:
    """Count pooling and routing: Q, K, V read once; one N x N x D product a head; scores written
    and read once.
    """
    rows = problem.batch * problem.heads * problem.tokens
    pairs = problem.batch * problem.heads * problem.blocks**2
    return Cost(2.0 * pairs * problem.head_dim, 3.0 * rows * problem.head_dim * 2 + 8.0 * pairs)


def reblock_cost(problem: Problem, *, sides: int = 2, levels: int = 4) -> Cost:
    """Count the landmark trees: projection (read and write) and one read of the features a level, a
    side.

    FLOP: the projection and about 8 directions a level; bytes decide.
    """
    rows = problem.batch * problem.heads * problem.video_tokens * sides
    flops = 2.0 * rows * problem.head_dim**2 + 2.0 * rows * problem.head_dim * 8 * levels
    return Cost(flops, rows * problem.head_dim * 2.0 * (2 + levels))


def reweight_cost(problem: Problem, *, parents: int = 1) -> Cost:
    """Count reweighted summaries: K and V read once; a score and two weighted sums a token and
    anchor.
    """
    rows = problem.batch * problem.heads * problem.tokens
    return Cost(6.0 * rows * parents * problem.head_dim, 2.0 * rows * problem.head_dim * 2)
