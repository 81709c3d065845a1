"""The pytest plugin: options, one live engine a worker, tests sorted by engine, and a count of what was reported.

It must not judge, must not start an engine before a test asks for one, and must not skip anything in silence.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from cases import families
from cases.families import FAMILIES, of_family
from harness.both_sides import gpus, leases
from harness.contract.known_issues import UnknownIssue, checked
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError, UserError
from harness.engines import envs
from harness.suite import order
from harness.suite.completeness import COMPLETENESS, Completeness, Counting

if TYPE_CHECKING:  # half of what a session imports, and many need no engine: it comes with the first that is asked for
    from harness.driving.live import LiveEngines
    from harness.driving.results import ScenarioResult
    from harness.engines.lent_servers import Lender

#: Set by `make test` and CI: an engine that is not there fails its tests instead of skipping them.
REQUIRED = "EAGLECHECK_REQUIRE_ENGINES"
#: What our own tests cannot do without beside what the product imports, by its name as a module.
NEEDED = ("syrupy", "grimp")
#: Memory one worker wants at most: an engine of three processes, and the reference.
WORKER_GB = 3.0

#: The argument of a test that is there once for each scenario of a family, and the file of those tests.
FAMILY_SCENARIO = "family_scenario"
FAMILY_TESTS = Path(families.__file__).parent / "engine" / "test_family_scenarios.py"

RELEASE = pytest.StashKey[str]()
ENGINES = pytest.StashKey["LiveEngines"]()
LEASE = pytest.StashKey[leases.Request | None]()
LENDER = pytest.StashKey["Lender"]()
#: What a worker is told by the controller: where it is lent what engines are forked from.
LENT = "eaglecheck_lender"


def _check_tools(config: pytest.Config) -> None:
    """One line where our own tests would be collected and what they need is not installed, as after `make run`."""
    ours = config.rootpath == Path(__file__).parents[2]
    lacks = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if ours and lacks and not config.getoption("family"):
        raise pytest.UsageError(f"the tests need {', '.join(lacks)}, which are not installed: pip install -e '.[dev]'")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("eaglecheck")
    group.addoption(
        "--engine", metavar="VERSION", help="SGLang release to test. Default: the one installed here, else the newest."
    )
    group.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="Device to run engines on. Default: %(default)s."
    )
    group.addoption(
        "--gpu-share",
        type=float,
        metavar="GIB",
        help="Memory of a GPU that one engine leases, in GiB. Default: $EAGLECHECK_GPU_SHARE, else 4.",
    )
    group.addoption(
        "--profile",
        choices=("pr", "nightly"),
        default="pr",
        help="How much is generated: pr is short and always the same, nightly is long and random. "
        "Default: %(default)s.",
    )
    group.addoption(
        "--family",
        choices=sorted(FAMILIES),
        help="Only the scenarios of this draft family, a test each, as `eaglecheck run --family` has them.",
    )
    group.addoption(
        "--assume",
        action="append",
        default=[],
        metavar="ID",
        help="With --family: predict this known issue of SGLang, as in `eaglecheck run`.",
    )


def pytest_configure(config: pytest.Config) -> None:
    _check_tools(config)
    config.addinivalue_line("markers", "also_on(version, ...): run with `release` set to these older releases too")
    if config.getoption("--assume") and not config.getoption("--family"):
        raise pytest.UsageError("--assume needs --family\n  name a family too: --family NAME")
    try:
        checked(config.getoption("--assume"))
        config.stash[LEASE] = _lease(config)
        config.stash[RELEASE] = _release(config.getoption("--engine"))
        if family := config.getoption("--family"):
            from harness.cli.scenario_checks import check_scenarios  # what it reads of grammars not every session needs

            check_scenarios(FAMILIES[family].scenarios, device=config.getoption("--device"))
    except (UserError, UnknownIssue) as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[COMPLETENESS] = Completeness()
    if config.getoption("--family") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(FAMILY_TESTS)]  # no other file need be imported


def _lease(config: pytest.Config) -> leases.Request | None:
    """What every engine takes of a GPU; UsageError for a device that is not there."""
    device, share = config.getoption("--device"), config.getoption("--gpu-share")
    if device == "cpu" and share is None:
        return None
    from harness.cli import prepare

    prepare.check_device(device)
    return prepare.gpu_lease(device, share)


def _release(asked: str | None) -> str:
    """The release under test. A release that was asked for by name must be there."""
    if asked is None:
        return envs.resolve(None)
    found = _environment(asked)
    if not found.ready:
        raise UsageError(f"--engine {asked}: {found.why}\n  install it:  eaglecheck engines install {asked}")
    return found.version


def _environment(version: str) -> envs.EngineEnv:
    """What there is of a release; nothing is installed in the middle of a test session."""
    here = envs.current()
    return here if here is not None and here.version == version else envs.state(envs.resolve(version))


def pytest_report_header(config: pytest.Config) -> list[str]:
    here = envs.current()
    found = [f"{here.version} (in this environment)"] if here is not None else []
    found += [env.version for env in envs.list_installed() if env.ready]
    lease = config.stash[LEASE]
    return [
        f"eaglecheck: SGLang {config.stash[RELEASE]} on {config.getoption('--device')}; "
        f"releases here: {', '.join(found) or 'none'}",
        f"EAGLECHECK_HOME: {envs.home()}",
        *_cards(lease),
    ]


def _cards(lease: leases.Request | None) -> list[str]:
    try:
        return [] if lease is None else leases.describe(lease)
    except gpus.CardError as error:  # the engines will say so too; a header must not end the session
        return str(error).splitlines()


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before xdist's own, in whatever order the two were loaded
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """-n auto: one worker a GPU lease, on a CPU one a core; fewer where memory would not hold their engines.

    None leaves it to xdist: on a CPU with enough memory, and where its own variable names a number.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    fits = max(int(psutil.virtual_memory().available / 1e9 / WORKER_GB), 1)
    try:
        lease = _lease(config)
        if lease is not None:  # none left: one worker, whose engine waits and then says who has them
            return max(min(leases.open_count(lease), fits), 1)
    except (UsageError, gpus.CardError) as error:
        raise pytest.UsageError(str(error)) from error
    return fits if fits < len(os.sched_getaffinity(0)) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`release`: the release under test, and with mark `also_on` the older ones named there.

    `family_scenario`: every scenario of the family asked for by --family; without it a few of some.
    """
    if FAMILY_SCENARIO in metafunc.fixturenames:
        asked = metafunc.config.getoption("--family")
        metafunc.parametrize(FAMILY_SCENARIO, [_parameter(*one) for one in of_family(asked)])
    if "release" in metafunc.fixturenames and "release" not in _parametrized(metafunc.definition):
        named = [metafunc.config.stash[RELEASE]]
        for mark in metafunc.definition.iter_markers("also_on"):
            named += [version for version in mark.args if version not in named]
        metafunc.parametrize("release", named)


def _parameter(family: str, scenario: Scenario) -> Any:
    mark = pytest.mark.engine(boot=scenario.boot_key())
    return pytest.param(scenario, id=f"{family}-{scenario.name}", marks=mark)


def _parametrized(item: pytest.Item) -> set[str]:
    """Names given values by the test's own parametrize marks."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = (name.split(",") if isinstance(name, str) else name for name in names)
    return {name.strip() for group in split for name in group}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--family"):
        config.hook.pytest_deselected(items=[item for item in items if not _of_family(item)])
        items[:] = filter(_of_family, items)
    items[:] = order.arranged(items, release=config.stash[RELEASE])


