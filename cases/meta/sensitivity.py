"""Whether a target/draft pair can show the mistakes this project looks for: how often it agrees, and what moves it.

A pair that always agrees hides a wrong chunk tail; one that never agrees exercises no verify; one that ignores
positions hides a shift. This module must not judge: it only counts, on greedy speculation with t = 1.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cases.checkpoints import Checkpoint
from cases.meta.speculating import FreeSession
from harness.contract.settings import SpecConfig
from reference.attention import Kept, Sight
from reference.draft import Forced, Reading, draft, rotate
from reference.model import Head
from reference.pairs import load_pair

#: Decode rows counted after a prompt: later ones hardly see the prompt's chunks any more.
NEAR_PROMPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """accept_lengths: share of verifies by accept length 1 … k+1, over `verifies` of them.

    moved_by_shift: share of later-step proposals that change when draft steps sit one position too far;
    moved_by_tail: share of first proposals within NEAR_PROMPT rows of the prompt that change when each non-final
    chunk's last draft row carries the target's guess. least_margin: smallest top-1 margin of a committed token.
    distinct: share of generated tokens that are the first of their kind in their request.
    """

    verifies: int
    accept_lengths: dict[int, float]
    moved_by_shift: float
    moved_by_tail: float
    least_margin: float
    distinct: float


def _shifted(head: Head) -> Head:
    """A draft head whose rows behind the trunk sit one position too far, as in SGLang #25015."""

    def forward(
        tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        return head.forward(tokens, hidden, positions if kept is None else positions + 1, sight, kept)

    wrong = copy.copy(head)
    wrong.forward = forward  # type: ignore[method-assign]
    return wrong


def random_prompts(
    count: int, vocab: int, *, seed: int, shortest: int = 3, longest: int = 150
) -> list[tuple[int, ...]]:
    """`count` prompts of uniform length and ids, bos and eos (the last two) excepted."""
    rng = random.Random(seed)
    lengths = [rng.randint(shortest, longest) for _ in range(count)]
    return [tuple(rng.randrange(vocab - 2) for _ in range(length)) for length in lengths]


@torch.inference_mode()
def measure(
    pair: Checkpoint, *, prompts: int = 24, chunk: int = 16, k: int = 3, new_tokens: int = 32, seed: int = 1
) -> Measurement:
    """Count over random prompts of 3 … 150 tokens; accept lengths, sensitivities, margins and variety."""
    _, head = load_pair(pair.target, pair.draft)
    session = FreeSession(
        head.target,
        head,
        SpecConfig.model_validate(
            {"algorithm": head.algorithm, "num_steps": k, "eagle_topk": 1, "num_draft_tokens": k + 1}
        ),
    )
    accepted: Counter[int] = Counter()
    shifted: Counter[bool] = Counter()
    tails: Counter[bool] = Counter()
    margins: list[float] = []
    fresh: list[float] = []
    for prompt in random_prompts(prompts, head.target.vocab, seed=seed):
        text = session.generate(prompt, new_tokens + k)  # what the last round may commit beyond the end, too
        reading, end = Reading.of(head, [*prompt, *text]), len(prompt) + new_tokens
        walked = list(_walk(head, reading, len(prompt), end, k))
        accepted.update(length for _, length in walked)
        shifted.update(_moved_by_shift(head, reading, [start for start, _ in walked], k))
        tails.update(_moved_by_tail(head, reading, len(prompt), end, chunk))
        top = torch.topk(head.target.logits(reading.final[len(prompt) - 1 : end - 1]), 2).values
        margins.append(float((top[:, 0] - top[:, 1]).min()))
        fresh.append(len(set(text[:new_tokens])) / new_tokens)
    total = sum(accepted.values())
    return Measurement(
        verifies=total,
        accept_lengths={length: accepted[length] / total for length in range(1, k + 2)},
        moved_by_shift=shifted[True] / max(1, shifted.total()),
        moved_by_tail=tails[True] / max(1, tails.total()),
        least_margin=min(margins),
        distinct=sum(fresh) / len(fresh),
    )


def _walk(head: Head, reading: Reading, prompt: int, end: int, k: int) -> Iterator[tuple[int, int]]:
    """(start, accept length) of every round of greedy speculation, whose text is the greedy one, read as a whole."""
    tokens, starts = reading.tokens.tolist(), range(prompt, end - 1)
    chains = draft(head, reading, [(start, Forced()) for start in starts], k=k, t=1)
    proposed = {start: chain.candidates.tokens for start, chain in zip(starts, chains, strict=True)}
    at = prompt
    while at in starts:
        right = [one == own for one, own in zip(proposed[at], tokens[at + 1 :], strict=False)]
        length = [*right, False].index(False) + 1
        yield at, length
        at += length


def _moved_by_shift(head: Head, reading: Reading, starts: list[int], k: int) -> list[bool]:
    """For each proposal after the first of the rounds at `starts`: whether it changes."""
    rounds = [(start, Forced()) for start in starts]
    right = draft(head, reading, rounds, k=k, t=1)
    wrong = draft(_shifted(head), reading, rounds, k=k, t=1)
    later = [[token for chain in chains for token in chain.candidates.tokens[1:]] for chains in (right, wrong)]
    return [a != b for a, b in zip(*later, strict=True)]


def _moved_by_tail(head: Head, reading: Reading, prompt: int, end: int, chunk: int) -> list[bool]:
    """For each first proposal near the prompt: whether it changes; nothing if the prompt is one chunk."""
    rows = end - 1
    tails = list(range(chunk - 1, prompt - 1, chunk))
    if not tails:
        return []
    wrong = rotate(reading.tokens, 0, rows).clone()
    wrong[tails] = head.target.logits(reading.final[tails]).argmax(-1)
    g, _ = head.forward(wrong, head.enter(reading.hidden[:rows]), torch.arange(rows), Sight.causal(rows))
    near = slice(prompt - 1, min(prompt - 1 + NEAR_PROMPT, rows))
    return (head.logits(g[near]).argmax(-1) != head.logits(reading.draft[near]).argmax(-1)).tolist()
