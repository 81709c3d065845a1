"""Checks of what comes back: sound answers have nothing to say, and each thing that can be wrong is named."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cases.meta import handmade
from harness.checks import answered
from harness.checks.asked import not_judged
from harness.checks.evidence import gather
from harness.checks.findings import settle
from harness.checks.registry import CHECKS, run_check
from harness.contract.answers import flat_states
from harness.contract.batches import Part, parts_of
from harness.contract.trace import EOS, Event

ASKED = {
    "return_logprob": True,
    "top_logprobs_num": 2,
    "token_ids_logprob": (4, 9),
    "logprob_start_len": 2,
    "return_hidden_states": True,
    "stream": True,
}
GIVEN = handmade.scenario(prompts=(7, 5), chunk=4, max_new_tokens=9, enable_return_hidden_states=True)
GIVEN = GIVEN.model_copy(update={"requests": (GIVEN.requests[0].model_copy(update=ASKED), GIVEN.requests[1])})
ENGINE, REFERENCE = handmade.build(GIVEN)
END = next(end for end in ENGINE.ends if end.rid == "r0")
PROMPT = GIVEN.requests[0].input_ids
TEXT = (*PROMPT, *END.output_ids)
FIRST, STATES = 3, len(TEXT) - 1


def value(at, rank=0):
    """The toy's log-probability at a place of the text; of its token, or of the next ranks."""
    return -0.5 - 0.25 * rank - 0.01 * at


def entries(places, *, top=False, ids=False):
    if top:
        return [[[value(at, rank), 40 + rank, None] for rank in range(2)] for at in places]
    if ids:
        return [[[value(at, 5), token, None] for token in (4, 9)] for at in places]
    return [[value(at), TEXT[at], None] for at in places]


def told():
    """Event data of a sound answer to r0."""
    output, prompt = range(len(PROMPT), len(TEXT)), range(FIRST, len(PROMPT))
    accepted = [part.length - 1 for (rid, _), parts in parts_of(ENGINE).items() if rid == "r0" for part in parts]
    accepted = accepted[-sum(part.record.mode == "DECODE" for part in parts_of(ENGINE)["r0", 0]) :]
    meta = {
        "finish_reason": {"type": "length", "length": 9},
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "cached_tokens": 0,
        "num_retractions": 0,
        "spec_verify_ct": len(accepted),
        "spec_num_correct_drafts": sum(accepted),
        "spec_accept_length": 9 / len(accepted),
        "spec_accept_rate": sum(accepted) / len(accepted) / 3,
        "spec_accept_histogram": [accepted.count(count) for count in range(max(accepted) + 1)],
        "output_token_logprobs": entries(output),
        "output_top_logprobs": entries(output, top=True),
        "output_token_ids_logprobs": entries(output, ids=True),
        "input_token_logprobs": [[None, PROMPT[2], None], *entries(prompt)],
        "input_top_logprobs": [None, *entries(prompt, top=True)],
        "input_token_ids_logprobs": [None, *entries(prompt, ids=True)],
    }
    growing = [name for name in meta if name.startswith("output_")]
    pieces = [
        {
            "output_ids": list(END.output_ids[:count]),
            "meta": {**{name: meta[name][:count] for name in growing}, "completion_tokens": count},
        }
        for count in (1, 4, 6, 9)
    ]
    return {"rid": "r0", "meta": meta, "pieces": pieces}


def truth(step=1.0):
    """step: how far the reference's likeliest tokens lie apart behind those that are asked for."""
    places = range(FIRST, len(TEXT))
    data = {
        "rid": "r0",
        "first": FIRST,
        "own": [value(at) for at in places],
        "scales": [8.0 for _ in places],
        "top_ids": [[40 + rank for rank in range(8)] for _ in places],
        "top_values": [[value(at, min(rank, 1) + step * max(rank - 1, 0)) for rank in range(8)] for at in places],
        "ids": [[value(at, 5)] * 2 for at in places],
    }
    return Event(name="logprobs", scheduler_step=0, data=data)


def returned():
    """The toy target's states of the text but for its last token."""
    return np.stack([handmade.hidden(0, at, TEXT[at]) for at in range(STATES)])


def faults(check, data=None, states=None, step=1.0):
    """Signatures of what the check finds in an answer to r0."""
    event = Event(name="answer", scheduler_step=9, data=data or told())
    tensors = ENGINE.tensors | {"returned.r0": returned() if states is None else states}
    engine = replace(ENGINE, events=(*ENGINE.events, event), tensors=tensors)
    reference = replace(REFERENCE, events=(*REFERENCE.events, truth(step)))
    result = run_check(CHECKS[check], gather(GIVEN, engine, reference))
    assert not result.unknown
    return [found.signature for found in result.divergences], result.compared


