"""Check `sampled`: a run under its own uniforms passes, and whatever else is committed, or decided unseen, does not."""

from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade
from cases.meta.speculating import FreeSession, answered, drawing
from harness.archive.event_facts import unfit
from harness.checks.evidence import gather
from harness.checks.judge import judge
from harness.checks.ties import usual_draws
from harness.contract.requests import RequestSpec
from harness.contract.settings import SpecConfig
from harness.contract.types import Kind, Outcome
from harness.driving.oracle import with_own

SPECS = {
    "chain": SpecConfig(num_steps=3, eagle_topk=1, num_draft_tokens=4),
    "tree": SpecConfig(num_steps=2, eagle_topk=3, num_draft_tokens=7),
}


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS)
def sampled(request, eagle_tiny):
    """(scenario, what an engine that follows the rule reports): one request, alone, with uniforms of its own."""
    asked = RequestSpec(rid="a", input_ids=(5, 17, 130, 42), max_new_tokens=30, temperature=1.1)
    scenario = handmade.asking(asked, spec=request.param)
    session = FreeSession.of(eagle_tiny, request.param)
    return scenario, session.speculate(asked, scenario_id=scenario.id, uniform=drawing(4))


def judged(eagle_tiny, scenario, trace):
    """(verdict, divergences of the check)"""
    reference = answered(eagle_tiny, scenario, trace)
    verdict, divergences = judge(scenario, trace, reference)
    return verdict, [found for found in divergences if found.check == "sampled"]


def accepts(trace):
    return np.flatnonzero(trace.rows.strings["phase"] == "ACCEPT")


def altered(trace, column, row, value):
    """The trace with another value in one place."""
    trace = handmade.copy_trace(trace)
    trace.rows.ints[column][row] = value
    return trace


def other_last_token(trace):
    """(the trace with another last token, its row, the token that was there)."""
    last = accepts(trace)[-1]
    before = int(trace.rows.ints["input_id"][last])
    return altered(trace, "input_id", last, (before + 1) % 512), int(last), before


def with_margin(reference, margin, *committed):
    """The reference with another distance of a uniform to its border, in these rounds or in all."""
    return replace(
        reference,
        events=tuple(
            replace(event, data={**event.data, "margin": margin, "distance": margin})
            if event.name == "sampled" and (not committed or event.data["committed"] in committed)
            else event
            for event in reference.events
        ),
    )


def with_uniforms(trace, change):
    """The trace with every event 'uniforms' given to `change`, which returns one or None."""
    events = [change(event) if event.name == "uniforms" else event for event in trace.events]
    return replace(trace, events=tuple(event for event in events if event is not None))


def test_a_run_under_its_own_uniforms_passes(eagle_tiny, sampled):
    scenario, trace = sampled
    verdict, divergences = judged(eagle_tiny, scenario, trace)
    assert divergences == []
    assert not any("sampled acceptance" in reason for reason in verdict.reasons)
    assert verdict.compared["accepts"] == len(accepts(trace))
    lengths = {record.lens[0] for record in trace.rounds if record.mode == "DECODE"}
    assert len(lengths) > 1, "accepted and refused tokens both occur"


def test_another_last_token_is_found_at_its_place(eagle_tiny, sampled):
    scenario, trace = sampled
    other, last, before = other_last_token(trace)
    verdict, divergences = judged(eagle_tiny, scenario, other)
    assert verdict.outcome is Outcome.FAIL
    (found,) = divergences
    assert (found.kind, found.hint, found.expected) == (Kind.ACCEPT, "sampled-other-token", before)
    assert found.key == trace.rows.key(last)


def test_a_token_that_follows_another_node_is_found(eagle_tiny, sampled):
    scenario, trace = sampled
    deep = next(int(i) for i in accepts(trace) if trace.rows.ints["slot"][i] == 1)
    moved = altered(trace, "parent", deep, int(trace.rows.ints["parent"][deep]) + 1)
    divergences = judged(eagle_tiny, scenario, moved)[1]
    assert [(found.kind, found.hint) for found in divergences] == [(Kind.PARENT, "sampled-other-node")]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_a_walk_that_other_uniforms_decided_is_found(eagle_tiny, sampled, uniform):
    scenario, trace = sampled

    def other(event):
        own = {
            rid: {"nodes": [uniform] * len(one["nodes"]), "final": one["final"]}
            for rid, one in event.data["uniforms"].items()
        }
        return replace(event, data={**event.data, "uniforms": own})

    divergences = judged(eagle_tiny, scenario, with_uniforms(trace, other))[1]
    assert "sampled-other-token" in {found.hint for found in divergences}


def test_thresholds_that_nobody_set_are_found(eagle_tiny, sampled):
    scenario, trace = sampled
    generous = with_uniforms(trace, lambda event: replace(event, data={**event.data, "thresholds": [0.05, 1.0]}))
    assert judged(eagle_tiny, scenario, generous)[1]


def test_a_walk_without_uniforms_is_unknown(eagle_tiny, sampled):
    scenario, trace = sampled
    verdict, divergences = judged(eagle_tiny, scenario, with_uniforms(trace, lambda _event: None))
    assert divergences == []
    assert verdict.outcome is Outcome.UNKNOWN
    assert "sampled acceptance of a not judged: the probe saw no uniforms of it" in verdict.reasons


