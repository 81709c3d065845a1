"""The draft chain against plain one-path-at-a-time computation, and what conditioning may and may not change."""

import pytest
import torch

from cases.checkpoints import make_recipe
from cases.recipes import Recipe
from reference.attention import Sight
from reference.draft import Forced, Reading, draft
from reference.eagle1 import DraftHead
from reference.pairs import paper_target as load_llama

SHAPES = [(1, 1), (1, 3), (3, 1), (2, 2), (3, 3), (4, 2)]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    recipe = Recipe(name="chain", seed=5, vocab=24, hidden=16, intermediate=16, head_dim=8, layers=2)
    pair = make_recipe(recipe, tmp_path_factory.mktemp("pairs"))
    return DraftHead.load(pair.draft, load_llama(pair.target, torch.float64))


@pytest.fixture(scope="module")
def reading(head):
    tokens = torch.randint(24, (14,), generator=torch.Generator().manual_seed(2))
    return Reading.of(head, tokens.tolist())


def alone(head, reading, committed, steps):
    """g after feeding `steps` tokens one by one on the first `committed` rows: a causal sequence, no tree, no beams."""
    ids, hidden = reading.tokens[1 : committed + 1], reading.entered[:committed]
    g = head.forward(ids, hidden, torch.arange(len(ids)), Sight.causal(len(ids)))[0][-1]
    for token in steps:
        ids, hidden = torch.cat((ids, torch.tensor([token]))), torch.cat((hidden, g[None]))
        g = head.forward(ids, hidden, torch.arange(len(ids)), Sight.causal(len(ids)))[0][-1]
    return g


def path(candidates, index):
    """Tokens from the root to a candidate."""
    before = candidates.parents[index]
    return [*(path(candidates, before) if before >= 0 else []), candidates.tokens[index]]


@pytest.mark.parametrize(("k", "t"), SHAPES)
def test_a_candidate_scores_the_log_probability_of_its_path_computed_alone(head, reading, k, t):
    (chain,) = draft(head, reading, [(9, Forced())], k=k, t=t)
    assert len(chain.candidates.tokens) == t + (k - 1) * t * t
    for index in range(len(chain.candidates.tokens)):
        tokens = path(chain.candidates, index)
        score = 0.0
        for depth, token in enumerate(tokens):
            log_probs = head.logits(alone(head, reading, 9, tokens[:depth])).log_softmax(-1)
            score += float(log_probs[token])
            assert int((log_probs > log_probs[token]).sum()) < t, "only a row's t best may be proposed"
        assert chain.candidates.scores[index] == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize(("k", "t"), SHAPES)
