"""Stock diffusers models through the router: bit for bit with sparse off, text pinned with it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("diffusers")

from solspark.router import Platform, Router, RouterConfig, SparseConfig, follow

BACKENDS = ("Block-sparse attention", "Dynamic attention")
TEXT = 96


@pytest.fixture(autouse=True)
def torch_is_left_as_found():
    before = F.scaled_dot_product_attention
    yield
    left = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = before
    assert left is before


def router_with(**sparse):
    sparse = {"min_tokens": 0, "allow_cpu": True, **sparse}
    config = RouterConfig(backends=BACKENDS, sparse=SparseConfig(**sparse))
    return Router(config, platform=Platform("cpu"))


def tiny_flux():
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(16, 24, 24),
    ).eval()


def flux_inputs(side=24, batch=1):
    generator = torch.Generator().manual_seed(1)
    grid = torch.zeros(side, side, 3)
    grid[..., 1] += torch.arange(side)[:, None]
    grid[..., 2] += torch.arange(side)[None, :]
    return {
        "hidden_states": torch.randn(batch, side * side, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16, generator=generator),
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": grid.flatten(0, 1),
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }


def tiny_wan():
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    ).eval()


def wan_inputs(grid=(3, 14, 22), batch=2):
    frames, height, width = grid
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 4, frames, 2 * height, 2 * width, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, 20, 16, generator=generator),
        "return_dict": False,
    }


MODELS = {"flux": (tiny_flux, flux_inputs), "wan": (tiny_wan, wan_inputs)}


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


@pytest.mark.parametrize("name", MODELS)
def test_sparse_off_is_bit_for_bit_the_stock_model(name):
    build, make = MODELS[name]
    model, inputs = build(), make()
    want = run(model, inputs)
    router = router_with(enabled=False)
    undo = router.install()
    unfollow = follow(router, model, steps=1)
    seen = []
    router.observer = lambda name, *rest: seen.append(name)
    got = run(model, inputs)
    unfollow()
    undo()
    assert torch.equal(got, want)
    assert seen and set(seen) == {"dynamic"}
    assert torch.equal(run(model, inputs), want)


class Replay:
    """Torch's attention under recorded selections: an independent way to the sparse result."""

    def __init__(self, selections, original):
        self.selections = list(selections)
        self.original = original

    def __call__(self, query, key, value, **kwargs):
        kwargs = {name: v for name, v in kwargs.items() if name != "enable_gqa"}
        selection = self.selections.pop(0)
        if selection is None:
            return self.original(query, key, value, **kwargs)
        assert kwargs.pop("attn_mask", None) is None
        return self.original(query, key, value, attn_mask=selection.token_mask(), **kwargs)


def run_sparse(router, model, inputs):
    undo = router.install()
    unfollow = follow(router, model, steps=1)
    calls = []
    router.observer = lambda name, *rest: calls.append(router.last_call())
    out = run(model, inputs)
    unfollow()
    undo()
    return out, calls


def replayed(model, inputs, calls):
    original = F.scaled_dot_product_attention
    replay = Replay([call.selection for call in calls], original)
    F.scaled_dot_product_attention = replay
    try:
        out = run(model, inputs)
    finally:
        F.scaled_dot_product_attention = original
    assert not replay.selections
    return out


def test_flux_goes_sparse_with_its_text_pinned():
    model, inputs = tiny_flux(), flux_inputs()
    dense = run(model, inputs)
    router = router_with(enabled=True, budget=0.25)
    got, calls = run_sparse(router, model, inputs)
    assert [call.backend for call in calls] == ["block_sparse"] * 2
    for call in calls:
        keep = call.selection.keep.bool()
        # 96 text tokens: query tile 0 and key tiles 0 and 1 touch them.
        assert keep[:, :, 0].all() and keep[..., :2].all()
        assert call.density < 0.62
    torch.testing.assert_close(got, replayed(model, inputs, calls), rtol=1e-4, atol=1e-5)
    assert (got - dense).abs().max() > 1e-4


