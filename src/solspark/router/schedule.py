"""A budget for each step of a generation, with at most two distinct values."""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=64)
def schedule(
    steps: int, budget: float, bump: float, bump_steps: int, bump_fraction: float = 0.0
) -> tuple[float, ...]:
    """Return the budget of each step: raised at both ends, `budget` between.

    raised = min(1, budget + bump) for the first and the last `edge` steps, where
    edge = min(max(bump_steps, ceil(bump_fraction * steps)), ceil(steps / 2)). Two values at most,
    so a compiled consumer specialises at most twice. A fraction alone gives short schedules (4 or 8
    steps) at least one raised step an end.

    Args:
        steps: steps of the generation, at least 1.
        budget: share of choosable tiles, 0 to 1.
        bump: what the ends get on top.
        bump_steps: steps at each end.
        bump_fraction: steps at each end as a share of all.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    edge = min(max(bump_steps, math.ceil(bump_fraction * steps)), math.ceil(steps / 2))
    if bump <= 0 or edge <= 0:
        return (budget,) * steps
    raised = min(1.0, budget + bump)
    return tuple(raised if min(i, steps - 1 - i) < edge else budget for i in range(steps))
