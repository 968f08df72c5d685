"""Installing, counting, refusing and restoring on a real tiny H3 transformer."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import h3_sparse_attention
from solspark.errors import MissingDependencyError
from solspark.integrations.h3_processor import H3SparseAttentionProcessor
from solspark.integrations.install import install
from solspark.integrations.minimax_h3 import (
    install_h3_sol_attn,
    install_h3_spark_attn,
    install_h3_sparse_attention,
)

ALL_SPARSE: dict[str, Any] = {"warmup_ratio": 0.0, "dense_layers": 0}
TENTH: dict[str, Any] = {"sol_route_topk_ratio": 0.1, "sol_force_local_blocks": False}


def processors(transformer: Any) -> list[Any]:
    return [block.attn.get_processor() for block in transformer.transformer_blocks]


# ---------------------------------------------------------------------------------- counting


def test_counters(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=5) as plugin:
        denoise(transformer, make_request(), 5)
        summary = plugin.summary()
    calls = summary["processor_calls"]
    assert calls["dense:warmup"] == 4 and calls["dense:dense_layer"] == 4
    assert calls["sparse:sol"] == 12
    assert summary["completed_evaluations"] == summary["total_evaluations"] == 5
    assert [row["calls"] for row in summary["by_layer"]] == [
        {"dense:warmup": 1, "dense:dense_layer": 4},
        *[{"dense:warmup": 1, "sparse:sol": 4}] * 3,
    ]
    assert [row["calls"] for row in summary["by_evaluation"]] == [
        {"dense:warmup": 4},
        *[{"dense:dense_layer": 1, "sparse:sol": 3}] * 4,
    ]
    assert summary["by_evaluation"][0]["density"] is None
    assert 0 < summary["by_evaluation"][1]["density"] < 1
    assert all(row["seconds"] > 0 for row in summary["by_evaluation"])
    assert summary["grid"] == (6, 8, 8) and summary["rotation"]
    assert summary["target_video_tokens"] == summary["sparse_video_tokens"] == 384
    assert summary["sol_backend"] == "eager"
    assert summary["implementations"]["block_sparse_attention"] == "eager"
    records = plugin.records()
    assert len(records) == 20
    assert [record["layer"] for record in records] == [0, 1, 2, 3] * 5
    json.dumps(summary), json.dumps(records)


def test_resolved_execution_is_reported(transformer: Any, make_request: Any, denoise: Any) -> None:
    for execution in ("threshold", "packed_external", "packed_external_no_route_qk", "fused"):
        with install_h3_spark_attn(
            transformer,
            num_denoise_steps=1,
            min_tokens=0,
            sol_route_topk_execution=execution,
            **ALL_SPARSE,
        ) as plugin:
            assert plugin.summary()["resolved"] == {}
            denoise(transformer, make_request(), 1)
            resolved = plugin.summary()["resolved"]["sol_route_topk_execution"]
        assert resolved == {"requested": execution, "resolved": "exact_top_k"}


def test_summary_before_any_run(transformer: Any) -> None:
    plugin = install_h3_sol_attn(transformer)
    summary = plugin.summary()
    assert summary["sol_backend"] is None and summary["processor_calls"] == {}
    assert summary["completed_evaluations"] == 0


def test_dense_evaluations_are_bit_identical(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    plain = denoise(transformer, make_request(), 2)
    with install_h3_sol_attn(transformer, num_denoise_steps=2, warmup_ratio=1.0) as plugin:
        assert torch.equal(denoise(transformer, make_request(), 2), plain)
        assert plugin.summary()["processor_calls"] == {"dense:warmup": 8}


def test_extra_dense_evaluations_layers_and_suffix(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    with install_h3_sol_attn(
        transformer,
        num_denoise_steps=5,
        warmup_steps=1,
        trailing_dense_evaluations=1,
        extra_dense_evaluations=(2,),
        extra_dense_layers=(3,),
    ) as plugin:
        denoise(transformer, make_request(), 5)
        calls = plugin.summary()["processor_calls"]
    assert calls["dense:warmup"] == calls["dense:trailing"] == 4
    assert calls["dense:extra_dense_evaluation"] == 4
    assert calls["dense:dense_layer"] == calls["dense:extra_dense_layer"] == 2
    assert calls["sparse:sol"] == 4


def test_schedule_of_ratios(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_spark_attn(
        transformer,
        num_denoise_steps=3,
        min_tokens=0,
        topk_ratio=0.1,
        sol_route_topk_schedule=(1.0, 0.5, 0.1),
        **ALL_SPARSE,
    ) as plugin:
        denoise(transformer, make_request(), 3)
        records = plugin.records()
    for evaluation, expected in enumerate((6 / 6, 3 / 6, 1 / 6)):
        found = [r["video_density"] for r in records if r["evaluation"] == evaluation]
        assert found == [pytest.approx(expected)] * 4


def test_two_forwards_a_step(transformer: Any, make_request: Any) -> None:
    request = make_request()
    with (
        install_h3_sol_attn(
            transformer, num_denoise_steps=2, warmup_steps=1, evaluations_per_step=2
        ) as plugin,
        torch.no_grad(),
    ):
        for time in (0.0, 0.0, 0.5, 0.5):
            transformer(**request.inputs(time))
        calls = plugin.summary()["processor_calls"]
        assert calls["dense:warmup"] == 8 and calls["sparse:sol"] == 6
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            transformer(**request.inputs(0.6))


def test_log_density_off_reads_nothing(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_sol_attn(
        transformer, num_denoise_steps=1, sol_log_density=False, **ALL_SPARSE
    ) as plugin:
        denoise(transformer, make_request(), 1)
        assert {record["density"] for record in plugin.records()} == {None}
        assert "delivered_density" not in plugin.summary()["sol_route_density"]


# ------------------------------------------------------------------------- runs and reset()


def test_longer_schedule_is_refused(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=2) as plugin:
        with pytest.raises(RuntimeError, match=r"longer than num_denoise_steps.*reset\(\)"):
            denoise(transformer, make_request(), 3)
        assert plugin.summary()["completed_evaluations"] == 2
        plugin.reset()
        denoise(transformer, make_request(), 2)


def test_second_invocation_needs_reset(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=2, **ALL_SPARSE, **TENTH) as plugin:
        first = denoise(transformer, make_request(), 2)
        with pytest.raises(RuntimeError, match=r"second invocation without reset\(\)"):
            denoise(transformer, make_request(), 2)
        plugin.reset()
        assert plugin.summary()["completed_evaluations"] == 0
        assert torch.equal(denoise(transformer, make_request(), 2), first)


def test_second_invocation_after_a_short_run(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    """Counting on would shift warm-up and suffix of the second clip without a word."""
    with install_h3_sol_attn(transformer, num_denoise_steps=8) as plugin:
        denoise(transformer, make_request(), 3)
        with pytest.raises(RuntimeError, match=r"second invocation.*evaluation 3 of 8.*reset\(\)"):
            denoise(transformer, make_request(seed=1), 3)
        plugin.reset()
        denoise(transformer, make_request(seed=1), 8)


def test_a_run_that_broke_off_at_once_is_told_from_the_next(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=2) as plugin:
        denoise(transformer, make_request(), 1)
        with pytest.raises(RuntimeError, match=r"second invocation.*from 0 to 0"):
            denoise(transformer, make_request(), 2)
        plugin.reset()
        denoise(transformer, make_request(), 2)


def test_another_resolution_after_reset(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_spark_attn(
        transformer, num_denoise_steps=1, min_tokens=0, **ALL_SPARSE
    ) as plugin:
        for grid in ((6, 8, 8), (5, 4, 12), (6, 8, 8)):
            plugin.reset()
            denoise(transformer, make_request("t2va", grid), 1)
            assert plugin.summary()["grid"] == grid


def test_new_tensors_every_step_are_no_new_run(transformer: Any, make_request: Any) -> None:
    request = make_request()
    with install_h3_sol_attn(transformer, num_denoise_steps=3) as plugin, torch.no_grad():
        for time in (0.0, 0.3, 0.6):
            request.structure = {name: x.clone() for name, x in request.structure.items()}
            transformer(**request.inputs(time))
        assert plugin.summary()["processor_calls"]["sparse:sol"] == 6


def test_layout_is_derived_once_a_request(
    transformer: Any, make_request: Any, denoise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from solspark.integrations import h3_controller

    derived = []
    original = h3_controller.derive_layout
    monkeypatch.setattr(
        h3_controller, "derive_layout", lambda found: derived.append(1) or original(found)
    )
    with install_h3_sol_attn(transformer, num_denoise_steps=4):
        denoise(transformer, make_request(), 4)
    assert len(derived) == 1


def test_short_run_warns_at_exit(transformer: Any, make_request: Any, denoise: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"3 of the 19 evaluations.*num_denoise_steps=3"):
        with install_h3_sol_attn(transformer):
            denoise(transformer, make_request(), 3)
    assert processors(transformer)[0].__class__.__name__ == "MiniMaxH3AttnProcessor"


# -------------------------------------------------------------------------------- restoring


def test_exit_puts_back_the_same_objects(transformer: Any) -> None:
    before = processors(transformer)
    refiner = transformer.token_refiner.refiner_blocks[0].attn.get_processor()
    with install_h3_sol_attn(transformer) as plugin:
        assert all(isinstance(p, H3SparseAttentionProcessor) for p in processors(transformer))
        assert transformer.token_refiner.refiner_blocks[0].attn.get_processor() is refiner
        assert plugin.active
    assert all(a is b for a, b in zip(processors(transformer), before, strict=True))
    assert not transformer._forward_pre_hooks and not plugin.active


def test_exception_in_the_body(transformer: Any, make_request: Any, denoise: Any) -> None:
    before = processors(transformer)
    with pytest.raises(ZeroDivisionError), install_h3_sol_attn(transformer):
        denoise(transformer, make_request(), 1)
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(processors(transformer), before, strict=True))
    assert not transformer._forward_pre_hooks


def test_exception_while_entering(transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = processors(transformer)
    attn = transformer.transformer_blocks[2].attn

    def fail(processor: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(attn, "set_processor", fail)
    plugin = install_h3_sol_attn(transformer)
    with pytest.raises(OSError, match="no"):
        plugin.apply()
    assert all(a is b for a, b in zip(processors(transformer), before, strict=True))
    assert not transformer._forward_pre_hooks and not plugin.active


def test_module_processors_are_put_back(transformer: Any) -> None:
    class Learned(nn.Module):
        def forward(self, attn: Any, hidden_states: Tensor, *rest: Any) -> Tensor:
            return hidden_states

    attn = transformer.transformer_blocks[1].attn
    original, learned = attn.get_processor(), Learned()
    del attn.processor
    attn.set_processor(learned)
    try:
        with pytest.warns(RuntimeWarning, match="Learned on 1 layers"):
            plugin = install_h3_sol_attn(transformer).apply()
        assert attn.get_processor() is not learned
        plugin.remove()
        assert attn.get_processor() is learned and attn._modules["processor"] is learned
    finally:
        attn.set_processor(original)


def test_apply_and_remove(transformer: Any, make_request: Any, denoise: Any) -> None:
    plugin = install_h3_sol_attn(transformer, num_denoise_steps=1)
    assert plugin.apply() is plugin
    with pytest.raises(RuntimeError, match="installed already"):
        plugin.apply()
    denoise(transformer, make_request(), 1)
    plugin.remove()
    plugin.remove()
    assert not transformer._forward_pre_hooks
    assert plugin.summary()["completed_evaluations"] == 1
    with plugin:
        assert plugin.summary()["completed_evaluations"] == 0


def test_nested_install_is_refused(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=1) as outer:
        ours = processors(transformer)
        with pytest.raises(RuntimeError, match="installed on this transformer already"):
            install_h3_spark_attn(transformer).apply()
        assert processors(transformer) == ours and len(transformer._forward_pre_hooks) == 1
        denoise(transformer, make_request(), 1)
        assert outer.summary()["completed_evaluations"] == 1


def test_leaving_below_a_wrapper_keeps_it_and_leaves_nothing_sparse(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    plain = denoise(transformer, make_request(), 1)
    originals = processors(transformer)
    attn = transformer.transformer_blocks[1].attn
    plugin = install_h3_sol_attn(transformer, num_denoise_steps=1, **ALL_SPARSE, **TENTH).apply()
    ours = attn.get_processor()

    def wrapper(*args: Any) -> Tensor:
        return ours(*args)

    attn.set_processor(wrapper)
    assert plugin.summary()["replaced_processors"] == ["transformer_blocks.1.attn"]
    with pytest.warns(RuntimeWarning, match=r"transformer_blocks\.1\.attn was replaced"):
        plugin.remove()
    assert attn.get_processor() is wrapper
    assert plugin.summary()["replaced_processors"] == ["transformer_blocks.1.attn"]
    # What the wrapper still holds passes on to the original.
    assert torch.equal(denoise(transformer, make_request(), 1), plain)
    attn.set_processor(originals[1])


def test_a_processor_put_back_late_is_unwrapped(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    before = processors(transformer)
    with install_h3_sol_attn(transformer):
        ours = processors(transformer)
    transformer.transformer_blocks[0].attn.set_processor(ours[0])
    with install_h3_sol_attn(transformer):
        assert processors(transformer)[0].original is before[0]
    assert processors(transformer)[0] is before[0]


def test_replaced_processor_is_noticed(transformer: Any, make_request: Any, denoise: Any) -> None:
    before = processors(transformer)
    with pytest.warns(RuntimeWarning, match="was replaced inside the context"):
        with install_h3_sol_attn(transformer, num_denoise_steps=1, **ALL_SPARSE) as plugin:
            transformer.transformer_blocks[3].attn.set_processor(before[3])
            denoise(transformer, make_request(), 1)
            summary = plugin.summary()
    assert summary["replaced_processors"] == ["transformer_blocks.3.attn"]
    assert summary["processor_calls"]["sparse:sol"] == 3


def test_plugin_holds_no_layout_after_exit(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    with install_h3_spark_attn(
        transformer, num_denoise_steps=1, min_tokens=0, **ALL_SPARSE
    ) as plugin:
        denoise(transformer, make_request(), 1)
        assert plugin.controller.layout is not None and plugin.controller.cache
        plugin.reset()
        assert plugin.controller.layout is None and not plugin.controller.cache
        denoise(transformer, make_request(), 1)
    assert plugin.controller.layout is None and not plugin.controller.cache
    gc.collect()


# ----------------------------------------------------------------------------- targets


def test_a_pipeline_stands_for_the_transformer_it_has(transformer: Any) -> None:
    for pipe in (
        SimpleNamespace(transformer=transformer, transformer_ref=None),
        SimpleNamespace(transformer=None, transformer_ref=transformer),
        SimpleNamespace(transformer_ref=transformer),
    ):
        with install_h3_sol_attn(pipe) as plugin:
            assert plugin.transformer is transformer
    both = SimpleNamespace(transformer=transformer, transformer_ref=transformer)
    with pytest.raises(TypeError, match="got transformer, transformer_ref"):
        install_h3_sol_attn(both).apply()


def test_nothing_is_looked_at_before_entering() -> None:
    plugin = install_h3_sol_attn(object())
    with pytest.raises(TypeError, match="transformer_blocks, got object"):
        plugin.apply()


def test_other_transformers_are_refused() -> None:
    other = nn.Module()
    other.transformer_blocks = nn.ModuleList([nn.Identity()])
    with pytest.raises(TypeError, match=r"transformer_blocks\.0\.attn, but NoneType has no get_"):
        install_h3_sol_attn(other).apply()


def test_friendly_install(transformer: Any, make_request: Any, denoise: Any) -> None:
    pipe = SimpleNamespace(transformer=transformer)
    with install(pipe, method="sol", num_denoise_steps=1) as plugin:
        denoise(transformer, make_request(), 1)
        assert plugin.summary()["preset"] == "sol"
    assert not transformer._forward_pre_hooks
    undo = install(transformer, num_denoise_steps=1)
    assert undo.plugin.summary()["preset"] == "spark"
    undo()
    assert not transformer._forward_pre_hooks
    with pytest.raises(ValueError, match="method: expected one of spark, sol; got 'flash'"):
        install(transformer, method="flash")


def test_public_package_offers_the_same_objects() -> None:
    assert h3_sparse_attention.install_h3_sol_attn is install_h3_sol_attn
    assert h3_sparse_attention.install_h3_spark_attn is install_h3_spark_attn
    assert h3_sparse_attention.install_h3_sparse_attention is install_h3_sparse_attention
    assert h3_sparse_attention.H3SparseAttentionConfig().sol_dense_layers == 1
    assert callable(h3_sparse_attention.spark_reblock)
    assert callable(h3_sparse_attention.spark_reweight)
    assert h3_sparse_attention.spark_block is h3_sparse_attention.spark_reblock
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        _ = h3_sparse_attention.speed


def test_config_type_is_checked(transformer: Any) -> None:
    with pytest.raises(TypeError, match="expected an H3SparseAttentionConfig, got dict"):
        install_h3_sparse_attention(transformer, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("install_it", [install_h3_sol_attn, install_h3_spark_attn])
def test_missing_diffusers_says_what_to_install(
    install_it: Callable[..., Any], transformer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "diffusers.models.transformers", None)
    before = processors(transformer)
    with pytest.raises(MissingDependencyError, match=r"pip install .*solspark\[diffusers\]"):
        install_it(transformer)
    assert processors(transformer) == before


def test_parallel_transformer_is_refused(transformer: Any) -> None:
    attn = transformer.transformer_blocks[2].attn
    attn.processor._parallel_config = object()
    try:
        with pytest.raises(RuntimeError, match=r"context parallelism.*blocks\.2"):
            install_h3_sol_attn(transformer).apply()
    finally:
        del attn.processor._parallel_config
    transformer._parallel_config = SimpleNamespace(context_parallel_config=object())
    try:
        with pytest.raises(RuntimeError, match="context parallelism"):
            install_h3_sol_attn(transformer).apply()
    finally:
        transformer._parallel_config = None
    assert not transformer._forward_pre_hooks


def test_layers_out_of_range(transformer: Any) -> None:
    with pytest.raises(ValueError, match="extra_dense_layers: expected layers below 4, got 4"):
        install_h3_sol_attn(transformer, extra_dense_layers=(1, 4)).apply()


# ------------------------------------------------------------------- what the sparse path takes


def test_mask_is_refused_on_the_sparse_path_only(transformer: Any, make_request: Any) -> None:
    request = make_request()
    attn = transformer.transformer_blocks[1].attn
    hidden = torch.randn(1, request.tokens, 192)
    mask = torch.ones(1, 1, 1, request.tokens, dtype=torch.bool)
    mask[..., :5] = False
    with torch.no_grad():
        masked, plain = attn(hidden, None, mask), attn(hidden)
        assert not torch.equal(masked, plain)
        with install_h3_sol_attn(transformer, num_denoise_steps=2, warmup_steps=1):
            # Before the first forward, a direct call of a module is dense.
            assert torch.equal(attn(hidden, None, mask), masked)
            transformer(**request.inputs(0.0))
            assert torch.equal(attn(hidden, None, mask), masked)
            transformer(**request.inputs(0.5))
            with pytest.raises(RuntimeError, match=r"attention_mask: .* got \[1, 1, 1, 435\]"):
                attn(hidden, None, mask)
            attn(hidden)


def side_by_side(requests: list[Any], time: float) -> dict[str, Any]:
    """Return one forward's inputs for several requests of one layout, a sample each."""
    inputs = [request.inputs(time) for request in requests]
    tensors = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
    return {**inputs[0], **{name: torch.cat([each[name] for each in inputs]) for name in tensors}}


