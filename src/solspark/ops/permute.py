"""Reorder the first rows of every head, and put them back, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.types import AttentionCall

__all__ = ["check_reorder", "permute", "unpermute"]


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
    return _move(x, permutation, False, None, impl)


def unpermute(
    x: Tensor, permutation: Tensor, *, out: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Undo `permute` with the same permutation: no inverse is needed.

        y[b, permutation[b, h, i], h] = x[b, i, h] for i < V,   y[b, i, h] = x[b, i, h] for i >= V

    Args:
        x: [B, L, H, D], any dtype, any strides.
        permutation: as for `permute`. An entry that occurs twice would leave a row unwritten.
        out: [B, L', H, D] in the type of x, last stride 1, apart from x: takes the rows, and keeps
            what it has where none goes. Then V = L, and the permutation may be a part of one over
            0..L'-1, so that several calls write one tensor.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        `out`, or a contiguous [B, L, H, D]; x is not changed.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: rows are copied bit for bit.

    Source: spec/spark.md section 2, step 5.
    """
    return _move(x, permutation, True, out, impl)


def check_reorder(name: str, x: Tensor, permutation: Tensor) -> None:
    """Raise unless x is [B, L, H, D] and the permutation int [B, H, V <= L] beside it."""
    _checks.check_tensor(name, x, 4, "[B, L, H, D]")
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


def _move(
    x: Tensor, permutation: Tensor, inverse: bool, out: Tensor | None, impl: str | None
) -> Tensor:
    """Check, choose and run."""
    check_reorder("x", x, permutation)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        _check_out(out, x, permutation)
    choice = _dispatch.pick("permute", _dispatch.describe(None, x), impl)
    choice.run(x, permutation, out, inverse)
    choice.record()
    return out


def _check_out(out: Tensor, x: Tensor, permutation: Tensor) -> None:
    """Raise unless `out` can take the rows of x, all of which are moved."""
    batch, tokens, heads, dim = x.shape
    _checks.check_tensor("out", out, 4, "[B, L', H, D]")
    own = (out.dtype, out.device, out.shape[0], *out.shape[2:])
    if own != (x.dtype, x.device, batch, heads, dim) or out.stride(-1) != 1:
        raise ValueError(
            f"out: expected {x.dtype} {[batch, 'L', heads, dim]} on {x.device}, last stride 1, "
            f"got {out.dtype} {tuple(out.shape)} on {out.device}, strides {out.stride()}"
        )
    if permutation.shape[2] != tokens or out.shape[1] < tokens:
        raise ValueError(
            f"out: needs a permutation of all {tokens} rows of x and as many rows of its own, got "
            f"{permutation.shape[2]} and {out.shape[1]}"
        )


def _eager(x: Tensor, permutation: Tensor, out: Tensor, inverse: bool) -> None:
    """Move head by head: an index of the size of x would cost four times its memory."""
    video, tokens = permutation.shape[2], x.shape[1]
    out[:, video:tokens] = x[:, video:]
    for b in range(x.shape[0]):
        for h in range(x.shape[2]):
            order = permutation[b, h].long()
            if inverse:
                out[b, :, h].index_copy_(0, order, x[b, :video, h])
            else:
                out[b, :video, h] = x[b, :, h].index_select(0, order)


def _run_triton(x: Tensor, permutation: Tensor, out: Tensor, inverse: bool) -> None:
    """Launch; inside a compiled graph through the operator."""
    _triton.entry(_operator, _launch)(x, permutation, out, inverse)


def _launch(x: Tensor, permutation: Tensor, out: Tensor, inverse: bool) -> None:
    """Launch the Triton kernel."""
    from solspark.kernels.permute import launch_permute

    last = _checks.last_dim_contiguous
    with torch.cuda.device_of(x):
        launch_permute(last(x), last(permutation), out, inverse)


_operator = torch.library.custom_op("solspark::permute", _launch, mutates_args=("out",))


@_operator.register_fake
def _(x, permutation, out, inverse):
    return None


def _triton_reasons(call: AttentionCall) -> list[str]:
    types = (*_triton.DTYPES, torch.float64)
    return _triton.obstacles(call, dtypes=types, head_dims=(call.head_dim,))


_dispatch.register("permute", "eager", _dispatch.never_declines, _eager)
_dispatch.register("permute", "triton", _triton_reasons, _run_triton)
