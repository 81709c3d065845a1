"""Check `rules`: what follows a request's keys passes, what forgets one is named after it, the unknown is said."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cases.checkpoints import make
from cases.meta.speculating import FreeSession
from harness.checks.judge import judge
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig
from harness.contract.types import Kind, Outcome
from harness.driving.oracle import Oracle
from reference.pairs import load_pair

torch.set_num_threads(1)
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make("eagle-tiny", tmp_path_factory.mktemp("pairs"))


def scenario_of(request, **engine):
    return Scenario(
        name="ruled",
        engine=EngineConfig(
            enable_custom_logit_processor=True, skip_tokenizer_init=not request.min_new_tokens, **engine
        ),
        requests=(request,),
        script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
    )


def asking(keys):
    return RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=24, **keys)


def ran(pair, asked, done=None):
    """(scenario that asks for some keys, what an engine that follows others reports)."""
    scenario = scenario_of(asking(asked))
    session = FreeSession(*load_pair(pair.target, pair.draft), scenario.spec)
    uniform = np.random.default_rng(4).random if "temperature" in asked else None
    drawing = None if uniform is None else lambda: float(uniform())
    follows = asking(asked if done is None else done)
    return scenario, session.speculate(follows, scenario_id=scenario.id, uniform=drawing)


def judged(pair, scenario, trace, **oracle):
    return judge(scenario, trace, Oracle(target=pair.target, draft=pair.draft, **oracle).answer(scenario, trace))


def of_rules(divergences):
    return [found for found in divergences if found.check in ("rules", "sampled") and not found.cause]


@pytest.mark.parametrize("keys", [*GREEDY.values(), *DRAWN.values()], ids=[*GREEDY, *DRAWN])
def test_what_follows_its_keys_has_no_fault_and_is_compared(pair, keys):
    scenario, trace = ran(pair, keys)
    verdict, divergences = judged(pair, scenario, trace)
    assert divergences == []
    assert verdict.compared["accepts"] > 3
    assert not any("which nothing judges" in reason or "not judged" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("key", [*GREEDY, *DRAWN])
def test_what_forgets_a_key_is_named_after_it(pair, key):
    keys = (GREEDY | DRAWN)[key]
    beside = {"custom_params", key} if key == "custom_logit_processor" else {key}
    scenario, trace = ran(pair, keys, {name: value for name, value in keys.items() if name not in beside})
    verdict, divergences = judged(pair, scenario, trace)
    assert verdict.outcome is Outcome.FAIL
    first = of_rules(divergences)[0]
    assert first.hint == f"{key}-ignored"
    assert first.kind in (Kind.ACCEPT, Kind.TOKEN)
    hints = {found.hint for found in of_rules(divergences)}
    assert hints <= {f"{key}-ignored"}


def test_what_an_assumed_defect_predicts_is_right_in_a_verify_and_wrong_in_a_first_token(pair):
    scenario, trace = ran(pair, DRAWN["min_p"], {"temperature": 1.0})

    def kinds(**oracle):
        return {found.kind for found in judged(pair, scenario, trace, **oracle)[1] if found.hint == "min_p-ignored"}

    assert kinds() >= {Kind.ACCEPT}
    assert kinds(assumed=("F-035",)) <= {Kind.TOKEN}


def test_keys_whose_order_nobody_says_are_unknown(pair):
    scenario, trace = ran(pair, {"repetition_penalty": 1.5, "logit_bias": {"7": 3.0}})
    verdict, _ = judged(pair, scenario, trace)
    assert verdict.outcome is Outcome.UNKNOWN
    assert any("no source says whether" in reason for reason in verdict.reasons)


def test_a_reference_that_knows_no_logits_makes_it_unknown(pair):
    scenario, trace = ran(pair, GREEDY["logit_bias"])
    reference = Oracle(target=pair.target, draft=pair.draft).answer(scenario, trace)
    told = tuple(event for event in reference.events if event.name != "ruled")
    verdict, divergences = judge(scenario, trace, replace(reference, events=told))
    assert divergences == []
    assert "ruled acceptance of a not judged: the reference does not know its logits" in verdict.reasons


def test_a_near_tie_of_adjusted_logits_goes_either_way(pair):
    scenario, trace = ran(pair, GREEDY["logit_bias"], {"logit_bias": {"7": 6.0}})
    reference = Oracle(target=pair.target, draft=pair.draft).answer(scenario, trace)
    near = tuple(
        replace(event, data={**event.data, "margin": 1e-9}) if event.name == "ruled" else event
        for event in reference.events
    )
    assert of_rules(judge(scenario, trace, reference)[1])
    assert of_rules(judge(scenario, trace, replace(reference, events=near))[1]) == []
