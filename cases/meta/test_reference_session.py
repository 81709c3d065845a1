"""Replay and free running: faithful to the row contract, free of cascades, and unbreakable by a bad trace."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from cases.meta.handmade import asking
from cases.meta.sessions import (
    SPEC_IDS,
    SPECS,
    assert_replayed,
    assert_same_rows,
    by_key,
    edited,
    request_of,
    run,
    stopped,
)
from cases.meta.speculating import FreeSession
from harness.checks.evidence import gather
from harness.checks.inputs import check_inputs
from harness.contract.rows import RowBuilder
from harness.contract.settings import SpecConfig
from harness.contract.trace import RequestEnd, Trace


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_rows_keep_the_contract_of_positions_inputs_and_shapes(eagle_head, spec):
    _, request, trace = run(eagle_head, spec, seed=1, longest=30)
    first_chosen = [i for i in range(len(trace.rows)) if trace.rows.strings["phase"][i] == "PREFILL"][-1]
    full = [*request.input_ids, int(trace.rows.lists["chosen_ids"][first_chosen][0])]
    by = by_key(trace)
    full += [int(trace.rows.ints["input_id"][i]) for key, i in by.items() if key.phase == "ACCEPT"]
    seen = set()
    for key, i in by.items():
        row = {name: int(column[i]) for name, column in trace.rows.ints.items()}
        seen.add(key.phase)
        assert row["cache_slot"] == -1
        if key.phase == "PREFILL":
            assert (row["position"], row["input_id"]) == (key.committed + key.slot, full[key.committed + key.slot])
        elif key.phase in ("DRAFT_PREFILL", "EXTEND"):
            assert row["position"] == key.committed + key.slot
            assert row["input_id"] == full[row["position"] + 1]
            last = replace(key, slot=key.slot + 1) not in by
            assert (row["hidden_out"] >= 0) == last, "only a forward's last row speaks"
            assert len(trace.rows.lists["chosen_ids"][i]) == (spec.eagle_topk if last else 0)
        elif key.phase == "DRAFT":
            assert row["position"] == key.committed + key.step
            assert len(trace.rows.lists["chosen_ids"][i]) == len(trace.rows.lists["chosen_probs"][i]) == spec.eagle_topk
        elif key.phase == "VERIFY" and key.slot == 0:
            assert (row["position"], row["parent"]) == (key.committed, -1)
            assert row["input_id"] == full[key.committed]
        elif key.phase == "ACCEPT":
            assert row["position"] == -1
            assert row["input_id"] == full[key.committed + 1 + key.slot]
    assert seen == {"PREFILL", "DRAFT_PREFILL", "VERIFY", "ACCEPT", "EXTEND"} | (
        {"DRAFT"} if spec.num_steps > 1 else set()
    )
    for record in (record for record in trace.rounds if record.mode == "DECODE"):
        counts = dict.fromkeys(("DRAFT", "VERIFY", "ACCEPT", "EXTEND"), 0)
        for key in by:
            if key.committed == record.starts[0] and key.phase in counts:
                counts[key.phase] += 1
        expected = (spec.eagle_topk * (spec.num_steps - 1), spec.num_draft_tokens, record.lens[0], record.lens[0])
        assert tuple(counts.values()) == expected


def test_hidden_states_link_the_phases(eagle_head):
    """What the target said of a token is what the draft is handed for it, in a chunk and after a verify."""
    _, _, trace = run(eagle_head, SPECS[2], seed=2)
    by = by_key(trace)

    def hidden(name, i):
        return trace.tensors[f"{name}.{trace.rows.strings['phase'][i]}"][trace.rows.ints[name][i]]

    for key, i in by.items():
        if key.phase == "DRAFT_PREFILL":
            source = by[replace(key, phase="PREFILL")]
        elif key.phase == "EXTEND":
            node = int(trace.rows.ints["parent"][by[replace(key, phase="ACCEPT")]])
            source = by[replace(key, phase="VERIFY", slot=node)]
        else:
            continue
        np.testing.assert_allclose(hidden("hidden_in", i), hidden("hidden_out", source), atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_replaying_its_own_speculation_gives_the_same_rows(eagle_head, spec):
    for seed in range(3):
        session, request, trace = run(eagle_head, spec, seed=seed)
        assert_replayed(session, [request], trace)


def test_replay_reads_no_positions_hidden_states_logits_or_slots(eagle_head):
    spec = SPECS[2]
    session, request, trace = run(eagle_head, spec)

    def spoil(rows, i, values):
        values |= {"position": 77, "cache_slot": 5, "hidden_in": 3, "hidden_out": 2, "lse": 1.0, "committed": 0}
        values |= {"top_ids": [1], "top_logits": [9.0], "chosen_probs": [0.5]}

    spoiled = replace(edited(trace, change=spoil), tensors={})
    assert_same_rows(session.replay(asking(request, spec=spec), spoiled), trace)


def test_one_odd_proposal_is_one_difference_and_no_cascade(eagle_head):
    """An engine that proposes a second-best token once, and goes on from it, differs in that row's choice alone."""
    spec, odd = SPECS[0], 3
    session, request, trace = run(eagle_head, spec, seed=3, new=20)
    c = [record.starts[0] for record in trace.rounds if record.mode == "DECODE"][1]

    def propose(rows, i, values):
        phase, step = values["phase"], values["step"]
        if values["committed"] == c and phase == "DRAFT" and step == 0:
            values["chosen_ids"] = [odd]
        if values["committed"] == c and ((phase, step) == ("DRAFT", 1) or (phase, values["slot"]) == ("VERIFY", 2)):
            values["input_id"] = odd

    engine = edited(trace, change=propose)
    replayed = session.replay(asking(request, spec=spec), engine)
    theirs, mine = by_key(engine), by_key(replayed)
    different = {
        (key.phase, key.step, name)
        for key in theirs.keys() & mine.keys()
        for name in ("input_id", "position", "parent")
        if engine.rows.ints[name][theirs[key]] != replayed.rows.ints[name][mine[key]]
    }
    assert different == set(), "inputs follow from what was proposed"
    chosen = {
        (key.committed, key.phase, key.step)
        for key in theirs.keys() & mine.keys()
        if key.phase == "DRAFT"
        and list(engine.rows.lists["chosen_ids"][theirs[key]]) != list(replayed.rows.lists["chosen_ids"][mine[key]])
    }
    assert (c, "DRAFT", 0) in chosen
    assert all(entry[0] == c for entry in chosen), "no other round is touched"


