"""Shapes of models whose attention goes through the router, their inputs and their references.

Inputs are Gaussian with what real keys have and quantisation suffers from: a bias that all tokens
share (three times a channel's own spread) and three channels four times as wide as the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from solspark.bench.gate import RowSample, Verdict, compare, sample_rows
from solspark.router.backend import RouteCall
from solspark.router.selector import Selection

MOST_MASK_ELEMENTS = 2**31
KEY_BIAS = 3.0
WIDE_CHANNELS = 3
WIDE_FACTOR = 4.0
HEADS_AT_ONCE = 8
"""Heads of the float32 reference in one call."""

REFERENCE = "torch's attention in float32, TF32 off"


@dataclass(frozen=True)
class Preset:
    """Name one attention shape.

    Args:
        name: key in `PRESETS`.
        batch: B.
        heads: H of the query.
        tokens: Lq.
        head_dim: D.
        key_heads: Hk; None is H.
        key_tokens: Lk; None is Lq.
        causal: whether row t sees keys 0..t only.
        mask: "", "segment" (tokens 128..511 are dead as queries and as keys, a mask of Lq x Lk) or
            "padding" (the last quarter of the keys is hidden).
        iters: least number of timed calls; None is the command's.
        timeout_s: seconds a row may take; None is the command's.
        note: where the shape comes from.
    """

    name: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    key_heads: int | None = None
    key_tokens: int | None = None
    causal: bool = False
    mask: str = ""
    iters: int | None = None
    timeout_s: float | None = None
    note: str = ""

    @property
    def keys(self) -> int:
        """Lk."""
        return self.tokens if self.key_tokens is None else self.key_tokens

    @property
    def groups(self) -> int:
        """Hk."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def size(self) -> str:
        """The shape in a few characters."""
        heads = f"{self.heads}" if self.groups == self.heads else f"{self.heads}/{self.groups}"
        tokens = f"{self.tokens}" if self.keys == self.tokens else f"{self.tokens}x{self.keys}"
        return f"{self.batch}x{heads}x{tokens}x{self.head_dim}"

    @property
    def least_gib(self) -> float:
        """Device memory that the rows of this shape need: inputs, an output and its comparison in
        float32, a quantised and a padded copy, the mask, and one GiB for everything else.
        """
        query = self.batch * self.heads * self.tokens * self.head_dim
        key = self.batch * self.groups * self.keys * self.head_dim
        mask = self.tokens * self.keys if self.mask == "segment" else self.keys
        return 1.0 + (20 * query + 8 * key + 2 * mask) / 2**30

    def flops(self, density: float | None) -> float | None:
        """Return the operations of a call; None where a mask hides an unknown share of it."""
        if self.mask or self.causal or density is None:
            return None
        pairs = self.batch * self.heads * self.tokens * self.keys
        return 4.0 * pairs * self.head_dim * density


def _probe(thousands: int) -> Preset:
    return Preset(
        f"gate-{thousands}k", 1, 56, 1024 * thousands, 128, note="crossover probe, 512 text rows"
    )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("sd15", 2, 8, 4096, 40, note="a head dim that kernels pad to 64"),
        Preset("sdxl", 2, 10, 4096, 64),
        Preset("sdxl-cross", 2, 10, 4096, 64, key_tokens=77),
        Preset("qwen3-te", 2, 16, 512, 128, key_heads=8, causal=True, note="a text encoder"),
        Preset("anima", 1, 16, 4096, 128),
        Preset("flux2", 1, 32, 4608, 128),
        Preset("krea2", 1, 48, 4608, 128, mask="segment", note="a mask of Lq x Lk, dead rows"),
        Preset("wan22", 1, 40, 32760, 128),
        Preset("wan22-cfg", 2, 40, 32760, 128),
        Preset("ltx2", 1, 32, 13376, 128),
        Preset("h3", 1, 56, 38222, 128, iters=8, note="512 text, 414 audio, 37,296 video rows"),
        Preset("h3-long", 1, 56, 109574, 128, iters=6, timeout_s=1800.0),
        Preset("masked", 1, 32, 4608, 128, mask="padding", note="a quarter of the keys is hidden"),
        *(_probe(thousands) for thousands in (2, 4, 8, 16, 32, 64)),
        Preset("tiny", 1, 2, 604, 64, note="small enough for a CPU, ragged"),
        Preset("tiny-causal", 1, 4, 512, 64, key_heads=2, causal=True, note="for a CPU"),
        Preset("tiny-masked", 1, 2, 604, 64, mask="padding", note="for a CPU"),
    )
}
TINY = ("tiny", "tiny-causal", "tiny-masked")
ALIASES: dict[str, tuple[str, ...]] = {
    "all": tuple(name for name in PRESETS if name not in TINY),
    "sparse": ("krea2", "h3", "h3-long"),
    "gate": tuple(name for name in PRESETS if name.startswith("gate-")),
    "cpu": TINY,
}


