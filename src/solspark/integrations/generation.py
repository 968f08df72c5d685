"""Generate clips with a MiniMax-H3 pipeline, dense and sparse, and report what was done.

This is the work behind `solspark generate`: it loads the pipeline, runs it once for each method,
measures every attention layer of every step, and writes the clips, a contact sheet and a JSON
report, all at once at the end.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..diagnose import environment
from . import clip as clips
from .h3_config import sol_config, spark_config
from .h3_media import open_media, workflow_of
from .h3_pipeline import GeneratedClip, generate_clip, load_h3_pipeline, loaded_transformer
from .minimax_h3 import install_h3_sparse_attention
from .tiny_h3 import TINY_INSTALL, build_tiny_h3_pipeline

METHODS = ("dense", "sol", "spark")
TAILS = ("query", "block", "block8x8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_PROMPT = "a red kite turns slowly over a grey sea while the wind rises"
FPS = 24
CLIP_FRAMES = (108, 345)
"""Frames that a clip may be asked for: H3 rounds up to 17 n + 5 and makes 5 to 15 seconds."""


@dataclass(frozen=True)
class GenerateOptions:
    """Say what to generate, how, and where it goes.

    Args:
        model: "tiny" (random weights built in code, no download), a local folder or a hub name.
        method: "dense", "sol" or "spark".
        compare: "dense" runs the dense pipeline too and compares; None does not.
        prompt: what to show.
        first_frame, last_frame: image files that the clip starts from and ends on (fl2va), or None.
        references: files of images, videos and audio to condition on (ref2va), in the order in
            which the model reads them.
        height, width: pixels, multiples of 32; None for the model's own canvas, which has the shape
            of the first keyframe if there is one.
        frames: frames at 24 a second, 108 to 345, which the model rounds up to 17 n + 5; None for
            `seconds`, or the model's shortest clip.
        seconds: length in place of `frames`, 4.5 to 14.375.
        steps: transformer evaluations; None for 5 (tiny) or 19.
        seed: of the noise.
        out: folder for the clips, the contact sheet and the report.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 for tiny, bfloat16 otherwise), "float32", "bfloat16" or "float16".
        preset: named Spark options: "default", "quality", "fast".
        topk_ratio: share of candidate blocks read exactly; None for the method's default, which is
            0.1 for Spark unless `tau` is given, and threshold routing for Sol.
        tau: threshold in standard deviations, for routing without a budget.
        tail: "query", "block" or "block8x8" granularity of the summaries.
        warmup_ratio, warmup_steps: dense evaluations at the start, as a share or a number.
        dense_layers: first layers that stay dense.
        min_tokens: shortest sequence that goes sparse; None for the method's default (0 for tiny).
        dense_backend: attention backend of diffusers for the dense calls.
        precision: "native"; "fp8" for the sparse calls, or with Sol "int8"; None for the model's.
        chunk_tokens: with INT8, rows of the QKV projection streamed at a time; None holds Q, K, V.
        extra: any further option of the installer, under the installer's name.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """

    model: str = "tiny"
    method: str = "spark"
    compare: str | None = None
    prompt: str = DEFAULT_PROMPT
    first_frame: str | None = None
    last_frame: str | None = None
    references: tuple[str, ...] = ()
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    seconds: float | None = None
    steps: int | None = None
    seed: int = 0
    out: str = "out"
    device: str = "auto"
    dtype: str = "auto"
    preset: str | None = None
    topk_ratio: float | None = None
    tau: float | None = None
    tail: str | None = None
    warmup_ratio: float | None = None
    warmup_steps: int | None = None
    dense_layers: int | None = None
    min_tokens: int | None = None
    dense_backend: str | None = None
    precision: str | None = None
    chunk_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        workflow_of(self.first_frame, self.last_frame, self.references)
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        if self.compare is not None:
            _check_choice("compare", self.compare, ("dense",))
            if self.method == "dense":
                raise ValueError("compare: expected None with method 'dense', got 'dense'")
        if self.tail is not None:
            _check_choice("tail", self.tail, TAILS)
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise ValueError(f"steps: expected an int >= 1, got {self.steps!r}")
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 32 or value % 32):
                raise ValueError(f"{name}: expected a multiple of 32, got {value!r}")
        if (self.height is None) != (self.width is None):
            given = "height" if self.width is None else "width"
            raise ValueError(f"height, width: expected both or neither, got only {given}")
        if self.seconds is not None:
            if self.frames is not None:
                raise ValueError("seconds: expected None together with frames, got both")
            shortest, longest = (frames / FPS for frames in CLIP_FRAMES)
            if not shortest <= self.seconds <= longest:
                raise ValueError(
                    f"seconds: expected {shortest:g} to {longest:g}, got {self.seconds!r}"
                )
        if self.frames is not None and (
            type(self.frames) is not int or not CLIP_FRAMES[0] <= self.frames <= CLIP_FRAMES[1]
        ):
            shortest, longest = CLIP_FRAMES
            raise ValueError(f"frames: expected {shortest} to {longest}, got {self.frames!r}")
        if self.topk_ratio is not None and not 0 < self.topk_ratio <= 1:
            raise ValueError(f"topk_ratio: expected a number in (0, 1], got {self.topk_ratio!r}")
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("warmup_steps: expected None together with warmup_ratio, got both")
        if self.method == "dense":
            given = sorted(self.method_options())
            if given:
                raise ValueError(f"{given[0]}: expected no sparse option with method 'dense'")

    @property
    def workflow(self) -> str:
        """The workflow of the model that the media ask for: "t2va", "fl2va" or "ref2va"."""
        return workflow_of(self.first_frame, self.last_frame, self.references)

    def method_options(self) -> dict[str, Any]:
        """Return the options of the sparse method that were given, under their names here."""
        names = ("preset", "topk_ratio", "tau", "tail", "warmup_ratio", "warmup_steps")
        names += ("dense_layers", "min_tokens", "dense_backend", "precision", "chunk_tokens")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, **self.extra}


