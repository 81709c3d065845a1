"""Checks of whole ranks: crashes, hangs, lockstep, leaked slots; idle ranks too.

Read from events and batch records, of which every rank leaves some; an idle rank has no rows, so its `idle_state`
events (one a model forward, `busy_state` where it has work) are all there is to see of it. No weights, no reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from harness.checks.ends import stops
from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.trace import Event
from harness.contract.types import EXTENDING, TARGET, Divergence, Key, Kind, Phase

#: Behind the name of a pool whose level is right: slots that are free twice hide as many that are lost.
INSTEAD = "instead-"
#: Forwards that every rank of a DP group must enter together, since each contains collectives.
COLLECTIVE = ((Phase.PREFILL,), (Phase.DRAFT_PREFILL,), (Phase.DRAFT,), (Phase.VERIFY,), (Phase.EXTEND,))
#: The same where one rank may verify beside another's prefill.
COORDINATED = ((Phase.DRAFT,), TARGET, EXTENDING)


@register(id="ledger", kinds=(Kind.LOCKSTEP, Kind.LEAK, Kind.CRASH, Kind.HANG), reads=("scenario", "engine"))
def check_resource_accounting(evidence: Evidence) -> CheckResult:
    """Ranks stay in step, idle ones too; the pool gets back every slot; nothing dies or stops.

    LOCKSTEP, LEAK, CRASH, HANG.
    """
    result = CheckResult()
    result.divergences += stops(evidence)
    if evidence.scenario.engine.dp_size > 1:
        result.divergences += _lockstep(evidence)
    if max(evidence.scenario.engine.dp_size, evidence.scenario.engine.tp_size) > 1:
        result.divergences += _stuck(evidence)
    result.divergences += _leaks(evidence)
    if not result.divergences:
        result.unknown += _levels_missing(evidence)
    return result


def _lockstep(evidence: Evidence) -> Iterator[Divergence]:
    """LOCKSTEP where ranks (of a pair, the decode side's) entered one forward a different number of times in a step."""
    records = [record for record in evidence.engine.rounds if record.side != "prefill"]
    ranks = sorted({(record.dp_rank, record.tp_rank) for record in records})
    scheduler_steps: dict[int, dict[tuple[int, int], dict[str, int]]] = {}
    numbers: dict[tuple[int, tuple[int, int]], int] = {}
    for record in records:
        rank = (record.dp_rank, record.tp_rank)
        entered = scheduler_steps.setdefault(record.scheduler_step, {}).setdefault(rank, {})
        numbers.setdefault((record.scheduler_step, rank), record.index)
        for phase, count in record.forwards.items():
            entered[phase] = entered.get(phase, 0) + count
    for scheduler_step, by_rank in sorted(scheduler_steps.items()):
        number = min(numbers[scheduler_step, rank] for rank in by_rank)
        for stage in _stages(evidence):
            counts = {rank: _entered(stage, by_rank.get(rank, {})) for rank in ranks}
            most = max(counts.values())
            for rank, count in counts.items():
                if count != most:
                    yield Divergence(
                        kind=Kind.LOCKSTEP,
                        key=Key.of_rank(rank[0], stage[-1]),
                        round=numbers.get((scheduler_step, rank), number),
                        expected=most,
                        observed=count,
                        hint="absent" if rank not in by_rank else "fewer-forwards",
                    )


def _stages(evidence: Evidence) -> tuple[tuple[Phase, ...], ...]:
    """In order, the forwards of which every rank enters one of each."""
    return COORDINATED if evidence.scenario.engine.dp_spec_prefill_coordination else COLLECTIVE


def _entered(stage: tuple[Phase, ...], forwards: Mapping[str, int]) -> int:
    """How often a rank entered one of them; forwards: by phase."""
    return sum(forwards.get(phase, 0) for phase in stage)


def _stuck(evidence: Evidence) -> Iterator[Divergence]:
    """LOCKSTEP in the batch that hangs: a rank that came to a later forward without all of an earlier one."""
    for event in evidence.engine.events:
        ranks = event.data.get("ranks", ()) if event.name == "hang" else ()
        entered = [(int(rank["dp_rank"]), dict(rank["forwards"]), rank) for rank in ranks if "forwards" in rank]
        stages = _stages(evidence)
        for place, stage in enumerate(stages):
            most = max((_entered(stage, forwards) for _, forwards, _ in entered), default=0)
            for dp_rank, forwards, rank in entered:
                further = any(_entered(later, forwards) for later in stages[place + 1 :])
                if further and _entered(stage, forwards) < most:
                    yield Divergence(
                        kind=Kind.LOCKSTEP,
                        key=Key.of_rank(dp_rank, stage[-1]),
                        round=int(rank.get("at_round", -1)),
                        expected=most,
                        observed=_entered(stage, forwards),
                        hint="fewer-forwards",
                    )


def _pool(events: tuple[Event, ...], when: str) -> dict[tuple[int, str, int], int]:
    """(dp_rank, what, tp_rank beside the first, else 0) -> slots free or evictable; the first 'start', the last 'end'.

    what: '' for the only pool there is, 'window-' for that of layers with sliding windows; of a pair of engines
    'prefill-' and 'decode-' before them, and their rows of metadata. INSTEAD at the end: slots that are free twice.
    """
    found: dict[tuple[int, str, int], int] = {}
    for event in events:
        if event.name != "pool" or event.data.get("when") != when:
            continue
        side = f"{event.data['side']}-" if event.data.get("side") else ""
        levels = {side: int(event.data["free"]) + int(event.data.get("evictable", 0))}
        levels[side + INSTEAD] = int(event.data.get("twice", 0))
        if "window_free" in event.data:
            levels[f"{side}window-"] = int(event.data["window_free"]) + int(event.data["window_evictable"])
        if "metadata" in event.data:
            levels[f"{side}metadata-"] = int(event.data["metadata"])
        for what, level in levels.items():
            place = event.dp_rank, what, int(event.data.get("tp_rank", 0))
            if when == "end" or place not in found:
                found[place] = level
    return found


def _leaks(evidence: Evidence) -> Iterator[Divergence]:
    """LEAK where the pool does not hold at the end what it held at the start, or as many, but some of them twice."""
    start, end = _pool(evidence.engine.events, "start"), _pool(evidence.engine.events, "end")
    last = max((record.index for record in evidence.engine.rounds), default=-1)
    for place in sorted(set(start) & set(end)):
        pool = place[0], place[1].removesuffix(INSTEAD), place[2]  # a level that is off says it already
        if end[place] != start[place] and (place == pool or end[pool] == start[pool]):
            yield Divergence(
                kind=Kind.LEAK,
                key=Key.of_rank(place[0], "IDLE"),
                round=last,
                expected=start[place],
                observed=end[place],
                hint=place[1]
                + ("lost" if end[place] < start[place] else "freed-twice")
                + (f"-on-tp-rank-{place[2]}" if place[2] else ""),
            )


def _levels_missing(evidence: Evidence) -> Iterator[str]:
    start, end = _pool(evidence.engine.events, "start"), _pool(evidence.engine.events, "end")
    if not start or set(start) != set(end):
        yield "pool levels at start and end are not both recorded, so a leak could not show"


#: (scheduler step, phase, step): one forward that all ranks enter together.
Moment = tuple[int, str, int]


@register(id="idle_width", kinds=(Kind.SHAPE,), reads=("engine",))
def check_states_of_idle_ranks(evidence: Evidence) -> CheckResult:
    """An idle rank carries draft states of the width and dtype that busy ranks carry in the same forward.

    SHAPE where an `idle_state` event (data: phase, step, width, dtype, held, round) is not what it should be.

    Width and dtype are those of the busy ranks; `held` counts the rows of the state, of which there must be none.
    """
    result = CheckResult()
    busy = _by_moment(evidence, "busy_state")
    for event in evidence.engine.named("idle_state"):
        if event.data.get("held"):
            result.divergences.append(_fault(event, kind=Kind.SHAPE, expected=0, hint="idle-rows", field="held"))
        for field, hint in (("width", "idle-width"), ("dtype", "idle-dtype")):
            expected = _expected(evidence, event, field, busy.get(_moment(event), []))
            if expected in (None, "", -1):
                continue  # a forward without a draft state
            result.count("idle_states", 1)
            if event.data[field] != expected:
                result.divergences.append(_fault(event, kind=Kind.SHAPE, expected=expected, hint=hint, field=field))
    return result


def _expected(evidence: Evidence, event: Event, field: str, busy: list[Event]) -> Any:
    """What the busy ranks bring to the same forward; for a width alone, what any rows of that phase have.

    Before the first draft step of all, what the draft gave for a prompt: that is what a draft step is fed.
    """
    if field not in event.data:
        return None
    if busy:
        return busy[0].data[field]
    phase, tensors = event.data["phase"], evidence.engine.tensors
    given = tensors.get("hidden_out.DRAFT_PREFILL") if phase == "DRAFT" else None
    rows = tensors.get(f"hidden_in.{phase}", given)
    return rows.shape[1] if rows is not None and field == "width" else None


@register(id="announced", kinds=(Kind.LOCKSTEP,), reads=("scenario", "engine"))
def check_announced_counts(evidence: Evidence) -> CheckResult:
    """Every rank learns how many tokens each rank brings to a forward, and each brings that many.

    LOCKSTEP where a count that a rank was given differs from the rows that rank fed, or pads otherwise.
    """
    result = CheckResult()
    stages = {str(phase): str(stage[-1]) for stage in _stages(evidence) for phase in stage}
    share = max(evidence.scenario.engine.attention_tp_size, 1)
    moments: dict[tuple[int, str, int], list[Event]] = {}
    layers = Counter[tuple[int, str, int]]()  # an MTP draft's, of each rank one after the other
    for name in ("busy_state", "idle_state"):
        for (at, phase, step), events in _by_moment(evidence, name).items():
            for event in events if not step else ():  # later draft steps go on with what SGLang padded for the first
                forward = at, phase, event.dp_rank
                moments.setdefault((at, stages.get(phase, phase), layers[forward]), []).append(event)
                layers[forward] += 1
    for _, events in sorted(moments.items()):
        rows: dict[int, Any] = {event.dp_rank: event.data.get("rows") for event in events}
        for event in events[1:]:
            if event.data.get("padding") != (expected := events[0].data.get("padding")):
                fault = _fault(event, kind=Kind.LOCKSTEP, expected=expected, hint="padded-otherwise", field="padding")
                result.divergences.append(fault)
        for event in events:
            announced = event.data.get("announced") or []
            # where ranks draft for themselves SGLang tells each its own count alone, if one prefills beside a verify
            alone = evidence.scenario.engine.dp_spec_prefill_coordination and len(announced) == 1
            for rank, count in [(event.dp_rank, announced[0])] if alone else enumerate(announced):
                if rows.get(rank) is None:
                    continue  # a rank that did not enter: the resource accounting says so
                result.count("token_counts", 1)
                # in some releases the target's forward rounds the list itself up to its TP ranks
                padded = -(-rows[rank] // share) * share if event.data["phase"] in EXTENDING else rows[rank]
                if count not in (rows[rank], padded):
                    exchanged = sorted(announced) == sorted(rows.values())
                    hint = "exchanged" if exchanged else "own" if rank == event.dp_rank else "of-another-rank"
                    divergence = _fault(event, kind=Kind.LOCKSTEP, expected=rows[rank], hint=hint)
                    result.divergences.append(divergence)
    return result


def _moment(event: Event) -> Moment:
    return event.scheduler_step, str(event.data["phase"]), int(event.data.get("step", 0))


def _by_moment(evidence: Evidence, name: str) -> dict[Moment, list[Event]]:
    found: dict[Moment, list[Event]] = {}
    for event in evidence.engine.named(name):
        found.setdefault(_moment(event), []).append(event)
    return found


def _fault(event: Event, *, kind: Kind, expected: Any, hint: str, field: str = "announced") -> Divergence:
    _, phase, step = _moment(event)
    return Divergence(
        kind=kind,
        key=Key.of_rank(event.dp_rank, phase, step=step),
        round=int(event.data.get("round", -1)),
        expected=expected,
        observed=event.data[field],
        hint=hint,
    )
