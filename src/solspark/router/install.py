"""The router: install a plan in place of scaled_dot_product_attention, and undo it.

This is the one part of solspark that replaces a function of a module: routing every call of a
program is its purpose. One router at a time may be installed; it puts back the very object that it
found.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from solspark.router import telemetry as telemetry_module
from solspark.router.backend import BLOCK_MASK, Platform, Registry
from solspark.router.chain import RoutePlan, build_plan
from solspark.router.config import SPARSE_SETTINGS, RouterConfig, default_labels
from solspark.router.dispatch import Dispatcher
from solspark.router.explain import RouteRecord, router_report
from solspark.router.layout import TokenLayout
from solspark.router.sdp_kernels import SdpKernels
from solspark.router.stage import build_stage
from solspark.router.warmup import warm_up

log = logging.getLogger("solspark.router")

_TARGET = torch.nn.functional
_ATTRIBUTE = "scaled_dot_product_attention"


class Router(Dispatcher):
    """Send each attention call to the best declared backend that can serve it.

    Args:
        config: the settings.
        registry: the declared backends; None is `builtin_registry()`.
        platform: where calls run; None detects it.

    Attributes:
        context: the generation in progress (step, role, layout).
        plan: the plan in force.
        stage: the sparse stage in force, or None.
        observer: called before each call with (name, query, key, attn_mask); the name ends in
            "+sparse" for a selection.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        registry: Registry | None = None,
        platform: Platform | None = None,
    ):
        super().__init__(config, registry, platform, _found())
        self._original: Callable[..., Tensor] | None = None
        self._wrapper: Callable[..., Tensor] | None = None
        self._kernels = SdpKernels()
        self._models: list[torch.nn.Module] = []
        self._installed = False

    # Installing and undoing

    def install(self) -> Callable[[], None]:
        """Build the plan and put it in place of torch.nn.functional.scaled_dot_product_attention.

        A plan without any backend leaves the original itself in place, not a wrapper.

        Returns:
            The undo: a function of no arguments, the same as `uninstall`.

        Raises:
            RuntimeError: when this or another router is installed.
        """
        if self._installed:
            raise RuntimeError("router: this router is installed already")
        found = _found()
        owner = getattr(found, "__solspark_router__", None)
        if owner is not None:
            raise RuntimeError("router: another router is installed; uninstall it first")
        self._original = found
        self._installed = True
        try:
            self._build()
        except BaseException:
            # A host that catches the error must find torch as it was.
            self._teardown()
            raise
        return self.uninstall

    def uninstall(self) -> None:
        """Put the original back. Does nothing when the router is not installed.

        When something else has replaced the router's function meanwhile, that replacement stays,
        and the router underneath passes every call straight to the original.
        """
        if self._installed:
            self._teardown()

    def _teardown(self) -> None:
        """Restore the function and the kernel flags, and drop the plan."""
        original = self._original
        assert original is not None
        self._withdraw()
        if self.stage is not None:
            self.stage.close()
            self.stage = None
        self._kernels.restore()
        self.plan = RoutePlan((), None, original, self.platform, ())
        self._wrapper = None
        self._original = None
        self._installed = False

    def _withdraw(self) -> None:
        """Take the wrapper out of torch, unless somebody put another function over it."""
        if self._wrapper is None or self._original is None:
            return
        if _found() is self._wrapper:
            setattr(_TARGET, _ATTRIBUTE, self._original)
        elif _found() is not self._original:
            log.warning(
                "scaled_dot_product_attention was replaced after the router was installed; "
                "that replacement stays, and the router under it only passes calls on"
            )

    def _build(self) -> None:
        """Build plan and stage from the configuration and put them in force."""
        original = self._original
        assert original is not None
        self._kernels.restore()
        self._kernels.apply(self.config.sdp_kernels)
        labels = self.config.backends
        if labels is None:
            labels = default_labels(self.platform)
        settings = {
            name: self.config.setting(name)
            for backend in self.registry.ordered()
            if backend.label in labels
            for name in backend.options
        }
        self.plan = build_plan(self.registry, self.platform, labels, original, settings)
        if self.stage is not None:
            self.stage.close()
        capable_labels = [b.label for b in self.registry.with_cap(BLOCK_MASK)]
        self.stage = build_stage(
            self.config.sparse, self.context, self.plan.entries, capable_labels
        )
        wanted = self.config.telemetry
        self._counting = telemetry_module.wanted() if wanted is None else wanted
        self.telemetry.clear()
        self._told.clear()
        self._last = None
        if self.plan.empty:
            self._withdraw()
            self._wrapper = None
        else:
            if self._wrapper is None:
                self._wrapper = _wrap(self, original)
            setattr(_TARGET, _ATTRIBUTE, self._wrapper)
        log.info("attention chain: %s", self.plan.chain)

    @property
    def installed(self) -> bool:
        """Whether this router is in place of torch's function (or empty, with it left there)."""
        return self._installed

    # Rebuilding

    @property
    def watched(self) -> tuple[str, ...]:
        """Names of the settings whose change rebuilds the plan: kernel flags, the chosen backends,
        every option that a backend captures, and the sparse stage's."""
        return (
            "sdp_kernels",
            "backends",
            *self.registry.options(),
            *SPARSE_SETTINGS,
            "telemetry",
        )

    def configure(self, config: RouterConfig, *, compiled: bool = False) -> bool:
        """Take another configuration, rebuilding the plan when a watched setting differs. Call it
        between jobs.

        Args:
            config: the configuration.
            compiled: a compiled model is resident although no hooked model says so.

        Returns:
            Whether the plan was rebuilt.
        """
        changed = [name for name in self.watched if _differs(self.config, config, name)]
        self.config = config
        if not changed or not self._installed:
            return False
        log.info("rebuilding the attention chain: %s changed", ", ".join(changed))
        self.reapply(compiled=compiled)
        return True

    def reapply(self, *, compiled: bool = False) -> None:
        """Rebuild the plan as configured; reset dynamo when a compiled model is resident."""
        if not self._installed:
            raise RuntimeError("router: not installed")
        self._build()
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and (compiled or any(_is_compiled(m) for m in self._models)):
            # Graphs captured with the previous plan would go on using it.
            dynamo.reset()

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Put the original back for a while (a captioner, a detailer, a language model)."""
        wrapper, original, plan = self._wrapper, self._original, self.plan
        if wrapper is None or original is None:
            yield
            return
        # Where somebody put a function over the wrapper, calls still arrive here: an empty plan
        # passes them on.
        paused = RoutePlan((), None, original, self.platform, ())
        self.plan = paused
        replaced = _found() is wrapper
        if replaced:
            setattr(_TARGET, _ATTRIBUTE, original)
        try:
            yield
        finally:
            if self.plan is paused:
                self.plan = plan
            if replaced and self._wrapper is not None and _found() is original:
                setattr(_TARGET, _ATTRIBUTE, self._wrapper)

    def warmup(
        self,
        shapes: Iterable[Sequence[int]],
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        key_heads: int | None = None,
        masked: bool = False,
        layout: TokenLayout | None = None,
    ) -> tuple[RouteRecord, ...]:
        """Run self-attention of each shape dense and at every budget, so that later calls of these
        shapes find everything compiled.

        Settings, context, observer, telemetry and `last_call` are as before afterwards.

        Args:
            shapes: (batch, heads, tokens, head_dim) of each query.
            dtype: of query, key and value.
            device: where they live; None is the router's own device.
            key_heads: heads of key and value; None as many as the query's.
            masked: run everything with a key mask as well.
            layout: the token layout that calls will have; None for none.

        Returns:
            What served each run, in order: without and with the mask, dense before sparse.

        Raises:
            RuntimeError: the router is not installed.
            ValueError: a shape is not as described.
        """
        if not self._installed:
            raise RuntimeError("router: install it before warmup")
        place = torch.device(device or self.platform.device or "cpu")
        before = (self.observer, self._counting, self._last)
        self.observer, self._counting = None, False
        try:
            with torch.no_grad():
                return warm_up(
                    self,
                    shapes,
                    dtype=dtype,
                    device=place,
                    key_heads=key_heads,
                    masked=masked,
                    layout=layout,
                )
        finally:
            self.observer, self._counting, self._last = before

    def report(self) -> dict[str, Any]:
        """Return the state of the router as plain values, for a status page or a file."""
        return router_report(self)

    def watch_model(self, model: torch.nn.Module) -> None:
        """Remember a model, to know at the next rebuild whether compiled graphs must be dropped."""
        if all(model is not known for known in self._models):
            self._models.append(model)

    def forget_model(self, model: torch.nn.Module) -> None:
        """Forget a model of `watch_model`."""
        self._models = [known for known in self._models if known is not model]


def _wrap(router: Router, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function to install, with the original's metadata."""

    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        return router.dispatch(*args, **kwargs)

    setattr(scaled_dot_product_attention, "__solspark_router__", router)  # noqa: B010 (a function)
    return scaled_dot_product_attention


def _found() -> Callable[..., Tensor]:
    """Return the function that torch has now."""
    return getattr(_TARGET, _ATTRIBUTE)


def _differs(old: RouterConfig, new: RouterConfig, name: str) -> bool:
    """Return whether a watched setting differs, or only one side has it."""
    missing = object()

    def read(config: RouterConfig) -> Any:
        try:
            return config.setting(name)
        except KeyError:
            return missing

    return read(old) != read(new)


def _is_compiled(model: torch.nn.Module) -> bool:
    """Return whether a module, or one inside it, runs through torch.compile."""
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod")
        for m in model.modules()
    )
