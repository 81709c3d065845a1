"""Engine environments with a pretended pip: what is installed when, what is resumed, what is said. No network."""

import importlib.machinery
import importlib.util
import json
import re
import shutil
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from cases.meta.pretended_pip import PretendedPip, quiet
from harness.engines import dependencies, envs, releases


@pytest.fixture
def home(tmp_path, monkeypatch):
    place = tmp_path / "home with a space"
    monkeypatch.setenv("EAGLECHECK_HOME", str(place))
    monkeypatch.setattr(envs, "current", lambda: None)
    return place


@pytest.fixture
def index(home):
    """A fresh list of published releases, so that no index is asked."""
    home.mkdir(parents=True)
    path = home / "published.json"
    names = ["0.5.9", "0.5.12", *envs.SUPPORTED, "0.5.16", "0.5.17", "0.5.18", "0.5.24"]
    path.write_text(json.dumps({"versions": names, "when": time.time()}))
    return path


@pytest.fixture
def pip(home, monkeypatch):
    pretended = PretendedPip()
    monkeypatch.setattr(dependencies, "run", pretended)
    return pretended


def test_a_fresh_home_gets_the_dependencies_once_and_each_release_beside_it(home, pip):
    first, second = envs.ensure("0.5.13", quiet), envs.ensure("v0.5.23", quiet)
    assert (first.ready, second.ready, second.version) == (True, True, "0.5.23")
    assert first.python == second.python == dependencies.location() / "bin" / "python"
    assert first.pythonpath == (home / "engines" / "0.5.13" / "site",)
    assert first.torch == "2.13.0+cpu"
    assert (pip.count("-m venv"), pip.count("-r "), pip.count("--target")) == (1, 1, 2)
    assert "--no-deps --only-binary=sglang" in pip.commands[-1], "no dependencies of its own, nothing built"
    assert pip.commands[-1].endswith("sglang==0.5.23")
    marker = json.loads((home / "engines" / "0.5.13" / dependencies.MARKER).read_text())
    assert len(marker.pop("record")) == 64
    assert marker == {"version": "0.5.13", "closure": dependencies.key(), "python": dependencies.python_tag()}


@pytest.mark.parametrize("stage", ["-m venv", "-r ", "--target"])
def test_an_interrupt_at_any_stage_is_resumed_and_leaves_no_marker(pip, stage):
    def interrupt(command):
        if stage in command:
            raise KeyboardInterrupt

    pip.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        envs.ensure("0.5.13", quiet)
    assert not envs.state("0.5.13").ready
    pip.fail = lambda command: None
    said = []
    assert envs.ensure("0.5.13", said.append).ready
    assert any("installing" in line for line in said)


def test_leftovers_of_an_interrupted_release_do_not_survive_into_the_finished_one_which_is_ready_at_once(home, pip):
    half = home / "engines" / "0.5.13" / "site" / "sglang"
    half.mkdir(parents=True)
    (half / "stale.py").touch()
    assert envs.state("0.5.13").why == "an installation was interrupted"
    envs.ensure("0.5.13", quiet)
    assert not (half / "stale.py").exists()
    pip.commands.clear()
    assert envs.ensure("0.5.13", quiet).ready
    assert pip.commands == []


@pytest.mark.parametrize(
    ("damage", "why", "venvs"),
    [
        (lambda folder: (folder / dependencies.MARKER).write_text(""), "an installation was interrupted", 1),
        (lambda folder: (folder / dependencies.MARKER).write_text("[]"), "an installation was interrupted", 1),
        (lambda folder: shutil.rmtree(folder / "site" / "sglang"), "damaged: its sglang package is missing", 1),
        (
            lambda _: shutil.rmtree(dependencies.torch_folder(dependencies.location())),
            "its shared environment is not built",
            2,
        ),
        (
            lambda _: dependencies.interpreter(dependencies.location()).unlink(),
            "its shared environment is not built",
            2,
        ),
    ],
)
def test_what_is_damaged_is_named_and_installed_again(home, pip, damage, why, venvs):
    envs.ensure("0.5.13", quiet)
    damage(home / "engines" / "0.5.13")
    assert (envs.state("0.5.13").ready, envs.state("0.5.13").why) == (False, why)
    assert envs.ensure("0.5.13", quiet).ready
    assert pip.count("-m venv") == venvs


def test_another_list_of_dependencies_means_another_folder_and_names_the_old_one(pip, tmp_path, monkeypatch):
    envs.ensure("0.5.13", quiet)
    old = dependencies.location()
    changed = tmp_path / "dependencies.txt"
    changed.write_text(dependencies.REQUIREMENTS.read_text() + "six==1.17.0\n")
    monkeypatch.setattr(dependencies, "REQUIREMENTS", changed)
    said = []
    assert envs.ensure("0.5.13", said.append).ready
    assert dependencies.location() != old
    assert dependencies.leftovers() == (old,)
    assert any(str(old) in line and "rm -r" in line for line in said)


