"""Who is served: limits of lengths, queue and pool, what an abort leaves, and who is taken back."""

import pytest

from cases.fixed import DRAIN, request, submit
from cases.meta.batches import end, event, record, taken_back, trace, turn
from cases.programs import program
from harness.checks import CHECKS
from harness.checks.evidence import gather
from harness.checks.registry import run_check
from harness.cli.scenario_checks import check_scenarios
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import SpecConfig
from harness.driving.adapt import Wanted, adapted
from harness.driving.requests import sampling_of

TREE = SpecConfig(num_steps=3, eagle_topk=4, num_draft_tokens=8)  # keeps twelve tokens
TOO_LONG = "Requested token count exceeds the model's maximum context length of 512 tokens."
FULL = "503: The request queue is full."
OUT = "500: Out of memory even after retracting all other requests in the decode batch. Aborting the last request."


def batch(step, *parts, mode="DECODE", attempt=0):
    """parts: (rid, start, length), of a prompt with whether it ends there."""
    prompt = mode == "PREFILL"
    made = [(rid, attempt, start, length, prompt and all(final)) for rid, start, length, *final in parts]
    return record(step, mode, made)


def found(check, scenario, *rounds, ends=(), events=(), overlap=False):
    """Hints of what a check finds; ends: rid -> (reason, tokens)."""
    over = [end(rid, 99, count, reason) for rid, (reason, count) in dict(ends).items()]
    engine = trace(*rounds, ends=over, events=events, scenario_id=scenario.id, header={"overlap": overlap})
    result = run_check(CHECKS[check], gather(scenario, engine, None))
    return [one.signature for one in result.divergences] + result.unknown


def refused(rid, error):
    return event("request_error", 99, rid=rid, error=error)


# Lengths


def long_request(total, expect="answer", **engine):
    asked = request("a", total - 10, seed=1, new=10).model_copy(update={"expect": expect})
    return program("long", [asked], [submit("a"), DRAIN], spec=TREE, **engine)


SERVED = {"ends": {"a": ("length", 10)}}
REFUSED = {"ends": {"a": ("error", 0)}, "events": [refused("a", TOO_LONG)]}


@pytest.mark.parametrize(
    ("total", "expect", "seen", "signatures"),
    [
        (500, "answer", SERVED, []),
        (500, "answer", REFUSED, ["MISSING_ROW:admission:PREFILL:refused"]),
        (501, "refusal", REFUSED, []),
        (
            501,
            "refusal",
            SERVED,
            ["EXTRA_ROW:admission:PREFILL:not-refused", "request a was to end in refusal, and ended by length"],
        ),
    ],
)
def test_a_request_is_refused_exactly_where_it_does_not_fit_with_what_drafts_take(total, expect, seen, signatures):
    rounds = [batch(0, ("a", 0, total - 10), mode="PREFILL")] if seen is SERVED else []
    assert found("admission", long_request(total, expect), *rounds, **seen) == signatures


def test_a_request_without_a_priority_is_not_refused_for_one():
    error = "503: Using priority is disabled for this server. Please send a new request without a priority."
    scenario = program("plain", [request("a", 9, seed=1, new=10)], [submit("a"), DRAIN])
    refusal = {"ends": {"a": ("error", 0)}, "events": [refused("a", error)]}
    assert found("admission", scenario, **refusal) == ["MISSING_ROW:admission:PREFILL:refused"]


def queued(limit):
    requests = [request(rid, 4, seed=1, new=4) for rid in "abc"]
    return program(
        "queue", requests, [submit("a"), Op(kind="step"), submit("b", "c"), DRAIN], max_queued_requests=limit
    )


ARRIVALS = [event("submit", 0, rid="a"), turn(0, running=["a"]), *(event("submit", 1, rid=rid) for rid in "bc")]


