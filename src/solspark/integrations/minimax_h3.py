"""Sparse attention in the MiniMax-H3 transformer of diffusers: installers, plugin, processor.

One plugin serves one transformer. A forward pre-hook on the transformer counts evaluations and
derives the packed layout; a processor on each block's attention decides per call whether it is
dense (the user's own processor runs) or sparse (`packed_attention` runs). Nothing else is touched:
no class, no module attribute, no forward.

Not supported, and refused or said: context parallelism, whole-model torch.compile (it hides
forward's signature from the denoising loop), CUDA graphs around the model, two pipelines driving
one transformer at a time. `pipe.update_components(transformer=...)` inside the context leaves the
plugin on the old module.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..methods.spark import packed_attention
from ..types import TokenGrid
from .h3_config import H3SparseAttentionConfig, sol_config, spark_config
from .h3_controller import H3Controller, Stopwatch
from .h3_int8 import Int8Attention, check_int8_attention, warm_up_int8
from .h3_pipeline import loaded_transformer, require_diffusers
from .h3_processor import H3SparseAttentionProcessor, dense_attention
from .h3_report import call_records, run_summary
from .install import ProcessorSwap

ATTENTION_NAMES = (
    "get_processor",
    "set_processor",
    "heads",
    "head_dim",
    "fused_projections",
    "to_q",
    "to_k",
    "to_v",
    "norm_q",
    "norm_k",
    "to_out",
)
"""What the processor uses of an attention module."""


def foreign_processors(processors: Iterable[Any]) -> dict[str, int]:
    """Count, by name, the processors that do not attend as diffusers' own does."""
    own: Any = require_diffusers().MiniMaxH3AttnProcessor
    return dict(
        Counter(
            getattr(each, "__qualname__", type(each).__name__)
            for each in processors
            if type(each).__call__ is not own.__call__
        )
    )


