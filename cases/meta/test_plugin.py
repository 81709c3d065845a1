"""The pytest plugin, in sessions of their own: options, order, engines that end, skips that say why, the count."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from cases.families import FAMILIES
from cases.meta.processes import survivors
from harness.cli.programs import choose_scenarios
from harness.engines import envs
from harness.night.cells import Limits, plan
from harness.suite.completeness import INCOMPLETE, Completeness
from harness.suite.plugin import LENT

HOST = Path(__file__).with_name("pretended_host.py")
ROOT = Path(__file__).resolve().parents[2]

#: An inner test that boots the pretended host and writes down the ids of its processes.
BOOT = f"""
import sys
from pathlib import Path
import harness.engines.process
from cases.meta.processes import tree
from harness.engines.process import Launch
harness.engines.process.HOST = Path({str(HOST)!r})

def boot(engines, mark="one"):
    launch = Launch(python=Path(sys.executable), pythonpath=(), boot={{"mark": mark}})
    engine = engines.use(launch)
    with open("pids", "a") as file:
        file.writelines(f"{{process.pid}}\\n" for process in tree(engine.process.pid))
    return engine
"""


def _processes(folder):
    """Processes written down by the inner tests that still exist."""
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(pids) >= 2
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


#: A test that drove an engine and found a wrong draft position.
FAILING = """
from cases.meta import handmade
from harness.checks import group, judge
from harness.driving.plan import Setup
from harness.driving.results import ScenarioResult
def test_one(engines):
    scenario = handmade.scenario()
    trace, reference = handmade.build(scenario)
    trace.rows.ints["position"][handmade.find(trace, phase="DRAFT")] += 1
    verdict, divergences = judge(scenario, trace, reference)
    engines.latest = ScenarioResult.of(
        scenario, trace, reference, verdict, divergences, setup=Setup(release="0.5.13")
    )
    assert engines.latest.passed
"""


def test_header_names_releases_device_and_home(inner_session, tmp_path):
    done = inner_session("def test_one(): pass")
    assert done.returncode == 0, done.stdout
    here = envs.current()
    release, found = ("0.5.23", "none") if here is None else (here.version, f"{here.version} (in this environment)")
    assert f"eaglecheck: SGLang {release} on cpu; releases here: {found}\n" in done.stdout
    assert f"EAGLECHECK_HOME: {tmp_path / 'home'}" in done.stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--engine=0.4.9", "cannot be driven: there are no hooks for releases before 0.5.11"),
        ("--engine=next", "in our tests: 0.5.11, 0.5.12.post1, 0.5.13"),
        ("--engine=0.5.13", "install it:  eaglecheck engines install 0.5.13"),
        ("--device=tpu", "invalid choice: 'tpu'"),
    ],
)
def test_option_that_cannot_be_is_refused_before_any_test(inner_session, option, said):
    done = inner_session("def test_one(): pass", option)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in done.stderr
    assert "passed" not in done.stdout


WANTS_ENGINE = """
import pytest
from cases.fixed import default_scenarios
@pytest.mark.engine
def test_one(drive_scenario):
    drive_scenario(default_scenarios()[0], engine="0.5.11")
"""


def test_release_that_is_not_installed_is_skipped_with_the_command_that_fixes_it(inner_session):
    done = inner_session(WANTS_ENGINE)
    assert done.returncode == 0, done.stdout
    assert "SGLang 0.5.11: not installed; install it:  eaglecheck engines install 0.5.11" in done.stdout


@pytest.mark.parametrize("name", ["EAGLECHECK_REQUIRE_ENGINES", "CI"])
def test_release_that_is_not_installed_fails_where_engines_are_required(inner_session, name):
    done = inner_session(WANTS_ENGINE, **{name: "1"})
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed" in done.stdout


@pytest.mark.parametrize(
    ("ending", "options"),
    [("pass", []), ("raise KeyboardInterrupt", []), ("assert False", ["-n", "1"])],
    ids=["passed", "interrupted", "failed-under-xdist"],
)
def test_no_engine_outlives_the_session(inner_session, tmp_path, ending, options):
    done = inner_session(BOOT + f"def test_one(engines):\n    boot(engines)\n    {ending}\n", *options)
    assert done.returncode != pytest.ExitCode.USAGE_ERROR, done.stderr
    assert survivors(_processes(tmp_path)) == []


def test_no_engine_outlives_a_worker_that_dies(inner_session, tmp_path):
    done = inner_session(BOOT + "import os\ndef test_one(engines):\n    boot(engines)\n    os._exit(1)\n", "-n", "1")
    assert "1 failed" in done.stdout
    assert survivors(_processes(tmp_path)) == []


def test_engine_is_reused_until_another_is_asked_for_or_it_died(inner_session):
    text = """
