"""Second moments of Q and K, their Cholesky factors, and the features x F for the landmark tree.

    M = sum_s x_s x_s^T / count + ridge * trace / D * I;    F F^T = M;    features = x F

Moments: one program = CHUNK sampled rows of one (batch, head), read once; the D x D partial sums
are added in order by the next kernel, so the result does not depend on the launch. Cholesky: one
program a matrix, PANEL columns at a time: what the panels before take off comes as small matrix
products, and only inside a panel, which stays in registers, is there one column after the other.
Features:
one program = up to TILES tiles of 64 rows of one (batch, head), the factor stays in shared memory;
every row is read once and written once, and its squared norm comes along for the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tree_score import squared_norm

CHUNK = 256
ROWS = 64
TILES = 8
STAGES = 3
"""Tiles in flight: 32 KiB of factor and 16 KiB a stage fit twice into the memory of an SM."""


@triton.jit(do_not_specialize=["heads", "count", "chunks"])
def moments_kernel(
    x_ptr, id_ptr, partial_ptr, heads, count, chunks,
    sxb: tl.int64, sxt: tl.int64, sxh: tl.int64,
    D: tl.constexpr, SAMPLES: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    offs_d = tl.arange(0, D)
    base = x_ptr + (bh // heads) * sxb + (bh % heads) * sxh
    total = tl.zeros([D, D], dtype=tl.float32)
    for start in range(0, SAMPLES, TILE):
        i = chunk * SAMPLES + start + tl.arange(0, TILE)
        live = i < count
        token = i.to(tl.int64)
        if LISTED:
            token = tl.load(id_ptr + i, mask=live, other=0).to(tl.int64)
        x = tl.load(base + token[:, None] * sxt + offs_d[None, :], mask=live[:, None], other=0.0)
        total = tl.dot(tl.trans(x), x, total, input_precision="ieee")
    out = partial_ptr + (bh * chunks + chunk) * (D * D)
    tl.store(out + offs_d[:, None] * D + offs_d[None, :], total)


@triton.jit(do_not_specialize=["count", "chunks"])
def finish_moments_kernel(
    partial_ptr, moment_ptr, count, chunks, ridge, D: tl.constexpr, TILE: tl.constexpr
):
    bh = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    j = tl.arange(0, D)
    base = partial_ptr + bh * chunks * (D * D)
    total = tl.zeros([TILE, D], dtype=tl.float32)
    diagonal = tl.zeros([D], dtype=tl.float32)
    for chunk in range(0, chunks):
        one = base + chunk * (D * D)
        # Both triangles, so that the result is symmetric to the last bit.
        upper = tl.load(one + i[:, None] * D + j[None, :])
        lower = tl.load(one + j[None, :] * D + i[:, None])
        total += (upper + lower) * 0.5
        diagonal += tl.load(one + j * (D + 1))
    added = ridge * (tl.sum(diagonal, axis=0) / count / D)
    moment = total / count + tl.where(i[:, None] == j[None, :], added, 0.0)
    tl.store(moment_ptr + bh * (D * D) + i[:, None] * D + j[None, :], moment)


def launch_second_moments(
    tensors: Sequence[Tensor], ids: Tensor | None, count: int, ridge: float
) -> Tensor:
    """Enqueue the second moments of sampled rows; return float32 [S, B, H, D, D] of S tensors.

    tensors: each [B, V, H, D], last stride 1. ids: int32 [count] token ids, or None for the first
    `count`.
    """
    batch, _, heads, dim = tensors[0].shape
    device = tensors[0].device
    chunks = triton.cdiv(count, CHUNK)
    partial = torch.empty(len(tensors), batch * heads, chunks, dim, dim, device=device)
    moments = torch.empty(len(tensors), batch, heads, dim, dim, device=device)
    for x, own in zip(tensors, partial, strict=True):
        moments_kernel[(batch * heads, chunks)](
            x, x if ids is None else ids, own, heads, count, chunks,
            x.stride(0), x.stride(1), x.stride(2),
            D=dim, SAMPLES=CHUNK, TILE=ROWS, LISTED=ids is not None, num_warps=8,
        )
    finish_moments_kernel[(len(tensors) * batch * heads, dim // 16)](
        partial, moments, count, chunks, ridge, D=dim, TILE=16, num_warps=4
    )
    return moments


@triton.jit
def cholesky_kernel(moment_ptr, factor_ptr, D: tl.constexpr, PANEL: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    j = tl.arange(0, PANEL)
    moment = moment_ptr + matrix * (D * D)
    out = factor_ptr + matrix * (D * D)
    sound = tl.full([], 1, dtype=tl.int32)
    for first in range(0, D, PANEL):
        # A panel, less what the columns before it explain.
        panel = tl.load(moment + i[:, None] * D + first + j[None, :])
        for before in range(0, first, PANEL):
            left = tl.load(out + i[:, None] * D + before + j[None, :])
            right = tl.load(out + (first + j)[None, :] * D + before + j[:, None])
            panel -= tl.dot(left, right, input_precision="ieee")
        for c in range(0, PANEL):
            # One column, and its outer product taken off the rest of the panel.
            values = tl.sum(tl.where((j == c)[None, :], panel, 0.0), axis=1)
            pivot = tl.sum(tl.where(i == first + c, values, 0.0), axis=0)
            positive = pivot > 0.0
            sound = tl.where(positive, sound, 0)
            scale = tl.where(positive, 1.0 / tl.sqrt_rn(tl.where(positive, pivot, 1.0)), 0.0)
            values = tl.where(i >= first + c, values * scale, 0.0)
            own = i[:, None] == (first + j)[None, :]
            across = tl.sum(tl.where(own, values[:, None], 0.0), axis=0)
            rest = panel - values[:, None] * across[None, :]
            panel = tl.where((j == c)[None, :], values[:, None], panel)
            panel = tl.where((j > c)[None, :], rest, panel)
        tl.store(out + i[:, None] * D + first + j[None, :], panel)
        tl.debug_barrier()
    if sound == 0:
        # Not positive definite: the root of the diagonal is a metric too.
        places = i[:, None] * D + i[None, :]
        root = tl.sqrt_rn(tl.maximum(tl.load(moment + i * (D + 1)), 0.0))
        tl.store(out + places, tl.where(i[:, None] == i[None, :], root[:, None], 0.0))


PANEL = 16


def launch_cholesky(moments: Tensor) -> Tensor:
    """Enqueue the lower Cholesky factors of float32 [..., D, D], contiguous."""
    dim = moments.shape[-1]
    factor = torch.empty_like(moments)
    programs = moments.numel() // (dim * dim)
    cholesky_kernel[(programs,)](moments, factor, D=dim, PANEL=PANEL, num_warps=4)
    return factor


@triton.jit(do_not_specialize=["heads", "tokens"])
def features_kernel(
    x_ptr, factor_ptr, y_ptr, square_ptr, heads, tokens,
    sxb: tl.int64, sxt: tl.int64, sxh: tl.int64,
    D: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, NORMS: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPAN
    offs_d = tl.arange(0, D)
    base = x_ptr + (bh // heads) * sxb + (bh % heads) * sxh
    places = offs_d[:, None] * D + offs_d[None, :]
    factor = tl.load(factor_ptr + bh * (D * D) + places)
    for start in range(first, min(first + SPAN, tokens), TILE):
        i = start + tl.arange(0, TILE)
        live = i < tokens
        rows = base + i.to(tl.int64)[:, None] * sxt + offs_d[None, :]
        x = tl.load(rows, mask=live[:, None], other=0.0)
        y = tl.dot(x, factor, input_precision="ieee").to(y_ptr.dtype.element_ty)
        out = y_ptr + (bh * tokens + i[:, None]) * D + offs_d[None, :]
        tl.store(out, y, mask=live[:, None])
        if NORMS:
            tl.store(square_ptr + bh * tokens + i, squared_norm(y), mask=live)


def launch_features(x: Tensor, factor: Tensor, y: Tensor, squares: Tensor | None) -> None:
    """Enqueue y = x F, and the squared norms of its rows if asked.

    x: [B, V, H, D], last stride 1. factor: [B, H, D, D] in the type of x, contiguous. y: [B, H, V,
    D], contiguous. squares: float32 [B, H, V], contiguous, or None.
    """
    batch, tokens, heads, dim = x.shape
    span = ROWS * TILES
    features_kernel[(batch * heads, triton.cdiv(tokens, span))](
        x, factor, y, y if squares is None else squares, heads, tokens,
        x.stride(0), x.stride(1), x.stride(2),
        D=dim, TILE=ROWS, SPAN=span, NORMS=squares is not None, num_warps=4, num_stages=STAGES,
    )
