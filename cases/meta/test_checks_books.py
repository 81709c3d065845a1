"""Slots, forwards, pools, walks, finishes, without a reference: sound traces pass, broken ones fail."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.meta.judged import roots, with_round
from harness.checks import judge
from harness.contract.trace import Event, RoundRecord
from harness.contract.types import Kind, Outcome


@pytest.fixture
def made():
    scenario = handmade.scenario()
    engine, _ = handmade.build(scenario)
    return scenario, engine


# slots


def test_slot_of_another_live_request_is_found(made):
    scenario, engine = made
    theirs = handmade.find(engine, phase="PREFILL", rid="r0")
    mine = handmade.find(engine, phase="VERIFY", rid="r1", slot=1)
    engine.rows.ints["cache_slot"][mine] = engine.rows.ints["cache_slot"][theirs]
    assert ("CACHE_SLOT", "slots", "VERIFY", "owned-by-another") in roots(scenario, engine)


def test_two_requests_of_one_batch_must_not_write_one_slot(made):
    scenario, engine = made
    number = next(record.index for record in engine.rounds if record.mode == "DECODE" and len(record.rids) > 1)
    rows = [handmade.find(engine, phase="DRAFT", round=number, rid=rid) for rid in engine.rounds[number].rids[:2]]
    engine.rows.ints["cache_slot"][rows[1]] = engine.rows.ints["cache_slot"][rows[0]]
    assert roots(scenario, engine) == {("CACHE_SLOT", "slots", "DRAFT", "shared-with-another"): 1}


def test_request_must_not_overwrite_its_own_committed_rows(made):
    scenario, engine = made
    mine = handmade.find(engine, phase="VERIFY", rid="r0", slot=2)
    engine.rows.ints["cache_slot"][mine] = engine.rows.ints["cache_slot"][
        handmade.find(engine, phase="PREFILL", rid="r0")
    ]
    assert ("CACHE_SLOT", "slots", "VERIFY", "own-slot-again") in roots(scenario, engine)


@pytest.mark.parametrize("phase", ["DRAFT_PREFILL", "EXTEND"])
def test_draft_and_target_write_the_same_slot(made, phase):
    scenario, engine = made
    engine.rows.ints["cache_slot"][handmade.find(engine, phase=phase)] = 3000
    assert ("CACHE_SLOT", "slots", phase, "draft-slot-differs") in roots(scenario, engine)


def test_slot_of_a_request_that_has_left_may_be_used_again(made):
    scenario, engine = made
    last_of = {rid: record.index for record in engine.rounds for rid in record.rids}
    left = min(last_of, key=lambda rid: last_of[rid])
    stays, start = engine.rounds[-1].rids[0], engine.rounds[-1].starts[0]
    assert last_of[left] < engine.rounds[-1].index
    theirs = handmade.find(engine, phase="PREFILL", rid=left)
    for phase in ("VERIFY", "EXTEND", "DRAFT"):
        mine = handmade.find(engine, phase=phase, rid=stays, committed=start)
        engine.rows.ints["cache_slot"][mine] = engine.rows.ints["cache_slot"][theirs]
    assert roots(scenario, engine) == {}


def test_shared_text_may_be_given_back_early_only_with_a_prefix_cache(made):
    scenario, _ = made
    twins = tuple(replace_prompt(request, scenario.requests[0].input_ids) for request in scenario.requests)
    for cache, found in ((True, False), (False, True)):
        given = scenario.model_copy(
            update={"requests": twins, "engine": scenario.engine.model_copy(update={"radix_cache": cache})}
        )
        engine, _ = handmade.build(given)
        theirs = handmade.find(engine, phase="PREFILL", rid="r0", slot=1)
        for phase in ("PREFILL", "DRAFT_PREFILL"):  # r2 writes where r0 wrote the same text
            mine = handmade.find(engine, phase=phase, rid="r2", nth=1)
            engine.rows.ints["cache_slot"][mine] = engine.rows.ints["cache_slot"][theirs]
        assert bool(roots(given, engine)) is found


def replace_prompt(request, prompt):
    return request.model_copy(update={"input_ids": prompt})


# ledger


def test_leak_and_double_free_are_found(made):
    scenario, engine = made
    for change, hint in ((-3, "lost"), (3, "freed-twice")):
        events = [replace(event, data=dict(event.data)) for event in engine.events]
        events[-1].data["free"] += change
        assert roots(scenario, replace(engine, events=tuple(events))) == {("LEAK", "ledger", "IDLE", hint): 1}


def test_slots_kept_by_the_prefix_cache_are_no_leak(made):
    scenario, engine = made
    events = [replace(event, data=dict(event.data)) for event in engine.events]
    events[-1].data["free"] -= 5
    events[-1].data["evictable"] += 5
    assert roots(scenario, replace(engine, events=tuple(events))) == {}


def test_without_pool_levels_a_leak_could_not_show(made):
    scenario, engine = made
    verdict, _ = judge(scenario, replace(engine, events=()), None)
    assert verdict.outcome is Outcome.UNKNOWN
    assert any("leak could not show" in reason for reason in verdict.reasons)


def test_crash_is_the_root_and_rows_it_cut_off_follow_from_it(made):
    scenario, engine = made
    last = engine.rounds[-1].index
    keep = [
        r
        for r in range(len(engine.rows))
        if not (engine.rows.key(r).phase == "EXTEND" and engine.rows.ints["round"][r] == last)
    ]
    crash = Event(
        name="crash",
        scheduler_step=engine.rounds[-1].scheduler_step,
        data={
            "site": "triton_backend:init_forward_metadata:812",
            "error": "TypeError: None",
            "phase": "VERIFY",
            "round": last,
        },
    )
    cut = replace(engine, rows=handmade.take_rows(engine.rows, keep), events=(*engine.events[:1], crash), ends=())
    verdict, divergences = judge(scenario, cut, None)
    assert verdict.root_kinds == ("CRASH",)
    assert "MISSING_ROW" in verdict.kinds
    crash_found = next(found for found in divergences if found.kind is Kind.CRASH)
    assert crash_found.hint == "triton_backend:init_forward_metadata"
    assert crash_found.first


def test_hang_is_a_failure(made):
    scenario, engine = made
    hang = Event(name="hang", scheduler_step=3, data={"phase": "DRAFT", "round": 3})
    assert ("HANG", "ledger", "DRAFT", "") in roots(scenario, replace(engine, events=(*engine.events, hang)))


def two_ranks(engine, **idle):
    forwards = [record.forwards for record in engine.rounds]
    idles = [
        RoundRecord(
            index=number,
            scheduler_step=record.scheduler_step,
            dp_rank=1,
            tp_rank=1,
            mode="IDLE",
            rids=(),
            attempts=(),
            starts=(),
            lens=(),
            final=(),
            forwards={**forwards[number], **idle} if record.mode == "DECODE" else forwards[number],
        )
        for number, record in enumerate(engine.rounds)
    ]
    pool = tuple(replace(event, dp_rank=1) for event in engine.events)
    return replace(engine, rounds=(*engine.rounds, *idles), events=(*engine.events, *pool))


def test_idle_rank_enters_every_forward():
    scenario = handmade.scenario(dp_size=2)
    engine, _ = handmade.build(scenario)
    assert roots(scenario, two_ranks(engine)) == {}
    decodes = sum(record.mode == "DECODE" for record in engine.rounds)
    assert roots(scenario, two_ranks(engine, DRAFT=1)) == {("LOCKSTEP", "ledger", "DRAFT", "fewer-forwards"): decodes}


def test_rank_that_is_absent_from_a_scheduler_step_is_out_of_step():
    scenario = handmade.scenario(dp_size=2)
    engine, _ = handmade.build(scenario)
    both = two_ranks(engine)
    assert ("LOCKSTEP", "ledger", "VERIFY", "absent") in roots(scenario, replace(both, rounds=both.rounds[:-1]))


def test_idle_state_has_the_width_of_busy_ranks(made):
    scenario, engine = made
    for width, found in ((handmade.WIDTH, False), (3 * handmade.WIDTH, True)):
        event = Event(
            name="idle_state", scheduler_step=0, dp_rank=1, data={"phase": "EXTEND", "width": width, "round": 0}
        )
        seen = roots(scenario, replace(engine, events=(*engine.events, event)))
        assert (("SHAPE", "idle_width", "EXTEND", "idle-width") in seen) is found


def test_first_draft_step_takes_what_the_draft_gave_for_a_prompt(made):
    scenario, engine = made
    tensors = {name: rows for name, rows in engine.tensors.items() if name != "hidden_in.DRAFT"}
    given = tensors["hidden_out.DRAFT_PREFILL"].shape[1]
    for width, found in ((given, False), (given + 1, True)):
        event = Event(
            name="idle_state", scheduler_step=0, dp_rank=1, data={"phase": "DRAFT", "width": width, "round": 0}
        )
        seen = roots(scenario, replace(engine, tensors=tensors, events=(*engine.events, event)))
        assert (("SHAPE", "idle_width", "DRAFT", "idle-width") in seen) is found


def state(name, *, dp_rank, rows, **data):
    given = {"phase": "EXTEND", "step": 0, "round": 0, "rows": rows, "width": 3, "dtype": "float32", "held": rows}
    return Event(name=name, scheduler_step=0, dp_rank=dp_rank, data=given | data)


def states(**idle):
    """A busy rank with four rows beside an idle one, both informed."""
    told = {"announced": [4, 0]}
    return (
        state("busy_state", dp_rank=0, rows=4, **told),
        state("idle_state", dp_rank=1, rows=0, **(told | idle)),
    )


@pytest.mark.parametrize(
    ("idle", "found"),
    [
        ({}, None),
        ({"width": 1}, ("SHAPE", "idle_width", "EXTEND", "idle-width")),
        ({"dtype": "float16"}, ("SHAPE", "idle_width", "EXTEND", "idle-dtype")),
        ({"held": 4}, ("SHAPE", "idle_width", "EXTEND", "idle-rows")),
        ({"announced": [0, 4]}, ("LOCKSTEP", "announced", "EXTEND", "exchanged")),
        ({"announced": [4, 1]}, ("LOCKSTEP", "announced", "EXTEND", "own")),
        ({"announced": [3, 0]}, ("LOCKSTEP", "announced", "EXTEND", "of-another-rank")),
    ],
)
def test_idle_rank_agrees_with_the_busy_one_in_one_forward(idle, found):
    scenario = handmade.scenario(dp_size=2)
    engine, _ = handmade.build(scenario)
    both = two_ranks(engine)
    seen = roots(scenario, replace(both, events=(*both.events, *states(**idle))))
    assert set(seen) == (set() if found is None else {found})


def test_later_draft_steps_are_not_held_to_the_counts_of_the_first():
    scenario = handmade.scenario(dp_size=2)
    engine, _ = handmade.build(scenario)
    both = two_ranks(engine)
    late = tuple(
        replace(event, data=event.data | {"phase": "DRAFT", "step": 1, "announced": [4, 4]}) for event in states()
    )
    assert roots(scenario, replace(both, events=(*both.events, *late))) == {}


def test_a_hang_names_the_forward_that_a_rank_left_out():
    scenario = handmade.scenario(dp_size=2)
    engine, _ = handmade.build(scenario)
    ranks = [
        {"dp_rank": 0, "forwards": {"DRAFT": 2}, "at_round": 1},
        {"dp_rank": 1, "forwards": {"DRAFT": 1, "VERIFY": 1}, "at_round": 1},
    ]
    hang = Event(
        name="hang", scheduler_step=1, data={"dp_rank_reported": 0, "phase": "DRAFT", "round": 1, "ranks": ranks}
    )
    both = two_ranks(engine)
    seen = roots(scenario, replace(both, events=(*both.events, hang)))
    assert ("LOCKSTEP", "ledger", "DRAFT", "fewer-forwards") in seen
    waiting = [ranks[0], ranks[1] | {"forwards": {"DRAFT": 1}}]
    patient = replace(hang, data=hang.data | {"ranks": waiting})
    assert not any(kind == "LOCKSTEP" for kind, *_ in roots(scenario, replace(both, events=(*both.events, patient))))


# walk


def accept_rows(engine, length):
    """ACCEPT rows of a share that committed `length` tokens in a round that is not its request's last."""
    for record in engine.rounds[:-2]:
        for rid, start, accepted in zip(record.rids, record.starts, record.lens, strict=True):
            if record.mode == "DECODE" and accepted == length:
                return [handmade.find(engine, phase="ACCEPT", rid=rid, committed=start, slot=s) for s in range(length)]
    raise AssertionError(f"no accept length {length}")


