"""Selection kernels: the reference's plan bit for bit, and compiled for every target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from solspark.ops.select_blocks import _operator, _run_triton, list_width
from solspark.reference.select_blocks import mask_from_plan, select_blocks
from solspark.testing import nan_filled_allocations
from solspark.types import BlockPlan

pytest.importorskip("triton")

from solspark.kernels.select_blocks import launch_select_blocks

Ranges = Sequence[tuple[int, int]]


def test_in_the_interpreter(interpret):
    interpret(__file__)


def select(
    scores: Tensor,
    *,
    thresholds: Tensor | None = None,
    top_k: int | None = None,
    candidates: int | None = None,
    sinks: Ranges = (),
    dense_rows: Ranges = (),
    local_radius: int = -1,
    live: Tensor | None = None,
) -> BlockPlan:
    """Select with the kernels, on free memory that holds no zeros."""
    rows, columns = scores.shape[2:]
    with nan_filled_allocations():
        return _run_triton(
            scores,
            thresholds,
            top_k,
            columns if candidates is None else candidates,
            tuple(sinks),
            tuple(dense_rows),
            local_radius,
            live,
            rows * 64 - 3,
            columns * 64 - 63,
        )


def check(scores: Tensor, **options) -> BlockPlan:
    plan = select(scores, **options)
    rows, columns = scores.shape[2:]
    expected = select_blocks(
        scores, query_tokens=rows * 64 - 3, key_tokens=columns * 64 - 63, **options
    )
    assert plan.bits.equal(expected.bits) and plan.counts.equal(expected.counts)
    assert plan.indices.dtype == expected.indices.dtype
    width = list_width(
        columns,
        options.get("top_k"),
        options.get("sinks", ()),
        options.get("dense_rows", ()),
        options.get("local_radius", -1),
    )
    assert plan.indices.shape[3] == width and int(plan.counts.max()) <= width
    listed = torch.arange(width) < plan.counts[..., None]
    wanted = expected.indices[..., :width]
    assert torch.where(listed, plan.indices, 0).equal(torch.where(listed, wanted, 0))
    return plan


@pytest.fixture(params=[2048, 64], ids=["one_chunk", "chunks"])
def chunk(request, monkeypatch) -> int:
    """Find the cut in registers, or in several chunks as for long rows."""
    monkeypatch.setitem(launch_select_blocks.__kwdefaults__, "chunk", request.param)
    return request.param


VALUES = torch.tensor([-1.5, -0.0, 0.0, 0.25, 0.5, 2.0, -math.inf, math.inf, math.nan])
"""Few, so that most rows have ties at the cut; some that do not compare."""


def tied(batch: int, heads: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return VALUES[torch.randint(len(VALUES), (batch, heads, rows, columns), generator=generator)]


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(5))
def test_every_option(chunk: int, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(stop: int) -> int:
        return int(torch.randint(stop, (), generator=generator))

    rows, columns = 1 + draw(3), 1 + draw(100)
    scores = tied(2, 2, rows, columns, seed)
    options = {
        "candidates": [None, draw(columns + 1)][draw(2)],
        "sinks": [(0, 1), (columns // 2, columns // 2 + 1)][: draw(3)],
        "dense_rows": [(rows // 2, rows)][: draw(2)],
        "local_radius": [-1, 0, 1, 3][draw(4)],
    }
    if draw(2):
        options["live"] = torch.rand(2, [1, 2][draw(2)], columns, generator=generator) < 0.8
    limits = torch.randn(2, 2, rows, generator=generator).mul(2).round() / 4
    check(scores, thresholds=limits, **options)
    for top_k in (draw(columns + 1), columns * (seed % 3)):
        check(scores, top_k=top_k, **options)


@pytest.mark.interpreted
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 65, 100])
def test_word_boundaries(columns: int):
    scores = torch.randn(1, 1, 2, columns)
    for top_k in {1, columns // 2, columns}:
        check(scores, top_k=top_k, local_radius=0)
    check(scores, thresholds=torch.zeros(1, 1, 2))


@pytest.mark.interpreted
def test_equal_scores_go_by_block(chunk: int):
    for value in (-0.0, 3.5, -3.5, math.inf, -math.inf, math.nan):
        scores = torch.full((1, 1, 1, 100), value)
        for top_k in (1, 70):
            plan = check(scores, top_k=top_k)
            assert plan.indices[0, 0, 0, :top_k].tolist() == list(range(top_k))
    mixed = torch.tensor([-0.0, 0.0]).repeat(50).view(1, 1, 1, 100)
    assert check(mixed, top_k=31).indices[0, 0, 0, :31].tolist() == list(range(31))


@pytest.mark.interpreted
def test_neighbouring_floats_and_extremes(chunk: int):
    """Scores one unit apart, subnormals, and the ends of float32: only the order counts."""
    bits = torch.arange(-40, 40, dtype=torch.int32)
    near_one = (bits + torch.tensor(1.0).view(torch.int32)).view(torch.float32)
    tiny = torch.cat([bits[40:].view(torch.float32), -bits[40:].view(torch.float32)])
    ends = torch.tensor([3.4e38, -3.4e38, 1e-38, -1e-38]).repeat(20)
    for values in (near_one, -near_one, tiny, ends):
        scores = values[torch.randperm(80, generator=torch.Generator().manual_seed(1))]
        for top_k in (1, 17):
            check(scores.view(1, 1, 1, 80), top_k=top_k)
        check(scores.view(1, 1, 1, 80), thresholds=scores[:1].view(1, 1, 1))


@pytest.mark.interpreted
def test_a_score_equal_to_its_threshold_is_not_exact():
    scores = torch.tensor([0.5, 0.5 + 2**-20, 0.0, math.nan, math.inf]).view(1, 1, 1, 5)
    plan = check(scores, thresholds=torch.full((1, 1, 1), 0.5))
    assert mask_from_plan(plan).flatten().tolist() == [False, True, False, False, True]
    for limit in (math.inf, math.nan):
        assert not check(scores, thresholds=torch.full((1, 1, 1), limit)).counts.any()
    everything = check(scores, thresholds=torch.full((1, 1, 1), -math.inf))
    assert everything.counts.tolist() == [[[4]]]


@pytest.mark.interpreted
def test_nothing_is_live(chunk: int):
    scores = tied(1, 2, 3, 70)
    live = torch.zeros(1, 2, 70, dtype=torch.bool)
    options = {"sinks": [(0, 4)], "dense_rows": [(0, 1)], "local_radius": 1, "live": live}
    assert not check(scores, top_k=5, **options).counts.any()
    live[0, 1, 3] = True
    assert check(scores, top_k=5, **options).counts.tolist() == [[[0, 0, 0], [1, 1, 1]]]


@pytest.mark.interpreted
def test_long_rows_have_wide_lists():
    """32,768 key blocks and more have int32 lists, and rows of several chunks."""
    scores = torch.randn(1, 1, 1, 32770).mul(4).round().div(4)
    plan = check(scores, top_k=40, sinks=[(32760, 32770)], local_radius=1)
    assert plan.indices.dtype == torch.int32
    below = check(scores[..., :32767], thresholds=torch.full((1, 1, 1), 3.0))
    assert below.indices.dtype == torch.int16


@pytest.mark.interpreted
def test_any_strides():
    scores = tied(2, 5, 2, 40)
    live = torch.rand(2, 5, 40) < 0.7
    whole = mask_from_plan(check(scores, top_k=9, live=live))
    part = select(scores[:, 1:4], top_k=9, live=live[:, 1:4])
    assert mask_from_plan(part).equal(whole[:, 1:4])
    turned = scores.transpose(2, 3).contiguous().transpose(2, 3)
    assert mask_from_plan(select(turned, top_k=9, live=live)).equal(whole)


@pytest.mark.interpreted
def test_operator_keeps_its_promises():
    scores, live = tied(1, 2, 3, 40), torch.rand(1, 1, 40) < 0.7
    for limits, alive in ((None, live), (torch.zeros(1, 2, 3), None)):
        arguments = (scores, limits, 3, 40, [0, 1], [2, 3], 1, alive, 20)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(_operator, arguments, test_utils=checks)


def launches_of(scores: Tensor, live: Tensor | None = None, **options):
    return lambda: select(scores, live=live, **options)


def test_compiles(record_launches, compile_launch, target: str):
    live = torch.ones(1, 2, 300, dtype=torch.bool)
    for columns, alive in itertools.product((300, 5000), (None, live)):
        if target != "sm_90" and (columns == 5000 or alive is None):
            continue
        scores = torch.zeros(1, 2, 5, columns)
        alive = None if alive is None else torch.ones(1, 2, columns, dtype=torch.bool)
        for launch in record_launches(launches_of(scores, alive, top_k=3)):
            compile_launch(launch, target)
    thresholds = torch.zeros(1, 2, 5)
    (launch,) = record_launches(launches_of(torch.zeros(1, 2, 5, 300), thresholds=thresholds))
    compile_launch(launch, target)


def test_nothing_compiles_again_for_other_sizes_and_options(record_launches):
    def variants(batch: int, heads: int, rows: int, columns: int, **options) -> set[str]:
        scores = torch.zeros(batch, heads, rows, columns)
        return {launch.key for launch in record_launches(launches_of(scores, **options))}

    first = variants(1, 1, 1, 1, top_k=1)
    assert len(first) == 2
    for shape in ((1, 2, 3, 5), (2, 3, 7, 16), (1, 16, 16, 600), (3, 5, 9, 2048)):
        for top_k, sinks, radius in ((0, [], -1), (1, [(0, 1)], 1), (16, [(2, 3), (4, 5)], 16)):
            options = {"top_k": top_k, "sinks": sinks, "local_radius": radius}
            assert variants(*shape, **options) == first, (shape, options)
    long = variants(1, 1, 1, 2049, top_k=1)
    assert len(long) == 2 and len(long & first) == 1  # the cut of long rows is another variant
    assert variants(2, 3, 7, 32767, top_k=5) == long
