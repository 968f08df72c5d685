"""Hold what an import costs: fresh processes, because an import cannot be undone in this one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

HEAVY = (
    "triton",
    "diffusers",
    "transformers",
    "accelerate",
    "typer",
    "rich",
    "PIL",
    "imageio",
    "imageio_ffmpeg",
    "matplotlib",
)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240
    )


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh process holds after a statement."""
    done = run_python(
        f"""
        import json, sys
        {statement}
        print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
        """
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def torch_alone() -> set[str]:
    return modules_after("import torch")


@pytest.mark.parametrize("package", ["solspark", "sol_attn", "h3_sparse_attention"])
def test_import_loads_torch_and_nothing_heavy(package: str, torch_alone: set[str]):
    loaded = modules_after(f"import {package}")
    # Whatever torch itself pulls in (numpy, where it is installed) is torch's affair.
    added = loaded - torch_alone
    assert not added & set(HEAVY), f"import {package} loaded {sorted(added & set(HEAVY))}"
    assert "numpy" not in added


def blocking(names: tuple[str, ...]) -> str:
    """Return source that makes the import of some packages fail as if they were not installed."""
    return textwrap.dedent(
        f"""
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {names!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Absent())
        """
    )


def test_public_packages_import_with_torch_alone():
    done = run_python(
        blocking(HEAVY)
        + "import sol_attn, h3_sparse_attention, solspark\n"
        + "print(callable(solspark.sol_attn), callable(sol_attn.sol_attn))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("installer", ["install_h3_sol_attn", "install_h3_spark_attn"])
def test_an_installer_without_diffusers_says_what_to_install(installer: str):
    done = run_python(
        blocking(("diffusers", "transformers", "accelerate"))
        + "import torch, h3_sparse_attention\n"
        + "from solspark.errors import MissingDependencyError\n"
        + "model = torch.nn.Module()\n"
        + "model.transformer_blocks = torch.nn.ModuleList()\n"
        + "try:\n"
        + f"    with h3_sparse_attention.{installer}(model, num_denoise_steps=4):\n"
        + "        pass\n"
        + "except MissingDependencyError as error:\n"
        + "    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert 'pip install "solspark[diffusers]"' in done.stdout


def test_the_command_without_its_extras_says_what_to_install():
    done = run_python(blocking(("typer", "rich")) + "from solspark.cli import main\n" + "main()\n")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        'solspark: the command line needs typer and rich: pip install "solspark[cli]"'
    ]
