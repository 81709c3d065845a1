"""A recorded engine with a Qwen3-Next style target: its states are those of the texts, out of the cache too."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cases.meta.recorded import RECURRENT
from cases.meta.speculating import answered
from harness.archive.store import read_case
from harness.checks.judge import judge

RUN = RECURRENT / "goes-on-0.5.23"


@pytest.fixture(scope="module")
def case():
    return read_case(RUN)


@pytest.fixture(scope="module")
def known(case, made_pair):
    return answered(made_pair("hybrid-tiny"), case.scenario, case.engine)


def test_every_state_is_right_and_what_is_wrong_is_the_drafts_row_at_a_prefix_end(case, known):
    verdict, divergences = judge(case.scenario, case.engine, known)
    roots = {found.signature for found in divergences if not found.cause}
    assert roots == {"NUMERIC:extend:DRAFT_PREFILL:hidden_out-off"}, "F-095"
    assert {found.key.rid for found in divergences} == {"b", "c"}, "nobody was there before a"
    assert verdict.compared["recurrent_states"] == 2 * sum(
        committed > 0 for event in states(case.engine) for committed in event.data["committed"]
    )


@pytest.mark.parametrize("part", ["state", "conv"])
def test_a_verify_that_commits_nothing_leaves_the_state_of_a_shorter_text(case, known, part):
    own = [event for event in states(case.engine) if event.data["rids"] == ["a"] and event.data["phase"] == "VERIFY"]
    stale = {id(event): before.data[part] for before, event in pairwise(own)}
    events = tuple(
        replace(event, data=event.data | {part: stale[id(event)]}) if id(event) in stale else event
        for event in case.engine.events
    )
    _, divergences = judge(case.scenario, replace(case.engine, events=events), known)
    found = {(one.key.committed, one.hint) for one in divergences if one.kind == "STATE"}
    assert found == {(event.data["committed"][0], "token-late") for event in own[1:]}


def states(engine):
    return list(engine.named("recurrent"))
