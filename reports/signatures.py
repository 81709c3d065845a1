"""Groups the findings of a run by signature, over all scenarios. It must not judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks import findings
from harness.checks.findings import Finding
from harness.contract.words import counted
from harness.driving.accept_lengths import AcceptLengths, total
from harness.driving.results import ScenarioResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One signature. at: the place of its first scenario among the results; first: its finding there.

    count: divergences in all scenarios; cause: the signature that explains it, empty where one of them is a root.
    known: ids of the known issues that it may be in any of them. accept: what it costs, in all of them.
    """

    signature: str
    at: int
    first: Finding
    count: int
    scenarios: tuple[str, ...]
    cause: str
    known: tuple[str, ...] = ()
    accept: AcceptLengths | None = None

    @property
    def where(self) -> str:
        """In which scenarios, in a few words."""
        if len(self.scenarios) <= 2:
            return " and ".join(self.scenarios)
        return f"{self.scenarios[0]} and {counted(len(self.scenarios) - 1, 'other scenario')}"


def by_signature(results: Sequence[ScenarioResult]) -> list[Defect]:
    """Roots first, each in the order of the results."""
    return [_defect(shared, results) for shared in findings.by_signature(one.findings for one in results)]


def _defect(shared: findings.Shared, results: Sequence[ScenarioResult]) -> Defect:
    at, first = (shared.roots or shared.members)[0]
    known = {one.id for place, _ in shared.members for one in results[place].known.get(shared.signature, ())}
    return Defect(
        signature=shared.signature,
        at=at,
        first=first,
        count=shared.count,
        scenarios=tuple(results[place].scenario.name for place, _ in shared.members),
        cause="" if shared.roots else str(first.consequence_of),
        known=tuple(sorted(known)),
        accept=total(results[place].accept_of.get(shared.signature) for place, _ in shared.members),
    )
