"""The tiny pipeline: a real diffusers pipeline, with and without sparse attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from solspark.integrations.h3_pipeline import (
    GeneratedClip,
    generate_clip,
    load_h3_pipeline,
    loaded_transformer,
)
from solspark.integrations.minimax_h3 import install_h3_sol_attn, install_h3_spark_attn
from solspark.integrations.tiny_h3 import (
    TINY_INSTALL,
    build_tiny_h3_pipeline,
    build_tiny_h3_transformer,
    embed_prompt,
)

pytest.importorskip("transformers")

CALL: dict[str, Any] = {"height": 64, "width": 96, "num_frames": 124, "steps": 2, "seed": 0}
PROMPT = "a cat on a roof"


@pytest.fixture(scope="module")
def pipe() -> Any:
    return build_tiny_h3_pipeline()[0]


@pytest.fixture(scope="module")
def dense(pipe: Any) -> GeneratedClip:
    return generate_clip(pipe, PROMPT, **CALL)


@pytest.fixture(scope="module")
def oracle() -> GeneratedClip:
    """The same weights with the block stack in float64."""
    wide, _ = build_tiny_h3_pipeline(dtype=torch.float64)
    return generate_clip(wide, PROMPT, **CALL)


def assert_no_worse(clip: GeneratedClip, dense: GeneratedClip, oracle: GeneratedClip) -> None:
    """Pass iff the latents' error is at most twice that of a plain dense run, plus one rounding."""
    for ours, usual, exact in (
        (clip.latents, dense.latents, oracle.latents),
        (clip.audio_latents, dense.audio_latents, oracle.audio_latents),
    ):
        scale = float(exact.abs().max())
        for measure in (torch.max, torch.mean):
            error, rounding = measure((ours - exact).abs()), measure((usual - exact).abs())
            assert error <= 2 * rounding + torch.finfo(torch.float32).eps * scale


def test_clip(pipe: Any, dense: GeneratedClip) -> None:
    assert dense.frames.dtype == torch.uint8 and tuple(dense.frames.shape) == (124, 64, 96, 3)
    assert tuple(dense.latents.shape) == (1, 4, 37, 4, 6)
    assert dense.audio is not None and dense.audio.shape[0] == 2
    assert dense.sampling_rate == 32000 and dense.fps == 24
    again = generate_clip(pipe, PROMPT, **CALL)
    assert torch.equal(again.latents, dense.latents) and torch.equal(again.frames, dense.frames)
    other = generate_clip(pipe, "two dogs", **CALL)
    assert not torch.equal(other.latents, dense.latents)
    assert not torch.equal(
        generate_clip(pipe, PROMPT, **{**CALL, "seed": 1}).latents, dense.latents
    )


def test_weights_come_from_the_seed_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    first, second = build_tiny_h3_transformer(5), build_tiny_h3_transformer(5)
    assert torch.equal(torch.randn(3), expected)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    other = build_tiny_h3_transformer(6)
    assert not torch.equal(other.proj_in.weight, first.proj_in.weight)


def test_pinned_modules_stay_float32() -> None:
    transformer = build_tiny_h3_transformer(dtype=torch.bfloat16)
    assert transformer.proj_in.weight.dtype == torch.float32
    assert transformer.transformer_blocks[0].attn.to_q.weight.dtype == torch.bfloat16


def test_prompt_embeddings() -> None:
    cat, tags = embed_prompt("A cat", 32)
    dog, _ = embed_prompt("a dog", 32)
    assert tuple(cat.shape) == (1, 3, 32) and tags.tolist() == [1, 1, 1]
    assert torch.equal(cat[0, :2], dog[0, :2]) and not torch.equal(cat[0, 2], dog[0, 2])


