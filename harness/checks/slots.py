"""Checks who owns which KV slot, from rows alone.

Only what must be alive is compared, so that legal reuse is never a finding: a slot a request keeps (prompt rows and
committed rows) is its own from the batch that wrote it to the request's last batch; draft and tree slots are its own
within their own phase of one batch. With the prefix cache on, rows whose text another request shares may be given
back early (the cache keeps one copy), so those claim nothing afterwards.

Branches of a paged tree that are read page by page begin with a copy of the prefix's unfinished last page; of these the
probe compared the engine's own cache with itself (event 'tails', `harness.engine_side.probes.verify_probe`).

Layers with sliding windows may have a pool of their own, where a slot is given back once no window reaches its
position. That a window's values were right does not show it: a slot that was given back keeps them until somebody else
gets it. So the probe says which slots a request had when a target's forward began (event 'window',
`harness.engine_side.probes.pool_probe`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Share, shares_of
from harness.contract.texts import alike
from harness.contract.trace import WINDOW
from harness.contract.types import LAYERED, Divergence, Key, Kind, Phase

#: Rows of these phases write KV that the request keeps.
KEPT = (Phase.PREFILL, Phase.PREBUILT, Phase.EXTEND)
PROMPT = (Phase.PREFILL, Phase.DRAFT_PREFILL)
WRITING = (Phase.PREBUILT, Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.DRAFT, Phase.VERIFY, Phase.EXTEND)


@dataclass(frozen=True, slots=True)
class _Owner:
    rid: str
    attempt: int
    position: int
    until: int


@register(id="slots", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_slot_owners(evidence: Evidence) -> CheckResult:
    """No live request's KV is overwritten, and draft and target write the same slot for the same position.

    CACHE_SLOT.
    """
    result = CheckResult()
    result.count("cache_slots", sum(slot >= 0 for slot in evidence.table.ints["cache_slot"]))
    _same_slot_both_models(evidence, result)
    _places_in_pages(evidence, result)
    _one_owner(evidence, result)
    return result


def _fault(evidence: Evidence, index: int, expected: object, hint: str) -> Divergence:
    observed = evidence.table.ints["cache_slot"][index]
    return evidence.divergence(index, kind=Kind.CACHE_SLOT, expected=expected, observed=observed, hint=hint)


def _same_slot_both_models(evidence: Evidence, result: CheckResult) -> None:
    """Draft rows reuse the target's slot: prefill always, extend where the tree is a chain."""
    table = evidence.table
    pairs = [(Phase.PREFILL, Phase.DRAFT_PREFILL)]
    if evidence.scenario.spec.eagle_topk == 1:
        pairs.append((Phase.VERIFY, Phase.EXTEND))
    for target, draft in pairs:
        for share, indices in table.each(draft):
            slots = {table.ints["slot"][index]: table.ints["cache_slot"][index] for index in table.of(share, target)}
            for index in indices:
                expected = slots.get(table.ints["slot"][index], -1)
                if (
                    -1 not in (expected, table.ints["cache_slot"][index])
                    and expected != (table.ints["cache_slot"][index])
                ):
                    result.divergences.append(_fault(evidence, index, expected, "draft-slot-differs"))


def _places_in_pages(evidence: Evidence, result: CheckResult) -> None:
    """Kept rows; of trees only prompts, since a tree's own rows lie in no order."""
    page, table = evidence.scenario.engine.page_size, evidence.table
    for phase in KEPT if evidence.scenario.spec.eagle_topk == 1 else PROMPT:
        for share, indices in table.each(phase):
            for index in indices if page > 1 else ():
                slot, position = table.ints["cache_slot"][index], _position(evidence, share, phase, index)
                if slot >= 0 and (slot - position) % page:
                    result.divergences.append(_fault(evidence, index, f"{position % page} in its page", "out-of-page"))


def _position(evidence: Evidence, share: Share, phase: Phase, index: int) -> int:
    """Of a row that its request keeps."""
    return evidence.table.ints["slot"][index] + (0 if phase is Phase.PREBUILT else share[3])


def _one_owner(evidence: Evidence, result: CheckResult) -> None:
    """Walk the batches of each rank in order, with the slots owned so far; two engines have a pool each."""
    for side in sorted({record.side for record in evidence.engine.rounds}):
        cached = (
            evidence.scenario.engine.disaggregation_decode_radix_cache
            if side == "decode"
            else evidence.scenario.engine.prefill_side.radix_cache
        )
        shared = _shared_lengths(evidence) if cached else {}
        until = {
            who: own[-1]
            for who, parts in evidence.parts.items()
            if (own := [part.record.index for part in parts if part.record.side == side])
        }
        owners: dict[tuple[int, int], _Owner] = {}
        for number, shares in _batches(evidence, side):
            phases = [phase for phase in WRITING if side != "decode" or phase not in PROMPT]
            for phase in phases:
                result.divergences += _phase_faults(evidence, shares, phase, number, owners)
            for share in shares:
                _claim(evidence, share, owners, until, shared, side=side, number=number)


def _batches(evidence: Evidence, side: str) -> Iterator[tuple[int, list[Share]]]:
    """(round, shares in it), rank by rank, in order of rounds."""
    batches: dict[tuple[int, int], dict[Share, None]] = {}
    for parts in evidence.parts.values():
        for part in (part for part in parts if part.record.side == side):
            batches.setdefault((part.record.dp_rank, part.record.index), {})[part.share] = None
    for (_, number), shares in sorted(batches.items(), key=lambda item: item[0]):
        yield number, list(shares)


