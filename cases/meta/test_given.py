"""Asked and given: what an engine runs beside what it was started with, whose files it runs, and any other flag."""

import base64
import hashlib
import os
import shlex
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cases.fixed import default_scenarios
from cases.meta import handmade
from harness.checks import judge
from harness.checks.asked import not_given
from harness.cli.outcome import TYPED, typed_again
from harness.cli.scenario_checks import check_scenarios
from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.types import Outcome
from harness.contract.usage import UsageError
from harness.driving.adapt import Wanted, adapted
from harness.driving.refusals import untaken
from harness.engine_side.hooks import ImportHooks
from harness.engine_side.host.given import given
from harness.engine_side.replacement_kernels.cpu_ops import CpuOps
from harness.engines import envs, server_args
from harness.engines.envs import EngineEnv
from harness.engines.launch import CORES, build_launch
from reports.live import engine_facts

SCENARIO = default_scenarios()[0]


def verdict(**header):
    scenario = handmade.scenario()
    engine, reference = handmade.build(scenario)
    return judge(scenario, replace(engine, header=engine.header | header), reference)[0]


# What it runs


@pytest.mark.parametrize(
    ("asked", "run", "reasons"),
    [
        ({"page_size": 4}, {"page_size": 4}, []),
        ({"max_total_tokens": 202, "page_size": 4}, {"max_total_tokens": 200, "page_size": 4}, []),
        (
            {"max_total_tokens": 202},
            {"max_total_tokens": 200},
            ["asked for max_total_tokens 202, and the engine runs with 200"],
        ),
        ({"of_another_release": 1}, {}, []),
    ],
)
def test_a_setting_that_is_not_run_is_named(asked, run, reasons):
    assert list(not_given({"asked": asked, "given": run})) == reasons


def test_what_was_asked_for_and_not_done_is_unknown():
    asked = {"disable_overlap_schedule": False}
    assert verdict(asked=asked, given={"disable_overlap_schedule": False}).outcome is Outcome.PASS
    said = verdict(asked=asked, given={"disable_overlap_schedule": True})
    assert said.outcome is Outcome.UNKNOWN
    assert "asked for disable_overlap_schedule False, and the engine runs with True" in said.reasons
    assert verdict().outcome is Outcome.PASS, "a trace of before this was recorded"


def test_what_the_scheduler_holds_counts_before_what_it_was_given():
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(disable_overlap_schedule=False, stream_interval=3), enable_overlap=False
    )
    names = ("disable_overlap_schedule", "stream_interval", "not_of_this_release")
    assert given(scheduler, names) == {"disable_overlap_schedule": True, "stream_interval": 3}


def test_the_place_that_takes_overlap_back_on_a_cpu_is_switched_off_where_a_release_has_it():
    ops, asked = CpuOps(ImportHooks()), "_disable_overlap_schedule_for_cpu"
    ops._apply("kept", asked, "torch")(SimpleNamespace(__name__="old"))
    assert ops.describe() == []
    module = SimpleNamespace(__name__="hook", **{asked: lambda server_args: 1 / 0})
    ops._apply("kept", asked, "torch")(module)
    getattr(module, asked)(None)
    assert [entry["operation"] for entry in ops.describe()] == [f"hook.{asked}"]


def test_a_module_that_makes_events_of_cuda_gets_one_that_waits_for_nothing_and_the_rest_of_torch():
    """As a prefill side does under overlap before it sends a cached prefix early; a torch without CUDA has none."""
    ops, module = CpuOps(ImportHooks()), SimpleNamespace(__name__="prefill", torch=torch)
    ops._apply("no_event", "Event", "torch")(module)
    event = module.torch.cuda.Event(enable_timing=False)
    event.record("stream")
    event.wait()
    event.synchronize()
    assert module.torch.cuda.is_available is torch.cuda.is_available
    assert module.torch.empty is torch.empty
    assert [entry["operation"] for entry in ops.describe()] == ["prefill: torch.cuda.Event"]


