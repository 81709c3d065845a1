"""What each KV slot holds, by the rows that a trace says wrote it. It must not judge.

A slot holds the position of a request that was written there last, or a row that nothing has committed yet: a draft
step's, or a node that was verified. Target and draft have pools of their own, and so has every layer of a draft with
several; slots have one number in all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from harness.checks.evidence import Evidence
from harness.contract.align import Ints
from harness.contract.batches import COPIED, Share, copies
from harness.contract.trace import Event
from harness.contract.types import LAYERED, TARGET, Phase

#: In the order in which a batch runs them.
PHASES = (Phase.PREBUILT, Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.DRAFT, Phase.VERIFY, Phase.ACCEPT, Phase.EXTEND)
#: The name of the target's pool.
OF_TARGET = "target"
#: Before the name of a pool: its rows on the host, and in storage behind it.
HOST, STORAGE = "host ", "storage "
#: Where slots are -> what stands before the name of a pool there.
PLACES = {"device": "", "host": HOST, "storage": STORAGE}
#: Nobody wrote it.
NOBODY = -1
_OWNER = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Rows of one forward of one batch, request by request; side: of a pair of engines."""

    dp_rank: int
    side: str
    round: int
    phase: Phase
    step: int
    shares: dict[Share, list[int]]

    @property
    def pool(self) -> str:
        if self.phase in (*TARGET, Phase.ACCEPT):
            return OF_TARGET
        return f"draft {self.step if self.phase in LAYERED else 0}"


def forwards(evidence: Evidence) -> Iterator[Forward]:
    """In the order in which each engine ran them, rank by rank."""
    sides = {(record.dp_rank, record.index): record.side for record in evidence.engine.rounds}
    found: dict[tuple[int, str, int, int, int], dict[Share, list[int]]] = {}
    ints = evidence.table.ints
    for share, by_phase in evidence.table.groups.items():
        for place, phase in enumerate(PHASES):
            for row in by_phase.get(phase, ()):
                number = ints["round"][row]
                key = share[0], sides.get((share[0], number), ""), number, place, ints["step"][row]
                found.setdefault(key, {}).setdefault(share, []).append(row)
    for (dp_rank, side, number, place, step), shares in sorted(found.items(), key=lambda one: one[0]):
        yield Forward(dp_rank=dp_rank, side=side, round=number, phase=PHASES[place], step=step, shares=shares)


