"""A tiny H3 transformer and requests of the three tasks, packed by diffusers' own builders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="needs diffusers with MiniMax-H3")
pytest.importorskip("diffusers.models.transformers.transformer_minimax_h3")

from solspark.integrations.tiny_h3 import build_tiny_h3_transformer

TASKS = ("t2va", "fl2va", "ref2va")


@dataclass
class Request:
    """One packed request: its noise, and what the transformer is told about its rows."""

    latents: Tensor
    audio: Tensor
    text: Tensor
    structure: dict[str, Tensor]
    condition_video: int
    condition_audio: int

    @property
    def tokens(self) -> int:
        return self.structure["token_tags"].shape[0]

    @property
    def video_tokens(self) -> int:
        return self.latents.shape[0] - self.condition_video

    def inputs(self, time: float, audio_time: float | None = None) -> dict[str, Any]:
        """Return the keyword arguments of one forward at timestep `time` in [0, 1]."""
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            self.structure["video_indices"],
            self.structure["audio_indices"],
            self.condition_video,
            self.condition_audio,
            self.text.shape[1],
            time,
            time if audio_time is None else audio_time,
            max(time, 0.999),
            1.0,
        )
        return {
            "hidden_states": self.latents[None],
            "audio_hidden_states": self.audio[None],
            "encoder_hidden_states": self.text,
            "timestep": timestep,
            "timestep_indices": indices,
            "attention_kwargs": None,
            "return_dict": False,
            **self.structure,
        }


def pack_request(
    task: str = "t2va",
    grid: tuple[int, int, int] = (6, 8, 8),
    *,
    seed: int = 0,
    text: int = 11,
    audio: int = 20,
) -> Request:
    """Pack a request whose target has the given latent grid in patches."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise as steps

    frames, height, width = grid
    tags = torch.ones(text, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    common = (frames, 2 * height, 2 * width, audio, (1, 2, 2), 2)
    if task == "ref2va":
        tags[2:5] = 0
        image = torch.zeros(1, 4, 1, 8, 12)
        video = torch.zeros(1, 4, 2, 4, 8)
        sound = torch.zeros(6, 8)
        packed = steps.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags,
            [
                SimpleNamespace(kind="image", has_audio=False),
                SimpleNamespace(kind="video", has_audio=True),
            ],
            [image, video],
            [sound],
            *common,
            audio_tag=2,
            video_tag=0,
        )
    else:
        anchors: tuple[str, ...] = ()
        if task == "fl2va":
            tags[2:6] = 0
            anchors = ("first", "last")
        packed = steps.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            tags, *common, audio_tag=2, video_tag=0, keyframe_anchors=anchors
        )
    positions, token_tags, video, sound_rows, text_rows, condition_video, condition_audio = packed
    return Request(
        latents=torch.randn(video.numel(), 16, generator=generator),
        audio=torch.randn(sound_rows.numel(), 8, generator=generator),
        text=torch.randn(1, text, 32, generator=generator),
        structure={
            "token_tags": token_tags,
            "position_ids": positions,
            "video_indices": video,
            "audio_indices": sound_rows,
            "text_indices": text_rows,
        },
        condition_video=condition_video,
        condition_audio=condition_audio,
    )


@torch.no_grad()
def run_loop(
    transformer: Any,
    request: Request,
    evaluations: int,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Run a small Euler loop and return the final video and audio rows, concatenated flat."""
    latents, audio = request.latents.clone(), request.audio.clone()
    state = Request(
        latents,
        audio,
        request.text,
        request.structure,
        request.condition_video,
        request.condition_audio,
    )
    for index in range(evaluations):
        if on_step is not None:
            on_step(index)
        time = index / evaluations
        video_velocity, audio_velocity = transformer(**state.inputs(time, min(1.0, 1.3 * time)))
        state.latents[state.condition_video :] += (
            video_velocity[0, state.condition_video :] / evaluations
        )
        state.audio[state.condition_audio :] += (
            audio_velocity[0, state.condition_audio :] / evaluations
        )
    return torch.cat((state.latents.flatten(), state.audio.flatten()))


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    return pack_request


@pytest.fixture(scope="session")
def denoise() -> Callable[..., Tensor]:
    return run_loop


@pytest.fixture(scope="session")
def shared_transformer() -> Any:
    return build_tiny_h3_transformer(seed=3)


@pytest.fixture
def transformer(shared_transformer: Any) -> Iterator[Any]:
    """The shared transformer, handed back as it was: processors, hooks, separate projections."""
    blocks = shared_transformer.transformer_blocks
    before = [block.attn.get_processor() for block in blocks]
    yield shared_transformer
    after = [block.attn.get_processor() for block in blocks]
    hooks = len(shared_transformer._forward_pre_hooks)
    shared_transformer._forward_pre_hooks.clear()
    for block, processor in zip(blocks, before, strict=True):
        block.attn.set_processor(processor)
        processor._attention_backend = None
        if block.attn.fused_projections:
            block.attn.unfuse_projections()
    assert hooks == 0, "a test left the installer's hook behind"
    assert all(a is b for a, b in zip(after, before, strict=True)), "a processor was left behind"
