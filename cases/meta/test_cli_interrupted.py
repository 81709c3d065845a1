"""A command that is interrupted writes what there is to its --json, marked as such, and ends with code 3.

Engines are pretended: the first one ends at once, so that something has been judged, the next one never answers.
"""

import json
import signal

import pytest

from cases.meta import pretended_engine
from cases.meta.command_line import call
from cases.meta.json_models import Run
from cases.meta.processes import wait_until
from harness.bisect import verdicts
from harness.cli.outcome import kept
from harness.contract.types import Outcome
from harness.night import store

FIRST_ENDS = f"""
if [ ! -e $HOME/once ]; then
touch $HOME/once
{pretended_engine.ENDS}
fi
touch $HOME/twice
{pretended_engine.SLEEPS}
"""
#: Two boot configurations, or two releases: two engines.
RUN = ["run", "--engine", "0.5.13", "--scenario", "single", "--scenario", "pr25015"]
MATRIX = ["matrix", "--engines", "0.5.12.post1,0.5.13", "--cases", "pr25015"]
NIGHT = [*MATRIX, "--nights", "nights", "--seed", "1"]
BISECT = ["bisect", "--case", "pr25015", "--bad", "0.5.11", "--good", "0.5.13"]
MUTANTS = ["mutants", "--engine", "0.5.13", "--only", "draft-position-late,hidden-dtype"]


@pytest.fixture
def place(work):
    pretended_engine.furnish(work / "home", body=FIRST_ENDS)
    return work


def interrupt(place, command, number=signal.SIGINT, *, once=True):
    """Send the signal when the second engine has been started; (exit code, document, standard error)."""
    if not once:
        (place / "once").touch()
    process = pretended_engine.start(
        *command, "--json", "out.json", cwd=place, home=place / "home", HOME=str(place), TMPDIR="/tmp"
    )
    wait_until((place / "twice").exists, process=process)
    process.send_signal(number)
    _, said = process.communicate()
    return process.returncode, json.loads((place / "out.json").read_text()), said


def test_a_run_keeps_the_scenarios_that_were_judged(place):
    code, document, said = interrupt(place, RUN, signal.SIGTERM)
    word = "ended by SIGTERM"
    Run.model_validate(document)
    assert code == 3, said
    assert document["interrupted"] is True
    assert document["verdict"] == "UNKNOWN"
    assert [one["name"] for one in document["scenarios"]] == ["single"]
    assert document["reasons"][-1] == f"{word}: 1 of 2 scenarios judged"
    assert f"eaglecheck: {word}\n  run folder" in said
    assert "partial results written to out.json" in said


def test_a_run_without_a_judged_scenario_is_written_too(place):
    code, document, said = interrupt(place, RUN, once=False)
    assert (code, document["verdict"], document["scenarios"]) == (3, "UNKNOWN", []), said
    assert document["reasons"] == ["interrupted: 0 of 2 scenarios judged"]


def test_a_matrix_keeps_the_cells_that_were_judged(place):
    code, document, said = interrupt(place, MATRIX)
    assert (code, document["interrupted"]) == (3, True), said
    assert [(one["engine"], one["verdict"]) for one in document["cells"]] == [("0.5.12.post1", "UNKNOWN")]


def test_a_night_keeps_the_cells_that_are_done_and_is_not_green(place):
    code, document, said = interrupt(place, NIGHT)
    assert (code, document["interrupted"], document["green"]) == (3, True, False), said
    assert [one["engine"] for one in document["cells"]] == ["0.5.12.post1"]
    assert "1 cell was planned and not reported: 0.5.13/case/pr25015" in document["incomplete"]
    assert not list(place.glob("nights/*/night.json")), "and counts for nothing later"
    (night,) = place.glob("nights/*")
    assert f"the night {night.name} never finished, 1 of 2 cells driven: nights/{night.name} has no night.json" in said
    assert f"  drive the others:  eaglecheck {' '.join(NIGHT)} --json out.json --resume {night.name}\n" in said
    assert [one.engine for one in store.done(night).values()] == ["0.5.12.post1"]


def test_a_shard_keeps_the_cells_that_are_done_and_judges_nothing(place):
    code, document, said = interrupt(place, [*NIGHT, "--shard", "1/2"], signal.SIGTERM, once=False)
    assert (code, document["interrupted"], document["shard"]) == (3, True, [1, 2]), said
    assert (document["planned"], document["reported"], document["cells"]) == (1, 0, [])
    assert not {"outcome", "green"} & set(document)
    assert "the shard " in said
    assert "--shard 1/2" in said


def test_a_search_keeps_what_was_tried(place, monkeypatch):
    runs = iter([verdicts.Run(outcome=Outcome.FAIL, kinds=("POSITION",), seconds=1.0)])

    def one_run(*_arguments, **_options):
        for run in runs:
            return run
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.cli.bisect_versions.one_run", one_run)
    done = call(*BISECT, "--fresh", "--json", "out.json")
    document = json.loads((place / "out.json").read_text())
    assert done.exit_code == 3, done.output
    assert (document["interrupted"], document["exact"], document["note"]) == (True, False, "interrupted")
    assert [(one["name"], one["call"]) for one in document["tried"]] == [("0.5.11", "bad")]
    assert f"  go on:  eaglecheck {' '.join(BISECT)} --json out.json\n" in done.stderr


def test_a_search_and_mutants_that_had_not_begun_are_written_too(place):
    code, document, said = interrupt(place, BISECT, once=False)
    assert (code, document["interrupted"], document["tried"]) == (3, True, []), said
    (place / "twice").unlink()
    code, document, said = interrupt(place, MUTANTS, once=False)
    assert (code, document["interrupted"], document["verdict"], document["mutants"]) == (3, True, "UNKNOWN", []), said
    assert document["unsound"] == ["interrupted: 0 mutants of 2 asked"]
    assert f"eaglecheck {' '.join(MUTANTS)} --json out.json" in said


def test_without_json_nothing_is_written_and_the_interrupt_goes_on():
    with pytest.raises(KeyboardInterrupt) as stop, kept(None, lambda _stop: pytest.fail("nobody asked")):
        raise KeyboardInterrupt
    assert not hasattr(stop.value, "__notes__")
    call("--help", code=0)
