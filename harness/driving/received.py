"""What an engine's ranks reported over a drive: read while the engine takes its next steps, and made into a trace."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.contract.scenario import Scenario
from harness.contract.trace import Event, RoundRecord, Trace
from harness.driving.assemble import Arrays, Assembler
from harness.driving.rounds import Unpacker
from harness.driving.row_arrays import Misfit
from harness.driving.tensor_ranks import compared
from harness.engines.errors import Messages
from harness.engines.side import StepReport

#: side ("" where there is only one), dp_rank, tp_rank
Place = tuple[str, int, int]


@dataclass(slots=True, kw_only=True)
class Received:
    """steps: that were asked for. scheduler_step: the scenario's own count of them."""

    #: of the TP ranks beside the first of a DP rank: what each reported
    others: dict[Place, Assembler]
    assembler: Assembler = field(default_factory=Assembler)
    steps: int = 0
    scheduler_step: int = 0
    #: what steps brought and was not read yet, with the rank it is of and the step that brought it
    _unread: deque[tuple[Callable[[], Messages], Place, int]] = field(default_factory=deque)
    #: events, and where each belongs: (step, 0 for what the step before it brought, 1 for what was done and seen since)
    _events: list[tuple[tuple[int, int], Event]] = field(default_factory=list)
    #: the scenario's scheduler step of each step a side counted
    _scheduler_steps: dict[tuple[str, int], int] = field(default_factory=dict)
    _unpackers: dict[Place, Unpacker] = field(default_factory=lambda: defaultdict(Unpacker))
    _reading: Iterator[bool] | None = None

    def note(self, name: str, *, dp_rank: int = 0, **data: Any) -> None:
        self._events.append(
            ((self.steps, 1), Event(name=name, scheduler_step=self.scheduler_step, dp_rank=dp_rank, data=data))
        )

    def turn(self, report: StepReport) -> None:
        """What one rank reports of one scheduler step."""
        self._scheduler_steps[(report.side, report.number)] = self.scheduler_step
        place = report.side, report.dp_rank, report.tp_rank
        self.bring(report.messages, place)
        side = {"side": report.side} if report.side else {}
        taken_back = report.state.pop("taken_back", ())
        if place not in self.others:
            self.note("turn", dp_rank=report.dp_rank, **report.state, **side)
            for one in taken_back:
                self.note("retract", dp_rank=report.dp_rank, **one, **side)

    def bring(self, messages: Callable[[], Messages], place: Place) -> None:
        """To be read while the engine takes a later step."""
        self._unread.append((messages, place, self.steps))

    def read(self, answered: Callable[[], bool] = lambda: False) -> None:
        """Assemble what was brought, until the engine has answered: whoever reads on then keeps it waiting."""
        self._reading = self._reading or self._reader()
        while next(self._reading) and not answered():
            """Read on."""

    def _reader(self) -> Iterator[bool]:
        """One message after the other; False whenever nothing is left."""
        while True:
            while self._unread:
                yield from self._read_one(*self._unread.popleft())
            yield False

    def _read_one(self, messages: Callable[[], Messages], place: Place, brought: int) -> Iterator[bool]:
        """Of a batch whose rows do not fit together, what came before is kept, and what the rest was is not guessed."""
        for packed, held in messages():
            try:
                yield from self._read_packed(packed, held, place, brought)
            except Misfit as error:
                self.note("misfit", dp_rank=place[1], round=packed.get("index", -1), why=str(error))

    def _read_packed(self, packed: dict[str, Any], held: Arrays, place: Place, brought: int) -> Iterator[bool]:
        """A round is of the step it ran in, however late it arrives; events keep their order, however late read."""
        side, dp_rank, tp_rank = place
        assembler = self.others.get(place, self.assembler)
        scheduler_step = self._scheduler_steps.get((side, packed.get("scheduler_step", -1)), self.scheduler_step)
        for message, arrays in self._unpackers[place].unpack(packed, held):
            assembler.feed(message, arrays, scheduler_step=scheduler_step, dp_rank=dp_rank, tp_rank=tp_rank, side=side)
            if assembler is self.assembler:
                self._events += [((brought + 1, 0), event) for event in assembler.events]
                assembler.events.clear()
            yield True

    def trace(self, scenario: Scenario, *, header: dict[str, Any]) -> Trace:
        """Everything that was done, seen and read."""
        self.assembler.events = [event for _, event in sorted(self._events, key=lambda one: one[0])]
        trace = self.assembler.build(scenario_id=scenario.id, header=header)
        beside = {place[1:]: assembler for place, assembler in self.others.items()}
        others = {ranks: assembler.build(scenario_id=scenario.id, header=header) for ranks, assembler in beside.items()}
        return replace(trace, events=(*trace.events, *compared(trace, others)))

    def of(self, handshake: Mapping[str, Any]) -> dict[str, Any]:
        """What events say of where they come from: the side of a pair, the TP rank beside the first of its DP rank."""
        place = place_of(handshake)
        return side_of(handshake) | ({"tp_rank": place[2]} if place in self.others else {})


def receive_from(handshakes: Iterable[Mapping[str, Any]]) -> Received:
    """For one drive of an engine with these ranks."""
    places = [place_of(rank) for rank in handshakes]
    second = [place for place in places if any(one[:2] == place[:2] and one < place for one in places)]
    beside = {place[1:]: Assembler() for place in second}  # of a pair of engines one for both
    return Received(others={place: beside[place[1:]] for place in second})


def place_of(report: Mapping[str, Any]) -> Place:
    """Which rank a handshake or a crash report is of."""
    return report.get("side", ""), report.get("dp_rank", 0), report.get("tp_rank", 0)


def side_of(handshake: Mapping[str, Any]) -> dict[str, str]:
    """What an event says of the side it is of; empty where there is only one."""
    return {"side": handshake["side"]} if "side" in handshake else {}


def crash_data(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "site": report.get("site", "unknown"),
        "line": report.get("line", -1),
        "error": report.get("error", ""),
        "trace": report.get("trace", ""),
        "phase": report.get("at_phase", "IDLE"),
        "round": report.get("at_round", -1),
        "step": report.get("at_step", 0),
        "rids": report.get("at_rids", []),
        "dp_rank_reported": report.get("dp_rank", 0),
        "tp_rank": report.get("tp_rank", 0),
        **{name: report[name] for name in ("lacks", "unbuilt") if name in report},
        **side_of(report),
    }


def lost_data(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": report["what"],
        "phase": report.get("at_phase", "IDLE"),
        "round": report.get("at_round", -1),
        "dp_rank_reported": report.get("dp_rank", 0),
        **side_of(report),
    }


def hang_data(report: dict[str, Any], rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """As for a crash: where the stuck rank was, and where every other one.

    Of a rank that is silent: the last forward of the last batch that it reported.
    """
    rank = report.get("dp_rank", 0)
    reported = [record for record in rounds if record.dp_rank == rank and record.forwards]
    last = {"phase": list(reported[-1].forwards)[-1], "round": reported[-1].index} if reported else {}
    known = {"phase": report.get("at_phase"), "round": report.get("at_round"), "step": report.get("at_step")}
    found = {name: value for name, value in known.items() if value is not None}
    return {**report, **last, **found, "dp_rank_reported": rank}
