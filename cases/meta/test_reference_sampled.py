"""Sampled verification against its distribution: every outcome's probability, summed over all uniforms.

A walk is a step function of its uniforms, so cutting the unit interval where it can change gives exact probabilities,
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
DISTRIBUTIONS = {
    "plain": [[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.35, 0.15], [0.5, 0.1, 0.05, 0.35]],
    "zeros": [[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]],
}


def after(distribution, history):
    """The target's distribution after each committed token: here by how many there are and by the last one."""
    return distribution[(len(history) + sum(history)) % len(distribution)]


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


def outcomes(tokens, parents, distribution, most):
    """walk.tokens -> probability, over every combination of intervals of the uniforms."""
    rows = np.array([after(distribution, histories(tokens, parents, node)) for node in range(len(tokens))])
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
            uniforms = [0.5] * len(tokens)
            weight = width
            for node, (uniform, share) in zip(inner, chosen, strict=True):
                uniforms[node], weight = uniform, weight * share
            walk = sampled_walk(tokens, parents, rows, Uniforms(nodes=tuple(uniforms), final=final), most=most)
            found[walk.tokens] = found.get(walk.tokens, 0.0) + weight
    return found


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_whatever_is_drafted_the_committed_tokens_have_the_targets_own_distribution(tree, distribution):
    tokens, parents = tree
    found = outcomes(tokens, parents, distribution, most=2)
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
            assert shares == pytest.approx(after(distribution, list(prefix)), abs=1e-9), prefix


def test_a_certain_distribution_is_the_greedy_walk_whatever_the_uniforms():
    tokens, parents = TREES["branches"]
    distribution = np.eye(4)[[1, 2, 3, 0, 0, 1]]
    greedy = greedy_walk(tokens, parents, distribution.argmax(-1).tolist())
    for uniform in (0.0, 0.3, 1 - 2**-24):
        walk = sampled_walk(tokens, parents, distribution, Uniforms(nodes=(uniform,) * 6, final=uniform), most=2)
        assert (walk.nodes, walk.tokens) == (greedy.nodes, greedy.tokens)


def test_no_round_accepts_more_than_k_drafted_tokens():
    tokens, parents = TREES["chain"]
    distribution = np.eye(4)[[1, 2, 0]]
    uniforms = Uniforms(nodes=(0.5,) * 3, final=0.5)
    assert sampled_walk(tokens, parents, distribution, uniforms, most=2).tokens == (1, 2, 0)
    assert sampled_walk(tokens, parents, distribution, uniforms, most=1).tokens == (1, 2)


def test_thresholds_below_one_accept_more():
    tokens, parents, distribution = *TREES["chain"], np.array([[0.1, 0.4, 0.3, 0.2]] * 3)
    late = {"nodes": (0.7, 0.9, 0.9), "final": 0.0}
    assert sampled_walk(tokens, parents, distribution, Uniforms(**late), most=2).tokens == (0,)
    assert sampled_walk(tokens, parents, distribution, Uniforms(**late, threshold_single=0.35), most=2).tokens == (1, 0)
    assert sampled_walk(tokens, parents, distribution, Uniforms(**late, threshold_acc=0.5), most=2).tokens == (1, 0)


def test_the_margin_is_the_distance_to_the_nearest_decision():
    tokens, parents, distribution = *TREES["chain"], np.array([[0.1, 0.4, 0.3, 0.2]] * 3)
    walk = sampled_walk(tokens, parents, distribution, Uniforms(nodes=(0.25, 0.5, 0.5), final=0.5), most=2)
    assert walk.tokens == (1, 1)
    # the root's is 0.15 below 0.4; node 1's 0.2 above 0.3; left are 0.1, 0.4, 0.2: 0.35 of 0.7 is 0.15 below 0.5
    assert walk.near.margin == pytest.approx(min(0.15, 0.2, 0.15 / 0.7))


@pytest.mark.parametrize("seed", range(40))
def test_the_replacement_kernel_in_the_engine_walks_like_the_reference(seed):
    random = np.random.default_rng(seed)
    n, most, vocab = int(random.integers(1, 9)), int(random.integers(1, 5)), 12
    parents = [-1, *(int(random.integers(0, i)) for i in range(1, n))]
    tokens = [0] * n
    for node in range(n):  # siblings are different tokens
        own = [s for s in range(1, n) if parents[s] == node]
        for s, token in zip(own, random.permutation(vocab), strict=False):
            tokens[s] = int(token)
    distribution = random.dirichlet(np.full(vocab, 0.4), size=n)
    distribution[random.random((n, vocab)) < 0.2] = 0.0
    distribution = (distribution / distribution.sum(1, keepdims=True)).astype(np.float32)
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
        torch.tensor(distribution)[None],
        torch.zeros(1, n, vocab),
    )
    uniforms = Uniforms(nodes=tuple(nodes.tolist()), final=float(final[0]))
    walk = sampled_walk(tokens, parents, distribution.astype(np.float64), uniforms, most=most)
    assert walk.near.margin > 1e-6, "another seed: this one lies on a border"
    accepted = index[0, : int(count[0]) + 1].tolist()
    assert tuple(accepted) == walk.nodes
    assert tuple(predicts[accepted].tolist()) == walk.tokens


def test_renormalised_distributions_keep_the_likeliest_tokens_only():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2]])
    assert renorm_top_k(probs, torch.tensor([1, 1 << 30])).tolist() == [[0, 1, 0, 0], pytest.approx(probs[1].tolist())]
    kept = renorm_top_p(probs, torch.tensor([0.5, 1.0]))
    assert kept[0].tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert kept[1].tolist() == pytest.approx(probs[1].tolist())


#: (target's, draft's distribution) whose decisions change at sixths only, so that twelve uniforms stand for all.
RATIOS = [
    ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25)),
    ((0.4, 0.4, 0.2), (0.2, 0.2, 0.6)),
    ((0.0, 0.5, 0.5), (0.75, 0.25, 0)),
]
UNIFORMS = [(2 * i + 1) / 24 for i in range(12)]


@pytest.mark.parametrize(("distribution", "drafted"), RATIOS)
def test_rejection_sampling_gives_the_targets_distribution_whatever_the_draft(distribution, drafted):
    """Summed over what the draft may draw and every uniform; the second token has another distribution."""
    then = (0.125, 0.25, 0.625)
    first, second, seen = np.zeros(3), np.zeros(3), 0.0
    for token, likely in enumerate(drafted):
        for uniform, last in product(UNIFORMS, UNIFORMS):
            uniforms = Uniforms(nodes=(uniform, 0.5), final=last, rejection=True)
            walk = rejection_walk((9, token), np.array((distribution, then)), np.array((drafted,)), uniforms)
            share = likely / len(UNIFORMS) ** 2
            first[walk.tokens[0]] += share
            if len(walk.tokens) == 2:
                second[walk.tokens[1]] += share
                seen += share
            assert walk.nodes == tuple(range(len(walk.tokens)))
    assert np.allclose(first, distribution)
    assert seen > 0
    assert np.allclose(second / seen, np.histogram(UNIFORMS, bins=[0, 0.125, 0.375, 1])[0] / len(UNIFORMS), atol=1e-9)


def test_a_uniform_on_the_edge_of_a_ratio_has_no_margin():
    uniforms = Uniforms(nodes=(0.5, 0.5), final=0.25, rejection=True)
    rows = np.array(((0.5, 0.25, 0.25), (1.0, 0.0, 0.0)))
    walk = rejection_walk((9, 1), rows, np.array(((0.25, 0.5, 0.25),)), uniforms)
    assert (walk.tokens, walk.near.margin) == ((0,), 0.0)
