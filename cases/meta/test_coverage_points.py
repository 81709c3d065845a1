"""Every coverage point counts what its name says on a trace that has it, and nothing on one that has not."""

from dataclasses import replace

import numpy as np
import pytest

from cases.families import FAMILIES
from cases.meta import handmade
from cases.meta.batches import decode, end, event, prefill, record, taken_back, trace, turn
from harness.contract.admission import longest
from harness.contract.requests import CUTTING, GRAMMARS
from harness.contract.rows import RowBuilder
from harness.contract.script import Op
from harness.contract.settings import EngineConfig
from harness.contract.types import Outcome, Verdict
from harness.coverage import POINTS, Where, count, names, reach_of, rules


def stepped(*steps, rid="r0"):
    """Decode rounds of so many draft steps each."""
    return [replace(decode(at, (rid, 4 + at, 1)), num_steps=count) for at, count in enumerate(steps)]


def updated(step, *, success=True, name="update", **said):
    return event(name, step, success=success, **said)


def told(rid, pieces=(), **meta):
    said = [{"output_ids": list(range(count)), "meta": {}} for count in pieces]
    return event("answer", 9, rid=rid, meta=meta, pieces=said)


#: Every key that decides tokens, of the second request.
RULED = {
    "temperature": 1.0,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "frequency_penalty": 1.0,
    "presence_penalty": 1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": 1.0},
    "custom_logit_processor": "forbid",
    "custom_params": {"token_ids": [3]},
    **dict.fromkeys(GRAMMARS, "x"),
    "require_reasoning": True,
    "lora_path": "first",
}
#: Prompts of 4 and 6 tokens (r0, r1), k = 3, chunk 4, page 4, at most 5 new tokens.
GIVEN = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5, page_size=4)
GIVEN = GIVEN.model_copy(
    update={
        "requests": (
            GIVEN.requests[0],
            GIVEN.requests[1].model_copy(update={"priority": 20, **RULED}),
            GIVEN.requests[0].model_copy(update={"rid": "long", "input_ids": (1,) * 508}),
        )
    }
)
WHOLE = prefill(0, ("r0", 0, 4, True))
CHUNKS = (prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True)))
BACK = (WHOLE, record(3, "PREFILL", [("r0", 1, 0, 5, True)]))
OUTPUT, INPUT = {"output_token_logprobs": [[-1.0, 3, None]]}, {"input_token_logprobs": [[None, 3, None]]}
BOTH = decode(1, ("r0", 4, 1), ("r1", 6, 1))
PAUSE = event("pause", 2)


def failed(rid, error):
    return event("request_error", 9, rid=rid, error=error)


TOO_LONG = "The input (516 tokens) is longer than the model's context length (512 tokens)."
FULL = "503: The request queue is full."
OUT = "500: Out of memory even after retracting all other requests in the decode batch. Aborting the last request."

