"""Kernels for compute capability 9.0: the unions in the interpreter, attention ahead of time.

Gluon has no interpreter: what the attention computes is tested on a device, in
tests/ops/test_attention_gpu.py.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solspark import plan_from_mask
from solspark.ops._block_sparse_triton import run_kernel
from solspark.ops._dispatch import reasons
from solspark.ops.qkv_producer import quantize_qkv
from solspark.reference.quantize_fp8 import tile_order
from solspark.testing import make_qkv, nan_filled_allocations
from solspark.types import AttentionCall, BlockPlan, BlockSummaries

pytest.importorskip("triton.experimental.gluon")

from solspark.kernels.hopper.block_sparse_attention import GROUP
from solspark.kernels.hopper.ring import describe
from solspark.kernels.hopper.sol_int8 import launch_sol_int8, launch_value_tiles
from solspark.kernels.hopper.union_lists import launch_union_lists

STACK_BYTES = 128
"""What registers may spill; the main variant spills 80 bytes with triton 3.9 and 8 with 3.6."""


def test_in_the_interpreter(interpret):
    interpret(__file__)


def plan_of(mask: Tensor, most: int | None = None) -> BlockPlan:
    tokens = {"query_tokens": mask.shape[2] * 64 - 3, "key_tokens": mask.shape[3] * 64 - 63}
    plan = plan_from_mask(mask, **tokens)
    if most is None:
        return plan
    return BlockPlan(plan.bits, plan.indices[..., :most].contiguous(), plan.counts, **tokens)


def check_unions(plan: BlockPlan, mask: Tensor, group: int) -> None:
    with nan_filled_allocations():
        entries, counts = launch_union_lists(plan, group)
    batch, heads, rows, columns = mask.shape
    assert entries.dtype == counts.dtype == torch.int32
    assert counts.shape == (batch, heads, -(-rows // group))
    for sample in range(batch):
        for head in range(heads):
            for place, first in enumerate(range(0, rows, group)):
                members = mask[sample, head, first : first + group].tolist()
                expected = []
                for block in range(columns):
                    flags = sum(row[block] << place for place, row in enumerate(members))
                    if flags:
                        expected.append(block << 4 | flags)
                count = int(counts[sample, head, place])
                assert entries[sample, head, place, :count].tolist() == expected


@pytest.mark.interpreted
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (4, 33), (7, 1100)])
def test_unions(shape: tuple[int, int], group: int):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 2, *shape, generator=generator) < 0.2
    mask[0, 0, 0], mask[0, 0, -1] = False, True
    check_unions(plan_of(mask), mask, group)


@pytest.mark.interpreted
def test_no_list_is_longer_than_lists_can_unite_to():
    mask = torch.zeros(1, 2, 5, 40, dtype=torch.bool)
    mask[0, 0, 0, :2] = mask[0, 0, 1, 2:4] = mask[0, 0, 2, 38:] = mask[0, 0, 3, 5:7] = True
    plan = plan_of(mask, most=2)
    assert launch_union_lists(plan, GROUP)[0].shape == (1, 2, 2, 6)
    check_unions(plan, mask, GROUP)


def launcher(
    shape: tuple[int, int, int, int] = (1, 200, 2, 128),
    *,
    dtype: torch.dtype = torch.bfloat16,
    tail: str = "query",
    biased: bool = False,
    return_lse: bool = False,
    parents: int = 0,
    scale: float = 0.1,
    precision: str = "native",
    layout: str = "contiguous",
):
    """Return a call of the kernel on zeros of [B, T, H, D]."""
    batch, tokens, heads, dim = shape
    tensors = make_qkv(*shape, dtype=dtype, layout=layout)
    blocks = -(-tokens // 64)
    plan = plan_from_mask(
        torch.ones(batch, heads, blocks, blocks, dtype=torch.bool),
        query_tokens=tokens,
        key_tokens=tokens,
    )
    summaries = None
    if tail != "none":
        keys = torch.zeros(batch, max(parents, 1), heads, blocks, dim, dtype=dtype)
        mass = torch.zeros(keys.shape[:4])
        rows = torch.zeros(blocks, dtype=torch.int32) if parents else None
        summaries = BlockSummaries(keys, keys, mass, rows)
    bias = torch.zeros(batch, 1, tokens) if biased else None
    options = (scale, bias, tail, 1, precision, return_lse)
    return lambda: run_kernel(*tensors, plan, summaries, *options, hopper=True)


def resource_usage(cubin: bytes, folder: Path) -> dict[str, int]:
    """Return registers, stack and so on that the assembler gave a kernel."""
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"biased": True, "return_lse": True, "parents": 17},
        {"shape": (1, 200, 2, 64), "dtype": torch.float16, "tail": "none", "return_lse": True},
        {"precision": "fp8"},
        {
            "shape": (1, 200, 2, 64),
            "precision": "fp8",
            "biased": True,
            "return_lse": True,
            "parents": 17,
        },
    ],
    ids=["plain", "everything", "lists_only", "fp8", "fp8_everything"],
)
def test_compiles(record_launches, compile_launch, tmp_path: Path, options: dict[str, Any]):
    *before, attention = record_launches(launcher(**options))
    for launch in before:
        compile_launch(launch, "sm_90")
    compiled = compile_launch(attention, "sm_90")
    ptx = compiled.asm["ptx"]
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"):
        assert instruction in ptx, instruction
    if options.get("precision") == "fp8":
        assert ptx.count(".f32.e4m3.e4m3") == ptx.count("wgmma.mma_async.sync")
    assert resource_usage(compiled.asm["cubin"], tmp_path)["STACK"] <= STACK_BYTES


@pytest.mark.interpreted
def test_tiles_of_int8_values():
    value = torch.randint(-127, 128, (3, 192, 64), dtype=torch.int8)
    with nan_filled_allocations():
        tiles, sums = launch_value_tiles(value)
    blocks = value.view(3, 3, 64, 64)
    assert tiles.view(3, 3, 64, 64).equal(blocks[:, :, tile_order()].transpose(2, 3))
    assert sums.equal(128 * blocks.int().sum(2, dtype=torch.int32))


def int8_launcher(tail: bool, biased: bool, gate: bool):
    """Return a call of the INT8 kernel on small inputs."""
    tensors = make_qkv(1, 200, 2, 128, dtype=torch.bfloat16)
    qkv = replace(quantize_qkv(*tensors), biased=biased)
    blocks = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    plan = plan_from_mask(blocks, query_tokens=200, key_tokens=200)
    state = torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4, 128)
    means = torch.zeros(2, 4, 128) if gate else None
    return lambda: launch_sol_int8(
        qkv,
        state if tail else None,
        plan,
        tensors[0] if gate else None,
        means,
        a=0.1,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("options", [(True, False, False), (False, True, True)], ids=str)
def test_int8_compiles(record_launches, compile_launch, tmp_path: Path, options: tuple[bool, ...]):
    *before, attention = record_launches(int8_launcher(*options))
    assert len(before) == 2
    for launch in before:
        compile_launch(launch, "sm_90")
    compiled = compile_launch(attention, "sm_90")
    ptx = compiled.asm["ptx"]
    assert ptx.count(".s32.s8.s8") == ptx.count("wgmma.mma_async.sync") > 0
    assert resource_usage(compiled.asm["cubin"], tmp_path)["STACK"] <= STACK_BYTES


def test_nothing_compiles_again_for_other_sizes_and_options(record_launches):
    def variants(*shape: int, **options: Any) -> set[str]:
        return {launch.key for launch in record_launches(launcher(shape, **options))}

    kinds: list[dict[str, Any]] = [
        {"tail": "none"},
        {"return_lse": True},
        {"biased": True},
        {"parents": 3},
        {"precision": "fp8"},
    ]
    for kind in kinds:
        first = variants(1, 64, 1, 64, scale=1.0, **kind)
        assert len(first) == (8 if "precision" in kind else 2)
        for shape in ((1, 1, 1, 64), (2, 65, 3, 64), (3, 131, 7, 64), (1, 1024, 16, 64)):
            for scale in (-1.0, 0.0, 16.0):
                assert variants(*shape, scale=scale, **kind) == first, (kind, shape, scale)
        for layout in ("fused", "interleaved", "heads_first"):
            assert variants(2, 131, 3, 64, layout=layout, **kind) == first, (kind, layout)


@pytest.mark.parametrize("layout", ["contiguous", "fused", "interleaved", "heads_first"])
def test_descriptors_describe_views_in_place(layout: str):
    for shape in ((1, 131, 3, 64), (1, 1, 1, 64), (1, 7, 1, 128)):
        for x in make_qkv(*shape, dtype=torch.bfloat16, layout=layout):
            descriptor = describe(x[0], True)
            assert descriptor.base.data_ptr() == x.data_ptr()
            assert descriptor.shape == [shape[2], shape[1], shape[3]]
            for length, ours, stride in zip(
                descriptor.shape, descriptor.strides, x[0].transpose(0, 1).stride(), strict=True
            ):
                assert ours == stride or length == 1
                assert ours * x.element_size() % 16 == 0 or ours == 1


def test_reasons():
    fits = AttentionCall(
        batch=1,
        query_tokens=300,
        key_tokens=300,
        heads=4,
        head_dim=128,
        dtype=torch.bfloat16,
        device_type="cuda",
        capability=(9, 0),
        key_heads=4,
    )

    def why(**changes: Any) -> str:
        fields = {name: getattr(fits, name) for name in fits.__dataclass_fields__}
        return "\n".join(
            reasons("block_sparse_attention", "hopper", AttentionCall(**{**fields, **changes}))
        )

    assert why() == why(key_bias=True) == why(parents=17) == why(key_heads=2) == ""
    assert why(precision="fp8") == ""
    assert why(tail="none", return_lse=True, batch=3, head_dim=64, dtype=torch.float16) == ""
    for changes, word in (
        ({"capability": (8, 0)}, "compute capability (9, 0)"),
        ({"capability": (10, 0)}, "compute capability (9, 0)"),
        ({"device_type": "cpu", "capability": None}, "cpu"),
        ({"tail": "block"}, '"block"'),
        ({"tail": "block8x8"}, '"block8x8"'),
        ({"kv_splits": 2}, "split"),
        ({"aligned": False}, "16 bytes"),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 96}, "96"),
        ({"requires_grad": True}, "backward"),
        ({"key_bias": True, "key_heads": 2}, "key head of its own"),
    ):
        found = why(**changes)
        assert word in found and len(found.splitlines()) == 1, (changes, found)
