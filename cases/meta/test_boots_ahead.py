"""Engines that boot beside the one that is driven: taken when their turn comes, and ended with the pool."""

from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace

import pytest

from cases.families import FAMILIES
from harness.both_sides.leases import Request
from harness.driving import pool, runner
from harness.driving.pool import EnginePool
from harness.engines.errors import EngineError, NoLease
from harness.engines.process import Launch

LEASE = Request(share=4096, wait=300.0, folder="leases")


def launch(name, *, lease=None):
    boot = {"arguments": {"name": name}, "flags": [], "lease": None if lease is None else lease.plain()}
    return Launch(python=Path("python"), pythonpath=(), boot=boot)


@pytest.fixture
def engines(monkeypatch):
    """Every engine that was made, by its name; `trouble` is raised by its boot, `hold` delays it."""
    made = SimpleNamespace(started=[], trouble={}, hold={})

    class Pretended:
        def __init__(self, *, launch, log):
            self.launch, self.log, self.closed, self.ended = launch, log, Event(), False
            self.name, self.process = launch.boot["arguments"]["name"], SimpleNamespace(poll=lambda: self.ended or None)
            made.started.append(self)

        def boot(self, *, progress):
            if self.name in made.hold:
                while not (made.hold[self.name].wait(0.01) or self.closed.is_set()):
                    progress("booting")
            if self.closed.is_set():
                raise EngineError("it was ended while booting")
            if made.trouble.get(self.name):
                raise made.trouble[self.name].pop(0)

        def close(self):
            self.closed.set()

    monkeypatch.setattr(pool, "Engine", Pretended)
    monkeypatch.setattr(pool, "FREE_AHEAD", 0)
    return made


@pytest.fixture
def of_two(engines, tmp_path):
    made = EnginePool(logs=tmp_path, log_name="engine.log", lease=LEASE, ahead=2)
    yield made
    made.end()


def up(engines):
    """Whatever boots ahead has booted, or has not come up."""
    for one in [*chain.from_iterable(engines._expected.values())]:
        one.exception()


def names(engines):
    return [one.name for one in engines.started]


def test_as_many_as_may_boot_ahead_do_and_each_is_taken_in_its_turn(engines, of_two):
    first, *later = (launch(name) for name in "abcd")
    of_two.expect(later)
    of_two.use(first)
    up(of_two)
    assert set(names(engines)) == {"a", "b", "c"}
    second = of_two.use(later[0])
    assert (second.name, of_two.use(later[0]) is second, of_two.boots) == ("b", True, 3)
    assert [one.closed.wait(10) for one in engines.started if one.name == "a"] == [True]
    of_two.expect(later[1:])
    up(of_two)
    of_two.use(later[2])
    assert sorted(names(engines)) == ["a", "b", "c", "d"]
    assert {one.log.name for one in engines.started} == {"engine.log", "engine-2.log", "engine-3.log", "engine-4.log"}
    of_two.end()
    assert all(one.closed.is_set() for one in engines.started)


def test_an_engine_ends_beside_the_next_which_has_booted_and_before_the_pool(engines, of_two, monkeypatch):
    first, second, third = (launch(name) for name in "abc")
    of_two.expect([second])
    held, ended, begun = Event(), Event(), of_two.use(first)

    def close():
        held.wait(10)
        ended.set()

    monkeypatch.setattr(begun, "close", close)
    assert (of_two.use(second).name, ended.is_set()) == ("b", False)
    Timer(0.2, held.set).start()
    of_two.use(third)  # nobody has booted that: what it takes the place of has ended by then
    assert [one.closed.is_set() for one in engines.started if one.name == "b"] == [True]
    of_two.end()
    assert ended.is_set()


def test_what_boots_ahead_takes_no_card_before_the_engine_that_is_waited_for(engines, of_two, monkeypatch):
    first, *later = (launch(name) for name in "abc")
    booted = []
    monkeypatch.setattr(of_two, "preparing", lambda text, _log: booted.append(text))
    engines.hold["a"] = Event()
    of_two.expect(later, now=first)
    assert not of_two._go.is_set()
    Timer(0.2, engines.hold["a"].set).start()
    of_two.use(first)
    assert (booted[:1], of_two._go.is_set()) == (["booting"], True)
    assert {one.result().name for one in chain.from_iterable(of_two._expected.values())} == {"b", "c"}
    of_two.expect([launch("d"), launch("e")], now=launch("f"))
    assert not of_two._go.is_set()
    assert of_two.use(later[0]).name == "b"  # not what was said: nobody waits for what waits for it


