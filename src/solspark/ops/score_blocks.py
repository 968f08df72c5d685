"""Scores between query blocks and key blocks, and their thresholds, on any device."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.types import BLOCK, AttentionCall

__all__ = ["score_blocks", "thresholds"]

LOG2_E = math.log2(math.e)
VARIANCE_FLOOR = 1e-6


def score_blocks(
    query_means: Tensor, key_means: Tensor, *, scale: float, impl: str | None = None
) -> Tensor:
    """Score every key block for every query block.

        r_ij = a * qbar_i . KC_j,  a = scale * log2(e)

    Args:
        query_means: float32 (float64) [B, H, NQ, D].
        key_means: any float type [B, H, NK, D].
        scale: factor of the logits.
        impl: "eager", "triton", "hopper" or None for the best that can serve.

    Returns:
        float32 (float64) [B, H, NQ, NK], in log2 units, no -0.0.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: products and sums in float32 (float64).

    Source: Sol-Attn section 1.3.
    """
    _check_means(query_means, key_means, "key_means")
    scale = _checks.check_float("scale", scale)
    choice = _dispatch.pick("score_blocks", _describe(query_means, key_means), impl)
    scores = choice.run(query_means, key_means, scale)
    choice.record()
    return scores


def thresholds(
    query_means: Tensor,
    key_mean: Tensor | None,
    spread: Tensor,
    *,
    scale: float,
    tau: float,
    kind: str = "diag",
    live: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Return the score above which a query block reads a key block exactly.

        thr_i = mean_j(r_ij) + tau * sqrt(var_j(r_ij) + 1e-6)

    The mean is a * qbar_i . mu. With kind "exact" the variance is that of the scores themselves;
    with "diag" the
    covariance of the key means between channels is dropped: var = a^2 * sum_d qbar_id^2 var_d.

    Args:
        query_means: float32 (float64) [B, H, NQ, D].
        key_mean: float32 (float64) [B, H, D], mean of the live blocks' key means; "exact"
            recomputes it when None.
        spread: with "diag" the key means' population variance, float32 (float64) [B, H, D]; with
            "exact" the key means themselves, [B, H, NK, D].
        scale: factor of the logits.
        tau: standard deviations above the mean; any sign, infinities allowed.
        kind: "diag" or "exact".
        live: bool [B, 1 or H, NK], the blocks over which "exact" takes its moments; None means all.
        impl: "eager", "triton", "hopper" or None for the best that can serve.

    Returns:
        float32 (float64) [B, H, NQ], in log2 units.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: float32 (float64); "exact" centres the key means before it squares them.

    Source: Sol-Attn section 1.2.
    """
    _checks.check_choice("kind", kind, ("diag", "exact"))
    scale = _checks.check_float("scale", scale)
    tau = _checks.check_float("tau", tau, finite=False)
    if kind == "exact":
        _check_means(query_means, spread, "spread")
    else:
        _checks.check_tensor("query_means", query_means, 4, "[B, H, NQ, D]")
        _checks.check_tensor("spread", spread, 3, "[B, H, D]")
        if key_mean is None:
            raise ValueError('key_mean: expected a tensor [B, H, D] with kind "diag", got None')
    if live is not None:
        _checks.check_tensor("live", live, 3, "[B, 1 or H, NK]")
        _checks.check_dtype("live", live, (torch.bool,))
    call = replace(_describe(query_means, spread), variant=kind)
    choice = _dispatch.pick("thresholds", call, impl)
    result = choice.run(query_means, key_mean, spread, scale, tau, kind, live)
    choice.record()
    return result


def _check_means(query_means: Tensor, key_means: Tensor, name: str) -> None:
    """Raise unless both are [B, H, N, D] with equal B, H and D on one device."""
    _checks.check_tensor("query_means", query_means, 4, "[B, H, NQ, D]")
    _checks.check_dtype("query_means", query_means, (torch.float32, torch.float64))
    _checks.check_tensor(name, key_means, 4, "[B, H, NK, D]")
    _checks.check_dtype(name, key_means)
    batch, heads, _, head_dim = query_means.shape
    if key_means.shape[:2] != (batch, heads) or key_means.shape[3] != head_dim:
        raise ValueError(
            f"{name}: expected [{batch}, {heads}, NK, {head_dim}], got {tuple(key_means.shape)}"
        )
    if key_means.device != query_means.device:
        raise ValueError(
            f"{name}: expected the device {query_means.device}, got {key_means.device}"
        )


