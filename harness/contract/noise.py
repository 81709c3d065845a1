"""What rounding does to the rows of a pair, measured on that pair: how far from the truth a sound engine may be.

The reference computes every row twice: the truth in float32, and once more with every operator rounding to the engine's
own dtype. The second run's errors are a sample of what rounding does to this pair, at this depth and width, in these
rows. An engine rounds in other places than PyTorch does, so its errors are another sample of the same kind, never the
same numbers. The model, and what it asks:

*Size of a row's error.* An element's error is Gaussian about zero. Its scale is the row's, times the element's weight
b: half of b^2 comes from the column (columns that carry large values through many layers are rounded coarsely in every
row; the profile is measured over all rows of a kind, shrunk towards even by `PRIOR_ROWS`), half from the value itself
(an error of the row's norm moves each element in proportion). The root mean square of (error / b) over a row, relative
to the root mean square of the row's truth, is its size. Its logarithm is close to normal in two ways: rows differ in
how sensitive they are, which both runs share, and each run has its own luck with a row. Luck falls with the width w,
since the root mean square of n independent errors has a relative deviation of 1/sqrt(2n); errors in a row are not quite
independent, and `LUCK`/sqrt(w) is what was seen. What the sizes of all rows of a kind (one tensor: a phase, read or
handed on) spread beyond their luck is sensitivity. So the size to expect of a row is the second run's, shrunk towards
the typical one of its kind as far as its spread is luck, and

    limit = ALLOWANCE * exp(z * deviation) * expected size

with the deviation that is left after shrinking. z is the normal quantile at `FALSE_ALARMS` over the tests of the
scenario: more rows looked at make the limit wider, by what the extreme value of so many asks and no more. ALLOWANCE is
for other places of rounding: real kernels and simulated ones had typical sizes between 0.75 and 1.0 of PyTorch's
(docs/evidence/noise.md).

*Greatest element.* Within that scale, |error / b| is at most the Gaussian quantile at `FALSE_ALARMS` over all elements
of the scenario, or `ALLOWANCE` times the greatest one that the second run itself shows, whichever is more.

*Logits.* Of the second run the greatest error among a row's top logits is kept: one number a row, pooled in the same
way. Two candidates are a tie if their margin is under `TIE_MULTIPLE` of it. How many ties are usual follows from the
margins that the reference itself sees: the sum of the probabilities that noise turns each of them around.

By design one sound scenario in a million fails by each of the three, if the model holds; that it does is what the
evidence shows. A row whose limit comes near its own size (`INCOMPARABLE`) says nothing when it passes: it does not
count as compared, and many of them make a verdict UNKNOWN.

*Two engines.* A witness is an engine too: nobody computes its rows a second time, and a difference between two such
runs has sqrt(2) of the size. There the differences of the rows of a kind themselves say what is typical (`between`):
their median, which a defect in less than half of the rows does not move, and no more than rounding makes of a deep
stack (`DEEP`), so that a defect in all of them does not pass for noise.

This module must not know what a row means: it sees arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Wide = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

#: Sound scenarios that fail by one of the limits, as a share, if errors are as the model says.
FALSE_ALARMS = 1e-6
#: How much greater than PyTorch's an engine's typical error may be, since it rounds in other places.
ALLOWANCE = 1.5
#: How many rows' worth the expectation before any measurement has: even columns, and sensitivities of PRIOR_SPREAD.
PRIOR_ROWS, PRIOR_SPREAD = 8, 0.25
#: Standard deviation of the logarithm of a row's size by luck: LUCK over the root of the width, at least LEAST_LUCK;
#: and of the greatest error of a handful of logits.
LUCK, LEAST_LUCK, LOGIT_LUCK = 1.5, 0.05, 0.2
#: Typical size of an error in a deep stack at most, over half a unit in the last place: 10 to 13 were seen at 16 and 36
#: layers with large columns (docs/evidence/noise.md).
DEEP = 20.0
#: A row whose error may reach this share of its own size is not counted as compared: another row could pass for it.
INCOMPARABLE = 0.5
#: A tie is closer than this many times the greatest error of a row's top logits. The greatest of sixteen Gaussians is
#: 1.8 standard deviations, a difference of two has sqrt(2): six standard deviations of it, or four at ALLOWANCE.
TIE_MULTIPLE = 5.0
#: Standard deviation of the difference of two logits, over the greatest error of sixteen.
DIFFERENCE = math.sqrt(2) / 1.8
#: Elements worked on at a time: the rows of a long prompt need not stand in memory several times.
BLOCK = 1 << 22
_TINY = float(np.finfo(np.float32).tiny)


def quantile(tests: float) -> float:
    """How many standard deviations one of so many sound Gaussian values exceeds with probability FALSE_ALARMS."""
    return NormalDist().inv_cdf(1 - FALSE_ALARMS / max(tests, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Errors of the second run over the rows of one kind.

    typical: geometric mean of the rows' sizes; sensitivity, luck: standard deviations of their logarithms; floor: what
    storing a number costs; tests: rows looked at in the scenario. All relative to the row, or absolute for logits.
    profile [w] and peak: of hidden rows only, see the module.
    """

    typical: float
    sensitivity: float
    luck: float
    floor: float
    tests: int
    profile: Wide | None = None
    peak: float = 0.0

    def expected(self, own: Wide) -> Wide:
        """The size [m] to expect of rows whose second run had size own [m], NaN where that is not known."""
        share = self.sensitivity**2 / (self.sensitivity**2 + self.luck**2)
        away = share * np.log(np.maximum(own, max(self.floor, _TINY)) / self.typical)
        found: Wide = np.fmax(self.typical * np.exp(np.where(np.isfinite(own), away, 0.0)), self.floor)
        return found

    def allowed(self, own: Wide) -> Wide:
        """The size [m] that such a row of an engine has at most."""
        share = self.sensitivity**2 / (self.sensitivity**2 + self.luck**2)
        left = np.where(np.isfinite(own), self.luck**2 * share, self.sensitivity**2) + self.luck**2
        found: Wide = ALLOWANCE * np.exp(quantile(self.tests) * np.sqrt(left)) * self.expected(own)
        return found

    def greatest(self, width: int) -> float:
        """How many times a row's greatest size one of its elements may have."""
        return max(quantile(float(self.tests) * width), ALLOWANCE * self.peak)


