"""What ranks come to: leaks, crashes, hangs, forwards in lockstep and idle ranks. Without a reference."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cases.meta import handmade
from cases.meta.judged import roots
from harness.checks import judge
from harness.contract.trace import Event
from harness.contract.types import Kind, Outcome
from harness.engine_side.host.scheduler_state import pool_level


@pytest.mark.parametrize(
    ("free", "evictable", "hint"),
    [(-3, 0, "lost"), (3, 0, "freed-twice"), (-5, 5, None)],
    ids=["lost", "freed twice", "kept by the prefix cache"],
)
def test_leak_and_double_free_are_found(sound, free, evictable, hint):
    scenario, engine = sound
    end = engine.events[-1]
    end = replace(end, data=end.data | {"free": end.data["free"] + free, "evictable": evictable})
    found = roots(scenario, replace(engine, events=(*engine.events[:-1], end)))
    assert found == ({("LEAK", "ledger", "IDLE", hint): 1} if hint else {})


@pytest.mark.parametrize(("free", "hint"), [(0, "instead-freed-twice"), (-2, "lost"), (2, "freed-twice")])
def test_slots_that_are_free_twice_do_not_stand_for_others_that_are_lost(sound, free, hint):
    scenario, engine = sound
    end = replace(engine.events[-1], data=engine.events[-1].data | {"twice": 2})
    end.data["free"] += free
    found = roots(scenario, replace(engine, events=(*engine.events[:-1], end)))
    assert found == {("LEAK", "ledger", "IDLE", hint): 1}


@pytest.mark.parametrize(
    ("cached", "twice"),
    [([], 8), ([12, 13, 14, 15], 8), ([20, 21, 22, 23, 12, 13, 14, 15], 12)],  # pages 3 and 5, of which 5 is free
)
def test_the_engine_says_how_many_free_slots_its_lists_name_again_or_its_cache_holds(cached, twice):
    lists = {"free_pages": torch.tensor([1, 2, 5, 2]), "release_pages": torch.tensor([5, 7]), "page_size": 4}
    allocator = SimpleNamespace(available_size=lambda: 24, **lists)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        tree_cache=SimpleNamespace(
            evictable_size=lambda: len(cached), all_values_flatten=lambda: torch.tensor(cached, dtype=torch.int64)
        ),
        max_total_num_tokens=40,
    )
    assert pool_level(scheduler) == {"free": 24, "evictable": len(cached), "twice": twice, "total": 40}


@pytest.mark.parametrize(
    ("words", "held", "hint"),
    [
        ("pool memory leak detected! [full] total=9, available=3, evictable=2, protected=0, session_held=0", 5, "lost"),
        ("Full Pool Mem Leak Detected! [full] total=9, available=9, evictable=1", 10, "freed-twice"),
        ("req_to_token_pool memory leak detected!available_size=8, session_held=0, total_size=9\n", 8, "lost"),
        ("pool memory leak detected! [full] total=9, available=9\n[swa] total=9, available=7", 7, "lost"),
    ],
)
def test_a_leak_that_sglang_itself_ends_for_is_one_in_its_words(sound, words, held, hint):
    scenario, engine = sound
    data = {
        "site": "common.py:raise_error_or_warn:5066",
        "error": f"ValueError: {words}",
        "phase": "EXTEND",
        "round": 2,
    }
    crash = Event(name="crash", scheduler_step=engine.rounds[-1].scheduler_step, data=data)
    _, divergences = judge(scenario, replace(engine, events=(*engine.events[:1], crash)), None)
    leak, end = (next(found for found in divergences if found.kind is kind) for kind in (Kind.LEAK, Kind.CRASH))
    assert (leak.signature, leak.expected, leak.cause) == (f"LEAK:ledger:EXTEND:{hint}", 9, "")
    assert leak.observed.startswith(f"{held} by SGLang's own check: ")
    assert end.cause == leak.signature


def test_without_pool_levels_a_leak_could_not_show(sound):
    scenario, engine = sound
    verdict, _ = judge(scenario, replace(engine, events=()), None)
    assert verdict.outcome is Outcome.UNKNOWN
    assert any("leak could not show" in reason for reason in verdict.reasons)


def test_crash_is_the_root_and_rows_it_cut_off_follow_from_it(sound):
    scenario, engine = sound
    last = engine.rounds[-1]
    extends = (engine.rows.strings["phase"] == "EXTEND") & (engine.rows.ints["round"] == last.index)
    data = {"site": "triton_backend:init_forward_metadata:812", "error": "TypeError: None", "phase": "VERIFY"}
    crash = Event(name="crash", scheduler_step=last.scheduler_step, data=data | {"round": last.index})
    cut = handmade.without_rows(engine, *extends.nonzero()[0])
    verdict, divergences = judge(scenario, replace(cut, events=(*engine.events[:1], crash), ends=()), None)
    assert verdict.root_kinds == ("CRASH",)
    assert "MISSING_ROW" in verdict.kinds
    crash_found = next(found for found in divergences if found.kind is Kind.CRASH)
    assert crash_found.hint == "triton_backend:init_forward_metadata"
    assert crash_found.first


def test_hang_is_a_failure(sound):
    scenario, engine = sound
    hang = Event(name="hang", scheduler_step=3, data={"phase": "DRAFT", "round": 3})
    assert ("HANG", "ledger", "DRAFT", "") in roots(scenario, replace(engine, events=(*engine.events, hang)))


def two_ranks(engine, **idle):
    """The trace with a second rank beside it, which is idle and enters the forwards of the first, but for `idle`."""
    idles = [
        replace(
            record,
            dp_rank=1,
            tp_rank=1,
            mode="IDLE",
            rids=(),
            attempts=(),
            starts=(),
            lens=(),
            final=(),
            forwards=record.forwards | (idle if record.mode == "DECODE" else {}),
        )
        for record in engine.rounds
    ]
    pool = tuple(replace(event, dp_rank=1) for event in engine.events)
    return replace(engine, rounds=(*engine.rounds, *idles), events=(*engine.events, *pool))


@pytest.fixture
def ranks():
    """(scenario, engine) of two ranks, of which the second is idle."""
    scenario = handmade.scenario(dp_size=2)
    return scenario, two_ranks(handmade.build(scenario)[0])


def and_events(engine, *events):
    return replace(engine, events=(*engine.events, *events))


def test_idle_rank_enters_every_forward(ranks):
    scenario, both = ranks
    assert roots(scenario, both) == {}
    engine, _ = handmade.build(scenario)
    decodes = sum(record.mode == "DECODE" for record in engine.rounds)
    assert roots(scenario, two_ranks(engine, DRAFT=1)) == {("LOCKSTEP", "ledger", "DRAFT", "fewer-forwards"): decodes}


@pytest.mark.parametrize("coordinated", [True, False])
def test_rank_may_prefill_beside_a_verify_only_where_that_was_asked_for(coordinated):
    scenario = handmade.scenario(dp_size=2, dp_spec_prefill_coordination=coordinated)
    engine, _ = handmade.build(scenario)
    beside = two_ranks(engine, VERIFY=0, PREFILL=1, EXTEND=0, DRAFT_PREFILL=1)
    assert bool(roots(scenario, beside)) is not coordinated
    fewer = roots(scenario, two_ranks(engine, VERIFY=0, EXTEND=0, DRAFT_PREFILL=1))
    assert ("LOCKSTEP", "ledger", "VERIFY", "fewer-forwards") in fewer


def test_rank_that_is_absent_from_a_scheduler_step_is_out_of_step(ranks):
    scenario, both = ranks
    assert ("LOCKSTEP", "ledger", "VERIFY", "absent") in roots(scenario, replace(both, rounds=both.rounds[:-1]))


@pytest.mark.parametrize(("more", "found"), [(0, False), (1, True)])
@pytest.mark.parametrize("phase", ["EXTEND", "DRAFT"])
def test_idle_state_has_the_width_of_busy_ranks(sound, phase, more, found):
    """The first draft step takes what the draft gave for a prompt."""
    scenario, engine = sound
    width = engine.tensors["hidden_in.EXTEND" if phase == "EXTEND" else "hidden_out.DRAFT_PREFILL"].shape[1] + more
    if phase == "DRAFT":
        engine = replace(engine, tensors={k: rows for k, rows in engine.tensors.items() if k != "hidden_in.DRAFT"})
    event = Event(name="idle_state", scheduler_step=0, dp_rank=1, data={"phase": phase, "width": width, "round": 0})
    seen = roots(scenario, and_events(engine, event))
    assert (("SHAPE", "idle_width", phase, "idle-width") in seen) is found


def state(name, *, dp_rank, rows, **data):
    given = {"phase": "EXTEND", "step": 0, "round": 0, "rows": rows, "width": 3, "dtype": "float32", "held": rows}
    return Event(name=name, scheduler_step=0, dp_rank=dp_rank, data=given | data)


def states(**idle):
    """A busy rank with four rows beside an idle one, both informed."""
    told = {"announced": [4, 0], "padding": "MAX_LEN"}
    return (state("busy_state", dp_rank=0, rows=4, **told), state("idle_state", dp_rank=1, rows=0, **(told | idle)))


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
        ({"padding": "SUM_LEN"}, ("LOCKSTEP", "announced", "EXTEND", "padded-otherwise")),
    ],
)
def test_idle_rank_agrees_with_the_busy_one_in_one_forward(ranks, idle, found):
    scenario, both = ranks
    assert set(roots(scenario, and_events(both, *states(**idle)))) == (set() if found is None else {found})


@pytest.mark.parametrize(
    ("phase", "told", "found"), [("DRAFT_PREFILL", 6, False), ("DRAFT_PREFILL", 7, True), ("PREFILL", 6, True)]
)
def test_draft_may_be_told_counts_rounded_up_to_the_tp_ranks_of_a_dp_rank(ranks, phase, told, found):
    scenario, both = ranks
    four = handmade.set_on(scenario, tp_size=4)
    events = [
        state("busy_state", dp_rank=rank, rows=rows, phase=phase, announced=[told, 2], padding="SUM_LEN")
        for rank, rows in ((0, 5), (1, 2))
    ]
    assert any(root[1] == "announced" for root in roots(four, and_events(both, *events))) is found


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (([4, 5], [4, 5]), None),
        (([4], [5]), None),
        (([4, 5], [4, 6]), ("LOCKSTEP", "announced", "PREFILL", "own")),
        (([4, 6], [4, 5]), ("LOCKSTEP", "announced", "VERIFY", "of-another-rank")),
        (([4], [4]), ("LOCKSTEP", "announced", "PREFILL", "own")),
    ],
)
def test_ranks_that_prefill_and_verify_together_agree_on_their_counts(told, found):
    scenario = handmade.scenario(dp_size=2, dp_spec_prefill_coordination=True)
    both = two_ranks(handmade.build(scenario)[0])
    events = [
        state("busy_state", dp_rank=rank, rows=rows, phase=phase, announced=told[rank], padding="SUM_LEN")
        for rank, rows, phase in ((0, 4, "VERIFY"), (1, 5, "PREFILL"))
    ]
    assert set(roots(scenario, and_events(both, *events))) == (set() if found is None else {found})


def test_later_draft_steps_are_not_held_to_the_counts_of_the_first(ranks):
    scenario, both = ranks
    later = {"phase": "DRAFT", "step": 1, "announced": [4, 4]}
    late = [replace(event, data=event.data | later) for event in states()]
    assert roots(scenario, and_events(both, *late)) == {}


@pytest.mark.parametrize(("told", "found"), [([4, 4], False), ([4, 3], True)])
def test_layers_of_one_draft_extend_are_held_to_their_own_counts(ranks, told, found):
    """SGLang pads the batch that it hands to the second layer too."""
    scenario, both = ranks
    padded = {"announced": told, "padding": "MAX_LEN"}
    second = [
        state("busy_state", dp_rank=0, rows=4, **padded),
        state("idle_state", dp_rank=1, rows=4, held=0, **padded),
    ]
    assert bool(roots(scenario, and_events(both, *states(), *second))) is found


def test_a_hang_names_the_forward_that_a_rank_left_out(ranks):
    scenario, both = ranks

    def seen(*forwards):
        at = [{"dp_rank": rank, "forwards": one, "at_round": 1} for rank, one in enumerate(forwards)]
        data = {"dp_rank_reported": 0, "phase": "DRAFT", "round": 1, "ranks": at}
        return roots(scenario, and_events(both, Event(name="hang", scheduler_step=1, data=data)))

    assert ("LOCKSTEP", "ledger", "DRAFT", "fewer-forwards") in seen({"DRAFT": 2}, {"DRAFT": 1, "VERIFY": 1})
    assert not any(kind == "LOCKSTEP" for kind, *_ in seen({"DRAFT": 2}, {"DRAFT": 1}))


SGLANG = '  File "/env/sglang/srt/layers/attention/triton_backend.py", line 1, in forward_decode\n    f()\n'
OURS = '  File "/x/replacement_kernels/cpu_attention.py", line 60, in decode_attention_fwd\n    assert padded\n'
OTHER = '  File "/x/torch/nn/functional.py", line 60, in linear\n    g()\n'


@pytest.mark.parametrize(
    ("frames", "said"), [(SGLANG + OURS, True), (SGLANG, False), (OURS + SGLANG, False), (SGLANG + OTHER, False)]
)
def test_a_crash_that_our_replacement_kernel_raised_says_so_and_keeps_its_signature(sound, frames, said):
    scenario, engine = sound
    site = "srt/layers/attention/triton_backend.py:forward_decode"
    data = {"site": site, "error": "AssertionError: x", "phase": "DRAFT", "round": 1, "trace": f"Traceback:\n{frames}x"}
    crash = Event(name="crash", scheduler_step=engine.rounds[-1].scheduler_step, data=data)
    _, divergences = judge(scenario, replace(engine, events=(*engine.events[:1], crash), ends=()), None)
    (found,) = [each for each in divergences if each.kind is Kind.CRASH]
    assert found.signature == f"CRASH:ledger:DRAFT:{site}"
    assert ("cpu_attention.decode_attention_fwd" in found.observed) is said


def test_what_our_replacement_kernel_does_not_do_is_unknown_and_no_crash_of_sglangs(sound):
    scenario, engine = sound
    data = {"site": "srt/a.py:f", "error": "NotImplementedError: it does not implement logit_cap=30", "phase": "DRAFT"}
    for frames, outcome in ((SGLANG + OURS, "UNKNOWN"), (SGLANG, "FAIL")):
        told = data | {"round": 1, "trace": f"Traceback:\n{frames}x"}
        crash = Event(name="crash", scheduler_step=engine.rounds[-1].scheduler_step, data=told)
        verdict, _ = judge(scenario, replace(engine, events=(*engine.events[:1], crash), ends=()), None)
        assert verdict.outcome == outcome
        assert any("logit_cap=30" in why for why in verdict.reasons) is (outcome == "UNKNOWN")


def test_a_crash_names_the_requests_of_its_batch_and_what_else_than_tokens_they_ask_for(sound):
    scenario, engine = sound
    odd = scenario.requests[0].model_copy(update={"temperature": 1.0, "logit_bias": {"7": 100.0}})
    scenario = scenario.model_copy(update={"requests": (odd, *scenario.requests[1:])})
    data = {"site": "srt/sampler.py:sample", "error": "RuntimeError: x", "phase": "PREFILL", "round": 1}
    others = [f"other-{number}" for number in range(9)]
    crash = Event(name="crash", scheduler_step=1, data=data | {"rids": [odd.rid, *others]})
    _, divergences = judge(scenario, replace(engine, events=(*engine.events[:1], crash), ends=()), None)
    (found,) = [each for each in divergences if each.kind is Kind.CRASH]
    assert found.signature == "CRASH:ledger:PREFILL:srt/sampler.py:sample"
    batch = f"{odd.rid} (temperature, logit_bias), {', '.join(others[:7])} and 2 more"
    assert found.observed == f"RuntimeError: x; the last batch was of {batch}"
