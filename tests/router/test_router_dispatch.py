"""Dispatch, installing and undoing, bypass, rebuilding, report, observer, telemetry, reasons."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from solspark.errors import UnsupportedError
from solspark.router import (
    Backend,
    Constraints,
    Platform,
    Registry,
    Router,
    RouterConfig,
    SparseConfig,
    builtin_registry,
)

BLOCK = frozenset({"block_mask"})
CPU = Constraints(allow_cpu=True)


class Recorder:
    """A prepare whose calls note their arguments and answer with torch's attention."""

    def __init__(self, caps=None):
        self.calls = []
        self.prepared = []
        self.caps = caps

    def __call__(self, platform, original, settings):
        self.prepared.append(dict(settings))

        def call(*args, **kwargs):
            self.calls.append((args, kwargs))
            return original(*args[:3])

        if self.caps is not None:
            call.caps = self.caps
        return call


@pytest.fixture(autouse=True)
def torch_is_left_as_found():
    before = F.scaled_dot_product_attention
    yield
    left = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = before
    assert left is before


def inputs(dim=64, tokens=10, heads=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(3)]


def router_of(*backends, **config):
    registry = Registry(tuple(backends))
    config.setdefault("backends", registry.labels())
    return Router(RouterConfig(**config), registry=registry, platform=Platform("cpu"))


def test_narrow_before_wide_and_the_rest_to_the_original():
    narrow, wide = Recorder(), Recorder()
    router = router_of(
        Backend("narrow", "N", 9, narrow, replace(CPU, head_dims=frozenset({64}))),
        Backend("wide", "W", 1, wide, replace(CPU, max_head_dim=128)),
    )
    undo = router.install()
    try:
        for dim, expected in ((64, "narrow"), (128, "wide"), (256, "sdpa")):
            out = F.scaled_dot_product_attention(*inputs(dim))
            assert router.last_call().backend == expected
            assert torch.equal(out, router.plan.original(*inputs(dim)))
        assert (len(narrow.calls), len(wide.calls)) == (1, 1)
    finally:
        undo()


def test_entries_are_called_by_position_without_extras_and_failures_propagate():
    recorder = Recorder()
    router = router_of(Backend("a", "A", 1, recorder, CPU))
    q, k, v = inputs()
    undo = router.install()
    try:
        F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.5, enable_gqa=False)
        args, kwargs = recorder.calls[0]
        assert args == (q, k, v, None, 0.0, False, 0.5, False) and kwargs == {}

        def fails(*a, **k):
            raise ZeroDivisionError("inside the backend")

        broken = replace(router.plan.entries[0], call=fails)
        router.plan = replace(router.plan, entries=(broken,))
        with pytest.raises(ZeroDivisionError, match="inside the backend"):
            F.scaled_dot_product_attention(q, k, v)
    finally:
        undo()


def test_the_original_gets_enable_gqa_only_when_it_is_set(monkeypatch):
    seen = []

    def older(query, key, value, **kwargs):
        seen.append(kwargs)
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", older)
    router = router_of(Backend("a", "A", 1, Recorder(), Constraints(min_ndim=9)))
    undo = router.install()
    q, k, v = inputs()
    F.scaled_dot_product_attention(q, k, v, enable_gqa=False)
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True, window=3)
    undo()
    assert "enable_gqa" not in seen[0]
    assert seen[1]["enable_gqa"] is True and seen[1]["window"] == 3
    assert seen[0] == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}


def test_the_terminal_gets_everything_as_keywords():
    terminal = Recorder()
    router = router_of(Backend("t", "T", 1, terminal, terminal=True))
    undo = router.install()
    q, k, v = inputs()
    F.scaled_dot_product_attention(q, k, v, window=3)
    undo()
    args, kwargs = terminal.calls[0]
    assert args == (q, k, v)
    assert kwargs == {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
        "window": 3,
    }
    assert router.plan.chain == "sdpa"


def test_an_empty_plan_leaves_the_original_itself():
    before = F.scaled_dot_product_attention
    router = router_of(Backend("a", "A", 1, Recorder(), CPU), backends=())
    undo = router.install()
    assert F.scaled_dot_product_attention is before
    assert router.report()["chain"] == ["sdpa"]
    undo()
    undo()
    assert F.scaled_dot_product_attention is before


