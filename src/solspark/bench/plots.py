"""Draws the recorded rows: time against tokens, error against density, where the time goes, a route
map.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solspark.bench.dit import DENSE_EVALUATIONS, EVALUATIONS
from solspark.bench.parts import PARTS
from solspark.bench.problems import get_problem
from solspark.bench.quality_tables import curve_rows
from solspark.bench.report import newest
from solspark.bench.rows import Row, read_rows
from solspark.errors import MissingDependencyError

FORMATS = ("png", "svg")


def _pyplot() -> Any:
    """Return matplotlib's pyplot without a display.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        # Names inside an SVG are random otherwise: the same rows are to give the same file.
        matplotlib.rcParams["svg.hashsalt"] = "solspark"
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            'plots need matplotlib: pip install "solspark[bench]"'
        ) from error
    return pyplot


def _name(row: Row) -> str:
    """Return what a curve is called."""
    shown = [
        f"{key} {value}"
        for key, value in row.options.items()
        if key not in ("inputs", "heads", "seed", "lists") and value not in (None, False)
    ]
    return " ".join([row.method, *shown])


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure in every format and close it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=100, bbox_inches="tight", metadata=_metadata(path))
    _pyplot().close(figure)
    return paths


def _metadata(path: Path) -> dict[str, Any]:
    return {"Date": None} if path.suffix == ".svg" else {"Software": None}


def plot_time(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the time of a whole call against T, one curve a method, log scales; one T is none."""
    mine = [row for row in rows if row.level == "call" and row.ms and row.passed]
    curves: dict[str, list[Row]] = {}
    for row in mine:
        curves.setdefault(_name(row), []).append(row)
    if len({row.tokens for row in mine}) < 2:
        return []
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 5))
    for name, points in sorted(curves.items()):
        points.sort(key=lambda row: row.tokens)
        axes.plot(
            [row.tokens for row in points],
            [row.ms for row in points],
            marker="o",
            linestyle="--" if name.startswith(("dense", "comfy", "sage")) else "-",
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms a call")
    axes.set_title(f"{mine[0].gpu}, H = {mine[0].heads}, D = 128")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, folder, "time_against_tokens")


def plot_error(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw relative L2 against density, one curve a method and route, one field a problem."""
    fields: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in curve_rows(rows):
        if row.options.get("inputs") in ("video", "file") and row.density is not None:
            route = "tau" if "tau" in row.options else "top-k"
            curve = fields.setdefault(row.problem, {}).setdefault(f"{row.method}, {route}", [])
            curve.append((row.density, (row.error or {})["relative_l2"]))
    if not fields:
        return []
    plt = _pyplot()
    size = (4.2 * len(fields) + 1.5, 4)
    figure, places = plt.subplots(1, len(fields), figsize=size, sharey=True, squeeze=False)
    names = sorted({name for curves in fields.values() for name in curves})
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    for axes, (problem, curves) in zip(places[0], fields.items(), strict=True):
        for name, points in sorted(curves.items()):
            points = zip(*sorted(points), strict=True)
            axes.plot(*points, marker="o", color=colours[name], label=name)
        axes.set(xlabel="share of block pairs read exactly", yscale="log")
        axes.set_title(f"{problem}, video activations", fontsize=10)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    places[0, 0].set(ylabel="relative L2 against dense")
    return _save(figure, folder, "error_against_density")


def generation_parts(rows: Sequence[Row], whole: Row) -> dict[str, float]:
    """Return the seconds of each part of a generation, or nothing where the run has no parts of it.

    A dense generation is E dense evaluations, a sparse one W dense and E - W sparse ones; the
    attention of dense and of sparse evaluations are parts of their own.

    Args:
        rows: recorded, those of level "part" among them.
        whole: a row of level "dit".
    """
    inside = [row for row in rows if row.level == "part" and row.ms is not None]
    inside = [row for row in inside if (row.run, row.problem) == (whole.run, whole.problem)]

    def of(kind: str, methods: Sequence[str], options: dict[str, Any] | None) -> dict[str, float]:
        for name in methods:
            found = {
                row.options["part"]: row.ms or 0.0
                for row in inside
                if (row.method, row.options["evaluation"]) == (name, kind)
                and (options is None or _without(row.options, "evaluation", "part") == options)
            }
            if found:
                return found
        return {}

    evaluations = whole.options.get("num_denoise_steps", EVALUATIONS)
    warm = whole.options.get("warmup_steps", DENSE_EVALUATIONS)
    sparse = of("sparse", [whole.method], whole.options)
    if not sparse:
        warm = evaluations
    dense = of("dense", [whole.method, "dense-cudnn", "dense-default"], None)
    if not dense or (not sparse and not whole.method.startswith("dense")):
        return {}
    total: dict[str, float] = {}
    for count, parts, kind in ((warm, dense, "dense"), (evaluations - warm, sparse, "sparse")):
        for name, ms in parts.items():
            name = f"attention, {kind} evaluations" if name == "attention" else name
            total[name] = total.get(name, 0.0) + count * ms / 1e3
    return {name: total[name] for name in SHOWN_PARTS if name in total}


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return options without some of them."""
    return {name: value for name, value in options.items() if name not in names}


SHOWN_PARTS = tuple(
    shown
    for name in PARTS
    for shown in (
        [f"attention, {kind} evaluations" for kind in ("dense", "sparse")]
        if name == "attention"
        else [name]
    )
)


def plot_shares(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw where a generation's time goes, part by part."""
    wholes = [row for row in rows if row.level == "dit" and row.ms and row.passed]
    found = [(whole, generation_parts(rows, whole)) for whole in wholes]
    bars = [(f"{whole.problem} {_name(whole)}", parts) for whole, parts in found if parts][::-1]
    if not bars:
        return []
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(bars) + 1.5))
    names = [name for name, _ in bars]
    left = [0.0] * len(bars)
    for part in SHOWN_PARTS:
        widths = [parts.get(part, 0.0) for _, parts in bars]
        if not any(widths):
            continue
        axes.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for index, total in enumerate(left):
        axes.text(total, index, f" {total:.3g} s", va="center", fontsize=8)
    axes.set_xlim(right=1.08 * max(left))
    axes.set(xlabel="seconds", title=f"{wholes[0].gpu}: the DiT's part of one generation")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, folder, "where_the_time_goes")


