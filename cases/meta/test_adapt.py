"""Engine options of a command line, and combinations that are refused before an engine is booted."""

from dataclasses import replace
from pathlib import Path

import pytest

from cases import catalogue
from cases.fixed import default_scenarios
from cases.meta.handmade import set_on
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.usage import UsageError
from harness.driving.adapt import Wanted, adapted
from harness.driving.refusals import check_possible, refusal, unattended, undrawn
from harness.engines.envs import EngineEnv
from harness.engines.launch import BOOT_CHUNK, GRAPH_SIZES, boot_chunk, build_launch, dtype_on

TREE = SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=5)
SCENARIO = default_scenarios()[0]


@pytest.fixture
def launched(tmp_path):
    env = EngineEnv(version="0.5.13", python=tmp_path, pythonpath=(), torch="2.11.0", ready=True)

    def launch(version="0.5.13", device="cuda", spec=None, probe=True, **engine):
        return build_launch(
            env=replace(env, version=version),
            spec=spec or SpecConfig(),
            engine=EngineConfig(**engine),
            target=tmp_path,
            draft=tmp_path,
            device=device,
            probe=probe,
        ).boot

    return launch


def test_what_is_not_named_stays_as_the_scenario_says():
    assert adapted([SCENARIO], Wanted(), device="cuda") == [SCENARIO]


def test_what_is_named_is_part_of_the_scenario_that_is_stored():
    wanted = Wanted(
        dtype="bfloat16", attention_backend="flashinfer", cuda_graph=True, overlap_schedule=False, page_size=4
    )
    (changed,) = adapted([SCENARIO], wanted, device="cuda")
    engine = changed.engine
    assert (engine.dtype, engine.attention_backend, engine.cuda_graph) == ("bfloat16", "flashinfer", True)
    assert (engine.overlap_schedule, engine.page_size) == (False, 4)
    assert changed.requests == SCENARIO.requests
    assert changed.id != SCENARIO.id


@pytest.mark.parametrize(
    ("wanted", "device", "said"),
    [
        (Wanted(dtype="float32"), "cuda", "float16, bfloat16"),
        (Wanted(dtype="float16"), "cpu", "float32"),
        (Wanted(attention_backend="fa3"), "cpu", "triton"),
        (Wanted(attention_backend="fa4"), "cuda", "fa3"),
        (Wanted(cuda_graph=True), "cpu", "--device cuda"),
        (Wanted(prefill_cuda_graph=True), "cuda", "--cuda-graph"),
        (Wanted(page_size=0), "cuda", "1 to 512"),
    ],
)
def test_a_value_the_device_does_not_have_is_refused_with_those_it_has(wanted, device, said):
    with pytest.raises(UsageError, match=said):
        adapted([SCENARIO], wanted, device=device)


CHAINED = {"checkpoint": "mtp-chained"}
GRAPHS = EngineConfig(cuda_graph=True)
DEEP = SpecConfig(algorithm="MTP", num_steps=8, eagle_topk=1, num_draft_tokens=9)


@pytest.mark.parametrize(
    ("changes", "version", "device", "said"),
    [
        ({"spec": TREE, "engine": EngineConfig(overlap_schedule=True)}, "0.5.12.post1", "cpu", "--disable-overlap-s"),
        ({"spec": TREE, "engine": EngineConfig(page_size=4)}, "0.5.11", "cpu", "--page-size 1"),
        ({"spec": TREE, "engine": EngineConfig(page_size=4, attention_backend="flashinfer")}, "0.5.11", "cpu", ""),
        ({"spec": TREE, "engine": EngineConfig(overlap_schedule=True, page_size=4)}, "0.5.13", "cpu", ""),
        ({"engine": EngineConfig(overlap_schedule=True, page_size=4)}, "0.5.11", "cpu", ""),
        ({"engine": EngineConfig(dtype="float16")}, "0.5.23", "cpu", r"engine\.dtype is 'float16'.*\n.*float32"),
        (CHAINED | {"spec": DEEP}, "0.5.23", "cpu", r"spec\.num_steps is 8.*\n.*1 to 4"),
        # it would stop in the middle, as a fault of our own (F-020 for layers that read each other's output)
        (CHAINED | {"engine": GRAPHS}, "0.5.13", "cuda", r"behind 0\.5\.14"),
        (CHAINED | {"engine": GRAPHS}, "0.5.17", "cuda", ""),
        (CHAINED | {"engine": EngineConfig()}, "0.5.13", "cuda", ""),
    ],
)
def test_what_a_release_would_refuse_or_do_otherwise_is_refused_first(changes, version, device, said):
    scenario = SCENARIO.model_copy(update={"spec": SpecConfig(), "engine": EngineConfig()} | changes)
    if not said:
        check_possible([scenario], version=version, device=device)
        return
    with pytest.raises(UsageError, match=said):
        check_possible([scenario], version=version, device=device)


def test_a_scenario_that_does_not_care_gets_a_dtype_the_device_has():
    assert dtype_on("cuda", "float32") == "float16"
    assert dtype_on("cuda", "bfloat16") == "bfloat16"
    assert dtype_on("cpu", "float32") == "float32"


