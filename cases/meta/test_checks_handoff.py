"""What the checks say of a hand-over: nothing of a sound one, and a name for each thing that goes wrong on the way."""

from dataclasses import replace

import numpy as np
import pytest

from cases.fixed import DRAIN, request, submit
from cases.meta.batches import end, event, record, trace
from harness.checks import reference_rows
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.rows import RowBuilder
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.types import Divergence, Key, Kind

GIVEN = Scenario(
    name="handed",
    engine=EngineConfig(disaggregation=True, radix_cache=False),
    requests=(request("a", 3, seed=1, new=4),),
    script=(submit("a"), DRAIN),
)
PROMPT = GIVEN.requests[0].input_ids
BONUS, PROPOSAL = 77, 88
STATE = np.asarray([[1.0, 2.0]], dtype=np.float32)


def batch(index, mode, side, *, start, length, rids=("a",)):
    return record(index, mode, [(rid, 0, start, length, True) for rid in rids], side=side)


SENT = {"rid": "a", "phase": "DRAFT_PREFILL", "committed": 0, "round": 0}
ARRIVED = {"rid": "a", "phase": "PREBUILT", "committed": 3, "round": 1}


def chosen(token, *, when):
    return {"chosen_ids": (token,), "chosen_probs": (1.0,)} if when else {}


def handover(*, bonus=BONUS, proposal=PROPOSAL, state=STATE, rids=("a",), widths=None, events=()):
    """A prompt of three tokens read on one side and handed to the other."""
    rows = RowBuilder()
    for slot in range(3):
        last = slot == 2
        hidden = {"slot": slot, "hidden_out": 0 if last else -1}
        token = BONUS if last else PROMPT[slot + 1]
        rows.add(**SENT, **hidden, input_id=token, **chosen(PROPOSAL, when=last))
        token = bonus if last else token
        rows.add(**ARRIVED, **hidden, input_id=token, cache_slot=5 + slot, **chosen(proposal, when=last))
    records = (
        batch(0, "PREFILL", "prefill", start=0, length=3),
        batch(1, "PREBUILT", "decode", start=3, length=0, rids=rids),
    )
    header = {"metadata_widths": widths or {"prefill": 2, "decode": 2}}
    tensors = {"hidden_out.DRAFT_PREFILL": STATE, "hidden_out.PREBUILT": state}
    made = {"scenario_id": GIVEN.id, "header": header, "rows": rows.build(), "tensors": tensors}
    return trace(*records, events=events, **made)


def hints(engine, check="handover"):
    result = run_check(CHECKS[check], gather(GIVEN, engine, None))
    assert result.unknown == []
    return [found.hint for found in result.divergences]


@pytest.mark.parametrize("check", ["handover", "slots"])
def test_nothing_is_said_of_what_arrives_as_it_was_sent(check):
    """One slot on both sides is two slots."""
    assert hints(handover(), check=check) == []


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"bonus": BONUS + 1}, "other-token-arrived"),
        ({"proposal": PROPOSAL + 1}, "other-proposals-arrived"),
        ({"state": STATE + np.float32(1e-6)}, "other-state-arrived"),
        ({"widths": {"prefill": 2, "decode": 4}}, "metadata-width-decode"),
        ({"widths": {"prefill": 6, "decode": 2}}, "metadata-width-prefill"),
    ],
)
def test_what_changes_on_the_way_is_named(changes, hint):
    assert hints(handover(**changes)) == [hint]


@pytest.mark.parametrize(("resumed_with", "same"), [(0, True), (1, False)], ids=["what it came with", "another"])
def test_a_state_that_a_retraction_did_not_renew_is_told_from_another_wrong_one(resumed_with, same):
    rows, states = RowBuilder(), np.asarray([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]], dtype=np.float32)
    for attempt, committed, state in ((0, 3, 0), (1, 4, 1), (2, 5, 2 - resumed_with)):
        where = {"rid": "a", "phase": "PREBUILT", "round": attempt, "attempt": attempt, "committed": committed}
        for slot in range(committed):
            rows.add(**where, slot=slot, hidden_out=state if slot == committed - 1 else -1)
    engine = replace(handover(), rows=rows.build(), tensors={"hidden_out.PREBUILT": states})
    key = Key(dp_rank=0, rid="a", attempt=2, committed=5, phase="PREBUILT", step=0, slot=4)
    found = Divergence(kind=Kind.NUMERIC, key=key, round=2, expected=0, observed=1, hint="hidden_out-off")
    assert reference_rows._is_as_handed_over(gather(GIVEN, engine, None), found) is same
    assert not reference_rows._is_as_handed_over(gather(GIVEN, engine, None), replace(found, hint="hidden_out-zeros"))


