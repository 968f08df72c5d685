"""The attention rows of the router's benchmark: what each calls, and why one cannot be had here.

Every row goes through the backend that the router itself would prepare, so what is timed is what a
program gets. Sparse rows make their selection inside the timed call with the geometry cache on; the
radial control's band is built once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solspark.bench.baselines import package_version
from solspark.bench.router_presets import RouterInputs
from solspark.ops.quantize import quantize_operands
from solspark.ops.quantized_attention import fp8_obstacle
from solspark.reference.quantized_attention import Options
from solspark.router.backend import Backend, Platform
from solspark.router.backends import builtin_registry
from solspark.router.config import RouterConfig
from solspark.router.selector import (
    GeometryCache,
    Selection,
    SelectorSpec,
    select_adaptive,
    select_radial,
    visible_tiles,
)

EXTERNAL, KERNEL, SPARSE = "external", "kernel", "sparse"
KERNEL_ERROR = 0.01
"""Most relative L2 of a kernel that quantises nothing (specification 5.4)."""
QUANTIZED_ERROR = 0.2
"""The same of one that does."""
GROUP = 256
"""Channels that a rotation spans."""
FP32_ONLY = "quantized_attention accumulates in float32 only"


@dataclass(frozen=True)
class AttentionRow:
    """Declare one row.

    Args:
        name: id on the command line.
        kind: "external", "kernel" (ours, dense) or "sparse".
        backend: name in the router's registry; "" for torch's own attention.
        matmul, pv, smooth_k, hadamard, granularity: of the quantised attention, under its names.
        budget: share of the tiles that a sparse row keeps, 1.0 keeps all of them.
        radial: the static band instead of the content's choice.
        unsafe: may overflow; never recommended.
        missing: a feature that no kernel here has, in words; the row is then unavailable.
    """

    name: str
    kind: str
    backend: str = ""
    matmul: str = "none"
    pv: str = "none"
    smooth_k: bool = False
    hadamard: int = 0
    granularity: str = "row"
    budget: float | None = None
    radial: bool = False
    unsafe: bool = False
    missing: str = ""

    @property
    def ours(self) -> bool:
        """Whether a failing gate fails the run: that of other people's kernels is a finding.

        Torch's own attention counts as ours, since the gate itself is in doubt where it fails.
        """
        return (self.kind != EXTERNAL and self.backend != "flex") or self.name == "base"

    @property
    def quantized(self) -> bool:
        return self.backend == "quantized" and (self.matmul, self.pv) != ("none", "none")

    @property
    def operands(self) -> dict[str, Any]:
        """The settings tuple of the quantised attention."""
        return {
            "matmul": self.matmul,
            "pv": self.pv,
            "smooth_k": self.smooth_k,
            "hadamard": self.hadamard,
            "granularity": self.granularity,
        }

    @property
    def options(self) -> dict[str, Any]:
        """What the row was called with, for its record."""
        shown: dict[str, Any] = {}
        if self.backend == "quantized":
            shown.update(self.operands)
        if self.budget is not None:
            shown.update(budget=self.budget, pattern="radial" if self.radial else "adaptive")
        return shown


def _ours(name: str, matmul: str = "int8", pv: str = "none", **more: Any) -> AttentionRow:
    return AttentionRow(name, KERNEL, "quantized", matmul, pv, **more)


def _sparse(prefix: str, backend: str, matmul: str = "none", **more: Any) -> list[AttentionRow]:
    """Return the rows of one consumer of selections."""
    row = AttentionRow(prefix, SPARSE, backend, matmul, **more)
    return [
        *(
            replace(row, name=f"{prefix}-sparse{percent}", budget=percent / 100)
            for percent in (100, 50, 30, 15)
        ),
        replace(row, name=f"{prefix}-radial30", budget=0.3, radial=True),
    ]


ROWS: dict[str, AttentionRow] = {
    row.name: row
    for row in (
        AttentionRow("base", EXTERNAL),
        AttentionRow("cudnn", EXTERNAL),
        AttentionRow("sage", EXTERNAL, "sage"),
        AttentionRow("sagefp16", EXTERNAL, "sage"),
        AttentionRow("flash", EXTERNAL, "flash"),
        AttentionRow("flash4", EXTERNAL, "flash4"),
        AttentionRow("amdflash", EXTERNAL, "triton"),
        AttentionRow("flex", EXTERNAL, "flex"),
        *_sparse("flex", "flex"),
        _ours("noquant", "none"),
        _ours("int8"),
        _ours("int8tile", granularity="tile"),
        _ours("smooth", smooth_k=True),
        _ours("hadamard", hadamard=GROUP),
        _ours("smooth_hadamard", smooth_k=True, hadamard=GROUP),
        _ours("fp16pv", pv="fp16"),
        _ours("fp16pv-accum", pv="fp16", missing=FP32_ONLY),
        _ours("int8pv", pv="int8"),
        _ours("fp8pv", pv="fp8"),
        _ours("pvaccum", unsafe=True, missing=FP32_ONLY),
        _ours("full", pv="int8", smooth_k=True, hadamard=GROUP),
        _ours("fp16qk", "fp16"),
        _ours("fp16full", "fp16", "fp16"),
        _ours("fp16full-accum", "fp16", "fp16", missing=FP32_ONLY),
        _ours("fp8qk", "fp8"),
        _ours("fp8full", "fp8", "fp8"),
        *_sparse("int8", "quantized", "int8"),
        *_sparse("int8tile", "quantized", "int8", granularity="tile"),
        *_sparse("block", "block_sparse"),
    )
}
"""In the order of the table. `flash`, `flash4`, `cudnn`, the `int8tile` rows (a scale for 64 keys)
and the `block` rows (our BF16 block-sparse attention) are additions to the specification's list."""

