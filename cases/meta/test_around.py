"""Which part of SGLang a finding names, and what it says of the row where it begins. No engine, no source of one."""

from __future__ import annotations

import ast
from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade, results
from cases.meta.batches import lone_part
from harness.contract.rows import Ragged
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase
from harness.driving.around import Around, around
from reports import blame

MODEL = "sglang.srt.models.llama_eagle3:LlamaForCausalLMEagle3"
ALL = ("input token", "position", "state", "KV slots read")


def at(phase, *, kind=Kind.NUMERIC, hint="hidden_out-off", check="chain", attempt=0, rid="r0", committed=7, **o):
    key = Key(dp_rank=0, rid=rid, attempt=attempt, committed=committed, phase=phase, step=0, slot=0)
    return Divergence(kind=kind, key=replace(key, **o), round=0, expected=0, observed=1, check=check, hint=hint)


def blamed(found, known=blame.UNKNOWN, release="0.5.23", **options):
    component, made, _ = blame.where(found, results.named("one", **options), release, known)
    return component, made


@pytest.mark.parametrize(
    ("phase", "known", "component", "made"),
    [
        (Phase.DRAFT_PREFILL, {"models": {"draft": MODEL}}, "draft model's forward", "srt/models/llama_eagle3.py"),
        (Phase.DRAFT_PREFILL, {}, "draft model's forward", "srt/model_executor/model_runner.py ModelRunner.forward"),
        (Phase.DRAFT_PREFILL, {"prefix": 29}, "draft's KV behind a cached prefix", "RadixKey.maybe_to_bigram_view"),
        (Phase.PREFILL, {"prefix": 29, "chunk": (29, 40, True)}, "target's KV behind a cached prefix", "match_prefix"),
        (Phase.EXTEND, {"handed_over": True, "attempt": 1}, "does not back up", "Req.offload_kv_cache"),
        (Phase.DRAFT, {"handed_over": True}, "as it was handed over", "_init_kv_manager"),
        (Phase.DRAFT, {"right": ALL, "models": {"draft": MODEL}}, "draft model's forward", "llama_eagle3.py"),
        (Phase.DRAFT, {"right": ALL[:3]}, "or the plan of its attention", "TritonMultiStepDraftBackend"),
        (Phase.VERIFY, {"right": ALL[:3]}, "or the plan of its attention", "TritonAttnBackend"),
    ],
)
def test_a_wrong_state_is_blamed_on_what_made_it_where_its_inputs_are_right(phase, known, component, made):
    said, maker = blamed(at(phase), Around(**known))
    assert component in said
    assert made in maker


@pytest.mark.parametrize(
    ("check", "phase", "component", "made"),
    [
        (
            "returned_states",
            Phase.PREFILL,
            "what is returned",
            "batch_result_processor.py process_batch_result_prefill",
        ),
        ("logprobs", Phase.VERIFY, "what is returned", "batch_result_processor.py process_batch_result_decode"),
        ("retraction", Phase.IDLE, "retraction", "ScheduleBatch.retract_decode"),
        ("finish", Phase.ACCEPT, "end of a request", "Req.update_finish_state"),
    ],
)
def test_what_the_user_gets_is_blamed_on_who_returns_it(check, phase, component, made):
    said, maker = blamed(at(phase, kind=Kind.SHAPE, check=check, hint="row-again"))
    assert said == component
    assert maker.endswith(made)


def test_a_wrong_choice_by_right_logits_is_blamed_on_who_chooses():
    found = at(Phase.DRAFT_PREFILL, kind=Kind.TOKEN, hint="choice-in-top")
    assert blamed(found, Around(state=True, logits=True)) == (
        "choice by the draft's logits",
        "srt/speculative/eagle_worker_v2.py EagleDraftWorker._draft_extend_for_prefill",
    )


@pytest.mark.parametrize(
    ("known", "component", "made"),
    [
        ({"elsewhere": True, "state": True}, "map of the draft's vocabulary", "init_lm_head"),
        ({"state": True, "weights": "draft of x"}, "draft's output head", "init_lm_head"),
        ({"state": True}, "draft's output head", "LogitsProcessor.forward"),
        ({"models": {"draft": MODEL}}, "draft model's forward", "llama_eagle3"),
    ],
)
def test_a_wrong_choice_is_blamed_on_the_head_or_the_map_where_the_state_is_right(known, component, made):
    for kind, hint in ((Kind.TOKEN, "choice-outside-top"), (Kind.NUMERIC, "logits-off")):
        said, maker = blamed(at(Phase.DRAFT_PREFILL, kind=kind, hint=hint), Around(**known))
        assert component in said
        assert made in maker


def test_what_attention_reads_is_blamed_on_the_map_or_on_its_plan():
    found = at(Phase.DRAFT, kind=Kind.CACHE_SLOT, check="reads", hint="prefix-elsewhere")
    assert blamed(found) == ("request's row of the KV map (req_to_token)",
                             "srt/mem_cache/allocation.py assign_req_to_token_pool")  # fmt: skip
    found = at(Phase.DRAFT, kind=Kind.CACHE_SLOT, check="reads", hint="one-slot-late")
    assert blamed(found)[0] == "attention's plan"
    assert "init_forward_metadata" in blamed(found)[1]
    found = at(Phase.DRAFT, kind=Kind.CACHE_SLOT, check="beams", hint="rows-of-own-number")
    assert blamed(found)[1] == "kernels/ops/speculative/cache_locs.py generate_draft_decode_kv_indices"


