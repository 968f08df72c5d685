"""The public landmark tree and its prepared plan; graphs are simulated where there is no GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

from solspark.methods import reblock as methods
from solspark.methods.reblock import (
    PreparedLandmarkTreeV2Permutation,
    recursive_landmark_tree_v2_blocks,
    recursive_landmark_tree_v2_reference,
    spark_block,
    spark_reblock,
)

GRID = (3, 10, 11)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fanout": 16, "initial_order": "hilbert_hwt"},
        {"max_children": [4, 2], "distance": "euclidean", "validate": False},
        {"landmark_mode": "mean", "landmark_count": 64, "order_mode": "preserve_parent_order"},
        {"aggregation": "max", "proxy_iterations": 4, "seed_rule": "endpoint_order"},
        {"fanout_mode": "arbitrary_fanout", "root_fanout": 4, "final_fanout": 5},
        {"mean_mode": "metric_unit", "score_precision": "fp32", "update_rule": "medoid"},
        {"group_size": [8, 4], "midpoint_direction_mode": "fused"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_public_reference(options: dict, dtype: torch.dtype):
    x = gaussian(2, 330, 32, dtype=dtype)
    got = spark_reblock(x, grid_shape=GRID, **options)
    expected = recursive_landmark_tree_v2_reference(x, grid_shape=GRID, **options)
    assert got.permutation.equal(expected.permutation)
    assert got.inverse_permutation is not None and expected.inverse_permutation is not None
    assert got.inverse_permutation.equal(expected.inverse_permutation)
    assert got.permutation.dtype == torch.int64
    assert got.active_tokens == 320 and got.num_excluded == 10


def test_names_and_defaults():
    assert recursive_landmark_tree_v2_blocks is spark_reblock is spark_block
    x = gaussian(1280, 16)
    default = spark_reblock(x, grid_shape=(8, 10, 16))
    assert default.hierarchy.fanout == (8,)
    assert default.hierarchy.level_sizes == (1, 8, 16, 20)
    assert spark_reblock(x, grid_shape=(8, 10, 16), fanout=16).hierarchy.fanout == (16,)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    names = inspect.signature(spark_reblock).parameters
    assert [n for n, p in names.items() if p.kind is not keyword_only] == ["samples"]


def test_conflicting_names_of_the_fanout():
    with pytest.raises(ValueError, match="fanout: conflicting"):
        spark_reblock(gaussian(64, 8), grid_shape=(4, 4, 4), fanout=8, max_children=16)


def test_the_reference_checks_like_the_method():
    for function in (spark_reblock, recursive_landmark_tree_v2_reference):
        with pytest.raises(ValueError, match="grid_shape: expected a product"):
            function(gaussian(64, 8), grid_shape=(4, 4, 5))
        with pytest.raises(ValueError, match="samples: expected rows"):
            function(torch.full((64, 8), torch.nan), grid_shape=(4, 4, 4))
        with pytest.raises(TypeError, match="fan_out"):
            function(gaussian(64, 8), grid_shape=(4, 4, 4), fan_out=8)


# Prepared plans


def prepare(**options) -> PreparedLandmarkTreeV2Permutation:
    return PreparedLandmarkTreeV2Permutation(2, 330, 32, GRID, "cpu", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_plan_computes(dtype: torch.dtype):
    plan = prepare(fanout=16, initial_order="hilbert_thw")
    for seed in range(3):
        x = gaussian(2, 330, 32, seed=seed, dtype=dtype)
        got = plan.run(x)
        expected = spark_reblock(x, grid_shape=GRID, fanout=16, initial_order="hilbert_thw")
        assert got.permutation.equal(expected.permutation)
        assert got.inverse_permutation is not None and expected.inverse_permutation is not None
        assert got.inverse_permutation.equal(expected.inverse_permutation)
    assert not plan.graph_active and plan.capture_error is None
    assert plan.hierarchy == expected.hierarchy
    assert plan.split_count == len(expected.split_stats)
    with pytest.raises(RuntimeError, match="replay: no graph"):
        plan.replay()


def test_compact_indices_and_no_inverse():
    x = gaussian(2, 330, 32)
    plain, compact = prepare().run(x), prepare(compact_indices=True, return_inverse=False).run(x)
    assert plain.permutation.dtype == torch.int64 and compact.permutation.dtype == torch.int32
    assert compact.permutation.long().equal(plain.permutation)
    assert compact.inverse_permutation is None


def test_mean_modes_of_a_plan():
    x, norms = gaussian(2, 330, 32), gaussian(2, 330, seed=1).exp()
    metric = prepare(metric_unit_means=True).run(x)
    expected = spark_reblock(x, grid_shape=GRID, mean_mode="metric_unit")
    assert metric.permutation.equal(expected.permutation)
    unit = prepare(input_unit_means=True).run(x, input_inverse_norms=norms)
    expected = spark_reblock(x, grid_shape=GRID, mean_mode="input_unit", input_inverse_norms=norms)
    assert unit.permutation.equal(expected.permutation)
    with pytest.raises(ValueError, match="input_inverse_norms: needed"):
        prepare(input_unit_means=True).run(x)
    with pytest.raises(ValueError, match="input_inverse_norms: needs"):
        prepare().run(x, input_inverse_norms=norms)


def test_excluded_tokens_of_a_plan():
    x = gaussian(2, 330, 32)
    excluded = torch.arange(20).view(2, 10)
    got = prepare().run(x, excluded_indices=excluded)
    assert got.excluded_indices.equal(excluded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch: expected"),
        ({"tokens": 63}, "tokens: expected"),
        ({"dim": 1.5}, "dim: expected"),
        ({"grid_shape": (3, 10, 12)}, "grid_shape: expected"),
        ({"input_unit_means": True, "metric_unit_means": True}, "input_unit_means: exclusive"),
        ({"metric_unit_means": True, "mean_mode": "input_unit"}, "mean_mode: give either"),
        ({"max_children": 3}, "max_children: "),
    ],
)
def test_bad_plans_are_refused_when_made(change: dict, message: str):
    arguments = {"batch": 2, "tokens": 330, "dim": 32, "grid_shape": GRID, **change}
    with pytest.raises(ValueError, match=message):
        PreparedLandmarkTreeV2Permutation(**arguments)


def test_too_many_tokens_for_compact_indices():
    with pytest.raises(ValueError, match="compact_indices: "):
        PreparedLandmarkTreeV2Permutation(2**25, 64, 8, (4, 4, 4), compact_indices=True)


def test_samples_must_be_as_prepared():
    plan = prepare()
    with pytest.raises(TypeError, match="samples: expected a tensor"):
        plan.run([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"samples: expected \(2, 330, 32\)"):
        plan.run(gaussian(2, 330, 16))
    plan.run(gaussian(2, 330, 32))
    with pytest.raises(ValueError, match=r"samples: expected torch.float32 as prepared"):
        plan.run(gaussian(2, 330, 32, dtype=torch.bfloat16))


class FakeGraph:
    """Replays like a CUDA graph: recomputes from the same input into the same outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None):
        self.captures, self.replays, self.error = 0, 0, error
        monkeypatch.setattr(methods, "_can_capture", lambda device: True)
        monkeypatch.setattr(methods, "_capture_graph", self.capture)

    def capture(self, compute: Callable, device: torch.device) -> tuple:
        self.captures += 1
        if self.error is not None:
            raise self.error
        outputs = compute()

        def replay() -> None:
            self.replays += 1
            again = compute()
            outputs.permutation.copy_(again.permutation)
            if outputs.inverse_permutation is not None:
                outputs.inverse_permutation.copy_(again.inverse_permutation)

        return outputs, replay


