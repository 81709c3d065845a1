"""What reports say, word for word: Markdown, the diff of two runs, the page's fixed parts; and how the commands end."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from cases.meta import page_runs, results
from cases.meta.command_line import call
from harness.checks.findings import group
from reports.markdown import LIMIT, render_markdown
from reports.page import Beside, linked, render_page
from reports.page_data import embedded
from reports.prose import block, code
from reports.reading import read_report

CELL = {
    "engine": "0.5.11",
    "device": "cpu",
    "case": "pr25015",
    "revert": None,
    "verdict": "FAIL",
    "reasons": [],
    "expected": "PASS",
    "kinds": ["POSITION"],
    "first": {
        "kind": "POSITION",
        "rid": "a",
        "dp_rank": 0,
        "committed_len": 7,
        "round": 1,
        "phase": "DRAFT",
        "step": 0,
        "slot": 0,
        "expected": 7,
        "observed": 8,
    },
    "text_identical": True,
    "as_expected": False,
    "run": "runs/x",
}
MUTANT = {
    "id": "position-ahead",
    "family": "chain",
    "what": "one position ahead",
    "needs": "",
    "killed_by": ["positions"],
    "kinds": ["POSITION"],
    "expected_kinds": ["POSITION"],
    "examples": 2,
    "engine": "0.5.23",
    "verdict": "KILLED",
    "text_identical": True,
    "why": "",
}
MATRIX = {
    "schema": 1,
    "cells": [CELL, {**CELL, "engine": "0.5.13", "verdict": "PASS", "first": None, "kinds": [], "as_expected": True}],
}
MUTANTS = {
    "schema": 1,
    "engine": "0.5.23",
    "verdict": "FAIL",
    "unsound": [],
    "checks": {},
    "excused": {},
    "mutants": [MUTANT, {**MUTANT, "id": "quiet", "verdict": "SURVIVED", "killed_by": [], "why": "nothing saw it"}],
}
FAILING = (("single", results.sound), ("pr25015", results.one_ahead), ("pr26329", results.chunk_tail))
PASSING = (("single", results.sound), ("pr25015", results.sound), ("pr26329", results.sound))


def steady(text):
    """Without what differs from run to run."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", "2026-11-28T00:36:00+00:00", results.stable(text))
    return re.sub(r"-[0-9a-f]{12}(?=[^0-9a-f])", f"-{results.ID}", text)


def markdown(run):
    return steady(render_markdown(read_report(run)))


def without_engine(root):
    return results.store_without_engine(root, "four-together", "no engine:\n" + "\n".join(map(str, range(60))))


MADE = {
    "failing": lambda root: results.store(root, *FAILING),
    "passing": lambda root: results.store(root, *PASSING),
    "cut-off": lambda root: results.store(root, *FAILING[:1], finish=False),
    "without-engine": without_engine,
    "hostile": page_runs.hostile,
}


def test_markdown_of_a_run(work, snapshot):
    assert markdown(MADE["failing"](work / "runs")) == snapshot


@pytest.mark.parametrize(
    ("name", "first", "said"),
    [
        ("passing", "### ✓ eaglecheck PASS", "What was exercised"),
        ("cut-off", "### ? eaglecheck UNKNOWN", "it was cut off while running"),
        ("without-engine", "### ? eaglecheck UNKNOWN", "more lines"),
        ("hostile", "### ", "**First divergence**"),
    ],
)
def test_markdown_of_other_runs_begins_with_the_verdict_and_says_what_matters(work, name, first, said):
    text = markdown(MADE[name](work / "runs"))
    assert text.startswith(first)
    assert said in text
    outside = re.sub(r"(?ms)^(`{3,}).*?^\1$|(`+).*?\2", "", text)
    assert not re.search(r"<(?!/?(details|summary)>)|(?<![\w&])@\w", outside), "what an engine said stands inside code"


def test_markdown_of_a_reproducer_is_that_of_its_failure(work):
    run = results.store(work / "runs", *FAILING)
    text = markdown(next(run.glob("reproducers/pr25015-*")))
    assert "POSITION:positions:DRAFT:one-ahead" in text
    assert text.startswith("### ✕ eaglecheck FAIL: SGLang 0.5.23 diverges in 1 of 1 scenario (POSITION)")
    counts = re.findall(r"(?m)^\| .* compared \| .*$|^Coverage points.*$", text)
    judged = markdown(next(run.glob("pr25015-*")))
    assert counts == re.findall(r"(?m)^\| .* compared \| .*$|^Coverage points.*$", judged)
    assert re.search(r"positions compared \| [1-9]", text)


