"""Rows of the reference as they are written down, one forward of one request at a time.

This module must not compute a row: it writes what a forward was fed and gave into columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.both_sides.projections import TOP_LOGITS
from harness.contract.batches import Part
from harness.contract.rows import RowBuilder, Rows
from harness.contract.types import Phase

#: Bytes that wait on a card at most before they are brought to the host.
MOST_THERE = 32 << 20


class Writer:
    """Collects rows and the hidden states they point to."""

    def __init__(self) -> None:
        self._added: list[tuple[int, dict[str, Sequence[Any]], dict[str, int]]] = []
        self._tensors: dict[str, list[int]] = {}
        self._rows_of: Counter[str] = Counter()
        self._brought = _Brought()

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
        top = {} if logits is None else _top(logits, choose, drawn, temperature if scored else None)
        self._added.append((m, columns, {name: self._brought.later(one) for name, one in top.items()}))

    def _kept(self, name: str, states: Tensor) -> Sequence[int]:
        """Where states [r,h] are found in the tensor `name`."""
        first = self._rows_of[name]
        self._rows_of[name] += len(states)
        self._tensors.setdefault(name, []).append(self._brought.later(states.float()))
        return range(first, self._rows_of[name])

    def build(self) -> tuple[Rows, dict[str, np.ndarray]]:
        """The rows, and float32 [rows,h] tensors by name."""
        here, rows = self._brought.all(), RowBuilder()
        for m, columns, waited in self._added:
            found = {name: list(here[place].numpy()) for name, place in waited.items()}
            late = {name: _at_the_end(own, m, float("nan") if name == "lse" else ()) for name, own in found.items()}
            rows.extend(m, **columns, **late)
        tensors = {name: torch.cat([here[place] for place in places]) for name, places in self._tensors.items()}
        return rows.build(), {name: one.numpy() for name, one in tensors.items()}


class _Brought:
    """Tensors on their way to the host, many at a time: on a card each transfer waits for all that runs there."""

    def __init__(self) -> None:
        self._here: list[Tensor] = []
        self._there: list[Tensor] = []
        self._bytes = 0

    def later(self, one: Tensor) -> int:
        """Its place in `all`."""
        self._there.append(one)
        self._bytes += one.numel() * one.element_size()
        place = len(self._here) + len(self._there) - 1
        if self._bytes > MOST_THERE:
            self.all()
        return place

    def all(self) -> list[Tensor]:
        """Every tensor so far, on the host."""
        found: list[Tensor] = list(self._there)
        for dtype in {one.dtype for one in found if one.device.type != "cpu"}:
            places = [place for place, one in enumerate(found) if one.dtype == dtype and one.device.type != "cpu"]
            flat = torch.cat([found[place].reshape(-1) for place in places]) if len(places) > 1 else found[places[0]]
            parts = torch.split(flat.cpu().reshape(-1), [found[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.reshape(found[place].shape)
        self._here += found
        self._there, self._bytes = [], 0
        return self._here


def _at_the_end(own: Sequence[Any] | np.ndarray, count: int, nothing: Any) -> list[Any]:
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


def _top(logits: Tensor, choose: int, drawn: Sequence[Sequence[int]], temperature: float | None) -> dict[str, Tensor]:
    """Columns of rows with logits [r,V]; ties go to the lowest id."""
    order = best_ids(logits, max(choose, TOP_LOGITS))
    chosen = torch.tensor(drawn, device=logits.device) if len(drawn) else order[:, :choose]
    top = order[:, :TOP_LOGITS]
    columns = {
        "lse": logits.logsumexp(-1).float(),
        "top_ids": top,
        "top_logits": logits.gather(-1, top).float(),
        "chosen_ids": chosen,
    }
    if temperature is not None:
        scaled = logits / temperature
        scores = (scaled.gather(-1, chosen) - scaled.logsumexp(-1, keepdim=True)).exp()
        columns["chosen_probs"] = scores.float()
    return columns