@dataclass(frozen=True)
class Arm:
    """One run of the pipeline: its label, and the installer to use, if any."""

    label: str
    install: Callable[[nn.Module, int], AbstractContextManager[Any]] | None


Progress = Callable[[str, int, int], None]
"""Called as progress(label, evaluations done, evaluations in all)."""


def generate(
    options: GenerateOptions, progress: Progress | None = None
) -> tuple[dict[str, Any], list[Path]]:
    """Generate one clip, and the dense one beside it if asked to, and write everything.

    Nothing is written under its real name before all of it is complete; an exception or an
    interrupt leaves the folder as it was.

    Args:
        options: what to do.
        progress: told about each finished transformer evaluation.

    Returns:
        (the report as it was written, the paths of the files written).

    Raises:
        ValueError: an option that does not fit the model or the method.
        FileNotFoundError: a keyframe or reference is missing.
        MissingDependencyError: diffusers, or what reads and writes clips, is missing.
    """
    arm = _sparse_arm(options) if options.method != "dense" else Arm("dense", None)
    arms = [Arm("dense", None), arm] if options.compare else [arm]
    clips.require_writers()
    with clips.OutputFolder(options.out) as folder:
        media = open_media(options.first_frame, options.last_frame, options.references)
        pipe, call, device, dtype = open_pipeline(options)
        runs: dict[str, dict[str, Any]] = {}
        made: dict[str, GeneratedClip] = {}
        for each in arms:
            made[each.label], runs[each.label] = _run(pipe, each, call, media, progress)
        report = {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "options": {**asdict(options), "extra": dict(options.extra)},
            "environment": environment(),
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "model": _describe_model(pipe, made[arm.label], options),
            "call": {name: value for name, value in call.items() if name != "prompt"},
            "runs": runs,
        }
        if options.compare:
            report["comparison"] = _compare(made[arm.label], made["dense"], runs, arm.label)
        names = _write(folder, made, arm.label)
        report["files"] = [*names, "report.json"]
        text = json.dumps(_plain(report), indent=2, allow_nan=False)
        folder.path("report.json").write_text(text + "\n", encoding="utf-8")
        return json.loads(text), folder.commit()


def open_pipeline(
    options: GenerateOptions,
) -> tuple[Any, dict[str, Any], torch.device, torch.dtype]:
    """Load the pipeline and settle what it is called with.

    Returns:
        (pipe, keyword arguments of `generate_clip` with at least `prompt`, `seed` and `steps`,
        device, dtype of the block stack).

    Raises:
        ValueError: the device is not here.
        MissingDependencyError: diffusers or transformers is missing.
    """
    tiny = options.model == "tiny"
    device = _device(options.device)
    call: dict[str, Any] = {"steps": 19}
    dtype = DTYPES["float32" if tiny else "bfloat16"]
    if options.dtype != "auto":
        dtype = DTYPES[options.dtype]
    if tiny:
        pipe, call = build_tiny_h3_pipeline(workflow=options.workflow, dtype=dtype, device=device)
    else:
        pipe = load_h3_pipeline(options.model, dtype, device, workflow=options.workflow)
    call["prompt"], call["seed"] = options.prompt, options.seed
    if options.seconds is not None:
        call["num_frames"] = math.ceil(options.seconds * FPS)
    named = {"height": "height", "width": "width", "frames": "num_frames", "steps": "steps"}
    for name, keyword in named.items():
        if getattr(options, name) is not None:
            call[keyword] = getattr(options, name)
    return pipe, call, device, dtype


