"""BUDGET comparison of aligned rows: hidden rows, top logits, log-sum-exp, scores.

One NUMERIC a row: the first of these that fails names the row, since the later ones follow from it. This module must
not touch integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from harness.checks.compare import Pairs
from harness.checks.registry import CheckResult
from harness.contract.align import Ints
from harness.contract.measured import judged_logits, judged_states
from harness.contract.noise import Flags, Floats, RowErrors
from harness.contract.tolerance import Budget, budget_for, judge_rows
from harness.contract.types import Kind, Policy

#: Layers of the target whose states an EAGLE-3 head reads (arXiv 2503.01840, section 3.1).
FEATURES = 3


def compare_floats(pairs: Pairs) -> CheckResult:
    """NUMERIC and SHAPE for the pairs of one phase."""
    found = _Floats(pairs=pairs)
    for side in ("hidden_in", "hidden_out"):
        found.hidden(side)
    found.logits()
    found.lse()
    found.scores()
    return found.result


@dataclass(slots=True, kw_only=True)
class _Floats:
    """One phase's comparison. failed: places of pairs that are named already."""

    pairs: Pairs
    result: CheckResult = field(default_factory=CheckResult)
    failed: set[int] = field(default_factory=set)

    def hidden(self, side: str) -> None:
        """Rows of tensors['<side>.<PHASE>'] where both sides have one."""
        name, evidence = f"{side}.{self.pairs.phase}", self.pairs.evidence
        pairs = replace(self.pairs, budget=budget_for(evidence.dtype_in(self.pairs.phase, side)))
        mine, theirs = evidence.engine.tensors.get(name), evidence.truth.tensors.get(name)
        if mine is None or theirs is None:
            return
        at_mine, at_theirs = pairs.mine.ints[side][pairs.engine], pairs.theirs.ints[side][pairs.reference]
        both = np.flatnonzero((at_mine >= 0) & (at_theirs >= 0))
        # Every row of a phase reads a state; which rows hand one on may differ between releases.
        absent = (at_mine < 0) & (at_theirs >= 0) & (side == "hidden_in") & (at_mine >= 0).any()
        for place in np.flatnonzero(absent).tolist():
            self._shape(place, theirs.shape[1], 0, f"{side}-absent")
        if mine.shape[1] != theirs.shape[1]:
            for place in both.tolist():
                self._shape(place, theirs.shape[1], mine.shape[1], f"{side}-width")
            return
        errors = judged_states(
            evidence.truth, name, engine=mine[at_mine[both]], at=at_theirs[both], budget=pairs.budget
        )
        said = errors.comparable | ~errors.passed
        self.result.count("hidden_rows", int(said.sum()))
        self.result.indistinct += int((~said).sum())
        wrong = np.flatnonzero(~errors.passed)
        hints = _hidden_hints(pairs, mine[at_mine[both[wrong]]], at_theirs[both[wrong]], theirs)
        hints = [
            hint if hint != "off" else _explained(pairs, side, int(place), mine[at_mine[place]], at_theirs)
            for place, hint in zip(both[wrong].tolist(), hints, strict=True)
        ]
        for row, hint in zip(wrong.tolist(), hints, strict=True):
            self._report(int(both[row]), errors, row, f"{side}-{hint}", width=mine.shape[1], budget=pairs.budget)

    def logits(self) -> None:
        """Top logits: the engine's value against the reference's, for every id both lists have."""
        pairs = self.pairs
        at, noise = {"mine": pairs.engine, "theirs": pairs.reference}, pairs.evidence.logit_noise
        for found in judged_logits(pairs.mine, pairs.theirs, **at, budget=pairs.budget, noise=noise):
            self.result.count("logits", int(found.shared.sum()))
            for row in np.flatnonzero(~found.errors.passed | ~found.shared).tolist():
                hint = "logits-off" if np.isfinite(found.logits[row]).all() else "logits-nan"
                hint = hint if found.shared[row] else "logits-other-tokens"
                self._report(int(found.places[row]), found.errors, row, hint, width=found.logits.shape[1])

    def lse(self) -> None:
        """Log-sum-exp, where the row has logits on both sides. An engine that records none here is not asked."""
        pairs = self.pairs
        mine, theirs = pairs.mine.floats["lse"][pairs.engine], pairs.theirs.floats["lse"][pairs.reference]
        ours, expected = pairs.lengths("top_ids")
        places = np.flatnonzero((ours > 0) & (expected > 0))
        if not len(places) or np.isnan(mine[places]).all():
            return
        tops = pairs.theirs.lists["top_logits"].greatest(pairs.reference[places])
        errors = judge_rows(
            engine=mine[places, None],
            truth=theirs[places, None],
            budget=pairs.budget,
            allowed=pairs.evidence.logit_noise.limit[pairs.reference[places]],
            scale=np.maximum(np.abs(theirs[places]).astype(np.float64), tops),
        )
        for row in np.flatnonzero(~errors.passed).tolist():
            self._report(int(places[row]), errors, row, "lse-off", width=1)

    def scores(self) -> None:
        """Scores of the chosen ids, where both sides chose the same ids.

        With t = 1 a release from 0.5.13 on takes the argmax and reports 1.0 for every row: that says nothing.
        """
        pairs, same_choices = self.pairs, self.pairs.equal("chosen_ids")
        for places in _groups(pairs, "chosen_probs"):
            engine, truth = _stacked(pairs, "chosen_probs", places)
            if engine.shape != truth.shape:
                continue  # already SHAPE by the number of choices
            asked = same_choices[places]
            if pairs.evidence.scenario.spec.eagle_topk == 1:
                asked &= ~(engine == 1.0).all(axis=1)
            # p moves by p(1-p) of what two logits move against each other, so by half of what each moves at most
            allowed = pairs.evidence.logit_noise.limit[pairs.reference[places]] / 2
            errors = judge_rows(engine=engine, truth=truth, budget=pairs.budget, allowed=allowed)
            for row in np.flatnonzero(asked & ~errors.passed).tolist():
                self._report(int(places[row]), errors, row, "scores-off", width=engine.shape[1])

    def _shape(self, place: int, expected: int, observed: int, hint: str) -> None:
        self.failed.add(place)
        found = self.pairs.divergence(place, kind=Kind.SHAPE, expected=expected, observed=observed, hint=hint)
        self.result.divergences.append(found)

    def _report(
        self, place: int, errors: RowErrors, row: int, hint: str, *, width: int, budget: Budget | None = None
    ) -> None:
        """NUMERIC at `place`, unless the row has already been named. budget: where it is not the phase's."""
        if place in self.failed:
            return
        self.failed.add(place)
        observed = {
            "greatest_abs": _number(errors.greatest_abs[row]),
            "greatest_rel": _number(errors.greatest_rel[row]),
            "at": int(errors.column[row]),
            "mismatched": int(errors.mismatched[row]),
            "of": width,
        }
        expected = {"limit_abs": float(errors.limit[row]), "policy": (budget or self.pairs.budget).dtype}
        self.result.divergences.append(
            self.pairs.divergence(
                place, kind=Kind.NUMERIC, expected=expected, observed=observed, policy=Policy.BUDGET, hint=hint
            )
        )


