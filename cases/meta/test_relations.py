"""Relations on hand-made traces: what must agree is compared, what differs is named, and emptiness is no pass."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from cases.boots import BY_NAME
from cases.meta import handmade
from cases.meta.related import LEAST_ROWS, compare
from cases.meta.relations import RELATIONS, pairs
from harness.contract.rows import RowBuilder
from harness.contract.settings import EngineConfig
from harness.contract.trace import Event, Trace
from harness.contract.types import Kind, Outcome, Policy

GIVEN = handmade.scenario()
CHUNKED = GIVEN.model_copy(update={"engine": EngineConfig(chunked_prefill_size=5)})


def traces():
    return handmade.build(GIVEN)[0], handmade.copy_trace(handmade.build(CHUNKED)[0])


def signatures(result):
    return {(found.kind, found.key.phase, found.hint) for found in result.divergences if not found.cause}


def test_the_same_requests_in_other_chunks_agree():
    before, after = traces()
    result = RELATIONS["other_chunk"].judge(CHUNKED, before, after)
    assert result.outcome is Outcome.PASS
    assert result.compared > 50


def test_wrong_tail_of_a_chunk_is_an_extend_input():
    before, after = traces()
    tail = next(
        index
        for index in range(len(after.rows))
        if after.rows.key(index).phase == "DRAFT_PREFILL" and after.rows.ints["position"][index] == 4
    )
    after.rows.ints["input_id"][tail] += 1
    result = RELATIONS["other_chunk"].judge(CHUNKED, before, after)
    assert signatures(result) == {(Kind.EXTEND_INPUT, "DRAFT_PREFILL", "input")}
    assert result.divergences[0].check == "relation-other_chunk"
    assert result.divergences[0].first


@pytest.mark.parametrize(
    ("group", "column", "by", "kind", "hint"),
    [
        ("ints", "position", 1, Kind.POSITION, "position"),
        ("ints", "input_id", 1, Kind.TOKEN, "input"),
        ("lists", "chosen_ids", 1, Kind.TOKEN, "proposal"),
        ("floats", "lse", 0.5, Kind.NUMERIC, "log-sum-exp"),
    ],
)
def test_draft_step_that_differs_is_found(group, column, by, kind, hint):
    before, after = traces()
    column, where = getattr(after.rows, group)[column], handmade.find(after, phase="DRAFT")
    column[where] = column[where] + by
    result = compare(before, after, check="x")
    assert (kind, "DRAFT", hint) in signatures(result)
    assert len(signatures(result)) == 1 or hint == "proposal"
    assert (result.divergences[0].policy is Policy.TIE) is (hint == "proposal")


def test_proposal_too_close_to_call_is_a_tie_and_ends_its_chain():
    before, after = traces()
    where = handmade.find(after, phase="DRAFT")
    key = after.rows.key(where)
    first, second = before.rows.lists["top_ids"][same(before, key)][:2]
    before.rows.lists["top_logits"][same(before, key)][:2] = 8.0
    after.rows.lists["chosen_ids"][where] = after.rows.lists["chosen_ids"][where] * 0 + second
    assert first != second
    for step in range(key.step + 1, GIVEN.spec.num_steps - 1):
        after.rows.ints["input_id"][same(after, replace(key, step=step))] += 1
    result = compare(before, after, check="x")
    assert result.ties == 1
    assert result.outcome is Outcome.PASS


def same(trace, key):
    return next(index for index in range(len(trace.rows)) if trace.rows.key(index) == key)


def test_rows_of_a_request_that_came_back_are_compared_with_those_before():
    before, after = traces()
    rows = after.rows
    where = handmade.find(after, phase="DRAFT_PREFILL")
    rows.ints["attempt"][:] = 1
    assert compare(before, after, check="x").outcome is Outcome.PASS
    rows.ints["input_id"][where] += 1
    assert compare(before, after, check="x").outcome is Outcome.FAIL


def test_nothing_in_common_and_a_crash_are_unknown():
    before, after = traces()
    empty = Trace(side="engine", scenario_id="", header={}, rows=RowBuilder().build())
    result = compare(before, empty, check="x")
    assert result.outcome is Outcome.UNKNOWN
    assert str(LEAST_ROWS) in result.unknown[0]
    crashed = replace(after, events=(Event(name="crash", scheduler_step=1),))
    assert compare(before, crashed, check="x").outcome is Outcome.UNKNOWN


def test_change_that_left_no_mark_is_unknown():
    before, _ = traces()
    asked = {
        "other_chunk",
        "other_order",
        "extra_request",
        "prefix_cache_off",
        "retract_and_resume",
        "neighbour_aborted",
    }
    assert asked <= set(RELATIONS)
    for relation in RELATIONS.values():
        result = relation.judge(GIVEN, before, handmade.copy_trace(before))
        assert result.outcome is Outcome.UNKNOWN, relation.name
        assert relation.name in result.unknown[-1]


@pytest.mark.parametrize("relation", RELATIONS.values(), ids=lambda relation: relation.name)
def test_pairs_differ_and_reboot_only_where_they_say_so(relation):
    @settings(max_examples=20, deadline=None)
    @given(pair=pairs(relation, BY_NAME["plain"]))
    def every(pair):
        scenario, changed = pair
        assert scenario.id != changed.id
        assert (scenario.boot_key() != changed.boot_key()) is relation.reboots
        kept = {request.rid: request for request in changed.requests}
        assert all(kept[request.rid] == request for request in scenario.requests)

    every()
