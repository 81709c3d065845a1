"""Check `finish`: an output ends where it was asked to. Without a reference."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.meta.judged import roots


@pytest.mark.parametrize(
    ("asked", "reason", "hint"),
    [
        ("stop", None, "ran-past-stop"),
        ("stop", "abort", "aborted-ran-past-stop"),
        ({"max_new_tokens": 11}, None, "ran-past-length"),
        ({"max_new_tokens": 11}, "abort", "aborted-ran-past-length"),
        ({"max_new_tokens": 13}, None, "stopped-early"),
    ],
)
def test_output_that_does_not_end_where_it_was_asked_to_is_found(asked, reason, hint):
    engine, _ = handmade.build(handmade.scenario(prompts=(5,)))
    end = engine.ends[0]
    changes = {"stop_ids": (end.output_ids[3],)} if asked == "stop" else asked
    other = handmade.scenario(prompts=(5,), **changes)
    ended = replace(engine, scenario_id=other.id, ends=(replace(end, reason=reason or end.reason),))
    assert ("TOKEN", "finish", "ACCEPT", hint) in roots(other, ended)


def test_full_context_window_excuses_a_short_output():
    engine, _ = handmade.build(handmade.scenario(prompts=(5,)))
    other = handmade.scenario(prompts=(5,), max_new_tokens=40)
    header = {**engine.header, "context_length": 18}
    assert roots(other, replace(engine, scenario_id=other.id, header=header)) == {}


@pytest.mark.parametrize(("pool", "early"), [(19, False), (20, True)])
def test_a_request_that_outgrows_the_pool_comes_as_far_as_sglang_cut_it_to(pool, early):
    """Its 5 tokens and the 12 that it writes, and two that are kept back."""
    engine, _ = handmade.build(handmade.scenario(prompts=(5,)))
    other = handmade.scenario(prompts=(5,), max_new_tokens=40)
    request = other.requests[0].model_copy(update={"expect": "exhaustion"})
    other = handmade.set_on(other.model_copy(update={"requests": (request,)}), max_total_tokens=pool)
    found = roots(other, replace(engine, scenario_id=other.id))
    assert (("TOKEN", "finish", "ACCEPT", "stopped-early") in found) is early
