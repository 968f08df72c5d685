"""The reference of anchors and reweighted summaries: its definition, and what follows from it."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.reference.anchors import anchors
from solspark.reference.reweight import reweight

COMPONENTS = ("full", "weights_only", "bias_only", "none")


def factory(tokens=137, parents=3, batch=2, heads=3, dim=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(length):
        return torch.randn(batch, length, heads, dim, generator=generator, dtype=torch.float64)

    return tuple(x.to(dtype) for x in (2 * normal(parents), normal(tokens), normal(tokens)))


def by_hand(anchor, keys, values, scale):
    """One anchor, one block, in plain Python floats."""
    scores = [scale * sum(a * k for a, k in zip(anchor, key, strict=True)) for key in keys]
    total = sum(math.exp(score) for score in scores)
    weights = [math.exp(score) / total for score in scores]
    mean = [sum(w * k[d] for w, k in zip(weights, keys, strict=True)) for d in range(len(anchor))]
    value = [
        sum(w * v[d] for w, v in zip(weights, values, strict=True)) for d in range(len(anchor))
    ]
    shift = scale * sum(a * m for a, m in zip(anchor, mean, strict=True))
    return mean, value, math.log(total) - shift


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 130])
def test_definition(tokens):
    a, k, v = factory(tokens, parents=2, batch=1, heads=2, dim=4)
    ak, av, lm = reweight(a, k, v)
    for parent in range(2):
        for head in range(2):
            for block in range(-(-tokens // 64)):
                here = slice(block * 64, min(block * 64 + 64, tokens))
                mean, value, mass = by_hand(
                    a[0, parent, head].tolist(),
                    k[0, here, head].tolist(),
                    v[0, here, head].tolist(),
                    0.5,
                )
                assert ak[0, parent, head, block].tolist() == pytest.approx(mean, abs=1e-12)
                assert av[0, parent, head, block].tolist() == pytest.approx(value, abs=1e-12)
                assert float(lm[0, parent, head, block]) == pytest.approx(mass, abs=1e-12)


def test_full_log_mass_is_the_entropy_of_the_weights():
    a, k, v = factory()
    _, _, lm = reweight(a, k, v)
    scores = torch.einsum("bphd,bthd->bpht", a, k) / 4.0
    for block in range(3):
        weights = scores[..., block * 64 : block * 64 + 64].softmax(-1)
        entropy = -(weights * weights.log()).sum(-1)
        torch.testing.assert_close(lm[..., block], entropy, atol=1e-12, rtol=0)
    lengths = torch.tensor([64.0, 64.0, 9.0], dtype=torch.float64)
    assert (lm >= 0).all() and (lm <= lengths.log()).all()


def log_mass_of_block(q, k):
    return torch.logsumexp(q @ k.T / math.sqrt(q.shape[-1]), -1)


def test_summary_is_the_tangent_at_the_anchor():
    a, k, v = factory(tokens=64, parents=1, batch=1, heads=1)
    ak, av, lm = reweight(a, k, v)
    key, value, anchor = k[0, :, 0], v[0, :, 0], a[0, 0, 0].clone().requires_grad_()
    true = log_mass_of_block(anchor, key)
    (gradient,) = torch.autograd.grad(true, anchor)
    tangent = anchor @ ak[0, 0, 0, 0] / 4.0 + lm[0, 0, 0, 0]
    torch.testing.assert_close(tangent, true, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, ak[0, 0, 0, 0] / 4.0, atol=1e-12, rtol=0)
    exact = torch.softmax(anchor.detach() @ key.T / 4.0, -1) @ value
    torch.testing.assert_close(av[0, 0, 0, 0], exact, atol=1e-12, rtol=0)

    queries = torch.randn(500, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    estimate = queries @ ak[0, 0, 0, 0] / 4.0 + lm[0, 0, 0, 0]
    gap = log_mass_of_block(queries, key) - estimate
    assert (gap >= -1e-12).all()
    assert gap.max() > 0.1  # away from the anchor the tangent does lie below


def test_tangent_error_is_second_order():
    a, k, v = factory(tokens=64, parents=1, batch=1, heads=1)
    ak, _, lm = reweight(a, k, v)
    key, anchor = k[0, :, 0], a[0, 0, 0]
    step = torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = torch.softmax(anchor @ key.T / 4.0, -1)
    centred = key - weights @ key
    covariance = centred.T @ (weights[:, None] * centred)
    predicted = 0.5 / 16.0 * step @ covariance @ step
    for size in (1e-3, 1e-4):
        q = anchor + size * step
        gap = log_mass_of_block(q, key) - (q @ ak[0, 0, 0, 0] / 4.0 + lm[0, 0, 0, 0])
        assert float(gap / size**2) == pytest.approx(float(predicted), rel=30 * size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_components_share_means_bitwise(dtype):
    a, k, v = factory(dtype=dtype)
    out = {name: reweight(a, k, v, reweight_components=name) for name in COMPONENTS}
    for one, other in (("full", "weights_only"), ("bias_only", "none")):
        assert torch.equal(out[one][0], out[other][0])
        assert torch.equal(out[one][1], out[other][1])
    assert not torch.equal(out["full"][0], out["none"][0])
    lengths = torch.tensor([64.0, 64.0, 9.0]).log()
    for name in ("weights_only", "none"):
        torch.testing.assert_close(out[name][2], lengths.expand(2, 3, 3, 3), atol=1e-6, rtol=0)


def test_bias_only_shifts_by_its_own_mean_key():
    a, k, v = factory()
    ak, _, lm = reweight(a, k, v, reweight_components="bias_only")
    total = torch.logsumexp(torch.einsum("bphd,bthd->bpht", a, k[:, :64]) / 4.0, -1)
    mean = k[:, :64].mean(1)
    expected = total - torch.einsum("bphd,bhd->bph", a, mean) / 4.0
    torch.testing.assert_close(lm[..., 0], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(ak[:, 0, :, 0], mean, atol=1e-12, rtol=0)


def test_log_mass_key_moves_only_the_log_mass():
    a, k, v = factory(dtype=torch.float16)
    stored, rounded = reweight(a, k, v), reweight(a, k, v, logmass_key="pre_round")
    assert torch.equal(stored[0], rounded[0]) and torch.equal(stored[1], rounded[1])
    assert not torch.equal(stored[2], rounded[2])
    # A query equal to the anchor sees the true log mass through the stored key, by construction.
    true = torch.logsumexp(
        torch.einsum("bphd,bthd->bpht", a.double(), k[:, :64].double()) / 4.0, -1
    )
    for result, close in ((stored, True), (rounded, False)):
        seen = torch.einsum("bphd,bphd->bph", a.double(), result[0][..., 0, :].double()) / 4.0
        error = (seen + result[2][..., 0].double() - true).abs().max()
        assert (error < 2e-6) == close


def test_summary_math_rounds_the_weights_or_not():
    a, k, v = factory(dtype=torch.float16)
    exact = reweight(a.double(), k.double(), v.double())
    error = {}
    for math_name in ("tensorcore", "comfy_fp32"):
        ak, _, lm = reweight(a, k, v, summary_math=math_name, logmass_key="pre_round")
        error[math_name] = (ak.double() - exact[0]).abs().mean()
        torch.testing.assert_close(lm.double(), exact[2], atol=2e-3, rtol=0)
    assert error["comfy_fp32"] < error["tensorcore"]


def test_eight_token_blocks():
    a, k, v = factory(tokens=21)
    ak, av, lm = reweight(a, k, v, block_tokens=8)
    assert ak.shape == (2, 3, 3, 3, 16) and lm.shape == (2, 3, 3, 3)
    last = reweight(a, k[:, 16:], v[:, 16:])
    for whole, part in zip((ak, av, lm), last, strict=True):
        torch.testing.assert_close(whole[:, :, :, 2], part[:, :, :, 0], atol=1e-13, rtol=0)


def test_extreme_inputs_stay_finite():
    a, k, v = factory(dtype=torch.float16)
    for result in (
        reweight(a * 500, k * 500, v),
        reweight(a * 0, k, v),
        reweight(a, k * 0, v * 0),
    ):
        assert all(torch.isfinite(x).all() for x in result)
    ak, _, lm = reweight(a * 0, k, v)
    plain = reweight(a, k, v, reweight_components="none")
    assert torch.equal(ak, plain[0])
    torch.testing.assert_close(lm, plain[2], atol=1e-6, rtol=0)


def test_anchors_are_sequential_sums_of_block_sums():
    query = torch.randn(2, 5, 64, 3, 16, generator=torch.Generator().manual_seed(3))
    means = query.mean(2).transpose(1, 2)
    ranges = [(0, 192), (192, 256), (256, 320)]
    out = anchors(means, ranges, dtype=torch.float32)
    for number, (start, stop) in enumerate(ranges):
        expected = query.flatten(1, 2)[:, start:stop].double().mean(1)
        torch.testing.assert_close(out[:, number].double(), expected, atol=1e-6, rtol=0)
    sums = query.sum(2)
    assert torch.equal(out[:, 0], ((sums[:, 0] + sums[:, 1]) + sums[:, 2]) / 192)
    assert torch.equal(out[:, 1], means[:, :, 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_anchor_dtype(dtype):
    means = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(4))
    stored = anchors(means, [(0, 192)], dtype=dtype)
    wide = anchors(means, [(0, 192)], dtype=torch.float32)
    assert stored.dtype == dtype and wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), stored)
