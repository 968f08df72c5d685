"""One tile of quantised attention, as the forward and both backward kernels compute it.

    c_tu = t_tu f_t,  t_tu = sk_u (q8_t . k8_u),  f_t = scale log2(e) sq_t

A kernel has many compiled variants (token mask or not, of one row or of many, lists or not), and
what one of them gives, every other must give bit for bit on the same visible keys. Two things are
therefore fixed here and not left to the compiler. A product that feeds a sum is written as a fused
multiply-add, since a variant may fuse what another rounds twice. And the token mask is loaded
before the product of Q and K: the layout of the value that is loaded last would otherwise become
that of the logits, and with it the order in which a row's weights are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pack_mask import WORD, launch_pack_mask

LOG2E = tl.constexpr(1.4426950408889634)
# Scales multiply to less than float32 holds; a factor of exactly zero would turn -inf into NaN.
LEAST = tl.constexpr(1.0e-37)
SCALE_ROWS = tl.constexpr(64)


class Operands(NamedTuple):
    """Q, K and V as the kernels read them: [B, L, H, D or Dp], and float32 scales or None.

    Q has a scale a row, [B, H, L]; K and V too, or one a tile, [B, H, ceil(L / 64)]. They lie as
    `launch_quantize` leaves them: whole tiles of scales, each (sample, head) on 16 floats.
    """

    q: Tensor
    q_scales: Tensor | None
    k: Tensor
    k_scales: Tensor | None
    v: Tensor
    v_scales: Tensor | None


class Lists(NamedTuple):
    """Kept blocks of each block row: int32 [B or 1, H or 1, R] and [.., R, C], and block sizes."""

    counts: Tensor
    indices: Tensor
    row_block: int
    column_block: int


class Config(NamedTuple):
    """How a kernel is launched: its tiles, warps and stages; registers caps those of a thread.

    A cap lets more programs share a multiprocessor than the compiler would allow for (0: no cap).
    """

    query_tile: int
    key_tile: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch; only NVIDIA's compiler knows the cap."""
        cap = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **cap}


@triton.jit
def load_rows(base, offs_t, tokens, stride, offs_d, D: tl.constexpr, DP: tl.constexpr):
    # Rows past the end and channels past D are zero, whatever memory holds.
    at = base + offs_t.to(tl.int64)[:, None] * stride + offs_d[None, :]
    inside = (offs_t < tokens)[:, None]
    if D != DP:
        inside = inside & (offs_d < D)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_tile(base, start, offs_n, stride, offs_d, D: tl.constexpr, DP: tl.constexpr):
    # As `load_rows` where every row exists.
    at = base + (start + offs_n).to(tl.int64)[:, None] * stride + offs_d[None, :]
    if D != DP:
        return tl.load(at, mask=(offs_d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def product(a, b_t):
    # INT8 sums exactly in int32, the rest in float32, without TF32's ten bits.
    return tl.dot(a, b_t, input_precision="ieee").to(tl.float32)


@triton.jit
def load_mask(
    mask_row,
    start,
    offs_m,
    offs_n,
    query_tokens,
    key_tokens,
    smm,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_STEP: tl.constexpr,
    CHECK: tl.constexpr,
):
    # Flags (MASK 1) or added logits (MASK 2), [BM or 1, BN]; zero past the ends (CHECK: of keys).
    seen = offs_n >= 0
    if CHECK:
        seen = offs_n < key_tokens
    if MASK_ROWS:
        rows = mask_row + offs_m.to(tl.int64) * smm
        live = offs_m < query_tokens
        if MASK == 1:
            # Packed: a word holds the flags of 64 keys.
            word = tl.load(rows + start // WORD, mask=live, other=0)
            given = (word[:, None] >> (offs_n % WORD).to(tl.int64)[None, :]) & 1
        else:
            at = rows[:, None] + (offs_n * MASK_STEP)[None, :]
            given = tl.load(at, mask=live[:, None] & seen[None, :], other=0.0)
    elif MASK:
        given = tl.load(mask_row + offs_n * MASK_STEP, mask=seen, other=0)[None, :]
    else:
        given = 0
    return given


@triton.jit
def tile_logits(
    q,
    k,
    factor,
    given,
    ks_row,
    start,
    offs_m,
    offs_n,
    key_tokens,
    QK: tl.constexpr,
    TILE: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHECK: tl.constexpr,
):
    # Return t and the factor that makes logits of it; -inf where a key is hidden. CHECK: by the end
    # or causality, too, which tiles before both cannot be.
    t = product(q, tl.trans(k))
    if QK:
        if TILE:
            factor = tl.maximum(factor * tl.load(ks_row + start // SCALE_ROWS), LEAST)
        else:
            t *= tl.load(ks_row + offs_n)[None, :]
    if MASK == 2:
        t = tl.fma(t, factor[:, None], given.to(tl.float32) * LOG2E)
        factor = factor * 0.0 + 1.0
    if MASK == 1 or CHECK:
        if MASK == 1:
            # Flags past the end are zero.
            seen = given != 0
        else:
            seen = (offs_n < key_tokens)[None, :]
        if CHECK and CAUSAL:
            seen = seen & (offs_n[None, :] <= offs_m[:, None])
        t = tl.where(seen, t, float("-inf"))
    return t, factor


@triton.jit
def weights(t, factor, top):
    # 2^(t f - top) for rows of t, rounded once before the power.
    return tl.exp2(tl.fma(t, factor[:, None], -top[:, None]))


def mask_arguments(
    attn_mask: Tensor | None,
) -> tuple[Tensor | None, tuple[int, int, int], dict[str, int | bool]]:
    """Return a mask as kernels read it, strides of its sample, head and row, and the constants.

    Flags of one row for all queries stay bytes; those of many rows become words of 64.
    """
    if attn_mask is None:
        return None, (0, 0, 0), {"MASK": 0, "MASK_ROWS": False, "MASK_STEP": 0}
    mask, many = attn_mask, attn_mask.shape[2] > 1
    if mask.stride(3) not in (0, 1):
        mask = mask.contiguous()
    constants = {"MASK": 2, "MASK_ROWS": many, "MASK_STEP": mask.stride(3)}
    if not mask.is_floating_point():
        mask = mask.view(torch.int8)
        constants["MASK"] = 1
        if many:
            mask = launch_pack_mask(mask)
            constants["MASK_STEP"] = 1
    batch, head, row = (
        0 if size == 1 else stride
        for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True)
    )
    return mask, (batch, head, row), constants


def list_strides(lists: Lists | None) -> tuple[int, int]:
    """Return how many rows of lists one sample and one head advance, 0 where one serves all."""
    if lists is None:
        return 0, 0
    batch, heads, rows = lists.counts.shape
    return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)


def scale_groups(*scales: Tensor | None) -> int:
    """Return from how many groups of 16 floats a head's scales are made, 0 where there are none.

    Kernels multiply by 16 again: that tells the compiler how a row of scales is aligned.
    """
    found = {x.stride(1) for x in scales if x is not None}
    return max(found, default=0) // 16
