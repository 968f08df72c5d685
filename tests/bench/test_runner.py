from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from solspark.bench import peers, runner, timing
from solspark.bench.case import METHODS, Case, Unavailable, method
from solspark.bench.console import Progress
from solspark.bench.gate import Verdict
from solspark.bench.rows import read_rows
from solspark.bench.session import Session
from solspark.bench.settings import expand, load_cases, parser, settings_from

load_cases()
QUICK = ["--target-s", "0.01", "--problem", "tiny", "--commit", "abc", "--heads", "1"]


def take(tmp_path, *arguments, code=0):
    out = tmp_path / "rows.jsonl"
    assert runner.main([*QUICK, "--out", str(out), *arguments]) == code
    return list(read_rows([out])) if out.exists() else []


def test_every_level_of_the_tiny_problem_is_measured_on_a_cpu(tmp_path, capsys):
    levels = "attend,call,layer,plan,reweight,checks"
    rows = take(tmp_path, "--level", levels, "--run", "one", "--check", "rows")
    assert {row.level for row in rows} == {
        "attend", "call", "layer", "plan", "reweight", "checks",
    }  # fmt: skip
    assert all(row.passed for row in rows)
    timed = [row for row in rows if row.level != "checks"]
    assert all(row.ms and row.ms > 0 for row in timed)
    assert all((row.gpu, row.commit, row.run) == ("cpu", "abc", "one") for row in rows)
    sol = next(row for row in rows if (row.level, row.method) == ("call", "sol"))
    assert sol.options == {"inputs": "gaussian", "topk_ratio": 0.1, "heads": 1}
    assert sol.implementation == "eager" and sol.precision == "fp32"
    assert 0.1 < sol.density < 0.4 and 0 < sol.error["relative_l2"] < 1
    spark = next(row for row in rows if (row.level, row.method) == ("layer", "spark"))
    assert spark.density and spark.error
    capsys.readouterr()


def test_the_chunked_int8_call_gets_chunks_of_its_own_type(tmp_path, capsys):
    """The inputs of a CPU run are float32; the call takes bfloat16 chunks and nothing else."""
    rows = take(tmp_path, "--methods", "sol-int8-chunked")
    assert [row.options["primed"] for row in rows] == [False, True]
    assert all(row.passed and row.precision == "int8" for row in rows)
    capsys.readouterr()


def test_fp8_is_judged_by_its_distance(tmp_path, capsys):
    options = ["--level", "call,attend", "--methods", "sol,spark", "--lists", "random"]
    rows = take(tmp_path, *options, "--parents", "1", "--sweep", "precision=fp8")
    assert [(row.level, row.method) for row in rows] == [
        ("call", "sol"), ("call", "spark"), ("attend", "sol"), ("attend", "spark"),
    ]  # fmt: skip
    assert all(row.passed and row.precision == "fp8" for row in rows)
    capsys.readouterr()


def test_outlier_channels_of_int8_are_measured_with_and_without_mending(tmp_path, capsys):
    options = ["--level", "quality", "--methods", "sol-int8-outliers", "--sweep"]
    rows = take(tmp_path, *options, "loud=none,k", "--sweep", "balance=False,True")
    errors = [row.error["relative_l2"] for row in rows]
    assert all(row.passed and row.precision == "int8" for row in rows)
    assert errors[0] == errors[1] < errors[3] < 0.5 * errors[2]
    assert take(tmp_path, *options, "loud=x", code=1)[-1].gate.startswith("ValueError: loud: ")
    capsys.readouterr()


def test_a_run_resumes_where_it_stopped(tmp_path, capsys):
    arguments = ("--level", "plan", "--methods", "pool,score_blocks", "--run", "one")
    first = take(tmp_path, *arguments)
    again = take(tmp_path, *arguments)
    assert [row.ms for row in again] == [row.ms for row in first]
    assert "taken already" in capsys.readouterr().err
    more = take(tmp_path, "--level", "plan", "--methods", "pool,select_blocks", "--run", "one")
    assert len(more) == 3
    fresh = take(tmp_path, "--level", "plan", "--methods", "pool", "--run", "two")
    assert len(fresh) == 4