def _hidden_hints(pairs: Pairs, wrong: Floats, at_theirs: Ints, theirs: Floats) -> list[str]:
    """For each failing row of wrong [m, w]: nan, zeros, previous-row, next-row (of the reference) or off."""
    hints = np.full(len(wrong), "off", dtype=object)
    for step, name in ((-1, "previous-row"), (1, "next-row")):
        beside = at_theirs + step
        exists = (beside >= 0) & (beside < len(theirs))
        truth = theirs[np.where(exists, beside, 0)]
        hints[exists & judge_rows(engine=wrong, truth=truth, budget=pairs.budget).passed] = name
    hints[~wrong.any(axis=1)] = "zeros"
    hints[~np.isfinite(wrong).all(axis=1)] = "nan"
    return [str(hint) for hint in hints]


def _explained(pairs: Pairs, side: str, place: int, wrong: Floats, at_theirs: Ints) -> str:
    """The smallest change to the reference that gives a failing row [w] at pair `place`; off if none is found.

    A row of the same batch; of a state that was handed on, one feature of several, or what this request had handed on
    in another round.
    """
    theirs = pairs.evidence.truth.tensors[f"{side}.{pairs.phase}"]
    hint = _neighbour(pairs, place, wrong, at_theirs, theirs)
    if hint != "off" or side != "hidden_in":
        return hint
    return _features(pairs, wrong, theirs[at_theirs[place]]) or _of_another_round(pairs, place, wrong) or "off"


