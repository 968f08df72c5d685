"""INT8 Sol-Attn in kernels: route some heads at a time, then attend in one launch.

The exact blocks are read by a Triton kernel, or by one in Gluon for compute capability 9.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch
from solspark.reference.sol_int8 import LOG2E, budget
from solspark.reference.sol_int8_quantized import biased_blocks, pair_centroids
from solspark.types import BLOCK, BlockPlan, QuantizedQKV

ROUTE_BYTES = 512 * 2**20
"""Work space of routing, at least one head's: its scores, and the levels of its tokens.

It is free again before the output is allocated: up to that size it costs no memory at the peak.
"""

State = tuple[Tensor, Tensor, Tensor]


def parts_of_values(device: torch.device) -> int:
    """Return in how many parts of the channels a kernel adds up values.

    Where products are mma.sync, the compiler lays four warps along the channels unless a product
    has as many rows as columns: each would hold a share of every row's scores, and spill.
    """
    capability = None if torch.version.hip else _dispatch.capability(device)
    return 1 if capability is None or capability[0] in (9, 10) else 2


def register_bound(device: torch.device) -> int | None:
    """Return the most registers of a thread that reads exact blocks, None for as many as it likes.

    With mma.sync the bound would cost spills in the main loop; AMD's compiler knows no such option.
    """
    from solspark.kernels.sol_int8 import REGISTERS

    is_hopper = not torch.version.hip and _dispatch.capability(device) == (9, 0)
    return REGISTERS if is_hopper else None


def run(
    qkv: QuantizedQKV,
    tau: float,
    scale: float,
    sinks: tuple[int, int],
    dense_rows: tuple[int, int],
    topk_ratio: float,
    tail: bool,
    coarse_gate: Tensor | None,
    token_aug: int,
    dtype: torch.dtype,
    hopper: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend; return the output and the exact blocks of each row, int32 [B, H, N].

    The lists of all heads are held at once, as 16-bit numbers where these suffice: the only memory
    that grows with the square of the length and the number of heads.
    """
    from solspark.kernels.coarse_gate import launch_coarse_gate
    from solspark.kernels.sol_int8 import launch_sol_int8

    batch, heads, _, _ = qkv.query.shape
    if scale < 0:
        # Kernels take the maximum of scores before they scale them.
        qkv = replace(qkv, query=-qkv.query, query_means=-qkv.query_means, centroid=-qkv.centroid)
    a = abs(scale) * LOG2E
    coarse = None
    with torch.cuda.device_of(qkv.query):
        if coarse_gate is not None:
            coarse_gate = _checks.last_dim_contiguous(coarse_gate)
            coarse = launch_coarse_gate(
                qkv.query_means.flatten(0, 1),
                qkv.key_means.flatten(0, 1),
                qkv.value_sums.flatten(0, 1),
                qkv.lengths,
                a=a,
            )
        routes = Routes(qkv, a, sinks, dense_rows, tail, token_aug)
        routes.find(tau, topk_ratio)
        if hopper:
            from solspark.kernels.hopper import sol_int8

            plan = routes.plan(batch)
            out = sol_int8.launch_sol_int8(
                qkv, routes.state, plan, coarse_gate, coarse, a=a, dtype=dtype
            )
        else:
            out = launch_sol_int8(
                qkv,
                routes.state,
                routes.lists,
                routes.counts,
                routes.tokens,
                coarse_gate,
                coarse,
                a=a,
                dtype=dtype,
                parts=parts_of_values(qkv.query.device),
                registers=register_bound(qkv.query.device),
            )
    return out, routes.counts.unflatten(0, (batch, heads))