def _device(name: str) -> torch.device:
    """Resolve "auto" and check that the device is here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that is here, got {name!r} without a GPU")
    return device


def _sparse_arm(options: GenerateOptions) -> Arm:
    """Return the arm of the sparse method; its options are checked here, before a model loads."""
    spark = options.method == "spark"
    if options.preset is not None and not spark:
        raise ValueError(f"preset: expected None with method 'sol', got {options.preset!r}")
    if options.precision == "int8" and spark:
        raise ValueError(
            "precision: expected None, 'native' or 'fp8' with method 'spark', whose order and "
            "summaries INT8 does not have, got 'int8'"
        )
    keywords = options.method_options()
    renamed = {
        name: public
        for name, public in (
            ("tau", "sol_tau"),
            ("tail", "sol_tail_granularity"),
            ("topk_ratio", "sol_route_topk_ratio"),
        )
        if name in keywords
    }
    for name, public in renamed.items():
        keywords[public] = keywords.pop(name)
    if spark and options.tau is not None and options.topk_ratio is None:
        # Spark routes by a budget unless told otherwise; asking for a threshold says otherwise.
        keywords.setdefault("sol_route_topk_ratio", None)
    if options.model == "tiny" and "sol_min_tokens" not in keywords:
        keywords = {**TINY_INSTALL, **keywords}
    configure = spark_config if spark else sol_config

    def install(transformer: nn.Module, evaluations: int) -> AbstractContextManager[Any]:
        config = configure(num_denoise_steps=evaluations, **keywords)
        return install_h3_sparse_attention(transformer, config)

    try:
        configure(**keywords)
    except ValueError as error:
        # The installer says its own names; a user of the command knows ours.
        words = str(error)
        for name, public in renamed.items():
            words = words.replace(public, name)
        raise ValueError(words) from error
    return Arm(options.method, install)


def _run(
    pipe: Any,
    arm: Arm,
    call: dict[str, Any],
    media: dict[str, Any],
    progress: Progress | None,
) -> tuple[GeneratedClip, dict[str, Any]]:
    """Generate with one method and measure it."""
    _, transformer = loaded_transformer(pipe)
    installed = arm.install(transformer, call["steps"]) if arm.install else nullcontext()

    def on_step(done: int, steps: int) -> None:
        if progress is not None:
            progress(arm.label, done, steps)

    started = time.perf_counter()
    with installed as plugin, AttentionWatch(transformer) as watch:
        made = generate_clip(pipe, **call, **media, on_step=on_step)
        summary, records = (None, None) if plugin is None else (plugin.summary(), plugin.records())
    run = {
        "seconds": time.perf_counter() - started,
        **watch.report(records),
        "summary": summary,
    }
    return made, run


class AttentionWatch:
    """Time every step and every attention module of an H3 transformer.

    A context manager around a generation. It adds module hooks, changes no computation, and reads
    the device's clocks only in `report`, so that it does not slow the run down.

    Args:
        transformer: a MiniMax-H3 transformer.
    """

    def __init__(self, transformer: nn.Module):
        self._transformer = transformer
        self._clock = _Clock(next(transformer.parameters()).device)
        self._steps: list[list[Any]] = []
        self._layers: list[tuple[int, int]] = []
        self._times: list[list[Any]] = []
        self._tokens = 0
        self._hooks = ExitStack()

    def __enter__(self) -> AttentionWatch:
        blocks: Any = self._transformer.transformer_blocks
        handles = [
            self._transformer.register_forward_pre_hook(self._step_starts),
            self._transformer.register_forward_hook(self._step_stops),
        ]
        for layer, block in enumerate(blocks):
            handles.append(block.attn.register_forward_pre_hook(partial(self._starts, layer)))
            handles.append(block.attn.register_forward_hook(self._stops))
        for handle in handles:
            self._hooks.callback(handle.remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.close()

    def _step_starts(self, module: nn.Module, args: Any) -> None:
        self._steps.append([self._clock.now()])

    def _step_stops(self, module: nn.Module, args: Any, output: Any) -> None:
        self._steps[-1].append(self._clock.now())

    def _starts(self, layer: int, module: nn.Module, args: Any) -> None:
        self._tokens = args[0].shape[1]
        self._layers.append((len(self._steps) - 1, layer))
        self._times.append([self._clock.now()])

    def _stops(self, module: nn.Module, args: Any, output: Any) -> None:
        self._times[-1].append(self._clock.now())

    def report(self, records: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return totals, and an entry a step with an entry a layer; waits for the device.

        Args:
            records: what the installed plugin says of the same calls in the same order, None for a
                dense run.
        """
        self._clock.wait()
        steps: list[dict[str, Any]] = [
            {"step": index, "ms": self._clock.ms(*times), "layers": []}
            for index, times in enumerate(self._steps)
        ]
        if records is None:
            records = [{"kind": "dense"}] * len(self._layers)
        for (step, layer), times, record in zip(self._layers, self._times, records, strict=True):
            path, _, reason = record["kind"].partition(":")
            entry: dict[str, Any] = {"layer": layer, "ms": self._clock.ms(*times), "path": path}
            if path == "sparse":
                for name in ("density", "video_density", "route", "implementations"):
                    entry[name] = record[name]
            elif reason:
                entry["why"] = reason
            steps[step]["layers"].append(entry)
        layers = [layer for step in steps for layer in step["layers"]]
        sparse = [layer for layer in layers if layer["path"] == "sparse"]
        return {
            "denoise_ms": sum(step["ms"] for step in steps),
            "attention_ms": sum(layer["ms"] for layer in layers),
            "attention_calls": len(layers),
            "sparse_calls": len(sparse),
            "density": _mean([layer["density"] for layer in sparse]),
            "video_density": _mean([layer["video_density"] for layer in sparse]),
            "tokens": self._tokens,
            "steps": steps,
        }


