"""Sampled verification against the law it must have: every outcome's probability, summed over all coins there are.

A walk is a step function of its coins, so cutting the unit interval where it can change gives exact probabilities,
from the rule alone: nothing is drawn here.
"""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from harness.engine_side.replacement_kernels.cpu_sampling import renorm_top_k, renorm_top_p, verify_sampled
from reference.verify import Uniforms, greedy_walk, rejection_walk, sampled_walk

#: tokens 0..3; node 0 is the root. Two branches of two levels, a token proposed under both, a leaf that is impossible.
TREES = {
    "chain": ((9, 1, 2), (-1, 0, 1)),
    "branches": ((9, 1, 2, 2, 0, 3), (-1, 0, 0, 1, 1, 2)),
    "wide": ((9, 3, 0, 2), (-1, 0, 0, 0)),
    "root alone": ((9,), (-1,)),
}
LAWS = {
    "plain": [[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.35, 0.15], [0.5, 0.1, 0.05, 0.35]],
    "zeros": [[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]],
}


def after(law, history):
    """The target's law after each committed token: here by how many there are and by the last one."""
    return law[(len(history) + sum(history)) % len(law)]


def histories(tokens, parents, node):
    """Tokens on the way to a node, without the root's own."""
    return [] if node == 0 else [*histories(tokens, parents, parents[node]), tokens[node]]


def middles(cuts):
    """(middle, width) of the intervals that cuts make of [0, 1)."""
    ends = sorted({0.0, 1.0, *(cut for cut in cuts if 0 < cut < 1)})
    return [((low + high) / 2, high - low) for low, high in pairwise(ends)]


def sums(shares):
    """All partial sums of shares and of what is left without any of them, as parts of the whole."""
    found, running = [], 0.0
    for share in shares:
        running += share
        found.append(running)
    return found


def outcomes(tokens, parents, law, most):
    """walk.tokens -> probability, over every combination of coin intervals."""
    rows = np.array([after(law, histories(tokens, parents, node)) for node in range(len(tokens))])
    children = {node: [s for s in range(1, len(tokens)) if parents[s] == node] for node in range(len(tokens))}
    inner = [node for node in children if children[node]]
    per_node = [middles(sums([rows[node][tokens[s]] for s in children[node]])) for node in inner]
    cuts = set()
    for node in range(len(tokens)):
        for taken in ([], children[node]):
            left = [0.0 if t in {tokens[s] for s in taken} else p for t, p in enumerate(rows[node])]
            if sum(left):
                cuts |= {end / sum(left) for end in sums(left)}
    found = {}
    for chosen in product(*per_node):
        for final, width in middles(cuts):
            coins = [0.5] * len(tokens)
            weight = width
            for node, (coin, share) in zip(inner, chosen, strict=True):
                coins[node], weight = coin, weight * share
            walk = sampled_walk(tokens, parents, rows, Uniforms(nodes=tuple(coins), final=final), most=most)
            found[walk.tokens] = found.get(walk.tokens, 0.0) + weight
    return found


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_whatever_is_drafted_the_committed_tokens_have_the_targets_own_law(tree, law):
    tokens, parents = tree
    found = outcomes(tokens, parents, law, most=2)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    longest = max(len(run) for run in found)
    for length in range(1, longest + 1):
        # runs shorter than this stop where the next round goes on: compare what is said once a prefix is given
        for prefix in {run[: length - 1] for run in found if len(run) >= length}:
            going_on = {run: p for run, p in found.items() if len(run) >= length and run[: length - 1] == prefix}
            total = sum(going_on.values())
            if length > 1 and total < 1e-9:
                continue
            shares = [0.0] * 4
            for run, p in going_on.items():
                shares[run[length - 1]] += p / total
            assert shares == pytest.approx(after(law, list(prefix)), abs=1e-9), prefix


def test_a_certain_law_is_the_greedy_walk_whatever_the_coins():
    tokens, parents = TREES["branches"]
    law = np.eye(4)[[1, 2, 3, 0, 0, 1]]
    greedy = greedy_walk(tokens, parents, law.argmax(-1).tolist())
    for coin in (0.0, 0.3, 1 - 2**-24):
        walk = sampled_walk(tokens, parents, law, Uniforms(nodes=(coin,) * 6, final=coin), most=2)
        assert (walk.nodes, walk.tokens) == (greedy.nodes, greedy.tokens)


def test_no_round_accepts_more_than_k_drafted_tokens():
    tokens, parents = TREES["chain"]
    law = np.eye(4)[[1, 2, 0]]
    coins = Uniforms(nodes=(0.5,) * 3, final=0.5)
    assert sampled_walk(tokens, parents, law, coins, most=2).tokens == (1, 2, 0)
    assert sampled_walk(tokens, parents, law, coins, most=1).tokens == (1, 2)


def test_thresholds_below_one_accept_more():
    tokens, parents, law = *TREES["chain"], np.array([[0.1, 0.4, 0.3, 0.2]] * 3)
    late = {"nodes": (0.7, 0.9, 0.9), "final": 0.0}
    assert sampled_walk(tokens, parents, law, Uniforms(**late), most=2).tokens == (0,)
    assert sampled_walk(tokens, parents, law, Uniforms(**late, threshold_single=0.35), most=2).tokens == (1, 0)
    assert sampled_walk(tokens, parents, law, Uniforms(**late, threshold_acc=0.5), most=2).tokens == (1, 0)


