"""What a scenario of two engines may say, and how it is refused."""

import pytest
from pydantic import ValidationError

from cases.fixed import DRAIN, request, submit
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.driving.refusals import impossible
from harness.engines.envs import EngineEnv
from harness.engines.launch import build_launch


def made(*script, **engine):
    return Scenario(
        name="x",
        engine=EngineConfig(**{"disaggregation": True, **engine}),
        requests=(request("a", 4, seed=1),),
        script=(*script, DRAIN),
    )


DECODE, PREFILL = (Op(kind="submit", rids=("a",), name=name) for name in ("decode", "prefill"))
ALONE = {"disaggregation": False}


def op(kind, name):
    return (submit("a"), Op(kind=kind, rids=("a",), name=name))


def test_each_side_may_get_a_request_at_a_step_of_its_own():
    assert made(DECODE, Op(kind="step"), PREFILL).script[:3] == (DECODE, Op(kind="step"), PREFILL)


@pytest.mark.parametrize(
    ("script", "engine", "why"),
    [
        ((DECODE,), {}, "exactly once to the prefill side"),
        (op("transfer", "lose"), {}, "allowed: hold, release, fail, drop, late, land, fake"),
        (op("transfer", "fake"), {}, "comes after the submit"),
        (op("transfer", "hold"), ALONE, "with engine.disaggregation true"),
        (op("abort", "left"), {}, "allowed: prefill or decode"),
        (op("abort", "decode"), ALONE, "or none"),
        ((submit("a"),), {**ALONE, "disaggregation_decode_radix_cache": True}, "needs engine.disaggregation"),
    ],
)
def test_what_two_engines_cannot_do_is_refused(script, engine, why):
    with pytest.raises(ValidationError, match=why):
        made(*script, **engine)


@pytest.mark.parametrize(
    ("spec", "engine", "too_old", "why", "release"),
    [
        ({}, {"disaggregation_decode_radix_cache": True}, "0.5.13", "0.5.13 refuses", "0.5.23"),
        ({"plugin": "none"}, {}, "0.5.12.post1", "asks no plugin's algorithm", "0.5.13"),
        ({}, {"rejection_sampling": True}, "0.5.17", "cannot draw such drafts", "0.5.23"),
        (
            {"algorithm": "MTP"},
            {"rejection_sampling": True, "disaggregation": False},
            "0.5.14",
            "cannot draw",
            "0.5.16",
        ),
        ({}, {"rejection_sampling": True, "disaggregation": False}, "0.5.13", "cannot draw", "0.5.14"),
    ],
    ids=["a cache on a decode side", "a plugin", "handed rejection", "layered rejection", "rejection"],
)
def test_releases_that_cannot_are_told_apart(spec, engine, too_old, why, release):
    given = SpecConfig(**spec), EngineConfig(**{"disaggregation": True, **engine})
    assert why in impossible(*given, version=too_old)
    assert impossible(*given, version=release) == ""


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


def test_a_prefill_side_has_what_it_was_given_otherwise(tmp_path):
    env = EngineEnv(version="0.5.23", python=tmp_path, pythonpath=(), torch="", ready=True)
    own = {"max_total_tokens": 96, "radix_cache": False}
    engine = EngineConfig(disaggregation=True, max_total_tokens=160, disaggregation_prefill=own)
    launch = build_launch(env=env, spec=SpecConfig(), engine=engine, target=tmp_path, draft=tmp_path)
    assert launch.beside is not None
    sides = [one.boot["arguments"] for one in (launch, launch.beside)]
    assert [side["max_total_tokens"] for side in sides] == [96, 160]
    assert [side["disable_radix_cache"] for side in sides] == [True, False]
    with pytest.raises(ValueError, match="disaggregation_prefill needs engine"):
        Scenario(
            name="x",
            engine=EngineConfig(disaggregation_prefill=own),
            requests=(request("a", 5, seed=1),),
            script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
        )


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
