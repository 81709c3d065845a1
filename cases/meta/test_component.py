"""What is asked of a release's code without an engine: labelled so, kept with the run, and no part of a verdict."""

import json
import sys
from types import SimpleNamespace

from harness.engines import component
from harness.engines.component import ComponentAnswer

ANSWERS = {
    "two requests": {"outcome": "built", "what": "EagleDraftInput", "shapes": {}},
    "no request": {"outcome": "raises", "error": "RuntimeError: empty", "site": "srt/x.py:build"},
    "plugin": {"outcome": "no draft input", "relay": ["stash"]},
}
FOUND = ComponentAnswer(release="0.5.13", answers=ANSWERS)


def environment(**changes):
    return SimpleNamespace(version="0.5.13", python=sys.executable, pythonpath=(), environ={}, **changes)


def test_notes_say_what_they_are_not_and_where_it_raises():
    first, *lines = component.notes(FOUND)
    assert "no engine, no part of the verdict" in first
    assert lines == [
        "  two requests  built EagleDraftInput",
        "  no request    raises: RuntimeError: empty (srt/x.py:build)",
        "  plugin        no draft input",
    ]


def test_table_has_a_row_a_case_and_a_column_a_release():
    other = ComponentAnswer(release="0.5.9", answers={}, error="no such module")
    lines = component.table([FOUND, other]).splitlines()
    assert lines[0] == "| component level | 0.5.13 | 0.5.9 |"
    assert lines[3] == "| no request | raises RuntimeError | no such module |"


def test_what_cannot_be_asked_is_an_answer_with_the_reason(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('sglang is not here')")
    monkeypatch.setattr(component, "SCRIPT", script)
    found = component.ask(environment())
    assert (found.answers, found.error) == ({}, "sglang is not here")
    assert component.notes(found) == [
        "component level (no engine, no part of the verdict): cannot be asked: sglang is not here"
    ]


def test_answer_is_kept_in_the_run_folder_with_its_level(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(f"print({component.MARK!r} + {json.dumps({'answers': ANSWERS})!r})")
    monkeypatch.setattr(component, "SCRIPT", script)
    assert component.of_run(environment(), tmp_path).answers == ANSWERS
    kept = json.loads((tmp_path / "component.json").read_text())
    assert kept == {"level": "component", "release": "0.5.13", "answers": ANSWERS, "error": ""}
