"""Coverage points of requests that are texts: grammars, thoughts before them, and stop strings.

Which tokens a grammar allowed is read from the engine's own masks. See `harness/coverage`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.contract.batches import Part, Share, shares_of
from harness.contract.requests import GRAMMARS
from harness.contract.scenario import Scenario
from harness.contract.trace import EOS, Trace
from harness.contract.types import Phase
from harness.coverage.points import (
    Place,
    coverage_point,
    first_tokens,
    parts_of_request,
    points_of_keys,
    verifies,
    verify_parts,
)


def _held(scenario: Scenario, *keys: str) -> set[str]:
    """Requests with such a grammar."""
    return {one.rid for one in scenario.requests if any(getattr(one, key) is not None for key in keys or GRAMMARS)}


def _held_by(scenario: Scenario, trace: Trace, key: str) -> Iterator[Place]:
    held = _held(scenario, key)
    yield from (part for part in verify_parts(trace) if part.rid in held)


points_of_keys(GRAMMARS, _held_by)


@coverage_point("a token after a prompt that a grammar decides")
def first_token_by_grammar(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from first_tokens(trace, _held(scenario))


def _masks(trace: Trace) -> dict[Share, list[int]]:
    """Of every verify of a constrained request: the tokens allowed after each node, one bit each."""
    return {
        share: [int.from_bytes(bytes.fromhex(one), "little") for one in bits]
        for event in trace.named("masks")
        if event.data["phase"] == Phase.VERIFY
        for share, bits in shares_of(event, "bits")
    }


@coverage_point("a drafted token that the grammar does not allow after its parent")
def draft_off_grammar(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    masks, nodes, rows = _masks(trace), dict[Share, list[tuple[int, int]]](), trace.rows
    for row in np.flatnonzero(rows.strings["phase"] == Phase.VERIFY).tolist():
        node = int(rows.ints["parent"][row]), int(rows.ints["input_id"][row])
        nodes.setdefault(rows.key(row).share, []).append(node)
    for part in verify_parts(trace):
        bits = masks.get(part.share, [])
        own = ((parent, token) for parent, token in nodes.get(part.share, ()) if 0 <= parent < len(bits))
        if any(not bits[parent] >> token & 1 for parent, token in own):
            yield part


@coverage_point("a verify of a constrained request that accepted a drafted token")
def draft_kept_by_grammar(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    held = _held(scenario)
    yield from (part for part in verify_parts(trace) if part.rid in held and part.length > 1)


@coverage_point("a verify with requests that have a grammar and requests that have none")
def constrained_beside_free(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    held = _held(scenario)
    yield from (record for record in verifies(trace) if len({rid in held for rid in record.rids}) > 1)


@coverage_point("a verify of a constrained request after it was retracted and came back")
def constrained_after_retraction(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    held = _held(scenario)
    yield from (part for part in verify_parts(trace) if part.attempt > 0 and part.rid in held)


@coverage_point("a constrained request that ended because its text was whole")
def grammar_ends_text(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    held, ends = _held(scenario), trace.header.get(EOS, ())
    for end in trace.ends:
        if end.rid in held and end.reason == "stop" and end.output_ids and end.output_ids[-1] in ends:
            yield from parts_of_request(trace, end.rid)[-1:]


@coverage_point("a request whose grammar holds it behind its thoughts")
def grammar_after_thoughts(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    thinking = {one.rid for one in scenario.requests if one.require_reasoning} & _held(scenario)
    masks = _masks(trace)

    def holds(part: Part) -> bool:
        root = masks.get(part.share, [])[:1]
        return bool(root) and root[0] & (root[0] + 1) != 0  # not a run of ones: something is left out

    yield from (part for part in verify_parts(trace) if part.rid in thinking and holds(part))


@coverage_point("a text that a stop string or pattern ended with tokens of the same verify behind it")
def stop_string_inside_run(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    matched = {event.data["rid"]: event.data["matched"] for event in trace.named("text")}
    for end in trace.ends:
        if end.reason != "stop" or not isinstance(matched.get(end.rid), str):
            continue
        last = len(scenario.request(end.rid).input_ids) + len(end.output_ids) - 1
        parts = (part for part in parts_of_request(trace, end.rid) if part.record.mode == "DECODE")
        yield from (part for part in parts if part.start < last < part.start + part.length)


@coverage_point("a text that a pattern of stop_regex ended")
def ended_by_stop_regex(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    matched = {event.data["rid"]: event.data["matched"] for event in trace.named("text")}
    for end in trace.ends:
        if end.reason == "stop" and matched.get(end.rid) in scenario.request(end.rid).stop_regex:
            yield from parts_of_request(trace, end.rid)[-1:]