def test_budgets_and_thresholds_are_alternatives_and_other_options_multiply():
    arguments = parser("x").parse_args(
        ["--topk-ratio", "0.1,0.2", "--tau", "1.0", "--tail", "query,none", "--set", "scale=0.5"]
    )
    settings = settings_from(arguments)
    found = list(expand(METHODS["call", "sol"], settings))
    assert len(found) == 6
    assert {"inputs": "gaussian", "tau": 1.0, "tail": "none", "scale": 0.5} in found
    # Spark has a budget only, and a peer takes no option of ours.
    assert [item["topk_ratio"] for item in expand(METHODS["call", "spark"], settings)] == [
        0.1,
        0.2,
    ]
    theirs = list(expand(METHODS["call", "comfy-kitchen-sol"], settings))
    assert all("scale" not in item for item in theirs) and len(theirs) == 3
    assert list(expand(METHODS["call", "dense-cudnn"], settings)) == [{"inputs": "gaussian"}]


def test_a_threshold_alone_leaves_out_methods_that_have_none():
    settings = settings_from(parser("x").parse_args(["--tau", "1.0"]))
    assert list(expand(METHODS["call", "spark"], settings)) == []
    assert [o.get("tau") for o in expand(METHODS["call", "sol"], settings)] == [1.0]


def test_any_option_can_be_swept():
    arguments = ["--sweep", "local-radius=-1,1", "--set", "thresh_type=exact"]
    settings = settings_from(parser("x").parse_args(arguments))
    found = list(expand(METHODS["call", "sol"], settings))
    assert [item["local_radius"] for item in found] == [-1, 1]
    assert all(item["thresh_type"] == "exact" for item in found)
    # An option that has a default of its own can be fixed as well.
    arguments = ["--set", "impl=eager", "--set", "tail=none"]
    (item,) = expand(METHODS["call", "sol"], settings_from(parser("x").parse_args(arguments)))
    assert (item["impl"], item["tail"]) == ("eager", "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problem", "h4"], "problem: expected one of"),
        (["--level", "everything"], "--level: expected one of"),
        (["--methods", "magic"], "--methods: 'magic'"),
        (["--set", "tau"], "expected NAME=VALUE"),
        (["--peers", "/nowhere/at/all"], "--peers: no folder"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert runner.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def planted():
    """Plant methods at the reweight level, and take them away again."""
    before = dict(METHODS)

    def plant(name, **case):
        values = {
            "run": lambda: torch.zeros(1),
            "judge": lambda out: Verdict("pass", 0.0),
            "implementation": "planted",
            **case,
        }
        method("reweight", name)(lambda inputs, options: Case(**values))

    yield plant
    METHODS.clear()
    METHODS.update(before)


def test_a_failing_gate_has_no_time_and_fails_the_run(tmp_path, capsys, planted):
    planted("wrong", judge=lambda out: Verdict("max error 1 over 0.1", 1.0))
    (row,) = take(tmp_path, "--level", "reweight", "--methods", "wrong", code=1)
    assert row.ms is None and row.gate == "max error 1 over 0.1"
    assert "GATE: max error" in capsys.readouterr().err


def test_an_exception_is_a_row_and_the_run_goes_on(tmp_path, capsys, planted):
    def explode():
        raise RuntimeError("out of\n  something")

    planted("bang", run=explode)
    planted("fine")
    rows = take(tmp_path, "--level", "reweight", "--methods", "bang,fine", code=1)
    assert [row.gate for row in rows] == ["RuntimeError: out of something", "pass"]
    capsys.readouterr()


def test_a_lost_device_stops_the_run(tmp_path, capsys, planted):
    def explode():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    planted("bang", run=explode)
    planted("fine")
    rows = take(tmp_path, "--level", "reweight", "--methods", "bang,fine", code=1)
    assert len(rows) == 1
    assert "the device context is lost" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_resume_it(tmp_path, capsys, planted):
    def interrupt():
        raise KeyboardInterrupt

    planted("slow", run=interrupt)
    arguments = ("--level", "reweight", "--methods", "slow", "--run", "one")
    assert take(tmp_path, *arguments, code=130) == []
    assert "interrupted; --run one resumes" in capsys.readouterr().err


def test_what_is_absent_is_a_row_that_says_so_and_is_tried_again(tmp_path, capsys, planted):
    @method("reweight", "absent")
    def build(inputs, options):
        raise Unavailable("no such\n  wheel")

    arguments = ("--level", "reweight", "--methods", "absent", "--run", "one")
    (row,) = take(tmp_path, *arguments)
    assert row.gate == "unavailable: no such wheel" and row.ms is None and not row.passed
    assert "absent inputs" not in capsys.readouterr().err
    planted("absent")
    rows = take(tmp_path, *arguments)
    assert [item.gate for item in rows] == ["unavailable: no such wheel", "pass"]
    capsys.readouterr()


def test_a_peer_or_a_baseline_that_is_missing_is_named(tmp_path, capsys):
    rows = take(tmp_path, "--methods", "comfy-kitchen-dense,sage-dense,dense-cudnn")
    assert [row.method for row in rows] == ["comfy-kitchen-dense", "sage-dense", "dense-cudnn"]
    assert all(row.gate.startswith("unavailable: ") for row in rows)
    printed = capsys.readouterr()
    assert "tiny call dense-cudnn heads=1: unavailable: dense-cudnn needs a CUDA" in printed.err
    assert "dense-cudnn" in printed.out


def test_peers_come_first_with_the_folders_that_their_wheels_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "inside").mkdir()
    (tmp_path / "compiler.pth").write_text("inside\n")
    peers.add_peers(tmp_path)
    assert sys.path[0] == str(tmp_path) and str(tmp_path / "inside") in sys.path


