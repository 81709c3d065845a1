"""Findings of a whole run by signature: one defect is one entry, however many scenarios show it. It must not judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks.findings import Finding
from harness.contract.words import counted
from harness.driving.progress import ScenarioResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One signature. at: the place of its first scenario among the results; first: its finding there.

    count: divergences in all scenarios; cause: the signature that explains it, empty where one of them is a root.
    known: ids of the known issues that it may be in any of them.
    """

    signature: str
    at: int
    first: Finding
    count: int
    scenarios: tuple[str, ...]
    cause: str
    known: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """In which scenarios, in a few words."""
        if len(self.scenarios) <= 2:
            return " and ".join(self.scenarios)
        return f"{self.scenarios[0]} and {counted(len(self.scenarios) - 1, 'other scenario')}"


def by_signature(results: Sequence[ScenarioResult]) -> list[Defect]:
    """Roots first, each in the order of the results."""
    members: dict[str, list[tuple[int, Finding]]] = {}
    for at, one in enumerate(results):
        for found in one.findings:
            members.setdefault(found.signature, []).append((at, found))
    defects = [_defect(signature, found, results) for signature, found in members.items()]
    return sorted(defects, key=lambda defect: bool(defect.cause))


def _defect(signature: str, members: list[tuple[int, Finding]], results: Sequence[ScenarioResult]) -> Defect:
    roots = [(at, found) for at, found in members if found.is_root]
    at, first = (roots or members)[0]
    return Defect(
        signature=signature,
        at=at,
        first=first,
        count=sum(found.count for _, found in members),
        scenarios=tuple(results[place].scenario.name for place, _ in members),
        cause="" if roots else str(first.consequence_of),
        known=tuple(sorted({one.id for place, _ in members for one in results[place].known.get(signature, ())})),
    )
