"""Checks against a reference: each passes the hand-made pair and fails it once one field is broken."""

from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade
from harness.checks import group, judge
from harness.contract.script import Op
from harness.contract.trace import Event
from harness.contract.types import Kind, Outcome, Policy

DRAFTING = ("DRAFT_PREFILL", "DRAFT", "EXTEND")
CHECK_OF = {"DRAFT": "chain", "DRAFT_PREFILL": "extend", "EXTEND": "extend", "PREFILL": "verify", "VERIFY": "verify"}


@pytest.fixture
def made():
    """(scenario, an engine trace to break, reference)."""
    scenario = handmade.scenario()
    return (scenario, *handmade.build(scenario))


def seen(scenario, engine, reference):
    """Signature -> (count, cause)."""
    _, divergences = judge(scenario, engine, reference)
    return {finding.signature: (finding.count, finding.consequence_of) for finding in group(divergences)}


def hidden_row(trace, side, phase, nth=2):
    """(tensor, row) of the nth row of a phase that has a state on `side`."""
    rows = trace.rows
    at = np.flatnonzero((rows.strings["phase"] == phase) & (rows.ints[side] >= 0))[nth]
    return trace.tensors[f"{side}.{phase}"], int(rows.ints[side][at])


@pytest.mark.parametrize(
    ("side", "phase"), [("hidden_in", phase) for phase in DRAFTING] + [("hidden_out", phase) for phase in CHECK_OF]
)
def test_wrong_state_is_numeric_in_every_phase(made, side, phase):
    scenario, engine, reference = made
    tensor, row = hidden_row(engine, side, phase)
    tensor[row, 3] += 0.01
    assert seen(scenario, engine, reference) == {f"NUMERIC:{CHECK_OF[phase]}:{phase}:{side}-off": (1, None)}


@pytest.mark.parametrize(("step", "hint"), [(-1, "previous-row"), (1, "next-row")])
def test_state_of_a_neighbouring_row_is_named_so(made, step, hint):
    scenario, engine, reference = made
    tensor, row = hidden_row(engine, "hidden_in", "EXTEND")
    tensor[row] = reference.tensors["hidden_in.EXTEND"][row + step]
    assert seen(scenario, engine, reference) == {f"NUMERIC:extend:EXTEND:hidden_in-{hint}": (1, None)}


@pytest.mark.parametrize(("same", "hint"), [(True, "own-other-row"), (False, "neighbours-row")])
def test_a_state_of_another_row_of_the_batch_says_whose(made, same, hint):
    scenario, engine, reference = made
    rows = engine.rows
    verify = np.flatnonzero((rows.strings["phase"] == "VERIFY") & (rows.ints["hidden_out"] >= 0))
    pairs = [
        (one, other)
        for one in verify
        for other in verify
        if rows.ints["round"][one] == rows.ints["round"][other]
        and (rows.strings["rid"][one] == rows.strings["rid"][other]) is same
        and abs(rows.ints["hidden_out"][one] - rows.ints["hidden_out"][other]) > 1
    ]
    one, other = pairs[0]
    states = engine.tensors["hidden_out.VERIFY"]
    states[rows.ints["hidden_out"][one]] = states[rows.ints["hidden_out"][other]]
    assert {f"NUMERIC:verify:VERIFY:hidden_out-{hint}"} == {*seen(scenario, engine, reference)}


def test_a_state_of_another_round_is_named_so(made):
    scenario, engine, reference = made
    rows, tensor = engine.rows, engine.tensors["hidden_in.DRAFT"]
    mine = np.flatnonzero((rows.strings["phase"] == "DRAFT") & (rows.strings["rid"] == "r0") & (rows.ints["step"] == 0))
    first, later = rows.ints["hidden_in"][mine[0]], rows.ints["hidden_in"][mine[-1]]
    tensor[later] = tensor[first]
    assert {"NUMERIC:chain:DRAFT:hidden_in-own-state-of-another-round"} == {*seen(scenario, engine, reference)}


def test_one_feature_of_an_eagle3_head_is_named():
    given = handmade.scenario()
    given = given.model_copy(update={"spec": given.spec.model_copy(update={"algorithm": "EAGLE3"})})
    engine, reference = handmade.build(given)
    for trace in (engine, reference):
        trace.tensors["hidden_in.EXTEND"] = np.tile(trace.tensors["hidden_in.EXTEND"], (1, 3))
    engine.tensors["hidden_in.EXTEND"][5, 9] += 1
    found = {*seen(given, engine, reference)}
    assert found == {"NUMERIC:extend:EXTEND:hidden_in-feature-1"}


