"""The capacities of a landmark tree: plain integers, decided before any feature is looked at."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FANOUT_MODES = ("power_of_two_fanout", "arbitrary_fanout", "power_of_two_arbitrary_final")
FANOUTS = (2, 4, 8, 16, 32, 64)
ROOT_FANOUTS = (2, 4, 8, 16, 32)
DEFAULT_MAX_CHILDREN = 8
"""Fanout of the standalone reblock; the H3 installer's preset is 16."""

Schedule = tuple[int, ...]


@dataclass(frozen=True)
class NodeBatch:
    """Nodes of one level that have the same size and are split in the same way.

    Args:
        size: leaves of each node.
        budgets: leaves of each child, in order; they sum to `size`.
        starts: first leaf of each node, ascending.
    """

    size: int
    budgets: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class CapacityHierarchy:
    """Say how many leaves every node of a landmark tree holds.

    Args:
        leaves: L, blocks of 64 tokens at the bottom.
        levels: level 0 is ((0, L),); each level lists its nodes as half-open leaf ranges, left to
            right.
        splits: for every round, for every node of the level above, the leaves of its children; (1,)
            for a finished node that is carried on.
        fanout: ordinary children a node, one value a depth, the last one repeating.
        root_fanout: children of the root in the power-of-two rounds.
        final_fanout: children of a last split, one value a depth, the last one repeating.
        mode: one of `FANOUT_MODES`.

    Source: spec/spark.md section 1.5.
    """

    leaves: int
    levels: tuple[tuple[tuple[int, int], ...], ...]
    splits: tuple[tuple[tuple[int, ...], ...], ...]
    fanout: Schedule
    root_fanout: int
    final_fanout: Schedule
    mode: str

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of every level."""
        return tuple(len(level) for level in self.levels)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what a report says about the tree."""
        return {
            "leaves": self.leaves,
            "level_sizes": list(self.level_sizes),
            "rounds": len(self.splits),
            "fanout": list(self.fanout),
            "root_fanout": self.root_fanout,
            "final_fanout": list(self.final_fanout),
            "fanout_mode": self.mode,
        }

    def node_batches(self, depth: int) -> tuple[NodeBatch, ...]:
        """Return the nodes that round `depth` splits, equal ones together."""
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for (start, stop), budgets in zip(self.levels[depth], self.splits[depth], strict=True):
            if len(budgets) > 1:
                groups.setdefault((stop - start, budgets), []).append(start)
        return tuple(
            NodeBatch(size, budgets, tuple(starts)) for (size, budgets), starts in groups.items()
        )


@dataclass(frozen=True)
class ProxyNode:
    """One binary split inside the division of a node among its children.

    Args:
        slot: index of the landmark weights it fits: 0 at the root; the children of proxy node k
            have the slots 2k + 1 and 2k + 2.
        left_capacity: tokens that go left.
        right_capacity: tokens that go right.
        left_tag: the proxy node on the left, or -1 - child if that side is one finished child.
        right_tag: likewise on the right.
        depth: proxy nodes above it.
    """

    slot: int
    left_capacity: int
    right_capacity: int
    left_tag: int
    right_tag: int
    depth: int


def as_schedule(name: str, value: Any, allowed: Sequence[int]) -> Schedule:
    """Return an int or a non-empty list or tuple of ints as a tuple, each one of `allowed`."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not values or any(type(item) is not int or item not in allowed for item in values):
        raise ValueError(
            f"{name}: expected an int of {list(allowed)} or a non-empty list of them, got {value!r}"
        )
    return values


def capacity_hierarchy(
    leaves: int,
    *,
    max_children: int | Sequence[int] = DEFAULT_MAX_CHILDREN,
    fanout_mode: str = "power_of_two_fanout",
    root_fanout: int | None = None,
    final_fanout: int | Sequence[int] | None = None,
) -> CapacityHierarchy:
    """Divide `leaves` leaves level by level until every node is one leaf.

        power_of_two_fanout:  n = the largest power of two <= min(size, limit(depth)) children, by
                              halving log2(n) times into (ceil, floor)
        power_of_two_arbitrary_final:  size children if size <= final(depth), else as above
        arbitrary_fanout:  size children if size <= final(depth); else the fewest rounds that can
                           finish decide the children's capacity S, and n = max(2, ceil(size / S))
                           nearly equal children, larger ones first

    Args:
        leaves: L >= 1.
        max_children: limit(depth), an int of `FANOUTS` or one for each depth, the last one
            repeating.
        fanout_mode: one of `FANOUT_MODES`.
        root_fanout: limit(0); None takes the first of `max_children`.
        final_fanout: final(depth), 2..32 or one for each depth; None inherits `max_children`. The
            strict power-of-two mode has no separate final fanout.

    Raises:
        ValueError: an option is not as described.

    Source: spec/spark.md section 1.5.
    """
    if type(leaves) is not int or leaves < 1:
        raise ValueError(f"leaves: expected an int >= 1, got {leaves!r}")
    fanout, root, final = resolve_fanouts(max_children, fanout_mode, root_fanout, final_fanout)
    return _build(leaves, fanout, root, final, fanout_mode)


def resolve_fanouts(
    max_children: int | Sequence[int],
    fanout_mode: str,
    root_fanout: int | None,
    final_fanout: int | Sequence[int] | None,
) -> tuple[Schedule, int, Schedule]:
    """Return the ordinary fanouts, the root's and the final ones; raise as `capacity_hierarchy`."""
    if fanout_mode not in FANOUT_MODES:
        raise ValueError(
            f"fanout_mode: expected one of {', '.join(FANOUT_MODES)}; got {fanout_mode!r}"
        )
    fanout = as_schedule("max_children", max_children, FANOUTS)
    if root_fanout is None:
        root = fanout[0]
    else:
        (root,) = as_schedule("root_fanout", root_fanout, ROOT_FANOUTS)
    final = fanout
    if final_fanout is not None:
        final = as_schedule("final_fanout", final_fanout, sorted({*range(2, 33), *fanout}))
    if fanout_mode == "power_of_two_fanout" and _shortest(final) != _shortest(fanout):
        raise ValueError(
            "final_fanout: power_of_two_fanout has no separate final fanout, expected None or "
            f"{list(fanout)}, got {final_fanout!r}"
        )
    return fanout, root, final