def test_one(engines):
    first = boot(engines)
    assert boot(engines) is first
    second = boot(engines, "other")
    assert second is not first and first.process is None, "one at a time"
    second.process.kill()
    second.process.wait()
    assert boot(engines, "other") is not second
    assert engines.boots == 3
"""
    done = inner_session(BOOT + text)
    assert done.returncode == 0, done.stdout


def test_failing_test_names_the_divergence_and_what_to_type_and_junit_says_the_same(inner_session, tmp_path):
    done = inner_session(FAILING, f"--junitxml={tmp_path / 'out.xml'}")
    assert done.returncode == 1
    assert "draft position differs" in done.stdout
    (folder,) = (tmp_path / "runs" / "reproducers").iterdir()
    assert f"eaglecheck recheck {folder}" in done.stdout
    assert f"eaglecheck replay {folder}" in done.stdout
    found = {one.get("name"): one.get("value") for one in ElementTree.parse(tmp_path / "out.xml").iter("property")}
    assert (found["eaglecheck.engine"], found["eaglecheck.verdict"]) == ("0.5.13", "FAIL")
    assert found["eaglecheck.signature"] == "POSITION:positions:DRAFT:one-ahead"


def test_tests_of_a_release_and_of_a_boot_run_together_those_that_end_their_engine_and_those_of_many_last(
    inner_session,
):
    text = """
import pytest
from cases.programs import DEFAULT, program
other = program("other", DEFAULT["single"].requests, DEFAULT["single"].script, overlap_schedule=False)
boot = DEFAULT["single"].boot_key()
def test_plain(): pass
@pytest.mark.engine(last=True)
def test_of_many_releases(): pass
@pytest.mark.engine(boot=boot, ends_it=True)
def test_killer(): pass
@pytest.mark.engine
@pytest.mark.parametrize("release", ["0.5.13", "0.5.23"])
@pytest.mark.parametrize("scenario", [DEFAULT["single"], other, DEFAULT["four-together"]], ids=["s", "o", "f"])
def test_many(release, scenario): pass
@pytest.mark.engine(boot=boot)
def test_late(): pass
"""
    done = inner_session(text, "--collect-only", "-q")
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    many = [f"test_many[{name}]" for name in ("s-0.5.23", "f-0.5.23")]
    assert names[:5] == [*many, "test_late", "test_killer", "test_many[o-0.5.23]"]
    assert set(names[5:7]) == {"test_many[s-0.5.13]", "test_many[f-0.5.13]"}
    assert names[7:] == ["test_many[o-0.5.13]", "test_of_many_releases", "test_plain"]


KILLER = """
import os, time, pytest
@pytest.mark.parametrize("number", range(60))
def test_many(number):
    time.sleep(0.02)
    if number == 3:
        os._exit(1)
"""


def test_test_that_kills_its_worker_costs_one_failure_and_the_session_is_complete(inner_session):
    done = inner_session(KILLER, "-n", "2")
    assert "1 failed, 59 passed" in done.stdout
    assert "incomplete" not in done.stdout


def test_session_that_left_tests_unreported_says_how_many_and_leaves_with_its_own_exit(inner_session):
    done = inner_session(KILLER, "-n", "2", "--max-worker-restart=0")
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("incomplete: ")]
    missing, planned = map(int, re.findall(r"\d+", said)[:2])
    counted = sum(map(int, re.findall(r"(\d+) (?:passed|failed)", done.stdout.splitlines()[-1])))
    assert (missing > 0, planned, missing + counted) == (True, 60, 60), said
    assert "tests planned and not reported, of 60: test_inner.py::test_many[" in said
    assert "exit 16" in done.stdout
    assert done.returncode == INCOMPLETE


#: Kills its worker once; loadfile runs the test again on the replacement, and JUnit holds it twice.
ONCE = """
import os, pytest
from pathlib import Path
@pytest.mark.parametrize("number", range(6))
def test_many(number):
    mark = Path("killed")
    if number == 3 and not mark.exists():
        mark.touch()
        os._exit(1)
"""


def test_test_that_is_reported_as_error_and_then_as_passed_fails_the_session(inner_session, tmp_path):
    done = inner_session(ONCE, "-n", "2", "--dist=loadfile", f"--junitxml={tmp_path / 'out.xml'}")
    assert "incomplete: 1 test reported more than once: test_inner.py::test_many[3]" in done.stdout, done.stdout
    assert done.returncode == INCOMPLETE


def test_session_that_lost_a_report_fails_although_every_reported_test_passed(inner_session):
    text = """
import pytest
@pytest.fixture(autouse=True)
def lost(request):
    from harness.suite.plugin import COMPLETENESS
    request.config.stash[COMPLETENESS].plan(["test_inner.py::test_one", "test_inner.py::test_gone"])
