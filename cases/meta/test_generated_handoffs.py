"""Generated hand-overs are programs that engines take, the same for the same seed, and each asks for its lead."""

import pytest

from cases.boots import PD_BOOTS
from cases.generated_handoffs import LEADS, MOST, generate
from harness.cli.programs import check_scenarios
from harness.coverage import Where, names

BOOTS = pytest.mark.parametrize("boot", PD_BOOTS.values(), ids=lambda boot: boot.name)


@BOOTS
def test_programs_can_run_and_repeat(boot):
    made = generate(boot, count=60, seed=3)
    check_scenarios(made, device="cpu")
    assert made == generate(boot, count=60, seed=3)
    assert len({one.id for one in made}) == 60
    assert {one.boot_key() for one in made} == {boot.boot_key()}


@BOOTS
def test_leads_take_turns_and_each_is_asked_for(boot):
    made = generate(boot, count=3 * len(LEADS), seed=4)
    assert [one.wants[0] for one in made] == list(LEADS) * 3
    assert set(LEADS) <= {*names(Where.HANDOFF)}


def test_other_requests_have_every_fate_beside_a_lead():
    made = generate(PD_BOOTS["pd"], count=200, seed=5)
    assert {len(one.requests) for one in made} == set(range(1, MOST + 1))
    kinds = {op.name or op.kind for one in made for op in one.script}
    assert {"hold", "release", "fail", "drop", "abort"} <= kinds
