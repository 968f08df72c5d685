"""Say what this machine has, which implementation would serve a call and why, and what it costs."""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import platform
from dataclasses import dataclass, replace
from importlib import metadata
from statistics import NormalDist
from typing import Any

import torch

from . import ops
from .ops import _dispatch
from .ops._sol_int8_triton import ROUTE_BYTES
from .ops.qkv_producer import variant
from .plan.select import SCORE_BYTES
from .types import BLOCK, AttentionCall, block_count

PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "numpy")
FLOAT32_INPUTS = frozenset({"anchors", "metric_factor", "select_blocks"})
"""Operations that read means, moments or scores: float32 (or float64) whatever the attention's."""

INT8_OPERATIONS = (
    ("qkv_producer", ""),
    ("qkv_producer", variant(rotate=True, balance=False)),
    ("qkv_producer", variant(rotate=False, balance=True)),
    ("sol_int8", ""),
)
"""What an INT8 call runs, and the kinds that its operations have."""

INT8_ROW_BYTES = 8
"""Of the scales of a token's Q and K; the integers of Q, K and V are a byte a channel."""


@dataclass(frozen=True)
class Served:
    """Say what would serve one operation of a call.

    Args:
        operation: name of the operation.
        implementation: the implementation that would serve it, None when none can.
        declined: (implementation, reasons) of all that cannot.
        passed_over: implementations that could, but come after the chosen one.
    """

    operation: str
    implementation: str | None
    declined: tuple[tuple[str, tuple[str, ...]], ...]
    passed_over: tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """Say what one attention call is expected to cost.

    Args:
        density: expected share of (query block, key block) pairs read exactly.
        density_source: how the density follows from the options, in words.
        dense_flops: of dense attention on the same tokens, 4 B H L_q L_k D.
        exact_flops: of the blocks read exactly.
        summary_flops: of the skipped blocks' summaries.
        plan_flops: of the scores between query and key blocks.
        output_bytes: of the result (and the LSE, if asked for).
        summary_bytes: of the block means of K and V and the query means.
        score_bytes: of block scores, a few heads at a time; gone before the result is made.
        plan_bytes: of packed bits and lists; with INT8, of scores too.
        operand_bytes: of INT8 operands, and of the chunk that they are made from.
        held_bytes: of Q, K and V in the input type, none where they are streamed; not part of the
            memory above the inputs.
    """

    density: float
    density_source: str
    dense_flops: float
    exact_flops: float
    summary_flops: float
    plan_flops: float
    output_bytes: int
    summary_bytes: int
    score_bytes: int
    plan_bytes: int
    operand_bytes: int = 0
    held_bytes: int = 0

    @property
    def flops(self) -> float:
        """All floating-point operations of the sparse call."""
        return self.exact_flops + self.summary_flops + self.plan_flops

    @property
    def workspace_bytes(self) -> int:
        """Memory above the inputs, at its peak: the result takes the place of the scores."""
        kept = self.summary_bytes + self.plan_bytes + self.operand_bytes
        return max(self.output_bytes, self.score_bytes) + kept


