"""Dense attention as torch ships it, flex with a block mask, and flash-attn-4 where it is
installed.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from solspark.bench.case import (
    Case,
    Unavailable,
    error_against_dense,
    judge_dense,
    method,
)
from solspark.bench.gate import Verdict, attend_rows, compare
from solspark.bench.inputs import Inputs
from solspark.bench.lists import block_lists
from solspark.types import block_count

SDPA = {
    "dense-cudnn": SDPBackend.CUDNN_ATTENTION,
    "dense-flash": SDPBackend.FLASH_ATTENTION,
    "dense-math": SDPBackend.MATH,
}


def best_dense(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return dense attention on [B, T, H, D] by the quickest kernel that ships with torch."""
    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return attend


def _dense_case(inputs: Inputs, run: Callable[[], Tensor], implementation: str) -> Case:
    """Return the case of a dense attention whose call gives [B, T, H, D]."""
    return Case(
        run=run,
        judge=lambda out: judge_dense(inputs, out),
        implementation=implementation,
        density=lambda out: 1.0,
        flops=lambda density: float(inputs.problem.dense_flops(inputs.heads)),
        error=lambda out: error_against_dense(inputs, out),
    )


def _sdpa(name: str) -> Callable[[Inputs, dict[str, Any]], Case]:
    """Return the builder of one backend of torch's attention."""

    def build(inputs: Inputs, options: dict[str, Any]) -> Case:
        if name != "dense-math" and inputs.device.type != "cuda":
            raise Unavailable(f"{name} needs a CUDA device")
        tensors = inputs.transposed()

        def run() -> Tensor:
            with sdpa_kernel(SDPA[name]):
                return F.scaled_dot_product_attention(*tensors).transpose(1, 2)

        return _dense_case(inputs, run, f"torch {SDPA[name].name.lower()}")

    return build


