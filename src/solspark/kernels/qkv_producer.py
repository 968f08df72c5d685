"""Sum the blocks of Q, K and V and quantise their rows to INT8, after norm and RoPE if asked.

    harvest: ksum = sum k, vsum = sum v, vpeak = max |v| over the live rows of a block
    quantise: rne(x / max(absmax / 127, 1e-8)) of the rows of Q and of K - center; V by its
    channel's scale; qsum = sum q

One program = one (block of 64 rows, head). Each kernel reads its inputs once and writes the
integers, one byte an element, and the sums, 1/64 of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
def load_rows(
    x_ptr,
    token,
    stride,
    mask,
    w_ptr,
    freq_ptr,
    eps,
    half,
    NORM: tl.constexpr,
    D: tl.constexpr,
):
    """Load rows as float32, after norm and split-half RoPE if asked: rounded after each of them."""
    offs_d = tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + token * stride + offs_d, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = round_bfloat16(x * factor * tl.load(w_ptr + offs_d).to(tl.float32))
        # The other channel of the pair comes from L1: it was just read.
        low = offs_d < half
        turned = offs_d < 2 * half
        other_d = tl.where(low, offs_d + half, offs_d - half)
        both = mask & turned
        y = tl.load(x_ptr + token * stride + other_d, mask=both, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + other_d, mask=turned, other=0.0).to(tl.float32)
        y = round_bfloat16(y * factor * w)
        pair = freq_ptr + (token * half + tl.where(low, offs_d, other_d)) * 4
        own = tl.load(pair + tl.where(low, 0, 3), mask=both, other=0.0)
        cross = tl.load(pair + tl.where(low, 1, 2), mask=both, other=0.0)
        x = tl.where(turned, round_bfloat16(own * x + cross * y), x)
        x = tl.where(mask, x, 0.0)
    return x


@triton.jit(do_not_specialize=["first_block", "blocks", "half"])
def harvest_kernel(
    k_ptr,
    v_ptr,
    length_ptr,
    k_sum_ptr,
    v_sum_ptr,
    v_peak_ptr,
    k_weight_ptr,
    freq_ptr,
    eps,
    half,
    first_block,
    blocks,
    skt: tl.int64,
    skh: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    NORM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0)
    h = tl.program_id(1)
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    live = (offs < tl.load(length_ptr + first_block + n))[:, None]
    token = (n * ROWS + offs).to(tl.int64)[:, None]
    k = load_rows(k_ptr + h * skh, token, skt, live, k_weight_ptr, freq_ptr, eps, half, NORM, D)
    v = tl.load(v_ptr + h * svh + token * svt + offs_d[None, :], mask=live, other=0.0)
    v = v.to(tl.float32)

    place = (h.to(tl.int64) * blocks + first_block + n) * D + offs_d
    tl.store(k_sum_ptr + place, tl.sum(k, 0))
    tl.store(v_sum_ptr + place, round_bfloat16(tl.sum(v, 0)).to(tl.bfloat16))
    peaks = (h.to(tl.int64) * tl.num_programs(0) + n) * D + offs_d
    tl.store(v_peak_ptr + peaks, tl.max(tl.abs(v), 0))


@triton.jit
def store_rows(x, live, rows, offs_d, values_ptr, scales_ptr, D: tl.constexpr):
    """Quantise rows by their own largest value; dead rows become zeros with a scale of zero."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), 127.0), FLOOR)
    y = round_even(tl.div_rn(x, tl.zeros_like(x) + scale[:, None]))
    y = tl.minimum(tl.maximum(y, -127.0), 127.0)
    tl.store(values_ptr + rows[:, None] * D + offs_d[None, :], y.to(tl.int8))
    tl.store(scales_ptr + rows, tl.where(live, scale, 0.0))


