"""Who may import whom, where import-linter cannot see: engine files are loaded under another package name."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).resolve().parents[2] / "harness"
ENGINE_PACKAGE = "eaglecheck_engine"
MAY_USE = {*sys.stdlib_module_names, "torch", "numpy", "sglang", ENGINE_PACKAGE}
BOTH_SIDES = {
    "smi",
    "plugin_algorithm",
    "packed",
    "wire",
    "compat",
    "faults",
    "gpus",
    "lease_files",
    "leases",
}  # data and framing: standard library and NumPy only


def imports(path: Path) -> list[tuple[str, str]]:
    """(package, first name below it) of every import, also those inside functions; '.' for a relative one."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            found += [(part[0], part[1] if len(part) > 1 else "") for part in parts]
        elif isinstance(node, ast.ImportFrom):
            package, _, below = (node.module or "").partition(".")
            names = [below.split(".")[0]] if below else [alias.name for alias in node.names]
            if node.level:
                found += [(".", package or name) for name in names]
            else:
                found += [(package, name) for name in names]
    return found


def engine_files() -> dict[str, Path]:
    """engine_host and everything it reaches through the engine's package."""
    reached: dict[str, Path] = {}
    waiting = [HARNESS / "engine_host.py"]
    while waiting:
        path = waiting.pop()
        if path.stem in reached or not path.exists():
            continue
        reached[path.stem] = path
        waiting += [HARNESS / f"{name}.py" for package, name in imports(path) if package in (".", ENGINE_PACKAGE)]
    return reached


@pytest.mark.parametrize("name", sorted(engine_files()))
def test_an_engine_file_uses_only_what_the_engine_environment_has(name: str) -> None:
    foreign = sorted({package for package, _ in imports(engine_files()[name])} - MAY_USE - {"."})
    assert foreign == [], f"harness/{name}.py runs inside SGLang's environment, which need not have {foreign}"


def test_no_control_file_imports_an_engine_file() -> None:
    engine = set(engine_files())
    control = [path for path in sorted(HARNESS.rglob("*.py")) if path.stem not in engine or path.parent != HARNESS]
    crossing = [
        f"{path.relative_to(HARNESS)} imports harness.{name}"
        for path in control
        for package, name in imports(path)
        if package == "harness" and name in engine - BOTH_SIDES
    ]
    assert crossing == []


@pytest.mark.parametrize("name", sorted(BOTH_SIDES))
def test_what_both_sides_use_needs_neither_torch_nor_sglang(name: str) -> None:
    heavy = {package for package, _ in imports(HARNESS / f"{name}.py")} & {"torch", "sglang"}
    assert heavy == set()


def test_the_engine_side_is_found_at_all() -> None:
    assert {"engine_host", "probe", "wire", "compat"} <= set(engine_files())
