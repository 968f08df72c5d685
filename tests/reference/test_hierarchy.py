"""Golden values of the capacity hierarchy and of the binary topologies (spec/spark.md 1.5)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solspark.reference.hierarchy import FANOUT_MODES, capacity_hierarchy, proxy_topology

STRICT, ARBITRARY, ARBITRARY_FINAL = FANOUT_MODES


@pytest.mark.parametrize(
    ("leaves", "fanout", "mode", "sizes"),
    [
        (1134, 16, STRICT, (1, 16, 256, 1024, 1134)),
        (1134, 16, ARBITRARY_FINAL, (1, 16, 256, 1134)),
        (1134, 16, ARBITRARY, (1, 5, 75, 1134)),
        (1134, 8, STRICT, (1, 8, 64, 512, 1024, 1134)),
        (1134, 8, ARBITRARY, (1, 3, 18, 144, 1134)),
        (582, 16, STRICT, (1, 16, 256, 512, 582)),
        (582, 16, ARBITRARY, (1, 3, 39, 582)),
        (225, 16, STRICT, (1, 16, 128, 225)),
        (225, 16, ARBITRARY, (1, 15, 225)),
        (1, 8, STRICT, (1,)),
    ],
)
def test_golden_level_sizes(leaves: int, fanout: int, mode: str, sizes: tuple[int, ...]):
    tree = capacity_hierarchy(leaves, max_children=fanout, fanout_mode=mode)
    assert tree.level_sizes == sizes
    assert tree.metadata["level_sizes"] == list(sizes)


@pytest.mark.parametrize(
    ("leaves", "options", "budgets"),
    [
        (1134, {"max_children": 16}, (*(71,) * 7, 70, *(71,) * 7, 70)),
        (1134, {"max_children": 16, "fanout_mode": ARBITRARY}, (*(227,) * 4, 226)),
        (17, {"max_children": 16}, (2, *(1,) * 15)),
        (17, {"max_children": 16, "fanout_mode": ARBITRARY}, (9, 8)),
        (33, {"max_children": 16, "fanout_mode": ARBITRARY}, (11, 11, 11)),
        (65, {"root_fanout": 2, "fanout_mode": ARBITRARY}, (33, 32)),
        (65, {"root_fanout": 16, "fanout_mode": ARBITRARY}, (8, 8, *(7,) * 7)),
        (14, {"final_fanout": 16, "fanout_mode": ARBITRARY}, (1,) * 14),
        (14, {"final_fanout": 16, "fanout_mode": ARBITRARY_FINAL}, (1,) * 14),
        (14, {"final_fanout": 8, "fanout_mode": ARBITRARY}, (7, 7)),
        (3, {"root_fanout": 16}, (2, 1)),
        # A tree of one round is all final: the root fanout has no say.
        (8, {"root_fanout": 2, "fanout_mode": ARBITRARY}, (1,) * 8),
    ],
)
def test_golden_root_budgets(leaves: int, options: dict, budgets: tuple[int, ...]):
    assert capacity_hierarchy(leaves, **options).splits[0] == (budgets,)


def test_a_17_leaf_node_is_finished_by_a_two_way_split():
    tree = capacity_hierarchy(17, max_children=16)
    assert tree.splits[1] == ((1, 1), *((1,),) * 15)
    (batch,) = tree.node_batches(1)
    assert (batch.size, batch.budgets, batch.starts) == (2, (1, 1), (0,))


SCHEDULES = st.one_of(
    st.sampled_from([2, 4, 8, 16, 32, 64]),
    st.lists(st.sampled_from([2, 4, 8, 16, 32]), min_size=1, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(
    leaves=st.integers(1, 1500),
    fanout=SCHEDULES,
    mode=st.sampled_from(FANOUT_MODES),
    root=st.sampled_from([None, 2, 4, 8, 16, 32]),
    final=st.one_of(st.none(), st.integers(2, 32)),
)
def test_levels_refine_one_another_down_to_single_leaves(leaves, fanout, mode, root, final):
    final = None if mode == STRICT else final
    tree = capacity_hierarchy(
        leaves, max_children=fanout, fanout_mode=mode, root_fanout=root, final_fanout=final
    )
    assert tree.levels[0] == ((0, leaves),)
    assert tree.levels[-1] == tuple((i, i + 1) for i in range(leaves))
    widest = max(*tree.fanout, tree.root_fanout, *tree.final_fanout)
    for depth, divided in enumerate(tree.splits):
        parents, children = tree.levels[depth], iter(tree.levels[depth + 1])
        alike: dict[int, tuple[int, ...]] = {}
        for (start, stop), budgets in zip(parents, divided, strict=True):
            assert sum(budgets) == stop - start
            assert (len(budgets) > 1) == (stop - start > 1)
            assert len(budgets) <= widest
            assert alike.setdefault(stop - start, budgets) == budgets
            for budget in budgets:
                assert next(children) == (start, start + budget)
                start += budget
        assert next(children, None) is None
        split = [n for n, budgets in zip(parents, divided, strict=True) if len(budgets) > 1]
        batched = [
            (start, start + batch.size)
            for batch in tree.node_batches(depth)
            for start in batch.starts
        ]
        assert sorted(batched) == split


def test_three_equal_children():
    root, left = proxy_topology([64, 64, 64])
    assert (root.left_capacity, root.right_capacity) == (128, 64)
    assert (root.left_tag, root.right_tag) == (1, -3)
    assert (left.left_tag, left.right_tag, left.slot, left.depth) == (-1, -2, 1, 1)


def test_twelve_children_have_one_two_four_four_splits():
    depths = [node.depth for node in proxy_topology([64] * 12)]
    assert [depths.count(depth) for depth in range(4)] == [1, 2, 4, 4]


@pytest.mark.parametrize("children", [2, 4, 8, 16, 32])
def test_a_power_of_two_is_the_perfect_heap(children: int):
    nodes = proxy_topology(range(1, children + 1))
    assert [node.slot for node in nodes] == list(range(children - 1))
    inner = children // 2 - 1
    for k, node in enumerate(nodes):
        expected = (2 * k + 1, 2 * k + 2)
        if k >= inner:
            expected = (-1 - 2 * (k - inner), -2 - 2 * (k - inner))
        assert (node.left_tag, node.right_tag) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=64))
def test_topologies_deliver_every_capacity(capacities: list[int]):
    nodes = proxy_topology(capacities)
    assert len(nodes) == len(capacities) - 1
    delivered = {0: sum(capacities)}
    slots = {0: 0}
    for number, node in enumerate(nodes):
        assert node.left_capacity + node.right_capacity == delivered[number]
        assert slots[number] == node.slot
        delivered[node.left_tag] = node.left_capacity
        delivered[node.right_tag] = node.right_capacity
        slots[node.left_tag], slots[node.right_tag] = 2 * number + 1, 2 * number + 2
    assert [delivered[-1 - child] for child in range(len(capacities))] == capacities


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_children": 3}, "max_children: expected an int of .* got 3"),
        ({"max_children": True}, "max_children: .* got True"),
        ({"max_children": []}, "max_children: .* got \\[\\]"),
        ({"root_fanout": 5}, "root_fanout: .* got 5"),
        ({"final_fanout": 33, "fanout_mode": ARBITRARY}, "final_fanout: .* got 33"),
        ({"final_fanout": 16}, "final_fanout: power_of_two_fanout has no separate"),
        ({"fanout_mode": "ternary"}, "fanout_mode: expected one of .* got 'ternary'"),
    ],
)
def test_bad_options_name_themselves(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        capacity_hierarchy(10, **options)


def test_strict_mode_accepts_the_ordinary_fanout_as_final():
    plain = capacity_hierarchy(100, max_children=(16, 8))
    assert capacity_hierarchy(100, max_children=(16, 8), final_fanout=(16, 8, 8)).splits == (
        plain.splits
    )
