"""Which scenarios a mutant is asked in, in what order, and which mutants together: cheap ones first.

It must not run anything, and must not draw mutants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cases.families import FAMILIES
from cases.programs import EXERCISES
from harness.contract.scenario import Scenario
from harness.driving.adapt import NOTHING, Wanted, adapted
from harness.driving.refusals import refusal
from harness.search.executed import Sound, usable
from harness.search.mutant_results import Asked, Result, joined, label

#: Followed scenarios of a mutant's first boot configuration, and of each other (`_a_family`). Then come the fixed ones
#: of all of these that were not followed.
FIRST, OTHERS = 2, 1
#: What requests ask for beside greedy tokens, which hardly a fixed set does: needs of `eaglecheck mutants`; and what a
#: pair with a tokenizer alone can be asked for.
ASKING, OF_TEXTS = ("sampled", "rules", "answers", "states"), ("grammar", "strings")
#: So many mutants that nothing has shown yet are asked together at most.
TOGETHER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What scenarios run on. wanted: settings in place of their own."""

    release: str
    device: str = "cpu"
    wanted: Wanted = NOTHING

    def made(self, scenarios: Iterable[Scenario]) -> list[Scenario]:
        """As they run there, without those that do not."""
        return [one for one, why in self.each(scenarios) if not why]

    def each(self, scenarios: Iterable[Scenario]) -> list[tuple[Scenario, str]]:
        """As they would run there, and why those that do not run there do not."""
        every = adapted(scenarios, self.wanted, device=self.device)
        return [(one, refusal(one, version=self.release, device=self.device)) for one in every]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Scenarios of one boot configuration that a mutant is asked in, in this order until one shows it."""

    mutant: Asked
    stage: str
    scenarios: tuple[Scenario, ...]
    before: Result | None = None

    def after(self, result: Result | None) -> Task | None:
        """What is left of it, with what is known of the mutant by now; None where nothing is."""
        if result is None:
            return self
        if not result.goes_on:
            return None
        left = tuple(one for one in self.scenarios if label(one) not in result.asked)
        return Task(mutant=self.mutant, stage=self.stage, scenarios=left, before=result) if left else None


@dataclass(slots=True, kw_only=True)
class Waiting:
    """Tasks that are left, of which workers take the next. known: by mutant.

    A mutant that was never asked is with one of them. One that was may be with several, in different boot
    configurations, while there is no other to take: else all would wait for the last survivors.
    """

    rounds: list[list[Task]]
    known: dict[str, Result]
    _taken: Counter[str] = field(default_factory=Counter)

    def take(self) -> list[Task]:
        """Tasks to do at once, of the earliest round that has any to give now; none where none has."""
        return self._first(lambda name: not self._taken[name]) or self._first(lambda name: name in self.known)

    def _first(self, free: Callable[[str], bool]) -> list[Task]:
        for number, tasks in enumerate(self.rounds):
            here = [one for one in tasks if free(one.mutant.id)]
            if ready := [left for one in here if (left := one.after(self.known.get(one.mutant.id))) is not None]:
                batch = together(ready)[0]
                names = {one.mutant.id for one in batch}
                self.rounds[number] = [one for one in tasks if one.mutant.id not in names]
                self._taken.update(names)
                return batch
        return []

    def give(self, batch: Iterable[Task], results: Iterable[Result]) -> list[Result]:
        """What became of those that were taken, and all that is known of them by now."""
        for task, now in zip(batch, results, strict=True):
            self.known[now.id] = joined(self.known.get(now.id), task.before, now)
            self._taken[now.id] -= 1
        return [self.known[task.mutant.id] for task in batch]


def rounds(
    mutants: Sequence[Asked],
    sounds: Sequence[Sound],
    *,
    place: Place,
    examples: int,
    seed: int,
    explained: Collection[str] = (),
) -> Iterator[list[Task]]:
    """Tasks that one engine can do one after the other, cheap ones first; what nothing executes has none.

    Those of mutants that a boot begins with share no engine, and are one list for each time that they are asked. What
    is explained already is asked more than once after all others only.
    """
    first, others, more, asking, generated = (list[tuple[str, Task]]() for _ in range(5))
    known = {one.scenario.id for one in sounds}
    unknown = {
        name: [(one.boot_key(), one) for one in place.made(FAMILIES[name].scenarios) if one.id not in known]
        for name in {one.family for one in sounds}
    }
    for mutant in mutants:
        boots = _a_family(usable(sounds, mutant.file, mutant.line, captured=mutant.captured))

        def task(boot: str, stage: str, scenarios: Iterable[Scenario], mutant: Asked = mutant) -> tuple[str, Task]:
            key = stage if mutant.captured else boot
            return key, Task(mutant=mutant, stage=stage, scenarios=tuple(scenarios))

        for number, (boot, ran) in enumerate(boots.items()):
            chosen = [one.scenario for one in ran[: OTHERS if number else FIRST]]
            if number == 0:
                first.append(task(boot, "line", chosen[:1]))
            others.append(task(boot, "family" if number else "line", chosen[0 if number else 1 :]))
        for boot, ran in boots.items():
            more.append(task(boot, "family", [one for key, one in unknown[ran[0].family] if key == boot]))
        asked_for = [] if mutant.captured else [(one.boot_key(), one) for one in _asking(boots, place)]
        for boot in dict.fromkeys(key for key, _ in asked_for):
            asking.append(task(boot, "asking", [one for key, one in asked_for if key == boot]))
        generated += [task(made[0].boot_key(), "generated", made) for made in _generated(boots, place, examples, seed)]
    late = [[one for one in tasks if one[1].mutant.id in explained] for tasks in (others, more, asking, generated)]
    soon = [[one for one in tasks if one[1].mutant.id not in explained] for tasks in (others, more, asking, generated)]
    for tasks in (first, *soon, *late):
        # where many are is asked first, so that what is quick kills before others are asked
        counts = Counter(key for key, _ in tasks)
        for key in sorted(counts, key=lambda one: -counts[one]):
            yield [one for other, one in tasks if other == key and one.scenarios]


def _a_family(ran: Sequence[Sound]) -> dict[str, list[Sound]]:
    """boot -> scenarios that execute the line: of each family the boots that do first.

    Of each size of pages and of the pool (a small one runs out, and evicts), chains and trees apart, those that draft
    more than two steps too (beams are chosen among beams from the third on), and with and without overlap scheduling.
    """
    boots: dict[tuple[object, ...], str] = {}
    keyed = [(one.scenario.boot_key(), one) for one in ran]
    for boot, one in keyed:
        spec, engine = one.scenario.spec, one.scenario.engine
        slots = (engine.page_size, engine.max_total_tokens)
        boots.setdefault((one.family, one.kind, *slots, spec.eagle_topk > 1, spec.num_steps > 2), boot)
    return {boot: [one for key, one in keyed if key == boot] for boot in dict.fromkeys(boots.values())}


def _asking(boots: Mapping[str, Sequence[Sound]], place: Place) -> list[Scenario]:
    """What requests ask for beside greedy tokens: on the first boot configuration, and, where one of the pairs has a
    tokenizer, as texts."""
    ran = [one.scenario for each in boots.values() for one in each]
    pairs = {one.checkpoint for one in ran}
    made = [_on(ran[0], one) for need in ASKING for one in EXERCISES[need] if ran]
    made += [one for need in OF_TEXTS for one in EXERCISES[need] if one.checkpoint in pairs]
    return place.made(made)


def _on(boot: Scenario, exercise: Scenario) -> Scenario:
    """The exercise as another scenario's engine runs it, with what it needs beside the plain one."""
    needed = exercise.engine.model_dump(exclude_defaults=True)
    engine = boot.engine.model_copy(update={"chunked_prefill_size": None, **needed})
    return exercise.model_copy(update={"checkpoint": boot.checkpoint, "spec": boot.spec, "engine": engine})


def _generated(
    boots: Mapping[str, Sequence[Sound]], place: Place, examples: int, seed: int
) -> Iterator[list[Scenario]]:
    """Generated scenarios on the first boot configuration, and on two of its family that no fixed set drives."""
    from cases.generation import generate  # Hypothesis

    families = [FAMILIES[ran[0].family] for ran in boots.values() if examples][:1]
    every = [boot for family in families for boot in family.boots if boot.planned_on(place.release)]
    every.sort(key=lambda boot: boot.boot_key() not in boots)
    for boot in every[:3]:
        if found := place.made(generate(boot, count=-(-examples // 3), seed=seed)):
            yield found


def together(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks to do at once: alone where a mutant was never asked or a boot begins with it, and where two of one batch
    would change the same place of a file."""
    batches: list[list[Task]] = []
    open_: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        if task.before is None or task.mutant.captured:
            batches.append([task])
            continue
        key = tuple(one.id for one in task.scenarios)
        batch = open_.get(key)
        if batch is None or len(batch) == TOGETHER or any(task.mutant.meets(one.mutant) for one in batch):
            batch = open_[key] = []
            batches.append(batch)
        batch.append(task)
    return batches
