"""How kernels are tested without a GPU: compiled for every target, and run in the interpreter.

Both cannot happen in one process: with TRITON_INTERPRET=1 triton's own functions are interpreted
too. So a test file marks what needs the interpreter with `interpreted`, and runs itself once more
with that variable set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
    "gfx1201": ("hip", "gfx1201", 32),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs in triton's interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if ("interpreted" in item.keywords) != INTERPRETING:
            reason = "runs in the interpreter only" if not INTERPRETING else "not interpreted"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def interpret() -> Callable[[str], None]:
    """Return a function that runs a file's `interpreted` tests in the interpreter."""

    def run(path: str) -> None:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "interpreted", path],
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]

    return run


@pytest.fixture(params=list(TARGETS))
def compile_ahead(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Callable:
    """Return a function that compiles a kernel for one target; the test runs for each of them."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    backend, arch, warp_size = TARGETS[request.param]

    def compile_kernel(
        kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], **options: Any
    ) -> Any:
        """Compile with pointers and 64-bit strides aligned to 16, as every real call has them."""
        signature = {
            name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
        }
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, kind in enumerate(signature.values())
            if kind.startswith("*") or kind == "i64"
        }
        source = triton.compiler.ASTSource(kernel, signature, dict(constants), aligned)
        return triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)

    return compile_kernel
