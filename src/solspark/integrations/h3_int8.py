"""INT8 attention of H3's packed sequence: from Q, K and V, or streamed out of the projection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..methods.sol_int8 import HEAD_DIM, sol_attn, sol_attn_chunked
from ..methods.spark import PackedRecord
from ..ops import _dispatch
from ..ops.qkv_producer import variant
from ..plan.layout import PackedLayout
from ..plan.routing import density
from ..plan.select import budget
from ..types import AttentionCall, CallRecord
from .h3_config import H3SparseAttentionConfig
from .h3_layout import H3Layout, version

EVERY_BLOCK = -1e9
"""Threshold, in standard deviations, that every block exceeds."""

ROW_VALUE = 16.0
"""Rows of this value leave a norm as its weight: the mean square swallows eps."""


@dataclass(eq=False)
class Int8State:
    """What the chunked calls of one run leave behind; `H3Controller.reset` makes a new one.

    Args:
        statistics: (layer, forward within its step, sample, layout's facts) -> what
            `sol_attn_chunked` returned beside the output. Two forwards of a step are two
            conditionings.
        rotation: what the newest rotation matrices were made from, and they themselves.
    """

    statistics: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)
    rotation: tuple[tuple[Any, ...], Tensor] | None = None

    def rotations(
        self, cos: Tensor, sin: Tensor, layout: H3Layout, dtype: torch.dtype, forward: int
    ) -> Tensor:
        """Return float32 [S, 1, r/2, 2, 2] in packed order; made once for all layers of a forward.

        The layers of a forward share cos and sin. Anything else, or those two changed in place,
        makes them anew; an inference tensor does not tell, and lasts for its forward only.

        Args:
            cos, sin: [S, r], rotating channels c and c + r/2 of the first r.
            layout: says the packed order.
            dtype: of the activations; diffusers rounds cos and sin to it.
            forward: index of the transformer forward.
        """
        age = tuple(-1 - forward if x.is_inference() else version(x) for x in (cos, sin))
        made_from = (cos, sin, layout, dtype, age)
        if self.rotation is not None:
            known, made = self.rotation
            same = all(a is b for a, b in zip(known[:4], made_from[:4], strict=True))
            if same and known[4] == age:
                return made
        cos, sin = (layout.pack(x.to(dtype).float()[None])[0] for x in (cos, sin))
        half = cos.shape[-1] // 2
        low = torch.stack([cos[:, :half], -sin[:, :half]], -1)
        high = torch.stack([sin[:, half:], cos[:, half:]], -1)
        self.rotation = made_from, torch.stack([low, high], -2)[:, None]
        return self.rotation[1]


class Int8Attention:
    """The INT8 calls of one packed sequence, with blocks placed as packed attention places them.

    The rows after the last complete video block are sinks, and their queries read every key, so the
    context, and the video rows in its first block, are exact.

    Args:
        config: all options.
        tokens, video_tokens: of the packed sequence.
        heads: H.
        device: of the call.
        topk_ratio: of this evaluation; None routes by `sol_tau`.
    """

    def __init__(
        self,
        config: H3SparseAttentionConfig,
        tokens: int,
        video_tokens: int,
        heads: int,
        device: torch.device,
        topk_ratio: float | None,
    ):
        self.layout = PackedLayout(tokens, video_tokens)
        self.heads = heads
        self.top_k: int | None = None
        self.mending = mending(config, tokens, heads, device)
        self.options: dict[str, Any] = {
            "sink_blocks": (self.layout.candidates, self.layout.key_blocks),
            "sink_q": (self.layout.query_blocks, self.layout.key_blocks),
            "tail": config.sol_tail_granularity != "none",
            "token_aug": config.int8_token_aug or 0,
            "impl": config.impl,
            **self.mending,
        }
        if topk_ratio is None:
            self.options["tau"] = config.sol_tau
            return
        self.top_k = budget(topk_ratio, self.layout.candidates)
        if self.top_k < self.layout.candidates:
            self.options["topk_ratio"] = topk_ratio
        else:
            # The INT8 budget never takes every block; a threshold can.
            self.options["tau"] = EVERY_BLOCK

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, PackedRecord]:
        """Attend from Q, K and V [B, T, H, 128] in packed order."""
        with _dispatch.collect_records() as records:
            out = sol_attn(query, key, value, **self.options)
        return out, self._record(records, "int8_direct")

    def streamed(
        self,
        chunks: Callable[[], Iterator[Tensor]],
        rotations: Tensor,
        norms: tuple[Tensor, Tensor],
        eps: float,
        statistics: tuple[Tensor, ...],
    ) -> tuple[Tensor, PackedRecord, tuple[Tensor, ...]]:
        """Attend from chunks of the projection, in packed order.

        Args:
            chunks: gives them afresh each time.
            rotations: float32 [T, 1, r/2, 2, 2].
            norms: RMSNorm weights of Q and K, [128].
            eps: of the norms.
            statistics: what the call of the step before returned; () measures first.

        Returns:
            out bfloat16 [1, T, H, 128], the record, and the statistics for the next step.
        """
        options = dict(self.options)
        if statistics:
            options.update(zip(("kmean", "vscale", "balance"), statistics, strict=False))
        with _dispatch.collect_records() as records:
            out, *following = sol_attn_chunked(
                chunks,
                self.layout.tokens,
                self.heads,
                rotations,
                norms,
                rope_eps=eps,
                **options,
            )
        kind = "int8_primed" if statistics else "int8_cold"
        return out, self._record(records, kind), tuple(following)

    def _record(self, records: list[CallRecord], kind: str) -> PackedRecord:
        """Say what the call did, in the words of packed attention."""
        layout = self.layout
        mode = "tau_diag" if self.top_k is None else "top_k"
        served = {record.operation: record for record in records}
        counts = served["sol_int8"].exact_pairs
        assert counts is not None
        rows = counts[..., : layout.query_blocks]
        return PackedRecord(
            layout=layout,
            route=mode,
            requested_execution=None,
            resolved_execution="int8",
            figures=density(mode, self.top_k, layout),
            exact_pairs=(rows.sum(),),
            total_pairs=rows.numel() * layout.key_blocks,
            implementations={name: record.implementation for name, record in served.items()},
            counters={kind: 1, "tau_route" if self.top_k is None else "topk_route": 1},
        )


def joined_record(records: Sequence[PackedRecord]) -> PackedRecord:
    """Return one record of the calls that attended the samples of a batch one by one."""
    if len(records) == 1:
        return records[0]
    counters: Counter[str] = Counter()
    for record in records:
        counters.update(record.counters)
    return replace(
        records[0],
        exact_pairs=tuple(pairs for record in records for pairs in record.exact_pairs),
        total_pairs=sum(record.total_pairs for record in records),
        counters=dict(counters),
    )


def mending(
    config: H3SparseAttentionConfig, tokens: int, heads: int, device: torch.device
) -> dict[str, bool]:
    """Return whether to rotate and to balance: as asked, else where it costs no kernel.

    Both only ever lower the error, but what no kernel does runs in plain PyTorch, which is no
    default for a GPU.
    """
    call = AttentionCall(
        batch=1,
        query_tokens=tokens,
        key_tokens=tokens,
        heads=heads,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device_type=device.type,
        capability=_dispatch.capability(device),
        key_heads=heads,
    )
    producer = _dispatch.where_available("qkv_producer", config.impl)
    best = _dispatch.choose("qkv_producer", call, producer)
    found = {"rotate": config.int8_rotate, "balance": config.int8_balance}
    for name, asked in found.items():
        if asked is None:
            kind = variant(name == "rotate", name == "balance")
            reasons = _dispatch.reasons("qkv_producer", best, replace(call, variant=kind))
            found[name] = not reasons
    return {name: bool(value) for name, value in found.items()}


def projected_chunks(
    attn: Any, hidden_states: Tensor, layout: H3Layout, size: int
) -> Callable[[], Iterator[Tensor]]:
    """Return what streams the fused QKV projection of a packed sequence, `size` rows at a time.

    The projections are called as modules, LoRA and quantised layers among them, and each time
    anew: nothing but one chunk is kept.

    Args:
        attn: the attention module; fused or separate projections.
        hidden_states: [1, S, hidden] in the model's order.
        layout: says the packed order.
        size: rows of a chunk, a multiple of 64.
    """

    def project(rows: Tensor) -> Tensor:
        if attn.fused_projections:
            return attn.to_qkv(rows)
        return torch.cat([attn.to_q(rows), attn.to_k(rows), attn.to_v(rows)], -1)

    def chunks() -> Iterator[Tensor]:
        for first in range(0, layout.tokens, size):
            rows = layout.packed_rows(hidden_states, first, first + size)
            yield project(rows).to(torch.bfloat16)

    return chunks


def warm_up_int8(
    calls: Int8Attention, size: int | None, device: torch.device, dtype: torch.dtype
) -> PackedRecord:
    """Run the calls on noise, streamed ones as first and as later steps call them."""
    tokens, heads = calls.layout.tokens, calls.heads
    if size is None:
        shape = (1, tokens, heads, HEAD_DIM)
        return calls.whole(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(3)))[1]
    noise = torch.randn(size, 3 * heads * HEAD_DIM, device=device, dtype=torch.bfloat16)

    def chunks() -> Iterator[Tensor]:
        return (noise[: tokens - first] for first in range(0, tokens, size))

    rotations = torch.eye(2, device=device).expand(tokens, 1, HEAD_DIM // 2, 2, 2)
    ones = torch.ones(HEAD_DIM, device=device)
    _, _, statistics = calls.streamed(chunks, rotations, (ones, ones), 1e-5, ())
    return calls.streamed(chunks, rotations, (ones, ones), 1e-5, statistics)[1]


def norm_weight(norm: Any, like: Tensor) -> Tensor:
    """Return the weight of an RMSNorm over 128 channels, by calling it.

    Offloading hooks bring a weight to the device when its module is called, not when it is read.
    """
    rows = torch.full((1, HEAD_DIM), ROW_VALUE, dtype=like.dtype, device=like.device)
    return norm(rows)[0]


def norm_eps(norm: Any, dtype: torch.dtype) -> float:
    """Return the eps of an RMSNorm; torch's default is the type's own."""
    return torch.finfo(dtype).eps if norm.eps is None else norm.eps


def check_int8_attention(config: H3SparseAttentionConfig, path: str, attn: Any) -> None:
    """Refuse an attention module that the INT8 calls cannot serve.

    Args:
        config: asks for INT8.
        path: of the module, for the message.
        attn: the module.

    Raises:
        ValueError: its head dim, its type, or, streaming, its norms.
    """
    if attn.head_dim != HEAD_DIM:
        raise ValueError(
            f"precision: 'int8' needs head_dim {HEAD_DIM}, but {path} has {attn.head_dim}"
        )
    norms = attn.norm_q, attn.norm_k
    weight = getattr(norms[0], "weight", None)
    if isinstance(weight, Tensor) and weight.dtype == torch.float64:
        raise ValueError(
            f"precision: 'int8' expected float16, bfloat16 or float32, but {path} is in float64"
        )
    if config.chunk_tokens is not None:
        missing = [name for name in ("norm_q", "norm_k") if not hasattr(getattr(attn, name), "eps")]
        if missing or norms[0].eps != norms[1].eps:
            raise ValueError(
                f"chunk_tokens: expected RMSNorms of one eps for Q and K at {path}, got "
                f"{type(norms[0]).__name__} and {type(norms[1]).__name__}"
            )
