"""Checks without a reference: each passes the hand-made trace and fails it once one field is broken."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.meta.judged import roots, with_round
from harness.checks import judge
from harness.checks.reads import NOT_RECORDED
from harness.contract.types import Kind, Outcome


@pytest.fixture
def made():
    scenario = handmade.scenario()
    engine, _ = handmade.build(scenario)
    return scenario, engine


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
    scenario, engine = made
    verdict, _ = judge(scenario, engine, handmade.build(scenario)[1])
    wanted = "positions tokens proposals accepts extend_inputs cache_slots parents hidden_rows logits"
    assert set(verdict.compared) == set(wanted.split())
    assert verdict.compared["accepts"] == int((engine.rows.strings["phase"] == "ACCEPT").sum())


# positions


@pytest.mark.parametrize("phase", ["PREFILL", "DRAFT_PREFILL", "DRAFT", "VERIFY", "EXTEND"])
@pytest.mark.parametrize(("offset", "hint"), [(1, "one-ahead"), (-1, "one-behind"), (5, "ahead"), (-3, "behind")])
def test_shifted_position_is_found_in_every_phase(made, phase, offset, hint):
    scenario, engine = made
    engine.rows.ints["position"][handmade.find(engine, phase=phase, nth=4)] += offset
    assert roots(scenario, engine) == {("POSITION", "positions", phase, hint): 1}


def test_siblings_of_a_tree_share_their_position():
    scenario = handmade.scenario(t=2)
    engine, _ = handmade.build(scenario)
    second_child = handmade.find(engine, phase="VERIFY", slot=2)
    engine.rows.ints["position"][second_child] += 1  # as if nodes were numbered, not nested
    assert list(roots(scenario, engine)) == [("POSITION", "positions", "VERIFY", "one-ahead")]


@pytest.mark.parametrize(
    ("slot", "parent", "hint"),
    [(0, 2, "root-has-parent"), (2, -1, "second-root"), (2, 99, "no-such-node"), (2, 2, "no-way-to-root")],
)
def test_broken_tree_is_named(made, slot, parent, hint):
    scenario, engine = made
    engine.rows.ints["parent"][handmade.find(engine, phase="VERIFY", slot=slot)] = parent
    assert ("PARENT", "positions", "VERIFY", hint) in roots(scenario, engine)


# inputs


def tail(scenario, engine, *, final):
    """(DRAFT_PREFILL row, PREFILL row) at the end of the first chunk that does or does not end its prompt."""
    for record in engine.rounds:
        for rid, start, length, ends in zip(record.rids, record.starts, record.lens, record.final, strict=True):
            if record.mode == "PREFILL" and ends is final:
                place = {"rid": rid, "committed": start, "slot": length - 1}
                rows = [handmade.find(engine, phase=phase, **place) for phase in ("DRAFT_PREFILL", "PREFILL")]
                return rows[0], rows[1]
    raise AssertionError("the scenario has no such chunk")


@pytest.mark.parametrize(
    ("final", "hint"), [(False, "chunk-tail-target-guess"), (False, "chunk-tail"), (True, "final-tail")]
)
def test_wrong_last_token_of_a_chunk_is_named_by_what_it_is(made, final, hint):
    scenario, engine = made
    row, target = tail(scenario, engine, final=final)
    inputs, guess = engine.rows.ints["input_id"], engine.rows.lists["chosen_ids"][target][0]
    right = inputs[row]
    inputs[row] = guess if hint.endswith("guess") else next(t for t in range(3) if t not in (guess, right))
    assert roots(scenario, engine) == {("EXTEND_INPUT", "inputs", "DRAFT_PREFILL", hint): 1}


def test_inputs_that_were_not_rotated_are_named_so(made):
    scenario, engine = made
    row = handmade.find(engine, phase="DRAFT_PREFILL", rid="r2", nth=1)
    prompt, slot = scenario.request("r2").input_ids, int(engine.rows.ints["slot"][row])
    start = int(engine.rows.ints["committed"][row])
    engine.rows.ints["input_id"][row] = prompt[start + slot]
    assert roots(scenario, engine) == {("EXTEND_INPUT", "inputs", "DRAFT_PREFILL", "not-rotated"): 1}


def test_extend_reads_the_committed_tokens(made):
    scenario, engine = made
    engine.rows.ints["input_id"][handmade.find(engine, phase="EXTEND")] += 1
    assert next(iter(roots(scenario, engine)))[:3] == ("EXTEND_INPUT", "inputs", "EXTEND")


@pytest.mark.parametrize(
    ("phase", "where", "hint"),
    [
        ("PREFILL", {}, "not-the-text"),
        ("DRAFT", {"step": 0}, "not-the-first-proposal"),
        ("DRAFT", {"step": 1}, "not-the-last-choice"),
        ("VERIFY", {"slot": 0}, "root-is-not-last-committed"),
        ("VERIFY", {"slot": 3}, "not-the-proposal"),
    ],
)
def test_wrong_input_token_is_found(made, phase, where, hint):
    scenario, engine = made
    row = handmade.find(engine, phase=phase, **where)
    engine.rows.ints["input_id"][row] = handmade.VOCAB + 1
    assert roots(scenario, engine)["TOKEN", "inputs", phase, hint] == 1


def test_of_a_prompt_that_came_as_embeddings_only_the_draft_reads_ids(made):
    scenario, engine = made
    requests = tuple(one.model_copy(update={"input_embeds": one.rid == "r2"}) for one in scenario.requests)
    embedded = scenario.model_copy(update={"requests": requests})
    for phase, found in (("PREFILL", {}), ("DRAFT_PREFILL", {("EXTEND_INPUT", "inputs", "DRAFT_PREFILL", "row"): 1})):
        row = handmade.find(engine, phase=phase, rid="r2", slot=0)
        engine.rows.ints["input_id"][row] = handmade.VOCAB + 1
        assert roots(embedded, engine) == found
    assert ("TOKEN", "inputs", "PREFILL", "not-the-text") in roots(scenario, engine)


def test_beam_input_must_come_from_its_parent_beam():
    scenario = handmade.scenario(t=2)
    engine, _ = handmade.build(scenario)
    row = handmade.find(engine, phase="DRAFT", step=1, slot=1)
    engine.rows.ints["parent"][row] = -1  # a probe that does not know beams still catches foreign tokens
    assert not roots(scenario, engine)
    engine.rows.ints["input_id"][row] = handmade.VOCAB + 1
    assert ("TOKEN", "inputs", "DRAFT", "not-the-last-choice") in roots(scenario, engine)


def test_committed_tokens_are_the_reported_output(made):
    scenario, engine = made
    end = engine.ends[0]
    broken = replace(end, output_ids=(end.output_ids[0], end.output_ids[1] + 1, *end.output_ids[2:]))
    engine = replace(engine, ends=(broken, *engine.ends[1:]))
    assert ("TOKEN", "inputs", "ACCEPT", "output-differs") in roots(scenario, engine)


# rounds


@pytest.mark.parametrize("phase", ["PREFILL", "DRAFT_PREFILL", "DRAFT", "VERIFY", "ACCEPT", "EXTEND"])
def test_missing_row_is_found_in_every_phase(made, phase):
    scenario, engine = made
    gone = handmade.find(engine, phase=phase, nth=3)
    _, divergences = judge(scenario, handmade.without_rows(engine, gone), None)
    assert (Kind.MISSING_ROW, engine.rows.key(gone)) in [(found.kind, found.key) for found in divergences]


@pytest.mark.parametrize("phase", ["PREFILL", "DRAFT", "VERIFY", "EXTEND"])
def test_repeated_row_is_extra_and_nothing_else(made, phase):
    scenario, engine = made
    twice = handmade.with_row_again(engine, handmade.find(engine, phase=phase, nth=2))
    assert roots(scenario, twice) == {("EXTRA_ROW", "rounds", phase, "twice"): 1}


def test_row_of_no_batch_is_extra(made):
    scenario, engine = made
    engine.rows.ints["committed"][handmade.find(engine, phase="EXTEND")] = 500
    assert ("EXTRA_ROW", "rounds", "EXTEND", "no-batch") in roots(scenario, engine)


def test_a_finished_request_may_leave_out_its_last_extend_but_only_all_of_it(made):
    scenario, engine = made
    last = engine.rounds[-1]
    wanted = (last.rids[0], last.starts[0], "EXTEND")
    keys = [engine.rows.key(row) for row in range(len(engine.rows))]
    dropped = [r for r, key in enumerate(keys) if (key.rid, key.committed, key.phase) == wanted]
    verdict, divergences = judge(scenario, handmade.without_rows(engine, *dropped), handmade.build(scenario)[1])
    assert (verdict.outcome, divergences) == (Outcome.PASS, [])
    assert len(dropped) > 1
    assert judge(scenario, handmade.without_rows(engine, *dropped[1:]), None)[0].outcome is Outcome.FAIL


def test_final_flag_must_say_where_the_prompt_ends(made):
    scenario, engine = made
    flags = tuple(not flag for flag in engine.rounds[0].final)
    assert ("SHAPE", "rounds", "PREFILL", "final-flag") in roots(scenario, with_round(engine, 0, final=flags))


def test_committed_length_must_follow_from_accepted(made):
    scenario, engine = made
    number = next(record.index for record in engine.rounds if record.mode == "DECODE")
    starts = tuple(start + 1 for start in engine.rounds[number].starts)
    hints = {name[3] for name in roots(scenario, with_round(engine, number, starts=starts))}
    assert {"committed-gap", "committed-overlap"} <= hints


def test_start_past_zero_needs_a_prefix_cache():
    scenario = handmade.scenario(prompts=(6,), radix_cache=False)
    engine, _ = handmade.build(scenario)
    broken = with_round(engine, 0, starts=(2,), lens=(4,))
    assert ("SHAPE", "rounds", "PREFILL", "start-without-prefix-cache") in roots(scenario, broken)