def test_a_gpu_engine_gets_graphs_of_few_sizes_and_no_replacement_kernels(launched):
    boot = launched(cuda_graph=True)
    assert boot["arguments"]["dtype"] == "float16"
    assert boot["arguments"]["disable_cuda_graph"] is False
    assert boot["optional_arguments"]["cuda_graph_bs"] == list(GRAPH_SIZES)
    assert boot["optional_arguments"]["disable_prefill_cuda_graph"] is True
    asked = launched(cuda_graph=True, prefill_cuda_graph=True)["optional_arguments"]
    assert (asked["disable_prefill_cuda_graph"], asked["disable_piecewise_cuda_graph"]) == (False, False)
    assert asked["cuda_graph_bs_prefill"] == asked["piecewise_cuda_graph_tokens"]
    assert "TRITON_INTERPRET" not in boot["environment"]
    assert boot["flags"] == []
    assert launched(cuda_graph=False)["arguments"]["disable_cuda_graph"] is True
    assert "cuda_graph_bs" not in launched(cuda_graph=False)["optional_arguments"]


def test_overlap_on_a_gpu_is_what_the_release_does_by_default(launched):
    assert launched("0.5.13")["overlap"] is True
    assert launched("0.5.12.post1", spec=TREE)["overlap"] is False
    assert launched("0.5.13", overlap_schedule=False)["arguments"]["disable_overlap_schedule"] is True


@pytest.mark.parametrize(("given", "level"), [(True, "full"), (False, "off")])
def test_an_engine_has_a_probe_or_none(given, level, launched):
    assert launched(device="cpu", probe=given)["probe"] == level


@pytest.mark.parametrize(
    ("settings", "chunk"),
    [
        ({}, 4096),
        ({"max_total_tokens": 160}, 160),
        ({"max_total_tokens": 16}, BOOT_CHUNK),
        ({"max_total_tokens": 160, "page_size": 64}, 192),
        ({"max_total_tokens": 160, "chunked_prefill_size": 2048}, 2048),
        ({"max_total_tokens": 160, "page_size": 64, "tp_size": 2, "dp_size": 2}, 384),
        ({"max_total_tokens": 160, "disaggregation": True, "disaggregation_prefill": {"max_total_tokens": 300}}, 300),
    ],
)
def test_a_release_whose_batches_hold_no_more_than_its_chunk_boots_with_one_that_holds_the_pool(
    launched, settings, chunk
):
    """0.5.14 makes the buffers of eager batches once, for the chunk of the boot; the gate sets larger ones later."""
    assert launched("0.5.14", **settings)["arguments"]["chunked_prefill_size"] == chunk
    page, asked = settings.get("page_size", 1), settings.get("chunked_prefill_size")
    for version in ("0.5.13.post1", "0.5.15", "0.5.23"):
        assert launched(version, **settings)["arguments"]["chunked_prefill_size"] == boot_chunk(page, asked)


def test_attention_through_flashinfer_is_refused_where_a_bundle_lacks_its_sources(tmp_path):
    env = EngineEnv(version="0.5.23", python=tmp_path, pythonpath=(tmp_path,), torch="2", ready=True, unpacked=True)
    asked = adapted([SCENARIO], Wanted(attention_backend="flashinfer"), device="cuda")[0]
    assert "--part flashinfer" in unattended(asked, env)
    assert "a compiler that it has a stub of" in unattended(asked, replace(env, own_torch=True))
    assert not unattended(SCENARIO, env)
    assert not unattended(asked, replace(env, unpacked=False))
    source = tmp_path / "flashinfer" / "data" / "csrc" / "batch_decode.cu"
    source.parent.mkdir(parents=True)
    source.touch()
    assert not unattended(asked, env)


def test_a_stream_for_plans_is_refused_on_a_cpu():
    asked = adapted([SCENARIO], Wanted(enable_overlap_plan_stream=True), device="cpu")[0]
    assert "there are no streams on a CPU" in refusal(asked, version="0.5.23", device="cpu")
    assert not refusal(asked, version="0.5.23", device="cuda")


def test_what_a_bundle_without_flashinfer_cannot_draw_is_refused(tmp_path):
    env = EngineEnv(
        version="0.5.13", python=tmp_path, pythonpath=(tmp_path,), torch="2.11.0", ready=True, unpacked=True
    )
    chain, beside_greedy, rules = (
        catalogue.read_scenario(Path("cases/scenarios") / f"{name}.json")
        for name in ("sampled-chain", "sampled-rejection", "rules-rejection")
    )
    drawn = [one for one in beside_greedy.requests if not one.greedy]
    alone = beside_greedy.model_copy(update={"requests": tuple(drawn)})
    cut = rules.model_copy(update={"requests": tuple(one for one in rules.requests if one.rid == "top-p")})
    for scenario in (chain, beside_greedy, cut):
        assert "and SGLang 0.5.13 draws by flashinfer's kernels" in undrawn(scenario, env, device="cuda")
        assert not undrawn(scenario, env, device="cpu")
        assert not undrawn(scenario, replace(env, unpacked=False), device="cuda")
    assert not undrawn(alone, env, device="cuda")
    assert not undrawn(SCENARIO, env, device="cuda")
    (tmp_path / "flashinfer").mkdir()
    assert not undrawn(chain, env, device="cuda")


@pytest.mark.parametrize(
    ("version", "refused"), [("0.5.13", False), ("0.5.15", False), ("0.5.16", True), ("0.5.17", True), ("0.5.23", True)]
)
def test_what_no_transfer_serves_is_refused_before_a_boot(version, refused):
    """On 0.5.17 and 0.5.23 it ended as a defect of ours; on 0.5.13 it is a hang of SGLang's own (#23668)."""
    scenario = catalogue.read_scenario(Path(__file__).parents[1] / "scenarios" / "pd-retract-by-pause.json")
    why = refusal(scenario, version=version, device="cpu")
    assert bool(why) is refused
    if refused:
        assert "op 'retract' with engine.disaggregation" in why
        assert "a release before 0.5.16" in why
    alone = set_on(scenario, disaggregation=False)
    assert refusal(alone, version=version, device="cpu") == ""
