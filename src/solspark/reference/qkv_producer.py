"""Quantise and pool Q, K and V; the norm and RoPE that the chunked producer fuses."""

from __future__ import annotations

import torch
from torch import Tensor

from solspark.reference.quantize import rotate as hadamard_rotate
from solspark.reference.sol_int8 import LOG2E, live_lengths, live_rows
from solspark.types import BLOCK, QuantizedQKV

NEG = -3.0e38
"""Finite stand-in for minus infinity."""
SCALE_FLOOR = 1e-8
POOLED_FLOOR = 1e-12
LOUDEST, LOUD_SHARE = 4, 0.2
"""Channels of a head are balanced where so many hold so much of the energy of Q or of K."""
ENERGY_FLOOR = 1e-6
"""Least energy of a channel in balancing, of its head's mean: silent ones have no ratio."""


def basis(x: Tensor, rotated: bool) -> Tensor:
    """Return rows in the basis of the integers: rotated by an orthonormal Hadamard, or as is."""
    return hadamard_rotate(x, x.shape[-1]) if rotated else x


def balance_factors(query_energy: Tensor, key_energy: Tensor) -> Tensor:
    """Return what Q's channels are multiplied by, and K's divided by, to be equally loud.

        f_c = sqrt(rms(k_c) / rms(q_c)) / their geometric mean over c

    It is 1 for heads where the four loudest channels hold less than a fifth of the energy, of Q's
    and of K's: there is nothing to mend.

    Args:
        query_energy: mean squares of the live rows of Q, [..., D].
        key_energy: those of K about its mean.

    Source: INT8 specification 6; there K's channels alone decide, but Q's can be loud as well.
    """
    energies = query_energy, key_energy
    loud = [x.topk(LOUDEST, -1).values.sum(-1) >= LOUD_SHARE * x.sum(-1) for x in energies]
    query, key = (
        x.clamp_min(ENERGY_FLOOR * x.mean(-1, keepdim=True)).clamp_min(SCALE_FLOOR**2)
        for x in energies
    )
    logs = (key.log() - query.log()) / 4
    factor = (logs - logs.mean(-1, keepdim=True)).exp()
    return torch.where((loud[0] | loud[1])[..., None], factor, torch.ones_like(factor))