def _default(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build torch's own choice of backend."""
    tensors = inputs.transposed()
    return _dense_case(
        inputs,
        lambda: F.scaled_dot_product_attention(*tensors).transpose(1, 2),
        "torch's choice",
    )


def import_flash_4() -> Any:
    """Return flash-attn-4's interface module, or raise Unavailable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # its imports fail in many ways without a matching toolkit
        raise Unavailable(f"flash-attn-4: {type(error).__name__}: {error}") from error


def package_version(*names: str) -> str:
    """Return "name version" of the first installed distribution, or the first name."""
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return names[0]


def _flash_4(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build flash-attn-4's dense attention."""
    interface = import_flash_4()

    def run() -> Tensor:
        out = interface.flash_attn_func(inputs.query, inputs.key, inputs.value)
        return out[0] if isinstance(out, tuple) else out

    return _dense_case(inputs, run, package_version("flash-attn-4", "flash-attn"))


for _level in ("call", "layer", "attend"):
    for _name in SDPA:
        method(_level, _name)(_sdpa(_name))
    method(_level, "dense-default")(_default)
    method(_level, "dense-fa4")(_flash_4)


def sized_lists(inputs: Inputs, options: dict[str, Any], size: tuple[int, int]) -> Tensor:
    """Return int64 [H, NQ, kept] lists for blocks of other sizes than ours."""
    tokens = inputs.query.shape[1]
    rows, columns = block_count(tokens, size[0]), block_count(tokens, size[1])
    kept = max(1, round(options.get("topk_ratio", 0.1) * columns))
    kind = options.get("lists", "random")
    return block_lists(kind, inputs.heads, rows, columns, kept, inputs.device)


def judge_lists(inputs: Inputs, out: Tensor, lists: Tensor, size: tuple[int, int]) -> Verdict:
    """Judge [B, T, H, D] against attention over lists of blocks of any size."""
    got, oracle, rounding = [], [], []
    tokens, rows = inputs.query.shape[1], inputs.sample.rows
    columns = block_count(tokens, size[1])
    dtype = inputs.query.dtype
    for head in inputs.sample.heads:
        query, key, value = (x[0, :, head] for x in (inputs.query, inputs.key, inputs.value))
        exact = torch.zeros(len(rows), columns, dtype=torch.bool, device=rows.device)
        exact.scatter_(1, lists[head, rows // size[0]], True)
        # The oracle knows 64-token blocks; a larger block is a run of them.
        exact = exact.repeat_interleave(size[1] // 64, dim=1)[:, : block_count(tokens)]
        got.append(out[0, rows, head])
        for target, working, rounded in (
            (oracle, torch.float64, None),
            (rounding, torch.float32, dtype),
        ):
            target.append(
                attend_rows(
                    query[rows],
                    key,
                    value,
                    scale=query.shape[-1] ** -0.5,
                    exact=exact,
                    dtype=working,
                    round_to=rounded,
                ).double()
            )
    return compare(torch.stack(got), torch.stack(oracle), torch.stack(rounding), dtype)


def listed_flops(inputs: Inputs, lists: Tensor, size: tuple[int, int]) -> float:
    """Return 4 D times the (query token, key token) pairs inside the lists."""
    tokens = inputs.query.shape[1]
    heads, rows, kept = lists.shape
    columns = block_count(tokens, size[1])
    row_tokens = torch.full((rows,), float(size[0]), dtype=torch.float64, device=lists.device)
    row_tokens[-1] = tokens - size[0] * (rows - 1)
    keys = torch.full(
        (heads, rows), float(kept * size[1]), dtype=torch.float64, device=lists.device
    )
    keys -= (lists == columns - 1).any(2).double() * (columns * size[1] - tokens)
    return 4.0 * inputs.query.shape[3] * float((keys * row_tokens).sum())


@method("attend", "flex", "lists", "topk_ratio")
def _flex(inputs: Inputs, options: dict[str, Any]) -> Case:
    """Build torch's flex attention with a 128 x 128 block mask."""
    if inputs.device.type != "cuda":
        raise Unavailable("flex is compiled, which needs a CUDA device here")
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    size = (128, 128)
    tokens = inputs.query.shape[1]
    lists = sized_lists(inputs, options, size)
    heads, rows, kept = lists.shape
    index = torch.zeros(1, heads, rows, block_count(tokens, 128), dtype=torch.int32, device="cuda")
    index[0, :, :, :kept] = lists
    count = torch.full((1, heads, rows), kept, dtype=torch.int32, device="cuda")
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(count),
        torch.zeros_like(index),
        count,
        index,
        BLOCK_SIZE=size,
        seq_lengths=(tokens, tokens),
    )
    attend = torch.compile(flex_attention, dynamic=False)
    query, key, value = (x.contiguous() for x in inputs.transposed())
    return Case(
        run=lambda: attend(query, key, value, block_mask=mask).transpose(1, 2),
        judge=lambda out: judge_lists(inputs, out, lists, size),
        implementation="torch flex 128x128",
        density=lambda out: kept / block_count(tokens, 128),
        flops=lambda density: listed_flops(inputs, lists, size),
    )


def _flash_4_blocks(size: tuple[int, int]) -> Callable[[Inputs, dict[str, Any]], Case]:
    """Return the builder of flash-attn-4's block-sparse attention with one block size."""

    def build(inputs: Inputs, options: dict[str, Any]) -> Case:
        interface = import_flash_4()
        sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
        tokens = inputs.query.shape[1]
        lists = sized_lists(inputs, options, size)
        heads, rows, kept = lists.shape
        columns = block_count(tokens, size[1])
        index = torch.zeros(1, heads, rows, columns, dtype=torch.int32, device=inputs.device)
        index[0, :, :, :kept] = lists
        count = torch.full((1, heads, rows), kept, dtype=torch.int32, device=inputs.device)
        blocks = sparsity.BlockSparseTensorsTorch(
            torch.zeros_like(count), torch.zeros_like(index), count, index, block_size=size
        )

        def run() -> Tensor:
            out = interface.flash_attn_func(
                inputs.query, inputs.key, inputs.value, block_sparse_tensors=blocks
            )
            return out[0] if isinstance(out, tuple) else out

        return Case(
            run=run,
            judge=lambda out: judge_lists(inputs, out, lists, size),
            implementation=package_version("flash-attn-4", "flash-attn"),
            density=lambda out: kept / columns,
            flops=lambda density: listed_flops(inputs, lists, size),
        )

    return build


for _size in ((64, 64), (128, 64), (128, 128)):
    method("attend", f"fa4-{_size[0]}x{_size[1]}", "lists", "topk_ratio")(_flash_4_blocks(_size))
