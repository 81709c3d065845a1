"""Coverage points of ranks, each on the smallest two-rank trace that has it and on the nearest that has it not."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.meta.batches import decode, end, event, prefill, record, trace, turn
from harness.coverage import POINTS, Where, names

NAMES = names(Where.RANKS, Where.MORE_RANKS)

#: Requests r0 and r2 are on rank 0, r1 on rank 1 (the predicates read ranks off the batches alone).
GIVEN = handmade.scenario(prompts=(4, 6, 4), chunk=4, max_new_tokens=5, dp_size=2)


def idle(step, rank):
    return record(step, "IDLE", [], dp_rank=rank)


def running(step, rank, *rids):
    return turn(step, running=rids, dp_rank=rank)


def padded(mode):
    return event("busy_state", 1, round=1, phase="VERIFY", padding=mode)


WHOLE = ("r0", 0, 4, True)
OTHER = ("r1", 0, 6, True)

#: point -> (trace that has it once, the nearest trace that has it not)
TRACES = {
    "padded_to_fullest": (trace(events=(padded("MAX_LEN"),)), trace(events=(padded("SUM_LEN"),))),
    "padded_to_sum": (trace(events=(padded("SUM_LEN"),)), trace(events=(padded(""),))),
    "idle_rank": (trace(prefill(0, WHOLE), idle(0, 1)), trace(idle(0, 0), idle(0, 1))),
    "idle_from_the_start": (
        trace(prefill(0, WHOLE), idle(0, 1), decode(1, ("r0", 4, 1)), prefill(2, OTHER, dp_rank=1)),
        trace(prefill(0, OTHER, dp_rank=1), prefill(0, WHOLE), decode(1, ("r0", 4, 1)), idle(1, 1)),
    ),
    "idle_between_requests": (
        trace(prefill(0, OTHER, dp_rank=1), decode(1, ("r0", 4, 1)), idle(1, 1), prefill(2, OTHER, dp_rank=1)),
        trace(
            prefill(0, OTHER, dp_rank=1),
            prefill(1, WHOLE),
            idle(1, 1),
            decode(2, ("r1", 6, 1), dp_rank=1),
            events=(running(1, 1, "r1"),),
        ),
    ),
    "idle_after_all_finished": (
        trace(
            decode(1, ("r0", 4, 4), ("r2", 4, 4)),
            decode(1, ("r1", 6, 1), dp_rank=1),
            decode(2, ("r1", 7, 1), dp_rank=1),
            idle(2, 0),
            ends=(end("r0", 1, 5), end("r2", 1, 5)),
        ),
        trace(
            decode(1, ("r0", 4, 4), ("r2", 4, 1)),
            decode(2, ("r1", 7, 1), dp_rank=1),
            idle(2, 0),
            ends=(end("r0", 1, 5), end("r2", 9, 5)),
        ),
    ),
    "idle_beside_prefill": (trace(prefill(0, WHOLE), idle(0, 1)), trace(decode(1, ("r0", 4, 1)), idle(1, 1))),
    "idle_beside_verify": (trace(decode(1, ("r0", 4, 1)), idle(1, 1)), trace(prefill(0, WHOLE), idle(0, 1))),
    "held_idle_by_prefill": (
        trace(prefill(2, OTHER, dp_rank=1), idle(2, 0), events=(running(2, 0, "r0"),)),
        trace(prefill(2, OTHER, dp_rank=1), idle(2, 0), events=(running(2, 0),)),
    ),
    "verify_beside_prefill": (
        trace(prefill(2, OTHER, dp_rank=1), decode(2, ("r0", 4, 1))),
        trace(prefill(2, OTHER, dp_rank=1), idle(2, 0)),
    ),
    "idle_inside_chunked_prefill": (
        trace(prefill(0, ("r1", 0, 4, False), dp_rank=1), idle(0, 0)),
        trace(prefill(0, ("r1", 4, 2, True), dp_rank=1), idle(0, 0)),
    ),
    "idle_after_abort": (
        trace(
            decode(1, ("r1", 6, 1), dp_rank=1),
            decode(1, ("r0", 4, 1)),
            decode(2, ("r0", 5, 1)),
            idle(2, 1),
            ends=(end("r1", 1, 2, "abort"),),
        ),
        trace(
            decode(1, ("r1", 6, 4), dp_rank=1),
            decode(1, ("r0", 4, 1)),
            decode(2, ("r0", 5, 1)),
            idle(2, 1),
            ends=(end("r1", 1, 5),),
        ),
    ),
    "every_rank_idle": (
        trace(decode(1, ("r0", 4, 1)), prefill(3, OTHER, dp_rank=1)),
        trace(decode(1, ("r0", 4, 1)), prefill(2, OTHER, dp_rank=1)),
    ),
    "uneven_ranks": (
        trace(decode(1, ("r0", 4, 1), ("r2", 4, 1)), decode(1, ("r1", 6, 1), dp_rank=1)),
        trace(decode(1, ("r0", 4, 1)), decode(1, ("r1", 6, 1), dp_rank=1)),
    ),
    "several_idle_beside_one": (
        trace(prefill(0, WHOLE), idle(0, 1), idle(0, 2)),
        trace(prefill(0, WHOLE), idle(0, 1), prefill(1, OTHER, dp_rank=1), decode(1, ("r0", 4, 1)), idle(1, 2)),
    ),
    "several_idle_beside_several": (
        trace(decode(1, ("r0", 4, 1)), decode(1, ("r1", 6, 1), dp_rank=1), idle(1, 2), idle(1, 3)),
        trace(decode(1, ("r0", 4, 1)), idle(1, 1), idle(1, 2), idle(1, 3), decode(2, ("r1", 6, 1), dp_rank=1)),
    ),
}


def test_every_point_of_ranks_has_a_pair_of_traces():
    assert set(TRACES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_point_of_ranks_is_counted_where_it_happens_and_nowhere_else(name):
    having, lacking = TRACES[name]
    assert POINTS[name].count(GIVEN, having) == 1
    assert POINTS[name].count(GIVEN, lacking) == 0


def test_a_batch_in_flight_when_its_requests_end_does_not_hide_that_they_ended_together():
    """Under overlap scheduling one more verify of them is on the way, of which nothing is kept."""
    having, _ = TRACES["idle_after_all_finished"]
    first, beside, last, idle_one = having.rounds
    flying = decode(2, ("r0", 8, 4), ("r2", 8, 4))
    later = [replace(one, scheduler_step=one.scheduler_step + 1, index=one.index + 1) for one in (last, idle_one)]
    overlapped = trace(first, beside, last, flying, *later, ends=having.ends)
    assert POINTS["idle_after_all_finished"].count(GIVEN, overlapped) == 1
    still = trace(
        first, beside, last, decode(2, ("r0", 7, 4), ("r2", 8, 4)), *later, ends=(end("r0", 2, 7), having.ends[1])
    )
    assert POINTS["idle_after_all_finished"].count(GIVEN, still) == 0


def test_one_rank_is_never_idle_beside_another():
    alone = handmade.scenario(prompts=(4, 6))
    gap = trace(decode(1, ("r0", 4, 1)), prefill(3, OTHER))
    assert [name for name in NAMES if POINTS[name].count(alone, gap)] == []
