"""The whole MiniMax-H3 transformer at full size with random weights: one evaluation, and a
generation.

A generation of E evaluations with W dense ones takes W dense steps and E - W sparse ones; both
steps are measured, with the share of each part, and the generation is their sum. Weights are random
and made on the device, so time and memory are real and quality is not.
"""

from __future__ import annotations

import gc
import importlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from solspark.bench.case import Case, Unavailable, method
from solspark.bench.gate import Verdict
from solspark.bench.parts import PartClock
from solspark.bench.problems import Problem
from solspark.bench.timing import synchronize

EVALUATIONS = 19
DENSE_EVALUATIONS = 4
DENSE_LAYERS = 1
MEASURED = 3
"""Sparse evaluations that are run, the first one untimed: it compiles, and captures plans."""
FULL_HEADS = 56
BACKENDS = {
    "dense-default": "native",
    "dense-cudnn": "_native_cudnn",
    "dense-flash": "_native_flash",
}


@dataclass(frozen=True)
class Step:
    """Hold the times of one kind of evaluation.

    Args:
        ms: median of the timed evaluations.
        iqr_ms: distance between quartiles, 0 for fewer than two.
        peak_gib: peak device memory above the weights.
        sample: the last evaluation's video output.
        count: timed evaluations.
        parts: milliseconds of each part, together `ms`.
    """

    ms: float
    iqr_ms: float
    peak_gib: float | None
    sample: Tensor
    count: int
    parts: dict[str, float] = field(default_factory=dict)


class Bench:
    """A transformer on a device, the inputs of one problem, and the steps measured so far."""

    def __init__(self, problem: Problem, device: torch.device, dtype: torch.dtype, seed: int):
        self.problem, self.device = problem, device
        self.transformer = build_transformer(problem, device, dtype, seed)
        self.inputs = evaluation_inputs(self.transformer, problem, device, dtype, seed)
        self.steps: dict[str, Step] = {}

    def one_layer(self) -> None:
        """Run the transformer with its first block alone, at full length: the same kernels, matrix
        shapes and memory as an evaluation in a fiftieth of its time.
        """
        blocks = self.transformer.transformer_blocks
        self.transformer.transformer_blocks = nn.ModuleList([blocks[0]])
        try:
            self.transformer(**self.inputs)
        finally:
            self.transformer.transformer_blocks = blocks

    def measure(self, name: str, evaluations: int, warm: Callable[[], Any]) -> Step:
        """Time evaluations as the transformer now stands, once for each name, after `warm`."""
        if name in self.steps:
            return self.steps[name]
        warm()
        synchronize(self.device)
        base = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            base = torch.cuda.memory_allocated(self.device)
        times, sample = [], None
        with PartClock(self.transformer.transformer_blocks, self.device) as clock:
            for _ in range(evaluations):
                start = time.perf_counter()
                sample = self.transformer(**self.inputs).sample
                synchronize(self.device)
                times.append((time.perf_counter() - start) * 1e3)
        peak = None
        if self.device.type == "cuda":
            peak = (torch.cuda.max_memory_allocated(self.device) - base) / 2**30
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [0.0, 0.0, 0.0]
        assert sample is not None
        ms, spread = statistics.median(times), quartiles[2] - quartiles[0]
        parts = clock.parts(evaluations, ms)
        self.steps[name] = Step(ms, spread, peak, sample, evaluations, parts)
        return self.steps[name]

    def dense(self, backend: str) -> Step:
        """Return the dense evaluation on a backend of diffusers: one, for it takes 20 s and more on
        a GPU.
        """
        self.transformer.set_attention_backend(backend)
        return self.measure(backend, 1 if self.device.type == "cuda" else 2, self.one_layer)


_current: dict[str, Any] = {}


def bench_of(problem: Problem, settings: Any) -> Bench:
    """Return the bench of a problem; one transformer is alive at a time, 62 GiB at full size."""
    key = (problem.name, settings.device, settings.dtype, settings.seed)
    if _current.get("key") != key:
        _current.clear()
        # Two transformers do not fit side by side: what only a cycle keeps has to go as well.
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
        _current["bench"] = Bench(problem, settings.device, settings.dtype, settings.seed)
        _current["key"] = key
    return _current["bench"]


