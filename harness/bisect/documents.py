"""The JSON of `eaglecheck bisect --json`. Stable; described in docs/bisect.md. It must not compute anything new."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bisect.changes import Changed
from harness.bisect.search import Answer, Tried
from harness.bisect.trials import Subject, Trials

BISECT_SCHEMA = 1


def bisect_document(
    found: Answer,
    *,
    names: Sequence[str],
    over: str,
    subject: Subject,
    trials: Trials,
    changed: Sequence[Changed] | None,
    labels: Mapping[str, str] | None = None,
    titles: Mapping[str, str] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """The whole search. names: the line, oldest first. changed: None where the two trees are not both there.

    labels: how a name is shown to people, titles: what a commit says of itself.
    """
    labels, titles, order = labels or {}, titles or {}, {name: at for at, name in enumerate(names)}
    tried = sorted(found.tried, key=lambda one: order.get(one.name, 0))
    return {
        **interrupted_document(over=over, subject=subject, trials=trials, why=note),
        "direction": found.direction,
        "first_bad": found.first_bad,
        "first_good": found.first_good,
        "last_good": found.last_good,
        "last_bad": found.last_bad,
        "exact": found.exact,
        "between": [{"name": name, "label": labels.get(name, name)} for name in found.between],
        "versions": len(names),
        "tried": [_tried(one, labels=labels, titles=titles) for one in tried],
        "risk": found.risk,
        "changed_known": changed is not None,
        "changed": [dataclasses.asdict(one) for one in changed or ()],
        "commits": {name: titles[name] for name in (found.old, found.new) if name in titles},
        "labels": {name: labels.get(name, name) for name in (found.old, found.new)},
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
        "tried": [_tried(one, labels={}, titles={}) for one in trials.judged],
        "repeated": trials.repeated,
        "rate": rate and {"failures": rate.failures, "tries": rate.tries, "lower": round(rate.lower, 6)},
        "note": why,
    }


def _tried(one: Tried, *, labels: Mapping[str, str], titles: Mapping[str, str]) -> dict[str, Any]:
    return {
        **dataclasses.asdict(one),
        "label": labels.get(one.name, one.name),
        "title": titles.get(one.name, ""),
        "kinds": list(one.kinds),
        "seconds": round(one.seconds, 1),
        "run": one.run if one.run and Path(one.run).is_dir() else None,
    }
