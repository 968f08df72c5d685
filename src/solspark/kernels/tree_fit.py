"""Fit the binary splits of landmark-tree nodes: K landmarks -> one direction a split.

    seeds = farthest pair;  repeat: landmarks in the order of u_k . (unit(r) - unit(l)) go left
    until the capacity is used up;  l, r = weighted means;  direction = unit(r) - unit(l)

Splits are numbered as a heap: 0 at the root, 2 s + 1 and 2 s + 2 below split s; a split with size 0
is a hole. One program = one (tree, node) and a run of its splits: with all of them in one program
the weights of a split are read back by its children; at the root, where nodes are few, one launch a
depth spreads them over the device. Between the updates everything stays in the K x K Gram matrix
(float32; operands of the feature type are exact on the tensor cores). The final centres are summed
in float64, so that directions are the reference's up to its last bits: landmark by landmark, each
thread its own channels, so that no sum crosses threads.

Each program reads K feature rows (again for every split, from the cache), and writes S directions
and 2 S rows of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_NORM = tl.constexpr(1e-12)
UNROLL = tl.constexpr(4)
"""Landmarks whose rows are fetched together."""


@triton.jit
def load_landmarks(
    square_ptr, gain_ptr, order_ptr, size, count,
    K: tl.constexpr, MEANS: tl.constexpr, GAINED: tl.constexpr,
):
    """Return the rows of the landmarks [K], which are live, their gains and interval lengths.

    The pointers stand at the tree (square, gain) and at the node (order).
    """
    i = tl.arange(0, K)
    live = i < count
    start = i * size // count
    length = tl.where(live, (i + 1) * size // count - start, 0)
    gain = tl.where(live, 1.0, 0.0)
    row = i
    if not MEANS:
        row = tl.load(order_ptr + start + length // 2, mask=live, other=0)
        # A token without a finite norm says nothing about directions.
        live = live & (tl.load(square_ptr + row, mask=live, other=0.0) < float("inf"))
        if GAINED:
            gain = tl.load(gain_ptr + row, mask=live, other=0.0)
        gain = tl.where(live, gain, 0.0)
    return row, live, gain, length


@triton.jit
def wide_row(x_ptr, place, D: tl.constexpr):
    """Return a row in float64; zero for a place of -1."""
    offs_d = tl.arange(0, D)
    x = tl.load(x_ptr + place + offs_d, mask=offs_d < tl.where(place >= 0, D, 0), other=0.0)
    return x.to(tl.float64)


@triton.jit
def fit_splits(
    x_ptr, sxt, row, live, gain, length, weight_ptr, place_ptr, share_ptr, split_ptr,
    direction_ptr, offset_ptr, first, last,
    K: tl.constexpr, D: tl.constexpr, ITERATIONS: tl.constexpr,
    ENDPOINTS: tl.constexpr, EUCLIDEAN: tl.constexpr,
):
    """Fit splits first .. last - 1 of one node; the pointers stand at the node, x at the tree."""
    i = tl.arange(0, K)
    offs_d = tl.arange(0, D)
    place = row.to(tl.int64) * sxt
    rows = x_ptr + place
    c = tl.load(rows[:, None] + offs_d[None, :], mask=live[:, None], other=0.0)
    # Where each row is, for the sums below.
    tl.store(place_ptr + i, tl.where(live, place, -1))
    gram = tl.dot(c, tl.trans(c), input_precision="ieee")
    square = tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), axis=0)
    if EUCLIDEAN:
        magnitude = gain
        smallest = 0.0
    else:
        # Cosines, and centres as multiples of unit vectors of at most 1: nothing can overflow.
        inverse = 1.0 / tl.maximum(tl.sqrt_rn(square), SMALLEST_NORM)
        gram = gram * inverse[:, None] * inverse[None, :]
        magnitude = square * inverse * gain
        top = tl.max(magnitude, axis=0)
        top = tl.where(top > 0.0, top, 1.0)
        magnitude = magnitude / top
        smallest = SMALLEST_NORM / top
    if first == 0:
        tl.store(weight_ptr + i, length)
    tl.debug_barrier()

    for split in range(first, last):
        size = tl.load(split_ptr + split * 3 + 1)
        capacity = tl.load(split_ptr + split * 3 + 2)
        if size > 0:
            # Seeds: the first farthest pair, row by row, among the landmarks with weight.
            w = tl.load(weight_ptr + split * K + i)
            active = w > 0
            lowest = tl.min(tl.where(active, i, K), axis=0)
            if ENDPOINTS:
                seed_l = lowest
                seed_r = tl.max(tl.where(active, i, 0), axis=0)
            else:
                allowed = (i[:, None] < i[None, :]) & active[:, None] & active[None, :]
                if EUCLIDEAN:
                    value = square[:, None] + square[None, :] - 2.0 * gram
                else:
                    value = 1.0 - gram
                value = tl.where(allowed, value, -float("inf"))
                best = tl.max(tl.max(value, axis=1), axis=0)
                found = tl.where(allowed & (value == best), i[:, None] * K + i[None, :], K * K)
                found = tl.min(tl.min(found, axis=1), axis=0)
                lonely = tl.sum(active.to(tl.int32), axis=0) < 2
                seed_l = tl.where(lonely, lowest, found // K)
                seed_r = tl.where(lonely, lowest, found % K)
            part_l = tl.where(i == seed_l, 1.0, 0.0)
            part_r = tl.where(i == seed_r, 1.0, 0.0)
            lw = w

            # Updates: order the landmarks between the two centres and fill the left side.
            for _ in range(ITERATIONS if ITERATIONS > 0 else 1):
                along_l = tl.sum(gram * (part_l * magnitude)[None, :], axis=1)
                along_r = tl.sum(gram * (part_r * magnitude)[None, :], axis=1)
                norm_l = tl.sum(part_l * magnitude * along_l, axis=0)
                norm_r = tl.sum(part_r * magnitude * along_r, axis=0)
                if EUCLIDEAN:
                    delta = 2.0 * (along_r - along_l) + (norm_l - norm_r)
                else:
                    length_l = tl.maximum(tl.sqrt(tl.maximum(norm_l, 0.0)), smallest)
                    length_r = tl.maximum(tl.sqrt(tl.maximum(norm_r, 0.0)), smallest)
                    delta = along_r / length_r - along_l / length_l
                delta = tl.where(delta == 0.0, 0.0, delta)
                ahead = delta[None, :] < delta[:, None]
                ahead = ahead | ((delta[None, :] == delta[:, None]) & (i[None, :] < i[:, None]))
                before = tl.sum(tl.where(ahead, w[None, :], 0), axis=1)
                lw = tl.minimum(tl.maximum(capacity - before, 0), w)
                if ITERATIONS > 0:
                    part_l = lw.to(tl.float32) / capacity
                    part_r = (w - lw).to(tl.float32) / (size - capacity)

            # What the children start from.
            tl.store(weight_ptr + (2 * split + 1) * K + i, lw)
            tl.store(weight_ptr + (2 * split + 2) * K + i, w - lw)

            # The two centres in float64, and their direction.
            share = share_ptr + split * (2 * K)
            tl.store(share + i, lw.to(tl.float64) * gain)
            tl.store(share + K + i, (w - lw).to(tl.float64) * gain)
            tl.debug_barrier()
            if ITERATIONS > 0:
                centre_l = tl.zeros([D], dtype=tl.float64)
                centre_r = tl.zeros([D], dtype=tl.float64)
                for k in tl.range(0, K, loop_unroll_factor=UNROLL):
                    x = wide_row(x_ptr, tl.load(place_ptr + k), D)
                    centre_l += x * tl.load(share + k)
                    centre_r += x * tl.load(share + K + k)
                one = tl.full([], 1.0, dtype=tl.float64)
                centre_l = centre_l * (one / capacity)
                centre_r = centre_r * (one / (size - capacity))
            else:
                # The seeds themselves; only their gains may scale them.
                only = tl.where(i == seed_l, gain, 0.0)
                centre_l = wide_row(x_ptr, tl.load(place_ptr + seed_l), D) * tl.sum(only, axis=0)
                only = tl.where(i == seed_r, gain, 0.0)
                centre_r = wide_row(x_ptr, tl.load(place_ptr + seed_r), D) * tl.sum(only, axis=0)
            square_l = tl.sum(centre_l * centre_l, axis=0)
            square_r = tl.sum(centre_r * centre_r, axis=0)
            if EUCLIDEAN:
                direction = centre_r - centre_l
                tl.store(offset_ptr + split, (square_l - square_r).to(tl.float32))
            else:
                one = tl.full([], 1.0, dtype=tl.float64)
                direction = centre_r * (one / tl.maximum(tl.sqrt(square_r), SMALLEST_NORM))
                direction -= centre_l * (one / tl.maximum(tl.sqrt(square_l), SMALLEST_NORM))
            direction = direction.to(tl.float32).to(direction_ptr.dtype.element_ty)
            tl.store(direction_ptr + split * D + offs_d, direction)
        else:
            # A hole is scored with the others, so it needs some direction.
            nothing = tl.zeros([D], dtype=tl.float32).to(direction_ptr.dtype.element_ty)
            tl.store(direction_ptr + split * D + offs_d, nothing)
            if EUCLIDEAN:
                tl.store(offset_ptr + split, 0.0)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["nodes", "slots", "tokens", "wanted", "first", "splits_each"])
def fit_kernel(
    x_ptr, centre_ptr, square_ptr, gain_ptr, order_ptr, node_ptr, split_ptr,
    weight_ptr, place_ptr, share_ptr, direction_ptr, offset_ptr,
    nodes, slots, tokens, wanted, first, splits_each,
    sor: tl.int64, sxr: tl.int64, sxt: tl.int64,
    K: tl.constexpr, D: tl.constexpr, ITERATIONS: tl.constexpr,
    ENDPOINTS: tl.constexpr, EUCLIDEAN: tl.constexpr, MEANS: tl.constexpr, GAINED: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    tree = pid // nodes
    node = pid % nodes
    start = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)
    count = tl.minimum(size, wanted)
    row, live, gain, length = load_landmarks(
        square_ptr + tree * tokens, gain_ptr + tree * tokens, order_ptr + tree * sor + start,
        size, count, K, MEANS, GAINED,
    )
    if MEANS:
        x_ptr = centre_ptr + pid * K * D
        sxt = tl.full([], D, dtype=tl.int64)
    else:
        x_ptr += tree * sxr
    begin = first + tl.program_id(1) * splits_each
    fit_splits(
        x_ptr, sxt, row, live, gain, length, weight_ptr + pid * slots * (2 * K),
        place_ptr + pid * K, share_ptr + pid * slots * (2 * K), split_ptr + node * slots * 3,
        direction_ptr + pid * slots * D, offset_ptr + pid * slots, begin, begin + splits_each,
        K, D, ITERATIONS, ENDPOINTS, EUCLIDEAN,
    )


@triton.jit(do_not_specialize=["nodes", "tokens", "wanted"])
def landmark_means_kernel(
    x_ptr, gain_ptr, order_ptr, node_ptr, centre_ptr,
    nodes, tokens, wanted, sor: tl.int64, sxr: tl.int64, sxt: tl.int64,
    K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, GAINED: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    tree = pid // nodes
    node = pid % nodes
    offs_d = tl.arange(0, D)
    begin = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)
    count = tl.minimum(size, wanted)
    if i < count:
        start = i * size // count
        stop = (i + 1) * size // count
        total = tl.zeros([D], dtype=tl.float32)
        # Rows in the node's order, a tile at a time: the sum does not depend on the launch.
        for row in range(start, stop, ROWS):
            place = row + tl.arange(0, ROWS)
            live = place < stop
            token = tl.load(order_ptr + tree * sor + begin + place, mask=live, other=0)
            token = token.to(tl.int64)
            source = x_ptr + tree * sxr + token[:, None] * sxt + offs_d[None, :]
            x = tl.load(source, mask=live[:, None], other=0.0).to(tl.float32)
            if GAINED:
                x = x * tl.load(gain_ptr + tree * tokens + token, mask=live, other=0.0)[:, None]
            total += tl.sum(x, axis=0)
        mean = (total / (stop - start)).to(centre_ptr.dtype.element_ty)
        # A centre without a finite norm says nothing about directions.
        square = tl.sum(mean.to(tl.float32) * mean.to(tl.float32), axis=0)
        mean = tl.where(square < float("inf"), mean, 0.0)
        tl.store(centre_ptr + (pid * K + i) * D + offs_d, mean)


WARPS = {32: 1, 64: 2, 128: 16}
"""Warps by landmarks. The work of a node is a chain of short steps on K x K matrices, so what
counts is how many nodes an SM has in flight and what each of them issues: at 32 landmarks one warp
holds a matrix in 32 registers a thread and needs no barrier; at 64 landmarks two warps leave room
for four nodes an SM, four for two."""

REGISTERS = {32: 128}
"""Bound on the registers of a thread: 16 nodes an SM at 32 landmarks, still without a spill."""


def given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a pointer that the kernel may add to, though it will not read it."""
    return other if tensor is None else tensor


