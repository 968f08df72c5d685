"""Token layouts: index tensors, stream ids, segments, and the tiles that they pin or drop."""

from __future__ import annotations

import gc

import pytest
import torch

from solspark.router.layout import (
    LayoutReader,
    Span,
    TokenLayout,
    layout_from_indices,
    layout_from_segments,
    layout_from_stream_ids,
    live_segments,
    tile_pins,
)


def spans(layout):
    return [(s.kind, s.start, s.end) for s in layout.spans]


def test_indices_become_spans_and_all_but_the_last_video_run_is_conditioning():
    layout = layout_from_indices(
        {
            "text_indices": torch.arange(0, 10),
            "audio_indices": torch.arange(30, 50),
            "video_indices": torch.cat([torch.arange(10, 30), torch.arange(50, 90)]),
            "hidden_states": torch.zeros(3),
            "mask_indices": torch.zeros(3),
            "grid_indices": torch.zeros(2, 2, dtype=torch.long),
        }
    )
    assert spans(layout) == [
        ("text", 0, 10),
        ("cond", 10, 30),
        ("audio", 30, 50),
        ("video", 50, 90),
    ]
    assert layout.length == 90 and layout.source == "indices"
    assert layout.kinds == ("text", "cond", "audio", "video")


def test_indices_that_are_no_positions_are_left_out():
    # H3 passes one timestep index a token under a name that ends alike.
    layout = layout_from_indices(
        {
            "timestep_indices": torch.zeros(20, dtype=torch.long),
            "text_indices": torch.arange(5),
            "video_indices": torch.arange(8, 20),
        }
    )
    assert spans(layout) == [("text", 0, 5), ("unknown", 5, 8), ("video", 8, 20)]


def test_no_indices_and_contradicting_indices_publish_nothing():
    assert layout_from_indices({}) is None
    assert layout_from_indices({"video_ids": torch.arange(5)}) is None
    clash = {"text_indices": torch.arange(0, 6), "video_indices": torch.arange(5, 9)}
    assert layout_from_indices(clash) is None
    assert layout_from_indices({"video_indices": torch.tensor([-1, 0, 1])}) is None


@pytest.mark.parametrize("lead", [(), (1,)])
def test_stream_ids_of_known_models_only(lead):
    kwargs = {"txt_ids": torch.zeros(*lead, 77, 3), "img_ids": torch.zeros(*lead, 1024, 3)}
    layout = layout_from_stream_ids("FluxTransformer2DModel", kwargs)
    assert spans(layout) == [("text", 0, 77), ("image", 77, 1101)]
    assert layout.source == "stream ids"
    assert layout_from_stream_ids("HiDreamImageTransformer2DModel", kwargs) is None
    assert layout_from_stream_ids("FluxTransformer2DModel", {"txt_ids": kwargs["txt_ids"]}) is None


def test_stream_ids_are_known_by_the_models_that_diffusers_has():
    diffusers = pytest.importorskip("diffusers")
    from solspark.router.layout import TEXT_FIRST_MODELS

    for name in TEXT_FIRST_MODELS:
        assert hasattr(diffusers, name), name


def test_segments_join_and_vanish_and_are_checked():
    layout = layout_from_segments([("text", 3), ("pad", 0), ("text", 4), ("video", 5), ("pad", 2)])
    assert spans(layout) == [("text", 0, 7), ("video", 7, 12), ("pad", 12, 14)]
    with pytest.raises(ValueError, match=r"segments.*-1"):
        layout_from_segments([("text", -1)])
    with pytest.raises(ValueError, match="at least one token"):
        layout_from_segments([("text", 0)])


def test_padding_inside_a_segment():
    live = torch.tensor([1, 1, 0, 0, 0, 1, 0], dtype=torch.bool)
    segments = live_segments("text", live)
    assert segments == [("text", 2), ("pad", 3), ("text", 1), ("pad", 1)]
    layout = layout_from_segments([*segments, ("video", 9)])
    assert layout.kinds == ("text", "pad", "text", "pad", "video") and layout.length == 16
    with pytest.raises(ValueError, match=r"live.*one dimension"):
        live_segments("text", live[None])


def test_a_layout_must_cover_its_length():
    with pytest.raises(ValueError, match="start of 3"):
        TokenLayout((Span("a", 0, 3), Span("b", 4, 5)), 5, "segments")
    with pytest.raises(ValueError, match="cover 3"):
        TokenLayout((Span("a", 0, 3),), 5, "segments")


def test_pins_and_drops_of_text_video_padding():
    layout = layout_from_segments([("text", 128), ("video", 1024), ("pad", 128)])
    pins, drops = tile_pins(layout, 128, 64)
    assert pins.shape == (10, 20) and drops.shape == (20,)
    assert drops.nonzero().flatten().tolist() == [18, 19]
    assert pins[0, :18].all() and not pins[:, 18:].any()
    assert pins[:, :2].all()
    # Rows of video (1..8) and of padding (9) are pinned to the text keys alone.
    assert not pins[1:, 2:].any()


def test_boundary_tiles_are_pinned():
    layout = layout_from_segments([("text", 100), ("video", 900)])
    pins, drops = tile_pins(layout, 128, 64)
    assert not drops.any()
    # Tokens 100..127 are video in a query tile with text; 100..127 share key tile 1 with text.
    assert pins[0].all() and pins[:, :2].all() and not pins[1:, 2:].any()


def test_interior_padding_drops_whole_tiles_only():
    layout = layout_from_segments(
        [("text", 64), ("pad", 100), ("text", 92), ("video", 512), ("image", 10), ("depth", 1)]
    )
    pins, drops = tile_pins(layout, 128, 64)
    # Padding covers 64..163: key tile 1 whole, key tile 2 (128..191) in part.
    assert drops.nonzero().flatten().tolist() == [1]
    assert not pins[:, 1].any()
    assert pins[:, [0, 2, 3]].all()
    # An unknown kind in the last tile pins it.
    assert pins[:, -1].all() and pins[-1, [i for i in range(pins.shape[1]) if i != 1]].all()
    assert not pins[2:-1, 4:-1].any()


def test_the_reader_reads_index_tensors_once():
    reads = []

    class Spy(torch.Tensor):
        def tolist(self):
            reads.append(1)
            return torch.Tensor.tolist(self.as_subclass(torch.Tensor))

    reader = LayoutReader()
    indices = torch.arange(10).as_subclass(Spy)
    first = reader.read("Model", {"video_indices": indices})
    assert reader.read("Model", {"video_indices": indices}) is first
    assert len(reads) == 1
    indices += 1
    assert reader.read("Model", {"video_indices": indices}).length == 11
    assert len(reads) == 2
    del indices
    gc.collect()
    other = torch.arange(12).as_subclass(Spy)
    assert reader.read("Model", {"video_indices": other}).length == 12
    assert reader.read("FluxTransformer2DModel", {}) is None


def test_the_reader_works_in_inference_mode():
    reader = LayoutReader()
    with torch.inference_mode():
        indices = torch.arange(10)
        assert reader.read("Model", {"video_indices": indices}).length == 10
        assert reader.read("Model", {"video_indices": indices}).length == 10