def test_a_batch_of_no_requests_that_reaches_the_builder_is_named():
    sound = handover()
    empty = batch(2, "PREBUILT", "decode", start=0, length=0, rids=())
    assert hints(replace(sound, rounds=(*sound.rounds, empty))) == ["empty-batch-at-builder"]


def pool(when, side, *, free, metadata):
    return event("pool", when=when, side=side, free=free, evictable=0, total=9, metadata=metadata)


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        ({"free": 9, "metadata": 4}, None),
        ({"free": 8, "metadata": 4}, "decode-lost"),
        ({"free": 9, "metadata": 3}, "decode-metadata-lost"),
        ({"free": 9, "metadata": 5}, "decode-metadata-freed-twice"),
    ],
)
def test_each_side_must_get_back_its_slots_and_its_metadata_rows(last, hint):
    start = [pool("start", side, free=9, metadata=4) for side in ("prefill", "decode")]
    ends = [pool("end", "prefill", free=9, metadata=4), pool("end", "decode", **last)]
    found = hints(handover(events=(*start, *ends)), check="ledger")
    assert found == ([] if hint is None else [hint])


LAYERED = GIVEN.model_copy(
    update={"spec": SpecConfig(algorithm="MTP", num_steps=2, num_draft_tokens=3), "checkpoint": "mtp-tiny"}
)


def layered(*, arrived=(PROPOSAL, PROPOSAL + 1), layers=2):
    """As `handover`, of two layers: each has rows of its own, and the second reads what the first proposed."""
    rows = RowBuilder()
    for layer in range(2):
        for slot in range(3):
            token = [PROMPT[1], PROMPT[2], BONUS, PROPOSAL][slot + layer]
            rows.add(**SENT, step=layer, slot=slot, input_id=token, **chosen(PROPOSAL + layer, when=slot == 2))
    for layer in range(layers):
        for slot, token in enumerate((PROMPT[1], PROMPT[2], BONUS)):
            place = {"step": layer, "slot": slot, "cache_slot": 5 + slot}
            rows.add(**ARRIVED, **place, input_id=token, **chosen(arrived[layer], when=slot == 2))
    return replace(handover(), rows=rows.build(), tensors={})


def of_layers(check, engine):
    found = run_check(CHECKS[check], gather(LAYERED, engine, None)).divergences
    return [(str(one.kind), one.key.step, one.hint) for one in found if one.key.phase == "PREBUILT"]


@pytest.mark.parametrize("check", ["handover", "rounds", "slots"])
def test_a_draft_in_layers_is_handed_over_layer_by_layer(check):
    assert of_layers(check, layered()) == []


def test_what_a_layer_proposed_must_arrive_as_its_own():
    swapped = layered(arrived=(PROPOSAL, PROPOSAL))
    assert of_layers("handover", swapped) == [("TOKEN", 1, "other-proposals-arrived")]


def test_a_layer_of_which_nothing_arrived_is_missed():
    assert of_layers("rounds", layered(layers=1)) == [("MISSING_ROW", 1, "")] * 3


@pytest.mark.parametrize(
    ("ran", "op", "said", "hints"),
    [
        (True, None, "Decode transfer failed for request a", ["given-up"]),
        (True, Op(kind="transfer", name="fail", rids=("a",)), "Decode transfer failed for request a", []),
        (True, Op(kind="abort", rids=("a",)), "Decode transfer failed for request a", []),
        (True, None, "Decode handshake failed for request a", []),
        (False, None, "Decode transfer failed for request a", []),
    ],
    ids=["by itself", "as the scenario has it", "aborted", "never met", "never read"],
)
def test_a_request_that_is_lost_between_the_sides_by_itself_was_given_up(ran, op, said, hints):
    given = GIVEN.model_copy(update={"script": (submit("a"), *([op] if op else []), DRAIN)})
    made = handover(events=(event("request_error", 1, rid="a", error=said),))
    made = replace(
        made, ends=(end("a", 1, 0, "error"),), **({} if ran else {"rounds": (), "rows": RowBuilder().build()})
    )
    result = run_check(CHECKS["admission"], gather(given, made, None))
    assert [found.hint for found in result.divergences] == hints
