"""One measurement as one JSON line, with everything that is needed to trust and to repeat it."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

UNAVAILABLE = "unavailable: "
"""How the gate of a row begins whose method cannot be measured here; the reason follows."""


@dataclass(frozen=True)
class Row:
    """Hold one measurement; the fields are the law of the design document.

    Args:
        run: one id for all rows timed together, so that ratios are taken inside a run.
        date: ISO date of the measurement.
        commit: the commit that was measured.
        gpu: device name, or "cpu".
        torch: version of torch.
        triton: version of triton, or None.
        problem: a key of `bench.problems.PROBLEMS`.
        tokens: T.
        heads: H.
        level: attend, call, layer, plan, reweight, dit, step, part, checks, quality.
        method: what was timed; peers are methods like any other.
        options: what the method was called with, under the API's names.
        implementation: what served the call, or the package and version of a peer.
        precision: of the operands: bf16, fp16, int8, ...
        density: share of (query block, key block) pairs read exactly; None where it has no meaning.
        ms: median.
        iqr_ms: distance between the quartiles.
        tflops: executed operations over the median.
        peak_gib: peak device memory above the inputs.
        error: {"relative_l2": x, "against": what}, or None.
        gate: "pass", or why not: what failed, or "unavailable: " and why it was not tried.
    """

    run: str
    date: str
    commit: str
    gpu: str
    torch: str
    triton: str | None
    problem: str
    tokens: int
    heads: int
    level: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    implementation: str | None = None
    precision: str = "bf16"
    density: float | None = None
    ms: float | None = None
    iqr_ms: float | None = None
    tflops: float | None = None
    peak_gib: float | None = None
    error: dict[str, Any] | None = None
    gate: str = "not checked"

    @property
    def passed(self) -> bool:
        return self.gate == "pass"

    @property
    def available(self) -> bool:
        """Whether the method could be tried at all."""
        return not self.gate.startswith(UNAVAILABLE)

    def key(self) -> str:
        """Return what makes a measurement the same one: rows with equal keys need not be taken
        twice.
        """
        return row_key(self.run, self.commit, self.problem, self.level, self.method, self.options)


def row_key(run: str, commit: str, problem: str, level: str, method: str, options: dict) -> str:
    """Return the identity of a measurement as one string."""
    return json.dumps([run, commit, problem, level, method, options], sort_keys=True, default=str)


def to_line(row: Row) -> str:
    """Return the row as one line of JSON, figures rounded to what a timer can tell."""

    def rounded(value: Any) -> Any:
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return json.dumps({name: rounded(value) for name, value in asdict(row).items()}, default=str)


def from_line(line: str) -> Row:
    """Return the row of one JSON line.

    Raises:
        ValueError: the line holds other fields than a row has.
    """
    record = json.loads(line)
    known = {item.name for item in fields(Row)}
    if set(record) - known:
        raise ValueError(f"row: unknown fields {sorted(set(record) - known)}")
    return Row(**record)


def read_rows(paths: Iterable[Path]) -> Iterator[Row]:
    """Yield the rows of JSON-lines files in order; blank lines are skipped."""
    for path in paths:
        for line in path.read_text().splitlines():
            if line.strip():
                yield from_line(line)


def append_row(path: Path, row: Row) -> None:
    """Append one row and flush it, so that an interrupted run keeps what it has measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as sink:
        sink.write(to_line(row) + "\n")
        sink.flush()


def current_commit() -> str:
    """Return the commit of the checkout that this package lies in, with "+changes" when src differs
    from it.

    Without git, or outside a checkout, the answer is "unknown": give `--commit` then.
    """
    root = Path(__file__).resolve().parents[3]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def device_name(device: torch.device) -> str:
    """Return the marketing name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def triton_version() -> str | None:
    """Return the installed triton's version, or None."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def today() -> str:
    """Return the ISO date."""
    return datetime.date.today().isoformat()


def fresh_run_id() -> str:
    """Return a run id that sorts by time."""
    return datetime.datetime.now().strftime("%Y%m%dT%H%M%S")
