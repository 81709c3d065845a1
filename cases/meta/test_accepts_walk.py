"""Check `walk`: what a verify commits is what its target's choices allow. Without a reference."""

from dataclasses import replace

import pytest

from cases.meta import handmade
from cases.meta.judged import roots, with_round
from harness.checks import CHECKS
from harness.checks.evidence import gather
from harness.checks.registry import run_check
from harness.contract.trace import Event


def accept_rows(engine, length):
    """ACCEPT rows of a share that committed `length` tokens in a round that is not its request's last."""
    for record in engine.rounds[:-2]:
        for rid, start, accepted in zip(record.rids, record.starts, record.lens, strict=True):
            if record.mode == "DECODE" and accepted == length:
                return [handmade.find(engine, phase="ACCEPT", rid=rid, committed=start, slot=s) for s in range(length)]
    raise AssertionError(f"no accept length {length}")


def test_one_token_too_many_or_too_few_is_found(sound):
    scenario, engine = sound
    more = handmade.with_row_again(engine, accept_rows(engine, 1)[0])
    more.rows.ints["slot"][-1] = 1
    assert ("ACCEPT", "walk", "ACCEPT", "too-many") in roots(scenario, more)
    less = handmade.without_rows(engine, accept_rows(engine, 4)[-1])
    assert ("ACCEPT", "walk", "ACCEPT", "too-few") in roots(scenario, less)


def cut_short(engine):
    """The engine's trace without the last token of its last walk, and whose walk that is."""
    last = engine.rounds[-1]
    rid, start, length = last.rids[0], last.starts[0], last.lens[0]
    assert length > 1
    place = {"rid": rid, "committed": start, "slot": length - 1}
    gone = [handmade.find(engine, phase=phase, **place) for phase in ("ACCEPT", "EXTEND")]
    cut = handmade.without_rows(engine, *gone)
    return with_round(cut, -1, lens=(length - 1, *last.lens[1:])), rid, start + length


def test_walk_may_be_cut_at_the_limit_though_the_answer_died_with_the_engine(sound):
    """A crash a scheduler step later leaves no RequestEnd; that the request was done is seen from its tokens."""
    scenario, engine = sound
    cut, rid, known = cut_short(engine)
    ends = tuple(end for end in cut.ends if end.rid != rid)
    cut = replace(cut, header={**cut.header, "truncates_at_finish": True}, ends=ends)

    def limited(tokens):
        limits = {"max_new_tokens": tokens}
        requests = tuple(one.model_copy(update=limits if one.rid == rid else {}) for one in scenario.requests)
        asked = scenario.model_copy(update={"requests": requests})
        return asked, replace(cut, scenario_id=asked.id)

    new = known - len(scenario.request(rid).input_ids)
    assert roots(*limited(new)) == {}
    assert ("ACCEPT", "walk", "ACCEPT", "too-few") in roots(*limited(new + 1))


def test_walk_may_be_cut_at_the_finish_only_where_the_release_says_so(sound):
    scenario, engine = sound
    cut, _, _ = cut_short(engine)
    assert ("ACCEPT", "walk", "ACCEPT", "too-few") in roots(scenario, cut)
    assert roots(scenario, replace(cut, header={**cut.header, "truncates_at_finish": True})) == {}


def test_wrong_token_and_wrong_parent_are_found(sound):
    scenario, engine = sound
    engine.rows.ints["parent"][accept_rows(engine, 4)[2]] = 0
    assert roots(scenario, engine) == {("PARENT", "walk", "ACCEPT", "accept-parent"): 1}
    engine.rows.ints["input_id"][accept_rows(engine, 4)[1]] += 1
    assert ("ACCEPT", "walk", "ACCEPT", "wrong-token") in roots(scenario, engine)


@pytest.mark.parametrize(("drawn", "equal", "found"), [(True, True, False), (True, False, True), (False, True, True)])
def test_equal_logits_are_a_tie_only_where_uniforms_decide_the_batch(sound, drawn, equal, found):
    scenario, engine = sound
    row = accept_rows(engine, 1)[0]
    key, number = engine.rows.key(row), int(engine.rows.ints["round"][row])
    root = handmade.find(engine, phase="VERIFY", rid=key.rid, committed=key.committed, slot=0)
    best, other = engine.rows.lists["top_ids"][root][:2]
    engine.rows.ints["input_id"][row] = other
    if equal:
        engine.rows.lists["top_logits"][root][1] = engine.rows.lists["top_logits"][root][0]
    uniforms = Event(
        name="uniforms", scheduler_step=0, data={"round": number, "uniforms": {}, "thresholds": (1.0, 1.0), "rule": ""}
    )
    engine = replace(engine, events=(*engine.events, uniforms) if drawn else engine.events)
    result = run_check(CHECKS["walk"], gather(scenario, engine, None))
    assert (key in [one.key for one in result.divergences if one.hint == "wrong-token"]) == found
    assert [(tie.expected, tie.observed) for tie in result.ties] == ([] if found else [(best, other)])