def second_round(trace):
    """The second decode round's committed length, and the last row of the round before, by slot."""
    first, second = [record for record in trace.rounds if record.mode == "DECODE"][:2]
    return second.starts[0], first.starts[0], first.lens[0] - 1


def test_first_proposals_are_taken_from_the_round_before(eagle_head):
    """What an engine proposed after its last verify is what its next round must feed and verify."""
    spec, odd = SPECS[2], (3, 301, 77)
    session, request, trace = run(eagle_head, spec, seed=3, new=20)
    c, before, slot = second_round(trace)

    def propose(rows, i, values):
        if (values["phase"], values["committed"], values["slot"]) == ("EXTEND", before, slot):
            values["chosen_ids"] = list(odd)

    replayed = session.replay(asking(request, spec=spec), edited(trace, change=propose))
    by = by_key(replayed)
    (root,) = [key for key in by if key.committed == c and key.phase == "VERIFY" and key.slot == 0]
    fed = {
        int(replayed.rows.ints["input_id"][by[replace(root, phase="DRAFT", slot=s)]]) for s in range(spec.eagle_topk)
    }
    assert fed == set(odd)
    (last,) = [key for key in by if (key.phase, key.committed, key.slot) == ("EXTEND", before, slot)]
    assert tuple(replayed.rows.lists["chosen_ids"][by[last]]) != odd, "the reference keeps its own opinion"


def test_a_wrong_tree_node_is_named_and_its_answer_is_still_comparable(eagle_head):
    """The node should have been another token, but target outputs answer what the engine really verified."""
    spec, odd = SPECS[0], 3
    session, request, trace = run(eagle_head, spec, seed=3, new=20)
    c, _, _ = second_round(trace)

    def misplace(rows, i, values):
        if (values["phase"], values["committed"], values["slot"]) == ("VERIFY", c, 2):
            values["input_id"] = odd

    replayed = session.replay(asking(request, spec=spec), edited(trace, change=misplace))
    right, mine = by_key(trace), by_key(replayed)
    (key,) = [key for key in mine if (key.phase, key.committed, key.slot) == ("VERIFY", c, 2)]
    assert replayed.rows.ints["input_id"][mine[key]] == trace.rows.ints["input_id"][right[key]] != odd
    root, first = (int(trace.rows.ints["input_id"][right[replace(key, slot=s)]]) for s in (0, 1))
    text = [*request.input_ids, *trace.ends[0].output_ids][:c]
    alone = eagle_head.target.forward(torch.tensor([*text, root, first, odd]))[-1]
    row = replayed.rows.ints["hidden_out"][mine[key]]
    np.testing.assert_allclose(replayed.tensors["hidden_out.VERIFY"][row], alone, atol=1e-4)


