"""The commands as a user types them: output, messages and exit codes."""

from __future__ import annotations

import json
import shlex

import pytest
import torch

pytest.importorskip("typer", reason="the cli extra is not installed")

from typer.testing import CliRunner

from solspark import cli
from solspark.diagnose import Served
from solspark.integrations.generation import GenerateOptions

runner = CliRunner()


def invoke(line: str):
    words = shlex.split(line)
    return runner.invoke(cli.app, words, env={"COLUMNS": "200", "TERM": "dumb"})


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("generate", "capture", "env", "explain", "bench"):
        assert command in result.output


def test_env_as_json_says_what_serves_here():
    result = invoke("env --json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["packages"]["torch"] == torch.__version__
    served = {item["operation"]: item for item in found["operations"]}
    assert served["block_sparse_attention"]["implementation"]
    assert found["call"]["query_tokens"] == 73584
    assert found["call"]["dtype"] == "bfloat16"


def test_operations_that_fare_alike_share_a_row(monkeypatch):
    reasons = (("triton", ("it rests",)),)
    served = [
        Served("one", "eager", reasons, ()),
        Served("two", "triton", (), ("eager",)),
        Served("three", "eager", reasons, ()),
    ]
    monkeypatch.setattr(cli, "explain", lambda call: served)
    lines = invoke("explain --tokens 64 --device cpu").stdout.splitlines()
    (shared,) = [line for line in lines if "it rests" in line]
    assert "one, three" in shared and "eager" in shared
    (other,) = [line for line in lines if "two" in line]
    assert [word.strip() for word in other.split("│")[1:-1]] == ["two", "triton", "eager", ""]


def test_env_prints_packages_and_operations():
    result = invoke("env")
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.stdout
    assert "block_sparse_attention" in result.stdout
    if not torch.cuda.is_available():
        assert "no CUDA or ROCm device" in result.stdout


def test_explain_as_json():
    result = invoke(
        "explain --tokens 8192 --heads 4 --topk-ratio 0.25 --local-radius -1 "
        "--dtype fp16 --device cpu --json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["call"]["dtype"] == "float16"
    assert found["call"]["key_tokens"] == 8192
    assert found["estimate"]["density"] == pytest.approx(0.25)
    cost = found["estimate"]
    kept = cost["summary_bytes"] + cost["plan_bytes"]
    assert cost["output_bytes"] > cost["score_bytes"]
    assert cost["workspace_bytes"] == cost["output_bytes"] + kept


def test_explain_asks_about_a_device_that_is_not_here():
    result = invoke("explain --tokens 4096 --device cuda --capability 9.0 --json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["call"]["device_type"] == "cuda"
    assert found["call"]["capability"] == [9, 0]


def test_explain_prints_density_work_and_memory():
    result = invoke("explain --tokens 73584 --topk-ratio 0.1 --sink-tokens 1008")
    assert result.exit_code == 0, result.output
    assert "113 of 1134 candidate blocks a row" in result.stdout
    assert "155 TFLOP" in result.stdout
    assert "memory above the inputs" in result.stdout


def test_explain_says_what_int8_does():
    asked = "explain --tokens 73584 --topk-ratio 0.1 --sink-tokens 1008 --precision int8"
    found = invoke(f"{asked} --chunk-tokens 4096 --device cuda --capability 9.0")
    assert found.exit_code == 0, found.output
    assert "in 18 chunks of 4096 rows: projected twice in a layer's first" in found.stdout
    assert "Q, K and V are never held" in found.stdout
    assert "qkv_producer rotated" in found.stdout and "sol_int8" in found.stdout
    assert "block_sparse_attention" not in found.stdout
    whole = invoke(f"{asked} --device cpu")
    assert "INT8 from Q, K and V" in whole.stdout
    assert "unless told otherwise: rotated: yes, balanced: yes." in whole.stdout
    streamed, held = (
        json.loads(invoke(f"{asked} --device cpu --json {more}").stdout)["estimate"]
        for more in ("--chunk-tokens 4096", "")
    )
    assert held["held_bytes"] == 3 * 73584 * 56 * 128 * 2 and streamed["held_bytes"] == 0
    # A byte a channel of Q, K and V, two scales a row; and the chunk, the only bfloat16 there is.
    rows = 1150 * 64 * 56
    assert held["operand_bytes"] == rows * (3 * 128 + 8)
    assert streamed["operand_bytes"] == held["operand_bytes"] + 3 * 4096 * 56 * 128 * 2
    assert (
        sum(streamed[f"{part}_bytes"] for part in ("output", "summary", "plan", "operand"))
        == (streamed["workspace_bytes"])
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "explain --tokens 64 --precision fp4",
            "solspark explain: precision: expected native, fp8 or int8; got 'fp4'",
        ),
        (
            "explain --tokens 64 --chunk-tokens 64",
            "solspark explain: chunk_tokens: 64 needs precision 'int8'",
        ),
        (
            "explain --tokens 64 --precision int8 --chunk-tokens 100",
            "solspark explain: chunk_tokens: expected a multiple of 64, got 100",
        ),
        (
            "explain --tokens 64 --precision int8 --head-dim 64",
            "solspark explain: head_dim: expected 128 with precision 'int8', got 64",
        ),
        (
            "explain --tokens 64 --precision int8 --tail block8x8",
            "solspark explain: tail: expected block or none with precision 'int8', got 'block8x8'",
        ),
        (
            "generate --precision int8",
            "solspark generate: precision: expected None, 'native' or 'fp8' with method 'spark'",
        ),
        (
            "generate --method sol --chunk-tokens 256",
            "solspark generate: chunk_tokens: 256 needs precision='int8', got 'native'",
        ),
        (
            "generate --method sol --precision int8 --chunk-tokens 100",
            "solspark generate: chunk_tokens: expected None or a multiple of 64, got 100",
        ),
        (
            "generate --method sol --precision int8 --tail block8x8",
            "solspark generate: precision: 'int8' cannot be combined with tail=",
        ),
        (
            "generate --method dense --precision int8",
            "solspark generate: precision: expected no sparse option with method 'dense'",
        ),
        (
            "explain --tokens 0",
            "solspark explain: tokens: expected an int >= 1, got 0",
        ),
        (
            "explain --tokens 64 --dtype int8",
            "solspark explain: dtype: expected one of bf16",
        ),
        (
            "explain --tokens 64 --topk-ratio 1.5",
            "solspark explain: topk_ratio: expected None or a number in (0, 1], got 1.5",
        ),
        (
            "explain --tokens 64 --device cuda --capability nine",
            "solspark explain: capability: expected MAJOR.MINOR of a cuda device, got 'nine'",
        ),
        (
            "explain --tokens 64 --tail row",
            "solspark explain: tail: expected one of query, block, block8x8, none; got 'row'",
        ),
        (
            "generate --method sage",
            "solspark generate: method: expected one of dense, sol, spark; got 'sage'",
        ),
        (
            "generate --compare sol",
            "solspark generate: compare: expected one of dense; got 'sol'",
        ),
        (
            "generate --method dense --compare dense",
            "solspark generate: compare: expected None with method 'dense', got 'dense'",
        ),
        (
            "generate --method dense --topk-ratio 0.1",
            "solspark generate: topk_ratio: expected no sparse option with method 'dense'",
        ),
        (
            "generate --steps 0",
            "solspark generate: steps: expected an int >= 1, got 0",
        ),
        (
            "generate --height 96",
            "solspark generate: height, width: expected both or neither, got only height",
        ),
        (
            "generate --height 96 --width 100",
            "solspark generate: width: expected a multiple of 32, got 100",
        ),
        (
            "generate --frames 346",
            "solspark generate: frames: expected 108 to 345, got 346",
        ),
        (
            "generate --seconds 15",
            "solspark generate: seconds: expected 4.5 to 14.375, got 15.0",
        ),
        (
            "generate --tau nan",
            "solspark generate: tau: expected a finite number, got nan",
        ),
        (
            "generate --frames 124 --seconds 5",
            "solspark generate: seconds: expected None together with frames, got both",
        ),
        (
            "generate --method sol --preset quality",
            "solspark generate: preset: expected None with method 'sol', got 'quality'",
        ),
        (
            "generate --preset best",
            "solspark generate: preset: expected one of default, quality, fast; got 'best'",
        ),
        (
            "generate --topk-ratio 2",
            "solspark generate: topk_ratio: expected a number in (0, 1], got 2.0",
        ),
        (
            "generate --warmup-ratio 2",
            "solspark generate: warmup_ratio: expected a finite number in [0, 1], got 2.0",
        ),
        (
            "generate --option sol_kv_splits",
            "solspark generate: option: expected NAME=VALUE, got 'sol_kv_splits'",
        ),
        (
            "generate --option sol_kv_splits=0",
            "solspark generate: sol_kv_splits: expected an int >= 1, got 0",
        ),
        (
            "generate --option sol_kv_split=1",
            "solspark generate: unexpected option sol_kv_split (did you mean sol_kv_splits?); ",
        ),
        (
            "generate --device tpu:x",
            "solspark generate: device: expected auto, cpu, cuda or cuda:N, got 'tpu:x'",
        ),
    ],
)
def test_a_bad_option_names_what_was_expected_and_what_came(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(words)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message), result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_bad_option_keeps_its_traceback_when_asked():
    result = invoke("--traceback generate --steps 0")
    assert isinstance(result.exception, ValueError)


def test_an_output_folder_that_is_a_file_is_refused_before_anything_loads(tmp_path):
    (tmp_path / "out").write_text("mine")
    result = invoke(f"generate --out '{tmp_path / 'out'}'")
    assert result.exit_code == 2
    assert "out: expected a folder, got the file" in result.stderr
    assert (tmp_path / "out").read_text() == "mine"


def test_the_progress_of_a_run_reaches_the_options_it_was_given(monkeypatch, tmp_path):
    seen: list[GenerateOptions] = []

    def generate(options: GenerateOptions, progress):
        seen.append(options)
        progress("spark", 1, 2)
        progress("spark", 2, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "generate", generate)
    result = invoke(
        "generate --seconds 6.5 --tau 1.5 --tail block --option sol_kv_splits=2 "
        "--option sol_video_tail_mode=pad --option 'landmark_tree_v2_children=(16, 8)' "
        f"--out '{tmp_path}'"
    )
    assert result.exit_code == 130
    assert "solspark generate: interrupted, nothing was written" in result.stderr
    assert seen == [
        GenerateOptions(
            seconds=6.5,
            tau=1.5,
            tail="block",
            out=str(tmp_path),
            extra={
                "sol_kv_splits": 2,
                "sol_video_tail_mode": "pad",
                "landmark_tree_v2_children": (16, 8),
            },
        )
    ]
