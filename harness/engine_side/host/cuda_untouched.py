"""Keeps CUDA out of a process that others are forked from: what is asked about cards there, a child of it answers.

Behind a fork CUDA works only where the parent's driver was never initialised (`cuInit`). SGLang asks for the card's
name and capability while it is imported and while it reads its arguments; torch would initialise the driver for that.
How many cards there are torch asks NVML (`gpus.BY_NVML`).

Engine side: standard library and torch only. It must not answer for a card that it has not asked, and must not go on
answering in a process that computes (`restore`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from ...both_sides.gpus import VISIBLE
from .beside import Beside

#: What cuCtxGetCurrent returns where nobody has called cuInit.
NOT_INITIALISED = 3
DRIVER = "libcuda.so.1"


class Untouched(importlib.abc.MetaPathFinder):
    """Of one process: `install` once torch is imported, `why` says what touched CUDA all the same, then `restore`."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL(DRIVER)
        self._replaced: list[tuple[Any, str, Any]] = []
        self._cards: dict[str | None, list[dict[str, Any]]] = {}
        #: asked for before anybody wants to know: by which cards may be seen
        self._ahead: dict[str | None, Beside] = {}
        self._before, self._why = "", ""

    def install(self) -> None:
        import torch

        cuda = torch.cuda
        self._replace(cuda, "current_device", lambda: 0)
        self._replace(cuda, "get_device_properties", lambda device=None: self._card(device))
        self._replace(cuda, "get_device_name", lambda device=None: self._card(device).name)
        self._replace(cuda, "get_device_capability", lambda device=None: _capability(self._card(device)))
        self._replace(cuda, "mem_get_info", lambda device=None: self._memory(device))
        self._replace(torch._C, "_get_accelerator", lambda *_check: torch.device("cuda"))
        self._replace(torch._C, "_accelerator_getAccelerator", lambda *_check: torch.device("cuda"))
        sys.meta_path.insert(0, self)
        self._ahead[os.environ.get(VISIBLE)] = self._asked(_every_card)

    def restore(self) -> None:
        """As torch has it; in a child of a process that nothing has touched, CUDA works from here on."""
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced = []
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def why(self) -> str:
        """Why no child of this process could use CUDA; empty where nothing is in the way."""
        if not self._why and self._touched():
            self._why = f"CUDA was initialised behind the import of {self._before or 'torch'}"
        if not self._why:
            try:
                kinds = {(one["name"], one["major"], one["minor"]) for one in self._known()}
                if len(kinds) > 1:
                    self._why = f"the cards here are not of one kind: {', '.join(sorted(name for name, *_ in kinds))}"
            except RuntimeError as error:
                self._why = str(error)
        return self._why

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds nothing; a look at the driver before each module, so that `why` can say where it was initialised."""
        if not self._why and self._touched():
            self._why = f"CUDA was initialised between the imports of {self._before or 'torch'} and {name}"
        self._before = name
        return None

    def _touched(self) -> bool:
        return bool(self._driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != NOT_INITIALISED)

    def _replace(self, owner: Any, name: str, answer: Callable[..., Any]) -> None:
        """Where it is too late, torch answers, which says best what is wrong."""
        original = getattr(owner, name, None)
        if original is not None:
            self._replaced.append((owner, name, original))
            setattr(owner, name, lambda *given, **named: (original if self._touched() else answer)(*given, **named))

    def _known(self) -> list[dict[str, Any]]:
        """Of every card that this process may see: its properties."""
        seen = os.environ.get(VISIBLE)
        if seen not in self._cards:
            self._cards[seen] = self._named(seen) or self._meanwhile(seen).answer()
        return self._cards[seen]

    def _meanwhile(self, seen: str | None) -> Beside:
        """Who was asked for these cards before, else is asked now."""
        return self._ahead.pop(seen) if seen in self._ahead else self._asked(_every_card)

    def _named(self, seen: str | None) -> list[dict[str, Any]]:
        """The same of cards that are named by their UUIDs, where all were asked for before; else empty.

        So a host that was forked need not ask again once it holds a lease, which names a card so.
        """
        known = {f"GPU-{card.get('uuid')}": card for cards in self._cards.values() for card in cards}
        names = (seen or "").split(",")
        return [known[name] for name in names] if all(name in known for name in names) else []

    def _card(self, device: Any) -> Any:
        return types.SimpleNamespace(**self._known()[_index(device)])

    def _memory(self, device: Any) -> tuple[int, int]:
        import torch

        free, total = self._asked(lambda: torch.cuda.mem_get_info(_index(device))).answer()
        return free, total

    def _asked(self, question: Callable[[], Any]) -> Beside:
        """By a child of this process, for which CUDA works."""

        def restored() -> Any:
            self.restore()
            return question()

        return Beside(restored, about="the cards")


def _every_card() -> list[dict[str, Any]]:
    import torch

    return [_plain(torch.cuda.get_device_properties(number)) for number in range(torch.cuda.device_count())]


def _plain(properties: Any) -> dict[str, Any]:
    """What can be pickled of a card's properties; its other fields as text."""
    names = [name for name in dir(properties) if not name.startswith("_")]
    found = {name: value for name in names if not callable(value := getattr(properties, name))}
    return {name: value if isinstance(value, int | str) else str(value) for name, value in found.items()}


def _capability(card: Any) -> tuple[int, int]:
    return card.major, card.minor


def _index(device: Any) -> int:
    """Of None, a number, "cuda", "cuda:1" or a torch.device."""
    if isinstance(device, int):
        return device
    _, _, number = str(device or "").partition(":")
    return int(number or 0)
