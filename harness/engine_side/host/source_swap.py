"""Functions of a mutated source file in place of those that a scheduler has, and which lines of SGLang it executes.

Engine side: standard library and torch only. A function keeps its identity and gets other code, so whoever imported,
decorated or stored it runs the mutated code too: from the next call on, or, where a boot record names the file, from
the import of its module on, and so in CUDA graphs. It must not know what was changed, or why.
"""

from __future__ import annotations

import ast
import gc
import importlib
import resource
import sys
import threading
import types
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...both_sides.codes import changed, compiled
from ..hooks import HookRegistry, ImportHooks, Original, around
from ..replacement_kernels import cpu_canary

#: What a mutated scheduler may take beside what it has; a wrong size must not take the machine's memory.
MORE_BYTES = 6 << 30
#: How many calls of one function are followed in a scenario, and how often a line's tensors are looked at: following
#: makes an engine slow, and a loop shows nothing new.
CALLS, LOOKS = 60, 12


Codes = dict[types.CodeType, types.CodeType]


def install(boot: dict[str, Any], hooks: ImportHooks) -> None:
    """What the boot record asks of this scheduler, before it makes anything."""
    if boot["device"] == "cpu" and "kv_canary" in boot["optional_arguments"]:
        cpu_canary.install(hooks)
    for name, file in boot.get("mutated", {}).items():
        hooks.after(name, partial(_at_import, file=file))
    if boot.get("mutable") and boot["device"] == "cpu":  # CUDA reserves more than any card has
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    if boot.get("executed"):
        EXECUTED.install(tuple(boot["executed"]), graphs=boot["device"] == "cuda")


def _at_import(module: types.ModuleType, *, file: str) -> None:
    SWAP.put(module.__name__, file)


@dataclass(slots=True)
class Swap:
    """The files whose functions have other code, and the way back."""

    back: dict[str, Codes] = field(default_factory=dict)

    def to(self, files: dict[str, str]) -> int:
        """Modules as in these files, and every other one as it was; of the module with fewest, how many functions got
        other code.

        LookupError for a module that is not imported, ValueError where a function would have to close over other
        variables.
        """
        for file, back in self.back.items():
            replaced(file, back)
        self.back = {}
        return min((self.put(module, file) for module, file in files.items()), default=0)

    def put(self, module: str, file: str) -> int:
        """The module's functions as in the file, beside those that are already changed."""
        try:  # SGLang imports some where they are first needed
            importlib.import_module(module)
        except ImportError as error:
            raise LookupError(f"{module} is not imported here: {error}") from error
        own = str(sys.modules[module].__file__)
        source, mutated = Path(own).read_text(), Path(file).read_text()
        codes = dict(changed(compiled(source, own), compiled(mutated, own)))
        self.back[own] = {new: old for old, new in codes.items()}
        return replaced(own, codes)


def replaced(file: str, codes: Codes) -> int:
    """Give every living function of a file with one of these codes the other one; how many had one."""
    gc.unfreeze()  # objects from before a fork are not listed otherwise
    living = [one for one in gc.get_objects() if type(one) is types.FunctionType and one.__code__.co_filename == file]
    functions = [one for one in living if one.__code__ in codes]  # code of other files may compare as equal
    for one in functions:
        one.__code__ = codes[one.__code__]
    return len(functions)


def taken() -> dict[str, Any]:
    """What is said at a scenario's begin and end, where lines are followed."""
    return {"source": EXECUTED.take()} if EXECUTED.parts else {}


Found = dict[str, dict[int, dict[str, list[Any]]]]


