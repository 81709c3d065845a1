"""The JSON of `eaglecheck bisect --json`. Stable; described in docs/bisect.md. It must not compute anything new."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.bisect.changes import Changed
from harness.bisect.search import Answer, Line, Tried
from harness.bisect.trials import Subject, Trials

BISECT_SCHEMA = 1


def bisect_document(
    found: Answer, *, line: Line, subject: Subject, trials: Trials, changed: Sequence[Changed] | None, note: str = ""
) -> dict[str, Any]:
    """The whole search. changed: None where the two trees are not both there."""
    order, ends = {name: at for at, name in enumerate(line.names)}, (found.old, found.new)
    tried = sorted(found.tried, key=lambda one: order.get(one.name, 0))
    return {
        **interrupted_document(over=line.over, subject=subject, trials=trials, why=note),
        "direction": found.direction,
        "first_bad": found.first_bad,
        "first_good": found.first_good,
        "last_good": found.last_good,
        "last_bad": found.last_bad,
        "exact": found.exact,
        "between": [{"name": name, "label": line.label(name)} for name in found.between],
        "versions": len(order),
        "tried": [_tried(one, label=line.label(one.name), title=line.title(one.name)) for one in tried],
        "risk": found.risk,
        "changed_known": changed is not None,
        "changed": [dataclasses.asdict(one) for one in changed or ()],
        "commits": {name: line.title(name) for name in ends} if line.over == "commits" else {},
        "labels": {name: line.label(name) for name in ends},
    }


def interrupted_document(*, over: str, subject: Subject, trials: Trials, why: str) -> dict[str, Any]:
    """What there is without an answer: what is searched for, and everything tried so far."""
    rate = trials.rate
    return {
        "schema": BISECT_SCHEMA,
        "case": subject.name,
        "scenario": subject.scenario.id,
        "failure": {"signature": trials.failure.signature, "kinds": list(trials.failure.kinds)},
        "over": over,
        "exact": False,
        "tried": [_tried(one, label=one.name, title="") for one in trials.judged],
        "repeated": trials.repeated,
        "rate": rate and {"failures": rate.failures, "tries": rate.tries, "lower": round(rate.lower, 6)},
        "note": why,
    }


def _tried(one: Tried, *, label: str, title: str) -> dict[str, Any]:
    return {
        **dataclasses.asdict(one),
        "label": label,
        "title": title,
        "kinds": list(one.kinds),
        "seconds": round(one.seconds, 1),
        "run": one.run if one.run and Path(one.run).is_dir() else None,
    }
