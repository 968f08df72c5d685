"""Checks that need a device and a production shape: repeats, strides, rows, graph capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solspark.bench.case import METHODS, Case, Unavailable, method
from solspark.bench.gate import Verdict
from solspark.bench.inputs import Inputs

REPEATS = 20


def _builder(inputs: Inputs, name: str, options: dict[str, Any]) -> Case:
    """Return the case of the whole call under the same options."""
    known = {key: value for key, value in options.items() if key != "check"}
    return METHODS["call", name].build(inputs, known)


def _determinism(case: Case, inputs: Inputs, name: str, options: dict[str, Any]) -> Verdict:
    """Pass if repeats give the same bits."""
    first = case.run()
    for repeat in range(1, REPEATS):
        if not torch.equal(first, case.run()):
            return Verdict(f"repeat {repeat} of {REPEATS} differs", 0.0)
    return Verdict("pass", 0.0)


def _strided(case: Case, inputs: Inputs, name: str, options: dict[str, Any]) -> Verdict:
    """Pass if views of one fused projection, of NaN-filled gaps, give the bits of contiguous
    tensors.
    """
    first = case.run()
    batch, tokens, heads, dim = inputs.query.shape
    fused = inputs.query.new_full((batch, tokens, 3, heads, dim), torch.nan)
    for part, tensor in enumerate((inputs.query, inputs.key, inputs.value)):
        fused[:, :, part] = tensor
    views = Inputs(inputs.problem, fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], inputs.kind)
    fused_case = _builder(views, name, options)
    if not torch.equal(first, fused_case.run()):
        return Verdict("views of a fused projection differ from contiguous tensors", 0.0)
    # Heads before tokens in memory, as a [B, H, T, D] model holds them.
    swapped = [
        x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in (inputs.query, inputs.key, inputs.value)
    ]
    query, key, value = swapped
    other = _builder(Inputs(inputs.problem, query, key, value, inputs.kind), name, options)
    if not torch.equal(first, other.run()):
        return Verdict("head-major tensors differ from token-major ones", 0.0)
    return Verdict("pass", 0.0)


def _rows(case: Case, inputs: Inputs, name: str, options: dict[str, Any]) -> Verdict:
    """Pass if the sampled rows match the oracle; for shapes too large to time for long."""
    return case.judge(case.run())


def _graph(case: Case, inputs: Inputs, name: str, options: dict[str, Any]) -> Verdict:
    """Pass if a captured call, replayed on other values, gives the bits of an eager one."""
    if inputs.device.type != "cuda":
        raise Unavailable("graphs need a CUDA device")
    static = Inputs(
        inputs.problem, inputs.query.clone(), inputs.key.clone(), inputs.value.clone(), inputs.kind
    )
    captured = _builder(static, name, options)
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


CHECKS: dict[str, Callable[[Case, Inputs, str, dict[str, Any]], Verdict]] = {
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
        case = _builder(inputs, name, options)
        return Case(
            run=case.run,
            judge=lambda result: CHECKS[check](case, inputs, name, options),
            timed=False,
        )

    return build


for _name, _axes in (
    ("sol", ("topk_ratio", "tau", "tail", "impl")),
    ("spark", ("topk_ratio", "preset", "impl")),
):
    method("checks", _name, *_axes, "check")(_check(_name))