@pytest.mark.parametrize(
    ("limit", "gone", "signatures"),
    [
        (1, "c", []),
        (1, "", ["EXTRA_ROW:admission:PREFILL:not-refused"]),
        (2, "", []),
        (2, "c", ["MISSING_ROW:admission:PREFILL:refused"]),
    ],
)
def test_who_finds_the_queue_full_is_refused_and_no_other(limit, gone, signatures):
    served = [rid for rid in "abc" if rid != gone]
    ends = dict.fromkeys(served, ("length", 4)) | ({gone: ("error", 0)} if gone else {})
    rounds = [batch(2, *((rid, 0, 4) for rid in served), mode="PREFILL")]
    events = [*ARRIVALS, *([refused(gone, FULL)] if gone else [])]
    assert found("admission", queued(limit), *rounds, ends=ends, events=events) == signatures


@pytest.mark.parametrize(("start", "signatures"), [(153, []), (152, ["MISSING_ROW:admission:PREFILL:given-up"])])
def test_a_request_is_given_up_only_where_the_pool_has_no_room_for_two_rounds(start, signatures):
    asked = request("a", 140, seed=1, new=18).model_copy(update={"expect": "exhaustion"})
    scenario = program("alone", [asked], [submit("a"), DRAIN], max_total_tokens=160)  # a chain of four: eight slots
    rounds = [batch(0, ("a", 0, 140), mode="PREFILL"), batch(1, ("a", 140, start - 140))]
    assert found("admission", scenario, *rounds, ends={"a": ("error", 0)}, events=[refused("a", OUT)]) == signatures


@pytest.mark.parametrize(
    ("end", "error", "signatures"),
    [
        (("abort", 1), None, ["MISSING_ROW:admission:PREFILL:given-up"]),
        (("error", 0), "Aborted", ["MISSING_ROW:admission:PREFILL:given-up"]),  # before anything of it ran
        (("error", 0), "Invalid grammar request", []),  # a reason that this check does not know
    ],
)
def test_an_abort_that_nobody_asked_for_is_found(end, error, signatures):
    scenario = program("one", [request("a", 4, seed=1, new=9)], [submit("a"), DRAIN])
    rounds = [batch(0, ("a", 0, 4), mode="PREFILL")]
    events = [] if error is None else [refused("a", error)]
    assert found("admission", scenario, *rounds, ends={"a": end}, events=events) == signatures


def test_an_abort_that_the_scenario_asks_for_is_none():
    script = [submit("a"), Op(kind="abort", rids=("a",)), DRAIN]
    scenario = program("one", [request("a", 4, seed=1, new=9)], script)
    assert found("admission", scenario, ends={"a": ("error", 0)}, events=[refused("a", "Aborted")]) == []


# Aborts


ABORTED = program(
    "aborted", [request("a", 4, seed=1, new=30)], [submit("a"), Op(kind="step"), Op(kind="abort", rids=("a",)), DRAIN]
)
PROMPT, FIRST, SECOND = batch(0, ("a", 0, 4), mode="PREFILL"), batch(1, ("a", 4, 3)), batch(2, ("a", 7, 2))


@pytest.mark.parametrize(
    ("rounds", "step", "waiting", "kept", "signature"),
    [
        ([PROMPT, FIRST, SECOND], 1, (), 4, "aborted-decoding"),
        ([PROMPT, FIRST, SECOND], 2, (), 6, "aborted-decoding"),
        ([PROMPT, FIRST, batch(2, ("a", 7, 1), mode="PREFILL"), batch(3, ("a", 8, 2))], 2, (), 5, "aborted-decoding"),
        ([PROMPT], 0, ("a",), 0, "aborted-queued"),
        (
            [batch(0, ("a", 0, 2, False), mode="PREFILL"), batch(1, ("a", 2, 2), mode="PREFILL")],
            1,
            (),
            0,
            "aborted-in-chunk",
        ),
        ([PROMPT, FIRST, batch(3, ("a", 0, 8), mode="PREFILL", attempt=1)], 3, ("a",), 4, "aborted-retracted"),
    ],
)
def test_an_abort_leaves_what_was_chosen_before_and_one_pass_of_a_decoding_request(
    rounds, step, waiting, kept, signature
):
    events = [turn(step - 1, waiting=waiting), event("abort", step, rid="a")]
    assert found("aborts", ABORTED, *rounds, ends={"a": ("abort", kept)}, events=events) == []
    more = found("aborts", ABORTED, *rounds, ends={"a": ("abort", kept + 1)}, events=events)
    assert more == [f"TOKEN:aborts:ACCEPT:{signature}"]