@dataclass(eq=False)
class RouterInputs:
    """Hold the tensors of a preset in the layout of torch's attention.

    Args:
        preset: the shape.
        query: [B, H, Lq, D].
        key, value: [B, Hk, Lk, D].
        mask: bool, [1, 1, Lq, Lk] or [1, 1, 1, Lk], true may be seen; None without one.
    """

    preset: Preset
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.query.device

    def call(self) -> RouteCall:
        """Return the call as a backend's gate sees it."""
        preset = self.preset
        return RouteCall(
            self.query,
            self.key,
            self.value,
            self.mask,
            is_causal=preset.causal,
            enable_gqa=preset.groups != preset.heads,
        )

    @cached_property
    def live(self) -> Tensor | None:
        """Rows that see any key, bool [1, 1, Lq or 1, 1]; None where all do."""
        return None if self.mask is None else self.mask.any(-1, keepdim=True)

    @cached_property
    def reference(self) -> Tensor:
        """Dense attention in float32, [B, H, Lq, D]; rows without a key are zero."""
        return dense_reference(self)

    @cached_property
    def sample(self) -> RowSample:
        """Rows and heads that the gate looks at."""
        return sample_rows(self.preset.tokens, self.preset.heads, self.device, most_heads=4)

    def error(self, out: Tensor) -> float:
        """Return ||out - reference|| / ||reference|| over the rows that see any key."""
        return relative_error(out, self.reference, self.live)


def relative_error(out: Tensor, reference: Tensor, live: Tensor | None = None) -> float:
    """Return ||out - reference|| / ||reference||, head by head in float64; NaN stays NaN.

    Args:
        out, reference: [B, H, L, D].
        live: bool [1, 1, L or 1, 1], rows that count; None for all.
    """
    missed = total = 0.0
    for head in range(reference.shape[1]):
        want = reference[:, head].double()
        difference = out[:, head].double() - want
        if live is not None:
            difference = difference.masked_fill(~live[:, 0], 0.0)
        missed += float(difference.square().sum())
        total += float(want.square().sum())
    return (missed / max(total, 1e-300)) ** 0.5