def test_install_keeps_metadata_and_restores_the_same_object():
    before = F.scaled_dot_product_attention
    router = router_of(Backend("a", "A", 1, Recorder(), CPU))
    undo = router.install()
    installed = F.scaled_dot_product_attention
    assert installed is not before
    assert installed.__name__ == before.__name__ and installed.__doc__ == before.__doc__
    with pytest.raises(RuntimeError, match="installed already"):
        router.install()
    with pytest.raises(RuntimeError, match="another router"):
        router_of(Backend("a", "A", 1, Recorder(), CPU)).install()
    undo()
    assert F.scaled_dot_product_attention is before
    router.install()
    router.uninstall()
    assert F.scaled_dot_product_attention is before


def test_a_later_patch_survives_and_the_router_under_it_steps_aside(caplog):
    before = F.scaled_dot_product_attention
    recorder = Recorder()
    router = router_of(Backend("a", "A", 1, recorder, CPU))
    router.install()
    under = F.scaled_dot_product_attention

    def patch(*args, **kwargs):
        return under(*args, **kwargs)

    F.scaled_dot_product_attention = patch
    with router.bypass():
        F.scaled_dot_product_attention(*inputs())
    assert recorder.calls == []
    F.scaled_dot_product_attention(*inputs())
    assert len(recorder.calls) == 1
    with caplog.at_level(logging.WARNING):
        router.uninstall()
    assert "replaced after the router" in caplog.text
    assert F.scaled_dot_product_attention is patch
    assert torch.equal(F.scaled_dot_product_attention(*inputs()), before(*inputs()))
    assert len(recorder.calls) == 1
    F.scaled_dot_product_attention = before


def test_bypass_restores_also_after_an_exception():
    recorder = Recorder()
    router = router_of(Backend("a", "A", 1, recorder, CPU))
    before = F.scaled_dot_product_attention
    with router.bypass():
        assert F.scaled_dot_product_attention is before
    undo = router.install()
    wrapper = F.scaled_dot_product_attention
    with pytest.raises(ValueError, match="inside"):
        with router.bypass():
            assert F.scaled_dot_product_attention is before
            with router.bypass():
                F.scaled_dot_product_attention(*inputs())
            assert F.scaled_dot_product_attention is before
            raise ValueError("inside")
    assert F.scaled_dot_product_attention is wrapper
    assert recorder.calls == []
    F.scaled_dot_product_attention(*inputs())
    assert len(recorder.calls) == 1
    with router.bypass():
        undo()
    assert F.scaled_dot_product_attention is before


def test_a_rebuild_follows_watched_settings_only():
    recorder = Recorder()
    backend = Backend("a", "A", 1, recorder, CPU, options=("knob",))
    idle = Backend("b", "B", 2, Recorder(), CPU, options=("other",))
    config = RouterConfig(backends=("A",), extra={"knob": 1, "other": 1})
    router = Router(config, registry=Registry((backend, idle)), platform=Platform("cpu"))
    assert not router.configure(replace(config, extra={"knob": 2, "other": 1}))
    undo = router.install()
    wrapper = F.scaled_dot_product_attention
    assert recorder.prepared == [{"knob": 2}]
    assert router.configure(replace(config, extra={"knob": 3, "other": 1}))
    assert recorder.prepared == [{"knob": 2}, {"knob": 3}]
    assert not router.configure(replace(router.config, strict=True))
    assert router.config.strict
    assert F.scaled_dot_product_attention is wrapper
    assert router.configure(replace(router.config, backends=()))
    assert F.scaled_dot_product_attention is not wrapper
    assert router.configure(replace(router.config, backends=("A", "B")))
    assert router.plan.chain == "b>a>sdpa"
    undo()
    with pytest.raises(RuntimeError, match="not installed"):
        router.reapply()


def test_watched_names_cover_every_declared_option():
    router = Router(platform=Platform("cpu"))
    assert router.watched[:2] == ("sdp_kernels", "backends")
    for backend in builtin_registry().ordered():
        assert set(backend.options) <= set(router.watched)
    assert "sparse.budget" in router.watched
    for name in router.watched:
        router.config.setting(name)


def test_a_rebuild_resets_dynamo_only_for_a_compiled_model(monkeypatch):
    import torch._dynamo

    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    router = router_of(Backend("a", "A", 1, Recorder(), CPU))
    undo = router.install()
    model = torch.nn.Linear(2, 2)
    router.watch_model(model)
    router.reapply()
    assert not resets
    router.reapply(compiled=True)
    assert len(resets) == 1
    model.compile(backend="eager")
    router.reapply()
    assert len(resets) == 2
    router.forget_model(model)
    router.reapply()
    assert len(resets) == 2
    undo()


