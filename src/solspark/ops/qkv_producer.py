"""Quantise and pool Q, K and V, from tensors or chunk by chunk from the fused projection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch, _triton
from solspark.ops.quantize import rotation_matrix
from solspark.reference.qkv_producer import (
    POOLED_FLOOR,
    SCALE_FLOOR,
    balance_factors,
    basis,
    bias_in_log2,
    block_statistics,
    norm_rope,
    quantize_rows,
)
from solspark.reference.sol_int8 import live_lengths, live_rows
from solspark.types import BLOCK, AttentionCall, QuantizedQKV

__all__ = ["QuantizedQKV", "qkv_producer", "quantize_qkv"]

STEP_BYTES = 16 * 2**20
"""Float32 copy of the rows of one operand in flight."""

VALUE_MARGIN = 1.1
"""Headroom of the value scale that is carried to the next step."""


def quantize_qkv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_bias: Tensor | None = None,
    block_len: Tensor | None = None,
    key_center: Tensor | None = None,
    value_scale: Tensor | None = None,
    rotate: bool = False,
    balance: bool = False,
    impl: str | None = None,
) -> QuantizedQKV:
    """Quantise Q, centred K and V to INT8 and take the statistics of their blocks.

    Args:
        query, key, value: [B, T, H, D], float16, bfloat16 or float32, any strides.
        key_bias: float [B, T], natural log; touches no statistic.
        block_len: integers [N], live rows at the front of each block; None means all.
        key_center: [B, H, D], subtracted from the keys; None takes the mean of the block means.
        value_scale: [B, H, D]; None takes max(absmax / 127, 1e-8) of the live rows.
        rotate: rotate the channels of Q and K by an orthonormal Hadamard matrix before they are
            quantised: outlier channels then share their scale's cost. Products do not change.
        balance: multiply the channels of Q, and divide those of K, by what makes both equally
            loud, see `reference.balance_factors`. Products do not change.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        QuantizedQKV.

    Raises:
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: float32; integers are rounded half to even, to at most 127.

    Source: INT8 specification 2.2, 2.3.
    """
    call = _dispatch.describe(
        query,
        key,
        key_bias=key_bias is not None,
        requires_grad=_dispatch.needs_grad(query, key, value),
        variant=variant(rotate, balance),
    )
    choice = _dispatch.pick("qkv_producer", call, impl)
    choice.record()
    return choice.run(
        query, key, value, key_bias, block_len, key_center, value_scale, rotate, balance
    )


def variant(rotate: bool, balance: bool) -> str:
    """Return the kind of a call, as implementations are asked about it."""
    words = ["rotated"] * rotate + ["balanced"] * balance
    return " ".join(words)


def qkv_producer(
    chunks: Callable[[], Iterable[Tensor]],
    tokens: int,
    heads: int,
    freqs: Tensor,
    norm_weights: tuple[Tensor, Tensor],
    *,
    key_center: Tensor | None,
    value_scale: Tensor | None,
    eps: float = 1e-6,
    key_bias: Tensor | None = None,
    block_len: Tensor | None = None,
    rotate: bool = False,
    balance: bool | Tensor = False,
    impl: str | None = None,
) -> tuple[Any, ...]:
    """Normalise, rotate, quantise and pool the chunks of a fused QKV projection.

    Q, K and V never exist whole: beside the INT8 operands there is one chunk, and a float32 copy of
    a few of its rows.

    Args:
        chunks: returns an iterable of bfloat16 [..., M, 3 H D], rows [q | k | v] before norm and
            RoPE, in token order; all but the last have a multiple of 64 rows. Called once, or
            twice without statistics.
        tokens, heads: T and H.
        freqs: float32 [T, r/2, 2, 2], see `reference.norm_rope`.
        norm_weights: of Q and K, [D].
        key_center, value_scale: float32 [H, D], those of an earlier step; unless both are given
            (and the factors of `balance`) they are measured first, in a pass of their own.
        eps: of the norm.
        key_bias: float [1, T], natural log; touches no statistic.
        block_len, rotate: as `quantize_qkv`.
        balance: False; the factors of an earlier step, float32 [H, D]; or True to measure them.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        The operands (B = 1), and this step's statistics for the next: the mean of the live keys and
        1.1 absmax / 127 of the live values, float32 [H, D]; with `balance` the factors used too.

    Raises:
        ValueError: a chunk's shape, type, device or start is wrong, or they do not cover T.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: bfloat16 after the norm and after RoPE, as the unfused operations round.

    Source: INT8 specification 2.1, 2.10.
    """
    call = AttentionCall(
        batch=1,
        query_tokens=tokens,
        key_tokens=tokens,
        heads=heads,
        head_dim=norm_weights[0].shape[-1],
        dtype=torch.bfloat16,
        device_type=freqs.device.type,
        capability=_dispatch.capability(freqs.device),
        key_heads=heads,
        key_bias=key_bias is not None,
        requires_grad=_dispatch.needs_grad(*norm_weights, freqs),
        variant=variant(rotate, balance is not False),
    )
    choice = _dispatch.pick("qkv_producer", call, impl)
    choice.record()
    return choice.run.chunked(
        chunks,
        tokens,
        heads,
        freqs,
        norm_weights,
        key_center,
        value_scale,
        eps,
        key_bias,
        block_len,
        rotate,
        balance,
    )


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm weights of Q and K, and the rotations float32 [T, r/2, 2, 2]."""

    weights: tuple[Tensor, Tensor]
    freqs: Tensor
    eps: float

    def query(self, rows: Tensor, first: int) -> Tensor:
        """Return rows [M, H, D] of Q, from token `first` on, after norm and RoPE."""
        return norm_rope(rows, self.weights[0], self.freqs[first : first + len(rows)], self.eps)

    def key(self, rows: Tensor, first: int) -> Tensor:
        """Return rows of K after norm and RoPE."""
        return norm_rope(rows, self.weights[1], self.freqs[first : first + len(rows)], self.eps)


