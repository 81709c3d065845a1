"""Who may import whom, where import-linter cannot see: engine files are loaded under another package name."""

import ast
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).resolve().parents[2] / "harness"
ENGINE_PACKAGE = "eaglecheck_engine"
STANDARD = {*sys.stdlib_module_names, "numpy"}
#: room -> the packages and the rooms of ours that its files may use; SGLang's environment need not have others.
MAY_USE = {
    "engine_side": ({*STANDARD, "torch", "safetensors", "sglang", "xgrammar"}, {"engine_side", "both_sides"}),
    "both_sides": (STANDARD, {"both_sides"}),
}
FILES = [(room, path) for room in MAY_USE for path in sorted((HARNESS / room).rglob("*.py"))]


def named(path):
    return path.relative_to(HARNESS).as_posix()


def imports(path):
    """Full names of what a file imports, also inside functions; relative ones as names below `eaglecheck_engine`."""
    own = [ENGINE_PACKAGE, *path.relative_to(HARNESS).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else []
            package = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{package}.{alias.name}" for alias in node.names}
    return found


def used(path):
    """(packages, rooms of harness/) that a file reaches into."""
    parts = [name.split(".") for name in imports(path)]
    rooms = {one[1] for one in parts if one[0] in (ENGINE_PACKAGE, "harness")}
    return {one[0] for one in parts} - {ENGINE_PACKAGE}, rooms


@pytest.mark.parametrize(("room", "path"), FILES, ids=[named(path) for _, path in FILES])
def test_what_runs_in_sglangs_environment_uses_only_what_that_has(room, path):
    packages, rooms = used(path)
    assert (packages - MAY_USE[room][0], rooms - MAY_USE[room][1]) == (set(), set())


def test_no_control_file_imports_an_engine_file():
    control = [path for path in sorted(HARNESS.rglob("*.py")) if named(path).split("/")[0] != "engine_side"]
    engine = ("harness.engine_side", f"{ENGINE_PACKAGE}.engine_side")
    assert [(named(path), name) for path in control for name in imports(path) if name.startswith(engine)] == []


def test_the_engine_side_is_found_at_all():
    assert {"engine_side/host/engine_host.py", "engine_side/probes/probe.py"} <= {named(path) for _, path in FILES}
    assert used(HARNESS / "engine_side" / "host" / "engine_host.py")[1] == {"engine_side", "both_sides"}
