"""Checks which KV slots attention reads: those that hold what the row may see, each once. No weights, no values.

A row of a prompt or of committed tokens sees the positions of its request up to its own. A draft step sees the
committed ones and the rows that its round ran before it, one a step, and itself; a node of a verify sees the committed
ones, the nodes above it and itself. A window for draft steps (speculative_draft_window_size) leaves these its sink and
so many of the newest committed positions. Where each of these lies, the rows say that wrote it (`pools`), whatever
table SGLang keeps. Which of the beams of a tree a later draft step descends from, only the reference knows.

What the probe does not record (`harness.engine_side.probes.attention_probe`) is not judged, and said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.checks.evidence import Evidence
from harness.checks.pools import NOBODY, Forward, Pools, followed
from harness.checks.registry import CheckResult, register
from harness.contract.align import Ints
from harness.contract.batches import Share
from harness.contract.rows import slots_read
from harness.contract.types import RUNNING, Divergence, Kind, Phase

ID = "reads"
#: Phases whose forwards attend.
ATTENDING = (*RUNNING, Phase.DRAFT, Phase.VERIFY)
#: Said of forwards whose plan nobody saw: in a CUDA graph, by another backend, or in a trace of before.
NOT_RECORDED = "not exercised: which KV slots attention reads (not recorded"
#: Slots that a sentence lists.
MOST_LISTED = 4


@register(id=ID, kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine"))
def check_slots_read(evidence: Evidence) -> CheckResult:
    """Attention reads the slots of the positions and drafted rows that a row may see: all of them, no others.

    CACHE_SLOT at each row that reads other slots; the hint says what they are.
    """
    result, silent = CheckResult(), set[str]()
    engines: dict[tuple[int, str], _Engine] = {}
    for forward, pools in followed(evidence):
        engine = engines.setdefault((forward.dp_rank, forward.side), _Engine(evidence, pools))
        pools.write(forward)
        if forward.phase not in ATTENDING:
            continue
        for share, rows in forward.shares.items():
            if not engine.judge(forward, share, rows, result):
                silent.add(str(forward.phase))
        engine.ran()
    if silent:
        where = f" in {', '.join(sorted(silent))}" if result.compared else ""
        result.notes.append(f"{NOT_RECORDED}{where}{_how(evidence)})")
    return result


def _how(evidence: Evidence) -> str:
    """With what a run anew records it; empty where nothing does."""
    engine = evidence.scenario.engine
    if engine.attention_backend == "dsa":  # a target that wants it runs on no other
        return ""
    options = ["--disable-cuda-graph"] * engine.cuda_graph
    options += ["--attention-backend triton"] * (engine.attention_backend != "triton")
    if options:
        return f"; a run with {' '.join(options)} records it"
    older = not (evidence.engine.rows.ints["slots_shared"] >= 0).any() and not engine.deterministic_inference
    return "; a run anew records it, unless its layers have windows" if older else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row that reads: its own and what it may see, as what slots hold; slots: where these lie, as far as is known."""

    number: int
    sees: Ints
    rows: tuple[int, ...]  # behind the positions: rows of this round
    slots: list[int]