@pytest.mark.parametrize("task", ["t2va", "ref2va"])
@pytest.mark.parametrize(
    ("install", "options"),
    [
        (install_h3_sol_attn, {"sol_tau": 0.5}),
        (install_h3_sol_attn, TENTH),
        (install_h3_sol_attn, {"sol_video_tail_mode": "pad", **TENTH}),
        (install_h3_spark_attn, {"min_tokens": 0}),
        (install_h3_spark_attn, {"min_tokens": 0, "preset": "fast"}),
    ],
    ids=["sol tau", "sol budget", "sol pad", "spark", "spark fast"],
)
def test_samples_of_a_batch_are_routed_and_served_alone(
    transformer: Any, make_request: Any, install: Any, options: dict[str, Any], task: str
) -> None:
    requests = [make_request(task, (6, 5, 12), seed=seed) for seed in (1, 2, 3)]
    with install(transformer, num_denoise_steps=1, **ALL_SPARSE, **options) as plugin:
        found = []
        for some in (requests, *([each] for each in requests)):
            plugin.reset()
            with torch.no_grad():
                out = transformer(**side_by_side(some, 0.4))
            summary = plugin.summary()
            assert summary["processor_calls"]["sparse:sol"] == 4
            found.append((out, [row["density"] for row in summary["by_layer"]]))
    (together, densities), *alone = found
    for sample, (out, _) in enumerate(alone):
        for ours, wanted in zip(together, out, strict=True):
            torch.testing.assert_close(ours[sample : sample + 1], wanted)
    for layer, density in enumerate(densities):
        mean = sum(each[layer] for _, each in alone) / 3
        assert density == pytest.approx(mean) and density < 1
    outputs = [out[0] for out, _ in alone]
    assert not torch.allclose(outputs[0], outputs[1])


