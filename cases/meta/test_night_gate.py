"""The gate from the command line: shards lost, killed or doubled, engines that do not start, a full disk, no GPU.

No SGLang takes part; what a real engine shows is in cases/engine/test_night_gate.py.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from cases import known
from cases.boots import OF_FAMILY
from cases.catalogue import CaseError, load
from cases.families import FAMILIES
from cases.meta import nights, pretended_engine
from cases.meta.command_line import call
from cases.meta.pretended_card import app as card_user
from cases.meta.pretended_card import used
from cases.meta.processes import survivors, tree, wait_until
from harness.cli import night as night_command
from harness.cli import night_plan, nightly
from harness.contract.finding_pages import issues
from harness.contract.rates import interval
from harness.engines import envs
from harness.night import cells as night_cells
from harness.night import store

ROOT = Path(__file__).resolve().parents[2]
NIGHT = ("matrix", "--nights", "nights", "--engines", "0.5.13,0.5.23", "--cases", "pr25015,pr26329", "--seed", "5")


@pytest.fixture
def work(work, monkeypatch):
    for module in (nightly, night_command):
        monkeypatch.setattr(module, "today", lambda: nights.TODAY)
    pretended_engine.furnish(work / "home")
    return work


def kept(root, *made):
    """Nights put into a store as a run would have."""
    for one in made:
        store.finish(store.begin(root, one.plan), one)


def shards(root, *numbers, of=3, **changes):
    """Shards of one night, each in a folder of its own, as artifacts unpack."""
    cells = [nights.cell(name, kind="case") for name in ("a", "b", "c", "d", "e", "f", "g")]
    planned = [one.key for one in cells]
    for place, number in enumerate(numbers):
        mine = cells[number - 1 :: of]
        one = nights.night(*mine, planned=planned, shard=(number, of), id=f"shard-{number}-{place}", **changes)
        kept(root / f"artifact-{place}", one)
    return [str(root / f"artifact-{place}") for place in range(len(numbers))]


# What is missing makes it red


def test_shards_that_are_all_there_make_one_green_night(work):
    (work / "none.toml").write_text("schema = 1\n")
    done = call("night", *shards(work, 1, 2, 3), "--known", "none.toml", "--json", "out.json")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "night GREEN: 7 cells, no findings"), done.output
    document = json.loads((work / "out.json").read_text())
    assert (document["planned"], document["reported"], document["green"]) == (7, 7, True)
    assert [cell["name"] for cell in document["cells"]] == list("abcdefg"), "in the order they were planned"


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ((1, 3), "shard 2 of 3 is missing, and 2 cells with it: did its job run?"),
        ((1, 2, 3, 3), "shard 3 of 3 is there 2 times"),
        ((1, 2, 3, 3), "2 cells were reported more than once: 0.5.13/case/c, 0.5.13/case/f"),
    ],
)
def test_a_missing_or_doubled_shard_is_red_and_unknown(work, there, said):
    done = call("night", *shards(work, *there), code=3)
    assert said in done.stdout
    assert "night RED (UNKNOWN): " in done.stdout.splitlines()[-1]


def test_shards_that_are_put_together_again_are_the_same_night(work):
    """A job that is started again must not make two nights of one, which would be compared with each other."""
    there = shards(work, 1, 2, 3)
    call("night", *there[:2], code=3)
    call("night", *there, code=0)
    (first,) = store.nights(work / "nights")
    call("night", *there, there[0], "--nights", "nights", code=0)
    (second,) = store.nights(work / "nights")
    assert (second.folder, second.night.cells) == (first.folder, first.night.cells)
    assert len(second.plan.shards) == 3
    fewer = call("night", *there[:2], code=2)
    assert "was made of these shards and of more: shard-3-2" in fewer.stderr
    assert store.nights(work / "nights") == [second]


def test_a_shard_that_was_killed_is_red_with_its_host_and_its_cells(work):
    """A real process, killed while its engine starts."""
    pretended = work / "home"
    shutil.rmtree(pretended)
    pretended_engine.furnish(pretended, body=pretended_engine.SLEEPS)
    command = (*NIGHT[:2], "killed", *NIGHT[3:], "--shard", "2/2")
    process = pretended_engine.start(*command, cwd=work, home=pretended, PYTHONPATH=str(ROOT))
    wait_until(lambda: list(work.glob("killed/*/logs/*.log")), process=process)
    processes = tree(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for left in processes[1:]:  # a shell that sleeps does not look at its connection, as an engine does
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    assert survivors(processes) == []
    (folder,) = (work / "killed").iterdir()
    assert not (folder / store.NIGHT).exists()
    done = call("night", "killed", code=3)
    shard = store.read(folder).plan
    assert f"shard 2 of 2, 2 cells, ({shard.id} on {shard.host}) never finished: it was killed" in done.stdout
    assert f"--resume {shard.id}" in done.stdout
    assert "shard 1 of 2 is missing" in done.stdout
    (merged,) = store.nights(work / "nights")
    assert merged.night is not None
    assert not merged.night.green


@pytest.fixture
def cut_off(work):
    """A night of two cells of which the first was done, and a half of the second's line was written."""
    call(*NIGHT)
    (whole,) = store.nights(work / "nights")
    (whole.folder / store.NIGHT).unlink()
    first, second = whole.night.cells[:2]
    store.add(whole.folder, first.model_copy(update={"reasons": ("of the first sitting",)}))
    with (whole.folder / store.CELLS).open("a") as file:
        file.write(second.model_dump_json()[:40])
    return whole