def plot_route(problem_name: str, head: int, ratio: float, folder: Path) -> list[Path]:
    """Draw the exact blocks of one head, in the given order and reblocked, beside the dense mass.

    Args:
        problem_name: a named problem; its video activations are made for this head alone.
        head: index.
        ratio: budget.
        folder: where the figure goes.
    """
    from solspark.bench.quality import route_masks

    problem = get_problem(problem_name)
    masks = route_masks(problem, head, ratio, torch.device("cpu"))
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(masks), figsize=(4.2 * len(masks), 4.4))
    for place, (name, (mask, recall)) in zip(axes, masks.items(), strict=True):
        place.imshow(_thinned(mask), cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
        place.set_title(f"{name}: {recall:.0%} of the mass", fontsize=10)
        place.set(xlabel="key block", ylabel="query block")
    figure.suptitle(f"{problem.name}, head {head}, {ratio:.0%} of the blocks", fontsize=11)
    return _save(figure, folder, f"route_map_{problem.name}_head{head}")


def _thinned(mask: Tensor, most: int = 600) -> Any:
    """Return a mask as a picture of at most `most` pixels a side, averaged."""
    step = max(1, -(-max(mask.shape) // most))
    rows, columns = (size // step * step for size in mask.shape)
    part = mask[:rows, :columns].float()
    return part.view(rows // step, step, columns // step, step).amax((1, 3)).numpy()


PLOTS: tuple[Callable[[Sequence[Row], Path], list[Path]], ...] = (
    plot_time,
    plot_error,
    plot_shares,
)


def parser(program: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    parse = argparse.ArgumentParser(prog=program, description=__doc__)
    parse.add_argument("--rows", type=Path, default=Path("benchmarks"), help="folder or file")
    parse.add_argument("--out", type=Path, default=Path("docs/figures"))
    parse.add_argument("--route-map", metavar="PROBLEM", help="also draw a head's routes")
    parse.add_argument("--head", type=int, default=1)
    parse.add_argument("--topk-ratio", type=float, default=0.1)
    return parse


def main(argv: Sequence[str] | None = None, program: str = "solspark bench plots") -> int:
    """Draw the figures of recorded rows.

    Args:
        argv: arguments; None takes the process's own.
        program: name in help texts.

    Returns:
        0.
    """
    options = parser(program).parse_args(sys.argv[1:] if argv is None else list(argv))
    paths = sorted(options.rows.glob("*.jsonl")) if options.rows.is_dir() else [options.rows]
    rows = newest(read_rows(paths)) if all(path.exists() for path in paths) else []
    for draw in PLOTS:
        for path in draw(rows, options.out):
            print(path)
    if options.route_map:
        for path in plot_route(options.route_map, options.head, options.topk_ratio, options.out):
            print(path)
    return 0
