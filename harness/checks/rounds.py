"""Whether every batch left all its rows, and whether a request's batches join without gap or overlap.

No weights, no reference. A row that a batch must have and lacks is MISSING_ROW, a row no batch accounts for is
EXTRA_ROW, a start that does not follow from what came before is SHAPE.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Part
from harness.contract.types import Divergence, Key, Kind, Phase

Place = tuple[int, int]  # (step, slot)


@register(
    name="rounds",
    kinds=(Kind.MISSING_ROW, Kind.EXTRA_ROW, Kind.SHAPE),
    reads=("scenario", "engine"),
    protects="every batch ran all its forwards for all its requests, and committed lengths follow from one another",
)
def check_rounds(evidence: Evidence) -> CheckResult:
    """MISSING_ROW, EXTRA_ROW, SHAPE."""
    result = CheckResult()
    covered = set()
    for parts in evidence.parts.values():
        for part in parts:
            covered.add(part.share)
            for phase, places in expected_places(evidence, part):
                result.divergences += _row_faults(evidence, part, phase, places)
        result.divergences += _joints(evidence, parts)
    for share, by_phase in evidence.table.groups.items():
        if share in covered:
            continue
        for index in (index for indices in by_phase.values() for index in indices):
            result.divergences.append(
                evidence.divergence(
                    index,
                    kind=Kind.EXTRA_ROW,
                    check="rounds",
                    expected="a batch that names this request and length",
                    observed="a row of no batch",
                    hint="no-batch",
                )
            )
    return result


def expected_places(evidence: Evidence, part: Part) -> Iterator[tuple[Phase, list[Place]]]:
    """(phase, its (step, slot) places) that one part of a batch must have."""
    spec = evidence.scenario.spec
    if part.record.mode == "PREFILL":
        yield Phase.PREFILL, [(0, slot) for slot in range(part.length)]
        yield Phase.DRAFT_PREFILL, [(layer, slot) for layer in range(spec.layers) for slot in range(part.length)]
    elif part.record.mode == "PREBUILT":
        yield Phase.PREBUILT, [(layer, slot) for layer in range(spec.layers) for slot in range(part.start)]
    elif part.record.mode == "DECODE" and part.length > 0:
        yield Phase.DRAFT, [(step, slot) for step in range(spec.draft_steps) for slot in range(spec.t)]
        yield Phase.VERIFY, [(0, slot) for slot in range(spec.n)]
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
        yield missing(part, phase, step, slot)
    wanted, seen = set(places), set()
    for index, place in zip(indices, found, strict=True):
        if place not in wanted or place in seen:
            hint = "twice" if place in seen else "too-many"
            yield evidence.divergence(
                index,
                kind=Kind.EXTRA_ROW,
                check="rounds",
                expected=f"{len(places)} rows",
                observed=f"{len(found)} rows",
                hint=hint,
            )
        seen.add(place)


def missing(part: Part, phase: Phase, step: int, slot: int) -> Divergence:
    """MISSING_ROW at a place that has no row to point at."""
    dp_rank, rid, epoch, committed = part.share
    key = Key(dp_rank=dp_rank, rid=rid, epoch=epoch, committed=committed, phase=phase, step=step, slot=slot)
    return Divergence(
        kind=Kind.MISSING_ROW, check="rounds", key=key, round=part.record.index, expected="a row", observed="none"
    )


def _joints(evidence: Evidence, parts: list[Part]) -> Iterator[Divergence]:
    """SHAPE where a part does not start where the one before it ended, or a final flag is wrong."""
    for before, after in pairwise(parts):
        end = before.start + before.length
        if after.start != end:
            sort = "chunk" if after.record.mode == "PREFILL" else "committed"
            yield _shape(after, end, after.start, f"{sort}-{'gap' if after.start > end else 'overlap'}")
    if parts[0].start != 0 and not evidence.scenario.engine.prefix_cache and parts[0].record.mode == "PREFILL":
        yield _shape(parts[0], 0, parts[0].start, "start-without-prefix-cache")
    prompts = {request.rid: len(request.prompt) for request in evidence.scenario.requests}
    for part in parts:
        if part.record.mode != "PREFILL" or part.epoch > 0 or part.rid not in prompts:
            continue
        ends = part.start + part.length == prompts[part.rid]
        if part.final != ends:
            yield _shape(part, ends, part.final, "final-flag")


def _shape(part: Part, expected: object, observed: object, hint: str) -> Divergence:
    dp_rank, rid, epoch, committed = part.share
    phase = Phase.PREFILL if part.record.mode == "PREFILL" else Phase.VERIFY
    key = Key(dp_rank=dp_rank, rid=rid, epoch=epoch, committed=committed, phase=phase, step=0, slot=0)
    return Divergence(
        kind=Kind.SHAPE,
        check="rounds",
        key=key,
        round=part.record.index,
        expected=expected,
        observed=observed,
        hint=hint,
    )
