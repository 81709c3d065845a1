"""Engine environments with a pretended pip: what is installed when, what is resumed, what is said. No network."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import shutil
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from cases.meta.pretended_pip import PretendedPip, quiet
from harness.engines import closure, envs, releases


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home with a space"
    monkeypatch.setenv("EAGLECHECK_HOME", str(place))
    monkeypatch.setattr(envs, "current", lambda: None)
    return place


@pytest.fixture
def index(home: Path) -> Path:
    """A fresh list of published releases, so that no index is asked."""
    home.mkdir(parents=True)
    path = home / "published.json"
    names = ["0.5.9", "0.5.12", *envs.SUPPORTED, "0.5.16", "0.5.18", "0.5.24"]
    path.write_text(json.dumps({"versions": names, "when": time.time()}))
    return path


@pytest.fixture
def pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> PretendedPip:
    pretended = PretendedPip()
    monkeypatch.setattr(closure, "run", pretended)
    return pretended


def test_a_fresh_home_gets_the_closure_once_and_each_release_beside_it(home: Path, pip: PretendedPip) -> None:
    first, second = envs.ensure("0.5.13", quiet), envs.ensure("0.5.23", quiet)
    assert (first.ready, second.ready) == (True, True)
    assert first.python == second.python == closure.location() / "bin" / "python"
    assert first.pythonpath == (home / "engines" / "0.5.13" / "site",)
    assert first.torch == "2.13.0+cpu"
    assert (pip.count("-m venv"), pip.count("-r "), pip.count("--target")) == (1, 1, 2)


def test_an_engine_is_installed_without_its_own_dependencies_and_never_built_from_source(pip: PretendedPip) -> None:
    envs.ensure("0.5.13", quiet)
    assert "--no-deps --only-binary=sglang" in pip.commands[-1]
    assert pip.commands[-1].endswith("sglang==0.5.13")


def test_a_ready_release_runs_no_command_and_answers_at_once(pip: PretendedPip) -> None:
    envs.ensure("0.5.13", quiet)
    pip.commands.clear()
    started = time.perf_counter()
    assert envs.ensure("0.5.13", quiet).ready
    assert time.perf_counter() - started < 0.05
    assert pip.commands == []


@pytest.mark.parametrize("stage", ["-m venv", "-r ", "--target"])
def test_an_interrupt_at_any_stage_is_resumed_and_leaves_no_marker(pip: PretendedPip, stage: str) -> None:
    def interrupt(command: str) -> None:
        if stage in command:
            raise KeyboardInterrupt

    pip.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        envs.ensure("0.5.13", quiet)
    assert not envs.state("0.5.13").ready

    pip.fail = lambda command: None
    told: list[str] = []
    assert envs.ensure("0.5.13", told.append).ready
    assert any("installing" in line for line in told)


def test_leftovers_of_an_interrupted_release_do_not_survive_into_the_finished_one(
    home: Path, pip: PretendedPip
) -> None:
    half = home / "engines" / "0.5.13" / "site" / "sglang"
    half.mkdir(parents=True)
    (half / "stale.py").touch()
    assert envs.state("0.5.13").why == "an installation was interrupted"
    envs.ensure("0.5.13", quiet)
    assert not (half / "stale.py").exists()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_torn_marker_counts_as_unfinished(home: Path, pip: PretendedPip, text: str) -> None:
    envs.ensure("0.5.13", quiet)
    (home / "engines" / "0.5.13" / closure.MARKER).write_text(text)
    assert not envs.state("0.5.13").ready
    assert envs.ensure("0.5.13", quiet).ready


def test_a_release_whose_package_has_gone_is_damaged_and_installed_again(home: Path, pip: PretendedPip) -> None:
    envs.ensure("0.5.13", quiet)
    shutil.rmtree(home / "engines" / "0.5.13" / "site" / "sglang")
    assert "damaged" in envs.state("0.5.13").why
    assert envs.ensure("0.5.13", quiet).ready
    assert (pip.count("-m venv"), pip.count("--target")) == (1, 2)


@pytest.mark.parametrize("part", ["bin/python", "torch"])
def test_a_closure_without_its_interpreter_or_torch_is_built_again(pip: PretendedPip, part: str) -> None:
    envs.ensure("0.5.13", quiet)
    if part == "torch":
        shutil.rmtree(closure.torch_folder(closure.location()))
    else:
        closure.interpreter(closure.location()).unlink()
    assert envs.state("0.5.13").why == "its shared environment is not built"
    assert envs.ensure("0.5.13", quiet).ready
    assert pip.count("-m venv") == 2


def test_another_list_of_dependencies_means_another_folder_and_names_the_old_one(
    pip: PretendedPip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.ensure("0.5.13", quiet)
    old = closure.location()
    changed = tmp_path / "closure.txt"
    changed.write_text(closure.REQUIREMENTS.read_text() + "six==1.17.0\n")
    monkeypatch.setattr(closure, "REQUIREMENTS", changed)
    told: list[str] = []
    assert envs.ensure("0.5.13", told.append).ready
    assert closure.location() != old
    assert closure.leftovers() == (old,)
    assert any(str(old) in line and "rm -r" in line for line in told)


def test_two_callers_at_once_install_once(pip: PretendedPip) -> None:
    pip.seconds = 0.05
    told: list[str] = []
    results: list[envs.EngineEnv] = []
    callers = [threading.Thread(target=lambda: results.append(envs.ensure("0.5.13", told.append))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [engine.ready for engine in results] == [True] * 4
    assert (pip.count("-m venv"), pip.count("--target")) == (1, 1)
    assert any(line.startswith("waiting: another process is installing closure-") for line in told)


def test_a_failing_pip_shows_its_last_lines_and_the_command(pip: PretendedPip) -> None:
    pip.fail = lambda command: (
        closure.Finished(code=1, tail=("ERROR: No matching distribution found for sglang==0.5.13",))
        if "--target" in command
        else None
    )
    with pytest.raises(envs.EnvError) as caught:
        envs.ensure("0.5.13", quiet)
    text = str(caught.value)
    assert "pip could not install SGLang 0.5.13 (exit 1)" in text
    assert "No matching distribution" in text
    assert "type the same command again to resume" in text
    assert "' -I -m pip install" in text  # the folder has a space: quoted, so that it can be pasted
    assert not envs.state("0.5.13").ready


def test_a_full_disk_is_named_as_such(pip: PretendedPip) -> None:
    pip.fail = lambda command: (
        closure.Finished(code=1, tail=("ERROR: Could not install packages: [Errno 28] No space left on device",))
        if "-r " in command
        else None
    )
    with pytest.raises(envs.EnvError, match="no space left on device") as caught:
        envs.ensure("0.5.13", quiet)
    assert "EAGLECHECK_HOME" in caught.value.next_step


def test_too_small_a_disk_is_refused_before_anything_is_downloaded(
    pip: PretendedPip, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - 10**9, 10**9))
    with pytest.raises(envs.EnvError, match=r"1\.0 GB free .*3\.5 GB needed"):
        envs.ensure("0.5.13", quiet)
    assert pip.commands == []


def test_a_home_that_cannot_be_written_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: PretendedPip
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(envs.EnvError, match="cannot write") as caught:
        envs.ensure("0.5.13", quiet)
    assert "EAGLECHECK_HOME" in caught.value.next_step


def test_a_pip_that_installs_nothing_is_not_believed(pip: PretendedPip) -> None:
    pip.fail = lambda command: closure.Finished(code=0) if "--target" in command else None
    with pytest.raises(envs.EnvError, match=r"pip reported success but left no SGLang 0\.5\.13"):
        envs.ensure("0.5.13", quiet)
    assert not envs.state("0.5.13").ready


@pytest.mark.parametrize(
    ("version", "says", "nearest"),
    [
        ("0.5.9", "cannot be driven: there are no hooks for releases before 0.5.11", "0.5.11"),
        ("0.5.10.post1", "cannot be driven: there are no hooks for releases before 0.5.11", "0.5.11"),
        ("0.5.12.post7", "no SGLang 0.5.12.post7 is published", "0.5.13"),
        ("0.5.99", "no SGLang 0.5.99 is published", "0.5.24"),
        ("newest", "unknown SGLang release 'newest'", ""),
        ("0.5.13x", "unknown SGLang release '0.5.13x'", "0.5.13"),
        ("../../etc", "unknown SGLang release", ""),
    ],
)
@pytest.mark.usefixtures("index")
def test_a_release_that_cannot_be_driven_lists_what_is_allowed(
    pip: PretendedPip, version: str, says: str, nearest: str
) -> None:
    with pytest.raises(envs.UnknownReleaseError) as caught:
        envs.ensure(version, quiet)
    assert says in caught.value.what
    assert ", ".join(envs.SUPPORTED) in caught.value.allowed
    assert caught.value.allowed.partition("; nearest: ")[2] == nearest, "nothing is near a word"
    assert "eaglecheck engines list" in str(caught.value)
    assert pip.commands == []


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("asked", "name", "hooks"),
    [
        ("0.5.12", "0.5.12", "the hooks of 0.5.11"),
        ("v0.5.16", "0.5.16", "hooks of its own"),
        ("0.5.18", "0.5.18", "the hooks of 0.5.16"),
        ("0.5.24", "0.5.24", "the hooks of 0.5.23"),
    ],
)
def test_any_published_release_can_be_had_and_says_what_drives_it(
    pip: PretendedPip, asked: str, name: str, hooks: str
) -> None:
    assert envs.resolve(asked) == name
    assert (envs.ensure(asked, quiet).version, envs.state(name).ready) == (name, True)
    assert pip.commands[-1].endswith(f"sglang=={name}")
    assert envs.standing(name) == f"not in our tests; driven with {hooks}"


def test_a_release_of_our_tests_or_one_installed_here_asks_no_index(
    pip: PretendedPip, home: Path, monkeypatch: pytest.MonkeyPatch, index: Path
) -> None:
    envs.ensure("0.5.18", quiet)
    index.unlink()
    monkeypatch.setattr(releases, "_ask_pip", lambda: pytest.fail("the index was asked"))
    assert (envs.resolve("0.5.18"), envs.resolve("0.5.17"), envs.standing("0.5.17")) == ("0.5.18", "0.5.17", "")


@pytest.mark.usefixtures("pip")
def test_without_an_index_another_release_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_ask_pip", lambda: ((), "no route to host"))
    with pytest.raises(envs.UnknownReleaseError, match="the published releases are not known") as caught:
        envs.resolve("0.5.18")
    assert "no route to host" in caught.value.allowed


def test_only_releases_of_our_tests_can_be_packed() -> None:
    assert envs.supported("v0.5.17") == "0.5.17"
    with pytest.raises(envs.UnknownReleaseError, match=r"none of the releases of our tests") as caught:
        envs.supported("0.5.18")
    assert "nearest: 0.5.23" in caught.value.allowed


def test_a_release_may_be_written_with_a_v(pip: PretendedPip) -> None:
    assert envs.ensure("v0.5.12.post1", quiet).version == "0.5.12.post1"


def test_installed_releases_are_listed_in_release_order_finished_or_not(home: Path, pip: PretendedPip) -> None:
    for version in ("0.5.23", "0.5.12.post1", "0.5.11"):
        envs.ensure(version, quiet)
    (home / "engines" / "0.5.17").mkdir()
    listed = [(engine.version, engine.ready) for engine in envs.list_installed()]
    assert listed == [("0.5.11", True), ("0.5.12.post1", True), ("0.5.17", False), ("0.5.23", True)]


def test_an_empty_home_lists_nothing_and_is_not_created(home: Path) -> None:
    assert envs.list_installed() == ()
    assert not home.exists()


def test_the_sglang_of_this_interpreter_is_used_as_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    info = package.with_name("sglang-0.5.21.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.21\n")
    monkeypatch.undo()
    monkeypatch.setenv("EAGLECHECK_HOME", str(home))
    monkeypatch.syspath_prepend(str(package.parent))
    here = envs.current()
    assert here is not None
    assert (here.version, here.python, here.pythonpath, here.ready) == ("0.5.21", Path(sys.executable), (), True)
    assert envs.ensure("0.5.21", quiet) == here  # not in SUPPORTED, but it is what this environment has


def test_a_folder_that_happens_to_be_called_sglang_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    assert envs.current() is None


def test_the_marker_says_what_was_installed(home: Path, pip: PretendedPip) -> None:
    envs.ensure("0.5.13", quiet)
    marker = json.loads((home / "engines" / "0.5.13" / closure.MARKER).read_text())
    assert marker["version"] == "0.5.13"
    assert marker["closure"] == closure.key()
    assert marker["python"] == closure.python_tag()
    assert len(marker["record"]) == 64


@pytest.mark.parametrize(("versions", "code"), [((), 0), (("0.5.13",), 0), (("0.5.9",), 2)])
def test_the_exit_code_of_the_module_follows_the_table(pip: PretendedPip, versions: tuple[str, ...], code: int) -> None:
    assert envs.main(versions) == code


def test_a_failed_installation_is_our_own_fault_to_the_caller(
    pip: PretendedPip, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.fail = lambda command: closure.Finished(code=1)
    assert envs.main(["0.5.13"]) == 4
    assert "could not make a virtual environment" in capsys.readouterr().err
