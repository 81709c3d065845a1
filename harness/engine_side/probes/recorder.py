"""Collects what one scheduler rank did, round by round; knows rounds and requests, not SGLang's classes.

A round's tensors leave the device in one transfer that nobody waits for: `take` gives the rounds whose bytes have
arrived, usually one scheduler step late, so that the scheduler runs ahead of the device as it does without us. What
the bytes mean is worked out on the control side (`harness.driving.rounds`).

Engine side: standard library, NumPy and torch only. It must copy and never modify a tensor it is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...both_sides.wire import Arrays
from .captured_graph import CapturedGraph
from .round import Layouts, Round
from .snapshot import Copy, HostRound, Tensors, copied
from .staging import StagedRound, StagingBuffer

#: Rounds that may be on their way to the host before `take` waits for the oldest.
MOST_UNDERWAY = 2


def plain_rid(rid: str) -> str:
    """The scenario's name of a request: the host appends `@<scenario number>`, since SGLang wants rids never reused."""
    return rid.rpartition("@")[0] or rid


def ints(tensor: torch.Tensor) -> np.ndarray:
    """Whole numbers as int64, flat; waits for the device."""
    return np.array(tensor.detach().to("cpu", torch.int64).reshape(-1).numpy(), dtype=np.int64)


@dataclass(slots=True)
class _Life:
    """How far one request has come, to separate a restart (retraction) from a next chunk.

    whole: all of its prompt was read. A cache may give all of that to a request that was taken back before it decoded.
    """

    attempt: int = 0
    reached: int = -1
    whole: bool = False


