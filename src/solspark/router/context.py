"""What the router knows about the generation in progress: role, step, model and token layout.

One generation at a time. Hooks fill it in (hooks.py); a host that drives steps itself calls the
same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from solspark.router.layout import TokenLayout, layout_from_segments

ROLES = ("transformer", "te", "vae", None)


class RouteContext:
    """The generation in progress.

    Attributes:
        active: whether a generation runs.
        role: which part of the pipeline computes: "transformer", "te", "vae" or None.
        step: index of the denoiser step about to run, from 0.
        steps: steps of this pass, 0 when unknown.
        forwards: denoiser steps begun since `begin`.
        model_key: (pipeline class, denoiser class) names.
        layout: the token layout in force, or None.
    """

    def __init__(self) -> None:
        self.active = False
        self.role: str | None = None
        self.step = 0
        self.steps = 0
        self.forwards = 0
        self.model_key: tuple[str, str] = ("", "")
        self.layout: TokenLayout | None = None
        self._counted = False
        self._buffers: dict[torch.device, Tensor] = {}
        self._listeners: list[Callable[[], None]] = []
        self._finished: list[Callable[[], None]] = []

    def step_buffer(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the int64 scalar on `device` that always holds `step`.

        The same tensor every time, updated in place: a compiled reader keeps its graph from step to
            step.
        """
        place = torch.device(device)
        if place not in self._buffers:
            self._buffers[place] = torch.full((), self.step, dtype=torch.int64, device=place)
        return self._buffers[place]

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the step, the number of steps or activity changes."""
        self._listeners.append(listener)

    def ignore(self, listener: Callable[[], None]) -> None:
        """Stop calling a listener of `on_change`."""
        self._listeners.remove(listener)

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a generation ends."""
        self._finished.append(listener)

    def begin(self, pipeline: object = None, steps: int = 0, *, denoiser: object = None) -> None:
        """Start a generation of `steps` steps (0 = unknown, which means no schedule)."""
        if denoiser is None:
            denoiser = getattr(pipeline, "transformer", None) or getattr(pipeline, "unet", None)
        self.active = True
        self.forwards = 0
        self.model_key = (_class_name(pipeline), _class_name(denoiser))
        self.layout = None
        self.new_pass(steps)

    def new_pass(self, steps: int) -> None:
        """Start another pass of a generation (a refiner, an upscale): steps count from 0 again."""
        if steps < 0:
            raise ValueError(f"steps: expected at least 0, got {steps}")
        self.steps = steps
        self.set_step(0)

    def tick(self, step: int | None = None) -> None:
        """Advance to the step about to run.

        Args:
            step: its index, when the caller knows it (a step callback passes completed + 1); None
                counts the calls: the first forward of a pass is step 0, the next 1, and so on.
        """
        if step is None:
            step = self.step + 1 if self._counted else 0
        self.set_step(step)
        self._counted = True
        self.forwards += 1

    def set_step(self, step: int) -> None:
        """Set the index of the step about to run."""
        if step < 0:
            raise ValueError(f"step: expected at least 0, got {step}")
        self.step = step
        self._counted = False
        for buffer in self._buffers.values():
            buffer.fill_(step)
        for listener in self._listeners:
            listener()

    def set_role(self, role: str | None) -> None:
        """Say which part of the pipeline computes from now on."""
        if role not in ROLES:
            raise ValueError(f"role: expected one of {ROLES}, got {role!r}")
        self.role = role

    @contextmanager
    def as_role(self, role: str | None) -> Iterator[None]:
        """Take a role for a while; scopes nest and end also after an exception."""
        before = self.role
        self.set_role(role)
        try:
            yield
        finally:
            self.role = before

    @contextmanager
    def rehearsal(self, role: str | None, layout: TokenLayout | None) -> Iterator[None]:
        """Take a role inside a generation for a while, real or not; afterwards all is as before."""
        before = (self.active, self.role, self.layout)
        self.set_role(role)
        self.active, self.layout = True, layout
        try:
            yield
        finally:
            self.active, self.role, self.layout = before

    def set_layout(self, layout: TokenLayout | None) -> None:
        """Publish the token layout of the sequences to come, or withdraw it."""
        self.layout = layout

    def publish_segments(self, segments: Iterable[tuple[str, int]]) -> None:
        """Publish a layout as (kind, token count) pairs in packing order."""
        self.set_layout(layout_from_segments(segments))

    def end(self) -> None:
        """End the generation; everything goes dense until the next `begin`."""
        for listener in self._finished:
            listener()
        self.active = False
        self.role = None
        self.layout = None
        self.new_pass(0)


def _class_name(thing: object) -> str:
    return type(thing).__name__ if thing is not None else ""
