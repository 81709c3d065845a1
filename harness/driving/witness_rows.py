"""The rows that an engine should have, without weights: inputs, positions, parents, and what their values depend on.

As in `reference.rounds`, each round starts from what the engine had committed and follows its proposals. Which beams
grow and which candidates are verified follows from the scores that the engine recorded. Values are left out: each row
says by its meanings what they are functions of, and whoever knows those may fill them in.

Symbols: c committed length, k steps, t topk, n tree nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.contract.batches import Part
from harness.contract.requests import RequestSpec
from harness.contract.rows import Rows
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Phase
from harness.driving.witness_texts import Beam, Growth, Meaning, Texts
from reference.engine_view import Conditions, EngineView
from reference.timeline import RequestTimeline, timelines
from reference.tree import Tree
from reference.verify import Walk, greedy_walk

#: More tokens than any vocabulary has: what the ids mean is nothing to know here.
VOCAB = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One row: its place, what is fed, and what its values are functions of.

    reads: whose state comes in. says: whose state, logits and choices come out. choose: how many tokens it chooses, 0
    for a row of which only the state is known. drawn: what was chosen by chance.
    """

    part: Part
    phase: Phase
    slot: int
    input_id: int
    step: int = 0
    position: int = -1
    parent: int = -1
    reads: Meaning | None = None
    says: Meaning | None = None
    choose: int = 0
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """One request between two restarts: its timeline, and the number of each beginning of its text, [T + 1]."""

    request: RequestSpec
    timeline: RequestTimeline
    along: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Everything that an engine should have of a scenario. texts: what the meanings of the rows count in."""

    scenario: Scenario
    engine: Trace
    texts: Texts
    rows: list[Expected] = field(default_factory=list)
    requests: list[Followed] = field(default_factory=list)


def expect(scenario: Scenario, engine: Trace) -> Expectation:
    """The rows that `engine` should have for the rounds it ran, of each of a request's samples too."""
    scenario = scenario.sampled
    found = Expectation(scenario=scenario, engine=engine, texts=Texts())
    view, scores = EngineView(engine, scenario.spec, VOCAB), _Scores(engine.rows)
    for request in scenario.requests:
        for timeline in timelines(request, view):
            followed = Followed(request=request, timeline=timeline, along=found.texts.along(timeline.tokens))
            found.requests.append(followed)
            found.rows.extend(_Request(found, followed, view, scores).rows())
            if timeline.why:
                break
    return found


def by_slot(rows: Rows, *columns: str) -> dict[tuple[Any, ...], dict[int, int]]:
    """What these columns hold -> slot -> number of the row."""
    found: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
    values = ({**rows.ints, **rows.strings}[name].tolist() for name in (*columns, "slot"))
    for row, (*place, slot) in enumerate(zip(*values, strict=True)):
        found[tuple(place)][slot] = row
    return found


class _Scores:
    """What engine rows say of their proposals' probabilities."""

    def __init__(self, rows: Rows) -> None:
        self._scores = rows.lists["chosen_probs"]
        self._rows = by_slot(rows, "dp_rank", "round", "rid", "phase", "step")

    def of(self, part: Part, phase: Phase, step: int = 0) -> Mapping[int, tuple[float, ...]]:
        """By slot, where there are some."""
        slots = self._rows.get((part.record.dp_rank, part.record.index, part.rid, phase, step), {})
        return {slot: tuple(self._scores[row].tolist()) for slot, row in slots.items() if len(self._scores[row])}


#: The phase in which a part made the first proposals of the round behind it.
PROPOSING = {"PREFILL": Phase.DRAFT_PREFILL, "PREBUILT": Phase.PREBUILT, "DECODE": Phase.EXTEND}


