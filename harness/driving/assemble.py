"""Builds the engine's Trace from what its ranks reported, scheduler step by scheduler step.

It must not interpret: a value the probe did not report stays "does not apply".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.contract.rows import Block, Ragged, joined
from harness.contract.trace import Event, RequestEnd, RoundRecord, Trace
from harness.driving.row_arrays import Misfit

Message = dict[str, Any]
Arrays = dict[str, np.ndarray]

#: In the order of their steps.
SIDES = ("prefill", "decode")
#: What a rank reports about a batch that becomes an event: its name, and the keys that are kept (None: all of them).
EVENTS: dict[str, tuple[str, ...] | None] = {
    "handed": ("round", "rids", "prefixes"),
    "unbuilt": ("round", "rids"),
    "uniforms": ("round", "rule", "thresholds"),
    "masks": ("round", "phase", "rids", "attempts", "committed"),  # with bits: of each rid, hexadecimal, one a row
    "changed": ("round", "phase", "step", "rids", "attempts", "committed", "slots"),  # slots: of each rid
    "again": ("round", "step", "rows"),  # rows before the committed length that a layer ran once more
    "state": None,
    "tails": None,
    "window": None,
    "recurrent": None,
    "host": None,
}
#: Of those, the ones that do not say which rank of a tensor-parallel group reported them.
OF_NO_RANK = ("handed", "unbuilt")
#: What every forward has, an entry a row.
INPUTS = ("input_ids", "positions", "cache_slots")
#: Of a verified row, what rows of accepted tokens have as well.
OF_A_REQUEST = ("committed", "round", "scheduler_step", "dp_rank", "attempt")


@dataclass(frozen=True, slots=True)
class _From:
    """Where and when a message was reported."""

    scheduler_step: int
    dp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class _Forward:
    """Rows of a forward, and where each request's begin: ends[i - 1] up to ends[i]."""

    block: Block
    ends: np.ndarray
    lens: np.ndarray

    def last_rows(self) -> np.ndarray:
        """Of each request that has rows."""
        return self.ends[self.lens > 0] - 1


