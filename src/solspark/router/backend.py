"""Declarations: what a backend is, when it accepts a call, and the registry that orders them.

A backend is declared as data and prepared once a plan. Its constraints say in words why a call is
declined, so a router can always explain itself; an implementation that accepted a call and fails
raises, nothing falls through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_MASK = "block_mask"
"""Capability: the backend can consume a selection of tiles."""
MASKED_BLOCK = "masked_block"
"""Capability: the backend can consume a selection and a token mask in one call."""
TAIL = "tail"
"""Capability: the backend can stand in for each tile that a selection leaves out by its mean key
and mean value, with the weight of all its keys."""

TAKES_NO = "cannot take "
"""How the reason begins that names a type or a mask."""

PLATFORMS = frozenset({"cuda", "rocm", "zluda", "xpu", "cpu", "mps", "directml"})


class RouteCall(NamedTuple):
    """The arguments of one scaled_dot_product_attention call, as a backend's gate sees them.

    Args:
        query: [B, H, Lq, D] (or fewer leading dimensions), any float dtype.
        key: [B, Hk, Lk, D].
        value: [B, Hk, Lk, Dv].
        attn_mask: None, bool (True = may look) or float (added to the logits), broadcastable to [B,
            H, Lq, Lk].
        extra: keyword arguments that scaled_dot_product_attention does not have.
        grad: whether this call must be differentiable.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    extra: Mapping[str, Any] = {}
    grad: bool = False


@dataclass(frozen=True)
class Platform:
    """Where calls will run.

    Args:
        name: "cuda", "rocm", "zluda", "xpu", "cpu", "mps" or "directml".
        device: the device that kernels would be probed on, if any.
        capability: CUDA compute capability, or None.
        architecture: AMD's name of the chip ("gfx942"), or None.
    """

    name: str
    device: torch.device | None = None
    capability: tuple[int, int] | None = None
    architecture: str | None = None

    def __post_init__(self) -> None:
        if self.name not in PLATFORMS:
            raise ValueError(
                f"platform.name: expected one of {sorted(PLATFORMS)}, got {self.name!r}"
            )


