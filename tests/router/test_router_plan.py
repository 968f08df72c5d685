"""The registry, the plan against an independent oracle, and the historic gates case by case."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from solspark.router import (
    Backend,
    Constraints,
    Platform,
    Registry,
    RouteCall,
    RouterConfig,
    build_plan,
    builtin_registry,
    default_labels,
)

HISTORIC = ("dynamic", "flex", "triton", "flash", "sage", "quantized")
LABELS = {
    "dynamic": "Dynamic attention",
    "flex": "Flex attention",
    "triton": "Triton Flash attention",
    "flash": "Flash attention",
    "sage": "Sage attention",
    "quantized": "Quantized attention",
}


def tagged(name, caps=None):
    """A prepare whose call says who it is."""

    def prepare(platform, original, settings):
        def call(*args, **kwargs):
            return name

        if caps is not None:
            call.caps = caps
        return call

    return prepare


def stubbed(registry: Registry) -> Registry:
    """The same declarations with calls that only carry their name, and no packages needed."""
    stubs = []
    for backend in registry.ordered():
        fields = {f: getattr(backend, f) for f in backend.__dataclass_fields__}
        fields.update(prepare=tagged(backend.name), obstacles=None)
        stubs.append(Backend(**fields))
    return Registry(tuple(stubs))


def settings_of(registry: Registry) -> dict:
    config = RouterConfig()
    return {name: config.setting(name) for name in registry.options()}


def original(*args, **kwargs):
    return "original"


class Stack:
    """How functions used to be stacked: each hijack is asked before the one it replaced."""

    def __init__(self, platform: str, chosen: set[str]):
        self.end = "sdpa"
        self.asked: list[str] = []
        for name in HISTORIC:
            if name not in chosen or (name == "triton" and platform not in ("rocm", "zluda")):
                continue
            if name == "dynamic":
                self.end = name
            else:
                self.asked.insert(0, name)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "zluda", "cpu"])
def test_plan_matches_the_stacking_oracle(platform, caplog):
    caplog.set_level(logging.CRITICAL)
    registry = stubbed(builtin_registry(parity=True))
    cases = 0
    for size in range(len(HISTORIC) + 1):
        for chosen in itertools.combinations(HISTORIC, size):
            labels = [LABELS[name] for name in reversed(chosen)]
            plan = build_plan(registry, Platform(platform), labels, original, settings_of(registry))
            stack = Stack(platform, set(chosen))
            assert [e.name for e in plan.entries] == stack.asked
            assert [e.call() for e in plan.entries] == stack.asked
            terminal = plan.terminal.name if plan.terminal else "sdpa"
            assert terminal == stack.end
            assert plan.chain == ">".join([*stack.asked, stack.end])
            assert plan.original is original
            cases += 1
    assert cases == 64


HISTORIC_GATES = {
    "flex": lambda q, k, v, m: (
        q.ndim >= 4 and q.device == k.device == v.device and q.device.type != "cpu"
    ),
    "triton": lambda q, k, v, m: (
        q.shape[-1] <= 128
        and m is None
        and q.device == k.device == v.device
        and q.device.type != "cpu"
    ),
    "flash": lambda q, k, v, m: (
        q.shape[-1] <= 128
        and m is None
        and q.dtype != torch.float32
        and q.device == k.device == v.device
        and q.device.type != "cpu"
    ),
    "sage": lambda q, k, v, m: (
        q.shape[-1] in (64, 96, 128)
        and m is None
        and q.device == k.device == v.device
        and q.device.type != "cpu"
    ),
    "quantized": lambda q, k, v, m: (
        q.device.type != "cpu"
        and q.shape[-2] >= 32
        and k.shape[-2] >= 32
        and (q.shape[-2] > 512 or k.shape[-2] > 512)
        and q.shape[-3] >= 2
    ),
}


def test_gate_parity():
    gates = {b.name: b.constraints for b in builtin_registry(parity=True).ordered()}
    lengths = (16, 32, 512, 513, 4096)
    seeds = {
        (device, dtype): torch.empty(1, dtype=dtype, device=device)
        for device in ("cpu", "meta")
        for dtype in (torch.float16, torch.float32)
    }
    mask = torch.ones(1, dtype=torch.bool)
    accepted = dict.fromkeys(HISTORIC_GATES, 0)
    cases = 0
    for batched, heads, dim in itertools.product((False, True), (1, 8), (40, 64, 96, 128, 256)):
        lead = (2, heads) if batched else (heads,)
        tensors = {
            (place, dtype, length): seed.expand(*lead, length, dim)
            for (place, dtype), seed in seeds.items()
            for length in lengths
        }
        for q_device, kv_device, dtype, q_len, kv_len, masked in itertools.product(
            ("cpu", "meta"),
            ("cpu", "meta"),
            (torch.float16, torch.float32),
            lengths,
            lengths,
            (False, True),
        ):
            q = tensors[q_device, dtype, q_len]
            k = tensors[kv_device, dtype, kv_len]
            call = RouteCall(q, k, k, mask if masked else None)
            for name, expected in HISTORIC_GATES.items():
                want = expected(q, k, k, call.attn_mask)
                assert gates[name].accepts(call) == want, (name, q.shape, k.shape, dtype, masked)
                assert (gates[name].reasons(call) == []) == want
                accepted[name] += want
                cases += 1
    assert cases == 40_000
    # Every gate must have both answers in it, or the comparison would be empty.
    assert all(0 < count < 8000 for count in accepted.values()), accepted


def test_closed_gates_are_never_wider_than_the_historic_ones():
    historic = {b.name: b for b in builtin_registry(parity=True).ordered()}
    closed = {b.name: b for b in builtin_registry().ordered()}
    assert set(historic) < set(closed)
    for shape, dtype in itertools.product(
        [(2, 8, 600, 64), (8, 600, 64), (2, 8, 600, 256), (2, 1, 600, 64), (2, 8, 16, 64)],
        [torch.float16, torch.float32],
    ):
        x = torch.empty(1, dtype=dtype, device="meta").expand(shape)
        call = RouteCall(x, x, x)
        for name, backend in historic.items():
            if closed[name].constraints.accepts(call):
                assert backend.constraints.accepts(call), (name, shape, dtype)


def half(*shape, **options):
    return torch.empty(1, dtype=options.pop("dtype", torch.float16), device="meta").expand(shape)


@pytest.mark.parametrize(
    ("name", "call", "words"),
    [
        ("quantized", RouteCall(*[half(8, 600, 64)] * 3), "dimensions"),
        ("sage", RouteCall(*[half(8, 600, 64)] * 3), "dimensions"),
        ("sage", RouteCall(*[half(1, 8, 600, 64, dtype=torch.float32)] * 3), "float32"),
        ("triton", RouteCall(half(1, 8, 600, 64), *[half(1, 3, 600, 64)] * 2), "multiple of 3"),
        ("quantized", RouteCall(half(1, 8, 600, 64), *[half(1, 3, 600, 64)] * 2), "multiple of 3"),
        ("quantized", RouteCall(*[half(1, 8, 600, 64)] * 3, dropout_p=0.1), "dropout"),
        ("sage", RouteCall(*[half(1, 8, 600, 64)] * 3, dropout_p=0.1), "dropout"),
        ("flex", RouteCall(*[half(1, 8, 600, 64)] * 3, dropout_p=0.1), "dropout"),
        ("sage", RouteCall(*[half(1, 8, 600, 64)] * 3, grad=True), "backward"),
        ("block_sparse", RouteCall(*[half(1, 8, 600, 64)] * 3, grad=True), "backward"),
        ("block_sparse", RouteCall(*[half(1, 8, 600, 64)] * 3, is_causal=True), "causal"),
        (
            "block_sparse",
            RouteCall(*[half(1, 8, 600, 64)] * 3, attn_mask=half(600, 600)),
            "query row",
        ),
        ("quantized", RouteCall(*[half(1, 8, 600, 64)] * 3, extra={"window": 3}), "window"),
        (
            "quantized",
            RouteCall(*[half(1, 8, 600, 64)] * 3, torch.zeros(600, requires_grad=True), grad=True),
            "no gradient for attn_mask",
        ),
        (
            "flash",
            RouteCall(*[half(1, 8, 600, 64)] * 2, half(1, 8, 600, 32)),
            "value's head_dim 32",
        ),
    ],
)
def test_every_hole_is_closed_with_a_reason(name, call, words):
    gate = next(b for b in builtin_registry().ordered() if b.name == name).constraints
    reasons = gate.reasons(call)
    assert any(words in reason for reason in reasons), reasons
    assert not gate.accepts(call)
    clean = RouteCall(*[half(1, 8, 600, 64)] * 3)
    assert gate.reasons(clean) == []


def test_one_terminal_labels_are_unique_and_platforms_only_on_triton():
    for parity in (True, False):
        backends = builtin_registry(parity=parity).ordered()
        assert [b.name for b in backends if b.terminal] == ["dynamic"]
        assert [b.name for b in backends if b.platforms is not None] == ["triton"]
        assert len({b.label for b in backends}) == len({b.name for b in backends}) == len(backends)
        registry = builtin_registry(parity=parity)
        assert [registry.by_label(label).name for label in registry.labels()] == [
            b.name for b in backends
        ]


def test_registry_refuses_duplicates_and_orders():
    first = Backend("a", "A", 5, tagged("a"), options=("y", "x"))
    registry = Registry((first, Backend("b", "B", 1, tagged("b"), caps=frozenset({"block_mask"}))))
    with pytest.raises(ValueError, match=r"backend\.name.*'a'"):
        registry.register(Backend("a", "C", 1, tagged("a")))
    with pytest.raises(ValueError, match=r"backend\.label.*'B'"):
        registry.register(Backend("c", "B", 1, tagged("c")))
    assert [b.name for b in registry.ordered()] == ["b", "a"]
    assert registry.labels() == ("B", "A")
    assert registry.options() == ("x", "y")
    assert [b.name for b in registry.with_cap("block_mask")] == ["b"]
    assert registry.by_label("nothing") is None


def test_a_failing_prepare_skips_only_itself(caplog):
    def explode(platform, original, settings):
        raise OSError("no such symbol")

    registry = Registry(
        (
            Backend("low", "Low", 1, tagged("low")),
            Backend("broken", "Broken", 2, explode),
            Backend("absent", "Absent", 3, lambda *a: None),
            Backend("elsewhere", "Elsewhere", 4, tagged("e"), platforms=frozenset({"rocm"})),
            Backend("high", "High", 5, tagged("high")),
        )
    )
    with caplog.at_level(logging.WARNING):
        plan = build_plan(registry, Platform("cuda"), registry.labels(), original, {})
    assert plan.chain == "high>low>sdpa"
    skipped = dict(plan.skipped)
    assert skipped["broken"] == "OSError: no such symbol"
    assert "only on rocm" in skipped["elsewhere"]
    assert set(skipped) == {"broken", "absent", "elsewhere"}
    levels = {record.levelname: record.message for record in caplog.records}
    assert "Broken" in levels["ERROR"] and "Elsewhere" in levels["WARNING"]
    assert "Absent" not in caplog.text


def test_capabilities_narrow_and_never_widen():
    block = frozenset({"block_mask"})
    both = frozenset({"block_mask", "masked_block"})
    for declared, named, expected in (
        (both, None, both),
        (both, block, block),
        (both, frozenset(), frozenset()),
        (block, both, block),
    ):
        registry = Registry((Backend("a", "A", 1, tagged("a", named), caps=declared),))
        plan = build_plan(registry, Platform("cpu"), ["A"], original, {})
        assert plan.entries[0].caps == expected


def test_an_undeclared_option_cannot_be_captured():
    def reads_too_much(platform, original, settings):
        return lambda *a: settings["secret"]

    def reads_at_once(platform, original, settings):
        settings["secret"]

    registry = Registry(
        (
            Backend("late", "Late", 1, reads_too_much, options=("open",)),
            Backend("early", "Early", 2, reads_at_once, options=("open",)),
        )
    )
    settings = {"open": 1, "secret": 2}
    plan = build_plan(registry, Platform("cpu"), ["Late", "Early"], original, settings)
    assert "KeyError" in dict(plan.skipped)["early"]
    with pytest.raises(KeyError):
        plan.entries[0].call()


def test_unknown_labels_match_nothing_and_the_last_terminal_wins():
    registry = Registry(
        (
            Backend("slow", "Slow", 1, tagged("slow"), terminal=True),
            Backend("slower", "Slower", 0, tagged("slower"), terminal=True),
        )
    )
    plan = build_plan(registry, Platform("cpu"), ["Slow", "Slower", "What"], original, {})
    assert plan.chain == "slow" and not plan.empty
    assert build_plan(registry, Platform("cpu"), ["What"], original, {}).empty


@pytest.mark.parametrize(
    ("platform", "labels"),
    [
        (Platform("cuda", capability=(9, 0)), ()),
        (Platform("xpu"), ()),
        (Platform("cpu"), ("Dynamic attention",)),
        (Platform("mps"), ("Dynamic attention",)),
        (Platform("rocm", architecture="gfx90a"), ("Dynamic attention",)),
        (Platform("rocm", architecture="gfx1030"), ("Dynamic attention",)),
        (Platform("rocm", architecture="gfx1100"), ()),
        (Platform("rocm", architecture="gfx1201"), ()),
    ],
)
def test_default_labels(platform, labels):
    assert default_labels(platform) == labels


def test_platform_names_are_checked():
    with pytest.raises(ValueError, match=r"platform\.name.*'gpu'"):
        Platform("gpu")


def test_old_chips_and_missing_packages_are_reasons():
    by_name = {b.name: b for b in builtin_registry().ordered()}
    turing = Platform("cuda", capability=(7, 5))
    assert any("8.0" in reason for reason in by_name["quantized"].missing(turing))
    ada = Platform("cuda", capability=(8, 9))
    assert any("9.0" in reason for reason in by_name["flash4"].missing(ada))
    assert any("rocm" in reason for reason in by_name["triton"].missing(ada))


def test_default_constraints_take_anything_off_the_cpu():
    anything = RouteCall(half(3, 5), half(3, 5), half(3, 5), half(3, 3), 0.5, True)
    assert Constraints().accepts(anything)
    on_cpu = RouteCall(*[torch.zeros(3, 5)] * 3)
    assert Constraints().reasons(on_cpu) == ["tensors on the CPU"]