def changed(path, new):
    """The sound answer with one thing in it another."""
    data = told()
    at = data
    for step in path[:-1]:
        at = at[step]
    if new is None:
        del at[path[-1]]
    else:
        at[path[-1]] = new(at[path[-1]])
    return data


def test_a_sound_answer_has_nothing_to_say_and_is_looked_at():
    assert faults("counts")[0] == []
    assert faults("streamed")[0] == []
    found, compared = faults("logprobs")
    assert (found, compared["logprobs"]) == ([], 3 * (9 + 5))
    found, compared = faults("returned_states")
    assert (found, compared["returned_states"]) == ([], STATES)


def part(mode, start, length, attempt):
    record = SimpleNamespace(mode=mode)
    return Part(record=record, rid="r0", attempt=attempt, start=start, length=length, final=True)


@pytest.mark.parametrize(
    ("again", "resumed"),
    [
        pytest.param(("PREFILL", 0, 11), 11, id="it computes its prompt and its output anew"),
        pytest.param(("PREBUILT", 10, 0), 10, id="a decode side resumes with all but the last token of what it kept"),
    ],
)
def test_a_verify_in_flight_when_its_request_is_taken_back_counts_for_nothing(again, resumed):
    first = [part("PREFILL", 0, 7, 0), part("DECODE", 7, 3, 0), part("DECODE", 10, 2, 0)]
    then = [part(*again, 1), part("DECODE", resumed, 4, 1)]
    evidence = SimpleNamespace(attempts=lambda rid: [first, then])
    request, end = SimpleNamespace(rid="r0", input_ids=PROMPT), SimpleNamespace(output_ids=[1] * 8)
    assert [(one.attempt, one.start) for one in answered._kept(evidence, request, end)] == [(0, 7), (1, resumed)]


