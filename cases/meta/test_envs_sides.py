"""Who may import whom, where import-linter cannot see: engine files are loaded under another package name."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).resolve().parents[2] / "harness"
ENGINE_PACKAGE = "eaglecheck_engine"
ENGINE_SIDE, BOTH_SIDES = "engine_side", "both_sides"
STANDARD = {*sys.stdlib_module_names, "numpy"}
MAY_USE = {*STANDARD, "torch", "sglang"}


def files(room: str) -> list[Path]:
    return sorted((HARNESS / room).rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(HARNESS).as_posix()


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, also inside functions; relative ones as names below `eaglecheck_engine`."""
    own = [ENGINE_PACKAGE, *path.relative_to(HARNESS).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else []
            package = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{package}.{alias.name}" for alias in node.names}
    return found


def rooms_of_ours(path: Path) -> set[str]:
    """The rooms of harness/ that an engine file reaches into."""
    return {name.split(".")[1] for name in imports(path) if name.split(".")[0] in (ENGINE_PACKAGE, "harness")}


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {ENGINE_PACKAGE}


@pytest.mark.parametrize("path", files(ENGINE_SIDE), ids=named)
def test_an_engine_file_uses_only_what_the_engine_environment_has(path: Path) -> None:
    foreign = sorted(packages(path) - MAY_USE)
    assert foreign == [], f"{named(path)} runs inside SGLang's environment, which need not have {foreign}"


@pytest.mark.parametrize("path", files(ENGINE_SIDE), ids=named)
def test_an_engine_file_reaches_into_no_room_but_its_own_and_that_of_both_sides(path: Path) -> None:
    assert rooms_of_ours(path) - {ENGINE_SIDE, BOTH_SIDES} == set()


@pytest.mark.parametrize("path", files(BOTH_SIDES), ids=named)
def test_what_both_sides_use_needs_the_standard_library_and_numpy_alone(path: Path) -> None:
    assert packages(path) - STANDARD == set()
    assert rooms_of_ours(path) - {BOTH_SIDES} == set()


def test_no_control_file_imports_an_engine_file() -> None:
    control = [path for path in sorted(HARNESS.rglob("*.py")) if named(path).split("/")[0] != ENGINE_SIDE]
    crossing = [
        f"{named(path)} imports {name}"
        for path in control
        for name in imports(path)
        if name.startswith((f"harness.{ENGINE_SIDE}", f"{ENGINE_PACKAGE}.{ENGINE_SIDE}"))
    ]
    assert crossing == []


def test_the_engine_side_is_found_at_all() -> None:
    assert {"host/engine_host.py", "probes/probe.py"} <= {named(path).partition("/")[2] for path in files(ENGINE_SIDE)}
    host = rooms_of_ours(HARNESS / ENGINE_SIDE / "host" / "engine_host.py")
    assert host == {ENGINE_SIDE, BOTH_SIDES}
