"""Checks who is served: which requests are taken, what an abort leaves of an answer, and who is taken back.

SGLang's own rules, held against the trace: no weights, no reference. It must not judge what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.checks.set_aside import errors, is_instead
from harness.contract import answers
from harness.contract.admission import ABORTED, EXHAUSTED, LOST_ON_THE_WAY, REFUSALS, reserved_slots, too_long
from harness.contract.batches import Part
from harness.contract.requests import RequestSpec
from harness.contract.trace import Event, RequestEnd
from harness.contract.types import Divergence, Key, Kind, Phase

#: How a request ends that is refused or given up; one that is streamed is not answered with an error.
GONE = ("error", "abort")
#: Reasons of a retraction in which SGLang alone chooses who goes back: its pool runs out, or its own test.
BY_ITSELF = ("pool", "test")


@register(id="admission", kinds=(Kind.EXTRA_ROW, Kind.MISSING_ROW), reads=("scenario", "engine"))
def check_admission(evidence: Evidence) -> CheckResult:
    """A request that is too long or finds the queue full is refused, no other is, and none is given up unasked.

    EXTRA_ROW for one served that must be refused, MISSING_ROW for one that is not served.
    """
    result = CheckResult()
    ends, told, full = _ends(evidence), answers.errors(evidence.engine), queue_refuses(evidence)
    for request in evidence.scenario.requests:
        rid, error = request.rid, told.get(request.rid, "")
        why = too_long(request, evidence.scenario.spec, evidence.scenario.engine) or (
            "the queue is full when it arrives" if full.get(rid) else ""
        )
        ran = not all(is_instead(evidence, part) for part in evidence.parts_of(rid))
        served = ran or bool(rid in ends and ends[rid].output_ids)
        if why:
            if served:
                said = f"refused: {why}"
                result.divergences.append(_of(evidence, rid, Kind.EXTRA_ROW, said, "served", "not-refused"))
        elif not served and any(word in error for word in REFUSALS):
            result.divergences.append(_of(evidence, rid, Kind.MISSING_ROW, "served", error, "refused"))
        elif rid in ends and (fault := _given_up(evidence, request, ends[rid], error)):
            result.divergences.append(_of(evidence, rid, Kind.MISSING_ROW, "served on", fault, "given-up"))
        if request.expect != "answer" and rid in ends and ends[rid].reason not in GONE:
            result.unknown.append(f"request {rid} was to end in {request.expect}, and ended by {ends[rid].reason}")
    return result


def _given_up(evidence: Evidence, request: RequestSpec, end: RequestEnd, error: str) -> str:
    """What was said to a request that was given up though nobody aborted it and the pool had room; empty if not so.

    Of a pair of engines: though it was read, and the scenario neither aborts it nor has its transfer fail.
    """
    scenario, last = evidence.scenario, evidence.last.get(request.rid)
    if scenario.engine.disaggregation:
        said = errors(evidence).get(request.rid, "")
        return said if last is not None and LOST_ON_THE_WAY in said else ""
    exhausted = EXHAUSTED in error or (request.expect == "exhaustion" and end.reason in GONE)
    asked = any(op.kind == "abort" and request.rid in op.rids for op in scenario.script)
    if (end.reason == "abort" or error == ABORTED) and not exhausted and not asked:
        return "aborted, and nobody asked for it"
    if exhausted and last is not None and (scenario.spec.eagle_topk == 1 or scenario.engine.page_size == 1):
        page = scenario.engine.page_size
        needed = -(-(last.start + last.length + reserved_slots(scenario.spec)) // page) * page
        if needed <= scenario.engine.max_total_tokens // page * page:
            return f"{error or 'aborted'}, where it needs {needed} slots of {scenario.engine.max_total_tokens}"
    return ""


def queue_refuses(evidence: Evidence) -> dict[str, bool]:
    """rid -> whether SGLang's queue is full when it arrives; nothing where that cannot be told from the steps."""
    engine = evidence.scenario.engine
    if engine.max_queued_requests is None or engine.priority_scheduling or engine.disaggregation:
        return {}
    found: dict[str, bool] = {}
    waiting = dict.fromkeys(range(engine.dp_size), frozenset[str]())
    for event in evidence.engine.events:
        rank = event.dp_rank
        if event.name == "turn":
            waiting[rank] = frozenset(event.data["waiting"])
        elif event.name == "submit":
            rid = str(event.data["rid"])
            found[rid] = len(waiting[rank]) + 1 > engine.max_queued_requests
            waiting[rank] |= frozenset() if found[rid] else {rid}
        elif event.name == "abort":
            waiting = {one: rids - {event.data["rid"]} for one, rids in waiting.items()}
        elif event.name == "retract" and event.data.get("reason") == "script":
            return {}  # who is put back into the queue in the middle of a step is not recorded
    return found


