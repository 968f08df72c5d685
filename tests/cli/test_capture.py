"""`solspark capture` on the tiny pipeline, and `solspark bench` on what it saved."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
pytest.importorskip("typer", reason="the cli extra is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors import safe_open
from typer.testing import CliRunner

from solspark import cli
from solspark.bench.inputs import make_inputs, recorded_problem
from solspark.bench.problems import get_problem
from solspark.types import TokenGrid

runner = CliRunner()
CPU = torch.device("cpu")


def invoke(line: str):
    words = shlex.split(line)
    return runner.invoke(cli.app, words, env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def captured(tmp_path_factory) -> Path:
    """One run of the command; two of its four layers, in the first of its two evaluations."""
    folder = tmp_path_factory.mktemp("capture") / "calls"
    words = f"--layers 3,1 --evaluations 0 --steps 2 --prompt 'two words' --out {folder}"
    result = invoke(f"capture {words}")
    assert result.exit_code == 0, result.stderr
    names = ["layer01-evaluation00.safetensors", "layer03-evaluation00.safetensors"]
    assert result.stdout.splitlines() == [f"wrote {folder / name}" for name in names]
    assert sorted(path.name for path in folder.iterdir()) == names
    # It ends after the last evaluation asked for.
    assert result.stderr.splitlines() == ["capture: step 1 of 2"]
    return folder


def test_a_file_says_what_it_holds(captured):
    file = captured / "layer03-evaluation00.safetensors"
    with safe_open(str(file), framework="pt") as stored:
        facts = stored.metadata()
        assert sorted(stored.keys()) == ["key", "query", "value"]
        query = stored.get_tensor("query")
    assert json.loads(facts["grid"]) == [37, 3, 5] and facts["video_tokens"] == "555"
    assert (facts["layer"], facts["evaluation"], facts["steps"]) == ("3", "0", "2")
    assert (facts["model"], facts["prompt"], facts["seed"]) == ("tiny", "two words", "0")
    assert facts["torch"] == torch.__version__ and "after norm and rotary" in facts["order"]
    assert "None" not in facts.values() and "null" not in facts.values()
    problem = recorded_problem(file)
    assert problem is not None
    assert problem.name == "tiny-37x3x5-layer03-evaluation00"
    assert (problem.grid, problem.text_tokens) == (TokenGrid(37, 3, 5), 3)
    assert (problem.tokens, problem.heads, problem.head_dim) == (query.shape[1], 2, 128)
    assert query.dtype == torch.float32 and query.isfinite().all()


def test_a_request_with_a_keyframe_says_so(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="the cli extra is not installed")
    image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    words = f"--layers 0 --evaluations 0 --steps 1 --out {tmp_path / 'calls'}"
    result = invoke(f"capture --last-frame {tmp_path / 'red.png'} {words}")
    assert result.exit_code == 0, result.stderr
    file = tmp_path / "calls" / "layer00-evaluation00.safetensors"
    with safe_open(str(file), framework="pt") as stored:
        facts = stored.metadata()
    assert (facts["workflow"], facts["component"]) == ("fl2va", "transformer")
    # One latent frame of 3 x 5 rows behind the video, whose grid stays what it was.
    assert facts["condition_tokens"] == "15" and json.loads(facts["grid"]) == [37, 3, 5]


def test_bench_replays_it(captured, tmp_path):
    file, rows = captured / "layer01-evaluation00.safetensors", tmp_path / "rows.jsonl"
    options = f"--level layer,plan --methods spark,sol,reblock --target-s 0.01 --out {rows}"
    result = invoke(f"bench --activations {file} --dtype fp32 --device cpu --commit abc {options}")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {(row["level"], row["method"]) for row in found} >= {
        ("layer", "spark"),
        ("layer", "sol"),
    }
    for row in found:
        assert row["problem"] == "tiny-37x3x5-layer01-evaluation00" and row["gate"] == "pass"
        assert row["options"]["inputs"] == "file"


def test_quality_knows_it_too(captured, tmp_path):
    rows = tmp_path / "rows.jsonl"
    file = captured / "layer01-evaluation00.safetensors"
    options = f"--only 1 --heads 1 --dtype fp32 --device cpu --commit abc --out {rows}"
    result = invoke(f"bench quality --activations {file} {options}")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert found and all(row["heads"] == 1 for row in found)
    assert {row["problem"] for row in found} == {"tiny-37x3x5-layer01-evaluation00"}
    assert "| tiny-37x3x5-layer01-evaluation00, 1 heads, captured |" in result.stdout
    assert "kinds of the first heads" not in result.stdout


def test_a_file_is_held_against_the_problem_named(captured, tmp_path):
    file = captured / "layer01-evaluation00.safetensors"
    problem = recorded_problem(file)
    assert problem is not None
    turned = problem.with_grid(37, 5, 3)
    with pytest.raises(ValueError, match=r"expected the grid \(37, 5, 3\) .* got \(37, 3, 5\)"):
        make_inputs(turned, "file", CPU, torch.float32, file=file)
    with pytest.raises(ValueError, match="without --problem the file says what it is"):
        make_inputs(get_problem("tiny"), "file", CPU, torch.float32, file=file)
    noise = tmp_path / "noise.safetensors"
    noise.write_bytes(b"noise")
    result = invoke(f"bench --activations {noise}")
    assert result.exit_code == 2 and "expected safetensors, got something else" in result.stderr
    result = invoke(f"bench --activations {tmp_path / 'missing'}")
    assert result.exit_code == 2 and "missing" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layers one", "solspark capture: layers: expected numbers from 0 such as 0,12,24"),
        ("--layers 1,-2", "solspark capture: layers: expected numbers from 0 such as 0,12,24"),
        ("--layers 4", "solspark capture: layers: expected ints from 0 to 3, got 4"),
        ("--evaluations 5", "solspark capture: evaluations: expected ints from 0 to 4, got 5"),
        ("--steps 0", "solspark capture: steps: expected an int >= 1, got 0"),
    ],
)
def test_a_bad_option_names_what_was_expected_and_what_came(words, message, tmp_path):
    result = invoke(f"capture {words} --out {tmp_path}")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message) and len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_file(tmp_path, monkeypatch):
    from solspark.integrations import capture as module

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.H3Capture, "take", interrupted)
    result = invoke(f"capture --evaluations 0 --steps 1 --out {tmp_path}")
    assert result.exit_code == 130 and list(tmp_path.iterdir()) == []
