"""What SGLang is known to do otherwise, as departures that a reference can follow (see reference.departures).

None of these modules judges. A defect is followed only where a run assumes it by its id (`--assume F-012`).

To add one: a `Departure` that overrides the points of `reference.departures` at which SGLang differs; its id in
`PREDICTED` below; `assume: predicted` and `expects` in its page of docs/findings; and a test in cases/meta that it
predicts recorded rows exactly, and that a reference without it does not. A point that is missing is added to
`reference.departures` in the papers' terms, with a default that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.defects.draft_attention import SlotAttention, UnseenRound
from harness.defects.guessed_tail import GuessedTail
from harness.defects.narrow_blocks import NarrowBlocks
from harness.defects.refused_states import RefusedStates
from harness.defects.shared_prefix_rows import SharedPrefixRows
from harness.defects.verified_rules import CountsRoots, IgnoresMinP, SkipsProcessors
from reference.departures import Departure

#: By the ids of docs/findings, in the order in which one changes what the next one looks at.
PREDICTED: dict[str, type[Departure]] = {
    "F-003": SlotAttention,
    "F-010": GuessedTail,
    "F-012": SharedPrefixRows,
    "F-020": RefusedStates,
    "F-027": NarrowBlocks,
    "F-035": IgnoresMinP,
    "F-036": SkipsProcessors,
    "F-037": CountsRoots,
    "F-114": UnseenRound,
}


def departures(assumed: Iterable[str]) -> list[type[Departure]]:
    """Those that a run assumes; ids that nobody predicts are somebody else's."""
    wanted = set(assumed)
    return [departure for name, departure in PREDICTED.items() if name in wanted]


def change_texts(assumed: Iterable[str]) -> bool:
    """Whether one of them follows other rules, so that a request's plain text is no longer what to expect."""
    return any(
        one.verifies is not Departure.verifies or one.counts is not Departure.counts for one in departures(assumed)
    )
