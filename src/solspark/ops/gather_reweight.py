"""Reorder K and V, average the new key blocks and summarise them in one pass, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _triton
from solspark.ops._dispatch import describe, needs_grad, never_declines, pick, register
from solspark.ops.permute import check_reorder, permute
from solspark.ops.pool import pool
from solspark.ops.reweight import check_reweight_options, check_reweight_tensors, reweight
from solspark.types import AttentionCall, block_count

FEW_ANCHORS = 7
"""Anchors up to which one pass pays: more of them are a matrix product, which `reweight` has."""

Gathered = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def gather_reweight(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    permutation: Tensor,
    *,
    summary_math: str = "tensorcore",
    logmass_key: str = "stored",
    reweight_components: str = "full",
    scale: float | None = None,
    impl: str | None = None,
) -> Gathered:
    """Apply one order to K and V, average the new key blocks, and summarise them around anchors.

    k'[b, i, h] = k[b, permutation[b, h, i], h] for i < V, k[b, i, h] for i >= V;   v' likewise

    Args:
        anchors: [B, P, H, D] in the key's dtype or float32.
        key, value: [B, T, H, D], any strides.
        permutation: int32 or int64 [B, H, V], V <= T, every row a permutation of 0..V-1, which is
            not checked.
        summary_math, logmass_key, reweight_components, scale: see `reweight`.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        k', v' [B, T, H, D], contiguous; plain key means [B, H, N, D] in their dtype; ak, av and lm
        of `reweight`.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: when `impl` cannot serve the call.

    Numerics: rows are copied; the rest as in `pool` and `reweight`.

    Source: spec/spark.md sections 2 and 3.
    """
    check_reweight_tensors(anchors, key, value)
    check_reweight_options(summary_math, logmass_key, reweight_components)
    check_reorder("key", key, permutation)
    _checks.check_dtype("key", key)
    anchors, key, value, permutation = (
        _checks.last_dim_contiguous(x) for x in (anchors, key, value, permutation)
    )
    call = describe(
        None,
        key,
        parents=anchors.shape[1],
        requires_grad=needs_grad(anchors, key, value),
    )
    choice = pick("gather_reweight", call, impl)
    result = choice.run(
        anchors,
        key,
        value,
        permutation,
        summary_math=summary_math,
        logmass_key=logmass_key,
        reweight_components=reweight_components,
        scale=1.0 / math.sqrt(key.shape[-1]) if scale is None else scale,
    )
    choice.record()
    return result


def _run_eager(
    anchors: Tensor, key: Tensor, value: Tensor, permutation: Tensor, **options
) -> Gathered:
    """Pass by pass."""
    keys = permute(key, permutation, impl="eager")
    values = permute(value, permutation, impl="eager")
    means = pool(None, keys, None, impl="eager").key_means
    return keys, values, means, *reweight(anchors, keys, values, impl="eager", **options)


def _launch(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    permutation: Tensor,
    summary_math: str,
    logmass_key: str,
    reweight_components: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the Triton kernel."""
    from solspark.kernels.gather_reweight import launch_gather_reweight

    with torch.cuda.device_of(key):
        return launch_gather_reweight(
            anchors,
            key,
            value,
            permutation,
            summary_math=summary_math,
            logmass_key=logmass_key,
            reweight_components=reweight_components,
            scale=scale,
        )


_operator = torch.library.custom_op("solspark::gather_reweight", _launch, mutates_args=())


@_operator.register_fake
def _(anchors, key, value, permutation, summary_math, logmass_key, reweight_components, scale):
    batch, tokens, heads, dim = key.shape
    blocks = block_count(tokens)
    shape = (batch, anchors.shape[1], heads, blocks)
    return (
        key.new_empty(key.shape),
        key.new_empty(key.shape),
        key.new_empty((batch, heads, blocks, dim)),
        key.new_empty((*shape, dim)),
        key.new_empty((*shape, dim)),
        key.new_empty(shape, dtype=torch.float32),
    )


def _run_triton(anchors: Tensor, key: Tensor, value: Tensor, permutation: Tensor, **options):
    """Launch; inside a compiled graph through the operator."""
    return _triton.entry(_operator, _launch)(anchors, key, value, permutation, **options)


def _triton_reasons(call: AttentionCall) -> list[str]:
    found = _triton.obstacles(call)
    if call.parents > FEW_ANCHORS:
        found.append(f"{call.parents} anchors are more than {FEW_ANCHORS}")
    return found


register("gather_reweight", "eager", never_declines, _run_eager)
register("gather_reweight", "triton", _triton_reasons, _run_triton)
