"""Asks mutants of SGLang's source: the quickest scenarios that execute the line, then others, then generated ones.

Each runs in a scheduler that was forked for it or for another one, whose functions of one file are replaced (see
engine_side.host.source_swap). After a mutant that changed anything, the engine is used again only if an unmutated
scenario gives every row bit by bit. It must not draw mutants, and must not loosen anything for one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases.families import FAMILIES
from cases.generation import generate
from harness.checks.ranks import lost_by
from harness.contract.known_issues import assumable
from harness.contract.scenario import Scenario
from harness.contract.trace import ENDS, Trace
from harness.contract.types import Divergence, Outcome
from harness.driving.adapt import refusal
from harness.driving.drive import drive
from harness.driving.live import LiveEngines
from harness.driving.progress import ScenarioResult
from harness.engines.engine import Engine
from harness.engines.errors import DEFECT, EngineError, EngineNotClean
from harness.engines.process import Launch
from harness.search.executed import Sound, accepted, digest, usable, with_boot
from harness.search.fates import Asked, End, Fate

#: A share of the usual deadlines: 36 s for a step, 90 s for a boot.
PATIENCE = 0.3
#: Followed scenarios of a mutant's first boot configuration, and of one of each other family; and fixed ones of the
#: first that were not followed.
FIRST, OTHERS, MORE = 2, 1, 4
#: SGLang's own canary: every violation of what its KV cache holds is logged, real data included.
CANARY = {"kv_canary": "log", "kv_canary_real_data": "all"}
ALARM = "kv_canary violation:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Scenarios of one boot configuration that a mutant is asked in, in this order until one shows it."""

    mutant: Asked
    stage: str
    scenarios: tuple[Scenario, ...]
    before: Fate | None = None

    def after(self, fate: Fate | None) -> Task | None:
        """What is left of it, with what is known of the mutant by now; None where nothing is."""
        asked = () if fate is None else fate.asked
        left = tuple(one for one in self.scenarios if one.name not in asked)
        if not left or (fate is not None and fate.end not in (End.SURVIVED, End.UNKNOWN)):
            return None
        return Task(mutant=self.mutant, stage=self.stage, scenarios=left, before=fate)


def rounds(
    mutants: Sequence[Asked], sounds: Sequence[Sound], *, release: str, examples: int, seed: int
) -> Iterator[list[Task]]:
    """Tasks that one engine can do one after the other, cheap ones first; what nothing executes has none."""
    followed, more, generated = list[tuple[str, Task]](), list[tuple[str, Task]](), list[tuple[str, Task]]()
    known = {one.scenario.id for one in sounds}
    for mutant in mutants:
        boots = _a_family(usable(sounds, mutant.file, mutant.line))
        for number, (boot, ran) in enumerate(boots.items()):
            chosen = tuple(one.scenario for one in ran[: FIRST if number == 0 else OTHERS])
            followed.append((boot, Task(mutant=mutant, stage="family" if number else "line", scenarios=chosen)))
        for boot, ran in list(boots.items())[:1]:
            fixed = [one for one in FAMILIES[ran[0].family].scenarios if one.boot_key() == boot and one.id not in known]
            fixed = [one for one in fixed if not refusal(one, version=release, device="cpu")][:MORE]
            more.append((boot, Task(mutant=mutant, stage="family", scenarios=tuple(fixed))))
        for each in _generated(boots, release=release, examples=examples, seed=seed):
            generated.append((each[0].boot_key(), Task(mutant=mutant, stage="generated", scenarios=each)))
    for tasks in (followed, more, generated):
        # where many come first is asked first, so that what is quick kills before others are asked
        counts = Counter(boot for boot, _ in tasks)
        first = Counter(boot for boot, task in tasks if task.stage == "line")
        for boot in sorted(counts, key=lambda one: (-first[one], -counts[one])):
            yield [task for key, task in tasks if key == boot and task.scenarios]


def _a_family(ran: Sequence[Sound]) -> dict[str, list[Sound]]:
    """boot -> scenarios that execute the line: of each family the boot that does first."""
    boots: dict[str, str] = {}
    for one in ran:
        boots.setdefault(one.family, one.scenario.boot_key())
    return {boot: [one for one in ran if one.scenario.boot_key() == boot] for boot in dict.fromkeys(boots.values())}


