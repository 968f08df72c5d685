"""The frozen plan: which prepared backends are asked, in which order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from solspark.router.backend import Constraints, Platform, Registry

log = logging.getLogger("solspark.router")

ORIGINAL_NAME = "sdpa"


@dataclass(frozen=True, eq=False)
class Entry:
    """A prepared backend: its call, and the capabilities that the call really has."""

    name: str
    label: str
    call: Callable[..., Tensor]
    constraints: Constraints
    caps: frozenset[str]
    selection_only: bool = False


@dataclass(frozen=True, eq=False)
class RoutePlan:
    """Everything dispatch needs; never changed, only replaced.

    Args:
        entries: highest priority first.
        terminal: what serves a call that every entry declined, or None for the original.
        original: the attention that was there before the router.
        platform: what the plan was built for.
        labels: the labels that were asked for.
        skipped: (name, reason) of backends that were asked for and are not in the plan.
    """

    entries: tuple[Entry, ...]
    terminal: Entry | None
    original: Callable[..., Tensor]
    platform: Platform
    labels: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def chain(self) -> str:
        """The order of trial in one string, such as "sage>flash>sdpa"."""
        last = self.terminal.name if self.terminal else ORIGINAL_NAME
        return ">".join([*(entry.name for entry in self.entries), last])

    @property
    def empty(self) -> bool:
        """Whether nothing but the original would ever serve."""
        return not self.entries and self.terminal is None


def build_plan(
    registry: Registry,
    platform: Platform,
    labels: Collection[str],
    original: Callable[..., Tensor],
    settings: Mapping[str, Any],
) -> RoutePlan:
    """Prepare the backends that `labels` choose and order them.

    One backend that cannot be prepared never affects another. Capabilities only ever narrow: an
    entry has those that its backend declares and, where the prepared call has a `caps` attribute,
    that the call names too.

    Args:
        registry: the declared backends; labels that match none of them are ignored.
        platform: where calls will run.
        labels: the chosen labels.
        original: the attention to fall back on.
        settings: value of every option that a chosen backend declares.

    Returns:
        The plan. With several terminals the one of the highest priority serves.
    """
    entries: list[Entry] = []
    terminal: Entry | None = None
    skipped: list[tuple[str, str]] = []
    for backend in registry.ordered():
        if backend.label not in labels:
            continue
        missing = backend.missing(platform)
        if missing:
            log.warning(
                "%s is enabled but cannot serve here: %s", backend.label, "; ".join(missing)
            )
            skipped.append((backend.name, "; ".join(missing)))
            continue
        try:
            captured = {name: settings[name] for name in backend.options}
            call = backend.prepare(platform, original, captured)
        except Exception as error:
            # Isolation is the contract: a broken optional package must not cost the user the other
            # backends.
            log.error(
                "%s could not be prepared: %s: %s", backend.label, type(error).__name__, error
            )
            skipped.append((backend.name, f"{type(error).__name__}: {error}"))
            continue
        if call is None:
            skipped.append((backend.name, "not available on this machine"))
            continue
        narrowed = backend.caps & frozenset(getattr(call, "caps", backend.caps))
        entry = Entry(
            backend.name, backend.label, call, backend.constraints, narrowed, backend.selection_only
        )
        if backend.terminal:
            terminal = entry
        else:
            entries.append(entry)
    entries.reverse()
    return RoutePlan(tuple(entries), terminal, original, platform, tuple(labels), tuple(skipped))
