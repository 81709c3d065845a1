"""Performs one scenario's script on a booted engine, step by step, and returns the engine's Trace.

It must not judge, and must return what was seen up to a crash or a hang, with an event that says so.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cases.checkpoints import on_device
from harness.both_sides.mutants import MUTANTS
from harness.contract.answers import RETURNED, flat_states
from harness.contract.requests import GENERATE, SAMPLING, RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.trace import EOS, Event, RequestEnd, RoundRecord, Trace
from harness.contract.usage import UserError, meant
from harness.driving.assemble import Arrays, Assembler
from harness.driving.rounds import Unpacker
from harness.driving.row_arrays import Misfit
from harness.driving.tensor_ranks import compared
from harness.driving.tiny_pairs import weights_of
from harness.engines.engine import Engine
from harness.engines.errors import EngineCrashed, EngineHung, EngineLost, Messages

#: Scheduler steps a drain may take beyond one per token: prefill chunks, idle steps, retractions.
SPARE_STEPS = 64

#: What the gate calls SGLang's own pause and continue messages.
PAUSE, RESUME = "PauseGenerationReqInput", "ContinueGenerationReqInput"

#: What is kept of SGLang's `meta_info`, beside `spec_…` and log-probabilities.
SAID = (
    *("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "dp_rank"),
    *("num_retractions", "weight_version"),
)

OnStep = Callable[[int, dict[str, Any]], None]
#: side ("" where there is only one), dp_rank, tp_rank
Place = tuple[str, int, int]


class ScriptError(UserError):
    """The script asks for something this harness cannot do."""


@dataclass(slots=True)
class _Run:
    engine: Engine
    scenario: Scenario
    on_step: OnStep
    assembler: Assembler = field(default_factory=Assembler)
    #: of the TP ranks beside the first of a DP rank: what each reported
    others: dict[Place, Assembler] = field(default_factory=dict)
    scheduler_step: int = 0
    announced: list[str] = field(default_factory=list)
    submitted: dict[str, None] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    #: requests that go through SGLang's own `fake` backend
    faked: set[str] = field(default_factory=set)
    #: what ends a request beside its own stop ids
    eos: tuple[int, ...] = ()
    idle: bool = False
    #: scheduler steps that were asked for
    steps: int = 0
    #: what steps brought and was not read yet, with the rank it is of and the step that brought it
    unread: deque[tuple[Callable[[], Messages], Place, int]] = field(default_factory=deque)
    #: events, and where each belongs: (step, 0 for what the step before it brought, 1 for what was done and seen since)
    events: list[tuple[tuple[int, int], Event]] = field(default_factory=list)
    #: the scenario's scheduler step of each step a side counted
    scheduler_steps: dict[tuple[str, int], int] = field(default_factory=dict)
    unpackers: dict[Place, Unpacker] = field(default_factory=lambda: defaultdict(Unpacker))
    _reading: Iterator[bool] | None = None

    def note(self, name: str, *, dp_rank: int = 0, **data: Any) -> None:
        self.events.append(
            ((self.steps, 1), Event(name=name, scheduler_step=self.scheduler_step, dp_rank=dp_rank, data=data))
        )

    def perform(self, op: Op) -> None:
        action = getattr(self, f"_do_{op.kind}", None)
        if action is None:
            raise ScriptError(
                f"scenario {self.scenario.name!r}: op {op.kind!r} cannot be performed by this version; "
                "allowed: submit, step, abort, retract, pause, resume, flush, update, memory, transfer, mutant, drain"
            )
        action(op)

    def _do_submit(self, op: Op) -> None:
        for rid in op.rids:
            request = self.scenario.request(rid)
            accepted = self.engine.submit(
                rid=rid,
                prompt=list(request.input_ids),
                sampling=sampling_of(request, self.eos),
                generate=_sent(request, GENERATE),
                priority=request.priority,
                dp_rank=request.dp_rank,
                side=op.name or "",
                **({"fake": True} if rid in self.faked else {}),
            )
            self.submitted[rid] = None
            if accepted and request.n > 1:
                self._samples(request)
            elif accepted:
                self.announced.append(_to(op.name, rid))
            data: dict[str, Any] = {"rid": rid} | ({"side": op.name} if op.name else {})
            self.note("submit" if accepted else "refused", dp_rank=request.dp_rank, **data)

    def _samples(self, request: RequestSpec) -> None:
        """SGLang lets the first of them read the prompt, and sends the others when its answer has come."""
        first, *others = (one.rid for one in request.runs)
        if self.announced or not (self.idle or not self.steps):
            raise ScriptError(
                f"scenario {self.scenario.name!r}: request {request.rid!r} has n {request.n}, and is submitted beside "
                "others\n  allowed: where nothing else is alive; put enough steps before it"
            )
        self.announced.append(first)
        for _ in range(SPARE_STEPS + len(request.input_ids)):
            self._step()
            if self.idle:
                break
        self.announced += others

    def _do_abort(self, op: Op) -> None:
        for rid in op.rids:
            self.engine.abort(rid, side=op.name or "")
            self.announced.append(_to(op.name, f"abort:{rid}"))
            data: dict[str, Any] = {"rid": rid} | ({"side": op.name} if op.name else {})
            self.note("abort", **data)

    def _do_retract(self, op: Op) -> None:
        if op.rids or op.name:
            self.engine.retract(op.rids)
            return
        self.engine.pause(mode="retract")
        self.engine.resume()
        # Both are read in one scheduler step: retracted, then going on.
        self.announced += [self._for_decode(PAUSE), self._for_decode(RESUME)]
        self.note("retract", reason="script")

    def _do_pause(self, op: Op) -> None:
        self.engine.pause(mode="in_place")
        self.announced.append(self._for_decode(PAUSE))
        self.note("pause")

    def _do_resume(self, op: Op) -> None:
        self.engine.resume()
        self.announced.append(self._for_decode(RESUME))
        self.note("resume")

    def _for_decode(self, message: str) -> str:
        return _to("decode", message) if self.scenario.engine.disaggregation else message

    def _do_transfer(self, op: Op) -> None:
        if op.name == "fake":
            self.faked |= set(op.rids)
        else:
            self.engine.transfer(str(op.name), op.rids)
        for rid in op.rids:
            self.note("transfer", rid=rid, what=op.name)

    def _do_flush(self, op: Op) -> None:
        for rank, answer in zip(self.engine.handshakes, self.engine.flush(), strict=True):
            self.note("flush", dp_rank=rank["dp_rank"], flushed=answer["flushed"], **self.of(rank))

    def _do_update(self, op: Op) -> None:
        """Nothing runs, or what runs goes back first, so that SGLang takes it at once."""
        if op.mode:
            self.engine.pause(mode=op.mode)
            self.announced.append(PAUSE)
            self.note("retract", reason="script")
        name = on_device(str(op.name), self.engine.handshakes[0]["device"])
        folders = weights_of(name, op.selector, source=op.source)
        self._served(self.engine.update(source=op.source, selector=op.selector, folders=folders))
        self.note("update", what=name, selector=op.selector, **self.engine.updated())
        if op.mode:
            self._do_resume(op)

    def _do_memory(self, op: Op) -> None:
        self._served(self.engine.memory(str(op.name)))
        self.note("memory", what=op.name, **self.engine.updated())

    def _served(self, messages: Sequence[str]) -> None:
        """SGLang sends each when the one before was answered."""
        for message in messages:
            self.announced.append(message)
            self._step()

    def _do_mutant(self, op: Op) -> None:
        if op.name not in MUTANTS:
            hint = meant(str(op.name), MUTANTS) or f"; allowed: {', '.join(MUTANTS)}"
            raise ScriptError(f"scenario {self.scenario.name!r}: unknown mutant {op.name!r}{hint}")
        self.engine.fault(op.name, first=op.count)
        self.faults.append(op.name)

    def _do_step(self, op: Op) -> None:
        for _ in range(op.count):
            self._step()

    def _do_drain(self, op: Op) -> None:
        tokens = sum(len(request.input_ids) + request.max_new_tokens for request in self.scenario.requests)
        limit = self.scheduler_step + SPARE_STEPS + tokens
        while self.announced or not self.idle:
            if self.scheduler_step >= limit:
                raise EngineHung(
                    {"dp_rank": 0, "seconds": 0.0, "what": f"not drained after {self.scheduler_step} scheduler steps"}
                )
            self._step()

    def _step(self) -> None:
        expect, self.announced = self.announced, []
        self.steps += 1
        reports = self.engine.step(expect=expect, meanwhile=self.read)
        for report in reports:
            self.scheduler_steps[(report.side, report.number)] = self.scheduler_step
            place = report.side, report.dp_rank, report.tp_rank
            self.bring(report.messages, place)
            side = {"side": report.side} if report.side else {}
            taken_back = report.state.pop("taken_back", ())
            if place not in self.others:
                self.note("turn", dp_rank=report.dp_rank, **report.state, **side)
                for one in taken_back:
                    self.note("retract", dp_rank=report.dp_rank, **one, **side)
        self.idle = all(report.state["idle"] for report in reports)
        self.on_step(self.scheduler_step, reports[-1].state)
        self.scheduler_step += 1

    def bring(self, messages: Callable[[], Messages], place: Place) -> None:
        """To be read while the engine takes a later step."""
        self.unread.append((messages, place, self.steps))

    def read(self, answered: Callable[[], bool] = lambda: False) -> None:
        """Assemble what was brought, until the engine has answered: whoever reads on then keeps it waiting."""
        self._reading = self._reading or self._reader()
        while next(self._reading) and not answered():
            """Read on."""

    def _reader(self) -> Iterator[bool]:
        """One message after the other; False whenever nothing is left."""
        while True:
            while self.unread:
                yield from self._read_one(*self.unread.popleft())
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
        scheduler_step = self.scheduler_steps.get((side, packed.get("scheduler_step", -1)), self.scheduler_step)
        for message, arrays in self.unpackers[place].unpack(packed, held):
            assembler.feed(message, arrays, scheduler_step=scheduler_step, dp_rank=dp_rank, tp_rank=tp_rank, side=side)
            if assembler is self.assembler:
                self.events += [((brought + 1, 0), event) for event in assembler.events]
                assembler.events.clear()
            yield True

    def trace(self, *, header: dict[str, Any]) -> Trace:
        """Everything that was done, seen and read."""
        self.assembler.events = [event for _, event in sorted(self.events, key=lambda one: one[0])]
        trace = self.assembler.build(scenario_id=self.scenario.id, header=header)
        beside = {place[1:]: assembler for place, assembler in self.others.items()}
        others = {
            ranks: assembler.build(scenario_id=self.scenario.id, header=header) for ranks, assembler in beside.items()
        }
        return replace(trace, events=(*trace.events, *compared(trace, others)))

    def of(self, handshake: dict[str, Any]) -> dict[str, Any]:
        """What events say of where they come from: the side of a pair, the TP rank beside the first of its DP rank."""
        place = _place_of(handshake)
        return _side_of(handshake) | ({"tp_rank": place[2]} if place in self.others else {})


def _to(side: str | None, message: str) -> str:
    """A message for one side of a pair of engines, or for all there is."""
    return f"{side}/{message}" if side else message


def drive(
    engine: Engine, scenario: Scenario, *, record: bool = True, on_step: OnStep = lambda _scheduler_step, _state: None
) -> Trace:
    """Run the script; what ends it early is an event of the trace ('crash', 'hang', or 'lost' where somebody ended it).

    Raises EngineError if the engine refuses a command, ScriptError for an op it cannot perform.
    """
    header = dict(engine.handshakes[0])
    places = [_place_of(rank) for rank in engine.handshakes]
    second = [place for place in places if any(one[:2] == place[:2] and one < place for one in places)]
    beside = {place[1:]: Assembler() for place in second}  # of a pair of engines one for both
    run = _Run(
        engine=engine,
        scenario=scenario,
        on_step=on_step,
        eos=tuple(header.get(EOS, ())),
        others={
            place: beside[place[1:]] for place in places if any(one[:2] == place[:2] and one < place for one in places)
        },
    )
    try:
        settings = scenario.engine
        answers = engine.begin(chunk=settings.chunked_prefill_size, running_limit=settings.running_limit, record=record)
        for rank, began in zip(engine.handshakes, answers, strict=True):
            run.note("pool", dp_rank=rank["dp_rank"], when="start", **began["pool"], **run.of(rank))
            _note_source(run, rank, began, when="start")
        for op in scenario.script:
            run.perform(op)
        _finish(run)
    except EngineCrashed as error:
        run.bring(partial(list, error.messages), _place_of(error.report))
        run.note("crash", **_crash_data(error.report))
    except EngineLost as error:
        run.note("lost", **_lost_data(error.report))
    except EngineHung as error:
        run.read()
        run.note("hang", **_hang_data(error.report, run.assembler.rounds))
    if run.faults:
        header["faults"] = run.faults
    run.read()
    return run.trace(header=header)


def _place_of(report: dict[str, Any]) -> Place:
    """Which rank a handshake or a crash report is of."""
    return report.get("side", ""), report.get("dp_rank", 0), report.get("tp_rank", 0)


def _side_of(handshake: dict[str, Any]) -> dict[str, str]:
    return {"side": handshake["side"]} if "side" in handshake else {}


def _finish(run: _Run) -> None:
    for rank, ended in zip(run.engine.handshakes, run.engine.end(), strict=True):
        run.bring(partial(list, ended["messages"]), _place_of(rank))
        run.note("pool", dp_rank=rank["dp_rank"], when="end", **ended["pool"], **run.of(rank))
        _note_source(run, rank, ended, when="end")
        if "spent" in ended:
            run.note("spent", dp_rank=rank["dp_rank"], spent=ended["spent"], **run.of(rank))
        for name, fired in ended["fired"].items():
            run.note("fault", dp_rank=rank["dp_rank"], mutant=name, fired=fired, **run.of(rank))
    for end in (one for all_of in run.engine.collect(list(run.submitted)) for one in _of_samples(run.scenario, all_of)):
        if end["reason"] == "error":
            run.note("request_error", rid=end["rid"], error=end["error"])
        if end.get("text") is not None:
            run.note("text", rid=end["rid"], text=end["text"], matched=end["matched"])
        run.assembler.ends.append(
            RequestEnd(
                rid=end["rid"],
                scheduler_step=run.scheduler_step,
                reason=end["reason"],
                output_ids=tuple(end["output_ids"]),
                cached_tokens=end["cached_tokens"],
            )
        )
        if "meta" in end:
            _note_answer(run, end["rid"], end["meta"], end["pieces"])


def _of_samples(scenario: Scenario, end: dict[str, Any]) -> list[dict[str, Any]]:
    """An end; what SGLang answers a request of several samples as a whole, an error, is the end of each."""
    request = next((one for one in scenario.requests if one.rid == end["rid"]), None)
    return [end] if request is None else [{**end, "rid": one.rid} for one in request.runs]


def _note_answer(run: _Run, rid: str, meta: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    """Hidden states are kept as a tensor, once: a piece says again what those before it said. Times and ids of this
    engine are left out: equal runs are equal."""
    states = meta.get("hidden_states")
    pieces = [{**piece, "meta": _repeatable(piece["meta"])} for piece in pieces]
    meta = _repeatable(meta)
    run.assembler.keep(f"{RETURNED}{rid}", flat_states(states or ()))
    run.note("answer", rid=rid, meta=meta, pieces=pieces)


def _repeatable(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in meta.items() if name in SAID or name.startswith("spec_") or "logprobs" in name
    }


def _note_source(run: _Run, rank: dict[str, Any], said: dict[str, Any], *, when: str) -> None:
    """What a boot that follows lines of SGLang's source said of them (see engine_side.host.source_swap)."""
    if "source" in said:
        run.note("source", dp_rank=rank["dp_rank"], when=when, **said["source"], **run.of(rank))


