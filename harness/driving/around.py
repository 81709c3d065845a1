"""What is known of the place at which a finding begins: what goes into its row and is right, and what came before.

Facts of a trace alone; whoever reads them decides what they mean. No verdict depends on this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.contract.batches import Part, parts_of
from harness.contract.rows import Rows
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Key, Kind
from harness.contract.words import counted

#: Key of a trace's header: the classes of SGLang's models, by `target` and `draft`, each as module:class.
MODELS = "models"
#: How hints begin of what an output head makes of a state, and of a choice among that.
HEAD, CHOICE = ("logits-", "lse-", "scores-"), "choice-"
#: Two logits are the same where they differ by less than this share of the greatest.
SAME = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """models: see MODELS. right: what goes into the row, was compared and agrees; state: of logits and choices that are
    off, whether the state that they are made of agrees; logits: of choices, whether their logits do.

    prefix: leading rows of KV that its prompt took from the prefix cache; prefix_of: the request that wrote them.
    chunk: (first prompt row, row behind the last, whether it is the last chunk) of a prefill. attempt: how often the
    request was taken back. handed_over: whether its KV came from a prefill side. weights: what was loaded last before,
    in words; elsewhere: the logits of the row are the right ones, at other tokens. beside: who shared the batch.
    graph: size of the CUDA graph that ran it, 0 for none.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    right: tuple[str, ...] = ()
    state: bool = False
    logits: bool = False
    prefix: int = 0
    prefix_of: str = ""
    chunk: tuple[int, int, bool] | None = None
    attempt: int = 0
    handed_over: bool = False
    weights: str = ""
    elsewhere: bool = False
    beside: tuple[str, ...] = ()
    graph: int = 0

    @property
    def facts(self) -> list[str]:
        """Each in words."""
        found = [f"{_listed(self.right)} of this row {'are' if len(self.right) > 1 else 'is'} right"] * bool(self.right)
        found += ["so is the state that it makes logits of"] * self.state
        found += ["so are the logits that it chooses by"] * self.logits
        found += ["its logits are the right ones, at other tokens"] * self.elsewhere
        found += [f"weights had changed ({self.weights})"] * bool(self.weights)
        found += [f"it was taken back {counted(self.attempt, 'time')} and has resumed"] * bool(self.attempt)
        found += ["its KV was handed over by the prefill side"] * self.handed_over
        if self.prefix:
            wrote = f", which request {self.prefix_of} wrote" if self.prefix_of else ""
            found.append(f"{counted(self.prefix, 'leading row')} of its KV came from the prefix cache{wrote}")
        if self.chunk is not None:
            first, end, last = self.chunk
            whole = " (its only chunk)" if last and first == 0 else " (the last chunk)" if last else ""
            found.append(f"prompt rows {first} to {end - 1}{whole or ', and the prompt goes on'}")
        found += [f"in a CUDA graph for {self.graph}"] * bool(self.graph)
        return found + ([f"in one batch with {_listed(self.beside)}"] if self.beside else [])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1] if names else ""


def around(
    found: Divergence, scenario: Scenario, engine: Trace, reference: Trace | None, divergences: Iterable[Divergence]
) -> Around:
    """Of the first divergence of a finding; divergences: all of the scenario."""
    key, models = found.key, engine.header.get(MODELS) or {}
    if not key.rid or key.committed < 0:
        return Around(models=models)
    parts = parts_of(engine)
    mine = parts.get((key.rid, key.attempt), [])
    part = next((one for one in mine if one.record.index == found.round and one.record.dp_rank == key.dp_rank), None)
    first = mine[0] if mine else None
    prefix = first.start if first is not None and first.record.mode == "PREFILL" else 0
    row, truth = _row(engine.rows, key), None if reference is None else _row(reference.rows, key)
    right, state, logits, elsewhere = tuple[str, ...](), False, False, False
    if reference is not None and row is not None and truth is not None:
        wrong = {_what(one) for one in divergences if one.key == key}
        went, came = _agreeing(engine, reference, row, truth)
        right = tuple(name for name in went if name not in wrong)
        state = came and "state out" not in wrong and found.hint.startswith((*HEAD, CHOICE))
        logits = (
            found.hint.startswith(CHOICE) and "logits" not in wrong and bool(len(engine.rows.lists["top_logits"][row]))
        )
        elsewhere = _elsewhere(engine.rows, reference.rows, row, truth)
    return Around(
        models=models,
        right=right,
        state=state,
        logits=logits and not elsewhere,
        elsewhere=elsewhere,
        prefix=prefix,
        prefix_of=_writer(scenario.sampled, engine, parts, key.rid, first) if prefix and first is not None else "",
        chunk=_chunk(part),
        attempt=key.attempt,
        handed_over=any(one.record.mode == "PREBUILT" for one in mine),
        weights=_weights(engine, part),
        beside=() if part is None else tuple(rid for rid in part.record.rids if rid != key.rid),
        graph=0 if part is None else part.record.graphs.get(str(key.phase), 0),
    )


