"""Choose, explain and record which implementation serves an operation.

An implementation declares itself with `register`; its `reasons(call)` says why it cannot serve a
call. The best one without reasons serves, and the ones passed over are recorded with theirs.
Nothing is retried after a failure.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark.errors import UnsupportedError
from solspark.types import AttentionCall, CallRecord

PREFERENCE = ("hopper", "triton", "eager")
"""Implementation names, best first."""

OPERATIONS = {
    "pool": "pool",
    "score_blocks": "score_blocks",
    "thresholds": "score_blocks",
    "select_blocks": "select_blocks",
    "block_sparse_attention": "block_sparse_attention",
    "merge": "merge",
    "features": "second_moments",
    "metric_factor": "second_moments",
}
"""Operation -> the module in `solspark.ops` that registers it; others have their own name."""

Reasons = Callable[[AttentionCall], Sequence[str]]
Enter = Callable[[str], Callable[[], None]]
"""Called with a stage's name where it begins; what it returns is called where it ends."""


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation: its name, why it may decline, and the function itself.

    `on_request` says why it serves only when asked for by name; empty if it serves anyone.
    """

    name: str
    reasons: Reasons
    run: Callable[..., Any]
    on_request: str = ""


@dataclass(frozen=True)
class Choice:
    """The implementation that serves a call, and the ones that declined it."""

    operation: str
    name: str
    run: Callable[..., Any]
    call: AttentionCall
    declined: tuple[tuple[str, tuple[str, ...]], ...]

    def record(self, exact_pairs: Tensor | None = None, total_pairs: int | None = None) -> None:
        """Record the call as this thread's newest."""
        record(
            CallRecord(
                self.operation, self.name, self.call, self.declined, exact_pairs, total_pairs
            )
        )


_registry: dict[str, dict[str, Implementation]] = {}


class _ThreadState(threading.local):
    """The newest record of a thread, the lists that collect records, and who watches stages."""

    def __init__(self) -> None:
        self.last: CallRecord | None = None
        self.collectors: list[list[CallRecord]] = []
        self.watchers: list[Enter] = []


_state = _ThreadState()


def register(
    operation: str,
    name: str,
    reasons: Reasons,
    run: Callable[..., Any],
    *,
    on_request: str = "",
) -> None:
    """Declare an implementation of an operation; a name registered again replaces the earlier one.

    Args:
        operation: the operation's name, that of the module in `solspark.ops` which registers it.
        name: one of `PREFERENCE`.
        reasons: returns one string for each obstacle to serving a call; empty means it can.
        run: takes the operation's checked arguments, as its `ops` module documents.
        on_request: why it serves only when asked for by name; empty if it serves anyone.
    """
    if name not in PREFERENCE:
        raise ValueError(f"name: expected one of {PREFERENCE}, got {name!r}")
    _registry.setdefault(operation, {})[name] = Implementation(name, reasons, run, on_request)


def never_declines(call: AttentionCall) -> list[str]:
    """Return no reason: the eager implementations serve every call that passed the checks."""
    return []


def _implementations(operation: str) -> list[Implementation]:
    """Return the operation's implementations, best first, importing its module if need be."""
    if operation not in _registry:
        module = f"solspark.ops.{OPERATIONS.get(operation, operation)}"
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    if operation not in _registry:
        raise ValueError(f"operation: {operation!r} is not one that solspark has")
    known = _registry[operation]
    return [known[name] for name in PREFERENCE if name in known]


def implementations(operation: str) -> tuple[str, ...]:
    """Return the names of an operation's implementations, best first.

    Args:
        operation: such as "block_sparse_attention"; `solspark env` lists them.

    Raises:
        ValueError: there is no such operation.
    """
    return tuple(item.name for item in _implementations(operation))


def operations() -> tuple[str, ...]:
    """Return the names of the operations registered so far, in alphabetical order."""
    return tuple(sorted(_registry))


def reasons(operation: str, impl: str, call: AttentionCall) -> list[str]:
    """Return why an implementation cannot serve a call.

    Args:
        operation: such as "block_sparse_attention".
        impl: "eager", "triton" or "hopper".
        call: shapes, type and device; the device need not be in this machine.

    Returns:
        One string an obstacle; empty if it can.

    Raises:
        TypeError: `call` is no AttentionCall.
        ValueError: there is no such operation or implementation.
    """
    if not isinstance(call, AttentionCall):
        raise TypeError(f"call: expected an AttentionCall, got {type(call).__name__}")
    for item in _implementations(operation):
        if item.name == impl:
            return list(item.reasons(call))
    if impl not in PREFERENCE:
        raise ValueError(f"impl: expected one of {PREFERENCE} or None, got {impl!r}")
    return [f"{operation} has no implementation named {impl}"]


