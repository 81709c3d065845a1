"""Checks that nothing is read from a cache that was emptied, from rows alone.

An engine begins a scenario empty. A flush, new weights and released memory empty it again. A prompt may start from KV
of a text only where some request of the scenario had that text since, with the same adapter.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.trace import Event
from harness.contract.types import Kind, Phase


@register(
    id="flushed",
    kinds=(Kind.CACHE_SLOT,),
    reads=("scenario", "engine"),
    protects="no prompt starts from KV that was thrown away: by a flush, with old weights, or with released memory",
)
def check_flushed(evidence: Evidence) -> CheckResult:
    """CACHE_SLOT at the first row of a prompt that starts behind what its engine can still hold of it."""
    result = CheckResult()
    emptied = sorted(event.scheduler_step for event in evidence.engine.events if _empties(event))
    for parts in evidence.parts.values():
        first = parts[0]
        rows = evidence.table.of(first.share, Phase.PREFILL)
        if first.record.mode != "PREFILL" or first.start == 0 or not rows:
            continue
        since = max((step for step in emptied if step <= first.record.scheduler_step), default=0)
        others = _seen(evidence, since, first.record.index)
        held = max((_shared(evidence, first.rid, rid) for rid in others), default=0)
        if held < first.start:
            result.divergences.append(
                evidence.divergence(
                    rows[0], kind=Kind.CACHE_SLOT, expected=held, observed=first.start, hint="thrown-away"
                )
            )
    return result


def _empties(event: Event) -> bool:
    return (event.name == "flush" and bool(event.data["flushed"])) or (
        event.name in ("update", "memory") and bool(event.data["success"])
    )


def _seen(evidence: Evidence, since: int, before: int) -> Iterator[str]:
    """Requests with a batch from step `since` on, before batch `before`; on any rank."""
    for (rid, _), parts in evidence.parts.items():
        if any(part.record.scheduler_step >= since and part.record.index < before for part in parts):
            yield rid


def _shared(evidence: Evidence, one: str, other: str) -> int:
    """Leading tokens that two texts have in common, as far as they are known; none where their adapters differ."""
    if evidence.scenario.request(one).lora_path != evidence.scenario.request(other).lora_path:
        return 0
    left, right = evidence.full[one], evidence.full[other]
    place = 0
    while place in left and left[place] == right.get(place):
        place += 1
    return place
