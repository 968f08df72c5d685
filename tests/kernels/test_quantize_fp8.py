"""FP8 operands in the interpreter, bit for bit the reference's, and compiled ahead of time.

The interpreter rounds to e4m3 wrongly (a carry is lost), so it is given numbers that need no
rounding: scales, layouts and padding are tested here, the rounding itself on a device.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from solspark.methods.sol import mean_summaries
from solspark.reference.pool import pool
from solspark.reference.quantize_fp8 import fp8_attention_inputs, power_of_two_scale, tile_order
from solspark.testing import make_qkv, nan_filled_allocations
from solspark.types import BlockSummaries, block_count

pytest.importorskip("triton")

from solspark.kernels.quantize_fp8 import launch_quantize_fp8


def test_in_the_interpreter(interpret):
    interpret(__file__)


def untiled(tiles: Tensor) -> Tensor:
    """Return tiles [..., N, D, 64] as rows [..., 64 N, D] in the order of the keys."""
    rows = tiles.float().transpose(-1, -2)
    inverse = torch.argsort(tile_order())
    return rows[..., inverse, :].flatten(-3, -2)


def check(tensors: tuple[Tensor, Tensor, Tensor], summaries: BlockSummaries | None) -> None:
    query, key, value, summaries = fp8_attention_inputs(*tensors, summaries)
    tensors = (query, key, value)
    with nan_filled_allocations():
        found = launch_quantize_fp8(*tensors, summaries)
    expected = fp8_attention_inputs(*tensors, summaries)
    scales = found.query_scale.repeat_interleave(64, 2)[..., None]
    pairs = [
        (found.query.float() * scales, expected[0]),
        (found.key.float() * found.key_scale[..., None, None], expected[1]),
        (untiled(found.value) * found.value_scale[:, :, None], expected[2]),
    ]
    for rows, rounded in pairs:
        tokens = rounded.shape[1]
        assert rows.shape[2] == 64 * block_count(tokens)
        assert rows[:, :, :tokens].transpose(1, 2).equal(rounded.float())
        assert not rows[:, :, tokens:].any()
    rounded = expected[3]
    if summaries is None or rounded is None:
        assert found.summary_keys is None and found.summary_values is None
        return
    assert found.summary_keys is not None and found.summary_values is not None
    group = query.shape[2] // key.shape[2]
    key_scale = found.key_scale.repeat_interleave(group, 1)[:, None, :, None, None]
    value_scale = found.value_scale.repeat_interleave(group, 1)[:, None, :, None]
    count = summaries.keys.shape[3]
    keys = found.summary_keys.float() * key_scale
    values = untiled(found.summary_values) * value_scale
    assert keys[:, :, :, :count].equal(rounded.keys.float())
    assert values[:, :, :, :count].equal(rounded.values.float())
    assert not keys[:, :, :, count:].any() and not values[:, :, :, count:].any()


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["contiguous", "fused", "heads_first"])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (130, 128), (1500, 64)])
def test_equals_the_reference(tokens: int, dim: int, layout: str):
    query, key, value = make_qkv(2, tokens, 2, dim, dtype=torch.float16, layout=layout)
    pooled = pool(None, key, value)
    check((query, key, value), mean_summaries(pooled))


@pytest.mark.interpreted
def test_heads_that_share_keys_and_several_parents():
    query, key, value = make_qkv(2, 200, 6, 64, key_heads=3, dtype=torch.float16)
    key = key * torch.tensor([1.0, 8.0, 0.1])[:, None].half()
    check((query, key, value), None)
    means = key.repeat_interleave(2, 2)[:, :128].view(2, 2, 64, 6, 64)[:, :, :4].transpose(2, 3)
    rows = torch.zeros(4, dtype=torch.int32)
    summaries = BlockSummaries(means, means * 0.5, torch.zeros(means.shape[:4]), rows)
    value = value + 100.0
    check((query, key, value), summaries)


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [0.0, 2.0**-24, 448.0, 449.0, 60_000.0])
def test_sizes_at_the_edges_of_a_scale(size: float):
    query, key, value = make_qkv(1, 70, 1, 64, dtype=torch.float16)
    tensors = [torch.clamp(x, -1, 1) * size for x in (query, key, value)]
    for x in tensors:
        x[0, 0] = size
    check((tensors[0], tensors[1], tensors[2]), None)


def test_scales_are_the_least_powers_of_two():
    sizes = torch.cat([torch.logspace(-20, 20, 201), torch.tensor([448.0, 224.0, 449.0, 1e-38])])
    scales = power_of_two_scale(sizes)
    assert scales.log2().frac().abs().max() == 0
    inside = (scales > 2.0**-100) & (scales < 2.0**100)
    assert inside.sum() > 190
    assert (sizes / scales <= 448.0).all() and (sizes / scales > 224.0)[inside].all()


def test_compiles(record_launches, compile_launch):
    """For the targets that have e4m3."""
    query, key, value = make_qkv(1, 200, 2, 128, dtype=torch.bfloat16)
    summaries = mean_summaries(pool(None, key, value))
    launches = record_launches(lambda: launch_quantize_fp8(query, key, value, summaries))
    assert len(launches) == 6
    for launch in launches:
        compiled = compile_launch(launch, "sm_90")
        # Whole 16-byte vectors both ways: a pass over memory is all that these kernels are.
        assert "ld.global.v4.b32" in compiled.asm["ptx"]
        if launch.kernel.__name__ != "ranges_kernel":
            assert "st.global.v4.b32" in compiled.asm["ptx"]
