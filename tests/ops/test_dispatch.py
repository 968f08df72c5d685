"""Choosing, explaining and recording implementations."""

from __future__ import annotations

import threading

import pytest
import torch

import solspark
from solspark import AttentionCall, UnsupportedError
from solspark.ops import _dispatch
from solspark.ops.merge import merge

CALL = AttentionCall(
    batch=1,
    query_tokens=100,
    key_tokens=100,
    heads=2,
    head_dim=64,
    dtype=torch.float32,
    device_type="cpu",
)


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register an operation of three implementations, two of which mind something."""
    monkeypatch.setattr(_dispatch, "_registry", dict(_dispatch._registry))

    def minds_splits(call: AttentionCall) -> list[str]:
        return ["needs kv_splits=1"] if call.kv_splits > 1 else []

    def minds_the_cpu(call: AttentionCall) -> list[str]:
        return ["needs CUDA", "needs bfloat16"] if call.device_type == "cpu" else []

    _dispatch.register("trial", "eager", _dispatch.never_declines, lambda: "eager")
    _dispatch.register("trial", "triton", minds_splits, lambda: "triton")
    _dispatch.register("trial", "hopper", minds_the_cpu, lambda: "hopper")
    return "trial"


def test_best_first_whatever_the_order_of_registration(operation: str) -> None:
    assert _dispatch.implementations(operation) == ("hopper", "triton", "eager")


def test_the_best_without_reasons_serves_and_the_others_are_recorded(operation: str) -> None:
    choice = _dispatch.pick(operation, CALL)
    assert choice.name == choice.run() == _dispatch.choose(operation, CALL) == "triton"
    assert choice.declined == (("hopper", ("needs CUDA", "needs bfloat16")),)
    choice.record()
    record = solspark.last_call()
    assert record is not None
    assert (record.operation, record.implementation) == ("trial", "triton")
    assert record.declined == choice.declined


def test_an_implementation_asked_for_serves_or_raises(operation: str) -> None:
    assert _dispatch.choose(operation, CALL, "eager") == "eager"
    with pytest.raises(UnsupportedError, match=r"needs CUDA; needs bfloat16") as caught:
        _dispatch.choose(operation, CALL, "hopper")
    assert caught.value.reasons == ("needs CUDA", "needs bfloat16")
    assert _dispatch.reasons(operation, "hopper", CALL) == ["needs CUDA", "needs bfloat16"]
    assert _dispatch.reasons(operation, "triton", CALL) == []


def test_one_on_request_serves_only_when_asked_for(operation: str) -> None:
    _dispatch.register(
        operation, "hopper", _dispatch.never_declines, lambda: "hopper", on_request="it is raw"
    )
    choice = _dispatch.pick(operation, CALL)
    assert choice.name == "triton" and choice.declined == (("hopper", ("it is raw",)),)
    assert _dispatch.pick(operation, CALL, "hopper").run() == "hopper"
    assert _dispatch.on_request(operation, "hopper") == "it is raw"
    assert _dispatch.on_request(operation, "triton") == ""


def test_an_implementation_that_the_operation_lacks_is_a_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"merge has no implementation named hopper"):
        _dispatch.choose("merge", CALL, "hopper")


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"impl: expected one of .* got 'cuda'"):
        _dispatch.choose("merge", CALL, "cuda")
    with pytest.raises(ValueError, match=r"operation: 'fly' is not one"):
        _dispatch.implementations("fly")
    with pytest.raises(ValueError, match=r"name: expected one of .* got 'cuda'"):
        _dispatch.register("trial", "cuda", _dispatch.never_declines, print)
    with pytest.raises(TypeError, match=r"call: expected an AttentionCall, got str"):
        _dispatch.reasons("merge", "eager", "a call")  # type: ignore[arg-type]


def test_all_declining_raises_with_every_reason(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _dispatch.register(operation, "eager", lambda call: ["asleep"], print)
    _dispatch.register(operation, "triton", lambda call: ["away"], print)
    with pytest.raises(UnsupportedError) as caught:
        _dispatch.choose(operation, CALL)
    assert caught.value.reasons == (
        "hopper: needs CUDA",
        "hopper: needs bfloat16",
        "triton: away",
        "eager: asleep",
    )


def test_where_available_follows_only_implementations_that_exist(operation: str) -> None:
    assert _dispatch.where_available(operation, "hopper") == "hopper"
    assert _dispatch.where_available(operation, None) is None
    assert _dispatch.where_available("merge", "hopper") is None
    with pytest.raises(ValueError, match=r"impl: expected one of"):
        _dispatch.where_available("merge", "cuda")


def test_records_are_the_threads_own() -> None:
    out, lse = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)
    merge(out, lse, out, lse)
    mine = solspark.last_call()
    assert mine is not None and mine.operation == "merge"
    seen = []

    def elsewhere() -> None:
        seen.append(solspark.last_call())
        merge(out[:, :1], lse[:, :1], out[:, :1], lse[:, :1])
        seen.append(solspark.last_call())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[0] is None and seen[1].call.query_tokens == 1
    assert solspark.last_call() is mine


def test_collecting_records_nests_and_ends_after_an_exception() -> None:
    out, lse = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)
    with pytest.raises(KeyError):
        with _dispatch.collect_records() as outer:
            merge(out, lse, out, lse)
            with _dispatch.collect_records() as inner:
                merge(out, lse, out, lse)
            raise KeyError
    merge(out, lse, out, lse)
    assert (len(outer), len(inner)) == (2, 1)


def test_a_call_is_described_by_its_tensors() -> None:
    query = torch.zeros(2, 5, 6, 64, dtype=torch.bfloat16)
    key = torch.zeros(2, 7, 3, 128, dtype=torch.bfloat16)[..., ::2].requires_grad_()
    call = _dispatch.describe(query, key, tail="block", kv_splits=3)
    assert (call.batch, call.query_tokens, call.key_tokens) == (2, 5, 7)
    assert (call.heads, call.key_heads, call.head_dim) == (6, 3, 64)
    assert (call.dtype, call.device_type, call.capability) == (torch.bfloat16, "cpu", None)
    assert (call.tail, call.kv_splits) == ("block", 3)
    assert call.requires_grad and not call.last_dim_contiguous
    with torch.no_grad():
        assert not _dispatch.describe(query, key).requires_grad


def test_stages_are_told_to_those_who_watch_and_to_nobody_else() -> None:
    told: list[str] = []

    def enter(name: str):
        told.append(f"{name} begins")
        return lambda: told.append(f"{name} ends")

    with _dispatch.watch_stages(enter):
        with _dispatch.stage("plan"):
            told.append("work")
    with _dispatch.stage("plan"):
        pass
    assert told == ["plan begins", "work", "plan ends"]