#: point -> (trace that has it, times). Names not listed are covered by accept lengths below.
HAVING = {
    "weights_updated": (trace(WHOLE, prefill(5, ("r1", 0, 4, True)), events=(updated(3, success=True),)), 1),
    "draft_updated": (trace(WHOLE, events=(updated(0, selector="draft"),)), 1),
    "updated_while_running": (trace(*BACK, events=(updated(2),)), 1),
    "memory_released": (trace(WHOLE, events=(updated(0, name="memory", what="resume"),)), 1),
    "adapters_in_one_batch": (trace(BOTH), 1),
    "steps_raised": (trace(*stepped(1, 3, 3, 0, 1)), 2),
    "steps_lowered": (trace(*stepped(3, 1, 1, 0)), 2),
    "steps_zero_and_back": (trace(*stepped(0, 0, 3, 0)), 1),
    "prompt_in_graph": (trace(replace(WHOLE, graphs={"PREFILL": 8})), 1),
    "non_final_chunk": (trace(prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True))), 1),
    "split_by_shared_budget": (trace(prefill(0, ("r0", 0, 2, False)), prefill(1, ("r0", 2, 2, True))), 1),
    "chunk_longer_by_one": (trace(prefill(0, ("r0", 0, 3, False)), prefill(1, ("r0", 3, 1, True))), 1),
    "chunk_exact_multiple": (trace(WHOLE), 1),
    "prefix_hit": (trace(prefill(0, ("r0", 2, 2, True))), 1),
    "mixed_batch": (trace(WHOLE, decode(1, ("r0", 4, 2)), prefill(2, ("r1", 0, 4, False), ("r0", 6, 1, True))), 1),
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
    "chunked_back_to_back": (
        trace(
            prefill(0, ("r1", 0, 4, False)),
            prefill(1, ("r1", 4, 2, True), ("r0", 0, 2, False)),
            prefill(2, ("r0", 2, 2, True)),
        ),
        1,
    ),
    "running_limit_reached": (trace(decode(1, ("r0", 4, 1)), events=(turn(1, running=["r0"] * 8, waiting=["r1"]),)), 1),
    "abort_before_prefill": (trace(WHOLE, ends=(end("r1", 1, 0, "abort"),)), 1),
    "preempted": (
        trace(WHOLE, prefill(2, ("r1", 0, 6, True)), events=(turn(1, running=["r0"]), turn(2, waiting=["r0"]))),
        1,
    ),
    "pause_resume": (trace(WHOLE, decode(1, ("r0", 4, 1)), decode(5, ("r0", 5, 1)), events=(event("pause", 2),)), 1),
    "too_long_refused": (trace(events=(failed("long", TOO_LONG),)), 1),
    "full_queue_refused": (trace(WHOLE, events=(failed("r1", FULL),)), 1),
    "outgrew_the_pool": (trace(WHOLE, decode(1, ("r0", 4, 1)), events=(failed("r0", OUT),)), 1),
    "abort_while_paused": (trace(WHOLE, events=(event("pause", 1), event("abort", 2, rid="r0"))), 1),
    "abort_after_retraction": (trace(WHOLE, events=(event("retract", 1), event("abort", 1, rid="r0"))), 1),
    "pause_in_chunk": (trace(prefill(0, ("r1", 0, 4, False)), prefill(3, ("r1", 4, 2, True)), events=(PAUSE,)), 1),
    "abort_of_some": (trace(BOTH, decode(2, ("r1", 7, 1)), ends=(end("r0", 9, 2, "abort"),)), 1),
    "partial_retraction": (trace(BOTH, decode(2, ("r1", 7, 1)), events=(taken_back(2, "r0"),)), 1),
    "batch_reordered": (trace(BOTH, decode(2, ("r1", 7, 1), ("r0", 5, 1))), 1),
    "retract_border_in_prompt": (
        trace(prefill(0, ("r1", 0, 6, True)), record(3, "PREFILL", [("r1", 1, 4, 3, True)])),
        1,
    ),
    "retract_border_in_output": (
        trace(
            prefill(0, ("r0", 0, 4, True)),
            record(3, "PREFILL", [("r0", 1, 0, 4, False)]),
            record(4, "PREFILL", [("r0", 1, 5, 1, True)]),
        ),
        1,
    ),
    "accepted_run_logprobs": (trace(decode(1, ("r0", 4, 2)), events=(told("r0", **OUTPUT),)), 1),
    "sampled_logprobs": (trace(decode(1, ("r1", 6, 1)), events=(told("r1", **OUTPUT),)), 1),
    "prompt_logprobs_in_chunks": (trace(*CHUNKS, events=(told("r1", **INPUT),)), 1),
    "logprobs_over_retraction": (trace(*BACK, events=(told("r0", **OUTPUT),)), 1),
    "streamed_in_pieces": (trace(WHOLE, events=(told("r0", (1, 3, 5)),)), 1),
    "accepted_run_states": (
        replace(trace(decode(1, ("r0", 4, 2))), tensors={"returned.r0": np.zeros((5, 2), dtype=np.float32)}),
        1,
    ),
}

