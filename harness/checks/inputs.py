"""Checks input tokens against the request's own text: no weights, no reference, no tolerance.

The request's sequence `full` is prompt plus output. A target row at index i reads full[i]. A draft row is rotated: row
j of a chunk or an extend that starts at p reads full[p+1+j], and in the layer of depth i full[p+1+j+i], wherever that
token existed when the row ran: a prompt exists from the start, so the last rows of a non-final chunk read it too.
Beyond the text there is only what the layers before proposed from the chunk's last row, one token each. Draft steps
read what the previous draft forward proposed, and the verify reads exactly those proposals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Share
from harness.contract.finding_pages import issues
from harness.contract.known_issues import assumed_in
from harness.contract.types import EXTENDING, Kind, Phase

#: The known issue in which guesses stand for the next tokens of a prompt.
GUESSES = "F-010"


@register(id="inputs", kinds=(Kind.TOKEN, Kind.EXTEND_INPUT), reads=("scenario", "engine"))
def check_inputs(evidence: Evidence) -> CheckResult:
    """Every forward reads the token that belongs there: rotated by one in the draft, proposals in the verify.

    EXTEND_INPUT for rotated draft rows, TOKEN for everything else.
    """
    result = CheckResult()
    _prompt_rows(evidence, result)
    _rotated_rows(evidence, result)
    _proposal_rows(evidence, result)
    _committed_rows(evidence, result)
    return result


def _token(evidence: Evidence, index: int, expected: int | None, hint: str, result: CheckResult) -> None:
    """TOKEN at row `index` unless it carries `expected`; None means the text does not show it."""
    if expected is None:
        return
    result.count("tokens", 1)
    observed = evidence.table.ints["input_id"][index]
    if observed != expected:
        result.divergences.append(
            evidence.divergence(index, kind=Kind.TOKEN, expected=expected, observed=observed, hint=hint)
        )


def _prompt_rows(evidence: Evidence, result: CheckResult) -> None:
    """Where a prompt came as embeddings the target reads those, and no ids: its rows say what they were."""
    slots = evidence.table.ints["slot"]
    for share, indices in evidence.table.each(Phase.PREFILL):
        for index in indices if share[1] not in evidence.embedded else ():
            expected = evidence.text(share).get(share[3] + slots[index])
            _token(evidence, index, expected, "not-the-text", result)


def _proposal_rows(evidence: Evidence, result: CheckResult) -> None:
    """Draft steps and tree nodes read what the forward before them proposed."""
    first_proposals = _first_proposals(evidence)
    for share, steps in evidence.table.each(Phase.DRAFT):
        proposals = first_proposals.get(share)
        for index in steps:
            if evidence.table.ints["step"][index] == 0 and proposals is not None:
                slot = evidence.table.ints["slot"][index]
                _token(evidence, index, next(iter(proposals[0][slot:]), None), "not-the-first-proposal", result)
        _later_steps(evidence, steps, result)
    for share, nodes in evidence.table.each(Phase.VERIFY):
        committed = evidence.text(share).get(share[3])
        for index in nodes:
            if evidence.table.ints["slot"][index] == 0:
                _token(evidence, index, committed, "root-is-not-last-committed", result)
        if evidence.scenario.spec.eagle_topk == 1:
            _chain_nodes(evidence, share, nodes, first_proposals.get(share), result)


def _first_proposals(evidence: Evidence) -> dict[Share, list[list[int]]]:
    """Share of a decode round -> what each layer proposed in the draft forwards that ended at its start."""
    found: dict[Share, list[list[int]]] = {}
    for phase in EXTENDING:
        for share, indices in evidence.table.each(phase):
            by_layer = _last_choices(evidence, indices)
            if all(by_layer):
                found[*share[:3], share[3] + evidence.table.ints["slot"][indices[-1]] + 1] = by_layer
    for share, indices in evidence.table.each(Phase.PREBUILT):  # the same, as it arrived at the decode side
        if all(by_layer := _last_choices(evidence, indices)):
            found[share] = by_layer
    return found


def _later_steps(evidence: Evidence, indices: list[int], result: CheckResult) -> None:
    """Step i reads what step i-1 chose; with beams, something its parent beam chose."""
    table = evidence.table
    chosen = {(table.ints["step"][index], table.ints["slot"][index]): table.chosen(index) for index in indices}
    for index in indices:
        step = table.ints["step"][index]
        if step == 0:
            continue
        beam = 0 if evidence.scenario.spec.eagle_topk == 1 else table.ints["parent"][index]
        # A probe that does not record beams leaves -1: then any beam of the step before may be the parent.
        beams = [beam] if beam >= 0 else range(evidence.scenario.spec.eagle_topk)
        before = [token for one in beams for token in chosen.get((step - 1, one), [])]
        observed = table.ints["input_id"][index]
        if before:
            expected = observed if evidence.scenario.spec.eagle_topk > 1 and observed in before else before[0]
            _token(evidence, index, expected, "not-the-last-choice", result)


def _chain_nodes(
    evidence: Evidence, share: Share, nodes: list[int], proposals: list[list[int]] | None, result: CheckResult
) -> None:
    """t = 1: node d carries the d-th proposal of the chain."""
    table = evidence.table
    chain = dict(enumerate(proposals or [], start=1))
    for index in table.of(share, Phase.DRAFT):
        chain[table.ints["step"][index] + 2] = table.chosen(index)
    for index in nodes:
        proposed = chain.get(table.ints["slot"][index])
        if proposed:
            _token(evidence, index, proposed[0], "not-the-proposal", result)


def _committed_rows(evidence: Evidence, result: CheckResult) -> None:
    """What a verify committed is what the request reports as output."""
    slots = evidence.table.ints["slot"]
    for share, indices in evidence.table.each(Phase.ACCEPT):
        for index in indices:
            expected = evidence.text(share).get(share[3] + 1 + slots[index])
            _token(evidence, index, expected, "output-differs", result)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Rows that ran together. stop: index behind the last one. known: tokens of the text that existed then.

    proposals: what each layer chose from the last row. guess: what the target chose from it. guesses: whether that is
    taken to stand for token `stop` of a prompt that goes on.
    """

    phase: Phase
    stop: int
    known: int
    final: bool
    full: Mapping[int, int]
    proposals: list[list[int]]
    guess: list[int]
    guesses: bool

    def expected(self, at: int) -> int | None:
        """The token at index `at` of the text, as it could be known; None if the rows do not show it."""
        if self.guesses and at == self.stop:
            return self.guess[0] if self.guess else None
        if at < (self.stop if self.guesses else self.known):
            return self.full.get(at)
        layer = at - self.stop - 1
        chosen = self.proposals[layer] if 0 <= layer < len(self.proposals) else []
        return chosen[0] if len(chosen) == 1 else None