def _of_family(item: pytest.Item) -> bool:
    return FAMILY_SCENARIO in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngines]:
    """The worker's live engine; ended with the session."""
    from harness.driving.live import LiveEngines

    config = request.config
    live = LiveEngines(
        environment=_ready_environment,
        default=config.stash[RELEASE],
        device=config.getoption("--device"),
        logs=tmp_path_factory.mktemp("engines"),
        copies=True,
        lender=getattr(config, "workerinput", {}).get(LENT, ""),
        lease=config.stash[LEASE],
        assumed=checked(config.getoption("--assume")),
    )
    config.stash[ENGINES] = live
    yield live
    live.end()


def _ready_environment(version: str) -> envs.EngineEnv:
    found = _environment(version)
    if not found.ready:
        reason = f"SGLang {version}: {found.why}; install it:  eaglecheck engines install {version}"
        if os.environ.get(REQUIRED) or os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def drive_scenario(engines: LiveEngines) -> Callable[..., ScenarioResult]:
    """drive_scenario(scenario, engine=None, revert=None) -> ScenarioResult; see `LiveEngines.__call__`."""
    return engines


@pytest.fixture
def commands_on_live_engine(engines: LiveEngines, monkeypatch: pytest.MonkeyPatch) -> LiveEngines:
    """Commands run in this process use the worker's live engine instead of booting one of their own."""
    monkeypatch.setattr("harness.driving.runner.EnginePool", engines.lent)
    return engines


def pytest_runtest_setup(item: pytest.Item) -> None:
    live = item.config.stash.get(ENGINES, None)
    if live is not None:
        live.latest = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test that drove an engine says where it diverged first and what to type to see it again."""
    report = yield
    live = item.config.stash.get(ENGINES, None)
    if report.when == "call" and live is not None and live.latest is not None:
        item.user_properties += live.latest.properties()  # what JUnit keeps is read from the item at its end
        if report.failed:
            report.sections.append(("eaglecheck", _look_again(live.latest)))
    return report


def _look_again(outcome: ScenarioResult) -> str:
    from harness.checks.describe import describe
    from harness.cli import prepare

    lines = [repr(outcome), *(f"  {reason}" for reason in outcome.verdict.reasons)]
    if outcome.first is not None:
        lines.append(describe(outcome.first, outcome.scenario))
        lines += [f"  {known.line}" for known in outcome.known.get(outcome.first.signature, ())]
    folder = outcome.save_reproducer(Path.cwd() / prepare.runs_root(None))
    return "\n".join(
        [*lines, f"judge it again:  eaglecheck recheck {folder}", f"run it again:  eaglecheck replay {folder}"]
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """SGLang is imported by the controller's fork servers, once for all of its workers."""
    from harness.engines.fork_server import ForkServers
    from harness.engines.lent_servers import Lender

    config = node.config
    if LENDER not in config.stash:
        logs = Path(config._tmp_path_factory.mktemp("fork-servers"))
        config.stash[LENDER] = Lender(ForkServers(logs, keeps=config.getoption("numprocesses") or 1)).__enter__()
    node.workerinput[LENT] = config.stash[LENDER].path


def pytest_unconfigure(config: pytest.Config) -> None:
    lender: Lender | None = config.stash.get(LENDER, None)
    if lender is not None:
        lender.__exit__()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    node.config.stash[COMPLETENESS].plan(ids)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without xdist this process plans; with it, the controller collects nothing itself."""
    session.config.stash[COMPLETENESS].plan(item.nodeid for item in session.items)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Counting(session.config), "eaglecheck-completeness")
