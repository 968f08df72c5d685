"""Every implementation of merging against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.ops.merge import merge
from solspark.reference.merge import merge as reference
from solspark.testing import assert_close_to_oracle

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


def test_bad_arguments_are_named() -> None:
    out, lse = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"lse_b: expected \(1, 2, 3\), got \(1, 3, 2\)"):
        merge(out, lse, out, lse.transpose(1, 2))
    with pytest.raises(ValueError, match=r"out_b: expected the shape of out_a"):
        merge(out, lse, out[:, :1], lse)
    with pytest.raises(TypeError, match=r"lse_a: expected torch.float32 or torch.float64, got"):
        merge(out, lse.half(), out, lse)
