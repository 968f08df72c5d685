"""Writes recorded rows as Markdown tables between markers, each with the command that repeats it.

A section of a document reads `<!-- bench:LEVEL problem=NAME ... -->`, then whatever was written
there, then `<!-- /bench -->`. LEVEL is a level of the rows, or "headline"; the words after it keep
only rows whose field or option has that value (several values with commas), "ablations" those with
an option beside their route. "floors", "calibration" and "curve" are sections of their own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from solspark.bench.case import METHODS
from solspark.bench.cost import (
    H200_BF16,
    attend_cost,
    plan_cost,
    reblock_cost,
    reweight_cost,
)
from solspark.bench.problems import get_problem
from solspark.bench.quality_tables import (
    calibration_rows,
    calibration_table,
    curve_rows,
    curve_table,
)
from solspark.bench.rows import Row, read_rows

MARKER = re.compile(r"(<!-- bench:([^>]*?) -->)\n(.*?)(<!-- /bench -->)", re.DOTALL)
BASELINE = "dense-cudnn"
ATTENTION = ("attend", "call", "layer")
COMPARED = (*ATTENTION, "dit")
"""Levels whose times stand against dense attention, or a dense generation."""

NOTHING = "*Nothing recorded yet.*"
PLAIN_OPTIONS = {"inputs", "heads", "seed", "topk_ratio", "tau", "order"}
NOT_A_FLAG = ("inputs", "heads", "seed")
FLAGS = {
    "topk_ratio": "--topk-ratio",
    "tau": "--tau",
    "lists": "--lists",
    "tail": "--tail",
    "impl": "--impl",
    "preset": "--preset",
    "token_aug": "--token-aug",
    "parents": "--parents",
    "check": "--check",
}
HEADLINE: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("call", "dense-cudnn", {}),
    ("call", "dense-flash", {}),
    ("call", "dense-fa4", {}),
    ("call", "sol", {"topk_ratio": 0.1}),
    ("call", "sol", {"tau": 1.0}),
    ("call", "spark", {"topk_ratio": 0.1}),
    ("call", "sol-int8", {"topk_ratio": 0.1}),
    ("call", "comfy-kitchen-sol", {"topk_ratio": 0.1}),
    ("dit", "dense-cudnn", {}),
    ("dit", "dense-default", {}),
    ("dit", "sol", {"topk_ratio": 0.1}),
    ("dit", "spark", {"topk_ratio": 0.1}),
    ("dit", "spark", {"topk_ratio": 0.2}),
)
"""What a reader wants to know first; what of it has no row yet is said."""

BRIEF = ("served by", "relative L2", "IQR")
"""Columns that the headline leaves to docs/measured.md."""


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each measurement, that of its latest run, in order of first appearance.

    A method that a later run could not try keeps the row it has.
    """
    kept: dict[tuple, Row] = {}
    for row in rows:
        key = (row.gpu, row.problem, row.level, row.method, str(sorted(row.options.items())))
        if key not in kept or (row.available, row.run) >= (kept[key].available, kept[key].run):
            kept[key] = row
    return list(kept.values())


def baselines(rows: Iterable[Row]) -> dict[tuple[str, str, str], float]:
    """Return the dense time of each (run, problem, level): ratios are taken inside a run.

    A level without a baseline of its own takes another attention level's.
    """
    rows = [row for row in rows if row.ms is not None]
    found: dict[tuple[str, str, str], float] = {}
    for name in ("dense-default", BASELINE):
        for row in rows:
            if row.method == name and (name == BASELINE or row.gpu == "cpu"):
                found[row.run, row.problem, row.level] = row.ms or 0.0
                if row.level in ATTENTION:
                    found[row.run, row.problem, ""] = row.ms or 0.0
    return found


def speed_up(row: Row, base: dict[tuple[str, str, str], float]) -> float | None:
    """Return how many times faster than dense a row is, in its own run; None where none can say."""
    if not row.ms or row.level not in COMPARED:
        return None
    dense = base.get((row.run, row.problem, row.level))
    if dense is None and row.level != "dit":
        dense = base.get((row.run, row.problem, ""))
    return None if dense is None else dense / row.ms