def test_one_configuration_gets_as_many_engines_as_are_asked_for(engines, of_two):
    again = launch("a")
    of_two.expect([again, again], now=again)
    one = of_two.use(again)
    of_two.expect([again, again], now=again)  # a scenario more on the live engine
    of_two.close()  # as after new weights
    of_two.expect([again], now=again)
    up(of_two)
    assert names(engines) == ["a", "a", "a"]
    another = of_two.use(again)
    of_two.close()
    assert len({id(each) for each in (one, another, of_two.use(again))}) == of_two.boots == 3


def test_what_a_run_boots_ahead_is_a_configuration_each():
    scenarios, expected = runner.in_boot_order(FAMILIES["paged"].scenarios), []
    engines = SimpleNamespace(
        ahead=3, lease=None, expect=lambda more, now: expected.extend(more), use=lambda _launch: None
    )
    plan = SimpleNamespace(launch=lambda one, lease: one.boot_key())
    going = SimpleNamespace(later=[*pool.beginning(scenarios)], plan=plan, engines=engines)
    runner._wait_for(going, launch("a"))
    assert expected == [*dict.fromkeys(one.boot_key() for one in scenarios)][1:4]


def test_a_scenario_behind_new_weights_needs_an_engine_of_its_own():
    scenarios = runner.in_boot_order(FAMILIES["weights"].scenarios)
    own = [*pool.beginning(scenarios)]
    boots = len({one.boot_key() for one in scenarios})
    changed = sum(bool(one.updates) for one in scenarios[:-1])
    assert boots - 1 < len(own) <= boots - 1 + changed
    assert all(after in own for before, after in pairwise(scenarios) if before.updates)


def test_a_pool_that_is_ended_waits_for_no_boot(engines, of_two):
    engines.hold["b"] = Event()
    of_two.expect([launch("b")])
    of_two.use(launch("a"))
    of_two.end()
    assert all(one.closed.is_set() for one in engines.started)


def test_what_comes_to_its_boot_after_the_pool_was_ended_is_not_booted(engines, of_two, monkeypatch):
    """As where the process that it would be forked from is ended while it imports."""
    begun, goes_on = Event(), Event()
    made = pool.EnginePool._started

    def started(self, launch, *more):
        if launch.boot["arguments"]["name"] == "b":
            begun.set()
            goes_on.wait(10)
        return made(self, launch, *more)

    monkeypatch.setattr(pool.EnginePool, "_started", started)
    engines.hold["b"] = Event()  # it would never be up
    of_two.expect([launch("b")])
    of_two.use(launch("a"))
    begun.wait(10)
    Timer(0.2, goes_on.set).start()
    of_two.end()
    assert all(one.closed.is_set() for one in engines.started)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_engine_that_is_taken_during_an_interrupt_ends_with_the_pool(engines, of_two, monkeypatch, where):
    of_two.expect([launch("b")])
    of_two.use(launch("a"))
    up(of_two)

    def interrupt(*_):
        raise KeyboardInterrupt

    if where == "before":
        monkeypatch.setattr(of_two, "preparing", interrupt)
    else:
        made = pool.EnginePool._taken
        monkeypatch.setattr(pool.EnginePool, "_taken", lambda self, key: interrupt(made(self, key)))
    with pytest.raises(KeyboardInterrupt):
        of_two.use(launch("b"))
    of_two.end()
    assert [one.name for one in engines.started if not one.closed.is_set()] == []


def test_what_does_not_end_keeps_nothing_else_from_ending_and_is_an_error(engines, of_two, monkeypatch):
    of_two.expect([launch("b"), launch("c")])
    live = of_two.use(launch("a"))
    up(of_two)
    servers = SimpleNamespace(ended=0)
    servers.close = lambda: setattr(servers, "ended", servers.ended + 1)
    of_two._fork_servers = servers

    def close():
        live.closed.set()
        raise EngineError("it is not gone")

    monkeypatch.setattr(live, "close", close)
    with pytest.raises(EngineError, match="it is not gone"):
        of_two.end()
    assert ([one.closed.is_set() for one in engines.started], servers.ended) == ([True] * 3, 1)
    monkeypatch.setattr(live, "close", live.closed.set)