def _crash_data(report: dict[str, Any]) -> dict[str, Any]:
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
        **({"lacks": report["lacks"]} if "lacks" in report else {}),
        **_side_of(report),
    }


def _lost_data(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": report["what"],
        "phase": report.get("at_phase", "IDLE"),
        "round": report.get("at_round", -1),
        "dp_rank_reported": report.get("dp_rank", 0),
        **_side_of(report),
    }


def _hang_data(report: dict[str, Any], rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """As for a crash: where the stuck rank was, and where every other one.

    Of a rank that is silent: the last forward of the last batch that it reported.
    """
    rank = report.get("dp_rank", 0)
    reported = [record for record in rounds if record.dp_rank == rank and record.forwards]
    last = {"phase": list(reported[-1].forwards)[-1], "round": reported[-1].index} if reported else {}
    known = {"phase": report.get("at_phase"), "round": report.get("at_round"), "step": report.get("at_step")}
    found = {name: value for name, value in known.items() if value is not None}
    return {**report, **last, **found, "dp_rank_reported": rank}


def sampling_of(request: RequestSpec, eos: Sequence[int] = ()) -> dict[str, Any]:
    """SGLang sampling parameters of a request; without `eos` that of the checkpoint is ignored."""
    return {
        "temperature": request.temperature,
        "max_new_tokens": None if request.unlimited else request.max_new_tokens,
        "ignore_eos": request.ignore_eos or not (request.stop_token_ids or eos),
        **_sent(request, SAMPLING),
    }


def _sent(request: RequestSpec, keys: Sequence[str]) -> dict[str, Any]:
    """Those of the keys that it asks for, as JSON has them."""
    return request.model_dump(mode="json", include=set(keys) & set(request.asked))
