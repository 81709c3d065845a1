"""Run folders: written in order, read back whole, and every unfit folder says what is wrong and what to type."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cases.meta import handmade
from harness.archive import writer as writing
from harness.archive.digests import SUMS
from harness.archive.faults import StoreError, WriteError
from harness.archive.store import RunReader, read_case, read_findings, read_reproducer
from harness.archive.writer import RunWriter, write_reproducer
from harness.checks import group, judge
from harness.contract.types import Outcome, Verdict


@pytest.fixture(scope="module")
def case():
    """(scenario, engine, reference, verdict, divergences) of a failing run, every policy among them."""
    scenario = handmade.scenario()
    engine, reference = handmade.build(scenario)
    engine = handmade.copy_trace(engine)
    engine.rows.ints["position"][engine.rows.strings["phase"] == "DRAFT"] += 1
    engine.tensors["hidden_in.EXTEND"][3] = float("nan")
    engine.rows.lists["chosen_ids"][handmade.find(engine, phase="VERIFY", nth=3)][:] = 999
    return (scenario, engine, reference, *judge(scenario, engine, reference))


def save(writer, case):
    scenario, engine, reference, verdict, divergences = case
    return writer.save_scenario(scenario, engine=engine, reference=reference, verdict=verdict, divergences=divergences)


@pytest.fixture
def run(tmp_path, case):
    writer = RunWriter.create(tmp_path / "runs", manifest={"argv": ["eaglecheck", "run"], "seed": 7})
    writer.append_event({"event": "boot", "seconds": 3.5})
    writer.append_event({"event": "end"})
    save(writer, case)
    writer.finish(case[3])
    return writer.folder


def test_what_was_saved_is_what_is_read_and_judged_alike(run, case):
    scenario, _, _, verdict, divergences = case
    reader = RunReader.open(run)
    (stored,) = reader.scenarios()
    assert stored.scenario == scenario
    assert list(stored.findings) == divergences
    assert float("inf") in [found.margin for found in stored.findings]
    assert stored.verdict.verdict() == verdict
    assert judge(stored.scenario, stored.engine, stored.reference) == (verdict, divergences)
    assert reader.verdict.outcome is Outcome.FAIL
    assert reader.verdict.verdict() == verdict
    assert [entry.scenario_id for entry in reader.verdict.scenarios] == [scenario.id]
    assert reader.manifest.seed == 7
    lines = (run / "engine.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["boot", "end"]


def test_latest_points_at_the_newest_run(tmp_path, run):
    assert (tmp_path / "runs" / "latest").resolve() == run
    newer = RunWriter.create(tmp_path / "runs", manifest={})
    assert (tmp_path / "runs" / "latest").resolve() == newer.folder


def test_manifest_is_there_before_anything_else(tmp_path):
    writer = RunWriter.create(tmp_path, manifest={"argv": ["x"]})
    assert [path.name for path in writer.folder.iterdir()] == ["manifest.json"]


def test_no_reference_is_kept_as_none(tmp_path, case):
    scenario, engine, _, verdict, divergences = case
    writer = RunWriter.create(tmp_path, manifest={})
    folder = writer.save_scenario(scenario, engine=engine, reference=None, verdict=verdict, divergences=divergences)
    assert read_case(folder).reference is None


def refused(call, *texts):
    with pytest.raises(StoreError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def test_run_without_verdict_is_running_while_its_writer_lives_and_incomplete_then(tmp_path, case):
    writer = RunWriter.create(tmp_path, manifest={})
    save(writer, case)
    refused(lambda: RunReader.open(writer.folder), "still running", "1 scenario of it is judged")
    assert RunReader.open(writer.folder, allow_incomplete=True).live
    writer.close()
    refused(lambda: RunReader.open(writer.folder), "incomplete", "1 scenario of it is judged", "eaglecheck recheck")
    cut = RunReader.open(writer.folder, allow_incomplete=True)
    assert (cut.live, len(list(cut.scenarios()))) == (False, 1)


WRITES = """
import sys, time
from pathlib import Path
from harness.archive.writer import RunWriter
writer = RunWriter.create(Path(sys.argv[1]), manifest={})
print(writer.folder, flush=True)
time.sleep(600)
"""


def test_run_of_a_process_that_was_killed_is_not_running_any_more(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        assert RunReader.open(folder, allow_incomplete=True).live
        process.kill()
    assert RunReader.open(folder, allow_incomplete=True).live is False
    assert list(folder.iterdir()) == [folder / "manifest.json"], "and nothing of the lock is left"


def test_no_such_folder_names_those_there_are(run):
    refused(lambda: RunReader.open(run.parent), "has no manifest.json")
    refused(lambda: RunReader.open(run.parent / "nope"), f"there is no folder {run.parent / 'nope'}", str(run))
    refused(lambda: RunReader.open(run.parent / f"{run.name[:-1]}x"), f"nearest first: {run}")
    scenario = next(path.parent for path in run.glob("*/scenario.json"))
    refused(lambda: RunReader.open(run / "nope"), "scenarios of that run that are there", str(scenario))


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", ["manifest.json", "verdict.json"])
def test_newer_foreign_and_damaged_files_are_refused(run, name):
    whole = (run / name).read_bytes()
    edit(run / name, store_version=2, new_field=1)
    refused(lambda: RunReader.open(run), "store version 2", "update eaglecheck")
    (run / name).write_bytes(whole)
    edit(run / name, foreign=1)
    refused(lambda: RunReader.open(run), "foreign", "allowed keys")
    (run / name).write_bytes(whole[: len(whole) // 2])
    refused(lambda: RunReader.open(run), name, "not whole JSON" if name == "manifest.json" else "incomplete")
    (run / name).write_text("[1]")
    refused(lambda: RunReader.open(run), "a list of 1, not an object")


def test_damaged_finding_names_its_line(run):
    path = next(run.glob("*/findings.jsonl"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"kind"', '"sort"', 1)]))
    refused(lambda: list(read_findings(path)), "line 2", "sort")
    path.unlink()
    refused(lambda: list(read_findings(path)), "findings.jsonl is missing")


def test_full_disk_says_where_how_much_is_left_and_what_to_type(tmp_path, case, monkeypatch):
    writer = RunWriter.create(tmp_path, manifest={})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "write_trace", full)
    refused(lambda: save(writer, case), "the disk is full", str(writer.folder), "bytes free", "du -sh")
    monkeypatch.setattr(os, "fsync", full)
    refused(lambda: writer.finish(case[3]), "the disk is full")
    assert not (writer.folder / "verdict.json").exists()


def test_other_disk_errors_keep_their_reason(tmp_path, case, monkeypatch):
    writer = RunWriter.create(tmp_path, manifest={})

    def denied(*_):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(writing, "write_trace", denied)
    with pytest.raises(WriteError) as caught:
        save(writer, case)
    assert isinstance(caught.value.__cause__, PermissionError)
    assert f"cannot write to {writer.folder}: denied" in str(caught.value)


def test_verdict_is_never_half_there(tmp_path, case, monkeypatch):
    writer = RunWriter.create(tmp_path, manifest={})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.finish(Verdict(outcome=Outcome.PASS))
    assert not (writer.folder / "verdict.json").exists()


def test_reproducer_holds_all_that_a_replay_needs(tmp_path, case):
    scenario, engine, reference, _, divergences = case
    signature = group(divergences)[0].signature
    folder = write_reproducer(
        tmp_path / "reproducer",
        scenario,
        engine=replace(engine, header={**engine.header, "device": "cpu"}),
        reference=reference,
        divergences=divergences,
        signature=signature,
        replay="eaglecheck replay reproducer",
    )
    names = {path.name for path in folder.iterdir()}
    assert names >= {"scenario.json", "engine.json", "reference.json", "findings.jsonl", "manifest.json"}
    manifest, stored = read_reproducer(folder)
    assert (manifest.release, manifest.device) == ("0.0.toy", "cpu")
    assert (manifest.signature, manifest.replay) == (signature, "eaglecheck replay reproducer")
    assert list(stored.findings) == divergences
    assert stored.verdict is None


def test_nothing_written_is_a_pickle(run):
    suffixes = {path.suffix for path in run.rglob("*") if path.is_file() and path.name != SUMS}
    assert {".json", ".parquet"} <= suffixes <= {".json", ".jsonl", ".parquet", ".safetensors"}
