"""`solspark generate` on the tiny pipeline: the real thing, in this process and in its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import wave
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
pytest.importorskip("typer", reason="the cli extra is not installed")

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from solspark import cli
from solspark.integrations import generation
from solspark.integrations.generation import GenerateOptions

COMMAND = [sys.executable, "-m", "solspark", "generate", "--model", "tiny"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run of the command, dense and Spark, in a process of its own."""
    out = tmp_path_factory.mktemp("generate") / "clips"
    words = ["--method", "spark", "--compare", "dense", "--steps", "3", "--out", str(out)]
    wide = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=300, env=wide)
    assert done.returncode == 0, done.stderr
    return out, done


def test_a_run_ends_with_clips_a_contact_sheet_and_a_report(compared):
    out, done = compared
    names = ["contact-sheet.png", "dense.mp4", "report.json", "spark.mp4"]
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        assert f"wrote {out / name}" in done.stdout
    for step in (1, 2, 3):
        assert f"spark: step {step} of 3" in done.stderr
    assert (out / "spark.mp4").stat().st_size > 10_000
    with Image.open(out / "contact-sheet.png") as sheet:
        # Six frames of 160 pixels a row; dense, spark and their difference.
        assert sheet.size == (6 * 164 + 4, 3 * (96 + 22) + 4)


def test_the_table_shows_both_runs_and_their_distance(compared):
    _, done = compared
    assert "spark" in done.stdout and "dense" in done.stdout
    assert "against dense: PSNR" in done.stdout
    assert "the model's own attention" in done.stdout


def test_the_report_says_what_happened_in_each_layer_of_each_step(compared):
    out, _ = compared
    report = json.loads((out / "report.json").read_text())
    assert report["model"]["layers"] == 4
    assert report["model"]["head_dim"] == 128
    assert report["call"]["steps"] == 3
    assert report["environment"]["packages"]["torch"] == torch.__version__
    dense, spark = report["runs"]["dense"], report["runs"]["spark"]
    assert dense["sparse_calls"] == 0 and dense["attention_calls"] == 12
    # Warm-up 0.2 of three evaluations is one; of the other two, layer 0 stays dense.
    assert spark["sparse_calls"] == 6 and spark["attention_calls"] == 12
    for step in spark["steps"]:
        for layer in step["layers"]:
            sparse = step["step"] > 0 and layer["layer"] > 0
            assert layer["path"] == ("sparse" if sparse else "dense")
            assert layer["ms"] > 0
            if sparse:
                assert layer["implementations"]["block_sparse_attention"] == "eager"
                assert 0 < layer["video_density"] < layer["density"] < 1
            else:
                assert layer["why"] == ("warmup" if step["step"] == 0 else "dense_layer")
        assert step["ms"] >= sum(layer["ms"] for layer in step["layers"])
    assert spark["summary"]["processor_calls"]["sparse:sol"] == 6


def test_the_report_compares_with_dense(compared):
    out, _ = compared
    found = json.loads((out / "report.json").read_text())["comparison"]
    assert 0 < found["latents_relative_l2"] < 1
    assert found["psnr_db"] > 10
    assert 0 < found["ssim"] < 1
    assert found["denoise_speedup"] > 0


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> dict[str, str]:
    """A picture of one colour, another, and half a second of a tone."""
    folder = tmp_path_factory.mktemp("media")
    for name in ("red", "blue"):
        Image.new("RGB", (80, 64), name).save(folder / f"{name}.png")
    with wave.open(str(folder / "tone.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes((8192 * np.sin(np.arange(8000) / 8)).astype("<i2").tobytes())
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("method", "extra", "given"),
    [
        ("sol", {"topk_ratio": 1.0}, {}),
        ("spark", {"topk_ratio": 1.0}, {}),
        ("sol", {"tau": -1e9}, {}),
        ("spark", {"tau": -1e9}, {"first_frame": "red", "last_frame": "blue"}),
        ("spark", {"topk_ratio": 1.0}, {"references": ("red", "tone")}),
    ],
    ids=["sol budget", "spark budget", "sol threshold", "keyframes", "references"],
)
def test_everything_exact_is_dense_to_rounding(method, extra, given, media, tmp_path):
    for name, value in given.items():
        files = [media[value]] if isinstance(value, str) else tuple(media[word] for word in value)
        extra = {**extra, name: files[0] if isinstance(value, str) else files}
    options = GenerateOptions(
        method=method, compare="dense", steps=2, warmup_steps=0, out=str(tmp_path), **extra
    )
    report, _ = generation.generate(options)
    assert report["runs"][method]["density"] == 1
    # Two evaluations of four layers, each a few float32 roundings away from the dense one.
    eps = torch.finfo(torch.float32).eps
    assert report["comparison"]["latents_relative_l2"] <= 64 * eps


def test_int8_from_chunks_reaches_the_report(tmp_path, capsys):
    words = ["--method", "sol", "--precision", "int8", "--chunk-tokens", "256", "--steps", "3"]
    done = CliRunner().invoke(
        cli.app, ["generate", "--out", str(tmp_path), *words], env={"COLUMNS": "160"}
    )
    assert done.exit_code == 0, done.output
    assert "eager" in done.stdout and "the model's own attention" not in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["options"]["precision"], report["options"]["chunk_tokens"]) == ("int8", 256)
    run = report["runs"]["sol"]
    calls = run["summary"]["processor_calls"]
    assert (calls["int8_cold"], calls["int8_primed"]) == (3, 3)
    served = {"qkv_producer": "eager", "sol_int8": "eager"}
    layers = [layer for step in run["steps"] for layer in step["layers"]]
    assert [layer["implementations"] for layer in layers if layer["path"] == "sparse"] == [
        served
    ] * 6


