"""The frame of positions: every row that either side recorded, paired by meaning, with errors beside their limits.

It must not judge: a row's state is what the stored divergences say of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.archive.store import StoredScenario
from harness.checks.evidence import dtype_of
from harness.contract.align import Ints, align
from harness.contract.measured import judged_logits, judged_states, logit_noise
from harness.contract.rows import Rows
from harness.contract.tolerance import Budget, budget_for
from harness.contract.trace import Trace
from harness.contract.types import Phase
from reports.columns import frame

#: Order of phases within a round.
PHASES = [str(phase) for phase in Phase]
INTEGERS = ("input_id", "position", "parent")
ERRORS = ("hidden_in", "hidden_out", "logits")
NOWHERE = -1

Wide = npt.NDArray[np.float64]


def position_frame(case: StoredScenario, *, run: str) -> pd.DataFrame:
    """Rows of a stored scenario in order of time: rank, round, request, phase, step, slot."""
    mine, theirs = _pairs(case)
    ours = case.engine.rows
    truth = None if case.reference is None else case.reference.rows
    place = {name: _either(ours, truth, mine, theirs, name) for name in ("dp_rank", "attempt", "committed", "round")}
    place |= {name: _either(ours, truth, mine, theirs, name) for name in ("step", "slot")}
    words = {name: _either(ours, truth, mine, theirs, name) for name in ("rid", "phase")}
    number = {phase: at for at, phase in enumerate(PHASES)}
    phases = np.asarray([number[str(phase)] for phase in words["phase"]], dtype=np.int64)
    fine, coarse = (place["slot"], place["step"], phases), (place["attempt"], words["rid"].astype(str))
    order = np.lexsort([*fine, *coarse, place["round"], place["dp_rank"]])  # the last one sorts first
    table = frame(
        "positions",
        {
            "run": run,
            "scenario": case.scenario.name,
            "scenario_id": case.scenario.id,
            **place,
            **words,
            "sides": np.where(mine < 0, "reference", np.where(theirs < 0, "engine", "both")),
            "state": _states(case, place, words),
            **_values(ours, mine, prefix=""),
            **_values(truth, theirs, prefix="reference_"),
            "margin": _margins(truth, theirs),
            **_errors(case, mine, theirs),
        },
    )
    return table.iloc[order].reset_index(drop=True)


def _pairs(case: StoredScenario) -> tuple[Ints, Ints]:
    """Row numbers on each side, [m] each, NOWHERE where that side has no such row."""
    if case.reference is None:
        mine = np.arange(len(case.engine.rows), dtype=np.int64)
        return mine, np.full(len(mine), NOWHERE)
    found = align(case.engine.rows, case.reference.rows)
    alone = np.concatenate([found.engine_only, found.engine_repeats])
    mine = np.concatenate([found.engine, alone, np.full(len(found.reference_only), NOWHERE)])
    theirs = np.concatenate([found.reference, np.full(len(alone), NOWHERE), found.reference_only])
    return mine.astype(np.int64), theirs.astype(np.int64)


def _either(ours: Rows, truth: Rows | None, mine: Ints, theirs: Ints, name: str) -> npt.NDArray[Any]:
    """A column of the engine's rows, and of the reference's where the engine has none."""
    kind = "strings" if name in ours.strings else "ints"
    column = getattr(ours, kind)[name]
    found = column[np.maximum(mine, 0)] if len(column) else np.zeros(len(mine), dtype=column.dtype)
    if truth is not None and (mine < 0).any():
        other = getattr(truth, kind)[name]
        found = np.where(mine < 0, other[np.maximum(theirs, 0)], found)
    return found


def _states(case: StoredScenario, place: dict[str, npt.NDArray[Any]], words: dict[str, npt.NDArray[Any]]) -> list[str]:
    """What the stored divergences say of each row: a root beats a consequence."""
    said: dict[tuple[Any, ...], str] = {}
    for found in case.findings:
        key = found.key
        row = (key.dp_rank, key.rid, key.attempt, key.committed, str(key.phase), key.step, key.slot)
        if not found.cause:
            said[row] = "wrong"
        else:
            said.setdefault(row, "consequence")
    columns = [place["dp_rank"], words["rid"], place["attempt"], place["committed"], words["phase"]]
    columns += [place["step"], place["slot"]]
    return [said.get(row, "same") for row in zip(*(column.tolist() for column in columns), strict=True)]


def _values(rows: Rows | None, at: Ints, *, prefix: str) -> dict[str, Any]:
    """Integers and choices of one side; missing where it has no row."""
    there = at >= 0
    names = [*INTEGERS, *([] if prefix else ["cache_slot"])]
    found: dict[str, Any] = {}
    for name in names:
        column = np.zeros(0, dtype=np.int64) if rows is None else rows.ints[name]
        found[f"{prefix}{name}"] = pd.array(_taken(column, at), dtype="Int64")
        found[f"{prefix}{name}"][~there] = pd.NA
    found[f"{prefix}chosen"] = [
        () if row < 0 or rows is None else rows.lists["chosen_ids"][row].tolist() for row in at.tolist()
    ]
    return found


def _taken(column: Ints, at: Ints) -> Ints:
    return column[np.maximum(at, 0)] if len(column) else np.zeros(len(at), dtype=np.int64)


def _margins(truth: Rows | None, theirs: Ints) -> npt.NDArray[np.float64]:
    found = np.full(len(theirs), np.nan)
    if truth is not None:
        there = theirs >= 0
        found[there] = margins(truth, theirs[there])
    return found


def _errors(case: StoredScenario, mine: Ints, theirs: Ints) -> dict[str, npt.NDArray[np.float64]]:
    """<what>_error and <what>_limit, [m] each; NaN for rows that only one side has."""
    found = {f"{what}_{end}": np.full(len(mine), np.nan) for what in ERRORS for end in ("error", "limit")}
    both = np.flatnonzero((mine >= 0) & (theirs >= 0))
    if case.reference is None or not len(both):
        return found
    budget = budget_for(dtype_of(case.scenario, case.engine))
    for what, measured in _measure(case.engine, case.reference, mine[both], theirs[both], budget):
        found[f"{what}_error"][both], found[f"{what}_limit"][both] = measured
    return found


def _measure(engine: Trace, reference: Trace, mine: Ints, theirs: Ints, budget: Budget) -> Sequence[tuple[str, Any]]:
    states = [
        (side, measure_states(engine, reference, mine=mine, theirs=theirs, side=side, budget=budget))
        for side in ("hidden_in", "hidden_out")
    ]
    logits = measure_logits(engine.rows, reference, mine=mine, theirs=theirs, budget=budget)
    return [(what, (found.error, found.limit)) for what, found in [*states, ("logits", logits)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Greatest absolute error and limit of each pair, [m] each; NaN where there was nothing to compare."""

    error: Wide
    limit: Wide


