"""Compares two traces of one engine where they must agree: each request's draft inputs, positions and proposals.

Rows are joined by what they mean to the request, whatever the batch around it was. A draft row that lasts (prefill,
extend) is a function of the position: it must not matter in which chunk or round it came about. This module must not
know what was changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from harness.checks.findings import settle
from harness.contract.rows import Rows
from harness.contract.tolerance import Budget, budget_for, choice_margin, judge_rows, tie_limit
from harness.contract.trace import ENDS, Trace
from harness.contract.types import Divergence, Kind, Outcome, Phase, Policy

LASTING = (Phase.DRAFT_PREFILL, Phase.EXTEND)
#: Fewer rows in common than this say nothing.
LEAST_ROWS = 8

#: (rid, position, -1, -1) for a lasting row; (rid, committed length, step, slot) for a draft step.
Place = tuple[str, int, int, int]


@dataclass(slots=True, kw_only=True)
class RelationResult:
    """What a comparison found. compared: rows both traces have; ties: choices that were too close to call."""

    divergences: list[Divergence] = field(default_factory=list)
    compared: int = 0
    ties: int = 0
    unknown: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        if self.divergences:
            return Outcome.FAIL
        return Outcome.UNKNOWN if self.unknown else Outcome.PASS


def compare(before: Trace, after: Trace, *, check: str, dtype: str = "float32") -> RelationResult:
    """Differences of `after` from `before`, in order of time in `after`; the earlier is what was expected."""
    result = RelationResult()
    for name, trace in (("the scenario", before), ("the changed scenario", after)):
        ended = [event.name for event in trace.named(*ENDS)]
        result.unknown += [f"{name} ended early ({word}): its own verdict says more" for word in ended]
    comparison = _Comparison(before=before.rows, after=after.rows, check=check, budget=budget_for(dtype), result=result)
    comparison.lasting()
    comparison.steps()
    if result.compared < LEAST_ROWS:
        result.unknown.append(f"only {result.compared} rows in common, at least {LEAST_ROWS} are needed")
    scheduler_steps = {(record.dp_rank, record.index): record.scheduler_step for record in after.rounds}
    result.divergences = settle(result.divergences, scheduler_steps=scheduler_steps)
    return result


def _places(rows: Rows, phases: tuple[Phase, ...]) -> dict[Place, list[int]]:
    """Place -> its rows in order; a request that came back has several."""
    found: dict[Place, list[int]] = {}
    wanted = np.isin(rows.strings["phase"].astype(str), [str(phase) for phase in phases])
    for index in np.flatnonzero(wanted).tolist():
        rid = str(rows.strings["rid"][index])
        if phases == LASTING:
            place = (rid, int(rows.ints["position"][index]), -1, -1)
        else:
            committed, step, slot = (int(rows.ints[name][index]) for name in ("committed", "step", "slot"))
            place = (rid, committed, step, slot)
        found.setdefault(place, []).append(index)
    return found


@dataclass(slots=True, kw_only=True)
class _Comparison:
    before: Rows
    after: Rows
    check: str
    budget: Budget
    result: RelationResult
    #: (rid, committed length) -> draft steps up to which the two may be compared; a tie ends that
    tied: dict[tuple[str, int], int] = field(default_factory=dict)

    def lasting(self) -> None:
        """Draft prefill and extend rows; the proposals of the row before a committed length open its draft steps."""
        old, new = _places(self.before, LASTING), _places(self.after, LASTING)
        for place in sorted(old.keys() & new.keys()):
            for index in new[place]:
                if self._row(old[place][0], index, Kind.EXTEND_INPUT):
                    self.tied[place[0], place[1] + 1] = 0

    def steps(self) -> None:
        old, new = _places(self.before, (Phase.DRAFT,)), _places(self.after, (Phase.DRAFT,))
        for place in sorted(old.keys() & new.keys()):
            rid, committed, step, _ = place
            for index in new[place]:
                if step < self.tied.get((rid, committed), step + 1) and self._row(old[place][0], index, Kind.TOKEN):
                    self.tied[rid, committed] = step + 1

    def _row(self, old: int, new: int, input_kind: Kind) -> bool:
        """Compare one row; True if its choice was a tie, so that nothing after it can be compared."""
        self.result.compared += 1
        for column, kind in (("position", Kind.POSITION), ("input_id", input_kind)):
            expected, observed = int(self.before.ints[column][old]), int(self.after.ints[column][new])
            if expected != observed:
                self._report(new, kind, expected, observed, hint="input" if column == "input_id" else "position")
                return False
        return self._choices(old, new) or self._numbers(old, new)

    def _choices(self, old: int, new: int) -> bool:
        mine, theirs = self.before.lists["chosen_ids"][old], self.after.lists["chosen_ids"][new]
        for expected, observed in zip(mine.tolist(), theirs.tolist(), strict=False):
            if expected == observed:
                continue
            logits = self.before.lists["top_logits"][old]
            margin = choice_margin(
                top_ids=self.before.lists["top_ids"][old], top_logits=logits, expected=expected, observed=observed
            )
            if margin < tie_limit(scale=float(np.abs(logits).max(initial=0.0)), budget=self.budget):
                self.result.ties += 1
                return True
            self._report(new, Kind.TOKEN, expected, observed, hint="proposal", policy=Policy.TIE, margin=margin)
            return False
        return False

    def _numbers(self, old: int, new: int) -> bool:
        """Log-sum-exp of the logits: what a wrong state shows where the choice is still the same."""
        mine, theirs = self.before.floats["lse"][old : old + 1], self.after.floats["lse"][new : new + 1]
        if np.isnan(mine).any() or np.isnan(theirs).any():
            return False  # a row that has logits on one side only
        scale = np.abs(self.before.lists["top_logits"][old]).max(initial=0.0)
        errors = judge_rows(
            engine=theirs[None], truth=mine[None], budget=self.budget, scale=np.array([scale], dtype=np.float64)
        )
        if not errors.passed[0]:
            self._report(new, Kind.NUMERIC, float(mine[0]), float(theirs[0]), hint="log-sum-exp", policy=Policy.BUDGET)
        return False

    def _report(
        self,
        new: int,
        kind: Kind,
        expected: float,
        observed: float,
        *,
        hint: str,
        policy: Policy = Policy.EXACT,
        margin: float | None = None,
    ) -> None:
        self.result.divergences.append(
            Divergence(
                kind=kind,
                check=self.check,
                key=self.after.key(new),
                round=int(self.after.ints["round"][new]),
                expected=expected,
                observed=observed,
                policy=policy,
                margin=margin,
                hint=hint,
            )
        )
