"""Quantise rows of Q, K or V: rotate, subtract a mean, scale by the largest, round.

    y = rotate(x) - shift,  values = round(y * (largest / m)),  scales = m / largest,  m = max |y|

One program = one (64 tokens, head, sample). Reads x once and the rotation matrix (L2 holds it),
writes one byte (two for fp16) an element and one float a token or a tile. The mean over tokens is
a launch of its own: a program sums a share of the tokens of one head, torch adds the shares.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, block_count

STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp16": torch.float16}
LARGEST = {"int8": 127.0, "fp8": 448.0, "fp16": 65504.0}
# Adding and subtracting it rounds a float32 below 2^22 to an integer, half to even.
ROUNDER = tl.constexpr(12582912.0)
FLOOR = tl.constexpr(1e-30)


@triton.jit
def round_even(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit(do_not_specialize=["tokens", "heads", "scale_stride", "largest", "norm"])
def quantize_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    shift_ptr,
    rotation_ptr,
    tokens,
    heads,
    scale_stride,
    largest,
    norm,
    sxb: tl.int64,
    sxt: tl.int64,
    sxh: tl.int64,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ROTATE: tl.constexpr,
    SHIFT: tl.constexpr,
    ROUND: tl.constexpr,
):
    # One dimension: the others hold 65,535 programs at most.
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, ROWS)
    tile = pid % tiles
    bh = pid // tiles
    h = bh % heads
    b = (bh // heads).to(tl.int64)
    offs_t = tile * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, DP)
    live = offs_t < tokens
    x = tl.load(
        x_ptr + b * sxb + h * sxh + offs_t.to(tl.int64)[:, None] * sxt + offs_d[None, :],
        mask=live[:, None] & (offs_d[None, :] < D),
        other=0.0,
    )

    # The matrix is +-1, exact in any type: only the sum rounds, in float32.
    if ROTATE:
        matrix = tl.load(rotation_ptr + offs_d[:, None] * DP + offs_d[None, :])
        y = tl.dot(x, matrix, input_precision="ieee") * norm
    else:
        y = x.to(tl.float32)
    if SHIFT:
        y -= tl.load(shift_ptr + (b * heads + h) * DP + offs_d)[None, :]
    y = tl.where(live[:, None], y, 0.0)

    # The largest of a row or of the tile; zeros keep a scale above zero.
    top = tl.max(tl.abs(y), 1)
    scale_row = scales_ptr + (b * heads + h) * scale_stride
    if TILE:
        top = tl.zeros_like(top) + tl.max(top, 0)
        top = tl.maximum(top, FLOOR)
        tl.store(scale_row + tile + offs_t * 0, tl.div_rn(top, largest), mask=offs_t == tile * ROWS)
    else:
        top = tl.maximum(top, FLOOR)
        # Rows past the end too: whoever reads scales by the tile finds a finite number.
        tl.store(scale_row + offs_t, tl.div_rn(top, largest))
    inverse = tl.div_rn(tl.zeros_like(top) + largest, top)
    y = tl.minimum(tl.maximum(y * inverse[:, None], -largest), largest)
    if ROUND:
        y = round_even(y)
    out = ((b * tokens + offs_t) * heads + h)[:, None] * DP + offs_d[None, :]
    tl.store(values_ptr + out, y.to(values_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["tokens", "heads", "shares", "share_tokens"])
def mean_kernel(
    x_ptr,
    parts_ptr,
    tokens,
    heads,
    shares,
    share_tokens,
    sxb: tl.int64,
    sxt: tl.int64,
    sxh: tl.int64,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    share = pid % shares
    bh = pid // shares
    h = bh % heads
    b = (bh // heads).to(tl.int64)
    offs_d = tl.arange(0, DP)
    total = tl.zeros([ROWS, DP], dtype=tl.float32)
    first = share * share_tokens
    for start in range(first, tl.minimum(first + share_tokens, tokens), ROWS):
        offs_t = start + tl.arange(0, ROWS)
        x = tl.load(
            x_ptr + b * sxb + h * sxh + offs_t.to(tl.int64)[:, None] * sxt + offs_d[None, :],
            mask=(offs_t < tokens)[:, None] & (offs_d[None, :] < D),
            other=0.0,
        )
        total += x.to(tl.float32)
    out = ((b * heads + h) * shares + share) * D + offs_d
    tl.store(parts_ptr + out, tl.sum(total, 0), mask=offs_d < D)


def launch_mean(x: Tensor) -> Tensor:
    """Return the mean over tokens, float32 [B, H, D], of x [B, L, H, D] with last stride 1.

    The order of summation depends on L alone, so that strides do not change the result.
    """
    batch, tokens, heads, dim = x.shape
    share_tokens = BLOCK * max(1, block_count(tokens) // 64)
    shares = -(-tokens // share_tokens)
    parts = torch.empty(batch, heads, shares, dim, device=x.device, dtype=torch.float32)
    mean_kernel[(shares * heads * batch,)](
        x,
        parts,
        tokens,
        heads,
        shares,
        share_tokens,
        *x.stride()[:3],
        D=dim,
        DP=triton.next_power_of_2(dim),
        ROWS=32,
        num_warps=4,
    )
    return parts.sum(2) / tokens


def launch_quantize(
    x: Tensor,
    *,
    dtype: str,
    granularity: str,
    shift: Tensor | None,
    rotation: Tensor | None,
    rotation_group: int,
) -> tuple[Tensor, Tensor]:
    """Enqueue the quantisation of x [B, L, H, D] (last stride 1); return values and scales.

    Each (sample, head) has whole tiles of row scales, those past the end finite; tile scales begin
    on 16 floats. The scales' last dimension is a slice of that.

    shift: float32 [B, H, Dp] contiguous, already rotated, or None. rotation: the +-1 matrix
    [Dp, Dp] in x's type, block-diagonal in groups of `rotation_group`, or None.
    """
    batch, tokens, heads, dim = x.shape
    padded = max(16, triton.next_power_of_2(dim))
    tile = granularity == "tile"
    scale_count = block_count(tokens) if tile else tokens
    values = torch.empty(batch, tokens, heads, padded, device=x.device, dtype=STORAGE[dtype])
    scale_stride = -(-scale_count // 16) * 16 if tile else block_count(tokens) * BLOCK
    scales = torch.empty(batch, heads, scale_stride, device=x.device, dtype=torch.float32)
    quantize_kernel[(block_count(tokens) * heads * batch,)](
        x,
        values,
        scales,
        scales if shift is None else shift,
        x if rotation is None else rotation,
        tokens,
        heads,
        scale_stride,
        LARGEST[dtype],
        1.0 / math.sqrt(max(1, rotation_group)),
        *x.stride()[:3],
        D=dim,
        DP=padded,
        ROWS=BLOCK,
        TILE=tile,
        ROTATE=rotation is not None,
        SHIFT=shift is not None,
        ROUND=dtype == "int8",
        num_warps=4,
    )
    return values, scales[..., :scale_count]
