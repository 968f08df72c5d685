"""A transformer block from end to end with the attention rows inside: what a model feels of them.

out = h + ff(norm(h)),  h = x + attention(norm(x) Wqkv) Wo

Weights are random, so time is real and an error is that of the arithmetic alone. It is measured
against the same block in float32, and again after four blocks in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from solspark.bench.router_presets import (
    KEY_BIAS,
    WIDE_CHANNELS,
    WIDE_FACTOR,
    relative_error,
)

BLOCKS = 4
"""Blocks in a row of the accumulated error; they share their weights."""
PLAIN_BLOCK, QUANTIZED_BLOCK = 0.02, 0.2
"""Most relative L2 of a block that quantises nothing, and of one that does; sparse rows on random
weights lose what they leave out, so of them the gate asks finiteness."""


@dataclass(frozen=True)
class Geometry:
    """Name one block.

    Args:
        name: key in `GEOMETRIES`.
        width: of the residual stream.
        heads: H.
        head_dim: D.
        hidden: of the feed-forward.
        tokens: L.
        gated: SwiGLU instead of GELU.
    """

    name: str
    width: int
    heads: int
    head_dim: int
    hidden: int
    tokens: int
    gated: bool = False


GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        Geometry("flux1", 3072, 24, 128, 12288, 4608),
        Geometry("krea2", 6144, 48, 128, 16384, 4608),
        Geometry("h3", 5376, 56, 128, 14336, 38222, gated=True),
        Geometry("tiny", 128, 2, 64, 256, 604),
    )
}


@dataclass(frozen=True)
class BlockRow:
    """Declare one row of the block table.

    Args:
        name: id on the command line.
        attention: the attention row inside.
        linear: "plain"; "int8", weights kept in INT8 and widened before the product; "int8-mm",
            the product itself in INT8 with one scale a token.
    """

    name: str
    attention: str = "base"
    linear: str = "plain"


BLOCK_ROWS: dict[str, BlockRow] = {
    row.name: row
    for row in (
        BlockRow("bf16"),
        BlockRow("bf16-noquant", "noquant"),
        BlockRow("bf16-atten", "smooth"),
        BlockRow("bf16-atten-int8", "int8"),
        BlockRow("bf16-atten-hadamard", "hadamard"),
        BlockRow("bf16-sage", "sage"),
        BlockRow("bf16-sparse30", "int8-sparse30"),
        BlockRow("int8", linear="int8"),
        BlockRow("int8-atten", "smooth", "int8"),
        BlockRow("int8-mm", linear="int8-mm"),
        BlockRow("int8-mm-atten", "smooth", "int8-mm"),
        BlockRow("int8-mm-sage", "sage", "int8-mm"),
    )
}
"""`bf16` stands for the run's own type."""

Linear = Callable[[Tensor], Tensor]


@dataclass
class Weights:
    """Hold a block's weights.

    Args:
        products: weights [out, in] by the name of the product.
        key_width: [D], of the norm of K: three channels are wider than the others.
        key_bias: [H, 1, D], the same for every token, as quantisation finds it in models.
    """

    products: dict[str, Tensor]
    key_width: Tensor
    key_bias: Tensor

    def linear(self, kind: str) -> dict[str, Linear]:
        """Return the products as calls of one kind."""
        return {name: make_linear(weight, kind) for name, weight in self.products.items()}


def make_weights(
    geometry: Geometry, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Weights:
    """Make a block's weights, scaled so that the stream keeps its size."""
    generator = torch.Generator(device=device).manual_seed(seed)
    inner = geometry.heads * geometry.head_dim
    shapes = {
        "qkv": (3 * inner, geometry.width),
        "out": (geometry.width, inner),
        "up": (geometry.hidden * (2 if geometry.gated else 1), geometry.width),
        "down": (geometry.width, geometry.hidden),
    }

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    products = {
        name: (normal(*shape) * shape[1] ** -0.5).to(dtype) for name, shape in shapes.items()
    }
    width = torch.ones(geometry.head_dim, device=device)
    width[torch.arange(WIDE_CHANNELS, device=device) * geometry.head_dim // WIDE_CHANNELS] = (
        WIDE_FACTOR
    )
    bias = KEY_BIAS * normal(geometry.heads, 1, geometry.head_dim)
    return Weights(products, width.to(dtype), bias.to(dtype))


def make_linear(weight: Tensor, kind: str) -> Linear:
    """Return x -> x W^T of a kind.

    Args:
        weight: [out, in].
        kind: "plain", "int8" or "int8-mm".

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "plain":
        return lambda x: F.linear(x, weight)
    if kind not in ("int8", "int8-mm"):
        raise ValueError(f"linear: expected plain, int8 or int8-mm, got {kind!r}")
    scale = weight.float().abs().amax(1).clamp_min(1e-30) / 127
    stored = (weight.float() / scale[:, None]).round().to(torch.int8)
    if kind == "int8":
        narrow = scale.to(weight.dtype)[:, None]
        return lambda x: F.linear(x, stored.to(x.dtype) * narrow)
    # The library's INT8 product wants its second matrix column-major, which a view of W is.
    turned = stored.t()

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        steps = rows.float().abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        small = (rows.float() / steps).round().to(torch.int8)
        out = torch._int_mm(small, turned).float() * steps * scale
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    return product


def block_forward(
    x: Tensor,
    linear: dict[str, Linear],
    weights: Weights,
    geometry: Geometry,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Run a block on x [1, L, width].

    Args:
        x: the stream.
        linear: products.
        weights: of the norm of K.
        geometry: sizes.
        attend: attention of torch's signature on [1, H, L, D].
    """
    width = (geometry.width,)
    qkv = linear["qkv"](F.rms_norm(x, width))
    heads = qkv.unflatten(-1, (3, geometry.heads, geometry.head_dim)).permute(2, 0, 3, 1, 4)
    query, key, value = heads.unbind(0)
    query, key = (F.rms_norm(t, (geometry.head_dim,)) for t in (query, key))
    key = key * weights.key_width.to(key.dtype) + weights.key_bias.to(key.dtype)
    mixed = attend(query, key, value).transpose(1, 2).flatten(2)
    x = x + linear["out"](mixed)
    raised = linear["up"](F.rms_norm(x, width))
    if geometry.gated:
        gate, up = raised.chunk(2, -1)
        raised = F.silu(gate) * up
    else:
        raised = F.gelu(raised, approximate="tanh")
    return x + linear["down"](raised)


def repeat(step: Callable[[Tensor], Tensor], x: Tensor, times: int) -> Tensor:
    """Apply a block several times."""
    for _ in range(times):
        x = step(x)
    return x


def reference_block(x: Tensor, weights: Weights, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the block's float32 result and that of `BLOCKS` in a row, without TF32."""
    linear = {
        name: (lambda item, weight=weight: F.linear(item, weight.float()))
        for name, weight in weights.products.items()
    }
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:

        def step(item: Tensor) -> Tensor:
            return block_forward(item, linear, weights, geometry, F.scaled_dot_product_attention)

        first = step(x.float())
        return first, repeat(step, first, BLOCKS - 1)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def block_errors(out: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return relative L2 over everything and the largest of any token, of [1, L, width]."""
    difference = (out.float() - reference).norm(dim=-1)
    token = float((difference / reference.norm(dim=-1).clamp_min(1e-30)).max())
    return relative_error(out[:, None], reference[:, None]), token
