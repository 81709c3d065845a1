"""Check `rounds`: every row of a batch is there once, and batches follow each other. Without a reference."""

import pytest

from cases.meta import handmade
from cases.meta.judged import roots, with_round
from harness.checks import judge
from harness.contract.types import Kind, Outcome


@pytest.mark.parametrize("phase", ["PREFILL", "DRAFT_PREFILL", "DRAFT", "VERIFY", "ACCEPT", "EXTEND"])
def test_missing_row_is_found_in_every_phase(sound, phase):
    scenario, engine = sound
    gone = handmade.find(engine, phase=phase, nth=3)
    _, divergences = judge(scenario, handmade.without_rows(engine, gone), None)
    assert (Kind.MISSING_ROW, engine.rows.key(gone)) in [(found.kind, found.key) for found in divergences]


@pytest.mark.parametrize("phase", ["PREFILL", "DRAFT", "VERIFY", "EXTEND"])
def test_repeated_row_is_extra_and_nothing_else(sound, phase):
    scenario, engine = sound
    twice = handmade.with_row_again(engine, handmade.find(engine, phase=phase, nth=2))
    assert roots(scenario, twice) == {("EXTRA_ROW", "rounds", phase, "twice"): 1}


def test_row_of_no_batch_is_extra(sound):
    scenario, engine = sound
    engine.rows.ints["committed"][handmade.find(engine, phase="EXTEND")] = 500
    assert ("EXTRA_ROW", "rounds", "EXTEND", "no-batch") in roots(scenario, engine)


def test_a_finished_request_may_leave_out_its_last_extend_but_only_all_of_it(sound):
    scenario, engine = sound
    last = engine.rounds[-1]
    wanted = (last.rids[0], last.starts[0], "EXTEND")
    keys = [engine.rows.key(row) for row in range(len(engine.rows))]
    dropped = [r for r, key in enumerate(keys) if (key.rid, key.committed, key.phase) == wanted]
    verdict, divergences = judge(scenario, handmade.without_rows(engine, *dropped), handmade.build(scenario)[1])
    assert (verdict.outcome, divergences) == (Outcome.PASS, [])
    assert len(dropped) > 1
    assert judge(scenario, handmade.without_rows(engine, *dropped[1:]), None)[0].outcome is Outcome.FAIL


def test_final_flag_must_say_where_the_prompt_ends(sound):
    scenario, engine = sound
    flags = tuple(not flag for flag in engine.rounds[0].final)
    assert ("SHAPE", "rounds", "PREFILL", "final-flag") in roots(scenario, with_round(engine, 0, final=flags))


def test_committed_length_must_follow_from_accepted(sound):
    scenario, engine = sound
    number = next(record.index for record in engine.rounds if record.mode == "DECODE")
    starts = tuple(start + 1 for start in engine.rounds[number].starts)
    hints = {name[3] for name in roots(scenario, with_round(engine, number, starts=starts))}
    assert {"committed-gap", "committed-overlap"} <= hints


def test_start_past_zero_needs_a_prefix_cache():
    scenario = handmade.scenario(prompts=(6,), radix_cache=False)
    engine, _ = handmade.build(scenario)
    broken = with_round(engine, 0, starts=(2,), lens=(4,))
    assert ("SHAPE", "rounds", "PREFILL", "start-without-prefix-cache") in roots(scenario, broken)
