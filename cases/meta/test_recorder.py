"""A round's bytes: sent once they have arrived, in order, and not waited for while only a few are underway."""

import json
import marshal
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.both_sides.wire import named, read
from harness.driving.assemble import Assembler
from harness.driving.rounds import Unpacker
from harness.engine_side import probes
from harness.engine_side.host.gate import _together
from harness.engine_side.probes import recorder as recorder_module
from harness.engine_side.probes.recorder import MOST_UNDERWAY, Recorder
from harness.engine_side.probes.snapshot import copied

RECORDED = Path(__file__).resolve().parents[1] / "recorded"


class Slow:
    """Rounds on their way off a device: the first `arrived` of them are there, the others whoever asks waits for."""

    def __init__(self, monkeypatch):
        self.arrived = self.waits = self.sent = 0
        monkeypatch.setattr(recorder_module, "HostRound", self)

    def __call__(self, parts):
        number, self.sent = self.sent, self.sent + 1

        def bytes_there():
            self.waits += number >= self.arrived
            return torch.cat(parts).numpy()

        return SimpleNamespace(ready=lambda: number < self.arrived, bytes=bytes_there)


@pytest.fixture
def slow(monkeypatch):
    return Slow(monkeypatch)


def decode(recorder, *, start, scheduler_step):
    """One decode round of one request, committed length on the device."""
    recorder.scheduler_step = scheduler_step
    recorder.open_round(mode="DECODE", rids=["a"], starts=copied({"starts": torch.tensor([start])}))
    recorder.close_round()


def starts_in(taken):
    unpacker = Unpacker()
    return [message["starts"] for packed, held in taken for message, _ in unpacker.unpack(named(packed), held)]


def test_a_round_is_reported_when_it_has_arrived_and_names_its_step(slow):
    recorder = Recorder()
    decode(recorder, start=7, scheduler_step=3)
    assert recorder.take() == []
    slow.arrived = 1
    taken = recorder.take()
    assert [named(message)["scheduler_step"] for message, _ in taken] == [3]
    assert starts_in(taken) == [[7]]
    assert slow.waits == 0


def test_only_when_too_many_are_underway_the_oldest_is_waited_for(slow):
    recorder = Recorder()
    for scheduler_step in range(MOST_UNDERWAY):
        decode(recorder, start=scheduler_step, scheduler_step=scheduler_step)
    assert recorder.take() == []
    decode(recorder, start=MOST_UNDERWAY, scheduler_step=MOST_UNDERWAY)
    assert starts_in(recorder.take()) == [[0]]
    assert slow.waits == 1


def test_the_end_of_a_scenario_waits_for_all_of_them_in_order_and_a_crash_tells_only_turns_before_its_own(slow):
    recorder = Recorder()
    for before, turns in ((None, [1, 2]), (2, [1])):
        recorder.begin()
        decode(recorder, start=1, scheduler_step=1)
        decode(recorder, start=2, scheduler_step=2)
        taken = recorder.take(all_of_them=True, **({"before": before} if before else {}))
        assert [named(message)["scheduler_step"] for message, _ in taken] == turns
        assert starts_in(taken) == [[turn] for turn in turns]
        layouts = [len(named(message)["layouts"]) for message, _ in taken]
        assert layouts == [1, 0][: len(turns)], "an arrangement of fields travels once a scenario"


def test_a_mutant_that_asks_gets_numbers_from_the_device():
    recorder = Recorder()
    current = recorder.open_round(mode="DECODE", rids=["a"], starts=copied({"starts": torch.tensor([9])}))
    current.accepted = copied({"lens": torch.tensor([3], dtype=torch.int32)})
    assert (current.starts, current.accept_lens) == ([9], [3])


def test_a_frame_holds_messages_beside_the_bytes_they_speak_of(slow):
    recorder = Recorder()
    decode(recorder, start=5, scheduler_step=1)
    arrays = _together(recorder.take(all_of_them=True))
    (message,) = map(named, marshal.loads(arrays["messages"]))
    found = read(arrays["0.bytes"], [(base, message["layouts"][number]) for base, number in message["pieces"]])
    assert found["starts"].tolist() == [5]
    assert _together([]) == {}


@pytest.mark.parametrize(
    ("dtype", "back"),
    [
        (torch.float16, np.float32),
        (torch.bfloat16, np.float32),
        (torch.float32, np.float32),
        (torch.int32, np.int64),
        (torch.bool, np.int64),
    ],
)
def test_every_dtype_comes_back_with_its_values(dtype, back):
    tensor = torch.tensor([[0, 1], [3, 2]]).to(dtype)
    (found,) = copied({"x": tensor}).read().values()
    assert found.dtype == back
    assert found.tolist() == tensor.to(torch.float32).tolist()


def test_what_a_failed_round_said_without_tensors_is_kept_until_the_next_scenario():
    recorder = Recorder()
    recorder.scheduler_step = 3
    recorder.open_round(mode="DECODE", rids=["a"], starts=[4])
    recorder.put({"ev": "state", "round": 0, "width": 64})
    recorder.note("tree", copied({"next": torch.tensor([1])}), width=1)
    recorder.drop_round()
    recorder.close_round()
    assert recorder.last_said == [{"ev": "state", "round": 0, "width": 64, "scheduler_step": 3}]
    assert recorder.take(all_of_them=True) == []
    recorder.begin()
    assert recorder.last_said == []


