"""Group video tokens into blocks of 64 by a landmark tree, on any device."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from solspark.errors import UnsupportedError
from solspark.ops import _dispatch, _triton
from solspark.ops._reblock_eager import run_eager
from solspark.ops._reblock_triton import option_reasons, run_triton, triton_reasons
from solspark.reference.hierarchy import CapacityHierarchy, capacity_hierarchy
from solspark.reference.reblock import reblock as reference_reblock
from solspark.reference.reblock_options import ReblockOptions, ReblockResult
from solspark.reference.reblock_options import as_result as wrap_permutation
from solspark.reference.tree_numerics import norms_to_inverse
from solspark.reference.tree_numerics import squared_norms as squares_in_float64
from solspark.types import BLOCK, AttentionCall, TokenGrid

__all__ = [
    "CapacityHierarchy",
    "ReblockOptions",
    "ReblockResult",
    "capacity_hierarchy",
    "inverse_norms",
    "reblock",
    "reblock_by_reference",
    "resolve_options",
    "squared_norms",
    "wrap_permutation",
]

OPTION_NAMES = tuple(field.name for field in fields(ReblockOptions))


def resolve_options(**options: Any) -> ReblockOptions:
    """Return ReblockOptions from keywords, `fanout` being another name of `max_children`.

    Raises:
        TypeError: an unknown option.
        ValueError: a bad value, or fanout and max_children that differ.
    """
    fanout = options.pop("fanout", None)
    if options.get("max_children", 0) is None:
        del options["max_children"]
    unknown = sorted(set(options) - set(OPTION_NAMES))
    if unknown:
        raise TypeError(f"{unknown[0]}: reblock has no option of this name")
    if fanout is not None:
        if options.get("max_children", fanout) != fanout:
            raise ValueError(
                "fanout: conflicting values of fanout and max_children, got "
                f"{fanout!r} and {options['max_children']!r}"
            )
        options["max_children"] = fanout
    return ReblockOptions(**options)


def as_grid(grid_shape: TokenGrid | Sequence[int], tokens: int) -> TokenGrid:
    """Return the grid of `tokens` tokens, or raise ValueError."""
    if isinstance(grid_shape, TokenGrid):
        grid = grid_shape
    else:
        sizes = tuple(grid_shape) if isinstance(grid_shape, (list, tuple, torch.Size)) else ()
        if len(sizes) != 3 or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"grid_shape: expected three positive ints (F, H, W), got {grid_shape!r}"
            )
        grid = TokenGrid(*sizes)
    if grid.tokens != tokens:
        raise ValueError(
            f"grid_shape: expected a product of {tokens} tokens, got {grid.as_tuple()} = "
            f"{grid.tokens}"
        )
    return grid


def reblock(
    samples: Tensor,
    *,
    grid_shape: TokenGrid | Sequence[int],
    options: ReblockOptions | None = None,
    validate: bool = True,
    fitting_samples: Tensor | None = None,
    excluded_indices: Tensor | None = None,
    input_inverse_norms: Tensor | None = None,
    squares: Tensor | None = None,
    return_inverse: bool = True,
    index_dtype: torch.dtype = torch.int64,
    impl: str | None = None,
) -> ReblockResult:
    """Group the tokens of every leading index into blocks of 64 with alike features.

        node -> K landmarks -> a binary topology over its m children -> a direction d a split
        score s = x / |x| . d;  the `capacity` lowest (s, token id) go left, the others right

    Args:
        samples: [..., T, D], T >= 64; float16 or bfloat16 on a GPU, any floating type on the CPU.
            Leading indices are independent problems.
        grid_shape: (frames, height, width); the product is T.
        options: of the tree; None takes the defaults.
        validate: raise on rows without a finite norm, and check the result. Waits for the device;
            changes nothing in the result.
        fitting_samples: shape and dtype of `samples`: all decisions of the tree read it, while the
            choice of the T % 64 excluded tokens keeps reading `samples`.
        excluded_indices: int [..., T % 64], the excluded tokens instead of those with the largest
            norm.
        input_inverse_norms: float32 [..., T], 1 / |row| of the original tokens, for mean_mode
            "input_unit".
        squares: float32 [..., T], the `squared_norms` of `samples` where they are known already;
            saves a pass over the samples.
        return_inverse: also compute the inverse permutation.
        index_dtype: int64 or int32.
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        ReblockResult.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or value that is not as described; with `validate` also rows that
            are not finite and excluded_indices that repeat or lie outside [0, T).
        RuntimeError: with `validate`, when the result is no permutation.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: `solspark.reference.tree_numerics`. On the CPU the permutation is that of the
        reference; an implementation that sums scores in float32 may swap tokens whose scores agree
        to its rounding.

    Source: spec/spark.md section 1.
    """
    call = _checked(
        samples,
        grid_shape,
        options,
        validate,
        fitting_samples,
        excluded_indices,
        input_inverse_norms,
    )
    if index_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index_dtype: expected torch.int32 or torch.int64, got {index_dtype}")
    trees, tokens, dim = call.samples.shape
    if squares is not None:
        if squares.shape != samples.shape[:-1] or squares.dtype != torch.float32:
            raise ValueError(
                f"squares: expected torch.float32 {tuple(samples.shape[:-1])}, got "
                f"{squares.dtype} {tuple(squares.shape)}"
            )
        squares = squares.reshape(trees, tokens)
    choice = _choose(describe_call(trees, tokens, dim, samples), call.options, impl)
    permutation, inverse = _triton.entry(_operator, _grow)(
        call.samples,
        call.fitting,
        call.excluded,
        call.norms,
        squares,
        list(call.grid.as_tuple()),
        _text_of(call.options),
        choice.name,
        index_dtype,
        return_inverse,
    )
    choice.record()
    if validate:
        check_permutation(permutation)
    permutation = permutation.reshape(samples.shape[:-1])
    inverse = inverse.reshape(samples.shape[:-1]) if return_inverse else None
    return wrap_permutation(permutation, inverse, call.options)


def reblock_by_reference(
    samples: Tensor,
    *,
    grid_shape: TokenGrid | Sequence[int],
    options: ReblockOptions | None = None,
    validate: bool = True,
    fitting_samples: Tensor | None = None,
    excluded_indices: Tensor | None = None,
    input_inverse_norms: Tensor | None = None,
) -> ReblockResult:
    """Compute `reblock` with the reference, on the CPU, after the same checks."""
    call = _checked(
        samples,
        grid_shape,
        options,
        validate,
        fitting_samples,
        excluded_indices,
        input_inverse_norms,
    )
    result = reference_reblock(
        call.samples.cpu(),
        grid=call.grid,
        options=call.options,
        fitting_samples=None if call.fitting is None else call.fitting.cpu(),
        excluded_indices=None if call.excluded is None else call.excluded.cpu(),
        input_inverse_norms=None if call.norms is None else call.norms.cpu(),
    )
    assert result.inverse_permutation is not None
    shape = samples.shape[:-1]
    return wrap_permutation(
        result.permutation.reshape(shape).to(samples.device),
        result.inverse_permutation.reshape(shape).to(samples.device),
        call.options,
    )


@dataclass(frozen=True, eq=False)
class _Call:
    """The checked arguments of one call, leading indices folded into one."""

    samples: Tensor
    fitting: Tensor | None
    excluded: Tensor | None
    norms: Tensor | None
    grid: TokenGrid
    options: ReblockOptions


def _checked(
    samples: Tensor,
    grid_shape: TokenGrid | Sequence[int],
    options: ReblockOptions | None,
    validate: bool,
    fitting_samples: Tensor | None,
    excluded_indices: Tensor | None,
    input_inverse_norms: Tensor | None,
) -> _Call:
    """Check every argument and fold the leading indices."""
    options = ReblockOptions() if options is None else options
    _check_samples(samples)
    tokens, dim = samples.shape[-2:]
    grid = as_grid(grid_shape, tokens)
    leading = samples.shape[:-2]
    trees = math.prod(leading)
    if fitting_samples is not None:
        if fitting_samples.shape != samples.shape or fitting_samples.dtype != samples.dtype:
            raise ValueError(
                f"fitting_samples: expected {samples.dtype} {tuple(samples.shape)}, got "
                f"{fitting_samples.dtype} {tuple(fitting_samples.shape)}"
            )
        fitting_samples = fitting_samples.detach().reshape(trees, tokens, dim)
    excluded = _check_excluded(excluded_indices, leading, tokens, samples.device, validate)
    norms = _check_norms(input_inverse_norms, options, leading, tokens)
    rows = samples.detach().reshape(trees, tokens, dim)
    if validate:
        _check_finite("samples", rows)
        if fitting_samples is not None:
            _check_finite("fitting_samples", fitting_samples)
    return _Call(rows, fitting_samples, excluded, norms, grid, options)


def _choose(call: AttentionCall, options: ReblockOptions, impl: str | None) -> _dispatch.Choice:
    """Choose for the shapes, then decline what the kernels do not have among the options."""
    missing = tuple(option_reasons(options))
    if not missing:
        return _dispatch.pick("reblock", call, impl)
    if impl == "triton":
        obstacles = (*_dispatch.reasons("reblock", "triton", call), *missing)
        raise UnsupportedError("reblock with impl='triton'", obstacles)
    chosen = _dispatch.pick("reblock", call, impl or "eager")
    obstacles = (*_dispatch.reasons("reblock", "triton", call), *missing)
    return replace(chosen, declined=() if impl else (("triton", obstacles),))


def _grow(
    samples: Tensor,
    fitting: Tensor | None,
    excluded: Tensor | None,
    input_inverse_norms: Tensor | None,
    squares: Tensor | None,
    grid: list[int],
    options: str,
    implementation: str,
    index_dtype: torch.dtype,
    return_inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Grow the trees [R, T, D]; return the permutation and its inverse, empty if not asked for.

    One node for torch.compile, whatever the implementation; options travel as text.
    """
    with torch.cuda.device_of(samples):
        run = run_triton if implementation == "triton" else run_eager
        order = run(
            samples,
            fitting,
            excluded,
            input_inverse_norms,
            squares,
            TokenGrid(*grid),
            _options_of(options),
        )
        if implementation == "triton":
            from solspark.kernels.reblock import launch_finish

            permutation, inverse = launch_finish(order, index_dtype, return_inverse)
        else:
            permutation = order.to(index_dtype, copy=True)
            inverse = invert(permutation) if return_inverse else None
        return permutation, permutation.new_empty(0) if inverse is None else inverse


