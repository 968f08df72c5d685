"""Time the stages of INT8 Sol-Attn on one GPU, and variants of the kernel that reads exact blocks.

    python benchmarks/gpu_int8.py [--tokens 73584] [--heads 56] [--seconds 0.5]

Medians of CUDA events on Gaussian inputs, with what was expected of a stage beside it. Each route's
output is compared with that of the whole call first, bit for bit. `solspark bench` times whole
calls with a gate and peers; this says where their time goes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solspark import last_call
from solspark.int8 import sol_attn
from solspark.kernels.sol_int8 import launch_sol_int8
from solspark.ops._sol_int8_triton import Routes, parts_of_values, register_bound
from solspark.ops.qkv_producer import quantize_qkv
from solspark.reference.sol_int8 import LOG2E

SCALE = 128**-0.5
ROUTES: dict[str, dict[str, Any]] = {
    "top-k 10 %": dict(topk_ratio=0.1),
    "top-k 20 %": dict(topk_ratio=0.2),
    "tau 1.0": dict(tau=1.0),
    "tau 1.0, 256 tokens": dict(tau=1.0, token_aug=256),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "2 stages": dict(num_stages=2),
    "4 stages, 2 programs on an SM": dict(num_stages=4, registers=232),
    "V widened by the compiler": dict(ptx=False),
    "any number of registers": dict(registers=None),
    "values in two halves": dict(parts=2),
}
EXPECTED = {
    ("quantise", ""): "2.5",
    ("route", "top-k 10 %"): "2.5",
    ("route", "tau 1.0"): "2",
    ("route", "tau 1.0, 256 tokens"): "9",
    ("attend", "top-k 10 %"): "20 to 25",
    ("attend", "top-k 20 %"): "40 to 48",
    ("attend", "tau 1.0"): "32 to 40",
    ("attend", "tau 1.0, 256 tokens"): "34 to 42",
}
"""Milliseconds at the default size on an H200, written before the first run."""


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """Return the median of CUDA events around single calls, after two that are not timed."""
    times: list[float] = []
    for index in range(200):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(stop))
        if len(times) >= 3 and sum(times) > 1e3 * seconds:
            break
    return statistics.median(times)


def main() -> None:
    """Print a line a stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=73_584)
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--seconds", type=float, default=0.5)
    chosen = parser.parse_args()

    def show(stage: str, route: str, call: Callable[[], object], note: str = "") -> float:
        time = milliseconds(call, chosen.seconds)
        expected = EXPECTED.get((stage, route), "")
        hint = f"(expected {expected})" if expected else ""
        print(f"{stage:9} {route:32} {time:9.3f} ms {hint} {note}", flush=True)
        return time

    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, chosen.tokens, chosen.heads, 128)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    show("quantise", "", lambda: quantize_qkv(q, k, v, impl="triton"))
    show("quantise", "rotated", lambda: quantize_qkv(q, k, v, rotate=True, impl="triton"))
    both = dict(rotate=True, balance=True)
    show("quantise", "rotated, balanced", lambda: quantize_qkv(q, k, v, impl="triton", **both))
    qkv = quantize_qkv(q, k, v, impl="triton")
    blocks = qkv.lengths.numel()
    shipped = dict(parts=parts_of_values(q.device), registers=register_bound(q.device))

    def found(options: dict[str, Any]) -> Routes:
        routes = Routes(qkv, SCALE * LOG2E, (0, 0), (0, 0), True, options.get("token_aug", 0))
        routes.find(options.get("tau", 1.0), options.get("topk_ratio", 0.0))
        return routes

    def attend(routes: Routes, **variant: Any) -> Tensor:
        return launch_sol_int8(
            qkv,
            routes.state,
            routes.lists,
            routes.counts,
            routes.tokens,
            None,
            None,
            a=SCALE * LOG2E,
            dtype=q.dtype,
            **{**shipped, **variant},
        )

    for name, options in ROUTES.items():
        show("route", name, lambda options=options: found(options))
        routes = found(options)
        whole = sol_attn(q, k, v, impl="triton", **options)
        assert torch.equal(attend(routes), whole), name
        tiles = int(routes.counts.sum())
        for variant, settings in VARIANTS.items() if name == "top-k 10 %" else [("", {})]:
            time = show(
                "attend",
                name if variant in ("", "as shipped") else variant,
                lambda routes=routes, settings=settings: attend(routes, **settings),
                f"density {tiles / chosen.heads / blocks**2:.3f}",
            )
            print(f"{'':43} {4 * tiles * 64 * 64 * 128 / time / 1e9:9.0f} TOP/s", flush=True)
        del routes
        show("call", name, lambda options=options: sol_attn(q, k, v, impl="triton", **options))
        show("call", f"{name}, best", lambda options=options: sol_attn(q, k, v, **options))
        print(f"{'':10}served by {last_call()}"[:160], flush=True)


if __name__ == "__main__":
    main()
