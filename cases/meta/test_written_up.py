"""The list of findings that verdicts point at, and docs/findings.md: one cannot change without the other."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from harness.contract.deviations import DEVIATIONS
from harness.contract.written_up import BOOK, CAPTURED, WRITTEN_UP, known_as

from cases import known
from cases.meta import handmade
from harness.contract.types import EngineConfig, SpecConfig
from harness.engines.launch import GRAPH_SIZES

ROOT = Path(__file__).parents[2]
SECTIONS = {
    part[:5]: part for part in re.split(r"^## ", (ROOT / BOOK).read_text(), flags=re.MULTILINE) if part.startswith("F-")
}
BY_ID = {one.id: one for one in WRITTEN_UP}
ADD = "harness/contract/written_up.py: an entry a finding, with its heading, releases and signatures"


def signatures(section):
    """What a section says in the words of a signature; `…` stands for anything, or for what stood before."""
    found = re.findall(r"`((?:[A-Z_]+|…):[^`\s]+)`", section)
    return [one.replace("…", "*") for one in found if re.match(r"^([A-Z_]+:[a-z]+:|…:)", one)]


def alike(pattern, told):
    """Whether two patterns can mean the same signature."""
    return fnmatchcase(told.replace("*", "x"), pattern) or fnmatchcase(pattern.replace("*", "x"), told)


def test_every_finding_of_the_book_has_an_entry_and_every_entry_is_in_the_book():
    assert sorted(SECTIONS) == sorted(BY_ID), ADD


@pytest.mark.parametrize("one", WRITTEN_UP, ids=lambda one: one.id)
def test_an_entry_has_the_heading_of_its_finding(one):
    assert SECTIONS[one.id].splitlines()[0] == f"{one.id} {one.title}", ADD


@pytest.mark.parametrize("one", WRITTEN_UP, ids=lambda one: one.id)
def test_an_entry_has_the_signatures_of_its_finding_and_no_others(one):
    told = signatures(SECTIONS[one.id])
    for pattern in one.signatures:
        assert any(alike(pattern, each) for each in told), f"{pattern} is not in {BOOK}"
    for each in told:
        assert any(alike(pattern, each) for pattern in one.signatures), f"{each} is in {BOOK} only; {ADD}"


@pytest.mark.parametrize("one", WRITTEN_UP, ids=lambda one: one.id)
def test_an_entry_begins_and_ends_with_releases_that_its_finding_names(one):
    text = SECTIONS[one.id]
    for release in one.releases:
        assert release is None or re.search(rf"(?<![\d.]){re.escape(release)}(?![\w])", text), (one.id, release)


def test_what_can_be_assumed_is_written_up_and_has_the_same_releases():
    assert set(DEVIATIONS) <= set(BY_ID)
    for name, deviation in DEVIATIONS.items():
        assert deviation.releases is None or deviation.releases == BY_ID[name].releases


@pytest.mark.parametrize("entry", [one for one in known.read() if one.issue.startswith("F-")], ids=lambda one: one.what)
def test_what_a_night_takes_for_known_is_known_here_too(entry):
    one = BY_ID[entry.issue]
    assert all(one.looks_like(signature) for signature in entry.signatures)
    assert all(one.on(release) for release in entry.engines)


def scenario(*, algorithm="EAGLE", k=3, t=1, n=4, **engine):
    made = handmade.scenario()
    spec = SpecConfig(algorithm=algorithm, k=k, t=t, n=n)
    return made.model_copy(update={"spec": spec, "engine": EngineConfig(**engine)})


def ids(signature, made, *, release, device="cpu", reasons=()):
    found = known_as([signature], scenario=made, release=release, device=device, reasons=reasons)
    return [one.id for one in found.get(signature, ())]


OFF = "NUMERIC:extend:DRAFT_PREFILL:hidden_out-off"


@pytest.mark.parametrize(
    ("signature", "made", "release", "expected"),
    [
        (OFF, scenario(algorithm="MTP"), "0.5.23", ["F-012"]),
        (OFF, scenario(algorithm="MTP"), "0.5.11", ["F-023"]),
        (OFF, scenario(algorithm="MTP", prefix_cache=False), "0.5.23", []),
        (OFF, scenario(), "0.5.23", []),
        (OFF, scenario(dp=2, tp=2), "0.5.23", ["F-016"]),
        ("TOKEN:finish:ACCEPT:ran-past-stop", scenario(), "0.5.17", ["F-004"]),
        ("TOKEN:finish:ACCEPT:ran-past-stop", scenario(), "0.5.18", []),
        ("NUMERIC:extend:EXTEND:hidden_out-off", scenario(algorithm="MTP", pd=True), "0.5.23", ["F-013", "F-017"]),
        ("NUMERIC:extend:EXTEND:hidden_out-off", scenario(overlap=False), "0.5.11", ["F-001"]),
        ("POSITION:positions:DRAFT:one-ahead", scenario(), "0.5.11", []),
        ("TOKEN:finish:ACCEPT:ran-past-stop", scenario(), "of-a-commit", []),
    ],
)
def test_a_signature_points_only_where_release_and_scenario_fit(signature, made, release, expected):
    assert ids(signature, made, release=release) == expected


def test_what_was_assumed_is_something_else_where_it_still_shows():
    made = scenario(algorithm="MTP")
    assert ids(OFF, made, release="0.5.23", reasons=("assumed: F-012, rows out of the prefix cache",)) == []


@pytest.mark.parametrize(("device", "offered"), [("cpu", True), ("cuda", False)])
def test_a_stand_in_is_offered_only_where_there_is_one(device, offered):
    signature = "CRASH:ledger:VERIFY:srt/layers/attention/triton_backend.py:init_forward_metadata"
    made = scenario(algorithm="EAGLE3", dp=2, tp=2)
    (one,) = known_as([signature], scenario=made, release="0.5.23", device=device)[signature]
    assert one.assume is offered
    assert ("; --assume F-007 expects it, and tells only what is left" in one.line) is offered


def test_a_reason_without_a_finding_points_too():
    reason = "the engine would not start: AttributeError: 'BarePlugin' object has no attribute 'create_future_map'"
    made = scenario(pd=True)
    made = made.model_copy(update={"spec": SpecConfig(plugin="bare")})
    found = known_as([reason], scenario=made, release="0.5.13", device="cpu")
    assert [one.id for one in found[reason]] == ["F-018"]
    assert known_as([reason], scenario=scenario(), release="0.5.13", device="cpu") == {}


def test_a_crash_is_known_where_its_scenario_can_show_it():
    few = "CRASH:ledger:VERIFY:srt/speculative/eagle_worker_common.py:_compact_accept_to_front"
    assert ids(few, scenario(k=2, t=2, n=2), release="0.5.23") == ["F-028"]
    assert ids(few, scenario(k=2, t=2, n=3), release="0.5.23") == []
    assert ids(few, scenario(k=2, t=2, n=2), release="0.5.12.post1") == []
    freed = "CRASH:ledger:DRAFT:srt/speculative/triton_ops/cache_locs.py:assign_extend_cache_locs_func"
    assert ids(freed, scenario(graphs=True), release="0.5.13", device="cuda") == ["F-026"]
    assert ids(freed, scenario(), release="0.5.13", device="cuda") == []
    assert ids(freed, scenario(graphs=True), release="0.5.17", device="cuda") == []


@pytest.mark.parametrize(
    ("graphs", "requests", "expected"), [(True, 4, []), (True, 5, ["F-011"]), (False, 1, ["F-011"])]
)
def test_layers_run_eagerly_without_graphs_or_with_more_requests_than_any_is_captured_for(graphs, requests, expected):
    made = scenario(algorithm="MTP", graphs=graphs)
    made = made.model_copy(update={"requests": made.requests[:1] * requests})
    for what in ("off", "nan"):
        assert ids(f"NUMERIC:verify:VERIFY:hidden_out-{what}", made, release="0.5.13", device="cuda") == expected
    assert max(GRAPH_SIZES) == CAPTURED


def test_what_is_left_of_a_nan_once_narrow_blocks_are_assumed_points_to_padding():
    made, nan = scenario(algorithm="MTP", graphs=True), "NUMERIC:extend:EXTEND:hidden_out-nan"
    assert ids(nan, made, release="0.5.13", device="cuda") == ["F-027", "F-029"]
    assert ids(nan, made, release="0.5.13", device="cuda", reasons=("assumed: F-027, in CUDA graphs",)) == ["F-029"]