def test_other_lengths_than_the_layouts_are_refused(transformer: Any, make_request: Any) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=1, **ALL_SPARSE), torch.no_grad():
        transformer(**make_request().inputs(0.0))
        with pytest.raises(RuntimeError, match=r"expected the 435 rows .* got 434"):
            transformer.transformer_blocks[1].attn(torch.randn(1, 434, 192))


def test_positional_call(transformer: Any, make_request: Any) -> None:
    request = make_request()
    inputs = request.inputs(0.5)
    with install_h3_sol_attn(transformer, num_denoise_steps=2, **ALL_SPARSE, **TENTH) as plugin:
        with torch.no_grad():
            by_name = transformer(**inputs)
            names = (
                "hidden_states",
                "audio_hidden_states",
                "encoder_hidden_states",
                "timestep",
                "timestep_indices",
                "token_tags",
                "position_ids",
                "video_indices",
                "audio_indices",
                "text_indices",
                "attention_kwargs",
                "return_dict",
            )
            positional = transformer(*(inputs[name] for name in names))
        assert plugin.summary()["processor_calls"]["sparse:sol"] == 8
    assert all(torch.equal(a, b) for a, b in zip(by_name, positional, strict=True))


@pytest.mark.parametrize(("limit", "sparse"), [(436, False), (435, True)])
def test_min_tokens_is_strict(
    transformer: Any, make_request: Any, denoise: Any, limit: int, sparse: bool
) -> None:
    with install_h3_sol_attn(
        transformer, num_denoise_steps=1, min_tokens=limit, **ALL_SPARSE
    ) as plugin:
        denoise(transformer, make_request(), 1)
        calls = plugin.summary()["processor_calls"]
    assert calls.get("dense:short_sequence", 0) == (0 if sparse else 4)
    assert calls.get("sparse:sol", 0) == (4 if sparse else 0)


