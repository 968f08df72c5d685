"""Named problems: the shapes that every figure of this project refers to.

A problem is a packed sequence as the attention sees it: the generated video first, in raster order
over (frames, height, width), then its context (text, then audio where the model has it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from solspark.types import BLOCK, TokenGrid, block_count


@dataclass(frozen=True)
class Problem:
    """Name one attention shape and where it comes from.

    Args:
        name: key in `PROBLEMS`.
        grid: (frames, height, width) of the video tokens.
        text_tokens: text rows after the video rows.
        audio_tokens: audio rows after the text rows.
        heads: H.
        head_dim: D.
        source: the model, canvas and clip that the shape belongs to.
        batch: B.
    """

    name: str
    grid: TokenGrid
    text_tokens: int
    audio_tokens: int
    heads: int
    head_dim: int
    source: str
    batch: int = 1

    @property
    def video_tokens(self) -> int:
        return self.grid.tokens

    @property
    def context_tokens(self) -> int:
        return self.text_tokens + self.audio_tokens

    @property
    def tokens(self) -> int:
        """T, the packed length."""
        return self.video_tokens + self.context_tokens

    @property
    def blocks(self) -> int:
        return block_count(self.tokens)

    @property
    def sink_start(self) -> int:
        """First token of the exact suffix: the mixed video/context block starts here, if there is
        one.
        """
        return self.video_tokens // BLOCK * BLOCK

    def dense_flops(self, heads: int | None = None) -> int:
        """Return the floating-point operations of dense attention, 4 B H T^2 D."""
        return 4 * self.batch * (heads or self.heads) * self.tokens**2 * self.head_dim

    def with_grid(self, frames: int, height: int, width: int) -> Problem:
        """Return the same model on another grid, for a scaled-down study."""
        name = f"{self.name}@{frames}x{height}x{width}"
        return replace(self, name=name, grid=TokenGrid(frames, height, width))


def _h3(name: str, frames: int, audio: int, text: int, clip: str) -> Problem:
    return Problem(
        name,
        TokenGrid(frames, 24, 42),
        text,
        audio,
        56,
        128,
        f"MiniMax-H3, 1344x768, 24 fps, {clip}; {audio} audio rows and {text} text rows",
    )


def _gate(name: str, frames: int, height: int, width: int) -> Problem:
    return Problem(
        name,
        TokenGrid(frames, height, width),
        0,
        0,
        56,
        128,
        "the lengths of the public H = 56 attention-call tables",
    )


PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        _h3("h3-5s", 37, 414, 512, "124 frames (5.2 s)"),
        _h3("h3-10s", 72, 810, 198, "243 frames (10.1 s)"),
        _h3("h3-14s", 102, 1150, 84, "345 frames (14.4 s)"),
        _h3("long-310k", 307, 544, 0, "no clip: more than 2^31 elements a tensor"),
        Problem(
            "wan21-720p",
            TokenGrid(21, 45, 80),
            0,
            0,
            40,
            128,
            "Wan 2.1 14B, 1280x720, 81 frames; text is read by cross-attention",
        ),
        Problem(
            "hunyuan-720p",
            TokenGrid(33, 45, 80),
            256,
            0,
            24,
            128,
            "HunyuanVideo 13B, 1280x720, 129 frames, joint attention with 256 text rows",
        ),
        Problem(
            "ltx-1080p",
            TokenGrid(16, 34, 60),
            0,
            0,
            32,
            128,
            "LTX 2 video stream, 1920x1088, 121 frames, 32x spatial and 8x temporal compression",
        ),
        _gate("gate-2k", 8, 16, 16),
        _gate("gate-4k", 16, 16, 16),
        _gate("gate-8k", 16, 16, 32),
        _gate("gate-16k", 16, 32, 32),
        _gate("gate-32k", 32, 32, 32),
        _gate("gate-64k", 64, 32, 32),
        _gate("gate-72k", 72, 32, 32),
        Problem(
            "tiny",
            TokenGrid(9, 10, 14),
            26,
            32,
            2,
            128,
            "small enough for a CPU: ragged, 44 video rows outside complete blocks, a context",
        ),
    )
}


def get_problem(name: str) -> Problem:
    """Return the named problem.

    Args:
        name: a key of `PROBLEMS`.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    try:
        return PROBLEMS[name]
    except KeyError:
        raise ValueError(f"problem: expected one of {', '.join(PROBLEMS)}, got {name!r}") from None
