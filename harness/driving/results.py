"""Records of what came of a scenario and of a run. Records only; they must not print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.archive.run_folders import REPRODUCERS
from harness.archive.writer import write_reproducer
from harness.checks.explained import Spot, explained, spot
from harness.checks.findings import Finding, group, members
from harness.contract.conditions import NO_DRAFT
from harness.contract.known_issues import Known, known_as
from harness.contract.merge import merge
from harness.contract.providers import Witnessed, providers_in, witnessed_in
from harness.contract.scenario import Scenario
from harness.contract.texts import text_identical
from harness.contract.trace import Trace, replaced_kernels
from harness.contract.types import Divergence, Outcome, Verdict
from harness.driving.accept_lengths import AcceptLengths, AcceptRounds, total
from harness.driving.around import Around, around
from harness.driving.own_pair import draft_facts
from harness.driving.plan import Setup

#: How a note about a draft begins that is accepted in at most this share of at least so many verifies.
HARDLY, MOST_AGREED, LEAST_VERIFIES = "the draft hardly ever agrees", 0.02, 50


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScenarioResult:
    """One judged scenario, wherever its rows came from: an engine that runs, a stored run, a test.

    trace, reference: a run that stored them keeps only the header. text_identical: whether no text shows what is wrong.
    accepted: accept length, the bonus included -> verifies of that length. accept: expected and observed ones;
    accept_of: those of the rounds that a finding and its consequences touch, by signature; None where nothing is known.
    around: what is known of the place where a root finding begins, by signature.
    providers: who judged target and draft, empty without a reference. witnessed: what of it, where a witness did.
    known: signature, or reason for UNKNOWN -> the known issues that it may be; says nothing about the verdict.
    folder, reproducer: where it is stored. seconds: wall time by part (engine, reference, judge, store).
    """

    scenario: Scenario
    setup: Setup
    trace: Trace
    reference: Trace | None
    verdict: Verdict
    divergences: tuple[Divergence, ...]
    findings: tuple[Finding, ...]
    text_identical: bool | None
    rounds: int
    draft_steps: int
    accepted: Mapping[int, int]
    providers: Mapping[str, str] = field(default_factory=dict)
    witnessed: Witnessed = field(default_factory=Witnessed)
    accept: AcceptLengths | None = None
    accept_of: Mapping[str, AcceptLengths | None] = field(default_factory=dict)
    around: Mapping[str, Around] = field(default_factory=dict)
    known: Mapping[str, tuple[Known, ...]] = field(default_factory=dict)
    folder: Path = Path()
    reproducer: Path | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(
        scenario: Scenario,
        trace: Trace,
        reference: Trace | None,
        verdict: Verdict,
        divergences: Sequence[Divergence],
        *,
        setup: Setup,
        **stored: Any,
    ) -> ScenarioResult:
        """Everything that follows from rows and their verdict. stored: folder, reproducer, seconds."""
        findings = tuple(group(divergences))
        rounds = AcceptRounds.of(scenario, trace, reference, divergences)
        return ScenarioResult(
            scenario=scenario,
            setup=setup,
            trace=trace,
            reference=reference,
            verdict=verdict,
            divergences=tuple(divergences),
            findings=findings,
            text_identical=None if reference is None else text_identical(trace, reference, scenario),
            rounds=len(trace.rounds),
            draft_steps=sum(record.forwards.get("DRAFT", 0) for record in trace.rounds),
            accepted=Counter(rounds.observed.values()),
            providers={} if reference is None else providers_in(reference.header),
            witnessed=Witnessed() if reference is None else witnessed_in(reference.header),
            accept=rounds.all(),
            accept_of={one.signature: rounds.touched_by(members(one, divergences)) for one in findings},
            around={
                one.signature: around(one.first, scenario, trace, reference, divergences)
                for one in findings
                if one.is_root
            },
            known=_known(scenario, setup, verdict, divergences, explained(reference)),
            **stored,
        )

    def __repr__(self) -> str:
        reverted = f" with {self.setup.revert} reverted" if self.setup.revert else ""
        return f"<scenario {self.scenario.name} on SGLang {self.setup.release}{reverted}: {self.verdict.outcome}>"

    @property
    def first(self) -> Divergence | None:
        """The earliest divergence that nothing else explains."""
        return next((found for found in self.divergences if found.first), None)

    @property
    def passed(self) -> bool:
        return self.verdict.outcome is Outcome.PASS

    def properties(self) -> list[tuple[str, object]]:
        """What a JUnit file says of a test that drove this, beside passed or failed."""
        found: list[tuple[str, object]] = [
            ("eaglecheck.engine", self.setup.release),
            ("eaglecheck.scenario", f"{self.scenario.name}-{self.scenario.id}"),
            ("eaglecheck.verdict", str(self.verdict.outcome)),
        ]
        if self.first is None:
            return found
        known = self.known.get(self.first.signature, ())
        found.append(("eaglecheck.signature", self.first.signature))
        return found + ([("eaglecheck.known", ", ".join(one.id for one in known))] if known else [])

    def without_rows(self) -> ScenarioResult:
        """What a run keeps of a scenario that it has stored: hundreds of traces are too many."""
        return replace(self, trace=self.trace.header_only(), reference=None)

    def save_reproducer(self, root: Path, *, name: str = "") -> Path:
        """A folder under `root` that `eaglecheck replay` runs again; by default its name says the release too."""
        reverted = f"-r{self.setup.revert}" if self.setup.revert else ""
        folder = (
            root / REPRODUCERS[0] / (name or f"{self.scenario.name}-{self.scenario.id}-{self.setup.release}{reverted}")
        )
        first = self.first or next(iter(self.divergences), None)
        return write_reproducer(
            folder,
            self.scenario,
            engine=replace(self.trace, header={**self.trace.header, **self.setup.plain()}),
            reference=self.reference,
            divergences=self.divergences,
            signature=first.signature if first else str(self.verdict.outcome),
            replay=f"eaglecheck replay {folder}",
        )


def mean_accept_length(results: Iterable[ScenarioResult]) -> float | None:
    """Tokens that a verify of one request committed on average, the bonus included; None without a verify."""
    counts = _accepted(results)
    return sum(length * count for length, count in counts.items()) / counts.total() if counts else None


def _accepted(results: Iterable[ScenarioResult]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for one in results:
        counts.update(one.accepted)
    return counts


def verdict_of(results: Sequence[ScenarioResult], *more: Verdict) -> Verdict:
    """The verdict of a run, and what has to be known beside it. more: what is said of the rest of the run."""
    merged = merge([*(one.verdict for one in results), *more])
    return replace(merged, reasons=(*merged.reasons, *hardly_agrees(results)))


def hardly_agrees(results: Sequence[ScenarioResult]) -> list[str]:
    """What a draft that is next to never accepted leaves unseen: one line, none where it agrees or too little ran."""
    counts = _accepted(results)
    if counts.total() < LEAST_VERIFIES or counts.total() - counts[1] > MOST_AGREED * counts.total():
        return []
    longest = max(one.scenario.spec.most_steps for one in results) + 1
    return [f"{HARDLY}: accept length {mean_accept_length(results):.2f} of {longest}; a wrong chain cannot show in it"]


def accept_lengths_of(results: Iterable[ScenarioResult]) -> AcceptLengths | None:
    """Expected and observed accept lengths of all of them; None where nothing is known."""
    return total(one.accept for one in results)


def _known(
    scenario: Scenario,
    setup: Setup,
    verdict: Verdict,
    divergences: Sequence[Divergence],
    explains: Mapping[str, frozenset[Spot]],
) -> dict[str, tuple[Known, ...]]:
    """What each finding of a scenario may be, and each reason where there is no verdict.

    explains: issues that the reference has followed, with what they explain; what one explains wholly is no other.
    """
    texts = list(dict.fromkeys(found.signature for found in divergences))
    texts += verdict.reasons if verdict.outcome is Outcome.UNKNOWN else ()
    may_be = known_as(
        texts,
        scenario=scenario,
        release=setup.release,
        device=setup.device,
        revert=setup.revert,
        reasons=verdict.reasons,
        draft=draft_facts(*map(Path, setup.pair)) if setup.pair and texts else NO_DRAFT,
        coverage=verdict.coverage,
    )

    def is_one(signature: str, at: frozenset[Spot]) -> bool:
        alike = [found for found in divergences if found.signature == signature]
        return any(spot(one) in at for one in alike) and all(one.cause or spot(one) in at for one in alike)

    return {
        text: tuple(one for one in known if is_one(text, explains.get(one.id, frozenset()))) or known
        for text, known in may_be.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Where the wall time of a run went, in seconds, and how many engines were booted for it.

    boot_seconds: of all boots, which may be beside each other and beside scenarios; waited_seconds: while nothing was
    driven because an engine was not up.
    """

    boots: int = 0
    boot_seconds: float = 0.0
    waited_seconds: float = 0.0
    engine_seconds: float = 0.0
    reference_seconds: float = 0.0
    #: MiB that the reference had at most, and what it said before; 0 where nobody counts
    reference_mib: int = 0
    reference_said_mib: int = 0
    judge_seconds: float = 0.0
    store_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One finished run. pair: of the user's own, its names, sizes and digests (see harness.driving.pairs)."""

    folder: Path
    engine: str
    device: str
    revert: int | None
    header: dict[str, Any]
    results: tuple[ScenarioResult, ...]
    verdict: Verdict
    cost: Cost
    pair: Mapping[str, Any] | None = None

    @property
    def replaced(self) -> list[dict[str, Any]]:
        """The operations of SGLang that kernels of ours computed in any of its scenarios, each once."""
        headers = [one.trace.header for one in self.results] or [self.header]
        return list({entry["operation"]: entry for header in headers for entry in replaced_kernels(header)}.values())


class Interrupted(KeyboardInterrupt):
    """A run that somebody ended; `result`: the scenarios judged by then, never a PASS."""

    def __init__(self, why: str, result: RunResult) -> None:
        super().__init__(why)
        self.result = result