def test_the_walk_follows_the_engines_own_choices(eagle_head):
    """A target choice that went the other way in a tie is judged in its VERIFY row and not again in the walk."""
    spec, odd = SPECS[0], 3
    session, request, trace = run(eagle_head, spec, seed=3, new=20)
    c, _, _ = second_round(trace)

    def choose(rows, i, values):
        if (values["phase"], values["committed"], values["slot"]) == ("VERIFY", c, 0):
            values["chosen_ids"] = [odd]

    replayed = session.replay(asking(request, spec=spec), edited(trace, change=choose))
    walked = [i for key, i in by_key(replayed).items() if (key.phase, key.committed) == ("ACCEPT", c)]
    assert [int(replayed.rows.ints["input_id"][i]) for i in walked] == [odd]
    (root,) = [i for key, i in by_key(replayed).items() if (key.phase, key.committed, key.slot) == ("VERIFY", c, 0)]
    assert list(replayed.rows.lists["chosen_ids"][root]) != [odd]


def merged(*traces):
    """Traces of different requests as one engine would have recorded them, rounds made distinct."""
    builder, rounds, ends, tensors = RowBuilder(), [], [], {}
    for trace in traces:
        base, shift = len(rounds), {name: len(tensors.get(name, ())) for name in trace.tensors}
        for i in range(len(trace.rows)):
            groups = (trace.rows.ints, trace.rows.strings, trace.rows.floats, trace.rows.lists)
            values = {name: column[i] for group in groups for name, column in group.items()}
            for name in ("hidden_in", "hidden_out"):
                if values[name] >= 0:
                    values[name] += shift[f"{name}.{values['phase']}"]
            builder.add(**values | {"round": values["round"] + base, "scheduler_step": values["scheduler_step"] + base})
        for name, tensor in trace.tensors.items():
            tensors[name] = np.concatenate([tensors[name], tensor]) if name in tensors else tensor
        rounds += [
            replace(record, index=record.index + base, scheduler_step=record.scheduler_step + base)
            for record in trace.rounds
        ]
        ends += trace.ends
    return Trace(
        side="engine",
        scenario_id="x",
        header={},
        rows=builder.build(),
        rounds=tuple(rounds),
        ends=tuple(ends),
        tensors=tensors,
    )


def two_requests(head, spec):
    session, rng = FreeSession(head.target, head, spec), random.Random(8)
    requests = [request_of(rng, rid=rid) for rid in ("a", "b")]
    engine = merged(*(session.speculate(request, chunk=9) for request in requests))
    return session, asking(*requests, spec=spec), engine


def test_requests_are_replayed_each_as_if_alone(eagle_head):
    session, scenario, engine = two_requests(eagle_head, SPECS[2])
    assert_same_rows(session.replay(scenario, engine), engine)


def test_a_request_with_unknown_tokens_stops_and_the_others_go_on(eagle_head):
    session, scenario, engine = two_requests(eagle_head, SPECS[0])
    decodes = [record for record in engine.rounds if record.mode == "DECODE" and record.rids == ("a",)]
    lost = decodes[1]
    broken = edited(
        engine, keep=lambda rows, i: not (rows.strings["phase"][i] == "ACCEPT" and rows.ints["round"][i] == lost.index)
    )
    replayed = session.replay(scenario, broken)
    (event,) = stopped(replayed)
    assert event.name == "reference_stopped"
    assert (event.data["rid"], event.data["round"]) == ("a", lost.index)
    assert "committed" in event.data["why"]
    full, kept = by_key(engine), by_key(replayed)
    assert {key for key in kept if key.rid == "b"} == {key for key in full if key.rid == "b"}
    rounds = {int(replayed.rows.ints["round"][i]) for key, i in kept.items() if key.rid == "a"}
    assert max(rounds) == lost.index, "what the round itself needs is still derived"
    phases = {key.phase for key in kept if key.committed == lost.starts[0] and key.rid == "a"}
    assert phases >= {"DRAFT", "VERIFY", "ACCEPT"}
    assert not any(key.phase == "EXTEND" and key.committed == lost.starts[0] and key.rid == "a" for key in kept)


