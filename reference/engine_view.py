"""The only access of the reference to an engine's trace.

It may see which rounds happened, whether the scheduler overlapped them and when it was paused, how many rows ran once
more in them, how many came back from a host cache and when they had left, the committed tokens, what the engine chose
and fed at each step, and the uniform numbers that decided a sampled verify, and nothing else: no positions, no cache
slots, no hidden states, no logits. What is missing, incomplete or not a token id is reported as unknown (an empty tuple
or None), so a broken trace can never break the reference. This module must not judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from harness.contract.batches import COPIED, Part, copies, parts_of
from harness.contract.settings import SpecConfig
from harness.contract.trace import Trace
from harness.contract.types import Phase
from reference.draft import Forced
from reference.tree import Tree, with_depths
from reference.verify import Uniforms


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What another side did in a decode round: its proposals, its tree and its target choices [n] (None: unknown).

    uniforms: what its sampled verify was decided by, None where it was not sampled. committed: what it committed, for a
    request that samples: without uniform numbers there is nothing that decides it.
    """

    forced: Forced = field(default_factory=Forced)
    tree: Tree | None = None
    choices: tuple[int, ...] | None = None
    uniforms: Uniforms | None = None
    committed: tuple[int, ...] = ()


def _paused(trace: Trace) -> Iterator[int]:
    """Scheduler steps from each pause to what ends it."""
    begun: int | None = None
    for event in trace.events:
        if event.name == "pause":
            begun = event.scheduler_step
        elif event.name == "resume" and begun is not None:
            yield from range(begun, event.scheduler_step)
            begun = None


def _loads(trace: Trace) -> dict[tuple[int, str, int], tuple[int, ...]]:
    """(dp_rank, rid, round of its first chunk) -> when each row that was loaded for it had left the device."""
    left: dict[tuple[int, str, int], int] = {}
    loads: dict[tuple[int, str, int], tuple[int, ...]] = {}
    for event in copies(trace):
        of, to = COPIED[event.data["what"]]
        rounds = [left.get((event.dp_rank, of, slot), event.data["round"]) for slot in event.data[of]]
        if to == "device":
            key = event.dp_rank, event.data["rid"], event.data["round"]
            loads[key] = (*loads.get(key, ()), *rounds)
        else:
            left |= {(event.dp_rank, to, slot): at for slot, at in zip(event.data[to], rounds, strict=False)}
    return loads