@dataclass(slots=True)
class Pools:
    """The pools of one engine, filled by `write`, one forward after the other.

    What a slot holds is one number: of a position of a request, of a row (`of_row`), or NOBODY.
    """

    evidence: Evidence
    _held: dict[str, Ints] = field(default_factory=dict)
    _owners: dict[tuple[str, int], int] = field(default_factory=dict)
    _names: list[tuple[str, int]] = field(default_factory=list)
    #: slot of each position that a request wrote itself
    places: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    _common: dict[tuple[str, str], int] = field(default_factory=dict)
    #: copies to and from the host that are still to be looked at
    _copies: deque[Event] = field(init=False)

    def __post_init__(self) -> None:
        self._copies = deque(copies(self.evidence.engine))

    @staticmethod
    def of_row(row: int) -> int:
        """What a slot holds that an uncommitted row wrote."""
        return -row - 2

    def of_positions(self, share: Share, count: int) -> Ints:
        """What slots hold that keep positions 0 .. count-1 of a request: int64 [count]."""
        return self._owner(share[1], share[2]) * _OWNER + np.arange(count)

    def holds(self, pool: str, slots: Ints, share: Share, *, known: int) -> Ints:
        """What these slots [w] hold, as `share` may take it.

        A position that another request wrote behind the same tokens is its own. known: a leading slot that nobody
        wrote in this trace and that the request did not write itself, below this position, is taken at its word.
        """
        held = self._held.get(pool, np.empty(0, dtype=np.int64))
        inside = (slots >= 0) & (slots < len(held))
        found = np.where(inside, held[np.where(inside, slots, 0)] if len(held) else NOBODY, NOBODY)
        mine = self._owner(share[1], share[2])
        for owner in set((found[found >= 0] // _OWNER).tolist()) - {mine}:
            theirs = (found >= 0) & (found // _OWNER == owner)
            alike = theirs & (found % _OWNER < self._alike(share[1], self._name(owner)[0]))
            found[alike] = mine * _OWNER + found[alike] % _OWNER
        unknown = np.flatnonzero((found == NOBODY) & (np.arange(len(found)) < known))
        found[unknown] = mine * _OWNER + unknown
        return found

    def names(self) -> list[str]:
        """The pools of the device in which anything lies."""
        return [name for name in self._held if not name.startswith((HOST, STORAGE))]

    def held(self, pool: str, slot: int) -> int:
        """What one slot holds."""
        known = self._held.get(pool, ())
        return int(known[slot]) if 0 <= slot < len(known) else NOBODY

    def of_another(self, held: int, share: Share) -> bool:
        """Whether it is a position of another request."""
        return held >= 0 and held // _OWNER != self._owner(share[1], share[2])

    def said(self, held: int, share: Share) -> str:
        """What a slot holds, in words."""
        if held == NOBODY:
            return "nobody wrote it"
        if held >= 0:
            rid, attempt = self._name(held // _OWNER)
            whose = "" if (rid, attempt) == share[1:3] else f" of request {rid}"
            return f"position {held % _OWNER}{whose}"
        row = -held - 2
        key = self.evidence.table.rows.key(row)
        what = f"node {key.slot}" if key.phase == Phase.VERIFY else f"draft step {key.step}, beam {key.slot}"
        whose = "" if (key.rid, key.attempt) == share[1:3] else f" of request {key.rid}"
        return what + whose + ("" if key.committed == share[3] else f" of the round at {key.committed}")

    def write(self, forward: Forward) -> None:
        """Its rows write what they hold; before that, what was copied from and to the host before its round."""
        self.copy_until(forward)
        for share, rows in forward.shares.items():
            if forward.phase is Phase.ACCEPT:
                self._accept(share, rows)
                continue
            slots = [self.evidence.table.ints["cache_slot"][row] for row in rows]
            if forward.phase in (Phase.DRAFT, Phase.VERIFY):
                self._put(forward.pool, slots, [self.of_row(row) for row in rows])
                continue
            first = 0 if forward.phase is Phase.PREBUILT else share[3]
            positions = [first + self.evidence.table.ints["slot"][row] for row in rows]
            self._keep(share, positions, slots)
            self._put(forward.pool, slots, self._positions(share, positions))
            if forward.phase in (Phase.EXTEND, Phase.PREBUILT) and forward.step == 0:
                # what a verify accepted lies, or was moved, where the draft runs it; what arrives is of both models
                self._put(OF_TARGET, slots, self._positions(share, positions))

    def copy_until(self, forward: Forward) -> None:
        """Slots take what is copied to them, on the device or the host, up to the beginning of a forward's round."""
        while self._copies and self._copies[0].data["round"] <= forward.round:
            event = self._copies.popleft()
            if event.dp_rank == forward.dp_rank and event.data.get("side", "") == forward.side:
                self._copy(event)

    def _copy(self, event: Event) -> None:
        of, to = COPIED[event.data["what"]]
        for pool in self.names():
            self._put(
                PLACES[to] + pool, event.data[to], [self.held(PLACES[of] + pool, slot) for slot in event.data[of]]
            )

    def _accept(self, share: Share, rows: list[int]) -> None:
        """Nodes become positions: the j-th accepted one is at committed + j."""
        ints = self.evidence.table.ints
        nodes = {ints["slot"][row]: ints["cache_slot"][row] for row in self.evidence.table.of(share, Phase.VERIFY)}
        walk = [(share[3] + ints["slot"][row], nodes.get(ints["parent"][row], -1)) for row in rows]
        positions, slots = [position for position, _ in walk], [slot for _, slot in walk]
        self._keep(share, positions, slots)
        self._put(OF_TARGET, slots, self._positions(share, positions))

    def _positions(self, share: Share, positions: list[int]) -> list[int]:
        mine = self._owner(share[1], share[2])
        return [mine * _OWNER + position for position in positions]

    def _keep(self, share: Share, positions: list[int], slots: list[int]) -> None:
        self.places.setdefault((share[1], share[2]), {}).update(zip(positions, slots, strict=True))

    def _put(self, pool: str, slots: list[int], held: list[int]) -> None:
        written = [(slot, what) for slot, what in zip(slots, held, strict=True) if slot >= 0]
        if not written:
            return
        at, what = np.asarray(written, dtype=np.int64).T
        known = self._held.get(pool, np.empty(0, dtype=np.int64))
        if at.max() >= len(known):
            known = np.concatenate([known, np.full(int(at.max()) + 1 - len(known), NOBODY)])
        known[at] = what
        self._held[pool] = known

    def _owner(self, rid: str, attempt: int) -> int:
        if (rid, attempt) not in self._owners:
            self._owners[rid, attempt] = len(self._names)
            self._names.append((rid, attempt))
        return self._owners[rid, attempt]

    def _name(self, owner: int) -> tuple[str, int]:
        return self._names[owner]

    def _alike(self, one: str, other: str) -> int:
        """How many leading tokens two requests share."""
        if (one, other) not in self._common:
            self._common[one, other] = self.evidence.alike(one, other)
        return self._common[one, other]


def followed(evidence: Evidence) -> Iterator[tuple[Forward, Pools]]:
    """Each forward, with the pools of the engine that ran it as they were before; whoever asks has them written."""
    engines: dict[tuple[int, str], Pools] = {}
    for forward in forwards(evidence):
        name = forward.dp_rank, forward.side
        if name not in engines:
            engines[name] = Pools(evidence)
        yield forward, engines[name]
