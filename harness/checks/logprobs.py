"""Checks returned log-probabilities: of output tokens and of the prompt, the most likely tokens, and ids asked for.

The reference carries what they should be in events 'logprobs' (see reference.logprobs). This module must not look at
how an answer was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.checks.answered import answered, at_token
from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.answers import Answer
from harness.contract.requests import RequestSpec
from harness.contract.tolerance import budget_for
from harness.contract.types import Divergence, Kind, Policy

#: Keys of requests that SGLang says a verify follows loosely, or that nobody follows here: what comes back
#: is of logits that are judged where they choose.
LOOSE = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "custom_logit_processor"),
    *("json_schema", "regex", "ebnf"),
)

#: What is not possible at all is said as the least number of a dtype, or as minus infinity.
LEAST = -1e4


@register(id="logprobs", kinds=(Kind.TOKEN, Kind.NUMERIC, Kind.SHAPE), reads=("scenario", "engine", "reference"))
def check_logprobs(evidence: Evidence) -> CheckResult:
    """Each token of prompt and output has its own log-probability, once, at the temperature it was drawn at.

    SHAPE for entries too many or too few, TOKEN for those of other tokens, NUMERIC for values.
    """
    result = CheckResult()
    truths = {event.data["rid"]: event.data for event in evidence.truth.named("logprobs")}
    for request, end, answer in answered(evidence):
        if not request.return_logprob:
            continue
        bent = [key for key in LOOSE if key in request.asked]
        if request.rid not in truths or bent:
            why = f"beside {bent[0]}" if bent else "the reference says none"
            result.unknown.append(f"log-probabilities of {request.rid} not judged: {why}")
            continue
        if request.max_new_tokens and not end.output_ids:
            continue  # aborted before anything was chosen: nothing has to be said
        truth = _Truth.of(evidence, request, end.output_ids, truths[request.rid])
        handed = evidence.scenario.engine.disaggregation
        if handed and request.logprob_start_len >= 0:
            result.unknown.append(
                f"log-probabilities of the prompt of {request.rid} not judged: no decode side has them"
            )
        for table in _tables(request, answer):
            if handed and table.name.startswith("input"):
                continue
            if not request.max_new_tokens and table.name.startswith("output"):
                continue  # SGLang says those of the token that it chose and does not return
            _judge(truth, table, result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """One list of an answer: where in the text its entries begin, how many there should be, and of what."""

    name: str
    entries: list[Any]
    start: int
    count: int
    column: str
    blank: int = 0  # entries at the beginning that have no value, since nothing stands before them


def _tables(request: RequestSpec, answer: Answer) -> Iterator[_Table]:
    """Every list that the request asked for."""
    prompt, start = len(request.input_ids), request.logprob_start_len
    columns = {"token_logprobs": "own"}
    columns |= {"top_logprobs": "top"} if request.top_logprobs_num else {}
    columns |= {"token_ids_logprobs": "ids"} if request.token_ids_logprob else {}
    output = len(answer.meta.get("output_token_logprobs") or ())
    for name, column in columns.items():
        yield _Table(
            name=f"output_{name}",
            entries=list(answer.meta.get(f"output_{name}") or ()),
            start=prompt,
            count=-1 if column == "own" else output,
            column=column,
        )
        yield _Table(
            name=f"input_{name}",
            entries=list(answer.meta.get(f"input_{name}") or ()),
            start=max(start, 0),
            count=max(0, prompt - start) if start >= 0 else 0,
            column=column,
            blank=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Truth:
    """What the reference says of one request. text: prompt and output; allowed: what rounding does, NaN if unknown."""

    evidence: Evidence
    request: RequestSpec
    text: tuple[int, ...]
    data: dict[str, Any]
    allowed: float

    @staticmethod
    def of(evidence: Evidence, request: RequestSpec, output: Sequence[int], data: dict[str, Any]) -> _Truth:
        mine = np.flatnonzero(evidence.truth.rows.strings["rid"] == request.rid)
        limits = evidence.logit_noise.limit[mine]
        # a logit and the log-sum-exp may both be off by as much
        allowed = 2 * float(np.nanmax(limits)) if np.isfinite(limits).any() else float("nan")
        return _Truth(
            evidence=evidence, request=request, text=(*request.input_ids, *output), data=data, allowed=allowed
        )

    def limit(self, index: int) -> float:
        """How far a value at this place of the text may be off."""
        budget, place = budget_for(self.evidence.dtype), index - self.data["first"]
        if np.isfinite(self.allowed):
            output = index >= len(self.request.input_ids)
            return self.allowed / ((self.request.temperature or 1.0) if output else 1.0)
        return (
            budget.relative * max(float(self.data["scales"][place]), abs(float(self.data["own"][place]))) + budget.floor
        )

    def fault(self, index: int, kind: Kind, observed: object, expected: object, hint: str) -> Divergence:
        return at_token(
            self.evidence, self.request.rid, index, kind=kind, observed=observed, expected=expected, hint=hint
        )


def _judge(truth: _Truth, table: _Table, result: CheckResult) -> None:
    """One fault a list at most: what follows is of other places then."""
    count = len(truth.text) - table.start if table.count < 0 else table.count
    name = table.name.replace("_", "-")
    if len(table.entries) != count:
        place = table.start + min(len(table.entries), count)
        result.divergences.append(truth.fault(place, Kind.SHAPE, len(table.entries), count, f"{name}-count"))
        return
    for index, entry in enumerate(table.entries, table.start):
        result.count("logprobs", 1)
        if index - table.start < table.blank:
            found = _blank(truth, index, entry, table)
        else:
            found = JUDGES[table.column](truth, index, entry, name)
        if found is not None:
            result.divergences.append(found)
            return


def _blank(truth: _Truth, index: int, entry: Any, table: _Table) -> Divergence | None:
    """The first entry of a prompt: its token without a value, or nothing at all."""
    expected = [None, truth.text[index], None] if table.column == "own" else None
    if entry in (expected, None):
        return None
    return truth.fault(index, Kind.TOKEN, entry, expected, f"{table.name.replace('_', '-')}-first")


def _own(truth: _Truth, index: int, entry: Any, name: str) -> Divergence | None:
    """(value, token, text) of the token that stands there."""
    if entry is None or entry[1] != truth.text[index]:
        return truth.fault(index, Kind.TOKEN, entry and entry[1], truth.text[index], f"{name}-token")
    return _value(truth, index, entry[0], truth.data["own"][index - truth.data["first"]], name)


def _ids(truth: _Truth, index: int, entry: Any, name: str) -> Divergence | None:
    """The same of each id that was asked for, in that order."""
    asked = list(truth.request.token_ids_logprob)
    if [one[1] for one in entry or ()] != asked:
        return truth.fault(index, Kind.TOKEN, [one[1] for one in entry or ()], asked, f"{name}-token")
    values = truth.data["ids"][index - truth.data["first"]]
    faults = (_value(truth, index, one[0], value, name) for one, value in zip(entry, values, strict=True))
    return next((fault for fault in faults if fault is not None), None)


def _top(truth: _Truth, index: int, entry: Any, name: str) -> Divergence | None:
    """The most likely tokens, best first: values in order of rank, and each that of its token.

    Two tokens nearer to each other than the limit may change places. A token of which the reference says nothing is as
    likely as the last one of which it does, at most.
    """
    place, count = index - truth.data["first"], truth.request.top_logprobs_num
    if len(entry or ()) != count:
        return truth.fault(index, Kind.SHAPE, len(entry or ()), count, f"{name}-width")
    known = dict(zip(truth.data["top_ids"][place], truth.data["top_values"][place], strict=True))
    most = truth.data["top_values"][place][-1] if len(known) > count else float("-inf")
    for rank, (value, token, _) in enumerate(entry):
        expected = truth.data["top_values"][place][rank]
        if (fault := _value(truth, index, value, expected, name)) is not None:
            return fault
        if abs(known.get(token, most) - expected) > 2 * truth.limit(index):
            return truth.fault(index, Kind.TOKEN, token, truth.data["top_ids"][place][rank], f"{name}-token")
    if len({one[1] for one in entry}) != count:
        return truth.fault(index, Kind.TOKEN, [one[1] for one in entry], "each token once", f"{name}-token")
    return None


def _value(truth: _Truth, index: int, observed: Any, expected: float, name: str) -> Divergence | None:
    """NUMERIC where it is no number, or further off than rounding brings it."""
    limit = truth.limit(index)
    if observed is not None and float(expected) == -np.inf and float(observed) < LEAST:
        return None
    off = abs(float(observed) - float(expected)) if observed is not None else float("inf")
    if off <= limit:
        return None
    found = truth.fault(index, Kind.NUMERIC, observed, float(expected), f"{name}-off")
    return replace(found, policy=Policy.BUDGET, expected={"value": float(expected), "limit_abs": limit})


JUDGES = {"own": _own, "ids": _ids, "top": _top}
