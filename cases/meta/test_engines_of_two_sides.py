"""Two sides driven as one engine: who is asked what, in which order, and what becomes of one that falls."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness.driving.assemble import Assembler
from harness.engines.engine import Engine
from harness.engines.errors import EngineCrashed, EngineError
from harness.engines.process import Launch, Peer


class Side:
    """Stands for one side; writes down what it is asked for in a list that both share."""

    def __init__(self, name, said, *, ranks=1):
        self.name, self.said, self.routes, self.ranks = name, said, {}, []
        for rank in range(ranks):
            hello = {"side": name, "hooks_missing": [name], "replaced": [], "rank": rank}
            self.ranks.append(Peer(sock=None, hello=hello))
        self.process, self.exits, self.boot_seconds, self.lease = None, None, 1.0, {}
        self.launch = Launch(python=Path("p"), pythonpath=(), boot={"handoff": {"side": name}})
        self.closed = self.falls = False

    def boot(self, progress=None):
        if self.falls:
            raise EngineError(f"{self.name} would not start")
        self.said.append((self.name, "boot", threading.current_thread() is threading.main_thread()))

    def ask_host(self, command, *, seconds=None):
        self.said.append((self.name, command["rid"].partition("@")[0], command["room"], command["dp_rank"]))
        return {"refused": False}

    def ask_ranks(self, command):
        self.said.append((self.name, command))
        return [({"flushed": True, **command}, {})]

    def step(self, expect, meanwhile):
        if self.falls:
            raise EngineCrashed({"error": "x"})
        self.said.append((self.name, expect))
        return []

    def close(self):
        self.closed = True


@pytest.fixture
def pair(tmp_path):
    launch = Launch(python=Path("p"), pythonpath=(), boot={})
    both = Engine(launch=replace(launch, beside=launch), log=tmp_path / "engine.log")
    said = []
    both.sides = (Side("prefill", said), Side("decode", said, ranks=2))
    return both, said


def submit(both, rid, **asked):
    return both.submit(rid=rid, prompt=[1], sampling={}, **asked)


def test_a_step_runs_the_prefill_side_and_then_the_decode_side(pair):
    both, said = pair
    both.step(expect=["a", "decode/abort:b", "prefill/c"])
    assert said == [("prefill", ["a", "c"]), ("decode", ["a", "abort:b"])]


def test_both_sides_meet_in_a_room_that_no_other_request_has_had(pair):
    both, said = pair
    for _ in range(2):
        both.begin(chunk=None)
        submit(both, "a")
        submit(both, "b", side="decode")
        submit(both, "b", side="prefill")
    asked = [one for one in said if len(one) == 4]
    rooms = {(rid, room) for _, rid, room, _ in asked}
    assert [(side, rid) for side, rid, _, _ in asked[:4]] == [
        ("prefill", "a"), ("decode", "a"), ("decode", "b"), ("prefill", "b"),
    ]  # fmt: skip
    assert len(rooms) == 4
    assert all(room > 0 for _, room in rooms), "SGLang reads 0 as nothing yet"


def test_what_becomes_of_a_transfer_is_said_to_both_sides(pair):
    both, said = pair
    submit(both, "a")
    room = said[0][2]
    both.transfer("hold", ["a"])
    command = {"op": "transfer", "what": "hold", "rooms": [room]}
    assert said[2:] == [("prefill", command), ("decode", command)]


def test_a_running_limit_is_the_decode_sides(pair):
    both, _ = pair
    assert [answer["running_limit"] for answer in both.begin(chunk=4, running_limit=2)] == [None, 2]


def test_handshake_says_what_either_side_misses(pair):
    both, _ = pair
    assert both.handshakes[0]["hooks_missing"] == ["prefill", "decode"]
    assert [hello["side"] for hello in both.handshakes] == ["prefill", "decode", "decode"]


def test_both_boot_at_once_with_one_folder_between_them(pair):
    both, said = pair
    both.boot()
    folders = {side.launch.boot["handoff"]["folder"] for side in both.sides}
    assert sorted(said) == [("decode", "boot", True), ("prefill", "boot", False)]
    assert len(folders) == 1
    both.close()
    assert not Path(folders.pop()).exists()


@pytest.mark.parametrize("falls", [0, 1])
def test_one_that_would_not_start_takes_the_other_with_it(pair, falls):
    both, _ = pair
    both.sides[falls].falls = True
    with pytest.raises(EngineError, match=f"{both.sides[falls].name} would not start"):
        both.boot()
    assert all(side.closed for side in both.sides)


def test_a_side_that_falls_is_named(pair):
    both, _ = pair
    both.sides[1].falls = True
    with pytest.raises(EngineCrashed) as caught:
        both.step(expect=[])
    assert caught.value.report["side"] == "decode"


def test_a_rank_is_one_of_the_decode_side(pair):
    both, said = pair
    submit(both, "a", dp_rank=1)
    assert [(side, rank) for side, _, _, rank in said] == [("prefill", None), ("decode", 1)]
    assert [side.routes["a"] for side in both.sides] == [0, 1]


def test_batches_of_both_sides_are_numbered_as_they_ran_however_late_they_are_reported():
    assembler = Assembler()
    batch = {"ev": "round", "rids": ["a"], "attempts": [0], "starts": [0], "lens": [1], "final": [True], "forwards": {}}
    batches = [(1, "decode", "DECODE", 1), (0, "prefill", "PREFILL", 0), (0, "decode", "PREBUILT", 0)]
    for scheduler_step, side, mode, index in [*batches, (1, "prefill", "PREFILL", 1)]:
        assembler.feed({**batch, "mode": mode, "index": index}, {}, scheduler_step=scheduler_step, dp_rank=0, side=side)
    message = {"ev": "handed", "round": 0, "rids": ["a"], "prefixes": [0]}
    assembler.feed(message, {}, scheduler_step=0, dp_rank=0, side="decode")
    trace = assembler.build(scenario_id="", header={})
    assert [(one.index, one.scheduler_step, one.side, one.mode) for one in trace.rounds] == [
        (0, 0, "prefill", "PREFILL"),
        (1, 0, "decode", "PREBUILT"),
        (2, 1, "prefill", "PREFILL"),
        (3, 1, "decode", "DECODE"),
    ]
    assert [event.data["round"] for event in trace.named("handed")] == [1]
