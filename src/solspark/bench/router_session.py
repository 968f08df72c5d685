"""What a run of the router's benchmark measures: checks, each shape's rows, blocks end to end.

Checks first, then each shape's rows, each judged before it is timed, then blocks. A row that cannot
be had here is listed with the reason.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solspark.bench import rows as rows_module
from solspark.bench.router_advice import Advice, Figure, Figures, advise
from solspark.bench.router_blocks import (
    BLOCK_ROWS,
    BLOCKS,
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
    obstacles,
)
from solspark.bench.router_timing import Pace, Sample, deadline, drift_of, measure_steadily
from solspark.bench.rows import Row
from solspark.bench.session import FATAL, served_by
from solspark.bench.timing import synchronize
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