_operator = torch.library.custom_op("solspark::reblock", _grow, mutates_args=())


@_operator.register_fake
def _(
    samples,
    fitting,
    excluded,
    input_inverse_norms,
    squares,
    grid,
    options,
    implementation,
    index_dtype,
    return_inverse,
):
    permutation = samples.new_empty(samples.shape[:-1], dtype=index_dtype)
    return permutation, permutation.new_empty(permutation.shape if return_inverse else (0,))


def _text_of(options: ReblockOptions) -> str:
    """Return the options as text that `_options_of` reads."""
    return "(" + "".join(f"{getattr(options, name)!r}, " for name in OPTION_NAMES) + ")"


@functools.lru_cache(maxsize=256)
def _options_of(text: str) -> ReblockOptions:
    """Return the options from their text."""
    return ReblockOptions(**dict(zip(OPTION_NAMES, ast.literal_eval(text), strict=True)))


def inverse_norms(rows: Tensor) -> Tensor:
    """Return 1 / max(|x|, 1e-12) of rows [..., D] in float32; NaN if |x|^2 is not finite."""
    return norms_to_inverse(squared_norms(rows))


def squared_norms(rows: Tensor) -> Tensor:
    """Return the squared norms [...] of rows [..., D], summed in float64, rounded to float32."""
    rows = rows.detach()
    flat = (
        rows.reshape(-1, *rows.shape[-2:]) if rows.ndim > 2 else rows.reshape(1, -1, rows.shape[-1])
    )
    if not triton_reasons(describe_call(flat.shape[0], flat.shape[1], flat.shape[2], flat)):
        from solspark.kernels.tree_score import launch_tree_norms

        return launch_tree_norms(flat).reshape(rows.shape[:-1])
    # One tree at a time: the float64 copy of all of them would not fit beside the features.
    squares = rows.new_empty(flat.shape[:-1], dtype=torch.float32)
    for index, tree in enumerate(flat):
        squares[index] = squares_in_float64(tree)
    return squares.reshape(rows.shape[:-1])