def test_a_night_that_was_cut_off_goes_on_with_what_is_left(cut_off):
    done = call(*NIGHT, "--resume", cut_off.plan.id)
    (night,) = store.nights(cut_off.folder.parent)
    assert night.night is not None, done.output
    assert [one.key for one in night.night.cells] == list(cut_off.plan.mine)
    first, *others = night.night.cells
    assert first.reasons == ("of the first sitting",)
    assert [one.verdict for one in others] == [one.verdict for one in cut_off.night.cells[1:]]
    assert not (night.folder / store.CELLS).exists()
    call(*NIGHT, "--resume", cut_off.plan.id, code=2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--repeats", "5"], "repeats was another when that night began\n  then 2, now 5"),
        (["--shard", "1/2"], "shard was another"),
        (["--disable-overlap-schedule"], "settings was another"),
    ],
)
def test_a_night_goes_on_with_the_same_plan_only(cut_off, more, said):
    done = call(*NIGHT, *more, "--resume", cut_off.plan.id, code=2)
    assert said in done.output


def test_a_night_goes_on_in_one_process_only(cut_off):
    before = (cut_off.folder / store.CELLS).read_bytes()
    with store.hold(cut_off.folder):
        assert "is being driven by another process" in call(*NIGHT, "--resume", cut_off.plan.id, code=2).stderr
        assert "is being driven, 1 of 4 cells are done" in call("night", code=2).stderr
        assert (cut_off.folder / store.CELLS).read_bytes() == before
    assert call(*NIGHT, "--resume", cut_off.plan.id).exit_code != 2


def test_a_night_that_was_judged_is_judged_again_in_a_store_that_cannot_be_written(work, monkeypatch):
    code = call(*NIGHT).exit_code
    monkeypatch.setattr(store, "_write", lambda *_: pytest.fail("written again"))
    call("night", code=code)


def test_a_night_does_not_go_on_in_another_state_of_the_code(cut_off, monkeypatch):
    monkeypatch.setattr(night_plan, "source_digest", lambda: "1" * 64)
    done = call(*NIGHT, "--resume", cut_off.plan.id, code=2)
    assert "source was another when that night began" in done.output


def test_a_night_that_is_not_there_cannot_go_on(cut_off):
    done = call(*NIGHT, "--resume", "20260101-000000-abcd", code=2)
    assert f"allowed: {cut_off.plan.id}" in done.output
    call("matrix", "--cases", "pr25015", "--resume", cut_off.plan.id, code=2)


def test_a_damaged_line_of_a_cell_is_no_night_to_go_on_with(cut_off):
    (cut_off.folder / store.CELLS).write_text("{}\n")
    done = call(*NIGHT, "--resume", cut_off.plan.id, code=2)
    assert "cells.jsonl cannot be read" in done.output