def _options(row: Row) -> str:
    """Return the options of a row in words, without what every row has."""
    shown = [f"{k}={v}" for k, v in row.options.items() if (k, v) != ("inputs", "gaussian")]
    return ", ".join(shown)


def _number(value: float | None, digits: str) -> str:
    return "" if value is None else format(value, digits)


def _time(ms: float | None) -> str:
    """Return milliseconds with as many digits as mean something, seconds from ten on."""
    if ms is None:
        return ""
    return f"{ms / 1e3:.1f} s" if ms >= 10_000 else f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def markdown_table(
    rows: Sequence[Row],
    base: dict[tuple[str, str, str], float],
    without: Sequence[str] = (),
) -> str:
    """Return a Markdown table of rows; empty columns are left out.

    Args:
        rows: to show, in order.
        base: of `baselines`.
        without: columns to leave out.
    """
    columns = [
        ("problem", lambda r: r.problem),
        ("level", lambda r: r.level if len({x.level for x in rows}) > 1 else ""),
        ("method", lambda r: f"`{r.method}`"),
        ("options", _options),
        ("precision", lambda r: r.precision if r.precision != "bf16" else ""),
        ("ms", lambda r: _time(r.ms)),
        ("IQR", lambda r: _number(r.iqr_ms, ".2g") if r.ms else ""),
        ("x dense", lambda r: _number(speed_up(r, base), ".2f")),
        ("TFLOP/s", lambda r: _number(r.tflops, ".3g")),
        ("density", lambda r: _number(r.density, ".3f")),
        ("peak GiB", lambda r: _number(r.peak_gib, ".2f")),
        ("relative L2", lambda r: _number((r.error or {}).get("relative_l2"), ".4f")),
        ("mass recall", lambda r: _number((r.error or {}).get("mass_recall"), ".3f")),
        ("nats", lambda r: _number((r.error or {}).get("median_nats"), ".2f")),
        ("served by", lambda r: r.implementation or ""),
        ("gate", lambda r: r.gate),
    ]
    cells = [[str(show(row)) for _, show in columns] for row in rows]
    used = [
        i
        for i, (name, _) in enumerate(columns)
        if name not in without and any(line[i] for line in cells)
    ]
    head = [columns[i][0] for i in used]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(line[i] for i in used) + " |" for line in cells]
    return "\n".join(lines)


def command(rows: Sequence[Row]) -> str:
    """Return the command that takes these rows again (rows of one run)."""

    def joined(values: Iterable[object]) -> str:
        return ",".join(dict.fromkeys(str(value) for value in values))

    level = "dit" if {row.level for row in rows} <= {"dit", "step", "part"} else None
    parts = ["solspark bench"]
    if {row.level for row in rows} == {"quality"}:
        parts = ["solspark bench quality"]
        from solspark.bench.quality import SWEEPS, sweeps_needed

        needed = sweeps_needed(rows)
        parts += [f"--only {needed}"] if needed < len(SWEEPS) else []
    parts.append("--problem " + joined(row.problem for row in rows))
    if parts[0] == "solspark bench":
        parts.append("--level " + (level or joined(row.level for row in rows)))
        parts.append("--methods " + joined(row.method for row in rows))
    swept = {} if parts[0] != "solspark bench" else FLAGS
    for name, flag in swept.items():
        values = [row.options[name] for row in rows if name in row.options]
        if values:
            parts.append(f"{flag} {joined(values)}")
    known = (*FLAGS, *NOT_A_FLAG, "primed", "evaluation", "part", "order")
    names = dict.fromkeys(name for row in rows for name in row.options if name not in known)
    for name in names if swept else ():
        values = [row.options[name] for row in rows if name in row.options]
        parts.append(f"--sweep {name}={joined(values)}")
    kinds = joined(row.options.get("inputs", "gaussian") for row in rows)
    if kinds != "gaussian" and parts[0] == "solspark bench":
        parts.append(f"--inputs {kinds}")
    heads = {row.options["heads"] for row in rows if "heads" in row.options}
    parts += [f"--heads {count}" for count in heads]
    if {row.gpu for row in rows} == {"cpu"}:
        parts.append("--device cpu")
    if any(_from_peer(row) for row in rows):
        parts.append("--peers .peers")
    return " ".join(parts)


