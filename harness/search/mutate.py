"""Asks mutants of SGLang's source: the quickest scenarios that execute the line, then all that do, then generated ones.

Each runs in a process of its own, forked from one that has everything imported, with the functions of one file replaced
(see engine_side.host.source_swap). It must not draw mutants, and must not loosen anything for one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases.families import FAMILIES
from cases.generation import generate
from harness.checks.ranks import lost_by
from harness.contract.scenario import Scenario
from harness.contract.types import Divergence, Kind, Outcome
from harness.driving.adapt import refusal
from harness.driving.live import LiveEngines
from harness.driving.progress import ScenarioResult
from harness.engines.errors import DEFECT, EngineError
from harness.engines.process import Launch
from harness.search.executed import Sound, accepted, digest, usable, with_boot
from harness.search.fates import Asked, End, Fate

#: Scenarios that are asked first; a share of the usual deadlines: 36 s for a step, 90 s for a boot.
FIRST, PATIENCE = 2, 0.3
#: SGLang's own canary: every violation of what its KV cache holds is logged, real data included.
CANARY = {"kv_canary": "log", "kv_canary_real_data": "all"}
ALARM = "kv_canary violation:"
#: Followed scenarios of one boot configuration, and in all, and fixed ones of the first boots that were not followed.
OF_A_BOOT, IN_ALL, MORE = 2, 6, 5


@dataclass(slots=True, kw_only=True)
class Hunt:
    """One worker's engines, and what they are asked. package: the release's sglang; folder: for mutated files."""

    engines: LiveEngines
    package: Path
    folder: Path
    sounds: Sequence[Sound]
    seed: int
    examples: int
    release: str
    _clean: dict[str, bool] = field(default_factory=dict)

    def ask(self, mutant: Asked) -> Fate:
        """What becomes of it."""
        found = _Found(mutant=mutant)
        source = (self.package / mutant.file).read_text()
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{mutant.id}.py"
        file.write_text(mutant.applied(source))
        try:
            for stage, scenario, sound in self._stages(mutant):
                found.stage = stage
                self._run(found, scenario, sound, file)
                if found.end is not End.SURVIVED and found.end is not End.UNKNOWN:
                    break
        finally:
            self.engines.close()
            file.unlink()
        return found.fate()

    def _stages(self, mutant: Asked) -> Iterator[tuple[str, Scenario, Sound | None]]:
        """(stage, scenario, what it shows without a mutant)."""
        all_of_them = usable(self.sounds, mutant.file, mutant.line)
        for number, one in enumerate(_few_a_boot(all_of_them)):
            yield "line" if number < FIRST else "family", one.scenario, one
        families = dict.fromkeys(one.family for one in all_of_them)
        boot_keys = {one.scenario.boot_key() for one in all_of_them[:FIRST]}
        followed = {one.scenario.id for one in self.sounds}
        fixed = [one for name in families for one in FAMILIES[name].scenarios if one.boot_key() in boot_keys]
        others = [one for one in fixed if one.id not in followed and not self._refused(one)]
        for scenario in others[:MORE]:
            yield "family", scenario, None
        boots = {boot.boot_key(): boot for name in families for boot in FAMILIES[name].boots}
        known = [boots[key] for key in dict.fromkeys(one.scenario.boot_key() for one in all_of_them) if key in boots]
        beside = [boot for boot in boots.values() if boot not in known and boot.works_on(self.release)]
        chosen = [boot for boot in (*known[:1], *beside[:2], *known[1:]) if not boot.assumes][:3]
        for place, boot in enumerate(chosen):
            each = self.examples // len(chosen) + (place < self.examples % len(chosen))
            for scenario in generate(boot, count=each, seed=self.seed):
                yield "generated", scenario, None

    def _refused(self, scenario: Scenario) -> bool:
        return bool(refusal(scenario, version=self.release, device="cpu"))

    def _run(self, found: _Found, scenario: Scenario, sound: Sound | None, file: Path) -> None:
        mutated = {"module": found.mutant.module, "file": str(file)}
        launch = with_boot(self._launch(scenario), patience=PATIENCE, mutated=mutated)
        boots = self.engines.boots
        try:
            trace = self.engines.drive(launch, scenario)
        except EngineError as error:
            found.refused(scenario, str(error))
            return
        finally:
            found.boots += self.engines.boots - boots
            found.canary = self._alarm() if self.watched else None
        try:
            outcome = self.engines.judge(scenario, trace, release=self.release, revert=None)
        except Exception as error:  # rows that nothing of ours expected: a defect of ours, and no kill
            found.failed(scenario, f"judging: {type(error).__name__}: {error}")
            return
        if outcome.verdict.outcome is Outcome.FAIL and sound is None and not self._passes(scenario):
            return  # it fails without the mutant too, and says nothing
        found.add(outcome, sound)

    def _passes(self, scenario: Scenario) -> bool:
        """Whether a generated scenario passes without a mutant."""
        if scenario.id not in self._clean:
            trace = self.engines.drive(self._launch(scenario), scenario)
            outcome = self.engines.judge(scenario, trace, release=self.release, revert=None)
            self._clean[scenario.id] = outcome.passed
        return self._clean[scenario.id]

    @property
    def watched(self) -> bool:
        """Whether the release has SGLang's own canary of its KV cache, which then runs beside our probe."""
        return (self.package / "srt" / "kv_canary").is_dir()

    def _launch(self, scenario: Scenario) -> Launch:
        launch = self.engines.launch(scenario)
        if not self.watched:
            return launch
        return with_boot(launch, optional_arguments=launch.boot["optional_arguments"] | CANARY)

    def _alarm(self) -> bool:
        """Whether the canary logged a violation since the engine was booted."""
        log = self.engines.logs / self.engines.log_name.format(boot=self.engines.boots)
        return any(ALARM in one.read_text(errors="replace") for one in log.parent.glob(f"{log.stem}*"))