class _Carriers:
    """Operands being filled, a run of rows at a time."""

    def __init__(
        self,
        batch: int,
        heads: int,
        head_dim: int,
        tokens: int,
        block_len: Tensor | None,
        device: torch.device,
        rotate: bool,
    ):
        self.tokens, self.rotate, self.short = tokens, rotate, block_len is not None
        self.lengths = live_lengths(block_len, tokens, device)
        self.live = live_rows(self.lengths)
        blocks = self.lengths.numel()
        shape = (batch, heads, blocks * BLOCK, head_dim)
        self.query, self.key, self.value = (
            torch.empty(shape, dtype=torch.int8, device=device) for _ in range(3)
        )
        self.query_scale, self.key_scale = (
            torch.empty(shape[:3], dtype=torch.float32, device=device) for _ in range(2)
        )
        self.query_sums, self.key_sums = (
            torch.empty((batch, heads, blocks, head_dim), dtype=torch.float32, device=device)
            for _ in range(2)
        )
        self.value_sums = torch.empty_like(self.query_sums, dtype=torch.bfloat16)
        self.value_peak = torch.zeros((batch, heads, head_dim), dtype=torch.float32, device=device)
        self.squares: tuple[Tensor, Tensor] | None = None
        self.factor: Tensor | None = None
        """Balancing of the channels, float32 [B, H, D], to be set before rows are quantised."""

    @staticmethod
    def step(heads: int, head_dim: int) -> int:
        """Return how many rows to widen to float32 at once, whole blocks."""
        return max(1, STEP_BYTES // (heads * head_dim * 4 * BLOCK)) * BLOCK

    def _rows(self, x: Tensor, first: int) -> Tensor:
        """Return rows [M, H, D] from token `first` on, in whole blocks, dead ones zero."""
        padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -x.shape[0] % BLOCK))
        live = self.live[first : first + padded.shape[0]]
        # Not a product: a dead row may hold anything.
        return padded.masked_fill(~live[:, None, None], 0.0)

    def _store_sums(self, sums: Tensor, sample: int, first: int, x: Tensor) -> None:
        """Store the block sums of rows x."""
        part = x.unflatten(0, (-1, BLOCK)).sum(1).transpose(0, 1)
        block = first // BLOCK
        sums[sample, :, block : block + part.shape[1]] = part.to(sums.dtype)

    def harvest(
        self, sample: int, first: int, key: Tensor, value: Tensor, norm: Norm | None
    ) -> None:
        """Take the block sums of K and V and the largest values of V."""
        if norm is not None:
            key = norm.key(key, first)
        self._store_sums(self.key_sums, sample, first, self._rows(key, first))
        rows = self._rows(value, first)
        self._store_sums(self.value_sums, sample, first, rows)
        peak = self.value_peak[sample]
        torch.maximum(peak, rows.abs().amax(0), out=peak)

    def measure(
        self, sample: int, first: int, query: Tensor, key: Tensor, norm: Norm | None
    ) -> None:
        """Take the block sums of the squares of Q and K."""
        if norm is not None:
            query, key = norm.query(query, first), norm.key(key, first)
        if self.squares is None:
            self.squares = torch.empty_like(self.query_sums), torch.empty_like(self.key_sums)
        for sums, rows in zip(self.squares, (query, key), strict=True):
            self._store_sums(sums, sample, first, self._rows(rows, first).square())

    def measured_factor(self) -> Tensor:
        """Return the balancing that the rows measured ask for, [B, H, D]."""
        assert self.squares is not None
        total = self.lengths.sum()
        query, key = (squares.sum(2) / total for squares in self.squares)
        key = (key - (self.key_sums.sum(2) / total).square()).clamp_min(0.0)
        return balance_factors(query, key)

    def quantise(
        self,
        sample: int,
        first: int,
        rows: tuple[Tensor, Tensor, Tensor],
        key_center: Tensor,
        value_scale: Tensor,
        norm: Norm | None,
        statistics: bool = False,
    ) -> None:
        """Fill in the integers of some rows and the block sums of Q; `statistics`: harvest them."""
        if statistics:
            self.harvest(sample, first, rows[1], rows[2], norm)
        if norm is not None:
            rows = norm.query(rows[0], first), norm.key(rows[1], first), rows[2]
        query, key, value = (self._rows(x, first) for x in rows)
        if self.factor is not None:
            factor = self.factor[sample]
            query, key, key_center = query * factor, key / factor, key_center / factor
        place = slice(first, first + query.shape[0])
        live = self.live[place]
        self._store_sums(self.query_sums, sample, first, query)
        centred = (key - key_center).masked_fill(~live[:, None, None], 0.0)
        for x, carrier, scales in (
            (query, self.query, self.query_scale),
            (centred, self.key, self.key_scale),
        ):
            integers, scale = quantize_rows(basis(x, self.rotate))
            carrier[sample, :, place] = integers.transpose(0, 1)
            scales[sample, :, place] = scale.masked_fill(~live[:, None], 0.0).mT
        integers = (value / value_scale).round().clamp(-127, 127).to(torch.int8)
        self.value[sample, :, place] = integers.transpose(0, 1)

    def key_means(self) -> Tensor:
        """Return the block means of K."""
        return self.key_sums / self.lengths.float()[:, None]

    def finish(
        self, key_center: Tensor, value_scale: Tensor, key_bias: Tensor | None
    ) -> QuantizedQKV:
        """Quantise the block means and close the operands."""
        query_means = self.query_sums / self.lengths.float()[:, None]
        key_means = self.key_means()
        if self.factor is not None:
            key_means = key_means / self.factor[:, :, None]
            key_center = key_center / self.factor
        key_mean, key_var = block_statistics(key_means)
        centroid, centroid_scale = quantize_rows(basis(query_means, self.rotate))
        pooled, pooled_scale = quantize_rows(
            basis(key_means - key_mean[:, :, None], self.rotate), POOLED_FLOOR
        )
        return QuantizedQKV(
            query=self.query,
            query_scale=self.query_scale,
            key=self.key,
            key_scale=self.key_scale,
            key_bias=bias_in_log2(key_bias, self.live, self.query.shape[0], self.tokens),
            value=self.value,
            value_scale=value_scale,
            query_means=query_means,
            key_means=key_means,
            value_sums=self.value_sums,
            centroid=centroid,
            centroid_scale=centroid_scale,
            pooled=pooled,
            pooled_scale=pooled_scale,
            key_mean=key_mean,
            key_var=key_var,
            key_center=key_center,
            shift=basis(key_mean - key_center, self.rotate),
            lengths=self.lengths,
            tokens=self.tokens,
            rotated=self.rotate,
            biased=self.short or key_bias is not None,
        )


