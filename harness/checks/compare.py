"""Compares aligned rows of one phase, column by column: integers EXACT, choices TIE; floats are in `numeric`.

The checks in `reference_rows` call this with their own phases; no row is compared twice. This module must not decide
which rows exist: that is `align`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.positions import offset_hint
from harness.checks.registry import CheckResult
from harness.checks.selection import NearSelections
from harness.contract.align import Ints
from harness.contract.rows import Ragged, Rows
from harness.contract.tolerance import Budget, budget_for, choice_margin, tie_limit
from harness.contract.types import EXTENDING, TARGET, Divergence, Kind, Phase, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The aligned rows of one phase: row numbers on each side, [m] each."""

    evidence: Evidence
    phase: Phase
    engine: Ints
    reference: Ints
    budget: Budget

    @property
    def mine(self) -> Rows:
        return self.evidence.engine.rows

    @property
    def theirs(self) -> Rows:
        return self.evidence.truth.rows

    def lists(self, column: str) -> tuple[Ragged, Ragged]:
        """A list column of either side."""
        return self.mine.lists[column], self.theirs.lists[column]

    def lengths(self, column: str) -> tuple[Ints, Ints]:
        """How long the pairs' lists are on either side, [m] each."""
        mine, theirs = self.lists(column)
        return mine.lengths[self.engine], theirs.lengths[self.reference]

    def equal(self, column: str) -> np.ndarray:
        """Whether the pairs' lists are the same, bool [m]."""
        (mine, theirs), (ours, expected) = self.lists(column), self.lengths(column)
        same: np.ndarray = ours == expected
        for width in np.unique(ours[same]):
            at = np.flatnonzero(same & (ours == width))
            same[at] = (mine.stacked(self.engine[at]) == theirs.stacked(self.reference[at])).all(axis=1)
        return same

    def divergence(
        self,
        place: int,
        *,
        kind: Kind,
        expected: object,
        observed: object,
        policy: Policy = Policy.EXACT,
        hint: str,
        margin: float | None = None,
    ) -> Divergence:
        """A divergence at pair number `place`."""
        found = self.evidence.divergence(
            int(self.engine[place]), kind=kind, expected=expected, observed=observed, hint=hint
        )
        return replace(found, policy=policy, margin=margin)


def pairs_of(evidence: Evidence, phase: Phase) -> Pairs:
    """Aligned pairs of one phase, in engine order."""
    aligned = evidence.paired
    chosen = evidence.engine.rows.strings["phase"][aligned.engine] == str(phase)
    return Pairs(
        evidence=evidence,
        phase=phase,
        engine=aligned.engine[chosen],
        reference=aligned.reference[chosen],
        budget=budget_for(evidence.dtype_in(phase)),
    )


def compare_integers(pairs: Pairs) -> CheckResult:
    """EXACT: input ids, positions, parents. Parents only where the phase has them.

    Where another selection of beams or nodes is a tie, its integers are those of the other selection: one Tie. Where it
    is the best by the engine's own values, its integers are as right as these: compared as a choice, not EXACT.
    """
    result, near = CheckResult(), NearSelections(pairs.evidence, pairs.phase, pairs.budget)
    rotated = pairs.phase in EXTENDING
    inputs = Kind.EXTEND_INPUT if rotated else Kind.TOKEN
    plan = [("input_id", inputs, "extend_inputs" if rotated else "tokens", "reference-input")]
    plan.append(("position", Kind.POSITION, "positions", ""))
    if pairs.phase is Phase.VERIFY or _records_beams(pairs):
        plan.append(("parent", Kind.PARENT, "parents", "reference-parent"))
    for column, kind, counter, hint in plan:
        engine, truth = pairs.mine.ints[column][pairs.engine], pairs.theirs.ints[column][pairs.reference]
        if column == "input_id" and pairs.phase is Phase.PREFILL and (embedded := pairs.evidence.embedded):
            kept = ~np.isin(pairs.mine.strings["rid"][pairs.engine].astype(str), list(embedded))
            engine = np.where(kept, engine, truth)  # what stands there is no token, and nothing reads it
        result.count(counter, len(engine))
        for place in np.flatnonzero(engine != truth).tolist():
            if near.covers(int(pairs.engine[place]), int(pairs.reference[place]), column, result):
                continue
            expected, observed = int(truth[place]), int(engine[place])
            why, gap = hint or offset_hint(observed - expected), near.by_own_values(int(pairs.engine[place]), column)
            policy = Policy.EXACT if gap is None else Policy.TIE
            margin = None if gap is None or not np.isfinite(gap) else gap
            result.divergences.append(
                pairs.divergence(
                    place, kind=kind, expected=expected, observed=observed, hint=why, policy=policy, margin=margin
                )
            )
    return result


def _records_beams(pairs: Pairs) -> bool:
    """Whether this probe says which beam each draft row grew from."""
    return pairs.phase is Phase.DRAFT and bool((pairs.mine.ints["parent"][pairs.engine] >= 0).any())


def compare_choices(pairs: Pairs) -> CheckResult:
    """TIE: chosen ids, at every rank both sides recorded. A different number of choices is SHAPE."""
    result = CheckResult()
    counter = "tokens" if pairs.phase in TARGET else "proposals"
    if counter == "proposals" and pairs.evidence.scenario.engine.rejection_sampling:
        pairs = _of_greedy(pairs)  # others are drawn: whatever came is taken over, and judged by its probability
    ours, expected = pairs.lengths("chosen_ids")
    if not ours.any():
        return result  # this engine records none here: the counter stays at zero and the verdict says so
    result.count(counter, int(expected.sum()))
    result.choices += int(expected.sum())
    for place in np.flatnonzero((expected > 0) & (ours != expected)).tolist():
        wanted, seen = int(expected[place]), int(ours[place])
        result.divergences.append(
            pairs.divergence(place, kind=Kind.SHAPE, expected=wanted, observed=seen, hint="number-of-choices")
        )
    for place in np.flatnonzero((expected > 0) & (ours == expected) & ~pairs.equal("chosen_ids")).tolist():
        _judge_choice(pairs, place, result)
    return result


def _of_greedy(pairs: Pairs) -> Pairs:
    """Those of greedy requests."""
    greedy = [request.rid for request in pairs.evidence.scenario.requests if request.greedy]
    kept = np.isin(pairs.mine.strings["rid"][pairs.engine].astype(str), greedy)
    return replace(pairs, engine=pairs.engine[kept], reference=pairs.reference[kept])


def _judge_choice(pairs: Pairs, place: int, result: CheckResult) -> None:
    """One row whose choices differ: a tie at every rank that differs, or one TOKEN at the first that is not."""
    mine, theirs = int(pairs.engine[place]), int(pairs.reference[place])
    ours, expected = pairs.mine.lists["chosen_ids"][mine], pairs.theirs.lists["chosen_ids"][theirs]
    top_ids, top_logits = pairs.theirs.lists["top_ids"][theirs], pairs.theirs.lists["top_logits"][theirs]
    noise = float(pairs.evidence.logit_noise.expected[theirs])
    limit = tie_limit(scale=float(np.abs(top_logits).max(initial=0.0)), budget=pairs.budget, noise=noise)
    for rank in np.flatnonzero(ours != expected):
        wanted, got = int(expected[rank]), int(ours[rank])
        found = pairs.divergence(
            place,
            kind=Kind.TOKEN,
            expected=wanted,
            observed=got,
            policy=Policy.TIE,
            margin=choice_margin(top_ids=top_ids, top_logits=top_logits, expected=wanted, observed=got),
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