def test_the_margin_is_the_distance_to_the_nearest_decision():
    tokens, parents, law = *TREES["chain"], np.array([[0.1, 0.4, 0.3, 0.2]] * 3)
    walk = sampled_walk(tokens, parents, law, Uniforms(nodes=(0.25, 0.5, 0.5), final=0.5), most=2)
    assert walk.tokens == (1, 1)
    # the root's coin is 0.15 below 0.4; node 1's 0.2 above 0.3; left are 0.1, 0.4, 0.2: 0.35 of 0.7 is 0.15 below 0.5
    assert walk.margin == pytest.approx(min(0.15, 0.2, 0.15 / 0.7))


@pytest.mark.parametrize("seed", range(40))
def test_the_stand_in_in_the_engine_walks_like_the_reference(seed):
    random = np.random.default_rng(seed)
    n, most, vocab = int(random.integers(1, 9)), int(random.integers(1, 5)), 12
    parents = [-1, *(int(random.integers(0, i)) for i in range(1, n))]
    tokens = [0] * n
    for node in range(n):  # siblings are different tokens
        own = [s for s in range(1, n) if parents[s] == node]
        for s, token in zip(own, random.permutation(vocab), strict=False):
            tokens[s] = int(token)
    law = random.dirichlet(np.full(vocab, 0.4), size=n)
    law[random.random((n, vocab)) < 0.2] = 0.0
    law = (law / law.sum(1, keepdims=True)).astype(np.float32)
    nodes, final = random.random(n).astype(np.float32), random.random(1).astype(np.float32)
    first, following = [-1] * n, [-1] * n
    for s in range(n - 1, 0, -1):
        following[s], first[parents[s]] = first[parents[s]], s
    predicts, index, count = torch.zeros(n, dtype=torch.int32), torch.full((1, most + 1), -1), torch.zeros(1)
    verify_sampled(
        predicts,
        index,
        count,
        torch.tensor([tokens]),
        torch.arange(n)[None],
        torch.tensor([first]),
        torch.tensor([following]),
        torch.tensor(nodes)[None],
        torch.tensor(final),
        torch.tensor(law)[None],
        torch.zeros(1, n, vocab),
    )
    coins = Uniforms(nodes=tuple(nodes.tolist()), final=float(final[0]))
    walk = sampled_walk(tokens, parents, law.astype(np.float64), coins, most=most)
    assert walk.margin > 1e-6, "another seed: this one lies on a border"
    accepted = index[0, : int(count[0]) + 1].tolist()
    assert tuple(accepted) == walk.nodes
    assert tuple(predicts[accepted].tolist()) == walk.tokens


def test_renormed_laws_keep_the_likeliest_tokens_only():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2]])
    assert renorm_top_k(probs, torch.tensor([1, 1 << 30])).tolist() == [[0, 1, 0, 0], pytest.approx(probs[1].tolist())]
    kept = renorm_top_p(probs, torch.tensor([0.5, 1.0]))
    assert kept[0].tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert kept[1].tolist() == pytest.approx(probs[1].tolist())


#: (target's law, draft's law) whose decisions change at sixths of a coin only, so that twelve coins stand for all.
RATIOS = [
    ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25)),
    ((0.4, 0.4, 0.2), (0.2, 0.2, 0.6)),
    ((0.0, 0.5, 0.5), (0.75, 0.25, 0)),
]
COINS = [(2 * i + 1) / 24 for i in range(12)]


@pytest.mark.parametrize(("law", "drafted"), RATIOS)
def test_rejection_sampling_gives_the_targets_law_whatever_the_draft(law, drafted):
    """Summed over what the draft may draw and every coin; the second token's law is another."""
    then = (0.125, 0.25, 0.625)
    first, second, seen = np.zeros(3), np.zeros(3), 0.0
    for token, likely in enumerate(drafted):
        for coin, last in product(COINS, COINS):
            coins = Uniforms(nodes=(coin, 0.5), final=last, rejection=True)
            walk = rejection_walk((9, token), np.array((law, then)), np.array((drafted,)), coins)
            share = likely / len(COINS) ** 2
            first[walk.tokens[0]] += share
            if len(walk.tokens) == 2:
                second[walk.tokens[1]] += share
                seen += share
            assert walk.nodes == tuple(range(len(walk.tokens)))
    assert np.allclose(first, law)
    assert seen > 0
    assert np.allclose(second / seen, np.histogram(COINS, bins=[0, 0.125, 0.375, 1])[0] / len(COINS), atol=1e-9)


def test_a_coin_on_the_edge_of_a_ratio_has_no_margin():
    coins = Uniforms(nodes=(0.5, 0.5), final=0.25, rejection=True)
    walk = rejection_walk((9, 1), np.array(((0.5, 0.25, 0.25), (1.0, 0.0, 0.0))), np.array(((0.25, 0.5, 0.25),)), coins)
    assert (walk.tokens, walk.margin) == ((0,), 0.0)
