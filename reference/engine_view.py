"""The only window through which the reference looks at an engine's trace.

It may see which rounds happened and how many rows ran once more in them, the committed tokens, what the engine chose
and fed at each step, and the coins that decided a sampled verify, and nothing else: no positions, no cache slots, no
hidden states, no logits. What is missing, incomplete or not a token id is reported as unknown (an empty tuple or None),
so a broken trace can never break the reference. This module must not judge.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from harness.contract.batches import Part as Turn
from harness.contract.batches import parts_in
from harness.contract.trace import RoundRecord, Trace
from harness.contract.types import Phase, SpecConfig
from reference.chain import Forced
from reference.tree import Tree, with_depths
from reference.turns import Conditions
from reference.verify import Coins


class EngineView:
    """An engine trace, by request and round."""

    def __init__(self, trace: Trace, spec: SpecConfig, vocab: int) -> None:
        self._rows, self._spec, self._vocab = trace.rows, spec, vocab
        self._ended = {end.rid for end in trace.ends}
        self._coins = {
            (event.dp_rank, event.data["round"], rid): _coins(event.data, own, spec.n)
            for event in trace.events
            if event.name == "coins"
            for rid, own in event.data["coins"].items()
        }
        self._again = {
            (event.dp_rank, event.data["round"], event.data["step"]): int(event.data["rows"])
            for event in trace.events
            if event.name == "again"
        }
        self._index: dict[tuple[int, int, str, str, int], dict[int, int]] = defaultdict(dict)
        ints, strings = self._rows.ints, self._rows.strings
        for i in range(len(self._rows)):
            place = (int(ints["dp_rank"][i]), int(ints["round"][i]), str(strings["rid"][i]), str(strings["phase"][i]))
            self._index[*place, int(ints["step"][i])][int(ints["slot"][i])] = i
        self.turns: dict[str, list[Turn]] = defaultdict(list)
        for turn in parts_in(self._records(trace)):
            self.turns[turn.rid].append(turn)

    @staticmethod
    def _records(trace: Trace) -> list[RoundRecord]:
        """Rounds in order, one a DP rank: tensor-parallel ranks of a group repeat each other."""
        first: dict[tuple[int, int], RoundRecord] = {}
        for record in sorted(trace.rounds, key=lambda r: (r.index, r.dp_rank, r.tp_rank)):
            first.setdefault((record.index, record.dp_rank), record)
        return list(first.values())

    def has(self, turn: Turn, phase: Phase, step: int = 0) -> bool:
        """Whether the engine has any row of this phase in this turn."""
        return bool(self._slots(turn, phase, step))

    def is_last(self, turn: Turn) -> bool:
        """Whether the request left the engine in this turn, so that nobody needs proposals from it."""
        return turn.rid in self._ended and turn is self.turns[turn.rid][-1]

    def first_token(self, turn: Turn) -> tuple[int, ...]:
        """The token chosen after a final chunk, as a tuple of one; empty if unknown."""
        chosen = self._chosen(turn, Phase.PREFILL, turn.length - 1)
        return chosen if len(chosen) == 1 else ()

    def target_choice(self, turn: Turn) -> tuple[int, ...]:
        """The token chosen after any chunk, as a tuple of one; empty if unknown."""
        return self._chosen(turn, Phase.PREFILL, turn.length - 1)[:1]

    def accepted(self, turn: Turn) -> tuple[int, ...]:
        """The tokens a verify committed, in order; empty if unknown."""
        slots = self._slots(turn, Phase.ACCEPT)
        return self._input_ids(turn, Phase.ACCEPT, count=len(slots))

    def conditions(self, turn: Turn, before: Turn | None) -> Conditions:
        """What the engine did in a decode turn; `before` is the turn whose last row made the first proposals."""
        spec = self._spec
        first = () if before is None else self.proposed(before)
        forced = Forced(first=first)
        for i in range(spec.k - 1):
            chosen = tuple(self._chosen(turn, Phase.DRAFT, s, i) for s in range(spec.t))
            if all(len(ids) == spec.t for ids in chosen):
                forced.chosen[i] = chosen
            if fed := self._input_ids(turn, Phase.DRAFT, i, count=spec.t):
                forced.input_ids[i] = fed
                forced.parents[i] = self._parents(turn, Phase.DRAFT, i)
        choices = tuple(token for s in range(spec.n) for token in self._chosen(turn, Phase.VERIFY, s)[:1])
        return Conditions(
            forced=forced,
            tree=self._tree(turn),
            choices=choices if len(choices) == spec.n else None,
            coins=self._coins.get((turn.record.dp_rank, turn.record.index, turn.rid)),
        )

    def layer_proposals(self, turn: Turn) -> tuple[int | None, ...]:
        """What each of the k layers proposed in a turn that drafted by layers; None where it is unknown."""
        phase = Phase.DRAFT_PREFILL if turn.record.mode == "PREFILL" else Phase.EXTEND
        found: list[int | None] = []
        for layer in range(self._spec.k):
            last = max(self._slots(turn, phase, layer), default=0)
            chosen = self._chosen(turn, phase, last, layer)
            found.append(chosen[0] if len(chosen) == 1 else None)
        return tuple(found)

    def ran_again(self, turn: Turn) -> tuple[int, ...]:
        """How many rows before its first each layer ran once more in a turn; () if none did."""
        at = turn.record.dp_rank, turn.record.index
        counts = tuple(self._again.get((*at, layer), 0) for layer in range(self._spec.k))
        return counts if any(counts) else ()

    def proposed(self, before: Turn) -> tuple[int, ...]:
        """Its last draft row's t choices, or those that were handed over; empty if unknown."""
        phases = {"PREFILL": Phase.DRAFT_PREFILL, "PREBUILT": Phase.PREBUILT}
        phase = phases.get(before.record.mode, Phase.EXTEND)
        chosen = self._chosen(before, phase, max(self._slots(before, phase), default=0))
        return chosen if len(chosen) == self._spec.t else ()

    def _tree(self, turn: Turn) -> Tree | None:
        tokens = self._input_ids(turn, Phase.VERIFY, count=self._spec.n)
        if not tokens:
            return None
        try:
            return with_depths(tokens, self._parents(turn, Phase.VERIFY))
        except ValueError:  # not a tree: the parents are a finding, and there is nothing to condition on
            return None

    def _slots(self, turn: Turn, phase: Phase, step: int = 0) -> dict[int, int]:
        record = turn.record
        return self._index.get((record.dp_rank, record.index, turn.rid, str(phase), step), {})

    def _chosen(self, turn: Turn, phase: Phase, slot: int, step: int = 0) -> tuple[int, ...]:
        row = self._slots(turn, phase, step).get(slot)
        ids = () if row is None else tuple(self._rows.lists["chosen_ids"][row].tolist())
        return ids if self._are_tokens(ids) else ()

    def _input_ids(self, turn: Turn, phase: Phase, step: int = 0, *, count: int) -> tuple[int, ...]:
        slots = self._slots(turn, phase, step)
        if sorted(slots) != list(range(count)):
            return ()
        ids = tuple(int(self._rows.ints["input_id"][slots[s]]) for s in range(count))
        return ids if self._are_tokens(ids) else ()

    def _parents(self, turn: Turn, phase: Phase, step: int = 0) -> tuple[int, ...]:
        slots = self._slots(turn, phase, step)
        return tuple(int(self._rows.ints["parent"][slots[s]]) for s in sorted(slots))

    def _are_tokens(self, ids: tuple[int, ...]) -> bool:
        return all(0 <= token < self._vocab for token in ids)


def _coins(data: dict[str, Any], own: dict[str, Any], n: int) -> Coins | None:
    """One request's share of an event 'coins'; None if there is not one for each node."""
    if len(own["nodes"]) != n:
        return None
    single, together = data["thresholds"]
    ratio = str(data["rule"]).startswith("chain")
    return Coins(nodes=tuple(own["nodes"]), final=own["final"], single=single, together=together, ratio=ratio)