def _from_peer(row: Row) -> bool:
    """Say whether a row measures somebody else's package."""
    known = METHODS.get((row.level, row.method))
    return known is not None and known.build.__module__ == "solspark.bench.peers"


def section(spec: str, rows: Sequence[Row]) -> str:
    """Return the Markdown of one section.

    Args:
        spec: "LEVEL name=value ...", "headline ...", "curve ...", "floors PROBLEM ..." or
            "calibration".
        rows: all recorded rows.
    """
    words = spec.split()
    if words[0] == "floors":
        return floors(words[1:])
    if words[0] == "calibration":
        shown = calibration_rows(newest(rows))
        return "\n".join([calibration_table(shown), "", *_runs(shown)]).rstrip()
    wanted = [row for row in newest(rows) if _matches(row, words)]
    if words[0] == "curve":
        drawn = curve_rows(wanted)
        return "\n".join([curve_table(drawn), "", *_runs(drawn)]).rstrip() if drawn else NOTHING
    base = baselines(rows)
    wanted = [
        row
        for row in wanted
        if row.ms is not None or row.error or row.level == "checks" or not row.passed
    ]
    missing = _not_measured(wanted, words)
    if not wanted:
        return "\n\n".join([NOTHING, *missing])
    wanted.sort(key=lambda row: (row.gpu == "cpu", row.tokens))
    brief = words[0] == "headline"
    passing = ("gate",) if brief and all(row.passed for row in wanted) else ()
    out = [markdown_table(wanted, base, (*BRIEF, *passing) if brief else ()), ""]
    out += _runs(wanted)
    return "\n".join([*out, *missing]).rstrip()


def _runs(rows: Sequence[Row]) -> list[str]:
    """Return a line for each run of some rows: when, what, where, and the command."""
    out = []
    for run in dict.fromkeys(row.run for row in rows):
        mine = [row for row in rows if row.run == run]
        first = mine[0]
        versions = f"torch {first.torch}, triton {first.triton or 'none'}"
        out.append(
            f"Run `{run}`, {first.date}, commit `{first.commit}`, {first.gpu}, {versions}: "
            f"`{command(mine)}`"
        )
        out.append("")
    return out


def _not_measured(rows: Sequence[Row], words: Sequence[str]) -> list[str]:
    """Return what of the headline of one problem has no time yet, with the commands that take it.

    Args:
        rows: of the section.
        words: of its marker.
    """
    names = [word.removeprefix("problem=") for word in words if word.startswith("problem=")]
    if words[0] != "headline" or len(names) != 1 or "," in names[0]:
        return []
    timed = [row for row in rows if row.ms is not None]
    problem = get_problem(names[0])
    blank = Row(
        run="",
        date="",
        commit="",
        gpu="",
        torch="",
        triton=None,
        problem=problem.name,
        tokens=problem.tokens,
        heads=problem.heads,
        level="",
        method="",
    )
    lacking = [
        replace(blank, level=level, method=name, options=dict(options))
        for level, name, options in HEADLINE
        if not any(_is_headline(row, level, name, options) for row in timed)
    ]
    lines = []
    for level, what in (("call", "one attention call"), ("dit", "one generation's DiT")):
        here = [row for row in lacking if row.level == level]
        if here:
            shown = ", ".join(f"`{row.method}` {_options(row)}".strip() for row in here)
            lines.append(f"Not measured yet, {what}: {shown} (`{command(here)}`).")
    return ["\n\n".join(lines)] if lines else []


