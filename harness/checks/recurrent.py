"""Checks that the recurrent states of a request are those of its committed text whenever its target runs.

A state is all that its layer knows of the text. What a verify computed behind refused tokens, or a token that it did
not take in, stays there until the request ends, and costs acceptance from then on. The probe says what lies in the pool
(event 'recurrent', `harness.engine_side.probes.pool_probe`), the reference what should.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Share, shares_of
from harness.contract.measured import judged_states
from harness.contract.tolerance import budget_for
from harness.contract.trace import RECURRENT, RECURRENT_ROWS, Event, Trace
from harness.contract.types import Divergence, Key, Kind, Policy

#: What is kept of a state: sums of matrices, and of the rows that a short convolution keeps.
PARTS = ("state", "conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lay in one request's slot when a forward began: sums float64 [w] of each part, infinite where not finite."""

    event: Event
    share: Share
    sums: dict[str, np.ndarray]

    @property
    def committed(self) -> int:
        return self.share[3]


@register(id="recurrent", kinds=(Kind.STATE,), reads=("engine", "reference"))
def check_recurrent_states(evidence: Evidence) -> CheckResult:
    """Recurrent states that a forward continues from are those of the committed text and of nothing refused.

    STATE for each request and forward of its target that continues from another state than its text's.
    """
    result, truth = CheckResult(), evidence.truth
    known = {
        (event.dp_rank, event.data["rid"], event.data["attempt"]): event.data for event in truth.named(RECURRENT_ROWS)
    }
    asked = []
    for one in _found(evidence.engine):
        if not one.committed:
            continue  # nothing was read yet, and whoever begins does not look
        said = known.get(one.share[:3])
        if said is None or one.committed > said["length"]:
            note = f"recurrent states of {one.share[1]} not judged where the reference has none"
            result.notes += [note] * (note not in result.notes)
            continue
        asked.append((one, said["first"] + one.committed - 1))
    at = np.asarray([row for _, row in asked], dtype=np.int64)
    judged = {part: _judged(evidence, part, [one for one, _ in asked], at) for part in PARTS}
    fits = {part: passed for part, (passed, _) in judged.items()}
    result.count("recurrent_states", int(sum(says.sum() for _, says in judged.values())))
    for number, (one, _) in enumerate(asked):
        wrong = [part for part in PARTS if not fits[part][number]]
        if wrong:
            result.divergences.append(_divergence(evidence, one, known, wrong))
    return result


def _found(engine: Trace) -> Iterator[Found]:
    for event in engine.named(RECURRENT):
        for share, *sums in shares_of(event, *PARTS):
            wide = ([np.inf if one is None else one for one in part] for part in sums)
            found = dict(zip(PARTS, (np.asarray(part, dtype=np.float64) for part in wide), strict=True))
            yield Found(event=event, share=share, sums=found)


def _judged(evidence: Evidence, part: str, found: list[Found], at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bool [m], bool [m]): whether states are those of the reference's rows `at`, by the limits that hidden states
    have, and whether that says anything."""
    name = f"{RECURRENT}.{part}"
    engine = np.stack([one.sums[part] for one in found]) if found else np.zeros((0, 0))
    if not found or evidence.truth.tensors[name].shape[1] != engine.shape[1]:
        return np.zeros(len(found), dtype=np.bool_), np.ones(len(found), dtype=np.bool_)
    errors = judged_states(evidence.truth, name, engine=engine, at=at, budget=budget_for(evidence.dtype))
    return errors.passed, errors.comparable


def _divergence(evidence: Evidence, one: Found, known: dict[Any, Any], wrong: list[str]) -> Divergence:
    likely = ((hint, text) for hint, text, row in _candidates(one, known) if _is(evidence, one, wrong, row))
    hint, observed = next(likely, ("", "of no text that is known here"))
    if not any(one.sums[part].any() for part in wrong):
        hint, observed = "state-zeros", "zeros"
    return Divergence(
        kind=Kind.STATE,
        key=Key.of(one.share, one.event.data["phase"]),
        round=one.event.data["round"],
        expected=f"that of its {one.committed} tokens",
        observed=f"{observed} ({' and '.join(wrong)})",
        policy=Policy.BUDGET,
        hint=hint or f"{wrong[0]}-off",
    )


def _candidates(one: Found, known: dict[Any, Any]) -> Iterator[tuple[str, str, int]]:
    """(hint, whose state, the reference's row of it) of what it could be instead, likely ones first."""
    life = one.share[:3]
    committed, said = one.committed, known[life]
    first = said["first"]
    if (row := said["refused"].get(str(committed))) is not None:
        yield "refused-kept", "that of a refused token behind them", row
    for away in range(1, 20):
        if committed - away > 0:
            yield "token-late", f"that of {committed - away}", first + committed - away - 1
        if committed + away <= said["length"]:
            yield "token-early", f"that of {committed + away}", first + committed + away - 1
    for other, its in known.items():
        for length in range(1, (its["length"] if other != life else 0) + 1):
            yield "neighbours-state", f"that of {length} tokens of {other[1]}", its["first"] + length - 1


def _is(evidence: Evidence, one: Found, wrong: list[str], row: int) -> bool:
    return all(_judged(evidence, part, [one], np.asarray([row]))[0][0] for part in wrong)