class _Request:
    """The rows of one request between two restarts."""

    def __init__(self, found: Expectation, followed: Followed, view: EngineView, scores: _Scores) -> None:
        self.scenario, self.spec, self.texts = found.scenario, found.scenario.spec, found.texts
        self.view, self.scores = view, scores
        self.timeline, self.along = followed.timeline, followed.along
        self.tokens = followed.timeline.tokens
        self.drafts_drawn = self.scenario.engine.rejection_sampling and not followed.request.greedy
        self.sampled = not followed.request.greedy or bool(followed.request.rules)  # no question of the best logit
        self.dtype = str(found.engine.header.get("dtype") or found.scenario.engine.dtype)

    def rows(self) -> Iterator[Expected]:
        """As `reference.rounds.write`, part by part."""
        before: Part | None = None
        for part, committed in self.timeline.parts:
            phase, length, mode = PROPOSING[part.record.mode], len(committed), part.record.mode
            if mode == "PREBUILT":
                yield from self._proposing(part, phase, range(part.start))
            elif mode == "PREFILL":
                yield from self._prompt(part, (committed or self.view.target_choice(part)) if self.sampled else ())
                length = part.length
            else:
                yield from self._decoded(part, committed, self.view.conditions(part, before), before)
            if mode != "PREBUILT" and (not self.view.is_last(part) or self.view.has(part, phase)):
                yield from self._proposing(part, phase, range(part.start, part.start + length))
            before = part

    def _prompt(self, part: Part, drawn: tuple[int, ...]) -> Iterator[Expected]:
        for slot, at in enumerate(range(part.start, part.start + part.length)):
            last = slot == part.length - 1
            yield Expected(
                part=part,
                phase=Phase.PREFILL,
                slot=slot,
                input_id=self.tokens[at],
                position=at,
                says=Meaning("target", self.along[at + 1]),
                choose=int(last),
                drawn=drawn if last else (),
            )

    def _proposing(self, part: Part, phase: Phase, places: range) -> Iterator[Expected]:
        """Draft rows at these places, whose last one proposes; without those whose token is not known.

        Of what a decode side holds after a hand-over only the last row's state is known, and no position.
        """
        handed = phase is Phase.PREBUILT
        drawn = self.view.proposed(part) if self.drafts_drawn and not handed else ()
        for slot, at in enumerate(places[: max(0, len(self.tokens) - 1 - places.start)]):
            last = at == places[-1]
            yield Expected(
                part=part,
                phase=phase,
                slot=slot,
                input_id=self.tokens[at + 1],
                position=-1 if handed else at,
                reads=None if handed else Meaning("target", self.along[at + 1]),
                says=Meaning("draft", self.along[at + 2]) if last else None,
                choose=self.spec.eagle_topk if last else 0,
                drawn=drawn if last else (),
            )

    def _decoded(
        self, part: Part, committed: tuple[int, ...], known: Conditions, before: Part | None
    ) -> Iterator[Expected]:
        """DRAFT, VERIFY and ACCEPT rows of one round."""
        c, spec = part.start, self.spec
        growth = Growth(self.texts, text=self.along[c + 1], t=spec.eagle_topk, dtype=self.dtype)
        growth.begin(known.forced.first, self._first_scores(before))
        for i in range(spec.num_steps - 1):
            expected, fed = growth.feed(known.forced.input_ids.get(i, ()), known.forced.parents.get(i, ()))
            drawn = known.forced.chosen.get(i, ()) if self.drafts_drawn else ()
            yield from self._drafted(part, i, expected, fed, drawn)
            growth.propose(fed, known.forced.chosen.get(i, ()), self.scores.of(part, Phase.DRAFT, i))
        own = growth.tree(self.tokens[c], spec.num_draft_tokens, known.tree)
        if own is not None:
            yield from self._verified(part, own, known.tree or own)
        for slot, (token, node) in enumerate(self._walk(known, own, committed)):
            yield Expected(part=part, phase=Phase.ACCEPT, slot=slot, input_id=token, parent=node)

    def _first_scores(self, before: Part | None) -> Sequence[float]:
        if before is None:
            return ()
        by_slot = self.scores.of(before, PROPOSING[before.record.mode])
        return by_slot[max(by_slot)] if by_slot else ()

    def _drafted(
        self, part: Part, step: int, expected: Sequence[Beam], fed: Sequence[Beam], drawn: Sequence[tuple[int, ...]]
    ) -> Iterator[Expected]:
        """Inputs are those expected; values answer what was fed."""
        for slot, (wanted, given) in enumerate(zip(expected, fed, strict=True)):
            yield Expected(
                part=part,
                phase=Phase.DRAFT,
                step=step,
                slot=slot,
                input_id=wanted.token,
                position=part.start + step,
                parent=wanted.parent,
                reads=Meaning("draft", given.before, step),
                says=Meaning("draft", given.text, step + 1),
                choose=self.spec.eagle_topk,
                drawn=drawn[slot] if slot < len(drawn) else (),
            )

    def _verified(self, part: Part, own: Tree, verified: Tree) -> Iterator[Expected]:
        """Inputs are those of the tree expected; values answer the tree that was really verified."""
        texts = list[int]()
        for token, parent in zip(verified.tokens, verified.parents, strict=True):
            texts.append(self.texts.after(self.along[part.start] if parent < 0 else texts[parent], token))
        places = zip(own.tokens, own.positions(part.start), own.parents, texts, strict=True)
        for slot, (token, position, parent, text) in enumerate(places):
            yield Expected(
                part=part,
                phase=Phase.VERIFY,
                slot=slot,
                input_id=token,
                position=position,
                parent=parent,
                says=Meaning("target", text),
                choose=1,
            )

    def _walk(self, known: Conditions, own: Tree | None, committed: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """(token, node): along the engine's own target choices, as far as they are known and decide it."""
        tree = known.tree or own
        walk = Walk(nodes=(-1,) * len(committed), tokens=committed)
        if tree is not None and known.choices is not None and not self.sampled:
            walk = greedy_walk(tree.tokens, tree.parents, known.choices)
        return zip(walk.tokens, walk.nodes, strict=True)