def _describe(query_means: Tensor, other: Tensor) -> AttentionCall:
    """Describe a call by its block counts; token counts are those of whole blocks."""
    blocks = other.shape[2] if other.ndim == 4 else 1
    return AttentionCall(
        batch=query_means.shape[0],
        query_tokens=query_means.shape[2] * BLOCK,
        key_tokens=blocks * BLOCK,
        heads=query_means.shape[1],
        head_dim=query_means.shape[3],
        dtype=other.dtype,
        device_type=query_means.device.type,
        capability=_dispatch.capability(query_means.device),
        requires_grad=_dispatch.needs_grad(query_means, other),
    )


def _eager_scores(query_means: Tensor, key_means: Tensor, scale: float) -> Tensor:
    """Multiply once; the scores are the largest tensor and the caller's to bound."""
    scores = query_means @ key_means.to(query_means.dtype).transpose(2, 3)
    return scores.mul_(scale * LOG2_E).add_(0.0)  # adding zero turns -0.0 into +0.0


def _eager_thresholds(
    query_means: Tensor,
    key_mean: Tensor | None,
    spread: Tensor,
    scale: float,
    tau: float,
    kind: str,
    live: Tensor | None,
) -> Tensor:
    """Take the moments from D x D matrices at most, never from the scores."""
    a = scale * LOG2_E
    if kind == "exact":
        means = spread.to(query_means.dtype)
        weight = torch.ones_like(means[..., :1]) if live is None else live[..., None]
        count = weight.sum(2).clamp(min=1)
        if key_mean is None:
            key_mean = (means * weight).sum(2) / count
        centred = (means - key_mean[:, :, None]) * weight
        covariance = centred.transpose(2, 3) @ centred / count[..., None]
        variance = ((query_means @ covariance) * query_means).sum(-1).clamp(min=0)
    else:
        variance = (query_means.square() @ spread[..., None]).squeeze(-1)
    assert key_mean is not None
    mean = (query_means @ key_mean[..., None]).squeeze(-1)
    return a * mean + tau * (a * a * variance + VARIANCE_FLOOR).sqrt()


def _launch_scores(query_means: Tensor, key_means: Tensor, scale_log2: float) -> Tensor:
    """Launch the Triton kernel of the scores."""
    from solspark.kernels.score_blocks import launch_score_blocks

    with torch.cuda.device_of(query_means):
        return launch_score_blocks(query_means, key_means, scale_log2=scale_log2)


_score_operator = torch.library.custom_op("solspark::score_blocks", _launch_scores, mutates_args=())


@_score_operator.register_fake
def _(query_means, key_means, scale_log2):
    return query_means.new_empty((*query_means.shape[:3], key_means.shape[2]))


def _triton_scores(query_means: Tensor, key_means: Tensor, scale: float) -> Tensor:
    """Score with products in the input type, the query mean split into two terms of it."""
    launch = _triton.entry(_score_operator, _launch_scores)
    return launch(_rows(query_means), _rows(key_means), scale * LOG2_E)


def _launch_thresholds(
    query_means: Tensor, key_mean: Tensor, key_var: Tensor, scale_log2: float, tau: float
) -> Tensor:
    """Launch the Triton kernel of the diag thresholds."""
    from solspark.kernels.score_blocks import launch_thresholds

    with torch.cuda.device_of(query_means):
        return launch_thresholds(query_means, key_mean, key_var, scale_log2=scale_log2, tau=tau)


_threshold_operator = torch.library.custom_op(
    "solspark::thresholds", _launch_thresholds, mutates_args=()
)


@_threshold_operator.register_fake
def _(query_means, key_mean, key_var, scale_log2, tau):
    return query_means.new_empty(query_means.shape[:3])


def _triton_thresholds(
    query_means: Tensor,
    key_mean: Tensor | None,
    spread: Tensor,
    scale: float,
    tau: float,
    kind: str,
    live: Tensor | None,
) -> Tensor:
    """Compute the diag thresholds in one pass over the query means."""
    assert key_mean is not None
    tensors = (query_means.contiguous(), key_mean.contiguous(), spread.contiguous())
    launch = _triton.entry(_threshold_operator, _launch_thresholds)
    return launch(*tensors, scale * LOG2_E, tau)


def _rows(means: Tensor) -> Tensor:
    """Return means [B, H, N, D] whose rows follow one another; any batch and head strides."""
    dim = means.shape[3]
    return means if means.stride(3) == 1 and means.stride(2) == dim else means.contiguous()


def _triton_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call)


def _thresholds_reasons(call: AttentionCall) -> list[str]:
    found = _triton.obstacles(call)
    if call.variant == "exact":
        found.append('it computes "diag" thresholds; "exact" ones are matrix products')
    return found


_dispatch.register("score_blocks", "eager", _dispatch.never_declines, _eager_scores)
_dispatch.register("score_blocks", "triton", _triton_reasons, _triton_scores)
_dispatch.register("thresholds", "eager", _dispatch.never_declines, _eager_thresholds)
_dispatch.register("thresholds", "triton", _thresholds_reasons, _triton_thresholds)
