"""Check the quantised attention on a GPU and time it beside cuDNN: dense, 30 % and 15 % of blocks.

    python benchmarks/gpu_quantized.py [--check-only | --time-only | --sweep] [--json FILE]
        [--commit ID]

Shape: [1, T, 56, 128] bf16, T = 38,222 by default, Gaussian with a shared bias a channel in K.
Checks: sampled rows against float64 under the same masks; token mask and blocks together against
the joined mask, bit for bit; all blocks against none, bit for bit; 20 repeats and fused-QKV views,
bit for bit; backward against float32 autograd at a small size (at most 0.5 %). Times: whole calls
(mean, quantisation, lists and attention), the attention alone, the selector, the backward.
`--sweep` does neither: it times other tiles, warps, stages and register caps for the attention
alone and names the quickest for each setting, to fill the kernel's table (`choose_config`).

Targets on an H200: 30 % at least 2.9x and 15 % at least 5x cuDNN's time, dense at most 91.7 ms.
Exits non-zero when a check fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from solspark.bench.rows import (
    Row,
    append_row,
    current_commit,
    device_name,
    fresh_run_id,
    today,
    triton_version,
)
from solspark.bench.timing import Timing, measure
from solspark.kernels import quantized_attention as kernels
from solspark.kernels.quantized_tile import Config
from solspark.ops import _quantized_triton
from solspark.ops.quantized_attention import fp8_obstacle, quantized_attention
from solspark.reference.quantized_attention import Options
from solspark.router import SelectorSpec, select_adaptive
from solspark.router.selector import GeometryCache

HEADS, DIM = 56, 128
DEVICE = torch.device("cuda")
SETTINGS = {"int8 row": {}, "int8 tile": {"granularity": "tile"}}
MORE = {
    "bf16 (nothing quantised)": {"matmul": "none"},
    "int8 + hadamard": {"hadamard": 128},
    "int8, int8 pv": {"pv": "int8"},
    "int8, int8 pv, tile": {"pv": "int8", "granularity": "tile"},
    "fp8": {"matmul": "fp8"},
    "fp8, fp8 pv": {"matmul": "fp8", "pv": "fp8"},
}
CANDIDATES = (
    Config(128, 64, 4, 3),
    Config(128, 64, 4, 2),
    # Two programs of eight warps share a multiprocessor at 128 registers a thread; without the cap
    # one fills it. Compiled for sm_90 the loop then spills nothing.
    Config(128, 64, 8, 2, 128),
    Config(128, 64, 8, 3, 128),
    Config(128, 64, 8, 3),
    Config(128, 32, 8, 4, 128),
    Config(128, 32, 4, 3),
    Config(64, 64, 4, 3),
    Config(64, 64, 4, 3, 128),
)
DENSE_MS = 91.7
"""comfy-kitchen's dense INT8 attention at the default shape on an H200."""
SPEED_UPS = {0.3: 2.9, 0.15: 5.0}
"""Wanted over cuDNN in the same run."""
GEOMETRY = GeometryCache()
OK = True


