"""Errors that a user of solspark may want to catch."""

from __future__ import annotations

from collections.abc import Sequence


class SolsparkError(Exception):
    """Base of every error that solspark defines itself."""


class UnsupportedError(SolsparkError, RuntimeError):
    """No implementation can serve this call; `reasons` says why, one string an obstacle."""

    def __init__(self, what: str, reasons: Sequence[str]):
        self.what = what
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: " + "; ".join(self.reasons))


class MissingDependencyError(SolsparkError, ImportError):
    """An optional package is needed for this call; the message says what to install."""
