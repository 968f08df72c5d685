"""The command line: parse, call, print.

`solspark generate` makes a clip, `capture` saves what a model's attention reads, `env` says what is
installed and what would run, `explain` says the same of one call, `bench` measures.
"""

from __future__ import annotations

import ast
import inspect
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining
    from rich.table import Table
except ImportError:
    print(
        'solspark: the command line needs typer and rich: pip install "solspark[cli]"',
        file=sys.stderr,
    )
    raise SystemExit(2) from None

import torch

from .bench.command import bench_app, quality_app
from .diagnose import Served, environment, estimate, explain
from .errors import SolsparkError
from .integrations.capture import capture
from .integrations.generation import DEFAULT_PROMPT, GenerateOptions, generate
from .types import AttentionCall

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

ATTENTION = ("block_sparse_attention", "sol_int8")
"""Operations that attend in a sparse layer: the table of a run says what served them."""

app = typer.Typer(
    name="solspark",
    help="Sparse attention for video diffusion transformers.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(quality_app, name="quality")
out = Console()
err = Console(stderr=True)


def main() -> None:
    """Run the command line."""
    app(prog_name="solspark")


@app.callback()
def _global_options(
    context: typer.Context,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from.")
    ] = False,
) -> None:
    context.obj = {"traceback": traceback}