def _few_a_boot(sounds: Sequence[Sound]) -> list[Sound]:
    """The first of each boot configuration, in all as many as are asked."""
    taken: dict[str, int] = {}
    chosen = []
    for one in sounds:
        key = one.scenario.boot_key()
        taken[key] = taken.get(key, 0) + 1
        chosen += [one] if taken[key] <= OF_A_BOOT else []
    return chosen[:IN_ALL]


@dataclass(slots=True, kw_only=True)
class _Found:
    """What is known of one mutant so far."""

    mutant: Asked
    end: End = End.SURVIVED
    stage: str = ""
    boots: int = 0
    scenarios: int = 0
    said: dict[str, Any] = field(default_factory=dict)
    rows: bool = False
    text: bool = False
    tokens: tuple[int, int] = (0, 0)
    sound: tuple[int, int] = (0, 0)
    canary: bool | None = None
    started: float = field(default_factory=time.monotonic)

    def add(self, outcome: ScenarioResult, sound: Sound | None) -> None:
        """One judged run."""
        self.scenarios += 1
        self.text |= outcome.text_identical is False
        if sound is not None:
            self.rows |= digest(outcome.trace) != sound.rows
            self.tokens = _sum(self.tokens, accepted(outcome))
            self.sound = _sum(self.sound, (sound.tokens, sound.verifies))
        events = outcome.trace.events
        placed = [event.data for event in events if event.name == "source"]
        if placed and not any(data["functions"] for data in placed):
            self.failed(outcome.scenario, f"it is in no function of the engine: {placed[-1]['error']}")
        elif lost := next((why for event in events if (why := lost_by(event))), ""):
            self._say(End.NOT_RUN, outcome.scenario, why=lost.splitlines()[0])
        elif outcome.verdict.outcome is Outcome.FAIL:
            self._say(End.KILLED, outcome.scenario, **_first(outcome))
        elif outcome.verdict.outcome is Outcome.UNKNOWN:
            self._say(End.UNKNOWN, outcome.scenario, why="; ".join(outcome.verdict.reasons[:2]))

    def refused(self, scenario: Scenario, error: str) -> None:
        """There is no trace: an engine that does not start is seen by everybody; a defect of ours is not a kill."""
        self.scenarios += 1
        line = error.splitlines()[0]
        if DEFECT in line:
            self.failed(scenario, line)
        else:
            kind = Kind.HANG if "did not boot within" in line else Kind.CRASH
            self._say(End.KILLED, scenario, check="boot", kinds=(str(kind),), why=line)

    def failed(self, scenario: Scenario, why: str) -> None:
        self._say(End.ERROR, scenario, why=why)

    def _say(self, end: End, scenario: Scenario, **said: Any) -> None:
        self.end, self.said = end, {"scenario": scenario.name, **said}

    def fate(self) -> Fate:
        seconds = round(time.monotonic() - self.started, 1)
        return Fate(
            id=self.mutant.id,
            end=self.end,
            stage=self.stage,
            scenarios=self.scenarios,
            boots=self.boots,
            seconds=seconds,
            rows=self.rows,
            text=self.text,
            accepted=self.tokens,
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
