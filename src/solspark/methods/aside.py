"""Run a computation beside what follows it, on a stream of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

OVERLAP = True
"""Whether a GPU uses the second stream; benchmarks compare."""


class Aside:
    """Enqueue `run` on a second stream of the device; `join` hands out its result.

    For work of few programs: where the last wave of its launch leaves SMs idle, what the caller
    enqueues next starts on them. The two must not depend on each other, and what `run` reads must
    stay alive until `join`. On the CPU and inside a compiled graph `run` simply runs. A CUDA graph
    that is being captured gets a fork and a join.
    """

    def __init__(self, run: Callable[[], Tensor], device: torch.device):
        self._side: torch.cuda.Stream | None = None
        self._device = device
        if device.type != "cuda" or not OVERLAP or torch.compiler.is_compiling():
            self._result = run()
            return
        self._side = _side_stream(device)
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            self._result = run()

    def join(self) -> Tensor:
        """Make the current stream wait, and return the result."""
        if self._side is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._side)
            # It was allocated there, and is freed when this stream has read it.
            self._result.record_stream(current)
            self._side = None
        return self._result


@functools.lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the second stream of a device."""
    return torch.cuda.Stream(device)