def test_short_sequences_need_no_layout(transformer: Any, make_request: Any) -> None:
    request = make_request()
    request.structure["position_ids"][-1] += 7.0
    with install_h3_spark_attn(transformer, num_denoise_steps=1, **ALL_SPARSE) as plugin:
        with torch.no_grad():
            transformer(**request.inputs(0.0))
        assert plugin.summary()["processor_calls"] == {"dense:short_sequence": 4}


@pytest.mark.parametrize("install_it", [install_h3_sol_attn, install_h3_spark_attn])
def test_video_without_a_complete_block_is_dense(
    transformer: Any, make_request: Any, denoise: Any, install_it: Callable[..., Any]
) -> None:
    request = make_request("t2va", (7, 3, 3))
    plain = denoise(transformer, request, 1)
    with install_it(transformer, num_denoise_steps=1, min_tokens=0, **ALL_SPARSE) as plugin:
        assert torch.equal(denoise(transformer, request, 1), plain)
        assert plugin.summary()["processor_calls"] == {"dense:no_complete_block": 4}


def test_pad_needs_a_suffix(transformer: Any, make_request: Any) -> None:
    request = make_request("t2va", (9, 4, 12), text=3, audio=6)
    options = {"sol_video_tail_mode": "pad", "sol_route_topk_ratio": 0.5}
    with install_h3_sol_attn(transformer, num_denoise_steps=1, **ALL_SPARSE, **options):
        with pytest.raises(ValueError, match=r"16 rows .* got 15: suffix too short"):
            transformer(**request.inputs(0.0))


