"""Groups divergences into findings: order, deduplication, causes and signatures.

Cause rules are about how a wrong value can travel, nothing else. This module must not look at traces: all it knows
is in the divergences, plus when each batch ran and which requests started from a cached prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from harness.checks.explained import Spot, together
from harness.contract.types import DRAFTING, EXTENDING, TARGET, Divergence, Kind, Phase, Policy

PHASE_ORDER = {str(phase): number for number, phase in enumerate(Phase)} | {str(Phase.PREBUILT): -1}
#: What of a verify is its tree: columns that a selection decides, compared as a choice (see `compare`).
OF_A_TREE = (Kind.POSITION, Kind.PARENT)
GUESS, GUESSED_ON = "chunk-tail-target-guess", "chunk-tail-proposal"
#: Checks of what attention reads: a wrong slot there is wrong in one row, and goes where that row's values go.
READING = ("reads", "beams", "cached")
#: How hints of it begin where committed positions are read elsewhere: the request's own map of them is wrong.
MAP = "prefix-"
#: Hint where a stream and the answer it ends with have other tokens in one place.
TOLD_APART = "piece-other-token"
STOPS = (Kind.CRASH, Kind.HANG)
#: Within one row: what is read comes before what is computed from it.
KIND_ORDER = {
    kind: number
    for number, kind in enumerate(
        (
            *(Kind.LOCKSTEP, Kind.CACHE_SLOT, Kind.EXTEND_INPUT, Kind.POSITION, Kind.PARENT),
            *(Kind.ACCEPT, Kind.STATE, Kind.SHAPE, Kind.MISSING_ROW, Kind.EXTRA_ROW, Kind.NUMERIC, Kind.TOKEN),
            *(Kind.NONDETERMINISM, Kind.LEAK, Kind.CRASH, Kind.HANG),
        )
    )
}

Steps = Mapping[tuple[int, int], int]


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
    divergences: Iterable[Divergence],
    *,
    scheduler_steps: Steps,
    prefix_hits: frozenset[tuple[str, int]] = frozenset(),
    explained: Iterable[frozenset[Spot]] = (),
) -> list[Divergence]:
    """Sorted by time, without doubles, with causes set and the earliest root marked `first`.

    scheduler steps: (dp_rank, round) -> scheduler step. prefix_hits: (rid, attempt) that started from cached KV.
    explained: what one known issue explains, each.
    """
    kept = _without_doubles(divergences)
    kept.sort(key=_time_order(scheduler_steps))
    caused = together(_with_causes(kept, prefix_hits), explained)
    for place, found in enumerate(caused):
        if not found.cause:
            caused[place] = replace(found, first=True)
            break
    return caused


def group(divergences: Iterable[Divergence]) -> list[Finding]:
    """One finding a signature, in order of first appearance; roots first.

    A finding is a consequence only if every one of its divergences is.
    """
    alike: dict[str, list[Divergence]] = {}
    for found in divergences:
        alike.setdefault(found.signature, []).append(found)
    findings = [_finding(signature, found) for signature, found in alike.items()]
    return sorted(findings, key=lambda finding: not finding.is_root)


def members(finding: Finding, divergences: Iterable[Divergence]) -> list[Divergence]:
    """The divergences of a finding, and those that follow from it."""
    return [found for found in divergences if finding.signature in (found.signature, found.cause)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One signature over many scenarios. members: (place of a scenario among them, its finding there), in order."""

    signature: str
    members: tuple[tuple[int, Finding], ...]

    @property
    def roots(self) -> tuple[tuple[int, Finding], ...]:
        """Those that nothing earlier explains."""
        return tuple((at, found) for at, found in self.members if found.is_root)

    @property
    def count(self) -> int:
        """Divergences in all scenarios."""
        return sum(found.count for _, found in self.members)


def by_signature(scenarios: Iterable[Iterable[Finding]]) -> list[Shared]:
    """The findings of many scenarios, one defect one entry, in order of first appearance; roots first."""
    members: dict[str, list[tuple[int, Finding]]] = {}
    for at, findings in enumerate(scenarios):
        for found in findings:
            members.setdefault(found.signature, []).append((at, found))
    shared = [Shared(signature=signature, members=tuple(found)) for signature, found in members.items()]
    return sorted(shared, key=lambda one: not one.roots)


