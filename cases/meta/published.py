"""Random tiny checkpoints of published architectures, made by Hugging Face's own classes, with configs as published.

Each draws the switches of its family. Weights are wide enough that every part of the arithmetic shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Raw = dict[str, Any]
HIDDEN, VOCAB = 32, 96
#: A published shape, made small.
SMALL_SHAPE = {"intermediate": 1024, "layers": 8, "heads": 8, "kv_heads": 2, "head_dim": 48, "hidden": 384}


def common(rng: Random, **more: Any) -> Raw:
    """What all configs have; heads do not fill the hidden width."""
    heads = rng.choice([2, 4])
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_hidden_layers": rng.randint(3, 4),
        "num_key_value_heads": rng.choice([1, 2]),
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": rng.choice([10000.0, 1000000.0]),
        "tie_word_embeddings": rng.random() < 0.3,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | more


def routed(rng: Random, name: str = "num_experts") -> Raw:
    """Experts and how many are chosen."""
    return {name: rng.choice([4, 6]), "num_experts_per_tok": rng.randint(1, 3), "moe_intermediate_size": 24}


def yarn(rng: Random, **more: Any) -> Raw:
    """A stretched rotation whose borders fall into a tiny head."""
    return {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1} | more


def rotated(rng: Random, raw: Raw) -> Raw:
    """One of the rotations that stretch, or none, in the older or the newer spelling."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds: list[Raw] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        llama3 | {"original_max_position_embeddings": 64},
        yarn(rng, rope_type="yarn", truncate=rng.random() < 0.5),
        yarn(rng, rope_type="yarn", mscale=0.7, mscale_all_dim=1.0),
        yarn(rng, rope_type="yarn", attention_factor=1.3),
    ]
    scaling = rng.choice(kinds)
    scaling.pop("type", None)
    if rng.random() < 0.5:
        theta = raw.pop("rope_theta")
        del raw["rope_scaling"]
        return raw | {"rope_parameters": scaling | {"rope_theta": theta}}
    scaling = {"type" if key == "rope_type" and rng.random() < 0.3 else key: value for key, value in scaling.items()}
    return raw | {"rope_scaling": scaling}


def windowed(rng: Random, raw: Raw) -> Raw:
    """Qwen's windows: none, from a layer on, or layer by layer."""
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(raw["num_hidden_layers"])]
    used = rng.random() < 0.7
    more = {"layer_types": kinds} if used and rng.random() < 0.4 else {}
    return raw | {"use_sliding_window": used, "sliding_window": 8, "max_window_layers": rng.choice([0, 1, 2])} | more


def llama(rng: Random) -> Raw:
    raw = rotated(rng, common(rng, architectures=["LlamaForCausalLM"], model_type="llama", pretraining_tp=1))
    if rng.random() < 0.5:
        del raw["head_dim"]
    return raw | {"attention_bias": rng.random() < 0.4, "mlp_bias": rng.random() < 0.4}


def mistral(rng: Random) -> Raw:
    raw = rotated(rng, common(rng, architectures=["MistralForCausalLM"], model_type="mistral"))
    del raw["attention_bias"]
    return raw | {"sliding_window": rng.choice([None, 8, 16])}


def qwen2(rng: Random) -> Raw:
    raw = rotated(rng, common(rng, architectures=["Qwen2ForCausalLM"], model_type="qwen2"))
    del raw["attention_bias"], raw["head_dim"]
    return windowed(rng, raw)


def qwen3(rng: Random) -> Raw:
    raw = rotated(rng, common(rng, architectures=["Qwen3ForCausalLM"], model_type="qwen3"))
    return windowed(rng, raw | {"attention_bias": rng.random() < 0.4})


def mixtral(rng: Random) -> Raw:
    raw = common(rng, architectures=["MixtralForCausalLM"], model_type="mixtral", **routed(rng, "num_local_experts"))
    del raw["moe_intermediate_size"], raw["attention_bias"]
    return raw | {"sliding_window": None, "output_router_logits": False, "router_aux_loss_coef": 0.02}


def _qwen_moe(rng: Random, kind: str, **more: Any) -> Raw:
    raw = common(rng, architectures=[f"{kind}MoeForCausalLM"], model_type=f"{kind.lower()}_moe", **routed(rng))
    raw |= {"norm_topk_prob": rng.random() < 0.5, "output_router_logits": False, "router_aux_loss_coef": 0.001}
    raw |= {"decoder_sparse_step": rng.choice([1, 2]), "mlp_only_layers": rng.choice([[], [0]])}
    return raw | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36} | more