def floors(problems: Sequence[str]) -> str:
    """Return the work of each stage and the time that no implementation can beat, in Markdown.

    Args:
        problems: names; the three MiniMax-H3 clips when there are none.

    Source: operations and bytes by `bench.cost`, ceilings as measured in the peers' run.
    """
    lines = [
        "| problem | stage | TFLOP | GB | floor, ms |",
        "|---|---|---|---|---|",
    ]
    for name in problems or ("h3-5s", "h3-10s", "h3-14s"):
        problem = get_problem(name)
        stages = (
            ("dense", attend_cost(problem, 1.0, tail="none")),
            ("attend, 30 % and tail", attend_cost(problem, 0.3)),
            ("attend, 16 % (tau 1.0 on Gaussian inputs) and tail", attend_cost(problem, 0.16)),
            ("attend, 10 % and tail", attend_cost(problem, 0.1)),
            ("plan: pool, score, select", plan_cost(problem)),
            ("reblock Q and K", reblock_cost(problem)),
            ("reweight, one anchor", reweight_cost(problem)),
        )
        for words, cost in stages:
            lines.append(
                f"| {name} | {words} | {cost.flops / 1e12:.3g} | {cost.bytes / 1e9:.3g} "
                f"| {cost.floor_ms(H200_BF16):.3g} |"
            )
    lines += [
        "",
        f"Ceilings on an H200: {H200_BF16.tflops:g} TFLOP/s (bf16 matrix product) and "
        f"{H200_BF16.tbytes:g} TB/s (device copy, read plus written).",
    ]
    return "\n".join(lines)


def _matches(row: Row, words: Sequence[str]) -> bool:
    """Say whether a row belongs to a section."""
    level, *filters = words
    if level == "curve":
        level = "quality"
    if level == "headline":
        if not any(_is_headline(row, *entry) for entry in HEADLINE):
            return False
    elif level == "dit":
        if row.level not in ("dit", "step"):
            return False
    elif row.level != level:
        return False
    for word in filters:
        if word == "ablations":
            if set(row.options) <= PLAIN_OPTIONS:
                return False
            continue
        name, _, values = word.partition("=")
        actual = getattr(row, name) if hasattr(row, name) else row.options.get(name)
        if str(actual) not in values.split(","):
            return False
    return True


def _is_headline(row: Row, level: str, method: str, options: dict[str, float]) -> bool:
    """Say whether a row is an entry of the headline."""
    return (row.level, row.method) == (level, method) and all(
        row.options.get(name) == value for name, value in options.items()
    )


def rewrite(text: str, rows: Sequence[Row]) -> str:
    """Return a document with every marked section written anew."""
    return MARKER.sub(lambda found: f"{found[1]}\n{section(found[2], rows)}\n{found[4]}", text)


def parser(program: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    parse = argparse.ArgumentParser(prog=program, description=__doc__)
    parse.add_argument("--rows", type=Path, default=Path("benchmarks"), help="folder or file")
    parse.add_argument(
        "--into", type=Path, nargs="*", default=[Path("docs/measured.md"), Path("README.md")]
    )
    parse.add_argument("--check", action="store_true", help="write nothing, say what would change")
    parse.add_argument("--section", help='print one section, such as "call problem=h3-10s"')
    return parse


def main(argv: Sequence[str] | None = None, program: str = "solspark bench report") -> int:
    """Rewrite the marked sections of documents from recorded rows.

    Args:
        argv: arguments; None takes the process's own.
        program: name in help texts.

    Returns:
        0; 1 with `--check` when a document is not what the rows say.
    """
    options = parser(program).parse_args(sys.argv[1:] if argv is None else list(argv))
    from solspark.bench.settings import load_cases

    load_cases()
    paths = sorted(options.rows.glob("*.jsonl")) if options.rows.is_dir() else [options.rows]
    rows = list(read_rows(paths))
    if options.section:
        print(section(options.section, rows))
        return 0
    stale = False
    for path in options.into:
        if not path.exists():
            continue
        before = path.read_text()
        after = rewrite(before, rows)
        if before != after:
            stale = True
            print(f"{path}: {'out of date' if options.check else 'written'}")
            if not options.check:
                path.write_text(after)
    return 1 if options.check and stale else 0
