"""What a request's keys make of logits, against numbers worked out by hand and Hugging Face's processors."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from harness.contract.requests import RequestSpec
from reference.choices import decide, first
from reference.engine_view import Conditions
from reference.logit_rules import Rules
from reference.tree import with_depths
from reference.verify import Uniforms

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0])
NOTHING = np.empty((0, 0))


def rules(*, ends=(), **keys):
    return Rules(request=RequestSpec(rid="a", input_ids=(1,), **keys), ends=ends)


def test_penalties_count_what_was_generated_as_openai_says():
    given = rules(frequency_penalty=0.5, presence_penalty=0.25)
    assert given.adjusted(LOGITS, (0, 0, 3)).tolist() == pytest.approx([2 - 2 * 0.5 - 0.25, -1, 0.5, 1 - 0.5 - 0.25])
    assert given.adjusted(LOGITS, ()).tolist() == LOGITS.tolist()


def test_a_repetition_penalty_is_hugging_faces():
    asked = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    expected = asked(torch.tensor([[0, 1]]), LOGITS[None].clone())[0]
    assert rules(repetition_penalty=1.7).adjusted(LOGITS, (1, 0, 0)).tolist() == pytest.approx(expected.tolist())


def test_nothing_ends_a_request_before_its_least_length():
    asked = MinNewTokensLengthLogitsProcessor(prompt_length_to_skip=1, min_new_tokens=2, eos_token_id=[0])
    given = rules(min_new_tokens=2, ends=(0,))
    for generated in ((), (3,), (3, 2), (3, 2, 2)):
        expected = asked(torch.tensor([[1, *generated]]), LOGITS[None].clone())[0]
        assert given.adjusted(LOGITS, generated).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("name", "chosen"), [("forbid", 3), ("force", 0)])
def test_processors_are_masks(name, chosen):
    given = rules(custom_logit_processor=name, custom_params={"token_ids": [0]})
    assert int(given.adjusted(LOGITS, ()).argmax()) == chosen


@pytest.mark.parametrize(
    "cuts",
    [
        *({"top_k": k} for k in (2, 5, 40)),
        *({"top_p": p} for p in (0.05, 0.4, 0.9)),
        *({"min_p": p} for p in (0.05, 0.4, 1.0)),
        {"top_k": 7, "top_p": 0.5},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.2},
    ],
    ids=str,
)
def test_cuts_are_hugging_faces_in_its_order(cuts):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 2
    makers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    warpers = [TemperatureLogitsWarper(0.8), *(makers[key](value) for key, value in cuts.items())]
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 1), logits[None].clone())[0].softmax(-1)
    found, near = rules(temperature=0.8, **cuts).distribution(logits, ())
    assert found == pytest.approx(expected.numpy(), abs=1e-12)
    assert near.margin > 1e-4 or "min_p" in cuts


def test_slack_is_how_far_an_end_moves_before_other_tokens_are_left():
    """A sum of probabilities by itself, two tokens that change places by a quarter of the distance of their logits."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    for cuts, slack in (
        ({"top_k": 2}, math.log(0.3 / 0.2) / 4),
        ({"top_p": 0.6}, 0.1),
        ({"top_p": 0.79}, 0.01),
        ({"top_p": 0.67}, math.log(0.3 / 0.2) / 4),
        ({"min_p": 0.5}, math.log(0.3 / 0.25) / 4),
    ):
        assert rules(temperature=1.0, **cuts).distribution(logits, ())[1].margin == pytest.approx(slack)


def test_tokens_as_likely_as_one_another_may_take_each_others_place_in_a_nucleus():
    twins = torch.tensor([0.4, 0.25, 0.25, 0.1], dtype=torch.float64).log()
    left, near = rules(temperature=1.0, top_p=0.5).distribution(twins, ())
    assert np.count_nonzero(left) == 2
    assert near.margin == near.reach == pytest.approx(0.0)


TREE = with_depths((9, 0, 2, 0), (-1, 0, 0, 1))
ROWS = torch.tensor([[2.0, 0.0, 1.9, -1.0]]).repeat(4, 10)[:, :10]


def test_a_node_counts_the_path_that_leads_to_it():
    """Token 0 is best, and 0.5 less for each time it was generated: after the path 0 it is still counted once."""
    given = rules(frequency_penalty=0.5)
    walk = decide(TREE, ROWS[:, :4], Conditions(), given, (), most=2, drafted=NOTHING).walk
    assert walk.tokens == (0, 2)
    assert walk.near.margin == pytest.approx(0.1)
    assert decide(TREE, ROWS[:, :4], Conditions(), given, (0,), most=2, drafted=NOTHING).walk.tokens == (2, 0)


def test_a_grammar_follows_the_text_where_penalties_count_something_else():
    """As under --assume F-037: each path allows one token, whatever is counted."""

    class Ladder:
        def allowed(self, generated):
            return np.arange(4) == len(generated) % 4

    asked = RequestSpec(rid="a", input_ids=(1,), regex="x", frequency_penalty=0.5)
    given = Rules(request=asked, ends=(), language=Ladder())

    def of_none(generated):
        return ()

    walk = decide(TREE, ROWS[:, :4], Conditions(), given, (3,), most=2, drafted=NOTHING, counts=of_none).walk
    assert walk.tokens[0] == 1  # behind one token, not behind none
    assert first(ROWS[0, :4], given, (3, 3), None, ()).walk.tokens == (2,)


def test_what_explains_another_walk_is_the_key_without_which_it_is_right():
    given = rules(logit_bias={"2": 1.0}, custom_logit_processor="forbid", custom_params={"token_ids": [3]})
    known = Conditions(committed=(0, 0, 0))
    assert decide(TREE, ROWS[:, :4], known, given, (), most=2, drafted=NOTHING).explains == ("logit_bias",)
    right = Conditions(committed=(2, 2))
    assert decide(TREE, ROWS[:, :4], right, given, (), most=2, drafted=NOTHING).explains == ()


def test_a_sampled_walk_draws_from_what_the_cuts_leave():
    known = Conditions(uniforms=Uniforms(nodes=(0.999,) * 4, final=0.999), committed=(1,))
    whole = decide(TREE, ROWS[:, :4], known, rules(temperature=1.0), (), most=2, drafted=NOTHING)
    cut = decide(TREE, ROWS[:, :4], known, rules(temperature=1.0, top_k=2), (), most=2, drafted=NOTHING)
    assert whole.walk.tokens == (3,)  # the last of the vocabulary
    assert cut.walk.tokens[-1] in (0, 2)


def test_a_first_token_is_the_best_one_or_one_of_those_left():
    row = ROWS[0, :4]
    assert first(row, rules(logit_bias={"1": 5.0}), (), 1).walk.tokens == (1,)
    assert first(row, rules(logit_bias={"1": 5.0}), (), 0).explains == ("logit_bias",)
    drawn = rules(temperature=1.0, min_p=0.5)
    assert first(row, drawn, (), 2).walk.tokens == (2,)
    cut = first(row, drawn, (), 3)
    assert (cut.walk.tokens, cut.explains) == ((0,), ("min_p",))


def test_one_token_left_is_greedy():
    assert RequestSpec(rid="a", input_ids=(1,), temperature=1.0, top_k=1).greedy
    assert RequestSpec(rid="a", input_ids=(1,), top_k=5, min_p=0.1).rules == ()
