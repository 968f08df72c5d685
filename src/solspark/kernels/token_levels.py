"""Score every candidate token for the centroid of a pair of query blocks, as a level of one byte.

    s = (c8.k8) f ks + bias - offset,  above = s - reference + 8
    level = 0 no candidate, 1 above < 0, 2 + bin: bins of 0.25 octaves up to 24, then of 2
    most[p, n] = the largest level of block n's tokens, 0 where none is 2 or more

Levels of 130 and more lie beyond the last bin of the histogram, at 88 octaves; they only rank.

One program = one (head, 64 pairs, share of the key blocks): a matrix product of 64 centroids and
the 64 keys of a block at a time. It reads its share of K once, 8 KiB a block, and writes a byte for
each pair and token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK

MASKED = tl.constexpr(-1.0e37)
BELOW = tl.constexpr(8.0)
FINE_SPAN = tl.constexpr(24.0)

# Shares of the key blocks: programs enough for a GPU even where few heads are at work.
SHARES = 16


@triton.jit
def token_scores(c, factor, offset, k, k_scale, bias):
    """Return the scores of keys for centroids, each operation rounded as the specification does."""
    s = tl.dot(c, tl.trans(k), out_dtype=tl.int32).to(tl.float32)
    return s * factor[:, None] * k_scale[None, :] + bias[None, :] - offset[:, None]


@triton.jit(do_not_specialize=["first_head", "heads", "blocks", "words", "pairs", "shares"])
def token_levels_kernel(
    c_ptr,
    factor_ptr,
    offset_ptr,
    reference_ptr,
    candidate_ptr,
    k_ptr,
    k_scale_ptr,
    bias_ptr,
    level_ptr,
    most_ptr,
    first_head,
    heads,
    blocks,
    words,
    pairs,
    shares,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    share = pid % shares
    tiles = tl.cdiv(pairs, TILE)
    rest = pid // shares
    head = (rest // tiles).to(tl.int64)
    bh = first_head + head
    offs_p = (rest % tiles) * TILE + tl.arange(0, TILE)
    real = offs_p < pairs
    pair = head * pairs + offs_p
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    c = tl.load(c_ptr + pair[:, None] * D + offs_d[None, :], mask=real[:, None], other=0)
    factor = tl.load(factor_ptr + pair, mask=real, other=0.0)
    offset = tl.load(offset_ptr + pair, mask=real, other=0.0)
    reference = tl.load(reference_ptr + pair, mask=real, other=0.0)
    width = tl.cdiv(blocks, shares)
    for n in range(share * width, tl.minimum(share * width + width, blocks)):
        keys = (bh * blocks + n) * ROWS + offs
        k = tl.load(k_ptr + keys[:, None] * D + offs_d[None, :])
        k_scale = tl.load(k_scale_ptr + keys)
        bias = tl.load(bias_ptr + (bh // heads * blocks + n) * ROWS + offs)
        s = token_scores(c, factor, offset, k, k_scale, bias)
        word = tl.load(candidate_ptr + pair * words + (n >> 5), mask=real, other=0)
        candidate = (((word >> (n & 31)) & 1) != 0)[:, None] & (bias > MASKED)[None, :]
        above = tl.maximum(s - reference[:, None] + BELOW, -1.0)
        fine = above < FINE_SPAN
        step = tl.where(fine, above * 4.0, (above - FINE_SPAN) * 0.5)
        # Cut off, which is floor above zero.
        level = tl.minimum(step, 255.0).to(tl.int32) + tl.where(fine, 2, 98)
        level = tl.where(above < 0.0, 1, tl.minimum(level, 255))
        level = tl.where(candidate, level, 0)
        place = (pair * blocks + n)[:, None] * ROWS + offs[None, :]
        tl.store(level_ptr + place, level.to(tl.uint8), mask=real[:, None])
        most = tl.max(level, 1).to(tl.float32)
        tl.store(most_ptr + pair * blocks + n, tl.where(most < 2.0, 0.0, most), mask=real)


def launch_token_levels(
    pairs: tuple[Tensor, Tensor, Tensor],
    reference: Tensor,
    candidates: Tensor,
    key: tuple[Tensor, Tensor, Tensor],
    levels: Tensor,
    most: Tensor,
    *,
    first_head: int,
    heads: int,
) -> None:
    """Enqueue levels uint8 [G, P, Tp] and most float32 [G, P, N] of G heads from `first_head` on.

    pairs: centroids int8 [G, P, D], their factors and offsets float32 [G, P]; reference float32 [G,
    P]; candidates int32 [G, P, W]; key: int8 [BH, Tp, D], scales float32 [BH, Tp], bias float32
    [B, Tp]: all contiguous.
    """
    group, count, dim = pairs[0].shape
    blocks = most.shape[2]
    shares = min(SHARES, blocks)
    token_levels_kernel[(shares * triton.cdiv(count, 64) * group,)](
        *pairs,
        reference,
        candidates,
        *key,
        levels,
        most,
        first_head,
        heads,
        blocks,
        candidates.shape[2],
        count,
        shares,
        D=dim,
        ROWS=BLOCK,
        TILE=64,
        num_warps=4,
        # A fused multiply-add would move a score across a bin's edge once in a while.
        enable_fp_fusion=False,
    )