def _features(pairs: Pairs, wrong: Floats, truth: Floats) -> str:
    """Which of the features that an EAGLE-3 head reads side by side are off, where some are and some are not."""
    if pairs.evidence.scenario.spec.algorithm != "EAGLE3" or len(wrong) % FEATURES:
        return ""
    engine, expected = (np.asarray(np.split(row, FEATURES), dtype=np.float32) for row in (wrong, truth))
    passed = judge_rows(engine=engine, truth=expected, budget=pairs.budget).passed
    off = [str(number) for number in np.flatnonzero(~passed)]
    return f"feature-{'-'.join(off)}" if len(off) < FEATURES else ""


def _of_another_round(pairs: Pairs, place: int, wrong: Floats) -> str:
    """Whether the request was given, or left, this state in another round; in half precision others pass for it."""
    if pairs.budget.dtype != "float32":
        return ""
    rows, here = pairs.theirs, int(pairs.reference[place])
    same = (rows.strings["rid"] == rows.strings["rid"][here]) & (rows.ints["round"] != rows.ints["round"][here])
    for side in ("hidden_in", "hidden_out"):
        for phase in sorted(set(rows.strings["phase"][same])):
            states = pairs.evidence.truth.tensors.get(f"{side}.{phase}")
            at = rows.ints[side][same & (rows.strings["phase"] == phase)]
            at = at[at >= 0]
            if states is None or not len(at) or states.shape[1] != len(wrong):
                continue
            if _is_row_of(pairs, wrong, states[at]).any():
                return "own-state-of-another-round"
    return ""


def _is_row_of(pairs: Pairs, wrong: Floats, truth: Floats) -> Flags:
    """bool [m]: which rows of truth [m,w] a row [w] could be."""
    engine = np.asarray(np.repeat(wrong[None], len(truth), axis=0), dtype=np.float32)
    return judge_rows(engine=engine, truth=truth, budget=pairs.budget).passed


def _neighbour(pairs: Pairs, place: int, wrong: Floats, at_theirs: Ints, theirs: Floats) -> str:
    """Whose row of the same batch a failing row [w] at pair `place` is by the reference, if it is one; else off."""
    ints, rids = pairs.mine.ints, pairs.mine.strings["rid"]
    rounds, ranks = ints["round"][pairs.engine], ints["dp_rank"][pairs.engine]
    beside = np.flatnonzero((rounds == rounds[place]) & (ranks == ranks[place]) & (at_theirs >= 0))
    beside = beside[beside != place]
    if not len(beside):
        return "off"
    same = _is_row_of(pairs, wrong, theirs[at_theirs[beside]])
    if not same.any():
        return "off"
    own = rids[pairs.engine[beside[same]]] == rids[pairs.engine[place]]
    return "own-other-row" if own.any() else "neighbours-row"


def _groups(pairs: Pairs, column: str) -> Iterator[Ints]:
    """Places of pairs with a list on both sides, grouped by how long these are, so that each group stacks."""
    mine, theirs = pairs.lengths(column)
    for lengths in {*zip(mine.tolist(), theirs.tolist(), strict=True)}:
        if all(lengths):
            yield np.flatnonzero((mine == lengths[0]) & (theirs == lengths[1]))


def _stacked(pairs: Pairs, column: str, places: Ints) -> tuple[np.ndarray, np.ndarray]:
    """A list column of either side at these places [m]: [m, w] each."""
    mine, theirs = pairs.lists(column)
    return mine.stacked(pairs.engine[places]), theirs.stacked(pairs.reference[places])


def _number(value: float) -> float | str:
    """A divergence must come back from disk as it was, and JSON has no infinity."""
    return float(value) if np.isfinite(value) else "not finite"