def root_signatures(findings: Iterable[Finding]) -> frozenset[str]:
    """Of what nothing earlier explains: the identity of a failure."""
    return frozenset(finding.signature for finding in findings if finding.is_root)


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
    """One divergence a (key, kind); the one reported earlier stays. A key without a request needs its round too."""
    kept: dict[tuple[object, Kind, int], Divergence] = {}
    for found in divergences:
        kept.setdefault((found.key, found.kind, -1 if found.key.rid else found.round), found)
    return list(kept.values())


def _time_order(scheduler_steps: Steps) -> Callable[[Divergence], tuple[object, ...]]:
    def order(found: Divergence) -> tuple[object, ...]:
        key = found.key
        scheduler_step = scheduler_steps.get((key.dp_rank, found.round), found.round)
        late = found.kind is Kind.LEAK and key.phase == Phase.IDLE  # seen at the very end, whatever caused it
        hung = found.kind is Kind.HANG  # what a batch did before it stopped comes first
        return (
            *(
                late,
                scheduler_step,
                found.round,
                hung,
                PHASE_ORDER.get(key.phase, len(PHASE_ORDER)),
                key.dp_rank,
                key.rid,
            ),
            *(key.attempt, key.committed, not _is_no_tree(found), key.step, key.slot, KIND_ORDER[found.kind]),
        )

    return order


def _is_no_tree(found: Divergence) -> bool:
    """Whether the nodes of a verify are no tree: nothing that is expected of one of them can hold."""
    return found.kind is Kind.PARENT and found.check == "positions"


def _is_other_tree(found: Divergence) -> bool:
    """Whether a node is not the reference's, and its tree does not follow from what was proposed."""
    return found.check == "verify" and found.policy is Policy.EXACT and found.key.phase == Phase.VERIFY


def _selected(found: Divergence) -> bool:
    """Whether it is a choice among what the draft steps proposed that stands in the verify."""
    tree = found.kind in OF_A_TREE or found.hint == "reference-input"
    return found.key.phase == Phase.VERIFY and found.policy is Policy.TIE and tree


@dataclass(slots=True)
class _Roots:
    """Roots seen so far, filed by how far they reach; only the earliest of each reach is kept."""

    filed: dict[tuple[object, ...], tuple[int, Divergence]] = field(default_factory=dict)

    def file(self, place: int, root: Divergence, *, by: Divergence) -> None:
        """by: what reaches on; the root, or what is read wrongly because of it."""
        for reach in _reaches(by):
            self.filed.setdefault(reach, (place, root))

    def cause_of(self, found: Divergence, *, from_cache: bool) -> Divergence | None:
        """The earliest root that explains `found`."""
        near = [self.filed[reach] for reach in _explained_by(found, from_cache=from_cache) if reach in self.filed]
        return min(near, key=lambda entry: entry[0])[1] if near else None


def _with_causes(ordered: list[Divergence], prefix_hits: frozenset[tuple[str, int]]) -> list[Divergence]:
    """Give each divergence that something earlier explains the signature of the earliest root that does."""
    roots, done = _Roots(), []
    for place, found in enumerate(ordered):
        cause = roots.cause_of(found, from_cache=(found.key.rid, found.key.attempt) in prefix_hits)
        if cause is None or found.check in READING:
            roots.file(place, cause or found, by=found)
        done.append(found if cause is None else replace(found, cause=cause.signature))
    return done