def test_torch_kernel_flags_are_set_and_restored():
    before = torch.backends.cuda.flash_sdp_enabled()
    router = router_of(
        Backend("a", "A", 1, Recorder(), CPU), sdp_kernels=frozenset({"math", "cudnn"})
    )
    undo = router.install()
    assert torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    router.configure(replace(router.config, sdp_kernels=None))
    assert torch.backends.cuda.flash_sdp_enabled() == before
    undo()
    assert torch.backends.cuda.flash_sdp_enabled() == before
    with pytest.raises(ValueError, match=r"sdp_kernels.*'fast_one'"):
        RouterConfig(sdp_kernels=frozenset({"fast_one"}))


def test_observer_and_report():
    recorder = Recorder()
    router = router_of(
        Backend("a", "A", 1, recorder, replace(CPU, min_ndim=4), caps=BLOCK),
        sparse=SparseConfig(enabled=True, min_tokens=0, allow_cpu=True, budget=0.25),
    )
    seen = []
    router.observer = lambda name, query, key, mask: seen.append((name, query.shape[2], mask))
    undo = router.install()
    F.scaled_dot_product_attention(*inputs(tokens=700))
    router.context.begin(steps=3)
    with router.context.as_role("transformer"):
        router.context.publish_segments([("text", 100), ("video", 600)])
        F.scaled_dot_product_attention(*inputs(tokens=700))
        report = router.report()
    undo()
    assert seen == [("a", 700, None), ("a+sparse", 700, None)]
    assert report["chain"] == ["a", "sdpa"] and report["overrides"] == ["A"]
    assert report["platform"] == "cpu" and report["installed"]
    assert report["sparse"] == {
        "enabled": True,
        "budget": 0.25,
        "gate": 0,
        "capable": ["a"],
        "layout": {"source": "segments", "kinds": ["text", "video"], "length": 700},
    }
    assert report["context"] == {
        "active": True,
        "role": "transformer",
        "step": 0,
        "steps": 3,
        "model": ("", ""),
    }
    assert "selection" in recorder.calls[1][1] and "selection" not in recorder.calls[0][1]


def test_narrowed_capabilities_keep_the_stage_out():
    recorder = Recorder(caps=frozenset())
    router = router_of(
        Backend("a", "A", 1, recorder, CPU, caps=BLOCK),
        sparse=SparseConfig(enabled=True, min_tokens=0, allow_cpu=True),
    )
    undo = router.install()
    router.context.begin()
    with router.context.as_role("transformer"):
        F.scaled_dot_product_attention(*inputs(tokens=700))
    undo()
    assert router.stage is None
    assert recorder.calls[0][1] == {}


def test_a_selection_only_backend_leaves_dense_calls_to_the_next():
    sparse, dense = Recorder(), Recorder()
    router = router_of(
        Backend("s", "S", 9, sparse, CPU, caps=BLOCK, selection_only=True),
        Backend("d", "D", 1, dense, CPU),
        sparse=SparseConfig(enabled=True, min_tokens=600, allow_cpu=True),
    )
    undo = router.install()
    router.context.begin()
    with router.context.as_role("transformer"):
        F.scaled_dot_product_attention(*inputs(tokens=700))
        assert router.last_call().backend == "s" and router.last_call().density < 1
        F.scaled_dot_product_attention(*inputs(tokens=500))
    undo()
    assert router.last_call().backend == "d"
    assert (len(sparse.calls), len(dense.calls)) == (1, 1)


def test_last_call_says_why_a_call_stayed_dense():
    router = router_of(
        Backend("s", "S", 9, Recorder(), CPU, caps=BLOCK, selection_only=True),
        sparse=SparseConfig(enabled=True, min_tokens=600, allow_cpu=True),
    )
    undo = router.install()
    router.context.begin()
    with router.context.as_role("transformer"):
        F.scaled_dot_product_attention(*inputs(tokens=500))
    last = router.last_call()
    undo()
    assert (last.backend, last.skip, last.density) == ("sdpa", "below the minimum sequence", 1.0)
    assert last.declined == (("s", "serves selections only (below the minimum sequence)"),)
    assert last.shape == (1, 2, 500, 500, 64) and last.dtype == torch.float32