def test_two_callers_at_once_install_once(pip):
    pip.seconds = 0.05
    said, results = [], []
    callers = [threading.Thread(target=lambda: results.append(envs.ensure("0.5.13", said.append))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [engine.ready for engine in results] == [True] * 4
    assert (pip.count("-m venv"), pip.count("--target")) == (1, 1)
    assert any(line.startswith("waiting: another process is installing closure-") for line in said)


NO_SPACE = "ERROR: Could not install packages: [Errno 28] No space left on device"
NO_MATCH = "ERROR: No matching distribution found for sglang==0.5.13"


@pytest.mark.parametrize(
    ("stage", "done", "says"),
    [
        (
            "--target",
            dependencies.Finished(code=1, tail=(NO_MATCH,)),
            # The folder has a space: quoted, so that it can be pasted.
            ["pip could not install SGLang 0.5.13 (exit 1)", NO_MATCH, "type the same command", "' -I -m pip install"],
        ),
        ("-r ", dependencies.Finished(code=1, tail=(NO_SPACE,)), ["no space left on device", "EAGLECHECK_HOME"]),
        ("--target", dependencies.Finished(code=0), ["pip reported success but left no SGLang 0.5.13"]),
    ],
)
def test_a_failing_pip_shows_the_cause_and_what_to_type(pip, stage, done, says):
    pip.fail = lambda command: done if stage in command else None
    with pytest.raises(envs.EnvError) as caught:
        envs.ensure("0.5.13", quiet)
    assert [text for text in says if text not in str(caught.value)] == []
    assert not envs.state("0.5.13").ready


def test_too_small_a_disk_is_refused_before_anything_is_downloaded(pip, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - 10**9, 10**9))
    with pytest.raises(envs.EnvError, match=r"1\.0 GB free .*3\.5 GB needed"):
        envs.ensure("0.5.13", quiet)
    assert pip.commands == []


@pytest.mark.usefixtures("pip")
def test_a_home_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(envs.EnvError, match="cannot write") as caught:
        envs.ensure("0.5.13", quiet)
    assert "EAGLECHECK_HOME" in caught.value.next_step


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
def test_a_release_that_cannot_be_driven_lists_what_is_allowed(pip, version, says, nearest):
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
def test_any_published_release_can_be_had_and_says_what_drives_it(pip, asked, name, hooks):
    assert envs.resolve(asked) == name
    assert (envs.ensure(asked, quiet).version, envs.state(name).ready) == (name, True)
    assert pip.commands[-1].endswith(f"sglang=={name}")
    assert envs.standing(name) == f"not in our tests; driven with {hooks}"


@pytest.mark.usefixtures("pip")
def test_a_release_of_our_tests_or_one_installed_here_asks_no_index(monkeypatch, index):
    envs.ensure("0.5.18", quiet)
    index.unlink()
    monkeypatch.setattr(releases, "_ask_pip", lambda: pytest.fail("the index was asked"))
    assert (envs.resolve("0.5.18"), envs.resolve("0.5.13"), envs.standing("0.5.13")) == ("0.5.18", "0.5.13", "")


def test_the_releases_of_our_tests_are_those_that_make_test_installs():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert re.search(r"^TEST_ENGINES := (.*)$", makefile, re.M)[1].split() == [*envs.SUPPORTED]


@pytest.mark.usefixtures("pip")
def test_without_an_index_another_release_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(releases, "_ask_pip", lambda: ((), "no route to host"))
    with pytest.raises(envs.UnknownReleaseError, match="the published releases are not known") as caught:
        envs.resolve("0.5.18")
    assert "no route to host" in caught.value.allowed


def test_installed_releases_are_listed_in_release_order_finished_or_not(home, pip):
    assert envs.list_installed() == ()
    assert not home.exists(), "looking makes nothing"
    for version in ("0.5.23", "0.5.12.post1", "0.5.11"):
        envs.ensure(version, quiet)
    (home / "engines" / "0.5.17").mkdir()
    listed = [(engine.version, engine.ready) for engine in envs.list_installed()]
    assert listed == [("0.5.11", True), ("0.5.12.post1", True), ("0.5.17", False), ("0.5.23", True)]


def test_the_sglang_of_this_interpreter_is_used_as_it_is(home, monkeypatch, tmp_path):
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
    assert (here.version, here.python, here.pythonpath, here.ready) == ("0.5.21", Path(sys.executable), (), True)
    assert envs.ensure("0.5.21", quiet) == here  # not in SUPPORTED, but it is what this environment has


def test_a_folder_that_happens_to_be_called_sglang_is_no_engine(monkeypatch):
    folder = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    assert envs.current() is None


@pytest.mark.parametrize(("versions", "code"), [((), 0), (("0.5.13",), 0), (("0.5.9",), 2)])
@pytest.mark.usefixtures("pip")
def test_the_exit_code_of_the_module_follows_the_table(versions, code):
    assert envs.main(versions) == code


def test_a_failed_installation_exits_4(pip, capsys):
    pip.fail = lambda command: dependencies.Finished(code=1)
    assert envs.main(["0.5.13"]) == 4
    assert "could not make a virtual environment" in capsys.readouterr().err
