"""The attention processor that takes the place of diffusers' on every H3 transformer block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..methods.spark import PackedRecord, packed_attention
from ..types import BLOCK
from .h3_config import H3SparseAttentionConfig
from .h3_controller import H3Controller, Stopwatch
from .h3_int8 import Int8Attention, joined_record, norm_eps, norm_weight, projected_chunks
from .h3_layout import H3Layout


class WrappingProcessor:
    """Stand in front of a block's processor and answer for it where diffusers asks.

    `_attention_backend` and `_parallel_config` are the original's, so that diffusers'
    `set_attention_backend`, `reset_attention_backend` and `enable_parallelism` reach it while it
    is replaced, and what they set stays after it is back.
    """

    def __init__(self, original: Any):
        self.original = original

    @property
    def _attention_backend(self) -> Any:
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, value: Any) -> None:
        self.original._attention_backend = value

    @property
    def _parallel_config(self) -> Any:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, value: Any) -> None:
        self.original._parallel_config = value


class H3SparseAttentionProcessor(WrappingProcessor):
    """Attend in one block: dense calls go to the saved original, the rest is sparse."""

    def __init__(self, controller: H3Controller, layer: int, original: Any):
        super().__init__(original)
        self.controller = controller
        self.layer = layer
        self.active = True

    # The evaluation index and the layer number would become guards of a compiled block, which is
    # then recompiled up to the limit; attention is an eager island instead.
    @torch.compiler.disable
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend over packed sequences; inference only, the sparse path keeps no graph.

        Args:
            attn: the attention module.
            hidden_states: [B, S, hidden]; the transformer's own arguments give all samples of a
                batch one layout. Each is routed by itself.
            rotary_emb: (cos, sin), each [S, rotary].
            attention_mask: passed on by dense calls, refused by sparse ones.

        Returns:
            [B, S, hidden].

        Raises:
            RuntimeError: a sparse call without layout, with a mask, or with another sequence length
                than the layout's.
        """
        if not self.active:
            # Someone still holds this processor after removal: behave as if it were not there.
            return self.original(attn, hidden_states, rotary_emb, attention_mask)
        controller = self.controller
        watch = Stopwatch(hidden_states.device)
        reason = controller.config.dense_reason(
            controller.evaluation, self.layer, hidden_states.shape[1]
        )
        if reason is None:
            reason = self._layout_reason()
        if reason is not None:
            out = self._dense(attn, hidden_states, rotary_emb, attention_mask)
            controller.note(self.layer, f"dense:{reason}", watch)
            return out
        layout = self._check_sparse(hidden_states, attention_mask)
        with torch.no_grad():
            out, record = self._sparse(attn, hidden_states, rotary_emb, layout)
        controller.note(self.layer, "sparse:sol", watch, record)
        return out

    def _layout_reason(self) -> str | None:
        """Say why the layout asks for a dense call; None: it does not."""
        layout = self.controller.layout
        if layout is None:
            raise RuntimeError(
                "sparse H3 attention has no layout: the transformer's forward pre-hook did not "
                "run; call the transformer, not its blocks, inside the context"
            )
        if layout.mixed_timesteps:
            return "mixed_timesteps"
        if layout.video_tokens < BLOCK:
            return "no_complete_block"
        return None

    def _check_sparse(self, hidden_states: Tensor, attention_mask: Tensor | None) -> H3Layout:
        """Refuse what the sparse path cannot serve, before anything is computed."""
        layout = self.controller.layout
        assert layout is not None
        tokens = hidden_states.shape[1]
        if attention_mask is not None:
            raise RuntimeError(
                "attention_mask: sparse H3 attention expected None, got "
                f"{list(attention_mask.shape)}; H3 packs one request without padding"
            )
        if tokens != layout.tokens:
            raise RuntimeError(
                f"hidden_states: expected the {layout.tokens} rows of the packed layout, got "
                f"{tokens} (context parallelism is not supported)"
            )
        if getattr(self.original, "_parallel_config", None) is not None:
            raise RuntimeError("context parallelism was enabled inside the context: not supported")
        return layout

    def _dense(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """Run the original processor, on `dense_backend` where one is chosen."""
        backend = self.controller.config.dense_backend
        if backend is None:
            return self.original(attn, hidden_states, rotary_emb, attention_mask)
        if isinstance(backend, str):
            with _borrowed_backend(self.original, backend):
                return self.original(attn, hidden_states, rotary_emb, attention_mask)
        if attention_mask is not None:
            raise RuntimeError(
                "attention_mask: a callable dense_backend expected None, got "
                f"{list(attention_mask.shape)}"
            )
        query, key, value = project_qkv(attn, hidden_states, rotary_emb, lambda rows: rows)
        return _output(attn, backend(query, key, value), query.dtype)

    def _sparse(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None,
        layout: H3Layout,
    ) -> tuple[Tensor, PackedRecord]:
        """Project, pack, attend sparsely, unpack, project back."""
        controller = self.controller
        if controller.config.chunk_tokens is not None:
            out, record = self._stream(attn, hidden_states, rotary_emb, layout)
            return _output(attn, layout.unpack(out), hidden_states.dtype), record
        query, key, value = project_qkv(attn, hidden_states, rotary_emb, layout.pack)
        dtype = query.dtype
        if controller.config.precision == "int8":
            out, record = self._int8(layout, attn.heads, query.device).whole(query, key, value)
        else:
            out, record = packed_attention(
                query,
                key,
                value,
                video_tokens=layout.video_tokens,
                grid=layout.grid,
                config=controller.packed_config(),
                dense=dense_attention(controller.config, self.original),
                cache=controller.cache,
                impl=controller.config.impl,
            )
        # At 100,000 rows each of these is 1.4 GiB, and the output projection comes next.
        del query, key, value
        return _output(attn, layout.unpack(out), dtype), record

    def _int8(self, layout: H3Layout, heads: int, device: torch.device) -> Int8Attention:
        """Return the INT8 calls of the present evaluation."""
        controller = self.controller
        calls = Int8Attention(
            controller.config,
            layout.tokens,
            layout.video_tokens,
            heads,
            device,
            controller.topk_ratio,
        )
        controller.mending = calls.mending
        return calls

    def _stream(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None,
        layout: H3Layout,
    ) -> tuple[Tensor, PackedRecord]:
        """Attend in INT8 from the projection in chunks, with the statistics of the step before."""
        if rotary_emb is None:
            raise RuntimeError("rotary_emb: INT8 from chunks expected (cos, sin), got None")
        controller = self.controller
        config, state, dtype = controller.config, controller.int8, hidden_states.dtype
        assert config.chunk_tokens is not None
        pass_of_step = (controller.forwards - 1) % config.evaluations_per_step
        calls = self._int8(layout, attn.heads, hidden_states.device)
        rotations = state.rotations(*rotary_emb, layout, dtype, controller.forwards)
        norms = norm_weight(attn.norm_q, hidden_states), norm_weight(attn.norm_k, hidden_states)
        outs, records = [], []
        for sample, rows in enumerate(hidden_states.split(1)):
            name = (self.layer, pass_of_step, sample, layout.tokens, layout.grid)
            out, record, state.statistics[name] = calls.streamed(
                projected_chunks(attn, rows, layout, config.chunk_tokens),
                rotations,
                norms,
                norm_eps(attn.norm_q, dtype),
                state.statistics.get(name, ()),
            )
            outs.append(out)
            records.append(record)
        return outs[0] if len(outs) == 1 else torch.cat(outs), joined_record(records)


def dense_attention(
    config: H3SparseAttentionConfig, original: Any
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the attention of the dense suffix: the chosen backend, or else the user's."""
    backend = config.dense_backend
    if backend is not None and not isinstance(backend, str):
        return backend
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    chosen = getattr(original, "_attention_backend", None)
    if isinstance(backend, str):
        chosen = AttentionBackendName(backend)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dispatch_attention_fn(query, key, value, backend=chosen)

    return attend


@contextmanager
def _borrowed_backend(processor: Any, backend: str) -> Iterator[None]:
    """Set the backend of a processor for one call."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    saved = processor._attention_backend
    processor._attention_backend = AttentionBackendName(backend)
    try:
        yield
    finally:
        processor._attention_backend = saved


def project_qkv(
    attn: Any,
    hidden_states: Tensor,
    rotary_emb: tuple[Tensor, Tensor] | None,
    pack: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed query, key, value [B, S, H, D], normed and rotated as diffusers does.

    The `to_*` modules are called, never read: LoRA and quantised layers work. One tensor is packed
    at a time and its source dropped.
    """
    from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb

    def finish(rows: Tensor, norm: Any) -> Tensor:
        rows = rows.unflatten(-1, (attn.heads, -1))
        if norm is not None:
            rows = norm(rows)
            if rotary_emb is not None:
                rows = _apply_rotary_emb(rows, *rotary_emb)
        return pack(rows)

    if attn.fused_projections:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        query = finish(query, attn.norm_q)
        key = finish(key, attn.norm_k)
        value = finish(value, None)
        return query, key, value
    query = finish(attn.to_q(hidden_states), attn.norm_q)
    key = finish(attn.to_k(hidden_states), attn.norm_k)
    value = finish(attn.to_v(hidden_states), None)
    return query, key, value


def _output(attn: Any, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Flatten the heads and apply the output projection."""
    out = out.flatten(2, 3).to(dtype)
    return attn.to_out[1](attn.to_out[0](out))
