"""What an exported file brings along: our modules as source text, cut down to what it needs, and what a CPU lacks.

Sources of the engine side are read, never imported. It must not know what a finding is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.both_sides import compat

#: Of the names of modules in an exported file.
PREFIX = "repro_"
ENGINE_SIDE = Path(__file__).parents[1] / "engine_side"
KERNELS = ENGINE_SIDE / "replacement_kernels"
OF_PATCHES = tuple(sorted(file.stem for file in KERNELS.glob("patches_*.py")))
#: Patches that are left out: attention runs as SGLang's own interpreted kernel; the others are of models and requests
#: that an exported file has not. And those that only a batch that samples needs.
LEFT_OUT, SAMPLED = ("attention", "config_dtype", "token_mask"), ("sampling", "sampled_path", "murmur")
#: Asked for by whoever asks for determinism.
EVERYWHERE = (("sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"),)

_CPU = '''"""What has no CPU build: each kernel or patch changes one module of SGLang, once that is imported."""

from __future__ import annotations

from typing import Any, Callable

{imports}

KERNELS: dict[str, dict[str, Callable[..., Any]]] = {{{kernels}}}


def patch(module: Any, what: str, argument: str) -> None:
    for name, kernel in KERNELS.get(what, {{}}).items():
        setattr(module, name, kernel)
    if what not in KERNELS:
        PATCHES[what](module, argument, lambda *_what: None)
'''


def row_of(boot: Mapping[str, Any]) -> compat.Release:
    """The hook table of the release that boots."""
    row = compat.lookup(str(boot["release"]), overlap=bool(boot["overlap"]))
    return compat.multi_layer(row) if boot["layered"] else row


def rows(boot: Mapping[str, Any], *, sampled: bool, recurrent: bool) -> list[dict[str, Any]]:
    """For each range of releases from its first on: where requests are taken, and what a CPU needs; oldest first.

    sampled: some request draws its tokens. recurrent: the target keeps recurrent states.
    """
    found = []
    for row in reversed(compat.RELEASES):
        if row.overlap not in (None, boot["overlap"]) or (boot["layered"] and row.generation == "v1"):
            continue
        whole = compat.multi_layer(row) if boot["layered"] else row
        patches = _patches(boot, whole, sampled, recurrent) if boot["device"] == "cpu" else []
        found.append({"first": compat.parse(row.first), "gate": row.gate, "patches": patches})
    return found


def _patches(boot: Mapping[str, Any], row: compat.Release, sampled: bool, recurrent: bool) -> list[compat.Patch]:
    ranks = row.dp_patches if boot["arguments"]["enable_dp_attention"] else ()
    overlap = compat.PATCHES["overlap"] if boot["overlap"] else ()
    left_out = (*LEFT_OUT, *(() if sampled else SAMPLED))
    of_others = () if recurrent else (*compat.PATCHES["recurrent"], *compat.PATCHES["kept_states"])
    asked = (*EVERYWHERE, *row.patches, *ranks, *overlap)
    return [patch for patch in asked if patch[1] not in left_out and patch not in of_others]


def cpu_modules(patches: Iterable[compat.Patch]) -> dict[str, str]:
    """Module name -> source, in the order of need: kernels in plain torch, patches, and `cpu`, which puts them in."""
    whats = sorted({what for _, what, _ in patches})
    nodes = ast.parse((KERNELS / "cpu_ops.py").read_text(encoding="utf-8")).body
    kernels, homes = _kernels(nodes), _homes(nodes)
    needed = {what: kernels[what] for what in whats if what in kernels}
    names = sorted({name for table in needed.values() for name in table.values()})
    sources = _beside(*sorted({homes[name] for name in names}), "cpu_experts", "patches", *OF_PATCHES)
    defined = {one: re.findall(r"^def (\w+)\(", text, re.MULTILINE) for one, text in sources.items()}
    roots = [(homes[name], name) for name in names] + [("patches", "PATCHES")]
    roots += [(one, what) for one, its in defined.items() for what in whats if one in OF_PATCHES and what in its]
    modules = reachable(sources, roots)
    imports = [f"from {PREFIX}{homes[name]} import {name}" for name in names]
    imports.append(f"from {PREFIX}patches import PATCHES")
    imports += [f"import {PREFIX}{one}" for one in OF_PATCHES if one in modules]
    return modules | {
        "cpu": _CPU.format(
            imports="\n".join(imports),
            kernels=", ".join(f"{what!r}: {_table(table)}" for what, table in needed.items()),
        )
    }


def stub_packages() -> str:
    """The source of stubs for what SGLang imports and does not use."""
    return _source(KERNELS / "stub_packages.py")


def moved_modules() -> dict[str, str]:
    """What carries a hand-over, in the order of need."""
    return {name: _source(ENGINE_SIDE / "transfer_backend" / f"{name}.py") for name in ("files", "classes")}


def _beside(*names: str) -> dict[str, str]:
    return {name: _source(KERNELS / f"{name}.py") for name in names}


def _source(file: Path) -> str:
    """Its text, importing what stands beside it from a file's own modules."""
    text = re.sub(r"^from \.(\w+) import", rf"from {PREFIX}\1 import", file.read_text(encoding="utf-8"), flags=re.M)
    return re.sub(r"^from \. import (\w+)$", rf"import {PREFIX}\1 as \1", text, flags=re.M)


def _table(table: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name!r}: {kernel}" for name, kernel in table.items()) + "}"


def _kernels(nodes: Sequence[ast.stmt]) -> dict[str, dict[str, str]]:
    """Patch -> the name in SGLang -> our function, as `cpu_ops.KERNELS` says."""
    (table,) = (node.value for node in nodes if isinstance(node, ast.AnnAssign) and _is(node.target, "KERNELS"))
    assert isinstance(table, ast.Dict)
    return {
        ast.literal_eval(what): {ast.literal_eval(row.elts[0]): row.elts[1].id for row in rows.elts}  # type: ignore
        for what, rows in zip(table.keys, table.values, strict=True)
    }


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _homes(nodes: Sequence[ast.stmt]) -> dict[str, str]:
    """Function -> the module beside that has it."""
    return {
        name.name: str(node.module)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for name in node.names
    }


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