def test_what_is_wrong_with_a_boot_is_said_when_its_turn_comes(engines, of_two):
    engines.trouble["b"] = [EngineError("it would not start")]
    of_two.expect([launch("b")])
    of_two.use(launch("a"))
    with pytest.raises(EngineError, match="would not start"):
        of_two.use(launch("b"))
    assert names(engines).count("b") == 1


def test_a_configuration_that_does_not_boot_is_given_up_after_the_second_time(engines, of_two):
    first, second = EngineError("it would not start"), EngineError("it would not start, again")
    engines.trouble["b"] = [first, second]
    for expected in (first, second, second):
        with pytest.raises(EngineError) as caught:
            of_two.use(launch("b"))
        assert caught.value is expected
    assert names(engines) == ["b", "b"]
    assert of_two.use(launch("a")).name == "a"


def test_a_boot_that_works_and_a_card_that_is_taken_count_for_nothing(engines, of_two):
    why = [EngineError("once"), NoLease("taken"), NoLease("taken")]
    engines.trouble["b"] = [*why]
    for one in why:
        with pytest.raises(type(one), match=str(one)):
            of_two.use(launch("b"))
    of_two.use(launch("b"))
    of_two.close()
    engines.trouble["b"] = [EngineError("once more")]
    with pytest.raises(EngineError, match="once more"):
        of_two.use(launch("b"))
    assert of_two.use(launch("b")).name == "b"


def test_each_wait_for_a_lease_in_vain_halves_the_next_until_one_is_had_again(engines, of_two):
    engines.trouble["b"] = [NoLease("taken"), NoLease("taken")]
    waits = []
    for _ in range(2):
        with pytest.raises(NoLease):
            of_two.use(launch("b"))
        waits.append(of_two.lease.wait)
    of_two.use(launch("b"))
    assert (waits, of_two.lease) == ([150.0, 75.0], LEASE)


def test_an_engine_that_ended_before_its_turn_is_booted_anew(engines, of_two):
    of_two.expect([launch("b")])
    of_two.use(launch("a"))
    of_two._expected[pool._key_of(launch("b"))][0].result().ended = True
    assert not of_two.use(launch("b")).ended
    assert names(engines).count("b") == 2


def test_where_a_card_has_no_room_for_the_next_it_waits_for_its_turn_and_nothing_boots_ahead_any_more(engines, of_two):
    engines.trouble["b"] = [NoLease("no GPU lease")]
    asked = [launch(name, lease=LEASE) for name in "abc"]
    of_two.expect(asked[1:])
    of_two.use(asked[0])
    up(of_two)
    second = of_two.use(asked[1])
    boots = {one.name: one.launch.boot["lease"]["wait"] for one in engines.started if one.name != "b"}
    assert boots == {"a": 300.0, "c": 0.0}
    assert [one.launch.boot["lease"]["wait"] for one in engines.started if one.name == "b"] == [0.0, 300.0]
    assert [one.closed.is_set() for one in engines.started if one.name == "c"] == [True]
    assert (second.name, of_two.ahead, of_two.lease) == ("b", 0, replace(LEASE))


def test_where_a_card_has_room_for_some_as_many_boot_ahead_and_the_others_in_their_turn(engines, of_two):
    engines.trouble["c"] = [NoLease("no GPU lease")]
    first, *later = (launch(name, lease=LEASE) for name in "abcd")
    of_two.expect(later)
    of_two.use(first)
    up(of_two)
    of_two.expect(later, now=first)
    assert of_two.ahead == 1
    assert of_two.use(later[0]).name == "b"
    of_two.expect(later[1:], now=later[0])
    assert [of_two.use(one).name for one in later[1:]] == ["c", "d"]
    assert sorted(names(engines)) == ["a", "b", "c", "c", "d"]


def test_a_borrowed_pool_boots_and_imports_nothing_itself(engines, of_two, tmp_path):
    borrowed = pool.BorrowedPool(owner=of_two, logs=tmp_path, copies=True, ahead=2)
    forked = launch("b")
    forked.boot["device"] = "cpu"
    borrowed.prepare(forked)
    borrowed.expect([forked], now=launch("a"))
    assert borrowed.use(launch("a")) is of_two.use(launch("a"))
    assert (names(engines), borrowed._fork_servers, borrowed._expected) == (["a"], None, {})


def test_nothing_boots_ahead_without_memory_for_it(engines, of_two, monkeypatch):
    monkeypatch.setattr(pool, "FREE_AHEAD", 1 << 40)
    of_two.expect([launch("b")])
    of_two.use(launch("a"))
    assert names(engines) == ["a"]
