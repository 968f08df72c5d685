"""Checks that need a device and a production shape: repeats, strides, rows, graph capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark.bench.case import METHODS, Case, Unavailable, method
from solspark.bench.gate import Verdict
from solspark.bench.inputs import Inputs

REPEATS = 20


@dataclass(frozen=True)
class _Subject:
    """What a check looks at.

    Args:
        name: method.
        options: of the call.
        inputs: of the call.
        case: the call itself.
        first: result of its first run.
    """

    name: str
    options: dict[str, Any]
    inputs: Inputs
    case: Case
    first: Tensor

    def rebuilt(self, inputs: Inputs) -> Case:
        """Return the same call on other tensors."""
        return METHODS["call", self.name].build(inputs, self.options)


def _determinism(subject: _Subject) -> Verdict:
    """Pass if repeats give the same bits; Spark's later ones replay its captured plan."""
    for repeat in range(1, REPEATS):
        if not torch.equal(subject.first, subject.case.run()):
            return Verdict(f"repeat {repeat} of {REPEATS} differs", 0.0)
    return Verdict("pass", 0.0)


def _strided(subject: _Subject) -> Verdict:
    """Pass if views of a fused projection, and head-major tensors, give the same bits."""
    inputs, first = subject.inputs, subject.first
    batch, tokens, heads, dim = inputs.query.shape
    fused = inputs.query.new_empty(batch, tokens, 3, heads, dim)
    for part, tensor in enumerate((inputs.query, inputs.key, inputs.value)):
        fused[:, :, part] = tensor
    views = Inputs(inputs.problem, fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], inputs.kind)
    fused_case = subject.rebuilt(views)
    if not torch.equal(first, fused_case.run()):
        return Verdict("views of a fused projection differ from contiguous tensors", 0.0)
    # Heads before tokens in memory, as a [B, H, T, D] model holds them.
    swapped = [
        x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in (inputs.query, inputs.key, inputs.value)
    ]
    query, key, value = swapped
    other = subject.rebuilt(Inputs(inputs.problem, query, key, value, inputs.kind))
    if not torch.equal(first, other.run()):
        return Verdict("head-major tensors differ from token-major ones", 0.0)
    return Verdict("pass", 0.0)


def _rows(subject: _Subject) -> Verdict:
    """Pass if the sampled rows match the oracle; for shapes too large to time for long."""
    return subject.case.judge(subject.first)


def _graph(subject: _Subject) -> Verdict:
    """Pass if a captured call, replayed on other values, gives the bits of an eager one."""
    inputs = subject.inputs
    static = Inputs(
        inputs.problem, inputs.query.clone(), inputs.key.clone(), inputs.value.clone(), inputs.kind
    )
    captured = subject.rebuilt(static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out: Tensor = captured.run()
    # Other values than at capture: the sequence backwards.
    for target in (static.query, static.key, static.value):
        target.copy_(target.flip(1))
    want = captured.run()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(out, want):
        return Verdict("the replayed graph differs from the eager call", 0.0)
    return Verdict("pass", 0.0)


CHECKS: dict[str, Callable[[_Subject], Verdict]] = {
    "determinism": _determinism,
    "strided": _strided,
    "rows": _rows,
    "graph": _graph,
}


def _check(name: str) -> Callable[[Inputs, dict[str, Any]], Case]:
    """Return the builder of the checks of one method."""

    def build(inputs: Inputs, options: dict[str, Any]) -> Case:
        check = options.get("check", "rows")
        if check not in CHECKS:
            raise ValueError(f"check: expected one of {', '.join(CHECKS)}, got {check!r}")
        if check == "graph" and inputs.device.type != "cuda":
            raise Unavailable("graphs need a CUDA device")
        if check == "graph" and name == "spark":
            raise Unavailable("Spark captures its plan itself; determinism covers the replay")
        known = {key: value for key, value in options.items() if key != "check"}
        case = METHODS["call", name].build(inputs, known)
        return Case(
            run=case.run,
            judge=lambda first: CHECKS[check](_Subject(name, known, inputs, case, first)),
            timed=False,
        )

    return build


for _name, _axes in (
    ("sol", ("topk_ratio", "tau", "tail", "impl")),
    ("spark", ("topk_ratio", "preset", "impl")),
):
    method("checks", _name, *_axes, "check")(_check(_name))
