"""Requests that SGLang answered with an error: no verdict, in its own words; what was taken is judged as ever."""

from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade
from harness.checks import judge
from harness.contract.trace import Event
from harness.contract.types import Outcome

SAID = (
    "request r0 was answered with an error: no such grammar; give it another prompt, or leave it out, and run it again"
)
ERROR = Event(name="request_error", scheduler_step=0, data={"rid": "r0", "error": "no such grammar"})


def refused(*, instead=0, tokens=1, expect="answer"):
    """(scenario, engine trace, reference): r0 runs as SGLang does it whose scheduler refuses it, r1 as it should."""
    asked = handmade.scenario(prompts=(7, 5), chunk=None)
    first, other = asked.requests
    first = first.model_copy(update={"expect": expect})
    asked = asked.model_copy(update={"requests": (first, other)})
    ran = first.model_copy(update={"input_ids": (instead,), "max_new_tokens": tokens})
    engine, reference = handmade.build(asked.model_copy(update={"requests": (ran, other)}))
    ends = tuple(replace(end, reason="error", output_ids=()) if end.rid == "r0" else end for end in engine.ends)
    engine = replace(engine, scenario_id=asked.id, ends=ends, events=(*engine.events, ERROR))
    own = np.flatnonzero(reference.rows.strings["rid"] == "r0").tolist()
    return asked, engine, replace(handmade.without_rows(reference, *own), scenario_id=asked.id)


def test_a_request_that_the_scheduler_refused_is_unknown_in_sglangs_own_words():
    verdict, divergences = judge(*refused())
    assert divergences == []
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reasons[0] == SAID


def test_what_follows_from_a_refusal_is_no_reason_of_its_own():
    scenario, engine, reference = refused()
    stopped = Event(name="reference_stopped", scheduler_step=0, data={"rid": "r0", "round": 0, "why": "no prompt"})
    unread = Event(name="unread", scheduler_step=0, data={"rid": "r0", "why": "a dot"})
    verdict, _ = judge(scenario, engine, replace(reference, events=(*reference.events, stopped, unread)))
    assert verdict.reasons[0] == SAID
    assert not any("no prompt" in one or "a dot" in one for one in verdict.reasons)
    other = tuple(replace(event, data={**event.data, "rid": "r1"}) for event in (stopped, unread))
    verdict, _ = judge(scenario, engine, replace(reference, events=(*reference.events, *other)))
    assert all(any(said in one for one in verdict.reasons) for said in ("no prompt", "a dot"))


def test_a_request_that_fits_and_is_refused_for_its_length_is_a_finding():
    scenario, engine, reference = refused()
    length = "Input length (7 tokens) exceeds the maximum allowed length (506 tokens)."
    said = replace(ERROR, data={"rid": "r0", "error": length})
    engine = replace(engine, events=(*(event for event in engine.events if event != ERROR), said))
    verdict, divergences = judge(scenario, engine, reference)
    assert verdict.outcome is Outcome.FAIL
    assert [(found.check, found.hint, found.observed) for found in divergences] == [("admission", "refused", length)]


def test_what_it_said_comes_before_what_was_not_compared():
    scenario, engine, reference = refused()
    nothing = handmade.take_rows(engine.rows, [])
    verdict, _ = judge(scenario, replace(engine, rows=nothing, rounds=()), replace(reference, rows=nothing))
    assert verdict.reasons[0] == SAID
    assert any(reason.startswith("nothing compared: ") for reason in verdict.reasons[1:])


@pytest.mark.parametrize(
    "ran",
    [{"instead": 1}, {"tokens": 6}, {"expect": "refusal"}],
    ids=["of-another-prompt", "that-went-on", "that-the-scenario-has-refused"],
)
def test_findings_of_a_request_are_kept(ran):
    verdict, divergences = judge(*refused(**ran))
    assert verdict.outcome is Outcome.FAIL
    assert {found.key.rid for found in divergences} == {"r0"}


def test_without_an_error_that_sglang_said_findings_are_kept():
    scenario, engine, reference = refused()
    engine = replace(engine, events=tuple(event for event in engine.events if event != ERROR))
    assert judge(scenario, engine, reference)[0].outcome is Outcome.FAIL


def test_findings_of_another_request_are_kept():
    scenario, engine, reference = refused()
    engine.rows.ints["position"][handmade.find(engine, phase="VERIFY", rid="r1")] += 1
    verdict, divergences = judge(scenario, engine, reference)
    assert verdict.outcome is Outcome.FAIL
    assert {found.key.rid for found in divergences} == {"r1"}
    assert SAID in verdict.reasons


def test_a_crash_stays_a_crash():
    scenario, engine, reference = refused()
    data = {"error": "E: oh", "where": "a:b", "phase": "PREFILL", "round": 0, "rids": ["r0"]}
    crash = Event(name="crash", scheduler_step=engine.rounds[-1].scheduler_step, data=data)
    verdict, _ = judge(scenario, replace(engine, events=(*engine.events, crash)), reference)
    assert verdict.root_kinds == ("CRASH",)
