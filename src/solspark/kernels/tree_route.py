"""Send the tokens of landmark-tree nodes down one binary split each, capacities met exactly.

    the `capacity` tokens with the smallest (score, token id) go left, the others right, and both
    sides keep the order they had: a stable partition of the node's stretch of `order`, in place

One program = one (tree, node, split of this depth). Scores are read once, 4 bytes a token from a
row of S. A segment that fits into registers is selected by its keys' bits, two a step. A longer one
is streamed: a histogram of 2,048 buckets finds the bucket of the last token on the left, the few
tokens inside it are collected and selected in registers, and a last pass moves everybody. Should
the bucket hold more than CANDIDATES tokens (many equal scores), their bits are counted in passes
over the stream: slow, and just as exact.

Keys are float32 bits mapped so that integers sort like the values: -0.0 is +0.0, NaN is last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BUCKETS = tl.constexpr(2048)
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


@triton.jit
def bucket_of(key, low, high, LINEAR: tl.constexpr):
    """Return the bucket of a key, never decreasing in it.

    LINEAR divides the scores of [-2, 2] evenly; otherwise the keys of [low, high] are.
    """
    if LINEAR:
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        score = bits.to(tl.float32, bitcast=True)
        index = (tl.minimum(tl.maximum(score, -2.0), 2.0) + 2.0) * 512.0
        bucket = tl.minimum(index.to(tl.int32), BUCKETS - 1)
        return tl.where(key == LARGEST, BUCKETS - 1, bucket)
    else:
        span = tl.maximum(high.to(tl.int64) - low.to(tl.int64), 1)
        return ((key.to(tl.int64) - low) * (BUCKETS - 1) // span).to(tl.int32)


@triton.jit
def count_stream(
    key_ptr, token_ptr, size, low, high, bucket, cut, prefix, shift,
    LINEAR: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Count, over the stream, the next digit of those in the bucket whose higher bits are prefix.

    TOKENS counts token bits among the keys equal to `cut` instead of key bits.
    """
    i = tl.arange(0, CHUNK)
    c0 = tl.zeros([CHUNK], dtype=tl.int32)
    c1 = tl.zeros([CHUNK], dtype=tl.int32)
    c2 = tl.zeros([CHUNK], dtype=tl.int32)
    c3 = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, size, CHUNK):
        live = start + i < size
        key = tl.load(key_ptr + start + i, mask=live, other=0)
        live = live & (bucket_of(key, low, high, LINEAR) == bucket)
        value = key
        if TOKENS:
            live = live & (key == cut)
            value = tl.load(token_ptr + start + i, mask=live, other=0)
        u = (value ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
        digit = (u >> shift) & 3
        same = live & ((u >> (shift + 2)) == prefix)
        c0 += (same & (digit == 0)).to(tl.int32)
        c1 += (same & (digit == 1)).to(tl.int32)
        c2 += (same & (digit == 2)).to(tl.int32)
        c3 += (same & (digit == 3)).to(tl.int32)
    return tl.sum(c0, axis=0), tl.sum(c1, axis=0), tl.sum(c2, axis=0), tl.sum(c3, axis=0)


@triton.jit
def select_stream(
    key_ptr, token_ptr, size, low, high, bucket, cut, rank,
    LINEAR: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Return the rank-th smallest key or token in the bucket, its rank among equals, and theirs."""
    prefix = tl.zeros([], dtype=tl.int64)
    count = tl.zeros([], dtype=tl.int32)
    for step in range(16):
        c0, c1, c2, c3 = count_stream(
            key_ptr, token_ptr, size, low, high, bucket, cut, prefix, 30 - 2 * step,
            LINEAR, TOKENS, CHUNK,
        )
        digit = (rank > c0).to(tl.int32) + (rank > c0 + c1).to(tl.int32)
        digit += (rank > c0 + c1 + c2).to(tl.int32)
        below = tl.where(digit > 0, c0, 0) + tl.where(digit > 1, c1, 0) + tl.where(digit > 2, c2, 0)
        count = tl.where(digit == 0, c0, tl.where(digit == 1, c1, tl.where(digit == 2, c2, c3)))
        rank = rank - below
        prefix = prefix * 4 + digit
    return (prefix - 2147483648).to(tl.int32), rank, count


@triton.jit(do_not_specialize=["nodes", "slots", "width", "tokens", "first"])
def route_stream_kernel(
    order_ptr, score_ptr, node_ptr, split_ptr, key_ptr, moved_ptr, histogram_ptr, candidate_ptr,
    nodes, slots, width, tokens, first, sor: tl.int64,
    CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, LINEAR: tl.constexpr, REMAINDER: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    tree = pid // nodes
    node = pid % nodes
    slot = first + tl.program_id(1)
    program = pid * tl.num_programs(1) + tl.program_id(1)
    histogram = histogram_ptr + program * BUCKETS
    candidates = candidate_ptr + program * 2 * CANDIDATES
    start = tl.load(node_ptr + node * 2)
    split = split_ptr + (node * slots + slot) * 3
    size = tl.load(split + 1)
    capacity = tl.load(split + 2)
    if size > 0:
        begin = tree * sor + start + tl.load(split)
        order = order_ptr + begin
        keys = key_ptr + begin
        moved = moved_ptr + begin
        scores = score_ptr + tree * tokens * width
        i = tl.arange(0, CHUNK)
        bins = tl.arange(0, BUCKETS)

        # Pass 1: keys, from one score a token; with the remainder, largest norms first.
        tl.store(histogram + bins, tl.zeros([BUCKETS], dtype=tl.int32))
        lows = tl.full([CHUNK], 0x7FFFFFFF, dtype=tl.int32)
        highs = tl.full([CHUNK], -2147483648, dtype=tl.int32)
        tl.debug_barrier()
        for base in range(0, size, CHUNK):
            live = base + i < size
            token = tl.load(order + base + i, mask=live, other=0).to(tl.int64)
            score = tl.load(scores + token * width + slot, mask=live, other=0.0)
            key = ordered_key(score)
            if REMAINDER:
                key = -1 - key
            tl.store(keys + base + i, key, mask=live)
            if LINEAR:
                bucket = bucket_of(key, 0, 0, LINEAR)
                tl.atomic_add(histogram + bucket, 1, mask=live, sem="relaxed", scope="cta")
            else:
                lows = tl.minimum(lows, tl.where(live, key, 0x7FFFFFFF))
                highs = tl.maximum(highs, tl.where(live, key, -2147483648))
        tl.debug_barrier()
        low = tl.min(lows, axis=0)
        high = tl.max(highs, axis=0)
        if not LINEAR:
            for base in range(0, size, CHUNK):
                live = base + i < size
                key = tl.load(keys + base + i, mask=live, other=0)
                key = tl.where(live, key, low)
                bucket = bucket_of(key, low, high, LINEAR)
                tl.atomic_add(histogram + bucket, 1, mask=live, sem="relaxed", scope="cta")
            tl.debug_barrier()

        # The bucket in which the last token on the left lies, and how many of it go left.
        counts = tl.load(histogram + bins)
        below = tl.cumsum(counts, axis=0) < capacity
        bucket = tl.sum(below.to(tl.int32), axis=0)
        rank = capacity - tl.sum(tl.where(below, counts, 0), axis=0)
        inside = tl.sum(tl.where(bins == bucket, counts, 0), axis=0)

        # Pass 2: the (key, token) of that last token.
        cut = tl.zeros([], dtype=tl.int32)
        last = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
        if inside <= CANDIDATES:
            filled = tl.zeros([], dtype=tl.int32)
            for base in range(0, size, CHUNK):
                live = base + i < size
                key = tl.load(keys + base + i, mask=live, other=0)
                chosen = live & (bucket_of(key, low, high, LINEAR) == bucket)
                ones = chosen.to(tl.int32)
                place = filled + tl.cumsum(ones, axis=0) - ones
                token = tl.load(order + base + i, mask=chosen, other=0)
                tl.store(candidates + place, key, mask=chosen)
                tl.store(candidates + CANDIDATES + place, token, mask=chosen)
                filled += tl.sum(ones, axis=0)
            tl.debug_barrier()
            j = tl.arange(0, CANDIDATES)
            key = tl.load(candidates + j, mask=j < inside, other=0)
            token = tl.load(candidates + CANDIDATES + j, mask=j < inside, other=0)
            cut, last = select_pair(key, token, j < inside, rank)
        else:
            cut, rest, equal = select_stream(
                keys, order, size, low, high, bucket, cut, rank, LINEAR, False, CHUNK
            )
            if rest < equal:
                last, _, _ = select_stream(
                    keys, order, size, low, high, bucket, cut, rest, LINEAR, True, CHUNK
                )

        # Pass 3: the stable partition, into a second buffer; the remainder goes to the end.
        passed = tl.zeros([], dtype=tl.int32)
        for base in range(0, size, CHUNK):
            live = base + i < size
            key = tl.load(keys + base + i, mask=live, other=0)
            token = tl.load(order + base + i, mask=live, other=0)
            left = live & ((key < cut) | ((key == cut) & (token <= last)))
            ones = left.to(tl.int32)
            rank_left = passed + tl.cumsum(ones, axis=0) - ones
            rank_right = base + i - rank_left
            if REMAINDER:
                place = tl.where(left, size - capacity + rank_left, rank_right)
            else:
                place = tl.where(left, rank_left, capacity + rank_right)
            tl.store(moved + place, token, mask=live)
            passed += tl.sum(ones, axis=0)
        tl.debug_barrier()
        for base in range(0, size, CHUNK):
            live = base + i < size
            token = tl.load(moved + base + i, mask=live, other=0)
            tl.store(order + base + i, token, mask=live)


REGISTER_TOKENS = 8192
"""Longest segment that one program selects in registers: 16 keys a thread with 16 warps."""

CHUNK = 4096
CANDIDATES = 4096
STREAM_WARPS = 16


def register_config(tokens: int) -> tuple[int, int]:
    """Return (BLOCK, warps) for a segment: 4 to 16 keys a thread."""
    block = max(64, triton.next_power_of_2(tokens))
    return block, min(16, max(1, block // 256))


def launch_tree_route(
    order: Tensor, scores: Tensor, nodes: Tensor, splits: Tensor, sizes: tuple[int, ...],
    workspace: tuple[Tensor, Tensor] | None, *, linear: bool, remainder: bool = False,
) -> None:
    """Enqueue one partition a depth for a group of nodes; `order` is changed in place.

    order: int32 [R, T]. scores: float32 [R, T, S]. nodes: int32 [N, 2]. splits: int32
    [N, slots, 3]. sizes: the longest segment of each depth, in tokens. workspace: two int32 [R, T]
    buffers, needed by segments above REGISTER_TOKENS. linear: scores lie in [-2, 2]. remainder:
    scores are squared norms, and the largest go behind the others.
    """
    trees, tokens = order.shape
    count, slots = splits.shape[:2]
    for depth, size in enumerate(sizes):
        grid = (trees * count, 2**depth)
        shape = (count, slots, scores.shape[2], tokens)
        if size <= REGISTER_TOKENS and not remainder:
            block, warps = register_config(size)
            route_kernel[grid](
                order, scores, nodes, splits, *shape, 2**depth - 1, order.stride(0),
                BLOCK=block, num_warps=warps,
            )
            continue
        assert workspace is not None
        programs = grid[0] * grid[1]
        histogram = torch.empty(programs, 2048, dtype=torch.int32, device=order.device)
        candidates = torch.empty(programs, 2 * CANDIDATES, dtype=torch.int32, device=order.device)
        route_stream_kernel[grid](
            order, scores, nodes, splits, *workspace, histogram, candidates,
            *shape, 2**depth - 1, order.stride(0),
            CHUNK=CHUNK, CANDIDATES=CANDIDATES, LINEAR=linear, REMAINDER=remainder,
            num_warps=STREAM_WARPS,
        )
