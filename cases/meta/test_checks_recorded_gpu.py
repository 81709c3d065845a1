"""Runs recorded on a real GPU, judged again by today's checks: corpus cases on four releases, eager and in graphs."""

import json
import shutil

import pytest
from packaging.version import Version

from cases import catalogue
from cases.meta.command_line import call
from cases.meta.recorded import GPU, RECORDED, gpu_run
from harness.archive.again import run_again
from harness.archive.store import read_case

RELEASES = ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.17")
FIRST_REVERT = Version("0.5.13")
#: What each bug shows first, by the words of its issue: positions one ahead; the target's guess in a chunk's tail.
FIRST_SHOWN = {
    "pr25015": "POSITION:positions:DRAFT:one-ahead",
    "pr26329": "EXTEND_INPUT:inputs:DRAFT_PREFILL:chunk-tail-target-guess",
}
#: Up to this release a replayed draft extend attends its rows twice on the triton backend (docs/findings/F-001.md).
ATTENDED_TWICE, LAST_TWICE = "NUMERIC:extend:EXTEND:hidden_out-off", Version("0.5.12.post1")

CELLS = [
    (case, release, mode, revert)
    for case in FIRST_SHOWN
    for release in RELEASES
    for mode in ("eager", "graphs")
    for revert in (False, True)
    if not revert or Version(release) >= FIRST_REVERT
]


@pytest.fixture
def recorded(tmp_path):
    """A recorded run, copied."""

    def copy(*cell):
        return shutil.copytree(gpu_run(*cell), tmp_path / gpu_run(*cell).name)

    return copy


def recheck(place, *options):
    """Exit code and the JSON of `eaglecheck recheck`."""
    out = place.parent / "again.json"
    done = call("recheck", place, "--json", out, *options)
    assert out.is_file(), done.output
    return done.exit_code, json.loads(out.read_text())


def expected_roots(case, release, mode, revert):
    entry = catalogue.load(case)
    bad = entry.expected(release=release, revert=entry.revert if revert else None) == "FAIL"
    roots = {FIRST_SHOWN[case]} if bad else set()
    if mode == "graphs" and Version(release) <= LAST_TWICE and entry.scenario.spec.num_steps > 1:
        roots.add(ATTENDED_TWICE)
    return roots


@pytest.mark.parametrize("folder", sorted(RECORDED.glob("*/*")), ids=lambda folder: folder.name)
def test_a_recorded_run_is_of_the_scenario_that_lies_beside_it(folder):
    """Fields with defaults are added to scenarios in time, and must not change who they are."""
    stored = read_case(folder)
    assert stored.engine.scenario_id == stored.scenario.id


def test_every_cell_is_recorded():
    assert {path.name for path in GPU.iterdir()} == {gpu_run(*cell).name for cell in CELLS}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: gpu_run(*cell).name)
def test_a_recorded_run_still_shows_what_its_window_says(cell, recorded):
    code, document = recheck(recorded(*cell))
    roots = {found["signature"] for found in document["findings"] if found["consequence_of"] in (None, "")}
    wanted = expected_roots(*cell)
    assert roots == wanted
    assert (code, document["verdict"]) == ((1, "FAIL") if wanted else (0, "PASS"))
    assert document["compared"]["positions"] > 0
    assert document["replaced"] == []
    assert document["scenarios"][0]["text_identical"] is True


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: gpu_run(*cell).name)
def test_a_recorded_run_ran_as_its_name_says(cell):
    case, release, mode, _ = cell
    trace = read_case(gpu_run(*cell)).engine
    said = [trace.header[name] for name in ("release", "device", "dtype", "hooks_missing")]
    assert said == [release, "cuda", "float16", []]
    decodes = [record for record in trace.rounds if record.mode == "DECODE"]
    assert decodes
    phases = {"VERIFY", "DRAFT"} if catalogue.load(case).scenario.spec.num_steps > 1 else {"VERIFY"}
    for record in decodes:
        assert (phases <= set(record.graphs)) == (mode == "graphs")
        assert all(size >= len(record.rids) for size in record.graphs.values())
    assert run_again(gpu_run(*cell)).startswith(f"eaglecheck run --engine {release} --device cuda ")


def test_positions_of_the_graph_bug_were_seen_inside_the_graph():
    trace = read_case(gpu_run("pr25015", "0.5.13", "graphs", True)).engine
    rows = trace.rows
    drafts = rows.strings["phase"] == "DRAFT"
    graphs = {record.index for record in trace.rounds if "DRAFT" in record.graphs}
    assert set(rows.ints["round"][drafts]) <= graphs
    ahead = rows.ints["position"][drafts] - rows.ints["committed"][drafts] - rows.ints["step"][drafts]
    assert set(ahead) == {1}


def test_the_reference_says_the_same_when_it_is_computed_anew(recorded):
    place = recorded("pr25015", "0.5.12.post1", "graphs", False)
    code, document = recheck(place, "--fresh-reference")
    assert code == 1
    assert [found["signature"] for found in document["findings"]][:1] == [ATTENDED_TWICE]
