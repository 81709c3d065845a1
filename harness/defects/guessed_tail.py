"""F-010: at the end of a chunk inside a prompt, layers read the target's guess and each other's proposals.

The first layer's last row reads what the target chose behind the chunk, although the prompt goes on; deeper layers
read that token too, and behind it what the layers before them proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.contract.batches import Part
from reference.departures import Departure, Followed, ReadsOtherwise
from reference.timeline import is_early_chunk
from reference.windows import Reads, Window


class GuessedTail(Departure):
    def reads(self, reads: Reads, request: Followed) -> Reads:
        guesses = {part.start: _guess(request, part) for part, _ in request.ran if is_early_chunk(part)}
        return _Guessing(reads, guesses)


def _guess(request: Followed, part: Part) -> int:
    """What the target chose after a chunk, by the engine where it is known."""
    if chosen := request.view.target_choice(part):
        return chosen[0]
    return int(request.head.target.logits(request.hidden[part.start + part.length - 1]).argmax())


class _Guessing(ReadsOtherwise):
    """guesses: by the start of the windows that end inside a prompt."""

    def __init__(self, inner: Reads, guesses: dict[int, int]) -> None:
        super().__init__(inner)
        self.guesses = guesses

    def token(self, text: Sequence[int], window: Window, at: int) -> int:
        guess = self.guesses.get(window.start)
        if guess is None or at < window.stop:
            return super().token(text, window, at)
        proposed = guess if at == window.stop else window.proposals[at - window.stop - 1]
        assert proposed is not None
        return proposed
