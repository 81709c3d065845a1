"""Every situation counts what its name says on a trace that has it, and nothing on one that has not."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.situations import SITUATIONS, coverage
from harness.trace import Event, RequestEnd, RoundRecord, RowBuilder, Trace
from harness.types import Op


def prefill(tick, *parts, dp_rank=0):
    """parts: (rid, start, length, final)."""
    return record(tick, "PREFILL", [(rid, 0, start, length, final) for rid, start, length, final in parts], dp_rank)


def decode(tick, *parts, dp_rank=0):
    """parts: (rid, start, accept length)."""
    return record(tick, "DECODE", [(rid, 0, start, length, False) for rid, start, length in parts], dp_rank)


def record(tick, mode, parts, dp_rank=0):
    rids, epochs, starts, lens, final = zip(*parts, strict=True) if parts else ((), (), (), (), ())
    forwards = {"PREFILL": 1} if mode == "PREFILL" else {"VERIFY": 1}
    return RoundRecord(
        index=tick,
        tick=tick,
        dp_rank=dp_rank,
        tp_rank=dp_rank,
        mode=mode,
        rids=rids,
        epochs=epochs,
        starts=starts,
        lens=lens,
        final=final,
        forwards=forwards,
    )


def end(rid, tick, count, reason="length"):
    return RequestEnd(rid=rid, tick=tick, reason=reason, output_ids=tuple(range(count)))


def trace(*rounds, ends=(), events=()):
    return Trace(
        side="engine", scenario_id="", header={}, rows=RowBuilder().build(), rounds=rounds, ends=ends, events=events
    )


#: Prompts of 4 and 6 tokens (r0, r1), k = 3, chunk 4, page 4, at most 5 new tokens.
GIVEN = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5, page=4)
WHOLE = prefill(0, ("r0", 0, 4, True))

#: situation -> (trace that has it, times). Names not listed are covered by accept lengths below.
HAVING = {
    "non_final_chunk": (trace(prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True))), 1),
    "split_by_shared_budget": (trace(prefill(0, ("r0", 0, 2, False)), prefill(1, ("r0", 2, 2, True))), 1),
    "chunk_longer_by_one": (trace(prefill(0, ("r0", 0, 3, False)), prefill(1, ("r0", 3, 1, True))), 1),
    "chunk_exact_multiple": (trace(WHOLE), 1),
    "prefix_hit": (trace(prefill(0, ("r0", 2, 2, True))), 1),
    "mixed_batch": (trace(record(0, "MIXED", [("r0", 0, 0, 4, True)])), 1),
    "all_finished_in_one_verify": (trace(WHOLE, decode(1, ("r0", 4, 4)), ends=(end("r0", 1, 5),)), 1),
    "some_finished": (trace(decode(1, ("r0", 4, 4), ("r1", 6, 1)), ends=(end("r0", 1, 5), end("r1", 9, 5))), 1),
    "all_finished_with_arrival": (
        trace(decode(1, ("r0", 4, 4)), prefill(2, ("r1", 0, 4, False)), ends=(end("r0", 1, 5),)),
        1,
    ),
    "batch_grows": (trace(decode(1, ("r0", 4, 1)), decode(2, ("r0", 5, 1), ("r1", 6, 1))), 1),
    "batch_shrinks": (trace(decode(1, ("r0", 4, 1), ("r1", 6, 1)), decode(2, ("r1", 7, 1))), 1),
    "empty_batch": (trace(record(0, "PREBUILT", [])), 1),
    "idle_tick": (trace(WHOLE, decode(3, ("r0", 4, 1))), 2),
    "idle_rank": (trace(WHOLE, record(0, "IDLE", [], dp_rank=1)), 1),
    "accept_len_1": (trace(decode(1, ("r0", 4, 1))), 1),
    "accept_len_4": (trace(decode(1, ("r0", 4, 4), ("r1", 6, 4))), 2),
    "every_accept_len_seen": (trace(*(decode(n, ("r0", 4, n)) for n in (1, 2, 3, 4, 4))), 1),
    "accept_len_1_and_full_in_one_batch": (trace(decode(1, ("r0", 4, 4), ("r1", 6, 1))), 1),
    "one_token_left": (trace(decode(1, ("r0", 7, 1))), 1),
    "stop_inside_accepted_run": (trace(decode(1, ("r0", 4, 4)), ends=(end("r0", 1, 3, "stop"),)), 1),
    "page_border_in_draft": (trace(decode(1, ("r0", 5, 1), ("r1", 8, 1))), 1),
    "abort_in_chunk": (trace(prefill(0, ("r1", 0, 4, False)), ends=(end("r1", 1, 0, "abort"),)), 1),
    "abort_in_decode": (trace(WHOLE, decode(1, ("r0", 4, 1)), ends=(end("r0", 2, 2, "abort"),)), 1),
    "abort_last_live": (trace(WHOLE, ends=(end("r0", 1, 1, "abort"),)), 1),
    "retract_resume": (trace(WHOLE, record(3, "PREFILL", [("r0", 1, 0, 5, True)])), 1),
    "pool_exhausted": (trace(WHOLE, record(3, "PREFILL", [("r0", 1, 0, 5, True)])), 1),
    "context_limit": (trace(WHOLE, ends=(end("r0", 1, 2),)), 1),
}

#: situation -> the nearest trace that has it not.
LACKING = {
    "non_final_chunk": trace(WHOLE),
    "split_by_shared_budget": trace(prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True))),
    "chunk_longer_by_one": trace(prefill(0, ("r0", 0, 2, False)), prefill(1, ("r0", 2, 2, True))),
    "chunk_exact_multiple": trace(prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True))),
    "all_finished_in_one_verify": trace(decode(1, ("r0", 4, 3)), ends=(end("r0", 2, 5),)),
    "some_finished": trace(decode(1, ("r0", 4, 4)), ends=(end("r0", 1, 5),)),
    "all_finished_with_arrival": trace(
        decode(1, ("r0", 4, 4)), prefill(9, ("r1", 0, 4, False)), ends=(end("r0", 1, 5),)
    ),
    "empty_batch": trace(record(0, "IDLE", [])),
    "idle_rank": trace(record(0, "IDLE", []), record(0, "IDLE", [], dp_rank=1)),
    "stop_inside_accepted_run": trace(decode(1, ("r0", 4, 2)), ends=(end("r0", 1, 3, "stop"),)),
    "page_border_in_draft": trace(decode(1, ("r1", 8, 1))),
    "abort_in_chunk": trace(WHOLE, ends=(end("r0", 1, 1, "abort"),)),
    "abort_in_decode": trace(prefill(0, ("r1", 0, 4, False)), ends=(end("r1", 1, 0, "abort"),)),
    "abort_last_live": trace(WHOLE, decode(1, ("r1", 6, 1)), decode(5, ("r1", 7, 1)), ends=(end("r0", 3, 1, "abort"),)),
    "pool_exhausted": trace(WHOLE),
    "context_limit": trace(WHOLE, ends=(end("r0", 1, 5),)),
}


@pytest.mark.parametrize("name", HAVING)
def test_situation_is_counted_where_it_happens(name):
    made, times = HAVING[name]
    assert SITUATIONS[name].count(GIVEN, made) == times


@pytest.mark.parametrize("name", HAVING)
def test_situation_is_not_counted_where_it_does_not_happen(name):
    assert SITUATIONS[name].count(GIVEN, LACKING.get(name, trace())) == 0


def test_every_situation_has_a_trace_that_shows_it():
    assert set(SITUATIONS) - set(HAVING) == {f"accept_len_{n}" for n in range(1, 18)} - {"accept_len_1", "accept_len_4"}


def test_restart_that_was_asked_for_is_no_exhausted_pool():
    script = (GIVEN.script[0], Op(kind="retract"), GIVEN.script[-1])
    asked = GIVEN.model_copy(update={"script": script})
    restart = record(3, "PREFILL", [("r0", 1, 0, 5, True)])
    pool = Event(name="retract", tick=1, data={"reason": "pool"})
    count = SITUATIONS["pool_exhausted"].count
    assert count(asked, trace(WHOLE, restart)) == 0
    assert count(asked, trace(WHOLE, restart, events=(pool,))) == 1


def test_abort_is_dated_by_when_it_was_asked_for():
    """Ends are all noted when the engine has drained, so their tick says nothing."""
    rounds = (WHOLE, decode(1, ("r0", 4, 1), ("r1", 6, 1)), decode(5, ("r1", 7, 1)))
    ends = (end("r0", 9, 1, "abort"), end("r1", 9, 5))
    count = SITUATIONS["abort_last_live"].count
    for tick, times in ((3, 0), (6, 1)):
        asked = Event(name="abort", tick=tick, data={"rid": "r0"})
        assert count(GIVEN, trace(*rounds, ends=ends, events=(asked,))) == times


def test_accept_lengths_end_at_k_plus_one():
    assert "accept_len_4" in coverage(GIVEN, trace())
    assert "accept_len_5" not in coverage(GIVEN, trace())


def test_other_tensor_parallel_ranks_are_not_counted_again():
    twin = replace(HAVING["non_final_chunk"][0].rounds[0], tp_rank=1)
    both = trace(*HAVING["non_final_chunk"][0].rounds, twin)
    assert SITUATIONS["non_final_chunk"].count(GIVEN, both) == 1


def test_meanings_are_written_for_people():
    assert all(len(situation.meaning.split()) >= 4 for situation in SITUATIONS.values())
