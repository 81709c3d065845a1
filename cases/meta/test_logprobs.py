"""The reference's log-probabilities, against plain log-softmax of the target's logits at one row after the other."""

import pytest

from cases.meta.speculating import FreeSession
from harness.contract.requests import RequestSpec
from reference import logprobs
from reference.logit_rules import Rules

OUTPUT = (9, 30, 7, 11)


@pytest.fixture(scope="module")
def session(eagle_tiny):
    return FreeSession.of(eagle_tiny)


def row(session, tokens):
    """[V]: the logits after these tokens, read alone."""
    target = session.target
    states = target.read(tokens, keep=(target.layers,)).states[target.layers]
    return target.logits(states[-1]).double()


@pytest.mark.parametrize("block", [3, 64])
def test_each_place_has_the_log_softmax_after_everything_before_it(session, block, monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK", block)
    asked = RequestSpec(
        rid="a",
        input_ids=(5, 17, 130, 42, 8),
        temperature=0.5,
        return_logprob=True,
        top_logprobs_num=3,
        token_ids_logprob=(1, 130),
        logprob_start_len=1,
        logit_bias={"30": 2.0},
    )
    said = session.logprobs(Rules(request=asked), OUTPUT).data
    text = (*asked.input_ids, *OUTPUT)
    assert (said["first"], len(said["own"])) == (2, len(text) - 2)
    for place, at in enumerate(range(2, len(text))):
        logits = row(session, text[:at])
        if at >= 5:
            logits[30] += 2.0
            logits = logits / 0.5
        values = logits.log_softmax(-1)
        assert said["own"][place] == pytest.approx(float(values[text[at]]), abs=1e-5)
        assert said["ids"][place] == pytest.approx(values[[1, 130]].tolist(), abs=1e-5)
        assert said["top_ids"][place][:3] == values.topk(3).indices.tolist()
        assert said["scales"][place] == pytest.approx(float(logits.abs().max()), abs=1e-5)


def test_output_alone_is_said_where_no_part_of_the_prompt_is_asked_for(session):
    asked = RequestSpec(rid="a", input_ids=(5, 17, 130), return_logprob=True)
    said = session.logprobs(Rules(request=asked), OUTPUT).data
    assert (said["first"], len(said["own"]), said["ids"]) == (3, 4, [[]] * 4)
