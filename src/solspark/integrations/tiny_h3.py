"""A MiniMax-H3 pipeline small enough for one CPU core: random weights, real code, no download."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor

from .h3_layout import TEXT_TAG, VIDEO_TAG
from .h3_pipeline import (
    GeneratedClip,
    check_workflow,
    generate_clip,
    load_h3_pipeline,
    require_diffusers,
    require_modular_pipeline,
)

__all__ = [
    "GeneratedClip",
    "build_tiny_h3_pipeline",
    "build_tiny_h3_transformer",
    "embed_prompt",
    "generate_clip",
    "load_h3_pipeline",
]

TINY_WIDTHS = (32, 192)
"""Text channels and residual channels of the tiny transformer."""

TINY_CALL: dict[str, Any] = {
    "height": 96,
    "width": 160,
    "num_frames": 124,
    "steps": 5,
    "seed": 0,
}
"""A t2va call of a few seconds: grid 37 x 3 x 5, 555 video tokens of 973 or so."""

TINY_CANVAS: dict[str, int] = {"canvas_short_edge": 96, "canvas_max_pixels": 96 * 160}
"""Where the tiny pipeline puts keyframes and references; an image reference has its own edge."""

VISION_ROWS = 4
"""Rows of stand-in text that each picture or video adds, tagged as video as the real ones are."""

TINY_INSTALL: dict[str, Any] = {"min_tokens": 0}
"""What an installer needs here: the tiny sequences are below Spark's default `min_tokens`."""


def build_tiny_h3_transformer(
    seed: int = 0,
    *,
    layers: int = 4,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Any:
    """Build the H3 transformer with random weights and production's head_dim of 128.

    Args:
        seed: of the weights; the process's random state is left alone.
        layers: transformer blocks.
        heads: attention heads.
        dtype: of the block stack; the projections that H3 pins to float32 stay float32.
        device: where it goes.

    Returns:
        A `MiniMaxH3Transformer3DModel` in eval mode.

    Raises:
        MissingDependencyError: diffusers is missing.

    Source: spec/h3.md section 12.
    """
    module = require_diffusers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = module.MiniMaxH3Transformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=128,
            hidden_size=TINY_WIDTHS[1],
            num_layers=layers,
            num_refiner_layers=1,
            ffn_dim=256,
            in_channels=4,
            audio_in_channels=8,
            text_dim=TINY_WIDTHS[0],
            freq_dim=16,
            time_embed_hidden_dim=48,
            time_embed_dim=32,
        )
        for name, parameter in transformer.named_parameters():
            if name.endswith(("norm_q.weight", "norm_k.weight")):
                # Learned norms are never all one; with ones, every query would be equally long.
                parameter.data += 0.3 * torch.randn_like(parameter)
    _cast(transformer, dtype)
    return transformer.to(device).eval()


def build_tiny_h3_pipeline(
    seed: int = 0,
    *,
    workflow: str = "t2va",
    layers: int = 4,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[Any, dict[str, Any]]:
    """Build the whole pipeline with random weights: transformer, autoencoders, schedulers.

    The text encoder is left out (the real one needs more than 50 decoder layers); `generate_clip`
    makes the prompt embeddings from the words of the prompt instead.

    Args:
        seed: of all weights.
        workflow: "t2va", "fl2va" or "ref2va"; the last has a `transformer_ref`.
        layers, heads: of the transformer.
        dtype: of the transformer's block stack.
        device: where it goes.

    Returns:
        (pipe, keyword arguments of a short `generate_clip` call).

    Raises:
        MissingDependencyError: diffusers or transformers is missing.
        ValueError: the workflow is unknown.

    Source: spec/h3.md section 12.
    """
    check_workflow(workflow)
    require_modular_pipeline()
    from diffusers import (
        AutoencoderKLMiniMaxH3,
        AutoencoderKLMiniMaxH3Audio,
        MiniMaxH3Blocks,
        MiniMaxH3Scheduler,
    )

    blocks = MiniMaxH3Blocks().get_workflow(workflow)
    blocks.sub_blocks.pop("text_encoder")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # diffusers' audio autoencoder builds on torch's old weight_norm; not the caller's business.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed + 1)
        vae: Any = AutoencoderKLMiniMaxH3(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            spatial_downsample_factors=(2, 2, 2, 2),
            temporal_downsample_factors=(1, 2, 2, 1),
            norm_num_groups=4,
            decoder_num_layers=1,
            decoder_num_attention_heads=1,
            decoder_attention_head_dim=32,
            decoder_num_register_tokens=1,
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        )
        audio_vae: Any = AutoencoderKLMiniMaxH3Audio(
            encoder_dim=8,
            # A hop of 80 samples, a tenth of the real one: decoding costs little, and a second of
            # reference sound is some hundred rows.
            encoder_rates=(8, 10),
            latent_dim=16,
            latent_channels=8,
            num_attention_heads=2,
            decoder_dim=16,
            decoder_rates=(8, 10),
            decoder_kernel_sizes=(16, 20),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1,),),
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
        )
    pipe = blocks.init_pipeline()
    transformer = build_tiny_h3_transformer(
        seed, layers=layers, heads=heads, dtype=dtype, device=device
    )
    sizes = dict(TINY_CANVAS)
    if workflow == "ref2va":
        sizes["reference_image_short_edge"] = 64
    pipe.update_components(
        **{"transformer_ref" if workflow == "ref2va" else "transformer": transformer},
        **sizes,
        vae=vae.to(device).eval(),
        audio_vae=audio_vae.to(device).eval(),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
    )
    return pipe, dict(TINY_CALL)


def is_tiny(transformer: Any) -> bool:
    """Say whether a transformer has the dimensions of the tiny one, whose text means nothing."""
    return (transformer.config.text_dim, transformer.config.hidden_size) == TINY_WIDTHS


def embed_prompt(prompt: str, text_dim: int, pictures: int = 0) -> tuple[Tensor, Tensor]:
    """Turn a prompt into stand-in text embeddings: one standard normal row a word.

    Args:
        prompt: words; a word seeds its row, so that similar prompts condition alike.
        text_dim: channels of a row.
        pictures: keyframes or references that the model sees. Each adds a label and `VISION_ROWS`
            rows before the prompt, as H3's text encoder does.

    Returns:
        (embeddings float32 [1, n, text_dim], token tags int64 [n]), n = words + 1 without pictures;
        tags are 0 (video) in the rows of pictures and 1 (text) elsewhere.
    """
    words, tags = [], []
    for picture in range(1, pictures + 1):
        words += [f"<picture {picture}>", *(f"<{picture}.{row}>" for row in range(VISION_ROWS))]
        tags += [TEXT_TAG] + [VIDEO_TAG] * VISION_ROWS
    written = ["<clip>", *prompt.lower().split()]
    rows = []
    for word in words + written:
        digest = hashlib.sha256(word.encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
        rows.append(torch.randn(text_dim, generator=generator))
    return torch.stack(rows)[None], torch.tensor(tags + [TEXT_TAG] * len(written))


def _cast(transformer: Any, dtype: torch.dtype) -> None:
    """Cast as loading would: the modules that H3 pins to float32 keep it."""
    pinned = tuple(transformer._keep_in_fp32_modules)
    for name, parameter in transformer.named_parameters():
        if not any(part in name for part in pinned):
            parameter.data = parameter.data.to(dtype)
