"""The witness on a real engine: a run that it judges agrees, is stored with its rows, and finds a fault of batching."""

import json

import pytest

from cases.meta.command_line import call
from cases.programs import CHUNKED_BATCH, EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.contract.types import Outcome
from harness.driving.judging import judge_scenario
from harness.driving.plan import Setup
from harness.driving.witness_trace import ask
from harness.search.mutants import with_mutant


@pytest.mark.engine(boot=CHUNKED_BATCH.boot_key())
def test_a_run_is_judged_by_its_witness_and_stored_with_it(commands_on_live_engine, release, tmp_path):
    program, report = tmp_path / "program.json", tmp_path / "run.json"
    program.write_text(CHUNKED_BATCH.model_dump_json())
    arguments = ("--scenario-file", program, "--runs", tmp_path / "runs", "--json", report)
    done = call("run", "--engine", release, "--reference", "witness", *arguments, code=0)
    assert "agrees with its witness" in done.output
    document = json.loads(report.read_text())
    assert document["providers"] == {"target": "witness", "draft": "witness"}
    assert document["witness"]["rows"] > document["witness"]["without"] > 0  # the last rows of early chunks
    assert document["compared"]["hidden_rows"] > 100
    call("recheck", document["run"], "--json", report, code=0)
    for name in ("verdict", "reasons", "compared", "providers", "witness"):
        assert json.loads(report.read_text())[name] == document[name], name
    assert "--reference witness" in call("recheck", document["run"], "--fresh-reference", code=2).output


@pytest.mark.engine(boot=EXERCISES["chain"][0].boot_key())
@pytest.mark.parametrize("name", ["hidden-neighbour", "hidden-neighbour-extend"])
def test_a_fault_of_batching_is_found(drive_scenario, release, name):
    mutated = with_mutant(EXERCISES["chain"][0], MUTANTS[name])
    engines = drive_scenario
    trace = engines.drive(engines.launch(mutated, engine=release), mutated)
    reference = ask(mutated, trace, lambda asked: engines.drive(engines.launch(asked, engine=release), asked))
    judged = judge_scenario(mutated, trace, reference, setup=Setup(release=release))
    assert (judged.verdict.outcome, judged.verdict.root_kinds) == (Outcome.FAIL, ("NUMERIC",))
    assert all(reason.startswith(("judged by", "not")) for reason in judged.verdict.reasons[1:])
