"""What every installation stands on: the pinned list, the home folder, the lock and running a command."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cases.meta.pretended_pip import quiet
from harness.engines import dependencies


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    return dependencies.home()


def test_a_comment_in_the_list_of_dependencies_rebuilds_nothing(tmp_path, monkeypatch):
    before = dependencies.key()
    commented = tmp_path / "dependencies.txt"
    commented.write_text("# a remark\n" + dependencies.REQUIREMENTS.read_text())
    monkeypatch.setattr(dependencies, "REQUIREMENTS", commented)
    assert dependencies.key() == before


def test_every_dependency_is_pinned():
    lines = [line.split("#")[0].strip() for line in dependencies.REQUIREMENTS.read_text().splitlines()]
    assert [line for line in lines if line and "==" not in line] == []
    assert "torch==2.13.0" in lines


def test_the_installer_of_a_killed_parent_still_holds_the_lock(home):
    program = (
        "from harness.engines import dependencies\n"
        "with dependencies.installing('x', print) as lock:\n"
        "    dependencies.run(['sh', '-c', 'echo \"  Downloading pip-is-running (99 MB)\"; sleep 2'], lock=lock,"
        " progress=lambda line: print(line, flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert "pip-is-running" in parent.stdout.readline()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    progress = []
    with dependencies.installing("x", progress.append):
        pass
    assert progress == ["waiting: another process is installing x"]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"EAGLECHECK_HOME": "/somewhere", "XDG_CACHE_HOME": "/cache"}, "/somewhere"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/eaglecheck"),
        ({"EAGLECHECK_HOME": "", "XDG_CACHE_HOME": "", "HOME": "/people/ada"}, "/people/ada/.cache/eaglecheck"),
        ({"EAGLECHECK_HOME": "~/ec", "HOME": "/people/ada"}, "/people/ada/ec"),
    ],
)
def test_home_follows_the_usual_variables(monkeypatch, variables, place):
    for name in ("EAGLECHECK_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dependencies.home() == Path(place)


def test_run_keeps_the_last_lines_and_reports_large_downloads_only(home):
    lines = [
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (1.2 GB)",
        "  Downloading https://index.example/packages/ab/triton-3.7.1-cp311.whl (197.7 MB)",
        "  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)",
        "  Downloading small-1.0.whl (9.9 MB)",
        *(f"line {number}" for number in range(40)),
    ]
    program = f"import sys; print({chr(10).join(lines)!r}); sys.exit(3)"
    progress = []
    with dependencies.installing("x", quiet) as lock:
        done = dependencies.run([sys.executable, "-c", program], lock=lock, progress=progress.append)
    assert progress == [
        "downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (1.2 GB)",
        "downloading triton-3.7.1-cp311.whl (197.7 MB)",
    ]
    assert done.code == 3
    assert len(done.tail) == dependencies.TAIL_LINES
    assert done.tail[-1] == "line 39"


def test_an_interrupt_ends_the_command_that_was_running(home, tmp_path):
    def interrupt(_line):
        raise KeyboardInterrupt

    command = ["sh", "-c", 'echo "  Downloading big (99 MB)"; exec sleep 900']
    with dependencies.installing("x", quiet) as lock, pytest.raises(KeyboardInterrupt):
        dependencies.run(command, lock=lock, progress=interrupt)


def test_a_long_installation_says_that_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(dependencies, "PULSE_SECONDS", 0.1)
    said, enough = [], tmp_path / "enough"

    def progress(line):
        said.append(line)
        if len(said) == 3:
            enough.touch()

    command = ["sh", "-c", f"until [ -e {enough} ]; do sleep 0.05; done"]
    with (tmp_path / "lock").open("w") as lock:
        dependencies.run(command, lock=lock.fileno(), progress=progress)
    assert all(line.startswith("still installing (") for line in said)


def test_whatever_stands_where_an_installation_goes_is_removed_and_a_links_end_is_left_alone(home, tmp_path):
    home.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name, make in {
        "folder": Path.mkdir,
        "file": Path.touch,
        "link": lambda place: place.symlink_to(tmp_path / "elsewhere"),
        "link-to-nothing": lambda place: place.symlink_to("/nowhere"),
    }.items():
        make(home / name)
        said = []
        dependencies.start_afresh(home / name, need_gb=0.0, progress=said.append)
        assert said == [f"removing an unfinished or outdated {name}"]
    assert not list(home.iterdir())
    assert (tmp_path / "elsewhere").is_dir()