def describe_call(trees: int, tokens: int, dim: int, like: Tensor) -> AttentionCall:
    """Return what an implementation must know of the shapes: every tree counts as one head."""
    return AttentionCall(
        batch=1,
        query_tokens=tokens,
        key_tokens=tokens,
        heads=trees,
        head_dim=dim,
        dtype=like.dtype,
        device_type=like.device.type,
        capability=_dispatch.capability(like.device),
        last_dim_contiguous=like.stride(-1) == 1,
    )


def invert(permutation: Tensor) -> Tensor:
    """Return the inverse of permutations [R, T]."""
    places = torch.arange(
        permutation.shape[-1], dtype=permutation.dtype, device=permutation.device
    ).expand_as(permutation)
    return torch.empty_like(permutation).scatter_(-1, permutation.long(), places)


def check_permutation(permutation: Tensor) -> None:
    """Raise RuntimeError unless every row [R, T] holds every token once. Waits for the device."""
    expected = torch.arange(permutation.shape[-1], device=permutation.device)
    if not bool((permutation.sort(-1).values == expected).all()):
        raise RuntimeError("reblock: the result is no permutation of the tokens; please report it")


def _check_samples(samples: Any) -> None:
    """Raise unless samples are [..., T >= 64, D] of a type that the device's trees take."""
    if not isinstance(samples, Tensor):
        raise TypeError(f"samples: expected a tensor [..., T, D], got {type(samples).__name__}")
    if samples.ndim < 2:
        raise ValueError(f"samples: expected [..., T, D], got shape {tuple(samples.shape)}")
    if not samples.dtype.is_floating_point:
        raise ValueError(f"samples: expected a floating dtype, got {samples.dtype}")
    if samples.device.type == "cuda" and samples.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"samples: expected torch.float16 or torch.bfloat16 on a GPU, got {samples.dtype}"
        )
    if samples.shape[-2] < BLOCK or samples.shape[-1] < 1:
        raise ValueError(
            f"samples: expected [..., T >= {BLOCK}, D >= 1], got shape {tuple(samples.shape)}"
        )