def test_a_night_that_was_cut_off_is_red_when_it_is_judged(work):
    store.begin(work / "nights", nights.night(nights.cell()).plan)
    done = call("night", code=3)
    assert "never finished" in done.stdout
    assert "night RED (UNKNOWN): " in done.stdout.splitlines()[-1]
    assert [kept.night for kept in store.nights(work / "nights")] == [None]


def test_engines_that_do_not_start_make_a_night_red_with_the_end_of_their_log(work):
    done = call(*NIGHT, "--json", "out.json", code=3)
    assert "boots 4 engines or more, in 2 to 8 min" in done.stdout.partition("UNKNOWN")[0], "said beforehand"
    document = json.loads((work / "out.json").read_text())
    assert (document["outcome"], document["reported"]) == ("UNKNOWN", 4)
    assert "1 of 1 scenarios of 0.5.13/case/pr25015 have no verdict: the engine ended with code 1" in done.stdout
    assert "No module named 'sglang'" in document["cells"][0]["reasons"][0]


def test_a_shard_asks_for_the_releases_of_its_own_cells_only(work, monkeypatch):
    """Others may still be on their way to the machine."""
    asked, there = [], nightly.prepare.engine_environment
    monkeypatch.setattr(nightly.prepare, "engine_environment", lambda *given: asked.append(given[0]) or there(*given))
    call(*NIGHT, "--shard", "1/2", code=0)
    assert asked == ["0.5.13"]
    call(*NIGHT)
    assert asked == ["0.5.13", "0.5.13", "0.5.23"]


# A full disk


def test_a_disk_that_fills_up_ends_a_night_as_unknown_and_leaves_no_verdict(work, small_disk):
    (small_disk / "ballast").write_bytes(bytes(64 * 1024 - 4 * 4096))
    done = call(*NIGHT[:2], small_disk, *NIGHT[3:], code=3)
    assert "the disk is full: cannot write to" in done.stderr
    assert "the night has no night.json: it is incomplete, red, and no baseline" in done.stderr
    assert not list(small_disk.glob(f"*/{store.NIGHT}"))


@pytest.mark.parametrize("option", ["junit", "summary"])
def test_a_report_that_finds_no_room_is_named_and_the_night_is_not_called_lost(work, option):
    call(*NIGHT)
    assert list((work / "nights").glob(f"*/{store.NIGHT}"))
    done = call("night", "--nights", NIGHT[2], f"--{option}", "/dev/full", code=3)
    assert f"--{option} /dev/full cannot be written: No space left on device" in done.stderr
    assert "the night itself is kept" in done.stderr


# A missing GPU


def test_a_night_without_the_gpu_it_asks_for_is_refused_at_once(work, monkeypatch):
    monkeypatch.setattr("harness.cli.prepare.has_gpu", lambda: False)
    done = call(*NIGHT, "--device", "cuda")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--device cuda: this machine has no NVIDIA GPU" in done.stderr
    assert not (work / "nights").exists()


def test_a_night_whose_gpu_is_taken_is_red_and_says_who_has_it(work, machine, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_GPU_WAIT", "0")
    machine.say(cards=[used(70000)], apps=[card_user(os.getpid(), name="train.py", mib=70000)])
    done = call(*NIGHT, "--device", "cuda", code=3)
    assert "have no verdict: " in done.stdout
    assert "night RED (UNKNOWN): 4 cells" in done.stdout.splitlines()[-1]


# Shards of other nights, damaged files, wrong options


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"device": "cuda"}, {"git_head": "1" * 40}, {"source": "1" * 64}, {"of": 4}]
)
def test_shards_of_different_nights_are_not_put_together(work, change):
    done = call("night", *shards(work / "one", 1), *shards(work / "other", 2, **change), code=2)
    assert "allowed: shards of one night" in done.stderr
    assert not (work / "nights").exists()


