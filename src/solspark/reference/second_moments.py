"""Features for reblocking: each side seen through the second moment of the other.

    M = sum_s w_s x_s x_s^T + ridge * trace / D * I,   L L^T = M,   X_K = K L_Q,   X_Q = Q L_K

so that |x L|^2 = x^T M x: two keys are close if and only if the queries see them alike, and the
other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from solspark.reference.initial_order import initial_order
from solspark.reference.tree_numerics import inverse_norms
from solspark.types import BLOCK, TokenGrid

ESTIMATORS = (
    "hilbert_midpoint",
    "flat64_block_mean",
    "flat64_midpoint_1",
    "flat64_midpoint_2",
    "flat64_midpoint_4",
    "flat64_mean_diag",
    "full",
)
MOMENT_MODES = ("raw", "unit")
FACTORS = ("cholesky", "eigh")
M2_SIDES = ("both", "query", "key", "none")
LAYOUT_REUSES = ("independent", "q_from_k", "k_from_q")
DEFAULT_RIDGE = 1e-3


def sample_tokens(grid: TokenGrid, estimator: str) -> tuple[Tensor, Tensor]:
    """Return the token ids that an estimator of single rows reads, and their weights.

        hilbert_midpoint:   V // 64 tokens, at positions floor((i + 0.5) V / count) of the Hilbert
                            order (t, h, w)
        flat64_midpoint_s:  in every raster block of n <= 64 tokens s' = min(s, n) tokens, at
                            floor((j + 0.5) n / s'), each with weight n / (V s')
        full:               all tokens

    Returns:
        int64 [S] and float64 [S]; the weights sum to one.

    Source: spec/spark.md section 2.
    """
    tokens = grid.tokens
    if estimator == "hilbert_midpoint":
        count = max(1, tokens // BLOCK)
        places = (2 * torch.arange(count) + 1) * tokens // (2 * count)
        ids = initial_order(grid, "hilbert_thw")[places.clamp(max=tokens - 1)]
        return ids, torch.full((count,), 1 / count, dtype=torch.float64)
    if estimator == "full":
        return torch.arange(tokens), torch.full((tokens,), 1 / tokens, dtype=torch.float64)
    wanted = int(estimator.removeprefix("flat64_midpoint_"))
    ids, weights = [], []
    for start in range(0, tokens, BLOCK):
        length = min(BLOCK, tokens - start)
        count = min(wanted, length)
        for j in range(count):
            ids.append(start + (2 * j + 1) * length // (2 * count))
            weights.append(length / (tokens * count))
    return torch.tensor(ids), torch.tensor(weights, dtype=torch.float64)


def second_moments(
    x: Tensor,
    *,
    grid: TokenGrid,
    mode: str = "raw",
    estimator: str = "hilbert_midpoint",
    ridge: float = DEFAULT_RIDGE,
) -> Tensor:
    """Estimate the second moment of the rows of every head, and add a ridge.

        M = sum_s w_s x_s x_s^T;   M + ridge * trace(M) / D * I

    Args:
        x: [B, V, H, D], V = grid.tokens.
        grid: frames, height, width.
        mode: "raw", or "unit" to divide every row by its norm first.
        estimator: one of `ESTIMATORS`. The single-row ones are in `sample_tokens`;
            flat64_block_mean takes the means of raster blocks of 64, weighted by their length;
            flat64_mean_diag is that with the exact diagonal.
        ridge: share of the mean diagonal that is added to the diagonal.

    Returns:
        float32 [B, H, D, D] (float64 for float64), symmetric.

    Numerics: float64, rounded once.

    Source: spec/spark.md section 2.
    """
    rows = x.transpose(1, 2).double()
    if mode == "unit":
        rows = rows * inverse_norms(rows).double()[..., None]
    if estimator in ("flat64_block_mean", "flat64_mean_diag"):
        blocks = rows.split(BLOCK, dim=2)
        means = torch.stack([block.mean(2) for block in blocks], 2)
        weights = means.new_tensor([block.shape[2] / grid.tokens for block in blocks])
        moments = torch.einsum("s,bhsi,bhsj->bhij", weights, means, means)
        if estimator == "flat64_mean_diag":
            # Added as the spread inside the blocks, which is never negative.
            spread = torch.stack([block.var(2, correction=0) for block in blocks], 2)
            moments = moments + torch.diag_embed(torch.einsum("s,bhsi->bhi", weights, spread))
    else:
        ids, weights = sample_tokens(grid, estimator)
        sampled = rows[:, :, ids.to(x.device)]
        moments = torch.einsum("s,bhsi,bhsj->bhij", weights.to(x.device), sampled, sampled)
    moments = (moments + moments.mT) / 2
    mean_diagonal = moments.diagonal(dim1=-2, dim2=-1).mean(-1)
    identity = torch.eye(x.shape[-1], dtype=moments.dtype, device=x.device)
    moments = moments + ridge * mean_diagonal[..., None, None] * identity
    return moments if x.dtype == torch.float64 else moments.float()


def metric_factor(moments: Tensor, *, kind: str = "cholesky") -> Tensor:
    """Factor every moment, F F^T = M.

        cholesky: lower triangular;  eigh: V sqrt(max(lambda, 0))

    Args:
        moments: [B, H, D, D], symmetric.
        kind: one of `FACTORS`. Both give the same inner products. Without a ridge the moment of few
            samples is singular, and only "eigh" factors it.

    Returns:
        The same shape and dtype. A moment whose trace is zero has the factor zero: nobody looks,
        all are alike. Where Cholesky fails, the factor is the root of the diagonal.

    Source: spec/spark.md section 2.
    """
    if kind == "eigh":
        values, vectors = torch.linalg.eigh(moments)
        return vectors * values.clamp(min=0).sqrt()[..., None, :]
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    factor, failed = torch.linalg.cholesky_ex(moments, check_errors=False)
    root = torch.diag_embed(diagonal.clamp(min=0).sqrt())
    return torch.where((failed != 0)[..., None, None], root, factor)


def features(x: Tensor, factor: Tensor) -> Tensor:
    """Transform the rows of every head by the factor of the opposite moment.

    Args:
        x: [B, V, H, D].
        factor: [B, H, D, D], rounded to the type of x before the product. For float16 it is first
            multiplied by a power of two a head, see `half_range_scale`.

    Returns:
        [B, H, V, D] in the type of x: the layout of the trees.

    Numerics: accumulated in float32 (float64 for float64), rounded once.

    Source: spec/spark.md section 2.
    """
    if x.dtype == torch.float16:
        factor = factor * half_range_scale(factor)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.transpose(1, 2).to(wide) @ factor.to(x.dtype).to(wide)).to(x.dtype)


def half_range_scale(factor: Tensor) -> Tensor:
    """Return the powers of two [B, H, 1, 1] that keep float16 features in range.

    The scaled factor's mean squared row is 2^-9 .. 2^-7, so rows of magnitude 1e3 do not overflow
    and rows of magnitude 1 stay normal numbers. A tree does not see the scale of its features.
    """
    square = factor.square().sum((-2, -1), keepdim=True) / factor.shape[-1]
    exponent = torch.frexp(square.clamp(min=torch.finfo(factor.dtype).tiny)).exponent
    return torch.ldexp(torch.ones_like(square), -4 - torch.div(exponent, 2, rounding_mode="floor"))


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
) -> tuple[Tensor | None, Tensor | None]:
    """Return the features from which the trees of Q and of K are grown.

    Args:
        query_video: [B, V, H, D], rows of the video only, after rotary embedding.
        key_video: [B, V, H, D].
        grid: frames, height, width; V = grid.tokens.
        m2_side: the side or sides that are transformed: "both", "query", "key", "none".
        layout_reuse: "q_from_k" needs no tree of Q, "k_from_q" none of K; that side is None.
        estimator, mode, ridge: see `second_moments`.
        factor: one of `FACTORS`.

    Returns:
        (query features, key features), each [B, H, V, D] in the input type, or None.

    Source: spec/spark.md section 2.
    """

    def side(name: str, own: Tensor, other: Tensor) -> Tensor:
        if m2_side not in ("both", name):
            return own.transpose(1, 2).contiguous()
        moments = second_moments(other, grid=grid, mode=mode, estimator=estimator, ridge=ridge)
        return features(own, metric_factor(moments, kind=factor))

    query = key = None
    if layout_reuse != "q_from_k":
        query = side("query", query_video, key_video)
    if layout_reuse != "k_from_q":
        key = side("key", key_video, query_video)
    return query, key