def test_wan_goes_sparse_in_self_attention_only():
    model, inputs = tiny_wan(), wan_inputs()
    dense = run(model, inputs)
    router = router_with(enabled=True, budget=0.25)
    got, calls = run_sparse(router, model, inputs)
    # Two layers, each self-attention and then cross-attention to the text.
    assert [call.backend for call in calls] == ["block_sparse", "dynamic"] * 2
    assert [call.skip for call in calls] == [None, "cross attention"] * 2
    # A grid of 3 x 14 x 22 = 924 tokens, no multiple of a tile; two samples with their own maps.
    assert calls[0].shape == (2, 2, 924, 924, 64)
    assert not torch.equal(calls[0].selection.keep[0], calls[0].selection.keep[1])
    torch.testing.assert_close(got, replayed(model, inputs, calls), rtol=1e-4, atol=1e-5)
    assert (got - dense).abs().max() > 1e-4


@pytest.mark.parametrize("grid", [(7, 11, 13), (3, 5, 7)])
def test_prime_grids(grid):
    model, inputs = tiny_wan(), wan_inputs(grid, batch=1)
    got, calls = run_sparse(router_with(enabled=True, budget=0.25), model, inputs)
    torch.testing.assert_close(got, replayed(model, inputs, calls), rtol=1e-4, atol=1e-5)