def test_no_damage_to_a_trace_breaks_the_reference(eagle_head):
    session, scenario, engine = two_requests(eagle_head, SPECS[2])
    rng = random.Random(11)
    fields = ("input_id", "parent", "slot", "step", "round")
    for _ in range(40):
        share = rng.choice([0.02, 0.2, 0.9])

        def spoil(rows, i, values, share=share):
            if rng.random() < share:
                values[rng.choice(fields)] = rng.choice([-7, -1, 0, 1, 5, 600, 10**9])
            if rng.random() < share:
                values["chosen_ids"] = [rng.choice([-3, 4, 4, 9999]) for _ in range(rng.randint(0, 4))]

        broken = edited(engine, keep=lambda rows, i, share=share: rng.random() > share / 4, change=spoil)
        rounds = list(broken.rounds)
        for index in range(len(rounds)):
            if rng.random() < share / 4:
                rounds[index] = replace(
                    rounds[index],
                    starts=(rng.randint(-2, 60),),
                    lens=(rng.randint(-2, 60),),
                    final=(rng.random() < 0.5,),
                    mode=rng.choice(["PREFILL", "DECODE", "IDLE", "PREBUILT"]),
                )
        session.replay(scenario, replace(broken, rounds=tuple(rounds)))


def until(trace, last):
    """The trace up to round `last`, in which nothing ends."""
    first = edited(trace, keep=lambda rows, i: rows.ints["round"][i] <= last)
    return replace(first, rounds=trace.rounds[: last + 1], ends=())


def as_attempt(trace, number):
    """The trace of a request that was retracted so many times before."""
    again = edited(trace, change=lambda rows, i, values: values.update(attempt=number))
    return replace(again, rounds=tuple(replace(record, attempts=(number,)) for record in trace.rounds))


def retracted(eagle_head, lost):
    """(session, request, engine, cut): a request that starts again behind round `cut`. lost: 1 where its verify was in
    flight."""
    spec = SPECS[0]
    session, request, before = run(eagle_head, spec, seed=4, new=20)
    decodes = [record for record in before.rounds if record.mode == "DECODE"]
    cut = decodes[2]
    known = decodes[3 - lost].starts[0] + 1
    text = [*request.input_ids, *before.ends[0].output_ids][:known]
    left = 20 - (known - len(request.input_ids))
    again = request.model_copy(update={"input_ids": tuple(text), "max_new_tokens": left})
    second = session.speculate(again, chunk=6)
    return session, request, merged(until(before, cut.index), as_attempt(second, 1)), cut


@pytest.mark.parametrize("lost", [0, 1])  # 1: retracted while the verify of its last round was in flight
def test_a_retracted_request_starts_again_from_everything_it_has(eagle_head, lost):
    session, request, engine, _ = retracted(eagle_head, lost)
    assert_replayed(session, [request], engine)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_retracted_request_never_got_may_be_another_token(eagle_head, lost):
    """The verify in flight is verified anew, in another batch or by other uniforms; one whose tokens count is not."""
    _, request, engine, cut = retracted(eagle_head, lost)

    def other(rows, i, values):
        at = rows.ints["round"][i], rows.ints["attempt"][i], rows.strings["phase"][i]
        if at == (cut.index, 0, "ACCEPT"):
            values["input_id"] = (int(rows.ints["input_id"][i]) + 1) % 512

    whole = replace(edited(engine, change=other), ends=run(eagle_head, SPECS[0], seed=4, new=20)[2].ends)
    found = check_inputs(gather(asking(request, spec=SPECS[0]), whole, None))
    assert any(one.hint == "output-differs" for one in found.divergences) is not bool(lost)


def test_a_request_retracted_while_the_end_of_its_prompt_is_in_flight_starts_again_without_its_first_token(eagle_head):
    session, request, before = run(eagle_head, SPECS[0], seed=4, new=20)
    cut = [record for record in before.rounds if record.mode == "PREFILL"][-1]
    again = as_attempt(session.speculate(request, chunk=6), 1)
    assert_replayed(session, [request], merged(until(before, cut.index), again))


