"""What an engine's rounds tell of one request: the turns it had, and the tokens that each committed, as far as known.

This module must not compute a row, and must see an engine's trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from harness.contract.trace import RoundRecord
from harness.contract.types import Phase, RequestSpec
from reference.engine_view import EngineView, Turn
from reference.turns import Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What one request lived through between two restarts.

    tokens: prompt and everything committed; turns: those that can be derived; committed: what each turn committed
    (empty if unknown); why: what stopped the reference and where, or None.
    """

    tokens: list[int]
    turns: list[tuple[Turn, tuple[int, ...]]]
    why: tuple[Turn, str] | None


def stories(request: RequestSpec, view: EngineView) -> Iterator[Story]:
    """One story an epoch; after a restart the prompt is everything known so far."""
    tokens, in_flight = list(request.prompt), 0
    for _, group in groupby(view.turns.get(request.rid, []), key=lambda turn: turn.epoch):
        turns = list(group)
        if in_flight and _reached(turns) == len(tokens) - in_flight:
            del tokens[-in_flight:]
        story = _follow(tokens, turns, view)
        tokens, in_flight = list(story.tokens), _last_committed(story)
        yield story


def _reached(turns: list[Turn]) -> int:
    """How many tokens a request had when it was prefilled or handed over; -1 if it never was to the end."""
    ends = {"PREFILL": 0, "PREBUILT": 1}  # the last token of what is handed over has no KV yet
    begun = (turn for turn in turns if turn.record.mode in ends and turn.final)
    return next((turn.start + turn.length + ends[turn.record.mode] for turn in begun), -1)


def _last_committed(story: Story) -> int:
    """Tokens of the decode round a story ends with. A request that is retracted while its verify is in flight, which
    overlap scheduling allows, never gets them and commits them anew.
    """
    turn, committed = story.turns[-1] if story.turns else (None, ())
    return len(committed) if turn is not None and turn.record.mode == "DECODE" else 0


def _follow(tokens: list[int], turns: list[Turn], view: EngineView) -> Story:
    """Collect committed tokens turn by turn until they become unknown."""
    tokens, derived = list(tokens), list[tuple[Turn, tuple[int, ...]]]()
    for turn in turns:
        began = view.has(turn, Phase.DRAFT) or view.has(turn, Phase.VERIFY)
        if turn.record.mode == "DECODE" and turn.length == 0 and not began:
            continue  # in the batch, but not in its forwards
        why = _impossible(turn, len(tokens))
        if why:
            return Story(tokens=tokens, turns=derived, why=(turn, why))
        if turn.record.mode == "PREBUILT":  # a hand-over commits nothing
            derived.append((turn, ()))
            continue
        if turn.record.mode == "PREFILL":
            committed = view.first_token(turn) if turn.final else ()
            unknown = turn.final and not committed
        else:
            committed = view.accepted(turn)
            unknown = not committed
        derived.append((turn, committed))
        if unknown:
            return Story(tokens=tokens, turns=derived, why=(turn, "the tokens it committed are not in the trace"))
        tokens += committed
    return Story(tokens=tokens, turns=derived, why=None)


def _impossible(turn: Turn, known: int) -> str | None:
    """Why a request with `known` tokens cannot have had this turn, or None."""
    end, mode = turn.start + turn.length, turn.record.mode
    if mode == "PREFILL":
        if turn.start < 0 or turn.length < 1 or (end != known if turn.final else end >= known):
            return f"prefill rows {turn.start}..{end - 1} (final: {turn.final}) do not fit the {known} tokens it has"
        return None
    if mode in ("DECODE", "PREBUILT"):
        return None if turn.start == known - 1 else f"committed length {turn.start}, but it has {known} tokens"
    return f"rounds of mode {mode} cannot be replayed"


def where_of(record: RoundRecord, *, rid: str, epoch: int, committed: int) -> Where:
    return Where(
        rid=rid,
        epoch=epoch,
        dp_rank=record.dp_rank,
        round=record.index,
        tick=record.tick,
        committed=committed,
    )


def with_fates(told: Iterator[Story]) -> list[tuple[Story, bool]]:
    """Stories of one request, each with whether its rows stay in the cache: all but the last end in a retraction."""
    listed = list(told)
    return [(story, number == len(listed) - 1) for number, story in enumerate(listed)]


def is_early_chunk(turn: Turn) -> bool:
    return turn.record.mode == "PREFILL" and not turn.final


def known_after(story: Story) -> list[int]:
    """How many tokens of the text there were after each turn that committed some, or ran an early chunk."""
    length, known = len(story.tokens), list[int]()
    for turn, committed in reversed(story.turns):
        if committed or is_early_chunk(turn):
            known.append(length)
        length -= len(committed)
    return known[::-1]
