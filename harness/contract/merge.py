"""Many verdicts as one. It must not judge: it adds up what was judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.contract.types import Verdict


def merge(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of a run: outcomes by priority, counts added up, each reason once with how many scenarios gave it."""
    coverage, inside, compared, reasons = (Counter[str]() for _ in range(4))
    for verdict in verdicts:
        coverage.update(verdict.coverage)
        inside.update(verdict.inside)
        compared.update(verdict.compared)
        reasons.update(verdict.reasons)
    return Verdict(
        outcome=Verdict.merge([verdict.outcome for verdict in verdicts]),
        reasons=tuple(
            reason if count == 1 else f"{reason} (in {count} scenarios)" for reason, count in reasons.items()
        ),
        coverage=dict(coverage),
        inside=dict(inside),
        compared=dict(compared),
        ties=sum(verdict.ties for verdict in verdicts),
        kinds=tuple(sorted({kind for verdict in verdicts for kind in verdict.kinds})),
        root_kinds=tuple(sorted({kind for verdict in verdicts for kind in verdict.root_kinds})),
    )
