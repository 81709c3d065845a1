"""Asks mutants of SGLang's source in scenarios, and says what becomes of each.

A scenario runs in a scheduler whose functions of one file are replaced (see engine_side.host.source_swap): one that
lives already, or, where the line runs while CUDA graphs are captured, one that boots with it. After a mutant that
changed anything, an engine is used again only if an unmutated scenario gives every row bit by bit. It must not draw
mutants, and must not loosen anything for one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.checks.ends import lost_by
from harness.contract.scenario import Scenario
from harness.contract.trace import ENDS, Trace
from harness.contract.types import Divergence, Kind, Outcome
from harness.driving.drive import drive
from harness.driving.live import LiveEngines
from harness.driving.results import ScenarioResult
from harness.engines.engine import Engine
from harness.engines.errors import DEFECT, EngineError, EngineNotClean, NoLease
from harness.engines.process import Launch
from harness.search.executed import CANARY, Sound, accepted, assume, digest, with_boot
from harness.search.mutant_results import Asked, Result, Status, applied, label
from harness.search.tasks import Task

#: A share of the usual deadlines: on a CPU 36 s for a step, 90 s for a boot; on a card, where many boot at once, twice
#: that.
PATIENCE = {"cpu": 0.3, "cuda": 0.6}
ALARM = "kv_canary violation:"
#: An engine that ends so had too little of a machine that many share: that says nothing of a mutant.
CROWDED = ("out of memory", "did not boot within")


@dataclass(slots=True, kw_only=True)
class MutantRunner:
    """One worker's engines, and what they are asked. package: the release's sglang; folder: for mutated files."""

    engines: LiveEngines
    package: Path
    folder: Path
    sounds: Sequence[Sound]
    release: str
    #: the mutant that may have left something behind in the engine, and the boot configuration of that engine
    _left_by: str = ""
    _boot: str = ""
    #: whether a scenario that was not followed passes without a mutant, by its id
    _clean: dict[str, bool] = field(default_factory=dict)

    def ask(self, tasks: Sequence[Task]) -> list[Result]:
        """What becomes of the mutants of tasks with the same scenarios."""
        found = [_Found.of(task) for task in tasks]
        for scenario in tasks[0].scenarios:
            self._ask_in(scenario, [one for one in found if one.known.goes_on])
        return [one.result() for one in found]

    def _ask_in(self, scenario: Scenario, found: Sequence[_Found]) -> None:
        """All at once first, where there are several: what shows nothing of all shows nothing of one."""
        if len(found) < 2:
            for one in found:
                self._run(one, scenario)
            return
        several = _Found.all_of(found)
        self._run(several, scenario)
        several.share(found)
        if not several.unseen:
            half = len(found) // 2
            self._ask_in(scenario, found[:half])
            self._ask_in(scenario, found[half:])

    def _run(self, found: _Found, scenario: Scenario) -> None:
        found.note(asked=(*found.known.asked, label(scenario)))
        if self._clean.get(scenario.id) is False:
            return
        start, boots = time.monotonic(), self.engines.boots
        assume(self.engines, scenario)
        files = self._written(found.mutants)
        try:
            self._try(found, scenario, files)
        finally:
            for file in files.values():
                file.unlink()
        found.note(
            boots=found.known.boots + self.engines.boots - boots, seconds=found.known.seconds + time.monotonic() - start
        )

    def _written(self, mutants: Sequence[Asked]) -> dict[str, Path]:
        """module -> its file with all of the mutants in it."""
        folder = self.folder.absolute()  # the engine is in another folder than we are
        folder.mkdir(parents=True, exist_ok=True)
        files = dict[str, Path]()
        for mutant in mutants:
            if mutant.module not in files:
                source = (self.package / mutant.file).read_text()
                files[mutant.module] = folder / f"{mutant.id}.py"
                files[mutant.module].write_text(applied(source, [one for one in mutants if one.file == mutant.file]))
        return files

    def _try(self, found: _Found, scenario: Scenario, files: Mapping[str, Path]) -> None:
        for _ in range(2):
            try:
                engine = self._engine(scenario, found, files)
                functions = engine.swap(files)
            except EngineError as error:
                self.engines.close()
                if not found.captured and self._sound_of(scenario) is None:
                    self._clean[scenario.id] = False
                    return None  # what nobody followed, and no engine boots for here, says nothing of a mutant
                return found.not_booted(scenario, error)
            if not functions:
                return found.say(Status.ERROR, scenario, why="no function of the engine is of the changed line")
            logs = self._logs()
            try:
                trace = self._drive(engine, scenario)
            except EngineNotClean:  # nothing of this scenario has run yet: a new engine, not a second try
                continue
            except EngineError as error:
                return found.refused(scenario, str(error))
            except Exception as error:  # as in `_judge`
                return found.say(Status.ERROR, scenario, why=f"reading: {type(error).__name__}: {error}")
            if self._watched(scenario):
                alarm = any(ALARM in log.read_text(errors="replace")[size:] for log, size in logs.items())
                found.note(canary=bool(found.known.canary) or alarm)
            return self._judge(found, scenario, trace)
        return found.refused(scenario, "a new engine would not flush its caches")

    def _judge(self, found: _Found, scenario: Scenario, trace: Trace) -> None:
        sound = self._sound_of(scenario)
        same = sound is not None and digest(trace) == sound.rows
        self._left_by = self._left_by if same else found.name
        try:
            outcome = self.engines.judge(scenario, trace, release=self.release, revert=None)
        except Exception as error:  # rows that nothing of ours expected: a defect of ours, and no kill
            found.say(Status.ERROR, scenario, why=f"judging: {type(error).__name__}: {error}")
            return
        if outcome.verdict.outcome is not Outcome.PASS and sound is None and not self._passes(scenario):
            return  # it does not pass without the mutant either, and says nothing
        found.add(outcome, sound, same=same)
        if Kind.LEAK in outcome.verdict.root_kinds:  # of a pool whose slots are wrong the next rows say nothing
            self.engines.close()

    def _engine(self, scenario: Scenario, found: _Found, files: Mapping[str, Path]) -> Engine:
        """The live engine, if nothing that another mutant did to it is left in it; else a new one."""
        boot = scenario.boot_key() + (found.name if found.captured else "")
        left = self._left_by not in ("", found.name) and self._boot == boot and self.engines.alive()
        if left and not self._is_itself(scenario):
            self.engines.close()
        self._left_by = self._left_by if self._left_by == found.name else ""
        self._boot = boot
        return self.engines.use(self._launch(scenario, files if found.captured else {}))

    def _is_itself(self, scenario: Scenario) -> bool:
        """Whether the engine of a boot configuration gives every row of an unmutated scenario, bit by bit."""
        own = [one for one in self._of(scenario) if not one.why]
        if not own:
            return False
        quick = min(own, key=lambda one: one.seconds)
        try:
            return digest(self._drive(self.engines.use(self._launch(scenario)), quick.scenario)) == quick.rows
        except EngineError:
            return False

    def _drive(self, engine: Engine, scenario: Scenario) -> Trace:
        """Driven, and the engine as it was before; one that died, hung or refused is ended."""
        try:
            trace = drive(engine, scenario)
            if any(trace.named(*ENDS)):
                self.engines.close()
            else:
                engine.swap()
        except BaseException:
            self.engines.close()
            raise
        return trace

    def _passes(self, scenario: Scenario) -> bool:
        """Whether a scenario that was not followed passes without a mutant."""
        if scenario.id not in self._clean:
            self.engines.close()
            trace = self._drive(self.engines.use(self._launch(scenario)), scenario)
            outcome = self.engines.judge(scenario, trace, release=self.release, revert=None)
            self._clean[scenario.id] = outcome.passed
        return self._clean[scenario.id]

    def _sound_of(self, scenario: Scenario) -> Sound | None:
        return next((one for one in self.sounds if one.scenario.id == scenario.id), None)

    def _of(self, scenario: Scenario) -> list[Sound]:
        """What was followed of its boot configuration."""
        return [one for one in self.sounds if one.scenario.boot_key() == scenario.boot_key()]

    def _watched(self, scenario: Scenario) -> bool:
        """Whether SGLang's own canary is on: where it changes nothing of an unmutated scenario."""
        return any(one.canary for one in self._of(scenario))

    def _launch(self, scenario: Scenario, files: Mapping[str, Path] = MappingProxyType({})) -> Launch:
        """files: what it boots with."""
        launch = self.engines.launch(scenario)
        canary = launch.boot["optional_arguments"] | (CANARY if self._watched(scenario) else {})
        asked: dict[str, Any] = {"mutable": True, "optional_arguments": canary}
        if files:
            asked["mutated"] = {module: str(file) for module, file in files.items()}
        return with_boot(launch, patience=PATIENCE[self.engines.device], **asked)

    def _logs(self) -> dict[Path, int]:
        """The logs of the live engine, and how long they are by now."""
        log = self.engines.logs / self.engines.log_name.format(boot=self.engines.boots)
        return {one: len(one.read_text(errors="replace")) for one in log.parent.glob(f"{log.stem}*.log")}


