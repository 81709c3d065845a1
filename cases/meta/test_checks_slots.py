"""Which slots are written: by whom, again, in pages, and what both models write. Without a reference."""

import pytest

from cases.meta import handmade
from cases.meta.judged import roots


def test_slot_of_another_live_request_is_found(sound):
    scenario, engine = sound
    theirs = handmade.find(engine, phase="PREFILL", rid="r0")
    mine = handmade.find(engine, phase="VERIFY", rid="r1", slot=1)
    engine.rows.ints["cache_slot"][mine] = engine.rows.ints["cache_slot"][theirs]
    assert ("CACHE_SLOT", "slots", "VERIFY", "owned-by-another") in roots(scenario, engine)


def test_two_requests_of_one_batch_must_not_write_one_slot(sound):
    scenario, engine = sound
    number = next(record.index for record in engine.rounds if record.mode == "DECODE" and len(record.rids) > 1)
    rows = [handmade.find(engine, phase="DRAFT", round=number, rid=rid) for rid in engine.rounds[number].rids[:2]]
    engine.rows.ints["cache_slot"][rows[1]] = engine.rows.ints["cache_slot"][rows[0]]
    assert roots(scenario, engine) == {("CACHE_SLOT", "slots", "DRAFT", "shared-with-another"): 1}


def test_request_must_not_overwrite_its_own_committed_rows(sound):
    scenario, engine = sound
    slots = engine.rows.ints["cache_slot"]
    slots[handmade.find(engine, phase="VERIFY", rid="r0", slot=2)] = slots[
        handmade.find(engine, phase="PREFILL", rid="r0")
    ]
    assert ("CACHE_SLOT", "slots", "VERIFY", "own-slot-again") in roots(scenario, engine)


@pytest.mark.parametrize("phase", ["DRAFT_PREFILL", "EXTEND"])
def test_draft_and_target_write_the_same_slot(sound, phase):
    scenario, engine = sound
    engine.rows.ints["cache_slot"][handmade.find(engine, phase=phase)] = 3000
    assert ("CACHE_SLOT", "slots", phase, "draft-slot-differs") in roots(scenario, engine)


@pytest.mark.parametrize(("page", "found"), [(1, 0), (4, 1)])
def test_a_position_lies_at_its_place_in_a_page(sound, page, found):
    scenario, engine = sound
    paged = handmade.set_on(scenario, page_size=page)
    ints, strings = engine.rows.ints, engine.rows.strings
    slots = ints["cache_slot"]
    for index, slot in enumerate(slots):  # as if each request had whole pages in their order
        step = int(ints["step"][index]) if strings["phase"][index] == "DRAFT" else 0
        if slot >= 0:
            slots[index] = 400 * int(strings["rid"][index][1:]) + ints["committed"][index] + ints["slot"][index] + step
    assert roots(paged, engine) == {}
    for phase in ("PREFILL", "DRAFT_PREFILL"):
        slots[handmade.find(engine, phase=phase, rid="r0", slot=2)] += 1001
    assert sum(hint == "out-of-page" for *_, hint in roots(paged, engine)) == found


def test_slot_of_a_request_that_has_left_may_be_used_again(sound):
    scenario, engine = sound
    last_of = {rid: record.index for record in engine.rounds for rid in record.rids}
    left = min(last_of, key=lambda rid: last_of[rid])
    stays, start = engine.rounds[-1].rids[0], engine.rounds[-1].starts[0]
    assert last_of[left] < engine.rounds[-1].index
    theirs = handmade.find(engine, phase="PREFILL", rid=left)
    for phase in ("VERIFY", "EXTEND", "DRAFT"):
        mine = handmade.find(engine, phase=phase, rid=stays, committed=start)
        engine.rows.ints["cache_slot"][mine] = engine.rows.ints["cache_slot"][theirs]
    assert roots(scenario, engine) == {}


@pytest.mark.parametrize("cache", [True, False])
def test_shared_text_may_be_given_back_early_only_with_a_prefix_cache(sound, cache):
    scenario, _ = sound
    text = {"input_ids": scenario.requests[0].input_ids}
    twins = tuple(request.model_copy(update=text) for request in scenario.requests)
    given = handmade.set_on(scenario.model_copy(update={"requests": twins}), radix_cache=cache)
    engine, _ = handmade.build(given)
    theirs = handmade.find(engine, phase="PREFILL", rid="r0", slot=1)
    for phase in ("PREFILL", "DRAFT_PREFILL"):  # r2 writes where r0 wrote the same text
        mine = handmade.find(engine, phase=phase, rid="r2", nth=1)
        engine.rows.ints["cache_slot"][mine] = engine.rows.ints["cache_slot"][theirs]
    assert bool(roots(given, engine)) is not cache
