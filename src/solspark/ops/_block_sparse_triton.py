"""How attention under a plan enters its kernels: Triton's, and Gluon's for Hopper."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from solspark.ops import _triton
from solspark.types import AttentionCall, BlockPlan, BlockSummaries


def _begin_aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if it does not begin at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    indices: Tensor,
    counts: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    log_mass: Tensor | None,
    parents: Tensor | None,
    key_bias: Tensor | None,
    scale: float,
    tail: str,
    kv_splits: int,
    hopper: bool,
    precision: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel; without `return_lse` the LSE comes back empty."""
    plan = BlockPlan(bits, indices, counts, query.shape[1], key.shape[1])
    summaries = _summaries(keys, values, log_mass, parents)
    options: dict[str, Any] = {"scale": scale, "return_lse": return_lse}
    if hopper:
        from solspark.kernels.hopper.block_sparse_attention import launch_block_sparse_attention

        query, key, value = (_begin_aligned(tensor) for tensor in (query, key, value))
    else:
        from solspark.kernels.block_sparse_attention import launch_block_sparse_attention

        options |= {"tail": tail, "kv_splits": kv_splits}
    with torch.cuda.device_of(query):
        if precision == "fp8":
            from solspark.kernels.quantize_fp8 import launch_quantize_fp8

            options["fp8"] = launch_quantize_fp8(query, key, value, summaries)
        out, lse = launch_block_sparse_attention(
            query, key, value, plan, summaries, key_bias, **options
        )
    return out, query.new_empty(0, dtype=torch.float32) if lse is None else lse


operator = torch.library.custom_op("solspark::block_sparse_attention", _launch, mutates_args=())


@operator.register_fake
def _(query, *rest):
    shape = query.shape[:3] if rest[-1] else (0,)
    return query.new_empty(query.shape), query.new_empty(shape, dtype=torch.float32)


def _summaries(
    keys: Tensor | None, values: Tensor | None, log_mass: Tensor | None, parents: Tensor | None
) -> BlockSummaries | None:
    """Put summaries together again; operators take tensors only."""
    if keys is None or values is None or log_mass is None:
        return None
    return BlockSummaries(keys, values, log_mass, parents)


def run_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    summaries: BlockSummaries | None,
    scale: float,
    key_bias: Tensor | None,
    tail: str,
    kv_splits: int,
    precision: str,
    return_lse: bool,
    hopper: bool = False,
) -> tuple[Tensor, Tensor]:
    """Enter through the custom op, so that torch.compile keeps one node."""
    # Kernels take the maximum of unscaled scores, some of which are -inf.
    if scale < 0:
        query, scale = -query, -scale
    elif scale == 0:
        query, scale = torch.zeros_like(query), 1.0
    stored: tuple[Tensor | None, ...] = (None, None, None, None)
    if summaries is not None:
        log_mass = summaries.log_mass
        stored = (
            summaries.keys.contiguous(),
            summaries.values.contiguous(),
            log_mass if log_mass.stride(3) == 1 else log_mass.contiguous(),
            summaries.parents,
        )
    lists = (plan.bits.contiguous(), plan.indices.contiguous(), plan.counts.contiguous())
    bias = None if key_bias is None else key_bias.float().contiguous()
    if bias is not None and (hopper or precision == "fp8"):
        # Hopper's matrix products read values as they lie in memory, and 0 * NaN is NaN; the scales
        # of FP8 come from all keys and values.
        dead = (bias == -math.inf).transpose(1, 2)[..., None]
        value = value.masked_fill(dead, 0.0)
        if precision == "fp8":
            key = key.masked_fill(dead, 0.0)
    launch = _triton.entry(operator, _launch)
    options = (scale, tail, kv_splits, hopper, precision, return_lse)
    return launch(query, key, value, *lists, *stored, bias, *options)


HALF = (torch.float16, torch.bfloat16)


def triton_reasons(call: AttentionCall) -> list[str]:
    """Return why the Triton kernel cannot serve a call."""
    found = _triton.obstacles(call, dtypes=HALF)
    if call.tail == "block8x8":
        found.append('it has no "block8x8" tail')
    if call.precision == "fp8":
        if call.device_type == "cuda":
            found += _fp8_obstacles(call)
        if call.tail == "block":
            found.append('with "fp8" precision it has no "block" tail')
    return found


def _fp8_obstacles(call: AttentionCall) -> list[str]:
    """Return why a device has no products of e4m3, or products that a kernel cannot use."""
    if torch.version.hip:
        return ['its "fp8" precision is for NVIDIA GPUs']
    if call.capability is None or call.capability < (8, 9):
        return [f'"fp8" precision needs compute capability 8.9, this device has {call.capability}']
    return _bias_obstacles(call)


def _bias_obstacles(call: AttentionCall) -> list[str]:
    """Return why masked keys cannot be cleared: heads that share them may mask different ones."""
    if call.key_bias and call.key_heads not in (None, call.heads):
        return ["with a key bias every query head must have a key head of its own"]
    return []


def hopper_reasons(call: AttentionCall) -> list[str]:
    """Return why the kernel for compute capability 9.0 cannot serve a call."""
    own = []
    if call.tail not in ("query", "none"):
        own.append(f'it has no "{call.tail}" tail')
    if call.kv_splits != 1:
        own.append("it does not split the keys")
    own += _bias_obstacles(call)
    if not call.aligned:
        own.append("TMA needs base pointers and strides in multiples of 16 bytes")
    return _triton.hopper_obstacles(call, own, dtypes=HALF)