def rotation_terms(given: torch.dtype, balanced: bool) -> tuple[torch.dtype, int]:
    """Return the type of a rotation's product, and how many terms of it hold a row."""
    if balanced or given == torch.float32:
        return torch.bfloat16, 3
    return given, 1


class _TritonCarriers(_Carriers):
    """Operands filled by kernels, each run of rows in one launch."""

    @staticmethod
    def step(heads: int, head_dim: int) -> int:
        """Return how many rows a launch takes: all, for kernels widen nothing in memory."""
        return BLOCK * 2**20

    def harvest(
        self, sample: int, first: int, key: Tensor, value: Tensor, norm: Norm | None
    ) -> None:
        """Take the block sums of K and V and the largest values of V."""
        from solspark.kernels.qkv_producer import launch_harvest

        peaks = launch_harvest(
            _checks.last_dim_contiguous(key),
            _checks.last_dim_contiguous(value),
            self.lengths,
            self.key_sums[sample],
            self.value_sums[sample],
            first // BLOCK,
            self._norm_of(norm, first, len(key)),
        )
        self._raise_peak(sample, peaks)

    def _raise_peak(self, sample: int, peaks: Tensor) -> None:
        """Take the largest values of V of some blocks, [H, M / 64, D]."""
        peak = self.value_peak[sample]
        torch.maximum(peak, peaks.amax(1), out=peak)

    def measure(
        self, sample: int, first: int, query: Tensor, key: Tensor, norm: Norm | None
    ) -> None:
        """Take the block sums of the squares of Q and K."""
        from solspark.kernels.qkv_producer import launch_energy

        if self.squares is None:
            self.squares = torch.empty_like(self.query_sums), torch.empty_like(self.key_sums)
        for sums, rows in zip(self.squares, (query, key), strict=True):
            launch_energy(
                _checks.last_dim_contiguous(rows),
                self.lengths,
                sums[sample],
                first // BLOCK,
                self._norm_of(norm, first, len(rows)),
                query=rows is query,
            )

    def quantise(
        self,
        sample: int,
        first: int,
        rows: tuple[Tensor, Tensor, Tensor],
        key_center: Tensor,
        value_scale: Tensor,
        norm: Norm | None,
        statistics: bool = False,
    ) -> None:
        """Fill in the integers of some rows and the block sums of Q; `statistics`: harvest them."""
        from solspark.kernels.qkv_producer import launch_quantise

        query, key, value = (_checks.last_dim_contiguous(item) for item in rows)
        factor = matrix = None
        if self.factor is not None:
            factor = self.factor[sample].contiguous()
            key_center = key_center / factor
        given = torch.bfloat16 if norm is not None else query.dtype
        kind, parts = rotation_terms(given, factor is not None)
        if self.rotate:
            matrix = rotation_matrix(query.shape[-1], 1, kind, query.device)
        peaks = launch_quantise(
            (query, key, value),
            self.lengths,
            basis(key_center, self.rotate).contiguous(),
            value_scale.contiguous(),
            (self.query[sample], self.query_scale[sample]),
            (self.key[sample], self.key_scale[sample]),
            self.value[sample],
            self.query_sums[sample],
            (self.key_sums[sample], self.value_sums[sample]) if statistics else None,
            first // BLOCK,
            self._norm_of(norm, first, len(query)),
            factor=factor,
            matrix=matrix,
            parts=parts,
        )
        if peaks is not None:
            self._raise_peak(sample, peaks)

    def _norm_of(self, norm: Norm | None, first: int, rows: int) -> Any:
        """Return what the kernels need to know of norm and RoPE, for some rows."""
        from solspark.kernels.qkv_producer import Norm as KernelNorm

        if norm is None:
            return None
        query_weight, key_weight = (
            weight.to(torch.bfloat16).contiguous() for weight in norm.weights
        )
        freqs = norm.freqs[first : first + rows].float()
        own, cross = (
            torch.cat([freqs[..., 0, i], freqs[..., 1, 1 - i]], -1).contiguous() for i in (0, 1)
        )
        return KernelNorm(query_weight, key_weight, own, cross, norm.eps)


