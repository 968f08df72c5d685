"""The sparse stage: look at one call, say whether it may go sparse, and choose its tiles.

The rows of the gate are asked in a fixed order; the first that declines is left in `last_skip` as
words a program can compare. Messages that a user should see are logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from solspark.router.backend import BLOCK_MASK, MASKED_BLOCK, TAIL, RouteCall
from solspark.router.chain import Entry
from solspark.router.config import SparseConfig
from solspark.router.context import RouteContext
from solspark.router.layout import TokenLayout
from solspark.router.schedule import schedule
from solspark.router.selector import (
    GeometryCache,
    Selection,
    SelectorSpec,
    select_adaptive,
    select_radial,
    visible_tiles,
)

log = logging.getLogger("solspark.router")

NOT_DENOISER = "not the denoiser"
EXCLUDED = "excluded"
CAUSAL = "causal"
MASKED = "masked"
UNSUPPORTED = "unsupported tensor"
CROSS = "cross attention"
SHORT = "below the minimum sequence"
COVERED = "budget covers everything"
NO_LAYOUT = "no token layout"
NO_BACKEND = "no backend can consume a selection"

POLICY_SKIPS = frozenset({NOT_DENOISER, EXCLUDED, CROSS, SHORT, COVERED, NO_LAYOUT})
"""Skips that the user's own settings ask for; the others make a strict router raise."""


class SparseStage:
    """Choose tiles for the denoiser's long self-attention calls.

    Attributes:
        last_skip: why the last call stayed dense, None when it did not.
    """

    def __init__(self, config: SparseConfig, context: RouteContext):
        self.config = config
        self.context = context
        self.last_skip: str | None = None
        self.cache = GeometryCache()
        self._said: set[object] = set()
        self._excluded: dict[tuple[str, str], bool] = {}
        self._budget = config.budget
        context.on_change(self.refresh)
        self.refresh()

    @property
    def budget(self) -> float:
        """The budget of the step about to run, one of at most two values of a generation."""
        return self._budget

    @property
    def budgets(self) -> tuple[float, ...]:
        """The budgets that the steps of a generation can have: one, or two with a schedule."""
        config = self.config
        scheduled = config.schedule_steps > 0 or config.schedule_fraction > 0
        if not scheduled or config.schedule_bump <= 0:
            return (config.budget,)
        return config.budget, min(1.0, config.budget + config.schedule_bump)

    @contextmanager
    def at(self, budget: float) -> Iterator[None]:
        """Take a budget for a while, whatever the step."""
        self._budget = budget
        try:
            yield
        finally:
            self.refresh()

    def refresh(self) -> None:
        """Look up the budget of the context's step; dispatch never reads the step itself."""
        config, context = self.config, self.context
        if context.steps <= 0:
            self._budget = config.budget
            return
        table = schedule(
            context.steps,
            config.budget,
            config.schedule_bump,
            config.schedule_steps,
            config.schedule_fraction,
        )
        self._budget = table[min(context.step, len(table) - 1)]

    def close(self) -> None:
        """Stop listening to the context."""
        self.context.ignore(self.refresh)

    def skip_reason(self, call: RouteCall, caps: Collection[str]) -> str | None:
        """Return why this call stays dense, or None when it may go sparse. Changes and says
        nothing.

        Source: the rows of spec/router.md 2.2, in their order. Its row on a layout of another
            geometry cannot happen
        here: pins are computed for the grid they are used on.
        """
        query, key = call.query, call.key
        if not self.context.active or self.context.role != "transformer":
            return NOT_DENOISER
        if self.excluded():
            return EXCLUDED
        if call.is_causal:
            return CAUSAL
        if call.attn_mask is not None and MASKED_BLOCK not in caps:
            return MASKED
        if query.ndim != 4 or (query.device.type == "cpu" and not self.config.allow_cpu):
            return UNSUPPORTED
        if query.shape[2] != key.shape[2]:
            return CROSS
        if query.shape[2] < self.config.token_floor:
            return SHORT
        if self._budget >= 1:
            return COVERED
        if self.config.require_layout and self._layout_of(query.shape[2]) is None:
            return NO_LAYOUT
        return None

    def __call__(self, call: RouteCall, caps: Collection[str]) -> Selection | None:
        """Return the tiles that this call keeps, or None for dense.

        Args:
            call: the call.
            caps: capabilities of the entry that would serve it.
        """
        skip = self.skip_reason(call, caps)
        if skip is not None:
            self.last_skip = skip
            self._explain(skip, call)
            return None
        layout = self._layout_for(call.query.shape[2])
        selection = self._select(call, layout)
        self.last_skip = COVERED if selection is None else None
        if selection is not None and self.config.tail:
            if TAIL in caps:
                selection = replace(selection, tail=True)
            else:
                self._once("tail", "the serving backend has no summaries for the tiles left out")
        return selection

    def _select(self, call: RouteCall, layout: TokenLayout | None) -> Selection | None:
        """Run the configured selector."""
        config, tokens = self.config, call.query.shape[2]
        spec = SelectorSpec(
            budget=self._budget,
            query_tile=config.query_tile,
            key_tile=config.key_tile,
            head_shared=config.head_shared,
            score_chunk_bytes=config.score_chunk_bytes,
        )
        visible: Tensor | None = None
        if call.attn_mask is not None:
            visible = visible_tiles(call.attn_mask, tokens, spec.query_tile, spec.key_tile)
        with torch.no_grad():
            if config.pattern == "radial":
                return select_radial(
                    tokens,
                    spec,
                    call.query.device,
                    layout=layout,
                    visible=visible,
                    cache=self.cache,
                )
            return select_adaptive(
                call.query, call.key, spec, layout=layout, visible=visible, cache=self.cache
            )

    def excluded(self) -> bool:
        """Return whether the running model is on the list of those that stay dense."""
        key = self.context.model_key
        if key not in self._excluded:
            names = {name.strip().casefold() for name in self.config.exclude if name.strip()}
            mine = {part.casefold() for part in (*key, *_architectures(key))}
            self._excluded[key] = bool(names & mine)
        return self._excluded[key]

    def _layout_of(self, tokens: int) -> TokenLayout | None:
        """Return the published layout when it describes a sequence of this length."""
        layout = self.context.layout
        return layout if layout is not None and layout.length == tokens else None

    def _layout_for(self, tokens: int) -> TokenLayout | None:
        """Return the layout to use; say once a length when there is none."""
        layout = self._layout_of(tokens)
        if layout is not None:
            return layout
        layout = self.context.layout
        why = "none published" if layout is None else f"it describes {layout.length}"
        self._once(
            ("layout", tokens),
            "no token layout for %d tokens (%s): the whole sequence may go sparse",
            tokens,
            why,
        )
        return None

    def _explain(self, skip: str, call: RouteCall) -> None:
        """Log the skips that a user should hear of, once each."""
        if skip == EXCLUDED:
            self._once(
                (skip, self.context.model_key),
                "%s stays dense: it is on the exclusion list",
                "/".join(self.context.model_key),
            )
        elif skip == MASKED:
            self._once(
                skip,
                "calls with attn_mask stay dense: their backend cannot take a mask and a selection",
            )
        elif skip == SHORT:
            self._once(
                (skip, call.query.shape[2]),
                "%d tokens stay dense: the minimum is %d",
                call.query.shape[2],
                self.config.token_floor,
            )

    def _once(self, key: object, message: str, *values: object) -> None:
        if key not in self._said:
            self._said.add(key)
            log.info(message, *values)