def quantize_rows(x: Tensor, floor: float = SCALE_FLOOR) -> tuple[Tensor, Tensor]:
    """Return int8 rows and their scales: max(absmax / 127, floor), round half to even."""
    scale = (x.abs().amax(-1) / 127.0).clamp_min(floor)
    return (x / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def bias_in_log2(key_bias: Tensor | None, live: Tensor, batch: int, tokens: int) -> Tensor:
    """Return what is added to the scores of each padded key, float32 [B, Tp]."""
    padded = torch.zeros(batch, live.numel(), dtype=torch.float32, device=live.device)
    if key_bias is not None:
        padded[:, :tokens] = (key_bias.float() * LOG2E).clamp_min(NEG)
    return padded.masked_fill(~live, NEG)


def block_statistics(key_means: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population variance over blocks of key means [..., N, D]."""
    mean = key_means.mean(-2)
    return mean, (key_means.square().mean(-2) - mean.square()).clamp_min(0.0)


def quantize_qkv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_bias: Tensor | None = None,
    block_len: Tensor | None = None,
    key_center: Tensor | None = None,
    value_scale: Tensor | None = None,
    rotate: bool = False,
    balance: bool = False,
) -> QuantizedQKV:
    """Quantise Q, centred K and V, and pool them.

    Args:
        query, key, value: [B, T, H, D].
        key_bias: natural log [B, T].
        block_len: integers [N], live rows of each block.
        key_center: [B, H, D], subtracted from the keys; None takes the mean of the block means.
        value_scale: [B, H, D]; None takes max(absmax / 127, 1e-8) of the live rows.
        rotate: rotate Q and K before they are quantised; statistics are taken before.
        balance: put `balance_factors` on the channels of Q and K first, before anything else is
            taken of them; `key_center` is that of the given keys all the same.

    Numerics: float32 throughout, whatever the input type.

    Source: INT8 specification 2.2, 2.3.
    """
    tokens = query.shape[1]
    lengths = live_lengths(block_len, tokens, query.device)
    live = live_rows(lengths)
    blocks = lengths.numel()

    def padded(x: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(
            x.float().transpose(1, 2), (0, 0, 0, blocks * BLOCK - tokens)
        )
        return rows.masked_fill(~live[:, None], 0.0)

    q, k, v = padded(query), padded(key), padded(value)
    if balance:
        total = lengths.sum()
        key_energy = k.square().sum(2) / total - (k.sum(2) / total).square()
        factor = balance_factors(q.square().sum(2) / total, key_energy.clamp_min(0.0))
        q, k = q * factor[:, :, None], k / factor[:, :, None]
        key_center = None if key_center is None else key_center.float() / factor
    count = lengths.float()[:, None]
    sums = [x.unflatten(2, (blocks, BLOCK)).sum(3) for x in (q, k, v)]
    query_means, key_means = sums[0] / count, sums[1] / count
    key_mean, key_var = block_statistics(key_means)
    key_center = key_mean if key_center is None else key_center.float()
    if value_scale is None:
        value_scale = (v.abs().amax(2) / 127.0).clamp_min(SCALE_FLOOR)

    query8, query_scale = quantize_rows(basis(q, rotate))
    centred = (k - key_center[:, :, None]).masked_fill(~live[:, None], 0.0)
    key8, key_scale = quantize_rows(basis(centred, rotate))
    value8 = (v / value_scale[:, :, None]).round().clamp(-127, 127).to(torch.int8)
    centroid, centroid_scale = quantize_rows(basis(query_means, rotate))
    pooled, pooled_scale = quantize_rows(
        basis(key_means - key_mean[:, :, None], rotate), POOLED_FLOOR
    )
    return QuantizedQKV(
        query=query8,
        query_scale=query_scale.masked_fill(~live, 0.0),
        key=key8,
        key_scale=key_scale.masked_fill(~live, 0.0),
        key_bias=bias_in_log2(key_bias, live, query.shape[0], tokens),
        value=value8,
        value_scale=value_scale,
        query_means=query_means,
        key_means=key_means,
        value_sums=sums[2].bfloat16(),
        centroid=centroid,
        centroid_scale=centroid_scale,
        pooled=pooled,
        pooled_scale=pooled_scale,
        key_mean=key_mean,
        key_var=key_var,
        key_center=key_center,
        shift=basis(key_mean - key_center, rotate),
        lengths=lengths,
        tokens=tokens,
        rotated=rotate,
        biased=key_bias is not None or block_len is not None,
    )


def norm_rope(x: Tensor, weight: Tensor, freqs: Tensor, eps: float) -> Tensor:
    """Normalise rows and rotate their first channels, split-half.

        n = bf16(x rsqrt(mean x^2 + eps) w)
        y_c = F00 n_c + F01 n_(c + r/2),  y_(c + r/2) = F10 n_c + F11 n_(c + r/2),  c < r/2

    Args:
        x: [T, H, D].
        weight: [D], used as bfloat16.
        freqs: float32 [T, r/2, 2, 2].
        eps: of the norm.

    Returns:
        bfloat16 [T, H, D].

    Numerics: float32, rounded to bfloat16 after the norm and after the rotation.

    Source: INT8 specification 2.1.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (normed * weight.bfloat16().float()).bfloat16()
    half = freqs.shape[1]
    low, high = normed[..., :half].float(), normed[..., half : 2 * half].float()
    f = freqs.float()[:, None]
    turned = [f[..., i, 0] * low + f[..., i, 1] * high for i in (0, 1)]
    return torch.cat([*(part.bfloat16() for part in turned), normed[..., 2 * half :]], -1)