@pytest.mark.parametrize("limit", [400, 1500, LIMIT])
def test_markdown_keeps_to_its_limit_and_names_what_it_left_out(work, limit):
    report = read_report(results.store(work / "many", *((f"case-{n}", results.one_ahead) for n in range(5))))
    first = report.result.results[0]
    hints = [replace(first.divergences[0], hint=f"hint-{n}", first=False) for n in range(60)]
    many = replace(first, findings=(*first.findings, *group(hints)))
    report = replace(report, result=replace(report.result, results=(many, *report.result.results[1:])))
    text = render_markdown(report, limit=limit)
    assert len(text) <= limit
    assert text.startswith("### ✕ eaglecheck FAIL")
    assert ("Left out for length" in text) is (limit < LIMIT)
    assert ("21 more." in text) is (limit == LIMIT)


@pytest.mark.parametrize("text", ["plain", "a ` b", "`` twice", "ends with `", "a | b", "two\nlines"])
def test_code_survives_anything_inside_it(text):
    found = code(text)
    fence = re.match(r"`+", found).group()
    assert found.endswith(fence)
    assert fence not in found[len(fence) : -len(fence)].replace("\\|", "|").strip(" ")
    assert "\n" not in found
    assert re.search(r"(?<!\\)\|", found) is None


def test_a_block_is_longer_fenced_than_anything_inside_it():
    assert block("a\n````\nb").startswith("`````text\n")


def test_a_pull_request_number_links_to_nothing(work):
    run = results.store(work / "runs", *FAILING)
    for place, key in ((run / "manifest.json", "engine"), *((one, "header") for one in run.glob("*/engine.json"))):
        known = json.loads(place.read_text())
        known[key]["revert"] = 25015
        place.write_text(json.dumps(known))
    results.reseal(run)
    assert "with `#25015` reverted" in markdown(run).splitlines()[0]


def page_without_data(run, **beside):
    text = steady(render_page(read_report(run), beside=Beside(**beside)))
    text = re.sub(r"<style>.*?</style>", "<style>…</style>", text, flags=re.DOTALL)
    return re.sub(r"<script.*?</script>\n", "", text, flags=re.DOTALL)


def test_the_fixed_parts_of_a_page(work, snapshot):
    run = results.store(work / "runs", *FAILING)
    text = page_without_data(run, matrix=MATRIX, mutants=MUTANTS)
    table = re.compile(r'(<th class="n">positions</th></tr></thead>\n    <tbody>\n).*?(    </tbody>)', re.DOTALL)
    assert table.sub(r"\1…\n\2", text, count=1) == snapshot


@pytest.mark.parametrize(
    ("name", "said"), [("cut-off", "it has no verdict.json"), ("without-engine", "no engine came up")]
)
def test_a_page_of_a_run_without_a_verdict_says_why(work, name, said):
    text = page_without_data(MADE[name](work / "runs"))
    assert '<span class="badge UNKNOWN">UNKNOWN</span>' in text
    assert said in text


def test_embedded_json_cannot_end_its_element():
    said = embedded({"a": "</script><!-- & \u2028 <script>"})
    assert "<" not in said
    assert json.loads(said) == {"a": "</script><!-- & \u2028 <script>"}


def test_no_number_travels_that_json_lacks(work):
    run = MADE["hostile"](work / "runs")
    text = render_page(read_report(run))
    embedded_data = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert embedded_data
    for found in embedded_data:
        json.loads(found, parse_constant=lambda name: pytest.fail(name))