def _reaches(root: Divergence) -> list[tuple[object, ...]]:
    """Where a wrong value can travel from here.

    stop: everything after it. fed: what this rank's batch ends by. rank: slots overwritten, so any value of the rank.
    target: states and KV of the target, so any later value of the request. draft: KV of the draft, so later draft
    values. steps: only the draft steps of this round, since the extend rewrites what they left. tree: the nodes of this
    round. guess: the layers behind, which read a chunk's last token again. walk: the rows of this round's walk. output:
    how long the request's text is. told: rows that read the token a stream had where its answer has another.
    """
    key = root.key
    if root.kind in STOPS:
        return [("stop",)]
    if root.kind is Kind.LEAK:
        return [("fed", key.dp_rank, root.round), ("stop",)]  # SGLang ends where it sees one
    if root.kind is Kind.LOCKSTEP:
        return [("lockstep",)]
    if root.check == "reads" and root.hint.startswith(MAP):
        return [("map", key.dp_rank, key.rid, key.attempt), *_values_reached(root)]
    if root.check == "finish":
        return [("output", key.rid)]
    if root.hint == TOLD_APART:
        return [_told(root), *_values_reached(root)]
    if root.check == "idle_width":
        return [("fed", key.dp_rank, root.round)]
    if root.kind is Kind.CACHE_SLOT and root.check not in READING:
        return [("rank", key.dp_rank)]
    return _values_reached(root)


def _told(found: Divergence) -> tuple[object, ...]:
    """What stands where in a request's text, by its answer and by what was streamed or read of it before."""
    key = found.key
    at = key.committed + (key.slot if key.phase == Phase.VERIFY else key.slot + key.step + 1)
    return ("told", key.rid, at, found.expected, found.observed)


def _values_reached(root: Divergence) -> list[tuple[object, ...]]:
    """Where a wrong value of a row can travel."""
    key = root.key
    if key.phase in (*TARGET, Phase.ACCEPT):
        walk = [("walk", key.share)] if root.kind is Kind.ACCEPT else []
        walk += [("tree", key.share)] if _is_no_tree(root) or _is_other_tree(root) else []
        return [("target", key.rid, key.attempt), ("target of rank", key.dp_rank), *walk]
    if key.phase in EXTENDING:  # KV that later rounds read
        guess = [("guess", key.share)] if root.hint == GUESS else []
        return [("draft", key.rid, key.attempt), ("draft of rank", key.dp_rank), *guess]
    # What is handed over feeds the draft steps of one round, as a draft step feeds those after it.
    return [("steps", key.share)] if key.phase in (Phase.DRAFT, Phase.PREBUILT) else []


def _explained_by(found: Divergence, *, from_cache: bool) -> list[tuple[object, ...]]:
    """The reaches that touch `found`. from_cache: its request started from KV that another had written."""
    key = found.key
    if found.kind in (Kind.MISSING_ROW, Kind.EXTRA_ROW, Kind.LOCKSTEP, Kind.LEAK, *STOPS):
        walk = [("walk", key.share)] if key.phase == Phase.ACCEPT else []
        lockstep: list[tuple[object, ...]] = [("lockstep",)] if found.kind is Kind.HANG else []
        lockstep += [("fed", key.dp_rank, found.round)] if found.kind is Kind.CRASH else []
        return [*([("stop",)] if found.kind is not Kind.EXTRA_ROW else []), *walk, *lockstep]
    if found.check == "losslessness" and found.hint == "text-length":
        return [("output", key.rid)]  # a text that ends in the wrong place is not of the right length either
    if found.hint == GUESSED_ON:
        return [("guess", key.share)]
    if found.check == "inputs":
        return [_told(found)]  # the text that rows are held against is the answer's
    if _is_other_tree(found):
        return [("tree", key.share)]
    if found.check in READING:
        mapped = [("map", key.dp_rank, key.rid, key.attempt)] if found.hint.startswith(MAP) else []
        return [("rank", key.dp_rank), *mapped]  # of slots that others took, or wrote elsewhere
    if found.policy is Policy.EXACT:
        return []  # positions, inputs, slots and parents are bookkeeping: each wrong one is wrong by itself
    reaches: list[tuple[object, ...]] = [("rank", key.dp_rank), ("target", key.rid, key.attempt)]
    reaches += [("target of rank", key.dp_rank)] if from_cache else []
    selected = _selected(found)  # from what the draft's steps computed, so whatever reaches them reaches it
    if key.phase in DRAFTING or selected:
        reaches += [("draft", key.rid, key.attempt)]
        reaches += [("draft of rank", key.dp_rank)] if from_cache else []
    handed = key.phase in (Phase.DRAFT, Phase.PREBUILT) or selected
    return [*reaches, ("steps", key.share)] if handed else reaches
