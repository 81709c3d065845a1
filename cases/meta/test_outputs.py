"""Where output goes is asked before anything slow, by one rule: a path's last part may be new, and nothing above it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cases.meta import nights, results
from cases.meta.command_line import call
from harness.contract import outputs
from harness.contract.outputs import OutputError, WriteFailed, writable, write_text
from harness.engines.engine import Engine
from harness.night import store


@pytest.fixture
def work(work, monkeypatch):
    monkeypatch.setattr(Engine, "boot", lambda *_, **__: pytest.fail("an engine was booted"))
    results.store(work / "runs", ("single", results.sound))
    night = nights.night(nights.cell())
    store.finish(store.begin(work / "shards", night.plan), night)
    (work / "file").write_text("")
    return work


FOLDERS = {
    "runs": ("run", "--engine", "0.5.23", "--scenario", "single", "--runs"),
    "runs of mutants": ("mutants", "--engine", "0.5.23", "--runs"),
    "runs of mutants of the source": ("mutate", "--engine", "0.5.23", "--runs"),
    "runs of a search": ("bisect", "--case", "pr25015", "--bad", "0.5.11", "--good", "0.5.13", "--runs"),
    "nights": ("matrix", "--engines", "0.5.23", "--cases", "pr25015", "--nights"),
    "nights of shards": ("night", "shards", "--nights"),
    "csv": ("report", "runs/latest", "--csv"),
    "parquet": ("report", "runs/latest", "--parquet"),
}


@pytest.mark.parametrize("command", FOLDERS.values(), ids=FOLDERS)
def test_no_folder_above_the_one_that_is_named_is_made(work, command):
    before = {path for path in work.iterdir() if path.name != "home"}
    wrong = [("file/below", "Not a directory")]
    wrong += [("no/such/place", "there is no folder no/such")] * (command[-1] not in ("--runs", "--nights"))  # are made
    for named, why in wrong:
        done = call(*command, named, code=2)
        assert f"cannot write to {named}: {why}\n  name another place:  {command[-1]} PATH" in done.stderr
    assert {path for path in work.iterdir() if path.name != "home"} == before


@pytest.mark.parametrize("command", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_no_standard_output(work, command):
    done = call(*command, "-")
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        f"{command[-1]} -: not written to standard output\n  name a place on disk:  {command[-1]} PATH" in done.stderr
    )
    assert not (work / "-").exists()


def test_the_folder_itself_is_made(work):
    for option in ("--csv", "--parquet"):
        call("report", "runs/latest", option, f"new{option}", code=0)
        assert (work / f"new{option}").is_dir()


def test_a_folder_that_could_be_made_is_not_made_by_asking(work):
    for folder in (work / "runs", work / "deep" / "er" / "runs", Path("deep")):
        assert writable(folder) == folder
    assert not (work / "deep").exists()


def test_a_file_is_no_folder(work):
    done = call("report", "runs/latest", "--csv", "file", code=2)
    assert "cannot write to file: it is a file" in done.stderr
    (work / "nowhere").symlink_to("gone")
    with pytest.raises(OutputError, match="it is not a folder"):
        writable(work / "nowhere")


def test_where_kernels_are_kept_is_asked_before_they_are_compiled(work):
    done = call("engines", "unpack", "file", "--warm", "--keep-kernels", "no/such/file", code=2)
    assert "cannot write to no/such/file: there is no folder no/such" in done.stderr


LISTS = {
    "engines": (("matrix", "--cases", "pr25015"), "0.5.13"),
    "cases": (("matrix", "--engines", "0.5.13"), "pr25015"),
    "families": (("matrix", "--engines", "0.5.13", "--nights", "nights"), "eagle"),
    "revert": (("matrix", "--engines", "0.5.13", "--cases", "pr25015"), "25015"),
    "only": (("mutants", "--engine", "0.5.13"), "draft-position-late"),
}


@pytest.mark.parametrize("option", LISTS)
@pytest.mark.parametrize("text", ["{},,", ",{}", "{}, ,{}"])
def test_a_comma_that_stands_for_nothing_is_refused(work, option, text):
    command, name = LISTS[option]
    done = call(*command, f"--{option}", text.format(name, name), code=2)
    assert "empty entry beside a comma" in done.stderr
    assert f"--{option} {name}" in done.stderr


def test_a_named_pipe_that_nobody_reads_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "READER_SECONDS", 0.0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteFailed, match="nobody reads this named pipe"):
        write_text("text", str(tmp_path / "pipe"))


def test_a_named_pipe_is_filled_for_whoever_reads_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    whole = "text" * 100_000  # more than it holds at once
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_text(whole, str(tmp_path / "pipe"))
        assert read.result() == whole
