"""A modelled defect is taken for granted only by name, is reported, and hides nothing else. No engine here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cases.catalogue import read_scenario
from cases.meta.speculating import FreeSession
from harness.checks.explained import explained, spot, together
from harness.checks.findings import group
from harness.checks.judge import judge
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.types import Kind, Outcome
from harness.defects import departures
from harness.defects.verified_rules import CountsRoots
from harness.driving.judging import judge_scenario, judge_with
from harness.driving.oracle import Oracle
from harness.driving.plan import Setup
from reference.pairs import load_pair
from reference.rounds import flying

ROOT = Path(__file__).parents[2]

LAYERS = Scenario(
    name="tail",
    checkpoint="mtp-tiny",
    spec=SpecConfig(algorithm="MTP", num_steps=3, num_draft_tokens=4),
    engine=EngineConfig(chunked_prefill_size=4),
    requests=(RequestSpec(rid="a", input_ids=(7, 19, 4, 250, 33, 91, 12, 6, 401, 77, 5), max_new_tokens=9),),
    script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
)
#: Finding -> (scenario, pair, kinds that show it, the kinds an engine without it shows where it is assumed, its root).
DEFECTS = {
    "F-003": (
        read_scenario(ROOT / "cases" / "scenarios" / "tree-slot-cache.json"),
        "eagle-tiny",
        {Kind.NUMERIC},
        {Kind.NUMERIC},
        "NUMERIC:chain:DRAFT:hidden_out-off",
    ),
    "F-010": (
        LAYERS,
        "mtp-tiny",
        {Kind.EXTEND_INPUT},
        {Kind.EXTEND_INPUT, Kind.NUMERIC},
        "EXTEND_INPUT:inputs:DRAFT_PREFILL:chunk-tail-target-guess",
    ),
}
#: Another fault beside each: (phase, step, column) that is one more, and the kind that shows it.
BESIDE = {
    "F-003": ("DRAFT", 1, "position", Kind.POSITION),
    "F-010": ("DRAFT_PREFILL", 1, "input_id", Kind.EXTEND_INPUT),
}


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A finding, the pair that shows it and the scenario."""

    name: str
    pair: object
    scenario: Scenario

    def engine(self, *, sound=False):
        """What an engine with or without the defect does: the reference's own run."""
        own = departures([] if sound else [self.name])
        session = FreeSession(*load_pair(self.pair.target, self.pair.draft), self.scenario.spec, departures=own)
        chunk = self.scenario.engine.chunked_prefill_size
        return session.speculate(self.scenario.requests[0], chunk=chunk, scenario_id=self.scenario.id)

    def judged(self, trace, *assumed):
        oracle = Oracle(target=self.pair.target, draft=self.pair.draft, assumed=assumed)
        return judge(self.scenario, trace, oracle.answer(self.scenario, trace))


@pytest.fixture(scope="module", params=DEFECTS)
def defect(request, made_pair):
    scenario, pair, *_ = DEFECTS[request.param]
    return Defect(name=request.param, pair=made_pair(pair), scenario=scenario)


def test_it_is_a_finding_unless_it_is_named(defect):
    trace = defect.engine()
    verdict, found = defect.judged(trace)
    assert {one.kind for one in found} >= DEFECTS[defect.name][2]
    assert not any(reason.startswith("assumed") for reason in verdict.reasons)
    if defect.name == "F-010":
        tails = [one for one in found if one.kind is Kind.EXTEND_INPUT]
        assert verdict.outcome is Outcome.FAIL
        assert len(tails) == 2 * (1 + 2 + 3), "layer i reads i + 1 wrong tokens at each of two chunk ends"
        assert {one.hint for one in tails} == {"chunk-tail-target-guess", "chunk-tail-proposal"}
    verdict, found = defect.judged(trace, defect.name)
    assert found == []
    assert any(reason.startswith(f"assumed: {defect.name}, ") for reason in verdict.reasons)


def test_it_is_one_finding(defect):
    _, found = defect.judged(defect.engine())
    roots = [one for one in group(found) if one.is_root]
    assert [one.signature for one in roots] == [DEFECTS[defect.name][4]]
    assert len({one.signature for one in found}) > 1, "something follows from it"