def test_two_samples_equal_two_calls():
    model, inputs = tiny_wan(), wan_inputs()
    both, _ = run_sparse(router_with(enabled=True, budget=0.25), model, inputs)
    for sample in range(2):
        part = slice(sample, sample + 1)
        alone = {n: v[part] if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        out, _ = run_sparse(router_with(enabled=True, budget=0.25), model, alone)
        torch.testing.assert_close(out, both[part], rtol=1e-4, atol=1e-5)


class TinyPipeline:
    """A classic pipeline in miniature: guidance runs the denoiser twice, then comes a step."""

    def __init__(self, model, inputs):
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.transformer = model
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.inputs = inputs

    @torch.no_grad()
    def __call__(self, steps, watch=lambda: None):
        self.scheduler.set_timesteps(steps)
        latents = self.inputs["hidden_states"]
        for t in self.scheduler.timesteps:
            noise = []
            for _ in range(2):
                inputs = {**self.inputs, "hidden_states": latents}
                inputs["timestep"] = t.expand(latents.shape[0]) / 1000
                noise.append(self.transformer(**inputs)[0])
                watch()
            latents = self.scheduler.step(noise[0] + noise[1], t, latents, return_dict=False)[0]
        # A decoder's attention, outside any denoiser.
        x = latents.unflatten(-1, (1, -1)).transpose(1, 2)
        F.scaled_dot_product_attention(x, x, x)
        return latents


def test_a_pipeline_is_followed_step_by_step_and_restored():
    pipe = TinyPipeline(tiny_flux(), flux_inputs(side=18))
    router = router_with(enabled=True, budget=0.25, schedule_steps=1, schedule_bump=0.75)
    undo = router.install()
    unfollow = follow(router, pipe)
    steps, budgets, names = [], [], []

    def watch():
        steps.append(router.context.step)
        budgets.append(router.stage.budget)
        assert router.context.role is None

    router.observer = lambda name, *rest: names.append((name, router.context.role))
    for count in (4, 3):
        steps.clear()
        budgets.clear()
        names.clear()
        pipe(count, watch)
        assert steps == [i for i in range(count) for _ in range(2)]
        assert router.context.steps == count
        assert budgets[:2] == [1.0, 1.0] and budgets[-2:] == [1.0, 1.0]
        assert budgets[2:-2] == [0.25] * (2 * count - 4)
        sparse = [name for name, role in names if name == "block_sparse+sparse"]
        assert len(sparse) == 2 * (2 * count - 4)
        # What is no denoiser's is dense.
        assert names[-1] == ("dynamic", None)
    assert router.context.model_key == ("TinyPipeline", "FluxTransformer2DModel")
    unfollow()
    unfollow()
    undo()
    assert not {"step", "set_timesteps"} & set(pipe.scheduler.__dict__)
    assert not pipe.transformer._forward_hooks and not pipe.transformer._forward_pre_hooks
    assert not router.context.active


def test_a_copied_scheduler_steps_itself():
    pipe = TinyPipeline(tiny_flux(), flux_inputs(side=10))
    router = router_with(enabled=True)
    unfollow = follow(router, pipe)
    clone = copy.deepcopy(pipe.scheduler)
    clone.set_timesteps(5)
    pipe.scheduler.set_timesteps(3)
    assert (len(clone.timesteps), len(pipe.scheduler.timesteps)) == (5, 3)
    sample = torch.zeros(1, 4)
    clone.step(sample, clone.timesteps[0], sample)
    assert clone.step_index == 1 and pipe.scheduler.step_index is None
    unfollow()


def test_the_role_comes_back_after_a_failing_forward():
    model, inputs = tiny_flux(), flux_inputs(side=10)
    router = router_with(enabled=True)
    unfollow = follow(router, model, steps=2)
    with pytest.raises(RuntimeError):
        run(model, {**inputs, "hidden_states": torch.zeros(1, 3, 5)})
    assert router.context.role is None
    unfollow()


def test_a_published_layout_is_left_alone_and_a_derived_one_is_withdrawn():
    model, inputs = tiny_wan(), wan_inputs((3, 5, 7), batch=1)
    router = router_with(enabled=True)
    undo = router.install()
    router.context.publish_segments([("text", 5), ("video", 100)])
    published = router.context.layout
    unfollow = follow(router, model, steps=1)
    run(model, inputs)
    assert router.context.layout is published
    unfollow()
    flux = tiny_flux()
    unfollow = follow(router, flux, steps=1)
    run(flux, flux_inputs(side=10))
    assert router.context.layout.source == "stream ids"
    assert router.context.layout.length == TEXT + 100
    unfollow()
    assert router.context.layout is None
    undo()


def test_only_what_has_a_denoiser_can_be_followed():
    with pytest.raises(TypeError, match=r"target.*object"):
        follow(router_with(), object())


def test_a_shared_module_is_hooked_once():
    model = tiny_flux()
    pipe = TinyPipeline(model, flux_inputs(side=10))
    pipe.transformer_2 = model
    pipe.controlnet = torch.nn.Linear(2, 2)
    unfollow = follow(router_with(), pipe)
    assert len(model._forward_pre_hooks) == 1
    assert not pipe.controlnet._forward_pre_hooks
    unfollow()


def test_h3_is_followed_with_its_packed_layout():
    # The real modular pipeline, tiny: text, audio and video in one sequence, two schedulers.
    from solspark.integrations.tiny_h3 import build_tiny_h3_pipeline, generate_clip

    pipe, options = build_tiny_h3_pipeline(layers=1)
    router = router_with(enabled=True, budget=0.25)
    undo = router.install()
    unfollow = follow(router, pipe)
    calls = []
    router.observer = lambda name, query, *rest: calls.append(
        (name, router.context.role, router.context.step, query.shape[2], router.context.layout)
    )
    generate_clip(pipe, "a cat", **{**options, "steps": 3})
    steps, schedule = router.context.step, router.context.steps
    unfollow()
    undo()
    sparse = [call for call in calls if call[0] == "block_sparse+sparse"]
    assert [call[2] for call in sparse] == [0, 1, 2] and (steps, schedule) == (2, 3)
    layout = sparse[0][4]
    assert layout.kinds == ("text", "audio", "video") and layout.length == sparse[0][3]
    assert all(call[0] == "dynamic" for call in calls if call[1] != "transformer")


def test_dense_steps_of_a_sparse_run_are_the_plain_backend_bit_for_bit():
    model, inputs = tiny_flux(), flux_inputs()
    want = run(model, inputs)
    router = router_with(enabled=True, budget=0.25, schedule_steps=1, schedule_bump=0.75)
    undo = router.install()
    unfollow = follow(router, model, steps=4)
    outs = [run(model, inputs) for _ in range(4)]
    unfollow()
    undo()
    assert torch.equal(outs[0], want) and torch.equal(outs[3], want)
    assert not torch.equal(outs[1], want) and torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    "shape", [(420,), (1, 420), (2, 1, 1, 420), (2, 1, 420, 420), (2, 2, 420, 420), (420, 420)]
)
def test_no_mask_is_ever_ignored(kind, shape):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 420, 64, generator=generator) for _ in range(3))
    mask = torch.rand(shape, generator=generator) > 0.3
    mask[..., :20] = True
    shown = mask
    if kind == "float":
        mask = torch.zeros(shape).masked_fill(~mask, float("-inf"))
    router = router_with(enabled=True, budget=0.25)
    undo = router.install()
    router.context.begin()
    with router.context.as_role("transformer"):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    last = router.last_call()
    undo()
    # A mask without query rows goes sparse, any other keeps the call dense: never without it.
    row_free = len(shape) == 1 or shape[-2] == 1
    assert (last.selection is not None) == row_free
    if last.selection is not None:
        shown = shown & last.selection.token_mask()
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=shown)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