def _clip_options(
    model: Annotated[
        str,
        typer.Option(
            help="tiny (random weights, no download), a local folder or a name on the hub."
        ),
    ] = "tiny",
    prompt: Annotated[str, typer.Option(help="What to show.")] = DEFAULT_PROMPT,
    first_frame: Annotated[
        str | None, typer.Option(help="Image that the clip starts from (fl2va).")
    ] = None,
    last_frame: Annotated[
        str | None, typer.Option(help="Image that the clip ends on (fl2va).")
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Image, video or audio to condition on (ref2va); may be repeated, order counts.",
        ),
    ] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, a multiple of 32.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels, a multiple of 32.")] = None,
    frames: Annotated[
        int | None, typer.Option(help="At 24 a second, 108 to 345; rounded up to 17 n + 5.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="In place of --frames, 4.5 to 14.375.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Transformer evaluations (grid points less one): 19; 5 for tiny."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    out: Annotated[str, typer.Option(help="Folder for everything written.")] = "out",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> dict[str, Any]:
    """Return the options of every command that runs a pipeline, under `GenerateOptions`' names."""
    named = dict(locals())
    named["references"] = tuple(named.pop("reference") or ())
    return named


def _runs_a_pipeline(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_clip_options` in place of its parameter `clip`."""
    shared = inspect.signature(_clip_options, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)

    @wraps(command)
    def run(**given: Any) -> None:
        clip = _clip_options(**{name: given.pop(name) for name in shared})
        command(clip=clip, **given)

    parameters = [*own.parameters.values()]
    place = [*own.parameters].index("clip")
    parameters[place : place + 1] = shared.values()
    every: Any = run
    every.__signature__ = own.replace(
        parameters=[each.replace(kind=each.KEYWORD_ONLY) for each in parameters]
    )
    every.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


@app.command("generate")
@_runs_a_pipeline
def generate_command(
    context: typer.Context,
    clip: dict[str, Any],
    method: Annotated[str, typer.Option(help="dense, sol or spark.")] = "spark",
    compare: Annotated[
        str | None, typer.Option(help="dense: run the dense pipeline too, and compare.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Spark options by name: default, quality, fast.")
    ] = None,
    topk_ratio: Annotated[
        float | None, typer.Option(help="Share of the video blocks a query block reads exactly.")
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option(help="Read blocks above mean + tau deviations, in place of a share."),
    ] = None,
    tail: Annotated[
        str | None, typer.Option(help="Skipped blocks: query, block or block8x8.")
    ] = None,
    warmup_ratio: Annotated[
        float | None, typer.Option(help="Dense share of the evaluations at the start: 0.2.")
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(help="Dense evaluations at the start, as a number.")
    ] = None,
    dense_layers: Annotated[
        int | None, typer.Option(help="First layers that stay dense: 1.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Shorter sequences stay dense.")] = None,
    dense_backend: Annotated[
        str | None, typer.Option(help="Attention backend of diffusers for dense calls.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of sparse calls: native, fp8, or with --method sol int8.")
    ] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(help="With int8: project so many rows at a time, never hold Q, K and V."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Any other option of the installer; may be repeated."
        ),
    ] = None,
) -> None:
    """Generate a clip, dense or sparse, and report density, times and distance from dense.

    Writes one .mp4 a method, contact-sheet.png and report.json. Ctrl-C leaves no file behind.
    """
    with _reported("generate", context):
        options = GenerateOptions(
            **clip,
            method=method,
            compare=compare,
            preset=preset,
            topk_ratio=topk_ratio,
            tau=tau,
            tail=tail,
            warmup_ratio=warmup_ratio,
            warmup_steps=warmup_steps,
            dense_layers=dense_layers,
            min_tokens=min_tokens,
            dense_backend=dense_backend,
            precision=precision,
            chunk_tokens=chunk_tokens,
            extra=dict(_named_value(text) for text in option or ()),
        )
        with _terminable(), _step_display() as progress:
            report, files = generate(options, progress)
        _print_runs(report)
        for path in files:
            out.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command("capture")
@_runs_a_pipeline
def capture_command(
    context: typer.Context,
    clip: dict[str, Any],
    layers: Annotated[
        str, typer.Option(help="Transformer blocks, comma-separated; empty for the middle one.")
    ] = "",
    evaluations: Annotated[
        str,
        typer.Option(
            help="Transformer evaluations from 0, comma-separated; empty for the middle one."
        ),
    ] = "",
) -> None:
    """Save Q, K and V of chosen attention calls of a dense run, to measure on them.

    Writes one .safetensors a layer and evaluation, 3 GiB each for ten seconds at 1344x768, which
    `solspark bench --activations FILE` replays. The prompt is among what a file says of itself. The
    run ends after the last evaluation asked for. Ctrl-C leaves no file behind.
    """
    with _reported("capture", context):
        run = GenerateOptions(**clip, method="dense")
        chosen = (_indices("layers", layers), _indices("evaluations", evaluations))
        with _terminable(), _step_display() as progress:
            files = capture(run, *chosen, progress)
        for path in files:
            out.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command("env")
def env_command(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed, and which implementation each operation would use here and why.

    The call asked about is MiniMax-H3's at 10 s: bfloat16 [1, 73584, 56, 128].
    """
    with _reported("env", context):
        found = environment()
        gpu = torch.cuda.is_available()
        call = AttentionCall(
            batch=1,
            query_tokens=73584,
            key_tokens=73584,
            heads=56,
            key_heads=56,
            head_dim=128,
            dtype=torch.bfloat16,
            device_type="cuda" if gpu else "cpu",
            capability=torch.cuda.get_device_capability() if gpu else None,
        )
        served = explain(call)
        if as_json:
            print(json.dumps({**found, "call": _call_record(call), "operations": _plain(served)}))
            return
        table = Table("what", "found", title="installed", title_justify="left")
        table.add_row("solspark", found["solspark"] or "not installed, run from its source")
        table.add_row("python", f"{found['python']} on {found['platform']}")
        cpu = found["cpu"]
        table.add_row(
            "cpu", f"{cpu['model']}, {cpu['cores']} cores, torch uses {cpu['torch_threads']}"
        )
        for name, version in found["packages"].items():
            table.add_row(name, version or "not installed")
        for name in ("cuda", "hip"):
            if found[name]:
                table.add_row(f"torch built for {name}", found[name])
        for index, item in enumerate(found["devices"]):
            text = f"{item['name']}, capability {item['capability']}, {item['memory_gib']} GiB"
            table.add_row(f"device {index}", text)
        if not found["devices"]:
            table.add_row("devices", "no CUDA or ROCm device")
        out.print(table)
        _print_served(served, f"what would serve {call}")


@app.command("explain")
def explain_command(
    context: typer.Context,
    tokens: Annotated[int, typer.Option(help="Query tokens, L_q.")],
    key_tokens: Annotated[int | None, typer.Option(help="Key tokens; as many by default.")] = None,
    batch: Annotated[int, typer.Option(help="Samples, B.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads, H.")] = 56,
    key_heads: Annotated[int | None, typer.Option(help="Fewer key heads (GQA).")] = None,
    head_dim: Annotated[int, typer.Option(help="Channels of a head, D.")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    capability: Annotated[
        str | None, typer.Option(help="MAJOR.MINOR of a GPU that need not be here, such as 9.0.")
    ] = None,
    topk_ratio: Annotated[
        float | None, typer.Option(help="Share of candidate blocks read exactly.")
    ] = None,
    tau: Annotated[float, typer.Option(help="Threshold, without --topk-ratio.")] = 1.0,
    sink_tokens: Annotated[int, typer.Option(help="Exact tokens at the end.")] = 0,
    local_radius: Annotated[int, typer.Option(help="Exact band; -1 for none.")] = 1,
    tail: Annotated[str, typer.Option(help="query, block, block8x8 or none.")] = "query",
    parents: Annotated[int, typer.Option(help="Anchors of reweighted summaries.")] = 1,
    key_bias: Annotated[
        bool, typer.Option("--key-bias", help="With a weight or mask for each key.")
    ] = False,
    lse: Annotated[bool, typer.Option("--lse", help="Return the log-sum-exp.")] = False,
    kv_splits: Annotated[int, typer.Option(help="Splits of the key loop.")] = 1,
    precision: Annotated[
        str, typer.Option(help="native, fp8, or int8, whose tail is taken once a query block.")
    ] = "native",
    chunk_tokens: Annotated[
        int | None, typer.Option(help="With int8: rows of the QKV projection at a time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what would serve one call and why, and what it is expected to cost.

    Density, work and memory are expectations from the options, not measurements.
    """
    with _reported("explain", context):
        call = _described_call(
            batch=batch,
            query_tokens=tokens,
            key_tokens=tokens if key_tokens is None else key_tokens,
            heads=heads,
            key_heads=key_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            capability=capability,
            tail=tail,
            parents=parents,
            key_bias=key_bias,
            return_lse=lse,
            kv_splits=kv_splits,
            precision=precision,
        )
        cost = estimate(
            call,
            topk_ratio=topk_ratio,
            tau=tau,
            sink_tokens=sink_tokens,
            local_radius=local_radius,
            chunk_tokens=chunk_tokens,
        )
        served = explain(call)
        if as_json:
            totals = {"flops": cost.flops, "workspace_bytes": cost.workspace_bytes}
            record = {
                "call": _call_record(call),
                "operations": _plain(served),
                "estimate": {**asdict(cost), **totals},
            }
            print(json.dumps(record))
            return
        _print_served(served, f"what would serve {call}")
        if precision == "int8":
            out.print(_int8_words(call, served, chunk_tokens), soft_wrap=True, highlight=False)
        table = Table("expected", "value", title="cost (not measured)", title_justify="left")
        table.add_row("density", f"{cost.density:.1%}: {cost.density_source}")
        table.add_row("dense work", f"{cost.dense_flops / 1e12:.3g} TFLOP")
        share = cost.flops / cost.dense_flops
        table.add_row("sparse work", f"{cost.flops / 1e12:.3g} TFLOP, {share:.1%} of dense")
        table.add_row("output", _size(cost.output_bytes))
        table.add_row("summaries", _size(cost.summary_bytes))
        table.add_row("block scores, before the output", _size(cost.score_bytes))
        table.add_row("plan", _size(cost.plan_bytes))
        if cost.operand_bytes:
            table.add_row("INT8 operands", _size(cost.operand_bytes))
        table.add_row("memory above the inputs", _size(cost.workspace_bytes))
        table.add_row("Q, K and V themselves", _size(cost.held_bytes))
        out.print(table)


def _int8_words(call: AttentionCall, served: list[Served], chunk_tokens: int | None) -> str:
    """Say what an INT8 call does, and whether the installers have loud channels mended."""
    if chunk_tokens is None:
        source = "INT8 from Q, K and V: read twice, to measure and to quantise."
    else:
        passes = -(-call.query_tokens // chunk_tokens)
        source = (
            f"INT8 from the QKV projection in {passes} chunks of {chunk_tokens} rows: projected "
            "twice in a layer's first sparse call, which measures, and once in later ones; "
            "Q, K and V are never held."
        )
    best = next(item.implementation for item in served if item.operation == "qkv_producer")
    mended = [
        f"{item.operation.partition(' ')[2]}: {'no' if best in dict(item.declined) else 'yes'}"
        for item in served
        if item.operation.startswith("qkv_producer ")
    ]
    return f"{source} Channels in the installers, unless told otherwise: {', '.join(mended)}."


@contextmanager
def _reported(command: str, context: typer.Context) -> Iterator[None]:
    """Turn what a user can cause into one line and an exit code; leave bugs their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"solspark {command}: interrupted, nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None
    except (SolsparkError, ValueError, TypeError, OSError) as error:
        if context.obj["traceback"]:
            raise
        print(f"solspark {command}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@contextmanager
def _step_display() -> Iterator[Callable[[str, int, int], None]]:
    """Show each finished step: a bar a run on a terminal, a line a step in a log."""
    if not err.is_terminal:
        yield lambda label, done, total: print(
            f"{label}: step {done} of {total}", file=sys.stderr, flush=True
        )
        return
    columns = (TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, Elapsed(), Remaining(), console=err) as bar:
        tasks: dict[str, TaskID] = {}

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done)

        yield show


@contextmanager
def _terminable() -> Iterator[None]:
    """Let a polite kill unwind the stack, so that it cleans up as Ctrl-C does."""
    saved = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, saved)


def _indices(name: str, text: str) -> list[int]:
    """Read comma-separated numbers."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{name}: expected numbers from 0 such as 0,12,24; got {text!r}")
    return [int(word) for word in words]


def _named_value(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE; a value that is no Python literal is a word."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"option: expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _described_call(
    *, dtype: str, device: str, capability: str | None, **shape: Any
) -> AttentionCall:
    """Build the call to explain; the device defaults to the one that is here."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}; got {dtype!r}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda; got {device!r}")
    if shape["precision"] not in ("native", "fp8", "int8"):
        raise ValueError(f"precision: expected native, fp8 or int8; got {shape['precision']!r}")
    if shape["precision"] == "int8" and shape["tail"] == "query":
        shape["tail"] = "block"
    if shape["tail"] not in ("query", "block", "block8x8", "none"):
        raise ValueError(
            f"tail: expected one of query, block, block8x8, none; got {shape['tail']!r}"
        )
    for name, value in shape.items():
        if type(value) is int and value < 1:
            option = "tokens" if name == "query_tokens" else name
            raise ValueError(f"{option}: expected an int >= 1, got {value!r}")
    if shape["heads"] % (shape["key_heads"] or shape["heads"]):
        raise ValueError(
            f"key_heads: expected a divisor of {shape['heads']} heads, got {shape['key_heads']}"
        )
    shape["key_heads"] = shape["key_heads"] or shape["heads"]
    here = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if here or capability else "cpu"
    found: tuple[int, int] | None = None
    if capability is not None:
        major, dot, minor = capability.partition(".")
        if device != "cuda" or not (dot and major.isdigit() and minor.isdigit()):
            raise ValueError(
                f"capability: expected MAJOR.MINOR of a cuda device, got {capability!r} "
                f"with device {device!r}"
            )
        found = (int(major), int(minor))
    elif device == "cuda":
        if not here:
            raise ValueError(
                "capability: expected MAJOR.MINOR for device 'cuda' without a GPU here, got none"
            )
        found = torch.cuda.get_device_capability()
    return AttentionCall(dtype=DTYPES[dtype], device_type=device, capability=found, **shape)


def _call_record(call: AttentionCall) -> dict[str, Any]:
    """Return a call as plain data."""
    return {**asdict(call), "dtype": str(call.dtype).removeprefix("torch.")}


def _plain(served: list[Served]) -> list[dict[str, Any]]:
    """Return what would serve as plain data."""
    return [
        {
            "operation": item.operation,
            "implementation": item.implementation,
            "declined": {name: list(reasons) for name, reasons in item.declined},
            "passed_over": list(item.passed_over),
        }
        for item in served
    ]


def _print_served(served: list[Served], title: str) -> None:
    """Print what would serve, one row for all operations that fare alike."""
    alike: dict[Any, list[str]] = {}
    for item in served:
        fate = (item.implementation, item.passed_over, item.declined)
        alike.setdefault(fate, []).append(item.operation)
    rows = [
        (
            ", ".join(operations),
            implementation or "nothing",
            ", ".join(passed_over),
            "\n".join(f"{name}: {'; '.join(reasons)}" for name, reasons in declined),
        )
        for (implementation, passed_over, declined), operations in alike.items()
    ]
    names = ("operations", "served by", "could serve too", "why not the others")
    columns = [place for place in range(len(names)) if any(row[place] for row in rows)]
    table = Table(title=title, title_justify="left", show_lines=True)
    for place in columns:
        table.add_column(names[place], ratio=1 if place in (0, 3) else None)
    for row in rows:
        table.add_row(*(row[place] for place in columns))
    out.print(table)


def _print_runs(report: dict[str, Any]) -> None:
    """Print the short table of a generation."""
    model, call = report["model"], report["call"]
    title = (
        f"{model['name']}: {model['width']}x{model['height']}, {model['frames']} frames, "
        f"{call['steps']} steps, {report['dtype']} on {report['device']}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("method", "denoise s", "attention s", "sparse calls", "density", "served by"):
        table.add_column(name, justify="left" if name in ("method", "served by") else "right")
    for label, run in report["runs"].items():
        names = {
            layer["implementations"][operation]
            for step in run["steps"]
            for layer in step["layers"]
            for operation in ATTENTION
            if layer["path"] == "sparse" and operation in layer["implementations"]
        }
        table.add_row(
            label,
            f"{run['denoise_ms'] / 1e3:.2f}",
            f"{run['attention_ms'] / 1e3:.2f}",
            f"{run['sparse_calls']} of {run['attention_calls']}",
            "" if run["density"] is None else f"{run['density']:.1%}",
            ", ".join(sorted(names)) or "the model's own attention",
        )
    out.print(table)
    if "comparison" in report:
        found = report["comparison"]
        psnr = found["psnr_db"]
        psnr = psnr if isinstance(psnr, str) else f"{psnr:.2f}"
        out.print(
            f"against dense: PSNR {psnr} dB, SSIM {found['ssim']:.4f}, latents' relative L2 "
            f"{found['latents_relative_l2']:.2e}; denoise {found['denoise_speedup']:.2f}x, "
            f"attention {found['attention_speedup']:.2f}x",
            highlight=False,
            soft_wrap=True,
        )


def _size(count: int) -> str:
    """Return bytes in the unit that reads best."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
