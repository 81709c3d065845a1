"""Forwards against the reference, row by row: inputs, positions, parents, states, logits and proposals of each phase.

The reference is conditioned: it starts each round from what the engine had committed and takes over the engine's
choices, so one wrong step is one finding and not a cascade. A wrong width of states is SHAPE; of an idle rank, which
has no rows, see `ranks`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.checks.compare import Pairs, compare_choices, compare_integers, pairs_of
from harness.checks.evidence import Evidence
from harness.checks.numeric import compare_floats
from harness.checks.registry import CheckResult, register
from harness.contract.types import EXTENDING, TARGET, Divergence, Kind, Phase, Policy

#: Every kind the column-by-column comparison can raise.
ROW_KINDS = (Kind.TOKEN, Kind.POSITION, Kind.PARENT, Kind.EXTEND_INPUT, Kind.NUMERIC, Kind.SHAPE)
READS = ("scenario", "engine", "reference")


@register(id="chain", kinds=ROW_KINDS, reads=READS)
def check_draft_steps(evidence: Evidence) -> CheckResult:
    """Each draft step computes and proposes what the definition says, whatever the batch around it.

    DRAFT rows.
    """
    return _compare(evidence, Phase.DRAFT)


@register(id="extend", kinds=ROW_KINDS, reads=READS)
def check_draft_extends(evidence: Evidence) -> CheckResult:
    """The draft sees the right token beside the right target state when it catches up with the target.

    DRAFT_PREFILL and EXTEND rows: the draft over prompt chunks and over committed tokens.
    """
    return _compare(evidence, *EXTENDING)


@register(id="verify", kinds=ROW_KINDS, reads=READS)
def check_target(evidence: Evidence) -> CheckResult:
    """The target sees the same tree and makes the same choice at each node as it would alone.

    PREFILL and VERIFY rows.
    """
    return _compare(evidence, *TARGET)


def _compare(evidence: Evidence, *phases: Phase) -> CheckResult:
    """All columns of the aligned rows of some phases."""
    result = CheckResult()
    for phase in phases:
        pairs = pairs_of(evidence, phase)
        result.add(compare_integers(pairs), compare_choices(pairs), compare_floats(pairs))
    return result


@register(id="handoff", kinds=ROW_KINDS, reads=READS)
def check_draft_input_after_transfer(evidence: Evidence) -> CheckResult:
    """The decode side's first draft input follows from the tokens, as if the prompt had been read there.

    PREBUILT rows: TOKEN for inputs and proposals, NUMERIC or SHAPE for the state.
    """
    pairs, result = pairs_of(evidence, Phase.PREBUILT), CheckResult()
    result.add(_transferred_inputs(pairs), compare_choices(pairs), compare_floats(pairs))
    result.divergences = [
        replace(found, hint="hidden_out-as-handed-over") if _is_as_handed_over(evidence, found) else found
        for found in result.divergences
    ]
    return result


def _is_as_handed_over(evidence: Evidence, found: Divergence) -> bool:
    """Whether a wrong state is, bit by bit, the one that the request first arrived with."""
    if found.hint != "hidden_out-off":
        return False
    key, ints = found.key, evidence.table.ints
    states = {
        share[2]: ints["hidden_out"][row]
        for share, rows in evidence.table.each(Phase.PREBUILT)
        for row in rows
        if share[:2] == (key.dp_rank, key.rid) and ints["step"][row] == key.step and ints["hidden_out"][row] >= 0
    }
    held, first = evidence.engine.tensors["hidden_out.PREBUILT"], min(states)
    return first < key.attempt and np.array_equal(held[states[first]], held[states[key.attempt]])


def _transferred_inputs(pairs: Pairs) -> CheckResult:
    """EXACT: the token beside each position, the last one being the token that the target chose on the other side."""
    result = CheckResult()
    engine, truth = pairs.mine.ints["input_id"][pairs.engine], pairs.theirs.ints["input_id"][pairs.reference]
    result.count("tokens", len(engine))
    last = pairs.mine.ints["slot"][pairs.engine] == pairs.mine.ints["committed"][pairs.engine] - 1
    result.divergences += [
        pairs.divergence(
            place,
            kind=Kind.TOKEN,
            expected=int(truth[place]),
            observed=int(engine[place]),
            policy=Policy.EXACT,
            hint="bonus-token" if last[place] else "prompt-token",
        )
        for place in np.flatnonzero(engine != truth).tolist()
    ]
    return result
