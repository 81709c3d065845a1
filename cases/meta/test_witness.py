"""The witness without an engine: what it asks, which rows it takes, and what its reference trace says."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cases.meta import handmade
from cases.meta.command_line import call
from cases.meta.recorded import GPU
from harness.archive.store import read_case
from harness.archive.writer import RunWriter
from harness.checks import judge
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.cli import judges
from harness.contract.providers import providers_in, witnessed_in
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Outcome, Phase
from harness.contract.usage import UsageError
from harness.driving.judging import NoProviderError
from harness.driving.refusals import unwitnessed
from harness.driving.witness import Witness, plainest
from harness.driving.witness_texts import Growth, Meaning, Texts
from harness.driving.witness_trace import reference_trace

CHAIN = handmade.scenario()
#: With three steps the toy verifies other candidates than the best.
TREE = handmade.scenario(t=2, k=2)


def heard(scenario: Scenario, engine: Trace, *, change=lambda trace: trace, leave_out=lambda request: False) -> Witness:
    """A witness whose scenarios the toy engine answered; change: what is done to its traces before."""
    witness = Witness(scenario, engine)
    for asked in witness.scenarios():
        kept = [request for request in asked.requests if not leave_out(request)]
        if kept:
            trace = handmade.build(asked.model_copy(update={"requests": tuple(kept)}))[0]
            witness.hear(asked, change(trace))
    return witness


def judged(scenario: Scenario, engine: Trace, witness: Witness):
    return judge(scenario, engine, reference_trace(witness))


@pytest.mark.parametrize("scenario", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_sound_engine_agrees_with_its_witness(scenario):
    engine, papers = handmade.build(scenario)
    witness = heard(scenario, engine)
    reference = reference_trace(witness)
    verdict, divergences = judge(scenario, engine, reference)
    assert (verdict.outcome, divergences) == (Outcome.PASS, [])
    assert providers_in(reference.header) == {"target": "witness", "draft": "witness"}
    assert any(reason.startswith("judged by the witness") for reason in verdict.reasons)
    by_paper, _ = judge(scenario, engine, papers)
    same = ("positions", "extend_inputs", "cache_slots", "parents", "accepts")
    assert {name: verdict.compared[name] for name in same} == {name: by_paper.compared[name] for name in same}


def test_each_sample_of_a_request_has_a_witness():
    alone = handmade.scenario(prompts=(5,))
    scenario = alone.model_copy(update={"requests": (alone.requests[0].model_copy(update={"n": 2}),)})
    engine = replace(handmade.build(scenario.sampled)[0], scenario_id=scenario.id)
    verdict, divergences = judged(scenario, engine, heard(scenario, engine))
    assert [end.rid for end in engine.ends] == ["r0.0", "r0.1", "r0.2"]
    assert (verdict.outcome, divergences) == (Outcome.PASS, [])


def test_every_row_of_a_chain_but_the_end_of_an_early_chunk_has_a_witness():
    engine, _ = handmade.build(CHAIN)
    seen = witnessed_in(reference_trace(heard(CHAIN, engine)).header)
    early = sum(not final for record in engine.rounds if record.mode == "PREFILL" for final in record.final)
    known, of = seen.rows.pop(str(Phase.DRAFT_PREFILL))
    assert of - known == early > 0
    assert all(known == of for known, of in seen.rows.values())


def test_the_witness_is_alone_and_plain():
    scenario = handmade.scenario(
        t=2, n=6, page_size=4, max_total_tokens=64, dp_size=2, tp_size=2, trust_remote_code=True
    )
    engine, _ = handmade.build(CHAIN)
    (asked,) = Witness(CHAIN, engine).scenarios()
    kinds = [op.kind for op in asked.script]
    assert kinds == ["submit", "drain"] * len(asked.requests)
    assert all(len(op.rids) == 1 for op in asked.script if op.kind == "submit")
    assert max(request.max_new_tokens for request in asked.requests) == 2
    plain = plainest(scenario)
    assert plain.spec.eagle_topk == 1
    config = plain.engine
    assert (config.page_size, config.dp_size, config.tp_size, config.max_running_requests) == (1, 1, 1, 1)
    assert (config.radix_cache, config.cuda_graph, config.overlap_schedule) == (False, False, False)
    assert config.chunked_prefill_size is None
    assert config.trust_remote_code  # without it a checkpoint with code of its own does not boot


def test_a_prompt_is_asked_once_however_many_rows_need_it():
    twins = handmade.scenario(prompts=(7,), chunk=None)
    request = twins.requests[0]
    both = twins.model_copy(update={"requests": (request, request.model_copy(update={"rid": "r1"}))})
    asked = [
        {one.input_ids for part in Witness(scenario, handmade.build(scenario)[0]).scenarios() for one in part.requests}
        for scenario in (twins, both)
    ]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY, Phase.DRAFT, Phase.EXTEND, Phase.DRAFT_PREFILL])
def test_a_state_that_is_off_is_found(phase):
    engine, _ = handmade.build(CHAIN)
    broken = handmade.copy_trace(engine)
    broken.tensors[f"hidden_out.{phase}"][-1] += 0.1
    verdict, _ = judged(CHAIN, broken, heard(CHAIN, broken))
    assert verdict.root_kinds == ("NUMERIC",)


def test_a_wrong_proposal_is_found_and_what_follows_it_is_not_compared():
    engine, _ = handmade.build(CHAIN)
    row = handmade.find(engine, phase="DRAFT", step=0, rid="r0")
    broken = handmade.copy_trace(engine)
    other = int(broken.rows.lists["top_ids"][row][5])
    broken.rows.lists["chosen_ids"][row] = np.asarray([other])
    committed = int(broken.rows.ints["committed"][row])
    step = handmade.find(broken, phase="DRAFT", step=1, rid="r0", committed=committed)
    broken.rows.ints["input_id"][step] = other
    witness = heard(CHAIN, broken)
    verdict, divergences = judged(CHAIN, broken, witness)
    assert verdict.outcome is Outcome.FAIL
    assert any(found.signature.startswith("TOKEN:chain:DRAFT") for found in divergences)
    reference = reference_trace(witness)
    there = handmade.find(reference, phase="DRAFT", step=1, rid="r0", committed=committed)
    assert reference.rows.ints["hidden_out"][there] == -1
    assert not len(reference.rows.lists["chosen_ids"][there])
    known, of = witnessed_in(reference.header).rows["DRAFT"]
    assert known == of - 1


def test_a_missing_witness_is_not_counted_as_equal():
    engine, _ = handmade.build(CHAIN)
    whole, none = heard(CHAIN, engine), heard(CHAIN, engine, leave_out=lambda one: one.max_new_tokens == 2)
    counts = [judged(CHAIN, engine, witness)[0].compared for witness in (whole, none)]
    assert counts[1]["hidden_rows"] < counts[0]["hidden_rows"]
    assert counts[1].get("proposals", 0) < counts[0]["proposals"]
    verdict, divergences = judged(CHAIN, engine, none)
    assert verdict.outcome is Outcome.UNKNOWN
    assert divergences == []
    assert "nothing compared: no DRAFT row has a witness" in verdict.reasons


def test_without_any_answer_there_is_no_verdict():
    engine, _ = handmade.build(CHAIN)
    verdict, divergences = judged(CHAIN, engine, Witness(CHAIN, engine))
    assert verdict.outcome is Outcome.UNKNOWN
    assert divergences == []
    assert {"nothing compared: hidden_rows", "nothing compared: proposals"} <= set(verdict.reasons)


def test_what_needs_no_weights_fails_without_any_answer():
    engine, _ = handmade.build(CHAIN)
    broken = handmade.copy_trace(engine)
    broken.rows.ints["position"][handmade.find(engine, phase="DRAFT", step=1)] += 1
    verdict, _ = judged(CHAIN, broken, Witness(CHAIN, broken))
    assert (verdict.outcome, verdict.root_kinds) == (Outcome.FAIL, ("POSITION",))


def _moved(trace: Trace, phase: Phase, column: str) -> Trace:
    moved = handmade.copy_trace(trace)
    rows = moved.rows.strings["phase"] == phase
    moved.rows.ints[column][rows] += 1
    return moved


@pytest.mark.parametrize("column", ["position", "input_id"])
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.DRAFT])
def test_a_witness_row_of_another_meaning_matches_nothing(phase, column):
    engine, _ = handmade.build(CHAIN)
    witness = heard(CHAIN, engine, change=lambda trace: _moved(trace, phase, column))
    drafted = {meaning.drafted > 0 for meaning in witness.answers if meaning.model == "draft"}
    targets = [meaning for meaning in witness.answers if meaning.model == "target"]
    assert bool(targets) == (phase is not Phase.PREFILL)
    assert drafted == ({False} if phase is Phase.DRAFT else set())
    assert witness.faults
    verdict, divergences = judged(CHAIN, engine, witness)
    assert (verdict.outcome, divergences) == (Outcome.UNKNOWN, [])


def test_a_beam_that_its_scores_do_not_choose_is_found_without_weights():
    deep = handmade.scenario(t=2)
    engine, _ = handmade.build(deep)
    wrong = "TOKEN:chain:DRAFT:reference-input"
    assert wrong not in {found.signature for found in judged(deep, engine, Witness(deep, engine))[1]}
    broken = handmade.copy_trace(engine)
    row = handmade.find(broken, phase="DRAFT", step=1, slot=1)
    share = {"committed": int(broken.rows.ints["committed"][row]), "rid": broken.rows.strings["rid"][row]}
    worse = handmade.find(broken, phase="DRAFT", step=0, slot=1, **share)
    broken.rows.ints["input_id"][row] = int(broken.rows.lists["chosen_ids"][worse][1])
    broken.rows.ints["parent"][row] = 1
    verdict, divergences = judged(deep, broken, Witness(deep, broken))
    assert verdict.outcome is Outcome.FAIL
    assert wrong in {found.signature for found in divergences}


def test_a_text_that_the_target_alone_would_not_have_written_is_found():
    engine, _ = handmade.build(CHAIN)
    (end,) = [one for one in engine.ends if one.rid == "r0"]
    ids = [*end.output_ids]
    witness = heard(CHAIN, engine)
    ids[3] = (ids[3] + 1) % handmade.VOCAB
    other = replace(
        engine, ends=tuple(replace(one, output_ids=tuple(ids)) if one is end else one for one in engine.ends)
    )
    witness.expected = replace(witness.expected, engine=other)
    result = run_check(CHECKS["losslessness"], gather(CHAIN, other, reference_trace(witness)))
    assert [found.hint for found in result.divergences] == ["text-differs"]
    assert not run_check(
        CHECKS["losslessness"], gather(CHAIN, engine, reference_trace(heard(CHAIN, engine)))
    ).divergences


def test_expected_accept_lengths_are_those_of_the_sound_engine():
    engine, _ = handmade.build(CHAIN)
    reference = reference_trace(heard(CHAIN, engine))
    expected = {
        (one.data["rid"], one.data["committed"]): one.data["tokens"] for one in reference.named("expected_accept")
    }
    rows = engine.rows
    accepted = rows.strings["phase"] == Phase.ACCEPT
    observed = {}
    for rid, committed in zip(rows.strings["rid"][accepted], rows.ints["committed"][accepted].tolist(), strict=True):
        observed[rid, committed] = observed.get((rid, committed), 0) + 1
    assert expected
    assert all(observed[share] == tokens for share, tokens in expected.items())


def test_what_has_no_witness_is_refused():
    layered = CHAIN.model_copy(update={"spec": CHAIN.spec.model_copy(update={"algorithm": "MTP"})})
    assert "MTP" in unwitnessed(layered)
    assert "predicts nothing" in unwitnessed(CHAIN, assumed=("F-003",))
    assert unwitnessed(CHAIN, assumed=("F-007",)) == ""
    assert unwitnessed(TREE) == ""


def test_texts_are_the_same_however_they_are_reached():
    texts = Texts()
    whole = texts.along((5, 6, 7))
    assert texts.after(texts.along((5, 6))[-1], 7) == whole[-1]
    assert texts.along((6, 7))[-1] != whole[-1]
    assert texts.tokens(whole[-1]) == (5, 6, 7)
    assert texts.without(whole[-1], 2) == whole[1]
    assert Meaning("draft", whole[2], 1) != Meaning("draft", whole[2])


def test_the_best_paths_grow_and_ties_are_the_engine_s():
    growth = Growth(Texts(), text=0, t=2, dtype="float32")
    growth.begin((1, 2), (0.6, 0.3))
    expected, fed = growth.feed((1, 2), (-1, -1))
    assert [one.token for one in expected] == [1, 2] == [one.token for one in fed]
    growth.propose(fed, ((3, 4), (5, 6)), {0: (0.5, 0.1), 1: (0.9, 0.05)})  # 0.30, 0.06, 0.27, 0.015
    expected, fed = growth.feed((3, 4), (0, 0))
    assert [(one.token, one.parent) for one in expected] == [(3, 0), (5, 1)]
    assert [one.token for one in fed] == [3, 4]
    tied = Growth(Texts(), text=0, t=2, dtype="float32")
    tied.begin((1, 2), (0.4, 0.4))
    assert [one.token for one in tied.feed((2, 1), (-1, -1))[0]] == [2, 1]


@pytest.fixture
def witnessed_run(tmp_path):
    """A stored run of one scenario that a witness judged."""
    engine, _ = handmade.build(CHAIN)
    engine = replace(engine, header={**engine.header, "release": "0.5.23", "revert": None})
    reference = reference_trace(heard(CHAIN, engine))
    verdict, divergences = judge(CHAIN, engine, reference)
    facts = {"release": "0.5.23", "device": "cpu", "revert": None, "reference": "witness"}
    writer = RunWriter.create(tmp_path / "runs", manifest={"engine": facts})
    writer.save_scenario(CHAIN, engine=engine, reference=reference, verdict=verdict, divergences=divergences)
    writer.finish(verdict)
    writer.close()
    return writer.folder


def test_a_run_that_a_witness_judged_is_judged_again_by_its_stored_rows(witnessed_run, tmp_path):
    report = tmp_path / "again.json"
    done = call("recheck", witnessed_run, "--json", report, code=0)
    assert "judged by witness" in done.output
    assert "agrees with its witness" in done.output
    document = json.loads(report.read_text())
    assert document["providers"] == {"target": "witness", "draft": "witness"}
    early = [one for one in document["reasons"] if one.startswith("not compared: DRAFT_PREFILL")]
    assert len(early) == 1
    assert 0 < document["witness"]["without"] < document["witness"]["rows"]


def test_a_witness_cannot_be_computed_anew_without_an_engine(witnessed_run):
    done = call("recheck", witnessed_run, "--fresh-reference", code=2)
    assert "judged by the witness" in done.output
    assert "--reference witness" in done.output
    (stored,) = witnessed_run.glob("*/reference.json")
    stored.unlink()  # then the run itself still says so
    assert "judged by the witness" in call("recheck", witnessed_run, "--fresh-reference").output


def test_the_first_provider_that_knows_a_pair_is_asked(monkeypatch):
    def unknown(_pair, **_options):
        raise NoProviderError(asked="auto", why="hidden_act is 'relu2'")

    said = []
    assert judges.provider("auto", None, [CHAIN], say=said.append) == "auto"
    assert judges.provider("witness", None, [CHAIN], say=said.append) == "witness"
    monkeypatch.setattr(judges, "load_now", unknown)
    assert judges.provider("auto", object(), [CHAIN], say=said.append) == "witness"
    (line,) = said
    assert "witness judges it" in line
    assert "hidden_act is 'relu2'" in line
    for asked in ("paper", "transformers"):
        with pytest.raises(UsageError, match="relu2"):
            judges.provider(asked, object(), [CHAIN], say=said.append)
    layered = CHAIN.model_copy(update={"spec": CHAIN.spec.model_copy(update={"algorithm": "MTP"})})
    with pytest.raises(UsageError, match="relu2"):
        judges.provider("auto", object(), [layered], say=said.append)
    with pytest.raises(UsageError, match=r"scenario 'handmade': spec\.algorithm is MTP"):
        judges.provider("witness", None, [layered], say=said.append)


@pytest.mark.parametrize("folder", sorted(GPU.iterdir()), ids=lambda folder: folder.name)
def test_what_needs_no_weights_is_what_the_papers_say(folder):
    """Real traces in half precision, with and without defects: both references expect the same rows and inputs."""
    case = read_case(folder, reference=True)
    reference = reference_trace(Witness(case.scenario, case.engine))
    rows = [
        {
            side.rows.key(row): [int(side.rows.ints[name][row]) for name in ("input_id", "position", "parent", "round")]
            for row in range(len(side.rows))
        }
        for side in (reference, case.reference)
    ]
    assert rows[0] == rows[1]
    verdict, divergences = judge(case.scenario, case.engine, reference)
    _, by_paper = judge(case.scenario, case.engine, case.reference)
    weightless = {found.signature for found in by_paper if found.check in ("positions", "inputs", "walk", "rounds")}
    assert {found.signature for found in divergences} == weightless
    assert verdict.outcome is (Outcome.FAIL if weightless else Outcome.UNKNOWN)