class Recorder:
    """Rounds of the scenario in progress; `take` empties it. staging: of the GPU that the engine runs on."""

    def __init__(self, staging: StagingBuffer | None = None) -> None:
        self.staging = staging
        self.active = False
        self.phase: str | None = None
        self.step = 0
        self.scheduler_step = 0
        self.round: Round | None = None
        self.last: dict[str, Any] = {}
        #: messages without tensors of a round that failed
        self.last_said: list[dict[str, Any]] = []
        #: messages of what happened since the last round
        self._between: list[dict[str, Any]] = []
        #: target id of each draft id, int64 [V'], where they differ; reported once a scenario
        self._target_ids: np.ndarray | None = None
        self.scenarios = 0  # begun so far
        self._rounds = 0
        self._lives: dict[str, _Life] = {}
        self._layouts = Layouts()
        #: the requests of the last round and their attempts, while it was a decode
        self._decoding: tuple[list[str], list[int]] | None = None
        #: (scheduler step, round as `wire.ROUND` orders it, its bytes)
        self._underway: deque[tuple[int, tuple[Any, ...], HostRound | StagedRound]] = deque()

    def begin(self) -> None:
        """Forget the previous scenario."""
        self.take(all_of_them=True)
        self.scenarios += 1
        self._rounds = 0
        self._lives = {}
        self._decoding = None
        self._layouts = Layouts()
        if self.staging is not None:
            self.staging.forget_layouts()
        self._target_ids = None
        self.round = None
        self.last = {}
        self.last_said, self._between = [], []

    def take(self, *, all_of_them: bool = False, before: int | None = None) -> list[tuple[Any, Arrays]]:
        """Finished rounds (`wire.named` names their parts), oldest first: those that have arrived.

        all_of_them waits for the rest. before: only rounds of scheduler steps before this one. Send what was taken
        before anything else is recorded: the bytes are not copied once more.
        """
        found: list[tuple[Any, Arrays]] = []
        while self._underway:
            scheduler_step, message, shipment = self._underway[0]
            if before is not None and scheduler_step >= before:
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
        lens: Sequence[int] | None = None,
        final: Sequence[bool] | None = None,
        decoding: Sequence[str] = (),
    ) -> Round:
        """starts: one a request, or a copy with a field of that name while they are on the device.

        lens, final: of what is read of each prompt; None where none is read. decoding: requests that run on beside
        prompts, each by its last token.
        """
        names, given = list(rids), starts if isinstance(starts, Copy) else list(starts)
        read = [True] * len(names) if final is None else list(final)
        attempts = self._attempts(mode, names, given, read, decoding)
        current = self.round = Round(
            self._rounds,
            self.scheduler_step,
            mode,
            names,
            given,
            [0] * len(names) if lens is None else list(lens),
            read,
            attempts,
            layouts=self._layouts,
            staging=self.staging,
        )
        self._rounds += 1
        for message in self._between:
            self.put({**message, "round": current.index})
        self._between = []
        return current

    def _attempts(
        self, mode: str, rids: list[str], starts: list[int] | Copy, final: list[bool], decoding: Sequence[str]
    ) -> list[int]:
        """How often each request had begun anew. A decode of the requests of the decode before it begins nothing."""
        before = self._decoding
        if mode == "DECODE" and before is not None and before[0] == rids:
            return before[1]
        known = [-1] * len(rids) if isinstance(starts, Copy) else starts
        modes = ["DECODE" if rid in decoding else mode for rid in rids]
        attempts = [self._advance(*one) for one in zip(rids, modes, known, final, strict=True)]
        self._decoding = (rids, attempts) if mode == "DECODE" else None
        return attempts

    def _advance(self, rid: str, mode: str, start: int, final: bool) -> int:
        life = self._lives.setdefault(rid, _Life())
        handed = mode == "PREBUILT"  # by another engine, whole
        if (handed or mode == "PREFILL") and life.reached >= 0 and (handed or life.whole or start != life.reached):
            life.attempt += 1
        if handed or mode == "PREFILL":
            life.whole = final
        if mode == "DECODE":
            life.whole, life.reached = True, max(0, life.reached)
        return life.attempt

    def close_round(self) -> None:
        """The round is over: its bytes start on their way."""
        current, self.round = self.round, None
        if current is None:
            return
        starts = current.given_starts
        if self.staging is not None:
            self.staging.stage_held()
            current.staged()
        if isinstance(starts, Copy):
            pieces, said = current.hold((starts,)), None
        else:
            pieces, said = [], starts
            if current.mode != "DECODE":  # how far a decode came, nobody asks
                for rid, start, length in zip(current.rids, starts, current.lens, strict=True):
                    self._lives[rid].reached = start + length
        layouts, tables = self._layouts.news()
        message = (  # as `wire.ROUND` names them
            current.scheduler_step,
            current.index,
            current.mode,
            current.rids,
            said,
            pieces,
            layouts,
            tables,
            current.lens,
            current.final,
            current.attempts,
            current.forwards,
            current.graphs,
            current.events,
            current.num_steps,
        )
        shipped = HostRound(current.parts) if self.staging is None else self.staging.close_round()
        self._underway.append((current.scheduler_step, message, shipped))

    def drop_round(self) -> None:
        """The round failed: what it left on the device may be no longer readable, what was said of it is."""
        current, self.round = self.round, None
        if self.staging is not None:
            self.staging.drop_round()
        if current is not None:
            said = [event["message"] for event in current.events if event["what"] == "message"]
            self.last_said = [{**message, "scheduler_step": current.scheduler_step} for message in said]

    def note(self, what: str, *copies: Copy | None, **facts: Any) -> None:
        """Something that happened in the current round, with the tensors that show it."""
        current = self.round or self._current()
        facts["what"], facts["pieces"] = what, current.hold(copies)
        current.events.append(facts)

    def replayed(self, captured: CapturedGraph, phases: tuple[str, str], facts: dict[str, Any]) -> None:
        """A graph ran: its number and where its bytes begin, for `rounds` to report each of its calls.

        phases: of what the target and what the draft did in it.
        """
        current = self.round or self._current()
        assert captured.buffer is not None
        facts["what"], facts["table"], facts["phases"] = "replay", current.layouts.table(captured), phases
        facts["base"] = current.keep(captured)
        current.events.append(facts)

    def copied(self, tensors: Tensors) -> Copy | None:
        """A copy of tensors as they are now, for `note`."""
        return copied(tensors) if self.staging is None else self.staging.copied(tensors)

    def held(self, tensors: Tensors) -> Copy | None:
        """As `copied`, of tensors that nobody writes to before the round is over (see `StagingBuffer.held`)."""
        return copied(tensors) if self.staging is None else self.staging.held(tensors)

    def before_replay(self, captured: CapturedGraph) -> None:
        """A graph is about to write to its buffer again: if the round in progress keeps that, it is copied first."""
        if captured.kept is self.round and self.staging is not None:
            self.staging.stage_held()

    def put(self, message: dict[str, Any]) -> None:
        """A message of its own, in its place among what happened in the current round."""
        self._current().events.append({"what": "message", "message": message})

    def put_before(self, message: dict[str, Any]) -> None:
        """A message of what happened between two rounds: it is told in the next one, with its number."""
        self._between.append(message)

    def map_ids(self, target_ids: np.ndarray) -> None:
        """From here on draft ids stand for these target ids."""
        if self._target_ids is not target_ids:
            self._target_ids = target_ids
            self._current().events.append({"what": "ids", "ids": target_ids.tolist()})

    def _current(self) -> Round:
        if self.round is None:
            raise RuntimeError("the probe saw a forward outside a round; its hooks do not fit this release")
        return self.round
