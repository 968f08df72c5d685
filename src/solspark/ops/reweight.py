"""Reweighted block summaries, on any device and within bounded memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _triton
from solspark.ops._dispatch import describe, needs_grad, never_declines, pick, register
from solspark.types import BLOCK, AttentionCall, block_count

WORKSPACE_BYTES = 1 << 28
"""Bytes of temporaries that the eager implementation aims at; parents and heads are chunked to
it."""


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
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summarise every key block for every anchor by one key, one value and one log mass.

    For a block of n tokens, with c the softmax scale and a the anchor::

        z_i = c a . k_i,   m = max z,   e_i = exp(z_i - m),   Z = sum e_i
        ak = sum e_i k_i / Z,   av = sum e_i v_i / Z,   lm = m + log Z - c a . ak

    Args:
        anchors: [B, P, H, D] in the key's dtype or float32, any strides.
        key: [B, T, H, D], any strides.
        value: [B, T, H, D], any strides.
        summary_math: "tensorcore" rounds e_i to the key's dtype before the two weighted sums;
            "comfy_fp32" does not.
        logmass_key: "stored" subtracts c a . (the rounded key that is returned), "pre_round" the
            unrounded one.
        reweight_components: "full"; "weights_only" (lm = log n); "bias_only" (plain means, lm = log
            sum exp(z) minus c a . mean key); "none" (plain means, lm = log n).
        scale: c; 1 / sqrt(D) by default.
        block_tokens: tokens in a block: 64, or 8 for the summaries of the 8x8 tail.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        ak, av: [B, P, H, N, D] in the key's dtype, N = ceil(T / block_tokens).
        lm: float32 [B, P, H, N], natural log.

    Raises:
        ValueError: for shapes, dtypes or devices that do not agree, or an unknown switch.
        UnsupportedError: when `impl` cannot serve the call.

    Numerics: scores, exponentials, Z and both sums in FP32 (FP64 inside for float64 keys); ak and
    av are rounded once.

    Source: spec/spark.md section 3.
    """
    check_reweight_tensors(anchors, key, value)
    check_reweight_options(summary_math, logmass_key, reweight_components)
    if block_tokens not in (8, BLOCK):
        raise ValueError(f"block_tokens: expected 8 or {BLOCK}, got {block_tokens!r}")
    scale = 1.0 / math.sqrt(key.shape[-1]) if scale is None else scale
    anchors, key, value = (_checks.last_dim_contiguous(x) for x in (anchors, key, value))
    call = describe(
        None,
        key,
        parents=anchors.shape[1],
        tail="query" if block_tokens == BLOCK else "block8x8",
        requires_grad=needs_grad(anchors, key, value),
    )
    choice = pick("reweight", call, impl)
    result = choice.run(
        anchors,
        key,
        value,
        summary_math=summary_math,
        logmass_key=logmass_key,
        reweight_components=reweight_components,
        scale=scale,
        block_tokens=block_tokens,
    )
    choice.record()
    return result


