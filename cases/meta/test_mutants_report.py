"""When a mutant counts as killed, and when a campaign passes."""

import io
import json
from types import SimpleNamespace

import pytest
from packaging.version import Version
from rich.console import Console

from cases.meta.command_line import call
from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.checks import CHECKS
from harness.cli import prepare
from harness.contract.finding_pages import issues
from harness.contract.trace import Event
from harness.contract.types import Outcome
from harness.driving.refusals import refusal
from harness.engines import envs
from harness.engines.errors import EngineError
from harness.search import mutants
from harness.search.mutant_results import Status
from harness.search.mutants import Campaign, judged
from harness.search.mutants_report import EXCUSED, SINCE, Report, Score, document
from harness.search.text import MutantLine, render_mutants_report

LATE = MUTANTS["draft-position-late"]
BUSY = tuple(name for name in CHECKS if name not in EXCUSED)


def outcome(verdict=Outcome.FAIL, kinds=("POSITION",), fired=3, crash="", lost="", mutant=LATE, graphs=False):
    events = [Event(name="fault", scheduler_step=9, data={"mutant": mutant.id, "fired": fired})]
    events += [Event(name="crash", scheduler_step=9, data={"error": crash})] if crash else []
    events += [Event(name="lost", scheduler_step=9, data={"what": lost})] if lost else []
    return SimpleNamespace(
        verdict=SimpleNamespace(outcome=verdict, root_kinds=kinds, reasons=("1 × something",)),
        trace=SimpleNamespace(events=tuple(events)),
        scenario=SimpleNamespace(name="together", engine=SimpleNamespace(cuda_graph=graphs)),
        text_identical=True,
        passed=verdict is Outcome.PASS,
    )


@pytest.fixture(autouse=True)
def _killers(monkeypatch):
    monkeypatch.setattr(mutants, "killers", lambda _outcome: ("positions",))


@pytest.mark.parametrize(
    ("given", "fate", "why"),
    [
        (outcome(), Status.KILLED, ""),
        (outcome(kinds=("TOKEN",)), Status.SURVIVED, "shown only by TOKEN; expected POSITION"),
        (outcome(Outcome.PASS, kinds=()), Status.SURVIVED, "PASS: 1 × something"),
        (outcome(Outcome.UNKNOWN, kinds=()), Status.SURVIVED, "UNKNOWN: 1 × something"),
        (outcome(Outcome.UNKNOWN, kinds=(), lost="ended from outside: x"), Status.NOT_RUN, "ended from outside: x"),
        (outcome(Outcome.PASS, kinds=(), fired=0), Status.SURVIVED, "it never acted in together"),
        (
            outcome(kinds=("CRASH",), crash="MutantBroken: mutant x: KeyError"),
            Status.BROKEN,
            "MutantBroken: mutant x: KeyError",
        ),
    ],
)
def test_only_an_expected_kind_kills(given, fate, why):
    score = judged(LATE, given, examples=1)
    assert (score.status, score.why) == (fate, why)
    assert fate is not Status.NOT_RUN or score.killed_by == ()


@pytest.mark.parametrize(
    ("name", "fired", "graphs", "fate"),
    [
        ("adaptive-step-skipped", 0, True, Status.NOT_RUN),
        ("adaptive-step-skipped", 0, False, Status.SURVIVED),
        ("adaptive-step-skipped", 3, True, Status.SURVIVED),
        ("kept-in-old-order", 0, True, Status.SURVIVED),  # between rounds, where Python runs
    ],
)
def test_what_a_replay_does_not_run_was_not_asked_there(name, fired, graphs, fate):
    mutant = MUTANTS[name]
    given = outcome(Outcome.PASS, kinds=(), fired=fired, mutant=mutant, graphs=graphs)
    assert judged(mutant, given, examples=1).status is fate


def report(*statuses, killed_by=BUSY, **more):
    scores = [
        Score(mutant=one, status=fate, killed_by=killed_by if fate is Status.KILLED else (), examples=1, why="so")
        for one, fate in zip(MUTANTS.values(), statuses, strict=False)
    ]
    return Report(engine="0.5.23", scores=tuple(scores), **more)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (report(Status.KILLED, Status.NOT_RUN), Outcome.PASS),
        (report(Status.KILLED, Status.SURVIVED), Outcome.FAIL),
        (report(Status.KILLED, Status.BROKEN), Outcome.FAIL),
        (report(Status.KILLED, unsound=("x",)), Outcome.UNKNOWN),
        (report(Status.SURVIVED, unsound=("x",)), Outcome.FAIL),
        (report(Status.NOT_RUN), Outcome.UNKNOWN),
        (report(), Outcome.UNKNOWN),
        (report(Status.KILLED, killed_by=BUSY[1:]), Outcome.FAIL),
        (report(Status.KILLED, killed_by=BUSY[1:], whole=False), Outcome.PASS),
        (report(Status.KILLED, Status.NOT_RUN, whole=False), Outcome.UNKNOWN),
    ],
)
def test_campaign_passes_only_if_all_that_ran_are_killed_and_no_check_is_idle(given, expected):
    assert given.outcome is expected


def test_document_says_who_kills_what_both_ways():
    made = json.loads(json.dumps(document(report(Status.KILLED, Status.SURVIVED, killed_by=("walk",)))))
    assert made["schema"] == 1
    told = [(one["id"], one["verdict"], one["killed_by"], one["engine"]) for one in made["mutants"]]
    assert told == [
        ("draft-position-early", "KILLED", ["walk"], "0.5.23"),
        ("draft-position-late", "SURVIVED", [], "0.5.23"),
    ]
    assert made["checks"]["walk"] == ["draft-position-early"]
    assert set(made["checks"]) == set(CHECKS)


