from __future__ import annotations

import pytest
import torch

from solspark.bench import plots, quality
from solspark.bench.problems import get_problem
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
        row("dit", "dense-cudnn", 373_000.0, 73_584),
        row("step", "dense-cudnn", 19_600.0, 73_584, evaluation="dense"),
        row("step", "no-attention", 4_980.0, 73_584, evaluation="no attention core"),
        row("dit", "spark", 190_000.0, 73_584, topk_ratio=0.1),
        row("step", "spark", 7_400.0, 73_584, topk_ratio=0.1, evaluation="sparse"),
    ]
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
    before = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert plots.main(arguments) == 0
    assert {path.name: path.read_bytes() for path in folder.glob("*.png")} == before
    capsys.readouterr()


def test_without_rows_nothing_is_drawn(tmp_path):
    empty = tmp_path / "rows.jsonl"
    empty.write_text("\n")
    assert plots.main(["--rows", str(empty), "--out", str(tmp_path / "figures")]) == 0
    assert not (tmp_path / "figures").exists()


def test_the_shares_of_a_generation_add_up_to_its_time(recorded, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, folder, name: drawn.append(figure) or [])
    plots.plot_shares(list(read_rows([recorded])), tmp_path)
    axes = drawn[0].axes[0]
    ends = {round(bar.get_x() + bar.get_width(), 3) for bar in axes.patches}
    assert {373.0, 190.0} <= ends


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
    arguments = ["--problem", "tiny", "--only", "4", "--commit", "abc", "--out", str(out)]
    assert quality.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| mass recall of 10 %, reblocked | 0.8 to 0.83 | 0." in printed
    rows = list(read_rows([out]))
    assert all(item.level == "quality" and item.passed and item.ms is None for item in rows)
    recalls = {
        item.options["order"]: item.error["mass_recall"]
        for item in rows
        if item.method == "recall" and item.options.get("topk_ratio") == 0.2
    }
    assert 0 < recalls["given"] < recalls["reblocked"] < 1
    gap = next(item for item in rows if item.method == "skipped-mass")
    assert 0 < gap.error["median_nats"] < 10
    table = quality.calibration_table(rows)
    assert table.count("|  |") == 0 and "tiny, 2 heads" in table


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
