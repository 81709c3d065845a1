"""How far engine rows are from the reference's, and how far they may be: the same errors and limits as the checks use.

This module must not say what passes: it measures, the checks judged when the run ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.contract.align import Ints
from harness.contract.tolerance import Budget, judge_rows
from harness.contract.trace import Rows, Trace

Wide = npt.NDArray[np.float64]


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
        own = reference.tensors.get(f"own.{name}")
        errors = judge_rows(
            engine=ours[at_mine[both]],
            truth=truth[at_theirs[both]],
            own=None if own is None else own[at_theirs[both]],
            budget=budget,
        )
        found.error[both], found.limit[both] = errors.greatest_abs, errors.limit
    return found


def measure_logits(engine: Rows, reference: Trace, *, mine: Ints, theirs: Ints, budget: Budget) -> Measured:
    """Top logits of the pairs, for every id that both sides kept."""
    found = _nothing(len(mine))
    known = reference.tensors.get("own.logits")
    for pairs in _by_lengths(engine, reference.rows, mine, theirs).values():
        at = np.asarray(pairs, dtype=np.int64)
        one, other = mine[at], theirs[at]
        my_ids, their_ids = _stack(engine, "top_ids", one), _stack(reference.rows, "top_ids", other)
        my_logits, truth = _stack(engine, "top_logits", one), _stack(reference.rows, "top_logits", other)
        same = my_ids[:, :, None] == their_ids[:, None, :]
        shared = same.any(axis=2)
        blank = ~shared & np.isfinite(my_logits)
        errors = judge_rows(
            engine=np.where(blank, 0.0, my_logits),
            truth=np.where(shared, np.take_along_axis(truth, same.argmax(axis=2), axis=1), 0.0),
            budget=budget,
            own_error=np.full(len(at), np.nan) if known is None else known[other, 0].astype(np.float64),
            scale=np.abs(truth).max(axis=1),
        )
        some = shared.any(axis=1)
        found.error[at[some]], found.limit[at[some]] = errors.greatest_abs[some], errors.limit[some]
    return found


def margins(rows: Rows, at: Ints) -> Wide:
    """Best logit minus second best at rows [m]; NaN where a row kept fewer than two."""
    kept = [rows.lists["top_logits"][row] for row in at.tolist()]
    return np.asarray([float(some[0]) - float(some[1]) if len(some) > 1 else np.nan for some in kept], dtype=np.float64)


def _nothing(length: int) -> Measured:
    return Measured(error=np.full(length, np.nan), limit=np.full(length, np.nan))


def _by_lengths(engine: Rows, reference: Rows, mine: Ints, theirs: Ints) -> dict[tuple[int, int], list[int]]:
    """(logits kept here, there) -> pairs, for pairs that have some on both sides."""
    groups: dict[tuple[int, int], list[int]] = {}
    ours, truth = engine.lists["top_logits"], reference.lists["top_logits"]
    for place, (one, other) in enumerate(zip(mine.tolist(), theirs.tolist(), strict=True)):
        if len(ours[one]) and len(truth[other]):
            groups.setdefault((len(ours[one]), len(truth[other])), []).append(place)
    return groups


def _stack(rows: Rows, column: str, at: Ints) -> Wide:
    stacked: Wide = np.stack([rows.lists[column][row] for row in at.tolist()]).astype(np.float64)
    return stacked
