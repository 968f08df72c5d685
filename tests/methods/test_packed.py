"""Packed attention: the merge formula, what must equal dense attention, and every option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solspark.errors import UnsupportedError
from solspark.methods import aside, spark_call
from solspark.methods.reblock import PreparedLandmarkTreeV2Permutation
from solspark.methods.spark import (
    PRESETS,
    RESOLVED_EXECUTIONS,
    PackedConfig,
    ReblockConfig,
    packed_attention,
    spark_reweight,
)
from solspark.methods.spark_order import plan_orders
from solspark.ops.permute import permute, unpermute
from solspark.ops.pool import pool
from solspark.ops.reblock import squared_norms
from solspark.ops.select_blocks import mask_from_plan
from solspark.plan.layout import PackedLayout
from solspark.plan.routing import plan_tau, plan_top_k
from solspark.plan.select import budget
from solspark.plan.virtual_queries import choose_virtual_queries
from solspark.reference.anchors import anchors
from solspark.reference.hierarchy import capacity_hierarchy
from solspark.reference.reweight import reweight
from solspark.testing import (
    LAYOUTS,
    assert_close_to_oracle,
    make_qkv,
    nan_filled_allocations,
)
from solspark.types import TokenGrid

SPARK = PackedConfig()
FLAT = replace(SPARK, reblock=None, force_local_blocks=False)
SOL = replace(FLAT, virtual_query_levels_up=None)
GRID = TokenGrid(8, 9, 16)
CONTEXT = 7


def attend(query, key, value, config, grid=GRID, **options):
    return packed_attention(
        query, key, value, video_tokens=grid.tokens, grid=grid, config=config, **options
    )


def dense_oracle(query, key, value):
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(1, 2)


def summaries_of(query, key, value, layout, topology, config):
    """Return the reference's anchors and summaries in the dtype of the inputs."""
    prefix = query[:, : layout.sparse_tokens]
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    means = prefix.to(work).unflatten(1, (-1, 64)).mean(2).transpose(1, 2)
    count = topology.parents_within(layout.query_blocks)
    anchor = anchors(means, topology.ranges[:count], dtype=query.dtype)
    return reweight(
        anchor, key, value, reweight_components=config.reweight_components, block_tokens=64
    )


def merged(query, key, value, mask, layout, topology, config):
    """The merge of exact keys and summaries, written out in the inputs' accumulation dtype."""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    ak, av, lm = summaries_of(query, key, value, layout, topology, config)
    scale = query.shape[-1] ** -0.5
    out = dense_oracle(query, key, value).to(work)
    q, k, v = (x.transpose(1, 2).to(work) for x in (query, key, value))
    for block in range(layout.query_blocks):
        rows = slice(block * 64, block * 64 + 64)
        parent = topology.parents[block]
        exact = mask[:, :, block]
        tokens = exact.repeat_interleave(64, -1)[..., : layout.tokens]
        near = scale * q[:, :, rows] @ k.transpose(2, 3)
        near = near.masked_fill(~tokens[:, :, None], -torch.inf)
        far = scale * q[:, :, rows] @ ak[:, parent].to(work).transpose(2, 3)
        far = far + lm[:, parent, :, None].to(work)
        far = far.masked_fill(exact[:, :, None], -torch.inf)
        weights = torch.cat([near, far], -1).softmax(-1)
        result = weights @ torch.cat([v, av[:, parent].to(work)], 2)
        out[:, rows] = result.transpose(1, 2)
    return out


def topology_of(layout, levels_up=99, max_children=16):
    levels = capacity_hierarchy(layout.candidates, max_children=max_children).levels
    return choose_virtual_queries(layout.tokens, levels, levels_up=levels_up)


def check_against_merge(out, tensors, mask, layout, config):
    topology = topology_of(layout, config.virtual_query_levels_up)
    oracle = merged(*(x.double() for x in tensors), mask, layout, topology, config)
    peer = merged(*tensors, mask, layout, topology, config).to(out.dtype)
    assert_close_to_oracle(out, oracle, peer)


