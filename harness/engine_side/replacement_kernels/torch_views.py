"""torch as one module of SGLang's sees it on a CPU: some of it is ours, everything else is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class View:
    """A module of torch's with some names of ours."""

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
