"""Mutants of a source: what is changed, that only that is, that functions run it, and what a report counts."""

import gc
import io
import json
import sys
import types
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from cases.families import FAMILIES
from cases.fixed import default_scenarios
from cases.meta import handmade, results
from cases.programs import EXERCISES
from harness.archive.faults import WriteError
from harness.both_sides.codes import changed, compiled, placed
from harness.cli.mutate import NAME, _drawn
from harness.cli.report import _document
from harness.contract.types import Outcome
from harness.contract.usage import UsageError
from harness.engine_side.host import executed, source_swap
from harness.engines.errors import EngineError, EngineNotClean, NoLease
from harness.engines.process import Launch
from harness.search import faults, mutant_results
from harness.search.executed import Followed, One, Sound, assume, merged
from harness.search.faults import draw
from harness.search.mutant_results import Explanation, Result, Status, label
from harness.search.mutate import MutantRunner
from harness.search.mutate_report import Report, document
from harness.search.operators import changes
from harness.search.tasks import ASKING, OF_TEXTS, Place, Task, Waiting, rounds, together
from harness.search.text import render_mutate_report
from harness.search.workers import Boot, Setup
from reports.page import Beside, render_page
from reports.reading import read_report

SOURCE = '''"""Stays as it is: 1."""
LIMIT = 3


def pick(rows, lens, positions, *, last=True):
    """Never changed: 0."""
    kept = rows[1 : len(lens)].clone()
    if last and len(lens) > 2:
        kept = kept + positions
    logger.info("%s", kept[0])
    lens.add_(1)
    out = torch.cat(kept, lens)
    out = (
        mix(out, 2, dim=0, keep=True)
    )
    return out


@triton.jit
def kernel(rows):
    return rows + 1
'''
TENSOR = ["torch.int64", 4]


def lines(*numbers, **tensors):
    return {number: tensors if number == 9 else {} for number in numbers}


def afters(source=SOURCE, ran=None, **tensors):
    """operator -> everything that it makes of the source."""
    ran = ran if ran is not None else lines(*range(1, source.count("\n") + 1), **tensors)
    found = {}
    for one in changes(source, ran):
        found.setdefault(one.operator, []).append(" ".join(one.after.split()))
    return found


def test_every_operator_finds_its_places():
    found = afters(kept=TENSOR, positions=TENSOR)
    assert {"(rows[1 + 1:len(lens)])", "(rows[1:len(lens) - 1])", "(rows)"} <= set(found["slice"])
    assert found["clone left out"] == ["(rows[1:len(lens)])"]
    assert "(len(lens) >= 2)" in found["comparison"]
    assert {"(last or len(lens) > 2)", "(last)", "(len(lens) > 2)"} == set(found["boolean"])
    assert "(not (last and len(lens) > 2))" in found["not"]
    assert "(kept - positions)" in found["arithmetic"]
    assert found["in place"] == ["(kept.add_(positions))"]
    assert found["in place on a copy"] == ["(lens.clone().add_(1))"]
    assert "(torch.cat(lens, kept))" in found["arguments swapped"]
    assert "(mix(out, 2, dim=True, keep=0) )" in found["arguments swapped"] or any(
        "dim=True, keep=0" in one for one in found["arguments swapped"]
    )
    assert any("mix(out, 2, dim=0)" in one for one in found["argument dropped"])
    assert "pass" in found["statement dropped"]
    assert {"(kept.flip(0))", "(positions.flip(0))"} <= set(found["rows reversed"])
    assert "(kept + 1)" in found["values shifted"]
    assert {"(positions)", "(kept)"} == set(found["other tensor"])
    assert "(False)" in found["constant"]


def test_a_mutant_is_called_as_the_command_line_takes_it():
    made = changes(SOURCE, lines(*range(1, 22)))
    named = [faults.asked("srt/speculative/eagle_worker_v2.py", one).id for one in made]
    assert named
    assert all(NAME.fullmatch(one) for one in named)


def test_nothing_is_changed_outside_functions_in_kernels_and_in_what_only_says():
    for one in changes(SOURCE, lines(*range(1, 22))):
        assert 6 < one.line < 17, one
        assert one.line != 10, one


def test_only_lines_that_ran_are_changed():
    assert {one.line for one in changes(SOURCE, lines(8, 9))} == {8, 9}


def test_tensors_of_one_row_or_another_shape_are_left_alone():
    found = afters(kept=["torch.float32", 1], positions=["torch.float32", 1, 8])
    assert not {"rows reversed", "values shifted", "other tensor"} & set(found)


