"""README and docs/measured.md say what the recorded rows say, by commands that exist."""

from __future__ import annotations

import re
import shlex
from itertools import groupby
from pathlib import Path

import pytest

from solspark.bench import plots, quality, report, router_bench, settings
from solspark.bench.case import METHODS
from solspark.bench.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
MEASURED = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
ROWS = list(read_rows(sorted((ROOT / "benchmarks").glob("*.jsonl"))))
RUNS = [list(rows) for _, rows in groupby(ROWS, key=lambda row: (row.run, row.commit))]
PARSERS = {
    "plots": plots.parser,
    "quality": quality.parser,
    "report": report.parser,
    "router": router_bench.parser,
}

settings.load_cases()


def documented() -> list[str]:
    """Return the commands of the list at the end of docs/measured.md."""
    listed = MEASURED.partition("\n## The commands\n")[2]
    return [
        cells[1].strip(" `")
        for line in listed.splitlines()
        if (cells := line.strip("|").split("|"))[1:] and "`" in cells[1]
    ]


def parsed(words: list[str]):
    """Return the settings of `solspark bench WORDS`, None for its subcommands; exits if wrong."""
    if words[:1] and words[0] in PARSERS:
        PARSERS[words[0]]("x").parse_args(words[1:])
        return None
    return settings.settings_from(settings.parser("x").parse_args(words))


def test_the_documents_are_what_the_rows_say(capsys):
    documents = [str(ROOT / "docs/measured.md"), str(ROOT / "README.md")]
    rows = str(ROOT / "benchmarks")
    changed = report.main(["--check", "--rows", rows, "--into", *documents])
    assert changed == 0, f"run `solspark bench report`: {capsys.readouterr().out}"
    for document in documents:
        text = Path(document).read_text(encoding="utf-8")
        assert text.count("<!-- bench:") == text.count("<!-- /bench -->") > 0, document


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_is_one_that_exists(command):
    words = shlex.split(command)
    if "python" in words:
        words = words[words.index("python") + 1 :]
    if words[0].startswith("benchmarks/"):
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        for flag in [word for word in words[1:] if word.startswith("--")]:
            assert f'"{flag}"' in source, f"{words[0]} has no {flag}"
        return
    if words[:2] == ["solspark", "quality"]:
        words = ["solspark", "bench", *words[1:]]
    assert words[:2] in (["solspark", "bench"], ["-m", "solspark.bench"])
    wanted = parsed(words[2:])
    if wanted is None:
        return
    for level in wanted.levels:
        cases = [
            options
            for method in settings.selected(level, wanted)
            for options in settings.expand(method, wanted)
        ]
        assert cases, f"nothing to measure at {level}"
    for name in wanted.methods:
        assert any((level, name) in METHODS for level in wanted.levels), name


def test_commands_are_documented():
    levels = {
        level
        for command in documented()
        for level in re.findall(r"--level ([a-z,]+)", command)
        for level in level.split(",")
    }
    # Quality has a command of its own.
    assert levels == set(settings.LEVELS) - {"quality"}
    assert any(command.startswith("solspark quality") for command in documented())


@pytest.mark.parametrize("rows", RUNS, ids=lambda rows: rows[0].run)
def test_the_command_of_recorded_rows_takes_them_again(rows):
    words = shlex.split(report.command(rows))
    assert words[:2] == ["solspark", "bench"]
    wanted = parsed(words[2:])
    if wanted is None:
        return
    for row in rows:
        if row.level in ("step", "part"):
            continue
        cases = list(settings.expand(METHODS[row.level, row.method], wanted))
        assert row.problem in [problem.name for problem in wanted.problems]
        assert row.options in cases, f"{row.method} {row.options}"
