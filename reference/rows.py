"""Rows of the reference as they are written down, one forward of one request at a time.

This module must not compute a row: it writes what a forward was fed and gave into columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.contract.batches import Part
from harness.contract.trace import TOP_LOGITS, RowBuilder, Rows
from harness.contract.types import Phase


class Writer:
    """Collects rows and the hidden states they point to."""

    def __init__(self) -> None:
        self._rows = RowBuilder()
        self._tensors: dict[str, list[Tensor]] = {}

    def add(
        self,
        part: Part,
        phase: Phase,
        *,
        input_id: Sequence[int] | Tensor,
        step: int = 0,
        position: Sequence[int] | None = None,
        parent: Sequence[int] | None = None,
        attends: Sequence[int] | None = None,
        hidden_in: Tensor | None = None,
        hidden_out: Tensor | None = None,
        logits: Tensor | None = None,
        choose: int = 1,
        scored: bool = False,
        drawn: Sequence[Sequence[int]] = (),
        temperature: float = 1.0,
    ) -> None:
        """The m rows of one forward, slots 0..m-1, keyed by a request's part in a batch.

        input_id, position, parent, attends: [m]; hidden_in [m,h]. Outputs may be there for the last r rows only:
        hidden_out [r,h], and logits [r,V], which fill lse and the top logits. The best `choose` of them are what a row
        chooses, or drawn [r,choose], with their probabilities at `temperature` where they are `scored`.
        """
        m = len(input_id)
        shared = {"rid": part.rid, "attempt": part.attempt, "committed": part.start, "phase": str(phase), "step": step}
        shared |= {
            "dp_rank": part.record.dp_rank,
            "round": part.record.index,
            "scheduler_step": part.record.scheduler_step,
        }
        columns: dict[str, Sequence[Any]] = {name: [value] * m for name, value in shared.items()}
        columns |= {"slot": range(m), "input_id": input_id.tolist() if isinstance(input_id, Tensor) else input_id}
        optional = {"position": position, "parent": parent, "attends": attends}
        columns |= {name: given for name, given in optional.items() if given is not None}
        for name, states in (("hidden_in", hidden_in), ("hidden_out", hidden_out)):
            if states is not None:
                columns[name] = _at_the_end(self._kept(f"{name}.{phase}", states), m, -1)
        if logits is not None:
            top = _top(logits, choose, drawn, temperature if scored else None)
            columns |= {name: _at_the_end(own, m, float("nan") if name == "lse" else ()) for name, own in top.items()}
        self._rows.extend(m, **columns)

    def _kept(self, name: str, states: Tensor) -> Sequence[int]:
        """Where states [r,h] are found in the tensor `name`."""
        stored = self._tensors.setdefault(name, [])
        first = sum(len(one) for one in stored)
        stored.append(states.to("cpu", torch.float32))
        return range(first, first + len(states))

    def build(self) -> tuple[Rows, dict[str, np.ndarray]]:
        """The rows, and float32 [rows,h] tensors by name."""
        tensors = {name: torch.cat(states).numpy() for name, states in self._tensors.items()}
        return self._rows.build(), tensors


def _at_the_end(own: Sequence[Any], count: int, nothing: Any) -> list[Any]:
    return [nothing] * (count - len(own)) + list(own)


def best_ids(values: Tensor, count: int) -> Tensor:
    """values [...,V] -> ids [...,count] of the largest, best first, ties to the lowest id; fewer if V is smaller.

    Whole numbers in the order of the values, with the id below them: no sort of a vocabulary of 150,000.
    """
    if values.dtype == torch.float64:
        return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]
    size = values.shape[-1]
    bits = (values.float() + 0.0).view(torch.int32).to(torch.int64)  # adding makes -0.0 a 0.0
    ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) * size - torch.arange(size, device=values.device)
    return ranks.topk(min(count, size), dim=-1).indices


def _top(logits: Tensor, choose: int, drawn: Sequence[Sequence[int]], temperature: float | None) -> dict[str, Any]:
    """Columns of rows with logits [r,V]; ties go to the lowest id."""
    order = best_ids(logits, max(choose, TOP_LOGITS))
    chosen = torch.tensor(drawn, device=logits.device) if len(drawn) else order[:, :choose]
    top = order[:, :TOP_LOGITS]
    columns: dict[str, Any] = {
        "lse": logits.logsumexp(-1).tolist(),
        "top_ids": top.cpu().numpy(),
        "top_logits": logits.gather(-1, top).float().cpu().numpy(),
        "chosen_ids": chosen.cpu().numpy(),
    }
    if temperature is not None:
        scaled = logits / temperature
        scores = (scaled.gather(-1, chosen) - scaled.logsumexp(-1, keepdim=True)).exp()
        columns["chosen_probs"] = scores.float().cpu().numpy()
    return columns