class _Clock:
    """Read the time without making a GPU wait: events there, the host's counter elsewhere."""

    def __init__(self, device: torch.device):
        self._device = device

    def now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def ms(self, start: Any, stop: Any) -> float:
        if self._device.type == "cuda":
            return start.elapsed_time(stop)
        return (stop - start) * 1e3


def _describe_model(pipe: Any, made: GeneratedClip, options: GenerateOptions) -> dict[str, Any]:
    """Return the shapes that a reader needs to judge the figures."""
    component, transformer = loaded_transformer(pipe)
    config: Any = transformer.config
    return {
        "name": options.model,
        "workflow": options.workflow,
        "component": component,
        "layers": len(transformer.transformer_blocks),  # type: ignore[arg-type]
        "heads": config.num_attention_heads,
        "head_dim": config.attention_head_dim,
        "parameters": sum(parameter.numel() for parameter in transformer.parameters()),
        "frames": made.frames.shape[0],
        "height": made.frames.shape[1],
        "width": made.frames.shape[2],
        "fps": made.fps,
    }


def _compare(
    made: GeneratedClip, dense: GeneratedClip, runs: dict[str, dict[str, Any]], label: str
) -> dict[str, Any]:
    """Measure how far the sparse clip is from the dense one, and how much faster it was."""
    return {
        "psnr_db": clips.psnr(made.frames, dense.frames),
        "ssim": clips.ssim(made.frames, dense.frames),
        "latents_relative_l2": clips.relative_l2(made.latents.cpu(), dense.latents.cpu()),
        "audio_latents_relative_l2": clips.relative_l2(
            made.audio_latents.cpu(), dense.audio_latents.cpu()
        ),
        "denoise_speedup": runs["dense"]["denoise_ms"] / runs[label]["denoise_ms"],
        "attention_speedup": runs["dense"]["attention_ms"] / runs[label]["attention_ms"],
    }


def _write(folder: clips.OutputFolder, made: dict[str, GeneratedClip], label: str) -> list[str]:
    """Write the clips and the contact sheet under their temporary names."""
    names = []
    for each, item in made.items():
        name = f"{each}.mp4"
        clips.write_clip(folder.path(name), item.frames, item.fps, item.audio, item.sampling_rate)
        names.append(name)
    rows = [(each, item.frames) for each, item in made.items()]
    clips.write_contact_sheet(folder.path("contact-sheet.png"), rows)
    return [*names, "contact-sheet.png"]


def _plain(value: Any) -> Any:
    """Turn a report into what JSON can hold: tensors into lists, infinities into words."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _mean(values: list[float | None]) -> float | None:
    """Return the mean of the known values, None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")
