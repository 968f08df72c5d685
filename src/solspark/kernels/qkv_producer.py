"""Sum the blocks of Q, K and V and quantise their rows to INT8, after norm and RoPE if asked.

    harvest: ksum = sum k, vsum = sum v, vpeak = max |v| over the live rows of a block
    energy: sum x^2 of the rows of Q or of K
    quantise: rne(x / max(absmax / 127, 1e-8)) of the rows R(q f) and R(k / f) - center, f the
    balancing of the channels and R a rotation, where asked; V by its channel's scale; qsum = sum
    q f; and what harvest takes, if asked

One program = one (block of 64 rows, head), and one operand where rows are quantised. Each kernel
reads its inputs once and writes the integers, one byte an element, and the sums, 1/64 of the rows.
A rotation is a product with a +-1 matrix, which L2 holds: 16-bit rows go in as they are, others as
a sum of three bfloat16 terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, block_count
from .quantize import round_even

FLOOR = tl.constexpr(1e-8)


@triton.jit
def round_bfloat16(x):
    """Round to bfloat16's values, half to even, in bits: the interpreter's cast cuts them off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_rope(own_ptr, cross_ptr, token, mask, HALF: tl.constexpr, D: tl.constexpr):
    """Load what each channel of some rows is multiplied by, and the other one of its pair."""
    if HALF > 0:
        offs_d = tl.arange(0, D)[None, :]
        both = mask & (offs_d < 2 * HALF)
        own = tl.load(own_ptr + token * (2 * HALF) + offs_d, mask=both, other=0.0)
        cross = tl.load(cross_ptr + token * (2 * HALF) + offs_d, mask=both, other=0.0)
    else:
        own = 0.0
        cross = 0.0
    return own, cross


@triton.jit
def load_rows(
    x_ptr, token, stride, mask, w_ptr, own, cross, eps, HALF: tl.constexpr, D: tl.constexpr
):
    """Load rows as float32, after norm and split-half RoPE if asked: rounded after each of them."""
    offs_d = tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + token * stride + offs_d, mask=mask, other=0.0).to(tl.float32)
    if HALF > 0:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = round_bfloat16(x * factor * tl.load(w_ptr + offs_d).to(tl.float32))
        # The other channel of the pair comes from L1: it was just read.
        turned = offs_d < 2 * HALF
        other_d = tl.where(offs_d < HALF, offs_d + HALF, offs_d - HALF)
        y = tl.load(x_ptr + token * stride + other_d, mask=mask & turned, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + other_d, mask=turned, other=0.0).to(tl.float32)
        y = round_bfloat16(y * factor * w)
        x = tl.where(turned, round_bfloat16(own * x + cross * y), x)
        x = tl.where(mask, x, 0.0)
    return x


@triton.jit
def store_values(v, block, peaks, offs_d, v_sum_ptr, v_peak_ptr, D: tl.constexpr):
    """Store a block's sums of V, and the largest |V| of each channel."""
    tl.store(v_sum_ptr + block * D + offs_d, round_bfloat16(tl.sum(v, 0)).to(tl.bfloat16))
    tl.store(v_peak_ptr + peaks * D + offs_d, tl.max(tl.abs(v), 0))


@triton.jit(do_not_specialize=["first_block", "blocks"])
def harvest_kernel(
    k_ptr,
    v_ptr,
    length_ptr,
    k_sum_ptr,
    v_sum_ptr,
    v_peak_ptr,
    k_weight_ptr,
    own_ptr,
    cross_ptr,
    eps,
    first_block,
    blocks,
    skt: tl.int64,
    skh: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    HALF: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0)
    h = tl.program_id(1)
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    live = (offs < tl.load(length_ptr + first_block + n))[:, None]
    token = (n * ROWS + offs).to(tl.int64)[:, None]
    own, cross = load_rope(own_ptr, cross_ptr, token, live, HALF, D)
    k = load_rows(k_ptr + h * skh, token, skt, live, k_weight_ptr, own, cross, eps, HALF, D)
    v = tl.load(v_ptr + h * svh + token * svt + offs_d[None, :], mask=live, other=0.0)
    block = h.to(tl.int64) * blocks + first_block + n
    peaks = h.to(tl.int64) * tl.num_programs(0) + n
    tl.store(k_sum_ptr + block * D + offs_d, tl.sum(k, 0))
    store_values(v.to(tl.float32), block, peaks, offs_d, v_sum_ptr, v_peak_ptr, D)


