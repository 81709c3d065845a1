"""F-010 taken for granted: an engine whose layers read guesses at a chunk's end passes, and only such a one."""

import pytest
import torch

from cases.checkpoints import make
from harness.checks.judge import judge
from harness.contract.scenario import EngineConfig, Op, RequestSpec, Scenario, SpecConfig
from harness.contract.types import Kind, Outcome
from harness.defects import departures
from harness.driving.oracle import Oracle
from reference.pairs import load_pair
from reference.session import ReferenceSession

torch.set_num_threads(1)
SPEC = SpecConfig(algorithm="MTP", num_steps=3, num_draft_tokens=4)
REQUEST = RequestSpec(rid="a", input_ids=(7, 19, 4, 250, 33, 91, 12, 6, 401, 77, 5), max_new_tokens=9)
SCENARIO = Scenario(
    name="tail",
    checkpoint="mtp-tiny",
    spec=SPEC,
    engine=EngineConfig(chunked_prefill_size=4),
    requests=(REQUEST,),
    script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make("mtp-tiny", tmp_path_factory.mktemp("pairs"))


def engine(pair, *, guesses):
    """What an engine with or without the defect does: the reference's own run in chunks."""
    session = ReferenceSession(
        *load_pair(pair.target, pair.draft), SPEC, departures=departures(["F-010"] if guesses else [])
    )
    return session.speculate(REQUEST, chunk=4, scenario_id=SCENARIO.id)


def judged(pair, trace, *assumed):
    reference = Oracle(target=pair.target, draft=pair.draft, assumed=assumed).answer(SCENARIO, trace)
    verdict, divergences = judge(SCENARIO, trace, reference)
    return verdict, divergences


def test_guesses_are_a_finding_unless_they_are_named(pair):
    trace = engine(pair, guesses=True)
    verdict, divergences = judged(pair, trace)
    assert verdict.outcome is Outcome.FAIL
    tails = [found for found in divergences if found.kind is Kind.EXTEND_INPUT]
    assert len(tails) == 2 * (1 + 2 + 3), "layer i reads i + 1 wrong tokens at each of two chunk ends"
    assert {found.hint for found in tails} == {"chunk-tail-target-guess", "chunk-tail-proposal"}
    verdict, divergences = judged(pair, trace, "F-010")
    assert divergences == []
    assert any(reason.startswith("assumed: F-010, ") for reason in verdict.reasons)


def test_an_engine_that_reads_the_prompt_fails_where_guesses_are_assumed(pair):
    trace = engine(pair, guesses=False)
    assert judged(pair, trace)[1] == []
    assert {found.kind for found in judged(pair, trace, "F-010")[1]} >= {Kind.EXTEND_INPUT, Kind.NUMERIC}


def test_another_wrong_token_beside_it_is_still_found(pair):
    trace = engine(pair, guesses=True)
    rows = trace.rows
    at = next(i for i in range(len(rows)) if rows.key(i).phase == "DRAFT_PREFILL" and rows.key(i).step == 1)
    rows.ints["input_id"][at] += 1
    (found,) = judged(pair, trace, "F-010")[1]
    assert (found.kind, found.key.step) == (Kind.EXTEND_INPUT, 1)
