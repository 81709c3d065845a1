"""A temporary folder is removed once its owner is gone, and never before: its owner holds a lock in it."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.engines import temporary_folders
from harness.machines import doctor

HOLDS = """
import signal
from harness.engines import temporary_folders
folder, other = temporary_folders.TemporaryFolder(), temporary_folders.TemporaryFolder("handoff-")
print(folder.name, other.name, flush=True)
signal.pause()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(place):
    """A process with two folders: (process, folders)."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        yield process, [Path(name) for name in process.stdout.readline().split()]
        process.kill()


def test_folders_of_a_process_that_was_killed_are_named_and_removed_and_those_of_a_live_one_are_not(owner):
    process, folders = owner
    mine = temporary_folders.TemporaryFolder()
    assert temporary_folders.left_behind() == temporary_folders.remove_left_behind() == []
    assert all(folder.is_dir() for folder in folders)
    process.kill()
    process.wait()
    assert temporary_folders.left_behind() == sorted(folders)
    (finding,) = doctor._left_behind()
    assert (finding.status, finding.fix.split("  ")[0]) == ("warn", "eaglecheck run")
    assert finding.detail.startswith("2 folders of an eaglecheck that was killed: ")
    assert all(str(folder) in finding.detail for folder in folders)
    assert temporary_folders.remove_left_behind() == sorted(folders)
    assert not any(folder.exists() for folder in folders)
    assert list(doctor._left_behind()) == []
    assert Path(mine.name).is_dir()
    mine.cleanup()


def test_an_orderly_end_leaves_nothing(owner, place):
    process, _ = owner
    process.send_signal(signal.SIGINT)
    process.wait()
    assert list(place.iterdir()) == []


def test_a_folder_without_a_lock_and_a_link_are_left_alone(place, tmp_path_factory):
    (place / f"{temporary_folders.PREFIX}old").mkdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / temporary_folders.LOCK).touch()
    os.symlink(elsewhere, place / f"{temporary_folders.PREFIX}link")
    assert temporary_folders.remove_left_behind() == []
    assert elsewhere.is_dir()


@pytest.mark.usefixtures("place")
def test_a_lock_is_not_handed_on_to_what_its_owner_starts():
    """Or an engine's orphan would keep its dead owner's folder."""
    mine = temporary_folders.TemporaryFolder()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        mine._lock.close()
        assert temporary_folders.left_behind() == [Path(mine.name)]
        child.communicate(b"\n")
    mine.cleanup()
