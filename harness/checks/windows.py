"""Checks that every row finds what its sliding window reaches, in the pool that layers with windows have of their own.

A slot there is given back once no window reaches its position. That a window's values were right does not show it: a
slot that was given back keeps them until somebody else gets it. So the probe says which slots a request had when a
target's forward began (event 'window', `harness.engine_side.probes.pool_probe`).
"""

from __future__ import annotations

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.trace import WINDOW
from harness.contract.types import Divergence, Key, Kind


@register(id="windows", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_window_slots(evidence: Evidence) -> CheckResult:
    """Every position that a sliding window reaches has a slot of its own in the pool of windows.

    CACHE_SLOT for each request and forward with a position in reach that has no slot, or another's too.

    How far a window reaches says the reference, which reads it in the checkpoint; else, below a witness, the engine.
    """
    result = CheckResult()
    known = {} if evidence.reference is None else evidence.reference.header
    for event in evidence.engine.named("window"):
        data, window = event.data, int(known.get(WINDOW, event.data["window"]))
        names = ("rids", "attempts", "committed", "lens", "held_from", "shared")
        for rid, attempt, committed, length, held_from, shared in zip(*(data[name] for name in names), strict=True):
            needed = max(0, committed + 1 - window)
            result.count("window_slots", committed + length - needed)
            key = Key.of((event.dp_rank, rid, attempt, committed), data["phase"])
            for wrong, hint, expected, observed in (
                (held_from > needed, "window-slot-gone", f"every position from {needed} on", f"from {held_from} on"),
                (shared, "window-slot-shared", "a slot of its own for each position", f"{shared} that others have too"),
            ):
                if wrong:
                    result.divergences.append(
                        Divergence(
                            kind=Kind.CACHE_SLOT,
                            key=key,
                            round=data["round"],
                            expected=expected,
                            observed=observed,
                            hint=hint,
                        )
                    )
    return result
