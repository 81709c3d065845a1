"""Lockstep: holds a scheduler's own event loop where it asks for requests, one scheduler step per command.

Engine side: standard library, NumPy and SGLang's objects only. It must not replace the loop; it decides *when* the loop
may take its next step and which of the requests that really arrived over SGLang's sockets are delivered then.
"""

from __future__ import annotations

import marshal
import os
import socket
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...both_sides import wire
from ...both_sides.wire import Arrays
from ..clock import Clock
from ..hooks import Original
from ..probes.recorder import Recorder, plain_rid
from ..transfer_backend.files import RULES
from .crash_attribution import not_built, not_imported, unmade, watcher
from .executed import EXECUTED
from .retraction import Retraction, forget_retractions
from .scheduler_state import pool_level, scheduler_state
from .source_swap import SWAP

if TYPE_CHECKING:
    from ..mutants.armed import ArmedMutants
    from ..probes.host_probe import HostProbe

#: How long a request announced by the control side may take to arrive over SGLang's own sockets.
ARRIVAL_SECONDS = 30.0


class Gate:
    """Blocks the loop between steps and answers the control side's commands."""

    def __init__(self, sock: socket.socket, recorder: Recorder, scheduler: Any, clock: Clock | None = None) -> None:
        #: makes the mutants of this process, asked only if a scenario arms one; None where there is no probe
        self.make_mutants: Callable[[], ArmedMutants] | None = None
        #: of a cache behind the device's, which goes on beside the scheduler loop
        self.host: HostProbe | None = None
        self._mutants: ArmedMutants | None = None
        self.retraction = Retraction()
        self._sock, self._recorder, self.scheduler = sock, recorder, scheduler
        self._step: int | None = None
        self._arrived: dict[str, deque[Any]] = defaultdict(deque)
        self._others: list[Any] = []
        self._running_limit = 0
        self._clock = clock
        if clock is not None:
            clock.watch(self, "_report_step")

    def wrap(self, original: Original) -> Original:
        """A replacement for the method with which the loop asks for requests."""

        def recv_requests(owner: Any, *args: Any, **kwargs: Any) -> Any:
            return self._next_step(lambda: original(owner, *args, **kwargs))

        return recv_requests

    def watch_loop(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Report a crash of the event loop with its site before SGLang ends the process."""
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            self._report_crash(error)
            raise

    def _next_step(self, poll: Callable[[], Any]) -> list[Any]:
        if self.host is not None:
            self.host.settle()
        if self._step is not None:
            self._report_step()
        while True:
            try:
                command, _ = wire.receive(self._sock)
            except wire.WireClosed:
                os._exit(0)  # the control side is gone: nothing is left to serve
            if command["op"] == "step":
                self._step = self._recorder.scheduler_step = command["number"]
                return (
                    self._arrivals(command["expect"]) if command["polled"] else self._deliver(command["expect"], poll)
                )
            if command["op"] == "poll":
                wire.send(self._sock, {"op": "polled", "missing": self._poll(command["expect"], poll)})
                continue
            wire.send(self._sock, *self._answer(command))

    def _deliver(self, expect: list[str], poll: Callable[[], Any]) -> list[Any]:
        """Wait until every announced request arrived, then hand them over in the announced order."""
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while missing := self._poll(expect, poll):
            if time.monotonic() > deadline:
                what = f"announced, but SGLang's tokenizer never passed on: {', '.join(missing)}"
                wire.send(self._sock, {"op": "error", "what": what})
                break
            time.sleep(0.0005)
        return self._arrivals(expect)

    def _poll(self, expect: list[str], poll: Callable[[], Any]) -> list[str]:
        """Ask SGLang's sockets once; what of `expect` has not arrived yet.

        Where ranks ask together (DP attention), each call is a collective: the control side makes every rank poll
        equally often.
        """
        wanted = Counter(self._still_sent(expect))
        for item in poll() or []:
            name = announced_name(item)
            if name in wanted or is_sample(name):
                self._arrived[name].append(item)
            else:
                self._others.append(item)
        return [name for name, count in wanted.items() if len(self._arrived[name]) < count]

    def _arrivals(self, expect: list[str]) -> list[Any]:
        """Everything that arrived unannounced, then `expect` in its order."""
        others, self._others = self._others, []
        return others + [self._arrived[name].popleft() for name in expect if self._arrived[name]]

    def _still_sent(self, expect: list[str]) -> list[str]:
        """Without aborts of requests that are over: SGLang's tokenizer may send those or not; they do nothing."""
        state = scheduler_state(self.scheduler)
        alive = {*state["running"], *state["waiting"], *state["moving"], state["chunked"], *expect, *self._in_flight()}
        return [name for name in expect if not name.startswith("abort:") or name.removeprefix("abort:") in alive]

    def _in_flight(self) -> list[str]:
        last = self.scheduler.last_batch
        return [] if last is None else [plain_rid(req.rid) for req in last.reqs or () if not req.finished()]

    def _report_step(self) -> None:
        arrays = _together(self._recorder.take())
        report = {
            "op": "stepped",
            "number": self._step,
            "last": self._recorder.last,
            **scheduler_state(self.scheduler),
            "taken_back": self.retraction.take(),
        }
        self._step = None
        wire.send(self._sock, report, arrays, quick=True)

    def _answer(self, command: dict[str, Any]) -> tuple[dict[str, Any], wire.Held]:
        op = command["op"]
        try:
            if op == "begin":
                return {"op": "began", **self._begin(command)}, {}
            if op == "flush":
                return {"op": "flushed", "flushed": bool(self.scheduler.flush_cache())}, {}
            if op == "mutant":
                return {"op": "armed", **self._arm(command)}, {}
            if op == "swap":
                return {"op": "swapped", "functions": SWAP.to(command["files"])}, {}
            if op == "retract":
                self.retraction.ask(command["rids"])
                return {"op": "asked"}, {}
            if op == "transfer":
                RULES.apply(command["what"], command["rooms"])
                return {"op": "ruled"}, {}
            if op == "end":
                return self._end()
        except Exception as error:  # reported to the control side, which decides
            return {"op": "error", "what": f"{op}: {error!r}", "trace": traceback.format_exc(limit=4)}, {}
        return {"op": "error", "what": f"unknown command {op!r}"}, {}

    def _end(self) -> tuple[dict[str, Any], wire.Held]:
        """The scenario is over: pool levels, what mutants did, and the rounds that are still underway."""
        self._recorder.active = False
        fired = {} if self._mutants is None else self._mutants.fired()
        arrays = _together(self._recorder.take(all_of_them=True))
        said = {"pool": pool_level(self.scheduler), "fired": fired, **EXECUTED.said()}
        if self._clock is not None:
            said["spent"] = self._clock.taken()
        return {"op": "ended", **said}, arrays

    def _begin(self, command: dict[str, Any]) -> dict[str, Any]:
        """Clean slate: empty caches and pools, the scenario's chunk size, a fresh recorder."""
        scheduler = self.scheduler
        if self._mutants is not None:
            self._mutants.disarm()
        RULES.clear()
        self.retraction.ask(None)
        self.retraction.take()
        forget_retractions(scheduler)
        if self.host is not None:
            self.host.rest()
        flushed = scheduler.flush_cache()
        if self.host is not None:
            self.host.forget()
        scheduler.chunked_prefill_size = command["chunk"]
        self._limit_running(command["running_limit"] or scheduler.max_running_requests)
        self._recorder.begin()
        self._recorder.active = command["record"]
        if self._clock is not None:
            self._clock.taken()
        said = {"flushed": bool(flushed), "chunk": scheduler.chunked_prefill_size, "pool": pool_level(scheduler)}
        return {**said, **EXECUTED.said()}

    def _limit_running(self, limit: int) -> None:
        """At most `limit` requests in a batch, through SGLang's own update: max_running_requests limits nothing."""
        if limit == (self._running_limit or self.scheduler.max_running_requests):
            return
        from sglang.srt.managers.io_struct import SetInternalStateReq

        self.scheduler.set_internal_state(SetInternalStateReq(server_args={"pp_max_micro_batch_size": limit}))
        self._running_limit = limit

    def _arm(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._mutants is None:
            if self.make_mutants is None:
                raise LookupError("mutants need the probe, and this engine was booted without it")
            self._mutants = self.make_mutants()
        self._mutants.arm(command["name"], first=command["first"])
        return {"name": command["name"]}

    def _report_crash(self, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        site = next((f for f in reversed(frames) if "/sglang/" in f.filename), frames[-1])
        where = site.filename.split("/sglang/")[-1]
        report = {
            "op": "crashed",
            "site": f"{where}:{site.name}",
            "line": site.lineno,
            "when": time.monotonic(),  # one clock for all processes: which rank fell first
            "error": f"{type(error).__name__}: {error}",
            "trace": "".join(traceback.format_exception(error))[-6000:],
            **{f"at_{key}": value for key, value in self._recorder.last.items()},
        }
        if self.scheduler.server_args.device == "cpu" and (name := not_imported(error)):
            report["lacks"] = name
        if built := not_built(error):
            report["unbuilt"] = built
        if lacks := unmade(error):
            report["error"] += f" ({lacks})"
        if (
            not isinstance(error, KeyboardInterrupt) and (own := watcher(error)) is not None
        ):  # an error of ours, and no finding about SGLang
            report = {"op": "error", "what": f"our {own} failed: {report['error']}", "trace": report["trace"]}
        try:
            wire.send(self._sock, report, self._last_words())
        except (wire.WireClosed, OSError):
            pass  # the control side is gone; SGLang still logs the traceback

    def _last_words(self) -> wire.Held:
        """Rounds of the steps before the one that crashed, where the device still gives them, and what it said."""
        said: list[tuple[Any, Arrays]] = [(message, {}) for message in self._recorder.last_said]
        try:
            return _together([*self._recorder.take(all_of_them=True, before=self._recorder.scheduler_step), *said])
        except RuntimeError:
            return _together(said)


def _together(taken: list[tuple[Any, Arrays]]) -> wire.Held:
    """Messages as one more array, since whoever drives us shall read them later, and theirs as 'its number.name'."""
    if not taken:
        return {}
    found: dict[str, np.ndarray | bytes] = {"messages": marshal.dumps([message for message, _ in taken], wire.MARSHAL)}
    for i, (_, held) in enumerate(taken):
        for name, array in held.items():
            found[f"{i}.{name}"] = array
    return found


def is_sample(name: str) -> bool:
    """Whether SGLang made a request, `a.2`, of another: it sends that when it likes, and it waits to be announced."""
    return name.rpartition(".")[2].isdigit() and not name.startswith("abort:")


def announced_name(item: Any) -> str:
    """How the control side names a message: its rid for a request, `abort:<rid>` for an abort, else its type."""
    kind = type(item).__name__
    rid: Any = getattr(item, "rid", None)
    if kind == "AbortReq":
        return f"abort:{plain_rid(rid)}"
    return plain_rid(rid) if isinstance(rid, str) else kind