def test_missing_structure(transformer: Any, make_request: Any) -> None:
    request = make_request()
    inputs = request.inputs(0.0)
    with install_h3_sol_attn(transformer, num_denoise_steps=1):
        with pytest.raises(RuntimeError, match="token_tags: needed"):
            transformer(**{**inputs, "token_tags": None})


def test_layout_errors_stop_the_first_forward(transformer: Any, make_request: Any) -> None:
    """A layout that cannot be sparse is refused before minutes of dense warm-up."""
    request = make_request()
    request.structure["position_ids"][-1, 1] += 7.0
    with install_h3_sol_attn(transformer, num_denoise_steps=9):
        with pytest.raises(ValueError, match="not a dense grid"):
            transformer(**request.inputs(0.0))


def test_held_rows(transformer: Any, make_request: Any) -> None:
    inputs = make_request().inputs(0.0, 0.1)
    held = inputs["timestep_indices"].clone()
    held[-64:] = 1
    inputs["timestep_indices"] = held
    with install_h3_sol_attn(transformer, num_denoise_steps=1, **ALL_SPARSE):
        with pytest.raises(ValueError, match="mixed_timesteps='dense'"):
            transformer(**inputs)
    with (
        install_h3_sol_attn(
            transformer, num_denoise_steps=1, mixed_timesteps="dense", **ALL_SPARSE
        ) as plugin,
        pytest.warns(RuntimeWarning, match="runs densely"),
        torch.no_grad(),
    ):
        transformer(**inputs)
    assert plugin.summary()["processor_calls"] == {"dense:mixed_timesteps": 4}


