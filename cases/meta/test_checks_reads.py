"""What attention reads is judged by what each slot holds: sound traces pass, and every wrong plan has its own name."""

from dataclasses import replace

import numpy as np
import pytest

import harness.checks.judge  # noqa: F401  registers the checks
from cases.meta.handmade import build, copy_trace, find, scenario, set_on
from harness.checks import group, judge
from harness.checks.evidence import gather
from harness.checks.reads import NOT_RECORDED
from harness.checks.registry import CHECKS, run_check
from harness.contract.rows import Ragged
from harness.contract.trace import Event

CHAIN, TREE = scenario(), scenario(t=2, n=7)


def seen(trace, t):
    """row -> the slots that it should read, as the toy engine lays them out."""
    rows, places, drafted, lines, found = trace.rows, {}, {}, {}, {}
    for row in range(len(rows)):
        key, slot = rows.key(row), int(rows.ints["cache_slot"][row])
        kept = places.setdefault(key.rid, {})
        if key.phase in ("PREFILL", "DRAFT_PREFILL", "EXTEND"):
            kept[key.committed + key.slot] = slot
            found[row] = [kept[at] for at in range(key.committed + key.slot + 1)]
        elif key.phase == "DRAFT":  # every level grows from beam 0 of the one before
            own = [drafted[key.rid, step, 0] for step in range(key.step)]
            drafted[key.rid, key.step, key.slot] = slot
            found[row] = [*(kept[at] for at in range(key.committed)), *own, slot]
        elif key.phase == "VERIFY":
            above = lines.get((key.rid, key.committed, int(rows.ints["parent"][row])), [])
            lines[key.rid, key.committed, key.slot] = [*above, slot]
            found[row] = [*(kept[at] for at in range(key.committed)), *above, slot]
    return found


def made(given):
    """Both traces, the engine's with a record of what it read; and that record, to be broken."""
    engine, reference = build(given)
    return engine, reference, seen(engine, given.spec.eagle_topk)


def with_reads(trace, read):
    trace = copy_trace(trace)
    trace.rows.ints["slots_shared"][list(read)] = 0
    trace.rows.lists["slots_read"] = Ragged.of([read.get(row, ()) for row in range(len(trace.rows))], np.int64)
    return trace


def judged(given, trace, reference=None, check="reads"):
    return run_check(CHECKS[check], gather(given, trace, reference))


