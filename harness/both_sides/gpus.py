"""Which NVIDIA cards are here and what runs on them, as `nvidia-smi` says, which every GPU machine has.

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
#: torch then counts cards by NVML, which initialises nothing: a process can still be forked afterwards.
BY_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: Fields whose values may hold commas themselves.
NAMES = ("name", "process_name")
ON_CPU = "\n  run on the CPU instead:  --device cpu"


class SmiError(Exception):
    """It could not be asked, or answered something else; the text says what was found."""


class NoSmi(SmiError):
    """There is no nvidia-smi here."""


class CardError(Exception):
    """No card can be used as asked; the text names what was found and what to do."""

    exit_code = 3  # of a command that ends so: nothing was judged


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
    for one in _ask("gpu", CARD_FIELDS):
        used, free, named = one["memory.used"], one["memory.free"], f"GPU {one['index']} ({one['name']})"
        if not (used.isdecimal() and free.isdecimal()):
            raise CardError(f"nvidia-smi does not say how much memory {named} has: used {used}, free {free}")
        found.append(Card(index=int(one["index"]), uuid=one["uuid"], name=one["name"], used=int(used), free=int(free)))
    if not found:
        raise CardError(f"nvidia-smi lists no GPU on this machine{ON_CPU}")
    return sorted(found, key=lambda card: card.index)


def read_apps() -> list[App]:
    """Every process that computes on any card. Inside a container the driver may hide some, or name them foreignly."""
    found = []
    for one in _ask("compute-apps", APP_FIELDS):
        used = int(one["used_memory"]) if one["used_memory"].isdecimal() else None
        found.append(App(uuid=one["gpu_uuid"], pid=int(one["pid"]), name=one["process_name"], used=used))
    return found


def _ask(subject: str, fields: Sequence[str]) -> list[dict[str, str]]:
    try:
        return query(subject, fields, seconds=SMI_SECONDS)
    except NoSmi as error:
        raise CardError(f"{error}, so no GPU{ON_CPU}") from error
    except SmiError as error:
        raise CardError(f"{error}\n  see what it says:  nvidia-smi") from error


def query(subject: str, fields: Sequence[str], *, seconds: float) -> list[dict[str, str]]:
    """The values of each thing, as text by field; subject: 'gpu' or 'compute-apps'. Raises SmiError."""
    command = ["nvidia-smi", f"--query-{subject}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise NoSmi("there is no nvidia-smi here") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SmiError(f"nvidia-smi cannot be asked: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or "it printed nothing"
        raise SmiError(f"nvidia-smi failed (exit {done.returncode}): {said}")
    return [values(line, fields) for line in done.stdout.splitlines() if line.strip()]


def values(line: str, fields: Sequence[str]) -> dict[str, str]:
    """The values of one line; SmiError where there are too few, or too many without a name among them."""
    parts = [part.strip() for part in line.split(",")]
    over = len(parts) - len(fields)
    name = next((place for place, field in enumerate(fields) if field in NAMES), None)
    if over < 0 or (over and name is None):
        raise SmiError(f"nvidia-smi answered {line!r}, and {len(fields)} values were asked for")
    if name is not None:
        parts[name : name + over + 1] = [", ".join(parts[name : name + over + 1])]
    return dict(zip(fields, parts, strict=True))


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
