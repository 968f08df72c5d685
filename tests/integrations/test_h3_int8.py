"""INT8 in the H3 installers: near to dense, streamed without Q, K and V, calibrated by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

from solspark.integrations.h3_int8 import Int8State, norm_weight
from solspark.integrations.h3_layout import derive_layout, forward_arguments
from solspark.integrations.h3_processor import project_qkv
from solspark.integrations.minimax_h3 import install_h3_sol_attn, install_h3_spark_attn
from solspark.integrations.tiny_h3 import build_tiny_h3_transformer
from solspark.ops import _dispatch
from solspark.reference.qkv_producer import norm_rope
from solspark.reference.sol_int8 import sol_int8 as float_reference

GRID = (7, 9, 13)
"""12 complete video blocks, 51 rows more, and a context behind them."""
SPARSE: dict[str, Any] = {"warmup_ratio": 0.0, "dense_layers": 0}
WAYS: dict[str, dict[str, Any]] = {
    "direct": {"precision": "int8"},
    "streamed": {"precision": "int8", "chunk_tokens": 256},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def cosine(actual: Tensor, wanted: Tensor) -> float:
    assert actual.isfinite().all()
    return float(cosine_similarity(actual.double().flatten(), wanted.double().flatten(), 0))


def relative(actual: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((actual.double() - wanted).norm() / wanted.norm())


@dataclasses.dataclass
class Layer:
    """The one sparse layer of a forward: its Q, K, V in packed order, and what ran on them."""

    request: Any
    query: Tensor
    key: Tensor
    value: Tensor
    attend: Callable[..., tuple[Tensor, dict[str, Any]]]

    @property
    def blocks(self) -> int:
        return self.request.video_tokens // 64

    @property
    def dense(self) -> Tensor:
        wide = (x.transpose(1, 2).double() for x in (self.query, self.key, self.value))
        return scaled_dot_product_attention(*wide).transpose(1, 2)


@pytest.fixture(scope="module")
def layer(make_request: Any) -> Layer:
    """Attention of the second of two layers, whose input is the same however it attends."""
    transformer = build_tiny_h3_transformer(layers=2)
    packed = make_request("fl2va", GRID)
    layout = derive_layout(forward_arguments((), packed.inputs(0.4)))
    attn = transformer.transformer_blocks[1].attn
    seen: dict[str, Any] = {}

    def keep_input(module: Any, args: tuple[Any, ...]) -> None:
        seen["input"] = args

    def keep_output(module: Any, args: tuple[Any, ...]) -> None:
        seen["output"] = args[0]

    def attend(**options: Any) -> tuple[Tensor, dict[str, Any]]:
        given = {"num_denoise_steps": 1, "warmup_ratio": 0.0, **options}
        with install_h3_sol_attn(transformer, **given) as plugin, torch.no_grad():
            handles = [
                attn.register_forward_pre_hook(keep_input),
                attn.to_out[0].register_forward_pre_hook(keep_output),
            ]
            try:
                transformer(**packed.inputs(0.4))
            finally:
                for handle in handles:
                    handle.remove()
            summary = plugin.summary()
        assert summary["processor_calls"]["sparse:sol"] == 1
        return layout.pack(seen["output"]).unflatten(-1, (attn.heads, 128)), summary

    attend()
    with torch.no_grad():
        tensors = project_qkv(attn, *seen["input"][:2], layout.pack)
    return Layer(packed, *tensors, attend)


# -------------------------------------------------------------------------------- what it computes


@ways
@pytest.mark.parametrize(
    ("options", "bar"),
    [
        ({"sol_tau": 1.0}, 0.998),
        ({"sol_route_topk_ratio": 0.2}, 0.995),
        ({"sol_tau": 1.0, "sol_tail_granularity": "none"}, 0.998),
    ],
    ids=["tau", "top-k", "no tail"],
)
def test_int8_is_what_the_float_reference_says(
    layer: Layer, way: dict[str, Any], options: dict[str, Any], bar: float
) -> None:
    out, summary = layer.attend(**way, **options)
    ratio = options.get("sol_route_topk_ratio", 0.0)
    blocks = -(-layer.request.tokens // 64)
    wanted = float_reference(
        layer.query,
        layer.key,
        layer.value,
        tau=options.get("sol_tau", 1.0),
        topk_ratio=ratio,
        tail="sol_tail_granularity" not in options,
        sinks=(layer.blocks, blocks),
        dense_rows=(layer.blocks, blocks),
    )
    assert cosine(out, wanted) > bar
    assert relative(out, layer.dense) > 0.016  # it is sparse
    figures = summary["sol_route_density"]
    assert (figures["candidate_blocks"], figures["sink_blocks"]) == (12, blocks - 12)
    assert 0.2 < figures["delivered_video_density"] < 0.6
    if ratio:
        assert figures["target_top_k"] == 2 <= 12 * figures["delivered_video_density"]
    assert summary["sol_backend"] == "eager" == summary["implementations"]["qkv_producer"]
    assert summary["resolved"]["sol_route_topk_execution"]["resolved"] == "int8"


@ways
@pytest.mark.parametrize("options", [{"sol_tau": -1e9}, {"sol_route_topk_ratio": 1.0}])
def test_everything_exact_is_dense(layer: Layer, way: dict, options: dict) -> None:
    out, summary = layer.attend(**way, **options)
    assert summary["sol_route_density"]["delivered_density"] == 1.0
    assert relative(out, layer.dense) < 0.016


@ways
def test_context_and_the_rest_of_the_video_are_exact(layer: Layer, way: dict[str, Any]) -> None:
    """Where the native path attends densely, INT8 reads every key."""
    out, _ = layer.attend(**way, sol_tau=3.0)
    first = layer.blocks * 64
    assert first + 51 == layer.request.video_tokens
    assert relative(out[:, first:], layer.dense[:, first:]) < 0.016
    assert relative(out[:, :first], layer.dense[:, :first]) > 0.016


def test_streamed_is_direct_and_both_are_near_native(layer: Layer) -> None:
    for options in ({"sol_tau": 1.0}, {"sol_route_topk_ratio": 0.3}):
        native, _ = layer.attend(**options)
        direct, _ = layer.attend(**WAYS["direct"], **options)
        streamed, _ = layer.attend(**WAYS["streamed"], **options)
        assert cosine(streamed, direct) > 0.995
        # Native tails are taken for each query row, INT8's for each block of them.
        assert min(cosine(direct, native), cosine(streamed, native)) > 0.995


@ways
def test_tokens_read_beyond_the_blocks_bring_it_nearer_to_dense(
    layer: Layer, way: dict[str, Any]
) -> None:
    errors = [
        relative(layer.attend(**way, sol_tau=3.0, int8_token_aug=tokens)[0], layer.dense)
        for tokens in (None, 64, 256)
    ]
    assert errors[2] < errors[1] < errors[0]


def test_the_size_of_a_chunk_changes_nothing(layer: Layer) -> None:
    sizes = (64, 192, 4096)
    outs = [layer.attend(precision="int8", chunk_tokens=size)[0] for size in sizes]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rotation_and_balancing_are_on_where_they_are_served(layer: Layer) -> None:
    out, summary = layer.attend(precision="int8")
    assert summary["int8"] == {
        "chunk_tokens": None,
        "rotate": True,
        "balance": True,
        "calibrated_layers": 0,
    }
    plain, summary = layer.attend(precision="int8", int8_rotate=False, int8_balance=False)
    assert (summary["int8"]["rotate"], summary["int8"]["balance"]) == (False, False)
    assert not torch.equal(out, plain)


def test_what_no_kernel_serves_is_off_unless_asked_for(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose kernels do neither runs them in plain torch only for those who ask."""

    def reasons(call: Any) -> list[str]:
        return ["it does not rotate"] if call.variant else []

    table = dict(_dispatch._registry["qkv_producer"])
    table["triton"] = dataclasses.replace(table["eager"], name="triton", reasons=reasons)
    monkeypatch.setitem(_dispatch._registry, "qkv_producer", table)
    _, summary = layer.attend(precision="int8")
    assert (summary["int8"]["rotate"], summary["int8"]["balance"]) == (False, False)
    assert summary["implementations"]["qkv_producer"] == "triton"
    _, summary = layer.attend(precision="int8", int8_rotate=True)
    assert (summary["int8"]["rotate"], summary["int8"]["balance"]) == (True, False)
    assert summary["implementations"]["qkv_producer"] == "eager"


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types(make_request: Any, way: dict[str, Any], dtype: torch.dtype) -> None:
    transformer = build_tiny_h3_transformer(layers=2, dtype=dtype)
    inputs = make_request().inputs(0.3)
    with torch.no_grad():
        plain = transformer(**inputs)
        with install_h3_sol_attn(transformer, num_denoise_steps=1, sol_tau=-1e9, **SPARSE, **way):
            outs = transformer(**inputs)
    for out, wanted in zip(outs, plain, strict=True):
        assert out.dtype == wanted.dtype and relative(out, wanted) < 0.016