def environment() -> dict[str, Any]:
    """Return what is installed and which devices are here, as plain data for a report.

    Returns:
        "solspark", "python", "platform", "cpu" (model, cores, torch's threads), "packages" (name ->
        version or None), "cuda" and "hip" (versions torch was built with, or None), "devices"
        (name, capability, memory in GiB of each GPU).
    """
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "name": found.name,
                    "capability": f"{found.major}.{found.minor}",
                    "memory_gib": round(found.total_memory / 2**30, 1),
                }
            )
    return {
        "solspark": _version("solspark"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": devices,
    }


def operations() -> tuple[str, ...]:
    """Return every operation that has an implementation, in alphabetical order."""
    for found in pkgutil.iter_modules(ops.__path__, ops.__name__ + "."):
        importlib.import_module(found.name)
    return _dispatch.operations()


def explain(call: AttentionCall) -> list[Served]:
    """Say for every operation which implementation would serve a call, and why the others do not.

    Args:
        call: shapes, dtype and device of the call; the device need not be in this machine.

    Returns:
        One record an operation, in the order of `operations()`; with `precision` "int8" those that
        such a call runs, and their variants.

    Raises:
        TypeError: `call` is no AttentionCall.
    """
    if not isinstance(call, AttentionCall):
        raise TypeError(f"call: expected an AttentionCall, got {type(call).__name__}")
    if call.precision == "int8":
        return [_explain_int8(*item, call) for item in INT8_OPERATIONS]
    return [_explain_operation(operation, call) for operation in operations()]


def estimate(
    call: AttentionCall,
    *,
    topk_ratio: float | None = None,
    tau: float = 1.0,
    sink_tokens: int = 0,
    local_radius: int = 1,
    chunk_tokens: int | None = None,
) -> Estimate:
    """Estimate density, work and memory of one `sol_attn` call.

    Top-k: density = (k + band + sinks) / N with k = max(1, round(ratio C)) of C candidate blocks.
    Threshold: 1 - Phi(tau) in place of k / C, the share above tau standard deviations if the
    scores were normal. Real activations keep 10 to 26 % of the blocks at tau = 1.
    Work: 4 B H L_q L_k D density for exact blocks, 4 B H L_q D per skipped block for summaries
    (at most a 64th of dense), 2 B H N_q N_k D for the scores.

    Args:
        call: shapes and dtype; `tail`, `return_lse` and `precision` count.
        topk_ratio: share of candidate blocks read exactly; None routes by `tau`.
        tau: standard deviations above the mean score.
        sink_tokens: tokens at the end that every query reads exactly.
        local_radius: band |i - j| <= r read exactly, -1 for none.
        chunk_tokens: rows of the QKV projection that INT8 streams at a time; None holds all.

    Returns:
        The estimate; the figures are expectations, not measurements.

    Raises:
        ValueError: a ratio outside (0, 1], a tau that is not finite, sinks outside 0..L_k, or what
            INT8 does not serve.

    Source: spec/sol-bf16.md 1.9 and 1.10.
    """
    if topk_ratio is not None and not 0 < topk_ratio <= 1:
        raise ValueError(f"topk_ratio: expected None or a number in (0, 1], got {topk_ratio!r}")
    if not math.isfinite(tau):
        raise ValueError(f"tau: expected a finite number, got {tau!r}")
    if not 0 <= sink_tokens <= call.key_tokens:
        raise ValueError(f"sink_tokens: expected 0..{call.key_tokens}, got {sink_tokens!r}")
    _check_int8(call, local_radius, chunk_tokens)
    rows, columns = block_count(call.query_tokens), block_count(call.key_tokens)
    sinks = columns - (call.key_tokens - sink_tokens) // BLOCK if sink_tokens else 0
    candidates = columns - sinks
    if topk_ratio is None:
        chosen = (1 - NormalDist().cdf(tau)) * candidates
        source = f"normal scores above {tau:g} standard deviations"
    else:
        chosen = min(candidates, max(1, round(topk_ratio * candidates))) if candidates else 0
        source = f"{chosen} of {candidates} candidate blocks a row"
    # A band block is chosen anyway with the probability of any other.
    band = min(candidates, 2 * local_radius + 1) if local_radius >= 0 else 0
    share = chosen / candidates if candidates else 0.0
    exact = sinks + chosen + band * (1 - share)
    if sinks:
        source += f", {sinks} sink blocks"
    if band:
        source += f", the band |i - j| <= {local_radius}"
    density = exact / columns

    heads = call.batch * call.heads
    element = torch.empty((), dtype=call.dtype).element_size()
    dense = 4.0 * heads * call.query_tokens * call.key_tokens * call.head_dim
    skipped = columns - exact
    summary_rows = {"query": call.query_tokens, "block": rows, "block8x8": 8 * rows, "none": 0}
    per_block = 8 if call.tail == "block8x8" else 1
    summaries = 4.0 * heads * summary_rows[call.tail] * skipped * per_block * call.head_dim
    width = columns if topk_ratio is None else min(columns, math.ceil(exact) + 1)
    lists = rows * (width * (2 if columns < 32768 else 4) + 4 + 4 * math.ceil(columns / 32))
    means = columns * call.head_dim * element * (2 if call.tail != "none" else 1) * call.parents
    held = 3 * heads * call.key_tokens * call.head_dim * element
    operands = 0
    scores = max(call.batch * rows * columns * 4, min(heads * rows * columns * 4, SCORE_BYTES))
    plan = heads * lists
    if call.precision == "int8":
        # Means of Q and K in float32, sums of V in bfloat16, and both means once more in INT8.
        means = columns * (call.head_dim * (4 + 2 + 2) + 8)
        operands = heads * columns * BLOCK * (3 * call.head_dim + INT8_ROW_BYTES)
        if chunk_tokens is not None:
            held = 0
            operands += 3 * heads * min(chunk_tokens, call.key_tokens) * call.head_dim * element
        scores = max(rows * columns * 4, min(heads * rows * columns * 4, ROUTE_BYTES))
        plan = heads * rows * (columns * (2 if columns < 32768 else 4) + 4)
    return Estimate(
        density=density,
        density_source=source,
        dense_flops=dense,
        exact_flops=dense * density,
        summary_flops=summaries,
        plan_flops=2.0 * heads * rows * columns * call.head_dim,
        output_bytes=heads
        * call.query_tokens
        * (call.head_dim * element + (4 if call.return_lse else 0)),
        summary_bytes=heads * (means + rows * call.head_dim * 4),
        score_bytes=scores,
        plan_bytes=plan,
        operand_bytes=operands,
        held_bytes=held,
    )


def _explain_operation(operation: str, call: AttentionCall) -> Served:
    """Ask every implementation of one operation."""
    if operation in FLOAT32_INPUTS and call.dtype != torch.float64:
        call = replace(call, dtype=torch.float32)
    chosen: str | None = None
    declined: list[tuple[str, tuple[str, ...]]] = []
    passed_over: list[str] = []
    for name in _dispatch.implementations(operation):
        obstacles = tuple(_dispatch.reasons(operation, name, call))
        if obstacles:
            declined.append((name, obstacles))
        elif chosen is None and not _dispatch.on_request(operation, name):
            chosen = name
        else:
            passed_over.append(name)
    return Served(operation, chosen, tuple(declined), tuple(passed_over))


def _check_int8(call: AttentionCall, local_radius: int, chunk_tokens: int | None) -> None:
    """Refuse what the INT8 calls have no argument for, and chunks without them."""
    if call.precision != "int8":
        if chunk_tokens is not None:
            raise ValueError(f"chunk_tokens: {chunk_tokens!r} needs precision 'int8'")
        return
    if chunk_tokens is not None and (chunk_tokens < BLOCK or chunk_tokens % BLOCK):
        raise ValueError(f"chunk_tokens: expected a multiple of {BLOCK}, got {chunk_tokens!r}")
    fixed = {
        "head_dim": (call.head_dim, 128),
        "key_tokens": (call.key_tokens, call.query_tokens),
        "key_heads": (call.key_heads, call.heads),
        "batch": (call.batch, 1 if chunk_tokens is not None else call.batch),
        "local_radius": (local_radius, 1),
        "parents": (call.parents, 1),
        "kv_splits": (call.kv_splits, 1),
        "return_lse": (call.return_lse, False),
    }
    for name, (value, wanted) in fixed.items():
        if value != wanted:
            raise ValueError(f"{name}: expected {wanted} with precision 'int8', got {value!r}")
    if call.tail not in ("block", "none"):
        raise ValueError(f"tail: expected block or none with precision 'int8', got {call.tail!r}")


def _explain_int8(operation: str, kind: str, call: AttentionCall) -> Served:
    """Ask every implementation of one operation about one kind of call."""
    served = _explain_operation(operation, replace(call, variant=kind))
    return replace(served, operation=f"{operation} {kind}") if kind else served


def _version(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """Return the processor's name as well as the platform tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