@triton.jit(do_not_specialize=["first_block", "blocks"])
def energy_kernel(
    x_ptr,
    length_ptr,
    sum_ptr,
    weight_ptr,
    own_ptr,
    cross_ptr,
    eps,
    first_block,
    blocks,
    sxt: tl.int64,
    sxh: tl.int64,
    HALF: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0)
    h = tl.program_id(1)
    offs = tl.arange(0, ROWS)
    live = (offs < tl.load(length_ptr + first_block + n))[:, None]
    token = (n * ROWS + offs).to(tl.int64)[:, None]
    own, cross = load_rope(own_ptr, cross_ptr, token, live, HALF, D)
    x = load_rows(x_ptr + h * sxh, token, sxt, live, weight_ptr, own, cross, eps, HALF, D)
    place = (h.to(tl.int64) * blocks + first_block + n) * D + tl.arange(0, D)
    tl.store(sum_ptr + place, tl.sum(x * x, 0))


@triton.jit
def rotate_rows(x, matrix_ptr, norm, PARTS: tl.constexpr, D: tl.constexpr):
    """Multiply float32 rows by the matrix, as a sum of PARTS terms of its type."""
    offs_d = tl.arange(0, D)
    matrix = tl.load(matrix_ptr + offs_d[:, None] * D + offs_d[None, :])
    part = x.to(matrix.dtype)
    y = tl.dot(part, matrix, input_precision="ieee")
    for _ in tl.static_range(1, PARTS):
        x -= part.to(tl.float32)
        part = x.to(matrix.dtype)
        y = tl.dot(part, matrix, y, input_precision="ieee")
    return y * norm