def route_of(query, key, layout, config):
    """Return the mask that packed attention must follow, from the plan's own functions."""
    prefix = query[:, : layout.sparse_tokens]
    pooled = pool(prefix, key, None)
    scale = query.shape[-1] ** -0.5
    if config.topk_ratio is None:
        plan = plan_tau(
            pooled.query_means,
            pooled.key_means,
            pooled.key_mean,
            pooled.key_var,
            layout,
            tau=config.tau,
            kind=config.thresh_type,
            scale=scale,
            local_radius=config.local_radius,
        )
    else:
        plan = plan_top_k(
            pooled.query_means,
            pooled.key_means,
            layout,
            top_k=budget(config.topk_ratio, layout.candidates),
            scale=scale,
            local_radius=config.local_radius,
        )
    return mask_from_plan(plan.plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("components", ["full", "weights_only", "bias_only", "none"])
@pytest.mark.parametrize("levels_up", [0, 1, 99])
def test_merge_formula(dtype, components, levels_up):
    config = replace(
        FLAT, reweight_components=components, virtual_query_levels_up=levels_up, topk_ratio=0.2
    )
    tensors = make_qkv(1, GRID.tokens + CONTEXT, 2, 64, dtype=dtype)
    layout = PackedLayout(GRID.tokens + CONTEXT, GRID.tokens)
    out, record = attend(*tensors, config)
    check_against_merge(out, tensors, route_of(*tensors[:2], layout, config), layout, config)
    assert record.route == "top_k" and record.figures["target_top_k"] == 4


@pytest.mark.parametrize("kind", ["diag", "exact"])
def test_merge_formula_under_tau(kind):
    config = replace(FLAT, topk_ratio=None, tau=0.5, thresh_type=kind, force_local_blocks=True)
    tensors = make_qkv(2, GRID.tokens + CONTEXT, 2, 64)
    layout = PackedLayout(GRID.tokens + CONTEXT, GRID.tokens)
    out, record = attend(*tensors, config)
    mask = route_of(*tensors[:2], layout, config)
    check_against_merge(out, tensors, mask, layout, config)
    assert record.route == record.resolved_execution == f"tau_{kind}"
    assert record.requested_execution is None and record.figures["target_top_k"] is None
    assert record.density == pytest.approx(float(mask.float().mean()))


@pytest.mark.parametrize("reuse", ["independent", "q_from_k", "k_from_q"])
def test_reordering_is_undone(reuse):
    reblock = ReblockConfig(layout_reuse=reuse)
    config = replace(SPARK, reblock=reblock, topk_ratio=0.2)
    tensors = make_qkv(1, GRID.tokens + CONTEXT, 2, 64, seed=3)
    out, record = attend(*tensors, config)
    orders = plan_orders(*tensors[:2], GRID, reblock, {})
    query = permute(tensors[0], orders.query)
    key, value = (permute(x, orders.key) for x in tensors[1:])
    inner, _ = attend(query, key, value, replace(config, reblock=None, force_local_blocks=False))
    assert torch.equal(out, unpermute(inner, orders.query))
    assert not torch.equal(query, tensors[0])
    assert record.reblock["layout_reuse"] == reuse and record.counters["reblock"] == 1


@pytest.mark.parametrize("exact", [{"topk_ratio": 1.0}, {"topk_ratio": None, "tau": -1e9}])
@pytest.mark.parametrize("tail", ["dense", "pad"])
@pytest.mark.parametrize("base", [SPARK, SOL, FLAT], ids=["spark", "sol", "flat"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_everything_exact_is_dense_attention(dtype, base, tail, exact):
    if tail == "pad" and base is SOL and "tau" in exact:
        pytest.skip("plain Sol by threshold refuses to pad")
    grid = TokenGrid(1, 2, 257)
    config = replace(base, video_tail_mode=tail, **exact)
    tensors = make_qkv(1, grid.tokens + 63, 3, 64, dtype=dtype, seed=5)
    out, record = attend(*tensors, config, grid)
    again, _ = attend(*tensors, config, grid)
    assert torch.equal(out, again)
    oracle = dense_oracle(*tensors)
    if dtype == torch.float64:
        torch.testing.assert_close(out, oracle, atol=1e-13, rtol=0)
    else:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        peer = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        assert_close_to_oracle(out, oracle, peer)
    assert record.density == 1.0 and record.video_density == 1.0


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_attend(name):
    tensors = make_qkv(1, GRID.tokens + 100, 2, 64)
    out, record = attend(*tensors, PRESETS[name])
    assert out.isfinite().all() and record.route == "top_k"
    exact, _ = attend(*tensors, replace(PRESETS[name], topk_ratio=1.0))
    torch.testing.assert_close(exact.double(), dense_oracle(*tensors), atol=1e-6, rtol=1e-5)


def test_presets_are_the_documented_ones():
    assert PRESETS["default"] == PackedConfig()
    assert PRESETS["quality"].reblock == ReblockConfig(landmark_count=64)
    assert PRESETS["fast"].reblock == ReblockConfig(layout_reuse="q_from_k")


OPTIONS = {
    "execution": {"topk_execution": "fused"},
    "gaussian": {"topk_cutoff_mode": "gaussian_moments"},
    "mean score": {"route_score": "mean", "force_local_blocks": True},
    "weighted_k": {"route_score": "weighted_k", "force_local_blocks": True},
    "weighted_mass": {"route_score": "weighted_mass", "force_local_blocks": True},
    "weighted_mass by block": {
        "route_score": "weighted_mass",
        "force_local_blocks": True,
        "virtual_query_levels_up": 0,
    },
    "global both": {"global_weighted_mean": True},
    "global query": {"global_weighted_mean": True, "global_weighted_mean_side": "query"},
    "global key": {"global_weighted_mean": True, "global_weighted_mean_side": "key"},
    "head budgets": {"head_budgets": (1, 5)},
    "splits": {"kv_splits": 3},
    "pad": {"video_tail_mode": "pad"},
    "block tail": {"tail_granularity": "block"},
    "8x8 tail": {"tail_granularity": "block8x8"},
    "block tail, anchors by block": {"tail_granularity": "block", "virtual_query_levels_up": 0},
    "8x8 tail, plain means": {"tail_granularity": "block8x8", "virtual_query_levels_up": None},
    "block tail, plain means": {"tail_granularity": "block", "virtual_query_levels_up": None},
    "plain means": {"virtual_query_levels_up": None},
    "target": {
        "virtual_query_levels_up": None,
        "virtual_query_target_blocks": 2,
        "virtual_query_min_blocks": 1,
        "virtual_query_max_blocks": 4,
    },
    "fp32 anchors": {"anchor_dtype": "float32"},
    "fp32 summaries": {"summary_math": "comfy_fp32"},
    "pre-round": {"logmass_key": "pre_round"},
    "bias only": {"reweight_components": "bias_only"},
    "tau": {"topk_ratio": None},
    "tau exact": {"topk_ratio": None, "thresh_type": "exact"},
    "local": {"force_local_blocks": True},
    "radius": {"exact_block_radius": 2, "reblock": ReblockConfig(layout_reuse="q_from_k")},
    "raw features": {"reblock": ReblockConfig(m2_side="none")},
    "one side": {"reblock": ReblockConfig(m2_side="key")},
    "estimator": {"reblock": ReblockConfig(m2_estimator="full")},
    "unit moments": {"reblock": ReblockConfig(moment_mode="unit", m2_factor="eigh")},
    "input unit": {"reblock": ReblockConfig(mean_mode="input_unit", landmark_mode="mean")},
    "metric unit": {"reblock": ReblockConfig(mean_mode="metric_unit", landmark_mode="mean")},
    "tree": {
        "reblock": ReblockConfig(
            max_children=(4, 2),
            fanout_mode="arbitrary_fanout",
            final_fanout=3,
            initial_order="hilbert_hwt",
            order_mode="scalar_order",
            proxy_iterations=1,
            proxy_seed_rule="endpoint_order",
        )
    },
    "no reblock": {"reblock": None},
    "sol": {"reblock": None, "virtual_query_levels_up": None, "topk_ratio": None},
}


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_every_option_represents_every_token_once(options):
    """With equal values everywhere any convex combination of them is that value."""
    config = replace(SPARK, **options)
    grid = TokenGrid(5, 9, 12)
    query, key, value = make_qkv(1, grid.tokens + 70, 2, 64, seed=11)
    constant = torch.linspace(-2, 2, 64).expand_as(value)
    out, record = attend(query, key, constant, config, grid)
    torch.testing.assert_close(out, constant.contiguous(), atol=3e-6, rtol=0)
    # And the option does something that is near dense attention without being it.
    out, _ = attend(query, key, value, config, grid)
    again, _ = attend(query, key, value, config, grid)
    assert torch.equal(out, again)
    dense = dense_oracle(query, key, value)
    error = float((out.double() - dense).norm() / dense.norm())
    assert 0.05 < error < 0.8
    assert 0 < record.density < 1


def test_every_option_has_an_effect_of_its_own():
    """Names of one execution aside, no two sets of options give one result."""
    grid = TokenGrid(9, 8, 17)
    query, key, value = make_qkv(1, grid.tokens + 70, 2, 64, dtype=torch.float16, seed=11)
    # With a common direction on each side neither the anchors nor the global means are zero.
    ramp = torch.linspace(-1, 1, 64).half()
    tensors = (query + ramp, key + ramp.roll(9), value)
    results = {"default": attend(*tensors, replace(SPARK, topk_ratio=0.2), grid)[0]}
    for name, options in OPTIONS.items():
        results[name] = attend(*tensors, replace(SPARK, **{"topk_ratio": 0.2, **options}), grid)[0]
    names = list(results)
    equal = [
        (one, other)
        for place, one in enumerate(names)
        for other in names[place + 1 :]
        if torch.equal(results[one], results[other])
    ]
    assert equal == [("default", "execution")]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 8), st.integers(1, 13)),
    context=st.integers(0, 140),
    batch=st.integers(1, 2),
    dim=st.sampled_from([64, 128]),
    name=st.sampled_from(sorted(OPTIONS)),
)
def test_any_geometry_represents_every_token_once(grid, context, batch, dim, name):
    grid = TokenGrid(*grid)
    config = replace(SPARK, **OPTIONS[name])
    query, key, value = make_qkv(batch, grid.tokens + context, 2, dim, seed=grid.tokens)
    layout = PackedLayout(grid.tokens + context, grid.tokens)
    if config.video_tail_mode == "pad" and context < -grid.tokens % 64 and layout.candidates:
        with pytest.raises(ValueError, match="suffix too short"):
            attend(query, key, value, config, grid)
        return
    constant = torch.linspace(-2, 2, dim).expand_as(value)
    with nan_filled_allocations():
        out, record = attend(query, key, constant, config, grid)
        mixed, _ = attend(query, key, value, config, grid)
    torch.testing.assert_close(out, constant.contiguous(), atol=3e-6, rtol=0)
    dense = dense_oracle(query, key, value)
    torch.testing.assert_close(
        mixed[:, grid.tokens :].double(), dense[:, grid.tokens :], atol=3e-6, rtol=1e-5
    )
    if layout.candidates == 0:
        torch.testing.assert_close(mixed.double(), dense, atol=3e-6, rtol=1e-5)
    assert 0 < record.density <= 1


