"""One call to be judged and timed, and the table of who can make which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from solspark.bench.gate import Verdict, gate_output, relative_to
from solspark.bench.inputs import Inputs

DENSE_ORACLE = "dense attention of sampled rows in float64"


class Unavailable(Exception):
    """This method cannot be measured here; the message says why. Peers raise it, and so do gaps of
    ours.
    """


@dataclass
class Case:
    """Hold one call.

    Args:
        run: makes the call and returns its result.
        judge: (result) -> verdict of the gate; runs before anything is timed.
        implementation: what served it, where the operations of this project do not record it.
        density: (result) -> share of block pairs read exactly, or None.
        flops: (density) -> operations executed, or None where nobody counts them.
        precision: of the operands, where it is not the inputs'.
        error: (result) -> relative L2 against dense attention, or None.
        warmup: untimed calls before.
        timed: False for a check, whose row has no time.
        facts: (result) -> fields of the row and of further rows, for a case that times itself.
    """

    run: Callable[[], Any]
    judge: Callable[[Any], Verdict]
    implementation: str | None = None
    density: Callable[[Any], float | None] = lambda result: None
    flops: Callable[[float | None], float | None] = lambda density: None
    precision: str | None = None
    error: Callable[[Any], dict[str, Any] | None] = lambda result: None
    warmup: int = 2
    timed: bool = True
    facts: Callable[[Any], list[dict[str, Any]]] | None = None


Builder = Callable[[Any, dict[str, Any]], Case]


@dataclass(frozen=True)
class Method:
    """Declare a method at a level: how to build its case and which options tell its cases apart.

    Args:
        level: attend, call, ...
        name: of the method.
        build: (inputs, options) -> Case; raises Unavailable. At the dit level (problem, settings)
            stands for the inputs.
        axes: names of options that the command line may sweep for it.
    """

    level: str
    name: str
    build: Builder
    axes: tuple[str, ...] = field(default=())


METHODS: dict[tuple[str, str], Method] = {}


def method(level: str, name: str, *axes: str) -> Callable[[Builder], Builder]:
    """Register the builder of a method at a level."""

    def register(build: Builder) -> Builder:
        METHODS[level, name] = Method(level, name, build, axes)
        return build

    return register


def methods_of(level: str) -> list[str]:
    """Return the names of the methods that a level knows."""
    return [name for where, name in METHODS if where == level]


def error_against_dense(inputs: Inputs, output: Tensor) -> dict[str, Any]:
    """Return the row's error field for an attention output [B, T, H, D]."""
    relative = relative_to(inputs.dense, output, inputs.sample)
    return {"relative_l2": relative, "against": DENSE_ORACLE}


def judge_dense(inputs: Inputs, output: Tensor) -> Verdict:
    """Judge an output [B, T, H, D] that should be dense attention."""
    return gate_output(output, inputs.query, inputs.key, inputs.value, inputs.sample)


def judge_near(inputs: Inputs, output: Tensor, most: float) -> Verdict:
    """Judge a quantised or sparse peer: finite, and no farther from dense than `most`."""
    relative = relative_to(inputs.dense, output, inputs.sample)
    if not bool(output.isfinite().all()):
        return Verdict("not finite", relative)
    if relative > most:
        return Verdict(f"relative L2 {relative:.3g} against dense, over {most}", relative)
    return Verdict("pass", relative)
