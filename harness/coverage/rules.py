"""Coverage points of what requests ask of their tokens: each key, where it decides, and beside whom.

See `harness/coverage`.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.contract.batches import Part
from harness.contract.requests import ADJUSTING, CUTTING, GRAMMARS
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.coverage.points import Place, coverage_point, first_tokens, points_of_keys, verifies, verify_parts

#: Those that need no tokenizer; grammars have points of their own (see `texts`).
KEYS = tuple(key for key in (*CUTTING, *ADJUSTING) if key not in ("min_new_tokens", *GRAMMARS))


def _asking(scenario: Scenario, *keys: str) -> set[str]:
    return {request.rid for request in scenario.requests if set(request.rules) & set(keys)}


def _decided_by(scenario: Scenario, trace: Trace, key: str) -> Iterator[Place]:
    """Where it cuts a distribution, only rounds that uniforms decided."""
    asking = _asking(scenario, key)
    drawn = {(e.dp_rank, e.data["round"]) for e in trace.named("uniforms")}
    for part in verify_parts(trace):
        if part.rid in asking and (key in ADJUSTING or (part.record.dp_rank, part.record.index) in drawn):
            yield part


def _held_back(scenario: Scenario, trace: Trace, key: str) -> Iterator[Place]:
    """Where fewer than min_new_tokens were generated."""
    until = {one.rid: len(one.input_ids) + one.min_new_tokens for one in scenario.requests if one.min_new_tokens}
    yield from (part for part in verify_parts(trace) if part.start + 1 < until.get(part.rid, 0))


points_of_keys(KEYS, _decided_by)
points_of_keys(("min_new_tokens",), _held_back)


@coverage_point("a token after a prompt that a request's keys decide")
def first_token_by_rule(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from first_tokens(trace, _asking(scenario, *KEYS))


@coverage_point("a verify with requests that sample and requests that do not")
def sampled_beside_greedy(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    greedy = {request.rid: request.greedy for request in scenario.requests}
    yield from (record for record in verifies(trace) if len({greedy.get(rid) for rid in record.rids}) > 1)


@coverage_point("a verify of a request that samples or has rules, after it was retracted and came back")
def ruled_after_retraction(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    ruled = {request.rid for request in scenario.requests if request.rules or not request.greedy}

    def came_back(part: Part) -> bool:
        return part.attempt > 0 and part.rid in ruled

    yield from (part for part in verify_parts(trace) if came_back(part))
