"""Long sequences: sampled rows against a float64 oracle, and the memory that a call takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from solspark import mask_from_plan, sol_attn
from solspark.ops.pool import pool
from solspark.plan.select import plan_sol
from solspark.testing import PeakMemory, assert_close_to_oracle, make_qkv


def sampled_rows(
    tensors: tuple[Tensor, Tensor, Tensor], rows: Tensor, dtype: torch.dtype, **options: float
) -> Tensor:
    """Attend the sampled rows of one head the long way, under the plan of the same options."""
    query, key, value = tensors
    plan = plan_sol(query, key, **options)
    pooled = pool(query, key, value)
    assert pooled.value_means is not None
    exact = mask_from_plan(plan)[0, 0, rows // 64]
    key_block = torch.arange(key.shape[1]) // 64
    q, k, v = (item[0, :, 0].to(dtype) for item in tensors)
    scale = query.shape[3] ** -0.5
    logits = scale * q[rows] @ k.T
    logits = logits.masked_fill(~exact[:, key_block], -torch.inf)
    tail = scale * q[rows] @ pooled.key_means[0, 0].to(dtype).T + pooled.log_mass[0, 0].to(dtype)
    tail = tail.masked_fill(exact, -torch.inf)
    weights = torch.cat([logits, tail], -1).softmax(-1)
    return weights @ torch.cat([v, pooled.value_means[0, 0].to(dtype)])


@pytest.mark.parametrize(("tokens", "dtype"), [(32_773, torch.float16), (100_003, torch.bfloat16)])
def test_sampled_rows_of_a_long_call(tokens: int, dtype: torch.dtype) -> None:
    """Values with an offset of 200, whose sums would leave float16 if they were taken in it."""
    query, key, value = make_qkv(1, tokens, 1, 64, dtype=dtype)
    value = value + torch.where(torch.arange(64) % 2 == 0, 200.0, -200.0).to(dtype)
    tensors = (query, key, value)
    top_k = max(1, round(0.01 * -(-tokens // 64)))
    out = sol_attn(*tensors, topk_ratio=0.01)
    assert out.isfinite().all()
    rows = torch.cat([torch.randint(0, tokens, (62,)), torch.tensor([0, tokens - 1])])
    oracle = sampled_rows(tensors, rows, torch.float64, top_k=top_k)
    peer = sampled_rows(tensors, rows, torch.float32, top_k=top_k).to(dtype)
    assert_close_to_oracle(out[0, rows, 0], oracle, peer)


def test_work_space_is_a_few_heads_at_a_time() -> None:
    """Besides the output: means, plan, and some heads in float32, under half a head's logits."""
    tensors = make_qkv(1, 16_384, 16, 64)
    # Libraries load their code at first use; that is no work space.
    sol_attn(*(tensor[:, :1024] for tensor in tensors), topk_ratio=0.02)
    with PeakMemory() as peak:
        out = sol_attn(*tensors, topk_ratio=0.02)
    if peak.bytes is None:
        pytest.skip("this system does not tell a process its peak memory")
    logits_of_a_head = 16_384**2 * 4
    assert peak.bytes - out.numel() * 4 < logits_of_a_head / 2