@triton.jit(do_not_specialize=["first_block", "blocks", "half"])
def quantise_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    length_ptr,
    center_ptr,
    v_scale_ptr,
    q8_ptr,
    q_scale_ptr,
    k8_ptr,
    k_scale_ptr,
    v8_ptr,
    q_sum_ptr,
    q_weight_ptr,
    k_weight_ptr,
    freq_ptr,
    eps,
    half,
    first_block,
    blocks,
    sqt: tl.int64,
    sqh: tl.int64,
    skt: tl.int64,
    skh: tl.int64,
    svt: tl.int64,
    svh: tl.int64,
    NORM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0)
    h = tl.program_id(1)
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    live = offs < tl.load(length_ptr + first_block + n)
    mask = live[:, None]
    token = (n * ROWS + offs).to(tl.int64)[:, None]
    block = h.to(tl.int64) * blocks + first_block + n
    rows = block * ROWS + offs

    q = load_rows(q_ptr + h * sqh, token, sqt, mask, q_weight_ptr, freq_ptr, eps, half, NORM, D)
    tl.store(q_sum_ptr + block * D + offs_d, tl.sum(q, 0))
    store_rows(q, live, rows, offs_d, q8_ptr, q_scale_ptr, D)

    k = load_rows(k_ptr + h * skh, token, skt, mask, k_weight_ptr, freq_ptr, eps, half, NORM, D)
    center = tl.load(center_ptr + h * D + offs_d)
    k = tl.where(mask, k - center[None, :], 0.0)
    store_rows(k, live, rows, offs_d, k8_ptr, k_scale_ptr, D)

    # V beyond the margin of an earlier step's scale is clipped.
    v = tl.load(v_ptr + h * svh + token * svt + offs_d[None, :], mask=mask, other=0.0)
    scale = tl.load(v_scale_ptr + h * D + offs_d)
    v = tl.div_rn(v.to(tl.float32), tl.zeros([ROWS, D], tl.float32) + scale[None, :])
    v = round_even(tl.minimum(tl.maximum(v, -127.0), 127.0))
    tl.store(v8_ptr + rows[:, None] * D + offs_d[None, :], v.to(tl.int8))


@dataclass(frozen=True, eq=False)
class Norm:
    """Norm and RoPE of some rows: bfloat16 weights [D], float32 freqs [M, r/2, 2, 2], eps."""

    query_weight: Tensor
    key_weight: Tensor
    freqs: Tensor
    eps: float


def _pointers(norm: Norm | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, float, int]:
    """Return the arguments of `load_rows`: weights of Q and K, freqs, eps, r/2."""
    if norm is None:
        return unused, unused, unused, 0.0, 0
    return norm.query_weight, norm.key_weight, norm.freqs, norm.eps, norm.freqs.shape[1]


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
        *_pointers(norm, key)[1:],
        first_block,
        key_sums.shape[1],
        *key.stride()[:2],
        *value.stride()[:2],
        NORM=norm is not None,
        D=dim,
        ROWS=BLOCK,
        num_warps=4,
    )
    return peaks


def launch_quantise(
    rows: tuple[Tensor, Tensor, Tensor],
    lengths: Tensor,
    key_center: Tensor,
    value_scale: Tensor,
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    value: Tensor,
    query_sums: Tensor,
    first_block: int,
    norm: Norm | None,
) -> None:
    """Enqueue the integers of rows of Q, K, V [M, H, D] (last stride 1), from `first_block` on.

    query and key are (int8 [H, Tp, D], float32 [H, Tp]), value int8 [H, Tp, D], query_sums float32
    [H, N, D], key_center and value_scale float32 [H, D]: all contiguous.
    """
    tokens, heads, dim = rows[0].shape
    quantise_kernel[(block_count(tokens), heads)](
        *rows,
        lengths,
        key_center,
        value_scale,
        *query,
        *key,
        value,
        query_sums,
        *_pointers(norm, rows[0]),
        first_block,
        query_sums.shape[1],
        *(stride for item in rows for stride in item.stride()[:2]),
        NORM=norm is not None,
        D=dim,
        ROWS=BLOCK,
        num_warps=4,
    )
