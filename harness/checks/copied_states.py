"""Checks that copies arrive bit by bit: states between draft steps, and draft state transferred to a decode side.

What a step reads is compared with the reference too, within a budget; but in half precision that budget lets a state
pass that went through a coarser dtype on its way. What the engine itself handed on is known exactly, so no budget is
needed. In float32 the budget is far below what any narrower dtype does to a state, so draft steps are not asked there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Part, Share
from harness.contract.trace import RoundRecord
from harness.contract.types import Divergence, Key, Kind, Phase

NARROW = ("float16", "bfloat16")


@register(id="states", kinds=(Kind.NUMERIC,), reads=("scenario", "engine"))
def check_states_between_steps(evidence: Evidence) -> CheckResult:
    """A draft step reads exactly the state that was left for it, also where half precision would hide a change.

    NUMERIC for rows of a draft step whose state is not, bit by bit, the one that was handed on.
    """
    result = CheckResult()
    read = evidence.engine.tensors.get("hidden_in.DRAFT")
    if read is None or evidence.dtype not in NARROW:
        return result
    ints = evidence.table.ints
    for row, phase, source in _between_steps(evidence):
        left = evidence.engine.tensors.get(f"hidden_out.{phase}")
        mine, theirs = ints["hidden_in"][row], ints["hidden_out"][source]
        if left is None or mine < 0 or theirs < 0 or left.shape[1] != read.shape[1]:
            continue  # what is not there, or has another width, the comparison with the reference names
        off = np.flatnonzero(read[mine] != left[theirs])
        if len(off):
            greatest = float(np.abs(read[mine] - left[theirs]).max())
            observed = {"greatest_abs": greatest, "at": int(off[0]), "mismatched": len(off), "of": read.shape[1]}
            expected = f"the state that {phase} left, bit by bit"
            result.divergences.append(
                evidence.divergence(row, kind=Kind.NUMERIC, expected=expected, observed=observed, hint="hidden_in-off")
            )
    return result


def _between_steps(evidence: Evidence) -> Iterator[tuple[int, Phase, int]]:
    """(draft row, phase and row that left its state): steps of a chain, and every beam's first step."""
    table, chain = evidence.table, evidence.scenario.spec.eagle_topk == 1
    for parts in evidence.parts.values():
        for before, part in pairwise(parts):
            if part.record.mode != "DECODE":
                continue
            rows = table.of(part.share, Phase.DRAFT)
            # What another engine sent is asked for below; its key is the first decode batch's too.
            found = None if before.record.mode == "PREBUILT" else _left_by(evidence, before)
            if found is not None:
                yield from ((row, *found) for row in rows if table.ints["step"][row] == 0)
            steps = {table.ints["step"][row]: row for row in rows}
            if chain:
                yield from ((row, Phase.DRAFT, steps[step - 1]) for step, row in steps.items() if step - 1 in steps)


def _left_by(evidence: Evidence, part: Part) -> tuple[Phase, int] | None:
    """The last draft row over a prompt or over committed tokens that a batch ran for a request."""
    for phase in (Phase.EXTEND, Phase.DRAFT_PREFILL):
        rows = evidence.table.of(part.share, phase)
        if rows:
            return phase, rows[-1]
    return None


@register(id="handover", kinds=(Kind.TOKEN, Kind.NUMERIC, Kind.SHAPE), reads=("scenario", "engine"))
def check_transferred_unchanged(evidence: Evidence) -> CheckResult:
    """Draft state arrives as it was sent and as wide as the draft needs it, and no empty batch is built.

    SHAPE for widths and empty batches; TOKEN and NUMERIC where a row differs from what the prefill side held.
    """
    result = CheckResult()
    if not evidence.scenario.engine.disaggregation:
        return result
    result.divergences += _empty(evidence)
    result.divergences += _widths(evidence, result)
    for part in _first_transfers(evidence):
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
    key = Key.of_rank(record.dp_rank, Phase.PREBUILT)
    return Divergence(kind=Kind.SHAPE, key=key, round=record.index, expected=expected, observed=observed, hint=hint)


def _first_transfers(evidence: Evidence) -> Iterator[Part]:
    """Each request's first transfer; what comes later is from the decode side's own memory."""
    for (_, attempt), parts in evidence.parts.items():
        if attempt == 0:
            yield from [part for part in parts if part.record.mode == "PREBUILT"][:1]


def _final_chunk(evidence: Evidence, rid: str) -> Share:
    """The share that ended the request's prompt, in its last attempt on the prefill side."""
    chunks = [part for part in evidence.parts_of(rid) if part.record.mode == "PREFILL" and part.final]
    return chunks[-1].share if chunks else (0, rid, 0, -1)


def _last_row(evidence: Evidence, share: Share, phase: Phase, step: int) -> int | None:
    rows = [row for row in evidence.table.of(share, phase) if evidence.table.ints["step"][row] == step]
    return rows[-1] if rows else None


def _changed(evidence: Evidence, sent: int, arrived: int, result: CheckResult) -> Iterator[Divergence]:
    """What differs between the row that was sent and the one that arrived."""

    def differs(kind: Kind, before: object, after: object, hint: str) -> Divergence:
        return evidence.divergence(arrived, kind=kind, expected=before, observed=after, hint=hint)

    rows = evidence.engine.rows
    for column, kind, hint in (
        ("chosen_ids", Kind.TOKEN, "other-proposals-arrived"),
        ("chosen_probs", Kind.NUMERIC, "other-scores-arrived"),
    ):
        before, after = rows.lists[column][sent].tolist(), rows.lists[column][arrived].tolist()
        result.count("proposals", len(before))
        if before != after:
            yield differs(kind, before, after, hint)
    state, arrived_state = _state(evidence, sent), _state(evidence, arrived)
    if state is not None and arrived_state is not None:
        result.count("hidden_rows", 1)
        if not np.array_equal(state, arrived_state):
            same = state.shape == arrived_state.shape
            off = float(np.abs(state - arrived_state).max()) if same else arrived_state.shape[0]
            yield differs(Kind.NUMERIC, "the row that was sent", off, "other-state-arrived")
    if rows.ints["step"][arrived]:
        return  # layers behind the first read their own proposals there
    token, sent_token = int(rows.ints["input_id"][arrived]), int(rows.ints["input_id"][sent])
    result.count("tokens", 1)
    if token != sent_token:
        yield differs(Kind.TOKEN, sent_token, token, "other-token-arrived")


def _state(evidence: Evidence, row: int) -> np.ndarray | None:
    phase, at = evidence.table.phase[row], evidence.table.ints["hidden_out"][row]
    states = evidence.engine.tensors.get(f"hidden_out.{phase}")
    return None if states is None or at < 0 else np.asarray(states[at])
