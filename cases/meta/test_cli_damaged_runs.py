"""`recheck` of a stored run of which one file is gone or holds something else: never a PASS for what was not read."""

from __future__ import annotations

import shutil

import pytest

from cases.meta import results
from cases.meta.command_line import call
from harness.archive.digests import SUMS
from harness.archive.run_folders import is_case

#: What is done to a file.
HARMS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "not JSON": lambda path: path.write_bytes(b"\x00\xff nothing {"),
}
OF_A_RUN = (SUMS, "manifest.json", "verdict.json", "engine.jsonl")
OF_A_CASE = (
    *(SUMS, "scenario.json", "findings.jsonl", "engine.json", "engine.parquet", "tensors/engine.safetensors"),
    *("reference.json", "reference.parquet", "tensors/reference.safetensors"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one scenario that passes and one that fails, of which a reproducer is kept."""
    return results.store(tmp_path_factory.mktemp("runs"), *results.FAILING)


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


def passing(run):
    return next(run.glob("single-*"))


def reproducer(run):
    return next(run.glob("reproducers/*"))


def kept(folder):
    """The names of the files in a folder, but not in those of its scenarios and reproducers."""
    inside = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in inside if not is_case(path.parent) or path.parent == folder}


def test_every_file_that_a_run_keeps_is_tried(run):
    assert {name for name in kept(run) if "/tensors/" not in name} == {*OF_A_RUN}
    assert kept(passing(run)) == {*OF_A_CASE, "verdict.json"}
    assert kept(reproducer(run)) == {*OF_A_CASE, "manifest.json"}


def judged(folder, path, harm):
    """The exit code and what is said of a folder, one file of which is harmed."""
    before = path.read_bytes()
    HARMS[harm](path)
    done = call("recheck", folder)
    assert "Traceback" not in done.output
    return None if path.is_file() and path.read_bytes() == before else done


def refused(done, path):
    """UNKNOWN, with the file and what to type."""
    assert done.exit_code == 3, done.output
    said = done.output.replace("\n", "")
    assert "UNKNOWN" in said
    assert path.name in said or path.parent.name in said, said
    assert "eaglecheck " in said


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", [*OF_A_CASE, "verdict.json"])
def test_a_scenario_that_is_not_whole_is_unknown(run, name, harm):
    file = passing(run) / name
    done = judged(passing(run), file, harm)
    if done is not None:  # of one that passes findings.jsonl is empty anyway
        refused(done, file)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", [*OF_A_RUN, *(f"single/{name}" for name in (*OF_A_CASE, "verdict.json"))])
def test_a_run_that_is_not_whole_is_never_a_pass(whole, tmp_path, name, harm):
    run = results.store(tmp_path, ("single", results.sound))
    file = (passing(run) if "/" in name else run) / name.removeprefix("single/")
    done = judged(run, file, harm)
    if (name, harm) == (SUMS, "missing"):
        assert done.exit_code == 0, done.output
        assert f"has no {SUMS}: nothing shows that its files are as written" in done.stdout.replace("\n", " ")
    elif done is not None:
        refused(done, file)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", [*OF_A_CASE, "manifest.json"])
def test_a_reproducer_that_is_not_whole_is_unknown_or_still_a_failure(run, name, harm):
    file = reproducer(run) / name
    done = judged(reproducer(run), file, harm)
    if harm == "missing" and name in (SUMS, "manifest.json"):  # its rows are all there
        assert done.exit_code == 1, done.output
        assert name in done.stdout or "verdict.json" in done.stdout
    else:
        refused(done, file)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_what_is_wrong_with_a_run_is_said_beside_a_scenario_of_it(run, name, harm):
    file = run / name
    done = judged(passing(run), file, harm)
    if name == "verdict.json" or (name, harm) == (SUMS, "missing"):
        assert done.exit_code == 0, done.output
        assert name != "verdict.json" or "is incomplete: it" in done.stdout.replace("\n", " ")
    else:
        refused(done, file)


@pytest.mark.parametrize("command", ["recheck", "report", "diff", "export"])
def test_what_cannot_be_read_ends_every_command_alike(run, command):
    """A scenario that was judged, whose rows are cut off; and a run in which nothing was judged."""
    HARMS["truncated"](reproducer(run) / "engine.parquet")
    HARMS["truncated"](passing(run) / "engine.parquet")
    folder = reproducer(run) if command == "export" else run
    more = {"report": ["--markdown", "-"], "diff": [str(run)]}.get(command, [])
    refused(call(command, folder, *more), passing(run) / "engine.parquet")
    for path in run.glob("*/verdict.json"):
        path.unlink()
    (run / "verdict.json").unlink()
    done = call(command, folder, *more)
    if command == "report":  # a page of a night that stopped says so too
        assert done.exit_code == 0
        assert done.stdout.startswith("### ? eaglecheck UNKNOWN: ")
        assert "0 scenarios judged before that" in done.stdout
    else:
        assert done.exit_code == 3


def test_a_damaged_scenario_is_run_again_in_its_family(tmp_path):
    manifest = {"argv": ["eaglecheck", "run", "--family=tree"], "engine": {"release": "0.5.23", "device": "cpu"}}
    run = results.store(tmp_path, ("t2-four-together", results.one_ahead), manifest=manifest)
    HARMS["truncated"](reproducer(run) / "scenario.json")
    typed = "eaglecheck run --engine 0.5.23 --family tree --scenario t2-four-together"
    for command in ("recheck", "export", "replay"):
        done = call(command, reproducer(run))
        assert (done.exit_code, typed in done.output.replace("\n", " ")) == (3, True), done.output
