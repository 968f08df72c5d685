"""Second moments of Q and K and the features for reblocking, on any device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from solspark import _checks
from solspark.errors import UnsupportedError
from solspark.ops import _dispatch, _triton
from solspark.ops._reblock_eager import score_dtype
from solspark.ops.reblock import squared_norms
from solspark.reference.second_moments import (
    DEFAULT_RIDGE,
    ESTIMATORS,
    FACTORS,
    LAYOUT_REUSES,
    M2_SIDES,
    MOMENT_MODES,
    half_range_scale,
    sample_tokens,
)
from solspark.reference.second_moments import metric_factor as reference_factor
from solspark.reference.tree_numerics import inverse_norms
from solspark.types import BLOCK, AttentionCall, TokenGrid

__all__ = ["features", "metric_factor", "reblock_features", "second_moments"]

CHUNK_TOKENS = 4096
"""Rows of every head in flight for the estimators that read all; a multiple of the block."""


def second_moments(
    x: Tensor,
    *,
    grid: TokenGrid,
    mode: str = "raw",
    estimator: str = "hilbert_midpoint",
    ridge: float = DEFAULT_RIDGE,
    impl: str | None = None,
) -> Tensor:
    """Estimate the second moment of the rows of every head, and add a ridge.

        M = sum_s w_s x_s x_s^T;   M + ridge * trace(M) / D * I

    Args:
        x: [B, V, H, D], V = grid.tokens, float16, bfloat16, float32 or float64, any strides.
        grid: frames, height, width.
        mode: "raw", or "unit" to divide every row by its norm first.
        estimator: "hilbert_midpoint" reads V // 64 rows, evenly along the Hilbert order;
            "flat64_midpoint_1", "_2", "_4" that many rows of every raster block of 64;
            "flat64_block_mean" the means of those blocks; "flat64_mean_diag" is that with the exact
            diagonal; "full" reads every row.
        ridge: share of the mean diagonal that is added to the diagonal.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        float32 [B, H, D, D] (float64 for float64), symmetric.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: summed in float64 on the CPU, in float32 elsewhere.

    Source: spec/spark.md section 2.
    """
    _check_rows("x", x, grid)
    _checks.check_choice("mode", mode, MOMENT_MODES)
    _checks.check_choice("estimator", estimator, ESTIMATORS)
    ridge = _checks.check_float("ridge", ridge)
    if ridge < 0:
        raise ValueError(f"ridge: expected a number >= 0, got {ridge}")
    return _moments_of([x], grid, mode, estimator, ridge, impl)[0]


def _moments_of(
    tensors: Sequence[Tensor],
    grid: TokenGrid,
    mode: str,
    estimator: str,
    ridge: float,
    impl: str | None,
) -> Tensor:
    """Return the moments [S, B, H, D, D] of S tensors alike, after the checks."""
    choice = _choose(_dispatch.describe(None, tensors[0]), mode, estimator, impl)
    rows = [x.detach() for x in tensors]
    run = _triton.entry(_moments_operator, _moments)
    moments = run(rows, list(grid.as_tuple()), mode, estimator, ridge, choice.name)
    choice.record()
    return moments


def metric_factor(moments: Tensor, *, kind: str = "cholesky", impl: str | None = None) -> Tensor:
    """Factor every moment, F F^T = M.

        cholesky: lower triangular;  eigh: V sqrt(max(lambda, 0))

    Args:
        moments: float32 or float64 [B, H, D, D], symmetric.
        kind: "cholesky" or "eigh". Both give the same inner products. Without a ridge the moment of
            few samples is singular, and only "eigh" factors it.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        The same shape and dtype. A moment whose trace is zero has the factor zero: nobody looks,
        all are alike. Where Cholesky fails, the factor is the root of the diagonal.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: in the type of the moments. Nothing waits for the device.

    Source: spec/spark.md section 2.
    """
    _checks.check_tensor("moments", moments, 4, "[B, H, D, D]")
    _checks.check_dtype("moments", moments, (torch.float32, torch.float64))
    _checks.check_choice("kind", kind, FACTORS)
    if moments.shape[2] != moments.shape[3]:
        raise ValueError(f"moments: expected [B, H, D, D], got {tuple(moments.shape)}")
    call = _dispatch.describe(None, moments)
    if kind == "eigh" and impl is None:
        impl = "eager"
    choice = _dispatch.pick("metric_factor", call, impl)
    if kind == "eigh" and choice.name != "eager":
        raise UnsupportedError(f"metric_factor with impl={impl!r}", ["kind='eigh' has no kernel"])
    factor = choice.run(moments.detach(), kind)
    choice.record()
    return factor


def features(
    x: Tensor,
    factor: Tensor,
    *,
    out: Tensor | None = None,
    squares: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Transform the rows of every head by the factor of the opposite moment, x F.

    Args:
        x: [B, V, H, D], any floating type, any strides.
        factor: float32 (float64) [B, H, D, D]; it is rounded to the type of x, for float16 after a
            power of two a head that keeps the result in range.
        out: [B, H, V, D] in the type of x, contiguous: written and returned.
        squares: float32 [B, H, V], contiguous: takes the squared norms of the result, which
            `reblock` wants and which are free here.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        [B, H, V, D] in the type of x: the layout of the trees.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: accumulated in float32 (float64), rounded once.

    Source: spec/spark.md section 2.
    """
    _checks.check_tensor("x", x, 4, "[B, V, H, D]")
    _checks.check_dtype("x", x)
    batch, tokens, heads, dim = x.shape
    _checks.check_tensor("factor", factor, 4, "[B, H, D, D]")
    if tuple(factor.shape) != (batch, heads, dim, dim):
        raise ValueError(f"factor: expected {(batch, heads, dim, dim)}, got {tuple(factor.shape)}")
    if out is None:
        out = x.new_empty((batch, heads, tokens, dim))
    elif out.shape != (batch, heads, tokens, dim) or out.dtype != x.dtype:
        raise ValueError(
            f"out: expected {x.dtype} {(batch, heads, tokens, dim)}, got {out.dtype} "
            f"{tuple(out.shape)}"
        )
    elif not out.is_contiguous():
        raise ValueError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    if squares is not None:
        expected = (torch.float32, (batch, heads, tokens), True)
        if (squares.dtype, tuple(squares.shape), squares.is_contiguous()) != expected:
            raise ValueError(
                f"squares: expected a contiguous torch.float32 {(batch, heads, tokens)}, got "
                f"{squares.dtype} {tuple(squares.shape)}"
            )
    choice = _dispatch.pick("features", _dispatch.describe(None, x), impl)
    if x.dtype == torch.float16:
        factor = factor * half_range_scale(factor)
    choice.run(x.detach(), factor.to(x.dtype), out, squares)
    choice.record()
    return out


