"""Checks that cached rows stay what was written: the engine's own cache, compared with itself by the probe.

A row that something writes over shows in whatever attends it, a request's last row for instance, in a later forward.
Here it is named itself, by its position (event 'changed', `harness.engine_side.probes.cached_rows`).
"""

from __future__ import annotations

from harness.checks.evidence import Evidence
from harness.checks.pools import NOBODY, Forward, Pools, forwards
from harness.checks.registry import CheckResult, register
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind


@register(
    id="cached",
    kinds=(Kind.CACHE_SLOT,),
    reads=("scenario", "engine"),
    protects="a row of the KV cache holds what was written there until the slot is written again",
)
def check_cached_rows(evidence: Evidence) -> CheckResult:
    """CACHE_SLOT for each request and forward that reads a slot which holds something else than was written."""
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
