"""Recurrent states: what the probe says of them, what the check finds in that, and which points it proves."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cases.meta import handmade
from cases.meta.batches import decode, end, prefill, record, trace
from harness.both_sides.projections import OF_A_HEAD, OF_A_ROW, weights
from harness.checks.coverage import compared_enough
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.trace import RECURRENT, RECURRENT_ROWS, Event
from harness.coverage import POINTS, Where, names
from harness.engine_side.probes.pool_probe import recurrent_of

GIVEN = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5)
#: Of each request: the states behind 1 to 12 tokens, then that of 9 tokens and a refused one.
LENGTH, REFUSED = 12, 9
STATES = {part: np.random.default_rng(7).normal(size=(26, width)) for part, width in (("state", 6), ("conv", 8))}


def reference():
    data = [
        {"rid": f"r{i}", "attempt": 0, "first": 13 * i, "length": LENGTH, "refused": {str(REFUSED): 13 * i + LENGTH}}
        for i in range(2)
    ]
    events = tuple(Event(name=RECURRENT_ROWS, scheduler_step=0, data=one) for one in data)
    tensors = {f"{RECURRENT}.{part}": found.astype(np.float32) for part, found in STATES.items()}
    return replace(trace(), side="reference", events=events, tensors=tensors)


def told(round_, committed, *, rid="r0", phase="VERIFY", row=None, **parts):
    """What the probe says; row: of STATES, the one that is right unless said."""
    row = committed - 1 + 13 * (rid == "r1") if row is None else row
    data = {"round": round_, "rids": [rid], "attempts": [0], "committed": [committed], "phase": phase}
    data |= {part: [parts.get(part, found[row].tolist())] for part, found in STATES.items()}
    return Event(name=RECURRENT, scheduler_step=round_, data=data)


def judged(event):
    made = trace(decode(3, (event.data["rids"][0], event.data["committed"][0], 1)), events=(event,))
    return run_check(CHECKS[RECURRENT], gather(GIVEN, made, reference()))


@pytest.mark.parametrize(
    ("facts", "hint"),
    [
        ({}, None),
        ({"rid": "r1"}, None),
        ({"row": REFUSED - 2}, "token-late"),
        ({"row": REFUSED - 4}, "token-late"),
        ({"row": REFUSED}, "token-early"),
        ({"row": LENGTH}, "refused-kept"),
        ({"row": 17}, "neighbours-state"),
        ({"state": [0.0] * 6, "conv": [0.0] * 8}, "state-zeros"),
        ({"state": STATES["state"][4].tolist()}, "token-late"),
        ({"conv": STATES["conv"][4].tolist()}, "token-late"),
        ({"conv": [None] * 8}, "conv-off"),
        ({"state": [1.0] * 6}, "state-off"),
        ({"state": [1.0] * 5}, "state-off"),
        ({"conv": (STATES["conv"][REFUSED - 1] * 1.01).tolist()}, "conv-off"),
    ],
)
def test_a_state_of_another_text_is_named_by_the_text(facts, hint):
    result = judged(told(3, REFUSED, **facts))
    assert [(one.kind, one.hint, one.key.committed) for one in result.divergences] == (
        [] if hint is None else [("STATE", hint, REFUSED)]
    )
    assert result.compared == {"recurrent_states": 2}


def test_where_nothing_was_read_no_state_is_asked_for_and_none_is_guessed():
    assert judged(told(3, 0, row=5)).compared == {}
    beyond = judged(told(3, LENGTH + 1, row=5))
    assert (beyond.divergences, beyond.compared) == ([], {})
    assert "not judged" in beyond.notes[0]


def test_the_probe_sums_what_lies_in_each_requests_slot():
    states, rows = torch.randn(2, 5, 3, 4, 6), torch.randn(2, 5, 7, 3)  # two layers, five slots
    rows[0, 3, 0, 0] = float("inf")
    pool = SimpleNamespace(mamba_cache=SimpleNamespace(temporal=states, conv=[rows]))
    requests = SimpleNamespace(mamba_pool=pool, get_mamba_indices=lambda pools: pools + 1)
    batch = SimpleNamespace(
        seq_lens=torch.tensor([6, 3]), extend_prefix_lens=torch.tensor([5, 0]), req_pool_indices=torch.tensor([2, 0])
    )
    found = recurrent_of(SimpleNamespace(req_to_token_pool=requests), batch, 2, prompt=False)
    assert (found["committed"], recurrent_of(SimpleNamespace(req_to_token_pool=object()), batch, 2, prompt=True)) == (
        [6, 3],
        None,
    )
    heads, taps = weights(OF_A_HEAD, 24).reshape(-1, 4, 6), weights(OF_A_ROW, 7)
    assert found["state"][1][5] == pytest.approx(float((states[0, 1, 2].numpy() * heads[1]).sum()), abs=1e-4)
    assert found["conv"][1][OF_A_ROW * 4 + 6] == pytest.approx(float(taps[6] @ rows[1, 1, :, 1].numpy()), abs=1e-4)
    assert found["conv"][0][0] is None
    prompt = recurrent_of(SimpleNamespace(req_to_token_pool=requests), batch, 2, prompt=True)
    assert prompt["committed"] == [5, 0]


#: The second request was taken back once; the first was aborted after its verify.
AGAIN = (record(1, "DECODE", [("r0", 0, 5, 1, False), ("r1", 1, 6, 2, False)]),)
ABORTED = (decode(1, ("r0", 4, 2), ("r1", 6, 1)), decode(2, ("r1", 7, 1)))
CHUNKS = (prefill(0, ("r1", 0, 4, False)), prefill(1, ("r1", 4, 2, True)))


#: (point, the rounds of a trace, an event with which they show it, and the nearest with which they do not).
SHOWN = [
    ("state_behind_refused", (decode(1, ("r0", 4, 2)), decode(2, ("r0", 6, 1))), told(2, 6), told(1, 4)),
    ("state_behind_chunk", CHUNKS, told(1, 4, rid="r1"), told(0, 1, rid="r1")),
    ("state_from_cache", (prefill(0, ("r1", 4, 2, True)),), told(0, 4, rid="r1"), told(0, 4)),
    ("state_after_retraction", AGAIN, told(1, 6, rid="r1"), told(1, 5)),
    ("state_behind_abort", ABORTED, told(2, 7, rid="r1"), told(1, 6, rid="r1")),
]


@pytest.mark.parametrize(("name", "rounds", "shows", "lacks"), SHOWN)
def test_points_of_recurrent_states_are_counted_where_they_happen(name, rounds, shows, lacks):
    ends = (end("r0", 2, 2, reason="abort"), end("r1", 3, 4))
    counts = [POINTS[name].count(GIVEN, trace(*rounds, ends=ends, events=(event,))) for event in (shows, lacks)]
    assert counts == [1, 0]
    assert name in names(Where.RECURRENT)


def test_every_point_of_recurrent_states_is_shown_here():
    assert {name for name, *_ in SHOWN} == set(names(Where.RECURRENT))


@pytest.mark.parametrize(("counted", "due"), [(0, True), (4, False)])
def test_a_target_whose_states_were_not_seen_is_no_pass(counted, due):
    evidence = gather(GIVEN, trace(decode(3, ("r0", 5, 1))), reference())
    reasons = compared_enough(evidence, {"recurrent_states": counted}, frozenset())
    assert ("nothing compared: recurrent_states" in reasons) is due


def test_states_are_due_only_where_the_reference_has_some():
    plain = gather(GIVEN, trace(decode(3, ("r0", 5, 1))), replace(reference(), events=()))
    assert "nothing compared: recurrent_states" not in compared_enough(plain, {}, frozenset())
