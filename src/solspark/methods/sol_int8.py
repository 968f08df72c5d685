"""INT8 Sol-Attn: the direct call, and the chunked one that never holds Q, K and V."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from solspark import _checks
from solspark.ops import _dispatch
from solspark.ops.qkv_producer import qkv_producer, quantize_qkv
from solspark.ops.sol_int8 import TOKEN_BUDGETS, whole_call
from solspark.ops.sol_int8 import sol_int8 as attend
from solspark.types import BLOCK, AttentionCall, block_count

HEAD_DIM = 128
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def sol_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: float = 1.0,
    scale: float | None = None,
    sink_blocks: Sequence[int] | None = None,
    sink_q: Sequence[int] | None = None,
    key_bias: Tensor | None = None,
    topk_ratio: float = 0.0,
    tail: bool = True,
    block_len: Tensor | None = None,
    coarse_gate: Tensor | None = None,
    token_aug: int = 0,
    *,
    rotate: bool = False,
    balance: bool = False,
    check_bias: bool = False,
    impl: str | None = None,
) -> Tensor:
    """Attend in INT8: exactly to routed key blocks, at the query block's mean to the others' sums.

        S_mn = a qbar_m . (kbar_n - mu),  a = scale log2 e
        exact(m, n) = S_mn > tau sigma_m, or among the largest of its row; |m - n| <= 1; sinks
        out_i = (sum_{j exact} 2^(a q_i.(k_j - mu) + bias_j) v_j + sum_{n not} 2^S_mn vsum_n)
                / (sum_{j exact} 2^(...) + sum_{n not} 2^S_mn L_n)  [+ gate_i oc_m]

    Args:
        q, k, v: [B, T, H, 128] of one type and device, float16, bfloat16 or float32, any strides.
        tau: a key block is exact when its score exceeds its row's mean by `tau` standard
            deviations; larger reads less. Unused with `topk_ratio`.
        scale: factor of the logits; None means 128 ** -0.5.
        sink_blocks: [start, end) key blocks that every query block reads exactly; an end past the
            last block is clipped.
        sink_q: [start, end) query blocks that read every key block exactly.
        key_bias: added to the logits of exact keys, natural log; bool keeps where true: [T],
            [B, T], [1, T] or [B or 1, 1, 1, T]. It must be zero outside `sink_blocks`, or some
            query blocks see it and others do not; statistics, routing and the tail never do.
        topk_ratio: in (0, 1), the share of the blocks in no sink that each query block reads,
            equal scores kept; 0 selects by `tau`.
        tail: whether blocks that are not read exactly enter at all.
        block_len: int32 [ceil(T / 64)], live rows at the front of each block, at least 1. Other
            rows have no effect, whatever they hold, and come out as zero.
        coarse_gate: [B, T, H, 128], weighs an attention from block mean to block mean that is
            added to the result.
        token_aug: tokens that each pair of query blocks reads exactly beyond its blocks: 0, 64,
            128, 192 or 256. Blocks with a bias are left out.
        rotate: rotate the channels of Q and K by a Hadamard matrix before they are quantised, for
            models whose keys have their energy in few channels.
        balance: before that, multiply the channels of Q, and divide those of K, by what makes both
            equally loud, in heads where few channels of either have much of the energy.
        check_bias: raise where `key_bias` is not zero outside `sink_blocks`, NaN or plus infinity;
            reads it, and so waits for the device.
        impl: "eager", "triton" or "hopper" for the attention, and for quantising where it has one
            of that name; None takes the best that can serve.

    Returns:
        [B, T, H, 128] contiguous, in the type of q.

    Raises:
        ValueError: an argument is not as described (TypeError: not a tensor or number at all);
            nothing has been launched.
        UnsupportedError: no implementation can serve.

    Numerics: Q and K have one scale a token, V one a channel, probabilities 8 bits of each tile's
    maximum; scores, softmax and sums are float32; one rounding at the end.

    Source: INT8 specification 1.1, 2.
    """
    _check_qkv(q, k, v)
    batch, tokens, heads, head_dim = q.shape
    options = _Options(
        tokens, tau, scale, sink_blocks, sink_q, topk_ratio, tail, block_len, token_aug, q.device
    )
    bias = _key_bias(key_bias, batch, tokens, q)
    _check_gate(coarse_gate, (batch, tokens, heads, head_dim), q.device)
    _check_switches(rotate, check_bias, impl)
    _checks.check_bool("balance", balance)
    if check_bias:
        _check_bias_is_sunk(bias, options.sinks)
    if torch.compiler.is_compiling():
        return whole_call(
            q,
            k,
            v,
            torch.full((), options.tau, dtype=torch.float64),
            options.scale,
            list(options.sinks),
            list(options.dense_rows),
            bias,
            options.topk_ratio,
            tail,
            block_len,
            coarse_gate,
            token_aug,
            rotate,
            balance,
            impl,
        )
    qkv = quantize_qkv(
        q,
        k,
        v,
        key_bias=bias,
        block_len=block_len,
        rotate=rotate,
        balance=balance,
        impl=_dispatch.where_available("qkv_producer", impl),
    )
    return attend(qkv, coarse_gate=coarse_gate, dtype=q.dtype, impl=impl, **options.of_attention())


def sol_attn_chunked(
    qkv_chunks: Iterable[Tensor] | Callable[[], Iterable[Tensor]],
    t: int,
    h: int,
    rope_freqs: Tensor,
    qk_norm_weights: Sequence[Tensor],
    kmean: Tensor | None = None,
    vscale: Tensor | None = None,
    tau: float = 1.0,
    topk_ratio: float = 0.0,
    scale: float | None = None,
    sink_blocks: Sequence[int] | None = None,
    sink_q: Sequence[int] | None = None,
    rope_eps: float = 1e-6,
    tail: bool = True,
    block_len: Tensor | None = None,
    coarse_gate: Tensor | None = None,
    token_aug: int = 0,
    *,
    key_bias: Tensor | None = None,
    rotate: bool = False,
    balance: bool | Tensor = False,
    check_bias: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, ...]:
    """Attend as `sol_attn`, from chunks of the fused QKV projection, normed and rotated here.

    Mind the order: `topk_ratio` precedes `scale`.

    Args:
        qkv_chunks: bfloat16 chunks [..., M, 3 h 128], rows [q heads | k heads | v heads] before
            norm and RoPE, in token order; every one starts at a multiple of 64 tokens. Without
            both statistics they are needed twice: give a callable that returns a fresh iterable,
            for another iterable is kept whole in memory.
        t, h: tokens and heads; the batch is 1.
        rope_freqs: float32 [..., T, 1, r/2, 2, 2], the rotation of channels c and c + r/2; r is a
            multiple of 8 up to 128, further channels pass.
        qk_norm_weights: RMSNorm weights of Q and K, [128] each, used as bfloat16.
        kmean, vscale: float32 [h, 128], as the previous step returned them. They place the
            integers; `kmean` has no other effect, values beyond 127 `vscale` are clipped.
        rope_eps: of the norm.
        key_bias: as for `sol_attn`: [T], [1, T] or [1, 1, 1, T].
        balance: as for `sol_attn`, measured in a pass of its own; or the factors that the previous
            step returned, float32 [h, 128].
        tau, topk_ratio, scale, sink_blocks, sink_q, tail, block_len, coarse_gate, token_aug,
            rotate, check_bias, impl: as `sol_attn`.

    Returns:
        out bfloat16 [1, T, h, 128], and the statistics of this step for the next, float32
        [h, 128]: the mean key, 1.1 times the largest value / 127, and, where `balance` was asked
        for, the factors used.

    Raises:
        ValueError: an argument is not as described, before the first chunk is asked for; or a
            chunk is not, when it comes.
        UnsupportedError: no implementation can serve.

    Numerics: rounds to bfloat16 after the norm and after RoPE; then as `sol_attn`.

    Source: INT8 specification 1.2, 2.1, 2.10.
    """
    _checks.check_int("t", t, 1)
    _checks.check_int("h", h, 1)
    freqs = _freqs(rope_freqs, t)
    weights = _norm_weights(qk_norm_weights, freqs.device)
    given = {"kmean": kmean, "vscale": vscale}
    if isinstance(balance, Tensor):
        given["balance"] = balance
    else:
        _checks.check_bool("balance", balance)
    for name, statistic in given.items():
        _check_statistic(name, statistic, h, freqs.device)
    eps = _checks.check_float("rope_eps", rope_eps)
    options = _Options(
        t, tau, scale, sink_blocks, sink_q, topk_ratio, tail, block_len, token_aug, freqs.device
    )
    like = torch.empty(0, dtype=torch.bfloat16, device=freqs.device)
    bias = _key_bias(key_bias, 1, t, like)
    _check_gate(coarse_gate, (1, t, h, HEAD_DIM), freqs.device)
    _check_switches(rotate, check_bias, impl)
    if check_bias:
        _check_bias_is_sunk(bias, options.sinks)
    qkv, *following = qkv_producer(
        _source(qkv_chunks, twice=kmean is None or vscale is None or balance is True),
        t,
        h,
        freqs,
        weights,
        key_center=kmean,
        value_scale=vscale,
        eps=eps,
        key_bias=bias,
        block_len=block_len,
        rotate=rotate,
        balance=balance,
        impl=_dispatch.where_available("qkv_producer", impl),
    )
    out = attend(
        qkv, coarse_gate=coarse_gate, dtype=torch.bfloat16, impl=impl, **options.of_attention()
    )
    return out, *following


def sol_attn_is_available(device: torch.device | str | int | None = None) -> bool:
    """Say whether GPU kernels serve the INT8 calls on a device; elsewhere they run in torch.

    Args:
        device: anything that `torch.device` takes; None means the current accelerator.

    Returns:
        False for a device that is not CUDA or ROCm, or where no kernel can serve it.

    Raises:
        TypeError, ValueError: `device` names none.
    """
    place = _checks.as_device("device", "cuda" if device is None else device)
    if place.type != "cuda" or not torch.cuda.is_available():
        return False
    call = AttentionCall(
        batch=1,
        query_tokens=2**14,
        key_tokens=2**14,
        heads=16,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device_type="cuda",
        capability=_dispatch.capability(place),
        key_heads=16,
        tail="block",
    )
    return _dispatch.choose("sol_int8", call) != "eager"


class _Options:
    """Checked options that both calls share."""

    def __init__(
        self,
        tokens: int,
        tau: float,
        scale: float | None,
        sink_blocks: Sequence[int] | None,
        sink_q: Sequence[int] | None,
        topk_ratio: float,
        tail: bool,
        block_len: Tensor | None,
        token_aug: int,
        device: torch.device,
    ):
        self.tau = _checks.check_float("tau", tau, finite=False)
        self.scale = _checks.resolve_scale(scale, HEAD_DIM)
        self.sinks = _block_range("sink_blocks", sink_blocks)
        self.dense_rows = _block_range("sink_q", sink_q)
        self.topk_ratio = _checks.check_float("topk_ratio", topk_ratio)
        if not 0 <= self.topk_ratio < 1:
            raise ValueError(f"topk_ratio: expected 0 or a share in (0, 1), got {topk_ratio}")
        self.tail = _checks.check_bool("tail", tail)
        if isinstance(token_aug, bool) or token_aug not in TOKEN_BUDGETS:
            raise ValueError(f"token_aug: expected one of {TOKEN_BUDGETS}, got {token_aug!r}")
        self.token_aug = token_aug
        _check_block_len(block_len, block_count(tokens), device)

    def of_attention(self) -> dict:
        """Return the options of the attention, by name."""
        return vars(self)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the tensors are [B, T, H, 128] of one shape, type and device."""
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        _checks.check_tensor(name, tensor, 4, "[B, T, H, 128]")
        if tensor.shape[-1] != HEAD_DIM:
            raise ValueError(f"{name}: head_dim must be {HEAD_DIM}, got {tensor.shape[-1]}")
        if tensor.dtype not in TYPES:
            words = " or ".join(map(str, TYPES))
            raise ValueError(f"{name}: expected dtype {words}, got {tensor.dtype}")
        if tensor.shape != q.shape:
            raise ValueError(
                f"{name}: expected the shape of q, {tuple(q.shape)}, got {tuple(tensor.shape)}"
            )
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: expected the dtype of q, {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}")
    if min(q.shape[:3]) < 1:
        raise ValueError(
            f"q: expected at least one sample, token and head, got shape {tuple(q.shape)}"
        )


