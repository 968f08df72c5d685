"""Hold the import arrows of docs/design.md: who may import whom, read from the source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SRC / "solspark"

# An area may import areas of a lower rank and its own. The package's own __init__ ("solspark")
# offers public names of all up to the router, so it stands between router and integrations.
RANK = {
    "errors": 0,
    "types": 1,
    "_checks": 2,
    "reference": 3,
    "kernels": 3,
    "ops": 4,
    "plan": 5,
    "methods": 6,
    "router": 7,
    "int8": 7,
    "diagnose": 8,
    "solspark": 9,
    "integrations": 10,
    "bench": 11,
    "testing": 12,
    "cli": 13,
    "__main__": 14,
}
ONLY_THE_CLI_IMPORTS = {"testing", "bench"}
COMPATIBLE_PACKAGES = ("sol_attn", "h3_sparse_attention")


def module_name(path: Path, root: Path = SRC) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield every absolute dotted name that a module's source imports, also inside functions."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")
                parent = parent[: len(parent) - (node.level - 1)]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                yield f"{base}.{alias.name}"


def area_of(module: str) -> str | None:
    """Return the area of a dotted name inside solspark, or None for another package."""
    parts = module.split(".")
    if parts[0] != "solspark":
        return None
    if len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()):
        return parts[1]
    return "solspark"


def areas_imported_by(path: Path) -> set[str]:
    module = module_name(path)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = imported_modules(tree, module, path.name == "__init__.py")
    return {area for area in map(area_of, names) if area is not None}


def sources(package: str) -> list[Path]:
    return sorted((SRC / package).rglob("*.py"))


def forbidden(area: str, imported: set[str]) -> list[str]:
    """Return what an area imports against the arrows, as sentences."""
    problems = []
    for other in sorted(imported - {area}):
        if RANK[other] >= RANK[area]:
            problems.append(f"{area} may not import {other}")
        if other in ONLY_THE_CLI_IMPORTS and area not in ONLY_THE_CLI_IMPORTS | {"cli"}:
            problems.append(f"only the cli and tests import {other}, not {area}")
    if {"reference", "kernels"} <= imported and area != "ops":
        problems.append(f"reference and kernels meet in {area}: only ops may import both")
    return problems


def test_every_area_has_a_place():
    areas = {area_of(module_name(path)) for path in sources("solspark")}
    assert areas <= set(RANK), f"give these areas a rank here and in design.md: {areas - set(RANK)}"


@pytest.mark.parametrize("path", sources("solspark"), ids=lambda path: module_name(path))
def test_imports_follow_the_arrows(path: Path):
    area = area_of(module_name(path))
    assert area is not None
    assert forbidden(area, areas_imported_by(path)) == []


@pytest.mark.parametrize("package", COMPATIBLE_PACKAGES)
def test_compatible_packages_define_nothing(package: str):
    for path in sources(package):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        defined = [
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            # A module's own __getattr__ is how it re-exports without importing at once.
            and node.name not in ("__getattr__", "__dir__")
        ]
        assert defined == [], f"{module_name(path)} re-exports only, it defines {defined}"
        areas = areas_imported_by(path)
        assert not areas & (ONLY_THE_CLI_IMPORTS | {"cli"}), f"{module_name(path)} imports {areas}"


def test_solspark_never_imports_the_compatible_packages():
    for path in sources("solspark"):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        names = imported_modules(tree, module_name(path), path.name == "__init__.py")
        tops = {name.split(".")[0] for name in names}
        assert not tops & set(COMPATIBLE_PACKAGES), module_name(path)


@pytest.mark.parametrize(
    ("module", "is_package", "source", "area", "problem"),
    [
        ("solspark.reference.pool", False, "from ..kernels import pool", "reference", "kernels"),
        ("solspark.ops.pool", False, "from ..plan.select import x", "ops", "plan"),
        ("solspark.plan", True, "def f():\n    from ..methods import sol", "plan", "methods"),
        ("solspark.methods.sol", False, "import solspark.bench.timing", "methods", "bench"),
        ("solspark.ops", True, "from solspark import sol_attn", "ops", "solspark"),
        (
            "solspark.bench.run",
            False,
            "from ..reference import a\nfrom ..kernels import b",
            "bench",
            "meet",
        ),
    ],
)
def test_a_wrong_import_is_found(module, is_package, source, area, problem):
    imported = {
        found
        for found in map(area_of, imported_modules(ast.parse(source), module, is_package))
        if found is not None
    }
    assert any(problem in sentence for sentence in forbidden(area, imported))


def test_ops_may_import_both_sides():
    lines = ("from ..reference import a", "from ..kernels import b", "from ..types import BLOCK")
    source = "\n".join(lines)
    imported = {
        found
        for found in map(area_of, imported_modules(ast.parse(source), "solspark.ops.pool", False))
        if found is not None
    }
    assert imported == {"reference", "kernels", "types"}
    assert forbidden("ops", imported) == []
