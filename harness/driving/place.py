"""Where a reference computes. This module must not import torch, not even late: records of a run speak of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a reference computes: a torch device, the dtype weights are held in, and what it said it takes (MiB)."""

    device: str = "cpu"
    held: str = "float32"
    said: int | None = None


#: Where tiny pairs are computed.
CPU = Place()
