"""Crash attribution: whether SGLang, one of our hooks, or a machine that lacks a kernel made a batch fail.

Engine side: standard library only. It must not know what was being looked at.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TypeGuard

HARNESS = Path(__file__).resolve().parents[2]
#: Our folders and files that do SGLang's work or change it: what fails in a replacement kernel, a mutant or a transfer
#: may be its doing. All others only look on.
AT_WORK = ("replacement_kernels", "transfer_backend", "mutants", "plugin_algorithm")
#: What compiles kernels at their first use: Python files, by how their paths end or what they lie in.
BUILDERS = ("/torch/utils/cpp_extension.py", "/tvm_ffi/cpp/", "/triton/runtime/build.py", "/flashinfer/jit/")
#: Words of a compiler that is called by no Python: DeepGEMM's.
BUILDER_WORDS = ("deep_jit", "NVCC compil")


def watcher(error: BaseException) -> str | None:
    """The file that only looks on from which the error comes; None if it comes from SGLang or what stands in for it.

    Its own, if it is the innermost frame outside the libraries: what it calls of SGLang has frames of its own. SGLang
    may have made another error of ours. A device reports an error late, to the next caller. What `unmade` knows is
    SGLang's, whoever looked at it first.
    """
    return next((found for one in _chain(error) if (found := _watcher(one)) is not None), None)


def not_imported(error: BaseException) -> str:
    """The name that SGLang's file imports under a condition, on other devices, and uses here all the same; or ''.

    What SGLang then does to clean up may fail as well, and be the error that is told.
    """
    return next(filter(None, map(_not_imported, _chain(error))), "")


def not_built(error: BaseException) -> str:
    """What whoever compiles a kernel at its first use says where it cannot: no compiler, or no headers; or ''."""
    return next((f"{type(one).__name__}: {one}".splitlines()[0] for one in _chain(error) if _building(one)), "")


def unmade(error: BaseException) -> str:
    """The attribute that an object of SGLang's lacks though its own class counts on it, and whose method does; or ''.

    A method reads it of itself, and none but the constructor sets it, or asks whether it is there: so no release that
    calls it otherwise, and none that sets it later. By the class as its file has it.
    """
    if not isinstance(error, AttributeError) or not type(error.obj).__module__.startswith("sglang."):
        return ""
    try:
        classes = [ast.parse(textwrap.dedent(inspect.getsource(one))).body[0] for one in _own_classes(error.obj)]
    except (OSError, TypeError):  # made without a file
        return ""
    nodes = [node for one in classes for node in ast.walk(one)]
    if any(_asks_for(node, str(error.name)) for node in nodes):
        return ""
    methods = [one for one in nodes if isinstance(one, ast.FunctionDef)]
    uses = [(one.name, type(node.ctx)) for one in methods for node in ast.walk(one) if _of_self(node, str(error.name))]
    if any(use is not ast.Load and method != "__init__" for method, use in uses):
        return ""
    owner = type(error.obj).__name__
    return next((f"{owner}.{error.name}, which {owner}.{method} reads" for method, use in uses if use is ast.Load), "")


def _own_classes(held: object) -> list[type]:
    """Its class and those that it inherits from, as far as they are SGLang's."""
    return [one for one in type(held).__mro__ if one.__module__.startswith("sglang.")]


def _of_self(node: ast.AST, name: str) -> TypeGuard[ast.Attribute]:
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == name else None
    return isinstance(owner, ast.Name) and owner.id == "self"


def _asks_for(node: ast.AST, name: str) -> bool:
    """Whether it is a call like hasattr(self, name)."""
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    return called in ("hasattr", "getattr") and any(
        isinstance(one, ast.Constant) and one.value == name for one in ast.walk(node)
    )


def _building(error: BaseException) -> bool:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(one in file for file in files for one in BUILDERS) or any(one in str(error) for one in BUILDER_WORDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was made of or came behind, the latest first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _not_imported(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    file = Path(frames[-1].f_code.co_filename) if frames else Path()
    if type(error) is not NameError or "/sglang/" not in str(file) or not file.is_file():
        return ""
    branches = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.If | ast.Try)]
    imports = [one for node in branches for one in ast.walk(node) if isinstance(one, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for one in imports for alias in one.names}
    return error.name if error.name in names else ""


def _watcher(error: BaseException) -> str | None:
    if getattr(error, "of_ours", False):
        return "transfer backend"
    if "CUDA" in str(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [Path(frame.f_code.co_filename) for frame in frames]
    inner = next((file for file in files[::-1] if "/sglang/" in str(file) or HARNESS in file.parents), None)
    if inner is None or HARNESS not in inner.parents or inner.stem in AT_WORK or inner.parent.name in AT_WORK:
        return None
    if unmade(error) or (isinstance(error, TypeError) and _unfit(frames[-1])):
        return None
    return inner.stem


def _unfit(wrapper: FrameType) -> bool:
    """Whether SGLang called what one of ours wraps in a way in which that cannot be called."""
    given, names = wrapper.f_locals, wrapper.f_code.co_varnames[: wrapper.f_code.co_argcount]
    if not {"original", "args", "kwargs"} <= set(given):
        return False
    if "original" in names:  # `hooks.around`
        names = names[names.index("original") + 1 :]
    try:
        inspect.signature(given["original"]).bind(*map(given.get, names), *given["args"], **given["kwargs"])
    except TypeError:
        return True
    return False
