"""Backends from packages that a user may have installed: flash-attn 2 and 4, SageAttention.

Whether a package is there is found without importing it; only `prepare` imports.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from solspark.router.backend import Platform


def module_missing(name: str, package: str) -> list[str]:
    """Return a reason when the top-level module `name` is not installed."""
    try:
        found = importlib.util.find_spec(name) is not None
    except ValueError:
        # A half-initialised module without a spec: it is being imported, so it is there.
        found = True
    return [] if found else [f"{package} is not installed (pip install {package})"]


def capability_below(platform: Platform, least: tuple[int, int]) -> list[str]:
    """Return a reason when an NVIDIA chip is older than `least`."""
    if platform.capability is not None and platform.capability < least:
        have, need = (f"{a}.{b}" for a, b in (platform.capability, least))
        return [f"needs compute capability {need}, this is {have}"]
    return []


def _expanded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads up to those of query."""
    repeats = query.shape[-3] // key.shape[-3]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)


def flash_obstacles(platform: Platform) -> list[str]:
    """Say why flash-attn 2 cannot serve: absent, only version 4 there, or an older chip."""
    reasons = module_missing("flash_attn", "flash-attn")
    if not reasons:
        spec = importlib.util.find_spec("flash_attn")
        # flash-attn 4 installs into the namespace flash_attn without the package that version 2 is.
        if spec is not None and spec.origin is None:
            reasons = ["only flash-attn 4 is installed (pip install flash-attn for version 2)"]
    return reasons + capability_below(platform, (8, 0))


def prepare_flash(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return flash-attn 2 behind the signature of scaled_dot_product_attention."""
    flash_attn_func = importlib.import_module("flash_attn").flash_attn_func

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        flat = query.ndim == 3
        if flat:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        key, value = _expanded(query, key, value)
        out = flash_attn_func(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
        ).transpose(1, 2)
        return out.squeeze(0) if flat else out

    return flash


def flash4_obstacles(platform: Platform) -> list[str]:
    """Say why flash-attn 4 cannot serve: not installed, or a chip before Hopper."""
    spec = importlib.util.find_spec("flash_attn")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    there = any((Path(place) / "cute").is_dir() for place in places)
    reasons = [] if there else ["flash-attn-4 is not installed (pip install flash-attn-4)"]
    return reasons + capability_below(platform, (9, 0))


def prepare_flash4(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return flash-attn 4 (CuTe) behind the signature of scaled_dot_product_attention."""
    flash_attn_func = importlib.import_module("flash_attn.cute.interface").flash_attn_func

    def flash4(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        out = flash_attn_func(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=scale,
            causal=is_causal,
        )
        # Some versions return (out, lse).
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return flash4


def sage_obstacles(platform: Platform) -> list[str]:
    """Say why SageAttention cannot serve."""
    return module_missing("sageattention", "sageattention") + capability_below(platform, (8, 0))


def prepare_sage(
    platform: Platform, original: Callable[..., Tensor], settings: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """Return SageAttention behind the signature of scaled_dot_product_attention.

    On compute capability 8.6 its Triton path gives NaN, so the CUDA kernel with fp32 accumulation
    is asked for by name where the package has it.
    """
    package = importlib.import_module("sageattention")
    run, options = package.sageattn, {}
    if platform.capability == (8, 6) and hasattr(package, "sageattn_qk_int8_pv_fp16_cuda"):
        run, options = package.sageattn_qk_int8_pv_fp16_cuda, {"pv_accum_dtype": "fp32"}

    def sage(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        key, value = _expanded(query, key, value)
        return run(
            query,
            key,
            value,
            tensor_layout="HND",
            is_causal=is_causal,
            sm_scale=scale,
            **options,
        )

    return sage
