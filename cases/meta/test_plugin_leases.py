"""`pytest --device cuda` on cards that are not there: workers, leases, boots; all that goes wrong is reported."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from cases.meta import pretended_sglang
from cases.meta.pretended_card import H100, IDLE, IDLE_SECOND, app, used
from harness.both_sides import lease_files
from harness.suite.plugin import pytest_xdist_auto_num_workers

#: An inner test asks for an engine by its boot configuration; who booted what is written down.
INNER = """
import os, signal, time, pytest
from pathlib import Path
from cases.meta import pretended_sglang
SITE = Path({site!r})

@pytest.fixture
def boot(engines):
    def boot(mark="one"):
        before = engines.boots
        engine = engines.use(pretended_sglang.launch(SITE, engines.lease, mark=mark))
        if engines.boots > before:
            with open("boots", "a") as file:
                file.write(f"{{os.environ.get('PYTEST_XDIST_WORKER', 'main')}} {{mark}} {{engine.lease['slot']}}\\n")
        return engine
    return boot
"""


@pytest.fixture
def run(inner_session, tmp_path, machine):
    """run(text, *options, **environment): an inner session on the machine's cards."""
    site = pretended_sglang.furnish(tmp_path / "site")

    def inner(text, *options, **environment):
        given = {**machine.environment, **environment}
        return inner_session(INNER.format(site=str(site)) + text, "--device=cuda", *options, **given)

    return inner


def boots(folder):
    """(worker, configuration, slot) of every boot, in order."""
    return [tuple(line.split()) for line in (folder / "boots").read_text().splitlines()]


def held(machine):
    return lease_files.holders(str(machine.leases), H100)


PLAIN = "def test_one(): pass\n"


def workers(device, share=None):
    """What `-n auto` is with these options; None leaves it to xdist."""
    given = {"--device": device, "--gpu-share": share}
    return pytest_xdist_auto_num_workers(SimpleNamespace(getoption=given.__getitem__))


@pytest.fixture(autouse=True)
def _outer_session_says_nothing(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)


@pytest.mark.parametrize(
    ("cards", "others", "share", "named", "count"),
    [
        ([IDLE], 0, 39.0, {}, 2),
        ([IDLE], 0, 79.0, {}, 1),
        ([IDLE, IDLE_SECOND], 0, 39.0, {}, 4),
        ([used(45000)], 0, 30.0, {}, 1),
        ([IDLE], 79 * 1024, 39.0, {}, 1),  # which waits
        ([IDLE], 0, 39.0, {"PYTEST_XDIST_AUTO_NUM_WORKERS": "3"}, None),
    ],
    ids=["two-shares", "one-share", "two-cards", "half-used", "leased-to-others", "a-number-is-named"],
)
def test_n_auto_is_one_worker_a_lease_that_is_to_be_had(monkeypatch, machine, cards, others, share, named, count):
    machine.say(cards=cards)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    with open(lease_files.hold(str(machine.leases), H100, 0, share=others)) if others else nullcontext():
        assert workers("cuda", share) == count


def test_n_auto_starts_so_many(run):
    done = run(PLAIN, "-n", "auto", "--gpu-share=39")
    assert "2 workers [1 item]" in done.stdout, done.stdout + done.stderr


def test_on_a_cpu_the_cards_do_not_count(machine):
    found = []
    for cards in ([], [IDLE, IDLE_SECOND]):
        machine.say(cards=cards)
        found.append(workers("cpu"))
    assert found[0] == found[1]


def test_header_names_cards_and_leases(run):
    done = run(PLAIN, "--gpu-share=20")
    assert f"GPU 0 (NVIDIA H100 80GB HBM3, {H100}): 79.2 GiB of 79.2 GiB left; 3 leases of 20 GiB" in done.stdout


@pytest.mark.parametrize("options", [[], ["-n", "auto"]], ids=["alone", "xdist"])
@pytest.mark.parametrize(
    ("answer", "share", "said"),
    [({"cards": []}, [], "lists no GPU"), ({}, ["--gpu-share=200"], "--gpu-share 200: no GPU here has a share")],
    ids=["no-card", "no-such-share"],
)
def test_what_cannot_be_on_this_machine_is_refused_before_any_test(run, machine, options, answer, share, said):
    machine.say(**answer)
    done = run(PLAIN, *options, *share)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_share_without_a_gpu_says_nothing_and_is_refused(inner_session):
    done = inner_session(PLAIN, "--gpu-share=4")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "leave it out, or add --device cuda" in done.stderr


