"""One bit flipped anywhere in what a run keeps is reported by every command that reads it, with the file's name."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cases.meta import handmade, results
from cases.meta.command_line import call
from harness.archive import again
from harness.archive.digests import SUMS
from harness.archive.faults import TraceError
from harness.archive.store import RunReader
from harness.archive.trace_io import read_trace, write_trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return results.store(tmp_path_factory.mktemp("runs"), *results.FAILING)


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


def turn_a_digit(path):
    """Another digit somewhere, so that the file is as readable as before; any bit in a file that is not text."""
    content = bytearray(path.read_bytes())
    values = [found.end() - 1 for found in re.finditer(rb'": ?\d+', content)]  # no key's: that may make it unreadable
    digits = values or [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    place = digits[len(digits) // 2] if path.suffix in (".json", ".jsonl", "") else len(content) - len(content) // 3
    content[place] ^= 1
    path.write_bytes(content)


EVERY = [*results.OF_A_RUN, *(f"pr25015/{name}" for name in results.OF_A_SCENARIO)]


@pytest.mark.parametrize(
    ("command", "name"),
    [("recheck", name) for name in EVERY]
    + [(command, name) for command in ("report", "diff") for name in ("manifest.json", "pr25015/engine.parquet")],
)
def test_a_flipped_bit_is_reported_by_every_command_with_its_file(run, name, command, tmp_path):
    _, _, file = name.rpartition("pr25015/")
    place = (next(run.glob("pr25015-*")) if "pr25015/" in name else run) / file
    turn_a_digit(place)
    more = {"recheck": (), "report": ("--html", str(tmp_path / "page.html")), "diff": (str(run),)}[command]
    done = call(command, run, *more, code=3)
    named = run if place == run / SUMS else place.parent  # of damaged digests: what they are of
    assert str(named) in done.stderr.replace("\n", ""), done.stderr
    assert "verdict" not in done.stdout


def test_a_damaged_file_says_what_to_type(run):
    findings = next(run.glob("pr25015-*")) / "findings.jsonl"
    turn_a_digit(findings)
    said = call("recheck", run).stderr
    assert f"{findings} is damaged: other bytes than those that were written" in said
    assert f"ls -l {findings.parent}" in said
    (line,) = re.findall(r"rm -r (.+)", said)
    assert line.split() == [str(findings.with_name(SUMS)), str(run / SUMS)]
    for place in line.split():  # as it says: the folder is taken as it is now
        Path(place).unlink()
    call("recheck", run, code=1)


def test_a_damaged_tensor_or_scenario_says_what_to_type(run):
    folder = next(run.glob("single-*"))
    turn_a_digit(folder / "tensors/engine.safetensors")
    (again,) = re.findall(r"eaglecheck run .*", call("recheck", run).stderr)
    assert again.startswith("eaglecheck run --engine ")
    assert again.endswith(f" --scenario-file {folder / 'scenario.json'}")
    (folder / "scenario.json").write_bytes(b"")
    said = call("recheck", run).stderr
    assert f"{folder / 'scenario.json'}, line 1" in said
    assert "run again:  eaglecheck run --engine 0.5.23 --scenario single\n" in said, "and not the damaged file"


def test_a_reproducer_keeps_digests_too(run):
    reproducer = next(run.glob("reproducers/*"))
    turn_a_digit(reproducer / "tensors/reference.safetensors")
    for command in ("recheck", "replay"):
        done = call(command, reproducer, code=3)
        assert "reference.safetensors" in done.stderr


def test_digests_that_are_gone_since_the_run_ended_are_missed_and_cut_off_ones_damaged(run):
    place = next(run.glob("single-*")) / SUMS
    place.unlink()
    done = call("recheck", run, code=3)
    assert f"{place} is missing: it was there when the run ended" in done.stderr
    (run / SUMS).write_text((run / SUMS).read_text().splitlines()[0] + "\n")
    assert f"{run / SUMS} is damaged: it has no line for" in call("recheck", run).stderr


def test_a_run_of_before_digests_were_kept_is_read_as_it_is(run):
    for place in list(run.rglob(SUMS)):
        place.unlink()
    call("recheck", run, code=1)
    assert len(list(RunReader.open(run).scenarios())) == 2


def test_digests_are_what_sha256sum_reads_and_are_of_all_there_is(run):
    for sums in [run / SUMS, *run.glob(f"*/{SUMS}"), *run.glob(f"reproducers/*/{SUMS}")]:
        done = subprocess.run(["sha256sum", "--strict", "-c", SUMS], cwd=sums.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        named_in_output = {line.split(": ")[0] for line in done.stdout.splitlines()}
        here = {path.relative_to(sums.parent).as_posix() for path in sums.parent.rglob("*") if path.is_file()}
        if sums.parent == run:
            here = {name for name in here if "/" not in name or (name.endswith(SUMS) and "reproducers" not in name)}
        assert here - named_in_output == {SUMS}


def test_no_bit_of_a_parquet_file_alone_changes_what_is_read(tmp_path):
    """Copied without its folder: its pages carry checksums of their own, and what they do not cover are no values."""
    trace, _ = handmade.build(handmade.scenario())
    write_trace(tmp_path, trace)
    place = tmp_path / "engine.parquet"
    whole, refused = place.read_bytes(), 0
    for at in range(40, len(whole), 97):
        place.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            read = read_trace(tmp_path, "engine")
        except TraceError:
            refused += 1
        else:
            handmade.assert_same(trace, read)
    assert refused > 50


@pytest.mark.parametrize("content", [b"", b"\x00\xff nothing", None], ids=["empty", "bytes", "a folder"])
def test_digests_of_a_run_that_say_nothing_are_damaged(run, content):
    (run / SUMS).unlink()
    (run / SUMS).mkdir() if content is None else (run / SUMS).write_bytes(content)
    done = call("recheck", run)
    assert (done.exit_code, f"{run / SUMS} is damaged: no line of it is a digest" in done.stderr) == (3, True), (
        done.stderr
    )


def test_digests_that_are_cut_off_are_damaged_and_not_the_file_they_leave_out(run):
    (run / SUMS).write_text((run / SUMS).read_text().splitlines()[0] + "\n")
    assert f"{run / SUMS} is damaged: it has no line for" in call("recheck", run).stderr


def test_a_damaged_scenario_is_not_what_to_run_again(run):
    place = next(run.glob("single-*")) / "scenario.json"
    place.write_bytes(b"")
    said = call("recheck", run).stderr
    assert f"{place}, line 1: not whole JSON" in said
    assert f"--scenario-file {place}" not in said
    assert "run again:  eaglecheck run --engine 0.5.23 --scenario single\n" in said


@pytest.mark.parametrize("content", [b"", b"{}", b'{"name": "single"}', b'{"schema_version": 3}'])
def test_a_stored_scenario_that_is_none_any_more_is_not_what_to_run_again(run, content):
    """Of a folder without digests, and of the whole run too."""
    place = next(run.glob("single-*")) / "scenario.json"
    for sums in list(run.rglob(SUMS)):
        sums.unlink()
    place.write_bytes(content)
    for folder in (run, place.parent):
        said = call("recheck", folder).stderr
        assert f"{place}, line 1" in said
        assert f"--scenario-file {place}" not in said
        assert "run again:  eaglecheck run --engine 0.5.23 --scenario single\n" in said
    whole_run = again.run_again(run)
    assert str(place) not in whole_run
    assert whole_run.startswith("eaglecheck run --engine 0.5.23 --scenario-file ")
    assert whole_run.endswith(" --scenario single")


def test_an_edited_file_is_taken_once_its_digests_are_gone(run):
    """The message says how to edit a reproducer on purpose."""
    place = run / "manifest.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "host": "elsewhere"}))
    call("recheck", run, code=3)
    (run / SUMS).unlink()
    call("recheck", run, code=1)