@pytest.mark.parametrize("grid", [(6, 8, 8), (9, 4, 12)], ids=["V%64=0", "V%64=48"])
@pytest.mark.parametrize("install_it", [install_h3_sol_attn, install_h3_spark_attn])
def test_context_rows_attend_exactly(
    transformer: Any, make_request: Any, install_it: Callable[..., Any], grid: tuple[int, int, int]
) -> None:
    """Text, conditions and audio see every key; only target rows are approximated."""
    request = make_request("fl2va", grid)
    seen: list[Tensor] = []
    handle = transformer.transformer_blocks[0].attn.register_forward_hook(
        lambda module, args, output: seen.append(output)
    )
    try:
        with torch.no_grad():
            transformer(**request.inputs(0.0))
            with install_it(transformer, num_denoise_steps=1, min_tokens=0, **ALL_SPARSE, **TENTH):
                transformer(**request.inputs(0.0))
    finally:
        handle.remove()
    dense, sparse = seen
    start = request.tokens - request.video_tokens
    context = (dense - sparse)[:, :start].abs().max()
    video = (dense - sparse)[:, start:].abs().max()
    assert context <= 8 * torch.finfo(torch.float32).eps * dense.abs().max()
    assert video > 1e-3 * dense.abs().max()


def test_projections_are_called_not_read(transformer: Any, make_request: Any, denoise: Any) -> None:
    """LoRA and quantised layers have no plain weight."""

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, rows: Tensor) -> Tensor:
            return self.inner(rows)

    attn = transformer.transformer_blocks[1].attn
    saved = {name: getattr(attn, name) for name in ("to_q", "to_k", "to_v")}
    output = attn.to_out[0]
    options = {"num_denoise_steps": 1, **ALL_SPARSE, **TENTH}
    with install_h3_sol_attn(transformer, **options):
        plain = denoise(transformer, make_request(), 1)
    try:
        for name, module in saved.items():
            setattr(attn, name, Wrapped(module))
        attn.to_out[0] = Wrapped(output)
        with install_h3_sol_attn(transformer, **options):
            assert torch.equal(denoise(transformer, make_request(), 1), plain)
    finally:
        for name, module in saved.items():
            setattr(attn, name, module)
        attn.to_out[0] = output


