"""Rows of a mixture of experts whose routing nearly ties, in half precision: which of the reference's own answers fit.

Where a row of the engine is off by more than rounding, the reference runs again with its near ties turned around
(`reference.routing_ties`), a group of routers at a time. A row that is what such a run gives, within the same noise, is
a tie: that run's row takes the place of the first one, and the event 'routing' counts it. A row that is neither stays
as it was, and is wrong. Limits are those of the checks; this module must not have its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from harness.checks.compare import compare_choices, pairs_of
from harness.checks.evidence import gather
from harness.checks.numeric import compare_floats
from harness.contract.align import KEY_INTS, Ints
from harness.contract.rows import Ragged
from harness.contract.scenario import Scenario
from harness.contract.trace import Event, Trace
from harness.contract.types import Key, Kind, Phase
from reference.routing_ties import Measured, turned_ties, watched

#: Runs that turn ties of one group of routers around, beside the one that turns all.
MOST = 8
#: Phases whose rows a model computes.
STATED = tuple(phase for phase in Phase if phase is not Phase.ACCEPT)
#: Lists of a row that follow from its values.
DECIDED = ("top_ids", "top_logits", "chosen_ids", "chosen_probs")
#: Columns that say which row a row is, and where its states are.
SAME = (*KEY_INTS, "rid", "phase", "hidden_in", "hidden_out")
#: Replays in one dtype, "float32" or the engine's.
Replay = Callable[[], Trace]


def with_turned_ties(truth: Trace, engine: Trace, measured: Measured, again: Replay, scenario: Scenario) -> Trace:
    """`truth`, which has a second run beside it, with the answers of runs that turn ties around where only they fit.

    again: replays in float32 once more.
    """
    recorded, deviations = measured.recorded, measured.deviations()
    if not deviations or not any(name.startswith("own.") for name in truth.tensors):
        return truth
    wrong = first = _wrong(scenario, engine, truth)
    found = truth
    for one in turned_ties(recorded, deviations, MOST):
        if not wrong:
            break
        with watched(one):
            other = _beside(truth, again())
        if other is not None:
            left = wrong & _wrong(scenario, engine, other)
            found, wrong = _taken(found, other, np.asarray(sorted(wrong - left), dtype=np.int64)), left
    tied = sorted(first - wrong)
    if not tied:
        return truth
    data = {"rows": tied, "usual": measured.usual()}
    texts = tuple(_tied_text(found, event, tied, scenario) for event in found.events)
    return replace(found, events=(*texts, Event(name="routing", scheduler_step=0, data=data)))


def _wrong(scenario: Scenario, engine: Trace, reference: Trace) -> frozenset[int]:
    """Which reference rows have floats that are not within rounding of the engine's, or a choice that is no tie."""
    evidence, keys = gather(scenario.sampled, engine, reference), set[Key]()
    for phase in STATED:
        pairs = pairs_of(evidence, phase)
        for result in (compare_floats(pairs), compare_choices(pairs)) if len(pairs.engine) else ():
            keys |= {one.key for one in result.divergences if one.kind in (Kind.NUMERIC, Kind.TOKEN)}
    assert evidence.aligned is not None
    rows = evidence.aligned.reference.tolist() if keys else ()
    return frozenset(row for row in rows if reference.rows.key(row) in keys)


def _states(trace: Trace) -> Iterator[str]:
    return (name for name in trace.tensors if name.partition(".")[0] in ("hidden_in", "hidden_out"))


def _beside(truth: Trace, other: Trace) -> Trace | None:
    """`other` with the errors that the second run has from `truth`; None where it has not the same rows."""
    mine, theirs = ({**side.rows.ints, **side.rows.strings} for side in (truth, other))
    if len(truth.rows) != len(other.rows) or any((mine[name] != theirs[name]).any() for name in SAME):
        return None
    own = {
        f"own.{name}": other.tensors[name] + truth.tensors[f"own.{name}"] - truth.tensors[name]
        for name in _states(truth)
        if f"own.{name}" in truth.tensors
    }
    return replace(other, tensors={**truth.tensors, **other.tensors, **own})


def _taken(found: Trace, other: Trace, rows: Ints) -> Trace:
    """`found` with these rows as `other` has them."""
    if not len(rows):
        return found
    tensors, columns = dict(found.tensors), found.rows
    for name in _states(found):
        side, phase = name.split(".")
        at = columns.ints[side][rows[(columns.strings["phase"][rows] == phase)]]
        at = at[at >= 0]
        for one in (name, f"own.{name}"):
            if len(at) and one in tensors:
                tensors[one] = tensors[one].copy()
                tensors[one][at] = other.tensors[one][at]
    lists = {name: Ragged(column.values, column.offsets) for name, column in columns.lists.items()}
    lse = columns.floats["lse"].copy()
    lse[rows] = other.rows.floats["lse"][rows]
    for row in rows.tolist():
        for name in DECIDED:
            lists[name][row] = other.rows.lists[name][row]
    return replace(found, tensors=tensors, rows=replace(columns, floats={**columns.floats, "lse": lse}, lists=lists))


def _tied_text(found: Trace, event: Event, tied: Sequence[int], scenario: Scenario) -> Event:
    """A greedy text, whose margin is none where a row that is a tie chose."""
    if event.name != "greedy":
        return event
    columns, margins = found.rows, list(event.data["margins"])
    prompt = len(scenario.request(event.data["rid"]).input_ids)
    for row in tied:
        place = int(columns.ints["position"][row]) + 1 - prompt
        chose = columns.strings["phase"][row] in (Phase.PREFILL, Phase.VERIFY)
        if chose and columns.strings["rid"][row] == event.data["rid"] and 0 <= place < len(margins):
            margins[place] = 0.0
    return replace(event, data={**event.data, "margins": margins})
