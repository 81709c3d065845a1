"""Checks that cached rows stay what was written: the engine's own cache, compared with itself by the probe.

A row that something writes over shows in whatever attends it, a request's last row for instance, in a later forward.
Here it is named itself, by its position (event 'changed', `harness.engine_side.probes.cached_rows`).

An engine begins a scenario with an empty cache. A flush, new weights and released memory empty it again. A prompt may
start from KV of a text only where some request of the scenario had that text since, with the same adapter.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.evidence import Evidence
from harness.checks.pools import NOBODY, Forward, Pools, forwards
from harness.checks.registry import CheckResult, register
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase


@register(id="cached", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_cached_rows(evidence: Evidence) -> CheckResult:
    """A row of the KV cache holds what was written there until the slot is written again.

    CACHE_SLOT for each request and forward that reads a slot which holds something else than was written.
    """
    result = CheckResult()
    events = {_moment(event): event for event in evidence.engine.named("changed")}
    pools: dict[tuple[int, str], Pools] = {}
    for forward in forwards(evidence) if events else ():
        own = pools.setdefault((forward.dp_rank, forward.side), Pools(evidence))
        own.write(forward)
        if event := events.get((forward.dp_rank, forward.round, str(forward.phase), forward.step)):
            result.divergences += _found(event, forward, own)
    return result


def _moment(event: Event) -> tuple[int, int, str, int]:
    return event.dp_rank, event.data["round"], event.data["phase"], event.data["step"]


def _found(event: Event, forward: Forward, pools: Pools) -> list[Divergence]:
    data = event.data
    shares = zip(data["rids"], data["attempts"], data["committed"], data["slots"], strict=True)
    return [
        _divergence(forward, pools, (event.dp_rank, rid, attempt, committed), slots)
        for rid, attempt, committed, slots in shares
        if slots
    ]


def _divergence(forward: Forward, pools: Pools, share: tuple[int, str, int, int], slots: list[int]) -> Divergence:
    """Of one request: the first of its changed slots, and how many there are."""
    held = {slot: pools.held(forward.pool, slot) for slot in slots}
    slot = min(slots, key=lambda slot: (held[slot] == NOBODY, held[slot]))
    names = f"{pools.said(held[slot], share)} as it was written (slot {slot})"
    return Divergence(
        kind=Kind.CACHE_SLOT,
        key=Key.of(share, str(forward.phase), step=forward.step),
        round=forward.round,
        expected=names,
        observed="other values" + (f", and in {len(slots) - 1} more slots" if len(slots) > 1 else ""),
        hint="changed-since-written",
    )


@register(id="flushed", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_flushed(evidence: Evidence) -> CheckResult:
    """No prompt starts from KV that was thrown away: by a flush, with old weights, or with released memory.

    CACHE_SLOT at the first row of a prompt that starts behind what its engine can still hold of it.
    """
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