def test_fusing_inside_the_context(transformer: Any, make_request: Any, denoise: Any) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=2, **ALL_SPARSE, **TENTH) as plugin:
        separate = denoise(transformer, make_request(), 2)
        plugin.reset()
        transformer.fuse_qkv_projections()
        fused = denoise(transformer, make_request(), 2)
    torch.testing.assert_close(fused, separate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(make_request: Any, dtype: torch.dtype) -> None:
    from solspark.integrations.tiny_h3 import build_tiny_h3_transformer

    transformer = build_tiny_h3_transformer(layers=2, dtype=dtype)
    request = make_request()
    with install_h3_spark_attn(
        transformer, num_denoise_steps=1, min_tokens=0, **ALL_SPARSE
    ) as plugin:
        with torch.no_grad():
            video, audio = transformer(**request.inputs(0.3))
        assert plugin.summary()["processor_calls"]["sparse:sol"] == 2
    assert video.isfinite().all() and audio.isfinite().all()


def test_inference_mode(transformer: Any, make_request: Any, denoise: Any) -> None:
    with torch.inference_mode():
        with install_h3_spark_attn(
            transformer, num_denoise_steps=2, min_tokens=0, **ALL_SPARSE
        ) as plugin:
            request = make_request()
            denoise(transformer, request, 2)
            assert plugin.summary()["processor_calls"]["sparse:sol"] == 8


# --------------------------------------------------------------------------------- backends


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Record (query rows, backend) of every call of diffusers' attention dispatcher."""
    from diffusers.models import attention_dispatch
    from diffusers.models.transformers import transformer_minimax_h3

    calls: list[tuple[int, Any]] = []
    original = attention_dispatch.dispatch_attention_fn

    def record(query: Tensor, *args: Any, backend: Any = None, **kwargs: Any) -> Tensor:
        calls.append((query.shape[1], None if backend is None else backend.value))
        return original(query, *args, backend=backend, **kwargs)

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", record)
    monkeypatch.setattr(transformer_minimax_h3, "dispatch_attention_fn", record)
    monkeypatch.setattr(
        attention_dispatch._AttentionBackendRegistry,
        "_active_backend",
        attention_dispatch._AttentionBackendRegistry._active_backend,
    )
    return calls


def test_dense_work_follows_the_users_backend(
    transformer: Any, make_request: Any, denoise: Any, dispatched: list[tuple[int, Any]]
) -> None:
    with install_h3_sol_attn(transformer, num_denoise_steps=2, warmup_steps=1, dense_layers=0):
        transformer.set_attention_backend("_native_math")
        assert processors(transformer)[0]._attention_backend == "_native_math"
        denoise(transformer, make_request(), 2)
    text = 11
    assert [call for call in dispatched if call[0] != text] == [
        *[(435, "_native_math")] * 4,
        *[(51, "_native_math")] * 4,
    ]
    # What the user set inside the context stays after it.
    assert processors(transformer)[0]._attention_backend == "_native_math"
    transformer.reset_attention_backend()


def test_reset_attention_backend_reaches_the_original(
    transformer: Any, dispatched: list[tuple[int, Any]]
) -> None:
    transformer.transformer_blocks[0].attn.set_attention_backend("_native_math")
    with install_h3_sol_attn(transformer):
        transformer.reset_attention_backend()
    assert processors(transformer)[0]._attention_backend is None


def test_dense_backend_serves_dense_calls_and_suffix(
    transformer: Any, make_request: Any, denoise: Any, dispatched: list[tuple[int, Any]]
) -> None:
    with install_h3_sol_attn(
        transformer,
        num_denoise_steps=2,
        warmup_steps=1,
        dense_layers=0,
        dense_backend="_native_math",
    ) as plugin:
        denoise(transformer, make_request(), 2)
        assert processors(transformer)[0]._attention_backend is None
        assert plugin.summary()["dense_backend"] == "_native_math"
    assert [call for call in dispatched if call[0] != 11] == [
        *[(435, "_native_math")] * 4,
        *[(51, "_native_math")] * 4,
    ]


def test_dense_backend_may_be_a_callable(transformer: Any, make_request: Any, denoise: Any) -> None:
    rows: list[int] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows.append(query.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    plain = denoise(transformer, make_request(), 1)
    with install_h3_sol_attn(
        transformer, num_denoise_steps=2, warmup_steps=1, dense_layers=0, dense_backend=attend
    ) as plugin:
        assert torch.equal(denoise(transformer, make_request(), 1), plain)
        plugin.reset()
        denoise(transformer, make_request(), 2)
        assert "attend" in plugin.summary()["dense_backend"]
    assert rows == [435] * 8 + [51] * 4


def test_unknown_or_impossible_dense_backends(
    transformer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"dense_backend: expected one of .* got 'cudnn'"):
        install_h3_sol_attn(transformer, dense_backend="cudnn")
    attn = transformer.transformer_blocks[1].attn
    original = attn.get_processor()
    attn.set_processor(lambda attn, hidden, *rest: hidden)
    plugin = install_h3_sol_attn(transformer, dense_backend="_native_math")
    with pytest.raises(ValueError, match=r"blocks\.1\.attn has function"):
        plugin.apply()
    attn.set_processor(original)
    assert not transformer._forward_pre_hooks


def test_processors_without_a_backend_show_none(transformer: Any) -> None:
    attn = transformer.transformer_blocks[1].attn
    original = attn.get_processor()
    attn.set_processor(lambda attn, hidden, *rest: hidden)
    with pytest.warns(RuntimeWarning, match="<lambda> on 1 layers"):
        plugin = install_h3_sol_attn(transformer).apply()
    ours = attn.get_processor()
    assert not hasattr(ours, "_attention_backend") and not hasattr(ours, "_parallel_config")
    plugin.remove()
    attn.set_processor(original)


def test_processors_of_others_are_named_where_they_no_longer_run(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    """An override that a sparse call would pass over in silence is said at once, and in reports."""
    seen: list[int] = []
    before = processors(transformer)
    base: Any = type(before[0])

    class Louder(base):
        def __call__(self, *arguments: Any, **options: Any) -> Tensor:
            seen.append(len(plugin.records()))
            return super().__call__(*arguments, **options)

    class Renamed(base):
        """Attends as its base does, so nothing is lost."""

    for layer, other in ((2, Louder()), (3, Renamed())):
        transformer.transformer_blocks[layer].attn.set_processor(other)
    try:
        with pytest.warns(RuntimeWarning, match=r"not diffusers' own \(.*Louder on 1 layers\)"):
            plugin = install_h3_sol_attn(
                transformer, num_denoise_steps=2, warmup_steps=1, dense_layers=0
            ).apply()
        denoise(transformer, make_request(), 2)
        (name,) = plugin.summary()["foreign_processors"]
        assert name.endswith("Louder") and len(seen) == 1
        plugin.remove()
    finally:
        for block, processor in zip(transformer.transformer_blocks, before, strict=True):
            block.attn.set_processor(processor)


# ------------------------------------------------------------------ other people's machinery


def test_accelerate_hooks(transformer: Any, make_request: Any, denoise: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    options = {"num_denoise_steps": 2, **ALL_SPARSE, **TENTH}
    with install_h3_sol_attn(transformer, **options):
        plain = denoise(transformer, make_request(), 2)
    hooks.add_hook_to_module(
        transformer, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
    )
    try:
        with install_h3_sol_attn(transformer, **options) as plugin:
            assert torch.equal(denoise(transformer, make_request(), 2), plain)
            assert plugin.summary()["processor_calls"]["sparse:sol"] == 8
    finally:
        hooks.remove_hook_from_module(transformer)


@pytest.mark.parametrize("install", [install_h3_sol_attn, install_h3_spark_attn])
def test_blocks_that_a_step_cache_skips_are_only_missing(
    transformer: Any, make_request: Any, denoise: Any, monkeypatch: pytest.MonkeyPatch, install: Any
) -> None:
    """Others' caches leave blocks out of some evaluations; no block may count on another."""
    skipping = transformer.transformer_blocks[1]
    usual = skipping.forward

    def cached(hidden: Tensor, *rest: Any) -> Tensor:
        return usual(hidden, *rest) if plugin.controller.evaluation == 0 else hidden

    monkeypatch.setattr(skipping, "forward", cached)
    with install(transformer, num_denoise_steps=3, min_tokens=0, **ALL_SPARSE) as plugin:
        out = denoise(transformer, make_request(), 3)
        summary = plugin.summary()
    assert out.isfinite().all() and summary["completed_evaluations"] == 3
    calls = [row["calls"]["sparse:sol"] for row in summary["by_layer"]]
    assert calls == [3, 1, 3, 3]


def test_lora_scale_keyword_passes_through(transformer: Any, make_request: Any) -> None:
    inputs = {**make_request().inputs(0.0), "attention_kwargs": {"scale": 1.0}}
    with install_h3_sol_attn(transformer, num_denoise_steps=1), torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformer(**inputs)


def test_regional_compilation_does_not_recompile(make_request: Any, denoise: Any) -> None:
    from torch._dynamo.testing import CompileCounter

    from solspark.integrations.tiny_h3 import build_tiny_h3_transformer

    eager = build_tiny_h3_transformer(layers=6)
    compiled = build_tiny_h3_transformer(layers=6)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled.compile_repeated_blocks(backend=counter)
    request = make_request("t2va", (5, 4, 12))
    options = {"num_denoise_steps": 6, "warmup_steps": 2, **TENTH}
    frames: list[int] = []
    try:
        with install_h3_sol_attn(eager, **options):
            plain = denoise(eager, request, 6)
        with install_h3_sol_attn(compiled, **options) as plugin:
            result = denoise(compiled, request, 6, lambda index: frames.append(counter.frame_count))
            assert plugin.summary()["processor_calls"]["sparse:sol"] == 20
    finally:
        torch._dynamo.reset()
    # A block compiles in two pieces around the eager attention, the refiner in one. The second
    # evaluation has two distinct timesteps where the first has one, so the model's own blocks
    # compile once more. Then the run turns sparse, and nothing compiles again.
    assert frames[1] == 3 and frames[2] == 5
    assert frames[2] == frames[-1] == counter.frame_count
    assert torch.equal(result, plain)


def test_whole_model_compilation_is_warned_of(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    compiled = torch.compile(transformer, backend="eager")
    with pytest.warns(RuntimeWarning, match="compile_repeated_blocks"):
        plugin = install_h3_sol_attn(compiled, num_denoise_steps=1).apply()
    plugin.remove()


def test_prewarm_touches_no_counter(transformer: Any) -> None:
    plugin = install_h3_spark_attn(transformer, min_tokens=0)
    for active in (False, True):
        if active:
            plugin.apply()
        done = plugin.prewarm((4, 4, 8), context_tokens=20)
        assert done["seconds"] > 0
        assert done["implementations"]["block_sparse_attention"] == "eager"
        assert plugin.summary()["processor_calls"] == {}
    plugin.remove()
