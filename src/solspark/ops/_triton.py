"""What every Triton implementation needs of a call; the operations add their own obstacles."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from solspark.types import AttentionCall

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def obstacles(
    call: AttentionCall,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    head_dims: Sequence[int] = (64, 128),
) -> list[str]:
    """Return why a Triton kernel for these types and head dims cannot serve the call."""
    found = []
    if call.device_type != "cuda":
        found.append(f"Triton kernels run on CUDA and ROCm devices, not on {call.device_type}")
    elif not triton_is_installed():
        found.append("triton is not installed")
    elif torch.version.hip is None and (call.capability or (0, 0)) < (8, 0):
        found.append(f"compute capability {call.capability} is below 8.0")
    if call.dtype not in dtypes:
        words = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found.append(f"dtype {str(call.dtype).removeprefix('torch.')} is none of {words}")
    if call.head_dim not in head_dims:
        found.append(f"head dim {call.head_dim} is none of {', '.join(map(str, head_dims))}")
    if call.requires_grad:
        found.append("it has no backward")
    return found


def hopper_obstacles(
    call: AttentionCall,
    own: Sequence[str],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    head_dims: Sequence[int] = (64, 128),
) -> list[str]:
    """Return why a Gluon kernel for compute capability 9.0 cannot serve; `own`: its operation's."""
    found = obstacles(call, dtypes=dtypes, head_dims=head_dims)
    if call.device_type == "cuda" and (torch.version.hip or call.capability != (9, 0)):
        found.append(f"it is for compute capability (9, 0), this device has {call.capability}")
    found += own
    if not found and not has_gluon():
        found.append("this triton has no experimental.gluon")
    return found


def entry(operator: Callable[..., Any], launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator inside a compiled graph, elsewhere what it launches.

    An operator keeps a graph whole, but costs about 0.1 ms of host time a call, as much as a kernel
    of a short clip.
    """
    return operator if torch.compiler.is_compiling() else launch


@functools.cache
def triton_is_installed() -> bool:
    """Say whether triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_gluon() -> bool:
    """Say whether the installed triton carries Gluon, without importing it."""
    return importlib.util.find_spec("triton.experimental.gluon") is not None