_REGISTRY: dict[str, Backend] = {backend.name: backend for backend in builtin_registry().ordered()}


def obstacles(row: AttentionRow, inputs: RouterInputs, platform: Platform) -> list[str]:
    """Return why a row cannot be measured on these inputs here; empty means that it can.

    For rows of ours the router's policies (no CPU, no short sequences) do not count: on a CPU the
    eager implementation serves.
    """
    if row.missing:
        return [row.missing]
    reasons: list[str] = []
    call, preset = inputs.call(), inputs.preset
    cpu = platform.name == "cpu"
    if row.name == "cudnn" and platform.name != "cuda":
        reasons.append(f"cuDNN needs CUDA, this is {platform.name}")
    if row.name == "cudnn" and inputs.mask is not None:
        reasons.append("measured without a mask")
    if row.backend:
        backend, gate = _REGISTRY[row.backend], _REGISTRY[row.backend].constraints
        if row.backend in ("quantized", "block_sparse"):
            gate = replace(gate, allow_cpu=True, min_tokens=0, min_long_side=0, min_heads=0)
        if row.backend not in ("quantized", "block_sparse") or not cpu:
            reasons += backend.missing(platform)
        reasons += gate.reasons(call)
    if row.backend == "flex":
        if platform.name != "cuda":
            reasons.append(f"flex rows need CUDA, this is {platform.name}")
        if inputs.mask is not None or preset.causal:
            reasons.append("flex rows take neither a mask nor causality")
    alike = row.backend in ("flex", "sage") or row.budget is not None
    if alike and preset.keys != preset.tokens:
        reasons.append(f"cross attention: {preset.tokens} queries, {preset.keys} keys")
    if row.budget is not None and preset.causal:
        reasons.append("a selection takes no causality")
    if row.backend == "sage" and preset.causal:
        reasons.append("measured without causality")
    if row.backend == "sage" and preset.groups != preset.heads:
        reasons.append("measured without grouped heads")
    if row.name == "sagefp16" and platform.capability != (8, 6):
        reasons.append("the kernel that sage itself takes elsewhere; a row on SM86 only")
    if "fp8" in (row.matmul, row.pv) and inputs.device.type == "cuda":
        missing = fp8_obstacle(inputs.device)
        reasons += [missing] if missing else []
    return list(dict.fromkeys(reasons))


@dataclass
class Built:
    """Hold a row ready to run.

    Args:
        run: () -> (output [B, H, Lq, D], selection or None).
        prepare: quantises the operands and nothing else; None where nothing is quantised.
        implementation: what serves, where our operations do not record it.
    """

    run: Callable[[], tuple[Tensor, Selection | None]]
    prepare: Callable[[], Any] | None = None
    implementation: str | None = None
    cache: GeometryCache = field(default_factory=GeometryCache)


def build_row(row: AttentionRow, inputs: RouterInputs, platform: Platform) -> Built:
    """Prepare a row's call.

    Args:
        row: what to call.
        inputs: of the call.
        platform: what the backend is prepared for.
    """
    attend = prepared(row, platform)
    call, preset = inputs.call(), inputs.preset
    plain = (
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        0.0,
        call.is_causal,
        None,
        call.enable_gqa,
    )
    built = Built(lambda: (attend(*plain), None), implementation=_served(row, platform))
    if row.quantized and row.matmul != "none":
        built.prepare = _quantisation(row, inputs)
    if row.budget is None:
        return built
    spec = SelectorSpec(budget=row.budget, force=row.budget >= 1)
    if row.radial:
        band = select_radial(preset.tokens, spec, inputs.device, visible=_visible(inputs, spec))
        if band is None:
            raise ValueError(f"{row.name}: the band covers everything")
        built.run = lambda: (attend(*plain, selection=band), band)
        return built

    def sparse() -> tuple[Tensor, Selection | None]:
        selection = select_adaptive(
            call.query, call.key, spec, visible=_visible(inputs, spec), cache=built.cache
        )
        if selection is None:
            raise ValueError(f"{row.name}: the budget covers everything")
        return attend(*plain, selection=selection), selection

    built.run = sparse
    return built


