"""Runs measurements: expands methods and options into cases, gates, times, writes rows.

Only torch and the standard library are needed, so that a bare GPU machine can run it as
`python -m solspark.bench`; rich draws the table where it is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from solspark.bench import rows as rows_module
from solspark.bench.case import METHODS, Case, Method, Unavailable, methods_of
from solspark.bench.gate import Verdict
from solspark.bench.inputs import KINDS, PRECISIONS, Inputs, make_inputs, recorded_problem
from solspark.bench.problems import PROBLEMS, Problem, get_problem
from solspark.bench.report import baselines, speed_up
from solspark.bench.rows import Row
from solspark.bench.timing import measure, synchronize
from solspark.errors import SolsparkError
from solspark.ops._dispatch import collect_records

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_PROBLEM = "tiny"
LEVELS = ("attend", "call", "layer", "plan", "reweight", "dit", "checks", "quality")
CASE_MODULES = ("baselines", "ours", "peers", "checks", "dit", "quality")
SUBCOMMANDS = {
    "report": "solspark.bench.report",
    "plots": "solspark.bench.plots",
    "quality": "solspark.bench.quality",
    "router": "solspark.bench.router_bench",
}
"""First word of the command line -> the module whose `main(arguments, program)` takes the rest."""

DEFAULT_METHODS = {
    "attend": "sol,dense-cudnn,flex",
    "call": "sol,dense-cudnn,dense-flash,spark",
    "layer": "spark,sol,dense-cudnn",
    "plan": "pool,score_blocks,select_blocks,sol,reblock",
    "reweight": "spark_reweight",
    "dit": "dense-cudnn,spark,sol,no-attention,dense-default",
    "checks": "sol,spark",
    "quality": "recall,sol,spark",
}
CPU_METHODS = {
    "attend": "sol,dense-default",
    "call": "sol,dense-default,spark",
    "layer": "spark,sol,dense-default",
    "dit": "dense-default,spark,sol,no-attention",
}
AXIS_DEFAULTS: dict[str, list[Any]] = {
    "lists": ["random", "clustered"],
    "tail": [None],
    "impl": [None],
    "preset": [None],
    "token_aug": [None],
    "parents": [1, 17],
    "primed": [False, True],
    "order": ["given", "reblocked"],
    "reweight_components": [None],
    "matmul": [None],
    "pv": [None],
    "layout_reuse": [None],
    "landmark_count": [None],
    "check": ["determinism", "strided", "rows", "graph"],
}
CPU = torch.device("cpu")
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
ROUTES = ("topk_ratio", "tau")
SWEPT = (*ROUTES, "lists", "tail", "impl", "preset", "token_aug", "parents", "check")
"""Options with a flag of their own."""

FATAL = ("CUDA error", "device-side assert", "an illegal memory access", "misaligned address")
"""After one of these the process can launch nothing more."""


@dataclass(frozen=True)
class Settings:
    """Say what to measure.

    Args:
        problems: names or shapes, in order.
        levels: in order.
        methods: of every level; empty takes the level's default list.
        sweeps: option -> values, one case each.
        fixed: options given to every method of ours.
        inputs: "gaussian", "video" or "file".
        file: safetensors to replay.
        device: where.
        dtype: of the inputs.
        heads: measure with fewer heads than the problem's; None for all.
        seed: of the inputs.
        target_s: seconds of timed calls a row.
        budget_s: stop starting rows after this long; None for no limit.
        out: JSON-lines file to append to; None prints the lines.
        run: id of the run; rows of it that `out` has already are not taken again.
        commit: what is measured.
    """

    problems: tuple[Problem, ...]
    levels: tuple[str, ...]
    methods: tuple[str, ...] = ()
    sweeps: dict[str, list[Any]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    inputs: str = "gaussian"
    file: Path | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    heads: int | None = None
    seed: int = 0
    target_s: float = 1.0
    budget_s: float | None = None
    out: Path | None = None
    run: str = ""
    commit: str = "unknown"


def parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the measuring command; the subcommands have their own."""
    cuda = torch.cuda.is_available()
    parse = argparse.ArgumentParser(
        prog=program,
        description="Measure named problems: gate first, then time, one JSON line a row.",
        epilog="Further commands: " + ", ".join(SUBCOMMANDS) + f" ({program} COMMAND --help).",
    )
    add = parse.add_argument
    add("--problem", help=f"comma-separated (default {DEFAULT_PROBLEM}): " + ", ".join(PROBLEMS))
    add("--level", default="call", help="comma-separated: " + ", ".join(LEVELS))
    add("--methods", default="", help="comma-separated; empty for the level's own list")
    add("--topk-ratio", default="", help="budgets to sweep (default 0.1 unless --tau is given)")
    add("--tau", default="", help="thresholds to sweep")
    add("--lists", default="", help="attend: random, clustered, equal")
    add("--tail", default="", help="tails to sweep: query, block, none")
    add("--impl", default="", help="implementations to sweep: eager, triton, hopper")
    add("--preset", default="", help="Spark presets to sweep")
    add("--token-aug", default="", help="token budgets to sweep (INT8)")
    add("--parents", default="", help="reweight: anchors to sweep")
    add("--check", default="", help="checks: determinism, strided, rows, graph")
    add("--sweep", action="append", default=[], metavar="NAME=A,B", help="sweep any option")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="fix any option of ours")
    add("--inputs", default="gaussian", choices=KINDS[:2])
    add(
        "--activations",
        type=Path,
        help="safetensors with query, key, value to measure on; a file of `solspark capture` "
        "says itself which problem it is",
    )
    add("--heads", type=int, help="use fewer heads than the problem has")
    add("--dtype", default="bf16" if cuda else "fp32", choices=DTYPES)
    add("--device", default="cuda" if cuda else "cpu")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON-lines file to append to")
    add("--run", default="", help="id of the run; give it again to resume")
    add("--commit", default="", help="commit measured, where git cannot tell")
    add("--peers", type=Path, help="folder of unpacked peers' wheels")
    add("--budget-s", type=float, help="start no further row after this many seconds")
    add("--target-s", type=float, default=1.0, help="seconds of timed calls a row")
    add("--list", action="store_true", help="list problems and methods, measure nothing")
    return parse


