"""Read each query block's exact key blocks in INT8, on top of the state of its other blocks.

    x = (q.k) ks,  s = f x + bias,  f = a qs,  b = max(rowmax s, M - 20)
    p = rne(255 2^(s - b)),  A' = A 2^(b_before - b) + p v,  L' likewise with 1 for v
    out = A / L * vscale  [+ gate * coarse]

A and L are kept in units of the newest tile's b, so that the product with V adds to them as it is
and a tile's bytes have their full range: one multiplication an element of A a tile.

One program = one (query block, head): 64 rows of Q in shared memory. It reads the K and V tiles of
its list, 16 KiB a tile, from L2 where neighbours share them, then the rows of its pair's token
list, gathered, and writes its rows once. Q K^T is int8 x int8; V is widened to float16, which holds
every byte of P and V exactly, for an int8 product would need V transposed and its int32 results
converted, scaled and added in registers. Only the last block can hold rows past T: it is the last
of its ascending list, so that the main loop masks nothing.

On sm_90 (triton 3.6) the main loop is 590 instructions a warp and tile, both products are wgmma and
167 registers a thread let three programs share an SM; 1,049 and two with an int8 product of P and
V. Predicted, not yet run: 600 to 750 cycles a tile, 7.4 million tiles at T = 73,584, H = 56, 10 %,
so 20 to 25 ms. Where products are mma.sync (sm_89), 880 instructions and no spills with the sums in
two halves, 1,240 and spills in one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, QuantizedQKV
from .quantize import ROUNDER

NEG = tl.constexpr(-3.0e38)
MASKED = tl.constexpr(-1.0e37)
OCTAVES = tl.constexpr(20.0)
LOG2_255 = tl.constexpr(7.994353436858858)
ROUNDER_BITS = tl.constexpr(0x4B400000)

# Depth of the ring of K and V tiles; AMD's 64 KiB hold two.
NUM_STAGES = 3 if torch.version.hip is None else 2

# Three programs of 128 threads share an SM. What little a variant spills, it spills outside the
# main loop.
REGISTERS = 168


@triton.jit
def widen(words, PTX: tl.constexpr):
    """Turn words of four int8 into float16, four times as many columns, in the bytes' order.

    A byte + 128 becomes the mantissa of 1024. Joining the bytes, unlike an element-wise cast of
    them, keeps the compiler from reading V byte by byte where a product is mma.sync.
    """
    if PTX:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes, bias, low, high;
            xor.b32 bytes, $4, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 low, bytes, 0x64646464, 0x5140;
            prmt.b32 high, bytes, 0x64646464, 0x7362;
            sub.f16x2 low, low, bias;
            sub.f16x2 high, high, bias;
            mov.b32 {$0, $1}, low;
            mov.b32 {$2, $3}, high;
            }
            """,
            "=h,=h,=h,=h,r",
            args=[words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        first = (words << 24 >> 24).to(tl.float16)
        second = (words << 16 >> 24).to(tl.float16)
        third = (words << 8 >> 24).to(tl.float16)
        fourth = (words >> 24).to(tl.float16)
    bytes = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(bytes, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def weigh_tile(s, factor, high, base, mass, SCALED: tl.constexpr):
    """Return a tile's weights, 0 to 255 in float16, for scores still to be scaled unless SCALED.

    The state is a running maximum, the maximum `base` of the newest tile, and mass in units of
    2^base / 255; `keep` brings sums to the new base. A masked score is below all that the smallest
    `base` allows.
    """
    if SCALED:
        peak = tl.max(s, 1)
    else:
        peak = tl.max(s, 1) * factor
    # Every tile has the bytes' full range, unless it is far below what was seen.
    peak = tl.maximum(tl.maximum(peak, high - OCTAVES), MASKED)
    lift = peak - LOG2_255
    if SCALED:
        p = tl.exp2(s - lift[:, None])
    else:
        p = tl.exp2(s * factor[:, None] - lift[:, None])
    p += ROUNDER
    count = tl.sum(p.to(tl.int32, bitcast=True) - ROUNDER_BITS, 1)
    keep = tl.exp2(base - peak)
    mass = mass * keep + count.to(tl.float32)
    return (p - ROUNDER).to(tl.float16), keep, tl.maximum(high, peak), peak, mass


@triton.jit
def add_values(acc, p, keep, v_ptr, keys, PART: tl.constexpr, D: tl.constexpr, PTX: tl.constexpr):
    """Add the weighed values of some keys to sums over the PARTth share of the channels."""
    WORDS: tl.constexpr = acc.shape[1] // 4
    offs = PART * WORDS + tl.arange(0, WORDS)
    words = tl.load(v_ptr + keys[:, None] * (D // 4) + offs[None, :])
    return tl.dot(p, widen(words, PTX), acc * keep[:, None])


@triton.jit
def start_sums(
    tail_ptr, row, PART: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr
):
    """Return the sums of a share of the channels before any tile: the tail's row, or none."""
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if TAIL:
        tail = tl.load(tail_ptr + row + PART * WIDTH + tl.arange(0, WIDTH)) * 255.0
        acc += tail[None, :]
    return acc


@triton.jit(do_not_specialize=["heads", "blocks", "tokens", "width", "budget", "sgb"])
def sol_int8_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    k_scale_ptr,
    bias_ptr,
    v_ptr,
    v_scale_ptr,
    shift_ptr,
    tail_high_ptr,
    tail_mass_ptr,
    tail_out_ptr,
    index_ptr,
    count_ptr,
    token_ptr,
    token_count_ptr,
    length_ptr,
    out_ptr,
    gate_ptr,
    coarse_ptr,
    a,
    heads,
    blocks,
    tokens,
    width,
    budget,
    sgb: tl.int64,
    sgt: tl.int64,
    sgh: tl.int64,
    TAIL: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    GATE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    PTX: tl.constexpr,
):
    pid = tl.program_id(0)
    m = pid % blocks
    bh = (pid // blocks).to(tl.int64)
    b = bh // heads
    h = bh % heads
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    WIDTH: tl.constexpr = D // PARTS
    state = bh * blocks + m
    first = bh * blocks * ROWS
    rows = state * ROWS + offs
    q = tl.load(q_ptr + rows[:, None] * D + offs_d[None, :])
    factor = tl.load(q_scale_ptr + rows) * a

    # The tail is centred by this call's mean, exact keys by key_center: move it to their origin.
    if TAIL:
        shift = tl.load(shift_ptr + bh * D + offs_d)
        tail_high = tl.load(tail_high_ptr + state)
        high = tail_high + tl.sum(q.to(tl.float32) * shift[None, :], 1) * factor
        high = tl.where(tail_high > MASKED, high, NEG)
        mass = tl.zeros([ROWS], tl.float32) + tl.load(tail_mass_ptr + state) * 255.0
    else:
        high = tl.full([ROWS], NEG, tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
    base = high
    acc = start_sums(tail_out_ptr, state * D, 0, WIDTH, ROWS, TAIL)
    if PARTS == 2:
        rest = start_sums(tail_out_ptr, state * D, 1, WIDTH, ROWS, TAIL)

    # A block number is fetched one tile ahead: 2-byte loads cannot be asynchronous copies, and
    # would keep the K and V that depend on them from being any.
    count = tl.load(count_ptr + state)
    list_row = index_ptr + state * width
    k_base = k_ptr + first * D
    v_base = v_ptr + first * (D // 4)
    ragged = 0
    if (not BIAS) & (count > 0):
        last = tl.load(list_row + count - 1).to(tl.int32)
        ragged = ((last == blocks - 1) & (tokens < blocks * ROWS)).to(tl.int32)
    n = tl.load(list_row, mask=count > 0, other=0)
    for e in tl.range(0, count - ragged, num_stages=STAGES):
        keys = n.to(tl.int64) * ROWS + offs
        n = tl.load(list_row + e + 1, mask=e + 1 < count, other=0)
        k = tl.load(k_base + keys[:, None] * D + offs_d[None, :])
        k_scale = tl.load(k_scale_ptr + first + keys)
        s = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * k_scale[None, :]
        if BIAS:
            s = s * factor[:, None] + tl.load(bias_ptr + b * blocks * ROWS + keys)[None, :]
        p, keep, high, base, mass = weigh_tile(s, factor, high, base, mass, BIAS)
        acc = add_values(acc, p, keep, v_base, keys, 0, D, PTX)
        if PARTS == 2:
            rest = add_values(rest, p, keep, v_base, keys, 1, D, PTX)

    # What is masked: the last block's rows past T, then the tokens of the pair's list, gathered.
    more = ragged
    listed = 0
    if TOKENS:
        pair = bh * tl.cdiv(blocks, 2) + m // 2
        listed = tl.load(token_count_ptr + pair)
        more += tl.cdiv(listed, ROWS)
    for e in tl.range(0, more, num_stages=1):
        keys = ((blocks - 1) * ROWS + offs).to(tl.int64)
        alive = keys < tokens
        if TOKENS:
            place = (e - ragged) * ROWS + offs
            inside = (place >= 0) & (place < listed)
            token = tl.load(token_ptr + pair * budget + place, mask=inside, other=0)
            keys = tl.where(e < ragged, keys, token.to(tl.int64))
            alive = tl.where(e < ragged, alive, inside)
        k = tl.load(k_base + keys[:, None] * D + offs_d[None, :])
        k_scale = tl.load(k_scale_ptr + first + keys)
        s = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * k_scale[None, :]
        s = tl.where(alive[None, :], s * factor[:, None], NEG)
        p, keep, high, base, mass = weigh_tile(s, factor, high, base, mass, True)
        acc = add_values(acc, p, keep, v_base, keys, 0, D, PTX)
        if PARTS == 2:
            rest = add_values(rest, p, keep, v_base, keys, 1, D, PTX)

    token = m * ROWS + offs
    inside = token < tokens
    live = offs < tl.load(length_ptr + m)
    row = (b * tokens + token) * heads + h
    for part in tl.static_range(PARTS):
        offs_c = part * WIDTH + tl.arange(0, WIDTH)
        v_scale = tl.load(v_scale_ptr + bh * D + offs_c)
        out = (acc if part == 0 else rest) / tl.maximum(mass, 1e-30)[:, None] * v_scale[None, :]
        if GATE:
            place = token.to(tl.int64)[:, None] * sgt + offs_c[None, :]
            gate = tl.load(gate_ptr + b * sgb + h * sgh + place, mask=inside[:, None], other=0.0)
            coarse = tl.load(coarse_ptr + state * D + offs_c)
            out += gate.to(tl.float32) * coarse[None, :]
        out = tl.where(live[:, None], out, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * D + offs_c[None, :], out, mask=inside[:, None])


def launch_sol_int8(
    qkv: QuantizedQKV,
    tail: tuple[Tensor, Tensor, Tensor] | None,
    indices: Tensor,
    counts: Tensor,
    tokens: tuple[Tensor, Tensor] | None,
    gate: Tensor | None,
    coarse: Tensor | None,
    *,
    a: float,
    dtype: torch.dtype,
    ptx: bool = torch.version.hip is None,
    num_stages: int = NUM_STAGES,
    parts: int = 1,
    registers: int | None = None,
) -> Tensor:
    """Enqueue the attention and return [B, T, H, D] of `dtype`.

    tail: float32 [BH, N], [BH, N], [BH, N, D], or None; indices integers [BH, N, M], ascending, and
    counts int32 [BH, N]; tokens: int32 [BH, P, A] and [BH, P] for the P pairs of query blocks, or
    None; coarse float32 [BH, N, D], with gate [B, T, H, D]. All are contiguous, but for gate, whose
    last stride is 1. `ptx`: widen V in NVIDIA's assembly; `registers`: the most a thread has,
    None for no bound.
    """
    batch, heads, _, dim = qkv.query.shape
    blocks = qkv.lengths.numel()
    out = torch.empty(batch, qkv.tokens, heads, dim, dtype=dtype, device=qkv.query.device)
    state = (None, None, None) if tail is None else tail
    token_list, token_counts = (None, None) if tokens is None else tokens
    strides = (0, 0, 0) if gate is None else gate.stride()[:3]
    sol_int8_kernel[(blocks * batch * heads,)](
        qkv.query,
        qkv.query_scale,
        qkv.key,
        qkv.key_scale,
        qkv.key_bias,
        qkv.value.view(torch.int32),
        qkv.value_scale,
        qkv.shift,
        *state,
        indices,
        counts,
        token_list,
        token_counts,
        qkv.lengths,
        out,
        gate,
        coarse,
        a,
        heads,
        blocks,
        qkv.tokens,
        indices.shape[2],
        0 if token_list is None else token_list.shape[2],
        *strides,
        TAIL=tail is not None,
        BIAS=qkv.biased,
        TOKENS=tokens is not None,
        GATE=gate is not None,
        D=dim,
        ROWS=BLOCK,
        STAGES=num_stages,
        PARTS=parts,
        PTX=ptx,
        num_warps=4,
        **({} if registers is None else {"maxnreg": registers}),
    )
    return out