class H3SparseAttentionPlugin:
    """Sparse attention for one transformer: a context manager, or `apply()` and `remove()`.

    Nothing is patched, and the transformer is not looked at, before it is entered. It can be
    entered again after it was left; counters then start again. `reset()` goes between two runs,
    `summary()` and `records()` say what happened, `prewarm()` compiles ahead of the first sparse
    step.

    Args:
        transformer: a `MiniMaxH3Transformer3DModel`, or a pipeline that holds exactly one.
        config: all options.

    Raises:
        MissingDependencyError: diffusers is missing.
        ValueError: `dense_backend` is no backend of diffusers.
    """

    def __init__(self, transformer: Any, config: H3SparseAttentionConfig):
        require_diffusers()
        self.config = config
        self.controller = H3Controller(config)
        self._target = transformer
        self._swap = ProcessorSwap()
        self._processors: list[H3SparseAttentionProcessor] = []
        self._hook: Any = None
        self._left: list[str] = []
        self._foreign: dict[str, int] = {}
        backend = config.dense_backend
        known = _known_backends()
        if isinstance(backend, str) and backend not in known:
            raise ValueError(
                f"dense_backend: expected one of {', '.join(sorted(known))} or a "
                f"callable, got {backend!r}"
            )

    @property
    def active(self) -> bool:
        """Whether the plugin is installed at present."""
        return self._hook is not None

    @property
    def transformer(self) -> Any:
        """The transformer module; a pipeline is asked for the one that it has loaded."""
        target = self._target
        if not hasattr(target, "transformer_blocks") and (
            getattr(target, "transformer", None) is not None
            or getattr(target, "transformer_ref", None) is not None
        ):
            return loaded_transformer(target)[1]
        return target

    def __enter__(self) -> H3SparseAttentionPlugin:
        return self.apply()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._leave(warn_short=kind is None)
        return False

    def apply(self) -> H3SparseAttentionPlugin:
        """Install: a pre-hook on the transformer, a processor on each block. Undone on failure.

        Raises:
            RuntimeError: it is active already, solspark is installed on this transformer by
                another plugin, or the transformer runs context parallel.
            TypeError: the target has no `transformer_blocks`.
            ValueError: `extra_dense_layers`, `dense_backend` or `precision` do not fit the
                transformer.
        """
        if self.active:
            raise RuntimeError("this plugin is installed already: leave the context or remove()")
        transformer = self.transformer
        self._check_target(transformer)
        if hasattr(transformer, "_orig_mod"):
            warnings.warn(
                "the transformer is compiled as a whole, which hides forward's arguments from the "
                "denoising loop and recompiles around the sparse calls; compile its blocks "
                "instead: transformer.compile_repeated_blocks()",
                RuntimeWarning,
                stacklevel=2,
            )
        self.controller.reset()
        self._left = []
        try:
            self._hook = transformer.register_forward_pre_hook(self._pre_hook(), with_kwargs=True)
            for layer, block in enumerate(transformer.transformer_blocks):
                processor = H3SparseAttentionProcessor(
                    self.controller, layer, block.attn.get_processor()
                )
                self._processors.append(processor)
                self._swap.swap(f"transformer_blocks.{layer}.attn", block.attn, processor)
            self._foreign = foreign_processors(item.original for item in self._processors)
            if self._foreign:
                names = ", ".join(f"{name} on {n} layers" for name, n in self._foreign.items())
                warnings.warn(
                    f"attention processors that are not diffusers' own ({names}): dense calls run "
                    "them, sparse calls attend as diffusers' own would",
                    RuntimeWarning,
                    stacklevel=2,
                )
        except BaseException:
            self._restore()
            raise
        return self

    def remove(self) -> None:
        """Put the original processors back and take the hook off; a second time does nothing."""
        self._leave(warn_short=True)

    def reset(self) -> None:
        """Get ready for another run: counters, layout, caches and INT8's calibration are cleared.

        Patches stay.
        """
        self.controller.reset()

    def prewarm(
        self,
        grid: tuple[int, int, int],
        context_tokens: int = 1008,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Run one sparse attention call on noise, so that kernels are compiled before the clip.

        A run reaches its first sparse call only after the dense warm-up. Counters are unaffected.

        Args:
            grid: (frames, height, width) of the latent video, 72 x 24 x 42 for 10 s at 1344 x 768.
            context_tokens: rows beside the video.
            device, dtype: those of the first block unless given.

        Returns:
            {"seconds": ..., "implementations": ...} of the call.
        """
        attn = self.transformer.transformer_blocks[0].attn
        # Norms are never quantised or wrapped by LoRA, so their weight has the activations' dtype.
        weight = attn.norm_q.weight
        place = weight.device if device is None else torch.device(device)
        kind: torch.dtype = weight.dtype if dtype is None else dtype
        token_grid = TokenGrid(*grid)
        video, tokens = token_grid.tokens, token_grid.tokens + context_tokens
        config = self.config
        if config.precision == "int8":
            calls = Int8Attention(
                config, tokens, video, attn.heads, place, self.controller.topk_ratio
            )
            watch = Stopwatch(place)
            with torch.no_grad():
                record = warm_up_int8(calls, config.chunk_tokens, place, kind)
            watch.stop()
            return {"seconds": watch.seconds(), "implementations": dict(record.implementations)}
        shape = (1, tokens, attn.heads, attn.head_dim)
        query, key, value = (torch.randn(shape, device=place, dtype=kind) for _ in range(3))
        watch = Stopwatch(query.device)
        with torch.no_grad():
            _, record = packed_attention(
                query,
                key,
                value,
                video_tokens=video,
                grid=token_grid,
                config=self.controller.packed_config(),
                dense=dense_attention(config, attn.get_processor()),
                cache={},
                impl=config.impl,
            )
        watch.stop()
        return {"seconds": watch.seconds(), "implementations": dict(record.implementations)}

    def summary(self) -> dict[str, Any]:
        """Say what was done so far, inside the context or after it; waits for the device.

        Returns:
            A plain dict: identity (`method`, `preset`, `sol_backend`, `implementations`), schedule,
            `processor_calls` (counters `dense:<reason>`, `sparse:sol` and inner calls), routing
            (`sol_route_density` of the first sparse call, `resolved`), layout, `by_evaluation` and
            `by_layer` (calls, density, seconds), an echo of the options, and what stood in the way:
            `replaced_processors`, and `foreign_processors` (name -> layers), whose own attention
            sparse calls do not run. With INT8 `int8` says whether channels are rotated and
            balanced, and for how many layers a calibration is kept; cold and primed calls are
            counted.
        """
        replaced = self._swap.replaced() if self.active else list(self._left)
        return {
            **run_summary(self.controller),
            "replaced_processors": replaced,
            "foreign_processors": dict(self._foreign),
        }

    def records(self) -> list[dict[str, Any]]:
        """Return one record a processor call, in order; waits for the device.

        Returns:
            Dicts of `evaluation`, `layer`, `kind`, `seconds`, and for sparse calls `density`
            (share of block pairs read exactly), `video_density` (the same without context blocks),
            `route` and `implementations`; densities are None without `sol_log_density`.
        """
        return call_records(self.controller)

    def _pre_hook(self) -> Callable[..., Any]:
        """Make the forward pre-hook; it must stay eager, for it counts."""

        @torch.compiler.disable
        def count_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.controller.begin_forward(args, kwargs)

        hook: Any = count_forward
        return hook

    def _check_target(self, transformer: Any) -> None:
        """Refuse a transformer that cannot be served, before anything is changed."""
        blocks = getattr(transformer, "transformer_blocks", None)
        if blocks is None:
            raise TypeError(
                "transformer: expected a MiniMax-H3 transformer with transformer_blocks, got "
                f"{type(transformer).__name__}"
            )
        layers = len(blocks)
        for layer, block in enumerate(blocks):
            attn = getattr(block, "attn", None)
            lacking = [name for name in ATTENTION_NAMES if not hasattr(attn, name)]
            if lacking:
                raise TypeError(
                    f"transformer: expected MiniMax-H3 attention at transformer_blocks.{layer}"
                    f".attn, but {type(attn).__name__} has no {', '.join(lacking)}"
                )
            if self.config.precision == "int8":
                check_int8_attention(self.config, f"transformer_blocks.{layer}.attn", attn)
        beyond = [layer for layer in self.config.extra_dense_layers if layer >= layers]
        if beyond:
            raise ValueError(f"extra_dense_layers: expected layers below {layers}, got {beyond[0]}")
        if getattr(transformer, "_parallel_config", None) is not None:
            parallel = getattr(transformer._parallel_config, "context_parallel_config", None)
            if parallel is not None:
                raise RuntimeError(
                    "context parallelism: sparse H3 attention needs the whole packed sequence on "
                    "one device, but enable_parallelism sharded it"
                )
        for layer, block in enumerate(blocks):
            processor = block.attn.get_processor()
            while isinstance(processor, H3SparseAttentionProcessor):
                if processor.active:
                    raise RuntimeError(
                        "sparse attention is installed on this transformer already: leave that "
                        "context or remove() it first"
                    )
                # A processor kept from an installation that has ended passes everything on.
                processor = processor.original
                block.attn.set_processor(processor)
            if getattr(processor, "_parallel_config", None) is not None:
                raise RuntimeError(
                    f"context parallelism: transformer_blocks.{layer}.attn has a parallel config, "
                    "which sparse H3 attention does not support"
                )
            if isinstance(self.config.dense_backend, str) and not hasattr(
                processor, "_attention_backend"
            ):
                raise ValueError(
                    f"dense_backend: {self.config.dense_backend!r} needs processors that have a "
                    f"backend, but transformer_blocks.{layer}.attn has "
                    f"{type(processor).__name__}; set it there"
                )
        if isinstance(self.config.dense_backend, str):
            _require_backend(self.config.dense_backend)

    def _restore(self) -> None:
        """Undo `apply`, as far as it came, step by step whatever fails."""
        for processor in self._processors:
            processor.active = False
        try:
            self._left = self._swap.restore()
        finally:
            self._processors = []
            hook, self._hook = self._hook, None
            self.controller.forget_layout()
            if hook is not None:
                hook.remove()

    def _leave(self, warn_short: bool) -> None:
        """Restore first; only then say what the user should know."""
        if not self.active:
            return
        self._restore()
        if self._left:
            warnings.warn(
                f"the attention processor of {', '.join(self._left)} was replaced inside the "
                "context: it is left as it is, and sparse attention did not run there",
                RuntimeWarning,
                stacklevel=3,
            )
        done, total = self.controller.completed, self.config.total_evaluations
        if warn_short and not self.controller.failed and 0 < done < total:
            warnings.warn(
                f"the run made {done} of the {total} evaluations it was configured for, so its "
                f"dense share was larger than meant; set num_denoise_steps={done}",
                RuntimeWarning,
                stacklevel=3,
            )


def _known_backends() -> set[str]:
    """Return the backend names of diffusers' attention dispatcher."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    return {name.value for name in AttentionBackendName}


def _require_backend(name: str) -> None:
    """Have diffusers check that a backend can run here, as its `set_attention_backend` does."""
    from diffusers.models import attention_dispatch as dispatch

    backend = dispatch.AttentionBackendName(name)
    dispatch._check_attention_backend_requirements(backend)
    dispatch._maybe_download_kernel_for_backend(backend)


def install_h3_sparse_attention(
    transformer: Any, config: H3SparseAttentionConfig
) -> H3SparseAttentionPlugin:
    """Return the context manager that runs a transformer's attention as `config` says.

    Args:
        transformer: a `MiniMaxH3Transformer3DModel`, or a pipeline that holds exactly one under
            `transformer` or `transformer_ref`. It is not looked at before the context is entered.
        config: all options.

    Returns:
        The plugin: a context manager, or `apply()` and `remove()`.

    Raises:
        MissingDependencyError: diffusers is missing.
        TypeError: `config` is no H3SparseAttentionConfig.
        ValueError: `dense_backend` is no backend of diffusers.
    """
    if not isinstance(config, H3SparseAttentionConfig):
        raise TypeError(f"config: expected an H3SparseAttentionConfig, got {type(config).__name__}")
    return H3SparseAttentionPlugin(transformer, config)


def install_h3_sol_attn(
    transformer: Any,
    num_inference_steps: int | None = None,
    *,
    num_denoise_steps: int | None = None,
    warmup_mode: str | None = None,
    warmup_ratio: float | None = None,
    warmup_steps: int | None = None,
    dense_layers: int | None = None,
    min_tokens: int | None = None,
    precision: str = "native",
    chunk_tokens: int | None = None,
    **config_overrides: Any,
) -> H3SparseAttentionPlugin:
    """Return a context manager that gives an H3 transformer Sol attention (tau routing).

    The generated video attends sparsely to itself; text, audio and conditioning stay exact, both
    as keys and as queries. The first layer and the first fifth of the evaluations are dense.

    Args:
        transformer: a `MiniMaxH3Transformer3DModel` or a pipeline that holds one.
        num_inference_steps: points of the scheduler's grid, evaluations + 1 (old spelling).
        num_denoise_steps: transformer evaluations of one run; 19 by default.
        warmup_mode, warmup_ratio, warmup_steps: the dense prefix.
        dense_layers: leading layers that stay dense; 1 by default.
        min_tokens: shorter sequences stay dense; 0 by default.
        precision: "native" by default, or "fp8" or "int8" for the sparse calls.
        chunk_tokens: with INT8, stream the QKV projection so many rows at a time, a multiple of 64,
            and never hold Q, K and V; 4096 is a good size.
        **config_overrides: any other field of `H3SparseAttentionConfig`.

    Returns:
        The plugin: `with install_h3_sol_attn(pipe.transformer) as plugin: ...`, or `apply()` and
        `remove()`. Call its `reset()` between runs.

    Raises:
        MissingDependencyError: diffusers is missing; nothing was changed.
        ValueError, TypeError: an option is wrong; nothing was changed.

    Source: spec/h3.md.
    """
    require_diffusers()
    config = sol_config(
        num_inference_steps=num_inference_steps,
        num_denoise_steps=num_denoise_steps,
        warmup_mode=warmup_mode,
        warmup_ratio=warmup_ratio,
        warmup_steps=warmup_steps,
        dense_layers=dense_layers,
        min_tokens=min_tokens,
        precision=precision,
        chunk_tokens=chunk_tokens,
        **config_overrides,
    )
    return install_h3_sparse_attention(transformer, config)


def install_h3_spark_attn(
    transformer: Any,
    num_inference_steps: int | None = None,
    *,
    num_denoise_steps: int | None = None,
    warmup_mode: str | None = None,
    warmup_ratio: float | None = None,
    warmup_steps: int | None = None,
    dense_layers: int | None = None,
    min_tokens: int | None = None,
    topk_ratio: float | None = None,
    preset: str = "default",
    **config_overrides: Any,
) -> H3SparseAttentionPlugin:
    """Return a context manager that gives an H3 transformer Spark attention.

    Video tokens are reordered into blocks that matter to the same queries, a tenth of the blocks
    is read exactly, and the others are summarised around an anchor query.

    Args:
        transformer, num_inference_steps, num_denoise_steps, warmup_mode, warmup_ratio,
            warmup_steps, dense_layers: as `install_h3_sol_attn`.
        min_tokens: shorter sequences stay dense; 8192 by default, below which planning costs more
            than it saves.
        topk_ratio: share of the video blocks read exactly; 0.1 by default.
            `sol_route_topk_ratio=None` asks for tau routing.
        preset: "default", "quality" (64 landmarks) or "fast" (queries follow the keys' tree).
        **config_overrides: any other field of `H3SparseAttentionConfig`; `precision="int8"` is
            refused, for INT8 neither reorders nor reweights.

    Returns:
        The plugin, as `install_h3_sol_attn`.

    Raises:
        MissingDependencyError, ValueError, TypeError: as `install_h3_sol_attn`.

    Source: spec/h3.md, spec/spark.md section 5.
    """
    require_diffusers()
    config = spark_config(
        preset=preset,
        num_inference_steps=num_inference_steps,
        num_denoise_steps=num_denoise_steps,
        warmup_mode=warmup_mode,
        warmup_ratio=warmup_ratio,
        warmup_steps=warmup_steps,
        dense_layers=dense_layers,
        min_tokens=min_tokens,
        topk_ratio=topk_ratio,
        **config_overrides,
    )
    return install_h3_sparse_attention(transformer, config)
