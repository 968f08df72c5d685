"""With everything exact, the sparse transformer is the dense one, up to float32 rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from solspark.integrations.minimax_h3 import install_h3_sol_attn, install_h3_spark_attn

# 6 blocks and nothing left over; 6 blocks and 48 rows.
GRIDS = {"V%64=0": (6, 8, 8), "V%64=48": (9, 4, 12)}
EVERYWHERE: dict[str, Any] = {
    "num_denoise_steps": 2,
    "warmup_ratio": 0.0,
    "dense_layers": 0,
    "min_tokens": 0,
}
METHODS: dict[str, Callable[[Any, str], Any]] = {
    "sol-topk": lambda transformer, tail: install_h3_sol_attn(
        transformer, sol_route_topk_ratio=1.0, sol_video_tail_mode=tail, **EVERYWHERE
    ),
    "sol-tau": lambda transformer, tail: install_h3_sol_attn(
        transformer, sol_tau=-1e9, sol_video_tail_mode=tail, **EVERYWHERE
    ),
    "spark-topk": lambda transformer, tail: install_h3_spark_attn(
        transformer, topk_ratio=1.0, sol_video_tail_mode=tail, **EVERYWHERE
    ),
    "spark-tau": lambda transformer, tail: install_h3_spark_attn(
        transformer,
        sol_route_topk_ratio=None,
        sol_tau=-1e9,
        sol_video_tail_mode=tail,
        **EVERYWHERE,
    ),
}


@pytest.fixture(scope="module")
def dense(shared_transformer: Any, make_request: Any, denoise: Any) -> Callable[..., Any]:
    """Dense results in float32 and float64 of a request, computed once."""
    wide = copy.deepcopy(shared_transformer).double()

    @cache
    def results(task: str, name: str) -> tuple[Any, Tensor, Tensor]:
        request = make_request(task, GRIDS[name])
        double = make_request(task, GRIDS[name])
        double.latents, double.audio, double.text = (
            tensor.double() for tensor in (double.latents, double.audio, double.text)
        )
        return request, denoise(shared_transformer, request, 2), denoise(wide, double, 2)

    return results


def assert_no_worse(result: Tensor, reference: Tensor, oracle: Tensor) -> None:
    """Pass iff the error is at most twice that of the same-dtype reference, plus one rounding."""
    assert bool(result.isfinite().all())
    scale = float(oracle.abs().max())
    for measure in (Tensor.max, Tensor.mean):
        error = float(measure((result - oracle).abs()))
        usual = float(measure((reference - oracle).abs()))
        assert error <= 2 * usual + torch.finfo(result.dtype).eps * scale


@pytest.mark.parametrize("tail", ["dense", "pad"])
@pytest.mark.parametrize("grid", sorted(GRIDS))
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_everything_exact_is_dense(
    transformer: Any,
    dense: Any,
    denoise: Any,
    method: str,
    task: str,
    fused: bool,
    grid: str,
    tail: str,
) -> None:
    if method == "sol-tau" and tail == "pad":
        with pytest.raises(ValueError, match="sol_video_tail_mode: 'pad' needs"):
            METHODS[method](transformer, tail)
        return
    request, plain, oracle = dense(task, grid)
    if fused:
        transformer.fuse_qkv_projections()
    with METHODS[method](transformer, tail) as plugin:
        result = denoise(transformer, request, 2)
        summary = plugin.summary()
    assert summary["processor_calls"]["sparse:sol"] == 8
    assert summary["sol_route_density"]["delivered_density"] == 1.0
    assert_no_worse(result, plain, oracle)


@pytest.mark.parametrize("method", ["sol", "spark"])
def test_a_tenth_is_not_dense(transformer: Any, dense: Any, denoise: Any, method: str) -> None:
    """The parity above means something only if a sparse run differs."""
    request, _, oracle = dense("t2va", "V%64=0")
    install = {"sol": install_h3_sol_attn, "spark": install_h3_spark_attn}[method]
    options = {"sol_route_topk_ratio": 0.1, "sol_force_local_blocks": False}
    with install(transformer, **EVERYWHERE, **options) as plugin:
        result = denoise(transformer, request, 2)
        summary = plugin.summary()
    # One of six candidates, and the one block of context.
    figures = summary["sol_route_density"]
    assert figures["delivered_video_density"] == pytest.approx(1 / 6)
    error = float((result - oracle).norm() / oracle.norm())
    assert 1e-4 < error < 0.2
