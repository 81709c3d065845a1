"""Pools of sliding windows: what the probe says of them, what the check finds in that, and which points it proves."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from cases.meta import handmade
from cases.meta.batches import decode, prefill, trace
from harness.archive.event_facts import unfit
from harness.checks.evidence import gather
from harness.checks.judge import judge
from harness.checks.registry import CHECKS, run_check
from harness.contract.trace import Event
from harness.coverage import POINTS, Where, names
from harness.engine_side.probes.pool_probe import window_of


@dataclass
class Pool:
    """Two requests of six and three positions, and two rows each beyond; position p of request i is slot 10 i + p + 1.

    held: slot -> slot of the pool for windows, whose slots from 50 on are free ones; a page is one slot.
    """

    held: dict[int, int]
    page: int = 1

    def said(self, *, prompt=False):
        table = torch.stack([torch.arange(1, 9), torch.arange(11, 19)])
        mapping = torch.zeros(30, dtype=torch.int64)
        for slot, own in self.held.items():
            mapping[slot] = own
        free = torch.arange(50 // self.page, 60 // self.page)
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool_allocator=SimpleNamespace(
                full_to_swa_index_mapping=mapping,
                page_size=self.page,
                swa_attn_allocator=SimpleNamespace(free_pages=free, release_pages=free[:0]),
            ),
        )
        batch = SimpleNamespace(
            seq_lens=torch.tensor([6, 3]),
            extend_prefix_lens=torch.tensor([6, 3]),
            extend_seq_lens=torch.tensor([2, 1]),
            input_ids=torch.zeros(4),
            req_pool_indices=torch.tensor([0, 1]),
        )
        return window_of(runner, batch, prompt=prompt)


EVERY = {slot: slot + 5 for slot in (*range(1, 9), *range(11, 16))}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, {"held_from": [0, 0], "gone": [0, 0], "shared": [0, 0]}),
        ({1: 0, 2: 0}, {"held_from": [2, 0], "gone": [2, 0], "shared": [0, 0]}),
        ({5: 0}, {"held_from": [5, 0], "gone": [1, 0], "shared": [0, 0]}),
        ({12: 53}, {"held_from": [0, 2], "gone": [0, 1], "shared": [0, 0]}),  # a free one is none
        ({8: 0}, {"held_from": [8, 0], "gone": [0, 0], "shared": [0, 0]}),  # a row of the forward's own
        ({3: 17}, {"held_from": [0, 0], "gone": [0, 0], "shared": [1, 1]}),  # that of slot 12, of the other request
    ],
)
def test_the_probe_says_which_positions_have_a_slot_of_their_own(changes, said):
    found = Pool(EVERY | changes).said()
    assert {name: found[name] for name in said} == said
    assert (found["committed"], found["lens"]) == ([6, 3], [2, 2])


def test_what_the_probe_says_can_be_read_from_a_stored_run():
    said = Pool({slot: slot + 10 for slot in range(1, 19)}).said()
    assert not unfit(
        "window", {"round": 3, "phase": "VERIFY", "window": 4, "rids": ["a", "b"], "attempts": [0, 0]} | said
    )


def test_in_pages_a_free_page_holds_nothing_and_prompts_have_rows_of_their_own_numbers():
    found = Pool({slot: slot + 20 for slot in EVERY} | {2: 51}, page=2).said(prompt=True)
    assert (found["lens"], found["held_from"]) == ([2, 1], [2, 0])
    assert window_of(SimpleNamespace(token_to_kv_pool_allocator=object()), None, prompt=True) is None


def told(round_, committed, *, gone=0, held_from=0, shared=0, window=4, rid="r0", phase="VERIFY"):
    data = {"round": round_, "rids": [rid], "attempts": [0], "lens": [4], "phase": phase, "window": window}
    data |= {"committed": [committed], "gone": [gone], "held_from": [held_from], "shared": [shared]}
    return Event(name="window", scheduler_step=round_, data=data)


@pytest.mark.parametrize(
    ("facts", "hints"),
    [
        ({"held_from": 6}, []),  # positions 6, 7 and 8 are what the first row, at 9, sees beside itself
        ({"held_from": 7}, ["window-slot-gone"]),
        ({"held_from": 7, "window": 3}, []),
        ({"shared": 1}, ["window-slot-shared"]),
        ({"committed": 2, "held_from": 1}, ["window-slot-gone"]),
    ],
)
def test_a_position_in_reach_needs_a_slot_of_its_own(facts, hints):
    committed = facts.pop("committed", 9)
    made = trace(decode(3, ("r0", committed, 1)), events=(told(3, committed, **facts),))
    result = run_check(CHECKS["windows"], gather(GIVEN, made, None))
    assert [(one.kind, one.key.phase, one.key.committed, one.hint) for one in result.divergences] == [
        ("CACHE_SLOT", "VERIFY", committed, hint) for hint in hints
    ]
    reach = min(committed, facts.get("window", 4) - 1)
    assert result.compared == {"window_slots": reach + 4}


def test_how_far_a_window_reaches_says_the_reference_where_there_is_one():
    made = trace(decode(3, ("r0", 9, 1)), events=(told(3, 9, held_from=6),))
    reference = replace(trace(), side="reference", header={"window": 5})
    (found,) = run_check(CHECKS["windows"], gather(GIVEN, made, reference)).divergences
    assert (found.expected, found.observed) == ("every position from 5 on", "from 6 on")


GIVEN = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5)
CHUNKS = (prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True)))


#: (point, the rounds of a trace, an event with which they show it, and the nearest with which they do not).
SHOWN = [
    ("window_evicted", (decode(2, ("r0", 9, 1)),), told(2, 9, gone=3), told(2, 9)),
    (
        "window_evicted_in_prompt",
        CHUNKS,
        told(1, 4, rid="r1", phase="PREFILL", gone=1),
        told(0, 0, rid="r1", phase="PREFILL", gone=1),
    ),
    (
        "prefix_hit_past_window",
        (prefill(0, ("r1", 4, 2, True)),),
        told(0, 4, rid="r1", phase="PREFILL", window=4),
        told(0, 4, rid="r1", phase="PREFILL", window=5),
    ),
]


@pytest.mark.parametrize(("name", "rounds", "shows", "lacks"), SHOWN)
def test_points_of_windows_are_counted_where_they_happen(name, rounds, shows, lacks):
    counts = [POINTS[name].count(GIVEN, trace(*rounds, events=(event,))) for event in (shows, lacks)]
    assert counts == [1, 0]
    assert name in names(Where.WINDOWS)


def test_every_point_of_windows_is_shown_here():
    assert {name for name, *_ in SHOWN} == set(names(Where.WINDOWS))


@pytest.mark.parametrize(("free", "hint"), [(90, "window-lost"), (101, "window-freed-twice"), (100, None)])
def test_a_leak_is_found_in_either_pool(free, hint):
    engine, _ = handmade.build(GIVEN)
    levels = {"window_free": 100, "window_evictable": 0}
    start, end = (replace(event, data=event.data | levels) for event in (engine.events[0], engine.events[-1]))
    end = replace(end, data=end.data | {"window_free": free})
    _, divergences = judge(GIVEN, replace(engine, events=(start, *engine.events[1:-1], end)), None)
    assert [one.hint for one in divergences if one.kind == "LEAK"] == ([hint] if hint else [])


def test_a_pool_of_windows_that_was_asked_for_and_is_not_there_is_unknown():
    scenario = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5, disable_hybrid_swa_memory=False)
    engine, reference = handmade.build(scenario)
    verdict, _ = judge(scenario, engine, reference)
    assert verdict.outcome == "UNKNOWN"
    assert any("no pool for sliding windows" in reason for reason in verdict.reasons)