@dataclass(slots=True)
class Assembler:
    """Feed it every message in order, then `build`."""

    rounds: list[RoundRecord] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _blocks: list[Block] = field(default_factory=list)
    _hidden: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _hidden_count: dict[str, int] = field(default_factory=dict)
    #: of a pair of engines: (side, dp_rank, the engine's own number) -> number for now, and when that batch ran
    _numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _when: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    #: the newest forward of (dp_rank, round, phase, step), and the parents [b, n] of the tree of (dp_rank, round)
    _forwards: dict[tuple[int, int, str, int], _Forward] = field(default_factory=dict)
    _trees: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def feed(
        self, message: Message, arrays: Arrays, *, scheduler_step: int, dp_rank: int, tp_rank: int = 0, side: str = ""
    ) -> None:
        """One probe message of one rank; AttributeError for an unknown kind, Misfit for one that nobody can place.

        side: of a pair of engines. Their batches are numbered anew, so that a number means one batch and a request's
        later batch has a later number, however late either is reported.
        """
        if side:
            message = self._numbered(message, scheduler_step=scheduler_step, dp_rank=dp_rank, side=side)
        take = self._event if message["ev"] in EVENTS else getattr(self, f"_{message['ev']}")
        take(message, arrays, _From(scheduler_step, dp_rank, tp_rank))

    def _numbered(self, message: Message, *, scheduler_step: int, dp_rank: int, side: str) -> Message:
        """With a number for now, which `_in_order` replaces."""
        name = "index" if message["ev"] == "round" else "round"
        number = self._numbers.setdefault((side, dp_rank, message[name]), len(self._numbers))
        self._when.setdefault(number, (scheduler_step, SIDES.index(side), message[name]))
        return {**message, name: number, "side": side}

    def _in_order(self) -> None:
        """Number the batches of both sides as they ran: by step, the prefill side first."""
        final = {number: place for place, number in enumerate(sorted(self._when, key=self._when.__getitem__))}
        for block in self._blocks:
            column = block.column("round")
            column[:] = [final[number] for number in column.tolist()]
        self.rounds = sorted((replace(one, index=final[one.index]) for one in self.rounds), key=lambda one: one.index)
        of_batches = {*EVENTS, "idle_state", "busy_state"}
        self.events = [
            replace(event, data={**event.data, "round": final[event.data["round"]]})
            if event.name in of_batches
            else event
            for event in self.events
        ]

    def _forward(self, message: Message, arrays: Arrays, place: _From) -> None:
        phase, lens = message["phase"], np.asarray(message["lens"], dtype=np.int64)
        count, ends = int(lens.sum()), np.cumsum(lens)
        for name in INPUTS:
            if len(arrays[name]) != count:
                raise Misfit(f"{len(arrays[name])} {name} in {phase} of requests that have {count} rows")
        hidden_in = self.keep(f"hidden_in.{phase}", arrays.get("hidden_in"))
        hidden_out = self.keep(f"hidden_out.{phase}", arrays.get("hidden_out"))
        block = Block.of(
            phase,
            np.repeat(np.asarray(message["rids"], dtype=object), lens),
            attempt=np.repeat(message["attempts"], lens),
            committed=np.repeat(message["committed"], lens),
            slot=np.arange(count) - np.repeat(ends - lens, lens),
            step=message["step"],
            round=message["round"],
            scheduler_step=place.scheduler_step,
            dp_rank=place.dp_rank,
            input_id=arrays["input_ids"],
            position=arrays["positions"],
            cache_slot=arrays["cache_slots"],
            hidden_in=np.arange(hidden_in, hidden_in + count) if hidden_in >= 0 else -1,
        )
        if hidden_out >= 0:
            block.column("hidden_out")[arrays["hidden_rows"]] = hidden_out + np.arange(len(arrays["hidden_rows"]))
        if "lse" in arrays:
            rows = arrays["logit_rows"]
            block.lse[rows] = arrays["lse"]
            block.lists["top_ids"], block.lists["top_logits"] = (rows, arrays["top_ids"]), (rows, arrays["top_logits"])
            if phase == "VERIFY":
                block.lists["chosen_ids"] = (rows, arrays["top_ids"][:, :1])
        if "read_shared" in arrays:
            block.column("slots_shared")[:] = arrays["read_shared"]
            block.lists["slots_read"] = Ragged(arrays["read_slots"], arrays["read_offsets"])
        self._blocks.append(block)
        self._forwards[place.dp_rank, message["round"], phase, message["step"]] = _Forward(block, ends, lens)

    def keep(self, name: str, array: np.ndarray | None) -> int:
        """Append rows to a side tensor; returns the number of its first row, -1 if there is none."""
        if array is None or not len(array):
            return -1
        start = self._hidden_count.get(name, 0)
        self._hidden.setdefault(name, []).append(array)
        self._hidden_count[name] = start + len(array)
        return start

    def _chosen(self, message: Message, arrays: Arrays, place: _From) -> None:
        """Every row of a draft step chooses; of other forwards the last row of each request."""
        forward = self._forwards.get((place.dp_rank, message["round"], message["phase"], message["step"]))
        if forward is None or not len(forward.block):
            return  # a choice whose forward never ran: its missing rows are the finding
        rows = np.arange(len(forward.block)) if message["phase"] == "DRAFT" else forward.last_rows()
        if not len(rows) == len(arrays["ids"]) == len(arrays["probs"]):
            raise Misfit(f"{len(arrays['ids'])} choices of {len(rows)} rows in {message['phase']}")
        forward.block.lists["chosen_ids"] = (rows, arrays["ids"])
        forward.block.lists["chosen_probs"] = (rows, arrays["probs"])

    def _tree(self, message: Message, arrays: Arrays, place: _From) -> None:
        self._trees[place.dp_rank, message["round"]] = arrays["parents"]

    def _accept(self, message: Message, arrays: Arrays, place: _From) -> None:
        """Parents for the rows that were verified, and rows for what was committed of them."""
        verified = self._forwards.get((place.dp_rank, message["round"], "VERIFY", 0))
        parents = self._trees.get((place.dp_rank, message["round"]))
        if verified is None or parents is None:
            return
        starts = np.concatenate([[0], verified.ends[:-1]])[: len(parents)]
        for start, end, own in zip(starts, verified.ends, parents, strict=False):
            verified.block.column("parent")[start:end] = own[: end - start]
        lens = np.asarray(message["lens"], dtype=np.int64)[: len(starts)]
        starts, count = starts[: len(lens)], int(lens.sum())
        self._blocks.append(
            Block.of(
                "ACCEPT",
                np.repeat(verified.block.rid[starts], lens),
                slot=np.arange(count) - np.repeat(np.cumsum(lens) - lens, lens),
                step=0,
                input_id=arrays["tokens"][:count],
                parent=arrays["nodes"][:count],
                **{name: np.repeat(verified.block.column(name)[starts], lens) for name in OF_A_REQUEST},
            )
        )

    def _event(self, message: Message, arrays: Arrays, place: _From) -> None:
        """What a rank reported beside rows."""
        name, kept = message["ev"], EVENTS[message["ev"]]
        data = {key: value for key, value in message.items() if key in kept} if kept else dict(message)
        data.pop("ev", None)
        if name == "state":
            name = "idle_state" if data.pop("idle") else "busy_state"
        if name == "uniforms":
            uniforms = zip(message["rids"], arrays["nodes"].tolist(), arrays["final"].tolist(), strict=True)
            data["uniforms"] = {rid: {"nodes": nodes, "final": final} for rid, nodes, final in uniforms}
        if name == "masks":
            data["bits"] = [[row.tobytes().hex() for row in rows] for rows in arrays["bits"].astype("<i4")]
        data |= {} if name in OF_NO_RANK else {"tp_rank": place.tp_rank}
        self.events.append(Event(name=name, scheduler_step=place.scheduler_step, dp_rank=place.dp_rank, data=data))

    def _round(self, message: Message, arrays: Arrays, place: _From) -> None:
        fields: dict[str, Any] = {
            name: message[name] for name in ("index", "mode", "side", "num_steps") if name in message
        }
        fields |= {name: tuple(message[name]) for name in ("rids", "attempts", "starts", "lens", "final")}
        fields |= {name: dict(message.get(name, {})) for name in ("forwards", "graphs")}
        self.rounds.append(
            RoundRecord(scheduler_step=place.scheduler_step, dp_rank=place.dp_rank, tp_rank=place.tp_rank, **fields)
        )

    def build(self, *, scenario_id: str, header: dict[str, Any]) -> Trace:
        if self._when:
            self._in_order()
        return Trace(
            side="engine",
            scenario_id=scenario_id,
            header=header,
            rows=joined(self._blocks),
            rounds=tuple(self.rounds),
            ends=tuple(self.ends),
            events=tuple(self.events),
            tensors={name: np.concatenate(parts) for name, parts in self._hidden.items()},
        )
