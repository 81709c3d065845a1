"""One round of drafting with an EAGLE head: what draft rows read, and k levels of proposals from t beams.

Sources: EAGLE (arXiv 2401.15077) section 3.1, the shift by one token (`rotate`, `Reading`); EAGLE-2 (arXiv 2406.16858)
section 4.1, expansion: every beam proposes its t likeliest next tokens, and the t proposals with the greatest path
value (here the sum of log-probabilities) grow next. With t = 1 this is EAGLE's plain chain. Every step runs the beams
of its round so far over the kept rows of the sequence, each seeing the rows before its round and its own ancestors.

A round can be conditioned: `Forced` says what somebody else proposed and fed, and then each step is answered for
that input, so that one odd proposal is one difference and not a cascade. What *should* have been fed stays in
`Step.expected_ids`. This module must not choose trees or verify.

Shapes: T tokens, c committed tokens, t beams, h hidden width, w width of what the target hands over, h' of what a
draft row hands on, V vocabulary, m candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from reference.attention import Kept, Sight
from reference.model import Head, Trunk
from reference.rows import best_ids
from reference.tree import Candidates
from reference.verify import grouped

Proposals = tuple[tuple[int, ...], ...]
#: Rows whose logits are ranked at a time.
LOGIT_ROWS = 16
#: (step, the beam of the step before that each beam grew from) -> which beam of the step before each one attends to,
#: with all that one attends to. At step 0 both are -1: nothing of the round is there yet.
Attends = Callable[[int, Sequence[int]], Sequence[int]]


def ancestors_only(step: int, parents: Sequence[int]) -> Sequence[int]:
    """EAGLE-2: a beam attends to the beams it grew from."""
    return parents


#: Ids, wherever they are.
Tokens = TypeVar("Tokens", Tensor, Sequence[int])


def rotate(tokens: Tokens, start: int, stop: int) -> Tokens:
    """Input ids [stop-start] of draft rows start..stop-1 of `tokens` [T]: row j carries tokens[j+1].

    The head at row j predicts the feature of j+1 from the feature of j and the token that was really chosen at j+1.
    The same rule serves a prompt chunk [start, stop) and the tokens a verify committed. The last row of a final chunk
    needs the token the target chose after it, so that token must be in `tokens`: IndexError otherwise.
    """
    if not 0 <= start <= stop < len(tokens):
        raise IndexError(f"draft rows {start}..{stop - 1} need token {stop}, but the request has {len(tokens)} tokens")
    return tokens[start + 1 : stop + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Both models over one request's tokens int64 [T].

    trunk: the target over all T. hidden [T,w]: what it hands to the head. final [T,h]: what its own logits come from.
    entered [T-1,h']: hidden as it enters the draft layer. draft [T-1,h']: what draft rows hand on. kept: of those rows.

    Both are causal, so rows of a shorter prefix are the same: one reading serves every round of a request.
    """

    tokens: Tensor
    trunk: Trunk
    hidden: Tensor
    final: Tensor
    entered: Tensor
    draft: Tensor
    kept: Kept

    @staticmethod
    def of(head: Head, tokens: Sequence[int]) -> Reading:
        """Read `tokens`, each model in one forward over the whole sequence."""
        target, rows = head.target, len(tokens) - 1
        ids = torch.as_tensor(tokens, device=target.device)
        trunk = target.read(ids, keep=head.states)
        hidden = head.features(trunk.states)
        entered = head.enter(hidden[:rows])
        positions = torch.arange(rows, device=target.device)
        g, kept = head.forward(rotate(ids, 0, rows), entered, positions, Sight.causal(rows, device=target.device))
        final = trunk.states[target.layers]
        return Reading(tokens=ids, trunk=trunk, hidden=hidden, final=final, entered=entered, draft=g, kept=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """What another side did in this round; what is absent is left to the reference.

    first: its t first proposals. chosen[i][s]: the t proposals of beam s at step i. input_ids[i], parents[i]: the t
    tokens it fed at step i and the beam each grew from (-1: not known).
    """

    first: tuple[int, ...] = ()
    chosen: dict[int, Proposals] = field(default_factory=dict)
    input_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parents: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Draft forward i of a round: t beams, all at position c+i.

    expected_ids, expected_parents: what should be fed, given the proposals of the step before. attended: of what was
    fed, the beam of the step before that each attends to. hidden_in, hidden_out [t,h'] and logits [t,V] answer what was
    fed, which is the same unless forced.
    """

    expected_ids: tuple[int, ...]
    expected_parents: tuple[int, ...]
    attended: tuple[int, ...]
    hidden_in: Tensor
    hidden_out: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A round's k-1 steps and all its candidates. own: whether nothing that was forced differs from the reference's."""

    steps: tuple[Step, ...]
    candidates: Candidates
    own: bool


def best(values: Tensor, count: int) -> list[int]:
    """Indices of the `count` largest of values [m], best first, ties to the lowest index."""
    return best_ids(values, count).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beams:
    """t beams to feed: token, beam of the step before (-1 at step 0), and candidate index of each."""

    input_ids: tuple[int, ...]
    parents: tuple[int, ...]
    nodes: tuple[int, ...]


class _Pool:
    """Candidates so far, growing level by level."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self.parents: list[int] = []
        self.level: list[tuple[int, int]] = []  # newest level: (candidate, beam it came from)

    def add(self, beams: _Beams | None, proposals: Proposals, gains: Sequence[Sequence[float]]) -> None:
        """A level: beam s (None: the root alone) proposes proposals[s], of log-probabilities gains[s]."""
        nodes = beams.nodes if beams else (-1,)
        self.level = []
        for beam, (parent, tokens) in enumerate(zip(nodes, proposals, strict=True)):
            before = self.scores[parent] if parent >= 0 else 0.0
            self.level += [(len(self.tokens) + i, beam if beams else -1) for i in range(len(tokens))]
            self.tokens += tokens
            self.scores += [before + gain for gain in gains[beam]]
            self.parents += [parent] * len(tokens)

    def select(self, t: int) -> _Beams:
        """The t candidates of the newest level with the best scores, best first."""
        nodes, parents = zip(*self._ranked()[:t], strict=True)
        return _Beams(input_ids=tuple(self.tokens[node] for node in nodes), parents=parents, nodes=nodes)

    def locate(self, input_ids: Sequence[int], parents: Sequence[int], expected: _Beams) -> _Beams:
        """The beams another side fed, each found among the newest candidates (best first where the parent is not
        known). One that nobody proposed stands in the expected beam's place, having none of its own."""
        free = self._ranked()
        found: list[tuple[int, int]] = []
        for slot, (token, parent) in enumerate(zip(input_ids, parents, strict=True)):
            fits = [(node, beam) for node, beam in free if self.tokens[node] == token and parent in (-1, beam)]
            found.append(fits[0] if fits else (expected.nodes[slot], expected.parents[slot]))
            free = [entry for entry in free if entry not in fits[:1]]
        nodes, origins = zip(*found, strict=True)
        return _Beams(input_ids=tuple(input_ids), parents=origins, nodes=nodes)

    def _ranked(self) -> list[tuple[int, int]]:
        """The newest level, best first, ties to the candidate proposed first."""
        return sorted(self.level, key=lambda entry: -self.scores[entry[0]])


class _Round:
    """One round in progress: its candidates, and the rows fed so far (they hang on the sequence's first c rows)."""

    def __init__(self, reading: Reading, committed: int, forced: Forced, t: int, attends: Attends) -> None:
        self.committed, self.forced, self.t, self.attends = committed, forced, t, attends
        self.pool, self.steps = _Pool(), list[Step]()
        self.tokens, self.positions, self.origins = list[int](), list[int](), list[int]()
        self.attended: tuple[int, ...] = ()  # by the newest rows
        self.hidden: list[Tensor] = []
        self.output = reading.draft[committed - 1 : committed]  # of the newest rows, [s,h']
        self.beams: tuple[_Beams, _Beams] | None = None  # expected and fed, at the step that is answered
        self.own = True

    def feed(self, i: int) -> None:
        """Add the rows of step i: the beams that were fed, where another side did."""
        expected = beams = self.pool.select(self.t)
        if i in self.forced.input_ids:
            parents = self.forced.parents.get(i, (-1,) * self.t)
            beams = self.pool.locate(self.forced.input_ids[i], parents, expected)
        self.beams = expected, beams
        self.attended = tuple(self.attends(i, beams.parents))
        self.own &= beams == expected and self.attended == beams.parents
        before = len(self.tokens) - self.t  # where the rows of the step before begin
        self.tokens += beams.input_ids
        self.positions += [self.committed + i] * self.t
        self.origins += [-1 if beam < 0 else before + beam for beam in self.attended]
        rows = [max(parent, 0) for parent in beams.parents]
        there = rows == list(range(len(self.output)))  # a list of rows goes to a card, and waits for it
        self.hidden.append(self.output if there else self.output[rows])

    def chosen(self, best_of: Proposals) -> Proposals:
        """What the newest rows propose, where their best are `best_of` and nobody else proposed."""
        forced = self.forced.chosen.get(len(self.steps)) if self.beams else (self.forced.first,)
        chosen = forced if forced and any(forced) else best_of
        self.own &= chosen == best_of
        return chosen

    def answer(self, logits: Tensor, chosen: Proposals, gains: Sequence[Sequence[float]]) -> None:
        """Take what the head said about the newest rows, logits [s,V], and what each proposes."""
        self.pool.add(self.beams[1] if self.beams else None, chosen, gains)
        if self.beams is None:
            return
        expected, _ = self.beams
        step = Step(
            expected_ids=expected.input_ids,
            expected_parents=expected.parents,
            attended=self.attended,
            hidden_in=self.hidden[-1],
            hidden_out=self.output,
            logits=logits,
        )
        self.steps.append(step)

    def chain(self) -> Chain:
        pool = self.pool
        candidates = Candidates(tokens=tuple(pool.tokens), scores=tuple(pool.scores), parents=tuple(pool.parents))
        return Chain(steps=tuple(self.steps), candidates=candidates, own=self.own)


def _forward(head: Head, reading: Reading, rounds: Sequence[_Round], *, own: bool) -> None:
    """Each round's newest rows say their output [t,h'], in one forward of the rows that these rounds fed so far."""
    device = reading.tokens.device
    sight = Sight.of([(r.committed, r.origins) for r in rounds], device=device)
    if not own:
        rows, kept = len(sight.upto), len(reading.draft)
        sight = replace(sight, only=torch.arange(kept + rows, device=device).expand(rows, -1) < kept)
    output, _ = head.forward(
        torch.tensor([token for r in rounds for token in r.tokens], device=device),
        torch.cat([hidden for r in rounds for hidden in r.hidden]),
        torch.tensor([position for r in rounds for position in r.positions], device=device),
        sight,
        reading.kept,
    )
    for r, newest in zip(rounds, torch.split(output, [len(r.tokens) for r in rounds]), strict=True):
        r.output = newest[-r.t :]


def _answer(head: Head, rounds: Sequence[_Round]) -> None:
    """What the newest rows of each round propose; many rounds at a time, since a card answers each question late."""
    count = max(1, LOGIT_ROWS // max(len(r.output) for r in rounds))
    for some in (rounds[start : start + count] for start in range(0, len(rounds), count)):
        logits = head.logits(torch.cat([r.output for r in some]))
        ranked, place, chosen = best_ids(logits, some[0].t).tolist(), 0, list[Proposals]()
        for r in some:
            chosen.append(r.chosen(tuple(map(tuple, ranked[place : place + len(r.output)]))))
            place += len(r.output)
        each = [tokens for proposals in chosen for tokens in proposals]
        rows = [row for row, tokens in enumerate(each) for _ in tokens]
        found = iter(logits.log_softmax(-1)[rows, [token for tokens in each for token in tokens]].tolist())
        parts = torch.split(logits, [len(r.output) for r in some])
        for r, proposals, own in zip(some, chosen, parts, strict=True):
            r.answer(own, proposals, [list(itertools.islice(found, len(tokens))) for tokens in proposals])


def draft(
    head: Head,
    reading: Reading,
    rounds: Sequence[tuple[int, Forced]],
    *,
    k: int,
    t: int,
    attends: Attends = ancestors_only,
    own: bool = True,
) -> list[Chain]:
    """k levels of proposals for each round (committed length >= 1, conditions) of one sequence, k-1 forwards a group.

    own: whether a round's rows see themselves and their ancestors. The first level comes from the sequence's row c-1.
    Rounds do not see each other, nor the sequence from row c on.
    """
    live = [_Round(reading, committed, forced, t, attends) for committed, forced in rounds]
    for group in grouped(live, (k - 1) * t):
        _answer(head, group)
        for i in range(k - 1):
            for r in group:
                r.feed(i)
            _forward(head, reading, group, own=own)
            _answer(head, group)
    return [r.chain() for r in live]