@dataclass(slots=True)
class _Engine:
    evidence: Evidence
    pools: Pools
    #: what beams read and should have read in the draft step before: (request, number) -> lists
    _before: dict[tuple[object, ...], list[list[int]]] = field(default_factory=dict)
    _now: dict[tuple[object, ...], list[list[int]]] = field(default_factory=dict)

    def judge(self, forward: Forward, share: Share, rows: list[int], result: CheckResult) -> bool:
        """One request's rows of one forward; False where what they read is not recorded."""
        ints, before = self.evidence.table.ints, (-1, False)  # how many slots the row before read, and whether rightly
        for row, read in zip(rows, slots_read(self.evidence.engine.rows, rows), strict=True):
            if read is None:
                return False
            result.count("slots_read", len(read))
            goes_on = before == (ints["slots_shared"][row], True) and len(read) == before[0] + 1
            if forward.phase in RUNNING and goes_on and read[-1] == ints["cache_slot"][row]:
                before = len(read), True  # what the row before it read, and itself
                continue
            seen = self._seen(forward, share, row)
            fault = self._fault(forward, share, seen, read)
            if forward.phase is Phase.DRAFT:
                self._now[share[:3], ints["slot"][row]] = [read.tolist(), seen.slots]
            before = len(read), fault is None
            if fault is not None:
                result.divergences.append(fault)
        return True

    def ran(self) -> None:
        """The next draft step comes behind this one."""
        self._before |= self._now
        self._now = {}

    def _seen(self, forward: Forward, share: Share, row: int) -> _Row:
        ints, committed = self.evidence.table.ints, share[3]
        count = committed + (ints["slot"][row] + 1 if forward.phase in RUNNING else 0)
        rows = tuple(self._of_round(forward, share, row))
        places = self.pools.places.get(share[1:3], {})
        kept = self._kept(forward, count)
        slots = [places.get(position, -1) for position in kept] + [ints["cache_slot"][one] for one in rows]
        return _Row(number=row, sees=self.pools.of_positions(share, count)[kept], rows=rows, slots=slots)

    def _kept(self, forward: Forward, count: int) -> list[int]:
        """Committed positions that a row sees: all, or what a window of draft steps keeps of them, sink and newest."""
        given, spec = self.evidence.scenario.engine.server_args, self.evidence.scenario.spec
        window = given.get("speculative_draft_window_size")
        if forward.phase is not Phase.DRAFT or not window or spec.algorithm == "EAGLE3":  # there layers have the window
            return list(range(count))
        sink = given.get("speculative_draft_sink_size") or 0
        return [position for position in range(count) if position < sink or position >= count - window]

    def _of_round(self, forward: Forward, share: Share, row: int) -> Iterator[int]:
        """The rows of this round that a row sees, itself last: of a beam, those of its own number."""
        table, slot = self.evidence.table, self.evidence.table.ints["slot"][row]
        if forward.phase is Phase.DRAFT:
            for one in table.of(share, Phase.DRAFT):
                if table.ints["slot"][one] == slot and table.ints["step"][one] <= forward.step:
                    yield one
        elif forward.phase is Phase.VERIFY:
            nodes = {table.ints["slot"][one]: one for one in forward.shares[share]}
            line: list[int] = []
            while slot in nodes and nodes[slot] not in line:
                line.append(nodes[slot])
                slot = table.ints["parent"][nodes[slot]]
            yield from reversed(line)

    def _fault(self, forward: Forward, share: Share, row: _Row, read: Ints) -> Divergence | None:
        first = min(self.pools.places.get(share[1:3], {0: 0}))
        held = self.pools.holds(forward.pool, read, share, known=first)
        wanted = Counter([*row.sees.tolist(), *(Pools.of_row(one) for one in row.rows)])
        found = Counter(held.tolist())
        if forward.phase is Phase.DRAFT:
            self._any_beam(forward, share, wanted, found)
        if wanted == found:
            return None
        missing, extra = wanted - found, found - wanted
        due = dict(zip([*row.sees.tolist(), *(Pools.of_row(one) for one in row.rows)], row.slots, strict=True))
        return self.evidence.divergence(
            row.number,
            kind=Kind.CACHE_SLOT,
            expected=self._said(missing, share, wanted.total(), due),
            observed=self._said(extra, share, len(read), dict(zip(held.tolist(), read.tolist(), strict=True))),
            hint=self._hint(forward, share, row, read.tolist(), missing=missing, extra=extra),
        )

    def _any_beam(self, forward: Forward, share: Share, wanted: Counter[int], found: Counter[int]) -> None:
        """Of the steps before, a beam descends from one each: any, as far as this check knows."""
        ints = self.evidence.table.ints
        beams = {Pools.of_row(one): ints["step"][one] for one in self.evidence.table.of(share, Phase.DRAFT)}
        for held in [held for held in found if beams.get(held, forward.step) < forward.step]:
            own = next((one for one in wanted if beams.get(one) == beams[held]), None)
            if own is not None and found[held] == 1 and own not in found:
                del wanted[own]
                wanted[held] = 1

    def _said(self, held: Counter[int], share: Share, total: int, where: dict[int, int]) -> str:
        """In words: how many slots, and those that are read too little or in the place of others."""
        names = [
            f"slot {where.get(one, -1)} ({self.pools.said(one, share)})"
            for one in sorted(held.elements(), key=lambda one: (one < 0, abs(one)))
        ]
        more = [f"{len(names) - MOST_LISTED} more"] if len(names) > MOST_LISTED else []
        return f"{total} slots" + (f", among them {', '.join([*names[:MOST_LISTED], *more])}" if names else "")

    def _hint(
        self, forward: Forward, share: Share, row: _Row, read: list[int], *, missing: Counter[int], extra: Counter[int]
    ) -> str:
        """The smallest change to what should be read that gives what is read."""
        ints = self.evidence.table.ints
        if not read:
            return "nothing-read"
        if forward.phase is Phase.DRAFT and read in self._before.get((share[:3], ints["slot"][row.number]), ()):
            return "plan-of-step-before"
        if read[:-1] == row.slots[1:]:
            return "one-slot-late"
        if read[1:] == row.slots[:-1]:
            return "one-slot-early"
        if not extra:
            return "left-out"
        return self._what(forward, share, row, missing, extra)

    def _what(self, forward: Forward, share: Share, row: _Row, missing: Counter[int], extra: Counter[int]) -> str:
        table = self.evidence.table
        rows = [-held - 2 for held in extra if held < NOBODY]
        keys = [table.rows.key(one) for one in rows]
        if not missing:
            return "more-than-it-sees"
        if min(missing) >= 0:  # positions that are committed
            others = any(key.rid != share[1] for key in keys) or any(
                self.pools.of_another(held, share) for held in extra
            )
            return "prefix-of-another-request" if others else "prefix-elsewhere"
        own = {Pools.of_row(row.number)}
        if set(missing) == own and len(rows) == len(extra) and all(key.step == forward.step for key in keys):
            return "of-another-beam" if forward.phase is Phase.DRAFT else "of-another-node"
        return "rows-of-round-elsewhere"


