"""Verification of a draft tree: which nodes are accepted, and the token that follows them.

Sources: speculative decoding (arXiv 2211.17192, 2302.01318), several candidates a step (SpecInfer, arXiv 2305.09781),
EAGLE (arXiv 2401.15077, section 3.3). At temperature 0 a node is accepted when it is what the target would have chosen
after its parent. Above, the target's own law is sampled by inverse transform: the children of a node divide the unit
interval in order, each as wide as it is likely; the node's coin picks one, or, beyond them all, refuses them, and the
token is drawn from what the target's law has left. This module must not run a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Accepted nodes, root first, and the target's choice at each: tokens[-1] is the bonus; a = len(tokens).

    margin: how far the nearest coin was from deciding otherwise, as probability; infinite without coins.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    margin: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coins:
    """Uniform numbers in [0, 1) that decide one round: one a node [n], one for the token after the last accepted node.

    single, together: a child is accepted too where it alone is at least this likely; and the children's shares of the
    unit interval are divided by `together`. Both 1 is exact; less accepts more, and is then no longer the target's law.
    ratio: drafts were drawn from the draft's law, and a coin times its probability there decides (`ratio_walk`).
    """

    nodes: tuple[float, ...]
    final: float
    single: float = 1.0
    together: float = 1.0
    ratio: bool = False

    @staticmethod
    def drawn(uniform: Callable[[], float], n: int) -> Coins:
        """Fresh coins for a tree of n nodes."""
        return Coins(nodes=tuple(uniform() for _ in range(n)), final=uniform())


def greedy_walk(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> Walk:
    """tokens, parents, choices: [n] each, node 0 the root (parent -1), choices[s] the target's argmax after node s."""
    node, nodes = 0, [0]
    while True:
        matching = (s for s in range(1, len(tokens)) if parents[s] == node and tokens[s] == choices[node])
        child = next(matching, None)
        if child is None:
            return Walk(nodes=tuple(nodes), tokens=tuple(choices[s] for s in nodes))
        node = child
        nodes.append(node)


def sampled_walk(
    tokens: Sequence[int], parents: Sequence[int], law: Sequence[Sequence[float]], coins: Coins, *, most: int
) -> Walk:
    """The walk by coins through a tree (greedy_walk's tokens and parents [n]).

    law [n,V]: the target's distribution after each node. most: drafted tokens that a round may accept at most, k.
    """
    node, nodes, chosen, margin = 0, [0], list[int](), 1.0
    left: list[float] = list(law[0])
    while len(chosen) < most:
        children = [s for s in range(1, len(tokens)) if parents[s] == node]
        shares = [law[node][tokens[s]] for s in children]
        ends = [end / coins.together for end in accumulate(shares)]
        coin, certain = coins.nodes[node], [share >= coins.single for share in shares]
        margin = min([margin, *(abs(end - coin) for end in ends)])
        picked = next((i for i, end in enumerate(ends) if shares[i] > 0 and (coin < end or certain[i])), None)
        if picked is None:
            left = [0.0 if token in {tokens[s] for s in children} else p for token, p in enumerate(law[node])]
            break
        node = children[picked]
        nodes.append(node)
        chosen.append(tokens[node])
        left = list(law[node])
    last, gap = draw(left, coins.final)
    return Walk(nodes=tuple(nodes), tokens=(*chosen, last), margin=min(margin, gap))


def ratio_walk(
    tokens: Sequence[int], law: Sequence[Sequence[float]], drafted: Sequence[Sequence[float]], coins: Coins
) -> Walk:
    """Rejection sampling along a chain (arXiv 2211.17192, section 2.3): node i + 1 was drawn from drafted[i] [k,V].

    It is accepted where the coin times its probability there is below the target's; a refused one is replaced by a
    draw from what the target's law has above the draft's. tokens [n], the root first; law [n,V].
    """
    node, chosen, margin = 0, list[int](), 1.0
    left: Sequence[float] = law[0]
    for proposal in drafted:
        token = tokens[node + 1]
        gap = law[node][token] - coins.nodes[node] * proposal[token]
        margin = min(margin, abs(gap))
        if gap <= 0:
            left = [max(p - q, 0.0) for p, q in zip(law[node], proposal, strict=True)]
            break
        node += 1
        chosen.append(token)
        left = law[node]
    last, nearest = draw(left, coins.final)
    return Walk(nodes=tuple(range(node + 1)), tokens=(*chosen, last), margin=min(margin, nearest))


def draw(mass: Sequence[float], coin: float) -> tuple[int, float]:
    """The token in whose share of the mass [V], laid out in order, the coin lies; and how far from that share's ends.

    The distance is probability of the whole mass. A coin beyond the sum, by rounding, means the last possible token.
    """
    total, running, last = sum(mass), 0.0, -1
    for token, share in enumerate(mass):
        if share <= 0:
            continue
        before, running, last = running, running + share, token
        if running > coin * total:
            return token, min(coin * total - before, running - coin * total) / total
    if last < 0:
        raise ValueError("there is no mass to draw from; expected a law with some token left")
    return last, 0.0
