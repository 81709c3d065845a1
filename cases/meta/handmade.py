"""Hand-made traces: a toy engine over a table model, right by construction, for tests to break one field at a time.

The target's next token and every hidden row are formulas of (position, token); the draft agrees except where
another formula says so. Scheduling is the simplest that can be: a batch of prompt chunks under one budget, else a
batch of all running requests. Nothing here comes from SGLang or from the reference room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.contract.requests import RequestSpec
from harness.contract.rows import INT_COLUMNS, Ragged, RowBuilder, Rows
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.trace import Event, RequestEnd, RoundRecord, Trace

VOCAB = 61
WIDTH = 8
TOP = 16


def scenario(
    *,
    prompts: Iterable[int] = (7, 5, 19),
    k: int = 3,
    t: int = 1,
    n: int | None = None,
    chunk: int | None = 8,
    max_new_tokens: int = 12,
    wants: tuple[str, ...] = (),
    stop_ids: tuple[int, ...] = (),
    **engine: Any,
) -> Scenario:
    """Requests r0, r1, … with prompts of the given lengths, all submitted before the first scheduler step."""
    requests = tuple(
        RequestSpec(
            rid=f"r{number}",
            input_ids=tuple((number * 17 + index * 5 + index * index) % VOCAB for index in range(length)),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_ids,
        )
        for number, length in enumerate(prompts)
    )
    return Scenario(
        name="handmade",
        spec=SpecConfig(num_steps=k, eagle_topk=t, num_draft_tokens=n or 1 + k * t),
        engine=EngineConfig(chunked_prefill_size=chunk, **engine),
        requests=requests,
        script=(Op(kind="submit", rids=tuple(r.rid for r in requests)), Op(kind="drain", count=200)),
        wants=wants,
    )


def asking(*requests: RequestSpec, name: str = "handmade", **fields: Any) -> Scenario:
    """All requests at once, driven to their ends. fields: others of the scenario."""
    script = (Op(kind="submit", rids=tuple(one.rid for one in requests)), Op(kind="drain"))
    return Scenario(**{"name": name, "requests": requests, "script": script, **fields})


def set_on(scenario: Scenario, **engine: Any) -> Scenario:
    """The scenario with other settings of its engine."""
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=engine)})


def target(position: int, token: int) -> int:
    """The target's choice after `token` at `position`."""
    return (token * 5 + position * 3 + 7) % VOCAB


def hidden(kind: int, position: int, token: int) -> np.ndarray:
    """A state [WIDTH]: 0 target, 1 draft."""
    row: np.ndarray = np.sin(np.arange(1, WIDTH + 1) * (0.37 + kind) + position * 0.71 + token * 0.13).astype(
        np.float32
    )
    return row


def draft_choices(position: int, token: int) -> list[int]:
    """The draft's 16 best after input `token` at `position`: right first, except where (position+token) % 3 == 0."""
    best = target(position + 1, token)
    miss = (position + token) % 3 == 0
    return [(best + step) % VOCAB for step in (int(miss), 1 - int(miss), *range(2, TOP))]


def target_choices(position: int, token: int) -> list[int]:
    """The target's 16 best after `token` at `position`."""
    return [(target(position, token) + step) % VOCAB for step in range(TOP)]


LOGITS = np.asarray([8.0 - 0.5 * rank for rank in range(TOP)], dtype=np.float32)
LSE = float(np.log(np.exp(LOGITS.astype(np.float64)).sum()))
PROBS = np.exp(LOGITS - LSE).astype(np.float32)


def logit_columns(choices: list[int], count: int) -> dict[str, Any]:
    """The columns of a row that has logits."""
    return {
        "top_ids": choices,
        "top_logits": LOGITS.copy(),
        "lse": LSE,
        "chosen_ids": choices[:count],
        "chosen_probs": PROBS[:count].copy(),
    }


@dataclass(slots=True)
class _Live:
    spec: RequestSpec
    text: list[int]
    done: int = 0  # tokens with target KV
    slots: list[int] = field(default_factory=list)
    proposals: list[int] = field(default_factory=list)
    state: np.ndarray | None = None


