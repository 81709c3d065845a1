"""What a run of generated scenarios found, made small: one reproducer for each failure that nothing else explains.

It must not draw scenarios; `cases/generation` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.contract.scenario import Scenario
from harness.driving.live import LiveEngines
from harness.driving.plan import Plan
from harness.driving.results import RunResult
from harness.search.shrink import Budget, Shrunk, Step, shrink
from harness.search.tally import FindingTally, roots, tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A finding, the smallest scenario that shows it, and the folder of its reproducer."""

    found: FindingTally
    shrunk: Shrunk
    folder: Path


def root_findings(result: RunResult) -> list[FindingTally]:
    """One entry a signature that some scenario's failure begins with."""
    found = tally((one.scenario, one.findings) for one in result.results)
    return [one for one in found if not one.consequence]


def reproducers(
    plan: Plan,
    result: RunResult,
    *,
    budget: Budget,
    started: Callable[[FindingTally], None],
    progress: Callable[[Step], None],
) -> Iterator[Small]:
    """Each root finding's smallest scenario within the budget, driven once more and kept in the run's folder."""
    engines = LiveEngines(
        environment=lambda _version: plan.env,
        default=plan.env.version,
        device=plan.setup.device,
        logs=result.folder / "shrinking",
        lease=plan.lease,
        copies=plan.copies,
        assumed=plan.setup.assumed,
        own=plan.own,
        reference=plan.setup.reference,
    )

    def fails(scenario: Scenario) -> frozenset[str]:
        return roots(engines(scenario, revert=plan.setup.revert, fresh=True).findings)

    try:
        for found in root_findings(result):
            started(found)
            shrunk = shrink(found.smallest, fails, found.signature, budget=budget, progress=progress)
            outcome = engines(shrunk.scenario, revert=plan.setup.revert, fresh=True)
            yield Small(found=found, shrunk=shrunk, folder=outcome.save_reproducer(result.folder))
    finally:
        engines.close()
