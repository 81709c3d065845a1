"""Expected accept lengths: what the reference says of each round, and what runs make of it."""

import copy
import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from cases.checkpoints import make_recipe
from cases.meta import handmade, nights, results
from cases.meta.handmade import asking
from cases.meta.json_models import Run
from cases.meta.sessions import SPEC_IDS, SPECS, edited, run
from cases.meta.speculating import FreeSession
from cases.mtp_weights import MtpRecipe
from harness.archive.writer import RunWriter
from harness.checks import judge
from harness.cli.documents import run_document
from harness.contract.known_issues import HEADER
from harness.contract.requests import RequestSpec
from harness.contract.settings import SpecConfig
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase
from harness.defects import departures
from harness.driving.accept_lengths import AcceptLengths, AcceptRounds, observed_lengths, total
from harness.driving.plan import Setup
from harness.driving.results import ScenarioResult
from harness.night.trends import trends_of
from reference.expected import committed_by
from reference.pairs import load_pair
from reference.tree import with_depths
from reports.findings import facts
from reports.frames import read_frames, read_trends
from reports.live import scenario_line
from reports.markdown import render_markdown
from reports.page import render_page
from reports.reading import read_report
from reports.terminal import accept_text, render_run


def said(trace):
    """(rid, attempt, committed) -> tokens."""
    data = [event.data for event in trace.named("expected_accept")]
    return {(one["rid"], one["attempt"], one["committed"]): one["tokens"] for one in data}


def observed(trace):
    return {share[1:]: length for share, length in observed_lengths(trace).items()}


def alone(session, text, committed):
    """What the first round behind `committed` tokens of a text commits where the reference drafts by itself."""
    request = RequestSpec(rid="b", input_ids=tuple(text[:committed]), max_new_tokens=session.spec.num_steps + 4)
    return observed(session.speculate(request))["b", 0, committed]


def text_of(request, trace):
    """Prompt and all that was committed."""
    first = handmade.find(trace, phase=Phase.PREFILL, slot=len(request.input_ids) - 1)
    rows = (trace.rows.strings["phase"] == Phase.ACCEPT).nonzero()[0]
    chosen = int(trace.rows.lists["chosen_ids"][first][0])
    return [*request.input_ids, chosen, *trace.rows.ints["input_id"][rows].tolist()]


# What the reference says


@pytest.fixture(scope="module")
def heads(eagle_head):
    """A draft head, and the same one with a wrong fc."""
    bad = copy.copy(eagle_head)
    bad.fc = bad.fc + 0.04 * torch.randn(bad.fc.shape, generator=torch.Generator().manual_seed(5))
    return eagle_head, bad


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_of_its_own_rounds_the_reference_expects_what_it_saw(heads, spec):
    session, request, trace = run(heads[0], spec, seed=4, new=24)
    assert said(session.replay(asking(request, spec=spec), trace)) == observed(trace)


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_of_another_heads_rounds_it_expects_what_its_own_head_would_have_had_accepted(heads, spec):
    good, bad = heads
    session, request, _ = run(good, spec, seed=6, new=24, longest=12)
    other = FreeSession(bad.target, bad, spec).speculate(request)
    expected = said(session.replay(asking(request, spec=spec), other))
    text = text_of(request, other)
    assert expected == {place: alone(session, text, place[2]) for place in observed(other)}
    assert sum(expected.values()) > sum(observed(other).values())


def test_a_defect_that_the_reference_follows_changes_nothing_of_what_it_expects(heads):
    spec = SPECS[2]
    session, request, trace = run(heads[0], spec, seed=7, new=24)
    follows = FreeSession(session.target, session.head, spec, departures=departures(["F-003"]))
    engine = follows.replay(asking(request, spec=spec), trace)
    steps = [i for i in range(len(engine.rows)) if engine.rows.strings["phase"][i] == Phase.DRAFT]
    chosen = [one.rows.lists["chosen_ids"] for one in (engine, session.replay(asking(request, spec=spec), trace))]
    assert any((chosen[0][i] != chosen[1][i]).any() for i in steps), "it does follow one"
    assert said(engine) == observed(trace)


