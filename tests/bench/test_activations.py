from __future__ import annotations

import math

import pytest
import torch

from solspark.bench import activations
from solspark.bench.activations import (
    ARCHETYPES,
    head_kind,
    video_activations,
)
from solspark.bench.problems import get_problem
from solspark.bench.rotary import apply_rotary, axis_positions, position_ids, rotary_table

SMALL = get_problem("h3-5s").with_grid(9, 12, 20)


def test_a_head_is_the_same_alone_and_among_others_and_in_every_run():
    together = video_activations(SMALL, heads=[3, 0], dtype=torch.float32)
    alone = video_activations(SMALL, heads=[0], dtype=torch.float32)
    again = video_activations(SMALL, heads=[3, 0], dtype=torch.float32)
    for three, one, same in zip(together, alone, again, strict=True):
        assert torch.equal(three[:, :, 1:], one)
        assert torch.equal(three, same)
    other = video_activations(SMALL, heads=[0], dtype=torch.float32, seed=1)
    assert not torch.equal(alone.query, other.query)


def test_shapes_types_and_fused_views():
    tiny = get_problem("tiny")
    apart = video_activations("tiny")
    fused = video_activations("tiny", fused=True)
    for one, two in zip(apart, fused, strict=True):
        assert one.shape == (1, tiny.tokens, tiny.heads, 128)
        assert one.dtype == torch.bfloat16
        assert one.is_contiguous() and not two.is_contiguous()
        assert two.stride(1) == 3 * tiny.heads * 128
        assert torch.equal(one, two)
        assert one.isfinite().all()


def test_hashed_noise_is_white_and_of_unit_variance():
    noise = activations._normal([400, 500], activations._key(7), torch.device("cpu"))
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    other = activations._normal([400, 500], activations._key(8), torch.device("cpu"))
    pairs = ((noise, other), (noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:]))
    for one, two in pairs:
        assert abs(float((one * two).mean())) < 0.01


def test_rotary_positions_are_those_of_the_model():
    before_denoise = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.before_denoise")
    problem = get_problem("h3-5s").with_grid(7, 6, 10)
    built = before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(problem.text_tokens, dtype=torch.long),
        7,
        12,
        20,
        problem.audio_tokens // 2,
        (1, 2, 2),
        2,
        2,
        0,
        (),
    )
    positions, _, video, audio, text = built[:5]
    ours = position_ids(problem)
    # The model packs text, audio, video; the attention sees video, text, audio.
    theirs = torch.cat([positions[video], positions[text], positions[audio]])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)

    transformer = pytest.importorskip("diffusers.models.transformers.transformer_minimax_h3")
    cos, sin = rotary_table(ours, torch.device("cpu"))
    want_cos, want_sin = transformer.MiniMaxH3RotaryPosEmbed()(theirs)
    # The model multiplies angles of some hundreds in float32; ours reduce them in float64 first.
    torch.testing.assert_close(torch.cat([cos, cos], 1), want_cos, rtol=0, atol=2e-4)
    rows = torch.randn(problem.tokens, 128)
    want = transformer._apply_rotary_emb(rows[None, :, None], want_cos, want_sin)[0, :, 0]
    torch.testing.assert_close(apply_rotary(rows, cos, sin), want, rtol=0, atol=2e-3)
    assert sin.shape == want_sin[:, :48].shape


def test_frames_advance_as_the_latents_do():
    time, rows, columns = axis_positions(get_problem("h3-5s"))
    steps = time.diff()
    assert torch.allclose(steps[:5] * 3 / 5, torch.tensor([1.0, 4, 4, 4, 4]).double())
    assert len(rows) == 24 and len(columns) == 42
    assert float(rows.diff()[0]) == pytest.approx(float(columns.diff()[0]))


def test_outlier_channels_change_no_attention():
    query, key = torch.randn(50, 128), torch.randn(70, 128)
    plain = (query @ key.T).softmax(1)
    activations._add_outliers(query, key, 3, 4)
    scale = key.square().mean(0).sqrt()
    assert float(scale.max() / scale.median()) > 4
    torch.testing.assert_close((query @ key.T).softmax(1), plain, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", list(ARCHETYPES))
def test_each_kind_attends_where_its_name_says(name):
    head = next(i for i in range(10) if head_kind(i) == name)
    problem = get_problem("h3-5s").with_grid(13, 16, 28)
    query, key, _ = video_activations(problem, heads=[head], dtype=torch.float32)
    frames, height, width = problem.grid.as_tuple()
    rows = torch.arange(0, problem.video_tokens, 97)
    logits = query[0, rows, 0] @ key[0, :, 0].T / math.sqrt(128)
    mass = logits.softmax(1)
    video = mass[:, : problem.video_tokens].view(-1, frames, height, width)
    t, y, x = rows // (height * width), rows // width % height, rows % width
    index = torch.arange(len(rows))
    same_frame = float(video.sum((2, 3))[index, t].mean()) * frames
    lines = video.sum(1)
    near = torch.zeros(len(rows))
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            near += lines[index, (y + dy).clamp(0, height - 1), (x + dx).clamp(0, width - 1)]
    same_place = float(near.mean()) * height * width / 9
    text = slice(problem.video_tokens, problem.video_tokens + problem.text_tokens)
    told = float(mass[:, text].sum(1).mean()) * problem.tokens / problem.text_tokens
    # Each figure is how many times a uniform attention's share it is.
    if name == "local":
        assert same_frame > 2 and same_place > 3
    elif name == "spatial":
        assert same_frame > 2
    elif name == "temporal":
        assert same_place > 3 and same_frame < same_place
    elif name == "text":
        assert told > 1
    else:
        assert same_frame < 4 and told < 1


def test_wrong_heads_and_dims_are_refused():
    with pytest.raises(ValueError, match=r"heads: expected indices in \[0, 2\), got \[2\]"):
        video_activations("tiny", heads=[2])
    with pytest.raises(ValueError, match="heads"):
        video_activations("tiny", heads=[])
    narrow = get_problem("tiny")
    object.__setattr__(narrow := type(narrow)(**vars(narrow)), "head_dim", 64)
    with pytest.raises(ValueError, match=r"problem.head_dim: expected at least 128, got 64"):
        video_activations(narrow)


@pytest.mark.gpu
def test_a_device_makes_what_the_cpu_makes():
    here = video_activations("tiny", dtype=torch.float32)
    there = video_activations("tiny", dtype=torch.float32, device="cuda")
    for one, two in zip(here, there, strict=True):
        torch.testing.assert_close(one, two.cpu(), rtol=1e-4, atol=1e-4 * float(one.abs().max()))


@pytest.mark.gpu
def test_a_production_layer_is_made_in_bounded_memory():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = video_activations("h3-10s", device="cuda")
    peak = torch.cuda.max_memory_allocated() - before
    size = sum(x.numel() * x.element_size() for x in made)
    assert made.query.shape == (1, 73_584, 56, 128)
    assert all(bool(x.isfinite().all()) for x in made)
    assert peak - size < 2 * 2**30
