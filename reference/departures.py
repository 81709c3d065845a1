"""Extension points where a modelled defect can replace what the papers say.

A session is given `Departure`s and asks each at these points; the base class differs in nothing, so a reference
without any is the papers' algorithm. What a departure may look at of a request is `Followed`. This module must not
know any departure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from harness.contract.batches import Part
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from reference.engine_view import EngineView
from reference.logit_rules import Rules
from reference.model import Trunk
from reference.mtp import MtpHead
from reference.timeline import RequestTimeline
from reference.windows import Reads, Window


class Followed(Protocol):
    """One request between two restarts, whose draft is layers of multi-token prediction.

    ran: every part in which its layers ran, and its window. hidden [T,h]: the target's states.
    """

    head: MtpHead
    spec: SpecConfig
    view: EngineView
    timeline: RequestTimeline
    ran: list[tuple[Part, Window]]

    @property
    def trunk(self) -> Trunk:
        """The target over its tokens."""

    @property
    def hidden(self) -> Tensor: ...

    @property
    def reads(self) -> Reads:
        """What its layers read, by every departure."""

    @property
    def filled(self) -> list[Window]:
        """The windows in order, with all proposals."""


class Departure:
    """One way to differ from the papers; this one differs in nothing. A replay makes one of each that it is given."""

    def attends(self, step: int, parents: Sequence[int]) -> Sequence[int]:
        """Which beam of the step before each beam of an EAGLE draft step attends to (see reference.draft.Attends)."""
        return parents

    def sees_round(self) -> bool:
        """Whether EAGLE draft steps see the rows that their round ran, themselves among them."""
        return True

    def follow(self, scenario: Scenario, requests: Sequence[Followed]) -> None:
        """Look at all requests of a scenario before any row is asked for, in order of their submission."""

    def reads(self, reads: Reads, request: Followed) -> Reads:
        """What the layers of one request read, given what they read by the departures before this one."""
        return reads

    def verifies(self, rules: Rules) -> Rules:
        """The rules of a request that its verifies follow; those of its first token are its own."""
        return rules

    def counts(self, generated: Sequence[int], *, known: Sequence[int], last: int) -> Sequence[int]:
        """Which tokens penalties and min_new_tokens count at a row, of those generated before it.

        known: how many the scheduler had when it planned each verify of this attempt, this one's the last; none for the
        token after a prompt. last: the prompt's last token.
        """
        return generated

    def says(self, part: Part, layer: int, g: Tensor) -> Tensor | None:
        """What the last row of a layer says in one batch, given g [h]; None where nobody can know."""
        return g


class ReadsOtherwise(Reads):
    """What `inner` reads, but for what a subclass says of it."""

    def __init__(self, inner: Reads) -> None:
        self.inner = inner

    def token(self, text: Sequence[int], window: Window, at: int) -> int:
        return self.inner.token(text, window, at)

    def before(self, text: Sequence[int], window: Window, i: int) -> Sequence[int]:
        return self.inner.before(text, window, i)

    def states_again(self, window: Window, states: Tensor) -> Tensor:
        return self.inner.states_again(window, states)