def test_state_of_zeros_and_of_nan_are_named_so(made):
    scenario, engine, reference = made
    tensor, row = hidden_row(engine, "hidden_in", "EXTEND", nth=1)
    tensor[row] = 0
    tensor, row = hidden_row(engine, "hidden_in", "EXTEND", nth=6)
    tensor[row, 0] = np.nan
    found = {d.hint for d in judge(scenario, engine, reference)[1]}
    assert found == {"hidden_in-zeros", "hidden_in-nan"}


def test_nan_on_the_reference_side_fails_too(made):
    scenario, engine, reference = made
    tensor, row = hidden_row(reference, "hidden_out", "VERIFY")
    tensor[row, 1] = np.nan
    assert judge(scenario, engine, reference)[0].outcome is Outcome.FAIL


def test_rounding_is_within_the_budget(made):
    scenario, engine, reference = made
    for tensor in engine.tensors.values():
        tensor *= np.float32(1 + 2e-6)
    assert judge(scenario, engine, reference)[0].outcome is Outcome.PASS


def test_states_of_another_width_are_a_shape(made):
    scenario, engine, reference = made
    tensors = {**engine.tensors, "hidden_in.EXTEND": np.repeat(engine.tensors["hidden_in.EXTEND"], 3, axis=1)}
    ((signature, (count, cause)),) = seen(scenario, replace(engine, tensors=tensors), reference).items()
    assert signature == "SHAPE:extend:EXTEND:hidden_in-width"
    assert (count, cause) == (len(engine.tensors["hidden_in.EXTEND"]), None)


def test_state_recorded_for_some_rows_only_is_a_shape(made):
    scenario, engine, reference = made
    engine.rows.ints["hidden_in"][handmade.find(engine, phase="EXTEND")] = -1
    assert seen(scenario, engine, reference) == {"SHAPE:extend:EXTEND:hidden_in-absent": (1, None)}


@pytest.mark.parametrize(("column", "hint"), [("top_logits", "logits-off"), ("chosen_probs", "scores-off")])
@pytest.mark.parametrize("phase", ["VERIFY", "DRAFT"])
def test_wrong_logits_and_scores_are_numeric(made, column, hint, phase):
    scenario, engine, reference = made
    engine.rows.lists[column][handmade.find(engine, phase=phase, nth=3)][0] -= 0.02
    assert seen(scenario, engine, reference) == {f"NUMERIC:{CHECK_OF[phase]}:{phase}:{hint}": (1, None)}


def test_nan_among_logits_or_lse_fails(made):
    scenario, engine, reference = made
    engine.rows.lists["top_logits"][handmade.find(engine, phase="VERIFY", nth=3)][5] = np.nan
    engine.rows.floats["lse"][handmade.find(engine, phase="VERIFY", nth=7)] = np.nan
    assert {d.hint for d in judge(scenario, engine, reference)[1]} == {"logits-nan", "lse-off"}


def test_logits_are_compared_by_token_not_by_rank(made):
    scenario, engine, reference = made
    row = handmade.find(engine, phase="DRAFT", nth=3)
    for name in ("top_ids", "top_logits"):
        engine.rows.lists[name][row] = engine.rows.lists[name][row][::-1].copy()
    assert judge(scenario, engine, reference)[0].outcome is Outcome.PASS


def test_logits_without_a_common_token_fail(made):
    scenario, engine, reference = made
    engine.rows.lists["top_ids"][handmade.find(engine, phase="DRAFT", nth=3)] += 1000
    assert "NUMERIC:chain:DRAFT:logits-other-tokens" in seen(scenario, engine, reference)


def test_constant_scores_of_newer_releases_are_not_compared(made):
    scenario, engine, reference = made
    for probs in engine.rows.lists["chosen_probs"]:
        probs[:] = 1.0
    assert judge(scenario, engine, reference)[0].outcome is Outcome.PASS


def test_constant_scores_of_a_tree_are_wrong():
    scenario = handmade.scenario(t=2)
    engine, reference = handmade.build(scenario)
    engine.rows.lists["chosen_probs"][handmade.find(engine, phase="DRAFT")][:] = 1.0
    assert seen(scenario, engine, reference) == {"NUMERIC:chain:DRAFT:scores-off": (1, None)}


# token choices


def choose(engine, reference, phase, rank, *, margin=None):
    """Let one engine row choose the reference's candidate number `rank`; optionally bring that one close."""
    row = handmade.find(engine, phase=phase, nth=3, round=engine.rounds[-1].index)
    logits = reference.rows.lists["top_logits"][row]
    if margin is not None:
        logits[rank] = logits[0] - margin
        engine.rows.lists["top_logits"][row][:] = logits
    engine.rows.lists["chosen_ids"][row] = reference.rows.lists["top_ids"][row][[rank]].copy()
    return row


