"""A failure as one file: it stands alone, makes the same pair, and shows what was found. No engine here."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cases import checkpoints, pairs
from cases.meta import results
from cases.meta.command_line import call
from harness.bisect.changes import changed_files
from harness.contract.finding_pages import FOLDER, issues
from harness.contract.usage import UsageError
from harness.engine_side.replacement_kernels import cpu_tree
from harness.engines import envs
from harness.engines.launch import build_launch
from harness.search.export import ENDINGS, _end, exported
from reports import blame

ALLOWED = {*sys.stdlib_module_names, "numpy", "safetensors", "torch", "sglang"}
FILES = sorted((FOLDER / "repro").glob("*.py"))


def launch(one, release="0.5.23", device="cpu"):
    env = envs.EngineEnv(version=release, python=Path("python"), pythonpath=(), torch="", ready=True)
    spec, engine = one.scenario.spec, one.scenario.engine
    return build_launch(env=env, spec=spec, engine=engine, target=Path("t"), draft=Path("d"), device=device)


@pytest.fixture(scope="module")
def one():
    return results.judged("pr25015", results.one_ahead)


def imported(text):
    """The packages that a file imports, modules that it brings along included, those among each other left out."""
    tree = ast.parse(text)
    brought = [node.value.value for node in tree.body if isinstance(node, ast.Assign) and is_source(node.targets[0])]
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}.union(*map(imported, brought))
    return {name.split(".")[0] for name in names if not name.startswith("repro_")}


def is_source(node):
    return isinstance(node, ast.Subscript) and node.value.id == "SOURCES"


def exported_module(one, folder):
    file = folder / "repro.py"
    file.write_text(exported(one, launch(one), name="repro.py", form="script"))
    return runpy.run_path(str(file))


@pytest.mark.parametrize("form", ENDINGS)
def test_the_file_imports_nothing_of_ours_and_says_what_was_found(one, form):
    text = exported(one, launch(one), name="repro.py", form=form)
    assert imported(text) <= ALLOWED
    assert "--speculative-num-steps 3" in text
    assert one.findings[0].signature in text
    assert ("CustomTestCase" in text) is (form == "sglang-test")
    assert not re.findall("@[A-Z]+@", text)


@pytest.mark.parametrize("form", ["script", FILES[0]], ids=["fresh", "kept"])
def test_a_python_without_sglang_is_told_so_in_a_sentence(one, form, tmp_path):
    file = tmp_path / "repro.py"
    file.write_text(exported(one, launch(one), name=file.name, form=form) if form == "script" else form.read_text())
    done = subprocess.run([sys.executable, "-I", "-S", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert "has no sglang: run this with the Python that SGLang is installed for" in done.stdout
    assert done.stdout.endswith("CANNOT BE SAID\n")


def test_it_knows_the_forward(one, tmp_path):
    file = tmp_path / "repro.py"
    file.write_text(exported(one, launch(one), name="repro.py", form="script"))
    made = runpy.run_path(str(file))
    show = made["GIVEN"]["show"]
    assert (show["kind"], show["expected"]["ids"]) == ("inputs", show["observed"]["ids"])
    observed, expected = (show[side]["positions"] for side in ("observed", "expected"))
    assert [position - 1 for position in observed] == expected


@pytest.mark.parametrize("name", ["eagle-tiny", "qwen3-tiny", "oss-tiny", "mtp-apart"])
def test_it_makes_the_pair_byte_for_byte_with_nothing_that_another_pair_needs(one, tmp_path, name):
    scenario = one.scenario.model_copy(update={"checkpoint": name})
    text = exported(replace(one, scenario=scenario), launch(one), name="repro.py", form="script")
    assert imported(text) <= ALLOWED
    assert "class HybridRecipe" not in text
    assert "def chunk_delta_rule" not in text
    assert ("def perturbed" in text) is (name in pairs.PERTURBED)
    (tmp_path / "repro.py").write_text(text)
    for module in [each for each in sys.modules if each.startswith("repro_")]:
        del sys.modules[module]
    runpy.run_path(str(tmp_path / "repro.py"))["make_checkpoint"](tmp_path)
    pair = checkpoints.make(name, tmp_path / "ours")
    for side, ours in (("target", pair.target), ("draft", pair.draft)):
        assert (tmp_path / side / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()


def test_every_pair_but_a_trained_one_is_made_by_what_a_file_brings(one):
    for name in pairs.RECIPES:
        scenario = one.scenario.model_copy(update={"checkpoint": name})
        if name.startswith("trained-"):
            with pytest.raises(UsageError, match="its pair was trained"):
                exported(replace(one, scenario=scenario), launch(one), name="repro.py", form="script")
        else:
            text = exported(replace(one, scenario=scenario), launch(one), name="repro.py", form="script")
            assert imported(text) <= ALLOWED, name
            assert ("def chunk_delta_rule" in text) is name.startswith("hybrid"), name


def test_the_script_lets_requests_in_together_one_pass_later_and_aborts_in_its_own_order(tmp_path, one):
    made = exported_module(one, tmp_path)
    names = [request["rid"] for request in made["REQUESTS"]]
    held = {rid: SimpleNamespace(rid=rid, sampling_params={}) for rid in names}
    ops = [{"kind": "submit", "rids": names, "count": 1}, {"kind": "step", "rids": [], "count": 2}]
    scripts = [made["Script"](tmp_path, [*ops, {"kind": "submit", "rids": names, "count": 1}]) for _rank in range(2)]
    mine = [[held[rid] for rid in names[rank::2]] for rank in range(2)]
    assert scripts[0](["control", *mine[0]]) == ["control"]
    assert [script([]) for script in scripts] == ([[], []] if mine[1] else [mine[0], []]), "a rank's are not there yet"
    assert scripts[1](mine[1]) == []
    assert scripts[0]([]) in ([], mine[0])


def test_an_answer_is_too_long_only_behind_its_limit_or_a_stop(tmp_path, one):
    over = exported_module(one, tmp_path)["_over"]
    assert over({"max_new_tokens": 2}, [1, 2, 3])
    assert over({"max_new_tokens": 9, "stop_token_ids": [2]}, [1, 2, 3])
    assert not over({"max_new_tokens": 3, "stop_token_ids": [3]}, [1, 2, 3])


FED = {"ids": [4, 5], "positions": [7, 8]}
SHIFTED = {"ids": [4, 5], "positions": [8, 9]}
STATE = {**FED, "kind": "values", "row": 1, "expected": [1.0], "observed": [2.0], "limit": 0.1, "whole": False}
INPUTS = {"kind": "inputs", "observed": SHIFTED, "expected": FED, "whole": True}
MADE = {"where": "DRAFT", "made_by": "draft_forward"}


def fed(what, states=None, more=()):
    ids, positions = ([*what[name], *(pair[at] for pair in more)] for at, name in enumerate(("ids", "positions")))
    return {"ids": ids, "positions": positions, "states": states}


@pytest.mark.parametrize(
    ("show", "forwards", "code"),
    [
        (INPUTS, [fed(SHIFTED)], 1),
        (INPUTS, [fed(FED)], 0),
        (INPUTS, [fed(FED, more=[(6, 9)])], 3),
        (INPUTS, [], 3),
        (INPUTS | {"whole": False}, [fed(FED, more=[(6, 9)])], 0),
        (STATE, [fed(FED, [[0.0], [2.0]])], 1),
        (STATE, [fed(FED, [[0.0], [1.05]])], 0),
        (STATE, [fed(FED, [[0.0], [3.0]])], 3),
        (STATE, [fed(FED, [[2.0], [0.0], [0.0]], more=[(6, 9)])], 3),
        (STATE, [fed(FED, [[2.0]])], 1),
        (STATE, [fed(FED, [[9.0], [2.0]], more=[(3, 0), (3, 1)])], 3),
        (STATE, [fed(FED, [[2.0], [9.0]], more=[(3, 0), (3, 1)])], 1),
        (STATE, [fed(FED)], 3),
    ],
)
def test_a_draft_forward_shows_the_fault_or_its_absence_or_neither(one, tmp_path, show, forwards, code):
    made = exported_module(one, tmp_path)
    (tmp_path / "forwards.jsonl").write_text("".join(json.dumps(one) + "\n" for one in forwards))
    assert made["_forwards"](tmp_path, show | MADE) == code


A, B = {"rid": "a", "length": 9, "token": 1, "state": [0.5]}, {"rid": "b", "length": 9, "token": 1, "state": [0.7]}


@pytest.mark.parametrize(
    ("fed", "code"), [([A, B], 3), ([A, B, {**A, "length": 12}], 1), ([A, B, {**A, "length": 12, "state": [0.6]}], 0)]
)
def test_a_request_that_resumes_with_its_first_state_shows_the_fault(one, tmp_path, fed, code):
    (tmp_path / "resumed.jsonl").write_text("".join(json.dumps(each) + "\n" for each in fed))
    assert exported_module(one, tmp_path)["_resumed"](tmp_path) == code


ERROR, SITE = {"kind": "end", "error": "no kv_indptr", "site": ""}, {"kind": "end", "error": "", "site": r"in fwd\n"}


@pytest.mark.parametrize(
    ("show", "outputs", "log", "idle", "code"),
    [
        (ERROR, {}, "AttributeError: no kv_indptr (7)\n", False, 1),
        (ERROR, {}, "another\n", False, 3),
        (ERROR, {"a": [1]}, "", True, 0),
        (SITE, {}, "line 7, in fwd\nAssertionError\n", False, 1),
        (SITE, {}, "AssertionError\n", False, 3),
        ({"kind": "hang"}, {}, "", False, 1),
        ({"kind": "hang"}, {"a": [1]}, "", True, 0),
        ({"kind": "hang"}, {}, "Traceback", False, 3),
        ({"kind": "text"}, {}, "", False, 3),
        ({"kind": "seeds", "rids": ["a", "b"], "tokens": 1}, {"a": [1, 2], "b": [1, 3]}, "", True, 0),
        ({"kind": "seeds", "rids": ["a", "b"], "tokens": 2}, {"a": [1, 2], "b": [1, 3]}, "", True, 1),
    ],
)
def test_an_ending_or_an_answer_shows_the_fault_or_its_absence_or_neither(
    one, tmp_path, show, outputs, log, idle, code
):
    made = exported_module(one, tmp_path)
    requests = [{"rid": rid, "sampling": {}} for rid in "ab"]
    made["judge"].__globals__.update(run=lambda *_: (outputs, log, idle), REQUESTS=requests)
    made["GIVEN"]["show"] = show
    assert made["judge"](tmp_path) == code


@pytest.mark.parametrize("said", ["Segmentation fault", "Aborted"])
def test_an_engine_that_a_signal_ended_is_known_by_what_python_says_of_one(said):
    first = SimpleNamespace(hint="SIGSEGV", observed="scheduler process 7 was ended by SIGSEGV without a word")
    shown = _end(SimpleNamespace(first=first, signature="CRASH:ledger:IDLE:SIGSEGV"))
    assert re.findall(shown["site"], f"line 7\nFatal Python error: {said}\n\nThread") == [f"Fatal Python error: {said}"]
    assert not re.findall(shown["site"], "RuntimeError: Connection closed by peer")


@pytest.mark.parametrize("release", ["0.5.11", "0.5.23"])
def test_a_file_runs_on_every_release_and_carries_the_kernels_of_the_old_ones(one, tmp_path, monkeypatch, release):
    made = exported_module(one, tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: release)
    row = made["of_this_release"]()
    assert row["first"] == [*map(int, release.split(".")), 0]
    assert ("tree" in [what for _, what, _ in row["patches"]]) is (release == "0.5.11")
    kernel = SimpleNamespace(__name__="eagle_utils")
    made["load"]("cpu").patch(kernel, "tree", "")
    assert kernel.sgl_build_tree_kernel_efficient.__doc__ == cpu_tree.build_tree.__doc__


def test_a_package_that_is_there_and_cannot_be_loaded_is_a_stub(one, tmp_path, monkeypatch):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    stubs = exported_module(one, tmp_path)["stubs"]()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [stubs, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    assert importlib.import_module("sgl_kernel").anything() is not None
    monkeypatch.delitem(sys.modules, "sgl_kernel")


@pytest.mark.parametrize("file", ["fresh", *FILES], ids=lambda file: getattr(file, "stem", file))
def test_what_an_engine_leaves_in_its_temporary_folder_goes_with_the_file(one, file, tmp_path, monkeypatch):
    """The engine is a script that leaves a file, as SGLang leaves its sockets."""
    made = exported_module(one, tmp_path) if file == "fresh" else runpy.run_path(str(file))
    (tmp_path / "python").write_text("#!/bin/sh\nmktemp\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "folder").mkdir()
    _, log, _ = made["run"](tmp_path / "folder", "speculative")
    assert {Path(line).parent for line in log.splitlines()} == {tmp_path / "folder"}


def test_what_one_file_cannot_show_is_refused_with_what_to_type_next(one):
    with pytest.raises(UsageError, match=r"shows no failure(.|\n)*eaglecheck run"):
        exported(results.judged("pr25015"), launch(one), name="repro.py", form="script")
    for change in ({"n": 2}, {"stream": True}, {"regex": "a"}):
        asks = one.scenario.requests[0].model_copy(update=change)
        scenario = one.scenario.model_copy(update={"requests": (asks, *one.scenario.requests[1:])})
        with pytest.raises(UsageError, match=rf"asks? for {next(iter(change))}(.|\n)*eaglecheck replay"):
            exported(replace(one, scenario=scenario), launch(one), name="repro.py", form="script")


def test_export_of_what_is_no_single_failure_says_what_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    passed = results.store(tmp_path / "runs", ("one", results.sound))
    failed = results.store(tmp_path / "more", ("one", results.one_ahead), ("two", results.one_ahead))
    again = "eaglecheck run --engine"
    for place, why, next_step in (
        ("nowhere", "there is no folder", again),
        ("empty", "has no scenario.json", again),
        ("file", "is a file", again),
        (passed, "is a run without a failure", again),
        (next(passed.glob("one-*")), "shows no failure", "eaglecheck run"),
        (failed, "is a run, and one file shows one failure of it (2 here)", f"eaglecheck export {failed}/reproducers/"),
    ):
        done = call("export", place, "--output", "repro.py", code=2)
        assert (why in done.stderr, next_step in done.stderr) == (True, True), done.output
    assert not (tmp_path / "repro.py").exists()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_reproduction_is_of_an_open_finding_and_imports_nothing_of_ours(file):
    text, page = file.read_text(), issues()[file.stem]
    assert page.fixed_in is None
    assert text.startswith(f'"""{page.id}: {page.title}')
    assert imported(text) <= ALLOWED
    assert f"[{file.name}]({file.name})" in (file.parent / "README.md").read_text()
    assert f"repro/{file.name}" in (FOLDER / f"{page.id}.md").read_text()