def qwen2_moe(rng: Random) -> Raw:
    raw = _qwen_moe(rng, "Qwen2", shared_expert_intermediate_size=rng.choice([16, 24]))
    del raw["head_dim"], raw["attention_bias"]
    return raw


def qwen3_moe(rng: Random) -> Raw:
    return _qwen_moe(rng, "Qwen3")


def _latent(rng: Random, version: int) -> Raw:
    raw = common(rng, architectures=[f"DeepseekV{version}ForCausalLM"], model_type=f"deepseek_v{version}")
    groups = rng.choice([1, 2])
    raw |= {"q_lora_rank": rng.choice([None, 20]), "kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    raw |= {"v_head_dim": 10, "n_group": groups, "topk_group": 1, "n_routed_experts": 4 * groups, "ep_size": 1}
    raw |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": rng.choice([1, 2])}
    raw |= {"first_k_dense_replace": rng.choice([0, 1, 3]), "moe_layer_freq": 1, "seq_aux": True}
    raw |= {"routed_scaling_factor": rng.choice([1.0, 2.5]), "num_key_value_heads": raw["num_attention_heads"]}
    mscales = rng.choice([(1.0, 1.0), (0.707, 0.707), (0.7, 1.0)])
    stretched = yarn(rng, mscale=mscales[0], mscale_all_dim=mscales[1])
    raw["rope_scaling"] = rng.choice([None, stretched, stretched])
    del raw["head_dim"]
    return raw


def deepseek_v2(rng: Random) -> Raw:
    raw = _latent(rng, 2) | {"scoring_func": "softmax", "norm_topk_prob": False, "aux_loss_alpha": 0.001}
    return raw | {"topk_method": "greedy" if raw["n_group"] == 1 else "group_limited_greedy"}


def deepseek_v3(rng: Random) -> Raw:
    raw = _latent(rng, 3) | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
    return raw | {"norm_topk_prob": rng.random() < 0.7}


def glm4_moe_lite(rng: Random) -> Raw:
    raw = _latent(rng, 3) | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
    for key in ("ep_size", "moe_layer_freq", "seq_aux", "first_k_dense_replace"):
        del raw[key]  # the first of these layers is dense
    raw |= {"rope_scaling": None, "partial_rotary_factor": 1.0, "topk_method": "noaux_tc", "norm_topk_prob": True}
    return raw | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}


def glm4_moe(rng: Random) -> Raw:
    raw = common(rng, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", **routed(rng, "n_routed_experts"))
    raw |= {"attention_bias": rng.random() < 0.7, "partial_rotary_factor": 0.5, "use_qk_norm": rng.random() < 0.5}
    raw |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True}
    return raw | {"routed_scaling_factor": rng.choice([1.0, 2.5]), "num_nextn_predict_layers": 1}


def ernie(rng: Random) -> Raw:
    raw = common(rng, architectures=["Ernie4_5_MoeForCausalLM"], model_type="ernie4_5_moe")
    raw |= {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": rng.choice([0, 2])}
    raw |= {"moe_layer_start_index": 1, "moe_layer_interval": rng.choice([1, 2]), "moe_gate": "topk", "use_bias": False}
    raw |= {"num_nextn_predict_layers": 1, "moe_capacity": [64, 64, 64], "moe_use_aux_free": True}
    del raw["attention_bias"], raw["attention_dropout"], raw["head_dim"]
    return raw


def gpt_oss(rng: Random) -> Raw:
    raw = common(rng, architectures=["GptOssForCausalLM"], model_type="gpt_oss", **routed(rng, "num_local_experts"))
    del raw["moe_intermediate_size"]
    raw |= {"attention_bias": True, "experts_per_token": raw["num_experts_per_tok"], "initial_context_length": 64}
    layers = raw["num_hidden_layers"]
    raw["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    raw["rope_scaling"] = {"beta_fast": 8.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"}
    raw["rope_scaling"] |= {"original_max_position_embeddings": 64, "truncate": rng.random() < 0.3}
    raw |= {"sliding_window": rng.choice([8, 16]), "swiglu_limit": rng.choice([1.0, 7.0]), "tie_word_embeddings": False}
    return raw | {"output_router_logits": False, "router_aux_loss_coef": 0.9}


def qwen3_next(rng: Random) -> Raw:
    raw = common(rng, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", **routed(rng))
    raw |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False}
    raw |= {"full_attention_interval": rng.choice([2, 3]), "partial_rotary_factor": 0.25, "router_aux_loss_coef": 0.001}
    raw |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2}
    raw |= {"linear_num_value_heads": 4, "linear_value_head_dim": 6, "shared_expert_intermediate_size": 16}
    return raw | {"use_sliding_window": False}


