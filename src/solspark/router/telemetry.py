"""Count which route calls take, and log each distinct one once."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("solspark.router")

ENVIRONMENT = "SOLSPARK_ROUTER_DEBUG"


class Route(NamedTuple):
    """What makes two calls the same for telemetry."""

    backend: str
    role: str | None
    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: torch.dtype
    masked: bool
    contiguous: bool


def wanted() -> bool:
    """Return whether the environment asks for telemetry."""
    return os.environ.get(ENVIRONMENT, "") not in ("", "0")


class Telemetry:
    """Counts of distinct routes since the last `flush`."""

    def __init__(self) -> None:
        self.counts: Counter[Route] = Counter()
        self._logged: set[Route] = set()

    def record(
        self, backend: str, role: str | None, query: Tensor, key: Tensor, mask: Tensor | None
    ) -> None:
        """Count one call, and log its route when it is the first of its kind."""
        route = Route(
            backend,
            role,
            tuple(query.shape),
            tuple(key.shape),
            query.dtype,
            mask is not None,
            query.is_contiguous(),
        )
        self.counts[route] += 1
        if route not in self._logged:
            self._logged.add(route)
            log.info("route %s", route)

    def flush(self) -> list[tuple[Route, int]]:
        """Log the counts, busiest first, return them, and start again."""
        rows = self.counts.most_common()
        for route, count in rows:
            log.info("%6d x %s", count, route)
        self.counts.clear()
        return rows

    def clear(self) -> None:
        """Forget counts and what was logged."""
        self.counts.clear()
        self._logged.clear()