@dataclass(slots=True)
class _Toy:
    """The toy engine: its rows, tensors, free slots, and the clock."""

    scenario: Scenario
    rows: RowBuilder = field(default_factory=RowBuilder)
    tensors: dict[str, list[np.ndarray]] = field(default_factory=dict)
    rounds: list[RoundRecord] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    scheduler_step: int = 0

    def add(
        self,
        live: _Live,
        phase: str,
        slot: int,
        committed: int,
        *,
        states: dict[str, np.ndarray] | None = None,
        **columns: Any,
    ) -> None:
        for side, row in (states or {}).items():
            kept = self.tensors.setdefault(f"{side}.{phase}", [])
            columns[side] = len(kept)
            kept.append(row)
        self.rows.add(
            rid=live.spec.rid,
            phase=phase,
            slot=slot,
            committed=committed,
            round=len(self.rounds),
            scheduler_step=self.scheduler_step,
            **columns,
        )

    def grow(self, live: _Live, length: int) -> None:
        while len(live.slots) < length:
            live.slots.append(self.free.pop(0))

    def close(self, mode: str, parts: list[tuple[_Live, int, int, bool]], forwards: dict[str, int]) -> None:
        self.rounds.append(
            RoundRecord(
                index=len(self.rounds),
                scheduler_step=self.scheduler_step,
                dp_rank=0,
                tp_rank=0,
                mode=mode,
                rids=tuple(live.spec.rid for live, *_ in parts),
                attempts=(0,) * len(parts),
                starts=tuple(start for _, start, _, _ in parts),
                lens=tuple(length for _, _, length, _ in parts),
                final=tuple(final for *_, final in parts),
                forwards=forwards,
            )
        )
        self.scheduler_step += 1

    def prefill(self, waiting: list[_Live]) -> None:
        """One batch of prompt chunks under the chunk budget."""
        budget, parts = self.scenario.engine.chunked_prefill_size or 1 << 30, []
        for live in waiting:
            length = min(budget, len(live.spec.input_ids) - live.done)
            if length:
                parts.append((live, live.done, length, live.done + length == len(live.spec.input_ids)))
                budget -= length
        for live, start, length, final in parts:
            self.grow(live, start + length)
            self._target_chunk(live, start, length)
            if final:
                live.text.append(target(start + length - 1, live.text[start + length - 1]))
            self._draft_rows(live, "DRAFT_PREFILL", start, length)
            live.done = start + length
        self.close("PREFILL", parts, {"PREFILL": 1, "DRAFT_PREFILL": 1})

    def _target_chunk(self, live: _Live, start: int, length: int) -> None:
        for slot in range(length):
            at, token = start + slot, live.text[start + slot]
            columns = logit_columns(target_choices(at, token), 1) if slot == length - 1 else {}
            states = {"hidden_out": hidden(0, at, token)}
            self.add(
                live,
                "PREFILL",
                slot,
                start,
                input_id=token,
                position=at,
                cache_slot=live.slots[at],
                states=states,
                **columns,
            )

    def _draft_rows(self, live: _Live, phase: str, start: int, length: int) -> None:
        """DRAFT_PREFILL or EXTEND rows: rotated tokens beside the target's states."""
        for slot in range(length):
            at, token = start + slot, live.text[start + slot + 1]
            states, columns = {"hidden_in": hidden(0, at, live.text[at])}, {}
            if slot == length - 1:
                choices = draft_choices(at, token)
                states["hidden_out"] = live.state = hidden(1, at, token)
                live.proposals = choices[: self.scenario.spec.eagle_topk]
                columns = logit_columns(choices, self.scenario.spec.eagle_topk)
            self.add(
                live,
                phase,
                slot,
                start,
                input_id=token,
                position=at,
                cache_slot=live.slots[at],
                states=states,
                **columns,
            )

    def decode(self, running: list[_Live]) -> None:
        """One round: k-1 draft steps, verify, accept, extend."""
        spec, parts = self.scenario.spec, []
        for live in running:
            start = live.done
            self.grow(live, start + max(spec.num_draft_tokens, (spec.num_steps - 1) * spec.eagle_topk))
            levels = self._draft_steps(live)
            committed = self._verify(live, levels)
            live.text += [token for token, _ in committed]
            for slot, (token, node) in enumerate(committed):
                self.add(live, "ACCEPT", slot, start, input_id=token, parent=node)
            self._draft_rows(live, "EXTEND", start, len(committed))
            live.done = start + len(committed)
            parts.append((live, start, len(committed), False))
        for live in running:  # only now: what one request gives back must not be another's in the same batch
            while len(live.slots) > live.done:
                self.free.insert(0, live.slots.pop())
        self.close("DECODE", parts, {"DRAFT": spec.num_steps - 1, "VERIFY": 1, "EXTEND": 1})

    def _draft_steps(self, live: _Live) -> list[list[int]]:
        """Proposals of each level 1..k; every level grows from beam 0 of the one before."""
        spec, start, levels, state = self.scenario.spec, live.done, [live.proposals], live.state
        for step in range(spec.num_steps - 1):
            for beam, token in enumerate(levels[-1]):
                at = start + step
                columns = logit_columns(draft_choices(at, token), spec.eagle_topk)
                assert state is not None
                states = {"hidden_in": state, "hidden_out": hidden(1, at, token)}
                slot = live.slots[start + step * spec.eagle_topk + beam]
                parent = -1 if step == 0 else 0
                self.add(
                    live,
                    "DRAFT",
                    beam,
                    start,
                    step=step,
                    input_id=token,
                    position=at,
                    cache_slot=slot,
                    parent=parent,
                    states=states,
                    **columns,
                )
            state = hidden(1, start + step, levels[-1][0])
            levels.append(draft_choices(start + step, levels[-1][0])[: spec.eagle_topk])
        return levels

    def _verify(self, live: _Live, levels: list[list[int]]) -> list[tuple[int, int]]:
        """VERIFY rows; returns (token, node that chose it), the bonus last."""
        start, t = live.done, self.scenario.spec.eagle_topk
        nodes = [(live.text[start], -1, 0)]
        for depth, tokens in enumerate(levels, 1):
            above = 0 if depth == 1 else 1 + (depth - 2) * t
            nodes += [(token, above, depth) for token in tokens]
        for slot, (token, parent, depth) in enumerate(nodes):
            at = start + depth
            self.add(
                live,
                "VERIFY",
                slot,
                start,
                input_id=token,
                position=at,
                parent=parent,
                cache_slot=live.slots[start + slot],
                states={"hidden_out": hidden(0, at, token)},
                **logit_columns(target_choices(at, token), 1),
            )
        committed, node = [], 0
        while True:
            token, _, depth = nodes[node]
            committed.append((target(start + depth, token), node))
            below = [s for s, (tok, parent, _) in enumerate(nodes) if parent == node and tok == committed[-1][0]]
            if not below:
                return committed
            node = below[0]

    def leave(self, live: _Live) -> bool:
        """End the request if its output is complete."""
        output = live.text[len(live.spec.input_ids) :]
        stops = [index for index, token in enumerate(output) if token in live.spec.stop_token_ids]
        keep = min([live.spec.max_new_tokens, *(index + 1 for index in stops)])
        if len(output) < keep or (not stops and len(output) < live.spec.max_new_tokens):
            return False
        reason = "stop" if stops and stops[0] + 1 == keep else "length"
        end = RequestEnd(
            rid=live.spec.rid, scheduler_step=self.scheduler_step - 1, reason=reason, output_ids=tuple(output[:keep])
        )
        self.ends.append(end)
        self.free = sorted([*self.free, *live.slots])
        return True