def test_a_request_that_samples_is_left_out(heads):
    spec = SPECS[0]
    session, request, trace = run(heads[0], spec, seed=8)
    sampled = request.model_copy(update={"temperature": 0.7, "seed": 1})
    assert not said(session.replay(asking(sampled, spec=spec), trace))


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    pair = make_recipe(MtpRecipe(name="layers", seed=3), tmp_path_factory.mktemp("layers"))
    return load_pair(pair.target, pair.draft)


@pytest.mark.parametrize("k", [1, 3])
def test_layers_expect_of_their_own_rounds_what_they_saw(layers, k):
    spec = SpecConfig(algorithm="MTP", num_steps=k, num_draft_tokens=k + 1)
    session = FreeSession(*layers, spec)
    request = RequestSpec(rid="a", input_ids=tuple(range(3, 40, 2)), max_new_tokens=24)
    trace = session.speculate(request, chunk=7)
    expected = said(session.replay(asking(request, spec=spec), trace))
    assert expected == observed(trace)
    assert set(expected.values()) >= {1, 2}


def test_a_layer_is_asked_for_its_own_proposal_where_the_engine_made_another(layers):
    spec = SpecConfig(algorithm="MTP", num_steps=1, num_draft_tokens=2)
    session = FreeSession(*layers, spec)
    request = RequestSpec(rid="a", input_ids=tuple(range(3, 40, 2)), max_new_tokens=24)
    trace = session.speculate(request)

    def odd(rows, i, values):
        if len(values["chosen_ids"]) and values["phase"] in (Phase.DRAFT_PREFILL, Phase.EXTEND):
            values["chosen_ids"] = [1]

    expected = said(session.replay(asking(request, spec=spec), edited(trace, change=odd)))
    text = text_of(request, trace)
    assert expected == {place: alone(session, text, place[2]) for place in observed(trace)}


@pytest.mark.parametrize(("text", "committed"), [([9], 1), ([5, 9], 2), ([6, 7, 9], 3), ([6, 7, 8, 9], 4), ([6, 8], 2)])
def test_a_tree_commits_its_longest_line_along_the_text_and_one_token_more(text, committed):
    tree = with_depths((1, 5, 6, 7, 8), (-1, 0, 0, 2, 3))
    assert committed_by(tree, iter([*text, 0, 0])) == committed


# What a run makes of it


def with_expected(reference, engine, more, *, rank=0):
    """The reference saying of every verify that it would have committed `more` tokens more."""
    events = tuple(
        Event(
            name="expected_accept",
            scheduler_step=0,
            dp_rank=rank,
            data={"rid": rid, "attempt": attempt, "committed": committed, "tokens": length + more},
        )
        for (_, rid, attempt, committed), length in observed_lengths(engine).items()
    )
    return replace(reference, events=(*reference.events, *events))


def case(break_it=results.sound, *, more=1, **options):
    scenario = results.named("a", **options)
    engine, reference = results.traces(scenario, break_it)
    reference = with_expected(reference, engine, more)
    verdict, divergences = judge(scenario, engine, reference)
    return ScenarioResult.of(scenario, engine, reference, verdict, divergences, setup=Setup(release="0.5.23"))


def at(phase, committed, rid="r1", signature="x"):
    key = Key(dp_rank=0, rid=rid, attempt=0, committed=committed, phase=phase, step=0, slot=0)
    return Divergence(kind=Kind.TOKEN, check=signature, key=key, round=0, expected=0, observed=0)


def test_what_a_tie_decided_costs_nothing_where_nothing_is_wrong():
    found = case()
    assert found.passed
    assert found.accept.lost == 0.0
    assert found.accept.expected == found.accept.observed == sum(n * times for n, times in found.accepted.items())


