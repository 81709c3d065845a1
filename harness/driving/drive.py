"""Performs one scenario's script on a booted engine, step by step, and returns the engine's Trace.

It must not judge, and must return what was seen up to a crash or a hang, with an event that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cases.pairs import on_device
from harness.both_sides.mutants import MUTANTS
from harness.contract.requests import GENERATE, RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.trace import EOS, Trace
from harness.contract.usage import UserError, meant
from harness.driving.pairs import weights_of
from harness.driving.received import Received, crash_data, hang_data, lost_data, place_of, receive_from
from harness.driving.requests import end_scenario, note_rank, sampling_of, sent
from harness.engines.engine import Engine
from harness.engines.errors import EngineCrashed, EngineHung, EngineLost

#: Scheduler steps a drain may take beyond one per token: prefill chunks, idle steps, retractions.
SPARE_STEPS = 64

#: What the gate calls SGLang's own pause and continue messages.
PAUSE, RESUME = "PauseGenerationReqInput", "ContinueGenerationReqInput"

OnStep = Callable[[int, dict[str, Any]], None]


class ScriptError(UserError):
    """The script asks for something this harness cannot do."""


@dataclass(slots=True)
class _Run:
    engine: Engine
    scenario: Scenario
    on_step: OnStep
    received: Received
    announced: list[str] = field(default_factory=list)
    submitted: dict[str, None] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    #: requests that go through SGLang's own `fake` backend
    faked: set[str] = field(default_factory=set)
    #: what ends a request beside its own stop ids
    eos: tuple[int, ...] = ()
    idle: bool = False

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
                generate=sent(request, GENERATE),
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
            self.received.note("submit" if accepted else "refused", dp_rank=request.dp_rank, **data)

    def _samples(self, request: RequestSpec) -> None:
        """SGLang lets the first of them read the prompt, and sends the others when its answer has come."""
        first, *others = (one.rid for one in request.runs)
        if self.announced or not (self.idle or not self.received.steps):
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
            self.received.note("abort", **data)

    def _do_retract(self, op: Op) -> None:
        if op.rids or op.name:
            self.engine.retract(op.rids)
            return
        self.engine.pause(mode="retract")
        self.engine.resume()
        # Both are read in one scheduler step: retracted, then going on.
        self.announced += [self._for_decode(PAUSE), self._for_decode(RESUME)]
        self.received.note("retract", reason="script")

    def _do_pause(self, op: Op) -> None:
        self.engine.pause(mode="in_place")
        self.announced.append(self._for_decode(PAUSE))
        self.received.note("pause")

    def _do_resume(self, op: Op) -> None:
        self.engine.resume()
        self.announced.append(self._for_decode(RESUME))
        self.received.note("resume")

    def _for_decode(self, message: str) -> str:
        return _to("decode", message) if self.scenario.engine.disaggregation else message

    def _do_transfer(self, op: Op) -> None:
        if op.name == "fake":
            self.faked |= set(op.rids)
        else:
            self.engine.transfer(str(op.name), op.rids)
        for rid in op.rids:
            self.received.note("transfer", rid=rid, what=op.name)

    def _do_flush(self, op: Op) -> None:
        for rank, answer in zip(self.engine.handshakes, self.engine.flush(), strict=True):
            self.received.note("flush", dp_rank=rank["dp_rank"], flushed=answer["flushed"], **self.received.of(rank))

    def _do_update(self, op: Op) -> None:
        """Nothing runs, or what runs goes back first, so that SGLang takes it at once."""
        if op.mode:
            self.engine.pause(mode=op.mode)
            self.announced.append(PAUSE)
            self.received.note("retract", reason="script")
        name = on_device(str(op.name), self.engine.handshakes[0]["device"])
        folders = weights_of(name, op.selector, source=op.source)
        self._served(self.engine.update(source=op.source, selector=op.selector, folders=folders))
        self.received.note("update", what=name, selector=op.selector, **self.engine.updated())
        if op.mode:
            self._do_resume(op)

    def _do_memory(self, op: Op) -> None:
        self._served(self.engine.memory(str(op.name)))
        self.received.note("memory", what=op.name, **self.engine.updated())

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
        limit = self.received.scheduler_step + SPARE_STEPS + tokens
        while self.announced or not self.idle:
            if self.received.scheduler_step >= limit:
                raise EngineHung(
                    {
                        "dp_rank": 0,
                        "seconds": 0.0,
                        "what": f"not drained after {self.received.scheduler_step} scheduler steps",
                    }
                )
            self._step()

    def _step(self) -> None:
        expect, self.announced = self.announced, []
        self.received.steps += 1
        reports = self.engine.step(expect=expect, meanwhile=self.received.read)
        for report in reports:
            self.received.turn(report)
        self.idle = all(report.state["idle"] for report in reports)
        self.on_step(self.received.scheduler_step, reports[-1].state)
        self.received.scheduler_step += 1


def _to(side: str | None, message: str) -> str:
    """A message for one side of a pair of engines, or for all there is."""
    return f"{side}/{message}" if side else message


def drive(
    engine: Engine, scenario: Scenario, *, record: bool = True, on_step: OnStep = lambda _scheduler_step, _state: None
) -> Trace:
    """Run the script; what ends it early is an event of the trace ('crash', 'hang', or 'lost' where somebody ended it).

    Raises EngineError if the engine refuses a command, ScriptError for an op it cannot perform.
    """
    header, settings = dict(engine.handshakes[0]), scenario.engine
    received = receive_from(engine.handshakes)
    run = _Run(engine=engine, scenario=scenario, on_step=on_step, received=received, eos=tuple(header.get(EOS, ())))
    try:
        answers = engine.begin(chunk=settings.chunked_prefill_size, running_limit=settings.running_limit, record=record)
        for rank, began in zip(engine.handshakes, answers, strict=True):
            note_rank(received, rank, began, when="start")
        for op in scenario.script:
            run.perform(op)
        end_scenario(engine, scenario, received, submitted=run.submitted)
    except EngineCrashed as error:
        received.bring(partial(list, error.messages), place_of(error.report))
        received.note("crash", **crash_data(error.report))
    except EngineLost as error:
        received.note("lost", **lost_data(error.report))
    except EngineHung as error:
        received.read()
        received.note("hang", **hang_data(error.report, received.assembler.rounds))
    if run.faults:
        header["faults"] = run.faults
    received.read()
    return received.trace(scenario, header=header)