def build(given: Scenario) -> tuple[Trace, Trace]:
    """(engine trace, reference trace) of a scenario, in agreement and without a fault."""
    toy = _Toy(scenario=given, free=list(range(1, given.engine.max_total_tokens)))
    level = len(toy.free)
    waiting = [_Live(spec=request, text=list(request.input_ids)) for request in given.requests]
    running: list[_Live] = []
    while waiting or running:
        if waiting:
            toy.prefill(waiting)
            running += [live for live in waiting if live.done == len(live.spec.input_ids)]
            waiting = [live for live in waiting if live.done < len(live.spec.input_ids)]
        else:
            toy.decode(running)
        running = [live for live in running if not toy.leave(live)]
    total = given.engine.max_total_tokens
    pool = [
        Event(
            name="pool",
            scheduler_step=scheduler_step,
            data={"free": free, "total": total, "when": when, "evictable": 0},
        )
        for scheduler_step, free, when in ((0, level, "start"), (toy.scheduler_step, len(toy.free), "end"))
    ]
    tensors = {name: np.stack(rows) for name, rows in toy.tensors.items()}
    engine = Trace(
        side="engine",
        scenario_id=given.id,
        header={"release": "0.0.toy", "torch": "none", "device": "cpu", "hooks_missing": [], "replaced": []},
        rows=toy.rows.build(),
        rounds=tuple(toy.rounds),
        ends=tuple(toy.ends),
        events=tuple(pool),
        tensors=tensors,
    )
    return engine, _reference(engine)


