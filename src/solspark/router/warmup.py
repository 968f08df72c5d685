"""Run what a router will be asked to run, before it counts.

A first sparse step otherwise waits for compilers that no dense warm-up has woken: kernels of the
backend, of the selection's lists, of masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from solspark.router.explain import RouteRecord
from solspark.router.layout import TokenLayout

if TYPE_CHECKING:
    from solspark.router.install import Router


def warm_up(
    router: Router,
    shapes: Iterable[Sequence[int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    key_heads: int | None,
    masked: bool,
    layout: TokenLayout | None,
) -> tuple[RouteRecord, ...]:
    """Do the work of `Router.warmup`."""
    stage, context = router.stage, router.context
    records: list[RouteRecord] = []
    for shape in shapes:
        query, key, value = _tensors(shape, key_heads, dtype, device)
        masks: list[Tensor | None] = [None]
        if masked:
            tokens = (query.shape[0], 1, 1, query.shape[2])
            masks.append(torch.ones(tokens, dtype=torch.bool, device=device))
        # Dense as outside a denoiser, then as each step of a schedule.
        runs = [(None, None), *(("transformer", b) for b in (stage.budgets if stage else ()))]
        for mask in masks:
            for role, budget in runs:
                chosen = stage.at(budget) if stage and budget is not None else nullcontext()
                with context.rehearsal(role, layout), chosen:
                    router.dispatch(
                        query, key, value, mask, enable_gqa=key.shape[1] != query.shape[1]
                    )
                record = router.last_call()
                assert record is not None
                records.append(record)
    return tuple(records)


def _tensors(
    shape: Sequence[int], key_heads: int | None, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return Q, K and V [B, H, L, D] as models hand them over: views of [B, L, H, D]."""
    if len(shape) != 4 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"shapes: expected (batch, heads, tokens, head_dim), got {tuple(shape)}")
    batch, heads, tokens, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(batch, tokens, n, head_dim, generator=generator, device=device)
        .to(dtype)
        .transpose(1, 2)
        for n in (heads, key_heads or heads, key_heads or heads)
    ]
