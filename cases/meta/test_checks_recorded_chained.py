"""A recorded engine whose MTP layers read each other's output: the chained reference explains it, no other does."""

import pytest

from cases.meta.recorded import MTP
from harness.archive.store import read_case
from harness.checks.judge import judge
from harness.contract.types import Outcome
from harness.driving.oracle import Oracle

RUN = MTP / "chained-shared-0.5.23"


@pytest.fixture(scope="module")
def pair(made_pair):
    return made_pair("mtp-chained")


def judged(pair, *assumed, chained=True):
    case = read_case(RUN)
    oracle = Oracle(target=pair.target, draft=pair.draft, assumed=assumed).load()
    for _, head in oracle._models.values():
        head.chained = chained
    return case, judge(case.scenario, case.engine, oracle.answer(case.scenario, case.engine))


def test_nothing_but_the_rows_of_the_cache_differs_and_whose_they_are_explains_them(pair):
    _, (verdict, divergences) = judged(pair)
    assert verdict.outcome is Outcome.FAIL
    first = next(found for found in divergences if not found.cause)
    assert (first.signature, first.key.rid, first.key.step) == ("NUMERIC:extend:DRAFT_PREFILL:hidden_out-off", "b", 1)
    assert {found.key.rid for found in divergences} == {"b"}, "the first request has its own rows"
    _, (verdict, divergences) = judged(pair, "F-012")
    assert divergences == []
    assert verdict.outcome is Outcome.PASS


def test_a_reference_that_does_not_chain_is_contradicted_in_every_layer_but_the_first(pair):
    case, (verdict, divergences) = judged(pair, "F-012", chained=False)
    assert verdict.outcome is Outcome.FAIL
    wrong = [found for found in divergences if found.signature.endswith("hidden_in-off")]
    assert {found.key.step for found in wrong} == {1, 2}
    ints, phases = case.engine.rows.ints, case.engine.rows.strings["phase"]
    deep = [
        (phases[i], ints["round"][i], ints["step"][i])
        for i in range(len(case.engine.rows))
        if phases[i] in ("DRAFT_PREFILL", "EXTEND") and ints["step"][i]
    ]
    reported = {(found.key.phase, found.round, found.key.step) for found in wrong}
    assert reported == set(deep)