def test_one_token_too_many_is_found(made):
    scenario, engine = made
    rows = accept_rows(engine, 1)
    more = handmade.take_rows(engine.rows, [*range(len(engine.rows)), rows[0]])
    more.ints["slot"][-1] = 1
    assert ("ACCEPT", "walk", "ACCEPT", "too-many") in roots(scenario, replace(engine, rows=more))


def test_one_token_too_few_is_found(made):
    scenario, engine = made
    gone = accept_rows(engine, 4)[-1]
    rows = handmade.take_rows(engine.rows, [row for row in range(len(engine.rows)) if row != gone])
    assert ("ACCEPT", "walk", "ACCEPT", "too-few") in roots(scenario, replace(engine, rows=rows))


def cut_short(engine):
    """The engine's trace without the last token of its last walk, and whose walk that is."""
    last = engine.rounds[-1]
    rid, start, length = last.rids[0], last.starts[0], last.lens[0]
    assert length > 1
    gone = {
        handmade.find(engine, phase=phase, rid=rid, committed=start, slot=length - 1) for phase in ("ACCEPT", "EXTEND")
    }
    rows = handmade.take_rows(engine.rows, [row for row in range(len(engine.rows)) if row not in gone])
    return with_round(replace(engine, rows=rows), -1, lens=(length - 1, *last.lens[1:])), rid, start + length


