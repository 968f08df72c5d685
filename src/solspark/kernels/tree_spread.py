"""Send the tokens of long landmark-tree nodes down all splits of a level, many programs a node.

    at each split the `capacity` tokens with the smallest (score, token id) go left, the others
    right; at the end the children follow each other, each in the order that its tokens had: a
    stable partition of the node's stretch of `order`, in place

Nothing moves before all depths are decided: a token keeps its place and knows the split it stands
at. One program = CHUNK tokens of one (tree, node), so that few long nodes fill the device. A depth
takes four launches: `count` follows the cuts of the depth above, makes keys of the scores at the
new splits and counts them in 2,048 buckets a node, which the splits of the depth share; `find` says
in which bucket of a split the last token on the left lies; `collect` gathers the tokens of that
bucket, in any order; `cut` selects among them by (key, token), which no order can change. Should
there be more than CANDIDATES of them (many equal scores), `cut` counts their bits in passes over
the node: slow, and just as exact. Then `leave` counts the children of every chunk, `offsets` adds
them up, and `move` and `keep` carry out the partition.

A depth reads 4 to 9 bytes of state and one sector of scores a token and writes 5 bytes; one program
a split, as for short nodes, would leave most of the device idle here.

Scores in [-2, 2] fall into even buckets; others are counted by the highest bits of their keys and,
in a second round, by the next ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tree_route import LARGEST, ordered_key, select_pair

COUNTERS = tl.constexpr(2048)
COUNTER_BITS = tl.constexpr(11)

BUCKET = tl.constexpr(0)
RANK = tl.constexpr(2)
INSIDE = tl.constexpr(3)
FILLED = tl.constexpr(4)
CUT = tl.constexpr(5)
LAST = tl.constexpr(6)
FIELDS = tl.constexpr(8)
"""What is known of a split: its two buckets, then these."""


@triton.jit
def bucket_of(key, depth, part, LINEAR: tl.constexpr):
    """Return the bucket of a key in one round, never decreasing in it among those of one bucket.

    The splits of a depth share the counters, so each has 2,048 / 2^depth buckets.
    """
    if LINEAR:
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        score = bits.to(tl.float32, bitcast=True)
        index = (tl.minimum(tl.maximum(score, -2.0), 2.0) + 2.0) * (COUNTERS / 4)
        bucket = tl.minimum(index.to(tl.int32), COUNTERS - 1)
        return tl.where(key == LARGEST, COUNTERS - 1, bucket) >> depth
    else:
        u = (key ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
        width = COUNTER_BITS - depth
        return ((u >> (32 - (part + 1) * width)) & ((1 << width) - 1)).to(tl.int32)


@triton.jit
def same_buckets(state, key, live, depth, rounds, LINEAR: tl.constexpr):
    """Say which keys lie in the buckets found for their splits in the rounds so far."""
    for part in range(0, rounds):
        found = tl.load(state + BUCKET + part, mask=live, other=-1)
        live = live & (bucket_of(key, depth, part, LINEAR) == found)
    return live


@triton.jit
def next_slot(slot, state, key, token, live):
    """Return where tokens go from their splits."""
    cut = tl.load(state + CUT, mask=live, other=0)
    last = tl.load(state + LAST, mask=live, other=0)
    left = (key < cut) | ((key == cut) & (token <= last))
    return 2 * slot + tl.where(left, 1, 2)


@triton.jit(do_not_specialize=["nodes", "slots", "width", "tokens", "depth", "part"])
def count_kernel(
    order_ptr, score_ptr, node_ptr, split_ptr, key_ptr, slot_ptr, state_ptr, histogram_ptr,
    nodes, slots, width, tokens, depth, part,
    CHUNK: tl.constexpr, LINEAR: tl.constexpr, REMAINDER: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    tree = pair // nodes
    node = pair % nodes
    start = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    live = i < size
    place = tree * tokens + start + i
    own = pair * slots
    # In the first round of the first depth nobody stands anywhere yet.
    placed = i < tl.where(depth + part > 0, size, 0)
    slot = tl.load(slot_ptr + place, mask=placed, other=0).to(tl.int32)
    key = tl.load(key_ptr + place, mask=placed, other=0)
    if part == 0:
        # From the split above to this depth's; then the score there becomes the key.
        token = tl.load(order_ptr + place, mask=live, other=0)
        above = state_ptr + (own + slot) * FIELDS
        slot = tl.where(placed, next_slot(slot, above, key, token, placed), 0)
        counted = tl.load(split_ptr + (node * slots + slot) * 3 + 1, mask=live, other=0) > 0
        rows = score_ptr + (tree * tokens + token) * width
        key = ordered_key(tl.load(rows + slot, mask=counted, other=0.0))
        if REMAINDER:
            key = -1 - key
        tl.store(key_ptr + place, key, mask=live)
        tl.store(slot_ptr + place, slot.to(slot_ptr.dtype.element_ty), mask=live)
    else:
        counted = tl.load(split_ptr + (node * slots + slot) * 3 + 1, mask=live, other=0) > 0
        counted = same_buckets(
            state_ptr + (own + slot) * FIELDS, key, counted, depth, part, LINEAR
        )
    local = slot - ((1 << depth) - 1)
    counter = (local << (COUNTER_BITS - depth)) + bucket_of(key, depth, part, LINEAR)
    tl.atomic_add(histogram_ptr + pair * COUNTERS + counter, 1, mask=counted, sem="relaxed")


@triton.jit(do_not_specialize=["nodes", "slots", "depth", "part"])
def find_kernel(split_ptr, state_ptr, histogram_ptr, nodes, slots, depth, part):
    pair = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1)
    slot = (1 << depth) - 1 + local
    state = state_ptr + (pair * slots + slot) * FIELDS
    capacity = tl.load(split_ptr + ((pair % nodes) * slots + slot) * 3 + 2)
    target = capacity if part == 0 else tl.load(state + RANK)
    buckets = COUNTERS >> depth
    j = tl.arange(0, COUNTERS)
    mine = histogram_ptr + pair * COUNTERS + local * buckets + j
    counts = tl.load(mine, mask=j < buckets, other=0)
    # The next round or depth finds its counters cleared.
    tl.store(mine, tl.zeros([COUNTERS], dtype=tl.int32), mask=j < buckets)
    upto = tl.cumsum(counts, axis=0)
    below = (upto < target) & (j < buckets)
    bucket = tl.sum(below.to(tl.int32), axis=0)
    tl.store(state + BUCKET + part, bucket)
    tl.store(state + RANK, target - tl.max(tl.where(below, upto, 0), axis=0))
    tl.store(state + INSIDE, tl.sum(tl.where(j == bucket, counts, 0), axis=0))
    tl.store(state + FILLED, 0)


@triton.jit(do_not_specialize=["nodes", "slots", "tokens", "depth", "rounds"])
def collect_kernel(
    order_ptr, node_ptr, split_ptr, key_ptr, slot_ptr, state_ptr, candidate_ptr,
    nodes, slots, tokens, depth, rounds,
    CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, LINEAR: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    tree = pair // nodes
    node = pair % nodes
    start = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    live = i < size
    place = tree * tokens + start + i
    slot = tl.load(slot_ptr + place, mask=live, other=0).to(tl.int32)
    key = tl.load(key_ptr + place, mask=live, other=0)
    state = state_ptr + (pair * slots + slot) * FIELDS
    chosen = tl.load(split_ptr + (node * slots + slot) * 3 + 1, mask=live, other=0) > 0
    chosen = same_buckets(state, key, chosen, depth, rounds, LINEAR)
    # Whoever comes first: the selection among them depends on keys and tokens alone.
    at = tl.atomic_add(state + FILLED, 1, mask=chosen, sem="relaxed")
    chosen = chosen & (at < CANDIDATES)
    token = tl.load(order_ptr + place, mask=chosen, other=0)
    local = slot - ((1 << depth) - 1)
    target = candidate_ptr + (((pair << depth) + local) * 2) * CANDIDATES + at
    tl.store(target, key, mask=chosen)
    tl.store(target + CANDIDATES, token, mask=chosen)


@triton.jit
def count_bits(
    order_ptr, key_ptr, slot_ptr, state, slot, size, depth, rounds, cut, prefix, shift,
    LINEAR: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Count, among the split's candidates whose higher bits are prefix, the next two bits.

    TOKENS counts token bits among the keys equal to `cut` instead of key bits.
    """
    i = tl.arange(0, CHUNK)
    total = tl.zeros([4], dtype=tl.int32)
    for base in range(0, size, CHUNK):
        live = base + i < size
        live = live & (tl.load(slot_ptr + base + i, mask=live, other=0).to(tl.int32) == slot)
        key = tl.load(key_ptr + base + i, mask=live, other=0)
        live = same_buckets(state + i * 0, key, live, depth, rounds, LINEAR)
        value = key
        if TOKENS:
            live = live & (key == cut)
            value = tl.load(order_ptr + base + i, mask=live, other=0)
        u = (value ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
        digit = (u >> shift) & 3
        same = live & ((u >> (shift + 2)) == prefix)
        hit = same[:, None] & (digit[:, None] == tl.arange(0, 4)[None, :])
        total += tl.sum(hit.to(tl.int32), axis=0)
    return total


@triton.jit
def select_in_node(
    order_ptr, key_ptr, slot_ptr, state, slot, size, depth, rounds, cut, rank,
    LINEAR: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Return the rank-th smallest key or token of the candidates, its rank among equals, theirs."""
    prefix = tl.zeros([], dtype=tl.int64)
    count = tl.zeros([], dtype=tl.int32)
    four = tl.arange(0, 4)
    for step in range(16):
        counts = count_bits(
            order_ptr, key_ptr, slot_ptr, state, slot, size, depth, rounds, cut, prefix,
            30 - 2 * step, LINEAR, TOKENS, CHUNK,
        )
        upto = tl.cumsum(counts, axis=0)
        digit = tl.sum((upto < rank).to(tl.int32), axis=0)
        count = tl.sum(tl.where(four == digit, counts, 0), axis=0)
        rank = rank - tl.sum(tl.where(four < digit, counts, 0), axis=0)
        prefix = prefix * 4 + digit
    return (prefix - 2147483648).to(tl.int32), rank, count


@triton.jit(do_not_specialize=["nodes", "slots", "tokens", "depth", "rounds"])
def cut_kernel(
    order_ptr, node_ptr, split_ptr, key_ptr, slot_ptr, state_ptr, candidate_ptr,
    nodes, slots, tokens, depth, rounds,
    CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, LINEAR: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    local = tl.program_id(1)
    tree = pair // nodes
    node = pair % nodes
    slot = (1 << depth) - 1 + local
    state = state_ptr + (pair * slots + slot) * FIELDS
    # Whoever is at a hole has arrived, and keeps to the left.
    cut = tl.full([], LARGEST, dtype=tl.int32)
    last = tl.full([], LARGEST, dtype=tl.int32)
    if tl.load(split_ptr + (node * slots + slot) * 3 + 1) > 0:
        rank = tl.load(state + RANK)
        inside = tl.load(state + INSIDE)
        if inside <= CANDIDATES:
            j = tl.arange(0, CANDIDATES)
            mine = candidate_ptr + (((pair << depth) + local) * 2) * CANDIDATES + j
            key = tl.load(mine, mask=j < inside, other=0)
            token = tl.load(mine + CANDIDATES, mask=j < inside, other=0)
            cut, last = select_pair(key, token, j < inside, rank)
        else:
            begin = tree * tokens + tl.load(node_ptr + node * 2)
            size = tl.load(node_ptr + node * 2 + 1)
            cut, rest, equal = select_in_node(
                order_ptr + begin, key_ptr + begin, slot_ptr + begin, state, slot, size, depth,
                rounds, cut, rank, LINEAR, False, CHUNK,
            )
            if rest < equal:
                last, _, _ = select_in_node(
                    order_ptr + begin, key_ptr + begin, slot_ptr + begin, state, slot, size, depth,
                    rounds, cut, rest, LINEAR, True, CHUNK,
                )
    tl.store(state + CUT, cut)
    tl.store(state + LAST, last)


@triton.jit(do_not_specialize=["nodes", "tokens"])
def leave_kernel(
    order_ptr, node_ptr, key_ptr, slot_ptr, state_ptr, count_ptr, nodes, tokens,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, REMAINDER: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tree = pair // nodes
    node = pair % nodes
    start = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    live = i < size
    place = tree * tokens + start + i
    slot = tl.load(slot_ptr + place, mask=live, other=0).to(tl.int32)
    key = tl.load(key_ptr + place, mask=live, other=0)
    token = tl.load(order_ptr + place, mask=live, other=0)
    state = state_ptr + (pair * SLOTS + slot) * FIELDS
    child = next_slot(slot, state, key, token, live) - (SLOTS - 1)
    if REMAINDER:
        # The largest norms go behind the others.
        child = SLOTS - 1 - child
    tl.store(slot_ptr + place, child.to(slot_ptr.dtype.element_ty), mask=live)
    bins = tl.arange(0, 2 * SLOTS)
    counts = tl.histogram(tl.where(live, child, SLOTS), 2 * SLOTS)
    target = count_ptr + (pair * tl.num_programs(1) + chunk) * SLOTS + bins
    tl.store(target, counts, mask=bins < SLOTS)


@triton.jit(do_not_specialize=["chunks"])
def offsets_kernel(count_ptr, chunks, SLOTS: tl.constexpr, TILE: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SLOTS)
    j = tl.arange(0, TILE)
    mine = count_ptr + pair * chunks * SLOTS + s[None, :]
    total = tl.zeros([SLOTS], dtype=tl.int32)
    for base in range(0, chunks, TILE):
        here = (base + j < chunks)[:, None]
        counts = tl.load(mine + (base + j)[:, None] * SLOTS, mask=here, other=0)
        total += tl.sum(counts, axis=0)
    # Where a child begins, then where it begins in every chunk.
    begin = tl.cumsum(total, axis=0) - total
    for base in range(0, chunks, TILE):
        here = (base + j < chunks)[:, None]
        counts = tl.load(mine + (base + j)[:, None] * SLOTS, mask=here, other=0)
        before = begin[None, :] + tl.cumsum(counts, axis=0) - counts
        tl.store(mine + (base + j)[:, None] * SLOTS, before, mask=here)
        begin += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["nodes", "tokens"])
def move_kernel(
    order_ptr, node_ptr, slot_ptr, count_ptr, moved_ptr, nodes, tokens,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tree = pair // nodes
    node = pair % nodes
    start = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    live = i < size
    place = tree * tokens + start + i
    child = tl.load(slot_ptr + place, mask=live, other=0).to(tl.int32)
    # Four children a sum: a chunk has fewer than 2^16 tokens.
    shift = ((child & 3) * 16).to(tl.int64)
    one = tl.full([], 1, tl.int64) << shift
    rank = tl.zeros([CHUNK], dtype=tl.int32)
    for four in range(0, (SLOTS + 3) // 4):
        mine = live & ((child >> 2) == four)
        upto = tl.cumsum(tl.where(mine, one, 0), axis=0)
        rank = tl.where(mine, ((upto >> shift) & 0xFFFF).to(tl.int32) - 1, rank)
    base = count_ptr + (pair * tl.num_programs(1) + chunk) * SLOTS
    target = tl.load(base + child, mask=live, other=0) + rank
    token = tl.load(order_ptr + place, mask=live, other=0)
    tl.store(moved_ptr + tree * tokens + start + target, token, mask=live)


@triton.jit(do_not_specialize=["nodes", "tokens"])
def keep_kernel(order_ptr, node_ptr, moved_ptr, nodes, tokens, CHUNK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    node = pair % nodes
    start = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = (pair // nodes) * tokens + start + i
    token = tl.load(moved_ptr + place, mask=i < size, other=0)
    tl.store(order_ptr + place, token, mask=i < size)


CHUNK = 2048
WARPS = 8
"""8 tokens a thread, whose scores are fetched together: enough loads in flight, few registers."""

CANDIDATES = 1024
"""On Gaussian scores about 200 tokens share the bucket of a cut, at every depth."""


def launch_tree_spread(
    order: Tensor, scores: Tensor, nodes: Tensor, splits: Tensor, largest: int,
    *, linear: bool, remainder: bool = False,
) -> None:
    """Enqueue all splits of a group of nodes and the partition; `order` is changed in place.

    order: int32 [R, T], contiguous. scores: float32 [R, T, S]. nodes: int32 [N, 2], the largest of
    `largest` tokens. splits: int32 [N, slots, 3]. linear: scores lie in [-2, 2]. remainder: scores
    are squared norms, there is one split, and the largest go behind the others.
    """
    trees, tokens = order.shape
    count, slots = splits.shape[:2]
    pairs, device = trees * count, order.device
    depths = slots.bit_length() - 1
    chunks = triton.cdiv(largest, CHUNK)
    keys, moved = torch.empty_like(order), torch.empty_like(order)
    places = torch.empty(order.shape, dtype=torch.int8, device=device)
    state = torch.empty(pairs, slots, FIELDS.value, dtype=torch.int32, device=device)
    histogram = torch.zeros(pairs, COUNTERS.value, dtype=torch.int32, device=device)
    rooms = 2 ** (depths - 1) * 2 * CANDIDATES
    candidates = torch.empty(pairs, rooms, dtype=torch.int32, device=device)
    counts = torch.empty(pairs, chunks, slots, dtype=torch.int32, device=device)
    rounds = 1 if linear else 2
    grid = (pairs, chunks)
    for depth in range(depths):
        for part in range(rounds):
            count_kernel[grid](
                order, scores, nodes, splits, keys, places, state, histogram,
                count, slots, scores.shape[2], tokens, depth, part,
                CHUNK=CHUNK, LINEAR=linear, REMAINDER=remainder, num_warps=WARPS,
            )
            find_kernel[(pairs, 2**depth)](
                splits, state, histogram, count, slots, depth, part, num_warps=4
            )
        tables = (order, nodes, splits, keys, places, state, candidates)
        sizes = (count, slots, tokens, depth, rounds)
        collect_kernel[grid](
            *tables, *sizes, CHUNK=CHUNK, CANDIDATES=CANDIDATES, LINEAR=linear, num_warps=WARPS
        )
        cut_kernel[(pairs, 2**depth)](
            *tables, *sizes, CHUNK=CHUNK, CANDIDATES=CANDIDATES, LINEAR=linear, num_warps=4
        )
    leave_kernel[grid](
        order, nodes, keys, places, state, counts, count, tokens,
        SLOTS=slots, CHUNK=CHUNK, REMAINDER=remainder, num_warps=WARPS,
    )
    offsets_kernel[(pairs,)](counts, chunks, SLOTS=slots, TILE=32, num_warps=4)
    move_kernel[grid](
        order, nodes, places, counts, moved, count, tokens,
        SLOTS=slots, CHUNK=CHUNK, num_warps=WARPS,
    )
    keep_kernel[grid](order, nodes, moved, count, tokens, CHUNK=CHUNK, num_warps=WARPS)
