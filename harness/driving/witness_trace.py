"""The reference trace that a witness gives: the rows that an engine should have, with the values that were witnessed.

A row of which nobody knows the values has none: it is compared with nothing, and counted as such in the header. This
module must not judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from harness.contract.providers import WITNESS, Witnessed, header_of
from harness.contract.rows import RowBuilder
from harness.contract.scenario import Scenario
from harness.contract.trace import Event, Trace
from harness.contract.types import Phase
from harness.driving.witness import Answer, Witness
from harness.driving.witness_rows import Expected, Followed
from harness.driving.witness_texts import Meaning
from harness.engines.errors import EngineError

#: Phases whose rows draft: the choices of the others come without scores.
DRAFTING = (Phase.DRAFT_PREFILL, Phase.DRAFT, Phase.EXTEND, Phase.PREBUILT)


def ask(scenario: Scenario, engine: Trace, drive: Callable[[Scenario], Trace]) -> Trace:
    """The witness' answer to what an engine did. drive: an engine's trace of a plain scenario, or EngineError."""
    witness = Witness(scenario, engine)
    try:
        for asked in witness.scenarios():
            witness.hear(asked, drive(asked))
            if witness.ended:
                break  # it would end there again
    except EngineError as error:
        witness.faults[f"the witness has no engine: {str(error).splitlines()[0]}"] = None
    return reference_trace(witness)


def reference_trace(witness: Witness) -> Trace:
    """With the row keys of the engine's rounds, and the events of any other reference."""
    builder, tensors, counts = RowBuilder(), dict[str, list[np.ndarray]](), dict[str, list[int]]()
    for row in witness.expected.rows:
        _write(builder, tensors, row, witness)
        asked = [one for one in (row.reads, row.says) if one is not None]
        if asked:
            known, total = counts.get(str(row.phase), [0, 0])
            counts[str(row.phase)] = [known + all(_answered(witness, row, one) for one in asked), total + 1]
    engine, scenario = witness.expected.engine, witness.expected.scenario
    rows = {phase: (known, of) for phase, (known, of) in counts.items()}
    seen = Witnessed(rows=rows, requests=witness.requests, faults=tuple(witness.faults))
    header: dict[str, Any] = {
        "reference": "replay",
        "dtype": str(engine.header.get("dtype") or scenario.engine.dtype),
        "spec": scenario.spec.model_dump(),
        **header_of(target=WITNESS, draft=WITNESS),
        **seen.plain(),
    }
    return Trace(
        side="reference",
        scenario_id=engine.scenario_id,
        header=header,
        rows=builder.build(),
        rounds=engine.rounds,
        events=tuple(_events(witness)),
        tensors={name: np.stack(states).astype(np.float32) for name, states in tensors.items()},
    )


def _answered(witness: Witness, row: Expected, meaning: Meaning) -> bool:
    answer = witness.answers.get(meaning)
    if answer is None:
        return False
    return bool(len(answer.ids)) if meaning == row.says and row.choose else answer.state is not None


def _write(builder: RowBuilder, tensors: dict[str, list[np.ndarray]], row: Expected, witness: Witness) -> None:
    said = None if row.says is None else witness.answers.get(row.says)
    read = None if row.reads is None else witness.answers.get(row.reads)
    builder.add(
        rid=row.part.rid,
        phase=str(row.phase),
        slot=row.slot,
        committed=row.part.start,
        round=row.part.record.index,
        scheduler_step=row.part.record.scheduler_step,
        dp_rank=row.part.record.dp_rank,
        attempt=row.part.attempt,
        step=row.step,
        input_id=row.input_id,
        position=row.position,
        parent=row.parent,
        hidden_in=_kept(tensors, f"hidden_in.{row.phase}", read),
        hidden_out=_kept(tensors, f"hidden_out.{row.phase}", said),
        **_logits(row, said),
    )