@pytest.mark.parametrize("own", [False, True])
def test_where_names_file_line_and_function_by_the_source_of_the_release(own, one, tmp_path, monkeypatch):
    """own: the SGLang of this very interpreter."""
    source = tmp_path / "sglang/srt/speculative/eagle_worker_v2.py"
    source.parent.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    source.write_text("class EagleDraftWorker:\n    x = 1\n    def draft_forward(self):\n        self.positions = 1\n")
    where = () if own else (tmp_path,)
    env = envs.EngineEnv(version="0.5.23", python=Path("p"), pythonpath=where, torch="", ready=True)
    monkeypatch.setattr(blame.envs, "current", lambda: env if own else None)
    monkeypatch.setattr(blame.envs, "state", lambda _release: env)
    monkeypatch.syspath_prepend(tmp_path if own else tmp_path / "nowhere")
    blame._parsed.cache_clear()
    first = one.findings[0].first
    (line,) = blame.where_lines(first, one.scenario, "0.5.23")
    blame._parsed.cache_clear()
    maker = "srt/speculative/eagle_worker_v2.py:3 EagleDraftWorker.draft_forward (positions at line 4)"
    assert line.startswith(f"in SGLang: draft step's input: made by {maker}")
    assert line.endswith("; read by srt/model_executor/model_runner.py ModelRunner.forward")
    assert blame.where_lines(first, one.scenario, "a-commit") == []


def test_a_bisection_names_the_changed_files_on_the_path_first(one, tmp_path):
    worker, runner = "sglang/srt/speculative/eagle_worker_v2.py", "sglang/srt/model_executor/model_runner.py"
    files = blame.files(one.findings[0].first, one.scenario, "0.5.23")
    assert files == (worker, runner)
    names = ("sglang/srt/speculative/spec_info.py", worker, "sglang/srt/speculative/eagle_utils.py")
    old, new = tmp_path / "old", tmp_path / "new"
    for at, name in enumerate([*names, runner, "sglang/srt/managers/other.py"]):
        for side, lines in ((old, 1), (new, 9 - at)):
            (side / name).parent.mkdir(parents=True, exist_ok=True)
            (side / name).write_text("x\n" * lines)
    changed = changed_files(old / "sglang", new / "sglang", path=files)
    assert [each.path for each in changed] == [worker, runner, names[0], names[2]]
    assert [each.on_path for each in changed] == [True, True, False, False]