def _block_range(name: str, value: Sequence[int] | None) -> tuple[int, int]:
    """Return a half-open range of blocks, empty for None."""
    if value is None:
        return (0, 0)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name}: expected two block indices (start, end), got {value!r}")
    start = _checks.check_int(f"{name} start", value[0], 0)
    return (start, _checks.check_int(f"{name} end", value[1], start))


def _key_bias(key_bias: Tensor | None, batch: int, tokens: int, like: Tensor) -> Tensor | None:
    """Return the bias as float32 [B, T]: one value a key, whatever the head and the query."""
    if isinstance(key_bias, Tensor) and key_bias.ndim == 3:
        raise ValueError(
            f"key_bias: expected [{tokens}], [{batch} or 1, {tokens}] or "
            f"[{batch} or 1, 1, 1, {tokens}], got shape {tuple(key_bias.shape)}"
        )
    bias = _checks.normalise_key_bias(key_bias, batch, 1, tokens, like)
    return None if bias is None else bias[:, 0].float()


def _check_bias_is_sunk(bias: Tensor | None, sinks: tuple[int, int]) -> None:
    """Raise where a bias is not zero outside the sinks, or is no weight."""
    if bias is None:
        return
    wrong = bias.isnan() | (bias == float("inf"))
    if wrong.any():
        raise ValueError(
            f"key_bias: expected numbers or -inf, got {float(bias[wrong][0])} at key "
            f"{int(wrong.nonzero()[0, 1])}"
        )
    block = torch.arange(bias.shape[1], device=bias.device) // BLOCK
    loose = ((bias != 0) & ~((block >= sinks[0]) & (block < sinks[1]))).any(0)
    if loose.any():
        first = int(loose.nonzero()[0, 0])
        raise ValueError(
            f"key_bias: expected zero outside sink_blocks {list(sinks)}, got a bias at key "
            f"{first}, in block {first // BLOCK}"
        )


