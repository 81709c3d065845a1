"""Leases on cards that are not there, held by real engine hosts: the lock lives exactly as long as its host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from cases.meta import pretended_sglang
from cases.meta.pretended_card import H100, IDLE, IDLE_SECOND, SECOND, app, used
from cases.meta.processes import survivors, tree, wait_until
from cases.programs import DEFAULT
from harness.both_sides import lease_files, leases
from harness.both_sides.gpus import CardError
from harness.engines import bare
from harness.engines.engine import Engine
from harness.engines.errors import EngineError, NoLease

pytestmark = pytest.mark.usefixtures("machine")

#: An SGLang that boots for ever.
ALONE = """
import os, time
class Engine:
    def __init__(self, **arguments):
        print("sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
        time.sleep(600)
"""
HALF = 39.0  # GiB: two such leases fit on an H100, a third does not


@pytest.fixture
def engine(tmp_path):
    """engine(share=, **arguments): one with a lease, not yet booted; all are ended after the test."""
    site = pretended_sglang.furnish(tmp_path / "site")
    started = []

    def make(share=HALF, **arguments):
        launch = pretended_sglang.launch(site, leases.request(share), **arguments)
        started.append(Engine(launch=launch, log=tmp_path / f"engine-{len(started)}.log"))
        return started[-1]

    yield make
    for each in started:
        each.close()


@pytest.fixture
def booted(engine):
    """booted(share=, **arguments): an engine that is up."""

    def boot(*share, **arguments):
        one = engine(*share, **arguments)
        one.boot()
        return one

    return boot


@pytest.fixture
def refused(engine, patience):
    """refused(share, seconds=0): what the next engine says, which gets no lease."""

    def ask(share=HALF, *, seconds=0):
        patience(seconds)
        with pytest.raises(NoLease) as caught:
            engine(share).boot()
        return str(caught.value)

    return ask


@pytest.fixture
def patience(monkeypatch):
    """patience(seconds): how long the next engines wait for a lease."""
    return lambda seconds: monkeypatch.setenv("EAGLECHECK_GPU_WAIT", str(seconds))


def held():
    """(pid, slot) of every lease on the first card, as anyone can see them."""
    return [(holder.pid, holder.slot) for holder in lease_files.holders(os.environ["EAGLECHECK_LEASES"], H100)]


def test_the_host_itself_holds_the_lease_and_sees_only_that_card(booted):
    one = booted()
    assert held() == [(one.process.pid, 0)]
    assert one.handshakes[0]["visible"] == H100
    assert one.handshakes[0]["lease"]["share_mib"] == HALF * 1024
    one.close()
    assert held() == []


def test_an_engine_of_two_ranks_holds_a_lease_on_each_of_two_cards(booted, machine):
    machine.say(cards=[IDLE, IDLE_SECOND])
    one = booted(tp_size=2)
    assert one.handshakes[0]["visible"] == f"{H100},{SECOND}"
    assert [held["uuid"] for held in (one.lease, *one.lease["others"])] == [H100, SECOND]
    folder = os.environ["EAGLECHECK_LEASES"]
    assert [[holder.pid for holder in lease_files.holders(folder, card)] for card in (H100, SECOND)] == [
        [one.process.pid],
        [one.process.pid],
    ]


def test_sglang_alone_of_two_stages_holds_its_cards_too(tmp_path, machine):
    machine.say(cards=[IDLE, IDLE_SECOND])
    site = pretended_sglang.furnish(tmp_path / "site")
    (site / "sglang" / "__init__.py").write_text(ALONE)
    launch = pretended_sglang.launch(site, leases.request(HALF), pp_size=2)
    with bare.started(launch, DEFAULT["single"], folder=tmp_path) as running:
        wait_until(lambda: "sees" in running.log.read_text())
        assert f"sees {H100},{SECOND}\n" in running.log.read_text()
        assert held() == [(running.process.pid, 0)]
    assert held() == []


def test_an_engine_of_two_ranks_is_refused_where_there_is_one_card(engine):
    with pytest.raises(NoLease, match=r"an engine of 2 ranks needs 2 GPUs, one a rank\n  here: 0 \(GPU-4f1f"):
        engine(tp_size=2).boot()


@pytest.mark.parametrize("ending", ["closed", "killed", "stopped-and-killed", "terminated"])
def test_a_lease_ends_with_its_host_however_it_ends(booted, ending):
    one = booted()
    processes = tree(one.process.pid)
    if ending == "closed":
        one.close()
    else:
        if ending.startswith("stopped"):
            one.process.send_signal(signal.SIGSTOP)
        one.process.send_signal(signal.SIGTERM if ending == "terminated" else signal.SIGKILL)
    wait_until(lambda: held() == [])
    assert survivors(processes) == []


def test_what_outlives_its_host_keeps_no_lease_but_is_seen_on_the_card(booted, refused, machine):
    one = booted(orphan=True)
    orphan = psutil.Process(one.handshakes[0]["orphan"])
    try:
        one.process.kill()
        wait_until(lambda: held() == [])
        assert orphan.is_running()
        machine.say(cards=[used(2048)], apps=[app(orphan.pid)])
        assert f"taken by process {orphan.pid} " in refused()
    finally:
        orphan.kill()


CONTROL = """
import sys, time
from pathlib import Path
from cases.meta import pretended_sglang
from harness.both_sides import leases
from harness.engines.engine import Engine
engine = Engine(launch=pretended_sglang.launch(Path(sys.argv[1]), leases.request(39)), log=Path(sys.argv[2]))
engine.boot()
print(engine.process.pid, flush=True)
time.sleep(600)
"""


def test_a_lease_ends_with_the_control_process_that_was_killed(tmp_path):
    site = pretended_sglang.furnish(tmp_path / "site")
    command = [sys.executable, "-c", CONTROL, str(site), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as control:
        host = int(control.stdout.readline())
        processes = tree(host)
        assert held() == [(host, 0)]
        control.kill()
    wait_until(lambda: held() == [])
    assert survivors(processes) == []


def test_several_engines_share_a_card_and_a_third_waits_until_one_ends(booted, engine, patience):
    first, _ = booted(), booted()
    assert [slot for _, slot in held()] == [0, 1]
    patience(300)
    third, said = engine(), []
    waiting = threading.Thread(target=lambda: third.boot(progress=said.append))
    waiting.start()
    wait_until(lambda: any(text.startswith("waiting for a GPU lease") for text in said))
    assert f"engine process {first.process.pid} (39 GiB)" in said[0]
    killed = time.monotonic()
    first.process.kill()
    waiting.join()
    assert third.handshakes[0]["lease"]["slot"] == 0
    assert {slot for _, slot in held()} == {0, 1}
    assert third.boots_seconds <= time.monotonic() - killed, "waiting is no part of the boot"


def test_waiting_has_a_limit_and_ends_with_who_has_the_leases(booted, engine, patience):
    _, second = booted(), booted()
    patience(2)
    third = engine()
    processes = []
    with pytest.raises(NoLease) as caught:
        third.boot(progress=lambda _text: processes.extend(tree(third.process.pid)) if not processes else None)
    said = str(caught.value)
    assert f"engine process {second.process.pid} (39 GiB)" in said
    assert "export EAGLECHECK_GPU_WAIT=" in said
    assert "--gpu-share" in said
    assert survivors(processes) == []


def test_shares_of_other_sizes_are_counted_as_they_are(booted, refused):
    booted(60.0)
    assert "19.2 GiB of 79.2 GiB left" in refused(30.0)
    booted(15.0)
    assert [slot for _, slot in held()] == [0, 1]


def test_the_emptiest_of_several_cards_is_taken_of_those_that_are_visible(booted, machine, monkeypatch):
    machine.say(cards=[IDLE, IDLE_SECOND])
    uuids = [booted(20.0).lease["uuid"] for _ in range(4)]
    assert sorted(uuids) == sorted([H100, SECOND] * 2)
    assert set(uuids[:2]) == {H100, SECOND}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert booted(20.0).handshakes[0]["visible"] == SECOND


@pytest.fixture
def stranger():
    """A process that is no engine of ours."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_card_with_a_foreign_process_is_refused_and_the_process_named(booted, refused, machine, stranger):
    foreign = app(stranger.pid, name="train.py", mib=20480)
    machine.say(cards=[used(20480)], apps=[foreign])
    said = refused(4.0, seconds=1)
    assert f"taken by process {stranger.pid} (train.py, 20 GiB), which is no engine of ours" in said
    assert "choose another card:  export CUDA_VISIBLE_DEVICES=UUID" in said
    assert held() == []
    machine.say(cards=[used(20480), IDLE_SECOND], apps=[foreign])
    assert booted(4.0).lease["uuid"] == SECOND


def test_beside_engines_a_foreign_process_is_foreign_and_theirs_are_not(booted, refused, machine, stranger):
    own = app(booted(4.0).handshakes[0]["pid"])
    machine.say(cards=[used(2048)], apps=[own])
    assert booted(4.0).lease["slot"] == 1
    machine.say(cards=[used(22528)], apps=[own, app(stranger.pid, mib=20480)])
    assert f"taken by process {stranger.pid} " in refused(4.0)


def test_what_an_engine_really_has_is_written_beside_its_share(booted, machine, stranger):
    one = booted()
    assert one.lease["used_mib"] is None, "the driver names no process of it"
    lease = leases.Lease(card=leases.states(leases.request())[0].card, share=4096, slot=0, lock=-1)
    apps = [app(one.process.pid, mib=500), app(one.handshakes[0]["pid"], mib=1300), app(stranger.pid, mib=1200)]
    machine.say(cards=[used(3000)], apps=apps)
    assert leases.used_mib(lease, one.process.pid) == 1800
    machine.say(cards=[used(3000)], apps=[*apps, app(one.process.pid, mib="[N/A]")])
    assert leases.used_mib(lease, one.process.pid) is None


def test_a_process_that_is_only_ending_is_waited_for(engine, machine, stranger):
    machine.say(cards=[used(2048)], apps=[app(stranger.pid)])
    one, said = engine(), []
    threading.Timer(2.0, machine.say).start()
    one.boot(progress=said.append)
    assert held() == [(one.process.pid, 0)]
    assert "waiting for a GPU lease" in said[0]


def test_memory_that_nobody_accounts_for_is_refused_too(refused, machine):
    machine.say(cards=[used(79000)])
    said = refused(4.0, seconds=1)
    assert "2 GiB of 79.2 GiB left\n" in said
    assert "nvidia-smi" in said
    assert "--gpu-share" in said


def test_a_process_from_outside_the_container_is_foreign_on_a_card_without_leases_only(booted, refused, machine):
    gone = subprocess.Popen(["true"])
    gone.wait()  # a number that is no process here
    outside = {"cards": [used(2048)], "apps": [app(gone.pid, name="[Not Found]")]}
    machine.say(**outside)
    assert f"taken by process {gone.pid} " in refused(4.0)
    machine.say()
    booted(4.0)
    machine.say(**outside)
    booted(4.0)
    assert len(held()) == 2


def test_an_engine_that_fails_to_boot_gives_its_lease_back(engine):
    with pytest.raises(EngineError, match="CUDA out of memory") as caught:
        engine(fails="CUDA out of memory").boot()
    assert held() == []
    ending, _, hint = str(caught.value).partition("it ends with:")[2].rpartition("\n")
    assert ending.endswith("RuntimeError: CUDA out of memory")
    assert "started with --server-arg 'fails=CUDA out of memory'; leave out" in hint


def test_a_tool_that_fails_while_a_lease_is_taken_is_reported(engine, machine):
    one = engine()
    machine.say(cards=["Unable to determine the device handle for GPU0"], code=15)
    with pytest.raises(NoLease, match=r"nvidia-smi failed \(exit 15\): Unable to determine"):
        one.boot()


def test_a_lock_file_counts_only_while_it_is_held(booted, machine):
    machine.leases.mkdir()
    (machine.leases / f"{H100}.0").write_text('{"pid": 1, "share": 80000}')
    one = booted()
    assert held() == [(one.process.pid, 0)]


def test_a_slot_that_somebody_holds_without_a_word_is_left_to_them(engine, machine):
    lock = lease_files.hold(str(machine.leases), H100, 0, share=1)
    os.ftruncate(lock, 0)
    try:
        one = engine()
        one.boot()
        assert one.lease["slot"] == 1
    finally:
        os.close(lock)


def test_two_processes_that_look_at_once_do_not_both_get_the_last_share(engine, machine, patience):
    machine.say(seconds=0.3)  # long looks: without the gate both would see an empty card
    patience(0)
    both = [engine(60.0), engine(60.0)]
    failed = []

    def boot(one):
        try:
            one.boot()
        except NoLease as error:
            failed.append(str(error))

    threads = [threading.Thread(target=boot, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held()) == 1
    assert len(failed) == 1


def test_the_lock_files_can_be_used_by_every_user_and_links_are_refused(machine, tmp_path):
    os.close(lease_files.hold(str(machine.leases), H100, 0, share=1))
    assert oct(machine.leases.stat().st_mode)[-4:] == "1777"
    assert oct((machine.leases / f"{H100}.0").stat().st_mode)[-3:] == "666"
    (tmp_path / "precious").write_text("keep")
    (machine.leases / f"{H100}.1").symlink_to(tmp_path / "precious")
    with pytest.raises(CardError, match="export EAGLECHECK_LEASES="):
        lease_files.hold(str(machine.leases), H100, 1, share=1)
    assert (tmp_path / "precious").read_text() == "keep"


@pytest.mark.parametrize(
    ("typed", "variables", "said"),
    [
        (100.0, {}, "--gpu-share 100: no GPU here has a share of that size"),
        (0.0, {}, "allowed: GiB above 0, at most 79.2"),
        (None, {"EAGLECHECK_GPU_SHARE": "100"}, "EAGLECHECK_GPU_SHARE 100: no GPU here"),
        (None, {"EAGLECHECK_GPU_SHARE": "four"}, "EAGLECHECK_GPU_SHARE is 'four', not a number"),
        (None, {"EAGLECHECK_GPU_WAIT": "-1"}, "EAGLECHECK_GPU_WAIT is '-1', not a number"),
    ],
)
def test_a_share_that_cannot_be_is_refused_at_once(monkeypatch, typed, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CardError, match=said.replace("(", r"\(")):
        leases.request(typed)


def test_what_was_typed_comes_before_the_environment_and_that_before_the_default(monkeypatch):
    assert leases.request().share == 4096
    monkeypatch.setenv("EAGLECHECK_GPU_SHARE", "2.5")
    assert leases.request().share == 2560
    assert leases.request(3).share == 3072


def test_description_names_holders_strangers_and_what_is_left(booted, machine, stranger):
    one = booted()
    machine.say(cards=[IDLE, IDLE_SECOND], apps=[app(stranger.pid, uuid=SECOND, name="train.py")])
    first, second = leases.describe()
    assert f"leased to engine process {one.process.pid} (39 GiB); 10 leases of 4 GiB to be had" in first
    assert f"taken by process {stranger.pid} (train.py, 2 GiB), which is no engine of ours; 0 leases" in second
    assert leases.open_count(leases.request(4)) == 10
