"""`recheck` and `replay` on stored runs: whole, cut off, damaged, newer, foreign. No engine."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cases.catalogue import CORPUS
from cases.meta import results
from cases.meta.command_line import call
from cases.meta.files import edit_json
from harness.archive.run_folders import MANIFEST, judgeable, lock
from harness.archive.store import RunReader, read_case
from harness.contract.finding_pages import KnownIssue
from harness.contract.known_issues import without_effect
from harness.contract.types import Outcome
from harness.driving.oracle import Oracle


def answering(reference):
    """A reference that has its answer."""
    return SimpleNamespace(answer=lambda _scenario, _trace: reference)


RECORDED = CORPUS.parent / "recorded"
PASSING = (("single", results.sound), ("four-together", results.sound))


def stored(work, cases=PASSING, **options):
    """A run folder, as it would be typed from here."""
    return results.store(work / "runs", *cases, **options).relative_to(work)


def test_a_stored_run_is_judged_again(work, snapshot):
    run = work / stored(work, results.FAILING)
    assert RunReader.open(run).verdict.outcome is Outcome.FAIL
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = call("recheck", run.relative_to(work))
    assert (done.exit_code, done.stderr) == (1, ""), done.output
    assert results.stable(done.stdout) == snapshot
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_scenarios_stay_in_the_order_in_which_they_were_driven(work):
    """A verdict names pairs and algorithms in that order, whoever prints it."""
    run = stored(work, [(name, results.sound) for name in ("single", "four-together", "idle")])
    call("recheck", run, "--json", "out.json")
    document = json.loads((work / "out.json").read_text())
    assert [one["name"] for one in document["scenarios"]] == ["single", "four-together", "idle"]


def test_latest_is_a_run_like_any_other(work):
    folder = stored(work)
    done = call("recheck", "runs/latest", code=0)
    assert f"run folder: {folder}\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("verdict PASS: ")


def test_latest_is_the_run_that_was_begun_last_and_no_mark_of_a_whole_one(work):
    whole = stored(work)
    cut_off = stored(work, finish=False)
    assert (work / "runs" / "latest").resolve() == work / cut_off != work / whole
    done = call("recheck", "runs/latest", code=3)
    assert "is incomplete" in done.stdout
    for refused in (("run", "--engine", "9.9.9"), ("run", "--page", "0"), ("replay", "runs/latest")):
        call(*refused, code=2)
    assert (work / "runs" / "latest").resolve() == work / cut_off


@pytest.mark.parametrize("harm", ["unlink", "cut off"])
@pytest.mark.parametrize("file", ["reference.json", "reference.parquet", "tensors/reference.safetensors"])
def test_a_fresh_reference_does_not_want_the_stored_one(work, file, harm, monkeypatch):
    """It is computed from the engine's trace alone; what was assumed is known from the run where it is gone."""
    asked = []
    made = Oracle.answer
    monkeypatch.setattr(Oracle, "answer", lambda self, *args: asked.append(self.assumed) or made(self, *args))
    known = {"engine": {"release": "0.5.23", "device": "cpu", "assumed": ["F-003"]}}
    run = stored(work, (("single", results.sound),), manifest=known)
    path = next((work / run).glob("single-*")) / file
    path.unlink() if harm == "unlink" else path.write_bytes(path.read_bytes()[:20])
    refused = call("recheck", run)
    assert refused.exit_code == 3, "what is left would agree with itself"
    assert f"recompute the reference:  eaglecheck recheck {run} --fresh-reference" in refused.stderr
    done = call("recheck", run, "--fresh-reference")
    assert done.exit_code in (0, 1), done.output  # these traces are made by hand, and no model wrote them
    assert "1 scenario" in done.stdout
    assert "with the stored reference:" not in done.stdout
    assert "to have a stored reference too:  eaglecheck run --engine 0.5.23 --assume F-003" in done.stdout
    assert asked == [("F-003",) if file == "reference.json" else ()]


def test_of_a_folder_everything_in_it_is_judged_and_what_cannot_be_is_unknown(work, tmp_path):
    passing, failing = stored(work, (("single", results.sound),)), stored(work, results.FAILING)
    done = call("recheck", work / "runs", "--json", tmp_path / "all.json", code=1)
    lines = done.stdout.splitlines()
    assert f"PASS     {work / passing}" in lines
    at = lines.index(f"FAIL     {work / failing}")
    assert ":positions:" in lines[at + 1], "its root signatures"
    assert lines[-1] == "verdict FAIL: 2 folders, 1 PASS, 1 FAIL"
    document = json.loads((tmp_path / "all.json").read_text())
    assert (document["verdict"], len(document["runs"])) == ("FAIL", 2)
    next((work / passing).glob("*/engine.parquet")).write_bytes(b"cut off")
    assert call("recheck", work / "runs").stdout.splitlines()[-1].endswith("1 FAIL, 1 UNKNOWN")