def make_router_inputs(
    preset: Preset, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> RouterInputs:
    """Make the tensors of a preset, the same for the same seed and device.

    Raises:
        ValueError: the mask would have more than 2^31 elements.
    """
    mask = make_mask(preset, device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    dim = preset.head_dim
    bias = KEY_BIAS * normal(1, preset.groups, 1, dim)
    width = torch.ones(dim, device=device)
    width[torch.randperm(dim, generator=generator, device=device)[:WIDE_CHANNELS]] = WIDE_FACTOR

    def tensor(heads: int, tokens: int, *, keys: bool = False) -> Tensor:
        out = torch.empty(preset.batch, heads, tokens, dim, dtype=dtype, device=device)
        # Head by head, so that no float32 copy of a long sequence is made.
        for head in range(heads):
            values = normal(preset.batch, tokens, dim)
            out[:, head] = values * width + bias[:, head] if keys else values
        return out

    query = tensor(preset.heads, preset.tokens)
    key = tensor(preset.groups, preset.keys, keys=True)
    return RouterInputs(preset, query, key, tensor(preset.groups, preset.keys), mask)


def make_mask(preset: Preset, device: torch.device) -> Tensor | None:
    """Return a preset's token mask, or None.

    Raises:
        ValueError: a mask of Lq x Lk with more than 2^31 elements.
    """
    if not preset.mask:
        return None
    keys = torch.arange(preset.keys, device=device)
    if preset.mask == "padding":
        return (keys < preset.keys - preset.keys // 4)[None, None, None]
    elements = preset.tokens * preset.keys
    if elements > MOST_MASK_ELEMENTS:
        raise ValueError(f"mask: expected at most 2^31 elements, {preset.size} has {elements}")
    live = (keys < 128) | (keys >= 512)
    return (live[:, None] & live)[None, None]


def dense_reference(inputs: RouterInputs) -> Tensor:
    """Compute dense attention in float32 without TF32, a few heads at a time.

    Returns:
        float32 [B, H, Lq, D]; rows without a key are zero whatever torch makes of them.
    """
    preset = inputs.preset
    out = torch.empty_like(inputs.query, dtype=torch.float32)
    repeats = preset.heads // preset.groups
    mask = inputs.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for start in range(0, preset.heads, HEADS_AT_ONCE):
            heads = torch.arange(
                start, min(start + HEADS_AT_ONCE, preset.heads), device=inputs.device
            )
            groups = heads // repeats
            part = F.scaled_dot_product_attention(
                inputs.query[:, heads].float(),
                inputs.key[:, groups].float(),
                inputs.value[:, groups].float(),
                attn_mask=mask,
                is_causal=preset.causal,
            )
            out[:, heads] = part if inputs.live is None else part.masked_fill(~inputs.live, 0.0)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return out


def visible_keys(
    inputs: RouterInputs, rows: Tensor, batch: int, head: int, selection: Selection | None
) -> Tensor:
    """Return bool [R, Lk]: the keys that sampled rows may see under mask, causality and selection.

    Args:
        inputs: of the call.
        rows: int64 [R] token indices.
        batch, head: which sample and query head.
        selection: the tiles kept; None for all.
    """
    keys = torch.arange(inputs.preset.keys, device=rows.device)
    seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=rows.device)
    if inputs.preset.causal:
        seen &= keys <= rows[:, None]
    if inputs.mask is not None:
        seen &= inputs.mask[0, 0][rows] if inputs.mask.shape[2] > 1 else inputs.mask[0, 0]
    if selection is not None:
        keep = selection.keep
        tiles = keep[batch if keep.shape[0] > 1 else 0, head if keep.shape[1] > 1 else 0]
        seen &= tiles.bool()[rows // selection.query_tile][:, keys // selection.key_tile]
    return seen


def attend_seen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    dtype: torch.dtype = torch.float64,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """Return softmax(q k / sqrt(D)) v over the keys that each row sees; zero where it sees none.

    Args:
        query: [R, D].
        key, value: [Lk, D].
        seen: bool [R, Lk].
        dtype: of the arithmetic.
        round_to: round the probabilities and the result to this, as a kernel does.
    """
    logits = query.to(dtype) @ key.to(dtype).T * query.shape[-1] ** -0.5
    logits = logits.masked_fill(~seen, -torch.inf)
    peak = logits.amax(1, keepdim=True)
    weights = torch.exp(logits - torch.where(peak.isfinite(), peak, 0.0))
    total = weights.sum(1, keepdim=True)
    kept = weights if round_to is None else weights.to(round_to).to(dtype)
    out = torch.where(total > 0, (kept @ value.to(dtype)) / total.clamp_min(1e-30), 0.0)
    return out if round_to is None else out.to(round_to).to(dtype)


def judge_rows(
    inputs: RouterInputs,
    out: Tensor,
    selection: Selection | None,
    *,
    most: float | None,
    dead: bool,
) -> Verdict:
    """Judge sampled rows of an output against float64 attention over the very keys they may see.

    Args:
        inputs: of the call.
        out: [B, H, Lq, D].
        selection: the tiles that the call kept; None for a dense call.
        most: largest relative L2 of quantised operands; None asks for the accuracy of the inputs'
            type: at most twice the error of a plain evaluation in that type, plus its eps.
        dead: rows that see no key count too, and must be zero.

    Returns:
        The verdict. The whole output must be finite, dead rows aside where they do not count.
    """
    preset, sample = inputs.preset, inputs.sample
    judged = out if dead or inputs.live is None else out.masked_fill(~inputs.live, 0.0)
    if not bool(judged.isfinite().all()):
        return Verdict("not finite", float("nan"))
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    repeats, dtype = preset.heads // preset.groups, out.dtype
    for batch in sorted({0, preset.batch - 1}):
        for head in sample.heads:
            seen = visible_keys(inputs, sample.rows, batch, head, selection)
            query = inputs.query[batch, head, sample.rows]
            key, value = (x[batch, head // repeats] for x in (inputs.key, inputs.value))
            parts[0].append(judged[batch, head, sample.rows])
            parts[1].append(attend_seen(query, key, value, seen))
            parts[2].append(attend_seen(query, key, value, seen, torch.float32, dtype))
    got, oracle, rounding = (torch.stack(part) for part in parts)
    verdict = compare(got, oracle, rounding, dtype)
    if most is None:
        return verdict
    far = verdict.relative_l2
    return Verdict("pass" if far < most else f"relative L2 {far:.3g}, over {most}", far)