@pytest.mark.parametrize("source", [SOURCE, SOURCE.replace("Never", "Né¶ver").replace("rows[1", "rows_é[1")])
def test_a_change_is_all_that_differs_and_no_line_moves(source):
    found = changes(source, lines(*range(1, 22)))
    assert found
    for one in found:
        assert source[one.start : one.end] == one.before
        text = source[: one.start] + one.after + source[one.end :]
        compiled(text, "x.py")
        assert text.count("\n") == source.count("\n"), one


def test_a_drawn_mutant_is_the_same_for_a_seed_and_another_for_another(tmp_path):
    for package in ("speculative", "managers"):
        (tmp_path / "srt" / package).mkdir(parents=True)
        (tmp_path / "srt" / package / "one.py").write_text(SOURCE)
    ran = {f"srt/{package}/one.py": lines(*range(1, 22)) for package in ("speculative", "managers")}
    drawn = draw(tmp_path, ran, count=8, seed=1)
    assert drawn == draw(tmp_path, ran, count=8, seed=1)
    assert drawn[:4] == draw(tmp_path, ran, count=4, seed=1), "a larger draw begins with the smaller one"
    assert drawn != draw(tmp_path, ran, count=8, seed=2)
    assert len({(one.file, one.line) for one in drawn}) == 8
    assert {one.file.split("/")[1] for one in drawn[:4]} == {"managers", "speculative"}, "packages take turns"
    assert len({one.id for one in drawn}) == 8
    for one in drawn:
        assert mutant_results.applied(SOURCE, [one]) != SOURCE


def test_a_campaign_that_goes_on_keeps_what_it_drew(tmp_path):
    mutants = tuple(results.asked(name) for name in ("one", "two"))
    setup = Setup(env=None, package=tmp_path, place=Place(release="0.5.23"), folder=tmp_path, seed=1, examples=0)
    nothing = Followed(sounds=(), ran={})
    assert _drawn(setup, nothing, count=2, captured=False) == ()
    kept = mutant_results.Campaign(
        engine="0.5.23", device="cpu", families=("eagle",), seed=1, examples=0, left_out=(), mutants=mutants
    )
    (tmp_path / mutant_results.PLAN).write_text(kept.model_dump_json())
    assert _drawn(setup, nothing, count=2, captured=False) == mutants
    assert _drawn(setup, nothing, count=1, captured=False) == mutants[:1]
    assert _drawn(setup, nothing, count=3, captured=False) == ()
    (tmp_path / mutant_results.PLAN).write_text("{")
    with pytest.raises(UsageError, match=r"is damaged .*\n  draw anew:  rm .*plan.json"):
        _drawn(setup, nothing, count=2, captured=False)


def test_what_closes_over_other_variables_or_changes_nothing_is_not_drawn():
    outer = "def f(a, b):\n    def g():\n        return a + b\n    return g\n"
    assert placed(outer, outer.replace("a + b", "a - b"))
    assert not placed(outer, outer.replace("a + b", "a")), "its cells would not fit"
    assert not placed(outer, outer), "nothing differs"
    assert not placed(outer, outer.replace("+", "+ +*")), "it does not compile"
    assert not placed("LIMIT = 1\n", "LIMIT = 2\n"), "it runs once, at import"


def make_module(tmp_path, source, name):
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(file)
    exec(compiled(source, str(file)), module.__dict__)
    return module


def test_functions_that_others_hold_run_the_mutated_code_until_the_next_swap(tmp_path, monkeypatch):
    source = (
        "def double(f):\n    def twice(x):\n        return 2 * f(x)\n    return twice\n\n\n"
        "@double\ndef one(x):\n    return x + 1\n\n\n"
        "class Box:\n    def get(self):\n        return [y + 3 for y in (1, 2)]\n\n\n"
        "def untouched():\n    return 7\n"
    )
    module = make_module(tmp_path, source, "swapped_module")
    monkeypatch.setitem(sys.modules, "swapped_module", module)
    held, bound, untouched = module.one, module.Box().get, module.untouched.__code__
    mutated, swap = tmp_path / "mutated.py", source_swap.Swap()

    def to(before, after):
        mutated.write_text(source.replace(before, after))
        return swap.to({"swapped_module": str(mutated)})

    gc.freeze()  # as a process that is forked from does
    try:
        assert to("x + 1", "x - 1") == 1
        assert held(5) == 8
        assert to("y + 3", "y * 3") == 1
        assert (bound(), held(5)) == ([3, 6], 12), "the one before is as it was"
        assert to("2 * f", "3 * f") >= 1
        assert held(5) == 18, "an inner function that was made before has its code too"
        assert module.untouched.__code__ is untouched
        assert swap.to({}) == 0
        assert (held(5), bound()) == (12, [4, 5])
    finally:
        gc.unfreeze()


