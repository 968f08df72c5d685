"""Reorder K and V, average the new key blocks, and summarise them around anchors."""

from __future__ import annotations

from torch import Tensor

from solspark.reference.gather_means import gather_means, reorder
from solspark.reference.reweight import reweight
from solspark.types import block_count


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Apply `gather_means` to K, the same order to V, and `reweight` to both.

    Args:
        anchors: [B, P, H, D].
        key, value: [B, T, H, D].
        permutation: int [B, H, V].
        summary_math, logmass_key, reweight_components, scale: see `reweight`.

    Returns:
        key and value in the new order [B, T, H, D], key means [B, H, N, D] in their dtype, and
        ak, av, lm of `reweight`.

    Source: spec/spark.md sections 2 and 3.
    """
    blocks = block_count(key.shape[1])
    keys, means = gather_means(key, permutation, blocks=blocks, dtype=key.dtype)
    values = reorder(value, permutation)
    summaries = reweight(
        anchors,
        keys,
        values,
        summary_math=summary_math,
        logmass_key=logmass_key,
        reweight_components=reweight_components,
        scale=scale,
    )
    return keys, values, means, *summaries
