"""Collects what one scheduler rank did, round by round; knows rounds and requests, not SGLang's classes.

A round's tensors leave the device in one transfer that nobody waits for: `take` gives the rounds whose bytes have
arrived, usually one turn late, so that the scheduler runs ahead of the device as it does without us. What the bytes
mean is worked out on the control side (`harness.driving.rounds`).

Engine side: standard library, NumPy and torch only. It must copy and never modify a tensor it is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...both_sides.packed import Arrays, Field
from .dock import Arrival, Dock, Landing
from .snapshot import Copy, Shipment, Shipper, Tensors, copied

#: Rounds that may be on their way to the host before `take` waits for the oldest.
MOST_UNDERWAY = 2


def plain_rid(rid: str) -> str:
    """The scenario's name of a request: the host appends `@<scenario number>`, since SGLang wants rids never reused."""
    return rid.rpartition("@")[0] or rid


def ints(tensor: torch.Tensor) -> np.ndarray:
    """Whole numbers as int64, flat; waits for the device."""
    return np.array(tensor.detach().to("cpu", torch.int64).reshape(-1).numpy(), dtype=np.int64)


@dataclass(slots=True)
class Layouts:
    """Fields by number, so that each arrangement travels once a scenario."""

    _numbers: dict[tuple[Field, ...], int] = field(default_factory=dict)
    _untold: list[tuple[Field, ...]] = field(default_factory=list)

    def number(self, fields: tuple[Field, ...]) -> int:
        found = self._numbers.get(fields)
        if found is None:
            found = self._numbers[fields] = len(self._numbers)
            self._untold.append(fields)
        return found

    def news(self) -> list[tuple[Field, ...]]:
        """Arrangements that were not asked for before, in the order of their numbers."""
        untold, self._untold = self._untold, []
        return untold


def _numbers(copy: Copy, name: str) -> list[int]:
    found: list[int] = copy.read()[name].reshape(-1).tolist()
    return found


@dataclass(slots=True)
class Round:
    """The batch being run: one entry a request, in batch order.

    starts and accept_lens may still be on the device; asking for them here waits for it, and only mutants ask.
    """

    index: int
    turn: int
    mode: str
    rids: list[str]
    given_starts: list[int] | Copy
    lens: list[int]
    final: list[bool]
    epochs: list[int]
    forwards: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)  # phase -> batch size of the CUDA graph that ran it
    accepted: list[int] | Copy = field(default_factory=list)
    extend_rids: list[int] = field(default_factory=list)  # batch rows that take part in the draft-extend
    events: list[dict[str, Any]] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)
    size: int = 0
    layouts: Layouts = field(default_factory=lambda: Layouts())
    dock: Dock | None = None

    @property
    def starts(self) -> list[int]:
        if isinstance(self.given_starts, Copy):
            self.given_starts = _numbers(self.given_starts, "starts")
        return self.given_starts

    @property
    def accept_lens(self) -> list[int]:
        if isinstance(self.accepted, Copy):
            self.accepted = _numbers(self.accepted, "lens")
        return self.accepted

    def hold(self, copies: Sequence[Copy | None]) -> list[tuple[int, int]]:
        """Take copies along; where each begins in the round's bytes, and the number of its layout."""
        pieces = []
        for copy in copies:
            if copy is not None:
                pieces.append((self._placed(copy.data), self.layouts.number(copy.fields)))
        return pieces

    def keep(self, buffer: torch.Tensor) -> int:
        """Take along what a buffer holds now that others will write over; where it begins in the round's bytes."""
        return self._placed(buffer if self.dock is not None else buffer.clone())

    def _placed(self, data: Any) -> int:
        if self.dock is not None:
            landing: Landing = self.dock.land(data) if isinstance(data, torch.Tensor) else data
            return landing.base
        base, self.size = self.size, self.size + data.numel()
        self.parts.append(data)
        return base


@dataclass(slots=True)
class _Life:
    """How far one request has come, to tell a restart (retraction) from a next chunk."""

    epoch: int = 0
    reached: int = -1
    decoding: bool = False


