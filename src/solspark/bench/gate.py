"""The correctness gate: sampled query rows against an oracle in float64, computed from the plan
itself.

No T x T tensor appears: a few query rows a head read every key. A second evaluation of the same
rows with the arithmetic of a flash kernel in the inputs' dtype says how far rounding alone may
lead; a kernel passes iff it is finite and, for the largest and for the mean error, e_kernel <= 2
e_rounding + eps(dtype) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solspark._checks import resolve_scale
from solspark.types import BLOCK, BlockPlan, BlockSummaries, block_count

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class RowSample:
    """Query rows that stand for all.

    Args:
        rows: int64 [R], ascending token indices.
        heads: head indices to look at.
    """

    rows: Tensor
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Args:
        gate: "pass", or what failed with its figures.
        relative_l2: of the output against the oracle, over the sample.
    """

    gate: str
    relative_l2: float

    @property
    def passed(self) -> bool:
        return self.gate == "pass"


def sample_rows(
    tokens: int, heads: int, device: torch.device, *, rows: int = 32, most_heads: int = 8
) -> RowSample:
    """Choose query rows spread over the sequence: the first, the last, a block border, and a fixed
    stride.

    Args:
        tokens: T.
        heads: H.
        device: of the index tensor.
        rows: about how many.
        most_heads: heads looked at, spread over H.
    """
    border = max(0, tokens // BLOCK * BLOCK - 1)
    spread = [int((i + 0.37) * tokens / rows) for i in range(rows)]
    chosen = sorted({0, tokens - 1, border, min(border + 1, tokens - 1), *spread})
    count = min(heads, most_heads)
    return RowSample(
        torch.tensor(chosen, device=device), tuple(i * heads // count for i in range(count))
    )


def exact_blocks_of_rows(plan: BlockPlan, rows: Tensor, batch: int, head: int) -> Tensor:
    """Return bool [R, NK]: the key blocks that each sampled query row reads exactly, from the
    plan's bits.
    """
    words = plan.bits[batch, min(head, plan.bits.shape[1] - 1)][rows // BLOCK]
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1)[:, : plan.key_blocks].bool()


@dataclass(frozen=True)
class Tail:
    """Summaries of one head for the rows of a sample, as the oracle wants them.

    Args:
        keys: [R or 1, NK, D].
        values: [R or 1, NK, D].
        log_mass: [R or 1, NK], natural log.
        queries: [R, D] queries for the tail, if other than the rows' own (tail "block"), else None.
    """

    keys: Tensor
    values: Tensor
    log_mass: Tensor
    queries: Tensor | None = None


def block_means(rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the [N, D] means of the 64-row blocks of [T, D], in `dtype`."""
    blocks = block_count(rows.shape[0])
    padded = rows.new_zeros((blocks * BLOCK, rows.shape[1]), dtype=dtype)
    padded[: rows.shape[0]] = rows
    counts = torch.full((blocks, 1), float(BLOCK), dtype=dtype, device=rows.device)
    counts[-1] = rows.shape[0] - BLOCK * (blocks - 1)
    return padded.view(blocks, BLOCK, -1).sum(1) / counts


def mean_tail(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, per_block: bool, rounded: bool
) -> Tail:
    """Return plain summaries (block means, log of their length) of one head [T, D].

    Args:
        query, key, value: one head.
        rows: sampled query rows.
        per_block: give every row the mean query of its block (tail "block").
        rounded: round the summaries to the inputs' dtype, as an implementation stores them.
    """

    def stored(means: Tensor) -> Tensor:
        return means.to(key.dtype).double() if rounded else means

    blocks = block_count(key.shape[0])
    lengths = torch.full((blocks,), float(BLOCK), dtype=torch.float64, device=key.device)
    lengths[-1] = key.shape[0] - BLOCK * (blocks - 1)
    queries = stored(block_means(query))[rows // BLOCK] if per_block else None
    return Tail(
        stored(block_means(key))[None],
        stored(block_means(value))[None],
        lengths.log()[None],
        queries,
    )


def given_tail(summaries: BlockSummaries, rows: Tensor, batch: int, head: int) -> Tail:
    """Return the summaries of one head as they are, each row those of its query block's parent."""
    parents = torch.zeros(1, dtype=torch.long, device=rows.device)
    if summaries.parents is not None:
        parents = summaries.parents.long()[rows // BLOCK]
    keys, values, mass = (
        x[batch, parents, head].double()
        for x in (summaries.keys, summaries.values, summaries.log_mass)
    )
    return Tail(keys, values, mass)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    exact: Tensor | None = None,
    tail: Tail | None = None,
    dtype: torch.dtype = torch.float64,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """Return [R, D]: one joint softmax over the exact keys and the summaries of the others.

    Args:
        query: [R, D] sampled rows of one head.
        key: [T, D].
        value: [T, D].
        scale: on the logits.
        exact: bool [R, NK] blocks read exactly; None for all.
        tail: summaries of the rest; None drops them.
        dtype: of the arithmetic.
        round_to: round the probabilities and the result to this dtype, as a kernel does; None keeps
            them.

    Returns:
        In `dtype`; a row that reads nothing is zero.
    """
    tokens = key.shape[0]
    logits = query.to(dtype) @ key.to(dtype).T * scale
    if exact is not None:
        visible = exact.repeat_interleave(BLOCK, dim=1)[:, :tokens]
        logits = logits.masked_fill(~visible, -torch.inf)
    parts, values = [logits], [value.to(dtype)]
    if tail is not None and exact is not None:
        asking = (query if tail.queries is None else tail.queries).to(dtype)
        scores = (
            torch.einsum("rd,gnd->rn", asking, tail.keys.to(dtype).expand(1, -1, -1))
            if tail.keys.shape[0] == 1
            else torch.einsum("rd,rnd->rn", asking, tail.keys.to(dtype))
        )
        scores = scores * scale + tail.log_mass.to(dtype)
        parts.append(scores.masked_fill(exact, -torch.inf))
    joint = torch.cat(parts, dim=1)
    peak = joint.amax(1, keepdim=True)
    weights = torch.exp(joint - torch.where(peak.isfinite(), peak, 0.0))
    total = weights.sum(1, keepdim=True)
    kept = weights if round_to is None else weights.to(round_to).to(dtype)
    out = kept[:, :tokens] @ values[0]
    if len(parts) > 1:
        assert tail is not None
        told = tail.values.to(dtype)
        out = out + (
            kept[:, tokens:] @ told[0]
            if told.shape[0] == 1
            else torch.einsum("rn,rnd->rd", kept[:, tokens:], told)
        )
    out = torch.where(
        total > 0, out / total.clamp_min(1e-300 if dtype == torch.float64 else 1e-30), 0.0
    )
    return out if round_to is None else out.to(round_to).to(dtype)


def compare(got: Tensor, oracle: Tensor, rounding: Tensor, dtype: torch.dtype) -> Verdict:
    """Judge a sample by the rule of the tests.

    Args:
        got: what the implementation returned.
        oracle: float64.
        rounding: the same rows in the inputs' dtype by a plain evaluation.
        dtype: of the inputs; its eps enters.

    Returns:
        A verdict; NaN and infinity never pass.
    """
    got, rounding = got.double(), rounding.double()
    relative = float((got - oracle).norm() / oracle.norm().clamp_min(1e-300))
    if not bool(torch.isfinite(got).all()):
        return Verdict("not finite", relative)
    eps = torch.finfo(dtype).eps
    # Float32 has no rounding of the output that dwarfs the order of the sums, and orders differ.
    slack = 4 if dtype == torch.float32 else 2
    failures = []
    for name, reduce in (("max", torch.amax), ("mean", torch.mean)):
        error, allowed = reduce((got - oracle).abs()), reduce((rounding - oracle).abs())
        bound = slack * allowed + eps * reduce(oracle.abs())
        if not bool(error <= bound):
            failures.append(f"{name} error {float(error):.3g} over {float(bound):.3g}")
    return Verdict("; ".join(failures) or "pass", relative)


def gate_output(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sample: RowSample,
    *,
    plan: BlockPlan | None = None,
    tail: str = "none",
    summaries: BlockSummaries | None = None,
    scale: float | None = None,
) -> Verdict:
    """Judge an attention output [B, L, H, D] on sampled rows.

    Args:
        output: to be judged; L may be shorter than T where only the first rows are wanted.
        query, key, value: [B, T, H, D] (key and value may have fewer heads, H a multiple of
            theirs).
        sample: rows and heads.
        plan: what each query block reads; None means dense attention.
        tail: "none", "query" or "block" (plain block means).
        summaries: what the tail read in place of plain block means, taken as given.
        scale: 1 / sqrt(D) unless given.
    """
    scale = resolve_scale(scale, query.shape[-1])
    rows = sample.rows[sample.rows < output.shape[1]]
    group = query.shape[2] // key.shape[2]
    got, oracle, rounding = [], [], []
    for batch in range(query.shape[0]):
        for head in sample.heads:
            q, k, v = (
                query[batch, :, head],
                key[batch, :, head // group],
                value[batch, :, head // group],
            )
            exact = None if plan is None else exact_blocks_of_rows(plan, rows, batch, head)
            for rounded, target in ((False, oracle), (True, rounding)):
                told = None
                if summaries is not None:
                    told = given_tail(summaries, rows, batch, head)
                elif plan is not None and tail != "none":
                    told = mean_tail(q, k, v, rows, per_block=tail == "block", rounded=rounded)
                target.append(
                    attend_rows(
                        q[rows],
                        k,
                        v,
                        scale=scale,
                        exact=exact,
                        tail=told,
                        dtype=_working(q, rounded),
                        round_to=q.dtype if rounded else None,
                    ).double()
                )
            got.append(output[batch, rows, head])
    return compare(torch.stack(got), torch.stack(oracle), torch.stack(rounding), query.dtype)


def _working(query: Tensor, rounded: bool) -> torch.dtype:
    """Return the arithmetic of the oracle (float64) or of a kernel (float32 accumulation)."""
    return torch.float32 if rounded and query.dtype != torch.float64 else torch.float64


def dense_rows(
    query: Tensor, key: Tensor, value: Tensor, sample: RowSample, *, scale: float | None = None
) -> Tensor:
    """Return float64 [B, heads of the sample, R, D]: dense attention of the sampled rows."""
    scale = resolve_scale(scale, query.shape[-1])
    group = query.shape[2] // key.shape[2]
    return torch.stack(
        [
            torch.stack(
                [
                    attend_rows(
                        query[batch, sample.rows, head],
                        key[batch, :, head // group],
                        value[batch, :, head // group],
                        scale=scale,
                    )
                    for head in sample.heads
                ]
            )
            for batch in range(query.shape[0])
        ]
    )


def relative_to(reference: Tensor, output: Tensor, sample: RowSample) -> float:
    """Return the relative L2 of an output [B, T, H, D] against sampled reference rows of
    `dense_rows`.
    """
    picked = output[:, sample.rows][:, :, list(sample.heads)].transpose(1, 2).double()
    return float((picked - reference).norm() / reference.norm().clamp_min(1e-300))


def judge_plan(
    plan: BlockPlan,
    query: Tensor,
    key: Tensor,
    sample: RowSample,
    *,
    top_k: int | None = None,
    tau: float | None = None,
    local_radius: int = -1,
    scale: float | None = None,
) -> Verdict:
    """Judge a plan of `plan_sol` without sinks on the query blocks of the sampled rows.

    Scores are taken anew in float64 from unrounded means; a stored key mean is off by half a unit
    in the last place a channel, so that a score is off by at most eps / 2 * sum |q_d k_d| * a. A
    block may be on the wrong side of its cutoff only by as much as these bounds allow.

    Args:
        plan: [B, H, N, N].
        query, key: [B, T, H, D].
        sample: rows and heads.
        top_k: the budget of a row, or None for the "diag" threshold at `tau`.
        tau: standard deviations above the mean.
        local_radius: band outside the budget.
        scale: 1 / sqrt(D) unless given.
    """
    scale = resolve_scale(scale, query.shape[-1])
    a = scale * LOG2_E
    eps = torch.finfo(query.dtype).eps
    blocks = torch.unique(sample.rows // BLOCK)
    wrong, total, worst = 0, 0, 0.0
    for batch in range(query.shape[0]):
        for head in sample.heads:
            means = block_means(query[batch, :, head])[blocks]
            keys = block_means(key[batch, :, head])
            scores = a * means @ keys.T
            slack = (eps / 2 + 1e-6) * a * (means.abs() @ keys.abs().T)
            chosen = exact_blocks_of_rows(plan, blocks * BLOCK, batch, head)
            total += chosen.shape[0]
            if top_k is not None:
                band = (blocks[:, None] - torch.arange(keys.shape[0], device=keys.device)).abs()
                band = band <= local_radius
                kept = torch.where(chosen & ~band, scores + slack, torch.inf).amin(1)
                left = torch.where(~chosen, scores - slack, -torch.inf).amax(1)
                # Blocks of the band may or may not have used the budget.
                counts = chosen.sum(1)
                fits = (counts >= min(top_k, keys.shape[0])) & (counts <= top_k + band.sum(1))
                bad = (left > kept) | ~fits
                worst = max(worst, float((left - kept).amax()))
            else:
                assert tau is not None
                spread = keys.var(0, unbiased=False)
                limit = a * means @ keys.mean(0) + tau * torch.sqrt(
                    a**2 * means.square() @ spread + 1e-6
                )
                slack = 2 * slack + (1e-6 + eps) * limit.abs()[:, None]
                missing = (scores - slack > limit[:, None]) & ~chosen
                band = (blocks[:, None] - torch.arange(keys.shape[0], device=keys.device)).abs()
                extra = (scores + slack < limit[:, None]) & chosen & (band > local_radius)
                bad = (missing | extra).any(1)
            wrong += int(bad.sum())
    if wrong:
        return Verdict(f"{wrong} of {total} sampled rows chose other blocks (by {worst:.3g})", 0.0)
    return Verdict("pass", 0.0)