def test_a_module_that_asks_for_torchs_own_device_gets_the_cpu_where_torch_was_built_for_cards(monkeypatch):
    """On a machine with cards recurrent layers on a CPU began CUDA in a process that was forked."""
    ops, module = CpuOps(ImportHooks()), SimpleNamespace(__name__="model", torch=torch)
    for built_for, operations in ((torch.cpu, []), (torch.cuda, ["model: torch.get_device_module"])):
        monkeypatch.setattr(torch, "get_device_module", lambda device=None, own=built_for: device or own)
        ops._apply("own_device", "get_device_module", "torch")(module)
        assert module.torch.get_device_module() is torch.cpu
        assert [entry["operation"] for entry in ops.describe()] == operations
    assert module.torch.get_device_module("named") == "named"
    assert module.torch.empty is torch.empty


# Whose files


@pytest.fixture
def site(tmp_path):
    """A site with an installed SGLang of two files."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang-0.5.23.dist-info").mkdir()
    lines = []
    for name in ("sglang/__init__.py", "sglang/engine.py"):
        (tmp_path / name).write_text(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(name.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(name)}\n")
    (tmp_path / "sglang-0.5.23.dist-info" / "RECORD").write_text("".join(lines))
    return tmp_path


def test_files_that_are_not_as_published_reach_the_engines_own_record(site):
    env = EngineEnv(version="0.5.23", python=site, pythonpath=(site,), torch="", ready=True)
    assert envs.changed(env) == ()
    (site / "sglang" / "engine.py").write_text("edited")
    envs._changed.cache_clear()
    launch = build_launch(env=env, spec=SpecConfig(), engine=EngineConfig(), target=site, draft=site)
    assert launch.boot["changed_files"] == ["sglang/engine.py"]
    assert envs.changed(replace(env, tree=site)) == (), "a commit was never published"


def test_a_verdict_and_every_report_say_so():
    header = {"release": "0.5.23", "changed_files": ["a.py", "b.py", "c.py", "d.py"]}
    said = verdict(**header)
    assert said.outcome is Outcome.PASS
    assert "SGLang 0.5.23 is not as published: a.py, b.py, c.py and 1 more file" in said.reasons
    assert engine_facts(header)[0].endswith(", not as published: a.py and 3 more")


# Any other flag


def test_a_typed_argument_is_json_text_or_a_switch():
    typed = ["schedule-policy=fcfs", "--stream_interval=3", "enable_metrics", "x=false", "y=[1]", "z=None"]
    assert server_args.read(typed) == {
        "schedule_policy": "fcfs",
        "stream_interval": 3,
        "enable_metrics": True,
        "x": False,
        "y": [1],
        "z": None,
    }
    assert server_args.read([]) is None


@pytest.mark.parametrize(
    ("typed", "why"), [(["=1"], "NAME=VALUE"), (["a b=1"], "NAME=VALUE"), (["a=1", "a=2"], "twice")]
)
def test_what_is_no_argument_is_refused(typed, why):
    with pytest.raises(UsageError, match=why):
        server_args.read(typed)


def test_an_argument_goes_to_sglang_as_it_is_and_is_part_of_the_scenario(tmp_path):
    (asked,) = adapted([SCENARIO], Wanted(server_args={"stream_interval": 3}), device="cpu")
    (more,) = adapted([asked], Wanted(server_args={"schedule_policy": "fcfs"}), device="cpu")
    assert more.engine.server_args == {"stream_interval": 3, "schedule_policy": "fcfs"}
    assert len({SCENARIO.id, asked.id, more.id}) == len({SCENARIO.boot_key(), asked.boot_key(), more.boot_key()}) == 3
    check_scenarios([more], device="cpu")
    boot = launched(tmp_path, more.engine).boot
    assert more.engine.server_args.items() <= boot["arguments"].items()
    assert engine_facts({"server_args": boot["server_args"]})[0].endswith(", stream_interval=3, schedule_policy=fcfs")


def test_what_was_typed_can_be_typed_again():
    given = {"a": 1, "b": True, "c": "two words", "d": [1, "x"], "e": None, "f": {"g": "it's"}, "h": 0.5, "i": ""}
    given |= {
        f"text{place}": text for place, text in enumerate(('{"g": ["h"]}', "1", "True", "null", "NaN", '"j"', "it's"))
    }
    again = shlex.split(server_args.typed(given))
    assert again[::2] == ["--server-arg"] * len(given)
    assert server_args.read(again[1::2]) == given


@pytest.mark.parametrize("where", ["server_args.py", "arg_groups/fields/of_models.py"])
def test_an_argument_that_the_release_does_not_declare_is_refused_before_a_boot(tmp_path, where):
    package = tmp_path / "sglang"
    (package / "srt" / where).parent.mkdir(parents=True)
    (package / "srt" / where).write_text(
        "class A:\n    model_path: str\n    stream_interval: int = 1\nraise ImportError\n"
    )
    (package / "__init__.py").touch()
    env = replace(ENV, pythonpath=(tmp_path,))
    (asked,) = adapted([SCENARIO], Wanted(server_args={"stream_intervall": 3}), device="cpu")
    why = "has stream_intervall, and SGLang 0.5.13 has no such argument; did you mean 'stream_interval'"
    assert why in untaken(asked, env)
    assert "leave --server-arg stream_intervall out" in untaken(asked, env)
    assert untaken(asked.model_copy(update={"engine": EngineConfig(server_args={"stream_interval": 3})}), env) == ""
    assert untaken(SCENARIO, env) == ""


#: As older releases declare them, and as newer ones do.
OLD = """
class ServerArgs:
    model_path: str
    policy: str = "a"
    ratio: float = 2.0
    size: Optional[int] = None
    backend: str = ""
