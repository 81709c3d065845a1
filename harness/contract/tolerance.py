"""The three ways to compare, and every number that decides: EXACT, TIE, BUDGET. There is no fourth.

EXACT   integers: positions, slots, inputs, parents, lengths. Equal or wrong; no budget rescues an integer.
TIE     a token choice: another token is accepted only when the reference can hardly separate the two.
BUDGET  floats: within what rounding does to such rows; a NaN on either side is a failure.

Where a run in the engine's own dtype stands beside the truth, `noise` measures what rounding does; the shares below are
for rows without one: float32, and traces that have no such run. This module must not know what a row means: it sees
arrays and a dtype name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.contract.noise import DEEP, TIE_MULTIPLE, Floats, Ints, RowErrors, Wide, errors, greatest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far a float may be from the truth, for an engine that computes in one dtype.

    Where nothing is measured, a row passes when its greatest absolute error is at most `relative` times the greatest
    |truth| of that row plus `floor`.
    """

    dtype: str
    relative: float
    floor: float
    #: half a unit in the last place, as a share of the value: what storing a number costs
    rounding: float
    #: what rounding alone does to a row where no run in the engine's dtype says it, as a share of its greatest value
    numerical_floor: float
    #: share of token choices that are ties on sound engines, for drafts of this many candidates a step and more (a step
    #: of eight asks which is the eighth, and logits lie closer together there); far more of them are a finding
    tie_rates: Mapping[int, float]
    reason: str
    #: typical size of an error between two engines at most, over `rounding`, where their own rows measure it
    deep: float = DEEP

    def tie_rate(self, topk: int) -> float:
        """The usual share of ties where every draft step has `topk` candidates."""
        return self.tie_rates[max(known for known in self.tie_rates if known <= topk)]


#: Where nothing is measured, a near tie is one closer than this many numerical floors: both candidates' logits carry an
#: error of up to one floor on either side (2), and the reference sums in another order (2 more).
UNMEASURED_TIE = 4.0

#: This many ties are allowed in any scenario, whatever the rate: one tie among ten choices says nothing.
TIES_ALWAYS_ALLOWED = 2

#: How many standard deviations above the usual number of ties a scenario may have. With three, one of 504 sound ones on
#: an H100 failed (3 ties of 54 choices): a run asks hundreds of scenarios, and ties among few choices come in lumps.
TIE_DEVIATIONS = 5.0

BUDGETS: dict[str, Budget] = {
    "float32": Budget(
        dtype="float32",
        # CPU, releases 0.5.12.post1 to 0.5.23: worst row of 14 sound traces 1.7e-6; mildest wrong row of a bug 3.9e-3.
        relative=1e-4,
        floor=1e-5,  # rows whose true values are near zero, e.g. a probability of 1e-6
        rounding=2.0**-24,
        numerical_floor=16 * 2.0**-23,  # 16 ulp: sums of a few hundred products over a few layers
        tie_rates={1: 0.001},  # random tiny models tie about once in 10^4 choices
        reason="sums in another order over a handful of layers",
    ),
    "float16": Budget(
        dtype="float16",
        relative=3e-2,  # about 30 roundings of 2^-10
        floor=2e-3,  # one rounding of a value near 2
        rounding=2.0**-11,
        numerical_floor=2 * 2.0**-10,  # every operator rounds its output once
        # Clean runs of 0.5.13 on an H100 (up to 2) and an H200 (4 and 8; docs/evidence/gpu.md), share of the choices:
        # up to two candidates 0.3 to 0.6 % in each of nine boot configurations, four 1.3 %, eight 1.5 % twice.
        tie_rates={1: 0.01, 4: 0.02},
        reason="each operator rounds its output to 11 bits",
    ),
    "bfloat16": Budget(
        dtype="bfloat16",
        relative=1e-1,  # about 13 roundings of 2^-7
        floor=1.6e-2,  # one rounding of a value near 2
        rounding=2.0**-8,
        numerical_floor=2 * 2.0**-7,  # every operator rounds its output once
        # The same: up to two 2.4 to 4.6 % in each of four boot configurations, four 8.2 %, eight 10.7 %.
        tie_rates={1: 0.05, 4: 0.10, 8: 0.12},
        reason="each operator rounds its output to 8 bits",
    ),
    # Of a draft that computes in float32 and keeps K and V in bfloat16.
    "bfloat16 cache": Budget(
        dtype="bfloat16 cache",
        # Six roundings of 2^-8: K and V that a row reads, those that its state came from, those that they were made of.
        # CPU, 0.5.23, one layer: hidden rows 9.4e-3, logits 5.6e-3 (docs/evidence/deployments.md).
        relative=6 * 2.0**-8,
        floor=1.6e-2,  # as bfloat16: a probability moves by at most a quarter of what two logits near 9 do
        rounding=2.0**-8,
        numerical_floor=2.0**-8,  # K and V: two even errors within 2^-8, and their squares add
        tie_rates={1: 0.0125, 4: 0.025, 8: 0.03},  # a quarter of bfloat16's, as its numerical floor is
        reason="K and V are rounded to 8 bits, and nothing else is",
        # Six errors, even within 2^-8, whose squares add: sqrt(2), which `between` has. at most 1.0 was seen.
        deep=1.0,
    ),
}


