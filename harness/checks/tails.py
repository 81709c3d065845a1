"""Copies of a prefix's last page: a branch of a paged tree that is read page by page must begin with it.

Needs no reference: the probe compared the engine's own cache with itself (`harness.engine_side.probes.verify_probe`).
This module must not judge what is not in an event 'tails'.
"""

from __future__ import annotations

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.types import Divergence, Key, Kind, Phase


@register(
    name="tails",
    kinds=(Kind.CACHE_SLOT,),
    reads=("scenario", "engine"),
    protects="every branch of a paged tree begins with a copy of the prefix's unfinished last page",
)
def check_tails(evidence: Evidence) -> CheckResult:
    """CACHE_SLOT for each request and round with a copy that is none."""
    result = CheckResult()
    for event in evidence.engine.events:
        if event.name != "tails":
            continue
        data = event.data
        shares = zip(data["rids"], data["epochs"], data["committed"], data["holes"], data["wrong"], strict=True)
        for rid, epoch, committed, holes, wrong in shares:
            result.count("cache_slots", holes)
            if wrong:
                key = Key(
                    dp_rank=event.dp_rank,
                    rid=rid,
                    epoch=epoch,
                    committed=committed,
                    phase=Phase.DRAFT,
                    step=0,
                    slot=0,
                )
                found = Divergence(
                    kind=Kind.CACHE_SLOT,
                    check="tails",
                    key=key,
                    round=data["round"],
                    expected=f"{holes} copied slots",
                    observed=f"{wrong} of them hold something else",
                    hint="prefix-tail-not-copied",
                )
                result.divergences.append(found)
    return result
