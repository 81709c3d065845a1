"""The NVIDIA cards of this machine and what they are, for doctors and bundles; nothing is started on a card.

This module must not import torch: a CUDA context takes memory on the card it asks about.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.both_sides import gpus

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


def cards() -> tuple[Card, ...]:
    """Every card; empty without a driver, or with one that does not answer."""
    try:
        return ask()
    except gpus.SmiError:
        return ()


def ask() -> tuple[Card, ...]:
    """Every card; empty where there is no nvidia-smi. SmiError where it fails or says something unexpected."""
    try:
        return tuple(map(_card, gpus.query("gpu", FIELDS, seconds=SECONDS)))
    except gpus.NoSmi:
        return ()


def _card(one: dict[str, str]) -> Card:
    try:
        return Card(
            name=one["name"],
            uuid=one["uuid"],
            memory=int(one["memory.total"]),
            free=int(one["memory.free"]),
            capability=one["compute_cap"],
            driver=one["driver_version"],
        )
    except ValueError as error:
        raise gpus.SmiError(f"nvidia-smi answered {', '.join(one.values())!r}") from error
