"""Checks that cached rows stay what was written, come back from the host as they were, and go when they must.

No values are compared here but by the probe, which compares the engine's own cache with itself.

A row that something writes over shows in whatever attends it, a request's last row for instance, in a later forward.
Here it is named itself, by its position (event 'changed', `harness.engine_side.probes.cached_rows`).

What is loaded from the host for a request are the rows of its own prefix. Which row lies in which slot, of the device
and of the host, follows from the rows that were written and from the copies that the probe saw begin (event 'host',
`harness.engine_side.probes.host_probe`).

An engine begins a scenario with an empty cache. A flush, new weights and released memory empty it again. A prompt may
start from KV of a text only where some request of the scenario had that text since, with the same adapter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.pools import NOBODY, Forward, Pools, followed
from harness.checks.registry import CheckResult, register
from harness.contract.align import Ints
from harness.contract.batches import Share, copies, shares_of
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase


@register(id="cached", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_cached_rows(evidence: Evidence) -> CheckResult:
    """A row of the KV cache holds what was written there until the slot is written again.

    CACHE_SLOT for each request and forward that reads a slot which holds something else than was written.
    """
    result = CheckResult()
    events = {_moment(event): event for event in evidence.engine.named("changed")}
    for forward, own in followed(evidence) if events else ():
        own.write(forward)
        if event := events.get((forward.dp_rank, forward.round, str(forward.phase), forward.step)):
            result.divergences += _found(event, forward, own)
    return result


def _moment(event: Event) -> tuple[int, int, str, int]:
    return event.dp_rank, event.data["round"], event.data["phase"], event.data["step"]


def _found(event: Event, forward: Forward, pools: Pools) -> list[Divergence]:
    return [_divergence(forward, pools, share, slots) for share, slots in shares_of(event, "slots") if slots]


def _divergence(forward: Forward, pools: Pools, share: Share, slots: list[int]) -> Divergence:
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


@register(id="host", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_host_rows(evidence: Evidence) -> CheckResult:
    """What is loaded from the host for a request are the rows of its own prefix, of target and draft alike.

    CACHE_SLOT for each request and pool for which other rows were loaded than those of its prefix.
    """
    result = CheckResult()
    due: dict[tuple[int, str], list[Event]] = {}
    for event in copies(evidence.engine):
        if event.data["what"] == "loaded" and event.data["rid"]:
            due.setdefault((event.dp_rank, event.data["rid"]), []).append(event)
    for forward, own in followed(evidence) if due else ():
        own.copy_until(forward)
        for share in forward.shares if forward.phase is Phase.PREFILL else ():
            waiting = due.get((share[0], share[1]), [])
            slots = [slot for event in waiting if event.data["round"] <= forward.round for slot in event.data["device"]]
            if slots:
                due[share[0], share[1]] = [event for event in waiting if event.data["round"] > forward.round]
                result.divergences += _loaded(np.asarray(slots, dtype=np.int64), forward, share, own, result)
        own.write(forward)
    return result


def _loaded(slots: Ints, forward: Forward, share: Share, pools: Pools, result: CheckResult) -> Iterator[Divergence]:
    """slots: int64 [w], where the rows were loaded to; they end where the first of the request's own begins."""
    due = pools.of_positions(share, share[3])[share[3] - len(slots) :]
    for pool in pools.names():
        held = pools.holds(pool, slots, share, known=0)
        result.count("host_rows", len(slots))
        wrong = np.flatnonzero(held != due) if len(held) == len(due) else np.arange(len(held))
        if not len(wrong):
            continue
        first = int(wrong[0])
        yield Divergence(
            kind=Kind.CACHE_SLOT,
            key=Key.of(share, str(forward.phase)),
            round=forward.round,
            expected=f"position {share[3] - len(slots) + first} in the {pool} pool, loaded to slot {slots[first]}",
            observed=f"{pools.said(int(held[first]), share)}, and {len(wrong) - 1} more that are not its own",
            hint=f"other-rows-from-host-{pool.replace(' ', '-')}",
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
        lora = evidence.scenario.request(first.rid).lora_path
        alike = (rid for rid in others if evidence.scenario.request(rid).lora_path == lora)
        held = max((evidence.alike(first.rid, rid) for rid in alike), default=0)
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