@dataclass(slots=True)
class Executed:
    """Lines of files below `parts` (of the sglang package) that ran, and what tensors their expressions held.

    found: file -> line -> expression -> [dtype, *shape], of the largest seen; an executed line has an entry. Followed
    are functions that are called in a scenario, so not loops that never return; captured: the same of those that are
    called while a CUDA graph is captured, and not of the rest of a boot.
    """

    parts: tuple[str, ...] = ()
    found: Found = field(default_factory=dict)
    captured: Found = field(default_factory=dict)
    _serving: bool = False
    _capturing: bool = False
    _names: dict[str, str] = field(default_factory=dict)
    _looked: dict[tuple[str, int], int] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)
    _expressions: dict[str, dict[int, list[list[str]]]] = field(default_factory=dict)

    def install(self, parts: tuple[str, ...], *, graphs: bool) -> None:
        """Before SGLang makes anything. graphs: follow captures too."""
        self.parts = parts
        threading.settrace(self.enter)  # threads that the boot starts
        if graphs:
            cuda, hooks = sys.modules["torch.cuda"], HookRegistry()
            hooks.wrap(cuda, "CUDAGraph.capture_begin", around(partial(self._captures, True)))
            hooks.wrap(cuda, "CUDAGraph.capture_end", around(partial(self._captures, False)))

    def _captures(self, capturing: bool, original: Original, *args: Any, **kwargs: Any) -> Any:
        self._capturing = capturing
        self._forget()
        sys.settrace(self.enter if capturing or self._serving else None)
        return original(*args, **kwargs)

    def take(self) -> dict[str, Found]:
        """What was found since the last call, and all that was captured; from now on scenarios are followed."""
        found, self.found = self.found, {}
        self._forget()
        self._serving = True
        sys.settrace(self.enter)
        return {"executed": found, "captured": self.captured}

    def _forget(self) -> None:
        self._looked.clear()
        self._calls.clear()

    def enter(self, frame: types.FrameType, _event: str, _arg: object) -> Any:
        """For sys.settrace: follow code of the files asked for only."""
        if not (self._serving or self._capturing):
            return None
        file = frame.f_code.co_filename
        name = self._names.get(file)
        if name is None:
            name = self._names[file] = self._named(file)
        if not name:
            return None
        calls = self._calls[id(frame.f_code)] = self._calls.get(id(frame.f_code), 0) + 1
        return self.line if calls <= CALLS else None

    def _named(self, file: str) -> str:
        inside = file.rpartition("/sglang/")[2]
        return inside if any(inside.startswith(part) for part in self.parts) else ""

    def line(self, frame: types.FrameType, event: str, _arg: object) -> Any:
        """A line is about to run, so its expressions still hold what it reads."""
        if event == "line":
            file, number = frame.f_code.co_filename, frame.f_lineno
            name = self._names[file]
            found = self.captured if self._capturing else self.found
            tensors = found.setdefault(name, {}).setdefault(number, {})
            looked = self._looked[name, number] = self._looked.get((name, number), 0) + 1
            for path in self._of(name, file).get(number, ()) if looked <= LOOKS else ():
                _note(tensors, path, frame.f_locals)
        return self.line

    def _of(self, name: str, file: str) -> dict[int, list[list[str]]]:
        if name not in self._expressions:
            self._expressions[name] = dotted(Path(file).read_text())
        return self._expressions[name]


def dotted(source: str) -> dict[int, list[list[str]]]:
    """Line -> the names and attributes of names that it reads, as paths: ["batch", "seq_lens"]."""
    found: dict[int, list[list[str]]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and (path := path_of(node)):
            found.setdefault(node.lineno, []).append(path)
    return found


def path_of(node: ast.expr) -> list[str]:
    """['batch', 'seq_lens'] of batch.seq_lens; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _note(tensors: dict[str, list[Any]], path: list[str], scope: dict[str, Any]) -> None:
    """Look without running anything of SGLang's: no property is asked."""
    held = scope.get(path[0])
    for name in path[1:]:
        held = getattr(held, "__dict__", {}).get(name)
    if isinstance(held, torch.Tensor) and held.dim():
        known = tensors.get(".".join(path))
        if known is None or known[1] < held.shape[0]:
            tensors[".".join(path)] = [str(held.dtype), *held.shape]


SWAP, EXECUTED = Swap(), Executed()
