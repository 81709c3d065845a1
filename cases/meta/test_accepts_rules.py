"""Check `rules`: what follows a request's keys passes, what forgets one is named after it, the unknown is said."""

from dataclasses import replace

import pytest

from cases.meta.handmade import asking
from cases.meta.speculating import FreeSession, answered, drawing
from harness.checks.judge import judge
from harness.contract.requests import RequestSpec
from harness.contract.settings import EngineConfig
from harness.contract.types import Kind, Outcome

PROMPT = (5, 17, 130, 42)
ENDS = tuple(range(0, 512, 3))
GREEDY = {
    "logit_bias": {"logit_bias": {"7": 6.0, "130": 5.0, "9": 5.5}},
    "frequency_penalty": {"frequency_penalty": -2.0},
    "presence_penalty": {"presence_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 0.05},
    "custom_logit_processor": {"custom_logit_processor": "force", "custom_params": {"token_ids": [7, 8, 9]}},
    "min_new_tokens": {"min_new_tokens": 10, "stop_token_ids": ENDS},
}
DRAWN = {key: {"temperature": 1.0, key: value} for key, value in (("top_k", 2), ("top_p", 0.1), ("min_p", 0.5))}


def scenario_of(request, **engine):
    spelled = {"enable_custom_logit_processor": True, "skip_tokenizer_init": not request.min_new_tokens}
    return asking(request, engine=EngineConfig(**spelled, **engine))


def asked_for(keys):
    return RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=24, **keys)


def ran(eagle_tiny, asked, done=None):
    """(scenario that asks for some keys, what an engine that follows others reports)."""
    scenario = scenario_of(asked_for(asked))
    session = FreeSession.of(eagle_tiny, scenario.spec)
    follows = asked_for(asked if done is None else done)
    uniform = drawing(4) if "temperature" in asked else None
    return scenario, session.speculate(follows, scenario_id=scenario.id, uniform=uniform)


def judged(eagle_tiny, scenario, trace, **oracle):
    return judge(scenario, trace, answered(eagle_tiny, scenario, trace, **oracle))


def of_rules(divergences):
    return [found for found in divergences if found.check in ("rules", "sampled") and not found.cause]


@pytest.mark.parametrize("keys", [*GREEDY.values(), *DRAWN.values()], ids=[*GREEDY, *DRAWN])
def test_what_follows_its_keys_has_no_fault_and_is_compared(eagle_tiny, keys):
    scenario, trace = ran(eagle_tiny, keys)
    verdict, divergences = judged(eagle_tiny, scenario, trace)
    assert divergences == []
    assert verdict.compared["accepts"] > 3
    assert not any("which nothing judges" in reason or "not judged" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("key", [*GREEDY, *DRAWN])
def test_what_forgets_a_key_is_named_after_it(eagle_tiny, key):
    keys = (GREEDY | DRAWN)[key]
    beside = {"custom_params", key} if key == "custom_logit_processor" else {key}
    scenario, trace = ran(eagle_tiny, keys, {name: value for name, value in keys.items() if name not in beside})
    verdict, divergences = judged(eagle_tiny, scenario, trace)
    assert verdict.outcome is Outcome.FAIL
    first = of_rules(divergences)[0]
    assert first.hint == f"{key}-ignored"
    assert first.kind in (Kind.ACCEPT, Kind.TOKEN)
    hints = {found.hint for found in of_rules(divergences)}
    assert hints <= {f"{key}-ignored"}


def test_what_an_assumed_defect_predicts_is_right_in_a_verify_and_wrong_in_a_first_token(eagle_tiny):
    scenario, trace = ran(eagle_tiny, DRAWN["min_p"], {"temperature": 1.0})

    def kinds(**oracle):
        return {
            found.kind for found in judged(eagle_tiny, scenario, trace, **oracle)[1] if found.hint == "min_p-ignored"
        }

    assert kinds() >= {Kind.ACCEPT}
    assert kinds(assumed=("F-035",)) <= {Kind.TOKEN}


def test_keys_whose_order_nobody_says_are_unknown(eagle_tiny):
    scenario, trace = ran(eagle_tiny, {"repetition_penalty": 1.5, "logit_bias": {"7": 3.0}})
    verdict, _ = judged(eagle_tiny, scenario, trace)
    assert verdict.outcome is Outcome.UNKNOWN
    assert any("no source says whether" in reason for reason in verdict.reasons)


def test_a_reference_that_knows_no_logits_makes_it_unknown(eagle_tiny):
    scenario, trace = ran(eagle_tiny, GREEDY["logit_bias"])
    reference = answered(eagle_tiny, scenario, trace)
    told = tuple(event for event in reference.events if event.name != "ruled")
    verdict, divergences = judge(scenario, trace, replace(reference, events=told))
    assert divergences == []
    assert "ruled acceptance of a not judged: the reference does not know its logits" in verdict.reasons


def test_a_near_tie_of_adjusted_logits_goes_either_way(eagle_tiny):
    scenario, trace = ran(eagle_tiny, GREEDY["logit_bias"], {"logit_bias": {"7": 6.0}})
    reference = answered(eagle_tiny, scenario, trace)
    near = tuple(
        replace(event, data={**event.data, "margin": 1e-9}) if event.name == "ruled" else event
        for event in reference.events
    )
    assert of_rules(judge(scenario, trace, reference)[1])
    assert of_rules(judge(scenario, trace, replace(reference, events=near))[1]) == []
