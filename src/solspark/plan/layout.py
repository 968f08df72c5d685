"""Where the blocks of a packed sequence lie: video rows first, context after."""

from __future__ import annotations

from dataclasses import dataclass

from solspark.types import BLOCK, block_count


@dataclass(frozen=True)
class PackedLayout:
    """Cut a packed sequence of V video rows and T - V context rows into blocks of 64.

    Candidates are the complete video blocks, [0, floor(V / 64)). Every later key block, the mixed
    one included and with or without context, is a sink: exact for everybody, outside any budget.
    Query rows [0, sparse_tokens) attend sparsely, all later ones densely over all keys.

    Args:
        tokens: T.
        video_tokens: V, 0 <= V <= T.
        tail_mode: "dense" leaves the V mod 64 last video rows to the dense suffix; "pad" makes a
            sparse block of them, filled up with their mean.

    Raises:
        ValueError: when V > T, or in "pad" mode when fewer than 64 - V mod 64 rows follow.

    Source: spec/h3.md section 3.3.
    """

    tokens: int
    video_tokens: int
    tail_mode: str = "dense"

    def __post_init__(self) -> None:
        if not 0 <= self.video_tokens <= self.tokens:
            raise ValueError(
                f"video_tokens: expected 0..{self.tokens} for {self.tokens} tokens, "
                f"got {self.video_tokens}"
            )
        if self.tail_mode not in ("dense", "pad"):
            raise ValueError(f"tail_mode: expected 'dense' or 'pad', got {self.tail_mode!r}")
        if self.candidates and self.sparse_tokens > self.tokens:
            raise ValueError(
                f"video_tail_mode: 'pad' needs {self.sparse_tokens - self.video_tokens} rows after "
                f"{self.video_tokens} video tokens, got {self.tokens - self.video_tokens}: "
                "suffix too short"
            )

    @property
    def candidates(self) -> int:
        """Key blocks that may be skipped."""
        return self.video_tokens // BLOCK

    @property
    def key_blocks(self) -> int:
        return block_count(self.tokens)

    @property
    def sinks(self) -> tuple[tuple[int, int], ...]:
        """Ranges of key blocks that every row reads exactly."""
        return ((self.candidates, self.key_blocks),) if self.candidates < self.key_blocks else ()

    @property
    def sparse_tokens(self) -> int:
        """Query rows of the sparse prefix; 0 when the video fills no block."""
        if self.candidates == 0:
            return 0
        blocks = block_count(self.video_tokens) if self.tail_mode == "pad" else self.candidates
        return blocks * BLOCK

    @property
    def query_blocks(self) -> int:
        return self.sparse_tokens // BLOCK

    @property
    def dense_start(self) -> int:
        """First query row of the dense suffix."""
        return min(self.sparse_tokens, self.video_tokens)
