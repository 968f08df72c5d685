"""Frozen data that travels between planning, summarising and attending.

Nothing here computes: constructors check invariants, and that is all. Everything is laid out per
head so that one kernel program reads one contiguous row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
"""Tokens in a query block and in a key block."""


def block_count(tokens: int, block: int = BLOCK) -> int:
    """Return the number of blocks that `tokens` tokens fill, the last one possibly ragged."""
    return -(-tokens // block)


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Say which key blocks each query block reads exactly.

    Args:
        bits: int32 [B, H, NQ, ceil(NK / 32)]; bit n % 32 of word n // 32 is set iff key block n is
            exact.
        indices: int16 (NK < 32768) or int32 [B, H, NQ, M]; the first `counts` entries of a row are
            the exact key blocks in ascending order, the rest are unspecified.
        counts: int32 [B, H, NQ], exact key blocks a row, 0 <= counts <= M.
        query_tokens: L_q; NQ = ceil(L_q / 64).
        key_tokens: L_k; NK = ceil(L_k / 64).
    """

    bits: Tensor
    indices: Tensor
    counts: Tensor
    query_tokens: int
    key_tokens: int

    def __post_init__(self) -> None:
        batch, heads, rows = self.counts.shape
        if rows != block_count(self.query_tokens):
            raise ValueError(
                f"plan.counts: expected {block_count(self.query_tokens)} query blocks for "
                f"{self.query_tokens} query tokens, got {rows}"
            )
        words = (self.bits.dtype, tuple(self.bits.shape))
        expected = (torch.int32, (batch, heads, rows, -(-self.key_blocks // 32)))
        if words != expected:
            raise ValueError(f"plan.bits: expected {expected}, got {words}")
        if self.indices.dtype not in (torch.int16, torch.int32):
            raise ValueError(f"plan.indices: expected int16 or int32, got {self.indices.dtype}")
        if tuple(self.indices.shape[:3]) != (batch, heads, rows):
            raise ValueError(
                f"plan.indices: expected [{batch}, {heads}, {rows}, M], got "
                f"{tuple(self.indices.shape)}"
            )
        if self.counts.dtype != torch.int32:
            raise ValueError(f"plan.counts: expected int32, got {self.counts.dtype}")

    @property
    def query_blocks(self) -> int:
        return block_count(self.query_tokens)

    @property
    def key_blocks(self) -> int:
        return block_count(self.key_tokens)


@dataclass(frozen=True, eq=False)
class BlockSummaries:
    """Stand-ins for the key blocks that a query block does not read exactly.

    A skipped key block j contributes one pseudo-key with logit `scale * q . keys[p, j] +
    log_mass[p, j]` and value `values[p, j]`, where p is the parent of the query block.

    Args:
        keys: [B, P, H, NK, D], dtype of the attention's inputs.
        values: [B, P, H, NK, D], same dtype: the (weighted) MEAN value of the block.
        log_mass: float32 [B, P, H, NK], natural log; -inf for a block without any valid key. May be
            an expanded view.
        parents: int32 [NQ], query block -> p; None when P == 1.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor
    parents: Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.ndim != 5 or self.keys.shape != self.values.shape:
            raise ValueError(
                "summaries.keys and .values: expected equal shapes [B, P, H, NK, D], got "
                f"{tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            )
        if self.log_mass.dtype != torch.float32 or self.log_mass.shape != self.keys.shape[:4]:
            raise ValueError(
                f"summaries.log_mass: expected float32 {tuple(self.keys.shape[:4])}, got "
                f"{self.log_mass.dtype} {tuple(self.log_mass.shape)}"
            )
        if self.parents is None and self.keys.shape[1] != 1:
            raise ValueError(f"summaries.parents: needed for P = {self.keys.shape[1]} > 1")
        if self.parents is not None and self.parents.dtype != torch.int32:
            raise ValueError(f"summaries.parents: expected int32, got {self.parents.dtype}")


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """The INT8 operands of a call and its block statistics; Tp = 64 N padded tokens.

    Where channels are balanced, Q and K are the balanced ones throughout.

    Args:
        query, key, value: int8 [B, H, Tp, D]; key is centred by `key_center`; dead rows are zero.
        query_scale, key_scale: float32 [B, H, Tp], zero for dead rows.
        key_bias: float32 [B, Tp], log2 units: 0, the bias, or -3e38 for dead keys.
        value_scale: float32 [B, H, D].
        query_means, key_means: float32 [B, H, N, D], not centred.
        value_sums: bfloat16 [B, H, N, D].
        centroid, pooled: int8 [B, H, N, D]: query means, and key means minus `key_mean`.
        centroid_scale, pooled_scale: float32 [B, H, N].
        key_mean, key_var: float32 [B, H, D]: mean and variance of the key means over blocks.
        key_center: float32 [B, H, D], what was subtracted from the keys.
        shift: float32 [B, H, D], key_mean - key_center in the basis of the integers.
        lengths: int64 [N], live rows a block.
        tokens: T.
        rotated: whether the integers of Q and K are in the rotated basis.
        biased: False promises that `key_bias` is zero for every token before T.
    """

    query: Tensor
    query_scale: Tensor
    key: Tensor
    key_scale: Tensor
    key_bias: Tensor
    value: Tensor
    value_scale: Tensor
    query_means: Tensor
    key_means: Tensor
    value_sums: Tensor
    centroid: Tensor
    centroid_scale: Tensor
    pooled: Tensor
    pooled_scale: Tensor
    key_mean: Tensor
    key_var: Tensor
    key_center: Tensor
    shift: Tensor
    lengths: Tensor
    tokens: int
    rotated: bool = False
    biased: bool = True

    def __post_init__(self) -> None:
        batch, _, rows, _ = self.query.shape
        if rows != BLOCK * block_count(self.tokens) or self.lengths.numel() * BLOCK != rows:
            raise ValueError(
                f"qkv.query: expected {BLOCK * block_count(self.tokens)} padded rows for "
                f"{self.tokens} tokens, got {rows}"
            )
        for name in ("query", "key", "value", "centroid", "pooled"):
            if getattr(self, name).dtype != torch.int8:
                raise ValueError(f"qkv.{name}: expected int8, got {getattr(self, name).dtype}")
        if self.key_bias.shape != (batch, rows):
            raise ValueError(
                f"qkv.key_bias: expected [{batch}, {rows}], got {tuple(self.key_bias.shape)}"
            )


@dataclass(frozen=True)
class TokenGrid:
    """The raster of a video segment: token id = (t * height + h) * width + w.

    Args:
        frames, height, width: of the latent video in tokens, each at least 1.

    Raises:
        ValueError: a size is no positive int.
    """

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"grid.{name}: expected a positive int, got {value!r}")

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    def as_tuple(self) -> tuple[int, int, int]:
        return (self.frames, self.height, self.width)


@dataclass(frozen=True)
class AttentionCall:
    """What an implementation must know to say whether it can serve a call (never the values).

    Args:
        batch, query_tokens, key_tokens, heads, head_dim: B, L_q, L_k, H and D.
        dtype: of the inputs.
        device_type: "cpu", "cuda" (ROCm too), ...
        capability: (major, minor) of a CUDA or ROCm device, None elsewhere.
        key_heads: of grouped attention, a divisor of `heads`; None: as many.
        parents: anchors of the summaries, P.
        tail: "query", "block", "block8x8" or "none".
        key_bias: whether keys are weighed or masked.
        return_lse: whether the log-sum-exp is wanted.
        kv_splits: splits of the key loop.
        last_dim_contiguous: whether the last stride of every input is 1.
        requires_grad: whether autograd would record the call.
        aligned: whether base pointers and strides are multiples of 16 bytes.
        variant: kind of the operation where it has several ("diag" or "exact" thresholds).
        precision: "native" for the input type, "fp8" or "int8" for operands of eight bits.
    """

    batch: int
    query_tokens: int
    key_tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None = None
    key_heads: int | None = None
    parents: int = 1
    tail: str = "query"
    key_bias: bool = False
    return_lse: bool = False
    kv_splits: int = 1
    last_dim_contiguous: bool = True
    requires_grad: bool = False
    aligned: bool = True
    variant: str = ""
    precision: str = "native"

    def __str__(self) -> str:
        """Say type, shape and device in a line."""
        dtype = str(self.dtype).removeprefix("torch.")
        where = self.device_type
        if self.capability is not None:
            where += f" {self.capability[0]}.{self.capability[1]}"
        keys = "" if self.key_tokens == self.query_tokens else f" over {self.key_tokens} keys"
        shape = f"[{self.batch}, {self.query_tokens}, {self.heads}, {self.head_dim}]"
        return f"{dtype} {shape}{keys} on {where}"


@dataclass(frozen=True)
class CallRecord:
    """What served a call: `solspark.last_call()` returns the newest one of this thread.

    Args:
        operation: name of the operation, such as "sol_attn".
        implementation: "hopper", "triton" or "eager".
        call: what was asked for.
        declined: (implementation, reasons) of the better ones that could not serve.
        exact_pairs: block pairs read exactly, on the device; None where nothing is sparse.
        total_pairs: block pairs there are.
    """

    operation: str
    implementation: str
    call: AttentionCall
    declined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exact_pairs: Tensor | None = None
    total_pairs: int | None = None

    @property
    def density(self) -> float | None:
        """Share of (query block, key block) pairs read exactly; reading it waits for the device."""
        if self.exact_pairs is None or not self.total_pairs:
            return None
        return float(self.exact_pairs.sum()) / self.total_pairs

    def __str__(self) -> str:
        """Say what served, how densely, and why the others did not; waits for the device."""
        density = "" if self.density is None else f", density {self.density:.1%}"
        lines = [f"{self.operation} of {self.call}: {self.implementation}{density}"]
        lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in self.declined]
        return "\n".join(lines)
