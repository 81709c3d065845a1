"""A temporary folder is removed once its owner is gone, and never before: by process id and start time together."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.engines import scratch
from harness.machines import doctor

HOLDS = """
import signal
from harness.engines import scratch
folder, other = scratch.make(), scratch.make("handoff-")
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
    mine = scratch.make()
    assert scratch.left_behind() == scratch.remove_left_behind() == []
    assert all(folder.is_dir() for folder in folders)
    process.kill()
    process.wait()
    assert scratch.left_behind() == sorted(folders)
    (finding,) = doctor._left_behind()
    assert (finding.status, finding.fix.split("  ")[0]) == ("warn", "eaglecheck run")
    assert finding.detail.startswith("2 folders of an eaglecheck that was killed: ")
    assert all(str(folder) in finding.detail for folder in folders)
    assert scratch.remove_left_behind() == sorted(folders)
    assert not any(folder.exists() for folder in folders)
    assert list(doctor._left_behind()) == []
    assert Path(mine.name).is_dir()
    mine.cleanup()


def test_an_orderly_end_leaves_nothing(owner, place):
    process, _ = owner
    process.send_signal(signal.SIGINT)
    process.wait()
    assert list(place.iterdir()) == []


def rewritten(folder, **changes):
    path = Path(folder.name, scratch.OWNER)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "dead"),
    [
        ({}, False),
        ({"started": 1.0}, True),  # the number is somebody else's by now
        ({"boot": "another"}, False),  # another machine's, or of before a restart: nobody can say
        ({"pids": "pid:[1]"}, False),  # another container's
        ({"pid": "x"}, False),
    ],
    ids=str,
)
def test_only_what_is_certainly_dead_is_touched(place, changes, dead):
    folder = scratch.make()
    rewritten(folder, **changes)
    assert (scratch.left_behind() == [Path(folder.name)]) is dead


def test_a_folder_without_an_owner_and_a_link_are_left_alone(place, tmp_path_factory):
    (place / f"{scratch.PREFIX}old").mkdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / scratch.OWNER).write_text(json.dumps({**scratch._me(), "started": 1.0}))
    os.symlink(elsewhere, place / f"{scratch.PREFIX}link")
    assert scratch.remove_left_behind() == []
    assert elsewhere.is_dir()