def qwen3_5(rng: Random) -> Raw:
    raw = qwen3_next(rng) | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    for name in ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "output_router_logits", "num_experts"):
        del raw[name]
    for name in ("num_experts_per_tok", "moe_intermediate_size", "router_aux_loss_coef", "use_sliding_window"):
        del raw[name]
    for name in ("shared_expert_intermediate_size", "rope_scaling"):
        del raw[name]
    turns = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default"}
    turns |= {"rope_theta": raw.pop("rope_theta"), "partial_rotary_factor": raw["partial_rotary_factor"]}
    raw |= {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    return raw | {"rope_parameters": turns}


def nemotron_h(rng: Random) -> Raw:
    raw = common(rng, architectures=["NemotronHForCausalLM"], model_type="nemotron_h", tie_word_embeddings=False)
    for name in ("hidden_act", "rms_norm_eps", "rope_scaling", "rope_theta"):
        del raw[name]
    pattern = "M" + "".join(rng.choice("M*-") for _ in range(raw["num_hidden_layers"] - 2)) + "*"
    groups = rng.choice([1, 2])
    raw |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "layer_norm_epsilon": 1e-5}
    raw |= {"mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_n_groups": groups, "n_groups": groups, "expand": 2}
    raw |= {"ssm_state_size": rng.choice([8, 12]), "conv_kernel": rng.choice([2, 4]), "chunk_size": 16}
    raw |= {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "mlp_bias": False, "use_bias": False}
    raw |= {"mamba_proj_bias": False, "use_conv_bias": True, "rescale_prenorm_residual": True}
    raw |= {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001, "time_step_rank": 256}
    return raw | {"residual_in_fp32": False, "num_logits_to_keep": 1, "sliding_window": None}


def mimo(rng: Random) -> Raw:
    raw = common(rng, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    raw |= {"attention_bias": True, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 36}
    return raw | {"use_mrope": False}


#: What Hugging Face's class of a family is called, where it has none under the published name.
SAME_AS = {"mimo": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}}
FAMILIES: dict[str, Callable[[Random], Raw]] = {
    make.__name__: make
    for make in (
        llama,
        mistral,
        qwen2,
        qwen3,
        mixtral,
        qwen2_moe,
        qwen3_moe,
        deepseek_v2,
        deepseek_v3,
        glm4_moe,
        glm4_moe_lite,
        ernie,
        gpt_oss,
        qwen3_next,
        qwen3_5,
        nemotron_h,
        mimo,
    )
}


def make_target(family: str, seed: int, folder: Path) -> PreTrainedModel:
    """Write a random checkpoint of `family` into `folder` and return Hugging Face's model of it, float64."""
    raw = FAMILIES[family](Random(f"{family} {seed}"))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(raw | SAME_AS.get(family, {})))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="eager", torch_dtype=torch.float64
    ).eval()
    model.set_experts_implementation("eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        randomise(name, tensor.data)
    model.save_pretrained(folder)
    file.write_text(json.dumps(raw))
    return model


def randomise(name: str, tensor: torch.Tensor) -> None:
    """Values of a size that the parameter's part has in a trained model, all of them away from what does nothing."""
    if "inv_freq" in name or tensor.dtype == torch.int64:
        return
    with torch.no_grad():
        if name.endswith("norm.weight") or "layernorm" in name:
            tensor.add_(torch.randn_like(tensor) * 0.2)
        elif tensor.ndim >= 2 and "correction" not in name:
            tensor.normal_(std=1.3 * tensor.shape[-1] ** -0.5)
        else:
            tensor.normal_(std=0.3)


def add_tensors(folder: Path, more: dict[str, torch.Tensor]) -> None:
    """Put more tensors into a checkpoint folder."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name: tensor.contiguous() for name, tensor in more.items()}}, file)


def tokens_of(length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, int64 [length]."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))


def assert_like_hf(target: Any, hf: PreTrainedModel, tokens: torch.Tensor, *, close: float = 1e-5) -> None:
    """Every hidden state and the logits are Hugging Face's."""
    with torch.no_grad():
        theirs = hf(tokens[None], output_hidden_states=True)
    states = target.hidden_states(tokens)
    assert len(states) == len(theirs.hidden_states)
    for index, (mine, other) in enumerate(zip(states, theirs.hidden_states, strict=True)):
        assert torch.allclose(mine, other[0], rtol=0, atol=close), f"hidden state {index} differs from HF"
    assert torch.allclose(target.logits(states[-1]), theirs.logits[0], rtol=0, atol=close), "logits differ from HF"


def peak_of(work: Callable[[], object]) -> float:
    """MiB allocated at most while `work` runs: what the profiler saw taken and given back, added up.

    Weights are no part of it: on a CPU what is mapped of a file would count as taken.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    now = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 2**20