class Routes:
    """What all heads read exactly, and the states of what they do not, found group by group.

    bits: int32 [BH, N, W]; lists: [BH, N, N], ascending, and counts int32 [BH, N]; state: of the
    blocks in no list, float32 [BH, N], [BH, N], [BH, N, D], or None; tokens: int32 [BH, P, A] and
    [BH, P], or None.
    """

    def __init__(
        self,
        qkv: QuantizedQKV,
        a: float,
        sinks: tuple[int, int],
        dense_rows: tuple[int, int],
        tail: bool,
        token_aug: int,
    ):
        batch, heads, _, head_dim = qkv.query.shape
        device = qkv.query.device
        rows, blocks = batch * heads, qkv.lengths.numel()
        self.qkv, self.a, self.heads, self.sinks = qkv, a, heads, sinks
        self.blocks, self.pairs, self.words = blocks, -(-blocks // 2), -(-blocks // 32)
        # What is held of a head: scores, and its tokens' levels and the largest of each block.
        size = 4 * blocks * blocks
        if token_aug:
            size += self.pairs * (BLOCK + 4) * blocks
        self.group = max(1, min(rows, ROUTE_BYTES // size))

        self.columns = torch.ones(blocks, dtype=torch.int8, device=device)
        self.columns[sinks[0] : sinks[1]] = 2
        self.dense = torch.zeros(blocks, dtype=torch.int8, device=device)
        self.dense[dense_rows[0] : dense_rows[1]] = 1
        self.rows = rows
        self.bits = torch.empty(rows, blocks, self.words, dtype=torch.int32, device=device)
        self.lists = _lists(rows, blocks, blocks, blocks, device)
        self.counts = torch.empty(rows, blocks, dtype=torch.int32, device=device)
        self.state: State | None = None
        if tail:
            high, mass = (torch.empty(rows, blocks, device=device) for _ in range(2))
            self.state = high, mass, torch.empty(rows, blocks, head_dim, device=device)
        self.tokens: tuple[Tensor, Tensor] | None = None
        if token_aug:
            shape = (rows, self.pairs)
            self.tokens = (
                torch.empty(*shape, token_aug, dtype=torch.int32, device=device),
                torch.empty(shape, dtype=torch.int32, device=device),
            )
            barred = biased_blocks(qkv)
            barred[:, sinks[0] : sinks[1]] = True
            self.barred = barred.to(torch.uint8)

    def plan(self, batch: int) -> BlockPlan:
        """Return the exact blocks as a plan of [B, H, N]."""
        parts = (
            item.unflatten(0, (batch, self.heads)) for item in (self.bits, self.lists, self.counts)
        )
        return BlockPlan(*parts, query_tokens=self.qkv.tokens, key_tokens=self.qkv.tokens)

    def find(self, tau: float, topk_ratio: float) -> None:
        """Route all heads."""
        for first in range(0, self.rows, self.group):
            self._find(first, tau, topk_ratio)

    def _find(self, first: int, tau: float, topk_ratio: float) -> None:
        """Route some heads from `first` on, counted through samples."""
        from solspark.kernels.int8_scores import launch_int8_scores
        from solspark.kernels.int8_tail import launch_int8_tail
        from solspark.kernels.score_blocks import launch_thresholds
        from solspark.kernels.select_blocks import launch_select_blocks

        part = _Part(self.qkv, first, first + self.group)
        group, blocks = part.query_means.shape[:2]
        scores = part.query_means.new_empty(group, blocks, blocks)
        launch_int8_scores(
            part.centroid,
            part.centroid_scale,
            part.pooled,
            part.pooled_scale,
            a=self.a,
            out=scores,
        )
        thresholds = None
        if topk_ratio <= 0:
            # Scores are centred already: the mean that a threshold starts from is zero.
            thresholds = launch_thresholds(
                part.query_means[None],
                torch.zeros_like(part.key_var)[None],
                part.key_var[None],
                scale_log2=self.a,
                tau=tau,
            )
        bits = self.bits[first : first + group]
        launch_select_blocks(
            scores[None],
            thresholds,
            self.columns,
            self.dense,
            None,
            bits[None],
            self.lists[None, first : first + group],
            self.counts[None, first : first + group],
            top_k=budget(topk_ratio, blocks, self.sinks),
            local_radius=1,
            ties=True,
        )
        rest = self._refine(first, part, scores, bits) if self.tokens is not None else None
        if self.state is not None:
            heads, (high, mass, out) = slice(first, first + group), self.state
            launch_int8_tail(
                scores,
                bits,
                part.value_sums,
                part.value_scale,
                self.qkv.lengths,
                rest,
                (high[heads], mass[heads], out[heads]),
            )

    def _refine(
        self, first: int, part: _Part, scores: Tensor, bits: Tensor
    ) -> tuple[Tensor, State] | None:
        """List the tokens of some heads; return the candidates and the other tokens' states."""
        from solspark.kernels.select_blocks import launch_select_blocks
        from solspark.kernels.token_candidates import launch_token_candidates
        from solspark.kernels.token_levels import launch_token_levels
        from solspark.kernels.token_lists import launch_token_lists
        from solspark.kernels.token_rest import launch_token_rest

        assert self.tokens is not None
        qkv, blocks, pairs = self.qkv, self.blocks, self.pairs
        group = scores.shape[0]
        candidates = bits.new_empty(group, pairs, self.words)
        reference = scores.new_empty(group, pairs)
        launch_token_candidates(
            scores, bits, self.barred, candidates, reference, first_head=first, heads=self.heads
        )
        centroids = pair_centroids(part.query_means, part.shift, self.a, qkv.rotated)
        key = qkv.key, qkv.key_scale, qkv.key_bias
        levels = bits.new_empty((group, pairs, blocks * BLOCK), dtype=torch.uint8)
        most = scores.new_empty(group, pairs, blocks)
        launch_token_levels(
            centroids,
            reference,
            candidates,
            key,
            levels,
            most,
            first_head=first,
            heads=self.heads,
        )

        # Whatever is listed lies in the blocks with the highest levels, one more than tokens.
        token_list, token_counts = self.tokens
        top = min(blocks, token_list.shape[2] + 1)
        chosen = _lists(group, pairs, top, blocks, bits.device)
        chosen_counts = bits.new_empty(group, pairs)
        launch_select_blocks(
            most[None],
            None,
            torch.ones_like(self.columns),
            self.dense.new_zeros(pairs),
            None,
            bits.new_empty(1, group, pairs, self.words),
            chosen[None],
            chosen_counts[None],
            top_k=top,
            local_radius=-1,
        )
        heads = slice(first, first + group)
        launch_token_lists(levels, chosen, chosen_counts, token_list[heads], token_counts[heads])
        if self.state is None:
            return None
        rest = launch_token_rest(
            centroids,
            levels,
            key,
            qkv.value,
            first_head=first,
            heads=self.heads,
            parts=parts_of_values(levels.device),
        )
        return candidates, rest


@dataclass
class _Part:
    """Operands of some heads, [G, ...], by their names in `QuantizedQKV`."""

    query_means: Tensor
    key_var: Tensor
    centroid: Tensor
    centroid_scale: Tensor
    pooled: Tensor
    pooled_scale: Tensor
    value_sums: Tensor
    value_scale: Tensor
    shift: Tensor

    def __init__(self, qkv: QuantizedQKV, first: int, stop: int):
        for name in self.__annotations__:
            setattr(self, name, getattr(qkv, name).flatten(0, 1)[first:stop].contiguous())


def _lists(rows: int, queries: int, width: int, blocks: int, device: torch.device) -> Tensor:
    """Return unwritten lists of numbers of blocks."""
    index_type = torch.int16 if blocks < 2**15 else torch.int32
    return torch.empty(rows, queries, width, dtype=index_type, device=device)