def test_a_gate_that_failed_before_fails_the_resumed_run_too(tmp_path, capsys, planted):
    planted("wrong", judge=lambda out: Verdict("max error 1 over 0.1", 1.0))
    arguments = ("--level", "reweight", "--methods", "wrong", "--run", "one")
    take(tmp_path, *arguments, code=1)
    assert len(take(tmp_path, *arguments, code=1)) == 1
    assert "taken already" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "no-rich"])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_progress_is_a_bar_on_a_terminal_and_plain_lines_elsewhere(monkeypatch, rich, terminal):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as progress:
        progress.say("[1/2] a row")
        progress.advance(1, 2)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    if rich and terminal:
        assert "1/2 rows" in shown and "[1/2] a row" in shown
    else:
        assert shown == "[1/2] a row\n"


def test_a_time_budget_leaves_rows_for_the_next_run(tmp_path, capsys):
    rows = take(tmp_path, "--level", "plan", "--budget-s", "0", "--run", "r")
    assert rows == []
    assert "--run r resumes" in capsys.readouterr().err


def test_without_a_file_the_lines_are_printed(capsys):
    assert runner.main([*QUICK, "--level", "plan", "--methods", "pool"]) == 0
    captured = capsys.readouterr()
    line = next(line for line in captured.out.splitlines() if line.startswith("{"))
    assert '"method": "pool"' in line
    assert "gate" in captured.out.splitlines()[-2]


def test_the_whole_transformer_is_measured_dense_and_sparse(tmp_path, capsys):
    pytest.importorskip("diffusers")
    rows = take(tmp_path, "--level", "dit", "--methods", "dense-default,spark,no-attention")
    whole = {row.method: row for row in rows if row.level == "dit"}
    steps = {row.method: row for row in rows if row.level == "step"}
    assert set(whole) == set(steps) == {"dense-default", "spark", "no-attention"}
    dense, sparse = steps["dense-default"].ms, steps["spark"].ms
    assert whole["dense-default"].ms == pytest.approx(19 * dense, rel=1e-3)
    assert whole["spark"].ms == pytest.approx(4 * dense + 15 * sparse, rel=1e-3)
    assert whole["spark"].density and 0 < whole["spark"].error["relative_l2"] < 1
    # The row says itself that the generation was not run from end to end.
    assert whole["spark"].implementation == (
        "sum of 4 x a dense evaluation (2 timed) and 15 x a sparse one (2 timed)"
    )
    assert steps["dense-default"].implementation == "diffusers native"
    for name, step in steps.items():
        parts = {
            row.options["part"]: row.ms
            for row in rows
            if row.level == "part" and row.method == name
        }
        assert sum(parts.values()) == pytest.approx(step.ms, rel=1e-3)
        assert all(ms > 0 for ms in parts.values())
        stages = {"plan", "reorder and summarise"} if name == "spark" else set()
        assert set(parts) == {"feed-forward", "projections", "attention", "other"} | stages
    capsys.readouterr()


def test_a_clock_measures_and_takes_the_median():
    calls = []
    taken = timing.measure(lambda: calls.append(0), torch.device("cpu"), target_s=0.0, least=4)
    assert taken.samples == 4 and len(calls) >= 6
    assert taken.peak_gib is None and taken.ms >= 0


