"""What a router tells of itself: what served a call, why others did not, and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from solspark.router.backend import BLOCK_MASK, RouteCall
from solspark.router.selector import Selection
from solspark.router.stage import NO_BACKEND

if TYPE_CHECKING:
    from solspark.router.dispatch import Dispatcher
    from solspark.router.install import Router


@dataclass(frozen=True, eq=False)
class RouteRecord:
    """What served a call.

    Args:
        backend: name of the backend, ORIGINAL_NAME for torch's own.
        selection: the tiles it kept, None for a dense call.
        skip: why the sparse stage kept the call dense; None when it did not, or when there is no
            stage.
        declined: (name, first reason) of every backend that was asked before.
        shape: (batch, query heads, query tokens, key tokens, head_dim) as far as query has these
            dimensions.
        dtype: dtype of query.
    """

    backend: str
    selection: Selection | None
    skip: str | None
    declined: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def density(self) -> float:
        """Share of tiles that the call reads; waits for the device."""
        return 1.0 if self.selection is None else self.selection.density()


def call_reasons(router: Dispatcher, call: RouteCall) -> dict[str, list[str]]:
    """Return `Router.reasons` of a call."""
    entries = {e.name: e for e in (*router.plan.entries, router.plan.terminal) if e is not None}
    skipped = dict(router.plan.skipped)
    found: dict[str, list[str]] = {}
    for backend in reversed(router.registry.ordered()):
        if backend.name in entries:
            entry = entries[backend.name]
            why = [] if backend.terminal else entry.constraints.reasons(call)
            if entry.selection_only and (router.stage is None):
                why.append("serves selections only, and sparse is off")
        else:
            missing = backend.missing(router.platform)
            why = [skipped[backend.name]] if backend.name in skipped else ["not chosen", *missing]
            if not backend.terminal:
                why += backend.constraints.reasons(call)
        found[backend.name] = why
    found["sparse"] = _sparse_reasons(router, call)
    return found


def _sparse_reasons(router: Dispatcher, call: RouteCall) -> list[str]:
    """Return why this call would not go sparse."""
    if router.stage is None:
        return ["not enabled" if not router.config.sparse.enabled else NO_BACKEND]
    why: list[str] = []
    for entry in router.plan.entries:
        if BLOCK_MASK in entry.caps and entry.constraints.accepts(call):
            skip = router.stage.skip_reason(call, entry.caps)
            if skip is None:
                return []
            why.append(skip)
    return sorted(set(why)) or [NO_BACKEND]


def router_report(router: Router) -> dict[str, Any]:
    """Return `Router.report`."""
    stage, context, sparse = router.stage, router.context, router.config.sparse
    layout = context.layout
    return {
        "chain": router.plan.chain.split(">"),
        "overrides": list(router.plan.labels),
        "platform": router.platform.name,
        "installed": router.installed,
        "skipped": dict(router.plan.skipped),
        "sparse": {
            "enabled": stage is not None,
            "budget": stage.budget if stage is not None else sparse.budget,
            "gate": sparse.token_floor,
            "capable": [e.name for e in router.plan.entries if BLOCK_MASK in e.caps],
            "layout": layout
            and {"source": layout.source, "kinds": list(layout.kinds), "length": layout.length},
        },
        "context": {
            "active": context.active,
            "role": context.role,
            "step": context.step,
            "steps": context.steps,
            "model": context.model_key,
        },
    }