class Recorder:
    """Rounds of the scenario in progress; `take` empties it. dock: of the GPU that the engine runs on."""

    def __init__(self, dock: Dock | None = None) -> None:
        self.dock = dock
        self.active = False
        self.phase: str | None = None
        self.step = 0
        self.turn = 0
        self.round: Round | None = None
        self.last: dict[str, Any] = {}
        #: messages without tensors of a round that failed
        self.last_said: list[dict[str, Any]] = []
        #: target id of each draft id, int64 [V'], where they differ; told once a scenario
        self._target_ids: np.ndarray | None = None
        self._rounds = 0
        self._lives: dict[str, _Life] = {}
        self._layouts = Layouts()
        self._shipper = Shipper()
        self._underway: deque[tuple[dict[str, Any], Shipment | Arrival]] = deque()

    def begin(self) -> None:
        """Forget the previous scenario."""
        self.take(all_of_them=True)
        self._rounds = 0
        self._lives = {}
        self._layouts = Layouts()
        self._target_ids = None
        self.round = None
        self.last = {}
        self.last_said = []

    def take(self, *, all_of_them: bool = False, before: int | None = None) -> list[tuple[dict[str, Any], Arrays]]:
        """Finished rounds, oldest first: those that have arrived; all_of_them waits for the rest.

        before: only rounds of turns before this one.
        """
        found = []
        while self._underway:
            message, shipment = self._underway[0]
            if before is not None and message["turn"] >= before:
                break
            if not (all_of_them or len(self._underway) > MOST_UNDERWAY or shipment.ready()):
                break
            self._underway.popleft()
            found.append((message, {"bytes": shipment.bytes()}))
        return found

    def open_round(
        self,
        *,
        mode: str,
        rids: Sequence[str],
        starts: Sequence[int] | Copy,
        lens: Sequence[int],
        final: Sequence[bool],
    ) -> Round:
        """starts: one a request, or a copy with a field of that name while they are on the device."""
        known = [-1] * len(rids) if isinstance(starts, Copy) else list(starts)
        epochs = [self._advance(rid, mode, start) for rid, start in zip(rids, known, strict=True)]
        given = starts if isinstance(starts, Copy) else known
        self.round = Round(self._rounds, self.turn, mode, list(rids), given, list(lens), list(final), epochs)
        self.round.layouts, self.round.dock = self._layouts, self.dock
        self._rounds += 1
        return self.round

    def _advance(self, rid: str, mode: str, start: int) -> int:
        life = self._lives.setdefault(rid, _Life())
        begins = mode in ("PREFILL", "PREBUILT")  # from a prompt, or from what another engine hands over
        if begins and life.reached >= 0 and (life.decoding or start != life.reached):
            life.epoch += 1
            life.decoding = False
        if mode == "DECODE":
            life.decoding = True
        return life.epoch

    def close_round(self) -> None:
        """The round is over: its bytes start on their way."""
        current, self.round = self.round, None
        if current is None:
            return
        starts = current.given_starts
        pieces = current.hold([starts]) if isinstance(starts, Copy) else []
        known = [0] * len(current.rids) if isinstance(starts, Copy) else starts  # how far a decode came, nobody asks
        for rid, start, length in zip(current.rids, known, current.lens, strict=True):
            self._lives[rid].reached = start + length
        message = {
            "ev": "packed",
            "turn": current.turn,
            "index": current.index,
            "mode": current.mode,
            "rids": current.rids,
            "starts": None if isinstance(starts, Copy) else starts,
            "pieces": pieces,
            "layouts": self._layouts.news(),
            "lens": current.lens,
            "final": current.final,
            "epochs": current.epochs,
            "forwards": current.forwards,
            "graphs": current.graphs,
            "events": current.events,
        }
        shipped = self._shipper.ship(current.parts) if self.dock is None else self.dock.leave()
        self._underway.append((message, shipped))

    def drop_round(self) -> None:
        """The round failed: what it left on the device may be no longer readable, what was said of it is."""
        current, self.round = self.round, None
        if self.dock is not None:
            self.dock.abandon()
        if current is not None:
            said = [event["message"] for event in current.events if event["what"] == "message"]
            self.last_said = [{**message, "turn": current.turn} for message in said]

    def note(self, what: str, *copies: Copy | None, **facts: Any) -> None:
        """Something that happened in the current round, with the tensors that show it."""
        current = self._current()
        current.events.append({"what": what, **facts, "pieces": current.hold(copies)})

    def copied(self, tensors: Tensors) -> Copy | None:
        """A copy of tensors as they are now, for `note`."""
        return copied(tensors) if self.dock is None else self.dock.copied(tensors)

    def put(self, message: dict[str, Any]) -> None:
        """A message of its own, in its place among what happened in the current round."""
        self._current().events.append({"what": "message", "message": message})

    def map_ids(self, target_ids: np.ndarray) -> None:
        """From here on draft ids stand for these target ids."""
        if self._target_ids is not target_ids:
            self._target_ids = target_ids
            self._current().events.append({"what": "ids", "ids": target_ids.tolist()})

    def tails(self, *, holes: list[int], wrong: list[int]) -> None:
        """The batch row of each slot copied for branches about to be drafted, and of each that holds something else."""
        current = self._current()
        requests = range(len(current.rids))
        self.put(
            {
                "ev": "tails",
                "round": current.index,
                "rids": current.rids,
                "epochs": current.epochs,
                "committed": current.starts,
                "holes": [holes.count(i) for i in requests],
                "wrong": [wrong.count(i) for i in requests],
            }
        )

    def _current(self) -> Round:
        if self.round is None:
            raise RuntimeError("the probe saw a forward outside a round; its hooks do not fit this release")
        return self.round
