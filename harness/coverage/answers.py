"""Coverage points of what comes back beside tokens: log-probabilities, hidden states, and pieces of a stream.

See `harness/coverage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.contract.answers import RETURNED, Answer, answers
from harness.contract.batches import Part
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.coverage.points import Place, chunks_of, coverage_point, parts_of_request, verify_parts

OUTPUT, INPUT = "output_token_logprobs", "input_token_logprobs"


def _telling(trace: Trace, name: str) -> dict[str, Answer]:
    """Answers that say this."""
    return {rid: answer for rid, answer in answers(trace).items() if answer.meta.get(name)}


def _longer(trace: Trace) -> Iterator[Part]:
    """Parts that committed more than one token."""
    yield from (part for part in verify_parts(trace) if part.length > 1)


@coverage_point("log-probabilities came back of several tokens that one verify committed")
def accepted_run_logprobs(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    told = _telling(trace, OUTPUT)
    yield from (part for part in _longer(trace) if part.rid in told)


@coverage_point("log-probabilities of sampled tokens came back")
def sampled_logprobs(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    sampled = {request.rid for request in scenario.requests if request.temperature > 0}
    told = _telling(trace, OUTPUT)
    yield from (part for part in verify_parts(trace) if part.rid in told and part.rid in sampled)


@coverage_point("log-probabilities of the likeliest tokens came back (top_logprobs_num)")
def top_logprobs(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    told = _telling(trace, "output_top_logprobs")
    yield from (part for part in verify_parts(trace) if part.rid in told)


@coverage_point("log-probabilities of chosen ids came back (token_ids_logprob)")
def chosen_logprobs(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    told = _telling(trace, "output_token_ids_logprobs")
    yield from (part for part in verify_parts(trace) if part.rid in told)


@coverage_point("log-probabilities of a prompt came back that was prefilled in chunks")
def prompt_logprobs_in_chunks(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    told = _telling(trace, INPUT)
    for chunks in chunks_of(trace):
        if chunks[0].rid in told:
            yield from chunks[1:]


@coverage_point("log-probabilities came back of a request that was retracted and came back")
def logprobs_over_retraction(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for rid in _telling(trace, OUTPUT):
        again = [part for part in parts_of_request(trace, rid) if part.attempt > 0]
        yield from again[:1]


@coverage_point("a stream of three pieces or more, of which one brought several tokens")
def streamed_in_pieces(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for rid, answer in answers(trace).items():
        counts = [len(piece.output_ids) for piece in answer.pieces]
        if len(counts) > 2 and any(after > before + 1 for before, after in pairwise(counts)):
            yield from parts_of_request(trace, rid)[-1:]


@coverage_point("a verify of a stream that asks for pieces of several tokens")
def streamed_by_interval(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    spaced = {request.rid for request in scenario.requests if (request.stream_interval or 1) > 1}
    yield from (part for part in verify_parts(trace) if part.rid in spaced)


@coverage_point("hidden states came back of several tokens that one verify committed")
def accepted_run_states(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (part for part in _longer(trace) if f"{RETURNED}{part.rid}" in trace.tensors)