class EngineView:
    """An engine trace, by request and round."""

    def __init__(self, trace: Trace, spec: SpecConfig, vocab: int) -> None:
        self._rows, self._spec, self._vocab = trace.rows, spec, vocab
        self.overlap = bool(trace.header.get("overlap"))
        #: scheduler steps in which nothing ran and nothing that was in flight came back
        self.paused = frozenset(_paused(trace))
        self._ended = {end.rid for end in trace.ends}
        self._uniforms = {
            (event.dp_rank, event.data["round"], rid): (event.data, own)
            for event in trace.events
            if event.name == "uniforms"
            for rid, own in event.data["uniforms"].items()
        }
        self._again = {
            (event.dp_rank, event.data["round"], event.data["step"]): int(event.data["rows"])
            for event in trace.named("again")
        }
        self._loads = _loads(trace)
        self._parts: dict[str, list[list[Part]]] = defaultdict(list)
        for (rid, _), parts in parts_of(trace).items():
            self._parts[rid].append(parts)
        self._index: dict[tuple[int, int, str, str, int], dict[int, int]] = defaultdict(dict)
        ints, strings = self._rows.ints, self._rows.strings
        columns = [ints["dp_rank"], ints["round"], strings["rid"], strings["phase"], ints["step"], ints["slot"]]
        for i, (*place, slot) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            self._index[tuple(place)][slot] = i

    def attempts(self, rid: str) -> list[list[Part]]:
        """A request's parts in batches in order of time, a list for each time it started from prefill."""
        return self._parts.get(rid, [])

    def has(self, part: Part, phase: Phase) -> bool:
        """Whether the engine has any row of this phase in this batch."""
        return bool(self._slots(part, phase))

    def is_last(self, part: Part) -> bool:
        """Whether the request left the engine in this batch, so that nobody needs proposals from it."""
        return part.rid in self._ended and part is self._parts[part.rid][-1][-1]

    def first_token(self, part: Part) -> tuple[int, ...]:
        """The token chosen after a final chunk, as a tuple of one; empty if unknown."""
        chosen = self._chosen(part, Phase.PREFILL, part.length - 1)
        return chosen if len(chosen) == 1 else ()

    def target_choice(self, part: Part) -> tuple[int, ...]:
        """The token chosen after any chunk, as a tuple of one; empty if unknown."""
        return self._chosen(part, Phase.PREFILL, part.length - 1)[:1]

    def accepted(self, part: Part) -> tuple[int, ...]:
        """The tokens a verify committed, in order; empty if unknown."""
        slots = self._slots(part, Phase.ACCEPT)
        return self._input_ids(part, Phase.ACCEPT, count=len(slots))

    def conditions(self, part: Part, before: Part | None) -> Conditions:
        """What the engine did in a decode round; `before` is the part whose last row made the first proposals."""
        spec = part.spec(self._spec)
        first = () if before is None else self.proposed(before)
        forced = Forced(first=first)
        for i in range(spec.num_steps - 1):
            chosen = tuple(self._chosen(part, Phase.DRAFT, s, i) for s in range(spec.eagle_topk))
            if all(len(ids) == spec.eagle_topk for ids in chosen):
                forced.chosen[i] = chosen
            if fed := self._input_ids(part, Phase.DRAFT, i, count=spec.eagle_topk):
                forced.input_ids[i] = fed
                forced.parents[i] = self._parents(part, Phase.DRAFT, i)
        choices = tuple(
            token for s in range(spec.num_draft_tokens) for token in self._chosen(part, Phase.VERIFY, s)[:1]
        )
        return Conditions(
            forced=forced,
            tree=self._tree(part),
            choices=choices if len(choices) == spec.num_draft_tokens else None,
            uniforms=self._numbers(part, spec.num_draft_tokens),
        )

    def _numbers(self, part: Part, n: int) -> Uniforms | None:
        said = self._uniforms.get((part.record.dp_rank, part.record.index, part.rid))
        return None if said is None else _uniforms(*said, n)

    def layer_proposals(self, part: Part) -> tuple[int | None, ...]:
        """What each of the k layers proposed in a batch that drafted by layers; None where it is unknown."""
        phase = Phase.DRAFT_PREFILL if part.record.mode == "PREFILL" else Phase.EXTEND
        found: list[int | None] = []
        for layer in range(self._spec.num_steps):
            last = max(self._slots(part, phase, layer), default=0)
            chosen = self._chosen(part, phase, last, layer)
            found.append(chosen[0] if len(chosen) == 1 else None)
        return tuple(found)

    def ran_again(self, part: Part) -> tuple[int, ...]:
        """How many rows before its first each layer ran once more in a batch; () if none did."""
        at = part.record.dp_rank, part.record.index
        counts = tuple(self._again.get((*at, layer), 0) for layer in range(self._spec.num_steps))
        return counts if any(counts) else ()

    def from_host(self, part: Part) -> tuple[int, ...]:
        """For each row before its first that a host cache brought back for it, the round before which it had left."""
        return self._loads.get((part.record.dp_rank, part.rid, part.record.index), ())

    def proposed(self, before: Part) -> tuple[int, ...]:
        """Its last draft row's t choices, or those that were handed over; empty if unknown."""
        phases = {"PREFILL": Phase.DRAFT_PREFILL, "PREBUILT": Phase.PREBUILT}
        phase = phases.get(before.record.mode, Phase.EXTEND)
        chosen = self._chosen(before, phase, max(self._slots(before, phase), default=0))
        return chosen if len(chosen) == self._spec.eagle_topk else ()

    def _tree(self, part: Part) -> Tree | None:
        tokens = self._input_ids(part, Phase.VERIFY, count=part.spec(self._spec).num_draft_tokens)
        if not tokens:
            return None
        try:
            return with_depths(tokens, self._parents(part, Phase.VERIFY))
        except ValueError:  # not a tree: the parents are a finding, and there is nothing to condition on
            return None

    def _slots(self, part: Part, phase: Phase, step: int = 0) -> dict[int, int]:
        record = part.record
        return self._index.get((record.dp_rank, record.index, part.rid, str(phase), step), {})

    def _chosen(self, part: Part, phase: Phase, slot: int, step: int = 0) -> tuple[int, ...]:
        row = self._slots(part, phase, step).get(slot)
        ids = () if row is None else tuple(self._rows.lists["chosen_ids"][row].tolist())
        return ids if self._are_tokens(ids) else ()

    def _input_ids(self, part: Part, phase: Phase, step: int = 0, *, count: int) -> tuple[int, ...]:
        slots = self._slots(part, phase, step)
        if sorted(slots) != list(range(count)):
            return ()
        ids = tuple(int(self._rows.ints["input_id"][slots[s]]) for s in range(count))
        return ids if self._are_tokens(ids) else ()

    def _parents(self, part: Part, phase: Phase, step: int = 0) -> tuple[int, ...]:
        slots = self._slots(part, phase, step)
        return tuple(int(self._rows.ints["parent"][slots[s]]) for s in sorted(slots))

    def _are_tokens(self, ids: tuple[int, ...]) -> bool:
        return all(0 <= token < self._vocab for token in ids)


def _uniforms(data: dict[str, Any], own: dict[str, Any], n: int) -> Uniforms | None:
    """One request's share of an event 'uniforms'; None if there is not a number for each node."""
    if len(own["nodes"]) != n:
        return None
    single, acc = data["thresholds"]
    rejection = str(data["rule"]).startswith("chain")
    return Uniforms(
        nodes=tuple(own["nodes"]), final=own["final"], threshold_single=single, threshold_acc=acc, rejection=rejection
    )
