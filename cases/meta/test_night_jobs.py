"""A night whose cells are driven side by side in several processes: shared out, lost, interrupted, and as in one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from cases.meta import nights, pretended_engine, results
from cases.meta.command_line import call
from cases.meta.handmade import set_on
from cases.meta.nights import ByHand
from cases.meta.processes import survivors, tree, wait_until
from harness.archive.faults import WriteError
from harness.cli import night as night_command
from harness.cli import nightly
from harness.contract.types import Outcome
from harness.engines.errors import EngineError
from harness.night import jobs, store
from harness.night.cells import Cell
from harness.night.document import document
from harness.night.jobs import Setup, drive
from harness.night.judge import judge
from harness.night.waiting import Waiting, groups

NIGHT = ("matrix", "--nights", "nights", "--engines", "0.5.13,0.5.23", "--cases", "pr25015,pr26329", "--seed", "5")


def cell(name, *scenarios, engine="0.5.13", **settings):
    """Fixed scenarios of one boot configuration, which differs from others' by its settings."""
    named = [results.named(one) for one in scenarios or ("a",)]
    made = [set_on(one, **settings) for one in named]
    return Cell(engine=engine, kind="fixed", name=name, scenarios=tuple(made))


# Who takes what


def taken(waiting, **options):
    group = waiting.take(**{"last": "", "busy": (), **options})
    return None if group is None else [one.name for one in group.cells]


def test_cells_of_one_boot_configuration_are_taken_together():
    made = [cell("x"), cell("other", max_running_requests=4), cell("y"), cell("x", engine="0.5.23")]
    assert [[one.key for one in group.cells] for group in groups(made)] == [
        ["0.5.13/fixed/x", "0.5.13/fixed/y"],
        ["0.5.13/fixed/other"],
        ["0.5.23/fixed/x"],
    ]


def test_the_longest_is_taken_first_and_a_release_that_was_imported_is_kept():
    made = [cell("short"), cell("long", *"abcdef", max_running_requests=4), cell("new", *"abcdefgh", engine="0.5.23")]
    waiting = Waiting.of(made, device="cpu")
    assert taken(waiting) == ["long"], "of the release that most is left of"
    assert taken(waiting, last="0.5.13") == ["short"]
    assert taken(waiting, last="0.5.13") == ["new"]
    assert taken(waiting, last="0.5.13") is None


def test_processes_are_spread_over_releases():
    old = [cell(f"old-{size}", max_running_requests=size) for size in (1, 2, 4)]
    waiting = Waiting.of(
        [*old, cell("new", engine="0.5.23"), cell("new-2", engine="0.5.23", max_running_requests=2)], device="cpu"
    )
    busy = []
    for release in ("0.5.13", "0.5.23", "0.5.13"):
        busy.append(waiting.take(last="", busy=busy))
        assert busy[-1].release == release


def test_several_ranks_are_begun_first_and_few_at_once():
    made = [cell("one"), *(cell(f"tp-{size}", tp_size=2, max_running_requests=size) for size in (1, 2, 4))]
    waiting = Waiting(groups=Waiting.of(made, device="cuda").groups, together=2)
    busy = [waiting.take(last="", busy=()) for _ in range(2)]
    assert [group.ranks for group in busy] == [True, True]
    assert taken(Waiting(groups=[*waiting.groups], together=2), busy=busy[:1], ahead=True) == ["one"]
    assert taken(waiting, busy=busy) == ["one"]
    assert taken(waiting, busy=busy) is None
    assert taken(waiting, busy=busy[:1]) == ["tp-4"]


def test_six_cells_with_several_ranks_are_driven_at_once_on_cards():
    made = [cell(f"tp-{size}", tp_size=2, max_running_requests=size) for size in range(1, 9)]
    waiting = Waiting.of(made, device="cuda")
    busy = []
    while (group := waiting.take(last="", busy=busy)) is not None:
        busy.append(group)
    assert len(busy) == 6


@pytest.mark.parametrize(("cores", "together"), [(1, 1), (8, 2), (32, 8)])
def test_ranks_take_two_cores_each_on_a_cpu(monkeypatch, cores, together):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert Waiting.of([cell("x")], device="cpu").together == together


# What processes make of it, on engines that answer by hand


