"""The H3 installers on a GPU: parity in bf16, no waiting for the device, prewarmed kernels."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from solspark import kernels
from solspark.integrations.minimax_h3 import install_h3_sol_attn, install_h3_spark_attn
from solspark.integrations.tiny_h3 import build_tiny_h3_transformer

pytestmark = pytest.mark.gpu
SPARSE: dict[str, Any] = {"warmup_ratio": 0.0, "dense_layers": 0, "min_tokens": 0}
INSTALLERS = [install_h3_sol_attn, install_h3_spark_attn]


def on_gpu(request: Any) -> Any:
    moved = dataclasses.replace(request, structure=dict(request.structure))
    for name in ("latents", "audio", "text"):
        setattr(moved, name, getattr(request, name).cuda())
    return moved


def inputs_on_gpu(request: Any, time: float, structure: dict[str, Any]) -> dict[str, Any]:
    inputs = {**request.inputs(time), **structure}
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("install", INSTALLERS)
def test_everything_exact_is_dense(install: Callable[..., Any], make_request: Any) -> None:
    transformer = build_tiny_h3_transformer(dtype=torch.bfloat16, device="cuda")
    oracle_model = copy.deepcopy(transformer).double()
    inputs = inputs_on_gpu(on_gpu(make_request("fl2va", (9, 4, 12))), 0.3, {})
    with torch.no_grad():
        usual = transformer(**inputs)
        wide = {
            name: value.double() if name.endswith("hidden_states") else value
            for name, value in inputs.items()
        }
        exact = oracle_model(**wide)
        with install(
            transformer, num_denoise_steps=1, sol_route_topk_ratio=1.0, **SPARSE
        ) as plugin:
            ours = transformer(**inputs)
            assert plugin.summary()["processor_calls"]["sparse:sol"] == 4
    for a, b, c in zip(ours, usual, exact, strict=True):
        scale = float(c.abs().max())
        for measure in (torch.max, torch.mean):
            error, rounding = measure((a - c).abs()), measure((b - c).abs())
            assert error <= 2 * rounding + torch.finfo(torch.bfloat16).eps * scale


@pytest.mark.parametrize("chunk_tokens", [None, 256])
@pytest.mark.parametrize("mended", [None, True], ids=["as served", "rotated and balanced"])
def test_everything_exact_in_int8_is_dense(
    make_request: Any, chunk_tokens: int | None, mended: bool | None
) -> None:
    transformer = build_tiny_h3_transformer(dtype=torch.bfloat16, device="cuda")
    request = on_gpu(make_request("fl2va", (9, 4, 12)))
    with torch.no_grad():
        options = {"int8_rotate": mended, "int8_balance": mended, "chunk_tokens": chunk_tokens}
        with install_h3_sol_attn(
            transformer, num_denoise_steps=2, precision="int8", sol_tau=-1e9, **SPARSE, **options
        ) as plugin:
            for time in (0.3, 0.6):
                ours = transformer(**inputs_on_gpu(request, time, {}))
            summary = plugin.summary()
        usual = transformer(**inputs_on_gpu(request, 0.6, {}))
    assert summary["processor_calls"]["sparse:sol"] == 8
    if mended is None:
        # Nothing that no kernel serves is on by itself.
        assert "eager" not in summary["implementations"].values()
    for a, b in zip(ours, usual, strict=True):
        assert float((a - b).float().norm() / b.float().norm()) < 0.016


def every_kernel() -> list[Any]:
    """Return all kernels of the package; those of another triton than this one's are left out."""
    from triton.runtime.jit import JITFunction

    found: dict[int, Any] = {}
    for item in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        try:
            module = importlib.import_module(item.name)
        except ImportError:
            continue
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                found[id(value)] = value
    return list(found.values())


@pytest.mark.parametrize("way", ["sol", "spark", "int8", "int8 streamed"])
def test_prewarm_leaves_nothing_to_compile(way: str, make_request: Any) -> None:
    """The first sparse step after the dense warm-up is no slower than the second."""
    transformer = build_tiny_h3_transformer(dtype=torch.bfloat16, device="cuda")
    request = on_gpu(make_request())
    options: dict[str, Any] = dict(SPARSE)
    if way.startswith("int8"):
        options.update(precision="int8", chunk_tokens=256 if "streamed" in way else None)
    install = install_h3_spark_attn if way == "spark" else install_h3_sol_attn
    compiled = every_kernel()

    def variants() -> dict[str, int]:
        return {
            f"{kernel.fn.__module__}.{kernel.fn.__name__}": sum(
                len(cache[0]) for cache in kernel.device_caches.values()
            )
            for kernel in compiled
        }

    for kernel in compiled:
        kernel.device_caches.clear()
    with install(transformer, num_denoise_steps=2, **options) as plugin, torch.no_grad():
        # Another length than that of the run: lengths compile nothing.
        plugin.prewarm((6, 8, 12), context_tokens=100)
        before = variants()
        assert any(before.values())
        for time in (0.0, 0.4):
            transformer(**inputs_on_gpu(request, time, {}))
        assert plugin.summary()["processor_calls"]["sparse:sol"] == 8
    assert variants() == before


@pytest.mark.parametrize("install", INSTALLERS)
def test_a_sparse_step_does_not_wait_for_the_device(
    install: Callable[..., Any], make_request: Any
) -> None:
    transformer = build_tiny_h3_transformer(dtype=torch.bfloat16, device="cuda")
    request = on_gpu(make_request())
    structure = {name: value.cuda() for name, value in request.structure.items()}
    steps = [inputs_on_gpu(request, time, structure) for time in (0.0, 0.3, 0.6)]
    with install(transformer, num_denoise_steps=3, **SPARSE) as plugin, torch.no_grad():
        transformer(**steps[0])
        transformer(**steps[1])
        torch.cuda.set_sync_debug_mode("error")
        try:
            transformer(**steps[2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert plugin.summary()["processor_calls"]["sparse:sol"] == 12
        assert all(record["seconds"] > 0 for record in plugin.records())