def test_printed_scoreboard_names_survivors_idle_checks_and_what_to_type():
    stream = io.StringIO()
    found = report(Status.KILLED, Status.SURVIVED, Status.NOT_RUN, killed_by=BUSY[1:])
    render_mutants_report(Console(file=stream, width=100), found, again="type {} again".format)
    text = stream.getvalue()
    assert "SURVIVED: draft-position-late" in text
    assert "look again:  type draft-position-late again" in text
    assert f"check {BUSY[0]} kills no mutant" in text
    assert "verdict FAIL: 3 mutants, 1 killed, 1 survived, 1 not run" in text


def test_line_without_a_terminal_prints_one_line_a_mutant():
    stream = io.StringIO()
    with MutantLine(Console(file=stream, width=100)) as line:
        Campaign(
            lambda *_, **__: outcome(Outcome.PASS), "0.5.12.post1", [LATE, MUTANTS["tail-chunk-border"]], line
        ).run()
    assert [text.split()[2:5] for text in stream.getvalue().splitlines()] == [
        ["tail-chunk-border", "NOT", "RUN"],
        ["draft-position-late", "SURVIVED", "PASS:"],
    ]


def drives(answers):
    """Engines that answer scenario by scenario; an exception is raised."""

    def engines(scenario, *, engine, fresh=False):
        asked.append(scenario.name)
        answer = next((value for name, value in answers.items() if name in scenario.name), outcome(Outcome.PASS))
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked = []
    engines.asked = asked
    return engines


def test_campaign_stops_at_the_first_scenario_that_shows_the_mutant():
    engines = drives({"joined-draft": outcome()})
    (score,) = Campaign(engines, "0.5.23", [LATE]).run().scores
    assert (score.status, score.examples) == (Status.KILLED, 2)
    assert engines.asked == [
        *("together", "joined", "together-draft-position-late", "joined-draft-position-late", "together")
    ]


def test_engine_that_fails_without_a_mutant_runs_none():
    engines = drives({"joined": outcome()})
    made = Campaign(engines, "0.5.23", [LATE]).run()
    assert made.scores[0].status is Status.NOT_RUN
    assert made.outcome is Outcome.UNKNOWN
    assert "joined is FAIL without a mutant" in made.unsound[0]


@pytest.mark.parametrize(("release", "fate"), [("0.5.12.post1", Status.NOT_RUN), ("0.5.13", Status.SURVIVED)])
def test_tree_is_asked_only_of_releases_whose_tree_worker_is_sound(release, fate):
    made = Campaign(drives({}), release, [MUTANTS["mask-bit-lost"]]).run()
    assert made.scores[0].status is fate
    assert made.unsound == ()


@pytest.mark.parametrize("need", EXERCISES)
@pytest.mark.parametrize("release", envs.SUPPORTED)
def test_what_run_refuses_on_a_release_is_not_asked_of_it(need, release):
    one = next(mutant for mutant in MUTANTS.values() if mutant.needs == need)
    engines = drives({})
    made = Campaign(engines, release, [one]).run()
    refused = [why for each in EXERCISES[need] if (why := refusal(each, version=release, device="cpu"))]
    assert not refused or (made.scores[0].status, engines.asked) == (Status.NOT_RUN, [])


@pytest.mark.parametrize(("name", "release"), [("host-draft-not-stored", "0.5.13"), ("mask-bit-lost", "0.5.11")])
def test_one_that_is_named_and_cannot_be_asked_is_refused_before_a_boot(monkeypatch, name, release):
    monkeypatch.setattr(prepare, "engine_environment", lambda *_: pytest.fail("nothing slow"))
    done = call("mutants", "--only", f"draft-position-late,{name}", "--engine", release, code=2)
    assert done.stderr.startswith(f"eaglecheck: --only {name}: ")


def test_mutant_that_the_engine_refuses_is_not_run():
    engines = drives({LATE.id: EngineError("the engine refused 'mutant': nothing to wrap")})
    (score,) = Campaign(engines, "0.5.23", [LATE]).run().scores
    assert (score.status, score.why) == (Status.NOT_RUN, "the engine refused 'mutant': nothing to wrap")


def layered(release):
    """What is printed where one mutant of MTP layers is asked for."""
    one = next(mutant for mutant in MUTANTS.values() if mutant.needs == "layers")
    made = Campaign(drives({}), release, [one]).run()
    stream = io.StringIO()
    render_mutants_report(Console(file=stream, width=200), made, again=str)
    return made, stream.getvalue().splitlines()


def test_where_no_mutant_ran_there_is_no_matrix_and_no_word_of_checks_that_nobody_asked():
    made, lines = layered("0.5.11")
    assert made.outcome is Outcome.UNKNOWN
    assert len([line for line in lines if line]) == 3
    assert lines[-1] == "verdict UNKNOWN: 1 mutant, 1 not run, so no check was asked"


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("0.5.11", "(F-023)"),
        ("0.5.12.post1", "(F-023)"),
        ("0.5.13", "(F-011)"),
        ("0.5.15.post1", "(F-011)"),
        ("0.5.16", "were not tried"),
    ],
)
def test_the_reason_why_layers_are_not_asked_is_the_table_s_for_that_release(release, reason):
    made, _ = layered(release)
    assert reason in made.scores[0].why


def test_every_finding_named_in_a_reason_is_in_that_release():
    """The newest release that a reason still keeps out has the finding it names."""
    seen = 0
    for first, why in (one for reasons in SINCE.values() for one in reasons):
        named = [one for one in issues().values() if f"({one.id})" in why]
        before = max((one for one in envs.SUPPORTED if Version(one) < Version(first)), key=Version)
        assert [one.id for one in named if not one.releases.has(before)] == [], (first, why)
        seen += len(named)
    assert seen