@pytest.mark.parametrize("kind", ["scenario", "reproducer"])
def test_one_scenario_or_reproducer_is_judged_alone(work, kind):
    run = stored(work, results.FAILING)
    pattern = "pr25015-*" if kind == "scenario" else "reproducers/pr25015-*"
    folder = next((work / run).glob(pattern)).relative_to(work)
    done = call("recheck", folder, code=1)
    assert "diverges in 1 of 1 scenario (POSITION)" in done.stdout
    assert f"eaglecheck replay {run}/reproducers/pr25015-" in done.stdout


def test_a_verdict_that_changed_since_says_so(work):
    run = stored(work)
    edit_json(work / run / "verdict.json", outcome="FAIL")
    results.reseal(work / run)
    done = call("recheck", run, code=0)
    assert "it was FAIL when the run ended" in done.stdout


@pytest.mark.parametrize(("cases", "code"), [(PASSING, 3), (results.FAILING, 1)], ids=["passing", "failing"])
def test_a_run_that_was_cut_off_is_never_a_pass_and_a_failure_stays_one(work, cases, code):
    done = call("recheck", stored(work, cases, finish=False), code=code)
    assert "is incomplete" in done.stdout


def test_a_scenario_that_was_half_written_is_left_out(work):
    run = work / stored(work, finish=False)
    half = next(run.glob("four-together-*"))
    (half / "verdict.json").unlink()
    (half / "engine.parquet").write_bytes(b"PAR1")
    done = call("recheck", run, code=3)
    assert "cut off while running; 1 scenario of it can be judged" in done.stdout


def _cut_off(path):
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize("of", ["run", "scenario"])
def test_a_verdict_that_is_cut_off_is_as_good_as_none(work, of):
    said = {}
    for name, harm in (("gone", lambda path: path.unlink()), ("cut off", _cut_off)):
        run = work / stored(work)
        harm((run if of == "run" else scenario_of(run)) / "verdict.json")
        done = call("recheck", run.relative_to(work))
        lines = [line for line in done.stdout.replace(run.name, "RUN").splitlines() if "verdict.json" not in line]
        said[name] = (done.exit_code, lines, done.stderr)
    assert said["gone"] == said["cut off"]
    assert said["gone"][0] == 3


def test_a_run_that_goes_on_says_so_and_what_it_has_is_judged(work):
    run = work / stored(work, finish=False)
    typed = ("recheck", str(run.relative_to(work)))
    writer = lock(run)
    try:
        done = call(*typed, code=3)
        assert "is still running; 2 scenarios of it can be judged" in done.stdout
        assert "when it has ended:  eaglecheck " + " ".join(typed) in done.stdout
        assert "cut off" not in done.stdout
        for path in run.glob("*/verdict.json"):
            path.unlink()
        done = call(*typed, code=3)
        assert "is still running; 0 scenarios of it can be judged" in done.stdout
        call("report", run, "--html", "page.html", code=0)
    finally:
        writer.close()
    done = call(*typed)
    assert (done.exit_code, done.stdout) == (3, ""), "it ended without a judged scenario"
    assert "holds no scenario" in done.stderr
    assert "eaglecheck run" in done.stderr


@pytest.mark.parametrize("options", [[], ["--fresh-reference"]], ids=["stored", "fresh"])
def test_what_to_type_after_a_recheck_is_another_command(work, options, monkeypatch):
    monkeypatch.setattr("harness.cli.recheck._oracle", lambda stored, *_: answering(stored.reference))
    run = stored(work, results.FAILING)
    said = call("recheck", run, *options).stdout.splitlines()
    typed = f"eaglecheck recheck {run}" + "".join(f" {option}" for option in options)
    assert not [line for line in said if line.endswith(typed)]
    assert [line for line in said if "eaglecheck replay" in line]


def test_what_is_assumed_is_asked_of_a_reference_that_is_computed_anew(work):
    run = stored(work)
    done = call("recheck", run, "--assume", "F-003", code=2)
    assert f"eaglecheck recheck {run} --fresh-reference --assume F-003" in done.stderr
    recorded = RECORDED / "mtp" / "graphs-alone-0.5.13"
    failing = call("recheck", recorded, "--fresh-reference")
    passing = call("recheck", recorded, "--fresh-reference", "--assume", "F-020", "--assume", "F-027")
    assert (failing.exit_code, passing.exit_code) == (1, 0)
    assert "F-020, F-027 assumed" in passing.stdout


