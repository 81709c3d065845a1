"""The doctor: every finding from a made-up machine, and what it says to type."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cases.meta.command_line import call
from cases.meta.pretended_pip import PretendedPip, quiet
from harness.engines import dependencies, envs
from harness.machines import doctor, doctor_gpu

usage = namedtuple("usage", "total used free")


INSTALL = "eaglecheck engines install "


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(envs, "current", lambda: None)
    monkeypatch.setattr(dependencies, "run", PretendedPip())
    return tmp_path / "home"


def answers(name):
    return [answer for answer in doctor.diagnose() if answer.name == name]


def only(name):
    (found,) = answers(name)
    return found


def test_an_empty_home_stops_no_run_since_the_first_one_installs(home):
    engine = only(f"SGLang {envs.NEWEST}")
    assert (engine.status, engine.fix) == ("missing", INSTALL + envs.NEWEST)
    found = doctor.diagnose()
    assert doctor.first_run_installs(found)
    assert all(one.fix for one in found if one.status == "missing")
    shown = call("doctor", code=0)
    assert shown.stdout.count(INSTALL + envs.NEWEST) == 1
    last = shown.stdout.splitlines()[-1]
    what = f"engine dependencies, SGLang {envs.NEWEST}"
    assert last == f"ready to run; the first run installs {what} (about 4 GB, once):  eaglecheck run"
    assert not home.exists(), "looking changes nothing"


def test_python_that_writes_no_bytecode_is_named(home, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert answers("bytecode") == []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert (only("bytecode").status, str(home / "bytecode") in only("bytecode").fix) == ("warn", True)


def test_an_interrupted_installation_is_not_taken_for_none_and_another_folder_is_only_a_warning(home):
    (home / "engines" / "scratch").mkdir(parents=True)
    assert only("SGLang scratch").status == "warn"
    (home / "engines" / "0.5.23").mkdir(parents=True)
    assert only("SGLang 0.5.23").detail == "an installation was interrupted"
    assert not doctor.first_run_installs(doctor.diagnose())
    call("doctor", code=3)


def test_a_home_that_can_hold_nothing_is_named(home, monkeypatch):
    home.write_text("a file")
    nothing_goes = (Path("/proc/eaglecheck"), "/proc cannot be written to")  # whatever access(2) says to root
    for place, why in ((home, f"{home} is no folder"), (home / "below", f"{home} is no folder"), nothing_goes):
        monkeypatch.setenv("EAGLECHECK_HOME", str(place))
        disk = only("disk")
        assert (disk.status, disk.detail) == ("missing", f"EAGLECHECK_HOME is {place}, and {why}")
        assert disk.fix.startswith("export EAGLECHECK_HOME=")
        assert not doctor.first_run_installs(doctor.diagnose())


def test_a_release_outside_our_tests_is_no_fault_and_unfinished_it_stops_no_run(home):
    home.mkdir(parents=True)
    (home / "published.json").write_text(json.dumps({"versions": ["0.5.16"], "when": time.time()}))
    envs.ensure("0.5.16", quiet)
    done = only("SGLang 0.5.16")
    assert (done.status, done.fix) == ("ok", "")
    assert done.detail.endswith("; not in our tests; driven with hooks of its own")
    (home / "engines" / "0.5.15").mkdir()
    unfinished = only("SGLang 0.5.15")
    assert (unfinished.status, unfinished.fix) == ("warn", INSTALL + "0.5.15")


@pytest.mark.parametrize(
    ("damage", "says", "first"),
    [
        (lambda package: (package / "__init__.py").write_text("# patched"), "sglang/__init__.py", "rm -r "),
        (shutil.rmtree, "damaged", INSTALL),
    ],
    ids=["edited", "removed"],
)
def test_an_installed_release_is_as_published_and_a_damaged_one_is_installed_again(home, damage, says, first):
    envs.ensure("0.5.13", quiet)
    assert (only("SGLang 0.5.13").status, only("engine dependencies").status) == ("ok", "ok")
    assert answers(f"SGLang {envs.NEWEST}") == []
    damage(home / "engines" / "0.5.13" / "site" / "sglang")
    found = only("SGLang 0.5.13")
    assert found.status == "missing"
    assert says in found.detail
    assert found.fix.startswith(first)
    assert found.fix.endswith(INSTALL + "0.5.13")


def test_a_release_of_another_list_of_dependencies_is_not_ready(home, monkeypatch):
    envs.ensure("0.5.13", quiet)
    monkeypatch.setattr(dependencies, "key", lambda: "0" * 12)
    assert "another list of dependencies" in only("SGLang 0.5.13").detail
    old = [answer for answer in answers("engine dependencies") if answer.status == "warn"]
    assert [answer.fix.split()[0] for answer in old] == ["rm"]


def test_an_sglang_beside_us_needs_no_other(home, monkeypatch):
    here = envs.EngineEnv(version="0.5.21", python=Path("/python"), pythonpath=(), torch="2.13.0", ready=True)
    monkeypatch.setattr(envs, "current", lambda: here)
    assert only("SGLang 0.5.21").status == "ok"
    assert [answer for answer in doctor.diagnose() if answer.status == "missing"] == []


def test_a_missing_control_package_is_named(home, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", "no-such-thing", "sglang; extra == 'engine'"])
    found = only("control packages")
    assert (found.status, found.detail) == ("missing", "not installed: no-such-thing")


@pytest.mark.parametrize(
    ("libc", "machine", "status"),
    [
        (("glibc", "2.36"), "x86_64", "ok"),
        (("glibc", "2.34"), "x86_64", "ok"),
        (("glibc", "2.5"), "x86_64", "missing"),
        (("", ""), "x86_64", "missing"),
        (("glibc", "2.36"), "aarch64", "warn"),
    ],
)
def test_the_c_library_is_compared_as_a_version(home, monkeypatch, libc, machine, status):
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert only("platform").status == status


@pytest.mark.parametrize(("free", "installed", "status"), [(2, False, "missing"), (2, True, "ok"), (4, False, "ok")])
def test_room_is_asked_for_what_is_still_to_come(home, monkeypatch, free, installed, status):
    if installed:
        envs.ensure("0.5.13", quiet)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free * 10**9))
    found = only("disk")
    assert (found.status, bool(found.fix)) == (status, status == "missing")


def test_little_memory_is_a_warning_with_fewer_workers(home, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * 10**9))
    assert only("machine").fix == ".venv/bin/pytest -n 1"


def test_a_gpu_is_named_from_the_driver_without_any_library(tmp_path):
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert doctor_gpu.by_driver(tmp_path) == ["NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(("cards", "status"), [([], "ok"), (["H100"], "warn")])
def test_no_compiler_matters_only_beside_a_gpu(home, monkeypatch, cards, status):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor_gpu, "by_driver", lambda: cards)
    assert only("C compiler").status == status
