"""Recorded rounds of multi-layer MTP that outgrew their CUDA graphs, against the plan of the prefill before them.

A plan cuts the rows of a batch into blocks, one after the other. Each was made for one request of the forward that was
planned, and is as long as what that request ran then. Rows that fall into a block attend what that request had in its
cache at the time, and the rows before them in the block, whoever they belong to; rows behind the last block are
attended for by nobody, and what an attention says of them is whatever its memory held.

The runs are greedy and without a prefix cache; see docs/findings/F-011.md. No engine runs, and no run assumes this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.archive.store import StoredScenario
from harness.contract.trace import RoundRecord
from harness.contract.types import Phase
from reference.model import PaperTarget
from reference.mtp import MtpHead, MtpLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request of the forward that a plan was made for.

    cached: the c tokens that its rows in the cache had read; states [c,h]: the states that a draft layer had read with
    them, None for a target. rows: how many it ran.
    """

    cached: tuple[int, ...]
    rows: int
    states: Tensor | None = None


def target_states(
    target: PaperTarget, plan: Sequence[Planned], tokens: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """The target's last states [m,h] of the first m rows of a batch, which are those that the plan covers.

    tokens, positions: of all rows of the batch.
    """

    def said(one: Planned, ids: Tensor, places: Tensor, rows: slice) -> Tensor:
        return target.forward(ids, places)

    return _by_blocks(plan, tokens, positions, said)


def layer_states(
    layer: MtpLayer, plan: Sequence[Planned], tokens: Sequence[int], states: Tensor, positions: Sequence[int]
) -> Tensor:
    """g [m,h] of the first m rows of a batch in one draft layer; tokens, states [R,h], positions: of all its rows."""

    def said(one: Planned, ids: Tensor, places: Tensor, rows: slice) -> Tensor:
        held = states[rows] if one.states is None else torch.cat((one.states, states[rows]))
        return layer.forward(ids, held, places)[0]

    return _by_blocks(plan, tokens, positions, said)


def _by_blocks(
    plan: Sequence[Planned],
    tokens: Sequence[int],
    positions: Sequence[int],
    said: Callable[[Planned, Tensor, Tensor, slice], Tensor],
) -> Tensor:
    """Block by block; said: of one block with its cache in front, by tokens, positions and which rows of the batch."""
    found, begin = list[Tensor](), 0
    for one in plan:
        rows = slice(begin, min(begin + one.rows, len(tokens)))
        begin, cached = rows.stop, len(one.cached)
        ids = torch.tensor([*one.cached, *tokens[rows]])
        places = torch.tensor([*range(cached), *positions[rows]])
        found.append(said(one, ids, places, rows)[cached:])
    return torch.cat(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a trace holds of rows, by (round, rid, phase, step, slot)."""

    case: StoredScenario
    places: dict[tuple[int, str, str, int, int], int]

    @classmethod
    def of(cls, case: StoredScenario) -> Recorded:
        ints, strings = case.engine.rows.ints, case.engine.rows.strings
        names = zip(ints["round"], strings["rid"], strings["phase"], ints["step"], ints["slot"], strict=True)
        places = {(int(a), str(b), str(c), int(d), int(e)): place for place, (a, b, c, d, e) in enumerate(names)}
        return cls(case=case, places=places)

    def number(self, column: str, *where: int | str) -> int:
        return int(self.case.engine.rows.ints[column][self._at(where)])

    def chosen(self, *where: int | str) -> int:
        return int(self.case.engine.rows.lists["chosen_ids"][self._at(where)][0])

    def state(self, side: str, *where: int | str) -> Tensor:
        """Its hidden row [h] of a side, 'hidden_in' or 'hidden_out'."""
        held = self.case.engine.tensors[f"{side}.{where[2]}"]
        return torch.tensor(held[self.number(side, *where)])

    def text(self, rid: str) -> list[int]:
        """Prompt and everything that was generated."""
        ends = [list(end.output_ids) for end in self.case.engine.ends if end.rid == rid]
        return [*self.case.scenario.request(rid).input_ids, *(ends[0] if ends else [])]

    def _at(self, where: Sequence[int | str]) -> int:
        index, rid, phase, step, slot = where
        return self.places[int(index), str(rid), str(phase), int(step), int(slot)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgrown:
    """A decode round that ran eagerly, and the prefill before it."""

    record: RoundRecord
    prefill: RoundRecord


def outgrown(case: StoredScenario) -> Iterator[Outgrown]:
    """Every decode round whose verify no graph ran."""
    before: RoundRecord | None = None
    for record in case.engine.rounds:
        if record.mode == "PREFILL":
            before = record
        elif before is not None and record.mode == "DECODE" and Phase.VERIFY not in record.graphs:
            yield Outgrown(record=record, prefill=before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Rows [m,h] as recorded, as the plan says, and of a verify as its own text says; rows: how many there were."""

    recorded: Tensor
    planned: Tensor
    own: Tensor | None
    rows: int


def verified(told: Recorded, target: PaperTarget, one: Outgrown) -> Compared:
    """The verified rows that the target's plan covers."""
    index, n = one.record.index, told.case.scenario.spec.num_draft_tokens
    rows = [(index, rid, "VERIFY", 0, slot) for rid in one.record.rids for slot in range(n)]
    plan = [
        Planned(cached=tuple(told.text(rid)[:start]), rows=length)
        for rid, start, length in zip(one.prefill.rids, one.prefill.starts, one.prefill.lens, strict=True)
    ]
    tokens = [told.number("input_id", *row) for row in rows]
    planned = target_states(target, plan, tokens, [told.number("position", *row) for row in rows])
    own = list[Tensor]()
    for place, (rid, start) in enumerate(zip(one.record.rids, one.record.starts, strict=True)):
        chain = tokens[place * n : (place + 1) * n]
        own.append(target.forward(torch.tensor([*told.text(rid)[:start], *chain]))[start:])
    recorded = torch.stack([told.state("hidden_out", *row) for row in rows[: len(planned)]])
    return Compared(recorded=recorded, planned=planned, own=torch.cat(own)[: len(planned)], rows=len(rows))


def proposed(told: Recorded, head: MtpHead, one: Outgrown) -> Iterator[Compared]:
    """Layer by layer behind the first, the proposing rows that its plan covers.

    A node that was refused has token 0; each layer reads the tokens of the one before, shifted left, with what that
    one proposed behind the last accepted node.
    """
    record, spec = one.record, told.case.scenario.spec
    nodes = [(record.index, rid, "VERIFY", 0, slot) for rid in record.rids for slot in range(spec.num_draft_tokens)]
    states = torch.stack([told.state("hidden_out", *row) for row in nodes])
    positions = [told.number("position", *row) for row in nodes]
    lasts = [place * spec.num_draft_tokens + length - 1 for place, length in enumerate(record.lens)]
    fed = [told.chosen(*row) if row[4] < record.lens[record.rids.index(row[1])] else 0 for row in nodes]
    for layer in range(spec.num_steps):
        proposing = [
            (record.index, rid, "EXTEND", layer, a - 1) for rid, a in zip(record.rids, record.lens, strict=True)
        ]
        if layer:
            said = layer_states(head.layers[layer], _layer_plan(told, one.prefill, layer), fed, states, positions)
            known = [(row, last) for row, last in zip(proposing, lasts, strict=True) if last < len(said)]
            recorded = torch.stack([told.state("hidden_out", *row) for row, _ in known])
            planned = said[[last for _, last in known]]
            yield Compared(recorded=recorded, planned=planned, own=None, rows=len(proposing))
        blocks = [fed[at : at + spec.num_draft_tokens] for at in range(0, len(fed), spec.num_draft_tokens)]
        fed = [token for block in blocks for token in [*block[1:], block[-1]]]
        for row, last in zip(proposing, lasts, strict=True):
            fed[last] = told.chosen(*row)


def _layer_plan(told: Recorded, prefill: RoundRecord, layer: int) -> list[Planned]:
    """As the prefill planned it for one layer: what each request's earlier chunks left in its cache."""
    plan = list[Planned]()
    for rid, attempt, length in zip(prefill.rids, prefill.attempts, prefill.lens, strict=True):
        rows = [
            (record.index, rid, "DRAFT_PREFILL", layer, slot)
            for record in told.case.engine.rounds
            if record.mode == "PREFILL" and record.index < prefill.index and (rid, attempt) in _who(record)
            for slot in range(record.lens[record.rids.index(rid)])
        ]
        states = torch.stack([told.state("hidden_in", *row) for row in rows]) if rows else None
        tokens = tuple(told.number("input_id", *row) for row in rows)
        plan.append(Planned(cached=tokens, rows=length, states=states))
    return plan


def _who(record: RoundRecord) -> set[tuple[str, int]]:
    return set(zip(record.rids, record.attempts, strict=True))
