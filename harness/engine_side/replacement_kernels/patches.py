"""Patches that put SGLang on a CPU, by name: each changes one module, once it is imported, and notes what it did."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

#: (operation, by, subject, reason), see `cpu_ops.Replacement`
Note = Callable[[str, str, str, str], None]
#: (module, argument of the release's table, note)
Patch = Callable[[ModuleType, str, Note], None]
PATCHES: dict[str, Patch] = {}


def register(patch: Patch) -> Patch:
    """Under its own name, by which tables of releases call it."""
    PATCHES[patch.__name__] = patch
    return patch
