"""Check `seeds`: two requests with one seed draw alike where seeds decide, and only there anything is asked of them."""

from dataclasses import replace

import pytest

from cases.meta.handmade import asking
from cases.meta.speculating import FreeSession, drawing
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.requests import RequestSpec
from harness.contract.settings import EngineConfig
from harness.contract.types import Kind, Phase

ASKED = RequestSpec(rid="a", input_ids=(5, 17, 130, 42), max_new_tokens=20, temperature=1.1, sampling_seed=7)


@pytest.fixture(scope="module")
def trace(eagle_tiny):
    """What an engine reports of one request that samples."""
    return FreeSession.of(eagle_tiny).speculate(ASKED, uniform=drawing(4))


def scenario_of(*requests, deterministic=True):
    return asking(*requests, ASKED, engine=EngineConfig(deterministic_inference=deterministic))


def twin(**other):
    return ASKED.model_copy(update={"rid": "first", **other})


def judged(trace, scenario, *, change=()):
    """The check on a run in which request `first` had the outputs of `a`, but for {place: token} in `change`."""
    output = list(trace.ends[0].output_ids)
    for place, token in dict(change).items():
        output[place] = token
    end = replace(trace.ends[0], rid="first", output_ids=tuple(output))
    return run_check(CHECKS["seeds"], gather(scenario, replace(trace, ends=(end, *trace.ends)), None))


def test_the_same_draw_twice_has_nothing_to_say(trace):
    result = judged(trace, scenario_of(twin()))
    assert (result.divergences, result.unknown) == ([], [])
    assert result.compared["tokens"] == 20


@pytest.mark.parametrize("place", [0, 1, 9])
def test_another_token_is_found_where_it_was_committed(trace, place):
    output = trace.ends[0].output_ids
    result = judged(trace, scenario_of(twin()), change={place: 511})
    (found,) = result.divergences
    assert (found.kind, found.hint) == (Kind.NONDETERMINISM, "same-seed-other-token")
    assert (found.expected, found.observed) == (511, output[place])
    committed = found.key.committed + 1 + found.key.slot
    assert (found.key.rid, committed) == ("a", len(ASKED.input_ids) + place)
    assert found.key.phase == (Phase.ACCEPT if place else Phase.PREFILL)


@pytest.mark.parametrize(
    "other", [{"sampling_seed": 8}, {"sampling_seed": None}, {"temperature": 1.0}, {"input_ids": (5, 17, 130)}]
)
def test_requests_that_are_not_the_same_draw_may_differ(trace, other):
    assert judged(trace, scenario_of(twin(**other)), change={3: 511}).divergences == []


def test_without_that_promise_nothing_is_asked(trace):
    result = judged(trace, scenario_of(twin(), deterministic=False), change={3: 511})
    assert (result.divergences, result.compared) == ([], {})
