"""F-035, F-036 and F-037: what a verify does not follow of a request's rules, though the token after a prompt does.

F-035: min_p. F-036: custom_logit_processor.

F-037: penalties count one token a round. Before each verify the last token that the scheduler has is counted, which is
the tree's root, and under overlap the root of the round before, or the prompt's last token; what else a round accepted
never is, nor the path that leads to a node, nor what was generated before a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.departures import Departure
from reference.logit_rules import Rules


class IgnoresMinP(Departure):
    def verifies(self, rules: Rules) -> Rules:
        return rules.leaving("min_p")


class SkipsProcessors(Departure):
    def verifies(self, rules: Rules) -> Rules:
        return rules.leaving("custom_logit_processor")


class CountsRoots(Departure):
    def counts(self, generated: Sequence[int], *, known: Sequence[int], last: int) -> Sequence[int]:
        return [generated[count - 1] if count else last for count in known]
