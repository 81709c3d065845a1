"""The doctor: every finding from a made-up machine, and what it says to type."""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from cases.meta.pretended_pip import PretendedPip, quiet
from harness.cli.main import app
from harness.engines import closure, envs
from harness.machines import doctor, doctor_gpu

usage = namedtuple("usage", "total used free")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(envs, "current", lambda: None)
    monkeypatch.setattr(closure, "run", PretendedPip())
    return tmp_path / "home"


def findings(name: str) -> list[doctor.Answer]:
    return [finding for finding in doctor.diagnose() if finding.name == name]


def only(name: str) -> doctor.Answer:
    (found,) = findings(name)
    return found


def test_nothing_installed_names_the_newest_release_and_how_to_get_it(home: Path) -> None:
    engine = only(f"SGLang {envs.NEWEST}")
    assert (engine.status, engine.fix) == ("missing", f"eaglecheck engines install {envs.NEWEST}")
    assert only("engine dependencies").status == "missing"
    assert not home.exists()  # looking changes nothing


def test_an_empty_home_stops_no_run_since_the_first_one_installs(home: Path) -> None:
    found = doctor.diagnose()
    assert doctor.first_run_installs(found)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count(f"eaglecheck engines install {envs.NEWEST}") == 1
    last = shown.stdout.splitlines()[-1]
    what = f"engine dependencies, SGLang {envs.NEWEST}"
    assert last == f"ready to run; the first run installs {what} (about 4 GB, once):  eaglecheck run"


def test_an_interrupted_installation_is_not_taken_for_none(home: Path) -> None:
    (home / "engines" / "0.5.23").mkdir(parents=True)
    assert not doctor.first_run_installs(doctor.diagnose())
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 3


def test_a_home_that_can_hold_nothing_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("a file")
    nothing_goes = (Path("/proc/eaglecheck"), "/proc cannot be written to")  # whatever access(2) says to root
    for place, why in ((home, f"{home} is no folder"), (home / "below", f"{home} is no folder"), nothing_goes):
        monkeypatch.setenv("EAGLECHECK_HOME", str(place))
        disk = only("disk")
        assert (disk.status, disk.detail) == ("missing", f"EAGLECHECK_HOME is {place}, and {why}")
        assert disk.fix.startswith("export EAGLECHECK_HOME=")
        assert not doctor.first_run_installs(doctor.diagnose())


def test_an_installed_release_is_as_published(home: Path) -> None:
    envs.ensure("0.5.13", quiet)
    assert only("SGLang 0.5.13").status == "ok"
    assert only("engine dependencies").status == "ok"
    assert findings(f"SGLang {envs.NEWEST}") == []


@pytest.fixture
def another(home: Path) -> str:
    """A published release that our tests do not run."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "published.json").write_text(json.dumps({"versions": ["0.5.16"], "when": time.time()}))
    return "0.5.16"


def test_an_installed_release_outside_our_tests_is_no_fault_and_says_so(home: Path, another: str) -> None:
    envs.ensure(another, quiet)
    finding = only(f"SGLang {another}")
    assert (finding.status, finding.fix) == ("ok", "")
    assert finding.detail.endswith("; not in our tests; driven with hooks of its own")


def test_an_unfinished_release_outside_our_tests_stops_no_run(home: Path) -> None:
    (home / "engines" / "0.5.16").mkdir(parents=True)
    finding = only("SGLang 0.5.16")
    assert (finding.status, finding.fix) == ("warn", "eaglecheck engines install 0.5.16")


def test_an_edited_file_of_a_release_is_found(home: Path) -> None:
    envs.ensure("0.5.13", quiet)
    (home / "engines" / "0.5.13" / "site" / "sglang" / "__init__.py").write_text("# patched")
    finding = only("SGLang 0.5.13")
    assert finding.status == "missing"
    assert "not as published: sglang/__init__.py" in finding.detail
    assert finding.fix.startswith("rm -r ")
    assert finding.fix.endswith("eaglecheck engines install 0.5.13")


def test_a_release_whose_package_has_gone_is_damaged(home: Path) -> None:
    envs.ensure("0.5.13", quiet)
    shutil.rmtree(home / "engines" / "0.5.13" / "site" / "sglang")
    finding = only("SGLang 0.5.13")
    assert finding.status == "missing"
    assert "damaged" in finding.detail
    assert finding.fix == "eaglecheck engines install 0.5.13"


def test_an_unfinished_release_says_so(home: Path) -> None:
    (home / "engines" / "0.5.23").mkdir(parents=True)
    assert only("SGLang 0.5.23").detail == "an installation was interrupted"


def test_a_release_of_another_list_of_dependencies_is_not_ready(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envs.ensure("0.5.13", quiet)
    monkeypatch.setattr(closure, "key", lambda: "0" * 12)
    assert "another list of dependencies" in only("SGLang 0.5.13").detail
    old = [finding for finding in findings("engine dependencies") if finding.status == "warn"]
    assert [finding.fix.split()[0] for finding in old] == ["rm"]


def test_a_folder_that_is_no_release_is_only_a_warning(home: Path) -> None:
    (home / "engines" / "scratch").mkdir(parents=True)
    assert only("SGLang scratch").status == "warn"


def test_an_sglang_beside_us_needs_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = envs.EngineEnv(version="0.5.21", python=Path("/python"), pythonpath=(), torch="2.13.0", ready=True)
    monkeypatch.setattr(envs, "current", lambda: here)
    assert only("SGLang 0.5.21").status == "ok"
    assert [finding for finding in doctor.diagnose() if finding.status == "missing"] == []


def test_a_missing_control_package_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", "no-such-thing", "sglang; extra == 'engine'"])
    finding = only("control packages")
    assert (finding.status, finding.detail) == ("missing", "not installed: no-such-thing")


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
def test_the_c_library_is_compared_as_a_version(
    home: Path, monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str], machine: str, status: str
) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert only("platform").status == status


@pytest.mark.parametrize(("free", "installed", "status"), [(2, False, "missing"), (2, True, "ok"), (4, False, "ok")])
def test_room_is_asked_for_what_is_still_to_come(
    home: Path, monkeypatch: pytest.MonkeyPatch, free: int, installed: bool, status: str
) -> None:
    if installed:
        envs.ensure("0.5.13", quiet)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free * 10**9))
    finding = only("disk")
    assert finding.status == status
    assert bool(finding.fix) == (status == "missing")


def test_little_memory_is_a_warning_with_fewer_workers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * 10**9))
    assert only("machine").fix == ".venv/bin/pytest -n 1"


def test_a_gpu_is_named_from_the_driver_without_any_library(tmp_path: Path) -> None:
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert doctor_gpu.by_driver(tmp_path) == ["NVIDIA H100 80GB HBM3"]


def test_no_compiler_matters_only_beside_a_gpu(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor_gpu, "by_driver", list)
    assert only("C compiler").status == "ok"
    monkeypatch.setattr(doctor_gpu, "by_driver", lambda: ["H100"])
    assert only("C compiler").status == "warn"


def test_every_finding_that_stops_a_run_says_what_to_do_or_why_nothing_helps(home: Path) -> None:
    stopping = [finding for finding in doctor.diagnose() if finding.status == "missing"]
    assert stopping
    assert all(finding.fix or finding.name == "platform" for finding in stopping)
