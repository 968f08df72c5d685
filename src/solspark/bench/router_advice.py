"""Settings of the quantised attention that a run of the router's benchmark recommends, and why.

One configuration is picked (the lowest error within 5 % of the fastest) and only that one is tested
against the kernel that quantises nothing, so that noise among many rows cannot recommend any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from solspark.bench.router_rows import GROUP, KERNEL, ROWS

SHAPES = ("flux2", "krea2", "anima", "sdxl", "wan22", "ltx2", "h3", "sd15")
"""Reference shapes, best first."""
CLOSE = 1.05
"""As fast as the fastest is whatever takes at most this much more."""
WORTHWHILE = 0.90
"""A recommended configuration takes at most this share of the plain kernel's time."""
CONFIDENCE = 0.90
MOST_ERROR = 2.0
"""Rows with more than this many times int8's error are told of, never chosen."""
GAIN = 1.3
SMOOTH_COST, HADAMARD_COST = 1.25, 1.15
BANDS = {
    ("anima", "smooth"): (0.0159, 0.0215),
    ("sdxl", "smooth"): (0.0185, 0.0250),
    ("anima", "noquant"): (0.0021, 0.0043),
    ("sdxl", "noquant"): (0.0025, 0.0050),
}
"""Errors in bfloat16 that other machines had; outside them the inputs or a kernel are suspect."""

FASTER, NOT_FASTER, INCONCLUSIVE = "faster", "not faster", "inconclusive"


@dataclass(frozen=True)
class Figure:
    """Hold what the advice needs of one passed row.

    Args:
        ms: median.
        sigma: of the median, relative, the run's drift included.
        error: relative L2 against dense attention.
    """

    ms: float
    sigma: float
    error: float


@dataclass(frozen=True)
class Setting:
    """Recommend one setting; `value` None means to keep what is set."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True)
class Advice:
    """Hold what a run recommends.

    Args:
        shape: the shape it was judged on.
        picked: name of the configuration.
        verdict: "faster", "not faster" or "inconclusive" than `noquant`.
        settings: the recommended values.
        per_shape: verdict of every shape that has both rows.
        notes: rows told of and not chosen, verdicts that differ, errors outside their bands.
    """

    shape: str
    picked: str
    verdict: str
    settings: tuple[Setting, ...]
    per_shape: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Figures = Mapping[str, Figure]


def candidates(figures: Figures) -> list[str]:
    """Return dense, safe rows of ours that quantise something, in the table's order."""
    return [
        name
        for name, row in ROWS.items()
        if name in figures and row.kind == KERNEL and row.quantized and not row.unsafe
    ]


def starred(figures: Figures) -> str | None:
    """Return the best row of ours: the lowest error within 5 % of the fastest; None without any."""
    names = [
        name
        for name, row in ROWS.items()
        if name in figures and row.kind == KERNEL and not row.unsafe
    ]
    return _pick(names, figures)[0] if names else None


def _pick(names: Sequence[str], figures: Figures) -> tuple[str, int]:
    """Return the most accurate of the rows as fast as the fastest, and how many of these are."""
    fastest = min(figures[name].ms for name in names)
    pool = [name for name in names if figures[name].ms <= CLOSE * fastest]
    return min(pool, key=lambda name: figures[name].error), len(pool)


def pick(figures: Figures) -> tuple[str, int] | None:
    """Return the configuration to test and the size of the pool that it was picked from."""
    names = candidates(figures)
    if "int8" in figures:
        names = [n for n in names if figures[n].error <= MOST_ERROR * figures["int8"].error]
    return _pick(names, figures) if names else None


def z_of(pool: int) -> float:
    """Return the one-sided 90 % quantile of a normal, Sidak-adjusted for the size of a pool."""
    return NormalDist().inv_cdf(CONFIDENCE ** (1 / pool))


def verdict(old: Figure, chosen: Figure, pool: int) -> str:
    """Say whether a configuration takes at most 90 % of the old time, beyond noise.

    ln(old / chosen) + ln(0.90)  against  z sqrt(sigma_old^2 + sigma_chosen^2)
    """
    gain = math.log(old.ms / chosen.ms) + math.log(WORTHWHILE)
    noise = z_of(pool) * math.hypot(old.sigma, chosen.sigma)
    if gain > noise:
        return FASTER
    return NOT_FASTER if gain < -noise else INCONCLUSIVE


