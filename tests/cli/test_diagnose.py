"""What would serve a call, and what it is expected to cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from solspark import diagnose
from solspark.ops import _dispatch
from solspark.types import AttentionCall

ROOT = Path(__file__).resolve().parents[2]
CALL = AttentionCall(
    batch=1,
    query_tokens=73584,
    key_tokens=73584,
    heads=56,
    head_dim=128,
    dtype=torch.bfloat16,
    device_type="cpu",
)


def test_every_operation_is_explained_and_eager_serves_the_cpu():
    served = diagnose.explain(CALL)
    names = [item.operation for item in served]
    assert names == sorted(names)
    expected = {"pool", "thresholds", "select_blocks", "block_sparse_attention", "features"}
    assert expected <= set(names)
    for item in served:
        assert item.implementation == "eager", item
        for name, reasons in item.declined:
            assert name != "eager"
            assert reasons and all(isinstance(reason, str) and reason for reason in reasons)


def test_the_best_that_can_serve_is_named_with_the_reasons_of_the_others(monkeypatch):
    entries = {
        name: _dispatch.Implementation(name, lambda call, why=why: why, lambda: None)
        for name, why in {"hopper": ["needs 9.0"], "triton": [], "eager": []}.items()
    }
    monkeypatch.setitem(_dispatch._registry, "pool", entries)
    pool = next(item for item in diagnose.explain(CALL) if item.operation == "pool")
    assert pool == diagnose.Served("pool", "triton", (("hopper", ("needs 9.0",)),), ("eager",))

    entries["triton"] = _dispatch.Implementation("triton", lambda call: ["no GPU"], lambda: None)
    entries["eager"] = _dispatch.Implementation("eager", lambda call: ["too slow"], lambda: None)
    pool = next(item for item in diagnose.explain(CALL) if item.operation == "pool")
    assert pool.implementation is None
    assert [name for name, _ in pool.declined] == ["hopper", "triton", "eager"]


def test_bfloat16_attention_factors_its_moments_in_the_kernel():
    pytest.importorskip("triton")
    call = replace(CALL, dtype=torch.bfloat16, device_type="cuda", capability=(9, 0))
    (found,) = [item for item in diagnose.explain(call) if item.operation == "metric_factor"]
    assert found.implementation == "triton"


def test_an_operation_on_scores_is_asked_about_float32(monkeypatch):
    seen = {}

    def remember(operation):
        def reasons(call):
            seen[operation] = call.dtype
            return []

        return {"eager": _dispatch.Implementation("eager", reasons, lambda: None)}

    for operation in ("pool", "select_blocks"):
        monkeypatch.setitem(_dispatch._registry, operation, remember(operation))
    diagnose.explain(CALL)
    assert seen == {"pool": torch.bfloat16, "select_blocks": torch.float32}
    diagnose.explain(replace(CALL, dtype=torch.float64))
    assert seen["select_blocks"] == torch.float64


def test_a_budget_gives_the_density_of_a_counted_plan():
    # 1 150 key blocks: 1 134 candidates and 16 sinks. A row reads 113 candidates, the sinks, and
    # the band's blocks unless the budget took them already.
    cost = diagnose.estimate(CALL, topk_ratio=0.1, sink_tokens=1008, local_radius=-1)
    assert cost.density == pytest.approx((113 + 16) / 1150)
    with_band = diagnose.estimate(CALL, topk_ratio=0.1, sink_tokens=1008, local_radius=1)
    assert with_band.density == pytest.approx((113 + 16 + 3 * (1 - 113 / 1134)) / 1150)
    assert "113 of 1134 candidate blocks a row, 16 sink blocks" in with_band.density_source


def test_everything_exact_costs_what_dense_costs():
    cost = diagnose.estimate(CALL, topk_ratio=1.0)
    assert cost.density == pytest.approx(1)
    assert cost.exact_flops == pytest.approx(4 * 56 * 73584**2 * 128)
    assert cost.summary_flops == pytest.approx(0)


def test_a_threshold_gives_the_share_above_it():
    cost = diagnose.estimate(CALL, tau=1.0, local_radius=-1)
    assert cost.density == pytest.approx(1 - NormalDist().cdf(1.0))


def test_tails_and_outputs_are_counted():
    query = diagnose.estimate(CALL, topk_ratio=0.1)
    block = diagnose.estimate(replace(CALL, tail="block"), topk_ratio=0.1)
    none = diagnose.estimate(replace(CALL, tail="none"), topk_ratio=0.1)
    assert query.summary_flops == pytest.approx(64 * block.summary_flops, rel=0.01)
    assert none.summary_flops == 0
    # A summary a skipped block: a 64th of what its tokens would cost.
    skipped = query.dense_flops * (1 - query.density)
    assert query.summary_flops == pytest.approx(skipped / 64, rel=0.01)
    assert query.output_bytes == 73584 * 56 * 128 * 2
    lse = diagnose.estimate(replace(CALL, return_lse=True), topk_ratio=0.1)
    assert lse.output_bytes - query.output_bytes == 73584 * 56 * 4


def recorded() -> list[dict]:
    """Return the rows of whole Sol calls that a GPU recorded."""
    lines = (ROOT / "benchmarks/h200.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    known = {"inputs", "topk_ratio", "tau"}
    return [
        row
        for row in rows
        if (row["level"], row["method"], row["precision"]) == ("call", "sol", "bf16")
        and row["gate"] == "pass"
        and set(row["options"]) <= known
    ]


@pytest.mark.parametrize("row", recorded(), ids=lambda row: f"{row['problem']} {row['options']}")
def test_memory_is_estimated_within_a_fifth_of_what_was_measured(row):
    call = replace(CALL, query_tokens=row["tokens"], key_tokens=row["tokens"], heads=row["heads"])
    options = {
        name: row["options"][name] for name in ("topk_ratio", "tau") if name in row["options"]
    }
    found = diagnose.estimate(call, **options).workspace_bytes / 2**30
    assert found == pytest.approx(row["peak_gib"], rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk_ratio": 0.0}, r"topk_ratio: expected None or a number in \(0, 1\], got 0.0"),
        ({"tau": float("nan")}, "tau: expected a finite number, got nan"),
        ({"sink_tokens": 73585}, r"sink_tokens: expected 0..73584, got 73585"),
    ],
)
def test_what_cannot_be_estimated_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        diagnose.estimate(CALL, **options)


def test_the_environment_is_plain_data_about_this_process():
    found = diagnose.environment()
    assert found["packages"]["torch"] == torch.__version__
    assert found["cpu"]["torch_threads"] == torch.get_num_threads()
    assert found["devices"] == [] or torch.cuda.is_available()
    assert set(found) == {
        "solspark",
        "python",
        "platform",
        "cpu",
        "packages",
        "cuda",
        "hip",
        "devices",
    }
