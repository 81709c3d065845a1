"""Patches that put SGLang on a CPU, by name: each changes one module, once it is imported, and notes what it did."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

#: (operation, by, subject, reason), see `cpu_ops.Replacement`
Note = Callable[[str, str, str, str], None]
#: (module, argument of the release's table, note)
Patch = Callable[[ModuleType, str, Note], None]
PATCHES: dict[str, Patch] = {}


def register(patch: Patch) -> Patch:
    """Under its own name, by which tables of releases call it."""
    PATCHES[patch.__name__] = patch
    return patch


class View:
    """A module or an object, as one of SGLang's modules sees it: with some names of ours."""

    def __init__(self, module: Any, **ours: Any) -> None:
        self.__dict__ |= {"_module": module, **ours}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of torch that pins nothing."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of torch that takes device "cuda" for the CPU."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **{**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs)

    return call
