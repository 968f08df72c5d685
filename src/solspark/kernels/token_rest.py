"""Sum up, for each pair of query blocks, its candidate tokens that no list holds: softmax states.

    b = max(max s, M - 20),  p = rne(255 2^(s - b)) over the tokens of levels above 0, as the exact
    tiles do; high = b of the newest tile, mass = sum p, out = sum p v, in units of 2^high / 255

One program = one (head, 64 pairs, share of the key blocks): the scores of a block's tokens are made
again, as cheaply as they could be read, with the level's byte saying who counts. It reads its share
of K and V once, 16 KiB a block, and writes one state a pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK
from .sol_int8 import NEG, add_values, start_sums, weigh_tile
from .token_levels import token_scores

SHARES = 8


@triton.jit(do_not_specialize=["first_head", "heads", "group", "blocks", "pairs", "shares"])
def token_rest_kernel(
    c_ptr,
    factor_ptr,
    offset_ptr,
    level_ptr,
    k_ptr,
    k_scale_ptr,
    bias_ptr,
    v_ptr,
    high_ptr,
    mass_ptr,
    out_ptr,
    first_head,
    heads,
    group,
    blocks,
    pairs,
    shares,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PTX: tl.constexpr,
):
    pid = tl.program_id(0)
    share = pid % shares
    tiles = tl.cdiv(pairs, TILE)
    tile = pid // shares
    head = (tile // tiles).to(tl.int64)
    bh = first_head + head
    offs_p = (tile % tiles) * TILE + tl.arange(0, TILE)
    real = offs_p < pairs
    pair = head * pairs + offs_p
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    c = tl.load(c_ptr + pair[:, None] * D + offs_d[None, :], mask=real[:, None], other=0)
    factor = tl.load(factor_ptr + pair, mask=real, other=0.0)
    offset = tl.load(offset_ptr + pair, mask=real, other=0.0)
    high = tl.full([TILE], NEG, tl.float32)
    base = high
    mass = tl.zeros([TILE], tl.float32)
    acc = start_sums(out_ptr, 0, 0, D // PARTS, TILE, False)
    if PARTS == 2:
        rest = start_sums(out_ptr, 0, 1, D // PARTS, TILE, False)
    width = tl.cdiv(blocks, shares)
    for n in range(share * width, tl.minimum(share * width + width, blocks)):
        keys = (bh * blocks + n) * ROWS + offs
        k = tl.load(k_ptr + keys[:, None] * D + offs_d[None, :])
        k_scale = tl.load(k_scale_ptr + keys)
        bias = tl.load(bias_ptr + (bh // heads * blocks + n) * ROWS + offs)
        place = (pair * blocks + n)[:, None] * ROWS + offs[None, :]
        level = tl.load(level_ptr + place, mask=real[:, None], other=0)
        s = token_scores(c, factor, offset, k, k_scale, bias)
        s = tl.where(level != 0, s, NEG)
        p, keep, high, base, mass = weigh_tile(s, factor, high, base, mass, True)
        acc = add_values(acc, p, keep, v_ptr, keys, 0, D, PTX)
        if PARTS == 2:
            rest = add_values(rest, p, keep, v_ptr, keys, 1, D, PTX)
    state = (share * group + head) * pairs + offs_p
    tl.store(high_ptr + state, tl.where(mass > 0.0, base, NEG), mask=real)
    tl.store(mass_ptr + state, mass / 255.0, mask=real)
    place = out_ptr + state[:, None] * D + tl.arange(0, D // PARTS)[None, :]
    tl.store(place, acc / 255.0, mask=real[:, None])
    if PARTS == 2:
        tl.store(place + D // PARTS, rest / 255.0, mask=real[:, None])


def launch_token_rest(
    pairs: tuple[Tensor, Tensor, Tensor],
    levels: Tensor,
    key: tuple[Tensor, Tensor, Tensor],
    value: Tensor,
    *,
    first_head: int,
    heads: int,
    parts: int = 1,
    ptx: bool = torch.version.hip is None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Enqueue the states of G heads from `first_head` on, and return them.

    pairs and key: as `launch_token_levels`; levels uint8 [G, P, Tp], value int8 [BH, Tp, D]: all
    contiguous. Returns float32 [S, G, P], [S, G, P] and [S, G, P, D] for S shares of the keys.
    """
    group, count, dim = pairs[0].shape
    blocks = levels.shape[2] // BLOCK
    shares = min(SHARES, blocks)
    high = torch.empty(shares, group, count, device=levels.device)
    mass = torch.empty_like(high)
    out = torch.empty(shares, group, count, dim, device=levels.device)
    token_rest_kernel[(shares * triton.cdiv(count, 64) * group,)](
        *pairs,
        levels,
        *key,
        value.view(torch.int32),
        high,
        mass,
        out,
        first_head,
        heads,
        group,
        blocks,
        count,
        shares,
        D=dim,
        ROWS=BLOCK,
        TILE=64,
        PARTS=parts,
        PTX=ptx,
        num_warps=4,
    )
    return high, mass, out