def test_what_cannot_be_swapped_is_an_error_and_changes_nothing(tmp_path):
    swap = source_swap.Swap()
    with pytest.raises(LookupError, match="no_such_module is not imported"):
        swap.to({"no_such_module": str(tmp_path)})
    assert not swap.back


def test_lines_that_run_are_followed_with_the_tensors_they_read(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "sglang" / "srt" / "speculative"
    folder.mkdir(parents=True)
    source = "def f(batch, n):\n    a = batch.lens\n    if n:\n        b = a + 1\n    return batch.text\n"
    module = make_module(folder, source, "followed")
    other = make_module(tmp_path, source, "not_followed")
    follow = executed.Executed(parts=("srt/speculative/",))
    batch = types.SimpleNamespace(lens=torch.zeros(3, dtype=torch.int32), text="")
    begin, end = (partial(follow._captures, capturing, lambda: None) for capturing in (True, False))
    before = sys.gettrace()
    try:
        sys.settrace(follow.enter)
        module.f(batch, 1)  # the boot is not followed
        begin()
        module.f(batch, 0)
        end()
        module.f(batch, 1)  # nor is what runs after a capture, before anything is served
        captured = {2: {"batch.lens": ["torch.int32", 3]}, 3: {}, 5: {}}
        file = "srt/speculative/followed.py"
        assert follow.take() == {"executed": {}, "captured": {file: captured}}
        module.f(batch, 1)
        other.f(batch, 1)
        served = {**captured, 4: {"a": ["torch.int32", 3]}}
        assert follow.take() == {"executed": {file: served}, "captured": {file: captured}}
        assert follow.take()["executed"] == {}, "taken once"
    finally:
        sys.settrace(before)


def test_a_property_is_not_asked_for_a_tensor():
    class Batch:
        @property
        def lens(self):
            raise AssertionError("looked at")

    found = {}
    executed._note(found, ["batch", "lens"], {"batch": Batch()})
    assert found == {}


def test_merged_lines_keep_the_largest_tensor():
    one = {"f.py": {"3": {"x": ["torch.int64", 1]}}}
    other = {"f.py": {"3": {"x": ["torch.int64", 4]}, "9": {}}}
    assert merged([one, other]) == merged([other, one]) == {"f.py": {3: {"x": ["torch.int64", 4]}, 9: {}}}


def test_lines_inside_and_outside_of_captures_are_drawn_from_apart():
    sound = Sound(scenario=default_scenarios()[0], family="eagle", kind="", rows="x")
    one = One(sound=sound, ran={"f.py": {1: {}, 2: {}}}, captured={"f.py": {2: {}}, "g.py": {9: {}}})
    other = One(sound=sound.model_copy(update={"why": "FAIL"}), ran={"f.py": {7: {}}})
    followed = Followed.of([one, other])
    assert followed.ran == {"f.py": {1: {}}}
    assert followed.captured == {"f.py": {2: {}}, "g.py": {9: {}}}


def test_the_canary_is_tried_once_in_each_boot_configuration_in_the_quickest_scenario_that_passes():
    sound = Sound(scenario=default_scenarios()[0], family="eagle", kind="", rows="x")
    slow, quick, failed = (
        One(sound=sound.model_copy(update=changes), ran={})
        for changes in ({"seconds": 9.0}, {"seconds": 3.0}, {"seconds": 1.0, "why": "FAIL"})
    )
    boot = Boot(known=(slow,), unknown=(), canary=True)
    assert boot.unwatched([failed, quick]) is quick
    assert Boot(known=(failed,), unknown=(), canary=True).unwatched() is None
    assert Boot(known=(slow,), unknown=(), canary=False).unwatched([quick]) is None
    tried = slow.model_copy(update={"sound": slow.sound.model_copy(update={"canary": False})})
    assert Boot(known=(tried,), unknown=(), canary=True).unwatched([quick]) is None


def test_several_changes_of_a_file_are_made_where_each_would_be():
    found = [results.asked(str(at)).model_copy(update={"start": at, "end": at + 1, "after": "xy"}) for at in (2, 0)]
    assert mutant_results.applied("abcd", found) == "xybxyd"
    assert found[0].meets(found[0].model_copy(update={"start": 1}))
    assert not found[0].meets(found[1])
    assert not found[0].meets(found[0].model_copy(update={"file": "other.py"}))


def tasks_of(*names, before=True, captured=False):
    scenarios = tuple(default_scenarios()[:2])
    places = {name: {"start": 2 * at, "end": 2 * at + 1, "captured": captured} for at, name in enumerate(names)}
    return [
        Task(
            mutant=results.asked(name).model_copy(update=places[name]),
            stage="family",
            scenarios=scenarios,
            before=Result(id=name, end=Status.SURVIVED, asked=("earlier",)) if before else None,
        )
        for name in names
    ]


def test_what_requests_ask_for_beside_tokens_is_asked_last_where_the_line_is_executed():
    sound = Sound(
        scenario=default_scenarios()[0], family="eagle", kind="", rows="x", lines={"f.py": [3]}, captured={"f.py": [3]}
    )
    mutant = results.asked("one").model_copy(update={"file": "f.py", "line": 3})

    def asked(*sounds, **changes):
        every = rounds([mutant.model_copy(update=changes)], sounds, place=Place(release="0.5.23"), examples=0, seed=1)
        return [task for tasks in every for task in tasks if task.stage == "asking"]

    found = asked(sound)
    names = {need: {one.name for one in EXERCISES[need]} for need in (*ASKING, *OF_TEXTS)}
    assert {one.name for task in found for one in task.scenarios} == set().union(*names.values())
    assert len({task.scenarios[0].boot_key() for task in found}) == len(found), "an engine is booted for it once"
    assert asked(sound, captured=True) == []
    ranks = next(one for one in FAMILIES["dp"].scenarios if one.engine.chunked_prefill_size)
    found = asked(sound.model_copy(update={"scenario": ranks, "family": "dp"}))
    assert {one.name for task in found for one in task.scenarios} == set().union(*(names[need] for need in ASKING))
    assert {(one.checkpoint, one.spec, one.engine.dp_size) for task in found for one in task.scenarios} == {
        (ranks.checkpoint, ranks.spec, 2)
    }
    assert ranks.boot_key() in {task.scenarios[0].boot_key() for task in found}, "on an engine that lives already"
    needing = [one for task in found for one in task.scenarios if one.name in names["states"]]
    assert all(one.engine.enable_return_hidden_states for one in needing)


def test_only_what_was_asked_before_and_shares_an_engine_is_asked_together():
    assert [len(one) for one in together(tasks_of("a", "b"))] == [2]
    assert [len(one) for one in together(tasks_of("a", "b", before=False))] == [1, 1]
    assert [len(one) for one in together(tasks_of("a", "b", captured=True))] == [1, 1], "each boots its own engine"
    assert [len(one) for one in together(tasks_of("a") * 2)] == [1, 1], "both would change one place"
    assert [len(one) for one in together(tasks_of(*"abcdefghijk"))] == [8, 3]


def test_a_worker_takes_what_is_left_of_mutants_that_no_other_has():
    more = tasks_of(*"abc", before=False)
    said = [Task(mutant=one.mutant, stage="line", scenarios=one.scenarios[:1]) for one in more]
    waiting = Waiting(rounds=[said, more], known={"c": Result(id="c", end=Status.KILLED)})
    first, second, none = (waiting.take() for _ in range(3))
    assert [[one.mutant.id for one in batch] for batch in (first, second, none)] == [["a"], ["b"], []], "c is done with"
    waiting.give(first, [Result(id="a", end=Status.SURVIVED, asked=(label(said[0].scenarios[0]),))])
    (left,) = waiting.take()
    assert left.mutant.id == "a"
    assert left.scenarios == more[0].scenarios[1:]
    assert waiting.take() == [], "b is with a worker, and was never asked"
    waiting.give([left], [Result(id="a", end=Status.KILLED)])
    waiting.give(second, [Result(id="b", end=Status.KILLED)])
    assert waiting.take() == []


def test_a_survivor_is_with_several_workers_where_there_is_no_other():
    before = Result(id="a", end=Status.SURVIVED, asked=("s",), boots=1, seconds=2.0, accepted=(3, 1), sound=(4, 2))
    (one,) = tasks_of("a", before=False)
    tasks = [Task(mutant=one.mutant, stage="family", scenarios=(each,)) for each in one.scenarios[:2]]
    waiting = Waiting(rounds=[[each] for each in tasks], known={"a": before})
    batches = [waiting.take() for _ in range(3)]
    assert [len(batch) for batch in batches] == [1, 1, 0]
    also = before.model_copy(update={"seconds": 5.0, "accepted": (9, 3), "sound": (8, 4)})
    first, second = (also.model_copy(update={"asked": ("s", name)}) for name in "tu")
    waiting.give(batches[0], [first.model_copy(update={"rows": True, "canary": False})])
    (both,) = waiting.give(batches[1], [second.model_copy(update={"boots": 2})])
    assert both == before.model_copy(
        update={
            "asked": ("s", "t", "u"),
            "boots": 2,
            "seconds": 8.0,
            "rows": True,
            "canary": False,
            "accepted": (15, 5),
            "sound": (12, 6),
        }
    )


@pytest.mark.parametrize("first", [True, False])
def test_whoever_kills_a_mutant_has_the_say_though_another_comes_later(first):
    before = Result(id="a", end=Status.SURVIVED, asked=("s",), seconds=2.0)
    killed = before.model_copy(update={"end": Status.KILLED, "check": "reads", "asked": ("s", "t"), "seconds": 3.0})
    lived = before.model_copy(update={"asked": ("s", "u"), "rows": True, "seconds": 7.0})
    known, now = (killed, lived) if first else (lived, killed)
    both = mutant_results.joined(known, before, now)
    assert (both.end, both.check, both.seconds) == (Status.KILLED, "reads", 8.0)
    assert both.rows is not first, "what came back after the kill is no part of it"


def test_what_is_explained_waits_for_all_others_once_it_was_asked():
    sounds = [
        Sound(scenario=one, family="eagle", kind="", rows="x", lines={"f.py": [3]}) for one in default_scenarios()[:3]
    ]
    mutants = [results.asked(name).model_copy(update={"file": "f.py", "line": 3}) for name in ("known", "open")]
    every = rounds(mutants, sounds, place=Place(release="0.5.23"), examples=0, seed=1, explained={"known"})
    names = [[one.mutant.id for one in tasks] for tasks in every if tasks]
    assert names[0] == ["known", "open"]
    rest = [name for tasks in names[1:] for name in tasks]
    assert rest == sorted(rest, reverse=True)
    assert {*rest} == {"known", "open"}


def test_of_several_mutants_the_one_that_shows_is_found_and_the_others_survive(monkeypatch, tmp_path):
    ran = []

    def run(self, found, scenario):
        names = [one.id for one in found.mutants]
        ran.append((scenario.name, "".join(names)))
        found.note(asked=(*found.known.asked, scenario.name))
        if "e" in names:
            found.note(end=Status.KILLED, rows=True)

    monkeypatch.setattr(MutantRunner, "_run", run)
    runner = MutantRunner(engines=None, package=tmp_path, folder=tmp_path, sounds=(), release="0.5.23")
    tasks = tasks_of(*"abcdef")
    first, second = (one.name for one in tasks[0].scenarios)
    became = {result.id: result for result in runner.ask(tasks)}
    assert [became[name].end for name in "abcdef"] == [Status.SURVIVED] * 4 + [Status.KILLED, Status.SURVIVED]
    assert became["a"].asked == became["f"].asked == ("earlier", first, second)
    assert became["e"].asked == ("earlier", first), "a kill ends it"
    assert ran == [(first, one) for one in ("abcdef", "abc", "def", "d", "ef", "e", "f")] + [(second, "abcdf")]


class Engines:
    """Notes what is booted; an engine that boots with a mutant in one file dies of it."""

    default, device, boots, logs, log_name = "0.5.23", "cuda", 0, Path("none"), "engine-{boot}.log"

    def __init__(self, error):
        self.error, self.booted = error, []

    def launch(self, _scenario):
        return Launch(python=Path("python"), pythonpath=(), boot={"optional_arguments": {}})

    def use(self, launch):
        self.booted.append(launch.boot.get("mutated", {}))
        raise self.error

    def alive(self):
        return False

    def close(self):
        pass


@pytest.mark.parametrize(
    ("captured", "error", "end"),
    [
        (
            True,
            EngineError("the engine ended while booting; it ends with:\n  TypeError: f()\n  sigquit"),
            Status.KILLED,
        ),
        (True, EngineError("the engine ended while booting; it ends with:\n  CUDA out of memory"), Status.ERROR),
        (True, EngineError("the engine did not boot within 180 s"), Status.ERROR),
        (True, NoLease("every lease is taken"), Status.ERROR),
        (False, EngineError("the engine ended while booting"), Status.ERROR),
    ],
)
def test_a_boot_that_fails_says_something_of_a_mutant_only_where_it_boots_with_it(tmp_path, captured, error, end):
    (tmp_path / "srt" / "speculative").mkdir(parents=True)
    (tmp_path / "srt" / "speculative" / "one.py").write_text(SOURCE)
    engines, tasks = Engines(error), tasks_of("a", before=False, captured=captured)
    sounds = [Sound(scenario=one, family="eagle", kind="", rows="x") for one in tasks[0].scenarios]
    runner = MutantRunner(
        engines=engines, package=tmp_path, folder=tmp_path / "mutated", sounds=sounds, release="0.5.23"
    )
    (result,) = runner.ask(tasks)
    assert (result.end, result.ended) == (end, end is Status.KILLED)
    file = str(tmp_path / "mutated" / "a.py")
    assert engines.booted[0] == ({"sglang.srt.speculative.one": file} if captured else {})
    if end is Status.KILLED:
        assert result.why == "TypeError: f()"
    assert not list((tmp_path / "mutated").iterdir()), "no mutated file is left"


def test_an_engine_finds_the_mutated_file_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "srt" / "speculative").mkdir(parents=True)
    (tmp_path / "srt" / "speculative" / "one.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    engines = Engines(None)
    runner = MutantRunner(engines=engines, package=tmp_path, folder=Path("runs"), sounds=(), release="0.5.23")
    (file,) = runner._written([tasks_of("a")[0].mutant]).values()
    assert (file.is_absolute(), file.parent) == (True, tmp_path / "runs")


def test_a_scenario_that_nobody_followed_and_no_engine_boots_for_says_nothing(tmp_path):
    (tmp_path / "srt" / "speculative").mkdir(parents=True)
    (tmp_path / "srt" / "speculative" / "one.py").write_text(SOURCE)
    engines, tasks = Engines(EngineError("the engine ended while booting")), tasks_of("a", before=False)
    runner = MutantRunner(engines=engines, package=tmp_path, folder=tmp_path / "mutated", sounds=(), release="0.5.23")
    for _ in range(2):
        (result,) = runner.ask(tasks)
        assert (result.end, result.asked) == (Status.SURVIVED, tuple(label(one) for one in tasks[0].scenarios))
    assert len(engines.booted) == len(tasks[0].scenarios), "it is tried once"


def test_a_new_engine_that_would_not_begin_says_something_of_the_mutant(monkeypatch, tmp_path):
    (tmp_path / "srt" / "speculative").mkdir(parents=True)
    (tmp_path / "srt" / "speculative" / "one.py").write_text(SOURCE)
    driven = []

    def drive(engine, _scenario):
        driven.append(engine)
        raise EngineNotClean("SGLang would not flush its caches")

    engines = Engines(None)
    monkeypatch.setattr(engines, "use", lambda _launch: types.SimpleNamespace(swap=len), raising=False)
    monkeypatch.setattr("harness.search.mutate.drive", drive)
    runner = MutantRunner(engines=engines, package=tmp_path, folder=tmp_path / "mutated", sounds=(), release="0.5.23")
    (result,) = runner.ask(tasks_of("a", before=False))
    assert (result.end, result.check) == (Status.KILLED, "engine")
    assert driven[0] is not driven[1], "what another mutant left in the first one says nothing of this one"


def test_changed_code_is_found_through_every_level():
    old = compiled("class A:\n    def f(self):\n        return lambda: 1\n", "")
    new = compiled("class A:\n    def f(self):\n        return lambda: 2\n", "")
    assert [one.co_qualname for one, _ in changed(old, new)] == ["A.f", "A.f.<locals>.<lambda>"]


asked = results.asked


CAMPAIGN = results.campaign(asked("killed"), asked("dead"), asked("same", "index"), asked("open"), asked("text"))
FOUND = {
    "killed": Result(
        id="killed", end=Status.KILLED, check="chain", kinds=("TOKEN",), accepted=(90, 100), sound=(100, 100)
    ),
    "dead": Result(id="dead", end=Status.KILLED, check="ledger", kinds=("CRASH",)),
    "same": Result(id="same", end=Status.SURVIVED),
    "open": Result(id="open", end=Status.SURVIVED, rows=True, accepted=(50, 100), sound=(100, 100)),
    "text": Result(id="text", end=Status.KILLED, check="texts", kinds=("TOKEN",), text=True, seconds=4.0),
}
EQUIVALENT = {"same": Explanation(kind="equivalent", why="never read", mutants=("same",))}


def test_board_counts_what_is_not_equivalent_and_who_else_would_have_seen_it():
    report = Report.of(CAMPAIGN, FOUND, EQUIVALENT)
    assert report.counts == {"killed": 3, "equivalent": 1, "survived": 1}
    assert [line.mutant.id for line in report.faults] == ["killed", "dead", "open", "text"]
    assert report.beside() == {
        "eaglecheck": 3,
        "text parity": 2,
        "accept length below 95%": 3,
        "accept length below 80%": 2,
        "engine died or hung": 1,
    }
    said = document(report)
    assert said["by_operator"] == {"index": {"equivalent": 1}, "slice": {"killed": 3, "survived": 1}}
    assert said["mutants"][0]["killed_by"] == ["chain"]
    assert said["counted"] == 4


def rendered(found, explained, campaign=CAMPAIGN):
    console = Console(record=True, width=200, file=io.StringIO())
    render_mutate_report(console, Report.of(campaign, found, explained))
    return console.export_text()


def test_a_board_tells_engines_that_went_on_apart_only_where_any_did():
    text = rendered(FOUND, EQUIVALENT)
    assert "seen over the same runs, of 4 mutants not equivalent, by" in text
    assert [line.split() for line in text.splitlines() if line.lstrip().startswith(("all", "eaglecheck"))] == [
        ["all", "4", "engine", "alive", "3"],
        ["eaglecheck", "3", "75.0", "%", "2", "66.7", "%"],
    ]
    ended = rendered({"dead": FOUND["dead"]}, {})
    assert "of 1 mutant not equivalent" in ended
    assert "alive" not in ended
    assert "over the same runs" not in rendered({"same": FOUND["same"]}, EQUIVALENT), "nobody could see anything"


def test_a_board_without_a_kill_is_unknown():
    every = {name: FOUND["same"].model_copy(update={"id": name}) for name in FOUND}
    known = dict.fromkeys(FOUND, EQUIVALENT["same"])
    assert Report.of(CAMPAIGN, every, known).outcome is Outcome.UNKNOWN
    assert rendered({}, {}).splitlines()[-1] == "verdict UNKNOWN: 0 of 5 mutants asked"
    nothing = rendered({}, {}, results.campaign())
    assert nothing.splitlines()[-1] == "verdict UNKNOWN: no line ran that could be written wrong"


def test_board_fails_for_a_survivor_that_nobody_explained_and_is_unknown_while_some_were_not_asked():
    assert Report.of(CAMPAIGN, FOUND, EQUIVALENT).outcome is Outcome.FAIL
    explained = EQUIVALENT | {"open": Explanation(kind="open", why="issue 20", mutants=("open",))}
    assert Report.of(CAMPAIGN, FOUND, explained).outcome is Outcome.PASS
    assert Report.of(CAMPAIGN, FOUND, explained).counts["survived"] == 1, "an open gap still counts"
    part = {name: result for name, result in FOUND.items() if name != "text"}
    assert Report.of(CAMPAIGN, part, explained).outcome is Outcome.UNKNOWN
    failed = FOUND | {"text": Result(id="text", end=Status.ERROR)}
    assert Report.of(CAMPAIGN, failed, explained).outcome is Outcome.UNKNOWN


def test_what_one_campaign_does_not_execute_is_no_excuse_in_another():
    known = EQUIVALENT | {
        "open": Explanation(kind="not executed", why="several ranks", mutants=("open",), driven_by=("dp", "cuda"))
    }
    for campaign, stands in (
        (CAMPAIGN, "not executed"),
        (CAMPAIGN.model_copy(update={"families": ("eagle", "dp")}), "survived"),
        (CAMPAIGN.model_copy(update={"device": "cuda"}), "survived"),
    ):
        assert Report.of(campaign, FOUND, known).counts[stands] == 1


def test_the_families_that_execute_a_survivor_are_families_of_ours():
    named = {name for one in mutant_results.explanations().values() for name in one.driven_by}
    assert named - {"cuda"} <= {*FAMILIES}


def test_a_disk_without_room_for_a_result_is_named(full_disk):
    with pytest.raises(WriteError, match=f"the disk is full: cannot write to {full_disk}"):
        mutant_results.append(full_disk, FOUND["open"])


def test_results_are_kept_line_by_line_and_what_cannot_be_read_is_asked_again(tmp_path):
    path = tmp_path / mutant_results.RESULTS
    for result in FOUND.values():
        mutant_results.append(tmp_path, result)
    mutant_results.append(tmp_path, FOUND["open"].model_copy(update={"end": Status.UNKNOWN, "why": "a\u2028b"}))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "half", "end": "KIL')
    found = mutant_results.read_results([tmp_path])
    assert set(found) == set(FOUND)
    assert (found["open"].end, found["open"].why) == (Status.UNKNOWN, "a\u2028b"), "asked again"
    mutant_results.append(tmp_path, FOUND["same"].model_copy(update={"id": "next"}))
    path.write_bytes(path.read_bytes() + b'\xff{"id": "foreign", "end": "SURVIVED", "of another version": 1}\n')
    assert set(mutant_results.read_results([tmp_path])) == {*FOUND, "next"}, "behind a torn line a new one begins"


@pytest.mark.parametrize(("k", "t", "device", "assumed"), [(3, 1, "cpu", ()), (3, 2, "cpu", ("F-003",))])
def test_what_a_release_is_known_to_do_wrong_is_assumed(k, t, device, assumed):
    engines = types.SimpleNamespace(default="0.5.23", device=device, assumed=("F-010",))
    assume(engines, handmade.scenario(k=k, t=t))
    assert engines.assumed == assumed


def test_two_scenarios_of_one_name_are_two():
    one = default_scenarios()[0]
    other = handmade.set_on(one, page_size=4)
    task = Task(mutant=results.asked("a"), stage="family", scenarios=(one, other))
    left = task.after(Result(id="a", end=Status.SURVIVED, asked=(mutant_results.label(one),)))
    assert one.name == other.name
    assert left is not None
    assert left.scenarios == (other,)


def test_every_mutant_is_in_one_shard():
    parts = [mutant_results.shares(CAMPAIGN.mutants, (number, 3)) for number in (1, 2, 3)]
    assert sorted(one.id for part in parts for one in part) == sorted(FOUND)


def test_explained_survivors_are_explained_once(tmp_path):
    mutant_results.explanations()
    twice = tmp_path / "survivors.toml"
    entry = '[[survivors]]\nkind = "equivalent"\nwhy = "w"\nmutants = ["a"]\n'
    twice.write_text(entry + entry)
    with pytest.raises(UsageError, match="explained twice"):
        mutant_results.explanations(twice)
    assert Path(mutant_results.EXPLAINED).exists()


def test_the_page_of_a_report_shows_the_board(tmp_path):
    run = results.store(tmp_path / "runs", ("single", results.sound))
    file = tmp_path / "mutate.json"
    file.write_text(json.dumps(document(Report.of(CAMPAIGN, FOUND, EQUIVALENT))))
    of_a_night = document(Report.of(CAMPAIGN, FOUND, EQUIVALENT)) | {"families": ["tree"]}
    text = render_page(read_report(run), beside=Beside(mutants=_document(file, "mutants"), boards=[of_a_night]))
    assert text.count('<h2 id="mutants-title') == text.count("Mutants <span") == 2
    assert text.count("(eagle)") == text.count("(tree)") == 1
    assert "Of 4 not equivalent, seen over the same runs by: eaglecheck 3, text parity 2," in text
    assert "<code>srt/speculative/one.py</code>" in text
    assert "never read" in text, "why a survivor is equivalent"


def test_an_answer_without_tokens_is_kept_as_one_that_has_none():
    from harness.engine_side.host.request_service import _answer

    assert _answer({"meta_info": {"id": "a"}})["output_ids"] == []
    assert _answer({"meta_info": {"id": "a"}, "output_ids": [3, 4]})["output_ids"] == [3, 4]


@pytest.mark.parametrize(("kind", "closed"), [("LEAK", True), ("TOKEN", False)])
def test_an_engine_whose_pool_is_wrong_is_not_used_again_though_no_row_differs(monkeypatch, tmp_path, kind, closed):
    engines, verdict = Engines(None), types.SimpleNamespace(outcome=Outcome.PASS, root_kinds=(kind,))
    ended = []
    engines.close = lambda: ended.append(True)
    engines.judge = lambda *_args, **_more: types.SimpleNamespace(verdict=verdict)
    monkeypatch.setattr("harness.search.mutate.digest", lambda _trace: "same")
    runner = MutantRunner(engines=engines, package=tmp_path, folder=tmp_path, sounds=(), release="0.5.23")
    found = types.SimpleNamespace(name="a", add=lambda *_args, **_more: None)
    runner._judge(found, default_scenarios()[0], None)
    assert bool(ended) is closed


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.UNKNOWN])
def test_a_scenario_that_does_not_pass_without_a_mutant_says_nothing_of_one(monkeypatch, tmp_path, outcome):
    engines = Engines(None)
    verdict = types.SimpleNamespace(outcome=outcome, root_kinds=())
    engines.judge = lambda *_args, **_more: types.SimpleNamespace(verdict=verdict)
    runner = MutantRunner(engines=engines, package=tmp_path, folder=tmp_path, sounds=(), release="0.5.23")
    said = []
    found = types.SimpleNamespace(name="a", add=lambda *_args, **_more: said.append(outcome))
    for passes in (False, True):
        monkeypatch.setattr(MutantRunner, "_passes", lambda _self, _scenario, passes=passes: passes)
        runner._judge(found, default_scenarios()[0], None)
        assert bool(said) is passes


def test_rows_that_cannot_be_read_are_an_error_of_ours_and_end_no_campaign(monkeypatch, tmp_path):
    def drive(_engine, _scenario):
        raise IndexError("index 1 is out of bounds")

    monkeypatch.setattr("harness.search.mutate.drive", drive)
    runner = MutantRunner(engines=Engines(None), package=tmp_path, folder=tmp_path, sounds=(), release="0.5.23")
    monkeypatch.setattr(MutantRunner, "_written", lambda _self, _mutants: {})
    monkeypatch.setattr(MutantRunner, "_engine", lambda *_args: types.SimpleNamespace(swap=lambda *_files: 1))
    monkeypatch.setattr(MutantRunner, "_logs", lambda _self: {})
    (task,) = tasks_of("a", before=False)
    (result,) = runner.ask([Task(mutant=task.mutant, stage="line", scenarios=task.scenarios[:1])])
    assert (result.end, result.why) == (Status.ERROR, "reading: IndexError: index 1 is out of bounds")
