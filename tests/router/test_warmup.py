"""A warm-up runs every path that later calls of its shapes take, and leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from solspark.router import (
    BLOCK_MASK,
    MASKED_BLOCK,
    Backend,
    Constraints,
    Platform,
    Registry,
    Router,
    RouterConfig,
    SparseConfig,
    layout_from_segments,
)

SPARSE = SparseConfig(
    enabled=True, min_tokens=0, allow_cpu=True, budget=0.2, schedule_steps=2, schedule_bump=0.3
)


class Compiling:
    """A backend that has to compile once for each kind of call."""

    def __init__(self):
        self.compiled = []

    def __call__(self, platform, original, settings):
        def call(query, key, value, attn_mask=None, *rest, selection=None):
            kind = (tuple(query.shape), query.stride(), query.dtype, key.shape[1])
            kind += (attn_mask is not None, None if selection is None else selection.density())
            if kind not in self.compiled:
                self.compiled.append(kind)
            return original(query, key, value, enable_gqa=key.shape[1] != query.shape[1])

        return call


def router_of(backend, **config):
    caps = frozenset({BLOCK_MASK, MASKED_BLOCK})
    declared = Backend("a", "A", 1, backend, Constraints(allow_cpu=True), caps=caps)
    config.setdefault("sparse", SPARSE)
    return Router(
        RouterConfig(backends=("A",), **config),
        registry=Registry((declared,)),
        platform=Platform("cpu"),
    )


def generate(router, layout=None, steps=10, shape=(1, 2, 700, 8), masked=False, key_heads=2):
    """Run a generation and one call outside it, as a model would."""
    batch, heads, tokens, dim = shape
    q = torch.randn(batch, tokens, heads, dim).transpose(1, 2)
    k = torch.randn(batch, tokens, key_heads, dim).transpose(1, 2)
    mask = torch.rand(batch, 1, 1, tokens) > 0.1 if masked else None
    grouped = key_heads != heads
    F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=grouped)
    router.context.begin(steps=steps)
    router.context.set_role("transformer")
    router.context.set_layout(layout)
    for _ in range(steps):
        router.context.tick()
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=grouped)
    router.context.end()


@pytest.mark.parametrize("layout", [None, layout_from_segments([("text", 100), ("video", 600)])])
def test_later_calls_compile_nothing(layout):
    backend = Compiling()
    router = router_of(backend)
    undo = router.install()
    try:
        records = router.warmup([(1, 2, 700, 8)], dtype=torch.float32, masked=True, layout=layout)
        # Dense, both budgets of the schedule, and all again with a mask.
        assert [r.backend for r in records] == ["a"] * 6
        assert [r.selection is None for r in records] == [True, False, False] * 2
        assert records[1].density < records[2].density
        warm = len(backend.compiled)
        assert warm == 6
        generate(router, layout)
        assert len(backend.compiled) == warm
        generate(router, layout, shape=(1, 2, 701, 8))
        assert len(backend.compiled) > warm
    finally:
        undo()


def test_grouped_heads_and_a_router_without_a_sparse_stage():
    backend = Compiling()
    router = router_of(backend, sparse=SparseConfig())
    undo = router.install()
    try:
        records = router.warmup([(2, 4, 300, 8)], dtype=torch.float32, key_heads=2)
        assert [r.selection for r in records] == [None]
        generate(router, shape=(2, 4, 300, 8), key_heads=2)
        assert len(backend.compiled) == 1
    finally:
        undo()


def test_a_warmup_leaves_no_trace():
    seen = []
    router = router_of(Compiling(), telemetry=True)
    router.observer = lambda *call: seen.append(call)
    undo = router.install()
    try:
        router.context.begin(steps=10)
        router.context.set_role("te")
        router.context.publish_segments([("text", 5)])
        router.context.tick()
        before = {k: v for k, v in vars(router.context).items() if not k.startswith("_")}
        budget, last = router.stage.budget, router.last_call()
        router.warmup([(1, 2, 700, 8)], dtype=torch.float32)
        after = {k: v for k, v in vars(router.context).items() if not k.startswith("_")}
        assert before == after and router.stage.budget == budget
        assert router.last_call() is last and not seen
        assert not router.telemetry.counts
    finally:
        undo()


def test_a_warmup_says_what_it_cannot_run():
    router = router_of(Compiling())
    with pytest.raises(RuntimeError, match="install"):
        router.warmup([(1, 2, 700, 8)])
    undo = router.install()
    try:
        for shape in ((1, 2, 700), (1, 0, 700, 8)):
            with pytest.raises(ValueError, match="batch, heads, tokens, head_dim"):
                router.warmup([shape], dtype=torch.float32)
    finally:
        undo()


def test_a_budget_of_everything_at_the_ends_is_a_dense_call():
    backend = Compiling()
    router = router_of(backend, sparse=replace(SPARSE, schedule_bump=0.9))
    undo = router.install()
    try:
        records = router.warmup([(1, 2, 700, 8)], dtype=torch.float32)
        assert [r.selection is None for r in records] == [True, False, True]
        assert records[2].skip == "budget covers everything"
    finally:
        undo()


def kernel_variants():
    from solspark.kernels import block_lists, pack_mask, quantize, quantized_attention

    kernels = (
        block_lists.block_lists_kernel,
        pack_mask.pack_mask_kernel,
        quantize.mean_kernel,
        quantize.quantize_kernel,
        quantized_attention.quantized_attention_kernel,
    )
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_no_kernel_is_compiled_after_a_warmup(masked):
    router = Router(RouterConfig(backends=("Quantized attention",), sparse=SPARSE))
    undo = router.install()
    try:
        router.warmup([(1, 4, 1500, 64)], masked=masked)
        warm = kernel_variants()
        assert warm > 0
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        q, k, v = (torch.randn(1, 1500, 4, 64, **options).transpose(1, 2) for _ in range(3))
        mask = torch.rand(1, 1, 1, 1500, device="cuda") > 0.2 if masked else None
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        router.context.begin(steps=10)
        router.context.set_role("transformer")
        for _ in range(10):
            router.context.tick()
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            assert router.last_call().backend == "quantized"
            assert router.last_call().selection is not None
        assert kernel_variants() == warm
    finally:
        undo()