DRAWN = event("uniforms", 1, round=1)
HAVING |= {f"verify_by_{key}": (trace(decode(1, ("r0", 4, 1), ("r1", 6, 1)), events=(DRAWN,)), 1) for key in rules.KEYS}
HAVING |= {
    "first_token_by_rule": (trace(prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True))), 1),
    "sampled_beside_greedy": (trace(decode(1, ("r0", 4, 1), ("r1", 6, 1))), 1),
    "ruled_after_retraction": (trace(record(4, "DECODE", [("r0", 1, 4, 1, False), ("r1", 1, 6, 1, False)])), 1),
}

BOTH = decode(1, ("r0", 4, 1), ("r1", 6, 1))


def masked(*nodes, bits, at=6):
    """A verify of r1 with these (parent, token), and what is allowed after each, one bit a token."""
    rows = RowBuilder()
    for slot, (parent, token) in enumerate(nodes):
        rows.add(rid="r1", phase="VERIFY", slot=slot, committed=at, round=1, parent=parent, input_id=token)
    given = {"rids": ["r1"], "attempts": [0], "committed": [at], "phase": "VERIFY"}
    masks = event("masks", 1, **given, bits=[[f"{one:02x}" for one in bits]])
    return replace(trace(decode(1, ("r1", at, 1)), events=(masks,)), rows=rows.build())


def ended_by(matched, length, count=3):
    """r0 ends with so many tokens, after a verify that committed two behind its first."""
    said = event("text", 1, rid="r0", matched=matched)
    given = trace(WHOLE, decode(1, ("r0", 4, length)), ends=(end("r0", 1, count, "stop"),), events=(said,))
    return replace(given, header={"eos_token_ids": [2]})


HAVING |= {f"verify_by_{key}": (trace(decode(1, ("r1", 6, 1))), 1) for key in GRAMMARS}
HAVING |= {
    "first_token_by_grammar": (trace(prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True))), 1),
    "draft_off_grammar": (masked((-1, 3), (0, 2), bits=(0b1011, 0b1111)), 1),
    "draft_kept_by_grammar": (trace(decode(1, ("r0", 4, 1), ("r1", 6, 2))), 1),
    "constrained_beside_free": (trace(BOTH), 1),
    "constrained_after_retraction": (trace(record(4, "DECODE", [("r0", 1, 4, 1, False), ("r1", 1, 6, 1, False)])), 1),
    "grammar_ends_text": (
        replace(trace(decode(1, ("r1", 6, 2)), ends=(end("r1", 1, 3, "stop"),)), header={"eos_token_ids": [2]}),
        1,
    ),
    "grammar_after_thoughts": (masked((-1, 3), bits=(0b1011,)), 1),
    "stop_string_inside_run": (ended_by("x", 4), 1),
    "top_logprobs": (trace(decode(1, ("r0", 4, 1)), events=(told("r0", output_top_logprobs=[[[-1.0, 3, None]]]),)), 1),
    "chosen_logprobs": (
        trace(decode(1, ("r0", 4, 1)), events=(told("r0", output_token_ids_logprobs=[[[-1.0, 3, None]]]),)),
        1,
    ),
}

