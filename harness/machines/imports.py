"""What a release imports of a package wherever it starts on a card, read from its wheel: it cannot be imported here.

Read are the scheduler, all models and what those import as they are loaded, whatever a condition says; not functions,
nor what an ImportError or SGLang's own question for the package passes over.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

START = ("sglang/srt/managers/scheduler.py", "sglang/srt/models/*.py")
#: A condition with one of these is not met, and a handler of one of these goes on.
PASSED_OVER = ("TYPE_CHECKING", "is_flashinfer_available", "is_blackwell")
HANDLED = ("ImportError", "Exception")


def lacking(wheel: Path, package: str, files: Mapping[str, bytes]) -> list[str]:
    """'module: name' of everything that is imported of the package, and is in none of its files (path -> text)."""
    found: set[str] = set()
    for module, names in _wanted(wheel, package):
        stem = module.replace(".", "/")
        text = files.get(f"{stem}.py") or files.get(f"{stem}/__init__.py")
        bound = set() if text is None else _bound(ast.parse(text))
        found |= {f"{module}: {name}" for name in names if name not in bound and f"{stem}/{name}.py" not in files}
    return sorted(found)


def _wanted(wheel: Path, package: str) -> Iterator[tuple[str, list[str]]]:
    """(module, names of it) of each import of the package."""
    with zipfile.ZipFile(wheel) as archive:
        places = set(archive.namelist())
        todo, seen = [place for place in places if any(fnmatch(place, one) for one in START)], set[str]()
        while todo:
            if (place := todo.pop()) in seen:
                continue
            seen.add(place)
            own = Path(place).with_suffix("").parts
            for module, names in _imports(ast.parse(archive.read(place)).body, own[:-1]):
                if module.partition(".")[0] == package:
                    yield module, names
                for stem in (module.replace(".", "/"), *(f"{module}.{name}".replace(".", "/") for name in names)):
                    todo += [one for one in (f"{stem}.py", f"{stem}/__init__.py") if one in places]


def _imports(body: list[ast.stmt], folder: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """(module, names of it) of each import that is reached when a module of that folder is loaded."""
    for one in body:
        if isinstance(one, ast.Import):
            yield from ((alias.name, []) for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            above = folder[: len(folder) + 1 - one.level] if one.level else ()
            yield ".".join((*above, one.module) if one.module else above), [alias.name for alias in one.names]
        elif isinstance(one, ast.Try):
            caught = [ast.unparse(handler.type) if handler.type else HANDLED[-1] for handler in one.handlers]
            handled = any(word in said for said in caught for word in HANDLED)
            yield from _imports([*([] if handled else one.body), *one.orelse, *one.finalbody], folder)
        elif isinstance(one, ast.If):
            passed = any(word in ast.unparse(one.test) for word in PASSED_OVER)
            yield from _imports([*([] if passed else one.body), *one.orelse], folder)
        elif isinstance(one, ast.With | ast.ClassDef):
            yield from _imports(one.body, folder)


def _bound(module: ast.Module) -> set[str]:
    """Names that a module gives."""
    found = set[str]()
    for one in ast.walk(module):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            found.add(one.name)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in one.names}
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
    return found
