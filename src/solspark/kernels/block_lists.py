"""Turn a block mask into ascending lists: counts[r], indices[r, :counts[r]] = kept columns.

One program = one row of the mask. Reads the row once, in chunks, and writes each kept column's
number at the place that a running count gives it. Swapping the mask's last two strides gives the
lists of the other side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["heads", "rows", "columns", "smb", "smh", "smr", "smc"])
def block_lists_kernel(
    mask_ptr,
    index_ptr,
    count_ptr,
    heads,
    rows,
    columns,
    smb: tl.int64,
    smh: tl.int64,
    smr: tl.int64,
    smc: tl.int64,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0) % rows
    bh = (tl.program_id(0) // rows).to(tl.int64)
    line = (bh // heads) * smb + (bh % heads) * smh + row * smr
    out = (bh * rows + row) * columns
    kept = 0
    for start in range(0, columns, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        flag = tl.load(mask_ptr + line + offs * smc, mask=offs < columns, other=0) != 0
        ones = flag.to(tl.int32)
        place = kept + tl.cumsum(ones, 0) - 1
        tl.store(index_ptr + out + place, offs, mask=flag)
        kept += tl.sum(ones, 0)
    tl.store(count_ptr + bh * rows + row, kept)


def launch_block_lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 counts [B, H, R] and indices [B, H, R, C] of a mask int8 [B, H, R, C].

    B and H may be 1 for all. Entries of a row beyond its count are not written.
    """
    batch, heads, rows, columns = mask.shape
    counts = torch.empty(batch, heads, rows, device=mask.device, dtype=torch.int32)
    indices = torch.empty(batch, heads, rows, columns, device=mask.device, dtype=torch.int32)
    # One axis: the others end at 65,535, which batch * heads of small frames can pass.
    block_lists_kernel[(rows * batch * heads,)](
        mask, indices, counts, heads, rows, columns, *mask.stride(), CHUNK=1024, num_warps=4
    )
    return counts, indices
