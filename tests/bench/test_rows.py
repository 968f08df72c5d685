from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from solspark.bench.report import (
    baselines,
    command,
    main,
    newest,
    rewrite,
    section,
    speed_up,
)
from solspark.bench.rows import (
    Row,
    append_row,
    current_commit,
    from_line,
    read_rows,
    to_line,
)

DESIGNED = [
    *("run", "date", "commit", "gpu", "torch", "triton", "problem", "tokens", "heads", "level"),
    *("method", "options", "implementation", "precision", "density", "ms", "iqr_ms", "tflops"),
    *("peak_gib", "error", "gate"),
]


def row(**changes) -> Row:
    base = Row(
        run="r1",
        date="2026-11-30",
        commit="abc",
        gpu="NVIDIA H200",
        torch="2.11.0",
        triton="3.6.0",
        problem="h3-10s",
        tokens=73_584,
        heads=56,
        level="call",
        method="sol",
        options={"inputs": "gaussian", "topk_ratio": 0.1},
        implementation="hopper",
        density=0.1025,
        ms=33.912345678,
        iqr_ms=0.1,
        tflops=512.3,
        peak_gib=1.25,
        error={"relative_l2": 0.5, "against": "dense"},
        gate="pass",
    )
    return replace(base, **changes)


DENSE = row(method="dense-cudnn", options={"inputs": "gaussian"}, ms=272.5, density=1.0)


def test_a_row_has_the_fields_of_the_design_in_its_order():
    assert [item.name for item in fields(Row)] == DESIGNED
    assert list(json.loads(to_line(row()))) == DESIGNED