def detect_platform() -> Platform:
    """Describe this machine without creating a device context where there is no device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        if torch.version.hip:
            architecture = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
            return Platform("rocm", device, None, architecture)
        zluda = "[ZLUDA]" in torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
        return Platform("zluda" if zluda else "cuda", device, capability)
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return Platform("xpu", torch.device("xpu"))
    if torch.backends.mps.is_available():
        return Platform("mps", torch.device("mps"))
    return Platform("cpu", torch.device("cpu"))


def grouped_heads(call: RouteCall) -> bool:
    """Return whether query and key have different head counts (grouped-query attention)."""
    return call.query.ndim >= 3 and call.query.shape[-3] != call.key.shape[-3]


@dataclass(frozen=True)
class Constraints:
    """A declarative gate. Zero, None and empty mean "not constrained"; the default accepts any call
    off the CPU.

    Args:
        allow_cpu: accept tensors on the CPU.
        min_ndim: fewest dimensions of query.
        allow_mask, allow_float32, allow_dropout, allow_causal, allow_gqa: accept calls that have
            the thing.
        allow_grad: accept calls that must be differentiable.
        allow_mask_grad: accept calls whose attn_mask wants a gradient.
        allow_extra: accept keyword arguments beyond those of scaled_dot_product_attention.
        same_device: key and value must live where query lives.
        dtypes: the accepted dtypes of query; key and value must then have the same one.
        head_dims: accepted values of query.shape[-1].
        max_head_dim: largest query.shape[-1].
        head_dim_multiple: query.shape[-1] must be a multiple of it.
        same_value_dim: value.shape[-1] must equal query.shape[-1].
        min_tokens: fewest tokens of query and of key (either one below declines).
        min_long_side: at least one of the two lengths must exceed it (a text encoder has neither).
        min_heads: fewest query heads (a VAE's mid block has one).
        whole_groups: query heads must be a multiple of key heads.
        key_mask_only: a mask must not depend on the query row.
    """

    allow_cpu: bool = False
    min_ndim: int = 0
    allow_mask: bool = True
    allow_float32: bool = True
    same_device: bool = False
    head_dims: frozenset[int] = frozenset()
    max_head_dim: int = 0
    head_dim_multiple: int = 0
    min_tokens: int = 0
    min_long_side: int = 0
    min_heads: int = 0
    allow_dropout: bool = True
    allow_causal: bool = True
    allow_gqa: bool = True
    allow_grad: bool = True
    allow_mask_grad: bool = True
    allow_extra: bool = True
    dtypes: frozenset[torch.dtype] = frozenset()
    same_value_dim: bool = False
    whole_groups: bool = False
    key_mask_only: bool = False

    def _obstacles(self, call: RouteCall) -> Iterator[str]:
        """Yield the reasons to decline, cheap checks first; words are made only on failure."""
        query, key, value, mask = call.query, call.key, call.value, call.attn_mask
        if not self.allow_cpu and query.device.type == "cpu":
            yield "tensors on the CPU"
        if query.ndim < self.min_ndim:
            yield f"needs {self.min_ndim} dimensions, query has {query.ndim}"
        if not self.allow_mask and mask is not None:
            yield f"{TAKES_NO}attn_mask"
        if not self.allow_float32 and query.dtype == torch.float32:
            yield f"{TAKES_NO}{query.dtype}"
        if self.dtypes and query.dtype not in self.dtypes:
            yield f"{TAKES_NO}{query.dtype}"
        if self.dtypes and not query.dtype == key.dtype == value.dtype:
            yield f"dtypes differ: {query.dtype}, {key.dtype} and {value.dtype}"
        if self.same_device and not query.device == key.device == value.device:
            yield f"query, key and value on {query.device}, {key.device} and {value.device}"
        head_dim = query.shape[-1]
        if self.head_dims and head_dim not in self.head_dims:
            yield f"head_dim {head_dim} is not one of {sorted(self.head_dims)}"
        if self.max_head_dim and head_dim > self.max_head_dim:
            yield f"head_dim {head_dim} exceeds {self.max_head_dim}"
        if self.head_dim_multiple and head_dim % self.head_dim_multiple:
            yield f"head_dim {head_dim} is not a multiple of {self.head_dim_multiple}"
        if self.same_value_dim and value.shape[-1] != head_dim:
            yield f"value's head_dim {value.shape[-1]} differs from query's {head_dim}"
        if self.min_tokens or self.min_long_side:
            query_tokens, key_tokens = query.shape[-2], key.shape[-2]
            if self.min_tokens and min(query_tokens, key_tokens) < self.min_tokens:
                yield f"{query_tokens} x {key_tokens} tokens, a side below {self.min_tokens}"
            if self.min_long_side and max(query_tokens, key_tokens) <= self.min_long_side:
                yield f"{query_tokens} x {key_tokens} tokens, neither above {self.min_long_side}"
        heads = query.shape[-3] if query.ndim >= 3 else 1
        if self.min_heads and heads < self.min_heads:
            yield f"{heads} heads, fewer than {self.min_heads}"
        if not self.allow_dropout and call.dropout_p > 0:
            yield "cannot apply dropout"
        if not self.allow_causal and call.is_causal:
            yield "cannot apply a causal mask"
        if not self.allow_gqa and grouped_heads(call):
            yield f"{heads} query heads over {key.shape[-3]} key heads"
        if self.whole_groups and grouped_heads(call) and heads % key.shape[-3]:
            yield f"{heads} query heads are not a multiple of {key.shape[-3]} key heads"
        if not self.allow_grad and call.grad:
            yield "has no backward and an input requires grad"
        if not self.allow_mask_grad and call.grad and mask is not None and mask.requires_grad:
            yield "has no gradient for attn_mask"
        if not self.allow_extra and call.extra:
            yield f"unknown keyword arguments {sorted(call.extra)}"
        if self.key_mask_only and mask is not None and mask.ndim >= 2 and mask.shape[-2] != 1:
            yield "cannot take an attn_mask that depends on the query row"

    def reasons(self, call: RouteCall) -> list[str]:
        """Return every reason to decline `call`; an empty list means that it is accepted."""
        return list(self._obstacles(call))

    def first_reason(self, call: RouteCall) -> str | None:
        """Return the first reason to decline `call`, or None."""
        for reason in self._obstacles(call):
            return reason
        return None

    def accepts(self, call: RouteCall) -> bool:
        """Return whether `call` passes the gate."""
        return self.first_reason(call) is None


@dataclass(frozen=True)
class Backend:
    """Declare one attention implementation. Nothing is imported until `prepare` runs.

    Args:
        name: unique short id, shown in chains.
        label: unique words that a user chooses it by.
        priority: higher is tried earlier.
        prepare: `(platform, original, settings) -> call | None`, run once a plan; imports and
            configures. None means not available; raising is logged and skips this backend only.
            `settings` holds the declared `options` and nothing else, so an option that is read but
            not declared fails at once instead of going stale. The call takes `(query, key, value,
            attn_mask, dropout_p, is_causal, scale, enable_gqa)` by position and `selection=` when
            the sparse stage attached one. A `caps` attribute narrows what is declared here.
        constraints: the gate.
        terminal: serves what every other backend declined, in place of the original.
        platforms: names of platforms, or None for everywhere.
        options: names of the settings that the prepared call captures; a change of one rebuilds the
            plan.
        caps: upper bound of what the call can consume beyond plain attention.
        obstacles: `(platform) -> reasons` that can be known without an import (a module that is not
            installed, a chip that lacks an instruction).
        selection_only: serve only calls that carry a selection, so that dense calls keep the next
            backend bit for bit.
    """

    name: str
    label: str
    priority: int
    prepare: Callable[
        [Platform, Callable[..., Tensor], Mapping[str, Any]], Callable[..., Tensor] | None
    ]
    constraints: Constraints = Constraints()
    terminal: bool = False
    platforms: frozenset[str] | None = None
    options: tuple[str, ...] = ()
    caps: frozenset[str] = frozenset()
    obstacles: Callable[[Platform], list[str]] | None = None
    selection_only: bool = False

    def missing(self, platform: Platform) -> list[str]:
        """Return why this cannot work on `platform`, as far as known without importing it."""
        if self.platforms is not None and platform.name not in self.platforms:
            return [f"only on {', '.join(sorted(self.platforms))}, this is {platform.name}"]
        return self.obstacles(platform) if self.obstacles is not None else []


class Registry:
    """The declared backends, by name and by label."""

    def __init__(self, backends: tuple[Backend, ...] = ()):
        self._backends: dict[str, Backend] = {}
        for backend in backends:
            self.register(backend)

    def register(self, backend: Backend) -> None:
        """Add a backend. Raises ValueError when its name or its label is taken."""
        if backend.name in self._backends:
            raise ValueError(f"backend.name: {backend.name!r} is registered already")
        if backend.label in self.labels():
            raise ValueError(f"backend.label: {backend.label!r} is registered already")
        self._backends[backend.name] = backend

    def by_label(self, label: str) -> Backend | None:
        """Return the backend that a label enables, or None."""
        return next((b for b in self._backends.values() if b.label == label), None)

    def ordered(self) -> tuple[Backend, ...]:
        """Return all backends by ascending priority; ties keep registration order."""
        return tuple(sorted(self._backends.values(), key=lambda b: b.priority))

    def labels(self) -> tuple[str, ...]:
        """Return all labels, in order of priority."""
        return tuple(b.label for b in self.ordered())

    def options(self) -> tuple[str, ...]:
        """Return the sorted union of the options that any backend captures."""
        return tuple(sorted({name for b in self._backends.values() for name in b.options}))

    def with_cap(self, cap: str) -> tuple[Backend, ...]:
        """Return the backends that declare a capability, in order of priority."""
        return tuple(b for b in self.ordered() if cap in b.caps)