def _check_excluded(
    excluded: Tensor | None,
    leading: torch.Size,
    tokens: int,
    device: torch.device,
    validate: bool,
) -> Tensor | None:
    """Return the excluded ids as int64 [R, T % 64], or None."""
    if excluded is None:
        return None
    if not isinstance(excluded, Tensor):
        raise TypeError(f"excluded_indices: expected a tensor, got {type(excluded).__name__}")
    count, trees = tokens % BLOCK, math.prod(leading)
    if tuple(excluded.shape) not in {(*leading, count), (trees, count)}:
        raise ValueError(
            f"excluded_indices: expected shape {(*leading, count)}, got {tuple(excluded.shape)}"
        )
    if excluded.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"excluded_indices: expected torch.int32 or torch.int64, got {excluded.dtype}"
        )
    excluded = excluded.to(device=device, dtype=torch.int64).reshape(trees, count)
    if count and (validate or device.type == "cpu"):
        if bool(((excluded < 0) | (excluded >= tokens)).any()):
            raise ValueError(f"excluded_indices: expected ids in [0, {tokens}), got others")
        if bool((excluded.sort(-1).values.diff(dim=-1) == 0).any()):
            raise ValueError("excluded_indices: expected distinct ids, got a duplicate")
    return excluded


def _check_norms(
    norms: Tensor | None, options: ReblockOptions, leading: torch.Size, tokens: int
) -> Tensor | None:
    """Return the inverse norms of the original tokens as float32 [R, T], or None."""
    if options.mean_mode != "input_unit":
        if norms is not None:
            raise ValueError(
                "input_inverse_norms: needs mean_mode='input_unit', got "
                f"mean_mode={options.mean_mode!r}"
            )
        return None
    if norms is None:
        raise ValueError("input_inverse_norms: mean_mode='input_unit' needs it, got None")
    if tuple(norms.shape) != (*leading, tokens):
        raise ValueError(
            f"input_inverse_norms: expected shape {(*leading, tokens)}, got {tuple(norms.shape)}"
        )
    return norms.detach().float().reshape(-1, tokens)


def _check_finite(name: str, rows: Tensor) -> None:
    """Raise ValueError if a row [R, T, D] has no finite squared norm. Waits for the device."""
    bad = int((~squared_norms(rows).isfinite()).sum())
    if bad:
        raise ValueError(
            f"{name}: expected rows whose squared norm is finite in float32, got {bad} that are "
            "not (NaN, infinite or too large)"
        )


_dispatch.register("reblock", "eager", _dispatch.never_declines, run_eager)
_dispatch.register("reblock", "triton", triton_reasons, run_triton)
