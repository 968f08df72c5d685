"""Where MiniMax-H3 puts the tokens of a packed sequence, and the rotary embedding it gives them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solspark.bench.problems import Problem

ROTARY_FREQUENCIES = 16
ROTARY_THETA = 10_000.0
_FRAME_SPANS = (1, 4, 4, 4, 4)
_SPATIAL_SPAN = 32.0


def axis_positions(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float64 rotary coordinates of the frames, rows and columns of the video grid.

    Frames advance by 5/3 * (1, 4, 4, 4, 4) in turn and start after the text rows; rows and columns
    are spread over 32 units of a square of equal area, centred, without their end points.

    Args:
        problem: shape with its grid.

    Returns:
        Three tensors of F, H and W coordinates.

    Source: the packed layout of MiniMax-H3.
    """
    frames, height, width = problem.grid.as_tuple()
    spans = torch.tensor([5 / 3 * _FRAME_SPANS[i % 5] for i in range(frames)], dtype=torch.float64)
    time = problem.text_tokens + torch.cat([spans.new_zeros(1), spans[:-1].cumsum(0)])

    def spread(count: int) -> Tensor:
        ratio = count / math.sqrt(height * width)
        return ((1 - ratio) / 2 + ratio * torch.arange(count).double() / count) * _SPATIAL_SPAN

    return time, spread(height), spread(width)


def position_ids(problem: Problem) -> Tensor:
    """Return the float64 [T, 3] (t, h, w) rotary coordinates: video rows, then text rows, then
    audio rows.

    Args:
        problem: shape with its grid and context.

    Returns:
        Coordinates on the CPU. Text sits at (row, 0, 0); audio advances one unit a latent and is
        pinned to the two ends of the width, left channel first.
    """
    time, rows, columns = axis_positions(problem)
    video = torch.stack(torch.meshgrid(time, rows, columns, indexing="ij"), dim=-1).reshape(-1, 3)
    text = torch.zeros(problem.text_tokens, 3, dtype=torch.float64)
    text[:, 0] = torch.arange(problem.text_tokens)
    audio = torch.zeros(problem.audio_tokens, 3, dtype=torch.float64)
    latents = -(-problem.audio_tokens // 2)
    audio[:, 0] = problem.text_tokens + (torch.arange(problem.audio_tokens) % max(latents, 1))
    audio[:latents, 2], audio[latents:, 2] = columns[0], columns[-1]
    return torch.cat([video, text, audio])


def rotary_table(positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return float32 cos and sin [T, 48] of the three axes' angles, 16 frequencies an axis.

    Args:
        positions: [T, 3] coordinates.
        device: where the tables go.

    Returns:
        cos, sin; channel i of the first 48 pairs with channel i + 48 (rotate-half).
    """
    exponents = torch.arange(ROTARY_FREQUENCIES, dtype=torch.float64) / ROTARY_FREQUENCIES
    angles = positions.unsqueeze(-1) * ROTARY_THETA**-exponents
    angles = angles.flatten(1).remainder(2 * math.pi).to(device=device, dtype=torch.float32)
    return angles.cos(), angles.sin()


def apply_rotary(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading 2 * cos.shape[-1] channels of rows [T, D] by halves; the rest pass
    through.
    """
    half = cos.shape[-1]
    first, second, rest = rows[:, :half], rows[:, half : 2 * half], rows[:, 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=1)
