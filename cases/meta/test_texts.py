"""What is said of the text: what came back, and what an engine had committed when it died."""

from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade, results
from harness.contract.texts import committed, text_identical
from harness.contract.types import Phase

SCENARIO = results.named("single")


@pytest.fixture
def traces():
    return results.traces(SCENARIO)


def test_the_committed_tokens_are_the_text_behind_its_first(traces):
    engine, _ = traces
    assert max(len(end.output_ids) for end in engine.ends) > 1
    for end in engine.ends:
        tokens = committed(engine, end.rid, SCENARIO)
        assert [tokens[place] for place in range(1, len(end.output_ids))] == list(end.output_ids[1:])


def test_whole_texts_are_compared(traces):
    engine, reference = traces
    assert text_identical(engine, reference, SCENARIO) is True
    first, *others = engine.ends
    for output in ((*first.output_ids[:-1], first.output_ids[-1] + 1), ()):
        wrong = replace(first, output_ids=output)
        assert text_identical(replace(engine, ends=(wrong, *others)), reference, SCENARIO) is False
    given_up = replace(first, output_ids=(), reason="abort")
    assert text_identical(replace(engine, ends=(given_up, *others)), reference, SCENARIO) is (True if others else None)


def test_of_an_engine_that_died_nothing_is_said_as_long_as_nothing_differs(traces):
    engine, reference = traces
    assert text_identical(replace(engine, ends=()), reference, SCENARIO) is None


def test_a_difference_that_was_committed_before_it_died_is_one(traces):
    engine, reference = traces
    engine = replace(handmade.copy_trace(engine), ends=())
    row = np.flatnonzero(engine.rows.strings["phase"] == Phase.ACCEPT)[-3]
    engine.rows.ints["input_id"][row] += 1
    assert text_identical(engine, reference, SCENARIO) is False
    rid = engine.rows.strings["rid"][row]
    others = tuple(end for end in traces[0].ends if end.rid != rid)
    assert text_identical(replace(engine, ends=others), reference, SCENARIO) is False


def test_a_sampled_text_is_not_compared_with_a_greedy_one(traces):
    engine, reference = traces
    hot = tuple(request.model_copy(update={"temperature": 1.0}) for request in SCENARIO.requests)
    assert text_identical(engine, reference, SCENARIO.model_copy(update={"requests": hot})) is None
