"""Send the tokens of landmark-tree nodes down one binary split each, capacities met exactly.

    the `capacity` tokens with the smallest (score, token id) go left, the others right, and both
    sides keep the order they had: a stable partition of the node's stretch of `order`, in place

One program = one (tree, node, split of this depth), whose segment fits into registers; longer ones
are for `tree_spread`. Scores are read once, 4 bytes a token from a row of S, and the cut is
selected by the bits of the keys, two a step.

Keys are float32 bits mapped so that integers sort like the values: -0.0 is +0.0, NaN is last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered_key(value):
    """Return int32 keys that sort like float32 values."""
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, LARGEST, key)


@triton.jit
def pick_digit(packed, rank):
    """Return the digit 0..3 that the rank-th smallest falls on, the rank inside it, and its count.

    packed holds how many have digit 0, 1, 2 and 3, sixteen bits each.
    """
    c0 = (packed & 0xFFFF).to(tl.int32)
    c1 = ((packed >> 16) & 0xFFFF).to(tl.int32)
    c2 = ((packed >> 32) & 0xFFFF).to(tl.int32)
    c3 = ((packed >> 48) & 0xFFFF).to(tl.int32)
    digit = (rank > c0).to(tl.int32) + (rank > c0 + c1).to(tl.int32)
    digit += (rank > c0 + c1 + c2).to(tl.int32)
    below = tl.where(digit > 0, c0, 0) + tl.where(digit > 1, c1, 0) + tl.where(digit > 2, c2, 0)
    count = tl.where(digit == 0, c0, tl.where(digit == 1, c1, tl.where(digit == 2, c2, c3)))
    return digit, rank - below, count


@triton.jit
def select_bits(key, live, rank):
    """Return the rank-th smallest int32 key among the live ones, its rank among equals, and theirs.

    Two bits a step, until one key is left or all bits are used. At most 16,384 keys, so that four
    counts fit into one int64.
    """
    u = (key ^ -2147483648).to(tl.uint32, bitcast=True)
    shift = tl.full([], 30, dtype=tl.uint32)
    count = tl.full([], 16384, dtype=tl.int32)
    step = tl.zeros([], dtype=tl.int32)
    while (step < 16) & (count > 1):
        digit = (u >> shift) & 3
        ones = tl.full([], 1, tl.int64) << (digit * 16).to(tl.int64)
        packed = tl.sum(tl.where(live, ones, 0), axis=0)
        chosen, rank, count = pick_digit(packed, rank)
        live = live & (digit == chosen.to(tl.uint32))
        shift -= 2
        step += 1
    cut = tl.max(tl.where(live, key, -2147483648), axis=0)
    return cut, rank, count


@triton.jit
def select_pair(key, token, live, rank):
    """Return the rank-th smallest (key, token) among the live ones."""
    cut, rest, equal = select_bits(key, live, rank)
    last = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
    if rest < equal:
        last, _, _ = select_bits(token, live & (key == cut), rest)
    return cut, last


@triton.jit
def route_segment(segment_ptr, score_ptr, size, capacity, slot, width, BLOCK: tl.constexpr):
    """Split one segment of at most BLOCK tokens in place; score_ptr stands at the tree."""
    i = tl.arange(0, BLOCK)
    live = i < size
    token = tl.load(segment_ptr + i, mask=live, other=0)
    score = tl.load(score_ptr + token.to(tl.int64) * width + slot, mask=live, other=0.0)
    key = ordered_key(score)
    cut, last = select_pair(key, token, live, capacity)
    left = live & ((key < cut) | ((key == cut) & (token <= last)))
    ones = left.to(tl.int32)
    rank = tl.cumsum(ones, axis=0) - ones
    place = tl.where(left, rank, capacity + i - rank)
    # Everybody has read before anybody writes.
    tl.debug_barrier()
    tl.store(segment_ptr + place, token, mask=live)


@triton.jit(do_not_specialize=["nodes", "slots", "width", "tokens", "first"])
def route_kernel(
    order_ptr, score_ptr, node_ptr, split_ptr, nodes, slots, width, tokens, first, sor: tl.int64,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    tree = pid // nodes
    node = pid % nodes
    slot = first + tl.program_id(1)
    start = tl.load(node_ptr + node * 2)
    split = split_ptr + (node * slots + slot) * 3
    size = tl.load(split + 1)
    if size > 0:
        segment = order_ptr + tree * sor + start + tl.load(split)
        scores = score_ptr + tree * tokens * width
        route_segment(segment, scores, size, tl.load(split + 2), slot, width, BLOCK)


REGISTER_TOKENS = 8192
"""Longest segment that one program selects in registers: 16 keys a thread with 16 warps."""


def register_config(tokens: int) -> tuple[int, int]:
    """Return (BLOCK, warps) for a segment: 4 to 16 keys a thread."""
    block = max(64, triton.next_power_of_2(tokens))
    return block, min(16, max(1, block // 256))


def launch_tree_route(
    order: Tensor, scores: Tensor, nodes: Tensor, splits: Tensor, sizes: tuple[int, ...]
) -> None:
    """Enqueue one partition a depth for a group of nodes; `order` is changed in place.

    order: int32 [R, T]. scores: float32 [R, T, S]. nodes: int32 [N, 2]. splits: int32
    [N, slots, 3]. sizes: the longest segment of each depth, in tokens, REGISTER_TOKENS at most.
    """
    trees, tokens = order.shape
    count, slots = splits.shape[:2]
    for depth, size in enumerate(sizes):
        block, warps = register_config(size)
        route_kernel[(trees * count, 2**depth)](
            order, scores, nodes, splits,
            count, slots, scores.shape[2], tokens, 2**depth - 1, order.stride(0),
            BLOCK=block, num_warps=warps,
        )
