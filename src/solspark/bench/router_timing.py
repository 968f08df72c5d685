"""Timing that says how sure it is: clocks warmed up, a sigma of the median, the drift of a run."""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from solspark.bench.timing import synchronize

MOST = 500
SIGMA_OF_MEDIAN = 1.2533
QUARTILES_OF_NORMAL = 1.349
LEAST_DRIFT, MOST_DRIFT = 0.005, 0.10


@dataclass(frozen=True)
class Pace:
    """Say how long to measure.

    Args:
        iters: least number of timed calls.
        warmup: least number of untimed ones.
        iters_s: seconds that the timed calls take at least, unless there are `MOST` of them.
        warmup_s: the same of the untimed ones: a GPU raises its clocks only under load.
    """

    iters: int = 12
    warmup: int = 4
    iters_s: float = 0.5
    warmup_s: float = 0.2


@dataclass(frozen=True)
class Sample:
    """Hold the times of one row.

    Args:
        ms: median.
        iqr_ms: distance between the quartiles.
        count: number of timed calls.
        peak_gib: peak allocation above what was there before; None off CUDA.
    """

    ms: float
    iqr_ms: float
    count: int
    peak_gib: float | None = None

    @property
    def sigma(self) -> float:
        """Standard error of the median relative to it, as of a normal with these quartiles."""
        spread = self.iqr_ms / QUARTILES_OF_NORMAL
        return SIGMA_OF_MEDIAN * spread / math.sqrt(self.count) / self.ms


def sample_of(times: Sequence[float], peak_gib: float | None = None) -> Sample:
    """Return the sample of milliseconds."""
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [0.0, 0.0, 0.0]
    # A clock that cannot tell a call from nothing must not divide by zero later.
    median = max(statistics.median(times), 1e-6)
    return Sample(median, quartiles[2] - quartiles[0], len(times), peak_gib)


def measure_steadily(call: Callable[[], Any], device: torch.device, pace: Pace) -> Sample:
    """Time a call that has run once already.

    On CUDA an event stands between any two calls and the host waits only at the end, so that the
    clocks stay up.

    Args:
        call: does the work.
        device: where.
        pace: how long.
    """
    peak = before = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    one = max(time.perf_counter() - begin, 1e-6)
    if before is not None:
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    for _ in range(repeats(one, pace.warmup, pace.warmup_s) - 1):
        call()
    synchronize(device)
    count = repeats(one, pace.iters, pace.iters_s)
    times = _by_events(call, count) if device.type == "cuda" else _by_clock(call, count)
    return sample_of(times, peak)


def repeats(one_s: float, least: int, least_s: float) -> int:
    """Return how many calls of `one_s` seconds fill `least_s`, within [least, MOST]."""
    return max(1, min(MOST, max(least, math.ceil(least_s / one_s))))


def _by_events(call: Callable[[], Any], count: int) -> list[float]:
    """Return milliseconds between events around each call."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [first.elapsed_time(last) for first, last in pairwise(events)]


def _by_clock(call: Callable[[], Any], count: int) -> list[float]:
    """Return milliseconds by the wall clock."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def drift_of(ratios: Sequence[float]) -> float:
    """Return the root mean square of ln(later / earlier) of the rows timed twice, within 0.5-10 %.

    Args:
        ratios: later over earlier median of the same row, one a shape; empty gives the least.
    """
    if not ratios:
        return LEAST_DRIFT
    mean = statistics.fmean(math.log(ratio) ** 2 for ratio in ratios)
    return min(MOST_DRIFT, max(LEAST_DRIFT, math.sqrt(mean)))


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds.

    It is an alarm of the main thread: it waits for a native call to return, and elsewhere (another
    thread, a system without alarms) there is none.
    """
    alarm = getattr(signal, "SIGALRM", None)
    if alarm is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    previous = signal.signal(alarm, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(alarm, previous)
