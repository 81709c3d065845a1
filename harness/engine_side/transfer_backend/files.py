"""Moves KV pages and metadata between two engines of one machine through a folder: no network, no device of its own.

Engine side: standard library, NumPy and torch only. It copies bytes between the addresses that SGLang itself registers,
when the scenario's rules say so. It must not know what the bytes mean.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch


class RuleError(ValueError):
    """A rule that does not exist."""


class NotServed(NotImplementedError):
    """SGLang asks for something that this transfer backend does not do: no crash of SGLang (`crash_attribution`)."""

    of_ours = True


@dataclass(slots=True)
class Rules:
    """What the scenario wants of transfers, by room (see harness.contract.script.Op); both sides get the same."""

    held: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    #: what was sent and cannot be taken back, and on the decode side what writes it where that asked for it
    late: set[int] = field(default_factory=set)
    lands: dict[int, Callable[[], None]] = field(default_factory=dict)

    def apply(self, what: str, rooms: list[int]) -> None:
        """Raises RuleError for anything but hold, release, fail, drop, late, land."""
        sets = {"hold": self.held, "fail": self.failed, "drop": self.dropped, "late": self.late}
        if what == "release":
            self.held -= set(rooms)
        elif what == "land":
            for room in rooms:
                self.lands.get(room, lambda: None)()
                self.late.discard(room)
        elif what in sets:
            sets[what].update(rooms)
        else:
            raise RuleError(f"unknown rule {what!r}; allowed: hold, release, fail, drop, late, land")

    def clear(self) -> None:
        for rooms in (self.held, self.failed, self.dropped, self.late, self.lands):
            rooms.clear()


#: The rules of this process.
RULES = Rules()
#: What mutants make of the pages of a part before they are written; empty without mutants.
CHANGE_PAGES: list[Any] = []


@dataclass(frozen=True, slots=True)
class Want:
    """What a decode side asks for: its pages in order, its metadata row, and how much of the prompt it has already."""

    pages: list[int]
    row: int
    prefix: int


class Room:
    """A request's corner of the folder, one a rank. Files appear whole: written under another name and renamed."""

    def __init__(self, root: str, room: int, rank: int) -> None:
        self.number, self._folder = room, Path(root, f"{room}-{rank}")
        self._folder.mkdir(parents=True, exist_ok=True)

    def ask(self, want: Want) -> None:
        self._put("want.json", json.dumps({"pages": want.pages, "row": want.row, "prefix": want.prefix}).encode())

    def asked(self) -> Want | None:
        """None until the decode side has asked."""
        path = self._folder / "want.json"
        return Want(**json.loads(path.read_bytes())) if path.exists() else None

    def send(self, number: int, buffers: list[np.ndarray], metadata: list[np.ndarray] | None) -> None:
        """One part: uint8 [bytes] a registered KV buffer, and with the last part uint8 [bytes] a metadata buffer."""
        parts = {f"kv{i}": one for i, one in enumerate(buffers)}
        parts |= {f"meta{i}": one for i, one in enumerate(metadata or [])}
        hidden = self._folder / f".part-{number:04d}.npz"
        with hidden.open("wb") as file:
            np.savez(file, **parts)  # type: ignore[arg-type]
        os.replace(hidden, self._folder / f"part-{number:04d}.npz")

    def parts(self) -> list[dict[str, np.ndarray]]:
        """Everything sent so far, in order."""
        found = []
        for path in sorted(self._folder.glob("part-*.npz")):
            with np.load(path) as held:
                found.append({name: held[name] for name in held.files})
        return found

    def complete(self) -> bool:
        """Whether the last part is there: the one with metadata."""
        paths = sorted(self._folder.glob("part-*.npz"))
        if not paths:
            return False
        with np.load(paths[-1]) as held:
            return "meta0" in held.files

    def close(self) -> None:
        """What was taken is gone: nobody gets it a second time, as with a prefill side that has moved on."""
        for path in self._folder.glob("part-*.npz"):
            path.unlink()

    def give_up(self) -> None:
        self._put("aborted", b"")

    def given_up(self) -> bool:
        return (self._folder / "aborted").exists()

    def _put(self, name: str, content: bytes) -> None:
        hidden = self._folder / f".{name}"
        hidden.write_bytes(content)
        os.replace(hidden, self._folder / name)


def read_items(address: int, size: int, items: list[int]) -> np.ndarray:
    """uint8 [len(items) * size]: those items of a buffer of items of `size` bytes each."""
    out = np.empty((len(items), size), dtype=np.uint8)
    for row, item in enumerate(items):
        _copy(out[row].ctypes.data, address + item * size, size)
    return out.reshape(-1)


def write_items(address: int, size: int, items: list[int], content: np.ndarray) -> None:
    """The reverse of `read_items`."""
    rows = np.ascontiguousarray(content).reshape(len(items), size)
    for row, item in enumerate(items):
        _copy(address + item * size, rows[row].ctypes.data, size)


_EITHER_WAY = 4  # cudaMemcpyDefault: the driver finds out where an address lies


def _copy(to: int, come_from: int, size: int) -> None:
    cuda = _cuda()
    if cuda is None:
        ctypes.memmove(to, come_from, size)
        return
    code = cuda.cudaMemcpy(
        ctypes.c_void_p(to), ctypes.c_void_p(come_from), ctypes.c_size_t(size), ctypes.c_int(_EITHER_WAY)
    )
    if code:
        raise RuntimeError(f"cudaMemcpy of {size} bytes failed with code {code}")


@functools.cache
def _cuda() -> Any:
    """The CUDA runtime this process has loaded already, or None on a CPU."""
    if not torch.cuda.is_available():
        return None
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libcudart" in line})
    return ctypes.CDLL(paths[0] if paths else "libcudart.so")


def settle_device() -> None:
    """Wait for kernels that may still write what is about to be read."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
