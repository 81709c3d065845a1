"""The timeline of one request: its part in each batch, and the tokens that each committed, as far as known.

This module must not compute a row, and must see an engine's trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.contract.batches import Part
from harness.contract.requests import RequestSpec
from harness.contract.types import Phase
from reference.engine_view import EngineView


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """One request between two restarts.

    tokens: prompt and everything committed; parts: those that can be derived, each with what it committed (empty if
    unknown); restarted: it was retracted at the end; why: what stopped the reference and where, or None.
    """

    tokens: list[int]
    parts: list[tuple[Part, tuple[int, ...]]]
    restarted: bool = False
    why: tuple[Part, str] | None = None

    @property
    def handed(self) -> frozenset[int]:
        """Committed lengths at which it was handed over."""
        return frozenset(part.start for part, _ in self.parts if part.record.mode == "PREBUILT")


def timelines(request: RequestSpec, view: EngineView) -> Iterator[RequestTimeline]:
    """One an attempt; after a restart the prompt is everything known so far."""
    tokens, in_flight, attempts = list(request.input_ids), 0, view.attempts(request.rid)
    for number, parts in enumerate(attempts):
        # one that is retracted again inside its prompt does not say how long that is: the next one does
        reached = next((one for one in map(_reached, attempts[number:]) if one >= 0), -1)
        if in_flight and reached == len(tokens) - in_flight:
            del tokens[-in_flight:]
        timeline = _follow(tokens, parts, view, restarted=number < len(attempts) - 1)
        tokens, in_flight = list(timeline.tokens), _last_committed(timeline)
        yield timeline


def _reached(parts: Sequence[Part]) -> int:
    """How many tokens a request had when it was prefilled or handed over; -1 if it never was to the end."""
    ends = {"PREFILL": 0, "PREBUILT": 1}  # the last token of what is handed over has no KV yet
    begun = (part for part in parts if part.record.mode in ends and part.final)
    return next((part.start + part.length + ends[part.record.mode] for part in begun), -1)


def _last_committed(timeline: RequestTimeline) -> int:
    """Tokens of the batch a timeline ends with. A request that is retracted while its verify, or the end of its prompt,
    is in flight, which overlap scheduling allows, never gets them and commits them anew.
    """
    return len(timeline.parts[-1][1]) if timeline.parts else 0


def _follow(known: Sequence[int], parts: Sequence[Part], view: EngineView, *, restarted: bool) -> RequestTimeline:
    """Collect committed tokens part by part until they become unknown."""
    tokens, derived, why = list(known), list[tuple[Part, tuple[int, ...]]](), None
    for part in parts:
        began = view.has(part, Phase.DRAFT) or view.has(part, Phase.VERIFY)
        if part.record.mode == "DECODE" and part.length == 0 and not began:
            continue  # in the batch, but not in its forwards
        why = _impossible(part, len(tokens))
        if why:
            break
        committed: tuple[int, ...] = ()  # an early chunk and a hand-over commit nothing
        if part.record.mode == "DECODE":
            committed = view.accepted(part)
        elif part.record.mode == "PREFILL" and part.final:
            committed = view.first_token(part)
        derived.append((part, committed))
        if not committed and part.record.mode != "PREBUILT" and not is_early_chunk(part):
            why = "the tokens it committed are not in the trace"
            break
        tokens += committed
    return RequestTimeline(tokens=tokens, parts=derived, restarted=restarted, why=(part, why) if why else None)


def _impossible(part: Part, known: int) -> str | None:
    """Why a request with `known` tokens cannot have had this part, or None."""
    end, mode = part.start + part.length, part.record.mode
    if mode == "PREFILL":
        if part.start < 0 or part.length < 1 or (end != known if part.final else end >= known):
            return f"prefill rows {part.start}..{end - 1} (final: {part.final}) do not fit the {known} tokens it has"
        return None
    if mode in ("DECODE", "PREBUILT"):
        return None if part.start == known - 1 else f"committed length {part.start}, but it has {known} tokens"
    return f"rounds of mode {mode} cannot be replayed"


def is_early_chunk(part: Part) -> bool:
    """Whether the prompt goes on behind it."""
    return part.record.mode == "PREFILL" and not part.final