@register(id="beams", kinds=(Kind.CACHE_SLOT,), reads=("scenario", "engine", "reference"))
def check_beams_read(evidence: Evidence) -> CheckResult:
    """A later draft step of a tree reads the rows of the beams that it grew from, not those of other beams.

    CACHE_SLOT at each beam that does not read its ancestors' rows; where a plan is not recorded, nothing.
    """
    result = CheckResult()
    if evidence.scenario.spec.eagle_topk == 1:
        return result
    attended, ints = _attended(evidence), evidence.table.ints
    for share, rows in evidence.table.each(Phase.DRAFT):
        slots = {(ints["step"][row], ints["slot"][row]): ints["cache_slot"][row] for row in rows}
        for step in sorted({step for step, _ in slots if step}):
            beams = [row for row in rows if ints["step"][row] == step]
            for row, read in zip(beams, slots_read(evidence.engine.rows, beams), strict=True):
                line = _line(attended, share, step, ints["slot"][row])
                if read is not None and line is not None:
                    result.count("slots_read", step)
                    result.divergences += _not_of_line(evidence, row, set(read.tolist()), line, slots)
    return result


Beam = tuple[int, int]


def _attended(evidence: Evidence) -> dict[tuple[Share, Beam], int]:
    """(share, (step, beam)) -> the beam of the step before that it attends, by the reference."""
    rows = evidence.truth.rows
    keys = [rows.key(row) for row in (rows.ints["attends"] >= 0).nonzero()[0].tolist()]
    found = rows.ints["attends"][rows.ints["attends"] >= 0].tolist()
    return {(key.share, (key.step, key.slot)): beam for key, beam in zip(keys, found, strict=True)}


def _line(attended: dict[tuple[Share, Beam], int], share: Share, step: int, beam: int) -> list[Beam] | None:
    """(step, beam) of all that a beam attends of its round; None where the reference does not say."""
    found: list[Beam] = []
    while step:
        before = attended.get((share, (step, beam)))
        if before is None:
            return None
        step, beam = step - 1, before
        found.append((step, beam))
    return found


def _not_of_line(
    evidence: Evidence, row: int, read: set[int], line: Sequence[Beam], slots: dict[Beam, int]
) -> Iterator[Divergence]:
    missing = [beam for beam in line if slots.get(beam, -1) not in read]
    if not missing:
        return
    own = evidence.table.ints["slot"][row]
    instead = [
        (step, beam) for (step, beam), slot in sorted(slots.items()) if slot in read and (step, beam) not in line
    ]
    instead = [one for one in instead if one != (evidence.table.ints["step"][row], own)]
    hint = "rows-of-own-number" if instead and {beam for _, beam in instead} == {own} else "rows-of-other-beams"
    yield evidence.divergence(row, kind=Kind.CACHE_SLOT, expected=_beams(missing), observed=_beams(instead), hint=hint)


def _beams(beams: Sequence[Beam]) -> str:
    return " and ".join(f"draft step {step}, beam {beam}" for step, beam in sorted(beams)) or "none in its place"