def test_a_type_that_a_backend_cannot_take_is_one_warning(caplog):
    half = replace(CPU, dtypes=frozenset({torch.float16}))
    router = router_of(
        Backend("a", "A", 2, Recorder(), half), Backend("b", "B", 1, Recorder(), CPU)
    )
    undo = router.install()
    try:
        caplog.clear()
        for _ in range(5):
            F.scaled_dot_product_attention(*inputs())
            assert router.last_call().declined == (("a", "cannot take torch.float32"),)
            assert router.last_call().backend == "b"
        assert caplog.messages == [
            "A cannot take torch.float32: such calls go to the next that can"
        ]
        F.scaled_dot_product_attention(*[x.half() for x in inputs()])
        assert router.last_call().backend == "a" and len(caplog.messages) == 1
    finally:
        undo()


def test_strict_raises_where_the_mask_cannot_be_used_and_not_for_policy():
    router = router_of(
        Backend("s", "S", 9, Recorder(), CPU, caps=BLOCK),
        sparse=SparseConfig(enabled=True, min_tokens=600, allow_cpu=True),
        strict=True,
    )
    undo = router.install()
    try:
        mask = torch.ones(1, 1, 1, 700, dtype=torch.bool)
        F.scaled_dot_product_attention(*inputs(tokens=700), attn_mask=mask)
        router.context.begin()
        with router.context.as_role("transformer"):
            F.scaled_dot_product_attention(*inputs(tokens=500))
            F.scaled_dot_product_attention(*inputs(tokens=700))
            with pytest.raises(UnsupportedError, match="masked"):
                F.scaled_dot_product_attention(*inputs(tokens=700), attn_mask=mask)
            flat = [x[0] for x in inputs(tokens=700)]
            with pytest.raises(UnsupportedError, match="unsupported tensor"):
                F.scaled_dot_product_attention(*flat)
    finally:
        undo()


def test_strict_raises_when_the_capable_backend_declines():
    router = router_of(
        Backend("s", "S", 9, Recorder(), replace(CPU, head_dims=frozenset({128})), caps=BLOCK),
        sparse=SparseConfig(enabled=True, min_tokens=0, allow_cpu=True),
        strict=True,
    )
    undo = router.install()
    try:
        router.context.begin()
        with router.context.as_role("transformer"):
            with pytest.raises(UnsupportedError, match="head_dim 64"):
                F.scaled_dot_product_attention(*inputs(tokens=700))
    finally:
        undo()


def test_telemetry_logs_each_route_once_and_counts_all(caplog):
    router = router_of(Backend("a", "A", 1, Recorder(), CPU), telemetry=True)
    undo = router.install()
    with caplog.at_level(logging.INFO, logger="solspark.router"):
        router.context.begin()
        for _ in range(3):
            F.scaled_dot_product_attention(*inputs())
        F.scaled_dot_product_attention(*inputs(tokens=11))
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs()]
        F.scaled_dot_product_attention(*strided)
    assert sum("route " in m for m in caplog.messages) == 3
    rows = list(router.telemetry.counts.most_common())
    assert [count for _, count in rows] == [3, 1, 1]
    assert rows[0][0].backend == "a" and rows[0][0].query == (1, 2, 10, 64)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="solspark.router"):
        router.context.end()
    assert [m.split(" x ")[0].strip() for m in caplog.messages] == ["3", "1", "1"]
    assert not router.telemetry.counts
    undo()


def test_telemetry_is_opt_in(monkeypatch):
    monkeypatch.delenv("SOLSPARK_ROUTER_DEBUG", raising=False)
    router = router_of(Backend("a", "A", 1, Recorder(), CPU))
    undo = router.install()
    F.scaled_dot_product_attention(*inputs())
    assert not router.telemetry.counts
    undo()
    monkeypatch.setenv("SOLSPARK_ROUTER_DEBUG", "1")
    undo = router.install()
    F.scaled_dot_product_attention(*inputs())
    assert len(router.telemetry.counts) == 1
    undo()


def test_reasons_name_every_backend_and_import_nothing():
    import sys

    before = set(sys.modules)
    router = Router(RouterConfig(backends=("Flex attention",)), platform=Platform("cpu"))
    undo = router.install()
    q, k, v = inputs()
    reasons = router.reasons(q, k, v, attn_mask=torch.zeros(10, 10))
    undo()
    assert set(reasons) == {b.name for b in router.registry.ordered()} | {"sparse"}
    assert reasons["flex"] == ["tensors on the CPU"]
    assert "not chosen" in reasons["sage"] and "cannot take attn_mask" in reasons["sage"]
    assert any("rocm" in reason for reason in reasons["triton"])
    assert reasons["sparse"] == ["not enabled"]
    loaded = {name.split(".")[0] for name in set(sys.modules) - before}
    assert not loaded & {"triton", "flash_attn", "sageattention", "diffusers"}


