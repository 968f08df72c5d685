"""Reorder rows and take the means of the new blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from solspark.types import BLOCK


def reorder(x: Tensor, permutation: Tensor) -> Tensor:
    """Return y with y[b, i, h] = x[b, permutation[b, h, i], h] for i < V, and x from V on."""
    video = permutation.shape[2]
    index = permutation.long().transpose(1, 2)[..., None].expand(-1, -1, -1, x.shape[3])
    return torch.cat([x[:, :video].gather(1, index), x[:, video:]], dim=1)


def gather_means(
    x: Tensor, permutation: Tensor, *, blocks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gather the first V rows of every head in a given order, and average the new blocks.

    y[b, i, h] = x[b, permutation[b, h, i], h] for i < V, x[b, i, h] for i >= V
    mean[b, h, n] = mean of y[b, 64 n .. 64 n + 63, h]

    Args:
        x: [B, L, H, D].
        permutation: int [B, H, V].
        blocks: means are taken of the first `blocks` blocks.
        dtype: of the means.

    Returns:
        y [B, L, H, D] and means [B, H, blocks, D].

    Numerics: rows are copied; means are summed in FP32 (FP64 for float64) and rounded once.
    """
    y = reorder(x, permutation)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = y.to(work).split(BLOCK, dim=1)[:blocks]
    return y, torch.stack([part.mean(1) for part in rows], 2).to(dtype)
