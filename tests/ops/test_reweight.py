"""Every implementation of reweight and anchors against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from solspark.errors import UnsupportedError
from solspark.ops import anchors as anchors_module
from solspark.ops import reweight as reweight_module
from solspark.ops.anchors import anchors
from solspark.ops.reweight import reweight
from solspark.reference.anchors import anchors as anchors_reference
from solspark.reference.reweight import reweight as reference
from solspark.testing import (
    LAYOUTS,
    assert_close_to_oracle,
    make_qkv,
    nan_filled_allocations,
)

COMPONENTS = ("full", "weights_only", "bias_only", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def check(result, anchor, key, value, **options):
    oracle = reference(anchor.double(), key.double(), value.double(), **options)
    peer = reference(anchor, key, value, **options)
    # The log mass is a small difference of sums over the channels: their terms' size judges it.
    terms = (anchor.double().abs(), oracle[0].abs())
    shift = torch.einsum("bphd,bphnd->bphn", *terms) / key.shape[-1] ** 0.5
    shifts = (0.0, 0.0, shift)
    for name, actual, wanted, same, offset in zip(
        ("keys", "values", "log_mass"), result, oracle, peer, shifts, strict=True
    ):
        assert actual.dtype == same.dtype, name
        judged = actual if name != "log_mass" else (actual.double() + offset).float()
        assert_close_to_oracle(judged, wanted + offset, same.double() + offset, name=name)


def make(dtype, parents, tokens=137, heads=3, dim=64, wide=False, seed=0, device="cpu", amp=1.0):
    _, key, value = make_qkv(2, tokens, heads, dim, dtype=dtype, seed=seed, amplitude=amp)
    more, _, _ = make_qkv(2, 2 * parents, heads, dim, dtype=dtype, seed=seed + 1)
    anchor = more.float()[:, ::2] if wide else more[:, ::2]
    return tuple(x.to(device) for x in (anchor, key, value))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parents", [1, 3, 19])
@pytest.mark.parametrize("wide", [False, True], ids=["same", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_close_to_the_oracle(dtype, wide, parents, device):
    anchor, key, value = make(dtype, parents, wide=wide, device=device)
    for components in COMPONENTS:
        for logmass_key in ("stored", "pre_round"):
            for summary_math in ("tensorcore", "comfy_fp32"):
                options = {
                    "reweight_components": components,
                    "logmass_key": logmass_key,
                    "summary_math": summary_math,
                }
                check(reweight(anchor, key, value, **options), anchor, key, value, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_tokens", [8, 64])
@pytest.mark.parametrize("tokens", [1, 7, 8, 63, 64, 65, 128, 200])
def test_ragged_lengths(tokens, block_tokens, device):
    anchor, key, value = make(torch.float16, 2, tokens=tokens, device=device)
    with nan_filled_allocations():
        result = reweight(anchor, key, value, block_tokens=block_tokens)
    check(result, anchor, key, value, block_tokens=block_tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("components", COMPONENTS)
def test_large_and_zero_inputs_stay_finite(components, device):
    for dtype in (torch.float16, torch.bfloat16):
        anchor, key, value = make(dtype, 3, device=device)
        for a, k, v in (
            (anchor * 300, key * 300, value),
            (anchor * 0, key, value),
            (anchor, key * 0, value * 0),
        ):
            keys, values, mass = reweight(a, k, v, reweight_components=components)
            assert keys.isfinite().all() and values.isfinite().all() and mass.isfinite().all()
            if components not in ("full", "bias_only"):
                continue
            # A query equal to the anchor sees the block's whole mass through the stored key.
            seen = torch.einsum("bphd,bphnd->bphn", a.double(), keys.double()) / 8 + mass.double()
            scores = torch.einsum("bphd,bthd->bpht", a.double(), k.double()) / 8
            whole = torch.stack([part.logsumexp(-1) for part in scores.split(64, -1)], -1)
            terms = torch.einsum("bphd,bphnd->bphn", a.double().abs(), keys.double().abs()) / 8
            assert ((seen - whole).abs() <= 64 * torch.finfo(torch.float32).eps * (1 + terms)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout, device):
    def run(layout):
        anchor, key, value = (
            x.to(device) if layout == "contiguous" else x
            for x in make_qkv(2, 150, 3, 64, dtype=torch.float16, layout=layout)
        )
        return reweight(anchor[:, 3:9:2], key, value)

    if device == "cuda" and layout != "contiguous":
        pytest.skip("the factory makes these layouts on the CPU")
    with nan_filled_allocations():
        strided = run(layout)
    for one, other in zip(strided, run("contiguous"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("workspace", [1, 2**16, 2**20])
def test_chunks_are_as_close(monkeypatch, workspace):
    anchor, key, value = make(torch.float32, 19, heads=5)
    monkeypatch.setattr(reweight_module, "WORKSPACE_BYTES", workspace)
    check(reweight(anchor, key, value), anchor, key, value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parents", [2, 9])
def test_offset_values_do_not_overflow(parents, device):
    anchor, key, value = make(torch.float16, parents, tokens=1000, device=device)
    value = value + 200
    check(reweight(anchor, key, value), anchor, key, value)


def test_batch_entries_are_independent():
    anchor, key, value = make(torch.float32, 3)
    both = reweight(anchor, key, value)
    for sample in range(2):
        alone = reweight(*(x[sample : sample + 1] for x in (anchor, key, value)))
        for one, other in zip(both, alone, strict=True):
            assert torch.equal(one[sample : sample + 1], other)


def test_errors_name_the_argument():
    anchor, key, value = make(torch.float16, 3)
    cases = [
        ((anchor[:, :, :2], key, value), {}, r"anchors: expected \[2, P, 3, 64\]"),
        ((anchor[:, :0], key, value), {}, "anchors: expected"),
        ((anchor.bfloat16(), key, value), {}, r"anchors: expected torch.float16 or torch.float32"),
        ((anchor, key, value[:, 1:]), {}, "value: expected torch.float16"),
        ((anchor, key, value.float()), {}, "value: expected torch.float16"),
        ((anchor, key[:, :0], value[:, :0]), {}, "key: expected no empty dimension"),
        ((anchor, key.int(), value.int()), {}, "key: expected a floating-point"),
        ((anchor, key[0], value[0]), {}, r"key: expected a floating-point \[B, T, H, D\]"),
        ((anchor, key, value), {"summary_math": "fp8"}, "summary_math: expected one of"),
        ((anchor, key, value), {"logmass_key": "x"}, "logmass_key: expected one of"),
        ((anchor, key, value), {"reweight_components": "x"}, "reweight_components: expected"),
        ((anchor, key, value), {"block_tokens": 16}, "block_tokens: expected 8 or 64, got 16"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            reweight(*arguments, **options)


def test_triton_declines_on_the_cpu():
    anchor, key, value = make(torch.float16, 3)
    with pytest.raises(UnsupportedError, match="not on cpu"):
        reweight(anchor, key, value, impl="triton")
    with pytest.raises(UnsupportedError, match="not on cpu"):
        anchors(torch.zeros(1, 1, 1, 64), [(0, 64)], dtype=torch.float32, impl="triton")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 64 * 150)],
        [(0, 64 * 40), (64 * 40, 64 * 41), (64 * 41, 64 * 150)],
        [(64 * block, 64 * block + 64) for block in range(150)],
        [(64 * block, 64 * block + 64) for block in range(3, 9)],
    ],
    ids=["one", "three", "blocks", "some blocks"],
)
def test_anchors(ranges, dtype, device):
    means = torch.randn(2, 3, 150, 64, generator=torch.Generator().manual_seed(1)) + 0.5
    with nan_filled_allocations():
        result = anchors(means.to(device), ranges, dtype=dtype)
    oracle = anchors_reference(means.double(), ranges, dtype=torch.float64)
    peer = anchors_reference(means, ranges, dtype=dtype)
    assert_close_to_oracle(result, oracle, peer)
    if device == "cpu":
        assert torch.equal(result, peer)


@pytest.mark.parametrize(
    "ranges",
    [[], [(0, 0)], [(0, 65)], [(1, 65)], [(0, 64), (128, 192)], [(64, 128), (0, 64)], [(0, 256)]],
)
def test_anchor_ranges_are_checked(ranges):
    with pytest.raises(ValueError, match="ranges"):
        anchors(torch.zeros(1, 1, 3, 64), ranges, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_for_any_length(device):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(reweight, fullgraph=True, backend=counter)
    for tokens in (137, 200, 300, 500):
        anchor, key, value = make(torch.float32, 3, tokens=tokens, device=device)
        for one, other in zip(
            compiled(anchor, key, value), reweight(anchor, key, value), strict=True
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 2
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("block_tokens", [8, 64])
def test_operators_keep_their_promises(block_tokens):
    """Shapes, types and strides of the fakes are those of the results; nothing is mutated."""
    checks = ("test_schema", "test_faketensor")
    anchor, key, value = make(torch.bfloat16, 3, device="cuda")
    switches = ("tensorcore", "stored", "full", 0.1, block_tokens)
    torch.library.opcheck(
        reweight_module._operator, (anchor, key, value, *switches), test_utils=checks
    )
    means = torch.randn(2, 3, 9, 64, device="cuda")
    ranges = torch.tensor([[0, 4], [4, 9]], dtype=torch.int32, device="cuda")
    torch.library.opcheck(
        anchors_module._operator, (means, ranges, torch.bfloat16), test_utils=checks
    )


@pytest.mark.gpu
def test_strides_beyond_32_bits():
    """Rows 2^30 elements apart, as in long fused projections, give what their copies give."""
    buffer = torch.empty(2**31 + 2**20, device="cuda", dtype=torch.float16).normal_()
    rows = torch.as_strided(buffer, (1, 3, 2, 64), (0, 2**30, 64, 1))
    for one, other in zip(
        reweight(rows[:, :1], rows, rows),
        reweight(rows[:, :1].contiguous(), rows.contiguous(), rows.contiguous()),
        strict=True,
    ):
        assert torch.equal(one, other)
