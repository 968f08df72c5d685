"""Every implementation of tile means and tile selection against the reference."""

from __future__ import annotations

import math
import random

import pytest
import torch

from solspark.errors import UnsupportedError
from solspark.ops import select_tiles as module
from solspark.ops.select_tiles import select_tiles, tile_means
from solspark.testing import assert_close_to_oracle, poison_free_memory


def tile_case(seed, device="cpu"):
    """Draw scores with ties and odd values, flags of any leading size, and each row's count."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, heads, rows, columns = 2, 3, rng.randint(1, 9), rng.randint(1, 70)
    scores = (torch.randn(batch, heads, rows, columns, generator=generator) * 2).round() / 2
    for value in (math.nan, -math.inf, math.inf, -0.0):
        scores[torch.rand(scores.shape, generator=generator) < 0.05] = value
    lead = (rng.choice([1, batch]), rng.choice([1, heads]), rows, columns)
    must = torch.rand(lead, generator=generator) < 0.2
    candidates = (torch.rand(lead, generator=generator) < 0.7) & ~must
    available = candidates.sum(-1, keepdim=True)
    counts = (available * rng.choice([0.0, 0.3, 1.0])).ceil().long()
    return [x.to(device) for x in (scores, must, candidates, counts)]


def chosen_by_hand(scores, must, candidates, counts):
    """Rank each row's candidates in Python."""
    keep = torch.zeros(scores.shape, dtype=torch.int8)
    flags = [x.expand(*scores.shape[:3], x.shape[3]) for x in (must, candidates, counts)]
    for b in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            for i in range(scores.shape[2]):
                row = [-1e39 if math.isnan(x) else max(x, -1e39) for x in scores[b, h, i].tolist()]
                able = [j for j in range(len(row)) if flags[1][b, h, i, j]]
                best = sorted(able, key=lambda j: (-row[j], j))[: int(flags[2][b, h, i, 0])]
                keep[b, h, i, best] = 1
                keep[b, h, i, flags[0][b, h, i]] = 1
    return keep


@pytest.mark.parametrize("seed", range(20))
def test_the_best_candidates_of_each_row(seed):
    case = tile_case(seed)
    assert torch.equal(select_tiles(*case), chosen_by_hand(*case))


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [40, 256, 300])
def test_means_are_those_of_real_tokens(tokens, dtype, tile):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 3, 16, generator=generator).to(dtype)
    means = tile_means(x, tile=tile)
    assert means.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    want = torch.stack([x[:, i : i + tile].double().mean(1) for i in range(0, tokens, tile)], 2)
    if dtype == torch.float64:
        torch.testing.assert_close(means, want, rtol=1e-14, atol=1e-14)
    else:
        same = [x[:, i : i + tile].float().mean(1) for i in range(0, tokens, tile)]
        assert_close_to_oracle(means, want, torch.stack(same, 2), name="means")
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(tile_means(strided, tile=tile), means, rtol=1e-6, atol=1e-6)


def test_wrong_arguments_are_named():
    scores, must, candidates, counts = tile_case(3)
    with pytest.raises(ValueError, match="tile: expected a multiple of 32, got 40"):
        tile_means(torch.zeros(1, 4, 1, 8), tile=40)
    with pytest.raises(ValueError, match="must: expected"):
        select_tiles(scores, must[..., :-1], candidates, counts)
    with pytest.raises(TypeError, match="candidates"):
        select_tiles(scores, must, candidates.int(), counts)
    with pytest.raises(ValueError, match="counts: expected"):
        select_tiles(scores, must, candidates, counts[..., 0, :])
    with pytest.raises(UnsupportedError, match="not on cpu"):
        select_tiles(scores, must, candidates, counts, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_selection_on_a_device_is_the_reference(seed):
    case = tile_case(seed, "cuda")
    poison_free_memory("cuda")
    assert torch.equal(select_tiles(*case, impl="triton"), select_tiles(*case, impl="eager"))
    wide = torch.randn(1, 2, 5, 4700, device="cuda")
    every = torch.ones(1, 1, 5, 4700, dtype=torch.bool, device="cuda")
    given = (wide, ~every, every, torch.full((1, 1, 5, 1), 1000 + seed, device="cuda"))
    assert torch.equal(select_tiles(*given, impl="triton"), select_tiles(*given, impl="eager"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_means_on_a_device_are_the_reference(dtype):
    for tokens, dim in ((40, 64), (1000, 128), (4096, 40)):
        x = torch.randn(2, tokens, 3, dim, device="cuda").to(dtype)
        poison_free_memory("cuda")
        means = tile_means(x, tile=64, impl="triton")
        oracle = tile_means(x.double(), tile=64)
        assert_close_to_oracle(means, oracle, tile_means(x, tile=64, impl="eager"), name="means")
        fused = torch.stack([x, x], 2)[:, :, 1]
        assert torch.equal(tile_means(fused, tile=64, impl="triton"), means)


@pytest.mark.gpu
def test_the_operators_are_true_to_their_fakes():
    case = tile_case(5, "cuda")
    torch.library.opcheck(module._selection_operator, tuple(case))
    x = torch.randn(1, 100, 2, 64, device="cuda")
    torch.library.opcheck(module._means_operator, (x, 64))