def check_reweight_tensors(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    names: tuple[str, str, str] = ("anchors", "key", "value"),
) -> None:
    """Raise unless anchors, key and value fit each other; `names` are those of the caller."""
    for name, tensor in zip(names, (anchors, key, value), strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    for name, tensor in ((names[1], key), (names[2], value)):
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{name}: expected a floating-point [B, T, H, D], got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        if tensor.numel() == 0:
            raise ValueError(f"{name}: expected no empty dimension, got {tuple(tensor.shape)}")
    if value.shape != key.shape or value.dtype != key.dtype or value.device != key.device:
        raise ValueError(
            f"{names[2]}: expected {key.dtype} {tuple(key.shape)} on {key.device} as "
            f"{names[1]}, got {value.dtype} {tuple(value.shape)} on {value.device}"
        )
    batch, _, heads, dim = key.shape
    shape = tuple(anchors.shape)
    if len(shape) != 4 or shape[1] == 0 or (shape[0], *shape[2:]) != (batch, heads, dim):
        raise ValueError(f"{names[0]}: expected [{batch}, P, {heads}, {dim}], got {list(shape)}")
    if anchors.dtype not in (key.dtype, torch.float32):
        other = "" if key.dtype == torch.float32 else " or torch.float32"
        raise ValueError(f"{names[0]}: expected {key.dtype}{other}, got {anchors.dtype}")
    if anchors.device != key.device:
        raise ValueError(f"{names[0]}: expected a tensor on {key.device}, got {anchors.device}")


def check_reweight_options(summary_math: str, logmass_key: str, reweight_components: str) -> None:
    """Raise ValueError unless the three switches of `spark_reweight` are known."""
    for name, given, allowed in (
        ("summary_math", summary_math, ("tensorcore", "comfy_fp32")),
        ("logmass_key", logmass_key, ("stored", "pre_round")),
        (
            "reweight_components",
            reweight_components,
            ("full", "weights_only", "bias_only", "none"),
        ),
    ):
        if given not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {given!r}")


def _run_eager(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    summary_math: str,
    logmass_key: str,
    reweight_components: str,
    scale: float,
    block_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the outputs a few heads and a few parents at a time."""
    batch, tokens, heads, dim = key.shape
    parents = anchors.shape[1]
    blocks = block_count(tokens, block_tokens)
    work = torch.float64 if key.dtype == torch.float64 else torch.float32
    shape = (batch, parents, heads, blocks, dim)
    keys = torch.empty(shape, dtype=key.dtype, device=key.device)
    values = torch.empty_like(keys)
    mass = torch.empty(shape[:4], dtype=torch.float32, device=key.device)

    padded = blocks * block_tokens
    element = torch.finfo(work).bits // 8
    head_bytes = batch * padded * dim * 2 * element
    head_step = max(1, min(heads, WORKSPACE_BYTES // (2 * head_bytes)))
    parent_bytes = head_step * batch * (padded * 3 + blocks * dim * 3) * element
    parent_step = max(1, min(parents, WORKSPACE_BYTES // (2 * parent_bytes)))
    live = torch.arange(padded, device=key.device).view(blocks, block_tokens) < tokens
    lengths = live.sum(-1).to(work)

    for first in range(0, heads, head_step):
        here = slice(first, min(first + head_step, heads))
        k = _blocked(key[:, :, here], blocks, block_tokens, work)
        v = _blocked(value[:, :, here], blocks, block_tokens, work)
        for start in range(0, parents, parent_step):
            which = slice(start, min(start + parent_step, parents))
            a = anchors[:, which, here].transpose(1, 2).to(work)
            ak, av, lm = _summarise(
                a, k, v, live, lengths, summary_math, logmass_key, reweight_components, scale,
                key.dtype,
            )  # fmt: skip
            keys[:, which, here] = ak.permute(0, 3, 1, 2, 4)
            values[:, which, here] = av.permute(0, 3, 1, 2, 4)
            mass[:, which, here] = lm.permute(0, 3, 1, 2)
    return keys, values, mass


def _blocked(x: Tensor, blocks: int, block_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return [B, h, N, block, D], padded with zeros."""
    batch, tokens, heads, dim = x.shape
    out = torch.zeros((batch, heads, blocks * block_tokens, dim), dtype=dtype, device=x.device)
    out[:, :, :tokens] = x.transpose(1, 2)
    return out.view(batch, heads, blocks, block_tokens, dim)


def _summarise(
    a: Tensor,
    k: Tensor,
    v: Tensor,
    live: Tensor,
    lengths: Tensor,
    summary_math: str,
    logmass_key: str,
    components: str,
    scale: float,
    store: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ak, av [B, h, N, P, D] in the stored dtype and lm [B, h, N, P] for a [B, h, P, D]."""
    parents = a.shape[2]
    queries = a[:, :, None].transpose(-1, -2)
    scores = (k @ queries).mul_(scale).transpose(-1, -2)
    scores = scores.masked_fill(~live[:, None], -math.inf)
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)

    if components in ("full", "weights_only"):
        if summary_math == "tensorcore":
            weights = weights.to(store).to(k.dtype)
        key_mean = (weights @ k).div_(total)
        value_mean = (weights @ v).div_(total)
    else:
        counts = lengths[:, None, None]
        key_mean = (k.sum(3, keepdim=True) / counts).expand(-1, -1, -1, parents, -1)
        value_mean = (v.sum(3, keepdim=True) / counts).expand(-1, -1, -1, parents, -1)
    ak, av = key_mean.to(store), value_mean.to(store)

    if components in ("full", "bias_only"):
        origin = ak.to(k.dtype) if logmass_key == "stored" else key_mean
        shift = scale * (origin * a[:, :, None]).sum(-1)
        lm = peak[..., 0] + torch.log(total[..., 0]) - shift
    else:
        lm = torch.log(lengths)[:, None].expand(ak.shape[:4])
    return ak, av, lm


def _launch(
    anchors: Tensor,
    key: Tensor,
    value: Tensor,
    summary_math: str,
    logmass_key: str,
    reweight_components: str,
    scale: float,
    block_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the Triton kernel."""
    from solspark.kernels.reweight import launch_reweight

    with torch.cuda.device_of(key):
        return launch_reweight(
            anchors,
            key,
            value,
            summary_math=summary_math,
            logmass_key=logmass_key,
            reweight_components=reweight_components,
            scale=scale,
            block_tokens=block_tokens,
        )


_operator = torch.library.custom_op("solspark::reweight", _launch, mutates_args=())


@_operator.register_fake
def _(anchors, key, value, summary_math, logmass_key, reweight_components, scale, block_tokens):
    batch, tokens, heads, dim = key.shape
    shape = (batch, anchors.shape[1], heads, block_count(tokens, block_tokens))
    keys = key.new_empty((*shape, dim))
    return keys, torch.empty_like(keys), key.new_empty(shape, dtype=torch.float32)


def _run_triton(anchors: Tensor, key: Tensor, value: Tensor, **options) -> tuple[Tensor, ...]:
    """Launch; inside a compiled graph through the operator."""
    return _triton.entry(_operator, _launch)(anchors, key, value, **options)


def _triton_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call)


register("reweight", "eager", never_declines, _run_eager)
register("reweight", "triton", _triton_reasons, _run_triton)
