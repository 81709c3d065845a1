"""Tree building, greedy verify and rotation against exhaustive search over everything small."""

from itertools import combinations, pairwise, product

import pytest
import torch

from reference.attention import Sight, ancestors
from reference.draft import rotate
from reference.tree import Candidates, build_tree, with_depths
from reference.verify import greedy_walk


def all_parents(m):
    """Every way m candidates can hang on each other: each on the root (-1) or on an earlier one."""
    return product(*(range(-1, i) for i in range(m)))


def scores_from(gains, parents):
    """Sums of gains along the path."""
    scores = []
    for gain, parent in zip(gains, parents, strict=True):
        scores.append(gain + (scores[parent] if parent >= 0 else 0.0))
    return tuple(scores)


#: Distinct gains, gains full of ties, and certain tokens (log-probability zero), which tie with their parents.
GAINS = {
    "distinct": (-0.9, -0.35, -0.61, -0.2, -1.7, -0.05),
    "ties": (-1.0, -1.0, -0.5, -0.5, -1.0, -0.5),
    "certain": (0.0, -1.0, 0.0, 0.0, -1.0, 0.0),
}


@pytest.mark.parametrize("gains", GAINS.values(), ids=GAINS)
def test_the_tree_is_the_best_of_all_subtrees_for_every_small_candidate_set(gains):
    for m in range(1, 7):
        for parents in all_parents(m):
            scores = scores_from(gains[:m], parents)
            candidates = Candidates(tokens=tuple(range(100, 100 + m)), scores=scores, parents=parents)
            for n in range(2, m + 2):
                tree = build_tree(7, candidates, n)
                chosen = [token - 100 for token in tree.tokens[1:]]
                best = max(
                    sum(scores[i] for i in subset)
                    for subset in combinations(range(m), n - 1)
                    if all(parents[i] in (-1, *subset) for i in subset)
                )
                assert sum(scores[i] for i in chosen) == pytest.approx(best, abs=1e-12), (parents, n)
                assert chosen == sorted(chosen), "nodes must keep the order they were proposed in"
                assert tree.tokens[0] == 7
                assert tree.parents[0] == -1
                for node, i in enumerate(chosen, start=1):
                    expected = 0 if parents[i] < 0 else chosen.index(parents[i]) + 1
                    assert tree.parents[node] == expected, (parents, n, node)


def path(parents, node):
    """Nodes from the root to `node`."""
    return [*(path(parents, parents[node]) if parents[node] >= 0 else []), node]


def trees(n):
    """Parents of every tree of n nodes whose parents come first."""
    return ((-1, *rest) for rest in product(*(range(i) for i in range(1, n))))


def test_depth_position_and_mask_follow_the_path_for_every_small_tree():
    for n in range(1, 7):
        for parents in trees(n):
            tree = with_depths(range(n), parents)
            for node in range(n):
                nodes = path(parents, node)
                assert tree.depths[node] == len(nodes) - 1
                assert tree.positions(40)[node] == 40 + len(nodes) - 1
                assert torch.nonzero(tree.mask()[node]).flatten().tolist() == sorted(nodes)


def longest_agreeing_path(tokens, parents, choices):
    """Every path from the root, tried one by one."""
    paths = [path(parents, node) for node in range(len(tokens))]
    agreeing = [p for p in paths if all(tokens[b] == choices[a] for a, b in pairwise(p))]
    return max(agreeing, key=len)


def siblings_differ(tokens, parents):
    pairs = list(zip(parents[1:], tokens[1:], strict=True))
    return len(set(pairs)) == len(pairs)


def test_greedy_walk_is_the_longest_agreeing_path_for_every_small_tree():
    tried = 0
    for n in range(1, 6):
        for parents, tokens, choices in product(trees(n), product(range(3), repeat=n - 1), product(range(2), repeat=n)):
            nodes = (0, *tokens)
            if not siblings_differ(nodes, parents):
                continue  # a draft row never proposes one token twice
            walk = greedy_walk(nodes, parents, choices)
            assert list(walk.nodes) == longest_agreeing_path(nodes, parents, choices), (parents, nodes, choices)
            assert walk.tokens == tuple(choices[node] for node in walk.nodes)
            tried += 1
    assert tried > 10_000


def test_a_tree_that_is_no_tree_is_refused():
    for parents in [(0,), (-1, 1), (-1, -1), (-1, 2, 0), (-1, 0, -5)]:
        with pytest.raises(ValueError, match="has parent"):
            with_depths(range(len(parents)), parents)
    with pytest.raises(ValueError, match="needs 2 candidates; there are 1"):
        build_tree(0, Candidates(tokens=(1,), scores=(-1.0,), parents=(-1,)), 3)


def test_branches_see_their_share_of_the_trunk_their_ancestors_and_nobody_else():
    branches = [(2, (-1, 0, 0)), (4, (-1, 0)), (0, (-1,))]
    mask, row = Sight.of(branches).mask(slice(0, 6), 4), 4
    for seen, parents in branches:
        inside = ancestors(parents)
        for i in range(len(parents)):
            expected = {*range(seen), *(row + j for j in range(len(parents)) if inside[i, j])}
            assert set(torch.nonzero(mask[row - 4 + i]).flatten().tolist()) == expected
        row += len(parents)


def test_chunks_rotate_to_the_same_rows_as_the_whole_sequence_and_not_past_its_end():
    tokens = torch.arange(50, 62)
    whole = rotate(tokens, 0, 11)
    assert whole.tolist() == list(range(51, 62))
    for cut in range(12):
        assert torch.equal(torch.cat((rotate(tokens, 0, cut), rotate(tokens, cut, 11))), whole)
    with pytest.raises(IndexError, match="need token 12, but the request has 12 tokens"):
        rotate(tokens, 4, 12)
