"""`solspark bench` and `solspark quality`: hand their arguments to the harness.

The harness must also run where typer is missing (`python -m solspark.bench`), so its options are
defined once, there; these groups only forward.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class _Forward(TyperGroup):
    """A command group that passes everything after its name to the harness."""

    program = "solspark bench"
    first: tuple[str, ...] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: Any) -> Any:
        from solspark.bench.runner import main

        raise typer.Exit(main([*self.first, *ctx.args], program=self.program))


class _ForwardQuality(_Forward):
    """The harness's command `quality`, under a name of its own."""

    first = ("quality",)


bench_app = typer.Typer(
    name="bench",
    cls=_Forward,
    help="Measure: named problems, baselines and peers, a correctness gate, JSON lines.",
)
quality_app = typer.Typer(
    name="quality",
    cls=_ForwardQuality,
    help="How far sparse attention is from dense; the same as `bench quality`.",
)


@bench_app.callback(invoke_without_command=True)
@quality_app.callback(invoke_without_command=True)
def _forwarded() -> None:
    """Stand for what the harness does; typer asks for a callback."""
