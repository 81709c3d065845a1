"""TP ranks beside the first: what is the same is counted, what differs is found and named with its rank."""

from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade
from cases.meta.judged import roots, with_round
from harness.checks import judge
from harness.checks.reads import NOT_RECORDED
from harness.contract.trace import Event
from harness.contract.types import Outcome
from harness.driving.tensor_ranks import compared


@pytest.fixture
def made():
    """(scenario, trace of the first rank, reference, trace of another)."""
    scenario = handmade.scenario(tp_size=2)
    engine, reference = handmade.build(scenario)
    return scenario, engine, reference, handmade.copy_trace(engine)


def joined(engine, *others, first=1):
    """The trace that ranks first, first + 1, … and rank 0 leave together."""
    by_rank = {(0, number): other for number, other in enumerate(others, first)}
    return replace(engine, events=(*engine.events, *compared(engine, by_rank)))


def test_ranks_that_do_the_same_pass_and_are_counted(made):
    scenario, engine, reference, other = made
    verdict, _ = judge(scenario, joined(engine, other), reference)
    assert (verdict.outcome, verdict.compared["tp_rows"]) == (Outcome.PASS, len(engine.rows))


def test_a_rank_that_was_not_seen_is_no_pass(made):
    scenario, engine, reference, _ = made
    verdict, _ = judge(scenario, engine, reference)
    said, other = verdict.reasons
    assert (verdict.outcome, said) == (Outcome.UNKNOWN, "nothing compared: tp_rows")
    assert other.startswith(f"{NOT_RECORDED};")


@pytest.mark.parametrize(
    ("column", "phase", "kind"),
    [
        ("input_id", "DRAFT", "TOKEN"),
        ("input_id", "ACCEPT", "ACCEPT"),
        ("position", "EXTEND", "POSITION"),
        ("cache_slot", "VERIFY", "CACHE_SLOT"),
        ("parent", "VERIFY", "PARENT"),
        ("scheduler_step", "PREFILL", "LOCKSTEP"),
    ],
)
def test_a_number_that_differs_is_found_with_its_rank(made, column, phase, kind):
    scenario, engine, _, other = made
    other.rows.ints[column][handmade.find(other, phase=phase)] += 1
    assert roots(scenario, joined(engine, other)) == {(kind, "tp_ranks", phase, "tp-rank-1"): 1}


@pytest.mark.parametrize(("column", "kind"), [("chosen_ids", "TOKEN"), ("chosen_probs", "NUMERIC")])
def test_a_choice_that_differs_is_found(made, column, kind):
    scenario, engine, _, other = made
    row = handmade.find(other, phase="DRAFT")
    other.rows.lists[column][row] = other.rows.lists[column][row] + 1
    assert roots(scenario, joined(engine, other)) == {(kind, "tp_ranks", "DRAFT", "tp-rank-1"): 1}


def test_the_last_bit_of_a_state_counts(made):
    scenario, engine, _, other = made
    state = other.tensors["hidden_out.VERIFY"]
    state[0, 3] = np.nextafter(state[0, 3], np.float32(9))
    assert roots(scenario, joined(engine, other)) == {("NUMERIC", "tp_ranks", "VERIFY", "tp-rank-1"): 1}


def test_what_follows_on_that_rank_is_not_said_again(made):
    scenario, engine, _, other = made
    step = engine.rounds[-2].scheduler_step
    later = other.rows.ints["scheduler_step"] >= step
    other.rows.ints["position"][later] += 1
    found = roots(scenario, joined(engine, other))
    assert {key[1:] for key in found} == {("tp_ranks", "DRAFT", "tp-rank-1")}
    assert sum(found.values()) < later.sum()


def test_a_row_that_one_rank_lacks_or_has_alone_is_found(made):
    scenario, engine, _, other = made
    row = handmade.find(engine, phase="ACCEPT")
    lacking = joined(engine, handmade.without_rows(other, row))
    assert ("ACCEPT", "tp_ranks", "ACCEPT", "tp-rank-1") in roots(scenario, lacking)
    row = handmade.find(engine, phase="DRAFT")
    assert ("MISSING_ROW", "tp_ranks", "DRAFT", "tp-rank-1") in roots(
        scenario, joined(engine, handmade.without_rows(other, row))
    )
    alone = joined(handmade.without_rows(engine, row), other)
    assert ("EXTRA_ROW", "tp_ranks", "DRAFT", "tp-rank-1") in roots(scenario, alone)


def test_a_batch_with_other_accept_lengths_or_forwards_is_found(made):
    scenario, engine, _, other = made
    number = next(record.index for record in engine.rounds if record.mode == "DECODE")
    lens = with_round(other, number, lens=tuple(one + 1 for one in other.rounds[number].lens))
    assert roots(scenario, joined(engine, lens)) == {("ACCEPT", "tp_ranks", "IDLE", "tp-rank-1"): 1}
    fewer = with_round(other, number, forwards={**other.rounds[number].forwards, "DRAFT": 1})
    assert roots(scenario, joined(engine, fewer)) == {("LOCKSTEP", "tp_ranks", "IDLE", "tp-rank-1"): 1}
    behind = replace(other, rounds=other.rounds[:-1])
    assert roots(scenario, joined(engine, behind)) == {("LOCKSTEP", "tp_ranks", "IDLE", "tp-rank-1"): 1}


def test_of_two_ranks_the_reference_knows_which_is_wrong(made):
    scenario, engine, reference, other = made
    engine.rows.ints["input_id"][handmade.find(engine, phase="DRAFT")] += 1
    _, divergences = judge(scenario, joined(engine, other), reference)
    assert {found.hint for found in divergences if found.check == "tp_ranks"} == {"tp-rank-0"}


def test_of_three_ranks_the_one_that_stands_alone_is_wrong(made):
    scenario, engine, _, other = made
    three = handmade.set_on(scenario, tp_size=3)
    sound, wrong = handmade.copy_trace(engine), other
    wrong.rows.ints["position"][handmade.find(wrong, phase="DRAFT")] += 1
    assert {key[3] for key in roots(three, joined(sound, sound, wrong))} >= {"tp-rank-2"}
    assert {key[3] for key in roots(three, joined(wrong, sound, sound)) if key[1] == "tp_ranks"} == {"tp-rank-0"}


def test_a_pool_that_leaks_on_one_rank_names_it(made):
    scenario, engine, _, other = made
    levels = [
        Event(
            name="pool", scheduler_step=0, data={"free": free, "total": 9, "when": when, "evictable": 0, "tp_rank": 1}
        )
        for when, free in (("start", 9), ("end", 8))
    ]
    trace = replace(joined(engine, other), events=(*joined(engine, other).events, *levels))
    assert roots(scenario, trace) == {("LEAK", "ledger", "IDLE", "lost-on-tp-rank-1"): 1}


def test_each_dp_rank_has_a_first_rank_of_its_own():
    scenario = handmade.scenario(tp_size=4, dp_size=2)
    engine, _ = handmade.build(scenario)
    found = list(compared(engine, {(0, 1): handmade.copy_trace(engine), (1, 3): replace(engine, rounds=())}))
    assert [event.name for event in found if event.dp_rank == 0] == ["tp_rank"]
