"""Two engines driven as one: who is told what, in which order, and what becomes of one that falls."""

import threading
from pathlib import Path

import pytest

from harness.driving.assemble import Assembler
from harness.engines.engine import EngineCrashed, EngineError, Launch
from harness.engines.paired_engine import PairedEngine


class Side:
    """Stands for one engine; writes down what it is asked for in a list that both share."""

    def __init__(self, name, said):
        self.name, self.said, self.handshakes = name, said, [{"side": name, "hooks_missing": [name], "replaced": []}]
        self.process, self.boots_seconds, self.closed = None, 1.0, False
        self.launch = Launch(python=Path("p"), pythonpath=(), boot={"handoff": {"side": name}})
        self.falls = False

    def boot(self, *, progress=lambda text: None):
        if self.falls:
            raise EngineError(f"{self.name} would not start")
        self.said.append((self.name, "boot", threading.current_thread() is threading.main_thread()))

    def submit(self, *, rid, room, dp_rank=None, **_):
        self.said.append((self.name, rid, room) if not dp_rank else (self.name, rid, room, dp_rank))
        return True

    def turn(self, *, expect, meanwhile=None):
        if self.falls:
            raise EngineCrashed({"error": "x"})
        self.said.append((self.name, "turn", expect))
        return []

    def begin(self, **asked):
        return [{"flushed": True, **asked}]

    def transfer(self, what, rooms):
        self.said.append((self.name, what, rooms))

    def close(self):
        self.closed = True


@pytest.fixture
def pair(tmp_path):
    launch = Launch(python=Path("p"), pythonpath=(), boot={"handoff": {"side": "prefill"}})
    both = PairedEngine(
        launch=Launch(python=Path("p"), pythonpath=(), boot=launch.boot, beside=launch), log=tmp_path / "engine.log"
    )
    said = []
    both.prefill, both.decode = Side("prefill", said), Side("decode", said)
    return both, said


def test_a_tick_is_a_turn_of_the_prefill_side_and_then_one_of_the_decode_side(pair):
    both, said = pair
    both.turn(expect=["a", "decode/abort:b", "prefill/c"])
    assert said == [("prefill", "turn", ["a", "c"]), ("decode", "turn", ["a", "abort:b"])]


def test_both_sides_meet_in_a_room_that_no_other_request_has_had(pair):
    both, said = pair
    for _ in range(2):
        both.begin(chunk=None)
        both.submit(rid="a")
        both.submit(rid="b", side="decode")
        both.submit(rid="b", side="prefill")
    rooms = {(rid, room) for _, rid, room in said}
    assert [(side, rid) for side, rid, _ in said[:4]] == [
        ("prefill", "a"), ("decode", "a"), ("decode", "b"), ("prefill", "b"),
    ]  # fmt: skip
    assert len(rooms) == 4
    assert all(room > 0 for _, room in rooms), "SGLang reads 0 as nothing yet"


def test_what_becomes_of_a_transfer_is_said_to_both_sides(pair):
    both, said = pair
    both.begin(chunk=None)
    both.transfer("hold", ["a"])
    (first, what, rooms), second = said
    assert (first, what, second) == ("prefill", "hold", ("decode", "hold", rooms))


def test_a_running_limit_is_the_decode_sides(pair):
    both, _ = pair
    assert [answer["running_limit"] for answer in both.begin(chunk=4, running_limit=2)] == [None, 2]


def test_handshake_says_what_either_side_misses(pair):
    both, _ = pair
    assert both.handshakes[0]["hooks_missing"] == ["prefill", "decode"]
    assert both.handshakes[1]["side"] == "decode"


def test_both_boot_at_once_with_one_folder_between_them(pair):
    both, said = pair
    both.boot()
    folders = {side.launch.boot["handoff"]["folder"] for side in both.sides}
    assert sorted(said) == [("decode", "boot", True), ("prefill", "boot", False)]
    assert len(folders) == 1
    both.close()
    assert not Path(folders.pop()).exists()


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_one_that_would_not_start_takes_the_other_with_it(pair, name):
    both, _ = pair
    getattr(both, name).falls = True
    with pytest.raises(EngineError, match=f"{name} would not start"):
        both.boot()
    assert both.prefill.closed
    assert both.decode.closed


def test_a_side_that_falls_is_named(pair):
    both, _ = pair
    both.decode.falls = True
    with pytest.raises(EngineCrashed) as caught:
        both.turn(expect=[])
    assert caught.value.report["side"] == "decode"


def test_batches_of_both_sides_are_numbered_as_they_ran_however_late_they_are_heard_of():
    assembler = Assembler()
    batch = {"ev": "round", "rids": ["a"], "epochs": [0], "starts": [0], "lens": [1], "final": [True], "forwards": {}}
    heard = [(1, "decode", "DECODE", 1), (0, "prefill", "PREFILL", 0), (0, "decode", "PREBUILT", 0)]
    for tick, side, mode, index in [*heard, (1, "prefill", "PREFILL", 1)]:
        assembler.feed({**batch, "mode": mode, "index": index}, {}, tick=tick, dp_rank=0, side=side)
    told = {"ev": "handed", "round": 0, "rids": ["a"], "prefixes": [0]}
    assembler.feed(told, {}, tick=0, dp_rank=0, side="decode")
    trace = assembler.build(scenario_id="", header={})
    assert [(one.index, one.tick, one.side, one.mode) for one in trace.rounds] == [
        (0, 0, "prefill", "PREFILL"),
        (1, 0, "decode", "PREBUILT"),
        (2, 1, "prefill", "PREFILL"),
        (3, 1, "decode", "DECODE"),
    ]
    assert [event.data["round"] for event in trace.events if event.name == "handed"] == [1]


def test_a_rank_is_one_of_the_decode_side(pair):
    both, said = pair
    both.submit(rid="a", dp_rank=1)
    assert [one[0] for one in said] == ["prefill", "decode"]
    assert [one[3:] for one in said] == [(), (1,)]
