from __future__ import annotations

import pytest

from solspark.bench.cost import H200_BF16, attend_cost, plan_cost, reblock_cost, reweight_cost
from solspark.bench.problems import PROBLEMS, get_problem


@pytest.mark.parametrize(
    ("name", "tokens", "heads", "video", "rest"),
    [
        ("h3-5s", 38_222, 56, 37_296, 48),
        ("h3-10s", 73_584, 56, 72_576, 0),
        ("h3-14s", 104_050, 56, 102_816, 32),
        ("wan21-720p", 75_600, 40, 75_600, 16),
        ("hunyuan-720p", 119_056, 24, 118_800, 16),
        ("ltx-1080p", 32_640, 32, 32_640, 0),
        ("gate-8k", 8_192, 56, 8_192, 0),
        ("long-310k", 310_000, 56, 309_456, 16),
    ],
)
def test_named_problems_have_their_published_shapes(name, tokens, heads, video, rest):
    problem = get_problem(name)
    assert (problem.tokens, problem.heads, problem.video_tokens) == (tokens, heads, video)
    assert problem.video_tokens % 64 == rest
    assert problem.sink_start == video - rest


def test_the_long_problem_has_more_elements_than_an_int32_counts():
    problem = get_problem("long-310k")
    assert problem.tokens * problem.heads * problem.head_dim > 2**31


def test_tiny_is_ragged_with_rows_outside_complete_blocks_and_a_context():
    tiny = get_problem("tiny")
    assert tiny.tokens % 64 and tiny.video_tokens % 64 and tiny.context_tokens


def test_every_gate_problem_has_the_length_of_its_name():
    for thousands in (2, 4, 8, 16, 32, 64, 72):
        assert get_problem(f"gate-{thousands}k").tokens == thousands * 1024


def test_an_unknown_problem_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"problem: expected one of h3-5s.*got 'h4'"):
        get_problem("h4")


def test_another_grid_keeps_the_model():
    small = get_problem("h3-5s").with_grid(5, 12, 21)
    assert small.video_tokens == 5 * 12 * 21
    assert small.heads == 56
    assert small.name == "h3-5s@5x12x21"
    assert get_problem("h3-5s") is PROBLEMS["h3-5s"]


def test_costs_count_what_is_done():
    problem = get_problem("h3-10s")
    dense = attend_cost(problem, 1.0, tail="none")
    assert dense.flops == 4 * 73_584**2 * 128 * 56
    # 10 % of the pairs and one summary key a block of 64: the ideal speed-up of Sol.
    tenth = attend_cost(problem, 0.1)
    assert dense.flops / tenth.flops == pytest.approx(1 / (0.1 + 1150 / 73_584))
    assert attend_cost(problem, 0.1, tail="block").flops < tenth.flops
    # Memory decides for planning and summaries, arithmetic for attention.
    assert 0.4 < reweight_cost(problem).floor_ms(H200_BF16) < 0.6
    assert 2 < reblock_cost(problem).floor_ms(H200_BF16) < 3.5
    assert plan_cost(problem).floor_ms(H200_BF16) < 1.0
    assert (dense + tenth).bytes == dense.bytes + tenth.bytes
