"""`solspark bench router`: every attention that the router can send a call to, on models' shapes.

Checks first, then each shape's rows, each judged before it is timed, then blocks from end to end,
then the settings that the figures recommend. A row that cannot be had here is listed with the
reason. The exit code is 1 when a check, a row of ours or torch's own attention fails its gate.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solspark.bench import rows as rows_module
from solspark.bench.router_advice import Advice, Figure, Figures, advise, starred
from solspark.bench.router_blocks import (
    BLOCK_ROWS,
    BLOCKS,
    GEOMETRIES,
    PLAIN_BLOCK,
    QUANTIZED_BLOCK,
    BlockRow,
    Geometry,
    block_errors,
    block_forward,
    make_weights,
    reference_block,
    repeat,
)
from solspark.bench.router_checks import router_checks
from solspark.bench.router_presets import (
    ALIASES,
    PRESETS,
    REFERENCE,
    Preset,
    RouterInputs,
    judge_rows,
    make_router_inputs,
)
from solspark.bench.router_rows import (
    QUANTIZED_ERROR,
    ROWS,
    SPARSE,
    AttentionRow,
    block_attention,
    build_row,
    choose_ids,
    obstacles,
)
from solspark.bench.router_timing import Pace, Sample, deadline, drift_of, measure_steadily
from solspark.bench.rows import Row
from solspark.bench.session import FATAL, served_by
from solspark.bench.timing import synchronize
from solspark.errors import MissingDependencyError
from solspark.ops._dispatch import collect_records
from solspark.router.backend import Platform, detect_platform

SECTIONS = ("attention", "blocks")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNAVAILABLE = "unavailable: "
SENTINEL = "int8"
"""Timed again at the end of a shape; without it, the first row that has a time."""
LOST = "the device context is lost"


@dataclass(frozen=True)
class Plan:
    """Say what to measure, as the command line asked for it.

    Args:
        shapes, configs: of the attention table.
        geometries, block_configs: of the block table.
        sections: parts to measure.
        checks: whether to check before.
        pace: how long to time.
        iters_asked: `--iters` was given, so that presets do not set their own.
        timeout_s: seconds a row may take unless its preset says otherwise.
        device, dtype: where and on what.
        run, commit: ids of the rows.
    """

    shapes: tuple[Preset, ...]
    configs: tuple[AttentionRow, ...]
    geometries: tuple[Geometry, ...]
    block_configs: tuple[BlockRow, ...]
    sections: tuple[str, ...]
    checks: bool
    pace: Pace
    iters_asked: bool
    timeout_s: float
    device: torch.device
    dtype: torch.dtype
    run: str
    commit: str


@dataclass
class Outcome:
    """Hold what became of one row.

    Args:
        row: its record.
        sample: its times; None where it has none.
        prep: times of the quantisation alone.
        error: relative L2 against dense attention.
        extra: further errors, for the block table.
    """

    row: Row
    sample: Sample | None = None
    prep: Sample | None = None
    error: float | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        return not self.row.gate.startswith(UNAVAILABLE)


class RouterSession:
    """Measure a plan; what was measured stays readable when it ends early.

    Args:
        plan: what to measure.
        lines: JSON-lines file that takes each row as soon as there is one, so that a process that
            is killed leaves what it had; None writes none.

    Attributes:
        failed: a gate of ours failed.
        stopped: the device can launch nothing more.
    """

    def __init__(self, plan: Plan, lines: Path | None = None):
        self.plan, self.lines = plan, lines
        self.checks: list[Row] = []
        self.shapes: dict[str, list[Outcome]] = {}
        self.blocks: dict[str, list[Outcome]] = {}
        self.ratios: dict[str, float] = {}
        self.failed = False
        self.stopped = False
        found = detect_platform()
        cpu = plan.device.type == "cpu"
        self.platform = Platform("cpu", plan.device) if cpu else replace(found, device=plan.device)

    def say(self, text: str) -> None:
        """Tell a person how it goes, apart from the results."""
        print(text, file=sys.stderr, flush=True)

    def run(self) -> None:
        """Measure everything; after the device is lost, rows only say so."""
        with torch.no_grad():
            if self.plan.checks:
                self._check()
            if "attention" in self.plan.sections:
                for preset in self.plan.shapes:
                    self._shape(preset)
            if "blocks" in self.plan.sections:
                for geometry in self.plan.geometries:
                    self._geometry(geometry)

    @property
    def drift(self) -> float:
        """Relative drift of the run, from the sentinels timed twice."""
        return drift_of(list(self.ratios.values()))

    def sigma(self, outcome: Outcome) -> float | None:
        """Return the relative sigma of a row's median, the drift in quadrature."""
        sample = outcome.sample
        return None if sample is None else (sample.sigma**2 + self.drift**2) ** 0.5

    def figures(self, outcomes: Sequence[Outcome]) -> dict[str, Figure]:
        """Return what passed and was timed, by row."""
        found = {}
        for item in outcomes:
            sigma = self.sigma(item)
            if item.sample and item.row.passed and item.error is not None and sigma is not None:
                found[item.row.method] = Figure(item.sample.ms, sigma, item.error)
        return found

    def block_figures(self) -> Figures | None:
        """Return the first geometry's rows with plain products, by the attention inside."""
        for outcomes in self.blocks.values():
            figures = self.figures(outcomes)
            return {
                BLOCK_ROWS[name].attention: figure
                for name, figure in figures.items()
                if BLOCK_ROWS[name].linear == "plain"
            }
        return None

    # Sections

    def _check(self) -> None:
        """Run the correctness list."""
        for item in router_checks(self.plan.device, self.plan.dtype):
            preset = Preset(item.name, 1, item.heads, item.tokens, 0)
            row = self._row(preset.name, item.tokens, item.heads, "router-checks", "quantized")
            row = replace(
                row,
                options=item.options,
                precision=_precision(item.options["matmul"], row.precision),
                error=_told(item.error),
                gate=item.gate,
            )
            self.checks.append(row)
            self._keep(row)
            if not row.passed:
                self.failed = True
                self.stopped |= _is_fatal(item.gate)
                self.say(f"  check {item.name} {item.options}: GATE: {item.gate}")
        self.say(f"{sum(row.passed for row in self.checks)} of {len(self.checks)} checks passed")

    def _shape(self, preset: Preset) -> None:
        """Measure every row of a shape, then its sentinel once more."""
        outcomes = self.shapes.setdefault(preset.name, [])
        self.say(f"{preset.name} {preset.size}")
        short = LOST if self.stopped else _too_small(preset.least_gib, self.plan.device)
        inputs: RouterInputs | None = None
        if short is None:
            try:
                inputs = make_router_inputs(preset, self.plan.device, self.plan.dtype)
            except (ValueError, torch.OutOfMemoryError) as error:
                short = _words(error)
        kept: tuple[str, Any, Sample] | None = None
        for row in self.plan.configs:
            blank = self._row(preset.name, preset.tokens, preset.heads, "router", row.name)
            options = {"batch": preset.batch, "head_dim": preset.head_dim, **row.options}
            blank = replace(
                blank, options=options, precision=_precision(row.matmul, blank.precision)
            )
            reasons = [short] if inputs is None else obstacles(row, inputs, self.platform)
            if self.stopped:
                reasons = [LOST]
            if inputs is None or reasons:
                outcome = Outcome(
                    replace(blank, gate=UNAVAILABLE + "; ".join(str(item) for item in reasons))
                )
            else:
                limit = preset.timeout_s or self.plan.timeout_s
                outcome, call = self._attention(row, inputs, blank, limit)
                if outcome.sample and (kept is None or row.name == SENTINEL):
                    kept = (row.name, call, outcome.sample)
            outcomes.append(outcome)
            self._note(outcome, ours=row.ours)
            self._release()
        if kept is not None and not self.stopped:
            name, call, before = kept
            try:
                after = measure_steadily(call, self.plan.device, self._pace(preset))
            except Exception as error:
                # It ran a moment ago: the device is at fault, and what it measured is still told.
                self.failed = True
                self.stopped |= _is_fatal(_words(error))
                self.say(f"  {name} again: {_words(error)}")
                return
            self.ratios[preset.name] = after.ms / before.ms
            self.say(f"  {name} again: {after.ms:.3f} ms ({after.ms / before.ms:.3f}x)")

    def _attention(
        self, row: AttentionRow, inputs: RouterInputs, blank: Row, limit_s: float
    ) -> tuple[Outcome, Any]:
        """Judge a row and time it if it passes."""
        pace, device = self._pace(inputs.preset), self.plan.device
        call = None
        try:
            with deadline(limit_s, row.name):
                _reset_dynamo()
                built = build_row(row, inputs, self.platform)
                with collect_records() as records:
                    out, selection = built.run()
                    synchronize(device)
                density = 1.0 if selection is None else selection.density()
                blank = replace(
                    blank,
                    implementation=served_by(records, built.implementation),
                    density=density,
                )
                quantised = row.quantized or row.backend == "sage"
                verdict = judge_rows(
                    inputs,
                    out,
                    selection,
                    most=QUANTIZED_ERROR if quantised else None,
                    dead=bool(row.backend in ("quantized", "block_sparse")),
                )
                error = inputs.error(out)
                del out, selection
                blank = replace(blank, gate=verdict.gate, error=_told(error))
                if not verdict.passed:
                    return Outcome(blank, error=error), None
                call = built.run
                sample = measure_steadily(call, device, pace)
                prep = built.prepare and measure_steadily(built.prepare, device, pace)
        except Exception as error:
            return Outcome(replace(blank, gate=_words(error))), None
        flops = inputs.preset.flops(density)
        timed = replace(
            blank,
            ms=sample.ms,
            iqr_ms=sample.iqr_ms,
            peak_gib=sample.peak_gib,
            tflops=None if flops is None else flops / sample.ms / 1e9,
        )
        return Outcome(timed, sample, prep, error), call

    def _geometry(self, geometry: Geometry) -> None:
        """Measure every row of a block."""
        outcomes = self.blocks.setdefault(geometry.name, [])
        plan, device = self.plan, self.plan.device
        self.say(f"block {geometry.name}: {geometry.tokens} x {geometry.width}")
        shape = Preset(geometry.name, 1, geometry.heads, geometry.tokens, geometry.head_dim)
        wide = geometry.tokens * (6 * geometry.width + 3 * geometry.hidden) * 4 / 2**30
        short = LOST if self.stopped else _too_small(shape.least_gib + wide, device)
        state: dict[str, Any] = {}
        for row in plan.block_configs:
            blank = self._row(
                geometry.name, geometry.tokens, geometry.heads, "router-block", row.name
            )
            blank = replace(blank, options={"attention": row.attention, "linear": row.linear})
            if short is None and not state and not self.stopped:
                try:
                    self._block_state(geometry, state)
                except torch.OutOfMemoryError as error:
                    short = _words(error)
            reasons = [short] if short is not None else []
            if self.stopped:
                reasons = [LOST]
            if not reasons:
                # The gates look at shapes and types: a few tokens' worth of memory says the same.
                reasons = obstacles(ROWS[row.attention], state["probe"], self.platform)
            if reasons:
                outcome = Outcome(replace(blank, gate=UNAVAILABLE + "; ".join(map(str, reasons))))
            else:
                outcome = self._block(row, geometry, state, blank)
            outcomes.append(outcome)
            self._note(outcome, ours=ROWS[row.attention].ours)
            self._release()

    def _block_state(self, geometry: Geometry, state: dict[str, Any]) -> None:
        """Make a block's weights, input, references, and tensors that gates may look at."""
        device, dtype = self.plan.device, self.plan.dtype
        weights = make_weights(geometry, device, dtype)
        generator = torch.Generator(device=device).manual_seed(1)
        x = torch.randn(1, geometry.tokens, geometry.width, generator=generator, device=device)
        x = x.to(dtype)
        empty = torch.empty(
            1, geometry.heads, geometry.tokens, geometry.head_dim, dtype=dtype, device=device
        )
        shape = Preset(geometry.name, 1, geometry.heads, geometry.tokens, geometry.head_dim)
        state.update(
            weights=weights,
            x=x,
            reference=reference_block(x, weights, geometry),
            probe=RouterInputs(shape, empty, empty, empty),
        )

    def _block(
        self, row: BlockRow, geometry: Geometry, state: dict[str, Any], blank: Row
    ) -> Outcome:
        """Judge a block row and time it if it passes."""
        attention = ROWS[row.attention]
        x: Tensor = state["x"]
        try:
            with deadline(self.plan.timeout_s, row.name):
                _reset_dynamo()
                attend = block_attention(attention, self.platform)
                linear = state["weights"].linear(row.linear)

                def step(item: Tensor) -> Tensor:
                    return block_forward(item, linear, state["weights"], geometry, attend)

                with collect_records() as records:
                    out = step(x)
                    synchronize(self.plan.device)
                first, last = state["reference"]
                error, token = block_errors(out, first)
                chained, _ = block_errors(repeat(step, out, BLOCKS - 1), last)
                blank = replace(
                    blank,
                    implementation=served_by(records, None),
                    error={"relative_l2": error, "against": "the block in float32"},
                    gate=_judge_block(attention, row, out, error),
                )
                extra = {"max_token": token, f"x{BLOCKS}": chained}
                if not blank.passed:
                    return Outcome(blank, error=error, extra=extra)
                sample = measure_steadily(lambda: step(x), self.plan.device, self.plan.pace)
        except Exception as error:
            return Outcome(replace(blank, gate=_words(error)))
        timed = replace(blank, ms=sample.ms, iqr_ms=sample.iqr_ms, peak_gib=sample.peak_gib)
        return Outcome(timed, sample, None, error, extra)

    # Parts

    def _row(self, problem: str, tokens: int, heads: int, level: str, method: str) -> Row:
        """Return a record with everything but the measurement."""
        plan = self.plan
        return Row(
            run=plan.run,
            date=rows_module.today(),
            commit=plan.commit,
            gpu=rows_module.device_name(plan.device),
            torch=torch.__version__,
            triton=rows_module.triton_version(),
            problem=problem,
            tokens=tokens,
            heads=heads,
            level=level,
            method=method,
            precision=next(name for name, dtype in DTYPES.items() if dtype == plan.dtype),
        )

    def _pace(self, preset: Preset) -> Pace:
        """Return how long to time on a shape; long ones ask for fewer calls."""
        if self.plan.iters_asked or preset.iters is None:
            return self.plan.pace
        return replace(self.plan.pace, iters=preset.iters)

    def _note(self, outcome: Outcome, *, ours: bool) -> None:
        """Say how a row went, and remember what fails the run."""
        row = outcome.row
        for line in _lines(outcome):
            self._keep(line)
        if not outcome.available:
            self.say(f"  {row.method}: {row.gate}")
            return
        if not row.passed:
            self.failed |= ours
            self.stopped |= _is_fatal(row.gate)
            self.say(f"  {row.method}: GATE: {row.gate}")
            return
        assert outcome.sample is not None and outcome.error is not None
        self.say(f"  {row.method}: {outcome.sample.ms:.3f} ms, error {outcome.error:.4f}")

    def _keep(self, row: Row) -> None:
        """Write a row to the file of lines."""
        if self.lines is not None:
            rows_module.append_row(self.lines, row)

    def _release(self) -> None:
        """Give back the device memory that a row held."""
        if self.plan.device.type == "cuda" and not self.stopped:
            gc.collect()
            torch.cuda.empty_cache()

    # Results

    def advice(self) -> Advice | None:
        """Return the recommended settings, or None without the rows that they need."""
        shapes = {name: self.figures(outcomes) for name, outcomes in self.shapes.items()}
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.plan.dtype)
        return advise(shapes, self.block_figures(), dtype)

    def document(self) -> dict[str, Any]:
        """Return the whole run as plain values."""

        def told(item: Outcome) -> dict[str, Any]:
            if item.sample is None:
                return {"error": item.row.gate, "err": item.error}
            return {
                "ms": item.sample.ms,
                "ms_sigma": self.sigma(item),
                "err": item.error,
                "prep_ms": item.prep and item.prep.ms,
                **item.extra,
            }

        advice = self.advice()
        return {
            "run": self.plan.run,
            "commit": self.plan.commit,
            "device": rows_module.device_name(self.plan.device),
            "drift": self.drift,
            "checks": [
                {"name": r.problem, "options": r.options, "err": r.error, "gate": r.gate}
                for r in self.checks
            ],
            "shapes": {
                name: {item.row.method: told(item) for item in outcomes}
                for name, outcomes in self.shapes.items()
            },
            "blocks": {
                name: {item.row.method: told(item) for item in outcomes}
                for name, outcomes in self.blocks.items()
            },
            "settings_advice": None if advice is None else asdict(advice),
        }


