"""What to measure: the command line of the harness, and the cases that it expands to."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from solspark.bench import rows as rows_module
from solspark.bench.case import METHODS, Method, methods_of
from solspark.bench.inputs import KINDS, recorded_problem
from solspark.bench.problems import PROBLEMS, Problem, get_problem

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
ROUTES = ("topk_ratio", "tau")
SWEPT = (*ROUTES, "lists", "tail", "impl", "preset", "token_aug", "parents", "check")
"""Options with a flag of their own."""
"""Options with a flag of their own."""


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
    fixed = settings.fixed if "impl" in method.axes else {}
    defaults = {**AXIS_DEFAULTS, **{name: [value] for name, value in fixed.items()}}
    values = [sweeps.get(name, defaults.get(name, [None])) for name in others]
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


def load_cases() -> None:
    """Import every module that declares methods."""
    for name in CASE_MODULES:
        importlib.import_module(f"solspark.bench.{name}")
