"""Several ranks at once: who fell first, who is behind, and what is waited for."""

import socket
import threading
import time

import pytest

from harness.both_sides import wire
from harness.engines import ranks
from harness.engines.errors import EngineHung
from harness.engines.process import Launch, Peer
from harness.engines.side import STEP_SECONDS, Side


@pytest.fixture
def pairs():
    """Two ranks: (the control side's socket, the rank's)."""
    made = [socket.socketpair() for _ in range(2)]
    yield made
    for one, other in made:
        one.close()
        other.close()


def ours(pairs):
    return [one for one, _ in pairs]


def test_messages_come_in_the_order_of_ranks(pairs):
    for number, (_, rank) in reversed(list(enumerate(pairs))):
        wire.send(rank, {"op": "stepped", "number": number})
    found = ranks.gather(ours(pairs), seconds=900)
    assert [frame[0]["number"] for frame in found] == [0, 1]
    assert ranks.first_to_fall(found) is None


def test_rank_that_spoke_fell_before_those_killed_after_it(pairs):
    wire.send(pairs[1][1], {"op": "crashed", "when": time.monotonic()})
    pairs[0][1].close()
    assert ranks.first_to_fall(ranks.gather(ours(pairs), seconds=900)) == 1


def test_rank_killed_from_outside_fell_before_those_that_lost_it(pairs):
    pairs[0][1].close()
    found = ranks.gather(ours(pairs)[:1], seconds=900)
    later = ({"op": "crashed", "when": time.monotonic() + 1}, {})
    assert ranks.first_to_fall([*found, later]) == 0


@pytest.mark.parametrize(
    ("wait", "speaks", "said", "fell"),
    [("GRACE_SECONDS", 1, {"op": "crashed", "when": 1.0}, 1), ("LAG_SECONDS", 0, {"op": "stepped"}, None)],
    ids=["a crash of one", "a step of one"],
)
def test_ranks_end_together_or_are_silent_and_nobody_is_waited_for(pairs, monkeypatch, wait, speaks, said, fell):
    monkeypatch.setattr(ranks, wait, 0.05)
    wire.send(pairs[speaks][1], said)
    found = ranks.gather(ours(pairs), seconds=900)
    assert [one is not None for one in found] == [speaks == 0, speaks == 1]
    if fell is not None:
        assert ranks.first_to_fall(found) == fell


def test_watchdog_that_answers_says_where_and_one_that_is_gone_says_nothing(pairs):
    here, there = pairs[0]
    answer = {"op": "here", "site": "srt/x.py:f", "at_phase": "DRAFT"}

    def reply():
        wire.receive(there)
        wire.send(there, answer)

    thread = threading.Thread(target=reply)
    thread.start()
    assert ranks.ask(here) == {"site": "srt/x.py:f", "at_phase": "DRAFT"}
    thread.join()
    there.close()
    assert ranks.ask(here) == {}
    assert ranks.ask(None) == {}


def test_the_rank_behind_is_the_one_in_the_earlier_forward():
    where = [
        {"dp_rank": 0, "at_round": 3, "at_phase": "VERIFY", "at_step": 0},
        {"dp_rank": 1, "at_round": 3, "at_phase": "DRAFT", "at_step": 1},
        {"dp_rank": 2, "at_round": 4, "at_phase": "DRAFT", "at_step": 0},
    ]
    assert min(where, key=ranks.progress)["dp_rank"] == 1
    assert ranks.progress({}) < ranks.progress(where[1])


@pytest.mark.parametrize(("load", "times"), [(0.5, 1.0), (4.0, 1.0), (8.0, 2.0), (400.0, 4.0)])
def test_a_step_has_longer_where_processes_outnumber_processors(load, times, monkeypatch, tmp_path):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    side = Side(launch=Launch(python=tmp_path, pythonpath=(), boot={}, ranks=1), log=tmp_path / "log")
    assert side._step_seconds == STEP_SECONDS * times


def test_a_side_names_the_silent_rank_that_is_behind_from_the_watchdogs(pairs, monkeypatch, tmp_path):
    monkeypatch.setattr("harness.engines.side.STEP_SECONDS", 0.1)
    stuck = Side(launch=Launch(python=tmp_path, pythonpath=(), boot={}, ranks=2), log=tmp_path / "log")
    others = []
    for number, (sock, _) in enumerate(pairs):
        rank = {"dp_rank": number, "tp_rank": number}
        ours, theirs = socket.socketpair()
        stuck.peers["scheduler"].append(Peer(sock=sock, hello=rank))
        stuck.peers["watchdog"].append(Peer(sock=ours, hello=rank))
        wire.send(theirs, {"op": "here", "at_round": 3 - number, "at_phase": "DRAFT"})
        others.append(theirs)
    with pytest.raises(EngineHung) as caught:
        stuck._receive_all()
    report = caught.value.report
    assert (report["dp_rank"], report["at_round"], report["silent"], len(report["ranks"])) == (1, 2, 2, 2)
    stuck.close()
    for sock in others:
        sock.close()
