"""Coverage points: states that bugs hide in, each with a predicate that finds where a trace shows it.

A scenario names the points it wants (`wants`); the verdict counts all of them on the engine's trace, and one that was
wanted and never happened makes it UNKNOWN. Nothing here judges rows.

To add one: write a generator function in the module of its subject (`prefill`, `decode`, `windows`, `recurrent`,
`ranks`, `handoff`, `rules`, `texts`, `answers`), decorated with `@coverage_point("what it means", where=…)`. The
function's name is its name in scenarios, verdicts and reports and must not change afterwards; it yields one `Place`
each time the thing happened. `points` has the words that predicates share. Then two tests ask for the rest:

- `cases/meta/test_coverage_points.py`: a trace that has it, and the nearest one that has it not.
- `cases/meta/test_generation.py`: a template of the same name in `cases/templates`
  that brings it about. A point that comes about by itself is named in that test instead.
"""

from harness.coverage import (
    answers,
    decode,
    handoff,
    host_cache,
    prefill,
    ranks,
    recurrent,
    rules,
    served,
    texts,
    windows,
)
from harness.coverage.points import POINTS, CoveragePoint, Reach, Where, count, names, reach_of

#: Importing a subject's module registers its points.
SUBJECTS = (prefill, decode, served, ranks, handoff, rules, answers, texts, windows, recurrent, host_cache)

__all__ = ["POINTS", "SUBJECTS", "CoveragePoint", "Reach", "Where", "count", "names", "reach_of"]