def test_ratios_of_the_schedule_reach_int8(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    with install_h3_sol_attn(
        transformer,
        num_denoise_steps=3,
        sol_route_topk_ratio=0.1,
        sol_route_topk_schedule=(1.0, 0.3, 0.1),
        precision="int8",
        **SPARSE,
    ) as plugin:
        denoise(transformer, make_request("t2va", GRID), 3)
        records = plugin.records()
    found = [max(r["video_density"] for r in records if r["evaluation"] == e) for e in range(3)]
    assert found[0] == 1.0 > found[1] > found[2]


# ----------------------------------------------------------------------------------- calibration


def test_cold_once_a_layer_then_primed_until_reset(
    transformer: Any, make_request: Any, denoise: Any
) -> None:
    request = make_request()
    options = {**WAYS["streamed"], "num_denoise_steps": 4, "warmup_steps": 1}
    with install_h3_sol_attn(transformer, **options) as plugin:
        first = denoise(transformer, request, 4)
        summary = plugin.summary()
        calls = summary["processor_calls"]
        assert calls["dense:warmup"] == 4 and calls["dense:dense_layer"] == 3
        assert calls["sparse:sol"] == 9
        assert (calls["int8_cold"], calls["int8_primed"]) == (3, 6)
        assert summary["int8"]["calibrated_layers"] == 3
        kept = plugin.controller.int8.statistics
        assert sorted(name[0] for name in kept) == [1, 2, 3]
        assert all(
            x.shape == (2, 128) and x.dtype == torch.float32 for s in kept.values() for x in s
        )
        plugin.reset()
        assert plugin.summary()["int8"]["calibrated_layers"] == 0
        again = denoise(transformer, request, 4)
        assert torch.equal(again, first)
        assert plugin.summary()["processor_calls"]["int8_cold"] == 3
    assert plugin.controller.int8.statistics == {} and plugin.controller.int8.rotation is None


def test_the_calibration_is_that_of_the_layers_keys(transformer: Any, make_request: Any) -> None:
    request = make_request()
    layout = derive_layout(forward_arguments((), request.inputs(0.4)))
    seen: list[Any] = []
    attn = transformer.transformer_blocks[2].attn
    handle = attn.register_forward_pre_hook(lambda module, args: seen.append(args))
    try:
        with (
            install_h3_sol_attn(
                transformer, num_denoise_steps=1, **SPARSE, **WAYS["streamed"]
            ) as p,
            torch.no_grad(),
        ):
            transformer(**request.inputs(0.4))
            ((kmean, vscale, factors),) = (
                found for name, found in p.controller.int8.statistics.items() if name[0] == 2
            )
    finally:
        handle.remove()
    with torch.no_grad():
        _, key, value = project_qkv(attn, *seen[0][:2], layout.pack)
    torch.testing.assert_close(kmean, key[0].mean(0), atol=2e-3, rtol=2**-7)
    torch.testing.assert_close(vscale, value[0].abs().amax(0) / 127 * 1.1, atol=0, rtol=2**-7)
    assert (factors > 0).all()


def test_the_forwards_of_a_step_have_a_calibration_each(
    transformer: Any, make_request: Any
) -> None:
    """Under a two-pass guidance the passes differ in their conditioning."""
    request = make_request()
    with (
        install_h3_sol_attn(
            transformer, num_denoise_steps=2, evaluations_per_step=2, **SPARSE, **WAYS["streamed"]
        ) as plugin,
        torch.no_grad(),
    ):
        for time in (0.0, 0.0, 0.5, 0.5):
            transformer(**request.inputs(time))
        calls = plugin.summary()["processor_calls"]
        assert (calls["int8_cold"], calls["int8_primed"]) == (8, 8)
        assert plugin.summary()["int8"]["calibrated_layers"] == 4


@ways
def test_samples_of_a_batch_are_served_and_calibrated_alone(
    transformer: Any, make_request: Any, way: dict[str, Any]
) -> None:
    """Two evaluations, so that a streamed one reads the statistics of the one before."""
    requests = [make_request(grid=GRID, seed=seed) for seed in (1, 2)]

    def run(some: list[Any]) -> tuple[list[Tensor], Any]:
        outs = []
        options = {"num_denoise_steps": 2, "sol_route_topk_ratio": 0.3, **SPARSE, **way}
        with install_h3_sol_attn(transformer, **options) as plugin, torch.no_grad():
            for time in (0.2, 0.6):
                inputs = [request.inputs(time) for request in some]
                for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
                    inputs[0][name] = torch.cat([each[name] for each in inputs])
                outs.append(transformer(**inputs[0])[0])
            return outs, plugin.records()

    together, records = run(requests)
    alone = [run([request]) for request in requests]
    for evaluation, out in enumerate(together):
        for sample, (single, _) in enumerate(alone):
            # A rounding of float32 may turn an eighth bit over, here and there.
            assert relative(out[sample], single[evaluation][0]) < 1e-3
        assert relative(out[0], out[1]) > 0.1
    for call, record in enumerate(records):
        densities = [single[call]["density"] for _, single in alone]
        assert record["density"] == pytest.approx(sum(densities) / 2) and record["density"] < 1


def test_another_number_of_rows_is_another_calibration(transformer: Any, make_request: Any) -> None:
    short, long = make_request(), make_request(audio=30)
    with (
        install_h3_sol_attn(transformer, num_denoise_steps=3, **SPARSE, **WAYS["streamed"]) as p,
        torch.no_grad(),
    ):
        for request, time in ((short, 0.0), (long, 0.3), (short, 0.6)):
            transformer(**request.inputs(time))
        calls = p.summary()["processor_calls"]
        assert (calls["int8_cold"], calls["int8_primed"]) == (8, 4)


# ------------------------------------------------------------------------------------- streaming


@contextmanager
def counted_rows(attn: Any) -> Iterator[list[int]]:
    """Count the rows of every call of the query projection, fused or separate."""
    rows: list[int] = []
    module = attn.to_qkv if attn.fused_projections else attn.to_q
    handle = module.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    try:
        yield rows
    finally:
        handle.remove()


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_no_projection_is_ever_whole(
    transformer: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    request = make_request("fl2va", GRID)
    if fused:
        transformer.fuse_qkv_projections()
    with (
        install_h3_sol_attn(transformer, num_denoise_steps=2, **SPARSE, **WAYS["streamed"]),
        counted_rows(transformer.transformer_blocks[1].attn) as rows,
        torch.no_grad(),
    ):
        transformer(**request.inputs(0.0))
        tokens = request.tokens
        once = [256] * (tokens // 256) + [tokens % 256]
        assert rows == once * 2  # measured first
        transformer(**request.inputs(0.5))
        assert rows == once * 3


def test_fused_and_separate_projections_give_the_same_bits(
    transformer: Any, make_request: Any
) -> None:
    inputs = make_request("ref2va", (5, 4, 12)).inputs(0.4)
    with torch.no_grad():
        outs = []
        for fused in (False, True):
            if fused:
                transformer.fuse_qkv_projections()
            with install_h3_sol_attn(
                transformer, num_denoise_steps=1, **SPARSE, **WAYS["streamed"]
            ):
                outs.append(transformer(**inputs)[0])
    torch.testing.assert_close(*outs)


def test_offloaded_weights_come_with_their_modules(make_request: Any, transformer: Any) -> None:
    """Sequential offloading keeps a weight away until its module is called."""
    accelerate = pytest.importorskip("accelerate")
    options = {"num_denoise_steps": 1, **SPARSE, **WAYS["streamed"]}
    inputs = make_request().inputs(0.4)
    other = build_tiny_h3_transformer(seed=3)
    with torch.no_grad():
        with install_h3_sol_attn(transformer, **options):
            plain = transformer(**inputs)
        accelerate.cpu_offload(other, execution_device=torch.device("cpu"))
        assert other.transformer_blocks[0].attn.norm_q.weight.device.type == "meta"
        with install_h3_sol_attn(other, **options) as plugin:
            moved = other(**inputs)
            assert plugin.summary()["processor_calls"]["int8_cold"] == 4
    assert all(map(torch.equal, moved, plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_a_called_norm_tells_its_weight(dtype: torch.dtype, eps: float | None) -> None:
    norm = nn.RMSNorm(128, eps=eps, dtype=dtype)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    found = norm_weight(norm, torch.zeros(1, dtype=dtype))
    torch.testing.assert_close(found, norm.weight, rtol=torch.finfo(dtype).eps, atol=0)
    if dtype != torch.float32:
        assert torch.equal(found, norm.weight)


def test_rotations_are_those_of_the_model(make_request: Any) -> None:
    """Diffusers rotates halves of the first 96 channels; so does the producer."""
    from diffusers.models.transformers.transformer_minimax_h3 import (
        MiniMaxH3RotaryPosEmbed,
        _apply_rotary_emb,
    )

    request = make_request("ref2va", (5, 4, 12))
    layout = derive_layout(forward_arguments((), request.inputs(0.4)))
    cos, sin = MiniMaxH3RotaryPosEmbed()(request.structure["position_ids"])
    rows = torch.randn(1, layout.tokens, 3, 128).bfloat16()
    freqs = Int8State().rotations(cos, sin, layout, torch.float32, 0)
    assert freqs.shape == (layout.tokens, 1, 48, 2, 2) and freqs.dtype == torch.float32
    ones = torch.ones(128)
    got = norm_rope(layout.pack(rows)[0], ones, freqs[:, 0], 1e-5)
    normed = torch.nn.functional.rms_norm(rows.float(), (128,), eps=1e-5).bfloat16().float()
    wanted = layout.pack(_apply_rotary_emb(normed, cos, sin))[0].bfloat16()
    # The same products; a fused multiply-add may round the sum the other way.
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-6)
    assert (got == wanted).float().mean() > 0.99
    # The model rounds cos and sin to its type, and so do we.
    rounded = Int8State().rotations(cos, sin, layout, torch.bfloat16, 0)
    assert torch.equal(rounded, freqs.bfloat16().float())


def test_rotations_are_made_once_and_never_stale(make_request: Any) -> None:
    layout = derive_layout(forward_arguments((), make_request().inputs(0.4)))
    cos, sin = torch.rand(2, layout.tokens, 96).unbind()
    state = Int8State()

    def made(*pair: Tensor, where: Any = layout, dtype: Any = torch.float32, forward: int = 0):
        return state.rotations(*pair, where, dtype, forward)

    first = made(cos, sin)
    assert made(cos, sin) is first and made(cos, sin, forward=1) is first
    sin.add_(1.0)
    second = made(cos, sin)
    assert second is not first and torch.equal(
        second[:, 0, :, 1, 0], layout.pack(sin[None])[0, :, 48:]
    )
    assert made(cos.clone(), sin) is not second
    second = made(cos, sin)
    assert made(cos, sin, dtype=torch.bfloat16) is not second
    second = made(cos, sin)
    assert made(cos, sin, where=dataclasses.replace(layout)) is not second
    with torch.inference_mode():
        cos, sin = cos.clone(), sin.clone()
        second = made(cos, sin)
        assert made(cos, sin) is second
        assert made(cos, sin, forward=1) is not second


def test_the_layers_of_a_forward_share_their_rotations(
    transformer: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    inner = Int8State.rotations

    def kept(state: Int8State, *arguments: Any) -> Tensor:
        found.append(inner(state, *arguments))
        return found[-1]

    monkeypatch.setattr(Int8State, "rotations", kept)
    request = make_request()
    for mode in (torch.no_grad, torch.inference_mode):
        found.clear()
        with (
            install_h3_sol_attn(transformer, num_denoise_steps=2, **SPARSE, **WAYS["streamed"]),
            mode(),
        ):
            for time in (0.0, 0.5):
                transformer(**request.inputs(time))
        assert len(found) == 8
        assert all(item is found[0] for item in found[:4])
        assert all(item is found[4] for item in found[4:]) and found[4] is not found[0]


# ----------------------------------------------------------------------------------- life cycle


@ways
def test_leaving_gives_the_dense_bits_back(
    transformer: Any, make_request: Any, denoise: Any, way: dict[str, Any]
) -> None:
    request = make_request()
    plain = denoise(transformer, request, 2)
    with install_h3_sol_attn(transformer, num_denoise_steps=2, warmup_ratio=1.0, **way) as plugin:
        assert torch.equal(denoise(transformer, request, 2), plain)
        assert plugin.summary()["processor_calls"] == {"dense:warmup": 8}
    with install_h3_sol_attn(transformer, num_denoise_steps=2, **SPARSE, **way):
        assert not torch.equal(denoise(transformer, request, 2), plain)
    assert torch.equal(denoise(transformer, request, 2), plain)


@ways
def test_prewarm_touches_no_counter(transformer: Any, way: dict[str, Any]) -> None:
    with install_h3_sol_attn(transformer, **way) as plugin:
        done = plugin.prewarm((4, 4, 8), context_tokens=20)
        assert done["implementations"] == {"qkv_producer": "eager", "sol_int8": "eager"}
        summary = plugin.summary()
        assert summary["processor_calls"] == {} and summary["int8"]["calibrated_layers"] == 0


def assert_untouched(transformer: Any) -> None:
    assert not transformer._forward_pre_hooks
    names = {type(block.attn.get_processor()).__name__ for block in transformer.transformer_blocks}
    assert names == {"MiniMaxH3AttnProcessor"}


@pytest.mark.parametrize(
    ("name", "value", "way", "words"),
    [
        ("head_dim", 64, "direct", r"precision: 'int8' needs head_dim 128, .*\.2\.attn has 64"),
        ("norm_q", nn.Identity(), "streamed", r"chunk_tokens: expected RMSNorms .* got Identity"),
        ("norm_k", nn.RMSNorm(128, eps=1e-3), "streamed", "chunk_tokens: expected RMSNorms of one"),
        ("norm_q", nn.RMSNorm(128).double(), "direct", "precision: .* is in float64"),
    ],
)
def test_a_model_that_int8_cannot_serve_is_refused_before_anything_changes(
    name: str, value: Any, way: str, words: str
) -> None:
    transformer = build_tiny_h3_transformer(layers=3)
    setattr(transformer.transformer_blocks[2].attn, name, value)
    with pytest.raises(ValueError, match=words):
        install_h3_sol_attn(transformer, **WAYS[way]).apply()
    assert_untouched(transformer)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"precision": "fp4"}, "precision: expected one of native, fp8, int8; got 'fp4'"),
    ({"precision": None}, "precision: expected one of"),
    ({"chunk_tokens": 256}, "chunk_tokens: 256 needs precision='int8', got 'native'"),
    ({"int8_token_aug": 64}, "int8_token_aug: 64 needs precision='int8'"),
    (
        {"precision": "int8", "int8_token_aug": 100},
        "int8_token_aug: expected None or one of 0, 64, .* 100",
    ),
    ({"precision": "int8", "int8_token_aug": False}, "int8_token_aug: expected None or .* False"),
    ({"int8_rotate": True}, "int8_rotate: True needs precision='int8'"),
    ({"int8_balance": False}, "int8_balance: False needs precision='int8'"),
    (
        {"precision": "int8", "chunk_tokens": 100},
        "chunk_tokens: expected .* multiple of 64, got 100",
    ),
    ({"precision": "int8", "chunk_tokens": 0}, "chunk_tokens: expected"),
    ({"precision": "int8", "chunk_tokens": -64}, "chunk_tokens: expected"),
    ({"precision": "int8", "chunk_tokens": 64.0}, "chunk_tokens: expected"),
    ({"precision": "int8", "chunk_tokens": True}, "chunk_tokens: expected"),
    ({"precision": "int8", "impl": "quick"}, "impl: 'quick' does not serve precision='int8'"),
    *(
        ({"precision": "int8", **options}, f"precision: 'int8' cannot be combined with {name}=")
        for name, options in {
            "sol_thresh_type": {"sol_thresh_type": "exact"},
            "sol_kv_splits": {"sol_kv_splits": 2},
            "sol_force_local_blocks": {"sol_force_local_blocks": False},
            "sol_exact_block_radius": {"sol_exact_block_radius": 2, "sol_route_topk_ratio": 0.1},
            "sol_video_tail_mode": {"sol_video_tail_mode": "pad", "sol_route_topk_ratio": 0.1},
            "sol_tail_granularity": {"sol_tail_granularity": "block8x8"},
            "sol_route_topk_cutoff_mode": {"sol_route_topk_cutoff_mode": "gaussian_moments"},
            "sol_route_global_weighted_mean": {
                "sol_route_global_weighted_mean": True,
                "sol_route_topk_ratio": 0.1,
            },
            "sol_landmark_preprocess": {
                "sol_landmark_preprocess": True,
                "sol_landmark_preprocess_version": "v2",
            },
        }.items()
    ),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        install_h3_sol_attn(object(), **options)


def test_switches_are_bools() -> None:
    for name in ("int8_rotate", "int8_balance"):
        with pytest.raises(TypeError, match=f"{name}: expected a bool, got 1"):
            install_h3_sol_attn(object(), precision="int8", **{name: 1})


def test_spark_says_what_int8_does_not_do() -> None:
    with pytest.raises(
        ValueError, match="precision: 'int8' cannot be combined with sol_landmark_preprocess=True"
    ):
        install_h3_spark_attn(object(), precision="int8")


def test_the_tail_is_resolved_and_the_config_can_be_replaced() -> None:
    config = install_h3_sol_attn(object(), **WAYS["streamed"]).config
    assert config.sol_tail_granularity == "block"
    assert dataclasses.replace(config, sol_tau=2.0).chunk_tokens == 256
    assert install_h3_sol_attn(object()).config.sol_tail_granularity == "query"


# -------------------------------------------------------------------------------------------- FP8


@pytest.mark.parametrize("preset", ["sol", "spark"])
def test_fp8_rounds_the_sparse_rows_alone(make_request: Any, preset: str) -> None:
    transformer = build_tiny_h3_transformer(layers=2)
    packed = make_request("fl2va", GRID)
    install = install_h3_sol_attn if preset == "sol" else install_h3_spark_attn
    options: dict[str, Any] = {"num_denoise_steps": 1, "min_tokens": 0, **SPARSE}

    def forward(**more: Any) -> tuple[Tensor, dict[str, Any]]:
        with install(transformer, **options, **more) as plugin, torch.no_grad():
            out = transformer(**packed.inputs(0.4))
            return out[0] if isinstance(out, tuple) else out.sample, plugin.summary()

    native, _ = forward()
    fp8, summary = forward(precision="fp8")
    again, _ = forward(precision="fp8")
    assert summary["precision"] == "fp8" and summary["int8"] is None
    assert summary["sol_backend"] == "eager"
    assert fp8.equal(again)
    assert 1e-5 < relative(fp8, native) < 0.05
    exact, _ = forward(sol_route_topk_ratio=1.0)
    with torch.no_grad():
        dense = transformer(**packed.inputs(0.4))
    dense = dense[0] if isinstance(dense, tuple) else dense.sample
    rounded, _ = forward(sol_route_topk_ratio=1.0, precision="fp8")
    assert relative(exact, dense) < 1e-5 < relative(rounded, dense) < 0.05
