"""A number of steps that changes from round to round: the reference follows each round's own, and so do the checks."""

import random
from dataclasses import replace
from itertools import cycle

import pytest
from pydantic import ValidationError

from cases.boots import BY_NAME
from cases.meta import handmade
from cases.meta.handmade import asking
from cases.meta.judged import roots, with_round
from cases.meta.sessions import assert_replayed, request_of
from cases.meta.speculating import FreeSession
from harness.checks import judge
from harness.contract.settings import SpecConfig

ADAPTIVE = BY_NAME["adaptive"].spec


class Changing(FreeSession):
    """Speculates freely with another number of steps in every round."""

    def __init__(self, *args, steps):
        super().__init__(*args)
        self.steps = cycle(steps)

    def _part(self, request, index, mode, start, length):
        part = super()._part(request, index, mode, start, length)
        if mode != "DECODE":
            return part
        count = next(self.steps) if not length else self.last
        self.last = count
        return replace(part, record=replace(part.record, num_steps=count))


def test_each_round_has_rows_of_its_own_number_of_steps_and_the_text_is_the_same(eagle_head):
    session = Changing(eagle_head.target, eagle_head, ADAPTIVE, steps=(3, 0, 1, 5))
    request = request_of(random.Random(4), new=16)
    free = session.speculate(request, chunk=7)
    assert list(free.ends[0].output_ids) == session.generate(request.input_ids, 16)
    rounds = [record for record in free.rounds if record.mode == "DECODE"]
    assert {record.num_steps for record in rounds} == {0, 1, 3, 5}
    for record in rounds:
        mine = (free.rows.ints["round"] == record.index) & (free.rows.ints["committed"] == record.starts[0])
        rows = {phase: int((mine & (free.rows.strings["phase"] == phase)).sum()) for phase in ("DRAFT", "VERIFY")}
        assert rows == {"DRAFT": max(0, record.num_steps - 1), "VERIFY": record.num_steps + 1}
        assert 1 <= record.lens[0] <= record.num_steps + 1
    assert_replayed(session, [request], free)


@pytest.mark.parametrize(("steps", "found"), [(3, False), (4, True), (-1, True)])
def test_a_number_of_steps_that_is_no_candidate_is_found(steps, found):
    scenario = handmade.scenario()
    engine, _ = handmade.build(scenario)
    for record in engine.rounds:
        if record.mode == "DECODE":
            engine = with_round(engine, record.index, num_steps=3)
    number = next(record.index for record in engine.rounds if record.mode == "DECODE")
    engine = with_round(engine, number, num_steps=steps)
    adaptive = scenario.model_copy(update={"spec": ADAPTIVE.model_copy(update={"adaptive": only(3)})})
    seen = roots(adaptive, replace(engine, scenario_id=adaptive.id))
    assert (("SHAPE", "rounds", "VERIFY", "steps-not-a-candidate") in seen) is found


@pytest.mark.parametrize(("steps", "due"), [((0, 1), False), ((1, 3), True)])
def test_draft_rows_are_due_where_a_round_drafts_more_than_one_token(eagle_head, steps, due):
    session = Changing(eagle_head.target, eagle_head, ADAPTIVE, steps=steps)
    request = request_of(random.Random(4), new=16)
    engine = session.speculate(request, chunk=7)
    kept = [i for i, phase in enumerate(engine.rows.strings["phase"]) if phase != "DRAFT"]
    verdict, _ = judge(
        asking(request, spec=ADAPTIVE), replace(engine, rows=handmade.take_rows(engine.rows, kept)), None
    )
    assert any("no DRAFT row" in reason for reason in verdict.reasons) is due


def only(*steps):
    return {"1": {"candidate_steps": list(steps)}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"adaptive": {}},
        {"adaptive": only()},
        {"adaptive": only(-1)},
        {"adaptive": only(17)},
        {"adaptive": only(1), "eagle_topk": 2, "num_draft_tokens": 5},
        {"adaptive": only(1), "algorithm": "MTP"},
    ],
)
def test_what_sglang_would_not_change_is_refused(wrong):
    with pytest.raises(ValidationError, match="adaptive needs"):
        SpecConfig(num_steps=3, **{"num_draft_tokens": 4, **wrong})


def test_the_widest_round_is_what_room_is_kept_for():
    assert (ADAPTIVE.candidate_steps, ADAPTIVE.most_steps) == ((0, 1, 2, 3, 5), 5)
    assert ADAPTIVE.of_round(-1) == ADAPTIVE.of_round(3) == ADAPTIVE
    assert (ADAPTIVE.of_round(0).num_draft_tokens, ADAPTIVE.of_round(0).draft_steps) == (1, 0)
