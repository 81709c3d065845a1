"""A trace cut after its first wrong round: enough to look at a failure again without an engine.

It must not judge.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.trace import Rows, Trace
from harness.types import Divergence


def slice_to(trace: Trace, first: Divergence) -> Trace:
    """The trace up to and with the round of its first divergence, on every rank; side tensors cut to the rows kept.

    Ends and later events are gone, and the header says so under 'sliced_to'.
    """
    last = _tick_of(trace, first)
    rounds = tuple(record for record in trace.rounds if record.tick <= last)
    kept = {(record.dp_rank, record.index) for record in rounds}
    places = zip(trace.rows.ints["dp_rank"].tolist(), trace.rows.ints["round"].tolist(), strict=True)
    mask = np.array([place in kept for place in places], dtype=bool)
    rows, tensors = _cut(trace, mask)
    return replace(
        trace,
        header={**trace.header, "sliced_to": {"tick": last, "round": first.round}},
        rows=rows,
        rounds=rounds,
        ends=(),
        events=tuple(event for event in trace.events if event.tick <= last and event.name != "pool"),
        tensors=tensors,
    )


def _tick_of(trace: Trace, first: Divergence) -> int:
    ticks = [r.tick for r in trace.rounds if r.index == first.round and r.dp_rank == first.key.dp_rank]
    return max(ticks, default=max((record.tick for record in trace.rounds), default=0))


def _cut(trace: Trace, mask: np.ndarray) -> tuple[Rows, dict[str, np.ndarray]]:
    """The rows under a mask, and of each side tensor only what they point at."""
    rows = trace.rows
    ints = {name: column[mask] for name, column in rows.ints.items()}
    phases = rows.strings["phase"][mask]
    tensors = {}
    for name, tensor in trace.tensors.items():
        column, _, phase = name.removeprefix("own.").partition(".")
        if column not in ints:
            tensors[name] = tensor[mask] if len(tensor) == len(mask) else tensor  # own.logits: one entry a row
            continue
        points = (phases == phase) & (ints[column] >= 0)
        tensors[name] = tensor[ints[column][points]]
    for column in ("hidden_in", "hidden_out"):
        for phase in set(phases):
            points = (phases == phase) & (ints[column] >= 0)
            ints[column][points] = np.arange(points.sum())
    indices = np.flatnonzero(mask).tolist()
    cut = Rows(
        ints=ints,
        strings={name: column[mask] for name, column in rows.strings.items()},
        floats={name: column[mask] for name, column in rows.floats.items()},
        lists={name: [column[index] for index in indices] for name, column in rows.lists.items()},
    )
    return cut, tensors
