"""Takes rows one by one: builds a case, gates it, times it, writes the row and says how it went."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from solspark.bench import rows as rows_module
from solspark.bench.case import Case, Method, Unavailable
from solspark.bench.console import Progress, label, outcome
from solspark.bench.gate import Verdict
from solspark.bench.inputs import PRECISIONS, Inputs, make_inputs
from solspark.bench.problems import Problem
from solspark.bench.rows import Row
from solspark.bench.settings import Settings, expand, selected
from solspark.bench.timing import measure, synchronize
from solspark.ops._dispatch import collect_records

FATAL = ("CUDA error", "device-side assert", "an illegal memory access", "misaligned address")
"""After one of these the process can launch nothing more."""


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
            implementation=case.implementation or served_by(records, None),
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
            blank = replace(row, density=None, error=None)
            return [
                replace(row, **whole),
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

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        advance: Callable[[int, int], None] = lambda done, total: None,
    ):
        """Args: settings; say takes a line; advance, how many rows of a problem are done."""
        self.settings, self.say, self.advance = settings, say, advance
        self.rows: list[Row] = []
        self.failed = False
        self.stopped: str | None = None
        self.started = time.perf_counter()
        self.skipped = 0
        self.place = ""
        self.done: dict[str, Row] = {}
        if settings.out is not None and settings.out.exists():
            # What was not to be had is tried again: it may have been installed since.
            written = rows_module.read_rows([settings.out])
            self.done = {row.key(): row for row in written if row.available}

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
            self.advance(number - 1, len(wanted))
            if row.key() in self.done:
                self._keep(method, self.done[row.key()])
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
        self.advance(len(wanted), len(wanted))

    def _keep(self, method: Method, row: Row) -> None:
        """Remember a row; one of ours that does not pass fails the run, taken now or before."""
        self.rows.append(row)
        if not row.passed and row.available and is_ours(method):
            self.failed = True

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
            taken = [replace(row, gate=rows_module.UNAVAILABLE + " ".join(str(absent).split()))]
        except Exception as error:
            text = " ".join(str(error).split())
            taken = [replace(row, gate=f"{type(error).__name__}: {text[:300]}")]
            if any(sign in text for sign in FATAL):
                self.stopped = "the device context is lost"
        for item in taken:
            self._keep(method, item)
            if self.settings.out is not None:
                rows_module.append_row(self.settings.out, item)
            else:
                print(rows_module.to_line(item), flush=True)
            self.say(f"[{self.elapsed:5.0f} s, {self.place}] {label(item)}: {outcome(item)}")


def take_rows(settings: Settings, parts: Sequence[Settings] | None = None) -> Session | None:
    """Take everything that settings ask for, saying how it goes; parts: as `Session.run`.

    Returns:
        The session; None when it was interrupted, which is said with how to resume it.
    """
    try:
        with Progress() as progress:
            session = Session(settings, progress.say, progress.advance)
            session.say(f"run {settings.run}, commit {settings.commit}, {settings.device}")
            session.run(parts)
    except KeyboardInterrupt:
        print(f"interrupted; --run {settings.run} resumes", file=sys.stderr)
        return None
    return session
