"""`solspark bench`: hands its arguments to the harness, whose own parser defines them.

The harness must also run where typer is missing (`python -m solspark.bench`), so its options are
defined once, there; this group only forwards.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class _Forward(TyperGroup):
    """A command group that passes everything after its name to the harness."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: Any) -> Any:
        from solspark.bench.runner import main

        raise typer.Exit(main(ctx.args, program="solspark bench"))


bench_app = typer.Typer(
    name="bench",
    cls=_Forward,
    help="Measure: named problems, baselines and peers, a correctness gate, JSON lines.",
)


@bench_app.callback(invoke_without_command=True)
def _bench() -> None:
    """Measure: named problems, baselines and peers, a correctness gate, JSON lines."""