CHANGES = {
    "fixed": (FAILING, PASSING, 1),
    "broken": (PASSING, FAILING, 1),
    "same": (PASSING, PASSING, 0),
    "still-failing": (FAILING, FAILING, 0),
    "other-defect": ((("single", results.one_ahead),), (("single", results.chunk_tail),), 1),
    "nothing-in-common": (PASSING[:1], PASSING[1:], 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_diff_of_two_runs(work, name, snapshot):
    before, after, code_ = CHANGES[name]
    runs = [results.store(work / side, *cases).relative_to(work) for side, cases in (("a", before), ("b", after))]
    done = call("diff", *map(str, runs), "--json", "diff.json", code=code_)
    if name == "broken":
        assert steady(done.stdout) == snapshot
    document = json.loads((work / "diff.json").read_text())
    assert document["answer"] == {0: "same", 1: "differs", 3: "unknown"}[code_]
    assert document["schema"] == 1
    assert done.stdout.splitlines()[-1].startswith(f"{document['answer']}: ")
    changes = [one["change"] for one in document["signatures"]]
    assert changes == {"fixed": ["gone"] * 2, "broken": ["new"] * 2, "still-failing": ["still"] * 2}.get(
        name, ["new", "gone"] if name == "other-defect" else []
    )
    call("diff", *map(str, reversed(runs)), code=code_)


OPEN = {
    "cut off": (lambda root: results.store(root, *PASSING[:1], finish=False), "only before: pr25015, pr26329"),
    "nothing judged": (lambda root: results.store(root, finish=False), "0 scenarios judged before that"),
    "an edited program": (
        lambda root: results.store(root, *PASSING[:1], scenario={"prompts": (7,)}),
        "changed: single",
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_what_is_not_there_to_compare_leaves_the_question_open(work, name):
    make, said = OPEN[name]
    done = call("diff", results.store(work / "a", *PASSING), make(work / "b"), "--json", "diff.json", code=3)
    assert said in done.stdout
    assert json.loads((work / "diff.json").read_text())["answer"] == "unknown"


def test_a_reproducer_keeps_no_counts_and_none_are_said_to_have_gone(work):
    run = results.store(work / "a", *FAILING)
    (reproducer,) = (path for path in (run / "reproducers").iterdir() if path.name.startswith("pr25015"))
    done = call("diff", run, reproducer, code=3)
    assert "= POSITION:positions:DRAFT:one-ahead" in done.stdout
    assert "a reproducer keeps no verdict" in done.stdout
    assert "no more" not in done.stdout
    assert "values compared" not in done.stdout


def test_another_pair_is_said(work):
    def run(side, digest):
        one = {"folder": "pair", "architecture": "LlamaForCausalLM", "parameters": 1000, "hidden": 8, "layers": 1}
        one |= {"vocab": 16, "dtype": "float16", "sha256": {"config.json": digest}}
        pair = {"algorithm": "EAGLE", "target": one | {"sha256": {}}, "draft": one}
        known = {"engine": {"release": "0.5.23", "device": "cpu", "revert": None}, "pair": pair}
        return str(results.store(work / side, *PASSING[:1], manifest=known))

    first, same, other = run("a", "0" * 64), run("b", "0" * 64), run("c", "1" * 64)
    changed = [
        [one["name"] for one in json.loads((work / "diff.json").read_text())["facts"]]
        for after in (same, other)
        if call("diff", first, after, "--json", "diff.json").exit_code == 0
    ]
    assert changed == [[], ["draft"]]


def test_a_changed_setting_of_the_engine_is_named(work):
    settings = ({}, {"radix_cache": False})
    runs = [results.store(work / "runs", ("single", results.sound), scenario=one) for one in settings]
    done = call("diff", *map(str, runs), "--json", "diff.json")
    assert (done.exit_code, "  engine.radix_cache: True → False" in done.stdout.splitlines()) == (0, True), done.output
    facts = json.loads((work / "diff.json").read_text())["facts"]
    assert facts == [{"name": "engine.radix_cache", "before": "True", "after": "False"}]


def test_what_neither_run_could_judge_is_not_the_same(work):
    runs = [results.store_without_engine(work / side, "single", "no engine") for side in "ab"]
    done = call("diff", *map(str, runs), code=3)
    assert "single could not be judged in either run" in done.stdout


def test_everything_is_written_at_once(work):
    run = results.store(work / "runs", *FAILING).relative_to(work)
    (work / "matrix.json").write_text(json.dumps(MATRIX))
    (work / "mutants.json").write_text(json.dumps(MUTANTS))
    beside = ["--matrix", "matrix.json", "--mutants", "mutants.json"]
    done = call(
        "report", run, "--html", "a.html", "--markdown", "a.md", "--csv", "c", "--parquet", "p", *beside, code=0
    )
    assert done.stdout.splitlines() == ["page: a.html", "Markdown: a.md", "CSV: c", "Parquet: p"]
    text = (work / "a.html").read_text()
    assert "Releases × cases" in text
    assert "nothing saw it" in text
    assert len(list((work / "c").iterdir())) == len(list((work / "p").iterdir())) == 6


def test_markdown_goes_to_standard_output_alone(work):
    run = results.store(work / "runs", *FAILING)
    done = call("report", run, "--markdown", "-", "--csv", "c")
    assert done.stdout.startswith("### ✕ eaglecheck FAIL")
    assert done.stderr.strip() == "CSV: c"


def test_a_run_that_was_cut_off_can_be_reported(work):
    run = results.store(work / "runs", *FAILING, finish=False)
    done = call("report", run, "--html", "a.html", code=0)
    assert "it was cut off while running; 3 scenarios judged before that" in done.stdout


WRONG = {
    "nothing-to-write": (["RUN"], "eaglecheck report RUN --html report.html"),
    "no-such-run": (["nowhere", "--html", "a.html"], "there is no folder nowhere"),
    "nights-none": (["RUN", "--html", "a.html", "--nights", "nowhere"], "--nights nowhere: there is no such folder"),
    "matrix-without-page": (["RUN", "--csv", "c", "--matrix", "x"], "--matrix is shown in the page only"),
    "matrix-not-there": (["RUN", "--html", "a.html", "--matrix", "x"], "eaglecheck matrix --engines"),
    "mutants-no-json": (
        ["RUN", "--html", "a.html", "--mutants", "broken.json"],
        "broken.json is not what `eaglecheck mutants",
    ),
    "mutants-of-two": (["RUN", "--html", "a.html", "--mutants", "broken.json"], "or:  eaglecheck mutate --json m"),
    "matrix-of-mutants": (["RUN", "--html", "a.html", "--matrix", "mutants.json"], "cells: it is missing"),
    "inside-the-run": (["RUN", "--csv", "RUN"], "name a place outside RUN"),
    "over-the-run": (["RUN", "--html", "RUN/manifest.json"], "name a place outside RUN"),
}


@pytest.mark.parametrize("name", WRONG)
def test_usage_errors_say_what_to_type(work, name):
    run = results.store(work / "runs", *PASSING[:1]).relative_to(work)
    (work / "broken.json").write_text("{")
    (work / "mutants.json").write_text(json.dumps(MUTANTS))
    arguments, said = WRONG[name]
    done = call("report", *[one.replace("RUN", str(run)) for one in arguments], code=2)
    assert said.replace("RUN", str(run)) in done.stderr
    assert not (work / "a.html").exists()


@pytest.mark.parametrize(("revert", "said"), [(25015, "F-066 ("), (None, "nothing in docs/findings looks like it")])
def test_what_a_stored_run_took_out_of_its_release_decides_what_is_known(revert, said, tmp_path, monkeypatch):
    monkeypatch.setitem(results.HEADER, "revert", revert)
    manifest = {"engine": {"release": "0.5.23", "device": "cpu", "revert": revert}}
    run = results.store(tmp_path, ("pr25015", results.one_ahead), manifest=manifest)
    assert f"known: {said}" in render_page(read_report(run))


@pytest.mark.parametrize(
    ("first_seen", "said"),
    [
        (None, ""),
        ({}, "in none of these nights on this release"),
        ({"POSITION:positions:DRAFT:one-ahead": "20261128-020000-ab28"}, "in these nights since 20261128-020000-ab28"),
    ],
)
def test_a_page_beside_nights_says_since_when(first_seen, said, tmp_path):
    run = results.store(tmp_path, ("pr25015", results.one_ahead))
    page = render_page(read_report(run), beside=Beside(first_seen=first_seen))
    assert said in page if said else "these nights" not in page


def test_an_address_in_a_page_can_be_followed_and_nothing_else_is_markup():
    said = str(linked("<b> (0.5.12, https://github.com/sgl-project/sglang/pull/25015), see"))
    address = "https://github.com/sgl-project/sglang/pull/25015"
    assert said == f'&lt;b&gt; (0.5.12, <a href="{address}">{address}</a>), see'
