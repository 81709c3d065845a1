"""A failure as one file: it stands alone, makes the same pair, and shows what was found. No engine here."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from cases import checkpoints
from cases.meta import results
from harness.bisect.changes import changed_files
from harness.contract.usage import UsageError
from harness.engines import envs
from harness.engines.launch import build_launch
from harness.search.export import ENDINGS, exported
from reports import blame


def launch(one, release="0.5.23", device="cpu"):
    env = envs.EngineEnv(version=release, python=Path("python"), pythonpath=(), torch="", ready=True)
    spec, engine = one.scenario.spec, one.scenario.engine
    return build_launch(env=env, spec=spec, engine=engine, target=Path("t"), draft=Path("d"), device=device)


@pytest.fixture
def one():
    return results.judged("pr25015", results.one_ahead)


@pytest.mark.parametrize("form", ENDINGS)
def test_the_file_imports_nothing_of_ours_and_says_what_was_found(one, form):
    text = exported(one, launch(one), name="repro.py", form=form)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    roots = {name.split(".")[0] for node in nodes for name in [getattr(node, "module", None) or node.names[0].name]}
    assert roots <= {*sys.stdlib_module_names, "numpy", "safetensors", "torch", "sglang"}
    assert "--speculative-num-steps 3" in text
    assert one.findings[0].signature in text
    assert ("CustomTestCase" in text) is (form == "sglang-test")
    assert not re.findall("@[A-Z]+@", text)


def test_it_makes_the_pair_byte_for_byte_and_knows_the_forward(one, tmp_path):
    file = tmp_path / "repro.py"
    file.write_text(exported(one, launch(one), name="repro.py", form="script"))
    made = runpy.run_path(str(file))
    made["make_checkpoint"](tmp_path)
    pair = checkpoints.make("eagle-tiny", tmp_path / "ours")
    for side, ours in (("target", pair.target), ("draft", pair.draft)):
        assert (tmp_path / side / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    show = made["GIVEN"]["show"]
    assert (show["kind"], show["expected"]["ids"]) == ("inputs", show["observed"]["ids"])
    observed, expected = (show[side]["positions"] for side in ("observed", "expected"))
    assert [position - 1 for position in observed] == expected


def test_the_script_lets_requests_in_and_aborts_them_in_its_own_order(one, tmp_path, monkeypatch):
    file = tmp_path / "repro.py"
    file.write_text(exported(one, launch(one), name="repro.py", form="script"))
    made = runpy.run_path(str(file))

    class Held:
        def __init__(self, one):
            self.input_ids, self.rid = one["input_ids"], f"of-{one['rid']}"

    script = made["Script"]()
    held = [Held(each) for each in made["REQUESTS"]]
    assert script(["control"]) == ["control"]
    assert script(held[1:]) == [], "none is let in before all are there"
    assert script(held[:1]) == [one for one in held if one.rid in {f"of-{rid}" for rid in script.held}]


@pytest.mark.parametrize(("release", "device"), [("0.5.13", "cpu")])
def test_what_one_file_cannot_carry_is_refused(one, release, device):
    with pytest.raises(UsageError, match="replacement kernels of ours"):
        exported(one, launch(one, release, device), name="repro.py", form="script")
    with pytest.raises(UsageError, match="shows no failure"):
        exported(results.judged("pr25015"), launch(one), name="repro.py", form="script")


def test_where_names_file_line_and_function_by_the_source_of_the_release(one, tmp_path, monkeypatch):
    source = tmp_path / "sglang/srt/speculative/eagle_worker_v2.py"
    source.parent.mkdir(parents=True)
    source.write_text("class EagleDraftWorker:\n    x = 1\n    def draft_forward(self): ...\n")
    env = envs.EngineEnv(version="0.5.23", python=Path("p"), pythonpath=(tmp_path,), torch="", ready=True)
    monkeypatch.setattr(blame.envs, "state", lambda _release: env)
    blame._parsed.cache_clear()
    first = one.findings[0].first
    (line,) = blame.where_lines(first, one.scenario, "0.5.23")
    blame._parsed.cache_clear()
    assert line.startswith("in SGLang: made by srt/speculative/eagle_worker_v2.py:3 EagleDraftWorker.draft_forward")
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
