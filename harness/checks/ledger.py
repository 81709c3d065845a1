"""The books: forwards entered by each rank, slots free at start and end, crashes and hangs.

No weights, no reference.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase

#: Forwards that every rank of a DP group must enter together, since each contains collectives.
COLLECTIVE = (Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.DRAFT, Phase.VERIFY, Phase.EXTEND)


@register(
    name="ledger",
    kinds=(Kind.LOCKSTEP, Kind.LEAK, Kind.CRASH, Kind.HANG),
    reads=("scenario", "engine"),
    protects="ranks stay in step, idle ones too; the pool gets back every slot; nothing dies or stops",
)
def check_ledger(evidence: Evidence) -> CheckResult:
    """LOCKSTEP, LEAK, CRASH, HANG."""
    result = CheckResult()
    result.divergences += _stops(evidence)
    if evidence.scenario.engine.dp > 1:
        result.divergences += _lockstep(evidence)
        result.divergences += _stuck(evidence)
    result.divergences += _leaks(evidence)
    if not result.divergences:
        result.unknown += _unbalanced_books(evidence)
    return result


def _at(dp_rank: int, phase: str) -> Key:
    """The key of something that belongs to a rank, not to a request."""
    return Key(dp_rank=dp_rank, rid="", epoch=0, committed=-1, phase=phase, step=0, slot=0)


def _stops(evidence: Evidence) -> Iterator[Divergence]:
    """CRASH and HANG events."""
    for event in evidence.engine.events:
        if event.name not in ("crash", "hang"):
            continue
        data = event.data
        yield Divergence(
            kind=Kind.CRASH if event.name == "crash" else Kind.HANG,
            check="ledger",
            key=_at(int(data.get("dp_rank_reported", event.dp_rank)), str(data.get("phase") or Phase.IDLE)),
            round=int(data.get("round", -1)),
            expected="the batch completes",
            observed=str(data.get("error") or data.get("what") or event.name),
            hint=_site(str(data.get("site", ""))),
        )


def _site(site: str) -> str:
    """module:function of a crash site; the line would change with every release."""
    return ":".join(site.split(":")[:2])


def _lockstep(evidence: Evidence) -> Iterator[Divergence]:
    """LOCKSTEP where ranks (of a pair, the decode side's) entered different numbers of one forward in one tick."""
    records = [record for record in evidence.engine.rounds if record.side != "prefill"]
    ranks = sorted({(record.dp_rank, record.tp_rank) for record in records})
    ticks: dict[int, dict[tuple[int, int], dict[str, int]]] = {}
    numbers: dict[tuple[int, tuple[int, int]], int] = {}
    for record in records:
        rank = (record.dp_rank, record.tp_rank)
        entered = ticks.setdefault(record.tick, {}).setdefault(rank, {})
        numbers.setdefault((record.tick, rank), record.index)
        for phase, count in record.forwards.items():
            entered[phase] = entered.get(phase, 0) + count
    for tick, by_rank in sorted(ticks.items()):
        number = min(numbers[tick, rank] for rank in by_rank)
        for phase in COLLECTIVE:
            counts = {rank: by_rank.get(rank, {}).get(phase, 0) for rank in ranks}
            most = max(counts.values())
            for rank, count in counts.items():
                if count != most:
                    yield Divergence(
                        kind=Kind.LOCKSTEP,
                        check="ledger",
                        key=_at(rank[0], phase),
                        round=numbers.get((tick, rank), number),
                        expected=most,
                        observed=count,
                        hint="absent" if rank not in by_rank else "fewer-forwards",
                    )


def _stuck(evidence: Evidence) -> Iterator[Divergence]:
    """LOCKSTEP in the batch that hangs: a rank that came to a later forward without all of an earlier one."""
    for event in evidence.engine.events:
        ranks = event.data.get("ranks", ()) if event.name == "hang" else ()
        entered = [(int(rank["dp_rank"]), dict(rank["forwards"]), rank) for rank in ranks if "forwards" in rank]
        for place, phase in enumerate(COLLECTIVE):
            most = max((forwards.get(phase, 0) for _, forwards, _ in entered), default=0)
            for dp_rank, forwards, rank in entered:
                further = any(forwards.get(later, 0) for later in COLLECTIVE[place + 1 :])
                if further and forwards.get(phase, 0) < most:
                    yield Divergence(
                        kind=Kind.LOCKSTEP,
                        check="ledger",
                        key=_at(dp_rank, phase),
                        round=int(rank.get("at_round", -1)),
                        expected=most,
                        observed=forwards.get(phase, 0),
                        hint="fewer-forwards",
                    )


def _pool(events: tuple[Event, ...], when: str) -> dict[tuple[int, str], int]:
    """(dp_rank, what) -> slots free or evictable; the first 'start', the last 'end'.

    what: '' for the only pool there is; of a pair of engines 'prefill-' and 'decode-', and their rows of metadata.
    """
    found: dict[tuple[int, str], int] = {}
    for event in events:
        if event.name != "pool" or event.data.get("when") != when:
            continue
        side = f"{event.data['side']}-" if event.data.get("side") else ""
        levels = {side: int(event.data["free"]) + int(event.data.get("evictable", 0))}
        if "metadata" in event.data:
            levels[f"{side}metadata-"] = int(event.data["metadata"])
        for what, level in levels.items():
            if when == "end" or (event.dp_rank, what) not in found:
                found[event.dp_rank, what] = level
    return found


def _leaks(evidence: Evidence) -> Iterator[Divergence]:
    """LEAK where the pool does not hold at the end what it held at the start."""
    start, end = _pool(evidence.engine.events, "start"), _pool(evidence.engine.events, "end")
    last = max((record.index for record in evidence.engine.rounds), default=-1)
    for place in sorted(set(start) & set(end)):
        if end[place] != start[place]:
            yield Divergence(
                kind=Kind.LEAK,
                check="ledger",
                key=_at(place[0], "IDLE"),
                round=last,
                expected=start[place],
                observed=end[place],
                hint=place[1] + ("lost" if end[place] < start[place] else "freed-twice"),
            )


def _unbalanced_books(evidence: Evidence) -> Iterator[str]:
    start, end = _pool(evidence.engine.events, "start"), _pool(evidence.engine.events, "end")
    if not start or set(start) != set(end):
        yield "pool levels at start and end are not both recorded, so a leak could not show"
