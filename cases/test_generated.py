"""Generated scenarios against the reference, in blocks of one boot configuration. `--profile` says how many."""

import pytest

from cases.generated import drive_all, report, runs
from cases.hunt import Hunt, greedy_text
from cases.known import all_known
from cases.profiles import PROFILES, blocks, seed_of
from cases.strategies import BOOTS, programs


def pytest_generate_tests(metafunc):
    if "block" in metafunc.fixturenames:
        profile = PROFILES[metafunc.config.getoption("--profile")]
        run = getattr(metafunc.config, "workerinput", {}).get("testrunuid")
        seed = seed_of(profile, metafunc.config.getoption("--profile-seed"), run)
        marked = [
            pytest.param(block, id=str(block), marks=pytest.mark.engine(boot=BOOTS[block.boot].boot_key()))
            for block in blocks(profile, seed)
        ]
        metafunc.parametrize("block", marked)


def test_generated_scenarios_equal_the_reference(engines, release, block, record_property):
    boot = BOOTS[block.boot]
    scenarios = programs(boot, count=block.count, seed_value=block.seed, greedy=greedy_text(boot))
    hunt = Hunt(engines=engines, release=release, folder=runs())
    left = drive_all(hunt, scenarios, seconds=block.seconds)
    record_property("scenarios", hunt.outcomes.total())
    record_property("left_out", left)
    record_property(
        "situations",
        {line.name: (line.generated, line.reached, line.positions) for line in hunt.table.lines.values() if line.seen},
    )
    assert hunt.outcomes.total(), "the time box was spent before the first scenario"
    if set(hunt.outcomes) == {"PASS"}:
        return
    place = f"generated/eagle/{block.boot}"
    explained = all_known(roots_of(hunt), hunt.release, place=place) if "UNKNOWN" not in hunt.outcomes else frozenset()
    if explained:
        pytest.xfail(f"known: {', '.join(sorted(explained))}: {report(hunt)}")
    pytest.fail(report(hunt), pytrace=False)


def roots_of(hunt):
    return [finding.signature for finding in hunt.findings() if not finding.consequence]
