"""Weights that change while an engine serves, memory that it gives back, adapters: scenarios, checks, reference."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from cases import adapters
from cases.families import FAMILIES
from cases.fixed import DRAIN, request, submit
from cases.meta import handmade
from cases.meta.sessions import assert_replayed, request_of
from cases.meta.speculating import FreeSession
from harness.checks.cached_rows import check_flushed
from harness.checks.compare import pairs_of
from harness.checks.evidence import gather
from harness.checks.judge import judge
from harness.cli.judges import provider
from harness.contract.measured import judged_states
from harness.contract.providers import WITNESS
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.tolerance import budget_for
from harness.contract.trace import Event
from harness.contract.types import Kind, Outcome, Phase
from harness.contract.usage import UsageError
from harness.driving.oracle import OWN, SEVERAL, of_requests, weights_in_force
from harness.driving.refusals import refusal, unpredicted, unwitnessed
from harness.engine_side.host import weights
from reference import lora
from reference.checkpoint import CheckpointError
from reference.pairs import load_pair

RELEASE, RESUME = (Op(kind="memory", name=name) for name in ("release", "resume"))
UPDATE = Op(kind="update", name="eagle-next")


def program(*script, **engine):
    return Scenario(
        name="x",
        engine=EngineConfig(**engine),
        requests=(request("a", 5, seed=1), request("b", 5, seed=2)),
        script=(*script, DRAIN),
    )


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ((submit("a", "b"), UPDATE), "behind a drain"),
        ((UPDATE.model_copy(update={"selector": "draft"}), submit("a", "b")), "one folder to all"),
        ((submit("a", "b"), Op(kind="pause"), UPDATE.model_copy(update={"mode": "retract"})), "inside a pause"),
        ((RESUME, submit("a", "b")), "release behind a drain"),
        ((RELEASE, submit("a", "b")), "while memory is released"),
        ((RELEASE, UPDATE, RESUME, submit("a", "b")), "while memory is released"),
    ],
)
def test_op_that_sglang_would_wait_with_for_ever_is_refused(script, why):
    with pytest.raises(ValidationError, match=why):
        program(*script)


def test_ops_between_requests_and_in_the_middle_of_them_are_taken():
    program(submit("a"), DRAIN, RELEASE, RESUME, UPDATE, submit("b"))
    program(submit("a", "b"), UPDATE.model_copy(update={"mode": "retract", "source": "tensor", "selector": "all"}))


def test_adapter_must_be_one_of_the_engine_and_no_weights_change_below_it():
    given = program(submit("a", "b"), lora_paths=("first",)).model_dump(mode="json")
    given["requests"][0]["lora_path"] = "second"
    with pytest.raises(ValidationError, match="is not in engine"):
        Scenario.model_validate(given)
    with pytest.raises(ValidationError, match="not driven with engine"):
        program(submit("a"), DRAIN, UPDATE, submit("b"), lora_paths=("first",))


# What SGLang is asked


@pytest.mark.parametrize(("version", "refused"), [("0.5.11", True), ("0.5.17", True), ("0.5.23", False)])
def test_an_update_that_a_release_does_not_have_is_refused_by_name_before_a_boot(version, refused):
    chosen = {one.name: one for one in FAMILIES["weights"].scenarios}
    said = refusal(chosen["weights-tensor-draft"], version=version, device="cpu")
    assert said.startswith(f"op 'update' of the draft alone, which SGLang {version} does not have") == refused
    assert bool(said) == refused
    assert refusal(chosen["weights-tensor-target"], version=version, device="cpu") == ""


def test_older_releases_have_no_update_of_the_draft_alone(monkeypatch):
    asked = {"op": "update", "source": "tensor", "selector": "draft"}
    monkeypatch.setattr(weights.importlib, "import_module", lambda _name: object())
    with pytest.raises(weights.NotThere):
        weights.messages(asked)
    assert weights.messages({**asked, "selector": "all"}) == [weights.TENSORS]
    assert weights.messages({**asked, "source": "disk"}) == [weights.DISK]
    assert weights.messages({"op": "memory", "what": "resume"}) == ["ResumeMemoryOccupationReqInput"]


# Checks


def event(name, step, **data):
    return Event(name=name, scheduler_step=step, data={"success": True, "message": "", "what": "x", **data})


def made(*events, same=True):
    """The third of three requests starts behind eight of nineteen tokens; the first had them, or other ones."""
    scenario = handmade.scenario(prompts=(19, 5, 19))
    first, second, third = scenario.requests
    third = third.model_copy(update={"input_ids": first.input_ids}) if same else third
    scenario = scenario.model_copy(update={"requests": (first, second, third)})
    engine, _ = handmade.build(scenario)
    gone, rounds = set(), []
    for record in engine.rounds:
        keep = [i for i, rid in enumerate(record.rids) if rid != "r2" or record.starts[i] >= 8]
        gone |= {record.index} if len(keep) < len(record.rids) else set()
        columns = ("rids", "attempts", "starts", "lens", "final")
        rounds.append(replace(record, **{name: tuple(getattr(record, name)[i] for i in keep) for name in columns}))
    rows = [
        i
        for i in range(len(engine.rows))
        if engine.rows.strings["rid"][i] == "r2" and engine.rows.ints["round"][i] in gone
    ]
    return scenario, replace(
        handmade.without_rows(engine, *rows), rounds=tuple(rounds), events=(*engine.events, *events)
    )


def test_prompt_may_start_from_what_another_request_had_and_from_nothing_else():
    assert not check_flushed(gather(*made(), None)).divergences
    (found,) = check_flushed(gather(*made(same=False), None)).divergences
    assert (found.kind, found.key.rid, found.observed, found.hint) == (Kind.CACHE_SLOT, "r2", 8, "thrown-away")


@pytest.mark.parametrize("name", ["flush", "update", "memory"])
def test_nothing_is_left_in_a_cache_that_was_emptied_since(name):
    scenario, engine = made(event(name, 3, flushed=True))
    first = next(record for record in engine.rounds if "r2" in record.rids)
    emptied = replace(engine, events=(event(name, first.scheduler_step, flushed=True),))
    (found,) = check_flushed(gather(scenario, emptied, None)).divergences
    assert (found.expected, found.observed) == (0, 8)
    failed = replace(engine, events=(event(name, first.scheduler_step, success=False, flushed=False),))
    assert not check_flushed(gather(scenario, failed, None)).divergences


def test_update_that_failed_is_unknown_with_the_words_of_sglang():
    scenario = handmade.scenario()
    engine, reference = handmade.build(scenario)
    failed = replace(engine, events=(*engine.events, event("update", 2, success=False, message="no such layer")))
    verdict, _ = judge(scenario, failed, reference)
    assert verdict.outcome is Outcome.UNKNOWN
    assert any("SGLang says: no such layer" in reason for reason in verdict.reasons)


# Whose weights


def test_weights_in_force_follow_the_updates_that_succeeded():
    engine, _ = handmade.build(handmade.scenario())
    events = (
        event("update", 1, what="one", selector="target"),
        event("update", 2, what="two", selector="draft", success=False),
        event("update", 3, what="three", selector="draft"),
        event("update", 9999, what="four", selector="all"),
    )
    changes = weights_in_force(replace(engine, events=events))
    assert changes == [(1, ("one", "", "")), (3, ("one", "three", "")), (9999, ("four", "four", ""))]
    assert set(of_requests(engine, changes).values()) <= {OWN, ("one", "", ""), ("one", "three", ""), SEVERAL}
    assert SEVERAL in of_requests(engine, changes).values()
    assert of_requests(engine, []) == {}


@pytest.fixture(scope="module")
def pairs(made_pair):
    return {name: made_pair(name) for name in ("eagle-tiny", "eagle-next")}


def sessions(pairs):
    return [FreeSession.of(pair) for pair in pairs.values()]


def test_reference_takes_the_head_that_was_in_force_or_that_of_the_request(pairs):
    old, new = sessions(pairs)
    one = request_of(random.Random(4), new=12)
    free = new.speculate(one, chunk=7)
    for how in ({"heads": [(0, old.head), (0, new.head)]}, {"adapted": {one.rid: new.head}}):
        assert_replayed(old, [one], free, **how)
    with pytest.raises(AssertionError):
        assert_replayed(old, [one], free, heads=[(99, new.head)])


# LoRA


@pytest.mark.parametrize("name", adapters.ADAPTERS)
def test_adapter_is_added_as_the_paper_says(pairs, tmp_path, name):
    target = pairs["eagle-tiny"].target
    folder = adapters.of_target(target, [name])[name]
    lora.adapted(target, adapter := adapters.beside(target, f"adapter-{name}"), tmp_path)
    assert str(adapter) == folder
    rank, alpha = adapters.ADAPTERS[name]
    parts, before = load_file(adapter / "adapter_model.safetensors"), load_file(target / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    for module in ("self_attn.q_proj", "mlp.up_proj"):
        key = f"model.layers.2.{module}"
        a, b = (parts[f"base_model.model.{key}.lora_{which}.weight"] for which in "AB")
        assert a.shape[0] == rank == b.shape[1]
        said = x @ before[f"{key}.weight"].T + alpha / rank * (x @ a.T) @ b.T
        assert torch.allclose(x @ after[f"{key}.weight"].T, said, atol=1e-5)
        assert not torch.allclose(after[f"{key}.weight"], before[f"{key}.weight"], atol=1e-3)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_what_an_engine_keeps_of_an_adapter_is_rounded_and_their_sum_is_not(pairs, tmp_path):
    target = pairs["eagle-tiny"].target
    adapters.of_target(target, ["first"])
    adapter = adapters.beside(target, "adapter-first")
    lora.adapted(target, adapter, tmp_path, held=torch.float16)
    parts, before = load_file(adapter / "adapter_model.safetensors"), load_file(target / "model.safetensors")
    after, key = load_file(tmp_path / "model.safetensors"), "model.layers.2.mlp.up_proj"
    a, b = (parts[f"base_model.model.{key}.lora_{which}.weight"].half().double() for which in "AB")
    rank, alpha = adapters.ADAPTERS["first"]
    said = before[f"{key}.weight"].half().double() + alpha / rank * (b @ a)
    assert torch.equal(after[f"{key}.weight"], said.float())
    assert not torch.equal(after[f"{key}.weight"], said.half().float())
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"].half())


@pytest.mark.parametrize("change", [{"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 2}}])
def test_adapter_of_another_method_is_refused(pairs, tmp_path, change):
    target = pairs["eagle-tiny"].target
    source = adapters.beside(target, "adapter-first")
    adapters.of_target(target, ["first"])
    config = json.loads((source / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(load_file(source / "adapter_model.safetensors"), tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=next(iter(change))):
        lora.adapted(target, tmp_path, tmp_path)


def test_adapter_of_another_model_is_refused(pairs, tmp_path):
    target = pairs["eagle-tiny"].target
    source = adapters.beside(target, "adapter-first")
    adapters.of_target(target, ["first"])
    (tmp_path / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    foreign = {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}
    save_file(foreign, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="no A and B"):
        lora.adapted(target, tmp_path, tmp_path)


# Arguments that change what a draft proposes, or what rows hold


def test_head_with_a_token_map_proposes_those_tokens_alone_and_as_before(pairs):
    _, head = load_pair(pairs["eagle-tiny"].target, pairs["eagle-tiny"].draft)
    only = (7, 500, 3)
    g = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    logits, free = head.proposing(only).logits(g), head.logits(g)
    assert torch.equal(logits[:, list(only)], free[:, list(only)])
    assert logits.isfinite().sum(-1).tolist() == [3] * 4
    assert head.only is None


@pytest.mark.parametrize("given", [{"token_map": (1, 1, 2)}, {"token_map": (1,), "algorithm": "EAGLE3"}])
def test_token_map_is_for_eagle_and_names_each_token_once(given):
    with pytest.raises(ValidationError, match="different token ids"):
        SpecConfig(**given)


@pytest.mark.parametrize("name", ["speculative_draft_window_size", "quantization"])
def test_argument_that_no_reference_follows_needs_a_witness(name):
    scenario = program(submit("a", "b"), server_args={name: 8})
    assert "--reference witness" in unpredicted(scenario)
    assert provider("auto", None, [scenario], say=lambda _text: None) == "witness"
    with pytest.raises(UsageError, match=name):
        provider("paper", None, [scenario], say=lambda _text: None)
    assert not unpredicted(program(submit("a", "b"), server_args={"speculative_draft_attention_backend": "triton"}))


@pytest.mark.parametrize(
    ("dtype", "asked", "refused"),
    [
        ("float32", "fp8_e4m3", True),
        ("float32", "bf16", False),
        ("bfloat16", "fp8_e4m3", True),
        ("bfloat16", "bf16", False),
        ("float32", "auto", False),
    ],
)
def test_cache_that_is_coarser_than_its_engine_has_no_witness(dtype, asked, refused):
    given = program(submit("a", "b"), dtype=dtype, server_args={"speculative_draft_kv_cache_dtype": asked})
    assert ("rounded one way or the other" in unwitnessed(given)) == refused


@pytest.mark.parametrize(("asked", "draft"), [("bf16", "bfloat16 cache"), ("auto", "float32")])
def test_rows_of_a_draft_are_as_coarse_as_its_cache_and_no_others(asked, draft):
    scenario = handmade.scenario(server_args={"speculative_draft_kv_cache_dtype": asked})
    evidence = gather(scenario, *handmade.build(scenario))
    assert {pairs_of(evidence, phase).budget.dtype for phase in (Phase.DRAFT, Phase.EXTEND)} == {draft}
    assert pairs_of(evidence, Phase.VERIFY).budget.dtype == "float32"


@pytest.mark.parametrize(
    ("name", "off", "wrong"),
    [
        ("hidden_in.EXTEND", 5e-3, True),
        ("hidden_out.EXTEND", 5e-3, False),
        ("hidden_in.DRAFT", 5e-3, False),
        ("hidden_out.VERIFY", 5e-3, True),
        ("hidden_out.EXTEND", 5e-2, True),
    ],
)
def test_what_a_target_hands_to_a_draft_with_a_coarse_cache_is_as_exact_as_the_target(name, off, wrong):
    scenario = handmade.scenario(server_args={"speculative_draft_kv_cache_dtype": "bf16"})
    engine, reference = handmade.build(scenario)
    tensor = engine.tensors[name]
    tensor[0, 0] += off * abs(tensor[0]).max()
    assert (Kind.NUMERIC in {one.kind for one in judge(scenario, engine, reference)[1]}) == wrong


@pytest.mark.parametrize(("off", "wrong"), [(5e-3, False), (5e-2, True)])
def test_logits_of_a_draft_with_a_coarse_cache_are_a_few_roundings_off_at_most(off, wrong):
    scenario = handmade.scenario(server_args={"speculative_draft_kv_cache_dtype": "bf16"})
    engine, reference = handmade.build(scenario)
    row = int((engine.rows.strings["phase"] == str(Phase.DRAFT)).argmax())
    logits = engine.rows.lists["top_logits"][row]
    logits[-1] -= off * abs(logits).max() + wrong * budget_for("bfloat16 cache").floor
    assert (Kind.NUMERIC in {one.kind for one in judge(scenario, engine, reference)[1]}) == wrong


@pytest.mark.parametrize(("deviation", "wrong"), [(4e-3, False), (0.5, True)])
def test_a_fault_in_all_rows_of_a_draft_does_not_pass_for_the_noise_of_its_cache(deviation, wrong):
    _, reference = handmade.build(handmade.scenario(prompts=(7, 5, 19, 11)))
    reference = replace(reference, header={"providers": {"draft": WITNESS}})
    truth = reference.tensors["hidden_in.DRAFT"]
    size = np.sqrt(np.square(truth).mean(axis=1, keepdims=True))
    engine = truth + deviation * size * np.random.default_rng(0).standard_normal(truth.shape)
    given = {"engine": engine, "at": np.arange(len(truth)), "budget": budget_for("bfloat16 cache")}
    assert (judged_states(reference, "hidden_in.DRAFT", **given).passed != wrong).all()


@pytest.mark.parametrize(("asked", "reasons"), [({}, 1), ({"speculative_accept_threshold_single": 0.5}, 0)])
def test_thresholds_that_a_verify_did_not_run_with_are_unknown(asked, reasons):
    scenario = handmade.scenario(server_args=asked)
    engine, reference = handmade.build(scenario)
    uniforms = Event(
        name="uniforms", scheduler_step=1, data={"round": 0, "rule": "x", "uniforms": {}, "thresholds": [0.5, 1.0]}
    )
    verdict, _ = judge(scenario, replace(engine, events=(*engine.events, uniforms)), reference)
    assert len([one for one in verdict.reasons if "and a verify ran with [0.5, 1.0]" in one]) == reasons
