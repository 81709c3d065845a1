"""Situations of requests that leave and come back: aborts, retraction, pauses, a full pool. See `cases/situations`."""

from __future__ import annotations

from collections.abc import Iterator

from cases.situation_words import Place, aborted, last_output, parts_of_request, situation
from harness.contract.batches import Part, leading_rounds, parts_of
from harness.contract.trace import RequestEnd, Trace
from harness.contract.types import Scenario

#: The context window that engines are started with; see `harness.engines.launch.build_launch`.
CONTEXT = 512


def _before_abort(trace: Trace) -> Iterator[list[Part]]:
    """What each aborted request had done when the abort was asked for; releases differ in how soon they act on it."""
    asked = {str(event.data.get("rid")): event.tick for event in trace.events if event.name == "abort"}
    for end in aborted(trace):
        parts = parts_of_request(trace, end.rid)
        yield [part for part in parts if part.record.tick < asked.get(end.rid, part.record.tick + 1)]


@situation("a request aborted while it waited, before any of its prompt was prefilled")
def abort_before_prefill(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (None for parts in _before_abort(trace) if not parts)


def _prefilled(parts: list[Part]) -> bool:
    return any(part.final or part.record.mode == "DECODE" for part in parts)


@situation("a request aborted before its prompt was prefilled to the end")
def abort_in_chunk(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[-1] for parts in _before_abort(trace) if parts and not _prefilled(parts))


@situation("a request aborted after its prompt was prefilled")
def abort_in_decode(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[-1] for parts in _before_abort(trace) if _prefilled(parts))


@situation("the only live request aborted")
def abort_last_live(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    ticks: dict[str, list[int]] = {}
    for record in leading_rounds(trace):
        for rid in record.rids:
            ticks.setdefault(rid, []).append(record.tick)
    asked = {str(event.data.get("rid")): event.tick for event in trace.events if event.name == "abort"}

    def alone(end: RequestEnd) -> bool:
        tick = asked.get(end.rid, end.tick)
        return not any(ticks[rid][0] < tick <= ticks[rid][-1] for rid in ticks if rid != end.rid)

    for end in aborted(trace):
        if end.rid in ticks and alone(end):
            yield parts_of_request(trace, end.rid)[-1]


@situation("a running request sent back to wait because one of higher priority came")
def preempted(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    rank = {request.rid: request.priority or 0 for request in scenario.requests}
    scripted = {event.tick for event in trace.events if event.name in ("retract", "abort")}
    prefills = {record.tick: record for record in leading_rounds(trace) if record.mode == "PREFILL"}
    running: set[str] = set()
    for event in trace.events:
        if event.name != "turn":
            continue
        back = running & set(event.data.get("waiting", ()))
        came = prefills.get(event.tick)
        if back and came and event.tick not in scripted:
            lowest = min(rank[rid] for rid in back)
            yield from (came for _ in range(any(rank[rid] > lowest for rid in came.rids)))
        running = set(event.data.get("running", ()))


# Coming back


@situation("a request that was retracted and came back")
def retract_resume(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[0] for (_, epoch), parts in parts_of(trace).items() if epoch > 0)


def _borders(parts: list[Part]) -> Iterator[tuple[Part, int]]:
    """Where the prefill of a request that came back starts or is cut, with the part that lies behind the border."""
    for part in parts:
        if part.record.mode == "PREFILL" and part.start > 0:
            yield part, part.start


@situation("a request came back, and its cached prefix or a chunk of it ends inside the prompt")
def retract_border_in_prompt(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for (rid, epoch), parts in parts_of(trace).items():
        if epoch:
            prompt = len(scenario.request(rid).prompt)
            yield from (part for part, border in _borders(parts) if border < prompt)


@situation("a request came back, and its cached prefix or a chunk of it ends inside what it had generated")
def retract_border_in_output(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for (rid, epoch), parts in parts_of(trace).items():
        if epoch:
            prompt = len(scenario.request(rid).prompt)
            yield from (part for part, border in _borders(parts) if border > prompt)


@situation("requests held in the middle of their generation by a pause, and let go on")
def pause_resume(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    pauses = [event.tick for event in trace.events if event.name == "pause"]
    for parts in parts_of(trace).values():
        ticks = [part.record.tick for part in parts]
        for pause in pauses:
            after = [part for part in parts if part.record.tick >= pause]
            if ticks[0] < pause and after:
                yield after[0]


@situation("the pool ran out, so the engine itself sent a request back to the queue")
def pool_exhausted(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    """Restarts that nobody asked for."""
    if any(op.kind == "retract" or op.kind == "pause" for op in scenario.script):
        by_pool = (event.name == "retract" and event.data.get("reason") == "pool" for event in trace.events)
        yield from (None for happened in by_pool if happened)
    else:
        yield from retract_resume(scenario, trace)


@situation("a request that filled the context window as far as SGLang lets one, or was cut by it")
def context_limit(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    """SGLang holds back max(k·t, n) slots of the window for drafts."""
    spec, context = scenario.spec, int(trace.header.get("context_length", CONTEXT))
    room = context - max(spec.k * spec.t, spec.n)
    for end in trace.ends:
        cut = len(end.output_ids) < scenario.request(end.rid).max_new_tokens
        if end.reason == "length" and (cut or last_output(scenario, end) + 1 >= room):
            yield from parts_of_request(trace, end.rid)[-1:]
