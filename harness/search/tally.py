"""Many judged scenarios as few findings: one line a failure signature, with how often and where it is easiest to see.

It must not judge and must not run anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.checks.findings import Finding
from harness.contract.types import Divergence, Scenario


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
    members: dict[str, list[tuple[Scenario, Finding]]] = {}
    for scenario, findings in judged:
        for finding in findings:
            members.setdefault(finding.signature, []).append((scenario, finding))
    tallies = [_tally(signature, found) for signature, found in members.items()]
    return sorted(tallies, key=lambda entry: (entry.consequence, -entry.scenarios, entry.signature))


def _tally(signature: str, members: list[tuple[Scenario, Finding]]) -> FindingTally:
    roots = [member for member in members if member[1].is_root] or members
    smallest, finding = min(roots, key=lambda member: size(member[0]))
    return FindingTally(
        signature=signature,
        scenarios=len(members),
        divergences=sum(finding.count for _, finding in members),
        smallest=smallest,
        first=finding.first,
        consequence=not any(finding.is_root for _, finding in members),
    )


def roots(findings: Iterable[Finding]) -> frozenset[str]:
    """Signatures of what nothing earlier explains: the identity of a failure."""
    return frozenset(finding.signature for finding in findings if finding.is_root)


def size(scenario: Scenario) -> tuple[int, ...]:
    """What shrinking makes less of, most telling first: requests, ops, tokens to generate, prompt tokens, turns."""
    return (
        len(scenario.requests),
        sum(op.kind != "tick" for op in scenario.script),
        sum(request.max_new_tokens for request in scenario.requests),
        sum(len(request.prompt) for request in scenario.requests),
        sum(len(request.stop_ids) for request in scenario.requests),
        sum(op.count for op in scenario.script if op.kind == "tick"),
        len(scenario.wants)
        + sum(value is not None for value in (scenario.engine.chunk, scenario.engine.running_limit)),
    )
