"""The rows of one request's batches, whatever drafts for it: prompt, drafts, verify and what is accepted.

This is the row contract written out once for replay and for free running. This module must not look at a trace but
through `EngineView`, or decide which rounds happen.

Symbols: n tree nodes, k steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from harness.contract.batches import Part
from harness.contract.trace import Event
from harness.contract.types import Phase
from reference.draft import best
from reference.engine_view import Conditions
from reference.head_drafts import HeadDrafts, distribution
from reference.layer_drafts import LayerDrafts
from reference.rows import Writer
from reference.tree import Tree
from reference.verify import Walk, greedy_walk, rejection_walk, sampled_walk, verify

Drafts = HeadDrafts | LayerDrafts


def write(writer: Writer, drafts: Drafts, *, temperature: float) -> list[Event]:
    """Writes the rows of one timeline; the events are one 'sampled' a round that uniform numbers decided."""
    view, rounds, before = drafts.view, list[tuple[Part, Conditions]](), None
    for part, committed in drafts.timeline.parts:
        phase, length = Phase.EXTEND, len(committed)
        if part.record.mode == "PREBUILT":
            drafts.handed_rows(writer, part)
        elif part.record.mode == "PREFILL":
            chosen = (committed or view.target_choice(part)) if temperature > 0 else ()
            _prompt_rows(writer, part, drafts, chosen)
            phase, length = Phase.DRAFT_PREFILL, part.length
        elif drafts.knows(part):
            known = view.conditions(part, before)
            rounds.append((part, replace(known, committed=committed) if temperature > 0 else known))
        needed = not view.is_last(part) or view.has(part, phase)  # nobody needs proposals after a request's end
        if part.record.mode != "PREBUILT" and needed:
            drafts.proposal_rows(writer, part, phase, length)
        before = part
    walks = decode_rows(writer, drafts, rounds, temperature=temperature)
    return _sampled(rounds, walks) if temperature > 0 else []


def _prompt_rows(writer: Writer, part: Part, drafts: Drafts, chosen: Sequence[int]) -> None:
    """Target rows of one prompt chunk: the last one also says what comes next.

    chosen: what was drawn there, for a request that samples: no uniform number is known for it.
    """
    rows = range(part.start, part.start + part.length)
    writer.add(
        part,
        Phase.PREFILL,
        input_id=drafts.timeline.tokens[rows.start : rows.stop],
        position=rows,
        hidden_out=drafts.hidden[rows.start : rows.stop],
        logits=drafts.head.target.logits(drafts.final[rows.stop - 1 : rows.stop]),
        drawn=[chosen] if chosen else (),
    )


def decode_rows(
    writer: Writer, drafts: Drafts, rounds: Sequence[tuple[Part, Conditions]], *, temperature: float
) -> list[Walk]:
    """DRAFT, VERIFY and ACCEPT rows of decode rounds of one request, and their walks.

    VERIFY rows are fed the tree expected; their outputs, and the walk, answer the tree that was really verified.
    """
    expected = drafts.trees(writer, rounds)
    trees = [known.tree or tree for (_, known), (tree, _) in zip(rounds, expected, strict=True)]
    starts, walks = [part.start for part, _ in rounds], list[Walk]()
    answers = verify(drafts.head, drafts.trunk, list(zip(starts, trees, strict=True)))
    for (part, known), (own, drafted), tree, (hidden, logits) in zip(rounds, expected, trees, answers, strict=True):
        writer.add(
            part,
            Phase.VERIFY,
            input_id=own.tokens,
            position=own.positions(part.start),
            parent=own.parents,
            hidden_out=hidden,
            logits=logits,
        )
        walk = _walk(
            tree, logits, known, most=part.spec(drafts.spec).num_steps, temperature=temperature, drafted=drafted
        )
        writer.add(part, Phase.ACCEPT, input_id=walk.tokens, parent=walk.nodes)
        walks.append(walk)
    return walks


def _walk(tree: Tree, logits: Tensor, known: Conditions, *, most: int, temperature: float, drafted: np.ndarray) -> Walk:
    """The walk through what was verified, by logits [n,V]: by the other side's uniform numbers where it sampled, else
    by its choices where they are known. most: k. drafted [k,V]: where drafts were drawn from, if they were."""
    if temperature > 0 and known.uniforms is not None:
        target = distribution(logits, temperature)
        if known.uniforms.rejection:
            return rejection_walk(tree.tokens, target, drafted, known.uniforms)
        return sampled_walk(tree.tokens, tree.parents, target, known.uniforms, most=most)
    if temperature > 0 and known.committed:
        return Walk(nodes=(-1,) * len(known.committed), tokens=known.committed)
    choices = known.choices or [best(row, 1)[0] for row in logits]
    return greedy_walk(tree.tokens, tree.parents, choices)


def _sampled(rounds: Sequence[tuple[Part, Conditions]], walks: Sequence[Walk]) -> list[Event]:
    """Event('sampled') for each round that uniform numbers decided: which one it was, and the walk's margin."""
    return [
        Event(
            name="sampled",
            scheduler_step=part.record.scheduler_step,
            dp_rank=part.record.dp_rank,
            data={"rid": part.rid, "attempt": part.attempt, "committed": part.start, "margin": walk.margin},
        )
        for (part, known), walk in zip(rounds, walks, strict=True)
        if known.uniforms is not None
    ]
