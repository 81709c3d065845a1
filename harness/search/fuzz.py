"""What a run of generated scenarios found, made small: one reproducer for each failure that nothing else explains.

It must not draw scenarios; `cases/generation` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.checks.findings import by_signature, root_signatures
from harness.contract.scenario import Scenario
from harness.driving.live import LiveEngines
from harness.driving.plan import Plan
from harness.driving.results import RunResult, ScenarioResult
from harness.search.shrink import Budget, shrink, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """scenarios: how many show it; smallest: the least of those that begin with it."""

    signature: str
    scenarios: int
    smallest: Scenario


def failures(results: Sequence[ScenarioResult]) -> list[Failure]:
    """One a signature that some scenario's failure begins with; what most scenarios show comes first."""
    found = [
        Failure(
            signature=shared.signature,
            scenarios=len(shared.members),
            smallest=min((results[at].scenario for at, _ in shared.roots), key=size),
        )
        for shared in by_signature(one.findings for one in results)
        if shared.roots
    ]
    return sorted(found, key=lambda one: (-one.scenarios, one.signature))


def reproducers(
    plan: Plan, result: RunResult, *, budget: Budget, started: Callable[[Failure], None]
) -> Iterator[tuple[Failure, Scenario, Path]]:
    """Each failure, the smallest scenario found in the budget that shows it, driven once more, and where it is kept."""
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
        return root_signatures(engines(scenario, revert=plan.setup.revert, fresh=True).findings)

    try:
        for found in failures(result.results):
            started(found)
            small = shrink(found.smallest, fails, found.signature, budget=budget).scenario
            outcome = engines(small, revert=plan.setup.revert, fresh=True)
            yield found, small, outcome.save_reproducer(result.folder)
    finally:
        engines.close()