class _Producer:
    """Produce operands: called with whole tensors, `chunked` with chunks of the projection."""

    def __init__(self, carriers: type[_Carriers]):
        self.carriers = carriers

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor | None,
        block_len: Tensor | None,
        key_center: Tensor | None,
        value_scale: Tensor | None,
        rotate: bool,
        balance: bool = False,
    ) -> QuantizedQKV:
        """Take the statistics in one pass over K and V and quantise in another."""
        batch, tokens, heads, head_dim = query.shape
        carriers = self.carriers(batch, heads, head_dim, tokens, block_len, query.device, rotate)
        step = carriers.step(heads, head_dim)
        places = [
            (sample, first, slice(first, first + step))
            for sample in range(batch)
            for first in range(0, tokens, step)
        ]
        for sample, first, rows in places:
            carriers.harvest(sample, first, key[sample, rows], value[sample, rows], None)
            if balance:
                carriers.measure(sample, first, query[sample, rows], key[sample, rows], None)
        if balance:
            carriers.factor = carriers.measured_factor()
        if key_center is None:
            key_center = block_statistics(carriers.key_means())[0]
        if value_scale is None:
            value_scale = (carriers.value_peak / 127.0).clamp_min(SCALE_FLOOR)
        key_center, value_scale = key_center.float(), value_scale.float()
        for sample, first, rows in places:
            operands = (query[sample, rows], key[sample, rows], value[sample, rows])
            carriers.quantise(
                sample, first, operands, key_center[sample], value_scale[sample], None
            )
        return carriers.finish(key_center, value_scale, key_bias)

    def chunked(
        self,
        chunks: Callable[[], Iterable[Tensor]],
        tokens: int,
        heads: int,
        freqs: Tensor,
        norm_weights: tuple[Tensor, Tensor],
        key_center: Tensor | None,
        value_scale: Tensor | None,
        eps: float,
        key_bias: Tensor | None,
        block_len: Tensor | None,
        rotate: bool,
        balance: bool | Tensor = False,
    ) -> tuple[Any, ...]:
        """Take the chunks once with statistics, twice without."""
        head_dim = norm_weights[0].shape[-1]
        carriers = self.carriers(1, heads, head_dim, tokens, block_len, freqs.device, rotate)
        live_tokens = carriers.lengths.sum()

        norm = Norm(norm_weights, freqs, eps)
        step = carriers.step(heads, head_dim)

        def measured() -> tuple[Tensor, Tensor]:
            center = carriers.key_sums[0].sum(1) / live_tokens
            scale = (carriers.value_peak[0] / 127.0 * VALUE_MARGIN).clamp_min(SCALE_FLOOR)
            return center, scale

        known = key_center is None or value_scale is None or balance is True
        if known:
            for first, fused in _walk(chunks(), tokens, heads, head_dim, step, freqs.device):
                query, key, value = fused.unbind(1)
                carriers.harvest(0, first, key, value, norm)
                if balance is not False:
                    carriers.measure(0, first, query, key, norm)
            key_center, value_scale = measured()
            if balance is not False:
                carriers.factor = carriers.measured_factor()
        else:
            assert key_center is not None and value_scale is not None
            key_center = key_center.float()
            value_scale = value_scale.float().clamp_min(SCALE_FLOOR)
            if isinstance(balance, Tensor):
                # Not measured again: loud channels are the model's, and other factors cost bits.
                carriers.factor = balance.float()[None]
        for first, fused in _walk(chunks(), tokens, heads, head_dim, step, freqs.device):
            query, key, value = fused.unbind(1)
            carriers.quantise(
                0, first, (query, key, value), key_center, value_scale, norm, not known
            )
        following = measured()
        # With them the factors, where there are any: those of the one sample.
        following += () if carriers.factor is None else tuple(carriers.factor)
        return carriers.finish(key_center[None], value_scale[None], key_bias), *following


