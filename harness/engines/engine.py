"""A booted engine as its driver sees it: `boot`, then `begin`, `submit`, `step`, `collect`, `end`, and always `close`.

An engine has one side, or two: a prefill side and a decode side, which hand requests over. Whoever drives need not
know. It must never import sglang, and must never decide whether what the engine did was right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.engines import temporary_folders
from harness.engines.errors import EngineCrashed, EngineHung, EngineLost, EngineNotClean, Frame
from harness.engines.process import Launch, Progress, Started, StartHost, start_host
from harness.engines.side import Meanwhile, Side, StepReport, unpacked

COLLECT_SECONDS = 15.0


@dataclass(slots=True, eq=False)
class Engine:
    """The engine of a launch. Sides take a scheduler step in order; the last one answers, and is the one that decodes.

    Messages named `prefill/NAME` or `decode/NAME` go to one of two sides only, all others to both.
    """

    launch: Launch
    log: Path
    start: StartHost = start_host
    boots_seconds: float = 0.0
    sides: tuple[Side, ...] = field(init=False)
    _scenarios: int = 0
    _rooms: dict[str, int] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __post_init__(self) -> None:
        first = Side(launch=self.launch, log=self.log, start=self.start)
        beside = self.launch.beside
        other = self.log.with_stem(f"{self.log.stem}-decode")
        self.sides = (first,) if beside is None else (first, Side(launch=beside, log=other, start=self.start))

    @property
    def process(self) -> Started | None:
        """The process that ended first, if one did; all have to live."""
        ended = [side.process for side in self.sides if side.process is None or side.process.poll() is not None]
        return ended[0] if ended else self.sides[-1].process

    @property
    def lease(self) -> dict[str, Any]:
        """The share of a GPU it holds; empty without one (see harness.both_sides.leases)."""
        return self.sides[-1].lease

    @property
    def handshakes(self) -> list[dict[str, Any]]:
        """The probe handshake of every rank, side by side, by (dp_rank, tp_rank), and the share of a GPU they run on.

        Of two sides the first handshake also says what is missing or replaced on either.
        """
        lease = [{"lease": side.lease} if side.lease else {} for side in self.sides]
        found = [{**peer.hello, **lease[i]} for i, side in enumerate(self.sides) for peer in side.ranks]
        if len(self.sides) == 1:
            return found
        for name in ("hooks_missing", "replaced"):
            items = [item for hello in found for item in hello.get(name) or ()]
            found[0][name] = [item for i, item in enumerate(items) if item not in items[:i]]
        found[0] |= {"component": found[-1]["component"]} if "component" in found[-1] else {}
        found[0]["graphs"] = found[-1].get("graphs", {})  # prompts never run in one
        found[0]["metadata_widths"] = {hello["side"]: hello.get("metadata_width", -1) for hello in found}
        return found

    def boot(self, *, progress: Progress = lambda _text: None) -> None:
        """Boot all sides at once; EngineError where one would not, and then none is left. Progress is the last side's.

        NoLease when the launch asks for a share of a GPU and there is none. Waiting for one is no part of the boot.
        """
        *others, last = self.sides
        try:
            if others:
                self._share_a_folder()
            with ThreadPoolExecutor(max_workers=1) as beside:
                booting = [beside.submit(side.boot) for side in others]
                try:
                    last.boot(lambda text: progress(f"two sides {text}") if others else progress(text))
                    for one in booting:
                        one.result()
                except BaseException:
                    for side in others:
                        side.close()  # or the pool would wait for its boot
                    raise
        except BaseException:
            self.close()
            raise
        self.boots_seconds = max(side.boot_seconds for side in self.sides)

    def _share_a_folder(self) -> None:
        """What is handed over goes through it (see harness.engine_side.transfer_backend.files)."""
        self._folder = temporary_folders.TemporaryFolder("handoff-")
        for side in self.sides:
            handoff = {**side.launch.boot["handoff"], "folder": self._folder.name}
            side.launch = replace(side.launch, boot={**side.launch.boot, "handoff": handoff})

    def begin(
        self, *, chunk: int | None, running_limit: int | None = None, record: bool = True
    ) -> list[dict[str, Any]]:
        """Flush caches, apply the scenario's settings and arm (or disarm) the recorders; one answer a rank.

        running_limit: of the side that decodes. Raises EngineNotClean if SGLang will not flush: something of the last
        scenario is still alive.
        """
        self._scenarios += 1
        self._rooms = {}
        answers = []
        for side in self.sides:
            if side.exits is not None:
                side.exits.mark()
            limit = running_limit if side is self.sides[-1] else None
            command = {"op": "begin", "chunk": chunk, "running_limit": limit, "record": record}
            answers += [answer for answer, _ in side.ask_ranks(command)]
        if not all(answer["flushed"] for answer in answers):
            raise EngineNotClean("SGLang would not flush its caches: something of the previous scenario is still alive")
        return answers

    def _ask_ranks(self, command: dict[str, Any]) -> list[Frame]:
        return [frame for side in self.sides for frame in side.ask_ranks(command)]

    def flush(self) -> list[dict[str, Any]]:
        """Empty the prefix cache between two steps; one answer a rank, `flushed` false while requests are alive."""
        return [answer for answer, _ in self._ask_ranks({"op": "flush"})]

    def fault(self, name: str, *, first: int = 1) -> None:
        """Arm a mutant on every rank until the next `begin`, from the first-th batch of the scenario on."""
        self._ask_ranks({"op": "mutant", "name": name, "first": first})

    def swap(self, files: Mapping[str, Path] = MappingProxyType({})) -> int:
        """SGLang's modules as in these files until the next call, every other as it is: functions that changed.

        On the rank, and of the module, with most and fewest. EngineError where it cannot be (see
        engine_side.host.source_swap).
        """
        answers = self._ask_ranks({"op": "swap", "files": {module: str(file) for module, file in files.items()}})
        return max(int(answer["functions"]) for answer, _ in answers)

    def retract(self, rids: Iterable[str]) -> None:
        """At the next batch that would decode, SGLang takes these back, as when its pool runs out; none: its switch."""
        self._ask_ranks({"op": "retract", "rids": list(rids)})

    def transfer(self, what: str, rids: Iterable[str]) -> None:
        """What is to become of the hand-overs of these requests (see harness.engine_side.transfer_backend.files)."""
        self._ask_ranks({"op": "transfer", "what": what, "rooms": [self._room(rid) for rid in rids]})

    def end(self) -> list[dict[str, Any]]:
        """Disarm the recorders, read the pool levels and what was not reported yet; one answer a rank."""
        return [{**answer, "messages": unpacked(arrays)} for answer, arrays in self._ask_ranks({"op": "end"})]

    def submit(
        self,
        *,
        rid: str,
        prompt: list[int],
        sampling: dict[str, Any],
        priority: int | None = None,
        dp_rank: int = 0,
        side: str = "",
        fake: bool = False,
        generate: Mapping[str, Any] = MappingProxyType({}),
    ) -> bool:
        """Hand a request to all sides, or to the named one; it is delivered at the step that expects it.

        False if one of them refused it. dp_rank: of the side that has several. fake: through SGLang's own transfer
        backend that moves nothing. generate: what SGLang's `generate` is given beside the sampling parameters.
        """
        command: dict[str, Any] = {
            "op": "submit",
            "rid": self._tagged(rid),
            "prompt": prompt,
            "sampling": sampling,
            "generate": dict(generate),
            "priority": priority,
            "fake": fake,
            "room": self._room(rid) if len(self.sides) > 1 else None,
        }
        refused = []
        for one in self._chosen(side):
            several = len(one.ranks) > 1
            one.routes[rid] = dp_rank if several else 0
            refused.append(one.ask_host({**command, "dp_rank": dp_rank if several else None})["refused"])
        return not any(refused)  # after all were asked

    def _chosen(self, name: str) -> list[Side]:
        return [side for side in self.sides if name in ("", side.name) or len(self.sides) == 1]

    def _room(self, rid: str) -> int:
        """Where sides meet over a request: a number of its own, and never 0, which SGLang reads as nothing yet."""
        return self._rooms.setdefault(rid, self._scenarios * 1000 + len(self._rooms) + 1)

    def _tagged(self, rid: str) -> str:
        """Unique for the life of the engine; the engine side strips it again (see recorder.plain_rid)."""
        return f"{rid}@{self._scenarios}"

    def abort(self, rid: str, *, side: str = "") -> None:
        for one in self._chosen(side):
            one.ask_host({"op": "abort", "rid": self._tagged(rid)})

    def pause(self, *, mode: str) -> None:
        """SGLang's own pause: 'in_place' or 'retract'; read at the next step of the side that decodes."""
        self.sides[-1].ask_host({"op": "pause", "mode": mode})

    def resume(self) -> None:
        self.sides[-1].ask_host({"op": "resume"})

    def update(self, *, source: str, selector: str, folders: Sequence[Path]) -> list[str]:
        """New weights, of the one folder from disk or of all as tensors: the messages, one for each of the next steps.

        `updated` says what came of it. EngineError for what the release cannot be asked for.
        """
        files = [str(file) for folder in folders for file in sorted(folder.glob("*.safetensors"))]
        command = {"op": "update", "source": source, "selector": selector, "folder": str(folders[0]), "files": files}
        answer = self.sides[-1].ask_host({**command, "ranks": self.launch.ranks})
        return list(answer["messages"])

    def memory(self, what: str) -> list[str]:
        """As `update`: memory is given back ('release') or taken again ('resume')."""
        return list(self.sides[-1].ask_host({"op": "memory", "what": what})["messages"])

    def updated(self) -> dict[str, Any]:
        """{'success': bool, 'message': str} of what the last steps read."""
        return {name: value for name, value in self.sides[-1].ask_host({"op": "updated"}).items() if name != "op"}

    def collect(self, rids: Iterable[str]) -> list[dict[str, Any]]:
        """The outputs of finished requests, in the order asked for, as the side that decodes answered them.

        One with n > 1 is several, `rid.1` and so on.
        """
        asked = list(rids)
        command = {"op": "collect", "rids": [self._tagged(rid) for rid in asked]}
        ends = [side.ask_host(command, seconds=COLLECT_SECONDS)["ends"] for side in self.sides][-1]
        found = list[dict[str, Any]]()
        for rid, end in zip(asked, ends, strict=True):
            samples = end.get("samples")
            numbered = [(end, rid)] if samples is None else [(one, f"{rid}.{n}") for n, one in enumerate(samples, 1)]
            found += [{**one, "rid": name} for one, name in numbered]
        return found

    def step(self, *, expect: list[str], meanwhile: Meanwhile = lambda _answered: None) -> list[StepReport]:
        """One scheduler step of every rank, side by side, delivering what was announced; EngineCrashed, EngineHung.

        meanwhile: called while a side takes its step, with what says whether it has.
        """
        reports = []
        for side in self.sides:
            with _named(side.name):
                reports += side.step([own for name in expect if (own := _own(name, side.name))], meanwhile)
        return reports

    def close(self) -> None:
        """End every side's whole process group, by the ids we started; safe to call twice."""
        with ExitStack() as left:  # in reverse, each whatever becomes of the others
            folder, self._folder = self._folder, None
            if folder is not None:
                left.callback(folder.cleanup)
            for side in self.sides:
                left.callback(side.close)


def _own(message: str, side: str) -> str:
    """A message's name as this side knows it; empty for one that the other side gets alone."""
    place, _, rest = message.partition("/")
    if not side or not rest:
        return message
    return rest if place == side else ""


@contextmanager
def _named(side: str) -> Iterator[None]:
    """An end says which of two sides came to it."""
    try:
        yield
    except (EngineCrashed, EngineHung, EngineLost) as error:
        if side:
            error.report["side"] = side
        raise
