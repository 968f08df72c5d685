"""Follow a diffusers pipeline or a denoiser: publish its role, step and token layout to the router.

Hooks sit on the denoisers only, so a text encoder or a VAE is never mistaken for one. Steps are
counted through the scheduler of the pipeline: both passes of classifier-free guidance come before
`scheduler.step`, so they share a step.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from solspark.router.install import Router
from solspark.router.layout import LayoutReader, TokenLayout

DENOISER_SLOTS = (
    "transformer",
    "unet",
    "transformer_2",
    "transformer_ref",
    "unconditional_transformer",
)


def follow(router: Router, target: Any, *, steps: int | None = None) -> Callable[[], None]:
    """Hook a pipeline, or one denoiser module, so that the router knows when and what it computes.

    Args:
        router: the router to inform.
        target: a diffusers pipeline (its denoisers and its scheduler are followed), or a module.
            Without a scheduler every forward counts as a step.
        steps: steps of a generation; None reads the scheduler's timesteps, and without one means no
            schedule.

    Returns:
        The undo: it removes the hooks, restores the scheduler and ends the generation.

    Raises:
        TypeError: when the target holds no denoiser.
    """
    if isinstance(target, torch.nn.Module):
        modules, scheduler = [target], None
    else:
        slots = (getattr(target, slot, None) for slot in DENOISER_SLOTS)
        modules = list({id(m): m for m in slots if isinstance(m, torch.nn.Module)}.values())
        scheduler = getattr(target, "scheduler", None)
    if not modules:
        raise TypeError(
            f"target: expected a module or a pipeline with one of {DENOISER_SLOTS}, "
            f"got {type(target).__name__}"
        )
    return _Follower(router, target, modules, scheduler, steps).remove


class _Follower:
    """The hooks of one `follow`."""

    def __init__(
        self,
        router: Router,
        target: Any,
        modules: list[torch.nn.Module],
        scheduler: Any,
        steps: int | None,
    ):
        self.router = router
        self.target = target
        self.modules = modules
        self.steps = steps
        self.reader = LayoutReader()
        self.derived: TokenLayout | None = None
        self.roles: list[str | None] = []
        self.fresh = True
        self.stepped = True
        self.scheduler = scheduler if hasattr(scheduler, "step") else None
        self.handles = []
        for module in modules:
            # The layout must be known before any other hook computes, the role until after the
            # last.
            self.handles.append(
                module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
            )
            self.handles.append(module.register_forward_hook(self._after, always_call=True))
            router.watch_model(module)
        self.restores = [
            _watch_method(self.scheduler, name, note)
            for name, note in (("step", self._note_step), ("set_timesteps", self._note_pass))
            if self.scheduler is not None and hasattr(self.scheduler, name)
        ]

    def remove(self) -> None:
        """Take all hooks off and end the generation. A second call does nothing."""
        if not self.handles:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for restore in self.restores:
            restore()
        for module in self.modules:
            self.router.forget_model(module)
        if self.router.context.active:
            self.router.context.end()

    def _note_step(self) -> None:
        self.stepped = True

    def _note_pass(self) -> None:
        self.fresh = True

    def _before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        context = self.router.context
        if self.fresh:
            self.fresh = False
            self.stepped = True
            pipeline = None if self.target is module else self.target
            if context.active:
                context.new_pass(self._pass_steps())
            else:
                published = context.layout
                context.begin(pipeline, self._pass_steps(), denoiser=_unwrapped(module))
                # What a host published before the first forward describes this generation.
                context.set_layout(published)
        if self.stepped or self.scheduler is None:
            self.stepped = False
            context.tick()
        self.roles.append(context.role)
        context.set_role("transformer")
        if self.router.stage is not None:
            self._publish(module, args, kwargs)

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.roles:
            self.router.context.set_role(self.roles.pop())

    def _publish(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Publish the layout that the arguments imply; leave one that a host published alone."""
        context = self.router.context
        inner = _unwrapped(module)
        layout = self.reader.read(type(inner).__name__, _named(inner, args, kwargs))
        if layout is not None:
            context.set_layout(layout)
        elif context.layout is not None and context.layout is self.derived:
            context.set_layout(None)
        self.derived = layout

    def _pass_steps(self) -> int:
        """Return how many steps the pass about to start has, 0 when nobody knows."""
        if self.steps is not None:
            return self.steps
        timesteps = getattr(self.scheduler, "timesteps", None)
        if timesteps is None:
            return 0
        # An image-to-image pass enters the schedule late.
        return max(0, len(timesteps) - (getattr(self.scheduler, "begin_index", None) or 0))


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside torch.compile's wrapper."""
    return getattr(module, "_orig_mod", module)


def _named(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return all arguments of a forward by name."""
    if not args:
        return kwargs
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _watch_method(thing: Any, name: str, note: Callable[[], None]) -> Callable[[], None]:
    """Call `note` after a method of one object, and return the undo.

    The replacement is a bound method: a pipeline that deep-copies its scheduler gets a copy bound
    to itself, where a closure would go on stepping the original.
    """
    own = thing.__dict__.get(name)

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = own.__get__(self) if isinstance(own, types.FunctionType) else own
        if method is None:
            method = getattr(type(self), name).__get__(self)
        result = method(*args, **kwargs)
        note()
        return result

    setattr(thing, name, types.MethodType(watched, thing))

    def restore() -> None:
        if own is None:
            thing.__dict__.pop(name, None)
        else:
            setattr(thing, name, own)

    return restore