def pooled(sizes: Wide, *, luck: float, floor: float, tests: int) -> Noise:
    """Noise by the sizes [m] that the second run had; what is not finite is no sample."""
    logs = np.log(np.maximum(sizes[np.isfinite(sizes)], max(floor, _TINY)))
    typical = float(np.exp(logs.mean())) if len(logs) else floor
    seen = float(((logs - logs.mean()) ** 2).sum()) if len(logs) else 0.0
    spread = (PRIOR_ROWS * (PRIOR_SPREAD**2 + luck**2) + seen) / (PRIOR_ROWS + max(len(logs) - 1, 0))
    sensitivity = math.sqrt(max(spread - luck**2, 0.0))
    return Noise(typical=typical, sensitivity=sensitivity, luck=luck, floor=floor, tests=tests)


def measure(truth: Floats, own: Floats, *, rounding: float, tests: int) -> Noise:
    """Noise of one kind of rows: truth and own [m,w]. rounding: half a unit in the last place, as a share."""
    width = truth.shape[1]
    total, rows = np.zeros(width), 0
    for block in _blocks(truth):
        with np.errstate(invalid="ignore", over="ignore"):
            relative = (own[block] - truth[block]) / np.maximum(_rms(truth[block]), _TINY)[:, None]
        known = np.isfinite(relative).all(axis=1)
        total, rows = total + np.square(relative[known], dtype=np.float64).sum(axis=0), rows + int(known.sum())
    even = total / total.mean() if total.any() else np.ones(width)
    profile = np.sqrt((PRIOR_ROWS + rows * even) / (PRIOR_ROWS + rows))
    sizes, peaks = np.zeros(len(truth)), np.zeros(len(truth))
    for block in _blocks(truth):
        scale = np.maximum(_rms(truth[block]), _TINY)
        weighted = _weighted(own[block], truth[block], profile, scale)
        sizes[block] = _rms(weighted) / scale
        peaks[block] = np.abs(weighted).max(axis=1, initial=0.0) / scale / np.maximum(sizes[block], rounding / 2)
    luck = max(LUCK / math.sqrt(max(width, 1)), LEAST_LUCK)
    found = pooled(np.where(_rms(truth) > 0, sizes, np.nan), luck=luck, floor=rounding / 2, tests=tests)
    return replace(found, profile=profile, peak=float(peaks[np.isfinite(peaks)].max(initial=0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowErrors:
    """How m rows compare: each [m]. `passed` is the judgement; the rest says by how much and where.

    limit: what the greatest error may be, in a row whose errors are distributed like this one's. greatest_rel: over the
    row's greatest |truth|. comparable: whether passing says anything.
    """

    passed: Flags
    greatest_abs: Wide
    greatest_rel: Wide
    column: Ints
    mismatched: Ints
    limit: Wide
    comparable: Flags


def judge_states(*, engine: Floats, truth: Floats, own: Floats | None, noise: Noise) -> RowErrors:
    """Hidden rows engine, truth, own [m,w] against the noise of their kind. What is not finite on a side is wrong."""
    assert noise.profile is not None
    own = np.full_like(truth, np.nan) if own is None else own
    parts = [_judge_block(engine[block], truth[block], own[block], noise, noise.profile) for block in _blocks(truth)]
    if not parts:
        parts = [_judge_block(engine, truth, own, noise, noise.profile)]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in RowErrors.__slots__}
    return RowErrors(**columns)


def _judge_block(engine: Floats, truth: Floats, own: Floats, noise: Noise, profile: Wide) -> RowErrors:
    scale, width = _rms(truth), truth.shape[1]
    weights = _weights(truth, profile, scale)
    error = errors(engine, truth)
    own_size = _rms(_weighted(own, truth, profile, scale)) / np.maximum(scale, _TINY)
    allowed = noise.allowed(np.where(np.isfinite(own_size), own_size, np.nan))
    limit = np.where(np.isfinite(scale), allowed * scale, 0.0)  # of the size
    weighted = error / weights
    size = _rms(weighted)
    column = weighted.argmax(axis=1) if width else np.zeros(len(scale), dtype=np.int64)
    each = np.arange(len(scale))
    worst = weighted[each, column] if width else np.zeros(len(scale))
    with np.errstate(invalid="ignore", divide="ignore"):
        most = limit * np.fmin(noise.greatest(width), np.where(size > 0, worst / size, np.inf))  # of weighted errors
        relative = np.where(width, error.max(axis=1, initial=0.0), 0.0) / np.maximum(greatest_of(truth), _TINY)
    weight = weights[each, column] if width else np.ones(len(scale))
    return RowErrors(
        passed=worst <= most,
        greatest_abs=worst * weight,
        greatest_rel=relative,
        column=column,
        mismatched=(~(weighted <= most[:, None])).sum(axis=1),  # all of a row whose limit is not a number
        limit=most * weight,
        comparable=(allowed <= INCOMPARABLE) | (scale == 0),
    )


def turned_around(margins: Wide, noise: Wide) -> float:
    """How many of these choices [m] noise turns around, as expected: margins of the truth's logits, and their noise."""
    known = np.isfinite(margins) & (noise > 0)
    away = margins[known] / (ALLOWANCE * DIFFERENCE * noise[known])
    return float(sum(math.erfc(one / math.sqrt(2)) / 2 for one in away[away < 8].tolist()))


def between(one: Floats, other: Floats, *, rounding: float, tests: int, deep: float = DEEP) -> Noise:
    """Noise of the difference of two engines' rows of one kind, [m,w] each (see the module). deep: as `DEEP`."""
    even, width = np.ones(one.shape[1]), one.shape[1]
    sizes = np.full(len(other), np.nan)
    for block in _blocks(other):
        scale = np.maximum(_rms(other[block]), _TINY)
        sizes[block] = _rms(_weighted(one[block], other[block], even, scale)) / scale
    known = sizes[np.isfinite(sizes)]
    typical = min(float(np.median(known)) if len(known) else 0.0, math.sqrt(2) * deep * rounding)
    luck = max(LUCK / math.sqrt(max(width, 1)), LEAST_LUCK)
    return Noise(
        typical=max(typical, rounding / 2),
        sensitivity=PRIOR_SPREAD,
        luck=luck,
        floor=rounding / 2,
        tests=tests,
        profile=even,
    )


def _blocks(rows: Floats) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, rows.shape[1]))
    return (slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step))


