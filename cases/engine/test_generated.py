"""Generated scenarios equal the reference, and changes that must not matter do not. `--profile` says how many.

Each test keeps its engine between examples. What failed is shrunk, and kept as a reproducer.
"""

from functools import partial
from random import Random

import pytest
from hypothesis import Phase, assume, find, given, settings

from cases.boots import BY_NAME, OF_FAMILY
from cases.engine.explained import explained
from cases.generation import scenarios
from cases.meta.profiles import generated
from cases.meta.relations import RELATIONS, pairs
from harness.contract.trace import ENDS
from harness.contract.types import Kind

pytestmark = pytest.mark.timeout(3600)
PLAIN = BY_NAME["plain"]
OF_ALL_RELEASES = [one for one in OF_FAMILY["eagle"] if one.planned_on("0")]
ON_PLAIN = pytest.mark.engine(boot=PLAIN.boot_key())


@pytest.fixture
def examples(pytestconfig):
    seeded = pytestconfig.getoption("--hypothesis-seed") is not None
    return partial(generated, pytestconfig.getoption("--profile"), seeded=seeded)


@pytest.mark.parametrize(
    "boot", [pytest.param(one, id=one.name, marks=pytest.mark.engine(boot=one.boot_key())) for one in OF_ALL_RELEASES]
)
def test_generated_scenarios_equal_the_reference(engines, release, boot, examples, monkeypatch):
    monkeypatch.setattr(engines, "assumed", boot.assumes)  # of keys that any of them may ask for
    met = set()

    @examples(examples=24)
    @given(scenario=scenarios(boot))
    def every(scenario):
        outcome = engines(scenario, engine=release, fresh=True)
        known = explained(outcome, release, place=f"generated/eagle/{boot.name}")
        met.update(known)
        assert outcome.passed or known, outcome.verdict.reasons

    every()
    if met:
        pytest.xfail(f"known: {', '.join(sorted(met))}")


def driven(engines, release, scenario):
    return engines.drive(engines.launch(scenario, engine=release), scenario)


def judged(engines, release, relation, pair, *, may_end=False):
    """RelationResult of one pair; a pair in which the change left no mark is none. may_end: nor one that ended it."""
    before, after = (driven(engines, release, scenario) for scenario in pair)
    result = relation.judge(pair[1], before, after)
    ended = any(event.name in ENDS for trace in (before, after) for event in trace.events)
    assume(not (may_end and ended))
    assert not ended
    assume(not result.unknown)
    return result


def holds(engines, release, relation, with_settings):
    @with_settings
    @given(pair=pairs(relation, PLAIN))
    def every(pair):
        assert judged(engines, release, relation, pair).divergences == []

    every()


@ON_PLAIN
@pytest.mark.parametrize("name", [name for name, relation in RELATIONS.items() if not relation.reboots])
def test_relation_holds(engines, release, examples, name):
    holds(engines, release, RELATIONS[name], examples(examples=4))


@pytest.mark.engine(boot=PLAIN.boot_key(), ends_it=True)
@pytest.mark.parametrize("name", [name for name, relation in RELATIONS.items() if relation.reboots])
def test_relation_between_two_engines_holds(engines, release, examples, name):
    holds(engines, release, RELATIONS[name], examples(examples=2))


@pytest.mark.engine(release="0.5.12.post1", boot=PLAIN.boot_key())
def test_chunk_size_relation_breaks_where_chunk_tails_are_wrong(engines):
    """SGLang #26329: the last draft input of a non-final chunk depends on where the chunk ends."""
    relation = RELATIONS["other_chunk"]

    def breaks(pair):
        found = judged(engines, "0.5.12.post1", relation, pair, may_end=True).divergences
        return Kind.EXTEND_INPUT in {one.kind for one in found if not one.cause}

    only_generated = settings(max_examples=10, phases=[Phase.generate], deadline=None, database=None)
    assert find(pairs(relation, PLAIN), breaks, settings=only_generated, random=Random(1))