def test_a_missing_capability_is_a_warning_that_names_what_would_help(caplog):
    with caplog.at_level(logging.WARNING):
        router = Router(
            RouterConfig(backends=(), sparse=SparseConfig(enabled=True)), platform=Platform("cpu")
        )
        undo = router.install()
        undo()
    assert "Block-sparse attention" in caplog.text and "Flex attention" in caplog.text
    assert len(caplog.records) == 1


def test_an_unknown_option_stops_the_install_and_leaves_torch_alone():
    before = F.scaled_dot_product_attention
    router = router_of(
        Backend("a", "A", 1, Recorder(), CPU, options=("nowhere",)),
        sdp_kernels=frozenset({"math"}),
    )
    flash = torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(KeyError, match="nowhere"):
        router.install()
    assert F.scaled_dot_product_attention is before
    assert torch.backends.cuda.flash_sdp_enabled() == flash


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backends": "Flex attention"}, r"config\.backends.*'Flex attention'"),
        ({"dynamic_slice_gib": 0.0}, r"config\.dynamic_slice_gib.*0\.0"),
        ({"quantized_matmul": "int4"}, r"config\.quantized_matmul.*'int4'"),
        ({"quantized_pv": "int4"}, r"config\.quantized_pv.*'int4'"),
        ({"quantized_hadamard": 12}, r"config\.quantized_hadamard.*12"),
        ({"quantized_granularity": "head"}, r"config\.quantized_granularity.*'head'"),
        ({"sdp_kernels": frozenset()}, r"config\.sdp_kernels.*none"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        RouterConfig(**settings)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_wrapper_survives_compilation_in_one_graph(sparse):
    served = []

    def prepare(platform, original, settings):
        def call(query, key, value, *rest, selection=None):
            if selection is None:
                return original(query, key, value) * 2
            return original(query, key, value, attn_mask=selection.token_mask()) * 3

        return call

    router = router_of(
        Backend("a", "A", 1, prepare, CPU, caps=BLOCK),
        sparse=SparseConfig(enabled=sparse, min_tokens=0, allow_cpu=True, schedule_steps=1),
    )
    router.observer = lambda name, *rest: served.append(name)
    undo = router.install()
    router.context.begin(steps=6)
    router.context.set_role("transformer")
    q, k, v = inputs(tokens=700)
    compiles = []

    def counting(graph, example_inputs):
        compiles.append(1)
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1,
        backend=counting,
        fullgraph=True,
    )
    for _ in range(6):
        router.context.tick()
        eager = F.scaled_dot_product_attention(q, k, v) + 1
        assert torch.equal(compiled(q, k, v), eager)
    undo()
    torch._dynamo.reset()
    # The step never enters the graph.
    assert len(compiles) == 1
    assert served == ["a+sparse" if sparse else "a"] * 6


def test_a_schedule_specialises_a_compiled_model_at_most_twice():
    def prepare(platform, original, settings):
        def call(query, key, value, *rest, selection=None):
            mask = None if selection is None else selection.token_mask()
            return original(query, key, value, attn_mask=mask)

        return call

    sparse = SparseConfig(
        enabled=True,
        min_tokens=0,
        allow_cpu=True,
        budget=0.2,
        schedule_steps=2,
        schedule_bump=0.3,
    )
    router = router_of(Backend("a", "A", 1, prepare, CPU, caps=BLOCK), sparse=sparse)
    undo = router.install()
    router.context.begin(steps=10)
    router.context.set_role("transformer")
    q, k, v = inputs(tokens=700)
    compiles = []

    def counting(graph, example_inputs):
        compiles.append(1)
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=counting, fullgraph=True
    )
    densities = []
    for _ in range(10):
        router.context.tick()
        eager = F.scaled_dot_product_attention(q, k, v)
        densities.append(round(router.last_call().density, 3))
        assert torch.equal(compiled(q, k, v), eager)
    undo()
    torch._dynamo.reset()
    assert len(set(densities)) == 2 and densities[0] == densities[-1] > densities[5]
    assert len(compiles) <= 2