#: point -> the nearest trace that has it not.
LACKING = {
    "weights_updated": trace(WHOLE, prefill(5, ("r1", 0, 4, True)), events=(updated(3, success=False),)),
    "draft_updated": trace(WHOLE, events=(updated(0, selector="target"),)),
    "updated_while_running": trace(*BACK, events=(updated(0),)),
    "memory_released": trace(WHOLE, events=(updated(0, name="memory", what="release"),)),
    "adapters_in_one_batch": trace(decode(1, ("r0", 4, 1)), decode(2, ("r1", 6, 1))),
    "mixed_batch": trace(WHOLE, decode(1, ("r0", 4, 2)), record(2, "PREFILL", [("r0", 1, 0, 6, True)])),
    **{f"verify_by_{key}": trace(decode(1, ("r1", 6, 1))) for key in CUTTING},
    **{f"verify_by_{key}": trace(decode(1, ("r0", 4, 1))) for key in rules.KEYS if key not in CUTTING},
    "first_token_by_rule": trace(WHOLE, prefill(1, ("r1", 0, 4, False))),
    "sampled_beside_greedy": trace(decode(1, ("r0", 4, 1)), decode(2, ("r1", 6, 1))),
    "ruled_after_retraction": trace(decode(1, ("r1", 6, 1)), record(4, "DECODE", [("r0", 1, 4, 1, False)])),
    "steps_raised": trace(*stepped(3, 1, 1)),
    "steps_lowered": trace(*stepped(0, 1, 3)),
    "steps_zero_and_back": trace(*stepped(3, 1, 0)),
    **{f"verify_by_{key}": trace(decode(1, ("r0", 4, 1))) for key in GRAMMARS},
    "first_token_by_grammar": trace(WHOLE, prefill(1, ("r1", 0, 4, False))),
    "draft_off_grammar": masked((-1, 3), (0, 2), (1, 0), bits=(0b1111, 0b0001, 0)),
    "draft_kept_by_grammar": trace(decode(1, ("r0", 4, 2), ("r1", 6, 1))),
    "constrained_beside_free": trace(decode(1, ("r0", 4, 1)), decode(2, ("r1", 6, 1))),
    "constrained_after_retraction": trace(BOTH, record(4, "DECODE", [("r0", 1, 4, 1, False)])),
    "grammar_ends_text": trace(decode(1, ("r1", 6, 2)), ends=(end("r1", 1, 3, "length"),)),
    "grammar_after_thoughts": masked((-1, 3), bits=(0xFF,)),
    "stop_string_inside_run": ended_by("x", 2),
    "prompt_in_graph": trace(replace(WHOLE, graphs={"DRAFT_PREFILL": 8})),
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
    "stop_inside_accepted_run": trace(decode(1, ("r0", 4, 2)), ends=(end("r0", 1, 3, "stop"),)),
    "page_border_in_draft": trace(decode(1, ("r1", 8, 1))),
    "abort_in_chunk": trace(WHOLE, ends=(end("r0", 1, 1, "abort"),)),
    "abort_in_decode": trace(prefill(0, ("r1", 0, 4, False)), ends=(end("r1", 1, 0, "abort"),)),
    "abort_last_live": trace(WHOLE, decode(1, ("r1", 6, 1)), decode(5, ("r1", 7, 1)), ends=(end("r0", 3, 1, "abort"),)),
    "pool_exhausted": trace(WHOLE),
    "chunked_back_to_back": trace(prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True), ("r0", 0, 2, True))),
    "running_limit_reached": trace(
        decode(1, ("r0", 4, 1)),
        events=(turn(1, running=["r0"], waiting=["r1"]), turn(2, running=["r0"] * 8, waiting=[])),
    ),
    "abort_before_prefill": trace(WHOLE, ends=(end("r0", 1, 0, "abort"),)),
    "preempted": trace(
        WHOLE,
        prefill(2, ("r1", 0, 6, True)),
        events=(turn(1, running=["r0"]), event("retract", 2), turn(2, waiting=["r0"])),
    ),
    "pause_resume": trace(WHOLE, decode(1, ("r0", 4, 1)), events=(event("pause", 5),)),
    "pause_in_chunk": trace(
        prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True)), decode(3, ("r1", 6, 1)), events=(PAUSE,)
    ),
    "abort_of_some": trace(BOTH, decode(2, ("r1", 7, 1)), ends=(end("r0", 9, 2),)),
    "partial_retraction": trace(BOTH, decode(2, ("r1", 7, 1)), events=(taken_back(2, "r0", "r1"),)),
    "batch_reordered": trace(BOTH, decode(2, ("r1", 7, 1)), decode(3, ("r1", 8, 1), ("r0", 5, 1))),
    "retract_border_in_prompt": trace(
        prefill(0, ("r0", 0, 4, True)),
        record(3, "PREFILL", [("r0", 1, 0, 4, False)]),
        record(4, "PREFILL", [("r0", 1, 4, 2, True)]),
    ),
    "retract_border_in_output": trace(
        prefill(0, ("r0", 0, 4, True)),
        record(3, "PREFILL", [("r0", 1, 0, 4, False)]),
        record(4, "PREFILL", [("r0", 1, 4, 2, True)]),
    ),
    "context_limit": trace(WHOLE, ends=(end("r0", 1, 5),)),
    "too_long_refused": trace(events=(failed("r1", FULL),)),
    "full_queue_refused": trace(events=(failed("long", TOO_LONG),)),
    "outgrew_the_pool": trace(WHOLE, events=(failed("r0", FULL),)),
    "abort_while_paused": trace(WHOLE, events=(event("pause", 1), event("resume", 2), event("abort", 3, rid="r0"))),
    "abort_after_retraction": trace(
        WHOLE, events=(event("retract", 1), turn(1, waiting=[]), event("abort", 2, rid="r0"))
    ),
    "accepted_run_logprobs": trace(decode(1, ("r0", 4, 1)), events=(told("r0", **OUTPUT),)),
    "sampled_logprobs": trace(decode(1, ("r0", 4, 1)), events=(told("r0", **OUTPUT),)),
    **dict.fromkeys(
        ("top_logprobs", "chosen_logprobs"), trace(decode(1, ("r0", 4, 1)), events=(told("r0", **OUTPUT),))
    ),
    "prompt_logprobs_in_chunks": trace(*CHUNKS, events=(told("r1", **OUTPUT),)),
    "logprobs_over_retraction": trace(WHOLE, events=(told("r0", **OUTPUT),)),
    "streamed_in_pieces": trace(WHOLE, events=(told("r0", (1, 2, 3)),)),
    "accepted_run_states": trace(decode(1, ("r0", 4, 2))),
}


