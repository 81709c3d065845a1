"""Builds the engine's Trace from what its ranks reported turn by turn.

It must not interpret: a value the probe did not report stays "does not apply".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from harness.contract.trace import Event, RequestEnd, RoundRecord, RowBuilder, Trace

Message = dict[str, Any]
Arrays = dict[str, np.ndarray]


#: In the order of their turns.
SIDES = ("prefill", "decode")
#: Events made of what a rank told about a batch.
TOLD = ("handed", "unbuilt", "idle_state", "busy_state", "coins", "tails", "again")

#: Of those, the ones that say nothing but this.
PLAIN = {"handed": ("round", "rids", "prefixes"), "unbuilt": ("round", "rids")}


@dataclass(slots=True)
class Assembler:
    """Feed it every message in order, then `build`."""

    rows: RowBuilder = field(default_factory=RowBuilder)
    rounds: list[RoundRecord] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _hidden: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _hidden_count: dict[str, int] = field(default_factory=dict)
    #: of a pair of engines: (side, dp_rank, the engine's own number) -> number for now, and when that batch ran
    _numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _when: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    _last: dict[tuple[int, int, str, int], list[list[int]]] = field(default_factory=dict)

    def feed(
        self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int = 0, side: str = ""
    ) -> None:
        """One probe message of one rank; KeyError for an unknown kind.

        side: of a pair of engines. Their batches are numbered anew, so that a number means one batch and a request's
        later batch has a later number, however late either is heard of.
        """
        if side:
            message = self._numbered(message, tick=tick, dp_rank=dp_rank, side=side)
        handler = {
            "forward": self._forward,
            "chosen": self._chosen,
            "tree": self._tree,
            "accept": self._accept,
            "round": self._round,
            "state": self._state,
            "coins": self._coins,
            "again": self._again,
            "tails": self._tails,
            **dict.fromkeys(PLAIN, self._plain),
        }[message["ev"]]
        handler(message, arrays, tick=tick, dp_rank=dp_rank, tp_rank=tp_rank)

    def _numbered(self, message: Message, *, tick: int, dp_rank: int, side: str) -> Message:
        """With a number for now, which `_in_order` replaces."""
        name = "index" if message["ev"] == "round" else "round"
        number = self._numbers.setdefault((side, dp_rank, message[name]), len(self._numbers))
        self._when.setdefault(number, (tick, SIDES.index(side), message[name]))
        return {**message, name: number, "side": side}

    def _in_order(self) -> None:
        """Number the batches of both sides as they ran: by turn, the prefill side first."""
        final = {number: place for place, number in enumerate(sorted(self._when, key=self._when.__getitem__))}
        self.rows.columns["round"] = [final[number] for number in self.rows.columns["round"]]
        self.rounds = sorted((replace(one, index=final[one.index]) for one in self.rounds), key=lambda one: one.index)
        self.events = [
            replace(event, data={**event.data, "round": final[event.data["round"]]}) if event.name in TOLD else event
            for event in self.events
        ]

    def _forward(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        phase, step, round_index = message["phase"], message["step"], message["round"]
        hidden_in = self._keep(f"hidden_in.{phase}", arrays.get("hidden_in"))
        hidden_out = self._keep(f"hidden_out.{phase}", arrays.get("hidden_out"))
        lens = message["lens"]
        count = sum(lens)
        first = len(self.rows.columns["rid"])
        out_at = [-1] * count
        for i, row in enumerate(message["hidden_rows"]):
            out_at[row] = hidden_out + i
        lse, top_ids, top_logits, chosen = [float("nan")] * count, [()] * count, [()] * count, [()] * count
        for at, row in enumerate(message["logit_rows"]):
            lse[row] = arrays["lse"][at]
            top_ids[row], top_logits[row] = arrays["top_ids"][at], arrays["top_logits"][at]
            if phase == "VERIFY":
                chosen[row] = arrays["top_ids"][at][:1]
        self.rows.extend(
            count,
            rid=_each(message["rids"], lens),
            epoch=_each(message["epochs"], lens),
            committed=_each(message["committed"], lens),
            slot=[slot for length in lens for slot in range(length)],
            phase=[phase] * count,
            step=[step] * count,
            round=[round_index] * count,
            tick=[tick] * count,
            dp_rank=[dp_rank] * count,
            input_id=arrays["input_ids"].tolist(),
            position=arrays["positions"].tolist(),
            cache_slot=arrays["cache_slots"].tolist(),
            hidden_in=list(range(hidden_in, hidden_in + count)) if hidden_in >= 0 else [-1] * count,
            hidden_out=out_at,
            lse=lse,
            top_ids=top_ids,
            top_logits=top_logits,
            chosen_ids=chosen,
        )
        ends = np.cumsum([first, *lens]).tolist()
        self._last[(dp_rank, round_index, phase, step)] = [list(range(start, end)) for start, end in pairwise(ends)]

    def _keep(self, name: str, array: np.ndarray | None) -> int:
        """Append rows to a side tensor; returns the number of its first row, -1 if there is none."""
        if array is None or not len(array):
            return -1
        start = self._hidden_count.get(name, 0)
        self._hidden.setdefault(name, []).append(array)
        self._hidden_count[name] = start + len(array)
        return start

    def _chosen(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        places = self._last.get((dp_rank, message["round"], message["phase"], message["step"]), [])
        if message["phase"] == "DRAFT":
            rows = [row for place in places for row in place]
        else:
            rows = [place[-1] for place in places if place]
        if not rows:
            return  # a choice whose forward never ran: its missing rows are the finding
        for row, ids, probs in zip(rows, arrays["ids"], arrays["probs"], strict=True):
            self.rows.columns["chosen_ids"][row] = ids
            self.rows.columns["chosen_probs"][row] = probs

    def _tree(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        self._last[(dp_rank, message["round"], "TREE", 0)] = arrays["parents"].tolist()

    def _accept(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        round_index = message["round"]
        places = self._last.get((dp_rank, round_index, "VERIFY", 0), [])
        parents = self._last.get((dp_rank, round_index, "TREE", 0), [])
        at, nodes, tokens = 0, arrays["nodes"].tolist(), arrays["tokens"].tolist()
        for place, own, length in zip(places, parents, message["lens"], strict=False):
            for row, parent in zip(place, own, strict=False):
                self.rows.columns["parent"][row] = parent
            for slot in range(length):
                self._accept_row(place[0], slot, nodes[at], tokens[at])
                at += 1

    def _accept_row(self, verify_row: int, slot: int, node: int, token: int) -> None:
        columns = self.rows.columns
        same = {name: columns[name][verify_row] for name in ("rid", "committed", "round", "tick", "dp_rank", "epoch")}
        self.rows.add(phase="ACCEPT", slot=slot, input_id=token, parent=node, **same)

    def _state(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        name = "idle_state" if message["idle"] else "busy_state"
        data = {key: value for key, value in message.items() if key not in ("ev", "idle")} | {"tp_rank": tp_rank}
        self.events.append(Event(name=name, tick=tick, dp_rank=dp_rank, data=data))

    def _tails(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        data = {name: value for name, value in message.items() if name != "ev"} | {"tp_rank": tp_rank}
        self.events.append(Event(name="tails", tick=tick, dp_rank=dp_rank, data=data))

    def _coins(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        coins = {
            rid: {"nodes": nodes.tolist(), "final": float(final)}
            for rid, nodes, final in zip(message["rids"], arrays["nodes"], arrays["final"], strict=True)
        }
        told = {name: message[name] for name in ("round", "rule", "thresholds")}
        data = {**told, "coins": coins, "tp_rank": tp_rank}
        self.events.append(Event(name="coins", tick=tick, dp_rank=dp_rank, data=data))

    def _again(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        """Rows before the committed length that a layer ran once more; told by the first rank of a group."""
        data = {name: message[name] for name in ("round", "step", "rows")} | {"tp_rank": tp_rank}
        self.events.append(Event(name="again", tick=tick, dp_rank=dp_rank, data=data))

    def _plain(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        """An event that is the message itself, without arrays."""
        data = {name: message[name] for name in PLAIN[message["ev"]]}
        self.events.append(Event(name=message["ev"], tick=tick, dp_rank=dp_rank, data=data))

    def _round(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        self.rounds.append(
            RoundRecord(
                index=message["index"],
                tick=tick,
                dp_rank=dp_rank,
                tp_rank=tp_rank,
                mode=message["mode"],
                rids=tuple(message["rids"]),
                epochs=tuple(message["epochs"]),
                starts=tuple(message["starts"]),
                lens=tuple(message["lens"]),
                final=tuple(message["final"]),
                forwards=dict(message["forwards"]),
                graphs=dict(message.get("graphs", {})),
                side=message.get("side", ""),
            )
        )

    def build(self, *, scenario_id: str, header: dict[str, Any]) -> Trace:
        if self._when:
            self._in_order()
        return Trace(
            side="engine",
            scenario_id=scenario_id,
            header=header,
            rows=self.rows.build(),
            rounds=tuple(self.rounds),
            ends=tuple(self.ends),
            events=tuple(self.events),
            tensors={name: np.concatenate(parts) for name, parts in self._hidden.items()},
        )


def _each(values: Sequence[Any], lens: Sequence[int]) -> list[Any]:
    """A request's value for each of its rows."""
    return [value for value, length in zip(values, lens, strict=True) for _ in range(length)]