def test_a_clip_whose_sizes_no_tile_divides():
    """480 x 832 of another model: 21 x 45 x 80, odd frames and rows, 1,181 blocks and 16 tokens."""
    grid = TokenGrid(21, 45, 80)
    query, key, value = make_qkv(1, grid.tokens + 27, 1, 64)
    constant = torch.linspace(-2, 2, 64).expand_as(value)
    out, record = attend(query, key, constant, replace(SPARK, topk_ratio=0.01), grid)
    torch.testing.assert_close(out, constant.contiguous(), atol=3e-6, rtol=0)
    assert record.layout.candidates == 1181 and record.video_density == pytest.approx(12 / 1181)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_zero_and_large_inputs_stay_finite(dtype, which):
    grid = TokenGrid(7, 11, 13)
    tensors = list(make_qkv(1, grid.tokens + 30, 2, 64, dtype=dtype))
    zero = [x * 0 if index == which else x for index, x in enumerate(tensors)]
    large = [x * 200 if index <= which else x for index, x in enumerate(tensors)]
    for inputs in (zero, large):
        out, _ = attend(*inputs, SPARK, grid)
        assert out.isfinite().all()
        exact, _ = attend(*inputs, replace(SPARK, topk_ratio=1.0), grid)
        q, k, v = (x.transpose(1, 2) for x in inputs)
        peer = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        assert_close_to_oracle(exact, dense_oracle(*inputs), peer)