@pytest.mark.parametrize("name", HAVING)
def test_point_is_counted_where_it_happens_and_not_where_it_does_not(name):
    made, times = HAVING[name]
    assert POINTS[name].count(GIVEN, made) == times
    assert POINTS[name].count(GIVEN, LACKING.get(name, trace())) == 0


def test_every_point_has_a_trace_that_shows_it():
    lengths = {f"accept_len_{n}" for n in range(1, 18)}
    here = {*names(Where.ANYWHERE, Where.ELSEWHERE, Where.UPDATED, Where.MIXED, Where.ADAPTIVE, Where.ADAPTERS)}
    assert here - set(HAVING) - lengths == SHOWN_BELOW


def of_key(update, made, *, sampled=False):
    """How often a point happens on a trace where r0 asks for that, and where it does not."""
    asking = GIVEN.requests[0].model_copy(update=update)
    given = GIVEN.model_copy(update={"requests": (asking, *GIVEN.requests[1:])})
    return [(one.sampled if sampled else one, made) for one in (given, GIVEN)]


@pytest.mark.parametrize(
    ("name", "update", "made"),
    [
        ("ended_by_stop_regex", {"stop": ("y",), "stop_regex": ("x",)}, ended_by("x", 2)),
        ("streamed_by_interval", {"stream": True, "stream_interval": 3}, trace(decode(1, ("r0", 4, 2)))),
        ("unlimited_ended", {"unlimited": True}, trace(WHOLE, ends=(end("r0", 1, 3, "stop"),))),
        ("verify_by_min_new_tokens", {"min_new_tokens": 3}, trace(decode(1, ("r0", 4, 1)), decode(2, ("r0", 9, 1)))),
        ("samples_of_one_prompt", {"n": 2}, trace(decode(1, ("r0.1", 4, 1), ("r0.2", 4, 1)))),
    ],
)
def test_point_of_a_key_happens_where_a_request_asks_for_it(name, update, made):
    asked, plain = of_key(update, made, sampled=name == "samples_of_one_prompt")
    assert POINTS[name].count(*asked) == 1
    assert POINTS[name].count(*plain) == 0


