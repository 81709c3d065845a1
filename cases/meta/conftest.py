"""Fixtures of several test files of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cases.checkpoints import make
from cases.meta import handmade
from cases.meta.pretended_card import PretendedCards

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """What tests compute is tiny, and workers share the cores."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture
def sound():
    """(scenario, engine trace) of three requests, the third in chunks, without a fault: for a test to break."""
    scenario = handmade.scenario()
    return scenario, handmade.build(scenario)[0]


@pytest.fixture(scope="session")
def made_pair(tmp_path_factory):
    """Tiny pairs by name, each made once; `make` verifies their bytes again whenever one is asked for."""
    root = tmp_path_factory.mktemp("pairs")
    return lambda name: make(name, root)


@pytest.fixture(scope="session")
def eagle_tiny(made_pair):
    """The pair that most tests use."""
    return made_pair("eagle-tiny")


@pytest.fixture(scope="session")
def mtp_tiny(made_pair):
    """A pair whose draft is of MTP layers."""
    return made_pair("mtp-tiny")


@pytest.fixture(scope="session")
def eagle_head(eagle_tiny):
    """The draft head of that pair, with its target."""
    from reference.pairs import load_pair

    return load_pair(eagle_tiny.target, eagle_tiny.draft)[1]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working folder, with a home for engines in it; this interpreter has no SGLang of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EAGLECHECK_RUNS", raising=False)
    monkeypatch.setattr("harness.engines.envs.current", lambda: None)
    return tmp_path


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; needs the right to mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def full_disk(small_disk):
    """One without a byte left."""
    (small_disk / "ballast").write_bytes(bytes(64 * 1024))
    return small_disk


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Cards that are not there, seen by this process and its children."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = PretendedCards(tmp_path / "cards")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def inner_session(tmp_path):
    """Runs pytest with our plugin on a test file with this text: inner_session(text, *options, **environment)."""

    def run(text, *options, **environment):
        (tmp_path / "test_inner.py").write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = engine\naddopts = --dist=worksteal -ra\n")
        without = (f"-pno:{name}" for name in ("cacheprovider", "hypothesispytest", "syrupy"))
        command = [sys.executable, "-m", "pytest", "-pharness.suite.plugin", *without, *options]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "EAGLECHECK_"))}
        kept.pop("CI", None)
        kept |= {"EAGLECHECK_HOME": str(tmp_path / "home"), "COLUMNS": "200", "PYTHONPATH": str(ROOT)} | environment
        return subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(autouse=True)
def no_source_of_a_release(monkeypatch, request):
    """Lines of SGLang's source are those of what happens to be installed; a test that asks for them brings a source.

    The flags of a server are many and no test's business but that of an exported file.
    """
    monkeypatch.setattr("reports.blame.flags", lambda _arguments: ["--flag"])
    if "test_where_names" not in request.node.name:
        monkeypatch.setattr("reports.blame._functions", lambda _module, _release: {})
