"""Which lines of SGLang a scheduler executes, and what tensors they read.

Engine side: standard library and torch only. It must not ask anything of SGLang's objects but what they hold.
"""

from __future__ import annotations

import ast
import sys
import threading
import types
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..hooks import HookRegistry, Original, around

#: How many calls of one function are followed in a scenario, and how often a line's tensors are looked at: following
#: makes an engine slow, and a loop shows nothing new.
CALLS, LOOKS = 60, 12

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

    def said(self) -> dict[str, Any]:
        """What is said at a scenario's begin and end, where lines are followed."""
        return {"source": self.take()} if self.parts else {}

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


EXECUTED = Executed()
