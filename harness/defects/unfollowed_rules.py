"""F-035 and F-036: a verify does not follow keys that the token after a prompt does.

F-035: min_p. F-036: custom_logit_processor. The rest of a request's rules it follows.
"""

from __future__ import annotations

from reference.departures import Departure
from reference.logit_rules import Rules


class IgnoresMinP(Departure):
    def verifies(self, rules: Rules) -> Rules:
        return rules.leaving("min_p")


class SkipsProcessors(Departure):
    def verifies(self, rules: Rules) -> Rules:
        return rules.leaving("custom_logit_processor")