def measure_states(engine: Trace, reference: Trace, *, mine: Ints, theirs: Ints, side: str, budget: Budget) -> Measured:
    """Hidden rows of the pairs mine[m], theirs[m]. side: hidden_in or hidden_out."""
    found = _nothing(len(mine))
    at_mine, at_theirs = engine.rows.ints[side][mine], reference.rows.ints[side][theirs]
    phases = engine.rows.strings["phase"][mine]
    for phase in sorted(set(phases.tolist())):
        name = f"{side}.{phase}"
        ours, truth = engine.tensors.get(name), reference.tensors.get(name)
        if ours is None or truth is None or ours.shape[1] != truth.shape[1]:
            continue
        both = np.flatnonzero((phases == phase) & (at_mine >= 0) & (at_theirs >= 0))
        errors = judged_states(reference, name, engine=ours[at_mine[both]], at=at_theirs[both], budget=budget)
        said = both[errors.comparable | ~errors.passed]
        kept = np.isin(both, said)
        found.error[said], found.limit[said] = errors.greatest_abs[kept], errors.limit[kept]
    return found


def measure_logits(engine: Rows, reference: Trace, *, mine: Ints, theirs: Ints, budget: Budget) -> Measured:
    """Top logits of the pairs, for every id that both sides kept."""
    found = _nothing(len(mine))
    noise = logit_noise(reference, budget)
    for one in judged_logits(engine, reference.rows, mine=mine, theirs=theirs, budget=budget, noise=noise):
        at = one.places[one.shared]
        found.error[at], found.limit[at] = one.errors.greatest_abs[one.shared], one.errors.limit[one.shared]
    return found


def margins(rows: Rows, at: Ints) -> Wide:
    """Best logit minus second best at rows [m]; NaN where a row kept fewer than two."""
    kept = [rows.lists["top_logits"][row] for row in at.tolist()]
    return np.asarray([float(some[0]) - float(some[1]) if len(some) > 1 else np.nan for some in kept], dtype=np.float64)


def _nothing(length: int) -> Measured:
    return Measured(error=np.full(length, np.nan), limit=np.full(length, np.nan))
