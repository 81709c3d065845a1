"""Which NVIDIA cards are here and what runs on them, as `nvidia-smi` says: the one tool that every GPU machine has.

Both sides: standard library only. It must not create a CUDA context, start anything or decide who may use a card.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

SMI_SECONDS = 30.0
CARD_FIELDS = ("index", "uuid", "name", "memory.used", "memory.free")
APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class CardError(Exception):
    """No card can be used as asked; the text names what was found and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card. Memory in MiB; what the driver keeps for itself is in neither `used` nor `free`."""

    index: int
    uuid: str
    name: str
    used: int
    free: int

    @property
    def capacity(self) -> int:
        """MiB that processes can have together."""
        return self.used + self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A process that computes on a card. used: MiB, None where the driver does not say."""

    uuid: str
    pid: int
    name: str
    used: int | None


def read_cards() -> list[Card]:
    """Every card of this machine by index. CardError if there is none, or `nvidia-smi` cannot say."""
    found = []
    for line in _ask(f"--query-gpu={','.join(CARD_FIELDS)}"):
        index, uuid, name, used, free = _parts(line, len(CARD_FIELDS))
        if not (used.isdecimal() and free.isdecimal()):
            raise CardError(f"nvidia-smi does not say how much memory GPU {index} ({name}) has: {line}")
        found.append(Card(index=int(index), uuid=uuid, name=name, used=int(used), free=int(free)))
    if not found:
        raise CardError("nvidia-smi lists no GPU on this machine\n  run on the CPU instead:  --device cpu")
    return sorted(found, key=lambda card: card.index)


def read_apps() -> list[App]:
    """Every process that computes on any card. Inside a container the driver may hide some, or name them foreignly."""
    found = []
    for line in _ask(f"--query-compute-apps={','.join(APP_FIELDS)}"):
        uuid, pid, name, used = _parts(line, len(APP_FIELDS))
        found.append(App(uuid=uuid, pid=int(pid), name=name, used=int(used) if used.isdecimal() else None))
    return found


def _parts(line: str, count: int) -> list[str]:
    """The values of one line; the third, a name, may hold commas itself."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < count:
        raise CardError(
            f"nvidia-smi answered {line!r}, and {count} values were asked for\n  see what it says:  nvidia-smi"
        )
    after = len(parts) - (count - 3)
    return [*parts[:2], ", ".join(parts[2:after]), *parts[after:]]


def _ask(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except FileNotFoundError as error:
        raise CardError("there is no nvidia-smi here, so no GPU\n  run on the CPU instead:  --device cpu") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CardError(f"nvidia-smi cannot be asked: {error}\n  see what it says:  nvidia-smi") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or "it printed nothing"
        raise CardError(f"nvidia-smi failed (exit {done.returncode}): {said}\n  see what it says:  nvidia-smi")
    return [line for line in done.stdout.splitlines() if line.strip()]


def visible(cards: Sequence[Card], chosen: str | None = None) -> list[Card]:
    """The cards that CUDA_VISIBLE_DEVICES (or `chosen`) leaves: indices, UUIDs or beginnings of UUIDs, in its order.

    CardError if it names a card that is not here, or none at all: CUDA itself would only stop listing there.
    """
    text = os.environ.get(VISIBLE) if chosen is None else chosen
    if text is None:
        return list(cards)
    allowed = ", ".join(f"{card.index} ({card.uuid})" for card in cards)
    kept: list[Card] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        fits = [card for card in cards if name == str(card.index) or card.uuid.startswith(name)]
        if not fits:
            raise CardError(f"{VISIBLE} names {name!r}, which is no GPU here\n  allowed: {allowed}")
        kept += [card for card in fits[:1] if card not in kept]
    if not kept:
        raise CardError(
            f"{VISIBLE} is {text!r} and hides every GPU\n  allowed: {allowed}\n  show all:  unset {VISIBLE}"
        )
    return kept
