"""Agree with comfy-kitchen's own eager Sol-Attn, where that package is installed."""

from __future__ import annotations

import importlib
import random
import warnings

import pytest
import torch

from solspark.int8 import sol_attn
from solspark.reference.sol_int8 import sol_int8


@pytest.fixture(scope="module")
def peer():
    """Return the package's torch implementation."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen 0.2.40 is not installed")
    with warnings.catch_warnings():
        # What another package warns of at its import is not ours to fail on.
        warnings.simplefilter("ignore")
        module = importlib.import_module("comfy_kitchen.backends.eager.sol_attn")
    return module.sol_attn


def configuration(seed: int) -> tuple[tuple[torch.Tensor, ...], dict]:
    """Return inputs and options drawn from a seed, options in the names of the public call."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, heads = draw.choice((1, 2)), draw.choice((1, 3))
    tokens = draw.choice((40, 64, 129, 320, 513, 700, 1024))
    blocks = -(-tokens // 64)
    dtype = draw.choice((torch.float32, torch.bfloat16))

    def normal(amplitude: float) -> torch.Tensor:
        shape = (batch, tokens, heads, 128)
        return (torch.randn(shape, generator=generator) * amplitude).to(dtype)

    qkv = normal(0.5), normal(0.5) + torch.randn(128, generator=generator).to(dtype), normal(1.0)
    options: dict = {"tau": draw.choice((-1e9, 0.5, 1.0, 1.4, 2.0, 6.0))}
    if draw.random() < 0.4:
        options["topk_ratio"] = draw.choice((0.1, 0.2, 0.5, 0.9))
    if draw.random() < 0.3:
        options["tail"] = False
    if draw.random() < 0.3:
        options["scale"] = draw.choice((0.05, 0.2))
    if draw.random() < 0.5:
        first = draw.randrange(blocks)
        options["sink_blocks"] = [first, first + draw.choice((0, 1, 2, 99))]
    if draw.random() < 0.5:
        first = draw.randrange(blocks)
        options["sink_q"] = [first, first + 1]
    if draw.random() < 0.4:
        options["block_len"] = torch.randint(
            -2, 80, (blocks,), generator=generator, dtype=torch.int32
        )
    if draw.random() < 0.3:
        options["coarse_gate"] = normal(1.0)
    if draw.random() < 0.4:
        bias = torch.randn(batch, tokens, generator=generator)
        options["key_bias"] = bias if draw.random() < 0.5 else bias > -0.5
        options["sink_blocks"] = [0, blocks]
    return qkv, options


def live(options: dict, tokens: int) -> torch.Tensor:
    """Return the rows whose output is specified."""
    lengths = options.get("block_len", torch.full((-(-tokens // 64),), 64)).clamp(1, 64)
    return (torch.arange(64) < lengths[:, None]).flatten()[:tokens]


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("seed", range(30))
def test_same_result_as_the_peer(peer, seed: int):
    qkv, options = configuration(seed)
    tokens = qkv[0].shape[1]
    wanted = peer(*qkv, **options)[:, live(options, tokens)]
    named = dict(options)
    bias = named.pop("key_bias", None)
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape).masked_fill(~bias, float("-inf"))
    float_result = sol_int8(
        *qkv,
        sinks=tuple(named.pop("sink_blocks", (0, 0))),
        dense_rows=tuple(named.pop("sink_q", (0, 0))),
        key_bias=bias,
        **named,
    )[:, live(options, tokens)]
    eps = torch.finfo(qkv[0].dtype).eps
    # Both round once; sums of at most 1,024 terms in float32 come on top.
    assert relative(float_result, wanted) <= 2 * eps + 64 * torch.finfo(torch.float32).eps

    # INT8 may route a block differently that stands at the threshold.
    served = sol_attn(*qkv, **options)[:, live(options, tokens)]
    cosine = torch.nn.functional.cosine_similarity(
        served.double().flatten(), wanted.double().flatten(), 0
    )
    assert cosine > (0.995 if "topk_ratio" in options else 0.998)
