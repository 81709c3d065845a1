"""Compares aligned rows of given phases, column by column: integers EXACT, choices TIE, floats BUDGET.

The families `chain`, `verify` and `extend` call this with their own phases; no row is compared twice. This module
must not decide which rows exist: that is `align`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.checks import selection
from harness.checks.evidence import Evidence
from harness.checks.positions import offset_hint
from harness.checks.registry import CheckResult, Tie
from harness.contract.align import Ints
from harness.contract.batches import Share
from harness.contract.tolerance import Budget, budget_for, choice_margin, tie_limit
from harness.contract.trace import Rows
from harness.contract.types import Divergence, Kind, Phase, Policy

ROTATED = (Phase.DRAFT_PREFILL, Phase.EXTEND)
TARGET = (Phase.PREFILL, Phase.VERIFY)
#: Phases whose inputs are a selection among what was proposed.
SELECTED = (Phase.DRAFT, Phase.VERIFY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The aligned rows of one phase: row numbers on each side, [m] each, and who is asking."""

    evidence: Evidence
    check: str
    phase: Phase
    engine: Ints
    reference: Ints
    budget: Budget

    @property
    def mine(self) -> Rows:
        return self.evidence.engine.rows

    @property
    def theirs(self) -> Rows:
        assert self.evidence.reference is not None
        return self.evidence.reference.rows

    def keep(self, chosen: np.ndarray) -> Pairs:
        """The pairs at the given places."""
        return Pairs(
            evidence=self.evidence,
            check=self.check,
            phase=self.phase,
            engine=self.engine[chosen],
            reference=self.reference[chosen],
            budget=self.budget,
        )

    def divergence(
        self,
        place: int,
        *,
        kind: Kind,
        expected: object,
        observed: object,
        policy: Policy,
        hint: str,
        margin: float | None = None,
    ) -> Divergence:
        """A divergence at pair number `place`."""
        index = int(self.engine[place])
        return Divergence(
            kind=kind,
            check=self.check,
            key=self.mine.key(index),
            round=int(self.mine.ints["round"][index]),
            expected=expected,
            observed=observed,
            policy=policy,
            margin=margin,
            hint=hint,
        )


def pairs_of(evidence: Evidence, check: str, phase: Phase) -> Pairs:
    """Aligned pairs of one phase, in engine order."""
    assert evidence.aligned is not None
    aligned = evidence.aligned
    chosen = evidence.engine.rows.strings["phase"][aligned.engine] == str(phase)
    return Pairs(
        evidence=evidence,
        check=check,
        phase=phase,
        engine=aligned.engine[chosen],
        reference=aligned.reference[chosen],
        budget=budget_for(evidence.dtype),
    )


def compare_integers(pairs: Pairs) -> CheckResult:
    """EXACT: input ids, positions, parents. Parents only where the phase has them.

    Where another selection of beams or nodes is a tie, its integers are those of the other selection: one Tie.
    """
    result, near = CheckResult(), _NearSelections(pairs)
    rotated = pairs.phase in ROTATED
    inputs = Kind.EXTEND_INPUT if rotated else Kind.TOKEN
    plan = [("input_id", inputs, "extend_inputs" if rotated else "tokens", "reference-input")]
    plan.append(("position", Kind.POSITION, "positions", ""))
    if pairs.phase is Phase.VERIFY or _records_beams(pairs):
        plan.append(("parent", Kind.PARENT, "parents", "reference-parent"))
    for column, kind, counter, hint in plan:
        engine, truth = pairs.mine.ints[column][pairs.engine], pairs.theirs.ints[column][pairs.reference]
        result.count(counter, len(engine))
        for place in np.flatnonzero(engine != truth):
            if near.covers(int(place), column, result):
                continue
            expected, observed = int(truth[place]), int(engine[place])
            result.divergences.append(
                pairs.divergence(
                    int(place),
                    kind=kind,
                    expected=expected,
                    observed=observed,
                    policy=Policy.EXACT,
                    hint=hint or offset_hint(observed - expected),
                )
            )
    return result