def _check_block_len(block_len: Tensor | None, blocks: int, device: torch.device) -> None:
    """Raise unless block_len is int32 [N] on the device, or None."""
    if block_len is None:
        return
    _checks.check_tensor("block_len", block_len, 1, f"[{blocks}]")
    if block_len.dtype != torch.int32 or block_len.shape[0] != blocks:
        raise ValueError(
            f"block_len: expected torch.int32 [{blocks}], got {block_len.dtype} "
            f"{list(block_len.shape)}"
        )
    if block_len.device != device:
        raise ValueError(f"block_len: expected the device {device}, got {block_len.device}")


def _check_gate(gate: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless coarse_gate is a float tensor of the output's shape, or None."""
    if gate is None:
        return
    _checks.check_tensor("coarse_gate", gate, 4, str(list(shape)))
    if tuple(gate.shape) != shape or not gate.is_floating_point():
        raise ValueError(
            f"coarse_gate: expected floats {list(shape)}, got {gate.dtype} {list(gate.shape)}"
        )
    if gate.device != device:
        raise ValueError(f"coarse_gate: expected the device {device}, got {gate.device}")


def _check_switches(rotate: bool, check_bias: bool, impl: str | None) -> None:
    """Raise unless the keyword options are what they should be."""
    _checks.check_bool("rotate", rotate)
    _checks.check_bool("check_bias", check_bias)
    if impl is not None:
        _checks.check_choice("impl", impl, _dispatch.PREFERENCE)


def _freqs(rope_freqs: Tensor, tokens: int) -> Tensor:
    """Return the rotations as float32 [T, r/2, 2, 2]."""
    if not isinstance(rope_freqs, Tensor):
        raise TypeError(f"rope_freqs: expected a tensor, got {type(rope_freqs).__name__}")
    shape = tuple(rope_freqs.shape)
    if len(shape) < 5 or shape[-2:] != (2, 2) or shape[-4] != 1:
        raise ValueError(f"rope_freqs: expected [..., T, 1, rot_dim / 2, 2, 2], got shape {shape}")
    if rope_freqs.dtype != torch.float32:
        raise ValueError(f"rope_freqs: expected torch.float32, got {rope_freqs.dtype}")
    rot_dim = 2 * shape[-3]
    if not 0 < rot_dim <= HEAD_DIM or rot_dim % 8:
        raise ValueError(
            f"rope_freqs: expected rot_dim to be a multiple of 8 in (0, {HEAD_DIM}], got {rot_dim}"
        )
    freqs = rope_freqs.reshape(-1, rot_dim // 2, 2, 2)
    if freqs.shape[0] != tokens:
        raise ValueError(f"rope_freqs: expected t = {tokens} rows, got {freqs.shape[0]}")
    return freqs


def _norm_weights(weights: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two RMSNorm weights."""
    if isinstance(weights, (str, bytes)) or len(weights) != 2:
        raise ValueError("qk_norm_weights: expected two tensors (q_weight, k_weight)")
    for index, weight in enumerate(weights):
        name = f"qk_norm_weights[{index}]"
        _checks.check_tensor(name, weight, 1, f"[{HEAD_DIM}]")
        if weight.shape[0] != HEAD_DIM or not weight.is_floating_point():
            raise ValueError(
                f"{name}: expected floats [{HEAD_DIM}], got {weight.dtype} {list(weight.shape)}"
            )
        if weight.device != device:
            raise ValueError(f"{name}: expected the device {device}, got {weight.device}")
    return weights[0], weights[1]


def _check_statistic(name: str, value: Tensor | None, heads: int, device: torch.device) -> None:
    """Raise unless a statistic of an earlier step is float32 [h, 128], or None."""
    if value is None:
        return
    _checks.check_tensor(name, value, 2, f"[{heads}, {HEAD_DIM}]")
    if tuple(value.shape) != (heads, HEAD_DIM) or value.dtype != torch.float32:
        raise ValueError(
            f"{name}: expected torch.float32 [{heads}, {HEAD_DIM}], got {value.dtype} "
            f"{list(value.shape)}"
        )
    if value.device != device:
        raise ValueError(f"{name}: expected the device {device}, got {value.device}")


def _source(
    chunks: Iterable[Tensor] | Callable[[], Iterable[Tensor]], *, twice: bool
) -> Callable[[], Iterable[Tensor]]:
    """Return a callable that gives the chunks as often as they are needed."""
    if callable(chunks):
        return chunks
    if isinstance(chunks, Tensor) or not isinstance(chunks, Iterable):
        raise TypeError(
            f"qkv_chunks: expected an iterable of tensors or a callable that returns one, got "
            f"{type(chunks).__name__}"
        )
    kept = list(chunks) if twice else chunks
    return lambda: kept
