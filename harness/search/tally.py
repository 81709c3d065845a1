"""Many judged scenarios as few findings: one line a failure signature, with how often and where it is easiest to see.

It must not judge and must not run anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.checks.findings import Finding, Shared, by_signature
from harness.contract.scenario import Scenario
from harness.contract.types import Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingTally:
    """One defect over a run. scenarios, divergences: how many show it; smallest: the least of them; first: its first
    divergence; consequence: whether something else explains it in every scenario."""

    signature: str
    scenarios: int
    divergences: int
    smallest: Scenario
    first: Divergence
    consequence: bool


def tally(judged: Iterable[tuple[Scenario, Iterable[Finding]]]) -> list[FindingTally]:
    """One entry a signature, roots first, then by how many scenarios show it."""
    given = list(judged)
    tallies = [_tally(shared, [one for one, _ in given]) for shared in by_signature(found for _, found in given)]
    return sorted(tallies, key=lambda entry: (entry.consequence, -entry.scenarios, entry.signature))


def _tally(shared: Shared, scenarios: Sequence[Scenario]) -> FindingTally:
    members = [(scenarios[at], finding) for at, finding in shared.roots or shared.members]
    smallest, finding = min(members, key=lambda member: size(member[0]))
    return FindingTally(
        signature=shared.signature,
        scenarios=len(shared.members),
        divergences=shared.count,
        smallest=smallest,
        first=finding.first,
        consequence=not shared.roots,
    )


def roots(findings: Iterable[Finding]) -> frozenset[str]:
    """Signatures of what nothing earlier explains: the identity of a failure."""
    return frozenset(finding.signature for finding in findings if finding.is_root)


def size(scenario: Scenario) -> tuple[int, ...]:
    """What shrinking reduces, in this order: requests, ops, tokens to generate, prompt tokens, scheduler steps."""
    return (
        len(scenario.requests),
        sum(op.kind != "step" for op in scenario.script),
        sum(request.max_new_tokens for request in scenario.requests),
        sum(len(request.input_ids) for request in scenario.requests),
        sum(len(request.stop_token_ids) for request in scenario.requests),
        sum(op.count for op in scenario.script if op.kind == "step"),
        len(scenario.wants)
        + sum(value is not None for value in (scenario.engine.chunked_prefill_size, scenario.engine.running_limit)),
    )
