"""Which token a row must carry, from the request's own text: no weights, no reference, no tolerance.

The request's sequence `full` is prompt plus output. A target row at index i reads full[i]; a draft row reads
full[i+1], the last row of a non-final chunk too, because that token already exists in the prompt. Draft steps read
what the previous draft forward proposed, and the verify reads exactly those proposals. Layers: see rotation.py.
"""

from __future__ import annotations

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.checks.rotation import last_choices, rotated_rows
from harness.contract.batches import Share
from harness.contract.types import Kind, Phase


@register(
    name="inputs",
    kinds=(Kind.TOKEN, Kind.EXTEND_INPUT),
    reads=("scenario", "engine"),
    protects="every forward reads the token that belongs there: rotated by one in the draft, proposals in the verify",
)
def check_inputs(evidence: Evidence) -> CheckResult:
    """EXTEND_INPUT for rotated draft rows, TOKEN for everything else."""
    result = CheckResult()
    _prompt_rows(evidence, result)
    rotated_rows(evidence, result)
    _proposal_rows(evidence, result)
    _committed_rows(evidence, result)
    return result


def _token(evidence: Evidence, index: int, expected: int | None, hint: str, result: CheckResult) -> None:
    """TOKEN at row `index` unless it carries `expected`; None means the text does not tell."""
    if expected is None:
        return
    result.count("tokens", 1)
    observed = evidence.table.ints["input_id"][index]
    if observed != expected:
        result.divergences.append(
            evidence.divergence(index, kind=Kind.TOKEN, check="inputs", expected=expected, observed=observed, hint=hint)
        )


def _prompt_rows(evidence: Evidence, result: CheckResult) -> None:
    slots = evidence.table.ints["slot"]
    for share, indices in evidence.table.each(Phase.PREFILL):
        for index in indices:
            expected = evidence.full.get(share[1], {}).get(share[3] + slots[index])
            _token(evidence, index, expected, "not-the-text", result)


def _proposal_rows(evidence: Evidence, result: CheckResult) -> None:
    """Draft steps and tree nodes read what the forward before them proposed."""
    first_proposals = _first_proposals(evidence)
    for share, steps in evidence.table.each(Phase.DRAFT):
        proposals = first_proposals.get(share)
        for index in steps:
            if evidence.table.ints["step"][index] == 0 and proposals is not None:
                slot = evidence.table.ints["slot"][index]
                _token(evidence, index, _at(proposals[0], slot), "not-the-first-proposal", result)
        _later_steps(evidence, steps, result)
    for share, nodes in evidence.table.each(Phase.VERIFY):
        committed = evidence.full.get(share[1], {}).get(share[3])
        for index in nodes:
            if evidence.table.ints["slot"][index] == 0:
                _token(evidence, index, committed, "root-is-not-last-committed", result)
        if evidence.scenario.spec.t == 1:
            _chain_nodes(evidence, share, nodes, first_proposals.get(share), result)


def _at(values: list[int], where: int) -> int | None:
    return values[where] if where < len(values) else None


def _first_proposals(evidence: Evidence) -> dict[Share, list[list[int]]]:
    """Share of a decode round -> what each layer proposed in the draft forwards that ended at its start."""
    found: dict[Share, list[list[int]]] = {}
    for phase in (Phase.DRAFT_PREFILL, Phase.EXTEND):
        for share, indices in evidence.table.each(phase):
            by_layer = last_choices(evidence, indices)
            if all(by_layer):
                found[*share[:3], share[3] + evidence.table.ints["slot"][indices[-1]] + 1] = by_layer
    for share, indices in evidence.table.each(Phase.PREBUILT):  # the same, as it arrived at the decode side
        if all(by_layer := last_choices(evidence, indices)):
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
        beam = 0 if evidence.scenario.spec.t == 1 else table.ints["parent"][index]
        # A probe that does not record beams leaves -1: then any beam of the step before may be the parent.
        beams = [beam] if beam >= 0 else range(evidence.scenario.spec.t)
        before = [token for one in beams for token in chosen.get((step - 1, one), [])]
        observed = table.ints["input_id"][index]
        if before:
            expected = observed if evidence.scenario.spec.t > 1 and observed in before else before[0]
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
            expected = evidence.full.get(share[1], {}).get(share[3] + 1 + slots[index])
            _token(evidence, index, expected, "output-differs", result)
