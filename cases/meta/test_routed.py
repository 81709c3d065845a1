"""Rows whose routing nearly ties, in half precision: sound engines pass, and what is wrong stays wrong.

The engine here is our own model in bfloat16 that sums products in pieces and rounds the scores of its routers, as
kernels do; it speculates freely.
"""

from dataclasses import replace
from functools import partial
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cases.meta.published_heads import make_pair
from cases.meta.speculating import FreeSession
from harness.archive.event_facts import unfit
from harness.checks.judge import judge
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.types import Kind, Outcome
from harness.driving import oracle as asked
from harness.driving.oracle import Oracle
from reference import experts
from reference.routing_ties import Edge, Measured, Recorded, TurnedTies, turned_ties, watched

HALF = torch.bfloat16
SPEC = SpecConfig(algorithm="EAGLE", num_steps=2, eagle_topk=1, num_draft_tokens=3)
linear = torch.nn.functional.linear


def in_pieces(x, weight, bias=None, *, of=4):
    """A product that is summed in pieces and rounded once."""
    if x.dtype != HALF:
        return linear(x, weight, bias)
    places = range(0, x.shape[-1], of)
    total = sum(linear(x[..., at : at + of].float(), weight[..., at : at + of].float()) for at in places)
    return (total if bias is None else total + bias.float()).to(HALF)


def rounded(router, x, *, forward=experts.Router.forward, after=lambda router, choice: choice):
    """A router whose scores are rounded, and what a defect makes of its choice."""
    if x.dtype != HALF:
        return forward(router, x)
    plain = experts.linear
    with patch.object(experts, "linear", lambda *given: plain(*given).to(HALF).float()):
        return after(router, forward(router, x))


def to_the_next(router, choice):
    """Every row's first expert is another one."""
    moved = choice.experts.clone()
    moved[:, 0] = (moved[:, 0] + 1) % router.routing.experts
    return replace(choice, experts=moved)


def too_heavy(router, choice):
    return replace(choice, weights=choice.weights * 1.3)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    make_pair("qwen3_moe", 1, folder)
    return Oracle(target=folder, draft=folder).load(held="bfloat16")


def driven(oracle, seed, **defect):
    """The scenario of a request, and what the engine did."""
    target, head = oracle._models["bfloat16"]
    rng = Random(seed)
    prompt = tuple(rng.randrange(target.vocab) for _ in range(40))
    request = RequestSpec(rid="a", input_ids=prompt, max_new_tokens=30, ignore_eos=True)
    script = ({"kind": "submit", "rids": ["a"]}, {"kind": "drain"})
    engine = EngineConfig(dtype="bfloat16")
    scenario = Scenario(name="x", spec=SPEC, engine=engine, requests=(request,), script=script)
    session = FreeSession(head.computing(HALF).target, head.computing(HALF), SPEC)
    with (
        patch("torch.nn.functional.linear", in_pieces),
        patch.object(experts.Router, "forward", lambda router, x: rounded(router, x, **defect)),
    ):
        trace = session.speculate(request, scenario_id=scenario.id)
    known = {"release": "0.0.toy", "device": "cpu", "hooks_missing": [], "replaced": []}
    return scenario, replace(trace, side="engine", header={**trace.header, **known})


def roots(scenario, engine, reference):
    verdict, divergences = judge(scenario, engine, reference)
    return verdict, [one for one in divergences if not one.cause and one.kind in (Kind.NUMERIC, Kind.TOKEN)]


def test_a_sound_engine_has_no_wrong_row_though_rows_go_elsewhere(oracle):
    alone, ties = 0, 0
    for seed in (0, 3):
        scenario, engine = driven(oracle, seed)
        with patch.object(asked, "with_turned_ties", lambda found, *_more: found):
            alone += bool(roots(scenario, engine, oracle.answer(scenario, engine))[1])
        verdict, found = roots(scenario, engine, oracle.answer(scenario, engine))
        assert not found, (seed, found)
        ties += verdict.ties
    assert alone, "no row of these went elsewhere: the test says nothing"
    assert ties


@pytest.mark.parametrize("defect", [to_the_next, too_heavy])
def test_a_router_that_is_wrong_stays_wrong(oracle, defect):
    scenario, engine = driven(oracle, 1, after=defect)
    verdict, found = roots(scenario, engine, oracle.answer(scenario, engine))
    assert verdict.outcome is Outcome.FAIL
    assert Kind.NUMERIC in {one.kind for one in found}


