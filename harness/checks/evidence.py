"""What a check reads: the scenario, both traces, their alignment, and the engine rows indexed by meaning.

This module must not judge. It answers "which rows", "which token stands at index i" and "when", nothing else.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, pairwise

from harness.contract.align import Aligned, align
from harness.contract.batches import Part, Share, parts_of
from harness.contract.measured import LogitNoise, end_noise, logit_noise, target_scales
from harness.contract.rows import Rows
from harness.contract.scenario import Scenario
from harness.contract.tolerance import budget_for, tie_limit
from harness.contract.trace import EOS, Trace
from harness.contract.types import EXTENDING, Divergence, Key, Kind, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One side's rows as plain lists, for what is walked row by row, and grouped.

    groups: share -> phase -> row numbers, sorted by (step, slot). choices: what each row chose.
    """

    rows: Rows
    phase: list[str]
    ints: dict[str, list[int]]
    choices: list[list[int]]
    groups: dict[Share, dict[str, list[int]]]

    def of(self, share: Share, phase: Phase) -> list[int]:
        """Row numbers of one share and phase, by (step, slot); empty if there are none."""
        return self.groups.get(share, {}).get(phase, [])

    def each(self, *phases: Phase) -> Iterator[tuple[Share, list[int]]]:
        """Every (share, row numbers) of the given phases."""
        for share, by_phase in self.groups.items():
            for phase in phases:
                if phase in by_phase:
                    yield share, by_phase[phase]

    def chosen(self, index: int) -> list[int]:
        """What the side chose from row `index`."""
        return self.choices[index]

    def behind_prompt(self, part: Part) -> dict[int, int]:
        """Index in the text -> the token that was chosen there behind a prompt's last chunk, where that is known."""
        rows = self.of(part.share, Phase.PREFILL) if part.final and part.record.mode == "PREFILL" else []
        chosen = self.chosen(rows[-1]) if rows else []
        return {part.start + part.length: chosen[0]} if chosen else {}


