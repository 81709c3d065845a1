"""A prefill engine and a decode engine as one: both take a turn a tick, prefill first.

Control side. It offers what `harness.engines.engine.Engine` offers, so that whoever drives need not know that there
are two. It must never import sglang, and must never decide whether what the engines did was right.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.engines import scratch
from harness.engines.engine import Engine, EngineCrashed, EngineHung, EngineLost, Launch, Meanwhile, Turn

SIDES = ("prefill", "decode")


def engine_of(launch: Launch, log: Path) -> Engine | PairedEngine:
    """The engine, or pair of engines, of a launch; not booted yet."""
    return Engine(launch=launch, log=log) if launch.beside is None else PairedEngine(launch=launch, log=log)


@dataclass(slots=True)
class PairedEngine:
    """See `Engine`. Messages named `prefill/NAME` or `decode/NAME` go to one side only, all others to both."""

    launch: Launch
    log: Path
    boots_seconds: float = 0.0
    prefill: Engine = field(init=False)
    decode: Engine = field(init=False)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _rooms: dict[str, int] = field(default_factory=dict)
    _scenarios: int = 0

    def __post_init__(self) -> None:
        assert self.launch.beside is not None
        self.prefill = Engine(launch=self.launch, log=self.log)
        self.decode = Engine(launch=self.launch.beside, log=self.log.with_stem(f"{self.log.stem}-decode"))

    @property
    def sides(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process that ended first, if one did; both have to live."""
        ended = [side.process for side in self.sides if side.process is None or side.process.poll() is not None]
        return ended[0] if ended else self.decode.process

    @property
    def handshakes(self) -> list[dict[str, Any]]:
        """Both sides' handshakes; the first also says what either side misses or has replaced."""
        both = [{**hello} for side in self.sides for hello in side.handshakes]
        for name in ("hooks_missing", "replaced"):
            found = [item for hello in both for item in hello.get(name) or ()]
            both[0] = {**both[0], name: [item for i, item in enumerate(found) if item not in found[:i]]}
        both[0]["graphs"] = both[-1].get("graphs", {})  # prompts never run in one
        both[0]["metadata_widths"] = {hello["side"]: hello.get("metadata_width", -1) for hello in both}
        return both

    def boot(self, *, progress: Callable[[str], None] = lambda _text: None) -> None:
        """Boot both at once; EngineError as for one. Progress is the decode side's."""
        self._folder = scratch.make("handoff-")
        for side in self.sides:
            boot = {**side.launch.boot, "handoff": {**side.launch.boot["handoff"], "folder": self._folder.name}}
            side.launch = replace(side.launch, boot=boot)
        try:
            with ThreadPoolExecutor(max_workers=1) as beside:
                other = beside.submit(self.prefill.boot)
                try:
                    self.decode.boot(progress=lambda text: progress(f"two sides {text}"))
                except BaseException:
                    self.prefill.close()  # or the pool would wait for its boot
                    raise
                other.result()
        except BaseException:
            self.close()
            raise
        self.boots_seconds = max(side.boots_seconds for side in self.sides)

    def begin(
        self, *, chunk: int | None, running_limit: int | None = None, record: bool = True
    ) -> list[dict[str, Any]]:
        self._scenarios += 1
        self._rooms = {}
        answers = []
        for side in self.sides:
            limit = running_limit if side is self.decode else None
            answers += side.begin(chunk=chunk, running_limit=limit, record=record)
        return answers

    def flush(self) -> list[dict[str, Any]]:
        return [answer for side in self.sides for answer in side.flush()]

    def fault(self, name: str, *, first: int = 1) -> None:
        for side in self.sides:
            side.fault(name, first=first)

    def transfer(self, what: str, rids: Iterable[str]) -> None:
        """What is to become of the hand-overs of these requests (see harness.engine_side.transfer_backend.files)."""
        rooms = [self._room(rid) for rid in rids]
        for side in self.sides:
            side.transfer(what, rooms)

    def _room(self, rid: str) -> int:
        """A number that no other hand-over of these engines has, and never 0, which SGLang reads as nothing yet."""
        return self._rooms.setdefault(rid, self._scenarios * 1000 + len(self._rooms) + 1)

    def end(self) -> list[dict[str, Any]]:
        return [answer for side in self.sides for answer in side.end()]

    def submit(self, *, rid: str, side: str = "", **asked: Any) -> bool:
        """To both sides, or to one of them; False if one refused it."""
        chosen = [name for name in SIDES if side in ("", name)]
        answers = []
        for name in chosen:
            rank = {"dp_rank": 0} if name == "prefill" else {}  # the prefill side has one rank, whatever is asked for
            engine: Engine = getattr(self, name)
            answers.append(engine.submit(rid=rid, room=self._room(rid), **{**asked, **rank}))
        return all(answers)  # after all were asked

    def abort(self, rid: str, *, side: str = "") -> None:
        for name, engine in zip(SIDES, self.sides, strict=True):
            if side in ("", name):
                engine.abort(rid)

    def pause(self, *, mode: str) -> None:
        """On the decode side: the only one with requests that run for more than a turn."""
        self.decode.pause(mode=mode)

    def resume(self) -> None:
        self.decode.resume()

    def collect(self, rids: Iterable[str]) -> list[dict[str, Any]]:
        """What the decode side answered: that is what a user gets."""
        asked = list(rids)
        self.prefill.collect(asked)
        return self.decode.collect(asked)

    def turn(self, *, expect: list[str], meanwhile: Meanwhile = lambda _answered: None) -> list[Turn]:
        """One turn of the prefill side, then one of the decode side. meanwhile: called while either takes its turn."""
        return [
            turn
            for name, side in zip(SIDES, self.sides, strict=True)
            for turn in _named(name, side, [one for one in map(_own(name), expect) if one], meanwhile)
        ]

    def close(self) -> None:
        for side in self.sides:
            side.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _own(side: str) -> Callable[[str], str]:
    """A message's name as this side knows it; empty for one that the other side gets alone."""

    def name(message: str) -> str:
        place, _, rest = message.partition("/")
        return message if not rest else rest if place == side else ""

    return name


def _named(name: str, side: Engine, expect: list[str], meanwhile: Meanwhile) -> list[Turn]:
    try:
        return side.turn(expect=expect, meanwhile=meanwhile)
    except (EngineCrashed, EngineHung, EngineLost) as error:
        error.report["side"] = name
        raise