def _kept(tensors: dict[str, list[np.ndarray]], name: str, answer: Answer | None) -> int:
    """Where the state is found in the tensor `name`; -1 without one, or where it is of another width."""
    states = tensors.get(name, [])
    if answer is None or answer.state is None or (states and states[0].shape != answer.state.shape):
        return -1
    tensors.setdefault(name, states).append(answer.state)
    return len(states) - 1


def _logits(row: Expected, said: Answer | None) -> dict[str, Any]:
    """Columns of a row that chooses. What was drawn is taken over: its probability at a temperature is not known."""
    if said is None or not len(said.ids) or not row.choose:
        return {}
    columns: dict[str, Any] = {"lse": said.lse, "top_ids": said.ids, "top_logits": said.logits}
    if row.drawn:
        return columns | {"chosen_ids": row.drawn}
    if row.choose > len(said.ids):
        return columns
    columns["chosen_ids"] = said.ids[: row.choose]
    if row.phase in DRAFTING:
        scores = np.exp(said.logits[: row.choose].astype(np.float64) - said.lse)
        columns["chosen_probs"] = scores.astype(np.float32)
    return columns


def _events(witness: Witness) -> Iterator[Event]:
    ends = {end.rid: end.output_ids for end in witness.expected.engine.ends}
    greedy = dict[str, Event]()
    for followed in witness.expected.requests:
        if followed.request.greedy and not followed.request.rules:
            yield from _accepts(followed, witness)
            text = _greedy(followed, witness, ends.get(followed.request.rid, ()))
            greedy |= {} if text is None else {followed.request.rid: text}
        if followed.timeline.why:
            part, why = followed.timeline.why
            data = {"rid": part.rid, "round": part.record.index, "why": why}
            step, rank = part.record.scheduler_step, part.record.dp_rank
            yield Event(name="reference_stopped", scheduler_step=step, dp_rank=rank, data=data)
    yield from greedy.values()


def _greedy(followed: Followed, witness: Witness, output: tuple[int, ...]) -> Event | None:
    """The plain greedy text, token by token as the target chose it behind each beginning of the engine's own text.

    None where a choice is not known before the text ends or differs from what the engine answered.
    """
    request, tokens, margins = followed.request, list[int](), list[float]()
    stops = set(request.stops(witness.expected.engine.header.get("eos_token_ids") or ()))
    text = followed.along[len(request.input_ids)]
    while len(tokens) < request.max_new_tokens and not stops.intersection(tokens[-1:]):
        answer = witness.answers.get(Meaning("target", text))
        if answer is None or len(answer.ids) < 2:
            return None
        tokens.append(int(answer.ids[0]))
        margins.append(float(answer.logits[0] - answer.logits[1]))
        if len(tokens) <= len(output) and tokens[-1] != output[len(tokens) - 1]:
            break
        text = witness.expected.texts.after(text, tokens[-1])
    data = {"rid": request.rid, "output_ids": tokens, "margins": margins}
    return Event(name="greedy", scheduler_step=0, data=data)


def _accepts(followed: Followed, witness: Witness) -> Iterator[Event]:
    """What each round's own chain would have been accepted for: its leading tokens that are the text, and the bonus."""
    if witness.expected.scenario.spec.eagle_topk > 1:
        return  # a witness proposes a chain
    texts, tokens = witness.expected.texts, followed.timeline.tokens
    for part, _ in followed.timeline.parts:
        if part.record.mode != "DECODE":
            continue
        accepted, known, text, at = 1, True, followed.along[part.start + 1], part.start + 1
        for step in range(witness.expected.scenario.spec.num_steps):
            answer = witness.answers.get(Meaning("draft", text, step))
            known = answer is not None and len(answer.ids) > 0 and at < len(tokens)
            if answer is None or not known or int(answer.ids[0]) != tokens[at]:
                break
            accepted, at, text = accepted + 1, at + 1, texts.after(text, tokens[at])
        if known:
            data = {"rid": part.rid, "attempt": part.attempt, "committed": part.start, "tokens": accepted}
            step, rank = part.record.scheduler_step, part.record.dp_rank
            yield Event(name="expected_accept", scheduler_step=step, dp_rank=rank, data=data)
