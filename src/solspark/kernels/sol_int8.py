"""Read each query block's exact key blocks in INT8, on top of the state of its other blocks.

    s = a q.k qs ks + bias,  b = max(rowmax s, M - 20),  p = rne(255 2^(s - b))
    M' = max(M, b),  L' = L 2^(M - M') + 2^(b - M') sum p / 255,  O' likewise with p v
    out = O / L * vscale  [+ gate * coarse]

One program = one (query block, head): 64 rows of Q, which stay in registers. It reads the K and V
tiles of its list, 16 KiB a tile, from L2 where neighbours share them, and writes its rows once.
Both products are int8 x int8: p - 128 is signed, and 128 times the tile's column sums of V, which
are given, make up for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..types import BLOCK, QuantizedQKV
from .quantize import round_even

NEG = tl.constexpr(-3.0e38)
MASKED = tl.constexpr(-1.0e37)
OCTAVES = tl.constexpr(20.0)


@triton.jit(
    do_not_specialize=[
        "first_head",
        "heads",
        "blocks",
        "tokens",
        "sink_first",
        "sink_count",
        "sob",
        "sgb",
    ]
)
def sol_int8_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    k_scale_ptr,
    bias_ptr,
    v_ptr,
    v_scale_ptr,
    v_sum_ptr,
    shift_ptr,
    tail_high_ptr,
    tail_mass_ptr,
    tail_out_ptr,
    index_ptr,
    count_ptr,
    length_ptr,
    out_ptr,
    gate_ptr,
    coarse_ptr,
    a,
    first_head,
    heads,
    blocks,
    tokens,
    sink_first,
    sink_count,
    sob: tl.int64,
    sot: tl.int64,
    soh: tl.int64,
    sgb: tl.int64,
    sgt: tl.int64,
    sgh: tl.int64,
    sgd: tl.int64,
    GATE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    m = tl.program_id(0)
    local = tl.program_id(1).to(tl.int64)
    bh = first_head + local
    b = bh // heads
    h = bh % heads
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    rows = bh * blocks * ROWS + m * ROWS + offs
    q = tl.load(q_ptr + rows[:, None] * D + offs_d[None, :])
    factor = tl.load(q_scale_ptr + rows) * a

    # The tail is centred by this call's mean, exact keys by key_center: move it to their origin.
    shift = tl.load(shift_ptr + bh * D + offs_d)
    state = local * blocks + m
    tail_high = tl.load(tail_high_ptr + state)
    high = tail_high + tl.sum(q.to(tl.float32) * shift[None, :], 1) * factor
    high = tl.where(tail_high > MASKED, high, NEG)
    mass = tl.zeros([ROWS], tl.float32) + tl.load(tail_mass_ptr + state)
    acc = tl.zeros([ROWS, D], tl.float32) + tl.load(tail_out_ptr + state * D + offs_d)[None, :]

    # Sinks come first, then the list.
    listed = tl.load(count_ptr + state)
    for step in range(sink_count + listed):
        place = tl.maximum(step - sink_count, 0)
        chosen = tl.load(index_ptr + state * blocks + place, mask=step >= sink_count, other=0)
        n = tl.where(step < sink_count, sink_first + step, chosen)
        keys = bh * blocks * ROWS + n * ROWS + offs
        k = tl.load(k_ptr + keys[None, :] * D + offs_d[:, None])
        s = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32) * factor[:, None]
        k_scale = tl.load(k_scale_ptr + keys)
        bias = tl.load(bias_ptr + b * blocks * ROWS + n * ROWS + offs)
        s = s * k_scale[None, :] + bias[None, :]

        # Every tile has the bytes' full range, unless it is far below what was seen.
        peak = tl.maximum(tl.max(s, 1), high - OCTAVES)
        top = tl.maximum(high, peak)
        p = round_even(tl.exp2(s - peak[:, None]) * 255.0)
        p = tl.where(s > MASKED, p, 0.0)
        weight = tl.exp2(peak - top) / 255.0
        keep = tl.exp2(high - top)
        mass = mass * keep + weight * tl.sum(p, 1)
        v = tl.load(v_ptr + keys[:, None] * D + offs_d[None, :])
        product = tl.dot((p - 128.0).to(tl.int8), v, out_dtype=tl.int32)
        columns = tl.load(v_sum_ptr + (bh * blocks + n) * D + offs_d)
        product += 128 * columns[None, :]
        acc = acc * keep[:, None] + product.to(tl.float32) * weight[:, None]
        high = top

    v_scale = tl.load(v_scale_ptr + bh * D + offs_d)
    out = acc / tl.maximum(mass, 1e-30)[:, None] * v_scale[None, :]
    token = m * ROWS + offs
    inside = token < tokens
    token = token.to(tl.int64)
    if GATE:
        gate = tl.load(
            gate_ptr + b * sgb + h * sgh + token[:, None] * sgt + offs_d[None, :] * sgd,
            mask=inside[:, None],
            other=0.0,
        )
        coarse = tl.load(coarse_ptr + state * D + offs_d)
        out += gate.to(tl.float32) * coarse[None, :]
    out = tl.where((offs < tl.load(length_ptr + m))[:, None], out, 0.0)
    tl.store(
        out_ptr + b * sob + h * soh + token[:, None] * sot + offs_d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None],
    )


def launch_sol_int8(
    qkv: QuantizedQKV,
    value_columns: Tensor,
    tail: tuple[Tensor, Tensor, Tensor],
    indices: Tensor,
    counts: Tensor,
    out: Tensor,
    gate: Tensor | None,
    coarse: Tensor | None,
    *,
    a: float,
    first_head: int,
    sinks: tuple[int, int],
) -> None:
    """Enqueue some heads, counted through samples, and write their rows of out [B, T, H, D].

    value_columns: int32 [B, H, N, D], sums of the integers of V over each block. tail: float32
    [G, N], [G, N], [G, N, D]; indices int32 [G, N, N] and counts int32 [G, N] without the sinks;
    coarse float32 [G, N, D]: all of the G heads from `first_head` on, contiguous.
    """
    _, heads, _, dim = qkv.query.shape
    group, blocks = counts.shape
    strides = (0, 0, 0, 0) if gate is None else gate.stride()
    sink_count = max(0, min(sinks[1], blocks) - sinks[0])
    sol_int8_kernel[(blocks, group)](
        qkv.query,
        qkv.query_scale,
        qkv.key,
        qkv.key_scale,
        qkv.key_bias,
        qkv.value,
        qkv.value_scale,
        value_columns,
        qkv.shift,
        *tail,
        indices,
        counts,
        qkv.lengths,
        out,
        out if gate is None else gate,
        tail[2] if coarse is None else coarse,
        a,
        first_head,
        heads,
        blocks,
        qkv.tokens,
        sinks[0],
        sink_count,
        *out.stride()[:3],
        *strides,
        GATE=gate is not None,
        D=dim,
        ROWS=BLOCK,
        num_warps=4,
        num_stages=2,
    )