def test_rows_survive_their_file_and_figures_are_rounded(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    append_row(path, row())
    append_row(path, DENSE)
    first, second = read_rows([path])
    assert first.ms == 33.912 and first.options == row().options
    assert second.method == "dense-cudnn"
    assert first.key() == row(ms=1.0).key() != row(run="r2").key()


def test_a_line_with_other_fields_is_refused():
    record = {**json.loads(to_line(row())), "speed": 3}
    with pytest.raises(ValueError, match=r"row: unknown fields \['speed'\]"):
        from_line(json.dumps(record))


def test_the_newest_run_of_a_measurement_is_shown():
    rows = [row(run="r2", ms=30.0), row(run="r1"), row(run="r1", problem="h3-5s")]
    kept = newest(rows)
    assert [(item.run, item.problem) for item in kept] == [("r2", "h3-10s"), ("r1", "h3-5s")]


def test_a_later_run_that_could_not_try_a_method_keeps_its_row():
    absent = row(run="r2", ms=None, gate="unavailable: no such wheel")
    assert newest([row(), absent]) == newest([absent, row()]) == [row()]
    assert "unavailable: no such wheel" in section("call", [absent])


def test_ratios_are_taken_inside_a_run():
    other = row(run="r2", ms=30.0)
    base = baselines([DENSE, row(), other])
    assert speed_up(row(), base) == pytest.approx(272.5 / 33.912345678)
    assert speed_up(other, base) is None
    assert speed_up(row(level="attend"), base) == pytest.approx(272.5 / 33.912345678)
    assert speed_up(row(level="plan"), base) is None
    # A generation stands against a dense generation alone.
    assert speed_up(row(level="dit"), base) is None
    whole = replace(DENSE, level="dit", ms=373_000.0)
    assert speed_up(row(level="dit", ms=186_500.0), baselines([DENSE, whole])) == 2.0


def test_a_command_repeats_its_rows():
    rows = [
        DENSE,
        row(),
        row(options={"inputs": "video", "tau": 1.0}),
        row(method="comfy-kitchen-sol", options={"inputs": "gaussian", "token_aug": 256}),
        row(method="sol", options={"precision": "fp8", "heads": 8}),
    ]
    from solspark.bench.settings import load_cases

    load_cases()
    assert command(rows) == (
        "solspark bench --problem h3-10s --level call --methods dense-cudnn,sol,comfy-kitchen-sol "
        "--topk-ratio 0.1 --tau 1.0 --token-aug 256 --sweep precision=fp8 "
        "--inputs gaussian,video --heads 8 --peers .peers"
    )


def test_quality_rows_are_repeated_by_their_own_command():
    told = {"relative_l2": 0.1, "against": "dense"}
    rows = [row(level="quality", options={"inputs": "video", "tau": 1.0}, error=told, ms=None)]
    assert command(rows) == "solspark bench quality --only 3 --problem h3-10s"
    rows.append(row(level="quality", options={"inputs": "video", "tau": 1.5}, gpu="cpu"))
    assert command(rows) == "solspark bench quality --only 6 --problem h3-10s"
    on_cpu = [replace(item, gpu="cpu") for item in rows]
    assert command(on_cpu).endswith("--problem h3-10s --device cpu")


def test_sections_show_figures_versions_and_the_command():
    text = section("call problem=h3-10s", [DENSE, row(), row(problem="h3-5s")])
    assert "| h3-10s | `sol` | topk_ratio=0.1 | 33.91 | 0.1 | 8.04 | 512 | 0.102 |" in text
    assert "h3-5s" not in text
    assert "Run `r1`, 2026-11-30, commit `abc`, NVIDIA H200, torch 2.11.0, triton 3.6.0" in text
    assert "solspark bench --problem h3-10s --level call --methods dense-cudnn,sol" in text
    assert section("layer", [row()]) == "*Nothing recorded yet.*"
    failed = row(ms=None, gate="not finite")
    assert "not finite" in section("call", [failed])


def test_the_headline_keeps_the_rows_that_a_reader_wants_first():
    text = section("headline problem=h3-10s", [DENSE, row(), row(method="pool", level="plan")])
    assert "`sol`" in text and "`dense-cudnn`" in text and "pool" not in text
    # What has no row yet is named, with the command that takes it.
    assert "Not measured yet, one attention call: `dense-flash`, " in text
    assert "--level dit --methods dense-cudnn,dense-default,sol,spark --topk-ratio 0.1,0.2" in text
    assert "`sol` tau=1.0" in text.partition("Not measured yet")[2]
    failed = row(ms=None, gate="not finite")
    text = section("headline problem=h3-10s", [DENSE, failed])
    assert "| not finite |" in text and "`sol` topk_ratio=0.1" in text.partition("Not measured")[2]
    nothing = section("headline problem=h3-5s", [DENSE])
    assert nothing.startswith("*Nothing recorded yet.*") and "h3-5s --level call" in nothing


def test_the_curve_has_a_line_for_each_method_and_a_column_for_each_budget():
    told = {"relative_l2": 0.2772, "against": "dense"}
    kept = {"inputs": "video", "heads": 10}
    rows = [
        row(level="quality", options={**kept, "topk_ratio": 0.1}, error=told, density=0.124),
        row(level="quality", options={**kept, "topk_ratio": 0.2}, error=told, density=0.22),
        row(level="quality", method="spark", options={**kept, "topk_ratio": 0.2}, error=told),
        row(level="quality", options={**kept, "tau": 1.0}, error=told, density=0.27),
        row(level="quality", options={**kept, "topk_ratio": 0.2, "tail": "none"}, error=told),
    ]
    assert section("curve", rows).split("\n") == [
        "| method | problem | top-k 10% | top-k 20% |",
        "|---|---|---|---|",
        "| `sol` | h3-10s | 0.277 (12%) | 0.277 (22%) |",
        "| `spark` | h3-10s |  | 0.277 (10%) |",
        "",
        "| method | problem | tau 1 |",
        "|---|---|---|",
        "| `sol` | h3-10s | 0.277 (27%) |",
        "",
        "Run `r1`, 2026-11-30, commit `abc`, NVIDIA H200, torch 2.11.0, triton 3.6.0: "
        "`solspark bench quality --only 7 --problem h3-10s --heads 10`",
    ]
    assert section("curve problem=h3-5s", rows) == "*Nothing recorded yet.*"
    ablations = section("quality ablations", rows)
    assert "tail=none" in ablations and "tau=1.0" not in ablations


def test_documents_are_rewritten_between_their_markers(tmp_path, capsys):
    document = tmp_path / "measured.md"
    document.write_text("before\n<!-- bench:call -->\nold\n<!-- /bench -->\nafter\n")
    rows = tmp_path / "rows.jsonl"
    append_row(rows, row())
    arguments = ["--rows", str(rows), "--into", str(document)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- bench:call -->\n| problem |")
    assert text.endswith("<!-- /bench -->\nafter\n") and "old" not in text
    assert main([*arguments, "--check"]) == 0
    assert rewrite(text, [row()]) == text
    capsys.readouterr()


def test_the_commit_is_known_or_said_to_be_unknown():
    assert current_commit() == "unknown" or len(current_commit()) >= 7