def test_other_choice_within_the_numerical_floor_is_a_recorded_tie(made):
    scenario, engine, reference = made
    choose(engine, reference, "VERIFY", 1, margin=1e-5)
    verdict, divergences = judge(scenario, engine, reference)
    assert verdict.ties == 1
    assert [d for d in divergences if d.policy is not Policy.EXACT] == []


@pytest.mark.parametrize(
    ("rank", "margin", "hint"),
    [(1, 0.5, "choice-runner-up"), (4, 2.0, "choice-in-top"), (None, float("inf"), "choice-outside-top")],
)
def test_other_choice_with_a_margin_is_a_token(made, rank, margin, hint):
    scenario, engine, reference = made
    row = choose(engine, reference, "VERIFY", rank or 0)
    if rank is None:
        engine.rows.lists["chosen_ids"][row][:] = 10_000
    found = next(d for d in judge(scenario, engine, reference)[1] if d.check == "verify")
    assert (found.kind, found.hint, found.key) == (Kind.TOKEN, hint, engine.rows.key(row))
    assert found.margin == pytest.approx(margin)


def test_row_that_proposes_nothing_is_a_shape(made):
    scenario, engine, reference = made
    engine.rows.lists["chosen_ids"][handmade.find(engine, phase="DRAFT", step=1)] = np.zeros(0, np.int64)
    assert "SHAPE:chain:DRAFT:number-of-choices" in seen(scenario, engine, reference)


def test_ties_everywhere_are_a_finding_of_their_own(made):
    scenario, engine, reference = made
    for row in np.flatnonzero(engine.rows.strings["phase"] == "VERIFY").tolist():
        for trace in (engine, reference):
            trace.rows.lists["top_logits"][row][1] = handmade.LOGITS[0] - 1e-6
        engine.rows.lists["chosen_ids"][row] = engine.rows.lists["top_ids"][row][[1]].copy()
    assert any(name.startswith("TOKEN:ties:VERIFY:tie-rate") for name in seen(scenario, engine, reference))


# integers against the reference


@pytest.mark.parametrize(
    ("phase", "column", "kind"),
    [("DRAFT", "position", "POSITION"), ("EXTEND", "input_id", "EXTEND_INPUT"), ("VERIFY", "input_id", "TOKEN")],
)
def test_what_an_invariant_and_the_reference_both_see_is_one_divergence(made, phase, column, kind):
    scenario, engine, reference = made
    row = handmade.find(engine, phase=phase, nth=3)
    engine.rows.ints[column][row] += 1
    found = [d for d in judge(scenario, engine, reference)[1] if (str(d.kind), d.key) == (kind, engine.rows.key(row))]
    assert len(found) == 1
    assert found[0].check in ("positions", "inputs")


def test_integer_that_only_the_reference_knows_is_exact(made):
    scenario, engine, reference = made
    reference.rows.ints["parent"][handmade.find(reference, phase="VERIFY", slot=3)] = 0
    assert seen(scenario, engine, reference) == {"PARENT:verify:VERIFY:reference-parent": (1, None)}


def test_row_that_only_the_reference_has_is_missing(made):
    scenario, engine, reference = made
    gone = handmade.find(engine, phase="DRAFT", nth=2)
    shorter = handmade.without_rows(engine, gone)
    found = [d for d in judge(scenario, shorter, reference)[1] if d.kind is Kind.MISSING_ROW]
    assert [d.key for d in found] == [engine.rows.key(gone)]


def test_request_that_the_reference_gave_up_is_unknown_not_extra(made):
    scenario, engine, reference = made
    last = engine.rounds[-1]
    rid, rows = last.rids[0], reference.rows
    gone = np.flatnonzero((rows.strings["rid"] == rid) & (rows.ints["round"] == last.index))
    data = {"rid": rid, "round": last.index, "why": "no tokens"}
    stopped = Event(name="reference_stopped", scheduler_step=0, data=data)
    shorter = handmade.without_rows(reference, *gone)
    assert judge(scenario, engine, shorter)[0].root_kinds == ("EXTRA_ROW",)
    verdict, divergences = judge(scenario, engine, replace(shorter, events=(*reference.events, stopped)))
    assert (verdict.outcome, divergences) == (Outcome.UNKNOWN, [])
    assert [reason for reason in verdict.reasons if rid in reason and "no tokens" in reason]


# losslessness


def with_greedy(reference, rid, **changes):
    events = [replace(e, data={**e.data, **changes}) if e.data["rid"] == rid else e for e in reference.events]
    return replace(reference, events=tuple(events))


