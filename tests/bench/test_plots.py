from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from solspark.bench import plots, quality, sampled
from solspark.bench.problems import get_problem
from solspark.bench.quality_tables import calibration_table
from solspark.bench.rows import Row, append_row, read_rows

pytest.importorskip("matplotlib")


def row(level, method, ms=None, tokens=38_222, error=None, density=None, **options) -> Row:
    options.setdefault("inputs", "gaussian")
    problem = "h3-5s" if tokens < 40_000 else "h3-10s"
    return Row(
        "r1", "2026-11-30", "abc", "NVIDIA H200", "2.11.0", "3.6.0", problem, tokens, 56,
        level, method, options, ms=ms, density=density, error=error, gate="pass",
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        row("call", "dense-cudnn", 72.0),
        row("call", "dense-cudnn", 272.0, 73_584),
        row("call", "sol", 12.0, topk_ratio=0.1),
        row("call", "sol", 34.0, 73_584, topk_ratio=0.1),
        row("dit", "dense-cudnn", 19 * 19_600.0, 73_584),
        row("dit", "spark", 4 * 19_600.0 + 15 * 7_400.0, 73_584, topk_ratio=0.1),
    ]
    shared = {"feed-forward": 2_500.0, "projections": 2_000.0, "other": 500.0}
    dense = {**shared, "attention": 14_600.0}
    sparse = {**shared, "attention": 1_700.0, "plan": 500.0, "reorder and summarise": 200.0}
    for name, ms in dense.items():
        kept = dict(evaluation="dense", part=name)
        rows.append(row("part", "dense-cudnn", ms, 73_584, **kept))
    for name, ms in sparse.items():
        kept = dict(evaluation="sparse", part=name, topk_ratio=0.1)
        rows.append(row("part", "spark", ms, 73_584, **kept))
    for ratio, error in ((0.1, 0.2), (0.2, 0.1), (0.3, 0.05)):
        told = {"relative_l2": error, "against": "dense"}
        kept = dict(inputs="video", topk_ratio=ratio)
        rows.append(row("quality", "sol", error=told, density=ratio, **kept))
    for item in rows:
        append_row(path, item)
    return path


def test_figures_are_drawn_from_rows_and_repeat_exactly(recorded, tmp_path, capsys):
    folder = tmp_path / "figures"
    arguments = ["--rows", str(recorded), "--out", str(folder)]
    assert plots.main(arguments) == 0
    names = {path.name for path in folder.iterdir()}
    expected = ("time_against_tokens", "error_against_density", "where_the_time_goes")
    assert names == {f"{name}.{kind}" for name in expected for kind in ("png", "svg")}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert plots.main(arguments) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    capsys.readouterr()


def test_without_rows_nothing_is_drawn(tmp_path):
    empty = tmp_path / "rows.jsonl"
    empty.write_text("\n")
    assert plots.main(["--rows", str(empty), "--out", str(tmp_path / "figures")]) == 0
    assert not (tmp_path / "figures").exists()


def test_the_parts_of_a_generation_add_up_to_its_time(recorded):
    rows = list(read_rows([recorded]))
    for whole in [item for item in rows if item.level == "dit"]:
        parts = plots.generation_parts(rows, whole)
        assert sum(parts.values()) == pytest.approx(whole.ms / 1e3)
        assert parts["feed-forward"] == pytest.approx(19 * 2.5)
        sparse = parts.get("attention, sparse evaluations", 0.0)
        assert sparse == pytest.approx(15 * 1.7 if whole.method == "spark" else 0.0)
    other_run = replace(whole, run="r2")
    assert plots.generation_parts(rows, other_run) == {}


def test_a_route_map_shows_what_reblocking_does(tmp_path):
    masks = quality.route_masks(get_problem("tiny"), 1, 0.2, torch.device("cpu"))
    assert list(masks) == ["given order", "reblocked"]
    for mask, recall in masks.values():
        assert mask.shape == (19, 21) and 0 < recall < 1
        # The budget and the two blocks of the context.
        assert bool((mask.sum(1) == 4 + 2).all())
    paths = plots.plot_route("tiny", 1, 0.2, tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg"]


def test_quality_prints_the_calibration(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["--problem", "tiny", "--commit", "abc", "--out", str(out)]
    assert quality.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| mass recall of 10 %, reblocked | 0.8 to 0.83 | 0." in printed
    rows = list(read_rows([out]))
    assert all(item.level == "quality" and item.passed and item.ms is None for item in rows)
    assert {item.method for item in rows} == {"recall", "skipped-mass", "sol", "spark", "sol-int8"}
    assert {item.precision for item in rows} == {"fp32", "int8", "fp8"}
    recalls = {
        item.options["order"]: item.error["mass_recall"]
        for item in rows
        if item.method == "recall" and item.options.get("topk_ratio") == 0.2
    }
    assert 0 < recalls["given"] < recalls["reblocked"] < 1
    gap = next(item for item in rows if item.method == "skipped-mass")
    assert 0 < gap.error["median_nats"] < 10
    table = calibration_table(rows)
    assert table.count("|  |") == 0 and "tiny, 2 heads" in table


def test_a_cpu_evaluates_on_sampled_rows_what_whole_calls_give(tmp_path, capsys, monkeypatch):
    sweeps = (
        (("sol",), {"topk_ratio": [0.1], "tau": [1.0], "tail": [None, "block"]}),
        (("spark",), {"topk_ratio": [0.1], "reweight_components": [None, "bias_only"]}),
        (("spark",), {"topk_ratio": [0.2], "preset": ["fast"]}),
    )
    monkeypatch.setattr(quality, "SWEEPS", sweeps)
    found = []
    for extra in ([], ["--impl", "eager"]):
        out = tmp_path / f"rows{len(found)}.jsonl"
        arguments = ["--problem", "tiny", "--heads", "1", "--commit", "abc", "--out", str(out)]
        assert quality.main([*arguments, "--only", "3", *extra]) == 0
        found.append(list(read_rows([out])))
    assert len(found[0]) == 7
    for one, whole in zip(*found, strict=True):
        assert whole.implementation != one.implementation == sampled.WORDS
        assert one.density == pytest.approx(whole.density, rel=1e-4)
        errors = [item.error["relative_l2"] for item in (one, whole)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-3), one.options
    capsys.readouterr()


def test_a_result_farther_than_nothing_fails_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality, "SWEEPS", ((("sol",), {"topk_ratio": [0.1]}),))
    right = sampled.sampled_sol

    def wrong(*arguments):
        found = right(*arguments)
        return replace(found, rows=-3 * found.rows)

    monkeypatch.setattr(sampled, "sampled_sol", wrong)
    assert quality.main(["--problem", "tiny", "--heads", "1", "--only", "1"]) == 1
    assert "GATE: relative L2" in capsys.readouterr().err


def test_mass_recall_of_everything_is_one():
    from solspark.bench.gate import sample_rows
    from solspark.bench.lists import block_lists, plan_from_lists

    query, key = torch.randn(1, 300, 1, 16), torch.randn(1, 300, 1, 16)
    lists = block_lists("random", 1, 5, 5, 5, torch.device("cpu"))
    plan = plan_from_lists(lists, 300, 300)
    sample = sample_rows(300, 1, torch.device("cpu"))
    assert float(quality.mass_recall(query, key, plan, sample)) == pytest.approx(1.0)


def test_an_unknown_problem_is_refused(capsys):
    assert quality.main(["--problem", "h4"]) == 2
    assert "problem: expected one of" in capsys.readouterr().err