@pytest.mark.parametrize("defect", ["F-003"], indirect=True)
def test_a_tree_that_does_not_follow_from_its_values_is_a_finding_of_its_own(defect):
    trace = defect.engine()
    last = max(i for i in range(len(trace.rows)) if trace.rows.key(i).phase == "VERIFY")
    trace.rows.ints["input_id"][last] += 1
    _, found = defect.judged(trace)
    roots = [one for one in group(found) if one.is_root]
    assert [(one.first.check, one.first.key.phase) for one in roots] == [("chain", "DRAFT"), ("verify", "VERIFY")]


def test_an_engine_without_it_is_a_finding_where_it_is_assumed(defect):
    sound = defect.engine(sound=True)
    assert defect.judged(sound)[1] == []
    assert {one.kind for one in defect.judged(sound, defect.name)[1]} >= DEFECTS[defect.name][3]


def test_another_fault_beside_it_is_still_found(defect):
    phase, step, column, kind = BESIDE[defect.name]
    trace = defect.engine()
    rows = trace.rows
    at = next(i for i in range(len(rows)) if (rows.key(i).phase, rows.key(i).step) == (phase, step))
    rows.ints[column][at] += 1
    verdict, found = defect.judged(trace, defect.name)
    assert verdict.outcome is Outcome.FAIL
    assert (kind, step) in {(one.kind, one.key.step) for one in found}
    assert defect.name != "F-010" or len(found) == 1


@pytest.mark.parametrize("defect", ["F-010"], indirect=True)
def test_all_that_it_explains_is_one_finding_and_another_fault_beside_it_is_not(defect):
    phase, step, column, _ = BESIDE[defect.name]
    trace, setup = defect.engine(), Setup(release="0.5.23", device="cpu")
    rows = trace.rows
    at = next(i for i in range(len(rows)) if (rows.key(i).phase, rows.key(i).step) == (phase, step))
    rows.ints[column][at] += 1
    oracle = Oracle(target=defect.pair.target, draft=defect.pair.draft)
    judged = judge_with(oracle, defect.scenario, trace, setup=setup)
    explains = explained(judged.reference)[defect.name]
    apart = [replace(one, cause="") for one in judged.divergences if spot(one) in explains or one.cause]
    beside = [one for one in judged.divergences if not one.cause and spot(one) not in explains]
    assert {(one.key.step, one.key.slot) for one in beside} == {(rows.key(at).step, rows.key(at).slot)}
    assert [one.id for one in judged.known[DEFECTS[defect.name][4]]] == [defect.name]
    roots = [one for one in together([*apart, *beside], [frozenset(map(spot, apart))]) if not one.cause]
    assert {one.signature for one in roots} == {apart[0].signature, *(one.signature for one in beside)}
    again = judge_scenario(defect.scenario, trace, judged.reference, setup=setup)
    assert (again.findings, again.known) == (judged.findings, judged.known), "a stored run says the same"


def test_penalties_count_the_last_token_that_the_scheduler_has():
    """F-037: rounds at steps 3 and 4 are planned without the batch before, the one at 7 only where all was paused."""
    parts = [
        (SimpleNamespace(start=start, record=SimpleNamespace(scheduler_step=step)), committed)
        for start, step, committed in ((0, 2, (50,)), (3, 3, (51, 52)), (5, 4, (53,)), (6, 7, (54,)))
    ]
    prompt, generated, counted = 3, (50, 51, 52, 53, 54), CountsRoots()
    for overlap, paused, known, tokens in (
        (False, {5, 6}, [1, 3, 4], [50, 52, 53]),
        (True, set(), [0, 1, 4], [9, 50, 53]),
        (True, {5}, [0, 1, 4], [9, 50, 53]),
        (True, {5, 6}, [0, 1, 3], [9, 50, 52]),
    ):
        view = SimpleNamespace(overlap=overlap, paused=frozenset(paused))
        drafts = SimpleNamespace(view=view, timeline=SimpleNamespace(parts=parts))
        late = flying(drafts)
        had = [part.start + 1 - prompt - late.get(part.start, 0) for part, _ in parts[1:]]
        assert (had, counted.counts(generated, known=had, last=9)) == (known, tokens)
