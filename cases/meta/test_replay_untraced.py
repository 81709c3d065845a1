"""What a replay without a probe says, and which prompts SGLang alone gets together."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cases.catalogue import read_scenario
from cases.meta import results
from cases.meta.command_line import call
from harness.archive.store import StoredScenario
from harness.cli import replay
from harness.cli.replay_untraced import (
    _answer,
    _compared,
    _folder,
    check_bare,
    check_seen,
    ending,
    ending_alone,
    stopped,
)
from harness.contract.rows import RowBuilder
from harness.contract.trace import Event, RequestEnd, Trace
from harness.contract.types import Kind
from harness.contract.usage import UsageError
from harness.engines.bare import _read, waves

SCENARIOS = Path(__file__).parents[1] / "scenarios"
QUIET = Trace(side="engine", scenario_id="x", header={}, rows=RowBuilder().build())


HERE = "CRASH:ledger:DRAFT:srt/a.py:f"
CRASH = {"error": "CUDA error: an illegal memory access\nmore", "site": "srt/a.py:f:77", "round": 5}


def ended(name, **data):
    return replace(QUIET, events=(Event(name=name, scheduler_step=7, dp_rank=0, data=data),))


def test_an_ending_is_what_the_crash_said_first_and_where():
    found = ending(ended("crash", **CRASH))
    assert found.text == "CUDA error: an illegal memory access at srt/a.py:f:77, round 5, step 7"
    assert (found.kind, found.sites) == ("CRASH", ("srt/a.py:f",))
    assert ending(QUIET) is None


def test_folders_above_the_logs_are_made(tmp_path):
    plan = SimpleNamespace(root=tmp_path / "not" / "there")
    assert _folder(plan, "untraced").parent == plan.root


def test_flush_parts_the_prompts_of_a_bare_engine():
    assert waves(read_scenario(SCENARIOS / "gpu-eager-then-graph.json")) == [5, 1]
    assert waves(read_scenario(SCENARIOS / "gpu-topk8-flashinfer.json")) == [4]


def test_log_of_a_bare_engine_is_read():
    said = _read(["booted", '{"release": "0.5.13", "texts": [[1, 2]], "verifies": [3], "took": {"boot": 35.0}}'])
    assert (said.texts, said.verifies, said.took) == (((1, 2),), (3,), {"boot": 35.0})
    ended = _read(["booted", "RuntimeError: CUDA error: oh", "stopped after 5 s"])
    assert (ended.booted, ended.texts) == (True, None)
    assert ended.why == ("RuntimeError: CUDA error: oh", "stopped after 5 s")


LOG = """booted
[2026-11-29] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/site-packages/sglang/srt/loop.py", line 3, in run
    step()
  File "/x/site-packages/sglang/srt/a.py", line 7, in f
    g()
  File "/x/torch/b.py", line 9, in g
