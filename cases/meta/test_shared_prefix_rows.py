"""F-012 taken for granted: whose rows a cache hands out is followed by tokens, and recorded engines agree with that."""

import json
from dataclasses import replace

import pytest

from cases.meta.recorded import MTP, judged_anew
from cases.meta.speculating import answered
from harness.archive.store import read_case
from harness.checks.judge import judge
from harness.contract.known_issues import assumed_by
from harness.contract.types import Outcome
from harness.defects.shared_prefix_rows import Owner, Step, held_rows
from reference.windows import Window


@pytest.mark.parametrize("name", ["shared-0.5.23", "shared-guesses-0.5.23"])
def test_a_recorded_engine_is_explained_by_the_rows_that_its_cache_hands_out(mtp_tiny, name):
    """In the second one guesses of a chunk's end (F-010) are among the rows that others are given."""
    verdict, divergences = judged_anew(MTP / name, mtp_tiny, "F-010")
    assert verdict.outcome is Outcome.FAIL
    assert {found.signature for found in divergences if not found.cause} == {
        "NUMERIC:extend:DRAFT_PREFILL:hidden_out-off"
    }
    verdict, divergences = judged_anew(MTP / name, mtp_tiny, "F-010", "F-012")
    assert divergences == []
    assert any(reason.startswith("assumed: F-012, ") for reason in verdict.reasons)


@pytest.mark.parametrize(("release", "told"), [("0.5.23", ["F-010", "F-012"]), ("0.5.13", ["F-010", "F-011", "F-012"])])
def test_a_verdict_names_of_what_was_assumed_only_what_its_release_has(mtp_tiny, release, told):
    case = read_case(MTP / "shared-0.5.23")
    engine = replace(case.engine, header=case.engine.header | {"release": release})
    assumed = ("F-010", "F-011", "F-012")
    reference = answered(mtp_tiny, case.scenario, engine, assumed=assumed)
    verdict, _ = judge(case.scenario, engine, reference)
    assert assumed_by(verdict.reasons) == told


def step(owner, number, start, stop, *, prompt=True, final=True, first=True, last=False):
    """Layers of `owner` read (row, its first token) at each row."""
    read = [(row, owner.text[0] * 100 + owner.text[-1]) for row in range(start, stop)]
    window = Window(start=start, stop=stop, known=stop + 1)
    return Step(owner=owner, round=number, window=window, read=read, prompt=prompt, final=final, first=first, last=last)


def owners(*texts):
    """Requests that begin with all but their last token."""
    return [Owner(text=text, asked=len(text) - 1) for text in texts]


def test_a_prefix_holds_what_its_first_writer_read():
    first, second, third = owners((1, 2, 3, 4, 7), (1, 2, 3, 4, 8), (1, 2, 3, 4, 9))
    held = held_rows([step(first, 0, 0, 4), step(second, 1, 2, 4), step(third, 2, 3, 4)])
    assert held[0] == ()
    assert held[1] == ((0, 107), (1, 107))
    assert held[2] == ((0, 107), (1, 107), (2, 107)), "rows 0 and 1 by way of the second, row 2 from the first itself"


def test_the_last_row_of_a_chunk_is_not_shared_and_the_next_token_is_part_of_the_key():
    first, second = owners((1, 2, 3, 4), (1, 2, 3, 5, 6))
    held = held_rows([step(first, 0, 0, 4), step(second, 1, 2, 4), step(second, 2, 4, 5, prompt=False, first=False)])
    assert held[1] == ((0, 104), (1, 104))
    assert [row for row, _ in held[2]] == [0, 1, 2, 3]
    assert [owner for _, owner in held[2]] == [104, 104, 106, 106], "row 2 of the first has another token behind"


def test_of_two_that_begin_together_the_later_one_takes_over_the_rows_of_the_earlier():
    first, second = owners((1, 2, 3, 7), (1, 2, 3, 8))
    later = step(second, 1, 3, 4, prompt=False, first=False)
    assert held_rows([step(first, 0, 0, 3), step(second, 0, 0, 3), later])[2] == ((0, 107), (1, 107), (2, 108))
    early = step(first, 0, 0, 3, final=False)
    assert held_rows([early, step(second, 0, 0, 3), later])[2] == ((0, 108), (1, 108), (2, 108)), "mid-prompt is last"


def test_what_a_request_did_not_get_is_no_longer_in_the_cache():
    first, second, third = owners((1, 2, 3, 4, 7), (1, 2, 3, 4, 8), (1, 2, 3, 4, 9))
    held = held_rows([step(first, 0, 0, 4), step(second, 1, 0, 4), step(third, 2, 3, 4)])
    assert held[2] == ((0, 108), (1, 108), (2, 108))


def test_a_host_cache_brings_back_what_lay_there_when_it_left_and_others_are_given_that():
    first, second, third, fourth = owners(*((1, 2, 3, 4, 5, more) for more in (7, 8, 9, 10)))
    early = replace(step(third, 3, 4, 5), from_host=(1, 1, 3, 3))
    steps = [step(first, 0, 0, 5), step(second, 2, 0, 5), early, step(fourth, 4, 4, 5)]
    back = ((0, 107), (1, 107), (2, 108), (3, 108))
    assert held_rows(steps)[2:] == [back, back], "two rows left when the first alone had written them"


@pytest.mark.parametrize("stays", [True, False])
def test_output_is_cached_when_a_request_ends_unless_it_was_retracted(stays):
    first = Owner(text=(1, 2, 3, 4, 5, 6), asked=3, stays=stays)
    (second,) = owners((1, 2, 3, 4, 5, 9))
    steps = [step(first, 0, 0, 3), step(first, 1, 3, 5, prompt=False, first=False, last=True), step(second, 2, 3, 5)]
    assert held_rows(steps)[2] == ((0, 106), (1, 106), (2, 106) if stays else ())


def test_recorded_folders_say_which_release_they_are_of():
    told = {one.name: json.loads((one / "engine.json").read_text())["header"]["release"] for one in MTP.iterdir()}
    assert len(told) >= 5
    assert [name for name, release in told.items() if not name.endswith(release)] == []
