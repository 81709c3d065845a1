"""The NVIDIA cards of this machine, as `nvidia-smi` tells them. Standard library only; nothing is started on a card.

This module must not import torch: a CUDA context takes memory on the card it asks about.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

FIELDS = ("name", "uuid", "memory.total", "memory.free", "compute_cap", "driver_version")
SECONDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card; memory in MiB, compute capability as '9.0'."""

    name: str
    uuid: str
    memory: int
    free: int
    capability: str
    driver: str


class NoAnswer(Exception):
    """There is an nvidia-smi and it could not be used; the text says what it said."""


def cards() -> tuple[Card, ...]:
    """Every card; empty without a driver. NoAnswer is for `ask`: here a driver that does not answer has no cards."""
    try:
        return ask()
    except NoAnswer:
        return ()


def ask() -> tuple[Card, ...]:
    """Every card; empty where there is no nvidia-smi. NoAnswer where it fails or says something unexpected."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(str(error)) from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
        raise NoAnswer(said[0])
    return parse(done.stdout)


def parse(text: str) -> tuple[Card, ...]:
    """The cards in nvidia-smi's own lines; NoAnswer for a line that is not as asked."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(FIELDS):
            raise NoAnswer(line)
        name, uuid, memory, free, capability, driver = parts
        try:
            card = Card(name=name, uuid=uuid, memory=int(memory), free=int(free), capability=capability, driver=driver)
        except ValueError as error:
            raise NoAnswer(line) from error
        found.append(card)
    return tuple(found)
