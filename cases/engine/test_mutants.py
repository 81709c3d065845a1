"""Faults in the running engine are noticed: a spread of mutants on one boot. `eaglecheck mutants` runs all of them."""

import pytest

from cases.boots import BY_NAME
from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.checks import CHECKS
from harness.contract.types import Kind
from harness.search.mutant_results import Status
from harness.search.mutants import Campaign, with_mutant
from harness.search.mutants_report import EXCUSED

#: Few that together show every check that one rank can exercise, none of which ends the engine.
SPREAD = (
    *("draft-position-late", "tail-chunk-border", "tail-after-retraction", "hidden-zeroed"),
    *("proposal-second-best-extend", "bonus-from-root", "slot-reused", "slot-not-freed"),
    *("limit-off-by-one", "draft-step-skipped", "uniforms-of-neighbour"),
    *("verify-forgets-bias", "abort-forgotten"),
    *("logprob-of-previous-token", "logprob-sent-again", "verify-counted-twice"),
    *("read-one-slot-late", "cached-row-lost"),
)
BOOT = EXERCISES["chain"][0].boot_key()
#: Few that show the checks of several ranks.
OF_RANKS = ("idle-width", "counts-exchanged")
BESIDE = {"announced", "idle_width"}
#: Checks that only a tree over pages, a pair of engines, TP ranks, a tokenizer or a setting of its own can show.
ELSEWHERE = {
    *("tails", "handoff", "handover", "tp_ranks", "grammar", "texts", "returned_states"),
    *("admission", "retraction", "flushed", "windows", "host", "recurrent"),
}
RANKS_BOOT = EXERCISES["dp"][0].boot_key()


@pytest.mark.engine(boot=BOOT)
def test_spread_of_mutants_is_killed_and_no_check_is_idle(engines):
    report = Campaign(engines, engines.default, [MUTANTS[name] for name in SPREAD]).run()
    assert report.unsound == (), "the engine must pass without a mutant, before and after"
    assert {score.mutant.id: score.why for score in report.scores if score.status is not Status.KILLED} == {}
    assert {name for name, killed in report.by_check.items() if not killed} == set(EXCUSED) | BESIDE | ELSEWHERE
    assert set(EXCUSED) < set(CHECKS)


@pytest.mark.engine(boot=RANKS_BOOT)
def test_what_an_idle_rank_does_wrong_is_killed_by_the_checks_of_ranks(engines, monkeypatch):
    monkeypatch.setattr(engines, "assumed", BY_NAME["dp"].assumes)
    report = Campaign(engines, engines.default, [MUTANTS[name] for name in OF_RANKS]).run()
    assert report.unsound == (), "the engine must pass without a mutant, before and after"
    assert {score.mutant.id: score.why for score in report.scores if score.status is not Status.KILLED} == {}
    assert {name for name in BESIDE if report.by_check[name]} == BESIDE


@pytest.mark.engine(boot=BOOT)
def test_wrong_draft_chain_leaves_the_text_as_it_is(engines):
    outcome = engines(with_mutant(EXERCISES["chain"][0], MUTANTS["hidden-zeroed"]))
    assert outcome.text_identical is True
    assert not outcome.passed


@pytest.mark.engine(boot=BOOT)
def test_trace_header_names_what_was_armed_and_the_events_how_often_it_acted(engines):
    sound = engines(EXERCISES["chain"][0])
    mutated = engines(with_mutant(EXERCISES["chain"][0], MUTANTS["draft-position-late"]))
    assert "faults" not in sound.trace.header
    assert mutated.trace.header["faults"] == ["draft-position-late"]
    (event,) = mutated.trace.named("fault")
    assert event.data["mutant"] == "draft-position-late"
    assert event.data["fired"] > 0


@pytest.mark.engine(boot=BOOT)
def test_mutant_armed_from_a_later_batch_leaves_the_earlier_ones_sound(engines):
    outcome = engines(with_mutant(EXERCISES["chain"][0], MUTANTS["draft-position-late"], first=4))
    wrong = [found.round for found in outcome.divergences if found.kind is Kind.POSITION]
    assert min(wrong) == 3  # batches are counted from 1, rounds from 0