def test_progress_and_interrupt(pipe: Any) -> None:
    seen: list[tuple[int, int]] = []
    generate_clip(pipe, PROMPT, **CALL, on_step=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_clip(pipe, PROMPT, **CALL, on_step=stop)
    assert not pipe.transformer._forward_hooks


@pytest.mark.parametrize("steps", [0, True, 2.0])
def test_steps_are_checked(pipe: Any, steps: Any) -> None:
    with pytest.raises(ValueError, match="steps: expected an int >= 1"):
        generate_clip(pipe, PROMPT, **{**CALL, "steps": steps})


@pytest.mark.parametrize(
    ("install", "options"),
    [
        (install_h3_sol_attn, {"sol_route_topk_ratio": 1.0}),
        (install_h3_sol_attn, {"sol_tau": -1e9}),
        (install_h3_spark_attn, {"topk_ratio": 1.0}),
        (install_h3_spark_attn, {"sol_route_topk_ratio": None, "sol_tau": -1e9}),
    ],
    ids=["sol ratio", "sol tau", "spark ratio", "spark tau"],
)
def test_everything_exact_is_dense(
    pipe: Any,
    dense: GeneratedClip,
    oracle: GeneratedClip,
    install: Any,
    options: dict[str, Any],
) -> None:
    """Grid 37 x 2 x 3: three blocks and thirty rows."""
    options = {**TINY_INSTALL, "num_denoise_steps": 2, "warmup_ratio": 0.0, **options}
    with install(pipe, dense_layers=0, **options) as plugin:
        clip = generate_clip(pipe, PROMPT, **CALL)
        calls = plugin.summary()["processor_calls"]
    assert calls["sparse:sol"] == 8
    assert_no_worse(clip, dense, oracle)


def test_spark_clip_and_reset(pipe: Any, dense: GeneratedClip) -> None:
    with install_h3_spark_attn(pipe, num_denoise_steps=2, **TINY_INSTALL) as plugin:
        clip = generate_clip(pipe, PROMPT, **CALL)
        summary = plugin.summary()
        assert summary["processor_calls"]["dense:warmup"] == 4
        assert summary["processor_calls"]["sparse:sol"] == 3
        assert summary["grid"] == (37, 2, 3)
        # The error keeps its type on its way through the modular pipeline.
        with pytest.raises(RuntimeError, match=r"second invocation without reset\(\)"):
            generate_clip(pipe, PROMPT, **CALL)
        plugin.reset()
        again = generate_clip(pipe, PROMPT, **CALL)
    assert torch.equal(again.latents, clip.latents)
    difference = float((clip.latents - dense.latents).norm() / dense.latents.norm())
    assert 1e-6 < difference < 0.1


def test_nothing_but_the_blocks_attention_is_touched(pipe: Any) -> None:
    """Text refiner, autoencoders and every class stay as they are, inside and after."""

    def callables() -> dict[str, tuple[Any, ...]]:
        found = {}
        for name in ("transformer", "vae", "audio_vae"):
            for path, module in getattr(pipe, name).named_modules():
                found[f"{name}.{path}"] = (
                    type(module).forward,
                    module.__dict__.get("forward"),
                    getattr(module, "processor", None),
                    len(module._forward_pre_hooks),
                    len(module._forward_hooks),
                )
        return found

    before = callables()
    with install_h3_spark_attn(pipe, **TINY_INSTALL):
        inside = callables()
    changed = {path for path, seen in before.items() if inside[path] != seen}
    blocks = {f"transformer.transformer_blocks.{layer}.attn" for layer in range(4)}
    assert changed == {"transformer.", *blocks}
    assert callables() == before


def test_keyframes() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pipe, _ = build_tiny_h3_pipeline(workflow="fl2va")
    grey, red = image.new("RGB", (50, 50), "grey"), image.new("RGB", (96, 64), "red")
    clips = []
    for pictures in ({"image": grey}, {"image": red}, {"image": grey, "last_image": red}):
        with install_h3_sol_attn(pipe, num_denoise_steps=2) as plugin:
            clips.append(generate_clip(pipe, PROMPT, **CALL, **pictures))
            summary = plugin.summary()
        # A keyframe is one latent frame of 2 x 3 rows.
        assert summary["condition_video_tokens"] == 6 * len(pictures)
        assert summary["target_video_tokens"] == 222
    for one, other in ((0, 1), (0, 2)):
        assert not torch.allclose(clips[one].latents, clips[other].latents)


def test_references(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    from diffusers.modular_pipelines import minimax_h3

    pipe, _ = build_tiny_h3_pipeline(workflow="ref2va")
    assert loaded_transformer(pipe) == ("transformer_ref", pipe.transformer_ref)
    picture = minimax_h3.MiniMaxH3ImageReference(image.new("RGB", (50, 50), "red"))
    sound = minimax_h3.MiniMaxH3AudioReference(torch.zeros(1, 8000), 32_000)
    clips = []
    for references in ([picture], [picture, sound]):
        with install_h3_sol_attn(pipe, num_denoise_steps=2) as plugin:
            clips.append(generate_clip(pipe, PROMPT, **CALL, references=references))
            summary = plugin.summary()
        # 64 x 64 pixels are 2 x 2 rows.
        assert (summary["condition_video_tokens"], summary["target_video_tokens"]) == (4, 222)
    assert not torch.allclose(clips[0].latents, clips[1].latents)
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    loaded = load_h3_pipeline(tmp_path, torch.float32, workflow="ref2va")
    assert loaded_transformer(loaded) == ("transformer_ref", loaded.transformer_ref)


def test_pictures_in_the_prompt_are_tagged_as_video() -> None:
    embeds, tags = embed_prompt("two words", 32, pictures=2)
    assert tags.tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1]
    assert embeds.shape == (1, 13, 32)
    assert torch.equal(embeds[:, 10:], embed_prompt("two words", 32)[0])


def test_save_and_load(
    pipe: Any, dense: GeneratedClip, oracle: GeneratedClip, tmp_path: Path
) -> None:
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    loaded = load_h3_pipeline(tmp_path, torch.float32)
    saved = pipe.transformer.state_dict()
    for name, weight in loaded.transformer.state_dict().items():
        assert torch.equal(weight, saved[name])
    # Weights mapped from a file are aligned otherwise, so matrix products round otherwise.
    assert_no_worse(generate_clip(loaded, PROMPT, **CALL), dense, oracle)


def test_stand_in_prompts_are_announced(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from solspark.integrations import tiny_h3

    monkeypatch.setattr(tiny_h3, "is_tiny", lambda transformer: False)
    with pytest.warns(RuntimeWarning, match="no text encoder"):
        generate_clip(pipe, PROMPT, **CALL)
    embeds, tags = embed_prompt(PROMPT, 32)
    generate_clip(pipe, PROMPT, **CALL, prompt_embeds=embeds, text_token_tags=tags)


def test_unknown_workflows() -> None:
    with pytest.raises(ValueError, match="workflow: expected t2va, fl2va or ref2va, got 'i2v'"):
        build_tiny_h3_pipeline(workflow="i2v")
    with pytest.raises(ValueError, match="workflow: expected"):
        load_h3_pipeline("nowhere", workflow="t2v")


def test_transformer_of_a_pipeline(pipe: Any) -> None:
    assert loaded_transformer(pipe) == ("transformer", pipe.transformer)
    with pytest.raises(TypeError, match="got neither"):
        loaded_transformer(object())
