"""Templates of batch programs: each opens a scenario so that one coverage point comes about, and is named after it.

To add one: a function that writes requests and ops into the builder's timeline, decorated with `@template(fits=…)`, and
`certain=False` if the point need not happen whatever is drawn. It names a batch shape, never a bug. Importing this
registers all of them, in an order that decides what a seed draws.
"""

from cases.templates import (  # noqa: I001
    prefill,
    caches,
    batches,
    leaving,
    ranks,
    answers,
    handoff,
    rules,
    texts,
)

__all__ = ["answers", "batches", "caches", "handoff", "leaving", "prefill", "ranks", "rules", "texts"]
