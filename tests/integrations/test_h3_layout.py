"""The packed layout, derived from what the transformer is called with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from solspark.integrations.h3_layout import (
    FORWARD_POSITIONS,
    derive_layout,
    forward_arguments,
    structure_key,
    video_timestep,
)
from solspark.types import TokenGrid

GRIDS = [(6, 8, 8), (5, 4, 12), (1, 1, 3), (7, 1, 5)]


def arguments(request: Any, time: float = 0.5) -> dict[str, Any]:
    return forward_arguments((), request.inputs(time))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_target_is_the_suffix_in_raster_order(make_request: Any, task: str, grid: Any) -> None:
    request = make_request(task, grid)
    layout = derive_layout(arguments(request))
    assert layout.grid == TokenGrid(*grid)
    assert layout.video_tokens == request.video_tokens == grid[0] * grid[1] * grid[2]
    assert layout.tokens == request.tokens
    assert layout.condition_tokens == request.condition_video
    assert layout.order is None and not layout.mixed_timesteps


@pytest.mark.parametrize("time", [0.0, 0.9995, 1.0])
def test_conditions_at_the_targets_timestep_do_not_join_it(make_request: Any, time: float) -> None:
    # From t = 0.999 on the keyframes share the target's timestep.
    request = make_request("fl2va")
    assert derive_layout(arguments(request, time)).condition_tokens == 128


def test_vision_rows_carry_the_video_tag_without_being_video(make_request: Any) -> None:
    request = make_request("fl2va")
    tagged = int((request.structure["token_tags"] == 0).sum())
    layout = derive_layout(arguments(request))
    assert tagged == layout.video_tokens + layout.condition_tokens + 4


def test_pack_is_the_permutation_of_the_contract(make_request: Any) -> None:
    request = make_request("ref2va", (5, 4, 12))
    layout = derive_layout(arguments(request))
    rows = torch.arange(layout.tokens)[None, :, None]
    packed = layout.pack(rows)
    expected = [*range(layout.start, layout.tokens), *range(layout.start)]
    assert packed.flatten().tolist() == expected
    assert torch.equal(layout.unpack(packed), rows)


@pytest.mark.parametrize("shuffled", [False, True], ids=["rotation", "permutation"])
def test_packed_rows_are_parts_of_what_pack_makes(make_request: Any, shuffled: bool) -> None:
    layout = derive_layout(arguments(make_request("ref2va", (5, 4, 12))))
    if shuffled:
        layout = dataclasses.replace(layout, order=torch.randperm(layout.video_tokens))
    rows = torch.arange(layout.tokens)[None, :, None]
    packed = layout.pack(rows)
    for size in (1, 64, 240, 241, 4096):
        for first in range(0, layout.tokens, size):
            part = layout.packed_rows(rows, first, first + size)
            assert torch.equal(part, packed[:, first : first + size])


def test_rows_out_of_raster_order_are_sorted(make_request: Any) -> None:
    request = make_request("t2va", (5, 4, 12))
    structure = request.structure
    start = int(structure["video_indices"][0])
    order = torch.randperm(240, generator=torch.Generator().manual_seed(1))
    positions = structure["position_ids"].clone()
    positions[start:] = positions[start:][order]
    shuffled = {**arguments(request), "position_ids": positions}
    layout = derive_layout(shuffled)
    assert layout.grid == TokenGrid(5, 4, 12) and layout.order is not None
    rows = positions.float()[None]
    raster = structure["position_ids"].float()[start:]
    assert torch.equal(layout.pack(rows)[0, :240], raster)
    assert torch.equal(layout.pack(rows)[0, 240:], rows[0, :start])
    assert torch.equal(layout.unpack(layout.pack(rows)), rows)


def test_float32_positions_give_the_same_grid(make_request: Any) -> None:
    # Devices without float64 get the coordinates in float32.
    request = make_request("t2va", (37, 6, 10))
    found = arguments(request)
    found["position_ids"] = found["position_ids"].float()
    assert derive_layout(found).grid == TokenGrid(37, 6, 10)


def test_tags_and_positions_are_enough(make_request: Any) -> None:
    request = make_request("t2va")
    names = ("token_tags", "position_ids")
    layout = derive_layout({name: request.structure[name] for name in names})
    assert layout.grid == TokenGrid(6, 8, 8)


@pytest.mark.parametrize("name", ["token_tags", "position_ids"])
def test_missing_structure_is_a_runtime_error(make_request: Any, name: str) -> None:
    found = {**arguments(make_request()), name: None}
    with pytest.raises(RuntimeError, match=f"^{name}: needed"):
        derive_layout(found)


def test_target_must_be_the_suffix(make_request: Any) -> None:
    found = arguments(make_request())
    found["video_indices"] = found["video_indices"][:-1]
    with pytest.raises(ValueError, match="end the packed sequence at row 434, got row 433"):
        derive_layout(found)


def test_target_must_be_a_dense_grid(make_request: Any) -> None:
    found = arguments(make_request())
    positions = found["position_ids"].clone()
    positions[-1, 2] += 100.0
    found["position_ids"] = positions
    with pytest.raises(ValueError, match=r"not a dense grid.*\[6, 8, 9\]"):
        derive_layout(found)


def test_repeated_coordinates_are_no_grid(make_request: Any) -> None:
    found = arguments(make_request())
    positions = found["position_ids"].clone()
    positions[-1] = positions[-2]
    found["position_ids"] = positions
    with pytest.raises(ValueError, match="not a dense grid"):
        derive_layout(found)


def test_target_must_be_tagged_as_video(make_request: Any) -> None:
    found = arguments(make_request())
    tags = found["token_tags"].clone()
    tags[-3] = 2
    found["token_tags"] = tags
    with pytest.raises(ValueError, match=r"token_tags: expected 0 .*got \[0, 2\]"):
        derive_layout(found)


@pytest.mark.parametrize("name", ["video_indices", "text_indices"])
def test_empty_segments(make_request: Any, name: str) -> None:
    found = {**arguments(make_request()), name: torch.zeros(0, dtype=torch.long)}
    with pytest.raises(ValueError, match=f"{name}: expected at least one row"):
        derive_layout(found)


def test_ranks(make_request: Any) -> None:
    found = arguments(make_request())
    with pytest.raises(ValueError, match=r"token_tags: expected \[S\]"):
        derive_layout({**found, "token_tags": found["token_tags"][None]})
    with pytest.raises(ValueError, match=r"position_ids: expected \[435, 3\]"):
        derive_layout({**found, "position_ids": found["position_ids"][:, :2]})
    with pytest.raises(ValueError, match=r"timestep_indices: expected \[435\]"):
        derive_layout({**found, "timestep_indices": found["timestep_indices"][:-1]})


def test_held_target_rows_are_noticed(make_request: Any) -> None:
    found = arguments(make_request())
    held = found["timestep_indices"].clone()
    held[-384:-320] += 1
    assert derive_layout({**found, "timestep_indices": held}).mixed_timesteps


def test_keyframes_without_audio_between_do_not_join_the_target(make_request: Any) -> None:
    request = make_request("fl2va", audio=0)
    structure = request.structure
    video = structure["video_indices"]
    assert torch.equal(video, torch.arange(int(video[0]), request.tokens)), "one run"
    layout = derive_layout(arguments(request))
    assert layout.grid == TokenGrid(6, 8, 8)
    assert layout.condition_tokens == 128 and not layout.mixed_timesteps


def test_arguments_by_keyword_or_position(make_request: Any, shared_transformer: Any) -> None:
    import inspect

    request = make_request()
    inputs = request.inputs(0.25)
    names = list(inspect.signature(type(shared_transformer).forward).parameters)[1:]
    for name, position in FORWARD_POSITIONS.items():
        assert names[position] == name
    positional = forward_arguments([inputs[name] for name in names], {})
    by_name = forward_arguments((), inputs)
    assert all(positional[name] is by_name[name] is inputs[name] for name in FORWARD_POSITIONS)
    assert video_timestep(by_name) == 0.25


def test_key_sees_identity_and_changes_in_place(make_request: Any) -> None:
    request = make_request()
    found = arguments(request, 0.1)
    assert structure_key(found) == structure_key(arguments(request, 0.9))
    before = structure_key(found)
    found["position_ids"].add_(0.0)
    assert structure_key(found) != before
    assert structure_key({**found, "token_tags": found["token_tags"].clone()}) != before
    with torch.inference_mode():
        # Inference tensors keep no version; asking for it raises.
        structure_key({"token_tags": torch.zeros(3)})
