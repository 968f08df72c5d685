"""Send one attention call to the first declared backend that can serve it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solspark.errors import UnsupportedError
from solspark.router import telemetry as telemetry_module
from solspark.router.backend import (
    BLOCK_MASK,
    MASKED_BLOCK,
    TAKES_NO,
    Platform,
    Registry,
    RouteCall,
    detect_platform,
)
from solspark.router.backends import builtin_registry
from solspark.router.chain import ORIGINAL_NAME, RoutePlan
from solspark.router.config import RouterConfig
from solspark.router.context import RouteContext
from solspark.router.explain import RouteRecord, call_reasons
from solspark.router.selector import Selection
from solspark.router.stage import NO_BACKEND, POLICY_SKIPS, SparseStage

log = logging.getLogger("solspark.router")

Observer = Callable[[str, Tensor, Tensor, "Tensor | None"], None]


class Dispatcher:
    """What `Router` is but for its installation: plan, stage, context, and the calls they serve.

    Args:
        config: the settings.
        registry: the declared backends; None is `builtin_registry()`.
        platform: where calls run; None detects it.
        original: the attention that serves what no backend does.
    """

    def __init__(
        self,
        config: RouterConfig | None,
        registry: Registry | None,
        platform: Platform | None,
        original: Callable[..., Tensor],
    ):
        self.config = config or RouterConfig()
        self.registry = registry if registry is not None else builtin_registry()
        self.platform = platform or detect_platform()
        self.context = RouteContext()
        self.observer: Observer | None = None
        self.telemetry = telemetry_module.Telemetry()
        self.stage: SparseStage | None = None
        self._counting = False
        self._told: set[tuple[str, torch.dtype]] = set()
        self._last: RouteRecord | None = None
        self.plan = RoutePlan((), None, original, self.platform, ())
        self.context.on_end(self._generation_ended)

    def dispatch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **extra: Any,
    ) -> Tensor:
        """Serve one call: the arguments and the result of scaled_dot_product_attention.

        The first backend whose gate accepts serves, and what it raises propagates: there is no
            second try.

        Raises:
            UnsupportedError: in strict mode, where the sparse stage was asked for and could not be
                used.
        """
        plan, stage = self.plan, self.stage
        call = RouteCall(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            extra,
            _needs_grad(query, key, value, attn_mask),
        )
        declined: list[tuple[str, str]] = []
        skip: str | None = None
        for entry in plan.entries:
            reason = entry.constraints.first_reason(call)
            if reason is not None:
                declined.append((entry.name, reason))
                if reason.startswith(TAKES_NO) and str(query.dtype) in reason:
                    self._warn_of_type(entry.label, query.dtype)
                continue
            selection = None
            if stage is not None and BLOCK_MASK in entry.caps:
                selection = stage(call, entry.caps)
                skip = stage.last_skip
            if selection is None and entry.selection_only:
                declined.append((entry.name, f"serves selections only ({skip or 'sparse is off'})"))
                continue
            if selection is None:
                self._refuse_if_strict(skip, declined)
                self._note(entry.name, call, None, skip, declined)
                return entry.call(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
            self._note(entry.name, call, selection, None, declined)
            return entry.call(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                selection=selection,
            )
        if stage is not None and skip is None:
            # No entry that could have taken a selection accepted the call, so the stage was never
            # asked.
            skip = stage.skip_reason(call, (BLOCK_MASK, MASKED_BLOCK)) or NO_BACKEND
        self._refuse_if_strict(skip, declined)
        if plan.terminal is not None:
            self._note(plan.terminal.name, call, None, skip, declined)
            return plan.terminal.call(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                **extra,
            )
        self._note(ORIGINAL_NAME, call, None, skip, declined)
        if enable_gqa:
            # Only where it is set: older wrappers of platforms do not know the keyword.
            extra["enable_gqa"] = True
        return plan.original(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            **extra,
        )

    def _warn_of_type(self, label: str, dtype: torch.dtype) -> None:
        """Say once a backend and type that such calls go elsewhere: a model left in float32."""
        if (label, dtype) in self._told or torch.compiler.is_compiling():
            return
        self._told.add((label, dtype))
        log.warning("%s cannot take %s: such calls go to the next that can", label, dtype)

    def _refuse_if_strict(self, skip: str | None, declined: list[tuple[str, str]]) -> None:
        """Raise in strict mode when something other than a policy kept this call dense."""
        if not self.config.strict or skip is None or skip in POLICY_SKIPS:
            return
        reasons = [skip, *(f"{name}: {reason}" for name, reason in declined)]
        raise UnsupportedError("router: a call cannot go sparse in strict mode", reasons)

    def _note(
        self,
        name: str,
        call: RouteCall,
        selection: Selection | None,
        skip: str | None,
        declined: list[tuple[str, str]],
    ) -> None:
        """Tell the observer and the telemetry, and remember the call."""
        if torch.compiler.is_compiling():
            return
        query = call.query
        shape = (*query.shape[:-1], call.key.shape[-2], query.shape[-1])
        self._last = RouteRecord(name, selection, skip, tuple(declined), shape, query.dtype)
        shown = name if selection is None else f"{name}+sparse"
        if self.observer is not None:
            self.observer(shown, query, call.key, call.attn_mask)
        if self._counting:
            self.telemetry.record(shown, self.context.role, query, call.key, call.attn_mask)

    def last_call(self) -> RouteRecord | None:
        """Return what served the newest call, or None before the first."""
        return self._last

    def reasons(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **extra: Any,
    ) -> dict[str, list[str]]:
        """Say for every registered backend why it would not serve this call; an empty list means
        that it could.

        The key "sparse" says the same of the sparse stage. Nothing is computed and nothing is
        imported.
        """
        call = RouteCall(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            extra,
            _needs_grad(query, key, value, attn_mask),
        )
        return call_reasons(self, call)

    def _generation_ended(self) -> None:
        if self._counting:
            self.telemetry.flush()


def _needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd would record a call on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