def _row(rows: Rows, key: Key) -> int | None:
    """The row of this key."""
    here = np.ones(len(rows), dtype=bool)
    for name in ("dp_rank", "attempt", "committed", "step", "slot"):
        here &= rows.ints[name] == getattr(key, name)
    for name in ("rid", "phase"):
        here &= rows.strings[name] == getattr(key, name)
    at = np.flatnonzero(here)
    return int(at[0]) if len(at) else None


def _what(found: Divergence) -> str:
    """Which part of its row a divergence is about, by the names of `right`."""
    if found.kind is Kind.NUMERIC:
        names = {"hidden_in-": "state", "hidden_out-": "state out", **dict.fromkeys(HEAD, "logits")}
        return next((name for begin, name in names.items() if found.hint.startswith(begin)), "")
    inputs = found.kind in (Kind.EXTEND_INPUT, Kind.TOKEN) and not found.hint.startswith("choice")
    return {Kind.POSITION: "position", Kind.CACHE_SLOT: "KV slots read"}.get(found.kind, "input token" * inputs)


def _agreeing(engine: Trace, reference: Trace, row: int, truth: int) -> tuple[list[str], bool]:
    """(What goes into a row and was compared, without what differs in integers; whether what came out was compared)."""
    mine, theirs = engine.rows.ints, reference.rows.ints
    names = (("input token", "input_id"), ("position", "position"))
    went = [name for name, column in names if mine[column][row] == theirs[column][truth] >= 0]
    both = {side: bool(min(mine[side][row], theirs[side][truth]) >= 0) for side in ("hidden_in", "hidden_out")}
    went += ["state"] * both["hidden_in"] + ["KV slots read"] * bool(mine["slots_shared"][row] >= 0)
    return went, both["hidden_out"]


def _elsewhere(mine: Rows, theirs: Rows, row: int, truth: int) -> bool:
    """Whether both rows have the same greatest logits and these belong to other tokens."""
    ours, expected = mine.lists["top_logits"][row], theirs.lists["top_logits"][truth]
    count = min(len(ours), len(expected))
    if not count or set(mine.lists["top_ids"][row].tolist()) == set(theirs.lists["top_ids"][truth].tolist()):
        return False
    ours, expected = -np.sort(-ours)[:count], -np.sort(-expected)[:count]
    return bool(np.abs(ours - expected).max() < SAME * np.abs(expected).max())


def _chunk(part: Part | None) -> tuple[int, int, bool] | None:
    if part is None or part.record.mode != "PREFILL":
        return None
    return part.start, part.start + part.length, part.final


def _weights(engine: Trace, part: Part | None) -> str:
    """What was loaded last before a batch, in words."""
    updates = [one for one in engine.named("update") if one.data["success"]]
    past = [one for one in updates if part is not None and one.scheduler_step <= part.record.scheduler_step]
    if not past:
        return ""
    last = past[-1]
    return f"{last.data.get('selector', 'target')} of {last.data['what']}, scheduler step {last.scheduler_step}"


def _writer(
    scenario: Scenario, engine: Trace, parts: Mapping[tuple[str, int], list[Part]], rid: str, first: Part
) -> str:
    """The request that had a prompt's cached tokens first; empty where none is known to, or it was itself."""
    ends = {end.rid: end.output_ids for end in engine.ends}
    texts = {one.rid: (*one.input_ids, *ends.get(one.rid, ())) for one in scenario.requests}
    wanted = texts[rid][: first.start]
    begun = {who: listed[0].record.index for (who, _), listed in sorted(parts.items(), reverse=True)}
    able = [
        who
        for who, text in texts.items()
        if who != rid and begun.get(who, first.record.index) < first.record.index and text[: first.start] == wanted
    ]
    return min(able, key=lambda who: begun[who], default="")
