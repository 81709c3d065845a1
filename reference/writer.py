"""Rows of the reference as they are written down, and the key that they share.

This module must not compute a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.contract.trace import TOP_LOGITS, RowBuilder, Rows
from harness.contract.types import Phase
from reference.chain import best


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The part of a row's key that is shared by a request's rows in one round."""

    rid: str
    epoch: int
    dp_rank: int
    round: int
    tick: int
    committed: int


class Writer:
    """Collects rows and the hidden states they point to."""

    def __init__(self) -> None:
        self._rows = RowBuilder()
        self._tensors: dict[str, list[Tensor]] = {}

    def add(
        self,
        where: Where,
        phase: Phase,
        slot: int,
        *,
        logits: Tensor | None = None,
        choose: int = 0,
        scored: bool = False,
        drawn: Sequence[int] = (),
        heat: float = 1.0,
        **values: Any,
    ) -> None:
        """One row; `hidden_in` and `hidden_out` in values are tensors [h]. drawn: what it chooses instead of the best.

        logits [V] fill lse and the top logits; the best `choose` of them are what the row chooses, `scored` with
        their probabilities at temperature `heat`.
        """
        for name in ("hidden_in", "hidden_out"):
            if name in values:
                stored = self._tensors.setdefault(f"{name}.{phase}", [])
                stored.append(values[name])
                values[name] = len(stored) - 1
        if logits is not None:
            top, lse = best(logits, max(choose, TOP_LOGITS)), logits.logsumexp(-1)
            kept, chosen = top[:TOP_LOGITS], list(drawn) or top[:choose]
            values |= {
                "lse": float(lse),
                "top_ids": kept,
                "top_logits": logits[kept].float().numpy(),
                "chosen_ids": chosen,
            }
            if scored:
                scaled = logits / heat
                values["chosen_probs"] = (scaled[chosen] - scaled.logsumexp(-1)).exp().float().numpy()
        self._rows.add(
            rid=where.rid,
            epoch=where.epoch,
            dp_rank=where.dp_rank,
            round=where.round,
            tick=where.tick,
            committed=where.committed,
            phase=str(phase),
            slot=slot,
            **values,
        )

    def build(self) -> tuple[Rows, dict[str, np.ndarray]]:
        """The rows, and float32 [rows,h] tensors by name."""
        tensors = {name: torch.stack(rows).to(torch.float32).numpy() for name, rows in self._tensors.items()}
        return self._rows.build(), tensors
