"""Run a callback right after a module was imported, and wrap attributes, with a registry of what was wrapped.

Engine side: standard library and the clock only. It must not know which modules or functions are interesting.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .clock import SGLANG, Clock

Original = Callable[..., Any]
#: Takes what an attribute holds, gives what it shall hold.
Make = Callable[[Original], Any]


@dataclass(slots=True)
class ImportHooks(importlib.abc.MetaPathFinder):
    """Callbacks by module name; install once per process with `install`."""

    callbacks: dict[str, list[Callable[[types.ModuleType], None]]] = field(default_factory=dict)

    def after(self, module: str, callback: Callable[[types.ModuleType], None]) -> None:
        """Call `callback(module)` when `module` has been executed; at once if that already happened."""
        if module in sys.modules:
            callback(sys.modules[module])
        else:
            self.callbacks.setdefault(module, []).append(callback)

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.callbacks:
            return None
        spec = self._ask_the_others(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for callback in self.callbacks[name]:
                callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _ask_the_others(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        return next((found for one in others if (found := one.find_spec(name, path, target)) is not None), None)


def around(call: Original) -> Make:
    """For a function that is given the original before the arguments of the call. At each step of a scheduler a maker
    of functions is better: this costs one call more.
    """

    def make(original: Original) -> Original:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return wrapper

    return make


@dataclass(slots=True)
class HookRegistry:
    """What was wrapped, by `module:Owner.attribute`; the handshake prints it.

    clock: whose owners the wrappers are, by the names of what they wrap.
    """

    clock: Clock | None = None

    found: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    #: label -> what was there before us, and what was put around it, innermost first
    _layers: dict[str, tuple[Callable[..., Any], list[Make]]] = field(default_factory=dict)

    def wrap(self, module: types.ModuleType, dotted: str, make: Make, *, innermost: bool = False) -> None:
        """Replace `module.dotted` by `make(original)`, or note as missing what is not there.

        A method inherited from a base class is wrapped on the named class only. innermost: under what this registry
        wrapped there earlier, so that those wrappers see what `make` does to the result.
        """
        *owners, name = dotted.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None) if owner is not None else None
        label = f"{module.__name__}:{dotted}"
        if original is None:
            self.missing.append(label)
            return
        bare, makes = self._layers.setdefault(label, (original, []))
        makes.insert(0 if innermost else len(makes), make)
        whole = bare
        for layer in makes:
            if self.clock is None:
                whole = functools.wraps(whole)(layer(whole))
            else:
                whole = self.clock.of(dotted, layer(self.clock.of(SGLANG, whole)))
        setattr(owner, name, whole)
        self.found.append(label)
