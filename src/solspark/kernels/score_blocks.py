"""Scores between query blocks and key blocks, and the tau thresholds, in log2 units.

    scores[i, j] = a * (query_means[i] . key_means[j]),  a = scale * log2(e)
    diag:  thr[i] = a * (qm_i . mu) + tau * sqrt(max(a^2 * sum_d qm_i[d]^2 var[d], 0) + 1e-6)

One program per (batch·head, 64 query blocks, 128 key blocks), key blocks fastest: those of a query
tile share it in L2. Means are read once a tile, every score is written once. The float32 query mean
is split into two terms of the inputs' type (high and low), so that two matrix products with float32
accumulation keep about 16 bits of it: a mean rounded once would flip routes near the threshold.
Float32 keys are multiplied in float32, in smaller tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


# fmt: off
@triton.jit(do_not_specialize=["heads", "query_blocks", "key_blocks", "scale_log2", "sob", "soh"])
def score_blocks_kernel(
    qm_ptr, km_ptr, out_ptr, heads, query_blocks, key_blocks, scale_log2,
    sqb: tl.int64, sqh: tl.int64, skb: tl.int64, skh: tl.int64, sob: tl.int64, soh: tl.int64,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    # One grid axis: the other two end at 65,535 programs.
    pid = tl.program_id(0)
    key_tiles = tl.cdiv(key_blocks, COLS)
    query_tiles = tl.cdiv(query_blocks, ROWS)
    rest = pid // key_tiles
    bh = (rest // query_tiles).to(tl.int64)
    b = bh // heads
    h = bh % heads
    offs_i = (rest % query_tiles) * ROWS + tl.arange(0, ROWS)
    offs_j = (pid % key_tiles) * COLS + tl.arange(0, COLS)
    offs_d = tl.arange(0, D)
    qm = tl.load(
        qm_ptr + b * sqb + h * sqh + offs_i.to(tl.int64)[:, None] * D + offs_d[None, :],
        mask=offs_i[:, None] < query_blocks,
        other=0.0,
    )
    km = tl.load(
        km_ptr + b * skb + h * skh + offs_j.to(tl.int64)[:, None] * D + offs_d[None, :],
        mask=offs_j[:, None] < key_blocks,
        other=0.0,
    )
    kt = tl.trans(km)
    if km.dtype == tl.float32:
        scores = tl.dot(qm, kt, input_precision="ieee")
    else:
        high = qm.to(km.dtype)
        low = (qm - high.to(tl.float32)).to(km.dtype)
        scores = tl.dot(low, kt)
        scores = tl.dot(high, kt, scores)
    scores = scores * scale_log2 + 0.0  # no -0.0
    out = out_ptr + b * sob + h * soh + offs_i.to(tl.int64)[:, None] * key_blocks + offs_j[None, :]
    tl.store(out, scores, mask=(offs_i[:, None] < query_blocks) & (offs_j[None, :] < key_blocks))


@triton.jit(do_not_specialize=["query_blocks", "scale_log2", "tau"])
def thresholds_kernel(
    qm_ptr, mean_ptr, var_ptr, out_ptr, query_blocks, scale_log2, tau,
    D: tl.constexpr, ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    query_tiles = tl.cdiv(query_blocks, ROWS)
    bh = (pid // query_tiles).to(tl.int64)
    offs_i = (pid % query_tiles) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    live = offs_i < query_blocks
    qm = tl.load(
        qm_ptr + (bh * query_blocks + offs_i)[:, None] * D + offs_d[None, :],
        mask=live[:, None],
        other=0.0,
    )
    mean = tl.load(mean_ptr + bh * D + offs_d)
    var = tl.load(var_ptr + bh * D + offs_d)
    centre = tl.sum(qm * mean[None, :], axis=1) * scale_log2
    spread = tl.sum(qm * qm * var[None, :], axis=1) * scale_log2 * scale_log2
    thr = centre + tau * tl.sqrt(tl.maximum(spread, 0.0) + 1e-6)
    tl.store(out_ptr + bh * query_blocks + offs_i, thr, mask=live)


def launch_score_blocks(
    query_means: Tensor, key_means: Tensor, *, scale_log2: float, out: Tensor | None = None
) -> Tensor:
    """Enqueue the scores of query_means [B, H, NQ, D], float32, and key_means [B, H, NK, D].

    Rows of D values follow one another; so do those of `out`, float32 [B, H, NQ, NK].
    """
    batch, heads, nq, dim = query_means.shape
    nk = key_means.shape[2]
    if out is None:
        out = torch.empty(batch, heads, nq, nk, device=query_means.device, dtype=torch.float32)
    # A float32 product has no tensor core: a large tile would take a minute to compile.
    rows, cols = (32, 32) if key_means.dtype == torch.float32 else (64, 128)
    score_blocks_kernel[(triton.cdiv(nk, cols) * triton.cdiv(nq, rows) * batch * heads,)](
        query_means, key_means, out, heads, nq, nk, scale_log2,
        *query_means.stride()[:2], *key_means.stride()[:2], *out.stride()[:2],
        D=dim, ROWS=rows, COLS=cols, num_warps=4,
    )
    return out


def launch_thresholds(
    query_means: Tensor, key_mean: Tensor, key_var: Tensor, *, scale_log2: float, tau: float
) -> Tensor:
    """Enqueue the `diag` thresholds of contiguous float32 tensors; return float32 [B, H, NQ].

    query_means [B, H, NQ, D], key_mean and key_var [B, H, D].
    """
    batch, heads, nq, dim = query_means.shape
    out = torch.empty(batch, heads, nq, device=query_means.device, dtype=torch.float32)
    thresholds_kernel[(triton.cdiv(nq, 32) * batch * heads,)](
        query_means, key_mean, key_var, out, nq, scale_log2, tau, D=dim, ROWS=32, num_warps=4,
    )
    return out
