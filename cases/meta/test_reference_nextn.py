"""Next-token layers against Hugging Face's parts (see cases.meta.published_heads)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.meta.published import HIDDEN, VOCAB, add_tensors, make_target
from cases.meta.published_heads import BEHIND, BESIDE, make_pair
from reference.attention import Sight
from reference.checkpoint import CheckpointError
from reference.pairs import load_mixed, load_pair, load_target

CLOSE = 2e-5  # Hugging Face rotates and routes in float32
ROWS = 60


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", [*BEHIND, *BESIDE])
def test_a_next_token_layer_says_what_hf_parts_say(tmp_path, family, seed):
    hf, says = make_pair(family, seed, tmp_path)
    _, head = load_pair(tmp_path, tmp_path, torch.float64)
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS,), generator=source)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=source)
    theirs = says(tokens, hidden)
    mine, _ = head.forward(tokens, hidden, torch.arange(ROWS), Sight.causal(ROWS))
    assert (mine - theirs).abs().max() < CLOSE
    with torch.no_grad():
        assert (head.logits(mine) - hf.get_output_embeddings()(theirs)).abs().max() < CLOSE * 10


def test_a_layer_with_an_embedding_of_its_own_is_refused(tmp_path):
    hf, _ = make_pair("deepseek_v3", 1, tmp_path)
    name = f"model.layers.{hf.config.num_hidden_layers}.embed_tokens.weight"
    add_tensors(tmp_path, {name: hf.get_input_embeddings().weight.detach() * 2})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight' is not the target's"):
        load_pair(tmp_path, tmp_path)


def test_a_layer_shares_the_embedding_and_head_of_the_target_that_it_runs_behind(tmp_path):
    """What is in its folder are copies of its own target's, which other weights for the target do not change."""
    own, other, bare = (tmp_path / name for name in ("own", "other", "bare"))
    hf, _ = make_pair("deepseek_v3", 1, own)
    embed, head = (one.weight.detach() for one in (hf.get_input_embeddings(), hf.get_output_embeddings()))
    prefix = f"model.layers.{hf.config.num_hidden_layers}."
    copies = {f"{prefix}embed_tokens.weight": embed, f"{prefix}shared_head.head.weight": head}
    add_tensors(own, copies)
    shutil.copytree(own, other)
    add_tensors(other, {"model.embed_tokens.weight": embed.flip(0), "lm_head.weight": head * 2})
    shutil.copytree(own, bare)
    kept = {name: one for name, one in load_file(own / "model.safetensors").items() if name not in copies}
    save_file(kept, bare / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not the target's"):
        load_pair(other, own)
    wanted = load_pair(other, bare)[1]  # without the copies nothing says whose embedding and head they were
    mixed = load_mixed(other, own, own=own, held=torch.float32)
    tokens, rows = torch.arange(ROWS) % VOCAB, torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))
    said = [one.forward(tokens, rows, torch.arange(ROWS), Sight.causal(ROWS))[0] for one in (mixed, wanted)]
    assert torch.equal(*said)
    assert torch.equal(mixed.logits(rows), wanted.logits(rows))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_layer_in_a_folder_of_its_own_is_its_layer_0(tmp_path, family):
    """As it is published for SGLang (lmsys/DeepSeek-V3-NextN)."""
    whole, main, alone = (tmp_path / name for name in ("whole", "main", "alone"))
    hf, _ = make_pair(family, 1, whole)
    prefix, raw = f"model.layers.{hf.config.num_hidden_layers}.", json.loads((whole / "config.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    own = {name.replace(prefix, "model.layers.0."): one for name, one in tensors.items() if name.startswith(prefix)}
    parts = {main: {name: one for name, one in tensors.items() if not name.startswith(prefix)}, alone: own}
    named = {"architectures": [f"{raw['architectures'][0]}NextN"], "num_hidden_layers": 1}
    for folder, config in ((main, raw), (alone, raw | named)):
        folder.mkdir()
        save_file(parts[folder], folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    tokens, rows = torch.arange(ROWS) % VOCAB, torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))
    said = [
        load_pair(target, draft)[1].forward(tokens, rows, torch.arange(ROWS), Sight.causal(ROWS))[0]
        for target, draft in ((whole, whole), (main, alone))
    ]
    assert torch.equal(*said)
    (alone / "config.json").write_text(json.dumps(raw | named | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 2; this reference builds only 1"):
        load_pair(main, alone)
    with pytest.raises(CheckpointError, match="architectures is"):
        load_target(alone, provider="paper")


def test_a_folder_without_a_next_token_layer_names_what_is_missing(tmp_path):
    make_target("glm4_moe", 0, tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.layers.\d.input_layernorm.weight'"):
        load_pair(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight_scale_inv", "model.layers.{}.extra.weight"])
def test_a_tensor_that_nobody_reads_is_refused(tmp_path, name):
    hf, _ = make_pair("glm4_moe", 0, tmp_path)
    add_tensors(tmp_path, {name.format(hf.config.num_hidden_layers): torch.ones(3)})
    with pytest.raises(CheckpointError, match="nothing reads tensor"):
        load_pair(tmp_path, tmp_path)


def test_a_bias_that_chooses_experts_stays_as_it_is_stored(tmp_path):
    make_target("glm4_moe", 0, tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = load_file(tmp_path / "model.safetensors")[name].float() / 3
    add_tensors(tmp_path, {name: bias})
    target = load_target(tmp_path, held=torch.bfloat16)
    router = target.stack[1].mlp.router
    assert torch.equal(router.correction, bias)
    assert not torch.equal(bias.bfloat16().float(), bias)
    assert router.weight.dtype == torch.bfloat16