def test_dropping_the_tail_attends_to_the_exact_blocks_alone():
    config = replace(FLAT, tail_granularity="none", topk_ratio=0.2)
    tensors = make_qkv(1, GRID.tokens + CONTEXT, 2, 64)
    layout = PackedLayout(GRID.tokens + CONTEXT, GRID.tokens)
    mask = route_of(*tensors[:2], layout, config)
    out, record = attend(*tensors, config)
    tokens = mask.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., : layout.tokens]
    q, k, v = (x.double().transpose(1, 2) for x in tensors)
    scores = (q[:, :, : layout.sparse_tokens] @ k.transpose(2, 3) / 8).masked_fill(
        ~tokens, -torch.inf
    )
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(
        out[:, : layout.sparse_tokens].double(), expected, atol=1e-6, rtol=1e-5
    )
    assert "summaries" not in record.counters


def test_execution_names_are_one_plan():
    tensors = make_qkv(1, GRID.tokens + CONTEXT, 2, 64)
    results = {}
    for name in RESOLVED_EXECUTIONS:
        out, record = attend(*tensors, replace(SPARK, topk_execution=name))
        assert (record.requested_execution, record.resolved_execution) == (name, "exact_top_k")
        results[name] = out
    first = results.pop("threshold")
    assert all(torch.equal(first, other) for other in results.values())


