"""What a witness did not see of a scenario: rows without one are compared with nothing, and a verdict says so.

Nothing here can fail a scenario; it can only keep a PASS from being empty.
"""

from __future__ import annotations

from harness.checks.evidence import Evidence
from harness.contract.providers import LIMITS, NOT_COMPARED, is_witness, witnessed_in


def witnessed(evidence: Evidence) -> tuple[list[str], list[str]]:
    """(reasons for UNKNOWN, what to say) where a witness stood in for a reference."""
    if evidence.reference is None or not is_witness(evidence.reference.header):
        return [], []
    seen = witnessed_in(evidence.reference.header)
    unknown = [f"nothing compared: no {name} row has a witness" for name, (known, _) in seen.rows.items() if not known]
    notes = [LIMITS]
    notes += [
        f"{NOT_COMPARED}: {name} rows without a witness" for name, (known, of) in seen.rows.items() if 0 < known < of
    ]
    notes += [f"{NOT_COMPARED}: {fault}" for fault in seen.faults]
    if any(not request.greedy for request in evidence.scenario.requests):
        notes.append(f"{NOT_COMPARED}: what is accepted at a temperature, since a witness knows no probabilities")
    return unknown, notes