@pytest.mark.parametrize("given", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_sound_trace_has_no_finding_and_every_slot_is_counted(given):
    engine, reference, read = made(given)
    result = judged(given, with_reads(engine, read))
    assert (result.divergences, result.notes, result.unknown) == ([], [], [])
    assert result.compared == {"slots_read": sum(map(len, read.values()))}
    assert judge(given, with_reads(engine, read), reference)[1] == []


def test_what_was_not_recorded_is_said_and_not_judged():
    engine, _, read = made(CHAIN)
    result = judged(CHAIN, engine)
    assert (result.divergences, result.compared) == ([], {})
    assert result.notes == [f"{NOT_RECORDED}; a run anew records it, unless its layers have windows)"]
    graphs = set_on(CHAIN, cuda_graph=True)
    assert judged(graphs, engine).notes == [f"{NOT_RECORDED}; a run with --disable-cuda-graph records it)"]
    sparse = set_on(CHAIN, attention_backend="dsa")
    assert judged(sparse, engine).notes == [f"{NOT_RECORDED})"]  # its target runs on no other backend
    some = {row: slots for row, slots in read.items() if engine.rows.strings["phase"][row] != "VERIFY"}
    assert judged(CHAIN, with_reads(engine, some)).notes == [f"{NOT_RECORDED} in VERIFY)"]


def test_a_window_of_draft_steps_keeps_the_sink_and_the_newest_positions():
    asked = {"speculative_draft_window_size": 2, "speculative_draft_sink_size": 1}
    given = set_on(CHAIN, server_args=asked)
    engine, _, read = made(given)
    assert {one.hint for one in judged(given, with_reads(engine, read)).divergences} == {"more-than-it-sees"}
    drafts = {row: engine.rows.key(row) for row in read if engine.rows.strings["phase"][row] == "DRAFT"}
    assert max(key.committed for key in drafts.values()) > 3

    def narrowed(sink, window):
        kept = {
            row: [slot for at, slot in enumerate(read[row]) if at < sink or at >= key.committed - window]
            for row, key in drafts.items()
        }
        return {one.hint for one in judged(given, with_reads(engine, read | kept)).divergences}

    assert narrowed(1, 2) == set()
    assert narrowed(0, 2) == narrowed(1, 1) == {"left-out"}
    assert narrowed(1, 3) == {"more-than-it-sees"}


def late(slots, other):
    return [*slots[1:], other[0]]


BROKEN = {
    "one-slot-late": late,
    "one-slot-early": lambda slots, other: [other[0], *slots[:-1]],
    "left-out": lambda slots, other: slots[1:],
    "nothing-read": lambda slots, other: [],
    "prefix-of-another-request": lambda slots, other: [other[0], *slots[1:]],
    "prefix-elsewhere": lambda slots, other: [slots[1], *slots[1:]],
    "more-than-it-sees": lambda slots, other: [*slots, other[0]],
    "rows-of-round-elsewhere": lambda slots, other: [*slots[:-1], 4000],
}


@pytest.mark.parametrize("hint", BROKEN)
def test_every_wrong_plan_of_a_draft_step_has_its_own_name(hint):
    engine, _, read = made(CHAIN)
    row = find(engine, phase="DRAFT", rid="r0", step=1, nth=1)
    other = read[find(engine, phase="DRAFT", rid="r1", step=1, nth=1)]
    (found,) = judged(CHAIN, with_reads(engine, {**read, row: BROKEN[hint](read[row], other)})).divergences
    assert found.signature == f"CACHE_SLOT:reads:DRAFT:{hint}"
    assert found.key == engine.rows.key(row)


def test_the_plan_of_the_step_before_is_known_again():
    engine, _, read = made(CHAIN)
    row, before = (find(engine, phase="DRAFT", rid="r0", step=step, nth=1) for step in (1, 0))
    (found,) = judged(CHAIN, with_reads(engine, {**read, row: read[before]})).divergences
    assert (found.hint, found.key.step) == ("plan-of-step-before", 1)
    assert found.expected == f"{len(read[row])} slots, among them slot {read[row][-1]} (draft step 1, beam 0)"


def test_a_beam_that_reads_another_beams_row_and_a_node_that_sees_a_stranger():
    engine, _, read = made(TREE)
    row = find(engine, phase="DRAFT", rid="r0", step=0, slot=0)
    other = find(engine, phase="DRAFT", rid="r0", step=0, slot=1)
    (found,) = judged(TREE, with_reads(engine, {**read, row: read[other]})).divergences
    assert found.hint == "of-another-beam"
    assert found.observed.endswith(f"among them slot {read[other][-1]} (draft step 0, beam 1)")
    row = find(engine, phase="VERIFY", rid="r0", slot=2)
    stranger = int(engine.rows.ints["cache_slot"][find(engine, phase="VERIFY", rid="r0", slot=1)])
    (found,) = judged(TREE, with_reads(engine, {**read, row: [*read[row], stranger]})).divergences
    assert found.signature == "CACHE_SLOT:reads:VERIFY:more-than-it-sees"


def test_beams_read_the_rows_they_grew_from_by_the_reference():
    engine, reference, read = made(TREE)
    steps = (reference.rows.strings["phase"] == "DRAFT") & (reference.rows.ints["step"] > 0)
    reference.rows.ints["attends"][steps] = 0
    sound = judged(TREE, with_reads(engine, read), reference, "beams")
    assert (sound.divergences, sound.compared) == ([], {"slots_read": int(steps.sum())})
    row = find(engine, phase="DRAFT", rid="r0", step=1, slot=1)
    cells = [int(engine.rows.ints["cache_slot"][find(engine, phase="DRAFT", rid="r0", step=0, slot=i)]) for i in (0, 1)]
    wrong = [cells[1] if slot == cells[0] else slot for slot in read[row]]
    broken = with_reads(engine, {**read, row: wrong})
    assert judged(TREE, broken).divergences == []  # any beam may be the one, as far as slots alone say
    (found,) = judged(TREE, broken, reference, "beams").divergences
    assert found.signature == "CACHE_SLOT:beams:DRAFT:rows-of-own-number"
    assert judged(CHAIN, with_reads(*made(CHAIN)[::2]), reference, "beams").compared == {}


def test_values_follow_from_what_was_read_and_nothing_else_does():
    engine, reference, read = made(CHAIN)
    row = find(engine, phase="DRAFT", rid="r0", step=0, nth=1)
    broken = with_reads(engine, {**read, row: read[row][1:]})
    broken.tensors["hidden_out.DRAFT"][broken.rows.ints["hidden_out"][row]] += 1
    broken.tensors["hidden_out.VERIFY"][-1] += 1
    verdict, divergences = judge(CHAIN, broken, reference)
    roots = [finding.signature for finding in group(divergences) if finding.is_root]
    assert roots == ["CACHE_SLOT:reads:DRAFT:left-out", "NUMERIC:verify:VERIFY:hidden_out-off"]
    assert verdict.root_kinds == ("CACHE_SLOT", "NUMERIC")


def test_a_cached_row_that_changed_is_named_by_its_position():
    engine, _, _ = made(CHAIN)
    row = find(engine, phase="DRAFT", rid="r0", step=0, nth=1)
    key = engine.rows.key(row)
    slot = int(engine.rows.ints["cache_slot"][find(engine, phase="DRAFT_PREFILL", rid="r0", slot=3)])
    data = {"phase": "DRAFT", "step": 0, "round": int(engine.rows.ints["round"][row])}
    data |= {"rids": ["r0", "r1"], "attempts": [0, 0], "committed": [key.committed, 5], "slots": [[slot], []]}
    event = Event(name="changed", scheduler_step=4, data=data)
    (found,) = judged(CHAIN, replace(engine, events=(*engine.events, event)), check="cached").divergences
    assert found.signature == "CACHE_SLOT:cached:DRAFT:changed-since-written"
    assert (found.expected, found.key.rid) == (f"position 3 as it was written (slot {slot})", "r0")
