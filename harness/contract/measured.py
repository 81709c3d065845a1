"""The noise of a reference trace, by its second run: tensors 'own.<name>' and 'own.logits' (see `noise`).

This module must not judge: it says how large errors are that rounding makes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from harness.contract.noise import (
    ALLOWANCE,
    DIFFERENCE,
    LOGIT_LUCK,
    Floats,
    Ints,
    Noise,
    RowErrors,
    Wide,
    between,
    judge_states,
    measure,
    pooled,
    turned_around,
)
from harness.contract.rows import Rows
from harness.contract.tolerance import Budget, judge_rows
from harness.contract.trace import Trace
from harness.contract.types import TARGET


def state_noise(reference: Trace, name: str, budget: Budget) -> Noise | None:
    """Noise of tensor `name`, 'hidden_in.<PHASE>' or 'hidden_out.<PHASE>'; None where no second run says it."""
    truth, own = reference.tensors.get(name), reference.tensors.get(f"own.{name}")
    if truth is None or own is None or truth.shape != own.shape:
        return None
    return measure(truth, own, rounding=budget.rounding, tests=len(reference.rows))


def judged_states(reference: Trace, name: str, *, engine: Floats, at: Ints, budget: Budget) -> RowErrors:
    """Rows engine [m,w] against rows `at` [m] of the reference's tensor `name`, by whatever says their limit."""
    truth = reference.tensors[name][at]
    noise = state_noise(reference, name, budget)
    if noise is not None:
        return judge_states(engine=engine, truth=truth, own=reference.tensors[f"own.{name}"][at], noise=noise)
    providers = reference.header.get("providers") or {}
    if budget.dtype != "float32" and "witness" in providers.values():
        noise = between(engine, truth, rounding=budget.rounding, tests=len(reference.rows), deep=budget.deep)
        return judge_states(engine=engine, truth=truth, own=None, noise=noise)
    return judge_rows(engine=engine, truth=truth, budget=budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLogits:
    """Top logits of some pairs of rows, float64: their places [m] among all, each side's own mine [m,w], theirs [m,v].

    shared [m,w]: whether the other side lists that id too; truth [m,w]: what it says of it, 0 where it does not.
    """

    places: Ints
    mine: Wide
    theirs: Wide
    shared: np.ndarray
    truth: Wide


def shared_logits(one: Rows, other: Rows, mine: Ints, theirs: Ints) -> Iterator[SharedLogits]:
    """Of the pairs mine [M], theirs [M] that have logits on both sides, by how many these are, so that each stacks."""
    sides = ((one, mine), (other, theirs))
    lengths = [rows.lists["top_logits"].lengths[at] for rows, at in sides]
    for ours, expected in sorted({*zip(*(each.tolist() for each in lengths), strict=True)}):
        places = np.flatnonzero((lengths[0] == ours) & (lengths[1] == expected))
        if not ours or not expected:
            continue
        my_ids, their_ids = (rows.lists["top_ids"].stacked(at[places]) for rows, at in sides)
        logits, truth = (rows.lists["top_logits"].stacked(at[places]).astype(np.float64) for rows, at in sides)
        same = my_ids[:, :, None] == their_ids[:, None, :]
        shared = same.any(axis=2)
        aligned = np.where(shared, np.take_along_axis(truth, same.argmax(axis=2), axis=1), 0.0)
        yield SharedLogits(places=places, mine=logits, theirs=truth, shared=shared, truth=aligned)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLogits:
    """Top logits of some pairs of rows: their places [m] among all, the engine's logits [m,w], and the errors of those
    ids that both kept; shared [m]: whether there are any."""

    places: Ints
    logits: Wide
    errors: RowErrors
    shared: np.ndarray


def judged_logits(
    engine: Rows, reference: Rows, *, mine: Ints, theirs: Ints, budget: Budget, noise: LogitNoise
) -> Iterator[JudgedLogits]:
    """See shared_logits."""
    for both in shared_logits(engine, reference, mine, theirs):
        blank = ~both.shared & np.isfinite(both.mine)  # ids the reference does not list; a NaN stays a failure
        errors = judge_rows(
            engine=np.where(blank, 0.0, both.mine),
            truth=both.truth,
            budget=budget,
            allowed=noise.limit[theirs[both.places]],
            scale=np.abs(both.theirs).max(axis=1),
        )
        yield JudgedLogits(
            places=both.places, logits=both.mine, errors=errors, shared=np.asarray(both.shared.any(axis=1))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitNoise:
    """For each reference row [rows]: the error to expect among its top logits, and the most that one may be off.

    NaN where a row has no logits, or no second run says it.
    """

    expected: Wide
    limit: Wide

    def of(self, rows: Ints) -> LogitNoise:
        """At these reference rows."""
        return LogitNoise(expected=self.expected[rows], limit=self.limit[rows])


def logit_noise(reference: Trace | None, budget: Budget) -> LogitNoise:
    """Pooled by phase. What storing a logit costs is the least."""
    count = 0 if reference is None else len(reference.rows)
    found = LogitNoise(expected=np.full(count, np.nan), limit=np.full(count, np.nan))
    own = None if reference is None else reference.tensors.get("own.logits")
    if reference is None or own is None:
        return found
    phases, logits = reference.rows.strings["phase"], reference.rows.lists["top_logits"]
    for phase in np.unique(phases).tolist():
        rows = np.flatnonzero((phases == phase) & (logits.lengths > 0))
        errors = own[rows, 0].astype(np.float64)
        if not np.isfinite(errors).any():
            continue
        scale = logits.greatest(rows)
        noise = pooled(errors, luck=LOGIT_LUCK, floor=budget.rounding * float(np.median(scale)) / 2, tests=count)
        found.expected[rows] = np.fmax(noise.expected(errors), budget.rounding * scale)
        found.limit[rows] = np.fmax(noise.allowed(errors), ALLOWANCE * budget.rounding * scale)
    return found


def target_scales(reference: Trace | None, noise: LogitNoise) -> dict[str, tuple[float, float]]:
    """rid -> the greatest |logit| of its target rows, and the most that rounding does to logits there.

    NaN where that is not measured.
    """
    if reference is None:
        return {}
    logits, rids = reference.rows.lists["top_logits"], reference.rows.strings["rid"]
    of_target = np.isin(reference.rows.strings["phase"].astype(str), TARGET)
    rows = np.flatnonzero(of_target & (logits.lengths > 0))
    scales = logits.greatest(rows).tolist()
    found = dict[str, tuple[float, float]]()
    for rid, scale, most in zip(rids[rows].tolist(), scales, noise.expected[rows].tolist(), strict=True):
        before = found.get(rid, (0.0, float("nan")))
        found[rid] = (max(before[0], scale), float(np.fmax(before[1], most)))
    return found


def end_noise(reference: Trace | None) -> float:
    """What the ends of intervals say of the greatest error of a row's top logits; 0 where no second run says anything.

    Errors that tokens share move an end farther than independent ones of the same size do. By how far the second run's
    nearest end lies from the truth's, the median over all draws, which a run that was nearest to another end at times
    does not move.
    """
    moved = [
        math.sqrt(2) * abs(float(event.data["own_distance"]) - float(event.data["distance"])) / event.data["spread"]
        for event in (() if reference is None else reference.events)
        if "own_distance" in event.data
    ]
    return statistics.median(moved) / (NormalDist().inv_cdf(0.75) * DIFFERENCE) if moved else 0.0


def usual_ties(reference: Trace, noise: LogitNoise, rows: Ints) -> float | None:
    """How many choices of these reference rows noise turns around, as expected; None where it is not measured.

    A row chose its t best candidates in order: two neighbours that change places are two choices, and one for the last
    against the first one left out.
    """
    lists, ties = reference.rows.lists, 0.0
    chosen, kept = lists["chosen_ids"].lengths[rows], lists["top_logits"].lengths[rows]
    asked = rows[(chosen > 0) & (kept > chosen)]
    if not len(asked) or not np.isfinite(noise.expected[asked]).any():
        return None
    count = lists["chosen_ids"].lengths[asked]
    for most in np.unique(count).tolist():
        at = asked[count == most]
        best = np.stack([lists["top_logits"][row][: most + 1] for row in at.tolist()]).astype(np.float64)
        for place in range(most):
            margins = best[:, place] - best[:, place + 1]
            ties += (1 if place == most - 1 else 2) * turned_around(margins, noise.expected[at])
    return ties