def _told(error: float | None) -> dict[str, Any] | None:
    """Return a record's error field."""
    return None if error is None else {"relative_l2": error, "against": REFERENCE}


def _precision(matmul: str, otherwise: str) -> str:
    return otherwise if matmul == "none" else matmul


def _judge_block(attention: AttentionRow, row: BlockRow, out: Tensor, error: float) -> str:
    """Return the gate of a block row."""
    if not bool(out.isfinite().all()):
        return "not finite"
    if attention.kind == SPARSE:
        return "pass"
    exact = row.linear == "plain" and not attention.quantized and attention.backend != "sage"
    most = PLAIN_BLOCK if exact else QUANTIZED_BLOCK
    return "pass" if error < most else f"relative L2 {error:.3g}, over {most}"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _is_fatal(text: str) -> bool:
    """Say whether the process can launch nothing more after an error."""
    return any(sign in text for sign in FATAL)


def _lines(outcome: Outcome) -> Iterator[Row]:
    """Yield a row in the project's format, and its quantisation alone as one of its own level."""
    yield outcome.row
    if outcome.prep is not None:
        yield replace(
            outcome.row,
            level="router-prepare",
            ms=outcome.prep.ms,
            iqr_ms=outcome.prep.iqr_ms,
            peak_gib=outcome.prep.peak_gib,
            tflops=None,
            density=None,
            error=None,
        )


