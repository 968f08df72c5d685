"""Draws a run of the router's benchmark: the time of every row, and error against time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from solspark.bench.plots import _pyplot as pyplot
from solspark.bench.router_advice import Figures
from solspark.bench.router_rows import EXTERNAL, ROWS, SPARSE

COLOURS = {EXTERNAL: "tab:grey", SPARSE: "tab:green"}
OURS = "tab:blue"


def plot_router(shapes: Mapping[str, Figures], title: str, path: Path) -> list[Path]:
    """Draw one line of two panels a shape and write it as PNG.

    Args:
        shapes: shape -> row -> figure of what passed.
        title: of the figure.
        path: of the file.

    Returns:
        What was written; nothing when no row has a time.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    filled = {name: figures for name, figures in shapes.items() if figures}
    if not filled:
        return []
    plt = pyplot()
    most = max(len(figures) for figures in filled.values())
    height = max(3.0, 0.22 * most + 1.0)
    figure, grid = plt.subplots(
        len(filled), 2, figsize=(13, height * len(filled)), squeeze=False, layout="constrained"
    )
    for (shape, figures), (times, errors) in zip(filled.items(), grid, strict=True):
        names = list(figures)
        colours = [COLOURS.get(ROWS[name].kind, OURS) for name in names]
        places = range(len(names))
        spread = [figures[name].ms * figures[name].sigma for name in names]
        times.barh(places, [figures[n].ms for n in names], xerr=spread, color=colours)
        times.set_yticks(places, names, fontsize=7)
        times.invert_yaxis()
        times.set(xlabel="ms (median, sigma of it)", title=shape)
        for name, colour in zip(names, colours, strict=True):
            point = figures[name]
            errors.scatter(point.ms, max(point.error, 1e-9), color=colour, s=18)
            errors.annotate(name, (point.ms, max(point.error, 1e-9)), fontsize=6)
        errors.set(
            xscale="log", yscale="log", xlabel="ms", ylabel="relative L2 against dense", title=shape
        )
        errors.grid(True, which="both", alpha=0.3)
    figure.suptitle(f"{title}; grey: others, blue: ours, green: sparse", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No version or date inside: the same rows give the same file.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return [path]
