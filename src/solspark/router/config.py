"""What a host sets: a frozen configuration of the router and of its sparse stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from solspark import _checks
from solspark.ops.quantize import GRANULARITIES, check_hadamard
from solspark.reference.quantized_attention import OPERANDS
from solspark.router.backend import Platform

SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
"""The kernels of torch's own attention that can be switched on and off."""

DEFAULT_MIN_TOKENS = 8192
"""Below this length choosing and gathering costs about what it saves."""


@dataclass(frozen=True)
class SparseConfig:
    """Settings of the sparse stage.

    Args:
        enabled: the master switch.
        budget: share of the choosable key tiles that each query tile keeps, in (0, 1]; 1 or more
            keeps all (dense).
        min_tokens: shorter sequences stay dense; None is 8,192, 0 no floor.
        schedule_steps: steps at each end of a generation that get a raised budget.
        schedule_fraction: the same as a share of all steps; the larger of the two counts.
        schedule_bump: how much to raise the budget there (0.7 above a budget of 0.3 is dense).
        head_shared: one selection for all heads.
        exclude: names of architectures, pipelines or denoiser classes that stay dense, compared
            without case.
        pattern: "adaptive" chooses by content; "radial" keeps a static band of the same density, as
            a control.
        tail: stand in for the tiles left out by their mean keys and values, where the backend can
            ("Block-sparse attention"), instead of leaving them out altogether.
        query_tile, key_tile: tokens in a tile of the selection.
        score_chunk_bytes: bound of one float32 score slab.
        require_layout: keep sequences dense that no token layout describes, instead of treating all
            their tokens as choosable (an unknown model that joins text and image in one sequence).
        allow_cpu: let CPU tensors go sparse (tests and machines without a GPU).
    """

    enabled: bool = False
    budget: float = 0.30
    min_tokens: int | None = None
    schedule_steps: int = 0
    schedule_fraction: float = 0.0
    schedule_bump: float = 0.0
    head_shared: bool = False
    exclude: tuple[str, ...] = ()
    pattern: str = "adaptive"
    tail: bool = False
    query_tile: int = 128
    key_tile: int = 64
    score_chunk_bytes: int = 256 * 2**20
    require_layout: bool = False
    allow_cpu: bool = False

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"sparse.budget: expected a share above 0, got {self.budget!r}")
        if self.min_tokens is not None and self.min_tokens < 0:
            raise ValueError(
                f"sparse.min_tokens: expected None or at least 0, got {self.min_tokens}"
            )
        if self.schedule_steps < 0:
            raise ValueError(
                f"sparse.schedule_steps: expected at least 0, got {self.schedule_steps}"
            )
        for name in ("schedule_fraction", "schedule_bump"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"sparse.{name}: expected 0 to 1, got {getattr(self, name)!r}")
        if self.pattern not in ("adaptive", "radial"):
            raise ValueError(
                f"sparse.pattern: expected 'adaptive' or 'radial', got {self.pattern!r}"
            )
        if isinstance(self.exclude, str):
            raise ValueError(f"sparse.exclude: expected a tuple of names, got {self.exclude!r}")
        for name in ("query_tile", "key_tile"):
            if getattr(self, name) not in (64, 128, 256):
                raise ValueError(
                    f"sparse.{name}: expected 64, 128 or 256, got {getattr(self, name)}"
                )
        _checks.check_bool("sparse.tail", self.tail)
        if self.score_chunk_bytes < 1:
            raise ValueError(
                f"sparse.score_chunk_bytes: expected at least 1, got {self.score_chunk_bytes}"
            )

    @property
    def token_floor(self) -> int:
        """The shortest sequence that may go sparse."""
        return DEFAULT_MIN_TOKENS if self.min_tokens is None else self.min_tokens


