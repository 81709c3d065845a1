"""What is no regular file in a folder that somebody names is refused before it is opened, and named."""

import os
import re
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cases.meta import nights, pretended_engine, results
from cases.meta.command_line import call
from harness.archive.faults import StoreError
from harness.archive.store import RunReader
from harness.contract import plain_files
from harness.engines import envs
from harness.engines.engine import Engine
from harness.night import store

#: A command that opens one of these waits, or reads, for ever.
SECONDS = 20


@pytest.fixture(autouse=True)
def _no_waiting():
    def late(_number, _frame):
        raise AssertionError(f"still at it after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


PAIR = ("--engine", "0.5.23", "--target", "tiny/target", "--draft", "tiny/draft")
ODD = {"a named pipe": pipe, "a device": endless, "a folder": folder}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return results.store(tmp_path_factory.mktemp("runs"), *results.FAILING)


@pytest.fixture
def run(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    return shutil.copytree(whole, tmp_path / whole.name)


@pytest.fixture
def place(work, monkeypatch, eagle_tiny):
    """A home where every release is ready and none may boot, and a pair to name."""
    monkeypatch.setattr(Engine, "boot", lambda *_, **__: pytest.fail("an engine was booted"))
    pretended_engine.furnish(work / "home", published=envs.SUPPORTED)
    shutil.copytree(eagle_tiny.root, work / "tiny")
    return work


def refused(done, path, *, code=3):
    """One refusal, which names the file or, of digests that do not speak, the file they are of."""
    said = done.stderr.replace("\n", "")
    assert done.exit_code == code, done.output
    assert str(path) in said or (path.name == "SHA256SUMS" and str(path.parent) in said), said
    assert "verdict" not in done.stdout


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", [*results.OF_A_RUN, *(f"pr25015/{name}" for name in results.OF_A_SCENARIO)])
def test_of_a_run(run, name, kind, tmp_path):
    _, _, file = name.rpartition("pr25015/")
    case = next(run.glob("pr25015-*"))
    path = (case if "pr25015/" in name else run) / file
    ODD[kind](path)
    refused(call("recheck", run), path)
    if name not in results.OF_A_RUN:
        refused(call("recheck", case), path)
    refused(call("report", run, "--html", tmp_path / "page.html"), path)
    refused(call("diff", run, run), path)


@pytest.mark.parametrize("kind", ODD)
def test_of_a_runs_events(run, kind):
    ODD[kind](run / "engine.jsonl")
    with pytest.raises(StoreError, match=r"engine\.jsonl (cannot be read: it is|is missing)"):
        RunReader.open(run)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["manifest.json", *(name for name in results.OF_A_SCENARIO if name != "verdict.json")])
def test_of_a_reproducer(run, name, kind):
    reproducer = next((run / "reproducers").glob("pr25015-*"))
    ODD[kind](reproducer / name)
    refused(call("replay", reproducer), reproducer / name)
    refused(call("bisect", "--case", reproducer, "--bad", "0.5.11", "--good", "0.5.13"), reproducer / name)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", [store.PLAN, store.NIGHT])
def test_of_a_night(tmp_path, name, kind):
    night = nights.night(nights.cell())
    store.finish(store.begin(tmp_path / "nights", night.plan), night)
    path = tmp_path / "nights" / night.plan.id / name
    ODD[kind](path)
    refused(call("night", tmp_path / "nights", "--nights", tmp_path / "kept"), path, code=2)
    refused(call("matrix", "--nights", tmp_path / "nights", "--engines", "0.5.23", "--cases", "pr25015"), path, code=2)


@pytest.mark.parametrize("kind", ["a named pipe", "a device", "a link to a folder"])
def test_of_a_nights_reproducer(tmp_path, kind):
    night = nights.night(nights.cell("eagle", nights.seen(reproducer="reproducers/one")))
    shard = store.begin(tmp_path / "nights", night.plan)
    store.finish(shard, night)
    path = shard / "reproducers" / "one" / "tensors"
    path.parent.mkdir(parents=True)
    path.symlink_to("..") if kind == "a link to a folder" else ODD[kind](path)
    done = call("night", tmp_path / "nights", "--nights", tmp_path / "kept")
    refused(done, path, code=2)
    assert kind in done.stderr


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_of_a_pair(place, side, name, kind):
    path = place / "tiny" / side / name
    ODD[kind](path)
    done = call("run", "--engine", "0.5.23", "--target", "tiny/target", "--draft", "tiny/draft", code=2)
    assert f"--{side} tiny/{side}: {name} cannot be read: it is {kind}" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
@pytest.mark.parametrize(
    "typed",
    [
        ("run", "--scenario-file", "FILE"),
        ("run", "--prompts", "FILE", *PAIR),
        ("bisect", "--scenario-file", "FILE", "--bad", "0.5.11", "--good", "0.5.13"),
        ("matrix", "--nights", "nights", "--engines", "0.5.23", "--cases", "pr25015", "--known", "FILE"),
        ("report", "RUN", "--html", "page.html", "--matrix", "FILE"),
        ("report", "RUN", "--html", "page.html", "--mutants", "FILE"),
        ("engines", "unpack", "FILE"),
    ],
    ids=lambda typed: f"{typed[0]}-{typed[typed.index('FILE') - 1]}",
)
def test_a_file_that_is_named_itself(place, run, typed, kind):
    ODD[kind](place / "odd")
    done = call(*({"RUN": str(run), "FILE": "odd"}.get(part, part) for part in typed))
    assert done.exit_code in (2, 3), done.output
    assert "odd" in done.stderr
    assert f"it is {kind}" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("content", [b"", b"{}"])
def test_a_pipe_that_is_named_itself_is_meant(content):
    """As a shell makes one of `<(…)`."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    assert plain_files.named(Path(f"/proc/self/fd/{reader}")) == content
    os.close(reader)


def test_a_named_pipe_that_somebody_writes_to_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer, whole = os.open(tmp_path / "pipe", os.O_RDWR), b"{}" * 100_000  # more than it holds: the writer must wait
    with ThreadPoolExecutor() as pool:
        found = pool.submit(plain_files.named, tmp_path / "pipe")
        with open(writer, "wb") as file:
            file.write(whole)
        assert found.result() == whole
    with pytest.raises(plain_files.NotPlainError, match="it is a named pipe that nobody writes to"):
        plain_files.named(tmp_path / "pipe")


def test_a_link_to_a_file_is_a_file_and_a_socket_is_none(tmp_path):
    (tmp_path / "file").write_bytes(b"it")
    (tmp_path / "link").symlink_to("file")
    assert plain_files.content(tmp_path / "link") == b"it"
    with socket.socket(socket.AF_UNIX) as open_socket:
        open_socket.bind(str(tmp_path / "socket"))
    with pytest.raises(plain_files.NotPlainError, match="it is a socket"):
        plain_files.content(tmp_path / "socket")
    with pytest.raises(FileNotFoundError):
        plain_files.content(tmp_path / "none")


#: Modules in which a file is read otherwise, and whose it is.
OURS = {
    "harness/archive/digests.py": "what was written a moment ago",
    "harness/driving/own_source.py": "our own source",
    "harness/driving/checkpoint_files.py": "weights, of which only names and shapes are read, each checked before",
    "harness/driving/refusals.py": "a table of ours beside it",
    "reports/columns.py": "a table of ours beside it",
    "reports/blame.py": "SGLang's own source in the environment of its release",
    "reports/page.py": "templates",
}


def test_no_reader_of_what_somebody_names_opens_a_file_by_itself():
    root = Path(__file__).parents[2]
    rooms = ("harness/archive", "harness/night", "harness/cli", "harness/driving", "reports")
    modules = [*(path for room in rooms for path in (root / room).glob("*.py")), root / "cases" / "catalogue.py"]
    found = {
        path.relative_to(root).as_posix()
        for path in (*modules, root / "cases" / "known.py")
        if re.search(r"\.read_(bytes|text)\(|\.open\(\"r", path.read_text())
    }
    assert found - {"harness/archive/run_folders.py"} == set(OURS), "read it with harness.contract.plain_files"


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_where_a_file_cannot_be_written_to_its_end_nothing_of_it_stays(tmp_path, monkeypatch, stop):
    (tmp_path / "kept").write_text("before")

    def full(*_):
        raise stop

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(type(stop)):
        plain_files.replace(tmp_path / "kept", b"after", sync=True)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("kept", "before")]