class _NearSelections:
    """Which selections of a tree's beams and nodes are ties; each is asked for once, and only if something differs."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._rounds: dict[Share, selection.Round | None] = {}
        self._known: dict[tuple[Share, int], bool] = {}

    def covers(self, place: int, column: str, result: CheckResult) -> bool:
        """Whether what differs at pair `place` follows from a selection that is a tie; noted in `result` once.

        A draft step's position does not depend on what was selected.
        """
        pairs = self._pairs
        if pairs.evidence.scenario.spec.t == 1 or pairs.phase not in SELECTED:
            return False
        if pairs.phase is Phase.DRAFT and column == "position":
            return False
        key = pairs.mine.key(int(pairs.engine[place]))
        share, step = (key.dp_rank, key.rid, key.epoch, key.committed), key.step
        if (share, step) not in self._known:
            self._known[share, step] = self._judge(place, share, step, result)
        return self._known[share, step]

    def _judge(self, place: int, share: Share, step: int, result: CheckResult) -> bool:
        pairs = self._pairs
        if share not in self._rounds:
            self._rounds[share] = selection.read_round(pairs.evidence, share)
        found = self._rounds[share]
        if found is None:
            return False
        gap = self._gap(found, share, step)
        limit = self._limit(found, levels=step + 1 if pairs.phase is Phase.DRAFT else len(found.levels))
        if not gap < limit:
            return False
        mine, theirs = int(pairs.engine[place]), int(pairs.reference[place])
        result.ties.append(
            Tie(
                check=pairs.check,
                key=pairs.mine.key(mine),
                round=int(pairs.mine.ints["round"][mine]),
                expected=int(pairs.theirs.ints["input_id"][theirs]),
                observed=int(pairs.mine.ints["input_id"][mine]),
                margin=max(gap, 0.0),
                limit=limit,
            )
        )
        return True

    def _gap(self, found: selection.Round, share: Share, step: int) -> float:
        if self._pairs.phase is Phase.DRAFT:
            return selection.beam_gap(found, step) if step < len(found.beams) else selection.NEVER
        table = self._pairs.evidence.table
        nodes = table.of(share, Phase.VERIFY)
        columns = ([table.ints[name][node] for node in nodes] for name in ("input_id", "parent"))
        return selection.tree_gap(found, *columns)

    def _limit(self, found: selection.Round, *, levels: int) -> float:
        """Path values add up the rounding of every level; the widest row's counts for each."""
        rows = self._pairs.theirs
        indices = np.asarray(found.rows, dtype=np.int64)
        limits = [
            tie_limit(
                scale=float(np.abs(rows.lists["top_logits"][row]).max(initial=0.0)),
                budget=self._pairs.budget,
                own_error=float(own),
            )
            for row, own in zip(found.rows, self._pairs.evidence.own_errors(indices), strict=True)
        ]
        return levels * max(limits, default=0.0)


def _records_beams(pairs: Pairs) -> bool:
    """Whether this probe says which beam each draft row grew from."""
    return pairs.phase is Phase.DRAFT and bool((pairs.mine.ints["parent"][pairs.engine] >= 0).any())


def compare_choices(pairs: Pairs) -> CheckResult:
    """TIE: chosen ids, at every rank both sides recorded. A different number of choices is SHAPE."""
    result = CheckResult()
    counter = "tokens" if pairs.phase in TARGET else "proposals"
    if counter == "proposals" and pairs.evidence.scenario.engine.rejection:
        return result  # drawn: whatever came is taken over, and judged by its probability
    engine, truth = pairs.mine.lists["chosen_ids"], pairs.theirs.lists["chosen_ids"]
    if not any(len(engine[mine]) for mine in pairs.engine.tolist()):
        return result  # this engine records none here: the counter stays at zero and the verdict says so
    for place, (mine, theirs) in enumerate(zip(pairs.engine.tolist(), pairs.reference.tolist(), strict=True)):
        ours, expected = engine[mine], truth[theirs]
        if not len(expected):
            continue
        result.count(counter, len(expected))
        result.choices += len(expected)
        if len(ours) != len(expected):
            result.divergences.append(
                pairs.divergence(
                    place,
                    kind=Kind.SHAPE,
                    expected=len(expected),
                    observed=len(ours),
                    policy=Policy.EXACT,
                    hint="number-of-choices",
                )
            )
        elif ours.tolist() != expected.tolist():
            _judge_choice(pairs, place, ours, expected, theirs, result)
    return result


def _judge_choice(
    pairs: Pairs, place: int, ours: np.ndarray, expected: np.ndarray, theirs: int, result: CheckResult
) -> None:
    """One row whose choices differ: a tie at every rank that differs, or one TOKEN at the first that is not."""
    top_ids, top_logits = pairs.theirs.lists["top_ids"][theirs], pairs.theirs.lists["top_logits"][theirs]
    scale = float(np.abs(top_logits).max(initial=0.0))
    own = float(pairs.evidence.own_errors(np.asarray([theirs]))[0])
    limit = tie_limit(scale=scale, budget=pairs.budget, own_error=own)
    for rank in np.flatnonzero(ours != expected):
        wanted, got = int(expected[rank]), int(ours[rank])
        margin = choice_margin(top_ids=top_ids, top_logits=top_logits, expected=wanted, observed=got)
        found = pairs.divergence(
            place,
            kind=Kind.TOKEN,
            expected=wanted,
            observed=got,
            policy=Policy.TIE,
            margin=margin,
            hint=_choice_hint(top_ids, wanted, got),
        )
        if not result.decide(found, limit=limit):
            return


def _choice_hint(top_ids: np.ndarray, wanted: int, got: int) -> str:
    """How far down the reference's own list the engine's choice is."""
    order = top_ids.tolist()
    if got not in order:
        return "choice-outside-top"
    near = wanted in order and abs(order.index(got) - order.index(wanted)) == 1
    return "choice-runner-up" if near else "choice-in-top"