def test_one(): pass
"""
    done = inner_session(text)
    assert done.returncode == INCOMPLETE
    assert "1 passed" in done.stdout
    assert "incomplete: 1 test planned and not reported, of 2: test_inner.py::test_gone" in done.stdout


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_stopping_at_the_first_failure_is_said_and_stays_a_failure(inner_session, workers):
    text = "import pytest\n@pytest.mark.parametrize('n', range(200))\ndef test_one(n): assert n != 1\n"
    done = inner_session(text, "-x", *workers)
    assert "planned and not reported, of 200" in done.stdout
    assert "--maxfail" in done.stdout
    assert done.returncode in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)


def test_workers_are_lent_what_engines_are_forked_from_and_nothing_of_it_stays(inner_session, tmp_path):
    text = f"""
import pytest
@pytest.mark.parametrize("n", range(4))
def test_one(request, n):
    open("{tmp_path}/said-%d" % n, "w").write(request.config.workerinput["{LENT}"])
    assert os.path.exists(request.config.workerinput["{LENT}"])
"""
    done = inner_session("import os\n" + text, "-n", "2")
    assert done.returncode == 0, done.stdout
    (path,) = {one.read_text() for one in tmp_path.glob("said-*")}
    assert not Path(path).parent.exists()


def test_same_id_planned_twice_may_be_reported_twice(inner_session):
    done = inner_session("def test_one(): pass", "--keep-duplicates", "test_inner.py", "test_inner.py")
    assert "2 passed" in done.stdout
    assert (done.returncode, "incomplete" in done.stdout) == (0, False), done.stdout


def test_report_that_nobody_planned_is_an_error():
    completeness = Completeness()
    completeness.plan(["a", "b"])
    for name in ("a", "b", "b", "c"):
        completeness.report(name)
    assert completeness.faults() == [
        "incomplete: 1 test reported more than once: b",
        "incomplete: 1 test reported and never planned: c",
    ]


#: A test a scenario of a family, and one that has nothing to do with families.
OF_FAMILIES = """
def test_it(family_scenario):
    print("ID", family_scenario.id)
def test_other():
    pass
"""


@pytest.mark.parametrize("family", ["tree", "mtp", "dp"])
def test_a_family_is_the_same_for_pytest_run_and_nights(inner_session, family):
    done = inner_session(OF_FAMILIES, "test_inner.py", "--family", family, "-s")
    ids = re.findall(r"ID (\w+)", done.stdout)
    assert ids == [one.id for one in choose_scenarios([], [], family)]
    cells, _ = plan(
        engines=["0.5.23"], cases=[], families=[FAMILIES[family]], limits=Limits(scenarios=0, seconds=0, seed=0)
    )
    assert sorted(ids) == sorted(one.id for cell in cells for one in cell.scenarios)
    assert f"{len(ids)} passed, 1 deselected" in done.stdout


def test_without_a_family_a_few_of_some_are_driven_beside_everything_else(inner_session):
    done = inner_session(OF_FAMILIES)
    assert f"{sum(len(family.some) for family in FAMILIES.values()) + 1} passed" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--family", "trees"), "invalid choice: 'trees'"),
        (("--assume", "F-010"), "name a family too: --family NAME"),
        (("--family", "mtp", "--assume", "F-10"), "unknown finding 'F-10'; did you mean 'F-010'"),
    ],
)
def test_a_family_or_an_assumption_that_nobody_knows_is_refused(inner_session, options, words):
    done = inner_session(OF_FAMILIES, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert words in done.stderr


#: A family whose scenarios no release runs on a CPU, before our plugin looks at it.
STREAMS = """
from cases.families import FAMILIES
from cases.meta.handmade import set_on
found = FAMILIES["tree"].scenarios
vars(FAMILIES["tree"])["scenarios"] = tuple(set_on(one, enable_overlap_plan_stream=True) for one in found)
"""


def test_a_family_that_no_release_runs_on_a_device_is_refused(inner_session, tmp_path):
    (tmp_path / "conftest.py").write_text(STREAMS)
    done = inner_session(OF_FAMILIES, "test_inner.py", "--family", "tree")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    why = "engine.enable_overlap_plan_stream is on, and there are no streams on a CPU"
    assert f"scenario '{FAMILIES['tree'].scenarios[0].name}': {why}\n  allowed: " in done.stderr


def test_a_family_collects_no_file_but_that_of_its_tests():
    """Neither their time nor what others import: without [dev] that is not there."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--family", "mtp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]
    assert len(found) == len(FAMILIES["mtp"].scenarios)
    assert {*found} == {"cases/engine/test_family_scenarios.py"}