def test_a_run_without_the_event_says_nothing():
    found = results.judged("a", results.one_ahead)
    assert found.accept is None
    assert set(found.accept_of.values()) == {None}


def test_a_finding_counts_each_request_from_its_first_divergence_on():
    scenario = results.named("a")
    engine, reference = results.traces(scenario)
    reference = with_expected(reference, engine, 1)
    own = sorted(share[3] for share in observed_lengths(engine) if share[1] == "r1")
    draft = AcceptRounds.of(scenario, engine, reference, [at(Phase.DRAFT, own[1])])
    assert draft.touched_by([at(Phase.DRAFT, own[1])]).verifies == len(own) - 1
    assert draft.all().expected - draft.all().observed == len(own) - 1
    extend = [at(Phase.EXTEND, own[1])]
    assert AcceptRounds.of(scenario, engine, reference, extend).touched_by(extend).verifies == len(own) - 2
    rank = [replace(extend[0], key=Key.of_rank(0, Phase.IDLE))]
    assert AcceptRounds.of(scenario, engine, reference, rank).touched_by(rank) is None
    assert AcceptRounds.of(scenario, engine, reference, rank).all().lost == 0.0


def test_a_finding_counts_what_follows_from_it():
    found = case(results.one_ahead)
    (root,) = [one for one in found.findings if one.is_root]
    rounds = [d for d in found.divergences if root.signature in (d.signature, d.cause)]
    assert {d.key.rid for d in rounds} == {"r0", "r1", "r2"}
    assert found.accept_of[root.signature] == replace(found.accept, sampled=0)
    assert found.accept.expected == found.accept.observed + found.accept.verifies


def test_with_a_defect_assumed_nothing_differs_and_the_loss_is_said_all_the_same():
    scenario = results.named("a", t=2)
    engine, reference = results.traces(scenario)
    told = with_expected(replace(reference, header={**reference.header, HEADER: ["F-003"]}), engine, 1)
    rounds = AcceptRounds.of(scenario, engine, told, []).all()
    assert rounds.expected == rounds.observed + rounds.verifies


def test_a_verify_that_an_old_release_cuts_at_the_requests_end_is_left_out():
    scenario = results.named("a")
    engine, reference = results.traces(scenario)
    told = with_expected(reference, engine, 0)
    cut = replace(engine, header={**engine.header, "truncates_at_finish": True})
    whole, rest = (AcceptRounds.of(scenario, one, told, []) for one in (engine, cut))
    gone = whole.expected.keys() - rest.expected.keys()
    last = {rid: max(share[3] for share in whole.expected if share[1] == rid) for rid in ("r0", "r1", "r2")}
    assert {(rid, committed) for _, rid, _, committed in gone} == set(last.items())


def test_verifies_of_requests_that_sample_are_counted_and_left_out():
    scenario = results.named("a")
    engine, reference = results.traces(scenario)
    told = with_expected(reference, engine, 0)
    events = tuple(event for event in told.events if event.data.get("rid") != "r1")
    requests = tuple(r.model_copy(update={"temperature": 0.5} if r.rid == "r1" else {}) for r in scenario.requests)
    sampled = scenario.model_copy(update={"requests": requests})
    found = AcceptRounds.of(sampled, engine, replace(told, events=events), []).all()
    assert found.sampled == sum(share[1] == "r1" for share in observed_lengths(engine))
    assert found.verifies == len(observed_lengths(engine)) - found.sampled


def test_numbers_of_several_are_added_up_before_they_are_divided():
    one, other = (
        AcceptLengths(verifies=10, expected=30, observed=24),
        AcceptLengths(verifies=30, expected=60, observed=60),
    )
    assert total([one, None, other]).text == "expected 2.25, observed 2.10, lost 6.7 %"
    assert total([None]) is None
    assert AcceptLengths(verifies=1000, expected=3000, observed=3001).text.endswith("lost 0.0 %")