def changed_text(made, place, margin):
    scenario, engine, reference = made
    output = list(engine.ends[0].output_ids)
    output[place] += 1
    margins = [0.5] * len(output)
    margins[place] = margin
    return scenario, engine, with_greedy(reference, engine.ends[0].rid, output_ids=output, margins=margins)


def test_text_that_differs_is_found_at_its_first_token(made):
    scenario, engine, reference = changed_text(made, 3, 0.5)
    (found,) = judge(scenario, engine, reference)[1]
    assert (found.check, found.hint, found.margin) == ("losslessness", "text-differs", 0.5)
    assert found.key.committed + 1 + found.key.slot == len(scenario.request(found.key.rid).input_ids) + 3


def test_text_that_parts_at_a_tie_is_a_tie(made):
    verdict, divergences = judge(*changed_text(made, 3, 1e-6))
    assert (divergences, verdict.ties, verdict.outcome) == ([], 1, Outcome.PASS)


def test_text_of_another_length_is_found_but_aborted_text_need_only_be_a_beginning(made):
    scenario, engine, reference = made
    end = engine.ends[0]
    longer = with_greedy(reference, end.rid, output_ids=[*end.output_ids, 5])
    assert [d.hint for d in judge(scenario, engine, longer)[1]] == ["text-length"]
    asked = scenario.model_copy(update={"script": (Op(kind="abort", rids=(end.rid,)), *scenario.script)})
    aborted = replace(engine, scenario_id=asked.id, ends=(replace(end, reason="abort"), *engine.ends[1:]))
    assert judge(asked, aborted, longer)[1] == []


def test_text_that_ran_past_its_stop_is_one_finding_and_its_length_follows_from_it(made):
    scenario, engine, reference = made
    end = engine.ends[0]
    stops = {"stop_token_ids": (end.output_ids[3],)}
    requests = tuple(r.model_copy(update=stops if r.rid == end.rid else {}) for r in scenario.requests)
    stopping = scenario.model_copy(update={"requests": requests})
    first = list(end.output_ids).index(end.output_ids[3])
    shorter = with_greedy(reference, end.rid, output_ids=list(end.output_ids[: first + 1]))
    past, length = judge(stopping, replace(engine, scenario_id=stopping.id), shorter)[1]
    assert (past.hint, length.hint, length.cause) == ("ran-past-stop", "text-length", past.signature)


def test_missing_greedy_run_is_said(made):
    scenario, engine, reference = made
    verdict, _ = judge(scenario, engine, replace(reference, events=()))
    assert any("losslessness of r0 not judged" in reason for reason in verdict.reasons)


# what follows from what


def test_draft_positions_one_ahead_explain_the_values_of_their_round(made):
    scenario, engine, reference = made
    drafts = engine.rows.strings["phase"] == "DRAFT"
    engine.rows.ints["position"][drafts] += 1
    engine.tensors["hidden_out.DRAFT"] += 0.2
    verdict, divergences = judge(scenario, engine, reference)
    assert verdict.root_kinds == ("POSITION",)
    assert verdict.kinds == ("NUMERIC", "POSITION")
    assert divergences[0].first
    assert divergences[0].hint == "one-ahead"
    assert sum(d.first for d in divergences) == 1


def test_wrong_chunk_tail_explains_later_draft_values_of_its_request_alone(made):
    scenario, engine, reference = made
    rid, start, length = next(
        (rid, start, length)
        for record in engine.rounds
        for rid, start, length, final in zip(record.rids, record.starts, record.lens, record.final, strict=True)
        if record.mode == "PREFILL" and not final
    )
    assert rid != "r0"
    row = handmade.find(engine, phase="DRAFT_PREFILL", rid=rid, committed=start, slot=length - 1)
    engine.rows.ints["input_id"][row] += 1
    for touched, kinds in ((rid, ("EXTEND_INPUT",)), ("r0", ("EXTEND_INPUT", "NUMERIC"))):
        later = handmade.find(engine, phase="DRAFT", rid=touched, nth=2)
        engine.tensors["hidden_out.DRAFT"][engine.rows.ints["hidden_out"][later]] += 0.2
        assert judge(scenario, engine, reference)[0].root_kinds == kinds


def test_draft_error_does_not_explain_a_target_error(made):
    scenario, engine, reference = made
    engine.rows.ints["position"][handmade.find(engine, phase="DRAFT")] += 1
    tensor, row = hidden_row(engine, "hidden_out", "VERIFY")
    tensor[row] += 0.2
    assert judge(scenario, engine, reference)[0].root_kinds == ("NUMERIC", "POSITION")