def _reset_dynamo() -> None:
    """Drop compiled graphs, so that no row runs on those of another."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _too_small(least_gib: float, device: torch.device) -> str | None:
    """Return why a device cannot hold a shape, or None."""
    if device.type != "cuda":
        return None
    have = torch.cuda.get_device_properties(device).total_memory / 2**30
    if have >= least_gib:
        return None
    return f"needs {least_gib:.0f} GiB of device memory, this device has {have:.0f}"


# Tables


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


# Command line


def parser(program: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    cuda = torch.cuda.is_available()
    parse = argparse.ArgumentParser(
        prog=program,
        description="Measure every attention that the router can use, on the shapes of models.",
    )
    add = parse.add_argument
    add(
        "--shapes",
        default="sdxl,flux2" if cuda else "tiny",
        help="presets, or " + ", ".join(ALIASES),
    )
    add("--configs", default="all", help="attention rows, comma-separated")
    add("--block-configs", default="all", help="block rows, comma-separated")
    add("--block-geometries", default="flux1" if cuda else "tiny", help=", ".join(GEOMETRIES))
    add("--sections", default="all", help=", ".join(SECTIONS))
    add("--iters", type=int, help="least timed calls a row (default 12, or the preset's)")
    add("--warmup", type=int, default=4, help="least untimed calls a row")
    add("--iters-s", type=float, default=0.5 if cuda else 0.2, help="least seconds of timed calls")
    add(
        "--warmup-s",
        type=float,
        default=0.2 if cuda else 0.05,
        help="least seconds of untimed calls",
    )
    add("--config-timeout", type=float, default=300.0, help="seconds a row may take")
    add("--skip-checks", action="store_true", help="no correctness list before the rows")
    add("--skip-bench", action="store_true", help="the correctness list only")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--device", default="cuda" if cuda else "cpu")
    add("--save", default="auto", help="tables and plot: auto, none, or a path without ending")
    add("--json", default="auto", help="rows (.jsonl) and document (.json): the same")
    add("--outdir", type=Path, default=Path("out/router"), help="where auto writes")
    add("--run", default="", help="id of the run")
    add("--commit", default="", help="commit measured, where git cannot tell")
    add("--list", action="store_true", help="list presets and rows, measure nothing")
    return parse


def plan_from(arguments: argparse.Namespace) -> Plan:
    """Return the plan of parsed arguments.

    Raises:
        ValueError: an unknown id, with the valid ones in the message, or a number out of range.
    """
    shapes = choose_ids(arguments.shapes, PRESETS, "--shapes", ALIASES)
    configs = choose_ids(arguments.configs, ROWS, "--configs", {})
    inside = choose_ids(arguments.block_configs, BLOCK_ROWS, "--block-configs", {})
    geometries = choose_ids(arguments.block_geometries, GEOMETRIES, "--block-geometries", {})
    sections = choose_ids(arguments.sections, dict.fromkeys(SECTIONS), "--sections", {})
    for name in ("iters", "warmup"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected at least 1, got {value}")
    if arguments.config_timeout <= 0:
        raise ValueError(f"--config-timeout: expected seconds, got {arguments.config_timeout}")
    device = torch.device(arguments.device)
    return Plan(
        shapes=tuple(PRESETS[name] for name in shapes),
        configs=tuple(ROWS[name] for name in configs),
        geometries=tuple(GEOMETRIES[name] for name in geometries),
        block_configs=tuple(BLOCK_ROWS[name] for name in inside),
        sections=() if arguments.skip_bench else tuple(sections),
        checks=not arguments.skip_checks,
        pace=Pace(
            arguments.iters or Pace.iters, arguments.warmup, arguments.iters_s, arguments.warmup_s
        ),
        iters_asked=arguments.iters is not None,
        timeout_s=arguments.config_timeout,
        device=device,
        dtype=_dtype(arguments.dtype, device),
        run=arguments.run or rows_module.fresh_run_id(),
        commit=arguments.commit or rows_module.current_commit(),
    )


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; "auto" is bf16 where the device multiplies it."""
    if name != "auto":
        return DTYPES[name]
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def main(argv: Sequence[str] | None = None, program: str = "solspark bench router") -> int:
    """Run the router's benchmark.

    Args:
        argv: arguments; None takes the process's own.
        program: name in help texts.

    Returns:
        0; 1 when a check or a gate of ours failed, the device was lost, or an id is unknown.
    """
    arguments = parser(program).parse_args(sys.argv[1:] if argv is None else list(argv))
    if arguments.list:
        for preset in PRESETS.values():
            print(f"{preset.name:12} {preset.size:20} {preset.note}")
        for what, names in (("rows", ROWS), ("block rows", BLOCK_ROWS), ("blocks", GEOMETRIES)):
            print(f"{what}: {', '.join(names)}")
        return 0
    try:
        plan = plan_from(arguments)
    except (ValueError, RuntimeError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    stem = arguments.outdir / f"router-{plan.run}"
    record = _place(arguments.json, stem)
    lines = record and _named(record, ".jsonl")
    session = RouterSession(plan, lines)
    started = time.perf_counter()
    session.say(f"run {plan.run}, commit {plan.commit}, {plan.device}, {plan.dtype}")
    interrupted = False
    try:
        session.run()
    except KeyboardInterrupt:
        interrupted = True
        session.say("interrupted: what was measured follows")
    text = _show(session)
    written = [lines] if lines is not None else []
    written += write(session, text, record, _place(arguments.save, stem))
    session.say(
        f"{time.perf_counter() - started:.0f} s; {', '.join(map(str, written)) or 'no file'}"
    )
    if interrupted:
        return 130
    return 1 if session.failed or session.stopped else 0


def _show(session: RouterSession) -> list[str]:
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


def _place(choice: str, stem: Path) -> Path | None:
    """Return where "auto", "none" or a path says to write."""
    if choice == "none":
        return None
    return stem if choice == "auto" else Path(choice)


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
        document = _named(record, ".json")
        document.parent.mkdir(parents=True, exist_ok=True)
        document.write_text(json.dumps(session.document(), indent=1, default=str) + "\n")
        written.append(document)
    if save is not None:
        table = _named(save, ".txt")
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join(text).strip() + "\n")
        written.append(table)
        try:
            from solspark.bench.router_plots import plot_router

            shapes = {name: session.figures(items) for name, items in session.shapes.items()}
            title = f"{rows_module.device_name(session.plan.device)}, {session.plan.commit}"
            written += plot_router(shapes, title, _named(save, ".png"))
        except MissingDependencyError as error:
            session.say(f"no plot: {error}")
    return written


def _named(base: Path, ending: str) -> Path:
    """Return a path with an ending in place of one that it may have already."""
    known = base.suffix in (".json", ".jsonl", ".txt", ".png")
    return (base.with_suffix("") if known else base).with_name(
        (base.stem if known else base.name) + ending
    )