def _rotated_rows(evidence: Evidence, result: CheckResult) -> None:
    """EXTEND_INPUT for rows of DRAFT_PREFILL and EXTEND."""
    ints = evidence.table.ints
    for share, indices, window in _windows(evidence):
        for index in indices:
            at = share[3] + ints["slot"][index] + 1 + ints["step"][index]
            expected, observed = window.expected(at), ints["input_id"][index]
            result.count("extend_inputs", int(expected is not None))
            if expected not in (None, observed):
                hint = _hint(window, at, observed, layer=ints["step"][index])
                found = evidence.divergence(
                    index, kind=Kind.EXTEND_INPUT, expected=expected, observed=observed, hint=hint
                )
                result.divergences.append(found)


def _windows(evidence: Evidence) -> Iterator[tuple[Share, list[int], _Window]]:
    """Whose rows, which, and the window that they are."""
    parts = {part.share: part for listed in evidence.parts.values() for part in listed}
    ends, assumed, table = _prompt_ends(evidence), _guesses(evidence), evidence.table
    for phase in EXTENDING:
        for share, indices in table.each(phase):
            part, target = parts.get(share), table.of(share, Phase.PREFILL)
            final = part is not None and part.final
            early = phase is Phase.DRAFT_PREFILL and not final
            stop = share[3] + max(table.ints["slot"][index] for index in indices) + 1
            yield (
                share,
                indices,
                _Window(
                    phase=phase,
                    stop=stop,
                    known=max(ends.get(share[1:3], 0), stop) if early else stop + 1,
                    final=final,
                    full=evidence.text(share),
                    proposals=_last_choices(evidence, indices),
                    guess=table.chosen(target[-1])[:1] if target else [],
                    guesses=assumed and early,
                ),
            )


def _last_choices(evidence: Evidence, indices: list[int]) -> list[list[int]]:
    """What each layer chose from the last of its rows; indices sorted by (layer, slot)."""
    last = {evidence.table.ints["step"][index]: index for index in indices}
    return [evidence.table.chosen(last[layer]) for layer in sorted(last)]


def _prompt_ends(evidence: Evidence) -> dict[tuple[str, int], int]:
    """(rid, attempt) -> length of what it started from: the prompt, and after a retraction the output so far too."""
    lengths = {request.rid: len(request.input_ids) for request in evidence.scenario.requests}
    ends: dict[tuple[str, int], int] = {}
    for (rid, attempt), parts in evidence.parts.items():
        prefills = [part for part in parts if part.record.mode == "PREFILL"]
        stops = [part.start + part.length for part in prefills]
        done = [stop for stop, part in zip(stops, prefills, strict=True) if part.final]
        ends[rid, attempt] = done[-1] if done else max([lengths.get(rid, 0), *stops])
    return ends


def _guesses(evidence: Evidence) -> bool:
    """Whether the reference took guesses at a chunk's end for granted, and they can show."""
    header = {} if evidence.reference is None else evidence.reference.header
    return GUESSES in assumed_in(header) and issues()[GUESSES].shows_in(evidence.scenario.spec)


def _hint(window: _Window, at: int, observed: int, *, layer: int) -> str:
    """Names the usual ways to get a rotated row wrong."""
    behind = at - window.stop  # how far the wanted token lies behind the rows that ran
    if behind >= 0 and window.phase is Phase.DRAFT_PREFILL:
        if window.final:
            return "final-tail"
        if [observed] == window.guess:
            return "chunk-tail-target-guess"
        return "chunk-tail-proposal" if [observed] in window.proposals[:layer] else "chunk-tail"
    if observed == window.full.get(at - 1):
        return "not-rotated"
    if observed == window.full.get(at + 1):
        return "rotated-twice"
    return "tail" if behind >= 0 else "row"