def build_transformer(problem: Problem, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Build H3's transformer with random weights on the device: full size for 56 heads, else tiny.

    Raises:
        Unavailable: diffusers is not installed.
    """
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError as error:
        raise Unavailable(f"the dit level needs diffusers: {error}") from error
    if problem.heads != FULL_HEADS:
        tiny = importlib.import_module("solspark.integrations.tiny_h3")
        return tiny.build_tiny_h3_transformer(seed, heads=problem.heads, dtype=dtype, device=device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(seed)
        with torch.device(device):
            return diffusers.MiniMaxH3Transformer3DModel().eval()
    finally:
        torch.set_default_dtype(before)


def evaluation_inputs(
    transformer: Any, problem: Problem, device: torch.device, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    """Return the keyword arguments of one t2va evaluation with the problem's grid and context."""
    steps = importlib.import_module("diffusers.modular_pipelines.minimax_h3.before_denoise")
    config = transformer.config
    patch = tuple(config.patch_size)
    text = max(problem.text_tokens, 1)
    layout = steps.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(text, dtype=torch.long),
        problem.grid.frames,
        problem.grid.height * patch[1],
        problem.grid.width * patch[2],
        problem.audio_tokens // 2,
        patch,
        2,
        2,
        0,
        (),
    )
    positions, tags, video, audio, text_rows, held_video, held_audio = layout
    times, indices = steps.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, audio, held_video, held_audio, text_rows.numel(), 0.4, 0.2, 0.999, 1.0
    )
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(rows: int, channels: int) -> Tensor:
        return torch.randn(1, rows, channels, generator=generator, device=device, dtype=dtype)

    values: dict[str, Any] = {
        "hidden_states": random(video.numel(), config.in_channels * math.prod(patch)),
        "audio_hidden_states": random(audio.numel(), config.audio_in_channels),
        "encoder_hidden_states": random(text_rows.numel(), config.text_dim),
        "timestep": times,
        "timestep_indices": indices,
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text_rows,
    }
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