def test_walk_may_be_cut_at_the_limit_though_the_answer_died_with_the_engine(made):
    """A crash a scheduler step later leaves no RequestEnd; that the request was done is seen from its tokens."""
    scenario, engine = made
    cut, rid, known = cut_short(engine)
    cut = replace(
        cut,
        header={**cut.header, "truncates_at_finish": True},
        ends=tuple(end for end in cut.ends if end.rid != rid),
    )

    def limited(tokens):
        requests = [
            one.model_copy(update={"max_new_tokens": tokens}) if one.rid == rid else one for one in scenario.requests
        ]
        asked = scenario.model_copy(update={"requests": tuple(requests)})
        return asked, replace(cut, scenario_id=asked.id)

    new = known - len(scenario.request(rid).input_ids)
    assert roots(*limited(new)) == {}
    assert ("ACCEPT", "walk", "ACCEPT", "too-few") in roots(*limited(new + 1))


def test_walk_may_be_cut_at_the_finish_only_where_the_release_says_so(made):
    scenario, engine = made
    cut, _, _ = cut_short(engine)
    assert ("ACCEPT", "walk", "ACCEPT", "too-few") in roots(scenario, cut)
    assert roots(scenario, replace(cut, header={**cut.header, "truncates_at_finish": True})) == {}