def test_a_shard_that_cannot_be_copied_leaves_no_night_behind(work):
    shard = nights.night(nights.cell("eagle", nights.seen()), shard=(1, 2))
    kept(work / "shard", shard)
    reproducer = work / "shard" / shard.plan.id / nights.seen().reproducer
    reproducer.mkdir(parents=True)
    os.mkfifo(reproducer / "scenario.json")
    done = call("night", "shard", code=2)
    assert "scenario.json: it is a named pipe" in done.stderr
    assert not (work / "nights").exists()


def test_a_folder_of_nights_is_no_night_of_shards(work):
    kept(work / "past", *(nights.night(nights.cell(), day=day) for day in (20, 21)))
    done = call("night", "past", code=2)
    assert "past is a folder of 2 nights" in done.stderr
    assert "eaglecheck night --nights past\n" in done.stderr
    assert call("night", "--nights", "past").exit_code != 2


def newer(path):
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (store.NIGHT, newer, "is damaged, or not of schema 1"),
        (store.PLAN, Path.unlink, "holds night.json and no plan.json"),
    ],
)
def test_a_damaged_night_is_never_passed_over(work, name, damage, said):
    kept(work / "nights", nights.over(nights.night(nights.cell(), day=20)))
    (path,) = work.glob(f"nights/*/{name}")
    damage(path)
    for command in (("night",), ("night", "nights"), ("matrix", "--nights", "nights", *ONE)):
        done = call(*command, code=2)
        assert said in done.stderr.replace("\n", " ")
        assert f"nights/{path.parent.name}" in done.stderr


def test_a_red_night_in_the_store_is_not_what_the_next_one_is_compared_with(work):
    green = nights.over(nights.night(nights.cell(), day=20))
    red = nights.over(nights.night(nights.cell("eagle", nights.seen()), day=21))
    kept(work / "nights", green, red, nights.night(nights.cell(), day=28))
    (work / "known.toml").write_text("schema = 1\n")
    done = call("night", "--known", "known.toml", code=0)
    assert f"compared with: {green.plan.id}" in done.stdout
    assert "fixed: gone since the last night that ran these cells" in done.stdout


ONE = ("--engines", "0.5.13", "--cases", "pr25015")
NIGHTS = ("matrix", "--nights", "n")
EAGLE = (*NIGHTS, "--families", "eagle")
#: What is typed, and what the refusal must name: the option and its value, or what is allowed.
BAD = {
    "no-cells": (NIGHTS, ("--cases", "--families", "pr25015")),
    "families-without-nights": (("matrix", "--families", "all"), ("--families", "--nights FOLDER")),
    "shard-without-nights": (("matrix", *ONE, "--shard", "1/2"), ("--shard", "--nights FOLDER")),
    "box-without-nights": (("matrix", *ONE, "--scenarios", "5"), ("--scenarios", "--nights FOLDER")),
    "no-engines": (("matrix", "--cases", "pr25015"), ("--engines is missing", "any other published since 0.5.11")),
    "no-cases": (("matrix", "--engines", "0.5.13"), ("--cases", "pr25015")),
    "family-unknown": ((*NIGHTS, "--families", "eagel"), ("'eagel'", "'eagle'")),
    "shard-zero": ((*EAGLE, "--seed", "1", "--shard", "0/2"), ("--shard '0/2'", "2/3")),
    "shard-without-seed": ((*EAGLE, "--shard", "1/2"), ("--shard", "--seed")),
    "more-shards-than-cells": ((*NIGHTS, *ONE, "--seed", "1", "--shard", "1/9"), ("--shard 1/9", "1 cell\n")),
    "no-jobs": ((*EAGLE, "--jobs", "0"), ("--jobs", "0")),
    "jobs-below-none": ((*EAGLE, "--jobs", "-2"), ("--jobs", "-2")),
    "jobs-words": ((*EAGLE, "--jobs", "two"), ("--jobs two", "1 to 512")),
    "jobs-without-nights": (("matrix", *ONE, "--jobs", "2"), ("--jobs", "--nights FOLDER")),
    "no-seconds": ((*EAGLE, "--seconds", "0"), ("--seconds 0",)),
    "seconds-that-are-none": ((*EAGLE, "--seconds", "nan"), ("--seconds nan",)),
    "night-in-a-file": (("night", "--nights", "file"), ("--nights file",)),
    "summary-is-a-folder": (("night", "--nights", "empty", "--summary", "empty"), ("--summary", "empty")),
    "shard-words": ((*NIGHTS, *ONE, "--seed", "1", "--shard", "first"), ("--shard 'first'", "2/3")),
    "seconds-without-end": ((*NIGHTS, *ONE, "--seconds", "inf"), ("--seconds inf",)),
    "two-reverts": ((*NIGHTS, *ONE, "--revert", "25015,26329"), ("--revert: ",)),
    "nothing-runs-there": (
        (*NIGHTS, "--engines", "0.5.11", "--families", "mtp"),
        ("--engines 0.5.11", "--families mtp is planned", "before 0.5.17, though run drives it (F-023 "),
    ),
    "page": ((*NIGHTS, "--families", "paged", "--page", "4"), ("--page", "--families paged")),
    "no-night": (("night", "--nights", "empty"), ("empty", "eaglecheck matrix --nights empty")),
    "no-shard": (("night", "empty"), ("empty", "eaglecheck matrix", "--shard 1/2")),
    "no-shard-folder": (("night", "nowhere"), ("nowhere is no folder", "--shard 1/2")),
    "nothing-to-resume": ((*NIGHTS, *ONE, "--seed", "1", "--resume", "x"), ("unfinished night 'x'", "--nights n")),
    "known-missing": (("night", "--known", "nowhere.toml"), ("nowhere.toml", "--known FILE")),
}


