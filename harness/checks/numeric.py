"""BUDGET comparison of aligned rows: hidden rows, top logits, log-sum-exp, scores.

One NUMERIC a row: the first of these that fails names the row, since the later ones follow from it. This module must
not touch integers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from harness.checks.compare import Pairs
from harness.checks.registry import CheckResult
from harness.contract.align import Ints
from harness.contract.tolerance import Floats, RowErrors, judge_rows
from harness.contract.trace import Rows
from harness.contract.types import Divergence, Kind, Policy

Bools = npt.NDArray[np.bool_]
Singles = npt.NDArray[np.float32]


def compare_floats(pairs: Pairs) -> CheckResult:
    """NUMERIC and SHAPE for the pairs of one phase."""
    result = CheckResult()
    failed: set[int] = set()
    for side in ("hidden_in", "hidden_out"):
        _hidden(pairs, side, result, failed)
    _logits(pairs, result, failed)
    _lse(pairs, result, failed)
    _scores(pairs, result, failed)
    return result


def _hidden(pairs: Pairs, side: str, result: CheckResult, failed: set[int]) -> None:
    """Rows of tensors['<side>.<PHASE>'] where both sides have one."""
    name = f"{side}.{pairs.phase}"
    reference = pairs.evidence.reference
    assert reference is not None
    mine, theirs = pairs.evidence.engine.tensors.get(name), reference.tensors.get(name)
    if mine is None or theirs is None:
        return
    at_mine, at_theirs = pairs.mine.ints[side][pairs.engine], pairs.theirs.ints[side][pairs.reference]
    both = np.flatnonzero((at_mine >= 0) & (at_theirs >= 0))
    # Every row of a phase reads a state; which rows hand one on may differ between releases.
    absent = (at_mine < 0) & (at_theirs >= 0) & (side == "hidden_in") & (at_mine >= 0).any()
    for place in np.flatnonzero(absent).tolist():
        failed.add(place)
        result.divergences.append(_shape(pairs, place, theirs.shape[1], 0, f"{side}-absent"))
    if mine.shape[1] != theirs.shape[1]:
        for place in both.tolist():
            failed.add(place)
            result.divergences.append(_shape(pairs, place, theirs.shape[1], mine.shape[1], f"{side}-width"))
        return
    own = reference.tensors.get(f"own.{name}")
    errors = judge_rows(
        engine=mine[at_mine[both]],
        truth=theirs[at_theirs[both]],
        own=None if own is None else own[at_theirs[both]],
        budget=pairs.budget,
    )
    result.count("hidden_rows", len(both))
    wrong = np.flatnonzero(~errors.passed)
    hints = _hidden_hints(pairs, mine[at_mine[both[wrong]]], at_theirs[both[wrong]], theirs)
    for row, hint in zip(wrong.tolist(), hints, strict=True):
        _report(pairs, int(both[row]), errors, row, f"{side}-{hint}", result, failed, width=mine.shape[1])


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


def _both(pairs: Pairs, column: str) -> Iterator[tuple[Ints, list[Singles], list[Singles]]]:
    """Pairs grouped by list lengths, so that each group stacks: (places, [engine lists], [reference lists])."""
    mine, theirs = pairs.mine.lists[column], pairs.theirs.lists[column]
    groups: dict[tuple[int, int], list[int]] = {}
    for place, (one, other) in enumerate(zip(pairs.engine.tolist(), pairs.reference.tolist(), strict=True)):
        if len(mine[one]) and len(theirs[other]):
            groups.setdefault((len(mine[one]), len(theirs[other])), []).append(place)
    for places in groups.values():
        at = np.asarray(places, dtype=np.int64)
        yield at, [mine[one] for one in pairs.engine[at]], [theirs[other] for other in pairs.reference[at]]


def _stack(rows: Rows, column: str, indices: Ints) -> npt.NDArray[np.float64]:
    return np.stack([rows.lists[column][index] for index in indices.tolist()]).astype(np.float64)


def _logits(pairs: Pairs, result: CheckResult, failed: set[int]) -> None:
    """Top logits: the engine's value against the reference's, for every id both lists have."""
    for places, _, _ in _both(pairs, "top_logits"):
        engine, reference = pairs.engine[places], pairs.reference[places]
        my_ids, their_ids = _stack(pairs.mine, "top_ids", engine), _stack(pairs.theirs, "top_ids", reference)
        mine, theirs = _stack(pairs.mine, "top_logits", engine), _stack(pairs.theirs, "top_logits", reference)
        same = my_ids[:, :, None] == their_ids[:, None, :]
        shared = same.any(axis=2)
        truth = np.take_along_axis(theirs, same.argmax(axis=2), axis=1)
        scale = np.abs(theirs).max(axis=1)
        blank = ~shared & np.isfinite(mine)  # ids the reference does not list; a NaN stays a failure
        errors = judge_rows(
            engine=np.where(blank, 0.0, mine),
            truth=np.where(shared, truth, 0.0),
            budget=pairs.budget,
            own_error=pairs.evidence.own_errors(reference),
            scale=scale,
        )
        nothing_shared = ~shared.any(axis=1)
        result.count("logits", int((~nothing_shared).sum()))
        for row in np.flatnonzero(~errors.passed | nothing_shared).tolist():
            hint = "logits-nan" if not np.isfinite(mine[row]).all() else "logits-off"
            hint = "logits-other-tokens" if nothing_shared[row] else hint
            _report(pairs, int(places[row]), errors, row, hint, result, failed, width=mine.shape[1])


def _lse(pairs: Pairs, result: CheckResult, failed: set[int]) -> None:
    """Log-sum-exp, where the row has logits on both sides. An engine that records none here is not asked."""
    mine, theirs = pairs.mine.floats["lse"][pairs.engine], pairs.theirs.floats["lse"][pairs.reference]
    recorded = _has_logits(pairs.mine, pairs.engine) & _has_logits(pairs.theirs, pairs.reference)
    places = np.flatnonzero(recorded)
    if not len(places) or np.isnan(mine[places]).all():
        return
    tops = [np.abs(pairs.theirs.lists["top_logits"][row]).max() for row in pairs.reference[places].tolist()]
    scale = np.maximum(np.abs(theirs[places]).astype(np.float64), np.asarray(tops, dtype=np.float64))
    errors = judge_rows(
        engine=mine[places, None],
        truth=theirs[places, None],
        budget=pairs.budget,
        own_error=pairs.evidence.own_errors(pairs.reference[places]),
        scale=scale,
    )
    for row in np.flatnonzero(~errors.passed).tolist():
        _report(pairs, int(places[row]), errors, row, "lse-off", result, failed, width=1)


def _has_logits(rows: Rows, indices: Ints) -> Bools:
    return np.asarray([len(rows.lists["top_ids"][index]) > 0 for index in indices.tolist()], dtype=np.bool_)


def _scores(pairs: Pairs, result: CheckResult, failed: set[int]) -> None:
    """Scores of the chosen ids, where both sides chose the same ids.

    With t = 1 a release from 0.5.13 on takes the argmax and reports 1.0 for every row: that says nothing.
    """
    skip_ones = pairs.evidence.scenario.spec.t == 1
    for places, mine, theirs in _both(pairs, "chosen_probs"):
        if len(mine[0]) != len(theirs[0]):
            continue  # already SHAPE by the number of choices
        engine, truth = np.stack(mine), np.stack(theirs)
        asked = _same_choices(pairs, places)
        if skip_ones:
            asked &= ~(engine == 1.0).all(axis=1)
        # p moves by p(1-p) of what two logits move against each other, so by half of what each moves at most
        own = pairs.evidence.own_errors(pairs.reference[places]) / 2
        errors = judge_rows(engine=engine, truth=truth, budget=pairs.budget, own_error=own, scale=np.ones(len(engine)))
        for row in np.flatnonzero(asked & ~errors.passed).tolist():
            _report(pairs, int(places[row]), errors, row, "scores-off", result, failed, width=engine.shape[1])


def _same_choices(pairs: Pairs, places: Ints) -> Bools:
    mine, theirs = pairs.mine.lists["chosen_ids"], pairs.theirs.lists["chosen_ids"]
    rows = zip(pairs.engine[places].tolist(), pairs.reference[places].tolist(), strict=True)
    return np.asarray([mine[one].tolist() == theirs[other].tolist() for one, other in rows], dtype=np.bool_)


def _shape(pairs: Pairs, place: int, expected: int, observed: int, hint: str) -> Divergence:
    return pairs.divergence(
        place, kind=Kind.SHAPE, expected=expected, observed=observed, policy=Policy.EXACT, hint=hint
    )


def _number(value: float) -> float | str:
    """A divergence must come back from disk as it was, and JSON has no infinity."""
    return float(value) if np.isfinite(value) else "not finite"


def _report(
    pairs: Pairs,
    place: int,
    errors: RowErrors,
    row: int,
    hint: str,
    result: CheckResult,
    failed: set[int],
    *,
    width: int,
) -> None:
    """NUMERIC at `place`, unless the row has already been named."""
    if place in failed:
        return
    failed.add(place)
    observed = {
        "greatest_abs": _number(errors.greatest_abs[row]),
        "greatest_rel": _number(errors.greatest_rel[row]),
        "at": int(errors.column[row]),
        "mismatched": int(errors.mismatched[row]),
        "of": width,
    }
    result.divergences.append(
        pairs.divergence(
            place,
            kind=Kind.NUMERIC,
            expected={"limit_abs": float(errors.limit[row]), "policy": pairs.budget.dtype},
            observed=observed,
            policy=Policy.BUDGET,
            hint=hint,
        )
    )
