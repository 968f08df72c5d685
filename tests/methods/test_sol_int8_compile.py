"""torch.compile takes the direct INT8 call whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from solspark.int8 import sol_attn
from solspark.ops.sol_int8 import whole_call
from solspark.testing import make_qkv


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own tracing
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 0.5},
        {"topk_ratio": 0.3, "sink_blocks": [0, 2], "sink_q": [1, 2], "token_aug": 64},
        {"tail": False, "sink_blocks": [3, 6], "key_bias": torch.arange(331) < 300},
        {"block_len": torch.full((6,), 50, dtype=torch.int32), "rotate": True, "balance": True},
    ],
    ids=str,
)
def test_one_graph_with_the_same_result(options: dict):
    tensors = make_qkv(1, 331, 2, 128, layout="fused", dtype=torch.bfloat16)
    compiled = torch.compile(
        lambda *inputs: sol_attn(*inputs, **options), fullgraph=True, backend="eager"
    )
    out = compiled(*tensors)
    assert torch.equal(out, sol_attn(*tensors, **options)) and out.is_contiguous()


def test_a_new_tau_or_length_costs_one_more_graph_at_most():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v, tau: sol_attn(q, k, v, tau), fullgraph=True, backend=counter
    )
    for step, tokens in enumerate((131, 262, 331, 400)):
        compiled(*make_qkv(1, tokens, 2, 128), 1.0 + 0.1 * step)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("layout", ["contiguous", "heads_first"])
def test_the_operator_is_what_its_fake_says(layout: str):
    tensors = make_qkv(1, 130, 2, 128, layout=layout)
    tau = torch.tensor(1.0, dtype=torch.float64)
    switches = (False, False)
    options = (0.1, [0, 1], [0, 0], None, 0.0, True, None, None, 0, *switches, None)
    arguments = (*tensors, tau, *options)
    torch.library.opcheck(whole_call, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_refusal_comes_while_tracing():
    tensors = make_qkv(1, 130, 2, 64)
    with pytest.raises(Exception, match="head_dim must be 128"):
        torch.compile(sol_attn, fullgraph=True, backend="eager")(*tensors)
