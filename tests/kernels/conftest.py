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
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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

SHARED_KIB = {
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99),
    "sm_80": 163,
    **dict.fromkeys(("sm_90", "sm_100"), 227),
    **dict.fromkeys(("gfx942", "gfx1100", "gfx1201"), 64),
}
"""What one program may have of a target's shared memory."""


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


@dataclass(frozen=True)
class Launch:
    """A kernel as a launcher would have it compiled: `key` tells variants apart."""

    kernel: Any
    key: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


@pytest.fixture
def record_launches(monkeypatch) -> Callable[[Callable[[], object]], list[Launch]]:
    """Return a function that runs a launcher on CPU tensors and returns its launches.

    Nothing is compiled and nothing runs: tensors have the types, strides and alignment of a real
    call, so the launches are those of a device of compute capability 9.0.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    recorded: list[Launch] = []
    device = "recorder"
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: device,
        get_current_stream=lambda _: 0,
    )

    def record(kernel, key, signature, _, constants, options, attributes, warmup):
        chosen = {name: getattr(options, name) for name in ("num_warps", "num_stages")}
        recorded.append(Launch(kernel, key, signature, constants, attributes, chosen))

    def run(launcher: Callable[[], object]) -> list[Launch]:
        recorded.clear()
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
            patch.setattr(triton.runtime.driver, "_active", driver)
            patch.setattr(JITFunction, "_do_compile", record)
            launcher()
        for launch in recorded:
            launch.kernel.device_caches.pop(device, None)
        return list(recorded)

    return run


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> str:
    """Run the test once for each target."""
    return request.param


@pytest.fixture
def compile_launch(tmp_path: Path, monkeypatch) -> Callable[..., Any]:
    """Return a function that compiles a recorded launch for a target and checks that it fits."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")

    def compile_for(launch: Launch, target: str, **options: Any) -> Any:
        source = launch.kernel.ASTSource(
            launch.kernel, dict(launch.signature), dict(launch.constants), dict(launch.attributes)
        )
        chosen = {**launch.options, **options}
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=chosen)
        assert compiled.metadata.shared <= SHARED_KIB[target] * 1024
        return compiled

    return compile_for