def _generated(
    boots: Mapping[str, Sequence[Sound]], *, release: str, examples: int, seed: int
) -> Iterator[tuple[Scenario, ...]]:
    """Generated scenarios on the first boot configuration, and on two of its family that no fixed set drives."""
    families = [FAMILIES[ran[0].family] for ran in boots.values()][:1]
    deviating = {key for issue in assumable().values() for key in issue.keys}  # wrong without any mutant
    every = [boot for family in families for boot in family.boots if boot.works_on(release) and not boot.deviates]
    every.sort(key=lambda boot: boot.boot_key() not in boots)
    for boot in every[:3] if examples else ():
        made = generate(boot, count=-(-examples // 3), seed=seed)
        yield tuple(one for one in made if not any(set(request.rules) & deviating for request in one.requests))


@dataclass(slots=True, kw_only=True)
class Hunt:
    """One worker's engines, and what they are asked. package: the release's sglang; folder: for mutated files."""

    engines: LiveEngines
    package: Path
    folder: Path
    sounds: Sequence[Sound]
    release: str
    #: the mutant that may have left something behind in the engine, and the boot configuration of that engine
    _left_by: str = ""
    _boot: str = ""
    _clean: dict[str, bool] = field(default_factory=dict)
    #: boot configurations -> whether SGLang's canary is on: where it changes nothing of an unmutated scenario
    _canaries: dict[str, bool] = field(default_factory=dict)

    def ask(self, task: Task) -> Fate:
        """What becomes of its mutant."""
        found = _Found.of(task)
        source = (self.package / task.mutant.file).read_text()
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{task.mutant.id}.py"
        file.write_text(task.mutant.applied(source))
        try:
            for scenario in task.scenarios:
                self._run(found, scenario, file)
                if found.end not in (End.SURVIVED, End.UNKNOWN):
                    break
        finally:
            file.unlink()
        return found.fate()

    def _run(self, found: _Found, scenario: Scenario, file: Path) -> None:
        found.asked.append(scenario.name)
        for _ in range(2):
            boots = self.engines.boots
            try:
                engine = self._engine(scenario, found.mutant.id)
                functions = engine.swap(found.mutant.module, file)
            except EngineError as error:
                self.engines.close()
                return found.say(End.ERROR, scenario, why=f"without the mutant: {error}".splitlines()[0])
            finally:
                found.boots += self.engines.boots - boots
            if not functions:
                return found.say(End.ERROR, scenario, why="no function of the engine is of the changed line")
            logs = self._logs()
            try:
                trace = self._drive(engine, scenario)
            except EngineNotClean:  # nothing of this scenario has run yet: a new engine, not a second try
                continue
            except EngineError as error:
                return found.refused(scenario, str(error))
            if self._canaries[scenario.boot_key()]:
                alarm = any(ALARM in log.read_text(errors="replace")[size:] for log, size in logs.items())
                found.canary = bool(found.canary) or alarm
            return self._judge(found, scenario, trace)
        return found.say(End.ERROR, scenario, why="a new engine would not flush its caches")

    def _judge(self, found: _Found, scenario: Scenario, trace: Trace) -> None:
        sound = next((one for one in self.sounds if one.scenario.id == scenario.id), None)
        same = sound is not None and digest(trace) == sound.rows
        self._left_by = self._left_by if same else found.mutant.id
        try:
            outcome = self.engines.judge(scenario, trace, release=self.release, revert=None)
        except Exception as error:  # rows that nothing of ours expected: a defect of ours, and no kill
            found.say(End.ERROR, scenario, why=f"judging: {type(error).__name__}: {error}")
            return
        if outcome.verdict.outcome is Outcome.FAIL and sound is None and not self._passes(scenario, found.mutant.id):
            return  # it fails without the mutant too, and says nothing
        found.add(outcome, sound, same=same)

    def _engine(self, scenario: Scenario, mutant: str) -> Engine:
        """The live engine, if nothing that another mutant did to it is left in it; else a new one."""
        boot = scenario.boot_key()
        if boot not in self._canaries:
            self._canaries[boot] = self.watched
            self._canaries[boot] = self.watched and self._is_itself(self._launch(scenario), boot)
        left = self._left_by not in ("", mutant) and self._boot == boot and self.engines.alive()
        if left and not self._is_itself(self._launch(scenario), boot):
            self.engines.close()
        self._left_by = self._left_by if self._left_by == mutant else ""
        self._boot = boot
        return self.engines.use(self._launch(scenario))

    def _is_itself(self, launch: Launch, boot: str) -> bool:
        """Whether the engine of a boot configuration gives every row of an unmutated scenario, bit by bit."""
        own = [one for one in self.sounds if not one.why and one.scenario.boot_key() == boot]
        if not own:
            return False
        quick = min(own, key=lambda one: one.seconds)
        try:
            return digest(self._drive(self.engines.use(launch), quick.scenario)) == quick.rows
        except EngineError:
            return False

    def _drive(self, engine: Engine, scenario: Scenario) -> Trace:
        """Driven, and the engine as it was before; one that died, hung or refused is ended."""
        try:
            trace = drive(engine, scenario)
            if any(event.name in ENDS for event in trace.events):
                self.engines.close()
            else:
                engine.swap("", "")
        except BaseException:
            self.engines.close()
            raise
        return trace

    def _passes(self, scenario: Scenario, mutant: str) -> bool:
        """Whether a scenario that was not followed passes without a mutant."""
        if scenario.id not in self._clean:
            self.engines.close()
            trace = self._drive(self._engine(scenario, mutant), scenario)
            outcome = self.engines.judge(scenario, trace, release=self.release, revert=None)
            self._clean[scenario.id] = outcome.passed
        return self._clean[scenario.id]

    @property
    def watched(self) -> bool:
        """Whether the release has SGLang's own canary of its KV cache, to run beside our probe."""
        return (self.package / "srt" / "kv_canary").is_dir()

    def _launch(self, scenario: Scenario) -> Launch:
        launch = self.engines.launch(scenario)
        canary = launch.boot["optional_arguments"] | (CANARY if self._canaries[scenario.boot_key()] else {})
        return with_boot(launch, patience=PATIENCE, mutable=True, optional_arguments=canary)

    def _logs(self) -> dict[Path, int]:
        """The logs of the live engine, and how long they are by now."""
        log = self.engines.logs / self.engines.log_name.format(boot=self.engines.boots)
        return {one: len(one.read_text(errors="replace")) for one in log.parent.glob(f"{log.stem}*.log")}


@dataclass(slots=True, kw_only=True)
class _Found:
    """What is known of one mutant so far."""

    mutant: Asked
    stage: str
    end: End = End.SURVIVED
    asked: list[str] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)
    boots: int = 0
    seconds: float = 0.0
    rows: bool = False
    text: bool = False
    accepted: tuple[int, int] = (0, 0)
    sound: tuple[int, int] = (0, 0)
    canary: bool | None = None
    started: float = field(default_factory=time.monotonic)

    @staticmethod
    def of(task: Task) -> _Found:
        found, before = _Found(mutant=task.mutant, stage=task.stage), task.before
        if before is not None:
            for name in ("end", "boots", "seconds", "rows", "text", "accepted", "sound", "canary"):
                setattr(found, name, getattr(before, name))
            found.asked = list(before.asked)
            found.said = {"scenario": before.scenario, "why": before.why}
        return found

    def add(self, outcome: ScenarioResult, sound: Sound | None, *, same: bool) -> None:
        """One judged run. same: whether every row is as without the mutant."""
        self.text |= outcome.text_identical is False
        if sound is not None:
            self.rows |= not same
            self.accepted = _sum(self.accepted, accepted(outcome))
            self.sound = _sum(self.sound, (sound.tokens, sound.verifies))
        if lost := next((why for event in outcome.trace.events if (why := lost_by(event))), ""):
            self.say(End.NOT_RUN, outcome.scenario, why=lost.splitlines()[0])
        elif outcome.verdict.outcome is Outcome.FAIL:
            self.say(End.KILLED, outcome.scenario, **_first(outcome))
        elif outcome.verdict.outcome is Outcome.UNKNOWN:
            self.say(End.UNKNOWN, outcome.scenario, why="; ".join(outcome.verdict.reasons[:2]))

    def refused(self, scenario: Scenario, error: str) -> None:
        """There is no trace: what SGLang refused everybody sees; a defect of ours is not a kill."""
        line = error.splitlines()[0]
        if DEFECT in line:
            self.say(End.ERROR, scenario, why=line)
        else:
            self.say(End.KILLED, scenario, check="engine", kinds=("CRASH",), why=line)

    def say(self, end: End, scenario: Scenario, **said: Any) -> None:
        self.end, self.said = end, {"scenario": scenario.name, **said}

    def fate(self) -> Fate:
        return Fate(
            id=self.mutant.id,
            end=self.end,
            stage=self.stage,
            asked=tuple(self.asked),
            boots=self.boots,
            seconds=round(self.seconds + time.monotonic() - self.started, 1),
            rows=self.rows,
            text=self.text,
            accepted=self.accepted,
            sound=self.sound,
            canary=self.canary,
            **self.said,
        )


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _first(outcome: ScenarioResult) -> dict[str, Any]:
    """Who saw it, where, and what it is; the reasons where a crash came before every row."""
    first: Divergence | None = outcome.first
    kinds = outcome.verdict.root_kinds
    if first is None:
        return {"kinds": kinds, "why": "; ".join(outcome.verdict.reasons[:2])}
    key = first.key
    who = f"{key.rid} " if key.rid else ""
    row = f"{who}committed {key.committed}, {key.phase} step {key.step} slot {key.slot}"
    why = f"{first.observed}"[:300] if {"CRASH", "HANG"} & set(kinds) else first.hint
    return {"check": first.check, "row": row, "round": first.round, "kinds": kinds, "why": why}