# Where it is said


@pytest.fixture(scope="module")
def wrong():
    return case(results.one_ahead)


def test_a_run_a_scenario_and_a_finding_say_it_on_a_terminal(wrong):
    console = Console(record=True, width=120, file=io.StringIO())
    render_run(console, results.run_of(wrong))
    said = console.export_text()
    assert f"accept length: {wrong.accept.text} (of {wrong.accept.verifies} verifies)" in said
    assert f"accept length in the {wrong.accept.verifies} verifies it touches: {wrong.accept.text}" in said
    assert facts(wrong)[-1] == f"accept length: {wrong.accept.text}"
    assert scenario_line("scenario 1/1 a", wrong).plain.endswith(f"POSITION  accept length: {wrong.accept.text}")
    sampled = replace(wrong.accept, sampled=3)
    assert accept_text(sampled).endswith("verifies; 3 verifies of requests that sample left out)")


def test_json_says_it(wrong):
    document = Run.model_validate(run_document(results.run_of(wrong))).model_dump(by_alias=True)
    means = {"expected": round(wrong.accept.mean_expected, 4), "observed": round(wrong.accept.mean_observed, 4)}
    own = {"verifies": wrong.accept.verifies, **means, "lost_percent": round(wrong.accept.lost, 2), "sampled": 0}
    assert document["accept"] == document["scenarios"][0]["accept"] == document["findings"][0]["accept"] == own
    nothing = run_document(results.run_of(results.judged("a")))
    assert nothing["accept"] is nothing["scenarios"][0]["accept"] is None


def stored(root, break_it=results.one_ahead):
    """A run folder of one scenario, whose reference expected a token more of every verify."""
    scenario = results.named("a")
    engine, reference = results.traces(scenario, break_it)
    reference = with_expected(reference, engine, 1)
    verdict, divergences = judge(scenario, engine, reference)
    writer = RunWriter.create(root, manifest={"engine": {"release": "0.5.23", "device": "cpu", "revert": None}})
    writer.save_scenario(scenario, engine=engine, reference=reference, verdict=verdict, divergences=divergences)
    writer.finish(verdict)
    writer.close()
    return writer.folder


def test_frames_page_and_markdown_of_a_stored_run_say_it(tmp_path, wrong):
    run = stored(tmp_path)
    table = read_frames(run).accept_lengths
    assert (table["expected_len"] == table["accept_len"] + 1).all()
    trend = read_trends([run]).iloc[0]
    assert (trend["expected_mean"], trend["lost_percent"]) == (wrong.accept.mean_expected, wrong.accept.lost)
    report = read_report(run)
    page, text = render_page(report), render_markdown(report)
    assert f"<td>{wrong.accept.text}</td>" in page
    for said in (page, text):
        assert f"accept length in the {wrong.accept.verifies} verifies it touches: {wrong.accept.text}" in said
        assert f"{wrong.accept.text} (of {wrong.accept.verifies} verifies)" in said


def test_a_stored_run_without_the_event_has_no_expected_length(tmp_path):
    run = results.store(tmp_path, ("a", results.sound))
    assert read_frames(run).accept_lengths["expected_len"].isna().all()
    assert math.isnan(read_trends([run]).iloc[0]["lost_percent"])
    assert "expected" not in render_markdown(read_report(run))


def test_a_night_adds_it_up_and_tracks_it():
    tonight = nights.night(nights.cell("eagle", accept=(10, 30, 27)), day=28)
    before = [nights.over(nights.night(nights.cell("eagle", accept=(10, 30, 30)), day=20 + day)) for day in range(6)]
    (found,) = [one for one in trends_of([*before, tonight]).charts if one.what == "accept length lost"]
    assert [point.measured.value for point in found.points] == [0.0] * 6 + [10.0]
    assert found.moved
    assert nights.cell("eagle").lost is None
