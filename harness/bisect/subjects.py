"""What is searched for: one scenario, and which of its divergences count as the failure.

It must not run anything. A scenario that diverges otherwise says nothing about the failure it was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.bisect.search import Call
from harness.contract.types import Outcome, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure by its signature, or by the kinds a corpus case shows first; neither: whatever is seen first."""

    signature: str = ""
    kinds: tuple[str, ...] = ()

    def describe(self) -> str:
        if self.signature:
            return f"signature {self.signature}"
        return f"kind {' or '.join(self.kinds)}" if self.kinds else "any divergence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of the scenario on one version said: the part of a verdict that a search needs.

    kinds, signatures: of divergences that nothing earlier explains, the first one first. run: its folder.
    """

    outcome: Outcome
    kinds: tuple[str, ...] = ()
    signatures: tuple[str, ...] = ()
    why: str = ""
    run: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The scenario, as given, where it came from, and its failure."""

    name: str
    scenario: Scenario
    failure: Failure


def call(run: Run, failure: Failure) -> Call:
    """What one run says about the failure."""
    if run.outcome is Outcome.PASS:
        return "good"
    if run.outcome is Outcome.FAIL and shows(run, failure):
        return "bad"
    return "unknown"


def shows(run: Run, failure: Failure) -> bool:
    if failure.signature:
        return failure.signature in run.signatures
    return not failure.kinds or bool(set(failure.kinds) & set(run.kinds))


def why(run: Run, failure: Failure) -> str:
    """One line about one run."""
    if run.outcome is Outcome.PASS:
        return "agrees with the reference"
    if run.outcome is Outcome.FAIL:
        found = ", ".join(run.kinds)
        return f"diverges: {found}" if shows(run, failure) else f"diverges otherwise: {found}; not {failure.describe()}"
    return one_line(run.why) or "no verdict"


def learned(failure: Failure, runs: Sequence[Run]) -> Failure:
    """The failure by the first signature seen at the bad end, where nothing else says what it is."""
    if failure.signature or failure.kinds:
        return failure
    seen = next((run.signatures[0] for run in runs if run.outcome is Outcome.FAIL and run.signatures), "")
    return Failure(signature=seen)


def one_line(text: str) -> str:
    """The first line of a reason, without the place of the log that follows it."""
    return text.splitlines()[0].split("; full log:")[0].strip() if text.strip() else ""