# Shared prefixes, on page 4: what two prompts share is what counts

SHOWN_BELOW = {
    "prefix_ends_at_page_border",
    "prefix_ends_before_page_border",
    "prefix_ends_after_page_border",
    "cache_flushed",
    "ended_by_stop_regex",
    "streamed_by_interval",
    "unlimited_ended",
    "verify_by_min_new_tokens",
    "samples_of_one_prompt",
}


def branching(shared, *, own=3):
    """Two prompts of 12 tokens that share `shared` of them."""
    first = tuple(range(12))
    prompts = (first, first[:shared] + (99,) * own)
    given = handmade.scenario(prompts=(12, shared + own), page_size=4)
    requests = tuple(r.model_copy(update={"input_ids": p}) for r, p in zip(given.requests, prompts, strict=True))
    return given.model_copy(update={"requests": requests})


HIT = trace(prefill(0, ("r0", 0, 12, True)), prefill(5, ("r1", 4, 7, True)))


@pytest.mark.parametrize(
    ("shared", "name"),
    [
        (8, "prefix_ends_at_page_border"),
        (7, "prefix_ends_before_page_border"),
        (9, "prefix_ends_after_page_border"),
        (10, None),
    ],
)
def test_prefix_hits_are_distinguished_by_where_the_shared_tokens_end(shared, name):
    seen = count(branching(shared), HIT)[0]
    assert {found for found in SHOWN_BELOW if seen[found]} == ({name} if name else set())


def test_prompt_that_only_goes_on_or_was_not_cached_is_no_such_hit():
    missed = trace(prefill(0, ("r0", 0, 12, True)), prefill(5, ("r1", 0, 11, True)))
    assert not count(branching(12), HIT)[0]["prefix_ends_at_page_border"]
    assert not count(branching(8), missed)[0]["prefix_ends_at_page_border"]


def test_flush_counts_where_the_same_prompt_starts_from_nothing():
    given = branching(12, own=0)
    rounds = (prefill(0, ("r0", 0, 12, True)), prefill(5, ("r1", 0, 12, True)))
    flush = event("flush", 4, flushed=True)
    count = POINTS["cache_flushed"].count
    assert count(given, trace(*rounds, events=(flush,))) == 1
    assert count(given, trace(*rounds)) == 0
    assert count(given, trace(*rounds, events=(replace(flush, data={"flushed": False}),))) == 0


# The table


def test_positions_are_counted_inside_the_places_where_it_happened():
    given = handmade.scenario()
    engine, _ = handmade.build(given)
    _, inside = count(given, engine)
    rows, phases = engine.rows, engine.rows.strings["phase"]
    chunk = next(record for record in engine.rounds if not all(record.final) and record.mode == "PREFILL")
    rid = chunk.rids[chunk.final.index(False)]
    mine = (rows.strings["rid"] == rid) & (rows.ints["round"] == chunk.index) & (rows.ints["position"] >= 0)
    assert 0 < mine.sum() <= inside["non_final_chunk"] < len(rows)
    assert inside["idle_rank"] == 0
    decoding = sum(inside[f"accept_len_{n}"] for n in range(1, 5))
    assert decoding == ((phases != "ACCEPT") & (phases != "PREFILL") & (phases != "DRAFT_PREFILL")).sum()