@dataclass(slots=True, kw_only=True)
class _Found:
    """What is known of one mutant so far, or of several that run at once."""

    mutants: Sequence[Asked]
    known: Result

    @staticmethod
    def of(task: Task) -> _Found:
        before = task.before or Result(id=task.mutant.id, end=Status.SURVIVED)
        return _Found(mutants=[task.mutant], known=before.model_copy(update={"stage": task.stage}))

    @staticmethod
    def all_of(found: Sequence[_Found]) -> _Found:
        mutants = [mutant for one in found for mutant in one.mutants]
        return _Found(mutants=mutants, known=Result(id="+".join(one.id for one in mutants), end=Status.SURVIVED))

    @property
    def name(self) -> str:
        return self.known.id

    @property
    def captured(self) -> bool:
        return any(one.captured for one in self.mutants)

    @property
    def unseen(self) -> bool:
        """Whether nothing of them was seen, by nobody."""
        known = self.known
        return known.end is Status.SURVIVED and not (known.rows or known.text or known.canary)

    def note(self, **changes: Any) -> None:
        self.known = self.known.model_copy(update=changes)

    def share(self, found: Sequence[_Found]) -> None:
        """What several took, in equal parts; and, where nothing was seen of them, that so it is of each."""
        every = self.known
        for one in found:
            known = one.known
            one.note(seconds=known.seconds + every.seconds / len(found))
            if self.unseen:
                one.note(
                    asked=known.asked + every.asked,
                    canary=every.canary if known.canary is None else known.canary,
                    accepted=_sum(known.accepted, every.accepted),
                    sound=_sum(known.sound, every.sound),
                )
        found[0].note(boots=found[0].known.boots + every.boots)

    def add(self, outcome: ScenarioResult, sound: Sound | None, *, same: bool) -> None:
        """One judged run. same: whether every row is as without the mutant."""
        known = self.known
        self.note(text=known.text or outcome.text_identical is False)
        if sound is not None:
            self.note(
                rows=known.rows or not same,
                accepted=_sum(known.accepted, accepted(outcome)),
                sound=_sum(known.sound, (sound.tokens, sound.verifies)),
            )
        if lost := next((why for event in outcome.trace.events if (why := lost_by(event))), ""):
            self.say(Status.NOT_RUN, outcome.scenario, why=lost.splitlines()[0])
        elif outcome.verdict.outcome is Outcome.FAIL:
            self.say(Status.KILLED, outcome.scenario, **_first(outcome))
        elif outcome.verdict.outcome is Outcome.UNKNOWN:
            self.say(Status.UNKNOWN, outcome.scenario, why="; ".join(outcome.verdict.reasons[:2]))

    def not_booted(self, scenario: Scenario, error: EngineError) -> None:
        """Only one that boots with the mutant says something of it."""
        said = str(error)
        if not self.captured:
            return self.say(Status.ERROR, scenario, why=f"without the mutant: {said.splitlines()[0]}")
        if isinstance(error, NoLease) or any(words in said for words in CROWDED):
            return self.say(Status.ERROR, scenario, why=said.splitlines()[0])
        return self.refused(scenario, said)

    def refused(self, scenario: Scenario, error: str) -> None:
        """There is no trace: what SGLang refused everybody sees; a defect of ours is not a kill."""
        lines = error.splitlines()
        line = next((one.strip() for one in reversed(lines) if "Error" in one), lines[0])
        if DEFECT in lines[0]:
            self.say(Status.ERROR, scenario, why=lines[0])
        else:
            self.say(Status.KILLED, scenario, check="engine", kinds=("CRASH",), why=line)

    def say(self, end: Status, scenario: Scenario, **said: Any) -> None:
        self.note(end=end, scenario=scenario.name, **said)

    def result(self) -> Result:
        return self.known.model_copy(update={"seconds": round(self.known.seconds, 1)})


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