def test_an_interrupt_in_a_step_leaves_the_folder_as_it_was(tmp_path):
    (tmp_path / "report.json").write_text("earlier")
    seen = []

    def interrupt(label: str, done: int, total: int) -> None:
        seen.append((label, done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generation.generate(GenerateOptions(steps=3, out=str(tmp_path)), interrupt)
    assert seen == [("spark", 1, 3), ("spark", 2, 3)]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "earlier"


def generated(line: str, out: Path) -> dict:
    words = ["generate", *line.split(), "--steps", "2", "--out", str(out)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    return json.loads((out / "report.json").read_text())


def test_keyframes_make_a_request_of_first_and_last_frame(media, tmp_path):
    report = generated(f"--first-frame {media['red']} --last-frame {media['blue']}", tmp_path)
    assert (report["model"]["workflow"], report["model"]["component"]) == ("fl2va", "transformer")
    assert report["options"]["first_frame"] == media["red"]
    summary = report["runs"]["spark"]["summary"]
    # Each is one latent frame of 3 x 5 rows; the video itself stays what is sparse.
    assert summary["condition_video_tokens"] == 30 and summary["target_video_tokens"] == 555
    assert report["runs"]["spark"]["sparse_calls"] > 0
    one = generated(f"--last-frame {media['blue']}", tmp_path)
    assert one["runs"]["spark"]["summary"]["condition_video_tokens"] == 15
    assert one["runs"]["spark"]["tokens"] < report["runs"]["spark"]["tokens"]


def test_references_make_a_request_to_the_other_transformer(media, tmp_path):
    line = f"--method sol --reference {media['red']} --reference {media['tone']}"
    report = generated(line, tmp_path)
    assert report["model"]["workflow"] == "ref2va"
    assert report["model"]["component"] == "transformer_ref"
    assert report["options"]["references"] == [media["red"], media["tone"]]
    summary = report["runs"]["sol"]["summary"]
    assert summary["condition_video_tokens"] == 4 and summary["target_video_tokens"] == 555
    # Text with a label and four rows of vision, the picture, half a second of sound on two channels
    # at a hop of 80 samples, the clip's own sound, the video.
    words = len(generation.DEFAULT_PROMPT.split()) + 1 + 5
    assert report["runs"]["sol"]["tokens"] == words + 4 + 2 * 200 + 2 * 207 + 555


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--first-frame nowhere.png", "first_frame: expected a file, got 'nowhere.png'"),
        ("--last-frame {tone}", "last_frame: expected an image, got "),
        ("--reference {tone}", "reference: expected an image or a video beside audio"),
        ("--reference notes.txt", "reference: expected an image, a video or audio, told by"),
        ("--first-frame {red} --reference {red}", "first_frame: expected None together with ref"),
    ],
)
def test_media_that_cannot_be_used_are_refused_before_a_model_loads(
    line, message, media, tmp_path, monkeypatch
):
    monkeypatch.setattr(generation, "open_pipeline", None)
    words = ["generate", *line.format(**media).split(), "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"solspark generate: {message}"), result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "kill"]
)
def test_a_signal_ends_the_command_without_a_half_file(number, code, tmp_path):
    out = tmp_path / "clips"
    words = ["--steps", "5000", "--out", str(out)]
    # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
    listen = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    listen += "runpy.run_module('solspark', run_name='__main__', alter_sys=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", listen, *COMMAND[3:], *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stop = threading.Timer(240, process.kill)
        stop.start()
        assert process.stderr is not None
        for line in process.stderr:
            if "step 1 of 5000" in line:
                break
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
    finally:
        stop.cancel()
        process.kill()
        process.communicate()
    assert process.returncode == code, error
    assert "Traceback" not in error
    if number == signal.SIGINT:
        assert "solspark generate: interrupted, nothing was written" in error
    assert list(out.iterdir()) == []


def test_a_model_that_is_no_pipeline_is_refused_in_one_line(tmp_path):
    words = ["generate", "--out", str(tmp_path / "out"), "--model", str(tmp_path)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert result.stderr.startswith("solspark generate: "), result.stderr
    assert list((tmp_path / "out").iterdir()) == []