@triton.jit
def store_rows(x, live, rows, offs_d, values_ptr, scales_ptr, D: tl.constexpr):
    """Quantise rows by their own largest value; dead rows become zeros with a scale of zero."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), 127.0), FLOOR)
    y = round_even(tl.div_rn(x, tl.zeros_like(x) + scale[:, None]))
    y = tl.minimum(tl.maximum(y, -127.0), 127.0)
    tl.store(values_ptr + rows[:, None] * D + offs_d[None, :], y.to(tl.int8))
    tl.store(scales_ptr + rows, tl.where(live, scale, 0.0))


@triton.jit(do_not_specialize=["first_block", "blocks"])
def quantise_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    length_ptr,
    center_ptr,
    v_scale_ptr,
    factor_ptr,
    matrix_ptr,
    q8_ptr,
    q_scale_ptr,
    k8_ptr,
    k_scale_ptr,
    v8_ptr,
    q_sum_ptr,
    k_sum_ptr,
    v_sum_ptr,
    v_peak_ptr,
    q_weight_ptr,
    k_weight_ptr,
    own_ptr,
    cross_ptr,
    eps,
    first_block,
    blocks,
    norm,
    sqt: tl.int64,
    sqh: tl.int64,
    skt: tl.int64,
    skh: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    HALF: tl.constexpr,
    BALANCE: tl.constexpr,
    PARTS: tl.constexpr,
    HARVEST: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0)
    h = tl.program_id(1)
    operand = tl.program_id(2)
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    live = offs < tl.load(length_ptr + first_block + n)
    mask = live[:, None]
    token = (n * ROWS + offs).to(tl.int64)[:, None]
    block = h.to(tl.int64) * blocks + first_block + n
    peaks = h.to(tl.int64) * tl.num_programs(0) + n
    rows = block * ROWS + offs

    if operand == 0:
        own, cross = load_rope(own_ptr, cross_ptr, token, mask, HALF, D)
        q = load_rows(q_ptr + h * sqh, token, sqt, mask, q_weight_ptr, own, cross, eps, HALF, D)
        if BALANCE:
            q *= tl.load(factor_ptr + h * D + offs_d)[None, :]
        tl.store(q_sum_ptr + block * D + offs_d, tl.sum(q, 0))
        if PARTS > 0:
            q = rotate_rows(q, matrix_ptr, norm, PARTS, D)
        store_rows(q, live, rows, offs_d, q8_ptr, q_scale_ptr, D)
    elif operand == 1:
        own, cross = load_rope(own_ptr, cross_ptr, token, mask, HALF, D)
        k = load_rows(k_ptr + h * skh, token, skt, mask, k_weight_ptr, own, cross, eps, HALF, D)
        if HARVEST:
            tl.store(k_sum_ptr + block * D + offs_d, tl.sum(k, 0))
        if BALANCE:
            factor = tl.load(factor_ptr + h * D + offs_d)
            k = tl.div_rn(k, tl.zeros_like(k) + factor[None, :])
        # The centre comes balanced and rotated, so that rows are rotated as they were loaded.
        if PARTS > 0:
            k = rotate_rows(k, matrix_ptr, norm, PARTS, D)
        center = tl.load(center_ptr + h * D + offs_d)
        k = tl.where(mask, k - center[None, :], 0.0)
        store_rows(k, live, rows, offs_d, k8_ptr, k_scale_ptr, D)
    else:
        v = tl.load(v_ptr + h * svh + token * svt + offs_d[None, :], mask=mask, other=0.0)
        v = v.to(tl.float32)
        if HARVEST:
            store_values(v, block, peaks, offs_d, v_sum_ptr, v_peak_ptr, D)
        # V beyond the margin of an earlier step's scale is clipped.
        scale = tl.load(v_scale_ptr + h * D + offs_d)
        v = tl.div_rn(v, tl.zeros([ROWS, D], tl.float32) + scale[None, :])
        v = round_even(tl.minimum(tl.maximum(v, -127.0), 127.0))
        tl.store(v8_ptr + rows[:, None] * D + offs_d[None, :], v.to(tl.int8))


@dataclass(frozen=True, eq=False)
class Norm:
    """Norm and RoPE of some rows: bfloat16 weights [D], and eps.

    own and cross: float32 [M, r], what a channel and the other one of its pair are multiplied by.
    """

    query_weight: Tensor
    key_weight: Tensor
    own: Tensor
    cross: Tensor
    eps: float

    @property
    def half(self) -> int:
        """r/2, the distance of the channels of a pair."""
        return self.own.shape[1] // 2


def _pointers(norm: Norm | None) -> tuple[Tensor | None, Tensor | None, Any, Any, float]:
    """Return the arguments of `load_rows`: weights of Q and K, coefficients, eps."""
    if norm is None:
        return None, None, None, None, 0.0
    return norm.query_weight, norm.key_weight, norm.own, norm.cross, norm.eps


def launch_harvest(
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    key_sums: Tensor,
    value_sums: Tensor,
    first_block: int,
    norm: Norm | None,
) -> Tensor:
    """Enqueue the sums of rows [M, H, D] (last stride 1) into [H, N, D]; return |V|'s peaks.

    The rows start at block `first_block`; lengths are int64 [N]. The peaks are float32 [H, M / 64,
    D].
    """
    tokens, heads, dim = key.shape
    some = block_count(tokens)
    peaks = key_sums.new_empty(heads, some, dim)
    harvest_kernel[(some, heads)](
        key,
        value,
        lengths,
        key_sums,
        value_sums,
        peaks,
        *_pointers(norm)[1:],
        first_block,
        key_sums.shape[1],
        *key.stride()[:2],
        *value.stride()[:2],
        HALF=0 if norm is None else norm.half,
        D=dim,
        ROWS=BLOCK,
        num_warps=4,
    )
    return peaks


def launch_energy(
    rows: Tensor, lengths: Tensor, sums: Tensor, first_block: int, norm: Norm | None, *, query: bool
) -> None:
    """Enqueue the sums of squares of rows [M, H, D] (last stride 1) into float32 [H, N, D].

    The rows start at block `first_block` and are those of Q or of K.
    """
    tokens, heads, dim = rows.shape
    query_weight, key_weight, *others = _pointers(norm)
    energy_kernel[(block_count(tokens), heads)](
        rows,
        lengths,
        sums,
        query_weight if query else key_weight,
        *others,
        first_block,
        sums.shape[1],
        *rows.stride()[:2],
        HALF=0 if norm is None else norm.half,
        D=dim,
        ROWS=BLOCK,
        num_warps=4,
    )


def launch_quantise(
    rows: tuple[Tensor, Tensor, Tensor],
    lengths: Tensor,
    key_center: Tensor,
    value_scale: Tensor,
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    value: Tensor,
    query_sums: Tensor,
    statistics: tuple[Tensor, Tensor] | None,
    first_block: int,
    norm: Norm | None,
    *,
    factor: Tensor | None,
    matrix: Tensor | None,
    parts: int,
) -> Tensor | None:
    """Enqueue the integers of rows of Q, K, V [M, H, D] (last stride 1), from `first_block` on.

    query and key are (int8 [H, Tp, D], float32 [H, Tp]), value int8 [H, Tp, D], query_sums float32
    [H, N, D], key_center, value_scale and factor float32 [H, D]: all contiguous. statistics: what
    `launch_harvest` fills in, or None; it returns |V|'s peaks likewise. matrix: the +-1 rotation
    [D, D] of any float type and with it a centre in its basis, or None; rows are multiplied by it
    as a sum of `parts` terms of its type.
    """
    tokens, heads, dim = rows[0].shape
    some = block_count(tokens)
    peaks = None if statistics is None else query_sums.new_empty(heads, some, dim)
    quantise_kernel[(some, heads, 3)](
        *rows,
        lengths,
        key_center,
        value_scale,
        factor,
        matrix,
        *query,
        *key,
        value,
        query_sums,
        *((None, None) if statistics is None else statistics),
        peaks,
        *_pointers(norm),
        first_block,
        query_sums.shape[1],
        dim**-0.5,
        *(stride for item in rows for stride in item.stride()[:2]),
        HALF=0 if norm is None else norm.half,
        BALANCE=factor is not None,
        PARTS=0 if matrix is None else parts,
        HARVEST=statistics is not None,
        D=dim,
        ROWS=BLOCK,
        num_warps=8,
    )
    return peaks
