"""Virtual queries: which range of blocks shares one anchor, read off the levels of a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solspark.types import BLOCK, block_count

Level = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class VirtualQueries:
    """Partition all tokens into ranges on block boundaries, one anchor a range.

    Args:
        tokens: T.
        ranges: P token ranges (start, stop) in ascending order; together they are [0, T).
        parents: for every block of 64 tokens the index of the range that holds it.
        level: level of the tree that the video ranges come from; None when they come from no tree.

    Raises:
        ValueError: when the ranges are no such partition, or a block and its parent disagree.

    Source: spec/spark.md section 3.1.
    """

    tokens: int
    ranges: tuple[tuple[int, int], ...]
    parents: tuple[int, ...]
    level: int | None = None

    def __post_init__(self) -> None:
        check_virtual_queries(self.tokens, self.ranges, self.parents)

    @property
    def metadata(self) -> dict[str, int | None]:
        """Return what a report says about the layout."""
        sizes = [block_count(stop - start) for start, stop in self.ranges]
        return {
            "virtual_queries": len(self.ranges),
            "level": self.level,
            "min_blocks": min(sizes),
            "max_blocks": max(sizes),
        }

    def parents_within(self, blocks: int) -> int:
        """Return how many ranges the first `blocks` blocks touch."""
        return self.parents[blocks - 1] + 1 if blocks else 0


def check_virtual_queries(
    tokens: int, ranges: Sequence[tuple[int, int]], parents: Sequence[int]
) -> None:
    """Raise ValueError unless `ranges` partition the tokens on block boundaries under `parents`."""
    expected = 0
    for number, (start, stop) in enumerate(ranges):
        if start != expected or stop <= start:
            raise ValueError(
                f"ranges[{number}]: expected a non-empty range that starts at {expected}, "
                f"got ({start}, {stop})"
            )
        if stop % BLOCK and stop != tokens:
            raise ValueError(
                f"ranges[{number}]: expected a stop on a multiple of {BLOCK} or at {tokens}, "
                f"got {stop}"
            )
        expected = stop
    if expected != tokens:
        raise ValueError(f"ranges: expected to end at {tokens} tokens, got {expected}")
    if len(parents) != block_count(tokens):
        raise ValueError(f"parents: expected {block_count(tokens)} blocks, got {len(parents)}")
    for block, parent in enumerate(parents):
        if not 0 <= parent < len(ranges):
            raise ValueError(
                f"parents[{block}]: expected an index below {len(ranges)}, got {parent}"
            )
        start, stop = ranges[parent]
        if not (start <= block * BLOCK and min(block * BLOCK + BLOCK, tokens) <= stop):
            raise ValueError(
                f"parents[{block}]: expected the range that holds tokens {block * BLOCK}.."
                f"{min(block * BLOCK + BLOCK, tokens) - 1}, got ({start}, {stop})"
            )


def choose_level(
    levels: Sequence[Level],
    *,
    levels_up: int | None = None,
    target_blocks: int | None = None,
    min_blocks: int = 94,
    max_blocks: int = 284,
) -> int:
    """Pick the level of a tree whose nodes become the virtual queries.

    `levels_up` counts from the leaves and stops at the root. `target_blocks` minimises, in this
    order: whether a node leaves [min_blocks, max_blocks]; sum of size log2(size / target)^2 over
    the leaves; |nodes - leaves / target|; the level's index.

    Args:
        levels: nodes of every level as (start, stop) leaf ranges, the root first.
        levels_up: levels above the leaves.
        target_blocks: wanted blocks a node.
        min_blocks: smallest feasible node.
        max_blocks: largest feasible node.

    Raises:
        ValueError: unless exactly one of levels_up and target_blocks is given.

    Source: spec/spark.md section 3.1.
    """
    if (levels_up is None) == (target_blocks is None):
        raise ValueError(
            f"levels_up: expected exactly one of levels_up and target_blocks, got {levels_up!r} "
            f"and {target_blocks!r}"
        )
    last = len(levels) - 1
    if levels_up is not None:
        return max(0, last - levels_up)
    assert target_blocks is not None
    leaves = levels[0][-1][1]

    def rank(number: int) -> tuple[bool, float, float, int]:
        sizes = [stop - start for start, stop in levels[number]]
        infeasible = min(sizes) < min_blocks or max(sizes) > max_blocks
        spread = sum(size * math.log2(size / target_blocks) ** 2 for size in sizes) / leaves
        return (infeasible, spread, abs(len(sizes) - leaves / target_blocks), number)

    return min(range(len(levels)), key=rank)


def choose_virtual_queries(
    tokens: int,
    levels: Sequence[Level],
    *,
    levels_up: int | None = None,
    target_blocks: int | None = None,
    min_blocks: int = 94,
    max_blocks: int = 284,
) -> VirtualQueries:
    """Give every node of the chosen level one virtual query, and every later block its own.

    Args:
        tokens: T, video and context.
        levels: nodes of every level of the tree over the complete video blocks.
        levels_up, target_blocks, min_blocks, max_blocks: see `choose_level`.

    Source: spec/spark.md section 3.1.
    """
    level = choose_level(
        levels,
        levels_up=levels_up,
        target_blocks=target_blocks,
        min_blocks=min_blocks,
        max_blocks=max_blocks,
    )
    ranges: list[tuple[int, int]] = []
    parents: list[int] = []
    for start, stop in levels[level]:
        parents.extend([len(ranges)] * (stop - start))
        ranges.append((start * BLOCK, stop * BLOCK))
    for block in range(len(parents), block_count(tokens)):
        parents.append(len(ranges))
        ranges.append((block * BLOCK, min(block * BLOCK + BLOCK, tokens)))
    return VirtualQueries(tokens, tuple(ranges), tuple(parents), level)