@functools.lru_cache(maxsize=64)
def _build(
    leaves: int, fanout: Schedule, root: int, final: Schedule, mode: str
) -> CapacityHierarchy:
    """Build the levels; the arguments are checked."""
    levels = [((0, leaves),)]
    splits = []
    while any(stop - start > 1 for start, stop in levels[-1]):
        depth = len(splits)
        divided = tuple(
            _divide(stop - start, depth, fanout, root, final, mode) if stop - start > 1 else (1,)
            for start, stop in levels[-1]
        )
        nodes = []
        for (start, _), budgets in zip(levels[-1], divided, strict=True):
            for budget in budgets:
                nodes.append((start, start + budget))
                start += budget
        levels.append(tuple(nodes))
        splits.append(divided)
    return CapacityHierarchy(leaves, tuple(levels), tuple(splits), fanout, root, final, mode)


def _shortest(schedule: Schedule) -> Schedule:
    """Drop the repetitions of the last value: a schedule repeats it anyway."""
    while len(schedule) > 1 and schedule[-1] == schedule[-2]:
        schedule = schedule[:-1]
    return schedule


def _at(schedule: Schedule, depth: int) -> int:
    """Return the value of a schedule at a depth, the last one repeating."""
    return schedule[min(depth, len(schedule) - 1)]


def _divide(
    size: int, depth: int, fanout: Schedule, root: int, final: Schedule, mode: str
) -> tuple[int, ...]:
    """Return the leaves of each child of a node of `size` > 1 leaves."""

    def limit(at: int) -> int:
        return root if at == 0 else _at(fanout, at)

    if mode != "power_of_two_fanout" and size <= _at(final, depth):
        return (1,) * size
    if mode != "arbitrary_fanout":
        budgets = (size,)
        while 2 * len(budgets) <= min(size, limit(depth)):
            budgets = tuple(half for item in budgets for half in (-(-item // 2), item // 2))
        return budgets
    rounds = 1
    while (
        _at(final, depth + rounds - 1)
        * math.prod(limit(at) for at in range(depth, depth + rounds - 1))
        < size
    ):
        rounds += 1
    capacity = _at(final, depth + rounds - 1) * math.prod(
        limit(at) for at in range(depth + 1, depth + rounds - 1)
    )
    children = max(2, -(-size // capacity))
    return tuple(
        size // children + (1 if child < size % children else 0) for child in range(children)
    )


def proxy_topology(capacities: Sequence[int]) -> tuple[ProxyNode, ...]:
    """Return the binary splits that divide a node among its children, breadth first.

    The interval [a, b) of children splits at a + ceil((b - a) / 2); a side with one child is
    finished. For a power of two the result is the perfect heap.

    Args:
        capacities: tokens of each child, in order, at least two children.

    Source: spec/spark.md section 1.6 (b).
    """
    if len(capacities) < 2:
        raise ValueError(f"capacities: expected at least two children, got {tuple(capacities)}")
    nodes: list[ProxyNode] = []
    queue = [(0, len(capacities), 0, 0)]
    while len(nodes) < len(queue):
        first, last, slot, depth = queue[len(nodes)]
        middle = first + -(-(last - first) // 2)
        tags = []
        for side, (low, high) in enumerate(((first, middle), (middle, last))):
            if high - low == 1:
                tags.append(-1 - low)
            else:
                tags.append(len(queue))
                queue.append((low, high, 2 * len(nodes) + 1 + side, depth + 1))
        nodes.append(
            ProxyNode(
                slot,
                sum(capacities[first:middle]),
                sum(capacities[middle:last]),
                tags[0],
                tags[1],
                depth,
            )
        )
    return tuple(nodes)
