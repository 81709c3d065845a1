"""What a manifest or a header says of an engine is read in its types, and must be of the engine that was driven."""

import json

import pytest

from cases.meta import results
from cases.meta.command_line import call
from cases.meta.files import edit_json
from harness.archive import digests
from harness.archive.event_facts import unfit

FAILING = (("pr25015", results.one_ahead),)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose digests are gone, as the message for a deliberate change says."""
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    folder = results.store(tmp_path / "runs", *FAILING)
    for sums in folder.rglob(digests.SUMS):
        sums.unlink()
    return folder


def change(path, key, **values):
    edit_json(path, **{key: json.loads(path.read_text())[key] | values})


UNFIT = {
    "another release": ({"release": "9.9"}, "release is '9.9', and the engine itself reported '0.5.23'"),
    "no release": ({"release": "newest"}, "'newest' is not a release\n  allowed: a version such as 0.5.23"),
    "a number for a release": ({"release": 0.5}, "engine.release: found 0.5"),
    "another device": ({"device": "cuda"}, "device is 'cuda', and the engine itself reported 'cpu'"),
    "no device": ({"device": "tpu"}, 'allowed: "cpu", "cuda"'),
    "a revert that was none": ({"revert": 25015}, "revert is 25015, and the engine itself reported None"),
    "an attention that there is none of": ({"cpu_attention": "fa3"}, 'allowed: "torch", "interpreted"'),
    "half a pair": ({"pair": ["target"]}, "engine.pair"),
    "a finding that has no page": ({"assumed": ["F-999"]}, "unknown finding 'F-999'"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_of_a_run(run, name, tmp_path):
    changes, said = UNFIT[name]
    change(run / "manifest.json", "engine", **changes)
    page = ("--html", str(tmp_path / "page.html"))
    for typed in (("recheck", str(run)), ("recheck", str(next(run.glob("pr25015-*")))), ("report", str(run), *page)):
        done = call(*typed, code=3)
        assert said in done.stderr
        assert str(run / "manifest.json") in done.stderr


HEADERS = {
    "a number for a release": ({"release": 0.5}, "header: release: found 0.5"),
    "a stand-in without a name": ({"replaced": [{"by": "stand-in"}]}, "it is missing"),
    "a length in quotes": ({"context_length": "512"}, 'header: context_length: found "512"'),
    "a finding that has no page": ({"assumed": ["F-999"]}, "unknown finding 'F-999'"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_of_a_trace(run, name):
    changes, said = HEADERS[name]
    trace = next(run.glob("pr25015-*")) / "engine.json"
    change(trace, "header", **changes)
    done = call("recheck", run, code=3)
    assert said in done.stderr
    assert str(trace) in done.stderr


@pytest.mark.parametrize("name", HEADERS)
def test_of_a_reproducer(run, name):
    changes, said = HEADERS[name]
    reproducer = next(run.glob("reproducers/pr25015-*"))
    change(reproducer / "manifest.json", "header", **changes)
    done = call("replay", reproducer, code=3)
    assert said in done.stderr


def test_a_reproducers_manifest_is_of_its_trace(run):
    reproducer = next(run.glob("reproducers/pr25015-*"))
    edit_json(reproducer / "manifest.json", release="0.5.11")
    done = call("replay", reproducer, code=3)
    assert "release is '0.5.11', and the engine itself reported '0.5.23'" in done.stderr


def test_a_commits_files_need_not_know_the_release_they_ran_in(run):
    trace = next(run.glob("pr25015-*")) / "engine.json"
    change(trace, "header", release="0.0.0.dev0", tree="/work/trees/a")
    call("recheck", run, code=1)


def event(trace, name):
    return next(one for one in trace["events"] if one["name"] == name)


#: Seen as a traceback, or as 23 GB of memory, before they were read in their types.
TRACES = {
    "a text that is not there": (
        "reference",
        lambda one: event(one, "greedy")["data"].pop("output_ids"),
        "event 'greedy': output_ids is missing",
    ),
    "a number for a text": (
        "reference",
        lambda one: event(one, "greedy")["data"].update(output_ids=3),
        "event 'greedy': output_ids: found 3",
    ),
    "more tokens than there is room for": (
        "engine",
        lambda one: one["rounds"][1]["lens"].__setitem__(0, 10**12),
        "rounds.1.lens.0: found",
    ),
    "rows before the first": (
        "engine",
        lambda one: one["rounds"][1]["starts"].__setitem__(0, -5),
        "rounds.1.starts.0: found -5",
    ),
    "a request less": ("engine", lambda one: one["rounds"][1]["lens"].pop(), "entries for"),
}


@pytest.mark.parametrize("name", TRACES)
def test_of_what_a_trace_says_beside_its_rows(run, name):
    side, change_it, said = TRACES[name]
    path = next(run.glob("pr25015-*")) / f"{side}.json"
    trace = json.loads(path.read_text())
    change_it(trace)
    path.write_text(json.dumps(trace))
    done = call("recheck", run, code=3)
    assert said in done.stderr.replace("\n", " ")
    assert str(path) in done.stderr


def test_copied_tails_are_reported_one_a_request():
    said = {"round": 1, "rids": ["a", "b"], "attempts": [0, 0], "committed": [4, 4], "holes": [1, 1], "wrong": [0, 0]}
    assert unfit("tails", said) == ""
    assert "different lengths" in unfit("tails", {**said, "holes": [1]})
    assert "different lengths" in unfit("tails", {**said, "committed": 4})
    written = {"rid": "a", "length": None, "matched": [], "text": ""}
    assert unfit("written", written) == ""  # a text that nothing stops
    assert "matched is missing" in unfit("written", {"rid": "a", "length": 3})
    recurrent = {"rid": "a", "attempt": 0, "first": 0, "length": 3, "refused": {}}
    assert unfit("recurrent_rows", recurrent) == ""
    assert "found null" in unfit("recurrent_rows", {**recurrent, "length": None})
    assert unfit("of-a-later-version", {"anything": object.__name__}) == ""
