"""Coverage points of hand-overs, each on the smallest trace of two sides that has it and the nearest that has not."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.meta.batches import decode, end, event, prefill, record, trace, turn
from harness.coverage import POINTS, Where, names

GIVEN = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5)
RANKS = {"dp_size": 2, "tp_size": 2}
GIVEN = handmade.set_on(GIVEN, disaggregation=True, max_running_requests=1)


def ran(step, *parts):
    return replace(prefill(step, *parts), side="prefill", index=2 * step)


def handed(step, *rids, attempt=0, rank=0):
    parts = [(rid, attempt, 4, 0, True) for rid in rids]
    return record(step, "PREBUILT", parts, rank, side="decode", index=2 * step + 1 + 100 * rank)


def after(step, running=(), waiting=(), moving=(), rank=0):
    return turn(step, running=running, waiting=waiting, moving=list(moving), side="decode", dp_rank=rank)


def control(step, what, rid):
    return event("transfer", step, what=what, rid=rid)


def aborted(step, rid):
    return event("abort", step, rid=rid)


def prefixes(round, *lengths):
    return event("handed", 1, round=round, rids=["r0"], prefixes=list(lengths))


R0, R1 = ("r0", 0, 4, True), ("r1", 0, 6, True)
BOTH_AWAY = after(0, moving=("r0", "r1"))

NOTHING_LEFT = (after(1, running=("r0",)), after(1, rank=1))

#: coverage point -> (trace that has it once, the nearest trace that has it not)
LANDS = control(3, "land", "r0")
TRACES = {
    "handed_over": (trace(handed(1, "r0")), trace(handed(1, "r0", "r1"))),
    "handed_over_together": (trace(handed(1, "r0", "r1")), trace(handed(1, "r0"))),
    "last_chunk_of_one": (
        trace(ran(0, ("r1", 0, 5, False)), ran(1, ("r1", 5, 1, True)), handed(1, "r1")),
        trace(ran(0, ("r1", 0, 4, False)), ran(1, ("r1", 4, 2, True)), handed(1, "r1")),
    ),
    "handed_over_to_idle_side": (
        trace(handed(1, "r0"), events=(after(0), after(1, running=("r0",)))),
        trace(handed(1, "r0"), events=(after(0, running=("r1",)), after(1, running=("r0", "r1")))),
    ),
    "handed_over_to_busy_side": (
        trace(handed(1, "r0"), events=(after(0, running=("r1",)), after(1, running=("r0", "r1")))),
        trace(handed(1, "r0"), events=(after(0), after(1, running=("r0",)))),
    ),
    "decode_side_full": (
        trace(events=(after(0, running=("r0",), waiting=("r1",)),)),
        trace(events=(after(0, running=("r0",), moving=("r1",)),)),
    ),
    "finished_at_hand_over": (
        trace(handed(1, "r0", "r1"), ends=(end("r0", 1, 1), end("r1", 3, 5))),
        trace(handed(1, "r0", "r1"), ends=(end("r0", 1, 1, "abort"), end("r1", 3, 5))),
    ),
    "prebuilt_all_finished": (
        trace(handed(1, "r0", "r1"), ends=(end("r0", 1, 1), end("r1", 1, 1))),
        trace(handed(1, "r0", "r1"), ends=(end("r0", 1, 1), end("r1", 3, 5))),
    ),
    "abort_in_transfer": (
        trace(events=(BOTH_AWAY, aborted(1, "r0"), after(1, moving=("r1",)))),
        trace(events=(after(0, running=("r0",)), aborted(1, "r0"), after(1))),
    ),
    "failed_transfer": (
        trace(events=(control(0, "fail", "r0"),)),
        trace(handed(0, "r0"), events=(control(1, "fail", "r0"),)),
    ),
    "failed_beside_good": (
        trace(handed(1, "r1"), events=(control(0, "fail", "r0"), BOTH_AWAY)),
        trace(events=(control(0, "fail", "r0"), BOTH_AWAY)),
    ),
    "dropped_transfer": (
        trace(ran(0, R0), events=(control(0, "drop", "r0"),)),
        trace(events=(control(0, "drop", "r0"),)),
    ),
    "late_write": (
        trace(events=(control(0, "late", "r0"), aborted(2, "r0"), LANDS)),
        trace(events=(control(0, "late", "r0"), aborted(4, "r0"), LANDS)),
    ),
    "delayed_transfer": (
        trace(ran(0, R0), handed(3, "r0"), events=(control(0, "hold", "r0"),)),
        trace(ran(0, R0), handed(0, "r0"), events=(control(0, "hold", "r0"),)),
    ),
    "reordered_transfers": (
        trace(ran(0, R0, R1), handed(1, "r1"), handed(2, "r0")),
        trace(ran(0, R0, R1), handed(1, "r0"), handed(2, "r1")),
    ),
    "empty_prebuilt_batch": (trace(events=(BOTH_AWAY, after(1))), trace(handed(1, "r0"), events=(BOTH_AWAY, after(1)))),
    "retracted_on_decode_side": (
        trace(handed(1, "r0"), decode(2, ("r0", 4, 1)), handed(3, "r0", attempt=1)),
        trace(handed(1, "r0"), decode(2, ("r0", 4, 1))),
    ),
    "prefix_on_decode_side": (
        trace(handed(1, "r0"), events=(prefixes(3, 2),)),
        trace(handed(1, "r0"), events=(prefixes(3, 0),)),
    ),
    "handed_over_beside_idle_rank": (
        trace(handed(1, "r0"), events=(after(0), after(0, rank=1))),
        trace(handed(1, "r0"), events=(after(0), after(0, running=("r1",), rank=1))),
    ),
    "handed_over_beside_busy_rank": (
        trace(handed(1, "r0"), events=(after(0), after(0, running=("r1",), rank=1))),
        trace(handed(1, "r0"), events=(after(0, running=("r1",)), after(0, rank=1))),
    ),
    "handed_over_on_each_rank": (
        trace(handed(1, "r0"), handed(1, "r1", rank=1)),
        trace(handed(1, "r0"), handed(2, "r1", rank=1)),
    ),
    "empty_prebuilt_beside_busy_rank": (
        trace(events=(after(0, running=("r0",)), after(0, moving=("r1",), rank=1), *NOTHING_LEFT)),
        trace(events=(after(0), after(0, moving=("r0", "r1"), rank=1), after(1), after(1, rank=1))),
    ),
}


def test_every_point_has_its_pair_of_traces():
    assert set(TRACES) == {*names(Where.HANDOFF, Where.HANDOFF_RANKS)}


@pytest.mark.parametrize("name", TRACES)
def test_counted_once_where_it_happens_and_not_beside_it(name):
    having, lacking = TRACES[name]
    given = handmade.set_on(GIVEN, **RANKS) if POINTS[name].where is Where.HANDOFF_RANKS else GIVEN
    assert POINTS[name].count(given, having) == 1
    assert POINTS[name].count(given, lacking) == 0