def _walk(
    chunks: Iterable[Tensor],
    tokens: int,
    heads: int,
    head_dim: int,
    step: int,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first token, rows [M, 3, H, D]) a few blocks at a time, checking every chunk."""
    width = 3 * heads * head_dim
    first = 0
    for chunk in chunks:
        fits = (
            isinstance(chunk, Tensor)
            and chunk.ndim >= 2
            and chunk.shape[-1] == width
            and chunk.dtype == torch.bfloat16
            and chunk.device == device
        )
        if not fits:
            came = (
                f"{chunk.dtype} {tuple(chunk.shape)} on {chunk.device}"
                if isinstance(chunk, Tensor)
                else type(chunk).__name__
            )
            raise ValueError(
                f"qkv_chunks: chunks must be torch.bfloat16 [..., M, {width}] on {device}, "
                f"got {came}"
            )
        _refuse_grad(chunk)
        rows = chunk.reshape(-1, 3, heads, head_dim)
        if not len(rows):
            continue
        if first % BLOCK:
            raise ValueError(
                f"qkv_chunks: every chunk must start at a multiple of {BLOCK} tokens, got a start "
                f"of {first}: only the last one may be ragged"
            )
        if first + len(rows) > tokens:
            raise ValueError(
                f"qkv_chunks: expected chunks that cover t = {tokens} tokens, the chunks cover "
                f"{first + len(rows)} or more"
            )
        for offset in range(0, len(rows), step):
            yield first + offset, rows[offset : offset + step]
        first += len(rows)
    if first != tokens:
        raise ValueError(
            f"qkv_chunks: expected chunks that cover t = {tokens} tokens, the chunks cover {first}"
        )


def _refuse_grad(chunk: Tensor) -> None:
    """Raise where autograd would expect gradients of a chunk: rounding has none."""
    if _dispatch.needs_grad(chunk):
        raise ValueError(
            "qkv_chunks: expected chunks without gradients, INT8 attention has no backward pass"
        )


def _reasons(call: AttentionCall) -> list[str]:
    return ["it has no backward pass"] if call.requires_grad else []


def _triton_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call, head_dims=(128,))


_dispatch.register("qkv_producer", "eager", _reasons, _Producer(_Carriers))
_dispatch.register("qkv_producer", "triton", _triton_reasons, _Producer(_TritonCarriers))
