"""Runs mutants against the checks: every mutant over its exercises until one shows it, and who showed it.

Control side. Each check is asked alone, so that being named means it would have failed the scenario without the others.
It must not loosen anything for a mutant, and must not count an engine that is unsound by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS, Mutant
from harness.checks.ends import lost_by
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.types import Outcome
from harness.contract.words import counted
from harness.engines.errors import EngineError
from harness.search.mutant_results import Status
from harness.search.mutants_report import Report, Score, Step, undrivable

if TYPE_CHECKING:
    from harness.driving.live import LiveEngines
    from harness.driving.results import ScenarioResult

Progress = Callable[[Step], None]


def with_mutant(scenario: Scenario, mutant: Mutant, *, first: int = 1) -> Scenario:
    """The same program with the mutant armed from its first-th batch on."""
    arm = Op(kind="mutant", name=mutant.id, count=first)
    name = f"{scenario.name}-{mutant.id}"[:60]
    return Scenario(**{**scenario.model_dump(), "name": name, "script": (arm, *scenario.script)})


def killers(outcome: ScenarioResult) -> tuple[str, ...]:
    """Checks that would have failed this run, each by itself."""
    evidence = gather(outcome.scenario, outcome.trace, outcome.reference)
    return tuple(name for name, check in CHECKS.items() if run_check(check, evidence).divergences)


def by_engine(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """Mutants that one booted engine can serve, in order of the catalogue."""
    boots: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        exercises = EXERCISES.get(mutant.needs, ())
        boots.setdefault(exercises[0].boot_key() if exercises else "", []).append(mutant)
    return list(boots.values())


def may_end_it(mutant: Mutant) -> bool:
    """Whether the engine may have to be booted again after this mutant."""
    return bool({"CRASH", "HANG"} & set(mutant.kinds))


@dataclass(slots=True)
class Campaign:
    """One release, some mutants. `run` drives everything; engines are left to whoever owns them."""

    engines: LiveEngines
    engine: str
    mutants: Sequence[Mutant]
    progress: Progress = lambda _step: None
    #: need of a mutant -> what is driven for it
    exercises: Mapping[str, Sequence[Scenario]] = field(default_factory=lambda: EXERCISES)
    device: str = "cpu"
    scores: list[Score] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)
    _wrong: dict[str, str] = field(default_factory=dict)

    def run(self) -> Report:
        """Engine by engine: the exercises must pass without a mutant, before the mutants and again after them."""
        for mutants in by_engine(self.mutants):
            self._on_one_engine([mutant for mutant in mutants if self._can_run(mutant)])
        return self._report()

    def cut_off(self, why: str) -> Report:
        """What there is of a campaign that somebody ended: never a PASS."""
        asked = counted(len(self.scores), "mutant")
        self.unsound.append(f"{why}: {asked} of {len(self.mutants)} asked")
        return self._report()

    def _report(self) -> Report:
        order, asked = list(MUTANTS), {score.mutant.id for score in self.scores}
        return Report(
            engine=self.engine,
            scores=tuple(sorted(self.scores, key=lambda score: order.index(score.mutant.id))),
            unsound=tuple(self.unsound),
            whole=asked == set(MUTANTS),
        )

    def _can_run(self, mutant: Mutant) -> bool:
        """Whether there is a sound exercise for it; noted as not run otherwise."""
        exercises = self.exercises[mutant.needs]
        why = undrivable(mutant.needs, exercises, release=self.engine, device=self.device)
        why = why.partition("\n")[0] or self._wrong_without(mutant.needs)
        if why:
            self._note(Score(mutant=mutant, status=Status.NOT_RUN, why=why))
        return not why

    def _wrong_without(self, need: str) -> str:
        """What the unmutated exercises of a need show, empty if they pass; driven once."""
        if need not in self._wrong:
            self._wrong[need] = next((why for one in self.exercises[need] if (why := self._unmutated(one))), "")
            self.unsound += [self._wrong[need]] if self._wrong[need] else []
        return self._wrong[need]

    def _on_one_engine(self, mutants: list[Mutant]) -> None:
        """Mutants that end the engine last, after it has been shown that the others left nothing behind."""
        for mutant in mutants:
            if not may_end_it(mutant):
                self._note(self._ask(mutant, self.exercises[mutant.needs]))
        left = self._unmutated(self.exercises[mutants[0].needs][0], fresh=True) if mutants else ""
        if left:
            self.unsound.append(f"after the mutants: {left}")
        for mutant in mutants:
            if may_end_it(mutant):
                self._note(self._ask(mutant, self.exercises[mutant.needs]))

    def _unmutated(self, scenario: Scenario, *, fresh: bool = False) -> str:
        """What is wrong without any mutant, empty if nothing is."""
        self._say(f"{scenario.name} without mutants")
        try:
            outcome = self.engines(scenario, engine=self.engine, fresh=fresh)
        except EngineError as error:
            return str(error)
        reasons = "; ".join(outcome.verdict.reasons[:2])
        return "" if outcome.passed else f"{scenario.name} is {outcome.verdict.outcome} without a mutant: {reasons}"

    def _ask(self, mutant: Mutant, exercises: Sequence[Scenario]) -> Score:
        """Drive exercises until one shows the mutant."""
        score = Score(mutant=mutant, status=Status.NOT_RUN, why="no exercise")
        for number, scenario in enumerate(exercises, 1):
            self._say(f"{mutant.id} in {scenario.name}")
            try:
                outcome = self.engines(with_mutant(scenario, mutant), engine=self.engine)
            except EngineError as error:
                why = str(error).splitlines()[0]
                self.unsound.append(why)  # whether it would have been killed, nobody knows
                return Score(mutant=mutant, status=Status.NOT_RUN, examples=number, why=why)
            score = judged(mutant, outcome, examples=number)
            lost = score.status is Status.NOT_RUN and score.why != NOT_IN_GRAPHS
            self.unsound += [score.why] if lost else []  # its engine was ended from outside
            if score.status is not Status.SURVIVED:
                break
        return score

    def _note(self, score: Score) -> None:
        self.scores.append(score)
        self.progress(Step(text=score.mutant.id, index=len(self.scores), total=len(self.mutants), score=score))

    def _say(self, text: str) -> None:
        self.progress(Step(text=text, index=len(self.scores) + 1, total=len(self.mutants)))


#: Why a mutant was not asked, though it was armed.
NOT_IN_GRAPHS = "it never acted: CUDA graphs replay that place and do not hold it; ask it with --disable-cuda-graph"


def judged(mutant: Mutant, outcome: ScenarioResult, *, examples: int) -> Score:
    """Killed if the run failed and one of the expected kinds is among what nothing earlier explains."""
    lost = next((why for event in outcome.trace.events if (why := lost_by(event))), "")
    if lost:
        return Score(mutant=mutant, status=Status.NOT_RUN, why=lost)
    if _idle(mutant, outcome) and mutant.replayed and outcome.scenario.engine.cuda_graph:
        return Score(mutant=mutant, status=Status.NOT_RUN, why=NOT_IN_GRAPHS)
    kinds = outcome.verdict.root_kinds
    killed = outcome.verdict.outcome is Outcome.FAIL and bool(set(kinds) & set(mutant.kinds))
    broken = next((event for event in outcome.trace.events if "MutantBroken" in str(event.data.get("error", ""))), None)
    status = Status.BROKEN if broken is not None else Status.KILLED if killed else Status.SURVIVED
    why = "" if status is Status.KILLED else _why(mutant, outcome)
    return Score(
        mutant=mutant,
        status=status,
        killed_by=killers(outcome),
        kinds=kinds,
        examples=examples,
        text_identical=outcome.text_identical,
        why=str(broken.data["error"]) if broken is not None else why,
    )


def _idle(mutant: Mutant, outcome: ScenarioResult) -> bool:
    """Whether it says of itself that it never acted."""
    fired = [event.data["fired"] for event in outcome.trace.events if event.data.get("mutant") == mutant.id]
    return bool(fired) and not any(fired)


def _why(mutant: Mutant, outcome: ScenarioResult) -> str:
    if _idle(mutant, outcome):
        return f"it never acted in {outcome.scenario.name}"
    if outcome.verdict.outcome is Outcome.FAIL:
        return f"shown only by {', '.join(outcome.verdict.root_kinds)}; expected {' or '.join(mutant.kinds)}"
    return f"{outcome.verdict.outcome}: {'; '.join(outcome.verdict.reasons[:2]) or 'no check says a word'}"
