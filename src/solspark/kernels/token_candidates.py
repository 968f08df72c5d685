"""Find the blocks whose tokens a pair of query blocks may read one by one, and their highest score.

    candidate[p, n] = neither 2p nor 2p + 1 reads n exactly, and n is not barred
    reference[p] = max of S[2p, n] and S[2p + 1, n] over the candidates n

One program = one (head, pair of query blocks), one warp. It reads two rows of bits and of scores
once and writes a row of packed bits. A last pair of one block is its own partner.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Key blocks that one warp handles at a time.
CHUNK = 512


@triton.jit(do_not_specialize=["first_head", "heads", "blocks", "words", "pairs"])
def token_candidates_kernel(
    s_ptr,
    bits_ptr,
    barred_ptr,
    candidate_ptr,
    reference_ptr,
    first_head,
    heads,
    blocks,
    words,
    pairs,
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(0)
    pair = pid % pairs
    head = (pid // pairs).to(tl.int64)
    barred = barred_ptr + (first_head + head) // heads * blocks
    row = head * blocks + pair * 2
    partner = head * blocks + tl.minimum(pair * 2 + 1, blocks - 1)
    offs_w = tl.arange(0, CHUNK // 32)
    lane = tl.arange(0, 32)
    highest = tl.full([CHUNK // 32, 32], float("-inf"), tl.float32)
    for start in range(0, blocks, CHUNK):
        word = start // 32 + offs_w
        real = word < words
        taken = tl.load(bits_ptr + row * words + word, mask=real, other=-1)
        taken |= tl.load(bits_ptr + partner * words + word, mask=real, other=-1)
        n = start + offs_w[:, None] * 32 + lane[None, :]
        inside = n < blocks
        free = inside & (((taken[:, None] >> lane[None, :]) & 1) == 0)
        free = free & (tl.load(barred + n, mask=inside, other=1) == 0)
        packed = tl.sum(free.to(tl.int32) << lane[None, :], 1)
        tl.store(candidate_ptr + pid.to(tl.int64) * words + word, packed, mask=real)
        s = tl.load(s_ptr + row * blocks + n, mask=free, other=float("-inf"))
        other = tl.load(s_ptr + partner * blocks + n, mask=free, other=float("-inf"))
        highest = tl.maximum(highest, tl.maximum(s, other))
    tl.store(reference_ptr + pid, tl.max(tl.max(highest, 1), 0))


def launch_token_candidates(
    scores: Tensor,
    bits: Tensor,
    barred: Tensor,
    candidates: Tensor,
    reference: Tensor,
    *,
    first_head: int,
    heads: int,
) -> None:
    """Enqueue candidates int32 [G, P, W] and reference float32 [G, P] of G heads.

    The G heads are those from `first_head` on, counted through samples of `heads` each. scores
    float32 [G, N, N], bits int32 [G, N, W], barred uint8 [B, N]: all contiguous.
    """
    group, blocks, words = bits.shape
    pairs = candidates.shape[1]
    token_candidates_kernel[(pairs * group,)](
        scores,
        bits,
        barred,
        candidates,
        reference,
        first_head,
        heads,
        blocks,
        words,
        pairs,
        CHUNK=CHUNK,
        num_warps=1,
    )
