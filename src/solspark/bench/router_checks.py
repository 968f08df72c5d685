"""What the router's benchmark checks before it times: the quantised attention on awkward calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark.bench.router_presets import (
    Preset,
    RouterInputs,
    make_router_inputs,
    relative_error,
)
from solspark.bench.router_rows import GROUP, KERNEL_ERROR, QUANTIZED_ERROR
from solspark.ops.quantized_attention import quantized_attention

INT8 = {"matmul": "int8", "pv": "none", "smooth_k": False, "hadamard": 0}
PLAIN = {"matmul": "none", "pv": "none", "smooth_k": False, "hadamard": 0}


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Args:
        name: what was called.
        tokens: Lq.
        heads: H.
        options: of the quantised attention.
        error: relative L2 against dense attention in float32; None where only finiteness counts.
        gate: "pass", or why not.
    """

    name: str
    tokens: int
    heads: int
    options: dict[str, Any]
    error: float | None
    gate: str


def _operands(**more: Any) -> dict[str, Any]:
    return {**INT8, **more}


def router_checks(device: torch.device, dtype: torch.dtype) -> Iterator[CheckResult]:
    """Yield the checks of specification 5.4, each without and with quantised operands."""
    small = Preset("check", 1, 4, 256, 64)
    grouped = Preset("check", 1, 8, 256, 64, key_heads=2)
    narrow = Preset("check", 1, 4, 256, 40)
    cases: list[tuple[str, Preset, str, list[dict[str, Any]]]] = [
        ("plain", small, "", [PLAIN, INT8]),
        ("causal", Preset("check", 1, 4, 256, 64, causal=True), "", [PLAIN, INT8]),
        ("grouped heads", grouped, "", [PLAIN, INT8]),
        ("bool padding", Preset("check", 1, 4, 256, 64, mask="padding"), "", [PLAIN, INT8]),
        ("float mask", small, "additive", [PLAIN, INT8]),
        (
            "rotated",
            small,
            "",
            [
                _operands(smooth_k=True, hadamard=GROUP),
                _operands(smooth_k=True, hadamard=GROUP, pv="int8"),
            ],
        ),
        ("head dim 40", narrow, "", [PLAIN, INT8, _operands(hadamard=GROUP)]),
        ("1,000 tokens", Preset("check", 1, 2, 1000, 64), "", [PLAIN, INT8]),
        ("cross", Preset("check", 1, 4, 512, 64, key_tokens=77), "", [PLAIN, INT8]),
        ("inputs x 100", small, "stress", [INT8, _operands(pv="int8"), _operands(matmul="fp16")]),
        ("keys x 1,000", small, "outliers", [INT8]),
    ]
    for name, preset, change, variants in cases:
        inputs = make_router_inputs(preset, device, dtype)
        _change(inputs, change)
        for options in variants:
            yield _check(name, inputs, options, finite_only=change in ("stress", "outliers"))


def _change(inputs: RouterInputs, change: str) -> None:
    """Turn plain inputs into those of a case, in place."""
    if change == "additive":
        distance = torch.arange(inputs.preset.tokens, device=inputs.device)
        inputs.mask = (-0.02 * (distance[:, None] - distance).abs())[None, None].to(
            inputs.query.dtype
        )
    elif change == "stress":
        inputs.query.mul_(100)
        inputs.key.mul_(100)
    elif change == "outliers":
        # float16 ends at 65,504.
        inputs.key[:, :, ::37] = (
            (inputs.key[:, :, ::37].float() * 1000).clamp(-6e4, 6e4).to(inputs.key.dtype)
        )


def _check(
    name: str, inputs: RouterInputs, options: dict[str, Any], *, finite_only: bool
) -> CheckResult:
    """Run one call and judge it; what it raises is its result."""
    preset = inputs.preset
    error: float | None = None
    try:
        out = _run(inputs, options)
        quantized = (options["matmul"], options["pv"]) != ("none", "none")
        most = QUANTIZED_ERROR if quantized else KERNEL_ERROR
        if not bool(out.isfinite().all()):
            gate = "not finite"
        elif finite_only:
            gate = "pass"
        else:
            error = relative_error(out, inputs.reference)
            gate = "pass" if error < most else f"relative L2 {error:.3g}, over {most}"
    except Exception as failure:
        gate = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    return CheckResult(name, preset.tokens, preset.heads, options, error, gate)


def _run(inputs: RouterInputs, options: dict[str, Any]) -> Tensor:
    """Call the quantised attention in torch's layout."""
    query, key, value = (x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value))
    out = quantized_attention(
        query, key, value, attn_mask=inputs.mask, is_causal=inputs.preset.causal, **options
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)
