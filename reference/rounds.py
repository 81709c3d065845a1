"""The rows of one request's batches, whatever drafts for it: prompt, drafts, verify and what is accepted.

This is the row contract written out once for replay and for free running. This module must not look at a trace but
through `EngineView`, or decide which rounds happen.

Symbols: n tree nodes, k steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from harness.contract.batches import Part, event_at
from harness.contract.trace import Event
from harness.contract.types import Phase
from reference.choices import Decided, decide, first
from reference.departures import Departure
from reference.engine_view import Conditions
from reference.head_drafts import HeadDrafts
from reference.layer_drafts import LayerDrafts
from reference.logit_rules import Rules
from reference.rows import Writer
from reference.verify import verify

Drafts = HeadDrafts | LayerDrafts


def write(writer: Writer, drafts: Drafts, rules: Rules, *, departures: Sequence[Departure] = ()) -> list[Event]:
    """Writes the rows of one timeline; the events say what decided its tokens, where it is not the target's best."""
    view, rounds, before, events = drafts.view, list[tuple[Part, Conditions]](), None, list[Event]()
    for part, committed in drafts.timeline.parts:
        phase, length = Phase.EXTEND, len(committed)
        if part.record.mode == "PREBUILT":
            drafts.handed_rows(writer, part)
        elif part.record.mode == "PREFILL":
            chosen = (committed or view.target_choice(part)) if rules.keys or not rules.greedy else ()
            logits = _prompt_rows(writer, part, drafts, chosen)
            if part.final and rules.keys:
                events.append(_first(part, drafts, logits, rules, chosen, departures))
            phase, length = Phase.DRAFT_PREFILL, part.length
        elif drafts.knows(part):
            known = view.conditions(part, before)
            rounds.append((part, replace(known, committed=committed) if rules.keys or not rules.greedy else known))
        needed = not view.is_last(part) or view.has(part, phase)  # nobody needs proposals after a request's end
        if part.record.mode != "PREBUILT" and needed:
            drafts.proposal_rows(writer, part, phase, length)
        before = part
    decided = decode_rows(writer, drafts, rounds, rules, departures=departures)
    return [*events, *_verified(rounds, decided, rules)]


def _prompt_rows(writer: Writer, part: Part, drafts: Drafts, chosen: Sequence[int]) -> Tensor:
    """Target rows of one prompt chunk: the last one also says what comes next; returns its logits [V].

    chosen: what was taken there, where it is no question of the best logit.
    """
    rows = range(part.start, part.start + part.length)
    logits = drafts.head.target.logits(drafts.final[rows.stop - 1 : rows.stop])
    writer.add(
        part,
        Phase.PREFILL,
        input_id=drafts.timeline.tokens[rows.start : rows.stop],
        position=rows,
        hidden_out=drafts.hidden[rows.start : rows.stop],
        logits=logits,
        drawn=[chosen] if chosen else (),
    )
    return logits[0]


def _first(
    part: Part, drafts: Drafts, logits: Tensor, rules: Rules, chosen: Sequence[int], departures: Sequence[Departure]
) -> Event:
    """Event('ruled') for the token after a prompt."""
    generated: Sequence[int] = drafts.timeline.tokens[len(rules.request.input_ids) : part.start + part.length]
    counted = _counted(departures, (), rules.request.input_ids[-1], generated)
    decided = first(logits, rules, generated, chosen[0] if chosen else None, counted)
    return _event("ruled", part, Phase.PREFILL, decided, rules)


def decode_rows(
    writer: Writer,
    drafts: Drafts,
    rounds: Sequence[tuple[Part, Conditions]],
    rules: Rules,
    *,
    departures: Sequence[Departure] = (),
) -> list[Decided]:
    """DRAFT, VERIFY and ACCEPT rows of decode rounds of one request, and what decided each.

    VERIFY rows are fed the tree expected; their outputs, and the walk, answer the tree that was really verified.
    """
    for departure in departures:
        rules = departure.verifies(rules)
    expected = drafts.trees(writer, rounds)
    trees = [known.tree or tree for (_, known), (tree, _) in zip(rounds, expected, strict=True)]
    starts, found = [part.start for part, _ in rounds], list[Decided]()
    late, prompt = flying(drafts), rules.request.input_ids
    had = [start + 1 - len(prompt) - late.get(start, 0) for start in starts]
    answers = verify(drafts.head, drafts.trunk, list(zip(starts, trees, strict=True)))
    for place, ((part, known), (own, drafted), tree, (hidden, logits)) in enumerate(
        zip(rounds, expected, trees, answers, strict=True)
    ):
        writer.add(
            part,
            Phase.VERIFY,
            input_id=own.tokens,
            position=own.positions(part.start),
            parent=own.parents,
            hidden_out=hidden,
            logits=logits,
        )
        decided = decide(
            tree,
            logits,
            known,
            rules,
            drafts.timeline.tokens[len(prompt) : part.start + 1],
            most=part.spec(drafts.spec).num_steps,
            drafted=drafted,
            counts=partial(_counted, departures, had[: place + 1], prompt[-1]),
        )
        writer.add(part, Phase.ACCEPT, input_id=decided.walk.tokens, parent=decided.walk.nodes)
        found.append(decided)
    return found


def flying(drafts: Drafts) -> dict[int, int]:
    """Committed length -> tokens of the batch before, where overlap scheduling planned the next one without them."""
    parts = drafts.timeline.parts if drafts.view.overlap else []
    steps = [part.record.scheduler_step for part, _ in parts]
    return {
        parts[i][0].start: len(parts[i - 1][1])
        for i in range(1, len(parts))
        if drafts.view.paused.issuperset(range(steps[i - 1] + 1, steps[i]))
    }


def _counted(
    departures: Sequence[Departure], known: Sequence[int], last: int, generated: Sequence[int]
) -> Sequence[int]:
    """What penalties count: all that was generated, but for departures."""
    for departure in departures:
        generated = departure.counts(generated, known=known, last=last)
    return generated


def _verified(rounds: Sequence[tuple[Part, Conditions]], decided: Sequence[Decided], rules: Rules) -> Iterator[Event]:
    """Event('sampled') for each round that uniform numbers decided, ('ruled') for greedy ones by rules."""
    for (part, known), one in zip(rounds, decided, strict=True):
        if not rules.greedy and known.uniforms is not None:
            yield _event("sampled", part, Phase.ACCEPT, one, rules)
        elif rules.greedy and rules.adjusts:
            yield _event("ruled", part, Phase.ACCEPT, one, rules)


def _event(name: str, part: Part, phase: Phase, decided: Decided, rules: Rules) -> Event:
    """Which choice it was, how near it came to another one, and by which keys it was made."""
    near = decided.walk.near
    data: dict[str, Any] = {"margin": near.margin}
    if near.spread > 0:
        data |= {"distance": near.distance, "spread": near.spread}
    if rules.keys:
        data |= {"phase": str(phase), "keys": list(rules.keys), "explains": list(decided.explains)}
    if phase is Phase.PREFILL:
        data |= {"token": decided.walk.tokens[0]}
    return event_at(part, name, **data)