RuntimeError: oh"""


@pytest.mark.parametrize(
    ("signature", "end", "word"),
    [
        (HERE, ending(ended("crash", **CRASH)), "FAILED"),
        (HERE, ending(ended("crash", **CRASH | {"site": "srt/b.py:f"})), "ERROR"),
        (HERE, ending(ended("hang", site="srt/a.py:f")), "ERROR"),
        (HERE, ending(ended("lost", what="killed by the machine")), "ERROR"),
        (HERE, None, "FIXED"),
        (HERE.replace("CRASH", "HANG"), ending(ended("hang", site="srt/a.py:f")), "FAILED"),
        ("TOKEN:losslessness:ACCEPT:text-differs", ending(ended("crash", **CRASH)), "ERROR"),
        (HERE, ending_alone(_read(["ModuleNotFoundError: No module named 'torchvision'"])), "ERROR"),
        (HERE, ending_alone(_read(LOG.splitlines())), "FAILED"),
        (HERE, ending_alone(_read(["booted", "RuntimeError: of another place"])), "ERROR"),
        (HERE, ending_alone(_read(["booted", "", "stopped after 5 s"])), "ERROR"),
        (HERE.replace("CRASH", "HANG"), ending_alone(_read(["booted", "", "stopped after 5 s"])), "FAILED"),
        (HERE.replace("CRASH", "HANG"), ending_alone(_read(["", "stopped after 5 s"])), "ERROR"),
    ],
)
def test_only_the_stored_ending_is_the_failure(signature, end, word):
    said = _answer(STORED, signature, "here", end, {})
    assert said.word == word
    assert said.text.startswith(f"{word}: ")
    assert end is None or end.text in said.text


STORED = StoredScenario(
    folder=Path(),
    scenario=read_scenario(SCENARIOS / "gpu-topk8-flashinfer.json"),
    engine=replace(QUIET, ends=(RequestEnd(rid="r1", scheduler_step=1, reason="length", output_ids=(1, 9)),)),
    reference=replace(
        QUIET,
        side="reference",
        events=(Event(name="greedy", scheduler_step=0, dp_rank=0, data={"rid": "r1", "output_ids": [1, 2]}),),
    ),
    findings=(replace(results.EVERY_KIND[Kind.TOKEN], check="losslessness", hint="text-differs"),),
    verdict=None,
)


@pytest.mark.parametrize(("text", "word"), [((1, 9), "FAILED"), ((1, 2), "FIXED"), ((1, 3), "ERROR")])
def test_a_wrong_text_is_judged_by_the_text(text, word):
    assert _answer(STORED, STORED.findings[0].signature, "here", None, {"r1": text}).word == word


def test_sglang_alone_is_not_told_of_stop_tokens():
    assert stopped((1, 2, 3, 2), (2,)) == (1, 2)
    assert stopped((1, 2, 3), ()) == (1, 2, 3)


@pytest.fixture
def reproducer(tmp_path, monkeypatch):
    """One of a POSITION on a CPU; whoever gets as far as a plan is told so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay.prepare, "make_plan", lambda *_, **__: pytest.fail("something was started"))
    run = results.store(tmp_path / "runs", ("pr25015", results.one_ahead))
    return next(run.glob("reproducers/*"))


def remade(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest["header"] |= {key: value for key, value in changes.items() if key in manifest["header"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    results.reseal(folder)


def refused(*arguments):
    return call("replay", *arguments, code=2).stderr


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sglang_alone_needs_a_gpu_before_anything_starts(device, gpu):
    if (device, gpu) == ("cuda", True):
        check_bare(device, gpu=gpu)
        return
    with pytest.raises(UsageError, match=r"needs a GPU.*\n.*eaglecheck doctor"):
        check_bare(device, gpu=gpu)


def test_a_reproducer_of_a_cpu_is_not_given_to_sglang_alone(reproducer, monkeypatch):
    remade(reproducer, signature=HERE)
    monkeypatch.setattr(replay.prepare, "has_gpu", lambda: True)
    said = refused(reproducer, "--bare")
    assert "--bare needs a GPU" in said
    assert "eaglecheck doctor" in said


def test_what_needs_a_trace_is_refused_before_an_engine_boots(reproducer):
    said = refused(reproducer, "--untraced")
    assert "POSITION:positions:DRAFT:one-ahead needs a trace to be seen" in said
    assert f"eaglecheck replay {reproducer}\n" in said


@pytest.mark.parametrize(
    ("signature", "untraced", "bare"),
    [
        (HERE, True, True),
        ("HANG:ledger:DRAFT:any", True, True),
        ("TOKEN:losslessness:ACCEPT:text-differs", True, True),
        ("TOKEN:finish:ACCEPT:ran-past-stop", True, False),
        ("TOKEN:chain:DRAFT:reference-input", False, False),
        ("LEAK:ledger:IDLE:lost", False, False),
    ],
)
def test_endings_and_texts_are_all_that_is_seen_without_a_trace(signature, untraced, bare):
    for option, seen in (("--untraced", untraced), ("--bare", bare)):
        if seen:
            check_seen(option, Path("x"), signature)
        else:
            with pytest.raises(UsageError, match="eaglecheck replay x"):
                check_seen(option, Path("x"), signature)


def test_texts_are_compared_with_those_stored():
    ends = (
        RequestEnd(rid="a", scheduler_step=1, reason="length", output_ids=(1, 2)),
        RequestEnd(rid="b", scheduler_step=1, reason="abort", output_ids=(1,)),
    )
    scenario = read_scenario(SCENARIOS / "gpu-topk8-flashinfer.json")
    engine = replace(QUIET, ends=ends)
    stored = StoredScenario(folder=Path(), scenario=scenario, engine=engine, reference=None, findings=(), verdict=None)
    assert _compared(stored, {"a": (1, 2), "b": (9,)}) == "the texts are those stored"
    assert _compared(stored, {"a": (1, 3)}) == "other texts than stored: a"
