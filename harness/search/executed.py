"""What scenarios show without a mutant: which lines of SGLang each executes, and what its verdict, rows and texts are.

It must not choose scenarios, and must not change what they run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.contract.known_issues import assumable
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.driving.live import LiveEngines
from harness.driving.results import ScenarioResult
from harness.engines.errors import EngineError
from harness.engines.process import Launch
from harness.search.operators import Ran

#: Files of the sglang package that a fault may be put into: what speculation consists of, or passes through.
PARTS = (
    "srt/speculative/",
    "srt/managers/overlap_utils.py",
    "srt/managers/schedule_batch.py",
    "srt/managers/schedule_policy.py",
    "srt/managers/scheduler",
    "srt/managers/tp_worker.py",
    "srt/managers/utils.py",
    "srt/mem_cache/",
    "srt/model_executor/",
    "srt/layers/attention/triton_backend.py",
    "srt/layers/logits_processor.py",
    "srt/layers/vocab_parallel_embedding.py",
    "srt/disaggregation/",
    "srt/models/llama_eagle",
    "srt/models/deepseek_nextn.py",
    "srt/models/mimo_v2",
    "srt/models/step3p5",
)
#: SGLang's own canary: every violation of what its KV cache holds is logged, real data included.
CANARY = {"kv_canary": "log", "kv_canary_real_data": "all"}


class Sound(BaseModel):
    """A scenario without a mutant. lines: file -> those that it executed after the boot. why: if it cannot be used.

    tokens, verifies: committed in verifies, and how many there were. rows: a digest of everything recorded, empty where
    no engine drove it. captured:
    lines that ran while its engine captured CUDA graphs. canary: whether everything recorded is the same with SGLang's
    own kv_canary; None where that was not asked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario: Scenario
    family: str
    kind: str
    seconds: float = 0.0
    tokens: int = 0
    verifies: int = 0
    rows: str = ""
    lines: dict[str, list[int]] = {}
    why: str = ""
    captured: dict[str, list[int]] = {}
    canary: bool | None = None

    def executes(self, file: str, line: int, *, captured: bool) -> bool:
        return line in (self.captured if captured else self.lines).get(file, ())


class One(BaseModel):
    """One scenario, and file -> line -> the tensors that its expressions held, after the boot and in captures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sound: Sound
    ran: Ran
    captured: Ran = {}


class Followed(BaseModel):
    """All of them, and what ran in any that can be used: in captures of CUDA graphs, and else outside of them only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sounds: tuple[Sound, ...]
    ran: Ran
    captured: Ran = {}

    @staticmethod
    def of(followed: Sequence[One]) -> Followed:
        used = [one for one in followed if not one.sound.why]
        captured = merged(one.captured for one in used)
        ran = merged(one.ran for one in used)
        outside = {
            file: {line: held for line, held in lines.items() if line not in captured.get(file, {})}
            for file, lines in ran.items()
        }
        return Followed(sounds=tuple(one.sound for one in followed), ran=outside, captured=captured)


def with_boot(launch: Launch, *, patience: float = 1.0, **asked: Any) -> Launch:
    """The launch, of both sides of a pair, with more in its boot record (see engine_side.host.executed)."""
    beside = None if launch.beside is None else with_boot(launch.beside, patience=patience, **asked)
    return replace(launch, boot={**launch.boot, **asked}, beside=beside, patience=patience)


def assume(engines: LiveEngines, scenario: Scenario) -> None:
    """What the release is known to do wrong in a scenario is no mutant's doing, and must not hide one."""
    asked = {key for request in scenario.requests for key in request.rules}
    engines.assumed = tuple(
        name
        for name, one in assumable().items()
        if one.shows_in(scenario.spec, scenario.engine, release=engines.default, device=engines.device, asked=asked)
    )