def add(parser):
    parser.add_argument("--policy", type=str, choices=["a", "b"])
    parser.add_argument("--backend", type=str, choices=BACKENDS)
"""
NEW = """
class ServerArgs:
    model_path: A[str, "where"]
    policy: A[Literal["a", "b"], Arg(help="which")] = "a"
    ratio: A[Optional[float], "of what"] = None
    size: A[int, Arg(help="how much")] = 0
    backend: A[str, Arg(choices=BACKENDS)] = ""
"""


@pytest.mark.parametrize("text", [OLD, NEW])
@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"policy": "NONSENSE"}, "a, b"),
        ({"policy": True}, "a, b"),
        ({"ratio": "abc"}, "a number"),
        ({"size": "1GB"}, "a number"),
        ({"policy": "b", "ratio": 1, "size": 4, "backend": "of a plugin"}, ""),
        ({"policy": None}, ""),
    ],
)
def test_a_value_that_the_release_does_not_take_is_refused_before_a_boot(tmp_path, text, given, allowed):
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(text)
    why = server_args.not_taken(given, version="0.5.23", package=tmp_path / "sglang")
    assert why.endswith(f"which SGLang 0.5.23 does not take\n  allowed: {allowed}" if allowed else "")
    assert bool(why) == bool(allowed)


def test_nothing_is_refused_where_no_argument_is_known(tmp_path):
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    assert server_args.not_taken({"a": 1}, version="0.5.13", package=tmp_path / "sglang") == ""
    assert server_args.not_taken({"a": 1}, version="0.5.13", package=None) == ""


def test_every_option_that_sets_a_field_is_named_where_the_argument_is_refused():
    assert {*server_args.OPTIONS} == {field.name for field in fields(Wanted)} - {"server_args"}


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("page_size", "set --page-size, or engine.page_size in a scenario file"),
        ("disable_cuda_graph", "set --cuda-graph or --disable-cuda-graph, or engine.cuda_graph"),
        ("disable_radix_cache", "engine.radix_cache"),
        ("random_seed", "leave it out"),
    ],
)
def test_what_eaglecheck_sets_itself_is_refused_with_the_key_to_use(name, instead):
    (asked,) = adapted([SCENARIO], Wanted(server_args={name: 1}), device="cpu")
    with pytest.raises(UsageError, match=rf"has {name}, which eaglecheck sets itself\n  .*{instead}"):
        check_scenarios([asked], device="cpu")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"pp_size": 2}, r"has pp_size, whose stages .*\n  leave it out; .*benchmarks.pipeline"),
        ({"enable_lmcache": True}, r"has enable_lmcache, whose threads .*\n  leave it out"),
        ({"hicache_storage_backend": "mooncake"}, r"is 'mooncake', a service of its own\n  allowed: 'file'"),
        (
            {"hicache_storage_backend": "file"},
            r"policy is 'timeout', by which the clock .*\n  allowed: 'wait_complete'",
        ),
    ],
)
def test_what_would_not_be_in_lockstep_is_refused(given, why):
    (asked,) = adapted([SCENARIO], Wanted(server_args=given), device="cpu")
    with pytest.raises(UsageError, match=why):
        check_scenarios([asked], device="cpu")


def test_storage_in_a_folder_is_taken_where_no_clock_decides_when_it_is_waited_for():
    given = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "best_effort"}
    (asked,) = adapted([SCENARIO], Wanted(server_args=given), device="cpu")
    check_scenarios([asked], device="cpu")


def test_a_decode_side_with_both_kinds_of_ranks_is_refused():
    engine = {"dp_size": 2, "tp_size": 4, "disaggregation": True}
    asked = Scenario.model_validate(
        {
            **SCENARIO.model_dump(mode="json"),
            "checkpoint": "qwen3-tiny",
            "spec": {"algorithm": "EAGLE3"},
            "engine": engine,
        }
    )
    with pytest.raises(UsageError, match=r"each DP rank is not driven\n  allowed: .* \(2\), or engine.dp_size 1"):
        check_scenarios([asked], device="cpu")


ENV = EngineEnv(version="0.5.13", python=Path("python"), pythonpath=(), torch="", ready=True)


def launched(folder, engine, device="cpu", **more):
    given = {"spec": SpecConfig(), "target": folder, "draft": folder, "device": device, **more}
    return build_launch(env=replace(ENV, python=folder), engine=engine, **given)


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        (EngineConfig(), {"tokenizer": Path("made")}),
        (EngineConfig(), {"spec": SpecConfig(adaptive={"1": {"candidate_steps": [0, 3]}}, token_map=(0, 1))}),
        (EngineConfig(cuda_graph=True), {}),
        (EngineConfig(cuda_graph=True, cuda_graph_max_bs=2), {}),
        (EngineConfig(disaggregation=True, disaggregation_decode_radix_cache=True, rejection_sampling=True), {}),
    ],
)
def test_every_argument_that_an_engine_is_started_with_is_known_as_ours(engine, more, tmp_path):
    launch = launched(tmp_path, engine, "cuda" if engine.cuda_graph else "cpu", **more)
    for one in (launch, launch.beside or launch):
        assert {*one.boot["arguments"], *one.boot["optional_arguments"]} <= set(server_args.OURS)


def test_ranks_of_runs_side_by_side_take_other_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8, 24)}, raising=False)
    taken = []
    for pid in (40, 41, 42):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        taken.append(launched(tmp_path, EngineConfig(tp_size=2)).boot["environment"][CORES].split("|"))
    assert len({core for pair in taken for core in pair}) == 6


def test_the_backend_of_adapters_is_ours_only_where_none_is_asked_for(tmp_path):
    adapters = {"adapters": {"first": str(tmp_path)}}
    backends = [
        launched(tmp_path, EngineConfig(server_args=asked), **adapters).boot["arguments"]["lora_backend"]
        for asked in ({}, {"lora_backend": "triton"})
    ]
    assert backends == ["torch_native", "triton"]


@pytest.mark.parametrize("only", [["--only", "x,y"], ["--only=x,y"], []])
def test_a_command_is_offered_as_it_was_typed_with_another_choice(only):
    TYPED.set(["mutants", *only, "--server-arg", "a=1", "--server-arg", "b=2", "--fresh"])
    again = typed_again(without=("--fresh",), more=("--only", "y"))
    assert again == "eaglecheck mutants --server-arg a=1 --server-arg b=2 --only y"
    TYPED.set([])
    assert typed_again(more=("--only", "y")) == ""
