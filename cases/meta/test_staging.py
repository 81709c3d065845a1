"""Bytes that land in the host's memory by themselves, on a host alone: where they lie, and blocks used again."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.both_sides.wire import named, read
from harness.driving.rounds import Unpacker
from harness.driving.row_arrays import summary_of
from harness.engine_side.probes.captured_graph import CapturedGraph
from harness.engine_side.probes.recorder import Recorder
from harness.engine_side.probes.snapshot import copied, outputs_of
from harness.engine_side.probes.staging import BLOCK_BYTES, StagingBuffer


def staging():
    return StagingBuffer(
        move=lambda *_given: pytest.fail("there is no device here"),
        event=lambda _used, _stream: SimpleNamespace(query=lambda: True, synchronize=lambda: None),
        new=lambda size: torch.empty(size, dtype=torch.uint8),
        wait=lambda: None,
    )


def sent(recorder, *, held=False):
    """A decode round with a proposal, as the control side reads it; held: copied when the round is over."""
    copied = recorder.held if held else recorder.copied
    starts = torch.tensor([7, 9])
    recorder.open_round(mode="DECODE", rids=["a", "b"], starts=copied({"starts": starts}))
    if not held:
        starts += 100  # what was copied stays
    ids = torch.tensor([[1, 2], [3, 4]]).T  # not contiguous
    copy = copied({"ids": ids, "probs": ids.to(torch.float16) / 8})
    facts = {"phase": "EXTEND", "requests": [0, 1], "mapped": False, "layered": False}
    recorder.note("proposals", copy, **facts)
    recorder.close_round()
    unpacker = Unpacker()
    messages = [part for taken, held in recorder.take(all_of_them=True) for part in unpacker.unpack(named(taken), held)]
    return [(message, {name: array.tolist() for name, array in held.items()}) for message, held in messages]


def test_a_round_is_the_same_whether_staged_or_copied_at_once():
    shipped, staged, held = (sent(Recorder()), sent(Recorder(staging())), sent(Recorder(staging()), held=True))
    assert staged == shipped
    assert held == shipped
    assert sent(Recorder(), held=True) == shipped
    assert staged[-1][0]["starts"] == [7, 9]
    assert staged[0][1]["ids"] == [[1, 3], [2, 4]]


def test_what_a_round_underway_has_sent_is_not_sent_again_by_the_next():
    """A device that is behind: rounds are sent when later ones, with tensors of other shapes, were recorded."""
    recorder, unpacker = Recorder(staging()), Unpacker()
    for requests in (1, 1, 2, 3):
        starts = torch.arange(requests)
        recorder.open_round(
            mode="DECODE", rids=[f"r{i}" for i in range(requests)], starts=recorder.copied({"starts": starts})
        )
        recorder.close_round()
    taken = recorder.take(all_of_them=True)
    assert [len(named(round_)["layouts"]) for round_, _ in taken] == [1, 0, 1, 1]
    found = [part for round_, held in taken for part, _ in unpacker.unpack(named(round_), held)]
    assert [message["starts"] for message in found] == [[0], [0], [0, 1], [0, 1, 2]]


def test_what_a_graph_left_is_taken_along_among_the_rest():
    recorder = Recorder(staging())
    current = recorder.open_round(mode="DECODE", rids=["a"], starts=[3])
    recorder.note("tree", recorder.held({"next": torch.tensor([5])}), width=1)
    captured = CapturedGraph(buffer=torch.tensor([1, 2, 3], dtype=torch.int64).view(torch.uint8))
    base = current.keep(captured)
    captured.buffer.zero_()
    recorder.close_round()
    ((_, held),) = recorder.take(all_of_them=True)
    found = read(held["bytes"], [(base, [("x", "int64", 0, (3,))])])
    assert found["x"].tolist() == [1, 2, 3]


def test_what_is_held_and_written_to_ends_the_run():
    recorder = Recorder(staging())
    starts = torch.tensor([7])
    recorder.open_round(mode="DECODE", rids=["a"], starts=recorder.held({"starts": starts}))
    starts[0] += 1
    with pytest.raises(RuntimeError, match="one of starts was written to before the round was over"):
        recorder.close_round()


def test_a_reader_before_the_round_is_over_gets_the_values_and_they_are_copied_once():
    recorder = Recorder(staging())
    current = recorder.open_round(mode="DECODE", rids=["a"], starts=recorder.held({"starts": torch.tensor([7])}))
    assert current.starts == [7]
    current.accepted = recorder.held({"lens": torch.tensor([2])})
    recorder.note("sampled", current.accepted, width=1)
    assert current.accept_lens == [2]
    recorder.close_round()
    ((message, held),) = recorder.take(all_of_them=True)
    (event,) = named(message)["events"]
    ((base, _),) = event["pieces"]
    assert (base, len(held["bytes"])) == (8, 16)


def test_what_pytorch_does_not_count_writes_of_is_copied_at_once():
    with torch.inference_mode():
        starts = torch.tensor([7])
        copy = staging().held({"starts": starts})
        starts += 1
    assert copy.read()["starts"].tolist() == [7]


def test_more_than_a_block_holds_goes_into_the_next_and_comes_back_in_one_piece():
    place = staging()
    tensors = [torch.arange(BLOCK_BYTES // 16) + turn for turn in range(5)]
    copies = [place.copied({"x": tensor}) for tensor in tensors]
    whole = place.close_round().bytes()
    for tensor, copy in zip(tensors, copies, strict=True):
        assert np.array_equal(read(whole, [(copy.base, copy.fields)])["x"], tensor.numpy())
    assert len(place.spare) == 3


def test_blocks_are_used_again_but_not_those_of_a_round_that_failed():
    place = staging()
    place.stage(torch.ones(4))
    (first,) = place._blocks
    arrival = place.close_round()
    place.stage(torch.ones(4))
    assert place._blocks[0] is not first  # nobody has read it yet
    place.drop_round()
    arrival.bytes()
    place.stage(torch.ones(4))
    assert place._blocks == [first]
    assert place.spare == []


def test_a_mutant_that_asks_reads_what_has_staged():
    recorder = Recorder(staging())
    recorder.copied({"y": torch.tensor([1.0])})
    copy = recorder.copied({"lens": torch.tensor([3, 1], dtype=torch.int32), "none": None})
    assert {name: array.tolist() for name, array in copy.read().items()} == {"lens": [3, 1]}
    assert recorder.copied({"none": None}) is None


def test_a_round_of_nothing_has_no_bytes_and_waits_for_nobody():
    recorder = Recorder(staging())
    recorder.open_round(mode="IDLE", rids=[], starts=[])
    recorder.close_round()
    ((message, held),) = recorder.take()
    assert (named(message)["mode"], len(held["bytes"])) == ("IDLE", 0)


LOGITS = {
    "random": torch.randn(9, 300, generator=torch.Generator().manual_seed(1)).to(torch.float16),
    "few": torch.randn(4, 5, generator=torch.Generator().manual_seed(2)).to(torch.float16),
    "equal": torch.zeros(2, 64, dtype=torch.float16),
    "best-twice": torch.tensor([[1.0, 5.0, 2.0, 5.0] * 20]).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", LOGITS)
def test_all_logits_say_what_the_device_would_have_worked_out(name):
    logits = LOGITS[name]
    output = SimpleNamespace(next_token_logits=logits, hidden_states=None)
    worked = copied(outputs_of(output)).read()
    whole = copied(outputs_of(output, whole_below=4096)).read()
    assert list(whole) == ["logits"]
    found = summary_of(whole["logits"])
    assert found["top_ids"][:, 0].tolist() == worked["best"].tolist()
    assert np.array_equal(found["top_logits"], worked["top_logits"])
    assert np.array_equal(np.take_along_axis(whole["logits"], found["top_ids"], axis=1), found["top_logits"])
    lse = torch.logsumexp(logits.double(), dim=-1).numpy()
    assert np.allclose(found["lse"], lse, rtol=1e-6)


def test_a_wide_vocabulary_is_worked_out_on_the_device():
    output = SimpleNamespace(next_token_logits=torch.zeros(1, 64), hidden_states=None)
    assert "logits" not in outputs_of(output, whole_below=64)


def test_a_nan_comes_first_and_stays_one():
    logits = np.zeros((1, 40), np.float32)
    logits[0, 30] = np.nan
    found = summary_of(logits)
    assert found["top_ids"][0, 0] == 30
    assert np.isnan(found["top_logits"][0, 0])
    assert np.isnan(found["lse"][0])
