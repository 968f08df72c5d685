"""Times a call on a device: median and quartiles of events, after a warm-up, with the peak of
memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Hold the result of `measure`.

    Args:
        ms: median.
        iqr_ms: distance between the quartiles; 0 with fewer than two samples.
        peak_gib: peak allocation above what was allocated before the call; None off CUDA.
        samples: number of timed calls.
        first_s: wall-clock seconds of the first call, compilation included.
    """

    ms: float
    iqr_ms: float
    peak_gib: float | None
    samples: int
    first_s: float


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is one that runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    call: Callable[[], Any],
    device: torch.device,
    *,
    target_s: float = 1.0,
    least: int = 3,
    most: int = 25,
    warmup: int = 2,
) -> Timing:
    """Time a call by CUDA events, or by the wall clock on a CPU.

    Args:
        call: does the work and may return anything; the result is dropped before the next call.
        device: where the work runs.
        target_s: about how long all timed calls together may take; fixes their number within
            [least, most].
        least: fewest timed calls.
        most: most timed calls.
        warmup: untimed calls before (at least one; a call of more than a second is not repeated).

    Returns:
        A `Timing`. Peak memory is taken over the warm-up calls after the first one, which may
        compile.
    """
    start = time.perf_counter()
    call()
    synchronize(device)
    first_s = time.perf_counter() - start
    peak = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    runs = 0
    while runs < max(1, warmup - 1) and (runs == 0 or time.perf_counter() - start < 1.0):
        call()
        synchronize(device)
        runs += 1
    one = (time.perf_counter() - start) / runs
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    count = max(least, min(most, int(target_s / max(one, 1e-6))))
    times = _event_times(call, device, count) if device.type == "cuda" else _wall_times(call, count)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return Timing(statistics.median(times), quartiles[2] - quartiles[0], peak, count, first_s)


def _event_times(call: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    """Return milliseconds between events around each call."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    return times


def _wall_times(call: Callable[[], Any], count: int) -> list[float]:
    """Return milliseconds by the wall clock."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return times