def tabulate(rows: Rows) -> Table:
    """Index the rows of one side."""
    ints = {name: column.tolist() for name, column in rows.ints.items()}
    rid, phase = rows.strings["rid"].tolist(), rows.strings["phase"].tolist()
    groups: dict[Share, dict[str, list[int]]] = {}
    shares = zip(ints["dp_rank"], rid, ints["attempt"], ints["committed"], strict=True)
    for index, (share, name) in enumerate(zip(shares, phase, strict=True)):
        groups.setdefault(share, {}).setdefault(name, []).append(index)
    steps, slots = ints["step"], ints["slot"]
    for by_phase in groups.values():
        for indices in by_phase.values():
            indices.sort(key=lambda index: (steps[index], slots[index]))
    chosen = rows.lists["chosen_ids"]
    tokens, bounds = chosen.values.tolist(), pairwise(chosen.offsets.tolist())
    choices = [tokens[start:end] for start, end in bounds]
    return Table(rows=rows, phase=phase, ints=ints, choices=choices, groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything the checks of one scenario read.

    full: rid -> index -> token: prompt, then output, then tokens committed past the end of the output.
    parts: (rid, attempt) -> the request's parts in order. last: rid -> its last part in any batch.
    ended: rids with a RequestEnd, or whose tokens say that they are done. steps: (dp_rank, round) -> step.
    """

    scenario: Scenario
    engine: Trace
    reference: Trace | None
    aligned: Aligned | None
    table: Table
    full: dict[str, dict[int, int]]
    lost: dict[tuple[str, int], dict[int, int]]
    parts: dict[tuple[str, int], list[Part]]
    last: dict[str, Part]
    ended: frozenset[str]
    scheduler_steps: dict[tuple[int, int], int]
    #: what rounding does to the logits of each reference row
    logit_noise: LogitNoise
    #: how large target logits of each request are, and how far rounding moves them
    target_scales: dict[str, tuple[float, float]]
    #: the same, as the ends of the intervals show it in which something was drawn
    end_noise: float = 0.0

    def text(self, share: Share) -> Mapping[int, int]:
        """index -> token of a request as a batch of it has them, those among them that a retraction took back."""
        return ChainMap(self.lost.get(share[1:3], {}), self.full.get(share[1], {}))

    @property
    def truth(self) -> Trace:
        """The reference trace, for whoever runs only where there is one."""
        assert self.reference is not None
        return self.reference

    @property
    def paired(self) -> Aligned:
        """The same of the alignment with it."""
        assert self.aligned is not None
        return self.aligned

    def attempts(self, rid: str) -> list[list[Part]]:
        """A request's parts in batches in order of time, a list for each time it started from prefill."""
        return [parts for (one, _), parts in sorted(self.parts.items()) if one == rid]

    def parts_of(self, rid: str) -> list[Part]:
        """All of them, whatever the attempt."""
        return [part for parts in self.attempts(rid) for part in parts]

    def alike(self, one: str, other: str) -> int:
        """How many leading tokens the texts of two requests have in common, as far as they are known."""
        mine, theirs = self.full.get(one, {}), self.full.get(other, {})
        return next(at for at in count() if at not in mine or mine[at] != theirs.get(at))

    def choice_limit(self, rid: str) -> float:
        """Margins of a request's target choices that are nearer than this are ties."""
        scale, noise = self.target_scales.get(rid, (0.0, float("nan")))
        return tie_limit(scale=scale, budget=budget_for(self.dtype), noise=noise)

    @property
    def embedded(self) -> frozenset[str]:
        """Requests whose prompts came as embeddings: the target reads those, and no ids of theirs."""
        return frozenset(one.rid for one in self.scenario.requests if one.input_embeds)

    @property
    def dtype(self) -> str:
        """What the engine computed in; a device without the scenario's dtype took another."""
        return dtype_of(self.scenario, self.engine)

    def dtype_in(self, phase: Phase, side: str = "") -> str:
        """Whose rounding the rows of a phase have. A draft's one layer is handed ('hidden_in') the target's states."""
        asked, reads = self.scenario.engine, phase in EXTENDING
        of_target = side == "hidden_in" and reads and self.scenario.spec.algorithm != "MTP"
        rounded = not of_target and (reads or phase is Phase.DRAFT) and asked.draft_rounding != asked.dtype
        return asked.draft_rounding if rounded else self.dtype

    def divergence(self, index: int, *, kind: Kind, expected: object, observed: object, hint: str = "") -> Divergence:
        """An EXACT divergence at engine row `index`."""
        return Divergence(
            kind=kind,
            key=self.table.rows.key(index),
            round=self.table.ints["round"][index],
            expected=expected,
            observed=observed,
            hint=hint,
        )

    def at_request(
        self, rid: str, *, committed: int, phase: Phase, kind: Kind, expected: object, observed: object, hint: str
    ) -> Divergence:
        """An EXACT divergence of a request that has no row to point at, in the last batch that it was in."""
        last = self.last.get(rid)
        dp_rank, attempt, number = (last.record.dp_rank, last.attempt, last.record.index) if last else (0, 0, -1)
        key = Key.of((dp_rank, rid, attempt, committed), phase)
        return Divergence(kind=kind, key=key, round=number, expected=expected, observed=observed, hint=hint)


def dtype_of(scenario: Scenario, engine: Trace) -> str:
    """What the engine computed in; a device without the scenario's dtype took another."""
    return str(engine.header.get("dtype") or scenario.engine.dtype)


def gather(scenario: Scenario, engine: Trace, reference: Trace | None) -> Evidence:
    """Index both traces once, for all checks."""
    table = tabulate(engine.rows)
    parts = parts_of(engine)
    full = _full_sequences(scenario, engine, table, parts)
    noise = logit_noise(reference, budget_for(dtype_of(scenario, engine)))
    return Evidence(
        scenario=scenario,
        engine=engine,
        reference=reference,
        aligned=None if reference is None else align(engine.rows, reference.rows),
        table=table,
        full=full,
        lost=_lost(table, parts),
        parts=parts,
        last={rid: listed[-1] for (rid, _), listed in sorted(parts.items())},
        ended=frozenset(end.rid for end in engine.ends) | _complete(scenario, engine, full),
        scheduler_steps={(record.dp_rank, record.index): record.scheduler_step for record in engine.rounds},
        logit_noise=noise,
        target_scales=target_scales(reference, noise),
        end_noise=end_noise(reference),
    )


def _lost(table: Table, parts: dict[tuple[str, int], list[Part]]) -> dict[tuple[str, int], dict[int, int]]:
    """(rid, attempt) -> index -> token that it committed and that the next attempt whose prompt was read to the end
    began without: in flight when the request was retracted, which overlap scheduling allows."""
    found = dict[tuple[str, int], dict[int, int]]()
    begun = dict[str, int]()  # rid -> how many tokens that attempt began with
    for (rid, attempt), own in sorted(parts.items(), reverse=True):
        for part in own if rid in begun else ():
            for index in table.of(part.share, Phase.ACCEPT):
                if (where := part.start + 1 + table.ints["slot"][index]) >= begun[rid]:
                    found.setdefault((rid, attempt), {})[where] = table.ints["input_id"][index]
            for where, token in table.behind_prompt(part).items():
                if where >= begun[rid]:
                    found.setdefault((rid, attempt), {})[where] = token
        read = [one.start + one.length for one in own if one.record.mode == "PREFILL" and one.final]
        if read:
            begun[rid] = read[0]
        elif any(one.record.mode != "PREFILL" for one in own):
            begun.pop(rid, None)
    return found


def _complete(scenario: Scenario, engine: Trace, full: dict[str, dict[int, int]]) -> frozenset[str]:
    """Requests whose tokens reach their limit or a stop token: an engine that dies takes answers with it.

    Only of releases that leave something out once a request is done; elsewhere nothing depends on it.
    """
    found, eos = set(), engine.header.get(EOS, ())
    for request in scenario.requests if engine.header.get("truncates_at_finish") else ():
        first = len(request.input_ids)
        output = {at - first: token for at, token in full[request.rid].items() if at >= first}
        if request.max_new_tokens - 1 in output or set(output.values()) & set(request.stops(eos)):
            found.add(request.rid)
    return frozenset(found)


def _full_sequences(
    scenario: Scenario, engine: Trace, table: Table, parts: dict[tuple[str, int], list[Part]]
) -> dict[str, dict[int, int]]:
    """rid -> index -> token, from the prompt, the reported output, and what only the rows show."""
    full: dict[str, dict[int, int]] = {request.rid: dict(enumerate(request.input_ids)) for request in scenario.requests}
    for end in engine.ends:
        if end.rid in full:
            first = len(scenario.request(end.rid).input_ids)
            full[end.rid].update(enumerate(end.output_ids, first))
    for share, indices in table.each(Phase.ACCEPT):
        for index in indices:
            where = share[3] + 1 + table.ints["slot"][index]
            full.setdefault(share[1], {}).setdefault(where, table.ints["input_id"][index])
    for part in (part for listed in parts.values() for part in listed):
        for where, token in table.behind_prompt(part).items():
            full.setdefault(part.rid, {}).setdefault(where, token)
    return full
