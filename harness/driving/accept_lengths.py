"""Accept lengths: what verifies committed, beside what the papers' own proposals would have been accepted for.

The reference says the latter, round by round, in events 'expected_accept'. Where a request has shown no divergence yet,
it drafts what it should but for ties, which cost nothing: what is expected there is what was observed. No check and no
verdict depends on this module, and it must not judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.contract.batches import Share, parts_of
from harness.contract.known_issues import notes
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLengths:
    """Tokens that verifies of one greedy request each were expected to commit and did, bonus tokens included.

    sampled: verifies of requests that sample, which are left out.
    """

    verifies: int = 0
    expected: int = 0
    observed: int = 0
    sampled: int = 0

    @property
    def mean_expected(self) -> float:
        return self.expected / self.verifies

    @property
    def mean_observed(self) -> float:
        return self.observed / self.verifies

    @property
    def lost(self) -> float:
        """Percent of what was expected."""
        return 100.0 * (self.expected - self.observed) / self.expected

    @property
    def text(self) -> str:
        means = f"expected {self.mean_expected:.2f}, observed {self.mean_observed:.2f}"
        return f"{means}, lost {round(self.lost, 1) + 0.0:.1f} %"


def total(parts: Iterable[AcceptLengths | None]) -> AcceptLengths | None:
    """All of them as one; None where nothing was expected of any."""
    kept = [one for one in parts if one is not None]
    fields = AcceptLengths.__slots__
    found = AcceptLengths(**{name: sum(getattr(one, name) for one in kept) for name in fields})
    return found if found.verifies else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptRounds:
    """observed: tokens committed by every verify of a request. expected: of those that the reference speaks of."""

    observed: Mapping[Share, int]
    expected: Mapping[Share, int]
    sampled: int

    @staticmethod
    def of(
        scenario: Scenario, engine: Trace, reference: Trace | None, divergences: Sequence[Divergence]
    ) -> AcceptRounds:
        """From both sides of a scenario and how they differ."""
        sampling = {request.rid for request in scenario.sampled.requests if not request.greedy}
        observed = observed_lengths(engine)
        said = {} if reference is None else _said(reference)
        expected = {share: said[share] for share in observed.keys() - _cut(engine) if share in said}
        if not (reference is not None and _follows_a_defect(scenario, engine, reference)):
            begun = _touched(divergences)
            expected = {
                share: tokens if _is_touched(share, begun) else observed[share] for share, tokens in expected.items()
            }
        return AcceptRounds(
            observed=observed, expected=expected, sampled=sum(share[1] in sampling for share in observed)
        )

    def all(self) -> AcceptLengths | None:
        """Of every verify; None where nothing was expected of any."""
        return self._sum(self.expected, sampled=self.sampled)

    def touched_by(self, divergences: Iterable[Divergence]) -> AcceptLengths | None:
        """Of the rounds that these touch: of each request, those from the first of them on."""
        begun = _touched(divergences)
        return self._sum([share for share in self.expected if _is_touched(share, begun)])

    def _sum(self, shares: Iterable[Share], *, sampled: int = 0) -> AcceptLengths | None:
        kept = list(shares)
        expected, observed = (sum(side[share] for share in kept) for side in (self.expected, self.observed))
        return total([AcceptLengths(verifies=len(kept), expected=expected, observed=observed, sampled=sampled)])


def observed_lengths(trace: Trace) -> Counter[Share]:
    """Tokens that each verify of each request committed, the bonus included."""
    ints, strings = trace.rows.ints, trace.rows.strings
    rows = (strings["phase"] == Phase.ACCEPT).nonzero()[0]
    columns = (ints["dp_rank"], strings["rid"], ints["attempt"], ints["committed"])
    return Counter(zip(*(column[rows].tolist() for column in columns), strict=True))


def _said(reference: Trace) -> dict[Share, int]:
    events = ((event.dp_rank, event.data) for event in reference.named("expected_accept"))
    return {(rank, data["rid"], data["attempt"], data["committed"]): data["tokens"] for rank, data in events}


def _cut(engine: Trace) -> set[Share]:
    """Verifies that may commit less than was accepted: the last of a request, where a release cuts it at its end."""
    if not engine.header.get("truncates_at_finish"):
        return set()
    ended = {end.rid for end in engine.ends}
    return {parts[-1].share for (rid, _), parts in parts_of(engine).items() if rid in ended}


def _follows_a_defect(scenario: Scenario, engine: Trace, reference: Trace) -> bool:
    """Whether the reference follows a known defect that can show here: then nothing diverges where it costs."""
    release, device = engine.header.get("release"), engine.header.get("device")
    told = {name: str(value) for name, value in (("release", release), ("device", device)) if value}
    return bool(notes(reference.header, scenario.spec, scenario.engine, **told))


def _touched(divergences: Iterable[Divergence]) -> dict[tuple[str, int], int]:
    """(rid, attempt) -> the least committed length of a round that any of the divergences can have reached.

    What a draft extend wrote is read from the next round on.
    """
    begun: dict[tuple[str, int], int] = {}
    for found in divergences:
        key = found.key
        if key.rid:
            first = key.committed + (key.phase == Phase.EXTEND)
            begun[key.rid, key.attempt] = min(first, begun.get((key.rid, key.attempt), first))
    return begun


def _is_touched(share: Share, begun: Mapping[tuple[str, int], int]) -> bool:
    _, rid, attempt, committed = share
    return committed >= begun.get((rid, attempt), committed + 1)