@pytest.mark.parametrize("phase", ["PREFILL", "VERIFY", "DRAFT_PREFILL"])
def test_a_neighbours_state_stays_wrong(oracle, phase):
    scenario, engine = driven(oracle, 2)
    side = "hidden_in" if phase == "DRAFT_PREFILL" else "hidden_out"
    states = engine.tensors[f"{side}.{phase}"].copy()
    states[1:] = states[:-1]
    wrong = replace(engine, tensors={**engine.tensors, f"{side}.{phase}": states})
    verdict, found = judge(scenario, wrong, oracle.answer(scenario, wrong))
    assert verdict.outcome is Outcome.FAIL
    off = sum(one.kind is Kind.NUMERIC and str(one.key.phase) == phase for one in found)
    assert off > len(states) / 2, (off, len(states))


def test_more_ties_than_rounding_makes_are_a_finding(oracle):
    scenario, engine = driven(oracle, 0)
    reference = oracle.answer(scenario, engine)
    told = list(reference.named("routing"))
    many = np.flatnonzero(reference.rows.ints["position"] >= 0).tolist()
    data = {"rows": many, "usual": 4.0}
    others = tuple(event for event in reference.events if event.name != "routing")
    event = replace(reference.events[0], name="routing", data=data)
    _, found = roots(scenario, engine, replace(reference, events=(*others, event)))
    assert "tie-rate" in {one.hint for one in found}
    assert all(one.data["usual"] > 0 for one in told)
    assert [unfit(one.name, one.data) for one in (event, *told)] == [""] * (1 + len(told)), "a stored run is read again"


def router(weight):
    return experts.Router(weight, experts.Routing(experts=4, chosen=2))


def test_only_a_choice_within_rounding_is_turned_around():
    made = router(torch.eye(4))
    rows = torch.tensor([[3.0, 1.0, 0.999, 0.0], [3.0, 1.0, 0.5, 0.0]])
    recorded = Recorded()
    with watched(recorded):
        made.forward(rows)
    measured = Measured(recorded=recorded)
    with watched(measured):
        made.forward(rows + torch.tensor([0.0, 0.002, 0.0, 0.0]))
    deviations = measured.deviations()
    assert deviations[id(made)] == pytest.approx(0.002 / 0.6745, rel=1e-2)
    turned = partial(TurnedTies, recorded=recorded, deviations=deviations)
    with watched(turned(routers={id(made)})):
        assert made.forward(rows).experts.tolist() == [[0, 2], [0, 1]]
    with watched(turned(routers=set())):
        assert made.forward(rows).experts.tolist() == [[0, 1], [0, 1]]
    assert 0.2 < measured.usual() < 0.6  # the first about as likely as not, the second never


def test_where_three_scores_tie_any_of_them_may_go():
    """Seen of Qwen3-Next in bfloat16 on a card: experts at 1.1716, 1.1641 and 1.1581, of which the second two ran."""
    made, recorded = router(torch.eye(4)), Recorded()
    rows = torch.tensor([[1.1716, 1.1641, 1.1581, 0.8634], [3.0, 1.1641, 1.1581, 1.15], [3.0, 2.0, 1.0, 0.0]])
    with watched(recorded):
        made.forward(rows)
    found = set()
    for one in turned_ties(recorded, {id(made): 0.004}, 8):
        with watched(one):
            found |= {(row, *sorted(experts)) for row, experts in enumerate(made.forward(rows).experts.tolist())}
    assert found == {(0, 0, 1), (0, 0, 2), (0, 1, 2), (1, 0, 1), (1, 0, 2), (1, 0, 3), (2, 0, 1)}


def test_a_run_that_asks_something_else_measures_nothing():
    made, recorded = router(torch.eye(4)), Recorded()
    with watched(recorded):
        made.forward(torch.rand(3, 4))
    measured = Measured(recorded=recorded)
    with watched(measured):
        made.forward(torch.rand(2, 4))
    assert measured.deviations() == {}
    with watched(measured):
        made.forward(torch.rand(3, 4))
    assert measured.deviations() == {}


def asked_of(margins):
    """What a router a margin recorded, and how far scores of each are off: 0.1."""
    edges = [
        Edge(router=object(), leaving=torch.zeros(1, 1), coming=torch.ones(1, 1), margin=torch.tensor([[margin]]))
        for margin in margins
    ]
    return Recorded(edges=edges), {id(edge.router): 0.1 / 1.5 for edge in edges}


def test_many_routers_lean_in_groups_and_all_together():
    recorded, deviations = asked_of([0.05] * 20)
    found = [one.ties() for one in turned_ties(recorded, deviations, 8)]
    assert len(found) == 8
    assert found[-1] == frozenset.union(*found[:-1]) == {(call, 0) for call in range(20)}


def test_the_nearest_ties_lean_first_and_none_twice():
    recorded, deviations = asked_of([0.05, 0.35, 0.15, 0.41])
    found = [sorted(call for call, _ in one.ties()) for one in turned_ties(recorded, deviations, 8)]
    assert found == [[0], [2], [0, 2], [1], [0, 1, 2]]