def on_request(operation: str, impl: str) -> str:
    """Return why an implementation serves only when asked for; empty if it serves anyone."""
    return next(item.on_request for item in _implementations(operation) if item.name == impl)


def pick(operation: str, call: AttentionCall, impl: str | None = None) -> Choice:
    """Return the best implementation that can serve the call, or the one asked for.

    Raises:
        UnsupportedError: the one asked for declines, or all do; `reasons` says why.
    """
    candidates = _implementations(operation)
    if impl is not None:
        obstacles = reasons(operation, impl, call)
        if obstacles:
            raise UnsupportedError(f"{operation} with impl={impl!r}", obstacles)
        chosen = next(item for item in candidates if item.name == impl)
        return Choice(operation, impl, chosen.run, call, ())
    declined: list[tuple[str, tuple[str, ...]]] = []
    for item in candidates:
        obstacles = tuple(item.reasons(call))
        if not obstacles and item.on_request:
            obstacles = (item.on_request,)
        if not obstacles:
            return Choice(operation, item.name, item.run, call, tuple(declined))
        declined.append((item.name, obstacles))
    raise UnsupportedError(
        operation, [f"{name}: {reason}" for name, why in declined for reason in why]
    )


def choose(operation: str, call: AttentionCall, impl: str | None = None) -> str:
    """Return the name of the implementation that serves a call; see `pick`."""
    return pick(operation, call, impl).name


def where_available(operation: str, impl: str | None) -> str | None:
    """Return `impl` if the operation has an implementation of that name, else None: take the best.

    For compositions: `impl` names the attention, and planning follows where it has the same one.
    """
    if impl is not None and impl not in PREFERENCE:
        raise ValueError(f"impl: expected one of {PREFERENCE} or None, got {impl!r}")
    return impl if impl in implementations(operation) else None


def record(call_record: CallRecord) -> None:
    """Make a record this thread's newest; inside a compiled graph nothing is recorded."""
    if torch.compiler.is_compiling():
        return
    _state.last = call_record
    for collector in _state.collectors:
        collector.append(call_record)


def last_call() -> CallRecord | None:
    """Return what served the newest call of this thread, or None before the first.

    Returns:
        A CallRecord: operation, implementation, the implementations that declined and why, and, for
        attention, the share of block pairs read exactly (`density`, which waits for the device).
    """
    return _state.last


@contextmanager
def collect_records() -> Iterator[list[CallRecord]]:
    """Collect the records of all calls that this thread makes inside the block."""
    records: list[CallRecord] = []
    _state.collectors.append(records)
    try:
        yield records
    finally:
        _state.collectors[:] = [item for item in _state.collectors if item is not records]


@contextmanager
def watch_stages(enter: Enter) -> Iterator[None]:
    """Have the stages of this thread's calls reported, so that a benchmark can time them."""
    _state.watchers.append(enter)
    try:
        yield
    finally:
        _state.watchers[:] = [item for item in _state.watchers if item is not enter]


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Mark a part of a composition for those who watch; without them it does nothing."""
    ends = [enter(name) for enter in _state.watchers]
    yield
    for end in ends:
        end()


def describe(query: Tensor | None, key: Tensor, **options: Any) -> AttentionCall:
    """Return the AttentionCall for tensors [B, L, H, D]; `options` sets its remaining fields.

    A missing query stands for one of the key's length and heads.
    """
    first = key if query is None else query
    fields: dict[str, Any] = {
        "batch": first.shape[0],
        "query_tokens": first.shape[1],
        "key_tokens": key.shape[1],
        "heads": first.shape[2],
        "head_dim": key.shape[3],
        "dtype": key.dtype,
        "device_type": key.device.type,
        "capability": capability(key.device),
        "key_heads": key.shape[2],
        "last_dim_contiguous": first.stride(-1) == 1 and key.stride(-1) == 1,
    }
    if "requires_grad" not in options:
        fields["requires_grad"] = needs_grad(query, key)
    return AttentionCall(**(fields | options))


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA or ROCm device, None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def needs_grad(*tensors: Tensor | None) -> bool:
    """Say whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
