"""Where the time of an evaluation goes: parts of the transformer, timed while it runs.

Modules are timed by hooks, planning and reordering by the stages that packed attention marks. On a
GPU these are events, so nothing waits; the clock of a CPU is as good there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from solspark.integrations.h3_controller import Stopwatch
from solspark.ops._dispatch import watch_stages

STAGES = ("plan", "reorder and summarise")
"""Parts of sparse attention, as its calls mark them."""

PARTS = ("feed-forward", "projections", "attention", *STAGES, "other")
"""Parts in the order in which a table or a plot shows them."""

_ATTENTION = "whole attention module"
_PROJECTIONS = ("to_qkv", "to_q", "to_k", "to_v", "norm_q", "norm_k")


class PartClock:
    """Time the parts of every evaluation inside a `with`.

    Args:
        blocks: transformer blocks with `attn` and `ff`.
        device: where they run.
    """

    def __init__(self, blocks: Iterable[Any], device: torch.device):
        self.device = device
        self.watches: dict[str, list[Stopwatch]] = defaultdict(list)
        self._modules: list[tuple[str, nn.Module]] = []
        for block in blocks:
            self._modules += [(_ATTENTION, block.attn), ("feed-forward", block.ff)]
            inside = [getattr(block.attn, name, None) for name in _PROJECTIONS]
            inside.append(block.attn.to_out[0])
            self._modules += [("projections", part) for part in inside if part is not None]
        self._stack = ExitStack()

    def __enter__(self) -> PartClock:
        for name, module in self._modules:
            before, after = self._hooks(name)
            for handle in (
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ):
                self._stack.callback(handle.remove)
        self._stack.enter_context(watch_stages(self._enter))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _enter(self, name: str) -> Callable[[], None]:
        """Start a watch; what is returned stops it."""
        watch = Stopwatch(self.device)
        self.watches[name].append(watch)
        return watch.stop

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks before and after a module's forward."""
        stops: list[Callable[[], None]] = []

        def before(*_: Any) -> None:
            stops.append(self._enter(name))

        def after(*_: Any) -> None:
            stops.pop()()

        return before, after

    def parts(self, evaluations: int, ms: float) -> dict[str, float]:
        """Return the milliseconds of each part of one evaluation; together they are `ms`.

        Args:
            evaluations: how many ran inside the `with`.
            ms: time of one.

        Returns:
            Part -> milliseconds; "attention" is the attention module without the other parts inside
            it, the rotary embedding included. Stages that never ran are left out.
        """
        total = {
            name: sum(watch.seconds() for watch in watches) * 1e3 / evaluations
            for name, watches in self.watches.items()
        }
        found = {name: total[name] for name in PARTS if name in total}
        inside = sum(found.get(name, 0.0) for name in ("projections", *STAGES))
        found["attention"] = total[_ATTENTION] - inside
        found["other"] = ms - total[_ATTENTION] - total["feed-forward"]
        return {name: found[name] for name in PARTS if name in found}
