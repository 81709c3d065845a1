"""Everything a person reads about a night, word for word, and what CI's limits ask of it."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cases.meta.nights import AHEAD, STOP, TODAY, cell, entry, night, over, seen
from harness.contract.types import Outcome
from harness.night.document import ANNOTATIONS, BUDGET, document, junit, summary, workflow_commands
from harness.night.judge import judge
from harness.night.records import first_seen
from harness.night.text import render_cell, render_night

FOLDER = Path("nights/20261128-020000-ab28")
#: GitHub's own limit for the summary of a step, dropped as a whole beyond it.
LIMIT = 1024 * 1024


def judged(one, *past, known=(), today=TODAY):
    return judge(one, past=past, known=known, today=today)


def green():
    past = [over(night(cell(accepted={1: 50 + number, 2: 50 - number}), day=10 + number)) for number in range(6)]
    return judged(night(cell("eagle"), cell("tree", seen(STOP))), *past, known=[entry()])


def red():
    before = over(night(cell("tree", seen(STOP)), cell("eagle"), day=27))
    tonight = night(
        cell("eagle", seen()),
        cell("eagle/plain", seen(shown=1), kind="generated", engine="0.5.12.post1", left_out=4),
        cell("tree"),
        cell("pr25015", kind="case", expected="FAIL", expected_kinds=("POSITION",)),
    )
    return judged(tonight, before, known=[entry(expires=datetime.date(2026, 11, 1))])


def incomplete():
    why = "the engine ended with code 1 while booting; full log: x/engine.log; it ends with:\n  No module"
    one = cell("eagle", verdict=Outcome.UNKNOWN, unknown=10, reasons=(why,), accepted={}, choices=0, ties=0)
    return judged(night(one, faults=["shard 2 of 3 is missing, and 2 cells with it: did its job run?"]))


MADE = [green, red, incomplete]


def printed(render, *arguments, width=80, **options):
    out = io.StringIO()
    render(Console(file=out, width=width, color_system=None), *arguments, **options)
    return out.getvalue()


def test_night(snapshot):
    assert printed(render_night, red(), folder=FOLDER) == snapshot


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_the_verdict_is_the_last_line_and_begins_with_its_colour(make):
    found = make()
    last = printed(render_night, found, folder=FOLDER).splitlines()[-1]
    assert last.startswith("night GREEN: " if found.outcome is Outcome.PASS else f"night RED ({found.outcome}): ")


def test_cells_as_they_end(snapshot):
    cells = [
        cell(),
        cell("eagle/plain", seen(), kind="generated", left_out=3, scenarios=1),
        cell("mtp", verdict=Outcome.UNKNOWN, unknown=10, reasons=("the engine ended\n  and more",)),
    ]
    assert "".join(printed(render_cell, one) for one in cells) == snapshot


def test_step_summary(snapshot):
    assert summary(red()) == snapshot


def test_annotations(snapshot):
    assert "\n".join(workflow_commands(red())) == snapshot


def test_what_is_missing_from_a_night_is_on_every_page():
    found = incomplete()
    commands = "\n".join(workflow_commands(found))
    for page in (printed(render_night, found, folder=FOLDER, width=200), summary(found), commands):
        assert "shard 2 of 3 is missing, and 2 cells with it" in page
        assert "10 of 10 scenarios of 0.5.13/fixed/eagle have no verdict" in page
    assert errors_of(junit(found)) == {"eagle": True, "gate": True}


def errors_of(text):
    cases = ElementTree.fromstring(text).iter("testcase")
    return {case.get("name"): case.find("error") is not None for case in cases}


def test_a_green_night_names_what_moved_and_what_is_known():
    found = green()
    for page in (printed(render_night, found, folder=FOLDER, width=200), summary(found)):
        assert [word for word in (STOP, "F-004", "0.5.13/fixed/eagle") if word not in page] == []
    assert not [line for line in workflow_commands(found) if line.startswith("::error")]
    assert ElementTree.fromstring(junit(found)).get("failures") == "0"


def flood(number):
    """A night with so many different findings, each with a long text."""
    found = [seen(f"TOKEN:chain:DRAFT:hint-{one}", first="x" * 1900 + "é" * 100) for one in range(number)]
    return judged(night(cell("eagle", *found)))


def test_a_summary_of_a_thousand_findings_fits_and_says_what_it_leaves_out():
    found = flood(1000)
    assert len("".join(group.first for group in found.groups).encode()) > LIMIT, "would not fit as it is"
    text = summary(found)
    assert len(text.encode()) <= BUDGET < LIMIT
    assert text.startswith("## 🔴 night RED (FAIL): ")
    assert "more did not fit here; all of it is in the night's artifact" in text.splitlines()[-1]
    assert "| 0.5.13 | fixed | 1 |" in text, "counts come before the long texts"


@pytest.mark.parametrize("budget", [0, 100, 5000])
def test_a_summary_keeps_to_what_other_steps_left_of_the_budget(budget):
    assert len(summary(flood(50), budget=budget).encode()) <= max(budget, 200)


def test_annotations_keep_to_ten_of_a_kind_and_count_the_rest():
    lines = workflow_commands(flood(30))
    assert len(lines) == ANNOTATIONS
    assert lines[-1] == "::error title=more::21 more; see the step summary"
    assert len(workflow_commands(flood(10))) == ANNOTATIONS


def test_text_of_a_finding_cannot_end_its_annotation_or_begin_a_command():
    evil = "planned: 50 %, and\r\n::error title=x::owned"
    lines = workflow_commands(judged(night(cell(), faults=[evil])))
    (line,) = lines
    assert line == "::error title=the gate::planned: 50 %25, and%0D%0A::error title=x::owned"
    text = summary(judged(night(cell("eagle", seen(first="```\n<script>")), faults=["a | b\n# c <b>"])))
    assert "- **a \\| b # c &lt;b>**" in text
    assert "```text\n'''\n<script>\n```" in text


def test_a_night_with_a_fix_taken_out_says_so_wherever_it_names_the_release():
    one = judged(night(cell("eagle", seen()), revert=25015))
    pages = (
        [line for line in printed(render_night, one, folder=FOLDER, width=200).splitlines() if AHEAD in line],
        printed(render_night, one, folder=FOLDER).splitlines()[-1:],
        [line for line in summary(one).splitlines() if AHEAD in line or line.startswith("## ")],
        [line for line in workflow_commands(one) if AHEAD in line],
    )
    for lines in pages:
        assert lines
        assert [line for line in lines if "with #25015 reverted" not in line] == []
    assert document(one)["revert"] == 25015
    assert ElementTree.fromstring(junit(one)).find(".//property[@name='revert']").get("value") == "25015"


def test_the_first_night_that_saw_something_is_named_for_its_own_release_and_device():
    past = [
        night(cell("eagle"), day=24),
        night(cell("eagle", seen(), engine="0.5.17"), day=25),
        night(cell("eagle", seen()), day=26, revert=25015),
        night(cell("eagle", seen()), day=27),
        night(cell("tree", seen()), day=28),
    ]
    where = {"device": "cpu", "revert": None}
    assert first_seen(past, release="0.5.13", **where) == {AHEAD: past[3].plan.id}
    assert first_seen(past, release="0.5.17", **where) == {AHEAD: past[1].plan.id}
    assert first_seen(past, release="0.5.13", device="cuda", revert=None) == {}


def test_junit_says_how_often_and_since_when():
    said = junit(red())
    assert "shown 3 of 3 times: 100 %, with 95 % confidence 29 to 100 %; first seen tonight\n" in said


def test_junit_holds_what_xml_cannot():
    text = junit(judged(night(cell("eagle", seen(first="a\x00b\x1b[31m")))))
    assert "a?b?[31m" in text


def test_junit_does_not_take_one_cell_for_another_whose_name_begins_like_it():
    one = night(cell("eagle"), cell("eagle3", verdict=Outcome.UNKNOWN, unknown=10))
    assert errors_of(junit(judged(one))) == {"eagle": False, "eagle3": True, "gate": True}


def test_json_says_what_is_printed():
    found = red()
    made = document(found)
    assert (made["schema"], made["outcome"], made["green"]) == (1, "FAIL", False)
    assert [(one["signature"], one["status"]) for one in made["findings"]] == [
        (AHEAD, "new"),
        (AHEAD, "flaky"),
        (STOP, "fixed"),
    ]
    assert made["wrong"] == list(found.wrong)


DOCS = (Path(__file__).parents[2] / "docs" / "nightly.md").read_text()


@pytest.mark.parametrize("part", ["", "findings", "trends", "cells"])
def test_every_key_of_the_json_is_described(part):
    made = document(red())
    keys = {*(made[part][0] if part else made)}
    assert keys
    assert {key for key in keys if f"`{key}`" not in DOCS} == set()


def test_a_night_whose_boots_take_no_time_is_told_all_the_same():
    ended = cell().model_copy(update={"boots": 1, "waited": 0.0, "seconds": 0.0})
    text = printed(render_night, judged(night(ended)), folder=FOLDER)
    assert "1 engine boot, 0 of 0 s (-)" in text
