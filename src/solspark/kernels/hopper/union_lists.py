"""Union of the exact lists of neighbouring query blocks, with one flag a query block.

    entry = key_block << 4 | flags,  flag c set iff query block GROUP * g + c reads key block

One program per (group of query blocks, batch·head). Entries ascend, so the only key block that can
be ragged comes last. Reads the plan's packed bits once, writes at most one word a key block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import BlockPlan


# fmt: off
@triton.jit(
    do_not_specialize=[
        "groups", "heads", "query_blocks", "key_blocks", "words", "width", "spb", "sph",
    ]
)
def union_lists_kernel(
    bits_ptr, entry_ptr, count_ptr, groups, heads, query_blocks, key_blocks, words,
    width, spb: tl.int64, sph: tl.int64, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):
    pid = tl.program_id(0)
    g = pid % groups
    bh = (pid // groups).to(tl.int64)
    base = bits_ptr + (bh // heads) * spb + (bh % heads) * sph
    row = bh * groups + g
    written = tl.full([], 0, tl.int32)
    # Flags of a chunk of key blocks at a time; a running count says where its entries go.
    for start in range(0, key_blocks, CHUNK):
        j = start + tl.arange(0, CHUNK)
        flags = tl.zeros([CHUNK], dtype=tl.int32)
        for c in tl.static_range(GROUP):
            i = g * GROUP + c
            # A query block past the last one reads nothing.
            columns = tl.where(i < query_blocks, key_blocks, 0)
            word = tl.load(
                base + i.to(tl.int64) * words + (j >> 5), mask=j < columns, other=0
            )
            flags += ((word >> (j & 31)) & 1) << c
        wanted = (flags != 0).to(tl.int32)
        place = written + tl.cumsum(wanted, axis=0) - 1
        tl.store(entry_ptr + row * width + place, (j << 4) | flags, mask=wanted != 0)
        written += tl.sum(wanted)
    tl.store(count_ptr + row, written)


def launch_union_lists(plan: BlockPlan, group: int) -> tuple[Tensor, Tensor]:
    """Enqueue the unions; return int32 entries [B, H, G, width] and counts [B, H, G].

    G = ceil(NQ / group), group <= 4; width is what lists of the plan's width can unite to. Rows of
    the plan's bits are contiguous.
    """
    batch, heads, nq = plan.counts.shape
    groups = triton.cdiv(nq, group)
    width = max(1, min(plan.key_blocks, group * plan.indices.shape[3]))
    entries = torch.empty(
        batch, heads, groups, width, device=plan.bits.device, dtype=torch.int32
    )
    counts = torch.empty(batch, heads, groups, device=plan.bits.device, dtype=torch.int32)
    union_lists_kernel[(batch * heads * groups,)](
        plan.bits, entries, counts, groups, heads, nq, plan.key_blocks, plan.bits.shape[3],
        width, plan.bits.stride(0), plan.bits.stride(1), GROUP=group, CHUNK=1024, num_warps=4,
    )
    return entries, counts
