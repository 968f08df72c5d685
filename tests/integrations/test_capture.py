"""Capturing changes nothing, sees exactly what the model attends over, and can be undone."""

from __future__ import annotations

import pytest
import torch

from solspark.integrations.capture import H3Capture, capture
from solspark.integrations.generation import GenerateOptions
from solspark.integrations.h3_pipeline import generate_clip
from solspark.integrations.minimax_h3 import install_h3_sol_attn
from solspark.integrations.tiny_h3 import build_tiny_h3_pipeline

from .conftest import TASKS


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("task", TASKS)
def test_it_sees_what_the_model_attends_over_and_changes_nothing(
    task, fused, transformer, make_request, denoise, monkeypatch
):
    from diffusers.models.transformers import transformer_minimax_h3 as module

    if fused:
        for block in transformer.transformer_blocks:
            block.attn.fuse_projections()
    request = make_request(task)
    expected = denoise(transformer, request, 3)

    attend, seen = module.dispatch_attention_fn, []

    def watched(query, key, value, *args, **options):
        seen.append((query, key, value))
        return attend(query, key, value, *args, **options)

    monkeypatch.setattr(module, "dispatch_attention_fn", watched)
    calls = []
    with H3Capture(transformer, (3, 1), (2, 0), calls.append) as watch:
        assert not watch.complete
        found = denoise(transformer, request, 3)
        assert watch.complete
    assert torch.equal(found, expected)
    assert [(call.evaluation, call.layer) for call in calls] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    # The refiner attends too, over text alone, before the blocks.
    packed = [each for each in seen if each[0].shape[1] == request.tokens]
    assert len(packed) == 12
    for call in calls:
        own = packed[4 * call.evaluation + call.layer]
        for mine, theirs in zip((call.query, call.key, call.value), own, strict=True):
            assert torch.equal(call.layout.unpack(mine), theirs)
            assert torch.equal(mine[:, : request.video_tokens], theirs[:, -request.video_tokens :])
        assert call.layout.grid.as_tuple() == (6, 8, 8)
        assert call.text_tokens == 11
        assert call.timestep == pytest.approx(call.evaluation / 3)
        assert call.layout.condition_tokens == request.condition_video
        assert not call.query.requires_grad


def test_processors_are_the_same_objects_again_after_an_exception(
    transformer, make_request, denoise
):
    blocks = transformer.transformer_blocks
    before = [block.attn.get_processor() for block in blocks]

    def full_disk(call):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"), H3Capture(transformer, (2,), (1,), full_disk):
        inside = [block.attn.get_processor() for block in blocks]
        assert [a is b for a, b in zip(inside, before, strict=True)] == [True, True, False, True]
        denoise(transformer, make_request(), 2)
    assert all(block.attn.get_processor() is own for block, own in zip(blocks, before, strict=True))
    assert not transformer._forward_pre_hooks


def test_it_can_be_applied_again_and_counts_from_the_start(transformer, make_request, denoise):
    calls = []
    watch = H3Capture(transformer, (0,), (1,), calls.append)
    for _ in range(2):
        watch.apply()
        with pytest.raises(RuntimeError, match="installed already"):
            watch.apply()
        denoise(transformer, make_request(), 3)
        watch.remove()
        watch.remove()
    assert [call.evaluation for call in calls] == [1, 1] and calls[0].layout is not calls[1].layout
    denoise(transformer, make_request(), 2)
    assert len(calls) == 2


def test_a_kept_processor_only_attends(transformer, make_request, denoise):
    attn = transformer.transformer_blocks[0].attn
    original, calls = attn.get_processor(), []
    with H3Capture(transformer, (0,), (0,), calls.append):
        kept = attn.get_processor()
        kept._attention_backend = "native"
        assert original._attention_backend == "native"
        kept._attention_backend = None
    attn.set_processor(kept)
    denoise(transformer, make_request(), 1)
    attn.set_processor(original)
    assert calls == []


def test_a_processor_replaced_inside_is_left_alone_and_said(transformer, make_request, denoise):
    attn = transformer.transformer_blocks[1].attn
    original, calls = attn.get_processor(), []
    other = type(original)()
    with pytest.warns(RuntimeWarning, match=r"transformer_blocks\.1\.attn was replaced"):
        with H3Capture(transformer, (1, 2), (0,), calls.append) as watch:
            attn.set_processor(other)
            denoise(transformer, make_request(), 1)
    assert watch.missing == {(0, 1)} and [call.layer for call in calls] == [2]
    assert attn.get_processor() is other
    attn.set_processor(original)


def test_refusals_name_what_was_expected(transformer):
    with pytest.raises(ValueError, match="layers: expected ints from 0 to 3, got 4"):
        H3Capture(transformer, (0, 4), (0,), print)
    with pytest.raises(ValueError, match="layers: expected ints from 0 to 3, got True"):
        H3Capture(transformer, (True,), (0,), print)
    with pytest.raises(TypeError, match="pipe: expected exactly one of `transformer`"):
        H3Capture(torch.nn.Linear(2, 2), (0,), (0,), print)
    with install_h3_sol_attn(transformer):
        with pytest.raises(RuntimeError, match=r"expected the model's own processor, got H3Sparse"):
            H3Capture(transformer, (1,), (0,), print).apply()
    with H3Capture(transformer, (1,), (0,), print):
        with pytest.raises(RuntimeError, match="got _CapturingProcessor"):
            H3Capture(transformer, (1,), (0,), print).apply()


def test_a_whole_pipeline_makes_the_same_clip():
    pipe, call = build_tiny_h3_pipeline(layers=2)
    call.update(steps=1, prompt="a red kite")
    expected = generate_clip(pipe, **call)
    calls = []
    with H3Capture(pipe, (1,), (0,), calls.append):
        found = generate_clip(pipe, **call)
    assert torch.equal(found.latents, expected.latents)
    assert torch.equal(found.audio_latents, expected.audio_latents)
    assert torch.equal(found.frames, expected.frames)
    assert len(calls) == 1


def test_a_run_that_fails_leaves_no_file(tmp_path, monkeypatch):
    from solspark.integrations import capture as module

    writer, written = module._require_safetensors(), []

    def second_fails(tensors, path, metadata):
        if written:
            raise OSError("no space left")
        writer(tensors, path, metadata=metadata)
        written.append(path)
        assert path.exists() and path.name.startswith(".")

    monkeypatch.setattr(module, "_require_safetensors", lambda: second_fails)
    run = GenerateOptions(method="dense", steps=2, out=str(tmp_path))
    # The pipeline logs what fails inside it and passes it on.
    with pytest.raises(OSError, match="no space left"):
        capture(run, (0, 1), (0,))
    assert written and list(tmp_path.iterdir()) == []


def test_options_are_checked_before_a_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("solspark.integrations.capture.open_pipeline", None)
    dense = GenerateOptions(method="dense", steps=3, out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="evaluations: expected ints from 0 to 2, got 3"):
        capture(dense, (), (3,))
    with pytest.raises(ValueError, match="layers: expected ints >= 0, got -1"):
        capture(dense, (-1,))
    with pytest.raises(ValueError, match="method: expected 'dense' to capture, got 'spark'"):
        capture(GenerateOptions(out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