def test_wrong_token_and_wrong_parent_are_found(made):
    scenario, engine = made
    engine.rows.ints["parent"][accept_rows(engine, 4)[2]] = 0
    assert roots(scenario, engine) == {("PARENT", "walk", "ACCEPT", "accept-parent"): 1}
    engine.rows.ints["input_id"][accept_rows(engine, 4)[1]] += 1
    assert ("ACCEPT", "walk", "ACCEPT", "wrong-token") in roots(scenario, engine)


# finish


def test_output_past_its_stop_token_is_found():
    scenario = handmade.scenario(prompts=(5,))
    engine, _ = handmade.build(scenario)
    stop = engine.ends[0].output_ids[3]
    stopping = handmade.scenario(prompts=(5,), stop_ids=(stop,))
    engine = replace(engine, scenario_id=stopping.id)
    assert ("TOKEN", "finish", "ACCEPT", "ran-past-stop") in roots(stopping, engine)


def test_aborted_output_past_its_limits_is_a_finding_of_its_own():
    engine, _ = handmade.build(handmade.scenario(prompts=(5,)))
    aborted = replace(engine, ends=(replace(engine.ends[0], reason="abort"),))
    other = handmade.scenario(prompts=(5,), max_new_tokens=11)
    assert ("TOKEN", "finish", "ACCEPT", "aborted-ran-past-length") in roots(
        other, replace(aborted, scenario_id=other.id)
    )
    stopping = handmade.scenario(prompts=(5,), stop_ids=(engine.ends[0].output_ids[3],))
    assert ("TOKEN", "finish", "ACCEPT", "aborted-ran-past-stop") in roots(
        stopping, replace(aborted, scenario_id=stopping.id)
    )


