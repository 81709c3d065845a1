"""Relations between pairs of generated scenarios on one engine, without a reference; and that a broken one shows."""

import pytest

from cases.profiles import PROFILES, seed_of
from cases.relations import RELATIONS, pairs
from cases.strategies import BOOTS, collect
from harness.contract.types import Kind, Outcome

BOOT = BOOTS["plain"]

#: At least so many of a relation's pairs must really show the change.
LEAST_SHARE = 0.5


def judged_pairs(engines, release, relation, *, count, seed):
    """RelationResult of each pair; where two engines are needed, all first halves come before the second ones."""
    drawn = collect(pairs(relation, BOOT), count=count, seed_value=seed)
    before = (
        [engines.drive(engines.launch(scenario, engine=release), scenario) for scenario, _ in drawn]
        if relation.reboots
        else []
    )
    results = []
    for number, (scenario, changed) in enumerate(drawn):
        first = before[number] if before else engines.drive(engines.launch(scenario, engine=release), scenario)
        second = engines.drive(engines.launch(changed, engine=release), changed)
        results.append(relation.judge(changed, first, second))
    return results


@pytest.mark.engine(boot=BOOT.boot_key())
@pytest.mark.parametrize("name", [name for name, relation in RELATIONS.items() if not relation.reboots])
def test_relation_holds(engines, release, pytestconfig, name):
    check(engines, release, pytestconfig, name)


@pytest.mark.engine(boot=BOOT.boot_key(), ends_it=True)
@pytest.mark.parametrize("name", [name for name, relation in RELATIONS.items() if relation.reboots])
def test_relation_between_two_engines_holds(engines, release, pytestconfig, name):
    check(engines, release, pytestconfig, name)


def check(engines, release, config, name):
    profile = PROFILES[config.getoption("--profile")]
    run = getattr(config, "workerinput", {}).get("testrunuid")
    seed = seed_of(profile, config.getoption("--profile-seed"), run)
    results = judged_pairs(engines, release, RELATIONS[name], count=profile.pairs, seed=seed)
    assert [found for result in results for found in result.divergences] == []
    shown = sum(result.outcome is Outcome.PASS for result in results)
    reasons = [reason for result in results for reason in result.unknown]
    assert shown >= LEAST_SHARE * len(results), reasons


@pytest.mark.engine(release="0.5.12.post1", boot=BOOT.boot_key())
def test_chunk_size_relation_breaks_where_chunk_tails_are_wrong(engines):
    """SGLang #26329: the last draft input of a non-final chunk depends on where the chunk ends."""
    results = judged_pairs(engines, "0.5.12.post1", RELATIONS["other_chunk"], count=6, seed=1)
    kinds = {found.kind for result in results for found in result.divergences if not found.cause}
    assert Kind.EXTEND_INPUT in kinds