def follow(engines: LiveEngines, scenario: Scenario, family: str) -> One:
    """One scenario driven and judged, with the tensors that its lines saw."""
    assume(engines, scenario)
    launch = with_boot(engines.launch(scenario), executed=list(PARTS))
    kind = f"{launch.boot['layered']} {launch.boot['overlap']} {launch.ranks} {bool(launch.beside)}"
    sound = Sound(scenario=scenario, family=family, kind=kind)
    try:
        engines.use(launch)
        start = time.monotonic()
        trace = engines.drive(launch, scenario)
    except EngineError as error:
        return One(sound=sound.model_copy(update={"why": str(error).splitlines()[0]}), ran={})
    seconds = time.monotonic() - start
    outcome = engines.judge(scenario, trace, release=launch.boot["release"], revert=None)
    said = [event.data for event in trace.named("source") if event.data["when"] == "end"]
    tensors, captured = (merged(data[name] for data in said) for name in ("executed", "captured"))
    tokens, verifies = accepted(outcome)
    known = {
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "verifies": verifies,
        "rows": digest(trace),
        "lines": {file: sorted(found) for file, found in tensors.items()},
        "captured": {file: sorted(found) for file, found in captured.items()},
        "why": "" if outcome.passed else f"{outcome.verdict.outcome}: {'; '.join(outcome.verdict.reasons[:2])}",
    }
    return One(sound=sound.model_copy(update=known), ran=tensors, captured=captured)


def watch(engines: LiveEngines, one: One) -> One:
    """The same, and whether SGLang's own canary changes nothing that it records."""
    assume(engines, one.sound.scenario)
    launch = engines.launch(one.sound.scenario)
    launch = with_boot(launch, optional_arguments=launch.boot["optional_arguments"] | CANARY)
    try:
        same = digest(engines.drive(launch, one.sound.scenario)) == one.sound.rows
    except EngineError:
        same = False
    return one.model_copy(update={"sound": one.sound.model_copy(update={"canary": same})})


def merged(found: Iterable[dict[str, dict[Any, dict[str, list[Any]]]]]) -> Ran:
    """Lines that ran anywhere; of a tensor the largest that was seen."""
    both: Ran = {}
    for one in found:
        for file, lines in one.items():
            for line, tensors in lines.items():
                known = both.setdefault(file, {}).setdefault(int(line), {})
                known |= {name: held for name, held in tensors.items() if name not in known or known[name][1] < held[1]}
    return both


def accepted(outcome: ScenarioResult) -> tuple[int, int]:
    """(tokens committed in verifies, verifies)."""
    return sum(length * count for length, count in outcome.accepted.items()), sum(outcome.accepted.values())


def digest(trace: Trace) -> str:
    """Of every row, tensor and text of a trace, and of nothing that a clock decides."""
    made = hashlib.sha256()
    rows = trace.rows
    for columns in (rows.ints, rows.floats, trace.tensors):
        for name in sorted(columns):
            made.update(name.encode() + columns[name].tobytes())
    for name, ragged in sorted(rows.lists.items()):
        made.update(name.encode() + ragged.values.tobytes() + ragged.offsets.tobytes())
    made.update(repr([list(rows.strings[name]) for name in sorted(rows.strings)]).encode())
    made.update(repr([(end.rid, end.reason, end.output_ids) for end in trace.ends]).encode())
    return made.hexdigest()[:16]


def usable(sounds: Sequence[Sound], file: str, line: int, *, captured: bool = False) -> list[Sound]:
    """Scenarios that pass and execute the line: the quickest first, then those of its boot, then boot by boot."""
    ran = (one for one in sounds if not one.why and one.executes(file, line, captured=captured))
    found = sorted(ran, key=lambda one: one.seconds)
    boots: dict[str, int] = {}
    for one in found:
        boots.setdefault(one.scenario.boot_key(), len(boots))
    first = found[0].kind if found else ""
    return sorted(found, key=lambda one: (one.kind != first, boots[one.scenario.boot_key()]))
