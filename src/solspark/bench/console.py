"""Rows in words: a line while they are taken, a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from solspark.bench.report import baselines, speed_up
from solspark.bench.rows import Row

COLUMNS = (
    "problem",
    "level",
    "method",
    "options",
    "ms",
    "x dense",
    "TFLOP/s",
    "density",
    "GiB",
    "error",
    "gate",
)


class Progress:
    """Say lines on stderr, above a bar where stderr is a terminal and rich is installed."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        try:
            if not sys.stderr.isatty():
                # A file or a pipe gets the lines alone.
                raise ImportError
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
        except ImportError:
            return self
        columns = (BarColumn(), MofNCompleteColumn(), "rows", TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def advance(self, done: int, total: int) -> None:
        """Say how many rows are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


def told_error(row: Row) -> str:
    """Return the error of a row in words, or nothing."""
    names = {"relative_l2": "rel L2", "mass_recall": "recall", "median_nats": "median nats"}
    told = [(names[key], value) for key, value in (row.error or {}).items() if key in names]
    return ", ".join(f"{name} {value:.4f}" for name, value in told)


def label(row: Row) -> str:
    """Return "problem level method options" in few words."""
    shown = " ".join(f"{k}={v}" for k, v in row.options.items() if (k, v) != ("inputs", "gaussian"))
    return f"{row.problem} {row.level} {row.method} {shown}".strip()


def outcome(row: Row) -> str:
    """Return the figures of a row in few words."""
    if not row.available:
        return row.gate
    if not row.passed:
        return f"GATE: {row.gate}"
    parts = ["pass"]
    if row.ms is not None:
        spread = "" if row.iqr_ms is None else f" (iqr {row.iqr_ms:.3f})"
        parts = [f"{row.ms:.3f} ms{spread}"]
    if row.tflops is not None:
        parts.append(f"{row.tflops:.3g} TFLOP/s")
    if row.density is not None:
        parts.append(f"density {row.density:.4f}")
    if row.peak_gib is not None:
        parts.append(f"peak {row.peak_gib:.2f} GiB")
    if row.error is not None:
        parts.append(told_error(row))
    return ", ".join([*parts, row.implementation or ""]).rstrip(", ")


def table(rows: Iterable[Row], *, untimed: bool = False) -> list[list[str]]:
    """Return the rows as cells, a header first; speed-ups are against dense cuDNN of the same
    problem.
    """
    rows = [row for row in rows if untimed or row.ms is not None or not row.passed]
    base = baselines(rows)
    cells: list[list[str]] = [list(COLUMNS)]
    for row in rows:
        faster = speed_up(row, base)
        cells.append(
            [
                row.problem,
                row.level,
                row.method,
                " ".join(f"{k}={v}" for k, v in row.options.items() if k != "inputs"),
                "" if row.ms is None else f"{row.ms:.3f}",
                "" if faster is None else f"{faster:.2f}",
                "" if row.tflops is None else f"{row.tflops:.3g}",
                "" if row.density is None else f"{row.density:.3f}",
                "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
                told_error(row),
                row.gate if row.passed else row.gate[:40],
            ]
        )
    return cells


def print_table(cells: list[list[str]]) -> None:
    """Print cells with rich where it is installed, in plain columns otherwise."""
    try:
        if not sys.stdout.isatty():
            # A pipe has no width to wrap to.
            raise ImportError
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        for line in cells:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        return
    drawn = Table(*cells[0])
    for line in cells[1:]:
        drawn.add_row(*line)
    Console().print(drawn)
