"""The multinomial tests: exact, quiet over a right sampler, loud over a wrong one."""

from itertools import product
from math import factorial, prod

import numpy as np
import pytest
import torch

from cases import checkpoints
from cases.meta.sampling import FALSE_ALARM, Counts, multinomial_p
from cases.table_weights import SYMBOLS, TABLE, distribution, token_of
from harness.contract.requests import RequestSpec
from harness.contract.rows import RowBuilder
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.trace import Trace
from reference.draft import Reading
from reference.pairs import load_pair
from reference.verify import Uniforms, draw, sampled_walk

PROMPT = (token_of(0, 0), token_of(1, 1))


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 1, 2), (0, 6, 0), (9, 0, 1)])
def test_the_p_value_is_the_chance_of_everything_no_likelier(counts):
    shares, total = distribution(2, 1.0), sum(counts)

    def chance(outcome):
        ways = factorial(total) / prod(factorial(n) for n in outcome)
        return ways * prod(p**n for p, n in zip(shares, outcome, strict=True))

    every = [one for one in product(range(total + 1), repeat=3) if sum(one) == total]
    assert sum(map(chance, every)) == pytest.approx(1)
    expected = sum(chance(one) for one in every if chance(one) <= chance(counts) * (1 + 1e-9))
    assert multinomial_p(counts, shares) == pytest.approx(expected, rel=1e-9)


def test_the_pair_has_the_distribution_that_is_written_down(tmp_path):
    made = checkpoints.make("table-tiny", tmp_path)
    target, head = load_pair(made.target, made.draft)
    for symbols in ((0,) * 9, (2, 1, 0) * 3):
        tokens = [token_of(place, symbol) for place, symbol in enumerate(symbols)]
        reading = Reading.of(head, tokens)
        for place in range(8):
            own = [token_of(place + 1, symbol) for symbol in range(SYMBOLS)]
            for temperature in (0.7, 1.0, 1.6):
                found = (target.logits(reading.final[place]) / temperature).softmax(-1)[own]
                assert found.tolist() == pytest.approx(distribution(place + 1, temperature), abs=1e-6)
            if place:  # the draft's row j holds the token at j + 1
                drafted = head.logits(reading.draft[place - 1]).softmax(-1)[own]
                assert drafted.tolist() == pytest.approx(distribution(place + 1, 2.0), abs=1e-6)
    assert torch.equal(target.logits(reading.final[7]).topk(3).indices.sort().values, torch.tensor(own))


def rounds(random, walk, *, k=3, new=4):
    """(committed length, tokens) of each round of a request that drafts the likeliest token of every position."""
    tokens = [*PROMPT, token_of(2, draw(distribution(2, 1.0), random.random())[0])]
    while len(tokens) - len(PROMPT) < new:
        c = len(tokens) - 1
        best = [token_of(c + 1 + i, int(distribution(c + 1 + i, 1.0).argmax())) for i in range(k)]
        rows = np.zeros((k + 1, SYMBOLS * len(TABLE)))
        for i in range(k + 1):
            rows[i, token_of(c + 1 + i, 0) :][:SYMBOLS] = distribution(c + 1 + i, 1.0)
        uniforms = Uniforms(nodes=tuple(random.random(k + 1)), final=float(random.random()))
        committed = walk((tokens[-1], *best), tuple(range(-1, k)), rows, uniforms)
        yield c, committed
        tokens += committed


def played(walk, *, requests=400, seed=5):
    """The counts of many requests, committed by `walk`; the prompt's own draw is left to the engine."""
    random, counts = np.random.default_rng(seed), Counts(temperature=1.0)
    request = RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=4, temperature=1.0)
    scenario = Scenario(name="x", requests=(request,), script=(Op(kind="submit", rids=("a",)), Op(kind="drain")))
    for _ in range(requests):
        rows = RowBuilder()
        for index, (c, committed) in enumerate(rounds(random, walk)):
            for slot, token in enumerate(committed):
                rows.add(rid="a", phase="ACCEPT", slot=slot, committed=c, round=index, input_id=token)
        counts.add(scenario, Trace(side="engine", scenario_id=scenario.id, header={}, rows=rows.build()))
    return counts


def right(tokens, parents, rows, uniforms):
    return sampled_walk(tokens, parents, rows, uniforms, most=3).tokens


def eager(tokens, parents, rows, uniforms):
    """Accepts a tenth more than the distribution allows."""
    uniforms = Uniforms(nodes=uniforms.nodes, final=uniforms.final, threshold_acc=0.8)
    return sampled_walk(tokens, parents, rows, uniforms, most=3).tokens


def forgetful(tokens, parents, rows, uniforms):
    """Draws a refused token again."""
    walk = sampled_walk(tokens, parents, rows, uniforms, most=3)
    again = draw(rows[walk.nodes[-1]], uniforms.final)[0]
    return (*walk.tokens[:-1], again)


def one_uniform(tokens, parents, rows, uniforms):
    """The last draw repeats the uniform that refused."""
    walk = sampled_walk(tokens, parents, rows, uniforms, most=3)
    same = Uniforms(nodes=uniforms.nodes, final=uniforms.nodes[walk.nodes[-1]])
    return sampled_walk(tokens, parents, rows, same, most=3).tokens


def neighbour(tokens, parents, rows, uniforms):
    """Every node has the distribution of the one before it, said in its own block's tokens."""
    shifted = np.stack([np.roll(rows[max(0, i - 1)], SYMBOLS if i else 0) for i in range(len(rows))])
    return sampled_walk(tokens, parents, shifted, uniforms, most=3).tokens


def test_a_right_sampler_is_left_alone():
    counts = played(right)
    assert counts.misplaced == 0
    assert len(counts.cells) > 8
    assert min(sum(one) for one in counts.cells.values()) > 20
    assert counts.misfits() == []


@pytest.mark.parametrize("wrong", [eager, forgetful, one_uniform, neighbour])
def test_a_wrong_sampler_is_found(wrong):
    assert played(wrong).misfits(), [fit.p for fit in played(wrong).fits()][:3]


def test_false_alarms_are_as_rare_as_promised():
    """Of p-values of right draws, no more than a share x may lie below x: here over 3000 small samples."""
    random = np.random.default_rng(11)
    shares = distribution(3, 1.0)
    p = np.array([multinomial_p(random.multinomial(20, shares), shares) for _ in range(3000)])
    for x in (0.001, 0.01, 0.1, 0.5):
        assert (p <= x).mean() <= x + 4 * (x / 3000) ** 0.5
    assert FALSE_ALARM < 0.001


def test_a_request_that_visits_a_cell_twice_is_refused():
    rows = RowBuilder()
    for c in (2, 2 + len(TABLE)):
        rows.add(rid="a", phase="ACCEPT", slot=0, committed=c, round=c, input_id=token_of(c + 1, 0))
    request = RequestSpec(rid="a", input_ids=PROMPT, temperature=1.0)
    scenario = Scenario(name="x", requests=(request,), script=(Op(kind="submit", rids=("a",)), Op(kind="drain")))
    trace = Trace(side="engine", scenario_id=scenario.id, header={}, rows=rows.build())
    with pytest.raises(ValueError, match="drew twice"):
        Counts(temperature=1.0).add(scenario, trace)
