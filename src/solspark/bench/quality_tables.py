"""Tables of the quality rows: the calibration beside what is published, error against density."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from solspark.bench.rows import Row


@dataclass(frozen=True)
class Target:
    """What is published for real activations, and where to read it off.

    Args:
        words: name in the table.
        low, high: the published range.
        method: of the row.
        options: the row has at least these.
        read: (row) -> the figure.
    """

    words: str
    low: float
    high: float
    method: str
    options: dict[str, Any]
    read: Callable[[Row], float | None]


TARGETS = (
    Target(
        "video blocks kept by tau 1.0",
        0.10,
        0.26,
        "recall",
        {"order": "given", "tau": 1.0},
        lambda row: row.density,
    ),
    Target(
        "mass recall of 10 %, given order",
        0.66,
        0.70,
        "recall",
        {"order": "given", "topk_ratio": 0.1},
        lambda row: (row.error or {}).get("mass_recall"),
    ),
    Target(
        "mass recall of 10 %, reblocked",
        0.80,
        0.83,
        "recall",
        {"order": "reblocked", "topk_ratio": 0.1},
        lambda row: (row.error or {}).get("mass_recall"),
    ),
    Target(
        "relative L2 of Sol, tau 1.0",
        0.15,
        0.22,
        "sol",
        {"tau": 1.0},
        lambda row: (row.error or {}).get("relative_l2"),
    ),
    Target(
        "nats by which means underestimate a skipped block, median",
        3.47,
        3.47,
        "skipped-mass",
        {"tau": 1.0},
        lambda row: (row.error or {}).get("median_nats"),
    ),
)
"""Sources: block shares and errors of Sol at tau 1.0 on MiniMax-H3 layers; mass recall of 10 %
routes before and after reblocking."""


ORIGIN = {"video": "", "file": ", captured"}


def calibration_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that stand beside a published figure."""
    return [
        row
        for row in rows
        if row.level == "quality"
        and row.options.get("inputs") in ORIGIN
        and any(_is_target(row, target) for target in TARGETS)
    ]


def _is_target(row: Row, target: Target) -> bool:
    """Say whether a row holds the figure of a target."""
    return (
        row.method == target.method
        and all(row.options.get(name) == value for name, value in target.options.items())
        and set(row.options) <= {*target.options, "inputs", "heads", "seed"}
    )


def calibration_table(rows: Sequence[Row]) -> str:
    """Return the published figures beside ours, in Markdown, a column for each problem.

    Args:
        rows: quality rows; `calibration_rows` of them are shown.
    """
    shown = calibration_rows(rows)

    def group_of(row: Row) -> tuple[str, int, str]:
        return row.problem, row.heads, ORIGIN[row.options["inputs"]]

    groups = list(dict.fromkeys(map(group_of, shown)))
    names = " | ".join(f"{problem}, {heads} heads{words}" for problem, heads, words in groups)
    lines = [f"| figure | published | {names} |"]
    lines.append("|---|---|" + "---|" * len(groups))
    for target in TARGETS:
        cells = []
        for group in groups:
            values = [
                target.read(row)
                for row in shown
                if group_of(row) == group and _is_target(row, target)
            ]
            known = [value for value in values if value is not None]
            cells.append("" if not known else f"{known[-1]:.3f}")
        published = f"{target.low:g}"
        if target.high > target.low:
            published += f" to {target.high:g}"
        lines.append(f"| {target.words} | {published} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curve_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the curves: those with a budget or a threshold and nothing else."""
    return [
        row
        for row in rows
        if row.level == "quality"
        and "relative_l2" in (row.error or {})
        and len(set(row.options) - {"inputs", "heads", "seed"}) == 1
    ]


def curve_table(rows: Sequence[Row]) -> str:
    """Return relative L2 with the share of exact blocks, in Markdown: a line for each method and
    problem, a column for each budget or threshold.

    Args:
        rows: of `curve_rows`.
    """
    tables = []
    for route, words in (("topk_ratio", "top-k {:.0%}"), ("tau", "tau {:g}")):
        here = [row for row in rows if route in row.options]
        values = sorted({row.options[route] for row in here})
        if not values:
            continue
        heads = " | ".join(words.format(value) for value in values)
        lines = [f"| method | problem | {heads} |", "|---|---|" + "---|" * len(values)]
        for method, problem in dict.fromkeys((row.method, row.problem) for row in here):
            cells = []
            for value in values:
                found = [
                    row
                    for row in here
                    if (row.method, row.problem) == (method, problem)
                    and row.options[route] == value
                ]
                cells.append(_error_at_density(found[-1]) if found else "")
            lines.append(f"| `{method}` | {problem} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _error_at_density(row: Row) -> str:
    """Return "0.157 (27 %)"."""
    error = (row.error or {})["relative_l2"]
    return f"{error:.3f}" if row.density is None else f"{error:.3f} ({row.density:.0%})"