def _value(text: str) -> Any:
    """Read one option value: JSON where it is JSON, else the word itself."""
    if text == "None":
        return None
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def _values(text: str) -> list[Any]:
    """Read a comma-separated list of values."""
    return [_value(part.strip()) for part in text.split(",") if part.strip()]


def _words(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def wanted_problems(names: str | None, file: Path | None) -> tuple[Problem, ...]:
    """Return the problems of --problem; without it that of the file, or else the tiny one.

    Raises:
        ValueError: an unknown name, or a file that is none.
    """
    if names is None and file is not None:
        recorded = recorded_problem(file)
        if recorded is not None:
            return (recorded,)
    return tuple(get_problem(name) for name in _words(names or DEFAULT_PROBLEM))


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Return the settings of parsed arguments.

    Raises:
        ValueError: an unknown problem, level or malformed NAME=VALUE.
    """
    sweeps: dict[str, list[Any]] = {}
    for name in (
        "topk_ratio",
        "tau",
        "lists",
        "tail",
        "impl",
        "preset",
        "token_aug",
        "parents",
        "check",
    ):
        if getattr(arguments, name):
            sweeps[name] = _values(getattr(arguments, name))
    fixed: dict[str, Any] = {}
    for target, items in ((sweeps, arguments.sweep), (fixed, arguments.set)):
        for item in items:
            name, equals, text = item.partition("=")
            if not equals:
                raise ValueError(f"--sweep and --set: expected NAME=VALUE, got {item!r}")
            target[name.replace("-", "_")] = _values(text) if target is sweeps else _value(text)
    levels = _words(arguments.level)
    for level in levels:
        if level not in LEVELS:
            raise ValueError(f"--level: expected one of {', '.join(LEVELS)}, got {level!r}")
    return Settings(
        problems=wanted_problems(arguments.problem, arguments.activations),
        levels=levels,
        methods=_words(arguments.methods),
        sweeps=sweeps,
        fixed=fixed,
        inputs="file" if arguments.activations else arguments.inputs,
        file=arguments.activations,
        device=torch.device(arguments.device),
        dtype=DTYPES[arguments.dtype],
        heads=arguments.heads,
        seed=arguments.seed,
        target_s=arguments.target_s,
        budget_s=arguments.budget_s,
        out=arguments.out,
        run=arguments.run or rows_module.fresh_run_id(),
        commit=arguments.commit or rows_module.current_commit(),
    )


def expand(method: Method, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the options of every case of a method.

    A route is a budget or a threshold, never both; other axes multiply. Options of value None are
    left out, so that a row says only what was asked for.
    """
    sweeps = settings.sweeps
    routes: list[dict[str, Any]] = [
        {name: value} for name in ROUTES if name in method.axes for value in sweeps.get(name, [])
    ]
    if not routes and "topk_ratio" in method.axes:
        # A threshold alone was asked for and this method has none: nothing of it is wanted.
        routes = [] if "tau" in sweeps and "topk_ratio" not in sweeps else [{"topk_ratio": 0.1}]
    elif not routes:
        routes = [{}]
    others = [name for name in method.axes if name not in ROUTES]
    others += [
        name
        for name in sweeps
        if name not in AXIS_DEFAULTS
        and name not in method.axes
        and name not in ROUTES
        and "impl" in method.axes
    ]
    values = [sweeps.get(name, AXIS_DEFAULTS.get(name, [None])) for name in others]
    fixed = settings.fixed if "impl" in method.axes else {}
    for route in routes:
        for chosen in itertools.product(*values):
            options = {"inputs": settings.inputs, **route, **fixed}
            options.update(zip(others, chosen, strict=True))
            if settings.heads is not None:
                options["heads"] = settings.heads
            if settings.seed:
                options["seed"] = settings.seed
            yield {name: value for name, value in options.items() if value is not None}


def selected(level: str, settings: Settings) -> list[Method]:
    """Return the methods to measure at a level.

    Raises:
        ValueError: a name that no asked-for level knows.
    """
    defaults = DEFAULT_METHODS[level]
    if settings.device.type == "cpu":
        defaults = CPU_METHODS.get(level, defaults)
    names = settings.methods or _words(defaults)
    for name in settings.methods:
        if not any((asked, name) in METHODS for asked in settings.levels):
            raise ValueError(
                f"--methods: {name!r} is not one of {', '.join(methods_of(level))} at {level}"
            )
    return [METHODS[level, name] for name in names if (level, name) in METHODS]


def is_ours(method: Method) -> bool:
    """Say whether a failing gate of this method fails the run: that of other people's kernels is a
    finding.

    Torch's own dense attention counts as ours, since the gate itself is in doubt where it fails.
    """
    other = method.name.startswith(("fa4", "dense-fa4", "flex"))
    return method.build.__module__ != "solspark.bench.peers" and not other


def _blank(
    settings: Settings,
    problem: Problem,
    inputs: Inputs | None,
    method: Method,
    options: dict[str, Any],
) -> Row:
    """Return a row with everything but the measurement."""
    return Row(
        run=settings.run,
        date=rows_module.today(),
        commit=settings.commit,
        gpu=rows_module.device_name(settings.device),
        torch=torch.__version__,
        triton=rows_module.triton_version(),
        problem=problem.name,
        tokens=problem.tokens,
        heads=inputs.heads if inputs else problem.heads,
        level=method.level,
        method=method.name,
        options=options,
        precision=PRECISIONS[settings.dtype],
    )


def served_by(records: Sequence[Any], fallback: str | None) -> str | None:
    """Return which implementations served a call: one name if it is one, else "operation: name"
    pairs.
    """
    served: dict[str, str] = {}
    for record in records:
        served[record.operation] = record.implementation
    if not served:
        return fallback
    if len(set(served.values())) == 1:
        return next(iter(served.values()))
    return ", ".join(f"{operation}: {name}" for operation, name in served.items())


def take(case: Case, row: Row, settings: Settings) -> list[Row]:
    """Judge a case and, if it passes, time it; returns the completed row and those beside it."""
    with torch.no_grad():
        with collect_records() as records:
            result = case.run()
        synchronize(settings.device)
        row = replace(
            row,
            implementation=served_by(records, case.implementation),
            precision=case.precision or row.precision,
        )
        verdict: Verdict = case.judge(result)
        row = replace(row, gate=verdict.gate)
        if not verdict.passed:
            return [row]
        density = case.density(result)
        row = replace(row, density=density, error=case.error(result))
        if case.facts is not None:
            whole, *beside = case.facts(result)
            row = replace(row, **whole)
            blank = replace(row, ms=None, iqr_ms=None, density=None, error=None)
            return [
                row,
                *(
                    replace(blank, **{**extra, "options": {**row.options, **extra["options"]}})
                    for extra in beside
                ),
            ]
        del result
        if not case.timed:
            return [row]
        timing = measure(case.run, settings.device, target_s=settings.target_s, warmup=case.warmup)
        flops = case.flops(density)
    return [
        replace(
            row,
            ms=timing.ms,
            iqr_ms=timing.iqr_ms,
            peak_gib=timing.peak_gib,
            tflops=None if flops is None else flops / timing.ms / 1e9,
        )
    ]


def _release(device: torch.device) -> None:
    """Give back what a case held before the next one is built."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Session:
    """Take rows one by one within the time budget and remember how it went."""

    def __init__(self, settings: Settings, say: Callable[[str], None]):
        self.settings, self.say = settings, say
        self.rows: list[Row] = []
        self.failed = False
        self.stopped: str | None = None
        self.started = time.perf_counter()
        self.skipped = 0
        self.place = ""
        self.done: dict[str, Row] = {}
        if settings.out is not None and settings.out.exists():
            self.done = {row.key(): row for row in rows_module.read_rows([settings.out])}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def _out_of_time(self) -> bool:
        limit = self.settings.budget_s
        return self.stopped is not None or (limit is not None and self.elapsed > limit)

    def run(self, parts: Sequence[Settings] | None = None) -> None:
        """Measure everything the settings ask for.

        Args:
            parts: settings that differ in methods and sweeps alone, to be taken one after another
                on the same inputs; None for the session's own.
        """
        for problem in self.settings.problems:
            self._problem(problem, [self.settings] if parts is None else parts)
        if self.skipped:
            reason = self.stopped or f"{self.settings.budget_s:g} s are over"
            self.say(f"{self.skipped} rows not taken: {reason}; --run {self.settings.run} resumes")

    def _problem(self, problem: Problem, parts: Sequence[Settings]) -> None:
        settings = self.settings
        wanted = [
            (method, options)
            for part in parts
            for level in part.levels
            for method in selected(level, part)
            for options in expand(method, part)
        ]
        if settings.heads is not None:
            problem = replace(problem, heads=min(settings.heads, problem.heads))
        inputs: Inputs | None = None
        for number, (method, options) in enumerate(wanted, start=1):
            self.place = f"{number}/{len(wanted)}"
            row = _blank(settings, problem, inputs, method, options)
            if row.key() in self.done:
                self.rows.append(self.done[row.key()])
                self.say(f"  {label(row)}: taken already")
                continue
            if self._out_of_time():
                self.skipped += 1
                continue
            if inputs is None and method.level != "dit":
                inputs = make_inputs(
                    problem,
                    settings.inputs,
                    settings.device,
                    settings.dtype,
                    seed=settings.seed,
                    file=settings.file,
                )
            self._one(method, inputs, problem, options, row)
            _release(settings.device)

    def _one(
        self,
        method: Method,
        inputs: Inputs | None,
        problem: Problem,
        options: dict[str, Any],
        row: Row,
    ) -> None:
        """Take one row, write it, print it."""
        try:
            source: Any = inputs if method.level != "dit" else (problem, self.settings)
            row = replace(row, heads=inputs.heads if inputs else row.heads)
            taken = take(method.build(source, options), row, self.settings)
        except Unavailable as absent:
            self.say(f"  {label(row)}: not here: {absent}")
            return
        except Exception as error:
            text = " ".join(str(error).split())
            taken = [replace(row, gate=f"{type(error).__name__}: {text[:300]}")]
            if any(sign in text for sign in FATAL):
                self.stopped = "the device context is lost"
        for item in taken:
            if not item.passed and is_ours(method):
                self.failed = True
            self.rows.append(item)
            if self.settings.out is not None:
                rows_module.append_row(self.settings.out, item)
            else:
                print(rows_module.to_line(item), flush=True)
            self.say(f"[{self.elapsed:5.0f} s, {self.place}] {label(item)}: {outcome(item)}")


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
    if not row.passed:
        return f"GATE: {row.gate}"
    parts = ["pass"]
    if row.ms is not None:
        parts = [f"{row.ms:.3f} ms (iqr {row.iqr_ms or 0:.3f})"]
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


def load_cases() -> None:
    """Import every module that declares methods."""
    for name in CASE_MODULES:
        importlib.import_module(f"solspark.bench.{name}")


def main(argv: Sequence[str] | None = None, program: str = "python -m solspark.bench") -> int:
    """Run the harness.

    Args:
        argv: arguments; None takes the process's own.
        program: name in help texts.

    Returns:
        0; 1 when a gate of ours or of a baseline failed; 2 for a wrong argument.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SUBCOMMANDS:
        module = importlib.import_module(SUBCOMMANDS[arguments[0]])
        return module.main(arguments[1:], program=f"{program} {arguments[0]}")
    parse = parser(program)
    options = parse.parse_args(arguments)
    try:
        if options.peers is not None:
            from solspark.bench.peers import add_peers

            add_peers(options.peers)
        load_cases()
        if options.list:
            _print_known()
            return 0
        settings = settings_from(options)
        for level in settings.levels:
            selected(level, settings)
        # What goes wrong inside a case becomes its row; the rest is about files and options.
        return run(settings)
    except (ValueError, OSError, SolsparkError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def run(settings: Settings) -> int:
    """Measure what the settings say, print a table, and return the exit code."""
    session = Session(settings, lambda text: print(text, file=sys.stderr, flush=True))
    session.say(f"run {settings.run}, commit {settings.commit}, {settings.device}")
    try:
        session.run()
    except KeyboardInterrupt:
        session.say(f"interrupted; --run {settings.run} resumes")
        return 130
    print_table(table(session.rows))
    return 1 if session.failed else 0


def _print_known() -> None:
    """Print problems and methods."""
    for problem in PROBLEMS.values():
        shape = f"[{problem.batch}, {problem.tokens}, {problem.heads}, {problem.head_dim}]"
        print(f"{problem.name:14} {shape:24} {problem.source}")
    for level in LEVELS:
        print(f"{level:9} {', '.join(methods_of(level))}")