ONE_MORE = lambda count: count + 1  # noqa: E731
COUNTS = {
    "prompt_tokens": "SHAPE:counts:ACCEPT:prompt-tokens",
    "completion_tokens": "SHAPE:counts:ACCEPT:completion-tokens",
    "cached_tokens": "SHAPE:counts:ACCEPT:cached-tokens",
    "num_retractions": "SHAPE:counts:ACCEPT:num-retractions",
    "spec_verify_ct": "ACCEPT:counts:ACCEPT:spec-verify-ct",
    "spec_num_correct_drafts": "ACCEPT:counts:ACCEPT:spec-num-correct-drafts",
    "spec_accept_rate": "ACCEPT:counts:ACCEPT:spec-accept-rate",
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_is_off_is_named(name):
    assert faults("counts", changed(("meta", name), ONE_MORE))[0] == [COUNTS[name]]


def test_finish_reason_and_histogram_are_held_against_the_text_and_the_verifies():
    length = changed(("meta", "finish_reason", "length"), ONE_MORE)
    assert faults("counts", length)[0] == ["TOKEN:counts:ACCEPT:finish-reason"]
    histogram = changed(("meta", "spec_accept_histogram"), lambda counts: [*counts, 1])
    assert faults("counts", histogram)[0] == ["ACCEPT:counts:ACCEPT:spec-accept-histogram"]
    assert faults("counts", changed(("meta", "cached_tokens"), None))[0] == ["SHAPE:counts:ACCEPT:cached-tokens"]


LOGPROBS = [
    (("output_token_logprobs", 4, 0), lambda x: x + 0.1, "NUMERIC:logprobs:ACCEPT:output-token-logprobs-off"),
    (("output_token_logprobs", 0, 0), lambda x: float("nan"), "NUMERIC:logprobs:PREFILL:output-token-logprobs-off"),
    (("output_token_logprobs", 4, 1), ONE_MORE, "TOKEN:logprobs:ACCEPT:output-token-logprobs-token"),
    (("output_token_logprobs", 8), None, "SHAPE:logprobs:ACCEPT:output-token-logprobs-count"),
    (("output_top_logprobs", 4, 1, 0), lambda x: x + 0.1, "NUMERIC:logprobs:ACCEPT:output-top-logprobs-off"),
    (("output_top_logprobs", 4, 1, 1), ONE_MORE, "TOKEN:logprobs:ACCEPT:output-top-logprobs-token"),
    (("output_top_logprobs", 4, 1), None, "SHAPE:logprobs:ACCEPT:output-top-logprobs-width"),
    (
        ("output_token_ids_logprobs", 4, 1, 0),
        lambda x: x + 0.1,
        "NUMERIC:logprobs:ACCEPT:output-token-ids-logprobs-off",
    ),
    (("output_token_ids_logprobs", 4, 1, 1), ONE_MORE, "TOKEN:logprobs:ACCEPT:output-token-ids-logprobs-token"),
    (("input_token_logprobs", 2, 0), lambda x: x - 0.1, "NUMERIC:logprobs:PREFILL:input-token-logprobs-off"),
    (("input_token_logprobs", 2), None, "SHAPE:logprobs:PREFILL:input-token-logprobs-count"),
    (("input_token_logprobs", 0), lambda x: [-1.0, 4, None], "TOKEN:logprobs:PREFILL:input-token-logprobs-first"),
    (("input_top_logprobs", 1, 0, 0), lambda x: x - 0.1, "NUMERIC:logprobs:PREFILL:input-top-logprobs-off"),
]


@pytest.mark.parametrize(("path", "new", "signature"), LOGPROBS)
def test_a_log_probability_that_is_off_is_named(path, new, signature):
    found, _ = faults("logprobs", changed(("meta", *path), new))
    assert signature in found
    assert len(found) == (1 if path != ("output_token_logprobs", 8) else 3)  # the other lists are as long as that one


def test_a_token_that_rounding_brings_among_the_likeliest_is_none_that_is_off():
    """What the reference says nothing of is no likelier than the last one it names: near enough, or too far."""
    unnamed = changed(("meta", "output_top_logprobs", 4, 1, 1), lambda token: token + 100)
    assert faults("logprobs", unnamed, step=1.0)[0] == ["TOKEN:logprobs:ACCEPT:output-top-logprobs-token"]
    assert faults("logprobs", unnamed, step=1e-7)[0] == []


STREAMS = [
    ((1, "output_ids", 2), ONE_MORE, "TOKEN:streamed:ACCEPT:piece-other-token"),
    ((2, "output_ids"), lambda ids: ids + ids[-1:] * 4, "TOKEN:streamed:ACCEPT:piece-other-token"),
    ((3, "output_ids"), lambda ids: [*ids, 5], "SHAPE:streamed:ACCEPT:piece-taken-back"),
    ((1, "meta", "output_token_logprobs"), lambda x: [*x, x[-1]], "SHAPE:streamed:ACCEPT:piece-output-token-logprobs"),
    ((1, "meta", "output_top_logprobs", 1), lambda x: [], "SHAPE:streamed:ACCEPT:piece-changed"),
    ((1, "meta", "completion_tokens"), ONE_MORE, "SHAPE:streamed:ACCEPT:piece-count"),
]


@pytest.mark.parametrize(("path", "new", "signature"), STREAMS)
def test_a_piece_that_does_not_grow_into_the_answer_is_named(path, new, signature):
    assert signature in faults("streamed", changed(("pieces", *path), new))[0]


@pytest.mark.parametrize("read", ["what was streamed", "another token"])
def test_rows_that_read_what_was_streamed_follow_from_an_answer_that_is_another(read):
    """The answer is its last token alone, as F-052 has it."""
    engine = handmade.copy_trace(ENGINE)
    if read == "another token":
        row = handmade.find(engine, phase="DRAFT_PREFILL", rid="r0", committed=4, slot=2)
        engine.rows.ints["input_id"][row] = handmade.VOCAB + 1
    ends = [replace(one, output_ids=one.output_ids[-1:]) if one is END else one for one in engine.ends]
    event = Event(name="answer", scheduler_step=9, data=told())
    evidence = gather(GIVEN, replace(engine, ends=tuple(ends), events=(*engine.events, event)), REFERENCE)
    found = [one for check in ("streamed", "inputs") for one in run_check(CHECKS[check], evidence).divergences]
    causes = {one.hint: one.cause for one in settle(found, scheduler_steps=evidence.scheduler_steps)}
    cause = "TOKEN:streamed:PREFILL:piece-other-token"
    assert causes.pop("final-tail") == (cause if read == "what was streamed" else "")
    assert causes.pop("root-is-not-last-committed") == cause
    assert not any(causes.values())


GOOD = returned()
STATES_WRONG = [
    (GOOD[4:], ["SHAPE:returned_states:PREFILL:prompt-row-missing"]),
    (GOOD[:-1], ["SHAPE:returned_states:ACCEPT:row-missing"]),
    (np.concatenate([GOOD[:9], GOOD[5:]]), ["SHAPE:returned_states:PREFILL:row-again"]),
    (GOOD[[1, 0, *range(2, STATES)]], ["SHAPE:returned_states:PREFILL:rows-in-other-order"]),
    (GOOD + np.float32(1.0), ["NUMERIC:returned_states:PREFILL:row-off"]),
    (GOOD[:0], ["SHAPE:returned_states:PREFILL:prompt-row-missing", "SHAPE:returned_states:ACCEPT:row-missing"]),
]


@pytest.mark.parametrize(("states", "signatures"), STATES_WRONG)
def test_states_that_are_not_those_of_the_text_are_named(states, signatures):
    assert faults("returned_states", states=states)[0] == signatures


def test_rows_come_in_chunks_and_one_by_one():
    assert flat_states([[[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0]]).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert flat_states([]) is None
    assert flat_states([[1.0], [2.0, 3.0]]) is None


OF_DRAFTS = {"spec-num-correct-drafts", "spec-accept-rate", "spec-accept-histogram"}


@pytest.mark.parametrize(("truncates", "wrong"), [(True, set()), (False, OF_DRAFTS)])
def test_drafts_that_the_end_of_a_request_cuts_off_count_where_the_batch_lacks_them_too(truncates, wrong):
    """The last verify of r0 accepts three drafts behind its last token. Where that was drawn they are not judged."""
    last, spare = ENGINE.rounds[-1], (1, 2, 3)
    places = [(phase, slot) for phase in ("ACCEPT", "EXTEND") for slot in spare]
    gone = [handmade.find(ENGINE, phase=name, rid="r0", committed=last.starts[0], slot=slot) for name, slot in places]
    cut = handmade.without_rows(ENGINE, *gone)
    engine = replace(
        cut,
        header={**cut.header, "truncates_at_finish": truncates},
        rounds=(*cut.rounds[:-1], replace(last, lens=(1,))),
        events=(*cut.events, Event(name="answer", scheduler_step=9, data=told())),
    )
    drawn = GIVEN.model_copy(update={"requests": (GIVEN.requests[0].model_copy(update={"temperature": 1.0}),)})
    for given in (GIVEN, drawn):
        result = run_check(CHECKS["counts"], gather(given, engine, REFERENCE))
        assert {found.hint for found in result.divergences} == wrong


def test_a_request_that_never_ran_is_told_no_counts_and_need_not_be():
    given = GIVEN.model_copy(update={"requests": (*GIVEN.requests, GIVEN.requests[0].model_copy(update={"rid": "r2"}))})
    gone = replace(END, rid="r2", reason="abort", output_ids=())
    data = {"rid": "r2", "meta": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}, "pieces": []}
    answer = Event(name="answer", scheduler_step=9, data=data)
    engine = replace(ENGINE, ends=(gone,), events=(answer,))
    result = run_check(CHECKS["counts"], gather(given, engine, REFERENCE))
    assert (result.divergences, result.unknown, result.compared) == ([], [], {"counts": 1})


@pytest.mark.parametrize(("eos", "signatures"), [((), ["stopped-without-stop-token"]), ((END.output_ids[4],), [])])
def test_the_checkpoints_eos_ends_a_request_that_has_stop_ids_too(eos, signatures):
    stopped = GIVEN.requests[0].model_copy(update={"stop_token_ids": (60, 59)})
    given = GIVEN.model_copy(update={"requests": (stopped, GIVEN.requests[1])})
    assert not set(stopped.stop_token_ids) & set(END.output_ids[:5])
    end = replace(END, reason="stop", output_ids=END.output_ids[:5])
    engine = replace(ENGINE, header=ENGINE.header | {EOS: list(eos)}, ends=(end,))
    result = run_check(CHECKS["finish"], gather(given, engine, REFERENCE))
    assert [found.hint for found in result.divergences] == signatures


def test_a_trace_that_does_not_say_what_came_back_is_not_judged():
    said = list(not_judged(gather(GIVEN, ENGINE, REFERENCE)))
    assert said == ["request r0 asks for return_logprob, and the trace does not say what came back"]


@pytest.mark.parametrize(
    ("interval", "sent", "hints"),
    [
        (2, [(1, 1), (4, 5), (6, 6)], []),
        (2, [(1, 1), (1, 4)], ["piece-late"]),
        (3, [(1, 3), (4, 6)], ["piece-early"]),  # pieces are of 1, 4, 6 and 9 tokens
        (3, [(1, 4)], ["piece-early", "piece-late"]),
    ],
)
def test_a_stream_with_an_interval_comes_when_it_is_full_and_not_before(interval, sent, hints):
    spaced = GIVEN.requests[0].model_copy(update={"stream_interval": interval})
    given = GIVEN.model_copy(update={"requests": (spaced, GIVEN.requests[1])})
    answer = Event(name="answer", scheduler_step=9, data=told())
    turns = [
        Event(name="turn", scheduler_step=step, data={"running": [], "waiting": [], "sent": {"r0": pair}})
        for step, pair in enumerate(sent)
    ]
    engine = replace(ENGINE, events=(*turns, answer))
    result = run_check(CHECKS["streamed"], gather(given, engine, REFERENCE))
    assert [found.hint for found in result.divergences] == hints
    unsaid = replace(ENGINE, events=(answer,))
    result = run_check(CHECKS["streamed"], gather(given, unsaid, REFERENCE))
    assert result.unknown == ["interval of the stream of r0 not judged: nothing says what was sent"]