def test_a_state_of_a_hand_over_is_blamed_on_the_sender_or_on_what_a_retraction_kept():
    found = at(Phase.PREBUILT, check="handoff", hint="hidden_out-previous-row")
    assert "MetadataBuffers.set_buf" in blamed(found)[1]
    assert "_commit_transfer_to_req" in blamed(found, Around(attempt=1))[1]


def broken(break_it, **options):
    scenario = results.named("one", **options)
    return (scenario, *results.traces(scenario, break_it))


def test_of_a_row_that_is_off_its_agreeing_inputs_are_named_and_who_shares_its_batch():
    scenario, engine, reference = broken(results.sound)
    row = handmade.find(engine, phase=Phase.DRAFT)
    found = replace(
        at(Phase.DRAFT), key=engine.rows.key(row), round=int(engine.rows.ints["round"][row]), hint="hidden_out-off"
    )
    known = around(found, scenario, engine, reference, [found])
    assert known.right[:2] == ALL[:2]
    assert not known.state
    assert set(known.beside) == {"r0", "r1", "r2"} - {found.key.rid}
    assert "in one batch with" in known.facts[-1]
    beside = replace(found, kind=Kind.POSITION, hint="one-ahead")
    assert "position" not in around(found, scenario, engine, reference, [found, beside]).right
    engine.rows.ints["input_id"][row] += 1
    assert "input token" not in around(found, scenario, engine, reference, [found]).right


def test_the_right_logits_at_other_tokens_are_seen_and_only_these():
    scenario, engine, reference = broken(results.sound)
    row = handmade.find(engine, phase=Phase.DRAFT)
    found = replace(at(Phase.DRAFT), key=engine.rows.key(row), round=int(engine.rows.ints["round"][row]))
    assert not around(found, scenario, engine, reference, [found]).elsewhere
    choice = replace(found, kind=Kind.TOKEN, hint="choice-in-top")
    beside = replace(found, hint="logits-off")
    assert around(choice, scenario, engine, reference, [choice]).logits
    assert not around(choice, scenario, engine, reference, [choice, beside]).logits
    ids, logits = engine.rows.lists["top_ids"], engine.rows.lists["top_logits"]
    begin, end = ids.offsets[row : row + 2]
    assert end > begin
    moved = np.array(ids.values)
    moved[begin:end] += 1
    engine.rows.lists["top_ids"] = Ragged(moved, ids.offsets)
    assert around(found, scenario, engine, reference, [found]).elsewhere
    other = np.array(logits.values)
    other[begin] += 1
    engine.rows.lists["top_logits"] = Ragged(other, logits.offsets)
    assert not around(found, scenario, engine, reference, [found]).elsewhere


def test_where_its_kv_came_from_and_what_happened_before_is_said():
    scenario, engine, _ = broken(results.sound)
    first = scenario.requests[0]
    second = scenario.requests[1].model_copy(update={"input_ids": first.input_ids})
    scenario = scenario.model_copy(update={"requests": (first, second)})
    before = lone_part("PREFILL", start=0, length=7).record
    hit = replace(before, index=1, scheduler_step=5, rids=("r1",), starts=(4,), lens=(3,))
    records = (replace(before, rids=("r0",)), hit)
    update = Event(name="update", scheduler_step=3, data={"success": True, "what": "next", "selector": "draft"})
    engine = replace(engine, rounds=records, events=(update,), ends=())
    found = replace(at(Phase.DRAFT_PREFILL, rid="r1", committed=4), round=1)
    known = around(found, scenario, engine, None, [found])
    assert (known.prefix, known.prefix_of, known.chunk) == (4, "r0", (4, 7, True))
    assert known.weights == "draft of next, scheduler step 3"
    several = scenario.model_copy(update={"requests": (first, second.model_copy(update={"n": 2})), "script": ()})
    one = replace(engine, rounds=(records[0], replace(hit, rids=("r1.1",))))
    found_there = replace(at(Phase.DRAFT_PREFILL, rid="r1.1", committed=4), round=1)
    assert around(found_there, several, one, None, [found_there]).prefix_of == "r0"
    engine = replace(engine, rounds=(replace(records[0], attempts=(0,)), replace(hit, attempts=(1,), final=(False,))))
    known = around(replace(found, key=replace(found.key, attempt=1)), scenario, engine, None, [found])
    assert known.attempt == 1
    assert known.chunk == (4, 7, False)
    assert "it was taken back 1 time and has resumed" in known.facts


def test_lines_where_a_function_writes_a_name_are_those_of_assignments_and_calls_in_place():
    source = "def f(b):\n    b.positions.add_(1)\n    b.positions = 2\n    x, b.ids[0] = 1, 2\n    b.ids.add(1)\n"
    assert blame._writes(ast.parse(source).body[0]) == {"positions": [2, 3], "x": [4], "ids": [4]}