def test_what_is_assumed_in_vain_is_said_as_run_says_it(work):
    """The drafts of a chain on a release that has no MTP issue: the same line as of `run`."""
    run = stored(work, (("single", results.sound),))
    given = read_case(next((work / run).glob("single-*"))).scenario
    for name in ("F-012", "F-011"):
        (line,) = without_effect([name], [(given.spec, given.engine)], release="0.5.23")
        done = call("recheck", run, "--fresh-reference", "--assume", name)
        assert done.exit_code in (0, 1), done.output  # these traces are made by hand
        assert line in done.stdout
        assert f"assumed: {name}" not in done.stdout


def eager_mtp(work, monkeypatch, **known):
    """A stored run of 0.5.13 that F-011 can show in."""
    monkeypatch.setattr("harness.cli.recheck._oracle", lambda stored, *_: answering(stored.reference))
    monkeypatch.setitem(results.HEADER, "release", "0.5.13")
    monkeypatch.setattr(KnownIssue, "reached_by", lambda one, *_, **__: one.id == "F-011")
    engine = {"release": "0.5.13", "device": "cpu", **known}
    return stored(work, (("single", results.sound),), manifest={"engine": engine})


def test_what_works_by_a_replacement_kernel_cannot_be_assumed_afterwards(work, monkeypatch):
    run = eager_mtp(work, monkeypatch, assumed=["F-003"])
    done = call("recheck", run, "--fresh-reference", "--assume", "F-011")
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "F-011: a replacement kernel in the engine works past it" in done.stderr
    assert "cannot be assumed afterwards" in done.stderr
    assert "run it again:  eaglecheck run --engine 0.5.13 --assume F-003 --scenario-file" in done.stderr
    assert done.stderr.rstrip().endswith("--assume F-011")


def test_a_run_that_had_the_replacement_kernel_is_judged_with_it(work, monkeypatch):
    run = eager_mtp(work, monkeypatch, assumed=["F-011"])
    next((work / run).glob("single-*/reference.json")).unlink()  # then the run says what was assumed
    monkeypatch.setattr("harness.cli.recheck._oracle", lambda stored, *_: answering(stored.engine))
    done = call("recheck", run, "--fresh-reference", "--assume", "F-011")
    assert done.exit_code != 2, done.output
    assert "cannot be assumed afterwards" not in done.output


def test_a_scenario_that_was_numbered_otherwise_is_to_be_run_again(work):
    run = stored(work)
    for file in run.glob("*/engine.json"):
        file.write_text(file.read_text().replace(json.loads(file.read_text())["scenario_id"], "0" * 12))
    results.reseal(run)
    done = call("recheck", run, code=3)
    assert "run it again:  eaglecheck run" in done.stdout


def test_a_run_that_is_not_there_names_the_nearest(work, monkeypatch):
    runs = [stored(work) for _ in range(3)]
    typed = f"{runs[1].name[:-1]}z"
    done = call("recheck", typed)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert f"there is no folder {typed}: looked for a run, a scenario or a reproducer" in done.stderr
    assert "runs that are there, nearest first: runs/" in done.stderr
    assert all(str(run) in done.stderr for run in runs)
    monkeypatch.setenv("EAGLECHECK_RUNS", str(work / "elsewhere"))
    away = results.store(work / "elsewhere", *PASSING)
    assert str(away) in call("recheck", f"runs/{typed}").stderr
    assert f"for example:  eaglecheck recheck {away}" in call("recheck", away.name).stderr


def test_a_scenario_or_reproducer_that_is_not_there_names_those_that_are(work):
    run = stored(work, results.FAILING)
    for command, typed, said in (
        ("recheck", str(run / "singel"), f"{run}/single-"),
        ("replay", "pr25015", f"{run}/reproducers/pr25015-"),
    ):
        done = call(command, typed, code=2)
        assert f"first: {said}" in done.stderr


def test_an_engine_that_never_came_up_stays_unknown_with_its_reason(work):
    run = results.store_without_engine(work / "runs", "single", "the engine did not boot within 300 s")
    done = call("recheck", run.relative_to(work), code=3)
    assert "no verdict on single: the engine did not boot within 300 s" in done.stdout
    assert "--fresh-reference" not in done.stdout
    assert "run it again:  eaglecheck run --engine 0.5.23 --scenario-file" in done.stdout


def test_a_folder_that_goes_while_runs_are_looked_for_is_passed_over(tmp_path, monkeypatch):
    for name in ("going", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / MANIFEST).touch()
    listed = os.scandir

    def scandir(place):
        if Path(place).name == "going":
            raise FileNotFoundError(place)
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert judgeable(tmp_path) == [tmp_path / "run"]


def scenario_of(run, name="four-together"):
    return next(run.glob(f"{name}-*"))


def _cut_rows(run):
    (scenario_of(run) / "engine.parquet").write_bytes(b"PAR1")