def test_one_that_is_retracted_again_inside_its_prompt_starts_without_its_first_token_too(eagle_head):
    session, request, _ = run(eagle_head, SPECS[0], seed=4, new=20)
    whole = session.speculate(request, chunk=6)
    prompt = [record.index for record in whole.rounds if record.mode == "PREFILL"]
    assert len(prompt) > 1
    cut_off = [as_attempt(until(whole, last), attempt) for attempt, last in enumerate((prompt[-1], prompt[0]))]
    engine = merged(*cut_off, as_attempt(whole, 2))
    assert_replayed(session, [request], engine)
    lost = gather(asking(request, spec=SPECS[0]), engine, None).lost
    assert lost == {(request.rid, 0): {len(request.input_ids): whole.ends[0].output_ids[0]}}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_request_taken_back_by_a_decode_side_goes_on_from_what_it_has(eagle_head, lost):
    spec = SPECS[0]
    session, request, before = run(eagle_head, spec, seed=4, new=20)
    decodes = [record for record in before.rounds if record.mode == "DECODE"]
    cut, known = decodes[2], decodes[3 - lost].starts[0] + 1
    text = [*request.input_ids, *before.ends[0].output_ids][:known]
    left = 20 - (known - 1 - len(request.input_ids))
    second = session.speculate(request.model_copy(update={"input_ids": tuple(text[:-1]), "max_new_tokens": left}))
    prompt = second.rounds[0]
    assert prompt.mode == "PREFILL"
    handed = replace(prompt, mode="PREBUILT", starts=(known - 1,), lens=(0,), forwards={})
    second = edited(second, keep=lambda rows, i: rows.ints["round"][i] > prompt.index)
    second = as_attempt(replace(second, rounds=(handed, *second.rounds[1:])), 1)
    engine = merged(until(before, cut.index), second)
    replayed = session.replay(asking(request, spec=spec), engine)
    assert not stopped(replayed)
    assert_same_rows(edited(replayed, keep=lambda rows, i: rows.strings["phase"][i] != "PREBUILT"), engine)
    assert sum(rows == "PREBUILT" for rows in replayed.rows.strings["phase"]) == known - 1


def test_a_cached_prefix_is_not_expected_again(eagle_head):
    spec = SPECS[0]
    session, request, trace = run(eagle_head, spec, seed=5, longest=40)
    assert len(request.input_ids) > 14
    cached = edited(trace, keep=lambda rows, i: rows.ints["round"][i] >= 2)
    cached = replace(cached, rounds=trace.rounds[2:])
    assert cached.rounds[0].starts == (14,)
    assert_replayed(session, [request], cached)


def test_proposals_nobody_needs_are_expected_only_where_the_engine_made_them(eagle_head):
    spec = SPECS[0]
    session, request, trace = run(eagle_head, spec, seed=6)
    last = trace.rounds[-1].index
    short = edited(
        trace, keep=lambda rows, i: not (rows.strings["phase"][i] == "EXTEND" and rows.ints["round"][i] == last)
    )
    assert_replayed(session, [request], short)
    running = replace(short, ends=())
    replayed = session.replay(asking(request, spec=spec), running)
    missing = by_key(replayed).keys() - by_key(running).keys()
    assert {key.phase for key in missing} == {"EXTEND"}, "a request that goes on does need them"


def test_tensor_parallel_ranks_are_one_round(eagle_head):
    spec = SPECS[0]
    session, request, trace = run(eagle_head, spec, seed=7)
    twice = tuple(replace(record, tp_rank=rank) for record in trace.rounds for rank in (1, 0))
    assert_same_rows(session.replay(asking(request, spec=spec), replace(trace, rounds=twice)), trace)


def test_an_aborted_request_is_replayed_as_far_as_it_got(eagle_head):
    session, request, trace = run(eagle_head, SPECS[0], seed=5, longest=40)
    ended = (RequestEnd(rid=request.rid, scheduler_step=1, reason="abort", output_ids=()),)
    assert_replayed(session, [request], replace(until(trace, 1), ends=ended))


def test_an_algorithm_the_head_is_not_made_for_is_refused(eagle_head):
    with pytest.raises(ValueError, match="algorithm is 'EAGLE3'; the head is made for 'EAGLE'"):
        FreeSession(eagle_head.target, eagle_head, SpecConfig(algorithm="EAGLE3"))


def test_a_text_that_was_just_replayed_is_confirmed_without_another_forward(eagle_head, monkeypatch):
    session, request, trace = run(eagle_head, SPECS[0])
    text = trace.ends[0].output_ids
    alone = session.confirm(request.input_ids, text)
    session.replay(asking(request, spec=SPECS[0]), trace)
    monkeypatch.setattr(eagle_head.target, "read", lambda *_, **__: pytest.fail("a text was read again"))
    confirmed = session.confirm(request.input_ids, text)
    assert confirmed.tokens == alone.tokens == text
    assert confirmed.margins == pytest.approx(alone.margins, abs=1e-4)
    assert session.confirm(request.input_ids[:-1], (request.input_ids[-1],)) is None
