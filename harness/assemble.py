"""Builds the engine's Trace from what its ranks reported turn by turn.

It must not interpret: a value the probe did not report stays "does not apply".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.trace import Event, RequestEnd, RoundRecord, RowBuilder, Trace

Message = dict[str, Any]
Arrays = dict[str, np.ndarray]


#: In the order of their turns.
SIDES = ("prefill", "decode")
#: Events made of what a rank told about a batch.
TOLD = ("handed", "idle_state", "busy_state")


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
            "tails": self._tails,
            "handed": self._handed,
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
        out_at = {row: hidden_out + i for i, row in enumerate(message["hidden_rows"])}
        logits_at = {row: i for i, row in enumerate(message["logit_rows"])}
        row = 0
        places: list[list[int]] = []
        shares = zip(message["rids"], message["epochs"], message["committed"], message["lens"], strict=True)
        for rid, epoch, committed, length in shares:
            places.append([])
            for slot in range(length):
                at = logits_at.get(row, -1)
                places[-1].append(len(self.rows.columns["rid"]))
                self.rows.add(
                    rid=rid,
                    phase=phase,
                    slot=slot,
                    committed=committed,
                    round=round_index,
                    tick=tick,
                    dp_rank=dp_rank,
                    epoch=epoch,
                    step=step,
                    input_id=int(arrays["input_ids"][row]),
                    position=int(arrays["positions"][row]),
                    cache_slot=int(arrays["cache_slots"][row]),
                    hidden_in=hidden_in + row if hidden_in >= 0 else -1,
                    hidden_out=out_at.get(row, -1),
                    lse=float(arrays["lse"][at]) if at >= 0 else float("nan"),
                    top_ids=arrays["top_ids"][at] if at >= 0 else (),
                    top_logits=arrays["top_logits"][at] if at >= 0 else (),
                )
                if phase == "VERIFY" and at >= 0:
                    self.rows.columns["chosen_ids"][-1] = arrays["top_ids"][at][:1]
                row += 1
        self._last[(dp_rank, round_index, phase, step)] = places

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
        at = 0
        for place, own, length in zip(places, parents, message["lens"], strict=False):
            for row, parent in zip(place, own, strict=False):
                self.rows.columns["parent"][row] = parent
            for slot in range(length):
                self._accept_row(place[0], slot, int(arrays["nodes"][at]), int(arrays["tokens"][at]))
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

    def _handed(self, message: Message, arrays: Arrays, *, tick: int, dp_rank: int, tp_rank: int) -> None:
        data = {name: message[name] for name in ("round", "rids", "prefixes")}
        self.events.append(Event(name="handed", tick=tick, dp_rank=dp_rank, data=data))

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
