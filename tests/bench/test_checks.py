from __future__ import annotations

from itertools import count

import pytest
import torch

from solspark.bench.case import METHODS, Case, Unavailable, method
from solspark.bench.checks import _check
from solspark.bench.gate import Verdict
from solspark.bench.inputs import make_inputs
from solspark.bench.problems import get_problem
from solspark.bench.settings import load_cases

load_cases()


@pytest.fixture
def verdict_of():
    """Return a function that checks a call made by a lambda of its inputs."""

    def verdict(run, check, judge=lambda out: Verdict("pass", 0.0)):
        @method("call", "planted")
        def build(inputs, options):
            return Case(run=lambda: run(inputs), judge=judge)

        inputs = make_inputs(get_problem("tiny"), "gaussian", torch.device("cpu"), torch.float32)
        case = _check("planted")(inputs, {"check": check})
        assert not case.timed
        return case.judge(case.run())

    yield verdict
    METHODS.pop(("call", "planted"), None)


def test_an_honest_call_passes(verdict_of):
    for check in ("determinism", "strided", "rows"):
        assert verdict_of(lambda inputs: inputs.query * 2, check).passed


def test_a_result_that_changes_is_found(verdict_of):
    calls = count()

    def drifting(inputs):
        return inputs.query + (1e-6 if next(calls) == 11 else 0.0)

    assert verdict_of(drifting, "determinism").gate == "repeat 11 of 20 differs"


def test_a_result_that_depends_on_strides_is_found(verdict_of):
    def by_stride(inputs):
        return inputs.query + (0.0 if inputs.query.is_contiguous() else 1e-6)

    assert "fused projection" in verdict_of(by_stride, "strided").gate

    def by_order(inputs):
        return inputs.query + (1e-6 if inputs.query.stride(2) > inputs.query.stride(1) else 0.0)

    assert "head-major" in verdict_of(by_order, "strided").gate


def test_rows_are_judged_by_the_call_itself(verdict_of):
    wrong = verdict_of(lambda inputs: inputs.query, "rows", lambda out: Verdict("no", 1.0))
    assert wrong.gate == "no"


def test_a_graph_needs_a_device_and_an_unknown_check_is_refused(verdict_of):
    with pytest.raises(Unavailable, match="CUDA"):
        verdict_of(lambda inputs: inputs.query, "graph")
    with pytest.raises(ValueError, match="check: expected one of"):
        verdict_of(lambda inputs: inputs.query, "everything")
