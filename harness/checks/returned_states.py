"""Checks returned hidden states: a row for every token but the last, in order, once, and each that token's.

A row is the target's state at a place of the text. Prompt tokens that came from the prefix cache are not computed, and
have none. What it should hold is in the reference's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from harness.checks.answered import answered, at_token
from harness.checks.evidence import Evidence, Table, tabulate
from harness.checks.registry import CheckResult, register
from harness.contract.measured import judged_states
from harness.contract.requests import RequestSpec
from harness.contract.tolerance import budget_for
from harness.contract.types import Divergence, Kind, Phase

#: Where a state is: the name of its tensor in the reference, and its row there.
Source = tuple[str, int]


@register(id="returned_states", kinds=(Kind.SHAPE, Kind.NUMERIC), reads=("scenario", "engine", "reference"))
def check_returned_states(evidence: Evidence) -> CheckResult:
    """Hidden states that SGLang returns are those of the request's own tokens, each once and in order.

    SHAPE for rows that are missing, come again or stand elsewhere; NUMERIC for one that is of no token.
    """
    result = CheckResult()
    asked = [one for one in answered(evidence) if one[0].return_hidden_states]
    if not asked:
        return result
    truth = tabulate(evidence.truth.rows)
    for request, end, answer in asked:
        sources = _sources(truth, request.rid)
        expected = _expected(evidence, request, len(end.output_ids))
        if unknown := [place for place in expected if place not in sources]:
            result.unknown.append(
                f"states returned to {request.rid} not judged: the reference has none at {unknown[0]}"
            )
            continue
        rows = np.zeros((0, 1), dtype=np.float32) if answer.states is None else answer.states
        result.count("returned_states", len(rows))
        result.divergences += _faults(evidence, request, rows, expected, sources)
    return result


def _expected(evidence: Evidence, request: RequestSpec, output: int) -> list[int]:
    """Places of the text that have a row: what was computed of the prompt, and all of the output but the last."""
    parts = next(iter(evidence.attempts(request.rid)), [])
    return list(range(parts[0].start, len(request.input_ids) + output - 1)) if parts and output else []


def _sources(truth: Table, rid: str) -> dict[int, Source]:
    """Where the reference has the target's state at each place of a request's text."""
    found, slots, parents = dict[int, Source](), truth.ints["slot"], truth.ints["parent"]
    states = truth.ints["hidden_out"]
    for share, rows in truth.each(Phase.PREFILL):
        if share[1] == rid:
            found |= {share[3] + slots[row]: ("hidden_out.PREFILL", states[row]) for row in rows if states[row] >= 0}
    for share, rows in truth.each(Phase.ACCEPT):
        if share[1] == rid:
            nodes = {slots[row]: states[row] for row in truth.of(share, Phase.VERIFY)}
            kept = ((share[3] + slots[row], nodes.get(parents[row], -1)) for row in rows)
            found |= {place: ("hidden_out.VERIFY", at) for place, at in kept if at >= 0}
    return found


def _faults(
    evidence: Evidence, request: RequestSpec, rows: np.ndarray, expected: list[int], sources: dict[int, Source]
) -> Iterator[Divergence]:
    """One of each sort at most, at the first place."""
    places = _places(evidence, rows, expected, sources)
    found = dict[str, tuple[int, Kind, object, object]]()
    for number, place in enumerate(places):
        if place is None:
            at = expected[min(number, len(expected) - 1)] if expected else 0
            found.setdefault(
                "row-off", (at, Kind.NUMERIC, f"row {number}, of none of its tokens", f"the state at {at}")
            )
        elif place in places[:number]:
            found.setdefault("row-again", (place, Kind.SHAPE, "again", "once"))
    known = [place for place in places if place is not None]
    if any(later < earlier for earlier, later in pairwise(known)) and "row-again" not in found:
        found.setdefault("rows-in-other-order", (known[0], Kind.SHAPE, known, sorted(known)))
    for start, stop in ((0, len(request.input_ids)), (len(request.input_ids), len(expected) + len(request.input_ids))):
        missing = [place for place in expected if start <= place < stop and place not in known]
        if missing and len(rows) != len(expected):
            hint = "prompt-row-missing" if start == 0 else "row-missing"
            found.setdefault(hint, (missing[0], Kind.SHAPE, f"{len(missing)} missing", f"{len(expected)} rows"))
    for hint, (place, kind, observed, wanted) in found.items():
        yield at_token(evidence, request.rid, place + 1, kind=kind, observed=observed, expected=wanted, hint=hint)


def _places(evidence: Evidence, rows: np.ndarray, expected: list[int], sources: dict[int, Source]) -> list[int | None]:
    """The place that each row's state is of: the one it should be, else the first that fits; None if there is none."""
    if len(rows) == len(expected) and _fits(evidence, rows, [sources[place] for place in expected]).all():
        return list(expected)
    columns = {}
    for place in expected:
        columns[place] = _fits(evidence, rows, [sources[place]] * len(rows))
    found, following = list[int | None](), 0
    for number in range(len(rows)):
        fitting = [place for place in expected if columns[place][number]]
        nearest = min(fitting, key=lambda place: (place < following, place), default=None)
        found.append(nearest)
        following = following if nearest is None else nearest + 1
    return found


def _fits(evidence: Evidence, rows: np.ndarray, sources: list[Source]) -> np.ndarray:
    """bool [m]: whether rows [m,h] are these states, by the limits that states have."""
    fits = np.zeros(len(rows), dtype=np.bool_)
    for name in {name for name, _ in sources}:
        at = np.asarray([place for place, source in enumerate(sources) if source[0] == name], dtype=np.int64)
        if evidence.truth.tensors[name].shape[1] == rows.shape[1]:
            where = np.asarray([sources[place][1] for place in at.tolist()], dtype=np.int64)
            budget = budget_for(evidence.dtype)
            fits[at] = judged_states(evidence.truth, name, engine=rows[at], at=where, budget=budget).passed
    return fits
