"""Verdicts: what makes one UNKNOWN, what a crash inside a check does, and how findings read."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from harness.checks import CHECKS, Check, CheckResult, describe, group, judge
from harness.checks import registry as registry_module
from harness.checks.findings import settle
from harness.checks.reads import NOT_RECORDED
from harness.checks.registry import register, run_check
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Outcome, Policy


@pytest.fixture
def made():
    scenario = handmade.scenario()
    return (scenario, *handmade.build(scenario))


def unknown_reasons(scenario, engine, reference):
    verdict, divergences = judge(scenario, engine, reference)
    assert verdict.outcome is Outcome.UNKNOWN
    assert divergences == []
    return " | ".join(verdict.reasons)


@pytest.mark.parametrize(
    "shape",
    [{}, {"k": 1}, {"t": 2}, {"t": 3, "n": 10}, {"chunk": None}, {"radix_cache": False}, {"stop_ids": (4, 9)}],
    ids=str,
)
def test_sound_traces_pass_and_without_a_reference_they_show_nothing_but_are_unknown(shape):
    scenario = handmade.scenario(**shape)
    engine, reference = handmade.build(scenario)
    verdict, divergences = judge(scenario, engine, reference)
    assert (verdict.outcome, divergences) == (Outcome.PASS, []), verdict.reasons
    alone, divergences = judge(scenario, engine, None)
    assert (alone.outcome, divergences) == (Outcome.UNKNOWN, [])
    said = [reason for reason in alone.reasons if not reason.startswith(NOT_RECORDED)]
    assert [reason for reason in said if "reference" in reason] == said


def test_compared_counts_every_sort(made):
    scenario, engine, reference = made
    verdict, _ = judge(scenario, engine, reference)
    wanted = "positions tokens proposals accepts extend_inputs cache_slots parents hidden_rows logits"
    assert set(verdict.compared) == set(wanted.split())
    assert verdict.compared["accepts"] == int((engine.rows.strings["phase"] == "ACCEPT").sum())


# coverage


def test_wanted_point_that_never_happened_or_is_not_known_is_unknown():
    scenario = handmade.scenario(wants=("non_final_chunk", "idle_rank", "full_moon"))
    reasons = unknown_reasons(scenario, *handmade.build(scenario))
    assert "asked for idle_rank, never happened" in reasons
    assert "full_moon, an unknown coverage point" in reasons
    assert "non_final_chunk" not in reasons


def test_prompts_that_were_to_run_in_graphs_and_did_not_are_unknown():
    asked = handmade.scenario(cuda_graph=True, prefill_cuda_graph=True)
    engine, reference = handmade.build(asked)
    assert "asked for prompt_in_graph, never happened" in unknown_reasons(asked, engine, reference)
    rounds = tuple(replace(one, graphs={"PREFILL": 64} if one.mode == "PREFILL" else {}) for one in engine.rounds)
    assert judge(asked, replace(engine, rounds=rounds), reference)[0].outcome is Outcome.PASS


def test_wanted_coverage_point_that_happened_passes_and_is_counted():
    scenario = handmade.scenario(wants=("non_final_chunk",))
    verdict, _ = judge(scenario, *handmade.build(scenario))
    assert verdict.outcome is Outcome.PASS
    assert verdict.coverage["non_final_chunk"] == 3


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({}, "no handshake"),
        ({"release": "9", "hooks_missing": ["m:f"]}, "found no place for m:f in release 9"),
        ({"release": "9", "hooks_missing": ["m:f"], "hooks_optional": ["m:f"]}, ""),
    ],
)
def test_without_a_handshake_that_found_every_place_there_is_no_verdict(made, header, reason):
    scenario, engine, reference = made
    engine = replace(engine, header=header)
    if reason:
        assert reason in unknown_reasons(scenario, engine, reference)
    else:
        assert judge(scenario, engine, reference)[0].outcome is Outcome.PASS


def test_trace_of_another_scenario_is_unknown(made):
    scenario, engine, reference = made
    assert "judged as" in unknown_reasons(scenario, replace(engine, scenario_id="0" * 12), reference)


def test_empty_trace_is_unknown_never_pass(made):
    scenario, engine, reference = made
    nothing = handmade.take_rows(engine.rows, [])
    empty = replace(engine, rows=nothing, rounds=(), ends=())
    reasons = unknown_reasons(scenario, empty, replace(reference, rows=nothing))
    assert "nothing to compare: no batch with a request" in reasons
    assert "request r0 never ended" in reasons


def test_where_every_request_ends_at_its_first_token_there_is_no_verdict_on_drafts():
    scenario = handmade.scenario(max_new_tokens=1)
    reasons = unknown_reasons(scenario, *handmade.build(scenario))
    assert "nothing was drafted: no verify had a proposal; let a request write two tokens or more" in reasons


def test_a_scenario_that_wants_something_else_need_not_draft():
    scenario = handmade.scenario(max_new_tokens=1, wants=("non_final_chunk",))
    verdict, _ = judge(scenario, *handmade.build(scenario))
    assert verdict.outcome is Outcome.PASS
    assert "nothing was drafted: no verify had a proposal, and the scenario asks for none" in verdict.reasons
    drafting = handmade.scenario(max_new_tokens=2, wants=("non_final_chunk",))
    assert "nothing was drafted" not in " ".join(judge(drafting, *handmade.build(drafting))[0].reasons)


@pytest.mark.parametrize(
    ("reason", "said"), [("stop", "produced no tokens"), ("error", "was answered with an error: too long; ")]
)
def test_request_without_output_is_unknown(made, reason, said):
    scenario, engine, reference = made
    silent = replace(engine.ends[0], output_ids=(), reason=reason)
    events = [Event(name="request_error", scheduler_step=0, data={"rid": silent.rid, "error": "too long"})]
    events = (*engine.events, *(events if reason == "error" else ()))
    engine = replace(engine, ends=(silent, *engine.ends[1:]), events=events)
    verdict, _ = judge(scenario, engine, reference if reason == "error" else None)
    assert verdict.outcome is Outcome.UNKNOWN
    assert any(one.startswith(f"request {silent.rid} {said}") for one in verdict.reasons)


def test_a_batch_that_could_not_be_read_is_unknown(made):
    scenario, engine, reference = made
    torn = Event(name="misfit", scheduler_step=1, data={"round": 7, "why": "1 choices of 2 rows in DRAFT"})
    reasons = unknown_reasons(scenario, replace(engine, events=(*engine.events, torn)), reference)
    assert "round 7: what the engine reported does not fit its batch: 1 choices of 2 rows in DRAFT" in reasons


def test_column_that_was_never_recorded_is_unknown(made):
    scenario, engine, reference = made
    engine.rows.ints["cache_slot"][:] = -1
    assert "nothing compared: cache_slots" in unknown_reasons(scenario, engine, reference)
    without_states = replace(made[1], tensors={})
    assert "nothing compared: hidden_rows" in unknown_reasons(scenario, without_states, reference)


REPLACED = {"operation": "m.f", "by": "stand-in", "subject": "tree", "reason": "no CPU build"}


def replaced(engine, **changes):
    return replace(engine, header={**engine.header, "replaced": [REPLACED | changes]})


@pytest.mark.parametrize(("subject", "counter"), [("tree", "parents"), ("verify", "accepts")])
def test_replaced_kernel_is_not_exercised_and_not_counted(made, subject, counter):
    scenario, engine, reference = made
    verdict, _ = judge(scenario, replaced(engine, subject=subject), reference)
    assert verdict.outcome is Outcome.PASS
    assert counter not in verdict.compared
    assert [reason for reason in verdict.reasons if reason.startswith(f"not exercised: {subject} (m.f ")]


def test_attention_on_a_replacement_kernel_is_not_exercised_though_its_rows_count(made):
    scenario, engine, reference = made
    verdict, _ = judge(scenario, replaced(engine, subject="attention"), reference)
    assert "not exercised: attention (f replaced by our kernel)" in verdict.reasons
    assert "hidden_rows" in verdict.compared


def test_own_kernel_reached_by_a_flag_is_exercised(made):
    scenario, engine, reference = made
    verdict, _ = judge(scenario, replaced(engine, by="flag"), reference)
    assert ("parents" in verdict.compared, len(verdict.reasons)) == (True, 1)
    assert verdict.reasons[0].startswith(f"{NOT_RECORDED};")


def test_replaced_kernel_does_not_hide_a_failure(made):
    scenario, engine, reference = made
    engine.rows.ints["parent"][handmade.find(engine, phase="VERIFY", slot=2)] = 99
    assert judge(scenario, replaced(engine), reference)[0].outcome is Outcome.FAIL


def test_trace_that_contradicts_itself_is_unknown(made):
    scenario, engine, reference = made
    rounds = (replace(engine.rounds[0], final=()), *engine.rounds[1:])
    assert "cannot be indexed" in unknown_reasons(scenario, replace(engine, rounds=rounds), reference)


# registry


@pytest.fixture
def lone_registry(monkeypatch):
    monkeypatch.setattr(registry_module, "CHECKS", {})


def test_every_check_says_what_it_protects():
    assert len(CHECKS) >= 10
    for check in CHECKS.values():
        assert check.kinds
        protects = check.judge.__doc__.partition("\n\n")[0]
        assert len(protects) > 20
        assert protects.endswith(".")


def test_every_kind_is_some_checks_business():
    assert set(Kind) == set().union(*(check.kinds for check in CHECKS.values()))


ABOUT = {"id": "good", "kinds": (Kind.TOKEN,), "reads": ("engine",)}


@pytest.mark.parametrize("change", [{"id": "two words"}, {"kinds": ()}, {"reads": ("weather",)}, {"reads": ()}])
def test_half_described_checks_are_refused(lone_registry, change):
    with pytest.raises(ValueError):  # noqa: PT011
        register(**ABOUT | change)
    register(**ABOUT)(lambda evidence: CheckResult())
    with pytest.raises(ValueError, match="twice"):
        register(**ABOUT)


def test_crash_inside_a_check_is_unknown_and_hides_nothing(made, monkeypatch):
    scenario, engine, reference = made

    def dies(evidence):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(CHECKS, "chain", replace(CHECKS["chain"], judge=dies))
    reasons = unknown_reasons(scenario, engine, reference)
    assert "check 'chain' crashed: RuntimeError: out of luck" in reasons
    engine.rows.ints["position"][handmade.find(engine, phase="EXTEND")] += 1
    assert judge(scenario, engine, reference)[0].outcome is Outcome.FAIL


def test_kind_that_a_check_does_not_declare_is_unknown():
    odd = CheckResult(divergences=[divergence(kind=Kind.LEAK)])
    check = Check(**ABOUT | {"kinds": frozenset({Kind.TOKEN})}, judge=lambda evidence: odd)
    assert "LEAK" in run_check(check, None).unknown[0]


def test_counters_are_a_closed_list():
    with pytest.raises(KeyError, match="unknown counter 'vibes'"):
        CheckResult().count("vibes", 1)


# findings


def divergence(**changes):
    key = {"dp_rank": 0, "rid": "r0", "attempt": 0, "committed": 5, "phase": "DRAFT", "step": 0, "slot": 0}
    key = Key(**{**key, **{name: changes.pop(name) for name in list(changes) if name in key}})
    fields = {"kind": Kind.POSITION, "check": "positions", "hint": "one-ahead"}
    return Divergence(key=key, **{"round": 1, "expected": 5, "observed": 6} | fields | changes)


def soft(**changes):
    return divergence(kind=Kind.NUMERIC, check="chain", hint="off", policy=Policy.BUDGET, **changes)


def test_the_same_failure_in_many_places_is_one_finding_with_a_count():
    many = [divergence(rid=f"r{number % 3}", committed=number, round=number) for number in range(500)]
    (finding,) = group(settle(many, scheduler_steps={}))
    assert (finding.count, finding.rids, finding.first.round) == (500, ("r0", "r1", "r2"), 0)


def test_the_first_divergence_is_the_earliest_by_scheduler_step_not_by_round_number():
    late, early = divergence(dp_rank=0, round=1), divergence(dp_rank=1, round=7)
    settled = settle([late, early], scheduler_steps={(0, 1): 9, (1, 7): 3})
    assert [(found.key.dp_rank, found.first) for found in settled] == [(1, True), (0, False)]
    phases = ["EXTEND", "VERIFY", "DRAFT", "ACCEPT"]
    settled = settle([divergence(phase=phase) for phase in phases], scheduler_steps={})
    assert [found.key.phase for found in settled] == ["DRAFT", "VERIFY", "ACCEPT", "EXTEND"], "as they run"


def test_finding_is_a_consequence_only_if_all_of_it_is():
    cause = divergence(phase="EXTEND", committed=1)
    explained, alone = soft(round=2), soft(round=2, rid="r9")
    both = group(settle([cause, explained, alone], scheduler_steps={}))
    assert all(finding.is_root for finding in both)
    one = group(settle([cause, explained], scheduler_steps={}))
    assert [finding.consequence_of for finding in one] == [None, cause.signature]


#: The last draft input of a chunk (F-060), and a later verify whose tree is the best by the engine's own scores.
TAIL = divergence(kind=Kind.EXTEND_INPUT, check="inputs", phase="DRAFT_PREFILL", hint="chunk-tail-target-guess")
TREE = [
    divergence(kind=kind, check="verify", phase="VERIFY", hint=hint, policy=Policy.TIE, round=2, committed=9)
    for kind, hint in ((Kind.TOKEN, "reference-input"), (Kind.PARENT, "reference-parent"), (Kind.POSITION, "one-ahead"))
]
SLOT = divergence(kind=Kind.CACHE_SLOT, check="slots", phase="VERIFY", hint="owned-by-another")


@pytest.mark.parametrize(
    ("found", "caused"),
    [
        ([divergence(round=1), soft(round=1, step=1), soft(round=2, committed=7)], [False, True, False]),
        ([SLOT, soft(rid="r7", round=3), soft(rid="r7", dp_rank=1, round=3)], [False, True, False]),
        ([divergence(phase="PREFILL"), divergence(phase="EXTEND", round=4)], [False, False]),
        ([TAIL, *TREE], [False, True, True, True]),
        ([TAIL, *(replace(one, policy=Policy.EXACT) for one in TREE)], [False, False, True, True]),
        ([TAIL, *(replace(one, key=replace(one.key, rid="r7")) for one in TREE)], [False, False, True, True]),
    ],
    ids=[
        *("a draft step only its own round", "an overwritten slot all of its rank", "exact ones never follow"),
        *(
            "a draft's cache the trees of later rounds",
            "but no tree that its scores do not say",
            "nor another request's",
        ),
    ],
)
def test_what_a_divergence_explains(found, caused):
    assert [bool(one.cause) for one in settle(found, scheduler_steps={})] == caused


def test_cached_prefix_carries_an_error_to_the_next_request():
    cause, effect = divergence(phase="DRAFT_PREFILL"), soft(rid="r7", round=3)
    assert not settle([cause, effect], scheduler_steps={})[1].cause
    assert settle([cause, effect], scheduler_steps={}, prefix_hits=frozenset({("r7", 0)}))[1].cause == cause.signature


# describe


def test_position_text_says_what_where_and_how_far(made):
    scenario, engine, reference = made
    engine.rows.ints["position"][engine.rows.strings["phase"] == "DRAFT"] += 1
    _, divergences = judge(scenario, engine, reference)
    (finding,) = group(divergences)
    assert describe(divergences[1], scenario, finding=finding).splitlines() == [
        "draft position differs: request r0 on DP rank 0, committed length 7, round 4, draft step 1 of 2",
        "  engine 9, expected 8 (one ahead)",
        "  25 more in this scenario; the first is round 4, step 0; requests r0, r1, r2",
        "  signature POSITION:positions:DRAFT:one-ahead",
    ]


def test_numeric_text_says_how_much_differs_where_and_by_how_much(made):
    scenario, engine, reference = made
    engine.tensors["hidden_in.EXTEND"][2, 3] += 1
    (found,) = judge(scenario, engine, reference)[1]
    text = describe(found, scenario)
    assert "1 / 8 (12.5 %)" in text
    assert " at index 3 (up to " in text


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_can_be_described(made, kind):
    text = describe(divergence(kind=kind, hint="some-hint", cause="POSITION:a:b:c"), made[0])
    assert "request r0" in text
    assert "POSITION:a:b:c" in text
    assert "DP rank 1" in describe(divergence(kind=Kind.LEAK, rid="", committed=-1, dp_rank=1), made[0])
