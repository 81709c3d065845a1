"""Checks that no row is missing or extra: of a batch, between batches, and on either side.

A row that must be there and is not is MISSING_ROW, a row that nothing accounts for is EXTRA_ROW, a start that does not
follow from what came before is SHAPE.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.checks.accepts import judged_walks, truncated
from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.checks.set_aside import errors
from harness.contract.align import unpaired
from harness.contract.batches import Part, Share
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase

Place = tuple[int, int]  # (step, slot)


@register(id="rounds", kinds=(Kind.MISSING_ROW, Kind.EXTRA_ROW, Kind.SHAPE), reads=("scenario", "engine"))
def check_rows_of_batches(evidence: Evidence) -> CheckResult:
    """Every batch ran all its forwards for all its requests, and committed lengths follow from one another.

    MISSING_ROW, EXTRA_ROW, SHAPE.
    """
    result = CheckResult()
    covered = set()
    for parts in evidence.parts.values():
        for part in parts:
            covered.add(part.share)
            for phase, places in expected_places(evidence, part):
                result.divergences += _row_faults(evidence, part, phase, places)
        result.divergences += _joints(evidence, parts)
    expected, observed = "a batch that names this request and length", "a row of no batch"
    for share, by_phase in evidence.table.groups.items():
        if share in covered:
            continue
        result.divergences += [
            evidence.divergence(index, kind=Kind.EXTRA_ROW, expected=expected, observed=observed, hint="no-batch")
            for indices in by_phase.values()
            for index in indices
        ]
    return result


def expected_places(evidence: Evidence, part: Part) -> Iterator[tuple[Phase, list[Place]]]:
    """(phase, its (step, slot) places) that one part of a batch must have."""
    spec = part.spec(evidence.scenario.spec)
    if part.record.mode == "PREFILL":
        yield Phase.PREFILL, [(0, slot) for slot in range(part.length)]
        yield Phase.DRAFT_PREFILL, [(layer, slot) for layer in range(spec.layers) for slot in range(part.length)]
    elif part.record.mode == "PREBUILT":
        yield Phase.PREBUILT, [(layer, slot) for layer in range(spec.layers) for slot in range(part.start)]
    elif part.record.mode == "DECODE" and part.length > 0:
        yield Phase.DRAFT, [(step, slot) for step in range(spec.draft_steps) for slot in range(spec.eagle_topk)]
        yield Phase.VERIFY, [(0, slot) for slot in range(spec.num_draft_tokens)]
        yield Phase.ACCEPT, [(0, slot) for slot in range(part.length)]
        if evidence.table.of(part.share, Phase.EXTEND) or not ends_here(evidence, part):
            yield Phase.EXTEND, [(layer, slot) for layer in range(spec.layers) for slot in range(part.length)]


def ends_here(evidence: Evidence, part: Part) -> bool:
    """Whether the request needs no further draft state: it has ended and this was its last batch.

    Older workers drop finished requests before the draft extend, newer ones do not; both are right.
    """
    return part.rid in evidence.ended and evidence.last[part.rid] is part


def _row_faults(evidence: Evidence, part: Part, phase: Phase, places: list[Place]) -> Iterator[Divergence]:
    table = evidence.table
    indices = table.of(part.share, phase)
    found = [(table.ints["step"][index], table.ints["slot"][index]) for index in indices]
    if found == places:
        return
    for step, slot in sorted(set(places) - set(found)):
        yield _of_part(part, Kind.MISSING_ROW, phase, "a row", "none", step=step, slot=slot)
    wanted, seen = set(places), set()
    for index, place in zip(indices, found, strict=True):
        if place not in wanted or place in seen:
            hint = "twice" if place in seen else "too-many"
            expected, observed = f"{len(places)} rows", f"{len(found)} rows"
            yield evidence.divergence(index, kind=Kind.EXTRA_ROW, expected=expected, observed=observed, hint=hint)
        seen.add(place)


def _of_part(
    part: Part,
    kind: Kind,
    phase: Phase,
    expected: object,
    observed: object,
    *,
    hint: str = "",
    step: int = 0,
    slot: int = 0,
) -> Divergence:
    """At a place that has no row to point at."""
    key = Key.of(part.share, phase, step=step, slot=slot)
    return Divergence(kind=kind, key=key, round=part.record.index, expected=expected, observed=observed, hint=hint)


def _joints(evidence: Evidence, parts: list[Part]) -> Iterator[Divergence]:
    """SHAPE where a part does not start where the one before it ended, or a final flag is wrong."""
    for before, after in pairwise(parts):
        end = before.start + before.length
        if after.start != end:
            sort = "chunk" if after.record.mode == "PREFILL" else "committed"
            yield _shape(after, end, after.start, f"{sort}-{'gap' if after.start > end else 'overlap'}")
    if parts[0].start != 0 and not evidence.scenario.engine.radix_cache and parts[0].record.mode == "PREFILL":
        yield _shape(parts[0], 0, parts[0].start, "start-without-prefix-cache")
    prompts = {request.rid: len(request.input_ids) for request in evidence.scenario.requests}
    spec = evidence.scenario.spec
    for part in parts if spec.adaptive is not None else ():
        if part.record.mode == "DECODE" and part.record.num_steps not in spec.candidate_steps:
            yield _shape(part, list(spec.candidate_steps), part.record.num_steps, "steps-not-a-candidate")
    for part in parts:
        if part.record.mode != "PREFILL" or part.attempt > 0 or part.rid not in prompts:
            continue
        ends = part.start + part.length >= prompts[part.rid]  # behind it where it decodes in a batch of prompts
        if part.final != ends:
            yield _shape(part, ends, part.final, "final-flag")


def _shape(part: Part, expected: object, observed: object, hint: str) -> Divergence:
    phase = Phase.PREFILL if part.record.mode == "PREFILL" else Phase.VERIFY
    return _of_part(part, Kind.SHAPE, phase, expected, observed, hint=hint)


@register(id="align", kinds=(Kind.MISSING_ROW, Kind.EXTRA_ROW), reads=("engine", "reference"))
def check_rows_of_both_sides(evidence: Evidence) -> CheckResult:
    """Both sides ran the same forwards for the same requests: a row on one side only is a finding.

    MISSING_ROW and EXTRA_ROW between the sides.
    """
    stopped = {str(event.data["rid"]): event for event in evidence.truth.named("reference_stopped")}
    judged, refused = judged_walks(evidence), errors(evidence)
    pruned = {part.share for parts in evidence.parts.values() for part in parts if ends_here(evidence, part)}
    found = [
        divergence
        for divergence in unpaired(evidence.paired, evidence.engine.rows, evidence.truth.rows)
        if not _unneeded(evidence, divergence, pruned)
        and not _unanswered(divergence, stopped)
        and not (divergence.key.phase == Phase.ACCEPT and divergence.key.share in judged)
    ]
    reasons = [
        f"no reference for {rid} from round {event.data.get('round')} on: {event.data.get('why')}"
        for rid, event in stopped.items()
        if rid not in refused  # they have their reason
    ]
    return CheckResult(divergences=found, unknown=reasons)


def _unanswered(divergence: Divergence, stopped: dict[str, Event]) -> bool:
    """An engine row of a request that the reference had to give up: not extra, but UNKNOWN, with the reason."""
    event = stopped.get(divergence.key.rid)
    return event is not None and divergence.kind is Kind.EXTRA_ROW and divergence.round >= int(event.data["round"])


def _unneeded(evidence: Evidence, divergence: Divergence, pruned: set[Share]) -> bool:
    """What older workers leave out for a request that has just ended: its draft extend, the rest of its walk."""
    key, share = divergence.key, divergence.key.share
    if divergence.kind is not Kind.MISSING_ROW or share not in pruned:
        return False
    if key.phase == Phase.EXTEND:
        return not evidence.table.of(share, Phase.EXTEND)
    accepted = len(evidence.table.of(share, Phase.ACCEPT))
    return key.phase == Phase.ACCEPT and truncated(evidence, share) and 0 < accepted <= key.slot
