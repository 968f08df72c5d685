"""Load a MiniMax-H3 pipeline of diffusers and make one clip with it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingDependencyError

INSTALL_HINT = 'pip install "solspark[diffusers]" (diffusers>=0.42.1, transformers, accelerate)'


@dataclass(frozen=True, eq=False)
class GeneratedClip:
    """Hold one generated clip.

    Args:
        frames: uint8 [F, H, W, 3], RGB, on the CPU.
        audio: float32 [2, samples] stereo on the CPU, or None when the pipeline decodes no sound.
        sampling_rate: Hz of `audio`, or None.
        latents: final video latents [1, C, F', H', W'] as the denoising loop left them.
        audio_latents: final audio latents [2, C, L].
        fps: frames a second of the clip.
    """

    frames: Tensor
    audio: Tensor | None
    sampling_rate: int | None
    latents: Tensor
    audio_latents: Tensor
    fps: int = 24


def require_diffusers() -> Any:
    """Import diffusers' H3 transformer module, or say what to install."""
    try:
        from diffusers.models.transformers import transformer_minimax_h3
    except ImportError as error:
        raise MissingDependencyError(
            f"MiniMax-H3 needs diffusers with its H3 transformer: {INSTALL_HINT}. "
            f"Import said: {error}"
        ) from error
    return transformer_minimax_h3


def require_modular_pipeline() -> Any:
    """Import diffusers' modular H3 package, or say what to install."""
    require_diffusers()
    try:
        with _quiet_transformers():
            from diffusers.modular_pipelines import minimax_h3

            _ = minimax_h3.MiniMaxH3ModularPipeline
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"the MiniMax-H3 pipeline needs more than diffusers: {INSTALL_HINT}. "
            f"Import said: {error}"
        ) from error
    return minimax_h3


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Import what needs transformers without its word on every image processor of other models."""
    from transformers.utils import logging

    saved = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(saved)


def check_workflow(workflow: str) -> None:
    """Refuse what is no workflow of H3."""
    if workflow not in ("t2va", "fl2va", "ref2va"):
        raise ValueError(f"workflow: expected t2va, fl2va or ref2va, got {workflow!r}")


def load_h3_pipeline(
    name: str | os.PathLike[str],
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    *,
    workflow: str = "t2va",
) -> Any:
    """Load a MiniMax-H3 pipeline from a local folder or a hub name.

    Args:
        name: folder that holds `modular_model_index.json`, or a repository name on the hub.
        dtype: dtype of the block stack; modules that the checkpoint pins to float32 stay float32.
        device: where the components go.
        workflow: "t2va", "fl2va" or "ref2va"; only its components are loaded.

    Returns:
        The `MiniMaxH3ModularPipeline`, components loaded.

    Raises:
        MissingDependencyError: diffusers or transformers is missing.
        ValueError: the workflow is unknown.

    Source: spec/h3.md section 1.
    """
    check_workflow(workflow)
    require_modular_pipeline()
    from diffusers import MiniMaxH3ModularPipeline

    with warnings.catch_warnings():
        # diffusers' audio autoencoder builds on torch's old weight_norm; not the caller's business.
        warnings.filterwarnings("ignore", message=".*weight_norm", category=FutureWarning)
        pipe = MiniMaxH3ModularPipeline.from_pretrained(os.fspath(name), workflow=workflow)
        pipe.load_components(dtype=dtype)
    if getattr(pipe, "text_encoder", None) is None:
        # A folder saved without its text encoder: `prompt_embeds` become an input of the pipeline.
        blocks: Any = pipe._blocks
        blocks.sub_blocks.pop("text_encoder", None)
    return pipe.to(device)


def loaded_transformer(pipe: Any) -> tuple[str, torch.nn.Module]:
    """Return (component name, module) of the transformer that this pipeline drives.

    Raises:
        TypeError: the pipeline has neither `transformer` nor `transformer_ref`, or has both, so
            that the caller must say which one is meant by passing the module itself.
    """
    found = [
        (name, module)
        for name in ("transformer", "transformer_ref")
        if (module := getattr(pipe, name, None)) is not None
    ]
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "neither"
        raise TypeError(
            "pipe: expected exactly one of `transformer` (t2va, fl2va) and `transformer_ref` "
            f"(ref2va) to be loaded, got {names}; pass the transformer module itself"
        )
    return found[0]


def generate_clip(
    pipe: Any,
    prompt: str,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int = 124,
    steps: int = 19,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
    **pipeline_inputs: Any,
) -> GeneratedClip:
    """Generate one clip: `steps` transformer evaluations from seeded noise, then decode.

    A pipeline without a text encoder (the tiny one) gets stand-in embeddings made from the words
    of the prompt, unless `prompt_embeds` and `text_token_tags` are given. Other models than the
    tiny one cannot read them, so that is said in a warning.

    Args:
        pipe: a MiniMax-H3 modular pipeline.
        prompt: what to show.
        height, width: pixels, multiples of the pipeline's canvas multiple (32); None for its own.
        num_frames: frames at 24 a second; the pipeline rounds up to 17 n + 5 and accepts 5 to 15
            seconds.
        steps: transformer evaluations; the scheduler's grid has one point more.
        seed: of the noise, drawn on the CPU so that every device starts from the same.
        on_step: called as on_step(done, steps) after each evaluation; what it raises ends the run.
        **pipeline_inputs: passed on, such as `image=`, `last_image=` or `references=`; `h3_media`
            makes them of files.

    Returns:
        The clip with its final latents.

    Raises:
        ValueError: steps < 1, or whatever the pipeline refuses.

    Source: spec/h3.md sections 5 and 12.
    """
    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps: expected an int >= 1, got {steps!r}")
    inputs: dict[str, Any] = dict(pipeline_inputs)
    accepted = {parameter.name for parameter in pipe.blocks.inputs}
    if "prompt" in accepted:
        inputs["prompt"] = prompt
    elif "prompt_embeds" not in inputs:
        from .tiny_h3 import embed_prompt, is_tiny

        _, transformer = loaded_transformer(pipe)
        if not is_tiny(transformer):
            warnings.warn(
                "the pipeline has no text encoder: the words of the prompt become random "
                "embeddings, which the model cannot read; pass prompt_embeds and text_token_tags",
                RuntimeWarning,
                stacklevel=2,
            )
        pictures = sum(inputs.get(name) is not None for name in ("image", "last_image"))
        pictures += sum(item.kind != "audio" for item in inputs.get("references") or ())
        channels = int(transformer.config.text_dim)  # type: ignore[attr-defined]
        embeds, tags = embed_prompt(prompt, channels, pictures)
        parameter = next(transformer.parameters())
        device = getattr(pipe, "_execution_device", parameter.device)
        inputs["prompt_embeds"] = embeds.to(device, _text_dtype(transformer))
        inputs["text_token_tags"] = tags

    with _progress(pipe, on_step, steps), _silent_loop(pipe):
        result = pipe(
            height=height,
            width=width,
            num_frames=num_frames,
            num_inference_steps=steps + 1,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="pt",
            output=["videos", "audio", "sampling_rate", "latents", "audio_latents"],
            **inputs,
        )
    video = result["videos"][0].float().clamp(0, 1)
    frames = (video * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
    audio = result["audio"]
    return GeneratedClip(
        frames=frames,
        audio=None if audio is None else audio[0].float().cpu(),
        sampling_rate=result["sampling_rate"],
        latents=result["latents"],
        audio_latents=result["audio_latents"],
        fps=int(getattr(pipe, "fps", 24)),
    )


def _text_dtype(transformer: torch.nn.Module) -> torch.dtype:
    """Dtype of the text projection, which sets that of the packed sequence."""
    return transformer.context_embedder.weight.dtype  # type: ignore[union-attr,return-value]


@contextmanager
def _progress(pipe: Any, on_step: Callable[[int, int], None] | None, steps: int) -> Iterator[None]:
    """Report each finished transformer evaluation to `on_step`."""
    if on_step is None:
        yield
        return
    done = 0

    def report(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal done
        done += 1
        on_step(done, steps)

    _, transformer = loaded_transformer(pipe)
    handle = transformer.register_forward_hook(report)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _silent_loop(pipe: Any) -> Iterator[None]:
    """Switch off the loop's own progress bar: the caller draws one, or wants none."""
    # `pipe.blocks` hands out a copy, and `pipe.set_progress_bar_config` stops at the first level.
    loops = [block for block in _walk(pipe._blocks) if hasattr(block, "progress_bar")]
    saved = [getattr(block, "_progress_bar_config", None) for block in loops]
    for block, config in zip(loops, saved, strict=True):
        block._progress_bar_config = {**(config or {}), "disable": True}
    try:
        yield
    finally:
        for block, config in zip(loops, saved, strict=True):
            if config is None:
                del block._progress_bar_config
            else:
                block._progress_bar_config = config


def _walk(block: Any) -> Iterator[Any]:
    """Yield a modular block and everything below it."""
    yield block
    for child in (getattr(block, "sub_blocks", None) or {}).values():
        yield from _walk(child)