def _rms(values: Floats) -> Wide:
    """Root mean square of each row [m]; 0 without columns."""
    if not values.shape[1]:
        return np.zeros(len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        found: Wide = np.sqrt(np.square(values, dtype=np.float64).mean(axis=1))
    return found


def _weights(truth: Floats, profile: Wide, scale: Wide) -> Wide:
    """b [m,w]: what share of a row's error an element has, about 1."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = truth / np.maximum(scale, _TINY)[:, None]
        found: Wide = np.sqrt((profile**2 + value**2) / 2)
    return found


def _weighted(values: Floats, truth: Floats, profile: Wide, scale: Wide) -> Wide:
    with np.errstate(over="ignore", invalid="ignore"):
        found: Wide = (values.astype(np.float64) - truth) / _weights(truth, profile, scale)
    return found


def errors(values: Floats, truth: Floats) -> Wide:
    """|values - truth| [m,w], infinite wherever either side is not finite."""
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(wide - truth)
    return np.where(np.isfinite(wide) & np.isfinite(truth), error, np.inf)


def greatest_of(values: Floats) -> Wide:
    """Greatest |value| of each row [m]; 0 for rows without columns."""
    greatest: Wide = np.abs(values).max(axis=1, initial=0.0).astype(np.float64)
    return greatest
