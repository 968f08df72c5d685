"""The landmark tree on Triton kernels: the tables of a hierarchy, and the order of the launches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from solspark.ops import _triton
from solspark.ops._reblock_eager import initial_order_on, root_order
from solspark.reference.hierarchy import CapacityHierarchy, proxy_topology
from solspark.reference.reblock_options import ReblockOptions
from solspark.reference.tree_numerics import norms_to_inverse
from solspark.types import BLOCK, AttentionCall, TokenGrid

TOGETHER = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Nodes up to one of these sizes are launched together: their routing is padded to it."""

MAX_LANDMARKS = 128
MAX_CHILDREN = 64


def triton_reasons(call: AttentionCall) -> list[str]:
    """Return why the kernels cannot serve these shapes."""
    found = _triton.obstacles(call, dtypes=(torch.float16, torch.bfloat16, torch.float32))
    if call.heads * call.query_tokens >= 2**31:
        found.append(f"{call.heads * call.query_tokens} tokens in all trees exceed 2^31 - 1")
    return found


def option_reasons(options: ReblockOptions) -> list[str]:
    """Return the options that the kernels do not have."""
    found = []
    for name, served in (
        ("aggregation", ("linear",)),
        ("order_mode", ("parent_order",)),
        ("update_rule", ("mean",)),
        ("landmark_count", (32, 64, 128)),
    ):
        value = getattr(options, name)
        if value not in served:
            found.append(f"{name}={value!r} has no kernel")
    groups = options.group_size if isinstance(options.group_size, tuple) else (options.group_size,)
    if set(groups) != {1}:
        found.append(f"group_size={options.group_size!r} has no kernel")
    return found


def run_triton(
    samples: Tensor,
    fitting: Tensor | None,
    excluded: Tensor | None,
    input_inverse_norms: Tensor | None,
    squares: Tensor | None,
    grid: TokenGrid,
    options: ReblockOptions,
) -> Tensor:
    """Return the permutations [R, T], int32, of R trees; arguments as for `run_eager`."""
    from solspark.kernels.reblock import launch_reblock, launch_remainder
    from solspark.kernels.tree_score import launch_tree_norms

    features = _rows(samples if fitting is None else fitting)
    trees, tokens, _ = samples.shape
    count = tokens % BLOCK
    device = samples.device
    if squares is None and (fitting is None or count):
        squares = launch_tree_norms(_rows(samples))
    initial = initial_order_on(grid, options.initial_order, device)
    if count and excluded is not None:
        assert squares is not None
        order = root_order(squares, excluded, grid, options).int()
    else:
        order = initial.int().expand(trees, tokens).contiguous()
        if count:
            assert squares is not None
            launch_remainder(squares, order, *_remainder_tables(tokens, count, device))
    if fitting is not None or squares is None:
        squares = launch_tree_norms(features)
    gain = input_inverse_norms
    if options.mean_mode == "metric_unit":
        gain = norms_to_inverse(squares)
    hierarchy = options.hierarchy(tokens // BLOCK)
    wide = options.distance == "euclidean" or options.score_precision == "fp32"
    launch_reblock(
        features,
        squares,
        None if gain is None else gain.contiguous(),
        order,
        _levels(hierarchy, device),
        landmarks=options.landmark_count,
        means=options.landmark_mode == "mean",
        iterations=options.proxy_iterations,
        endpoints=options.seed_rule == "endpoint_order",
        euclidean=options.distance == "euclidean",
        direction_dtype=torch.float32 if wide else torch.float16,
    )
    return order


def _rows(x: Tensor) -> Tensor:
    """Return [R, T, D] with last stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.lru_cache(maxsize=64)
def _remainder_tables(tokens: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables of the one split that parts the excluded tokens."""
    nodes = torch.tensor([[0, tokens]], dtype=torch.int32)
    splits = torch.tensor([[[0, tokens, count], [0, 0, 0]]], dtype=torch.int32)
    return nodes.to(device), splits.to(device)


def _levels(hierarchy: CapacityHierarchy, device: torch.device) -> Sequence[Sequence]:
    """Return the groups of every level on a device."""
    return _cached_levels(
        hierarchy.leaves,
        hierarchy.fanout,
        hierarchy.root_fanout,
        hierarchy.final_fanout,
        hierarchy.mode,
        device,
    )


@functools.lru_cache(maxsize=32)
def _cached_levels(
    leaves: int,
    fanout: tuple[int, ...],
    root: int,
    final: tuple[int, ...],
    mode: str,
    device: torch.device,
) -> Sequence[Sequence]:
    """Build the tables once; copying them to the device would wait for it."""
    from solspark.kernels.reblock import NodeGroup
    from solspark.reference.hierarchy import _build

    hierarchy = _build(leaves, fanout, root, final, mode)
    levels = []
    for depth in range(len(hierarchy.splits)):
        groups: dict[tuple[int, int], list[tuple[int, int, list[list[int]]]]] = {}
        for batch in hierarchy.node_batches(depth):
            slots = heap_of(batch.budgets)
            size = batch.size * BLOCK
            kind = next((limit for limit in TOGETHER if size <= limit), 0)
            for start in batch.starts:
                groups.setdefault((kind, len(slots)), []).append((start * BLOCK, size, slots))
        built = []
        for (_, width), members in groups.items():
            splits = torch.tensor([slots for _, _, slots in members], dtype=torch.int32)
            sizes = tuple(
                int(splits[:, 2**d - 1 : 2 ** (d + 1) - 1, 1].max())
                for d in range(width.bit_length() - 1)
            )
            nodes = torch.tensor([[start, size] for start, size, _ in members], dtype=torch.int32)
            built.append(NodeGroup(nodes.to(device), splits.to(device), sizes))
        levels.append(built)
    return levels


def heap_of(budgets: Sequence[int]) -> list[list[int]]:
    """Return (offset, size, left capacity) in tokens of every split of a node, as a heap.

    Split s has its children at 2 s + 1 and 2 s + 2; a hole has size 0. The list has a power of two
    entries, the last one unused.
    """
    capacities = [BLOCK * budget for budget in budgets]
    topology = proxy_topology(capacities)
    width = 2 ** (max(node.depth for node in topology) + 1)
    heap = [[0, 0, 0] for _ in range(width)]

    def place(number: int, at: int, offset: int) -> Iterator[tuple[int, int, int]]:
        node = topology[number]
        heap[at] = [offset, node.left_capacity + node.right_capacity, node.left_capacity]
        if node.left_tag >= 0:
            yield node.left_tag, 2 * at + 1, offset
        if node.right_tag >= 0:
            yield node.right_tag, 2 * at + 2, offset + node.left_capacity

    waiting = [(0, 0, 0)]
    while waiting:
        waiting.extend(place(*waiting.pop()))
    return heap
