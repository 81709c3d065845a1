"""What a decode side is handed by a prefill side: nothing may change on the way, and nothing is built for nobody.

`handover` reads the engines alone: what arrives is bit for bit what was sent. `handoff` asks the reference, which knows
the tokens only: the first draft input must be what it would be had the prompt been read on the decode side itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.checks.chain import ROW_KINDS
from harness.checks.compare import Pairs, compare_choices, pairs_of
from harness.checks.evidence import Evidence
from harness.checks.numeric import compare_floats
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Part, Share
from harness.contract.trace import RoundRecord
from harness.contract.types import Divergence, Key, Kind, Phase, Policy


@register(
    name="handoff",
    kinds=ROW_KINDS,
    reads=("scenario", "engine", "reference"),
    protects="the decode side's first draft input follows from the tokens, as if the prompt had been read there",
)
def check_handoff(evidence: Evidence) -> CheckResult:
    """PREBUILT rows: TOKEN for inputs and proposals, NUMERIC or SHAPE for the state."""
    pairs, result = pairs_of(evidence, "handoff", Phase.PREBUILT), CheckResult()
    result.add(_inputs(pairs))
    result.add(compare_choices(pairs))
    result.add(compare_floats(pairs))
    return result


def _inputs(pairs: Pairs) -> CheckResult:
    """EXACT: the token beside each position, the last one being the token that the target chose on the other side."""
    result = CheckResult()
    engine, truth = pairs.mine.ints["input_id"][pairs.engine], pairs.theirs.ints["input_id"][pairs.reference]
    result.count("tokens", len(engine))
    last = pairs.mine.ints["slot"][pairs.engine] == pairs.mine.ints["committed"][pairs.engine] - 1
    for place in np.flatnonzero(engine != truth).tolist():
        hint = "bonus-token" if last[place] else "prompt-token"
        result.divergences.append(
            pairs.divergence(
                place,
                kind=Kind.TOKEN,
                expected=int(truth[place]),
                observed=int(engine[place]),
                policy=Policy.EXACT,
                hint=hint,
            )
        )
    return result


@register(
    name="handover",
    kinds=(Kind.TOKEN, Kind.NUMERIC, Kind.SHAPE),
    reads=("scenario", "engine"),
    protects="draft state arrives as it was sent and as wide as the draft needs it, and no batch is built for nobody",
)
def check_handover(evidence: Evidence) -> CheckResult:
    """SHAPE for widths and empty batches; TOKEN and NUMERIC where a row differs from what the prefill side held."""
    result = CheckResult()
    if not evidence.scenario.engine.pd:
        return result
    result.divergences += _empty(evidence)
    result.divergences += _widths(evidence, result)
    for part in _first_handed(evidence):
        for step in range(evidence.scenario.spec.layers):
            sent = _last_row(evidence, _final_chunk(evidence, part.rid), Phase.DRAFT_PREFILL, step)
            arrived = _last_row(evidence, part.share, Phase.PREBUILT, step)
            if sent is not None and arrived is not None:
                result.divergences += _changed(evidence, sent, arrived, result)
    return result


def _empty(evidence: Evidence) -> Iterator[Divergence]:
    """A PREBUILT batch without requests reached the code that builds its draft input."""
    for record in evidence.engine.rounds:
        if record.mode == "PREBUILT" and not record.rids:
            yield _of_batch(record, expected="at least one request", observed=0, hint="empty-batch-at-builder")


def _widths(evidence: Evidence, result: CheckResult) -> Iterator[Divergence]:
    """Metadata rows of either side must be as wide as the states that the draft hands on."""
    states = evidence.engine.tensors.get("hidden_out.DRAFT_PREFILL")
    first = next((record for record in evidence.engine.rounds if record.mode == "PREBUILT"), None)
    if states is None or first is None:
        return
    for side, width in sorted((evidence.engine.header.get("metadata_widths") or {}).items()):
        result.count("hidden_rows", 1)
        if width != states.shape[1]:
            yield _of_batch(first, expected=int(states.shape[1]), observed=width, hint=f"metadata-width-{side}")


def _of_batch(record: RoundRecord, *, expected: object, observed: object, hint: str) -> Divergence:
    key = Key(dp_rank=record.dp_rank, rid="", epoch=0, committed=-1, phase=Phase.PREBUILT, step=0, slot=0)
    return Divergence(
        kind=Kind.SHAPE,
        check="handover",
        key=key,
        round=record.index,
        expected=expected,
        observed=observed,
        hint=hint,
    )


def _first_handed(evidence: Evidence) -> Iterator[Part]:
    """Each request's first hand-over; a later one comes from the decode side's own memory."""
    for (_, epoch), parts in evidence.parts.items():
        if epoch == 0:
            yield from [part for part in parts if part.record.mode == "PREBUILT"][:1]


def _final_chunk(evidence: Evidence, rid: str) -> Share:
    """The share that ended the request's prompt, in its last epoch on the prefill side."""
    chunks = [
        part
        for (name, _), parts in evidence.parts.items()
        for part in parts
        if name == rid and part.record.mode == "PREFILL" and part.final
    ]
    return chunks[-1].share if chunks else (0, rid, 0, -1)


def _last_row(evidence: Evidence, share: Share, phase: Phase, step: int) -> int | None:
    rows = [row for row in evidence.table.of(share, phase) if evidence.table.ints["step"][row] == step]
    return rows[-1] if rows else None


def _changed(evidence: Evidence, sent: int, arrived: int, result: CheckResult) -> Iterator[Divergence]:
    rows = evidence.engine.rows
    pairs = [
        ("chosen_ids", Kind.TOKEN, "proposals", "other-proposals-arrived"),
        ("chosen_probs", Kind.NUMERIC, "proposals", "other-scores-arrived"),
    ]
    for column, kind, counter, hint in pairs:
        before, after = rows.lists[column][sent].tolist(), rows.lists[column][arrived].tolist()
        result.count(counter, len(before))
        if before != after:
            yield evidence.divergence(arrived, kind=kind, check="handover", expected=before, observed=after, hint=hint)
    before_state, after_state = _state(evidence, sent), _state(evidence, arrived)
    if before_state is not None and after_state is not None:
        result.count("hidden_rows", 1)
        same = before_state.shape == after_state.shape
        if not same or not np.array_equal(before_state, after_state):
            off = float(np.abs(before_state - after_state).max()) if same else after_state.shape[0]
            expected = "the row that was sent"
            yield evidence.divergence(
                arrived,
                kind=Kind.NUMERIC,
                check="handover",
                expected=expected,
                observed=off,
                hint="other-state-arrived",
            )
    if rows.ints["step"][arrived]:
        return  # layers behind the first read their own proposals there
    token, before_token = int(rows.ints["input_id"][arrived]), int(rows.ints["input_id"][sent])
    result.count("tokens", 1)
    if token != before_token:
        yield evidence.divergence(
            arrived,
            kind=Kind.TOKEN,
            check="handover",
            expected=before_token,
            observed=token,
            hint="other-token-arrived",
        )


def _state(evidence: Evidence, row: int) -> np.ndarray | None:
    phase, at = evidence.table.phase[row], evidence.table.ints["hidden_out"][row]
    states = evidence.engine.tensors.get(f"hidden_out.{phase}")
    return None if states is None or at < 0 else np.asarray(states[at])
