"""Stubs for packages that SGLang imports and never uses on a CPU, and that are not there or cannot be loaded."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

#: Importable but never used on this path; SGLang imports them at module level.
STUB_PACKAGES = ("torchvision", "vllm", "sgl_kernel")


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_AnyMeta):
    """A name that can be imported, subclassed and constructed (SGLang does so at import time) and does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "99.0"  # type: ignore[attr-defined]

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Anything

        module.__getattr__ = missing  # type: ignore[method-assign]


class StubFinder(importlib.abc.MetaPathFinder):
    """A stub for each of `packages` that is not there, or that this machine cannot load.

    `sgl_kernel` of an index or a bundle wants CUDA's libraries. A real package that loads always wins.
    """

    def __init__(self, note: Callable[[str, str], None], packages: Sequence[str]) -> None:
        self._note = note
        self._packages = packages
        self._unloadable: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.split(".")[0]
        if package not in self._packages:
            return None
        real = None if package in self._unloadable else importlib.machinery.PathFinder.find_spec(name, path, target)
        if real is None or real.loader is None:
            return importlib.machinery.ModuleSpec(name, _StubLoader(), is_package=True)
        if name == package:
            self._watch(real.loader, package)
        return real

    def _watch(self, loader: Any, package: str) -> None:
        """Where executing the package fails, it becomes the stub, and so does what it holds."""
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            try:
                execute(module)
            except (ImportError, OSError) as error:
                self._unloadable.add(package)
                for name in [one for one in sys.modules if one.startswith(f"{package}.")]:
                    del sys.modules[name]
                _StubLoader().exec_module(module)
                lines = [line for line in str(error).splitlines() if line.strip()]
                self._note(package, f"cannot be loaded on this machine: {''.join(lines[:1])}")

        loader.exec_module = exec_module