def test_a_reproducer_that_is_gone_is_not_offered_for_a_replay(work):
    kept(work / "nights", nights.night(nights.cell("eagle", nights.seen()), day=28))
    (folder,) = (path.parent for path in work.glob("nights/*/plan.json"))
    (work / "known.toml").write_text("schema = 1\n")
    judge = ("night", "--known", "known.toml", "--json", "night.json")
    assert "eaglecheck replay" not in call(*judge).stdout
    assert json.loads((work / "night.json").read_text())["findings"][0]["reproducer"] is None
    (folder / nights.seen().reproducer).mkdir(parents=True)
    assert f"eaglecheck replay nights/{folder.name}/{nights.seen().reproducer}" in call(*judge).stdout


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_before_anything_slow(work, name, monkeypatch):
    monkeypatch.setattr("harness.engines.engine.Engine.boot", lambda *_, **__: pytest.fail("an engine was booted"))
    monkeypatch.setattr("cases.catalogue.names", lambda: ["pr25015", "pr26329"])
    (work / "empty").mkdir()
    (work / "file").touch()
    typed, named = BAD[name]
    done = call(*typed)
    assert (done.exit_code, done.stdout) == (2, "")
    assert not [word for word in named if word not in done.stderr], done.stderr
    assert {path.name for path in work.iterdir()} == {"empty", "file", "home"}, "a refused command leaves nothing"