class _NoCore:
    """An attention processor without the attention: what remains is everything else."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self, attn: Any, hidden: Tensor, rotary_emb: Any = None, attention_mask: Any = None
    ) -> Tensor:
        query, key, value = attn.to_q(hidden), attn.to_k(hidden), attn.to_v(hidden)
        query = attn.norm_q(query.unflatten(-1, (attn.heads, -1)))
        key = attn.norm_k(key.unflatten(-1, (attn.heads, -1)))
        return attn.to_out[1](attn.to_out[0]((query + key).flatten(2) + value))


Source = tuple[Problem, Any]


def _dense(name: str) -> Callable[[Source, dict[str, Any]], Case]:
    """Return the builder of a generation whose every evaluation is dense."""

    def build(source: Source, options: dict[str, Any]) -> Case:
        problem, settings = source
        if settings.device.type != "cuda" and name != "dense-default":
            raise Unavailable(f"{name} needs a CUDA device")
        bench = bench_of(problem, settings)

        def run() -> Step:
            return bench.dense(BACKENDS[name])

        def facts(step: Step) -> list[dict[str, Any]]:
            return [
                _generation(step, None, EVALUATIONS, EVALUATIONS),
                *_step_rows(step, "dense"),
            ]

        return Case(run, _finite, implementation=f"diffusers {BACKENDS[name]}", facts=facts)

    return build


def _no_core(source: Source, options: dict[str, Any]) -> Case:
    """Build a generation without the attention core, the floor under every method."""
    problem, settings = source
    bench = bench_of(problem, settings)

    def run() -> Step:
        attentions = [block.attn for block in bench.transformer.transformer_blocks]
        saved = [attention.get_processor() for attention in attentions]
        try:
            for attention in attentions:
                attention.set_processor(_NoCore())
            return bench.measure("no-attention", 2, bench.one_layer)
        finally:
            for attention, processor in zip(attentions, saved, strict=True):
                attention.set_processor(processor)

    def facts(step: Step) -> list[dict[str, Any]]:
        return [
            _generation(step, None, EVALUATIONS, EVALUATIONS),
            *_step_rows(step, "no attention core"),
        ]

    return Case(run, _finite, implementation="projections, norms, feed-forward", facts=facts)


def _sparse(name: str) -> Callable[[Source, dict[str, Any]], Case]:
    """Return the builder of a generation with an installer: dense steps, then sparse ones."""

    def build(source: Source, options: dict[str, Any]) -> Case:
        problem, settings = source
        bench = bench_of(problem, settings)
        installers = importlib.import_module("solspark.integrations.minimax_h3")
        install = getattr(installers, f"install_h3_{name}_attn")
        backend = "_native_cudnn" if settings.device.type == "cuda" else "native"
        known = {k: v for k, v in options.items() if k not in ("inputs", "seed", "heads", "tau")}
        evaluations = known.pop("num_denoise_steps", EVALUATIONS)
        dense_evaluations = known.pop("warmup_steps", DENSE_EVALUATIONS)
        known.setdefault("dense_layers", DENSE_LAYERS)
        if name == "sol" and "topk_ratio" in known:
            known["sol_route_topk_ratio"] = known.pop("topk_ratio")
        if "tau" in options:
            known["sol_tau"] = options["tau"]
            known["sol_route_topk_ratio"] = None
        if problem.tokens < 8192:
            known.setdefault("min_tokens", 0)
        seen: dict[str, Any] = {}

        def run() -> tuple[Step, Step]:
            dense = bench.dense(backend)
            label = f"{name} {sorted(known.items(), key=str)}"
            plugin = install(
                bench.transformer,
                num_denoise_steps=MEASURED,
                warmup_mode="warmup_steps",
                warmup_steps=0,
                dense_backend=backend,
                **known,
            )
            with plugin as active:
                active = plugin if active is None else active
                warm = partial(bench.transformer, **bench.inputs)
                step = bench.measure(label, MEASURED - 1, warm)
                seen["summary"] = active.summary()
            return dense, step

        def judge(result: tuple[Step, Step]) -> Verdict:
            verdict = _finite(result[1])
            calls = seen["summary"].get("processor_calls", {})
            layers = len(bench.transformer.transformer_blocks)
            expected = (layers - known["dense_layers"]) * MEASURED
            served = calls.get("sparse:sol", 0)
            if verdict.passed and served != expected:
                return Verdict(f"{served} sparse attention calls, expected {expected}", 0.0)
            return verdict

        def facts(result: tuple[Step, Step]) -> list[dict[str, Any]]:
            dense, step = result
            whole = _generation(dense, step, evaluations, dense_evaluations)
            whole["density"] = _density(seen["summary"])
            reference = dense.sample.double()
            gap = (step.sample.double() - reference).norm() / reference.norm()
            whole["error"] = {
                "relative_l2": float(gap),
                "against": "the dense evaluation, random weights",
            }
            return [whole, *_step_rows(step, "sparse")]

        return Case(run, judge, facts=facts, precision=options.get("precision"))

    return build


def _density(summary: dict[str, Any]) -> float | None:
    """Return the delivered density of the sparse calls, over all evaluations that had any."""
    told = [group["density"] for group in summary["by_evaluation"]]
    known = [density for density in told if density is not None]
    return sum(known) / len(known) if known else None


def _finite(step: Step) -> Verdict:
    """Pass a finite evaluation."""
    fine = bool(torch.isfinite(step.sample).all())
    return Verdict("pass" if fine else "not finite", 0.0)


def _generation(
    dense: Step, sparse: Step | None, evaluations: int, dense_evaluations: int
) -> dict[str, Any]:
    """Return the fields of a generation's row, which says what its time is the sum of."""
    dense_steps = min(dense_evaluations, evaluations)
    rest = evaluations - dense_steps
    ms = dense.ms * dense_steps + (sparse.ms if sparse else 0.0) * rest
    spread = dense.iqr_ms * dense_steps + (sparse.iqr_ms if sparse else 0.0) * rest
    peaks = [step.peak_gib for step in (dense, sparse) if step and step.peak_gib is not None]
    words = f"sum of {dense_steps} x one evaluation ({dense.count} timed)"
    if sparse:
        words = (
            f"sum of {dense_steps} x a dense evaluation ({dense.count} timed) and {rest} x a "
            f"sparse one ({sparse.count} timed)"
        )
    return {
        "ms": ms,
        "iqr_ms": spread,
        "peak_gib": max(peaks, default=None),
        "implementation": words,
    }


def _step_rows(step: Step, kind: str) -> list[dict[str, Any]]:
    """Return the fields of one evaluation's row and of its parts' rows."""
    whole = {
        "level": "step",
        "options": {"evaluation": kind},
        "ms": step.ms,
        "iqr_ms": step.iqr_ms,
        "peak_gib": step.peak_gib,
    }
    parts = [
        {"level": "part", "options": {"evaluation": kind, "part": name}, "ms": ms}
        for name, ms in step.parts.items()
    ]
    return [whole, *parts]


for _name in BACKENDS:
    method("dit", _name)(_dense(_name))
method("dit", "no-attention")(_no_core)
method("dit", "sol", "topk_ratio", "tau", "impl")(_sparse("sol"))
method("dit", "spark", "topk_ratio", "preset", "impl")(_sparse("spark"))
