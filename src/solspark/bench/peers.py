"""Published kernels of others, timed on the same tensors; nothing of theirs is part of this
project.

`--peers DIR` puts a folder of unpacked wheels in front of the import path. A peer that is absent or
fails is a row that says so.
"""

from __future__ import annotations

import importlib
import site
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from solspark.bench.baselines import package_version
from solspark.bench.case import Case, Unavailable, error_against_dense, judge_near, method
from solspark.bench.gate import Verdict
from solspark.bench.inputs import Inputs, chunked_projection

INT8_DENSE_ERROR = 0.05
"""Farther from dense than this, an INT8 attention over all keys is broken (published: 0.014 to
0.017).
"""

SPARSE_ERROR = 1.0
"""A sparse result farther from dense than the zero vector is broken; Gaussian inputs give 0.75."""


def add_peers(folder: Path) -> None:
    """Put a folder of unpacked wheels (or its `site`) first on the import path.

    Raises:
        ValueError: there is no such folder.
    """
    inner = folder / "site" if (folder / "site").is_dir() else folder
    if not inner.is_dir():
        raise ValueError(f"--peers: no folder {folder}")
    path = str(inner.resolve())
    sys.path.insert(0, path)
    # flash-attn-4's compiler names its folder of packages in a .pth file.
    site.addsitedir(path)


def _import(name: str) -> Any:
    """Import a peer or raise Unavailable."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # compiled extensions fail in many ways
        raise Unavailable(f"{name}: {type(error).__name__}: {str(error)[:160]}") from error


def _needs_cuda(inputs: Inputs) -> None:
    """Peers here run on CUDA alone."""
    if inputs.device.type != "cuda":
        raise Unavailable("this peer is measured on a CUDA device")


def _sparse_case(inputs: Inputs, run: Callable[[], Tensor], package: str) -> Case:
    """Return the case of a peer whose routes are its own."""
    return Case(
        run=run,
        judge=lambda out: judge_near(inputs, out, SPARSE_ERROR),
        implementation=package_version(package),
        error=lambda out: error_against_dense(inputs, out),
        precision="int8",
    )


def routing_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a Sol-Attn peer understands."""
    known = ("topk_ratio", "tau", "token_aug", "tail")
    chosen = {name: options[name] for name in known if options.get(name) is not None}
    if isinstance(chosen.get("tail"), str):
        # The peer's tail is per block or absent: its default stands for both of ours.
        chosen.pop("tail") if chosen["tail"] != "none" else chosen.update(tail=False)
    return chosen


@method("call", "comfy-kitchen-sol", "topk_ratio", "tau", "token_aug")
def _kitchen_sol(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build comfy-kitchen's INT8 `sol_attn`."""
    _needs_cuda(inputs)
    kitchen = _import("comfy_kitchen")
    chosen = routing_options(options)
    return _sparse_case(
        inputs,
        lambda: kitchen.sol_attn(inputs.query, inputs.key, inputs.value, **chosen),
        "comfy-kitchen",
    )


@method("call", "comfy-kitchen-sol-chunked", "topk_ratio", "tau", "token_aug", "primed")
def _kitchen_chunked(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build comfy-kitchen's `sol_attn_chunked` over a fused projection, cold or primed.

    Norms, rotation and projection are its own work, on Gaussian data: there is no dense result to
    compare with, so the gate asks for finite values alone.
    """
    _needs_cuda(inputs)
    kitchen = _import("comfy_kitchen")
    chosen = routing_options(options)
    projected = chunked_projection(inputs)
    state: dict[str, Any] = {}

    def run() -> Tensor:
        return kitchen.sol_attn_chunked(*projected, **state, **chosen)[0]

    if options.get("primed"):
        _, kmean, vscale = kitchen.sol_attn_chunked(*projected, **chosen)
        state.update(kmean=kmean, vscale=vscale)

    def finite(out: Tensor) -> Verdict:
        return Verdict("pass" if bool(out.isfinite().all()) else "not finite", float("nan"))

    return Case(
        run=run,
        judge=finite,
        implementation=package_version("comfy-kitchen"),
        precision="int8",
    )


@method("call", "comfy-kitchen-dense")
def _kitchen_dense(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build comfy-kitchen's dense INT8 attention; the copy to its layout is not timed."""
    _needs_cuda(inputs)
    kitchen = _import("comfy_kitchen")
    tensors = [x.contiguous() for x in inputs.transposed()]
    case = _sparse_case(
        inputs, lambda: kitchen.int8_attention(*tensors).transpose(1, 2), "comfy-kitchen"
    )
    case.judge = lambda out: judge_near(inputs, out, INT8_DENSE_ERROR)
    case.density = lambda out: 1.0
    case.flops = lambda density: float(inputs.problem.dense_flops(inputs.heads))
    return case


@method("call", "sage-dense")
def _sage(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build SageAttention 1 (Triton INT8)."""
    _needs_cuda(inputs)
    sage = _import("sageattention")
    case = _sparse_case(
        inputs,
        lambda: sage.sageattn(inputs.query, inputs.key, inputs.value, tensor_layout="NHD"),
        "sageattention",
    )
    case.judge = lambda out: judge_near(inputs, out, INT8_DENSE_ERROR)
    case.density = lambda out: 1.0
    case.flops = lambda density: float(inputs.problem.dense_flops(inputs.heads))
    return case