KNOWN = """schema = 1
[[known]]
issue = "F-004"
what = "x"
signatures = ["TOKEN:finish:ACCEPT:ran-past-stop"]
engines = ["0.5.13"]
cells = ["generated/*"]
expires = 2027-05-31
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (KNOWN.replace("expires = 2027-05-31\n", ""), "expires"),
        (KNOWN + "expire = 2027-05-31\n", "unknown key 'expire'; did you mean 'expires'?"),
        (KNOWN.replace("TOKEN:finish", "TOKEN"), "signatures.0"),
        (KNOWN.replace("generated/*", "anything"), "cells.0"),
        (KNOWN + "rate = 0.0\n", "rate"),
        (KNOWN + KNOWN.partition("\n")[2], "is named twice"),
        (KNOWN.replace("schema = 1", "schema = 2"), "schema"),
        ("schema = ", "is not TOML"),
    ],
)
def test_a_known_file_is_read_as_it_stands_and_refused_with_its_place_where_it_has_a_fault(tmp_path, text, said):
    path = tmp_path / "known.toml"
    path.write_text(KNOWN)
    (entry,) = known.read(path)
    assert (entry.issue, entry.expires, entry.rate) == ("F-004", datetime.date(2027, 5, 31), 1.0)
    path.write_text(text)
    with pytest.raises(CaseError) as caught:
        known.read(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_our_own_entries_can_still_be_shown_by_a_cell_that_a_night_has():
    planned, _ = night_cells.plan(
        engines=envs.SUPPORTED,
        cases=[],
        families=list(FAMILIES.values()),
        limits=night_cells.Limits(scenarios=1, seconds=1.0, seed=1),
    )
    for entry in known.read():
        for engine in entry.engines:
            assert any(entry.asked(engine=engine, place=f"{one.kind}/{one.name}") for one in planned), entry.issue


def test_our_own_rates_are_the_lower_ends_of_what_was_counted():
    """Beside each rate stands what it was counted from; nothing there is a guess."""
    ours = [night for one in issues().values() for night in one.nights]
    assert len(ours) == len(known.read())
    for night in ours:
        low = 1.0 if night.counted is None else interval(*night.counted)[0]
        assert low * 0.9 < night.rate < low * 1.15, night


def test_what_a_family_assumes_has_no_entry_for_its_cells():
    """It cannot show there, so that an entry would be stale from the first night on."""
    assumed = {name: {one for boot in family.boots for one in boot.assumes} for name, family in FAMILIES.items()}
    entries = known.read()
    assert entries
    for entry in entries:
        families = {cell.split("/")[1] for cell in entry.cells if not cell.startswith("case/")}
        assert not [name for name in families if entry.issue in assumed.get(name, ())], entry


# The plan


def test_every_cell_is_in_exactly_one_shard():
    plan = nights.night(*(nights.cell(str(number)) for number in range(11))).plan
    dealt = [key for number in (1, 2, 3) for key in plan.model_copy(update={"shard": (number, 3)}).mine]
    assert sorted(dealt) == sorted(plan.planned)


def test_shards_last_alike_where_it_is_known_how_long_cells_take():
    plan = nights.night(*(nights.cell(str(number)) for number in range(11))).plan
    plan = plan.model_copy(update={"costs": (10, 10, 10, 60, 10, 10, 10, 30, 10, 10, 10)})
    shares = [plan.share(number, 3) for number in (1, 2, 3)]
    assert [key for share in shares for key in share] == list(plan.planned), "neighbours, which share a release"
    assert [[key.rpartition("/")[2] for key in share] for share in shares] == [
        ["0", "1", "2"],
        ["3", "4", "5", "6"],
        ["7", "8", "9", "10"],
    ]
    lone = plan.model_copy(update={"costs": (600, *(1 for _ in range(10)))})
    assert [len(lone.share(number, 3)) for number in (1, 2, 3)] == [0, 1, 10]


def test_a_release_gets_only_the_cells_it_is_new_enough_for():
    limits = night_cells.Limits(scenarios=12, seconds=60.0, seed=1)

    def names(engine):
        made, _ = night_cells.plan(engines=[engine], cases=[], families=list(FAMILIES.values()), limits=limits)
        return {f"{cell.kind}/{cell.name}" for cell in made}

    assert "fixed/mtp/layers" in names("0.5.17")
    assert not [name for name in names("0.5.13") if "/mtp" in name]
    assert "generated/tree/tree" not in names("0.5.12.post1")
    assert {f"generated/eagle/{boot.name}" for boot in OF_FAMILY["eagle"] if boot.planned_on("0")} <= names("0.5.11")


def test_a_night_that_never_finished_is_named_and_counts_for_nothing(work):
    cut_off = nights.night(nights.cell(), day=20).plan
    store.begin(work / "nights", cut_off)
    kept(work / "nights", nights.night(nights.cell(), day=28))
    (work / "known.toml").write_text("schema = 1\n")
    done = call("night", "--known", "known.toml", code=0)
    assert f"an earlier night never finished, and counts for nothing: {cut_off.id}" in done.stdout
    assert "compared with: nothing, since there is no green night yet" in done.stdout


def test_what_needs_more_gpus_than_there_are_is_not_planned_and_not_missed():
    """On a CPU ranks need none; a case or boot of two ranks has no cell where one GPU is."""
    limits = night_cells.Limits(scenarios=4, seconds=1.0, seed=1)

    def keys(cards):
        cases, families = [load("pr25109"), load("pr25015")], [FAMILIES["dp"], FAMILIES["eagle"]]
        made, _ = night_cells.plan(
            engines=["0.5.13"], cases=cases, families=families, limits=limits, place=night_cells.Place(cards=cards)
        )
        return {cell.key for cell in made}

    assert keys(None) == keys(2)
    gone = keys(2) - keys(1)
    assert {"0.5.13/case/pr25109", "0.5.13/fixed/dp/dp"} <= gone
    assert not any("eagle" in key or "pr25015" in key for key in gone)
    assert not any("dp" in key for key in keys(1))


def test_of_a_release_that_has_no_cell_it_is_said_what_is_not_planned_and_why(work):
    asked = night_plan.Asked(nights=work, engines="0.5.11,0.5.23", families="hicache", scenarios=0, seed=1)
    cells, left = night_plan.checked_cells(asked)
    assert {cell.engine for cell in cells} == {"0.5.23"}
    said = night_plan.planned(asked, cells, left, (1, 1)).not_planned
    assert "hierarchical_cache, and it is not driven on SGLang 0.5.11: " in said[0]
    assert all("(0.5.11: hicache " in line for line in said)


def test_a_case_brings_what_its_window_says():
    limits = night_cells.Limits(scenarios=0, seconds=1.0, seed=1)
    made, _ = night_cells.plan(engines=["0.5.11", "0.5.13"], cases=[load("pr25015")], families=[], limits=limits)
    assert [(cell.expected, cell.expected_kinds) for cell in made] == [("FAIL", ("POSITION",)), ("PASS", ())]


# What CI reads


def test_artifacts_of_a_night_are_what_replay_takes_wherever_they_are_unpacked(work, monkeypatch):
    """Zipped and unpacked elsewhere without modes or links, as an artifact store does it."""
    from cases.meta import results

    run = results.store(work / "runs", ("pr25015", results.one_ahead))
    (reproducer,) = (run / "reproducers").iterdir()
    one = nights.night(nights.cell("eagle", nights.seen(reproducer=f"reproducers/{reproducer.name}")), shard=(1, 1))
    folder = store.begin(work / "part", one.plan)
    shutil.copytree(reproducer, folder / "reproducers" / reproducer.name)
    store.finish(folder, one)
    with zipfile.ZipFile(work / "artifact.zip", "w") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                assert not set(path.name) & set('":<>|*?\r\n'), "an artifact store refuses such a name"
                file.writestr(str(path.relative_to(work / "part")), path.read_bytes())
    with zipfile.ZipFile(work / "artifact.zip") as file:
        file.extractall(work / "elsewhere")
    shutil.rmtree(work / "part")
    shutil.rmtree(work / "runs")
    call("night", "elsewhere", "--nights", "nights", "--json", "out.json", code=1)
    (group,) = json.loads((work / "out.json").read_text())["findings"]
    (merged,) = (work / "nights").iterdir()
    replayed = call("replay", merged / group["reproducer"])
    assert "the engine ended with code 1 while booting" in replayed.output, "it got as far as starting the engine"
    assert replayed.exit_code == 3


def test_junit_counts_cells_and_fails_those_with_something_new(work):
    one = nights.night(nights.cell("eagle", nights.seen()), nights.cell("tree", nights.seen(nights.STOP)))
    kept(work / "nights", one)
    (work / "known.toml").write_text(KNOWN.replace("generated/*", "fixed/*"))
    call("night", "--junit", "out.xml", "--known", "known.toml", code=1)
    root = ElementTree.parse(work / "out.xml").getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("3", "1", "0")
    failed = {case.get("name"): case.find("failure") is not None for case in root.iter("testcase")}
    assert failed == {"eagle": True, "tree": False, "gate": False}
    tree = next(case for case in root.iter("testcase") if case.get("name") == "tree")
    properties = {each.get("name"): each.get("value") for each in tree.iter("property")}
    assert properties[f"known:{nights.STOP}"] == "3/3"
    assert properties["accept_length"] == "1.9000"