def expected_of(x: torch.Tensor) -> torch.Tensor:
    return spark_reblock(x, grid_shape=GRID).permutation


def test_the_second_run_captures_and_later_results_leave_earlier_ones_alone(monkeypatch):
    graph = FakeGraph(monkeypatch)
    plan = prepare()
    inputs = [gaussian(2, 330, 32, seed=seed) for seed in range(4)]
    results = []
    for number, x in enumerate(inputs):
        results.append(plan.run(x))
        assert plan.graph_active == (number > 0)
    assert (graph.captures, graph.replays) == (1, 3)
    for x, result in zip(inputs, results, strict=True):
        assert result.permutation.equal(expected_of(x))
        assert result.inverse_permutation is not None
        assert result.inverse_permutation.equal(result.permutation.argsort(-1))
        assert result.block_indices.data_ptr() == result.permutation.data_ptr()


def test_static_outputs_are_the_graphs_own_and_the_next_run_overwrites_them(monkeypatch):
    FakeGraph(monkeypatch)
    plan = prepare(static_outputs=True)
    inputs = [gaussian(2, 330, 32, seed=seed) for seed in range(3)]
    plan.run(inputs[0])
    second = plan.run(inputs[1])
    kept = second.permutation.clone()
    third = plan.run(inputs[2])
    assert third.permutation.data_ptr() == second.permutation.data_ptr()
    assert second.permutation.equal(expected_of(inputs[2]))
    assert kept.equal(expected_of(inputs[1]))


