"""README keeps its word: its Python runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def block_with(text: str) -> str:
    (found,) = [block for block in blocks("python") if text in block]
    return found


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1152, 2, 128, generator=generator) for _ in range(3))
    return {"q": q, "k": k, "v": v, "T": 1152}


def test_the_line_for_hosts_runs(capsys):
    names = tensors()
    exec(block_with("sol_attn(q, k, v"), names)
    assert names["out"].shape == names["q"].shape
    assert "sol_attn" in capsys.readouterr().out


def test_the_lines_for_researchers_run():
    names = tensors()
    mask = torch.eye(18, dtype=torch.bool).expand(1, 2, 18, 18).clone()
    anchors = names["q"].mean(1, keepdim=True)
    names.update(grid=(8, 12, 12), mask=mask, anchors=anchors)
    exec(block_with("spark_reblock"), names)
    assert names["out"].shape == names["q"].shape
    assert names["lse"].shape == (1, 1152, 2)
    assert names["order"].permutation.shape == (1, 2, 1152)


def test_the_lines_for_film_makers_run():
    pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
    from solspark.integrations.tiny_h3 import build_tiny_h3_transformer

    class Pipe:
        """Stands for a loaded pipeline: a real transformer, and a call that does nothing."""

        transformer = build_tiny_h3_transformer(layers=2)

        def __call__(self, **options: Any) -> str:
            attention = self.transformer.transformer_blocks[0].attn
            assert type(attention.get_processor()).__module__.startswith("solspark.")
            assert options["num_inference_steps"] == 20
            return "video"

    pipe = Pipe()
    before = [block.attn.get_processor() for block in pipe.transformer.transformer_blocks]
    exec(block_with("install_h3_spark_attn"), {"pipe": pipe})
    after = [block.attn.get_processor() for block in pipe.transformer.transformer_blocks]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_the_lines_for_other_models_run(capsys):
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    class Pipe:
        """Stands for a loaded pipeline: one attention call in its transformer."""

        transformer = Attention()

        def __call__(self, **options: Any) -> torch.Tensor:
            return self.transformer(torch.randn(1, 2, 200, 64))

    before = torch.nn.functional.scaled_dot_product_attention
    exec(block_with("solspark.router"), {"pipe": Pipe()})
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert capsys.readouterr().out.startswith("{")


def test_links_lead_to_files():
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def known_options(command: Any, words: list[str]) -> set[str]:
    """Return the options of a command; the harness of `bench` has a parser of its own."""
    if command.name in ("bench", "quality"):
        words = words if command.name == "bench" else ["quality", *words]
        return set(re.findall(r"--[a-z][a-z0-9-]*", harness_help(words)))
    return {name for parameter in command.params for name in parameter.opts}


def harness_help(words: list[str]) -> str:
    from solspark.bench import runner

    text = io.StringIO()
    subcommand = [word for word in words[:1] if word in runner.SUBCOMMANDS]
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        runner.main([*subcommand, "--help"], program="solspark bench")
    return text.getvalue()


def test_commands_and_their_options_exist():
    pytest.importorskip("typer", reason="the cli extra is not installed")
    from typer.main import get_command

    from solspark import cli

    command: Any = get_command(cli.app)
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    lines += re.findall(r"`(solspark [^`]+)`", README)
    calls = [shlex.split(line, comments=True) for line in lines if line.startswith("solspark ")]
    assert any(words[1] == "generate" for words in calls)
    for words in calls:
        options = known_options(command.commands[words[1]], words[2:])
        for word in words[2:]:
            if word.startswith("--") and word != "--help":
                assert word in options, f"solspark {words[1]} has no {word}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", "\n".join(blocks("bash")))):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
