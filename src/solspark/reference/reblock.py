"""The landmark tree: group video tokens with alike features into blocks of exactly 64.

Written token by token and node by node, to be read beside spec/spark.md section 1. What is
computed:

    node -> K landmarks -> a binary topology over its m children -> a direction d for every split
    score s = x / |x| . d;  the `capacity` lowest (s, token id) go left, the others right

and the children keep the order that their tokens had in the parent.

`tree_split` divides one node, `tree_numerics` says how every implementation rounds and breaks ties,
`reblock_options` what can be asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from solspark.reference.hierarchy import CapacityHierarchy
from solspark.reference.initial_order import initial_order
from solspark.reference.reblock_options import ReblockOptions, ReblockResult, as_result
from solspark.reference.tree_numerics import inverse_norms, order_key, squared_norms
from solspark.reference.tree_split import split_node
from solspark.types import BLOCK, TokenGrid


def choose_remainder(samples: Tensor, order: Sequence[int], count: int) -> set[int]:
    """Return the `count` tokens of samples [T, D] with the largest norm; ties go to the lower id.

    Source: spec/spark.md section 1.3.
    """
    norms = squared_norms(samples).tolist()

    def rank(token: int) -> tuple[int, float, int]:
        kind, value = order_key(norms[token])
        return (-kind, -value, token)

    return set(sorted(order, key=rank)[:count])


def grow_tree(
    order: Sequence[int],
    features: Tensor,
    scale: Tensor | None,
    hierarchy: CapacityHierarchy,
    options: ReblockOptions,
    split: Callable[..., list[list[list[int]]]] = split_node,
) -> list[int]:
    """Split level by level; return the token ids in the order of the leaves.

    Args:
        order: token ids that enter the root, in initial order; 64 a leaf.
        features, scale, options: see `split_node`.
        hierarchy: how many leaves every node holds.
        split: replaced by a test that wants to look at every node.

    Source: spec/spark.md section 1.6.
    """
    nodes = [list(order)]
    for depth, divided in enumerate(hierarchy.splits):
        group = options.group_at(depth)
        below: list[list[int]] = []
        for tokens, budgets in zip(nodes, divided, strict=True):
            if len(budgets) == 1:
                below.append(tokens)
                continue
            if len(tokens) % group:
                raise RuntimeError(
                    f"group_size: {group} does not divide a node of {len(tokens)} tokens"
                )
            atoms = [tokens[i : i + group] for i in range(0, len(tokens), group)]
            capacities = [BLOCK * budget for budget in budgets]
            for child in split(atoms, features, scale, capacities, options, group):
                below.append([token for atom in child for token in atom])
        nodes = below
    return [token for node in nodes for token in node]


def reblock(
    samples: Tensor,
    *,
    grid: TokenGrid,
    options: ReblockOptions | None = None,
    fitting_samples: Tensor | None = None,
    excluded_indices: Tensor | None = None,
    input_inverse_norms: Tensor | None = None,
) -> ReblockResult:
    """Group the tokens of every leading index into blocks of 64 by a landmark tree.

    Args:
        samples: [..., T, D], any floating type; T = grid.tokens >= 64. Leading indices are
            independent problems.
        grid: frames, height, width.
        options: of the tree; None takes the defaults.
        fitting_samples: shape and dtype of `samples`; all tree decisions read it, the choice of the
            remainder keeps reading `samples`.
        excluded_indices: int [..., T % 64], replaces the choice of the remainder.
        input_inverse_norms: float32 [..., T], for mean_mode "input_unit": 1 / |row| of the original
            tokens.

    Returns:
        ReblockResult with int64 indices.

    Numerics: `tree_numerics`.

    Source: spec/spark.md section 1.
    """
    options = options or ReblockOptions()
    tokens, dim = samples.shape[-2:]
    leading = samples.shape[:-2]
    hierarchy = options.hierarchy(tokens // BLOCK)
    order = initial_order(grid, options.initial_order).tolist()
    fitting = samples if fitting_samples is None else fitting_samples
    rows = []
    for index in range(math.prod(leading)):
        own = samples.reshape(-1, tokens, dim)[index]
        features = fitting.reshape(-1, tokens, dim)[index]
        if excluded_indices is None:
            excluded = choose_remainder(own, order, tokens % BLOCK)
        else:
            excluded = set(excluded_indices.reshape(-1, tokens % BLOCK)[index].tolist())
        scale = None
        if options.mean_mode == "metric_unit":
            scale = inverse_norms(features)
        elif options.mean_mode == "input_unit":
            if input_inverse_norms is None:
                raise ValueError("input_inverse_norms: mean_mode 'input_unit' needs it, got None")
            scale = input_inverse_norms.reshape(-1, tokens)[index]
        active = [token for token in order if token not in excluded]
        tail = [token for token in order if token in excluded]
        rows.append(grow_tree(active, features, scale, hierarchy, options) + tail)
    permutation = torch.tensor(rows, dtype=torch.int64).reshape(*leading, tokens)
    return as_result(permutation, permutation.argsort(-1), options)
