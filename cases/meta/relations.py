"""Changes to a batch program that must not change a request's draft inputs and proposals. No reference is needed.

A relation is data: how to change a scenario, and how to see on two traces that the change took place. What is compared
is the same for all. This module must not run an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from cases.boots import Boot
from cases.builder import Builder, shortest_life
from cases.generation import build
from cases.meta.handmade import set_on
from cases.meta.related import RelationResult, compare
from cases.timeline import inserted
from harness.contract.batches import leading_rounds, parts_of
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.trace import Trace

Change = Callable[[Random, Scenario], Scenario]
TookPlace = Callable[[Scenario, Trace, Trace], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """reboots: whether the changed scenario needs another engine. took_place: see `judge`."""

    name: str
    meaning: str
    change: Change
    took_place: TookPlace
    reboots: bool = False

    def judge(self, changed: Scenario, before: Trace, after: Trace) -> RelationResult:
        """Every difference between two traces in what must not differ; UNKNOWN if the change cannot be seen."""
        result = compare(before, after, check=f"relation-{self.name}")
        if not self.took_place(changed, before, after):
            result.unknown.append(f"relation {self.name}: the change left no mark on the trace: {self.meaning}")
        return result


RELATIONS: dict[str, Relation] = {}


def _relation(meaning: str, took_place: TookPlace, *, reboots: bool = False) -> Callable[[Change], Change]:
    def keep(change: Change) -> Change:
        name = change.__name__
        RELATIONS[name] = Relation(name=name, meaning=meaning, change=change, took_place=took_place, reboots=reboots)
        return change

    return keep


@st.composite
def pairs(draw: st.DrawFn, relation: Relation, boot: Boot) -> tuple[Scenario, Scenario]:
    """A scenario of a few requests that nothing interferes with, and the same one changed."""
    random = draw(st.randoms(use_true_random=False))
    scenario = build(random, boot, template="company", quiet=True)
    changed = relation.change(random, scenario)
    return scenario, Scenario.model_validate(changed.model_dump())


# Whether the change can be seen


def _chunks_differ(_changed: Scenario, before: Trace, after: Trace) -> bool:
    return _cuts(before) != _cuts(after)


def _cuts(trace: Trace) -> set[tuple[str, int, int]]:
    return {
        (part.rid, part.start, part.length)
        for parts in parts_of(trace).values()
        for part in parts
        if part.record.mode == "PREFILL"
    }


def _order_differs(_changed: Scenario, before: Trace, after: Trace) -> bool:
    return [record.rids for record in leading_rounds(before)] != [record.rids for record in leading_rounds(after)]


def _company_kept(changed: Scenario, before: Trace, after: Trace) -> bool:
    """Somebody new shares a batch with somebody old."""
    old = {rid for rid, _ in parts_of(before)}
    return any(set(record.rids) & old and set(record.rids) - old for record in leading_rounds(after))


def _cache_was_used(_changed: Scenario, before: Trace, after: Trace) -> bool:
    return any(parts[0].start for parts in parts_of(before).values()) and not any(
        parts[0].start for parts in parts_of(after).values()
    )


def _came_back(_changed: Scenario, before: Trace, after: Trace) -> bool:
    return any(attempt for _, attempt in parts_of(after)) and not any(attempt for _, attempt in parts_of(before))


def _neighbour_gone(_changed: Scenario, before: Trace, after: Trace) -> bool:
    """Aborted after it had shared a batch."""
    gone = {end.rid for end in after.ends if end.reason == "abort"}
    return any(gone & set(record.rids) and set(record.rids) - gone for record in leading_rounds(after))


def _was_paused(_changed: Scenario, before: Trace, after: Trace) -> bool:
    scheduler_steps = [event.scheduler_step for event in after.named("pause")]
    records = leading_rounds(after)
    return any(
        records[0].scheduler_step < scheduler_step <= records[-1].scheduler_step for scheduler_step in scheduler_steps
    )


# The relations


def _with(scenario: Scenario, step: int, *ops: Op) -> Scenario:
    return scenario.model_copy(update={"script": inserted(scenario.script, step, *ops)})


@_relation("another chunk size", _chunks_differ)
def other_chunk(random: Random, scenario: Scenario) -> Scenario:
    page, old = scenario.engine.page_size, scenario.engine.chunked_prefill_size
    sizes = [size for size in (4, 8, 12, 16, 24, 32, 64) if size != old and size % page == 0]
    return set_on(scenario, chunked_prefill_size=random.choice(sizes))


@_relation("another order of the requests that arrive at one step", _order_differs)
def other_order(random: Random, scenario: Scenario) -> Scenario:
    def reorder(op: Op) -> Op:
        if op.kind != "submit" or len(op.rids) < 2:
            return op
        rids = tuple(random.sample(op.rids, len(op.rids)))
        rids = rids if rids != op.rids else op.rids[::-1]
        return op.model_copy(update={"rids": rids})

    return scenario.model_copy(update={"script": tuple(reorder(op) for op in scenario.script)})


@_relation("one more request beside the others", _company_kept)
def extra_request(random: Random, scenario: Scenario) -> Scenario:
    boot = Boot(name="x", why="", spec=scenario.spec, engine=scenario.engine)
    builder = Builder(random, boot, chunk=scenario.engine.chunked_prefill_size or 32)
    request = builder.request(builder.prompt(builder.length(1, 60)), new=builder.new_tokens(6)).model_copy(
        update={"rid": "extra_request"}
    )
    arrival = Op(kind="submit", rids=(request.rid,))
    return _with(scenario, builder.integer(0, 4), arrival).model_copy(
        update={"requests": (*scenario.requests, request)}
    )


@_relation("no prefix cache", _cache_was_used, reboots=True)
def prefix_cache_off(_random: Random, scenario: Scenario) -> Scenario:
    return set_on(scenario, radix_cache=False)


@_relation("every request sent back to the queue once, and resumed", _came_back)
def retract_and_resume(random: Random, scenario: Scenario) -> Scenario:
    return _with(scenario, random.randint(1, 8), Op(kind="retract"))


@_relation("a pause of a few steps", _was_paused)
def pause_and_resume(random: Random, scenario: Scenario) -> Scenario:
    """At a step from which nobody arrives any more: SGLang holds arrivals back while paused."""
    arrivals = sum(op.count for op in scenario.script if op.kind == "step")
    ops = (Op(kind="pause"), Op(kind="step", count=2), Op(kind="resume"))
    return _with(scenario, arrivals + random.randint(1, 4), *ops)


@_relation("a neighbour aborted", _neighbour_gone)
def neighbour_aborted(random: Random, scenario: Scenario) -> Scenario:
    request = random.choice(scenario.requests)
    step = random.randint(1, shortest_life(request, k=scenario.spec.num_steps))
    return _with(scenario, _arrival(scenario, request.rid) + step, Op(kind="abort", rids=(request.rid,)))


def _arrival(scenario: Scenario, rid: str) -> int:
    now = 0
    for op in scenario.script:
        if op.kind == "submit" and rid in op.rids:
            return now
        now += op.count if op.kind == "step" else 0
    return now