def test_a_coin_on_the_border_decides_either_way(eagle_tiny, sampled):
    """The last uniform of a round is moved to the very end of the share that it lay in: the neighbour is as good."""
    scenario, trace = sampled
    near = with_margin(answered(eagle_tiny, scenario, trace), 1e-7)
    verdict, divergences = judge(scenario, other_last_token(trace)[0], near)
    assert [found for found in divergences if found.check == "sampled"] == []
    assert verdict.ties == 1


def test_where_ours_stands_in_for_the_kernel_nothing_counts_and_that_is_said(eagle_tiny, sampled):
    scenario, trace = sampled
    kernel = "sglang.srt.speculative.eagle_utils.tree_speculative_sampling_target_only"
    ours = [{"operation": kernel, "by": "stand-in when sampling", "subject": "sampled", "reason": "no CPU build"}]
    verdict, divergences = judged(eagle_tiny, scenario, replace(trace, header={**trace.header, "replaced": ours}))
    assert divergences == []
    assert "accepts" not in verdict.compared
    assert f"not exercised: sampled verify ({kernel} replaced by our kernel)" in verdict.reasons
    assert "nothing compared: accepts" not in verdict.reasons


@pytest.mark.parametrize("margin", [0.0, 1e-3])
def test_a_token_less_is_a_tie_where_a_uniform_was_at_the_edge_and_a_lost_row_elsewhere(eagle_tiny, sampled, margin):
    scenario, trace = sampled
    reference = answered(eagle_tiny, scenario, trace)
    slots, starts = trace.rows.ints["slot"], trace.rows.ints["committed"]
    committed = int(next(starts[i] for i in accepts(trace) if slots[i] == 1))
    gone = [i for i in accepts(trace) if starts[i] == committed and slots[i]]
    rounds = tuple(replace(one, lens=(1,)) if one.starts == (committed,) else one for one in trace.rounds)
    shorter = replace(handmade.without_rows(trace, *gone), rounds=rounds)
    divergences = judge(scenario, shorter, with_margin(reference, margin, committed))[1]
    assert any(found.check == "align" for found in divergences) is bool(margin)


@pytest.mark.parametrize(("margin", "share"), [(0.0, 0.5), (1.0, 0.0)])
def test_draws_that_rounding_reaches_are_expected_to_fall_either_way(eagle_tiny, sampled, margin, share):
    """Over a large flat vocabulary every interval is narrower than rounding."""
    scenario, trace = sampled
    reference = answered(eagle_tiny, scenario, trace)
    drawn = list(reference.named("sampled"))
    near = with_margin(reference, margin, *(event.data["committed"] for event in drawn))
    assert drawn
    assert usual_draws(gather(scenario, trace, near)) == share * len(drawn)


def test_a_stored_margin_without_end_is_a_word(eagle_tiny, sampled):
    scenario, trace = sampled
    stored = with_margin(answered(eagle_tiny, scenario, trace), "inf")
    assert judge(scenario, trace, stored)[0].outcome is not Outcome.FAIL
    other = judge(scenario, other_last_token(trace)[0], stored)[1]
    assert [found.margin for found in other if found.check == "sampled"] == [float("inf")]
    assert usual_draws(gather(scenario, trace, stored)) == 0.0


def of_half(trace, reference, **said):
    """Trace and reference of an engine in float16, with other words about each draw."""
    events = [
        replace(event, data={**event.data, **said}) if "spread" in event.data else event for event in reference.events
    ]
    return replace(trace, header={**trace.header, "dtype": "float16"}), replace(reference, events=tuple(events))


@pytest.mark.parametrize(("deviation", "tie"), [(0.2, True), (1e-5, False)])
def test_a_draw_that_errors_do_not_reach_is_no_tie_in_half_precision(eagle_tiny, sampled, deviation, tie):
    """A flat distribution's ends hardly move: 0.001 beside one is far there, and near between two likely tokens."""
    scenario, trace = sampled
    reference = with_margin(answered(eagle_tiny, scenario, trace), 1e-3)
    other, reference = of_half(other_last_token(trace)[0], reference, spread=deviation)
    verdict, divergences = judge(scenario, other, reference)
    found = [one for one in divergences if one.check == "sampled"]
    assert (bool(found), verdict.ties > 0) == (not tie, tie)
    assert (usual_draws(gather(scenario, other, reference)) > 1) is tie


def test_ends_that_a_second_run_moves_farther_than_logits_say_are_as_near_as_it_shows(eagle_tiny, sampled):
    """Errors that many tokens share move an end of a flat distribution all the same."""
    scenario, trace = sampled
    reference = with_margin(answered(eagle_tiny, scenario, trace), 1e-3)
    other, reference = of_half(other_last_token(trace)[0], reference, spread=1e-5, own_distance=2e-3)
    assert [one for one in judge(scenario, other, reference)[1] if one.check == "sampled"] == []


def test_a_second_run_that_drew_otherwise_says_its_errors_all_the_same(eagle_tiny, sampled):
    scenario, trace = sampled
    truth = answered(eagle_tiny, scenario, trace)
    last = accepts(truth)[-1]
    drawn = with_own(truth, altered(truth, "slot", last, int(truth.rows.ints["slot"][last]) + 1))
    assert np.isfinite(drawn.tensors["own.logits"]).any()
    draws = [event for event in drawn.events if "spread" in event.data]
    assert draws
    assert all("own_distance" in event.data and not unfit(event.name, event.data) for event in draws)
    verify = np.flatnonzero(truth.rows.strings["phase"] == "VERIFY")[-1]
    assert with_own(truth, altered(truth, "slot", verify, 99)) is truth
