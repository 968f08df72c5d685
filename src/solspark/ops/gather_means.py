"""Reorder rows and take the means of the new blocks in one pass, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _triton
from solspark.ops._dispatch import describe, never_declines, pick, register
from solspark.ops.permute import check_reorder, permute
from solspark.ops.pool import pool
from solspark.types import BLOCK, AttentionCall, block_count


def gather_means(
    x: Tensor, permutation: Tensor, *, blocks: int, dtype: torch.dtype, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Gather the first V rows of every head in a given order, and average the new blocks.

    y[b, i, h] = x[b, permutation[b, h, i], h] for i < V, x[b, i, h] for i >= V
    mean[b, h, n] = mean of y[b, 64 n .. 64 n + 63, h]

    Args:
        x: [B, L, H, D], any strides.
        permutation: int32 or int64 [B, H, V], V <= L, every row a permutation of 0..V-1, which is
            not checked.
        blocks: means are taken of the first `blocks` blocks.
        dtype: of the means.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        y [B, L, H, D], contiguous, and means [B, H, blocks, D].

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: when `impl` cannot serve the call.

    Numerics: rows are copied; means are summed in FP32 (FP64 for float64) and rounded once.

    Source: spec/spark.md sections 2 and 3.1.
    """
    check_reorder("x", x, permutation)
    _checks.check_dtype("x", x)
    _checks.check_int("blocks", blocks, 1, block_count(x.shape[1]))
    x, permutation = _checks.last_dim_contiguous(x), _checks.last_dim_contiguous(permutation)
    choice = pick("gather_means", describe(None, x), impl)
    result = choice.run(x, permutation, blocks, dtype)
    choice.record()
    return result


def _run_eager(
    x: Tensor, permutation: Tensor, blocks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Two passes, the second as `pool` takes it."""
    y = permute(x, permutation, impl="eager")
    means = pool(y[:, : blocks * BLOCK], y[:, :1], None, impl="eager").query_means
    assert means is not None
    return y, means.to(dtype)


def _launch(
    x: Tensor, permutation: Tensor, blocks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel."""
    from solspark.kernels.gather_means import launch_gather_means

    with torch.cuda.device_of(x):
        return launch_gather_means(x, permutation, blocks, dtype)


_operator = torch.library.custom_op("solspark::gather_means", _launch, mutates_args=())


@_operator.register_fake
def _(x, permutation, blocks, dtype):
    batch, _, heads, dim = x.shape
    y = x.new_empty(x.shape)
    return y, x.new_empty((batch, heads, blocks, dim), dtype=dtype)


def _run_triton(
    x: Tensor, permutation: Tensor, blocks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Launch; inside a compiled graph through the operator."""
    return _triton.entry(_operator, _launch)(x, permutation, blocks, dtype)


def _triton_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call)


register("gather_means", "eager", never_declines, _run_eager)
register("gather_means", "triton", _triton_reasons, _run_triton)
