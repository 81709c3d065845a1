"""The part of some Python modules that the names asked for need, as source text. Nothing is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIX = "repro_"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """lines: of its source. defined: name → the top-level statement. imports: statements but `from __future__`."""

    lines: list[str]
    docstring: ast.stmt
    defined: dict[str, ast.stmt]
    imports: list[ast.Import | ast.ImportFrom]


def reachable(sources: Mapping[str, str], roots: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Name → source, cut down to the definitions that roots reach; modules of which nothing is left are left out.

    sources: modules that import one another as `repro_NAME`. roots: (module, a name that it defines).
    """
    modules = {name: _read(text) for name, text in sources.items()}
    kept: set[tuple[str, str]] = set()
    asked = list(roots)
    while asked:
        module, name = asked.pop()
        if (module, name) not in kept and name in modules[module].defined:
            kept.add((module, name))
            asked += _uses(modules, module, modules[module].defined[name])
    left = {name: {one for module, one in kept if module == name} for name in modules}
    return {name: _text(modules[name], names) for name, names in left.items() if names}


def _read(source: str) -> _Module:
    docstring, *rest = ast.parse(source).body
    defined: dict[str, ast.stmt] = {}
    for node in rest:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        for target in [one for each in targets for one in getattr(each, "elts", [each])]:
            if name := getattr(target, "id", None) or getattr(target, "name", None):
                defined[name] = node
    return _Module(
        lines=source.splitlines(),
        docstring=docstring,
        defined=defined,
        imports=[
            node
            for node in rest
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__")
        ],
    )


def _uses(modules: Mapping[str, _Module], module: str, statement: ast.stmt) -> list[tuple[str, str]]:
    """What a statement names: of its own module, or of one that is imported there."""
    ours = [node for node in modules[module].imports if _home(node)]
    whole = {alias.asname or alias.name: _home(node) for node in ours for alias in node.names if _is_whole(node)}
    single = {alias.asname or alias.name: (_home(node), alias.name) for node in ours for alias in node.names}
    found = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
            found.append((whole[node.value.id], node.attr))
        elif isinstance(node, ast.Name) and node.id not in whole:
            found.append(single.get(node.id, (module, node.id)))
    return found


def _is_whole(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.Import)


def _home(node: ast.Import | ast.ImportFrom) -> str:
    """The module of ours that is imported, else empty."""
    name = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def _text(module: _Module, names: set[str]) -> str:
    """Docstring, the imports that are used, and the statements that define one of `names`, in their order."""
    statements = sorted({module.defined[name] for name in names}, key=lambda node: node.lineno)
    used = {node.id for each in statements for node in ast.walk(each) if isinstance(node, ast.Name)}
    imports = []
    for node in module.imports:
        if aliases := [alias for alias in node.names if (alias.asname or alias.name) in used]:
            node.names = aliases
            imports.append(ast.unparse(node))
    parts = ["\n".join(module.lines[: module.docstring.end_lineno]), "from __future__ import annotations"]
    return "\n\n".join([*parts, "\n".join(imports), *(_with_comment(module, each) for each in statements)]) + "\n"


def _with_comment(module: _Module, node: ast.stmt) -> str:
    first = min((node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))))
    while module.lines[first - 2].startswith("#"):
        first -= 1
    space = "\n" if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
    return space + "\n".join(module.lines[first - 1 : node.end_lineno])