def budget_for(dtype: str) -> Budget:
    """The budget of an engine dtype; KeyError text lists the known ones."""
    if dtype not in BUDGETS:
        raise KeyError(f"no budget for dtype {dtype!r}; known: {', '.join(BUDGETS)}")
    return BUDGETS[dtype]


def judge_rows(
    *, engine: Floats, truth: Floats, budget: Budget, allowed: Wide | None = None, scale: Wide | None = None
) -> RowErrors:
    """BUDGET over rows: engine and truth are [m, w].

    allowed [m] is the greatest error by measurement, NaN where there is none; scale [m] stands in for max |truth|. NaN
    or infinity on either side fails, also where both have it.
    """
    error = errors(engine, truth.astype(np.float64))
    size = greatest_of(truth) if scale is None else scale
    limit = budget.relative * size + budget.floor
    if allowed is not None:
        limit = np.where(np.isnan(allowed), limit, allowed)
    limit = np.where(np.isfinite(limit), limit, 0.0)
    greatest = greatest_of(error)
    with np.errstate(invalid="ignore"):
        greatest_rel = greatest / np.maximum(size, np.finfo(np.float64).tiny)
    return RowErrors(
        passed=greatest <= limit,
        greatest_abs=greatest,
        greatest_rel=greatest_rel,
        column=error.argmax(axis=1) if error.shape[1] else np.zeros(len(error), dtype=np.int64),
        mismatched=(error > limit[:, None]).sum(axis=1),
        limit=limit,
        comparable=np.ones(len(error), dtype=np.bool_),
    )


def tie_limit(*, scale: float, budget: Budget, noise: float = float("nan")) -> float:
    """The margin under which two candidates are the same to a row whose greatest |logit| is `scale`.

    noise: what rounding does to the logits of that row, where it is measured (see `noise`). A scale that is not finite
    allows nothing.
    """
    if not np.isfinite(scale):
        return 0.0
    if not np.isfinite(noise):
        return UNMEASURED_TIE * budget.numerical_floor * scale
    return TIE_MULTIPLE * noise


def choice_margin(*, top_ids: Ints, top_logits: Floats, expected: int, observed: int) -> float:
    """Reference logit of its own choice minus reference logit of the engine's choice.

    Infinite when either is not among the row's recorded top logits. top_ids, top_logits: [up to 16].
    """
    if expected == observed:
        return 0.0
    logits = dict(zip(top_ids.tolist(), top_logits.tolist(), strict=False))
    if expected not in logits or observed not in logits:
        return float("inf")
    return abs(float(logits[expected]) - float(logits[observed]))


def too_many_ties(*, ties: int, usual: float) -> bool:
    """Whether the number of ties is itself suspicious: more than chance explains where `usual` are expected."""
    return ties > max(TIES_ALWAYS_ALLOWED, usual + TIE_DEVIATIONS * math.sqrt(usual))
