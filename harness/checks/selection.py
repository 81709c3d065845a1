"""Near ties in tree selection: which beams grow on, and which candidates become the verified tree.

A selection compares path values, which carry the rounding of every level, so an engine in half precision may take
another candidate of nearly the same value: one tie, and the integers that follow are those of the other selection.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def read_round(evidence: Evidence, share: Share) -> Round | None:
    """The round of a share by its engine rows; None where a proposal or its value is not known."""
    assert evidence.aligned is not None
    answers = dict(zip(evidence.aligned.engine.tolist(), evidence.aligned.reference.tolist(), strict=True))
    first, found = _first_proposals(evidence, share), Round()
    if first is None or not _propose(evidence, found, [(-1, first)], answers):
        return None
    steps = evidence.table.of(share, Phase.DRAFT)
    for step in sorted({evidence.table.ints["step"][row] for row in steps}):
        rows = [row for row in steps if evidence.table.ints["step"][row] == step]
        beams = _locate(found, [evidence.table.ints["input_id"][row] for row in rows])
        if beams is None:
            return None
        found.beams.append(beams)
        if not _propose(evidence, found, list(zip(beams, rows, strict=True)), answers):
            return None
    return found


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


def _propose(evidence: Evidence, found: Round, beams: Sequence[tuple[int, int]], answers: dict[int, int]) -> bool:
    """Add what each (candidate, engine row) proposed; False if the reference has no value for one of them."""
    assert evidence.reference is not None
    level = []
    for parent, row in beams:
        answer = answers.get(row)
        if answer is None or not evidence.table.chosen(row):
            return False
        rows = evidence.reference.rows
        logits = dict(
            zip(rows.lists["top_ids"][answer].tolist(), rows.lists["top_logits"][answer].tolist(), strict=True)
        )
        base = (found.candidates[parent].value if parent >= 0 else 0.0) - float(rows.floats["lse"][answer])
        found.rows.append(answer)
        for token in evidence.table.chosen(row):
            if token not in logits:
                return False
            level.append(len(found.candidates))
            found.candidates.append(Candidate(token=token, parent=parent, value=base + logits[token]))
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
        self._rounds: dict[Share, Round | None] = {}
        self._known: dict[tuple[Share, int], bool] = {}

    def covers(self, mine: int, theirs: int, column: str, result: CheckResult) -> bool:
        """Whether what differs between two rows follows from a selection that is a tie; noted in `result` once.

        A draft step's position does not depend on what was selected.
        """
        if self._evidence.scenario.spec.eagle_topk == 1 or self._phase not in SELECTED:
            return False
        if self._phase is Phase.DRAFT and column == "position":
            return False
        key = self._evidence.engine.rows.key(mine)
        share, step = (key.dp_rank, key.rid, key.attempt, key.committed), key.step
        if (share, step) not in self._known:
            self._known[share, step] = self._judge(mine, theirs, share, step, result)
        return self._known[share, step]

    def _judge(self, mine: int, theirs: int, share: Share, step: int, result: CheckResult) -> bool:
        if share not in self._rounds:
            self._rounds[share] = read_round(self._evidence, share)
        found = self._rounds[share]
        if found is None:
            return False
        gap = self._gap(found, share, step)
        limit = self._limit(found, levels=step + 1 if self._phase is Phase.DRAFT else len(found.levels))
        if not gap < limit:
            return False
        assert self._evidence.reference is not None
        ours, truth = self._evidence.engine.rows, self._evidence.reference.rows
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

    def _gap(self, found: Round, share: Share, step: int) -> float:
        if self._phase is Phase.DRAFT:
            return beam_gap(found, step) if step < len(found.beams) else NEVER
        table = self._evidence.table
        nodes = table.of(share, Phase.VERIFY)
        columns = ([table.ints[name][node] for node in nodes] for name in ("input_id", "parent"))
        return tree_gap(found, *columns)

    def _limit(self, found: Round, *, levels: int) -> float:
        """Path values add up the rounding of every level; the widest row's counts for each."""
        assert self._evidence.reference is not None
        logits = self._evidence.reference.rows.lists["top_logits"]
        noise = self._evidence.logit_noise.expected
        limits = [
            tie_limit(scale=float(np.abs(logits[row]).max(initial=0.0)), budget=self._budget, noise=float(noise[row]))
            for row in found.rows
        ]
        return levels * max(limits, default=0.0)
