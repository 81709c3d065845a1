"""Every family is whole: its fixed set asks for what it promises, and everything it names exists. No engine here."""

import pytest

from cases.checkpoints import RECIPES
from cases.families import FAMILIES
from harness.cli.programs import check_scenarios, choose_scenarios
from harness.contract.usage import UsageError
from harness.coverage import POINTS
from harness.driving.pairs import checkpoint_pairs

EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)


@EVERY
def test_promised_coverage_points_are_asked_for(family):
    asked = {name for scenario in family.scenarios for name in scenario.wants}
    assert set(family.coverage_points) <= asked <= set(POINTS)


@EVERY
def test_scenarios_can_run_and_have_names_of_their_own(family):
    check_scenarios(family.scenarios, device="cpu")
    assert len({scenario.name for scenario in family.scenarios}) == len(family.scenarios)


@EVERY
def test_checkpoints_can_be_made(family):
    assert family.checkpoints
    assert set(family.checkpoints) <= set(RECIPES)


@EVERY
def test_a_family_boots_only_what_its_records_say(family):
    assert family.boots
    assert len({boot.name for boot in family.boots}) == len(family.boots)


def test_a_family_is_chosen_by_name_and_an_unknown_one_is_refused_with_the_nearest():
    assert choose_scenarios([], [], "tree") == list(FAMILIES["tree"].scenarios)
    with pytest.raises(UsageError, match="unknown family 'trees'; did you mean 'tree'"):
        choose_scenarios([], [], "trees")


def test_one_scenario_of_a_family_is_found_by_its_name():
    (one,) = choose_scenarios(["page4-shared-prefix"], [], "paged")
    assert one.engine.page_size == 4


def test_latent_attention_is_refused_on_a_card_instead_of_blaming_sglang():
    with pytest.raises(UsageError, match="'mla-tiny' cannot run on cuda: SGLang's kernels"):
        checkpoint_pairs(FAMILIES["mla"].scenarios, device="cuda")
