"""The rooms stand in the order of the import contract (pyproject.toml), without circles and without leftovers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from harness.suite import modules

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("benchmarks", "cases", "harness", "reference", "reports")
#: Under this name the engine side loads itself, by path.
LOADED_AS = "eaglecheck_engine."
TEST = re.compile(r"\.test_(\w+)$")
#: What a person calls by its name.
ENTRIES = {
    "benchmarks.cost",
    "benchmarks.images",
    "benchmarks.indexer",
    "benchmarks.make_real_size",
    "benchmarks.noise",
    "benchmarks.pairs",
    "benchmarks.pipeline",
    "benchmarks.routing",
    "benchmarks.witness",
    "cases.meta.architectures",
    "harness.cli.__main__",
    "harness.installed",
    "harness.suite.modules",
}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Module -> the modules it imports anywhere, for types only too."""
    found = grimp.build_graph(*ROOMS, cache_dir=None)
    return {module: set(found.find_modules_directly_imported_by(module)) for module in found.modules}


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]), pytrace=False)


def test_no_module_is_left_that_no_product_code_imports_or_starts(graph: dict[str, set[str]]) -> None:
    product = {module: imported for module, imported in graph.items() if not _of_tests(module)}
    used = set().union(*product.values()) | ENTRIES | {*_named(tests=False)}
    packages = {module.rpartition(".")[0] for module in graph} | set(ROOMS)
    left = {module for module in product if f"{module.rpartition('.')[2]}.py" not in used}
    found = {module for module in left - used - packages if not module.startswith("cases.")}
    assert sorted(found) == []


def test_no_module_of_cases_is_left_that_nothing_imports(graph: dict[str, set[str]]) -> None:
    used = set().union(*graph.values()) | {*_named(tests=True)} | {module.rpartition(".")[0] for module in graph}
    left = {module for module in graph if module.startswith("cases.") and ".test_" not in module}
    assert sorted(module for module in left - used - ENTRIES if f"{module.rpartition('.')[2]}.py" not in used) == []


def test_a_test_module_is_named_after_the_module_or_the_room_that_it_tests(graph: dict[str, set[str]]) -> None:
    """So that whoever changes harness/checks/accepts.py finds test_accepts*.py or test_checks_*.py at once."""
    known = {module.rpartition(".")[2] for module in graph if not TEST.search(module)}
    names = {module: TEST.search(module)[1].split("_") for module in graph if module.startswith("cases.meta.test_")}
    parts = {module: {"_".join(name[:count]) for count in range(1, len(name) + 1)} for module, name in names.items()}
    assert sorted(module for module, heads in parts.items() if not heads & known) == []


def test_what_several_test_modules_use_is_in_no_test_module(graph: dict[str, set[str]]) -> None:
    assert {module: imported for module, all_ in graph.items() if (imported := {*filter(TEST.search, all_)})} == {}


def _of_tests(module: str) -> bool:
    return module.startswith(("cases.meta", "cases.engine"))


def _named(*, tests: bool) -> Iterator[str]:
    """Modules and files that strings name, and what the engine side imports under the name it loads itself by."""
    for path in (ROOT / "conftest.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))):
        if not tests and (path.parent.name in ("meta", "engine")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LOADED_AS):
                module = (node.module or "").replace(LOADED_AS, "harness.")
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_says_what_it_is_for(room: str) -> None:
    paths = list((ROOT / room).rglob("*.py"))
    silent = [path for path in paths if path.read_text() and not _says(path)]
    assert paths
    assert [path.relative_to(ROOT).as_posix() for path in silent] == []


def _says(path: Path) -> bool:
    return ast.get_docstring(ast.parse(path.read_text())) is not None


def test_the_index_of_modules_is_current() -> None:
    assert modules.PAGE.read_text() == modules.page(), "type  make docs"