@pytest.mark.parametrize("again", [0, 1, 2])
def test_rows_that_an_extend_runs_once_more_are_distinguished_from_those_of_the_round(slow, again):
    """Two requests in blocks of n + again rows; one row a request, such as a pruned logit, stays as it is."""
    recorder, n = Recorder(), 3
    starts = copied({"starts": torch.tensor([7, 9])})
    recorder.open_round(mode="DECODE", rids=["a", "b"], starts=starts)
    index = torch.tensor([[0, 1, -1], [3, -1, -1]])
    walk = copied({"predict": torch.arange(6), "lens": torch.tensor([2, 1]), "index": index})
    recorder.note("sampled", walk, width=n)
    own = [row for start in (7, 9) for row in range(start - again, start + n)]
    given = {"positions": torch.tensor(own), "input_ids": torch.tensor(own) + 100, "cache_slots": torch.tensor(own)}
    said = {"top_ids": torch.tensor([[5], [6]]), "best": torch.tensor([5, 6]), "top_logits": torch.ones(2, 1)}
    recorder.note("forward", copied(given), copied(said | {"lse": torch.ones(2)}), phase="EXTEND", step=2, mapped=False)
    recorder.close_round()
    slow.arrived = 1
    ((packed, held),) = recorder.take()
    reported = list(Unpacker().unpack(named(packed), held))
    ((forward, arrays),) = [(message, own) for message, own in reported if message["ev"] == "forward"]
    assert arrays["positions"].tolist() == [7, 8, 9]
    assert arrays["input_ids"].tolist() == [107, 108, 109]
    assert arrays["top_ids"].tolist() == [[5], [6]]
    assert (forward["lens"], arrays["logit_rows"].tolist()) == ([2, 1], [1, 2])
    ran_again = [message for message, _ in reported if message["ev"] == "again"]
    assert ran_again == ([{"ev": "again", "round": 0, "step": 2, "rows": again}] if again else [])


def prebuilt(note):
    """What the control side makes of one prebuilt batch of one request with three tokens, the last one chosen last."""
    recorder = Recorder()
    recorder.active = True
    recorder.open_round(mode="PREBUILT", rids=["a"], starts=[2])
    note(recorder)
    recorder.close_round()
    assembler, unpacker = Assembler(), Unpacker()
    for packed, arrays in recorder.take(all_of_them=True):
        for message, held in unpacker.unpack(named(packed), arrays):
            assembler.feed(message, held, scheduler_step=0, dp_rank=0, side="decode")
    return assembler.build(scenario_id="x", header={})


def test_a_batch_that_nobody_made_a_draft_input_of_is_reported():
    trace = prebuilt(lambda recorder: recorder.note("unbuilt"))
    assert [(event.name, event.data) for event in trace.events] == [("unbuilt", {"round": 0, "rids": ["a"]})]
    assert [record.rids for record in trace.rounds] == [("a",)]


def test_of_a_draft_in_layers_each_layers_proposal_comes_with_rows_of_its_own():
    tensors = {
        "bonus": torch.tensor([9]),
        "slots": torch.tensor([4, 5]),
        "ids": torch.tensor([[11, 12, 13]]),
        "probs": torch.tensor([[0.5, 0.25, 0.125]]),
    }
    facts = {"texts": [[8]], "prefixes": [0], "mapped": False, "layered": True}
    rows = prebuilt(lambda recorder: recorder.note("handed", copied(tensors), **facts)).rows
    columns = zip(*(rows.ints[name].tolist() for name in ("step", "slot", "input_id", "cache_slot")), strict=True)
    assert list(columns) == [(step, slot, 8 + slot, 4 + slot) for step in range(3) for slot in range(2)]
    assert [ids.tolist() for ids in rows.lists["chosen_ids"]] == [[], [11], [], [12], [], [13]]
    assert [probs.tolist() for probs in rows.lists["chosen_probs"]][1::2] == [[0.5], [0.25], [0.125]]


def test_the_table_of_wrapped_calls_names_every_call_that_a_recorded_run_wrapped():
    calls = set(re.findall(r"[\w.]+", " ".join(re.findall(r"^\| (`.*?) \|", probes.__doc__, flags=re.MULTILINE))))
    headers = [json.loads(path.read_text()) for path in RECORDED.glob("*/*/engine.json")]
    found = {name.partition(":")[2] for header in headers for name in header.get("header", header)["hooks_found"]}
    of_the_gate = re.compile(r"Scheduler\.event_loop_|.*\.recv_requests$")
    assert {name for name in found if not of_the_gate.match(name) and not {name, name.split(".")[-1]} & calls} == set()
    assert len(found) > 10


def attempts_of(*rounds):
    recorder, found = Recorder(), []
    for mode, start, length in rounds:
        final = [start + length != 4]  # a chunk of the prompt ends there
        found += recorder.open_round(mode=mode, rids=["a"], starts=[start], lens=[length], final=final).attempts
        recorder.close_round()
    return found


def test_a_request_begins_anew_where_it_is_read_or_handed_over_once_more():
    assert attempts_of(("PREFILL", 0, 4), ("PREFILL", 4, 3), ("DECODE", 7, 0), ("PREFILL", 0, 8)) == [0, 0, 0, 1]
    # taken back before it decoded, with all of its prompt in the prefix cache
    assert attempts_of(("PREFILL", 0, 4), ("PREFILL", 4, 3), ("PREFILL", 7, 1), ("DECODE", 8, 0)) == [0, 0, 1, 1]
    # taken back in the scheduler step in which it arrived: no decode lies between
    assert attempts_of(("PREBUILT", 4, 0), ("PREBUILT", 4, 0), ("DECODE", 4, 0)) == [0, 1, 1]
