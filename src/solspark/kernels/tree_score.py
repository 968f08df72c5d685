"""Score every token of landmark-tree nodes against the directions of its node's splits.

    cosine:     scores[tree, token, s] = (x / |x|) . direction[node, s]
    euclidean:  scores[tree, token, s] = 2 x . direction[node, s] + offset[node, s]

One program = up to TILES tiles of ROWS tokens of one (tree, node): it reads the node's S directions
once, then every feature row once (256 bytes each at D = 128, wherever they lie), and writes 4 S
bytes a token, whole sectors. The loop is pipelined by asynchronous copies: the rows of a tile come
while the one before is scored, their ids before that. Without that a program waits for three
dependent loads a tile, which left half of the bandwidth unused.
x / |x| is formed in float32 and rounded to float16 with float16 directions; float32 directions keep
float32 operands. Sums are float32. The same file holds the row norms, which are read once for all
levels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
TILES = 8
"""Tiles of a program: it has a node of the deep levels (256 to 320 tokens) to itself."""

STAGES = 5
"""Two stages for ids, two for rows. With 3 or 4 the rows of a tile are asked for only when the one
before is done. Float32 directions are not pipelined: their operands fill the shared memory."""

REGISTERS = 96
"""Bound on the registers of a thread: five programs an SM, without a spill (left alone, 168)."""


@triton.jit
def inverse_norm(square):
    """Return 1 / max(|x|, 1e-12) of |x|^2, rounded like the reference; NaN if it is not finite."""
    one = tl.full(square.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.maximum(tl.sqrt_rn(square), 1e-12))
    return tl.where(square < float("inf"), inverse, float("nan"))


@triton.jit(do_not_specialize=["nodes", "spans", "tokens"])
def score_kernel(
    x_ptr, square_ptr, order_ptr, node_ptr, direction_ptr, offset_ptr, score_ptr,
    nodes, spans, tokens, sor: tl.int64, sxr: tl.int64, sxt: tl.int64,
    D: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, EUCLIDEAN: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    first = (pid % spans).to(tl.int32) * SPAN
    pair = pid // spans
    tree = pair // nodes
    node = pair % nodes
    start = tl.load(node_ptr + node * 2)
    size = tl.load(node_ptr + node * 2 + 1)

    # The directions of the node's splits. The unused last one is zero, and its score is written
    # like the others: sectors stay whole.
    s = tl.arange(0, WIDTH)
    offs_d = tl.arange(0, D)
    known = s < SLOTS - 1
    columns = direction_ptr + pair * (SLOTS * D) + s[None, :] * D + offs_d[:, None]
    direction = tl.load(columns, mask=known[None, :], other=0.0)
    for base in tl.range(first, min(first + SPAN, size), TILE, num_stages=STAGES):
        # Rows of this tile, wherever they lie.
        i = base + tl.arange(0, TILE)
        live = i < size
        token = tl.load(order_ptr + tree * sor + start + i, mask=live, other=0).to(tl.int64)
        rows = x_ptr + tree * sxr + token[:, None] * sxt + offs_d[None, :]
        x = tl.load(rows, mask=live[:, None], other=0.0).to(tl.float32)
        square = tl.load(square_ptr + tree * tokens + token, mask=live, other=0.0)

        # A row without a finite norm scores NaN.
        if EUCLIDEAN:
            score = 2.0 * tl.dot(x, direction, input_precision="ieee")
            score += tl.load(offset_ptr + pair * SLOTS + s, mask=known, other=0.0)[None, :]
            score = tl.where((square < float("inf"))[:, None], score, float("nan"))
        else:
            unit = (x * inverse_norm(square)[:, None]).to(direction.dtype)
            score = tl.dot(unit, direction, input_precision="ieee")
        target = score_ptr + (tree * tokens + token[:, None]) * SLOTS + s[None, :]
        tl.store(target, score, mask=live[:, None] & (s < SLOTS)[None, :])


def launch_tree_score(
    x: Tensor, squares: Tensor, order: Tensor, nodes: Tensor, largest: int,
    directions: Tensor, offsets: Tensor | None, scores: Tensor,
) -> None:
    """Enqueue the scores of a group of nodes, written by token id.

    x: [R, T, D]. squares: float32 [R, T], squared norms. order: int32 [R, T]. nodes: int32 [N, 2],
    the largest of them of `largest` tokens. directions: [R, N, S, D], S a power of two. offsets:
    float32 [R, N, S] or None for cosines. scores: float32 [R, T, S].
    """
    trees, tokens, dim = x.shape
    count, slots = directions.shape[1:3]
    spans = triton.cdiv(largest, ROWS * TILES)
    half = directions.dtype == torch.float16
    bound = {"maxnreg": REGISTERS} if half and torch.version.hip is None else {}
    score_kernel[(trees * count * spans,)](
        x, squares, order, nodes, directions, squares if offsets is None else offsets, scores,
        count, spans, tokens, order.stride(0), x.stride(0), x.stride(1),
        D=dim, SLOTS=slots, WIDTH=max(16, slots), TILE=ROWS, SPAN=ROWS * TILES,
        STAGES=STAGES if half else 1, EUCLIDEAN=offsets is not None, num_warps=4, **bound,
    )


@triton.jit
def squared_norm(x):
    """Return the squared norms of rows [n, D], summed in float64 and rounded once.

    Norms decide which tokens are excluded and how rows round: they must not depend on how the sum
    was taken.
    """
    wide = x.to(tl.float64)
    return tl.sum(wide * wide, axis=1).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def norms_kernel(
    x_ptr, square_ptr, tokens, tiles, sxr: tl.int64, sxt: tl.int64,
    D: tl.constexpr, TILE: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    tree = pid // tiles
    i = (pid % tiles) * TILE + tl.arange(0, TILE)
    offs_d = tl.arange(0, D)
    live = i < tokens
    source = x_ptr + tree * sxr + i[:, None] * sxt + offs_d[None, :]
    square = squared_norm(tl.load(source, mask=live[:, None], other=0.0))
    tl.store(square_ptr + tree * tokens + i, square, mask=live)


def launch_tree_norms(x: Tensor) -> Tensor:
    """Enqueue the float32 squared norms [R, T] of rows [R, T, D]."""
    trees, tokens, dim = x.shape
    square = torch.empty(trees, tokens, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(tokens, ROWS)
    norms_kernel[(trees * tiles,)](
        x, square, tokens, tiles, x.stride(0), x.stride(1), D=dim, TILE=ROWS, num_warps=4
    )
    return square