def test_a_producer_writes_straight_into_the_graphs_input(monkeypatch):
    FakeGraph(monkeypatch)
    plan = prepare()
    assert plan.graph_input is None
    buffer = plan.acquire_graph_input(torch.float32)
    assert buffer.shape == (2, 330, 32) and plan.acquire_graph_input() is buffer
    for seed in range(3):
        buffer.copy_(gaussian(2, 330, 32, seed=seed))
        got = plan.run(buffer)
        assert plan.graph_input is buffer
        assert got.permutation.equal(expected_of(gaussian(2, 330, 32, seed=seed)))
    buffer.copy_(gaussian(2, 330, 32, seed=7))
    assert plan.replay().permutation.equal(expected_of(buffer))
    with pytest.raises(ValueError, match=r"samples: expected torch.float32"):
        plan.acquire_graph_input(torch.float16)


def test_the_input_norms_have_a_buffer_too(monkeypatch):
    FakeGraph(monkeypatch)
    plan = prepare(input_unit_means=True)
    x = gaussian(2, 330, 32)
    for seed in range(3):
        norms = gaussian(2, 330, seed=seed).exp()
        got = plan.run(x, input_inverse_norms=norms)
        expected = spark_reblock(
            x, grid_shape=GRID, mean_mode="input_unit", input_inverse_norms=norms
        )
        assert got.permutation.equal(expected.permutation)
    assert plan.graph_inverse_norms is not None and plan.graph_inverse_norms.equal(norms)


def test_known_norms_reach_the_graph(monkeypatch):
    FakeGraph(monkeypatch)
    plan = prepare()
    x = gaussian(2, 330, 32)
    lowest = torch.arange(10).expand(2, 10)
    for _ in range(3):
        assert plan.run(x, squares=torch.ones(2, 330)).excluded_indices.equal(lowest)
        assert not plan.run(x).excluded_indices.equal(lowest)
    plan.graph_squares.fill_(1.0)
    assert plan.run(x, squares=plan.graph_squares).excluded_indices.equal(lowest)


def test_excluded_tokens_and_a_refusal_keep_the_graph_out(monkeypatch):
    graph = FakeGraph(monkeypatch)
    plan = prepare()
    x = gaussian(2, 330, 32)
    for _ in range(3):
        plan.run(x, excluded_indices=torch.arange(20).view(2, 10))
        plan.run(x, allow_cuda_graph=False)
    assert (graph.captures, plan.graph_active) == (0, False)


def test_a_failed_capture_is_reported_once_and_the_plan_goes_on(monkeypatch):
    failure = RuntimeError("operation not permitted when stream is capturing")
    graph = FakeGraph(monkeypatch, failure)
    plan = prepare()
    x = gaussian(2, 330, 32)
    plan.run(x)
    with pytest.warns(RuntimeWarning, match=r"capture failed.*not permitted"):
        second = plan.run(x)
    third = plan.run(x)
    assert plan.capture_error is failure and not plan.graph_active
    assert graph.captures == 1
    assert second.permutation.equal(expected_of(x)) and third.permutation.equal(expected_of(x))
    with pytest.raises(RuntimeError, match="capture failed"):
        plan.replay()


@pytest.mark.parametrize("power", [-20, 20])
def test_a_plan_ignores_the_scale_of_its_input(power: int):
    x = gaussian(2, 330, 32, dtype=torch.bfloat16)
    plan = prepare()
    assert plan.run(x * 2.0**power).permutation.equal(plan.run(x).permutation)


@pytest.mark.gpu
def test_graph_replay_equals_eager_on_a_gpu():
    x = gaussian(2, 330, 128, dtype=torch.bfloat16).cuda()
    plan = PreparedLandmarkTreeV2Permutation(2, 330, 128, GRID, "cuda")
    first = plan.run(x)
    second = plan.run(x)
    other = plan.run(x.flip(1).contiguous())
    assert plan.graph_active and plan.capture_error is None
    assert second.permutation.equal(first.permutation)
    assert other.permutation.equal(
        plan.run(x.flip(1).contiguous(), allow_cuda_graph=False).permutation
    )
