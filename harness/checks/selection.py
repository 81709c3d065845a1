"""Near ties in tree selection: which beams grow on, and which candidates become the verified tree.

A selection compares path values, which carry the rounding of every level, so an engine in half precision may take
another candidate of nearly the same value: one tie, and the integers that follow are those of the other selection.
Where the values themselves are wrong, the engine may still have selected the best by its own: then what differs follows
from the values, and is no fault of the selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, Tie
from harness.contract.batches import Share
from harness.contract.tolerance import Budget, tie_limit
from harness.contract.types import Phase

NEVER = float("inf")
#: Phases whose inputs are a selection among what was proposed.
SELECTED = (Phase.DRAFT, Phase.VERIFY)
#: What rounding does to the logarithm of a product of some float32 probabilities; the logarithm of the least there is.
OWN_ROUNDING, LEAST = 1e-5, math.log(1.4e-45)

#: Engine row -> the log-probability of each token that it proposed, and the reference row it is from (-1: the engine's
#: own); None where that is not known.
Values = Callable[[int], "tuple[dict[int, float], int] | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One proposal of a round: its token, the candidate it grew from (-1: the root) and its path's log-probability."""

    token: int
    parent: int
    value: float


@dataclass(slots=True, kw_only=True)
class Round:
    """What one request's draft steps proposed, with the reference's values. beams[i]: candidates fed at step i.

    levels[i]: the candidates that step i chose its beams from. rows: the reference rows the values come from.
    """

    candidates: list[Candidate] = field(default_factory=list)
    levels: list[list[int]] = field(default_factory=list)
    beams: list[list[int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def read_round(evidence: Evidence, share: Share, values: Values) -> Round | None:
    """The round of a share by its engine rows; None where a proposal or its value is not known."""
    first, found = _first_proposals(evidence, share), Round()
    if first is None or not _propose(evidence, found, [(-1, first)], values):
        return None
    steps = evidence.table.of(share, Phase.DRAFT)
    for step in sorted({evidence.table.ints["step"][row] for row in steps}):
        rows = [row for row in steps if evidence.table.ints["step"][row] == step]
        beams = _locate(found, [evidence.table.ints["input_id"][row] for row in rows])
        if beams is None:
            return None
        found.beams.append(beams)
        if not _propose(evidence, found, list(zip(beams, rows, strict=True)), values):
            return None
    return found


def by_reference(evidence: Evidence) -> Values:
    """What the reference says of each row."""
    answers = dict(zip(evidence.paired.engine.tolist(), evidence.paired.reference.tolist(), strict=True))
    rows = evidence.truth.rows

    def values(row: int) -> tuple[dict[int, float], int] | None:
        answer = answers.get(row)
        if answer is None:
            return None
        tokens, logits = rows.lists["top_ids"][answer].tolist(), rows.lists["top_logits"][answer].tolist()
        lse = float(rows.floats["lse"][answer])
        return {token: logit - lse for token, logit in zip(tokens, logits, strict=True)}, answer

    return values


def by_engine(evidence: Evidence) -> Values:
    """What the engine itself said of each row, by the scores it attached to its proposals."""
    scores = evidence.engine.rows.lists["chosen_probs"]

    def values(row: int) -> tuple[dict[int, float], int] | None:
        logs = [math.log(score) if score > 0 else LEAST for score in scores[row].tolist()]
        return dict(zip(evidence.table.chosen(row), logs, strict=True)) if logs else {}, -1

    return values


def _first_proposals(evidence: Evidence, share: Share) -> int | None:
    """The engine row that made the first proposals: the last draft row of the request's part before."""
    parts = evidence.parts.get((share[1], share[2]), [])
    before = [part for part in parts if part.start + part.length == share[3] and part.share != share]
    for part in reversed(before):
        for phase in (Phase.EXTEND, Phase.DRAFT_PREFILL):
            rows = evidence.table.of(part.share, phase)
            if rows and evidence.table.chosen(rows[-1]):
                return rows[-1]
    return None


def _propose(evidence: Evidence, found: Round, beams: Sequence[tuple[int, int]], values: Values) -> bool:
    """Add what each (candidate, engine row) proposed; False if the value of one of them is not known."""
    level = []
    for parent, row in beams:
        said = values(row)
        if said is None or not evidence.table.chosen(row):
            return False
        logs, answer = said
        base = found.candidates[parent].value if parent >= 0 else 0.0
        found.rows.append(answer)
        for token in evidence.table.chosen(row):
            if token not in logs:
                return False
            level.append(len(found.candidates))
            found.candidates.append(Candidate(token=token, parent=parent, value=base + logs[token]))
    found.levels.append(level)
    return True


def _locate(found: Round, tokens: Sequence[int]) -> list[int] | None:
    """The newest candidates with these tokens, each once, the best first; None if one was never proposed."""
    free = sorted(found.levels[-1], key=lambda index: -found.candidates[index].value)
    beams = []
    for token in tokens:
        fits = [index for index in free if found.candidates[index].token == token]
        if not fits:
            return None
        beams.append(fits[0])
        free.remove(fits[0])
    return beams


def beam_gap(found: Round, step: int) -> float:
    """Greatest difference of value between a beam that was fed and the one that stood in its place."""
    fed = found.beams[step]
    best = sorted(found.levels[step], key=lambda index: -found.candidates[index].value)[: len(fed)]
    pairs = zip(fed, best, strict=True)
    return max(abs(found.candidates[one].value - found.candidates[other].value) for one, other in pairs)


def tree_gap(found: Round, tokens: Sequence[int], parents: Sequence[int]) -> float:
    """How much better the best candidate left out is than the worst one taken; NEVER if it is no tree of candidates.

    tokens, parents [n] by slot, the root first.
    """
    places = {(one.parent, one.token): index for index, one in reversed(list(enumerate(found.candidates)))}
    taken = [-1]
    for token, parent in list(zip(tokens, parents, strict=True))[1:]:
        index = places.get((taken[parent], token)) if 0 <= parent < len(taken) else None
        if index is None:
            return NEVER
        taken.append(index)
    if taken != sorted(set(taken)):
        return NEVER
    values = np.asarray([one.value for one in found.candidates])
    left = np.delete(values, taken[1:])
    return float(left.max(initial=-NEVER) - values[taken[1:]].min(initial=NEVER)) if len(left) else 0.0


class NearSelections:
    """Which selections of a tree's beams and nodes are ties; each is asked for once, and only if something differs."""

    def __init__(self, evidence: Evidence, phase: Phase, budget: Budget) -> None:
        self._evidence, self._phase, self._budget = evidence, phase, budget
        self._rounds: dict[tuple[Share, bool], Round | None] = {}
        self._known: dict[tuple[Share, int], bool] = {}

    def covers(self, mine: int, theirs: int, column: str, result: CheckResult) -> bool:
        """Whether what differs between two rows follows from a selection that is a tie; noted in `result` once."""
        if not self._selected(column):
            return False
        share, step = self._place(mine)
        if (share, step) not in self._known:
            self._known[share, step] = self._judge(mine, theirs, share, step, result)
        return self._known[share, step]

    def by_own_values(self, mine: int, column: str) -> float | None:
        """The selection's gap by the reference's values, where by the engine's own it is the best; else None."""
        if not self._selected(column):
            return None
        share, step = self._place(mine)
        own = self._gap(share, step, by_engine)
        return self._gap(share, step, by_reference) if own < OWN_ROUNDING else None

    def _selected(self, column: str) -> bool:
        """Whether a column says what was selected; a draft step's position does not depend on it."""
        if self._evidence.scenario.spec.eagle_topk == 1 or self._phase not in SELECTED:
            return False
        return self._phase is not Phase.DRAFT or column != "position"

    def _place(self, mine: int) -> tuple[Share, int]:
        key = self._evidence.engine.rows.key(mine)
        return key.share, key.step

    def _round(self, share: Share, whose: Callable[[Evidence], Values]) -> Round | None:
        name = (share, whose is by_engine)
        if name not in self._rounds:
            self._rounds[name] = read_round(self._evidence, share, whose(self._evidence))
        return self._rounds[name]

    def _judge(self, mine: int, theirs: int, share: Share, step: int, result: CheckResult) -> bool:
        found = self._round(share, by_reference)
        if found is None:
            return False
        gap = self._gap(share, step, by_reference)
        limit = self._limit(found, levels=step + 1 if self._phase is Phase.DRAFT else len(found.levels))
        if not gap < limit:
            return False
        ours, truth = self._evidence.engine.rows, self._evidence.truth.rows
        result.ties.append(
            Tie(
                key=ours.key(mine),
                round=int(ours.ints["round"][mine]),
                expected=int(truth.ints["input_id"][theirs]),
                observed=int(ours.ints["input_id"][mine]),
                margin=max(gap, 0.0),
                limit=limit,
            )
        )
        return True

    def _gap(self, share: Share, step: int, whose: Callable[[Evidence], Values]) -> float:
        found = self._round(share, whose)
        if found is None:
            return NEVER
        if self._phase is Phase.DRAFT:
            return beam_gap(found, step) if step < len(found.beams) else NEVER
        table = self._evidence.table
        nodes = table.of(share, Phase.VERIFY)
        columns = ([table.ints[name][node] for node in nodes] for name in ("input_id", "parent"))
        return tree_gap(found, *columns)

    def _limit(self, found: Round, *, levels: int) -> float:
        """Path values add up the rounding of every level; the widest row's counts for each."""
        scales = self._evidence.truth.rows.lists["top_logits"].greatest(found.rows).tolist()
        noise = self._evidence.logit_noise.expected
        limits = [
            tie_limit(scale=scale, budget=self._budget, noise=float(noise[row]))
            for scale, row in zip(scales, found.rows, strict=True)
        ]
        return levels * max(limits, default=0.0)