def test_under_overlap_the_pass_that_still_counts_is_the_one_in_flight():
    events = [turn(1, running=["a"]), event("abort", 2, rid="a")]
    assert found("aborts", ABORTED, PROMPT, FIRST, SECOND, ends={"a": ("abort", 4)}, events=events, overlap=True) == []
    more = found("aborts", ABORTED, PROMPT, FIRST, SECOND, ends={"a": ("abort", 5)}, events=events, overlap=True)
    assert more == ["TOKEN:aborts:ACCEPT:aborted-decoding"]


def test_under_overlap_a_request_that_nothing_of_is_in_flight_still_runs_one_pass():
    """The batch in flight at its abort is a neighbour's prompt."""
    events, late = [turn(1, running=["a"]), event("abort", 2, rid="a")], batch(3, ("a", 4, 3))
    assert found("aborts", ABORTED, PROMPT, late, ends={"a": ("abort", 4)}, events=events, overlap=True) == []
    more = found("aborts", ABORTED, PROMPT, late, ends={"a": ("abort", 5)}, events=events, overlap=True)
    assert more == ["TOKEN:aborts:ACCEPT:aborted-decoding"]


def test_a_request_taken_back_in_the_step_of_its_abort_runs_no_further_pass():
    events = [turn(1, running=["a"]), event("retract", 2, reason="script"), event("abort", 2, rid="a")]
    assert found("aborts", ABORTED, PROMPT, FIRST, SECOND, ends={"a": ("abort", 4)}, events=events) == []
    more = found("aborts", ABORTED, PROMPT, FIRST, SECOND, ends={"a": ("abort", 6)}, events=events)
    assert more == ["TOKEN:aborts:ACCEPT:aborted-retracted"]


# Who goes back


TWO = program("two", [request(rid, 4, seed=1, new=30) for rid in "ab"], [submit("a", "b"), DRAIN], max_total_tokens=48)
TOGETHER = [batch(0, ("a", 0, 4), ("b", 0, 4), mode="PREFILL"), batch(1, ("a", 4, 1), ("b", 4, 3))]


@pytest.mark.parametrize(
    ("back", "stays", "start", "signatures"),
    [("a", "b", 7, []), ("b", "a", 5, ["SHAPE:retraction:PREFILL:longer-output-taken-back"])],
)
def test_the_shorter_output_goes_back(back, stays, start, signatures):
    rounds = [*TOGETHER, batch(2, (stays, start, 2))]
    assert found("retraction", TWO, *rounds, events=[taken_back(2, back, reason="pool")]) == signatures
    assert found("retraction", TWO, *rounds, events=[taken_back(2, back)]) == [], "a scenario chose"


def test_under_overlap_the_round_in_flight_does_not_count_against_it():
    """In step 2 the outputs of step 1 are not known yet: both are as long."""
    rounds = [*TOGETHER, batch(2, ("a", 5, 2))]
    assert found("retraction", TWO, *rounds, events=[taken_back(2, "b", reason="pool")], overlap=True) == []


@pytest.mark.parametrize("more", [0, 100])
def test_a_request_without_a_limit_has_what_is_left_of_the_context(more):
    """Behind an option that makes the context longer, too; and what goes to SGLang and into files is null."""
    one = request("a", 490, seed=1).model_dump() | {"max_new_tokens": None}
    (scenario,) = adapted(
        [program("unlimited", [one], [submit("a"), DRAIN], spec=TREE)], Wanted(context_length=512 + more), device="cpu"
    )
    check_scenarios([scenario], device="cpu")
    assert (scenario.requests[0].max_new_tokens, scenario.requests[0].unlimited) == (20 + more, True)
    assert sampling_of(scenario.requests[0])["max_new_tokens"] is None
    written = scenario.model_dump_json()
    assert '"max_new_tokens":null' in written
    assert "unlimited" not in written.replace('"name":"unlimited"', "")
    assert Scenario.model_validate_json(written, strict=True) == scenario