def _cut_tensors(run):
    (scenario_of(run) / "tensors" / "engine.safetensors").write_bytes(b"12")


#: What is done to a run, the file that is named, and what is said of it.
DAMAGES = {
    "manifest-missing": (lambda run: (run / "manifest.json").unlink(), "manifest.json", "missing|has no"),
    "manifest-newer": (
        lambda run: edit_json(run / "manifest.json", store_version=99),
        "manifest.json",
        "update eaglec",
    ),
    "verdict-newer": (
        lambda run: edit_json(run / "verdict.json", store_version=99),
        "verdict.json",
        "update eaglecheck",
    ),
    "scenario-gone": (lambda run: shutil.rmtree(scenario_of(run)), "four-together-", "is gone"),
    "scenario-file-gone": (lambda run: (scenario_of(run) / "scenario.json").unlink(), "scenario.json", "has no"),
    "trace-newer": (
        lambda run: edit_json(scenario_of(run) / "engine.json", trace_schema=99),
        "engine.json",
        "update this",
    ),
    "trace-cut-off": (_cut_rows, "engine.parquet", "damaged"),
    "trace-gone": (lambda run: (scenario_of(run) / "engine.json").unlink(), "engine.json", "not copied whole|cut off"),
    "rows-gone": (lambda run: (scenario_of(run) / "engine.parquet").unlink(), "engine.parquet", "run again"),
    "tensors-gone": (
        lambda run: shutil.rmtree(scenario_of(run) / "tensors"),
        "tensors/engine.safetensors",
        "run again",
    ),
    "tensors-cut-off": (_cut_tensors, "engine.safetensors", "damaged"),
    "findings-gone": (lambda run: (scenario_of(run) / "findings.jsonl").unlink(), "findings.jsonl", "missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newer_or_foreign_run_is_refused_and_named(work, name):
    run = stored(work)
    harm, file, said = DAMAGES[name]
    harm(work / run)
    done = call("recheck", run)
    assert (done.exit_code, done.stdout) == (3, ""), done.output
    assert "verdict UNKNOWN: " in done.stderr
    assert str(run) in done.stderr
    assert file in done.stderr
    assert re.search(said, done.stderr)
    assert "newer" in name or "eaglecheck run" in done.stderr or "can be named" in done.stderr


PIECES = ["manifest.json", "scenario.json", "engine.json", "engine.parquet", "tensors", "findings.jsonl"]


@pytest.fixture
def reproducer(work):
    return next((work / stored(work, results.FAILING)).glob("reproducers/*"))


@pytest.mark.parametrize("piece", PIECES)
def test_a_reproducer_that_misses_a_piece_is_not_replayed(reproducer, piece):
    gone = reproducer / piece
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    done = call("replay", reproducer)
    never_one = piece == "manifest.json"  # a scenario's folder looks the same
    assert (done.exit_code, done.stdout) == (2 if never_one else 3, ""), done.output
    assert piece in done.stderr
    assert "Traceback" not in done.stderr


def test_a_share_of_a_gpu_for_a_replay_on_a_cpu_is_refused_without_naming_options_of_run(reproducer):
    done = call("replay", reproducer, "--gpu-share", "1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "eaglecheck: --gpu-share 1: the reproducer is of an engine on a CPU\n  leave it out\n"


def test_a_reproducer_of_a_newer_eaglecheck_is_not_replayed(reproducer):
    edit_json(reproducer / "manifest.json", store_version=99)
    done = call("replay", reproducer, code=3)
    assert "update eaglecheck" in done.stderr


def _with_pair_of_its_own(folder, key):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[key]["pair"] = ["gone/target", "gone/draft"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    results.reseal(folder)


def test_a_reproducer_whose_own_checkpoints_are_gone_names_them(reproducer):
    _with_pair_of_its_own(reproducer, "header")
    done = call("replay", reproducer, code=2)
    assert "--target gone/target: no such folder" in done.stderr


def test_a_run_of_the_users_own_checkpoints_remembers_them_for_a_fresh_reference(work):
    run = work / stored(work)
    _with_pair_of_its_own(run, "engine")
    done = call("recheck", run, "--fresh-reference", code=2)
    assert "gone/target: no such folder" in done.stderr
    call("recheck", run, code=0)


def test_json_on_standard_output_leaves_the_words_to_standard_error(work):
    done = call("recheck", stored(work, results.FAILING), "--json", "-")
    assert json.loads(done.stdout)["verdict"] == "FAIL"
    assert "verdict FAIL" in done.stderr


def test_a_folder_of_other_folders_says_what_lies_there(work):
    (work / "nights" / "one").mkdir(parents=True)
    (work / "nights" / "one" / "plan.json").write_text("{}")
    done = call("recheck", "nights/one", code=2)
    assert "eaglecheck night --nights nights\n" in done.stderr
