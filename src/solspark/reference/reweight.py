"""Reweighted block summaries: the tangent of every key block's log mass at an anchor query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark.types import BLOCK, block_count


def reweight(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    summary_math: str = "tensorcore",
    logmass_key: str = "stored",
    reweight_components: str = "full",
    scale: float | None = None,
    block_tokens: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summarise every key block for every anchor by one key, one value and one log mass.

    For a block of n tokens, with c the softmax scale and a an anchor::

        z_i = c a . k_i,   m = max z,   e_i = exp(z_i - m),   Z = sum e_i
        ak = sum e_i k_i / Z,   av = sum e_i v_i / Z,   lm = m + log Z - c a . ak

    so that c q . ak + lm is the tangent at q = a of log sum exp(c q . k_i): exact there, never
    above it elsewhere.

    Args:
        anchors: [B, P, H, D], any float dtype.
        key: [B, T, H, D].
        value: [B, T, H, D].
        summary_math: "tensorcore" rounds e_i to the key's dtype before the two weighted sums;
            "comfy_fp32" does not.
        logmass_key: "stored" subtracts c a . (the rounded key that is returned), "pre_round" the
            unrounded one.
        reweight_components: "full"; "weights_only" (lm = log n); "bias_only" (plain means, lm = log
            sum exp(z) minus c a . mean key); "none" (plain means, lm = log n).
        scale: c; 1 / sqrt(D) by default.
        block_tokens: tokens in a block, 64; 8 for the summaries of the 8x8 tail.

    Returns:
        ak, av: [B, P, H, N, D] in the key's dtype, N = ceil(T / block_tokens).
        lm: float32 (float64 for float64 keys) [B, P, H, N], natural log.

    Numerics: scores, exponentials, Z and both sums in FP32 (FP64 for float64 keys); ak and av are
    rounded once.

    Source: spec/spark.md section 3.
    """
    batch, tokens, heads, dim = key.shape
    blocks = block_count(tokens, block_tokens)
    work = torch.float64 if key.dtype == torch.float64 else torch.float32
    scale = 1.0 / math.sqrt(dim) if scale is None else scale

    def split(x: Tensor) -> Tensor:
        padded = x.new_zeros(batch, blocks * block_tokens, heads, dim, dtype=work)
        padded[:, :tokens] = x
        return padded.view(batch, blocks, block_tokens, heads, dim)

    keys, values, anchor = split(key), split(value), anchors.to(work)
    live = (
        torch.arange(blocks * block_tokens, device=key.device).view(blocks, block_tokens) < tokens
    )
    lengths = live.sum(-1).to(work)

    scores = scale * torch.einsum("bphd,bnihd->bphni", anchor, keys)
    scores = scores.masked_fill(~live, -math.inf)
    peak = scores.amax(-1)
    weights = torch.exp(scores - peak[..., None])
    mass = weights.sum(-1)

    if reweight_components in ("full", "weights_only"):
        rounded = weights if summary_math == "comfy_fp32" else weights.to(key.dtype).to(work)
        key_mean = torch.einsum("bphni,bnihd->bphnd", rounded, keys) / mass[..., None]
        value_mean = torch.einsum("bphni,bnihd->bphnd", rounded, values) / mass[..., None]
    else:
        shape = (batch, anchors.shape[1], heads, blocks, dim)
        key_mean = (keys.sum(2) / lengths[:, None, None]).transpose(1, 2)[:, None].expand(shape)
        value_mean = (values.sum(2) / lengths[:, None, None]).transpose(1, 2)[:, None].expand(shape)
    stored_key = key_mean.to(key.dtype)
    stored_value = value_mean.to(value.dtype)

    if reweight_components in ("full", "bias_only"):
        origin = stored_key.to(work) if logmass_key == "stored" else key_mean
        shift = scale * torch.einsum("bphd,bphnd->bphn", anchor, origin)
        log_mass = peak + torch.log(mass) - shift
    else:
        log_mass = torch.log(lengths).expand(batch, anchors.shape[1], heads, blocks)
    return stored_key.contiguous(), stored_value.contiguous(), log_mass.to(work).contiguous()