def prepared(row: AttentionRow, platform: Platform) -> Callable[..., Tensor]:
    """Return the attention of a row behind the signature of scaled_dot_product_attention.

    Raises:
        RuntimeError: the backend says that it is not available.
    """
    if row.name == "cudnn":
        return _cudnn
    if not row.backend:
        return _torch
    config = RouterConfig(
        quantized_matmul=row.matmul,
        quantized_pv=row.pv,
        quantized_smooth_k=row.smooth_k,
        quantized_hadamard=row.hadamard,
        quantized_granularity=row.granularity,
    )
    backend = _REGISTRY[row.backend]
    settings = {name: config.setting(name) for name in backend.options}
    call = backend.prepare(platform, F.scaled_dot_product_attention, settings)
    if call is None:
        raise RuntimeError(f"{backend.label} is not available on this machine")
    return call


def _torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run torch's own attention."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _cudnn(*arguments: Any) -> Tensor:
    """Run torch's own attention on cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _torch(*arguments)


def _visible(inputs: RouterInputs, spec: SelectorSpec) -> Tensor | None:
    """Return which tiles the token mask shows anything of, as the sparse stage asks it."""
    if inputs.mask is None:
        return None
    return visible_tiles(inputs.mask, inputs.preset.tokens, spec.query_tile, spec.key_tile)


def _quantisation(row: AttentionRow, inputs: RouterInputs) -> Callable[[], Any]:
    """Return the quantisation of a row's operands, without the attention."""
    options = Options(
        128,
        64,
        inputs.preset.causal,
        inputs.preset.head_dim**-0.5,
        row.matmul,
        row.pv,
        row.smooth_k,
        row.hadamard,
        row.granularity,
    )
    operands = [x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)]
    impl = "eager" if inputs.device.type == "cpu" else "triton"
    return lambda: quantize_operands(operands[0], operands[1], operands[2], options, impl)


def _served(row: AttentionRow, platform: Platform) -> str | None:
    """Return what serves a row of other people's kernels."""
    if row.backend == "sage":
        return f"{package_version('sageattention')}, {sage_kernel(platform)}"
    packages = {"flash": "flash-attn", "flash4": "flash-attn-4"}
    if row.backend in packages:
        return package_version(packages[row.backend])
    if row.backend == "flex":
        return f"torch {torch.__version__} flex"
    if not row.backend:
        return f"torch {torch.__version__}" + (" cuDNN" if row.name == "cudnn" else "")
    return None


def sage_kernel(platform: Platform) -> str:
    """Return which of SageAttention's kernels its dispatcher takes on a chip."""
    if importlib.util.find_spec("sageattention") is None:
        return "not installed"
    kernels = {
        (8, 0): "INT8 QK, FP16 PV",
        (8, 6): "INT8 QK, FP16 PV, FP32 accumulation",
        (8, 9): "INT8 QK, FP8 PV",
        (9, 0): "INT8 QK, FP8 PV for SM90",
        (12, 0): "INT8 QK, FP8 PV",
    }
    version = package_version("sageattention")
    if " 1." in version:
        return "INT8 QK in Triton"
    return kernels.get(platform.capability or (0, 0), "the package's own choice")


def choose_ids(text: str, known: dict[str, Any], what: str, aliases: dict[str, Any]) -> list[str]:
    """Return the ids of a comma-separated list in the order given, aliases spelled out.

    Args:
        text: the list, or "all".
        known: valid ids.
        what: name of the option, for the message.
        aliases: id -> ids.

    Raises:
        ValueError: an id is unknown; the message lists the valid ones.
    """
    chosen: list[str] = []
    for word in (part.strip() for part in text.split(",") if part.strip()):
        if word in aliases:
            chosen += aliases[word]
        elif word == "all":
            chosen += list(known)
        elif word in known:
            chosen.append(word)
        else:
            valid = ", ".join([*known, *(name for name in aliases if name != "all"), "all"])
            raise ValueError(f"{what}: {word!r} is unknown; valid are {valid}")
    if not chosen:
        raise ValueError(f"{what}: expected at least one of {', '.join(known)}")
    return list(dict.fromkeys(chosen))


def block_attention(row: AttentionRow, platform: Platform) -> Callable[..., Tensor]:
    """Return a row's attention (query, key, value) -> out for use inside a model.

    A sparse row selects at every call, its geometry cached.
    """
    attend = prepared(row, platform)
    if row.budget is None:
        return attend
    cache = GeometryCache()
    spec = SelectorSpec(budget=row.budget, force=row.budget >= 1)

    def sparse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if row.radial:
            selection = select_radial(query.shape[2], spec, query.device, cache=cache)
        else:
            selection = select_adaptive(query, key, spec, cache=cache)
        return attend(query, key, value, selection=selection)

    return sparse