@pytest.mark.parametrize(("limit", "hint"), [(11, "ran-past-length"), (13, "stopped-early")])
def test_output_of_the_wrong_length_is_found(limit, hint):
    engine, _ = handmade.build(handmade.scenario(prompts=(5,)))
    other = handmade.scenario(prompts=(5,), max_new_tokens=limit)
    assert ("TOKEN", "finish", "ACCEPT", hint) in roots(other, replace(engine, scenario_id=other.id))


def test_full_context_window_excuses_a_short_output():
    engine, _ = handmade.build(handmade.scenario(prompts=(5,)))
    other = handmade.scenario(prompts=(5,), max_new_tokens=40)
    header = {**engine.header, "context_length": 18}
    assert roots(other, replace(engine, scenario_id=other.id, header=header)) == {}


SGLANG = '  File "/env/sglang/srt/layers/attention/triton_backend.py", line 1, in forward_decode\n    f()\n'
OURS = '  File "/x/replacement_kernels/cpu_attention.py", line 60, in decode_attention_fwd\n    assert padded\n'
OTHER = '  File "/x/torch/nn/functional.py", line 60, in linear\n    g()\n'


@pytest.mark.parametrize(
    ("frames", "told"), [(SGLANG + OURS, True), (SGLANG, False), (OURS + SGLANG, False), (SGLANG + OTHER, False)]
)
def test_a_crash_that_our_replacement_kernel_raised_says_so_and_keeps_its_signature(made, frames, told):
    scenario, engine = made
    site = "srt/layers/attention/triton_backend.py:forward_decode"
    data = {
        "site": site,
        "error": "AssertionError: x",
        "phase": "DRAFT",
        "round": 1,
        "trace": f"Traceback:\n{frames}AssertionError: x",
    }
    crash = Event(name="crash", scheduler_step=engine.rounds[-1].scheduler_step, data=data)
    _, divergences = judge(scenario, replace(engine, events=(*engine.events[:1], crash), ends=()), None)
    (found,) = [each for each in divergences if each.kind is Kind.CRASH]
    assert found.signature == f"CRASH:ledger:DRAFT:{site}"
    assert ("refused by our stand-in cpu_attention.decode_attention_fwd" in found.observed) is told