def _phase_faults(
    evidence: Evidence, shares: list[Share], phase: Phase, number: int, owners: dict[tuple[int, int], _Owner]
) -> Iterator[Divergence]:
    """Rows of one phase of one batch that write a slot which must be alive."""
    table = evidence.table
    written: dict[tuple[int, int], tuple[Share, int, int]] = {}
    for share in shares:
        for index in table.of(share, phase):
            slot = table.ints["cache_slot"][index]
            if slot < 0 or table.ints["round"][index] != number:
                continue
            place = (share, table.ints["step"][index], table.ints["slot"][index])
            layer = place[1] if phase in LAYERED else 0
            before = written.setdefault((layer, slot), place)
            if before != place:  # the same place twice is a repeated row, which `rounds` reports
                hint = "twice-in-request" if before[0] == share else "shared-with-another"
                yield _fault(evidence, index, "a slot of its own", hint)
                continue
            owner = owners.get((share[0], slot))
            if owner is not None and owner.until >= number:
                yield from _taken(evidence, index, share, owner)


def _taken(evidence: Evidence, index: int, share: Share, owner: _Owner) -> Iterator[Divergence]:
    """A row of `share` writes a slot that `owner` keeps."""
    _, rid, attempt, committed = share
    if (owner.rid, owner.attempt) != (rid, attempt):
        yield _fault(evidence, index, f"not a slot that {owner.rid} keeps", "owned-by-another")
    elif owner.position < committed:
        yield _fault(evidence, index, f"not the slot kept for position {owner.position}", "own-slot-again")


def _claim(
    evidence: Evidence,
    share: Share,
    owners: dict[tuple[int, int], _Owner],
    until: dict[tuple[str, int], int],
    shared: dict[str, int],
    *,
    side: str,
    number: int,
) -> None:
    """Record the slots a share keeps after its batch."""
    dp_rank, rid, attempt, _ = share
    for phase in KEPT:
        for index in evidence.table.of(share, phase):
            if side and evidence.table.ints["round"][index] != number:
                continue  # a chunk and what was handed over may begin alike, on different sides
            slot = evidence.table.ints["cache_slot"][index]
            position = _position(evidence, share, phase, index)
            may_be_given_back = bool(shared) and (position < shared.get(rid, 0) or attempt > 0)
            if may_be_given_back:
                owners.pop((dp_rank, slot), None)
            elif slot >= 0:
                owners[dp_rank, slot] = _Owner(rid, attempt, position, until[rid, attempt])


def _shared_lengths(evidence: Evidence) -> dict[str, int]:
    """rid -> how many leading tokens of its text some other request has too."""
    texts = {rid: [full[index] for index in range(len(full)) if index in full] for rid, full in evidence.full.items()}
    ordered = sorted(texts, key=lambda rid: texts[rid])
    shared = dict.fromkeys(texts, 0)
    for left, right in pairwise(ordered):
        common = alike(texts[left], texts[right])
        shared[left], shared[right] = max(shared[left], common), max(shared[right], common)
    return shared


@register(id="tails", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_copies_of_last_page(evidence: Evidence) -> CheckResult:
    """Every branch of a paged tree begins with a copy of the prefix's unfinished last page.

    CACHE_SLOT for each request and round with a copy that is none.
    """
    result = CheckResult()
    for event in evidence.engine.named("tails"):
        for share, holes, wrong in shares_of(event, "holes", "wrong"):
            result.count("cache_slots", holes)
            if wrong:
                found = Divergence(
                    kind=Kind.CACHE_SLOT,
                    key=Key.of(share, Phase.DRAFT),
                    round=event.data["round"],
                    expected=f"{holes} copied slots",
                    observed=f"{wrong} of them hold something else",
                    hint="prefix-tail-not-copied",
                )
                result.divergences.append(found)
    return result


@register(id="windows", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_window_slots(evidence: Evidence) -> CheckResult:
    """Every position that a sliding window reaches has a slot of its own in the pool of windows.

    CACHE_SLOT for each request and forward with a position in reach that has no slot, or another's too.

    How far a window reaches says the reference, which reads it in the checkpoint; else, below a witness, the engine.
    """
    result = CheckResult()
    known = {} if evidence.reference is None else evidence.reference.header
    for event in evidence.engine.named("window"):
        window = int(known.get(WINDOW, event.data["window"]))
        for share, length, held_from, shared in shares_of(event, "lens", "held_from", "shared"):
            needed = max(0, share[3] + 1 - window)
            result.count("window_slots", share[3] + length - needed)
            for wrong, hint, expected, observed in (
                (held_from > needed, "window-slot-gone", f"every position from {needed} on", f"from {held_from} on"),
                (shared, "window-slot-shared", "a slot of its own for each position", f"{shared} that others have too"),
            ):
                if wrong:
                    found = Divergence(
                        kind=Kind.CACHE_SLOT,
                        key=Key.of(share, event.data["phase"]),
                        round=event.data["round"],
                        expected=expected,
                        observed=observed,
                        hint=hint,
                    )
                    result.divergences.append(found)
    return result
