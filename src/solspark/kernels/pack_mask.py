"""Pack a token mask into words: bit u % 64 of word u // 64 is set where key u may be seen.

One program = one row of the mask (a query of one head and sample). Reads the row once, 64 keys of
32 words at a time, and writes its words once. A kernel that attends then reads one word a row and
tile of keys instead of 64 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = tl.constexpr(64)


@triton.jit(do_not_specialize=["heads", "rows", "columns", "words", "smb", "smh", "smr"])
def pack_mask_kernel(
    mask_ptr,
    word_ptr,
    heads,
    rows,
    columns,
    words,
    smb: tl.int64,
    smh: tl.int64,
    smr: tl.int64,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    bh = pid // rows
    line = mask_ptr + (bh // heads) * smb + (bh % heads) * smh + row * smr
    bits = tl.arange(0, WORD)
    for start in range(0, words, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        keys = offs[:, None] * WORD + bits[None, :]
        seen = tl.load(line + keys * STEP, mask=keys < columns, other=0) != 0
        # The bits are distinct, so their sum is their union.
        packed = tl.sum(seen.to(tl.int64) << bits.to(tl.int64)[None, :], 1)
        tl.store(word_ptr + pid * words + offs, packed, mask=offs < words)


def launch_pack_mask(mask: Tensor) -> Tensor:
    """Return int64 [B, H, Lq, ceil(Lk / 64)] of a mask int8 [B, H, Lq, Lk], last stride 0 or 1."""
    batch, heads, rows, columns = mask.shape
    words = -(-columns // 64)
    packed = torch.empty(batch, heads, rows, words, device=mask.device, dtype=torch.int64)
    pack_mask_kernel[(batch * heads * rows,)](
        mask,
        packed,
        heads,
        rows,
        columns,
        words,
        *mask.stride()[:3],
        STEP=mask.stride(3),
        CHUNK=32,
        num_warps=4,
    )
    return packed