def _architectures(key: tuple[str, str]) -> list[str]:
    """Return short names: "WanPipeline" and "WanTransformer3DModel" are architecture "wan"."""
    found = []
    for name in key:
        for marker in ("Modular", "Pipeline", "Transformer", "UNet"):
            position = name.find(marker)
            if position > 0:
                found.append(name[:position])
                break
    return found


def build_stage(
    config: SparseConfig, context: RouteContext, entries: Sequence[Entry], labels: Sequence[str]
) -> SparseStage | None:
    """Return the stage, or None when it would have nothing to do.

    Args:
        config: the settings.
        context: the generation that it follows.
        entries: the plan's entries; at least one must be able to consume a selection.
        labels: labels of backends that could consume one, named in the warning when none was
            chosen.
    """
    if not config.enabled or config.budget >= 1:
        return None
    capable = [entry.name for entry in entries if BLOCK_MASK in entry.caps]
    if not capable:
        log.warning(
            "sparse attention is enabled, but no chosen backend can consume a selection, "
            "so calls stay dense; these would help: %s",
            ", ".join(labels) or "none is registered",
        )
        return None
    log.info(
        "sparse attention on %s: budget %.0f %%, from %d tokens, %s",
        capable[0],
        100 * config.budget,
        config.token_floor,
        f"raised by {100 * config.schedule_bump:.0f} % at the ends"
        if config.schedule_bump > 0 and (config.schedule_steps or config.schedule_fraction)
        else "no schedule",
    )
    return SparseStage(config, context)
