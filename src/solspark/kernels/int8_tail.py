"""Sum up, for each query block, the key blocks that it does not read exactly: one softmax state.

    high[m] = max S[m, n],  p[n] = 2^(S[m, n] - high[m]),  over the blocks n in no list
    mass[m] = sum p[n] L_n,  out[m] = sum p[n] vsum[n] / vscale
    with tokens: merged with the states of the pair's other candidate tokens

One program = one (head, 32 query blocks), with a running maximum over tiles of 32 key blocks. It
reads its rows of S and of the bits once, and the head's value sums, which L2 holds. P is multiplied
by them as the sum of two terms of their type, which keeps 16 bits of it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

NEG = tl.constexpr(-3.0e38)
MASKED = tl.constexpr(-1.0e37)


@triton.jit(do_not_specialize=["group", "blocks", "words", "pairs", "splits"])
def int8_tail_kernel(
    s_ptr,
    bits_ptr,
    candidate_ptr,
    v_sum_ptr,
    v_scale_ptr,
    length_ptr,
    part_high_ptr,
    part_mass_ptr,
    part_out_ptr,
    high_ptr,
    mass_ptr,
    out_ptr,
    group,
    blocks,
    words,
    pairs,
    splits,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles = tl.cdiv(blocks, ROWS)
    head = (pid // tiles).to(tl.int64)
    first = pid % tiles * ROWS
    offs = tl.arange(0, ROWS)
    offs_m = first + offs
    offs_d = tl.arange(0, D)
    real = offs_m < blocks
    # Offsets inside a tile of rows are 32 bits wide: 64-bit ones would fill the registers.
    row = head * blocks + first
    s_tile = s_ptr + row * blocks
    bits_tile = bits_ptr + row * words
    v_scale = tl.load(v_scale_ptr + head * D + offs_d)
    high = tl.full([ROWS], NEG, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    pair = offs_m // 2

    # The states of the pair's tokens, one for each share of the keys.
    if TOKENS:
        for split in range(splits):
            part = (split * group + head) * pairs
            part_high = tl.load(part_high_ptr + part + pair, mask=real, other=NEG)
            top = tl.maximum(high, part_high)
            keep = tl.exp2(high - top)
            share = tl.exp2(part_high - top)
            part_mass = tl.load(part_mass_ptr + part + pair, mask=real, other=0.0)
            place = pair[:, None] * D + offs_d[None, :]
            part_out = tl.load(part_out_ptr + part * D + place, mask=real[:, None], other=0.0)
            mass = mass * keep + part_mass * share
            acc = acc * keep[:, None] + part_out * share[:, None]
            high = top
        acc *= v_scale[None, :]

    for start in range(0, blocks, COLS):
        lane = tl.arange(0, COLS)
        n = start + lane
        inside = n < blocks
        both = real[:, None] & inside[None, :]
        s = tl.load(s_tile + offs[:, None] * blocks + n[None, :], mask=both, other=0.0)
        # A tile is as wide as a word of bits.
        word = tl.load(bits_tile + offs * words + start // COLS, mask=real, other=-1)
        if TOKENS:
            place = head * pairs * words + pair * words + start // COLS
            word |= tl.load(candidate_ptr + place, mask=real, other=-1)
        left = both & (((word[:, None] >> lane[None, :]) & 1) == 0)
        s = tl.where(left, s, NEG)
        # A row that has seen no block yet must not take 2^0 for what is masked.
        top = tl.maximum(tl.maximum(high, tl.max(s, 1)), MASKED)
        p = tl.exp2(s - top[:, None])
        keep = tl.exp2(high - top)
        length = tl.load(length_ptr + n, mask=inside, other=0).to(tl.float32)
        place = n[:, None] * D + offs_d[None, :]
        v_sum = tl.load(v_sum_ptr + head * blocks * D + place, mask=inside[:, None], other=0.0)
        mass = mass * keep + tl.sum(p * length[None, :], 1)
        p_high = p.to(DOT)
        p_low = (p - p_high.to(tl.float32)).to(DOT)
        acc = tl.dot(p_low, v_sum.to(DOT), acc * keep[:, None], input_precision="ieee")
        acc = tl.dot(p_high, v_sum.to(DOT), acc, input_precision="ieee")
        high = top

    # No block at all: the state of nothing.
    high = tl.where(mass > 0.0, high, NEG)
    tl.store(high_ptr + row + offs, high, mask=real)
    tl.store(mass_ptr + row + offs, mass, mask=real)
    place = offs[:, None] * D + offs_d[None, :]
    tl.store(out_ptr + row * D + place, acc / v_scale[None, :], mask=real[:, None])


def launch_int8_tail(
    scores: Tensor,
    bits: Tensor,
    value_sums: Tensor,
    value_scale: Tensor,
    lengths: Tensor,
    tokens: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None,
    state: tuple[Tensor, Tensor, Tensor],
    *,
    dot: Any = tl.bfloat16,
) -> None:
    """Enqueue the states of G heads: float32 [G, N], [G, N] and [G, N, D].

    scores float32 [G, N, N]; bits int32 [G, N, W], set for exact blocks; value_sums bfloat16 [G, N,
    D], value_scale float32 [G, D], lengths int64 [N]. tokens: the candidates' bits int32 [G, P, W]
    and the states of their other tokens, float32 [S, G, P], [S, G, P], [S, G, P, D], or None. All
    are contiguous. `dot` is the type of the product.
    """
    group, blocks, dim = value_sums.shape
    candidates, parts = (None, (None, None, None)) if tokens is None else tokens
    int8_tail_kernel[(triton.cdiv(blocks, 32) * group,)](
        scores,
        bits,
        candidates,
        value_sums,
        value_scale,
        lengths,
        *parts,
        *state,
        group,
        blocks,
        bits.shape[2],
        triton.cdiv(blocks, 2),
        0 if tokens is None else tokens[1][0].shape[0],
        TOKENS=tokens is not None,
        D=dim,
        ROWS=32,
        COLS=32,
        DOT=dot,
        num_warps=4,
        num_stages=2,
    )