def reblock_features(
    query_video: Tensor,
    key_video: Tensor,
    *,
    grid: TokenGrid,
    m2_side: str = "both",
    layout_reuse: str = "independent",
    estimator: str = "hilbert_midpoint",
    mode: str = "raw",
    ridge: float = DEFAULT_RIDGE,
    factor: str = "cholesky",
    out: Tensor | None = None,
    squares: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the features from which the trees of Q and of K are grown.

        X_K = K L_Q,   X_Q = Q L_K

    Args:
        query_video: [B, V, H, D], rows of the video only, after rotary embedding.
        key_video: [B, V, H, D].
        grid: frames, height, width; V = grid.tokens.
        m2_side: the side or sides that are transformed: "both", "query", "key", "none".
        layout_reuse: "q_from_k" needs no tree of Q, "k_from_q" none of K; that side is None, and
            the moment that only it needs is not built.
        estimator, mode, ridge: see `second_moments`.
        factor: "cholesky" or "eigh".
        out: [S, B, H, V, D], contiguous, for the S sides that are built, keys first: what a tree
            over all of them reads without a copy. The result is views of it.
        squares: float32 [S, B, H, V], contiguous: takes the squared norms of `out`, which `reblock`
            wants.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        (query features, key features), each [B, H, V, D] in the input type, or None.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: the implementation asked for cannot serve.

    Source: spec/spark.md section 2.
    """
    _check_rows("query_video", query_video, grid)
    _check_rows("key_video", key_video, grid)
    _checks.check_same("key_video", key_video, "query_video", query_video, shape=True)
    _checks.check_choice("m2_side", m2_side, M2_SIDES)
    _checks.check_choice("layout_reuse", layout_reuse, LAYOUT_REUSES)
    _checks.check_choice("factor", factor, FACTORS)
    rows = {"key": (key_video, query_video), "query": (query_video, key_video)}
    sides = [
        side
        for side, follower in (("key", "k_from_q"), ("query", "q_from_k"))
        if layout_reuse != follower
    ]
    batch, tokens, heads, dim = query_video.shape
    shape = (len(sides), batch, heads, tokens, dim)
    if out is None:
        out = query_video.new_empty(shape)
    elif tuple(out.shape) != shape or out.dtype != query_video.dtype:
        raise ValueError(
            f"out: expected {query_video.dtype} {shape}, got {out.dtype} {tuple(out.shape)}"
        )
    if squares is not None and tuple(squares.shape) != shape[:-1]:
        raise ValueError(f"squares: expected {shape[:-1]}, got {tuple(squares.shape)}")
    transformed = [side for side in sides if m2_side in ("both", side)]
    if transformed:
        # Both moments and both factors at once: a side alone leaves half of the device idle.
        others = [rows[side][1] for side in transformed]
        moments = _moments_of(others, grid, mode, estimator, ridge, impl)
        factors = metric_factor(moments.flatten(0, 1), kind=factor).view(moments.shape)
        roots = dict(zip(transformed, factors, strict=True))
    built: dict[str, Tensor] = {}
    for index, side in enumerate(sides):
        own = rows[side][0]
        built[side] = out[index]
        if side in transformed:
            square = None if squares is None else squares[index]
            features(own, roots[side], out=out[index], squares=square, impl=impl)
        else:
            out[index].copy_(own.detach().transpose(1, 2))
            if squares is not None:
                squares[index] = squared_norms(out[index])
    return built.get("query"), built.get("key")


def _check_rows(name: str, x: Tensor, grid: TokenGrid) -> None:
    """Raise unless x is [B, V, H, D] for the grid."""
    _checks.check_tensor(name, x, 4, "[B, V, H, D]")
    _checks.check_dtype(name, x)
    if not isinstance(grid, TokenGrid):
        raise TypeError(f"grid: expected a TokenGrid, got {grid!r}")
    if x.shape[1] != grid.tokens:
        raise ValueError(
            f"{name}: expected V = {grid.tokens} rows for grid {grid.as_tuple()}, got {x.shape[1]}"
        )


@functools.lru_cache(maxsize=64)
def samples_on(grid: TokenGrid, estimator: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sampled ids and float64 weights on a device; moved there once."""
    ids, weights = sample_tokens(grid, estimator)
    weights = weights if device.type != "mps" else weights.float()
    return ids.to(device), weights.to(device)


def add_ridge(moments: Tensor, ridge: float) -> Tensor:
    """Return the moments with ridge * mean diagonal added to the diagonal."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    return moments + torch.diag_embed((ridge * diagonal.mean(-1, keepdim=True)).expand_as(diagonal))


def _eager_moments(x: Tensor, grid: TokenGrid, mode: str, estimator: str, ridge: float) -> Tensor:
    """Sum over samples, or over chunks of whole raster blocks."""
    wide = torch.float64 if x.dtype == torch.float64 else score_dtype(x.device)

    def prepare(rows: Tensor) -> Tensor:
        rows = rows.transpose(1, 2)
        scale = inverse_norms(rows).to(wide)[..., None] if mode == "unit" else 1.0
        return rows.to(wide) * scale

    if estimator in ("flat64_block_mean", "flat64_mean_diag"):
        with_diagonal = estimator == "flat64_mean_diag"
        parts = (_block_moments(prepare(rows), with_diagonal) for rows in x.split(CHUNK_TOKENS, 1))
        moments = sum(parts, start=torch.zeros((), dtype=wide, device=x.device)) / grid.tokens
    elif estimator == "full":
        parts = (_outer(prepare(rows)) for rows in x.split(CHUNK_TOKENS, 1))
        moments = sum(parts, start=torch.zeros((), dtype=wide, device=x.device)) / grid.tokens
    else:
        ids, weights = samples_on(grid, estimator, x.device)
        rows = prepare(x.index_select(1, ids))
        moments = (rows * weights.to(wide)[:, None]).mT @ rows
    moments = add_ridge((moments + moments.mT) / 2, ridge)
    return moments if x.dtype == torch.float64 else moments.float()


def _outer(rows: Tensor) -> Tensor:
    """Return sum x x^T of rows [B, H, n, D]."""
    return rows.mT @ rows


def _block_moments(rows: Tensor, with_diagonal: bool) -> Tensor:
    """Return sum over raster blocks of n mu mu^T, and the spread inside them on the diagonal."""
    whole = rows.shape[2] // BLOCK * BLOCK
    total = torch.zeros((), dtype=rows.dtype, device=rows.device)
    for part, length in ((rows[:, :, :whole], BLOCK), (rows[:, :, whole:], rows.shape[2] - whole)):
        if part.shape[2] == 0:
            continue
        blocks = part.unflatten(2, (-1, length))
        means = blocks.mean(3)
        total = total + length * _outer(means)
        if with_diagonal:
            spread = (blocks - means[:, :, :, None]).square().sum((2, 3))
            total = total + torch.diag_embed(spread)
    return total


def _eager_features(x: Tensor, factor: Tensor, out: Tensor, squares: Tensor | None) -> None:
    """Multiply head by head, widened where the device would round half-precision sums."""
    for b in range(x.shape[0]):
        for h in range(x.shape[2]):
            rows, own = x[b, :, h], factor[b, h]
            if x.device.type == "cpu" and x.dtype.itemsize == 2:
                rows, own = rows.float(), own.float()
            out[b, h] = rows @ own
            if squares is not None:
                squares[b, h] = squared_norms(out[b, h])


def _choose(call: AttentionCall, mode: str, estimator: str, impl: str | None) -> _dispatch.Choice:
    """Choose for the shapes, then decline the modes and estimators that have no kernel."""
    missing = []
    if mode != "raw":
        missing.append(f"mode={mode!r} has no kernel")
    if estimator not in ("hilbert_midpoint", "full"):
        missing.append(f"estimator={estimator!r} has no kernel")
    if missing and impl is None:
        obstacles = (*_dispatch.reasons("second_moments", "triton", call), *missing)
        chosen = _dispatch.pick("second_moments", call, "eager")
        return replace(chosen, declined=(("triton", obstacles),))
    chosen = _dispatch.pick("second_moments", call, impl)
    if missing and chosen.name != "eager":
        raise UnsupportedError(f"second_moments with impl={impl!r}", missing)
    return chosen


def _moments(
    tensors: list[Tensor],
    grid: list[int],
    mode: str,
    estimator: str,
    ridge: float,
    implementation: str,
) -> Tensor:
    """Run the chosen implementation: one node for torch.compile."""
    own = TokenGrid(*grid)
    if implementation == "triton":
        return _triton_moments(tensors, own, estimator, ridge)
    return torch.stack([_eager_moments(x, own, mode, estimator, ridge) for x in tensors])


_moments_operator = torch.library.custom_op("solspark::second_moments", _moments, mutates_args=())


@_moments_operator.register_fake
def _(tensors, grid, mode, estimator, ridge, implementation):
    x = tensors[0]
    batch, _, heads, dim = x.shape
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((len(tensors), batch, heads, dim, dim), dtype=dtype)


@functools.lru_cache(maxsize=64)
def _sample_ids(grid: TokenGrid, estimator: str, device: torch.device) -> Tensor:
    """Return the int32 sampled ids on a device; moved there once."""
    return sample_tokens(grid, estimator)[0].to(device=device, dtype=torch.int32)


def _triton_moments(
    tensors: Sequence[Tensor], grid: TokenGrid, estimator: str, ridge: float
) -> Tensor:
    """Launch the kernels."""
    from solspark.kernels.second_moments import launch_second_moments

    rows = [_checks.last_dim_contiguous(x) for x in tensors]
    ids, count = None, grid.tokens
    if estimator != "full":
        ids = _sample_ids(grid, estimator, rows[0].device)
        count = ids.shape[0]
    with torch.cuda.device_of(rows[0]):
        return launch_second_moments(rows, ids, count, ridge)


def _triton_features(x: Tensor, factor: Tensor, out: Tensor, squares: Tensor | None) -> None:
    """Launch; inside a compiled graph through the operator, to which empty squares are none."""
    run = _triton.entry(_features_operator, _launch_features)
    run(x, factor, out, out.new_empty(0) if squares is None else squares)


def _launch_features(x: Tensor, factor: Tensor, out: Tensor, squares: Tensor) -> None:
    """Launch the kernel; empty squares are not wanted."""
    from solspark.kernels.second_moments import launch_features

    x = _checks.last_dim_contiguous(x)
    with torch.cuda.device_of(x):
        launch_features(x, factor.contiguous(), out, squares if squares.numel() else None)


_features_operator = torch.library.custom_op(
    "solspark::reblock_features", _launch_features, mutates_args=("out", "squares")
)


@_features_operator.register_fake
def _(x, factor, out, squares):
    return None


def _eager_factor(moments: Tensor, kind: str) -> Tensor:
    """Factor by torch."""
    return reference_factor(moments, kind=kind)


def _triton_factor(moments: Tensor, kind: str) -> Tensor:
    """Launch; inside a compiled graph through the operator."""
    return _triton.entry(_cholesky_operator, _launch_cholesky)(moments)


def _launch_cholesky(moments: Tensor) -> Tensor:
    """Launch the kernel."""
    from solspark.kernels.second_moments import launch_cholesky

    with torch.cuda.device_of(moments):
        return launch_cholesky(moments.contiguous())


_cholesky_operator = torch.library.custom_op(
    "solspark::cholesky", _launch_cholesky, mutates_args=()
)


@_cholesky_operator.register_fake
def _(moments):
    return moments.new_empty(moments.shape)


def _half_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call, dtypes=(torch.float16, torch.bfloat16))


def _factor_reasons(call: AttentionCall) -> list[str]:
    return _triton.obstacles(call, dtypes=(torch.float32,))


_dispatch.register("second_moments", "eager", _dispatch.never_declines, _eager_moments)
_dispatch.register("second_moments", "triton", _half_reasons, _triton_moments)
_dispatch.register("metric_factor", "eager", _dispatch.never_declines, _eager_factor)
_dispatch.register("metric_factor", "triton", _factor_reasons, _triton_factor)
_dispatch.register("features", "eager", _dispatch.never_declines, _eager_features)
_dispatch.register("features", "triton", _half_reasons, _triton_features)