def test_table_adds_scenarios_up_and_keeps_what_was_asked_for_apart():
    judged = []
    for wants in (("non_final_chunk", "idle_rank"), ()):
        given = handmade.scenario(wants=wants)
        times, inside = count(given, handmade.build(given)[0])
        judged.append((given, Verdict(outcome=Outcome.PASS, coverage=times, inside=inside)))
    lines = {line.name: line for line in reach_of(judged)}
    chunk, idle = lines["non_final_chunk"], lines["idle_rank"]
    assert (chunk.generated, chunk.reached, chunk.seen) == (1, 1, 2)
    assert (idle.generated, idle.reached, idle.seen, idle.positions) == (1, 0, 0, 0)
    assert chunk.times == 2 * times["non_final_chunk"]
    assert chunk.positions == 2 * inside["non_final_chunk"]


SPECS = {boot.spec.model_dump_json(): boot.spec for family in FAMILIES.values() for boot in family.boots}


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_the_longest_request_that_is_admitted_reaches_the_context_limit(spec):
    """The template's, whatever drafts: with steps that adapt it once wanted a point that the request never reached."""
    new, room = 8, longest(spec, EngineConfig())
    for short, times in ((0, 1), (1, 0)):
        prompt = room - new - short
        given = handmade.scenario(prompts=(prompt,), chunk=None, max_new_tokens=new).model_copy(update={"spec": spec})
        whole = trace(prefill(0, ("r0", 0, prompt, True)), ends=(end("r0", 5, new),))
        assert POINTS["context_limit"].count(given, whole) == times


def test_context_limit_counts_a_window_filled_as_far_as_drafts_allow():
    given = handmade.scenario(prompts=(500,), chunk=None, max_new_tokens=8)
    whole = trace(prefill(0, ("r0", 0, 500, True)), ends=(end("r0", 5, 8),))
    assert POINTS["context_limit"].count(given, whole) == 1
    roomier = replace(whole, header={"context_length": 600})
    assert POINTS["context_limit"].count(given, roomier) == 0


def test_restart_that_was_asked_for_is_no_exhausted_pool():
    script = (GIVEN.script[0], Op(kind="retract"), GIVEN.script[-1])
    asked = GIVEN.model_copy(update={"script": script})
    restart = record(3, "PREFILL", [("r0", 1, 0, 5, True)])
    pool = taken_back(1, "r0", reason="pool")
    count = POINTS["pool_exhausted"].count
    assert count(asked, trace(WHOLE, restart)) == 0
    assert count(asked, trace(WHOLE, restart, events=(pool,))) == 1
    assert count(asked, trace(WHOLE, restart, events=(taken_back(1, "r0"),))) == 0
    ranked = handmade.set_on(GIVEN, priority_scheduling=True)
    assert count(ranked, trace(WHOLE, restart)) == 0, "more urgent requests take the place of others"


def test_abort_is_dated_by_when_it_was_asked_for():
    """Ends are all noted when the engine has drained, so their scheduler step says nothing."""
    rounds = (WHOLE, decode(1, ("r0", 4, 1), ("r1", 6, 1)), decode(5, ("r1", 7, 1)))
    ends = (end("r0", 9, 1, "abort"), end("r1", 9, 5))
    count = POINTS["abort_last_live"].count
    for scheduler_step, times in ((3, 0), (6, 1)):
        asked = event("abort", scheduler_step, rid="r0")
        assert count(GIVEN, trace(*rounds, ends=ends, events=(asked,))) == times


def test_accept_lengths_end_at_k_plus_one():
    assert "accept_len_4" in count(GIVEN, trace())[0]
    assert "accept_len_5" not in count(GIVEN, trace())[0]


def test_other_tensor_parallel_ranks_are_not_counted_again():
    twin = replace(HAVING["non_final_chunk"][0].rounds[0], tp_rank=1)
    both = trace(*HAVING["non_final_chunk"][0].rounds, twin)
    assert POINTS["non_final_chunk"].count(GIVEN, both) == 1