def advise(
    shapes: Mapping[str, Figures], block: Figures | None = None, dtype: str = "bf16"
) -> Advice | None:
    """Recommend settings from the passed rows of a run.

    Args:
        shapes: shape -> row -> figure.
        block: rows of the block table, under the names of the attention rows inside, if measured.
        dtype: "bf16" has bands of plausible errors.

    Returns:
        The advice; None where no shape has `noquant`, `int8` and something to pick.

    Source: router specification 5.5.
    """
    able = [n for n, figures in shapes.items() if {"int8", "noquant"} <= set(figures)]
    order = [name for name in SHAPES if name in able] or able
    if not order:
        return None
    figures = shapes[order[0]]
    found = pick(figures)
    if found is None:
        return None
    picked, pool = found
    judged = verdict(figures["noquant"], figures[picked], pool)
    per_shape: dict[str, str] = {}
    for name in able:
        mine = pick(shapes[name])
        if mine is not None:
            chosen, size = mine
            told = verdict(shapes[name]["noquant"], shapes[name][chosen], size)
            per_shape[name] = f"{chosen}: {told}"
    notes = [
        f"{name} has {figures[name].error / figures['int8'].error:.1f} times int8's error: "
        "told of, not chosen"
        for name in candidates(figures)
        if figures[name].error > MOST_ERROR * figures["int8"].error
    ]
    if len({text.partition(": ")[2] for text in per_shape.values()}) > 1:
        split = ", ".join(f"{name} {text}" for name, text in per_shape.items())
        notes.append(f"the shapes disagree: {split}")
    if dtype == "bf16":
        notes += _outside_bands(shapes)
    settings = _settings(figures, picked, judged, block)
    return Advice(order[0], picked, judged, settings, per_shape, tuple(notes))


def _outside_bands(shapes: Mapping[str, Figures]) -> list[str]:
    """Tell of errors that no other machine had."""
    notes = []
    for (shape, name), (low, high) in BANDS.items():
        figure = shapes.get(shape, {}).get(name)
        if figure is not None and not low <= figure.error <= high:
            notes.append(f"{shape} {name}: error {figure.error:.4f} outside {low}-{high}")
    return notes


def _settings(
    figures: Figures, picked: str, judged: str, block: Figures | None
) -> tuple[Setting, ...]:
    """Return one recommendation for each setting, with what was measured."""
    row, old, best = ROWS[picked], figures["noquant"], figures[picked]
    why = (
        f"{picked} takes {best.ms:.3g} ms where noquant takes {old.ms:.3g} "
        f"({old.ms / best.ms:.2f}x, {judged}), error {best.error:.4f}"
    )
    if judged != FASTER:
        value = "none" if judged == NOT_FASTER else None
        words = f"{why}: {'leave it off' if value else 'keep what is set'}"
        switches = tuple(
            Setting(name, off if value else None, words)
            for name, off in (
                ("quantized_matmul", "none"),
                ("quantized_pv", "none"),
                ("fp16 accumulation", False),
                ("quantized_smooth_k", False),
                ("quantized_hadamard", 0),
                ("quantized_granularity", "row"),
            )
        )
        return (*switches, Setting("group size", GROUP, "the only one measured"))
    smooth, smooth_why = _worth(figures, block, "smooth", SMOOTH_COST, row.smooth_k)
    rotate, rotate_why = _worth(figures, block, "hadamard", HADAMARD_COST, row.hadamard > 0)
    return (
        Setting("quantized_matmul", row.matmul, why),
        Setting("quantized_pv", row.pv, _pv_reason(figures, row.pv, why)),
        Setting("fp16 accumulation", False, "no kernel here has it: not measured"),
        Setting("quantized_smooth_k", smooth, smooth_why),
        Setting("quantized_hadamard", GROUP if rotate else 0, rotate_why),
        Setting("quantized_granularity", row.granularity, _scales_reason(figures, why)),
        Setting("group size", GROUP, "the only one measured"),
    )


def _scales_reason(figures: Figures, why: str) -> str:
    """Say what one scale for 64 keys did to int8."""
    if not {"int8", "int8tile"} <= set(figures):
        return why
    row, tile = figures["int8"], figures["int8tile"]
    return (
        f"a scale for 64 keys: {tile.ms / row.ms:.2f}x int8's time, "
        f"{tile.error / row.error:.2f}x its error"
    )


def _pv_reason(figures: Figures, pv: str, why: str) -> str:
    """Say what quantising P and V as well did to int8."""
    others = [
        f"{name} {figures[name].ms / figures['int8'].ms:.2f}x int8's time"
        for name in ("fp16pv", "int8pv", "fp8pv")
        if name in figures
    ]
    return why if pv != "none" or not others else "; ".join(others)


def _worth(
    figures: Figures, block: Figures | None, name: str, cost: float, otherwise: bool
) -> tuple[bool, str]:
    """Judge an addition to int8: an error at least 1.3 times lower, at a bounded cost.

    The block table counts where it has both rows: what an addition costs there is what a model
    pays.
    """
    for scope, rows in (("block", block), ("attention", figures)):
        if rows is None or not {"int8", name} <= set(rows):
            continue
        gain = rows["int8"].error / max(rows[name].error, 1e-12)
        time = rows[name].ms / rows["int8"].ms
        worth = gain >= GAIN and time <= cost
        return worth, f"{scope}: error {gain:.2f}x lower at {time:.2f}x the time"
    return otherwise, "not measured alone: as in the picked row"