def test_the_module_runs_on_a_machine_with_torch_and_diffusers_alone(tmp_path):
    pytest.importorskip("diffusers")
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib'))); "
        "from solspark.bench.runner import main; "
        "raise SystemExit(main(['--problem', 'tiny', '--level', 'plan,dit', '--methods', "
        "'pool,no-attention', '--heads', '1', '--target-s', '0.02', '--out', "
        f"{str(tmp_path / 'r.jsonl')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pool" in done.stdout and "no-attention" in done.stdout
    assert "[" in done.stderr and "1/2]" in done.stderr


def test_solspark_bench_forwards_to_the_harness(capsys):
    typer_testing = pytest.importorskip("typer.testing")
    from solspark.cli import app

    result = typer_testing.CliRunner().invoke(app, ["bench", "--list"])
    assert result.exit_code == 0
    assert "h3-10s" in result.output and "comfy-kitchen-sol" in result.output
    failed = typer_testing.CliRunner().invoke(app, ["bench", "--problem", "h4"])
    assert failed.exit_code == 2
    failed = typer_testing.CliRunner().invoke(app, ["quality", "--problem", "h4"])
    assert failed.exit_code == 2 and "solspark bench quality: problem" in failed.stderr
    listed = typer_testing.CliRunner().invoke(app, ["--help"])
    assert "quality" in listed.output and "bench" in listed.output
    capsys.readouterr()


def test_settings_can_be_made_without_a_command_line(tmp_path):
    arguments = parser("x").parse_args(["--level", "plan", "--problem", "tiny"])
    settings = replace(settings_from(arguments), methods=("pool",), target_s=0.01)
    said = []
    session = Session(settings, said.append)
    session.run()
    assert [row.method for row in session.rows] == ["pool"]
    assert not session.failed


def test_recorded_activations_are_replayed(tmp_path, capsys):
    save_file = pytest.importorskip("safetensors.torch").save_file
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1318, 2, 128)
    tensors = {name: torch.randn(shape, generator=generator) for name in ("query", "key", "value")}
    path = tmp_path / "layer.safetensors"
    save_file(tensors, path)
    arguments = ["--target-s", "0.01", "--problem", "tiny", "--methods", "sol", "--commit", "abc"]
    out = tmp_path / "rows.jsonl"
    files = ["--activations", str(path), "--out", str(out)]
    assert runner.main([*arguments, *files]) == 0
    (row,) = read_rows([out])
    assert row.options == {"inputs": "file", "topk_ratio": 0.1} and row.passed
    save_file({**tensors, "key": tensors["key"][:, 1:].contiguous()}, path)
    assert runner.main([*arguments, *files[:2]]) == 2
    assert "key: expected [B, 1318, H, D] for tiny" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gaussian", "video"])
def test_a_device_passes_every_gate_of_a_small_problem(tmp_path, capsys, kind):
    out = tmp_path / "rows.jsonl"
    arguments = ["--problem", "tiny,gate-2k", "--inputs", kind, "--target-s", "0.05"]
    levels = ["--level", "attend,call,layer,plan,reweight,checks", "--commit", "abc"]
    methods = "sol,spark,dense-cudnn,dense-flash,pool,score_blocks,select_blocks,reblock"
    options = ["--methods", f"{methods},spark_reweight", "--tau", "1.0", "--topk-ratio", "0.2"]
    code = runner.main([*arguments, *levels, *options, "--out", str(out)])
    failed = [(row.method, row.options, row.gate) for row in read_rows([out]) if not row.passed]
    assert failed == [] and code == 0
    capsys.readouterr()


@pytest.mark.gpu
def test_a_device_runs_the_tiny_transformer_and_the_quality_rows(tmp_path, capsys):
    pytest.importorskip("diffusers")
    out = tmp_path / "rows.jsonl"
    common = ["--problem", "tiny", "--commit", "abc", "--out", str(out)]
    ratios = ["--topk-ratio", "0.1,0.2"]
    assert runner.main([*common, "--level", "dit", *ratios]) == 0
    assert runner.main(["quality", *common]) == 0
    rows = list(read_rows([out]))
    assert all(row.passed for row in rows), [row.gate for row in rows if not row.passed]
    for step in [row for row in rows if row.level == "step"]:
        kept = {"level": "part", "method": step.method}
        parts = [
            row.ms
            for row in rows
            if all(getattr(row, name) == value for name, value in kept.items())
            and step.options.items() <= row.options.items()
        ]
        assert min(parts) > 0 and sum(parts) == pytest.approx(step.ms, rel=1e-3)
    capsys.readouterr()
