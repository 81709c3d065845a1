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
from harness.contract.measured import judged_states
from harness.contract.tolerance import budget_for
from harness.contract.trace import RECURRENT, RECURRENT_ROWS, Event, Trace
from harness.contract.types import Divergence, Key, Kind, Policy

#: What is kept of a state: sums of matrices, and of the rows that a short convolution keeps.
PARTS = ("state", "conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lay in one request's slot when a forward began."""

    event: Event
    number: int

    def of(self, name: str) -> Any:
        return self.event.data[name][self.number]

    @property
    def life(self) -> tuple[int, str, int]:
        return self.event.dp_rank, self.of("rids"), self.of("attempts")

    def sums(self, part: str) -> np.ndarray:
        """float64 [w]; infinite where it was not finite."""
        return np.asarray([np.inf if one is None else one for one in self.of(part)], dtype=np.float64)


@register(id="recurrent", kinds=(Kind.STATE,), reads=("engine", "reference"))
def check_recurrent_states(evidence: Evidence) -> CheckResult:
    """Recurrent states that a forward continues from are those of the committed text and of nothing refused.

    STATE for each request and forward of its target that continues from another state than its text's.
    """
    result, reference = CheckResult(), evidence.reference
    assert reference is not None
    known = {
        (event.dp_rank, event.data["rid"], event.data["attempt"]): event.data
        for event in reference.named(RECURRENT_ROWS)
    }
    asked = []
    for one in _found(evidence.engine):
        if not one.of("committed"):
            continue  # nothing was read yet, and whoever begins does not look
        said = known.get(one.life)
        if said is None or one.of("committed") > said["length"]:
            note = f"recurrent states of {one.of('rids')} not judged where the reference has none"
            result.notes += [note] * (note not in result.notes)
            continue
        asked.append((one, said, said["first"] + one.of("committed") - 1))
    at = np.asarray([row for *_, row in asked], dtype=np.int64)
    judged = {part: _judged(evidence, reference, part, [one for one, *_ in asked], at) for part in PARTS}
    fits = {part: passed for part, (passed, _) in judged.items()}
    result.count("recurrent_states", int(sum(says.sum() for _, says in judged.values())))
    for number, (one, said, _) in enumerate(asked):
        wrong = [part for part in PARTS if not fits[part][number]]
        if wrong:
            result.divergences.append(_divergence(evidence, reference, one, said, known, wrong))
    return result


def _found(engine: Trace) -> Iterator[Found]:
    for event in engine.named(RECURRENT):
        yield from (Found(event=event, number=number) for number in range(len(event.data["rids"])))


def _judged(
    evidence: Evidence, reference: Trace, part: str, found: list[Found], at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(bool [m], bool [m]): whether states are those of the reference's rows `at`, by the limits that hidden states
    have, and whether that says anything."""
    name = f"{RECURRENT}.{part}"
    engine = np.stack([one.sums(part) for one in found]) if found else np.zeros((0, 0))
    if not found or reference.tensors[name].shape[1] != engine.shape[1]:
        return np.zeros(len(found), dtype=np.bool_), np.ones(len(found), dtype=np.bool_)
    errors = judged_states(reference, name, engine=engine, at=at, budget=budget_for(evidence.dtype))
    return errors.passed, errors.comparable


def _divergence(
    evidence: Evidence, reference: Trace, one: Found, said: Any, known: dict[Any, Any], wrong: list[str]
) -> Divergence:
    key = Key.of((*one.life, one.of("committed")), one.event.data["phase"])
    hint, observed = next(
        (
            (hint, text)
            for hint, text, row in _candidates(one, said, known)
            if _is(evidence, reference, one, wrong, row)
        ),
        ("", "of no text that is known here"),
    )
    if not any(one.sums(part).any() for part in wrong):
        hint, observed = "state-zeros", "zeros"
    return Divergence(
        kind=Kind.STATE,
        key=key,
        round=one.event.data["round"],
        expected=f"that of its {key.committed} tokens",
        observed=f"{observed} ({' and '.join(wrong)})",
        policy=Policy.BUDGET,
        hint=hint or f"{wrong[0]}-off",
    )


def _candidates(one: Found, said: Any, known: dict[Any, Any]) -> Iterator[tuple[str, str, int]]:
    """(hint, whose state, the reference's row of it) of what it could be instead, likely ones first."""
    committed, first = one.of("committed"), said["first"]
    if (row := said["refused"].get(str(committed))) is not None:
        yield "refused-kept", "that of a refused token behind them", row
    for away in range(1, 20):
        if committed - away > 0:
            yield "token-late", f"that of {committed - away}", first + committed - away - 1
        if committed + away <= said["length"]:
            yield "token-early", f"that of {committed + away}", first + committed + away - 1
    for life, other in known.items():
        for length in range(1, (other["length"] if life != one.life else 0) + 1):
            yield "neighbours-state", f"that of {length} tokens of {life[1]}", other["first"] + length - 1


def _is(evidence: Evidence, reference: Trace, one: Found, wrong: list[str], row: int) -> bool:
    return all(_judged(evidence, reference, part, [one], np.asarray([row]))[0][0] for part in wrong)