CONFIGURATIONS = """
@pytest.fixture(autouse=True)
def written_down(request):
    with open("order", "a") as file:
        file.write(f"{os.environ['PYTEST_XDIST_WORKER']} {request.node.name}\\n")

MARKS = {name: pytest.mark.engine(boot=name) for name in "ABC"}
def every(boot, name):
    assert boot(name).process.poll() is None
    time.sleep(0.05)

@MARKS["C"]
@pytest.mark.parametrize("number", range(12))
def test_c(number, boot): every(boot, "C")
@MARKS["A"]
@pytest.mark.parametrize("number", range(12))
def test_a(number, boot): every(boot, "A")
@pytest.mark.parametrize("number", range(3))
def test_plain(number): pass
@MARKS["B"]
@pytest.mark.parametrize("number", range(12))
def test_b(number, boot): every(boot, "B")
@MARKS["A"]
@pytest.mark.parametrize("number", range(12, 16))
def test_a_late(number, boot): every(boot, "A")
"""


def _runs(folder):
    """By worker, the configurations of its tests in order, a new list wherever it went on with tests taken over."""
    order = [line.split() for line in (folder / "order").read_text().splitlines()]
    names = [f"test_{part}[{number}]" for part, numbers in SORTED for number in numbers]
    runs = {}
    for worker, name in order:
        place, mine = names.index(name), runs.setdefault(worker, [])
        if not mine or place != mine[-1][-1] + 1:
            mine.append([])
        mine[-1].append(place)
    letters = [name.split("_")[1][0] for name in names]
    return {worker: [[letters[place] for place in run] for run in mine] for worker, mine in runs.items()}


#: What the plugin's order makes of CONFIGURATIONS: one configuration after the other, plain tests last.
SORTED = (("c", range(12)), ("a", range(12)), ("a_late", range(12, 16)), ("b", range(12)), ("plain", range(3)))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_worker_boots_each_configuration_once_unless_it_takes_over_tests(run, tmp_path, machine, workers):
    done = run(CONFIGURATIONS, "-n", str(workers), "--gpu-share=20")
    assert "43 passed" in done.stdout, done.stdout
    started = boots(tmp_path)
    runs = _runs(tmp_path)
    assert len(runs) == workers
    taken_over = sum(len(mine) - 1 for mine in runs.values())
    assert len(started) <= 3 + (workers - 1) + taken_over, (started, runs)
    for worker, mine in runs.items():
        tests = [letter for run in mine for letter in run if letter != "p"]
        changes = [letter for at, letter in enumerate(tests) if at == 0 or tests[at - 1] != letter]
        assert [mark.lower() for by, mark, _ in started if by == worker] == changes
    assert {int(slot) for _, _, slot in started} <= set(range(workers)), "one lease a worker at any time"
    assert held(machine) == ()


KILLED = """
@pytest.mark.engine
@pytest.mark.parametrize("number", range(30))
def test_many(number, boot):
    boot()
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    end = time.monotonic() + 60
    while number > 3 and len(open("boots").readlines()) < 3 and time.monotonic() < end:
        time.sleep(0.05)  # what is left is for both, however long it takes until another worker is there
"""


def test_a_killed_worker_costs_one_failure_and_gives_its_lease_to_the_next(run, tmp_path, machine):
    """As many workers as leases: the replacement can only work with the lease that the dead one had."""
    done = run(KILLED, "-n", "auto", "--gpu-share=39")
    assert "1 failed, 29 passed" in done.stdout, done.stdout
    assert "incomplete" not in done.stdout
    assert "'test_inner.py::test_many[1]'" in done.stdout, "crashed while running"
    assert len(boots(tmp_path)) == 3
    assert {slot for _, _, slot in boots(tmp_path)} == {"0", "1"}
    assert held(machine) == ()


def test_an_engine_that_dies_is_reported_by_who_uses_it_and_the_next_test_gets_another(run, tmp_path, machine):
    text = """
@pytest.mark.engine
@pytest.mark.parametrize("number", range(6))
def test_many(number, boot):
    engine = boot()
    if number == 2:
        engine.process.kill()
        engine.begin(chunk=None)
"""
    done = run(text, "--gpu-share=39")
    assert "1 failed, 5 passed" in done.stdout, done.stdout
    assert "EngineLost" in done.stdout, "it did not end by a fault of its own"
    assert boots(tmp_path) == [("main", "one", "0"), ("main", "one", "0")]
    assert held(machine) == ()


def test_a_card_that_is_taken_fails_every_test_with_who_has_it_and_waits_ever_shorter(run, machine):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as stranger:
        try:
            machine.say(cards=[used(70000)], apps=[app(stranger.pid, name="train.py", mib=70000)])
            text = "@pytest.mark.parametrize('number', range(8))\ndef test_many(number, boot): boot()\n"
            done = run(text, "-n", "2", EAGLECHECK_GPU_WAIT="2")
        finally:
            stranger.kill()
    assert "8 failed" in done.stdout, done.stdout
    assert "incomplete" not in done.stdout
    assert f"taken by process {stranger.pid} (train.py, 68.4 GiB), which is no engine of ours" in done.stdout
    waited = [int(seconds) for seconds in re.findall(r"no GPU lease of 4 GiB after (\d+) s", done.stdout)]
    assert max(waited) >= 2
    assert min(waited) < 2
