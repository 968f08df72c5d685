"""Virtual queries: levels, partitions and their golden numbers."""

from __future__ import annotations

import pytest

from solspark.plan.virtual_queries import (
    VirtualQueries,
    check_virtual_queries,
    choose_level,
    choose_virtual_queries,
)
from solspark.reference.hierarchy import capacity_hierarchy


def halve(nodes, rounds):
    """Split every node of more than one leaf `rounds` times, the larger half first."""
    for _ in range(rounds):
        nodes = [
            part
            for start, stop in nodes
            for part in (
                [(start, (start + stop + 1) // 2), ((start + stop + 1) // 2, stop)]
                if stop - start > 1
                else [(start, stop)]
            )
        ]
    return nodes


def tree(leaves, max_children=16):
    return capacity_hierarchy(leaves, max_children=max_children).levels


@pytest.mark.parametrize(
    ("levels_up", "level", "count"),
    [(0, 4, 1134), (1, 3, 1024), (2, 2, 256), (3, 1, 16), (4, 0, 1), (99, 0, 1)],
)
def test_levels_up_counts_from_the_leaves(levels_up, level, count):
    levels = tree(1134)
    assert choose_level(levels, levels_up=levels_up) == level
    queries = choose_virtual_queries(73_584, levels, levels_up=levels_up)
    context = -(-73_584 // 64) - 1134
    assert len(queries.ranges) == count + context
    assert queries.parents_within(1134) == count
    assert queries.level == level


def test_ten_second_shape_has_seventeen_parents():
    queries = choose_virtual_queries(73_584, tree(1134), levels_up=99)
    assert len(queries.ranges) == 17
    assert queries.ranges[0] == (0, 72_576)
    assert queries.ranges[-1] == (72_576 + 15 * 64, 73_584)
    assert queries.parents[:1134] == (0,) * 1134 and queries.parents[-1] == 16
    assert queries.metadata == {
        "virtual_queries": 17,
        "level": 0,
        "min_blocks": 1,
        "max_blocks": 1134,
    }


def test_five_second_shape_gives_the_remainder_its_own_range():
    queries = choose_virtual_queries(37_296 + 926, tree(582), levels_up=99)
    assert queries.ranges[:2] == ((0, 37_248), (37_248, 37_312))
    assert queries.parents_within(582) == 1 and queries.parents_within(583) == 2


def test_target_picks_the_nearest_feasible_level():
    levels = [[(0, 1134)], halve([(0, 1134)], 2), halve([(0, 1134)], 3), halve([(0, 1134)], 4)]
    # 4 nodes of 284 or 283 blocks, 8 of 142 or 141, 16 of 71 or 70.
    assert choose_level(levels, target_blocks=189, min_blocks=94, max_blocks=284) == 2
    assert choose_level(levels, target_blocks=270, min_blocks=94, max_blocks=284) == 1
    # Level 1 is nearer but leaves [94, 283], and feasibility counts first.
    assert choose_level(levels, target_blocks=270, min_blocks=94, max_blocks=283) == 2
    # Nothing is feasible: the distance decides.
    assert choose_level(levels, target_blocks=80, min_blocks=80, max_blocks=80) == 3


def test_target_counts_nodes_before_it_takes_the_lower_level():
    same = [[(0, 4), (4, 8)], [(0, 4), (4, 8)]]
    assert choose_level(same, target_blocks=4, min_blocks=1, max_blocks=8) == 0


@pytest.mark.parametrize("given", [{}, {"levels_up": 1, "target_blocks": 4}])
def test_exactly_one_rule(given):
    with pytest.raises(ValueError, match="exactly one of levels_up and target_blocks"):
        choose_level(tree(16), **given)


@pytest.mark.parametrize("tokens", [64, 65, 127, 128, 129, 1000])
def test_every_layout_is_a_partition(tokens):
    for video in range(1, tokens // 64 + 1):
        for levels_up in (0, 1, 99):
            queries = choose_virtual_queries(tokens, tree(video), levels_up=levels_up)
            covered = [token for start, stop in queries.ranges for token in range(start, stop)]
            assert covered == list(range(tokens))


@pytest.mark.parametrize(
    ("ranges", "parents", "message"),
    [
        (((0, 64), (128, 200)), (0, 0, 1, 1), r"ranges\[1\].*starts at 64"),
        (((0, 64), (64, 64), (64, 200)), (0, 2, 2, 2), r"ranges\[1\].*non-empty"),
        (((0, 100), (100, 200)), (0, 0, 1, 1), r"ranges\[0\].*multiple of 64"),
        (((0, 128),), (0, 0, 0, 0), "expected to end at 200"),
        (((0, 200),), (0, 0, 0), "expected 4 blocks, got 3"),
        (((0, 200),), (0, 0, 0, 1), r"parents\[3\].*below 1"),
        (((0, 64), (64, 200)), (0, 0, 1, 1), r"parents\[1\].*holds tokens 64..127"),
    ],
)
def test_malformed_layouts_are_refused(ranges, parents, message):
    with pytest.raises(ValueError, match=message):
        check_virtual_queries(200, ranges, parents)
    with pytest.raises(ValueError, match=message):
        VirtualQueries(200, ranges, parents)


def test_a_well_formed_layout_is_accepted():
    VirtualQueries(200, ((0, 64), (64, 200)), (0, 1, 1, 1))