def kill(folder, scenario):
    """End this process; not twice in `kills-once`."""
    mark = folder / f"{scenario.name}-was-here"
    if scenario.name == "kills" or not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Answered(Setup):
    """Engines that answer by the name of the scenario."""

    def _engines(self, logs):
        return Named(self.folder)


class Named(ByHand):
    def __init__(self, folder):
        super().__init__(results.sound)
        self.folder = folder

    def __call__(self, scenario, **options):
        answers = {"bad": results.one_ahead, "unknown": EngineError("gone"), "full": OSError(errno.ENOSPC, "full")}
        self.answers = [answers.get(scenario.name, results.sound)]
        if scenario.name.startswith("kills"):
            kill(self.folder, scenario)
        return super().__call__(scenario, **options)

    def expect(self, launches, *, now):
        for _release, name in launches[: self.ahead]:
            (self.folder / f"expected-{name}").touch()


def drive_all(folder, cells, *, jobs, **options):
    folder.mkdir()
    found = []
    drive(Answered(environments={}, folder=folder, **options), cells, jobs=jobs, done=found.append)
    return {one.key: one for one in found}


CELLS = [
    cell("good", "a", "b"),
    cell("bad", "a", "bad", "c", max_running_requests=2),
    cell("unknown", "unknown", "b", max_running_requests=4),
    cell("ranks", tp_size=2),
    cell("good", engine="0.5.23"),
    cell("bad", "bad", engine="0.5.23", max_running_requests=2),
]


def judged(found):
    one = nights.night(*(found[cell.key].model_copy(update={"seconds": 0.0}) for cell in CELLS))
    return document(judge(one, past=[], known=[], today=nights.TODAY))


def test_a_night_in_several_processes_is_judged_as_one_in_one(tmp_path):
    alone = drive_all(tmp_path / "alone", CELLS, jobs=1)
    together = drive_all(tmp_path / "together", CELLS, jobs=2, ahead=1)
    assert judged(together) == judged(alone)
    assert {one.verdict for one in together.values()} == {Outcome.PASS, Outcome.FAIL, Outcome.UNKNOWN}
    for found in together.values():
        for seen in found.findings:
            assert (tmp_path / "together" / seen.reproducer).is_dir()


def test_a_process_that_dies_leaves_its_cells_to_others_and_a_cell_that_ended_two_is_unknown(tmp_path):
    two, four = {"max_running_requests": 2}, {"max_running_requests": 4}
    cells = [cell("x", "kills", "b"), cell("y"), cell("once", "kills-once", **two), cell("z", **four)]
    found = {one.name: one for one in drive_all(tmp_path / "night", cells, jobs=2).values()}
    assert {name for name, one in found.items() if one.verdict is Outcome.PASS} == {"y", "once", "z"}
    lost = found["x"]
    assert (lost.verdict, lost.scenarios, lost.unknown) == (Outcome.UNKNOWN, 2, 2)
    (why,) = lost.reasons
    assert why.startswith("the process that drove it ended with SIGKILL, the second one that did; its logs: ")
    assert (Path(why.rpartition(" ")[2]) / "job.log").is_file()


def test_a_process_boots_ahead_what_it_drives_next(tmp_path):
    """Else it would hear of it only when the engine is needed."""
    made = [cell(f"x-{size}", max_running_requests=size) for size in (1, 2, 4, 8)]
    drive_all(tmp_path / "night", made, jobs=2, ahead=1)
    assert list((tmp_path / "night").glob("expected-*"))


def test_a_full_disk_in_a_process_ends_the_night(tmp_path):
    with pytest.raises(WriteError, match="the disk is full"):
        drive_all(tmp_path / "night", [cell("x", "full"), cell("y", max_running_requests=2)], jobs=2)


class Stuck:
    """A process that ends when it is killed and not before; `clock` goes on while it is waited for."""

    def __init__(self, clock):
        self.clock, self.asked, self.pid = clock, [], 0

    def terminate(self):
        self.asked.append(("told", self.clock[0]))

    def join(self, seconds=0.0):
        self.clock[0] += seconds

    def kill(self):
        self.asked.append(("killed", self.clock[0]))


