"""Rings of tiles in shared memory, filled through TMA by a loader and emptied by consumers.

Position n of a ring is slot n % STAGES. A slot has two barriers: `full` completes when its bytes
have arrived, `empty` when every consumer has released it; a barrier's phase flips each time round.
A consumer waits for and releases every position, also those whose tile it does not use.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...types import BLOCK

# The name of the bulk tensor load changed after triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


# fmt: off


@gluon.jit
def slot(position, STAGES: gl.constexpr):
    return position % STAGES, (position // STAGES) & 1


@gluon.jit
def fill(desc, head, row, position, bufs, full, empty, STAGES: gl.constexpr, BYTES: gl.constexpr):
    st, phase = slot(position, STAGES)
    mbarrier.wait(empty.index(st), phase ^ 1)
    mbarrier.expect(full.index(st), BYTES)
    tma_load(desc, [head, row, 0], full.index(st), bufs.index(st))


@gluon.jit
def release(position, empty, STAGES: gl.constexpr):
    st, _phase = slot(position, STAGES)
    mbarrier.arrive(empty.index(st))


@gluon.jit
def pass_over(position, k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr):
    st, phase = slot(position, STAGES)
    mbarrier.wait(k_full.index(st), phase)
    mbarrier.wait(v_full.index(st), phase)
    mbarrier.arrive(k_empty.index(st))
    mbarrier.arrive(v_empty.index(st))


# fmt: on


def describe(
    x: Tensor, tokens_first: bool, rows: int = BLOCK, *, swizzle: bool = True
) -> TensorDescriptor:
    """Describe [L, H, D] (tokens first) or [R, L, D] as (row, tokens, D), a box of `rows` tokens.

    Operands of matrix products are swizzled, as many bytes as their rows have, up to 128.
    """
    dim = x.shape[-1]
    size = x.element_size()
    width = min(128, dim * size) if swizzle else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * size, rank=3)
    view = x.transpose(0, 1) if tokens_first else x
    # The stride of a dimension of one is free; TMA wants it aligned all the same.
    strides = [
        stride if length > 1 else dim
        for stride, length in zip(view.stride()[:2], view.shape, strict=False)
    ]
    return TensorDescriptor(view, list(view.shape), [*strides, 1], [1, rows, dim], layout)
