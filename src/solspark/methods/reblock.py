"""The landmark tree under its public names, and the plan that replays it from a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from solspark.ops import reblock as ops
from solspark.ops.reblock import CapacityHierarchy, ReblockOptions, ReblockResult, resolve_options
from solspark.types import BLOCK, TokenGrid

__all__ = [
    "PreparedLandmarkTreeV2Permutation",
    "ReblockOptions",
    "ReblockResult",
    "recursive_landmark_tree_v2_blocks",
    "recursive_landmark_tree_v2_reference",
    "spark_block",
    "spark_reblock",
]

Schedule = int | Sequence[int]


def spark_reblock(
    samples: Tensor,
    *,
    grid_shape: TokenGrid | Sequence[int],
    initial_order: str = "flat",
    validate: bool = True,
    distance: str = "cosine",
    order_mode: str = "parent_order",
    group_size: Schedule = 1,
    fitting_samples: Tensor | None = None,
    max_children: Schedule | None = None,
    fanout: Schedule | None = None,
    fanout_mode: str = "power_of_two_fanout",
    final_fanout: Schedule | None = None,
    root_fanout: int | None = None,
    landmark_mode: str = "midpoint",
    landmark_count: int = 32,
    midpoint_direction_mode: str = "legacy",
    aggregation: str = "linear",
    proxy_iterations: int = 2,
    seed_rule: str = "farthest_pair",
    update_rule: str = "mean",
    excluded_indices: Tensor | None = None,
    mean_mode: str = "raw",
    input_inverse_norms: Tensor | None = None,
    score_precision: str = "fp16",
    impl: str | None = None,
) -> ReblockResult:
    """Group video tokens with alike features into blocks of exactly 64.

        node -> K landmarks -> a binary topology over its m children -> a direction d a split
        score s = x / |x| . d;  the `capacity` lowest (s, token id) go left, the others right

    Args:
        samples: [..., T, D], T >= 64; float16 or bfloat16 on a GPU, any floating type on the CPU.
            Leading indices are independent problems.
        grid_shape: (frames, height, width); the product is T.
        initial_order: "flat", "tile_t4h4w4" or "hilbert_" and a permutation of t, h, w.
        validate: raise on rows without a finite norm, and check the result. Waits for the device;
            changes nothing in the result.
        distance: "cosine", or "euclidean" (squared L2).
        order_mode: "parent_order", or "scalar_order" to keep the last split's order by score.
        group_size: tokens that move together: 1, 2, 4 or 8, or one value for each level.
        fitting_samples: like `samples`; the tree reads it, the choice of the remainder does not.
        max_children: children of a node: 2, 4, 8, 16, 32 or 64, or one value for each level.
            The default is 8; the H3 installer passes 16.
        fanout: another name of max_children.
        fanout_mode: "power_of_two_fanout", "arbitrary_fanout" or "power_of_two_arbitrary_final".
        final_fanout: 2..32 or one value for each level; None inherits max_children.
        root_fanout: 2, 4, 8, 16 or 32; None takes the first of max_children.
        landmark_mode: "midpoint" or "mean".
        landmark_count: 32, 64, 128 or 256.
        midpoint_direction_mode: "legacy" or "fused": one and the same here.
        aggregation: "linear", or "max" with cosine only.
        proxy_iterations: 0, 1, 2 or 4.
        seed_rule: "farthest_pair" or "endpoint_order".
        update_rule: "mean" or "medoid".
        excluded_indices: int [..., T % 64], the excluded tokens instead of the largest norms.
        mean_mode: "raw", "input_unit" or "metric_unit": what the fitted centres are means of.
        input_inverse_norms: float32 [..., T], for mean_mode "input_unit".
        score_precision: "fp16", or "fp32".
        impl: "eager", "triton" or None for the best that can serve.

    Returns:
        ReblockResult with int64 indices: block_indices [..., T // 64, 64], excluded_indices
        [..., T % 64], permutation and inverse_permutation [..., T], split_stats, hierarchy.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or value that is not as described; max_children and fanout that
            differ.
        RuntimeError: with `validate`, when the result is no permutation.
        UnsupportedError: the implementation asked for cannot serve.

    Numerics: `solspark.reference.tree_numerics`: norms in float32, scores of float16 operands
        rounded to float32, -0.0 equal to +0.0, NaN last, ties to the lower id.

    Source: spec/spark.md section 1.
    """
    options = resolve_options(
        initial_order=initial_order,
        distance=distance,
        order_mode=order_mode,
        group_size=group_size,
        max_children=max_children,
        fanout=fanout,
        fanout_mode=fanout_mode,
        final_fanout=final_fanout,
        root_fanout=root_fanout,
        landmark_mode=landmark_mode,
        landmark_count=landmark_count,
        midpoint_direction_mode=midpoint_direction_mode,
        aggregation=aggregation,
        proxy_iterations=proxy_iterations,
        seed_rule=seed_rule,
        update_rule=update_rule,
        mean_mode=mean_mode,
        score_precision=score_precision,
    )
    return ops.reblock(
        samples,
        grid_shape=grid_shape,
        options=options,
        validate=validate,
        fitting_samples=fitting_samples,
        excluded_indices=excluded_indices,
        input_inverse_norms=input_inverse_norms,
        impl=impl,
    )


recursive_landmark_tree_v2_blocks = spark_reblock
spark_block = spark_reblock


def recursive_landmark_tree_v2_reference(
    samples: Tensor,
    *,
    grid_shape: TokenGrid | Sequence[int],
    validate: bool = True,
    fitting_samples: Tensor | None = None,
    excluded_indices: Tensor | None = None,
    input_inverse_norms: Tensor | None = None,
    **options: Any,
) -> ReblockResult:
    """Compute `spark_reblock` token by token on the CPU: the specification, slow.

    Args:
        samples, grid_shape, validate, fitting_samples, excluded_indices, input_inverse_norms: see
            `spark_reblock`.
        options: all other options of `spark_reblock` except impl.

    Returns:
        ReblockResult on the device of the samples.

    Raises:
        TypeError, ValueError, RuntimeError: see `spark_reblock`.

    Source: spec/spark.md section 1.
    """
    return ops.reblock_by_reference(
        samples,
        grid_shape=grid_shape,
        options=resolve_options(**options),
        validate=validate,
        fitting_samples=fitting_samples,
        excluded_indices=excluded_indices,
        input_inverse_norms=input_inverse_norms,
    )


class PreparedLandmarkTreeV2Permutation:
    """Grow trees of one shape again and again, on a GPU by replaying a CUDA graph.

    The first `run` computes eagerly, the second captures a graph, every later one copies its
    samples into the graph's input and replays. On the CPU every run computes.

    Whose memory is it? By default every result has memory of its own, copied out of the graph: a
    later run never changes it. With `static_outputs=True` the copy is saved: permutation and
    inverse are then the graph's own buffers, the next run or replay on any stream overwrites them,
    and whoever reads them must have finished, or copied, before that. The graph's input belongs to
    the caller until the next run returns; samples that already are `graph_input` are not copied.

    Should the capture fail, a RuntimeWarning says so, `capture_error` keeps the reason, and this
    plan computes eagerly from then on.

    Args:
        batch: R, trees.
        tokens: T = product of grid_shape.
        dim: D.
        grid_shape: (frames, height, width).
        device: of the samples.
        dtype: of the samples; None takes that of the first run. A GPU takes float16 or bfloat16.
        input_unit_means: mean_mode "input_unit": `run` needs input_inverse_norms.
        metric_unit_means: mean_mode "metric_unit"; not both.
        return_inverse: also compute the inverse permutations.
        compact_indices: int32 instead of int64 indices, R * T < 2^31.
        compact_direct_route: accepted for compatibility; there is one route, and it is exact.
        static_outputs: see above.
        impl: "eager", "triton" or None for the best that can serve.
        options: those of `spark_reblock`.

    Raises:
        TypeError, ValueError: an argument is not as described.

    Source: spec/spark.md section 1.10.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        dim: int,
        grid_shape: TokenGrid | Sequence[int],
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype | None = None,
        input_unit_means: bool = False,
        metric_unit_means: bool = False,
        return_inverse: bool = True,
        compact_indices: bool = False,
        compact_direct_route: bool = False,
        static_outputs: bool = False,
        impl: str | None = None,
        **options: Any,
    ):
        for name, value, low in (("batch", batch, 1), ("tokens", tokens, BLOCK), ("dim", dim, 1)):
            if type(value) is not int or value < low:
                raise ValueError(f"{name}: expected an int >= {low}, got {value!r}")
        if input_unit_means and metric_unit_means:
            raise ValueError(
                "input_unit_means: exclusive with metric_unit_means, got both of them True"
            )
        if compact_indices and batch * tokens >= 2**31:
            raise ValueError(
                f"compact_indices: expected batch * tokens < 2^31, got {batch * tokens}"
            )
        if input_unit_means or metric_unit_means:
            if options.get("mean_mode", "raw") != "raw":
                raise ValueError(
                    "mean_mode: give either it or input_unit_means / metric_unit_means, "
                    f"got {options['mean_mode']!r}"
                )
            options["mean_mode"] = "input_unit" if input_unit_means else "metric_unit"
        self.shape = (batch, tokens, dim)
        self.grid = ops.as_grid(grid_shape, tokens)
        self.device = torch.device(device)
        self.dtype = dtype
        self.options: ReblockOptions = resolve_options(**options)
        self.static_outputs = static_outputs
        self.capture_error: Exception | None = None
        self._return_inverse = return_inverse
        self._index_dtype = torch.int32 if compact_indices else torch.int64
        self._impl = impl
        self._hierarchy = self.options.hierarchy(tokens // BLOCK)
        self._runs = 0
        self._input: Tensor | None = None
        self._inverse_norms: Tensor | None = None
        self._squares: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        self._outputs: ReblockResult | None = None

    @property
    def hierarchy(self) -> CapacityHierarchy:
        """The capacities that every result meets."""
        return self._hierarchy

    @property
    def split_count(self) -> int:
        """Batches of equal nodes that one run splits."""
        return sum(
            len(self._hierarchy.node_batches(depth)) for depth in range(len(self._hierarchy.splits))
        )

    @property
    def graph_active(self) -> bool:
        """Whether a captured graph serves the next run."""
        return self._replay is not None

    @property
    def graph_input(self) -> Tensor | None:
        """The [R, T, D] buffer that a replay reads, once acquired or captured: write into it."""
        return self._input

    @property
    def graph_inverse_norms(self) -> Tensor | None:
        """The float32 [R, T] buffer of input_inverse_norms that a replay reads."""
        return self._inverse_norms

    @property
    def graph_squares(self) -> Tensor:
        """The float32 [R, T] squared norms that a replay reads; a producer may fill them."""
        if self._squares is None:
            self._squares = torch.empty(self.shape[:2], device=self.device)
        return self._squares

    def acquire_graph_input(self, dtype: torch.dtype | None = None) -> Tensor:
        """Reserve the graph's input before there is a graph, so that a producer writes into it.

        Args:
            dtype: of the samples; None takes that of the plan, bfloat16 if it has none yet.

        Returns:
            [R, T, D], uninitialised the first time; pass it to `run`.
        """
        if self._input is None:
            self._fix_dtype(dtype or self.dtype or torch.bfloat16)
            self._input = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            if self.options.mean_mode == "input_unit":
                self._inverse_norms = torch.ones(self.shape[:2], device=self.device)
        elif dtype is not None:
            self._fix_dtype(dtype)
        return self._input

    def run(
        self,
        samples: Tensor,
        *,
        excluded_indices: Tensor | None = None,
        input_inverse_norms: Tensor | None = None,
        squares: Tensor | None = None,
        allow_cuda_graph: bool = True,
    ) -> ReblockResult:
        """Grow the trees of these samples.

        Args:
            samples: [R, T, D] of the plan's type and device.
            excluded_indices: int [R, T % 64], the excluded tokens; given, even empty, the run is
                eager.
            input_inverse_norms: float32 [R, T], with input_unit_means.
            squares: float32 [R, T], the squared norms of the samples where they are known, as
                `reblock_features` writes them.
            allow_cuda_graph: False computes eagerly.

        Returns:
            ReblockResult; whose memory it is, the class says.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        self._check(samples, input_inverse_norms)
        eager = (
            excluded_indices is not None
            or not allow_cuda_graph
            or self.capture_error is not None
            or not _can_capture(self.device)
        )
        self._runs += 1
        if eager or (self._runs == 1 and self._replay is None):
            return self._compute(samples, excluded_indices, input_inverse_norms, squares)
        self._fill(samples, input_inverse_norms, squares)
        if self._replay is None and not self._capture():
            return self._compute(samples, None, input_inverse_norms, squares)
        return self._replayed()

    def replay(self) -> ReblockResult:
        """Replay the graph on what `graph_input` holds.

        Raises:
            RuntimeError: nothing was captured yet.
        """
        if self._replay is not None and self._input is not None:
            self.graph_squares.copy_(ops.squared_norms(self._input))
        return self._replayed()

    def _replayed(self) -> ReblockResult:
        """Replay the graph on what its buffers hold."""
        if self._replay is None or self._outputs is None:
            raise RuntimeError(
                "replay: no graph was captured; the second run on a GPU does"
                + (f" (capture failed: {self.capture_error})" if self.capture_error else "")
            )
        self._replay()
        kept = self._outputs
        if self.static_outputs:
            return kept
        inverse = kept.inverse_permutation
        return ops.wrap_permutation(
            kept.permutation.clone(),
            None if inverse is None else inverse.clone(),
            self.options,
        )

    def _fix_dtype(self, dtype: torch.dtype) -> None:
        """Take the type of the first samples; refuse any other later."""
        if self.dtype is None:
            self.dtype = dtype
        elif dtype != self.dtype:
            raise ValueError(f"samples: expected {self.dtype} as prepared, got {dtype}")

    def _check(self, samples: Tensor, norms: Tensor | None) -> None:
        if not isinstance(samples, Tensor):
            raise TypeError(f"samples: expected a tensor, got {type(samples).__name__}")
        self._fix_dtype(samples.dtype)
        if tuple(samples.shape) != self.shape:
            raise ValueError(
                f"samples: expected {self.shape} as prepared, got {tuple(samples.shape)}"
            )
        if samples.device.type != self.device.type or (
            self.device.index is not None and samples.device != self.device
        ):
            raise ValueError(f"samples: expected device {self.device}, got {samples.device}")
        if (norms is None) == (self.options.mean_mode == "input_unit"):
            needed = "needed with" if norms is None else "needs"
            raise ValueError(
                f"input_inverse_norms: {needed} mean_mode 'input_unit', got mean_mode "
                f"{self.options.mean_mode!r}"
            )

    def _compute(
        self,
        samples: Tensor,
        excluded: Tensor | None,
        norms: Tensor | None,
        squares: Tensor | None,
    ) -> ReblockResult:
        """Grow the trees without a graph."""
        return ops.reblock(
            samples,
            grid_shape=self.grid,
            options=self.options,
            validate=False,
            excluded_indices=excluded,
            input_inverse_norms=norms,
            squares=squares,
            return_inverse=self._return_inverse,
            index_dtype=self._index_dtype,
            impl=self._impl,
        )

    def _fill(self, samples: Tensor, norms: Tensor | None, squares: Tensor | None) -> None:
        """Copy what a replay reads into the graph's buffers, unless it is there already."""
        buffer = self.acquire_graph_input()
        _copy_into(buffer, samples)
        if norms is not None:
            assert self._inverse_norms is not None
            _copy_into(self._inverse_norms, norms)
        # The graph begins after the norms, which a producer may know already.
        _copy_into(self.graph_squares, ops.squared_norms(buffer) if squares is None else squares)

    def _capture(self) -> bool:
        """Capture the graph; on failure warn, remember and return False."""
        buffer = self.acquire_graph_input()

        def compute() -> ReblockResult:
            return self._compute(buffer, None, self._inverse_norms, self.graph_squares)

        try:
            self._outputs, self._replay = _capture_graph(compute, self.device)
        except Exception as error:
            self.capture_error = error
            warnings.warn(
                "PreparedLandmarkTreeV2Permutation: CUDA graph capture failed, this plan computes "
                f"eagerly from now on: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return False
        return True


def _copy_into(buffer: Tensor, source: Tensor) -> None:
    """Copy, unless the source is the buffer itself."""
    if source.data_ptr() != buffer.data_ptr():
        buffer.copy_(source)


def _can_capture(device: torch.device) -> bool:
    """Say whether a graph may be captured or replayed here: a GPU that is not capturing already."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _capture_graph(
    compute: Callable[[], ReblockResult], device: torch.device
) -> tuple[ReblockResult, Callable[[], None]]:
    """Return the outputs of a captured computation and the function that replays it."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = compute()
    return outputs, graph.replay
