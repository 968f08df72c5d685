"""Boundary checks: every message names the argument, what was expected, and what came.

A wrong type raises TypeError, a wrong value or shape ValueError, before anything is launched or
changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over inputs of `dtype`: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(name: str, value: Any, ndim: int, layout: str) -> None:
    """Raise unless `value` is a tensor of `ndim` dimensions; `layout` words the expectation."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor {layout}, got {type(value).__name__}")
    if value.ndim != ndim:
        raise ValueError(f"{name}: expected {layout}, got shape {tuple(value.shape)}")


def check_dtype(name: str, value: Tensor, expected: Sequence[torch.dtype] = FLOAT_TYPES) -> None:
    """Raise TypeError unless the tensor has one of the expected types."""
    if value.dtype not in expected:
        words = " or ".join(str(dtype) for dtype in expected)
        raise TypeError(f"{name}: expected {words}, got {value.dtype}")


def check_same(name: str, value: Tensor, other_name: str, other: Tensor, *, shape: bool) -> None:
    """Raise unless two tensors agree in type and device, and in shape if asked."""
    if shape and value.shape != other.shape:
        raise ValueError(
            f"{name}: expected the shape of {other_name}, {tuple(other.shape)}, "
            f"got {tuple(value.shape)}"
        )
    if value.dtype != other.dtype:
        raise TypeError(
            f"{name}: expected the dtype of {other_name}, {other.dtype}, got {value.dtype}"
        )
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected the device of {other_name}, {other.device}, got {value.device}"
        )


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` if it is an int (a bool is not) within [low, high], else raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < low or (high is not None and value > high):
        words = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}: expected an int {words}, got {value}")
    return value


def as_device(name: str, value: Any) -> torch.device:
    """Return what `torch.device` makes of a device, a string or an index, else raise."""
    if not isinstance(value, (torch.device, str, int)):
        raise TypeError(f"{name}: expected what torch.device takes, got {type(value).__name__}")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name}: expected what torch.device takes, got {value!r}") from error


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is a bool, else raise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
    return value


def check_float(name: str, value: Any, *, finite: bool = True) -> float:
    """Return `value` as a float, refusing bools, NaN and, unless told otherwise, infinities."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    number = float(value)
    # Comparisons, not math.isfinite: torch.compile keeps a float symbolic through these.
    if number != number or (finite and not -math.inf < number < math.inf):
        raise ValueError(f"{name}: expected a {'finite ' if finite else ''}number, got {number}")
    return number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices, else raise ValueError."""
    if value not in choices:
        words = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: expected one of {words}, got {value!r}")
    return value


def check_ranges(name: str, value: Any, high: int) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges (start, stop) with 0 <= start <= stop <= high, empty ones dropped."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: expected a sequence of (start, stop) pairs, got {value!r}")
    ranges = []
    for index, pair in enumerate(value):
        label = f"{name}[{index}]"
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence):
            raise TypeError(f"{label}: expected a pair (start, stop), got {pair!r}")
        if len(pair) != 2:
            raise ValueError(f"{label}: expected a pair (start, stop), got {pair!r}")
        start = check_int(f"{label} start", pair[0], 0, high)
        stop = check_int(f"{label} stop", pair[1], start, high)
        if stop > start:
            ranges.append((start, stop))
    return tuple(ranges)


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the logits: the finite number given, or head_dim ** -0.5."""
    return float(head_dim**-0.5) if scale is None else check_float("scale", scale)


def last_dim_contiguous(value: Tensor) -> Tensor:
    """Return the tensor itself when its last stride is 1, else a contiguous copy."""
    return value if value.stride(-1) == 1 else value.contiguous()


def check_head_dim(name: str, value: Tensor, allowed: Sequence[int] | None = None) -> None:
    """Raise unless the last dimension is one of `allowed`, or a positive multiple of 8."""
    size = value.shape[-1]
    if allowed is not None and size not in allowed:
        words = " or ".join(str(item) for item in allowed)
        raise ValueError(f"{name}: expected head dim {words}, got {size}")
    if allowed is None and (size < 8 or size % 8):
        raise ValueError(f"{name}: expected a head dim that is a multiple of 8, got {size}")


def normalise_key_bias(
    key_bias: Tensor | None, batch: int, heads: int, tokens: int, like: Tensor
) -> Tensor | None:
    """Return the bias in natural log as [B, 1 or H, Lk], float32 (float64 for float64 inputs).

    Accepts [Lk], [B, Lk], [B, 1 or H, Lk] and [B, 1 or H, 1, Lk], a batch of 1 broadcasting; a bool
    tensor keeps where it is true. A mask that differs between queries has no such form and is
    refused.
    """
    if key_bias is None:
        return None
    if not isinstance(key_bias, Tensor):
        raise TypeError(f"key_bias: expected a tensor, got {type(key_bias).__name__}")
    check_dtype("key_bias", key_bias, (torch.bool, *FLOAT_TYPES))
    if key_bias.device != like.device:
        raise ValueError(f"key_bias: expected the device {like.device}, got {key_bias.device}")
    shape = tuple(key_bias.shape)
    bias = key_bias
    if bias.ndim == 4 and bias.shape[2] == 1:
        bias = bias[:, :, 0]
    elif bias.ndim == 1:
        bias = bias[None, None]
    elif bias.ndim == 2:
        bias = bias[:, None]
    fits = (
        bias.ndim == 3
        and bias.shape[0] in (1, batch)
        and bias.shape[1] in (1, heads)
        and bias.shape[2] == tokens
    )
    if not fits:
        raise ValueError(
            f"key_bias: expected one value a key, the same for every query: [{tokens}], "
            f"[{batch}, {tokens}], [{batch}, 1 or {heads}, {tokens}] or "
            f"[{batch}, 1 or {heads}, 1, {tokens}], got {shape}"
        )
    dtype = accumulation_dtype(like.dtype)
    if bias.dtype == torch.bool:
        kept = torch.zeros((), dtype=dtype, device=bias.device)
        bias = torch.where(bias, kept, float("-inf"))
    return bias.to(dtype).expand(batch, -1, -1)
