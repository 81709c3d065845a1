"""What a scenario of two engines may say, and how it is refused."""

import pytest
from pydantic import ValidationError

from cases.fixed import DRAIN, request, submit
from harness.contract.scenario import EngineConfig, Op, Scenario, SpecConfig
from harness.driving.adapt import impossible
from harness.engines.envs import EngineEnv
from harness.engines.launch import build_launch


def made(*script, **engine):
    return Scenario(
        name="x",
        engine=EngineConfig(**{"disaggregation": True, **engine}),
        requests=(request("a", 4, seed=1),),
        script=(*script, DRAIN),
    )


def test_each_side_may_get_a_request_at_a_step_of_its_own():
    scenario = made(
        Op(kind="submit", rids=("a",), name="decode"), Op(kind="step"), Op(kind="submit", rids=("a",), name="prefill")
    )
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario


@pytest.mark.parametrize(
    ("script", "engine", "why"),
    [
        ((Op(kind="submit", rids=("a",), name="decode"),), {}, "exactly once to the prefill side"),
        ((submit("a"), Op(kind="transfer", rids=("a",), name="lose")), {}, "allowed: hold, release, fail, drop, fake"),
        ((submit("a"), Op(kind="transfer", rids=("a",), name="fake")), {}, "comes after the submit"),
        (
            (submit("a"), Op(kind="transfer", rids=("a",), name="hold")),
            {"disaggregation": False},
            "set engine.disaggregation to true",
        ),
        ((submit("a"), Op(kind="abort", rids=("a",), name="left")), {}, "allowed: prefill or decode"),
        ((submit("a"), Op(kind="abort", rids=("a",), name="decode")), {"disaggregation": False}, "or none"),
        (
            (submit("a"),),
            {"disaggregation": False, "disaggregation_decode_radix_cache": True},
            "needs engine.disaggregation",
        ),
    ],
)
def test_what_two_engines_cannot_do_is_refused(script, engine, why):
    with pytest.raises(ValidationError, match=why):
        made(*script, **engine)


def test_old_releases_refuse_a_cache_on_a_decode_side_that_speculates():
    engine = EngineConfig(disaggregation=True, disaggregation_decode_radix_cache=True)
    assert "0.5.13 refuses" in impossible(SpecConfig(), engine, version="0.5.13")
    assert impossible(SpecConfig(), engine, version="0.5.23") == ""


def test_releases_that_ask_no_plugin_are_distinguished():
    engine, spec = EngineConfig(disaggregation=True), SpecConfig(plugin="none")
    assert "asks no plugin's algorithm" in impossible(spec, engine, version="0.5.12.post1")
    assert impossible(spec, engine, version="0.5.13") == ""


def test_a_pair_is_one_launch_with_another_beside_it(tmp_path):
    env = EngineEnv(version="0.5.13", python=tmp_path, pythonpath=(), torch="", ready=True)
    launch = build_launch(
        env=env,
        spec=SpecConfig(),
        engine=EngineConfig(disaggregation=True, max_total_tokens=160, cuda_graph=True),
        target=tmp_path,
        draft=tmp_path,
        device="cuda",
    )
    assert launch.beside is not None
    prefill, decode = launch.boot["arguments"], launch.beside.boot["arguments"]
    assert (prefill["disaggregation_mode"], decode["disaggregation_mode"]) == ("prefill", "decode")
    assert (prefill["disable_cuda_graph"], decode["disable_cuda_graph"]) == (True, False)
    assert decode["num_reserved_decode_tokens"] == 20
    assert launch.beside.beside is None


def test_ranks_are_those_of_the_decode_side(tmp_path):
    env = EngineEnv(version="0.5.13", python=tmp_path, pythonpath=(), torch="", ready=True)
    engine = EngineConfig(disaggregation=True, dp_size=2, tp_size=2, max_running_requests=4)
    spec = SpecConfig(algorithm="EAGLE3")
    launch = build_launch(env=env, spec=spec, engine=engine, target=tmp_path, draft=tmp_path)
    assert launch.beside is not None
    assert (launch.ranks, launch.beside.ranks) == (1, 2)
    prefill, decode = launch.boot["arguments"], launch.beside.boot["arguments"]
    assert (prefill["tp_size"], prefill["dp_size"], prefill["enable_dp_attention"]) == (1, 1, False)
    assert (decode["tp_size"], decode["dp_size"], decode["enable_dp_attention"]) == (2, 2, True)
    assert (prefill["max_running_requests"], decode["max_running_requests"]) == (4, 8)
    bound = ["SGLANG_CPU_OMP_THREADS_BIND" in one.boot["environment"] for one in (launch, launch.beside)]
    assert bound == [False, True]


@pytest.mark.parametrize(("spec", "engine"), [({"algorithm": "EAGLE3"}, {}), ({}, {"disaggregation": False})])
def test_a_plugin_is_eagle_on_two_engines(spec, engine):
    with pytest.raises(ValidationError, match=r"spec\.plugin needs engine\.disaggregation and algorithm EAGLE"):
        Scenario(
            name="x",
            spec=SpecConfig(plugin="own", **spec),
            engine=EngineConfig(**{"disaggregation": True, **engine}),
            requests=(request("a", 4, seed=1),),
            script=(submit("a"), DRAIN),
        )
