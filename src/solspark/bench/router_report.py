"""What a run of the router's benchmark shows and writes: tables, advice, a document, a plot."""

from __future__ import annotations

import json
from pathlib import Path

from solspark.bench import rows as rows_module
from solspark.bench.router_advice import Advice, starred
from solspark.bench.router_blocks import BLOCKS, GEOMETRIES
from solspark.bench.router_presets import PRESETS
from solspark.bench.router_session import RouterSession
from solspark.errors import MissingDependencyError


def attention_table(session: RouterSession, name: str) -> list[list[str]]:
    """Return a shape's rows as cells, a header first; "*" marks the best dense row of ours."""
    outcomes = session.shapes[name]
    best = starred(session.figures(outcomes))
    base = next((o.sample.ms for o in outcomes if o.row.method == "base" and o.sample), None)
    cells = [["config", "ms", "+-", "prep", "x base", "error", "density", "implementation"]]
    for item in outcomes:
        row, sample = item.row, item.sample
        mark = "*" if row.method == best else ""
        if sample is None:
            cells.append([row.method, "-", "", "", "", _short(item.error), "", row.gate])
            continue
        cells.append(
            [
                row.method + mark,
                f"{sample.ms:.3f}",
                f"{100 * (session.sigma(item) or 0):.1f}%",
                "" if item.prep is None else f"{item.prep.ms:.3f}",
                "" if base is None else f"{base / sample.ms:.2f}",
                _short(item.error),
                "" if row.density is None else f"{row.density:.3f}",
                row.implementation or "",
            ]
        )
    return cells


def block_table(session: RouterSession, name: str) -> list[list[str]]:
    """Return a geometry's rows as cells, a header first."""
    outcomes, geometry = session.blocks[name], GEOMETRIES[name]
    base = next((o.sample.ms for o in outcomes if o.row.method == "bf16" and o.sample), None)
    size = f"{geometry.tokens}x{geometry.width}"
    cells = [["config", "size", "block ms", "x bf16", "error", "max token", f"error x{BLOCKS}"]]
    for item in outcomes:
        sample = item.sample
        if sample is None:
            cells.append([item.row.method, size, "-", "", _short(item.error), "", item.row.gate])
            continue
        cells.append(
            [
                item.row.method,
                size,
                f"{sample.ms:.3f}",
                "" if base is None else f"{base / sample.ms:.2f}",
                _short(item.error),
                _short(item.extra.get("max_token")),
                _short(item.extra.get(f"x{BLOCKS}")),
            ]
        )
    return cells


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def advice_lines(advice: Advice | None) -> list[str]:
    """Return the advice in words."""
    if advice is None:
        return ["Settings advice: none without noquant, int8 and a quantised row to pick."]
    lines = [f"Settings advice, judged on {advice.shape}: {advice.picked} is {advice.verdict}"]
    for item in advice.settings:
        value = "keep" if item.value is None else item.value
        lines.append(f"  {item.name} = {value}  ({item.reason})")
    lines += [f"  {shape}: {text}" for shape, text in advice.per_shape.items()]
    lines += [f"  note: {text}" for text in advice.notes]
    return lines


def show(session: RouterSession) -> list[str]:
    """Print the tables and the advice; return them as lines of text."""
    lines: list[str] = []
    for name in session.shapes:
        cells = attention_table(session, name)
        heading = f"{name} {PRESETS[name].size}, drift {100 * session.drift:.1f}%"
        print(f"\n{heading}")
        print("\n".join(aligned(cells)))
        lines += ["", heading, *aligned(cells)]
    for name in session.blocks:
        cells = block_table(session, name)
        print(f"\nblock {name}")
        print("\n".join(aligned(cells)))
        lines += ["", f"block {name}", *aligned(cells)]
    if session.shapes:
        told = ["", *advice_lines(session.advice())]
        print("\n".join(told))
        lines += told
    return lines


def aligned(cells: list[list[str]]) -> list[str]:
    """Return cells as lines with columns of equal width."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def write(
    session: RouterSession, text: list[str], record: Path | None, save: Path | None
) -> list[Path]:
    """Write the document, and the tables with their plot.

    Args:
        session: after its run.
        text: the tables.
        record: of the document; None for none.
        save: of the tables and the plot; None for none.

    Returns:
        What was written.
    """
    written: list[Path] = []
    if record is not None:
        document = named(record, ".json")
        document.parent.mkdir(parents=True, exist_ok=True)
        document.write_text(json.dumps(session.document(), indent=1, default=str) + "\n")
        written.append(document)
    if save is not None:
        table = named(save, ".txt")
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join(text).strip() + "\n")
        written.append(table)
        try:
            from solspark.bench.router_plots import plot_router

            shapes = {name: session.figures(items) for name, items in session.shapes.items()}
            title = f"{rows_module.device_name(session.plan.device)}, {session.plan.commit}"
            written += plot_router(shapes, title, named(save, ".png"))
        except MissingDependencyError as error:
            session.say(f"no plot: {error}")
    return written


def named(base: Path, ending: str) -> Path:
    """Return a path with an ending in place of one that it may have already."""
    known = base.suffix in (".json", ".jsonl", ".txt", ".png")
    return (base.with_suffix("") if known else base).with_name(
        (base.stem if known else base.name) + ending
    )
