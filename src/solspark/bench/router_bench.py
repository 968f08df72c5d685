"""`solspark bench router`: every attention that the router can send a call to, on models' shapes.

Checks first, then each shape's rows, each judged before it is timed, then blocks from end to end,
then the settings that the figures recommend. A row that cannot be had here is listed with the
reason. The exit code is 1 when a check, a row of ours or torch's own attention fails its gate.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from solspark.bench import rows as rows_module
from solspark.bench.router_blocks import BLOCK_ROWS, GEOMETRIES
from solspark.bench.router_presets import ALIASES, PRESETS
from solspark.bench.router_report import named, show, write
from solspark.bench.router_rows import ROWS, choose_ids
from solspark.bench.router_session import DTYPES, SECTIONS, Plan, RouterSession
from solspark.bench.router_timing import Pace


def parser(program: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    cuda = torch.cuda.is_available()
    parse = argparse.ArgumentParser(
        prog=program,
        description="Measure every attention that the router can use, on the shapes of models.",
    )
    add = parse.add_argument
    add(
        "--shapes",
        default="sdxl,flux2" if cuda else "tiny",
        help="presets, or " + ", ".join(ALIASES),
    )
    add("--configs", default="all", help="attention rows, comma-separated")
    add("--block-configs", default="all", help="block rows, comma-separated")
    add("--block-geometries", default="flux1" if cuda else "tiny", help=", ".join(GEOMETRIES))
    add("--sections", default="all", help=", ".join(SECTIONS))
    add("--iters", type=int, help="least timed calls a row (default 12, or the preset's)")
    add("--warmup", type=int, default=4, help="least untimed calls a row")
    add("--iters-s", type=float, default=0.5 if cuda else 0.2, help="least seconds of timed calls")
    add(
        "--warmup-s",
        type=float,
        default=0.2 if cuda else 0.05,
        help="least seconds of untimed calls",
    )
    add("--config-timeout", type=float, default=300.0, help="seconds a row may take")
    add("--skip-checks", action="store_true", help="no correctness list before the rows")
    add("--skip-bench", action="store_true", help="the correctness list only")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--device", default="cuda" if cuda else "cpu")
    add("--save", default="auto", help="tables and plot: auto, none, or a path without ending")
    add("--json", default="auto", help="rows (.jsonl) and document (.json): the same")
    add("--outdir", type=Path, default=Path("out/router"), help="where auto writes")
    add("--run", default="", help="id of the run")
    add("--commit", default="", help="commit measured, where git cannot tell")
    add("--list", action="store_true", help="list presets and rows, measure nothing")
    return parse


def plan_from(arguments: argparse.Namespace) -> Plan:
    """Return the plan of parsed arguments.

    Raises:
        ValueError: an unknown id, with the valid ones in the message, or a number out of range.
    """
    shapes = choose_ids(arguments.shapes, PRESETS, "--shapes", ALIASES)
    configs = choose_ids(arguments.configs, ROWS, "--configs", {})
    inside = choose_ids(arguments.block_configs, BLOCK_ROWS, "--block-configs", {})
    geometries = choose_ids(arguments.block_geometries, GEOMETRIES, "--block-geometries", {})
    sections = choose_ids(arguments.sections, dict.fromkeys(SECTIONS), "--sections", {})
    for name in ("iters", "warmup"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected at least 1, got {value}")
    if arguments.config_timeout <= 0:
        raise ValueError(f"--config-timeout: expected seconds, got {arguments.config_timeout}")
    device = torch.device(arguments.device)
    return Plan(
        shapes=tuple(PRESETS[name] for name in shapes),
        configs=tuple(ROWS[name] for name in configs),
        geometries=tuple(GEOMETRIES[name] for name in geometries),
        block_configs=tuple(BLOCK_ROWS[name] for name in inside),
        sections=() if arguments.skip_bench else tuple(sections),
        checks=not arguments.skip_checks,
        pace=Pace(
            arguments.iters or Pace.iters, arguments.warmup, arguments.iters_s, arguments.warmup_s
        ),
        iters_asked=arguments.iters is not None,
        timeout_s=arguments.config_timeout,
        device=device,
        dtype=_dtype(arguments.dtype, device),
        run=arguments.run or rows_module.fresh_run_id(),
        commit=arguments.commit or rows_module.current_commit(),
    )


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; "auto" is bf16 where the device multiplies it."""
    if name != "auto":
        return DTYPES[name]
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def main(argv: Sequence[str] | None = None, program: str = "solspark bench router") -> int:
    """Run the router's benchmark.

    Args:
        argv: arguments; None takes the process's own.
        program: name in help texts.

    Returns:
        0; 1 when a check or a gate of ours failed, the device was lost, or an id is unknown.
    """
    arguments = parser(program).parse_args(sys.argv[1:] if argv is None else list(argv))
    if arguments.list:
        for preset in PRESETS.values():
            print(f"{preset.name:12} {preset.size:20} {preset.note}")
        for what, names in (("rows", ROWS), ("block rows", BLOCK_ROWS), ("blocks", GEOMETRIES)):
            print(f"{what}: {', '.join(names)}")
        return 0
    try:
        plan = plan_from(arguments)
    except (ValueError, RuntimeError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    stem = arguments.outdir / f"router-{plan.run}"
    record = _place(arguments.json, stem)
    lines = record and named(record, ".jsonl")
    session = RouterSession(plan, lines)
    started = time.perf_counter()
    session.say(f"run {plan.run}, commit {plan.commit}, {plan.device}, {plan.dtype}")
    interrupted = False
    try:
        session.run()
    except KeyboardInterrupt:
        interrupted = True
        session.say("interrupted: what was measured follows")
    text = show(session)
    written = [lines] if lines is not None else []
    written += write(session, text, record, _place(arguments.save, stem))
    session.say(
        f"{time.perf_counter() - started:.0f} s; {', '.join(map(str, written)) or 'no file'}"
    )
    if interrupted:
        return 130
    return 1 if session.failed or session.stopped else 0


def _place(choice: str, stem: Path) -> Path | None:
    """Return where "auto", "none" or a path says to write."""
    if choice == "none":
        return None
    return stem if choice == "auto" else Path(choice)
