"""How the landmark tree rounds and compares, in every implementation.

- Squared norms are summed in float64 and rounded once to float32; 1 / max(sqrt(norm), 1e-12) is
  taken in float32.
- Directions are fitted in float64. What is compared on the way (distances, landmark scores) and
  the directions themselves are rounded to multiples of 2^-40 of their scale: far above the noise of
  float64 sums, so that the order of summation decides nothing and what is equal ties, and far below
  anything that matters.
- score_precision "fp16" (the default): x / |x| is formed in float32 and rounded to float16, d is
  rounded to float16, and their dot product is exact (its terms are multiples of 2^-48 below 2),
  rounded once to float32. "fp32": float64 throughout, rounded to multiples of 2^-40 and then to
  float32. The euclidean distance always scores like "fp32".
- -0.0 counts as +0.0. A row whose float32 squared norm is not finite scores NaN, which sorts after
  everything, and as a landmark it counts as the zero vector.
- Ties go to the lower token id, landmark or pair, whichever is compared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_NORM = 1e-12
GRAIN = 2.0**-40


def squared_norms(rows: Tensor) -> Tensor:
    """Return the squared L2 norm of rows [..., D] in float32 [...], summed in float64."""
    return rows.double().square().sum(-1).float()


def inverse_norms(rows: Tensor) -> Tensor:
    """Return 1 / max(|x|, 1e-12) of rows [..., D] in float32; NaN if |x|^2 is not finite."""
    return norms_to_inverse(squared_norms(rows))


def norms_to_inverse(squares: Tensor) -> Tensor:
    """Return 1 / max(sqrt(square), 1e-12) of float32 squared norms; NaN where not finite."""
    inverse = squares.sqrt().clamp(min=SMALLEST_NORM).reciprocal()
    return inverse.masked_fill(~squares.isfinite(), math.nan)


def snap(values: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Round to multiples of 2^-40 of `scale`, a power of two."""
    return (values / scale / GRAIN).round() * GRAIN * scale


def squared_scale(centres: Tensor) -> Tensor:
    """Return the power of two just above the largest squared norm of centres [..., K, D], or 1.

    It has the shape [..., 1]: the scale of squared distances between them.
    """
    largest = centres.square().sum(-1).amax(-1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    return torch.where(largest > 0, scale, 1.0)


def order_key(value: float) -> tuple[int, float]:
    """Return a key that sorts floats by their canonical bits: -0.0 is +0.0, NaN comes last."""
    return (1, 0.0) if math.isnan(value) else (0, value + 0.0)


def unit(vector: Tensor) -> Tensor:
    """Return vector / max(|vector|, 1e-12)."""
    return vector / vector.norm(dim=-1, keepdim=True).clamp(min=SMALLEST_NORM)
