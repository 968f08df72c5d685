"""Every implementation of merging against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

from solspark import block_sparse_attention, merge, plan_from_mask
from solspark.methods.sol import mean_summaries
from solspark.ops.pool import pool
from solspark.reference.merge import merge as reference
from solspark.testing import assert_close_to_oracle, make_qkv, random_mask

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_close_to_the_oracle(dtype: torch.dtype) -> None:
    outs = [torch.randn(2, 71, 3, 64).to(dtype) for _ in range(2)]
    lses = [torch.randn(2, 71, 3) * 10 for _ in range(2)]
    lses[0][0, :5], lses[1][1, 3:7], lses[1][0, 2:9] = -math.inf, -math.inf, -math.inf
    outs[0][0, :5] = math.nan
    out, lse = merge(outs[0], lses[0], outs[1], lses[1])
    assert out.dtype == dtype and lse.dtype == torch.float32
    doubles = [item.double() for item in (outs[0], lses[0], outs[1], lses[1])]
    oracle = reference(*doubles)
    peer = reference(outs[0], lses[0], outs[1], lses[1])
    assert_close_to_oracle(out, oracle[0], peer[0])
    assert_close_to_oracle(lse, oracle[1], peer[1], name="lse")


@pytest.mark.parametrize("tail", ["query", "block", "block8x8", "none"])
def test_parts_of_the_keys_merge_to_the_whole_call(tail: str) -> None:
    """As in a ring of devices: each has some of the keys, in exact blocks and in summaries."""
    query, key, value = make_qkv(2, 331, 3, 64, dtype=torch.float64)
    mask = random_mask(2, 3, 331, 331)

    def attend(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = key[:, first * 64 : last * 64], value[:, first * 64 : last * 64]
        plan = plan_from_mask(mask[..., first:last], query_tokens=331, key_tokens=k.shape[1])
        summaries = mean_summaries(pool(None, k, v, block=8 if tail == "block8x8" else 64))
        found = block_sparse_attention(
            query, k, v, plan, summaries=summaries, tail=tail, return_lse=True
        )
        assert isinstance(found, tuple)
        return found

    merged = merge(*merge(*attend(0, 2), *attend(2, 3)), *attend(3, 6))
    torch.testing.assert_close(merged, attend(0, 6))


def test_bad_arguments_are_named() -> None:
    out, lse = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"lse_b: expected \(1, 2, 3\), got \(1, 3, 2\)"):
        merge(out, lse, out, lse.transpose(1, 2))
    with pytest.raises(ValueError, match=r"out_b: expected the shape of out_a"):
        merge(out, lse, out[:, :1], lse)
    with pytest.raises(TypeError, match=r"lse_a: expected torch.float32 or torch.float64, got"):
        merge(out, lse.half(), out, lse)
