"""The rows one request contributes to one round: what each forward should be fed, and what it should say.

This is the row contract written out once for replay and for free running. Everything follows from `Reading` (both
models over one token sequence) and, when conditioned, from what the other side proposed. This module must not look
at a trace or decide which rounds happen.

Symbols: c committed length, k steps, t topk, n tree nodes, a accept length, T tokens, h hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from harness.contract.trace import TOP_LOGITS, RowBuilder, Rows
from harness.contract.types import Phase, SpecConfig
from reference.chain import Chain, Forced, Proposals, Sight, Trunk, best, draft
from reference.extend import rotate
from reference.model import Head, Target, causal
from reference.tree import Tree, branch_mask, build_tree
from reference.verify import Coins, Walk, greedy_walk, ratio_walk, sampled_walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Both models over one request's tokens int64 [T].

    hidden [T,w]: what the target hands to the head. final [T,h]: what its own logits come from. entered [T-1,h']:
    hidden as it enters the draft layer. draft [T-1,h']: what draft rows hand on.

    Both are causal, so rows of a shorter prefix are the same: one reading serves every round of a request.
    """

    tokens: Tensor
    hidden: Tensor
    final: Tensor
    entered: Tensor
    draft: Tensor

    @staticmethod
    def of(head: Head, tokens: list[int]) -> Reading:
        """Read `tokens` from scratch, each model once over the whole sequence."""
        ids = torch.tensor(tokens)
        states, rows = head.target.hidden_states(ids), len(ids) - 1
        rotated, hidden = rotate(ids, 0, rows), head.features(states)
        entered = head.enter(hidden[:rows])
        g = head.forward(rotated.input_ids, entered, rotated.positions, causal(rows))
        return Reading(tokens=ids, hidden=hidden, final=states[-1], entered=entered, draft=g)

    def trunk(self) -> Trunk:
        """The draft rows that rounds hang on."""
        return Trunk(input_ids=self.tokens[1:], hidden=self.entered, output=self.draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What another side did in a decode round: its proposals, its tree and its target choices [n] (None: unknown).

    coins: what its sampled verify was decided by, None where it was not sampled. committed: what it committed, for a
    request that samples: without coins there is nothing that decides it.
    """

    forced: Forced = field(default_factory=Forced)
    tree: Tree | None = None
    choices: tuple[int, ...] | None = None
    coins: Coins | None = None
    committed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The part of a row's key that is shared by a request's rows in one round."""

    rid: str
    epoch: int
    dp_rank: int
    round: int
    tick: int
    committed: int


class Writer:
    """Collects rows and the hidden states they point to."""

    def __init__(self) -> None:
        self._rows = RowBuilder()
        self._tensors: dict[str, list[Tensor]] = {}

    def add(
        self,
        where: Where,
        phase: Phase,
        slot: int,
        *,
        logits: Tensor | None = None,
        choose: int = 0,
        scored: bool = False,
        drawn: Sequence[int] = (),
        heat: float = 1.0,
        **values: Any,
    ) -> None:
        """One row; `hidden_in` and `hidden_out` in values are tensors [h]. drawn: what it chooses instead of the best.

        logits [V] fill lse and the top logits; the best `choose` of them are what the row chooses, `scored` with
        their probabilities at temperature `heat`.
        """
        for name in ("hidden_in", "hidden_out"):
            if name in values:
                stored = self._tensors.setdefault(f"{name}.{phase}", [])
                stored.append(values[name])
                values[name] = len(stored) - 1
        if logits is not None:
            top, lse = best(logits, max(choose, TOP_LOGITS)), logits.logsumexp(-1)
            kept, chosen = top[:TOP_LOGITS], list(drawn) or top[:choose]
            values |= {
                "lse": float(lse),
                "top_ids": kept,
                "top_logits": logits[kept].float().numpy(),
                "chosen_ids": chosen,
            }
            if scored:
                scaled = logits / heat
                values["chosen_probs"] = (scaled[chosen] - scaled.logsumexp(-1)).exp().float().numpy()
        self._rows.add(
            rid=where.rid,
            epoch=where.epoch,
            dp_rank=where.dp_rank,
            round=where.round,
            tick=where.tick,
            committed=where.committed,
            phase=str(phase),
            slot=slot,
            **values,
        )

    def build(self) -> tuple[Rows, dict[str, np.ndarray]]:
        """The rows, and float32 [rows,h] tensors by name."""
        tensors = {name: torch.stack(rows).to(torch.float32).numpy() for name, rows in self._tensors.items()}
        return self._rows.build(), tensors


def prefill_rows(
    writer: Writer, where: Where, head: Head, reading: Reading, length: int, *, chosen: Sequence[int] = ()
) -> None:
    """Target rows of the prompt chunk [committed, committed+length): the last one also says what comes next.

    chosen: what was drawn there, for a request that samples: no coin is known for it.
    """
    for j in range(length):
        row, values = where.committed + j, dict[str, Any]()
        if j == length - 1:
            values = {"logits": head.target.logits(reading.final[row]), "choose": 1, "drawn": chosen}
        token, hidden = int(reading.tokens[row]), reading.hidden[row]
        writer.add(where, Phase.PREFILL, j, input_id=token, position=row, hidden_out=hidden, **values)


def rotated_rows(
    writer: Writer,
    where: Where,
    phase: Phase,
    head: Head,
    reading: Reading,
    *,
    length: int,
    t: int,
    drawn: Sequence[int] = (),
    heat: float = 1.0,
) -> None:
    """Draft rows committed .. committed+length-1, for a prompt chunk (DRAFT_PREFILL) or committed tokens (EXTEND).

    The last row makes the first proposals of the next decode round: its best, or what was drawn at temperature `heat`.
    Rows whose token is not known are left out.
    """
    known = min(length, len(reading.tokens) - 1 - where.committed)
    rotated = rotate(reading.tokens, where.committed, where.committed + known)
    for j, (token, row) in enumerate(zip(rotated.input_ids.tolist(), rotated.positions.tolist(), strict=True)):
        values: dict[str, Any] = {}
        if j == length - 1:
            g = reading.draft[row]
            values = {"hidden_out": g, "logits": head.logits(g), "choose": t, "scored": True}
            values |= {"drawn": drawn, "heat": heat}
        writer.add(where, phase, j, input_id=token, position=row, hidden_in=reading.hidden[row], **values)


def handed_rows(writer: Writer, where: Where, head: Head, reading: Reading, *, t: int) -> None:
    """What a decode side must hold after a hand-over at c committed tokens: a row a position, token full[slot + 1].

    The last row carries the draft's own state there and its t best proposals, as if the prompt had been read here.
    """
    for row in range(where.committed):
        values: dict[str, Any] = {}
        if row == where.committed - 1:
            g = reading.draft[row]
            values = {"hidden_out": g, "logits": head.logits(g), "choose": t, "scored": True}
        writer.add(where, Phase.PREBUILT, row, input_id=int(reading.tokens[row + 1]), **values)


def decode_rows(
    writer: Writer,
    head: Head,
    reading: Reading,
    spec: SpecConfig,
    rounds: Sequence[tuple[Where, Conditions]],
    *,
    sight: Sight = "ancestors",
    temperature: float = 0.0,
    heat: float = 0.0,
) -> list[Walk]:
    """DRAFT, VERIFY and ACCEPT rows of decode rounds of one request, and their walks.

    heat: the temperature at which drafts were drawn, 0 where they are the draft's best.

    EXTEND rows need the tokens a round committed, so they are `rotated_rows` of a reading that has them.
    """
    starts = [where.committed for where, _ in rounds]
    forced = [(where.committed, conditions.forced) for where, conditions in rounds]
    chains = draft(head, reading.trunk(), forced, k=spec.k, t=spec.t, sight=sight)
    expected = [build_tree(int(reading.tokens[c]), ch.candidates, spec.n) for c, ch in zip(starts, chains, strict=True)]
    trees = [conditions.tree or tree for (_, conditions), tree in zip(rounds, expected, strict=True)]
    answers = verify(head, reading.tokens, list(zip(starts, trees, strict=True)))
    walks = []
    for i, (where, conditions) in enumerate(rounds):
        hidden, logits = answers[i]
        _draft_rows(writer, where, chains[i], spec.t, drawn=conditions.forced.chosen if heat else {}, heat=heat or 1.0)
        drafted = _laws(head, reading.draft[where.committed - 1], chains[i], heat) if heat else []
        walk = walk_of(trees[i], logits, conditions, most=spec.k, temperature=temperature, drafted=drafted)
        verified_rows(writer, where, expected[i], walk, hidden, logits)
        walks.append(walk)
    return walks


def _laws(head: Head, last: Tensor, chain: Chain, heat: float) -> list[list[float]]:
    """The law [k,V] that each drafted token was drawn from: the row before the round [h], then each draft step."""
    logits = torch.stack([head.logits(last), *(step.logits[0] for step in chain.steps)])
    laws: list[list[float]] = (logits.double() / heat).softmax(-1).tolist()
    return laws


def walk_of(
    tree: Tree,
    logits: Tensor,
    conditions: Conditions,
    *,
    most: int,
    temperature: float = 0.0,
    drafted: Sequence[Sequence[float]] = (),
) -> Walk:
    """The walk through what was verified, by logits [n,V]: by the other side's coins where it sampled, else by its
    choices where they are known. most: k. drafted: the law of each drafted token, where they were drawn."""
    if temperature > 0 and conditions.coins is not None:
        law = (logits.double() / temperature).softmax(-1).tolist()
        if conditions.coins.ratio:
            return ratio_walk(tree.tokens, law, drafted, conditions.coins)
        return sampled_walk(tree.tokens, tree.parents, law, conditions.coins, most=most)
    if temperature > 0 and conditions.committed:
        return Walk(nodes=(-1,) * len(conditions.committed), tokens=conditions.committed)
    choices = conditions.choices or [best(row, 1)[0] for row in logits]
    return greedy_walk(tree.tokens, tree.parents, choices)


def verified_rows(writer: Writer, where: Where, expected: Tree, walk: Walk, hidden: Tensor, logits: Tensor) -> None:
    """VERIFY and ACCEPT rows of one round. Inputs as `expected`; hidden [n,w] and logits [n,V] answer what was really
    verified."""
    _verify_rows(writer, where, expected, hidden, logits)
    for j, (node, token) in enumerate(zip(walk.nodes, walk.tokens, strict=True)):
        writer.add(where, Phase.ACCEPT, j, input_id=token, parent=node)


class HandsOver(Protocol):
    """The part of a head that verifying needs."""

    @property
    def target(self) -> Target:
        """The model it drafts for."""

    def features(self, states: list[Tensor]) -> Tensor:
        """See reference.model.Head."""


def verify(head: HandsOver, tokens: Tensor, trees: Sequence[tuple[int, Tree]]) -> list[tuple[Tensor, Tensor]]:
    """(hidden [n,w], target logits [n,V]) of each (committed length, tree) over tokens int64 [T], in one forward."""
    if not trees:
        return []
    rows, sizes = len(tokens), [len(tree.tokens) for _, tree in trees]
    states = head.target.hidden_states(
        torch.cat((tokens, *(torch.tensor(tree.tokens) for _, tree in trees))),
        torch.cat((torch.arange(rows), *(torch.tensor(tree.positions(c)) for c, tree in trees))),
        branch_mask(rows, [(c, tree.parents) for c, tree in trees]),
    )
    hidden, logits = head.features(states)[rows:], head.target.logits(states[-1][rows:])
    return list(zip(hidden.split(sizes), logits.split(sizes), strict=True))


def _draft_rows(
    writer: Writer, where: Where, chain: Chain, t: int, *, drawn: Mapping[int, Proposals], heat: float
) -> None:
    for i, step in enumerate(chain.steps):
        for s in range(t):
            writer.add(
                where,
                Phase.DRAFT,
                s,
                step=i,
                input_id=step.expected_ids[s],
                position=where.committed + i,
                parent=step.expected_parents[s],
                hidden_in=step.hidden_in[s],
                hidden_out=step.hidden_out[s],
                logits=step.logits[s],
                choose=t,
                scored=True,
                drawn=drawn[i][s] if i in drawn else (),
                heat=heat,
            )


def _verify_rows(writer: Writer, where: Where, expected: Tree, hidden: Tensor, logits: Tensor) -> None:
    for s, position in enumerate(expected.positions(where.committed)):
        writer.add(
            where,
            Phase.VERIFY,
            s,
            input_id=expected.tokens[s],
            position=position,
            parent=expected.parents[s],
            hidden_out=hidden[s],
            logits=logits[s],
            choose=1,
        )