def test_all_processes_are_told_to_end_and_have_one_time_for_that(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    made = [jobs._Job(process=Stuck(clock), pipe=None, logs=tmp_path) for _ in range(14)]
    waiting = Waiting(groups=[], together=1)
    setup = Setup(environments={}, folder=tmp_path)
    ending = jobs._Jobs(setup=setup, cells=[], most=14, done=print, waiting=waiting, _busy=made[:9], _ending=made[9:])
    ending._end()
    assert {tuple(one.process.asked) for one in made} == {(("told", 0.0), ("killed", jobs.ENDING_SECONDS))}


# From the command line, on engines that do not start


@pytest.fixture
def work(work, monkeypatch):
    for module in (nightly, night_command):
        monkeypatch.setattr(module, "today", lambda: nights.TODAY)
    return work


def night_of(work, *more):
    """(exit code, the judged document without what differs from one night to the next, what was printed)."""
    done = call(*NIGHT, "--json", "out.json", *more)
    made = json.loads((work / "out.json").read_text())
    for one in made["cells"]:
        one["seconds"] = one["waited"] = 0
        one["reasons"] = [why.partition(";")[0] for why in one["reasons"]]
    made["incomplete"] = [why.partition(";")[0] for why in made["incomplete"]]
    return done.exit_code, {name: made[name] for name in made if name != "night"}, done.stdout


def test_a_night_says_how_many_processes_drove_it_and_each_line_has_its_cell(work):
    pretended_engine.furnish(work / "home")
    alone, together = night_of(work), night_of(work, "--jobs", "3")
    assert together[:2] == alone[:2]
    assert alone[0] == 3
    lines = [line for line in together[2].partition("\n\n")[0].splitlines() if line.startswith("UNKNOWN")]
    assert sorted(line.split()[1] for line in lines[:4]) == sorted(one["key"] for one in alone[1]["cells"])
    assert "4 cells, in 3 processes, seed 5" in together[2]
    assert [one.plan.jobs for one in store.nights(work / "nights")] == [1, 3]


def test_a_shard_may_be_driven_by_several_processes(work):
    pretended_engine.furnish(work / "home")
    for number, several in ((1, "2"), (2, "1")):
        call(*NIGHT[:2], "shards", *NIGHT[3:], "--shard", f"{number}/2", "--jobs", several, code=0)
    assert call("night", "shards").exit_code == 3, "engines did not start"
    (merged,) = store.nights(work / "nights")
    assert (merged.plan.jobs, len(merged.night.cells), merged.night.faults) == (3, 4, ())


ONE_ENDS = f"""
if mkdir $HOME/once 2>/dev/null; then
{pretended_engine.ENDS}
fi
touch $HOME/slept-$$
{pretended_engine.SLEEPS}
"""


def test_an_interrupt_ends_all_processes_and_the_night_goes_on_with_what_is_left(work):
    pretended_engine.furnish(work / "home", body=ONE_ENDS)
    command = (*NIGHT, "--jobs", "2")
    process = pretended_engine.start(*command, cwd=work, home=work / "home", HOME=str(work), TMPDIR="/tmp")
    wait_until(
        lambda: list(work.glob("nights/*/cells.jsonl")) and len(list(work.glob("slept-*"))) == 2, process=process
    )
    processes = tree(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 3, said
    assert survivors(processes) == []
    (night,) = store.nights(work / "nights")
    assert night.night is None
    (before,) = store.done(night.folder).values()
    assert f"the night {night.plan.id} never finished, 1 of 4 cells driven" in said
    assert f"  drive the others:  eaglecheck {' '.join(command)} --resume {night.plan.id}\n" in said
    shutil.rmtree(work / "home")
    pretended_engine.furnish(work / "home")
    done = call(*NIGHT, "--jobs", "3", "--resume", night.plan.id)
    (whole,) = store.nights(work / "nights")
    assert whole.night is not None, done.output
    assert whole.plan.jobs == 3
    assert before in whole.night.cells
    assert len(whole.night.cells) == 4


def test_a_night_that_is_killed_leaves_no_process_behind(work):
    pretended_engine.furnish(work / "home", body=ONE_ENDS)
    process = pretended_engine.start(*NIGHT, "--jobs", "2", cwd=work, home=work / "home", HOME=str(work), TMPDIR="/tmp")
    wait_until(lambda: len(list(work.glob("slept-*"))) == 2, process=process)
    processes = tree(process.pid)
    process.kill()
    process.communicate()
    assert survivors(processes) == []
