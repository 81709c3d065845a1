"""Known bugs, release by release: each is found exactly where it lives, at its own place, under an unchanged text.

What is expected comes from the release windows of the corpus and from the committed length, never from our output.
"""

import numpy as np
import pytest

from cases import catalogue
from harness.contract.types import Kind, Outcome, Phase

CASES = {name: catalogue.load(name) for name in ("pr25015", "pr26329")}
POSITION_CASE, CHUNK_CASE = CASES["pr25015"], CASES["pr26329"]
#: Found by generation: what the user gets ends in the wrong place, whatever was drafted.
TEXT_CASES = tuple(catalogue.load(name) for name in ("stop-past-length", "abort-past-length"))

COLUMNS = [
    *((release, None) for release in ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.23")),
    *((release, revert) for release in ("0.5.13", "0.5.23") for revert in (25015, 26329)),
]


def _cells(expected, *cases):
    return [
        pytest.param(release, revert, case, id=f"{release}-{revert or 'as-released'}-{case.id}")
        for case in cases
        for release, revert in COLUMNS
        if case.expected(release=release, revert=revert) == expected
    ]


def _affected(*cases):
    return pytest.mark.parametrize(("release", "revert", "case"), _cells("FAIL", *cases))


@pytest.mark.engine
@pytest.mark.parametrize(("release", "revert", "case"), _cells("PASS", *CASES.values()))
def test_case_passes_outside_its_window(drive_scenario, release, revert, case):
    outcome = drive_scenario(case.scenario, engine=release, revert=revert)
    assert outcome.verdict.outcome is Outcome.PASS, outcome.verdict.reasons
    assert outcome.divergences == ()
    assert outcome.text_identical is True


@pytest.mark.engine
@_affected(*CASES.values())
def test_case_fails_inside_its_window_though_the_text_is_identical(drive_scenario, release, revert, case):
    outcome = drive_scenario(case.scenario, engine=release, revert=revert)
    assert outcome.verdict.outcome is Outcome.FAIL
    assert outcome.verdict.root_kinds == case.kinds
    assert outcome.text_identical is True


@pytest.mark.engine
@_affected(POSITION_CASE)
def test_draft_position_is_reported_at_the_first_draft_forward(drive_scenario, release, revert, case):
    outcome = drive_scenario(case.scenario, engine=release, revert=revert)
    (request,) = case.scenario.requests
    committed = len(request.input_ids)  # 7: nothing but the prompt is in the cache when the first round drafts
    first = outcome.first
    assert (first.kind, first.key.phase) == (Kind.POSITION, Phase.DRAFT)
    assert (first.key.rid, first.key.committed, first.key.step) == (request.rid, committed, 0)
    assert (first.expected, first.observed) == (committed, committed + 1) == (7, 8)
    assert first.round == next(record.index for record in outcome.trace.rounds if record.mode == "DECODE")


@pytest.mark.engine
@_affected(POSITION_CASE)
def test_every_draft_forward_is_one_ahead_and_no_other_row_is(drive_scenario, release, revert, case):
    outcome = drive_scenario(case.scenario, engine=release, revert=revert)
    wrong = [found for found in outcome.divergences if found.kind is Kind.POSITION]
    rows = outcome.trace.rows
    drafts = np.flatnonzero(rows.strings["phase"] == Phase.DRAFT)
    assert {found.key for found in wrong} == {rows.key(at) for at in drafts}
    for found in wrong:
        assert found.expected == found.key.committed + found.key.step
        assert found.observed == found.expected + 1


@pytest.mark.engine
@_affected(CHUNK_CASE)
def test_chunk_tail_is_reported_at_the_last_row_of_the_non_final_chunk(drive_scenario, release, revert, case):
    outcome = drive_scenario(case.scenario, engine=release, revert=revert)
    (request,) = case.scenario.requests
    chunk = case.scenario.engine.chunked_prefill_size
    first = outcome.first
    assert (first.kind, first.key.phase) == (Kind.EXTEND_INPUT, Phase.DRAFT_PREFILL)
    assert (first.key.rid, first.key.committed, first.key.slot) == (request.rid, 0, chunk - 1)
    assert first.expected == request.input_ids[chunk]
    assert first.observed != first.expected


@pytest.mark.engine
@_affected(CHUNK_CASE)
def test_chunk_tail_fed_is_the_targets_own_guess(drive_scenario, release, revert, case):
    outcome = drive_scenario(case.scenario, engine=release, revert=revert)
    rows = outcome.reference.rows
    tail = (
        (rows.strings["phase"] == Phase.PREFILL) & (rows.ints["committed"] == 0)
        & (rows.ints["slot"] == case.scenario.engine.chunked_prefill_size - 1)
    )  # fmt: skip
    (at,) = np.flatnonzero(tail)
    assert outcome.first.observed == rows.lists["top_ids"][at][0]
    wrong = [found for found in outcome.divergences if found.kind is Kind.EXTEND_INPUT]
    assert len(wrong) == 1, "only the non-final chunk has a tail whose next token is known"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("release", "case"),
    [
        pytest.param(release, case, id=f"{release}-{case.id}")
        for case in TEXT_CASES
        for release in ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.23")
        if case.expected(release=release, revert=None) != "unknown"
    ],
)
def test_output_that_ends_in_the_wrong_place_is_found_where_it_lives(drive_scenario, release, case):
    if drive_scenario.device not in case.devices:
        pytest.skip(f"on {drive_scenario.device} this scenario accepts other tokens, and was not seen to fail")
    outcome = drive_scenario(case.scenario, engine=release)
    past = [found for found in outcome.divergences if found.check == "finish"]
    if case.expected(release=release, revert=None) == "PASS":
        assert outcome.verdict.outcome is Outcome.PASS, outcome.verdict.reasons
        return
    (request,) = case.scenario.requests
    (end,) = outcome.trace.ends
    (found,) = past
    assert not found.cause
    if request.stop_token_ids:
        stop = end.output_ids.index(request.stop_token_ids[0])
        assert (found.observed, found.expected) == (len(end.output_ids) - 1 - stop, 0)
        assert found.observed > 0
    else:
        assert (found.observed, found.expected) == (len(end.output_ids), request.max_new_tokens)
        assert found.observed > request.max_new_tokens
