"""The kernels of tile means and tile selection: interpreted, and compiled for every target."""

from __future__ import annotations

import math

import pytest
import torch

from solspark.reference import select_tiles as reference
from solspark.testing import assert_close_to_oracle

pytest.importorskip("triton")

from solspark.kernels.select_tiles import (
    launch_select_tiles,
    launch_tile_means,
    select_tiles_kernel,
    tile_means_kernel,
)


def test_in_the_interpreter(interpret):
    interpret(__file__)


@pytest.mark.interpreted
@pytest.mark.parametrize(("columns", "share"), [(1, 1.0), (37, 0.3), (70, 0.0)])
def test_selection(columns, share):
    generator = torch.Generator().manual_seed(columns)
    scores = (torch.randn(2, 2, 2, columns, generator=generator) * 2).round() / 2
    for value in (math.nan, -math.inf, math.inf, -0.0):
        scores[torch.rand(scores.shape, generator=generator) < 0.05] = value
    for lead in ((1, 1), (2, 2)):
        must = torch.rand(*lead, 2, columns, generator=generator) < 0.2
        candidates = (torch.rand(must.shape, generator=generator) < 0.7) & ~must
        counts = (candidates.sum(-1, keepdim=True) * share).ceil().long()
        flags = (must.view(torch.uint8), candidates.view(torch.uint8))
        keep = launch_select_tiles(scores, *flags, counts)
        assert torch.equal(keep, reference.select_tiles(scores, must, candidates, counts))


@pytest.mark.interpreted
@pytest.mark.parametrize("tokens", [40, 128, 150])
def test_means(tokens):
    for dim, dtype in ((16, torch.float16), (24, torch.float32)):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(2, tokens, 3, dim, generator=generator).to(dtype)
        buffer = torch.full((2, tokens + 70, 4, dim + 8), math.nan, dtype=dtype)
        view = buffer[:, 3 : 3 + tokens, 1:, 4 : 4 + dim].copy_(x)
        for tile in (64, 128):
            means = launch_tile_means(view, tile=tile)
            oracle = reference.tile_means(x.double(), tile=tile)
            assert_close_to_oracle(means, oracle, reference.tile_means(x, tile=tile), name="means")
            assert torch.equal(means, launch_tile_means(x, tile=tile))


def test_nothing_compiles_again(record_launches):
    variants = None
    for batch, tokens, heads in ((1, 1000, 2), (2, 1024, 3), (1, 2000, 16)):
        x = torch.zeros(batch, tokens, heads, 64, dtype=torch.bfloat16)
        scores = torch.zeros(batch, heads, -(-tokens // 128), 17)
        flags = torch.zeros(1, 1, *scores.shape[2:], dtype=torch.uint8)
        counts = torch.zeros(1, 1, scores.shape[2], 1, dtype=torch.long)

        def run(x=x, given=(scores, flags, flags, counts)):
            launch_tile_means(x, tile=128)
            launch_select_tiles(*given)

        found = {(launch.kernel.__name__, launch.key) for launch in record_launches(run)}
        assert variants is None or found == variants, found ^ variants
        variants = found


def types_of(kernel, **changes):
    found = {}
    for name in kernel.arg_names:
        found[name] = "i64" if name[0] == "s" and len(name) == 3 else "i32"
        if name.endswith("_ptr"):
            found[name] = "*i8"
    return {**found, **changes}


def test_both_compile_for_every_target(compile_ahead):
    types = types_of(select_tiles_kernel, score_ptr="*fp32", count_ptr="*i64")
    compile_ahead(select_tiles_kernel, types, {"WIDTH": 1024}, num_warps=4)
    types = types_of(tile_means_kernel, x_ptr="*bf16", mean_ptr="*fp32")
    constants = {"D": 128, "DP": 128, "TILE": 64, "ROWS": 32}
    compile_ahead(tile_means_kernel, types, constants, num_warps=4)
