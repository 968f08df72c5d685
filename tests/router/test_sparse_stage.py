"""The schedule, the context, and every row of the stage's gate."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch

from solspark.router import (
    BLOCK_MASK,
    MASKED_BLOCK,
    TAIL,
    Constraints,
    Entry,
    RouteCall,
    RouteContext,
    SparseConfig,
    SparseStage,
)
from solspark.router.schedule import schedule
from solspark.router.selector import diagonal_tiles
from solspark.router.stage import build_stage

BLOCK = frozenset({BLOCK_MASK})
BOTH = frozenset({BLOCK_MASK, MASKED_BLOCK})


def entry(caps):
    return Entry("a", "A", lambda *a: None, Constraints(), caps)


def stage_of(**settings):
    settings.setdefault("min_tokens", 0)
    settings.setdefault("allow_cpu", True)
    context = RouteContext()
    stage = SparseStage(SparseConfig(enabled=True, **settings), context)
    context.begin(steps=0)
    context.set_role("transformer")
    return stage, context


def call_of(tokens=700, key_tokens=None, heads=2, **options):
    query = torch.randn(1, heads, tokens, 8, generator=torch.Generator().manual_seed(0))
    key = torch.randn(1, heads, key_tokens or tokens, 8, generator=torch.Generator().manual_seed(1))
    return RouteCall(query, key, key, **options)


def test_schedule_values():
    assert schedule(20, 0.3, 0.3, 2) == (0.6,) * 2 + (0.3,) * 16 + (0.6,) * 2
    assert schedule(20, 0.3, 0.0, 2) == (0.3,) * 20
    assert schedule(20, 0.3, 0.3, 0) == (0.3,) * 20
    assert schedule(5, 0.3, 0.9, 2) == (1.0, 1.0, 0.3, 1.0, 1.0)
    assert schedule(3, 0.3, 0.3, 9) == (0.6,) * 3
    assert schedule(1, 0.3, 0.3, 1) == (0.6,)
    with pytest.raises(ValueError, match="steps"):
        schedule(0, 0.3, 0.3, 1)


def test_a_schedule_has_at_most_two_budgets():
    for steps, edge, fraction, bump in itertools.product(
        range(1, 30), range(0, 12), (0.0, 0.1, 0.5), (0.0, 0.25, 1.0)
    ):
        table = schedule(steps, 0.3, bump, edge, fraction)
        assert len(table) == steps and len(set(table)) <= 2
        assert table == table[::-1] and min(table) >= 0.3 and max(table) <= 1


@pytest.mark.parametrize("steps", [4, 8])
def test_short_schedules_keep_a_dense_step_at_each_end(steps):
    by_fraction = schedule(steps, 0.3, 0.7, 0, 0.1)
    by_count = schedule(steps, 0.3, 0.7, 1)
    for table in (by_fraction, by_count):
        assert table[0] == table[-1] == 1.0 and 0.3 in table


def test_the_context_counts_modular_and_classic_ticks():
    context = RouteContext()
    context.begin(steps=3)
    seen = []
    for _ in range(3):
        context.tick()
        seen.append(context.step)
    assert seen == [0, 1, 2] and context.forwards == 3
    context.new_pass(2)
    assert (context.step, context.steps) == (0, 2)
    context.tick()
    assert context.step == 0
    # A classic callback passes completed + 1.
    for completed in range(2):
        context.tick(completed + 1)
    assert context.step == 2 and context.forwards == 6
    with pytest.raises(ValueError, match=r"step.*-1"):
        context.set_step(-1)


def test_roles_nest_and_come_back():
    context = RouteContext()
    with context.as_role("transformer"):
        with pytest.raises(KeyError):
            with context.as_role("vae"):
                assert context.role == "vae"
                raise KeyError
        with context.as_role(None):
            assert context.role is None
        assert context.role == "transformer"
    assert context.role is None
    with pytest.raises(ValueError, match=r"role.*'decoder'"):
        context.set_role("decoder")


def test_the_step_buffer_is_updated_in_place():
    context = RouteContext()
    buffer = context.step_buffer()
    assert buffer.dtype == torch.int64 and buffer.ndim == 0
    address = buffer.data_ptr()
    context.begin(steps=4)
    for step in range(4):
        context.tick()
        assert context.step_buffer() is buffer and buffer.data_ptr() == address
        assert int(buffer) == step
    context.end()
    assert int(buffer) == 0 and not context.active


def test_the_stage_is_not_built_when_it_has_nothing_to_do(caplog):
    context = RouteContext()
    on = SparseConfig(enabled=True)
    assert build_stage(SparseConfig(), context, [entry(BLOCK)], ["A"]) is None
    assert build_stage(replace(on, budget=1.0), context, [entry(BLOCK)], ["A"]) is None
    assert not caplog.records
    with caplog.at_level(logging.INFO):
        assert build_stage(on, context, [entry(frozenset())], ["A", "B"]) is None
        assert len(caplog.records) == 1 and "A, B" in caplog.text
        assert build_stage(on, context, [entry(frozenset()), entry(BLOCK)], ["A"]) is not None
    assert len(caplog.records) == 2 and "30 %" in caplog.text and "8192" in caplog.text


def test_every_row_of_the_gate_in_its_order():
    mask = torch.ones(1, 1, 1, 700, dtype=torch.bool)
    flat = RouteCall(*[x[0] for x in call_of()[:3]])
    # Each case breaks one row; all rows before it hold.
    rows = [
        ("not the denoiser", {}, call_of(), BOTH, lambda c: c.set_role("te")),
        ("not the denoiser", {}, call_of(), BOTH, lambda c: c.end()),
        ("excluded", {"exclude": ("Thing",)}, call_of(), BOTH, named),
        ("causal", {}, call_of(is_causal=True, attn_mask=mask), BLOCK, None),
        ("masked", {}, call_of(tokens=700, key_tokens=9, attn_mask=mask), BLOCK, None),
        ("unsupported tensor", {}, flat, BOTH, None),
        ("unsupported tensor", {"allow_cpu": False}, call_of(key_tokens=9), BOTH, None),
        ("cross attention", {"min_tokens": 9000}, call_of(key_tokens=600), BOTH, None),
        ("below the minimum sequence", {"min_tokens": 701, "budget": 1.0}, call_of(), BOTH, None),
        ("budget covers everything", {"budget": 1.0}, call_of(), BOTH, None),
        ("no token layout", {"require_layout": True}, call_of(), BOTH, None),
        ("budget covers everything", {}, call_of(tokens=60), BOTH, None),
    ]
    for reason, settings, call, caps, change in rows:
        stage, context = stage_of(**settings)
        if change is not None:
            change(context)
        assert stage(call, caps) is None
        assert stage.last_skip == reason, (reason, stage.last_skip)
    stage, _ = stage_of(min_tokens=700)
    assert stage(call_of(is_causal=True), BOTH) is None
    assert stage(call_of(), BOTH) is not None
    assert stage.last_skip is None


def named(context):
    context.begin(type("ThingPipeline", (), {})())
    context.set_role("transformer")


def test_masked_calls_are_served_where_the_backend_can():
    stage, _ = stage_of()
    mask = torch.ones(1, 1, 1, 700, dtype=torch.bool)
    mask[..., 300:500] = False
    call = call_of(attn_mask=mask)
    assert stage(call, BLOCK) is None
    selection = stage(call, BOTH)
    # Tokens 320..447 are wholly hidden: key tiles 5 and 6.
    assert not selection.keep[..., 5:7].any() and selection.keep[..., 4].any()
    for pattern in ("radial", "adaptive"):
        stage, _ = stage_of(pattern=pattern)
        assert not stage(call, BOTH).keep[..., 5:7].any()


def test_a_tail_is_asked_of_backends_that_have_one(caplog):
    caplog.set_level(logging.INFO, "solspark.router")
    stage, context = stage_of(tail=True)
    assert stage(call_of(), BOTH | {TAIL}).tail
    assert not caplog.messages or "summaries" not in caplog.text
    for _ in range(2):
        assert not stage(call_of(), BOTH).tail
    assert caplog.text.count("no summaries") == 1
    context.publish_segments([("video", 512), ("pad", 188)])
    assert stage(call_of(), BOTH | {TAIL}).dropped.tolist() == [False] * 8 + [True] * 3
    plain, _ = stage_of()
    assert not plain(call_of(), BOTH | {TAIL}).tail
    with pytest.raises(TypeError, match=r"sparse\.tail"):
        SparseConfig(tail="yes")


def test_the_floor():
    assert SparseConfig().token_floor == 8192
    assert SparseConfig(min_tokens=0).token_floor == 0
    stage, _ = stage_of(min_tokens=None)
    assert stage(call_of(tokens=1000), BOTH) is None
    assert stage.last_skip == "below the minimum sequence"


@pytest.mark.parametrize(
    ("exclude", "excluded"),
    [
        ((), False),
        (("wan",), True),
        (("WANPIPELINE",), True),
        (("flux", " wantransformer3dmodel "), True),
        (("flux",), False),
        (("wa",), False),
        (("",), False),
    ],
)
def test_exclusion_by_architecture_pipeline_or_denoiser(exclude, excluded, caplog):
    stage, context = stage_of(exclude=exclude)
    denoiser = type("WanTransformer3DModel", (), {})()
    context.begin(type("WanPipeline", (), {"transformer": denoiser})())
    context.set_role("transformer")
    assert context.model_key == ("WanPipeline", "WanTransformer3DModel")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert (stage(call_of(), BOTH) is None) == excluded
    assert sum("exclusion list" in m for m in caplog.messages) == int(excluded)


def test_messages_are_said_once(caplog):
    mask = torch.ones(1, 1, 1, 700, dtype=torch.bool)
    stage, _ = stage_of(min_tokens=650)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            stage(call_of(attn_mask=mask), BLOCK)
            stage(call_of(tokens=600), BLOCK)
            stage(call_of(tokens=601), BLOCK)
            stage(call_of(tokens=700), BLOCK)
    assert sum("attn_mask" in m for m in caplog.messages) == 1
    assert sum("600 tokens stay dense" in m for m in caplog.messages) == 1
    assert sum("601 tokens stay dense" in m for m in caplog.messages) == 1
    assert sum("no token layout for 700" in m for m in caplog.messages) == 1
    assert len(caplog.messages) == 4


def test_a_schedule_gives_two_budgets_and_follows_the_step():
    stage, context = stage_of(budget=0.2, schedule_steps=2, schedule_bump=0.3)
    assert stage.budget == 0.2
    context.new_pass(6)
    budgets, densities = [], []
    for _ in range(8):
        context.tick()
        budgets.append(stage.budget)
        densities.append(stage(call_of(tokens=2000), BOTH).density())
    assert budgets == [0.5, 0.5, 0.2, 0.2, 0.5, 0.5, 0.5, 0.5]
    assert len(set(densities)) == 2 and densities[0] > densities[2]
    stage, context = stage_of(budget=0.3, schedule_steps=1, schedule_bump=1.0)
    context.new_pass(4)
    context.tick()
    assert stage(call_of(), BOTH) is None and stage.last_skip == "budget covers everything"
    context.tick()
    assert stage(call_of(), BOTH) is not None


def test_pins_raise_the_density_and_a_layout_of_another_length_is_not_used(caplog):
    stage, context = stage_of()
    plain = stage(call_of(), BOTH)
    context.publish_segments([("text", 100), ("video", 600)])
    pinned = stage(call_of(), BOTH)
    assert pinned.density() > plain.density()
    assert pinned.keep[:, :, 0].all() and pinned.keep[..., :2].all()
    context.publish_segments([("text", 100), ("video", 601)])
    with caplog.at_level(logging.INFO):
        other = stage(call_of(tokens=699), BOTH)
        stage(call_of(tokens=699), BOTH)
    assert not other.keep[:, :, 0].all()
    assert [m for m in caplog.messages if "describes 701" in m] == [
        "no token layout for 699 tokens (it describes 701): the whole sequence may go sparse"
    ]


def test_the_radial_pattern_ignores_content():
    stage, _ = stage_of(pattern="radial", budget=0.2)
    selection = stage(call_of(tokens=4000), BOTH)
    assert selection.keep.shape[:2] == (1, 1)
    assert selection.keep.bool()[0, 0][diagonal_tiles(4000, 128, 64)].all()
    adaptive, _ = stage_of(budget=0.2)
    assert abs(adaptive(call_of(tokens=4000), BOTH).density() - selection.density()) < 0.05


def test_a_closed_stage_no_longer_listens():
    stage, context = stage_of(schedule_steps=1, schedule_bump=0.3)
    stage.close()
    context.new_pass(5)
    assert stage.budget == 0.3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": 0.0}, r"sparse\.budget.*0\.0"),
        ({"budget": float("nan")}, r"sparse\.budget.*nan"),
        ({"min_tokens": -1}, r"sparse\.min_tokens.*-1"),
        ({"schedule_steps": -1}, r"sparse\.schedule_steps"),
        ({"schedule_fraction": 1.5}, r"sparse\.schedule_fraction"),
        ({"schedule_bump": -0.5}, r"sparse\.schedule_bump"),
        ({"pattern": "random"}, r"sparse\.pattern.*'random'"),
        ({"exclude": "wan"}, r"sparse\.exclude.*'wan'"),
        ({"query_tile": 100}, r"sparse\.query_tile.*100"),
        ({"score_chunk_bytes": 0}, r"sparse\.score_chunk_bytes"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        SparseConfig(**settings)
