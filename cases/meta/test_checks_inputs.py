"""Check `inputs`: every row reads the token that it must. Without a reference."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.meta.judged import roots


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
def test_wrong_last_token_of_a_chunk_is_named_by_what_it_is(sound, final, hint):
    scenario, engine = sound
    row, target = tail(scenario, engine, final=final)
    inputs, guess = engine.rows.ints["input_id"], engine.rows.lists["chosen_ids"][target][0]
    right = inputs[row]
    inputs[row] = guess if hint.endswith("guess") else next(t for t in range(3) if t not in (guess, right))
    assert roots(scenario, engine) == {("EXTEND_INPUT", "inputs", "DRAFT_PREFILL", hint): 1}


def test_inputs_that_were_not_rotated_are_named_so(sound):
    scenario, engine = sound
    row = handmade.find(engine, phase="DRAFT_PREFILL", rid="r2", nth=1)
    prompt, slot = scenario.request("r2").input_ids, int(engine.rows.ints["slot"][row])
    start = int(engine.rows.ints["committed"][row])
    engine.rows.ints["input_id"][row] = prompt[start + slot]
    assert roots(scenario, engine) == {("EXTEND_INPUT", "inputs", "DRAFT_PREFILL", "not-rotated"): 1}


def test_extend_reads_the_committed_tokens(sound):
    scenario, engine = sound
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
def test_wrong_input_token_is_found(sound, phase, where, hint):
    scenario, engine = sound
    row = handmade.find(engine, phase=phase, **where)
    engine.rows.ints["input_id"][row] = handmade.VOCAB + 1
    assert roots(scenario, engine)["TOKEN", "inputs", phase, hint] == 1


def test_of_a_prompt_that_came_as_embeddings_only_the_draft_reads_ids(sound):
    scenario, engine = sound
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


def test_committed_tokens_are_the_reported_output(sound):
    scenario, engine = sound
    end = engine.ends[0]
    broken = replace(end, output_ids=(end.output_ids[0], end.output_ids[1] + 1, *end.output_ids[2:]))
    engine = replace(engine, ends=(broken, *engine.ends[1:]))
    assert ("TOKEN", "inputs", "ACCEPT", "output-differs") in roots(scenario, engine)
