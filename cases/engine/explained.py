"""Which known issues a generated scenario's failure is."""

from __future__ import annotations

from cases.known import all_known
from harness.checks.findings import root_signatures
from harness.contract.types import Outcome
from harness.driving.results import ScenarioResult


def explained(outcome: ScenarioResult, release: str, *, place: str) -> frozenset[str]:
    """The ids that explain all its roots in that cell (kind/name); empty for one that did not fail, or by a new one."""
    if outcome.verdict.outcome is not Outcome.FAIL:
        return frozenset()
    return all_known(root_signatures(outcome.findings), release, place=place)