@register(id="aborts", kinds=(Kind.TOKEN,), reads=("scenario", "engine"))
def check_aborts(evidence: Evidence) -> CheckResult:
    """An aborted request returns no token that was chosen after the abort, but of the one pass SGLang lets run.

    TOKEN where the answer holds a token of a later forward; hint: what the request was doing when it was aborted.

    SGLang says of a request that is decoding: "The request will still run one decode forward pass."
    """
    result = CheckResult()
    ends = {} if evidence.scenario.engine.disaggregation else _ends(evidence)
    for event in evidence.engine.named("abort"):
        rid = str(event.data.get("rid"))
        if rid not in ends:
            continue
        end, prompt = ends[rid], len(evidence.scenario.request(rid).input_ids)
        doing, until = _state(evidence, rid, event)
        result.count("tokens", len(end.output_ids))
        if len(end.output_ids) > until - prompt:
            result.divergences.append(
                Divergence(
                    kind=Kind.TOKEN,
                    key=Key.of((event.dp_rank, rid, 0, until - 1), Phase.ACCEPT),
                    round=-1,
                    expected=f"{until - prompt} tokens, aborted at step {event.scheduler_step}",
                    observed=len(end.output_ids),
                    hint=f"aborted-{doing}",
                )
            )
    return result


def _state(evidence: Evidence, rid: str, abort: Event) -> tuple[str, int]:
    """(what a request was doing when it was aborted, how far its text may go, its prompt included)."""
    parts, step = evidence.parts_of(rid), abort.scheduler_step
    before = [part for part in parts if part.record.scheduler_step < step]
    prompt = len(evidence.scenario.request(rid).input_ids)
    until = max((_reach(part) for part in before if _commits(part)), default=prompt)
    earlier = evidence.engine.events[: evidence.engine.events.index(abort)]
    taken_back = (
        one.scheduler_step == step and rid in one.data.get("rids", (rid,)) for one in earlier if one.name == "retract"
    )
    if not before or rid in _waiting(evidence, step - 1) or (_commits(before[-1]) and any(taken_back)):
        return "retracted" if before else "queued", until
    if not _commits(before[-1]):
        return "in-chunk", until
    same = (
        one for one in parts if one.record.mode == "DECODE" or one.attempt == before[-1].attempt
    )  # or in a mixed batch
    later = (part for part in same if part.record.scheduler_step >= step)
    flying = evidence.engine.header.get("overlap") and before[-1].record.scheduler_step == step - 1
    if flying:  # the pass that it still runs is in flight
        return "decoding", until
    return "decoding", max(until, max((_reach(part) for part in [*later][:1]), default=until))


def _commits(part: Part) -> bool:
    return part.record.mode == "DECODE" or part.final


def _reach(part: Part) -> int:
    """Where the text ends behind it: what it read, and the token that the target chose behind that."""
    return part.start + part.length + 1


@register(id="retraction", kinds=(Kind.SHAPE,), reads=("scenario", "engine"))
def check_retraction(evidence: Evidence) -> CheckResult:
    """Where the pool runs out, the request with the shortest output goes back, or the longer prompt of two.

    SHAPE where a request was taken back and one with a shorter output went on.

    Under overlap a round may be in flight whose tokens SGLang does not count yet: then only what is wrong either way.
    """
    result = CheckResult()
    engine = evidence.scenario.engine
    if engine.disaggregation or engine.priority_scheduling:
        return result
    for event in evidence.engine.named("retract"):
        if event.data.get("reason") in BY_ITSELF:
            result.divergences += _wrongly_back(evidence, event, list(event.data["rids"]))
    return result


def _wrongly_back(evidence: Evidence, event: Event, back: list[str]) -> Iterator[Divergence]:
    step = event.scheduler_step
    records = (one for one in evidence.engine.rounds if one.scheduler_step == step and one.dp_rank == event.dp_rank)
    kept = [rid for record in records if record.mode == "DECODE" for rid in record.rids if rid not in back]
    lags = (0, 1) if evidence.engine.header.get("overlap") else (0,)
    for rid in back:
        for other in kept:
            pairs = [(_worth(evidence, rid, step - lag), _worth(evidence, other, step - lag)) for lag in lags]
            if all(mine > theirs for mine, theirs in pairs):
                found = _of(
                    evidence, rid, Kind.SHAPE, f"{other} goes back", f"{rid} goes back", "longer-output-taken-back"
                )
                yield found
                return


def _worth(evidence: Evidence, rid: str, step: int) -> tuple[int, int]:
    """SGLang keeps longer outputs, and of equal ones shorter prompts."""
    prompt = len(evidence.scenario.request(rid).input_ids)
    before = [part for part in evidence.parts_of(rid) if part.record.scheduler_step < step and _commits(part)]
    return max((_reach(part) for part in before), default=prompt) - prompt, -prompt


def _waiting(evidence: Evidence, step: int) -> set[str]:
    """Who waited, on any rank, when this step was over."""
    turns = (event for event in evidence.engine.named("turn") if event.scheduler_step == step)
    return {rid for event in turns for rid in event.data["waiting"]}


def _ends(evidence: Evidence) -> dict[str, RequestEnd]:
    known = {request.rid for request in evidence.scenario.requests}
    return {end.rid: end for end in evidence.engine.ends if end.rid in known}


def _of(evidence: Evidence, rid: str, kind: Kind, expected: str, observed: str, hint: str) -> Divergence:
    """A divergence of a request as a whole."""
    return evidence.at_request(
        rid, committed=-1, phase=Phase.PREFILL, kind=kind, expected=expected, observed=observed, hint=hint
    )
