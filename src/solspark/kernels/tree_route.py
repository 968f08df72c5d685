"""Send the tokens of landmark-tree nodes down one binary split each, capacities met exactly.

    the `capacity` tokens with the smallest (score, token id) go left, the others right, and both
    sides keep the order they had: a stable partition of the node's stretch of `order`, in place

One program = one (tree, node, split of this depth), whose segment fits into registers; longer ones
are for `tree_spread`. Scores are read once, 4 bytes a token from a row of S. Two pivots at a time
are guessed from the scores' range, as if they were even between its ends, and the keys up to them
counted, until FEW keys are left (three to five rounds), which are ranked directly.

Keys are float32 bits mapped so that integers sort like the values: -0.0 is +0.0, NaN is last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(0x7FFFFFFF)

FEW = tl.constexpr(32)
ASIDE = tl.constexpr(10.0)
"""Ranks between a pivot and the guess: on smooth scores 2.3 rounds for 128 keys, 4.1 for 4,544."""


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
def value_of(key):
    """Return the float32 value of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def narrow(key, live, size, rank):
    """Close in on the rank-th smallest of the live keys, of which there are size, at most 32,767.

    Returns (low, below, high, upto): it lies in (low, high], `below` keys are at most low and
    `upto` at most high; FEW or fewer lie between, or all of those are equal to high.
    """
    low = tl.min(tl.where(live, key, LARGEST), axis=0) - 1
    high = tl.max(tl.where(live, key, -2147483648), axis=0)
    below = tl.zeros([], dtype=tl.int32)
    upto = below + size
    step = tl.zeros([], dtype=tl.int32)
    was = 2 * upto
    while (upto - below > FEW) & (low + 1 < high):
        if (upto - below) * 20 > was * 19:
            # The round before cut off hardly any: leave out stretches without keys, and ties end.
            low = tl.min(tl.where(live & (key > low), key, LARGEST), axis=0) - 1
            high = tl.max(tl.where(live & (key <= high), key, -2147483648), axis=0)
        was = upto - below
        # Where the rank would be, and a little to both sides of it; at times the middle of the
        # keys, which ends the search whatever the scores are.
        step += 1
        start = value_of(low + 1)
        each = (value_of(high) - start) / (upto - below)
        guess = rank - below - 0.5
        first = ordered_key(start + each * (guess - ASIDE))
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        first = tl.where(step % 4 == 0, middle, first)
        second = ordered_key(start + each * (guess + ASIDE))
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, low + 1), high - 1)
        both = (live & (key <= first)).to(tl.int32) + ((live & (key <= second)).to(tl.int32) << 16)
        both = tl.sum(both, axis=0)
        count = both & 0xFFFF
        reached = count >= rank
        high = tl.where(reached, first, high)
        upto = tl.where(reached, count, upto)
        low = tl.where(reached, low, first)
        below = tl.where(reached, below, count)
        count = both >> 16
        closer = (count >= rank) & (second < high)
        high = tl.where(closer, second, high)
        upto = tl.where(closer, count, upto)
        closer = (count < rank) & (second > low)
        low = tl.where(closer, second, low)
        below = tl.where(closer, count, below)
    return low, below, high, upto


@triton.jit
def rank_few(few_ptr, key, token, inside, count, rank):
    """Return the rank-th smallest (key, token) of the `count` that are inside, FEW at most."""
    ones = inside.to(tl.int32)
    place = few_ptr + tl.cumsum(ones, axis=0) - ones
    tl.store(place, key, mask=inside)
    tl.store(place + FEW, token, mask=inside)
    tl.debug_barrier()
    j = tl.arange(0, FEW)
    k = tl.load(few_ptr + j, mask=j < count, other=0)
    t = tl.load(few_ptr + FEW + j, mask=j < count, other=0)
    ahead = (k[:, None] < k[None, :]) | ((k[:, None] == k[None, :]) & (t[:, None] < t[None, :]))
    before = tl.sum((ahead & (j < count)[:, None]).to(tl.int32), axis=0)
    chosen = (before == rank - 1) & (j < count)
    return tl.sum(tl.where(chosen, k, 0), axis=0), tl.sum(tl.where(chosen, t, 0), axis=0)


@triton.jit
def route_segment(
    segment_ptr, score_ptr, few_ptr, size, capacity, slot, width, BLOCK: tl.constexpr
):
    """Split one segment of at most BLOCK tokens in place; score_ptr stands at the tree."""
    i = tl.arange(0, BLOCK)
    live = i < size
    token = tl.load(segment_ptr + i, mask=live, other=0)
    score = tl.load(score_ptr + token.to(tl.int64) * width + slot, mask=live, other=0.0)
    key = ordered_key(score)
    low, below, high, upto = narrow(key, live, size, capacity)
    inside = live & (key > low) & (key <= high)
    cut = high
    last = high
    if upto - below <= FEW:
        cut, last = rank_few(few_ptr, key, token, inside, upto - below, capacity - below)
    else:
        last, _, _ = select_bits(token, inside, capacity - below)
    left = live & ((key < cut) | ((key == cut) & (token <= last)))
    ones = left.to(tl.int32)
    rank = tl.cumsum(ones, axis=0) - ones
    place = tl.where(left, rank, capacity + i - rank)
    # Everybody has read before anybody writes.
    tl.debug_barrier()
    tl.store(segment_ptr + place, token, mask=live)


@triton.jit(do_not_specialize=["nodes", "slots", "width", "tokens", "first"])
def route_kernel(
    order_ptr, score_ptr, node_ptr, split_ptr, few_ptr,
    nodes, slots, width, tokens, first, sor: tl.int64, BLOCK: tl.constexpr,
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
        few = few_ptr + (pid * tl.num_programs(1) + tl.program_id(1)) * (2 * FEW)
        route_segment(segment, scores, few, size, tl.load(split + 2), slot, width, BLOCK)


REGISTER_TOKENS = 8192
"""Longest segment that one program selects in registers: 8 keys a thread with 32 warps."""

REGISTERS = 64
"""Bound on the registers of a thread: 32 warps an SM at every length, without a spill."""


def register_config(tokens: int) -> tuple[int, int]:
    """Return (BLOCK, warps) for a segment: 8 keys a thread, 16 where a program has less threads."""
    block = max(64, triton.next_power_of_2(tokens))
    most = 32 if torch.version.hip is None else 16
    return block, min(most, max(1, block // 256))


def launch_tree_route(
    order: Tensor, scores: Tensor, nodes: Tensor, splits: Tensor, sizes: tuple[int, ...]
) -> None:
    """Enqueue one partition a depth for a group of nodes; `order` is changed in place.

    order: int32 [R, T]. scores: float32 [R, T, S]. nodes: int32 [N, 2]. splits: int32
    [N, slots, 3]. sizes: the longest segment of each depth, in tokens, REGISTER_TOKENS at most.
    """
    trees, tokens = order.shape
    count, slots = splits.shape[:2]
    bound = {"maxnreg": REGISTERS} if torch.version.hip is None else {}
    few = order.new_empty(trees * count * 2 ** (len(sizes) - 1), 2 * FEW.value)
    for depth, size in enumerate(sizes):
        block, warps = register_config(size)
        route_kernel[(trees * count, 2**depth)](
            order, scores, nodes, splits, few,
            count, slots, scores.shape[2], tokens, 2**depth - 1, order.stride(0),
            BLOCK=block, num_warps=warps, **bound,
        )