def test_components_none_is_plain_means():
    tensors = make_qkv(1, GRID.tokens + CONTEXT, 2, 64, dtype=torch.float16)
    none, _ = attend(*tensors, replace(FLAT, reweight_components="none"))
    plain, _ = attend(*tensors, SOL)
    assert torch.equal(none, plain)


def test_numeric_switches_change_little():
    tensors = make_qkv(1, GRID.tokens + CONTEXT, 2, 64, dtype=torch.bfloat16)
    base, _ = attend(*tensors, FLAT)
    for option in (
        {"anchor_dtype": "float32"},
        {"summary_math": "comfy_fp32"},
        {"logmass_key": "pre_round"},
    ):
        out, _ = attend(*tensors, replace(FLAT, **option))
        difference = float((out.double() - base.double()).norm() / base.double().norm())
        assert 0 < difference < 0.02, option


@pytest.mark.parametrize("config", [FLAT, SOL, SPARK], ids=["flat", "sol", "spark"])
def test_the_trailing_partial_block_is_exact_without_context(config):
    grid = TokenGrid(2, 9, 16)
    query, key, value = make_qkv(1, grid.tokens, 2, 64)
    layout = PackedLayout(grid.tokens, grid.tokens)
    assert layout.sinks == ((4, 5),) and grid.tokens % 64 == 32
    config = replace(config, topk_ratio=0.25)
    _, record = attend(query, key, value, config, grid)
    assert record.density == pytest.approx((1 + 1) / 5)
    assert record.figures["sink_blocks"] == 1
    if config is SPARK:
        return
    # A key that only the last block has, and every query wants: mean summaries would dilute it.
    key[:, -1] = 40.0 * query.mean(1).sign()
    query = query + key[:, -1:] * 0.1
    out, _ = attend(query, key, value, config, grid)
    torch.testing.assert_close(
        out[:, :256], value[:, -1:].expand(-1, 256, -1, -1), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("video", [0, 1, 63])
def test_a_video_without_a_complete_block_is_dense(video):
    query, key, value = make_qkv(1, video + 40, 2, 64)
    grid = TokenGrid(1, 1, video) if video else None
    out, record = packed_attention(query, key, value, video_tokens=video, grid=grid, config=SPARK)
    torch.testing.assert_close(out.double(), dense_oracle(query, key, value), atol=1e-6, rtol=1e-5)
    assert (record.route, record.resolved_execution, record.density) == ("dense", "dense", 1.0)
    assert record.counters == {"dense_no_complete_block": 1}


def test_pad_makes_the_mixed_block_sparse_and_leaves_the_inputs_alone():
    grid = TokenGrid(3, 7, 11)
    tensors = make_qkv(1, grid.tokens + 70, 2, 64)
    saved = [x.clone() for x in tensors]
    config = replace(FLAT, topk_ratio=0.34)
    dense_tail, dense_record = attend(*tensors, config, grid)
    padded, record = attend(*tensors, replace(config, video_tail_mode="pad"), grid)
    assert all(torch.equal(x, y) for x, y in zip(tensors, saved, strict=True))
    video, whole = grid.tokens, grid.tokens // 64 * 64
    assert torch.equal(padded[:, video:], dense_tail[:, video:])
    assert torch.equal(padded[:, :whole], dense_tail[:, :whole])
    assert not torch.equal(padded[:, whole:video], dense_tail[:, whole:video])
    assert record.figures["query_blocks"] == dense_record.figures["query_blocks"] + 1
    # The padded block's route and anchor are those of its video rows alone.
    layout = PackedLayout(video + 70, video, "pad")
    filled = tensors[0].clone()
    filled[:, video : whole + 64] = tensors[0][:, whole:video].mean(1, keepdim=True)
    mask = route_of(filled, tensors[1], layout, config)
    topology = topology_of(layout)
    oracle = merged(*(x.double() for x in (filled, *tensors[1:])), mask, layout, topology, config)
    torch.testing.assert_close(padded[:, :video].double(), oracle[:, :video], atol=2e-6, rtol=1e-5)


def test_pad_needs_rows_after_the_video():
    tensors = make_qkv(1, 231 + 20, 2, 64)
    with pytest.raises(ValueError, match="suffix too short"):
        attend(*tensors, replace(FLAT, video_tail_mode="pad"), TokenGrid(3, 7, 11))


def test_pad_and_dense_agree_on_whole_blocks():
    grid = TokenGrid(2, 8, 16)
    tensors = make_qkv(1, grid.tokens + 30, 2, 64)
    for base in (SPARK, FLAT):
        one, _ = attend(*tensors, base, grid)
        other, _ = attend(*tensors, replace(base, video_tail_mode="pad"), grid)
        assert torch.equal(one, other)


@pytest.mark.parametrize("base", [SPARK, FLAT], ids=["spark", "flat"])
def test_the_dense_suffix_goes_through_the_callers_attention(base):
    grid = TokenGrid(3, 7, 11)
    query, key, value = make_qkv(1, grid.tokens + 70, 2, 64)
    seen = []

    def attention(q, k, v):
        seen.append((q, k, v))
        return torch.full_like(q, 7.0)

    out, record = attend(query, key, value, base, grid, dense=attention)
    ((q, k, v),) = seen
    assert q.shape[1] == grid.tokens % 64 + 70 and k.shape[1] == v.shape[1] == grid.tokens + 70
    assert torch.equal(q[:, -70:], query[:, -70:]) and torch.equal(k[:, -70:], key[:, -70:])
    for mine, own in ((key, k), (value, v)):
        # The same keys, in some order.
        assert torch.equal(mine.sort(1).values, own.sort(1).values)
    assert ((out == 7.0).all(-1).sum(1) == grid.tokens % 64 + 70).all()
    assert (out[:, -70:] == 7.0).all()
    assert record.counters["dense_context"] == 1


def test_summaries_and_heads_are_chunked_without_a_trace(monkeypatch):
    config = replace(SPARK, virtual_query_levels_up=0)
    tensors = make_qkv(1, GRID.tokens + 100, 3, 64)
    whole, record = attend(*tensors, config)
    assert record.counters["summaries"] == 1
    monkeypatch.setattr(spark_call, "SUMMARY_BYTES", 5 * 3 * 20 * (2 * 64 * 4 + 4))
    monkeypatch.setattr(spark_call, "REORDER_BYTES", 1)
    parts, record = attend(*tensors, config)
    assert record.counters["summaries"] == 3 * 2 and record.counters["reblock"] == 1
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    assert record.density == pytest.approx((2 + 2) / 20)


def test_batch_entries_are_independent():
    tensors = make_qkv(2, GRID.tokens + 30, 2, 64)
    both, _ = attend(*tensors, SPARK)
    for sample in range(2):
        alone, _ = attend(*(x[sample : sample + 1] for x in tensors), SPARK)
        torch.testing.assert_close(both[sample : sample + 1], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts_change_nothing(layout):
    plain, _ = attend(*make_qkv(1, GRID.tokens + 30, 2, 64), SPARK)
    strided, _ = attend(*make_qkv(1, GRID.tokens + 30, 2, 64, layout=layout), SPARK)
    torch.testing.assert_close(strided, plain, atol=1e-6, rtol=1e-5)


def test_an_explicit_route_is_followed():
    tensors = make_qkv(1, GRID.tokens + CONTEXT, 2, 64)
    layout = PackedLayout(GRID.tokens + CONTEXT, GRID.tokens)
    shape = (1, 2, layout.query_blocks, layout.key_blocks)
    route = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    out, record = attend(*tensors, FLAT, route=route)
    mask = route.clone()
    mask[..., layout.candidates :] = True
    check_against_merge(out, tensors, mask, layout, FLAT)
    assert record.route == record.resolved_execution == "explicit"
    assert record.density == pytest.approx(float(mask.float().mean()))


def test_densities_are_what_was_delivered(monkeypatch):
    grid = TokenGrid(5, 9, 12)
    tensors = make_qkv(1, grid.tokens + 70, 2, 64)
    _, record = attend(*tensors, replace(SPARK, topk_ratio=0.25), grid)
    assert record.figures["target_top_k"] == 2
    assert record.density == record.figures["packed_density"] == (2 + 2) / 10
    assert record.video_density == record.figures["video_density"] == 2 / 8
    monkeypatch.setattr(spark_call, "REORDER_BYTES", 1)
    _, record = attend(*tensors, replace(SPARK, head_budgets=(1, 5)), grid)
    assert record.density == pytest.approx((3 + 2) / 10)
    assert record.video_density == pytest.approx(3 / 8)


def test_a_cache_changes_nothing_but_is_used():
    cache = {}
    tensors = make_qkv(1, GRID.tokens + 100, 2, 64)
    config = replace(SPARK, virtual_query_levels_up=0)
    first, _ = attend(*tensors, config, cache=cache)
    filled = dict(cache)
    second, _ = attend(*tensors, config, cache=cache)
    assert torch.equal(first, second)
    assert {"reblock", "virtual_queries", "parents"} <= {name[0] for name in filled}
    assert all(cache[name] is kept for name, kept in filled.items()) and len(cache) == len(filled)
    alone, _ = attend(*tensors, config)
    assert torch.equal(first, alone)


def test_layout_reuse_shares_one_order():
    query, key, _ = make_qkv(1, GRID.tokens + CONTEXT, 2, 64)
    both = plan_orders(query, key, GRID, ReblockConfig(), {})
    one = plan_orders(query, key, GRID, ReblockConfig(layout_reuse="q_from_k"), {})
    other = plan_orders(query, key, GRID, ReblockConfig(layout_reuse="k_from_q"), {})
    assert one.query.data_ptr() == one.key.data_ptr() and torch.equal(one.key, both.key)
    assert other.query.data_ptr() == other.key.data_ptr() and torch.equal(other.key, both.query)
    assert not torch.equal(both.query, both.key)


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, True),
        ({"mean_mode": "input_unit"}, True),
        ({"m2_side": "key", "layout_reuse": "q_from_k", "frozen_remainder": False}, True),
        ({"m2_side": "query", "layout_reuse": "q_from_k", "frozen_remainder": False}, False),
        ({"m2_side": "key", "frozen_remainder": False}, False),
        ({"m2_side": "none", "frozen_remainder": False}, False),
        ({"m2_estimator": "full"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_known_from_the_features_change_no_order(options, known, dtype, monkeypatch):
    grid = TokenGrid(5, 9, 12)
    run, given = PreparedLandmarkTreeV2Permutation.run, []

    def alone(plan, features, *, squares, **others):
        given.append((squares, squared_norms(features)))
        return run(plan, features, **others)

    config, cache = ReblockConfig(**options), {}
    tensors = [make_qkv(2, grid.tokens + 5, 3, 64, dtype=dtype, seed=seed)[:2] for seed in (1, 2)]
    # One cache: the second call must not read the norms that the first one left behind.
    found = [plan_orders(*each, grid, config, cache) for each in tensors]
    monkeypatch.setattr(PreparedLandmarkTreeV2Permutation, "run", alone)
    for each, mine in zip(tensors, found, strict=True):
        plain = plan_orders(*each, grid, config, {})
        assert torch.equal(mine.query, plain.query) and torch.equal(mine.key, plain.key)
    for squares, expected in given:
        assert (squares is not None) == known
        assert squares is None or torch.equal(squares, expected)


def test_ablations_keep_the_baselines_remainder():
    grid = TokenGrid(5, 9, 12)
    query, key, _ = make_qkv(1, grid.tokens, 2, 64)
    query, key = query * torch.linspace(0.1, 3, 64), key * torch.linspace(3, 0.1, 64)

    def excluded(**options):
        orders = plan_orders(query, key, grid, ReblockConfig(**options), {})
        return [x[..., 512:].sort(-1).values for x in (orders.query, orders.key)]

    baseline = excluded()
    for options in ({"m2_side": "none"}, {"m2_estimator": "full"}, {"m2_side": "key"}):
        frozen, free = excluded(**options), excluded(**options, frozen_remainder=False)
        assert all(torch.equal(x, y) for x, y in zip(frozen, baseline, strict=True)), options
        if options == {"m2_side": "none"}:
            assert not all(torch.equal(x, y) for x, y in zip(free, baseline, strict=True))


def test_refusals_name_the_argument():
    query, key, value = make_qkv(1, GRID.tokens + 10, 2, 64)
    good = {"video_tokens": GRID.tokens, "grid": GRID, "config": SPARK}
    cases = [
        ((query[0], key, value), {}, ValueError, "query: expected"),
        ((query, key[:, 1:], value), {}, ValueError, "key: expected the shape of query"),
        ((query, key, value.half()), {}, TypeError, "value: expected the dtype of query"),
        ((query, key, value), {"video_tokens": 5000}, ValueError, "video_tokens"),
        ((query, key, value), {"grid": TokenGrid(1, 2, 3)}, ValueError, "grid: expected 1152"),
        ((query, key, value), {"grid": None}, ValueError, "grid: expected a TokenGrid"),
        ((query, key, value), {"grid": (1, 2, 3)}, TypeError, "grid: expected a TokenGrid or None"),
        ((query, key, value), {"config": "spark"}, TypeError, "config: expected a PackedConfig"),
        (
            (query, key, value),
            {"config": replace(SPARK, head_budgets=(1, 2, 3))},
            ValueError,
            "head_budgets: expected 2 numbers, got 3",
        ),
        (
            (query, key, value),
            {"route": torch.zeros(1, 2, 3, 3, dtype=torch.bool)},
            ValueError,
            "route: expected",
        ),
    ]
    for tensors, change, error, message in cases:
        with pytest.raises(error, match=message):
            packed_attention(*tensors, **{**good, **change})
    with pytest.raises(UnsupportedError, match="inference only"):
        packed_attention(query.requires_grad_(), key, value, **good)


def test_an_implementation_that_cannot_serve_is_refused():
    tensors = make_qkv(1, GRID.tokens + 10, 2, 64)
    out, record = attend(*tensors, FLAT, impl="eager")
    assert set(record.implementations.values()) == {"eager"} and out.isfinite().all()
    with pytest.raises(UnsupportedError):
        attend(*tensors, FLAT, impl="triton")


def test_spark_reweight_is_the_reference():
    query, key, value = make_qkv(1, 137, 2, 64, dtype=torch.float16)
    for parents in (1, 3):
        results = spark_reweight(query[:, :parents], key, value)
        expected = reweight(query[:, :parents], key, value)
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    with pytest.raises(ValueError, match="comfy_fp32 expected bfloat16"):
        spark_reweight(query[:, :1], key, value, summary_math="comfy_fp32")
    for wrong, message in (
        ((query[:, :1, :1], key, value), r"a: expected \[1, P, 2, 64\]"),
        ((query[:, :1], key[0], value), r"k: expected a floating-point \[B, T, H, D\]"),
        ((query[:, :1], key, value.float()), r"v: expected torch.float16 .* as k, got"),
    ):
        with pytest.raises(ValueError, match=message):
            spark_reweight(*wrong)
    with pytest.raises(TypeError, match="v: expected a tensor, got list"):
        spark_reweight(query[:, :1], key, [1])


@pytest.mark.gpu
@pytest.mark.parametrize("base", [SPARK, SOL], ids=["spark", "sol"])
def test_the_default_path_never_waits_for_the_device(base):
    grid = TokenGrid(8, 24, 42)
    tensors = make_qkv(1, grid.tokens + 200, 4, 128, dtype=torch.bfloat16, device="cuda")
    cache = {}
    for _ in range(3):
        attend(*tensors, base, grid, cache=cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(*tensors, base, grid, cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_dense_rows_on_a_second_stream_change_nothing(monkeypatch: pytest.MonkeyPatch):
    grid = TokenGrid(9, 24, 42)  # 48 of the video rows are dense
    tensors = make_qkv(1, grid.tokens + 200, 4, 128, dtype=torch.bfloat16, device="cuda")
    cache = {}
    monkeypatch.setattr(aside, "OVERLAP", False)
    expected, _ = attend(*tensors, SPARK, grid, cache=cache)
    monkeypatch.setattr(aside, "OVERLAP", True)
    for _ in range(10):
        assert attend(*tensors, SPARK, grid, cache=cache)[0].equal(expected)


@pytest.mark.gpu
def test_peak_memory_at_the_ten_second_shape():
    grid = TokenGrid(72, 24, 42)
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, grid.tokens + 1008, 56, 128)
    tensors = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    ]
    cache = {}
    attend(*tensors, SPARK, grid, cache=cache)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(*tensors, SPARK, grid, cache=cache)
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_the_device_agrees_with_the_cpu(options):
    config = replace(SPARK, **options)
    grid = TokenGrid(5, 9, 12)
    tensors = make_qkv(1, grid.tokens + 70, 2, 64, dtype=torch.bfloat16)
    dense = dense_oracle(*tensors)
    errors = []
    for device in ("cpu", "cuda"):
        out, _ = attend(*(x.to(device) for x in tensors), config, grid)
        errors.append(float((out.double().cpu() - dense).norm() / dense.norm()))
    # Near ties may route differently; the quality of the approximation may not.
    assert abs(errors[0] - errors[1]) < 0.05 * errors[0]