def inputs(
    tokens: int, heads: int, dim: int = DIM, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[Tensor]:
    """Return Q, K, V [1, T, H, D]: Gaussian, K with a shared bias and three loud channels."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    found = []
    for number in range(3):
        x = torch.empty(1, tokens, heads, dim, dtype=dtype, device=DEVICE)
        for head in range(heads):
            rows = torch.randn(tokens, dim, generator=generator, device=DEVICE)
            if number == 1:
                rows += 3 * torch.randn(dim, generator=generator, device=DEVICE)
                rows[:, :3] *= 4
            x[0, :, head] = rows
        found.append(x)
    return found


def say(ok: bool, words: str) -> None:
    """Print a verdict and remember a failure."""
    global OK
    OK &= ok
    print(("ok   " if ok else "FAIL ") + words, flush=True)


def sampled_error(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, mask: Tensor | None, rows: int = 64
) -> float:
    """Return the relative L2 error of some rows of three heads against float64."""
    tokens, heads = query.shape[1], query.shape[2]
    at = torch.linspace(0, tokens - 1, rows, device=DEVICE).long()
    total = wrong = 0.0
    for head in {0, heads // 2, heads - 1}:
        q, k, v = query[0, at, head].double(), key[0, :, head].double(), value[0, :, head].double()
        logits = q @ k.T * DIM**-0.5
        if mask is not None:
            shown = mask[0, head % mask.shape[1]][at // 128].repeat_interleave(64, 1)[:, :tokens]
            logits = logits.masked_fill(shown == 0, float("-inf"))
        want = logits.softmax(-1) @ v
        wrong += float((out[0, at, head].double() - want).square().sum())
        total += float(want.square().sum())
    return (wrong / total) ** 0.5


def selection(query: Tensor, key: Tensor, budget: float) -> Tensor:
    """Return the selector's tiles of 128 x 64 at a budget, with the geometry kept."""
    spec = SelectorSpec(budget=budget, force=True)
    chosen = select_adaptive(query.transpose(1, 2), key.transpose(1, 2), spec, cache=GEOMETRY)
    assert chosen is not None
    return chosen.keep


def check_large(tokens: int, heads: int) -> None:
    """Compare at the timed length, on fewer heads."""
    query, key, value = inputs(tokens, heads)
    bounds = {"bf16 (nothing quantised)": 0.005, "int8, int8 pv, tile": 0.04}
    bounds.update({"fp8": 0.06, "fp8, fp8 pv": 0.08})
    for name, options in {**SETTINGS, **MORE}.items():
        if "fp8" in name and fp8_obstacle(DEVICE):
            continue
        for budget in (None, 0.3):
            mask = None if budget is None else selection(query, key, budget)
            out = quantized_attention(query, key, value, block_mask=mask, impl="triton", **options)
            error = sampled_error(query, key, value, out, mask)
            fine = bool(out.isfinite().all()) and error < bounds.get(name, 0.03)
            share = "all blocks" if budget is None else f"{budget:.0%}"
            say(fine, f"{name}, {share}: relative L2 {error:.4f}")
    keep = selection(query, key, 0.3)
    run = {"impl": "triton", "block_mask": keep}
    first = quantized_attention(query, key, value, **run)
    same = all(torch.equal(first, quantized_attention(query, key, value, **run)) for _ in range(20))
    say(same, "20 repeats bit for bit")
    fused = torch.stack([query, key, value], 2)
    views = [fused[:, :, i] for i in range(3)]
    say(torch.equal(first, quantized_attention(*views, **run)), "fused-QKV views bit for bit")
    dense = quantized_attention(query, key, value, impl="triton")
    ones = torch.ones_like(keep)
    every = quantized_attention(query, key, value, block_mask=ones, impl="triton")
    say(torch.equal(dense, every), "all blocks and no block mask bit for bit")


def check_joined(tokens: int = 4000, heads: int = 4) -> None:
    """Token mask and blocks together against their join, where a full mask fits."""
    query, key, value = inputs(tokens, heads)
    keep = selection(query, key, 0.3)
    shown = keep.repeat_interleave(128, 2).repeat_interleave(64, 3)[:, :, :tokens, :tokens].bool()
    mask = torch.rand(1, 1, 1, tokens, device=DEVICE) > 0.25
    for name, options in SETTINGS.items():
        both = quantized_attention(
            query, key, value, attn_mask=mask, block_mask=keep, impl="triton", **options
        )
        joined = quantized_attention(
            query, key, value, attn_mask=mask & shown, impl="triton", **options
        )
        say(torch.equal(both, joined), f"{name}: mask and blocks equal the joined mask bit for bit")


def check_backward(tokens: int = 1000, heads: int = 4) -> None:
    """Gradients against float32 autograd."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cases: list[tuple[str, torch.dtype, int, dict[str, Any], float]] = [
        ("float32, nothing quantised, D = 32", torch.float32, 32, {"matmul": "none"}, 0.005),
        ("float32, nothing quantised, D = 128", torch.float32, 128, {"matmul": "none"}, 0.005),
        ("bf16, nothing quantised", torch.bfloat16, 128, {"matmul": "none"}, 0.02),
        ("bf16, int8", torch.bfloat16, 128, {}, 0.08),
    ]
    for name, dtype, dim, options, bound in cases:
        given = inputs(tokens, heads, dim, dtype)
        grad_out = torch.randn(given[0].shape, device=DEVICE).to(dtype)
        for masked in (False, True):
            keep = selection(given[0], given[1], 0.3) if masked else None
            shown = None
            if keep is not None:
                shown = keep.repeat_interleave(128, 2).repeat_interleave(64, 3)
                shown = shown[:, :, :tokens, :tokens].bool()
            leaves = [x.detach().clone().requires_grad_() for x in given]
            out = quantized_attention(*leaves, block_mask=keep, impl="triton", **options)
            assert isinstance(out, Tensor)
            out.backward(grad_out)
            twins = [x.detach().float().clone().requires_grad_() for x in given]
            with sdpa_kernel(SDPBackend.MATH):
                F.scaled_dot_product_attention(
                    *[x.transpose(1, 2) for x in twins], attn_mask=shown
                ).transpose(1, 2).backward(grad_out.float())
            worst = 0.0
            for leaf, twin in zip(leaves, twins, strict=True):
                assert leaf.grad is not None and twin.grad is not None
                difference = (leaf.grad.float() - twin.grad).abs().max()
                worst = max(worst, float(difference / twin.grad.abs().max()))
            blocks = "30 % of blocks" if masked else "dense"
            say(worst < bound, f"gradients, {name}, {blocks}: {worst:.4f} of the largest")


class Table:
    """Timed rows of one run, printed as they come."""

    def __init__(self, tokens: int, heads: int, path: Path | None, commit: str):
        self.tokens, self.heads, self.path, self.commit = tokens, heads, path, commit
        self.run, self.baseline = fresh_run_id(), 0.0

    def time(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        level: str = "call",
        density: float | None = 1.0,
        flops: float = 1.0,
        precision: str = "bf16",
        options: dict[str, Any] | None = None,
    ) -> Timing:
        """Time a call, print it beside the baseline, and keep a row."""
        timing = measure(call, DEVICE)
        if not self.baseline:
            self.baseline = timing.ms
        work = 4 * self.tokens**2 * self.heads * DIM * flops * (density or 0.0)
        rate = work / timing.ms / 1e9
        print(
            f"{name:44s} {timing.ms:9.2f} ms  iqr {timing.iqr_ms:6.2f}  {rate:6.0f} TOP/s  "
            f"{self.baseline / timing.ms:5.2f}x  peak {timing.peak_gib or 0.0:5.2f} GiB  "
            f"first {timing.first_s:5.1f} s",
            flush=True,
        )
        if self.path is not None:
            row = Row(
                run=self.run,
                date=today(),
                commit=self.commit,
                gpu=device_name(DEVICE),
                torch=torch.__version__,
                triton=triton_version(),
                problem="h3-5s" if self.tokens == 38_222 else f"t{self.tokens}",
                tokens=self.tokens,
                heads=self.heads,
                level=level,
                method="dense-cudnn" if name == "cuDNN" else "quantized",
                options={"name": name, **(options or {})},
                implementation="cudnn" if name == "cuDNN" else "triton",
                precision=precision,
                density=density,
                ms=timing.ms,
                iqr_ms=timing.iqr_ms,
                tflops=rate,
                peak_gib=timing.peak_gib,
                gate="pass" if OK else "a check failed",
            )
            append_row(self.path, row)
        return timing


def time_all(table: Table, sweep: bool) -> None:
    """Time the baseline and every setting in one run, or sweep."""
    tokens, heads = table.tokens, table.heads
    query, key, value = inputs(tokens, heads)
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        table.time("cuDNN", lambda: F.scaled_dot_product_attention(*heads_first))
    masks = {1.0: None, 0.3: selection(query, key, 0.3), 0.15: selection(query, key, 0.15)}
    if sweep:
        sweep_configs(table, query, key, value, masks)
        return
    for budget, mask in masks.items():
        density = 1.0 if mask is None else float(mask.float().mean())
        share = "dense" if mask is None else f"{budget:.0%} ({density:.3f})"
        for name, options in SETTINGS.items():
            timing = table.time(
                f"{name}, {share}, whole call",
                lambda mask=mask, options=options: quantized_attention(
                    query, key, value, block_mask=mask, impl="triton", **options
                ),
                density=density,
                precision="int8",
                options={**options, "budget": budget},
            )
            judge(f"{name}, {share}", budget, timing.ms, table)
            if mask is not None:
                timing = table.time(
                    f"{name}, {share}, selection and call",
                    lambda budget=budget, options=options: quantized_attention(
                        query,
                        key,
                        value,
                        block_mask=selection(query, key, budget),
                        impl="triton",
                        **options,
                    ),
                    density=density,
                    precision="int8",
                    options={**options, "budget": budget, "selection": True},
                )
                judge(f"{name}, {share} with its selection", budget, timing.ms, table)
            attend = attend_of(query, key, value, mask, options)
            table.time(
                f"{name}, {share}, attention alone",
                attend,
                level="attend",
                density=density,
                precision="int8",
                options={**options, "budget": budget},
            )
        if mask is not None:
            table.time(
                f"selector at {budget:.0%}",
                lambda budget=budget: selection(query, key, budget),
                level="plan",
                density=None,
            )
    for name, options in MORE.items():
        if "fp8" in name and fp8_obstacle(DEVICE):
            continue
        for budget in (1.0, 0.3):
            mask = masks[budget]
            table.time(
                f"{name}, {'dense' if mask is None else '30 %'}, whole call",
                lambda mask=mask, options=options: quantized_attention(
                    query, key, value, block_mask=mask, impl="triton", **options
                ),
                density=1.0 if mask is None else float(mask.float().mean()),
                precision=name,
                options={**options, "budget": budget},
            )
    keys = torch.rand(1, 1, 1, tokens, device=DEVICE) > 0.25
    table.time(
        "int8 row, 30 % and a key mask, whole call",
        lambda: quantized_attention(
            query, key, value, attn_mask=keys, block_mask=masks[0.3], impl="triton"
        ),
        density=float(masks[0.3].float().mean()),  # type: ignore[union-attr]
        precision="int8",
        options={"attn_mask": "keys"},
    )
    time_backward(table, query, key, value, masks)


def judge(name: str, budget: float, ms: float, table: Table) -> None:
    """Print how a whole call stands to its target; targets hold at the default shape only."""
    if (table.tokens, table.heads) != (38_222, HEADS):
        return
    bar = DENSE_MS if budget == 1.0 else table.baseline / SPEED_UPS[budget]
    print(
        f"target {'met' if ms <= bar else 'MISSED'}: {name}, {ms:.1f} ms of {bar:.1f}", flush=True
    )


def attend_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    config: Config | None = None,
) -> Callable[[], Any]:
    """Return the kernel call alone: operands quantised and lists built beforehand."""
    resolved = Options(
        128, 64, False, DIM**-0.5, "int8", "none", True, 0, options.get("granularity", "row")
    )
    operands = _quantized_triton.kernel_operands(query, key, value, resolved)
    lists = _quantized_triton.block_lists(mask, resolved)
    chosen = config or _quantized_triton.tiles_for(value, None, mask, resolved)
    return lambda: kernels.launch_quantized_attention(
        operands,
        head_dim=DIM,
        value_dim=DIM,
        lists=lists,
        attn_mask=None,
        is_causal=False,
        scale=DIM**-0.5,
        pv="none",
        tile_scales=resolved.granularity == "tile",
        out_dtype=value.dtype,
        config=chosen,
    )


def time_backward(
    table: Table, query: Tensor, key: Tensor, value: Tensor, masks: dict[float, Tensor | None]
) -> None:
    """Time the gradients alone."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    grad_out = torch.randn_like(query)
    for budget in (1.0, 0.3):
        mask = masks[budget]
        out = quantized_attention(*leaves, block_mask=mask, impl="triton")
        assert isinstance(out, Tensor)

        def backward(out: Tensor = out) -> Any:
            return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

        table.time(
            f"backward, int8 row, {'dense' if mask is None else '30 %'}",
            backward,
            density=1.0 if mask is None else float(mask.float().mean()),
            # Seven products (S and dP twice, dQ, dK, dV) to the forward's two.
            flops=3.5,
            precision="int8",
            options={"level": "backward", "budget": budget},
        )


def sweep_configs(
    table: Table, query: Tensor, key: Tensor, value: Tensor, masks: dict[float, Tensor | None]
) -> None:
    """Time other tiles, warps, stages and register caps, and name the quickest."""
    for granularity, budget in itertools.product(("row", "tile"), (1.0, 0.3, 0.15)):
        mask = masks[budget]
        density = 1.0 if mask is None else float(mask.float().mean())
        found: dict[Config, float] = {}
        for config in CANDIDATES:
            cap = f" r{config.registers}" if config.registers else ""
            shape = f"{config.query_tile}x{config.key_tile} w{config.warps} s{config.stages}{cap}"
            name = f"{granularity} {budget:.0%} {shape}"
            try:
                attend = attend_of(query, key, value, mask, {"granularity": granularity}, config)
                timing = table.time(
                    name,
                    attend,
                    level="attend",
                    density=density,
                    precision="int8",
                    options={"granularity": granularity, "budget": budget, "config": config},
                )
                found[config] = timing.ms
            except Exception as error:
                # Some tiles need more shared memory than there is: that is a result, too.
                print(f"{name:44s} {type(error).__name__}: {str(error)[:100]}", flush=True)
        if found:
            best = min(found, key=found.__getitem__)
            chosen = found.get(CANDIDATES[0])
            print(f"quickest, {granularity} {budget:.0%}: {best}, {found[best]:.2f} ms", end="")
            print(f" (first candidate {chosen:.2f} ms)" if chosen else "", flush=True)


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=38_222)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--time-only", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="time other tiles, warps and stages")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    parser.add_argument("--commit", help="for the rows; default: that of the checkout")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA or ROCm device")
    if not (arguments.time_only or arguments.sweep):
        with torch.no_grad():
            check_large(arguments.tokens, 3)
            check_joined()
        check_backward()
    if not arguments.check_only:
        commit = arguments.commit or current_commit()
        table = Table(arguments.tokens, arguments.heads, arguments.json, commit)
        time_all(table, arguments.sweep)
    sys.exit(0 if OK else 1)


if __name__ == "__main__":
    main()
