"""Losslessness: what a verify commits is the greedy text, whatever the draft proposed."""

import random

import pytest
import torch

from cases.checkpoints import make_recipe
from cases.fixed import tokens as random_tokens
from cases.meta.sessions import SPEC_IDS, SPECS
from cases.meta.speculating import FreeSession
from cases.recipes import Recipe
from harness.contract.requests import RequestSpec
from harness.contract.settings import SpecConfig
from reference.draft import Forced, Reading, draft
from reference.eagle1 import DraftHead
from reference.pairs import paper_target as load_llama
from reference.tree import build_tree, with_depths
from reference.verify import greedy_walk, verify


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    recipe = Recipe(name="small", seed=9, vocab=12, hidden=16, intermediate=16, head_dim=8, layers=2)
    pair = make_recipe(recipe, tmp_path_factory.mktemp("pairs"))
    return DraftHead.load(pair.draft, load_llama(pair.target))


def _request(rng):
    prompt = tuple(rng.randrange(510) for _ in range(rng.randint(1, 40)))
    return RequestSpec(rid="r0", input_ids=prompt, max_new_tokens=rng.randint(1, 24))


def test_thousands_of_random_verifies_are_lossless(small):
    """Rounds at every place of a greedy text, with the head's own trees: the walk commits the text, all of it."""
    rng, vocab, cases, lengths = random.Random(4), small.target.config.vocab, 0, set()
    session = FreeSession(small.target, small, SPECS[0])
    with torch.inference_mode():
        for _ in range(60):
            k, t = rng.randint(1, 5), rng.randint(1, 4)
            n = k + 1 if t == 1 else rng.randint(2, 1 + t + (k - 1) * t * t)
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 6))]
            text = session.generate(prompt, 48)
            reading = Reading.of(small, prompt + text)
            starts = list(range(len(prompt), len(prompt) + len(text) - 7))
            chains = draft(small, reading, [(c, Forced()) for c in starts], k=k, t=t)
            trees = [
                (c, build_tree(int(reading.tokens[c]), chain.candidates, n))
                for c, chain in zip(starts, chains, strict=True)
            ]
            for (c, tree), (_, logits) in zip(trees, verify(small, reading.trunk, trees), strict=True):
                choices = logits.argmax(-1).tolist()
                walk = greedy_walk(tree.tokens, tree.parents, choices)
                assert list(walk.tokens) == reading.tokens[c + 1 : c + 1 + len(walk.tokens)].tolist()
                cases += 1
                lengths.add(len(walk.tokens))
    assert cases > 2000
    assert lengths >= {1, 2, 3, 4, 5}, "a lossless walk that accepts nothing would prove little"


def test_thousands_of_random_trees_are_lossless_under_any_target():
    """A made-up target (the next token is a hash of the whole text) and random trees, half of them made to agree."""
    rng, lengths = random.Random(5), set()

    def target(text):
        return hash((17, *text)) % 3

    for _ in range(5000):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        tokens, parents, texts = [prompt[-1]], [-1], [prompt]
        for _ in range(rng.randint(1, 11)):
            parent = rng.randrange(len(tokens))
            token = target(texts[parent]) if rng.random() < 0.5 else rng.randrange(3)
            if (parent, token) in zip(parents, tokens, strict=True):
                continue  # a draft row never proposes one token twice
            tokens.append(token)
            parents.append(parent)
            texts.append([*texts[parent], token])
        walk = greedy_walk(tokens, parents, [target(text) for text in texts])
        text = list(prompt)
        for token in walk.tokens:
            assert token == target(text)
            text.append(token)
        lengths.add(len(walk.tokens))
    assert lengths >= {1, 2, 3, 4}


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_free_running_speculation_writes_the_text_of_plain_generation(eagle_head, spec):
    session = FreeSession(eagle_head.target, eagle_head, spec)
    rng = random.Random(6)
    for index in range(5):
        plain = _request(rng)
        text = session.generate(plain.input_ids, plain.max_new_tokens)
        trace = session.speculate(plain, chunk=rng.choice([None, 1, 5, 16]))
        assert list(trace.ends[0].output_ids) == text
        assert trace.ends[0].reason == "length"
        stop = text[rng.randrange(len(text))]
        stopping = plain.model_copy(update={"stop_token_ids": (stop,)})
        expected = session.generate(plain.input_ids, plain.max_new_tokens, (stop,))
        assert expected == text[: text.index(stop) + 1]
        end = session.speculate(stopping).ends[0]
        assert (end.reason, list(end.output_ids)) == ("stop", expected), index


def test_margins_are_the_distance_to_the_next_best_token(eagle_head):
    session = FreeSession(eagle_head.target, eagle_head, SPECS[0])
    made = session.generate_with_margins([5, 6, 7], 6)
    text = [5, 6, 7, *made.tokens]
    for index, margin in enumerate(made.margins):
        logits = eagle_head.target.logits(eagle_head.target.forward(torch.tensor(text[: 3 + index])))[-1]
        others = torch.cat((logits[: made.tokens[index]], logits[made.tokens[index] + 1 :]))
        assert margin == pytest.approx(float(logits[made.tokens[index]] - others.max()), abs=1e-5)
        assert margin > 0


def test_a_batch_of_trees_answers_as_each_path_alone(small):
    text = torch.randint(12, (10,), generator=torch.Generator().manual_seed(1))
    tree = with_depths((int(text[4]), 3, 8, 1, 2), (-1, 0, 0, 2, 3))
    other = with_depths((int(text[7]), 5), (-1, 0))
    (first, _), (second, _) = verify(small, small.target.read(text, keep=small.states), [(4, tree), (7, other)])
    for hidden, committed, tokens in [(first[1], 4, [3]), (first[4], 4, [8, 1, 2]), (second[1], 7, [5])]:
        alone = small.target.forward(torch.cat((text[: committed + 1], torch.tensor(tokens))))[-1]
        assert torch.allclose(hidden, alone, rtol=0, atol=1e-5)


def test_confirmed_text_is_the_generated_text_and_a_wrong_claim_changes_nothing(eagle_head):
    session = FreeSession(eagle_head.target, eagle_head, SpecConfig())
    for seed, length in enumerate((1, 7, 40)):
        prompt = random_tokens(seed=seed, length=length)
        text = session.generate_with_margins(prompt, 20)
        confirmed = session.confirm(prompt, text.tokens)
        assert confirmed is not None
        assert confirmed.tokens == text.tokens
        assert max(abs(a - b) for a, b in zip(confirmed.margins, text.margins, strict=True)) < 1e-4
        for place in (0, 11, 19):
            claim = list(text.tokens)
            claim[place] = (claim[place] + 1) % 500
            assert session.confirm(prompt, claim) is None
            went_on = session.generate_with_margins(prompt, 20, claim=claim)
            assert went_on.tokens == text.tokens
            assert max(abs(a - b) for a, b in zip(went_on.margins, text.margins, strict=True)) < 1e-4
        stop = text.tokens[5]
        ended = text.tokens[: text.tokens.index(stop) + 1]
        for claim in ((), text.tokens, (*text.tokens[:3], eagle_head.target.vocab), text.tokens[:4] * 9):
            assert session.generate_with_margins(prompt, 20, claim=claim).tokens == text.tokens
            assert session.generate_with_margins(prompt, 20, (stop,), claim=claim).tokens == ended
