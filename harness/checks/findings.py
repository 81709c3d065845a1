"""From many divergences to few findings: order, removal of doubles, causes, and grouping by signature.

Cause rules are about how a wrong value can travel, nothing else. This module must not look at traces: all it knows
is in the divergences, plus when each batch ran and which requests started from a cached prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from harness.types import Divergence, Kind, Phase, Policy

PHASE_ORDER = {str(phase): number for number, phase in enumerate(Phase)}
TARGET_PHASES = (Phase.PREFILL, Phase.VERIFY, Phase.ACCEPT)
#: Draft phases that write KV which later rounds read.
LASTING_DRAFT_PHASES = (Phase.DRAFT_PREFILL, Phase.EXTEND)
DRAFT_PHASES = (*LASTING_DRAFT_PHASES, Phase.DRAFT)
STOPS = (Kind.CRASH, Kind.HANG)
#: Within one row: what is read comes before what is computed from it.
KIND_ORDER = {
    kind: number
    for number, kind in enumerate(
        (
            *(Kind.CRASH, Kind.HANG, Kind.LOCKSTEP, Kind.CACHE_SLOT, Kind.EXTEND_INPUT, Kind.POSITION, Kind.PARENT),
            *(Kind.ACCEPT, Kind.SHAPE, Kind.MISSING_ROW, Kind.EXTRA_ROW, Kind.NUMERIC, Kind.TOKEN),
            *(Kind.NONDETERMINISM, Kind.LEAK),
        )
    )
}

Ticks = Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Divergences with one signature. first: the earliest. consequence_of: signature of its cause, if it has one."""

    signature: str
    first: Divergence
    count: int
    rids: tuple[str, ...]
    consequence_of: str | None

    @property
    def is_root(self) -> bool:
        return self.consequence_of is None


def settle(
    divergences: Iterable[Divergence], *, ticks: Ticks, prefix_hits: frozenset[tuple[str, int]] = frozenset()
) -> list[Divergence]:
    """Sorted by time, without doubles, with causes set and the earliest root marked `first`.

    ticks: (dp_rank, round) -> tick. prefix_hits: (rid, epoch) that started from cached KV.
    """
    kept = _without_doubles(divergences)
    kept.sort(key=_time_order(ticks))
    caused = _with_causes(kept, prefix_hits)
    for place, found in enumerate(caused):
        if not found.cause:
            caused[place] = replace(found, first=True)
            break
    return caused


def group(divergences: Iterable[Divergence]) -> list[Finding]:
    """One finding a signature, in order of first appearance; roots first.

    A finding is a consequence only if every one of its divergences is.
    """
    members: dict[str, list[Divergence]] = {}
    for found in divergences:
        members.setdefault(found.signature, []).append(found)
    findings = [_finding(signature, found) for signature, found in members.items()]
    return sorted(findings, key=lambda finding: not finding.is_root)


def _finding(signature: str, members: list[Divergence]) -> Finding:
    roots = [found for found in members if not found.cause]
    return Finding(
        signature=signature,
        first=roots[0] if roots else members[0],
        count=len(members),
        rids=tuple(sorted({found.key.rid for found in members})),
        consequence_of=None if roots else members[0].cause,
    )


def kinds(findings: Iterable[Finding], *, roots_only: bool = False) -> tuple[str, ...]:
    """The kinds found, sorted; with roots_only those that nothing earlier explains."""
    return tuple(sorted({str(f.first.kind) for f in findings if f.is_root or not roots_only}))


def _without_doubles(divergences: Iterable[Divergence]) -> list[Divergence]:
    """One divergence a (key, kind); the one reported earlier stays."""
    kept: dict[tuple[object, Kind], Divergence] = {}
    for found in divergences:
        kept.setdefault((found.key, found.kind), found)
    return list(kept.values())


def _time_order(ticks: Ticks) -> Callable[[Divergence], tuple[object, ...]]:
    def order(found: Divergence) -> tuple[object, ...]:
        key = found.key
        tick = ticks.get((key.dp_rank, found.round), found.round)
        late = found.kind is Kind.LEAK  # seen at the very end, whatever caused it
        return (
            *(late, tick, found.round, PHASE_ORDER.get(key.phase, len(PHASE_ORDER)), key.dp_rank, key.rid),
            *(key.epoch, key.committed, key.step, key.slot, KIND_ORDER[found.kind]),
        )

    return order


def _with_causes(ordered: list[Divergence], prefix_hits: frozenset[tuple[str, int]]) -> list[Divergence]:
    """Give each divergence that something earlier explains the signature of the earliest root that does."""
    roots: list[Divergence] = []
    seen: set[tuple[object, ...]] = set()
    done: list[Divergence] = []
    for found in ordered:
        cause = next((root for root in roots if _explains(root, found, prefix_hits)), None)
        if cause is not None:
            done.append(replace(found, cause=cause.signature))
            continue
        done.append(found)
        reach = _reach(found)
        if reach not in seen:  # a second root with the same reach explains nothing that the first does not
            seen.add(reach)
            roots.append(found)
    return done


def _reach(root: Divergence) -> tuple[object, ...]:
    """What decides which later divergences a root can explain."""
    key = root.key
    if root.kind in (*STOPS, Kind.LOCKSTEP, Kind.CACHE_SLOT):
        return (root.kind, key.dp_rank)
    return (root.kind, key.rid, key.epoch, key.committed, key.phase)


def _explains(root: Divergence, found: Divergence, prefix_hits: frozenset[tuple[str, int]]) -> bool:
    """Whether `root`, which comes earlier, can be the reason for `found`."""
    if root.kind in STOPS:
        return found.kind in (Kind.MISSING_ROW, Kind.LOCKSTEP, Kind.LEAK, *STOPS)
    if root.kind is Kind.LOCKSTEP:
        return found.kind is Kind.HANG
    if root.kind is Kind.CACHE_SLOT:
        return root.key.dp_rank == found.key.dp_rank and _is_computed(found)
    if _same_share(root, found) and found.kind in (Kind.EXTRA_ROW, Kind.MISSING_ROW):
        return root.kind is Kind.ACCEPT and found.key.phase == Phase.ACCEPT
    return _is_computed(found) and _reads_from(root, found, prefix_hits)


def _is_computed(found: Divergence) -> bool:
    """Values and choices are computed from earlier ones; positions, inputs and slots are bookkeeping."""
    return found.policy in (Policy.BUDGET, Policy.TIE)


def _same_share(one: Divergence, other: Divergence) -> bool:
    return (one.key.dp_rank, one.key.rid, one.key.epoch, one.key.committed) == (
        *(other.key.dp_rank, other.key.rid, other.key.epoch),
        other.key.committed,
    )


def _reads_from(root: Divergence, found: Divergence, prefix_hits: frozenset[tuple[str, int]]) -> bool:
    """Whether the forward of `found` reads states or KV that the forward of `root` wrote."""
    cause, effect = root.key, found.key
    drafting = effect.phase in DRAFT_PHASES
    if (cause.rid, cause.epoch) != (effect.rid, effect.epoch):
        from_cache = (effect.rid, effect.epoch) in prefix_hits and cause.dp_rank == effect.dp_rank
        lasting = cause.phase in TARGET_PHASES or (cause.phase in LASTING_DRAFT_PHASES and drafting)
        return from_cache and lasting
    if cause.phase in TARGET_PHASES:
        return True
    if cause.phase in LASTING_DRAFT_PHASES:
        return drafting
    return effect.phase == Phase.DRAFT and _same_share(root, found)