def test_each_step_feeds_the_best_candidates_of_the_level_before(head, reading, k, t):
    (chain,) = draft(head, reading, [(9, Forced())], k=k, t=t)
    scores, tokens = chain.candidates.scores, chain.candidates.tokens
    assert len(chain.steps) == k - 1
    levels = [range(t), *(range(t + i * t * t, t + (i + 1) * t * t) for i in range(k - 1))]
    for i, step in enumerate(chain.steps):
        ranked = sorted(levels[i], key=lambda index: -scores[index])[:t]
        assert step.expected_ids == tuple(tokens[index] for index in ranked)
        origins = tuple(-1 if i == 0 else (index - levels[i].start) // t for index in ranked)
        assert step.expected_parents == origins
        for s, index in enumerate(ranked):
            g = alone(head, reading, 9, path(chain.candidates, index))
            assert torch.allclose(step.hidden_out[s], g, rtol=0, atol=1e-9)
            before = alone(head, reading, 9, path(chain.candidates, index)[:-1])
            assert torch.allclose(step.hidden_in[s], before, rtol=0, atol=1e-9)


def test_ties_go_to_the_lowest_id_and_the_earlier_candidate(reading):
    class Flat:
        """A head to which every token is equally likely."""

        def forward(self, tokens, hidden, positions, sight, kept):
            return hidden, kept

        def logits(self, g):
            return torch.zeros(*g.shape[:-1], 24)

    (chain,) = draft(Flat(), reading, [(3, Forced())], k=3, t=3)
    assert chain.candidates.tokens == (0, 1, 2) * 7
    assert [step.expected_ids for step in chain.steps] == [(0, 1, 2), (0, 1, 2)]
    assert chain.steps[1].expected_parents == (0, 0, 0)


@pytest.mark.parametrize(("k", "t"), SHAPES)
def test_rounds_of_one_sequence_answer_as_if_each_were_alone(head, reading, k, t):
    together = draft(head, reading, [(c, Forced()) for c in range(1, 14)], k=k, t=t)
    for c, chain in zip(range(1, 14), together, strict=True):
        cut = Reading.of(head, reading.tokens[: c + 1])
        (single,) = draft(head, cut, [(c, Forced())], k=k, t=t)
        assert chain.candidates.tokens == single.candidates.tokens
        assert chain.candidates.parents == single.candidates.parents
        assert chain.candidates.scores == pytest.approx(single.candidates.scores, abs=1e-9)


def as_forced(chain, t):
    """A chain's own choices, as another side would report them."""
    tokens = chain.candidates.tokens
    levels = [tokens[t + i * t * t :][: t * t] for i in range(len(chain.steps))]
    return Forced(
        first=tokens[:t],
        chosen={i: tuple(level[s * t : s * t + t] for s in range(t)) for i, level in enumerate(levels)},
        input_ids={i: step.expected_ids for i, step in enumerate(chain.steps)},
        parents={i: step.expected_parents for i, step in enumerate(chain.steps)},
    )


@pytest.mark.parametrize(("k", "t"), SHAPES)
@pytest.mark.parametrize("parents_known", [True, False])
def test_forcing_the_references_own_choices_changes_nothing(head, reading, k, t, parents_known):
    (free,) = draft(head, reading, [(9, Forced())], k=k, t=t)
    own = as_forced(free, t)
    forced = own if parents_known else Forced(first=own.first, chosen=own.chosen, input_ids=own.input_ids)
    (again,) = draft(head, reading, [(9, forced)], k=k, t=t)
    assert again.candidates == free.candidates
    for a, b in zip(again.steps, free.steps, strict=True):
        assert (a.expected_ids, a.expected_parents) == (b.expected_ids, b.expected_parents)
        assert torch.equal(a.hidden_out, b.hidden_out)


def test_a_forced_proposal_is_followed_but_scored_by_the_reference(head, reading):
    odd = 19
    (free,) = draft(head, reading, [(9, Forced())], k=3, t=1)
    assert odd not in free.candidates.tokens
    (chain,) = draft(head, reading, [(9, Forced(first=(odd,)))], k=3, t=1)
    assert chain.steps[0].expected_ids == (odd,), "the next step should be fed what was proposed"
    assert torch.allclose(chain.steps[0].hidden_out[0], alone(head, reading, 9, [odd]), rtol=0, atol=1e-9)
    log_probs = head.logits(reading.draft[8]).log_softmax(-1)
    assert chain.candidates.scores[0] == pytest.approx(float(log_probs[odd]), abs=1e-12)


def test_beams_fed_in_another_order_are_answered_in_that_order(head, reading):
    (free,) = draft(head, reading, [(9, Forced())], k=3, t=3)
    fed = {i: step.expected_ids[::-1] for i, step in enumerate(free.steps[:1])}
    (chain,) = draft(head, reading, [(9, Forced(input_ids=fed))], k=3, t=3)
    assert chain.steps[0].expected_ids == free.steps[0].expected_ids, "what should be fed does not change"
    assert torch.allclose(chain.steps[0].hidden_out.flip(0), free.steps[0].hidden_out, rtol=0, atol=1e-9)


def test_a_wrong_input_that_nobody_proposed_is_answered_but_not_adopted(head, reading):
    odd = 19
    (free,) = draft(head, reading, [(9, Forced())], k=3, t=1)
    (chain,) = draft(head, reading, [(9, Forced(input_ids={0: (odd,)}))], k=3, t=1)
    assert chain.steps[0].expected_ids == free.steps[0].expected_ids
    assert torch.allclose(chain.steps[0].hidden_out[0], alone(head, reading, 9, [odd]), rtol=0, atol=1e-9)
    assert chain.candidates.tokens[0] == free.candidates.tokens[0], "the tree holds proposals, not inputs"
