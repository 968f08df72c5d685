"""Packed layouts: where candidates, sinks, sparse rows and the dense suffix lie."""

from __future__ import annotations

import pytest

from solspark.plan.layout import PackedLayout


@pytest.mark.parametrize(
    ("tokens", "video", "candidates", "sinks", "sparse", "padded"),
    [
        (73_584, 72_576, 1134, ((1134, 1150),), 72_576, 72_576),
        (38_222, 37_296, 582, ((582, 598),), 37_248, 37_312),
        (104_050, 102_816, 1606, ((1606, 1626),), 102_784, 102_848),
        (128, 128, 2, (), 128, 128),
        (100, 100, 1, ((1, 2),), 64, None),
        (128, 100, 1, ((1, 2),), 64, 128),
        (200, 64, 1, ((1, 4),), 64, 64),
        (200, 63, 0, ((0, 4),), 0, 0),
        (5, 0, 0, ((0, 1),), 0, 0),
    ],
)
def test_geometry(tokens, video, candidates, sinks, sparse, padded):
    dense = PackedLayout(tokens, video)
    assert (dense.candidates, dense.sinks, dense.sparse_tokens) == (candidates, sinks, sparse)
    assert dense.dense_start == sparse
    if padded is None:
        with pytest.raises(ValueError, match="suffix too short"):
            PackedLayout(tokens, video, "pad")
    else:
        pad = PackedLayout(tokens, video, "pad")
        assert pad.sparse_tokens == padded
        assert pad.dense_start == (video if padded else 0)


def test_the_last_partial_block_is_a_sink_without_context():
    layout = PackedLayout(1000, 1000)
    assert layout.sinks == ((15, 16),)


@pytest.mark.parametrize("video", [-1, 101])
def test_video_must_fit(video):
    with pytest.raises(ValueError, match=r"video_tokens: expected 0\.\.100"):
        PackedLayout(100, video)


def test_tail_mode_is_checked():
    with pytest.raises(ValueError, match="tail_mode"):
        PackedLayout(100, 64, "drop")
