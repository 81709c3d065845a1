"""Checks that what is loaded from the host, for a request, are the rows of its own prefix, in every pool that has any.

Which row lies in which slot, of the device and of the host, follows from the rows that were written and from the copies
that the probe saw begin (event 'host', `harness.engine_side.probes.host_probe`). No values: those are compared wherever
something attends them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.pools import Forward, Pools, forwards
from harness.checks.registry import CheckResult, register
from harness.contract.align import Ints
from harness.contract.batches import Share, copies
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase


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
    pools: dict[tuple[int, str], Pools] = {}
    for forward in forwards(evidence) if due else ():
        own = pools.setdefault((forward.dp_rank, forward.side), Pools(evidence))
        own.copy_until(forward)
        for share in forward.shares if forward.phase is Phase.PREFILL else ():
            waiting = due.get((share[0], share[1]), [])
            slots = [slot for event in waiting if event.data["round"] <= forward.round for slot in event.data["device"]]
            if slots:
                due[share[0], share[1]] = [event for event in waiting if event.data["round"] > forward.round]
                result.divergences += _judged(np.asarray(slots, dtype=np.int64), forward, share, own, result)
        own.write(forward)
    return result


def _judged(slots: Ints, forward: Forward, share: Share, pools: Pools, result: CheckResult) -> Iterator[Divergence]:
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