def padded(landmarks: int) -> int:
    """Return K, the power of two that holds the landmarks."""
    return max(32, triton.next_power_of_2(landmarks))


def launch_landmark_means(
    x: Tensor, gain: Tensor | None, order: Tensor, nodes: Tensor, landmarks: int
) -> Tensor:
    """Enqueue the interval means of a group of nodes; return them as [R * N, K, D].

    Arguments as for `launch_tree_fit`.
    """
    trees, tokens, dim = x.shape
    pairs, k = trees * nodes.shape[0], padded(landmarks)
    centres = torch.empty(pairs, k, dim, dtype=x.dtype, device=x.device)
    landmark_means_kernel[(pairs, landmarks)](
        x, given(gain, x), order, nodes, centres, nodes.shape[0], tokens, landmarks,
        order.stride(0), x.stride(0), x.stride(1),
        K=k, D=dim, ROWS=32, GAINED=gain is not None, num_warps=4,
    )
    return centres


def launch_tree_fit(
    x: Tensor, centres: Tensor | None, squares: Tensor, gain: Tensor | None, order: Tensor,
    nodes: Tensor, splits: Tensor, *, landmarks: int, iterations: int, endpoints: bool,
    euclidean: bool, direction_dtype: torch.dtype, spread: bool,
) -> tuple[Tensor, Tensor | None]:
    """Enqueue the fit of all splits of a group of nodes; return directions and offsets.

    x: [R, T, D]. centres: [R * N, K, D] of mean landmarks, or None for midpoints. squares: float32
    [R, T], squared norms. gain: float32 [R, T] that midpoints are multiplied by, or None. order:
    int32 [R, T]. nodes: int32 [N, 2], (start, size) in tokens. splits: int32 [N, S, 3], (offset,
    size, left capacity). spread: one launch a depth, for few nodes.

    The directions are [R, N, S, D], the offsets float32 [R, N, S], None unless euclidean.
    """
    trees, tokens, dim = x.shape
    count, slots = splits.shape[:2]
    k, pairs = padded(landmarks), trees * count
    shape = (trees, count, slots)
    directions = torch.empty(*shape, dim, dtype=direction_dtype, device=x.device)
    offsets = torch.empty(shape, device=x.device) if euclidean else None
    weights = torch.empty(pairs, 2 * slots, k, dtype=torch.int32, device=x.device)
    places = torch.empty(pairs, k, dtype=torch.int64, device=x.device)
    shares = torch.empty(pairs, slots, 2, k, dtype=torch.float64, device=x.device)
    depths = [(2**d - 1, 2**d, 1) for d in range(slots.bit_length() - 1)]
    limit = {"maxnreg": REGISTERS[k]} if k in REGISTERS and torch.version.hip is None else {}
    for first, programs, each in depths if spread else [(0, 1, slots - 1)]:
        fit_kernel[(pairs, programs)](
            x, given(centres, x), squares, given(gain, squares), order, nodes, splits,
            weights, places, shares, directions, given(offsets, squares),
            count, slots, tokens, landmarks, first, each,
            order.stride(0), x.stride(0), x.stride(1),
            K=k, D=dim, ITERATIONS=iterations, ENDPOINTS=endpoints, EUCLIDEAN=euclidean,
            MEANS=centres is not None, GAINED=gain is not None, num_warps=WARPS[k],
            **limit,
        )
    return directions, offsets