@dataclass(frozen=True)
class RouterConfig:
    """Settings of a router.

    Args:
        backends: labels of the chosen backends; None is `default_labels(platform)`.
        sdp_kernels: which of torch's own kernels may serve ("flash", "mem_efficient", "math",
            "cudnn"); None leaves torch's flags alone.
        sparse: the sparse stage.
        strict: raise UnsupportedError where the sparse stage was asked for and something other than
            a policy keeps a call dense (a mask that no backend can take, a shape, a backend that is
            missing).
        telemetry: log each distinct route once and count calls; None reads SOLSPARK_ROUTER_DEBUG.
        dynamic_slice_gib: the sliced terminal cuts work into pieces of at most this many GiB of
            scores.
        dynamic_trigger_gib: and does so from this size on.
        quantized_matmul: operands of Q K^T: "int8", "fp8", "fp16" or "none".
        quantized_pv: operands of P V: the same names.
        quantized_smooth_k: subtract the mean key first.
        quantized_hadamard: rotate head channels in groups of this size, 0 not at all.
        quantized_granularity: one scale of keys and values for a "tile" of 64 tokens, or one a
            "row" (token), which is more exact and slower (docs/measured.md, Quantised attention).
        extra: options that a host's own backends declare.
    """

    backends: tuple[str, ...] | None = None
    sdp_kernels: frozenset[str] | None = None
    sparse: SparseConfig = SparseConfig()
    strict: bool = False
    telemetry: bool | None = None
    dynamic_slice_gib: float = 0.5
    dynamic_trigger_gib: float = 1.0
    quantized_matmul: str = "int8"
    quantized_pv: str = "none"
    quantized_smooth_k: bool = True
    quantized_hadamard: int = 0
    quantized_granularity: str = "tile"
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if isinstance(self.backends, str):
            raise ValueError(f"config.backends: expected a tuple of labels, got {self.backends!r}")
        unknown = (self.sdp_kernels or frozenset()) - frozenset(SDP_KERNELS)
        if unknown:
            raise ValueError(
                f"config.sdp_kernels: expected names of {SDP_KERNELS}, got {sorted(unknown)}"
            )
        if self.sdp_kernels is not None and not self.sdp_kernels:
            raise ValueError("config.sdp_kernels: expected at least one kernel, got none")
        for name in ("dynamic_slice_gib", "dynamic_trigger_gib"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(
                    f"config.{name}: expected a positive size, got {getattr(self, name)!r}"
                )

        for name in ("quantized_matmul", "quantized_pv"):
            _checks.check_choice(f"config.{name}", getattr(self, name), OPERANDS)
        _checks.check_bool("config.quantized_smooth_k", self.quantized_smooth_k)
        _checks.check_choice(
            "config.quantized_granularity", self.quantized_granularity, GRANULARITIES
        )
        check_hadamard(self.quantized_hadamard, "config.quantized_hadamard")

    def setting(self, name: str) -> Any:
        """Return the value of one watched setting; KeyError when no setting has that name."""
        if name.startswith("sparse."):
            return getattr(self.sparse, name.removeprefix("sparse."))
        if name in _OWN_FIELDS:
            return getattr(self, name)
        if name in self.extra:
            return self.extra[name]
        raise KeyError(f"no setting is called {name!r}")


_OWN_FIELDS = frozenset(f.name for f in fields(RouterConfig)) - {"sparse", "extra"}
SPARSE_SETTINGS = tuple(f"sparse.{f.name}" for f in fields(SparseConfig))


def default_labels(platform: Platform) -> tuple[str, ...]:
    """Return the labels that a platform gets when the user chooses none.

    Source: spec/router.md 1.3: nothing on CUDA and XPU; the sliced terminal where torch has no
    memory-efficient kernel (ZLUDA, DirectML, CPU, MPS, AMD chips older than gfx1100).
    """
    if platform.name in ("zluda", "directml", "cpu", "mps"):
        return ("Dynamic attention",)
    chip = platform.architecture or ""
    if platform.name == "rocm" and chip.startswith("gfx") and int(chip[3:], 16) < 0x1100:
        return ("Dynamic attention",)
    return ()
