"""Reorder the first rows of every head, and put them back, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.types import AttentionCall

__all__ = ["permute", "unpermute"]


def permute(x: Tensor, permutation: Tensor, *, impl: str | None = None) -> Tensor:
    """Gather the first V rows of every head in a given order; the others stay where they are.

        y[b, i, h] = x[b, permutation[b, h, i], h] for i < V,   y[b, i, h] = x[b, i, h] for i >= V

    Args:
        x: [B, L, H, D], any dtype, any strides.
        permutation: int32 or int64 [B, H, V], V <= L: in every row a permutation of 0..V-1, which
            is not checked.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        [B, L, H, D], contiguous; x is not changed.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: rows are copied bit for bit.

    Source: spec/spark.md section 2, step 5.
    """
    return _move(x, permutation, False, impl)


def unpermute(x: Tensor, permutation: Tensor, *, impl: str | None = None) -> Tensor:
    """Undo `permute` with the same permutation: no inverse is needed.

        y[b, permutation[b, h, i], h] = x[b, i, h] for i < V,   y[b, i, h] = x[b, i, h] for i >= V

    Args:
        x: [B, L, H, D], any dtype, any strides.
        permutation: as for `permute`. An entry that occurs twice would leave a row unwritten.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        [B, L, H, D], contiguous; x is not changed.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: rows are copied bit for bit.

    Source: spec/spark.md section 2, step 5.
    """
    return _move(x, permutation, True, impl)


def _move(x: Tensor, permutation: Tensor, inverse: bool, impl: str | None) -> Tensor:
    """Check, choose and run."""
    _checks.check_tensor("x", x, 4, "[B, L, H, D]")
    _checks.check_tensor("permutation", permutation, 3, "[B, H, V]")
    _checks.check_dtype("permutation", permutation, (torch.int32, torch.int64))
    batch, tokens, heads, _ = x.shape
    if permutation.shape[:2] != (batch, heads) or permutation.shape[2] > tokens:
        raise ValueError(
            f"permutation: expected [{batch}, {heads}, V <= {tokens}], "
            f"got {tuple(permutation.shape)}"
        )
    if permutation.device != x.device:
        raise ValueError(f"permutation: expected the device {x.device}, got {permutation.device}")
    choice = _dispatch.pick("permute", _dispatch.describe(None, x), impl)
    moved = choice.run(x, permutation, inverse)
    choice.record()
    return moved


def _eager(x: Tensor, permutation: Tensor, inverse: bool) -> Tensor:
    """Move head by head: an index of the size of x would cost four times its memory."""
    moved = torch.empty_like(x, memory_format=torch.contiguous_format)
    video = permutation.shape[2]
    moved[:, video:] = x[:, video:]
    for b in range(x.shape[0]):
        for h in range(x.shape[2]):
            order = permutation[b, h].long()
            if inverse:
                moved[b, :, h].index_copy_(0, order, x[b, :video, h])
            else:
                moved[b, :video, h] = x[b, :, h].index_select(0, order)
    return moved


def _run_triton(x: Tensor, permutation: Tensor, inverse: bool) -> Tensor:
    """Enter through the custom op, so that torch.compile keeps one node."""
    return _launch(x, permutation, inverse)


@torch.library.custom_op("solspark::permute", mutates_args=())
def _launch(x: Tensor, permutation: Tensor, inverse: bool) -> Tensor:
    """Launch the Triton kernel."""
    from solspark.kernels.permute import launch_permute

    last = _checks.last_dim_contiguous
    return launch_permute(last(x), last(permutation), inverse)


@_launch.register_fake
def _(x, permutation, inverse):
    return x.new_empty(x.shape)


def _triton_reasons(call: AttentionCall) -> list[str]:
    types = (*_triton.DTYPES, torch.float64)
    return _triton.obstacles(call, dtypes=types, head_dims=(call.head_dim,))


_dispatch.register("permute", "eager", _dispatch.never_declines, _eager)
_dispatch.register("permute", "triton", _triton_reasons, _run_triton)
