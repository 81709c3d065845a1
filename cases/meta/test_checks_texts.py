"""Checks `grammar` and `texts`: what follows grammar and stop strings passes, and each way to miss them does not."""

from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade
from cases.meta.speculating import FreeSession, answered
from cases.tokenizers import tokenizer_for
from harness.checks.evidence import gather
from harness.checks.judge import judge
from harness.checks.registry import CHECKS, run_check
from harness.contract.requests import RequestSpec
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.trace import EOS, Event
from harness.contract.types import Outcome
from reference.constraints import Constraints
from reference.logit_rules import Rules
from reference.spelling import Spelling

SPECS = {
    "chain": SpecConfig(num_steps=3, eagle_topk=1, num_draft_tokens=4),
    "tree": SpecConfig(num_steps=2, eagle_topk=3, num_draft_tokens=7),
}
END = 511


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """Where tokenizers are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLECHECK_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def program(spec, **keys):
    request = RequestSpec(rid="a", input_ids=(5, 17, 130, 42), max_new_tokens=30, **keys)
    return handmade.asking(
        request, spec=spec, engine=EngineConfig(skip_tokenizer_init=False, grammar_backend="xgrammar")
    )


def driven(eagle_tiny, scenario):
    """What an engine reports that does as it was asked."""
    (request,), folder = scenario.requests, tokenizer_for(scenario, eagle_tiny.target)
    own = Constraints(scenario=scenario, spelling=Spelling(folder), vocab=512, ends=(END,))
    session = FreeSession.of(eagle_tiny, scenario.spec)
    rules = Rules(request=request, ends=(END,), language=own.languages.get("a"))
    trace = session.speculate(request, scenario_id=scenario.id, rules=rules)
    (end,), known = trace.ends, [trace.rows.ints["input_id"][row] for row in accepts(trace)]
    first = trace.rows.lists["chosen_ids"][int(np.flatnonzero(trace.rows.strings["phase"] == "PREFILL")[-1])]
    stop = own.spelling.stop(request, (*first, *known))
    if stop is not None:
        end = replace(end, output_ids=end.output_ids[: stop.length], reason="stop")
    trace = replace(trace, ends=(end,), header=trace.header | {EOS: [END], "release": "0.5.23"})
    masks = [mask_event(event) for event in own.events(trace, scenario.spec) if event.name == "allowed"]
    text = own.spelling.answered(request, end.output_ids, stop)
    matched = END if stop is None else stop.matched[0]
    said = Event(name="text", scheduler_step=0, data={"rid": "a", "text": text, "matched": matched})
    return replace(trace, events=(*trace.events, *masks, said))


def mask_event(allowed):
    """As an engine reports the masks that the reference expects; where nothing is said it allows all."""
    bits = ["ff" * 64 if one is None else one for one in allowed.data["bits"]]
    shared = {name: [allowed.data[name]] for name in ("attempt", "committed", "rid")}
    data = {"phase": allowed.data["phase"], "bits": [bits], "round": 0, "rids": shared["rid"]}
    return replace(allowed, name="masks", data=data | {"attempts": shared["attempt"], "committed": shared["committed"]})


def accepts(trace):
    return np.flatnonzero(trace.rows.strings["phase"] == "ACCEPT")


def judged(eagle_tiny, scenario, trace):
    """(what the two checks found together, its hints)"""
    evidence = gather(scenario, trace, answered(eagle_tiny, scenario, trace))
    result = run_check(CHECKS["grammar"], evidence)
    result.add(run_check(CHECKS["texts"], evidence))
    return result, [found.hint for found in result.divergences]


REGEX = "([a-z]|[0-9]){3,20}[;]"


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS)
def constrained(request, eagle_tiny):
    scenario = program(request.param, regex=REGEX)
    return scenario, driven(eagle_tiny, scenario)


def test_what_follows_its_grammar_passes(eagle_tiny, constrained):
    scenario, trace = constrained
    result, hints = judged(eagle_tiny, scenario, trace)
    assert (hints, result.unknown) == ([], [])
    assert result.compared["masks"] > 5
    assert trace.ends[0].output_ids[-1] == END


def test_a_token_that_the_grammar_does_not_allow_is_a_divergence(eagle_tiny, constrained):
    scenario, trace = constrained
    broken = handmade.copy_trace(trace)
    broken.rows.ints["input_id"][accepts(trace)[0]] = 70  # a punctuation mark
    assert "not-allowed" in judged(eagle_tiny, scenario, broken)[1]


def test_an_end_where_the_text_is_not_whole_is_a_divergence(eagle_tiny, constrained):
    scenario, trace = constrained
    broken = handmade.copy_trace(trace)
    broken.rows.ints["input_id"][accepts(trace)[0]] = END
    assert "ends-too-early" in judged(eagle_tiny, scenario, broken)[1]


@pytest.mark.parametrize(("word", "hint"), [("00", "mask-too-narrow"), ("ff", "mask-too-wide")])
def test_every_nodes_mask_is_compared(eagle_tiny, constrained, word, hint):
    scenario, trace = constrained
    place = next(i for i, event in enumerate(trace.events) if event.name == "masks" and event.data["phase"] == "VERIFY")
    (bits,) = trace.events[place].data["bits"]
    wrong = [[word * 64, *bits[1:]]]
    events = list(trace.events)
    events[place] = replace(events[place], data=events[place].data | {"bits": wrong})
    assert hint in judged(eagle_tiny, scenario, replace(trace, events=tuple(events)))[1]


def test_masks_that_nobody_saw_are_no_pass(eagle_tiny, constrained):
    scenario, trace = constrained
    events = tuple(event for event in trace.events if event.name != "masks")
    result, hints = judged(eagle_tiny, scenario, replace(trace, events=events))
    assert hints == []
    assert "masks of a in VERIFY not judged: the probe saw none" in result.unknown


def test_texts_that_the_reference_cannot_spell_are_no_pass(eagle_tiny, stopped):
    scenario, trace = stopped
    evidence = gather(scenario, trace, answered(eagle_tiny, scenario, trace))
    bare = replace(evidence.reference, events=[one for one in evidence.reference.events if one.name != "written"])
    result = run_check(CHECKS["texts"], replace(evidence, reference=bare))
    assert result.unknown == ["the text of a is not judged: the reference has no tokenizer"]


def test_a_grammar_without_a_second_opinion_is_no_pass(eagle_tiny):
    scenario = program(SPECS["chain"], regex="[a-z].*")
    result, hints = judged(eagle_tiny, scenario, driven(eagle_tiny, program(SPECS["chain"])))
    assert hints == []
    assert [why.partition(":")[0] for why in result.unknown] == ["the grammar of a is not judged"]


UNREAD = "the grammar of a is not judged: a dot of a regex means a line break too, or does not"


@pytest.fixture(params=[{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def unread(request, eagle_tiny, constrained):
    """(scenario, traces) of an engine that follows a grammar which the reference does not read."""
    scenario = program(constrained[0].spec, regex=f"{REGEX}|.", **request.param)
    trace = replace(handmade.copy_trace(constrained[1]), scenario_id=scenario.id)
    return scenario, trace, answered(eagle_tiny, scenario, trace)


def test_what_follows_a_grammar_without_a_second_opinion_has_no_fault(unread):
    scenario, trace, reference = unread
    evidence = gather(scenario, trace, reference)
    differs = any(run_check(check, evidence).divergences for check in CHECKS.values())
    assert differs == scenario.requests[0].greedy  # of a sampled one without uniforms the reference takes every choice
    verdict, divergences = judge(scenario, trace, reference)
    assert divergences == []
    assert verdict.outcome is Outcome.UNKNOWN
    assert UNREAD in verdict.reasons


@pytest.mark.parametrize(("phase", "column"), [("DRAFT", "position"), ("EXTEND", "input_id"), ("VERIFY", "parent")])
def test_what_no_grammar_decides_is_judged_without_a_second_opinion(unread, phase, column):
    scenario, trace, reference = unread
    trace.rows.ints[column][handmade.find(trace, phase=phase, nth=1)] += 1
    verdict, divergences = judge(scenario, trace, reference)
    assert verdict.outcome is Outcome.FAIL
    assert divergences[0].key.phase == phase
    assert UNREAD in verdict.reasons


@pytest.fixture(scope="module", params=({"stop": ("e",)}, {"stop_regex": ("[0-9]{2}",)}), ids=("string", "pattern"))
def stopped(request, eagle_tiny):
    scenario = program(SPECS["chain"], **request.param)
    return scenario, driven(eagle_tiny, scenario)


def ended(trace, **changes):
    return replace(trace, ends=(replace(trace.ends[0], **changes),))


def test_what_stops_at_its_string_passes(eagle_tiny, stopped):
    scenario, trace = stopped
    assert judged(eagle_tiny, scenario, trace)[1] == []
    assert trace.ends[0].reason == "stop"
    assert len(trace.ends[0].output_ids) < 30


def test_a_text_that_goes_on_behind_its_string_is_a_divergence(eagle_tiny, stopped):
    scenario, trace = stopped
    more = (*trace.ends[0].output_ids, 3)
    assert "tokens-behind-stop-string" in judged(eagle_tiny, scenario, ended(trace, output_ids=more))[1]


def test_a_stop_string_that_nobody_noticed_is_a_divergence(eagle_tiny, stopped):
    scenario, trace = stopped
    more = (*trace.ends[0].output_ids, *[3] * (30 - len(trace.ends[0].output_ids)))
    assert judged(eagle_tiny, scenario, ended(trace, output_ids=more, reason="length"))[1] == ["stop-string-missed"]


def test_a_text_that_ends_without_its_string_is_a_divergence(eagle_tiny, stopped):
    scenario, trace = stopped
    less = trace.ends[0].output_ids[:-1]
    assert "stopped-without-stop" in judged(eagle_tiny, scenario, ended(trace, output_ids=less))[1]


def test_a_stop_that_is_called_a_length_is_a_divergence(eagle_tiny, stopped):
    scenario, trace = stopped
    assert "stop-string-not-said" in judged(eagle_tiny, scenario, ended(trace, reason="length"))[1]


@pytest.mark.parametrize(("key", "hint"), [("matched", "matched-another"), ("text", "text")])
def test_what_comes_back_is_compared(eagle_tiny, stopped, key, hint):
    scenario, trace = stopped
    events = tuple(
        replace(event, data=event.data | {key: "other"}) if event.name == "text" else event for event in trace.events
    )
    assert hint in judged(eagle_tiny, scenario, replace(trace, events=events))[1]