def _reference(engine: Trace) -> Trace:
    """The same rows as a side that has no cache and no batches, plus the greedy run."""
    rows = copy_rows(engine.rows)
    rows.ints["cache_slot"][:] = -1
    greedy = tuple(
        Event(
            name="greedy",
            scheduler_step=0,
            data={"rid": end.rid, "output_ids": list(end.output_ids), "margins": [0.5] * len(end.output_ids)},
        )
        for end in engine.ends
    )
    tensors = {name: tensor.copy() for name, tensor in engine.tensors.items()}
    return replace(engine, side="reference", header={"side": "toy"}, rows=rows, events=greedy, tensors=tensors)


def copy_rows(rows: Rows) -> Rows:
    """An independent copy of all columns."""
    return Rows(
        ints={name: column.copy() for name, column in rows.ints.items()},
        strings={name: column.copy() for name, column in rows.strings.items()},
        floats={name: column.copy() for name, column in rows.floats.items()},
        lists={name: Ragged(column.values.copy(), column.offsets) for name, column in rows.lists.items()},
    )


def copy_trace(trace: Trace) -> Trace:
    """An independent copy that a test may break in place."""
    tensors = {name: tensor.copy() for name, tensor in trace.tensors.items()}
    return replace(trace, rows=copy_rows(trace.rows), tensors=tensors)


def take_rows(rows: Rows, order: Iterable[int]) -> Rows:
    """The rows with the given numbers, in that order: drop, repeat or shuffle."""
    at = list(order)
    return Rows(
        ints={name: column[at] for name, column in rows.ints.items()},
        strings={name: column[at] for name, column in rows.strings.items()},
        floats={name: column[at] for name, column in rows.floats.items()},
        lists={
            name: Ragged.of([column[index] for index in at], column.values.dtype) for name, column in rows.lists.items()
        },
    )


def without_rows(trace: Trace, *gone: int) -> Trace:
    """The trace without the rows of these numbers."""
    return replace(trace, rows=take_rows(trace.rows, [row for row in range(len(trace.rows)) if row not in gone]))


def with_row_again(trace: Trace, row: int) -> Trace:
    """The trace with one row once more, as its last."""
    return replace(trace, rows=take_rows(trace.rows, [*range(len(trace.rows)), row]))


def find(trace: Trace, *, phase: str, nth: int = 0, **wanted: Any) -> int:
    """Row number of the nth row of a phase whose columns have the wanted values."""
    keep = trace.rows.strings["phase"] == phase
    for name, value in wanted.items():
        keep &= (trace.rows.strings if name in trace.rows.strings else trace.rows.ints)[name] == value
    return int(np.flatnonzero(keep)[nth])


def assert_same(one: Trace, other: Trace) -> None:
    """Nothing differs, not in a bit and not in a type."""
    assert (one.side, one.scenario_id, one.header) == (other.side, other.scenario_id, other.header)
    assert (one.rounds, one.ends, one.events) == (other.rounds, other.ends, other.events)
    for name in INT_COLUMNS:
        np.testing.assert_array_equal(one.rows.ints[name], other.rows.ints[name])
        assert other.rows.ints[name].dtype == np.int64
    for name, column in one.rows.strings.items():
        assert column.tolist() == other.rows.strings[name].tolist()
    np.testing.assert_array_equal(one.rows.floats["lse"], other.rows.floats["lse"])
    for name, column in one.rows.lists.items():
        assert len(column) == len(other.rows.lists[name])
        for mine, theirs in zip(column, other.rows.lists[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor, other.tensors[name])
