"""State of one H3 run: which evaluation this is, where its video lies, what the calls did."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..methods.spark import PackedConfig, PackedRecord
from ..types import BLOCK
from .h3_config import H3SparseAttentionConfig
from .h3_int8 import Int8State
from .h3_layout import (
    H3Layout,
    derive_layout,
    forward_arguments,
    structure_key,
    video_timestep,
)


class Stopwatch:
    """Time one call without waiting for the device: events on CUDA, the clock elsewhere."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record(torch.cuda.current_stream(device))
        else:
            self._start = time.perf_counter()
        self._device = device
        self._elapsed: float | None = None

    def stop(self) -> None:
        """Mark the end of the call."""
        if self._cuda:
            self._events[1].record(torch.cuda.current_stream(self._device))
        else:
            self._elapsed = time.perf_counter() - self._start

    def seconds(self) -> float:
        """Return the time between start and stop; waits for the device."""
        if self._elapsed is None:
            self._events[1].synchronize()
            self._elapsed = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._elapsed


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: where, what kind, how long, and what the sparse path says of it."""

    evaluation: int
    layer: int
    kind: str
    watch: Stopwatch
    record: PackedRecord | None = None


class H3Controller:
    """State of one run, shared by the hook and the processors of one transformer."""

    def __init__(self, config: H3SparseAttentionConfig):
        self.config = config
        self._packed: dict[float | None, PackedConfig] = {None: config.packed()}
        for ratio in config.sol_route_topk_schedule or ():
            self._packed[ratio] = config.packed(topk_ratio=ratio)
        self.reset()

    def reset(self) -> None:
        """Forget the run: index, counters, layout, plan caches and calibration."""
        self.evaluation = -1
        self.forwards = 0
        self.failed = False
        self.counters: Counter[str] = Counter()
        self.calls: list[Call] = []
        self.last_record: PackedRecord | None = None
        self.layout_facts: dict[str, Any] = {}
        self.mending: dict[str, bool] = {}
        self.forget_layout()

    def forget_layout(self) -> None:
        """Drop the layout, everything cached for it, and the calibration of INT8."""
        self.layout: H3Layout | None = None
        self.int8 = Int8State()
        self.cache: dict[Any, Any] = {}
        self._arguments: dict[str, Any] = {}
        self._structure: Any = None

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one transformer forward and have its layout ready.

        Raises:
            RuntimeError: the run has more evaluations than configured, a second run began without
                `reset()`, or the structural arguments are missing.
            ValueError: the layout is none that can be made sparse.
        """
        try:
            self._begin(forward_arguments(args, kwargs))
        except Exception:
            self.failed = True
            raise

    def _begin(self, arguments: dict[str, Any]) -> None:
        """Advance the index first: a forward that fails has used up its evaluation."""
        structure = structure_key(arguments)
        changed = structure != self._structure
        previous = self._arguments
        self.evaluation = self.forwards // self.config.evaluations_per_step
        self.forwards += 1
        self._check_run(previous, arguments, changed)
        if changed:
            # The references keep the identities in `structure` from being given away.
            self._structure, self.layout = None, None
            self._arguments = arguments
            self.layout = self._derive(arguments)
            self._structure = structure
        self._arguments = arguments

    def _check_run(self, previous: dict[str, Any], now: dict[str, Any], changed: bool) -> None:
        """Tell a second run without `reset()` from a schedule that is longer than configured."""
        total = self.config.total_evaluations
        over = self.evaluation >= total
        if not (over or changed):
            return
        before, after = video_timestep(previous), video_timestep(now)
        restarted = False
        if before is not None and after is not None:
            # A schedule rises strictly, but the forwards of one step share their timestep.
            again = after == before and self.config.evaluations_per_step == 1
            restarted = after < before or again
        if restarted:
            raise RuntimeError(
                f"second invocation without reset(): the timestep went from {before:.4g} to "
                f"{after:.4g} at evaluation {self.evaluation} of {total}; call reset() on the "
                "installed plugin between runs"
            )
        if over:
            raise RuntimeError(
                f"evaluation {self.evaluation + 1} of a run configured for {total}: the schedule "
                "is longer than num_denoise_steps (the pipeline's num_inference_steps - 1), or "
                "this is another run and reset() was not called before it"
            )

    def _derive(self, arguments: dict[str, Any]) -> H3Layout | None:
        """Derive the layout, unless the sequence is so short that it stays dense anyway."""
        positions = arguments.get("position_ids")
        if isinstance(positions, Tensor) and positions.shape[0] < self.config.sol_min_tokens:
            return None
        layout = derive_layout(arguments)
        self.layout_facts = {
            "grid": layout.grid.as_tuple(),
            "packed_tokens": layout.tokens,
            "target_video_tokens": layout.video_tokens,
            "sparse_video_tokens": layout.video_tokens // BLOCK * BLOCK,
            "condition_video_tokens": layout.condition_tokens,
            "rotation": layout.order is None,
        }
        if layout.mixed_timesteps:
            advice = (
                "the rows of the generated video are not all at the text's timestep (part of them "
                "is held?)"
            )
            if self.config.mixed_timesteps == "error":
                raise ValueError(
                    f"timestep_indices: {advice}; mixed_timesteps='dense' runs such requests "
                    "densely"
                )
            warnings.warn(f"{advice}: this request runs densely", RuntimeWarning, stacklevel=2)
        return layout

    @property
    def completed(self) -> int:
        """Evaluations begun, those beyond the schedule left out."""
        return min(self.evaluation + 1, self.config.total_evaluations)

    @property
    def topk_ratio(self) -> float | None:
        """Top-k ratio of the present evaluation."""
        return self.config.topk_ratio_at(max(self.evaluation, 0))

    def packed_config(self) -> PackedConfig:
        """Return the options of packed attention for the present evaluation."""
        schedule = self.config.sol_route_topk_schedule
        key = None if schedule is None else self.topk_ratio
        return self._packed[key]

    def note(
        self, layer: int, kind: str, watch: Stopwatch, record: PackedRecord | None = None
    ) -> None:
        """Count one finished call."""
        watch.stop()
        self.counters[kind] += 1
        self.calls.append(Call(self.evaluation, layer, kind, watch, record))
        if record is not None:
            self.last_record = record
            self.counters.update(record.counters)
